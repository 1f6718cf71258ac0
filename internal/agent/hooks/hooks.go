// Package hooks answers the preStop hooks of a node's pods: it asks a coordinator, and the node's
// own gateway for as long as there is none.
package hooks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/agent/listen"
	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// waitPath is what the hooks of a pod ask.
	waitPath = keys.WaitPath + "{id}"
	// maxWaits bounds the pods that wait at one time, maxUnknown the hooks from this node whose pod
	// is not known yet, and the hooks of this kind from all other addresses together;
	// strangersOfOne those from one of these. More are answered 429.
	maxWaits       = 512
	maxUnknown     = 64
	strangersOfOne = 4
	// findTimeout is how long a hook waits for its pod to be known.
	findTimeout = 2 * time.Second
	// restartTimeout is how long a container is kept from being stopped while its pod stays,
	// liveTimeout what the live look at the pod may take of that.
	restartTimeout = 2 * time.Second
	liveTimeout    = time.Second
	// askAgain is how soon coordinators are tried again when there was none.
	askAgain = 250 * time.Millisecond
	// localIdle is how long this node's kernel, when nobody else can be asked, is waited for to be
	// Idle once it is Removed.
	localIdle = 10 * time.Second
	// localKept is how long after the deletion this node's kernel, when nobody else can be asked,
	// is taken at its word that it has nowhere else to send to, or cannot be read: until then it
	// may only be late.
	localKept = 2 * time.Second
	// countedFresh is how old the last count of connections may be when a coordinator lets a pod
	// go, countedLate how long another one is waited for.
	countedFresh = time.Second
	countedLate  = 500 * time.Millisecond
	// answerMargin is how much earlier than the hook must end a coordinator has to answer, so that
	// it can still say whom it waited for.
	answerMargin = 250 * time.Millisecond
	// maxID is the longest id that is looked up.
	maxID = 64
	// HeaderTime is how long a hook's request may take to arrive.
	HeaderTime = 5 * time.Second
)

// Server answers the hooks of this node's pods. Make it with New, serve its Handler, and run it
// with Run.
type Server struct {
	pods    *nodepods.Pods
	gateway gateway.Observed
	live    func(ctx context.Context, pod drain.Pod) (p nodepods.Pod, gone bool, err error)
	ask     func(context.Context, wire.Barrier) (wire.BarrierStatus, error)
	// addresses are this node's.
	addresses func() ([]net.Addr, error)
	m         *metrics
	log       *slog.Logger

	// stopping is closed when what waits must be answered.
	stopping chan struct{}

	mu   sync.Mutex
	open map[drain.UID]*wait
	// strangers counts the hooks whose pod is not known yet, by their address. This node's have one
	// entry, the zero address.
	strangers map[netip.Addr]int
	running   sync.WaitGroup
}

// wait is shared by all hooks of one pod.
type wait struct {
	done chan struct{}
	// text is set when done is closed.
	text string
}

// New returns a server for the hooks of pods. g is the node's gateway, ask asks a coordinator, see
// [client.Client.Barrier], and live reads a pod that the watch may be late for, see
// [nodepods.Live].
func New(pods *nodepods.Pods, g gateway.Observed, live func(context.Context, drain.Pod) (nodepods.Pod, bool, error),
	ask func(context.Context, wire.Barrier) (wire.BarrierStatus, error), r prometheus.Registerer, log *slog.Logger,
) *Server {
	return &Server{
		pods: pods, gateway: g, live: live, ask: ask, addresses: net.InterfaceAddrs, m: newMetrics(r), log: log,
		stopping: make(chan struct{}),
		open:     map[drain.UID]*wait{}, strangers: map[netip.Addr]int{},
	}
}

// Handler serves the hooks.
func (s *Server) Handler() http.Handler {
	r := mux.NewRouter()
	r.Methods(http.MethodGet).Path(waitPath).HandlerFunc(s.serve)
	return r
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	from := s.source(r)
	p, err := s.find(r.Context(), mux.Vars(r)["id"], from)
	switch {
	case errors.Is(err, errTooMany):
		s.refuse(w, http.StatusTooManyRequests, outTooMany)
		return
	case err != nil:
		s.refuse(w, http.StatusNotFound, outUnknown)
		return
	case from.IsValid() && !slices.ContainsFunc(p.Targets, func(t netip.AddrPort) bool {
		return t.Addr().Unmap() == from
	}):
		// The id is an annotation, which many may read: a hook from elsewhere would have a pod that
		// nobody deletes taken out of gateways.
		s.refuse(w, http.StatusForbidden, outForeign)
		s.log.Debug("hook of another address", "pod", p.Pod.String(), "from", from.String())
		return
	}
	one, err := s.join(p)
	if err != nil {
		s.refuse(w, http.StatusTooManyRequests, outTooMany)
		return
	}
	serve.KeepConn(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-one.done:
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(HeaderTime))
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			fmt.Fprintln(w, one.text)
		case <-r.Context().Done():
			// The kubelet has given up. Another container of the pod may still wait.
		}
	})).ServeHTTP(w, r)
}

// source returns the address that a hook comes from: the zero address if that is the node's own.
func (s *Server) source(r *http.Request) netip.Addr {
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	from := remote.Addr().Unmap().WithZone("")
	switch {
	case err != nil:
		return netip.IPv6Unspecified() // of no pod and no node
	case from.IsLoopback():
		return netip.Addr{}
	}
	addresses, err := s.addresses()
	if err != nil {
		s.log.Warn("read the addresses of this node", "error", err)
	}
	for _, a := range addresses {
		if own, err := netip.ParsePrefix(a.String()); err == nil && own.Addr().Unmap().WithZone("") == from {
			return netip.Addr{}
		}
	}
	return from
}

func (s *Server) refuse(w http.ResponseWriter, code int, why outcome) {
	s.m.waits.WithLabelValues(string(why)).Inc()
	http.Error(w, string(why), code)
}

var (
	errTooMany = errors.New("too many hooks wait")
	errUnknown = errors.New("no pod of this node has this id")
)

// find waits for the pod with an id to be known. from is where the hook comes from.
func (s *Server) find(ctx context.Context, id string, from netip.Addr) (nodepods.Pod, error) {
	if len(id) > maxID {
		return nodepods.Pod{}, errUnknown
	}
	p, ok, changed := s.pods.Find(id)
	if ok {
		return p, nil
	}
	if !s.admit(from) {
		return nodepods.Pod{}, errTooMany
	}
	defer s.forget(from)
	timer := time.NewTimer(findTimeout)
	defer timer.Stop()
	for !ok {
		select {
		case <-changed:
		case <-timer.C:
			return nodepods.Pod{}, errUnknown
		case <-s.stopping:
			return nodepods.Pod{}, errUnknown
		case <-ctx.Done():
			return nodepods.Pod{}, errUnknown
		}
		p, ok, changed = s.pods.Find(id)
	}
	return p, nil
}

// admit counts a hook from an address whose pod is not known yet. It reports false if there are too
// many.
func (s *Server) admit(from netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.strangers[from]
	if from.IsValid() {
		if all >= strangersOfOne {
			return false
		}
		all = 0
		for of, n := range s.strangers {
			if of.IsValid() {
				all += n
			}
		}
	}
	if all >= maxUnknown {
		return false
	}
	s.strangers[from]++
	return true
}

// forget takes back an admit.
func (s *Server) forget(from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.strangers[from]--; s.strangers[from] == 0 {
		delete(s.strangers, from)
	}
}

// join returns the wait of a pod, which it begins if there is none.
func (s *Server) join(p nodepods.Pod) (*wait, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if one := s.open[p.Pod.UID]; one != nil {
		return one, nil
	}
	if len(s.open) >= maxWaits {
		return nil, errTooMany
	}
	one := &wait{done: make(chan struct{})}
	select {
	case <-s.stopping:
		// running may be waited for already, and nothing may be added to it then.
		s.m.waits.WithLabelValues(string(outStopping)).Inc()
		one.text = string(outStopping)
		close(one.done)
		return one, nil
	default:
	}
	s.open[p.Pod.UID] = one
	s.m.waiting.Inc()
	s.running.Go(func() {
		began := time.Now()
		why, detail := s.wait(p)
		for !s.leave(&p, why) {
			why, detail = s.wait(p)
		}
		took := time.Since(began)
		s.m.waits.WithLabelValues(string(why)).Inc()
		s.m.waited.Observe(took.Seconds())
		s.m.waiting.Dec()
		s.log.Info("hook is answered", "pod", p.Pod.String(), "uid", p.Pod.UID, "outcome", why, "detail", detail,
			"seconds", took.Seconds())
		one.text = fmt.Sprintf("%s after %.3fs", why, took.Seconds())
		if detail != "" {
			one.text += ": " + detail
		}
		close(one.done)
	})
	return one, nil
}

// leave ends the wait of p, so that hooks which come from now on begin another one. If it was for a
// container, and the pod itself has been deleted meanwhile, hooks of the deletion may have joined
// it: then p is the pod that is going, and it has to wait again.
func (s *Server) leave(p *nodepods.Pod, why outcome) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if is, ok := s.going(*p); ok && why == outRestart {
		*p = is
		return false
	}
	delete(s.open, p.Pod.UID)
	return true
}

// going returns p as it is known now, if it has been deleted and is not gone.
func (s *Server) going(p nodepods.Pod) (is nodepods.Pod, ok bool) {
	is, ok, _ = s.pods.Find(p.ID)
	return is, ok && is.Pod.UID == p.Pod.UID && !is.Since.IsZero()
}

// count returns how many pods wait.
func (s *Server) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// wait returns when the pod may be told to stop, and why.
func (s *Server) wait(p nodepods.Pod) (why outcome, detail string) {
	began := time.Now()
	if p.Since.IsZero() {
		// The watch may be late: the kubelet has another one.
		ctx, cancel := context.WithTimeout(context.Background(), liveTimeout)
		is, gone, err := s.live(ctx, p.Pod)
		cancel()
		switch {
		case gone:
			return outGone, ""
		case err != nil:
			detail = err.Error()
			p = s.deletion(p, began.Add(liveTimeout))
		default:
			p = is
		}
		if p.Since.IsZero() {
			return s.restart(p, began.Add(restartTimeout), detail)
		}
	}
	deadline := p.Deadline()
	switch {
	case !began.Before(deadline):
		return outNoTime, fmt.Sprintf("the deletion allows %s, %s of it are the application's", p.Allowed, p.Grace)
	case len(p.Targets) == 0:
		return outNoTargets, ""
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	return s.barrier(ctx, p, deadline)
}

// deletion waits for the watch to tell that p was deleted, until then at most.
func (s *Server) deletion(p nodepods.Pod, until time.Time) nodepods.Pod {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	for {
		is, ok, changed := s.pods.Find(p.ID)
		if ok && is.Pod.UID == p.Pod.UID && !is.Since.IsZero() {
			return is
		}
		select {
		case <-changed:
		case <-timer.C:
			return p
		case <-s.stopping:
			return p
		}
	}
}

// restart tells directed gateways of a container that is about to be stopped though its pod stays:
// the kubelet restarts it, evicts the pod or shuts the node down. It returns by until, and at once
// when the pod is deleted.
func (s *Server) restart(p nodepods.Pod, until time.Time, detail string) (outcome, string) {
	ctx, cancel := context.WithDeadline(context.Background(), until)
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel()
	looking.Go(func() {
		defer cancel()
		for {
			is, ok, changed := s.pods.Find(p.ID)
			if ok && is.Pod.UID == p.Pod.UID && !is.Since.IsZero() {
				return
			}
			select {
			case <-changed:
			case <-s.stopping:
				return
			case <-ctx.Done():
				return
			}
		}
	})
	passed, err := s.ask(ctx, wire.Barrier{Pod: p.Pod, Targets: p.Targets, Since: time.Now().UTC(),
		BoundMillis: time.Until(until).Milliseconds()})
	switch {
	case err == nil:
		return outRestart, passed.Reason
	case detail == "":
		detail = err.Error()
	}
	return outRestart, detail
}

// answer is a coordinator's.
type answer struct {
	passed wire.BarrierStatus
	err    error
}

// barrier asks a coordinator, and this node's kernel for as long as there is none. It returns at
// the deadline of ctx at the latest.
func (s *Server) barrier(ctx context.Context, p nodepods.Pod, deadline time.Time) (outcome, string) {
	changed := make(chan struct{}, 1)
	local := gateway.WatchSettled(s.gateway, p.Targets, func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	defer local.Close()
	answers := make(chan answer, 1)
	var asking sync.WaitGroup
	defer asking.Wait() // for a moment: ctx is done by then
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	asking.Go(func() { answers <- s.askBarrier(ctx, p, deadline) })
	alone := false
	trouble := ""
	var removedAt, passedAt time.Time
	var passed wire.BarrierStatus
	for {
		// Looked at on every turn, so that a state which was entered while a coordinator answered
		// is not missed.
		now := time.Now()
		is := local.Reading()
		switch {
		case is.State < health.Removed:
			removedAt = time.Time{}
		case removedAt.IsZero():
			removedAt = now
		}
		if alone && stopped(is, now, p.Seen, removedAt) {
			return outLocal, "this node's kernel is " + is.State.String() + "; " + trouble
		}
		if !passedAt.IsZero() {
			if why, over := mayStop(is, passed, now, passedAt, removedAt); over {
				return why, outcomeText(passed)
			}
			if now.Sub(is.Counted) > countedFresh {
				local.Count()
			}
		}
		// While a coordinator is being asked, its answer wakes. Alone, coordinators are tried
		// again; a count wakes only if it changes the state.
		pause := time.Until(deadline)
		switch {
		case alone:
			pause = min(pause, askAgain)
		case !passedAt.IsZero():
			pause = min(pause, countedLate/20)
		}
		timer := time.NewTimer(pause)
		select {
		case a := <-answers:
			switch {
			case a.err == nil:
				passed, passedAt, alone = a.passed, time.Now(), false
			case ctx.Err() == nil:
				alone, trouble = true, a.err.Error()
				asking.Go(func() { answers <- s.askBarrierAgain(ctx, p, deadline) })
			}
		case <-changed:
		case <-timer.C:
		case <-s.stopping:
			timer.Stop()
			return outStopping, ""
		case <-ctx.Done():
			timer.Stop()
			if !passedAt.IsZero() {
				return outcome(drain.IdleBound.String()), outcomeText(passed)
			}
			return outBound, trouble
		}
		timer.Stop()
	}
}

// askBarrier asks a coordinator, which answers when p may be told to stop, [answerMargin] before
// deadline at the latest.
func (s *Server) askBarrier(ctx context.Context, p nodepods.Pod, deadline time.Time) answer {
	passed, err := s.ask(ctx, wire.Barrier{
		Pod: p.Pod, Targets: p.Targets, Since: p.Since, Terminating: true,
		BoundMillis:   max(0, deadline.Sub(p.Seen)-answerMargin).Milliseconds(),
		ElapsedMillis: time.Since(p.Seen).Milliseconds(),
	})
	return answer{passed, err}
}

// askBarrierAgain is askBarrier after a pause of [askAgain].
func (s *Server) askBarrierAgain(ctx context.Context, p nodepods.Pod, deadline time.Time) answer {
	pause := time.NewTimer(askAgain)
	defer pause.Stop()
	select {
	case <-pause.C:
		return s.askBarrier(ctx, p, deadline)
	case <-ctx.Done():
		return answer{err: ctx.Err()}
	}
}

// mayStop reports whether a pod may be told to stop, and with which outcome, that a coordinator has
// let go at passedAt. The kernel of the pod's own node sees every connection to it: also those that
// came since that agent last reported Idle, from nodes that are not asked or by a load balancer,
// and those that the pod or one of its Services wants waited for.
func mayStop(is gateway.Reading, passed wire.BarrierStatus, now, passedAt, removedAt time.Time) (outcome, bool) {
	why := outcome(passed.Reason)
	acknowledged := passed.Reason == drain.Acknowledged.String()
	switch {
	case !acknowledged && passed.Reason != drain.IdleBound.String(), is.State < health.Removed:
		return why, true
	case is.Connections > 0 && now.Sub(removedAt) < time.Duration(passed.IdleBoundMillis)*time.Millisecond:
		return "", false
	case !acknowledged:
		return why, true
	case is.State == health.Removed:
		return outcome(drain.IdleBound.String()), now.Sub(is.Since) >= localIdle
	}
	return why, now.Sub(is.Counted) <= countedFresh || now.Sub(passedAt) >= countedLate
}

// stopped says whether this node's kernel alone is enough, when nobody else can be asked. All times
// are by this node's clock.
func stopped(is gateway.Reading, now, began, removedAt time.Time) bool {
	late := now.Sub(began) >= localKept
	switch is.State {
	case health.Idle:
		return true
	case health.Removed:
		return now.Sub(removedAt) >= localIdle
	case health.Kept:
		return is.NoConnections && late
	case health.Unknown:
		return late
	default:
		return false
	}
}

func outcomeText(p wire.BarrierStatus) string {
	text := ""
	for i, w := range p.Waiting {
		if i == 3 {
			return fmt.Sprintf("%s and %d more", text, len(p.Waiting)-3)
		}
		if i > 0 {
			text += ", "
		}
		text += w
	}
	if p.Cut {
		text += " (a stated wait is longer than the bound)"
	}
	return text
}

// Run holds the agent up while hooks wait, for grace at most once ctx is done, and then answers
// what is left. Hooks that come meanwhile are served: refused, they would end at once.
func (s *Server) Run(ctx context.Context, grace time.Duration) error {
	<-ctx.Done()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	<-time.After(min(grace, listen.LookEvery)) // somebody may have connected, and not asked yet
	for over := false; !over && s.count() > 0; {
		select {
		case <-timer.C:
			over = true
		case <-ticker.C:
		}
	}
	s.mu.Lock() // see join
	close(s.stopping)
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

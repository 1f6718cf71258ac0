// Package hooks answers the preStop hooks of a node's pods, on the node agent. It asks a
// coordinator whether the pod may stop or, while none can be asked, relies on the node's own
// gateway. The coordinator's side is barrier.go in package coordinator; the hook in the pod is an
// httpGet or cmd/lameduck-wait.
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
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

const (
	// waitPath is the path of hooks.
	waitPath = keys.WaitPath + "{id}"
	// maxWaits bounds the pods that wait simultaneously. maxUnknown bounds the hooks from this node
	// whose pod is not known yet, and separately those from all other addresses together;
	// strangersOfOne bounds those from one such address. Hooks beyond a bound are answered 429.
	maxWaits       = 512
	maxUnknown     = 64
	strangersOfOne = 4
	// findTimeout is how long a hook waits for its pod to be known, startTimeout how long while
	// this agent has not listed the node's pods yet.
	findTimeout  = 2 * time.Second
	startTimeout = 15 * time.Second
	// restartTimeout is how long the stop of a container is delayed if its pod stays, liveTimeout
	// the part of it that a live read of the pod may take.
	restartTimeout = 2 * time.Second
	liveTimeout    = time.Second
	// maxID is the longest id that is looked up.
	maxID = 128
	// HeaderTime bounds the arrival of a body, and the write of a hook's answer.
	HeaderTime = 5 * time.Second
)

// Server answers the hooks of this node's pods. Make it with New, serve its Handler, and run it
// with Run.
type Server struct {
	pods    *nodepods.Pods
	gateway gateway.Observed
	live    func(ctx context.Context, pod drain.Pod) (p nodepods.Pod, gone bool, err error)
	ask     func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error)
	// addresses are this node's.
	addresses func() ([]net.Addr, error)
	m         *metrics
	log       *slog.Logger

	// stopping is closed when all waiting hooks must be answered.
	stopping chan struct{}

	mu   sync.Mutex
	open map[drain.UID]*wait
	// strangers counts the hooks whose pod is not known yet, by their address. Those from this node
	// are counted under the zero address.
	strangers map[netip.Addr]int
	running   sync.WaitGroup
}

// wait is shared by all hooks of one pod.
type wait struct {
	done chan struct{}
	// text is set before done is closed.
	text string
}

// New returns a server for the hooks of pods. g is the node's gateway. ask asks a coordinator, as
// Client.Barrier in package client does. live reads a pod from the API server when the watch may be
// late, as [nodepods.Live] does.
func New(pods *nodepods.Pods, g gateway.Observed, live func(context.Context, drain.Pod) (nodepods.Pod, bool, error),
	ask func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error), r prometheus.Registerer,
	log *slog.Logger,
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
		// The id is an annotation, which many clients may read: a hook from elsewhere could take a
		// pod that is not being deleted out of its gateways.
		s.refuse(w, http.StatusForbidden, outForeign)
		s.log.Debug("refused a hook: not from this node or its pod", "pod", p.Pod.String(), "from", from.String())
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
			// The kubelet has closed the connection. Another container of the pod may still wait.
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

// find waits until the pod with an id is known. from is the address of the hook.
func (s *Server) find(ctx context.Context, id string, from netip.Addr) (nodepods.Pod, error) {
	if len(id) > maxID {
		return nodepods.Pod{}, errUnknown
	}
	p, ok, _ := s.pods.Find(id)
	if ok {
		return p, nil
	}
	if !s.admit(from) {
		return nodepods.Pod{}, errTooMany
	}
	defer s.forget(from)
	most := findTimeout
	if !s.pods.Synced() {
		most = startTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	if p, ok = s.await(ctx, id, func(nodepods.Pod) bool { return true }); !ok {
		return nodepods.Pod{}, errUnknown
	}
	return p, nil
}

// await waits until is returns true for the pod with an id, or until ctx is done.
func (s *Server) await(ctx context.Context, id string, is func(nodepods.Pod) bool) (nodepods.Pod, bool) {
	for {
		p, ok, changed := s.pods.Find(id)
		if ok && is(p) {
			return p, true
		}
		select {
		case <-changed:
		case <-s.stopping:
			return p, false
		case <-ctx.Done():
			return p, false
		}
	}
}

// admit counts a hook from an address whose pod is not known yet. It returns false if there are too
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

// forget undoes an admit.
func (s *Server) forget(from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.strangers[from]--; s.strangers[from] == 0 {
		delete(s.strangers, from)
	}
}

// join returns the wait of a pod, and begins one if there is none.
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
		// Run may be waiting for running already: adding to it would be a race.
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

// leave ends the wait of p, so that later hooks begin another one. If the wait was for the stop of
// a container and the pod has become terminating in the meantime, hooks of the deletion may have
// joined it. Then leave sets p to the terminating pod and returns false: the caller must wait
// again.
func (s *Server) leave(p *nodepods.Pod, why outcome) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if is, ok, _ := s.pods.Find(p.ID); ok && deleted(*p)(is) && why == outRestart {
		*p = is
		return false
	}
	delete(s.open, p.Pod.UID)
	return true
}

// deleted returns a function that reports whether a pod is p and terminating.
func deleted(p nodepods.Pod) func(nodepods.Pod) bool {
	return func(is nodepods.Pod) bool { return is.Pod.UID == p.Pod.UID && !is.Since.IsZero() }
}

// count returns how many pods wait.
func (s *Server) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// wait blocks until the pod may be told to stop, and returns why.
func (s *Server) wait(p nodepods.Pod) (why outcome, detail string) {
	began := time.Now()
	if p.Since.IsZero() {
		// The kubelet has its own watch, so this agent's may be behind.
		ctx, cancel := context.WithTimeout(context.Background(), liveTimeout)
		is, gone, err := s.live(ctx, p.Pod)
		if gone {
			cancel()
			return outGone, ""
		}
		ok := err == nil
		if err != nil {
			detail = err.Error()
			is, ok = s.await(ctx, p.ID, deleted(p))
		}
		cancel()
		if ok {
			p = is
		}
		if p.Since.IsZero() {
			passed, detail := s.restart(p, began.Add(restartTimeout), detail)
			if !passed.Terminating {
				return outRestart, detail
			}
			// The deletion was just before the hook, unless the kubelet was restarted.
			p.Since, p.Seen = began.UTC(), began
			p.Allowed = time.Duration(passed.GraceMillis) * time.Millisecond
		}
	}
	return s.barrier(p)
}

// restart makes directed gateways exclude a pod whose container is about to be stopped although the
// pod stays: the kubelet restarts the container, evicts the pod or shuts the node down. It returns
// by until, or as soon as the pod is terminating, with the answer of a coordinator.
func (s *Server) restart(p nodepods.Pod, until time.Time, detail string) (wire.BarrierStatus, string) {
	ctx, cancel := context.WithDeadline(context.Background(), until)
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel()
	looking.Go(func() {
		defer cancel()
		s.await(ctx, p.ID, deleted(p))
	})
	ask := wire.BarrierRequest{Pod: p.Pod, Targets: p.Targets, Since: time.Now().UTC(),
		BoundMillis: time.Until(until).Milliseconds()}
	passed, err := s.ask(ctx, ask)
	if err != nil && ctx.Err() == nil {
		// A coordinator that would leave the hook to others takes it after half of its time.
		ask.BoundMillis = time.Until(until).Milliseconds()
		ask.ElapsedMillis = (ask.BoundMillis + 1) / 2
		passed, err = s.ask(ctx, ask)
	}
	switch {
	case err == nil:
		return passed, passed.Reason
	case detail == "":
		detail = err.Error()
	}
	return passed, detail
}

// answer is the answer of a coordinator.
type answer struct {
	passed wire.BarrierStatus
	err    error
}

// barrier walks through the steps of a [Wait].
func (s *Server) barrier(p nodepods.Pod) (outcome, string) {
	changed := signal.New()
	local := s.gateway.Watch(p.Targets, changed.Raise)
	defer local.Close()
	answers := make(chan answer, 1)
	var asking sync.WaitGroup
	defer asking.Wait() // short: ctx is done by then
	ctx, cancel := context.WithDeadline(context.Background(), p.Deadline())
	defer cancel()
	for w := NewWait(time.Now(), p); ; {
		if is, ok, _ := s.pods.Find(p.ID); ok && deleted(p)(is) && is.Deadline().Before(w.pod.Deadline()) {
			w.pod = is // it was deleted again, with a shorter grace period
		}
		// On every turn, so that a state that was entered while a coordinator answered is not
		// missed.
		w.Look(time.Now(), local.Reading())
		if w.Over {
			return w.Outcome, w.detail
		}
		if w.Ask != nil {
			ask := *w.Ask
			asking.Go(func() {
				passed, err := s.ask(ctx, ask)
				answers <- answer{passed, err}
			})
		}
		if w.Count {
			local.Count()
		}
		timer := time.NewTimer(time.Until(w.Wake))
		select {
		case a := <-answers:
			w.Answered(time.Now(), a.passed, a.err)
		case <-changed:
		case <-timer.C:
		case <-s.stopping:
			timer.Stop()
			return outStopping, ""
		}
		timer.Stop()
	}
}

// Run returns when no hook waits any more after ctx is done, or after grace. It then answers the
// remaining hooks. Until then new hooks are accepted, because a refused hook ends immediately and
// its pod stops.
func (s *Server) Run(ctx context.Context, grace time.Duration) error {
	<-ctx.Done()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	<-time.After(min(grace, listen.LookEvery)) // a hook may have connected, but not sent its request yet
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

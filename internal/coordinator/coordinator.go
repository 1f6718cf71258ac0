// Package coordinator runs the ledger of one webhook replica. It blocks admission calls until their
// drain is released, streams drains to agents, and receives their reports. It also answers the
// other replicas, and reads pods of abandoned drains from the API server.
//
// A mutex protects the ledger. It is never held during network I/O, logging or waiting. A caller
// that waits for a pod waits on a channel, which is closed when something may have changed for the
// pod, and then looks again. An agent's stream is woken through a channel of size one, and then
// sends everything that changed since it last sent. [Core] makes all decisions, and has neither
// locks nor I/O. Package admission decides which calls to hold.
package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Tick is how often the ledger is checked for drains that no call asks for.
const Tick = time.Second

const (
	// LookTimeout bounds the live read of one pod, maxLookups the number of reads in one tick.
	LookTimeout = 5 * time.Second
	maxLookups  = 50
	// DefaultHolds and DefaultHoldsPerOwner are the usual bounds of waiting calls.
	DefaultHolds         = 64
	DefaultHoldsPerOwner = 8
	// maxLockHeld and maxTickGap are how long [Coordinator.Live] waits for the lock, and for the
	// last tick.
	maxLockHeld = time.Second
	maxTickGap  = 10 * time.Second
	// rightsEvery is how often the rights of agents with a stream are checked. rightsAtOnce bounds
	// the rights that are asked about simultaneously: a slow API server holds each up.
	rightsEvery  = 10 * time.Second
	rightsAtOnce = 10
	// deletedFor is how long an agent whose pod is deleted is refused. Answers about its token are
	// not remembered for longer than that: for 6 min, while the API server is away.
	deletedFor = 7 * time.Minute
)

// Life is the result of a live read of a pod UID.
type Life uint8

const (
	// LifeUnknown: the read failed.
	LifeUnknown Life = iota
	// Living: the pod exists, with this UID and without deletionTimestamp.
	Living
	// Leaving: it is terminating.
	Leaving
	// Gone: no pod has its name, or another one has.
	Gone
)

// Pods reads pods live, not from a cache.
type Pods interface {
	Life(ctx context.Context, pod drain.Pod) (Life, error)
}

// ErrTooManyHolds is returned by [Coordinator.Drain] for a call that must be answered immediately
// because as many calls as allowed wait already. The drain continues.
var ErrTooManyHolds = errors.New("too many deletions are held by this replica")

// ErrTooManyOfOwner is an ErrTooManyHolds because as many calls as allowed wait for pods of the
// same owner.
var ErrTooManyOfOwner = fmt.Errorf("of one owner: %w", ErrTooManyHolds)

// ErrTooManyOwners is returned by [Coordinator.Drain] for a call of a workload controller, because
// calls for as many other owners of that kind as [OwnersHeld] wait already.
var ErrTooManyOwners = errors.New("pods of too many other owners are held")

// ErrStopping is returned by [Coordinator.Drain] for calls that wait when the coordinator stops,
// and after.
var ErrStopping = errors.New("this replica is shutting down")

// Options configure a Coordinator.
type Options struct {
	// MaxHolds bounds the calls that wait simultaneously. It must be positive: with 0 no call
	// waits.
	MaxHolds int
	// MaxHoldsPerOwner bounds the waiting calls for pods of one owner, so that one rollout does not
	// use up all of them. 0: no bound but MaxHolds.
	MaxHoldsPerOwner int
	// Pods reads a pod from the API server before its drain is abandoned.
	Pods Pods
	// PodContexts has the Services of a pod at the barrier.
	PodContexts PodContexts
	// Scope chooses which nodes are asked at the barrier. The zero value asks a sample of large
	// clusters.
	Scope drain.Scope
	// Sampling has the sizes of samples of nodes. Zero: [drain.DefaultSampling].
	Sampling drain.Sampling
	// MaxBarriers bounds the hooks that wait, of which those of one agent are a quarter at most. 0:
	// 2048.
	MaxBarriers int
	// Claimant decides for witnesses whether a deletion may take capacity.
	Claimant Claimant
	// Able returns why this replica cannot decide on deletions now, or nil. Elsewhere reports
	// whether another one can then, and has most agents. May be nil.
	Able      func() error
	Elsewhere func() bool
	// Shown returns what this replica contributes to the page of another one: its view, its report
	// of the mode observe, or its explanation of a pod.
	Shown func(r *http.Request) (any, error)
	// Authenticate identifies agents and replicas by their bearer tokens, and checks their rights.
	Authenticate Authenticator
	Log          *slog.Logger
	Metrics      *Metrics
}

// Coordinator is one replica. Make it with New, then Run it.
type Coordinator struct {
	Options

	// mu protects core and the fields down to later. It is held for one step of core, or for those
	// of agents that wait, for maxTurn, never during I/O, logging or a wait.
	mu   sync.RWMutex
	core *Core
	// waiting holds the pods for which calls wait.
	waiting map[drain.UID]*wait
	// barred are closed to make the hooks that wait for a pod look again.
	barred map[drain.UID]chan struct{}
	// ticked is when the ledger was last checked.
	ticked time.Time
	// seen is for operators.
	seen         *history
	targetHealth healthReports
	// later is what release has to do without the lock, such as to log.
	later []func()
	stop  chan struct{}

	// turns protects next, the steps of agents for which one of them waits for mu. Nil: none does.
	turns sync.Mutex
	next  *batch
}

// batch is steps of agents. taken is closed when they were taken.
type batch struct {
	steps []func()
	taken chan struct{}
}

// wait is what calls that wait for one pod share.
type wait struct {
	calls int
	// changed is closed, and replaced, when status has changed.
	changed chan struct{}
	status  drain.Status
}

// New returns a coordinator with an empty ledger.
func New(self drain.Holder, times drain.Times, o Options) *Coordinator {
	now := time.Now()
	c := &Coordinator{
		Options: o, waiting: map[drain.UID]*wait{}, barred: map[drain.UID]chan struct{}{}, ticked: now,
		seen: newHistory(), stop: make(chan struct{}),
	}
	c.core = NewCore(now, self, times, &c.Options)
	return c
}

// Run checks drains that no call asks for, and the rights of agents, until ctx is done. It returns
// nil then. Calls that wait at that moment return ErrStopping.
func (c *Coordinator) Run(ctx context.Context) error {
	ticker := time.NewTicker(Tick)
	defer ticker.Stop()
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { c.watchRights(ctx) })
	// An API server that does not answer must not delay the checks of the ledger.
	free := make(chan struct{}, 1)
	free <- struct{}{}
	for {
		select {
		case <-ctx.Done():
			c.Stop()
			return nil
		case <-ticker.C:
		}
		pods, over := c.tick(time.Now())
		select {
		case <-free:
			asking.Go(func() {
				c.lookAtBarriers(ctx, over)
				c.look(ctx, pods)
				free <- struct{}{}
			})
		default: // the ledger names them again
		}
	}
}

// Live returns why this replica has to be restarted, or nil. It does not depend on agents or on the
// API server.
func (c *Coordinator) Live() error {
	ticked := make(chan time.Time, 1)
	go func() {
		c.mu.RLock()
		defer c.mu.RUnlock()
		ticked <- c.ticked
	}()
	timer := time.NewTimer(maxLockHeld)
	defer timer.Stop()
	select {
	case at := <-ticked:
		if since := time.Since(at); since > maxTickGap {
			return fmt.Errorf("no tick of the ledger for %s", since.Round(time.Second))
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("the lock of the ledger was not free within %s", maxLockHeld)
	}
}

// Stop makes every waiting call, and every later one, return ErrStopping immediately, and ends the
// agents' streams. It may be called any number of times.
func (c *Coordinator) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.core.stopped {
		c.core.Stop()
		close(c.stop)
	}
}

// tick is one turn of Run. See [Core.Tick].
func (c *Coordinator) tick(now time.Time) (pods, over []drain.Pod) {
	c.change(func() { pods, over = c.core.Tick(now); c.ticked = now })
	return pods, over
}

// look reads the pods of drains.
func (c *Coordinator) look(ctx context.Context, pods []drain.Pod) {
	for _, pod := range pods {
		lookCtx, cancel := context.WithTimeout(ctx, LookTimeout)
		life, err := c.Pods.Life(lookCtx, pod)
		cancel()
		if err != nil {
			c.Log.Warn("read pod of a drain that no call asks for", "pod", pod.String(), "uid", pod.UID, "error", err)
			continue
		}
		c.change(func() { c.core.Read(time.Now(), pod.UID, life) })
	}
}

// Request is a call's request for a drain.
type Request struct {
	Pod drain.Pod
	// Owner names the pod's controller, such as "ReplicaSet/uid". Empty: it has none, and no bound
	// per owner applies.
	Owner string
	// Controller is the kind of the pod's controller, such as "ReplicaSet", if that one calls.
	Controller string
	// Targets are the Services that list the pod, with their usable targets.
	Targets []drain.Targets
	// Place is what another replica knows of the drain, Turn whether its call may wait.
	Place drain.Place
	Turn  Turn
	// BarrierWaits: Removed is enough for this call, because the pod waits for Idle at its barrier.
	// Workload is the pod's, see [Core.Hooks].
	BarrierWaits bool
	Workload     string
}

// Drain opens a drain of a pod or joins the open one, and waits until it is released or closed, or
// until the time until. It returns the status at that moment, and whether the call waited. An error
// is ErrTooManyHolds, ErrTooManyOwners, ErrStopping or that of the context. The status is then
// valid too and the drain continues, but the call must not be allowed. With ErrTooManyOwners, there
// may be no drain.
func (c *Coordinator) Drain(
	ctx context.Context, request Request, until time.Time,
) (status drain.Status, held bool, err error) {
	c.mu.Lock()
	defer c.unlock()
	if err := ctx.Err(); err != nil {
		// The caller has gone while this waited for the lock. A release then is not an answer that
		// has allowed the deletion.
		now := time.Now()
		status, _ = c.core.Claim(now, request)
		c.core.Ledger.Unanswered(request.Pod.UID, now.Before(until))
		return status, false, err
	}
	h := c.core.Hold(time.Now(), request, until)
	c.settle()
	if !h.Over {
		if OwnersHeld[request.Controller] > 0 {
			of := c.Metrics.byKind.WithLabelValues(request.Controller)
			of.Inc()
			defer of.Dec()
		}
		c.wait(ctx, h)
	}
	if h.Err == nil && h.Status.Reason == drain.BarrierWaits {
		c.seen.left(time.Now(), request.Pod.UID)
	}
	return h.Status, h.Waited, h.Err
}

// wait, called with the lock, rechecks a call until it is over. It releases the lock between
// checks.
func (c *Coordinator) wait(ctx context.Context, h *Hold) {
	c.Metrics.holds.Inc()
	defer c.Metrics.holds.Dec()
	w := c.waiting[h.uid]
	if w == nil {
		w = &wait{changed: make(chan struct{})}
		c.waiting[h.uid] = w
	}
	w.calls++
	defer func() {
		if w.calls--; w.calls == 0 {
			delete(c.waiting, h.uid)
		}
	}()
	for told := false; !h.Over; {
		changed := w.changed
		c.release()
		if !told {
			// Let other calls of this moment open their drains, so that agents receive all of them
			// in one message.
			runtime.Gosched()
			c.change(func() {})
			told = true
		}
		timer := time.NewTimer(time.Until(h.Wake()))
		var status *drain.Status
		var err error
		select {
		case <-changed:
			status = &w.status
		case <-timer.C:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.stop:
		}
		timer.Stop()
		c.mu.Lock()
		if err != nil {
			h.GiveUp(time.Now(), err)
		} else {
			h.Recheck(time.Now(), status)
		}
		if !h.Over {
			c.settle()
			c.core.Notify()
		}
	}
}

// Unroute asks agents to stop routing to a pod whose deletion does not wait. It does not wait for
// gateways.
func (c *Coordinator) Unroute(request Request) {
	c.change(func() { c.core.Unroute(time.Now(), request) })
}

// GatePassed records that a pod is terminating or deleted.
func (c *Coordinator) GatePassed(uid drain.UID) {
	c.change(func() { c.core.GatePassed(time.Now(), uid) })
}

// Expect replaces the list of agents that exist according to the API.
func (c *Coordinator) Expect(expected []drain.Expected) {
	c.mu.Lock()
	defer c.unlock()
	c.core.Expect(time.Now(), expected)
	n := c.core.Ledger.Counts()
	c.Metrics.agents.WithLabelValues("expected").Set(float64(n.Expected))
	c.Metrics.agents.WithLabelValues("missing").Set(float64(n.Missing))
	c.Metrics.agents.WithLabelValues("suspended").Set(float64(n.Suspended))
}

// Expecting returns how many agents are expected, and how many of them are not connected here
// although their containers have started.
func (c *Coordinator) Expecting() (expected, missing int) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n := c.core.Ledger.Counts()
	return n.Expected, n.Missing
}

// Agent returns what this replica knows of an agent. The ID is empty if it knows nothing.
func (c *Coordinator) Agent(id drain.AgentID) drain.AgentInfo {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Ledger.Agent(id)
}

// CouldRoute reports whether some directed agent may route one of services, as far as is known.
func (c *Coordinator) CouldRoute(services []drain.Service) bool {
	return c.Asks(drain.AtHold, services)
}

// Asks is [drain.Ledger.Asks].
func (c *Coordinator) Asks(g drain.Gate, services []drain.Service) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Ledger.Asks(g, services)
}

// Hooks is [Core.Hooks].
func (c *Coordinator) Hooks(node, workload string) Hooks {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Hooks(time.Now(), node, workload)
}

// Pod returns what is known of a pod.
func (c *Coordinator) Pod(uid drain.UID) drain.Standing {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Ledger.Pod(uid)
}

// Draining is [Core.Draining]. It takes the lock once for all of pods, because each time it may
// have to wait for the step of another caller.
func (c *Coordinator) Draining(pods []drain.UID) int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Draining(pods)
}

// change runs how with the lock, and carries out the effects.
func (c *Coordinator) change(how func()) {
	c.mu.Lock()
	defer c.unlock()
	how()
}

// maxTurn is how long the steps of agents may take until other callers have the lock.
const maxTurn = 10 * time.Millisecond

// inTurn is change for agents. One agent waits for the lock, takes the steps of all that have come
// until it has the lock, and settles once, because the step of each may change every open drain. So
// deletions wait for one agent's turn at a time, not for those of a thousand. Steps that are left
// after maxTurn are taken in turns of their own.
func (c *Coordinator) inTurn(how func()) {
	c.turns.Lock()
	first := c.next == nil
	if first {
		c.next = &batch{taken: make(chan struct{})}
	}
	b := c.next
	b.steps = append(b.steps, how)
	c.turns.Unlock()
	for again := first; again; {
		c.change(func() {
			c.turns.Lock()
			if c.next == b {
				c.next = nil
			}
			c.turns.Unlock()
			for began := time.Now(); len(b.steps) > 0 && time.Since(began) < maxTurn; b.steps = b.steps[1:] {
				b.steps[0]()
			}
			if again = len(b.steps) > 0; !again {
				c.later = append(c.later, func() { close(b.taken) })
			}
		})
	}
	<-b.taken
}

// locked runs how with the lock.
func (c *Coordinator) locked(how func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	how()
}

// unlock carries out the effects of the steps that were taken with the lock, and releases it.
func (c *Coordinator) unlock() {
	c.settle()
	c.core.Notify()
	c.release()
}

// release releases the lock, and then does what was left for later, so that a slow log delays only
// its writer.
func (c *Coordinator) release() {
	later := c.later
	c.later = nil
	c.mu.Unlock()
	for _, do := range later {
		do()
	}
}

// settle, called with the lock, carries out the effects of the steps, except waking streams.
func (c *Coordinator) settle() {
	e := c.core.Settle(time.Now())
	for _, s := range e.Entered {
		c.entered(s)
	}
	for _, s := range e.Changed {
		if w := c.waiting[s.Pod.UID]; w != nil {
			close(w.changed)
			w.changed, w.status = make(chan struct{}), s
		}
	}
	for _, uid := range e.Barriers {
		if changed := c.barred[uid]; changed != nil {
			close(changed)
			delete(c.barred, uid)
		}
	}
	for _, m := range e.Measured {
		c.measure(m)
	}
	for _, s := range e.Suspensions {
		c.Metrics.agents.WithLabelValues("suspended").Set(float64(c.core.Ledger.Counts().Suspended))
		c.later = append(c.later, func() {
			if s.Over {
				c.Log.Info("agent is not suspended any more", "agent", s.Name, "id", s.Agent,
					"acknowledged", s.Acknowledged)
				return
			}
			c.Log.Error("agent is suspended: it did not acknowledge several drains in a row",
				"agent", s.Name, "id", s.Agent)
		})
	}
	for _, pod := range e.Missed {
		c.Metrics.missed.Inc()
		c.later = append(c.later, func() {
			c.Log.Warn("deletion was left to the barrier, and no hook has asked", "pod", pod.String(), "uid", pod.UID)
		})
	}
	for _, s := range e.Cut {
		c.connected()
		c.later = append(c.later, func() {
			c.Log.Info("stream of an agent ended by this replica", "agent", s.Who.Name, "id", s.Who.Agent, "why", s.Why)
		})
	}
}

// entered, called with the lock, records that a drain has entered another phase.
func (c *Coordinator) entered(s Entered) {
	if s.Before != drain.PhaseUnknown {
		c.Metrics.drains.WithLabelValues(s.Before.String()).Dec()
	}
	if s.Phase != drain.Closed && s.Phase != drain.PhaseUnknown {
		c.Metrics.drains.WithLabelValues(s.Phase.String()).Inc()
	}
	c.seen.turned(time.Now(), s.Status)
	took := time.Since(s.Begun)
	c.Metrics.phase.WithLabelValues(s.Phase.String(), s.Reason.String()).Observe(took.Seconds())
	c.later = append(c.later, func() {
		c.Log.Info("drain", append(outcome(s.Status), "sinceSeconds", took.Seconds())...)
	})
}

// outcome returns the log attributes of a drain or a barrier.
func outcome(s drain.Status) []any {
	return []any{"pod", s.Pod.String(), "uid", s.Pod.UID, "phase", s.Phase.String(), "reason", s.Reason.String(),
		"owed", s.Owed, "waitingFor", names(s.Waiting), "suspended", names(s.Suspended), "lost", names(s.Lost),
		"away", names(s.Away), "moreAway", s.MoreAway}
}

// maxNamed bounds the agents that are named as waited for: when a drain begins, these are all.
const maxNamed = 20

func names(waiting []drain.Waiting) []string {
	all := make([]string, 0, min(len(waiting), maxNamed+1))
	for i, w := range waiting {
		if i == maxNamed {
			return append(all, fmt.Sprintf("and %d more", len(waiting)-i))
		}
		all = append(all, w.Name+" ("+w.State.String()+")")
	}
	return all
}

// Package coordinator gives one replica's ledger a clock, a voice and ears: it holds callers until
// their drain is released, streams drains to agents, takes their reports, and asks the API about
// drains that nobody asks for any more.
//
// The ledger belongs to a mutex that is never held while anything is sent, read, logged or waited
// for. A caller that waits is woken by a channel that is closed when something may have changed for
// its pod, and then asks the ledger again; an agent's stream is woken through a channel of size one
// and then reads everything that changed since what it sent last.
package coordinator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// tick is how often the ledger is asked which drains nobody asks for.
const tick = time.Second

const (
	// lookTimeout bounds the live read of one pod, maxLookups how many are read a tick.
	lookTimeout = 5 * time.Second
	maxLookups  = 50
	// maxLockHeld and maxTickGap are how long [Coordinator.Live] waits for the lock, and for the
	// last tick.
	maxLockHeld = time.Second
	maxTickGap  = 10 * time.Second
	// rightsEvery is how often the rights of agents with a stream are looked at.
	rightsEvery = 10 * time.Second
	// deletedFor is how long agents are refused whose pod is deleted: no answer about their token
	// is remembered for longer.
	deletedFor = 2 * time.Minute
)

// Life is what a live read says of a pod UID.
type Life uint8

const (
	// LifeUnknown: the read failed; nothing is concluded.
	LifeUnknown Life = iota
	// Living: the pod exists, with this UID and without deletionTimestamp.
	Living
	// Leaving: it is terminating, gone, or another pod has its name.
	Leaving
)

// Pods reads pods live, not from a cache.
type Pods interface {
	Life(ctx context.Context, pod drain.Pod) (Life, error)
}

// ErrTooManyHolds is returned by [Coordinator.Drain] for a call that must be answered at once
// because as many as allowed wait already. The drain runs on.
var ErrTooManyHolds = errors.New("too many deletions are held by this replica")

// ErrTooManyOfOwner is the ErrTooManyHolds of a call whose pod's owner has as many as it may.
var ErrTooManyOfOwner = fmt.Errorf("of one owner: %w", ErrTooManyHolds)

// ErrStopping is returned by [Coordinator.Drain] for calls that wait when the coordinator stops,
// and after.
var ErrStopping = errors.New("this replica is shutting down")

// Options are what a Coordinator needs besides its ledger.
type Options struct {
	// MaxHolds bounds the calls that wait at one time.
	MaxHolds int
	// MaxHoldsPerOwner bounds those that wait for pods of one owner, so that one rollout does not
	// keep all others from being held. 0: no bound but MaxHolds.
	MaxHoldsPerOwner int
	Pods             Pods
	// PodContexts is asked at the barrier. Nil: this replica serves none.
	PodContexts PodContexts
	// Scope says who is asked there, Sampling when that is a sample; the zero value is the default.
	// MaxBarriers bounds those that wait at one time. 0: 2048.
	Scope       drain.Scope
	Sampling    drain.Sampling
	MaxBarriers int
	// Claimant judges deletions for the others; nil: none asks. Able is why this replica cannot
	// judge deletions now; nil: it always can.
	Claimant Claimant
	Able     func() error
	// Authenticate tells who an agent is by its bearer token.
	Authenticate Authenticator
	Log          *slog.Logger
	Metrics      *Metrics
}

// Coordinator is one replica. Make it with New, then Run it.
type Coordinator struct {
	Options
	self  drain.Holder
	times drain.Times

	mu     sync.Mutex
	ledger *drain.Ledger
	// waiting holds the pods for which calls wait.
	waiting map[drain.UID]*wait
	// barred are the hooks that wait at the barrier, barriers counts them.
	barred   map[drain.UID]chan struct{}
	barriers int
	// told holds how agents are told of drains, each written once. See [Coordinator.tellOf].
	told map[openArgs][]byte
	// streams holds each agent's newest.
	streams map[drain.AgentID]*stream
	// deleted holds the pods that the watch has lately shown deleted, and when.
	deleted map[drain.UID]time.Time
	// looked holds the pod of a drain, and that of a barrier, that were read last. ticked is when
	// the ledger was last looked at.
	looked [2]drain.UID
	ticked time.Time
	holds  int
	// began is the zero of the clock that goes over the wire.
	began time.Time

	// turns holds, for each owner and for all, the pods that calls may wait for.
	turns map[string][]turn
	// asked is when the API server last asked about each pod that has an open drain. reliedOn are
	// those of them that another replica has left to this one.
	asked    map[drain.UID]time.Time
	reliedOn map[drain.UID]struct{}
	// phases holds the last phase that was written down of each open drain.
	phases map[drain.UID]drain.Phase
	// seen is for operators.
	seen         *history
	targetHealth healthReports
	// unsaid holds the transitions that unlock has to log.
	unsaid  []func()
	stop    chan struct{}
	stopped bool
}

// wait is what calls that wait for one pod share.
type wait struct {
	calls int
	// changed is closed, and replaced, when status is another.
	changed chan struct{}
	status  drain.Status
}

// New returns a coordinator with an empty ledger.
func New(self drain.Holder, times drain.Times, o Options) *Coordinator {
	if o.Sampling == (drain.Sampling{}) {
		o.Sampling = drain.DefaultSampling()
	}
	c := &Coordinator{
		Options: o, self: self, times: times, ledger: drain.NewLedger(times, o.Scope, o.Sampling),
		waiting: map[drain.UID]*wait{}, streams: map[drain.AgentID]*stream{}, phases: map[drain.UID]drain.Phase{},
		turns: map[string][]turn{}, asked: map[drain.UID]time.Time{}, reliedOn: map[drain.UID]struct{}{},
		seen:  newHistory(),
		began: time.Now(), ticked: time.Now(), deleted: map[drain.UID]time.Time{},
		stop:   make(chan struct{}),
		barred: map[drain.UID]chan struct{}{},
		told:   map[openArgs][]byte{},
	}
	if c.Able == nil {
		c.Able = func() error { return nil }
	}
	return c
}

// Run looks after drains that nobody asks for, and after the rights of agents, until ctx is done.
// It returns nil then. Calls that wait at that moment return ErrStopping.
func (c *Coordinator) Run(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { c.watchRights(ctx) })
	// An API server that does not answer must not keep the ledger from being looked at.
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

// Live reports why this replica has to be started again. It does not depend on agents or on the API
// server.
func (c *Coordinator) Live() error {
	ticked := make(chan time.Time, 1)
	go func() {
		c.mu.Lock()
		defer c.mu.Unlock()
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

// clock is what this replica writes into messages, and reads from what agents say again:
// milliseconds of its life, never 0.
func (c *Coordinator) clock(now time.Time) int64 { return now.Sub(c.began).Milliseconds() + 1 }

// asOf is when the message was written that an agent had taken in last when it read what it
// reports. Nobody's word is from the future.
func (c *Coordinator) asOf(now time.Time, at int64) time.Time {
	if at == 0 || at > c.clock(now) {
		return now
	}
	return c.began.Add(time.Duration(at-1) * time.Millisecond)
}

// Stop makes every call that waits return ErrStopping, and every later one at once, and ends the
// agents' streams. It may be called any number of times.
func (c *Coordinator) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		c.stopped = true
		close(c.stop)
	}
}

// tick is one turn of Run. It returns the pods of drains that nobody has asked for lately, and
// those of barriers that are overdue, as many as are to be read now.
func (c *Coordinator) tick(now time.Time) (pods, over []drain.Pod) {
	c.mu.Lock()
	defer c.unlock()
	c.ticked = now
	pods, over = c.ledger.Tick(now)
	c.dropTurns(now)
	for i, of := range []*[]drain.Pod{&pods, &over} {
		*of = following(*of, c.looked[i])
		if n := len(*of); n > 0 {
			c.looked[i] = (*of)[n-1].UID
		}
	}
	for id, s := range c.streams {
		if !s.who.Until.IsZero() && !now.Before(s.who.Until) {
			c.cut(now, id, "the token has ended")
		}
	}
	maps.DeleteFunc(c.deleted, func(_ drain.UID, at time.Time) bool { return now.Sub(at) >= deletedFor })
	c.settle()
	return pods, over
}

// following sorts pods and returns those that come after last, then those before, [maxLookups] at
// most.
func following(pods []drain.Pod, last drain.UID) []drain.Pod {
	slices.SortFunc(pods, func(a, b drain.Pod) int {
		return cmp.Or(first(a.UID > last, b.UID > last), cmp.Compare(a.UID, b.UID))
	})
	return pods[:min(len(pods), maxLookups)]
}

// look reads the pods of drains.
func (c *Coordinator) look(ctx context.Context, pods []drain.Pod) {
	for _, pod := range pods {
		lookCtx, cancel := context.WithTimeout(ctx, lookTimeout)
		life, err := c.Pods.Life(lookCtx, pod)
		cancel()
		if err != nil {
			c.Log.Warn("read pod of a drain that nobody asks for", "pod", pod.String(), "uid", pod.UID, "error", err)
			continue
		}
		switch life {
		case Living:
			c.change(func() { c.ledger.NotTerminating(time.Now(), pod.UID) })
		case Leaving:
			c.GatePassed(pod.UID)
		}
	}
}

// Request is what a call asks of a coordinator.
type Request struct {
	Pod drain.Pod
	// Owner names what made the pod, such as "ReplicaSet/uid". Empty: nothing, and then no owner's
	// bound applies.
	Owner string
	// Targets are the Services that list the pod, with their usable targets.
	Targets []drain.Targets
	// Place is what another replica says of the drain, Turn whether its call may wait.
	Place drain.Place
	Turn  Turn
}

// Drain opens a drain of a pod or joins the open one, and waits until it is released, closed, or
// until comes; the status that it returns is that of this moment. With an error (ErrTooManyHolds,
// ErrStopping, the context's) the status is good too, and the drain runs on: the caller must not
// take it for an answer to allow.
func (c *Coordinator) Drain(
	ctx context.Context, request Request, until time.Time,
) (status drain.Status, held bool, err error) {
	pod := request.Pod
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	status = c.ledger.Ask(now, pod, request.Targets, request.Place)
	c.note()
	defer c.notify()
	c.observe(status)
	if c.phases[pod.UID] != drain.PhaseUnknown {
		c.asked[pod.UID] = now
	}
	var crowded error
	switch request.Turn {
	case TurnJudged:
		crowded = c.inTurn(now, request)
	case TurnUnheld:
		crowded = ErrTooManyHolds
	}
	answered := c.ledger.Hold(pod.UID)
	defer func() {
		answered(time.Now(), err == nil && (status.Phase == drain.Released || status.Phase == drain.Closed))
	}()
	if c.stopped {
		return status, false, ErrStopping
	}
	if !status.Waits() || !time.Now().Before(until) {
		return status, false, nil
	}
	if crowded == nil && c.holds >= c.MaxHolds {
		crowded = ErrTooManyHolds
	}
	if crowded != nil {
		return status, false, crowded
	}
	status, err = c.hold(ctx, pod.UID, status, until)
	return status, true, err
}

// hold, called with the lock, waits until the drain of uid is released or closed, or until comes.
// It gives up the lock meanwhile, and returns the status of the moment at which it ends.
func (c *Coordinator) hold(
	ctx context.Context, uid drain.UID, status drain.Status, until time.Time,
) (drain.Status, error) {
	c.holds++
	c.Metrics.holds.Inc()
	defer func() {
		c.holds--
		c.Metrics.holds.Dec()
	}()
	w := c.waiting[uid]
	if w == nil {
		w = &wait{changed: make(chan struct{})}
		c.waiting[uid] = w
	}
	w.calls++
	defer func() {
		if w.calls--; w.calls == 0 {
			delete(c.waiting, uid)
		}
	}()
	for told := false; status.Waits(); {
		now := time.Now()
		if !now.Before(until) {
			return status, nil
		}
		wake := until
		if !status.Recheck.IsZero() && status.Recheck.Before(wake) {
			wake = status.Recheck
		}
		changed, known := w.changed, false
		c.unlock()
		if !told {
			// Others that ask at this moment do so now, and the agents hear of all of them at once.
			runtime.Gosched()
			c.mu.Lock()
			c.notify()
			c.unlock()
			told = true
		}
		timer := time.NewTimer(wake.Sub(now))
		var err error
		select {
		case <-changed:
			known = true
		case <-timer.C:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.stop:
			err = ErrStopping
		}
		timer.Stop()
		c.mu.Lock()
		if known {
			// To ask the ledger once more would take as long as there are agents.
			status = w.status
		} else {
			status = c.ledger.Status(time.Now(), drain.AtHold, uid)
			c.settle()
			c.observe(status)
		}
		if err == nil && c.stopped {
			// What has changed may be that the streams end.
			err = ErrStopping
		}
		if err != nil {
			return status, err
		}
	}
	return status, nil
}

// Unroute asks agents to let go of a pod whose deletion does not wait. It never blocks.
func (c *Coordinator) Unroute(request Request) {
	c.mu.Lock()
	defer c.unlock()
	c.ledger.Ask(time.Now(), request.Pod, request.Targets, drain.Place{})
	c.settle()
}

// GatePassed records that a pod is terminating or gone.
func (c *Coordinator) GatePassed(uid drain.UID) {
	c.mu.Lock()
	defer c.unlock()
	c.ledger.GatePassed(time.Now(), drain.AtHold, uid)
	c.settle()
}

// Expect sets the whole list of agents that the API says exist.
func (c *Coordinator) Expect(expected []drain.Expected) {
	c.mu.Lock()
	defer c.unlock()
	c.ledger.Expect(time.Now(), expected)
	n := c.ledger.Counts()
	c.Metrics.agents.WithLabelValues("expected").Set(float64(n.Expected))
	c.Metrics.agents.WithLabelValues("missing").Set(float64(n.Missing))
	c.Metrics.agents.WithLabelValues("suspended").Set(float64(n.Suspended))
	c.settle()
}

// Expecting returns how many agents are expected, and how many of them are not connected here.
func (c *Coordinator) Expecting() (expected, missing int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.ledger.Counts()
	return n.Expected, n.Missing
}

// CouldRoute reports whether some agent may route one of services, as far as is known.
func (c *Coordinator) CouldRoute(services []drain.Service) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ledger.CouldRoute(services)
}

// Pod returns where a pod stands.
func (c *Coordinator) Pod(uid drain.UID) drain.Standing {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ledger.Pod(uid)
}

// change changes the ledger with the lock, and settles what follows.
func (c *Coordinator) change(how func()) {
	c.mu.Lock()
	defer c.unlock()
	how()
	c.settle()
}

// locked reads with the lock.
func (c *Coordinator) locked(how func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	how()
}

// settle, called with the lock after every change, writes down transitions and wakes those whom
// they may concern.
func (c *Coordinator) settle() {
	c.note()
	c.notify()
}

// notify, called with the lock, wakes the streams of those agents that have something to hear.
func (c *Coordinator) notify() {
	for _, id := range c.ledger.Affected() {
		if s := c.streams[id]; s != nil {
			s.wake()
		}
	}
}

// note, called with the lock, writes down transitions and wakes the calls that wait for them.
func (c *Coordinator) note() {
	// To look at one drain may concern others: an agent is suspended by the end of one, and is
	// waited for by none.
	for touched := c.ledger.Changed(drain.AtHold); len(touched) > 0; touched = c.ledger.Changed(drain.AtHold) {
		now := time.Now()
		for _, uid := range touched {
			status := c.ledger.Status(now, drain.AtHold, uid)
			c.observe(status)
			if w := c.waiting[uid]; w != nil {
				close(w.changed)
				w.changed, w.status = make(chan struct{}), status
			}
			c.wakeBarred(uid) // who waits for a restart
		}
	}
	for _, s := range c.ledger.Suspensions() {
		c.Metrics.agents.WithLabelValues("suspended").Set(float64(c.ledger.Counts().Suspended))
		c.unsaid = append(c.unsaid, func() {
			if s.Over {
				c.Log.Info("agent is waited for again", "agent", s.Name, "id", s.Agent, "acknowledged", s.Acknowledged)
				return
			}
			c.Log.Error("agent is suspended: it let one drain after the other expire, and is no longer waited for",
				"agent", s.Name, "id", s.Agent)
		})
	}
	if c.settleBarriers() {
		c.note() // they may concern drains, and the reverse
	}
}

// unlock releases the mutex, and then logs what happened under it: a log that is slow delays its
// writer only.
func (c *Coordinator) unlock() {
	unsaid := c.unsaid
	c.unsaid = nil
	c.mu.Unlock()
	for _, say := range unsaid {
		say()
	}
}

// observe, called with the lock, writes down that a drain has entered another phase, by what was
// said or by time alone.
func (c *Coordinator) observe(s drain.Status) {
	before := c.phases[s.Pod.UID]
	over := s.Phase == drain.Closed || s.Phase == drain.PhaseUnknown
	if s.Phase == before || before == drain.PhaseUnknown && over {
		return // nothing new, or a word about a drain that is over or never was
	}
	if before != drain.PhaseUnknown {
		c.Metrics.drains.WithLabelValues(before.String()).Dec()
	}
	if over {
		delete(c.phases, s.Pod.UID)
		delete(c.asked, s.Pod.UID)
		delete(c.reliedOn, s.Pod.UID)
	} else {
		c.Metrics.drains.WithLabelValues(s.Phase.String()).Inc()
		c.phases[s.Pod.UID] = s.Phase
	}
	c.seen.turned(time.Now(), s)
	took := time.Since(s.Begun)
	c.Metrics.phase.WithLabelValues(s.Phase.String(), s.Reason.String()).Observe(took.Seconds())
	c.unsaid = append(c.unsaid, func() {
		c.Log.Info("drain", "pod", s.Pod.String(), "uid", s.Pod.UID, "phase", s.Phase.String(),
			"reason", s.Reason.String(),
			"sinceSeconds", took.Seconds(), "owed", s.Owed, "waitingFor", names(s.Waiting),
			"suspended", names(s.Suspended), "lost", names(s.Lost), "away", names(s.Away), "moreAway", s.MoreAway)
	})
}

func names(waiting []drain.Waiting) []string {
	all := make([]string, len(waiting))
	for i, w := range waiting {
		all[i] = w.Name + " (" + w.State.String() + ")"
	}
	return all
}

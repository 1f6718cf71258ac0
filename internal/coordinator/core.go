package coordinator

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Core makes the decisions of one replica. It has no goroutine, timer, channel, lock or clock. A
// step takes the time, changes the ledger, and leaves effects for its caller, who gets them from
// [Core.Settle] and [Core.Notify] after each step or after several. [Coordinator] drives one Core
// under a mutex, the simulation several on virtual time.
type Core struct {
	Ledger *drain.Ledger
	// Began is the zero of the clock that goes over the wire.
	Began time.Time

	self  drain.Holder
	times drain.Times
	// limits has the bounds of waiting calls and hooks.
	limits *Options
	// holds and barriers count the waiting calls and hooks, barriersOf the hooks by agent.
	holds, barriers int
	barriersOf      map[drain.AgentID]int
	// sessions holds each agent's newest stream.
	sessions map[drain.AgentID]*Session
	// last is what was written last. See [Core.written].
	last written
	// deleted holds the pods that the watch has lately shown deleted, and when.
	deleted map[drain.UID]time.Time
	// looked holds the pod of a drain, and that of a barrier, that were read last.
	looked [2]drain.UID
	// turns holds, for each owner and for all together, the pods for which calls may wait.
	turns map[string][]turn
	// owners holds the owners for whose pods workload controllers have lately called.
	owners map[string]*owner
	// asked is when the API server last asked about each pod that has an open drain. reliedOn are
	// the pods among them that another replica has left to this one.
	asked    map[drain.UID]time.Time
	reliedOn map[drain.UID]struct{}
	// observed are the pods whose deletion does not wait and is measured.
	observed map[drain.UID]*observed
	hooks    hookMemory
	// phases holds the last phase of each open drain that was observed.
	phases  map[drain.UID]drain.Phase
	stopped bool
	effects Effects
}

// Effects are what the caller has to carry out after a step.
type Effects struct {
	// Changed are drains that may have changed: recheck the calls that wait for them, with this
	// status.
	Changed []drain.Status
	// Entered are drains that have entered another phase, in order.
	Entered []Entered
	// Barriers are pods whose hooks must read the ledger again.
	Barriers []drain.UID
	// Suspensions are agents that were suspended or readmitted.
	Suspensions []drain.Suspension
	// Measured are deletions that did not wait, with how long they would have waited.
	Measured []Measured
	// Cut are streams that were ended, and why.
	Cut []Cut
	// Missed are pods whose deletion was left to the barrier, and which no hook has asked for.
	Missed []drain.Pod
}

// Entered is a drain that has entered another phase than Before.
type Entered struct {
	drain.Status
	Before drain.Phase
}

// Cut is a stream that was ended from this side.
type Cut struct {
	*Session
	Why string
}

// NewCore returns a Core with an empty ledger. It uses only the bounds and the scope in o.
func NewCore(now time.Time, self drain.Holder, times drain.Times, o *Options) *Core {
	if o.Sampling == (drain.Sampling{}) {
		o.Sampling = drain.DefaultSampling()
	}
	o.MaxBarriers = cmp.Or(o.MaxBarriers, maxBarriers)
	return &Core{
		Ledger: drain.NewLedger(times, o.Scope, o.Sampling), Began: now, self: self, times: times, limits: o,
		sessions: map[drain.AgentID]*Session{}, barriersOf: map[drain.AgentID]int{}, deleted: map[drain.UID]time.Time{},
		turns: map[string][]turn{}, asked: map[drain.UID]time.Time{}, reliedOn: map[drain.UID]struct{}{},
		phases: map[drain.UID]drain.Phase{}, observed: map[drain.UID]*observed{}, owners: map[string]*owner{},
		hooks: hookMemory{allowed: map[string]bool{}, heard: map[string]time.Time{}, told: map[drain.UID]relied{},
			relies: map[drain.UID]relied{}},
	}
}

// Settle processes what has changed since the last call, and returns the effects.
func (c *Core) Settle(now time.Time) Effects {
	c.settle(now)
	e := c.effects
	c.effects = Effects{}
	return e
}

// Notify wakes the streams of the agents for which there is something to send.
func (c *Core) Notify() {
	for _, id := range c.Ledger.Affected() {
		if s := c.sessions[id]; s != nil {
			s.Wake()
		}
	}
}

// settle processes everything that has changed.
func (c *Core) settle(now time.Time) {
	for again := true; again; {
		// Deriving the status of one drain may change others: when its end suspends an agent, no
		// drain waits for that agent.
		for touched := c.Ledger.Changed(drain.AtHold); len(touched) > 0; touched = c.Ledger.Changed(drain.AtHold) {
			for _, uid := range touched {
				status := c.Ledger.Status(now, drain.AtHold, uid)
				c.observe(status)
				c.effects.Changed = append(c.effects.Changed, status)
				c.effects.Barriers = append(c.effects.Barriers, uid) // hooks that wait for a restart
			}
		}
		c.effects.Suspensions = append(c.effects.Suspensions, c.Ledger.Suspensions()...)
		barriers := c.Ledger.Changed(drain.AtBarrier)
		for _, uid := range barriers {
			c.Ledger.Status(now, drain.AtBarrier, uid)
			c.measure(now, uid)
		}
		c.effects.Barriers = append(c.effects.Barriers, barriers...)
		again = len(barriers) > 0 // barriers may change drains, and the reverse
	}
}

// observe records that a drain has entered another phase, by a report or by time alone.
func (c *Core) observe(s drain.Status) {
	before := c.phases[s.Pod.UID]
	over := s.Phase == drain.Closed || s.Phase == drain.PhaseUnknown
	if s.Phase == before || before == drain.PhaseUnknown && over {
		return // no new phase, or no open drain
	}
	if over {
		delete(c.phases, s.Pod.UID)
		delete(c.asked, s.Pod.UID)
		delete(c.reliedOn, s.Pod.UID)
	} else {
		c.phases[s.Pod.UID] = s.Phase
	}
	c.effects.Entered = append(c.effects.Entered, Entered{s, before})
}

// Stop ends the streams of all agents and the waiting of all calls and hooks, which the caller then
// rechecks.
func (c *Core) Stop() { c.stopped = true }

// Tick must be called every [Tick]. It returns the pods to read now, at most 50 of each: those of
// drains that no call has asked for lately, and those of overdue barriers.
func (c *Core) Tick(now time.Time) (pods, over []drain.Pod) {
	pods, over = c.Ledger.Tick(now)
	c.dropTurns(now)
	c.effects.Missed = append(c.effects.Missed, c.missed(now)...)
	c.dropOwners(now)
	for _, uid := range slices.Sorted(maps.Keys(c.observed)) { // the log has them in this order
		c.measure(now, uid)
	}
	for i, of := range []*[]drain.Pod{&pods, &over} {
		*of = following(*of, c.looked[i])
		if n := len(*of); n > 0 {
			c.looked[i] = (*of)[n-1].UID
		}
	}
	for id, s := range c.sessions {
		if !s.Who.Until.IsZero() && !now.Before(s.Who.Until) {
			c.cut(now, id, "the token has ended")
		}
	}
	maps.DeleteFunc(c.deleted, func(_ drain.UID, at time.Time) bool { return now.Sub(at) >= deletedFor })
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

// Read records the result of a live read of the pod of a drain that no call asks for.
func (c *Core) Read(now time.Time, uid drain.UID, life Life) {
	switch life {
	case Living:
		c.Ledger.NotTerminating(now, uid)
	case Leaving, Gone:
		c.GatePassed(now, uid)
	}
}

// GatePassed records that a pod is terminating or deleted.
func (c *Core) GatePassed(now time.Time, uid drain.UID) {
	c.Ledger.GatePassed(now, drain.AtHold, uid)
	c.terminating(now, uid)
}

// Deleted records that a pod does not exist any more.
func (c *Core) Deleted(now time.Time, uid drain.UID) {
	c.terminating(now, uid) // the watch may have missed that state
	for _, gate := range []drain.Gate{drain.AtHold, drain.AtBarrier} {
		c.Ledger.GatePassed(now, gate, uid)
	}
	c.deleted[uid] = now
	c.cut(now, drain.AgentID(uid), podDeleted)
}

// Ready records that a pod became ready at a time. It ends the drain of a restart that began
// earlier, so that agents route to the pod again, and reports whether there was one.
func (c *Core) Ready(now time.Time, uid drain.UID, at time.Time) bool {
	delete(c.deleted, uid) // the list without it was stale
	return c.Ledger.ReadyAgain(now, uid, at)
}

// Hold is a call of the API server about the deletion of a pod.
type Hold struct {
	core     *Core
	request  Request
	uid      drain.UID
	until    time.Time
	answered func(now time.Time, allowed bool)
	// Status is that of the drain. Over: the call does not wait any more, because of Err if that is
	// not nil. Waited: it has waited.
	Status       drain.Status
	Err          error
	Over, Waited bool
}

// Hold opens a drain of a pod or joins the open one, for a call that may wait until a time.
func (c *Core) Hold(now time.Time, request Request, until time.Time) *Hold {
	uid := request.Pod.UID
	var crowded error
	if request.Turn == TurnJudged {
		if crowded = c.ownerInTurn(now, request); crowded != nil && !c.opens(now, request) {
			return &Hold{core: c, request: request, uid: uid, until: until, Over: true, Err: crowded}
		}
	}
	h := &Hold{core: c, request: request, uid: uid, until: until}
	h.saw(c.ask(now, request.Pod, request.Targets, request.Place))
	if c.phases[uid] != drain.PhaseUnknown {
		c.asked[uid] = now
	}
	switch {
	case crowded != nil:
	case request.Turn == TurnJudged:
		crowded = c.inTurn(now, request)
	case request.Turn == TurnUnheld:
		crowded = ErrTooManyHolds
	}
	h.answered = c.Ledger.Hold(uid)
	switch {
	case c.stopped:
		h.end(now, ErrStopping)
	case !h.Status.Waits() || !now.Before(until):
		h.end(now, nil)
	case crowded != nil:
		h.end(now, crowded)
	case c.holds >= c.limits.MaxHolds:
		h.end(now, ErrTooManyHolds)
	default:
		c.holds++
		h.Waited = true
	}
	return h
}

// ask asks the ledger for a drain.
func (c *Core) ask(now time.Time, pod drain.Pod, targets []drain.Targets, place drain.Place) drain.Status {
	status := c.Ledger.Ask(now, pod, targets, place)
	c.settle(now)
	c.observe(status)
	return status
}

// Wake returns when to recheck the call if its drain does not change before.
func (h *Hold) Wake() time.Time { return wakeAt(h.Status, h.until) }

// wakeAt returns when time alone may change a status, at most until.
func wakeAt(s drain.Status, until time.Time) time.Time {
	if !s.Recheck.IsZero() && s.Recheck.Before(until) {
		return s.Recheck
	}
	return until
}

// saw records a status of the drain.
func (h *Hold) saw(s drain.Status) {
	if h.Status = s; h.request.BarrierWaits {
		h.Status = s.AtRemoved()
	}
}

// Recheck ends the wait if the drain, the time or the replica has ended. changed is the drain's new
// status, nil if the call was woken by something else. It avoids asking the ledger, which takes
// time for each agent.
func (h *Hold) Recheck(now time.Time, changed *drain.Status) {
	if changed != nil {
		h.saw(*changed)
	} else {
		h.look(now)
	}
	switch {
	case h.core.stopped: // the change may be the end of the streams
		h.end(now, ErrStopping)
	case !h.Status.Waits() || !now.Before(h.until):
		h.end(now, nil)
	}
}

// GiveUp ends the wait because of err: the API server has closed the call.
func (h *Hold) GiveUp(now time.Time, err error) {
	h.look(now)
	h.end(now, err)
	h.core.Ledger.Unanswered(h.uid, now.Before(h.until))
}

func (h *Hold) look(now time.Time) {
	s := h.core.Ledger.Status(now, drain.AtHold, h.uid)
	h.core.settle(now)
	h.core.observe(s)
	h.saw(s)
}

func (h *Hold) end(now time.Time, err error) {
	h.Over, h.Err = true, err
	if h.Waited {
		h.core.holds--
	}
	allowed := err == nil && (h.Status.Phase == drain.Released || h.Status.Phase == drain.Closed)
	if allowed && h.Status.Reason == drain.BarrierWaits && h.request.Turn == TurnJudged {
		h.core.hooks.relies[h.uid] = relied{h.request.Workload, now}
	}
	h.answered(now, allowed)
	if now.Sub(h.until) > lateAfter {
		h.core.Ledger.Unanswered(h.uid, false)
	}
}

// lateAfter is how long after the end of its hold a call counts as answered: what is left of the
// API server's time then, which it rounds up to whole seconds.
const lateAfter = 500 * time.Millisecond

// Unroute asks agents to stop routing to a pod whose deletion does not wait.
func (c *Core) Unroute(now time.Time, request Request) drain.Status {
	return c.Ledger.Ask(now, request.Pod, request.Targets, drain.Place{})
}

// Claim opens a drain of a pod for a witness, or joins the open one. It does not wait. crowded is
// why a call for it may not. With [ErrTooManyOwners], there may be no drain.
func (c *Core) Claim(now time.Time, request Request) (status drain.Status, crowded error) {
	crowded = c.ownerInTurn(now, request)
	if crowded != nil && !c.opens(now, request) {
		return drain.Status{Pod: request.Pod}, crowded
	}
	status = c.ask(now, request.Pod, request.Targets, request.Place)
	if request.BarrierWaits {
		status = status.AtRemoved()
	}
	if crowded != nil && status.Waits() {
		return status, crowded
	}
	return status, c.inTurn(now, request)
}

// Ahead returns how many of others have an open drain, and -1 if these are fewer than allowed or
// the pod has one itself. Then it claims, if claim is set.
func (c *Core) Ahead(now time.Time, request Request, others []drain.UID, allowed int, claim bool) (ahead int) {
	for _, uid := range others {
		if c.Ledger.Pod(uid).Draining {
			ahead++
		}
	}
	if ahead >= allowed && !c.Ledger.Pod(request.Pod.UID).Draining {
		return ahead
	}
	if claim {
		_, _ = c.Claim(now, request)
	}
	return -1
}

// Asked returns how long ago the API server last asked about the pod of claim, in milliseconds, and
// -1 if it did not. A replica that is stopping and sends OnlyAsked relies on this one from then on.
func (c *Core) Asked(now time.Time, claim wire.Claim) int64 {
	at, asked := c.asked[claim.Pod.UID]
	if !asked || c.stopped {
		return -1
	}
	if claim.OnlyAsked {
		c.reliedOn[claim.Pod.UID] = struct{}{}
	}
	return now.Sub(at).Milliseconds()
}

// ReliedOn reports whether another replica that is stopping may have left a call about the pod to
// this one.
func (c *Core) ReliedOn(uid drain.UID) bool {
	_, relied := c.reliedOn[uid]
	return relied
}

// Replica returns what other replicas need to continue the drains of this one. ready reports
// whether this one can judge deletions.
func (c *Core) Replica(now time.Time, ready bool) wire.Replica {
	n := c.Ledger.Counts()
	r := wire.Replica{Ready: ready, Expected: n.Expected, Missing: n.Missing, Shared: c.Ledger.Shared(now)}
	r.Hooks = make(map[drain.UID]string, len(c.hooks.told))
	for uid, is := range c.hooks.told {
		r.Hooks[uid] = is.workload
	}
	return r
}

// Draining returns how many of pods are being drained, not counting those that are queued.
func (c *Core) Draining(pods []drain.UID) (n int) {
	for _, uid := range pods {
		if at := c.Ledger.Pod(uid); at.Draining && !at.Queued {
			n++
		}
	}
	return n
}

// Polled records what the other replicas sent last, and opens their drains here too if adopt is
// set.
func (c *Core) Polled(now time.Time, states []wire.Replica, adopt bool) {
	others := make([]drain.Shared, len(states))
	for i, of := range states {
		others[i] = of.Shared
		for uid, workload := range of.Hooks {
			c.hooks.hear(uid, workload)
		}
	}
	c.Ledger.Polled(now, others, adopt)
}

// Turn states whether a call may wait, and which replica decided that.
type Turn uint8

const (
	// TurnJudged: this replica decides.
	TurnJudged Turn = iota
	// TurnHeld and TurnUnheld: the opener has decided.
	TurnHeld
	TurnUnheld
)

// turnKept is how long a pod keeps its turn after the last call for it.
const turnKept = 5 * time.Second

// everyOwner is where the turns of all pods are kept, with or without an owner.
const everyOwner = ""

// turn is the turn of one pod.
type turn struct {
	uid   drain.UID
	asked time.Time
}

// inTurn returns an error if a call for a pod whose drain was observed may not wait, because as
// many other pods as allowed, of its owner or of all, have their turn. Every replica holds the
// calls for the same pods. If each chose for itself, together they would hold more calls than the
// API server has seats for, and later calls would queue there.
func (c *Core) inTurn(now time.Time, request Request) error {
	if request.Owner != "" && c.limits.MaxHoldsPerOwner > 0 &&
		!c.takeTurn(now, request.Owner, request.Pod.UID, c.limits.MaxHoldsPerOwner) {
		return ErrTooManyOfOwner
	}
	if !c.takeTurn(now, everyOwner, request.Pod.UID, c.limits.MaxHolds) {
		return ErrTooManyHolds
	}
	return nil
}

// takeTurn reports whether a pod is among the pods of an owner, at most most, that have their turn.
// A pod loses its turn when its drain ends or no call asks for it any more.
func (c *Core) takeTurn(now time.Time, owner string, uid drain.UID, most int) bool {
	turns := slices.DeleteFunc(c.turns[owner], func(t turn) bool {
		return t.uid != uid && (now.Sub(t.asked) > turnKept || !c.waits(t.uid))
	})
	i := slices.IndexFunc(turns, func(t turn) bool { return t.uid == uid })
	switch {
	case i >= 0:
		turns[i].asked = now
	case len(turns) < most:
		i, turns = len(turns), append(turns, turn{uid, now})
	}
	c.turns[owner] = turns
	return i >= 0
}

// dropTurns forgets the turns of owners none of whose pods is asked for any more.
func (c *Core) dropTurns(now time.Time) {
	maps.DeleteFunc(c.turns, func(_ string, turns []turn) bool {
		return !slices.ContainsFunc(turns, func(t turn) bool { return now.Sub(t.asked) <= turnKept })
	})
}

// Session is one agent's stream, without its connection.
type Session struct {
	Who    Identity
	Number uint64
	// Wake is called when [Core.Feed] may have something to write, or the stream is over. It must
	// not block.
	Wake func()

	// sent is the revision up to which it was written. declared counts the declarations on it,
	// answered those that were answered.
	sent               uint64
	began              bool
	declared, answered int
	// firstAt and lastAt are the times of the first and the last message on it. They are set
	// without the lock.
	firstAt, lastAt atomic.Int64
	// routes is how many the agent has declared, if only on an earlier session.
	routes int
}

// Connect begins an agent's stream, and ends its former one.
func (c *Core) Connect(now time.Time, who Identity, offer wire.Offer, wake func()) (*Session, error) {
	if c.stopped {
		return nil, serve.Refuse(http.StatusServiceUnavailable, "%v", ErrStopping)
	}
	if _, deleted := c.deleted[drain.UID(who.Agent)]; deleted {
		return nil, serve.Refuse(http.StatusUnauthorized, podDeleted)
	}
	s := &Session{Who: who, Wake: wake, Number: c.Ledger.Connect(now, who.Agent,
		drain.Hello{Boot: offer.Boot, Observes: slices.Contains(offer.Features, wire.FeatureBarrier)})}
	if !who.Everywhere && !c.Ledger.Agent(who.Agent).Declared {
		// An agent that has not declared may route everything, so every deletion waits for it. Only
		// an agent with the right everywhere may cause that.
		c.Ledger.Declare(who.Agent, s.Number, "", nil)
	}
	s.routes = len(c.Ledger.Agent(who.Agent).Routes)
	if former := c.sessions[who.Agent]; former != nil {
		former.Wake() // so that it ends
	}
	c.sessions[who.Agent] = s
	return s, nil
}

// Disconnect ends the session of a stream that is over.
func (c *Core) Disconnect(now time.Time, s *Session) {
	if c.sessions[s.Who.Agent] == s {
		delete(c.sessions, s.Who.Agent)
	}
	c.Ledger.Disconnect(now, s.Who.Agent, s.Number)
}

// cut ends the stream of an agent and voids its reports immediately, because the goroutine of the
// stream may hang in a write. Without a stream it does nothing.
func (c *Core) cut(now time.Time, id drain.AgentID, why string) {
	s := c.sessions[id]
	if s == nil {
		return
	}
	c.Disconnect(now, s)
	s.Wake() // so that it ends
	c.effects.Cut = append(c.effects.Cut, Cut{s, why})
}

// Declare records what an agent routes. d must contain only Services whose drains the agent may
// acknowledge.
func (c *Core) Declare(id drain.AgentID, d wire.Declaration) (declared wire.Declared, err error) {
	s := c.sessions[id]
	if s == nil {
		return declared, errStale
	}
	if all := c.localRoutes(s) + len(d.Routes); !s.Who.Everywhere &&
		(len(d.Routes) > maxOwnRoutes || all > maxLocalRoutes) {
		return declared, serve.Refuse(http.StatusRequestEntityTooLarge, "routes: %d, and %d with those of the other "+
			"agents of the namespace: more than %d or %d need the right to acknowledge in all namespaces",
			len(d.Routes), all, maxOwnRoutes, maxLocalRoutes)
	}
	repeat, ok := c.Ledger.Declare(id, d.Session, d.Population, d.Routes)
	if !ok {
		return declared, errStale
	}
	s.routes = len(d.Routes)
	if repeat {
		s.sent = 0
	}
	s.declared++
	s.Wake()
	return wire.Declared{Declared: s.declared}, nil
}

// maxOwnRoutes bounds the routes of an agent that has no right everywhere, and so the time for
// which it holds the lock. maxLocalRoutes bounds those of all such agents of one namespace: a
// Service need not exist to be declared, and each route takes some 600 bytes.
const maxOwnRoutes, maxLocalRoutes = 1000, 60_000

// localRoutes returns how many routes the other agents in the namespace of s have declared that
// have no right everywhere.
func (c *Core) localRoutes(s *Session) (n int) {
	namespace, _, _ := strings.Cut(s.Who.Name, "/")
	for _, other := range c.sessions {
		if other != s && !other.Who.Everywhere && strings.HasPrefix(other.Who.Name, namespace+"/") {
			n += other.routes
		}
	}
	return n
}

// Taken is the result of [Core.Report].
type Taken struct {
	// AsOf is the time as of which the reports count: when this replica wrote the last message that
	// the agent had processed.
	AsOf time.Time
	// News: a report differs from before. Reached are the states that gateways reached for the
	// first time, valid until the next step.
	News    bool
	Reached []drain.Reached
}

// Report records what an agent reports.
func (c *Core) Report(now time.Time, id drain.AgentID, said wire.Reports) (t Taken, err error) {
	if !c.Ledger.Current(id, said.Session) {
		return t, errStale
	}
	// A time that was not sent would make a report older or newer than it is, without end.
	if s := c.sessions[id]; said.At != 0 && (s == nil || said.At < s.firstAt.Load() || said.At > s.lastAt.Load()) {
		return t, serve.Refuse(http.StatusBadRequest, "at %d: no message of this stream has had it", said.At)
	}
	t.AsOf = c.asOf(now, said.At)
	t.News, t.Reached = c.Ledger.Report(now, t.AsOf, id, said.Session, said.UpTo, said.Reports)
	return t, nil
}

// clock is the time in messages, which agents return in their reports: milliseconds since this
// replica began, never 0.
func (c *Core) clock(now time.Time) int64 { return now.Sub(c.Began).Milliseconds() + 1 }

// stamp is the clock, and records that s is sent it.
func (c *Core) stamp(s *Session, now time.Time) int64 {
	at := c.clock(now)
	s.firstAt.CompareAndSwap(0, at)
	s.lastAt.Store(at)
	return at
}

// asOf returns when the last message that an agent had processed before it read its states was
// written.
func (c *Core) asOf(now time.Time, at int64) time.Time {
	if at == 0 {
		return now
	}
	return c.Began.Add(time.Duration(at-1) * time.Millisecond)
}

// News is what an agent is sent in one write.
type News struct {
	Open     []drain.Open
	Released []drain.Release
	// First: it is the first write of the stream. Declared is the number of the last declaration
	// that it answers. 0: none.
	First    bool
	Declared int
	// lines are the messages about Open and Released, without their times.
	lines []byte
}

// Feed returns what was not sent to the agent yet. ok is false if the stream is over.
func (c *Core) Feed(s *Session) (n News, ok bool) {
	if !c.Ledger.Current(s.Who.Agent, s.Number) {
		return n, false // the agent has another stream, on which this would count as sent
	}
	n.First, s.began = !s.began, true
	if s.declared > s.answered {
		n.Declared, s.answered = s.declared, s.declared
	}
	for {
		open, released, told, next := c.Ledger.ChangesFor(s.Who.Agent, s.sent)
		s.sent = next
		if len(open)+len(released) == 0 {
			return n, true
		}
		lines := c.written(told, open, released)
		if n.lines == nil {
			n.Open, n.Released, n.lines = open, released, lines
			continue
		}
		n.Open, n.Released = slices.Concat(n.Open, open), slices.Concat(n.Released, released)
		n.lines = slices.Concat(n.lines, lines)
	}
}

// written are encoded lines for several agents, and what they encode.
type written struct {
	revision uint64
	open     *drain.Open
	released *drain.Release
	lines    []byte
}

// written returns the encoding of open and released, which is made once for all agents.
func (c *Core) written(revision uint64, open []drain.Open, released []drain.Release) []byte {
	w := written{revision: revision}
	if len(open) > 0 {
		w.open = &open[0]
	}
	if len(released) > 0 {
		w.released = &released[0]
	}
	if last := c.last; last.revision == w.revision && last.open == w.open && last.released == w.released {
		return last.lines
	}
	var messages []wire.Message
	var exclude []drain.Open
	for _, d := range open {
		if d.Watch == nil {
			exclude = append(exclude, d)
		} else {
			messages = append(messages, wire.Message{Type: wire.TypeWatch, Watch: d.Watch})
		}
	}
	if len(exclude) > 0 {
		messages = append(messages, wire.Message{Type: wire.TypeDrains, Drains: wire.NewDrains(revision, exclude)})
	}
	for _, r := range wire.NewReleases(released) {
		messages = append(messages, wire.Message{Type: wire.TypeReleases, Releases: r})
	}
	w.lines = wire.Shared(messages...)
	c.last = w
	return w.lines
}

// Append appends n to the lines that are written to s next. Unlike the other steps, it may be
// called at any time.
func (c *Core) Append(lines []byte, now time.Time, s *Session, n News) []byte {
	if n.First {
		lines = c.Say(lines, now, s, wire.Message{Type: wire.TypeHello, Hello: &wire.Hello{
			Protocol: wire.Protocol, Features: wire.Features(), Holder: c.self, Session: s.Number,
			AwayMillis: c.times.Away.Milliseconds(), ExpiryMillis: c.times.Expiry.Milliseconds(),
			RenewalMillis: c.times.Renewal.Milliseconds(),
		}})
	}
	lines = wire.AppendShared(lines, c.stamp(s, now), n.lines)
	if n.First || n.Declared > 0 {
		lines = c.Say(lines, now, s, wire.Message{Type: wire.TypeSynced, Declared: n.Declared})
	}
	return lines
}

// Say appends one message, as Append does.
func (c *Core) Say(lines []byte, now time.Time, s *Session, m wire.Message) []byte {
	m.At = c.stamp(s, now)
	return wire.Append(lines, m)
}

package drain

import (
	"cmp"
	"container/list"
	"slices"
	"time"
)

// Ledger is one replica's record of drains and agents. See the package comment. Not safe for
// concurrent use.
type Ledger struct {
	times Times
	roster
	changes
	capacity
	sample
	// subjects are the pods that have a drain.
	subjects map[UID]*subject
	// numbers counts the drains that were opened, see Open.Number.
	numbers uint64
	// reported and waiting are buffers for deriving a status: the reports of agents on a drain, by
	// their slots, and the agents of Status.Waiting.
	reported []*received
	waiting  []*agent
	// reached is what the last call of Report returned.
	reached []Reached
}

// subject is a pod: its drain at each gate, nil if there is none, and the agents' reports about it
// while that drain is open.
type subject struct {
	drains   [gates]*drain
	received [gates][]*received
}

// drain is of one pod at one gate.
type drain struct {
	pod      Pod
	of       *subject
	gate     Gate
	services map[Service]bool
	barrier  barrier
	// open: neither closed by the deletion nor abandoned. While it is open, since is its start
	// minus spent, the time that earlier drains of this UID used; begun is when it was opened here,
	// which may be long after since. number is that of the open drain, else of the last one.
	open         bool
	since, begun time.Time
	spent        time.Duration
	number       uint64
	calls
	queueing
	owed
	progress
	logged
	// stopped is as in Place. Zero: the drain is for a deletion.
	stopped time.Time
	// expired: the deadline has passed, and the agents that were silent then are recorded.
	expired bool
	// reason is why it is closed, since closedAt.
	reason   Reason
	closedAt time.Time
}

// calls are the API server's admission calls about a pod.
type calls struct {
	// inFlight counts those that are being held; lastAnswer is when the last one was answered, or
	// another replica last asked for one.
	inFlight   int
	lastAnswer time.Time
	// denied: this replica has denied one. unsure: an answer was late, or the drain is adopted, so
	// that another one may have passed. brokenOff: the caller of the last one broke it off.
	denied, unsure, brokenOff bool
	// deleted: a call was no eviction.
	deleted bool
	// allowedAt is when a call was allowed first since the drain was opened, or since the pod was
	// found to live on nevertheless. refused is when that was found, see Standing.Refused.
	allowedAt time.Time
	refused   []time.Time
}

// progress is the state of a drain when its status was last derived.
type progress struct {
	phase Phase
	// quiescingAt is since when all agents that must acknowledge report Removed, and not all Idle.
	// Zero: the drain is not Quiescing.
	quiescingAt time.Time
	// blocking are the slots of the agents that keep the drain in phase, Unrouting or Quiescing.
	// blocked is how many these are: while one is left, reports of others cannot change the phase.
	// 0: any report may.
	blocking bits
	blocked  int
}

// NewLedger returns an empty ledger. times must pass [Times.Check]. scope and sampling choose which
// nodes are asked at barriers.
func NewLedger(times Times, scope Scope, sampling Sampling) *Ledger {
	sampling.Bound = cmp.Or(sampling.Bound, times.Deadline)
	return &Ledger{
		times: times, subjects: map[UID]*subject{},
		roster: roster{
			agents: map[AgentID]*agent{}, services: map[Service]*service{}, rosterRev: 1,
		},
		changes:  changes{log: list.New(), touched: [gates]map[UID]bool{{}, {}}},
		capacity: capacity{queued: map[*drain]struct{}{}, usable: map[Service][]UID{}},
		sample:   sample{scope: scope, sampling: sampling},
	}
}

const (
	// maxAway bounds the agents that are named as away.
	maxAway = 20
	// brokenOffAfter is how long after a call was broken off another one is expected: controllers
	// and client-go retry sooner.
	brokenOffAfter = 10 * time.Second
)

// Waiting is an agent that a drain waits for, and its last report.
type Waiting struct {
	Agent AgentID
	// Name is namespace/name of the agent's pod, or its ID if the API does not list it.
	Name  string
	State State
	// Connected: it has a session here.
	Connected bool
}

// Status is a drain at one moment.
type Status struct {
	Pod    Pod
	Phase  Phase
	Reason Reason
	// Since is the start of the drain's clock, Deadline its end.
	Since, Deadline time.Time
	// Begun is when this replica opened the drain.
	Begun time.Time
	// Owed is how many agents must acknowledge it. Waiting are those that have not reported Idle,
	// sorted by name.
	Owed    int
	Waiting []Waiting
	// Suspended are the agents that have not reported Idle and need not acknowledge because they
	// are suspended. See [Suspension].
	Suspended []Waiting
	// Lost are the agents that had to acknowledge it and have since been away for too long. See
	// [AgentsLost].
	Lost []Waiting
	// Away are the other agents that have not reported Idle and need not acknowledge, because they
	// have been away for too long and their pods are not ready: what their gateways do is unknown.
	// See [Ledger.Disconnect]. At most 20 are named, and MoreAway is how many more there are: a
	// zone may be cut off.
	Away     []Waiting
	MoreAway int
	// Kept: a gateway keeps sending to the pod, which is accepted because there is no other
	// endpoint.
	Kept bool
	// Recheck is when Status may change by time alone. Zero: never.
	Recheck time.Time
	// Stated is the wait from Since on that a barrier makes for consumers that cannot acknowledge.
	// Cut: it is beyond the deadline.
	Stated time.Duration
	Cut    bool
}

// AtRemoved returns s as it counts for a deletion whose pod waits for Idle at its barrier: a drain
// that is Quiescing is Released.
func (s Status) AtRemoved() Status {
	if s.Phase != Quiescing {
		return s
	}
	s.Phase, s.Reason = Released, BarrierWaits
	if s.Kept {
		s.Reason = LastTarget
	}
	if len(s.Lost) > 0 {
		s.Reason = AgentsLost
	}
	return s
}

// Waits reports whether the drain still waits for gateways.
func (s Status) Waits() bool {
	return s.Phase == Queued || s.Phase == Unrouting || s.Phase == Quiescing
}

// Ask opens a drain of pod, or joins the one that is open, and returns its status. targets are the
// Services whose EndpointSlices list the pod, each with its usable targets if they are known. The
// Services are added to those of earlier calls. The usable targets replace the earlier ones, for
// every drain of the Service. The drain is Queued while one of its Services has no capacity. place
// is what another replica knows of the drain, whose clock starts at the earlier of the two starts.
// A pod that is terminating or deleted has no drain: the status is Closed, PodDeleted.
func (l *Ledger) Ask(now time.Time, pod Pod, targets []Targets, place Place) Status {
	d := l.drain(pod, AtHold)
	if !d.open && d.reason == PodDeleted {
		return l.status(now, d)
	}
	services := make([]Service, 0, len(targets))
	for _, t := range targets {
		services = append(services, t.Service)
		if t.Usable != nil {
			l.usable[t.Service] = t.Usable
		}
	}
	l.serve(d, services)
	if !place.Restart {
		d.lastAnswer, d.brokenOff = now, false
	}
	// What was allowed has been carried out by then, or refused: by something else, because another
	// replica denies until its deadline at most.
	if d.open && now.Sub(d.allowedAt) > max(RequestLimit, l.times.Deadline+l.times.Hold) {
		l.livesOn(now, d)
	}
	if place.Restart && d.open {
		place.Is = d.place
	}
	switch {
	case !place.Restart:
		if d.open && !d.stopped.IsZero() { // a deletion has its own clock
			d.since, d.begun, d.expired = now.Add(-d.spent), now, false
			l.touch(d)
		}
		d.stopped = time.Time{}
	case !d.open:
		d.stopped = cmp.Or(place.Stopped, now)
	case !d.stopped.IsZero():
		d.stopped = later(d.stopped, place.Stopped)
	}
	if !d.open {
		l.begin(now, d, now.Add(-d.spent))
		d.queued = true
		l.queued[d] = struct{}{}
	}
	d.place, d.deleted = place.Is, d.deleted || !place.Restart && !place.Evicted
	// Never earlier by more than the deadline: if the clock of the other replica is wrong, this
	// drain may end early, but not the next ones.
	if since := later(now.Add(-place.Elapsed), d.begun.Add(-l.length(d))); since.Before(d.since) {
		d.since = since
		l.touch(d)
	}
	l.admit(now, d)
	return l.status(now, d)
}

// drain returns the drain of a pod at a gate, and adds it if there is none.
func (l *Ledger) drain(pod Pod, gate Gate) *drain {
	of := l.subjects[pod.UID]
	if of == nil {
		of = &subject{}
		l.subjects[pod.UID] = of
	}
	d := of.drains[gate]
	if d == nil {
		d = &drain{pod: pod, of: of, gate: gate, services: map[Service]bool{}}
		of.drains[gate] = d
	}
	return d
}

// at returns the drain of uid at a gate, nil if there is none.
func (l *Ledger) at(gate Gate, uid UID) *drain {
	if of := l.subjects[uid]; of != nil {
		return of.drains[gate]
	}
	return nil
}

// each calls f with every drain, in no order. f may drop the drain that it is called with.
func (l *Ledger) each(f func(*drain)) {
	for _, of := range l.subjects {
		for _, d := range of.drains {
			if d != nil {
				f(d)
			}
		}
	}
}

// serve adds services to those of d, and records the change for the agents that this concerns.
func (l *Ledger) serve(d *drain, services []Service) {
	grown := false
	for _, s := range services {
		grown = grown || !d.services[s]
		d.services[s] = true
	}
	if d.open && grown {
		l.enlist(d)
		if !d.queued {
			l.change(d, l.owing(d))
		}
	}
}

// begin opens d.
func (l *Ledger) begin(now time.Time, d *drain, since time.Time) {
	l.enlist(d)
	d.open, d.reason, d.begun, d.lastAnswer, d.former = true, ReasonNone, now, now, nil
	d.quiescingAt, d.allowedAt, d.expired = time.Time{}, time.Time{}, false
	d.upTo, d.reached, d.removed, d.vanished = nil, [2]bits{}, nil, nil
	d.denied, d.unsure, d.brokenOff, d.deleted = false, false, false, false
	d.since = since
	l.numbers++
	d.number = l.numbers
}

// Hold records that a call waits for the drain of uid. answered records that it was answered, and
// whether the answer was to allow.
func (l *Ledger) Hold(uid UID) (answered func(now time.Time, allowed bool)) {
	d := l.at(AtHold, uid)
	if d == nil {
		return func(time.Time, bool) {}
	}
	d.inFlight++
	return func(now time.Time, allowed bool) {
		d.inFlight--
		d.lastAnswer, d.brokenOff = now, false
		switch {
		case !allowed:
			d.denied = true
		case d.allowedAt.IsZero():
			d.allowedAt = now
		}
	}
}

// Unanswered records that the API server did not read the answer to the last call about uid. If the
// call was brokenOff, the API server would still have waited, so its caller has given up. Otherwise
// the API server may have continued without the answer, and deletes the pod.
func (l *Ledger) Unanswered(uid UID, brokenOff bool) {
	if d := l.at(AtHold, uid); d != nil {
		d.unsure, d.brokenOff = d.unsure || !brokenOff, brokenOff
	}
}

// Decided records that a call about uid was answered whatever its drain is: it was allowed, or a
// budget forbids the eviction. That ends the drain immediately if only evictions have asked for it,
// none waits, and none can have passed: otherwise the pod would be out of traffic without a reason.
// Further allows change nothing: something else keeps the pod, and a caller that repeats them must
// not keep it out of traffic.
func (l *Ledger) Decided(now time.Time, uid UID, allowed bool) {
	d := l.at(AtHold, uid)
	switch {
	case d == nil || !d.open || allowed && !d.allowedAt.IsZero():
	case allowed:
		l.Hold(uid)(now, true)
	case d.inFlight == 0 && d.stopped.IsZero() && !d.deleted && !d.mayBeDeleted():
		l.abandon(now, d)
	}
}

// Status returns the drain of uid at a gate. The phase is PhaseUnknown if there is none.
func (l *Ledger) Status(now time.Time, gate Gate, uid UID) Status {
	d := l.at(gate, uid)
	if d == nil {
		return Status{Pod: Pod{UID: uid}}
	}
	return l.status(now, d)
}

// GatePassed closes the open drain of uid at a gate, because the pod is terminating (AtHold) or
// deleted (AtBarrier), and reports whether one was open. For Times.Memory no later call opens
// another one. Without an open drain, and for one that only observes ([Barrier.Observe]), it
// changes nothing.
func (l *Ledger) GatePassed(now time.Time, gate Gate, uid UID) bool {
	d := l.at(gate, uid)
	if d == nil || !d.open || d.barrier.observe {
		return false
	}
	l.expire(now, d)
	l.close(now, d, PodDeleted)
	return true
}

// NotTerminating records that a live read showed the pod without deletionTimestamp. The drain is
// abandoned if no call has asked for it since [Ledger.Tick] named it. It reports whether it was.
func (l *Ledger) NotTerminating(now time.Time, uid UID) bool {
	d := l.at(AtHold, uid)
	if d == nil || !d.open || !l.mayBeAbandoned(now, d) {
		return false
	}
	l.abandon(now, d)
	return true
}

// abandon closes d because its deletion was given up. The pod's next drain continues its clock,
// which has counted for as long as agents were told to exclude the pod. If they never were, it has
// counted for as long as callers waited, so that one that is queued each time gets there too.
func (l *Ledger) abandon(now time.Time, d *drain) {
	l.expire(now, d)
	l.livesOn(now, d)
	switch before := d.begun.Sub(d.since); {
	case !d.stopped.IsZero():
	case d.queued:
		d.spent = before + d.lastAnswer.Sub(d.begun)
	default:
		d.spent = before + now.Sub(later(d.toldAt, d.begun))
	}
	l.close(now, d, Abandoned)
}

// livesOn records that the pod was not deleted although a call was allowed.
func (l *Ledger) livesOn(now time.Time, d *drain) {
	if d.allowedAt.IsZero() {
		return
	}
	d.allowedAt = time.Time{}
	d.refused = slices.DeleteFunc(d.refused, func(at time.Time) bool { return now.Sub(at) >= l.times.Memory })
	d.refused = append(d.refused, now)
}

// mayBeAbandoned reports whether no call has asked for d for so long that its pod is to be read.
func (l *Ledger) mayBeAbandoned(now time.Time, d *drain) bool {
	after := l.times.Abandon
	if d.brokenOff && d.allowedAt.IsZero() {
		after = min(after, brokenOffAfter)
	}
	return d.inFlight == 0 && now.Sub(d.lastAnswer) >= after
}

// mayBeDeleted reports whether a deletion of the pod of d may have passed. It has not if this
// replica denied every call, because one denial is enough. If it passed by what another replica
// answered, that one still excludes the pod. A container that is stopped is no deletion.
func (d *drain) mayBeDeleted() bool {
	return !d.allowedAt.IsZero() || d.stopped.IsZero() && (!d.denied || d.unsure)
}

// close ends a drain. The reports about it must not count for the next one of this UID: an agent
// whose exclusion has ended reports nothing about the pod any more.
func (l *Ledger) close(now time.Time, d *drain, reason Reason) {
	if d.gate == AtHold && reason == PodDeleted {
		d.barrier.removedBy = l.removedBy(now, d)
	}
	d.open, d.reason, d.closedAt = false, reason, now
	for g := AtHold; g <= d.gate; g++ {
		for _, r := range d.of.received[g] {
			delete(r.by.reports[g], d.of)
		}
		d.of.received[g] = nil
	}
	l.change(d, l.owing(d))
	l.delist(d)
	// What grows with the number of agents is not kept for Times.Memory.
	d.upTo, d.reached, d.removed, d.vanished, d.blocking = nil, [2]bits{}, nil, nil, nil
	d.barrier.sample, d.barrier.learnt = nil, nil
	if d.gate == AtBarrier {
		d.barrier.removedBy = nil
	}
	for s := range d.services {
		if of := l.services[s]; of == nil || len(of.drains) == 0 {
			delete(l.usable, s)
		}
	}
	d.blocked, d.queued = 0, false
	delete(l.queued, d)
	l.admit(now, nil)
}

// Tick records the strikes of drains that have reached their deadline, ends suspensions that are
// older than Times.Memory, and unqueues drains. It forgets closed drains after Times.Memory, and
// agents that are neither listed nor connected after Times.Away. It returns the pods whose drains
// no call has asked for lately: read each of them live and call [Ledger.GatePassed] or
// [Ledger.NotTerminating]. A drain that can only have been refused is abandoned without a read when
// the last request would be over, so that an API server that does not answer keeps no such pod out
// of traffic. overdue are the pods of barriers that are open beyond their deadline: they may not
// exist any more.
func (l *Ledger) Tick(now time.Time) (look, overdue []Pod) {
	var gone []*agent
	for _, a := range l.agents {
		if !a.listed && a.session == 0 && now.Sub(a.lostAt) >= l.times.Away {
			gone = append(gone, a)
		}
	}
	l.forget(gone)
	l.readmit(now)
	l.admit(now, nil)
	var over []*drain
	l.each(func(d *drain) {
		if d.open && !d.expired && !now.Before(l.deadline(d)) {
			over = append(over, d)
		}
	})
	slices.SortFunc(over, func(a, b *drain) int {
		return cmp.Or(l.deadline(a).Compare(l.deadline(b)), cmp.Compare(a.pod.UID, b.pod.UID),
			cmp.Compare(a.gate, b.gate))
	})
	for _, d := range over {
		l.expire(now, d)
	}
	var forgotten []*drain
	l.each(func(d *drain) {
		if d.gate == AtHold && d.barrier.removedBy != nil && now.Sub(d.closedAt) >= 2*l.times.Deadline {
			d.barrier.removedBy = nil // a barrier that came now would be over
		}
		switch {
		case d.open && d.gate == AtBarrier:
			if over := now.Sub(l.deadline(d)); over >= l.times.Memory {
				forgotten = append(forgotten, d)
			} else if over >= 0 {
				overdue = append(overdue, d.pod)
			}
		case d.open && l.mayBeAbandoned(now, d):
			if !d.mayBeDeleted() && now.Sub(d.lastAnswer) >= l.times.Abandon+RequestLimit {
				forgotten = append(forgotten, d)
			} else {
				look = append(look, d.pod)
			}
		case !d.open && now.Sub(d.closedAt) >= l.times.Memory:
			l.log.Remove(d.element)
			d.of.drains[d.gate] = nil
			if d.of.drains == [gates]*drain{} {
				delete(l.subjects, d.pod.UID)
			}
		}
	})
	slices.SortFunc(forgotten, func(a, b *drain) int { return cmp.Compare(a.pod.UID, b.pod.UID) })
	for _, d := range forgotten {
		l.abandon(now, d)
	}
	for _, pods := range [][]Pod{look, overdue} {
		slices.SortFunc(pods, func(a, b Pod) int { return cmp.Compare(a.UID, b.UID) })
	}
	return look, overdue
}

// Report records an agent's reports on its open session: about single pods and, if upTo is not nil,
// about all other pods that it was sent to exclude. It reports whether any of it was new: a repeat
// of a report that still counts is not. reached lists the states that gateways reached for the
// first time by it, and is valid until the next call. A call with a session that is not the open
// one changes nothing, nor does a report about a pod without an open drain that the agent may have
// to acknowledge.
//
// asOf is a time by this replica's clock. At or before it the agent had renewed the expiries of
// this replica's exclusions, and after that it read what it reports. The reports count as of then.
// One that is older than the last one about the pod changes nothing.
func (l *Ledger) Report(
	now, asOf time.Time, id AgentID, session uint64, upTo *UpTo, reports []Report,
) (news bool, reached []Reached) {
	if !l.Current(id, session) {
		return false, nil
	}
	a := l.agents[id]
	l.reached = l.reached[:0]
	for _, r := range reports {
		of := l.subjects[r.UID]
		d := of.about(a, r)
		if d == nil || !d.open || r.Number != d.number || !l.routes(a, d) {
			continue // it was not asked, or about an earlier drain
		}
		was := a.reports[r.Gate][of]
		if was != nil && asOf.Before(was.at) {
			continue
		}
		// Before it counts: a late report does not undo that it was missing.
		l.expire(now, d)
		fresher := was == nil || was.Report != r || !l.fresh(now, was)
		early := was != nil && d.tooEarly(was)
		if was == nil {
			was = l.keepReport(asOf, a, r, len(reports))
		}
		if was.since.IsZero() || was.State != r.State {
			was.since = now
		}
		was.Report, was.at = r, asOf
		fresher = fresher || early && !d.tooEarly(was)
		news = news || fresher
		if r.Gate == AtBarrier {
			l.learn(now, a, d, was)
			d.barrier.inFlight = d.barrier.inFlight || r.InFlight
		}
		l.taken(now, d, was, fresher)
		if !d.barrier.observe && l.inTime(now, d, was) {
			l.acknowledged(now, a)
		}
	}
	if upTo != nil {
		news = l.takeUpTo(now, asOf, a, *upTo, reports) || news
	}
	return news, l.reached
}

// owes reports whether a must acknowledge, at now, a drain that it may have to acknowledge and, if
// time alone may change that, when.
func (l *Ledger) owes(now time.Time, a *agent) (owes bool, until time.Time) {
	if a.session != 0 || a.Ready {
		return true, time.Time{}
	}
	until = a.lostAt.Add(l.times.Away)
	return now.Before(until), until
}

func (l *Ledger) fresh(now time.Time, r *received) bool {
	return r.by.session != 0 && now.Sub(r.at) <= l.times.Freshness
}

func (l *Ledger) deadline(d *drain) time.Time {
	if d.gate == AtBarrier {
		return d.since.Add(d.barrier.bound)
	}
	// Less than a hold, so that the call that opened it is answered by its end.
	return later(d.since.Add(l.times.Deadline), d.begun.Add(l.times.Hold*3/4))
}

// status derives the status from what is known at now, after recording what the deadline means for
// agents.
func (l *Ledger) status(now time.Time, d *drain) Status {
	l.expire(now, d)
	return l.derive(now, d)
}

func (l *Ledger) derive(now time.Time, d *drain) Status {
	s := Status{Pod: d.pod, Since: d.since, Begun: d.begun, Deadline: l.deadline(d)}
	if !d.open {
		s.Phase, s.Reason = Closed, d.reason
		return s
	}
	least, kept := l.muster(now, d, &s)
	s.Kept = kept
	if least != Removed {
		d.quiescingAt = time.Time{}
	} else if d.quiescingAt.IsZero() {
		d.quiescingAt = now
	}
	s.recheck(now, s.Deadline)
	switch {
	case s.Owed == 0 && len(s.Suspended) > 0:
		s.Phase, s.Reason = Released, Suspended
	case s.Owed == 0:
		s.Phase, s.Reason = Released, NoAgents
	case d.queued && now.Before(s.Deadline):
		s.Phase = Queued
	case least == Idle && kept:
		s.Phase, s.Reason = Released, LastTarget
	case least == Idle:
		s.Phase, s.Reason = Released, Acknowledged
	case !now.Before(s.Deadline):
		s.Phase, s.Reason = Released, Deadline
	case least == Removed && now.Sub(d.quiescingAt) >= l.times.IdleBound:
		if s.Phase, s.Reason = Released, IdleBound; kept && d.gate == AtBarrier {
			s.Reason = LastTarget
		}
	case least == Removed:
		s.Phase = Quiescing
		s.recheck(now, d.quiescingAt.Add(l.times.IdleBound))
	default:
		s.Phase = Unrouting
	}
	if d.gate == AtBarrier {
		s = l.stated(now, d, s)
	}
	if len(s.Lost) > 0 && (s.Reason == Acknowledged || s.Reason == NoAgents || s.Reason == LastTarget) {
		s.Reason = AgentsLost
	}
	l.block(d, s)
	return s
}

// muster adds to s the agents that must acknowledge d and have not. least is the lowest state that
// any of them reports, kept whether one is accepted because there is no other endpoint.
func (l *Ledger) muster(now time.Time, d *drain, s *Status) (least State, kept bool) {
	least = Idle
	agents, said := l.owing(d), l.reportsOn(d)
	l.waiting = l.waiting[:0]
	s.Lost = slices.Clone(d.vanished)
	for i, a := range agents {
		owes, until := l.owes(now, a)
		s.recheck(now, until)
		is := Waiting{a.ID, a.Name, StateUnknown, a.session != 0}
		if !owes {
			// What was said on its session is void.
			switch {
			case l.vanishes(a, d), a.listed && !a.Pending && a.met && later(until, a.unreadyAt).After(d.begun):
				s.Lost = append(s.Lost, is)
			case !a.listed || a.Pending:
			case len(s.Away) == maxAway:
				s.MoreAway++
			default:
				s.Away = append(s.Away, is)
			}
			continue
		}
		var last bool
		is.State, last, until = l.stateOf(now, said[a.slot], d)
		kept = kept || last
		s.recheck(now, until)
		waived, until := l.waived(now, a, d)
		if waived && is.State < Idle {
			s.Suspended = append(s.Suspended, is)
			continue
		}
		s.recheck(now, until)
		s.Owed++
		least = min(least, is.State)
		if is.State < Idle {
			if s.Waiting == nil {
				s.Waiting = make([]Waiting, 0, len(agents)-i)
			}
			s.Waiting = append(s.Waiting, is)
			l.waiting = append(l.waiting, a)
		}
	}
	return least, kept
}

// recheck records that the status may change at a time, if that is in the future.
func (s *Status) recheck(now, at time.Time) {
	if at.After(now) && (s.Recheck.IsZero() || at.Before(s.Recheck)) {
		s.Recheck = at
	}
}

// stateOf returns the state that r, which may be nil, counts as in d at now. last reports whether r
// is accepted because there is no other endpoint. until is when time alone may change the result;
// zero: never.
func (l *Ledger) stateOf(now time.Time, r *received, d *drain) (state State, last bool, until time.Time) {
	if r == nil || !l.fresh(now, r) {
		return StateUnknown, false, time.Time{}
	}
	state, last, until = l.barrierState(now, d, r)
	if old := r.at.Add(l.times.Freshness + 1); until.IsZero() || old.Before(until) {
		until = old
	}
	return state, last, until
}

// reportsOn returns the reports on d, by the slots of the agents. The slice is valid until the next
// call.
func (l *Ledger) reportsOn(d *drain) []*received {
	if len(l.reported) < len(l.slots) {
		l.reported = make([]*received, len(l.slots))
	}
	clear(l.reported)
	for slot := range d.upTo.all() {
		if a := l.slots[slot]; d.gate == AtHold || a.gateOf(d) == AtHold {
			l.reported[slot] = &a.upTo
		}
	}
	for g := AtHold; g <= d.gate; g++ {
		for _, r := range d.of.received[g] {
			if d.gate == AtHold || r.by.gateOf(d) == g {
				l.reported[r.by.slot] = r
			}
		}
	}
	return l.reported
}

// block records which agents of l.waiting keep d in the phase of s.
func (l *Ledger) block(d *drain, s Status) {
	d.phase, d.blocked = s.Phase, 0
	if s.Phase != Unrouting && s.Phase != Quiescing {
		return
	}
	d.blocking = d.blocking.cleared(len(l.slots))
	for i, w := range s.Waiting {
		if w.State < d.needs() {
			d.blocking.set(l.waiting[i].slot)
			d.blocked++
		}
	}
}

// needs returns the state that all agents must report before d leaves its present phase for the
// next.
func (d *drain) needs() State {
	if d.phase == Unrouting {
		return Removed
	}
	return Idle
}

// canEndPhase reports whether r can change the phase of d, because its agent is the last one that
// keeps d there.
func (l *Ledger) canEndPhase(now time.Time, d *drain, r *received) bool {
	if d.blocked == 0 {
		return true
	}
	state, _, _ := l.barrierState(now, d, r)
	switch {
	case d.phase == Quiescing && state < Removed:
		return true // back to Unrouting
	case state < d.needs() || !d.blocking.has(r.by.slot):
		return false
	}
	d.blocking.unset(r.by.slot)
	d.blocked--
	return d.blocked == 0
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

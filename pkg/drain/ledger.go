package drain

import (
	"cmp"
	"container/list"
	"maps"
	"slices"
	"time"
)

// Ledger is one replica's record of drains and agents. See the package comment. Not safe for concurrent use.
type Ledger struct {
	times  Times
	agents map[AgentID]*agent
	// slots holds the agents by their numbers, nil where nobody has one: lists of agents are sets of these.
	slots []*agent
	// subjects are the pods that have a drain.
	subjects map[UID]*subject
	// services holds who is concerned by each Service: an event costs those whom it concerns, not everybody.
	services map[Service]*service
	// everything are, for each gate, the agents that may be asked there about any Service: those that have not declared and are not said to be
	// asked at the other gate only, and those that declare [EveryService]. everythingRev counts like service.rev.
	everything    [gates]map[*agent]struct{}
	everythingRev [gates]uint64
	// rosterRev is the last rev that was given to a service's or to everything's list of agents, at first 1.
	rosterRev uint64
	// changes holds the drains in the order of their last change that agents must hear of, the newest first.
	changes *list.List
	rev     uint64
	// numbers counts the drains that were opened, see Open.Number.
	numbers uint64
	touched [gates]map[UID]bool
	// scope says who is asked at the barrier, learnt how long those take who are. See barrier.go.
	scope    Scope
	sampling Sampling
	learnt   durations
	// queued are the open drains that wait for room, usable what was last said of each Service's targets. See queue.go.
	queued map[*drain]struct{}
	usable map[Service][]UID
	// elsewhere are the pods that other replicas unroute.
	elsewhere map[UID]struct{}
	// concerned are the agents that must hear now of what changed, each once. See [Ledger.Concerned].
	concerned []*agent
	// waiting are the agents of Status.Waiting while that is derived, said what agents say by their slots. See [Ledger.hearing].
	waiting []*agent
	said    []*heard
	// expected and missing are as in Counts.
	expected, missing int
	// suspended counts the agents that are; suspensions are the changes that nobody has asked for yet.
	suspended   int
	suspensions []Suspension
	// sweptAt is when reports that are too old to count were last forgotten.
	sweptAt time.Time
}

// subject is a pod: its drain at each gate, nil if there is none, and what agents say of it there
// while that is open.
type subject struct {
	uid    UID
	drains [gates]*drain
	heard  [gates][]*heard
}

// service is what one Service concerns.
type service struct {
	// agents have declared that they route it so that they owe at a gate. rev is the ledger's rosterRev when that list, or what
	// orders it, last changed.
	agents [gates]map[*agent]struct{}
	rev    [gates]uint64
	// ordered are these agents in the order of their names. Nil: to be found out.
	ordered [gates][]*agent
	// drains are the open ones of its pods.
	drains map[*drain]struct{}
}

// agent is what is known of one agent.
type agent struct {
	id AgentID
	// slot is its number, which another agent may have when this one is forgotten.
	slot int
	// expected says that the API lists it; name, ready, label and pending are from there.
	expected bool
	name     string
	ready    bool
	label    Label
	pending  bool
	// session is not zero while a stream is open. Sessions count up and are never used twice.
	session uint64
	// lostAt is when the last session ended or, never connected, when the API first listed it.
	lostAt time.Time
	// unreadyAt is when its pod was last said to be no longer ready.
	unreadyAt time.Time
	// knownAt is when it was first heard of.
	knownAt time.Time
	// declared says that routes is known, if only from an earlier session.
	declared bool
	routes   map[Service]Route
	// population is as it declared it. See [Ledger.Declare].
	population string
	// namespaces are those in which it has routed a Service on its present session, "*" all of
	// them: the releases of their pods are sent to it. widened is the revision at which the last
	// one was added.
	namespaces map[string]bool
	widened    uint64
	// former reports whether some drain may have it in drain.former.
	former  bool
	reports [gates]map[*subject]*heard
	breaker breaker
	// concerned says that it is in the ledger's list of these.
	concerned bool
	// met says that it has had a session, observes that the last one understood [Watch].
	met, observes bool
	// boot is the life of its process that opened the session, "" if it did not say. left says that this life has left: its
	// gateway accepts nothing any more.
	boot string
	left bool
	// indexed are, for each gate, the Services under which the ledger's index has it, inEverything whether it is in that list.
	indexed      [gates]map[Service]struct{}
	inEverything [gates]bool
	// countedExpected and countedMissing are how Counts counts it.
	countedExpected, countedMissing bool
}

// heard is a report, by whom it is, and as of when it counts. place is its index in the list of its subject.
type heard struct {
	Report
	by    *agent
	at    time.Time
	place int
}

// drain is one pod's.
type drain struct {
	pod      Pod
	of       *subject
	gate     Gate
	services map[Service]bool
	// barrier is what there is besides at that gate.
	barrier barrier
	// letGo are, of a drain at the hold that ended with the pod's, the agents that had let go of it.
	letGo map[AgentID]struct{}
	// open: neither dead nor abandoned. While it is, since is its start, moved back by the time earlier drains of this UID used.
	open  bool
	since time.Time
	// number is that of the drain that is open, or was last.
	number uint64
	// begun is when this drain was opened here, which since may long precede.
	begun time.Time
	// spent is the time that drains of this UID have used before this one.
	spent time.Duration
	// allowed says that the answer Allow was given since it was opened.
	allowed bool
	// allowedAlive counts the drains of this UID that were allowed and abandoned all the same.
	allowedAlive []time.Time
	// inFlight counts calls that are being held; lastAnswer is when the last one was answered.
	inFlight   int
	lastAnswer time.Time
	// queued says that it waits for room, and that no agent was told.
	queued bool
	// place says who judges whether there is capacity for it.
	place Placing
	// toldAt is when there was room, so that agents were told.
	toldAt time.Time
	// restart is as in Place.
	restart bool
	// expired says that the deadline has passed, and that those who were silent then have been noted.
	expired bool
	// quiescingAt is since when all agents that owe say Removed, and not all Idle. Zero: it is not so.
	quiescingAt time.Time
	// agents are those that may route the pod, in the order of their names, and roster their slots, as of rosterAt. See [Ledger.owing].
	agents   []*agent
	roster   bits
	rosterAt uint64
	// former are agents that routed the pod and declared again without its Services while the drain
	// was open. Each must still acknowledge the drain, at this gate.
	former map[*agent]Gate
	// blocking are the slots of those who kept the drain in phase, Unrouting or Quiescing, when status was last derived, and have not let go
	// since, and blocked is how many these are: while one is left, what others say changes nothing. 0: whatever is said may matter.
	blocking  bits
	blocked   int
	phase     Phase
	reason    Reason
	closedAt  time.Time
	checkedAt time.Time
	rev       uint64
	element   *list.Element
}

// NewLedger returns the empty ledger of one replica's present life. scope and sampling say which of
// the agents that observe are asked at barriers.
func NewLedger(times Times, scope Scope, sampling Sampling) *Ledger {
	return &Ledger{
		times: times, scope: scope, sampling: sampling,
		agents: map[AgentID]*agent{}, subjects: map[UID]*subject{}, changes: list.New(), touched: [gates]map[UID]bool{{}, {}},
		services: map[Service]*service{}, everything: [gates]map[*agent]struct{}{{}, {}}, rosterRev: 1, queued: map[*drain]struct{}{}, usable: map[Service][]UID{},
	}
}

// awayMost bounds those who are named as away.
const awayMost = 20

// Waiting is one agent that a drain waits for, and what it last said.
type Waiting struct {
	Agent AgentID
	// Name is namespace/name of the agent's pod, or its ID if the API does not list it.
	Name  string
	State State
	// Connected says whether it has a session here.
	Connected bool
}

// Status is a drain at one moment.
type Status struct {
	Pod    Pod
	Phase  Phase
	Reason Reason
	// Since is the start of the drain's one clock; Deadline is when it is over.
	Since, Deadline time.Time
	// Begun is when this replica opened the drain.
	Begun time.Time
	// Owed is how many agents owe it. Waiting are those that have not said Idle, sorted by name.
	Owed    int
	Waiting []Waiting
	// Suspended are those that would owe it and have not said Idle, were they not suspended. See [Suspension].
	Suspended []Waiting
	// Lost are those that have owed it, and have been away for too long since. See [AgentsLost].
	Lost []Waiting
	// Away are the others that would owe it and have not said Idle, had they not been away for too long, with pods that are not ready: nobody knows what their
	// gateways do. See [Ledger.Disconnect]. They are 20 at most, and MoreAway is how many more there are: a zone may be cut off.
	Away     []Waiting
	MoreAway int
	// Recheck is when Status may change by time alone. Zero: never.
	Recheck time.Time
	// Stated is the wait from Since on that a barrier makes for consumers that cannot acknowledge.
	// Cut says that it is beyond the deadline.
	Stated time.Duration
	Cut    bool
}

// Waits reports whether the drain still waits for gateways.
func (s Status) Waits() bool {
	return s.Phase == Queued || s.Phase == Unrouting || s.Phase == Quiescing
}

// Ask opens a drain of pod, or joins the one that is open, and returns its status. targets are the
// Services that list the pod, which add to what earlier calls named, and the targets of each where
// they are known: the drain is Queued while one of the Services has no capacity. What is said of a
// Service's targets holds for all of its drains, until it is said again. place is what another
// replica knows of the drain, whose clock starts at the earlier of the two starts. A pod that is
// dead has no drain: the status is Closed, Dead.
func (l *Ledger) Ask(now time.Time, pod Pod, targets []Targets, place Place) Status {
	d := l.drain(pod, AtHold)
	if !d.open && d.reason == Terminating {
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
	if place.Restart && d.open {
		place.Is = d.place
	}
	d.restart = place.Restart && (d.restart || !d.open)
	if brokenRule == 5 {
		d.since, d.begun = now, now
	}
	if !d.open {
		l.begin(now, d, now.Add(-d.spent))
		d.queued = true
		l.queued[d] = struct{}{}
	}
	d.place = place.Is
	l.adopt(d, now.Add(-place.Elapsed))
	l.admit(now)
	return l.status(now, d)
}

// drain returns that of a pod at a gate, and makes room for it.
func (l *Ledger) drain(pod Pod, gate Gate) *drain {
	of := l.subject(pod.UID)
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

// each calls f with every drain that there is, in no order. f may drop the one that it is called with.
func (l *Ledger) each(f func(*drain)) {
	for _, of := range l.subjects {
		for _, d := range of.drains {
			if d != nil {
				f(d)
			}
		}
	}
}

// subject returns what is known of a pod, and makes room for it.
func (l *Ledger) subject(uid UID) *subject {
	of := l.subjects[uid]
	if of == nil {
		of = &subject{uid: uid}
		l.subjects[uid] = of
	}
	return of
}

// spare forgets a pod of which nothing is known any more.
func (l *Ledger) spare(of *subject) {
	if of.drains == [gates]*drain{} {
		delete(l.subjects, of.uid)
	}
}

// serve adds services to those of d, and tells of it whom that concerns.
func (l *Ledger) serve(d *drain, services []Service) {
	grown := false
	for _, s := range services {
		grown = grown || !d.services[s]
		d.services[s] = true
	}
	if d.open && grown {
		l.enlist(d)
		if !d.queued {
			l.change(d)
		}
	}
}

// begin opens d.
func (l *Ledger) begin(now time.Time, d *drain, since time.Time) {
	l.enlist(d)
	d.open, d.reason, d.begun, d.lastAnswer, d.former = true, ReasonNone, now, now, nil
	d.quiescingAt, d.allowed, d.expired = time.Time{}, false, false
	d.since = since
	l.numbers++
	d.number = l.numbers
}

// adopt brings the drain's clock forward to since if that is older. Never by more than the deadline: a clock that runs wild on
// the other side may end this drain early, not the next ones.
func (l *Ledger) adopt(d *drain, since time.Time) {
	if since.IsZero() {
		return
	}
	if since = later(since, d.begun.Add(-l.length(d))); since.Before(d.since) {
		d.since = since
		l.touch(d)
	}
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
		d.lastAnswer = now
		d.allowed = d.allowed || allowed
	}
}

// Status returns the drain of uid at a gate. PhaseUnknown if there is none.
func (l *Ledger) Status(now time.Time, gate Gate, uid UID) Status {
	d := l.at(gate, uid)
	if d == nil {
		return Status{Pod: Pod{UID: uid}}
	}
	return l.status(now, d)
}

// GatePassed records, from a watch or a live read, that the pod is terminating (AtHold), or that it
// does not exist any more (AtBarrier). Its drain at that gate is closed, and its UID is dead. It
// reports whether there was an open one.
func (l *Ledger) GatePassed(now time.Time, gate Gate, uid UID) bool {
	d := l.at(gate, uid)
	if d == nil || !d.open {
		return false
	}
	l.expire(now, d)
	l.close(now, d, Terminating)
	return true
}

// NotTerminating records that a live read showed the pod without deletionTimestamp. The drain is
// abandoned if nobody has asked for it since [Ledger.Tick] named it. It reports whether it was.
func (l *Ledger) NotTerminating(now time.Time, uid UID) bool {
	d := l.at(AtHold, uid)
	if d == nil || !d.open || !l.suspect(now, d) {
		return false
	}
	l.expire(now, d)
	if d.allowed {
		d.allowedAlive = slices.DeleteFunc(d.allowedAlive, func(at time.Time) bool { return now.Sub(at) >= l.times.Memory })
		d.allowedAlive = append(d.allowedAlive, now)
	}
	if !d.restart {
		d.spent = d.lastAnswer.Sub(d.since)
	}
	l.close(now, d, Abandoned)
	return true
}

func (l *Ledger) suspect(now time.Time, d *drain) bool {
	return d.inFlight == 0 && (now.Sub(d.lastAnswer) >= l.times.Abandon || brokenRule == 3)
}

// close ends a drain. What was said of it must not count for the next one of this UID: an agent that has lifted a tombstone
// says nothing of the pod any more.
func (l *Ledger) close(now time.Time, d *drain, reason Reason) {
	if d.gate == AtHold && reason == Terminating {
		d.letGo = l.letGo(now, d)
	}
	d.open, d.reason, d.closedAt = false, reason, now
	for g := AtHold; g <= d.gate; g++ {
		for _, r := range d.of.heard[g] {
			delete(r.by.reports[g], d.of)
		}
		d.of.heard[g] = nil
	}
	l.change(d)
	l.delist(d)
	d.queued = false
	delete(l.queued, d)
	l.admit(now)
}

// Tick forgets what is older than the memory bound, reports that are too old to count, and agents that nobody knows any more. It
// returns the pods whose drains nobody has asked for lately: read each of them live and call
// [Ledger.GatePassed] or [Ledger.NotTerminating]. One is named again only after a heartbeat.
// overdue are the pods of barriers that are open beyond their deadline: they may not exist any
// more.
func (l *Ledger) Tick(now time.Time) (look, overdue []Pod) {
	if now.Sub(l.sweptAt) >= l.times.Freshness {
		l.sweptAt = now
		for _, a := range l.agents {
			if !a.expected && a.session == 0 && now.Sub(a.lostAt) >= l.times.Away {
				l.forget(a)
				continue
			}
			for g := range gates {
				for of, r := range a.reports[g] {
					if !l.fresh(now, r) {
						l.unhear(of, r)
					}
				}
			}
		}
	}
	l.readmit(now)
	l.admit(now)
	var over []*drain
	l.each(func(d *drain) {
		if d.open && !d.expired && !now.Before(l.deadline(d)) {
			over = append(over, d)
		}
	})
	slices.SortFunc(over, func(a, b *drain) int {
		return cmp.Or(l.deadline(a).Compare(l.deadline(b)), cmp.Compare(a.pod.UID, b.pod.UID), cmp.Compare(a.gate, b.gate))
	})
	for _, d := range over {
		l.expire(now, d)
	}
	var forgotten []*drain
	l.each(func(d *drain) {
		if d.letGo != nil && now.Sub(d.closedAt) >= 2*l.times.Deadline {
			d.letGo = nil // a barrier that came now would be over
		}
		switch {
		case d.open && d.gate == AtBarrier:
			if over := now.Sub(l.deadline(d)); over >= l.times.Memory {
				forgotten = append(forgotten, d)
			} else if over >= 0 {
				overdue = append(overdue, d.pod)
			}
		case d.open && l.suspect(now, d) && now.Sub(d.checkedAt) >= l.times.Heartbeat:
			d.checkedAt = now
			look = append(look, d.pod)
		case !d.open && now.Sub(d.closedAt) >= l.times.Memory:
			l.changes.Remove(d.element)
			d.of.drains[d.gate] = nil
			l.spare(d.of)
		}
	})
	slices.SortFunc(forgotten, func(a, b *drain) int { return cmp.Compare(a.pod.UID, b.pod.UID) })
	for _, d := range forgotten {
		l.close(now, d, Abandoned)
	}
	for _, pods := range [][]Pod{look, overdue} {
		slices.SortFunc(pods, func(a, b Pod) int { return cmp.Compare(a.UID, b.UID) })
	}
	return look, overdue
}

// Expect sets the whole list of agents that the API says exist. One that is no longer listed and not connected is forgotten.
func (l *Ledger) Expect(now time.Time, expected []Expected) {
	listed := make(map[AgentID]bool, len(expected))
	for _, e := range expected {
		listed[e.ID] = true
		a := l.agent(now, e.ID)
		if a.expected && a.name == e.Name && a.ready == e.Ready && a.label == e.Label && a.pending == e.Pending {
			continue
		}
		l.touchFor(a)
		if a.ready && !e.Ready {
			a.unreadyAt = now
		}
		if a.name != e.Name {
			l.unindex(a) // lists are in the order of names
		}
		a.expected, a.name, a.ready, a.label, a.pending = true, e.Name, e.Ready, e.Label, e.Pending
		l.index(a)
		l.recount(a)
		l.touchFor(a)
	}
	for id, a := range l.agents {
		if listed[id] || !a.expected {
			continue
		}
		l.touchFor(a)
		a.expected, a.ready = false, false
		l.recount(a)
		if a.session == 0 {
			l.forget(a)
		}
	}
}

// Counts are numbers of agents and pods.
type Counts struct {
	// Expected is how many agents the API lists, without those that have left. Missing is how many
	// of them have no session here.
	Expected, Missing int
	// Suspended is how many agents are.
	Suspended int
	// Elsewhere is how many pods other replicas unroute and this one does not.
	Elsewhere int
}

// Counts counts.
func (l *Ledger) Counts() Counts {
	c := Counts{Expected: l.expected, Missing: l.missing, Suspended: l.suspended}
	for uid := range l.elsewhere {
		if d := l.at(AtHold, uid); d == nil || !d.open {
			c.Elsewhere++
		}
	}
	return c
}

// recount brings what Counts returns in line with a.
func (l *Ledger) recount(a *agent) {
	expected := a.expected && !a.left
	missing := expected && a.session == 0
	l.expected += number(expected) - number(a.countedExpected)
	l.missing += number(missing) - number(a.countedMissing)
	a.countedExpected, a.countedMissing = expected, missing
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Hello is what an agent says of itself when it connects.
type Hello struct {
	// Boot names the life of its process. In another life than that which left, or in one without a
	// name, its gateway may accept again, and it must acknowledge.
	Boot string
	// Observes says that it understands [Watch]: one that does not cannot be asked at the barrier.
	Observes bool
}

// Connect opens a session for an agent and ends its former one, if any. What was reported before is
// void.
func (l *Ledger) Connect(now time.Time, id AgentID, h Hello) (session uint64) {
	a := l.agent(now, id)
	if a.left && (h.Boot == "" || h.Boot != a.boot) {
		a.left = false
	}
	if !a.met || a.observes != h.Observes {
		l.touchFor(a) // it may be asked elsewhere from now on
	}
	a.boot, a.met, a.observes, a.namespaces = h.Boot, true, h.Observes, map[string]bool{}
	for s := range a.routes {
		a.namespaces[s.Namespace] = true
	}
	l.rev++
	a.session = l.rev
	l.void(a)
	l.recount(a)
	l.index(a)
	l.touchFor(a)
	return a.session
}

// Disconnect ends a session. What was reported on it is void. A session that was ended by a newer one changes nothing. An agent that
// the API does not list has as long to come back as one that is not ready: its gateway does not stop routing with the stream.
func (l *Ledger) Disconnect(now time.Time, id AgentID, session uint64) {
	a := l.agents[id]
	if a == nil || a.session != session {
		return
	}
	a.session, a.lostAt = 0, now
	l.void(a)
	l.recount(a)
	l.touchFor(a)
}

// Current reports whether session is the open one of agent.
func (l *Ledger) Current(id AgentID, session uint64) bool {
	a := l.agents[id]
	return a != nil && session != 0 && a.session == session
}

// Declare sets the whole of what an agent's gateway routes, and returns the open drains of that:
// the agent must know them before it programs its gateway. ok is false, and nothing changed, if
// session is not the agent's open one. An agent that no longer names any Service of an open drain
// that it had to acknowledge must still do so, or leave. population names the agents of which a
// sample may be asked at the barrier instead of all: [Nodes]. Agents of another one, such as the
// replicas of one gateway, are all asked.
func (l *Ledger) Declare(id AgentID, session uint64, population string, routes []Route) (open []Open, ok bool) {
	if !l.Current(id, session) {
		return nil, false
	}
	a := l.agents[id]
	l.touchFor(a)
	former := map[*drain]Gate{}
	l.each(func(d *drain) {
		if a.declared && d.open && l.routes(a, d) && brokenRule != 23 {
			former[d] = a.gateOf(d)
		}
	})
	if a.population != population {
		l.unindex(a) // it is asked, or not, for another reason
	}
	a.declared, a.left, a.population = true, false, population
	l.recount(a)
	a.routes = make(map[Service]Route, len(routes))
	for _, r := range routes {
		if !a.namespaces["*"] && !a.namespaces[r.Service.Namespace] {
			a.namespaces[r.Service.Namespace] = true
			l.rev++
			a.widened = l.rev
			l.concern(a)
		}
		if have, twice := a.routes[r.Service]; !twice || owesAt(AtHold, r) || owesAt(AtBarrier, r) && !owesAt(AtHold, have) {
			a.routes[r.Service] = r
		}
	}
	for d, g := range former {
		if !a.names(d) {
			if d.former == nil {
				d.former = map[*agent]Gate{}
			}
			d.former[a], d.rosterAt, a.former = g, 0, true
		}
	}
	l.index(a)
	l.touchFor(a)
	open = []Open{}
	for e := l.changes.Back(); e != nil; e = e.Prev() {
		if d := e.Value.(*drain); d.open && !d.queued && l.routes(a, d) {
			open = append(open, l.opened(a, d))
		}
	}
	return open, true
}

// Leave records that an agent's gateway accepts nothing any more, so that nothing is sent to any pod through it: no drain owes the agent
// from now on, until it declares again or connects in another life. ok is false, and nothing changed, if session is not its open one.
// That an agent is told to stop is no reason to say so: its gateway outlives it.
func (l *Ledger) Leave(id AgentID, session uint64) (ok bool) {
	if !l.Current(id, session) {
		return false
	}
	a := l.agents[id]
	l.touchFor(a)
	a.left = true
	l.recount(a)
	l.index(a)
	return true
}

// Report takes in what an agent says on its open session. It reports whether any of it was news: a
// repeat of what still counts is not. A session that is not the open one changes nothing, nor does
// what an agent says of a pod without an open drain that it may have to acknowledge.
//
// asOf is a moment, by this replica's clock, at or before which the agent had renewed the leases of
// this replica and before which it read what it reports. The reports count as old as that. One that
// is older than the last one about the pod changes nothing.
func (l *Ledger) Report(now, asOf time.Time, id AgentID, session uint64, reports []Report) (news bool) {
	if !l.Current(id, session) {
		return false
	}
	a := l.agents[id]
	for _, r := range reports {
		of := l.subjects[r.UID]
		d := of.about(a, r)
		if d == nil || !d.open || r.Number != d.number || !l.routes(a, d) {
			continue // it was not asked, or about an earlier drain
		}
		was := a.reports[r.Gate][of]
		known := was != nil
		if known && asOf.Before(was.at) {
			continue
		}
		had := StateUnknown
		if known {
			had = was.State
		}
		// Before it counts: what comes too late does not undo that it was missing.
		l.expire(now, d)
		if brokenRule == 1 && known && had > r.State {
			r = was.Report
		}
		fresher := !known || was.Report != r || !l.fresh(now, was)
		if fresher {
			news = true
		}
		if known {
			was.Report, was.at = r, asOf
		} else {
			l.hear(asOf, a, r, len(reports))
		}
		if r.Gate == AtBarrier {
			l.learn(now, a, d, had, r)
		}
		if fresher && l.matters(now, d, a, r) {
			l.touch(d)
		}
		if l.acknowledges(now, d, a, r) && now.Sub(asOf) <= l.times.Freshness && now.Before(l.deadline(d)) {
			l.acknowledged(now, a)
		}
	}
	return news
}

// ChangesFor returns what must be sent to an agent that changed after revision rev, the oldest
// first, and the revision to ask with next. Ask with 0 for everything. That is the drains that the
// agent may have to acknowledge, and the releases of pods in the namespaces in which it routes
// Services, or has routed some on this session. After a declaration that adds a namespace, it is
// everything again.
func (l *Ledger) ChangesFor(id AgentID, rev uint64) (open []Open, released []Release, next uint64) {
	a := l.agents[id]
	if a == nil {
		return nil, nil, rev
	}
	if !a.declared {
		a.namespaces["*"] = true // it may route everything
	}
	next = max(rev, a.widened)
	if rev < a.widened {
		rev = 0
	}
	news := 0
	for e := l.changes.Front(); e != nil && e.Value.(*drain).rev > rev; e = e.Next() {
		news += number(e.Value.(*drain).open)
	}
	open = slices.Grow(open, news)
	for e := l.changes.Front(); e != nil && e.Value.(*drain).rev > rev; e = e.Next() {
		d := e.Value.(*drain)
		next = max(next, d.rev)
		switch {
		case d.open && !d.queued && l.routes(a, d):
			open = append(open, l.opened(a, d))
		case d.open || !a.mayKnow(d):
		case d.gate == AtBarrier:
			if a.gateOf(d) == AtBarrier {
				released = append(released, Release{UID: d.pod.UID, Terminating: d.reason == Terminating,
					Gate: AtBarrier})
			} else {
				released = append(released, Release{UID: d.pod.UID,
					Terminating: true}) // it was deleted, whatever has become of it
			}
		case !l.directs(a, d.pod.UID):
			released = append(released, Release{UID: d.pod.UID, Terminating: d.reason == Terminating ||
				brokenRule == 4})
		}
	}
	slices.Reverse(open)
	slices.Reverse(released)
	return open, released, next
}

// Changed returns the UIDs whose status at a gate may have changed since it was last called.
func (l *Ledger) Changed(gate Gate) []UID {
	touched := l.touched[gate]
	if len(touched) == 0 {
		return nil
	}
	uids := make([]UID, 0, len(touched))
	for uid := range touched {
		uids = append(uids, uid)
	}
	clear(touched)
	slices.Sort(uids)
	return uids
}

// Affected returns the agents for which [Ledger.ChangesFor] may have something that cannot wait,
// since it was last called. Of drains that ended and that they did not owe, the others hear
// whenever they next ask.
func (l *Ledger) Affected() []AgentID {
	if len(l.concerned) == 0 {
		return nil
	}
	ids := make([]AgentID, 0, len(l.concerned))
	for _, a := range l.concerned {
		a.concerned = false
		if l.slots[a.slot] == a {
			ids = append(ids, a.id)
		}
	}
	clear(l.concerned)
	l.concerned = l.concerned[:0]
	slices.Sort(ids)
	return ids
}

// concern notes that there is something to send to a. See [Ledger.Affected].
func (l *Ledger) concern(a *agent) {
	if a.session != 0 && !a.concerned {
		a.concerned = true
		l.concerned = append(l.concerned, a)
	}
}

// CouldRoute reports whether some agent may route one of services: it declared so, or has not been heard.
func (l *Ledger) CouldRoute(services []Service) bool {
	if len(l.everything[AtHold]) > 0 {
		return true
	}
	return slices.ContainsFunc(services, func(s Service) bool {
		of := l.services[s]
		return of != nil && len(of.agents[AtHold]) > 0
	})
}

func (l *Ledger) agent(now time.Time, id AgentID) *agent {
	a := l.agents[id]
	if a == nil {
		a = &agent{id: id, slot: slices.Index(l.slots, nil), name: string(id), lostAt: now, knownAt: now}
		if a.slot < 0 {
			a.slot = len(l.slots)
			l.slots = append(l.slots, nil)
		}
		l.slots[a.slot] = a
		l.agents[id] = a
	}
	return a
}

// forget drops an agent that nobody knows any more.
func (l *Ledger) forget(a *agent) {
	l.touchFor(a)
	l.unindex(a)
	l.void(a)
	if a.breaker.open {
		l.suspended--
	}
	delete(l.agents, a.id)
	l.slots[a.slot] = nil
}

// hear keeps the first that a says of a pod, which is one of so many, unhear forgets what it last said, and void all that it has.
func (l *Ledger) hear(asOf time.Time, a *agent, r Report, many int) {
	of := l.subject(r.UID)
	if a.reports[r.Gate] == nil {
		a.reports[r.Gate] = make(map[*subject]*heard, many)
	}
	h := &heard{r, a, asOf, len(of.heard[r.Gate])}
	a.reports[r.Gate][of] = h
	of.heard[r.Gate] = append(of.heard[r.Gate], h)
}

func (l *Ledger) unhear(of *subject, r *heard) {
	all := of.heard[r.Gate]
	last := len(all) - 1
	all[r.place], all[last].place = all[last], r.place
	all[last] = nil
	of.heard[r.Gate] = all[:last]
	delete(r.by.reports[r.Gate], of)
}

func (l *Ledger) void(a *agent) {
	for g := range gates {
		for of, r := range a.reports[g] {
			l.unhear(of, r)
		}
		a.reports[g] = nil
	}
}

// index brings the lists of who may route what in line with a. What does not change costs nothing: most agents come back with the
// routes that they had.
func (l *Ledger) index(a *agent) {
	for g := range gates {
		if everything := a.mayEverything(g); everything != a.inEverything[g] {
			a.inEverything[g] = everything
			l.rosterRev++
			l.everythingRev[g] = l.rosterRev
			if everything {
				l.everything[g][a] = struct{}{}
			} else {
				delete(l.everything[g], a)
			}
		}
		for s := range a.indexed[g] {
			if r, ok := a.routes[s]; !a.can(g) || !ok || !owesAt(g, r) {
				l.drop(a, g, s)
			}
		}
		for s, r := range a.routes {
			if _, has := a.indexed[g][s]; has || !a.can(g) || !owesAt(g, r) || s == EveryService {
				continue
			}
			if a.indexed[g] == nil {
				a.indexed[g] = map[Service]struct{}{}
			}
			a.indexed[g][s] = struct{}{}
			of := l.service(s)
			of.agents[g][a] = struct{}{}
			l.turn(of, g)
		}
	}
}

// unindex takes a out of all lists.
func (l *Ledger) unindex(a *agent) {
	for g := range gates {
		if a.inEverything[g] {
			a.inEverything[g] = false
			delete(l.everything[g], a)
			l.rosterRev++
			l.everythingRev[g] = l.rosterRev
		}
		for s := range a.indexed[g] {
			l.drop(a, g, s)
		}
	}
}

func (l *Ledger) drop(a *agent, g Gate, s Service) {
	delete(a.indexed[g], s)
	of := l.services[s]
	delete(of.agents[g], a)
	l.turn(of, g)
	l.prune(s)
}

// turn notes that the agents of a Service have changed.
func (l *Ledger) turn(of *service, g Gate) {
	l.rosterRev++
	of.rev[g], of.ordered[g] = l.rosterRev, nil
}

// order returns the agents of a Service in the order of their names.
func (s *service) order(g Gate) []*agent {
	if s.ordered[g] == nil {
		s.ordered[g] = slices.SortedFunc(maps.Keys(s.agents[g]), byName)
	}
	return s.ordered[g]
}

func byName(a, b *agent) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.id, b.id)) }

// service returns what s concerns, and makes room for it.
func (l *Ledger) service(s Service) *service {
	of := l.services[s]
	if of == nil {
		l.rosterRev++
		of = &service{agents: [gates]map[*agent]struct{}{{}, {}}, drains: map[*drain]struct{}{}, rev: [gates]uint64{l.rosterRev, l.rosterRev}}
		l.services[s] = of
	}
	return of
}

// prune forgets a Service that concerns nobody.
func (l *Ledger) prune(s Service) {
	of := l.services[s]
	if of == nil {
		return
	}
	if len(of.drains) == 0 {
		delete(l.usable, s)
	}
	if len(of.agents[AtHold]) == 0 && len(of.agents[AtBarrier]) == 0 && len(of.drains) == 0 {
		delete(l.services, s)
	}
}

// enlist puts d into the lists of all its Services, delist takes it out.
func (l *Ledger) enlist(d *drain) {
	for s := range d.services {
		l.service(s).drains[d] = struct{}{}
	}
	d.rosterAt = 0
}

func (l *Ledger) delist(d *drain) {
	for s := range d.services {
		delete(l.service(s).drains, d)
		l.prune(s)
	}
	d.agents, d.roster, d.rosterAt, d.blocking, d.blocked = nil, nil, 0, nil, 0
}

// owing returns the agents that may route the pod of d, which is open, in the order of their names: all that can owe it.
func (l *Ledger) owing(d *drain) []*agent {
	if d.rosterAt == l.rosterRev {
		return d.agents
	}
	newest := uint64(0)
	for _, g := range d.asks() {
		newest = max(newest, l.everythingRev[g])
		for s := range d.services {
			if of := l.services[s]; of != nil {
				newest = max(newest, of.rev[g])
			}
		}
	}
	if d.rosterAt == 0 || newest > d.rosterAt {
		l.enroll(d)
	}
	d.rosterAt = l.rosterRev
	return d.agents
}

// enroll finds who may route the pod of d.
func (l *Ledger) enroll(d *drain) {
	d.agents = d.agents[:0]
	for _, g := range d.asks() {
		d.agents = slices.AppendSeq(d.agents, maps.Keys(l.everything[g]))
		for s := range d.services {
			if of := l.services[s]; of != nil {
				d.agents = append(d.agents, of.order(g)...)
			}
		}
	}
	for a, g := range d.former {
		if l.slots[a.slot] == a && a.can(g) {
			d.agents = append(d.agents, a)
		}
	}
	if d.gate == AtBarrier {
		d.agents = slices.DeleteFunc(d.agents, func(a *agent) bool { return !l.owesBarrier(a, d) })
	}
	slices.SortFunc(d.agents, byName)   // quick where one Service is all
	d.agents = slices.Compact(d.agents) // one that routes several of the Services
	d.roster = d.roster.cleared(len(l.slots))
	for _, a := range d.agents {
		d.roster.set(a.slot)
	}
}

// asks lists the gates whose agents can owe d.
func (d *drain) asks() []Gate { return asked[d.gate] }

var asked = [gates][]Gate{{AtHold}, {AtHold, AtBarrier}}

// routes says whether a may owe d, which is open, as far as is known.
func (l *Ledger) routes(a *agent, d *drain) bool {
	l.owing(d)
	return d.roster.has(a.slot)
}

// names reports whether a has declared one of the Services of d, with any ability.
func (a *agent) names(d *drain) bool {
	_, names := a.routes[EveryService]
	for s := range d.services {
		_, ok := a.routes[s]
		names = names || ok
	}
	return names
}

// mayKnow reports whether the release of d is sent to a.
func (a *agent) mayKnow(d *drain) bool {
	_, former := d.former[a]
	return former || a.namespaces["*"] || a.namespaces[d.pod.Namespace] || brokenRule == 22
}

// may says whether a routes the pod of d so that it may be asked at a gate: an agent that has not declared may route everything, except
// that its label may say at which gate alone. One that has left routes nothing.
func (a *agent) may(g Gate, d *drain) bool {
	if a.mayEverything(g) {
		return true
	}
	if !a.can(g) {
		return false
	}
	if at, former := d.former[a]; former && at == g {
		return true
	}
	for s := range d.services {
		if r, ok := a.routes[s]; ok && owesAt(g, r) {
			return true
		}
	}
	return false
}

// can says whether a can be asked at a gate at all. Of one that was never heard nobody knows that it cannot.
func (a *agent) can(g Gate) bool {
	return !a.left && (g == AtHold || a.observes || !a.met)
}

// mayEverything says whether a may be asked at a gate about every Service.
func (a *agent) mayEverything(g Gate) bool {
	switch {
	case !a.can(g):
		return false
	case !a.declared && g == AtHold:
		return a.label != LabelObserved
	case !a.declared:
		return a.label != LabelDirected
	}
	r, ok := a.routes[EveryService]
	return ok && owesAt(g, r)
}

func owesAt(g Gate, r Route) bool {
	if g == AtHold {
		return r.Via == Endpoints && r.Kind == Directed
	}
	return r.Via == Endpoints && r.Kind == Observed
}

// owes says whether a must acknowledge at now what it may owe and, if time alone may change that, when.
func (l *Ledger) owes(now time.Time, a *agent) (owes bool, until time.Time) {
	if a.session != 0 || a.ready && brokenRule != 7 {
		return true, time.Time{}
	}
	if brokenRule == 7 {
		return false, time.Time{}
	}
	until = a.lostAt.Add(l.times.Away)
	return now.Before(until), until
}

func (l *Ledger) fresh(now time.Time, r *heard) bool {
	return r.by.session != 0 && now.Sub(r.at) <= l.times.Freshness
}

func (l *Ledger) deadline(d *drain) time.Time {
	if d.gate == AtBarrier {
		return d.since.Add(d.barrier.bound)
	}
	return later(d.since.Add(l.times.Deadline), d.begun.Add(l.times.Hold))
}

// status derives everything from what is known at now, once what the deadline does to others is done.
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
	recheck := func(at time.Time) {
		if at.After(now) && (s.Recheck.IsZero() || at.Before(s.Recheck)) {
			s.Recheck = at
		}
	}
	least, kept := Idle, false
	agents, said := l.owing(d), l.hearing(d)
	l.waiting = l.waiting[:0]
	for i, a := range agents {
		owes, until := l.owes(now, a)
		if !until.IsZero() {
			recheck(until)
		}
		if !owes {
			switch {
			case !a.expected || a.pending:
			case a.met && later(until, a.unreadyAt).After(d.begun):
				s.Lost = append(s.Lost, Waiting{a.id, a.name, StateUnknown, false})
			case len(s.Away) == awayMost:
				s.MoreAway++
			default:
				s.Away = append(s.Away, Waiting{a.id, a.name, StateUnknown, false}) // what was said on a session that has ended is void
			}
			continue
		}
		state, last, until := l.word(now, said[a.slot], d)
		kept = kept || last
		if !until.IsZero() {
			recheck(until)
		}
		waived, until := l.waived(now, a, d)
		if waived && state < Idle {
			s.Suspended = append(s.Suspended, Waiting{a.id, a.name, state, a.session != 0})
			continue
		}
		recheck(until)
		s.Owed++
		least = min(least, state)
		if state < Idle {
			if s.Waiting == nil {
				s.Waiting = make([]Waiting, 0, len(agents)-i)
			}
			s.Waiting = append(s.Waiting, Waiting{a.id, a.name, state, a.session != 0})
			l.waiting = append(l.waiting, a)
		}
	}
	if least != Removed {
		d.quiescingAt = time.Time{}
	} else if d.quiescingAt.IsZero() {
		d.quiescingAt = now
	}
	recheck(s.Deadline)
	switch {
	case s.Owed == 0 && len(s.Suspended) > 0:
		s.Phase, s.Reason = Released, Suspended
	case s.Owed == 0 && brokenRule == 6 && now.Before(s.Deadline):
		s.Phase = Unrouting
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
		recheck(d.quiescingAt.Add(l.times.IdleBound))
	default:
		s.Phase = Unrouting
	}
	if d.gate == AtBarrier {
		s = l.stated(now, d, s)
		if !s.Recheck.IsZero() && !s.Recheck.After(now) {
			s.Recheck = time.Time{}
		}
	}
	if len(s.Lost) > 0 && (s.Reason == Acknowledged || s.Reason == NoAgents || s.Reason == LastTarget) {
		s.Reason = AgentsLost
	}
	l.block(d, s)
	return s
}

// hearing returns, by the slots of agents, what they say of d. It is good until the next call.
func (l *Ledger) hearing(d *drain) []*heard {
	if len(l.said) < len(l.slots) {
		l.said = make([]*heard, len(l.slots))
	}
	clear(l.said)
	for g := AtHold; g <= d.gate; g++ {
		for _, r := range d.of.heard[g] {
			if d.gate == AtHold || r.by.gateOf(d) == g {
				l.said[r.by.slot] = r
			}
		}
	}
	return l.said
}

// word is what the report of an agent, which may be nil, says of d that counts at now, whether it counts for more than it says because there is
// nobody else to send to and, if time alone may change that, when.
func (l *Ledger) word(now time.Time, r *heard, d *drain) (state State, last bool, until time.Time) {
	if r == nil || !l.fresh(now, r) {
		return StateUnknown, false, time.Time{}
	}
	state, last, until = l.counts(now, d, r.by, r.Report)
	if old := r.at.Add(l.times.Freshness + 1); until.IsZero() || old.Before(until) {
		until = old
	}
	return state, last, until
}

// block notes who of l.waiting keeps d in the phase of s.
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

// needs is what all have to say until d, in its present phase, enters the next.
func (d *drain) needs() State {
	if d.phase == Unrouting {
		return Removed
	}
	return Idle
}

// matters reports whether what a says of d can change its phase: of those who keep it there, the last one lets it go.
func (l *Ledger) matters(now time.Time, d *drain, a *agent, r Report) bool {
	if d.blocked == 0 {
		return true
	}
	state, _, _ := l.counts(now, d, a, r)
	switch {
	case d.phase == Quiescing && state < Removed:
		return true // a step back
	case state < d.needs() || !d.blocking.has(a.slot):
		return false
	}
	d.blocking.unset(a.slot)
	d.blocked--
	return d.blocked == 0
}

func (l *Ledger) change(d *drain) {
	l.rev++
	d.rev = l.rev
	if d.element == nil {
		d.element = l.changes.PushFront(d)
	} else {
		l.changes.MoveToFront(d.element)
	}
	l.touch(d)
	for _, a := range l.owing(d) {
		l.concern(a)
	}
}

// touch notes that the status of d may have changed.
func (l *Ledger) touch(d *drain) {
	d.blocked = 0
	l.touched[d.gate][d.pod.UID] = true
}

// touchFor touches the drains that a may owe.
func (l *Ledger) touchFor(a *agent) {
	if a.inEverything[AtHold] || a.inEverything[AtBarrier] || a.former {
		l.each(func(d *drain) {
			_, former := d.former[a]
			if former {
				d.rosterAt = 0 // it may be about to leave
			}
			if d.open && (former || a.inEverything[AtHold] || d.gate == AtBarrier) {
				l.touch(d)
			}
		})
	}
	for g := range gates {
		for s := range a.indexed[g] {
			for d := range l.services[s].drains {
				if slices.Contains(d.asks(), g) {
					l.touch(d)
				}
			}
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// bits is a set of small numbers.
type bits []uint64

// cleared returns the empty set with room for numbers below n, in the place of b.
func (b bits) cleared(n int) bits {
	if words := (n + 63) / 64; words > cap(b) {
		return make(bits, words)
	} else {
		b = b[:words]
	}
	clear(b)
	return b
}

func (b bits) set(n int)   { b[n/64] |= 1 << (n % 64) }
func (b bits) unset(n int) { b[n/64] &^= 1 << (n % 64) }

// has says whether n is in the set, for which it need not have room.
func (b bits) has(n int) bool { return n/64 < len(b) && b[n/64]&(1<<(n%64)) != 0 }

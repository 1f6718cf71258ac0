package drain

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// agent is what is known of one agent.
type agent struct {
	// Expected is as the API lists it, if listed is set.
	Expected
	listed bool
	// session is the number of the open stream, 0 if there is none. Numbers grow and are never
	// reused.
	session uint64
	// lostAt is when the last session ended or, never connected, when the API first listed it.
	lostAt time.Time
	// unreadyAt is when the API last reported its pod as no longer ready, knownAt when the agent
	// became known.
	unreadyAt, knownAt time.Time
	life
	declaration
	// namespaces are those in which the agent has routed a Service on its present session, "*" all
	// of them: the releases of their pods are sent to it.
	namespaces map[string]bool
	// reports are its reports about single pods. For these pods they count instead of upTo.
	reports [gates]map[*subject]*received
	acknowledgement
	// told is the revision of the last batch that was sent to it, on any session.
	told    uint64
	breaker breaker
	entry
	// former: some drain may have it in owed.former.
	former bool
}

// life is what an agent offered when it connected last.
type life struct {
	// met: it has had a session. observes: the last session understood [Watch].
	met, observes bool
	// boot is the life of its process, "" if unknown. left: in this boot the agent has left,
	// because its gateway accepts no more traffic.
	boot string
	left bool
}

// declaration is what an agent declared, if only on an earlier session. See [Ledger.Declare].
type declaration struct {
	declared   bool
	population string
	routes     map[Service]Route
}

// received is a report with its sender and the time as of which it counts.
type received struct {
	Report
	by *agent
	at time.Time
	// since is when it first reported that, place its index in the list of its subject.
	since time.Time
	place int
}

// Expect replaces the list of agents that exist according to the API. One that is no longer listed
// and not connected is forgotten.
func (l *Ledger) Expect(now time.Time, expected []Expected) {
	listed := make(map[AgentID]bool, len(expected))
	for _, e := range expected {
		listed[e.ID] = true
		a := l.agent(now, e.ID)
		if a.listed && a.Expected == e {
			continue
		}
		l.touchFor(a)
		if a.Ready && !e.Ready {
			a.unreadyAt = now
		}
		if a.Name != e.Name {
			l.unindex(a) // lists are sorted by name
		}
		a.listed, a.Expected = true, e
		l.index(a)
		l.recount(a)
		l.touchFor(a)
	}
	var gone []*agent
	for id, a := range l.agents {
		if listed[id] || !a.listed {
			continue
		}
		l.touchFor(a)
		a.listed, a.Ready = false, false
		l.recount(a)
		if a.session == 0 {
			gone = append(gone, a)
		}
	}
	l.forget(gone)
}

// Counts has the numbers of agents and pods that operators see.
type Counts struct {
	// Expected is how many agents the API lists, without those that have left. Missing is how many
	// of them have no session here.
	Expected, Missing int
	// Suspended is how many agents are suspended.
	Suspended int
	// Elsewhere is how many pods other replicas unroute and this one does not.
	Elsewhere int
}

// Counts returns the present numbers.
func (l *Ledger) Counts() Counts {
	c := l.total
	for uid := range l.elsewhere {
		if d := l.at(AtHold, uid); d == nil || !d.open {
			c.Elsewhere++
		}
	}
	return c
}

// Hello is how an agent introduces itself when it connects.
type Hello struct {
	// Boot names the life of its process. An agent that left and connects with another boot, or
	// with none, must acknowledge again: its gateway may accept traffic again.
	Boot string
	// Observes: the agent understands [Watch]. One that does not cannot be asked at the barrier.
	Observes bool
}

// Connect opens a session for an agent and ends its former one, if any, which voids all earlier
// reports.
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
	l.dropReports(a)
	l.recount(a)
	l.index(a)
	l.touchFor(a)
	return a.session
}

// Disconnect ends a session, which voids the reports on it. It changes nothing if a newer session
// has replaced this one. Drains wait for Times.Away for the agent to reconnect if its pod is not
// ready or not listed by the API, because its gateway keeps routing after the stream ends.
func (l *Ledger) Disconnect(now time.Time, id AgentID, session uint64) {
	a := l.agents[id]
	if a == nil || a.session != session {
		return
	}
	a.session, a.lostAt = 0, now
	l.dropReports(a)
	l.recount(a)
	l.touchFor(a)
}

// Current reports whether session is the open one of agent.
func (l *Ledger) Current(id AgentID, session uint64) bool {
	a := l.agents[id]
	return a != nil && session != 0 && a.session == session
}

// Declare replaces the list of what an agent's gateway routes. repeat reports whether the list
// differs from the one before: then call [Ledger.ChangesFor] with 0, because the agent must learn
// of the open drains of these Services before it programs its gateway. ok is false, and nothing
// changed, if session is not the agent's open one. An agent that no longer names any Service of an
// open drain that it had to acknowledge must still do so, or leave. population is [Nodes], or the
// name of one gateway. At the barrier a sample of the agents of Nodes may be asked; the agents of
// any other population are all asked.
func (l *Ledger) Declare(id AgentID, session uint64, population string, routes []Route) (repeat, ok bool) {
	if !l.Current(id, session) {
		return false, false
	}
	a := l.agents[id]
	before, left := a.declaration, a.left
	l.touchFor(a)
	former := map[*drain]Gate{}
	l.each(func(d *drain) {
		if a.declared && d.open && l.routes(a, d) {
			former[d] = a.gateOf(d)
		}
	})
	if a.population != population {
		l.unindex(a) // the reason for which it is asked, or not, has changed
	}
	a.declared, a.left, a.population = true, false, population
	l.recount(a)
	a.routes = make(map[Service]Route, len(routes))
	for _, r := range routes {
		a.namespaces[r.Service.Namespace] = true
		have, twice := a.routes[r.Service]
		if !twice || owesAt(AtHold, r) || owesAt(AtBarrier, r) && !owesAt(AtHold, have) {
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
	repeat = left || !before.declared || before.population != population || !maps.Equal(before.routes, a.routes)
	if repeat {
		l.concern(a)
	}
	return repeat, true
}

// Leave records that an agent's gateway accepts no more traffic, so that nothing reaches a pod
// through it. The agent need not acknowledge any drain until it declares again or connects with
// another boot. ok is false, and nothing changed, if session is not its open one. An agent must not
// leave only because it is asked to stop: its gateway outlives it.
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

func (l *Ledger) agent(now time.Time, id AgentID) *agent {
	a := l.agents[id]
	if a == nil {
		a = &agent{Expected: Expected{ID: id, Name: string(id)}, lostAt: now, knownAt: now}
		a.slot = slices.Index(l.slots, nil)
		if a.slot < 0 {
			a.slot = len(l.slots)
			l.slots = append(l.slots, nil)
		}
		l.slots[a.slot] = a
		l.agents[id] = a
	}
	return a
}

// forget drops agents that are neither listed nor connected. Each one that leaves the lists costs
// the next look at who routes a pod the time for all, so all looks come first.
func (l *Ledger) forget(gone []*agent) {
	if len(gone) == 0 {
		return
	}
	l.each(func(d *drain) {
		for _, a := range gone {
			if d.open && l.vanishes(a, d) && l.routes(a, d) {
				d.vanished = append(d.vanished, Waiting{Agent: a.ID, Name: a.Name})
			}
			d.removed.unset(a.slot)
			d.barrier.removedBy.unset(a.slot)
		}
		slices.SortFunc(d.vanished, func(a, b Waiting) int { return cmp.Compare(a.Name, b.Name) })
	})
	for _, a := range gone {
		l.touchFor(a)
		l.unindex(a)
		l.dropReports(a)
		if a.breaker.open {
			l.total.Suspended--
		}
		l.concerned.unset(a.slot)
		delete(l.agents, a.ID)
		l.slots[a.slot] = nil
	}
}

// vanishes reports whether a cannot acknowledge d any more: its pod does not exist, perhaps by
// force, and its last report about d was less than Removed. What its gateway does is unknown then.
func (l *Ledger) vanishes(a *agent, d *drain) bool {
	return !a.listed && a.met && !a.left && !d.queued && !d.removed.has(a.slot)
}

// keepReport stores r as a's report about a pod, one of many, dropReport deletes it, and
// dropReports deletes all reports of a.
func (l *Ledger) keepReport(asOf time.Time, a *agent, r Report, many int) *received {
	of := l.subjects[r.UID]
	if a.reports[r.Gate] == nil {
		a.reports[r.Gate] = make(map[*subject]*received, many)
	}
	h := &received{Report: r, by: a, at: asOf, place: len(of.received[r.Gate])}
	a.reports[r.Gate][of] = h
	of.received[r.Gate] = append(of.received[r.Gate], h)
	return h
}

func (l *Ledger) dropReport(of *subject, r *received) {
	all := of.received[r.Gate]
	last := len(all) - 1
	all[r.place], all[last].place = all[last], r.place
	all[last] = nil
	of.received[r.Gate] = all[:last]
	delete(r.by.reports[r.Gate], of)
}

func (l *Ledger) dropReports(a *agent) {
	for g := range gates {
		for of, r := range a.reports[g] {
			l.dropReport(of, r)
		}
		a.reports[g] = nil
	}
	a.void()
}

// Asks reports whether an agent may be asked at a gate about the pods of one of services: one that
// declared it for that gate, or that has not declared and whose label is not of the other.
func (l *Ledger) Asks(g Gate, services []Service) bool {
	asks := func(s Service) bool { return l.services[s] != nil && len(l.services[s].agents[g]) > 0 }
	return asks(EveryService) || slices.ContainsFunc(services, asks)
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
	return former || a.namespaces["*"] || a.namespaces[d.pod.Namespace]
}

// mayBeAsked reports whether a routes the pod of d in such a way that it may be asked at a gate. An
// agent that has not declared may route everything, but its label may restrict it to one gate. An
// agent that has left routes nothing.
func (a *agent) mayBeAsked(g Gate, d *drain) bool {
	if at, former := d.former[a]; former && at == g && a.canBeAsked(g) {
		return true
	}
	for s := range d.listedBy() {
		if a.mayBeAskedAbout(g, s) {
			return true
		}
	}
	return false
}

// canBeAsked reports whether a can be asked at a gate at all. An agent that has never connected may
// be able to.
func (a *agent) canBeAsked(g Gate) bool {
	return !a.left && (g == AtHold || a.observes || !a.met)
}

// mayBeAskedAbout reports whether a may be asked at a gate because of its route of s.
func (a *agent) mayBeAskedAbout(g Gate, s Service) bool {
	switch {
	case !a.canBeAsked(g):
		return false
	case a.declared || s != EveryService:
		r, ok := a.routes[s]
		return ok && owesAt(g, r)
	case g == AtHold:
		return a.Label != LabelObserved
	default:
		return a.Label != LabelDirected
	}
}

func owesAt(g Gate, r Route) bool {
	if g == AtHold {
		return r.Via == Endpoints && r.Kind == Directed
	}
	return r.Via == Endpoints && r.Kind == Observed
}

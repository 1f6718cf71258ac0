package drain

import (
	"cmp"
	"iter"
	"maps"
	mathbits "math/bits"
	"slices"
)

// roster is an index of which agents may have to acknowledge a drain, by what they declared. The
// cost of an event depends on the agents and drains that it concerns, not on how many there are.
type roster struct {
	agents map[AgentID]*agent
	// slots holds the agents by their numbers, nil where a number is free: sets of agents are
	// [bits].
	slots []*agent
	// services are the Services that an agent has declared, or that list the pod of an open drain.
	// [EveryService] lists every pod. Its agents are those that declare it, and those that have not
	// declared and whose label does not name the other gate only.
	services map[Service]*service
	// rosterRev is the last revision that was given to a list of agents, at first 1.
	rosterRev uint64
	total     Counts
}

// service is what is known of one Service.
type service struct {
	// agents are, for each gate, the agents that declared it and are asked there. rev is the
	// revision at which that list, or its order, last changed.
	agents [gates]map[*agent]struct{}
	rev    [gates]uint64
	// ordered are these agents, sorted by name. Nil: to be computed.
	ordered [gates][]*agent
	// drains are the open ones of its pods.
	drains map[*drain]struct{}
}

// entry is where the roster has an agent.
type entry struct {
	// slot is its number, which another agent may get when this one is forgotten.
	slot int
	// indexed are, for each gate, the Services under which it is listed.
	indexed [gates]map[Service]*service
	// countedExpected and countedMissing say how [Counts] counts it.
	countedExpected, countedMissing bool
}

// owed are the agents that may have to acknowledge a drain.
type owed struct {
	// agents are sorted by name, roster are their slots, both as of rosterAt. 0: to be computed.
	agents   []*agent
	roster   bits
	rosterAt uint64
	// upTo are the slots of the agents whose UpTo covers it.
	upTo bits
	// reached are the slots of those that have reported Removed, or Idle, since it was opened.
	reached [2]bits
	// removed are the slots of those whose last report, on any session, was Removed or Idle.
	removed bits
	// former are agents that routed the pod and declared again without its Services while the drain
	// was open. Each must still acknowledge the drain, at this gate.
	former map[*agent]Gate
	// vanished are the agents for which the drain waited and that do not exist any more, by name.
	vanished []Waiting
}

// index updates the lists for a. It costs nothing if nothing changed: most agents reconnect with
// the routes that they had.
func (r *roster) index(a *agent) {
	for g := range gates {
		for s := range a.indexed[g] {
			if !a.mayBeAskedAbout(g, s) {
				r.drop(a, g, s)
			}
		}
		r.add(a, g, EveryService)
		for s := range a.routes {
			r.add(a, g, s)
		}
	}
}

// unindex takes a out of all lists.
func (r *roster) unindex(a *agent) {
	for g := range gates {
		for s := range a.indexed[g] {
			r.drop(a, g, s)
		}
	}
}

func (r *roster) add(a *agent, g Gate, s Service) {
	if _, has := a.indexed[g][s]; has || !a.mayBeAskedAbout(g, s) {
		return
	}
	if a.indexed[g] == nil {
		a.indexed[g] = map[Service]*service{}
	}
	of := r.service(s)
	a.indexed[g][s] = of
	if of.agents[g] == nil {
		of.agents[g] = map[*agent]struct{}{}
	}
	of.agents[g][a] = struct{}{}
	r.turn(of, g)
}

func (r *roster) drop(a *agent, g Gate, s Service) {
	of := a.indexed[g][s]
	delete(a.indexed[g], s)
	delete(of.agents[g], a)
	r.turn(of, g)
	r.prune(s, of)
}

// turn records that the agents of a Service have changed.
func (r *roster) turn(of *service, g Gate) {
	r.rosterRev++
	of.rev[g], of.ordered[g] = r.rosterRev, nil
}

// order returns the agents of a Service, sorted by name.
func (s *service) order(g Gate) []*agent {
	if s.ordered[g] == nil {
		s.ordered[g] = slices.SortedFunc(maps.Keys(s.agents[g]), byName)
	}
	return s.ordered[g]
}

func byName(a, b *agent) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) }

// service returns the entry of s, and adds it if there is none.
func (r *roster) service(s Service) *service {
	of := r.services[s]
	if of == nil {
		r.rosterRev++
		of = &service{rev: [gates]uint64{r.rosterRev, r.rosterRev}}
		r.services[s] = of
	}
	return of
}

// prune forgets a Service, whose entry is of, that no agent has declared and no open drain is of.
func (r *roster) prune(s Service, of *service) {
	if len(of.agents[AtHold]) == 0 && len(of.agents[AtBarrier]) == 0 && len(of.drains) == 0 {
		delete(r.services, s)
	}
}

// enlist puts d into the lists of all its Services, delist takes it out.
func (r *roster) enlist(d *drain) {
	for s := range d.listedBy() {
		of := r.service(s)
		if of.drains == nil {
			of.drains = map[*drain]struct{}{}
		}
		of.drains[d] = struct{}{}
	}
	d.rosterAt = 0
}

func (r *roster) delist(d *drain) {
	for s := range d.listedBy() {
		of := r.service(s)
		delete(of.drains, d)
		r.prune(s, of)
	}
	d.agents, d.roster, d.rosterAt = nil, nil, 0
}

// listedBy returns the Services that list the pod of d, [EveryService] among them.
func (d *drain) listedBy() iter.Seq[Service] {
	return func(yield func(Service) bool) {
		for s := range d.services {
			if !yield(s) {
				return
			}
		}
		yield(EveryService)
	}
}

// owing returns the agents that may have to acknowledge d, which is open, sorted by
// name.
func (r *roster) owing(d *drain) []*agent {
	if d.rosterAt == r.rosterRev {
		return d.agents
	}
	newest := uint64(0)
	for _, g := range d.asks() {
		for s := range d.listedBy() {
			if of := r.services[s]; of != nil {
				newest = max(newest, of.rev[g])
			}
		}
	}
	if d.rosterAt == 0 || newest > d.rosterAt {
		r.enroll(d)
	}
	d.rosterAt = r.rosterRev
	return d.agents
}

// enroll computes the agents that may have to acknowledge d.
func (r *roster) enroll(d *drain) {
	d.agents = d.agents[:0]
	for _, g := range d.asks() {
		for s := range d.listedBy() {
			if of := r.services[s]; of != nil {
				for _, a := range of.order(g) {
					if d.gate == AtHold || g == AtHold && a.owesBarrier(d) || g == AtBarrier && d.barrier.asks(a) {
						d.agents = append(d.agents, a)
					}
				}
			}
		}
	}
	for a, g := range d.former {
		if r.slots[a.slot] == a && a.canBeAsked(g) && (d.gate == AtHold || a.owesBarrier(d)) {
			d.agents = append(d.agents, a)
		}
	}
	slices.SortFunc(d.agents, byName)   // already sorted if there is one Service
	d.agents = slices.Compact(d.agents) // an agent that routes several of the Services
	d.roster = d.roster.cleared(len(r.slots))
	for _, a := range d.agents {
		d.roster.set(a.slot)
	}
}

// asks returns the gates whose agents may have to acknowledge d.
func (d *drain) asks() []Gate { return asked[d.gate] }

var asked = [gates][]Gate{{AtHold}, {AtHold, AtBarrier}}

// routes reports whether a may have to acknowledge d, which is open.
func (r *roster) routes(a *agent, d *drain) bool {
	r.owing(d)
	return d.roster.has(a.slot)
}

// recount updates the counts for a.
func (r *roster) recount(a *agent) {
	expected := a.listed && !a.left
	missing := expected && a.session == 0 && !a.Pending
	r.total.Expected += number(expected) - number(a.countedExpected)
	r.total.Missing += number(missing) - number(a.countedMissing)
	a.countedExpected, a.countedMissing = expected, missing
}

// bits is a set of small numbers.
type bits []uint64

// grown returns b extended to hold numbers below n.
func (b bits) grown(n int) bits {
	if words := (n + 63) / 64; words > len(b) {
		return append(b, make(bits, words-len(b))...)
	}
	return b
}

// cleared returns the empty set for numbers below n, in the memory of b.
func (b bits) cleared(n int) bits {
	if words := (n + 63) / 64; words > cap(b) {
		return make(bits, words)
	} else {
		b = b[:words]
	}
	clear(b)
	return b
}

func (b bits) set(n int) { b[n/64] |= 1 << (n % 64) }

// all returns the numbers in the set.
func (b bits) all() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i, word := range b {
			for ; word != 0; word &= word - 1 {
				if !yield(64*i + mathbits.TrailingZeros64(word)) {
					return
				}
			}
		}
	}
}

// unset takes n out of the set, which may be beyond its size.
func (b bits) unset(n int) {
	if n/64 < len(b) {
		b[n/64] &^= 1 << (n % 64)
	}
}

// has reports whether n is in the set. n may be beyond its size.
func (b bits) has(n int) bool { return n/64 < len(b) && b[n/64]&(1<<(n%64)) != 0 }

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

package drain

import (
	"cmp"
	"slices"
	"time"
)

// StrikesOut is how many drains in a row an agent lets expire before it is suspended.
const StrikesOut = 3

// TrialEvery is the time in which one drain waits for an agent that is suspended.
const TrialEvery = 5 * time.Second

// breaker is what keeps an agent that does not answer from delaying every deletion by the whole
// deadline.
//
// A strike is a drain that ended by its deadline while the agent owed it and had said neither
// Removed nor Idle. Three in a row open the breaker: the agent is suspended, which means that it is
// told of drains and not waited for. An acknowledgement in time, of any drain, wipes the strikes
// out and ends the suspension.
//
// In a row means one after the other. Drains that expire at one moment are one failure seen many
// times, and so are those that overlap: a drain counts only if it was begun here after the last one
// that counted had expired, so that to be suspended takes three whole deadlines of silence, whether
// one pod is deleted or a hundred. Nor does a drain count for which the agent was not given at
// least half a deadline: one that this replica met late, one that goes on with the little time that
// an abandoned one has left, one that was older than the agent, or one that had waited for room
// until late.
//
// What does not count: Kept, which is an answer, as is the word on a young pod that is not believed
// yet, and Removed without Idle, which is the clients' doing. What does not reset: a new session
// and a new life of the agent. One that crashes every twenty seconds answers nothing either.
//
// This replica may be cut off. That is assumed while most of the agents that the API lists have no
// stream here: no drain then counts for an agent that lost its stream, drains wait for the
// deadline, and another replica may hear what this one cannot. What another replica has counted is
// believed even then. An agent that never connected here is suspended all the same: its CA bundle,
// its token or a NetworkPolicy is wrong, and it may never come. An agent that is connected and does
// not answer is suspended even if it is the only one, and even if all are: the drains are then
// released with the reason Suspended, which people are warned of.
//
// A drain that does not wait for an agent is closed before the agent can acknowledge it. So one
// drain in each [TrialEvery] of the clock waits for a suspended agent, less than one hold. Agents
// that are suspended share that drain, and so do replicas. For agents that need longer, the breaker
// closes by half after the memory bound: the agent is waited for again, and one more strike
// suspends it again.
type breaker struct {
	strikes int
	// since is when the first of these drains was opened, struckAt when the last of them expired.
	since, struckAt time.Time
	// clearedAt is when the agent last acknowledged a drain in time here, or was given another
	// chance.
	clearedAt time.Time
	// open means suspended.
	open bool
	// trial is the number of the drain that last waited for the agent while it was suspended. It
	// was told of that drain in the TrialEvery that began at triedAt.
	trial   uint64
	triedAt time.Time
}

// Suspension says that an agent was suspended, or, if Over, that it is waited for again.
type Suspension struct {
	Agent AgentID
	Name  string
	Over  bool
	// Acknowledged says that it is over because the agent acknowledged a drain in time. Otherwise
	// it gets another chance.
	Acknowledged bool
}

// Suspensions returns the agents that were suspended or are no longer, since it was last called.
func (l *Ledger) Suspensions() []Suspension {
	all := l.suspensions
	l.suspensions = nil
	// What happens at one moment happens in no order.
	slices.SortStableFunc(all, func(a, b Suspension) int { return cmp.Compare(a.Agent, b.Agent) })
	return all
}

// expire notes who was silent when the deadline of d passed. It does so once for each drain, and
// before anything else that happens after the deadline: a late acknowledgement does not undo that
// the deletion had to go on without.
func (l *Ledger) expire(now time.Time, d *drain) {
	if !d.open || d.expired || now.Before(l.deadline(d)) {
		return
	}
	s := l.derive(now, d)
	d.expired = true
	if s.Reason != Deadline || d.barrier.observe {
		return
	}
	l.touch(d)
	said := l.reportsOn(d)
	for _, w := range s.Waiting {
		a := l.agents[w.Agent]
		if r := said[a.slot]; r != nil && r.State >= Removed && l.fresh(now, r) {
			continue // it has answered: that this does not count yet, for the pod is young, is not its fault
		}
		if d.gate == AtBarrier && a.sampled() && w.Connected && w.State < Removed {
			l.learnt.add(l.length(d)) // it takes that long at least
		}
		// Of a drain that is queued nobody was told.
		if !d.queued && w.State < Removed && w.State != Kept {
			l.strike(a, d)
		}
	}
}

// strike counts that a let d expire, if it is to be counted.
func (l *Ledger) strike(a *agent, d *drain) {
	over := l.deadline(d)
	mayBeCutOff := a.session == 0 && a.met && 2*l.total.Missing > l.total.Expected
	if over.Sub(later(d.toldAt, a.knownAt)) < l.length(d)/2 || d.begun.Before(a.breaker.struckAt) || mayBeCutOff {
		return
	}
	b := &a.breaker
	if !b.since.After(b.clearedAt) {
		b.since = d.begun
	}
	b.strikes, b.struckAt = b.strikes+1, over
	l.judge(a)
}

// judge suspends a if it has let enough drains expire.
func (l *Ledger) judge(a *agent) {
	if a.breaker.strikes >= StrikesOut && !a.breaker.open {
		l.suspend(a, Suspension{Agent: a.ID, Name: a.Name})
	}
}

// Silence is an agent that let drains expire, as one replica tells it to another. One denial
// denies, so replicas that do not agree would all wait for it.
type Silence struct {
	Agent AgentID `json:"agent"`
	// Strikes is how many drains in a row it let expire. SinceMillis is how long ago the first of
	// them was opened, LastMillis how long ago the last one expired.
	Strikes     int   `json:"strikes"`
	SinceMillis int64 `json:"sinceMillis"`
	LastMillis  int64 `json:"lastMillis"`
	// Met says that the agent ever connected there.
	Met bool `json:"met,omitempty"`
}

// silences is what another replica is told. An agent that never connected here may well be
// connected there.
func (l *Ledger) silences(now time.Time) []Silence {
	all := []Silence{}
	for id, a := range l.agents {
		if b := a.breaker; b.strikes > 0 {
			all = append(all, Silence{id, b.strikes, now.Sub(b.since).Milliseconds(),
				now.Sub(b.struckAt).Milliseconds(), a.met})
		}
	}
	slices.SortFunc(all, func(a, b Silence) int { return cmp.Compare(a.Agent, b.Agent) })
	return all
}

// believe takes over the strikes that another replica has counted, if they are more than were
// counted here and the agent has acknowledged nothing here since the first of those drains was
// opened there. Of an agent that connected here, one to which it never did knows nothing.
func (l *Ledger) believe(now time.Time, silences []Silence) {
	for _, s := range silences {
		a := l.agents[s.Agent]
		since := now.Add(-time.Duration(s.SinceMillis) * time.Millisecond)
		if a == nil || a.met && !s.Met || s.Strikes < a.breaker.strikes || !since.After(a.breaker.clearedAt) {
			continue
		}
		if s.Strikes > a.breaker.strikes {
			last := now.Add(-time.Duration(s.LastMillis) * time.Millisecond)
			a.breaker.strikes, a.breaker.since, a.breaker.struckAt = s.Strikes, since, later(a.breaker.struckAt, last)
		}
		l.judge(a)
	}
}

// acknowledged notes that a acknowledged a drain in time.
func (l *Ledger) acknowledged(now time.Time, a *agent) {
	a.breaker.strikes, a.breaker.clearedAt = 0, now
	if a.breaker.open {
		l.suspend(a, Suspension{Agent: a.ID, Name: a.Name, Over: true, Acknowledged: true})
	}
}

// readmit gives agents that were suspended long ago another chance.
func (l *Ledger) readmit(now time.Time) {
	if l.total.Suspended == 0 {
		return
	}
	for _, a := range l.agents {
		if a.breaker.open && now.Sub(a.breaker.struckAt) >= l.times.Memory {
			a.breaker.strikes, a.breaker.clearedAt = StrikesOut-1, now
			l.suspend(a, Suspension{Agent: a.ID, Name: a.Name, Over: true})
		}
	}
}

// told records that agents are told of d from now on. d waits for those agents that are suspended
// and were not waited for lately, if they are connected: without a stream they cannot answer.
func (l *Ledger) told(now time.Time, d *drain) {
	d.toldAt = now
	if began := now.Truncate(TrialEvery); l.total.Suspended > 0 {
		for _, a := range l.owing(d) {
			if b := &a.breaker; b.open && a.session != 0 && !b.triedAt.Equal(began) {
				b.trial, b.triedAt = d.number, began
			}
		}
	}
	l.change(d, l.owing(d))
}

// waived reports whether d does not wait for a because a is suspended and, if d still does, until
// when. That is less than a hold, so that a call which waits for d is answered by its end. An agent
// that owed d at its deadline owes it still, so that the drain which suspends an agent names it.
func (l *Ledger) waived(now time.Time, a *agent, d *drain) (waived bool, until time.Time) {
	if !a.breaker.open || d.expired {
		return false, time.Time{}
	}
	if until = d.toldAt.Add(l.times.Hold * 3 / 4); a.breaker.trial == d.number && now.Before(until) &&
		now.Before(l.deadline(d)) {
		return false, until
	}
	return true, time.Time{}
}

func (l *Ledger) suspend(a *agent, what Suspension) {
	a.breaker.open = !what.Over
	if a.breaker.open {
		l.total.Suspended++
	} else {
		l.total.Suspended--
	}
	l.suspensions = append(l.suspensions, what)
	l.touchFor(a)
}

package drain

import (
	"cmp"
	"slices"
	"time"
)

// StrikesOut is how many drains in a row an agent lets expire before it is suspended.
const StrikesOut = 3

// TrialEvery is the interval in which one drain waits for a suspended agent.
const TrialEvery = 5 * time.Second

// breaker keeps an agent that does not answer from delaying every deletion by the whole deadline.
//
// A strike is a drain that reached its deadline while the agent had to acknowledge it and had
// reported neither Removed nor Idle. Three in a row open the breaker: the agent is suspended, which
// means that it still learns of drains but they do not wait for it. An acknowledgement of any drain
// in time clears the strikes and ends the suspension. A report on a deletion that is only measured
// is none, because the agent did not have to do anything.
//
// "In a row" means one after the other. Drains that expire at the same moment, or that overlap, are
// one failure seen many times. So a drain counts only if it began here after the last counted one
// had expired: a suspension takes three whole deadlines of silence, whether one pod is deleted or a
// hundred. A drain also does not count if the agent had less than half of its length for it, or of
// the usual length if that is more. This replica may have learned of the agent or of the drain
// late, an abandoned drain may have used up the time, the drain was queued, or the owner of the pod
// has given its barrier a second, which is less than a sync of kube-proxy.
//
// Some answers are no strikes: Kept, a report about a young pod that is not accepted yet, and
// Removed without Idle, which is up to the clients. A new session and a new boot of the agent do
// not clear strikes: an agent that crashes every twenty seconds answers nothing either.
//
// This replica may be cut off. It assumes so while most of the agents that the API lists have no
// stream here. A drain then does not count for an agent that lost its stream, and drains wait until
// the deadline. Another replica may still receive the acknowledgements. Strikes that another
// replica counted are accepted even then. An agent that never connected here is suspended all the
// same: its CA bundle, its token or a NetworkPolicy is wrong, and it may never connect. An agent
// that is connected and does not answer is suspended even if it is the only one, and even if all
// are. The drains are then released with the reason Suspended, about which operators are warned.
//
// A drain that does not wait for an agent is closed before the agent can acknowledge it. So in each
// [TrialEvery] one drain waits for a suspended agent, for less than one hold. All suspended agents
// share that drain, and so do replicas whose clocks agree. For agents that need longer, the breaker
// half-closes after the memory bound: drains wait for the agent again, and one more strike suspends
// it again.
type breaker struct {
	strikes int
	// since is when the first of these drains was opened, struckAt when the last of them expired.
	since, struckAt time.Time
	// clearedAt is when the agent last acknowledged a drain in time here, or was readmitted.
	clearedAt time.Time
	// open: the agent is suspended.
	open bool
	// trial is the number of the drain that last waited for the agent while it was suspended. That
	// drain was sent to it in the TrialEvery that began at triedAt.
	trial   uint64
	triedAt time.Time
}

// Suspension is the start of an agent's suspension or, if Over, its end.
type Suspension struct {
	Agent AgentID
	Name  string
	Over  bool
	// Acknowledged: it ended because the agent acknowledged a drain in time. Otherwise it ended by
	// time.
	Acknowledged bool
}

// Suspensions returns the suspensions that began or ended since it was last called.
func (l *Ledger) Suspensions() []Suspension {
	all := l.suspensions
	l.suspensions = nil
	// Those of the same moment come from a map: in no order.
	slices.SortStableFunc(all, func(a, b Suspension) int { return cmp.Compare(a.Agent, b.Agent) })
	return all
}

// expire records which agents were silent when the deadline of d passed. It does so once for each
// drain, and before anything else that happens after the deadline: a late acknowledgement does not
// undo that the deletion had to continue without it.
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
		if r := said[a.slot]; r != nil && l.fresh(now, r) {
			switch {
			case r.State >= Removed:
				continue // that its answer does not count yet for a young pod is not its fault
			case r.State == Routing && d.gate == AtBarrier && a.gateOf(d) == AtBarrier && !a.sampled():
				continue // its gateway may keep a pod for as long as it is listed, for sticky clients
			}
		}
		if d.gate == AtBarrier && a.sampled() && w.Connected && w.State < Removed {
			l.learnLength(a, d, l.length(d)) // its gateway takes at least that long
		}
		// No agent has learned of a drain that is queued.
		if !d.queued && w.State < Removed && w.State != Kept {
			l.strike(a, d)
		}
	}
}

// strike counts d as a strike of a, if it counts.
func (l *Ledger) strike(a *agent, d *drain) {
	over := l.deadline(d)
	mayBeCutOff := a.session == 0 && a.met && 2*l.total.Missing > l.total.Expected
	usual := min(l.times.Deadline, l.sampling.Bound)
	if over.Sub(later(d.toldAt, a.knownAt)) < max(l.length(d), usual)/2 || d.begun.Before(a.breaker.struckAt) ||
		mayBeCutOff {
		return
	}
	b := &a.breaker
	if !b.since.After(b.clearedAt) {
		b.since = d.begun
	}
	b.strikes, b.struckAt = b.strikes+1, over
	l.judge(a)
}

// judge suspends a if it has enough strikes.
func (l *Ledger) judge(a *agent) {
	if a.breaker.strikes >= StrikesOut && !a.breaker.open {
		l.suspend(a, Suspension{Agent: a.ID, Name: a.Name})
	}
}

// Silence is an agent's strikes as one replica sends them to another. A deletion is denied if one
// replica denies it. Replicas that did not share strikes would suspend an agent at different times,
// and deletions would wait for it until the last of them had.
type Silence struct {
	Agent AgentID `json:"agent"`
	// Strikes is how many drains in a row it let expire. SinceMillis is how long ago the first of
	// them was opened, LastMillis how long ago the last one expired.
	Strikes     int   `json:"strikes"`
	SinceMillis int64 `json:"sinceMillis"`
	LastMillis  int64 `json:"lastMillis"`
	// Met: the agent has connected there at least once.
	Met bool `json:"met,omitempty"`
}

// silences returns what other replicas receive about agents that did not answer. An agent that
// never connected here may well be connected there.
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

// believe adopts the strikes that another replica has counted, if they are more than were counted
// here and the agent has acknowledged nothing here since the first of those drains was opened
// there. A replica to which an agent never connected has no say about an agent that connected here.
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

// acknowledged records that a acknowledged a drain in time.
func (l *Ledger) acknowledged(now time.Time, a *agent) {
	a.breaker.strikes, a.breaker.clearedAt = 0, now
	if a.breaker.open {
		l.suspend(a, Suspension{Agent: a.ID, Name: a.Name, Over: true, Acknowledged: true})
	}
}

// readmit ends the suspensions of agents that were suspended long ago.
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

// told records that agents learn of d from now on. d waits for those suspended agents that no drain
// waited for lately, if they are connected: without a stream they cannot answer.
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
// when. That is less than a hold, so that a call that waits for d is answered by its end. An agent
// that had to acknowledge d at its deadline still has to, so that the drain that suspends an agent
// names it.
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

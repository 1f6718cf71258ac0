package drain

import (
	"slices"
	"time"
)

// An agent that has to exclude a hundred pods acknowledges them in one line: all drains that it
// received up to a revision are Idle, except those that the line names. The ledger keeps that as
// one report of the agent (acknowledgement) and, for each drain, the set of agents for which it
// counts (owed.upTo).
//
// It counts for a drain only if the agent received the drain, on its present session, in a batch
// whose revision is not above that of the report. A batch names drains by their numbers, so that a
// report never counts for a later drain of a pod. A report about a single pod counts instead, until
// a line with an UpTo does not name the pod.

// UpTo is an agent's report about all drains that it was to exclude up to a revision, except those
// that the same line reports on.
type UpTo struct {
	// Revision is what [Ledger.ChangesFor] returned as told with the last of them.
	Revision uint64 `json:"revision"`
	State    State  `json:"state"`
	// Generation is as in Report.
	Generation string `json:"generation,omitempty"`
}

// acknowledgement is the last UpTo of an agent, and the batches that it received on its session.
type acknowledgement struct {
	upTo     received
	revision uint64
	batches  []told
}

// told is a batch that an agent received. covered is since when the agent's report covers its
// drains. Zero: it does not.
type told struct {
	*batch
	covered time.Time
}

// tell records that a receives b, and forgets the earlier batches that have ended.
func (a *agent) tell(b *batch) {
	a.told = b.revision
	a.batches = slices.DeleteFunc(a.batches, func(t told) bool { return len(t.live()) == 0 })
	if len(b.excluded) > 0 {
		a.batches = append(a.batches, told{batch: b})
	}
}

// live returns the drains of b, without the first ones if these have ended.
func (b *batch) live() []telling {
	for b.over < len(b.excluded) && !b.excluded[b.over].is() {
		b.over++
	}
	return b.excluded[b.over:]
}

// void forgets the batches of a and its report about them.
func (a *agent) void() {
	for _, t := range a.batches {
		for _, of := range t.live() {
			of.drain.upTo.unset(a.slot)
		}
	}
	a.acknowledgement = acknowledgement{}
}

// covered calls f with each open drain that a received up to a revision.
func (a *agent) covered(revision uint64, f func(*drain)) {
	for _, t := range a.batches {
		if t.revision > revision {
			continue
		}
		for _, of := range t.live() {
			if of.is() {
				f(of.drain)
			}
		}
	}
}

// takeUpTo records up, after [Ledger.Report] has recorded reports, the exceptions. One that is
// older than the last one changes nothing. Like Report it returns whether anything was news.
func (l *Ledger) takeUpTo(now, asOf time.Time, a *agent, up UpTo, reports []Report) (news bool) {
	is := &a.upTo
	if asOf.Before(is.at) || up.Revision < a.revision {
		return false
	}
	// Before it counts: a late report does not undo that it was missing.
	a.covered(up.Revision, func(d *drain) { l.expire(now, d) })
	r := Report{State: up.State, Generation: up.Generation}
	again := is.by == nil || is.Report != r || !l.fresh(now, is)
	if is.by == nil || is.State != r.State {
		is.since = now
	}
	is.Report, is.by, is.at = r, a, asOf
	named := map[UID]bool{}
	for _, r := range reports {
		named[r.UID] = named[r.UID] || r.Gate == AtHold
	}
	inTime := false
	a.covered(up.Revision, func(d *drain) {
		alone := a.reports[AtHold][d.of]
		switch {
		case alone == nil && named[d.pod.UID]:
			// Its report about this pod is of an earlier drain: nothing is known of this one.
			d.upTo.unset(a.slot)
			l.touch(d)
			return
		case named[d.pod.UID] || alone != nil && alone.at.After(asOf):
			return
		case alone != nil:
			l.dropReport(d.of, alone)
		}
		d.upTo = d.upTo.grown(len(l.slots))
		fresher := again || alone != nil || !d.upTo.has(a.slot)
		d.upTo.set(a.slot)
		news = news || fresher
		if l.routes(a, d) {
			l.taken(now, d, is, fresher)
			inTime = inTime || l.inTime(now, d, is)
		}
	})
	for i := range a.batches {
		if t := &a.batches[i]; t.batch.revision <= up.Revision {
			a.revision = max(a.revision, t.batch.revision)
			if t.covered.IsZero() {
				t.covered = now
			}
		}
	}
	if inTime {
		l.acknowledged(now, a)
	}
	return news
}

// taken touches d if a report may change its phase, and records the states that the report reached
// first.
func (l *Ledger) taken(now time.Time, d *drain, r *received, fresher bool) {
	if fresher && l.canEndPhase(now, d, r) {
		l.touch(d)
	}
	if d.removed = d.removed.grown(len(l.slots)); r.State >= Removed {
		d.removed.set(r.by.slot)
	} else {
		d.removed.unset(r.by.slot)
	}
	for i, state := range []State{Removed, Idle} {
		if of := d.reached[i].grown(len(l.slots)); !d.queued && r.State >= state && !of.has(r.by.slot) {
			of.set(r.by.slot)
			d.reached[i] = of
			l.reached = append(l.reached, Reached{state, now.Sub(d.toldAt)})
		}
	}
}

// inTime reports whether a report acknowledges d in time.
func (l *Ledger) inTime(now time.Time, d *drain, r *received) bool {
	state, _, _ := l.barrierState(now, d, r)
	return state >= Removed && now.Sub(r.at) <= l.times.Freshness && now.Before(l.deadline(d))
}

// saidSince returns since when the UpTo of a covers d.
func (a *agent) saidSince(d *drain) time.Time {
	for _, t := range a.batches {
		about := func(of telling) bool { return of.drain == d && of.is() }
		if !t.covered.IsZero() && slices.ContainsFunc(t.live(), about) {
			return later(a.upTo.since, t.covered)
		}
	}
	return a.upTo.since
}

// Reached is the first time in a drain that a gateway reached State for a pod, and how long that
// took since agents learned of the drain.
type Reached struct {
	State State
	Took  time.Duration
}

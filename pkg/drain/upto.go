package drain

import (
	"slices"
	"time"
)

// An agent that is told of a hundred drains at one time acknowledges them in one line: all that it
// was told of up to a revision is Idle, but for those that it names. The ledger keeps that as one
// report of the agent (acknowledgement) and, for each drain, the set of agents of which it counts
// (owed.upTo).
//
// It counts for a drain only if the agent was told of it, on its present session, in a batch whose
// revision is not above that of the report. A batch names drains by their numbers, so that a report
// never counts for a later drain of a pod. What the agent reports of a single pod counts instead,
// until a line with an UpTo does not name the pod.

// UpTo is what an agent reports of all drains that it was told to exclude up to a revision, but for
// those on which it reports in the same line.
type UpTo struct {
	// Revision is what [Ledger.Told] returned with the last of them.
	Revision uint64 `json:"revision"`
	State    State  `json:"state"`
	Proof    Proof  `json:"proof"`
	// Generation is as in Report.
	Generation string `json:"generation,omitempty"`
}

// acknowledgement is the last UpTo of an agent, and what the agent was told on its session.
type acknowledgement struct {
	upTo     received
	revision uint64
	batches  []told
}

// told is a batch that an agent was told. covered is since when its drains are up to the revision
// of the agent's report. Zero: they are not.
type told struct {
	*batch
	covered time.Time
}

// tell notes that a is told b, and forgets what is over of what it was told before.
func (a *agent) tell(b *batch) {
	a.told = b.revision
	a.batches = slices.DeleteFunc(a.batches, func(t told) bool { return len(t.live()) == 0 })
	if len(b.excluded) > 0 {
		a.batches = append(a.batches, told{batch: b})
	}
}

// live returns the drains of b, but for the first ones if these are over.
func (b *batch) live() []telling {
	for b.over < len(b.excluded) && !b.excluded[b.over].is() {
		b.over++
	}
	return b.excluded[b.over:]
}

// void forgets what a was told and reports of all of that.
func (a *agent) void() {
	for _, t := range a.batches {
		for _, of := range t.live() {
			of.drain.upTo.unset(a.slot)
		}
	}
	a.acknowledgement = acknowledgement{}
}

// covered calls f with each open drain of which a was told up to a revision.
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

// takeUpTo takes in up, of which [Ledger.Report] has taken in the exceptions. One that is older
// than the last one changes nothing. Like Report it returns whether anything was news.
func (l *Ledger) takeUpTo(now, asOf time.Time, a *agent, up UpTo) (news bool) {
	is := &a.upTo
	if asOf.Before(is.at) || up.Revision < a.revision {
		return false
	}
	// Before it counts: what comes too late does not undo that it was missing.
	a.covered(up.Revision, func(d *drain) { l.expire(now, d) })
	r := Report{State: up.State, Proof: up.Proof, Generation: up.Generation}
	again := is.by == nil || is.Report != r || !l.fresh(now, is)
	if is.by == nil || is.State != r.State {
		is.since = now
	}
	is.Report, is.by, is.at = r, a, asOf
	inTime := false
	a.covered(up.Revision, func(d *drain) {
		alone := a.reports[AtHold][d.of]
		switch {
		case alone == nil && d.of.named == l.lines:
			// What it says of this pod is of an earlier drain: nothing is known of this one.
			d.upTo.unset(a.slot)
			l.touch(d)
			return
		case d.of.named == l.lines || alone != nil && alone.at.After(asOf):
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

// taken notes what follows from a report on d.
func (l *Ledger) taken(now time.Time, d *drain, r *received, fresher bool) {
	if fresher && l.canEndPhase(now, d, r) {
		l.touch(d)
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

// saidSince returns since when a says what it says of all drains, as far as it is about d.
func (a *agent) saidSince(d *drain) time.Time {
	for _, t := range a.batches {
		about := func(of telling) bool { return of.drain == d && of.is() }
		if !t.covered.IsZero() && slices.ContainsFunc(t.live(), about) {
			return later(a.upTo.since, t.covered)
		}
	}
	return a.upTo.since
}

// Reached says that a gateway has come as far as State with a pod, for the first time in a drain,
// and how long that took since agents were told.
type Reached struct {
	State State
	Took  time.Duration
}

package health

import (
	"container/heap"
	"maps"
	"slices"
	"time"
)

const (
	// tick is the resolution of the schedule.
	tick = time.Millisecond
	// jump is how late Due may be called, and how far its times may go back, before that counts as
	// a jump of the clock.
	jump = time.Second
	// askMost bounds how long Due asks its caller to wait: a target that is added in the meantime
	// may be due before all others.
	askMost = 100 * time.Millisecond
	// lostAfter is how many times a probe may be due while the last one is still in flight, before
	// that one is given up.
	lostAfter = 3
)

// schedule is a heap of the probed targets, with the next due one in front. It has its own time,
// which follows the caller's, but neither stops nor jumps with it. So at most the probes of one
// second become due at once.
type schedule struct {
	heap []*record
	// present is the schedule's time, and offset how far that is ahead of the caller's. limit is
	// the time that present may reach before Due is called again. All are in nanoseconds.
	present, offset, limit int64
	// planned determines where the next target is placed in its interval. tickets counts the probes
	// that Due has returned.
	planned uint32
	tickets uint64
}

// The methods of [heap.Interface].

func (w *schedule) Len() int           { return len(w.heap) }
func (w *schedule) Less(i, j int) bool { return w.heap[i].due < w.heap[j].due }
func (w *schedule) Swap(i, j int) {
	w.heap[i], w.heap[j] = w.heap[j], w.heap[i]
	w.heap[i].place, w.heap[j].place = i, j
}
func (w *schedule) Push(r any) {
	r.(*record).place = len(w.heap)
	w.heap = append(w.heap, r.(*record))
}
func (w *schedule) Pop() any {
	last := len(w.heap) - 1
	r := w.heap[last]
	w.heap[last] = nil
	w.heap = w.heap[:last]
	return r
}

// pass advances the schedule's time to the caller's.
func (w *schedule) pass(now int64) {
	t := now + w.offset
	switch {
	case len(w.heap) == 0:
		if t < w.present {
			w.offset, t = w.offset+w.present-t, w.present
		}
	case t < w.present-int64(jump):
		w.offset, t = w.offset+w.present-t, w.present
	case t < w.present:
		// Two callers read the clock and arrived here in the other order.
		t = w.present
	case t > w.limit+int64(jump):
		w.offset, t = w.offset-(t-w.limit-int64(jump)), w.limit+int64(jump)
	}
	w.present = t
}

// plan begins or ends the probing of a record. Without a check there is none.
func (s *Set) plan(r *record, want bool) {
	w := &s.schedule
	want = want && r.pool.check != nil
	switch {
	case want == r.is(scheduled):
	case want:
		if len(w.heap) == 0 {
			w.limit = w.present
		}
		// The golden ratio spreads any number of targets evenly over the interval, in whatever
		// order they come.
		w.planned += 0x9e3779b9
		interval, from := r.pool.check.ticks(), w.present/int64(tick)+1
		phase := int64(uint64(w.planned) * uint64(interval) >> 32)
		r.due = from + ((phase-from)%interval+interval)%interval
		r.set(scheduled, true)
		heap.Push(w, r)
	default:
		heap.Remove(w, r.place)
		r.set(scheduled|inFlight, false)
		r.missed = 0
	}
}

func (c *Check) ticks() int64 { return max(1, int64(c.Interval/tick)) }

// SetCheck sets how the targets of pool are probed. A check that equals the last one changes
// nothing. A different one restarts probing, and every target keeps its last verdict until the new
// check has reached one. A check without a protocol ends probing and forgets the verdicts, which
// would never change. The caller wakes the goroutine that calls [Set.Due].
func (s *Set) SetCheck(now time.Time, pool Pool, c Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pool(pool)
	var check *Check
	if c.Protocol != ProtocolUnknown {
		check = &c
	}
	if was := p.check; was == check || was != nil && check != nil && *was == c {
		return
	}
	at := s.begin(now)
	// Sorted, so that a replayed simulation probes at the same times.
	all := slices.SortedFunc(maps.Values(p.targets), func(a, b *record) int { return compareKeys(a.key(), b.key()) })
	for _, r := range all {
		s.plan(r, false)
	}
	p.check = check
	for _, r := range all {
		r.set(own, false)
		r.counters = [4]uint8{}
		if check == nil {
			r.set(doubts, false)
			if r.verdict != VerdictUnknown {
				r.verdict, r.since = VerdictUnknown, at
			}
		}
		s.refresh(r)
	}
	s.end(now)
}

// Due appends to jobs the probes that are due at now, at most most of them, and returns when to
// call it again. The zero time means that no target has a check: call it again after
// [Set.SetCheck], or when targets have changed. A target has at most one probe in flight. The
// probes of a check are spread evenly over its interval, and a target's first probe comes within
// one interval. Each target keeps its time in the interval, however late a probe is handed out.
//
// Every job has to be answered by [Set.Report]. After three intervals without an answer it is given
// up, and the target is probed again. If the clock jumps, the times of all probes move with it:
// probing does not stop, and at most the probes of one second become due at once.
func (s *Set) Due(now time.Time, jobs []Job, most int) ([]Job, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &s.schedule
	w.pass(s.stamp(now))
	last := w.present / int64(tick)
	for len(w.heap) > 0 && w.heap[0].due <= last {
		if most <= 0 {
			w.limit = w.present
			return jobs, now
		}
		r := w.heap[0]
		due, interval := r.due, r.pool.check.ticks()
		r.due += (last - r.due + interval) / interval * interval
		heap.Fix(w, 0)
		if r.is(inFlight) && r.missed < lostAfter-1 {
			r.missed++
			continue
		}
		w.tickets++
		r.set(inFlight, true)
		r.ticket, r.missed = w.tickets, 0
		jobs = append(jobs, Job{
			Key: r.key(), Check: r.pool.check, Due: now.Add(time.Duration(due*int64(tick) - w.present)),
			Silent: r.last.Kind == Timeout,
			Ticket: r.ticket,
		})
		most--
	}
	if len(w.heap) == 0 {
		return jobs, time.Time{}
	}
	w.limit = min(w.heap[0].due, last+int64(askMost/tick)) * int64(tick)
	return jobs, now.Add(time.Duration(w.limit - w.present))
}

// Report records the outcome of a probe. It reports whether the outcome counted: it does not if the
// job was given up, if its target has left since, if the check has changed, or if it was reported
// before.
func (s *Set) Report(now time.Time, job Job, outcome Outcome) bool {
	s.mu.Lock()
	fresh := false
	defer func() {
		s.mu.Unlock()
		s.tell(fresh)
	}()
	p := s.pools[job.Key.Pool]
	if p == nil {
		return false
	}
	r := p.targets[job.Key.Target]
	if r == nil || !r.is(inFlight) || r.ticket != job.Ticket {
		return false
	}
	r.set(inFlight, false)
	r.missed = 0
	at := s.begin(now)
	s.fresh = false
	if outcome.Kind == Success && r.is(doubts) {
		r.set(doubts, false)
		s.refresh(r)
	}
	fresh = s.take(at, r, outcome)
	return true
}

// take counts an outcome. It reports whether an operation for the gateway has become pending since
// fresh was cleared.
func (s *Set) take(at int64, r *record, outcome Outcome) bool {
	if outcome.Kind == OutcomeUnknown {
		s.settle()
		return false
	}
	r.last, r.lastAt = outcome, at
	if c := r.pool.check; c != nil && r.count(c.Thresholds, outcome.Kind) {
		r.since = at
		if r.is(own) {
			r.set(doubts, false) // it has a verdict
		}
		s.refresh(r)
	}
	s.settle()
	return s.fresh
}

// Work receives a value when the outcome of a probe has made an operation pending ([Set.Pending]).
// After any other change of the set, the caller must wake the director itself. There must be only
// one receiver.
func (s *Set) Work() <-chan struct{} { return s.work }

func (s *Set) tell(fresh bool) {
	if fresh {
		select {
		case s.work <- struct{}{}:
		default:
		}
	}
}

package health

import "time"

const (
	// tick is how fine probes are planned.
	tick = time.Millisecond
	// wheelSize is how many ticks the wheel has: a power of two, and longer than common intervals.
	wheelSize = 1 << 14
	// jump is how late Due may be called before it counts as a clock that jumped, and how far one may go back before it does.
	jump = time.Second
	// askMost bounds how long Due asks its caller to wait: a target that comes meanwhile may be due earlier than all others.
	askMost = 100 * time.Millisecond
	// lostAfter is how many times a probe may be due while the last one is still in flight, before that one is given up.
	lostAfter = 3
	// leftMost is how many targets that left are remembered by name.
	leftMost = 256
)

// wheel is a hashed timing wheel over records. It has a time of its own, which goes as the caller's does, but neither stands still nor
// leaps when that one does: the probes of a second at most are due at once then.
type wheel struct {
	// present is the wheel's time, offset what it is ahead of the caller's. limit is how far it may go before Due is called again.
	present, offset, limit int64
	// at is the next tick to look at.
	at    int64
	count int
	// heads are the first records of the lists, plus one.
	heads []int32
	// planned counts the targets that were given their time in the interval.
	planned uint32
}

// pass lets the wheel's time follow the caller's.
func (w *wheel) pass(now int64) {
	t := now + w.offset
	switch {
	case w.count == 0:
		if t < w.present {
			w.offset, t = w.offset+w.present-t, w.present
		}
	case t < w.present-int64(jump):
		w.offset, t = w.offset+w.present-t, w.present
	case t < w.present:
		// Two callers have read the clock one after the other, and come here the other way round.
		t = w.present
	case t > w.limit+int64(jump):
		w.offset, t = w.offset-(t-w.limit-int64(jump)), w.limit+int64(jump)
	}
	w.present = t
}

// plan begins or ends the probing of a record. One that takes the place of another in the table of records takes over its time in the
// interval as well, if theirs are as long: where targets come as others go, nothing is moved, and what was spread evenly stays so.
func (s *Set) plan(i int32, r *record, want bool) {
	w := &s.wheel
	want = want && r.pool.check.Protocol != ProtocolUnknown
	switch {
	case want == r.is(scheduled):
	case want:
		r.set(scheduled, true)
		w.count++
		interval, from := r.pool.check.ticks(), w.present/int64(tick)+1
		if r.is(hung) {
			if w.count > 1 && int64(r.every) == interval && from <= r.due && r.due < from+interval {
				return
			}
			s.unhang(r)
		}
		if w.heads == nil {
			w.heads = make([]int32, wheelSize)
		}
		if w.count == 1 {
			w.at, w.limit = w.present/int64(tick), w.present
		}
		// The golden ratio spreads any number of targets evenly over the interval, whenever they come, in the order in which they do.
		w.planned += 0x9e3779b9
		phase := int64(uint64(w.planned) * uint64(interval) >> 32)
		r.due = from + ((phase-from)%interval+interval)%interval
		r.every = int32(interval)
		s.hang(i, r)
	default:
		if r.pool.check.KeepAlive {
			s.leave(r)
		}
		w.count--
		r.set(scheduled|inFlight, false)
		r.missed = 0
	}
}

// leave notes that r is not probed any more.
func (s *Set) leave(r *record) {
	switch {
	case s.leftAll:
	case len(s.left) < leftMost:
		s.left = append(s.left, r.key())
	default:
		s.left, s.leftAll = s.left[:0], true
	}
}

// Left appends to keys the targets, of checks that keep connections, that are not probed any more and were when Left was called last.
// all says that they are too many to name, and that there may be others: whatever is kept for any target should be given up.
func (s *Set) Left(keys []Key) (left []Key, all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, all = append(keys, s.left...), s.leftAll
	clear(s.left)
	s.left, s.leftAll = s.left[:0], false
	return keys, all
}

func (c *Check) ticks() int64 { return max(1, int64(c.Interval/tick)) }

func (s *Set) hang(i int32, r *record) {
	head := &s.wheel.heads[r.due&(wheelSize-1)]
	r.prev, r.next = nowhere, *head-1
	if r.next != nowhere {
		s.at(r.next).prev = i
	}
	*head = i + 1
	r.set(hung, true)
}

func (s *Set) unhang(r *record) {
	if r.prev == nowhere {
		s.wheel.heads[r.due&(wheelSize-1)] = r.next + 1
	} else {
		s.at(r.prev).next = r.next
	}
	if r.next != nowhere {
		s.at(r.next).prev = r.prev
	}
	r.set(hung, false)
}

// SetCheck says how the targets of pool are probed. A check that equals the last one changes nothing. Another one restarts probing,
// and every target's last verdict stands until the new check has one. The zero Check ends probing and forgets the verdicts: nobody would ever
// change them. A check
// without a protocol probes nothing either, but its thresholds judge what gateways report by [Set.Passive]. The caller wakes who calls
// [Set.Due].
func (s *Set) SetCheck(now time.Time, pool Pool, c Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pool(pool)
	was := p.check
	if was == nil && c == (Check{}) || was != nil && *was == c {
		return
	}
	at := s.begin(now)
	for _, i := range p.members.all {
		s.plan(i, s.at(i), false)
	}
	p.check = nil
	if c != (Check{}) {
		p.check = &c
	}
	for _, i := range p.members.all {
		r := s.at(i)
		r.set(own, false)
		r.counters = [4]uint8{}
		if !p.probing() {
			r.set(unproven|found, false)
		}
		if p.check == nil && r.verdict != VerdictUnknown {
			r.verdict, r.since = VerdictUnknown, at
		}
		s.refresh(i, r)
	}
	s.end(now)
}

func (p *pool) probing() bool { return p.check != nil && p.check.Protocol != ProtocolUnknown }

// Due appends to jobs no more than most probes that are due at now, each of a target of which no other is in flight, and says when to ask
// again: the zero time if no target is to be probed at all, so that the caller waits until it is woken. The probes of a check are spread
// evenly over its interval, the first one of a target too, which comes within one interval. Each has its time in the interval and keeps
// it, however late it is handed out.
//
// Every job is to be answered by [Set.Report]. One that is not answered for three intervals is given up, and the target is probed
// again. A clock that jumps moves the times of all probes, and neither stops them nor makes more than a second's due at once.
func (s *Set) Due(now time.Time, jobs []Job, most int) ([]Job, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &s.wheel
	w.pass(s.stamp(now))
	if w.count == 0 {
		return jobs, time.Time{}
	}
	for last := w.present / int64(tick); w.at <= last; w.at++ {
		for i := w.heads[w.at&(wheelSize-1)] - 1; i != nowhere; {
			r := s.at(i)
			next := r.next
			if r.due <= w.at && !r.is(scheduled) {
				s.unhang(r)
			} else if r.due <= w.at {
				if most <= 0 {
					w.limit = w.present
					return jobs, now
				}
				due := r.due
				interval := r.pool.check.ticks()
				s.unhang(r)
				r.due += (last - r.due + interval) / interval * interval
				s.hang(i, r)
				if r.is(inFlight) && r.missed < lostAfter-1 {
					r.missed++
				} else {
					r.set(inFlight, true)
					r.ticket++
					r.missed = 0
					jobs = append(jobs, Job{
						Key: r.key(), Check: r.pool.check, Due: now.Add(time.Duration(due*int64(tick) - w.present)),
						Ticket: uint64(i)<<32 | uint64(r.ticket),
					})
					most--
				}
			}
			i = next
		}
	}
	ask := w.at
	for end := w.at - 1 + int64(askMost/tick); ask < end && w.heads[ask&(wheelSize-1)] == 0; {
		ask++
	}
	w.limit = ask * int64(tick)
	return jobs, now.Add(time.Duration(w.limit - w.present))
}

// Report takes in how a probe ended. It reports whether that counted: not if the job was given up, if its target has left since, or if the
// check is another one, and not twice.
func (s *Set) Report(now time.Time, job Job, outcome Outcome) bool {
	s.mu.Lock()
	fresh := false
	defer func() {
		s.mu.Unlock()
		s.tell(fresh)
	}()
	i := int32(job.Ticket >> 32)
	if i < 0 || int(i)>>slabBits >= len(s.slabs) {
		return false
	}
	r := s.at(i)
	if !r.is(inFlight) || r.ticket != uint32(job.Ticket) {
		return false
	}
	r.set(inFlight, false)
	r.missed = 0
	at := s.begin(now)
	s.fresh = false
	if outcome.Kind == Success && r.flags&(unproven|found) != 0 {
		r.set(unproven|found, false)
		s.refresh(i, r)
	}
	fresh = s.take(at, i, r, outcome)
	return true
}

// Passive takes in how a request ended that a gateway sent to a target. It counts as the outcome of a probe does, towards the thresholds
// of the pool's check. It reports whether the target is known and claimed.
func (s *Set) Passive(now time.Time, k Key, outcome Outcome) bool {
	s.mu.Lock()
	fresh := false
	defer func() {
		s.mu.Unlock()
		s.tell(fresh)
	}()
	p := s.pools[k.Pool]
	if p == nil {
		return false
	}
	n := nameOf(&k.Target)
	i := s.find(p, &n, hashOf(s.seed, &n))
	if i == nowhere || !s.at(i).is(claimed) {
		return false
	}
	at := s.begin(now)
	s.fresh = false
	fresh = s.take(at, i, s.at(i), outcome)
	return true
}

// take counts an outcome. It reports whether new work for the gateway has come since fresh was cleared.
func (s *Set) take(at int64, i int32, r *record, outcome Outcome) bool {
	if outcome.Kind == OutcomeUnknown {
		s.settle()
		return false
	}
	r.last, r.lastAt = outcome, at
	if c := r.pool.check; c != nil && r.count(c.Thresholds, outcome.Kind) {
		r.since = at
		if r.is(own) {
			r.set(found, false) // it has a verdict again
		}
		s.refresh(i, r)
	}
	s.settle()
	return s.fresh
}

// Work is signalled when the outcome of a probe, or a result that a gateway reported, has brought something to do: see [Set.Pending]. All
// other changes are made by somebody who knows whom to wake. One receiver is meant.
func (s *Set) Work() <-chan struct{} { return s.work }

func (s *Set) tell(fresh bool) {
	if fresh {
		select {
		case s.work <- struct{}{}:
		default:
		}
	}
}

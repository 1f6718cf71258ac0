package health

import "slices"

type record struct {
	pool   *pool
	target Target
	// pod is set while the pod is excluded or terminating.
	pod *pod
	// at is its position in each set, from 1; 0: it is not in the set.
	at [sets]int
	// due is the tick of the next probe, place its position in the schedule.
	due    int64
	place  int
	ticket uint64
	missed uint8

	// seenAt and seenIn are when and in which generation the gateway was read; seenIn 0: never.
	seenAt int64
	// idleSince is when an unbroken run of readings without routing or activity began, in one
	// generation. never: the last reading showed routing or activity.
	idleSince int64
	// since is when verdict was entered, lastAt when the last outcome came.
	since, lastAt int64
	active        int32
	seenIn        uint32
	flags         flag
	counted       tally
	verdict       Verdict
	counters      [4]uint8
	last          Outcome
}

// flag is a fact about a record.
type flag uint16

const (
	// claimed by EndpointSlices.
	claimed flag = 1 << iota
	// asked: the gateway may have been asked to route to the key since the last reading, or may do
	// so late, so that its absence in that reading is not evidence.
	asked
	// present, routed and missing are from the last reading, see Seen.
	present
	routed
	missing
	// unproven: an exclusion of the pod lapsed, and its check has had neither a success nor a
	// verdict since.
	unproven
	// own: the present check has reached the verdict.
	own
	// scheduled: the target is probed. inFlight: the outcome of a probe is awaited.
	scheduled
	inFlight
	// found: the gateway had it taken out when the agent started, and its check, which may be known
	// only later, has had neither a success nor a verdict since.
	found

	// doubts keep a target out although it is claimed and its pod has no holder, if its pool has a
	// check.
	doubts = unproven | found
)

func (r *record) is(f flag) bool { return r.flags&f != 0 }

func (r *record) set(f flag, on bool) {
	if on {
		r.flags |= f
	} else {
		r.flags &^= f
	}
}

func (r *record) key() Key { return Key{r.pool.name, r.target} }

// records is a set of records, each of which stores its position in the set. A map would keep its
// largest size, and iteration would take as long.
type records struct {
	which int
	all   []*record
}

// The sets that a record can be in: its pool's withheld, and the set's todo and watched.
const (
	inWithheld = iota
	inTodo
	inWatched
	sets
)

func (s *records) has(r *record) bool { return r.at[s.which] != 0 }

func (s *records) put(r *record, in bool) {
	last := len(s.all) - 1
	switch place := r.at[s.which] - 1; {
	case in == s.has(r):
	case in:
		s.all = append(s.all, r)
		r.at[s.which] = len(s.all)
	default:
		s.all[place] = s.all[last]
		s.all[place].at[s.which] = place + 1
		s.all[last] = nil
		s.all = s.all[:last]
		r.at[s.which] = 0
	}
}

// findOrMake returns the record of a target. The caller claims or refreshes it.
func (s *Set) findOrMake(p *pool, t Target) *record {
	r := p.targets[t]
	if r != nil {
		return r
	}
	r = &record{pool: p, target: t, seenAt: never, idleSince: never, since: never, lastAt: never}
	p.targets[t] = r
	for held := range s.held {
		held.meet(s.ofPod[held.uid], r)
	}
	if t.UID == "" {
		return r // without a pod it cannot be excluded
	}
	s.ofPod[t.UID] = append(s.ofPod[t.UID], r)
	if r.pod = s.pods[t.UID]; r.pod != nil && len(r.pod.holders) > 0 {
		s.meetAll(r.pod)
	}
	return r
}

// dropIfDone forgets a record that is neither claimed nor present in the gateway, and reports
// whether it did. So the gateway is always changed before the record is dropped.
func (s *Set) dropIfDone(r *record) bool {
	if r.is(claimed|asked) || !s.done(r, WantAbsent) {
		return false
	}
	s.count(r, 0)
	s.soil(r.pool)
	s.plan(r, false)
	r.pool.withheld.put(r, false)
	s.todo.put(r, false)
	s.watched.put(r, false)
	delete(r.pool.targets, r.target)
	all := s.ofPod[r.target.UID]
	if n := slices.Index(all, r); n >= 0 {
		all = slices.Delete(all, n, n+1)
	}
	if len(all) == 0 {
		delete(s.ofPod, r.target.UID)
	} else {
		s.ofPod[r.target.UID] = all
	}
	return true
}

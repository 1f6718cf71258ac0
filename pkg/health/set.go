package health

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"
)

// IdleGap is how far apart two readings must be that both show nothing running on a target, before
// it counts as [Idle]. A proxy thread that had picked the target just before it was taken out may
// not be in the counters of the first reading yet.
const IdleGap = 10 * time.Millisecond

const never int64 = math.MinInt64

// Endpoint is one address of a Service as EndpointSlices tell it.
type Endpoint struct {
	Target
	// Routable: EndpointSlices want traffic there. It is ready and not terminating.
	Routable bool
	// Terminating: the pod is being deleted. It is never routed again.
	Terminating bool
}

// Change is one step from what EndpointSlices said of a pool to what they say now.
type Change struct {
	// Endpoint is what is said now.
	Endpoint
	// Unlisted: the target is not listed any more. Nothing but its Target counts then.
	Unlisted bool
}

// Options are what a set can do otherwise.
type Options struct {
	// UsablePercent of the routable targets of a pool must be usable, or all are chosen: 1 to 100.
	// 0: 50. Where none is usable, all are chosen in any case.
	UsablePercent int
}

// Set holds every target that EndpointSlices, an operator or an earlier agent gave the gateway, the
// exclusions, and the health. See the package comment for the rules. Its methods may be called from
// any goroutine. What a call costs follows what it changes, not what the set holds, except where it
// changes something for all: another generation of the gateway (all targets), an exclusion, a
// check, or a pool that begins to fail open (all of its targets).
type Set struct {
	usablePercent int
	work          chan struct{}

	mu     sync.Mutex
	synced bool
	epoch  time.Time
	// generation is a number for what was last read, 0 while the gateway is unread, and last that
	// of lastName.
	generation, last uint32
	lastName         string
	// readAt is when the last reading that was taken in began, or when the gateway was last found
	// unreadable.
	readAt int64
	pools  map[Pool]*pool
	// ofPod has the records of each pod, in the order in which they were made.
	ofPod         map[UID][]*record
	todo, watched records
	dirty         []*pool
	// fresh: something has come to todo since it was last cleared.
	fresh bool

	// pods are those that are excluded or terminating; held those with a holder.
	pods       map[UID]*pod
	held       map[*pod]struct{}
	exclusions uint64
	lapsedAt   int64

	schedule schedule
}

// New returns an empty set that has not synced.
func New(o Options) *Set {
	return &Set{
		usablePercent: cmp.Or(max(o.UsablePercent, 0), 50), work: make(chan struct{}, 1),
		pools: map[Pool]*pool{}, ofPod: map[UID][]*record{}, pods: map[UID]*pod{}, held: map[*pod]struct{}{},
		todo: records{which: inTodo}, watched: records{which: inWatched}, readAt: never, lapsedAt: never,
	}
}

// stamp turns a time into nanoseconds since the first that the set was given, by the monotonic
// clock where there is one.
func (s *Set) stamp(t time.Time) int64 {
	if s.epoch.IsZero() {
		s.epoch = t
	}
	return int64(t.Sub(s.epoch))
}

func (s *Set) pool(name Pool) *pool {
	if p := s.pools[name]; p != nil {
		return p
	}
	p := &pool{name: name, targets: map[Target]*record{}, withheld: records{which: inWithheld}, asOf: never, hold: true}
	s.pools[name] = p
	return p
}

// Change applies a difference to what EndpointSlices say of pool: what changes does not list stays
// as it was. The pod of a terminating endpoint is never routed again. Changes are applied in their
// order, all at once: no operation follows from only some of them. A target is meant to be in
// changes once; the health of one that leaves and returns in the same call may be forgotten.
func (s *Set) Change(now time.Time, pool Pool, changes []Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.begin(now)
	p := s.pool(pool)
	for n := range changes {
		c := &changes[n]
		if c.Terminating && !c.Unlisted && c.UID != "" {
			s.markTerminating(now, at, c.UID)
		}
		if c.Routable && !c.Terminating && !c.Unlisted {
			s.claim(s.findOrMake(p, c.Target), true)
		} else if r := p.targets[c.Target]; r != nil {
			s.claim(r, false)
		}
	}
	s.end(now)
}

// begin and end are around what may make targets known or plan probes.
func (s *Set) begin(now time.Time) int64 {
	at := s.stamp(now)
	s.schedule.pass(at)
	return at
}

func (s *Set) end(now time.Time) {
	s.settle()
	s.judgeHeld(now)
}

// claim records whether EndpointSlices want traffic at a target.
func (s *Set) claim(r *record, yes bool) {
	switch {
	case yes:
		if r.is(claimed) && !r.is(unlisted) {
			return
		}
		r.set(claimed, true)
		r.set(unlisted, false)
		s.refresh(r)
	case r.is(claimed):
		r.set(claimed|doubts, false)
		if !s.dropIfDone(r) {
			s.refresh(r)
		}
	default:
		s.dropIfDone(r)
	}
}

// Synced records that every pool has received a complete list. Before it, nothing is taken out for
// want of a claim, and no exclusion without a known target counts as done.
func (s *Set) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirm(unlisted)
	if !s.synced {
		s.synced = true
		s.refreshAll()
	}
	s.settle()
}

// HasSynced reports whether Synced was called.
func (s *Set) HasSynced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.synced
}

func (s *Set) refreshAll() {
	for _, p := range s.pools {
		s.sweep(p)
	}
}

// Adopt adds keys that the gateway has from an earlier agent or configuration. Those that no
// endpoint claims are removed once the set has synced. A key that the set has already is not
// touched.
func (s *Set) Adopt(now time.Time, keys []Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin(now)
	for _, k := range keys {
		s.refresh(s.findOrMake(s.pool(k.Pool), k.Target))
	}
	s.end(now)
}

// Pending returns the operations that the last observations do not show as done, in the order to
// apply them: first what brings targets in, then what takes them out, then what forgets them. There
// are none while the gateway is unread, and an exclusion takes nothing out that was not read in
// this generation and since the last exclusion in its pool began: what the last target is must be
// known first. The caller applies them and then reads their keys: until then the set does not
// forget a key that was to be routed.
func (s *Set) Pending() []Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ops []Op
	for _, r := range s.todo.all {
		want := s.want(r)
		if want == WantRouted {
			r.set(asked, true)
			s.watched.put(r, true)
		}
		ops = append(ops, Op{r.key(), want})
	}
	slices.SortFunc(ops, func(a, b Op) int {
		if a.Want != b.Want {
			return cmp.Compare(a.Want, b.Want)
		}
		return compareKeys(a.Key, b.Key)
	})
	return ops
}

// Watched returns the keys to read now: those of excluded pods, again and again, because a gateway
// may change its mind, those that were not read in its present generation, or not since they were
// to be routed, and those that must be seen routed before a target of their pool may be taken out.
// Sorted.
func (s *Set) Watched() []Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []Key
	for _, r := range s.watched.all {
		keys = append(keys, r.key())
	}
	slices.SortFunc(keys, compareKeys)
	return keys
}

// Observe takes in a reading. Readings of keys that the set no longer has change nothing, nor does
// a reading that began before the last one. A new generation voids what was seen of all others, an
// unread pool what was seen of its own targets.
//
// In the first generation, a target of a pool with a check that the gateway knows and does not
// route to was taken out by an agent before this one, whose verdicts are not known. It stays out
// until a probe of it has succeeded, its check has a verdict, or no other is routable.
func (s *Set) Observe(now time.Time, o Observation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.stamp(o.At)
	if at < s.readAt {
		return
	}
	s.readAt = at
	if o.Generation != s.lastName {
		s.last++
		s.lastName = o.Generation
	}
	moved := s.generation != s.last
	s.generation = s.last
	for k, seen := range o.Seen {
		p := s.pools[k.Pool]
		if p == nil || p.targets[k.Target] == nil {
			continue
		}
		r := p.targets[k.Target]
		if s.last == 1 && r.seenIn == 0 && seen.Present && !seen.Routed && !r.is(asked) && !r.excluded() &&
			(r.is(claimed) || !s.synced) {
			// The agent before this one took it out, and may have known why: what the gateway does
			// is all that is left of its verdicts.
			r.set(found, p.check != nil && !r.is(own))
		}
		idle := !seen.Routed && seen.Active == 0
		switch {
		case !idle:
			r.idleSince = never
		case r.idleSince == never || r.seenIn != s.generation:
			r.idleSince = at
		}
		r.set(present, seen.Present)
		r.set(routed, seen.Routed)
		r.set(missing, seen.Missing)
		r.set(asked, false)
		r.active, r.seenAt, r.seenIn = int32(min(seen.Active, math.MaxInt32)), at, s.generation
		if !s.dropIfDone(r) {
			s.refresh(r)
		}
	}
	for name := range o.Unread {
		if p := s.pools[name]; p != nil {
			for _, r := range p.targets {
				r.seenIn = 0
				s.refresh(r)
			}
		}
	}
	if moved {
		s.refreshAll()
	}
	s.settle()
	s.judgeHeld(now)
}

// Void records that the gateway could not be read: nothing that was seen, or began to be read
// before now, is evidence any more.
func (s *Set) Void(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readAt = max(s.readAt, s.stamp(now))
	if s.generation != 0 {
		s.generation = 0
		s.refreshAll()
		s.settle()
	}
	s.judgeHeld(now)
}

func (s *Set) generationName() string {
	if s.generation == 0 {
		return ""
	}
	return s.lastName
}

// Count is how many targets the set has, and in which condition.
type Count struct {
	// Claimed by EndpointSlices.
	Claimed int
	// Routed by the gateway, as last read.
	Routed int
	// Excluded: claimed, and excluded.
	Excluded int
	// Unusable: routable, and unhealthy.
	Unusable int
	// FailingOpen: too few of the routable targets are usable, so that all of them have traffic.
	FailingOpen bool
}

// Counts returns one Count for each pool.
func (s *Set) Counts() map[Pool]Count {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make(map[Pool]Count, len(s.pools))
	for _, p := range s.pools {
		counts[p.name] = Count{
			Claimed: int(p.n[isClaimed]), Routed: int(p.n[isRouted]), Excluded: int(p.n[isExcluded]),
			Unusable: int(p.n[isRoutable] - p.n[isUsable]), FailingOpen: p.open,
		}
	}
	return counts
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// compareBools orders false before true.
func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}

func compareKeys(a, b Key) int {
	// Not by cmp.Or, which would compare all of them.
	if c := cmp.Compare(a.Pool, b.Pool); c != 0 {
		return c
	}
	if c := a.Target.Addr.Compare(b.Target.Addr); c != 0 {
		return c
	}
	return cmp.Compare(a.Target.UID, b.Target.UID)
}

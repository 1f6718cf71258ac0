package health

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"
)

// IdleGap is the time between two readings that must both show nothing running on a target before
// it counts as [Idle]. A proxy thread that picked the target just before its removal may not be in
// the counters of the first reading yet.
const IdleGap = 10 * time.Millisecond

const never int64 = math.MinInt64

// Endpoint is one address of a Service in EndpointSlices.
type Endpoint struct {
	Target
	// Routable: EndpointSlices want traffic there. It is ready and not terminating.
	Routable bool
	// Terminating: the pod is being deleted. It is never routed again.
	Terminating bool
}

// Change is a change of one endpoint of a pool in EndpointSlices.
type Change struct {
	// Endpoint is its present state.
	Endpoint
	// Unlisted: the target is not listed any more. Then only Target counts.
	Unlisted bool
}

// Options are the settings of a set.
type Options struct {
	// UsablePercent is the percentage of a pool's routable targets that must be usable, 1 to 100.
	// If fewer or none are usable, all routable targets are chosen. 0: 50.
	UsablePercent int
}

// Set holds every target that EndpointSlices, an operator or an earlier agent gave the gateway, the
// exclusions, and the health. See the package comment for the rules. Its methods may be called from
// any goroutine. The cost of a call depends on what it changes, not on the size of the set, with
// these exceptions. The first holder of an exclusion, another generation of the gateway, Synced and
// Void visit all targets. An exclusion, a check, a new target of an excluded pod, and a pool that
// begins or ends to fail open visit all targets of a pool. Each change judges the exclusions that
// stand.
type Set struct {
	usablePercent int
	work          chan struct{}

	mu     sync.Mutex
	synced bool
	epoch  time.Time
	// generation is the number of the generation that was read last, or 0 while the gateway is
	// unread. last is the number of lastName.
	generation, last uint32
	lastName         string
	// readAt is when the last recorded reading began, or when the gateway was last found
	// unreadable.
	readAt int64
	pools  map[Pool]*pool
	// ofPod has the records of each pod, in the order in which they were made.
	ofPod         map[UID][]*record
	todo, watched records
	dirty         []*pool
	// fresh: something was added to todo since fresh was last cleared.
	fresh bool

	// pods are the excluded or terminating pods, held those with a holder.
	pods       map[UID]*pod
	held       map[*pod]struct{}
	exclusions uint64

	schedule schedule
}

// New returns an empty set that has not synced.
func New(o Options) *Set {
	return &Set{
		usablePercent: cmp.Or(max(o.UsablePercent, 0), 50), work: make(chan struct{}, 1),
		pools: map[Pool]*pool{}, ofPod: map[UID][]*record{}, pods: map[UID]*pod{}, held: map[*pod]struct{}{},
		todo: records{which: inTodo}, watched: records{which: inWatched}, readAt: never,
	}
}

// stamp converts a time to nanoseconds since the first one that the set received, by the monotonic
// clock if there is one.
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
	p := &pool{name: name, targets: map[Target]*record{}, withheld: records{which: inWithheld}, hold: true,
		latest: never, asOf: never}
	s.pools[name] = p
	return p
}

// Change applies changes of endpoints to pool. Endpoints that are not in changes stay as they are.
// The pod of a terminating endpoint is never routed again. Changes are applied in order, and
// operations are computed only after the last one. A target should be in changes only once, or its
// health may be forgotten when it leaves and returns in the same call.
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

// begin and end enclose every call that may add targets or plan probes.
func (s *Set) begin(now time.Time) int64 {
	at := s.stamp(now)
	s.schedule.pass(at)
	return at
}

func (s *Set) end(now time.Time) {
	s.settle()
	s.judgeHeld(now)
}

// claim records whether EndpointSlices list a target as routable.
func (s *Set) claim(r *record, yes bool) {
	switch {
	case yes:
		if r.is(claimed) {
			return
		}
		r.set(claimed, true)
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

// Synced records that pools, or all if none is given, have received a complete list. Before it, no
// target of a pool is taken out because it is not claimed, and no exclusion of a pod with a target
// in the pool counts as done. That of a pod without a known target is done only once all pools are
// synced. Pools that may have targets of the same pod must be synced by the same call.
func (s *Set) Synced(pools ...Pool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range pools {
		p := s.pool(name)
		p.synced = true
		s.sweep(p)
	}
	if len(pools) == 0 && !s.synced {
		s.synced = true
		s.refreshAll()
	}
	s.settle()
}

// HasSynced reports whether Synced was called for all pools.
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

// Adopt adds keys that are in the gateway from an earlier agent or configuration. Those that no
// endpoint claims are removed once the set has synced. A key that the set already has is not
// changed.
func (s *Set) Adopt(now time.Time, keys []Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin(now)
	for _, k := range keys {
		s.refresh(s.findOrMake(s.pool(k.Pool), k.Target))
	}
	s.end(now)
}

// Pending returns the operations that the last readings do not show as done, in the order to apply
// them: first those that take targets out of pools in which the gateway routes to a chosen target,
// then those that bring targets in, then those that take the last ones out, then those that delete
// targets. Pools without a routed target get theirs before others. While the gateway is unread
// these are only those that bring targets in or delete them, as the readings before show: a process
// of the gateway may be dead or hang, and the others, and what the next one starts with, follow
// EndpointSlices. An exclusion removes only targets that were read in this generation, after it
// began, by a reading that shows another target routed. So the set first finds out which target of
// the pool is the last one. The caller applies the operations and then reads their keys: until then
// the set does not forget a key that was to be routed.
func (s *Set) Pending() []Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	type ranked struct {
		Op
		rank int
	}
	pending := make([]ranked, 0, len(s.todo.all))
	for _, r := range s.todo.all {
		want := s.want(r)
		if want == WantRouted {
			r.set(asked, true)
			s.watched.put(r, true)
		}
		pending = append(pending, ranked{Op{r.key(), want}, r.rank(want)})
	}
	slices.SortFunc(pending, func(a, b ranked) int {
		if a.rank != b.rank {
			return cmp.Compare(a.rank, b.rank)
		}
		return compareKeys(a.Key, b.Key)
	})
	ops := make([]Op, len(pending))
	for i := range pending {
		ops[i] = pending[i].Op
	}
	return ops
}

// Wanted returns the keys that the gateway is to route to, in no order. synced reports whether
// these are all.
func (s *Set) Wanted() (keys []Key, synced bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools {
		for _, r := range p.targets {
			if s.want(r) == WantRouted {
				keys = append(keys, r.key())
			}
		}
	}
	return keys, s.synced
}

// rank orders operations. What takes a target out goes before what brings others in, so that a
// drain does not wait for them, but not where the gateway would be left without a target of the
// pool.
func (r *record) rank(want Want) int {
	serves := r.pool.n[isSure] > 0 || r.pool.kept != nil
	switch {
	case want == WantAbsent && !r.is(routed):
		return 4
	case want != WantRouted && serves:
		return 0
	case want == WantRouted && !serves:
		return 1
	case want != WantRouted:
		return 2
	}
	return 3
}

// Watched returns the keys to read now, sorted. Keys of excluded pods are always among them,
// because a gateway may route to them again. Others are those not read in this generation, those
// not read since they were to be routed, and those that must be seen routed before a target of
// their pool may be removed.
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

// Observe records a reading. Readings of keys that the set no longer has change nothing, nor does a
// reading that began before the last one. A new generation voids the readings of all other keys. A
// pool that could not be read voids the readings of its own targets.
//
// In the first generation, a target of a pool with a check that is in the gateway but not routed
// was taken out by an earlier agent, whose verdicts are unknown. It stays out until a probe of it
// has succeeded, its check has a verdict, or no other target is routable.
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
			(r.is(claimed) || !s.listed(r.pool)) {
			// An earlier agent took it out, perhaps for its health: of that agent's verdicts only
			// the state of the gateway is left.
			r.set(found, !r.is(own))
		} else if seen.Routed && p.check == nil {
			r.set(found, false)
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
		r.set(asked, seen.Late)
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

// Void records that the gateway could not be read: no earlier reading, nor one that began before
// now, is evidence any more.
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

// Count is how many targets a pool has, by condition.
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

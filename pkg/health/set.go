package health

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"
)

// IdleGap is how far apart two readings must be that both show nothing running on a target, before it counts as [Idle]. A proxy
// thread that had picked the target just before it was taken out may not be in the counters of the first reading yet.
const IdleGap = 10 * time.Millisecond

// deadMemory is how long a dead pod's UID is remembered at least, after it was last said to be dead. A lagging EndpointSlice may
// still call it ready for a while. As long as a target of it is known, or a lease, it is remembered in any case.
const deadMemory = 10 * time.Minute

// Endpoint is one address of a Service as EndpointSlices tell it.
type Endpoint struct {
	Target
	// Routable says that EndpointSlices want traffic there: ready and not terminating.
	Routable bool
	// Terminating says that the pod is being deleted. Its UID is dead from then on.
	Terminating bool
}

// State is how far a tombstone has come. States are ordered: a larger one is further.
type State uint8

const (
	// Unknown is the zero value: nothing was read since the tombstone, or what was read is no longer evidence.
	Unknown State = iota
	// Routing says that the gateway may still send new requests to the pod.
	Routing
	// Kept says that the pod is the last one that the gateway really routes to in some pool, and stays until another one is.
	Kept
	// Removed says that nothing which reaches any process of the gateway from now on is sent to the pod.
	Removed
	// Idle says Removed, and that nothing is queued, retrying or in flight to the pod.
	Idle
)

// String prints the state in lower case.
func (s State) String() string {
	switch s {
	case Routing:
		return "routing"
	case Kept:
		return "kept"
	case Removed:
		return "removed"
	case Idle:
		return "idle"
	default:
		return "unknown"
	}
}

// Tombstone is the present state of one.
type Tombstone struct {
	UID UID
	// Since is the oldest start that any holder gave for the drain. It travels with the tombstone.
	Since time.Time
	State State
	// StateSince is when State was entered.
	StateSince time.Time
	// Generation of the gateway that State was read from.
	Generation string
	// Targets is how many targets of the pod the set knows, over all pools.
	Targets int
}

// Set holds every target that EndpointSlices, people or an earlier agent gave the gateway, and the tombstones. See the package
// comment for the rules. Its methods may be called from any goroutine.
type Set struct {
	mu         sync.Mutex
	synced     bool
	generation string
	// readAt is when the last reading that was taken in began, or when the gateway was last found unreadable.
	readAt  time.Time
	pools   map[Pool]map[Target]*record
	pods    map[UID]*pod
	burials uint64
}

// record is what is known of one key.
type record struct {
	key     Key
	claimed bool
	// asked says that the gateway may have been asked to route to the key since the last reading: that it was not there then is no
	// evidence any more.
	asked bool
	seen  Seen
	// seenAt and seenIn say when and in which generation seen was read. The zero time: never.
	seenAt time.Time
	seenIn string
	// quietSince is the first of an unbroken run of readings, in one generation, with neither routing nor activity.
	quietSince time.Time
}

// pod is what is known of one UID: its records, and its tombstone if it has one.
type pod struct {
	records map[Key]*record
	// holders are the leases on the tombstone and when each ends. No holder and not dead: no tombstone.
	holders map[string]time.Time
	dead    bool
	// deadAt is when the pod was last said to be dead.
	deadAt time.Time
	// buriedAt is when the present tombstone was laid here, order its rank among all burials.
	buriedAt time.Time
	order    uint64
	since    time.Time
	state    State
	stateAt  time.Time
}

func (p *pod) buried() bool { return p.dead || len(p.holders) > 0 }

// NewSet returns an empty set that has not synced.
func NewSet() *Set {
	return &Set{pools: map[Pool]map[Target]*record{}, pods: map[UID]*pod{}}
}

// Replace makes endpoints the whole of what EndpointSlices say of pool. It is applied as a difference: what is listed as
// before is not touched. Of an address that is listed twice, routable wins. A terminating endpoint's pod is dead from now on.
func (s *Set) Replace(now time.Time, pool Pool, endpoints []Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.pools[pool]
	listed := make(map[Target]bool, len(endpoints))
	for _, e := range endpoints {
		if e.Terminating && e.UID != "" {
			s.kill(now, e.UID)
		}
		listed[e.Target] = listed[e.Target] || (e.Routable && !e.Terminating)
	}
	for t, routable := range listed {
		if have[t] == nil && !routable {
			continue
		}
		r := s.record(now, Key{pool, t})
		r.claimed = routable
		s.dropIfDone(r)
	}
	for t, r := range have {
		if _, ok := listed[t]; !ok {
			r.claimed = false
			s.dropIfDone(r)
		}
	}
}

// Synced says that every pool was replaced at least once from a complete list. Before it, nothing is taken out for want of a
// claim, and no tombstone without a known target counts as done.
func (s *Set) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
}

// HasSynced reports whether Synced was called.
func (s *Set) HasSynced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.synced
}

// Adopt tells the set of keys that the gateway has from an earlier agent or configuration. Those that nobody claims go once the
// set has synced. A key that the set knows already is not touched.
func (s *Set) Adopt(now time.Time, keys []Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		s.record(now, k)
	}
}

// Bury lays a tombstone on uid for holder, or renews the holder's lease on it, until expires at least. since is when the holder's
// drain began; the oldest of all holders counts. It reports whether the holder is new.
func (s *Set) Bury(now time.Time, uid UID, holder string, since, expires time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pod(uid)
	if !p.buried() {
		s.burials++
		p.buriedAt, p.order, p.since = now, s.burials, since
		p.state, p.stateAt = Unknown, now
	}
	if since.Before(p.since) {
		p.since = since
	}
	had, known := p.holders[holder]
	p.holders[holder] = later(had, expires)
	s.judge(now, uid, p)
	return !known
}

// Renew extends every lease of holder until expires at least.
func (s *Set) Renew(holder string, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pods {
		if had, ok := p.holders[holder]; ok {
			p.holders[holder] = later(had, expires)
		}
	}
}

// Lift ends holder's lease on uid. The pod is routed again when no other holder is left, with whatever health it had. It
// reports whether there was such a lease.
func (s *Set) Lift(uid UID, holder string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[uid]
	if p == nil {
		return false
	}
	_, ok := p.holders[holder]
	delete(p.holders, holder)
	if brokenRule == 2 {
		clear(p.holders)
	}
	s.forgetIfEmpty(uid, p)
	return ok
}

// Held lists the UIDs on which holder has a lease, sorted.
func (s *Set) Held(holder string) []UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var held []UID
	for uid, p := range s.pods {
		if _, ok := p.holders[holder]; ok {
			held = append(held, uid)
		}
	}
	slices.Sort(held)
	return held
}

// Kill records that the pod is terminating or gone. It is never routed again, leases or not.
func (s *Set) Kill(now time.Time, uid UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kill(now, uid)
}

func (s *Set) kill(now time.Time, uid UID) {
	p := s.pod(uid)
	if !p.buried() {
		s.burials++
		p.buriedAt, p.order, p.since = now, s.burials, now
		p.state, p.stateAt = Unknown, now
	}
	p.dead, p.deadAt = true, now
}

// Lapse ends the leases that were not renewed in time and forgets the pods that have been dead long enough. It returns the UIDs
// whose last lease ended, sorted.
func (s *Set) Lapse(now time.Time) []UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lapsed []UID
	for uid, p := range s.pods {
		for holder, expires := range p.holders {
			if now.After(expires) {
				delete(p.holders, holder)
				if !p.buried() {
					lapsed = append(lapsed, uid)
				}
			}
		}
		if p.dead && len(p.records) == 0 && len(p.holders) == 0 && now.Sub(p.deadAt) > deadMemory {
			delete(s.pods, uid)
			continue
		}
		s.forgetIfEmpty(uid, p)
	}
	slices.Sort(lapsed)
	return lapsed
}

// Pending returns the operations that the last observations do not show as done, in the order to apply them: first what
// brings targets in, then what takes them out, then what forgets them. There are none while the gateway is unread, and a
// tombstone takes nothing out that was not read in this generation and since the last tombstone in its pool: what the last target
// is must be known first. The caller applies them and then reads their keys: until then the set does not forget a key that was to be
// routed.
func (s *Set) Pending() []Op {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.generation == "" {
		return nil
	}
	var ops []Op
	for pool, records := range s.pools {
		kept, asOf := s.kept(pool), s.lastBurial(pool)
		for _, r := range records {
			want := s.want(r, kept)
			unread := r.seenIn != s.generation || r.seenAt.Before(asOf)
			if want == WantUnknown || s.done(r, want) || (unread && want == WantRemoved) {
				continue
			}
			r.asked = r.asked || want == WantRouted
			ops = append(ops, Op{r.key, want})
		}
	}
	slices.SortFunc(ops, func(a, b Op) int {
		return cmp.Or(cmp.Compare(a.Want, b.Want), compareKeys(a.Key, b.Key))
	})
	return ops
}

// Watched lists the keys to read now: those of tombstoned pods, again and again, because a gateway may change its mind, those
// that were not read in its present generation, or not since they were to be routed, and those that must be seen routed before a
// target of their pool may be taken out. Sorted.
func (s *Set) Watched() []Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []Key
	for pool, records := range s.pools {
		asOf := s.lastBurial(pool)
		for t, r := range records {
			unread := r.seenAt.IsZero() || r.seenIn != s.generation || r.claimed && r.seenAt.Before(asOf)
			if unread || r.asked || s.pods[t.UID].buried() {
				keys = append(keys, r.key)
			}
		}
	}
	slices.SortFunc(keys, compareKeys)
	return keys
}

// Observe takes in a reading. Readings of keys that the set no longer has change nothing, nor does a reading that began before
// the last one. A new generation voids what was seen of all others.
func (s *Set) Observe(now time.Time, o Observation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.At.Before(s.readAt) {
		return
	}
	s.generation, s.readAt = o.Generation, o.At
	for k, seen := range o.Seen {
		r := s.pools[k.Pool][k.Target]
		if r == nil {
			continue
		}
		quiet := !seen.Routed && seen.Active == 0
		switch {
		case !quiet:
			r.quietSince = time.Time{}
		case r.quietSince.IsZero() || r.seenIn != o.Generation:
			r.quietSince = o.At
		}
		r.seen, r.seenAt, r.seenIn, r.asked = seen, o.At, o.Generation, false
		s.dropIfDone(r)
	}
	for uid, p := range s.pods {
		s.judge(now, uid, p)
	}
}

// Void says that the gateway could not be read: nothing that was seen, or began to be read before now, is evidence any more.
func (s *Set) Void(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation, s.readAt = "", later(s.readAt, now)
	for uid, p := range s.pods {
		s.judge(now, uid, p)
	}
}

// Tombstones returns the state of each that has a holder, sorted by UID.
func (s *Set) Tombstones() []Tombstone {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []Tombstone{}
	for uid, p := range s.pods {
		if len(p.holders) > 0 {
			all = append(all, Tombstone{
				UID: uid, Since: p.since, State: p.state, StateSince: p.stateAt,
				Generation: s.generation, Targets: len(p.records),
			})
		}
	}
	slices.SortFunc(all, func(a, b Tombstone) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return all
}

// Count is how many targets the set has, and in which condition.
type Count struct {
	// Claimed by EndpointSlices.
	Claimed int
	// Routed by the gateway, as last read.
	Routed int
	// Buried: claimed, and tombstoned.
	Buried int
}

// Unsettled says whether some tombstone with a holder is not Idle yet.
func (s *Set) Unsettled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pods {
		if len(p.holders) > 0 && p.state != Idle {
			return true
		}
	}
	return false
}

// Counts returns one Count for each pool.
func (s *Set) Counts() map[Pool]Count {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make(map[Pool]Count, len(s.pools))
	for pool, records := range s.pools {
		var c Count
		for _, r := range records {
			if r.claimed {
				c.Claimed++
				if s.pods[r.key.Target.UID].buried() {
					c.Buried++
				}
			}
			if r.seen.Routed {
				c.Routed++
			}
		}
		counts[pool] = c
	}
	return counts
}

// want is the one place that decides what a key should be.
func (s *Set) want(r, kept *record) Want {
	p := s.pods[r.key.Target.UID]
	switch {
	case p.dead:
		return WantGone
	case r == kept:
		return WantRouted
	case p.buried() && r.claimed:
		return WantRemoved
	case r.claimed:
		return WantRouted
	case !s.synced:
		// Tombstoned or not: without its claim it cannot be told whether it is the last one that may serve.
		return WantUnknown
	default:
		return WantGone
	}
}

// kept returns the record of pool that is tombstoned and must stay nevertheless, because the gateway routes to no other: the one
// that was buried last, and rather one that no process lacks. Nil if there is none. That it routes to another must have been read
// since the last burial: the gateway may have been reloaded, or changed by hand, long after the others were read.
func (s *Set) kept(pool Pool) *record {
	var last *record
	asOf := s.lastBurial(pool)
	rank := func(a, b *record) int {
		return cmp.Or(
			compareBools(!a.seen.Missing, !b.seen.Missing),
			cmp.Compare(s.pods[a.key.Target.UID].order, s.pods[b.key.Target.UID].order),
			compareKeys(a.key, b.key),
		)
	}
	for _, r := range s.pools[pool] {
		p := s.pods[r.key.Target.UID]
		switch {
		case p.dead || !s.serves(r):
		case !p.buried():
			if !r.seen.Missing && !r.seenAt.Before(asOf) {
				return nil
			}
		case last == nil || rank(r, last) > 0:
			last = r
		}
	}
	return last
}

// lastBurial is when the last tombstone was laid on a living pod that the gateway still routes to in pool. The zero time: there is
// none.
func (s *Set) lastBurial(pool Pool) time.Time {
	var last time.Time
	for t, r := range s.pools[pool] {
		if p := s.pods[t.UID]; p.buried() && !p.dead && s.serves(r) {
			last = later(last, p.buriedAt)
		}
	}
	return last
}

// serves says that a target is wanted by EndpointSlices and was seen routed in the present generation.
func (s *Set) serves(r *record) bool {
	return r.claimed && r.seenIn == s.generation && r.seen.Routed
}

// done says whether the last reading shows want to be true.
func (s *Set) done(r *record, want Want) bool {
	if r.seenAt.IsZero() || r.seenIn != s.generation {
		return false
	}
	switch want {
	case WantRouted:
		return r.seen.Routed && !r.seen.Missing
	case WantRemoved:
		return !r.seen.Routed
	default:
		return !r.seen.Present
	}
}

// judge recomputes the state of a pod's tombstone: that of its least advanced target.
func (s *Set) judge(now time.Time, uid UID, p *pod) {
	if !p.buried() {
		s.forgetIfEmpty(uid, p)
		return
	}
	state := Idle
	if !s.synced || s.generation == "" {
		state = Unknown
	}
	for _, r := range p.records {
		state = min(state, s.stateOf(r, p))
	}
	if state != p.state {
		p.state, p.stateAt = state, now
	}
}

func (s *Set) stateOf(r *record, p *pod) State {
	switch {
	case r.seenAt.Before(p.buriedAt) || r.seenIn != s.generation:
		return Unknown
	case r.seen.Routed && r == s.kept(r.key.Pool):
		return Kept
	case r.seen.Routed:
		return Routing
	case !r.quietSince.IsZero() && r.seenAt.Sub(r.quietSince) >= IdleGap:
		return Idle
	default:
		return Removed
	}
}

func (s *Set) pod(uid UID) *pod {
	p := s.pods[uid]
	if p == nil {
		p = &pod{records: map[Key]*record{}, holders: map[string]time.Time{}}
		s.pods[uid] = p
	}
	return p
}

// record returns what is known of a key. A new one was never read, so that the tombstone of its pod, if there is one, is judged
// anew.
func (s *Set) record(now time.Time, k Key) *record {
	records := s.pools[k.Pool]
	if records == nil {
		records = map[Target]*record{}
		s.pools[k.Pool] = records
	}
	r := records[k.Target]
	if r == nil {
		r = &record{key: k}
		records[k.Target] = r
		p := s.pod(k.Target.UID)
		p.records[k] = r
		s.judge(now, k.Target.UID, p)
	}
	return r
}

// dropIfDone forgets a record that nobody claims and the gateway has forgotten. The gateway is written first, the record
// dropped after.
func (s *Set) dropIfDone(r *record) {
	if r.claimed || r.asked || !s.done(r, WantGone) {
		return
	}
	delete(s.pools[r.key.Pool], r.key.Target)
	uid := r.key.Target.UID
	p := s.pods[uid]
	delete(p.records, r.key)
	s.forgetIfEmpty(uid, p)
}

func (s *Set) forgetIfEmpty(uid UID, p *pod) {
	if len(p.records) == 0 && !p.buried() {
		delete(s.pods, uid)
	}
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
	return cmp.Or(
		cmp.Compare(a.Pool, b.Pool),
		a.Target.Addr.Compare(b.Target.Addr),
		cmp.Compare(a.Target.UID, b.Target.UID),
	)
}

package health

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// terminatingMemory is how long the UID of a terminating pod is remembered at least, after it was
// last reported as terminating. A lagging EndpointSlice may still list it as ready. While the pod
// has a target in the set or a holder, its UID is remembered in any case.
const terminatingMemory = 10 * time.Minute

// State is how far an exclusion has come in the gateway.
type State = target.State

// The states, in ascending order. See [target.State].
const (
	// Unknown: nothing was read since the exclusion, or what was read is no longer evidence.
	Unknown = target.Unknown
	Routing = target.Routing
	Kept    = target.Kept
	Removed = target.Removed
	Idle    = target.Idle
)

// Exclusion is the present state of an exclusion, an agent's rule not to route to a pod UID.
type Exclusion struct {
	UID UID
	// Since is the earliest start of the drain that any holder gave.
	Since time.Time
	State State
	// StateSince is when State was entered.
	StateSince time.Time
	// Generation is the generation of the gateway in which State was read.
	Generation string
	// Targets is how many targets of the pod the set knows, over all pools.
	Targets int
	// Kept are the pools in which the pod is kept, if State is Kept. NoConnections reports whether
	// it is Idle in its other pools.
	Kept          []Pool
	NoConnections bool
}

// pod is a UID that is excluded or terminating. It exists only for that long.
type pod struct {
	uid UID
	// holders are the holders of the exclusion and when each expires. A pod without a holder that
	// is not terminating is not excluded.
	holders     map[string]time.Time
	terminating bool
	// terminatingAt is when the pod was last reported as terminating.
	terminatingAt int64
	// excludedAt is when the present exclusion began. order is the exclusion's rank among all, by
	// their beginning.
	excludedAt int64
	order      uint64
	since      time.Time
	state      State
	stateAt    time.Time
	// beside has the records of other pods at the addresses of this pod, while it has a holder. The
	// set may have dropped some of these records.
	beside []*record
}

// Exclude excludes uid for holder, or renews the holder's part in the exclusion, until expires at
// least. since is when the holder's drain began; the oldest of all holders counts. It reports
// whether the holder is new.
func (s *Set) Exclude(now time.Time, uid UID, holder string, since, expires time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.stamp(now)
	p := s.exclude(now, at, uid, since)
	if since.Before(p.since) {
		p.since = since
	}
	had, known := p.holders[holder]
	p.holders[holder] = later(had, expires)
	if _, was := s.held[p]; !was {
		s.held[p] = struct{}{}
		s.meetAll(p)
	}
	s.settle()
	s.judge(now, p)
	return !known
}

func (s *Set) exclude(now time.Time, at int64, uid UID, since time.Time) *pod {
	if p := s.pods[uid]; p != nil {
		return p
	}
	s.exclusions++
	p := &pod{
		uid: uid, holders: map[string]time.Time{}, excludedAt: at, order: s.exclusions, since: since, stateAt: now,
	}
	s.pods[uid] = p
	for _, r := range s.ofPod[uid] {
		r.pod = p
		r.set(unproven, false)
		s.refresh(r)
	}
	return p
}

// Renew extends every exclusion of holder until expires at least.
func (s *Set) Renew(holder string, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.held {
		if had, ok := p.holders[holder]; ok {
			p.holders[holder] = later(had, expires)
		}
	}
}

// Readmit ends holder's part in the exclusion of uid. The pod is routed again when no other holder
// is left. Its health records have not changed. It reports whether holder had a part in it.
func (s *Set) Readmit(uid UID, holder string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[uid]
	if p == nil {
		return false
	}
	_, ok := p.holders[holder]
	delete(p.holders, holder)
	s.readmitIfFree(p, false)
	s.settle()
	return ok
}

// readmitIfFree takes p out of the held pods if it has no holder, and ends its exclusion if it is
// not terminating either. After a lapse its targets are unproven where the pool has a check that
// has not found them unhealthy.
func (s *Set) readmitIfFree(p *pod, lapsed bool) {
	if len(p.holders) > 0 {
		return
	}
	delete(s.held, p)
	if p.terminating {
		return
	}
	delete(s.pods, p.uid)
	for _, r := range s.ofPod[p.uid] {
		r.pod = nil
		if lapsed && r.is(claimed) {
			r.set(unproven, r.pool.check != nil && (!r.is(own) || r.verdict.Usable()))
		}
		s.refresh(r)
	}
}

// Of returns the state of a pod in the gateway, whether it is excluded or not: the lowest state of
// its targets. A target that is not to be routed any more is Unknown while an operation that routes
// to it may be in flight. inFlight reports whether state is Removed and requests or connections to
// the pod were counted. generation is that of the readings.
func (s *Set) Of(uid UID) (state State, inFlight bool, generation string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.known(uid) {
		return Unknown, false, ""
	}
	state = Idle
	for _, r := range s.ofPod[uid] {
		is := Removed
		switch {
		case r.seenIn != s.generation:
			is = Unknown
		case r.is(routed), r.is(claimed) && !r.excluded():
			is = Routing
		case r.is(asked):
			is = Unknown
		case r.idleSince != never && r.seenAt-r.idleSince >= int64(IdleGap):
			is = Idle
		}
		state, inFlight = min(state, is), inFlight || is == Removed && r.active > 0
	}
	return state, inFlight && state == Removed, s.generationName()
}

// known reports whether the set knows all targets of a pod, and the gateway was read.
func (s *Set) known(uid UID) bool {
	of := s.ofPod[uid]
	unlisted := func(r *record) bool { return !s.listed(r.pool) }
	return s.generation != 0 && (s.synced || len(of) > 0 && !slices.ContainsFunc(of, unlisted))
}

// Held returns the UIDs that holder excludes, sorted.
func (s *Set) Held(holder string) []UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var held []UID
	for p := range s.held {
		if _, ok := p.holders[holder]; ok {
			held = append(held, p.uid)
		}
	}
	slices.Sort(held)
	return held
}

// MarkTerminating records that the pod is terminating or deleted. It is never routed again, whether
// it has a holder or not.
func (s *Set) MarkTerminating(now time.Time, uid UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.markTerminating(now, s.stamp(now), uid)
	s.settle()
}

func (s *Set) markTerminating(now time.Time, at int64, uid UID) {
	p := s.exclude(now, at, uid, now)
	p.terminatingAt = at
	if p.terminating {
		return
	}
	p.terminating = true
	for _, r := range s.ofPod[uid] {
		s.refresh(r)
	}
}

// Lapse ends the exclusions whose holders did not renew them in time and forgets the pods that have
// been terminating long enough. It returns the UIDs whose last holder expired, sorted.
//
// A missing renewal does not mean that the pod stays: all coordinators may be down. So the caller
// must know that the set has all EndpointSlices as of now. In a pool with a check the targets of
// such a pod stay out until a probe of them succeeds. There is no other bound: these pods were
// about to be deleted, and they are at most half of a Service's. In a pool without another routable
// target they return immediately, and a kept target stays.
func (s *Set) Lapse(now time.Time) []UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.stamp(now)
	var lapsed []UID
	for p := range s.held {
		maps.DeleteFunc(p.holders, func(_ string, expires time.Time) bool { return now.After(expires) })
		if len(p.holders) == 0 {
			if !p.terminating {
				lapsed = append(lapsed, p.uid)
			}
			s.readmitIfFree(p, true)
		}
	}
	for uid, p := range s.pods {
		old := p.terminating && at-p.terminatingAt > int64(terminatingMemory)
		if old && len(s.ofPod[uid]) == 0 && len(p.holders) == 0 {
			delete(s.pods, uid)
		}
	}
	s.settle()
	slices.Sort(lapsed)
	return lapsed
}

// Exclusions returns the state of each exclusion that has a holder, sorted by UID.
func (s *Set) Exclusions() []Exclusion {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Exclusion, 0, len(s.held))
	for p := range s.held {
		t := s.exclusion(p)
		if p.state == Kept {
			t.Kept, t.NoConnections = s.kept(p)
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b Exclusion) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return all
}

// exclusion returns the exclusion of p, without Kept.
func (s *Set) exclusion(p *pod) Exclusion {
	return Exclusion{
		UID: p.uid, Since: p.since, State: p.state, StateSince: p.stateAt, Generation: s.generationName(),
		Targets: len(s.ofPod[p.uid]),
	}
}

// Unsettled reports whether an exclusion with a holder is not Idle yet.
func (s *Set) Unsettled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.held {
		if p.state != Idle {
			return true
		}
	}
	return false
}

// judge recomputes the state of a pod's exclusion: that of its least advanced target.
func (s *Set) judge(now time.Time, p *pod) {
	state := Idle
	if !s.known(p.uid) {
		state = Unknown
	}
	for _, r := range s.ofPod[p.uid] {
		state = min(state, s.stateOf(r, p))
	}
	if state != p.state {
		p.state, p.stateAt = state, now
	}
}

// kept returns the pools that keep p, and whether it is Idle in all others.
func (s *Set) kept(p *pod) (pools []Pool, idle bool) {
	idle = true
	for _, r := range s.ofPod[p.uid] {
		switch s.stateOf(r, p) {
		case Kept:
			pools = append(pools, r.pool.name)
		case Idle:
		default:
			idle = false
		}
	}
	return pools, idle
}

func (s *Set) stateOf(r *record, p *pod) State {
	switch {
	case s.generation == 0 || r.seenIn != s.generation || r.seenAt < p.excludedAt:
		return Unknown
	case r.is(routed) && r == r.pool.kept:
		return Kept
	case r.is(routed), s.shared(r, p):
		return Routing
	case r.is(asked):
		return Unknown
	case r.idleSince != never && r.seenAt-r.idleSince >= int64(IdleGap):
		return Idle
	default:
		return Removed
	}
}

// shared reports whether the gateway may route to the address of r, a record of p, for another pod
// or for an endpoint without a pod, in any pool. Which of them has the address is unknown.
func (s *Set) shared(r *record, p *pod) bool {
	return slices.ContainsFunc(p.beside, func(other *record) bool {
		return other.target.Addr == r.target.Addr && (other.is(routed|asked) || s.want(other) == WantRouted)
	})
}

// meet adds r to beside if r belongs to another pod and has an address of p. own has the records of
// p.
func (p *pod) meet(own []*record, r *record) {
	for _, o := range own {
		if o.target.Addr == r.target.Addr && r.target.UID != p.uid {
			p.beside = append(p.beside, r)
			return
		}
	}
}

func (s *Set) meetAll(p *pod) {
	p.beside = nil
	own := s.ofPod[p.uid]
	for _, pool := range s.pools {
		for _, r := range pool.targets {
			p.meet(own, r)
		}
	}
}

func (s *Set) judgeHeld(now time.Time) {
	for p := range s.held {
		s.judge(now, p)
	}
}

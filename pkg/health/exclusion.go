package health

import (
	"slices"
	"strings"
	"time"
)

// terminatingMemory is how long a dead pod's UID is remembered at least, after it was last said to
// be dead. A lagging EndpointSlice may still call it ready for a while. As long as a target of it
// is known, or a lease, it is remembered in any case.
const terminatingMemory = 10 * time.Minute

// State is how far a tombstone has come. States are ordered: a larger one is further.
type State uint8

const (
	// Unknown is the zero value: nothing was read since the tombstone, or what was read is no
	// longer evidence.
	Unknown State = iota
	// Routing says that the gateway may still send new requests to the pod.
	Routing
	// Kept says that the pod is the last one that the gateway really routes to in some pool, but
	// for those that are out for their health, and stays until another one is.
	Kept
	// Removed says that nothing which reaches any process of the gateway from now on is sent to the
	// pod.
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

// Exclusion is the present state of one.
type Exclusion struct {
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
	// Kept are the pools in which the pod is kept, if State is Kept. NoConnections says that it is
	// Idle in its other pools.
	Kept          []Pool
	NoConnections bool
}

// pod is a UID with a tombstone, or a dead one. There is one only while that is so.
type pod struct {
	uid UID
	// holders are the leases on the tombstone and when each ends. No holder and not dead: no
	// tombstone.
	holders     map[string]time.Time
	terminating bool
	// terminatingAt is when the pod was last said to be dead.
	terminatingAt int64
	// excludedAt is when the present tombstone was laid here, order its rank among all burials.
	excludedAt int64
	order      uint64
	since      time.Time
	state      State
	stateAt    time.Time
}

// Exclude lays a tombstone on uid for holder, or renews the holder's lease on it, until expires at
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
	s.held[p] = struct{}{}
	s.settle()
	s.judge(now, p)
	return !known
}

// exclude returns the pod of uid, with a tombstone.
func (s *Set) exclude(now time.Time, at int64, uid UID, since time.Time) *pod {
	if p := s.pods[uid]; p != nil {
		return p
	}
	s.exclusions++
	p := &pod{uid: uid, holders: map[string]time.Time{}, excludedAt: at, order: s.exclusions, since: since,
		stateAt: now}
	s.pods[uid] = p
	for _, r := range s.ofPod[uid] {
		r.pod = p
		r.set(doubts, false)
		s.refresh(r)
	}
	return p
}

// Renew extends every lease of holder until expires at least.
func (s *Set) Renew(holder string, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.held {
		if had, ok := p.holders[holder]; ok {
			p.holders[holder] = later(had, expires)
		}
	}
}

// Readmit ends holder's lease on uid. The pod is routed again when no other holder is left, with
// whatever health it had. It reports whether there was such a lease.
func (s *Set) Readmit(uid UID, holder string) bool {
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
	s.readmitIfFree(p, 0)
	s.settle()
	return ok
}

// readmitIfFree takes p out of the held pods if nobody holds it, and ends its tombstone if it is
// not dead either. Its targets get flags.
func (s *Set) readmitIfFree(p *pod, flags flag) {
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
		if r.is(claimed) {
			r.set(flags&unlisted, true)
			r.set(flags&unproven, r.pool.check != nil)
		}
		s.refresh(r)
	}
}

// Held lists the UIDs on which holder has a lease, sorted.
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

// MarkTerminating records that the pod is terminating or gone. It is never routed again, leases or
// not.
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

// Lapse ends the leases that were not renewed in time and forgets the pods that have been dead long
// enough. It returns the UIDs whose last lease ended, sorted.
//
// That nobody renews a lease does not say that the pod lives: whoever could know may be as dead as
// the coordinators. The targets of such a pod therefore stay out until EndpointSlices have called
// them ready again ([Set.Change]) or a watcher has vouched for what it said ([Set.Refreshed]), and,
// where their pool has a check, until a probe has succeeded. If neither comes they stay out,
// however long: these are pods that somebody was about to delete, and no more than half of a
// Service's. But in a pool where no other target is routable they are taken back at once, and one
// that was kept stays.
func (s *Set) Lapse(now time.Time) []UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.stamp(now)
	var lapsed []UID
	for p := range s.held {
		for holder, expires := range p.holders {
			if now.After(expires) {
				delete(p.holders, holder)
			}
		}
		if len(p.holders) == 0 {
			if !p.terminating {
				lapsed = append(lapsed, p.uid)
				s.lapsedAt = at
			}
			s.readmitIfFree(p, unlisted|unproven)
		}
	}
	for uid, p := range s.pods {
		if p.terminating && at-p.terminatingAt > int64(terminatingMemory) && len(s.ofPod[uid]) == 0 &&
			len(p.holders) == 0 {
			delete(s.pods, uid)
		}
	}
	s.settle()
	slices.Sort(lapsed)
	return lapsed
}

// Refreshed says that what EndpointSlices have told so far is what the API server had at asOf, or
// later: a watch is known to be alive, or a list was made. It confirms the targets of pods whose
// tombstones lapsed before.
func (s *Set) Refreshed(asOf time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stamp(asOf) >= s.lapsedAt {
		s.confirm(unlisted)
		s.settle()
	}
}

// confirm takes flags, unlisted or unproven, from all targets that have them.
func (s *Set) confirm(flags flag) {
	for _, p := range s.pools {
		for _, r := range slices.Clone(p.withheld.all) {
			if r.flags&flags != 0 {
				r.set(flags, false)
				s.refresh(r)
			}
		}
	}
}

// Exclusions returns the state of each that has a holder, sorted by UID.
func (s *Set) Exclusions() []Exclusion {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Exclusion, 0, len(s.held))
	for p := range s.held {
		t := Exclusion{
			UID: p.uid, Since: p.since, State: p.state, StateSince: p.stateAt,
			Generation: s.generationName(), Targets: len(s.ofPod[p.uid]),
		}
		if p.state == Kept {
			t.Kept, t.NoConnections = s.kept(p)
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b Exclusion) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return all
}

// Unsettled says whether some tombstone with a holder is not Idle yet.
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

// judge recomputes the state of a pod's tombstone: that of its least advanced target.
func (s *Set) judge(now time.Time, p *pod) {
	state := Idle
	if !s.synced || s.generation == 0 {
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
func (s *Set) kept(p *pod) (pools []Pool, quiet bool) {
	quiet = true
	for _, r := range s.ofPod[p.uid] {
		switch s.stateOf(r, p) {
		case Kept:
			pools = append(pools, r.pool.name)
		case Idle:
		default:
			quiet = false
		}
	}
	return pools, quiet
}

func (s *Set) stateOf(r *record, p *pod) State {
	switch {
	case s.generation == 0 || r.seenIn != s.generation || r.seenAt < p.excludedAt:
		return Unknown
	case r.is(routed) && r == r.pool.kept:
		return Kept
	case r.is(routed):
		return Routing
	case r.quietSince != never && r.seenAt-r.quietSince >= int64(IdleGap):
		return Idle
	default:
		return Removed
	}
}

func (s *Set) judgeHeld(now time.Time) {
	for p := range s.held {
		s.judge(now, p)
	}
}

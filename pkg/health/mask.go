package health

import (
	"cmp"
	"math/bits"
)

// pool is the targets of one pool, their counts, and what these imply for all of them.
type pool struct {
	name    Pool
	targets map[Target]*record
	// withheld has the claimed records that an exclusion or a doubt keeps out, without those of
	// terminating pods.
	withheld records
	n        [tallies]int32
	check    *Check
	// open: too few routable targets are usable, so all are chosen. desperate: no target would be
	// routable, so those in doubt are: targets of lapsed exclusions, and targets that the gateway
	// had taken out when the agent started.
	open, desperate bool
	// latest is when the latest exclusion began of a pod that is not terminating and that the
	// gateway still routes to in this pool. asOf is the same, of the exclusions that the last
	// reading is evidence for. never: there is none.
	latest, asOf int64
	// hold: the gateway has not been seen to route to any chosen target, so none is taken out for
	// its health until it does.
	hold bool
	// kept is the withheld record that stays routed. The gateway routes to no other chosen target
	// or, if the record is usable, to no other usable one. compareKept selects it from several
	// candidates. nil: there is none.
	kept *record
	// synced: the pool has received a complete list.
	synced bool
	// dirty: the pool is to be settled.
	dirty bool
}

// tally is what one record counts as in its pool.
type tally uint8

// The tallies, each the number of a bit.
const (
	isClaimed = iota
	isRouted
	isExcluded // and claimed
	isRoutable
	isUsable // and routable
	// isSure: a chosen target that every process routes to, by a reading of the present generation.
	// isFresh: also read since asOf. isWell: also usable.
	isSure
	isFresh
	isWell
	tallies
)

func (r *record) terminating() bool { return r.pod != nil && r.pod.terminating }

func (r *record) excluded() bool { return r.pod != nil }

// routable reports whether r is claimed by a pod that is not terminating, and is neither excluded
// nor in doubt.
func (r *record) routable() bool {
	return r.is(claimed) && !r.excluded() && (!r.doubted() || r.pool.desperate)
}

// doubted reports whether r waits for a probe or a verdict of its pool's check.
func (r *record) doubted() bool { return r.flags&doubts != 0 && r.pool.check != nil }

// chosen reports whether r should have traffic.
func (r *record) chosen() bool {
	return r.routable() && (r.verdict.Usable() || r.pool.open || r.pool.desperate)
}

// serves reports whether EndpointSlices want a target and it was seen routed in the present
// generation.
func (s *Set) serves(r *record) bool {
	return s.generation != 0 && r.seenIn == s.generation && r.flags&(claimed|routed) == claimed|routed
}

func (s *Set) want(r *record) Want { return wants[s.why(r)] }

var wants = [...]Want{
	WhyChosen: WantRouted, WhyFailingOpen: WantRouted, WhyKept: WantRouted, WhyHeldBack: WantRouted,
	WhyPending: WantRouted, WhyUnhealthy: WantRemoved, WhyExcluded: WantRemoved, WhyLapsed: WantRemoved,
	WhyUnproven: WantRemoved, WhyNotReady: WantAbsent, WhyTerminating: WantAbsent,
	// WhyNotSynced asks for nothing, whether the target is excluded or not: before EndpointSlices
	// are known, the target may be the last one that can serve.
	WhyNotSynced: WantUnknown,
}

// why returns the reason that decides what a key should be. No other function decides that.
func (s *Set) why(r *record) Why {
	switch {
	case r.terminating():
		return WhyTerminating
	case r == r.pool.kept:
		return WhyKept
	case !r.is(claimed) && !s.listed(r.pool):
		return WhyNotSynced
	case !r.is(claimed):
		return WhyNotReady
	case r.excluded():
		return WhyExcluded
	case !r.routable() && r.is(found):
		return WhyUnproven
	case !r.routable():
		return WhyLapsed
	case !r.chosen() && r.pool.hold && s.serves(r):
		return WhyHeldBack
	case !r.chosen():
		return WhyUnhealthy
	case !s.serves(r):
		return WhyPending
	case !r.verdict.Usable():
		return WhyFailingOpen
	default:
		return WhyChosen
	}
}

// listed reports whether all claimed targets of a pool are known.
func (s *Set) listed(p *pool) bool { return s.synced || p.synced }

// done reports whether the last reading shows that want is fulfilled.
func (s *Set) done(r *record, want Want) bool {
	return s.generation != 0 && r.seenIn == s.generation && r.was(want)
}

// was reports whether want was fulfilled when r was last read, in whatever generation.
func (r *record) was(want Want) bool {
	switch want {
	case WantRouted:
		return r.is(routed) && !r.is(missing)
	case WantRemoved:
		return !r.is(routed)
	default:
		return !r.is(present | asked)
	}
}

// refresh updates the counts and lists for r. What follows for the rest of its pool is left to
// settle.
func (s *Set) refresh(r *record) {
	p := r.pool
	var c tally
	if r.is(routed) {
		c |= 1 << isRouted
	}
	withheld := false
	if r.is(claimed) {
		c |= 1 << isClaimed
		switch {
		case r.excluded():
			c |= 1 << isExcluded
			withheld = !r.pod.terminating
		case r.doubted():
			withheld = true
		default:
			c |= 1 << isRoutable
			if r.verdict.Usable() {
				c |= 1 << isUsable
			}
		}
		if r.chosen() && s.serves(r) && !r.is(missing) {
			c |= 1 << isSure
			if r.seenAt >= p.asOf {
				c |= 1 << isFresh
				if r.verdict.Usable() {
					c |= 1 << isWell
				}
			}
		}
	}
	s.count(r, c)
	p.withheld.put(r, withheld)
	s.place(r)
	s.soil(p)
}

func (s *Set) count(r *record, c tally) {
	for changed := c ^ r.counted; changed != 0; changed &= changed - 1 {
		bit := bits.TrailingZeros8(uint8(changed))
		if c&(1<<bit) != 0 {
			r.pool.n[bit]++
		} else {
			r.pool.n[bit]--
		}
	}
	r.counted = c
}

func (s *Set) soil(p *pool) {
	if !p.dirty {
		p.dirty = true
		s.dirty = append(s.dirty, p)
	}
}

// place puts r into the sets and the schedule in which it belongs.
func (s *Set) place(r *record) {
	want := s.want(r)
	todo := want != WantUnknown && !s.done(r, want)
	switch {
	case s.generation == 0: // a last target is not known, so none is taken out that may be one
		todo = s.last != 0 && todo && want != WantRemoved && !r.was(want)
	case want == WantRemoved && (r.seenIn != s.generation ||
		r.excluded() && r.seenAt < max(r.pool.asOf, r.pod.excludedAt)):
		todo = false
	}
	s.fresh = s.fresh || todo && !s.todo.has(r)
	s.todo.put(r, todo)
	s.watched.put(r, s.generation == 0 || r.seenIn != s.generation || r.is(asked) || r.excluded() ||
		r.is(claimed) && r.seenAt < r.pool.latest)
	s.plan(r, r.is(claimed) && !r.terminating())
}

// settle computes, for every pool that changed, what follows for all of its targets. Each step
// depends only on the ones before it.
func (s *Set) settle() {
	for _, p := range s.dirty {
		p.dirty = false
		s.settlePool(p)
		p.dirty = false // by its own sweep
	}
	s.dirty = s.dirty[:0]
}

func (s *Set) settlePool(p *pool) {
	sweep := false
	if desperate := p.n[isRoutable] == 0 && len(p.withheld.all) > 0; desperate != p.desperate {
		p.desperate, sweep = desperate, true
	}
	latest, asOf := never, never
	for _, r := range p.withheld.all {
		if r.excluded() && s.serves(r) {
			latest = max(latest, r.pod.excludedAt)
			if r.pod.excludedAt <= s.readAt {
				asOf = max(asOf, r.pod.excludedAt)
			}
		}
	}
	if latest != p.latest || asOf != p.asOf {
		p.latest, p.asOf, sweep = latest, asOf, true
	}
	if sweep {
		s.sweep(p)
	}
	// A withheld target that is kept because no other is healthy counts as one more usable target.
	var leans int32
	if p.n[isWell] == 0 {
		for _, r := range p.withheld.all {
			if s.mayStay(r) && r.verdict.Usable() {
				leans = 1
			}
		}
	}
	if open := s.tooFew(p.n[isUsable]+leans, p.n[isRoutable]+leans); open != p.open {
		p.open = open
		s.sweep(p)
	}
	if hold := p.n[isSure] == 0; hold != p.hold {
		p.hold = hold
		if p.n[isUsable] < p.n[isRoutable] {
			for _, r := range p.targets {
				s.place(r)
			}
		}
	}
	var kept *record
	if p.n[isFresh] == 0 || leans > 0 {
		for _, r := range p.withheld.all {
			if s.mayStay(r) && (kept == nil || compareKept(r, kept, leans > 0) > 0) {
				kept = r
			}
		}
	}
	if was := p.kept; kept != was {
		p.kept = kept
		for _, r := range []*record{was, kept} {
			// The kept one may have been forgotten in the meantime.
			if r != nil && p.targets[r.target] == r {
				s.place(r)
			}
		}
	}
}

func (s *Set) sweep(p *pool) {
	for _, r := range p.targets {
		s.refresh(r)
	}
}

// mayStay reports whether r, a withheld record, serves, so that it can be kept.
func (s *Set) mayStay(r *record) bool { return s.serves(r) && !r.routable() }

// compareKept orders the candidates to be kept. If leans is set, usable ones come first. Then come
// those that were read since asOf, those that no process lacks, usable ones, those without a
// holder, and those that were excluded later.
func compareKept(a, b *record, leans bool) int {
	rank := func(r *record) (rank int, order uint64) {
		if r.pod != nil {
			order = r.pod.order
		}
		for _, better := range []bool{
			leans && r.verdict.Usable(), r.seenAt >= r.pool.asOf, !r.is(missing), r.verdict.Usable(), !r.excluded(),
		} {
			rank *= 2
			if better {
				rank++
			}
		}
		return rank, order
	}
	x, orderX := rank(a)
	y, orderY := rank(b)
	return cmp.Or(cmp.Compare(x, y), cmp.Compare(orderX, orderY), compareKeys(a.key(), b.key()))
}

// tooFew reports whether so few of the routable targets are usable that all are to be chosen.
func (s *Set) tooFew(usable, routable int32) bool {
	return usable < routable && int64(usable)*100 < int64(routable)*int64(s.usablePercent)
}

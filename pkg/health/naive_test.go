package health

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// naive is what follows from the records alone, by walking over all of them again and again, as the
// rules are written. The set keeps the same by small steps, and must never differ.
type naive struct {
	Todo, Watched map[string]string
	Pools         map[Pool]string
	Whys          map[string]Why
	Planned       []string
	Pods          map[UID]int
}

func naiveOf(s *Set) naive {
	n := naive{map[string]string{}, map[string]string{}, map[Pool]string{}, map[string]Why{}, nil, map[UID]int{}}
	for _, p := range s.pools {
		var c struct{ claimed, routed, excluded, routable, usable int }
		all := slices.Collect(maps.Values(p.targets))
		serves := func(r *record) bool {
			return r.is(claimed) && s.generation != 0 && r.seenIn == s.generation && r.is(routed)
		}
		excluded := func(r *record) bool { return r.target.UID != "" && s.pods[r.target.UID] != nil }
		dead := func(r *record) bool { return excluded(r) && s.pods[r.target.UID].terminating }
		lapsed := func(r *record) bool { return p.check != nil && (r.is(unproven) || r.is(found)) }
		for _, r := range all {
			if excluded(r) {
				n.Pods[r.target.UID]++
			}
			if r.is(routed) {
				c.routed++
			}
			if !r.is(claimed) {
				continue
			}
			c.claimed++
			switch {
			case excluded(r):
				c.excluded++
			case !lapsed(r):
				c.routable++
				if r.verdict.Usable() {
					c.usable++
				}
			}
		}
		open := false
		chosen := func(r *record) bool {
			return r.is(claimed) && !excluded(r) && (!lapsed(r) || c.routable == 0) &&
				(r.verdict.Usable() || open || c.routable == 0)
		}
		latest, asOf := never, never
		for _, r := range all {
			if excluded(r) && !dead(r) && serves(r) {
				began := s.pods[r.target.UID].excludedAt
				latest = max(latest, began)
				if began <= s.readAt {
					asOf = max(asOf, began)
				}
			}
		}
		// No other is well, and one that is to go, and serves, is.
		leans := false
		for _, r := range all {
			leans = leans || r.verdict.Usable() && serves(r) && !dead(r) && (excluded(r) || lapsed(r) && c.routable > 0)
		}
		for _, r := range all {
			leans = leans && !(r.verdict.Usable() && chosen(r) && serves(r) && !r.is(missing) && r.seenAt >= asOf)
		}
		usable, routable := c.usable, c.routable
		if leans {
			usable, routable = usable+1, routable+1
		}
		open = usable < routable && (usable == 0 || 2*usable < routable)
		hold, another := true, false
		var kept *record
		for _, r := range all {
			if chosen(r) && serves(r) && !r.is(missing) {
				hold = false
			}
		}
		for _, r := range all {
			switch {
			case !leans && chosen(r) && serves(r) && !r.is(missing) && r.seenAt >= asOf:
				another = true
			case dead(r) || !serves(r) || !excluded(r) && !(lapsed(r) && c.routable > 0):
			case leans && !r.verdict.Usable():
			case kept == nil || compareKept(r, kept, leans) > 0:
				kept = r
			}
		}
		if another {
			kept = nil
		}
		keptKey := ""
		if kept != nil {
			keptKey = kept.key().String()
		}
		n.Pools[p.name] = fmt.Sprint(c, open, asOf, hold, keptKey)
		for _, r := range all {
			k := r.key().String()
			read := s.generation != 0 && r.seenIn == s.generation
			want, why := WantRemoved, WhyUnhealthy
			switch {
			case dead(r):
				want, why = WantAbsent, WhyTerminating
			case r == kept:
				want, why = WantRouted, WhyKept
			case !r.is(claimed) && (s.synced || r.pool.synced):
				want, why = WantAbsent, WhyNotReady
			case !r.is(claimed):
				want, why = WantUnknown, WhyNotSynced
			case excluded(r):
				why = WhyExcluded
			case lapsed(r) && r.is(found) && c.routable > 0:
				why = WhyUnproven
			case lapsed(r) && c.routable > 0:
				why = WhyLapsed
			case chosen(r):
				want, why = WantRouted, WhyChosen
				if !r.verdict.Usable() {
					why = WhyFailingOpen
				}
				if !serves(r) {
					why = WhyPending
				}
			case hold && serves(r):
				want, why = WantRouted, WhyHeldBack
			}
			n.Whys[k] = why
			var as bool
			switch want {
			case WantRouted:
				as = r.is(routed) && !r.is(missing)
			case WantRemoved:
				as = !r.is(routed)
			case WantAbsent:
				as = !r.is(present) && !r.is(asked)
			}
			todo := !(read && as)
			switch {
			case want == WantUnknown:
				todo = false
			case s.generation == 0:
				todo = s.last > 0 && want != WantRemoved && !as
			case want == WantRemoved:
				todo = todo && read && !(excluded(r) && (r.seenAt < asOf || r.seenAt < s.pods[r.target.UID].excludedAt))
			}
			if todo {
				n.Todo[k] = want.String()
			}
			if !read || r.is(asked) || excluded(r) || r.is(claimed) && r.seenAt < latest {
				n.Watched[k] = ""
			}
			if r.is(claimed) && !dead(r) && p.check != nil {
				n.Planned = append(n.Planned, k)
			}
		}
	}
	slices.Sort(n.Planned)
	return n
}

// kept reads what the set keeps.
func keptBy(s *Set) naive {
	n := naive{map[string]string{}, map[string]string{}, map[Pool]string{}, map[string]Why{}, nil, map[UID]int{}}
	for _, p := range s.pools {
		kept := ""
		if p.kept != nil {
			kept = p.kept.key().String()
		}
		c := struct{ claimed, routed, excluded, routable, usable int }{
			int(p.n[isClaimed]), int(p.n[isRouted]), int(p.n[isExcluded]), int(p.n[isRoutable]), int(p.n[isUsable]),
		}
		n.Pools[p.name] = fmt.Sprint(c, p.open, p.asOf, p.hold, kept)
		for _, r := range p.targets {
			n.Whys[r.key().String()] = s.why(r)
		}
	}
	for _, r := range s.todo.all {
		n.Todo[r.key().String()] = s.want(r).String()
	}
	for _, r := range s.watched.all {
		n.Watched[r.key().String()] = ""
	}
	for place, r := range s.schedule.heap {
		if r.place != place || !r.is(scheduled) {
			panic("the schedule is out of order")
		}
		n.Planned = append(n.Planned, r.key().String())
	}
	slices.Sort(n.Planned)
	for uid, p := range s.pods {
		if len(s.ofPod[uid]) > 0 {
			n.Pods[uid] = len(s.ofPod[uid])
		}
		if _, held := s.held[p]; (len(p.holders) > 0) != held {
			panic("held pods are out of order")
		}
		if len(p.holders) == 0 && !p.terminating {
			panic("a pod without an exclusion is remembered")
		}
	}
	return n
}

// verify checks that what the set keeps is what the naive walk finds.
func verify(t testing.TB, s *Set, log func() string) {
	t.Helper()
	want, got := naiveOf(s), keptBy(s)
	if maps.Equal(want.Todo, got.Todo) && maps.Equal(want.Watched, got.Watched) && maps.Equal(want.Pools, got.Pools) &&
		maps.Equal(want.Whys, got.Whys) && slices.Equal(want.Planned, got.Planned) && maps.Equal(want.Pods, got.Pods) {
		return
	}
	t.Fatalf("the set differs from the naive walk (-naive +set):\n%s\nafter\n%s", cmp.Diff(want, got), log())
}

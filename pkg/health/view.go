package health

import (
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// Why is the reason why a target has traffic, or has none.
type Why uint8

const (
	// WhyUnknown is the zero value.
	WhyUnknown Why = iota
	// WhyChosen targets have traffic.
	WhyChosen
	// WhyFailingOpen targets are unhealthy and have traffic: too few targets of the pool are
	// usable.
	WhyFailingOpen
	// WhyKept targets are excluded or in doubt and have traffic: the gateway has not been seen to
	// route to another that is usable.
	WhyKept
	// WhyHeldBack targets are unhealthy and have traffic: the gateway has not been seen to route to
	// any that is chosen.
	WhyHeldBack
	// WhyPending targets will have traffic: the gateway has not been seen to route to them yet, or
	// was not read.
	WhyPending
	// WhyUnhealthy targets have no traffic because of their health.
	WhyUnhealthy
	// WhyExcluded targets have no traffic because a coordinator wants the gateway to stop routing
	// to their pod.
	WhyExcluded
	// WhyLapsed targets have no traffic because the exclusion of their pod lapsed and no probe has
	// succeeded since, see [Set.Lapse].
	WhyLapsed
	// WhyUnproven targets have no traffic because the gateway did not route to them when the agent
	// started, and its check has had neither a success nor a verdict since.
	WhyUnproven
	// WhyNotReady targets have no traffic because EndpointSlices do not list them as ready.
	WhyNotReady
	// WhyNotSynced targets are left as they are in the gateway: EndpointSlices have not been
	// received yet.
	WhyNotSynced
	// WhyTerminating targets have no traffic because their pod is terminating or deleted.
	WhyTerminating
)

// String prints the reason in lower case, words joined by hyphens.
func (w Why) String() string {
	return target.Name(w, "unknown", "chosen", "failing-open", "kept", "held-back", "pending", "unhealthy",
		"excluded", "lapsed", "unproven", "not-ready", "not-synced", "terminating")
}

// Detail is the complete state of a target, for operators.
type Detail struct {
	Key
	Verdict Verdict
	Why     Why
	// Since is when the verdict was entered. The zero time: it never changed.
	Since time.Time
	// Counters of the outcomes towards the next verdict.
	Counters Counters
	// Last is the last outcome, and LastAt when it came. The zero time: never.
	Last   Outcome
	LastAt time.Time
	// Read: Seen was read in the gateway's present generation, at SeenAt. Otherwise nothing is
	// known.
	Read   bool
	Seen   Seen
	SeenAt time.Time
	// Exclusion is the exclusion of the target's pod. Nil: there is none. A terminating pod has one
	// permanently.
	Exclusion *Exclusion
}

// Counters count outcomes of each kind, see [Thresholds].
type Counters struct {
	Successes, HTTPFailures, TCPFailures, Timeouts uint8
}

// Targets returns the details of every target, sorted by key.
func (s *Set) Targets() []Detail {
	s.mu.Lock()
	pools, n := slices.Collect(maps.Values(s.pools)), 0
	for _, p := range pools {
		n += len(p.targets)
	}
	s.mu.Unlock()
	all := make([]Detail, 0, n)
	for _, p := range pools {
		s.mu.Lock() // for one pool at a time, so that other callers wait less
		for _, r := range p.targets {
			all = append(all, s.detail(r))
		}
		s.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b Detail) int { return compareKeys(a.Key, b.Key) })
	return all
}

func (s *Set) detail(r *record) Detail {
	d := Detail{
		Key: r.key(), Verdict: r.verdict, Why: s.why(r), Last: r.last,
		Counters: Counters{r.counters[0], r.counters[1], r.counters[2], r.counters[3]},
	}
	if r.since != never {
		d.Since = s.epoch.Add(time.Duration(r.since))
	}
	if r.lastAt != never {
		d.LastAt = s.epoch.Add(time.Duration(r.lastAt))
	}
	if s.generation != 0 && r.seenIn == s.generation {
		d.Read, d.SeenAt = true, s.epoch.Add(time.Duration(r.seenAt))
		d.Seen = Seen{Present: r.is(present), Routed: r.is(routed), Missing: r.is(missing), Active: int(r.active)}
	}
	if r.excluded() {
		x := s.exclusion(r.pod)
		d.Exclusion = &x
	}
	return d
}

package healthview

import (
	"cmp"
	"context"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// summaryEvery is the shortest time between two summaries of the health of all targets for
	// coordinators. After a summary that took long, the pause is summaryRest times as long, because
	// summaries must not slow the agent's main task.
	summaryEvery = time.Second
	summaryRest  = 50
)

// Summary computes the health report for coordinators, which they show to operators. Make it with
// NewSummary, then run it with Run.
type Summary struct {
	set   *health.Set
	ports map[health.Pool]endpoints.Port
	names func() map[health.UID]string

	last atomic.Pointer[wire.Summary]
}

// NewSummary returns a summary of nothing until Run. ports are the Services that feed each pool,
// names returns namespace/name of pods.
func NewSummary(set *health.Set, ports map[health.Pool]endpoints.Port, names func() map[health.UID]string) *Summary {
	return &Summary{set: set, ports: ports, names: names}
}

// Last returns the last summary, by the same pointer while it does not change. Nil: there is none
// yet.
func (b *Summary) Last() *wire.Summary { return b.last.Load() }

// Run computes summaries until ctx is done.
func (b *Summary) Run(ctx context.Context) error {
	for {
		began := time.Now()
		b.look()
		if !signal.Sleep(ctx, max(summaryEvery, summaryRest*time.Since(began))) {
			return nil
		}
	}
}

// look computes a summary, and stores it if it has changed.
func (b *Summary) look() {
	if !b.set.HasSynced() {
		return // it is not known yet which targets are listed
	}
	is := summarize(b.set.Targets(), b.set.Counts(), b.ports, b.names)
	if was := b.last.Load(); was == nil || !reflect.DeepEqual(*was, is) {
		b.last.Store(&is)
	}
}

// summarize counts targets by Service, and chooses the Services to report: unhealthy ones first, as
// many as the limit permits.
func summarize(all []health.Detail, pools map[health.Pool]health.Count, ports map[health.Pool]endpoints.Port,
	names func() map[health.UID]string) wire.Summary {
	of := map[types.NamespacedName]*wire.ServiceHealth{}
	service := func(p health.Pool) *wire.ServiceHealth {
		name := ports[p].Service
		if of[name] == nil {
			of[name] = &wire.ServiceHealth{Service: drain.Service{Namespace: name.Namespace, Name: name.Name}}
		}
		return of[name]
	}
	for p := range ports {
		s := service(p) // also of a Service without targets
		s.FailingOpen = s.FailingOpen || pools[p].FailingOpen
	}
	var called map[health.UID]string
	for _, t := range all {
		if _, ours := ports[t.Pool]; !ours {
			continue
		}
		s := service(t.Pool)
		s.Checked = s.Checked || !t.LastAt.IsZero()
		switch {
		case t.Why == health.WhyTerminating || t.Why == health.WhyNotReady || t.Why == health.WhyNotSynced:
			continue // EndpointSlices do not list it
		case t.Exclusion != nil:
			s.Excluded++
		case t.Why == health.WhyLapsed || t.Why == health.WhyUnproven:
			s.Doubtful++
		case !t.Verdict.Usable():
			s.Unhealthy++
			if len(s.Targets) == wire.MaxHealthTargets {
				continue
			}
			if called == nil {
				called = names()
			}
			one := wire.TargetHealth{Address: t.Target.Addr, Pod: called[t.Target.UID], Why: t.Why.String(),
				Since: *utc(t.Since)}
			if !t.LastAt.IsZero() {
				one.Last = t.Last.String()
			}
			s.Targets = append(s.Targets, one)
		case t.Verdict == health.VerdictUnknown:
			s.Unknown++
		default:
			s.Usable++
		}
	}
	sum := wire.Summary{Services: len(of)}
	for _, s := range of {
		sum.All.Usable += s.Usable
		sum.All.Unknown += s.Unknown
		sum.All.Unhealthy += s.Unhealthy
		sum.All.Excluded += s.Excluded
		sum.All.Doubtful += s.Doubtful
		sum.Told = append(sum.Told, *s)
	}
	slices.SortFunc(sum.Told, func(a, b wire.ServiceHealth) int {
		return cmp.Or(rank(a)-rank(b), strings.Compare(a.Service.Namespace, b.Service.Namespace),
			strings.Compare(a.Service.Name, b.Service.Name))
	})
	room := wire.MaxHealthKept
	for i, s := range sum.Told {
		if room -= s.Size(); room < 0 || i == wire.MaxHealthServices {
			sum.Told = sum.Told[:i]
			break
		}
	}
	return sum
}

// rank orders Services: the lowest is reported first.
func rank(s wire.ServiceHealth) int {
	switch {
	case s.FailingOpen:
		return 0
	case s.Trouble():
		return 1
	default:
		return 2
	}
}

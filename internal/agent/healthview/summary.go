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
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// summaryEvery is how often the health of all targets is looked at for those who look at
	// coordinators, at most. A look that took long is rested from for summaryRest times as long: it
	// is not what the agent is for.
	summaryEvery = time.Second
	summaryRest  = 50
)

// Summary tells coordinators, for operators, what is believed of the health of targets. Make it
// with NewSummary, then run it with Run.
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

// Last is what was last found: the same pointer as long as it is the same. Nil: nothing was looked
// at yet.
func (b *Summary) Last() *wire.Summary { return b.last.Load() }

// Run looks until ctx is done.
func (b *Summary) Run(ctx context.Context) error {
	for {
		began := time.Now()
		b.look()
		timer := time.NewTimer(max(summaryEvery, summaryRest*time.Since(began)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// look finds out whether there is something new to tell.
func (b *Summary) look() {
	if !b.set.HasSynced() {
		return // what is not listed yet is not known to be wanted
	}
	is := summarize(b.set.Targets(), b.set.Counts(), b.ports, b.names)
	if was := b.last.Load(); was == nil || !reflect.DeepEqual(*was, is) {
		b.last.Store(&is)
	}
}

// summarize counts targets by Service, and chooses of which Services is told: those with trouble
// first, as many as there is room for.
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
		s := service(p) // also one that has no target
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
			continue // EndpointSlices want nothing of it
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

// rank is how soon a Service is told of.
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

// Package exclusion applies a coordinator's exclusions to an agent's targets and stores them in its
// journal, and ends those that are not renewed. It is for agents that direct a gateway. Package
// client calls it, and package health has the targets.
package exclusion

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/agent/journal"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Exclusions implements [client.Exclusions] on a set of targets. It records every exclusion in the
// journal before it changes the set, so that [WriteAhead] finds the exclusion in the journal by the
// time the set asks the gateway for anything.
type Exclusions struct {
	set     *health.Set
	journal *journal.Journal
	// ports are the Services that feed each pool.
	ports map[health.Pool]endpoints.Port
	wake  func()
	log   *slog.Logger

	// both serializes changes of set and journal, so that these agree.
	both sync.Mutex

	mu sync.Mutex
	// known holds the last recorded state of each exclusion.
	known map[health.UID]health.State
	// furthest has the furthest state that each exclusion has reached. propagation, which may be
	// nil, observes once how long each state took.
	furthest    map[health.UID]health.State
	propagation *prometheus.HistogramVec
	// follows: the gateway reads EndpointSlices itself, see Follow. made is when each exclusion was
	// made, freshAt the last time for which all EndpointSlices are known.
	follows bool
	made    map[health.UID]time.Time
	freshAt time.Time
}

// New returns the exclusions of set, with those that are in journal from an earlier process of the
// agent, each until its expiry. These include expired ones, which do not end by time alone, see
// Expire. ports are the Services that feed each pool, and wake is called when the gateway has to be
// directed again. propagation, which may be nil, is called with the time that each exclusion took.
func New(now time.Time, set *health.Set, kept *journal.Journal, ports map[health.Pool]endpoints.Port, wake func(),
	propagation *prometheus.HistogramVec, log *slog.Logger) *Exclusions {
	t := &Exclusions{
		set: set, journal: kept, ports: ports, wake: wake, propagation: propagation, log: log,
		known: map[health.UID]health.State{}, furthest: map[health.UID]health.State{},
		made: map[health.UID]time.Time{},
	}
	t.restore(now)
	return t
}

func (t *Exclusions) restore(now time.Time) {
	t.both.Lock()
	defer t.both.Unlock()
	for _, s := range t.journal.Exclusions() {
		uid := s.Pod.UID
		for _, holder := range slices.Sorted(maps.Keys(s.Expiries)) {
			expires := s.Expiries[holder]
			t.set.Exclude(now, uid, holder, s.Since, expires)
			t.log.Info("exclusion restored", "pod", s.Pod.String(), "uid", s.Pod.UID, "holder", holder,
				"since", s.Since, "expiry", expires.Sub(now).String())
		}
		if s.Terminating {
			t.set.MarkTerminating(now, uid)
		}
	}
}

// Follow records that the gateway reads EndpointSlices itself, and may know a pod that this agent
// has not heard of. The state of such a pod is then Unknown until EndpointSlices are known as of a
// time after its exclusion.
func (t *Exclusions) Follow() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.follows = true
}

// unheard reports whether the gateway may know targets of s that this agent has not heard of. It is
// called with mu.
func (t *Exclusions) unheard(s health.Exclusion) bool {
	return t.follows && s.Targets == 0 && !t.freshAt.After(t.made[s.UID])
}

// Exclude implements client.Exclusions. A pod without a UID is ignored.
func (t *Exclusions) Exclude(now time.Time, pod drain.Pod, holder string, since, expires time.Time) {
	if pod.UID == "" {
		t.log.Warn("coordinator named a pod without UID", "pod", pod.String(), "holder", holder)
		return
	}
	t.both.Lock()
	t.journal.Exclude(pod, holder, since, expires)
	news := t.set.Exclude(now, pod.UID, holder, since, expires)
	if news {
		t.set.Renew(holder, expires) // as in the journal, where a holder has one expiry for all its exclusions
		// For a new holder, the state is news even if other holders have received it.
		t.mu.Lock()
		delete(t.known, pod.UID)
		if _, had := t.made[pod.UID]; !had {
			t.made[pod.UID] = now
		}
		t.mu.Unlock()
	}
	t.both.Unlock()
	if news {
		t.log.Info("exclusion", "pod", pod.String(), "uid", pod.UID, "holder", holder, "since", since)
		t.wake()
	}
}

// Readmit implements client.Exclusions.
func (t *Exclusions) Readmit(now time.Time, uid drain.UID, holder string, dead bool) {
	if uid == "" {
		return
	}
	t.both.Lock()
	if dead {
		t.journal.Terminate(now, uid)
		t.set.MarkTerminating(now, uid)
	}
	t.journal.Readmit(uid, holder)
	had := t.set.Readmit(uid, holder)
	t.both.Unlock()
	if had {
		t.log.Info("exclusion readmitted", "uid", uid, "holder", holder, "dead", dead)
	}
	t.wake()
}

// Renew implements client.Exclusions.
func (t *Exclusions) Renew(now time.Time, holder string, expires time.Time) {
	t.both.Lock()
	defer t.both.Unlock()
	t.journal.Renew(holder, expires)
	t.set.Renew(holder, expires)
}

// Held implements client.Exclusions.
func (t *Exclusions) Held(holder string) []drain.UID { return t.set.Held(holder) }

// Reports implements client.Exclusions.
func (t *Exclusions) Reports(now time.Time) []drain.Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	exclusions := t.set.Exclusions()
	reports := make([]drain.Report, len(exclusions))
	for i, s := range exclusions {
		state := t.proven(now, s)
		reports[i] = drain.Report{UID: s.UID, Generation: s.Generation, State: state}
		if state == health.Kept {
			reports[i].Kept, reports[i].NoConnections = t.services(s.Kept), s.NoConnections
		}
	}
	return reports
}

// services names the Services that feed pools, in the form of [drain.Report.Kept].
func (t *Exclusions) services(pools []health.Pool) string {
	var names []string
	for _, p := range pools {
		names = append(names, t.ports[p].Service.String())
	}
	slices.Sort(names)
	if kept := strings.Join(slices.Compact(names), ","); len(kept) <= wire.MaxKept {
		return kept
	}
	return "" // the deletion waits
}

// proven returns the state that may be reported. Unknown is reported for an exclusion that is not
// in the file yet: a pod that the gateway does not know yet is Idle immediately, and an agent that
// reported so and died would route to it when it appears. It is called with mu.
func (t *Exclusions) proven(now time.Time, s health.Exclusion) health.State {
	if !t.journal.Settled(now, s.UID) || t.unheard(s) {
		return health.Unknown
	}
	return s.State
}

// Changed records each exclusion's new state, and reports whether any state has changed.
func (t *Exclusions) Changed(now time.Time) bool {
	// Read with the lock held. Otherwise a slower caller could record an older state, and a change
	// back to that would not be reported.
	t.mu.Lock()
	defer t.mu.Unlock()
	exclusions := t.set.Exclusions()
	news := len(exclusions) != len(t.known)
	all := make(map[health.UID]health.State, len(exclusions))
	furthest := make(map[health.UID]health.State, len(exclusions))
	for _, s := range exclusions {
		state := t.proven(now, s)
		all[s.UID] = state
		furthest[s.UID] = max(state, t.furthest[s.UID])
		t.measure(s, t.furthest[s.UID], state)
		was, known := t.known[s.UID]
		news = news || state == health.Kept // perhaps in other Services than before
		if !known || was != state {
			news = true
			t.log.Info("exclusion state", "uid", s.UID, "state", state.String(), "targets", s.Targets,
				"generation", s.Generation)
		}
	}
	t.known, t.furthest = all, furthest
	maps.DeleteFunc(t.made, func(uid health.UID, _ time.Time) bool {
		_, is := all[uid]
		return !is
	})
	return news
}

// measure observes how long it took from before to state, if that is further than ever. An
// exclusion that is Idle immediately was never routed here, or was removed by an earlier process,
// and is no measure of the gateway.
func (t *Exclusions) measure(s health.Exclusion, before, state health.State) {
	if t.propagation == nil || s.Targets == 0 {
		return
	}
	took := max(0, s.StateSince.Sub(s.Since)).Seconds()
	if before < health.Removed && state >= health.Removed {
		t.propagation.WithLabelValues("removed").Observe(took)
	}
	if before < health.Idle && state == health.Idle {
		t.propagation.WithLabelValues("idle").Observe(took)
	}
}

// WriteAhead is a gateway that takes a pod out only when the journal has its exclusion in the file,
// or cannot write it. A batch waits once, at most a second.
type WriteAhead struct {
	gateway.Directed
	Journal *journal.Journal
}

// Apply implements gateway.Directed.
func (g WriteAhead) Apply(ctx context.Context, ops []health.Op) error {
	if slices.ContainsFunc(ops, func(op health.Op) bool { return op.Want != health.WantRouted }) {
		_ = g.Journal.Sync() // availability first; the journal logs the error
	}
	return g.Directed.Apply(ctx, ops)
}

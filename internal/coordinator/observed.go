package coordinator

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// maxObserved bounds the pods that are measured simultaneously, maxMeasured the namespaces that
	// are remembered, and measuredKept the waits that are remembered for each.
	maxObserved  = 10_000
	maxMeasured  = 1000
	measuredKept = 1000
	// observedFor is how long a pod whose deletion was allowed is expected to be deleted: the API
	// server, or another webhook, may refuse.
	observedFor = 30 * time.Second
)

// observed is a pod whose deletion did not wait because its mode is observe.
type observed struct {
	drain.Barrier
	// allowed is when its deletion was allowed. Since is zero until the pod is terminating.
	allowed time.Time
}

// Measured is a deletion that did not wait. Took is how long it would have waited.
type Measured struct {
	drain.Status
	Took time.Duration
	// InFlight: a gateway still had requests or connections to the pod when it had stopped routing
	// to it.
	InFlight bool
}

// Observe measures how long gateways take to stop routing to a pod once it is terminating, and
// whether requests are in flight to it then. No call waits for that, and no gateway excludes the
// pod. young is [drain.Barrier.Young].
func (c *Core) Observe(now time.Time, request Request, targets []netip.AddrPort, young time.Duration) {
	if c.observed[request.Pod.UID] != nil || len(c.observed) >= maxObserved {
		return
	}
	last := !slices.ContainsFunc(request.Targets, func(t drain.Targets) bool { return !t.Last(request.Pod.UID) })
	c.observed[request.Pod.UID] = &observed{allowed: now, Barrier: drain.Barrier{Pod: request.Pod, Observe: true,
		Services: servicesOf(request.Targets), Targets: targets, Bound: c.times.Deadline, Last: last, Young: young}}
}

// terminating starts the measurement of an observed pod.
func (c *Core) terminating(now time.Time, uid drain.UID) {
	if o := c.observed[uid]; o != nil && o.Since.IsZero() {
		o.Since = now
		c.Ledger.OpenBarrier(now, o.Barrier)
	}
}

// measure ends the measurement of a pod if it is complete.
func (c *Core) measure(now time.Time, uid drain.UID) {
	o := c.observed[uid]
	switch {
	case o == nil:
	case !o.Since.IsZero():
		s := c.Ledger.Status(now, drain.AtBarrier, uid)
		if s.Waits() {
			return
		}
		delete(c.observed, uid)
		c.effects.Measured = append(c.effects.Measured,
			Measured{s, now.Sub(s.Since), c.Ledger.EndBarrier(now, uid, true)})
	case now.Sub(o.allowed) > observedFor:
		delete(c.observed, uid)
	}
}

// Observe is [Core.Observe].
func (c *Coordinator) Observe(request Request, targets []netip.AddrPort, young time.Duration) {
	c.change(func() { c.core.Observe(time.Now(), request, targets, young) })
}

// measured is what is remembered for a namespace. Its WaitSeconds are in took.
type measured struct {
	api.NamespaceReport
	took ring[float64]
}

// measure, called with the lock, records a deletion.
func (c *Coordinator) measure(m Measured) {
	ns := c.seen.measured[m.Pod.Namespace]
	if ns == nil {
		if len(c.seen.measured) >= maxMeasured {
			return
		}
		ns = &measured{NamespaceReport: api.NamespaceReport{Namespace: m.Pod.Namespace}}
		c.seen.measured[m.Pod.Namespace] = ns
	}
	switch m.Reason {
	case drain.Acknowledged, drain.IdleBound:
		c.Metrics.observed.Observe(m.Took.Seconds())
		ns.Deletions++
		ns.took.add(m.Took.Seconds(), measuredKept)
		if m.InFlight {
			c.Metrics.inFlight.Inc()
			ns.InFlight++
		}
	case drain.NoAgents, drain.LastTarget: // it would not have waited
	default:
		ns.Unmeasured++
	}
}

// Report returns the measurements of each namespace, sorted by name.
func (c *Coordinator) Report() api.Report {
	r := api.Report{Namespaces: []api.NamespaceReport{}}
	c.locked(func() {
		r.Since = c.core.Began
		for _, name := range slices.Sorted(maps.Keys(c.seen.measured)) {
			of := c.seen.measured[name]
			of.WaitSeconds = of.took.newest()
			r.Namespaces = append(r.Namespaces, of.NamespaceReport)
		}
	})
	return r
}

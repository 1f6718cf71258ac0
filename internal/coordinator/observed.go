package coordinator

import (
	"maps"
	"net/netip"
	"slices"
	"time"

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
// pod.
func (c *Core) Observe(now time.Time, request Request, targets []netip.AddrPort) {
	if c.observed[request.Pod.UID] != nil || len(c.observed) >= maxObserved {
		return
	}
	last := !slices.ContainsFunc(request.Targets, func(t drain.Targets) bool { return !t.Last(request.Pod.UID) })
	c.observed[request.Pod.UID] = &observed{allowed: now, Barrier: drain.Barrier{Pod: request.Pod, Observe: true,
		Services: servicesOf(request.Targets), Targets: targets, Bound: c.times.Deadline, Last: last}}
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
		c.effects.Measured = append(c.effects.Measured, Measured{s, now.Sub(s.Since), c.Ledger.EndObserved(now, uid)})
	case now.Sub(o.allowed) > observedFor:
		delete(c.observed, uid)
	}
}

// Observe is [Core.Observe].
func (c *Coordinator) Observe(request Request, targets []netip.AddrPort) {
	c.change(func() { c.core.Observe(time.Now(), request, targets) })
}

// Report is what deletions of a namespace would have waited for, since this replica started.
type Report struct {
	Namespace string
	// Deletions is how many were measured. Of these, InFlight had requests or connections in flight
	// when their gateways had stopped routing to them. Unmeasured counts other deletions, for which
	// that was not known by the deadline.
	Deletions, InFlight, Unmeasured int
	// Took are the newest waits.
	Took []time.Duration
}

// measured is what is remembered for a namespace.
type measured struct {
	Report
	took ring[time.Duration]
}

// measure, called with the lock, records a deletion.
func (c *Coordinator) measure(m Measured) {
	ns := c.seen.measured[m.Pod.Namespace]
	if ns == nil {
		if len(c.seen.measured) >= maxMeasured {
			return
		}
		ns = &measured{Report: Report{Namespace: m.Pod.Namespace}}
		c.seen.measured[m.Pod.Namespace] = ns
	}
	switch m.Reason {
	case drain.Acknowledged, drain.IdleBound:
		c.Metrics.observed.Observe(m.Took.Seconds())
		ns.Deletions++
		ns.took.add(m.Took, measuredKept)
		if m.InFlight {
			c.Metrics.inFlight.Inc()
			ns.InFlight++
		}
	case drain.NoAgents, drain.LastTarget: // it would not have waited
	default:
		ns.Unmeasured++
	}
}

// Reports returns the measurements of each namespace, sorted by name, and since when they run.
func (c *Coordinator) Reports() (since time.Time, all []Report) {
	c.locked(func() {
		since = c.core.Began
		for _, name := range slices.Sorted(maps.Keys(c.seen.measured)) {
			r := c.seen.measured[name].Report
			r.Took = c.seen.measured[name].took.newest()
			all = append(all, r)
		}
	})
	return since, all
}

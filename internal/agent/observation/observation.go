// Package observation implements the watches of coordinators on an observed gateway: it reports
// when the gateway has stopped routing to a pod, and deletes the conntrack entries of deleted pods.
// The directed counterpart is package exclusion.
package observation

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// maxObserved bounds the pods that are observed simultaneously, for all coordinators together.
	maxObserved = 10_000
	// cleanBacklog bounds the pods whose conntrack entries wait to be deleted, cleanLate how long
	// one may wait: later, another pod may have its address.
	cleanBacklog = 1000
	cleanLate    = 2 * time.Second
	// cleanAgain is the interval at which the agent checks whether the kernel still sends to the
	// address. It is also how long each pod waits at least, so that several are cleaned together.
	cleanAgain = 200 * time.Millisecond
	// neglected is how long before a pod's deletion the gateway must have been configured last to
	// count as abandoned. It is as long as gateways take to learn of a change.
	neglected = 10 * time.Second
	// afterwards is how long after its deadline a barrier is still reported.
	afterwards = 2 * time.Second
)

// Pods are the pods that coordinators want observed. It implements [client.Watches]. Make it with
// New, then run it with Run.
type Pods struct {
	gateway     gateway.Observed
	propagation *prometheus.HistogramVec
	log         *slog.Logger

	// changed is called when there may be something to report. It must not block.
	changed func()

	mu   sync.Mutex
	pods map[drain.UID]*observation
	// cleaning are deleted pods whose conntrack entries are to be deleted.
	cleaning []cleanable
}

// observation is the observation of one pod.
type observation struct {
	pod     drain.Pod
	since   time.Time
	targets []netip.AddrPort
	// looks: every holder so far has asked only for a look ([drain.Watch.Observe]).
	looks bool
	// holders are the holders that want it, each with its deadline.
	holders map[string]time.Time
	watch   gateway.Watch
	// removed and idle: the time until that state was observed in the histogram.
	removed, idle bool
	// sent: the kernel was seen to send to the pod.
	sent bool
	// opened is when the observation began. listed is as in [drain.Watch].
	opened time.Time
	listed bool
}

type cleanable struct {
	pod     drain.Pod
	targets []netip.AddrPort
	at      time.Time
}

// New returns an empty set of pods that are observed in g. changed is called when there may be
// something to report, and must not block. propagation gets the time that each pod took.
func New(g gateway.Observed, changed func(), propagation *prometheus.HistogramVec, log *slog.Logger) *Pods {
	return &Pods{
		gateway: g, propagation: propagation, log: log, changed: changed, pods: map[drain.UID]*observation{},
	}
}

// Watch implements client.Watches.
func (o *Pods) Watch(now time.Time, w drain.Watch, holder string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	of := o.pods[w.Pod.UID]
	if of == nil {
		if len(o.pods) >= maxObserved || w.Pod.UID == "" {
			o.log.Warn("pod is not observed: no UID, or too many pods", "pod", w.Pod.String(), "uid", w.Pod.UID,
				"observed", len(o.pods))
			return
		}
		of = &observation{pod: w.Pod, since: w.Since, holders: map[string]time.Time{}, opened: now, listed: w.Listed}
		o.open(of, w.Targets, w.Observe)
		if is := of.look(); of.neglected(is) {
			o.log.Warn("what configures the gateway seems not to run on this node: it has no rules for a pod that "+
				"has long been ready", "pod", w.Pod.String(), "lastWritten", is.Written)
		}
		o.pods[w.Pod.UID] = of
	} else if len(w.Targets) > 0 && !slices.Equal(of.targets, w.Targets) || of.looks && !w.Observe {
		of.watch.Close()
		if len(w.Targets) == 0 {
			w.Targets = of.targets
		}
		o.open(of, w.Targets, of.looks && w.Observe)
	}
	of.listed = of.listed || w.Listed
	if w.Since.Before(of.since) {
		of.since = w.Since
	}
	// The deadline is by this node's clock, not the coordinator's. After it, no hook waits.
	deadline := now.Add(w.Deadline.Sub(w.Since))
	if had, known := of.holders[holder]; known && had.Before(deadline) {
		deadline = had
	}
	of.holders[holder] = deadline
}

// open opens the watch of a pod.
func (o *Pods) open(of *observation, targets []netip.AddrPort, looks bool) {
	of.targets, of.looks = slices.Clone(targets), looks
	if looks {
		of.watch = o.look(of.targets, o.changed)
	} else {
		of.watch = o.gateway.Watch(of.targets, o.changed)
	}
}

// look watches targets that may be other pods' by now.
func (o *Pods) look(targets []netip.AddrPort, changed func()) gateway.Watch {
	if g, can := o.gateway.(gateway.Looker); can {
		return g.Look(targets, changed)
	}
	return o.gateway.Watch(targets, changed)
}

// Unwatch implements client.Watches.
func (o *Pods) Unwatch(now time.Time, uid drain.UID, holder string, gone bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	of := o.pods[uid]
	if of == nil {
		return
	}
	delete(of.holders, holder)
	if gone {
		clear(of.holders)
		o.enqueue(cleanable{of.pod, of.targets, now})
	}
	if len(of.holders) == 0 {
		of.watch.Close()
		delete(o.pods, uid)
	}
}

// Watched implements client.Watches.
func (o *Pods) Watched(holder string) []drain.UID {
	o.mu.Lock()
	defer o.mu.Unlock()
	var uids []drain.UID
	for uid, of := range o.pods {
		if _, ok := of.holders[holder]; ok {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// Reports implements client.Watches.
func (o *Pods) Reports(now time.Time) []drain.Report {
	o.mu.Lock()
	defer o.mu.Unlock()
	reports := make([]drain.Report, 0, len(o.pods))
	for uid, of := range o.pods {
		if !of.wanted(now) {
			continue
		}
		is := of.look()
		if of.neglected(is) {
			is.State = health.Unknown
		}
		o.measure(of, is, now)
		r := drain.Report{UID: uid, Generation: is.Generation, State: is.State,
			NoConnections: is.NoConnections, HasSent: of.sent,
			InFlight: is.State == health.Removed && !is.Counted.Before(is.Since)}
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b drain.Report) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return reports
}

// look returns the present reading, and records whether the kernel sends to the pod. The first look
// is during the deletion, because a report may be later, when the kernel sends no more.
func (of *observation) look() gateway.Reading {
	is := of.watch.Reading()
	of.sent = of.sent || is.State == health.Routing || is.State == health.Kept
	return is
}

// neglected reports whether the gateway does not send to the pod because it was never told of it:
// it was not seen to send to the pod, though it should have, nor to be configured since shortly
// before the deletion and the observation, although the deletion changes the pod's Service. An
// observation that the end of a stream has interrupted begins late.
func (of *observation) neglected(is gateway.Reading) bool {
	return of.listed && !of.sent && !is.Written.IsZero() && is.Written.Before(of.opened.Add(-neglected)) &&
		is.Written.Before(of.since.Add(-neglected))
}

// wanted reports whether a hook may still wait.
func (of *observation) wanted(now time.Time) bool {
	for _, deadline := range of.holders {
		if now.Before(deadline.Add(afterwards)) {
			return true
		}
	}
	return false
}

// measure records, once for each state, the time from the deletion until Removed and until Idle.
func (o *Pods) measure(of *observation, is gateway.Reading, now time.Time) {
	at := is.Since
	if at.IsZero() || at.After(now) {
		at = now
	}
	took := max(0, at.Sub(of.since)).Seconds()
	if is.State >= health.Removed && !of.removed {
		of.removed = true
		o.propagation.WithLabelValues("removed").Observe(took)
	}
	if is.State == health.Idle && !of.idle {
		of.idle = true
		o.propagation.WithLabelValues("idle").Observe(took)
	}
}

// expire forgets the pods for which no hook has waited for long, and whose end no coordinator has
// reported.
func (o *Pods) expire(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid, of := range o.pods {
		old := true
		for _, deadline := range of.holders {
			old = old && now.Sub(deadline) > 2*podfacts.MaxBound
		}
		if old {
			of.watch.Close()
			delete(o.pods, uid)
		}
	}
}

// Clean schedules the deletion of the conntrack entries of a deleted pod.
func (o *Pods) Clean(pod drain.Pod, targets []netip.AddrPort) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.enqueue(cleanable{pod, targets, time.Now()})
}

// enqueue is called with the lock.
func (o *Pods) enqueue(c cleanable) {
	if _, ok := o.gateway.(gateway.Cleaner); !ok {
		return
	}
	if len(o.cleaning) < cleanBacklog {
		o.cleaning = append(o.cleaning, c)
	}
}

// reused reports whether the kernel sends to one of the addresses of a deleted pod: another pod on
// another node has the address, or the kernel still routes to the deleted pod, for example as the
// last of a Service.
func (o *Pods) reused(targets []netip.AddrPort) bool {
	w := o.look(targets, func() {})
	defer w.Close()
	is := w.Reading().State
	return is == health.Routing || is == health.Kept
}

// Run deletes conntrack entries until ctx is done. free reports whether no pod of this node has one
// of the addresses.
func (o *Pods) Run(ctx context.Context, free func([]netip.AddrPort) bool) error {
	ticker := time.NewTicker(cleanAgain)
	defer ticker.Stop()
	for expired := time.Now(); ; {
		select {
		case <-ctx.Done():
			o.mu.Lock()
			defer o.mu.Unlock()
			for uid, of := range o.pods {
				of.watch.Close()
				delete(o.pods, uid)
			}
			return nil
		case now := <-ticker.C:
			if now.Sub(expired) >= time.Minute {
				expired = now
				o.expire(now)
			}
			o.forget(time.Now(), free)
		}
	}
}

// forget deletes the conntrack entries of all pods that have waited long enough. It costs about as
// much as for one pod.
func (o *Pods) forget(now time.Time, free func([]netip.AddrPort) bool) {
	o.mu.Lock()
	all := o.cleaning
	o.cleaning = nil
	o.mu.Unlock()
	var targets []netip.AddrPort
	var again []cleanable
	for _, c := range all {
		switch {
		case len(c.targets) == 0 || now.Sub(c.at) > cleanLate || !free(c.targets): // may be another pod's by now
		case now.Sub(c.at) < cleanAgain || o.reused(c.targets):
			again = append(again, c)
		default:
			targets = append(targets, c.targets...)
		}
	}
	o.mu.Lock()
	o.cleaning = append(again, o.cleaning...)
	o.mu.Unlock()
	if len(targets) == 0 {
		return
	}
	if err := o.gateway.(gateway.Cleaner).Clean(targets); err != nil {
		o.log.Warn("delete conntrack entries of deleted pods", "targets", targets, "error", err)
	}
}

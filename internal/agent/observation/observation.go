// Package observation observes, for coordinators, the pods that they wait for.
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

	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// maxObserved bounds the pods that are observed at one time, over all coordinators.
	maxObserved = 10_000
	// cleanBacklog bounds the pods whose connections wait to be forgotten, cleanLate how long one
	// may have waited: later, its address may be another pod's.
	cleanBacklog = 1000
	cleanLate    = 2 * time.Second
	// cleanAgain is how soon it is looked again whether the kernel still sends to the address, and
	// how long a pod waits for others that are deleted with it.
	cleanAgain = 200 * time.Millisecond
	// afterwards is how long after its deadline a barrier is still reported.
	afterwards = 2 * time.Second
)

// Pods are those for which coordinators want to know what an observed gateway does: it implements
// [client.Watches]. Make it with New, then run it with Run.
type Pods struct {
	gateway     gateway.Observed
	propagation *prometheus.HistogramVec
	cleaned     *prometheus.CounterVec
	log         *slog.Logger

	// changed is called when there may be something to report. It must not block.
	changed func()

	mu   sync.Mutex
	pods map[drain.UID]*observation
	// cleaning are pods that are gone, whose connections are to be forgotten.
	cleaning []cleanable
}

// observation is of one pod.
type observation struct {
	pod     drain.Pod
	since   time.Time
	targets []netip.AddrPort
	// holders are the coordinators' lives that want it, each with its deadline.
	holders map[string]time.Time
	watch   gateway.Watch
	// removed and idle say that the time until then was written down.
	removed, idle bool
	// sent says that the kernel was seen to send to the pod.
	sent bool
}

type cleanable struct {
	pod     drain.Pod
	targets []netip.AddrPort
	at      time.Time
}

// New returns the pods, none yet, that g is observed for. changed is called when there may be
// something to report, and must not block. propagation is told how long each took.
func New(g gateway.Observed, changed func(), propagation *prometheus.HistogramVec, r prometheus.Registerer,
	log *slog.Logger) *Pods {
	o := &Pods{
		gateway: g, propagation: propagation, log: log, changed: changed,
		cleaned: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_agent_cleaned_total",
			Help: "Pods that are gone whose connections were to be forgotten, by result. Skipped: the address may " +
				"be another pod's.",
		}, []string{"result"}),
		pods: map[drain.UID]*observation{},
	}
	r.MustRegister(o.cleaned)
	for _, result := range []string{"ok", "error", "skipped"} {
		o.cleaned.WithLabelValues(result)
	}
	return o
}

// Watch implements client.Watches.
func (o *Pods) Watch(now time.Time, w drain.Watch, holder string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	of := o.pods[w.Pod.UID]
	if of == nil {
		if len(o.pods) >= maxObserved || w.Pod.UID == "" {
			o.log.Warn("pod is not observed", "pod", w.Pod.String(), "uid", w.Pod.UID, "observed", len(o.pods))
			return
		}
		of = &observation{pod: w.Pod, since: w.Since, targets: slices.Clone(w.Targets), holders: map[string]time.Time{}}
		of.watch = o.gateway.Watch(of.targets, o.changed)
		of.look()
		o.pods[w.Pod.UID] = of
	} else if !slices.Equal(of.targets, w.Targets) && len(w.Targets) > 0 {
		of.watch.Close()
		of.targets = slices.Clone(w.Targets)
		of.watch = o.gateway.Watch(of.targets, o.changed)
	}
	if w.Since.Before(of.since) {
		of.since = w.Since
	}
	// By this node's clock, not the coordinator's: at the latest then nobody waits.
	deadline := now.Add(w.Deadline.Sub(w.Since))
	if had, known := of.holders[holder]; known && had.Before(deadline) {
		deadline = had
	}
	of.holders[holder] = deadline
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
		o.measure(of, is, now)
		r := drain.Report{UID: uid, Generation: is.Generation, State: is.State,
			NoConnections: is.NoConnections, HasSent: of.sent,
			InFlight: is.State == health.Removed && !is.Counted.Before(is.Since)}
		if is.State >= health.Removed {
			r.Proof = drain.Runtime
		}
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b drain.Report) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return reports
}

// look reads the kernel. What it sends to at the time of the first look, when the pod is being
// deleted, it knows of: reports may come later.
func (of *observation) look() gateway.Reading {
	is := of.watch.Reading()
	of.sent = of.sent || is.State == health.Routing || is.State == health.Kept
	return is
}

// wanted says whether somebody may still wait.
func (of *observation) wanted(now time.Time) bool {
	for _, deadline := range of.holders {
		if now.Before(deadline.Add(afterwards)) {
			return true
		}
	}
	return false
}

// measure writes down how long it took from the deletion, once.
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

// expire forgets the pods for which nobody has waited for long, and whose end nobody has told.
func (o *Pods) expire(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid, of := range o.pods {
		old := true
		for _, deadline := range of.holders {
			old = old && now.Sub(deadline) > 2*nodepods.MaxBound
		}
		if old {
			of.watch.Close()
			delete(o.pods, uid)
		}
	}
}

// Clean has the connections to a pod forgotten that is gone.
func (o *Pods) Clean(pod drain.Pod, targets []netip.AddrPort) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.enqueue(cleanable{pod, targets, time.Now()})
}

// enqueue is called with the lock.
func (o *Pods) enqueue(c cleanable) {
	if len(o.cleaning) >= cleanBacklog {
		o.cleaned.WithLabelValues("skipped").Inc()
		return
	}
	o.cleaning = append(o.cleaning, c)
}

// reused says that the kernel sends to one of the addresses of a pod that is gone: on another node
// another pod has it, or the kernel has not let go of this one yet, as of the last of a Service.
func (o *Pods) reused(targets []netip.AddrPort) bool {
	w := o.gateway.Watch(targets, func() {})
	defer w.Close()
	is := w.Reading().State
	return is == health.Routing || is == health.Kept
}

// Run cleans, until ctx is done. free reports whether no pod of this node has one of some
// addresses.
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

// forget has the connections to all pods forgotten that have waited for that. It costs about as
// much as for one.
func (o *Pods) forget(now time.Time, free func([]netip.AddrPort) bool) {
	o.mu.Lock()
	all := o.cleaning
	o.cleaning = nil
	o.mu.Unlock()
	var targets []netip.AddrPort
	var again []cleanable
	pods := 0.0
	for _, c := range all {
		switch {
		case len(c.targets) == 0 || now.Sub(c.at) > cleanLate || !free(c.targets):
			o.cleaned.WithLabelValues("skipped").Inc()
		case now.Sub(c.at) < cleanAgain || o.reused(c.targets):
			again = append(again, c)
		default:
			targets = append(targets, c.targets...)
			pods++
		}
	}
	o.mu.Lock()
	o.cleaning = append(again, o.cleaning...)
	o.mu.Unlock()
	cleaner, ok := o.gateway.(gateway.Cleaner)
	if !ok || pods == 0 {
		return
	}
	result := "ok"
	if err := cleaner.Clean(targets); err != nil {
		result = "error"
		o.log.Warn("forget connections to pods that are gone", "targets", targets, "error", err)
	}
	o.cleaned.WithLabelValues(result).Add(pods)
}

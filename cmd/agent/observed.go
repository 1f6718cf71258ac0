package main

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// observedMost bounds the pods that are observed at one time, over all coordinators.
	observedMost = 10_000
	// cleanBacklog bounds the pods whose connections wait to be forgotten, cleanLate how long one may have waited: later, its address may be
	// another pod's.
	cleanBacklog = 1000
	cleanLate    = 2 * time.Second
	// cleanAgain is how soon it is looked again whether the kernel still sends to the address.
	cleanAgain = 200 * time.Millisecond
	// afterwards is how long after its deadline a barrier is still reported.
	afterwards = 2 * time.Second
)

// observed are the pods for which coordinators want to know what the node's kernel does: it implements [client.Watches].
type observed struct {
	kernel kernel
	// changed is called when there may be something to report. It must not block.
	changed func()
	// free says that no pod of this node has one of these addresses.
	free func([]netip.AddrPort) bool
	m    *nodeMetrics
	log  *slog.Logger

	cleaning chan cleanable

	mu   sync.Mutex
	pods map[drain.UID]*observation
}

// observation is of one pod.
type observation struct {
	pod     drain.Pod
	since   time.Time
	targets []netip.AddrPort
	// holders are the coordinators' lives that want it, each with its deadline.
	holders map[string]time.Time
	watch   kernelWatch
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

func newObserved(k kernel, free func([]netip.AddrPort) bool, m *nodeMetrics, log *slog.Logger) *observed {
	return &observed{kernel: k, free: free, m: m, log: log, changed: func() {}, cleaning: make(chan cleanable, cleanBacklog), pods: map[drain.UID]*observation{}}
}

// Watch implements client.Watches.
func (o *observed) Watch(w drain.Watch, holder string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	of := o.pods[w.Pod.UID]
	if of == nil {
		if len(o.pods) >= observedMost || w.Pod.UID == "" {
			o.log.Warn("pod is not observed", "pod", w.Pod.String(), "uid", w.Pod.UID, "observed", len(o.pods))
			return
		}
		of = &observation{pod: w.Pod, since: w.Since, targets: slices.Clone(w.Targets), holders: map[string]time.Time{}}
		of.watch = o.kernel.Watch(of.targets, o.changed)
		of.look()
		o.pods[w.Pod.UID] = of
	} else if !slices.Equal(of.targets, w.Targets) && len(w.Targets) > 0 {
		of.watch.Close()
		of.targets = slices.Clone(w.Targets)
		of.watch = o.kernel.Watch(of.targets, o.changed)
	}
	if w.Since.Before(of.since) {
		of.since = w.Since
	}
	// By this node's clock, not the coordinator's: at the latest then nobody waits.
	deadline := time.Now().Add(w.Deadline.Sub(w.Since))
	if had, known := of.holders[holder]; known && had.Before(deadline) {
		deadline = had
	}
	of.holders[holder] = deadline
}

// Unwatch implements client.Watches.
func (o *observed) Unwatch(uid drain.UID, holder string, gone bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	of := o.pods[uid]
	if of == nil {
		return
	}
	delete(of.holders, holder)
	if gone {
		clear(of.holders)
		o.clean(of.pod, of.targets)
	}
	if len(of.holders) == 0 {
		of.watch.Close()
		delete(o.pods, uid)
	}
}

// Watched implements client.Watches.
func (o *observed) Watched(holder string) []drain.UID {
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
func (o *observed) Reports() []drain.Report {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	reports := make([]drain.Report, 0, len(o.pods))
	for uid, of := range o.pods {
		if !of.wanted(now) {
			continue
		}
		is := of.look()
		o.measure(of, is, now)
		r := drain.Report{UID: uid, Generation: is.Generation, State: is.State, Since: of.since.UTC().Round(0), Quiet: is.Quiet, Sent: of.sent}
		if is.State >= drain.Removed {
			r.Proof = drain.Runtime
		}
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b drain.Report) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return reports
}

// look reads the kernel. What it sends to at the time of the first look, when the pod is being deleted, it knows of: reports may come later.
func (of *observation) look() reading {
	is := of.watch.Reading()
	of.sent = of.sent || is.State == drain.Routing || is.State == drain.Kept
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
func (o *observed) measure(of *observation, is reading, now time.Time) {
	at := is.Since
	if at.IsZero() || at.After(now) {
		at = now
	}
	took := max(0, at.Sub(of.since)).Seconds()
	if is.State >= drain.Removed && !of.removed {
		of.removed = true
		o.m.propagation.WithLabelValues("removed").Observe(took)
	}
	if is.State == drain.Idle && !of.idle {
		of.idle = true
		o.m.propagation.WithLabelValues("idle").Observe(took)
	}
}

// expire forgets the pods for which nobody has waited for long, and whose end nobody has told.
func (o *observed) expire(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid, of := range o.pods {
		old := true
		for _, deadline := range of.holders {
			old = old && now.Sub(deadline) > 2*boundMost
		}
		if old {
			of.watch.Close()
			delete(o.pods, uid)
		}
	}
}

// clean has the connections to a pod forgotten that is gone.
func (o *observed) clean(pod drain.Pod, targets []netip.AddrPort) {
	o.enqueue(cleanable{pod, targets, time.Now()})
}

func (o *observed) enqueue(c cleanable) {
	select {
	case o.cleaning <- c:
	default:
		o.m.cleaned.WithLabelValues("skipped").Inc()
	}
}

// taken says that the kernel sends to one of the addresses of a pod that is gone: on another node another pod has it, or the kernel has not let go of this
// one yet, as of the last of a Service.
func (o *observed) taken(targets []netip.AddrPort) bool {
	w := o.kernel.Watch(targets, func() {})
	defer w.Close()
	is := w.Reading().State
	return is == drain.Routing || is == drain.Kept
}

// run cleans, until ctx is done.
func (o *observed) run(ctx context.Context) error {
	ticker := time.NewTicker(time.Minute)
	defer ticker.Stop()
	for {
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
			o.expire(now)
		case c := <-o.cleaning:
			switch {
			case len(c.targets) == 0 || time.Since(c.at) > cleanLate || !o.free(c.targets):
				o.m.cleaned.WithLabelValues("skipped").Inc()
			case o.taken(c.targets):
				time.AfterFunc(cleanAgain, func() { o.enqueue(c) })
			default:
				if err := o.kernel.Clean(c.targets); err != nil {
					o.m.cleaned.WithLabelValues("error").Inc()
					o.log.Warn("forget connections to a pod that is gone", "pod", c.pod.String(), "uid", c.pod.UID, "error", err)
					continue
				}
				o.m.cleaned.WithLabelValues("ok").Inc()
			}
		}
	}
}

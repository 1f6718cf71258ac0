package source

import (
	"cmp"
	"context"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

const (
	// behindEvery is the interval between two comparisons. A difference is logged when it is as old
	// as behindAfter.
	behindEvery = time.Second
	behindAfter = 5 * time.Second
)

// Behind compares the endpoints that a gateway has discovered by itself with EndpointSlices as the
// agent sees them, because the gateway's own watch may have ended without an error. Make it with
// NewBehind, then run it with Run.
type Behind struct {
	gateway gateway.Discoverer
	routes  []gateway.Route
	kube    kubernetes.Interface
	log     *slog.Logger

	heard   Heard
	watches sync.WaitGroup
	// watched has the watches, by namespace. since has the time at which each Service began to
	// differ. logged has the Services whose difference was logged. Only Run uses these three.
	watched map[string]*watch.Watch
	since   map[string]time.Time
	logged  map[string]bool
	// longest is the age of the oldest difference, as float64 bits.
	longest atomic.Uint64
}

// NewBehind returns a comparison of the Services of routes, and registers its metric.
func NewBehind(kube kubernetes.Interface, routes []gateway.Route, g gateway.Discoverer, r prometheus.Registerer,
	log *slog.Logger) *Behind {
	b := &Behind{gateway: g, routes: routes, kube: kube, log: log, watched: map[string]*watch.Watch{},
		since: map[string]time.Time{}, logged: map[string]bool{}}
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_agent_discovery_behind_seconds",
		Help: "For how long the endpoints that the gateway has found by itself have differed from EndpointSlices.",
	}, func() float64 { return math.Float64frombits(b.longest.Load()) }))
	return b
}

// Run compares until ctx is done. It watches the namespace of a Service once the gateway looks for
// the Service.
func (b *Behind) Run(ctx context.Context) error {
	defer b.watches.Wait()
	for signal.Sleep(ctx, behindEvery) {
		longest := time.Duration(0)
		for _, r := range b.routes {
			has, ok := b.gateway.Discovered(r.Service)
			if ok && b.watch(ctx, r.Service) {
				longest = max(longest, b.compare(time.Now(), r.Service, has))
			}
		}
		b.longest.Store(math.Float64bits(longest.Seconds()))
	}
	return nil
}

// watch reports whether the EndpointSlices of a Service are known.
func (b *Behind) watch(ctx context.Context, service string) bool {
	namespace, _, _ := gateway.ParseService(service) // checked with the configuration
	if w := b.watched[namespace]; w != nil {
		return w.HasSynced()
	}
	w, err := watch.New(b.kube, watch.Options[*discovery.EndpointSlice]{
		Informer: watch.EndpointSlices, Namespace: namespace,
		Changed: func(was, is *discovery.EndpointSlice) { b.heard.Record(cmp.Or(is, was), is == nil) },
		Trouble: func(err error) {
			b.log.Warn("EndpointSlices are not compared with what the gateway has found", "namespace", namespace,
				"error", err)
		},
	})
	if err != nil {
		return false
	}
	b.watches.Go(func() { _ = w.Run(ctx) }) // it has no error
	b.watched[namespace] = w
	return false
}

// compare returns for how long the endpoints that the gateway has found for a Service have differed
// from EndpointSlices. 0: they are equal.
func (b *Behind) compare(now time.Time, service string, has []netip.Addr) time.Duration {
	want := b.heard.ready(service)
	slices.SortFunc(has, netip.Addr.Compare)
	since, differs := b.since[service]
	if slices.Equal(has, want) {
		if b.logged[service] {
			b.log.Info("the gateway follows EndpointSlices again", "service", service)
		}
		delete(b.since, service)
		delete(b.logged, service)
		return 0
	}
	if !differs {
		b.since[service], since = now, now
	}
	age := now.Sub(since)
	if age >= behindAfter && !b.logged[service] {
		b.logged[service] = true
		b.log.Warn("the gateway is behind EndpointSlices: its watch may have ended", "service", service, "has", has,
			"want", want)
	}
	return age
}

// ready returns the addresses of a Service's endpoints that are ready, sorted.
func (h *Heard) ready(service string) (all []netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.slices {
		if of, _ := endpoints.ServiceOf(s); of.String() != service {
			continue
		}
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				if a, err := netip.ParseAddr(text); err == nil && ptr.Deref(e.Conditions.Ready, false) {
					all = append(all, a.Unmap())
				}
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// Package source watches EndpointSlices and the Services' annotations, and applies them to the set
// of targets in package health.
package source

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// backlog bounds the queued changes of EndpointSlices. When the queue is full, the watch waits.
const backlog = 10_000

// Endpoints applies EndpointSlices to the set. Make it with New, then run it with Run.
type Endpoints struct {
	kube  kubernetes.Interface
	set   *health.Set
	index *endpoints.Index
	// pools are the pools that each port of a Service feeds.
	pools    map[endpoints.Port][]health.Pool
	changes  chan change
	ended    chan struct{}
	isSynced atomic.Bool
	// heard is what the watch has delivered, for Fresh and for the names of pods.
	heard Heard
	// told is called after targets of some families have changed in the set, or after pools of it
	// have synced.
	told func([]serving.Family)
	// ambiguous are ends of first lists that the set was not told of, because a route does not say
	// which port it means.
	ambiguous []change
	log       *slog.Logger
	// watches are the watches, by namespace.
	watches map[string]*watch.Watch
}

// change is one event of the watch.
type change struct {
	slice *discovery.EndpointSlice
	gone  bool
	// synced, if not nil, are the pools whose first list ends here: those of a namespace. If it is
	// empty, all first lists have ended. Such a change has no other content.
	synced []health.Pool
	// reached, if not nil, is closed when the change is processed. Such a change has no other
	// content.
	reached chan struct{}
}

// Ports returns which port of a Service feeds each pool.
func Ports(routes []gateway.Route) map[health.Pool]endpoints.Port {
	ports := map[health.Pool]endpoints.Port{}
	for _, r := range routes {
		namespace, name, _ := gateway.ParseService(r.Service) // checked with the configuration
		ports[r.Pool] = endpoints.Port{Service: types.NamespacedName{Namespace: namespace, Name: name}, Name: r.Port}
	}
	return ports
}

// New returns the source of set's targets: those of ports. told is called after the set was told of
// changes of targets of some families, or, without any, that it knows the first list of a
// namespace. It must not block.
func New(kube kubernetes.Interface, ports map[health.Pool]endpoints.Port, set *health.Set,
	told func([]serving.Family), log *slog.Logger) (*Endpoints, error) {
	r := &Endpoints{
		kube: kube, set: set, index: endpoints.NewIndex(), pools: map[endpoints.Port][]health.Pool{},
		changes: make(chan change, backlog), ended: make(chan struct{}),
		told: told, log: log, watches: map[string]*watch.Watch{},
	}
	for pool, port := range ports {
		r.pools[port] = append(r.pools[port], pool)
		r.index.Follow(port)
	}
	for port := range r.pools {
		namespace := port.Service.Namespace
		if r.watches[namespace] != nil {
			continue
		}
		w, err := watch.New(kube, watch.Options[*discovery.EndpointSlice]{
			Informer: watch.EndpointSlices, Namespace: namespace,
			Changed: func(was, is *discovery.EndpointSlice) {
				r.push(change{slice: cmp.Or(is, was), gone: is == nil})
			},
			Trouble: func(err error) {
				log.Warn("EndpointSlices cannot be watched: the pools that they feed stay as they are",
					"namespace", namespace, "error", err)
			},
		})
		if err != nil {
			return nil, err
		}
		r.watches[namespace] = w
	}
	return r, nil
}

// Synced reports whether the first lists of all namespaces have been handed to the set.
func (r *Endpoints) Synced() bool { return r.isSynced.Load() }

// Missing says what is not synced, and what to do.
func (r *Endpoints) Missing() string {
	var namespaces, services []string
	for port, pools := range r.pools {
		switch namespace := port.Service.Namespace; {
		case !r.watches[namespace].HasSynced():
			namespaces = append(namespaces, namespace)
		case r.index.Ambiguous(port):
			services = append(services, fmt.Sprintf("%s (%s)", port.Service, pools[0]))
		}
	}
	if slices.Sort(services); len(services) > 0 {
		return "Services with several ports, and routes that name none: " + strings.Join(services, ", ") +
			": set port, and start the agent again"
	}
	slices.Sort(namespaces)
	return "EndpointSlices are not known yet, of namespaces: " + strings.Join(slices.Compact(namespaces), ", ") +
		" (where that lasts, the agent may not list them: its RoleBinding is missing)"
}

// Run watches the EndpointSlices of every namespace that a route is in, until ctx is done.
func (r *Endpoints) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(r.ended)
	for _, w := range r.watches {
		wg.Go(func() { _ = w.Run(ctx) }) // it has no error
	}
	wg.Go(func() {
		var listed sync.WaitGroup
		for namespace, w := range r.watches {
			listed.Go(func() {
				if w.Synced(ctx) {
					r.send(ctx, change{synced: r.poolsOf(namespace)})
				}
			})
		}
		listed.Wait()
		if ctx.Err() == nil {
			r.send(ctx, change{synced: []health.Pool{}})
		}
	})
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-r.changes:
			if c.reached != nil {
				close(c.reached)
				continue
			}
			r.apply(c)
		}
	}
}

// poolsOf returns the pools that the Services of a namespace feed.
func (r *Endpoints) poolsOf(namespace string) (pools []health.Pool) {
	for port, of := range r.pools {
		if port.Service.Namespace == namespace {
			pools = append(pools, of...)
		}
	}
	return pools
}

func (r *Endpoints) push(c change) {
	select {
	case r.changes <- c:
	case <-r.ended:
	}
	r.heard.Record(c.slice, c.gone) // not before it is on its way: see Fresh
}

func (r *Endpoints) send(ctx context.Context, c change) {
	select {
	case r.changes <- c:
	case <-ctx.Done():
	}
}

// apply takes in one change.
func (r *Endpoints) apply(c change) {
	now := time.Now()
	if c.synced != nil {
		if !r.sync(c) {
			r.ambiguous = append(r.ambiguous, c)
		}
		return
	}
	take := r.index.Apply
	if c.gone {
		take = r.index.Delete
	}
	service, _ := endpoints.ServiceOf(c.slice)
	port := endpoints.Port{Service: service}
	was := r.index.Ambiguous(port)
	r.tell(now, take(now, c.slice))
	r.ambiguous = slices.DeleteFunc(r.ambiguous, r.sync)
	if !was && r.index.Ambiguous(port) {
		r.log.Error("a Service has several ports, and its routes name none: set port, and start the agent again",
			"service", service, "pools", r.pools[port])
	}
}

// sync tells the set of the end of first lists, unless a route does not say which port it means.
func (r *Endpoints) sync(c change) bool {
	for port, pools := range r.pools {
		if (len(c.synced) == 0 || slices.Contains(c.synced, pools[0])) && r.index.Ambiguous(port) {
			return false
		}
	}
	r.set.Synced(c.synced...)
	r.isSynced.Store(len(c.synced) == 0)
	r.told(nil)
	return true
}

// tell hands differences to the set.
func (r *Endpoints) tell(now time.Time, changed []endpoints.PortChange) {
	if len(changed) == 0 {
		return
	}
	families := map[serving.Family]bool{}
	for _, p := range changed {
		for _, pool := range r.pools[p.Port] {
			r.set.Change(now, pool, p.Changes)
		}
		for _, c := range p.Changes {
			families[serving.Of(c.Addr.Addr())] = true
		}
	}
	// After the set, so that no reading which began before counts, and before the look that may
	// find it done.
	r.told(slices.Collect(maps.Keys(families)))
}

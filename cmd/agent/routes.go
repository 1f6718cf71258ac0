package main

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/pkg/endpoints"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/pkg/health/serving"
)

// backlog bounds the changes of EndpointSlices that wait; the watch waits when it is full.
const backlog = 10_000

// tickEvery is how often the index is asked for what it has set aside.
const tickEvery = 250 * time.Millisecond

// routes carries EndpointSlices to the set, and the coordinators' addresses to the client.
type routes struct {
	// lag delays what changes after the first list.
	lag      time.Duration
	set      *health.Set
	director *gateway.Director
	index    *endpoints.Index
	// pools are those that one port of a Service feeds.
	pools map[endpoints.Port][]health.Pool
	// ports is the inverse of pools.
	ports    map[health.Pool]endpoints.Port
	changes  chan change
	isSynced atomic.Bool
	// heard is what the watch has delivered, for fresh and for the names of pods.
	heard heard

	// queued is told of each change that the set has taken in. May be nil.
	queued func(serving.Family)
	// told is called when the set was told of targets. May be nil.
	told func()
	// replicas is nil without coordinators in a Service.
	replicas     func(addresses []string)
	coordinators endpoints.Port
	// coordinatorIndex is not delayed. Informers of one namespace call one at a time, and the coordinators are in one.
	coordinatorIndex *endpoints.Index
	// telling keeps the client from being told an older word after a newer one.
	telling sync.Mutex
	// reached tells how far the watch of a namespace is. It is set by run.
	reached func(namespace string) string
}

// change is one event of the watch.
type change struct {
	at    time.Time
	slice *discovery.EndpointSlice
	gone  bool
	// missed: a list lacks it after an interruption, see [endpoints.Index.Missed].
	missed bool
	// synced marks the end of the first list.
	synced bool
	// reached is closed when the change's turn comes, if it is not nil; there is nothing else to the change then.
	reached chan struct{}
}

func newRoutes(f file, set *health.Set, director *gateway.Director) *routes {
	r := &routes{
		lag: f.EndpointsLag.Duration, set: set, director: director, index: endpoints.NewIndex(),
		pools: map[endpoints.Port][]health.Pool{}, ports: map[health.Pool]endpoints.Port{}, changes: make(chan change, backlog),
		coordinatorIndex: endpoints.NewIndex(),
	}
	for _, b := range f.HAProxy.Backends {
		service, _ := namespacedName(b.Service) // checked by file.check
		p := endpoints.Port{Service: service, Name: b.Port}
		r.pools[p] = append(r.pools[p], health.Pool(b.Backend))
		r.ports[health.Pool(b.Backend)] = p
		r.index.Follow(p)
	}
	if c := f.Coordinators; c != nil && c.Service != "" {
		service, _ := namespacedName(c.Service)
		r.coordinators = endpoints.Port{Service: service, Name: c.Port}
		r.coordinatorIndex.Follow(r.coordinators)
	}
	return r
}

// synced reports whether the first complete list has been handed to the set.
func (r *routes) synced() bool { return r.isSynced.Load() }

// run watches the EndpointSlices of every namespace that a route or the coordinators are in.
func (r *routes) run(ctx context.Context, kube kubernetes.Interface) error {
	namespaces := r.namespaces()
	if n := r.coordinators.Service.Namespace; n != "" && !slices.Contains(namespaces, n) {
		namespaces = append(namespaces, n)
	}
	ctx, cancel := context.WithCancel(ctx)
	var factories []informers.SharedInformerFactory
	defer func() {
		cancel() // Shutdown waits for informers that run until then.
		for _, factory := range factories {
			factory.Shutdown()
		}
	}()
	var has []toolscache.InformerSynced
	watches := map[string]func() string{}
	r.reached = func(namespace string) string {
		if last := watches[namespace]; last != nil {
			return last()
		}
		return ""
	}
	for _, namespace := range namespaces {
		factory := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithNamespace(namespace))
		informer := factory.Discovery().V1().EndpointSlices().Informer()
		registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { r.push(ctx, o, change{}) },
			UpdateFunc: func(_, o any) { r.push(ctx, o, change{}) },
			DeleteFunc: func(o any) {
				missed, ok := o.(toolscache.DeletedFinalStateUnknown)
				if ok {
					o = missed.Obj
				}
				r.push(ctx, o, change{gone: !ok, missed: ok})
			},
		})
		if err != nil {
			return fmt.Errorf("watch EndpointSlices of namespace %s: %w", namespace, err)
		}
		has = append(has, registration.HasSynced)
		watches[namespace] = informer.LastSyncResourceVersion
		factory.Start(ctx.Done())
		factories = append(factories, factory)
	}
	var wg sync.WaitGroup
	defer wg.Wait() // for a moment: the loop below ends with ctx
	wg.Go(func() {
		if toolscache.WaitForCacheSync(ctx.Done(), has...) {
			r.send(ctx, change{at: time.Now(), synced: true})
		}
	})
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			r.tick(time.Now())
		case c := <-r.changes:
			if r.lag > 0 && r.synced() {
				waitFor(ctx, nil, time.Until(c.at.Add(r.lag)))
			}
			if c.reached != nil {
				close(c.reached)
				continue
			}
			r.apply(c)
		}
	}
}

func (r *routes) push(ctx context.Context, o any, c change) {
	s, ok := o.(*discovery.EndpointSlice)
	if !ok {
		return
	}
	c.at, c.slice = time.Now(), s
	if r.replicas != nil && s.Namespace == r.coordinators.Service.Namespace {
		r.coordinatorsChanged(s, c.gone || c.missed)
	}
	r.send(ctx, c)
	r.heard.hear(s, c.gone || c.missed) // not before it is on its way: see fresh
}

func (r *routes) send(ctx context.Context, c change) {
	select {
	case r.changes <- c:
	case <-ctx.Done():
	}
}

// coordinatorsChanged tells the client which replicas there are: all that are listed, ready or not, because one that is starting or
// stopping has drains too.
func (r *routes) coordinatorsChanged(s *discovery.EndpointSlice, gone bool) {
	take := r.coordinatorIndex.Apply
	if gone {
		take = r.coordinatorIndex.Delete
	}
	if len(take(time.Now(), s)) > 0 {
		r.tellReplicas()
	}
}

func (r *routes) tellReplicas() {
	r.telling.Lock()
	defer r.telling.Unlock()
	addresses := []string{}
	for _, e := range r.coordinatorIndex.Endpoints(r.coordinators.Service, r.coordinators.Name) {
		addresses = append(addresses, "https://"+net.JoinHostPort(e.Addr.Addr().String(), strconv.Itoa(int(e.Addr.Port()))))
	}
	r.replicas(addresses)
}

// apply takes in one change.
func (r *routes) apply(c change) {
	now := time.Now()
	if c.synced {
		r.set.Synced()
		r.isSynced.Store(true)
		r.director.Wake()
		return
	}
	take := r.index.Apply
	switch {
	case c.gone:
		take = r.index.Delete
	case c.missed:
		take = r.index.Missed
	}
	r.tell(now, take(now, c.slice))
}

// tick takes in what was set aside because it was older than what is known.
func (r *routes) tick(now time.Time) {
	r.tell(now, r.index.Tick(now, r.reached))
	if len(r.coordinatorIndex.Tick(now, r.reached)) > 0 {
		r.tellReplicas()
	}
}

// tell hands differences to the set.
func (r *routes) tell(now time.Time, changed []endpoints.PortChange) {
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
	if r.queued != nil {
		// After the set, so that no reading which began before counts, and before the look that may find it done.
		for family := range families {
			r.queued(family)
		}
	}
	r.director.Wake()
	if r.told != nil {
		r.told()
	}
}

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
	"k8s.io/apimachinery/pkg/types"
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

// port is one port of a Service.
type port struct {
	service types.NamespacedName
	name    string
}

// routes carries EndpointSlices to the set, and the coordinators' addresses to the client.
type routes struct {
	// lag delays what changes after the first list.
	lag      time.Duration
	set      *health.Set
	director *gateway.Director
	index    *endpoints.Index
	pools    map[health.Pool]port
	changes  chan change
	isSynced atomic.Bool
	// heard is what the watch has delivered, for fresh and for the names of pods.
	heard heard

	// queued is told of each change that the set has taken in. May be nil.
	queued func(serving.Family)
	// replicas is nil without coordinators in a Service.
	replicas     func(addresses []string)
	coordinators port
	// coordinatorIndex is not delayed. Informers of one namespace call one at a time, and the coordinators are in one.
	coordinatorIndex *endpoints.Index
}

// change is one event of the watch.
type change struct {
	at    time.Time
	slice *discovery.EndpointSlice
	gone  bool
	// synced marks the end of the first list.
	synced bool
	// reached is closed when the change's turn comes, if it is not nil; there is nothing else to the change then.
	reached chan struct{}
}

func newRoutes(f file, set *health.Set, director *gateway.Director) *routes {
	r := &routes{
		lag: f.EndpointsLag.Duration, set: set, director: director, index: endpoints.NewIndex(),
		pools: map[health.Pool]port{}, changes: make(chan change, backlog),
		coordinatorIndex: endpoints.NewIndex(),
	}
	for _, b := range f.HAProxy.Backends {
		service, _ := namespacedName(b.Service) // checked by file.check
		r.pools[health.Pool(b.Backend)] = port{service, b.Port}
	}
	if c := f.Coordinators; c != nil && c.Service != "" {
		service, _ := namespacedName(c.Service)
		r.coordinators = port{service, c.Port}
	}
	return r
}

// synced reports whether the first complete list has been handed to the set.
func (r *routes) synced() bool { return r.isSynced.Load() }

// run watches the EndpointSlices of every namespace that a route or the coordinators are in.
func (r *routes) run(ctx context.Context, kube kubernetes.Interface) error {
	namespaces := r.namespaces()
	if n := r.coordinators.service.Namespace; n != "" && !slices.Contains(namespaces, n) {
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
	for _, namespace := range namespaces {
		factory := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithNamespace(namespace))
		informer := factory.Discovery().V1().EndpointSlices().Informer()
		registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { r.push(ctx, o, false) },
			UpdateFunc: func(_, o any) { r.push(ctx, o, false) },
			DeleteFunc: func(o any) {
				if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
					o = missed.Obj
				}
				r.push(ctx, o, true)
			},
		})
		if err != nil {
			return fmt.Errorf("watch EndpointSlices of namespace %s: %w", namespace, err)
		}
		has = append(has, registration.HasSynced)
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
	for {
		select {
		case <-ctx.Done():
			return nil
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

func (r *routes) push(ctx context.Context, o any, gone bool) {
	s, ok := o.(*discovery.EndpointSlice)
	if !ok {
		return
	}
	if r.replicas != nil && s.Namespace == r.coordinators.service.Namespace {
		r.coordinatorsChanged(s, gone)
	}
	r.send(ctx, change{at: time.Now(), slice: s, gone: gone})
	r.heard.hear(s, gone) // not before it is on its way: see fresh
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
	if service, _ := endpoints.ServiceOf(s); gone || service != r.coordinators.service {
		take = r.coordinatorIndex.Delete // perhaps it was theirs before
	}
	if len(take(time.Now(), s)) == 0 {
		return
	}
	addresses := []string{}
	for _, e := range r.coordinatorIndex.Endpoints(r.coordinators.service, r.coordinators.name) {
		addresses = append(addresses, "https://"+net.JoinHostPort(e.Addr.Addr().String(), strconv.Itoa(int(e.Addr.Port()))))
	}
	r.replicas(addresses)
}

// apply takes in one change. Only pools of the slice's Service (of both, if it moved) are looked at, and in them the set applies
// the difference.
func (r *routes) apply(c change) {
	now := time.Now()
	if c.synced {
		r.set.Synced()
		r.isSynced.Store(true)
		r.director.Wake()
		return
	}
	take := r.index.Apply
	if c.gone {
		take = r.index.Delete
	}
	changed := take(now, c.slice)
	news := false
	for pool, of := range r.pools {
		if slices.Contains(changed, of.service) {
			r.set.Replace(now, pool, pods(r.index.Endpoints(of.service, of.name)))
			news = true
		}
	}
	if !news {
		return
	}
	if r.queued != nil {
		// After the set, so that no reading which began before counts, and before the look that may find it done.
		r.queued(familyOf(c.slice))
	}
	r.director.Wake()
}

func familyOf(s *discovery.EndpointSlice) serving.Family {
	switch s.AddressType {
	case discovery.AddressTypeIPv4:
		return serving.IPv4
	case discovery.AddressTypeIPv6:
		return serving.IPv6
	default:
		return serving.Unknown // names are no targets
	}
}

// pods leaves out endpoints that are no pods. There is nothing to tell them apart by when their address is used again, and a gateway
// may have no name for them.
func pods(all []health.Endpoint) []health.Endpoint {
	return slices.DeleteFunc(all, func(e health.Endpoint) bool { return e.UID == "" })
}

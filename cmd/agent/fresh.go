package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"
)

const (
	// lapseEvery is how often leases are looked at.
	lapseEvery = time.Second
	// lapseSpread is over how long agents whose leases end together spread their question to the API server.
	lapseSpread = 5 * time.Second
	// freshMost bounds one such question and the wait for the watch to have come as far.
	freshMost = 10 * time.Second
	// freshEvery is how often the watch is looked at meanwhile.
	freshEvery = 50 * time.Millisecond
	// freshRetryFirst and freshRetryMost bound the pause after one that failed.
	freshRetryFirst = time.Second
	freshRetryMost  = 30 * time.Second
)

// heard is what a watch has delivered last of each EndpointSlice.
type heard struct {
	mu     sync.Mutex
	slices map[types.NamespacedName]*discovery.EndpointSlice
}

func (h *heard) hear(s *discovery.EndpointSlice, gone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	if gone {
		delete(h.slices, name)
		return
	}
	if h.slices == nil {
		h.slices = map[types.NamespacedName]*discovery.EndpointSlice{}
	}
	h.slices[name] = s
}

// missing names a slice of namespace by which the watch is behind list, or says "": everything in list has been heard, or something newer of
// it, and what is not in list has not, unless it is newer than list.
func (h *heard) missing(namespace string, list *discovery.EndpointSliceList) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	listed := make(map[string]bool, len(list.Items))
	for i := range list.Items {
		item := &list.Items[i]
		listed[item.Name] = true
		have := h.slices[types.NamespacedName{Namespace: namespace, Name: item.Name}]
		if have == nil {
			return item.Name, nil
		}
		order, err := resourceversion.CompareResourceVersion(have.ResourceVersion, item.ResourceVersion)
		if err != nil {
			return "", fmt.Errorf("EndpointSlice %s/%s: %w", namespace, item.Name, err)
		}
		if order < 0 {
			return item.Name, nil
		}
	}
	for name, have := range h.slices {
		if name.Namespace != namespace || listed[name.Name] {
			continue
		}
		order, err := resourceversion.CompareResourceVersion(have.ResourceVersion, list.ResourceVersion)
		if err != nil {
			return "", fmt.Errorf("EndpointSlice %s: %w", name, err)
		}
		if order < 0 {
			return name.Name, nil
		}
	}
	return "", nil
}

// namespaces lists those that the gateway routes to.
func (r *routes) namespaces() []string {
	all := []string{}
	for p := range r.pools {
		if !slices.Contains(all, p.Service.Namespace) {
			all = append(all, p.Service.Namespace)
		}
	}
	slices.Sort(all)
	return all
}

// fresh returns nil once the set knows everything that the API server could tell at some moment after the call. A watch does not say how old it
// is: one whose connection is dead is as silent as one in which nothing happens, a bookmark comes once a minute, and a reflector that opens its
// watch again tells nobody. So the API server is asked for a list as of now, not one from a cache of an unknown age, and the watch must have delivered
// each slice of it, or a newer version. A slice that is deleted meanwhile makes it fail by its deadline; the next call
// will not see it.
func (r *routes) fresh(ctx context.Context, kube kubernetes.Interface) error {
	ctx, cancel := context.WithTimeout(ctx, freshMost)
	defer cancel()
	for _, namespace := range r.namespaces() {
		list, err := kube.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("list EndpointSlices of namespace %s: %w", namespace, err)
		}
		for {
			name, err := r.heard.missing(namespace, list)
			if err != nil {
				return err
			}
			if name == "" {
				break
			}
			if !waitFor(ctx, nil, freshEvery) && ctx.Err() != nil {
				return fmt.Errorf("the watch has not delivered EndpointSlice %s/%s as it is: %w", namespace, name, ctx.Err())
			}
		}
	}
	// What was heard is in the queue, or through it.
	reached := make(chan struct{})
	r.send(ctx, change{at: time.Now(), reached: reached})
	select {
	case <-reached:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("EndpointSlices are not worked off: %w", ctx.Err())
	}
}

// lapses ends the leases of coordinators that are not heard any more.
type lapses struct {
	stones *tombstones
	// fresh is asked before a pod is routed again: nil says that what the set knows of EndpointSlices is not older than the call.
	fresh func(context.Context) error
	wake  func()
	log   *slog.Logger
}

// run looks until ctx is done. Time alone lets no pod back in: a lease that is over stands until EndpointSlices are known to be fresh, because
// when all coordinators are away the API server may be, too, and the pod may be dead by now. An outage of both keeps the pod out as long as it lasts; the
// last target of a pool is kept in any case.
func (l lapses) run(ctx context.Context) error {
	ticker := time.NewTicker(lapseEvery)
	defer ticker.Stop()
	var next time.Time // when the API server is asked; zero: nothing has expired
	pause, failing := freshRetryFirst, ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		now := time.Now()
		expired := l.stones.expired(now)
		switch {
		case len(expired) == 0:
			next, pause, failing = time.Time{}, freshRetryFirst, ""
		case next.IsZero():
			l.log.Warn("no coordinator has renewed these tombstones: they end when EndpointSlices are known to be fresh", "uids", expired)
			next = now.Add(rand.N(lapseSpread))
			continue
		case now.Before(next):
			continue
		default:
			if err := l.fresh(ctx); err != nil {
				next = time.Now().Add(pause/2 + rand.N(pause))
				pause = min(2*pause, freshRetryMost)
				if text := err.Error(); text != failing && ctx.Err() == nil {
					l.log.Warn("EndpointSlices may be old: tombstones stand although their leases are over", "uids", expired, "error", err)
					failing = text
				}
				continue
			}
		}
		// As of then: what has expired since was not asked about.
		if uids := l.stones.lapse(now); len(uids) > 0 {
			l.log.Warn("tombstones lapsed: no coordinator has renewed them", "uids", uids)
			l.wake()
		}
	}
}

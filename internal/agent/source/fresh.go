package source

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// FreshTimeout bounds all lists of one call and the wait until the watch has delivered what is
	// in it.
	FreshTimeout = 10 * time.Second
	// FreshEvery is how often the watch is checked during that wait.
	FreshEvery = 50 * time.Millisecond
	// freshAtOnce is how many namespaces are listed simultaneously.
	freshAtOnce = 10
)

// Heard is the last version of each EndpointSlice that a watch has delivered. The zero value is
// empty. Safe for concurrent use.
type Heard struct {
	mu     sync.Mutex
	slices map[types.NamespacedName]*discovery.EndpointSlice
}

// Record records a slice or, if gone is set, its deletion.
func (h *Heard) Record(s *discovery.EndpointSlice, gone bool) {
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

// any reports whether the watch has a slice of namespace.
func (h *Heard) any(namespace string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.slices {
		if name.Namespace == namespace {
			return true
		}
	}
	return false
}

// Missing names a slice of namespace for which the watch is behind list. It returns "" if the watch
// has delivered everything in list, in that version or a newer one, and has no slice that is not in
// list unless that is newer than list.
func (h *Heard) Missing(namespace string, list *discovery.EndpointSliceList) (string, error) {
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

// Fresh returns nil once the set knows all EndpointSlices as of some moment after the call. A watch
// does not show how old its data is: a dead connection is as silent as one without changes, a
// bookmark comes once a minute, and a reflector does not report that it opens its watch again. So
// Fresh gets an up-to-date list from the API server, not one from a cache of unknown age, and waits
// until the watch has delivered each slice of it, or a newer version. If a slice is deleted during
// that, Fresh fails by its deadline, and the next call succeeds.
//
// A namespace that the agent may not list does not count if nothing is known of it that could be
// old: it was never listed, or was deleted. With unheard, pods that the agent has not heard of
// matter as well, and only the first is so: the namespace may exist again.
func (r *Endpoints) Fresh(ctx context.Context, unheard bool) error {
	ctx, cancel := context.WithTimeout(ctx, FreshTimeout)
	defer cancel()
	all, each := errgroup.WithContext(ctx)
	all.SetLimit(freshAtOnce)
	for namespace, w := range r.watches {
		all.Go(func() error {
			list, err := r.kube.DiscoveryV1().EndpointSlices(namespace).List(each, metav1.ListOptions{})
			if apierrors.IsForbidden(err) && (!w.HasSynced() || !unheard && !r.heard.any(namespace)) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("list EndpointSlices of namespace %s: %w", namespace, err)
			}
			for {
				name, err := r.heard.Missing(namespace, list)
				if name == "" || err != nil {
					return err
				}
				if !signal.Sleep(each, FreshEvery) {
					return fmt.Errorf("the watch has not delivered EndpointSlice %s/%s as it is: %w", namespace, name,
						each.Err())
				}
			}
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	// What the watch has delivered is in the queue, or processed.
	reached := make(chan struct{})
	r.send(ctx, change{reached: reached})
	select {
	case <-reached:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("queued changes of EndpointSlices were not processed in time: %w", ctx.Err())
	}
}

// Names returns namespace/name of the pods in EndpointSlices.
func (r *Endpoints) Names() map[health.UID]string {
	r.heard.mu.Lock()
	defer r.heard.mu.Unlock()
	names := map[health.UID]string{}
	for _, s := range r.heard.slices {
		for i := range s.Endpoints {
			if uid := endpoints.PodOf(s, &s.Endpoints[i]); uid != "" {
				names[uid] = s.Namespace + "/" + s.Endpoints[i].TargetRef.Name
			}
		}
	}
	return names
}

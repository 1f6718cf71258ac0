package source

import (
	"context"
	"fmt"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// FreshTimeout bounds one such question and the wait for the watch to have come as far.
	FreshTimeout = 10 * time.Second
	// FreshEvery is how often the watch is looked at meanwhile.
	FreshEvery = 50 * time.Millisecond
)

// Heard is what a watch has delivered last of each EndpointSlice. The zero value is empty. Safe for
// concurrent use.
type Heard struct {
	mu     sync.Mutex
	slices map[types.NamespacedName]*discovery.EndpointSlice
}

// Record takes in a slice, or that it is gone.
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

// Missing names a slice of namespace by which the watch is behind list, or says "": everything in
// list has been heard, or something newer of it, and what is not in list has not, unless it is
// newer than list.
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

// Fresh returns nil once the set knows everything that the API server could tell at some moment
// after the call. A watch does not say how old it is: one whose connection is dead is as silent as
// one in which nothing happens, a bookmark comes once a minute, and a reflector that opens its
// watch again tells nobody. So the API server is asked for a list as of now, not one from a cache
// of an unknown age, and the watch must have delivered each slice of it, or a newer version. A
// slice that is deleted meanwhile makes it fail by its deadline; the next call will not see it.
func (r *Endpoints) Fresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, FreshTimeout)
	defer cancel()
	for namespace := range r.watches {
		list, err := r.kube.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("list EndpointSlices of namespace %s: %w", namespace, err)
		}
		for {
			name, err := r.heard.Missing(namespace, list)
			if err != nil {
				return err
			}
			if name == "" {
				break
			}
			if !wait(ctx, FreshEvery) {
				return fmt.Errorf("the watch has not delivered EndpointSlice %s/%s as it is: %w", namespace, name,
					ctx.Err())
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

// Names maps the pods that EndpointSlices name to namespace/name.
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

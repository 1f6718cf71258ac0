// Package nodepods watches the pods of one node that have a barrier, and keeps what their hooks
// need. Package hooks uses it.
package nodepods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Pod is a pod of this node that has a barrier, with what the barrier needs.
type Pod struct {
	drain.Pod
	// ID is the random id that its hooks name.
	ID string
	// Bound is how long its hooks may last, by its annotation. Grace is the time that its
	// application has after the hooks.
	Bound, Grace time.Duration
	// Since is when it was deleted, by the API server's clock, and Seen when this agent first saw
	// that, by the node's clock. Zero: it was not deleted.
	Since, Seen time.Time
	// Allowed is the grace period of the deletion.
	Allowed time.Duration
	// Targets are its addresses.
	Targets []netip.AddrPort
}

// Deadline is when its hooks must have ended, by this node's clock, which may differ from the API
// server's: the bound is cut so that the application has its own grace.
func (p Pod) Deadline() time.Time {
	return p.Seen.Add(min(p.Bound, p.Allowed-p.Grace))
}

// Read reads the barrier of a pod. ok is false if it has none.
func Read(p *corev1.Pod) (n Pod, ok bool) {
	b, ok := podfacts.BarrierOf(p)
	n = Pod{
		Pod: drain.Pod{Namespace: p.Namespace, Name: p.Name, UID: drain.UID(p.UID)},
		ID:  b.ID, Bound: b.Bound, Grace: b.Grace,
	}
	if !ok {
		return n, false
	}
	if p.DeletionTimestamp != nil {
		n.Allowed = n.Bound + n.Grace
		if p.DeletionGracePeriodSeconds != nil {
			n.Allowed = time.Duration(*p.DeletionGracePeriodSeconds) * time.Second
		}
		n.Since = p.DeletionTimestamp.Add(-n.Allowed)
	}
	n.Targets = podfacts.Addresses(p) // none if it uses the node's network: a copy of a pod with a barrier
	return n, true
}

// Pods are the pods of one node that have a barrier.
type Pods struct {
	left func(Pod)
	log  *slog.Logger

	mu     sync.Mutex
	byID   map[string]map[types.UID]Pod
	owner  map[netip.Addr]map[types.UID]struct{}
	known  map[types.UID]*corev1.Pod
	listed bool
	// changed is closed, and replaced, when a pod has changed.
	changed chan struct{}
}

// New returns an empty set of pods. left is called for each pod that has been deleted, unless
// another pod on the node has its addresses.
func New(left func(Pod), log *slog.Logger) *Pods {
	return &Pods{
		left: left, log: log, byID: map[string]map[types.UID]Pod{}, owner: map[netip.Addr]map[types.UID]struct{}{},
		known:   map[types.UID]*corev1.Pod{},
		changed: make(chan struct{}),
	}
}

// Find returns the pod with an id. Ids are random. If several pods have the same one, because a pod
// was copied, Find prefers the one that is terminating. changed is closed when the answer may have
// changed.
func (n *Pods) Find(id string) (p Pod, ok bool, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Collect(maps.Values(n.byID[id]))
	if len(all) == 0 {
		return Pod{}, false, n.changed
	}
	return slices.MinFunc(all, func(a, b Pod) int {
		switch {
		case a.Since.IsZero() != b.Since.IsZero() && b.Since.IsZero():
			return -1
		case a.Since.IsZero() != b.Since.IsZero():
			return 1
		}
		return cmp.Compare(a.UID, b.UID)
	}), true, n.changed
}

// Synced reports whether the first list is complete.
func (n *Pods) Synced() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.listed
}

// SetSynced records that the first list is complete.
func (n *Pods) SetSynced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed = true
}

// Set records a pod or, if gone is set, its deletion.
func (n *Pods) Set(p *corev1.Pod, gone bool) {
	n.mu.Lock()
	was := n.known[p.UID]
	var former Pod
	if was != nil {
		former = n.byID[was.Annotations[keys.BarrierID]][p.UID]
		n.drop(was)
	}
	free := false
	if gone {
		free = former.ID != "" && !slices.ContainsFunc(former.Targets, func(t netip.AddrPort) bool {
			return len(n.owner[t.Addr()]) > 0
		})
	} else {
		n.known[p.UID] = p
		for _, ip := range p.Status.PodIPs {
			if addr, err := netip.ParseAddr(ip.IP); err == nil && p.Status.Phase != corev1.PodSucceeded &&
				p.Status.Phase != corev1.PodFailed {
				if n.owner[addr] == nil {
					n.owner[addr] = map[types.UID]struct{}{}
				}
				n.owner[addr][p.UID] = struct{}{}
			}
		}
		if is, ok := Read(p); ok {
			switch {
			case is.Since.IsZero():
			case !former.Since.IsZero():
				is.Seen = former.Seen // the clock started then
			default:
				is.Seen = time.Now()
			}
			if n.byID[is.ID] == nil {
				n.byID[is.ID] = map[types.UID]Pod{}
			}
			n.byID[is.ID][p.UID] = is
		}
	}
	close(n.changed)
	n.changed = make(chan struct{})
	n.mu.Unlock()
	if free {
		n.left(former)
	}
}

// drop, called with the lock, forgets the former state of a pod.
func (n *Pods) drop(p *corev1.Pod) {
	delete(n.known, p.UID)
	if of := n.byID[p.Annotations[keys.BarrierID]]; of != nil {
		if delete(of, p.UID); len(of) == 0 {
			delete(n.byID, p.Annotations[keys.BarrierID])
		}
	}
	for _, ip := range p.Status.PodIPs {
		addr, err := netip.ParseAddr(ip.IP)
		if err != nil {
			continue
		}
		if of := n.owner[addr]; of != nil {
			if delete(of, p.UID); len(of) == 0 {
				delete(n.owner, addr)
			}
		}
	}
}

// Owned reports whether a pod of this node has one of the addresses.
func (n *Pods) Owned(targets []netip.AddrPort) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(targets, func(t netip.AddrPort) bool { return len(n.owner[t.Addr()]) > 0 })
}

// Run watches the pods of node until ctx is done. It keeps only the needed fields of them.
func (n *Pods) Run(ctx context.Context, kube kubernetes.Interface, node string) error {
	w, err := watch.New(kube, watch.Options[*corev1.Pod]{
		Informer: func(f informers.SharedInformerFactory) toolscache.SharedIndexInformer {
			return f.Core().V1().Pods().Informer()
		},
		Fields: fields.OneTermEqualSelector("spec.nodeName", node).String(),
		Reduce: lean,
		Changed: func(was, is *corev1.Pod) {
			if was != nil && (is == nil || was.UID != is.UID) {
				n.Set(was, true)
			}
			if is != nil {
				n.Set(is, false)
			}
		},
		Trouble: func(err error) {
			n.log.Warn("pods of this node cannot be watched: hooks of pods that are not known yet are not answered",
				"node", node, "error", err)
		},
	})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if w.Synced(ctx) {
			n.SetSynced()
		}
	})
	defer wg.Wait()
	return w.Run(ctx)
}

// lean returns a copy of a pod with only the fields that its barrier needs.
func lean(p *corev1.Pod) *corev1.Pod {
	slim := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			DeletionTimestamp: p.DeletionTimestamp, DeletionGracePeriodSeconds: p.DeletionGracePeriodSeconds,
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork},
		Status: corev1.PodStatus{Phase: p.Status.Phase, PodIPs: p.Status.PodIPs},
	}
	for _, key := range []string{keys.BarrierID, keys.BarrierBound, keys.BarrierGrace} {
		if value, ok := p.Annotations[key]; ok {
			if slim.Annotations == nil {
				slim.Annotations = map[string]string{}
			}
			slim.Annotations[key] = value
		}
	}
	return slim
}

// Live reads a pod from the API server, not from a watch. gone reports that no pod has this UID.
func Live(ctx context.Context, kube kubernetes.Interface, pod drain.Pod) (n Pod, gone bool, err error) {
	p, err := kube.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return n, true, nil
	case err != nil:
		return n, false, fmt.Errorf("read pod %s: %w", pod, err)
	case drain.UID(p.UID) != pod.UID:
		return n, true, nil
	}
	n, ok := Read(p)
	if !ok {
		return n, false, errors.New("the pod has lost its annotation " + keys.BarrierID)
	}
	if !n.Since.IsZero() {
		n.Seen = time.Now()
	}
	return n, false, nil
}

package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// What the mutating webhook writes on a pod.
const (
	// barrierID is the random id that the pod's hooks name.
	barrierID = "lameduck.io/barrier-id"
	// barrierBound is how long they may last.
	barrierBound = "lameduck.io/barrier-bound"
	// barrierGrace is the application's own grace in seconds, which is left when they have lasted that long.
	barrierGrace = "lameduck.io/barrier-grace"
)

// boundDefault is the bound of a pod that does not say, boundMost what one may say.
const (
	boundDefault = 30 * time.Second
	boundMost    = 10 * time.Minute
)

// nodePod is a pod of this node that has a barrier, as far as that needs it.
type nodePod struct {
	pod drain.Pod
	id  string
	// bound is how long its hooks may last, by its annotation; grace what its application is to have after them.
	bound, grace time.Duration
	// since is when it was deleted, by the API server's clock, and seen when this agent first saw that, by the node's
	// clock. Zero: it was not deleted.
	since, seen time.Time
	// allowed is the grace that the deletion gave.
	allowed time.Duration
	// targets are its addresses.
	targets []netip.AddrPort
}

// deadline is when its hooks must have ended, by this node's clock, which may differ from the API server's: the bound is
// cut so that the application has its own grace.
func (p nodePod) deadline() time.Time {
	return p.seen.Add(min(p.bound, p.allowed-p.grace))
}

// readNodePod reads what there is to know. ok is false if the pod has no barrier.
func readNodePod(p *corev1.Pod) (n nodePod, ok bool) {
	n = nodePod{
		pod: drain.Pod{Namespace: p.Namespace, Name: p.Name, UID: drain.UID(p.UID)},
		id:  p.Annotations[barrierID], bound: boundDefault,
	}
	if n.id == "" {
		return n, false
	}
	if d, err := time.ParseDuration(p.Annotations[barrierBound]); err == nil && d >= 0 {
		n.bound = min(d, boundMost)
	}
	if s, err := strconv.Atoi(p.Annotations[barrierGrace]); err == nil && s >= 0 {
		n.grace = time.Duration(s) * time.Second
	}
	if p.DeletionTimestamp != nil {
		n.allowed = n.bound + n.grace
		if p.DeletionGracePeriodSeconds != nil {
			n.allowed = time.Duration(*p.DeletionGracePeriodSeconds) * time.Second
		}
		n.since = p.DeletionTimestamp.Add(-n.allowed)
	}
	for _, ip := range p.Status.PodIPs {
		addr, err := netip.ParseAddr(ip.IP)
		if err != nil {
			continue
		}
		if !p.Spec.HostNetwork {
			n.targets = append(n.targets, netip.AddrPortFrom(addr, 0))
			continue
		}
		// The address is the node's: only the ports are the pod's.
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				n.targets = append(n.targets, netip.AddrPortFrom(addr, uint16(port.ContainerPort)))
			}
		}
	}
	return n, true
}

// nodePods knows the pods of one node that have a barrier.
type nodePods struct {
	// left is told of each pod that is gone, if nobody on the node has its addresses. May be nil.
	left func(nodePod)
	log  *slog.Logger

	mu     sync.Mutex
	byID   map[string]map[types.UID]nodePod
	owner  map[netip.Addr]map[types.UID]struct{}
	known  map[types.UID]*corev1.Pod
	listed bool
	// changed is closed when something has.
	changed chan struct{}
}

func newNodePods(log *slog.Logger) *nodePods {
	return &nodePods{
		log: log, byID: map[string]map[types.UID]nodePod{}, owner: map[netip.Addr]map[types.UID]struct{}{}, known: map[types.UID]*corev1.Pod{},
		changed: make(chan struct{}),
	}
}

// find returns the pod with an id. Ids are random; of several pods which have one all the same, somebody has copied it, and the one that
// is going is meant. changed is closed when there may be another answer.
func (n *nodePods) find(id string) (p nodePod, ok bool, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := make([]nodePod, 0, 1)
	for _, p := range n.byID[id] {
		all = append(all, p)
	}
	if len(all) == 0 {
		return nodePod{}, false, n.changed
	}
	return slices.MinFunc(all, func(a, b nodePod) int {
		switch {
		case a.since.IsZero() != b.since.IsZero() && b.since.IsZero():
			return -1
		case a.since.IsZero() != b.since.IsZero():
			return 1
		}
		return cmp.Compare(a.pod.UID, b.pod.UID)
	}), true, n.changed
}

// synced reports whether the first list is complete.
func (n *nodePods) synced() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.listed
}

// set takes in a pod, or its end.
func (n *nodePods) set(p *corev1.Pod, gone bool) {
	n.mu.Lock()
	was := n.known[p.UID]
	var former nodePod
	if was != nil {
		former = n.byID[was.Annotations[barrierID]][p.UID]
		n.drop(was)
	}
	free := false
	if gone {
		free = former.id != "" && !slices.ContainsFunc(former.targets, func(t netip.AddrPort) bool { return len(n.owner[t.Addr()]) > 0 })
	} else {
		n.known[p.UID] = p
		for _, ip := range p.Status.PodIPs {
			if addr, err := netip.ParseAddr(ip.IP); err == nil && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
				if n.owner[addr] == nil {
					n.owner[addr] = map[types.UID]struct{}{}
				}
				n.owner[addr][p.UID] = struct{}{}
			}
		}
		if is, ok := readNodePod(p); ok {
			switch {
			case is.since.IsZero():
			case !former.since.IsZero():
				is.seen = former.seen // the clock began then
			default:
				is.seen = time.Now()
			}
			if n.byID[is.id] == nil {
				n.byID[is.id] = map[types.UID]nodePod{}
			}
			n.byID[is.id][p.UID] = is
		}
	}
	close(n.changed)
	n.changed = make(chan struct{})
	n.mu.Unlock()
	if free && n.left != nil {
		n.left(former)
	}
}

// drop, called with the lock, forgets a pod as it was.
func (n *nodePods) drop(p *corev1.Pod) {
	delete(n.known, p.UID)
	if of := n.byID[p.Annotations[barrierID]]; of != nil {
		if delete(of, p.UID); len(of) == 0 {
			delete(n.byID, p.Annotations[barrierID])
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

// owned reports whether a pod of this node has one of the addresses.
func (n *nodePods) owned(targets []netip.AddrPort) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(targets, func(t netip.AddrPort) bool { return len(n.owner[t.Addr()]) > 0 })
}

// run watches the pods of node until ctx is done. Only what is needed of them is kept.
func (n *nodePods) run(ctx context.Context, kube kubernetes.Interface, node string) error {
	factory := informers.NewSharedInformerFactoryWithOptions(kube, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		}),
		informers.WithTransform(func(o any) (any, error) { return lean(o), nil }))
	informer := factory.Core().V1().Pods().Informer()
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { n.event(o, false) },
		UpdateFunc: func(old, o any) {
			if was, ok := old.(*corev1.Pod); ok {
				if is, ok := o.(*corev1.Pod); ok && was.UID != is.UID {
					n.set(was, true) // its end was missed
				}
			}
			n.event(o, false)
		},
		DeleteFunc: func(o any) { n.event(o, true) },
	})
	if err != nil {
		return fmt.Errorf("watch pods of node %s: %w", node, err)
	}
	var mu sync.Mutex
	trouble := ""
	if err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *toolscache.Reflector, err error) {
		mu.Lock()
		defer mu.Unlock()
		if news := err.Error() != trouble && ctx.Err() == nil; news {
			trouble = err.Error()
			n.log.Warn("pods of this node cannot be watched: hooks of pods that are not known yet are not answered", "node", node, "error", err)
		}
	}); err != nil {
		return fmt.Errorf("watch pods of node %s: %w", node, err)
	}
	factory.Start(ctx.Done())
	if toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		n.mu.Lock()
		n.listed = true
		n.mu.Unlock()
	}
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

func (n *nodePods) event(o any, gone bool) {
	if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
		o = missed.Obj
	}
	if p, ok := o.(*corev1.Pod); ok {
		n.set(p, gone)
	}
}

// lean keeps of a pod what its barrier needs.
func lean(o any) any {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o
	}
	slim := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			DeletionTimestamp: p.DeletionTimestamp, DeletionGracePeriodSeconds: p.DeletionGracePeriodSeconds,
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork},
		Status: corev1.PodStatus{Phase: p.Status.Phase, PodIPs: p.Status.PodIPs},
	}
	for _, key := range []string{barrierID, barrierBound, barrierGrace} {
		if value, ok := p.Annotations[key]; ok {
			if slim.Annotations == nil {
				slim.Annotations = map[string]string{}
			}
			slim.Annotations[key] = value
		}
	}
	if p.Spec.HostNetwork {
		for _, c := range p.Spec.Containers {
			slim.Spec.Containers = append(slim.Spec.Containers, corev1.Container{Name: c.Name, Ports: c.Ports})
		}
	}
	return slim
}

package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health/serving"
)

// toBeDeleted is the taint that the cluster autoscaler puts on a node before it deletes it.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// follow carries the gateway's progress to what /livez and /healthz say. A gateway that cannot be read is behind with everything: it has
// died or is starting, and what it had been told is to be told again. That is how HAProxy's death gets there.
func follow(h *serving.Health) func(gateway.Progress) {
	return func(p gateway.Progress) {
		behind := map[serving.Family]bool{}
		for _, op := range p.Behind {
			behind[serving.Of(op.Key.Target.Addr.Addr())] = true
		}
		for _, f := range serving.Families {
			if behind[f] || p.Err != nil {
				h.Queued(f, p.AsOf)
			} else {
				h.Updated(f, p.AsOf)
			}
		}
		for _, op := range p.Came {
			h.Queued(serving.Of(op.Key.Target.Addr.Addr()), time.Now())
		}
	}
}

// queue records a change that may be of any family: a tombstone names a pod, not an address.
func queue(h *serving.Health) {
	now := time.Now()
	for _, f := range serving.Families {
		h.Queued(f, now)
	}
}

// eligible says whether new traffic may come to a node, as kube-proxy decides it. gone says that the API server has deleted it.
func eligible(node *corev1.Node, gone bool) bool {
	if gone || !node.DeletionTimestamp.IsZero() {
		return false
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == toBeDeleted {
			return false
		}
	}
	return true
}

// watchNode tells set whether the node of that name is eligible, until ctx is done. It says nothing of a node that it has not seen, so that the
// node stays what it was last known to be: eligible at first. Neither a missing right nor an API server that is away changes that.
func watchNode(ctx context.Context, kube kubernetes.Interface, name string, set func(bool), log *slog.Logger) error {
	factory := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}))
	informer := factory.Core().V1().Nodes().Informer()
	var mu sync.Mutex
	last, trouble := true, ""
	see := func(o any, gone bool) {
		node, ok := o.(*corev1.Node)
		if !ok || node.Name != name {
			return
		}
		is := eligible(node, gone)
		set(is)
		mu.Lock()
		changed := is != last
		last, trouble = is, ""
		mu.Unlock()
		if changed {
			log.Info("node eligibility", "node", name, "eligible", is)
		}
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { see(o, false) },
		UpdateFunc: func(_, o any) { see(o, false) },
		DeleteFunc: func(o any) {
			if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = missed.Obj
			}
			see(o, true)
		},
	}); err != nil {
		return fmt.Errorf("watch node %s: %w", name, err)
	}
	// One line for each kind of trouble, not for each try.
	if err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *toolscache.Reflector, err error) {
		mu.Lock()
		news := err.Error() != trouble && ctx.Err() == nil
		trouble = err.Error()
		mu.Unlock()
		if news {
			log.Warn("node cannot be watched: it counts as what it was last known to be, eligible at first", "node", name, "error", err)
		}
	}); err != nil {
		return fmt.Errorf("watch node %s: %w", name, err)
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

// Package liveness feeds [serving.Health], from which /livez and /healthz are answered: with the
// progress of the gateway, and with the state of the agent's node.
package liveness

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// toBeDeleted is the taint that the cluster autoscaler puts on a node before it deletes it.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Follow returns a function that records the gateway's progress in h. A gateway that cannot be read
// is behind in everything: it has ended or is starting, and needs all its configuration again. So
// the end of HAProxy shows in /livez and /healthz.
func Follow(h *serving.Health) func(gateway.Progress) {
	return func(p gateway.Progress) {
		for _, f := range serving.Families {
			behind := func(op health.Op) bool { return serving.Of(op.Key.Target.Addr.Addr()) == f }
			if p.Err != nil || slices.ContainsFunc(p.Behind, behind) {
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

// Queue records a change for every family: an exclusion names a pod, not an address.
func Queue(h *serving.Health) {
	now := time.Now()
	for _, f := range serving.Families {
		h.Queued(f, now)
	}
}

// eligible reports whether a node may get new traffic, by kube-proxy's rules. gone: the node does
// not exist any more.
func eligible(node *corev1.Node, gone bool) bool {
	return !gone && node.DeletionTimestamp.IsZero() &&
		!slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == toBeDeleted })
}

// WatchNode calls set with whether the node of that name is eligible, until ctx is done. It does
// not call set before it has seen the node, so that the node keeps its last known state, at first
// eligible. A missing right or an API server that is not available does not change that state.
func WatchNode(ctx context.Context, kube kubernetes.Interface, name string, set func(bool), log *slog.Logger) error {
	last := true
	w, err := watch.New(kube, watch.Options[*corev1.Node]{
		Informer: func(f informers.SharedInformerFactory) toolscache.SharedIndexInformer {
			return f.Core().V1().Nodes().Informer()
		},
		Fields: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
		Changed: func(was, is *corev1.Node) {
			node := cmp.Or(is, was)
			if node.Name != name {
				return
			}
			eligible := eligible(node, is == nil)
			set(eligible)
			if eligible != last {
				log.Info("node eligibility", "node", name, "eligible", eligible)
			}
			last = eligible
		},
		Trouble: func(err error) {
			log.Warn("node cannot be watched: it counts as what it was last known to be, eligible at first",
				"node", name, "error", err)
		},
	})
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

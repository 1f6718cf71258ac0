package admission

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Ahead is a [Slices] that adds to the usable targets of a Service the ready pods that its
// EndpointSlices do not list yet, if there is only one target otherwise. Controllers delete a pod
// as soon as its replacement is ready, and may see that before this replica sees the slice. Without
// the other pod, the deletion would not wait, although gateways still have to learn where to send
// instead. A pod that has been ready for [endpoints.Linger] without being listed does not count.
type Ahead struct {
	Slices
	// Reader is a cache of pods and Services.
	Reader client.Reader
	// Synced reports whether Services can be read.
	Synced func() bool
	// Ledger has the pods that are being drained. None of them is a replacement.
	Ledger Standings
	// Now is the clock.
	Now func() time.Time
}

// Usable implements [Slices].
func (a Ahead) Usable(service types.NamespacedName) []health.UID {
	usable := a.Slices.Usable(service)
	var of corev1.Service
	if len(usable) != 1 || !a.Synced() || a.Reader.Get(context.Background(), service, &of) != nil ||
		len(of.Spec.Selector) == 0 {
		return usable
	}
	var all corev1.PodList
	if a.Reader.List(context.Background(), &all, client.InNamespace(service.Namespace),
		client.MatchingLabels(of.Spec.Selector)) != nil {
		return usable
	}
	for _, p := range all.Items {
		since, _ := podfacts.ReadySince(&p)
		late := podfacts.Ready(&p) && p.Status.Phase == corev1.PodRunning && a.Now().Sub(since) < endpoints.Linger
		if !late || slices.Contains(usable, health.UID(p.UID)) {
			continue
		}
		if stands := a.Ledger.Pod(health.UID(p.UID)); !stands.Draining && !stands.Terminating {
			usable = append(usable, health.UID(p.UID))
		}
	}
	slices.Sort(usable)
	return usable
}

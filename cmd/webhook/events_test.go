package main

import (
	"fmt"
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// A rollout of a hundred pods that something uncovered routes writes one Event, and a deadline is
// named for each pod that met it.
func TestAnOwnersUncoveredPodsAreOneEvent(t *testing.T) {
	e := newEvents(fake.NewClientset(), "webhook-0", func(drain.Pod, string, string) {}, slog.New(slog.DiscardHandler))
	for owner := range 2 {
		for n := range 50 {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop",
				Name: fmt.Sprintf("web-%d-%d", owner, n),
				UID:  types.UID(fmt.Sprintf("%d-%d", owner, n)), OwnerReferences: []metav1.OwnerReference{{
					Kind: "ReplicaSet", Name: "web", UID: types.UID(fmt.Sprint("owner-", owner)),
					Controller: ptr.To(true)}}}}
			e.Event(pod, true, "LameduckUncovered", "an Ingress routes it")
			e.Event(pod, true, "LameduckDeadline", "late")
			e.Event(pod, true, "LameduckDeadline", "late")
		}
	}
	got := map[string]int{}
	for range len(e.queue) {
		got[(<-e.queue).Reason]++
	}
	if got["LameduckUncovered"] != 2 || got["LameduckDeadline"] != 100 {
		t.Errorf("%v, want 2 of Uncovered and 100 of the deadline", got)
	}
}

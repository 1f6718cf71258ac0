package admission

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A controller deletes a pod when its replacement is ready, and EndpointSlices may not say so yet.
func TestAReplacementThatNoSliceListsYet(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(w *world, of *corev1.Service, synced *bool)
		want string
	}{
		"it is ready":      {func(*world, *corev1.Service, *bool) {}, "Acknowledged"},
		"it is not ready":  {func(w *world, _ *corev1.Service, _ *bool) { w.b.Status.Conditions = nil }, "LastTarget"},
		"it has ended":     {func(w *world, _ *corev1.Service, _ *bool) { w.b.Status.Phase = "Failed" }, "LastTarget"},
		"it is another's":  {func(w *world, _ *corev1.Service, _ *bool) { w.b.Labels["app"] = "db" }, "LastTarget"},
		"elsewhere":        {func(w *world, _ *corev1.Service, _ *bool) { w.b.Namespace = "bank" }, "LastTarget"},
		"without selector": {func(_ *world, of *corev1.Service, _ *bool) { of.Spec.Selector = nil }, "LastTarget"},
		"Services cannot be read": {func(_ *world, _ *corev1.Service, synced *bool) { *synced = false },
			"LastTarget"},
		"pods cannot be listed": {func(w *world, _ *corev1.Service, _ *bool) { w.reader.broken = "*v1.PodList" },
			"LastTarget"},
		"it was not listed for long": {func(w *world, _ *corev1.Service, _ *bool) {
			w.b.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-11 * time.Second))
		}, "LastTarget"},
		"it is drained": {func(w *world, _ *corev1.Service, _ *bool) {
			w.ledger.draining["uid-b"] = time.Now()
		}, "LastTarget"},
		"it is going": {func(w *world, _ *corev1.Service, _ *bool) {
			w.b.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		}, "LastTarget"},
	} {
		t.Run(name, func(t *testing.T) {
			w, synced := newWorld(t), true
			w.slices.usable[webService] = w.slices.usable[webService][:1]
			of := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
				Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"}}}
			w.reader.objects = append(w.reader.objects, of)
			w.Handler.Cluster.Slices = Ahead{Slices: w.slices, Reader: w.reader, Synced: func() bool { return synced },
				Ledger: w.ledger, Now: time.Now}
			w.b.Status.Conditions[0].LastTransitionTime = metav1.Now()
			c.set(w, of, &synced)
			got := w.ask(deletion(w.a))
			if !got.Allowed || (len(got.Warnings) > 0) != (c.want == "LastTarget") {
				t.Errorf("%+v", got)
			}
			if counted := w.counted(); len(counted) != 1 || counted[0] != "delete allow "+c.want+" 1" {
				t.Errorf("counted %v, want %s", counted, c.want)
			}
			if c.want == "Acknowledged" && (len(w.ledger.calls) != 1 || len(w.slices.usable[webService]) != 1) {
				t.Errorf("the ledger was asked %v; the index has %v", w.ledger.calls, w.slices.usable)
			}
		})
	}
}

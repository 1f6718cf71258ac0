package admission

import (
	"errors"
	"testing"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// The explanation must be the answer that a deletion would get, and must change nothing.
func TestExplain(t *testing.T) {
	budget := func(allowed int32) *policyv1.PodDisruptionBudget {
		return &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
			Spec: policyv1.PodDisruptionBudgetSpec{
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
			Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, CurrentHealthy: 2,
				DesiredHealthy: 2 - allowed},
		}
	}
	for name, c := range map[string]struct {
		operation Operation
		set       func(w *world)
		action    Action
		reason    Reason
		crowded   bool
	}{
		"it would drain": {Delete, func(*world) {}, Drain, Draining, false},
		"it would be evicted": {Evict, func(w *world) {
			w.reader.objects = append(w.reader.objects, budget(1))
		}, Drain, Draining, false},
		"its budget is used up": {Evict, func(w *world) {
			w.reader.objects = append(w.reader.objects, budget(0))
		}, Deny, Budget, false},
		"its budget is used up, and it is deleted": {Delete, func(w *world) {
			w.reader.objects = append(w.reader.objects, budget(0))
		}, Drain, Draining, false},
		"another drains": {Delete, func(w *world) { w.ledger.draining["uid-b"] = time.Now() }, Drain, Draining,
			true},
		"it drains itself": {Delete, func(w *world) { w.ledger.draining["uid-a"] = time.Now() }, Drain, Draining,
			false},
		"it waits for another": {Delete, func(w *world) {
			w.ledger.draining["uid-a"], w.ledger.draining["uid-b"] = time.Now(), time.Now()
			w.ledger.queued = map[drain.UID]bool{"uid-a": true}
		}, Drain, Draining, true},
		"it is the last": {Delete, func(w *world) { w.slices.usable[webService] = []health.UID{"uid-a"} }, Allow,
			LastTarget, false},
		"its mode is off":      {Delete, func(w *world) { w.a.Labels[keys.Mode] = keys.Off }, Allow, ModeOff, false},
		"no gateway routes it": {Delete, func(w *world) { w.ledger.routed = nil }, Allow, NotRouted, false},
		"it is terminating": {Delete, func(w *world) { w.a.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, Allow,
			Terminating, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.set(w)
			for range 2 { // asked twice, it is the same
				e, err := w.Cluster.Explain(t.Context(), time.Now(), c.operation, "shop", "a")
				if err != nil {
					t.Fatal(err)
				}
				if e.Verdict.Action != c.action || e.Verdict.Reason != c.reason || e.Full != "" != c.crowded ||
					e.Pod.UID != "uid-a" {
					t.Errorf("%+v, crowded %q", e.Verdict, e.Full)
				}
			}
			if len(w.ledger.calls) > 0 || len(w.events) > 0 {
				t.Errorf("it had effects: %q, %v", w.ledger.calls, w.events)
			}
		})
	}
}

func TestExplainSaysWhatItCannotKnow(t *testing.T) {
	w := newWorld(t)
	if _, err := w.Cluster.Explain(t.Context(), time.Now(), Delete, "shop", "c"); !errors.Is(err, ErrNoPod) {
		t.Errorf("a pod that is not there: %v", err)
	}
	w.cold = true
	if _, err := w.Cluster.Explain(t.Context(), time.Now(), Delete, "shop", "a"); !errors.Is(err, ErrCold) {
		t.Errorf("a cold cache: %v", err)
	}
	w.cold, w.reader.broken = false, "*v1.Node"
	if _, err := w.Cluster.Explain(t.Context(), time.Now(), Delete, "shop", "a"); err == nil {
		t.Error("a broken cache is not said")
	}
}

package admission

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// hooked gives a pod of the ReplicaSet web-5f7 the barrier, as [mutate] does, and two containers.
func hooked(pod *corev1.Pod) {
	pod.Annotations[keys.BarrierID], pod.Annotations[keys.BarrierBound] = "shop.id", "30s"
	pod.Annotations[keys.BarrierGrace] = "20"
	pod.Labels["pod-template-hash"] = "5f7"
	pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-5f7", UID: "rs",
		Controller: new(true)}}
	grace := int64(50)
	pod.Spec.TerminationGracePeriodSeconds = &grace
	pod.Spec.Containers = []corev1.Container{
		{Name: "app", Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{
			Host: "127.0.0.1", Port: intstr.FromInt(9447), Path: keys.WaitPath + "shop.id?container=app"}}}},
		{Name: "log", Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{
			Command: []string{waitProgram, "--id=shop.id", "--", "stop"}}}}},
	}
}

// well is what a replica knows of hooks that will wait.
var well = coordinator.Hooks{IdleBound: 10 * time.Second, Connected: true, Allowed: true, Heard: true}

// Whether the hold may end at Removed, by the pod and the request that the API server sends.
// Without this, a container without the hook is killed with its requests, or a short grace period
// ends the barrier before them.
func TestWhichDeletionsAreLeftToTheBarrier(t *testing.T) {
	preStop := func(pod *corev1.Pod, i int) *corev1.LifecycleHandler { return pod.Spec.Containers[i].Lifecycle.PreStop }
	for name, c := range map[string]struct {
		set     func(w *world)
		options string
		want    bool
	}{
		"hooks of both kinds":           {func(*world) {}, ``, true},
		"no hooks":                      {func(w *world) { w.a.Spec.Containers = w.a.Spec.Containers[:0] }, ``, false},
		"a container without lifecycle": {func(w *world) { w.a.Spec.Containers[0].Lifecycle = nil }, ``, false},
		"a container without preStop":   {func(w *world) { w.a.Spec.Containers[1].Lifecycle.PreStop = nil }, ``, false},
		"a hook of its own":             {func(w *world) { preStop(w.a, 0).HTTPGet.Path = "/bye" }, ``, false},
		"another query":                 {func(w *world) { preStop(w.a, 0).HTTPGet.Path += "x" }, ``, true},
		"another pod's id": {func(w *world) {
			preStop(w.a, 0).HTTPGet.Path = keys.WaitPath + "shop.id2"
		}, ``, false},
		"lameduck-wait inside a shell": {func(w *world) {
			preStop(w.a, 1).Exec.Command = []string{"sh", "-c", "lameduck-wait --id=shop.id"}
		}, ``, false},
		"no annotations":               {func(w *world) { delete(w.a.Annotations, keys.BarrierID) }, ``, false},
		"an id of another namespace":   {func(w *world) { w.a.Annotations[keys.BarrierID] = "bank.id" }, ``, false},
		"it uses the node's network":   {func(w *world) { w.a.Spec.HostNetwork = true }, ``, false},
		"deleted with 30 s, 10 remain": {func(*world) {}, `{"gracePeriodSeconds":30}`, true},
		"deleted with 29 s":            {func(*world) {}, `{"gracePeriodSeconds":29}`, false},
		"deleted with 1 s":             {func(*world) {}, `{"gracePeriodSeconds":1}`, false},
		"deleted with 2^63-1 s":        {func(*world) {}, `{"gracePeriodSeconds":9223372036854775807}`, true},
		"a grace that was shortened":   {func(w *world) { *w.a.Spec.TerminationGracePeriodSeconds = 25 }, ``, false},
		"no grace: it is 30":           {func(w *world) { w.a.Spec.TerminationGracePeriodSeconds = nil }, ``, true},
		"a negative grace":             {func(w *world) { *w.a.Spec.TerminationGracePeriodSeconds = -9e18 }, ``, false},
		"a short bound":                {func(w *world) { w.a.Annotations[keys.BarrierBound] = "5s" }, ``, false},
		"the mode is observe":          {func(w *world) { w.ns.Labels[keys.Mode] = keys.Observe }, ``, false},
		"a bare pod has no workload":   {func(w *world) { w.a.OwnerReferences = nil }, ``, false},
		"the agent is not connected":   {func(w *world) { w.ledger.hooks.Connected = false }, ``, false},
		"the pod is on another node": {func(w *world) {
			w.a.Spec.NodeName, w.node.Name = "node-2", "node-2"
		}, ``, false},
	} {
		for _, evict := range []bool{false, true} {
			w := newWorld(t)
			hooked(w.a)
			w.ledger.hooks = well
			c.set(w)
			review := deletion(w.a, func(r *admissionv1.AdmissionRequest) {
				if c.options != "" {
					r.Options = rawOf([]byte(`{"kind":"DeleteOptions","apiVersion":"meta.k8s.io/v1",` + c.options[1:]))
				}
			})
			if evict {
				review = eviction(w.a, "policy/v1", c.options)
			}
			w.ask(review)
			got := slices.ContainsFunc(w.ledger.requests, func(r coordinator.Request) bool { return r.BarrierWaits })
			if got != c.want {
				t.Errorf("%s, evicted=%t: left to the barrier %t, want %t", name, evict, got, c.want)
			}
		}
	}
}

// A call looks again at what is known of the hooks, each time that it looks at its drain: the agent
// of the node may be lost meanwhile.
func TestACallThatIsHeldLooksAtTheHooksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		hooked(w.a)
		w.ledger.hooks = well
		w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
			time.Sleep(time.Until(until)) // in a bubble
			w.ledger.hooks.Connected = len(w.ledger.requests) == 2
			return drain.Status{Phase: drain.Unrouting, Since: time.Now()}, true, nil
		}
		w.decide(t.Context(), time.Now(), w.deleteA())
		var got []bool
		for _, r := range w.ledger.requests[:4] {
			got = append(got, r.BarrierWaits)
		}
		if want := []bool{true, false, true, false}; !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	})
}

// The answer is counted and logged by its reason. Uncovered consumers are named as at the hold.
func TestAnAnswerThatIsLeftToTheBarrier(t *testing.T) {
	w := newWorld(t)
	hooked(w.a)
	w.ledger.hooks = well
	w.status(drain.Released, drain.BarrierWaits, 0, true, nil)
	if got := w.ask(deletion(w.a)); !got.Allowed || len(got.Warnings) > 0 {
		t.Errorf("%+v", got)
	}
	if want := []string{"delete allow BarrierWaits 1"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
	if r := w.ledger.requests[0]; r.Workload == "" || r.Workload != podfacts.Workload(w.a) {
		t.Errorf("%+v", r)
	}
	e, err := w.Cluster.Explain(t.Context(), time.Now(), Delete, "shop", "a")
	if err != nil || e.Verdict.Reason != BarrierWaits || e.Idle != "" {
		t.Errorf("%+v, %v", e, err)
	}
	w.ledger.hooks.Heard = false
	if e, err := w.Cluster.Explain(t.Context(), time.Now(), Delete, "shop", "a"); err != nil ||
		e.Verdict.Reason != Draining || e.Idle == "" {
		t.Errorf("%+v, %v", e, err)
	}
}

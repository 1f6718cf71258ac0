package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

func agentPod(name, serviceAccount string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "edge", Name: name, UID: types.UID("uid-" + name),
			Labels: map[string]string{agentLabel: "directed"}},
		Spec: corev1.PodSpec{ServiceAccountName: serviceAccount},
		Status: corev1.PodStatus{Phase: corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

// rosterIn starts a roster. Each question about a right takes a second; the service account
// "stranger" has none.
func rosterIn(t *testing.T) (*roster, *coordinator.Coordinator, *int) {
	client := fake.NewClientset()
	asked := 0
	client.PrependReactor("create", "subjectaccessreviews",
		func(action clienttesting.Action) (bool, runtime.Object, error) {
			asked++
			time.Sleep(time.Second)
			review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
			switch review.Spec.User {
			case "system:serviceaccount:edge:unknown":
				return true, nil, errors.New("away")
			case "system:serviceaccount:edge:stranger":
				review.Status.Allowed = false
			default:
				review.Status.Allowed = true
			}
			return true, review, nil
		})
	log := slog.New(slog.DiscardHandler)
	coord := coordinator.New(drain.Holder{}, drain.DefaultTimes(),
		coordinator.Options{Log: log, Metrics: coordinator.NewMetrics(prometheus.NewRegistry())})
	r := newRoster(coord, identity.New(client), log)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return r, coord, &asked
}

// Without this, a replica answers for the cluster with a list of agents that lacks those whose
// right is still being asked for.
func TestTheRosterIsListedWhenAllOfItWasHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, coord, _ := rosterIn(t)
		expected := func() int { n, _ := coord.Expecting(); return n }
		r.set(agentPod("a", "one"))
		time.Sleep(500 * time.Millisecond) // the first is being asked about
		r.set(agentPod("b", "two"))
		time.Sleep(700 * time.Millisecond)
		synctest.Wait()
		if r.listed() {
			t.Errorf("listed with %d of 2 agents", expected())
		}
		time.Sleep(2 * time.Second)
		if !r.listed() || expected() != 2 {
			t.Errorf("listed %t with %d agents", r.listed(), expected())
		}
		empty, _, _ := rosterIn(t)
		if empty.listed() {
			t.Error("listed before anything was handed over")
		}
		synctest.Wait()
		if !empty.listed() {
			t.Error("an empty cluster is not listed")
		}
	})
}

func TestWhoIsExpected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, coord, asked := rosterIn(t)
		expected := func() int { synctest.Wait(); n, _ := coord.Expecting(); return n }
		plain, over := agentPod("plain", "one"), agentPod("over", "one")
		delete(plain.Labels, agentLabel)
		over.Status.Phase = corev1.PodFailed
		for _, p := range []*corev1.Pod{plain, over, agentPod("liar", "stranger"), agentPod("a", "one"),
			agentPod("b", "one")} {
			r.set(p)
		}
		for i := range 8 {
			r.set(agentPod(fmt.Sprint("unknown-", i), "unknown"))
		}
		time.Sleep(10 * time.Second)
		// Agents that cannot be looked up are waited for.
		if got := expected(); got != 10 {
			t.Errorf("%d agents are expected, want a, b and 8 unknown", got)
		}
		// The list was gone through twice at most, and only answers are remembered between.
		if *asked > 5 {
			t.Errorf("asked %d times about 3 service accounts", *asked)
		}
		r.gone(agentPod("a", "one"))
		b := agentPod("b", "one")
		b.Status.Phase = corev1.PodSucceeded
		r.set(b)
		time.Sleep(10 * time.Second)
		if got := expected(); got != 8 {
			t.Errorf("%d agents are expected, want 8 unknown", got)
		}
	})
}

// The deletion of a pod that was missed, and of one whose name is taken again, must not be lost:
// the UID decides.
func TestHandlersSeeEveryEnd(t *testing.T) {
	var set, gone []types.UID
	h := handle(func(p *corev1.Pod) { set = append(set, p.UID) },
		func(p *corev1.Pod) { gone = append(gone, p.UID) })
	h.OnAdd(agentPod("a", ""), true)
	h.OnUpdate(agentPod("a", ""), agentPod("a", ""))
	h.OnUpdate(agentPod("a", ""), agentPod("b", ""))
	h.OnDelete(agentPod("b", ""))
	h.OnDelete(toolscache.DeletedFinalStateUnknown{Key: "edge/c", Obj: agentPod("c", "")})
	h.OnDelete(toolscache.DeletedFinalStateUnknown{Key: "edge/d"})
	if len(set) != 3 || len(gone) != 3 || gone[0] != "uid-a" || gone[1] != "uid-b" || gone[2] != "uid-c" {
		t.Errorf("set %q, gone %q", set, gone)
	}
}

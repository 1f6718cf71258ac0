package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
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

// slowRights is an API server that answers each question about a right after a second. The service
// account "stranger" has none, and it fails for "unknown".
type slowRights struct{ asked atomic.Int64 }

func (s *slowRights) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked.Add(1)
	time.Sleep(time.Second) // the work that it does
	var review authorizationv1.SubjectAccessReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		return nil, err
	}
	if review.Spec.User == "system:serviceaccount:edge:unknown" {
		return nil, errors.New("away")
	}
	review.Status.Allowed = review.Spec.User != "system:serviceaccount:edge:stranger"
	text, err := json.Marshal(review)
	return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
}

// rosterIn starts a roster.
func rosterIn(t *testing.T) (*roster, *coordinator.Coordinator, *slowRights) {
	api := &slowRights{}
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: api, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeJSON}})
	if err != nil {
		t.Fatal(err)
	}
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
	return r, coord, api
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
		r, coord, api := rosterIn(t)
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
		if n := api.asked.Load(); n > 5 {
			t.Errorf("asked %d times about 3 service accounts", n)
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

// Asked one after the other, an API server that takes a second for each would keep a replica from
// answering for a minute.
func TestAllAccountsAreAskedAboutAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, coord, _ := rosterIn(t)
		for i := range 60 {
			p := agentPod(fmt.Sprint("haproxy-", i), "haproxy")
			p.Namespace = fmt.Sprint("edge-", i)
			r.set(p)
		}
		r.listed()
		time.Sleep(3 * time.Second)
		if n, _ := coord.Expecting(); !r.listed() || n != 60 {
			t.Errorf("after 3 s %d of 60 agents are expected", n)
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

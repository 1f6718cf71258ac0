package main

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// A tenant who may create pods and service accounts makes 600 pods with the agent's label, each of
// a service account of its own without any right, in one namespace or in many, and one of them
// changes once a second, as in a crash loop. A replica that starts then must be ready within 15 s,
// and an agent that comes later must be expected within 5 s.
func TestLabelsOfStrangersDoNotDelayTheRoster(t *testing.T) {
	for name, namespaces := range map[string]int{"one namespace": 1, "many": 60} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := fake.NewClientset()
				client.PrependReactor("create", "subjectaccessreviews",
					func(action clienttesting.Action) (bool, runtime.Object, error) {
						asked := action.(clienttesting.CreateAction).GetObject()
						review := asked.(*authorizationv1.SubjectAccessReview).DeepCopy()
						review.Status.Allowed = review.Spec.User == "system:serviceaccount:edge:haproxy"
						return true, review, nil
					})
				log := slog.New(slog.DiscardHandler)
				coord := coordinator.New(drain.Holder{}, drain.DefaultTimes(),
					coordinator.Options{Log: log, Metrics: coordinator.NewMetrics(prometheus.NewRegistry())})
				r := newRoster(coord, identity.New(client), log)
				stranger := func(i int) *corev1.Pod {
					p := agentPod(fmt.Sprint("stranger-", i), fmt.Sprint("sa-", i))
					p.Namespace = fmt.Sprint("tenant-", i%namespaces)
					return p
				}
				for i := range 600 {
					r.set(stranger(i))
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- r.run(ctx) }()
				began := time.Now()
				var listed, expected time.Duration
				const comes = 30
				for i := range 120 {
					if i == comes {
						r.set(agentPod("haproxy-1", "haproxy"))
					}
					r.set(stranger(0))
					time.Sleep(time.Second)
					if listed == 0 && r.listed() {
						listed = time.Since(began)
					}
					if n, _ := coord.Expecting(); n > 0 && expected == 0 {
						expected = time.Since(began) - comes*time.Second
					}
				}
				if listed == 0 || listed > 15*time.Second {
					t.Errorf("listed after %s (0: never)", listed)
				}
				if expected == 0 || expected > 5*time.Second {
					t.Errorf("an agent is expected after %s (0: never)", expected)
				}
				cancel()
				<-done
			})
		})
	}
}

package apiserver_test

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// gaps are the times between the arrivals of reviews.
func gaps(reviews []*review) []time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(reviews); i++ {
		gaps = append(gaps, reviews[i].arrived.Sub(reviews[i-1].arrived).Round(time.Millisecond))
	}
	return gaps
}

// F4. details.retryAfterSeconds of a denial is the Retry-After header of the response. Without that
// header no client would come back by itself, and there is no other way for a webhook to set it.
func TestDenialBecomesRetryAfter(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name             string
		code, retryAfter int32
		header           string
	}{
		{"429 with", 429, 3, "3"},
		{"429 without", 429, 0, ""},
		{"403 with", 403, 3, "3"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(func(context.Context, *review) *admissionv1.AdmissionResponse {
				return deny(test.code, test.retryAfter)
			})
			s.pod("web")
			for _, call := range []struct{ method, path, body string }{
				{http.MethodDelete, s.path("web"), ""},
				{http.MethodPost, s.path("web/eviction"),
					`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web"}}`},
			} {
				response, message := s.request(call.method, call.path, call.body)
				if response.StatusCode != int(test.code) {
					t.Errorf("%s: %s", call.method, response.Status)
				}
				if got := response.Header.Get("Retry-After"); got != test.header {
					t.Errorf("%s: Retry-After %q, want %q", call.method, got, test.header)
				}
				if !strings.Contains(message, `"pods.lameduck.test" denied the request`) ||
					!strings.Contains(message, "not yet") {
					t.Errorf("%s: %s", call.method, message)
				}
			}
			if got := len(h.reviews()); got != 2 {
				t.Errorf("%d reviews, want 2", got)
			}
		})
	}
}

// F4. client-go obeys Retry-After 10 times within one call, which is how long Lameduck can hold a
// deletion by denials before anybody sees an error. Without it the first denial is the result.
func TestClientRetries(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		retryAfter int32
		call       func(s *scene) error
		want       int
	}{
		{"delete", 1, func(s *scene) error { return s.delete("web", metav1.DeleteOptions{}) }, 11},
		{"evict", 1, func(s *scene) error { return s.evict("web", nil) }, 11},
		{"delete, without Retry-After", 0, func(s *scene) error { return s.delete("web", metav1.DeleteOptions{}) }, 1},
		{"evict, without Retry-After", 0, func(s *scene) error { return s.evict("web", nil) }, 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(func(context.Context, *review) *admissionv1.AdmissionResponse {
				return deny(http.StatusTooManyRequests, test.retryAfter)
			})
			s.pod("web")
			if err := test.call(s); !apierrors.IsTooManyRequests(err) {
				t.Errorf("got %v", err)
			}
			got := h.reviews()
			if len(got) != test.want {
				t.Fatalf("%d reviews, want %d", len(got), test.want)
			}
			for _, gap := range gaps(got) {
				if gap < 950*time.Millisecond || gap > 10*time.Second {
					t.Errorf("between the reviews: %s", gaps(got))
					break
				}
			}
		})
	}
}

// F4. A person with kubectl delete notices nothing but the time, if Lameduck says when to come
// back; if not, the command fails.
func TestKubectlDeleteRetries(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(denyFirst(2, http.StatusTooManyRequests, 1))
	s.pod("web")
	out, err := s.cluster.Kubectl(s.ctx, "delete", "pod", "web", "-n", s.namespace, "--wait=false")
	if err != nil || strings.Contains(out, "not yet") {
		t.Errorf("%v: %s", err, out)
	}
	got := h.want(s, "DELETE pods", 3)
	for _, gap := range gaps(got) {
		if gap < 950*time.Millisecond {
			t.Errorf("between the reviews: %s", gaps(got))
			break
		}
	}
	if got := s.terminating(); !slices.Equal(got, []string{"web"}) {
		t.Errorf("terminating: %v", got)
	}
}

func TestKubectlDeleteWithoutRetryAfter(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(denyFirst(2, http.StatusTooManyRequests, 0))
	s.pod("web")
	out, err := s.cluster.Kubectl(s.ctx, "delete", "pod", "web", "-n", s.namespace, "--wait=false")
	if err == nil || !strings.Contains(out, "not yet") {
		t.Errorf("%v: %s", err, out)
	}
	h.want(s, "DELETE pods", 1)
}

// F4. The ReplicaSet controller comes back by itself, so a denied scale-down or rollout goes on.
// With Retry-After it waits inside its call and with it one of its 5 workers; without, it requeues
// within milliseconds and ever more slowly, and chooses its victims again, which is why Lameduck
// always sends it.
func TestReplicaSetControllerRetries(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		retryAfter int32
		denials    int
		check      func(t *testing.T, gaps []time.Duration)
	}{
		{"with Retry-After", 1, 2, func(t *testing.T, gaps []time.Duration) {
			if slices.Min(gaps) < 950*time.Millisecond {
				t.Errorf("between the reviews: %s", gaps)
			}
		}},
		{"without", 0, 11, func(t *testing.T, gaps []time.Duration) {
			// 5 ms, doubled each time, up to 5 s here; its own writes to the status bring it back a
			// few times more in the beginning. A call takes a second at most, on a busy machine.
			soonest := slices.Min(gaps[:3])
			if slowest := slices.Max(gaps[5:]); soonest > time.Second || slowest < 1500*time.Millisecond ||
				slowest < 2*soonest {
				t.Errorf("between the reviews: %s", gaps)
			}
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(denyFirst(test.denials, http.StatusTooManyRequests, test.retryAfter))
			sets := s.client.AppsV1().ReplicaSets(s.namespace)
			labels := map[string]string{"app": "web"}
			one := int32(1)
			_, err := sets.Create(s.ctx, &appsv1.ReplicaSet{
				ObjectMeta: metav1.ObjectMeta{Name: "web"},
				Spec: appsv1.ReplicaSetSpec{
					Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels},
					Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
						Spec: podSpec("no-node-for-" + s.namespace)},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			harness.Until(t, time.Minute, "the ReplicaSet has its pod", func() bool {
				set, err := sets.Get(s.ctx, "web", metav1.GetOptions{})
				return err == nil && set.Status.Replicas == 1
			})
			if _, err := sets.Patch(s.ctx, "web", "application/merge-patch+json", []byte(`{"spec":{"replicas":0}}`),
				metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			got := h.wait(s, test.denials+1)
			for _, r := range got {
				if r.what() != "DELETE pods" ||
					r.UserInfo.Username != "system:serviceaccount:kube-system:replicaset-controller" {
					t.Errorf("got %v", r)
				}
			}
			test.check(t, gaps(got))
			harness.Until(t, time.Minute, "the pod is deleted", func() bool { return len(s.terminating()) == 1 })
			h.want(s, "DELETE pods", test.denials+1)
		})
	}
}

// F4. kubectl drain comes back to a pod after a 429: after Retry-After, or else after 5 s. After
// any other code it gives up on that pod, goes on with the others, and fails.
func TestKubectlDrain(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	denied := map[string]*admissionv1.AdmissionResponse{
		"with":    deny(http.StatusTooManyRequests, 1),
		"without": deny(http.StatusTooManyRequests, 0),
	}
	var h *hook
	h = s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		if r.what() != "CREATE pods/eviction" {
			return allow(ctx, r)
		}
		switch {
		case r.Name == "refused":
			return deny(http.StatusForbidden, 0)
		case len(about(h.reviews(), r.Name)) == 1:
			response := *denied[r.Name]
			return &response
		}
		return allow(ctx, r)
	})
	n, name := s.node()
	var pods []*corev1.Pod
	for _, pod := range []string{"with", "without", "refused"} {
		pods = append(pods, s.create(pod, podSpec(name)))
	}
	s.started(n, pods...)
	out, err := s.cluster.Kubectl(s.ctx, "drain", name, "--force", "--timeout=30s")
	if err == nil || !strings.Contains(out, `error when evicting pods/"refused"`) {
		t.Errorf("%v: %s", err, out)
	}
	if strings.Contains(out, `pods/"with"`) {
		t.Errorf("the denial with Retry-After is not silent: %s", out)
	}
	if !strings.Contains(out, `error when evicting pods/"without" -n "`+s.namespace+`" (will retry after 5s)`) {
		t.Errorf("the denial without Retry-After: %s", out)
	}
	for pod, want := range map[string]struct {
		calls int
		gap   time.Duration
	}{"with": {2, time.Second}, "without": {2, 5 * time.Second}, "refused": {1, 0}} {
		got := about(h.reviews(), pod)
		if len(got) != want.calls {
			t.Errorf("%s: %d reviews, want %d", pod, len(got), want.calls)
			continue
		}
		for _, gap := range gaps(got) {
			if gap < want.gap-50*time.Millisecond || gap > want.gap+3*time.Second {
				t.Errorf("%s: came back after %s, want %s", pod, gap, want.gap)
			}
		}
		_, err := s.client.CoreV1().Pods(s.namespace).Get(s.ctx, pod, metav1.GetOptions{})
		if gone := apierrors.IsNotFound(err); gone != (pod != "refused") {
			t.Errorf("%s: gone %t, %v", pod, gone, err)
		}
	}
}

// about are the reviews of evictions of one pod.
func about(reviews []*review, name string) []*review {
	return slices.DeleteFunc(reviews, func(r *review) bool { return r.Name != name || r.SubResource != "eviction" })
}

package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/node"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// F2. A write to a pod during its deletion, also by the handler itself, makes the API server ask
// again, about the new version and by a new request.uid. A handler that starts a hold at each
// call never ends, and one that recognises calls by request.uid takes them for different deletions:
// the pod's UID is all that stays.
func TestWriteDuringDeletionRepeatsReview(t *testing.T) {
	t.Parallel()
	const writes = 3
	s := newScene(t)
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		if r.number <= writes {
			if err := s.touch("web"); err != nil {
				t.Error(err)
			}
		}
		return allow(ctx, r)
	})
	pod := s.pod("web")
	response, message := s.request(http.MethodDelete, s.path("web"), "")
	if response.StatusCode != http.StatusOK {
		t.Fatal(response.Status, message)
	}
	requests, versions := map[string]bool{}, map[string]bool{}
	for _, r := range h.want(s, "DELETE pods", writes+1) {
		if r.pod.UID != pod.UID || r.Name != "web" {
			t.Errorf("about another pod: %v", r)
		}
		if r.concurrent != 1 {
			t.Errorf("while another is being answered: %v", r)
		}
		requests[string(r.UID)], versions[r.pod.ResourceVersion] = true, true
	}
	if len(requests) != writes+1 || len(versions) != writes+1 {
		t.Errorf("%d values of request.uid, %d of resourceVersion", len(requests), len(versions))
	}
}

// F2. A denial is final only if the pod was not written meanwhile; otherwise the API server asks
// once more, within the same request. Lameduck counts denials, and must not count on one per
// request.
func TestWriteDuringDenialRepeatsReview(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(func(context.Context, *review) *admissionv1.AdmissionResponse {
		if err := s.touch("web"); err != nil {
			t.Error(err)
		}
		return deny(http.StatusForbidden, 0)
	})
	s.pod("web")
	if err := s.delete("web", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("got %v", err)
	}
	h.want(s, "DELETE pods", 2)
}

// F3. ?timeout= is how long the API server will wait for this very answer: timeoutSeconds, or what
// the client grants if that is less. Lameduck answers before it, since it is the only warning.
func TestTimeout(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		seconds int32
		query   string
		want    time.Duration
	}{
		{"3 s", 3, "", 3 * time.Second},
		{"5 s", 5, "", 5 * time.Second},
		{"30 s", 30, "", 30 * time.Second},
		{"the client grants less", 30, "?timeout=8s", 8 * time.Second},
		{"the client grants more", 5, "?timeout=60s", 5 * time.Second},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow, func(w *admissionregistrationv1.ValidatingWebhook) { w.TimeoutSeconds = &test.seconds })
			s.pod("web")
			s.request(http.MethodPost, s.path("web/eviction")+test.query,
				`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web"},"deleteOptions":{"dryRun":["All"]}}`)
			s.request(http.MethodDelete, s.path("web")+test.query, "")
			all := h.reviews()
			if len(all) != 2 {
				t.Fatalf("an eviction and a deletion: %v", all)
			}
			least := test.want
			if test.want < time.Duration(test.seconds)*time.Second {
				least -= 3 * time.Second // what a busy machine takes before it asks is taken off it
			}
			for _, r := range all {
				if r.timeout > test.want || r.timeout < least {
					t.Errorf("%v, want %s", r, test.want)
				}
			}
		})
	}
}

// F3. All calls for one request share 34 s. A call that comes again because of F2 has what they
// have left, if that is less than timeoutSeconds, and not timeoutSeconds less what was used. So the
// time to answer is read on each call and never calculated.
func TestTimeoutOfRepeatedReview(t *testing.T) {
	t.Parallel()
	const (
		all  = 34 * time.Second
		hold = 7 * time.Second
	)
	tests := []struct {
		seconds int32
		want    time.Duration
	}{
		{10, 10 * time.Second},
		{30, all - hold},
	}
	for _, test := range tests {
		t.Run(fmt.Sprint(test.seconds), func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
				if r.number == 1 {
					time.Sleep(hold) // the time of a hold is the subject
					if err := s.touch("web"); err != nil {
						t.Error(err)
					}
				}
				return allow(ctx, r)
			}, func(w *admissionregistrationv1.ValidatingWebhook) { w.TimeoutSeconds = &test.seconds })
			s.pod("web")
			if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			got := h.want(s, "DELETE pods", 2)
			if got[0].timeout != time.Duration(test.seconds)*time.Second {
				t.Errorf("the first: %s", got[0].timeout)
			}
			// It is rounded up to seconds, and a busy machine takes some: with 30, fewer than make
			// it the 23 s of timeoutSeconds less what was used.
			if r := got[1]; r.timeout > test.want || r.timeout < test.want-3*time.Second {
				t.Errorf("the second: %s, want %s", r.timeout, test.want)
			}
		})
	}
}

// F3. A webhook that does not answer in time is cut off, which its handler sees as the end of its
// context, and with failurePolicy Ignore the pod is deleted without it. That is why a hold ends
// before its timeout.
func TestNoAnswerIsPermission(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	cut := make(chan time.Duration, 1)
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		<-ctx.Done()
		cut <- time.Since(r.arrived)
		return deny(http.StatusTooManyRequests, 1)
	}, func(w *admissionregistrationv1.ValidatingWebhook) {
		seconds, ignore := int32(3), admissionregistrationv1.Ignore
		w.TimeoutSeconds, w.FailurePolicy = &seconds, &ignore
	})
	s.pod("web")
	if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	h.want(s, "DELETE pods", 1)
	if got := s.terminating(); !slices.Equal(got, []string{"web"}) {
		t.Errorf("terminating: %v", got)
	}
	select {
	case after := <-cut:
		if after < 500*time.Millisecond || after > 5*time.Second {
			t.Errorf("cut off after %s", after)
		}
	case <-s.ctx.Done():
		t.Error("the handler's context does not end")
	}
}

// F8. A DELETECOLLECTION is a review for each pod, of operation DELETE, with a name only in
// oldObject: a handler that takes request.name allows or denies nothing in particular. One after
// the other: each held pod delays all that follow.
func TestDeleteCollectionIsSerial(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		time.Sleep(50 * time.Millisecond) // calls at the same time would meet
		return allow(ctx, r)
	})
	want := []string{"a", "b", "c"}
	for _, name := range want {
		s.pod(name)
	}
	if err := s.client.CoreV1().Pods(s.namespace).DeleteCollection(s.ctx, metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range h.want(s, "DELETE pods", len(want)) {
		if r.Name != "" || r.Namespace != s.namespace || r.concurrent != 1 {
			t.Errorf("%v, %d at once", r, r.concurrent)
		}
		// In the options of a DELETE there is always one; see TestGracePeriodOfReview.
		if r.grace != nil {
			t.Errorf("a grace period that no caller gave: %v", r)
		}
		names = append(names, r.pod.Name)
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// F8. The first denial ends a DELETECOLLECTION: the pods behind it are not even asked about.
func TestDeleteCollectionStopsAtDenial(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(func(context.Context, *review) *admissionv1.AdmissionResponse {
		return deny(http.StatusTooManyRequests, 0)
	})
	for _, name := range []string{"a", "b", "c"} {
		s.pod(name)
	}
	err := s.client.CoreV1().Pods(s.namespace).DeleteCollection(s.ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	if !apierrors.IsTooManyRequests(err) {
		t.Errorf("got %v", err)
	}
	h.want(s, "DELETE pods", 1)
	if got := s.terminating(); len(got) != 0 {
		t.Errorf("terminating: %v", got)
	}
}

// F8. The pods of a deleted namespace go by DELETECOLLECTION of the namespace controller, by which
// Lameduck knows it, at a time when the namespace is already terminating. A denial stops the
// deletion of everything there, until the controller comes back by itself.
func TestNamespaceDeletion(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		namespace, err := s.client.CoreV1().Namespaces().Get(ctx, s.namespace, metav1.GetOptions{})
		if err != nil {
			t.Error(err)
		} else if namespace.DeletionTimestamp == nil || namespace.Status.Phase != corev1.NamespaceTerminating {
			t.Errorf("the namespace is %s", namespace.Status.Phase)
		}
		return denyFirst(1, http.StatusForbidden, 0)(ctx, r)
	})
	want := []string{"a", "b", "c"}
	for _, name := range want {
		s.pod(name)
	}
	if err := s.client.CoreV1().Namespaces().Delete(s.ctx, s.namespace, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	h.wait(s, 1+len(want))
	harness.Until(t, time.Minute, "all are deleted", func() bool { return len(s.terminating()) == len(want) })
	var names []string
	for _, r := range h.reviews() {
		if r.what() != "DELETE pods" || r.Name != "" ||
			r.UserInfo.Username != "system:serviceaccount:kube-system:namespace-controller" {
			t.Errorf("got %v", r)
		}
		names = append(names, r.pod.Name)
	}
	if diff := cmp.Diff([]string{"a", "a", "b", "c"}, names); diff != "" {
		t.Errorf("asked about (-want +got):\n%s", diff)
	}
}

// F9. The API server asks two or three times for each deletion that ends a pod at once: the
// kubelet's last one, and one by force. That is most of what a webhook for pods is asked; the
// matchCondition of Lameduck's webhook configuration spares the kubelet's, and what a force delete
// has left are the calls before the pod has its deletionTimestamp.
func TestImmediateDeletionIsReviewedRepeatedly(t *testing.T) {
	t.Parallel()
	zero := int64(0)
	tests := []struct {
		name        string
		condition   bool
		graceful    bool // deleted with grace before, as when the kubelet comes
		least, most int
	}{
		{"the last delete", false, true, 2, 3},
		{"by force", false, false, 2, 3},
		{"the last delete, matchCondition", true, true, 0, 0},
		{"by force, matchCondition", true, false, 1, 2},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow, func(w *admissionregistrationv1.ValidatingWebhook) {
				if test.condition {
					w.MatchConditions = []admissionregistrationv1.MatchCondition{{Name: "not-terminating",
						Expression: notTerminating}}
				}
			})
			pod := s.pod("web")
			before := 0
			if test.graceful {
				if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				// A deletion that changes nothing is no question.
				if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				before = len(h.want(s, "DELETE pods", 1))
			}
			err := s.delete("web", metav1.DeleteOptions{GracePeriodSeconds: &zero,
				Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
			if err != nil {
				t.Fatal(err)
			}
			last := h.reviews()[before:]
			if len(last) < test.least || len(last) > test.most {
				t.Errorf("%d reviews, want %d to %d: %v", len(last), test.least, test.most, last)
			}
			for i, r := range last {
				if r.grace == nil || *r.grace != 0 {
					t.Errorf("grace is not 0: %v", r)
				}
				if terminating := r.pod.DeletionTimestamp != nil; i == 0 && terminating != test.graceful {
					t.Errorf("the first is about a terminating pod: %t", terminating)
				}
			}
			if _, err := s.client.CoreV1().Pods(s.namespace).Get(s.ctx,
				"web", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("the pod is not gone: %v", err)
			}
		})
	}
}

// F9, with a node: a pod's whole end is one question by its caller, and two or three by the
// kubelet, which this test recognizes by its group. With the matchCondition it is one.
func TestReviewsOfOneTermination(t *testing.T) {
	t.Parallel()
	for _, condition := range []bool{false, true} {
		t.Run(fmt.Sprintf("matchCondition %t", condition), func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow, func(w *admissionregistrationv1.ValidatingWebhook) {
				if condition {
					w.MatchConditions = []admissionregistrationv1.MatchCondition{{Name: "not-terminating",
						Expression: notTerminating}}
				}
			})
			n, name := s.node()
			pod := s.create("web", podSpec(name))
			s.started(n, pod)
			if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Wait(s.ctx, pod.UID, node.Removed); err != nil {
				t.Fatal(err, n.Timeline(pod.UID))
			}
			user, kubelet := 0, 0
			for _, r := range h.reviews() {
				switch {
				case r.pod.UID != pod.UID:
					t.Errorf("about another pod: %v", r)
				case slices.Contains(r.UserInfo.Groups, "system:nodes"):
					kubelet++
				default:
					user++
				}
			}
			if user < 1 || user > 2 { // 2: the node wrote the status meanwhile
				t.Errorf("%d reviews for the user", user)
			}
			if condition && kubelet != 0 || !condition && kubelet != 2 && kubelet != 3 {
				t.Errorf("%d reviews for the kubelet", kubelet)
			}
		})
	}
}

// The options in a review of a DELETE are not those that the client sent: the API server has put in
// the grace period that will hold. So 0 does not mean force, though a deletion by force has it: a
// pod whose own grace period is 0, and one without a node, look the same to Lameduck, which lets
// all of them go.
func TestGracePeriodOfReview(t *testing.T) {
	t.Parallel()
	zero, seven := int64(0), int64(7)
	onNode := func(own *int64) func(*scene) {
		return func(s *scene) {
			s.pod("web", func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = own })
		}
	}
	tests := []struct {
		name   string
		create func(*scene)
		given  *int64
		want   int64
	}{
		{"the default", onNode(nil), nil, 30},
		{"the pod's own", onNode(&seven), nil, 7},
		{"the client's", onNode(nil), &seven, 7},
		{"by force", onNode(nil), &zero, 0},
		{"the pod's own, 0", onNode(&zero), nil, 0},
		{"without a node", func(s *scene) {
			s.create("web", podSpec(""), func(p *corev1.Pod) { p.Spec.SchedulerName = "none" })
		}, nil, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow)
			test.create(s)
			if err := s.delete("web", metav1.DeleteOptions{GracePeriodSeconds: test.given}); err != nil {
				t.Fatal(err)
			}
			for _, r := range h.reviews() {
				if r.grace == nil || *r.grace != test.want {
					t.Errorf("got %v, want grace %d", r, test.want)
				}
			}
			if len(h.reviews()) == 0 {
				t.Error("no review")
			}
		})
	}
}

// F12. Webhooks are asked in parallel, and one that denies late undoes what ours has allowed:
// "acknowledged by all" is not "deleted". Lameduck believes a deletionTimestamp and nothing else.
func TestLateDenialOfOther(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	arrived, allowed := make(chan struct{}), make(chan struct{})
	await := func(ctx context.Context, what <-chan struct{}) {
		select {
		case <-what:
		case <-ctx.Done():
			t.Error("the other webhook was not called at the same time")
		}
	}
	ours := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		await(ctx, arrived)
		defer close(allowed)
		return allow(ctx, r)
	})
	other := s.hook(func(ctx context.Context, _ *review) *admissionv1.AdmissionResponse {
		close(arrived)
		await(ctx, allowed)
		time.Sleep(100 * time.Millisecond) // for our answer to get there
		return deny(http.StatusForbidden, 0)
	})
	s.pod("web")
	if err := s.delete("web", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("got %v", err)
	}
	ours.want(s, "DELETE pods", 1)
	other.want(s, "DELETE pods", 1)
	if got := s.terminating(); len(got) != 0 {
		t.Errorf("terminating: %v", got)
	}
}

// F12. When the caller gives up, the review ends and the pod stays, whatever the webhook says then.
func TestCallerGivesUp(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	ctx, giveUp := context.WithCancel(s.ctx)
	defer giveUp()
	left := make(chan struct{})
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		defer close(left)
		giveUp()
		<-ctx.Done()
		return allow(ctx, r)
	})
	s.pod("web")
	err := s.client.CoreV1().Pods(s.namespace).Delete(ctx, "web", metav1.DeleteOptions{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	select {
	case <-left:
	case <-s.ctx.Done():
		t.Error("the handler's context does not end")
	}
	h.want(s, "DELETE pods", 1)
	if got := s.terminating(); len(got) != 0 {
		t.Errorf("terminating: %v", got)
	}
}

package apiserver_test

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// F1. An eviction is one review of pods/eviction, and none of the deletion that follows from it:
// without a rule of its own in the webhook configuration a drained node would delete its pods
// unasked. It brings no pod, so the handler reads that from its cache.
func TestEvictionIsNotReviewedAsDeletion(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(allow)
	s.pod("running")
	// which no budget counts: another path through the API server
	s.create("pending", podSpec("no-node-for-"+s.namespace))
	for i, name := range []string{"running", "pending"} {
		if err := s.evict(name, nil); err != nil {
			t.Fatal(err)
		}
		r := h.want(s, "CREATE pods/eviction", i+1)[i]
		if r.Name != name || r.Namespace != s.namespace || r.eviction.Name != name {
			t.Errorf("the eviction of %s: %v, object %v", name, r, r.eviction)
		}
		if r.pod != nil {
			t.Errorf("the eviction of %s brings the pod", name)
		}
		if r.eviction.DeleteOptions != nil {
			t.Errorf("the eviction of %s: deleteOptions %v, though the client gave none", name,
				r.eviction.DeleteOptions)
		}
	}
	if diff := cmp.Diff([]string{"pending", "running"}, s.terminating()); diff != "" {
		t.Errorf("terminating (-want +got):\n%s", diff)
	}
}

// F1. A dry run of an eviction stands in deleteOptions or in the request, and one is enough. What
// stands in deleteOptions never shows in request.dryRun, and the reverse only if there are
// deleteOptions at all. A handler that reads one of them drains pods that stay.
func TestDryRunOfEviction(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, query, options string
		request, eviction    bool // who says that it is one
	}{
		{"none", "", `{}`, false, false},
		{"in deleteOptions", "", `{"dryRun":["All"]}`, false, true},
		{"in the query, no deleteOptions", "?dryRun=All", `null`, true, false},
		{"in the query, deleteOptions", "?dryRun=All", `{"gracePeriodSeconds":7}`, true, true}, // it is copied
		{"in both", "?dryRun=All", `{"dryRun":["All"]}`, true, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow)
			s.pod("web")
			response, message := s.request(http.MethodPost, s.path("web/eviction")+test.query, fmt.Sprintf(
				`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web"},"deleteOptions":%s}`,
				test.options))
			if response.StatusCode != http.StatusCreated {
				t.Fatal(response.Status, message)
			}
			r := h.want(s, "CREATE pods/eviction", 1)[0]
			if *r.DryRun != test.request {
				t.Errorf("request.dryRun is %t", *r.DryRun)
			}
			options := r.eviction.DeleteOptions
			if got := options != nil && len(options.DryRun) != 0; got != test.eviction {
				t.Errorf("deleteOptions: %v", options)
			}
			if stays := len(s.terminating()) == 0; stays != (test.request || test.eviction) {
				t.Errorf("the pod stays: %t", stays)
			}
		})
	}
}

// F1. An Eviction of policy/v1beta1, which older clients send, arrives as one of policy/v1, by the
// same rule.
func TestEvictionVersions(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"v1", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			h := s.hook(allow)
			s.pod("web")
			response, message := s.request(http.MethodPost, s.path("web/eviction"), fmt.Sprintf(
				`{"apiVersion":"policy/%s","kind":"Eviction","metadata":{"name":"web"},"deleteOptions":{"gracePeriodSeconds":7}}`, version))
			if response.StatusCode != http.StatusCreated {
				t.Fatal(response.Status, message)
			}
			r := h.want(s, "CREATE pods/eviction", 1)[0]
			if r.Kind.Version != "v1" || r.eviction.APIVersion != "policy/v1" {
				t.Errorf("request.kind %s, object %s", r.Kind, r.eviction.APIVersion)
			}
			if o := r.eviction.DeleteOptions; o == nil || o.GracePeriodSeconds == nil || *o.GracePeriodSeconds != 7 {
				t.Errorf("deleteOptions: %v", o)
			}
		})
	}
}

// F10. The webhook is asked before the budget. A handler that drains every pod it is asked about
// takes the traffic from pods that the budget then keeps.
func TestEvictionIsReviewedBeforeBudget(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(allow)
	pod := s.pod("web")
	none := intstr.FromInt32(0)
	_, err := s.client.PolicyV1().PodDisruptionBudgets(s.namespace).Create(s.ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &none,
			Selector: &metav1.LabelSelector{MatchLabels: pod.Labels}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	response, message := s.request(http.MethodPost, s.path("web/eviction"),
		`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web"}}`)
	if response.StatusCode != http.StatusTooManyRequests {
		t.Errorf("%s %s, want the budget's 429", response.Status, message)
	}
	h.want(s, "CREATE pods/eviction", 1)
	if got := s.terminating(); len(got) != 0 {
		t.Errorf("terminating: %v", got)
	}
}

// F11. An objectSelector is compared with the labels of the Eviction, of which it usually has none.
// Were Lameduck's webhook configuration to select pods by one, evictions would pass it by.
func TestObjectSelectorSeesEviction(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	h := s.hook(allow, func(w *admissionregistrationv1.ValidatingWebhook) {
		w.ObjectSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	})
	s.pod("web") // labelled so
	if err := s.evict("web", &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Fatal(err)
	}
	h.want(s, "", 0)
	response, message := s.request(http.MethodPost, s.path("web/eviction")+"?dryRun=All",
		`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web","labels":{"app":"web"}}}`)
	if response.StatusCode != http.StatusCreated {
		t.Fatal(response.Status, message)
	}
	h.want(s, "CREATE pods/eviction", 1)
	if err := s.delete("web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if all := h.reviews(); len(all) != 2 || all[1].what() != "DELETE pods" {
		t.Errorf("a deletion after them: %v", all)
	}
	if got := s.terminating(); !slices.Equal(got, []string{"web"}) {
		t.Errorf("terminating: %v", got)
	}
}

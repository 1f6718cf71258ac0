package admission

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/lameduck-io/lameduck/internal/keys"
)

// creationOf is the review of a new pod, with fields that the types here do not know.
func creationOf(t *testing.T, namespace string, pod *corev1.Pod) string {
	t.Helper()
	object, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	newer := strings.Replace(string(object), `"spec":{`, `"spec":{"newer":{"a":1},`, 1)
	return `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","resource":{"group":"","version":"v1","resource":"pods"},"operation":"CREATE","namespace":"` +
		namespace + `","object":` + newer + `}}`
}

func newMutator(registry *prometheus.Registry) *Mutator {
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop",
		Labels: map[string]string{keys.Mode: keys.Enforce}}}
	return &Mutator{
		Reader: fake.NewClientBuilder().WithObjects(shop).Build(), Services: func() bool { return true },
		Excluded: []string{"lameduck-system"},
		Barrier:  testBarrier,
		Log:      slog.New(slog.DiscardHandler), Metrics: NewMetrics(registry),
	}
}

func post(h http.Handler, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, MutatePath+"secret?timeout=2s", bytes.NewBufferString(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// Each pod gets an id of its own, names it nowhere else, and what is not understood stays.
func TestMutator(t *testing.T) {
	registry := prometheus.NewRegistry()
	m := newMutator(registry)
	ids := map[string]bool{}
	for range 2 {
		w := post(m, creationOf(t, "shop", webPod()))
		var review admissionv1.AdmissionReview
		if err := json.Unmarshal(w.Body.Bytes(), &review); err != nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		r := review.Response
		if !r.Allowed || r.UID != "u" || r.PatchType == nil || *r.PatchType != admissionv1.PatchTypeJSONPatch {
			t.Fatalf("response %+v", r)
		}
		if strings.Contains(string(r.Patch), "newer") {
			t.Errorf("the patch touches what it does not know: %s", r.Patch)
		}
		var patch []operation
		if err := json.Unmarshal(r.Patch, &patch); err != nil {
			t.Fatal(err)
		}
		for _, o := range patch {
			if o.Path == "/metadata/annotations" {
				id, _ := o.Value.(map[string]any)[keys.BarrierID].(string)
				if text, of := strings.CutPrefix(id, "shop."); !of || len(text) != 26 || ids[id] {
					t.Errorf("id %q, want the namespace, a dot and 26 new characters", id)
				}
				ids[id] = true
			}
		}
	}
	if len(ids) != 2 {
		t.Errorf("ids %v, want two", ids)
	}
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w,
		httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if want := `lameduck_admission_mutations_total{coverage="Covered"} 2`; !strings.Contains(w.Body.String(), want) {
		t.Errorf("metrics lack %s", want)
	}
	w = post(m, creationOf(t, "lameduck-system", webPod()))
	if strings.Contains(w.Body.String(), "patch") || !strings.Contains(w.Body.String(), `"allowed":true`) {
		t.Errorf("in an excluded namespace: %s", w.Body)
	}
	// The cache has not heard of it, but the API server has sent it here because of its labels.
	if w := post(m, creationOf(t, "brand-new", webPod())); !strings.Contains(w.Body.String(), "patch") {
		t.Errorf("in a new namespace: %s", w.Body)
	}
}

// A load balancer may need minutes, and other pods of the cluster should not get a grace period of
// that length: the bound is that of the pod's Services or its namespace, where they say one.
func TestBoundOfANamespaceAndItsServices(t *testing.T) {
	bound := func(text string) map[string]string { return map[string]string{keys.BarrierBound: text} }
	service := func(namespace, name, text string, selector map[string]string) client.Object {
		return &corev1.Service{Spec: corev1.ServiceSpec{Selector: selector},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: bound(text)}}
	}
	web := map[string]string{"app": "web"}
	public, inner := service("shop", "public", "5m", web), service("shop", "inner", "10s", web)
	other, none := service("shop", "api", "5m", map[string]string{"app": "api"}), service("shop", "none", "5m", nil)
	elsewhere, unclear := service("bank", "web", "5m", web), service("shop", "unclear", "minutes", web)
	for name, c := range map[string]struct {
		namespace string
		objects   []client.Object
		unsynced  bool
		want      time.Duration
	}{
		"nothing":                        {"", nil, false, 30 * time.Second},
		"the namespace":                  {"90s", nil, false, 90 * time.Second},
		"a shorter one":                  {"10s", nil, false, 10 * time.Second},
		"the longest of its Services":    {"90s", []client.Object{public, inner}, false, 5 * time.Minute},
		"a Service before the namespace": {"90s", []client.Object{inner}, false, 10 * time.Second},
		"no Service selects it":          {"", []client.Object{other, none, elsewhere}, false, 30 * time.Second},
		"not a duration":                 {"long", []client.Object{unclear}, false, 30 * time.Second},
		"too long":                       {"11m", nil, false, 30 * time.Second},
		"not in whole seconds":           {"1500ms", nil, false, 30 * time.Second},
		"Services are not read":          {"90s", []client.Object{public}, true, 90 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop",
				Labels: map[string]string{keys.Mode: keys.Enforce}}}
			if c.namespace != "" {
				shop.Annotations = bound(c.namespace)
			}
			m := newMutator(prometheus.NewRegistry())
			m.Reader = fake.NewClientBuilder().WithObjects(append(c.objects, shop)...).Build()
			m.Services = func() bool { return !c.unsynced }
			pod := webPod()
			pod.Labels = web
			w := post(m, creationOf(t, "shop", pod))
			var review admissionv1.AdmissionReview
			var patch []operation
			if err := json.Unmarshal(w.Body.Bytes(), &review); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(review.Response.Patch, &patch); err != nil {
				t.Fatal(err)
			}
			var got string
			var grace float64
			for _, o := range patch {
				if o.Path == "/metadata/annotations" {
					got, _ = o.Value.(map[string]any)[keys.BarrierBound].(string)
				}
				if o.Path == "/spec/terminationGracePeriodSeconds" {
					grace, _ = o.Value.(float64)
				}
			}
			if d, err := time.ParseDuration(got); err != nil || d != c.want || grace != c.want.Seconds()+30 {
				t.Errorf("bound %q, grace %v, want %s and 30 s more", got, grace, c.want)
			}
		})
	}
}

func TestMutatorRefuses(t *testing.T) {
	m := newMutator(prometheus.NewRegistry())
	good := creationOf(t, "shop", webPod())
	for _, c := range []struct {
		name, body string
		code       int
	}{
		{"not JSON", "{", 400},
		{"another kind", strings.Replace(good, "AdmissionReview", "Pod", 1), 400},
		{"another version", strings.Replace(good, "admission.k8s.io/v1", "admission.k8s.io/v1beta1", 1), 400},
		{"another operation", strings.Replace(good, "CREATE", "DELETE", 1), 400},
		{"another resource", strings.Replace(good, `"resource":"pods"`, `"resource":"services"`, 1), 400},
		{"no uid", strings.Replace(good, `"uid":"u"`, `"uid":""`, 1), 400},
		{"no containers", creationOf(t, "shop", &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}}),
			400},
		{"too large", good + strings.Repeat(" ", maxReview), 413},
	} {
		if w := post(m, c.body); w.Code != c.code {
			t.Errorf("%s: %d %s, want %d", c.name, w.Code, w.Body, c.code)
		}
	}
	w := httptest.NewRecorder()
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, MutatePath, nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d", w.Code)
	}
}

// Whatever is posted, the answer is a review or a 4xx.
func FuzzMutator(f *testing.F) {
	f.Add(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","resource":{"resource":"pods"},"operation":"CREATE","namespace":"shop","object":{"kind":"Pod","spec":{"containers":[{"name":"a","lifecycle":{"preStop":{"httpGet":{"port":"x"}}}}]}}}}`)
	m := newMutator(prometheus.NewRegistry())
	f.Fuzz(func(t *testing.T, body string) {
		w := post(m, body)
		if w.Code >= 500 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}

// What was created while no coordinator answered has neither the hook nor a word about it, and
// looks like any other pod.
func TestPodsThatMissedTheBarrierAreFound(t *testing.T) {
	w := newWorld(t)
	w.ns.Labels[keys.Mode] = keys.Enforce
	pod := func(name string, set func(*corev1.Pod)) {
		p := runningPod(name)
		set(p)
		w.reader.objects = append(w.reader.objects, p)
	}
	pod("covered", func(p *corev1.Pod) { p.Annotations[keys.BarrierID] = "id" })
	pod("uncoverable", func(p *corev1.Pod) { p.Annotations[keys.BarrierUncovered] = "app" })
	pod("opted-out", func(p *corev1.Pod) { p.Labels[keys.Mode] = keys.Off })
	pod("host", func(p *corev1.Pod) { p.Spec.HostNetwork = true })
	pod("terminating", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()} })
	pod("finished", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
	pod("elsewhere", func(p *corev1.Pod) { p.Namespace = "other" })
	pod("opted-in", func(p *corev1.Pod) { p.Namespace, p.Labels[keys.Mode] = "other", keys.Enforce })
	other := w.ns.DeepCopy()
	other.Name, other.Labels = "other", nil
	w.reader.objects = append(w.reader.objects, other)
	m := &Mutator{Reader: w.reader}
	if got, err := m.Missing(t.Context()); err != nil ||
		!slices.Equal(got, []string{"other/opted-in", "shop/a", "shop/b"}) {
		t.Errorf("missing %q, %v", got, err)
	}
}

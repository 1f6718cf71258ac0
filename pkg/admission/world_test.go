package admission

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
)

var webService = types.NamespacedName{Namespace: "shop", Name: "web"}

// reader is a cache. It fails on what broken names: a kind. If it hangs, no Get is answered.
type reader struct {
	objects []client.Object
	broken  string
	hangs   bool
}

func (r *reader) fails(kind string) error {
	if r.broken == kind {
		return fmt.Errorf("the cache of %s is broken", kind)
	}
	return nil
}

func (r *reader) Get(ctx context.Context, key types.NamespacedName, into client.Object, _ ...client.GetOption) error {
	if r.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	kind := fmt.Sprintf("%T", into)
	if err := r.fails(kind); err != nil {
		return err
	}
	for _, o := range r.objects {
		if fmt.Sprintf("%T", o) != kind || client.ObjectKeyFromObject(o) != key {
			continue
		}
		switch into := into.(type) {
		case *corev1.Pod:
			o.(*corev1.Pod).DeepCopyInto(into)
		case *corev1.Node:
			o.(*corev1.Node).DeepCopyInto(into)
		case *corev1.Namespace:
			o.(*corev1.Namespace).DeepCopyInto(into)
		case *corev1.Service:
			o.(*corev1.Service).DeepCopyInto(into)
		default:
			panic("a Get of " + kind)
		}
		return nil
	}
	return apierrors.NewNotFound(schema.GroupResource{Resource: kind}, key.Name)
}

func (r *reader) List(_ context.Context, into client.ObjectList, options ...client.ListOption) error {
	if err := r.fails(fmt.Sprintf("%T", into)); err != nil {
		return err
	}
	var o client.ListOptions
	o.ApplyOptions(options)
	selector := o.LabelSelector
	if selector == nil {
		selector = labels.Everything()
	}
	for _, object := range r.objects {
		if o.Namespace != "" && object.GetNamespace() != o.Namespace ||
			!selector.Matches(labels.Set(object.GetLabels())) {
			continue
		}
		switch into := into.(type) {
		case *corev1.PodList:
			if pod, ok := object.(*corev1.Pod); ok {
				into.Items = append(into.Items, *pod)
			}
		case *corev1.ServiceList:
			if service, ok := object.(*corev1.Service); ok {
				into.Items = append(into.Items, *service)
			}
		case *policyv1.PodDisruptionBudgetList:
			if budget, ok := object.(*policyv1.PodDisruptionBudget); ok {
				into.Items = append(into.Items, *budget)
			}
		default:
			panic(fmt.Sprintf("a List of %T", into))
		}
	}
	return nil
}

// listings is a Slices.
type listings struct {
	of     map[health.UID][]endpoints.Listing
	usable map[types.NamespacedName][]health.UID
}

func (l *listings) Pod(_ time.Time, _ string, uid health.UID) []endpoints.Listing { return l.of[uid] }
func (l *listings) Usable(service types.NamespacedName) []health.UID              { return l.usable[service] }

// ledger is a Ledger that writes down each call that changes something.
type ledger struct {
	mu       sync.Mutex
	calls    []string
	expected int
	routed   []drain.Service
	draining map[drain.UID]time.Time
	queued   map[drain.UID]bool
	relied   bool
	refused  int
	hooks    coordinator.Hooks
	// decided are the calls of Decided.
	decided []string
	// requests are those that came with the calls.
	requests []coordinator.Request
	// answer is what Drain returns.
	answer func(until time.Time) (drain.Status, bool, error)
}

func (l *ledger) Drain(_ context.Context, r coordinator.Request, until time.Time) (drain.Status, bool, error) {
	l.note("drain", r)
	return l.answer(until)
}

func (l *ledger) Unroute(r coordinator.Request) { l.note("unroute", r) }

func (l *ledger) Observe(r coordinator.Request, targets []netip.AddrPort, young time.Duration) {
	l.note(fmt.Sprint("observe ", targets, " young for ", young.Round(time.Second)), r)
}

func (l *ledger) Claim(r coordinator.Request) (drain.Status, error) {
	l.note("claim", r)
	l.mu.Lock()
	if _, is := l.draining[r.Pod.UID]; !is {
		l.draining[r.Pod.UID] = time.Now()
	}
	l.mu.Unlock()
	status, _, err := l.answer(time.Now())
	return status, err
}

func (l *ledger) ReliedOn(drain.UID) bool { return l.relied }

func (l *ledger) Decided(uid drain.UID, allowed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.decided = append(l.decided, fmt.Sprint(uid, " ", allowed))
}

func (l *ledger) note(what string, r coordinator.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	services := []drain.Service{}
	for _, t := range r.Targets {
		services = append(services, t.Service)
	}
	l.calls = append(l.calls, fmt.Sprintf("%s %s %s %s", what, r.Pod, r.Pod.UID, services))
	l.requests = append(l.requests, r)
}

func (l *ledger) Hooks(node, workload string) coordinator.Hooks {
	if node != "node-1" || workload == "" {
		return coordinator.Hooks{}
	}
	return l.hooks
}

func (l *ledger) Expecting() (int, int) { return l.expected, 0 }

func (l *ledger) CouldRoute(services []drain.Service) bool {
	return slices.ContainsFunc(services, func(s drain.Service) bool { return slices.Contains(l.routed, s) })
}

func (l *ledger) Ahead(r coordinator.Request, others []drain.UID, allowed int, claim bool) (ahead int) {
	l.mu.Lock()
	for _, uid := range others {
		if _, draining := l.draining[uid]; draining {
			ahead++
		}
	}
	if _, draining := l.draining[r.Pod.UID]; draining || ahead < allowed {
		ahead = -1
	}
	if claim = claim && ahead < 0; claim {
		l.draining[r.Pod.UID] = cmp.Or(l.draining[r.Pod.UID], time.Now())
	}
	l.mu.Unlock()
	if claim {
		l.Claim(r)
	}
	return ahead
}

func (l *ledger) Pod(uid drain.UID) drain.Standing {
	l.mu.Lock()
	defer l.mu.Unlock()
	since, draining := l.draining[uid]
	is := drain.Standing{Draining: draining, Since: since, Queued: l.queued[uid]}
	for range l.refused {
		is.Refused = append(is.Refused, time.Now())
	}
	return is
}

func (l *ledger) Draining(pods []drain.UID) int {
	return len(slices.DeleteFunc(slices.Clone(pods), func(uid drain.UID) bool {
		at := l.Pod(uid)
		return !at.Draining || at.Queued
	}))
}

// happening is an Event.
type happening struct {
	pod             string
	warning         bool
	reason, message string
}

// world is a handler in a cluster with the Service shop/web of the pods a and b, both ready, one
// agent that routes it, and a drain that is acknowledged.
type world struct {
	*Handler
	t        *testing.T
	reader   *reader
	slices   *listings
	ledger   *ledger
	registry *prometheus.Registry
	events   []happening
	cold     bool
	a, b     *corev1.Pod
	ns       *corev1.Namespace
	node     *corev1.Node
}

func (w *world) Event(pod *corev1.Pod, warning bool, reason, message string) {
	w.events = append(w.events, happening{pod.Namespace + "/" + pod.Name, warning, reason, message})
}

// alone is a cluster with one replica, whose gateways all have an agent.
type alone struct{}

func (alone) Opener() bool { return true }
func (alone) Claim(context.Context, wire.Claim) (claimed wire.Claimed, ok bool) {
	return claimed, false
}
func (alone) Asked(context.Context, drain.Pod, time.Duration) bool               { return false }
func (alone) Uncovered(context.Context, []drain.Service, bool) ([]string, error) { return nil, nil }

func runningPod(name string) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid-" + name),
			Labels: map[string]string{"app": "web"}, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{NodeName: "node-1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))},
		}},
	}
}

func newWorld(t *testing.T) *world {
	w := &world{
		t: t, a: runningPod("a"), b: runningPod("b"), registry: prometheus.NewRegistry(),
		ns: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{}}},
		node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
			}}},
		slices: &listings{
			of: map[health.UID][]endpoints.Listing{
				"uid-a": {{Service: webService, Ready: true}},
				"uid-b": {{Service: webService, Ready: true}},
			},
			usable: map[types.NamespacedName][]health.UID{webService: {"uid-a", "uid-b"}},
		},
		ledger: &ledger{expected: 1, routed: []drain.Service{{Namespace: "shop", Name: "web"}},
			draining: map[drain.UID]time.Time{}},
	}
	w.reader = &reader{objects: []client.Object{w.a, w.b, w.ns, w.node}}
	w.Handler = &Handler{
		Cluster: &Cluster{
			Reader: w.reader, Slices: w.slices, Ledger: w.ledger, Synced: func() bool { return !w.cold },
			Excluded: []string{"kube-system", "lameduck"}, Started: time.Now().Add(-time.Hour), Coverage: alone{},
		},
		Times: drain.DefaultTimes(), Events: w, Log: slog.New(slog.DiscardHandler), Metrics: NewMetrics(w.registry),
		Others: alone{},
	}
	w.status(drain.Released, drain.Acknowledged, 0, true, nil)
	return w
}

// status sets what a drain that was asked for returns, if it began elapsed ago.
func (w *world) status(phase drain.Phase, reason drain.Reason, elapsed time.Duration, held bool, err error,
	waiting ...drain.Waiting) {
	if phase == drain.Queued || phase == drain.Unrouting || phase == drain.Quiescing {
		w.Handler.Times.Hold = time.Nanosecond // the status comes at once, and the call is to be over then
	}
	w.ledger.answer = func(time.Time) (drain.Status, bool, error) {
		since := time.Now().Add(-elapsed)
		return drain.Status{
			Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, Phase: phase, Reason: reason, Since: since,
			Begun:    since,
			Deadline: since.Add(30 * time.Second), Owed: 2, Waiting: waiting,
		}, held, err
	}
}

// deletion is the review of a DELETE of the pod, by a person.
func deletion(pod *corev1.Pod, set ...func(*admissionv1.AdmissionRequest)) *admissionv1.AdmissionReview {
	raw, err := json.Marshal(pod)
	if err != nil {
		panic(err)
	}
	return review(&admissionv1.AdmissionRequest{
		Namespace: pod.Namespace, Name: pod.Name, Operation: admissionv1.Delete,
		Resource:  metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
		OldObject: rawOf(raw), Options: rawOf([]byte(`{"kind":"DeleteOptions","apiVersion":"meta.k8s.io/v1"}`)),
	}, set...)
}

// eviction is the review of an Eviction of the pod, with these deleteOptions as JSON.
func eviction(pod *corev1.Pod, version, options string,
	set ...func(*admissionv1.AdmissionRequest)) *admissionv1.AdmissionReview {
	if options == "" {
		options = "null"
	}
	raw := fmt.Sprintf(`{"apiVersion":%q,"kind":"Eviction","metadata":{"name":%q,"namespace":%q},"deleteOptions":%s}`,
		version, pod.Name, pod.Namespace, options)
	return review(&admissionv1.AdmissionRequest{
		Namespace: pod.Namespace, Name: pod.Name, Operation: admissionv1.Create, SubResource: "eviction",
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
		Object:   rawOf([]byte(raw)), Options: rawOf([]byte(`{"kind":"CreateOptions","apiVersion":"meta.k8s.io/v1"}`)),
	}, set...)
}

func review(request *admissionv1.AdmissionRequest,
	set ...func(*admissionv1.AdmissionRequest)) *admissionv1.AdmissionReview {
	request.UID = "review-1"
	request.UserInfo.Username = "jane"
	for _, s := range set {
		s(request)
	}
	r := &admissionv1.AdmissionReview{Request: request}
	r.SetGroupVersionKind(admissionv1.SchemeGroupVersion.WithKind("AdmissionReview"))
	return r
}

func by(username string, groups ...string) func(*admissionv1.AdmissionRequest) {
	return func(r *admissionv1.AdmissionRequest) { r.UserInfo.Username, r.UserInfo.Groups = username, groups }
}

func options(text string) func(*admissionv1.AdmissionRequest) {
	return func(r *admissionv1.AdmissionRequest) { r.Options = rawOf([]byte(text)) }
}

// post sends a body and returns the answer.
func (w *world) post(body, query string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/v1/admit"+query, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	recorder := httptest.NewRecorder()
	w.ServeHTTP(recorder, r)
	return recorder
}

// ask sends a review and returns the response in the answer.
func (w *world) ask(review *admissionv1.AdmissionReview) *admissionv1.AdmissionResponse {
	w.t.Helper()
	body, err := json.Marshal(review)
	if err != nil {
		w.t.Fatal(err)
	}
	recorder := w.post(string(body), "?timeout=5s")
	var answer admissionv1.AdmissionReview
	if recorder.Code != http.StatusOK || json.Unmarshal(recorder.Body.Bytes(), &answer) != nil ||
		answer.Response == nil {
		w.t.Fatalf("%d %s", recorder.Code, recorder.Body)
	}
	if answer.APIVersion != "admission.k8s.io/v1" || answer.Kind != "AdmissionReview" ||
		answer.Response.UID != "review-1" {
		w.t.Errorf("the answer is a %s of %s for %q", answer.Kind, answer.APIVersion, answer.Response.UID)
	}
	return answer.Response
}

// counted returns every series of answers that is not 0, as "delete allow Acknowledged 1".
func (w *world) counted() []string {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	var all []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			value := m.GetCounter().GetValue()
			if value == 0 {
				continue
			}
			label := map[string]string{}
			for _, l := range m.GetLabel() {
				label[l.GetName()] = l.GetValue()
			}
			switch f.GetName() {
			case "lameduck_admission_answers_total":
				all = append(all, fmt.Sprintf("%s %s %s %v", label["operation"], label["answer"], label["reason"],
					value))
			case "lameduck_admission_malformed_total":
				all = append(all, fmt.Sprintf("malformed %s %v", label["code"], value))
			}
		}
	}
	return all
}

func rawOf(text []byte) (raw runtime.RawExtension) { raw.Raw = text; return raw }

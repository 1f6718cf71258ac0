package apiserver_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
)

// notTerminating is the matchCondition of manifests/base/webhook-configuration.yaml.
const notTerminating = "request.operation != 'DELETE' || oldObject == null || " +
	"!has(oldObject.metadata.deletionTimestamp)"

// review is one call of a webhook.
type review struct {
	*admissionv1.AdmissionRequest

	number     int           // from 1, in the order of arrival
	arrived    time.Time     // when its body was read
	timeout    time.Duration // of the URL
	concurrent int           // how many were being answered at that time, this one included

	pod      *corev1.Pod        // oldObject, nil if there is none
	eviction *policyv1.Eviction // object, nil if that is none
	grace    *int64             // gracePeriodSeconds of the options, which an eviction has elsewhere
}

// String is what a table of reviews has in a line.
func (r *review) String() string {
	grace := "none"
	if r.grace != nil {
		grace = fmt.Sprint(*r.grace)
	}
	deleted := r.pod != nil && r.pod.DeletionTimestamp != nil
	return fmt.Sprintf("%d: %s %s/%s name=%q uid=%s dryRun=%t timeout=%s grace=%s terminating=%t by %s", r.number,
		r.Operation,
		r.Resource.Resource, r.SubResource, r.Name, r.UID, *r.DryRun, r.timeout, grace, deleted, r.UserInfo.Username)
}

// what is the operation and what it is applied to: DELETE pods, CREATE pods/eviction.
func (r *review) what() string {
	return strings.TrimSuffix(fmt.Sprintf("%s %s/%s", r.Operation, r.Resource.Resource, r.SubResource), "/")
}

// An answer decides a review. It may take its time; ctx ends when the API server no longer waits.
type answer func(ctx context.Context, r *review) *admissionv1.AdmissionResponse

func allow(context.Context, *review) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Allowed: true}
}

// deny is a denial. With retryAfter 0 it does not say when to come back.
func deny(code, retryAfter int32) *admissionv1.AdmissionResponse {
	status := &metav1.Status{Code: code, Message: "not yet"}
	switch code {
	case http.StatusTooManyRequests:
		status.Reason = metav1.StatusReasonTooManyRequests
	case http.StatusForbidden:
		status.Reason = metav1.StatusReasonForbidden
	}
	if retryAfter != 0 {
		status.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfter}
	}
	return &admissionv1.AdmissionResponse{Result: status}
}

// denyFirst denies the first n reviews.
func denyFirst(n int, code, retryAfter int32) answer {
	return func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		if r.number <= n {
			return deny(code, retryAfter)
		}
		return allow(ctx, r)
	}
}

// authority signs the certificates of all webhooks.
var authority = sync.OnceValues(cluster.NewCA)

// hook is a webhook for the deletions and evictions of pods in the namespace of one test. It
// records each review.
type hook struct {
	answer answer

	mu       sync.Mutex
	received []*review
	current  int
	arrival  chan struct{} // closed and replaced when a review arrives

	ready     chan struct{} // closed when the API server has called
	readyOnce sync.Once
}

// hook starts a webhook and registers it. When hook returns the API server calls it. Edits change
// what is registered.
func (s *scene) hook(answer answer, edit ...func(*admissionregistrationv1.ValidatingWebhook)) *hook {
	s.t.Helper()
	h := &hook{answer: answer, arrival: make(chan struct{}), ready: make(chan struct{})}
	address, ca := h.serve(s.t)

	effects := admissionregistrationv1.SideEffectClassNoneOnDryRun
	fail := admissionregistrationv1.Fail // a hook that is broken must not look like one that allows
	scope := admissionregistrationv1.NamespacedScope
	seconds := int32(10)
	webhook := func(name, url string,
		rules ...admissionregistrationv1.RuleWithOperations) admissionregistrationv1.ValidatingWebhook {
		return admissionregistrationv1.ValidatingWebhook{
			Name: name, SideEffects: &effects, FailurePolicy: &fail, TimeoutSeconds: &seconds, Rules: rules,
			AdmissionReviewVersions: []string{"v1"},
			ClientConfig:            admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: ca},
			NamespaceSelector: &metav1.LabelSelector{
				MatchLabels: map[string]string{corev1.LabelMetadataName: s.namespace}},
		}
	}
	rule := func(operation admissionregistrationv1.OperationType,
		resource string) admissionregistrationv1.RuleWithOperations {
		return admissionregistrationv1.RuleWithOperations{
			Operations: []admissionregistrationv1.OperationType{operation},
			Rule: admissionregistrationv1.Rule{
				APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{resource}, Scope: &scope,
			},
		}
	}
	main := webhook("pods.lameduck.test", address+"/review",
		rule(admissionregistrationv1.Delete, "pods"), rule(admissionregistrationv1.Create, "pods/eviction"))
	for _, e := range edit {
		e(&main)
	}
	configurations := s.client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	made, err := configurations.Create(s.ctx, &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{GenerateName: s.namespace + "-"},
		// The second is called as soon as the first is.
		Webhooks: []admissionregistrationv1.ValidatingWebhook{main, webhook("ready.lameduck.test", address+"/ready",
			rule(admissionregistrationv1.Create, "configmaps"))},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { // before the server stops
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := configurations.Delete(ctx, made.Name, metav1.DeleteOptions{}); err != nil {
			s.t.Error(err)
		}
	})
	// The API server learns of it by a watch, and does not show when it has.
	for {
		_, err := s.client.CoreV1().ConfigMaps(s.namespace).Create(s.ctx,
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "ready-"}},
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			s.t.Fatal(err)
		}
		select {
		case <-h.ready:
			return h
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (h *hook) serve(t *testing.T) (url string, ca []byte) {
	t.Helper()
	signer, err := authority()
	if err != nil {
		t.Fatal(err)
	}
	certificate, key, err := signer.Issue("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/review", h.review)
	mux.HandleFunc("/ready", func(w http.ResponseWriter, r *http.Request) {
		respond(w, r, func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			h.readyOnce.Do(func() { close(h.ready) })
			return &admissionv1.AdmissionResponse{Allowed: true}
		})
	})
	server := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0),
		BaseContext: func(net.Listener) context.Context { return t.Context() }}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // an error shows as reviews that do not come
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return "https://" + listener.Addr().String(), signer.PEM()
}

func respond(w http.ResponseWriter, r *http.Request,
	decide func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse) {
	var ask admissionv1.AdmissionReview
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || ask.Request == nil {
		http.Error(w, fmt.Sprint("decode the review: ", err), http.StatusBadRequest)
		return
	}
	response := decide(ask.Request)
	response.UID = ask.Request.UID
	answered := admissionv1.AdmissionReview{TypeMeta: ask.TypeMeta, Response: response}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answered) // or the API server has gone
}

func (h *hook) review(w http.ResponseWriter, r *http.Request) {
	respond(w, r, func(ask *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		seen, err := read(r, ask)
		if err != nil {
			return &admissionv1.AdmissionResponse{Result: &metav1.Status{Code: http.StatusBadRequest,
				Message: err.Error()}}
		}
		h.mu.Lock()
		h.current++
		seen.concurrent = h.current
		h.received = append(h.received, seen)
		seen.number = len(h.received)
		close(h.arrival)
		h.arrival = make(chan struct{})
		h.mu.Unlock()
		defer func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.current--
		}()
		return h.answer(r.Context(), seen)
	})
}

func read(r *http.Request, ask *admissionv1.AdmissionRequest) (*review, error) {
	seen := &review{AdmissionRequest: ask, arrived: time.Now()}
	var err error
	if seen.timeout, err = time.ParseDuration(r.URL.Query().Get("timeout")); err != nil {
		return nil, err
	}
	if len(ask.OldObject.Raw) != 0 {
		seen.pod = &corev1.Pod{}
		if err := json.Unmarshal(ask.OldObject.Raw, seen.pod); err != nil {
			return nil, err
		}
	}
	if ask.SubResource == "eviction" {
		seen.eviction = &policyv1.Eviction{}
		if err := json.Unmarshal(ask.Object.Raw, seen.eviction); err != nil {
			return nil, err
		}
	}
	if len(ask.Options.Raw) != 0 && ask.Operation == admissionv1.Delete {
		var options metav1.DeleteOptions
		if err := json.Unmarshal(ask.Options.Raw, &options); err != nil {
			return nil, err
		}
		seen.grace = options.GracePeriodSeconds
	}
	return seen, nil
}

// reviews are those received so far. The API server answers a request after all of its reviews.
func (h *hook) reviews() []*review {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.received)
}

// wait waits until so many reviews have been received and returns all there are.
func (h *hook) wait(s *scene, n int) []*review {
	s.t.Helper()
	for {
		h.mu.Lock()
		received, arrival := slices.Clone(h.received), h.arrival
		h.mu.Unlock()
		if len(received) >= n {
			return received
		}
		select {
		case <-arrival:
		case <-s.ctx.Done():
			s.t.Fatalf("%d reviews, want %d: %v", len(received), n, received)
		}
	}
}

// want checks how many reviews there have been, and what each of them was about.
func (h *hook) want(s *scene, what string, n int) []*review {
	s.t.Helper()
	received := h.reviews()
	for _, r := range received {
		if r.what() != what {
			s.t.Errorf("a review of %s, want %s", r.what(), what)
		}
	}
	if len(received) != n {
		s.t.Fatalf("%d reviews, want %d: %v", len(received), n, received)
	}
	return received
}

package admission

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxReview bounds a review, in bytes. The API server takes requests of 3 MiB (k8s.io/apiserver/pkg/server/config.go, MaxRequestBodyBytes) and
// etcd 1.5 MiB, and a DELETE carries its pod once. A pod of that size whose text needs escaping throughout can be more: it is refused,
// counted, and deleted without waiting.
const maxReview = 3 << 20

// request is a review, reduced to what is asked here.
type request struct {
	uid       types.UID
	operation Operation
	namespace string
	name      string
	// pod is what the API server is about to delete. Nil for evictions.
	pod    *corev1.Pod
	dryRun bool
	// grace is the grace period that was asked for. Nil: the pod's own.
	grace    *int64
	username string
	groups   []string
	// collection: no name was given, so this is one of a DELETECOLLECTION.
	collection bool
	// timeout is how long the API server waits for the answer. Zero: it did not say.
	timeout time.Duration
}

// malformed is an error with the HTTP status that tells the caller what is wrong with its review.
type malformed struct {
	code int
	text string
}

func (m malformed) Error() string { return m.text }

func bad(format string, args ...any) error {
	return malformed{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// read decodes a review. Its errors are malformed. w is where it will be answered: a body that is too large closes its connection.
func read(w http.ResponseWriter, r *http.Request) (*request, error) {
	if ct := r.Header.Get("Content-Type"); ct != "application/json" {
		return nil, malformed{http.StatusUnsupportedMediaType, fmt.Sprintf("content type %.100q: an AdmissionReview comes as application/json", ct)}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxReview))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, malformed{http.StatusRequestEntityTooLarge, fmt.Sprintf("the review is larger than %d bytes", tooLarge.Limit)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, malformed{http.StatusRequestTimeout, "the review came too slowly"}
	case err != nil:
		return nil, bad("read the review: %v", err)
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &review); err != nil {
		return nil, bad("decode the review: %v", err)
	}
	want := admissionv1.SchemeGroupVersion.WithKind("AdmissionReview")
	if got := review.GroupVersionKind(); got != want {
		return nil, bad("the review is a %.100q of version %.100q; %s %s is understood", got.Kind, review.APIVersion, want.GroupVersion(), want.Kind)
	}
	ask := review.Request
	if ask == nil {
		return nil, bad("the review has no request")
	}
	if ask.UID == "" {
		return nil, bad("request.uid is empty")
	}
	timeout, err := timeoutOf(r.URL.Query())
	if err != nil {
		return nil, err
	}
	q := &request{
		uid: ask.UID, namespace: ask.Namespace, name: ask.Name,
		dryRun:   ask.DryRun != nil && *ask.DryRun,
		username: ask.UserInfo.Username, groups: ask.UserInfo.Groups,
		timeout: timeout,
	}
	what := ask.Resource.Group + "/" + ask.Resource.Resource + "/" + ask.SubResource
	switch {
	case what == "/pods/" && ask.Operation == admissionv1.Delete:
		err = q.readDelete(ask)
	case what == "/pods/eviction" && ask.Operation == admissionv1.Create:
		err = q.readEviction(ask)
	default:
		return nil, bad("%.100q of %.100q is not for this webhook: it takes DELETE of pods and CREATE of pods/eviction", ask.Operation, what)
	}
	if err != nil {
		return nil, err
	}
	if q.namespace == "" || q.name == "" {
		return nil, bad("the review names no pod: namespace %q, name %q", q.namespace, q.name)
	}
	return q, nil
}

func (q *request) readDelete(ask *admissionv1.AdmissionRequest) error {
	q.operation = Delete
	q.collection = ask.Name == ""
	var pod corev1.Pod
	if err := decodeAs(ask.OldObject.Raw, &pod, "request.oldObject", "Pod"); err != nil {
		return err
	}
	if pod.UID == "" {
		return bad("request.oldObject.metadata.uid is empty")
	}
	// In a DELETECOLLECTION only the object knows its name.
	q.namespace, q.name, q.pod = pod.Namespace, pod.Name, &pod
	if len(ask.Options.Raw) == 0 {
		return nil
	}
	var options metav1.DeleteOptions
	if err := json.Unmarshal(ask.Options.Raw, &options); err != nil {
		return bad("decode request.options: %v", err)
	}
	q.takeOptions(&options)
	return nil
}

func (q *request) readEviction(ask *admissionv1.AdmissionRequest) error {
	q.operation = Evict
	// policy/v1beta1 has the same fields.
	var eviction policyv1.Eviction
	if err := decodeAs(ask.Object.Raw, &eviction, "request.object", "Eviction"); err != nil {
		return err
	}
	if q.name == "" {
		q.name = eviction.Name
	}
	if eviction.DeleteOptions != nil {
		q.takeOptions(eviction.DeleteOptions)
	}
	return nil
}

func (q *request) takeOptions(o *metav1.DeleteOptions) {
	q.grace = o.GracePeriodSeconds
	q.dryRun = q.dryRun || len(o.DryRun) > 0
}

func decodeAs(raw []byte, into any, field, kind string) error {
	if len(raw) == 0 {
		return bad("%s is empty", field)
	}
	var meta metav1.TypeMeta
	if err := json.Unmarshal(raw, &meta); err != nil {
		return bad("decode %s: %v", field, err)
	}
	if meta.Kind != kind {
		return bad("%s is a %.100q, not a %s", field, meta.Kind, kind)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return bad("decode %s: %v", field, err)
	}
	return nil
}

// timeoutOf reads ?timeout=, which the API server sets to the time that it has left.
func timeoutOf(query url.Values) (time.Duration, error) {
	text := query.Get("timeout")
	if text == "" {
		return 0, nil
	}
	timeout, err := time.ParseDuration(text)
	if err != nil || timeout <= 0 {
		return 0, bad("timeout %.100q in the URL is not a positive duration", text)
	}
	return timeout, nil
}

package admission

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/serve"
)

// maxReview bounds a review, in bytes. The API server accepts requests of 3 MiB
// (k8s.io/apiserver/pkg/server/config.go, MaxRequestBodyBytes), etcd 1.5 MiB, and the review of a
// DELETE contains its pod once. A pod of that size whose text consists of characters to be escaped
// can exceed the bound: its review is refused and counted, and it is deleted without waiting.
const maxReview = 3 << 20

// request is a review, reduced to the fields that the decision needs.
type request struct {
	uid       types.UID
	operation Operation
	namespace string
	name      string
	// pod is what the API server is about to delete. Nil for evictions.
	pod    *corev1.Pod
	dryRun bool
	// grace is the grace period that was asked for. Nil: the pod's own.
	grace *int64
	// preconditions are those of an eviction: the API server checks them after the webhook, those
	// of a DELETE before it.
	preconditions metav1.Preconditions
	username      string
	// controller: a workload controller of Kubernetes calls.
	controller bool
	// collection: the review gives no name, so it belongs to a DELETECOLLECTION. Without an object
	// it concerns no pod.
	collection bool
	// timeout is how long the API server waits for the answer. Zero: not stated.
	timeout time.Duration
}

// bad returns the error of a request that is not a review which this webhook understands.
func bad(format string, args ...any) error {
	return serve.Refuse(http.StatusBadRequest, format, args...)
}

// read decodes a review. Its errors are [serve.Refusal]. w is the answer's writer: a body that is
// too large closes its connection.
func read(w http.ResponseWriter, r *http.Request) (*request, error) {
	ask, err := readReview[policyv1.Eviction](w, r)
	if err != nil {
		return nil, err
	}
	timeout, err := timeoutOf(r.URL.Query())
	if err != nil {
		return nil, err
	}
	q := &request{
		uid: ask.UID, namespace: ask.Namespace, name: ask.Name,
		dryRun:   ask.DryRun != nil && *ask.DryRun,
		username: ask.UserInfo.Username, controller: isController(ask.UserInfo.Username),
		timeout: timeout,
	}
	switch what := ask.what(); {
	case what == "/pods/" && ask.Operation == admissionv1.Delete:
		err = q.readDelete(ask)
	case what == "/pods/eviction" && ask.Operation == admissionv1.Create:
		err = q.readEviction(ask)
	default:
		return nil, bad("%.100q of %.100q is not for this webhook: it takes DELETE of pods and CREATE of pods/eviction",
			ask.Operation, what)
	}
	if err != nil {
		return nil, err
	}
	if (q.namespace == "" || q.name == "") && !(q.collection && q.pod == nil) {
		return nil, bad("the review names no pod: namespace %q, name %q", q.namespace, q.name)
	}
	return q, nil
}

// readReview reads the request of a review. Its errors are [serve.Refusal].
func readReview[Object any](w http.ResponseWriter, r *http.Request) (*asked[Object], error) {
	if r.Method != http.MethodPost {
		return nil, serve.Refuse(http.StatusMethodNotAllowed, "method %s: reviews come by POST", r.Method)
	}
	body, err := readBody(w, r)
	if err != nil {
		return nil, err
	}
	var review struct {
		metav1.TypeMeta
		Request *asked[Object]
	}
	if err := decode(body, &review); err != nil {
		return nil, err
	}
	want := admissionv1.SchemeGroupVersion.WithKind("AdmissionReview")
	switch got := review.GroupVersionKind(); {
	case got != want:
		return nil, bad("the review is a %.100q of version %.100q; %s %s is understood", got.Kind, review.APIVersion,
			want.GroupVersion(), want.Kind)
	case review.Request == nil:
		return nil, bad("the review has no request")
	case review.Request.UID == "":
		return nil, bad("request.uid is empty")
	}
	return review.Request, nil
}

// readBody reads the body of a request that should be a review. Its errors are [serve.Refusal].
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if ct := r.Header.Get("Content-Type"); ct != "application/json" {
		return nil, serve.Refuse(http.StatusUnsupportedMediaType,
			"content type %.100q: an AdmissionReview comes as application/json", ct)
	}
	var body bytes.Buffer
	body.Grow(int(min(max(r.ContentLength, 0), maxReview)) + bytes.MinRead)
	_, err := body.ReadFrom(http.MaxBytesReader(w, r.Body, maxReview))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, serve.Refuse(http.StatusRequestEntityTooLarge, "the review is larger than %d bytes",
			tooLarge.Limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, serve.Refuse(http.StatusRequestTimeout, "the review came too slowly")
	case err != nil:
		return nil, bad("read the review: %v", err)
	}
	return body.Bytes(), nil
}

// isController reports whether a user is a workload controller of kube-controller-manager
// (cmd/kube-controller-manager/app). Each has a name of its own there, unless
// --use-service-account-credentials is not set.
func isController(username string) bool {
	switch strings.TrimPrefix(username, "system:serviceaccount:kube-system:") {
	case "replicaset-controller", "daemon-set-controller", "statefulset-controller", "job-controller",
		"replication-controller", "system:kube-controller-manager":
		return true
	}
	return false
}

func (q *request) readDelete(ask *asked[policyv1.Eviction]) error {
	q.operation = Delete
	q.collection = ask.Name == ""
	switch old := ask.OldObject; {
	case old == nil && q.collection:
		return nil // q names no pod
	case old == nil:
		return bad("request.oldObject is empty")
	case old.Kind != "Pod":
		return bad("request.oldObject is a %.100q, not a Pod", old.Kind)
	case old.UID == "":
		return bad("request.oldObject.metadata.uid is empty")
	default:
		q.pod = old.pod()
	}
	// In a DELETECOLLECTION, only the object has the pod's name.
	q.namespace, q.name = q.pod.Namespace, q.pod.Name
	q.takeOptions(ask.Options)
	return nil
}

func (q *request) readEviction(ask *asked[policyv1.Eviction]) error {
	q.operation = Evict
	// policy/v1beta1 has the same fields.
	switch eviction := ask.Object; {
	case eviction == nil:
		return bad("request.object is empty")
	case eviction.Kind != "Eviction":
		return bad("request.object is a %.100q, not an Eviction", eviction.Kind)
	default:
		if q.name == "" {
			q.name = eviction.Name
		}
		q.takeOptions(eviction.DeleteOptions)
		if o := eviction.DeleteOptions; o != nil && o.Preconditions != nil {
			q.preconditions = *o.Preconditions
		}
		return nil
	}
}

func (q *request) takeOptions(o *metav1.DeleteOptions) {
	if o != nil {
		q.grace = o.GracePeriodSeconds
		q.dryRun = q.dryRun || len(o.DryRun) > 0
	}
}

// asked is the request of a review, with only the fields that are read here. Object is set for an
// eviction or a creation.
type asked[Object any] struct {
	admissionv1.AdmissionRequest
	Object    *Object               `json:"object"`
	OldObject *reviewedPod          `json:"oldObject"`
	Options   *metav1.DeleteOptions `json:"options"`
}

// what returns the resource, as group/resource/subresource.
func (a *asked[Object]) what() string {
	return a.Resource.Group + "/" + a.Resource.Resource + "/" + a.SubResource
}

// reviewedPod has the fields that are read of a pod to be deleted. Most of a pod is its containers,
// and decoding all of it into Kubernetes' types takes three times as long.
type reviewedPod struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		NodeName                      string
		HostNetwork                   bool
		TerminationGracePeriodSeconds *int64
		// Containers have the preStop hooks.
		Containers []struct {
			Name      string
			Lifecycle *corev1.Lifecycle
		}
	}
	Status struct {
		Phase      corev1.PodPhase
		Conditions []corev1.PodCondition
		PodIPs     []corev1.PodIP
	}
}

// pod returns the pod, with only the fields that were decoded.
func (r *reviewedPod) pod() *corev1.Pod {
	r.ManagedFields = nil
	containers := make([]corev1.Container, len(r.Spec.Containers))
	for i, c := range r.Spec.Containers {
		containers[i] = corev1.Container{Name: c.Name, Lifecycle: c.Lifecycle}
	}
	return &corev1.Pod{
		ObjectMeta: r.ObjectMeta,
		Spec: corev1.PodSpec{NodeName: r.Spec.NodeName, HostNetwork: r.Spec.HostNetwork,
			TerminationGracePeriodSeconds: r.Spec.TerminationGracePeriodSeconds, Containers: containers},
		Status: corev1.PodStatus{Phase: r.Status.Phase, Conditions: r.Status.Conditions,
			PodIPs: r.Status.PodIPs},
	}
}

// decode reads a review. Its errors are [serve.Refusal], and name the object at fault.
func decode(body []byte, into any) error {
	err := json.Unmarshal(body, into)
	if err == nil {
		return nil
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		for _, object := range []string{"request.oldObject", "request.object", "request.options"} {
			if field := strings.ToLower(wrong.Field); field == strings.ToLower(object) ||
				strings.HasPrefix(field, strings.ToLower(object)+".") {
				return bad("decode %s: %v", object, err)
			}
		}
	}
	return bad("decode the review: %v", err)
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

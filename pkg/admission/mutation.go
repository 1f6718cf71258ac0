package admission

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// MutatePath is where the API server asks what a new pod needs in order to wait, but for the last
// segment: the secret. See [SecretPath].
const MutatePath = "/v1/mutate/"

// namespaceTime bounds the look at the pod's namespace. It is answered from memory.
const namespaceTime = time.Second

// Check reports what is wrong with b. Nil: nothing.
func (b Barrier) Check() error {
	switch {
	case b.Bound < time.Second || b.Bound > 10*time.Minute || b.Bound%time.Second != 0:
		return fmt.Errorf("bound %s: must be whole seconds, 1s to 10m", b.Bound)
	case b.Port < 1 || b.Port > 65535:
		return fmt.Errorf("port %d: must be 1 to 65535", b.Port)
	case b.Image == "":
		return fmt.Errorf("image %q: required", b.Image)
	}
	return nil
}

// Mutator answers AdmissionReviews of CREATE pods: those that are to wait before SIGTERM get the
// hook that does it. It never refuses a pod, and what it answers depends on the pod and its
// namespace alone, besides the id, so that it may be asked any number of times, dry runs included.
type Mutator struct {
	// Reader has the namespaces, in memory.
	Reader client.Reader
	// Excluded are namespaces whose pods never wait.
	Excluded []string
	Barrier  Barrier
	Log      *slog.Logger
	Metrics  *Metrics
}

// ServeHTTP implements http.Handler. What is not a review that this webhook understands gets a 4xx,
// and the pod is created as it is.
func (m *Mutator) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q, err := readCreation(w, r)
	if err != nil {
		refuse(w, m.Log, m.Metrics, err)
		return
	}
	result := mutate(q.pod, m.place(r.Context(), q.namespace), rand.Text(), m.Barrier)
	m.Metrics.mutations.WithLabelValues(string(result.coverage)).Inc()
	name := q.pod.Name
	if name == "" {
		name = q.pod.GenerateName + "*"
	}
	warnings := result.warnings()
	m.Log.Debug("creation", "namespace", q.namespace, "pod", name, "coverage", string(result.coverage),
		"warnings", warnings)
	response := &admissionv1.AdmissionResponse{UID: q.uid, Allowed: true, Warnings: warnings}
	if len(result.patch) > 0 {
		if response.Patch, err = json.Marshal(result.patch); err != nil {
			refuse(w, m.Log, m.Metrics, fmt.Errorf("encode the patch: %w", err))
			return
		}
		kind := admissionv1.PatchTypeJSONPatch
		response.PatchType = &kind
	}
	answer(w, response)
}

// place is the namespace as far as it is known.
func (m *Mutator) place(ctx context.Context, name string) Place {
	p := Place{Name: name, Excluded: slices.Contains(m.Excluded, name)}
	ctx, cancel := context.WithTimeout(ctx, namespaceTime)
	defer cancel()
	var namespace corev1.Namespace
	if err := m.Reader.Get(ctx, types.NamespacedName{Name: name}, &namespace); err == nil {
		p.Known, p.Labels = true, namespace.Labels
	}
	return p
}

// Missing returns, as namespace/name and in order, the pods that ask for the barrier and were
// created without it: no coordinator answered, or the namespace was labeled later. They stay
// without it until they are created again.
func (m *Mutator) Missing(ctx context.Context) ([]string, error) {
	var pods corev1.PodList
	if err := m.Reader.List(ctx, &pods); err != nil {
		return nil, fmt.Errorf("list pods from the cache: %w", err)
	}
	var missing []string
	places := map[string]Place{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		answered := pod.Annotations[BarrierIDAnnotation] != "" || pod.Annotations[BarrierUncoveredAnnotation] != ""
		over := pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded ||
			pod.Status.Phase == corev1.PodFailed
		if answered || over {
			continue
		}
		place, known := places[pod.Namespace]
		if !known {
			place = m.place(ctx, pod.Namespace)
			places[pod.Namespace] = place
		}
		if spared(pod, place) == "" {
			missing = append(missing, pod.Namespace+"/"+pod.Name)
		}
	}
	slices.Sort(missing)
	return missing, nil
}

// warnings are what whoever creates the pod is shown. Pods that were not meant to have the barrier,
// or never have it, need none.
func (m mutation) warnings() []string {
	switch m.coverage {
	case podHostNetwork:
		return []string{"Lameduck: the pod uses the host's network, where nobody can tell its connections from " +
			"others': it stops without waiting for kube-proxy"}
	case podZeroGrace:
		return []string{"Lameduck: terminationGracePeriodSeconds is 0: the pod stops without waiting for kube-proxy"}
	case podPartly, podUncoverable:
		var all []string
		for _, u := range m.uncovered {
			all = append(all, u.container+" ("+u.why+")")
		}
		return []string{"Lameduck: containers that stop without waiting for kube-proxy: " + strings.Join(all, ", ")}
	}
	return nil
}

// creation is a review of CREATE pods.
type creation struct {
	uid       types.UID
	namespace string
	pod       *corev1.Pod
}

// readCreation decodes a review. Its errors are malformed.
func readCreation(w http.ResponseWriter, r *http.Request) (*creation, error) {
	if r.Method != http.MethodPost {
		return nil, malformed{http.StatusMethodNotAllowed, "method " + r.Method + ": reviews come by POST"}
	}
	body, err := readBody(w, r)
	if err != nil {
		return nil, err
	}
	var review struct {
		metav1.TypeMeta
		Request *struct {
			UID         types.UID
			Resource    metav1.GroupVersionResource
			SubResource string
			Namespace   string
			Operation   admissionv1.Operation
			Object      *corev1.Pod
		}
	}
	if err := json.Unmarshal(body, &review); err != nil {
		return nil, bad("decode the review: %v", err)
	}
	if err := isReview(review.TypeMeta); err != nil {
		return nil, err
	}
	ask := review.Request
	switch {
	case ask == nil:
		return nil, bad("the review has no request")
	case ask.UID == "":
		return nil, bad("request.uid is empty")
	case ask.Operation != admissionv1.Create || ask.Resource.Group != "" || ask.Resource.Resource != "pods" ||
		ask.SubResource != "":
		return nil, bad("%.100q of %.100q is not for this webhook: it takes CREATE of pods", ask.Operation,
			ask.Resource.Group+"/"+ask.Resource.Resource+"/"+ask.SubResource)
	case ask.Object == nil || ask.Object.Kind != "Pod":
		return nil, bad("request.object is not a Pod")
	case len(ask.Object.Spec.Containers) == 0:
		return nil, bad("request.object has no containers")
	}
	return &creation{uid: ask.UID, namespace: ask.Namespace, pod: ask.Object}, nil
}

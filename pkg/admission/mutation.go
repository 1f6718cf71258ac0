package admission

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/keys"
)

// MutatePath is the path of reviews of new pods, without its last segment, the secret. See
// [SecretPath].
const MutatePath = "/v1/mutate/"

// namespaceTime bounds the read of the pod's namespace, which comes from a cache.
const namespaceTime = time.Second

// imageName is a reference of an image. With any other text no container of the image starts.
var imageName = regexp.MustCompile(
	`^([a-zA-Z0-9.:-]+/)?[a-z0-9][a-z0-9._/-]*(:[a-zA-Z0-9_][a-zA-Z0-9_.-]*)?(@sha256:[0-9a-f]{64})?$`)

// Check returns an error that names an invalid option. Nil: b is valid.
func (b HookOptions) Check() error {
	switch {
	case wrongBound(b.Bound) != nil:
		return wrongBound(b.Bound)
	case b.Port < 1 || b.Port > 65535 || b.Port >= 10248 && b.Port <= 10259:
		return fmt.Errorf("port %d: must be 1 to 65535, and not 10248 to 10259, which belong to Kubernetes", b.Port)
	case !imageName.MatchString(b.Image):
		return fmt.Errorf("image %q: must be a container image, such as registry.example/lameduck-wait:v1", b.Image)
	}
	for i, name := range b.PullSecrets {
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return fmt.Errorf("imagePullSecrets[%d] %q: not an object's name", i, name)
		}
	}
	return nil
}

func wrongBound(d time.Duration) error {
	if d < time.Second || d > 10*time.Minute || d%time.Second != 0 {
		return fmt.Errorf("bound %s: must be whole seconds, 1s to 10m", d)
	}
	return nil
}

// Mutator answers AdmissionReviews of CREATE pods: it adds the preStop hook to pods that are to
// wait before SIGTERM. It never refuses a pod. Its answer, except the id, depends only on the pod,
// its namespace and its Services, so it may be called any number of times, dry runs included.
type Mutator struct {
	// Reader is a cache of the namespaces and Services.
	Reader client.Reader
	// Services reports whether Reader has synced the Services.
	Services func() bool
	// Excluded are namespaces whose pods never wait.
	Excluded []string
	Barrier  HookOptions
	Log      *slog.Logger
	Metrics  *Metrics
}

// ServeHTTP implements http.Handler. A request that is not a review of CREATE pods gets a 4xx, and
// the pod is created as it is.
func (m *Mutator) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q, err := readCreation(w, r)
	if err != nil {
		refuse(w, m.Log, m.Metrics, err)
		return
	}
	pod, place, barrier := q.Object, m.place(r.Context(), q.Namespace), m.Barrier
	barrier.Bound = m.bound(r.Context(), pod, place)
	result := mutate(pod, place, q.Namespace+"."+rand.Text(), barrier)
	m.Metrics.mutations.WithLabelValues(string(result.coverage)).Inc()
	name := cmp.Or(pod.Name, pod.GenerateName+"*")
	warnings := result.warnings()
	m.Log.Debug("creation", "namespace", q.Namespace, "pod", name, "coverage", string(result.coverage),
		"warnings", warnings)
	response := &admissionv1.AdmissionResponse{UID: q.UID, Allowed: true, Warnings: warnings}
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

// place returns what is known of the namespace.
func (m *Mutator) place(ctx context.Context, name string) Place {
	p := Place{Name: name, Excluded: slices.Contains(m.Excluded, name)}
	ctx, cancel := context.WithTimeout(ctx, namespaceTime)
	defer cancel()
	var namespace corev1.Namespace
	if err := m.Reader.Get(ctx, types.NamespacedName{Name: name}, &namespace); err == nil {
		p.Known, p.Labels, p.Annotations = true, namespace.Labels, namespace.Annotations
	}
	return p
}

// bound returns how long a pod's hook may last: the longest [keys.BarrierBound] of its
// Services, else its namespace's, else the coordinator's. An invalid annotation is logged and
// ignored. A Service that is created later does not change existing pods.
func (m *Mutator) bound(ctx context.Context, pod *corev1.Pod, in Place) (longest time.Duration) {
	said := func(object string, annotations map[string]string) time.Duration {
		text, ok := annotations[keys.BarrierBound]
		if !ok {
			return 0
		}
		d, err := time.ParseDuration(text)
		if err = cmp.Or(err, wrongBound(d)); err != nil {
			m.Log.Warn("annotation cannot be read: it states nothing", "object", object,
				"annotation", keys.BarrierBound, "error", fmt.Sprintf("%.200s", err)) // the text may have 256 KiB
			return 0
		}
		return d
	}
	var services corev1.ServiceList
	if m.Services() && m.Reader.List(ctx, &services, client.InNamespace(in.Name)) == nil {
		for _, s := range services.Items {
			if len(s.Spec.Selector) > 0 && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
				longest = max(longest, said("Service "+in.Name+"/"+s.Name, s.Annotations))
			}
		}
	}
	if longest == 0 {
		longest = said("namespace "+in.Name, in.Annotations)
	}
	return cmp.Or(longest, m.Barrier.Bound)
}

// Missing returns, as namespace/name and in order, the pods that ask for the barrier and were
// created without it: no coordinator answered, or the namespace was labeled later. They have to be
// replaced to get it.
func (m *Mutator) Missing(ctx context.Context) ([]string, error) {
	var pods corev1.PodList
	if err := m.Reader.List(ctx, &pods); err != nil {
		return nil, fmt.Errorf("list pods from the cache: %w", err)
	}
	var missing []string
	places := map[string]Place{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		answered := pod.Annotations[keys.BarrierID] != "" || pod.Annotations[keys.BarrierUncovered] != ""
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

// warnings returns the warnings for the client that creates the pod. Pods that are not meant to
// have the barrier, or can never have it, get none.
func (m mutation) warnings() []string {
	switch m.coverage {
	case podHostNetwork:
		return []string{"Lameduck: the pod uses the host's network, where its connections look like those of " +
			"other processes: it stops without waiting for kube-proxy"}
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

// readCreation reads the request of a review of CREATE pods. Its errors are [serve.Refusal].
func readCreation(w http.ResponseWriter, r *http.Request) (*asked[corev1.Pod], error) {
	ask, err := readReview[corev1.Pod](w, r)
	switch {
	case err != nil:
		return nil, err
	case ask.Operation != admissionv1.Create || ask.what() != "/pods/":
		return nil, bad("%.100q of %.100q is not for this webhook: it takes CREATE of pods", ask.Operation, ask.what())
	case ask.Object == nil || ask.Object.Kind != "Pod":
		return nil, bad("request.object is not a Pod")
	case len(ask.Object.Spec.Containers) == 0:
		return nil, bad("request.object has no containers")
	}
	return ask, nil
}

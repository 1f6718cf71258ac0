package scenarios

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// barriers is a stage whose new pods get the barrier's hook, and a client that collects the API
// server's warnings.
type barriers struct {
	*stage.Stage
	t        *testing.T
	client   kubernetes.Interface
	warnings []string
}

// HandleWarningHeader implements rest.WarningHandler.
func (b *barriers) HandleWarningHeader(_ int, _, text string) { b.warnings = append(b.warnings, text) }

func openBarriers(t *testing.T) *barriers {
	t.Helper()
	b := &barriers{Stage: open(t), t: t}
	if err := b.InstallBarrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	config := b.Cluster.Config()
	config.WarningHandler = b
	var err error
	if b.client, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	return b
}

var _ rest.WarningHandler = (*barriers)(nil)

// place makes a namespace where the barrier is enabled, and waits until pods there get the hook.
func (b *barriers) place(name, level string) string {
	b.t.Helper()
	labels := map[string]string{}
	if level != "" {
		labels["pod-security.kubernetes.io/enforce"] = level
	}
	return harness.Barred(b.t, b.client, name, labels)
}

func (b *barriers) create(namespace string, pod *corev1.Pod) *corev1.Pod {
	b.t.Helper()
	made, err := b.client.CoreV1().Pods(namespace).Create(b.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return made
}

// hasHook fails unless each of the pod's containers waits, by the pod's own id.
func (b *barriers) hasHook(p *corev1.Pod, kind string) {
	b.t.Helper()
	id := p.Annotations["lameduck.io/barrier-id"]
	if id == "" {
		b.t.Errorf("pod %s has no id: %v", p.Name, p.Annotations)
		return
	}
	for _, c := range p.Spec.Containers {
		var got, text string
		if c.Lifecycle != nil && c.Lifecycle.PreStop != nil {
			switch h := c.Lifecycle.PreStop; {
			case h.HTTPGet != nil:
				got, text = "httpGet", h.HTTPGet.Path
			case h.Exec != nil:
				got, text = "exec", strings.Join(h.Exec.Command, " ")
			}
		}
		if got != kind || !strings.Contains(text, id) {
			b.t.Errorf("container %s of %s has hook %q %q, want %s with id %s", c.Name, p.Name, got, text, kind, id)
		}
	}
}

// What the webhook makes of a pod the API server accepts, whatever Pod Security enforces. Without
// this, opting in would keep operators' pods from being created.
func TestBarrierUnderPodSecurity(t *testing.T) {
	b := openBarriers(t)
	for _, level := range []string{"", "privileged", "baseline", "restricted"} {
		namespace := b.place("barrier-level-"+level+"x", level)
		kind := "httpGet"
		if level == "baseline" || level == "restricted" {
			kind = "exec"
		}
		b.hasHook(b.create(namespace, harness.StrictPod("plain")), kind)
		hooked := harness.StrictPod("hooked")
		hooked.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{
			PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}}
		made := b.create(namespace, hooked)
		b.hasHook(made, "exec")
		if *made.Spec.TerminationGracePeriodSeconds != 60 {
			t.Errorf("grace %d, want 60", *made.Spec.TerminationGracePeriodSeconds)
		}
	}
	// That it is not because nothing is enforced.
	forbidden := harness.StrictPod("forbidden")
	forbidden.Spec.Containers[0].SecurityContext = nil
	if _, err := b.client.CoreV1().Pods("barrier-level-restrictedx").Create(t.Context(), forbidden,
		metav1.CreateOptions{}); err == nil {
		t.Error("Pod Security is not enforced here")
	}
}

// A load balancer may need minutes: its Service says so, and only the pods that it selects get so
// long a grace period.
func TestBarrierBoundOfAService(t *testing.T) {
	b := openBarriers(t)
	namespace := b.place("barrier-bound", "")
	const key = "lameduck.io/barrier-bound"
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "public", Annotations: map[string]string{key: "5m"}},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "public"},
			Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := b.client.CoreV1().Services(namespace).Create(t.Context(), service,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	grace := func(p *corev1.Pod, bound string, want int64) error {
		if got, has := p.Annotations[key], *p.Spec.TerminationGracePeriodSeconds; got != bound || has != want {
			return fmt.Errorf("bound %q, grace %d, want %s and %d", got, has, bound, want)
		}
		return nil
	}
	selected := harness.StrictPod("selected")
	selected.Labels = map[string]string{"app": "public"}
	harness.Await(t, 20*time.Second, "the coordinators know the Service", func() error {
		p, err := b.client.CoreV1().Pods(namespace).Create(t.Context(), selected,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			return err
		}
		return grace(p, "300s", 330)
	})
	if err := grace(b.create(namespace, harness.StrictPod("other")), "30s", 60); err != nil {
		t.Error(err)
	}
}

// Names that the API server makes come after admission: ids tell such pods apart.
func TestBarrierGenerateName(t *testing.T) {
	b := openBarriers(t)
	namespace := b.place("barrier-names", "")
	ids := map[string]bool{}
	for range 3 {
		p := harness.StrictPod("")
		p.GenerateName = "web-"
		made := b.create(namespace, p)
		b.hasHook(made, "httpGet")
		ids[made.Annotations["lameduck.io/barrier-id"]] = true
	}
	if len(ids) != 3 {
		t.Errorf("%d ids for three pods", len(ids))
	}
	// A copy of one, as operators make with kubectl get -o yaml, does not share its id.
	first, err := b.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{Limit: 1})
	if err != nil || len(first.Items) != 1 {
		t.Fatal(err)
	}
	twin := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "twin", Annotations: first.Items[0].Annotations},
		Spec: first.Items[0].Spec}
	made := b.create(namespace, twin)
	b.hasHook(made, "httpGet")
	if ids[made.Annotations["lameduck.io/barrier-id"]] || *made.Spec.TerminationGracePeriodSeconds != 60 {
		t.Errorf("a copy has id %s and grace %d", made.Annotations["lameduck.io/barrier-id"],
			*made.Spec.TerminationGracePeriodSeconds)
	}
}

// Quotas and ranges of limits that the pod fits into it fits into with the init container.
func TestBarrierUnderQuota(t *testing.T) {
	b := openBarriers(t)
	namespace := b.place("barrier-quota", "baseline")
	small := func(s string) resource.Quantity { return resource.MustParse(s) }
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "all"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			"requests.cpu": small("100m"), "limits.cpu": small("100m"), "requests.memory": small("64Mi"),
			"limits.memory": small("64Mi"),
		}}}
	if _, err := b.client.CoreV1().ResourceQuotas(namespace).Create(t.Context(), quota,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "range"},
		Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{{
			Type: corev1.LimitTypeContainer, Min: corev1.ResourceList{"memory": small("64Mi"), "cpu": small("100m")},
			Max: corev1.ResourceList{"memory": small("64Mi"), "cpu": small("100m")},
		}}}}
	if _, err := b.client.CoreV1().LimitRanges(namespace).Create(t.Context(), limits,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The quota of the namespace is counted a moment after it was made: until then no pod is let
	// in.
	p := harness.StrictPod("web")
	list := corev1.ResourceList{"cpu": small("100m"), "memory": small("64Mi")}
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		made, err := b.client.CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{})
		if err == nil {
			b.hasHook(made, "exec")
			if made.Status.QOSClass != corev1.PodQOSGuaranteed {
				t.Errorf("class %s, want Guaranteed", made.Status.QOSClass)
			}
			break
		}
		if !strings.Contains(err.Error(), "status unknown for quota") || time.Now().After(end) {
			t.Fatal(err)
		}
	}
	// And it was a quota. The quota's controller may count from a list without the first pod, and
	// counts again.
	harness.Until(t, 10*time.Second, "the quota is enforced", func() bool {
		_, err := b.client.CoreV1().Pods(namespace).Create(t.Context(), harness.StrictPod("second"),
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil && strings.Contains(err.Error(), "exceeded quota")
	})
}

// A container that another webhook adds after ours has to wait too: a proxy that stops at once
// takes the app's connections with it. Ours is asked again because of reinvocationPolicy IfNeeded.
func TestBarrierReinvocation(t *testing.T) {
	b := openBarriers(t)
	namespace := b.place("barrier-again", "")
	b.inject(namespace)
	var p *corev1.Pod
	harness.Until(t, 20*time.Second, "the other webhook adds a container", func() bool {
		p = b.create(namespace, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "web-"},
			Spec: harness.StrictPod("").Spec})
		return len(p.Spec.Containers) == 2
	})
	b.hasHook(p, "httpGet")
	if *p.Spec.TerminationGracePeriodSeconds != 60 {
		t.Errorf("grace %d, want 60: it grows once", *p.Spec.TerminationGracePeriodSeconds)
	}
}

// inject is another's webhook, which puts a proxy before the other containers. Its name makes the
// API server ask it after ours.
func (b *barriers) inject(namespace string) {
	b.t.Helper()
	certs := b.t.TempDir()
	if err := b.Cluster.CA().IssueFiles(certs, "127.0.0.1"); err != nil {
		b.t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key"))
	if err != nil {
		b.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: 5 * time.Second,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var review admissionv1.AdmissionReview
			body, _ := io.ReadAll(r.Body)
			if err := json.Unmarshal(body, &review); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			kind := admissionv1.PatchTypeJSONPatch
			review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
			if !strings.Contains(string(review.Request.Object.Raw), `"envoy"`) {
				review.Response.Patch = []byte(
					`[{"op":"add","path":"/spec/containers/0","value":{"name":"envoy","image":"envoy"}}]`)
				review.Response.PatchType = &kind
			}
			review.Request = nil
			_ = json.NewEncoder(w).Encode(review)
		})}
	go func() { _ = server.ServeTLS(listener, "", "") }()
	b.t.Cleanup(func() { server.Close() })
	url := fmt.Sprintf("https://%s/", listener.Addr())
	none, fail := admissionregistrationv1.SideEffectClassNone, admissionregistrationv1.Fail
	configurations := b.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err = configurations.Create(b.t.Context(), &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "zz-injector"},
		Webhooks: []admissionregistrationv1.MutatingWebhook{{
			Name: "injector.lameduck.test", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none,
			FailurePolicy: &fail,
			ClientConfig:  admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: b.Cluster.CA().PEM()},
			NamespaceSelector: &metav1.LabelSelector{
				MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
				Rule: admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
					Resources: []string{"pods"}},
			}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := configurations.Delete(context.WithoutCancel(b.t.Context()), "zz-injector",
			metav1.DeleteOptions{}); err != nil {
			b.t.Error(err)
		}
	})
}

// What is not covered is a warning to the client that creates the pod, and an annotation of the
// pod. Pods can opt in or out themselves.
func TestBarrierSaysWhatIsUncovered(t *testing.T) {
	b := openBarriers(t)
	namespace := b.place("barrier-uncovered", "")
	p := harness.StrictPod("tls")
	p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{
		PreStop: &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Port: portNumber(8443),
			Scheme: corev1.URISchemeHTTPS}}}
	made := b.create(namespace, p)
	if got := made.Annotations["lameduck.io/barrier-uncovered"]; got != "app" ||
		*made.Spec.TerminationGracePeriodSeconds != 30 {
		t.Errorf("uncovered %q, grace %d", got, *made.Spec.TerminationGracePeriodSeconds)
	}
	if all := strings.Join(b.warnings, "\n"); !strings.Contains(all, "app (its preStop hook speaks HTTPS)") {
		t.Errorf("warnings %q", all)
	}
	for name, edit := range map[string]func(*corev1.Pod){
		"opts-out":     func(p *corev1.Pod) { p.Labels = map[string]string{"lameduck.io/mode": "off"} },
		"runs-once":    func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever },
		"host-network": func(p *corev1.Pod) { p.Spec.HostNetwork = true },
	} {
		p := harness.StrictPod(name)
		edit(p)
		if made := b.create(namespace, p); made.Annotations["lameduck.io/barrier-id"] != "" {
			t.Errorf("pod %s has an id", name)
		}
	}
	in := harness.StrictPod("opts-in")
	in.Labels = map[string]string{"lameduck.io/mode": "enforce"}
	made = b.create(harness.Namespace(t, b.client, "barrier-of-one", nil), in)
	if made.Annotations["lameduck.io/barrier-id"] == "" {
		t.Error("a pod that opts in has no id")
	}
}

func portNumber(n int32) intstr.IntOrString { return intstr.FromInt32(n) }

//go:build e2e

package nodes

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

type object = stage.Object

// manifests are the objects of manifests/base and manifests/barrier.
func (l *lab) manifests(t *testing.T) []object {
	t.Helper()
	var all []object
	for _, folder := range []string{"base", "barrier"} {
		objects, err := stage.Objects(t.Context(), l.Cluster, folder)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, objects...)
	}
	for _, o := range all {
		if data, ok := o["data"].(object); ok && data["coordinator.yaml"] != nil && timed() {
			data["coordinator.yaml"] = data["coordinator.yaml"].(string) + "logLevel: debug\n"
		}
	}
	return all
}

// apply applies objects.
func (l *lab) apply(t *testing.T, objects ...object) {
	t.Helper()
	text, err := stage.Join(objects)
	if err != nil {
		t.Fatal(err)
	}
	l.applyText(t, text)
}

func (l *lab) applyText(t *testing.T, text string) {
	t.Helper()
	if _, err := l.KubectlInput(t.Context(), text, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

// isWebhook reports whether o makes the API server ask.
func isWebhook(o object) bool {
	kind, _ := o["kind"].(string)
	return strings.HasSuffix(kind, "WebhookConfiguration")
}

// install installs everything of the manifests but what makes the API server ask, and waits until
// it is there.
func (l *lab) install(t *testing.T) {
	t.Helper()
	var objects, workloads []object
	for _, o := range l.manifests(t) {
		switch {
		case isWebhook(o):
		case o["kind"] == "Deployment":
			// Not on node-3, which is drained and cut off.
			pod := o["spec"].(object)["template"].(object)["spec"].(object)
			maps.Copy(pod["affinity"].(object), notOn("node-3"))
			entitle(pod)
			workloads = append(workloads, o)
		case o["kind"] == "DaemonSet":
			entitle(o["spec"].(object)["template"].(object)["spec"].(object))
			workloads = append(workloads, o)
		default:
			objects = append(objects, o)
		}
	}
	l.apply(t, objects...)
	l.namespace(t, gateway, map[string]string{"lameduck.io/mode": "off"})
	l.apply(t, workloads...)
	l.kubectl(t, "rollout", "status", "-n", system, "deployment", "-l", "app.kubernetes.io/component=webhook",
		"--timeout=60s")
	l.kubectl(t, "rollout", "status", "-n", agents, "daemonset/lameduck-node", "--timeout=60s")
}

// entitle gives containers a right to the CPU as on a node of their own: here clients, control
// plane and three nodes share one computer.
func entitle(pod object) {
	for _, c := range pod["containers"].([]any) {
		c.(object)["resources"].(object)["requests"].(object)["cpu"] = "200m"
	}
}

// notOn keeps pods from a node.
func notOn(node string) object {
	return object{"nodeAffinity": object{"requiredDuringSchedulingIgnoredDuringExecution": object{
		"nodeSelectorTerms": []any{
			object{"matchExpressions": []any{object{"key": "kubernetes.io/hostname",
				"operator": "NotIn", "values": []any{node}}}},
		}}}}
}

// addWebhooks makes the API server ask. Where, and whom to trust, the coordinators write.
func (l *lab) addWebhooks(t *testing.T) {
	t.Helper()
	var configurations []object
	for _, o := range l.manifests(t) {
		if !isWebhook(o) {
			continue
		}
		configurations = append(configurations, o)
	}
	l.apply(t, configurations...)
	// Only after a while does the API server know them: until a pod comes back with the hook,
	// nothing is measured.
	l.namespace(t, "probe", map[string]string{"lameduck.io/mode": "enforce"})
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "probe"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: appImage}}},
	}
	l.Await(t, time.Minute, "the API server asks", func() error {
		made, err := l.Kube.CoreV1().Pods("probe").Create(t.Context(), pod,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && made.Annotations["lameduck.io/barrier-id"] == "" {
			err = fmt.Errorf("pods get no hook: %v", made.Annotations)
		}
		return err
	})
}

// namespace makes one, if it is not there, in which pods can be made.
func (l *lab) namespace(t *testing.T, name string, labels map[string]string) {
	t.Helper()
	_, err := l.Kube.CoreV1().Namespaces().Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		harness.Namespace(t, l.Kube, name, labels)
	} else if err != nil {
		t.Fatal(err)
	}
}

// kubectl runs kubectl. What is wrong with the cluster is said if it fails.
func (l *lab) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := l.Kubectl(t.Context(), args...)
	if err != nil {
		l.Explain(t)
		t.Fatal(err)
	}
	return out
}

// said logs what the coordinators and the gateway's agent have written since.
func (l *lab) said(t *testing.T, since time.Time) {
	t.Helper()
	for _, of := range [][]string{{system, "app.kubernetes.io/component=webhook"}, {gateway, "app=gateway"},
		{edge, "lameduck.io/agent"}} {
		out, err := l.Kubectl(t.Context(), "logs", "-n", of[0], "-l", of[1], "--all-containers", "--prefix",
			"--tail=-1", "--since-time="+since.Format(time.RFC3339))
		t.Logf("%s (%v):\n%s", of[0], err, out)
	}
}

package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// found is one finding of kubectl lameduck check.
type found struct{ Level, Object, Problem, Fix string }

// checks runs kubectl lameduck check, and returns what it found and how it ended.
func checks(t *testing.T, kubeconfig string, args ...string) ([]found, int) {
	t.Helper()
	stdout, stderr, err := plugin(t, kubeconfig, append([]string{"check", "-o", "json"}, args...)...)
	var is struct {
		APIVersion, Kind string
		Findings         []found
	}
	if bad := json.Unmarshal([]byte(stdout), &is); stdout != "" && (bad != nil || is.Kind != "CheckResult" ||
		is.APIVersion != "lameduck.io/v1") {
		t.Errorf("%v: %s%s", bad, stdout, stderr)
	}
	for _, f := range is.Findings {
		if f.Level == "" || f.Object == "" || f.Problem == "" || f.Fix == "" {
			t.Errorf("not whole: %+v", f)
		}
	}
	return is.Findings, code(err)
}

// awaitCheck waits until check ends with a code and finds what each of want has: a level, the
// object, and a part of the problem.
func awaitCheck(t *testing.T, kubeconfig string, exit int, want []found, args ...string) {
	t.Helper()
	harness.Await(t, 45*time.Second, "kubectl lameduck check "+strings.Join(args, " "), func() error {
		all, code := checks(t, kubeconfig, args...)
		for _, w := range want {
			if !slices.ContainsFunc(all, func(f found) bool {
				return f.Level == w.Level && f.Object == w.Object && strings.Contains(f.Problem, w.Problem) &&
					strings.Contains(f.Fix, w.Fix)
			}) {
				return fmt.Errorf("no %+v in %+v", w, all)
			}
		}
		if code != exit {
			return fmt.Errorf("exit code %d, want %d: %+v", code, exit, all)
		}
		return nil
	})
}

// kubectl lameduck check says that all is well where it is, and finds by itself what a test breaks,
// on the real API server.
func TestCheck(t *testing.T) {
	s := open(t)
	serveKubelet(t, s.Kube)
	harness.InstallFollowing(t, s)
	admin := s.Cluster.Kubeconfig()
	well := func(t *testing.T) {
		t.Helper()
		awaitCheck(t, admin, 0, []found{{"warning", "ValidatingWebhookConfiguration lameduck", "there is no witness",
			"manifests/base"}})
	}
	well(t)
	if all, code := checks(t, admin, "--strict"); code != 1 {
		t.Errorf("--strict: %d, %+v", code, all)
	}
	text, stderr, err := plugin(t, admin, "check")
	if err != nil || !strings.Contains(text, "\nerrors: 0, ") || !strings.HasSuffix(text, ", not checked: 0\n") {
		t.Errorf("%v: %s%s", err, text, stderr)
	}
	t.Log(text)
	const (
		validating = "ValidatingWebhookConfiguration lameduck"
		first      = validating + ", pods-0.lameduck.io"
		barrier    = "MutatingWebhookConfiguration lameduck, pods.barrier.lameduck.io"
	)
	if pods, err := s.Pods(t.Context(), metav1.NamespaceDefault, "lameduck.io/mode"); err != nil || len(pods) > 0 {
		t.Errorf("the pod that is created as a dry run is there: %v, %v", pods, err)
	}
	scale := func(t *testing.T, namespace, name string, n int) {
		t.Helper()
		if out, err := s.Cluster.Kubectl(t.Context(), "-n", namespace, "scale", "deployment", name,
			fmt.Sprint("--replicas=", n)); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if n > 0 {
			if err := s.Await(t.Context(), namespace, name); err != nil {
				t.Fatal(err)
			}
			well(t)
		}
	}
	t.Run("no webhook configuration", func(t *testing.T) {
		if err := s.RemoveWebhook(t.Context()); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 1, []found{{"error", validating, "no deletion waits", "kubectl apply -k manifests/base"}})
		harness.Await(t, 10*time.Second, "the first line of kubectl lameduck status", func() error {
			out, stderr, err := plugin(t, admin, "status")
			if err != nil || !strings.HasPrefix(out, "Deletions do not wait: ") {
				return fmt.Errorf("%v: %s%s", err, out, stderr)
			}
			return nil
		})
		if err := s.InstallWebhook(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		well(t)
	})
	t.Run("another CA", func(t *testing.T) {
		ca, err := cluster.NewCA()
		if err != nil {
			t.Fatal(err)
		}
		// Coordinators would write their own at once.
		bindings := s.Kube.RbacV1().ClusterRoleBindings()
		binding, err := bindings.Get(t.Context(), "lameduck-certificates", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := bindings.Delete(t.Context(), binding.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle",
			"value": ca.PEM()}})
		if err != nil {
			t.Fatal(err)
		}
		configurations := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations()
		if _, err := configurations.Patch(t.Context(), "lameduck", types.JSONPatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		if patch, err = json.Marshal([]map[string]any{{"op": "replace", "path": "/webhooks/1/clientConfig/caBundle",
			"value": ca.PEM()}}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(t.Context(), "lameduck",
			types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 1, []found{
			{"error", barrier, "new pods in namespace default do not get the hook", "kubectl -n lameduck-system logs"},
			{"error", first, "the API server does not accept the coordinator's certificate", "rollout restart"},
			{"error", first, "the API server does not ask, or its call fails", "kubectl -n lameduck-system logs"},
		})
		binding.ResourceVersion = ""
		if _, err := bindings.Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		well(t)
	})
	t.Run("no coordinator", func(t *testing.T) {
		scale(t, stage.System, "lameduck-webhook-0", 0)
		awaitCheck(t, admin, 1, []found{
			{"error", "namespace lameduck-system", "there is no coordinator", "manifests/base"},
			{"error", first, "deletions in namespace default do not wait", "kubectl"},
			{"error", barrier, "new pods in namespace default do not get the hook", "kubectl"},
		})
		if err := s.Apply(t.Context(), fmt.Sprintf(quota, stage.System)); err != nil {
			t.Fatal(err)
		}
		harness.Until(t, 30*time.Second, "the quota is counted", func() bool {
			got, err := s.Kube.CoreV1().ResourceQuotas(stage.System).Get(t.Context(), "none", metav1.GetOptions{})
			return err == nil && len(got.Status.Hard) > 0
		})
		if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "scale", "deployment", "lameduck-webhook-0",
			"--replicas=1"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		awaitCheck(t, admin, 1, []found{{"error", "Deployment lameduck-system/lameduck-webhook-0",
			"exceeded quota: none", "get resourcequota"}})
		if all, _ := checks(t, admin); slices.ContainsFunc(all, func(f found) bool {
			return f.Object == "namespace lameduck-system"
		}) {
			t.Errorf("it does not know why there is no coordinator: %+v", all)
		}
		if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "delete", "resourcequota",
			"none"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		scale(t, stage.System, "lameduck-webhook-0", 0)
		scale(t, stage.System, "lameduck-webhook-0", 1)
	})
	t.Run("a coordinator that hangs", func(t *testing.T) {
		pods, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
		if err != nil || len(pods) == 0 {
			t.Fatalf("%d coordinators: %v", len(pods), err)
		}
		if err := s.Signal(&pods[0], "webhook", 19); err != nil { // SIGSTOP
			t.Fatal(err)
		}
		awaitCheck(t, admin, 1, []found{{"error", "Pod lameduck-system/" + pods[0].Name, "the coordinator is not ready",
			"describe pod " + pods[0].Name}}, "--timeout=2s")
		if err := s.Signal(&pods[0], "webhook", 18); err != nil { // SIGCONT
			t.Fatal(err)
		}
		well(t)
	})
	t.Run("no agent on a node", func(t *testing.T) {
		scale(t, "lameduck-node", "lameduck-node", 0)
		awaitCheck(t, admin, 1, []found{{"error", "nodes", "1 of 1 have no agent (node-1)", "manifests/barrier"}})
		scale(t, "lameduck-node", "lameduck-node", 1)
	})
	t.Run("a Service without an agent, pods without the hook", func(t *testing.T) {
		ns := harness.Namespace(t, s.Kube, "uncovered", nil)
		if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2}); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 0, []found{{"note", "pods of Services", ns + ": 2", "kubectl label --overwrite"}})
		if out, err := s.Cluster.Kubectl(t.Context(), "label", "namespace", ns,
			"lameduck.io/mode=enforce"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := s.Apply(t.Context(), fmt.Sprintf(`
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: front, namespace: %s}
spec:
  ingressClassName: nginx
  defaultBackend: {service: {name: web, port: {number: 80}}}
`, ns)); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 0, []found{
			{"warning", "Service " + ns + "/web", `no gateway of its class "nginx" is declared`, "docs/coverage.md"},
			{"warning", "namespace " + ns, "2 of its pods ask for the barrier", "-n " + ns + " rollout restart"},
		})
		if all, _ := checks(t, admin); slices.ContainsFunc(all, func(f found) bool {
			return f.Level == "note" && strings.Contains(f.Problem, ns)
		}) {
			t.Errorf("pods in mode enforce are counted: %+v", all)
		}
		if err := s.Apply(t.Context(), fmt.Sprintf(quota, ns)); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 2, []found{{"unknown",
			"MutatingWebhookConfiguration lameduck, namespaces.barrier.lameduck.io", "exceeded quota: none", "-n"}},
			"-n", ns)
		if out, err := s.Cluster.Kubectl(t.Context(), "-n", ns, "delete", "resourcequota", "none"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		well(t)
	})
	t.Run("a pod whose image of lameduck-wait is not pulled", func(t *testing.T) {
		ns := harness.Barred(t, s.Kube, "unpulled",
			map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
		pods := s.Kube.CoreV1().Pods(ns)
		pod, err := pods.Create(t.Context(), harness.StrictPod("waits"), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		// No kubelet pulls images here.
		pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: pod.Spec.InitContainers[0].Name,
			Image: pod.Spec.InitContainers[0].Image, State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off"}}}}
		if _, err := pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 1, []found{{"error", "namespace " + ns, "1 of its pods do not start (waits), because " +
			"the container that the barrier adds does not: lameduck/lameduck-wait:dev: ImagePullBackOff: Back-off",
			"barrier.image"}})
		if err := pods.Delete(t.Context(), "waits", *metav1.NewDeleteOptions(0)); err != nil {
			t.Fatal(err)
		}
		well(t)
	})
	t.Run("the clock of a node", func(t *testing.T) {
		leases := s.Kube.CoordinationV1().Leases(corev1.NamespaceNodeLease)
		if _, err := leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "ahead"},
			Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: time.Now().Add(time.Hour)}}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 0, []found{{"warning", "nodes", "(ahead: 59m", "timedatectl"}})
		if err := leases.Delete(t.Context(), "ahead", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("an agent of another version", func(t *testing.T) {
		bin := t.TempDir()
		build := exec.Command("go", "build", "-buildvcs=false", "-o", bin+"/", "-ldflags",
			"-X github.com/lameduck-io/lameduck/internal/version.version=v0.0.9", "./cmd/agent")
		build.Dir = filepath.Join(stage.Manifests(), "..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		run := func(program string) {
			t.Helper()
			patch := fmt.Sprintf(`[{"op": "replace", "path": "/spec/template/spec/containers/0/command",
				"value": [%q]}]`, program)
			if _, err := s.Kube.AppsV1().Deployments("lameduck-node").Patch(t.Context(), "lameduck-node",
				types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := s.Await(t.Context(), "lameduck-node", "lameduck-node"); err != nil {
				t.Fatal(err)
			}
		}
		run(filepath.Join(bin, "agent"))
		pods, err := s.Pods(t.Context(), "lameduck-node", "app.kubernetes.io/component=node")
		if err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, admin, 1, []found{{"error", "agent lameduck-node/" + pods[0].Name,
			"it is of version v0.0.9, commit unknown, the coordinators of dev, commit unknown", "ownerReferences"}})
		run(filepath.Join(harness.Programs(t), "agent"))
		well(t)
	})
	t.Run("rights", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "kubeconfig")
		if err := s.Cluster.WriteKubeconfig(path, "checker"); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, path, 2, []found{{"unknown", "nodes", `User "checker" cannot list resource "nodes"`,
			"lameduck-view"}})
		subject := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "checker"}}
		meta := metav1.ObjectMeta{Name: "checker", Namespace: stage.System}
		if _, err := s.Kube.RbacV1().RoleBindings(stage.System).Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: meta, Subjects: subject, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role",
				Name: "lameduck-view"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Kube.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "checker"}, Subjects: subject,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "lameduck-view"}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// All that it lacks is the right to create a pod, as a dry run.
		awaitCheck(t, path, 2, []found{{"unknown", barrier, `User "checker" cannot create resource "pods"`, "--as"}})
		all, _ := checks(t, path)
		for _, f := range all {
			if f.Level == "unknown" && !strings.Contains(f.Problem, `cannot create resource "pods"`) {
				t.Errorf("%+v", f)
			}
		}
		if err := s.Apply(t.Context(), `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: creator}
rules: [{apiGroups: [""], resources: [pods], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: creator}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: creator}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: checker}]
`); err != nil {
			t.Fatal(err)
		}
		awaitCheck(t, path, 0, nil)
	})
	if _, code := checks(t, admin, "--server=https://127.0.0.1:1"); code != 2 {
		t.Errorf("an API server that is away: exit code %d", code)
	}
}

// quota admits no pod.
const quota = `
apiVersion: v1
kind: ResourceQuota
metadata: {name: none, namespace: %s}
spec: {hard: {pods: "0"}}
`

// Before an installation it is said what would be in its way, by the API server's own admission.
func TestCheckBeforeAnInstallation(t *testing.T) {
	s := open(t)
	admin := s.Cluster.Kubeconfig()
	ns := harness.Namespace(t, s.Kube, "before", nil)
	in := "--lameduck-namespace=" + ns
	awaitCheck(t, admin, 0, []found{{"note", "images", "known only when one tries", "get events"}}, "--pre", in)
	awaitCheck(t, admin, 0, []found{{"note", "namespace not-yet", "it does not exist yet", "kubectl create namespace"}},
		"--pre", "--lameduck-namespace=not-yet")
	awaitCheck(t, admin, 1, []found{{"error", "clusterroles", "you may not create them", "cluster-admin"}}, "--pre", in,
		"--as=jane")
	if err := s.Apply(t.Context(), fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: of-others}
webhooks:
  - name: pods.example.com
    admissionReviewVersions: [v1]
    sideEffects: None
    clientConfig: {url: "https://127.0.0.1:1"}
    namespaceSelector: {matchLabels: {no-such: label}}
    rules: [{operations: ["*"], apiGroups: [""], apiVersions: [v1], resources: [pods]}]
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: none, namespace: %s}
spec:
  hard: {pods: "0"}
  # Nothing else would show that the pod has the class of the coordinators.
  scopeSelector:
    matchExpressions: [{scopeName: PriorityClass, operator: In, values: [system-cluster-critical]}]
`, ns)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = s.Cluster.Kubectl(context.Background(), "delete", "validatingwebhookconfiguration", "of-others")
	})
	awaitCheck(t, admin, 1, []found{
		{"error", "namespace " + ns, "exceeded quota: none", "get resourcequota"},
		{"warning", "ValidatingWebhookConfiguration of-others, pods.example.com", "refuses them if it does not answer",
			"failurePolicy: Ignore"},
	}, "--pre", in)
}

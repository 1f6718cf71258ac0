//go:build e2e

package quickstart

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// The chart on a real cluster, with certificate, secret and CA brought along by the commands of
// operations.md: coordinators are asked, and node agents trust them, although no agent was
// configured with the CA. The release is applied by kubectl: of Helm it is the engine that is here,
// not the installer.
func (l *lab) testOwnCertificates(t *testing.T) {
	// Where operators make their certificate, and have the repository.
	dir := t.TempDir()
	manifests, err := filepath.Abs(filepath.Join(harness.Repository, "manifests"))
	if err == nil {
		err = os.Symlink(manifests, filepath.Join(dir, "manifests"))
	}
	if err != nil {
		t.Fatal(err)
	}
	ca, err := cluster.NewCA()
	if err == nil {
		err = ca.IssueFiles(dir, "*.lameduck-system.svc")
	}
	if err != nil {
		t.Fatal(err)
	}
	blocks := find(t, "operations.md", "Your own certificate and secret").blocks
	if len(blocks) != 3 {
		t.Fatalf("the page has %d blocks: want what comes before the installation, and two after it", len(blocks))
	}
	in := "cd " + dir + "\n"
	l.sh(t, in+blocks[0])
	objects, hooks, err := harness.Chart(t, harness.ChartDir, map[string]any{"certificates": "own",
		"createNamespace": true, "barrier": map[string]any{"enabled": true}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"lameduck.yaml": objects, "check.yaml": hooks} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.sh(t, in+"kubectl apply --validate=strict -f lameduck.yaml")
	l.sh(t, in+blocks[1])
	l.sh(t, in+blocks[2])
	l.sh(t, in+`kubectl -n lameduck-system rollout status deployment \
	-l app.kubernetes.io/component=webhook --timeout=120s
kubectl -n lameduck-node rollout status daemonset/lameduck-node --timeout=120s
kubectl apply -f check.yaml
kubectl -n lameduck-system wait --for=condition=Complete --timeout=150s job/lameduck-check`)
	l.connected(t, stage.System, 3, entries)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "hooked",
		Labels: map[string]string{"lameduck.io/mode": "enforce"}}}
	if _, err := l.Kube.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "new"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "haproxy:2.6"}}}}
	l.Await(t, time.Minute, "a new pod gets the hook", func() error {
		got, err := l.Kube.CoreV1().Pods(namespace.Name).Create(t.Context(), pod,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && got.Annotations["lameduck.io/barrier-id"] == "" {
			err = errors.New("it has none")
		}
		return err
	})
	if out := l.sh(t, "kubectl -n lameduck-system get events "+
		"--field-selector=reason=Failed,involvedObject.name=lameduck-check -o name"); strings.TrimSpace(out) != "" {
		t.Errorf("the check: %s", out)
	}
	l.sh(t, in+`kubectl delete validatingwebhookconfiguration,mutatingwebhookconfiguration lameduck --ignore-not-found
kubectl delete --ignore-not-found -f check.yaml
kubectl delete --ignore-not-found -f lameduck.yaml
kubectl delete namespace hooked`)
	for _, name := range []string{"lameduck-system", "lameduck-node"} {
		if _, err := l.Kube.CoreV1().Namespaces().Get(t.Context(), name, metav1.GetOptions{}); err == nil {
			t.Error(fmt.Errorf("namespace %s is still there", name))
		}
	}
}

package install

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/planes"
)

// With files that are brought along, by operators or by cert-manager, the coordinator serves what
// they have, follows when they change, and writes nothing: the right to is not there.
func TestCertificatesThatAreBroughtAlong(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "own-certificates", nil)
	dir := t.TempDir()
	const account = "system:serviceaccount:own:lameduck-webhook"
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := s.Cluster.WriteKubeconfig(kubeconfig, account, "system:authenticated"); err != nil {
		t.Fatal(err)
	}
	// What the overlay leaves of the rights.
	binding := `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: own-certificates}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-webhook}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: "` + account + `"}]
`
	if err := s.Apply(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	tls, secret := filepath.Join(dir, "tls"), filepath.Join(dir, "secret")
	bring := func(ca *cluster.CA, secrets ...string) {
		t.Helper()
		if err := ca.IssueFiles(tls, "127.0.0.1"); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(secret, []byte(strings.Join(secrets, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first, err := cluster.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	bring(first, "the-first-secret-of-all")
	address, people := planes.FreeAddress(t), planes.FreeAddress(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	said := func() string {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	config := filepath.Join(dir, "coordinator.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `apiVersion: lameduck.io/v1alpha1
kind: CoordinatorConfiguration
addresses: {admission: %q, agents: "127.0.0.1:0", metrics: %q, probes: "127.0.0.1:0"}
certificates: {dir: %q, admissionSecretFile: %q}
times: {shutdownDelay: 0s}
`, address, people, tls, secret), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(harness.Programs(t), "webhook"), "--kubeconfig="+kubeconfig, "--namespace=own",
		"--replica=brought-along", "--ordinal=0", "--config="+config)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(said())
		}
		log.Close()
	})
	none, ignore, seconds := admissionv1.SideEffectClassNoneOnDryRun, admissionv1.Ignore, int32(5)
	webhooks := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	point := func(path string, bundle []byte) {
		t.Helper()
		url := "https://" + address + path
		config := &admissionv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "own-certificates"},
			Webhooks: []admissionv1.ValidatingWebhook{{
				Name: "pods-0.lameduck.io", SideEffects: &none, FailurePolicy: &ignore, TimeoutSeconds: &seconds,
				AdmissionReviewVersions: []string{"v1"},
				ClientConfig:            admissionv1.WebhookClientConfig{URL: &url, CABundle: bundle},
				NamespaceSelector: &metav1.LabelSelector{
					MatchLabels: map[string]string{"kubernetes.io/metadata.name": ns}},
				Rules: []admissionv1.RuleWithOperations{{
					Operations: []admissionv1.OperationType{admissionv1.Create},
					Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
						Resources: []string{"pods/eviction"}},
				}},
			}},
		}
		if got, err := webhooks.Get(t.Context(), config.Name, metav1.GetOptions{}); err == nil {
			config.ResourceVersion = got.ResourceVersion
			_, err = webhooks.Update(t.Context(), config, metav1.UpdateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		} else if _, err := webhooks.Create(t.Context(), config, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = webhooks.Delete(context.WithoutCancel(t.Context()), "own-certificates", metav1.DeleteOptions{})
		_, _ = s.Cluster.Kubectl(context.WithoutCancel(t.Context()), "delete", "clusterrolebinding", "own-certificates")
	})
	// The namespace is asked about by the stage's coordinators too; all of them are asked, and who
	// refuses first is heard.
	if out, err := s.Cluster.Kubectl(t.Context(), "label", "namespace", ns, "lameduck.io/mode=off"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	answers := func(when string) {
		t.Helper()
		if out, err := check(t, s, "", "--namespace="+ns, "--entries=1", "--wait=30s"); err != nil ||
			!strings.Contains(out, "replica brought-along") {
			t.Errorf("%s: %v: %s", when, err, out)
		}
	}
	harness.Until(t, 30*time.Second, "the coordinator listens", func() bool {
		conn, err := net.Dial("tcp", people)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	point("/v1/admit/the-first-secret-of-all", first.PEM())
	answers("at first")
	// As operations.md says: both are good, then the API server is told, then the former goes.
	second, err := cluster.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	bring(first, "the-first-secret-of-all", "the-second-secret-of-all")
	point("/v1/admit/the-first-secret-of-all", append(first.PEM(), second.PEM()...))
	answers("with both trusted")
	bring(second, "the-second-secret-of-all", "the-first-secret-of-all")
	point("/v1/admit/the-second-secret-of-all", second.PEM())
	answers("with the second alone")
	bring(second, "the-second-secret-of-all")
	time.Sleep(6 * time.Second) // the file is read every 5 s
	answers("when the first is gone")
	// The API server refuses each write, and the coordinator logs that.
	if bad := said(); strings.Contains(bad, "DATA RACE") || strings.Contains(bad, "forbidden") {
		t.Error(bad)
	}
}

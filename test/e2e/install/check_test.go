package install

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// check runs lameduck-webhook check as the user as. Empty: as the administrator.
func check(t *testing.T, s *stage.Stage, as string, args ...string) (string, error) {
	t.Helper()
	kubeconfig := s.Cluster.Kubeconfig()
	if as != "" {
		kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
		if err := s.Cluster.WriteKubeconfig(kubeconfig, as, "system:authenticated"); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command(filepath.Join(harness.Programs(t), "webhook"),
		append([]string{"check", "--kubeconfig", kubeconfig}, args...)...).CombinedOutput()
	return string(out), err
}

// The check says yes if and only if the API server asks a coordinator by each entry, with the one
// right that it is given.
func TestCheck(t *testing.T) {
	s := open(t)
	if out, err := check(t, s, ""); err != nil ||
		!regexp.MustCompile(
			`^pods-0.lameduck.io: Lameduck answers: replica lameduck-webhook-0-.*\n`+
				`pods-1.lameduck.io: Lameduck answers: replica lameduck-webhook-1-.*\n$`).MatchString(out) {
		t.Errorf("%v: %s", err, out)
	}
	// One entry that does not work is not hidden by another that does.
	if out, err := check(t, s, "", "--entries=3", "--wait=1s"); err == nil ||
		!strings.Contains(out, "pods-2.lameduck.io, within 1s: deletions in namespace default do not wait") {
		t.Errorf("an entry that is not there: %v: %s", err, out)
	}
	const account = "system:serviceaccount:lameduck-system:lameduck-check"
	if out, err := check(t, s, account); err == nil ||
		!strings.Contains(out, "needs the right to create pods/eviction with the name lameduck-check in namespace "+
			"default") {
		t.Errorf("without the right: %v: %s", err, out)
	}
	if err := s.Apply(t.Context(), "{apiVersion: v1, kind: Namespace, metadata: {name: lameduck-check}}"); err != nil {
		t.Fatal(err)
	}
	rights := ""
	for key, o := range objects(t, kustomized(t, s, "check")) {
		if !strings.HasPrefix(key, "Job") {
			rights += "---\n" + text(t, o)
		}
	}
	if err := s.Apply(t.Context(), rights); err != nil {
		t.Fatal(err)
	}
	if out, err := check(t, s, account, "--namespace=lameduck-check"); err != nil ||
		!strings.HasPrefix(out, "pods-0.lameduck.io: Lameduck answers") {
		t.Errorf("with the right alone: %v: %s", err, out)
	}
	if out, err := check(t, s, "", "--namespace=kube-system", "--wait=1s"); err == nil ||
		!strings.Contains(out, "deletions in namespace kube-system do not wait") {
		t.Errorf("in an excluded namespace: %v: %s", err, out)
	}
}

func text(t *testing.T, o object) string {
	t.Helper()
	out, err := yaml.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// commands returns what a section of the operations page tells operators to type.
func commands(t *testing.T, section string) []string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(stage.Manifests(), "..", "..", "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	if section != "" {
		_, after, ok := strings.Cut(text, "\n## "+section+"\n")
		if !ok {
			t.Fatalf("the operations page has no section %s", section)
		}
		text = after
	}
	text, _, _ = strings.Cut(text, "\n## ")
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^    (kubectl .*)$`).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

// shell runs a command of a document in the repository, with kubectl and a kubeconfig as operators
// have them.
func shell(t *testing.T, s *stage.Stage, command string) string {
	t.Helper()
	cmd := exec.Command("bash", "-euo", "pipefail", "-c", command)
	cmd.Dir = filepath.Join(stage.Manifests(), "..", "..")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.Cluster.Kubeconfig(),
		"PATH="+s.Cluster.Binaries().Dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// The last test: it removes what the others use. Pods are deleted all the while; no call of the
// webhook fails, for it is not called any more when its coordinators go.
func TestUninstall(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "uninstall", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	glass := commands(t, "")
	if len(glass) == 0 || !strings.Contains(glass[0],
		"delete validatingwebhookconfiguration,mutatingwebhookconfiguration lameduck") {
		t.Fatalf("the operations page does not begin with how to break the glass: %q", glass)
	}
	steps := commands(t, "Uninstall")
	if len(steps) != 2 || steps[0] != glass[0] {
		t.Fatalf("to uninstall begins with another command than break glass: %q", steps)
	}
	_, failedBefore := calls(t, s)
	var deleted atomic.Int64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			pods, err := s.Pods(t.Context(), ns, "app=web")
			if err != nil || len(pods) == 0 {
				continue
			}
			began := time.Now()
			err = s.Kube.CoreV1().Pods(ns).Delete(t.Context(), pods[int(deleted.Load())%len(pods)].Name,
				metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
			// One that no coordinator answers takes the timeoutSeconds of the webhook, 4 s.
			if took := time.Since(began); err != nil && !apierrors.IsNotFound(err) || took > 4*time.Second {
				t.Errorf("a deletion took %s: %v", took, err)
			}
			deleted.Add(1)
		}
	}()
	more := func() {
		end := time.Now().Add(30 * time.Second)
		for was := deleted.Load(); deleted.Load() < was+10; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d deletions", deleted.Load())
			}
		}
	}
	more()
	for _, step := range steps {
		t.Log(step + "\n" + shell(t, s, step))
	}
	more()
	close(stop)
	<-done
	if _, failed := calls(t, s); failed != failedBefore {
		t.Errorf("%d calls failed", failed-failedBefore)
	}
	if out, err := check(t, s, "", "--wait=1s"); err == nil {
		t.Errorf("the check says that it is still there: %s", out)
	}
	for key := range objects(t, kustomized(t, s, "base")) {
		kind, name, _ := strings.Cut(key, " ")
		in, name, _ := strings.Cut(name, "/")
		args := []string{"get", kind, name, "--ignore-not-found", "-o", "name"}
		if in != "<nil>" {
			args = append(args, "-n", in)
		}
		harness.Until(t, 30*time.Second, key+" is gone", func() bool {
			out, err := s.Cluster.Kubectl(t.Context(), args...)
			return err == nil && out == ""
		})
	}
}

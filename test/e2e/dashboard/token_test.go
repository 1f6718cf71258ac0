package dashboard

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// What docs/dashboard.md tells operators to do for a token, by the real API server: it lets the
// page be looked at, and is good for nothing else.
func TestTokensOfTheDocuments(t *testing.T) {
	s := open(t)
	text, err := os.ReadFile("../../../docs/dashboard.md")
	if err != nil {
		t.Fatal(err)
	}
	role := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(text)
	commands := regexp.MustCompile(`(?m)^ {6}kubectl (create .*)$`).FindAllSubmatch(text, -1)
	if role == nil || len(commands) != 3 {
		t.Fatalf("the document has changed: %d commands", len(commands))
	}
	reviewer := func() *identity.Kubernetes { return identity.New(s.Kube) } // which remembers nothing yet
	run := func(args string) string {
		t.Helper()
		out, err := s.Cluster.Kubectl(t.Context(), append([]string{"-n", "default"}, strings.Fields(args)...)...)
		if err != nil {
			t.Fatalf("kubectl %s: %v: %s", args, err, out)
		}
		return strings.TrimSpace(out)
	}
	run(string(commands[0][1]))
	token := run(string(commands[2][1]))
	if err := reviewer().Review(t.Context(), token); !errors.Is(err, coordinator.ErrForbidden) ||
		!strings.Contains(err.Error(), "system:serviceaccount:default:viewer") {
		t.Errorf("without the right: %v", err)
	}
	if err := s.Apply(t.Context(), string(role[1])); err != nil {
		t.Fatal(err)
	}
	run(string(commands[1][1]))
	// The API server learns of rights by a watch.
	harness.Await(t, 20*time.Second, "with the right", func() error { return reviewer().Review(t.Context(), token) })
	if err := reviewer().Review(t.Context(), run("create token viewer")); !errors.Is(err,
		coordinator.ErrUnauthenticated) {
		t.Errorf("a token for the API server: %v", err)
	}
	if out, err := s.Cluster.Kubectl(t.Context(), "get", "pods", "--token="+token, "--kubeconfig=/dev/null",
		"--server="+s.Cluster.Server(), "--insecure-skip-tls-verify"); err == nil ||
		!strings.Contains(out+err.Error(), "Unauthorized") {
		t.Errorf("the API server takes it too: %v: %s", err, out)
	}
}

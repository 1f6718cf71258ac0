package scenarios

import (
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// The whole of the manifests, as people apply them. That the coordinator can work with exactly these rights, and that the webhook is
// called by exactly this configuration, the other tests show: they install it from here, only the address patched.
func TestManifestsAreAccepted(t *testing.T) {
	t.Parallel()
	s := open(t)
	out, err := s.Cluster.Kubectl(t.Context(), "apply", "--dry-run=server", "--validate=strict", "-k", stage.Manifests())
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(out) {
		// The tests have installed some of it without kubectl apply.
		if strings.HasPrefix(line, "Warning:") && !strings.Contains(line, "last-applied-configuration") {
			t.Error(strings.TrimSpace(line))
		}
	}
}

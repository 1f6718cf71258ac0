// Package install tests an installation as operators make it: manifests and chart, certificates,
// rights, the commands of the documents, metrics.
package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// certManager is whose definitions the API server is given.
const certManager = "github.com/cert-manager/cert-manager@v1.18.2"

func TestMain(m *testing.M) {
	if !cluster.Inside() {
		// Tests that need them say so where they cannot be had. Inside there is no network.
		_ = exec.Command("go", "mod", "download", certManager, prometheusOperator).Run()
	}
	cluster.Main(m)
}

// overlap is that of certificates: as short as it can be while every replica and agent hears of a
// change in time.
const overlap = 3 * time.Second

// open returns the stage that all tests of this package share: one node, two coordinators with
// short times for certificates, the webhook, and an API server that writes an audit log.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	harness.HAProxy(t)
	flags := []string{fileFlag(t, "audit-policy-file", auditPolicy),
		fileFlag(t, "admission-control-config-file", harness.PriorityLimits)}
	return harness.Stage(t, cluster.Options{APIServer: append(flags, "--audit-log-path="+auditLog())},
		stage.Options{Entries: 2, Overlap: overlap, CRDs: stage.GatewayAPI})
}

// fileFlag is a flag of the API server whose value is a file with text.
func fileFlag(t *testing.T, flag, text string) string {
	t.Helper()
	path := filepath.Join(os.TempDir(), flag)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return "--" + flag + "=" + path
}

// Package install tests what operators install and how: manifests and chart, certificates, rights,
// the commands of the documents, metrics.
package install

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// certManager is whose definitions the API server is given.
const certManager = "github.com/cert-manager/cert-manager@v1.18.2"

func TestMain(m *testing.M) {
	if !cluster.Inside() {
		// The test that needs it says so where it cannot be had. Inside there is no network.
		_ = exec.Command("go", "mod", "download", certManager).Run()
	}
	cluster.Main(m)
}

// overlap is that of certificates: as short as it can be while every replica and agent hears of a
// change in time.
const overlap = 3 * time.Second

var (
	openOnce sync.Once
	opened   *stage.Stage
	errOpen  error
)

// open returns the stage that all tests of this package share: one node, two coordinators with
// short times for certificates, the webhook.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	if _, err := stage.HAProxy(); err != nil {
		cluster.Missing(t, "haproxy", "apt-get install haproxy")
	}
	cluster.Entered(t)
	bin := stage.Programs(t)
	openOnce.Do(func() {
		// Like the shared cluster, it lives until the program ends.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		var c *cluster.Cluster
		if c, errOpen = audited(); errOpen != nil {
			return
		}
		if opened, errOpen = stage.Open(ctx, c,
			stage.Options{Bin: bin, Dir: filepath.Join(os.TempDir(), "n"), Entries: 2,
				Overlap: overlap}); errOpen != nil {
			return
		}
		if errOpen = opened.InstallCoordinator(ctx); errOpen != nil {
			return
		}
		errOpen = opened.InstallWebhook(ctx, 2)
	})
	if errOpen != nil {
		t.Fatal(errOpen)
	}
	return opened
}

// auditPolicy has the API server write down what the coordinator and agents ask for.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:lameduck-system", "system:serviceaccounts:rights"]
  - level: None
`

// priorityLimits has the API server refuse pods of the classes of the system where no ResourceQuota
// allows them, as GKE does.
const priorityLimits = `
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: ResourceQuota
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: ResourceQuotaConfiguration
      limitedResources:
        - resource: pods
          matchScopes:
            - {scopeName: PriorityClass, operator: In, values: [system-node-critical, system-cluster-critical]}
`

// auditLog is where.
func auditLog() string { return filepath.Join(os.TempDir(), "audit.log") }

// audited starts a control plane that does.
func audited() (*cluster.Cluster, error) {
	policy := filepath.Join(os.TempDir(), "audit.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}
	limits := filepath.Join(os.TempDir(), "limits.yaml")
	if err := os.WriteFile(limits, []byte(priorityLimits), 0o600); err != nil {
		return nil, err
	}
	return cluster.Start(context.Background(), cluster.Options{
		LogDir: os.Getenv("LAMEDUCK_LOGS"),
		APIServer: []string{"--audit-policy-file=" + policy, "--audit-log-path=" + auditLog(),
			"--admission-control-config-file=" + limits},
	})
}

// namespace makes one for the test.
func namespace(t *testing.T, s *stage.Stage, name string) string {
	t.Helper()
	if err := s.CreateNamespace(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	return name
}

// until asks again and again until something holds.
func until(t *testing.T, what string, most time.Duration, holds func() bool) {
	t.Helper()
	timer := time.After(most)
	for !holds() {
		select {
		case <-timer:
			t.Fatalf("not within %s: %s", most, what)
		case <-t.Context().Done():
			t.Fatal("in vain: ", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

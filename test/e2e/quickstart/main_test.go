//go:build e2e

package quickstart

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

// shop is the namespace of the quick start's application.
const shop = "shop"

// lab is three nodes with nothing but images on them.
type lab struct {
	*harness.Lab
	// bin has the programs, audit is the audit log.
	bin, audit string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	cluster.Entered(t)
	haproxy := harness.HAProxy(t)
	libraries, err := machine.Libraries(t.Context(), haproxy)
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{bin: harness.StaticPrograms(t), audit: filepath.Join(os.TempDir(), "audit.log")}
	policy := filepath.Join(t.TempDir(), "audit.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	options := machine.ControlPlane()
	options.APIServer = append(options.APIServer, "--audit-policy-file="+policy, "--audit-log-path="+l.audit)
	// As the image of that name has it, the program is in a folder of the PATH.
	proxy := machine.Image{Name: "docker.io/library/haproxy:2.6", Program: haproxy,
		Libraries: append(libraries, haproxy)}
	l.Lab = harness.NewLab(t, options, 3, machine.Options{Images: append(harness.Images(l.bin, "dev"), proxy)}, 400,
		[2]string{"lameduck-system", "app.kubernetes.io/component=webhook"},
		[2]string{"lameduck-node", "app.kubernetes.io/component=node"},
		[2]string{shop, "app.kubernetes.io/name=gateway"})
	return l
}

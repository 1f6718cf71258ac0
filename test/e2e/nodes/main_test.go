//go:build e2e

package nodes

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

const (
	system  = "lameduck-system" // of the coordinator
	agents  = "lameduck-node"   // of the node agents
	gateway = "gateway"         // of HAProxy
)

const (
	appImage     = "lameduck.test/app:1"
	haproxyImage = "lameduck.test/haproxy:1"
)

// lab is a cluster of three nodes with Lameduck.
type lab struct {
	*harness.Lab
}

// newLab starts n nodes and installs the coordinator and the node agents, but no webhook yet.
func newLab(t *testing.T, n int, options machine.Options) *lab {
	t.Helper()
	began := time.Now()
	l := newNodes(t, n, options)
	l.install(t)
	t.Logf("Lameduck after %s", time.Since(began).Round(time.Second/10))
	return l
}

// newNodes starts n nodes that have the images of Lameduck, and nothing of it installed.
func newNodes(t *testing.T, n int, options machine.Options) *lab {
	t.Helper()
	cluster.Entered(t)
	haproxy := harness.HAProxy(t)
	bin := harness.StaticPrograms(t)
	libraries, err := machine.Libraries(t.Context(), haproxy)
	if err != nil {
		t.Fatal(err)
	}
	for _, image := range harness.Images(bin, "dev") {
		// What users get, if make images has made it of this tree.
		if dist := os.Getenv("LAMEDUCK_DIST"); dist != "" {
			image.Archive, image.Program = filepath.Join(dist, filepath.Base(image.Program)+"-dev.oci.tar"), ""
		}
		options.Images = append(options.Images, image)
	}
	options.Images = append(options.Images,
		machine.Image{Name: appImage, Program: filepath.Join(bin, "app")},
		machine.Image{Name: haproxyImage, Program: haproxy, Libraries: libraries},
	)
	return &lab{harness.NewLab(t, machine.ControlPlane(), n, options, 20,
		[2]string{system, "app.kubernetes.io/component=webhook"}, [2]string{agents, "app.kubernetes.io/component=node"},
		[2]string{gateway, "app=gateway"}, [2]string{edge, "lameduck.io/agent"})}
}

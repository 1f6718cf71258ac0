package scenarios

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// deadline is the coordinator's default.
const deadline = 30 * time.Second

var (
	openOnce sync.Once
	opened   *stage.Stage
	errOpen  error
)

// open returns the stage that all tests of this package share: one node, the coordinator, the
// webhook. Tests keep apart by namespaces.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	if _, err := stage.HAProxy(); err != nil {
		cluster.Missing(t, "haproxy", "apt-get install haproxy")
	}
	c := cluster.Shared(t)
	bin := stage.Programs(t)
	openOnce.Do(func() {
		// Like the shared cluster, it lives until the program ends.
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if opened, errOpen = stage.Open(ctx, c,
			stage.Options{Bin: bin, Dir: filepath.Join(os.TempDir(), "n"), Entries: 1}); errOpen != nil {
			return
		}
		if errOpen = opened.InstallCoordinator(ctx); errOpen != nil {
			return
		}
		errOpen = opened.InstallWebhook(ctx, 1)
	})
	if errOpen != nil {
		t.Fatal(errOpen)
	}
	return opened
}

// namespace makes one for the test.
func namespace(t *testing.T, s *stage.Stage, name string) string {
	t.Helper()
	if err := s.CreateNamespace(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	return name
}

// clients sends requests until the returned function is called.
func clients(t *testing.T, address string, keepAlive bool) func() load.Result {
	t.Helper()
	return runClients(t, address, keepAlive).Stop
}

// runClients sends requests until they are stopped.
func runClients(t *testing.T, address string, keepAlive bool) *load.Load {
	t.Helper()
	l, err := load.Run(t.Context(), load.Options{
		Target: "http://" + address + "/", Rate: 150, Timeout: 10 * time.Second, KeepAlive: keepAlive, DropClosed: true,
		WantBody: []byte("ok\n"), MaxInFlight: 1000,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("10.244.251.1"), netip.MustParseAddr("10.244.251.2")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	return l
}

package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

// shared is the control plane of all tests of this program, and why there is none.
var shared struct {
	entered error // set by Main, before tests run

	once    sync.Once
	cluster *Cluster
	err     error
}

// Main is TestMain for tests that use [Shared]: it builds a control plane if need be, enters, runs
// the tests and exits, which ends the shared control plane. Where the system forbids entering, or
// Kubernetes cannot be built, the tests run outside and Shared tells them. With more time to build
// than go test allows (10 minutes), run cmd/kubernetes-build first.
func Main(m *testing.M) { runTests(m, BuildControlPlane, Enter) }

// MainAsRoot is Main with [Build] and [EnterAsRoot], for tests that start machines.
func MainAsRoot(m *testing.M) {
	if os.Geteuid() != 0 {
		shared.entered = errNotRoot // and nothing is built for it
		os.Exit(m.Run())
	}
	runTests(m, Build, EnterAsRoot)
}

func runTests(m *testing.M, build func(context.Context, io.Writer) (Binaries, error), enter func() error) {
	if !Inside() && os.Getenv(stageKey) == "" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		_, shared.entered = build(ctx, os.Stderr)
		stop()
	}
	if shared.entered == nil {
		shared.entered = enter()
	}
	os.Exit(m.Run()) // which ends all that runs inside, and removes its files
}

// Shared returns the control plane that the tests of this program share, started when the first
// asks for it. Tests keep apart by namespaces. Where it cannot be had the test is skipped, or
// fails: see [Missing]. Its logs go to $LAMEDUCK_LOGS if that is set.
func Shared(t testing.TB) *Cluster {
	t.Helper()
	Entered(t)
	shared.once.Do(func() {
		shared.cluster, shared.err = Start(context.Background(), Options{LogDir: os.Getenv("LAMEDUCK_LOGS")})
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

// New returns a control plane for this test alone, which ends with it. Its logs go to LAMEDUCK_LOGS
// too, if options do not say otherwise. Where it cannot be had it does as Shared does.
func New(t testing.TB, options Options) *Cluster {
	t.Helper()
	Entered(t)
	if options.LogDir == "" && os.Getenv("LAMEDUCK_LOGS") != "" {
		options.LogDir = filepath.Join(os.Getenv("LAMEDUCK_LOGS"), filepath.FromSlash(t.Name()))
	}
	c, err := Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	return c
}

// Entered ends a test that does not run inside, as Shared does.
func Entered(t testing.TB) {
	t.Helper()
	if shared.entered != nil {
		Missing(t, "a control plane", shared.entered.Error())
	}
	if !Inside() {
		t.Fatal("a control plane without cluster.Main in TestMain")
	}
}

// Missing ends a test that needs something real which is not here: what it is and how to get it. On
// a laptop the test is skipped; where REQUIRE_REAL=1 or CI=true says that everything must be there,
// it fails.
func Missing(t testing.TB, what, fix string) {
	t.Helper()
	message := fmt.Sprintf("%s is missing: %s", what, fix)
	if os.Getenv("REQUIRE_REAL") == "1" || os.Getenv("CI") == "true" {
		t.Fatal(message)
	}
	t.Skip(message)
}

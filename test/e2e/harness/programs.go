package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// Repository is the top folder of the repository.
var Repository = filepath.Join(stage.Manifests(), "..", "..")

var endToEnd = filepath.Join(Repository, "test", "e2e")

var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "bin")
	if err != nil {
		return "", err
	}
	ctx := context.Background()
	return dir, errors.Join(build(ctx, Repository, "./cmd/...", dir, false), build(ctx, endToEnd, "./app", dir, false))
})

// Programs returns the folder with what is tested: that of make build, if LAMEDUCK_BIN names it.
// Otherwise it builds the programs, with the race detector, once in a test program.
func Programs(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_BIN"); dir != "" {
		return dir
	}
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// StaticPrograms is Programs for images: it builds the programs without the race detector, which
// needs the C library.
func StaticPrograms(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	Build(t, Repository, "./cmd/...", dir)
	Build(t, endToEnd, "./app", dir)
	return dir
}

// Images returns the images of a release, with the programs in a folder.
func Images(bin, tag string) (all []machine.Image) {
	for _, program := range []string{"webhook", "agent", "lameduck-wait"} {
		all = append(all, machine.Image{Name: "docker.io/lameduck/" + program + ":" + tag,
			Program: filepath.Join(bin, program), User: "65532:65532"})
	}
	return all
}

// Build builds static programs of a tree into a folder.
func Build(t testing.TB, tree, programs, into string) {
	t.Helper()
	if err := build(t.Context(), tree, programs, into, true); err != nil {
		t.Fatal(err)
	}
}

func build(ctx context.Context, tree, programs, into string, static bool) error {
	flags, cgo := []string{"-race"}, "CGO_ENABLED=1"
	if static {
		flags, cgo = []string{"-trimpath", "-buildvcs=false"}, "CGO_ENABLED=0"
	}
	args := slices.Concat([]string{"build", "-o", into + "/"}, flags, []string{programs})
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = tree, append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s of %s: %w: %s", programs, tree, err, out)
	}
	return nil
}

// HAProxy returns the path of haproxy. Without it the test ends as [cluster.Missing] says.
func HAProxy(t testing.TB) string {
	t.Helper()
	path, err := stage.HAProxy()
	if err != nil {
		cluster.Missing(t, "haproxy", "apt-get install haproxy")
	}
	return path
}

// Program returns the path of a program. Without it the test ends as [cluster.Missing] says.
func Program(t testing.TB, name, fix string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		cluster.Missing(t, name, fix)
	}
	return path
}

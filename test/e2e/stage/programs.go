package stage

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "bin")
	if err != nil {
		return "", err
	}
	root := filepath.Join(Manifests(), "..", "..")
	for _, of := range []struct{ dir, pkg string }{{root, "./cmd/..."}, {filepath.Join(root, "test", "e2e"), "./app"}} {
		cmd := exec.Command("go", "build", "-race", "-o", dir+"/", of.pkg)
		cmd.Dir = of.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w: %s", of.pkg, err, out)
		}
	}
	return dir, nil
})

// Programs returns the folder with what is tested: that of make build, if LAMEDUCK_BIN names it.
// Otherwise it builds the programs, with the race detector, once in a test program.
func Programs(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_BIN"); dir != "" {
		return dir
	}
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/test/cluster"
)

// New is Start for a test: the machines end with it. If they are not to be had here the test is
// skipped, or fails: see [cluster.Missing]. When the test has failed the ends of all logs are
// printed, and they are kept in a folder that is named.
func New(t testing.TB, c *cluster.Cluster, n int, options Options) *Set {
	t.Helper()
	if err := Installed(); err != nil {
		cluster.Missing(t, "a real node", err.Error())
	}
	// Before Start, whose failure is the one that logs are wanted for.
	t.Cleanup(func() {
		if t.Failed() {
			keepLogs(t, c.LogDir())
		}
	})
	s, err := Start(t.Context(), c, n, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stop machines: %v", err)
		}
	})
	return s
}

// keepLogs prints the ends of the logs in dir. Those in a folder that will disappear are copied
// beside it.
func keepLogs(t testing.TB, dir string) {
	logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	kept := dir
	if os.Getenv("LAMEDUCK_LOGS") == "" {
		// $TMPDIR inside is a folder in that of the outside.
		kept = filepath.Join(filepath.Dir(os.TempDir()), "lameduck-logs", filepath.FromSlash(t.Name()))
		if err := os.RemoveAll(kept); err != nil {
			t.Logf("keep logs: %v", err)
		}
		if err := os.CopyFS(kept, os.DirFS(dir)); err != nil {
			t.Logf("keep logs: %v", err)
		}
	}
	var all strings.Builder
	for _, path := range logs {
		fmt.Fprintf(&all, "== %s\n%s\n", filepath.Base(path), tail(path, 12))
	}
	t.Logf("logs are kept in %s; their ends:\n%s", kept, all.String())
}

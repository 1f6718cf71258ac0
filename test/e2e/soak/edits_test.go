//go:build long

package soak

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// edits of the source that EDITS names, in the programs that are measured. The first scales what is
// remembered by design, for a short form. The others are leaks, which the test must find.
var edits = map[string]struct{ file, old, new string }{
	"memory": {"pkg/drain/times.go", "Memory: 10 * time.Minute", "Memory: time.Minute"},
	"leak-bytes": {"internal/coordinator/barrier.go", "defer c.Metrics.waiting.Dec()",
		"defer c.Metrics.waiting.Dec()\n\tleaked = append(leaked, make([]byte, 200))"},
	"leak-goroutines": {"internal/coordinator/barrier.go", "defer c.Metrics.waiting.Dec()",
		"defer c.Metrics.waiting.Dec()\n\tif leaked = append(leaked, nil); len(leaked)%50 == 0 {\n\t\t" +
			"go func() { select {} }()\n\t}"},
}

// edited builds the programs with the edits of EDITS, and has them measured.
func edited(t *testing.T) {
	t.Helper()
	names := strings.Fields(os.Getenv("EDITS"))
	if len(names) == 0 {
		return
	}
	dir := t.TempDir()
	replaced := map[string]string{}
	for _, name := range names {
		edit := edits[name]
		path := filepath.Join(harness.Repository, edit.file)
		source, err := os.ReadFile(path)
		must(t, err)
		if strings.Count(string(source), edit.old) != 1 {
			t.Fatalf("edit %q does not fit %s any more", name, edit.file)
		}
		text := strings.Replace(string(source), edit.old, edit.new, 1)
		if strings.HasPrefix(name, "leak") {
			text += "\nvar leaked [][]byte\n"
		}
		replaced[path] = filepath.Join(dir, name+".go")
		must(t, os.WriteFile(replaced[path], []byte(text), 0o600))
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replaced})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	build := exec.CommandContext(t.Context(), "go", "build", "-overlay",
		filepath.Join(dir, "overlay.json"), "-o", dir+"/", "./cmd/webhook", "./cmd/agent")
	build.Dir, build.Env = harness.Repository, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	t.Setenv("LAMEDUCK_BIN", dir)
}

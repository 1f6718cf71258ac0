package docs

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The toys of docs/contributing/add-a-gateway.md are packages, and with the lines of its diff the
// agent and the registry's test take them.
func TestTheToyGatewaysCompile(t *testing.T) {
	page := pages(t)["docs/contributing/add-a-gateway.md"]
	dir, overlay := t.TempDir(), map[string]string{}
	write := func(path, text string) {
		t.Helper()
		abs, err := filepath.Abs(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		overlay[abs] = filepath.Join(dir, strings.ReplaceAll(path, "/", "_"))
		if err := os.WriteFile(overlay[abs], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	toys := regexp.MustCompile("(?s)```go\n// ([a-z/]+\\.go)\n\n(.*?)```").FindAllStringSubmatch(page, -1)
	if len(toys) != 2 {
		t.Fatalf("%d toys, want 2", len(toys))
	}
	for _, m := range toys {
		write(m[1], m[2])
	}
	diff := regexp.MustCompile("(?s)```diff\n--- a/([a-z/]+\\.go)\n(.*?)```").FindStringSubmatch(page)
	if diff == nil {
		t.Fatal("no diff of the registry")
	}
	registry, err := os.ReadFile(filepath.Join(root, diff[1]))
	if err != nil {
		t.Fatal(err)
	}
	text, after := string(registry), ""
	for line := range strings.Lines(diff[2]) {
		added := strings.HasPrefix(line, "+")
		if !added {
			after = line[1:]
			if !strings.Contains(text, after) {
				t.Fatalf("%s has no line %q", diff[1], after)
			}
			continue
		}
		text = strings.Replace(text, after, after+line[1:], 1)
		after = line[1:]
	}
	write(diff[1], text)
	list, err := json.Marshal(map[string]map[string]string{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, list, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"build", "-buildvcs=false", "-overlay", file, "-o", filepath.Join(dir, "agent"), "./cmd/agent"},
		{"test", "-buildvcs=false", "-vet=off", "-overlay", file, "./internal/agent/kinds"},
	} {
		command := exec.Command("go", args...)
		command.Dir = root
		if out, err := command.CombinedOutput(); err != nil {
			t.Errorf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

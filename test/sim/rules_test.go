package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A mutation that breaks nothing is reported by its name: without this, a table in which every rule
// is caught shows nothing.
func TestAMutationThatBreaksNothingIsNotCaught(t *testing.T) {
	dir := t.TempDir()
	patch := `# rule 0: there is one more comment.
--- a/test/sim/rules.go
+++ b/test/sim/rules.go
@@ -1,1 +1,2 @@
 var errNotCaught = errors.New("a rule is broken, and no check notices it")
+// This comment breaks nothing.
`
	if err := os.WriteFile(filepath.Join(dir, "00-harmless.patch"), []byte(patch), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	err := tryMutations(&out, "../..", dir, 1, 10)
	if err == nil || !strings.Contains(err.Error(), "00-harmless") ||
		!strings.Contains(out.String(), "NOT caught in ") {
		t.Errorf("%v, and it printed %s", err, out.String())
	}
}

// Each rule that was caught before must still be broken by its patch. A patch that no longer fits
// breaks nothing, and must not pass for a rule that holds.
func TestEachMutationApplies(t *testing.T) {
	patches, err := filepath.Glob("mutations/*.patch")
	if err != nil || len(patches) < 24 {
		t.Fatalf("%d patches, %v", len(patches), err)
	}
	for _, patch := range patches {
		text, err := os.ReadFile(patch)
		if err == nil {
			_, _, _, err = apply("../..", string(text))
		}
		if err != nil {
			t.Errorf("%s: %v", patch, err)
		}
	}
}

func TestApply(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.go"), []byte("one\ntwo\n\nthree\ntwo\nfour\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const head = "# rule 1: what it\n# breaks.\n--- a/a.go\n+++ b/a.go\n"
	for name, c := range map[string]struct{ patch, want, err string }{
		"lines have moved": {head + "@@ -70,2 +70,2 @@ func\n \n-three\n+3\n two\n",
			"one\ntwo\n\n3\ntwo\nfour\n", ""},
		"two hunks":          {head + "@@\n-one\n+1\n two\n@@\n-four\n", "1\ntwo\n\nthree\ntwo\n", ""},
		"lines are missing":  {head + "@@\n one\n-three\n", "", "0 times"},
		"lines are twice":    {head + "@@\n-two\n", "", "2 times"},
		"a part of a line":   {head + "@@\n-ne\n", "", "0 times"},
		"it changes nothing": {head + "@@\n-one\n+one\n", "", "changes nothing"},
		"it has no words":    {"--- a/a.go\n+++ b/a.go\n@@\n-one\n", "", "does not say"},
		"it has no hunks":    {head, "", "no hunk"},
	} {
		t.Run(name, func(t *testing.T) {
			words, file, got, err := apply(dir, c.patch)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("%v, want %q", err, c.err)
				}
				return
			}
			if err != nil || got != c.want || file != "a.go" || words != "rule 1: what it breaks." {
				t.Errorf("%q of %q by %q, %v", got, file, words, err)
			}
		})
	}
}

package docs

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var update = flag.Bool("update", false, "write words.txt as the tree is")

// retired are words that have a better one. Identifiers count too.
var retired = regexp.MustCompile(`(?i)tombstone|gravestone|\b(nobody|somebody|whoever|anew|vicinity|grain|hearsay)\b|` +
	`\b(bury|buries|buried)\b|\bthose who\b|\bfor good\b|\blets? go of\b`)

// widths are how many columns a line of a comment and a line of code may have.
const commentWidth, codeWidth = 100, 120

// debt is what a directory has left of what is not written any more.
type debt struct {
	words, comments, code int
}

// A change may lower what is left of retired words and of wide lines, and not raise it. After one
// that lowers it: go test ./test/docs -run TestWords -update.
func TestWords(t *testing.T) {
	have := map[string]debt{}
	for _, suffix := range []string{".go", ".md"} {
		walk(t, suffix, func(path, text string) {
			if strings.HasPrefix(path, "test/docs/") || path == "CHANGELOG.md" {
				return
			}
			d := have[filepath.Dir(path)]
			d.words += len(retired.FindAllString(strings.ReplaceAll(text, "http.NoBody", ""), -1))
			sample := false // a block of code or output in a document, as wide as what it shows
			for line := range strings.Lines(text) {
				line = strings.ReplaceAll(strings.TrimRight(line, "\n"), "\t", "    ")
				wide := utf8.RuneCountInString(line)
				if suffix == ".md" {
					fence := strings.HasPrefix(strings.TrimSpace(line), "```")
					sample = sample != fence
					if fence || sample || strings.HasPrefix(line, "    ") {
						continue
					}
				}
				switch comment := suffix == ".md" || strings.HasPrefix(strings.TrimSpace(line), "//"); {
				case comment && wide > commentWidth && !strings.Contains(line, "|") && // no table, no URL
					!strings.Contains(line, "://"):
					d.comments++
				case !comment && wide > codeWidth:
					d.code++
				}
			}
			if d != (debt{}) {
				have[filepath.Dir(path)] = d
			}
		})
	}
	if *update {
		write(t, have)
	}
	allowed := map[string]debt{}
	text, err := os.ReadFile("words.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var dir string
		var d debt
		if strings.HasPrefix(line, "#") {
			continue
		}
		if _, err := fmt.Sscan(line, &d.words, &d.comments, &d.code, &dir); err != nil {
			t.Fatalf("words.txt: %q: %v", line, err)
		}
		allowed[dir] = d
	}
	for _, dir := range slices.Sorted(maps.Keys(have)) {
		h, a := have[dir], allowed[dir]
		for what, n := range map[string][2]int{
			"retired words": {h.words, a.words}, "comments beyond 100 columns": {h.comments, a.comments},
			"lines of code beyond 120 columns": {h.code, a.code},
		} {
			if n[0] > n[1] {
				t.Errorf("%s has %d %s, and had %d", dir, n[0], what, n[1])
			}
		}
	}
}

func write(t *testing.T, have map[string]debt) {
	t.Helper()
	var b strings.Builder
	b.WriteString("# What each directory has left of retired words, comments beyond 100 columns, code beyond 120 " +
		"columns. It may only become less.\n")
	for _, dir := range slices.SortedFunc(maps.Keys(have), cmp.Compare[string]) {
		d := have[dir]
		fmt.Fprintf(&b, "%d %d %d %s\n", d.words, d.comments, d.code, dir)
	}
	if err := os.WriteFile("words.txt", []byte(b.String()), 0o666); err != nil {
		t.Fatal(err)
	}
}

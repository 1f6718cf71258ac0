// Package docs compares the documents with the code and the repository: links, names, labels,
// reasons, words and line widths.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// pages are the documents, by their paths from the root.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	walk(t, ".md", func(path, text string) { all[path] = text })
	if len(all) < 20 {
		t.Fatalf("only %d documents", len(all))
	}
	return all
}

// walk calls visit for each file that ends with suffix.
func walk(t *testing.T, suffix string, visit func(path, text string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && slices.Contains([]string{".git", "bin", "dist", "testdata", "node_modules"}, d.Name()) {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, suffix) {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		visit(rel, string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// constants are the values of string constants of a type.
func constants(t *testing.T, path, of string) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var values []string
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if name, ok := spec.Type.(*ast.Ident); ok && name.Name == of {
			for _, v := range spec.Values {
				if text, ok := v.(*ast.BasicLit); ok {
					value, _ := strconv.Unquote(text.Value)
					values = append(values, value)
				}
			}
		}
		return true
	})
	if len(values) == 0 {
		t.Fatalf("%s has no constants of type %s", path, of)
	}
	return values
}

// Each reason is told, under its own heading, and no other.
func TestReasons(t *testing.T) {
	vocabulary, err := os.ReadFile(filepath.Join(root, "pkg/drain/vocabulary.go"))
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?s)reasonNames = \[\]string\{(.*?)\}`).FindStringSubmatch(string(vocabulary))
	if names == nil {
		t.Fatal("no reasonNames")
	}
	var ofDrains []string
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllStringSubmatch(names[1], -1) {
		ofDrains = append(ofDrains, m[1])
	}
	decided := constants(t, "pkg/admission/decide.go", "Reason")
	outcomes := constants(t, "internal/agent/hooks/metrics.go", "outcome")
	for heading, want := range map[string]struct{ all, may []string }{
		"A deletion or eviction":                      {decided, ofDrains},
		"The end of a drain":                          {[]string{"PodDeleted", "Abandoned"}, nil},
		"A hook at the barrier":                       {outcomes, ofDrains},
		"A new pod that the mutating webhook reviews": {constants(t, "pkg/admission/mutate.go", "coverage"), nil},
	} {
		told := firstCells(t, "docs/reasons.md", heading)
		for _, reason := range want.all {
			if !slices.Contains(told, reason) {
				t.Errorf("docs/reasons.md, %s, does not tell of %s", heading, reason)
			}
		}
		for _, reason := range told {
			if !slices.Contains(want.all, reason) && !slices.Contains(want.may, reason) {
				t.Errorf("docs/reasons.md, %s, tells of %s, which nobody says", heading, reason)
			}
		}
	}
	text := pages(t)["docs/reasons.md"]
	for _, reason := range ofDrains {
		if reason != "None" && reason != "" && !strings.Contains(text, "`"+reason+"`") {
			t.Errorf("docs/reasons.md does not tell of %s", reason)
		}
	}
}

// firstCells are the words in code style that begin the rows of the table under a heading.
func firstCells(t *testing.T, page, heading string) []string {
	t.Helper()
	_, after, ok := strings.Cut(pages(t)[page], "\n## "+heading+"\n")
	if !ok {
		t.Fatalf("%s has no heading %q", page, heading)
	}
	section, _, _ := strings.Cut(after, "\n## ")
	var cells []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)`").FindAllStringSubmatch(section, -1) {
		cells = append(cells, m[1])
	}
	return cells
}

// Labels and annotations that the code knows are in the table, and those of the table in the code.
func TestLabelsAndAnnotations(t *testing.T) {
	table := pages(t)["docs/configuration.md"]
	key := regexp.MustCompile(`^lameduck\.io/[a-z][a-z-]*$`)
	code := map[string]bool{}
	for _, folder := range []string{"pkg/", "cmd/", "internal/", "charts/", "manifests/"} {
		for _, suffix := range []string{".go", ".yaml", ".tpl"} {
			walk(t, suffix, func(path, text string) {
				if !strings.HasPrefix(path, folder) || strings.HasSuffix(path, "_test.go") {
					return
				}
				for _, m := range regexp.MustCompile(`lameduck\.io/[a-z][a-z0-9-]*`).FindAllString(text, -1) {
					if key.MatchString(m) { // not those with digits, which are versions
						code[m] = true
					}
				}
			})
		}
	}
	delete(code, "lameduck.io/webhook") // who reports an Event
	if len(code) < 8 {
		t.Fatalf("only %v", code)
	}
	for k := range code {
		if !strings.Contains(table, "`"+k+"`") {
			t.Errorf("docs/configuration.md does not tell of %s", k)
		}
	}
	for _, m := range regexp.MustCompile("(?m)^\\| [^|]*\\| `(lameduck\\.io/[a-z-]+)`").FindAllStringSubmatch(table,
		-1) {
		if !code[m[1]] {
			t.Errorf("docs/configuration.md tells of %s, which nobody reads or writes", m[1])
		}
	}
}

var (
	link   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fenced = regexp.MustCompile("(?s)```.*?```")
)

// Links lead somewhere, to headings too.
func TestLinks(t *testing.T) {
	all := pages(t)
	for path, text := range all {
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			to := path
			if target != "" {
				to = filepath.Join(filepath.Dir(path), target)
				if _, err := os.Stat(filepath.Join(root, to)); err != nil {
					t.Errorf("%s links to %s, which is not there", path, m[1])
					continue
				}
			}
			if anchor != "" && !slices.Contains(anchors(all[to]), anchor) {
				t.Errorf("%s links to %s, and there is no such heading", path, m[1])
			}
		}
	}
}

// anchors are the headings of a page as links name them.
func anchors(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		a := strings.ToLower(regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(m[1], ""))
		all = append(all, strings.ReplaceAll(strings.TrimSpace(a), " ", "-"))
	}
	return all
}

// What documents tell people to make can be made, and files that they name in code style are there.
func TestNames(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	target := regexp.MustCompile("(?m)(?:^|`|    )make ([a-z0-9][a-z0-9-]*)")
	file := regexp.MustCompile("`((?:cmd|pkg|internal|manifests|charts|test|docs|schemas)/[A-Za-z0-9_./-]+)`")
	for path, text := range pages(t) {
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(m[1]) + `:`).Match(makefile) {
				t.Errorf("%s speaks of make %s, and there is no such target", path, m[1])
			}
		}
		if strings.HasPrefix(path, "docs/decisions/") || path == "CHANGELOG.md" {
			continue // what was true when it was written
		}
		for _, m := range file.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				if _, err := os.Stat(filepath.Join(root, filepath.Dir(path), m[1])); err != nil {
					t.Errorf("%s speaks of %s, which is not there", path, m[1])
				}
			}
		}
	}
}

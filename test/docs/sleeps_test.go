package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var isTest = regexp.MustCompile(`^(Test|Benchmark|Fuzz|Example|init$|main$)`)

// function is one that tests have.
type function struct {
	ast.Decl
	name string
	// bubble reports whether it calls synctest.Test.
	bubble bool
	// sleeps, by path and line, and the names that it uses: both outside of bubbles.
	sleeps []string
	uses   map[string]bool
}

// A fixed sleep of real time is too short on a busy machine, and wasted on an idle one. Tests sleep
// in a bubble of testing/synctest, or in a loop, between two looks at a condition. A sleep that has
// time as its subject, or imitates work, says so in a comment on its line.
func TestSleeps(t *testing.T) {
	// allowed is what has yet to be changed, of each directory.
	allowed := map[string]int{"pkg/health/probe": 9}
	functions, files := map[string][]*function{}, token.NewFileSet()
	commented := map[string]bool{}
	walk(t, ".go", func(path, text string) {
		dir := filepath.Dir(path)
		if !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(dir, "test") && dir != "test/e2e/stage" &&
			dir != "test/e2e/harness" {
			return
		}
		file, err := parser.ParseFile(files, path, text, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range file.Comments {
			commented[lineOf(files, c)] = true
		}
		for _, d := range file.Decls {
			f := &function{Decl: d, uses: map[string]bool{}}
			if d, ok := d.(*ast.FuncDecl); ok {
				f.name = d.Name.Name
			}
			ast.Inspect(d, func(n ast.Node) bool {
				f.bubble = f.bubble || isCall(n, "synctest.Test")
				return true
			})
			functions[dir] = append(functions[dir], f)
		}
	})
	for dir, all := range functions {
		bubbles, inBubbles := map[string]bool{"synctest.Test": true}, map[string]bool{}
		for _, f := range all {
			if f.bubble && !isTest.MatchString(f.name) {
				bubbles[f.name] = true // what it is given it calls in its bubble
			}
		}
		for _, f := range all {
			ast.Inspect(f.Decl, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ForStmt:
					if last := len(n.Body.List) - 1; isCall(n.Post, "time.Sleep") {
						n.Post = nil
					} else if last >= 0 && isCall(n.Body.List[last], "time.Sleep") {
						n.Body.List = n.Body.List[:last]
					}
				case *ast.CallExpr:
					if at := lineOf(files, n); isCall(n, "time.Sleep") && !commented[at] {
						f.sleeps = append(f.sleeps, at)
					}
				case *ast.Ident:
					if n.Name != f.name {
						f.uses[n.Name] = true
					}
				}
				// The cases of a table are run in the bubble of its function.
				_, table := n.(*ast.CompositeLit)
				if call, ok := n.(*ast.CallExpr); ok && bubbles[calls(call)] || table && f.bubble {
					for _, name := range names(n) {
						inBubbles[name] = true
					}
					return false
				}
				return true
			})
		}
		used := maps.Clone(inBubbles)
		for _, f := range all {
			maps.Copy(used, f.uses)
		}
		// outside are the names that tests use outside of bubbles, and what functions of such a
		// name use.
		outside := map[string]bool{}
		isOutside := func(f *function) bool { return outside[f.name] || isTest.MatchString(f.name) || !used[f.name] }
		for before := -1; before < len(outside); {
			before = len(outside)
			for _, f := range all {
				if isOutside(f) {
					maps.Copy(outside, f.uses)
				}
			}
		}
		var sleeps []string
		for _, f := range all {
			if isOutside(f) {
				sleeps = append(sleeps, f.sleeps...)
			}
		}
		if len(sleeps) > allowed[dir] {
			t.Errorf("%s has %d fixed sleeps outside of bubbles, want %d at most:\n%s",
				dir, len(sleeps), allowed[dir], strings.Join(sleeps, "\n"))
		}
	}
}

// lineOf returns the path and the line of n.
func lineOf(files *token.FileSet, n ast.Node) string {
	at := files.Position(n.Pos())
	return fmt.Sprintf("%s:%d", at.Filename, at.Line)
}

// calls returns what a call calls, "f" or "package.f".
func calls(n *ast.CallExpr) string {
	switch f := n.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok {
			return x.Name + "." + f.Sel.Name
		}
	}
	return ""
}

// isCall reports whether n is a call of f.
func isCall(n ast.Node, f string) bool {
	if s, ok := n.(*ast.ExprStmt); ok {
		n = s.X
	}
	call, ok := n.(*ast.CallExpr)
	return ok && calls(call) == f
}

// names returns those in n.
func names(n ast.Node) (all []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if name, ok := n.(*ast.Ident); ok {
			all = append(all, name.Name)
		}
		return true
	})
	return all
}

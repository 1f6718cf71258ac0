package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// mayRepeat are names that the simulation declares although a shipped package declares them too,
// and why that is no copy of what ships.
var mayRepeat = map[string]string{
	"main": "each program has one",
}

// The simulation drives what ships. A constant or a function that it declares by the name of a
// shipped one is a copy, which drifts: what ships is then not what is tried.
func TestNothingIsDeclaredTwice(t *testing.T) {
	shipped := map[string]string{}
	for _, of := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join("../..", of), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				for name, what := range declared(t, path) {
					shipped[name] = what + " of " + filepath.Dir(path)[len("../../"):]
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil || len(shipped) < 1000 {
		t.Fatalf("%d names ship: %v", len(shipped), err)
	}
	seen := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for name, what := range declared(t, file) {
			of, twice := shipped[name]
			if _, may := mayRepeat[name]; twice && !may {
				t.Errorf("%s: %s %s is also a %s", file, what, name, of)
			}
			seen[name] = seen[name] || twice
		}
	}
	for name := range mayRepeat {
		if !seen[name] {
			t.Errorf("%s is not declared twice: take it out of the list", name)
		}
	}
}

// declared returns the constants and functions of a file by their names in lower case: shipped ones
// may be exported.
func declared(t *testing.T, path string) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				names[strings.ToLower(d.Name.Name)] = "function"
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if s, ok := s.(*ast.ValueSpec); ok && d.Tok == token.CONST {
					for _, name := range s.Names {
						names[strings.ToLower(name.Name)] = "constant"
					}
				}
			}
		}
	}
	return names
}

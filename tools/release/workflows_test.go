package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/rhysd/actionlint"
)

// They run where a mistake is seen by everybody, and nowhere before: so they are read here as far
// as they can be. What others wrote is named by its commit, programs by the version of Go that this
// was tested with, and what make is told to do it knows.
func TestWorkflows(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*.yml"))
	if err != nil || len(files) < 2 {
		t.Fatalf("workflows %v, %v", files, err)
	}
	linter, err := actionlint.NewLinter(io.Discard, &actionlint.LinterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	uses := regexp.MustCompile(`(?m)^\s*-? *uses: (.*)$`)
	pinned := regexp.MustCompile(`^[a-z-]+/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	makes := regexp.MustCompile(`(?m)\bmake ([a-z-]+)`)
	versions := regexp.MustCompile(`(?:go-version: |golang:)(\d+\.\d+\.\d+)`)
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		problems, err := linter.Lint(file, content, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Error(p)
		}
		found := uses.FindAllStringSubmatch(string(content), -1)
		if len(found) == 0 {
			t.Errorf("%s uses nothing", file)
		}
		for _, u := range found {
			if !pinned.MatchString(u[1]) {
				t.Errorf("%s uses %s: want a commit, and its version as a comment", file, u[1])
			}
		}
		for _, m := range makes.FindAllStringSubmatch(string(content), -1) {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s says make %s", file, m[1])
			}
		}
		got := versions.FindAllStringSubmatch(string(content), -1)
		if len(got) == 0 {
			t.Errorf("%s says no version of Go", file)
		}
		for _, v := range got {
			if v[1] != got[0][1] || !strings.HasPrefix("go"+v[1],
				runtime.Version()[:strings.LastIndexByte(runtime.Version(), '.')+1]) {
				t.Errorf("%s takes Go %s; elsewhere it is %s, and this is %s", file, v[1], got[0][1], runtime.Version())
			}
		}
		if !strings.Contains(string(content), "\npermissions:\n  contents: read\n") {
			t.Errorf("%s may do more than read from the start", file)
		}
	}
}

//go:build e2e

package quickstart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// section is a part of a page: what stands under one heading of the second level.
type section struct {
	title string
	// blocks are its fenced blocks of kind sh.
	blocks []string
}

// sections reads those of a page of docs that have commands, in their order.
func sections(t *testing.T, page string) []section {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Repository, "docs", page))
	if err != nil {
		t.Fatal(err)
	}
	var all []section
	var block strings.Builder
	now, fence := section{}, ""
	for line := range strings.Lines(string(text)) {
		line := strings.TrimRight(line, "\n")
		switch {
		case fence == "" && strings.HasPrefix(line, "```"):
			fence = line
			block.Reset()
		case fence != "" && line == "```":
			if fence == "```sh" {
				now.blocks = append(now.blocks, block.String())
			}
			fence = ""
		case fence != "":
			block.WriteString(line + "\n")
		case strings.HasPrefix(line, "## "):
			if len(now.blocks) > 0 {
				all = append(all, now)
			}
			now = section{title: strings.TrimPrefix(line, "## ")}
		}
	}
	if fence != "" {
		t.Fatalf("%s: a fenced block does not end", page)
	}
	if len(now.blocks) > 0 {
		all = append(all, now)
	}
	return all
}

// find is the section of a page with a title.
func find(t *testing.T, page, title string) section {
	t.Helper()
	for _, s := range sections(t, page) {
		if s.title == title {
			return s
		}
	}
	t.Fatalf("%s has no section %q with commands", page, title)
	return section{}
}

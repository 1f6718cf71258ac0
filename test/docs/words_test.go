package docs

import (
	"go/scanner"
	"go/token"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// retired are words that have a better one. Identifiers count too.
var retired = regexp.MustCompile(`(?i)tombstone|gravestone|\b(nobody|somebody|whoever|anew|vicinity|grain|hearsay)\b|` +
	`\b(bury|buries|buried)\b|\bthose who\b|\bfor good\b|\blets? go of\b`)

// commentWidth and codeWidth are the most columns of a line, with tabs of four.
const commentWidth, codeWidth = 100, 120

// TestWords checks that the tree has no retired word and no wide line. Tables, lines with a URL, raw
// strings in Go, and code and output in documents may be wide.
func TestWords(t *testing.T) {
	for _, suffix := range []string{".go", ".md"} {
		walk(t, suffix, func(path, text string) {
			if strings.HasPrefix(path, "test/docs/") || path == "CHANGELOG.md" {
				return
			}
			samples := rawStrings(text)
			if suffix == ".md" {
				samples = codeBlocks(text)
			}
			for i, line := range strings.Split(text, "\n") {
				if word := retired.FindString(strings.ReplaceAll(line, "http.NoBody", "")); word != "" {
					t.Errorf("%s:%d: %q is retired", path, i+1, word)
				}
				most := codeWidth
				if suffix == ".md" || strings.HasPrefix(strings.TrimSpace(line), "//") {
					most = commentWidth
				}
				wide := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
				table := suffix == ".md" && strings.Contains(line, "|")
				if wide > most && !samples[i+1] && !table && !strings.Contains(line, "://") {
					t.Errorf("%s:%d: %d columns, more than %d", path, i+1, wide, most)
				}
			}
		})
	}
}

// rawStrings returns the lines of Go code in which a raw string is.
func rawStrings(text string) map[int]bool {
	lines := map[int]bool{}
	files := token.NewFileSet()
	file := files.AddFile("", files.Base(), len(text))
	var s scanner.Scanner
	s.Init(file, []byte(text), nil, 0)
	for {
		pos, is, literal := s.Scan()
		if is == token.EOF {
			return lines
		}
		if is == token.STRING && literal[0] == '`' {
			for n := range strings.Count(literal, "\n") + 1 {
				lines[file.Line(pos)+n] = true
			}
		}
	}
}

// codeBlocks returns the lines of a document that are code or output.
func codeBlocks(text string) map[int]bool {
	lines := map[int]bool{}
	fenced := false
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
		}
		lines[i+1] = fenced || strings.HasPrefix(line, "    ")
	}
	return lines
}

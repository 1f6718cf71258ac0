package cli

import (
	"io"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// Printable writes to a terminal what [target.Printable] leaves of each line: names, reasons and
// errors come from agents, tenants and the API server. A rune must not be split over two writes.
type Printable struct{ io.Writer }

// Write implements io.Writer.
func (p Printable) Write(text []byte) (int, error) {
	lines := strings.SplitAfter(string(text), "\n")
	for i, line := range lines {
		line, end := strings.CutSuffix(line, "\n")
		lines[i] = target.Printable(line) + map[bool]string{true: "\n"}[end]
	}
	if _, err := io.WriteString(p.Writer, strings.Join(lines, "")); err != nil {
		return 0, err
	}
	return len(text), nil
}

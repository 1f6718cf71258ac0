package report

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// width is the most columns that any line takes.
const width = 100

// The escapes of a terminal. They take no column, so cells are aligned before they are coloured.
const (
	bold, red, green, dim = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[2m"
	plainAgain            = "\x1b[0m"
)

// column holds one run and the heading above it.
type column struct {
	Run
	heading string
}

// row is one line of the table: what each column has there, and its colour.
type row struct {
	label string
	cell  func(Run) string
	paint func(Run) string // nil: none
}

// Table renders the three runs side by side, with a heading that names the versions. Lines end in a
// newline and take 100 columns at most, unless a heading of the caller's own is long. Colour is for
// terminals.
func Table(d Demo, colour bool) string {
	columns := []column{{d.Unprotected, "unprotected"}, {d.PreStop, "preStop: sleep 5"}, {d.Lameduck, "Lameduck"}}
	for i, c := range columns {
		if c.Name != "" {
			columns[i].heading = clean(c.Name)
		}
	}
	rows := rowsOf(columns)
	first := 0
	for _, r := range rows {
		first = max(first, utf8.RuneCountInString(r.label))
	}

	var b strings.Builder
	if line := versions(d); line != "" {
		b.WriteString(line + "\n\n")
	}
	b.WriteString(pad("", first))
	for _, c := range columns {
		b.WriteString("  " + paint(padLeft(c.heading, c.width()), bold, colour))
	}
	b.WriteByte('\n')
	for _, r := range rows {
		b.WriteString(pad(r.label, first))
		for _, c := range columns {
			cell, escape := "-", ""
			if c.Requests > 0 {
				cell = r.cell(c.Run)
				if r.paint != nil {
					escape = r.paint(c.Run)
				}
			}
			b.WriteString("  " + paint(padLeft(cell, c.width()), escape, colour))
		}
		b.WriteByte('\n')
	}
	for _, c := range columns {
		if c.Late > 0 || c.Skipped > 0 {
			fmt.Fprintf(&b, "%s: in doubt, the load generator sent %s requests late and %s not at all\n",
				paint(c.heading, red, colour), grouped(c.Late), grouped(c.Skipped))
		}
	}
	return b.String()
}

func (c column) width() int { return max(16, utf8.RuneCountInString(c.heading)) }

func versions(d Demo) string {
	var parts []string
	if d.Kubernetes != "" {
		parts = append(parts, "Kubernetes "+clean(d.Kubernetes))
	}
	if d.Gateway != "" {
		parts = append(parts, clean(d.Gateway))
	}
	if d.LagSeconds > 0 {
		parts = append(parts, fmt.Sprintf("the gateway acts %s late", seconds(d.LagSeconds)))
	}
	return cut(strings.Join(parts, ", "), width)
}

func rowsOf(columns []column) []row {
	rows := []row{
		{"requests", func(r Run) string { return grouped(r.Requests) }, nil},
		{"failed", func(r Run) string { return grouped(r.Failed) }, func(r Run) string {
			if r.Failed > 0 {
				return red
			}
			return green
		}},
	}
	total, unexplained := map[string]int{}, false
	for _, c := range columns {
		for kind, n := range c.FailedBy {
			total[kind] += n
		}
		unexplained = unexplained || c.unexplained() != 0
	}
	kinds := slices.SortedFunc(maps.Keys(total), func(a, b string) int {
		if total[a] != total[b] {
			return total[b] - total[a] // the most frequent first
		}
		return strings.Compare(a, b)
	})
	for _, kind := range kinds {
		if total[kind] > 0 {
			rows = append(rows, row{"  " + cut(clean(kind), 24), func(r Run) string {
				return grouped(r.FailedBy[kind])
			}, nil})
		}
	}
	if unexplained { // the caller's books do not balance: say so rather than leave it to the reader to add up
		rows = append(rows, row{"  (of no kind)", func(r Run) string { return grouped(r.unexplained()) }, nil})
	}
	return append(rows,
		row{"rollout time", func(r Run) string { return unless0(r.RolloutSeconds, seconds) }, nil},
		row{"p99 latency", func(r Run) string { return unless0(r.P99Millis, millis) }, nil},
		row{"DELETE to SIGTERM, median", func(r Run) string {
			return r.DeleteToSigtermMillis.text(r.DeleteToSigtermMillis.Median)
		}, nil},
		row{"DELETE to SIGTERM, max", func(r Run) string {
			return r.DeleteToSigtermMillis.text(r.DeleteToSigtermMillis.Max)
		}, nil},
	)
}

func (r Run) unexplained() int {
	n := r.Failed
	for _, k := range r.FailedBy {
		n -= k
	}
	return n
}

// unless0 shows as not measured what cannot be 0.
func unless0(value float64, text func(float64) string) string {
	if value == 0 {
		return "-"
	}
	return text(value)
}

func (s Spread) text(value float64) string {
	if s == (Spread{}) {
		return "-"
	}
	return millis(value)
}

// Timeline renders one drain, a step on each line: when, a bar from there to the next step, who and
// what. Steps may be given in any order; those at the same time keep theirs. Lines end in a newline
// and take 100 columns at most: longer text is cut.
func Timeline(steps []Step, colour bool) string {
	if len(steps) == 0 {
		return ""
	}
	steps = slices.Clone(steps)
	slices.SortStableFunc(steps, func(a, b Step) int {
		switch {
		case a.OffsetMillis < b.OffsetMillis:
			return -1
		case a.OffsetMillis > b.OffsetMillis:
			return 1
		}
		return 0
	})
	when, who := 0, 0
	for i, s := range steps {
		steps[i].Who, steps[i].What = cut(clean(s.Who), 20), clean(s.What)
		when = max(when, utf8.RuneCountInString(millis(s.OffsetMillis)))
		who = max(who, utf8.RuneCountInString(steps[i].Who))
	}
	first, last := steps[0].OffsetMillis, steps[len(steps)-1].OffsetMillis
	var b strings.Builder
	for i, s := range steps {
		until := last
		if i+1 < len(steps) {
			until = steps[i+1].OffsetMillis
		}
		const cells = 18
		line := padLeft(millis(s.OffsetMillis),
			when) + "  " + paint(bar(s.OffsetMillis-first, until-first, last-first, cells), dim, colour)
		line += "  " + paint(pad(s.Who, who), bold, colour) + "  "
		b.WriteString(strings.TrimRight(line+cut(s.What, width-when-cells-who-8), " ") + "\n")
	}
	return b.String()
}

// bar draws the time from one step to the next within the whole, in so many columns with its frame
// two more. A step that takes less than a column is a point.
func bar(from, to, whole float64, cells int) string {
	at := func(offset float64) int {
		if whole <= 0 {
			return 0
		}
		return int(offset / whole * float64(cells-1))
	}
	line := []byte(strings.Repeat(" ", cells))
	line[at(from)] = '|'
	for i := at(from) + 1; i < at(to); i++ {
		line[i] = '='
	}
	return "[" + string(line) + "]"
}

func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func seconds(s float64) string { return strconv.FormatFloat(s, 'f', 1, 64) + " s" }

// millis keeps a decimal below 100 ms, and changes to seconds where milliseconds say nothing more.
func millis(ms float64) string {
	switch {
	case ms >= 9999.5:
		return seconds(ms / 1000)
	case ms >= 99.95 || ms <= -99.95 || ms == 0:
		return strconv.FormatFloat(ms, 'f', 0, 64) + " ms"
	}
	return strconv.FormatFloat(ms, 'f', 1, 64) + " ms"
}

// clean keeps text on its line and escapes out of the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

func cut(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}

func pad(s string, to int) string {
	return s + strings.Repeat(" ", max(0, to-utf8.RuneCountInString(s)))
}

func padLeft(s string, to int) string {
	return strings.Repeat(" ", max(0, to-utf8.RuneCountInString(s))) + s
}

func paint(s, escape string, colour bool) string {
	if !colour || escape == "" {
		return s
	}
	return escape + s + plainAgain
}

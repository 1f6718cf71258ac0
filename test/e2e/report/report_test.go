package report

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// golden compares got with a file of testdata, in which escapes are written \e.
func golden(t *testing.T, name, got string) {
	t.Helper()
	got = strings.ReplaceAll(got, "\x1b", `\e`)
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

func demo() Demo {
	return Demo{
		Unprotected: Run{
			Requests: 8500, Failed: 59, FailedBy: map[string]int{"refused": 41, "reset": 14, "timeout": 4},
			RolloutSeconds: 2.31, P50Millis: 6.1, P99Millis: 12.34,
			DeleteToSigtermMillis: SpreadOf([]float64{35, 31, 120.4, 33}),
		},
		PreStop: Run{
			Requests: 48112, Failed: 3, FailedBy: map[string]int{"status-503": 3},
			RolloutSeconds: 22.47, P50Millis: 6, P99Millis: 11.02,
			DeleteToSigtermMillis: SpreadOf([]float64{5031, 5040.2, 5077}),
		},
		Lameduck: Run{
			Requests: 8611, FailedBy: map[string]int{},
			RolloutSeconds: 2.58, P50Millis: 6.2, P99Millis: 11.9,
			DeleteToSigtermMillis: SpreadOf([]float64{160, 411.7, 380}),
		},
		LagSeconds: 0.4,
		Drain: []Step{
			{0, "kubectl", "DELETE pod web-6d4cf56db6-x2x4v"},
			{2.4, "webhook", "holds the deletion: 1 agent owes"},
			{3.1, "agent haproxy", "told to unroute 10.88.0.14:8080"},
			{4.3, "agent haproxy", "Removed, proof runtime: set server web/s3 state maint"},
			{61.9, "agent haproxy", "Idle: no request in flight"},
			{62.5, "webhook", "allows the deletion"},
			{96, "kubelet", "SIGTERM"},
		},
		Kubernetes: "v1.36.3",
		Gateway:    "HAProxy 2.6.12",
	}
}

func TestTable(t *testing.T) {
	uneven := demo()
	uneven.Unprotected.Name = "unprotected, 4 replicas"
	uneven.Unprotected.Failed = 1234567
	uneven.PreStop = Run{} // not run
	uneven.Lameduck.Late, uneven.Lameduck.Skipped = 1200, 3
	uneven.Lameduck.Requests, uneven.Lameduck.Failed, uneven.Lameduck.FailedBy = 2, 2, nil
	uneven.Lameduck.P99Millis, uneven.Lameduck.DeleteToSigtermMillis = 0, Spread{}
	for name, d := range map[string]Demo{"table": demo(), "table-uneven": uneven, "table-empty": {}} {
		golden(t, name+".golden", Table(d, false))
	}
	golden(t, "table-colour.golden", Table(demo(), true))
}

func TestTimeline(t *testing.T) {
	awkward := []Step{
		{12000, "kubelet", "SIGTERM"},
		{-0.2, "a component with a very long name", strings.Repeat("a word that is long enough ", 5)},
		{0, "kubectl", "DELETE\nwith a line break and an \x1b[31mescape"},
		{5000, "webhook", "first of two at the same time"},
		{5000, "agent", "second"},
		{7000, "agent", ""},
	}
	for name, steps := range map[string][]Step{
		"timeline": demo().Drain, "timeline-awkward": awkward, "timeline-one": {{3, "kubelet", "SIGTERM"}},
		"timeline-none": nil,
	} {
		golden(t, name+".golden", Timeline(steps, false))
	}
	golden(t, "timeline-colour.golden", Timeline(demo().Drain, true))
}

// Whatever the numbers: no line is wider than a terminal, colour changes nothing but colour, and
// columns stay aligned.
func FuzzTimeline(f *testing.F) {
	f.Add("kubelet", "SIGTERM", 0.0, 10.0)
	f.Add("ü\x1b", strings.Repeat("x", 200), -1e9, 1e12)
	f.Fuzz(func(t *testing.T, who, what string, a, b float64) {
		if !(a > -1e12 && a < 1e12 && b > -1e12 && b < 1e12) {
			t.Skip("no time of this world")
		}
		steps := []Step{{a, who, what}, {b, what, who}, {(a + b) / 2, who, who}}
		plain := Timeline(steps, false)
		for line := range strings.Lines(plain) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > width {
				t.Errorf("%d columns: %q", n, line)
			}
		}
		if n := strings.Count(plain, "\n"); n != len(steps) {
			t.Errorf("%d lines: %q", n, plain)
		}
		stripped := regexp.MustCompile("\x1b\\[[0-9]+m").ReplaceAllString(Timeline(steps, true), "")
		if trim(stripped) != trim(plain) {
			t.Errorf("coloured %q, plain %q", stripped, plain)
		}
	})
}

func trim(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return b.String()
}

func TestJSON(t *testing.T) {
	for name, d := range map[string]Demo{"demo": demo(), "demo-empty": {}} {
		b, err := json.MarshalIndent(d, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, name+".json", string(b)+"\n")
		var again Demo
		if err := json.Unmarshal(b, &again); err != nil {
			t.Fatal(err)
		}
		if back, _ := json.MarshalIndent(again, "", "  "); string(back) != string(b) {
			t.Errorf("%s: read and written again:\n%s", name, cmp.Diff(string(b), string(back)))
		}
	}
}

func TestSpreadOf(t *testing.T) {
	for _, tc := range []struct {
		values []float64
		want   Spread
	}{
		{nil, Spread{}},
		{[]float64{7}, Spread{7, 7, 7}},
		{[]float64{3, 1}, Spread{1, 2, 3}},
		{[]float64{9, 1, 4}, Spread{1, 4, 9}},
	} {
		if got := SpreadOf(tc.values); got != tc.want {
			t.Errorf("SpreadOf(%v) = %v, want %v", tc.values, got, tc.want)
		}
	}
}

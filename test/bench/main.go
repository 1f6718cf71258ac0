// Command bench measures the speeds that the documents state. Each figure is a ratio to a floor or
// a peer that is measured alternately in the same run, because a machine's speed drifts. It prints
// one line for each goal and writes them as JSON: a list of {"name", "ratio", "goal", "pass"}. A
// missed goal is reported as missed; the command fails only if something could not be measured.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
)

// Result is one measured goal. Names are stable identifiers.
type Result struct {
	Name  string  `json:"name"`
	Ratio float64 `json:"ratio"`
	// Goal is what Ratio is at most.
	Goal float64 `json:"goal"`
	Pass bool    `json:"pass"`
	// Note says what the ratio is of, for operators.
	Note string `json:"-"`
}

// suite measures some goals that belong together.
type suite struct {
	name string
	run  func() ([]Result, error)
}

func main() {
	out := flag.String("out", "bench.json", "where to write the results")
	only := flag.String("run", "", "run only the suites whose name matches this `regexp`")
	flag.Parse()
	if err := run(*out, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(out, only string) error {
	match, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	all := []Result{}
	for _, s := range suites {
		if !match.MatchString(s.name) {
			continue
		}
		results, err := s.run()
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		for _, r := range results {
			r.Pass = r.Ratio <= r.Goal
			verdict := "pass"
			if !r.Pass {
				verdict = "MISS"
			}
			fmt.Printf("%-28s %8.2f  goal <= %-6.2f %s  %s\n", r.Name, r.Ratio, r.Goal, verdict, r.Note)
			all = append(all, r)
		}
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

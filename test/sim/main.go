// Command sim runs coordinators, agents, gateways, an API server and clients in one process on
// virtual time, injects faults by seed, and checks after every step that no rule is broken except
// by a fault that explains it. It uses the shipped code of the ledger, the coordinator's core, the
// agent's session and hooks. README.md beside it lists the rules.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

func main() {
	seeds := flag.Int("seeds", 20000, "how many seeds to run")
	from := flag.Uint64("from", 1, "the first of them")
	drawn := flag.Int("drawn", 0, "how many seeds to run besides, from one that is drawn")
	mutations := flag.String("mutations", "", "instead, break each rule by a patch in this `directory`, and run "+
		"at most SEEDS seeds until that is caught")
	hunting := flag.Bool("hunt", false, "stop at the first violation, and fail if there is none")
	verbose := flag.Bool("v", false, "print the trace of every seed")
	flag.Parse()
	// Worlds are small and short-lived: most of them is garbage at the end, and rarely before.
	debug.SetGCPercent(800)
	var err error
	all := sequence(*from, *seeds)
	if *seeds > 1 {
		all = append(corpus(), all...)
	}
	switch {
	case *mutations != "":
		err = tryMutations(os.Stdout, ".", *mutations, *from, *seeds)
	case *hunting:
		err = hunt(all)
	default:
		if *drawn > 0 {
			first := uint64(rand.Uint32()) + 1<<32 // no fixed range reaches there
			fmt.Printf("sim: drawn range: make sim SEEDS=%d FROM=%d\n", *drawn, first)
			all = append(all, sequence(first, *drawn)...)
		}
		err = simulate(all, *verbose)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sim:", err)
		os.Exit(1)
	}
}

//go:embed corpus.txt
var corpusText string

// corpus returns the seeds of corpus.txt.
func corpus() (seeds []uint64) {
	for line := range strings.Lines(corpusText) {
		if number, _, _ := strings.Cut(line, " "); number != "#" {
			seed, err := strconv.ParseUint(number, 10, 64)
			if err != nil {
				panic(fmt.Sprintf("corpus.txt: %v", err))
			}
			seeds = append(seeds, seed)
		}
	}
	return seeds
}

// sequence returns n seeds, the first of which is from.
func sequence(from uint64, n int) []uint64 {
	seeds := make([]uint64, n)
	for i := range seeds {
		seeds[i] = from + uint64(i)
	}
	return seeds
}

// totals are what all seeds of a run add up to.
type totals struct {
	seeds, steps, faults, violations int
	// first is the lowest seed with a violation, of which check tells.
	first                      uint64
	check, violation           string
	excused, allowed, measured map[string]int
}

// sweep runs seeds on all processors. It stops soon after the first violation if once is set.
func sweep(seeds []uint64, once, blind bool, each func(*world)) totals {
	t := totals{excused: map[string]int{}, allowed: map[string]int{}, measured: map[string]int{}}
	var next atomic.Uint64
	var stop atomic.Bool
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !stop.Load() {
				n := next.Add(1) - 1
				if n >= uint64(len(seeds)) {
					return
				}
				w := newWorld(seeds[n], false, blind)
				w.run()
				mu.Lock()
				t.seeds++
				t.steps += w.steps
				t.faults += w.faults
				for k, n := range w.excused {
					t.excused[k] += n
				}
				for k, n := range w.allowed {
					t.allowed[k] += n
				}
				for k, n := range w.measured {
					t.measured[k] += n
				}
				if w.violation != "" {
					t.violations++
					if t.first == 0 || w.seed < t.first {
						t.first, t.check, t.violation = w.seed, w.check, w.violation
					}
					if each != nil {
						each(w)
					}
					if once {
						stop.Store(true)
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return t
}

func simulate(seeds []uint64, verbose bool) error {
	shown := 0
	t := sweep(seeds, false, false, func(w *world) {
		if shown++; shown <= 20 {
			fmt.Printf("seed %d: %s: %s\n", w.seed, w.check, w.violation)
		}
	})
	if t.violations > 0 || verbose {
		seed := t.first
		if seed == 0 {
			seed = seeds[0]
		}
		w := newWorld(seed, true, false)
		w.run()
		fmt.Printf("--- trace of seed %d: make sim SEEDS=1 FROM=%d\n%s\n---\n", seed, seed, w.dump())
	}
	printTable("allowed", t.allowed)
	printTable("named reasons", t.excused)
	printTable("measured", t.measured)
	fmt.Printf("sim: seeds=%d steps=%d faults=%d violations=%d\n", t.seeds, t.steps, t.faults, t.violations)
	if t.violations > 0 {
		return fmt.Errorf("seed %d: %s: %s (make sim SEEDS=1 FROM=%[1]d)", t.first, t.check, t.violation)
	}
	return nil
}

func printTable(title string, counts map[string]int) {
	fmt.Printf("%s:\n", title)
	keys := make([]string, 0, len(counts))
	for k := range counts {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		fmt.Printf("  %8d  %s\n", counts[k], k)
	}
}

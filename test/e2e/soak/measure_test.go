//go:build long

package soak

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// process is one that is measured.
type process struct {
	name, metrics string
	pid           int
	// journal is its file, or empty.
	journal string
	samples []sample
}

// sample is what a process takes after so many lives. at is the time since started. waiting is how
// many pods are held or wait at the barrier at the moment.
type sample struct {
	lives                                          int
	at                                             time.Duration
	waiting                                        float64
	rss, heap, goroutines, descriptors, exclusions float64
}

// quantity is something that is measured. slope is the most that a life may add permanently, limit
// what a process may have more when it is idle again: connections that are kept open for a while,
// or a timer. Memory has no limit, because maps do not shrink. The limit of the journal is 40 of
// the 9,000 pods that it holds in between: an agent opens its streams again when its token is
// renewed, hourly. The coordinator then repeats the ends that it remembers, and of those the agent
// has just forgotten some seconds' worth. It remembers these for a further drain.Times.Memory.
type quantity struct {
	name         string
	slope, limit float64
	// remembers: what is remembered of deleted pods is part of it.
	remembers bool
	of        func(sample) float64
}

var quantities = []quantity{
	{"resident bytes", 20, math.Inf(1), true, func(s sample) float64 { return s.rss }},
	{"live heap, bytes", 20, math.Inf(1), true, func(s sample) float64 { return s.heap }},
	{"goroutines", 0.001, 15, false, func(s sample) float64 { return s.goroutines }},
	{"descriptors", 0.001, 15, false, func(s sample) float64 { return s.descriptors }},
	{"journal, bytes", 5, 6000, true, func(s sample) float64 { return s.exclusions }},
}

var started = time.Now()

// take measures a process.
func (p *process) take(lives int) (sample, error) {
	s := sample{lives: lives, at: time.Since(started)}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid))
	if err != nil {
		return s, err
	}
	s.descriptors = float64(len(open))
	if info, err := os.Stat(p.journal); err == nil {
		s.exclusions = float64(info.Size())
	}
	all, err := stage.ReadSeries(http.DefaultClient, p.metrics)
	s.rss, s.goroutines = all["process_resident_memory_bytes"], all["go_goroutines"]
	// The next collection begins when the heap is twice what the last one left, with GOGC=100.
	s.heap = all["go_memstats_next_gc_bytes"] / 2
	return s, err
}

// metric returns the sum of the series whose name and labels begin with prefix.
func (p *process) metric(t *testing.T, prefix string) float64 {
	t.Helper()
	all, err := stage.ReadSeries(http.DefaultClient, p.metrics)
	must(t, err)
	return all.Sum(prefix)
}

// journalOf returns the file of an agent's exclusions: its volume is in its environment.
func journalOf(t *testing.T, pid int) string {
	t.Helper()
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	must(t, err)
	for variable := range bytes.SplitSeq(environment, []byte{0}) {
		if dir, found := bytes.CutPrefix(variable, []byte("VOLUME_STATE=")); found {
			return filepath.Join(string(dir), "exclusions.json")
		}
	}
	return ""
}

// batches are what the samples are averaged to before the fit. A garbage collector's cycle lasts
// for several samples, so their errors are not independent; those of batches nearly are.
const batches = 20

// fit returns the slope of a quantity over lives from first on, and its standard error. What is
// remembered of the pods that were deleted within memory is no slope, and neither is what pods take
// that wait: if the rate changes or the machine becomes slower, so do their numbers, and what
// depends on these alone is taken out of the fit.
func fit(samples []sample, first int, memory time.Duration, of func(sample) float64) (slope, stderr float64) {
	last := samples[len(samples)-1].lives
	var n [batches]float64
	x, y, remembered, waiting := make([]float64, batches), make([]float64, batches), make([]float64, batches),
		make([]float64, batches)
	former := 0
	for _, s := range samples {
		for s.at-samples[former].at > memory {
			former++
		}
		if s.lives >= first {
			b := min(batches-1, (s.lives-first)*batches/max(1, last-first))
			n[b]++
			x[b] += (float64(s.lives) - x[b]) / n[b]
			y[b] += (of(s) - y[b]) / n[b]
			remembered[b] += (float64(s.lives-samples[former].lives) - remembered[b]) / n[b]
			waiting[b] += (s.waiting - waiting[b]) / n[b]
		}
	}
	for b := batches - 1; b >= 0; b-- { // a short form may have fewer samples than batches
		if n[b] == 0 {
			x, y = slices.Delete(x, b, b+1), slices.Delete(y, b, b+1)
			remembered, waiting = slices.Delete(remembered, b, b+1), slices.Delete(waiting, b, b+1)
		}
	}
	waiting = without(waiting, remembered)
	x, y = without(without(x, remembered), waiting), without(without(y, remembered), waiting)
	slope = dot(x, y) / dot(x, x)
	for i := range x {
		y[i] -= slope * x[i]
	}
	return slope, math.Sqrt(dot(y, y) / float64(len(x)-4) / dot(x, x))
}

// without returns what of y, around its mean, is not proportional to z.
func without(y, z []float64) []float64 {
	y, z = centered(y), centered(z)
	if slope := dot(z, y) / dot(z, z); dot(z, z) > 0 {
		for i := range y {
			y[i] -= slope * z[i]
		}
	}
	return y
}

func centered(all []float64) []float64 {
	var mean float64
	for _, v := range all {
		mean += v / float64(len(all))
	}
	all = slices.Clone(all)
	for i := range all {
		all[i] -= mean
	}
	return all
}

func dot(x, y []float64) (sum float64) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

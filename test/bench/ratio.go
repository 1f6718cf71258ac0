package main

import (
	"slices"
	"time"
)

// rounds is how often what is compared is measured, in turns.
const rounds = 9

// median returns the middle of values, which must not be empty.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// ratio runs what and floor in turns and returns the median of what took, by the floor beside it. Each returns how long its work took.
func ratio(what, floor func() time.Duration) float64 {
	what()
	floor()
	var ratios []float64
	for range rounds {
		f := floor()
		w := what()
		ratios = append(ratios, float64(w)/float64(f))
	}
	return median(ratios)
}

//go:build long

package soak

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// Pods that wait longer toward the end, on a machine that becomes slower, are no leak, and hide
// none.
func TestFit(t *testing.T) {
	const seed, perLife, perWaiting, noise = 1, 50, 40e3, 200e3
	for name, leak := range map[string]float64{"no leak": 0, "a leak": perLife} {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, seed))
			var all []sample
			for i := range 660 {
				s := sample{lives: 75 * i, at: time.Duration(i) * sampleEvery, waiting: 20 + random.Float64()*20}
				if i > 500 {
					s.waiting += 30
				}
				s.heap = 30e6 + leak*float64(s.lives) + perWaiting*s.waiting + noise*random.NormFloat64()
				all = append(all, s)
			}
			slope, stderr := fit(all, 10_000, 10*time.Minute, func(s sample) float64 { return s.heap })
			if math.Abs(slope-leak) > 3*stderr || stderr > 5 {
				t.Errorf("%.1f a life, standard error %.1f, want %.1f", slope, stderr, leak)
			}
			t.Logf("%.1f a life, standard error %.1f", slope, stderr)
		})
	}
}

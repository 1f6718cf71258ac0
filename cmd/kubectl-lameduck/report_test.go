package main

import (
	"testing"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

func TestSentence(t *testing.T) {
	for want, r := range map[string]api.NamespaceReport{
		"with enforcement 312 deletions would have waited 45 ms at the median, 1.9 s at most; 41 had requests or " +
			"connections in flight": {Deletions: 312, InFlight: 41, WaitSeconds: []float64{1.9, 0.045, 0.01}},
		"no deletion was measured; 2 more could not be measured": {Unmeasured: 2},
	} {
		if got := sentence(r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

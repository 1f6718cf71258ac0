// Package report renders the measurements of the demo: one rollout three times, unprotected, with
// the usual sleep in preStop, and with Lameduck. Its functions are pure: they convert numbers to
// text or JSON.
//
// A value that was not measured is shown as "-" in text, and as null in JSON if no number would be
// true. It is never 0. Examples are a Run without requests and a Spread without values.
package report

import (
	"encoding/json"
	"slices"
)

// Run is one rollout under load. A zero Run has not been run.
type Run struct {
	Name                  string         `json:"-"` // heading of its column; empty: the usual one
	Requests              int            `json:"requests"`
	Failed                int            `json:"failed"`
	FailedBy              map[string]int `json:"failedBy"` // by kind
	RolloutSeconds        float64        `json:"rolloutSeconds"`
	P50Millis             float64        `json:"-"`
	P99Millis             float64        `json:"p99Millis"` // of the requests that did not fail
	DeleteToSigtermMillis Spread         `json:"deleteToSigtermMillis"`
	// What the load generator failed to do. Not 0 puts the numbers above in doubt, so the table
	// says it.
	Late    int `json:"late,omitempty"`    // sent too late
	Skipped int `json:"skipped,omitempty"` // not sent
}

// MarshalJSON writes an empty object for no failures, not null.
func (r Run) MarshalJSON() ([]byte, error) {
	if r.FailedBy == nil {
		r.FailedBy = map[string]int{}
	}
	type plain Run
	return json.Marshal(plain(r))
}

// Spread sums up several measurements of one value. The zero Spread has no measurement: it is null
// in JSON.
type Spread struct {
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

// SpreadOf returns the spread of values, in any order. The median of an even number is the mean of
// the two in the middle.
func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return Spread{Min: v[0], Median: (v[(n-1)/2] + v[n/2]) / 2, Max: v[n-1]}
}

// MarshalJSON writes null for the zero Spread.
func (s Spread) MarshalJSON() ([]byte, error) {
	if s == (Spread{}) {
		return []byte("null"), nil
	}
	type plain Spread
	return json.Marshal(plain(s))
}

// Step is one moment in the drain of one pod.
type Step struct {
	OffsetMillis float64 `json:"offsetMillis"` // since the deletion was asked for
	Who          string  `json:"who"`
	What         string  `json:"what"`
}

// Demo is the whole result.
type Demo struct {
	Unprotected Run     `json:"unprotected"`
	PreStop     Run     `json:"preStop"`
	Lameduck    Run     `json:"lameduck"`
	LagSeconds  float64 `json:"lag"`   // how long the gateway takes to act on what it learns
	Drain       []Step  `json:"drain"` // of one pod with Lameduck
	Kubernetes  string  `json:"-"`     // version
	Gateway     string  `json:"-"`     // name and version
}

// MarshalJSON writes an empty list for no drain, not null.
func (d Demo) MarshalJSON() ([]byte, error) {
	if d.Drain == nil {
		d.Drain = []Step{}
	}
	type plain Demo
	return json.Marshal(plain(d))
}

package load

import (
	"cmp"
	"slices"
	"time"
)

// FirstPhase is the name of the phase before the first mark. Result.Phases always begins with it.
const FirstPhase = "start"

// failuresOfKind is how many failures of each kind a result tells in full, unless Options.Failures
// says otherwise.
const failuresOfKind = 5

// lateAfter is how long after it was due a request may start without being called late: more than
// timers need on a busy machine, much less than a retransmission.
const lateAfter = 10 * time.Millisecond

// Result is what became of a load. Times are milliseconds, offsets count from Start.
type Result struct {
	Start   time.Time `json:"start"`
	Seconds float64   `json:"seconds"` // until the schedule ended
	Counts
	MaxLateMillis float64 `json:"maxLateMillis"`
	Connections   int     `json:"connections"` // attempted
	// kept connections found closed before they were used again; not failures
	Dropped int `json:"dropped"`
	// the first five (Options.Failures) of each kind, in the order in which they were due
	Failures []Failure `json:"failures"`
	// FailedAt counts failures by Failure.Pod, all of them. Nil: none failed.
	FailedAt map[string]int `json:"failedAt,omitempty"`
	Phases   []Phase        `json:"phases"`
}

// Counts sums up requests. Total is OK + Failed, and Failed is the sum of FailedBy.
type Counts struct {
	Total    int            `json:"total"` // sent
	OK       int            `json:"ok"`
	Failed   int            `json:"failed"`
	FailedBy map[string]int `json:"failedBy"` // by Kind
	Late     int            `json:"late"`     // of Total: started more than 10 ms after they were due
	Skipped  int            `json:"skipped"`  // not of Total: due, never sent, because MaxInFlight was reached
	Latency  Latency        `json:"latency"`
	Pods     map[string]int `json:"pods"` // requests by the header Pod of their response, whatever its status
}

// Latency holds exact quantiles of the ok requests (nearest rank), from due to complete. All 0 if
// none was ok.
type Latency struct {
	P50Millis  float64 `json:"p50Millis"`
	P90Millis  float64 `json:"p90Millis"`
	P99Millis  float64 `json:"p99Millis"`
	P999Millis float64 `json:"p999Millis"`
	MaxMillis  float64 `json:"maxMillis"`
}

// Phase holds the requests that were due between two marks.
type Phase struct {
	Name        string  `json:"name"`
	StartMillis float64 `json:"startMillis"`
	EndMillis   float64 `json:"endMillis"`
	Counts
}

// Failure is one failed request.
type Failure struct {
	Due          time.Time `json:"due"`
	OffsetMillis float64   `json:"offsetMillis"` // of Due
	TookMillis   float64   `json:"tookMillis"`   // from Due to the failure
	Kind         Kind      `json:"kind"`
	Error        string    `json:"error"`
	// header Server-Pod of the response, else Pod; empty if there was none
	Pod    string `json:"pod,omitempty"`
	Source string `json:"source,omitempty"` // local address and port; empty if there was no connection
	Reused bool   `json:"reused"`           // the connection had carried a request before
}

// summarise computes a result from what became of each request. It sorts records. Marks are in
// order, the first at 0.
func summarise(start time.Time, records []record, marks []mark, end time.Duration, failures int) Result {
	slices.SortStableFunc(records, func(a, b record) int { return cmp.Compare(a.due, b.due) })
	res := Result{Start: start, Seconds: end.Seconds(), Counts: count(records), Failures: []Failure{}}
	told := map[Kind]int{}
	for _, r := range records {
		res.MaxLateMillis = max(res.MaxLateMillis, millis(r.late))
		if r.err == nil {
			continue
		}
		if res.FailedAt == nil {
			res.FailedAt = map[string]int{}
		}
		res.FailedAt[r.by]++
		kind := kindOf(r.err)
		if told[kind]++; told[kind] > failures {
			continue
		}
		f := Failure{
			Due: start.Add(r.due), OffsetMillis: millis(r.due), TookMillis: millis(r.took),
			Kind: kind, Error: r.err.Error(), Pod: r.by, Reused: r.reused,
		}
		if r.source.IsValid() {
			f.Source = r.source.String()
		}
		res.Failures = append(res.Failures, f)
	}
	for i, m := range marks {
		if m.at > end {
			break // marked after the end
		}
		to, rest := end, len(records)
		if i+1 < len(marks) && marks[i+1].at <= end {
			to = marks[i+1].at
			rest, _ = slices.BinarySearchFunc(records, to, func(r record, at time.Duration) int {
				return cmp.Compare(r.due, at)
			})
		}
		res.Phases = append(res.Phases, Phase{m.name, millis(m.at), millis(to), count(records[:rest])})
		records = records[rest:]
	}
	return res
}

func count(records []record) Counts {
	c := Counts{FailedBy: map[string]int{}, Pods: map[string]int{}}
	var took []time.Duration
	for _, r := range records {
		if r.skipped {
			c.Skipped++
			continue
		}
		c.Total++
		if r.late > lateAfter {
			c.Late++
		}
		if r.pod != "" {
			c.Pods[r.pod]++
		}
		if r.err != nil {
			c.Failed++
			c.FailedBy[string(kindOf(r.err))]++
			continue
		}
		c.OK++
		took = append(took, r.took)
	}
	slices.Sort(took)
	c.Latency = Latency{quantile(took, 500), quantile(took, 900), quantile(took, 990), quantile(took, 999),
		quantile(took, 1000)}
	return c
}

// quantile returns the smallest of the sorted durations that at least perMille of a thousand do not
// exceed, in milliseconds.
func quantile(sorted []time.Duration, perMille int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return millis(sorted[(len(sorted)*perMille+999)/1000-1])
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

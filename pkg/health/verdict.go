package health

import "github.com/lameduck-io/lameduck/pkg/target"

// Verdict is the health of a target according to its probes. The names have the meanings that they
// have in lua-resty-healthcheck, except VerdictUnknown: there a target begins as healthy.
type Verdict uint8

const (
	// VerdictUnknown is the zero value: no threshold was reached yet. The target is usable.
	VerdictUnknown Verdict = iota
	// Healthy is entered when the check's threshold of successes in a row is reached. Further
	// successes are not counted.
	Healthy
	// Unhealthy is entered when the check's threshold for failures of one kind is reached. The
	// target is not usable. Further failures are not counted.
	Unhealthy
	// MostlyHealthy is entered from Healthy by a failure, and left when a threshold is reached on
	// either side. The target is usable.
	MostlyHealthy
	// MostlyUnhealthy is entered from Unhealthy by a success, and left when a threshold is reached
	// on either side. The target is not usable.
	MostlyUnhealthy
)

// String prints the verdict in lower case, words joined by underscores as lua-resty-healthcheck has
// them.
func (v Verdict) String() string {
	return target.Name(v, "unknown", "healthy", "unhealthy", "mostly_healthy", "mostly_unhealthy")
}

// Usable reports whether the target's health permits traffic to it.
func (v Verdict) Usable() bool { return v != Unhealthy && v != MostlyUnhealthy }

// limit returns the threshold for outcomes of kind k. 0: they are not counted.
func (t Thresholds) limit(k OutcomeKind) uint8 {
	switch k {
	case Success:
		return t.Successes
	case HTTPFailure:
		return t.HTTPFailures
	case TCPFailure:
		return t.TCPFailures
	case Timeout:
		return t.Timeouts
	default:
		return 0
	}
}

// count adds one outcome to the counters (of Success, HTTPFailure, TCPFailure and Timeout) and
// reports whether the verdict has changed. An outcome without a threshold is not counted and resets
// no counter. Until the present check has a verdict of its own, both sides are counted and the
// former verdict stays.
func (r *record) count(t Thresholds, k OutcomeKind) bool {
	limit := t.limit(k)
	if limit == 0 {
		return false
	}
	toward := Unhealthy
	if k == Success {
		toward = Healthy
	}
	if r.is(own) && r.verdict == toward {
		return false
	}
	if k == Success {
		r.counters[1], r.counters[2], r.counters[3] = 0, 0, 0
	} else {
		r.counters[0] = 0
	}
	c := &r.counters[k-Success]
	*c = max(*c, *c+1) // 255 stays
	was := r.verdict
	switch {
	case *c >= limit:
		r.verdict = toward
		r.set(own, true)
	case !r.is(own):
	case r.verdict == Healthy:
		r.verdict = MostlyHealthy
	case r.verdict == Unhealthy:
		r.verdict = MostlyUnhealthy
	}
	return r.verdict != was
}

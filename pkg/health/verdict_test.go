package health

import (
	"strings"
	"testing"
)

// The states are those that lua-resty-healthcheck's documentation and its incr_counter give for the
// same outcomes: s is a success, h, t and o a failure by HTTP, by TCP and by timeout. There a
// target begins as healthy, so each sequence that is compared begins with enough successes.
func TestVerdictsAreThoseOfLuaRestyHealthcheck(t *testing.T) {
	three := Thresholds{Successes: 2, HTTPFailures: 3, TCPFailures: 2, Timeouts: 2}
	for name, c := range map[string]struct {
		t    Thresholds
		then string
	}{
		"successes in a row do nothing more": {three, "s:unknown s:healthy s:healthy s:healthy"},
		"a failure, and the way back": {three,
			"s:unknown s:healthy h:mostly_healthy s:mostly_healthy s:healthy"},
		"down by one kind": {three, "s:unknown s:healthy h:mostly_healthy h:mostly_healthy h:unhealthy h:unhealthy"},
		"kinds count apart, and a failure resets no other kind": {three,
			"s:unknown s:healthy h:mostly_healthy t:mostly_healthy h:mostly_healthy o:mostly_healthy t:unhealthy"},
		"a success resets all failures": {three,
			"s:unknown s:healthy h:mostly_healthy h:mostly_healthy t:mostly_healthy s:mostly_healthy " +
				"h:mostly_healthy h:mostly_healthy t:mostly_healthy h:unhealthy"},
		"a failure resets the successes": {three,
			"s:unknown s:healthy o:mostly_healthy o:unhealthy s:mostly_unhealthy t:mostly_unhealthy " +
				"s:mostly_unhealthy s:healthy"},
		"mostly unhealthy falls again only by a threshold": {three,
			"s:unknown s:healthy t:mostly_healthy t:unhealthy s:mostly_unhealthy t:mostly_unhealthy t:unhealthy"},
		"one success heals": {Thresholds{Successes: 1, TCPFailures: 2},
			"s:healthy t:mostly_healthy s:healthy t:mostly_healthy t:unhealthy s:healthy"},
		"one failure fells": {Thresholds{Successes: 2, TCPFailures: 1},
			"s:unknown s:healthy t:unhealthy s:mostly_unhealthy t:unhealthy"},
		"what has no threshold is not counted, and resets nothing": {Thresholds{Successes: 2, TCPFailures: 2},
			"s:unknown s:healthy t:mostly_healthy h:mostly_healthy o:mostly_healthy s:mostly_healthy " +
				"h:mostly_healthy s:healthy"},
		"without a threshold of successes a failure is for ever": {Thresholds{TCPFailures: 2},
			"s:unknown t:unknown s:unknown t:unhealthy s:unhealthy s:unhealthy"},
		"unknown until the first threshold": {three,
			"h:unknown h:unknown s:unknown h:unknown h:unknown t:unknown h:unhealthy"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &record{pool: &pool{}}
			kinds := map[string]OutcomeKind{"s": Success, "h": HTTPFailure, "t": TCPFailure, "o": Timeout}
			var got []string
			for step := range strings.FieldsSeq(c.then) {
				kind, _, _ := strings.Cut(step, ":")
				was := r.verdict
				if changed := r.count(c.t, kinds[kind]); changed != (r.verdict != was) {
					t.Errorf("count says %t from %s to %s", changed, was, r.verdict)
				}
				got = append(got, kind+":"+r.verdict.String())
			}
			if text := strings.Join(got, " "); text != c.then {
				t.Fatalf("got\n%s, want\n%s", text, c.then)
			}
		})
	}
}

// restyTarget is the state of one target by the rules of lua-resty-healthcheck 3.1.2
// (incr_counter): an outcome without a threshold, or one that agrees with the verdict, changes
// nothing.
type restyTarget struct {
	verdict  Verdict
	counters [4]int // of Success, HTTPFailure, TCPFailure and Timeout
}

func (r *restyTarget) count(limits [4]uint8, kind int) {
	toward, between := Unhealthy, MostlyHealthy
	if kind == 0 {
		toward, between = Healthy, MostlyUnhealthy
	}
	if limits[kind] == 0 || r.verdict == toward {
		return
	}
	if r.counters[kind]++; kind == 0 {
		r.counters[1], r.counters[2], r.counters[3] = 0, 0, 0
	} else {
		r.counters[0] = 0
	}
	switch opposite := Healthy + Unhealthy - toward; {
	case r.counters[kind] >= int(limits[kind]):
		r.verdict = toward
	case r.verdict == opposite:
		r.verdict = between
	}
}

// Every sequence of up to six outcomes, from healthy on, has the verdicts of lua-resty-healthcheck.
// From unknown on, where it begins as healthy, a target is usable after the same outcomes.
func TestEverySequenceIsThatOfLuaRestyHealthcheck(t *testing.T) {
	for _, l := range [][4]uint8{{3, 3, 2, 2}, {2, 2, 2, 2}, {1, 1, 1, 1}, {3, 0, 2, 0}, {2, 3, 0, 1}, {0, 2, 2, 2},
		{1, 2, 3, 3}} {
		limits := Thresholds{Successes: l[0], HTTPFailures: l[1], TCPFailures: l[2], Timeouts: l[3]}
		for word := range 1 << 12 { // two bits for each outcome
			resty := restyTarget{verdict: Healthy}
			known, unknown := &record{pool: &pool{}, verdict: Healthy}, &record{pool: &pool{}}
			known.set(own, true)
			for n := range 6 {
				kind := word >> (2 * n) & 3
				resty.count(l, kind)
				known.count(limits, Success+OutcomeKind(kind))
				unknown.count(limits, Success+OutcomeKind(kind))
				if known.verdict != resty.verdict || unknown.verdict.Usable() != resty.verdict.Usable() {
					t.Fatalf(
						"%+v: outcome %d of %012b: %s, and %s from unknown on; want %s",
						limits,
						n+1,
						word,
						known.verdict,
						unknown.verdict,
						resty.verdict,
					)
				}
			}
		}
	}
}

func TestACounterDoesNotOverflowIntoAnother(t *testing.T) {
	r := &record{pool: &pool{}}
	for range 1000 {
		r.count(Thresholds{Successes: 255, TCPFailures: 255, Timeouts: 255}, TCPFailure)
		r.flags &^= own // as if every check were new
	}
	if r.counters != [4]uint8{0, 0, 255, 0} {
		t.Fatalf("counters are %v", r.counters)
	}
}

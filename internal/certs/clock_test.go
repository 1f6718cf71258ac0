package certs

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// The clock of one replica's node is ahead: by more than a set is valid, or by more than a set is
// used. The clocks of all other replicas and of the callers are right. What the one replica writes
// must work for all.
func TestAClockThatWasAheadDoesNotBreakTheCertificate(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, ahead := range map[string]time.Duration{"more than it is good for": 400 * time.Hour,
		"more than it is used": 101 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			first, _, err := State{}.step(now, false, "", names, times)
			if err != nil {
				t.Fatal(err)
			}
			state := first
			for range 20 { // the keeper of the replica whose clock is ahead
				if state, _, err = state.step(now.Add(ahead), true, "", names, times); err != nil {
					t.Fatal(err)
				}
				ahead += 30 * time.Minute
				now = now.Add(30 * time.Minute)
			}
			broken := time.Duration(0)
			for works(state, state, now) != nil && broken < 2000*time.Hour {
				// replicas with good clocks, from now on
				if state, _, err = state.step(now, true, "", names, times); err != nil {
					t.Fatal(err)
				}
				now, broken = now.Add(30*time.Minute), broken+30*time.Minute
			}
			t.Logf("no call works for %s (RotateEvery is %s)", broken, times.RotateEvery)
			if broken > 0 {
				t.Error("replicas with good clocks continue to serve a certificate that is not valid yet, and no " +
					"deletion waits")
			}
		})
	}
}

// A set of an earlier version starts an hour before it was made. Replicas whose clocks are right
// replace one that a clock ahead has made.
func TestASetThatIsNotValidYetIsReplaced(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	defer func(from time.Time) { validFrom = from }(validFrom)
	validFrom = now.Add(400 * time.Hour)
	early, err := newSet(validFrom, names, times)
	if err != nil {
		t.Fatal(err)
	}
	validFrom = time.Unix(0, 0)
	state, changed, err := State{Current: early}.step(now, true, "", names, times)
	if err != nil || !changed {
		t.Fatalf("changed %t, %v", changed, err)
	}
	if err := works(state, state, now); err != nil {
		t.Error(err)
	}
}

// Two replicas look at the same Secret each minute, and the clock of one is wrong by more than the
// overlap. Each measures the overlap from its own first look, so it neither ends early nor lasts
// longer.
func TestAWrongClockDoesNotChangeTheOverlap(t *testing.T) {
	for _, skew := range []time.Duration{-400 * time.Hour, -2 * time.Hour, 2 * time.Hour} {
		began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		stored, _, err := State{}.step(began, true, "", names, times)
		if err != nil {
			t.Fatal(err)
		}
		var next string
		var last [2]State
		var made, current, over time.Time
		for now := began; over.IsZero() && now.Before(began.Add(10*time.Hour)); now = now.Add(time.Minute) {
			for replica, clock := range []time.Time{now, now.Add(skew)} {
				text, err := json.Marshal(stored)
				if err != nil {
					t.Fatal(err)
				}
				var state State
				if err := json.Unmarshal(text, &state); err != nil {
					t.Fatal(err)
				}
				state.recall(last[replica])
				if stored, _, err = state.step(clock, true, "1", names, times); err != nil {
					t.Fatal(err)
				}
				last[replica] = stored
			}
			switch {
			case stored.Next != nil && next == "":
				next, made = stored.Next.Secret, now
			case stored.Current.Secret == next && current.IsZero():
				current = now
			case !current.IsZero() && stored.Former == nil:
				over = now
			}
		}
		for step, took := range map[string]time.Duration{"next": current.Sub(made), "former": over.Sub(current)} {
			if took < times.Overlap || took > times.Overlap+2*time.Minute {
				t.Errorf("a clock that is %s off: the step %s took %s", skew, step, took)
			}
		}
	}
}

// A set that is unusable when just made is an error: another one would be unusable too, and a
// replica that stores each would write to the API server without end.
func TestASetThatIsUselessIsNotStored(t *testing.T) {
	century := Times{RotateEvery: 876000 * time.Hour, Overlap: time.Hour}
	s, changed, err := State{}.step(time.Now(), true, "", names, century)
	if err == nil || !strings.Contains(err.Error(), "rotateEvery 876000h") || changed || s.Current != nil {
		t.Errorf("changed %t, %v: %+v", changed, err, s)
	}
}

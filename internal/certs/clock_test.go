package certs

import (
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

// The step of a set is complete at a time that lies ahead, written by a replica whose clock is: the
// others do not wait for that time.
func TestATimeToComeDoesNotDelayASet(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	current, err := newSet(now, names, times)
	if err != nil {
		t.Fatal(err)
	}
	next, err := newSet(now, names, times)
	if err != nil {
		t.Fatal(err)
	}
	next.Known = now.Add(400 * time.Hour)
	state := State{Current: current, Next: next}
	for range 2 {
		if state, _, err = state.step(now, true, "", names, times); err != nil {
			t.Fatal(err)
		}
		now = now.Add(times.Overlap)
	}
	if state.Current.Secret != next.Secret {
		t.Error("the next set waits for the clock of another replica")
	}
}

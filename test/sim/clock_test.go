package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// A reading is a time as time.Now returns it: two are compared by their monotonic readings, until
// one has lost it. If package time changes its layout, this fails.
func TestReadings(t *testing.T) {
	early, late := reading(time.Second, 5*time.Minute), reading(3*time.Second, -time.Minute)
	if got := late.Sub(early); got != 2*time.Second || !late.After(early) {
		t.Errorf("between the readings: %s", got)
	}
	if got, want := late.Round(0), epoch.Add(3*time.Second-time.Minute); !got.Equal(want) {
		t.Errorf("the wall clock says %s, want %s", got, want)
	}
	if got := late.Add(time.Second).Sub(start); got != 4*time.Second {
		t.Errorf("since the start: %s", got)
	}
	text, err := json.Marshal(early)
	var sent time.Time
	if err != nil || json.Unmarshal(text, &sent) != nil || !late.Before(sent) {
		t.Errorf("%s, sent to another process, is not after %s (%v)", sent, late, err)
	}
}

// In other worlds all clocks are right.
func TestSkewedWorlds(t *testing.T) {
	skewed := 0
	for seed := uint64(1); seed <= 70; seed++ {
		w := &world{seed: seed}
		w.drawSkews()
		if (w.skews != [maxNodes]skew{}) != (seed%7 == 3) {
			t.Errorf("seed %d: %v", seed, w.skews)
		} else if seed%7 == 3 {
			skewed++
		}
	}
	if skewed != 10 {
		t.Errorf("%d worlds have clocks that differ", skewed)
	}
}

// The 5 s in which one drain waits for a suspended agent are those of the replica's clock.
func TestTrialsByTheClockOfTheReplica(t *testing.T) {
	first, second := 158*time.Second, 159500*time.Millisecond
	for ahead, want := range map[time.Duration]bool{
		0: false, 551 * time.Second: true, -368 * time.Second: false, -159 * time.Second: true,
	} {
		w := &world{times: drain.DefaultTimes(), measured: map[string]int{}}
		w.skews[1] = skew{first: ahead}
		c := &coord{proc: proc{node: 1}, w: w, room: map[drain.UID]*admitted{
			"first": {told: true, toldAt: first}, "second": {told: true, toldAt: second},
		}}
		quiet := &silence{}
		w.at = first
		if !c.tries(quiet, "first") {
			t.Errorf("%s ahead: the first one is none", ahead)
		}
		if w.at = second; c.tries(quiet, "second") != want {
			t.Errorf("%s ahead: the second one may wait: %t, want %t", ahead, !want, want)
		}
	}
}

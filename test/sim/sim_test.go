package main

import (
	"strings"
	"testing"
	"time"
)

// A seed that fails must fail again when it is replayed: neither the order of maps nor an address
// may leak into what happens.
func TestTheSameSeedIsTheSameWorld(t *testing.T) {
	for seed := uint64(1); seed <= 30; seed++ {
		first, second := newWorld(seed, true, false), newWorld(seed, true, false)
		first.run()
		second.run()
		if first.hash == second.hash && first.steps == second.steps {
			continue
		}
		for i := range min(len(first.trace), len(second.trace)) {
			if first.trace[i] != second.trace[i] {
				t.Fatalf("seed %d parts at line %d:\n%s\n%s", seed, i, first.trace[i], second.trace[i])
			}
		}
		t.Fatalf("seed %d: %d and %d steps", seed, first.steps, second.steps)
	}
}

// calmWorld returns a world without faults.
func calmWorld(t *testing.T) *world {
	t.Helper()
	for seed := uint64(1); seed <= 400; seed++ {
		if w := newWorld(seed, false, false); w.isCalm {
			return w
		}
	}
	t.Fatal("no world is calm")
	return nil
}

// An agent that dies leaves its streams behind. Without this, the answer to a call of a former life
// opens a second stream to the replica in the next life, and two streams in turn take the session
// from each other: what the one has heard, the other undoes.
func TestAnAnswerDoesNotReachTheNextLife(t *testing.T) {
	w := calmWorld(t)
	a := w.agents[len(w.agents)-1]
	w.after(nil, 5*time.Second, func() {
		l := a.links[0]
		l.post(l.conn, func() bool { a.crash(false); a.start(); return false }, func() {})
		w.after(nil, 5*time.Second, func() {
			if began := a.links[0].began; began > 6*time.Second {
				t.Errorf("the stream of an agent that started at 5s was opened again at %s", began)
			}
		})
	})
	w.run()
	if w.violation != "" {
		t.Error(w.violation)
	}
}

// A replica that was frozen reads the Leave of a former life when the next one is there already.
// Without this, the checks call an agent departed that has come back.
func TestALateLeaveIsOfTheLifeThatSentIt(t *testing.T) {
	w := calmWorld(t)
	a, c := w.agents[len(w.agents)-1], w.coords[0]
	w.after(nil, 5*time.Second, func() {
		c.frozen = w.at + 2*time.Second
		a.leave()
		a.crash(true) // so that the end of the stream does not overtake the Leave
		a.start()
		w.after(nil, time.Second, func() { a.crash(true) }) // it has connected, and declared nothing
		w.after(nil, 3*time.Second, func() {
			if c.departed[a.id] != "" {
				t.Errorf("%s calls the life of %s departed that has connected last", c.name, a.name)
			}
			a.start()
		})
	})
	w.run()
	if w.violation != "" {
		t.Error(w.violation)
	}
}

// A trace changes nothing of what it tells.
func TestTracingChangesNothing(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		silent, traced := newWorld(seed, false, false), newWorld(seed, true, false)
		silent.run()
		traced.run()
		if silent.steps != traced.steps || silent.violation != traced.violation {
			t.Errorf("seed %d: %d steps and %q, traced %d and %q", seed, silent.steps, silent.violation, traced.steps,
				traced.violation)
		}
	}
}

func TestSeeds(t *testing.T) {
	got := sweep(sequence(1, 100), false, false, func(w *world) {
		t.Errorf("seed %d: %s: %s", w.seed, w.check, w.violation)
	})
	if got.seeds != 100 || got.faults == 0 || got.allowed["Acknowledged"] == 0 {
		t.Errorf("the worlds are empty: %+v", got)
	}
}

// Without faults nothing needs a reason but what the design says: forced deletions, last targets,
// pods that are being evicted by force.
func TestCalmWorldsLoseNothing(t *testing.T) {
	calm := 0
	for seed := uint64(1); seed <= 400; seed++ {
		w := newWorld(seed, false, false)
		if !w.isCalm {
			continue
		}
		calm++
		w.run()
		if w.violation != "" {
			t.Errorf("seed %d: %s", seed, w.violation)
		}
		for reason := range w.excused {
			switch strings.TrimPrefix(reason, "lost: allowed by ") {
			case "Forced", "LastTarget", "DisruptionTarget", "Deadline", "NoAgents", "UnknownPod", "NotListed",
				"Observed":
			case "lost: IdleBound", "lost: LastTarget":
			case "lost in a kernel: no barrier", "lost in a kernel: NotEnforced", "lost in a kernel: Deadline",
				"lost in a kernel: IdleBound", "lost in a kernel: LastTarget", "lost in a kernel: LastTarget since",
				"routed by a kernel: LastTarget",
				"lost in a kernel: not asked: the scope is local", "routed by a kernel: not asked: the scope is local",
				"lost in a kernel: not asked: not in the sample", "routed by a kernel: not asked: not in the sample",
				"routed by a kernel: LastTarget, and another endpoint is just becoming ready":
			default:
				t.Errorf("seed %d: %s", seed, reason)
			}
		}
	}
	if calm == 0 {
		t.Error("no world is calm")
	}
}

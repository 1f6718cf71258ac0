package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/keys"
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

// The ledger forgets an agent that has left 5 s after its stream has ended, if no list has it. A
// watch that was silent until then lists the agent as a new one. Without the exception for this,
// the check requires that the ledger remembers the Leave.
func TestAnAgentThatHasLeftIsListedLate(t *testing.T) {
	for name, test := range map[string]struct {
		listed time.Duration // after the end of its stream
		waits  bool
	}{
		"remembered": {4500 * time.Millisecond, false},
		"forgotten":  {6500 * time.Millisecond, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := calmWorld(t)
			c := w.coords[0]
			w.after(nil, 20*time.Second, func() {
				c.watch.stall = 26*time.Second + test.listed
				w.newAgent(0)
				a := w.agents[len(w.agents)-1]
				a.right, a.services = "", []int{0} // the API lists it
				w.after(nil, 5*time.Second, a.leave)
				w.after(nil, 6*time.Second, func() {
					a.gw.crash(time.Hour)
					a.ready = false
					a.crash(false)
					w.api.rosterChanged()
				})
				w.after(nil, 6*time.Second+test.listed, func() {
					i := slices.IndexFunc(w.api.pods, func(p *pod) bool {
						return p.ready && !p.terminating && slices.Contains(p.services, 0)
					})
					w.api.reask(w.api.pods[i].uid)
				})
				w.after(nil, 30*time.Second, func() { a.listed = false; w.api.rosterChanged() })
			})
			w.run()
			if w.violation != "" {
				t.Error(w.violation)
			}
			if waits := w.excused[forgotten] > 0; waits != test.waits {
				t.Errorf("a drain waits for the agent: %t, want %t", waits, test.waits)
			}
		})
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
	if got.seeds != 100 || got.faults == 0 || got.allowed["Acknowledged"] == 0 ||
		got.allowed["BarrierWaits"] == 0 {
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
			case "lost: IdleBound", "lost: LastTarget", "lost in a kernel: CutOff":
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

// A hold that leaves a pod to its barrier relies on the pod's mode. If the mode becomes observe
// while the barrier waits, the barrier ends with NotEnforced, and a request in flight may be lost.
// The excuse is for that change only.
func TestABarrierWhoseModeChanges(t *testing.T) {
	const second = time.Second
	for name, c := range map[string]struct {
		mode, reason string
		at           time.Duration
		want         string
	}{
		"changed to observe": {keys.Observe, "NotEnforced", 2 * second,
			"the barrier did not wait: NotEnforced"},
		"still enforce":                {"", "NotEnforced", 2 * second, ""},
		"enforce by name":              {keys.Enforce, "NotEnforced", 2 * second, ""},
		"observe, and another end":     {keys.Observe, "Acknowledged", 2 * second, ""},
		"after as long as a hold does": {"", "NotEnforced", 31 * second, "IdleBound"},
	} {
		p := &pod{mode: c.mode, committed: second, leftAt: second, passed: &pass{reason: c.reason, at: second + c.at}}
		if got := p.passedBy(nil, 30*second); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

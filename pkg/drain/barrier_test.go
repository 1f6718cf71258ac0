package drain

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// observe connects an agent that observes every Service.
func (w *world) observe(id AgentID) {
	w.Helper()
	w.sessions[id] = w.Connect(w.now, id, Hello{Observes: true})
	w.observeAs(id, Nodes)
}

// observeAs declares a population.
func (w *world) observeAs(id AgentID, population string) {
	w.Helper()
	if _, ok := w.Declare(id, w.sessions[id], population,
		[]Route{{EveryService, Endpoints, Observed}}); !ok {
		w.Fatalf("declaration of %s refused", id)
	}
}

// see reports at the barrier.
func (w *world) see(id AgentID, p Pod, s State, quiet bool) {
	w.Helper()
	w.report(id, Report{UID: p.UID, State: s, Gate: AtBarrier, NoConnections: quiet})
}

// open opens the barrier of p, which was deleted just now, for its agent by.
func (w *world) open(p Pod, by AgentID, change ...func(*Barrier)) {
	w.Helper()
	b := Barrier{
		Pod: p, By: by, Services: []Service{web}, Since: w.now, Bound: 30 * time.Second,
		Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")},
	}
	for _, f := range change {
		f(&b)
	}
	w.OpenBarrier(w.now, b)
}

func (w *world) wantBarrier(p Pod, want string) {
	w.Helper()
	if got := line(w.Status(w.now, AtBarrier, p.UID)); got != want {
		w.Fatalf("at %s: the barrier of %s is %q, want %q", w.now.Sub(t0), p, got, want)
	}
}

// Without this, what an agent said of the pod before its deletion lets the barrier through.
func TestGatesHaveWordsOfTheirOwn(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.observe("node-1")
	w.open(p, "node-1")
	w.say("node-1", p, Idle) // at the hold
	w.wantBarrier(p, "Unrouting node-1:unknown")
	w.see("node-1", p, Idle, true)
	w.wantBarrier(p, "Released Acknowledged")
}

// Without this, a pod that was deleted in the moment when it became ready is stopped, and then a
// kernel that hears of both in turn sends to it.
func TestWhoHasNotHeardOfAPod(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	for _, id := range []AgentID{"node-1", "node-2", "node-3"} {
		w.observe(id)
	}
	sent := func(id AgentID, s State) {
		w.report(id, Report{UID: p.UID, State: s, Gate: AtBarrier, NoConnections: true, HasSent: true})
	}
	w.open(p, "node-1", func(b *Barrier) { b.Young = 4 * time.Second })
	sent("node-1", Idle)
	w.see("node-2", p, Idle, true)
	w.see("node-3", p, Removed, false)
	w.wantBarrier(p, "Unrouting node-2:unknown node-3:unknown")
	w.pass(time.Second)
	sent("node-2", Routing)
	w.wantBarrier(p, "Unrouting node-2:routing node-3:unknown")
	sent("node-2", Idle)
	w.wantBarrier(p, "Unrouting node-3:unknown")
	// Another replica, or one that knows it later, makes it longer, not shorter.
	w.open(p, "node-1", func(b *Barrier) { b.Young = time.Second })
	w.pass(2999 * time.Millisecond)
	again := func() bool {
		return w.report("node-3", Report{UID: p.UID, State: Removed, Gate: AtBarrier})
	}
	if again() {
		t.Error("an early reading is news")
	}
	w.pass(time.Millisecond)
	// That it must have learned of the pod by now says nothing of what was read before.
	w.wantBarrier(p, "Unrouting node-3:unknown")
	if !again() {
		t.Error("a reading that counts is not news: hooks that wait are not woken")
	}
	w.wantBarrier(p, "Quiescing node-3:removed")
	w.see("node-3", p, Idle, true)
	w.wantBarrier(p, "Released Acknowledged")
}

// An agent whose rules nothing maintains has to know whether it should have rules for the pod.
func TestAgentsLearnThatThePodIsListed(t *testing.T) {
	for _, listed := range []bool{false, true} {
		w := newWorld(t)
		p := pod("a")
		w.observe("node-1")
		w.open(p, "node-1", func(b *Barrier) { b.Listed = listed })
		w.open(p, "node-1")
		if o := w.opened(w.at(AtBarrier, p.UID), true); o.Watch.Listed != listed {
			t.Errorf("%+v, want listed %t", o.Watch, listed)
		}
	}
}

// Directed agents owe the barrier if they have not let go at the hold, and only then.
func TestWhoDirectsOwesWhatItDidNotAtTheHold(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		hold func(w *world)
		want string
	}{
		"it was never asked": {func(*world) {}, "Unrouting edge:unknown"},
		"it has let go": {func(w *world) { w.ask(p, web); w.say("edge", p, Idle) },
			"Released NoAgents"},
		// The deletion did not wait: the pod is preempted, or no webhook answered.
		"requests run that it has sent": {func(w *world) { w.ask(p, web); w.say("edge", p, Removed) },
			"Unrouting edge:unknown"},
		"requests ran for as long as the hold waits for them": {func(w *world) {
			w.ask(p, web)
			w.say("edge", p, Removed)
			w.Status(w.now, AtHold, p.UID)
			w.pass(w.times.IdleBound)
			w.say("edge", p, Removed)
		}, "Released NoAgents"},
		"it kept the pod as the last": {func(w *world) { w.ask(p, web); w.say("edge", p, Kept) },
			"Unrouting edge:unknown"},
		"it has let go, and routes again: its container was started again": {func(w *world) {
			w.Ask(w.now, p, []Targets{{Service: web, Usable: []UID{p.UID, "other"}}}, Place{Restart: true})
			w.say("edge", p, Idle)
			w.pass(time.Second)
			w.ReadyAgain(w.now, p.UID, w.now)
		}, "Unrouting edge:unknown"},
		"its Service was not known to list the pod": {func(w *world) { w.ask(p, api) }, "Unrouting edge:unknown"},
		"it was silent until the deadline": {func(w *world) { w.ask(p, web); w.pass(30 * time.Second) },
			"Unrouting edge:unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("edge", web)
			c.hold(w)
			w.open(p, "node-1")
			w.wantBarrier(p, c.want)
			_, rev, _ := w.hears("edge", 0)
			if c.want != "Unrouting edge:unknown" {
				return
			}
			w.say("edge", p, Idle)
			w.wantBarrier(p, "Released Acknowledged")
			w.GatePassed(w.now, AtBarrier, p.UID)
			if _, _, text := w.hears("edge", rev); text != "release uid-a dead" {
				t.Errorf("in the end it is told %q", text)
			}
		})
	}
}

// A pod is known to be going as soon as anybody drains it, and not for ever if it lives.
func TestWhoIsGoing(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p, q, r := pod("a"), pod("b"), pod("c")
	w.wantGoing(map[UID]bool{p.UID: false, q.UID: false, r.UID: false})
	w.Ask(w.now, p, []Targets{{Service: web, Usable: []UID{p.UID, "other"}}}, Place{Restart: true})
	w.Polled(w.now, []Shared{{Drains: []Claim{{Pod: q}}}}, false)
	w.open(r, "node-1")
	w.wantGoing(map[UID]bool{p.UID: true, q.UID: true, r.UID: true})
	w.pass(time.Second)
	w.ReadyAgain(w.now, p.UID, w.now)
	w.GatePassed(w.now, AtBarrier, r.UID)
	w.wantGoing(map[UID]bool{p.UID: false, q.UID: true, r.UID: true})
	w.Polled(w.now, []Shared{{Drains: nil}}, false)
	w.wantGoing(map[UID]bool{p.UID: false, q.UID: false, r.UID: true})
}

func (w *world) wantGoing(want map[UID]bool) {
	w.Helper()
	for uid, is := range want {
		if w.Pod(uid).Terminating != is {
			w.Errorf("that %s is going is %t, want %t", uid, !is, is)
		}
	}
}

// hears returns what an agent hears after rev, in the order in which it is written.
func (w *world) hears(id AgentID, rev uint64) (open []Open, next uint64, text string) {
	open, released, _, next := w.ChangesFor(id, rev)
	for _, o := range open {
		if o.Watch != nil {
			text += fmt.Sprintf("watch %s %v ", o.Watch.Pod.UID, o.Watch.Targets)
		} else {
			text += fmt.Sprintf("drain %s ", o.Pod.UID)
		}
	}
	for _, r := range released {
		text += fmt.Sprintf("release %s", r.UID)
		if r.Gate == AtBarrier {
			text += " at the barrier"
		}
		if r.Terminating {
			text += " dead"
		}
		text += " "
	}
	if n := len(text); n > 0 {
		text = text[:n-1]
	}
	return open, next, text
}

// Without this, an agent that is told of a barrier and of the end of the drain at the hold in one
// write lifts what it has just laid.
func TestEachIsToldItsPart(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("edge", web)
	w.join("prompt", web)
	w.observe("node-1")
	old := AgentID("old-node")
	w.Expect(w.now, []Expected{{ID: "edge", Name: "edge", Ready: true},
		{ID: old, Name: "old", Ready: true, Label: LabelObserved}})
	w.sessions[old] = w.Connect(w.now, old, Hello{}) // it does not know how
	revs := map[AgentID]uint64{}
	for _, id := range []AgentID{"edge", "prompt", "node-1", old} {
		_, revs[id], _ = w.hears(id, 0)
	}
	w.ask(p, web)
	w.say("prompt", p, Idle)
	w.open(p, "node-1")
	for id, want := range map[AgentID]string{
		"edge": "drain uid-a", "prompt": "release uid-a dead",
		"node-1": "watch uid-a [10.1.0.7:0] release uid-a dead", old: "release uid-a dead",
	} {
		var got string
		if _, revs[id], got = w.hears(id, revs[id]); got != want {
			t.Errorf("%s is told %q, want %q", id, got, want)
		}
	}
	w.wantBarrier(p, "Unrouting edge:unknown node-1:unknown")
	// A stream that is opened now hears the same.
	if _, _, got := w.hears("edge", 0); got != "drain uid-a" {
		t.Errorf("after it connected again, it is sent %q", got)
	}
	w.GatePassed(w.now, AtBarrier, p.UID)
	for id, want := range map[AgentID]string{"edge": "release uid-a dead", "prompt": "release uid-a dead",
		"node-1": "release uid-a at the barrier dead"} {
		if _, _, got := w.hears(id, revs[id]); got != want {
			t.Errorf("in the end %s is told %q, want %q", id, got, want)
		}
	}
}

func TestTheLastTarget(t *testing.T) {
	p := pod("a")
	last := func(b *Barrier) { b.Last = true }
	one := func(b *Barrier) { b.LastOne = true }
	here := func(b *Barrier) { b.LastHere = true }
	for name, c := range map[string]struct {
		is    func(*Barrier)
		by    AgentID
		state State
		quiet bool
		// now and settled are what holds at once and a second later.
		now, settled string
	}{
		"no other is ready, and it is quiet": {last, "node-1", Kept, true, "Unrouting node-1:kept",
			"Released LastTarget"},
		"several go together": {last, "node-1", Routing, true, "Unrouting node-1:routing", "Released LastTarget"},
		"it is not quiet":     {last, "node-1", Kept, false, "Unrouting node-1:kept", "Quiescing node-1:removed"},
		"another is ready, the kernel is late": {
			func(*Barrier) {}, "node-1", Kept, true, "Unrouting node-1:kept", "Unrouting node-1:kept",
		},
		"the last one of one Service, kept there": {one, "node-2", Kept, true, "Unrouting node-1:kept",
			"Released LastTarget"},
		"the last one of one Service, and routed in another": {one, "node-2", Routing, true, "Unrouting node-1:routing",
			"Unrouting node-1:routing"},

		"the last one of the node, says it": {here, "node-1", Kept, true, "Unrouting node-1:kept",
			"Released LastTarget"},
		"the last one of another node, says it": {here, "node-2", Kept, true, "Unrouting node-1:kept",
			"Unrouting node-1:kept"},
		"the last one of the node, and routing": {here, "node-1", Routing, true, "Unrouting node-1:routing",
			"Unrouting node-1:routing"},
		"it could not be read": {last, "node-1", StateUnknown, false, "Unrouting node-1:unknown",
			"Unrouting node-1:unknown"},
		"it has let go all the same": {last, "node-1", Idle, true, "Released Acknowledged", "Released Acknowledged"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.observe("node-1")
			w.open(p, c.by, c.is)
			w.see("node-1", p, c.state, c.quiet)
			w.wantBarrier(p, c.now)
			if at := w.Status(w.now, AtBarrier, p.UID).Recheck; c.settled != c.now &&
				!at.Equal(w.now.Add(time.Second)) {
				t.Errorf("the next look is not when it has settled, but at %s", at.Sub(t0))
			}
			w.pass(time.Second)
			w.wantBarrier(p, c.settled)
			if c.settled != "Released LastTarget" {
				return
			}
			// Another becomes ready: gateways let go now.
			w.open(p, c.by, func(b *Barrier) { b.Since = t0 })
			w.wantBarrier(p, c.now)
			if got := w.Changed(AtBarrier); !slices.Equal(got, []UID{p.UID}) {
				t.Errorf("touched %v", got)
			}
		})
	}
}

// A replica may not know yet of a Service that lists a young pod: its kernels send to the pod there
// until they learn of the deletion. Kept says itself that it is the last one everywhere.
func TestTheLastTargetOfAYoungPod(t *testing.T) {
	for state, want := range map[State]string{
		Routing: "Unrouting node-1:routing", Kept: "Released LastTarget",
	} {
		w := newWorld(t)
		p := pod("a")
		w.observe("node-1")
		w.open(p, "node-1", func(b *Barrier) { b.Last, b.Young = true, 4*time.Second })
		w.see("node-1", p, state, true)
		w.pass(4*time.Second - 1)
		w.wantBarrier(p, want)
		w.pass(1)
		w.wantBarrier(p, "Released LastTarget")
	}
}

// A gateway that keeps the last target still sends to it. Without this, the Idle bound claims that
// all gateways have stopped.
func TestTheLastTargetIsNamedAtTheIdleBound(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.observe("node-1")
	w.observe("node-2")
	w.open(p, "node-1", func(b *Barrier) { b.Last = true })
	w.pass(time.Second)
	w.see("node-1", p, Kept, false)
	w.see("node-2", p, Idle, true)
	w.wantBarrier(p, "Quiescing node-1:removed")
	w.pass(10 * time.Second)
	w.wantBarrier(p, "Released LastTarget node-1:removed")
	// It has heard of another endpoint since, and of connections that go on.
	w.see("node-1", p, Removed, false)
	w.wantBarrier(p, "Released IdleBound node-1:removed")
}

// A stated wait is only time: the agent on the pod's node makes it, and is told how long it is.
func TestAStatedWaitKeepsNoBarrier(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.observe("node-1")
	w.open(p, "node-1", func(b *Barrier) { b.Stated = 12 * time.Second })
	w.wantBarrier(p, "Unrouting node-1:unknown")
	w.pass(5 * time.Second)
	w.see("node-1", p, Idle, true)
	w.wantBarrier(p, "Released Acknowledged")
	if s := w.Status(w.now, AtBarrier, p.UID); s.Stated != 12*time.Second || s.Cut {
		t.Errorf("stated %s, cut %t", s.Stated, s.Cut)
	}
	// No agent to ask, and a wait that is longer than the bound.
	w = newWorld(t)
	w.open(p, "node-1", func(b *Barrier) { b.Stated = time.Minute })
	w.wantBarrier(p, "Released NoAgents")
	if s := w.Status(w.now, AtBarrier, p.UID); !s.Cut || s.Stated != time.Minute {
		t.Errorf("%+v", s)
	}
}

func TestTheBoundsOfTheBarrier(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.observe("node-1")
	w.observe("node-2")
	w.open(p, "node-1")
	w.pass(4 * time.Second)
	w.see("node-1", p, Idle, true)
	w.see("node-2", p, Removed, false)
	w.wantBarrier(p, "Quiescing node-2:removed")
	w.pass(10 * time.Second)
	w.wantBarrier(p, "Released IdleBound node-2:removed")
	w.see("node-2", p, Routing, false)
	// The same question again does not put the end back, a shorter one brings it forward.
	w.open(p, "node-1")
	w.pass(16*time.Second - 1)
	w.see("node-1", p, Idle, true)
	w.wantBarrier(p, "Unrouting node-2:unknown")
	w.pass(1)
	w.wantBarrier(p, "Released Deadline node-2:unknown")
	q := pod("b")
	w.open(q, "node-1")
	w.open(q, "node-1", func(b *Barrier) { b.Bound = 5 * time.Second })
	w.open(q, "node-1", func(b *Barrier) { b.Stated = time.Second })
	w.pass(5 * time.Second)
	w.wantBarrier(q, "Released Deadline node-1:unknown node-2:unknown")
	// It is forgotten in the end, also if the end of the pod is not reported.
	w.pass(11 * time.Minute)
	w.Tick(w.now)
	if all := w.all(AtBarrier); len(all) != 0 {
		t.Errorf("open are %v", all)
	}
}

// Rule 7, as for drains: a node whose agent is away is waited for while its pod is ready, else 5 s;
// and an agent that lets three barriers in a row expire is no longer waited for.
func TestWhoIsAwayAtTheBarrier(t *testing.T) {
	w := newWorld(t)
	node := func(id AgentID, ready bool) Expected {
		return Expected{ID: id, Name: string(id), Ready: ready, Label: LabelObserved}
	}
	w.observe("node-1")
	w.Expect(w.now, []Expected{node("node-1", true), node("node-2", true), node("node-3", false)})
	p := pod("a")
	w.open(p, "node-1")
	w.see("node-1", p, Idle, true)
	w.wantBarrier(p, "Unrouting node-2:unknown node-3:unknown")
	w.pass(5 * time.Second)
	w.wantBarrier(p, "Unrouting node-2:unknown")
	w.Expect(w.now, []Expected{node("node-1", true), node("node-2", false), node("node-3", false)})
	w.wantBarrier(p, "Released Acknowledged")
	// It is named all the same, until it is back or is not expected any more.
	away := func(want ...AgentID) {
		t.Helper()
		s := w.Status(w.now, AtBarrier, p.UID)
		var got []AgentID
		for _, a := range s.Away {
			got = append(got, a.Agent)
		}
		if !slices.Equal(got, want) {
			t.Errorf("away are %v, want %v", got, want)
		}
	}
	away("node-2", "node-3")
	w.Expect(w.now, []Expected{node("node-1", true), node("node-2", false)})
	away("node-2")
	starts := node("node-3", false)
	starts.Pending = true
	w.Expect(w.now, []Expected{node("node-1", true), node("node-2", false), starts})
	w.pass(5 * time.Second)
	w.see("node-1", p, Idle, true)
	away("node-2")
	zone := []Expected{node("node-1", true)}
	for i := range 50 {
		zone = append(zone, node(AgentID(fmt.Sprintf("zone-%02d", i)), false))
	}
	w.Expect(w.now, zone)
	w.pass(5 * time.Second)
	w.see("node-1", p, Idle, true)
	w.wantBarrier(p, "Released Acknowledged")
	if s := w.Status(w.now, AtBarrier, p.UID); len(s.Away) != 20 || s.MoreAway != 30 {
		t.Errorf("%d are named as away, and %d more", len(s.Away), s.MoreAway)
	}
	w.Expect(w.now, []Expected{node("node-1", true), node("node-2", true)})
	w.wantBarrier(p, "Unrouting node-2:unknown")
	if s := w.Status(w.now, AtBarrier, p.UID); len(s.Away) != 0 {
		t.Errorf("away are %v, of which one is waited for", s.Away)
	}

	w.observe("node-2")
	for i := range 3 {
		q := pod(fmt.Sprint("b", i))
		w.open(q, "node-1")
		for range 3 {
			w.see("node-1", q, Idle, true)
			w.pass(10 * time.Second)
		}
		w.see("node-1", q, Idle, true)
		w.wantBarrier(q, "Released Deadline node-2:unknown")
		w.pass(time.Second)
	}
	q := pod("c")
	w.open(q, "node-1")
	w.see("node-1", q, Idle, true)
	w.wantBarrier(q, "Unrouting node-2:unknown")
	w.pass(2 * time.Second)
	w.wantBarrier(q, "Released Acknowledged")
	if s := w.Status(w.now, AtBarrier, q.UID); len(s.Suspended) != 1 || s.Suspended[0].Agent != "node-2" {
		t.Errorf("suspended are %v", s.Suspended)
	}
	w.see("node-2", q, Removed, true)
	w.wantBarrier(q, "Quiescing node-2:removed")
}

func TestWhoIsAskedAtTheBarrier(t *testing.T) {
	many := func(w *world, n int) {
		for i := range n {
			w.observe(AgentID(fmt.Sprintf("node-%03d", i)))
		}
	}
	learn := func(w *world) {
		for i := range DefaultSampling().Learn {
			took := 300 * time.Millisecond
			if i%500 == 0 {
				took = 4 * time.Second
			}
			w.learnt.add(took)
		}
	}
	for name, c := range map[string]struct {
		scope Scope
		nodes int
		learn bool
		owed  int
		// stated is the least that is waited for the others.
		stated time.Duration
	}{
		"auto, 200 nodes":             {ScopeAuto, 200, true, 200, 0},
		"auto, 201 nodes":             {ScopeAuto, 201, true, 51, 4 * time.Second},
		"auto, nothing learnt yet":    {ScopeAuto, 201, false, 201, 0},
		"all, 300 nodes":              {ScopeAll, 300, true, 300, 0},
		"quorum, 100 nodes":           {ScopeQuorum, 100, true, 51, 4 * time.Second},
		"quorum, fewer than a sample": {ScopeQuorum, 50, true, 50, 0},
		"local":                       {ScopeLocal, 100, true, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.scope = c.scope
			many(w, c.nodes)
			if c.learn {
				learn(w)
			}
			// Whose pod it is, is asked in any case.
			by := AgentID("node-000")
			for i := range 20 {
				p := pod(fmt.Sprint("a", i))
				w.open(p, by)
				s := w.Status(w.now, AtBarrier, p.UID)
				if s.Owed != c.owed && !(c.owed == 51 && s.Owed == 50) {
					t.Fatalf("%d are asked, want %d", s.Owed, c.owed)
				}
				if s.Stated < c.stated || s.Stated > c.stated*12/10 {
					t.Fatalf("%s is waited for the others, want %s to a fifth more", s.Stated, c.stated)
				}
				if !slices.ContainsFunc(s.Waiting, func(x Waiting) bool { return x.Agent == by }) {
					t.Fatalf("%s is not asked", by)
				}
				if open, _, _ := w.hears("node-099", 0); c.scope == ScopeLocal && len(open) != 0 {
					t.Fatal("another is told")
				}
			}
		})
	}
}

// Without this, a rolling update of 10,000 pods on 5,000 nodes takes 30 MB of each coordinator for
// ten minutes after its last pod was deleted.
func TestAClosedDrainIsSmallWithManyNodes(t *testing.T) {
	const pods = 50
	kept := func(nodes int) int {
		w := newWorld(t)
		for i := range nodes {
			w.observe(AgentID(fmt.Sprintf("node-%04d", i)))
		}
		last := AgentID(fmt.Sprintf("node-%04d", nodes-1))
		heap := func() int {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return int(m.HeapAlloc)
		}
		var before int
		for i := range 2 * pods {
			if i == pods {
				before = heap() // buffers and lists have their sizes
			}
			p := pod(fmt.Sprint("a", i))
			w.ask(p, web)
			w.open(p, last)
			w.report(last, Report{UID: p.UID, State: Idle, Gate: AtBarrier, HasSent: true, Number: uint64(2*i + 2)})
			w.Status(w.now, AtBarrier, p.UID)
			if !w.GatePassed(w.now, AtBarrier, p.UID) {
				t.Fatal("the barrier is not open")
			}
		}
		w.pass(2 * w.times.Deadline)
		w.Tick(w.now)
		grown := heap() - before
		runtime.KeepAlive(w)
		return grown / pods
	}
	few, many := kept(64), kept(3200)
	t.Logf("a pod takes %d bytes with 64 nodes, %d with 3,200", few, many)
	if many > few+500 {
		t.Errorf("with 3,200 nodes a closed drain keeps %d bytes more than with 64, want at most 500", many-few)
	}
}

// Without this, a pod is stopped while a replica of an ingress controller routes to it, because
// enough nodes were asked.
func TestEveryReplicaOfAGatewayIsAsked(t *testing.T) {
	for _, scope := range []Scope{ScopeLocal, ScopeAuto, ScopeQuorum} {
		w := newWorld(t)
		w.scope = scope
		for i := range 300 {
			w.observe(AgentID(fmt.Sprintf("node-%03d", i)))
		}
		w.observe("traefik")
		w.observeAs("traefik", "traefik")
		for range w.sampling.Learn {
			w.learnt.add(300 * time.Millisecond)
		}
		p := pod("a")
		w.open(p, "node-000")
		for _, x := range w.Status(w.now, AtBarrier, p.UID).Waiting {
			if x.Agent != "traefik" {
				w.see(x.Agent, p, Idle, true)
			}
		}
		w.wantBarrier(p, "Unrouting traefik:unknown")
		w.pass(time.Second)
		learnt := w.learnt.n
		w.see("traefik", p, Idle, true)
		w.wantBarrier(p, "Released Acknowledged")
		if w.learnt.n != learnt {
			t.Errorf("%s: what the replica took is learnt of nodes", scope)
		}
		// One that has not declared yet may be such a replica.
		q := pod("b")
		w.sessions["new"] = w.Connect(w.now, "new", Hello{Observes: true})
		w.open(q, "node-000")
		if s := w.Status(w.now, AtBarrier, q.UID); !slices.ContainsFunc(s.Waiting, func(x Waiting) bool {
			return x.Agent == "new"
		}) {
			t.Errorf("%s: an agent that has not declared is not asked", scope)
		}
		w.observe("new")
		if s := w.Status(w.now, AtBarrier, q.UID); scope == ScopeLocal && len(s.Waiting) != 2 {
			t.Errorf("%s: a node is asked: %v", scope, s.Waiting)
		}
	}
}

// A replica of a gateway that is being deleted may route by the endpoints that it had: the ingress
// controller of APISIX does not configure it any more. Its agent is asked until it has ended.
func TestAReplicaThatIsTerminatingIsAsked(t *testing.T) {
	w := newWorld(t)
	listed := func(ready bool) Expected {
		return Expected{ID: "edge-1", Name: "edge-1", Ready: ready, Label: LabelObserved}
	}
	w.Expect(w.now, []Expected{listed(true)})
	w.observe("edge-1")
	w.observeAs("edge-1", "edge")
	w.pass(time.Minute)
	w.Expect(w.now, []Expected{listed(false)}) // its pod is terminating
	w.pass(20 * time.Second)
	p := pod("a")
	w.open(p, "")
	w.see("edge-1", p, Routing, true)
	w.wantBarrier(p, "Unrouting edge-1:routing")
	w.Expect(w.now, nil) // the pod is deleted, and the agent ends last
	w.pass(20 * time.Second)
	w.wantBarrier(p, "Unrouting edge-1:unknown") // it has not reported since then
	w.Disconnect(w.now, "edge-1", w.sessions["edge-1"])
	w.pass(5 * time.Second)
	w.wantBarrier(p, "Released AgentsLost")
}

// Without this, a cluster in which kube-proxy has become slow waits for as long as it took when it
// was quick.
func TestWhatIsLearntIsForgotten(t *testing.T) {
	var h durations
	for range 50_000 {
		h.add(100 * time.Millisecond)
	}
	for range 50_000 {
		h.add(3 * time.Second)
	}
	if got := h.percentile(0.5); got < 3*time.Second || got > 3600*time.Millisecond {
		t.Errorf("half take %s", got)
	}
	w := newWorld(t)
	w.observe("node-1")
	p := pod("a")
	w.open(p, "node-1")
	w.pass(2 * time.Second)
	for _, s := range []State{Removed, Idle} {
		w.report("node-1", Report{UID: p.UID, State: s, Gate: AtBarrier, HasSent: true})
	}
	if w.learnt.n != 1 || w.learnt.percentile(1) < 2*time.Second || w.learnt.percentile(1) > 2400*time.Millisecond {
		t.Errorf("learnt %d times, %s", w.learnt.n, w.learnt.percentile(1))
	}
}

// Nodes have no rules for pods without a Service. How fast they say so does not show how long a
// sync of kube-proxy takes.
func TestNothingIsLearntWithoutRules(t *testing.T) {
	w := newWorld(t)
	var nodes []AgentID
	for i := range w.sampling.AllUpTo + 1 {
		nodes = append(nodes, AgentID(fmt.Sprintf("node-%03d", i)))
		w.observe(nodes[i])
	}
	for i := range w.sampling.Learn/len(nodes) + 1 {
		p := pod(fmt.Sprint("worker", i))
		w.open(p, nodes[0], func(b *Barrier) { b.Services = nil })
		for _, id := range nodes {
			w.see(id, p, Idle, true)
		}
		w.wantBarrier(p, "Released Acknowledged")
	}
	p := pod("web")
	w.open(p, nodes[0])
	if asked := len(w.Status(w.now, AtBarrier, p.UID).Waiting); asked != len(nodes) {
		t.Errorf("%d of %d nodes are asked, with %d times learnt", asked, len(nodes), w.learnt.n)
	}
}

// A deletion that finds the drain of a restart open has all its time.
func TestADeletionDuringARestart(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p := pod("a")
	targets := []Targets{{Service: web, Usable: []UID{p.UID, "other"}}}
	w.Ask(w.now, p, targets, Place{Restart: true})
	w.pass(w.times.Deadline + time.Second)
	if is := w.Pod(p.UID); !is.Draining || !is.Since.IsZero() {
		t.Errorf("other replicas are told that a deletion began: %+v", is)
	}
	s := w.Ask(w.now, p, targets, Place{})
	if left := s.Deadline.Sub(w.now); s.Phase != Unrouting || left != w.times.Deadline {
		t.Errorf("%s %s, with %s left", s.Phase, s.Reason, left)
	}
}

// A pod with a container that restarts is excluded until it is ready again. No agent is suspended
// for that.
func TestRestarts(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p := pod("a")
	targets := []Targets{{Service: web, Usable: []UID{p.UID, "other"}}}
	for range 3 {
		w.Ask(w.now, p, targets, Place{Restart: true})
		w.want(p, "Unrouting edge:unknown")
		w.say("edge", p, Idle)
		w.want(p, "Released Acknowledged")
		w.pass(3 * time.Second)
		if w.ReadyAgain(w.now, p.UID, t0.Add(-time.Hour)) {
			t.Fatal("a pod that has been ready for long is back")
		}
		if !w.ReadyAgain(w.now, p.UID, w.now) || w.ReadyAgain(w.now, p.UID, w.now) {
			t.Fatal("a pod that is ready again is not back, or twice")
		}
		w.want(p, "Closed Abandoned")
		if _, _, got := w.hears("edge", 0); got != "release uid-a" {
			t.Fatalf("told %q", got)
		}
	}
	w.Ask(w.now, p, targets, Place{})
	if s := w.Status(w.now, AtHold, p.UID); !s.Since.Equal(w.now) || w.refused(p.UID) != 0 {
		t.Errorf("the restarts have used %s and count as %d refusals", w.now.Sub(s.Since), w.refused(p.UID))
	}
	// A deletion that meets a restart is a deletion.
	w.Ask(w.now, p, targets, Place{Restart: true})
	if w.ReadyAgain(w.now, p.UID, w.now.Add(time.Second)) {
		t.Error("a pod that is being deleted is back")
	}
}

// The clock of a node may differ from this replica's. Both times are of the node.
func TestRestartsByTheClockOfTheNode(t *testing.T) {
	for _, ahead := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		w := newWorld(t)
		w.join("edge", web)
		p, stopped := pod("a"), w.now.Add(ahead)
		w.Ask(w.now, p, []Targets{{Service: web, Usable: []UID{p.UID, "other"}}},
			Place{Restart: true, Stopped: stopped})
		w.pass(3 * time.Second)
		if w.ReadyAgain(w.now, p.UID, stopped.Add(-time.Second)) {
			t.Errorf("%s ahead: the pod is back before it is ready again", ahead)
		}
		if !w.ReadyAgain(w.now, p.UID, stopped.Add(time.Second)) {
			t.Errorf("%s ahead: the pod is ready again and not back", ahead)
		}
	}
}

// A container stops a second time before this replica learns that the pod was ready in between.
func TestAContainerThatStopsTwice(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p, stopped := pod("a"), w.now
	for _, at := range []time.Duration{0, 5 * time.Second, 0} {
		w.Ask(w.now, p, []Targets{{Service: web, Usable: []UID{p.UID, "other"}}},
			Place{Restart: true, Stopped: stopped.Add(at)})
	}
	if w.ReadyAgain(w.now, p.UID, stopped.Add(3*time.Second)) {
		t.Error("a pod that was ready before its second stop is back")
	}
	if !w.ReadyAgain(w.now, p.UID, stopped.Add(6*time.Second)) {
		t.Error("the pod is ready again and not back")
	}
}

func TestStatedWaitsAreRead(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"25s": 25 * time.Second, " 1m ": time.Minute, "0s": 0,
		"checkInterval=10s,unhealthyThreshold=3,timeout=5s": 35 * time.Second,
		"timeout=5s, checkInterval=10s":                     15 * time.Second,
		"checkInterval=2s,unhealthyThreshold=2":             4 * time.Second,
		"":                                                  -1, "soon": -1, "-1s": -1, "timeout=5s": -1,
		"checkInterval=10s,checkInterval=10s": -1, "checkInterval=10s,unhealthyThreshold=0": -1,
		"interval=10s": -1, "checkInterval=10": -1, "checkInterval=-10s": -1,
		"checkInterval=1h,unhealthyThreshold=9999999": -1,
		"checkInterval=1h,timeout=2562047h":           -1,
	} {
		got, err := ParseStatedWait(text)
		if (err != nil) != (want < 0) || err == nil && (got != StatedWait{Wait: want}) {
			t.Errorf("%q: %s, %v", text, got, err)
		}
	}
	for text, want := range map[string]StatedWait{
		"at most 120s": {2 * time.Minute, 40 * time.Second},
		" at most checkInterval=10s,unhealthyThreshold=3,timeout=5s": {35 * time.Second, 15 * time.Second},
		"at most checkInterval=2s,unhealthyThreshold=20":             {40 * time.Second, 10 * time.Second},
		"at most 2m, checkInterval=1m":                               {2 * time.Minute, 65 * time.Second},
	} {
		if got, err := ParseStatedWait(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"at most", "at most ", "at most soon", "at most -1s", "at most 2m,",
		"at most 2m,soon",
		"at most 2m,timeout=5s", "at least 2m", "2m,checkInterval=10s", "checkInterval=10s,2m"} {
		if got, err := ParseStatedWait(text); err == nil || got != (StatedWait{}) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

// Clients that may annotate a Service state its wait. Any text is refused, or is a wait; a negative
// wait would not be waited for.
func FuzzParseStatedWait(f *testing.F) {
	for _, text := range []string{"30s", "-1s", "checkInterval=10s,unhealthyThreshold=3,timeout=5s",
		"checkInterval=1h,unhealthyThreshold=1000", "=", "timeout=1s,timeout=1s", "at most 1m,checkInterval=9s",
		"checkInterval=1h,timeout=2562047h"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		switch wait, err := ParseStatedWait(text); {
		case err == nil && (wait.Wait < 0 || wait.Quiet != 0 && wait.Quiet < leastQuiet):
			t.Fatalf("%q is %s", text, wait)
		case err != nil && (wait != StatedWait{} || !strings.HasPrefix(err.Error(), "stated wait ")):
			t.Fatalf("%q: %s, %v", text, wait, err)
		}
	})
}

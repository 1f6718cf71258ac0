package drain

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// expireOne opens a drain and lets its time pass; the agents in good acknowledge at once.
func (w *world) expireOne(p Pod, good ...AgentID) {
	w.Helper()
	w.ask(p, web)
	for _, id := range good {
		w.say(id, p, Idle)
	}
	for range 30 {
		w.pass(time.Second)
		w.Tick(w.now)
		for _, id := range good {
			w.say(id, p, Idle)
		}
	}
	w.GatePassed(w.now, AtHold, p.UID)
}

// suspensions lists what Suspensions tells, as "-agent" for a suspension, "+agent" for its end.
func (w *world) suspensions() []string {
	var all []string
	for _, s := range w.Suspensions() {
		sign := "-"
		if s.Over {
			sign = "+"
		}
		all = append(all, sign+string(s.Agent))
	}
	return all
}

func (w *world) wantSuspensions(want ...string) {
	w.Helper()
	if got := w.suspensions(); !slices.Equal(got, want) {
		w.Fatalf("at %s: suspensions %q, want %q", w.now.Sub(t0), got, want)
	}
}

func TestAnAgentThatLetsThreeDrainsExpireIsSuspended(t *testing.T) {
	w := newWorld(t)
	w.join("bad", web)
	w.join("good", web)
	w.expireOne(pod("a"), "good")
	w.expireOne(pod("b"), "good")
	w.wantSuspensions()
	c := pod("c")
	w.ask(c, web)
	later := pod("later")
	w.pass(29 * time.Second)
	w.ask(later, web)
	w.say("good", later, Idle)
	w.want(later, "Unrouting bad:unknown")
	w.say("good", c, Idle)
	w.Changed(AtHold)
	w.pass(time.Second)
	// The drain that suspends it names it, also when it is asked about again.
	w.want(c, "Released Deadline bad:unknown")
	w.want(c, "Released Deadline bad:unknown")
	w.wantSuspensions("-bad")
	// A drain that waited for it is released, and its callers are woken.
	w.want(later, "Released Acknowledged")
	if got := w.Changed(AtHold); !slices.Contains(got, later.UID) {
		t.Errorf("touched %v", got)
	}
	s := w.Status(w.now, AtHold, later.UID)
	if s.Owed != 1 || len(s.Suspended) != 1 || s.Suspended[0].Agent != "bad" {
		t.Errorf("owed %d, suspended %v", s.Owed, s.Suspended)
	}
	// It is told of what comes.
	d := pod("d")
	w.ask(d, web)
	w.want(d, "Unrouting bad:unknown good:unknown")
	if open, _, _, _ := w.ChangesFor("bad", 0); len(open) != 3 {
		t.Errorf("told of %v", open)
	}
	// Who waits is woken by the last of those that are waited for.
	g := pod("g")
	w.ask(g, web)
	w.want(g, "Unrouting good:unknown")
	w.Changed(AtHold)
	w.say("good", g, Idle)
	if got := w.Changed(AtHold); !slices.Contains(got, g.UID) {
		t.Errorf("touched %v", got)
	}
	w.GatePassed(w.now, AtHold, g.UID)
	w.pass(2 * time.Second)
	w.want(d, "Unrouting good:unknown")
	// It acknowledges one in time, and is owed again.
	w.pass(3 * time.Second)
	w.say("bad", d, Removed)
	w.wantSuspensions("+bad")
	w.want(d, "Unrouting bad:removed good:unknown")
	if w.Counts().Suspended != 0 {
		t.Error("still counted")
	}
	// It takes three again.
	w.GatePassed(w.now, AtHold, d.UID)
	w.expireOne(pod("e"), "good")
	w.expireOne(pod("f"), "good")
	w.wantSuspensions()
}

func TestWhatIsAStrike(t *testing.T) {
	others := func(w *world, n int, do func(p Pod)) {
		for i := range n {
			p := pod(fmt.Sprint("x", i))
			w.ask(p, web)
			do(p)
			for range 30 {
				w.pass(time.Second)
				w.Tick(w.now)
			}
			w.GatePassed(w.now, AtHold, p.UID)
		}
	}
	says := func(state State) func(w *world) {
		return func(w *world) {
			for i := range 4 {
				p := pod(fmt.Sprint("x", i))
				w.ask(p, web)
				for range 30 {
					w.say("one", p, state)
					w.pass(time.Second)
					w.Tick(w.now)
				}
				w.GatePassed(w.now, AtHold, p.UID)
			}
		}
	}
	for name, c := range map[string]struct {
		do   func(w *world)
		want []string
	}{
		"silence":                  {func(w *world) { others(w, 3, func(Pod) {}) }, []string{"-one"}},
		"its gateway routes on":    {says(Routing), []string{"-one"}},
		"it cannot tell":           {says(StateUnknown), []string{"-one"}},
		"it keeps the last target": {says(Kept), nil},
		"requests run on":          {says(Removed), nil},
		"another agent was late": {func(w *world) { w.join("late", web); says(Idle)(w) },
			[]string{"-late"}},
		"requests run on, and another is silent": {func(w *world) { w.join("other", web); says(Removed)(w) },
			[]string{"-other"}},
		"an acknowledgement between": {func(w *world) {
			others(w, 2, func(Pod) {})
			others(w, 1, func(p Pod) { w.say("one", p, Idle) })
			others(w, 2, func(Pod) {})
		}, nil},
		// Each takes the whole deadline, and yet it is one failure.
		"a hundred at one moment": {func(w *world) {
			for i := range 100 {
				w.ask(pod(fmt.Sprint(i)), web)
			}
			w.pass(30 * time.Second)
			w.Tick(w.now)
		}, nil},
		"a drain each second, for 89 s": {func(w *world) {
			for i := range 89 {
				w.ask(pod(fmt.Sprint(i)), web)
				w.pass(time.Second)
				w.Tick(w.now)
			}
		}, nil},
		"a drain each second, for 91 s": {func(w *world) {
			for i := range 91 {
				w.ask(pod(fmt.Sprint(i)), web)
				w.pass(time.Second)
				w.Tick(w.now)
			}
		}, []string{"-one"}},
		"what is left of an abandoned drain": {func(w *world) {
			p := pod("a")
			for range 5 {
				w.ask(p, web)
				answered := w.Hold(p.UID)
				w.pass(28 * time.Second)
				answered(w.now, false)
				w.pass(45 * time.Second)
				w.Tick(w.now)
				if !w.NotTerminating(w.now, p.UID) {
					w.Fatal("not abandoned")
				}
			}
		}, nil},
		"new sessions reset nothing": {func(w *world) {
			for i := range 3 {
				w.expireOne(pod(fmt.Sprint(i)))
				w.join("one", web)
			}
		}, []string{"-one"}},
		"a late acknowledgement": {func(w *world) {
			for i := range 3 {
				p := pod(fmt.Sprint(i))
				w.ask(p, web)
				w.pass(30 * time.Second)
				w.say("one", p, Idle) // before anybody looks
				w.GatePassed(w.now, AtHold, p.UID)
			}
		}, []string{"-one"}},
		"the pod goes at the deadline, before anybody looks": {func(w *world) {
			for i := range 3 {
				p := pod(fmt.Sprint(i))
				w.ask(p, web)
				w.pass(30 * time.Second)
				w.GatePassed(w.now, AtHold, p.UID)
			}
		}, []string{"-one"}},
		"without a stream, most have one": {func(w *world) {
			w.join("two", web)
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}, {ID: "two", Ready: true}})
			w.Disconnect(w.now, "one", w.sessions["one"])
			for i := range 3 {
				w.expireOne(pod(fmt.Sprint(i)), "two")
			}
		}, []string{"-one"}},
		// Then it is this replica that hears nothing.
		"without a stream, and so are most": {func(w *world) {
			w.join("two", web)
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}, {ID: "two", Ready: true},
				{ID: "three", Ready: true, Label: LabelObserved}})
			w.Disconnect(w.now, "one", w.sessions["one"])
			for i := range 5 {
				w.expireOne(pod(fmt.Sprint(i)), "two")
			}
			w.join("one", web) // what it could not hear does not count now either
			w.expireOne(pod("back"), "two")
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", web)
			c.do(w)
			w.wantSuspensions(c.want...)
		})
	}
}

// A failure of all must be seen: deletions go on, and say why.
func TestWhereAllAreSuspendedTheReasonSaysSo(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	w.join("two", web)
	for i := range 3 {
		w.expireOne(pod(fmt.Sprint(i)))
	}
	w.wantSuspensions("-one", "-two")
	p := pod("p")
	w.ask(p, web)
	w.want(p, "Unrouting one:unknown two:unknown")
	w.pass(2 * time.Second)
	s := w.Status(w.now, AtHold, p.UID)
	if line(s) != "Released Suspended" || !s.Reason.Abnormal() || s.Owed != 0 || len(s.Suspended) != 2 {
		t.Fatalf("%s, owed %d, suspended %v", line(s), s.Owed, s.Suspended)
	}
	// They get another chance, and one more strike ends it.
	w.GatePassed(w.now, AtHold, p.UID)
	w.pass(10*time.Minute - 3*time.Second)
	w.Tick(w.now)
	w.wantSuspensions()
	w.pass(time.Second)
	w.Tick(w.now)
	w.wantSuspensions("+one", "+two")
	w.expireOne(pod("q"), "two")
	w.wantSuspensions("-one")
	// An agent that is no longer there is no longer counted.
	w.Disconnect(w.now, "one", w.sessions["one"])
	w.pass(20 * time.Second)
	w.Tick(w.now)
	if w.Counts().Suspended != 0 {
		t.Error("an agent that is gone is suspended")
	}
}

// A gateway was away for three deadlines and answers again, 50 ms after it is told. Pods are seen
// terminating 10 ms after the allow. Without a drain that waits for the agent, each of its answers
// comes to a drain that is closed.
func TestASuspendedAgentThatAnswersIsWaitedForAgain(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	for i := range StrikesOut {
		w.expireOne(pod(fmt.Sprint("before", i)))
	}
	w.wantSuspensions("-one")
	for i := range 5 {
		p := pod(fmt.Sprint("after", i))
		w.ask(p, web)
		w.pass(50 * time.Millisecond)
		if !w.Status(w.now, AtHold, p.UID).Waits() {
			w.GatePassed(w.now, AtHold, p.UID)
		}
		w.say("one", p, Idle)
		w.pass(time.Second)
		w.Tick(w.now)
		w.GatePassed(w.now, AtHold, p.UID)
	}
	w.wantSuspensions("+one")
}

// Deletions come every 100 ms, beside an agent that is suspended and stays silent.
func TestASilentSuspendedAgentCostsOneHoldInFiveSeconds(t *testing.T) {
	for name, c := range map[string]struct {
		before    func(w *world)
		wantTried int
	}{
		"connected": {func(*world) {}, 12},
		// It cannot answer.
		"without a stream": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.Disconnect(w.now, "one", w.sessions["one"])
			w.join("two")
			w.join("three")
		}, 0},
	} {
		w := newWorld(t)
		w.join("one", web)
		for i := range StrikesOut {
			w.expireOne(pod(fmt.Sprint("before", i)))
		}
		c.before(w)
		tried := 0
		for i := range 600 {
			p := pod(fmt.Sprint("after", i))
			s := w.ask(p, web)
			if s.Waits() {
				tried++
				// The call that waits is answered within its hold.
				if took := s.Recheck.Sub(w.now); took <= 0 || took >= w.times.Hold {
					t.Errorf("%s: a drain waits for %s", name, took)
				}
				w.pass(s.Recheck.Sub(w.now))
			}
			w.want(p, "Released Suspended")
			w.GatePassed(w.now, AtHold, p.UID)
			w.now = t0.Add(w.now.Sub(t0).Truncate(100 * time.Millisecond))
			w.pass(100 * time.Millisecond)
			if w.now.Sub(t0) >= 150*time.Second {
				break
			}
		}
		if tried != c.wantTried {
			t.Errorf("%s: %d drains waited for it within a minute, want %d", name, tried, c.wantTried)
		}
	}
}

// A drain that is short must not end by its deadline, which would be a strike, while it waits for
// an agent that is suspended.
func TestAShortBarrierGivesASuspendedAgentNoStrike(t *testing.T) {
	w := newWorld(t)
	w.observe("node-1")
	for i := range StrikesOut {
		p := pod(fmt.Sprint("before", i))
		w.open(p, "node-1", func(*Barrier) {})
		w.pass(30 * time.Second)
		w.Tick(w.now)
		w.GatePassed(w.now, AtBarrier, p.UID)
	}
	w.wantSuspensions("-node-1")
	p := pod("short")
	w.open(p, "node-1", func(b *Barrier) { b.Bound = time.Second })
	w.wantBarrier(p, "Unrouting node-1:unknown")
	w.pass(time.Second)
	w.wantBarrier(p, "Released Deadline node-1:unknown")
	w.wantSuspensions()
	if w.Counts().Suspended != 1 {
		t.Errorf("%d agents are suspended, want 1", w.Counts().Suspended)
	}
}

// Two replicas are asked about every deletion, and one denial denies. If one of them waits for an
// agent that the other has suspended, the deletion waits. So a replica believes the other even
// while it may be cut off itself.
func TestReplicasAgreeOnWhoIsSuspended(t *testing.T) {
	for name, c := range map[string]struct {
		// there is what happens at the other replica while three drains expire here.
		there func(w *world)
		// expire is how many expire.
		expire int
		want   []string
	}{
		"the other one has just started": {func(*world) {}, 3, []string{"-one"}},
		"two strikes are not enough":     {func(*world) {}, 2, nil},
		"its stream broke, as most did": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}, {ID: "two", Ready: true}, {ID: "three", Ready: true}})
			w.Disconnect(w.now, "one", w.sessions["one"])
		}, 3, []string{"-one"}},
		"it has acknowledged a drain there": {func(w *world) {
			w.ask(pod("there"), web)
			w.say("one", pod("there"), Idle)
		}, 3, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w, other := newWorld(t), newWorld(t)
			w.join("one", web)
			other.join("one", web)
			for i := range c.expire {
				w.expireOne(pod(fmt.Sprint("before", i)))
				if other.now = w.now; i == 0 {
					c.there(other)
				}
			}
			other.believe(other.now, w.silences(w.now))
			other.wantSuspensions(c.want...)
			if c.want == nil {
				return
			}
			// What one replica has from the other is not news to that.
			w.suspensions()
			w.believe(w.now, other.silences(other.now))
			// It acknowledges a drain here, and the other replica has not heard of that yet.
			p := pod("after")
			other.join("one", web)
			other.ask(p, web)
			other.say("one", p, Removed)
			other.believe(other.now, w.silences(w.now))
			other.wantSuspensions("+one")
			w.wantSuspensions()
		})
	}
}

// The drains of both replicas expire at the same moment: that is one strike, whichever counts it
// first. Nor does the chance that an agent gets after the memory bound end because the other
// replica gives it a second later.
func TestReplicasCountAStrikeOnce(t *testing.T) {
	w, other := newWorld(t), newWorld(t)
	exchange := func() {
		other.now = w.now
		w.Tick(w.now)
		other.believe(other.now, w.silences(w.now))
		other.Tick(other.now)
		w.believe(w.now, other.silences(other.now))
	}
	w.join("one", web)
	other.join("one", web)
	expire := func(name string) {
		p := pod(name)
		w.ask(p, web)
		other.ask(p, web)
		for range 30 {
			w.pass(time.Second)
			exchange()
		}
		w.GatePassed(w.now, AtHold, p.UID)
		other.GatePassed(other.now, AtHold, p.UID)
	}
	expire("a")
	expire("b")
	w.wantSuspensions()
	other.wantSuspensions()
	expire("c")
	w.wantSuspensions("-one")
	other.wantSuspensions("-one")
	w.pass(10 * time.Minute)
	w.Tick(w.now)
	exchange()
	w.pass(time.Second)
	exchange()
	w.wantSuspensions("+one")
	other.wantSuspensions("+one")
	expire("d")
	w.wantSuspensions("-one")
	other.wantSuspensions("-one")
}

// Three drains that had waited for room until shortly before their deadlines say nothing of an
// agent that takes two seconds to answer.
func TestAnAgentIsNotSuspendedForDrainsItWasToldOfLate(t *testing.T) {
	for _, late := range []struct {
		by   time.Duration
		want []string
	}{{28 * time.Second, nil}, {10 * time.Second, []string{"-slow"}}} {
		w := newWorld(t)
		w.join("slow", web)
		for n := range StrikesOut {
			first, second := pod(fmt.Sprint("first", n)), pod(fmt.Sprint("second", n))
			both := []Targets{usable(web, first.Name, second.Name, fmt.Sprint("third", n))}
			w.Ask(w.now, first, both, Place{})
			w.Ask(w.now, second, both, Place{})
			w.want(second, "Queued slow:unknown")
			w.pass(late.by)
			w.GatePassed(w.now, AtHold, first.UID)
			w.want(second, "Unrouting slow:unknown")
			w.pass(30*time.Second - late.by)
			w.want(second, "Released Deadline slow:unknown")
			w.GatePassed(w.now, AtHold, second.UID)
		}
		w.wantSuspensions(late.want...)
	}
}

// A pod was deleted with a short grace period just after it became ready: agents that have
// acknowledged are not believed in time, which is not their fault. Without this, three such pods
// suspend every node agent, and no barrier waits for an agent any more.
func TestWhoIsNotBelievedOfAYoungPodIsNotToBlame(t *testing.T) {
	w := newWorld(t)
	w.observe("node-1")
	w.observe("node-2")
	learnt := w.learnt.n
	for _, name := range []string{"a", "b", "c", "d"} {
		p := pod(name)
		w.open(p, "node-1", func(b *Barrier) { b.Young, b.Bound = 40*time.Second, 30*time.Second })
		w.pass(20 * time.Second)
		w.see("node-1", p, Idle, true)
		w.see("node-2", p, Removed, false)
		w.pass(10 * time.Second)
		w.Tick(w.now)
		w.wantBarrier(p, "Released Deadline node-1:unknown node-2:unknown")
		w.GatePassed(w.now, AtBarrier, p.UID)
	}
	w.wantSuspensions()
	if got := w.learnt.n - learnt; got != 0 {
		t.Errorf("%d times were learnt of nodes that were not seen to send", got)
	}
	// Who says nothing is.
	for _, name := range []string{"e", "f", "g"} {
		p := pod(name)
		w.open(p, "node-1", func(b *Barrier) { b.Young, b.Bound = 40*time.Second, 30*time.Second })
		w.pass(20 * time.Second)
		w.see("node-1", p, Idle, true)
		w.pass(10 * time.Second)
		w.Tick(w.now)
		w.GatePassed(w.now, AtBarrier, p.UID)
	}
	w.wantSuspensions("-node-2")
}

// Traefik keeps a pod of a sticky Service until its endpoint is gone, which is when the hook has
// ended. Its agent says so, and must still be waited for by the pods of other Services.
func TestAGatewayThatTrulyRoutesOnIsNotSuspended(t *testing.T) {
	w := newWorld(t)
	w.observe("node-1")
	w.sessions["traefik"] = w.Connect(w.now, "traefik", Hello{Observes: true})
	w.observeAs("traefik", "edge/traefik")
	for i := range 4 {
		p := pod(fmt.Sprint("sticky-", i))
		w.open(p, "node-1")
		for range 30 {
			w.see("node-1", p, Idle, true)
			w.see("traefik", p, Routing, false)
			w.pass(time.Second)
			w.Tick(w.now)
		}
		w.wantBarrier(p, "Released Deadline traefik:routing")
		w.GatePassed(w.now, AtBarrier, p.UID)
	}
	w.wantSuspensions()
	// Silence, and not to know, are not answers.
	for i := range 3 {
		p := pod(fmt.Sprint("silent-", i))
		w.open(p, "node-1")
		w.see("traefik", p, Routing, false)
		for range 30 {
			w.see("node-1", p, Idle, true)
			w.pass(time.Second)
			w.Tick(w.now)
		}
		w.GatePassed(w.now, AtBarrier, p.UID)
	}
	w.wantSuspensions("-traefik")
}

// The first agents of a cluster have a wrong CA bundle, or a NetworkPolicy keeps them from the
// coordinator: their pods are ready, and they never connect. They have not declared, so they may
// route everything, and every deletion in the cluster waits for them.
func TestAgentsThatNeverConnectAreSuspended(t *testing.T) {
	for _, agents := range []int{1, 2} {
		w := newWorld(t)
		var all []Expected
		for i := range agents {
			all = append(all, Expected{ID: AgentID(fmt.Sprint("a", i)), Name: fmt.Sprint("edge/a", i), Ready: true,
				Label: LabelDirected})
		}
		w.Expect(w.now, all)
		slow := 0
		for i := range 100 {
			p := pod(fmt.Sprint("p", i))
			w.ask(p, Service{"another", "service"})
			if !w.Status(w.now, AtHold, p.UID).Waits() {
				break
			}
			slow++
			for range 30 {
				w.pass(time.Second)
				w.Tick(w.now)
			}
			w.GatePassed(w.now, AtHold, p.UID)
			w.pass(time.Second)
		}
		t.Logf("%d agents that never connected: of 100 deletions, one after the other, %d took 30 s; suspended: %d",
			agents, slow, w.Counts().Suspended)
		if slow > 3 {
			t.Error("they delay every deletion")
		}
	}
}

// The network between coordinators and agents breaks, and one replica is replaced meanwhile. The
// new one has met none of them, and counts. What it tells must not convince the other one, which
// knows that it may be cut off: once the network is whole again deletions wait for these agents.
func TestAReplicaThatMetNobodyConvincesNoOther(t *testing.T) {
	agents := []AgentID{"one", "two", "three"}
	old, fresh := newWorld(t), newWorld(t)
	var all []Expected
	for _, id := range agents {
		old.join(id, web)
		all = append(all, Expected{ID: id, Ready: true})
	}
	old.Expect(old.now, all)
	fresh.Expect(fresh.now, all)
	for _, id := range agents {
		old.Disconnect(old.now, id, old.sessions[id])
	}
	for i := range StrikesOut {
		old.expireOne(pod(fmt.Sprint(i)))
		fresh.expireOne(pod(fmt.Sprint(i)))
		old.believe(old.now, fresh.silences(fresh.now))
	}
	old.wantSuspensions()
	fresh.wantSuspensions("-one", "-three", "-two")
}

// Where the operator has made barriers short, three of them suspend a node that does not answer.
func TestShortBarriersAreStrikesWhereAllAreShort(t *testing.T) {
	w := newWorld(t)
	w.Ledger = NewLedger(w.times, ScopeAuto, Sampling{AllUpTo: 200, Size: 50, Learn: 1000, Bound: 4 * time.Second})
	w.observe("node-1")
	for i := range StrikesOut {
		p := pod(fmt.Sprint("short-", i))
		w.open(p, "node-1", func(b *Barrier) { b.Bound = 4 * time.Second })
		w.pass(4 * time.Second)
		w.Tick(w.now)
	}
	if n := w.Counts().Suspended; n != 1 {
		t.Errorf("%d suspended, want 1", n)
	}
}

// The owner of a pod chooses how long its barrier lasts. One who chooses less than a sync of
// kube-proxy does not suspend the nodes for the pods of others.
func TestShortBarriersAreNoStrikes(t *testing.T) {
	w := newWorld(t)
	w.observe("node-1")
	for i := range StrikesOut + 1 {
		p := pod(fmt.Sprint("short-", i))
		w.open(p, "node-1", func(b *Barrier) { b.Bound = time.Second })
		w.report("node-1", Report{UID: p.UID, State: Routing, Gate: AtBarrier, HasSent: true})
		w.pass(time.Second)
		w.Tick(w.now)
		w.pass(time.Second)
	}
	if n := w.Counts().Suspended; n > 0 {
		t.Errorf("%d suspended", n)
	}
	p := pod("victim")
	w.open(p, "node-1")
	if s := w.Status(w.now, AtBarrier, p.UID); !s.Waits() {
		t.Errorf("the pod of another owner does not wait: %s", line(s))
	}
}

// What all barriers wait for is not decided by one agent that reports again and again, nor by the
// owner of one pod, who chooses how long its barrier lasts.
func TestWhatIsLearnedOfOneDrain(t *testing.T) {
	for name, c := range map[string]struct {
		usual, bound, after time.Duration
		want                int
		most                time.Duration
	}{
		"as usual":            {0, 30 * time.Second, time.Second, 1, 1200 * time.Millisecond},
		"too short":           {0, time.Second, 900 * time.Millisecond, 0, 0},
		"longer":              {0, 5 * time.Minute, 2 * time.Minute, 1, 36 * time.Second},
		"until it ends":       {0, 5 * time.Minute, 5 * time.Minute, 1, 36 * time.Second},
		"short ones as usual": {4 * time.Second, 4 * time.Second, time.Second, 1, 1200 * time.Millisecond},
		"longer than short":   {4 * time.Second, 30 * time.Second, 20 * time.Second, 1, 4800 * time.Millisecond},
	} {
		w := newWorld(t)
		w.Ledger = NewLedger(w.times, ScopeAuto, Sampling{AllUpTo: 200, Size: 50, Learn: 1000, Bound: c.usual})
		w.observe("node-1")
		p := pod("a")
		w.open(p, "node-1", func(b *Barrier) { b.Bound = c.bound })
		w.report("node-1", Report{UID: p.UID, State: Routing, Gate: AtBarrier, HasSent: true})
		for end := w.now.Add(c.after); w.now.Before(end); {
			w.pass(min(10*time.Second, end.Sub(w.now))) // an agent repeats what it has reported
			w.report("node-1", Report{UID: p.UID, State: Routing, Gate: AtBarrier, HasSent: true})
		}
		w.Tick(w.now)
		for i := range 4 {
			if i == 2 {
				w.observe("node-1") // with another session
			}
			for _, s := range []State{Removed, Routing} {
				w.report("node-1", Report{UID: p.UID, State: s, Gate: AtBarrier, HasSent: true})
			}
		}
		if got := w.learnt.percentile(1); w.learnt.n != c.want || c.want > 0 && got > c.most {
			t.Errorf("%s: learned %d times, at most %s, want %d, %s", name, w.learnt.n, got, c.want, c.most)
		}
	}
}

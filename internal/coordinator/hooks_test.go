package coordinator

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// barrierWaits holds a call whose pod waits for Idle at its barrier.
func (r *replica) barrierWaits(p drain.Pod) <-chan answer {
	answers := make(chan answer, 1)
	began := time.Now()
	request := requestOf(p, web)
	request.BarrierWaits, request.Workload = true, "web"
	go func() {
		var a answer
		a.Status, a.held, a.err = r.Drain(context.Background(), request, began.Add(2*time.Second))
		a.took = time.Since(began)
		answers <- a
	}()
	synctest.Wait()
	return answers
}

// Two callers delete one pod, of which one leaves it less time. Each call is answered by its own
// facts: what is enough for one does not let the other go.
func TestACallIsReleasedAtRemovedByItsOwnFacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("one", "1")
		gateway := n.agent("gateway", []drain.Service{web}, "one")
		synctest.Wait()
		p := pod("a")
		idle := r.hold(p, web)
		removed := r.barrierWaits(p)
		time.Sleep(50 * time.Millisecond) // in a bubble
		stillHeld(t, removed)
		gateway.say(p, drain.Removed)
		answered(t, removed, "Released BarrierWaits held=true after 50ms")
		stillHeld(t, idle)
		// The same caller again, whose barrier will not wait any more.
		again := r.hold(p, web)
		stillHeld(t, again)
		// And one more for which it will.
		answered(t, r.barrierWaits(p), "Released BarrierWaits held=false after 0s")
		gateway.say(p, drain.Routing)
		worse := r.barrierWaits(p)
		stillHeld(t, worse)
		gateway.say(p, drain.Idle)
		answered(t, worse, "Released Acknowledged held=true after 0s")
		answered(t, idle, "Released Acknowledged held=true after 50ms")
		answered(t, again, "Released Acknowledged held=true after 0s")

		b := pod("b")
		left := r.barrierWaits(b)
		gateway.say(b, drain.Removed)
		answered(t, left, "Released BarrierWaits held=true after 0s")
		r.GatePassed(b.UID)
		if o := r.View(1, 1).Outcomes[0]; o.Pod != "b" || o.Reason != "BarrierWaits" {
			t.Errorf("the page shows that %s went by %s", o.Pod, o.Reason)
		}
	})
}

// What is known of hooks: by the list of agents, by their streams, by what hooks have asked here or
// elsewhere.
func TestHooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		near := newNearby()
		near.Workload = "web"
		r := n.replica("one", "1", with(near), func(o *Options) { o.MaxBarriers = 16 })
		known := func() Hooks {
			synctest.Wait()
			return r.Hooks("node-1", "web")
		}
		want := func(want Hooks) {
			t.Helper()
			want.IdleBound = 10 * time.Second
			if got := known(); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		}
		want(Hooks{})
		r.Expect([]drain.Expected{
			{ID: "node", Name: "edge/node", Ready: true, Label: drain.LabelObserved, Node: "node-1"},
			{ID: "edge", Name: "edge/edge", Ready: true, Label: drain.LabelDirected, Node: "node-1"}})
		n.agent("edge", []drain.Service{web}, "one")
		want(Hooks{})
		node := n.nodeAgent("node", "one")
		want(Hooks{Connected: true})
		node.hook(pod("a"))
		want(Hooks{Connected: true, Allowed: true, Heard: true})
		if got := r.Hooks("node-1", "other"); got.Heard {
			t.Errorf("another workload: %+v", got)
		}
		node.hook(pod("b")) // 2 of the 4 places that one agent has
		want(Hooks{Connected: true, Allowed: true, Heard: true, Crowded: true})
		if got := r.Hooks("node-2", "web"); got.Connected || got.Crowded {
			t.Errorf("another node: %+v", got)
		}
		node.end()
		want(Hooks{Heard: true})
		other := NewCore(time.Now(), drain.Holder{}, drain.DefaultTimes(), &Options{})
		other.Polled(time.Now(), []wire.Replica{r.core.Replica(time.Now(), true)}, false)
		if !other.Hooks(time.Now(), "", "web").Heard {
			t.Error("another replica does not hear of it")
		}
	})
}

// A workload is not remembered forever, and those without a controller not at all.
func TestTheMemoryOfHooksIsBounded(t *testing.T) {
	c := NewCore(time.Now(), drain.Holder{}, drain.DefaultTimes(), &Options{})
	for i := range 3 * maxWorkloads {
		c.hooks.hear("", string(rune(i+1)))
	}
	if n := len(c.hooks.heard); n > maxWorkloads {
		t.Errorf("%d workloads", n)
	}
	if c.hooks.hear("", ""); c.Hooks(time.Now(), "", "").Heard {
		t.Error("a pod without a controller")
	}
}

// The agent dies between hold and hook: no hook asks. That is counted once, by the opener, and the
// next deletion of the workload waits for Idle. A deletion that was not carried out, or whose hook
// has asked another replica, is not counted.
func TestADeletionThatPassesTheBarrierByIsCounted(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		turn   Turn
		then   func(c *Core, p drain.Pod)
		missed int
	}{
		"no hook asks":               {TurnJudged, func(c *Core, p drain.Pod) { c.GatePassed(now, p.UID) }, 1},
		"the pod is deleted at once": {TurnJudged, func(c *Core, p drain.Pod) { c.Deleted(now, p.UID) }, 1},
		"a witness":                  {TurnHeld, func(c *Core, p drain.Pod) { c.GatePassed(now, p.UID) }, 0},
		"it is not deleted":          {TurnJudged, func(*Core, drain.Pod) {}, 0},
		"its hook asks here": {TurnJudged, func(c *Core, p drain.Pod) {
			c.GatePassed(now, p.UID)
			bar, err := c.Bar(now, Identity{Agent: "node"}, wire.BarrierRequest{Pod: p, Terminating: true,
				BoundMillis: 30_000}, PodContext{Known: true, Terminating: true, Here: true, Workload: "web",
				Addresses: newNearby().Addresses})
			if err != nil {
				t.Fatal(err)
			}
			bar.Close()
		}, 0},
		"its hook asks another replica": {TurnJudged, func(c *Core, p drain.Pod) {
			c.GatePassed(now, p.UID)
			c.Polled(now, []wire.Replica{{Hooks: map[drain.UID]string{p.UID: "web"}}}, false)
		}, 0},
	} {
		core, p := NewCore(now, drain.Holder{}, drain.DefaultTimes(), &Options{MaxHolds: 1}), pod("a")
		core.hooks.hear("uid-of-another", "web")
		s, err := core.Connect(now, Identity{Agent: "edge", Everywhere: true}, wire.Offer{}, func() {})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := core.Declare("edge", wire.Declaration{Session: s.Number, Routes: routesOf(web)}); err != nil {
			t.Fatal(err)
		}
		request := requestOf(p, web)
		request.BarrierWaits, request.Workload, request.Turn = true, "web", c.turn
		hold := core.Hold(now, request, now.Add(2*time.Second))
		core.Ledger.Report(now, now, "edge", s.Number, nil, []drain.Report{{UID: p.UID, State: drain.Removed,
			Number: 1}})
		if hold.Recheck(now, nil); !hold.Over || hold.Status.Reason != drain.BarrierWaits {
			t.Fatalf("%s: %+v", name, hold.Status)
		}
		old := map[drain.UID]string{"uid-of-another": "web"}
		core.Polled(now, []wire.Replica{{Hooks: old}}, false)
		c.then(core, p)
		missed := 0
		for range 20 {
			now = now.Add(time.Second)
			core.Polled(now, []wire.Replica{{Hooks: old}}, false) // told of for a minute
			core.Tick(now)
			missed += len(core.Settle(now).Missed)
		}
		// A hook of another node of the workload asks: those of this one are cut off all the same.
		core.hooks.hear("uid-of-a-third", "web")
		if heard := core.Hooks(now, "", "web").Heard; missed != c.missed || heard != (missed == 0) ||
			!core.Hooks(now.Add(missedKept), "", "web").Heard {
			t.Errorf("%s: %d are missed, want %d; relied on again: %t", name, missed, c.missed, heard)
		}
		if len(core.hooks.relies) > 0 {
			t.Errorf("%s: %v is remembered", name, core.hooks.relies)
		}
	}
}

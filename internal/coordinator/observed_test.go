package coordinator

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// In mode observe gateways stop by themselves. They are asked when, and are told nothing.
func TestWhatADeletionWouldHaveWaitedForIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		node := n.nodeAgent("node-1", "replica-0")
		edge := &nodeAgent{eyes: &eyes{of: map[drain.UID]*seen{}, was: map[drain.UID]drain.Report{}}}
		edge.agent = n.agentWith("edge", func(c *client.Client) {
			c.Watches = edge.eyes
			c.Routes = []drain.Route{{Service: web, Via: drain.Endpoints, Kind: drain.Directed}}
		}, "replica-0")
		p := pod("a")
		request := Request{Pod: p, Targets: []drain.Targets{{Service: web, Usable: []drain.UID{"other", p.UID}}}}
		targets := []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}
		report := func() string {
			return fmt.Sprint(r.Report().Namespaces)
		}
		r.Observe(request, targets, 0)
		synctest.Wait()
		if _, ok := node.eyes.watching(p); ok {
			t.Error("it is measured before the pod is terminating")
		}
		r.GatePassed(p.UID)
		synctest.Wait()
		if edge.exclusions.holders(p) != "" || edge.exclusions.isDead(p) {
			t.Error("who directs is told to stop")
		}
		node.see(t, p, drain.Routing, false)
		edge.see(t, p, drain.Routing, false)
		time.Sleep(40 * time.Millisecond)
		node.see(t, p, drain.Idle, true)
		edge.eyes.of[p.UID].report.InFlight = true
		edge.see(t, p, drain.Removed, false)
		// The pod is gone before the gateway is through, and another hook comes never.
		r.Deleted(p.UID)
		time.Sleep(20 * time.Millisecond)
		if got := report(); got != "[]" {
			t.Errorf("%s before all have stopped", got)
		}
		edge.eyes.of[p.UID].report.InFlight = false
		edge.see(t, p, drain.Idle, true)
		if got := report(); got != "[{shop 1 1 0 [0.06]}]" {
			t.Error(got)
		}
		if _, ok := node.eyes.watching(p); ok || len(node.eyes.gone) > 0 {
			t.Error("it is watched still, or its connections are forgotten")
		}
		if got := r.metric("lameduck_observed_in_flight_total"); got != 1 {
			t.Errorf("%v had requests in flight", got)
		}
		// Agents that do not answer are not suspended for it, and the deletion is not measured.
		for i := range 4 {
			of := pod(fmt.Sprint("silent-", i))
			request.Pod = of
			r.Observe(request, targets, 0)
			r.GatePassed(of.UID)
			time.Sleep(35 * time.Second)
		}
		if got, info := report(), r.Agent("edge"); got != "[{shop 1 1 4 [0.06]}]" || info.Suspended {
			t.Errorf("%s, agent %+v", got, info)
		}
		// One that is refused after all is forgotten.
		request.Pod = pod("kept")
		r.Observe(request, targets, 0)
		time.Sleep(35 * time.Second)
		r.GatePassed(request.Pod.UID)
		time.Sleep(35 * time.Second)
		if got := report(); got != "[{shop 1 1 4 [0.06]}]" {
			t.Error(got)
		}
	})
}

// A kernel that has not learned yet that a pod is ready looks like one that has removed it.
func TestTheMeasuredWaitOfAYoungPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		node := n.nodeAgent("node-1", "replica-0")
		p := pod("a")
		r.Observe(Request{Pod: p, Targets: []drain.Targets{{Service: web, Usable: []drain.UID{"other", p.UID}}}},
			[]netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}, 4*time.Second)
		r.GatePassed(p.UID)
		synctest.Wait()
		node.see(t, p, drain.Idle, true)
		if got := r.Report().Namespaces; len(got) > 0 {
			t.Errorf("measured too early: %+v", got)
		}
		time.Sleep(10 * time.Second) // in a bubble: its agent repeats the report every 5 s
		if got := fmt.Sprint(r.Report().Namespaces); got != "[{shop 1 0 0 [5]}]" {
			t.Error(got)
		}
	})
}

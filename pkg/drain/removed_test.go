package drain

import (
	"fmt"
	"testing"
	"time"
)

// What the hold of a pod whose barrier waits for Idle sees. Whatever else keeps a drain open keeps
// this hold too, and nothing abnormal is called by another name.
func TestRemovedIsEnoughWhereTheBarrierWaits(t *testing.T) {
	for name, c := range map[string]struct {
		is   Status
		want string
	}{
		"queued":                     {Status{Phase: Queued}, "Queued"},
		"not removed":                {Status{Phase: Unrouting}, "Unrouting"},
		"removed":                    {Status{Phase: Quiescing}, "Released BarrierWaits"},
		"removed, and kept by one":   {Status{Phase: Quiescing, Kept: true}, "Released LastTarget"},
		"removed, and another lost":  {Status{Phase: Quiescing, Lost: []Waiting{{}}}, "Released AgentsLost"},
		"released":                   {Status{Phase: Released, Reason: Deadline}, "Released Deadline"},
		"closed, as it is abandoned": {Status{Phase: Closed, Reason: Abandoned}, "Closed Abandoned"},
	} {
		if got := line(c.is.AtRemoved()); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// The hold tells a gateway that keeps the pod in a Service where it is the last target from one
// that has removed it.
func TestKept(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("edge", web)
	w.Ask(w.now, p, []Targets{{web, []UID{p.UID}}}, Place{})
	w.report("edge", Report{UID: p.UID, State: Kept, Kept: "shop/web"})
	if s := w.Status(w.now, AtHold, p.UID); s.Phase != Quiescing || s.AtRemoved().Reason != LastTarget {
		t.Errorf("%+v", s)
	}
}

// The hold has ended at Removed. Whatever happens before the hook asks, the pod gets SIGTERM only
// when the gateways that were asked there are Idle.
func TestTheBarrierWaitsForWhatTheHoldHasLeftToIt(t *testing.T) {
	p := pod("a")
	nodes := func(w *world) {
		w.observe("node-1")
		w.join("haproxy", web)
	}
	for name, meanwhile := range map[string]func(w *world) *world{
		"nothing":           func(w *world) *world { return w },
		"the watch is late": func(w *world) *world { w.pass(9 * time.Second); return w },
		"the agent reconnects": func(w *world) *world {
			w.Disconnect(w.now, "haproxy", w.sessions["haproxy"])
			w.pass(time.Second)
			w.join("haproxy", web)
			return w
		},
		"the agent is away, and back at the barrier": func(w *world) *world {
			w.Disconnect(w.now, "haproxy", w.sessions["haproxy"])
			return w
		},
		"the replica has restarted": func(*world) *world {
			w := newWorld(t)
			nodes(w)
			return w
		},
		"the replica has restarted and adopts the drain": func(w *world) *world {
			all := []Shared{w.Shared(w.now)}
			w = newWorld(t)
			nodes(w)
			w.Polled(w.now, all, true)
			return w
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			nodes(w)
			w.ask(p, web)
			w.pass(50 * time.Millisecond)
			w.say("haproxy", p, Removed)
			if s := w.Status(w.now, AtHold, p.UID).AtRemoved(); s.Waits() || s.Reason != BarrierWaits {
				t.Fatalf("the hold: %s", line(s))
			}
			w = meanwhile(w)
			w.GatePassed(w.now, AtHold, p.UID)
			w.open(p, "node-1")
			w.see("node-1", p, Idle, true)
			w.wantBarrier(p, "Unrouting haproxy:unknown")
			if w.agents["haproxy"].session == 0 {
				w.join("haproxy", web)
			}
			w.say("haproxy", p, Removed)
			w.wantBarrier(p, "Quiescing haproxy:removed")
			w.pass(9 * time.Second)
			w.see("node-1", p, Idle, true)
			w.say("haproxy", p, Removed)
			w.wantBarrier(p, "Quiescing haproxy:removed")
			w.Disconnect(w.now, "haproxy", w.sessions["haproxy"])
			w.join("haproxy", web)
			w.wantBarrier(p, "Unrouting haproxy:unknown")
			w.say("haproxy", p, Idle)
			w.wantBarrier(p, "Released Acknowledged")
		})
	}
}

// A client deletes pods one after the other, as DELETECOLLECTION and kubectl delete --all do, while
// each serves requests of 10 s. Gateways need 50 ms to remove one. Without the barrier, client-go's
// ten retries of a collection do not last; with it, no hold takes a second, and each request ends
// before SIGTERM.
func TestPodsThatAreDeletedOneAfterTheOther(t *testing.T) {
	const removes, requests = 50 * time.Millisecond, 10 * time.Second
	for _, c := range []struct{ pods, of int }{{40, 100}, {100, 100}} {
		for _, hooked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d of %d, hooks=%t", c.pods, c.of, hooked), func(t *testing.T) {
				w := newWorld(t)
				w.join("gw", web)
				w.observe("node-1")
				var usable []UID
				for i := range c.of {
					usable = append(usable, UID(fmt.Sprintf("uid-p%02d", i)))
				}
				removedAt := map[UID]time.Time{}
				// turn is what the gateway and the node do and report.
				turn := func() {
					w.pass(removes)
					for i := range c.pods {
						p := pod(fmt.Sprintf("p%02d", i))
						gate, told := AtBarrier, w.at(AtBarrier, p.UID) != nil
						if d := w.at(AtHold, p.UID); !told && d != nil && d.open && !d.queued {
							gate, told = AtHold, true
						}
						if !told || w.Status(w.now, gate, p.UID).Phase == Closed {
							continue
						}
						if removedAt[p.UID].IsZero() {
							removedAt[p.UID] = w.now.Add(removes)
						}
						switch since := w.now.Sub(removedAt[p.UID]); {
						case since >= requests:
							w.say("gw", p, Idle)
						case since >= 0:
							w.say("gw", p, Removed)
						}
						if gate == AtBarrier {
							w.see("node-1", p, Idle, true)
						}
					}
				}
				deleted, longest, stopped := 0, time.Duration(0), map[UID]bool{}
				hooks := func() {
					for _, s := range w.all(AtBarrier) {
						if !s.Waits() && s.Reason == Acknowledged && w.now.Sub(removedAt[s.Pod.UID]) >= requests {
							stopped[s.Pod.UID] = true
							w.GatePassed(w.now, AtBarrier, s.Pod.UID)
						}
					}
				}
				for calls := 1; deleted < c.pods && calls <= 11; calls++ {
					for ; deleted < c.pods; deleted++ {
						p, began := pod(fmt.Sprintf("p%02d", deleted)), w.now
						s := w.Ask(w.now, p, []Targets{{web, usable[deleted:]}}, Place{})
						answered := w.Hold(p.UID)
						for see := func() bool {
							if s = w.Status(w.now, AtHold, p.UID); hooked {
								s = s.AtRemoved()
							}
							return s.Waits() && w.now.Sub(began) < w.times.Hold
						}; see(); {
							turn()
							hooks()
						}
						answered(w.now, !s.Waits())
						longest = max(longest, w.now.Sub(began))
						if s.Waits() {
							wait := RetryAfter(w.now.Sub(s.Since), true, s.Deadline.Sub(w.now))
							for again := w.now.Add(wait); w.now.Before(again); {
								turn()
							}
							break
						}
						w.GatePassed(w.now, AtHold, p.UID)
						if hooked {
							w.open(p, "node-1")
						}
					}
				}
				if !hooked {
					if deleted > 10 {
						t.Errorf("%d pods are deleted without hooks", deleted)
					}
					return
				}
				for range 300 {
					turn()
					hooks()
				}
				if deleted < c.pods || len(stopped) < c.pods || longest > time.Second {
					t.Errorf("%d of %d pods are deleted, %d are stopped after their requests, the longest hold took %s",
						deleted, c.pods, len(stopped), longest)
				}
			})
		}
	}
}

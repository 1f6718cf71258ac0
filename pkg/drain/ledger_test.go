package drain

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// t0 is when every test begins.
var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var (
	web = Service{"shop", "web"}
	api = Service{"shop", "api"}
)

func pod(name string) Pod { return Pod{"shop", name, UID("uid-" + name)} }

func routes(services ...Service) []Route {
	var all []Route
	for _, s := range services {
		all = append(all, Route{s, Endpoints, Directed})
	}
	return all
}

// world is a ledger and a clock.
type world struct {
	*testing.T
	*Ledger
	now      time.Time
	sessions map[AgentID]uint64
}

func newWorld(t *testing.T) *world {
	return &world{t, NewLedger(DefaultTimes(), ScopeAuto, DefaultSampling()), t0, map[AgentID]uint64{}}
}

func (w *world) pass(d time.Duration) { w.now = w.now.Add(d) }

// join connects an agent that routes services.
func (w *world) join(id AgentID, services ...Service) {
	w.Helper()
	w.sessions[id] = w.Connect(w.now, id, Hello{})
	if _, ok := w.Declare(id, w.sessions[id], "", routes(services...)); !ok {
		w.Fatalf("declaration of %s refused", id)
	}
}

func (w *world) say(id AgentID, p Pod, s State) {
	w.Helper()
	w.report(id, Report{UID: p.UID, State: s})
}

// report reports on an agent's session, about the drain that is open if r gives no number.
func (w *world) report(id AgentID, r Report) (news bool) {
	if a := w.agents[id]; a != nil && r.Number == 0 {
		if d := w.subjects[r.UID].about(a, r); d != nil {
			r.Number = d.number
		}
	}
	news, _ = w.Report(w.now, w.now, id, w.sessions[id], nil, []Report{r})
	return news
}

func (w *world) ask(p Pod, services ...Service) Status {
	return w.Ask(w.now, p, targetsOf(services...), Place{})
}

// targetsOf are Services whose targets are not known.
func targetsOf(services ...Service) []Targets {
	targets := make([]Targets, len(services))
	for i, s := range services {
		targets[i].Service = s
	}
	return targets
}

// all returns the open drains at a gate, the oldest first.
func (w *world) all(gate Gate) (all []Status) {
	uids, _, _ := w.Oldest(gate, 1000)
	for _, uid := range uids {
		all = append(all, w.Status(w.now, gate, uid))
	}
	return all
}

// refused counts the drains of a pod that were allowed and abandoned all the same, in 10 minutes.
func (w *world) refused(uid UID) (n int) {
	for _, at := range w.Pod(uid).Refused {
		n += number(w.now.Sub(at) < 10*time.Minute)
	}
	return n
}

// want checks the phase, the reason and who is waited for, written as "Unrouting a:routing
// b:unknown".
func (w *world) want(p Pod, want string) {
	w.Helper()
	if got := line(w.Status(w.now, AtHold, p.UID)); got != want {
		w.Fatalf("at %s: %s is %q, want %q", w.now.Sub(t0), p, got, want)
	}
}

func line(s Status) string {
	text := s.Phase.String()
	if s.Reason != ReasonNone {
		text += " " + s.Reason.String()
	}
	for _, a := range s.Waiting {
		text += fmt.Sprintf(" %s:%s", a.Agent, a.State)
	}
	return text
}

// A pod is the last target of web, and not of api. The gateways of web may keep it there, and must
// remove it from api.
func TestAPodThatIsKeptInOneServiceLeavesTheOthers(t *testing.T) {
	p := pod("a")
	both := []Targets{usable(api, "a", "b"), usable(web, "a")}
	kept := func(in string, quiet bool) Report {
		return Report{UID: p.UID, State: Kept, Kept: in, NoConnections: quiet}
	}
	for name, c := range map[string]struct {
		report  Report
		targets []Targets
		want    string
	}{
		"kept where it is the last, and Idle elsewhere":    {kept("shop/web", true), both, "Released LastTarget"},
		"kept where it is the last, and Removed elsewhere": {kept("shop/web", false), both, "Quiescing one:removed"},
		"kept where another is ready":                      {kept("shop/api", true), both, "Unrouting one:kept"},
		"kept in both": {kept("shop/api,shop/web", true), both,
			"Unrouting one:kept"},
		"the last of both, and kept in both": {kept("shop/api,shop/web", true),
			[]Targets{usable(api, "a"), usable(web, "a")}, "Released LastTarget"},
		"no Service has a usable target":  {kept("shop/web", true), []Targets{usable(web)}, "Released LastTarget"},
		"the targets are not known":       {kept("shop/web", true), []Targets{{Service: web}}, "Unrouting one:kept"},
		"a Service that does not list it": {kept("shop/other", true), both, "Unrouting one:kept"},
		"no Service is named":             {kept("", true), both, "Unrouting one:kept"},
		"still routed in the other": {Report{UID: p.UID, State: Routing, NoConnections: true},
			both, "Unrouting one:routing"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", web, api)
			w.Ask(w.now, p, c.targets, Place{})
			w.report("one", c.report)
			w.want(p, c.want)
		})
	}
	// The other target has gone, or another one has come.
	w := newWorld(t)
	w.join("one", web)
	two := []Targets{usable(web, "a", "b")}
	w.Ask(w.now, p, two, Place{})
	w.report("one", kept("shop/web", true))
	w.want(p, "Unrouting one:kept")
	w.Ask(w.now, pod("b"), two, Place{})
	w.GatePassed(w.now, AtHold, pod("b").UID)
	w.want(p, "Released LastTarget")
	w.Ask(w.now, p, []Targets{usable(web, "a", "c")}, Place{})
	w.want(p, "Unrouting one:kept")
	// At the barrier it is terminating, and the gateway has to remove it there as well.
	w.Ask(w.now, p, []Targets{usable(web, "a")}, Place{})
	w.want(p, "Released LastTarget")
	w.open(p, "node-1")
	w.wantBarrier(p, "Unrouting one:unknown")
}

// Without this, a proxy that is reloaded between the last acknowledgement and the answer gets
// requests for a pod that goes.
func TestAcknowledgementsAreLevels(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		worse func(w *world)
		want  string
	}{
		"the report gets worse": {func(w *world) { w.say("one", p, Routing) }, "Unrouting one:routing"},
		"the session ends": {func(w *world) { w.Disconnect(w.now, "one", w.sessions["one"]) },
			"Unrouting one:unknown"},
		"the agent connects again":  {func(w *world) { w.Connect(w.now, "one", Hello{}) }, "Unrouting one:unknown"},
		"the report is too old":     {func(w *world) { w.pass(15*time.Second + 1) }, "Unrouting one:unknown"},
		"another agent declares it": {func(w *world) { w.join("two", web) }, "Unrouting two:unknown"},
		"a Service is added":        {func(w *world) { w.join("two", api); w.ask(p, api) }, "Unrouting two:unknown"},
		"an agent appears": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one"}, {ID: "new", Ready: true}})
		}, "Unrouting new:unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.join("one", web)
			w.ask(p, web)
			w.say("one", p, Idle)
			w.want(p, "Released Acknowledged")
			w.Changed(AtHold)
			c.worse(w)
			w.want(p, c.want)
		})
	}
}

func TestReportsCountOnlyOnTheOpenSession(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	old := w.sessions["one"]
	w.join("one", web)
	w.ask(p, web)
	idle := []Report{{UID: p.UID, State: Idle, Number: 1}}
	if news, _ := w.Report(w.now, w.now, "one", old, nil, idle); news {
		t.Error("a report on a former session is news")
	}
	for _, id := range []AgentID{"stranger", "one"} {
		if news, _ := w.Report(w.now, w.now, id, 0, &UpTo{Revision: 9, State: Idle}, idle); news {
			t.Error("a report without session is news")
		}
	}
	if _, ok := w.Declare("one", old, "", routes()); ok {
		t.Error("a declaration on a former session counts")
	}
	w.Disconnect(w.now, "one", old) // the old connection is noticed to be dead
	w.want(p, "Unrouting one:unknown")
	w.say("one", p, Idle)
	w.want(p, "Released Acknowledged")
	if w.report("one", Report{UID: p.UID, State: Idle}) {
		t.Error("a repeated report is news")
	}
}

func TestWhoIsOwed(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		set  func(w *world)
		want string
	}{
		"no agent": {func(*world) {}, "Released NoAgents"},
		"routes by clusterIP": {func(w *world) {
			w.declare("one", Route{web, ClusterIP, Directed})
		}, "Released NoAgents"},
		"routes by DNS": {func(w *world) { w.declare("one", Route{web, DNS, Directed}) },
			"Released NoAgents"},
		"only observes": {func(w *world) {
			w.declare("one", Route{web, Endpoints, Observed})
		}, "Released NoAgents"},
		"both by clusterIP and directed": {func(w *world) {
			w.declare("one", append(routes(web), Route{web, ClusterIP, Observed})...)
		}, "Unrouting one:unknown"},
		"connected, not declared": {func(w *world) { w.Connect(w.now, "one", Hello{}) }, "Unrouting one:unknown"},
		"never heard, ready": {func(w *world) { w.Expect(w.now, []Expected{{ID: "one", Ready: true}}) },
			"Unrouting one:unknown"},
		"never heard, follows": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true, Label: LabelObserved}})
		},
			"Released NoAgents"},
		"never heard, not ready, young": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one"}})
			w.pass(4 * time.Second)
		}, "Unrouting one:unknown"},
		"never heard, not ready, old": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one"}})
			w.pass(5 * time.Second)
		}, "Released NoAgents"},
		"lost, ready": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.join("one", web)
			w.Disconnect(w.now, "one", w.sessions["one"])
			w.pass(20 * time.Second)
		}, "Unrouting one:unknown"},
		"lost, ready, routed other things": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.join("one", api)
			w.Disconnect(w.now, "one", w.sessions["one"])
		}, "Released NoAgents"},
		"lost, gone from the API": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.join("one", web)
			w.Disconnect(w.now, "one", w.sessions["one"])
			w.Expect(w.now, nil)
		}, "Released NoAgents"},
		"gone from the API, still connected": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.join("one", web)
			w.Expect(w.now, nil)
		}, "Unrouting one:unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.set(w)
			w.ask(p, web)
			w.want(p, c.want)
		})
	}
}

func (w *world) declare(id AgentID, routes ...Route) {
	w.sessions[id] = w.Connect(w.now, id, Hello{})
	w.Declare(id, w.sessions[id], "", routes)
}

// An agent that owed a drain and is lost has not acknowledged: its gateway may route to the pod
// until the pod stops.
func TestAgentsThatAreLostDuringADrainAreNamed(t *testing.T) {
	agents := func(ready bool) []Expected {
		return []Expected{{ID: "good", Name: "good", Ready: true}, {ID: "lost", Name: "lost", Ready: ready}}
	}
	for name, c := range map[string]struct {
		before func(w *world)        // the drain
		during func(w *world, p Pod) // the drain, and 10 s after it pass
		want   string
		lost   bool
	}{
		"it was routing": {nil, func(w *world, p Pod) {
			w.say("lost", p, Routing)
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false))
		}, "Released AgentsLost", true},
		"its stream broke just before": {func(w *world) {
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false))
			w.pass(4 * time.Second)
		}, nil, "Released AgentsLost", true},
		"its stream broke long before, and its pod was ready": {func(w *world) {
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.pass(40 * time.Second)
		}, func(w *world, _ Pod) {
			w.pass(time.Second)
			w.Expect(w.now, agents(false))
		}, "Released AgentsLost", true},
		"it never owed the drain": {func(w *world) {
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false))
			w.pass(5 * time.Second)
		}, nil, "Released Acknowledged", false},
		"it has left": {nil, func(w *world, _ Pod) {
			w.Leave("lost", w.sessions["lost"])
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false))
		}, "Released Acknowledged", false},
		"its pod was deleted by force": {nil, func(w *world, p Pod) {
			w.say("lost", p, Routing)
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false)[:1])
		}, "Released AgentsLost", true},
		"its pod was deleted by force, and its stream broke later": {nil, func(w *world, _ Pod) {
			w.Expect(w.now, agents(false)[:1])
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.pass(5 * time.Second)
		}, "Released AgentsLost", true},
		"its pod does not exist any more, and its gateway had removed the other": {nil, func(w *world, p Pod) {
			w.say("lost", p, Removed)
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false)[:1])
		}, "Released Acknowledged", false},
		"its pod was deleted by force, and its gateway had been restarted": {nil, func(w *world, p Pod) {
			w.say("lost", p, Removed)
			w.say("lost", p, Routing)
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false)[:1])
		}, "Released AgentsLost", true},
		"its pod did not exist any more": {func(w *world) {
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false)[:1])
		}, nil, "Released Acknowledged", false},
		"it came back": {nil, func(w *world, p Pod) {
			w.Disconnect(w.now, "lost", w.sessions["lost"])
			w.Expect(w.now, agents(false))
			w.pass(10 * time.Second)
			w.join("lost", web)
			w.say("lost", p, Idle)
		}, "Released Acknowledged", false},
		"all are lost": {nil, func(w *world, _ Pod) {
			for id := range w.sessions {
				w.Disconnect(w.now, id, w.sessions[id])
			}
			all := agents(false)
			all[0].Ready = false
			w.Expect(w.now, all)
		}, "Released AgentsLost", true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Expect(w.now, agents(true))
			w.join("good", web)
			w.join("lost", web)
			w.pass(time.Minute)
			if c.before != nil {
				c.before(w)
			}
			p := pod("a")
			w.ask(p, web)
			w.say("good", p, Idle)
			if c.during != nil {
				c.during(w, p)
			}
			w.pass(10 * time.Second)
			w.Tick(w.now)
			w.say("good", p, Idle)
			if c.want == "Released Acknowledged" {
				w.say("lost", p, Idle)
			}
			w.want(p, c.want)
			s := w.Status(w.now, AtHold, p.UID)
			lost := slices.ContainsFunc(s.Lost, func(w Waiting) bool { return w.Agent == "lost" })
			if lost != c.lost || s.Reason.Abnormal() != c.lost {
				t.Errorf("lost are %v, away are %v, abnormal %t", s.Lost, s.Away, s.Reason.Abnormal())
			}
		})
	}
}

func TestAbandonedOnKnowledgeOnly(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	ask := func(allowed bool) {
		w.ask(p, web)
		answered := w.Hold(p.UID)
		w.pass(2 * time.Second)
		answered(w.now, allowed)
	}
	ask(false)
	w.pass(44 * time.Second)
	if got, _ := w.Tick(w.now); got != nil {
		t.Fatalf("looked into after 44 s: %v", got)
	}
	if w.NotTerminating(w.now, p.UID) {
		t.Fatal("abandoned by a read that was not needed")
	}
	w.pass(time.Second)
	if got, _ := w.Tick(w.now); len(got) != 1 || got[0] != p {
		t.Fatalf("not looked into after 45 s: %v", got)
	}
	answered := w.Hold(p.UID) // a caller asks while the read is under way
	if w.NotTerminating(w.now, p.UID) {
		t.Fatal("abandoned while a call is held")
	}
	answered(w.now, false)
	w.pass(45 * time.Second)
	if !w.NotTerminating(w.now, p.UID) {
		t.Fatal("not abandoned")
	}
	w.want(p, "Closed Abandoned")

	// The time that was used is not given back, but the next drain gets most of a hold.
	s := w.ask(p, web)
	if s.Phase != Unrouting || !s.Deadline.Equal(w.now.Add(1500*time.Millisecond)) {
		t.Fatalf("second drain: %s until %s, want 3/4 of a hold", line(s), s.Deadline.Sub(w.now))
	}
}

// seldom deletes p every period, as a client does that does not follow Retry-After: each call is
// held for 2 s and then denied. The gateway is idle some time after each exclusion; zero: never. It
// returns how often the client called, and for how long the pod was excluded.
func (w *world) seldom(p Pod, every, idleAfter time.Duration) (calls int, excluded time.Duration) {
	const step = 100 * time.Millisecond
	var since, held time.Time
	var answered func(time.Time, bool)
	for next := w.now; calls < 20; w.pass(step) {
		if answered == nil && !w.now.Before(next) {
			calls, next, held = calls+1, next.Add(every), w.now.Add(2*time.Second)
			w.pass(10 * time.Millisecond) // the question to the opener
			w.ask(p, web)
			answered = w.Hold(p.UID)
		}
		if d := w.at(AtHold, p.UID); d.open {
			if since.IsZero() {
				since = w.now
			}
			if state := Removed; idleAfter > 0 {
				if w.now.Sub(since) >= idleAfter {
					state = Idle
				}
				w.say("one", p, state)
			}
			excluded += step
		} else {
			since = time.Time{}
		}
		w.Tick(w.now)
		w.NotTerminating(w.now, p.UID)
		switch s := w.Status(w.now, AtHold, p.UID); {
		case answered == nil:
		case !s.Waits():
			return calls, excluded
		case !w.now.Before(held):
			answered(w.now, false)
			answered = nil
		}
	}
	return calls, excluded
}

// Without this, each call of a client that comes back after its drain was abandoned starts again.
// It would need 15 calls of 2 s each until the deadline, or more if the gateway is never idle
// within one hold, with the living pod excluded for 47 s after each.
func TestACallerThatComesBackLaterContinues(t *testing.T) {
	for _, every := range []time.Duration{40 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute} {
		for _, idleAfter := range []time.Duration{5 * time.Second, 0} {
			t.Run(fmt.Sprint(every, " idle after ", idleAfter), func(t *testing.T) {
				w := newWorld(t)
				w.join("one", web)
				calls, excluded := w.seldom(pod("a"), every, idleAfter)
				if calls != 2 || excluded > 50*time.Second {
					t.Errorf("%d calls, excluded for %s; want 2, and 50 s at most", calls, excluded)
				}
			})
		}
	}
}

// A drain that never leaves the queue excludes nothing, and its callers must get there all the
// same. Time in which it is queued and no call waits does not count.
func TestQueuedCallersThatComeBackLaterContinue(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	for range 15 {
		w.Ask(w.now, pod("a"), []Targets{usable(web, "a", "b")}, Place{}) // keeps the capacity
		s := w.Ask(w.now, pod("b"), []Targets{usable(web, "a", "b")}, Place{})
		if s.Phase != Queued {
			t.Fatalf("%s at %s", line(s), w.now.Sub(t0))
		}
		answered := w.Hold(pod("b").UID)
		w.pass(2 * time.Second)
		answered(w.now, false)
		w.pass(58 * time.Second)
		w.NotTerminating(w.now, pod("b").UID)
	}
	s := w.Ask(w.now, pod("b"), []Targets{usable(web, "a", "b")}, Place{})
	if left := s.Deadline.Sub(w.now); left > 2*time.Second {
		t.Errorf("after 15 calls of 2 s: %s left", left)
	}
}

// A caller repeats a deletion that is allowed without the drain, and another webhook denies each.
// Without this, the pod is out of traffic for as long as it does.
func TestAllowsThatAreRepeatedKeepNoPodOut(t *testing.T) {
	w, p := newWorld(t), pod("a")
	w.join("one", web)
	w.ask(p, web)
	w.Hold(p.UID)(w.now, false)
	for range 10 {
		w.pass(5 * time.Second)
		w.Decided(w.now, p.UID, true)
	}
	if look, _ := w.Tick(w.now); len(look) != 1 || !w.NotTerminating(w.now, p.UID) {
		t.Errorf("%v are read after 50 s", look)
	}
}

// A budget that forbids an eviction ends the drain that earlier evictions have opened, unless
// another call may still delete the pod.
func TestABudgetGivesThePodBack(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		before func(w *world)
		want   string
	}{
		"denied": {func(w *world) { w.Hold(p.UID)(w.now, false) }, "Closed Abandoned"},
		"held":   {func(w *world) { w.Hold(p.UID) }, "Unrouting one:unknown"},
		"allowed before": {func(w *world) {
			w.Hold(p.UID)(w.now, true)
			w.Hold(p.UID)(w.now, false)
		}, "Unrouting one:unknown"},
		"allowed for another reason": {func(w *world) {
			w.Hold(p.UID)(w.now, false)
			w.Decided(w.now, p.UID, true)
		}, "Unrouting one:unknown"},
		"also deleted": {func(w *world) {
			w.ask(p, web)
			w.Hold(p.UID)(w.now, false)
		}, "Unrouting one:unknown"},
		"not asked here": {func(*world) {}, "Unrouting one:unknown"},
		"answered late": {func(w *world) {
			w.Hold(p.UID)(w.now, false)
			w.Unanswered(p.UID, false)
		}, "Unrouting one:unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", web)
			w.Ask(w.now, p, targetsOf(web), Place{Evicted: true})
			w.pass(5 * time.Second)
			c.before(w)
			w.Decided(w.now, p.UID, false)
			w.want(p, c.want)
			if got := w.Pod(p.UID).Spent; c.want == "Closed Abandoned" && got != 5*time.Second {
				t.Errorf("%s are spent, want 5s", got)
			}
		})
	}
	t.Run("container stopped", func(t *testing.T) {
		w := newWorld(t)
		w.join("one", web)
		w.Ask(w.now, p, targetsOf(web), Place{Restart: true, Stopped: w.now})
		w.Decided(w.now, p.UID, false)
		w.want(p, "Unrouting one:unknown")
	})
}

func TestRefusedCountsWhatWasAllowedInVain(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	for i := range 3 {
		w.ask(p, web)
		w.say("one", p, Idle)
		w.Hold(p.UID)(w.now, true)
		w.pass(45 * time.Second)
		if !w.NotTerminating(w.now, p.UID) {
			t.Fatal("not abandoned")
		}
		if got := w.refused(p.UID); got != i+1 {
			t.Fatalf("refused %d, want %d", got, i+1)
		}
	}
	w.pass(10*time.Minute - 1)
	if got := w.refused(p.UID); got != 1 {
		t.Fatalf("refused %d, want the last", got)
	}
}

// A caller that asks steadily keeps its drain open. It counts as refused once for each time in
// which a deletion that was allowed would have been carried out.
func TestRefusedCountsAnswersToASteadyCaller(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	for i := range 20 { // calls, one each 5 s
		w.ask(p, web)
		w.say("one", p, Idle)
		w.Hold(p.UID)(w.now, i != 0)
		// Allowed from 5 s on; found to be in vain at 40 s, and again at 75 s.
		if got, want := w.refused(p.UID), number(i >= 8)+number(i >= 15); got != want {
			t.Fatalf("refused %d after %d s, want %d", got, 5*i, want)
		}
		w.pass(5 * time.Second)
	}
}

// Another replica may deny until its deadline. If this one took that for a refusal by something
// else, the pod would be routed again when the other one allows.
func TestRefusedDoesNotCountTheDeadlineOfAnotherReplica(t *testing.T) {
	w := newWorld(t)
	times := DefaultTimes()
	times.Webhook, times.Hold, times.Deadline = 12*time.Second, 10*time.Second, 120*time.Second
	w.Ledger = NewLedger(times, ScopeAuto, DefaultSampling())
	p := pod("a")
	w.join("one", web)
	for at := time.Duration(0); at <= 140*time.Second; at += 5 * time.Second {
		w.ask(p, web)
		if got, want := w.refused(p.UID), number(at > 130*time.Second); got != want {
			t.Fatalf("refused %d after %s, want %d", got, at, want)
		}
		w.say("one", p, Idle)
		w.Hold(p.UID)(w.now, true)
		w.pass(5 * time.Second)
	}
}

// A replica that has never heard of a drain goes on from where the others are.
func TestClockIsAdoptedFromOtherReplicas(t *testing.T) {
	p := pod("a")
	at := func(elapsed time.Duration) Place { return Place{Elapsed: elapsed} }
	for name, c := range map[string]struct {
		asked []Place
		left  time.Duration
	}{
		"known there before":        {[]Place{at(20 * time.Second)}, 10 * time.Second},
		"learned later":             {[]Place{{}, at(5 * time.Second)}, 25 * time.Second},
		"younger there":             {[]Place{at(5 * time.Second), at(time.Second)}, 25 * time.Second},
		"a clock that has run wild": {[]Place{at(time.Hour)}, 1500 * time.Millisecond}, // most of a hold
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", web)
			for _, place := range c.asked {
				w.Ask(w.now, p, []Targets{{Service: web}}, place)
			}
			if s := w.Status(w.now, AtHold, p.UID); s.Deadline.Sub(w.now) != c.left {
				t.Errorf("deadline in %s, want %s", s.Deadline.Sub(w.now), c.left)
			}
		})
	}
}

func TestSince(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	w.join("two", api)
	w.ask(pod("a"), web)
	w.ask(pod("b"), api)
	w.ask(pod("c"), web, api)
	show := func(id AgentID, rev uint64) (string, uint64) {
		open, released, _, next := w.ChangesFor(id, rev)
		var text []string
		for _, o := range open {
			text = append(text, "+"+o.Pod.Name)
		}
		for _, r := range released {
			text = append(text, fmt.Sprintf("-%s dead=%t", r.UID, r.Terminating))
		}
		return strings.Join(text, " "), next
	}
	check := func(id AgentID, rev uint64, want string) uint64 {
		t.Helper()
		got, next := show(id, rev)
		if got != want {
			t.Errorf("%s since %d: %q, want %q", id, rev, got, want)
		}
		return next
	}
	one := check("one", 0, "+a +c")
	two := check("two", 0, "+b +c")
	check("one", one, "")
	w.GatePassed(w.now, AtHold, pod("a").UID)
	one = check("one", one, "-uid-a dead=true")
	check("two", two, "-uid-a dead=true")
	check("one", one, "")
	// A Service that is found later makes another agent owe.
	w.ask(pod("b"), web)
	check("one", one, "+b")
	check("stranger", 7, "")

	if repeat, _ := w.Declare("one", w.sessions["one"], "", routes(web)); repeat {
		t.Error("a declaration that changes nothing has everything told again")
	}
	if repeat, _ := w.Declare("one", w.sessions["one"], "", routes(api)); !repeat {
		t.Error("a declaration that changes something does not have everything told again")
	}
	check("one", 0, "+c +b -uid-a dead=true")
}

func TestTickForgetsTheOver(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.ask(p, web)
	w.GatePassed(w.now, AtHold, p.UID)
	w.pass(10*time.Minute - 1)
	w.Tick(w.now)
	w.want(p, "Closed PodDeleted")
	w.pass(1)
	w.Tick(w.now)
	w.want(p, "Unknown")
	if open, released, _, _ := w.ChangesFor("x", 0); open != nil || released != nil {
		t.Error("a forgotten drain is still told")
	}
}

func TestTouched(t *testing.T) {
	w := newWorld(t)
	a, b := pod("a"), pod("b")
	w.join("one", web)
	w.ask(a, web)
	w.ask(b, web)
	w.Changed(AtHold)
	w.say("one", b, Idle)
	if got := w.Changed(AtHold); !slices.Equal(got, []UID{b.UID}) {
		t.Errorf("a report on b touched %v", got)
	}
	w.Disconnect(w.now, "one", w.sessions["one"])
	if got := w.Changed(AtHold); !slices.Equal(got, []UID{a.UID, b.UID}) {
		t.Errorf("a lost agent touched %v", got)
	}
	if got := w.Changed(AtHold); got != nil {
		t.Errorf("nothing touched %v", got)
	}
}

func TestDefaultTimesHold(t *testing.T) {
	if err := DefaultTimes().Check(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		set  func(*Times)
		want string
	}{
		"hold": {func(s *Times) { s.Hold = 4 * time.Second },
			"webhook timeout 4s must be more than hold 4s + 1.5s"},
		"deadline": {func(s *Times) { s.Deadline = time.Minute },
			"deadline 1m0s + 5s must be within what one client call waits"},
		"idle bound": {func(s *Times) { s.IdleBound = 31 * time.Second },
			"idle bound 31s must be positive and at most the deadline 30s"},
		"heartbeat": {func(s *Times) { s.Heartbeat = 3 * time.Second },
			"heartbeat 3s must be positive and less than half of away 5s"},
		"renewal": {func(s *Times) { s.Renewal = 15 * time.Second },
			"renewal 15s must be positive and less than freshness 15s"},
		"holder": {func(s *Times) { s.Expiry = 58 * time.Second },
			"expiry 58s - freshness 15s must be at least 34s + 10s"},
		"abandon": {func(s *Times) { s.Abandon = 34 * time.Second }, "abandon 34s must be more than 34s"},
		"webhook too long": {func(s *Times) { s.Webhook = 31 * time.Second },
			"webhook timeout 31s must be at most 30s"},
	} {
		t.Run(name, func(t *testing.T) {
			times := DefaultTimes()
			c.set(&times)
			if err := times.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestRetryAfter(t *testing.T) {
	for _, c := range []struct {
		elapsed, remaining time.Duration
		held               bool
		want               time.Duration
	}{
		{0, 30 * time.Second, false, time.Second},
		{2 * time.Second, 28 * time.Second, true, time.Second},
		{20 * time.Second, 10 * time.Second, true, 3 * time.Second},
		{20 * time.Second, 10 * time.Second, false, 10 * time.Second},
		{27 * time.Second, 3500 * time.Millisecond, true, 4 * time.Second},
		{27 * time.Second, 3500 * time.Millisecond, false, 4 * time.Second},
		{22 * time.Second, 8 * time.Second, false, 8 * time.Second},
		{22100 * time.Millisecond, 7900 * time.Millisecond, false, 8 * time.Second}, // and not 7, and then 1
		{40 * time.Second, 0, false, 20 * time.Second},
		{29900 * time.Millisecond, 100 * time.Millisecond, true, time.Second},
	} {
		if got := RetryAfter(c.elapsed, c.held, c.remaining); got != c.want {
			t.Errorf("RetryAfter(%s, held %t, %s) = %s, want %s", c.elapsed, c.held, c.remaining, got, c.want)
		}
	}
}

// client-go asks ten times again. A caller that is never held, as of hundreds that come at one
// moment, is let through with two of them to spare: a busy API server, or a replica that goes,
// costs one.
func TestWhoIsNeverHeldGetsThere(t *testing.T) {
	for _, late := range []time.Duration{0, 300 * time.Millisecond, 900 * time.Millisecond} {
		elapsed, again := time.Duration(0), 0
		for deadline := DefaultTimes().Deadline; elapsed < deadline; again++ {
			elapsed += RetryAfter(elapsed, false, deadline-elapsed) + late
		}
		if again > 8 {
			t.Errorf("%s late each time, it asks %d times again", late, again)
		}
	}
}

func TestWords(t *testing.T) {
	var s State
	if err := s.UnmarshalText([]byte("removed")); err != nil || s != Removed {
		t.Errorf("removed: %v, %v", s, err)
	}
	if err := s.UnmarshalText([]byte("vanished")); err == nil || !strings.Contains(err.Error(), `state "vanished"`) {
		t.Errorf("vanished: %v", err)
	}
	var v Via
	if err := v.UnmarshalText([]byte("unknown")); err == nil {
		t.Error("via unknown is accepted")
	}
	for want := Endpoints; want <= DNS; want++ {
		if text, _ := want.MarshalText(); v.UnmarshalText(text) != nil || v != want {
			t.Errorf("via %s does not survive the wire", want)
		}
	}
}

// Without this, a pod that was given back to its gateways and is deleted again a moment later goes
// at once: an agent that has lifted an exclusion says nothing more of the pod, and its last word
// was Idle.
func TestReportsOfAFormerDrainDoNotCount(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.ask(p, web)
	w.pass(44 * time.Second)
	w.say("one", p, Idle)
	w.pass(time.Second)
	if !w.NotTerminating(w.now, p.UID) {
		t.Fatal("not abandoned")
	}
	w.ask(p, web)
	w.want(p, "Unrouting one:unknown")
}

// Without this, the last word on a former drain that is slow to arrive, after that drain was
// abandoned and asked for again, lets the pod go while its agent lifts the exclusion that the word
// was about.
func TestAWordOfAFormerDrainThatComesLateDoesNotCount(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	number := func() uint64 {
		open, _, _, _ := w.ChangesFor("one", 0)
		if len(open) != 1 || open[0].Number == 0 {
			t.Fatalf("open drains %+v, want one with a number", open)
		}
		return open[0].Number
	}
	report := func(number uint64) {
		w.report("one", Report{UID: p.UID, State: Idle, Number: number})
	}
	w.ask(p, web)
	former := number()
	w.pass(45 * time.Second)
	if !w.NotTerminating(w.now, p.UID) {
		t.Fatal("not abandoned")
	}
	report(former) // before it is asked for again
	w.ask(p, web)
	w.want(p, "Unrouting one:unknown")
	report(former) // and after
	w.want(p, "Unrouting one:unknown")
	// without a number
	w.Report(w.now, w.now, "one", w.sessions["one"], nil, []Report{{UID: p.UID, State: Idle}})
	w.want(p, "Unrouting one:unknown")
	report(number())
	w.want(p, "Released Acknowledged")
}

// Without this, words that were under way while this replica, the agent or the network stood still
// count as if they were new: by then the agent may have given up the exclusion that they are about.
func TestReportsCountAsOldAsWhatTheirAgentHadHeard(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.ask(p, web)
	w.pass(20 * time.Second)
	report := func(age time.Duration, state State) (news bool) {
		news, _ = w.Report(w.now, w.now.Add(-age), "one", w.sessions["one"], nil,
			[]Report{{UID: p.UID, State: state, Number: 1}})
		return news
	}
	report(16*time.Second, Idle)
	w.want(p, "Unrouting one:unknown")
	report(14*time.Second, Idle)
	w.want(p, "Released Acknowledged")
	w.pass(time.Second + 1)
	w.want(p, "Unrouting one:unknown") // 15 s since it was true, 1 s since it was said
	report(time.Second, Routing)
	if report(2*time.Second, Idle) {
		t.Error("an older word is news after a newer one")
	}
	w.want(p, "Unrouting one:routing")
	report(0, Idle)
	w.want(p, "Released Acknowledged")
}

// Without this, a call that is held is not woken by an agent that says again what had become too
// old.
func TestARepeatOfWhatWasTooOldIsNews(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.ask(p, web)
	said := Report{UID: p.UID, State: Idle}
	w.report("one", said)
	w.pass(5 * time.Second)
	w.Changed(AtHold)
	if w.report("one", said) || w.Changed(AtHold) != nil {
		t.Error("a repeat in time is news")
	}
	w.pass(15*time.Second + 1)
	w.want(p, "Unrouting one:unknown")
	if !w.report("one", said) || !slices.Equal(w.Changed(AtHold), []UID{p.UID}) {
		t.Error("a repeat that counts again is no news")
	}
}

func TestAnAgentThatTheAPIDoesNotListMayComeBack(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.ask(p, web)
	w.Disconnect(w.now, "one", w.sessions["one"])
	w.pass(5*time.Second - 1)
	w.want(p, "Unrouting one:unknown")
	w.pass(1)
	w.want(p, "Released AgentsLost")
	w.pass(10 * time.Second)
	w.Tick(w.now)
	if len(w.agents) != 0 {
		t.Errorf("agents without a stream or a drain are kept: %d", len(w.agents))
	}
}

// Without this, a session of weeks keeps a report of each pod that was ever deleted.
func TestTheEndOfADrainDropsItsReports(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	kept := func() int { return len(w.agents["one"].reports[AtHold]) }
	for i := range 100 {
		p := pod(fmt.Sprint(i))
		w.ask(p, web)
		w.say("one", p, Idle)
		w.want(p, "Released Acknowledged")
		if n := kept(); n != 1 {
			t.Fatalf("drain %d: %d reports are kept while it is open, want 1", i, n)
		}
		w.GatePassed(w.now, AtHold, p.UID)
		w.say("one", p, Idle) // the agent has not yet learned of the end
		if n := kept(); n != 0 {
			t.Fatalf("drain %d: %d reports are kept after its end, want 0", i, n)
		}
		w.pass(time.Second)
	}
}

func TestAnOlderClockDoesNotMoveANearerDeadlineBack(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	for range 3 { // 3 drains of 20 s each use up more than the deadline
		w.ask(p, web)
		answered := w.Hold(p.UID)
		w.pass(20 * time.Second)
		answered(w.now, false)
		w.pass(45 * time.Second)
		if !w.NotTerminating(w.now, p.UID) {
			t.Fatal("not abandoned")
		}
	}
	before := w.ask(p, web)
	w.Ask(w.now, p, nil, Place{Elapsed: time.Hour})
	if after := w.Status(w.now, AtHold, p.UID); !after.Since.Equal(before.Since) {
		t.Errorf("since moved by %s", after.Since.Sub(before.Since))
	}
}

func TestLeave(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		then func(w *world)
		want string
	}{
		"no more":         {func(*world) {}, "Released NoAgents"},
		"its stream ends": {func(w *world) { w.Disconnect(w.now, "one", w.sessions["one"]) }, "Released NoAgents"},
		"it comes back, same life": {func(w *world) { w.Connect(w.now, "one", Hello{Boot: "boot-1"}) },
			"Released NoAgents"},
		"it comes back, other life": {func(w *world) { w.Connect(w.now, "one", Hello{Boot: "boot-2"}) },
			"Unrouting one:unknown"},
		"it comes back, no name": {func(w *world) { w.Connect(w.now, "one", Hello{}) }, "Unrouting one:unknown"},
		"it declares again": {func(w *world) { w.Declare("one", w.sessions["one"], "", routes(web)) },
			"Unrouting one:unknown"},
		"its pod is seen not ready": {func(w *world) { w.Expect(w.now, []Expected{{ID: "one"}}) }, "Released NoAgents"},
		"another says so in its name": {func(w *world) {
			w.Connect(w.now, "one", Hello{Boot: "boot-2"})
			if w.Leave("one", w.sessions["two"]) || w.Leave("one", 0) || w.Leave("stranger", 1) {
				w.Error("left by another's session")
			}
		}, "Unrouting one:unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Expect(w.now, []Expected{{ID: "one", Ready: true}})
			w.sessions["one"], w.sessions["two"] = w.Connect(w.now, "one", Hello{Boot: "boot-1"}),
				w.Connect(w.now, "two", Hello{})
			w.Declare("one", w.sessions["one"], "", routes(web))
			w.Declare("two", w.sessions["two"], "", nil)
			w.ask(p, web)
			w.want(p, "Unrouting one:unknown")
			w.Changed(AtHold)
			if !w.Leave("one", w.sessions["one"]) || !slices.Equal(w.Changed(AtHold), []UID{p.UID}) {
				t.Error("no caller is woken")
			}
			c.then(w)
			w.want(p, c.want)
		})
	}
}

// An agent whose configuration loses a Service in the middle of a drain may still route the pod:
// its gateway has old processes, or was not reloaded.
func TestADeclarationWithoutTheServiceDischargesNobody(t *testing.T) {
	p := pod("a")
	for name, c := range map[string]struct {
		then func(w *world)
		want string
	}{
		"silence":            {func(*world) {}, "Unrouting one:unknown"},
		"requests still run": {func(w *world) { w.say("one", p, Removed) }, "Quiescing one:removed"},
		"an acknowledgement": {func(w *world) { w.say("one", p, Idle) }, "Released Acknowledged"},
		"it leaves":          {func(w *world) { w.Leave("one", w.sessions["one"]) }, "Released NoAgents"},
		"a third declaration": {func(w *world) { w.Declare("one", w.sessions["one"], "", nil) },
			"Unrouting one:unknown"},
		"a new session": {func(w *world) { w.join("one", api) }, "Unrouting one:unknown"},
		"it vouches no more": {func(w *world) { w.declare("one", Route{web, ClusterIP, Directed}) },
			"Unrouting one:unknown"},
		"it goes away": {func(w *world) {
			w.Disconnect(w.now, "one", w.sessions["one"])
			w.Changed(AtHold)
			w.pass(w.times.Away + time.Second)
		}, "Released AgentsLost"},
		"the API forgets it": {func(w *world) {
			w.Expect(w.now, []Expected{{ID: "one"}})
			w.Disconnect(w.now, "one", w.sessions["one"])
			w.Expect(w.now, nil)
		}, "Released AgentsLost"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", web)
			w.ask(p, web)
			w.Declare("one", w.sessions["one"], "", routes(api))
			if got := w.told("one"); got != "a" {
				t.Errorf("told of %q", got)
			}
			w.want(p, "Unrouting one:unknown")
			w.Changed(AtHold)
			c.then(w)
			w.want(p, c.want)
			w.GatePassed(w.now, AtHold, p.UID)
			w.ask(pod("b"), web)
			w.want(pod("b"), "Released NoAgents")
		})
	}
}

// An agent that says for the first time what it routes, and one that says that it cannot vouch for
// a Service, are not waited for.
func TestWhatDischargesAnAgent(t *testing.T) {
	p := pod("a")
	w := newWorld(t)
	w.ask(p, web)
	w.sessions["one"] = w.Connect(w.now, "one", Hello{})
	w.want(p, "Unrouting one:unknown")
	w.declare("one", routes(api)...)
	w.want(p, "Released NoAgents")
	w.declare("one", routes(web)...)
	w.want(p, "Unrouting one:unknown")
	w.declare("one", Route{web, ClusterIP, Directed})
	w.want(p, "Released NoAgents")
}

// An agent is told of pods in the namespaces in which it routes, or has routed on its session, and
// in no others. What it says of others counts for nothing.
func TestAnAgentIsToldOfItsNamespaces(t *testing.T) {
	w := newWorld(t)
	bank := Service{"bank", "core"}
	purse := Pod{"bank", "core-1", "uid-core-1"}
	told := func(id AgentID, rev uint64, want string) uint64 {
		t.Helper()
		_, next, text := w.hears(id, rev)
		if text != want {
			t.Errorf("%s is told %q, want %q", id, text, want)
		}
		return next
	}
	w.join("bank", bank)
	w.join("shop", web)
	w.ask(purse, bank)
	w.ask(pod("a"), web)
	w.say("shop", purse, Idle)
	if len(w.subjects[purse.UID].received[AtHold]) > 0 {
		t.Error("a report counts of an agent that was not asked")
	}
	shop := told("shop", 0, "drain uid-a")
	w.GatePassed(w.now, AtHold, purse.UID)
	told("shop", shop, "")
	// It must not route a pod that is dead because it heard of it too early.
	w.Affected()
	w.Declare("shop", w.sessions["shop"], "", routes(web, bank))
	shop = 0
	if got := w.Affected(); !slices.Equal(got, []AgentID{"shop"}) {
		t.Errorf("%v are woken", got)
	}
	shop = told("shop", shop, "drain uid-a release uid-core-1 dead")
	// The exclusion of a drain that it was told of is readmitted, whatever it has declared since.
	w.Declare("shop", w.sessions["shop"], "", routes(bank))
	w.GatePassed(w.now, AtHold, "uid-a")
	told("shop", shop, "release uid-a dead")
	w.join("shop", bank)
	told("shop", 0, "release uid-core-1 dead release uid-a dead")
	w.ask(pod("b"), web)
	w.GatePassed(w.now, AtHold, "uid-b")
	told("shop", 0, "release uid-core-1 dead release uid-a dead")
	// One that has not declared may route everything.
	w.Connect(w.now, "new", Hello{})
	told("new", 0, "release uid-core-1 dead release uid-a dead release uid-b dead")
	told("bank", 0, "release uid-core-1 dead")
}

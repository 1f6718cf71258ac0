package drain

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// What the ledger keeps so that an event costs only those whom it concerns must never show: the
// agents that an indexed drain owes are those that a look at every agent finds, and whatever
// changes a drain's phase other than time names it in Touched, so that its callers are woken.
func TestIndexesNeverShow(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		services := []Service{web, api, {"shop", "db"}}
		some := func() []Service {
			return slices.DeleteFunc(slices.Clone(services), func(Service) bool { return r.IntN(2) == 0 })
		}
		for step := range 120 {
			before := map[gatedKey]Phase{}
			for _, s := range w.both() {
				before[s.gatedKey] = s.Phase
			}
			w.Changed(AtHold)
			w.Changed(AtBarrier)
			id := AgentID(fmt.Sprint("agent-", r.IntN(5)))
			p := pod(fmt.Sprint(r.IntN(4)))
			did := w.step(r, id, p, some)
			touched := [gates][]UID{w.Changed(AtHold), w.Changed(AtBarrier)}
			for _, s := range w.both() {
				d := w.at(s.gate, s.Pod.UID)
				var slow []AgentID
				for _, a := range w.agents {
					if d.gate == AtHold && a.mayBeAsked(AtHold, d) || d.gate == AtBarrier && a.owesBarrier(d) {
						slow = append(slow, a.ID)
					}
				}
				var quick []AgentID
				for _, a := range w.owing(d) {
					quick = append(quick, a.ID)
				}
				slices.Sort(slow)
				if slices.Sort(quick); !slices.Equal(slow, quick) {
					t.Fatalf("seed %d step %d, %s: %s may be owed by %v, found %v", seed, step, did, s.Pod.UID, slow,
						quick)
				}
				if !slices.IsSortedFunc(s.Waiting, func(a, b Waiting) int { return cmp.Compare(a.Name, b.Name) }) {
					t.Fatalf("seed %d step %d, %s: not in the order of names: %v", seed, step, did, s.Waiting)
				}
				if was, open := before[s.gatedKey]; open && was != s.Phase &&
					!slices.Contains(touched[s.gate], s.Pod.UID) {
					t.Fatalf("seed %d step %d, %s: %v went from %s to %s and is not touched", seed, step, did,
						s.gatedKey, was, s.Phase)
				}
			}
			expected, missing := 0, 0
			for _, a := range w.agents {
				if a.listed && !a.left {
					expected++
					missing += number(a.session == 0 && !a.Pending)
				}
			}
			if e, m := w.Counts().Expected, w.Counts().Missing; e != expected || m != missing {
				t.Fatalf("seed %d step %d, %s: %d agents are expected and %d of them missing, want %d and %d", seed,
					step, did, e, m, expected, missing)
			}
			if err := w.cross(); err != nil {
				t.Fatalf("seed %d step %d, %s: %v", seed, step, did, err)
			}
			switch r.IntN(20) {
			case 0:
				w.pass(time.Minute)
			case 1, 2, 3, 4, 5:
				w.pass(time.Duration(r.IntN(4000)) * time.Millisecond)
			}
		}
	}
}

// A caller looks at a drain when it is touched and when time may have changed it, and not in
// between: of many reports in a row, or of the steps of many agents, only the last is followed by a
// look. Still no change of a phase may be missed.
func TestNoChangeIsMissedByWhoLooksOnlyWhenTouched(t *testing.T) {
	unseen := 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 2))
		w := newWorld(t)
		services := []Service{web, api}
		some := func() []Service {
			return slices.DeleteFunc(slices.Clone(services), func(Service) bool { return r.IntN(3) == 0 })
		}
		for i := range 5 {
			id := AgentID(fmt.Sprint("agent-", i))
			w.sessions[id] = w.Connect(w.now, id, Hello{Observes: true})
			w.Declare(id, w.sessions[id], Nodes,
				[]Route{{web, Endpoints, Observed}, {api, Endpoints, Directed}})
		}
		known := map[*drain]Phase{}
		look := func(d *drain) {
			if d != nil && d.open {
				known[d] = w.status(w.now, d).Phase
			}
		}
		for step := range 200 {
			p := pod(fmt.Sprint(r.IntN(3)))
			id := AgentID(fmt.Sprint("agent-", r.IntN(5)))
			did := ""
			if n := r.IntN(10); n < 7 {
				report := Report{UID: p.UID, State: State(r.IntN(5)), Number: uint64(r.IntN(9) / 8 * 99),
					Gate: Gate(r.IntN(2)), NoConnections: r.IntN(2) == 0, HasSent: r.IntN(2) == 0}
				if r.IntN(2) == 0 {
					report.State = max(report.State, Removed)
				}
				if r.IntN(2) == 0 {
					did = w.sayUpTo(r, id, report)
				} else {
					w.report(id, report)
					did = fmt.Sprintf("%s reports %v", id, report)
				}
			} else if n == 7 {
				w.OpenBarrier(w.now, Barrier{
					Pod: p, By: id, Services: some(), Since: w.now, Bound: 30 * time.Second, Last: r.IntN(4) == 0,
					Young: time.Duration(r.IntN(3)) * time.Second,
				})
				did = "barrier"
			} else {
				did = w.step(r, id, p, some)
			}
			if seed%2 == 1 && r.IntN(3) > 0 {
				continue // a coordinator looks once at what the steps of several agents have touched
			}
			for touched := true; touched; {
				holds, barriers := w.Changed(AtHold), w.Changed(AtBarrier)
				for _, uid := range holds {
					look(w.at(AtHold, uid))
				}
				for _, uid := range barriers {
					look(w.at(AtBarrier, uid))
				}
				touched = len(holds)+len(barriers) > 0
			}
			w.each(func(d *drain) {
				if !d.open {
					return
				}
				was := *d
				was.blocking = slices.Clone(d.blocking)
				is := w.derive(w.now, d).Phase
				d.blocking, d.blocked, d.phase, d.quiescingAt = was.blocking, was.blocked, was.phase, was.quiescingAt
				if is != known[d] {
					t.Fatalf("seed %d step %d, %s: %s at the %s is %s, and was %s when it was last touched", seed, step,
						did, d.pod.UID, d.gate, is, known[d])
				}
				if d.blocked > 0 && len(d.agents)-d.blocked > 1 {
					unseen++
				}
			})
			if r.IntN(12) == 0 {
				w.pass(time.Duration(r.IntN(4000)) * time.Millisecond)
				w.each(look)
			}
		}
	}
	if unseen < 1000 {
		t.Errorf("%d drains were looked at that had heard several words", unseen)
	}
}

// cross reports what the ledger's indexes do not agree on.
func (w *world) cross() error {
	said := 0
	for uid, of := range w.subjects {
		if of.drains == [gates]*drain{} {
			return fmt.Errorf("nothing is known of %s, and it is kept", uid)
		}
		for g := range gates {
			if d := of.drains[g]; d != nil && (d.of != of || d.gate != g || d.pod.UID != uid) {
				return fmt.Errorf("%s is not where its drain is", uid)
			}
			for i, r := range of.received[g] {
				said++
				if !slices.ContainsFunc(of.drains[:], func(d *drain) bool { return d != nil && d.open }) {
					return fmt.Errorf("%s is heard of %s, which has no open drain", r.by.ID, uid)
				}
				misplaced := r.place != i || r.UID != uid || r.Gate != g
				if misplaced || r.by.reports[g][of] != r || w.agents[r.by.ID] != r.by {
					return fmt.Errorf("%s is heard of %s, and has said nothing", r.by.ID, uid)
				}
			}
		}
	}
	slots := 0
	for _, a := range w.agents {
		said -= len(a.reports[AtHold]) + len(a.reports[AtBarrier])
		if w.slots[a.slot] != a {
			return fmt.Errorf("%s is not in its slot", a.ID)
		}
	}
	for _, a := range w.slots {
		slots += number(a != nil)
	}
	if said != 0 || slots != len(w.agents) {
		return fmt.Errorf("%d reports are in one index only, %d slots are of %d agents", said, slots, len(w.agents))
	}
	return nil
}

// gated is a status at a gate.
type gated struct {
	gatedKey
	Status
}

// gatedKey names a drain.
type gatedKey struct {
	uid  UID
	gate Gate
}

// both returns every drain that is open, at each gate.
func (w *world) both() (all []gated) {
	for _, s := range w.all(AtHold) {
		all = append(all, gated{gatedKey{s.Pod.UID, AtHold}, s})
	}
	for _, s := range w.all(AtBarrier) {
		all = append(all, gated{gatedKey{s.Pod.UID, AtBarrier}, s})
	}
	return all
}

// step does one thing at random and says what.
func (w *world) step(r *rand.Rand, id AgentID, p Pod, some func() []Service) string {
	session := w.sessions[id]
	switch r.IntN(20) {
	case 14, 15:
		b := Barrier{Pod: p, By: id, Services: some(), Since: w.now, Bound: 30 * time.Second, Last: r.IntN(4) == 0,
			LastHere: r.IntN(4) == 0}
		w.OpenBarrier(w.now, b)
		return fmt.Sprintf("barrier %+v", b)
	case 16:
		return fmt.Sprintf("deleted %s: %t", p.UID, r.IntN(3) == 0 && w.GatePassed(w.now, AtBarrier, p.UID))
	case 17:
		w.sessions[id] = w.Connect(w.now, id, Hello{Boot: "boot", Observes: r.IntN(3) > 0})
		return fmt.Sprintf("connect %s, who may observe", id)
	case 18:
		declared := []Route{{EveryService, Endpoints, Observed}}
		if r.IntN(2) == 0 {
			declared = []Route{{web, Endpoints, Observed}, {api, Endpoints, Directed}}
		}
		w.Declare(id, session, []string{Nodes, "edge"}[r.IntN(2)], declared)
		return fmt.Sprintf("%s declares %v", id, declared)
	case 0:
		w.sessions[id] = w.Connect(w.now, id, Hello{})
		return fmt.Sprintf("connect %s", id)
	case 1:
		w.Disconnect(w.now, id, session)
		return fmt.Sprintf("disconnect %s", id)
	case 2, 3:
		declared := some()
		w.Declare(id, session, "", routes(declared...))
		return fmt.Sprintf("%s declares %v", id, declared)
	case 4:
		var expected []Expected
		for i := range 5 {
			if r.IntN(3) > 0 {
				expected = append(expected, Expected{ID: AgentID(fmt.Sprint("agent-", i)),
					Name: fmt.Sprint("edge/", r.IntN(3)), Ready: r.IntN(2) == 0, Label: Label(r.IntN(3))})
			}
		}
		w.Expect(w.now, expected)
		return fmt.Sprintf("expect %v", expected)
	case 5, 6:
		listed := some()
		w.ask(p, listed...)
		return fmt.Sprintf("ask %s in %v", p.UID, listed)
	case 7:
		return fmt.Sprintf("gone %s: %t", p.UID, r.IntN(4) == 0 && w.GatePassed(w.now, AtHold, p.UID))
	case 8:
		w.Tick(w.now)
		return fmt.Sprintf("tick, alive %s: %t", p.UID, w.NotTerminating(w.now, p.UID))
	case 9:
		return fmt.Sprintf("%s leaves: %t", id, w.Leave(id, session))
	case 10:
		w.sessions[id] = w.Connect(w.now, id, Hello{Boot: fmt.Sprint("boot-", r.IntN(2))})
		return fmt.Sprintf("connect %s", id)
	default:
		report := Report{UID: p.UID, State: State(r.IntN(5)), Number: uint64(r.IntN(5) / 4 * 99), Gate: Gate(r.IntN(2)),
			NoConnections: r.IntN(2) == 0}
		if r.IntN(2) == 0 {
			return w.sayUpTo(r, id, report)
		}
		w.report(id, report)
		return fmt.Sprintf("%s reports %v", id, report)
	}
}

// sayUpTo has an agent be told what there is, or not, and report all of it as in report, but for
// the pod of report in half of the cases.
func (w *world) sayUpTo(r *rand.Rand, id AgentID, report Report) string {
	if r.IntN(3) > 0 {
		w.ChangesFor(id, uint64(r.IntN(2))*w.rev/2)
	}
	told := uint64(0)
	if a := w.agents[id]; a != nil {
		told = a.told
	}
	up := &UpTo{Revision: told - uint64(r.IntN(3)), State: report.State}
	var but []Report
	if r.IntN(2) == 0 {
		report.State = State(r.IntN(5))
		if a := w.agents[id]; a != nil {
			if d := w.subjects[report.UID].about(a, report); d != nil {
				report.Number += d.number
			}
		}
		but = []Report{report}
	}
	asOf := w.now.Add(-time.Duration(r.IntN(2)) * time.Second)
	w.Report(w.now, asOf, id, w.sessions[id], up, but)
	return fmt.Sprintf("%s reports %v, but %v", id, *up, but)
}

// Without this, a call that is held is not woken when a gateway begins to route the pod again while
// another still has requests.
func TestAStepBackOfAnotherAgentIsTouched(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.join("two", web)
	w.ask(p, web)
	w.say("one", p, Removed)
	w.say("two", p, Idle)
	w.want(p, "Quiescing one:removed")
	w.Changed(AtHold)
	w.say("two", p, Removed)
	if got := w.Changed(AtHold); got != nil {
		t.Errorf("what changes no phase touched %v", got)
	}
	w.say("two", p, Routing)
	if got := w.Changed(AtHold); !slices.Equal(got, []UID{p.UID}) {
		t.Errorf("a step back touched %v", got)
	}
}

// An agent that keeps a drain in its phase may disappear without a report. Without this, a caller
// that has not looked at the drain meanwhile does not learn that the last report of the other
// agents mattered.
func TestTheLastWordMattersAfterAnotherHasLeft(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.join("two", web)
	w.ask(p, web)
	w.want(p, "Unrouting one:unknown two:unknown")
	w.Leave("one", w.sessions["one"])
	w.Changed(AtHold)
	w.say("two", p, Idle)
	if got := w.Changed(AtHold); !slices.Equal(got, []UID{p.UID}) {
		t.Errorf("the last word touched %v", got)
	}
}

// Agents that reported Removed and not Idle yet do not keep a drain from Quiescing, although they
// are waited for.
func TestTheLastRemovedTouches(t *testing.T) {
	w := newWorld(t)
	p := pod("a")
	w.join("one", web)
	w.join("two", web)
	w.ask(p, web)
	w.say("one", p, Removed)
	w.want(p, "Unrouting one:removed two:unknown")
	w.Changed(AtHold)
	w.say("two", p, Removed)
	if got := w.Changed(AtHold); !slices.Equal(got, []UID{p.UID}) {
		t.Errorf("the last to let go touched %v", got)
	}
	w.want(p, "Quiescing one:removed two:removed")
}

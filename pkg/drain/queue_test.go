package drain

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// usable are the targets of a Service, by the names of the pods.
func usable(s Service, names ...string) Targets {
	t := Targets{Service: s, Usable: []UID{}}
	for _, name := range names {
		t.Usable = append(t.Usable, pod(name).UID)
	}
	slices.Sort(t.Usable)
	return t
}

// phases prints the open drains, oldest first, as "a:Unrouting b:Queued".
func (w *world) phases() string {
	var all []string
	for _, s := range w.all(AtHold) {
		text := s.Pod.Name + ":" + s.Phase.String()
		if s.Reason != ReasonNone {
			text += "/" + s.Reason.String()
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

func (w *world) wantPhases(want string) {
	w.Helper()
	if got := w.phases(); got != want {
		w.Fatalf("at %s: %q, want %q", w.now.Sub(t0), got, want)
	}
}

// told lists the pods that an agent is asked to exclude.
func (w *world) told(id AgentID) string {
	open, _, _, _ := w.ChangesFor(id, 0)
	var names []string
	for _, o := range open {
		names = append(names, o.Pod.Name)
	}
	return strings.Join(names, " ")
}

func TestHalfOfAServiceIsDrainedAtOneTime(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	five := usable(web, "a", "b", "c", "d", "e")
	for _, name := range []string{"a", "b", "c", "d"} {
		w.Ask(w.now, pod(name), []Targets{five}, Place{})
		w.pass(time.Second)
	}
	w.wantPhases("a:Unrouting b:Unrouting c:Queued d:Queued")
	if got := w.told("one"); got != "a b" {
		t.Errorf("told of %q", got)
	}
	if !w.Pod(pod("c").UID).Queued || w.Pod(pod("a").UID).Queued || w.Pod("stranger").Queued {
		t.Error("Queued is wrong")
	}
	if s := w.Status(w.now, AtHold, pod("c").UID); !s.Waits() || s.Owed != 1 ||
		!s.Deadline.Equal(t0.Add(32*time.Second)) {
		t.Errorf("a queued drain: %+v", s)
	}
	// Acknowledged is still unrouted. There is room when the pod is known to go: it is no usable
	// target any more.
	w.say("one", pod("b"), Idle)
	w.wantPhases("a:Unrouting b:Released/Acknowledged c:Queued d:Queued")
	w.Changed(AtHold)
	w.Affected()
	w.GatePassed(w.now, AtHold, pod("b").UID)
	w.wantPhases("a:Unrouting c:Unrouting d:Queued")
	if got := w.Changed(AtHold); !slices.Contains(got, pod("c").UID) {
		t.Errorf("touched %v", got)
	}
	if got := w.Affected(); !slices.Equal(got, []AgentID{"one"}) {
		t.Errorf("concerned: %v", got)
	}
	if got := w.told("one"); got != "a c" {
		t.Errorf("told of %q", got)
	}
	// Four are left, so two is right. A replacement makes no more room, a second one does.
	w.Ask(w.now, pod("d"), []Targets{usable(web, "a", "c", "d", "e", "new")}, Place{})
	w.wantPhases("a:Unrouting c:Unrouting d:Queued")
	w.Ask(w.now, pod("d"), []Targets{usable(web, "a", "c", "d", "e", "new", "new2")}, Place{})
	w.wantPhases("a:Unrouting c:Unrouting d:Unrouting")
	// None that agents have been told of is queued, however few targets are left.
	w.Ask(w.now, pod("e"), []Targets{usable(web, "a", "c", "d", "e")}, Place{})
	w.wantPhases("a:Unrouting c:Unrouting d:Unrouting e:Queued")
}

// Pods of one scale-down go within milliseconds, and EndpointSlices tell of it later. Without this,
// each that goes lets one more be unrouted, until none is left.
func TestTheDeadAreNoTargets(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
	for _, name := range names {
		w.Ask(w.now, pod(name), []Targets{usable(web, names...)}, Place{})
		w.pass(time.Millisecond)
	}
	unrouted := func() int { return strings.Count(w.phases(), "Unrouting") }
	for gone, want := range []int{5, 4, 4, 3, 3, 2, 2, 1, 1, 0} { // not the last
		if got := unrouted(); got != want {
			t.Errorf("after %d have gone, %d of %d are unrouted, want %d", gone, got, len(names)-gone, want)
		}
		w.GatePassed(w.now, AtHold, pod(names[gone]).UID)
	}
	if got := w.phases(); got != "" {
		t.Errorf("left: %s", got)
	}
}

func TestWhatABoundIs(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 10: 5} {
		w := newWorld(t)
		w.join("one", web)
		var names []string
		for i := range n {
			names = append(names, fmt.Sprint("p", i))
		}
		for _, name := range names {
			w.Ask(w.now, pod(name), []Targets{usable(web, names...)}, Place{})
		}
		if got := strings.Count(w.phases(), "Unrouting"); got != want {
			t.Errorf("%d of %d are unrouted, want %d", got, n, want)
		}
	}
}

func TestQueuedDrainsEndLikeEveryOther(t *testing.T) {
	setup := func(t *testing.T) *world {
		w := newWorld(t)
		w.join("one", web)
		w.Ask(w.now, pod("a"), []Targets{usable(web, "a", "b")}, Place{})
		w.Ask(w.now, pod("b"), []Targets{usable(web, "a", "b")}, Place{})
		w.wantPhases("a:Unrouting b:Queued")
		return w
	}
	t.Run("deadline", func(t *testing.T) {
		w := setup(t)
		w.say("one", pod("a"), Idle)
		w.pass(30*time.Second - 1)
		if s := w.Status(w.now, AtHold, pod("b").UID); s.Phase != Queued || !s.Recheck.Equal(s.Deadline) {
			t.Errorf("%+v", s)
		}
		w.pass(1)
		if got := w.Status(w.now, AtHold, pod("b").UID); line(got) != "Released Deadline one:unknown" {
			t.Error(line(got))
		}
		if w.agents["one"].breaker.strikes != 0 || w.told("one") != "a" {
			t.Error("an agent is blamed for what it was not told, or told of it by its end")
		}
	})
	t.Run("dead", func(t *testing.T) {
		w := setup(t)
		w.GatePassed(w.now, AtHold, pod("b").UID)
		w.wantPhases("a:Unrouting")
		if _, released, _, _ := w.ChangesFor("one", 0); len(released) != 1 || !released[0].Terminating {
			t.Errorf("released %v", released)
		}
		w.GatePassed(w.now, AtHold, pod("a").UID)
		w.pass(10 * time.Minute)
		w.Tick(w.now)
		if len(w.queued)+len(w.usable)+len(w.subjects) != 0 {
			t.Error("something is kept")
		}
		w.Ask(w.now, pod("c"), []Targets{usable(web, "c", "d")}, Place{})
		w.wantPhases("c:Unrouting")
	})
	t.Run("abandoned, and asked for again", func(t *testing.T) {
		w := setup(t)
		w.Hold(pod("b").UID)(w.now, false)
		w.pass(10 * time.Second)
		w.Hold(pod("a").UID)(w.now, false)
		w.pass(35 * time.Second)
		if !w.NotTerminating(w.now, pod("b").UID) {
			t.Fatal("not abandoned")
		}
		w.Ask(w.now, pod("b"), []Targets{usable(web, "a", "b")}, Place{})
		w.wantPhases("a:Released/Deadline b:Queued")
		if got := w.told("one"); got != "a" {
			t.Errorf("told of %q", got)
		}
		w.pass(10 * time.Second)
		if !w.NotTerminating(w.now, pod("a").UID) {
			t.Fatal("not abandoned")
		}
		w.wantPhases("b:Unrouting")
	})
	t.Run("no agent must acknowledge it", func(t *testing.T) {
		w := setup(t)
		w.Leave("one", w.sessions["one"])
		w.wantPhases("a:Released/NoAgents b:Released/NoAgents")
	})
	t.Run("a dead pod leaves nothing behind", func(t *testing.T) {
		w := setup(t)
		w.GatePassed(w.now, AtHold, pod("a").UID)
		w.GatePassed(w.now, AtHold, pod("b").UID)
		w.Ask(w.now, pod("b"), []Targets{usable(web, "b")}, Place{})
		if len(w.usable) != 0 {
			t.Error("targets of a Service without drains are kept")
		}
	})
}

func TestWhoGoesNext(t *testing.T) {
	w := newWorld(t)
	w.join("one", web, api)
	inWeb, inAPI := usable(web, "w1", "w2", "both"), usable(api, "a1", "a2", "both")
	ask := func(name string, targets ...Targets) {
		w.Ask(w.now, pod(name), targets, Place{})
		w.pass(time.Second)
	}
	ask("w1", inWeb)
	ask("a1", inAPI)
	ask("both", inWeb, inAPI)
	ask("w2", inWeb)
	ask("a2", inAPI)
	w.wantPhases("w1:Unrouting a1:Unrouting both:Queued w2:Queued a2:Queued")
	// One that waits for both keeps no room free in either.
	w.GatePassed(w.now, AtHold, pod("w1").UID)
	w.wantPhases("a1:Unrouting both:Queued w2:Unrouting a2:Queued")
	w.GatePassed(w.now, AtHold, pod("w2").UID)
	w.wantPhases("a1:Unrouting both:Queued a2:Queued")
	// Both have room: the oldest.
	w.GatePassed(w.now, AtHold, pod("a1").UID)
	w.wantPhases("both:Unrouting a2:Queued")
	w.GatePassed(w.now, AtHold, pod("both").UID)
	w.wantPhases("a2:Queued") // the last
	w.Ask(w.now, pod("a2"), []Targets{usable(api, "a2", "new")}, Place{})
	w.wantPhases("a2:Unrouting")
}

// The pod of a queued drain may be the last target when there is capacity for it: agents would be
// told to exclude it before a replacement is ready, and its caller may have given up.
func TestTheLastTargetDoesNotLeaveTheQueueByItself(t *testing.T) {
	for name, c := range map[string]struct {
		routed []Service
		more   []Targets
		want   string
	}{
		"the only one left":                   {[]Service{web}, nil, "b:Queued"},
		"another is left in its other":        {[]Service{web, api}, []Targets{usable(api, "b", "c")}, "b:Unrouting"},
		"another is left where no agent goes": {[]Service{web}, []Targets{usable(api, "b", "c")}, "b:Queued"},
		"its other is not known":              {[]Service{web, api}, []Targets{{Service: api}}, "b:Unrouting"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.join("one", c.routed...)
			w.Ask(w.now, pod("a"), []Targets{usable(web, "a", "b")}, Place{})
			w.Ask(w.now, pod("b"), append(c.more, usable(web, "a", "b")), Place{})
			w.wantPhases("a:Unrouting b:Queued")
			w.GatePassed(w.now, AtHold, pod("a").UID)
			w.Tick(w.now)
			w.wantPhases(c.want)
		})
	}
	t.Run("another replica excludes it", func(t *testing.T) {
		w := newWorld(t)
		w.join("one", web)
		w.Ask(w.now, pod("b"), []Targets{usable(web, "a", "b")}, Place{Is: Deferred})
		w.GatePassed(w.now, AtHold, pod("a").UID)
		w.Ask(w.now, pod("b"), []Targets{usable(web, "b")}, Place{Is: Granted})
		w.wantPhases("b:Unrouting")
	})
}

func TestWhatTakesNoRoom(t *testing.T) {
	w := newWorld(t)
	w.join("one", web, api)
	w.Ask(w.now, pod("a"), []Targets{usable(web, "a", "b")}, Place{})
	// It is not ready, or its Service's targets are not known.
	w.Ask(w.now, pod("unready"), []Targets{usable(web, "a", "b")}, Place{})
	w.ask(pod("x"), api)
	w.Ask(w.now, pod("y"), []Targets{{Service: api}}, Place{})
	w.wantPhases("a:Unrouting unready:Unrouting x:Unrouting y:Unrouting")
	// It is found in a Service that is full, and is unrouted already.
	w.Ask(w.now, pod("x"), []Targets{usable(web, "a", "b", "x")}, Place{})
	w.wantPhases("a:Unrouting unready:Unrouting x:Unrouting y:Unrouting")
	// It takes capacity there from then on. It would also if only agents had reported it.
	w.GatePassed(w.now, AtHold, pod("a").UID)
	w.Ask(w.now, pod("b"), []Targets{usable(web, "b", "x", "z")}, Place{})
	w.wantPhases("b:Queued unready:Unrouting x:Unrouting y:Unrouting")
	w.GatePassed(w.now, AtHold, pod("x").UID)
	w.wantPhases("b:Unrouting unready:Unrouting y:Unrouting")
	w.GatePassed(w.now, AtHold, pod("b").UID)
	w.say("one", pod("y"), Idle)
	w.Ask(w.now, pod("c"), []Targets{usable(web, "c", "y", "z")}, Place{})
	if !w.Pod(pod("c").UID).Queued {
		t.Error("a pod that is unrouted for another Service takes no room")
	}
	// What is asked for without targets is bounded by those that are known: a door is a door.
	w.ask(pod("z"), web)
	if !w.Pod(pod("z").UID).Queued {
		t.Error("who names no targets is not bounded")
	}
	w.GatePassed(w.now, AtHold, pod("z").UID)
	w.GatePassed(w.now, AtHold, pod("c").UID)
	w.GatePassed(w.now, AtHold, pod("y").UID)
	// Its drain began before its Service listed it, and no agent has said anything of it.
	w.ask(pod("early"), api)
	w.Ask(w.now, pod("d"), []Targets{usable(web, "d", "early", "z")}, Place{})
	if !w.Pod(pod("d").UID).Queued {
		t.Error("a pod that is being unrouted for another Service, of which no agent has told yet, takes no room")
	}
}

// Replicas that did not agree for a while keep the bound together: each tells the others what it
// unroutes.
func TestOtherReplicasDrainsTakeRoom(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	targets := usable(web, "a", "b", "c", "d", "e")
	w.Polled(w.now, []Shared{{Drains: []Claim{{Pod: pod("a")}, {Pod: pod("stranger")}, {Pod: pod("e"), Queued: true}}}},
		false)
	w.Ask(w.now, pod("b"), []Targets{targets}, Place{})
	w.Ask(w.now, pod("c"), []Targets{targets}, Place{})
	w.wantPhases("b:Unrouting c:Queued")
	// Another replica excludes what is queued here: it takes no more capacity, and the callers here
	// wait for it.
	w.Changed(AtHold)
	w.Polled(w.now, []Shared{{Drains: []Claim{{Pod: pod("a")}, {Pod: pod("c")}}}}, false)
	w.wantPhases("b:Unrouting c:Unrouting")
	if got := w.Changed(AtHold); !slices.Contains(got, pod("c").UID) {
		t.Errorf("touched %v", got)
	}
	w.Ask(w.now, pod("d"), []Targets{targets}, Place{})
	w.wantPhases("b:Unrouting c:Unrouting d:Queued")
	w.GatePassed(w.now, AtHold, pod("b").UID)
	w.wantPhases("c:Unrouting d:Queued")
	// What another replica does not tell any more is over there.
	w.Polled(w.now, []Shared{{Drains: nil}}, false)
	w.wantPhases("c:Unrouting d:Unrouting")
}

// A container that is about to be stopped goes by what the opener has said of the pod's drain.
func TestARestartLeavesThePlaceAsItIs(t *testing.T) {
	w := newWorld(t)
	w.join("one", web)
	targets := []Targets{usable(web, "a", "b")}
	w.Ask(w.now, pod("a"), targets, Place{Is: Deferred})
	w.Ask(w.now, pod("a"), targets, Place{Restart: true})
	w.wantPhases("a:Queued")
}

// After any sequence of events: no drain is queued while each of its Services has capacity. A drain
// that starts leaves each Service that it needs capacity of within its bound, and leaves no older
// drain queued that needs capacity of the same Services, or of some of them. A drain needs capacity
// only of Services that its calls have named, and takes it of every Service that has its pod as
// usable: a Service that was not named may get beyond its bound.
func TestTheBoundHolds(t *testing.T) {
	all := []string{"a", "b", "c", "d", "e", "f", "g"}
	letIn := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		w := newWorld(t)
		w.join("one", web, api)
		some := func(s Service) Targets {
			return usable(s, slices.DeleteFunc(slices.Clone(all), func(string) bool { return r.IntN(3) == 0 })...)
		}
		for step := range 100 {
			w.pass(time.Duration(r.IntN(1000)) * time.Millisecond)
			queued, unrouted := map[UID]bool{}, map[UID]bool{}
			for _, s := range w.all(AtHold) {
				is := w.at(AtHold, s.Pod.UID).queued
				queued[s.Pod.UID], unrouted[s.Pod.UID] = is, !is
			}
			p := pod(all[r.IntN(len(all))])
			p.UID += UID(fmt.Sprint("-", step/20))
			var did string
			switch r.IntN(4) {
			case 0:
				did = fmt.Sprint("gone ", p.UID, w.GatePassed(w.now, AtHold, p.UID))
			case 1:
				w.Tick(w.now)
				did = "tick"
			default:
				var targets []Targets
				for _, s := range []Service{web, api}[r.IntN(2):] {
					t := some(s)
					for i := range t.Usable {
						t.Usable[i] += UID(fmt.Sprint("-", step/20))
					}
					targets = append(targets, t)
				}
				did = fmt.Sprint("ask ", p.UID, targets)
				w.Ask(w.now, p, targets, Place{})
			}
			needs := map[*drain][]Service{}
			var started []*drain
			for _, s := range w.all(AtHold) {
				d := w.at(AtHold, s.Pod.UID)
				needs[d] = []Service{}
				if !d.queued && !unrouted[d.pod.UID] {
					started = append(started, d)
				}
				full := false
				for of := range d.services {
					if w.needsRoom(d, of) {
						needs[d] = append(needs[d], of)
						full = full || w.room(of) <= 0
					}
				}
				if d.queued && !full && !w.isLast(d) {
					t.Fatalf("seed %d step %d, %s: %s waits and need not", seed, step, did, d.pod.UID)
				}
			}
			for _, d := range started {
				if queued[d.pod.UID] {
					letIn++
				}
				for _, of := range needs[d] {
					room := w.room(of)
					for _, other := range started {
						if w.needsRoom(other, of) && !other.services[of] {
							room++
						}
					}
					if room < 0 {
						t.Fatalf("seed %d step %d, %s: %s was let in, and %s is beyond its bound by %d", seed, step,
							did, d.pod.UID, of, -room)
					}
				}
				for other, services := range needs {
					more := slices.ContainsFunc(services, func(s Service) bool { return !slices.Contains(needs[d], s) })
					if other.queued && other.since.Before(d.since) && !more {
						t.Fatalf("seed %d step %d, %s: %s was let in before %s, which is older and waits for no other "+
							"Service", seed, step, did, d.pod.UID, other.pod.UID)
					}
				}
			}
		}
	}
	if letIn == 0 {
		t.Error("no drain was let in from the queue")
	}
}

package health

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// everySecond is a check whose thresholds are two of each kind.
var everySecond = Check{Protocol: TCP, Interval: time.Second, Timeout: time.Second, Thresholds: Thresholds{2, 2, 2, 2}}

// checked is a world that serves targets in pool web, all of them healthy.
func checked(t testing.TB, targets string) *world {
	t.Helper()
	w := serving(t, targets)
	w.SetCheck(w.now, "web", everySecond)
	w.probe(2, "")
	for text := range strings.FieldsSeq(targets) {
		w.verdict(text, Healthy)
	}
	return w
}

// probe lets n intervals pass and answers what is due: with a refused connection for the targets in
// failing, with a success for all others.
func (w *world) probe(n int, failing string) {
	w.Helper()
	for range n * 100 {
		w.pass(10 * time.Millisecond)
		jobs, _ := w.Due(w.now, nil, 1000)
		for _, j := range jobs {
			o := Outcome{Kind: Success}
			for text := range strings.FieldsSeq(failing) {
				if j.Key.Target == targetOf(text) {
					o = Outcome{TCPFailure, 111}
				}
			}
			if !w.Report(w.now, j, o) {
				w.Fatalf("the outcome for %s does not count", j.Key)
			}
		}
	}
}

func (w *world) verdict(text string, want Verdict) {
	w.Helper()
	if v, ok := w.detail(Key{"web", targetOf(text)}); !ok || v.Verdict != want {
		w.Fatalf("%s is %s (known: %t), want %s", text, v.Verdict, ok, want)
	}
}

// why checks why the targets of web have traffic or not, written as "a:chosen b:unhealthy".
func (w *world) why(want string) {
	w.Helper()
	var got []string
	for _, d := range w.Targets() {
		got = append(got, string(d.Target.UID)+":"+d.Why.String())
	}
	if strings.Join(got, " ") != want {
		w.Fatalf("got %q, want %q", strings.Join(got, " "), want)
	}
}

func TestTheUnhealthyAreTakenOutAndComeBack(t *testing.T) {
	w := checked(t, "a b c")
	w.probe(2, "a")
	w.verdict("a", Unhealthy)
	select {
	case <-w.Work():
	default:
		t.Fatal("Work is not signalled")
	}
	w.pending("removed web/10.0.0.1:80@a")
	w.settle()
	w.routed("web", "b c")
	w.why("a:unhealthy b:chosen c:chosen")
	w.probe(1, "")
	w.verdict("a", MostlyUnhealthy)
	w.pending("")
	w.probe(1, "")
	w.settle()
	w.routed("web", "a b c")
	w.why("a:chosen b:chosen c:chosen")
}

func TestTooFewUsableFailOpen(t *testing.T) {
	w := checked(t, "a b c d")
	w.probe(2, "a b")
	w.settle()
	w.routed("web", "c d") // half is not fewer than half
	w.probe(2, "a b c")
	w.settle()
	w.routed("web", "a b c d")
	w.why("a:failing-open b:failing-open c:failing-open d:chosen")
	if c := w.Counts()["web"]; !c.FailingOpen || c.Unusable != 3 {
		t.Fatalf("%+v, want 3 that are not usable, failing open", c)
	}
	w.probe(2, "")
	w.settle()
	w.why("a:chosen b:chosen c:chosen d:chosen")
	w.probe(2, "a b c d")
	w.settle()
	w.routed("web", "a b c d")
}

func TestThePercentageOfUsableTargetsIsAParameter(t *testing.T) {
	for percent, want := range map[int]string{1: "b", 25: "b", 26: "a b c d", 100: "a b c d"} {
		w := newWorld(t)
		w.Set = New(Options{UsablePercent: percent})
		w.list("web", ready("a b c d"))
		w.Synced()
		w.SetCheck(w.now, "web", everySecond)
		w.settle()
		w.probe(2, "a c d")
		w.settle()
		w.routed("web", want)
	}
}

// Without it a pod that is being let go comes back to clients whenever the others are sick.
func TestFailOpenNeverIncludesTheExcluded(t *testing.T) {
	w := checked(t, "a b c")
	w.exclude("a", "r")
	w.settle()
	w.states("a:idle")
	w.probe(2, "b c")
	w.settle()
	w.routed("web", "b c")
	w.why("a:excluded b:failing-open c:failing-open")
	w.states("a:idle")
}

func TestAnExclusionTouchesNoHealth(t *testing.T) {
	w := checked(t, "a b c d")
	w.probe(2, "a")
	w.settle()
	since := w.Targets()[0].Since
	w.exclude("a", "r")
	w.exclude("b", "r")
	w.settle()
	w.probe(3, "a") // they are probed all the while
	w.verdict("a", Unhealthy)
	w.verdict("b", Healthy)
	w.Readmit("a", "r")
	w.Readmit("b", "r")
	w.settle()
	w.routed("web", "b c d")
	w.why("a:unhealthy b:chosen c:chosen d:chosen")
	if got := w.Targets()[0].Since; !got.Equal(since) {
		t.Fatalf("unhealthy since %s, want %s", got, since)
	}
}

// A gateway that refuses the healthy one must not lose the other.
func TestNothingGoesForItsHealthUntilAChosenOneIsRouted(t *testing.T) {
	w := checked(t, "a")
	w.proxy.refuse[Key{"web", targetOf("b")}] = true
	w.proxy.refuse[Key{"web", targetOf("c")}] = true
	w.list("web", ready("a b c"))
	w.probe(2, "a")
	w.settle()
	w.routed("web", "a")
	w.why("a:held-back b:pending c:pending")
	clear(w.proxy.refuse)
	w.settle()
	w.routed("web", "b c")
}

// The last that works is kept, even beside one that does not.
func TestAnExcludedTargetIsKeptUntilAChosenOneIsRouted(t *testing.T) {
	w := checked(t, "a b c d")
	for _, text := range []string{"c", "d"} {
		w.proxy.refuse[Key{"web", targetOf(text)}] = true
		w.proxy.now[Key{"web", targetOf(text)}].routed = false
	}
	w.proxy.generation++
	w.settle()
	w.routed("web", "a b")
	w.probe(2, "b")
	w.settle()
	w.routed("web", "a")
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.why("a:kept b:unhealthy c:pending d:pending")
	clear(w.proxy.refuse)
	w.settle()
	w.states("a:idle")
	w.routed("web", "c d")
}

// Both are let go at once, and the sick one was asked for last: kept is the one that answers, and
// stays so while the other is sick.
func TestOfTwoBuriedAtOnceTheHealthyOneIsKept(t *testing.T) {
	w := checked(t, "a b c")
	w.probe(2, "b c") // failing open, so that b and c are routed still
	w.settle()
	w.routed("web", "a b c")
	for _, uid := range []UID{"a", "c", "b"} {
		w.exclude(uid, "r")
	}
	w.settle()
	w.states("a:kept b:idle c:idle")
	w.routed("web", "a")
	w.probe(2, "a")
	w.settle()
	w.routed("web", "a") // the others are out: there is nothing to change to
	w.states("a:kept b:idle c:idle")
}

// An outage must not begin early: where all others are sick, the last that is well stays, and they
// stay out for their health, until another one is well or the pod dies.
func TestTheLastUsableTargetIsKept(t *testing.T) {
	w := checked(t, "a b")
	w.probe(2, "b")
	w.settle()
	w.routed("web", "a")
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.routed("web", "a")
	w.why("a:kept b:unhealthy")
	if w.Counts()["web"].FailingOpen {
		t.Fatal("the drain has tipped the pool into failing open")
	}
	w.probe(2, "")
	w.settle()
	w.states("a:idle")
	w.routed("web", "b")
	w.probe(2, "b")
	w.settle()
	w.states("a:idle") // it is out: nothing brings it back
	w.why("a:excluded b:failing-open")
}

// The same when there are so many sick ones that the pool fails open: beside them the one that is
// well stays.
func TestTheLastUsableTargetIsKeptBesideThoseThatFailOpen(t *testing.T) {
	w := checked(t, "a b c d")
	w.probe(2, "b c d")
	w.settle()
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.why("a:kept b:failing-open c:failing-open d:failing-open")
	w.probe(2, "a b c d")
	w.settle()
	w.states("a:idle") // it is no better than the others now
	w.routed("web", "b c d")
	w.Readmit("a", "r")
	w.settle()
	w.probe(2, "b c d")
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.MarkTerminating(w.now, "a")
	w.settle()
	w.routed("web", "b c d")
}

// A new pod is usable until probes say otherwise: a rollout in which all old ones but the last are
// sick goes on.
func TestANewPodIsWellEnoughForTheLastToGo(t *testing.T) {
	w := checked(t, "a b")
	w.probe(2, "b")
	w.settle()
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.list("web", ready("a b c"))
	w.settle()
	w.states("a:idle")
	w.routed("web", "c")
}

// The checks of an agent that starts may be known only after the gateway was first read.
func TestWhomAnEarlierAgentTookOutStaysOutUnderALateCheck(t *testing.T) {
	start := func() *world {
		w := newWorld(t)
		for _, text := range []string{"a", "b"} {
			w.proxy.now[Key{"web", targetOf(text)}] = &server{routed: text != "a"}
		}
		w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
		w.read(nil)
		return w
	}
	w := start()
	w.SetCheck(w.now, "web", everySecond)
	w.list("web", ready("a b"))
	w.Synced()
	w.settle()
	w.routed("web", "b")
	w.why("a:unproven b:chosen")
	w.SetCheck(w.now, "web", Check{})
	w.settle()
	w.routed("web", "a b")

	// Without a check there is no doubt, nor is one that has been routed since in doubt.
	w = start()
	w.list("web", ready("a b"))
	w.Synced()
	w.settle()
	w.routed("web", "a b")
	w.SetCheck(w.now, "web", everySecond)
	w.settle()
	w.routed("web", "a b")
}

// An agent that starts has no verdicts. Whom the one before it had taken out stays out until a
// probe succeeds, and everybody else goes on.
func TestWhomAnEarlierAgentTookOutStaysOutUntilAProbeSucceeds(t *testing.T) {
	start := func(c Check) *world {
		w := newWorld(t)
		for _, text := range []string{"a", "b", "c"} {
			w.proxy.now[Key{"web", targetOf(text)}] = &server{routed: text != "a"}
		}
		w.SetCheck(w.now, "web", c)
		w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
		w.read(nil)
		w.list("web", ready("a b c d"))
		w.Synced()
		w.settle()
		return w
	}
	w := start(everySecond)
	w.routed("web", "b c d")
	w.why("a:unproven b:chosen c:chosen d:chosen")
	w.probe(1, "a")
	w.settle()
	w.routed("web", "b c d")
	w.why("a:unproven b:chosen c:chosen d:chosen")
	w.probe(1, "a")
	w.settle()
	w.routed("web", "b c d")
	w.why("a:unhealthy b:chosen c:chosen d:chosen")
	w.probe(2, "")
	w.settle()
	w.routed("web", "a b c d")

	w = start(everySecond)
	w.probe(1, "")
	w.settle()
	w.routed("web", "a b c d")

	// A drain that is given up is no proof.
	w = start(everySecond)
	w.exclude("a", "r")
	w.settle()
	w.Readmit("a", "r")
	w.settle()
	w.routed("web", "b c d")

	// It was probed before the gateway was first read, as by an agent that waits for its
	// coordinators: it fails open like the others.
	w = newWorld(t)
	w.SetCheck(w.now, "web", everySecond)
	w.list("web", ready("a b c d"))
	w.Synced()
	w.probe(2, "a b c")
	for _, text := range []string{"a", "b", "c"} {
		w.proxy.now[Key{"web", targetOf(text)}] = &server{routed: text != "a"}
	}
	w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
	w.settle()
	w.routed("web", "a b c d")

	// No other is routable: it is better than nothing.
	w = start(everySecond)
	w.list("web", ready("a"))
	w.settle()
	w.routed("web", "a")

	// Without probes there would never be a proof.
	w = start(Check{})
	w.routed("web", "a b c d")
	w = start(everySecond)
	w.SetCheck(w.now, "web", Check{})
	w.settle()
	w.routed("web", "a b c d")

	// What is taken out later, by hand, or in another process, is brought back as ever.
	w = start(everySecond)
	w.proxy.now[Key{"web", targetOf("b")}].routed = false
	w.proxy.generation++
	w.settle()
	w.routed("web", "b c d")
}

// Only what was out before this agent could have had a hand in it, and without an exclusion, was
// taken out for a reason that it does not know.
func TestWhoWasTakenOutForAKnownReasonNeedsNoProof(t *testing.T) {
	w := newWorld(t)
	w.proxy.now[Key{"web", targetOf("a")}] = &server{}
	w.proxy.now[Key{"web", targetOf("b")}] = &server{routed: true}
	w.SetCheck(w.now, "web", everySecond)
	w.exclude("a", "r") // as the journal says
	w.list("web", ready("a b"))
	w.Synced()
	w.settle()
	w.Readmit("a", "r")
	w.settle()
	w.routed("web", "a b")

	// It has come since, and is halfway in.
	w.list("web", ready("a b c"))
	w.Pending()
	w.proxy.now[Key{"web", targetOf("c")}] = &server{}
	w.read(nil)
	w.pending("routed web/10.0.0.3:80@c")
	w.settle()
	w.routed("web", "a b c")

	// Another process has something of its own.
	w.proxy.reload(true)
	w.proxy.now[Key{"web", targetOf("d")}] = &server{}
	w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
	w.list("web", ready("a b c d"))
	w.read(nil)
	w.settle()
	w.routed("web", "a b c d")
}

// Where only sick ones would be left, the one that is well is kept, even if some process lacks it
// and none lacks a sick one.
func TestTheUsableOneIsKeptAlthoughAProcessLacksIt(t *testing.T) {
	w := checked(t, "a b c")
	w.probe(2, "b c")
	w.settle()
	w.exclude("a", "r")
	w.exclude("b", "r")
	o := w.proxy.read(w.now, []Key{{"web", targetOf("a")}, {"web", targetOf("b")}, {"web", targetOf("c")}})
	seen := o.Seen[Key{"web", targetOf("a")}]
	seen.Missing = true
	o.Seen[Key{"web", targetOf("a")}] = seen
	w.Observe(w.now, o)
	w.why("a:kept b:excluded c:held-back")
}

func TestAChangedCheckKeepsTheVerdictUntilItHasItsOwn(t *testing.T) {
	w := checked(t, "a b c")
	w.probe(2, "a")
	w.verdict("a", Unhealthy)
	jobs := w.jobs()
	w.SetCheck(w.now, "web", everySecond) // the same: nothing happens
	for _, j := range jobs[1:] {
		if !w.Report(w.now, j, Outcome{Kind: Success}) {
			t.Fatalf("an unchanged check voided %s", j.Key)
		}
	}
	other := everySecond
	other.Port = 8080
	w.SetCheck(w.now, "web", other)
	if w.Report(w.now, jobs[0], Outcome{Kind: Success}) {
		t.Fatal("an outcome of the old check counts")
	}
	w.verdict("a", Unhealthy)
	w.probe(1, "a")
	w.verdict("a", Unhealthy)
	w.verdict("b", Healthy)
	w.probe(1, "b")
	w.verdict("a", Unhealthy) // one success of its own
	w.probe(1, "b")
	w.verdict("a", Healthy)
	w.verdict("b", Unhealthy)
	w.SetCheck(w.now, "web", Check{})
	if _, next := w.Due(w.now.Add(time.Hour), nil, 10); !next.IsZero() {
		t.Fatalf("without a check there is something to ask for at %s", next)
	}
	w.verdict("b", VerdictUnknown) // no probe would ever find it well again
	w.settle()
	w.routed("web", "a b c")
}

// jobs takes one probe of each target, unanswered.
func (w *world) jobs() []Job {
	var jobs []Job
	for range 100 {
		w.pass(10 * time.Millisecond)
		jobs, _ = w.Due(w.now, jobs, 1000)
	}
	slices.SortFunc(jobs, func(a, b Job) int { return compareKeys(a.Key, b.Key) })
	return jobs
}

func TestLateOutcomesChangeNothing(t *testing.T) {
	w := checked(t, "a b")
	w.probe(1, "a")
	jobs := w.jobs()
	if len(jobs) != 2 || jobs[0].Key.Target != targetOf("a") || *jobs[0].Check != everySecond {
		t.Fatalf("jobs are %v", jobs)
	}
	w.list("web", ready("b"))
	w.list("web", ready("a b")) // it has left, and come back
	if w.Report(w.now, jobs[0], Outcome{Kind: Timeout}) {
		t.Fatal("the outcome counts although its target had left")
	}
	if !w.Report(w.now, jobs[1], Outcome{Kind: Success}) || w.Report(w.now, jobs[1], Outcome{Kind: Success}) {
		t.Fatal("an outcome does not count exactly once")
	}
	w.list("web", ready("b"))
	w.settle()
	w.list("web", ready("b 10.0.0.1:80@new"))
	for n := range 10 { // whatever place it has now
		if w.Report(w.now, Job{Ticket: uint64(n)<<32 | jobs[0].Ticket&0xffffffff}, Outcome{Kind: Timeout}) {
			t.Fatal("the outcome counts for another target")
		}
	}
	if w.Report(w.now, Job{Ticket: 1 << 63}, Outcome{}) || w.Report(w.now, Job{Ticket: 9999 << 32}, Outcome{}) {
		t.Fatal("a ticket that was never given counts")
	}
}

// APISIX #13029: its checker is made again whenever endpoints change, and what it knew of an
// address is lost, or believed of the next pod.
func TestAPISIX13029(t *testing.T) {
	const again = "10.0.0.1:80@new"
	for name, c := range map[string]func(w *world){
		"a new pod at the address of an unhealthy one": func(w *world) {
			w.list("web", ready("b c "+again), dying("a"))
		},
		"the old pod leaves first": func(w *world) {
			w.list("web", ready("b c"))
			w.settle()
			w.list("web", ready("b c "+again))
		},
		"the new pod comes first, both present at once": func(w *world) {
			w.list("web", ready("a b c "+again))
			w.verdict("a", Unhealthy)
			w.verdict(again, VerdictUnknown)
			w.settle()
			w.routed("web", "b c "+again)
			w.list("web", ready("b c "+again))
		},
		"as a difference": func(w *world) {
			w.Change(w.now, "web", []Change{
				{Endpoint: Endpoint{Target: targetOf(again), Routable: true}},
				{Endpoint: Endpoint{Target: targetOf("a")}, Unlisted: true},
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := checked(t, "a b c")
			w.probe(2, "a")
			w.probe(1, "a b")
			w.verdict("a", Unhealthy)
			w.settle()
			late := w.jobs()
			c(w)
			w.verdict(again, VerdictUnknown)
			w.verdict("b", MostlyHealthy) // who stays keeps all it had
			w.verdict("c", Healthy)
			w.settle()
			w.routed("web", "b c "+again)
			for _, j := range late {
				w.Report(w.now, j, Outcome{Kind: Timeout})
			}
			w.verdict(again, VerdictUnknown)
			w.probe(2, again)
			w.verdict(again, Unhealthy)
			if d := w.Targets()[0]; d.Target != targetOf(again) || d.Counters.TCPFailures != 2 {
				t.Fatalf("%+v, want two failures of its own", d)
			}
		})
	}
	t.Run("survivors are not touched by the endpoints of others", func(t *testing.T) {
		w := checked(t, "a b c")
		w.probe(1, "a")
		before := w.Targets()
		jobs := w.jobs()
		w.list("web", ready("a b c d"))
		w.list("web", ready("a b c"))
		w.list("api", ready("a b"))
		w.settle()
		for _, d := range w.Targets() {
			if d.Pool == "web" &&
				(d.Verdict != before[0].Verdict || d.Counters != before[0].Counters ||
					!d.Since.Equal(before[0].Since)) {
				t.Errorf("%+v, want %+v", d, before[0])
			}
			if d.Pool == "web" {
				before = before[1:]
			}
		}
		for _, j := range jobs {
			if !w.Report(w.now, j, Outcome{Kind: Success}) {
				t.Errorf("the probe of %s was voided", j.Key)
			}
		}
	})
}

// Without a renewal it is not known either whether the pod stays.
func TestALapsedExclusionNeedsASuccess(t *testing.T) {
	lapsed := func(t *testing.T) *world {
		w := serving(t, "a b")
		w.SetCheck(w.now, "web", everySecond)
		w.exclude("a", "r")
		w.settle()
		w.pass(2 * time.Minute)
		w.Lapse(w.now)
		w.settle()
		w.states("")
		w.routed("web", "b")
		w.why("a:lapsed b:chosen")
		return w
	}
	t.Run("a success", func(t *testing.T) {
		w := lapsed(t)
		w.list("web", ready("a b")) // to be listed as before is no success
		w.Synced()
		w.probe(1, "a")
		w.settle()
		w.routed("web", "b")
		w.why("a:unhealthy b:chosen")
		w.probe(2, "") // it may have failed twice
		w.settle()
		w.routed("web", "a b")
	})
	t.Run("a coordinator", func(t *testing.T) {
		w := lapsed(t)
		w.exclude("a", "r2")
		w.Readmit("a", "r2")
		w.settle()
		w.routed("web", "a b")
	})
	t.Run("it leaves and comes back", func(t *testing.T) {
		w := lapsed(t)
		w.list("web", ready("b"))
		w.list("web", ready("a b")) // as new as any other
		w.settle()
		w.routed("web", "a b")
	})
	t.Run("all are unhealthy", func(t *testing.T) { // it is no worse than the others, which serve
		w := lapsed(t)
		w.probe(10, "a b")
		w.settle()
		w.routed("web", "a b")
		w.why("a:failing-open b:failing-open")
	})
	t.Run("all were unhealthy before", func(t *testing.T) {
		w := serving(t, "a b")
		w.SetCheck(w.now, "web", everySecond)
		w.probe(10, "a b")
		w.exclude("a", "r")
		w.settle()
		w.pass(2 * time.Minute)
		w.Lapse(w.now)
		w.settle()
		w.routed("web", "a b")
	})
	t.Run("no other is routable", func(t *testing.T) {
		w := lapsed(t)
		w.Change(w.now, "web", []Change{{Endpoint: Endpoint{Target: targetOf("b")}, Unlisted: true}})
		w.settle()
		w.routed("web", "a")
	})
}

// An endpoint of a Service without a selector has no pod: an exclusion of no pod at all does not
// take it out.
func TestAnEndpointWithoutAPodIsNotTakenOut(t *testing.T) {
	w := serving(t, "a 10.0.0.9:80@")
	w.exclude("", "r")
	w.settle()
	w.routed("web", "a 10.0.0.9:80@")
}

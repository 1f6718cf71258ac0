package drain

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestWordsAreOfThoseWhoOwe(t *testing.T) {
	w := newWorld(t)
	w.join("a", web)
	w.join("b", web)
	w.join("other", api)
	p := pod("x")
	w.ask(p, web)
	w.say("a", p, Idle)
	w.say("other", p, Removed)
	see := func(want string) {
		t.Helper()
		v, _ := w.View(w.now, AtHold, p.UID, 10)
		var got []string
		for _, word := range v.Reports {
			got = append(got, fmt.Sprintf("%s %s", word.Agent, word.State))
		}
		if text := strings.Join(got, ", "); text != want {
			t.Errorf("words %q, want %q", text, want)
		}
	}
	see("b unknown, a idle")
	if v, _ := w.View(w.now, AtHold, p.UID, 1); len(v.Reports) != 1 {
		t.Errorf("cut to one: %v", v.Reports)
	}
	// What is too old to count is not said any more.
	w.pass(w.times.Freshness + 1)
	see("a unknown, b unknown")
	w.GatePassed(w.now, AtHold, p.UID)
	see("")
}

func TestOnlyElsewhere(t *testing.T) {
	w := newWorld(t)
	w.ask(pod("here"), web)
	w.Polled(w.now, []Shared{{Drains: []Claim{{Pod: pod("here")}, {Pod: pod("there")},
		{Pod: pod("waits there"), Queued: true}}}}, false)
	if got := w.Counts().Elsewhere; got != 1 {
		t.Errorf("%d pods are unrouted by other replicas alone, want there", got)
	}
	if w.Polled(w.now, []Shared{{Drains: nil}}, false); w.Counts().Elsewhere != 0 {
		t.Errorf("%d pods after the others have closed their drains", w.Counts().Elsewhere)
	}
}

// Who would be asked, by which gate, and who cannot vouch for anything.
func TestAcknowledgers(t *testing.T) {
	w := newWorld(t)
	w.Expect(w.now, []Expected{
		{ID: "directed", Name: "edge/directed", Ready: true, Label: LabelDirected},
		{ID: "observed", Name: "edge/following", Ready: true, Label: LabelObserved},
		{ID: "unlabelled", Name: "edge/unlabelled", Ready: true}, {ID: "away", Name: "edge/away", Label: LabelDirected},
	})
	w.join("other", api)
	w.join("hap", web)
	w.sessions["kp"] = w.Connect(w.now, "kp", Hello{})
	w.Declare("kp", w.sessions["kp"], Nodes, []Route{{web, Endpoints, Observed}})
	w.sessions["node"] = w.Connect(w.now, "node", Hello{})
	w.Declare("node", w.sessions["node"], Nodes, []Route{{EveryService, Endpoints, Observed}})
	w.sessions["mesh"] = w.Connect(w.now, "mesh", Hello{})
	w.Declare("mesh", w.sessions["mesh"], "", []Route{{web, ClusterIP, Directed}})
	w.join("left", web)
	w.Leave("left", w.sessions["left"])
	see := func() string {
		var all []string
		for _, p := range w.Acknowledgers(w.now, []Service{web}) {
			all = append(all, fmt.Sprintf("%s hold=%t barrier=%t undeclared=%t", p.Name, p.Hold, p.Barrier,
				!p.Declared))
		}
		return strings.Join(all, "\n")
	}
	want := `edge/away hold=true barrier=false undeclared=true
edge/directed hold=true barrier=false undeclared=true
edge/following hold=false barrier=true undeclared=true
edge/unlabelled hold=true barrier=true undeclared=true
hap hold=true barrier=false undeclared=false
kp hold=false barrier=true undeclared=false
mesh hold=false barrier=false undeclared=false
node hold=false barrier=true undeclared=false`
	if got := see(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	w.pass(w.times.Away + time.Second)
	if got := see(); !strings.Contains(got, "edge/away hold=false") {
		t.Errorf("one that is away for long:\n%s", got)
	}
	// The same agents owe a drain of such a pod.
	status := w.ask(pod("x"), web)
	var owed []string
	for _, waiting := range status.Waiting {
		owed = append(owed, waiting.Name)
	}
	if got, want := strings.Join(owed, " "), "edge/directed edge/unlabelled hap"; got != want {
		t.Errorf("the drain is owed by %q, want %q", got, want)
	}
}

// A barrier that only observes lets no hook wait.
func TestNoViewOfWhatIsObserved(t *testing.T) {
	w := newWorld(t)
	w.observe("node-1")
	for name, observes := range map[string]bool{"a": false, "b": true} {
		w.open(pod(name), "node-1", func(b *Barrier) { b.Observe = observes })
		if _, ok := w.View(w.now, AtBarrier, pod(name).UID, 10); ok == observes {
			t.Errorf("a barrier that observes, %t: there is a view, %t", observes, ok)
		}
	}
}

func TestOldest(t *testing.T) {
	w := newWorld(t)
	w.join("a", web)
	for _, name := range []string{"c", "a", "b"} {
		w.ask(pod(name), web)
		w.pass(time.Second)
	}
	w.GatePassed(w.now, AtHold, "uid-a")
	if got, open, _ := w.Oldest(AtHold, 10); fmt.Sprint(got) != "[uid-c uid-b]" || open != 2 {
		t.Errorf("%v of %d", got, open)
	}
	// A pod that may stop does not hide one that waits.
	w.say("a", pod("c"), Idle)
	w.want(pod("c"), "Released Acknowledged")
	if got, open, waiting := w.Oldest(AtHold, 1); fmt.Sprint(got) != "[uid-b]" || open != 2 || waiting != 1 {
		t.Errorf("cut to one: %v of %d, %d wait", got, open, waiting)
	}
}

package drain

import (
	"testing"
	"time"
)

// An agent declares one Service more. The drains of that are told again with a revision that the
// agent has read before, and what it has said of that revision before it reads them must not count.
func TestWhatWasSaidBeforeADeclarationDoesNotAcknowledgeWhatItAdds(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	// The drain of api is the older one: edge is not told of it.
	p, q := pod("p"), pod("q")
	w.ask(p, api)
	w.want(p, "Released NoAgents")
	w.ask(q, web)
	open, _, read, _ := w.ChangesFor("edge", 0)
	if len(open) != 1 || open[0].Pod != q {
		t.Fatalf("told %v", open)
	}
	repeat, ok := w.Declare("edge", w.sessions["edge"], "", routes(web, api))
	if !repeat || !ok {
		t.Fatal(repeat, ok)
	}
	w.want(p, "Unrouting edge:unknown")
	// The stream's goroutine takes what it will write next: p and q.
	open, _, next, _ := w.ChangesFor("edge", 0)
	if len(open) != 2 {
		t.Fatalf("told %v", open)
	}
	t.Logf("the agent has read %d, it is being told %d", read, next)
	// On its way meanwhile is the line that edge wrote when it had read of q alone.
	w.Report(w.now, w.now, "edge", w.sessions["edge"], &UpTo{Revision: read, State: Idle}, nil)
	w.want(q, "Released Acknowledged")
	w.want(p, "Unrouting edge:unknown")
}

// The same at the start of a session, on which the agent declares more than it did on the last one.
func TestASessionThatDeclaresMoreDoesNotAcknowledgeWhatItHasNotRead(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p, q := pod("p"), pod("q")
	w.ask(p, api)
	w.ask(q, web)
	w.sessions["edge"] = w.Connect(w.now, "edge", Hello{Boot: "another"})
	_, _, read, _ := w.ChangesFor("edge", 0)
	w.Declare("edge", w.sessions["edge"], "", routes(web, api))
	w.ChangesFor("edge", 0)
	w.Report(w.now, w.now, "edge", w.sessions["edge"], &UpTo{Revision: read, State: Idle}, nil)
	w.want(p, "Unrouting edge:unknown")
}

// The newest drain that an agent was told of is forgotten. What it is told again later has a lower
// revision, and must count.
func TestWhatIsToldAgainWithALowerRevisionIsAcknowledged(t *testing.T) {
	w := newWorld(t)
	w.join("edge", web)
	p, q := pod("p"), pod("q")
	w.OpenBarrier(w.now, Barrier{Pod: p, By: "node", Services: []Service{web}, Since: w.now, Bound: 30 * time.Second})
	w.ask(q, web)
	_, _, told, rev := w.ChangesFor("edge", 0)
	say := func(revision uint64) {
		w.Report(w.now, w.now, "edge", w.sessions["edge"], &UpTo{Revision: revision, State: Idle}, nil)
	}
	say(told)
	w.GatePassed(w.now, AtHold, q.UID)
	w.ChangesFor("edge", rev)
	w.pass(10*time.Minute + time.Second)
	w.Tick(w.now) // q is forgotten, p is not yet
	w.Declare("edge", w.sessions["edge"], "", routes(web, api))
	open, _, again, _ := w.ChangesFor("edge", 0)
	t.Logf("told %v at %d, before at %d", open, again, told)
	say(again)
	if got := line(w.Status(w.now, AtBarrier, p.UID)); got != "Released Acknowledged" {
		t.Errorf("p is %q", got)
	}
}

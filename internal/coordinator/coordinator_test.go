package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Each test runs in a bubble of fake time. The bubble fails if a goroutine is left when the test
// has ended, so that each of them proves as well that nothing leaks.

func TestAHeldCallIsReleasedByTheLastAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one, two := n.agent("one", []drain.Service{web}, "replica-0"),
			n.agent("two", []drain.Service{web, store}, "replica-0")
		n.agent("other", []drain.Service{store}, "replica-0")
		synctest.Wait()
		if !one.learned() || r.metric("lameduck_agents", "connected") != 3 {
			t.Fatal("the agents are not connected")
		}
		p := pod("a")
		held := r.hold(p, web)
		for _, a := range []*agent{one, two} {
			if got := a.exclusions.holders(p); got != "replica-0/a" {
				t.Fatalf("the exclusion is held by %q", got)
			}
		}
		if got := r.metric("lameduck_holds"); got != 1 {
			t.Errorf("%v calls are held", got)
		}
		one.say(p, drain.Idle)
		two.say(p, drain.Routing)
		stillHeld(t, held)
		time.Sleep(700 * time.Millisecond)
		two.say(p, drain.Removed)
		if got := r.metric("lameduck_drains", "Quiescing"); got != 1 {
			t.Errorf("%v drains are Quiescing", got)
		}
		stillHeld(t, held)
		two.say(p, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 700ms")
		if got := r.metric("lameduck_holds"); got != 0 {
			t.Errorf("%v calls are held at the end", got)
		}
		answered(t, r.hold(p, web), "Released Acknowledged held=false after 0s")
		if got := r.metric("lameduck_drain_phase_seconds", "Released", "Acknowledged"); got != 1 {
			t.Errorf("released %v times", got)
		}

		r.GatePassed(p.UID)
		synctest.Wait()
		if one.exclusions.holders(p) != "" || !one.exclusions.isDead(p) {
			t.Error("the agent does not know that the pod is dead")
		}
		if got := r.metric("lameduck_drains", "Released"); got != 0 {
			t.Errorf("%v drains are open at the end", got)
		}
		// A deletion after the pod is deleted asks no agent.
		answered(t, r.hold(p, web), "Closed PodDeleted held=false after 0s")
	})
}

func TestACallIsHeldNoLongerThanItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{web}, "replica-0")
		p := pod("a")
		held := r.hold(p, web)
		time.Sleep(2*time.Second - 1)
		stillHeld(t, held)
		time.Sleep(1)
		answered(t, held, "Unrouting None held=true after 2s")
		status, wasHeld, err := r.Drain(t.Context(), requestOf(p, web), time.Now())
		if status.Phase != drain.Unrouting || wasHeld || err != nil {
			t.Errorf("without time: %s, held %t, %v", status.Phase, wasHeld, err)
		}

		ctx, cancel := context.WithCancel(t.Context())
		go func() { time.Sleep(time.Second); cancel() }()
		began := time.Now()
		status, _, err = r.Drain(ctx, requestOf(p, web), time.Now().Add(2*time.Second))
		if status.Phase != drain.Unrouting || !errors.Is(err, context.Canceled) || time.Since(began) != time.Second {
			t.Errorf("given up: %s, %v after %s", status.Phase, err, time.Since(began))
		}
	})
}

// The steps of others may hold the lock for longer than the API server waits. A release that no
// caller has received counts as a deletion that something else refused, and after two of them the
// pod's next one does not wait.
func TestACallerThatHasGoneIsNotAllowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newNetwork(t).replica("replica-0", "a") // without agents each drain is released at once
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		status, held, err := r.Drain(ctx, requestOf(pod("a"), web), time.Now().Add(time.Second))
		if status.Phase != drain.Released || held || !errors.Is(err, context.Canceled) {
			t.Errorf("%s, held %t, %v", status.Phase, held, err)
		}
	})
}

// Without this, the one release that operators must know of is in no metric and no log: no event
// occurs at the deadline.
func TestTheDeadlineReleasesAndIsWrittenDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("silent", []drain.Service{web}, "replica-0")
		p := pod("a")
		began := time.Now()
		for {
			held := r.hold(p, web)
			a := <-held
			if a.err != nil {
				t.Fatal(a.err)
			}
			if a.Phase == drain.Released {
				if a.Reason != drain.Deadline || time.Since(began) != 30*time.Second || len(a.Waiting) != 1 ||
					a.Waiting[0].Agent != "silent" {
					t.Errorf("%s after %s, waiting for %v", a, time.Since(began), a.Waiting)
				}
				break
			}
			time.Sleep(900 * time.Millisecond) // so that time is up while a call is held
		}
		if got := r.metric("lameduck_drain_phase_seconds", "Released", "Deadline"); got != 1 {
			t.Errorf("%v releases by the deadline were counted", got)
		}
		if got := r.metric("lameduck_drains", "Released"); got != 1 {
			t.Errorf("%v drains are Released", got)
		}
	})
}

func TestALostStreamVoidsWhatWasReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		r.Expect([]drain.Expected{{ID: "one", Name: "edge/one", Ready: true}})
		one := n.agent("one", []drain.Service{web}, "replica-0")
		p := pod("a")
		held := r.hold(p, web)
		one.say(p, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")

		n.Cut("replica-0")
		synctest.Wait()
		held = r.hold(p, web)
		stillHeld(t, held)
		if got := r.metric("lameduck_agents", "missing"); got != 1 {
			t.Errorf("%v agents are missing", got)
		}
		if one.exclusions.holders(p) == "" {
			t.Error("the exclusion went with the stream")
		}
		time.Sleep(100 * time.Millisecond) // the first pause is shorter
		if a := taken(t, held); a.Reason != drain.Acknowledged || a.took > 100*time.Millisecond {
			t.Errorf("after the reconnection: %s", a)
		}
		if opened, ended := one.streams(); opened != 2 || ended != 1 {
			t.Errorf("%d streams were opened, %d ended", opened, ended)
		}
	})
}

func TestTheEndsOfADrainReachTheAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		dead, kept, gone := pod("dead"), pod("kept"), pod("gone")
		for _, p := range []drain.Pod{dead, kept, gone} {
			held := r.hold(p, web)
			one.say(p, drain.Idle)
			answered(t, held, "Released Acknowledged held=true after 0s")
		}
		r.GatePassed(dead.UID)
		synctest.Wait()
		if one.exclusions.holders(dead) != "" || !one.exclusions.isDead(dead) {
			t.Error("dead: still excluded, or not dead")
		}
		// No caller asks any more, and the API server does not answer: nothing is concluded, and
		// exclusions are renewed.
		time.Sleep(2 * time.Minute)
		if one.exclusions.holders(kept) == "" || one.exclusions.holders(gone) == "" {
			t.Fatal("an exclusion was readmitted without knowledge")
		}
		if until := time.Until(one.exclusions.expires(kept, "replica-0/a")); until < 58*time.Second {
			t.Errorf("the exclusion expires in %s already", until)
		}
		r.lives.set(kept.UID, Living)
		r.lives.set(gone.UID, Leaving)
		time.Sleep(3 * time.Second)
		if one.exclusions.holders(kept) != "" || one.exclusions.isDead(kept) {
			t.Error("kept: still excluded, or dead")
		}
		if one.exclusions.holders(gone) != "" || !one.exclusions.isDead(gone) {
			t.Error("gone: still excluded, or not dead")
		}
		if got := len(r.Pod(kept.UID).Refused); got != 1 {
			t.Errorf("%d drains of a pod that lives on were allowed", got)
		}
		if got := r.metric("lameduck_drains", "Released"); got != 0 {
			t.Errorf("%v drains are open at the end", got)
		}
	})
}

func TestADrainIsNotAbandonedEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		p := pod("a")
		r.lives.set(p.UID, Living)
		answered := r.hold(p, web)
		<-answered // after 2 s
		time.Sleep(44 * time.Second)
		if one.exclusions.holders(p) == "" || r.lives.reads != 0 {
			t.Fatal("looked into before 45 s have passed since the answer")
		}
		<-r.hold(p, web)
		time.Sleep(44 * time.Second)
		if one.exclusions.holders(p) == "" {
			t.Fatal("abandoned although it was asked for 44 s ago")
		}
		time.Sleep(2 * time.Second)
		if one.exclusions.holders(p) != "" {
			t.Fatal("not abandoned")
		}
		// The gateway routes the pod again and says nothing of it. That is not an acknowledgement.
		stillHeld(t, r.hold(p, web))
		time.Sleep(2 * time.Second)
	})
}

// backAfter returns after how long the agent excludes p no more, rounded up to seconds, and 0 if
// that takes longer than 5 min.
func (a *agent) backAfter(p drain.Pod) time.Duration {
	for s := time.Second; s <= 5*time.Minute; s += time.Second {
		time.Sleep(time.Second)
		if a.exclusions.holders(p) == "" {
			return s
		}
	}
	return 0
}

// Without this, a pod that is not deleted stays out of traffic: for as long as the API server does
// not answer, even if it was only refused, and for 45 s after an operator has pressed Ctrl-C.
func TestAPodThatIsNotDeletedGetsItsTrafficBack(t *testing.T) {
	p := pod("a")
	drained := func(r *replica, until time.Duration) {
		r.Drain(context.Background(), requestOf(p, web), time.Now().Add(until))
	}
	denied := func(r *replica, _ *agent) { drained(r, 2*time.Second) }
	brokenOff := func(r *replica, _ *agent) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		r.Drain(ctx, requestOf(p, web), time.Now().Add(2*time.Second))
	}
	allowed := func(r *replica, a *agent) {
		held := r.hold(p, web)
		synctest.Wait()
		a.say(p, drain.Idle)
		<-held
	}
	late := func(r *replica, _ *agent) { drained(r, -time.Second) }
	restarted := func(r *replica, _ *agent) {
		r.change(func() {
			r.core.ask(time.Now(), p, requestOf(p, web).Targets, drain.Place{Restart: true, Stopped: time.Now()})
		})
	}
	adopted := func(r *replica, _ *agent) {
		r.Polled([]wire.Replica{{Shared: drain.Shared{Drains: []drain.Claim{
			{Pod: p, Services: []drain.Service{web}}}}}}, true)
	}
	type calls = []func(*replica, *agent)
	for name, c := range map[string]struct {
		calls calls
		away  bool
		want  time.Duration
	}{
		"denied":                             {calls{denied}, false, 45 * time.Second},
		"denied, API server away":            {calls{denied}, true, 79 * time.Second},
		"broken off":                         {calls{brokenOff}, false, 10 * time.Second},
		"broken off, and repeated":           {calls{brokenOff, denied}, false, 45 * time.Second},
		"broken off, API server away":        {calls{denied, brokenOff}, true, 79 * time.Second},
		"allowed":                            {calls{allowed}, false, 45 * time.Second},
		"allowed, API server away":           {calls{denied, allowed}, true, 0},
		"allowed, then denied, API away":     {calls{allowed, late, denied}, true, 0},
		"answered late, API server away":     {calls{denied, late}, true, 0},
		"adopted, API server away":           {calls{adopted, denied}, true, 0},
		"container stopped, API server away": {calls{restarted}, true, 79 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				r := n.replica("replica-0", "a")
				one := n.agent("one", []drain.Service{web}, "replica-0")
				synctest.Wait()
				if !c.away {
					r.lives.set(p.UID, Living)
				}
				for _, call := range c.calls {
					call(r, one)
				}
				synctest.Wait()
				if one.exclusions.holders(p) == "" {
					t.Fatal("not excluded")
				}
				if got := one.backAfter(p); got < c.want || got > c.want+2*time.Second || c.want == 0 && got != 0 {
					t.Errorf("back after %s, want %s", got, c.want)
				}
			})
		})
	}
}

func TestStopAnswersWhatIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		p := pod("a")
		held := r.hold(p, web)
		r.Stop()
		answered(t, held, "Unrouting None held=true after 0s: this replica is shutting down")
		answered(t, r.hold(pod("b"), web), "Unrouting None held=false after 0s: this replica is shutting down")
		one.exclusions.say(p.UID, drain.Idle)
		r.Stop()
		r.end()
		if one.exclusions.holders(p) != "replica-0/a" {
			t.Error("the exclusion went with the replica")
		}
		if opened, ended := one.streams(); opened != ended {
			t.Errorf("%d of %d streams have ended", ended, opened)
		}
	})
}

// Without this, a rollout of the coordinator allows what it holds: the streams end, agents that the
// API does not list are no longer owed, and a held call that is woken by that must not take it for
// a release.
func TestWhatChangesWhileStoppingReleasesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		p := pod("a")
		r.Expect([]drain.Expected{{ID: "one", Ready: true}})
		held := r.hold(p, web)
		r.mu.Lock()
		r.core.Ledger.Expect(time.Now(), nil)
		r.settle() // wakes the held call
		r.core.stopped = true
		close(r.stop)
		r.mu.Unlock()
		answered(t, held, "Released NoAgents held=true after 0s: this replica is shutting down")
	})
}

func TestTooManyHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", func(o *Options) { o.MaxHolds = 2 })
		one := n.agent("one", []drain.Service{web}, "replica-0")
		first, second := r.hold(pod("a"), web), r.hold(pod("b"), web)
		answered(t, r.hold(pod("c"), web), "Unrouting None held=false after 0s: too many deletions are held by this "+
			"replica")
		if one.exclusions.holders(pod("c")) == "" {
			t.Error("the drain does not run on")
		}
		one.say(pod("c"), drain.Idle)
		answered(t, r.hold(pod("c"), web), "Released Acknowledged held=false after 0s")
		one.say(pod("a"), drain.Idle)
		answered(t, first, "Released Acknowledged held=true after 0s")
		third := r.hold(pod("d"), web)
		stillHeld(t, third)
		time.Sleep(2 * time.Second)
		<-second
		<-third
	})
}

// The API server has a few more seats for deletions than a replica holds calls. If each replica
// held those that it meets first, their calls together would take all seats, and of 500 deletions
// at one moment the last would be known here after 12 s.
func TestReplicasHoldTheSamePods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		opener := n.replica("replica-0", "a", func(o *Options) { o.MaxHolds = 2 })
		n.agent("one", []drain.Service{web}, "replica-0")
		claim := func(name string) bool {
			_, crowded := opener.Claim(requestOf(pod(name), web))
			return crowded == nil
		}
		// A witness meets them in this order, the opener's own calls come in another one.
		if !claim("a") || !claim("b") || claim("c") {
			t.Error("the first two that are asked for are to be held")
		}
		for _, name := range []string{"c", "d"} {
			answered(t, opener.hold(pod(name), web),
				"Unrouting None held=false after 0s: too many deletions are held by this replica")
		}
		stillHeld(t, opener.hold(pod("b"), web))
		stillHeld(t, opener.hold(pod("a"), web))
		time.Sleep(turnKept + 2*time.Second)
		if !claim("c") {
			t.Error("the turn of a pod that is asked for no more is kept")
		}
	})
}

func TestReplicasReleaseTheirOwnExclusionsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		a, b := n.replica("replica-0", "a"), n.replica("replica-1", "b")
		one := n.agent("one", []drain.Service{web}, "replica-0", "replica-1")
		p, q := pod("p"), pod("q")
		for _, asked := range []drain.Pod{p, q} {
			held := a.hold(asked, web)
			one.say(asked, drain.Idle)
			answered(t, held, "Released Acknowledged held=true after 0s")
		}
		// The other replica sees the drains in the reports. It counts them only once its own
		// exclusion stands, which takes one exchange and no time.
		if status := b.drainOnce(p); status.Phase != drain.Unrouting {
			t.Errorf("replica-1 spends an acknowledgement of replica-0's exclusion: %s", status.Phase)
		}
		if a := taken(t, b.hold(p, web)); a.Reason != drain.Acknowledged || a.took != 0 {
			t.Errorf("replica-1 is told %s", a)
		}
		if got := one.exclusions.holders(p); got != "replica-0/a replica-1/b" {
			t.Errorf("held by %q", got)
		}

		// replica-0 restarts. It knows of no drain, and readmits nothing of its former life.
		a.end()
		a = n.replica("replica-0", "a2")
		time.Sleep(3 * time.Second)
		if got := a.metric("lameduck_agents", "connected"); got != 1 {
			t.Fatalf("%v agents are connected", got)
		}
		if got := one.exclusions.holders(p); got != "replica-0/a replica-1/b" {
			t.Errorf("after a restart held by %q", got)
		}
		if got := one.exclusions.holders(q); got != "replica-0/a" {
			t.Errorf("after a restart held by %q", got)
		}
		// It adopts the clock.
		b.locked(func() { a.Polled([]wire.Replica{{Shared: b.core.Ledger.Shared(time.Now())}}, true) })
		status := a.drainOnce(p)
		if age := time.Since(status.Since).Round(100 * time.Millisecond); age != 3*time.Second {
			t.Errorf("the drain's clock starts %s ago, want 3s", age)
		}

		// replica-1 abandons, replica-0's new life holds on.
		b.lives.set(p.UID, Living)
		a.lives.set(p.UID, Living)
		for range 25 {
			time.Sleep(2 * time.Second)
			a.drainOnce(p)
		}
		synctest.Wait()
		if got := one.exclusions.holders(p); got != "replica-0/a replica-0/a2" {
			t.Errorf("after replica-1 has abandoned it, held by %q", got)
		}
	})
}

// drainOnce asks without waiting.
func (r *replica) drainOnce(p drain.Pod) drain.Status {
	r.t.Helper()
	status, _, err := r.Drain(r.t.Context(), requestOf(p, web), time.Now())
	if err != nil {
		r.t.Error(err)
	}
	return status
}

func TestAnAgentThatDoesNotReadIsCutAndDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		r.Expect([]drain.Expected{{ID: "stuck", Ready: true, Label: drain.LabelObserved}})
		n.open("stuck", "replica-0")
		good := n.agent("good", []drain.Service{web}, "replica-0")
		if got := r.metric("lameduck_agents", "connected"); got != 2 {
			t.Fatalf("%v agents are connected", got)
		}
		began := time.Now()
		for _, name := range []string{"a", "b", "c"} {
			held := r.hold(pod(name), web)
			good.say(pod(name), drain.Idle)
			answered(t, held, "Released Acknowledged held=true after 0s")
		}
		if time.Since(began) != 0 {
			t.Errorf("three drains took %s", time.Since(began))
		}
		time.Sleep(writeTimeout)
		synctest.Wait()
		if got := r.metric("lameduck_agents", "connected"); got != 1 {
			t.Errorf("%v agents are connected, want the one that reads", got)
		}
	})
}

func TestSilenceMakesTheAgentReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		time.Sleep(61 * time.Second) // the last heartbeat was 1 s ago
		if opened, ended := one.streams(); opened != 1 || ended != 0 {
			t.Fatalf("heartbeats do not keep the stream: %d were opened, %d ended", opened, ended)
		}
		n.Swallow("replica-0")
		time.Sleep(3900 * time.Millisecond)
		if _, ended := one.streams(); ended != 0 {
			t.Fatal("given up before the time that the coordinator named")
		}
		time.Sleep(300 * time.Millisecond)
		if opened, ended := one.streams(); opened != 2 || ended != 1 {
			t.Fatalf("%d streams were opened, %d ended", opened, ended)
		}
		p := pod("a")
		held := r.hold(p, web)
		one.say(p, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
	})
}

func TestANewerStreamOfAnAgentEndsTheFormer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		former := n.open("one", "replica-0")
		hello, _ := former.next(t)
		if hello.Type != wire.TypeHello || hello.Hello.Holder != (drain.Holder{Replica: "replica-0", Epoch: "a"}) ||
			hello.Hello.Session == 0 {
			t.Fatalf("first message: %+v", hello)
		}
		if m, ok := former.next(t); !ok || m.Type != wire.TypeSynced {
			t.Fatalf("second message: %+v", m)
		}
		newer := n.open("one", "replica-0")
		again, _ := newer.next(t)
		if again.Hello.Session <= hello.Hello.Session {
			t.Errorf("session %d follows %d", again.Hello.Session, hello.Hello.Session)
		}
		if m, ok := former.next(t); ok {
			t.Errorf("the former stream goes on: %+v", m)
		}
		synctest.Wait()
		if got := r.metric("lameduck_agents", "connected"); got != 1 {
			t.Errorf("%v streams are counted", got)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if !r.core.Ledger.Current("one", again.Hello.Session) {
			t.Error("the end of the former stream has ended the newer session")
		}
	})
}

func TestTheStreamTellsOpenDrainsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		r.Unroute(requestOf(pod("a"), web))
		r.Unroute(requestOf(pod("b"), web))
		r.GatePassed(pod("a").UID)
		s := n.open("one", "replica-0")
		var got []wire.Type
		next := func() wire.Message {
			m, ok := s.next(t)
			if !ok {
				t.Fatal("the stream has ended")
			}
			got = append(got, m.Type)
			return m
		}
		next()
		drained := func(want drain.Pod) {
			t.Helper()
			m := next()
			if m.Type != wire.TypeDrains || len(m.Drains.Pods) != 1 {
				t.Fatalf("%+v", m)
			}
			if d, err := m.Drains.Open(0); err != nil || d.Pod != want {
				t.Errorf("%+v, %v", d, err)
			}
		}
		drained(pod("b"))
		if m := next(); m.Type != wire.TypeReleases || !slices.Equal(m.Releases.UIDs, []drain.UID{"uid-a"}) ||
			!m.Releases.Terminating {
			t.Errorf("%+v", m)
		}
		next()
		began := time.Now()
		if m := next(); m.Type != wire.TypeHeartbeat || time.Since(began) != 2*time.Second {
			t.Errorf("%+v after %s", m, time.Since(began))
		}
		r.Unroute(requestOf(pod("c"), web))
		drained(pod("c"))
		want := []wire.Type{"hello", "drains", "releases", "synced", "heartbeat", "drains"}
		if !slices.Equal(got, want) {
			t.Errorf("messages %q, want %q", got, want)
		}
	})
}

// slow is a log that blocks.
type slow struct{ slog.Handler }

func (slow) Enabled(context.Context, slog.Level) bool { return true }
func (slow) Handle(context.Context, slog.Record) error {
	time.Sleep(time.Hour) // in a bubble
	return nil
}

// Without this, a container runtime that does not take the log in time stops every deletion in the
// cluster.
func TestALogThatBlocksStopsItsWriterOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", func(o *Options) { o.Log = slog.New(slow{slog.DiscardHandler}) })
		began := time.Now()
		done := make(chan struct{})
		go func() {
			r.Unroute(requestOf(pod("a"), web))
			close(done)
		}()
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("the transition was not logged")
		default:
		}
		if got := r.Pod("uid-a"); !got.Draining || r.Pod("uid-b").Draining || time.Since(began) != 0 {
			t.Errorf("draining %v after %s", got, time.Since(began))
		}
		<-done
	})
}

func TestRunWaitsForNothingAtItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		held := r.hold(pod("a"), web)
		began := time.Now()
		r.end()
		one.end()
		if took := time.Since(began); took > time.Second {
			t.Errorf("the end took %s", took)
		}
		answered(t, held, "Unrouting None held=true after 0s: this replica is shutting down")
	})
}

// Without this, each deletion waits up to the deadline for agents whose gateways have gone.
func TestAnAgentThatLeavesIsOwedNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		a, b := n.replica("replica-0", "a"), n.replica("replica-1", "b")
		for _, r := range []*replica{a, b} {
			r.Expect([]drain.Expected{{ID: "one", Name: "edge/one", Ready: true},
				{ID: "two", Name: "edge/two", Ready: true}})
		}
		one := n.agent("one", []drain.Service{web}, "replica-0", "replica-1")
		two := n.agent("two", []drain.Service{web}, "replica-0", "replica-1")
		p := pod("a")
		held := a.hold(p, web)
		two.say(p, drain.Idle)
		stillHeld(t, held)
		if err := one.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		answered(t, held, "Released Acknowledged held=true after 0s")
		held = b.hold(pod("b"), web)
		two.say(pod("b"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
		// Its streams go on, and when they break it does not come back and declare.
		if _, ended := one.streams(); ended != 0 {
			t.Errorf("%d streams have ended", ended)
		}
		n.Cut("replica-0")
		time.Sleep(3 * time.Second)
		if opened, _ := one.streams(); opened != 2 {
			t.Errorf("%d streams were opened", opened)
		}
		if _, missing := a.Expecting(); missing != 0 {
			t.Errorf("%d agents are missing", missing)
		}
		held = a.hold(pod("c"), web)
		two.say(pod("c"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
		// It declares again.
		again := n.agent("one", []drain.Service{web}, "replica-0")
		held = a.hold(pod("d"), web)
		two.say(pod("d"), drain.Idle)
		stillHeld(t, held)
		again.say(pod("d"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
	})
}

func TestLeaveTakesNoLongerThanItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0", "replica-1")
		n.Swallow("replica-0")
		began := time.Now()
		err := one.Leave(t.Context())
		if took := time.Since(began); err == nil || took > 5*time.Second ||
			!strings.Contains(err.Error(), "leave http://replica-1:9444: no stream is open") {
			t.Errorf("%v after %s", err, took)
		}
	})
}

// Without this, the rollout of one Deployment with many pods takes every hold, and the pods of all
// others are refused at once.
func TestTooManyHoldsOfOneOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", func(o *Options) { o.MaxHolds, o.MaxHoldsPerOwner = 4, 2 })
		one := n.agent("one", []drain.Service{web}, "replica-0")
		hold := func(name, owner string) <-chan answer {
			answers := make(chan answer, 1)
			began := time.Now()
			go func() {
				var a answer
				a.Status, a.held, a.err = r.Drain(t.Context(),
					Request{Pod: pod(name), Owner: owner, Targets: targetsOf(web)}, began.Add(2*time.Second))
				a.took = time.Since(began)
				answers <- a
			}()
			synctest.Wait()
			return answers
		}
		first := hold("a", "ReplicaSet/1")
		hold("b", "ReplicaSet/1")
		refused := taken(t, hold("c", "ReplicaSet/1"))
		if !errors.Is(refused.err, ErrTooManyHolds) || !errors.Is(refused.err, ErrTooManyOfOwner) || refused.held {
			t.Errorf("the third of one owner: %s", refused)
		}
		if one.exclusions.holders(pod("c")) == "" {
			t.Error("its drain does not run on")
		}
		stillHeld(t, hold("d", "ReplicaSet/2"))
		stillHeld(t, hold("e", ""))
		if a := taken(t, hold("f", "ReplicaSet/2")); !errors.Is(a.err, ErrTooManyHolds) ||
			errors.Is(a.err, ErrTooManyOfOwner) {
			t.Errorf("the fifth of the replica: %s", a)
		}
		one.say(pod("a"), drain.Idle)
		answered(t, first, "Released Acknowledged held=true after 0s")
		again := hold("c", "ReplicaSet/1")
		stillHeld(t, again)
		time.Sleep(2 * time.Second)
		answered(t, again, "Unrouting None held=true after 2s")
		if r.core.holds != 0 {
			t.Errorf("%d holds are counted at the end", r.core.holds)
		}
		time.Sleep(turnKept + 2*Tick)
		pods, _ := r.tick(time.Now())
		r.look(t.Context(), pods)
		if len(r.core.turns) != 0 {
			t.Errorf("the turns of owners %v are kept at the end", r.core.turns)
		}
	})
}

func TestAQueuedDrainIsHeldAndTakesItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		targets := []drain.Targets{{Service: web, Usable: []drain.UID{"uid-a", "uid-b", "uid-c"}}}
		r.Unroute(Request{Pod: pod("a"), Targets: targets})
		synctest.Wait()
		held := make(chan answer, 1)
		go func() {
			var a answer
			began := time.Now()
			a.Status, a.held, a.err = r.Drain(t.Context(), Request{Pod: pod("b"), Targets: targets},
				began.Add(2*time.Second))
			a.took = time.Since(began)
			held <- a
		}()
		stillHeld(t, held)
		if one.exclusions.holders(pod("b")) != "" || !r.Pod("uid-b").Queued ||
			r.metric("lameduck_drains", "Queued") != 1 {
			t.Error("it does not wait for room")
		}
		time.Sleep(time.Second)
		r.GatePassed("uid-a")
		synctest.Wait()
		if one.exclusions.holders(pod("b")) == "" || r.metric("lameduck_drains", "Queued") != 0 {
			t.Error("there is room, and the agent is not told")
		}
		one.say(pod("b"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 1s")
	})
}

// Another pod of the Service is ready, and a gateway does not route it yet: it keeps this one, and
// the deletion waits for that.
func TestAGatewayThatKeepsItsLastTargetHoldsTheDeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		late := n.agent("late", []drain.Service{web}, "replica-0")
		two := n.agent("two", []drain.Service{web}, "replica-0")
		held := r.hold(pod("a"), web)
		two.say(pod("a"), drain.Idle)
		late.say(pod("a"), drain.Kept)
		stillHeld(t, held)
		time.Sleep(2 * time.Second)
		a := taken(t, held)
		if len(a.Waiting) != 1 || a.Waiting[0] != (drain.Waiting{Agent: "late", Name: "late", State: drain.Kept,
			Connected: true}) {
			t.Errorf("waiting for %+v", a.Waiting)
		}
		held = r.hold(pod("a"), web)
		late.say(pod("a"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")

		// If it never does, time releases as ever, and says who kept it.
		r.hold(pod("b"), web)
		two.say(pod("b"), drain.Idle)
		late.say(pod("b"), drain.Kept)
		time.Sleep(29 * time.Second)
		held = r.hold(pod("b"), web)
		time.Sleep(time.Second)
		a = taken(t, held)
		if a.Reason != drain.Deadline || len(a.Waiting) != 1 || a.Waiting[0].State != drain.Kept {
			t.Errorf("%s, waiting for %+v", a, a.Waiting)
		}
	})
}

// A report is as old as the last message that its agent had received, and one without a time is
// taken as made now. A time that was not sent on the stream counts for nothing: one of the future
// would make a report count when its exclusion has expired.
func TestTheClockOfTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		began := time.Now()
		at := r.core.clock(began)
		if at <= 0 {
			t.Fatalf("the clock says %d, which means nothing", at)
		}
		time.Sleep(time.Minute)
		now := time.Now()
		for name, c := range map[string]struct {
			at   int64
			want time.Time
		}{
			"old": {at, began}, "present": {r.core.clock(now), now}, "not told": {0, now},
		} {
			if got := r.core.asOf(now, c.at); !got.Equal(c.want) {
				t.Errorf("%s: as of %s, want %s", name, got, c.want)
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		s, err := r.core.Connect(now, Identity{Agent: "one", Everywhere: true}, wire.Offer{}, func() {})
		if err != nil {
			t.Fatal(err)
		}
		hello := r.core.clock(now)
		r.core.Say(nil, now, s, wire.Message{Type: wire.TypeHello})
		r.core.Say(nil, now.Add(time.Second), s, wire.Message{Type: wire.TypeHeartbeat})
		for at, taken := range map[int64]bool{0: true, hello: true, hello + 1000: true, at: false, hello - 1: false,
			hello + 1001: false, hello + 60_000: false} {
			if _, err := r.core.Report(now.Add(time.Minute), "one", wire.Reports{Session: s.Number, At: at}); taken !=
				(err == nil) {
				t.Errorf("a report at %d, hello at %d: %v", at, hello, err)
			}
		}
	})
}

// With a thousand agents each drain's line of the log named them all.
func TestAFewOfManyAgentsAreNamed(t *testing.T) {
	var waiting []drain.Waiting
	for i := range 1000 {
		waiting = append(waiting, drain.Waiting{Name: fmt.Sprint("lameduck/edge-", i)})
	}
	if got := names(waiting); len(got) != 21 || got[19] != "lameduck/edge-19 (unknown)" || got[20] != "and 980 more" {
		t.Errorf("named are %q", got)
	}
	if got := names(waiting[:20]); len(got) != 20 {
		t.Errorf("of 20 are named %q", got)
	}
}

package coordinator

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What operators see of one drain from its beginning to its end, step by step.
func TestViewFollowsADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one, two := n.agent("one", []drain.Service{web}, "replica-0"), n.agent("two", []drain.Service{web}, "replica-0")
		synctest.Wait()
		p := pod("a")
		held := r.hold(p, web)
		see := func(when, want string) {
			t.Helper()
			synctest.Wait()
			v := r.View(10, 10)
			var got []string
			for _, d := range v.Drains.Items {
				got = append(got, fmt.Sprintf("%s/%s %s for %s", d.Namespace, d.Pod, d.Phase, v.At.Sub(d.PhaseSince)))
				for _, w := range d.Reports {
					since := "never"
					if !w.Since.IsZero() {
						since = v.At.Sub(w.Since).String()
					}
					got = append(got, fmt.Sprintf("%s %s %s", w.Agent, w.State, since))
				}
			}
			for _, o := range v.Outcomes {
				got = append(got, fmt.Sprintf("%s/%s ended %s after %gs %q", o.Namespace, o.Pod, o.Reason,
					*o.TookSeconds, o.Silent))
			}
			if text := strings.Join(got, "; "); text != want {
				t.Errorf("%s:\ngot  %s\nwant %s", when, text, want)
			}
		}
		see("at first", "shop/a Unrouting for 0s; one routing 0s; two routing 0s")
		time.Sleep(300 * time.Millisecond)
		one.say(p, drain.Idle)
		see("one is idle", "shop/a Unrouting for 300ms; two routing 300ms; one idle 0s")
		time.Sleep(400 * time.Millisecond)
		two.say(p, drain.Removed)
		see("two has removed", "shop/a Quiescing for 0s; two removed 0s; one idle 400ms")
		// A repeat is no news: since is when it began.
		time.Sleep(100 * time.Millisecond)
		two.say(p, drain.Removed)
		see("it says so again", "shop/a Quiescing for 100ms; two removed 100ms; one idle 500ms")
		two.say(p, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 800ms")
		time.Sleep(time.Second)
		r.GatePassed(p.UID)
		see("at the end", `shop/a ended Acknowledged after 0.8s []`)

		v := r.View(10, 10)
		var times []string
		for _, q := range v.Propagation {
			times = append(times, fmt.Sprintf("%s %s %d: %g %g", q.Gateway, q.What, q.Samples, q.P50Seconds,
				q.MaxSeconds))
		}
		if got, want := strings.Join(times, "; "),
			"fake removed 2: 0.3 0.7; fake idle 2: 0.3 0.8"; got != want {
			t.Errorf("propagation\ngot  %s\nwant %s", got, want)
		}
		for _, a := range v.Agents.Items {
			if want := map[string]float64{"one": .3, "two": .8}[a.ID]; a.IdleSeconds != want || a.Since.IsZero() ||
				!slices.Contains(a.Features, "leave") {
				t.Errorf("agent %+v, want idle after %g s", a, want)
			}
		}
	})
}

// A node agent declares every Service, and the mode of kube-proxy on its node.
func TestViewHasTheModeOfGateways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		node := n.nodeAgent("node", "replica-0")
		n.agent("one", []drain.Service{web}, "replica-0")
		see := func(want string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, a := range r.View(10, 10).Agents.Items {
				got = append(got, fmt.Sprintf("%s %d %t %q", a.Name, a.Services, a.EveryService, a.GatewayMode))
			}
			if text := strings.Join(got, "; "); text != want {
				t.Errorf("got  %s\nwant %s", text, want)
			}
		}
		see(`node 1 true ""; one 1 false ""`)
		node.Declare("iptables", node.Routes)
		see(`node 1 true "iptables"; one 1 false ""`)
		node.Declare(wire.GatewayAbsent, node.Routes)
		see(`node 1 true "absent"; one 1 false ""`)
		if wire.GatewayAbsent != api.GatewayAbsent || wire.Beside != api.GatewayBeside {
			t.Error("readers have another word")
		}
		node.Declare(wire.Beside+"Cilium", node.Routes)
		see(`node 1 true "beside Cilium"; one 1 false ""`)
		node.Declare("\x1b[2Jall is well", node.Routes)
		see(`node 1 true "?[2Jall is well"; one 1 false ""`)
		time.Sleep(time.Second) // one agent declares once a second
		node.Declare(wire.Beside+"Cilium", node.Routes)
		synctest.Wait()
		if got := fmt.Sprint(r.Beside()); got != "map[Cilium:1]" {
			t.Errorf("beside kube-proxy are %s", got)
		}
	})
}

// Programs that read lists must not meet null, whatever the coordinator knows.
func TestNothingInAViewIsNull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		for _, when := range []string{"empty", "with an agent and a drain"} {
			for _, is := range []any{r.View(10, 10), r.Report()} {
				text, err := json.Marshal(is)
				if err != nil || strings.Contains(string(text), "null") ||
					strings.Contains(string(text), "0001-01-01") {
					t.Errorf("%s: %v, %s", when, err, text)
				}
			}
			n.agent("one", []drain.Service{web}, "replica-0")
			synctest.Wait()
			r.Unroute(requestOf(pod("a"), web))
			r.GatePassed(pod("b").UID)
		}
	})
}

// To look must not change what is looked at: a drain that is over by time alone is released to the
// one who waits, and not to the one who looks.
func TestViewNamesTheSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{web}, "replica-0")
		synctest.Wait()
		p := pod("a")
		for range 15 { // as a caller does who comes again
			taken := r.hold(p, web)
			time.Sleep(2 * time.Second)
			<-taken
			r.View(10, 10)
		}
		answered(t, r.hold(p, web), "Released Deadline held=false after 0s")
		r.GatePassed(p.UID)
		v := r.View(10, 10)
		if len(v.Outcomes) != 1 || v.Outcomes[0].Reason != "Deadline" ||
			!slices.Equal(v.Outcomes[0].Silent, []string{"one"}) || *v.Outcomes[0].TookSeconds != 30 {
			t.Errorf("outcomes %+v", v.Outcomes)
		}
	})
}

// Warnings and how drains ended are one list: of one deletion one line, whichever of the two is
// known first.
func TestWarningsAreOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHistory()
		turned := func(name string, phase drain.Phase, reason drain.Reason) {
			h.turned(time.Now(), drain.Status{Pod: pod(name), Phase: phase, Reason: reason, Begun: time.Now()})
			time.Sleep(time.Second)
		}
		warned := func(name, reason string) {
			h.warned(time.Now(), pod(name), reason, "why "+name)
			time.Sleep(time.Second)
		}
		for range 3 * maxOutcomes { // another webhook refuses the deletion
			warned("cold", "Cold")
		}
		turned("last", drain.Unrouting, drain.ReasonNone)
		warned("last", "LastTarget")
		turned("last", drain.Closed, drain.PodDeleted)
		turned("late", drain.Released, drain.Deadline)
		warned("late", "Deadline")
		turned("late", drain.Closed, drain.PodDeleted)
		turned("fast", drain.Released, drain.Deadline)
		turned("fast", drain.Closed, drain.PodDeleted)
		warned("fast", "Deadline") // the watch was faster than the answer
		turned("good", drain.Released, drain.Acknowledged)
		turned("good", drain.Closed, drain.PodDeleted)
		turned("open", drain.Unrouting, drain.ReasonNone)
		warned("open", "Deadline")
		warned("twice", "Deadline")
		time.Sleep(10 * time.Minute)
		turned("twice", drain.Released, drain.Acknowledged)
		turned("twice", drain.Closed, drain.PodDeleted)
		time.Sleep(10 * time.Minute)
		warned("twice", "Cold")
		var got []string
		for _, o := range h.outcomes.newest() {
			got = append(got, fmt.Sprintf("%s %s abnormal=%t %s", o.Pod, o.Reason, o.Abnormal, o.Message))
		}
		want := []string{"twice Cold abnormal=true why twice", "twice Acknowledged abnormal=false ",
			"twice Deadline abnormal=true why twice", "good Acknowledged abnormal=false ",
			"fast Deadline abnormal=true why fast", "late Deadline abnormal=true why late",
			"last LastTarget abnormal=true why last", "cold Cold abnormal=true why cold"}
		if !slices.Equal(got, want) {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		for i := range 2 * maxOutcomes {
			warned(fmt.Sprint("many-", i), "Cold")
		}
		if n := h.outcomes.newest(); len(n) != maxOutcomes || n[0].Pod != fmt.Sprint("many-", 2*maxOutcomes-1) {
			t.Errorf("%d outcomes, the newest of %s", len(n), n[0].Pod)
		}
	})
}

// Whatever comes, what is remembered for operators stays small.
func TestHistoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		synctest.Wait()
		for i := range maxOutcomes + 20 {
			p := pod(fmt.Sprint(i))
			held := r.hold(p, web)
			one.say(p, drain.Idle)
			taken(t, held)
			r.GatePassed(p.UID)
		}
		v := r.View(10, 10)
		if len(v.Outcomes) != maxOutcomes || v.Outcomes[0].Pod != fmt.Sprint(maxOutcomes+19) ||
			v.Outcomes[maxOutcomes-1].Pod != "20" {
			t.Errorf("%d outcomes, from %s to %s", len(v.Outcomes), v.Outcomes[0].Pod,
				v.Outcomes[len(v.Outcomes)-1].Pod)
		}
		if len(r.seen.open) != 0 {
			t.Errorf("%d drains are remembered as open", len(r.seen.open))
		}
		h := newHistory()
		for i := range 2 * maxKinds {
			h.of(fmt.Sprint("kind-", i)).idle.add(time.Second, maxSamples)
		}
		if len(h.kinds) != maxKinds+1 {
			t.Errorf("%d kinds of gateways", len(h.kinds))
		}
		for i := range 2 * maxSamples {
			h.of("kind-0").removed.add(time.Duration(i), maxSamples)
		}
		if q := quantiles("kind-0", drain.Removed, &h.of("kind-0").removed); q.Samples != maxSamples ||
			q.Count != 2*maxSamples || q.P50Seconds != (maxSamples+maxSamples/2-1)*1e-9 {
			t.Errorf("quantiles %+v", q)
		}
	})
}

// A view of many drains and agents names the oldest and the slowest, and counts the rest.
func TestViewIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		for i := range 5 {
			n.agent(fmt.Sprint("agent-", i), []drain.Service{web}, "replica-0")
		}
		synctest.Wait()
		for _, name := range []string{"a", "b", "c"} {
			r.Unroute(requestOf(pod(name), web))
			time.Sleep(time.Second)
		}
		v := r.View(2, 3)
		d := v.Drains
		if len(d.Items) != 2 || d.Open != 3 || d.Items[0].Pod != "a" || len(d.Items[0].Reports) != 3 ||
			d.Items[0].Owed != 5 {
			t.Errorf("%+v", d)
		}
	})
}

// What is not a word on this drain must not count as how long a gateway took, and what waits for
// room has not been told.
func TestHistoryCountsWhatCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{web}, "replica-0")
		synctest.Wait()
		a, b := pod("a"), pod("b")
		both := []drain.Targets{{Service: web, Usable: []drain.UID{a.UID, b.UID, "uid-c"}}}
		r.Unroute(Request{Pod: a, Targets: both})
		time.Sleep(time.Second)
		r.Unroute(Request{Pod: b, Targets: both})
		if all := r.View(10, 10).Drains.Items; all[0].Told.IsZero() || all[1].Phase != "Queued" ||
			!all[1].Told.IsZero() {
			t.Errorf("%+v", all)
		}
		say := func(report drain.Report) {
			r.mu.Lock()
			defer r.mu.Unlock()
			session := r.core.sessions["one"].Number
			taken, err := r.core.Report(time.Now(), "one",
				wire.Reports{Session: session, Reports: []drain.Report{report}})
			if err != nil {
				t.Fatal(err)
			}
			r.seen.reported(time.Now(), "one", taken)
		}
		say(drain.Report{UID: a.UID, State: drain.Idle, Number: 99}) // of an earlier one
		say(drain.Report{UID: b.UID, State: drain.Idle, Number: 2})  // of one that was sent to no agent
		if v := r.View(10, 10); len(v.Propagation) > 0 {
			t.Errorf("%+v", v.Propagation)
		}
		time.Sleep(time.Second)
		r.GatePassed(a.UID)
		time.Sleep(time.Second)
		say(drain.Report{UID: b.UID, State: drain.Idle, Number: 2})
		if v := r.View(10, 10); len(v.Propagation) != 2 || v.Propagation[0].P50Seconds != 1 {
			t.Errorf("from the moment when there was room: %+v", v.Propagation)
		}
	})
}

// A drain that was released and whose pod lives on all the same has ended as abandoned: it would
// look like one that went well.
func TestAbandonedIsHowItEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		synctest.Wait()
		p := pod("a")
		r.lives.set(p.UID, Living)
		held := r.hold(p, web)
		one.say(p, drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
		time.Sleep(time.Minute)
		if v := r.View(10, 10); len(v.Outcomes) != 1 || v.Outcomes[0].Reason != "Abandoned" {
			t.Errorf("%+v", v.Outcomes)
		}
	})
}

// Who is not remembered any more, for want of room, is remembered as one agent by what it says.
// Without this, each repeat of a word is another agent's: kept beside the others, and counted among
// the times that gateways take.
func TestViewCountsOnceWhoIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		n.agent("two", []drain.Service{web}, "replica-0")
		synctest.Wait()
		p := pod("a")
		r.hold(p, web)
		synctest.Wait()
		r.mu.Lock()
		clear(r.seen.introduced)
		r.mu.Unlock()
		for _, s := range []drain.State{drain.Removed, drain.Idle, drain.Removed, drain.Idle} {
			one.say(p, s)
			synctest.Wait()
		}
		time.Sleep(11 * time.Second) // and it repeats that
		synctest.Wait()
		for _, q := range r.View(10, 10).Propagation {
			if q.Count != 1 {
				t.Errorf("%s %s was measured %d times", q.Gateway, q.What, q.Count)
			}
		}
	})
}

// Who has not let go is named; who is away was not waited for, is named whatever the reason, and
// marked.
func TestWhoIsSilentIsNamed(t *testing.T) {
	waiting := func(names ...string) (all []drain.Waiting) {
		for _, name := range names {
			all = append(all, drain.Waiting{Name: name})
		}
		return all
	}
	for reason, want := range map[drain.Reason]string{drain.Acknowledged: "[c (away)] 30",
		drain.Deadline: "[a b c (away)] 30"} {
		all, more := silent(drain.Status{Reason: reason, Waiting: waiting("a"), Suspended: waiting("b"),
			Away: waiting("c"), MoreAway: 30})
		if got := fmt.Sprint(all, more); got != want {
			t.Errorf("%s: %s, want %s", reason, got, want)
		}
	}
	many := make([]string, maxSilent+5)
	if all, more := silent(drain.Status{Reason: drain.Deadline, Waiting: waiting(many...),
		MoreAway: 2}); len(all) != maxSilent || more != 7 {
		t.Errorf("%d are named and %d more, want %d and 7", len(all), more, maxSilent)
	}
}

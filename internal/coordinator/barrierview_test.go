package coordinator

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// What operators see of one barrier from the deletion to the pod's end: who is asked, who is late,
// since when, what is waited for besides.
func TestViewFollowsABarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		near := newNearby()
		r := n.replica("replica-0", "a", with(near))
		near.set(func(s *PodContext) { s.Stated, s.LastHere = 2*time.Second, true })
		one, two := n.nodeAgent("node-1", "replica-0"), n.nodeAgent("node-2", "replica-0")
		p := pod("a")
		hook := one.hook(p)
		see := func(when, want string) {
			t.Helper()
			synctest.Wait()
			v := r.View(10, 10)
			got := []string{fmt.Sprintf("%d open, %d hooks", v.Barriers.Open, v.Barriers.Hooks)}
			for _, b := range v.Barriers.Items {
				got = append(got, fmt.Sprintf("%s/%s %s %s for %s by %s stated %gs", b.Namespace, b.Pod, b.Phase,
					b.Reason, v.At.Sub(b.PhaseSince), b.AskedBy, b.StatedSeconds))
				if !b.StatedUntil.Equal(b.Since.Add(2*time.Second)) || b.Owed != 2 || !b.Last || b.Cut ||
					b.Reports[0].Gateway != "fake" {
					t.Errorf("%s: %+v", when, b)
				}
				for _, w := range b.Reports {
					since := "never"
					if !w.Since.IsZero() {
						since = v.At.Sub(w.Since).String()
					}
					got = append(got, fmt.Sprintf("%s %s %s", w.Agent, w.State, since))
				}
			}
			for _, o := range v.Outcomes {
				got = append(got, fmt.Sprintf("%s/%s %s %s after %gs %q", o.Namespace, o.Pod, o.Gate, o.Reason,
					*o.TookSeconds, o.Silent))
			}
			if text := strings.Join(got, "; "); text != want {
				t.Errorf("%s:\ngot  %s\nwant %s", when, text, want)
			}
		}
		see("at first", "1 open, 1 hooks; shop/a Unrouting None for 0s by node-1 stated 2s; node-1 unknown never; "+
			"node-2 unknown never")
		time.Sleep(200 * time.Millisecond)
		one.see(t, p, drain.Idle, true)
		see("one is idle", "1 open, 1 hooks; shop/a Unrouting None for 200ms by node-1 stated 2s; node-2 unknown "+
			"never; node-1 idle 0s")
		time.Sleep(300 * time.Millisecond)
		two.see(t, p, drain.Removed, false)
		see("two has removed", "1 open, 1 hooks; shop/a Quiescing None for 0s by node-1 stated 2s; node-2 removed "+
			"0s; node-1 idle 300ms")
		two.see(t, p, drain.Idle, true)
		passed(t, hook, "Acknowledged after 500ms, and the agent waits")
		see("only the stated wait is left, which the agent makes",
			`1 open, 0 hooks; shop/a Released Acknowledged for 0s by node-1 stated 2s; node-1 idle 300ms; `+
				`node-2 idle 0s; shop/a barrier Acknowledged after 0.5s []`)
		// Another container's hook, and the kubelet's repeat, are no news.
		passed(t, one.hook(p), "Acknowledged after 0s, and the agent waits")
		r.Deleted(p.UID)
		see("it is gone", `0 open, 0 hooks; shop/a barrier Acknowledged after 0.5s []`)
		if len(r.seen.barriers) != 0 {
			t.Errorf("%d are remembered", len(r.seen.barriers))
		}
		var times []string
		for _, q := range r.View(0, 0).Propagation {
			times = append(times, fmt.Sprintf("%s %s %d: %g %g", q.Gateway, q.What, q.Samples, q.P50Seconds,
				q.MaxSeconds))
		}
		if got, want := strings.Join(times, "; "),
			"fake removed 2: 0.2 0.5; fake idle 2: 0.2 0.5"; got != want {
			t.Errorf("propagation\ngot  %s\nwant %s", got, want)
		}
		// A pod that went before its hook was heard of leaves nothing behind.
		r.GatePassed("gone")
		r.Deleted("gone")
		late := pod("gone")
		late.UID = p.UID
		passed(t, one.hook(late), "PodDeleted after 0s")
		if v := r.View(1, 1); len(v.Outcomes) != 1 || len(r.seen.barriers) != 0 {
			t.Errorf("%+v", v.Outcomes)
		}
	})
}

// Who is late at the bound is named, where the ends are told.
func TestViewNamesWhoWasLateAtABarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		one := n.nodeAgent("node-1", "replica-0")
		n.nodeAgent("node-2", "replica-0")
		p := pod("a")
		hook := one.hook(p)
		one.see(t, p, drain.Idle, true)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		<-hook
		v := r.View(10, 10)
		if len(v.Outcomes) != 1 || v.Outcomes[0].Reason != "Deadline" ||
			strings.Join(v.Outcomes[0].Silent, " ") != "node-2" || v.Outcomes[0].Gate != "barrier" {
			t.Errorf("%+v", v.Outcomes)
		}
	})
}

// Pods that may stop, and have not ended yet, do not hide one that waits.
func TestViewListsTheBarrierThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		one := n.nodeAgent("node-1", "replica-0")
		for i := range maxShownBarriers {
			p := pod(fmt.Sprint("stops-", i))
			hook := one.hook(p)
			one.see(t, p, drain.Idle, true)
			<-hook
		}
		time.Sleep(time.Second)
		late, last := pod("late"), pod(fmt.Sprint("stops-", maxShownBarriers-1))
		one.hook(late)
		b := r.View(10, 10).Barriers
		if len(b.Items) != maxShownBarriers || b.Items[0].Pod != late.Name || b.Open != maxShownBarriers+1 ||
			b.Waiting != 1 {
			t.Errorf("%d of %d are listed, %d wait, the first is %+v", len(b.Items), b.Open, b.Waiting, b.Items[0])
		}
		// One pod is found whether a view lists it or not.
		for uid, want := range map[drain.UID]int{late.UID: 1, last.UID: 1, "unknown": 0} {
			if v := r.ViewPod(uid, 10); len(v.Barriers.Items) != want || len(v.Drains.Items) > 0 {
				t.Errorf("%s: %+v", uid, v)
			}
		}
	})
}

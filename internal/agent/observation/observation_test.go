package observation

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var podTarget = netip.MustParseAddrPort("10.1.0.7:0")

func newPods(g gateway.Observed, log *slog.Logger) *Pods {
	return New(g, func() {}, metrics.NewPropagation(prometheus.NewRegistry(), "fake", "n1"), log)
}

// Without this, a pod that comes to the address of one that has gone loses its connections.
func TestConnectionsAreForgottenOnlyWhereNobodyHasTheAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := planes.NewFakeObserved()
		log := slog.New(slog.DiscardHandler)
		o := newPods(k, log)
		pods := nodepods.New(func(p nodepods.Pod) { o.Clean(p.Pod, p.Targets) }, log)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = o.Run(ctx, func(ts []netip.AddrPort) bool { return !pods.Owned(ts) }) }()
		a, b := agenttest.Hooked("a"), agenttest.Hooked("b")
		pods.Set(a, false)
		pods.Set(b, false) // at the same address
		pods.Set(a, true)
		time.Sleep(2 * cleanAgain)
		synctest.Wait()
		if len(k.Cleaned()) > 0 {
			t.Errorf("connections of b are forgotten")
		}
		// Nor where another node's pod has got it: the kernel sends there again.
		k.Is(podTarget, health.Routing, 0)
		o.Clean(drain.Pod{Namespace: "shop", Name: "c", UID: "uid-c"}, []netip.AddrPort{podTarget})
		pods.Set(b, true)
		time.Sleep(cleanLate + 2*cleanAgain)
		synctest.Wait()
		if len(k.Cleaned()) > 0 {
			t.Errorf("connections of another node's pod are forgotten")
		}
		k.Is(podTarget, health.Idle, 0)
		pods.Set(b, false)
		pods.Set(b, true)
		time.Sleep(2 * cleanAgain)
		synctest.Wait()
		if len(k.Cleaned()) != 1 || k.Cleaned()[0] != podTarget {
			t.Errorf("forgotten are %v", k.Cleaned())
		}
		cancel()
		synctest.Wait()
	})
}

// The kernel keeps the last pod of a Service until kube-proxy learns that it is deleted, later than
// the node's agent. Without this, the connections of such pods stay in conntrack, and a client that
// uses a port again is sent to an address without a pod.
func TestConnectionsAreForgottenOnceTheKernelLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := planes.NewFakeObserved()
		o := newPods(k, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = o.Run(ctx, func([]netip.AddrPort) bool { return true }) }()
		k.Is(podTarget, health.Kept, 0)
		o.Clean(drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, []netip.AddrPort{podTarget})
		time.Sleep(cleanLate / 2)
		synctest.Wait()
		if len(k.Cleaned()) > 0 {
			t.Error("forgotten while the kernel makes new ones")
		}
		k.Is(podTarget, health.Removed, 0)
		time.Sleep(2 * 200 * time.Millisecond)
		synctest.Wait()
		if len(k.Cleaned()) != 1 || k.Open() != 0 {
			t.Errorf("forgotten are %v, %d watches are open", k.Cleaned(), k.Open())
		}
		cancel()
		synctest.Wait()
	})
}

// plain has no connections to delete.
type plain struct {
	gateway.Observed
	watches int
}

func (p *plain) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	p.watches++
	return p.Observed.Watch(targets, changed)
}

// A watch of a gateway that is polled makes it answer.
func TestAGatewayThatKeepsNoConnectionsIsNotAskedForThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &plain{Observed: planes.NewFakeObserved()}
		o := newPods(k, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = o.Run(ctx, func([]netip.AddrPort) bool { return true }) }()
		o.Clean(drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, []netip.AddrPort{podTarget})
		time.Sleep(cleanLate + 2*cleanAgain)
		synctest.Wait()
		if k.watches > 0 {
			t.Errorf("%d watches of a deleted pod", k.watches)
		}
		cancel()
		synctest.Wait()
	})
}

// A kernel that has not heard of a pod looks as if it had let go: what counts is whether it was
// seen to send to it.
func TestWhatTheKernelWasSeenToSendTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := planes.NewFakeObserved()
		o := newPods(k, slog.New(slog.DiscardHandler))
		sent := func(want bool) {
			t.Helper()
			if rs := o.Reports(time.Now()); len(rs) != 1 || rs[0].HasSent != want {
				t.Errorf("reports %+v, want sent=%t", rs, want)
			}
		}
		watch := drain.Watch{
			Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, Since: time.Now(),
			Deadline: time.Now().Add(30 * time.Second), Targets: []netip.AddrPort{podTarget},
		}
		k.Is(podTarget, health.Idle, 0)
		o.Watch(time.Now(), watch, "r/1")
		sent(false)
		k.Is(podTarget, health.Unknown, 0)
		sent(false)
		k.Is(podTarget, health.Routing, 0)
		sent(true)
		k.Is(podTarget, health.Idle, 0)
		sent(true)
		// It sent to the pod when the agent was told, and not any more when it first reports.
		o.Unwatch(time.Now(), "uid-a", "r/1", false)
		k.Is(podTarget, health.Kept, 0)
		o.Watch(time.Now(), watch, "r/1")
		k.Is(podTarget, health.Idle, 0)
		sent(true)
		// What was so of one barrier says nothing of another one.
		o.Unwatch(time.Now(), "uid-a", "r/1", false)
		o.Watch(time.Now(), watch, "r/1")
		sent(false)
		o.Unwatch(time.Now(), "uid-a", "r/1", true)
		if k.Open() != 0 {
			t.Error("a watch of the kernel is left")
		}
	})
}

// written is a gateway whose configuration is written.
type written struct {
	*planes.FakeObserved
	at time.Time
}

type writtenWatch struct {
	gateway.Watch
	of *written
}

func (w *written) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	return writtenWatch{w.FakeObserved.Watch(targets, changed), w}
}

func (w writtenWatch) Reading() gateway.Reading {
	is := w.Watch.Reading()
	is.Written = w.of.at
	return is
}

// A stream that ends takes the observation with it. The next one must not take back what the agent
// has acknowledged.
func TestAnObservationThatBeginsAgain(t *testing.T) {
	now := time.Now()
	k := &written{FakeObserved: planes.NewFakeObserved(), at: now.Add(-time.Hour)}
	o := newPods(k, slog.New(slog.DiscardHandler))
	watch := drain.Watch{Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, Since: now,
		Listed: true, Deadline: now.Add(300 * time.Second), Targets: []netip.AddrPort{podTarget}}
	k.Is(podTarget, health.Routing, 0)
	o.Watch(now, watch, "r/1")
	k.at = now.Add(time.Second)
	k.Is(podTarget, health.Removed, 1)
	o.Unwatch(now.Add(20*time.Second), "uid-a", "r/1", false)
	o.Watch(now.Add(21*time.Second), watch, "r/1")
	k.Is(podTarget, health.Idle, 0)
	if all := o.Reports(now.Add(22 * time.Second)); len(all) != 1 || all[0].State != health.Idle {
		t.Errorf("reports %+v, want idle", all)
	}
}

// Without this, the rules that kube-proxy left behind when Cilium took its place acknowledge every
// pod that is younger than they are, and the pod is stopped while Cilium sends to it.
func TestRulesThatNothingMaintainsAcknowledgeNothing(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		listed, sent bool
		written      time.Duration // before the watch arrives
		before       bool          // nothing shows when
		later        time.Duration // after it; 0: never
		want         health.State
	}{
		"left behind":                                {listed: true, written: time.Hour, want: health.Unknown},
		"left behind shortly before":                 {listed: true, written: neglected + 1, want: health.Unknown},
		"written for this deletion, before we asked": {listed: true, written: time.Second, want: health.Idle},
		"written for this deletion":                  {listed: true, written: time.Hour, later: 1, want: health.Idle},
		"written long after": {listed: true, written: time.Hour, later: time.Minute,
			want: health.Idle},
		"had the pod": {listed: true, sent: true, written: time.Hour, want: health.Idle},
		"in no Service, headless, or never ready": {written: time.Hour, want: health.Idle},
		"when they were written cannot be seen":   {listed: true, before: true, want: health.Idle},
	} {
		t.Run(name, func(t *testing.T) {
			k := &written{FakeObserved: planes.NewFakeObserved(), at: now.Add(-c.written)}
			if c.before {
				k.at = time.Time{}
			}
			o := newPods(k, slog.New(slog.DiscardHandler))
			watch := drain.Watch{Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, Since: now,
				Listed: c.listed, Deadline: now.Add(30 * time.Second), Targets: []netip.AddrPort{podTarget}}
			if c.sent {
				k.Is(podTarget, health.Routing, 0)
			} else {
				k.Is(podTarget, health.Idle, 0)
			}
			o.Watch(now, watch, "r/1")
			// A replica that does not know the Service changes nothing.
			watch.Listed = false
			o.Watch(now.Add(neglected), watch, "r/2")
			k.Is(podTarget, health.Idle, 0)
			if c.later > 0 {
				k.at = now.Add(c.later)
			}
			for range 2 {
				if rs := o.Reports(now.Add(time.Second)); len(rs) != 1 || rs[0].State != c.want {
					t.Errorf("reports %+v, want %s", rs, c.want)
				}
			}
		})
	}
}

// looked tells looks from watches.
type looked struct {
	plain
	looks int
}

func (l *looked) Look(targets []netip.AddrPort, changed func()) gateway.Watch {
	l.looks++
	return l.Observed.Watch(targets, changed)
}

// A pod of mode observe may be gone, and its address another pod's. It must not count as going for
// the other watches, unless it is also one that a hook waits for.
func TestAPodThatIsOnlyMeasuredIsLookedAt(t *testing.T) {
	k := &looked{plain: plain{Observed: planes.NewFakeObserved()}}
	o := newPods(k, slog.New(slog.DiscardHandler))
	w := drain.Watch{Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, Observe: true,
		Targets: []netip.AddrPort{podTarget}}
	for _, step := range []struct {
		observe        bool
		looks, watches int
	}{{true, 1, 0}, {true, 1, 0}, {false, 1, 1}, {true, 1, 1}} {
		w.Observe = step.observe
		o.Watch(time.Now(), w, "a")
		if k.looks != step.looks || k.watches != step.watches {
			t.Errorf("after observe=%t: %d looks and %d watches, want %+v", step.observe, k.looks, k.watches, step)
		}
	}
}

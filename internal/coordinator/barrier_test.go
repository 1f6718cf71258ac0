package coordinator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// nearby is a PodContexts whose answers a test sets.
type nearby struct {
	mu sync.Mutex
	PodContext
	err       error
	uncovered []string
}

func (n *nearby) set(f func(s *PodContext)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.PodContext)
}

type fakeContexts struct{ *nearby }

func (v fakeContexts) PodContext(context.Context, string, drain.Pod) (PodContext, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.nearby.PodContext, v.err
}

func (v fakeContexts) Uncovered(context.Context, []drain.Service, bool) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.uncovered
}

func newNearby() *nearby {
	return &nearby{PodContext: PodContext{Known: true, Terminating: true, Here: true,
		Addresses: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")},
		Targets:   []drain.Targets{{Service: web}}}}
}

// with gives a replica a pod context.
func with(n *nearby) func(*Options) { return func(o *Options) { o.PodContexts = fakeContexts{n} } }

// eyes implements client.Watches: a test says what is seen of each pod.
type eyes struct {
	mu   sync.Mutex
	of   map[drain.UID]*seen
	gone []drain.UID
	// was is what was seen of a pod when it was watched last: a gateway does what it does, watched
	// or not.
	was map[drain.UID]drain.Report
}

type seen struct {
	watch   drain.Watch
	holders map[string]bool
	report  drain.Report
}

func (e *eyes) Watch(_ time.Time, w drain.Watch, holder string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.of[w.Pod.UID] == nil {
		e.of[w.Pod.UID] = &seen{holders: map[string]bool{}, report: e.was[w.Pod.UID]}
	}
	e.of[w.Pod.UID].watch = w
	e.of[w.Pod.UID].holders[holder] = true
}

func (e *eyes) Unwatch(_ time.Time, uid drain.UID, holder string, gone bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if gone && !slices.Contains(e.gone, uid) {
		e.gone = append(e.gone, uid)
	}
	if of := e.of[uid]; of != nil {
		if delete(of.holders, holder); len(of.holders) == 0 {
			e.was[uid] = of.report
			delete(e.of, uid)
		}
	}
}

func (e *eyes) Watched(holder string) []drain.UID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var uids []drain.UID
	for uid, of := range e.of {
		if of.holders[holder] {
			uids = append(uids, uid)
		}
	}
	return uids
}

func (e *eyes) Reports(time.Time) []drain.Report {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []drain.Report
	for uid, of := range e.of {
		r := of.report
		r.UID = uid
		all = append(all, r)
	}
	return all
}

func (e *eyes) watching(p drain.Pod) (drain.Watch, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.of[p.UID]
	if of == nil {
		return drain.Watch{}, false
	}
	return of.watch, true
}

// nodeAgent is an agent that observes.
type nodeAgent struct {
	*agent
	eyes *eyes
}

func (n *network) nodeAgent(id string, hosts ...string) *nodeAgent {
	a := &nodeAgent{eyes: &eyes{of: map[drain.UID]*seen{}, was: map[drain.UID]drain.Report{}}}
	a.agent = n.agentWith(id, func(c *client.Client) {
		c.Watches = a.eyes
		c.Population = drain.Nodes
		c.Routes = []drain.Route{{Service: drain.EveryService, Via: drain.Endpoints, Kind: drain.Observed}}
	}, hosts...)
	return a
}

func (a *nodeAgent) see(t *testing.T, p drain.Pod, s drain.State, quiet bool) {
	t.Helper()
	a.eyes.mu.Lock()
	of := a.eyes.of[p.UID]
	if of == nil {
		a.eyes.mu.Unlock()
		t.Fatalf("%s is not watched", p)
	}
	of.report.State, of.report.NoConnections = s, quiet
	a.eyes.mu.Unlock()
	a.Wake()
	synctest.Wait()
}

// passing is what a hook was told.
type passing struct {
	wire.BarrierStatus
	err  error
	took time.Duration
}

func (p passing) String() string {
	text := fmt.Sprintf("%s after %s", p.Reason, p.took)
	for _, w := range p.Waiting {
		text += ", " + w
	}
	if p.AtMostMillis > 0 {
		text += ", and the agent waits"
	}
	if p.err != nil {
		text += ": " + p.err.Error()
	}
	return text
}

// hook asks for the barrier of p, which was deleted just now.
func (a *nodeAgent) hook(p drain.Pod, change ...func(*wire.BarrierRequest)) <-chan passing {
	out := make(chan passing, 1)
	began := time.Now()
	b := wire.BarrierRequest{Pod: p, Since: began, BoundMillis: 30_000, Terminating: true,
		Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}}
	for _, f := range change {
		f(&b)
	}
	go func() {
		var is passing
		is.BarrierStatus, is.err = a.Barrier(context.Background(), b)
		is.took = time.Since(began)
		out <- is
	}()
	synctest.Wait()
	return out
}

func passed(t *testing.T, hook <-chan passing, want string) {
	t.Helper()
	synctest.Wait()
	select {
	case p := <-hook:
		if p.String() != want {
			t.Errorf("passed %q, want %q", p, want)
		}
	default:
		t.Errorf("the hook waits still, want %q", want)
	}
}

func waits(t *testing.T, hook <-chan passing) {
	t.Helper()
	synctest.Wait()
	select {
	case p := <-hook:
		t.Fatalf("passed already: %s", p)
	default:
	}
}

func TestAHookWaitsForEveryNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		one, two := n.nodeAgent("node-1", "replica-0"), n.nodeAgent("node-2", "replica-0")
		edge := n.agent("edge", []drain.Service{web}, "replica-0")
		p := pod("a")
		hook := one.hook(p)
		w, ok := two.eyes.watching(p)
		if !ok || w.Targets[0].String() != "10.1.0.7:0" || w.Deadline.Sub(w.Since) != 30*time.Second {
			t.Fatalf("the other node watches %+v", w)
		}
		if edge.exclusions.holders(p) != "replica-0/a" {
			t.Error("who directs and was never asked is not told")
		}
		if got := r.metric("lameduck_barriers_waiting"); got != 1 {
			t.Errorf("%v hooks wait", got)
		}
		one.see(t, p, drain.Idle, true)
		edge.say(p, drain.Idle)
		time.Sleep(300 * time.Millisecond)
		two.see(t, p, drain.Removed, false)
		waits(t, hook)
		two.see(t, p, drain.Idle, true)
		passed(t, hook, "Acknowledged after 300ms")
		if got := r.metric("lameduck_barrier_duration_seconds", "Acknowledged"); got != 1 {
			t.Errorf("%v barriers were counted", got)
		}
		// The kubelet was restarted, and runs the hook again.
		passed(t, one.hook(p), "Acknowledged after 0s")
		// An agent that comes now is told; one that was reconnects, and is told again.
		three := n.nodeAgent("node-3", "replica-0")
		if _, ok := three.eyes.watching(p); !ok {
			t.Error("a new node is not told")
		}
		r.Deleted(p.UID)
		synctest.Wait()
		if _, ok := two.eyes.watching(p); ok || !slices.Equal(two.eyes.gone, []drain.UID{p.UID}) {
			t.Error("the other node does not know that the pod is gone")
		}
		if edge.exclusions.holders(p) != "" || !edge.exclusions.isDead(p) {
			t.Error("who directs does not know that the pod is dead")
		}
	})
}

// A gateway without an agent may still route to the pod: the barrier is not counted as
// acknowledged.
func TestAHookOfAPodThatAGatewayWithoutAgentRoutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		near := newNearby()
		near.uncovered = []string{"Ingress shop/front routes Service shop/web"}
		r := n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		p := pod("a")
		hook := one.hook(p)
		one.see(t, p, drain.Idle, true)
		passed(t, hook, "Acknowledged after 0s") // by which the agent waits for connections
		if got := r.metric("lameduck_barrier_duration_seconds", "Uncovered"); got != 1 {
			t.Errorf("%v barriers were counted", got)
		}
	})
}

// The agent is told to make the stated waits, those that may end early too: none ends before a wait
// that must last, because nothing can be quiet for longer than since the deletion.
func TestAHookWithAStatedWait(t *testing.T) {
	early := drain.StatedWait{Wait: 20 * time.Second, Quiet: 10 * time.Second}
	for name, c := range map[string]struct {
		stated      time.Duration
		atMost      drain.StatedWait
		most, quiet time.Duration
	}{
		"that must last":                 {2 * time.Second, drain.StatedWait{}, 2 * time.Second, 0},
		"that may end early":             {0, early, 20 * time.Second, 10 * time.Second},
		"both":                           {2 * time.Second, early, 20 * time.Second, 10 * time.Second},
		"both, one longer than quiet":    {15 * time.Second, early, 20 * time.Second, 15 * time.Second},
		"both, the one that must longer": {25 * time.Second, early, 25 * time.Second, 25 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				near := newNearby()
				near.Stated, near.AtMost = c.stated, c.atMost
				n.replica("replica-0", "a", with(near))
				one := n.nodeAgent("node-1", "replica-0")
				p := pod("a")
				hook := one.hook(p)
				one.see(t, p, drain.Idle, true)
				if got := <-hook; got.took != 0 || got.AtMostMillis != c.most.Milliseconds() ||
					got.QuietMillis != c.quiet.Milliseconds() || got.Cut {
					t.Errorf("%+v", got)
				}
			})
		})
	}
}

// A tenant's pods whose Service states a wait of minutes keep no place here once their gateways
// have acknowledged: the hooks of all others are taken.
func TestStatedWaitsKeepNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		near := newNearby()
		r := n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		near.set(func(s *PodContext) { s.Stated = 10 * time.Minute })
		r.core.limits.MaxBarriers = 4
		for i := range 5 {
			p := pod(fmt.Sprint("tenant-", i))
			hook := one.hook(p, func(b *wire.BarrierRequest) { b.BoundMillis = 600_000 })
			one.see(t, p, drain.Idle, true)
			passed(t, hook, "Acknowledged after 0s, and the agent waits")
		}
		if r.core.barriers != 0 {
			t.Errorf("%d places are taken", r.core.barriers)
		}
	})
}

func TestAHookIsAnsweredAtItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		n.replica("replica-0", "a", with(newNearby()))
		one := n.nodeAgent("node-1", "replica-0")
		n.nodeAgent("node-2", "replica-0")
		p := pod("a")
		hook := one.hook(p, func(b *wire.BarrierRequest) { b.ElapsedMillis = 4000 })
		for range 4 {
			one.see(t, p, drain.Idle, true)
			time.Sleep(6 * time.Second)
		}
		one.see(t, p, drain.Idle, true)
		time.Sleep(2*time.Second - 1)
		waits(t, hook)
		time.Sleep(1)
		passed(t, hook, "Deadline after 26s, node-2 (unknown)")
	})
}

// Without this, a rollout of the coordinator, or the death of one replica, lets pods be stopped at
// once, or makes them wait again from the start.
func TestAnotherReplicaGoesOn(t *testing.T) {
	for name, lose := range map[string]func(n *network, r *replica){
		"it stops":         func(_ *network, r *replica) { r.end() },
		"it dies":          func(n *network, r *replica) { n.Cut(r.host) },
		"nothing is heard": func(n *network, r *replica) { n.Swallow(r.host) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				replicas := []*replica{n.replica("replica-0", "a", with(newNearby())),
					n.replica("replica-1", "b", with(newNearby()))}
				one := n.nodeAgent("node-1", "replica-0", "replica-1")
				p := pod("a")
				var elapsed time.Duration
				hook := one.hook(p)
				w, _ := one.eyes.watching(p)
				time.Sleep(20 * time.Second)
				one.see(t, p, drain.Routing, true)
				for _, r := range replicas {
					if r.metric("lameduck_barriers_waiting") == 1 {
						lose(n, r)
						break
					}
				}
				for range 10 {
					time.Sleep(600 * time.Millisecond)
					elapsed += 600 * time.Millisecond
				}
				is, ok := one.eyes.watching(p)
				if !ok || is.Since.Sub(w.Since) > time.Millisecond || w.Since.Sub(is.Since) > time.Millisecond {
					t.Fatalf("no replica continues the barrier, or its clock began again at %s, not %s", is.Since,
						w.Since)
				}
				waits(t, hook)
				time.Sleep(4 * time.Second)
				passed(t, hook, "Deadline after 30s, node-1 (routing)")
			})
		})
	}
}

func TestHooksThatCannotBeAsked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(n *nearby, r *replica)
		want   string
	}{
		"a pod of another node": {func(n *nearby, _ *replica) { n.Here = false }, "is not on the node"},
		"a pod that stays": {func(n *nearby, r *replica) {
			n.Terminating = false
			r.lives.set("uid-a", Living)
		}, "is not terminating"},
		"a pod that cannot be read": {func(n *nearby, _ *replica) { n.Terminating = false }, "cannot be read"},
		"nothing is known": {func(n *nearby, _ *replica) { n.err = errors.New("the cache is cold") },
			"the cache is cold"},
		"too many wait": {func(_ *nearby, r *replica) { r.MaxBarriers = 1; r.core.barriers = 1 }, "too many barriers"},
		"no replica":    {func(_ *nearby, r *replica) { r.end() }, "no coordinator can be asked"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, near := newNetwork(t), newNearby()
				r := n.replica("replica-0", "a", with(near))
				one := n.nodeAgent("node-1", "replica-0")
				near.set(func(*PodContext) { c.change(near, r) })
				synctest.Wait()
				is := <-one.hook(pod("a"))
				if !errors.Is(is.err, client.ErrNoCoordinator) || !strings.Contains(is.err.Error(), c.want) ||
					is.took != 0 {
					t.Errorf("after %s: %v, want %q", is.took, is.err, c.want)
				}
				r.mu.Lock()
				defer r.mu.Unlock()
				if all, n, _ := r.core.Ledger.Oldest(drain.AtBarrier, 10); n != 0 {
					t.Errorf("open are %v", all)
				}
			})
		})
	}
}

// One agent that asks without end takes no place from those of other nodes.
func TestOneNodeDoesNotTakeAllPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", with(newNearby()))
		r.MaxBarriers = 8
		bad, good := n.nodeAgent("bad", "replica-0"), n.nodeAgent("good", "replica-0")
		var last <-chan passing
		for range 3 {
			last = bad.hook(pod("of-bad"), func(b *wire.BarrierRequest) { b.BoundMillis = 1000 })
		}
		if is := <-last; is.err == nil || !strings.Contains(is.err.Error(), "too many barriers of this node") {
			t.Errorf("the third of 8 places: %v", is.err)
		}
		waits(t, good.hook(pod("victim")))
		time.Sleep(2 * time.Second)
		waits(t, bad.hook(pod("next-of-bad"))) // the places of hooks that have ended are free
	})
}

// Without this, an agent continues to observe the address of a pod for a replica that has died, and
// takes the next pod at that address for one that is being deleted.
func TestAStreamThatEndsEndsWhatItObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		one, two := n.replica("replica-0", "a", with(newNearby())), n.replica("replica-1", "a", with(newNearby()))
		a, p := n.nodeAgent("node-1", "replica-0", "replica-1"), pod("a")
		a.hook(p)
		if _, ok := a.eyes.watching(p); !ok {
			t.Fatal("nothing is observed")
		}
		asked := one
		if len(a.eyes.Watched("replica-1/a")) > 0 {
			asked = two
		}
		asked.end()
		synctest.Wait()
		if of := a.eyes.Watched(asked.host + "/a"); len(of) > 0 {
			t.Errorf("for the replica that is gone %v are observed", of)
		}
	})
}

// Without this, the token of any gateway's agent, stolen, has living pods of its node taken out of
// routing.
func TestAHookNeedsTheRightToAsk(t *testing.T) {
	for id, want := range map[string]string{
		"gateway": "403 Forbidden to /v1/barriers: edge may not ask for barriers: grant the verb create on " +
			"barriers.lameduck.io by a ClusterRoleBinding, as manifests/barrier does",
		"hidden": "503 Service Unavailable to /v1/barriers: the API server does not answer",
	} {
		t.Run(id, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				r := n.replica("replica-0", "a", with(newNearby()))
				is := <-n.nodeAgent(id, "replica-0").hook(pod("a"))
				if is.err == nil || !strings.Contains(is.err.Error(), want) {
					t.Errorf("%v, want %q", is.err, want)
				}
				r.mu.Lock()
				defer r.mu.Unlock()
				if all, n, _ := r.core.Ledger.Oldest(drain.AtBarrier, 10); n != 0 {
					t.Errorf("open are %v", all)
				}
			})
		})
	}
}

// Without this, one agent that writes a zone as long as it may post has every other agent that
// observes lose its stream, again and again until the barrier is over: a message is larger than
// what they read.
func TestOneAgentCannotCutTheStreamsOfAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		n.replica("replica-0", "a", with(newNearby()))
		one, two := n.nodeAgent("node-1", "replica-0"), n.nodeAgent("node-2", "replica-0")
		liar := n.nodeAgent("liar", "replica-0")
		bad := liar.hook(pod("b"), func(b *wire.BarrierRequest) {
			b.Targets = []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("fe80::1%"+strings.Repeat("x", 2<<20)),
				0)}
		})
		time.Sleep(time.Second)
		p := pod("a")
		hook := one.hook(p)
		for _, a := range []*nodeAgent{one, two, liar} {
			a.see(t, p, drain.Idle, true)
		}
		passed(t, hook, "Acknowledged after 0s")
		if is := <-bad; is.err == nil || !strings.Contains(is.err.Error(), "no pod's address has a zone") {
			t.Errorf("the liar is told %.200v", is)
		}
	})
}

// A watch of the agent may be ahead of the coordinator's. Another replica may know the pod, and its
// Services, so this one takes the hook only after a while.
func TestAPodThatIsGoingIsReadLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Known, near.Terminating, near.Targets = false, false, nil
		r := n.replica("replica-0", "a", with(near))
		r.lives.set("uid-a", Leaving)
		one := n.nodeAgent("node-1", "replica-0")
		if is := <-one.hook(pod("a")); is.err == nil || !strings.Contains(is.err.Error(), "not known here yet") {
			t.Errorf("the first hook is told %v", is)
		}
		hook := one.hook(pod("a"), func(b *wire.BarrierRequest) { b.ElapsedMillis = strangerTime.Milliseconds() })
		one.see(t, pod("a"), drain.Idle, true)
		passed(t, hook, "Acknowledged after 0s")
	})
}

// Without this, who has the token of an agent takes any pod out of traffic, by its UID.
func TestAHookOfAPodThatDoesNotExist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Known, near.Terminating = false, false
		r := n.replica("replica-0", "a", with(near))
		one, edge := n.nodeAgent("node-1", "replica-0"), n.agent("edge", []drain.Service{web}, "replica-0")
		p := pod("a")
		r.lives.set(p.UID, Gone)
		is := <-one.hook(p, func(b *wire.BarrierRequest) { b.ElapsedMillis = strangerTime.Milliseconds() })
		if is.err == nil || !strings.Contains(is.err.Error(), "does not exist") {
			t.Errorf("the hook is told %v", is)
		}
		synctest.Wait()
		if edge.exclusions.holders(p) != "" {
			t.Error("a gateway is told of it")
		}
	})
}

// Agents delete connections to the addresses of a pod that they watch. An agent could name others.
func TestThePodsAddressesAreNotTheAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		n.replica("replica-0", "a", with(near))
		one, p := n.nodeAgent("node-1", "replica-0"), pod("a")
		other := func(b *wire.BarrierRequest) {
			b.Targets = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.7:0")}
		}
		hook := one.hook(p, other)
		one.eyes.mu.Lock()
		got := one.eyes.of[p.UID].watch.Targets
		one.eyes.mu.Unlock()
		if !slices.Equal(got, near.Addresses) {
			t.Errorf("agents watch %v, want %v", got, near.Addresses)
		}
		one.see(t, p, drain.Idle, true)
		passed(t, hook, "Acknowledged after 0s")

		near.Addresses = nil // it has its node's, or the cache is late
		if is := <-one.hook(pod("b"), other); is.err == nil || !strings.Contains(is.err.Error(), "no address") {
			t.Errorf("the hook of a pod without an address is told %v", is)
		}
	})
}

// A replica that has just started would wait for agents that are not connected to it yet.
func TestAnotherReplicaHasMoreAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		n.replica("replica-0", "a", with(near), func(o *Options) {
			o.Elsewhere = func() bool { return true }
		})
		one := n.nodeAgent("node-1", "replica-0")
		if is := <-one.hook(pod("a")); is.err == nil || !strings.Contains(is.err.Error(), "has more agents") {
			t.Errorf("the first hook is told %v", is)
		}
		// The agent may have no stream of the other one.
		hook := one.hook(pod("a"), func(b *wire.BarrierRequest) { b.ElapsedMillis = strangerTime.Milliseconds() })
		one.see(t, pod("a"), drain.Idle, true)
		passed(t, hook, "Acknowledged after 0s")
		// For a container that is stopped the agent asks twice.
		near.Terminating = false
		stopped := func(elapsed int64) func(*wire.BarrierRequest) {
			return func(b *wire.BarrierRequest) {
				b.Terminating, b.BoundMillis, b.ElapsedMillis = false, 1999, elapsed
			}
		}
		is := <-one.hook(pod("b"), stopped(0))
		if is.err == nil || !strings.Contains(is.err.Error(), "has more agents") {
			t.Errorf("the first hook of a restart is told %v", is)
		}
		restart := one.hook(pod("b"), stopped(1000))
		passed(t, restart, "NoAgents after 0s")
	})
}

// A report that a gateway has stopped routing to a young pod counts at once if the gateway was seen
// to send to the pod. Otherwise it counts when the gateway must have learned of the pod: not later,
// and not as soon as this replica has learned of other changes.
func TestAHookOfAYoungPodWaitsForThoseWhoMayNotHaveHeardOfIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Young = 4 * time.Second
		n.replica("replica-0", "a", with(near))
		one, two := n.nodeAgent("node-1", "replica-0"), n.nodeAgent("node-2", "replica-0")
		sent := func(a *nodeAgent, p drain.Pod) {
			a.eyes.mu.Lock()
			a.eyes.of[p.UID].report.HasSent = true
			a.eyes.mu.Unlock()
		}
		p, q := pod("a"), pod("b")
		hook := one.hook(p)
		sent(one, p)
		one.see(t, p, drain.Idle, true)
		two.see(t, p, drain.Idle, true)
		near.set(func(s *PodContext) { s.Young = 0 })
		time.Sleep(4 * time.Second)
		waits(t, hook) // two was read before
		time.Sleep(time.Second)
		passed(t, hook, "Acknowledged after 5s") // by its next report

		near.set(func(s *PodContext) { s.Young = 4 * time.Second })
		hook = one.hook(q)
		sent(one, q)
		one.see(t, q, drain.Idle, true)
		sent(two, q)
		two.see(t, q, drain.Idle, true)
		passed(t, hook, "Acknowledged after 0s")
	})
}

// Without this, a Service with one pod that is replaced loses its requests: its kernels say Kept,
// and the new one is ready.
func TestOtherEndpointsAreLookedAtWhileAHookWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Last = true
		n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		p := pod("a")
		hook := one.hook(p)
		one.see(t, p, drain.Kept, true)
		time.Sleep(600 * time.Millisecond)
		near.set(func(s *PodContext) { s.Last = false })
		time.Sleep(3 * time.Second)
		waits(t, hook)
		near.set(func(s *PodContext) { s.Last = true })
		time.Sleep(lookAround + time.Second)
		synctest.Wait()
		passed(t, hook, "LastTarget after 4.75s")
	})
}

// The end of a time is a reason to look as well. Without this, a pod is told to stop as the last
// one by what was read up to 250 ms before, and kernels send to it while another one is ready.
func TestOtherEndpointsAreLookedAtWhenATimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Last = true
		n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		p := pod("a")
		hook := one.hook(p)
		one.see(t, p, drain.Kept, true)
		time.Sleep(100 * time.Millisecond)
		two := n.nodeAgent("node-2", "replica-0") // the hook looks now, and every 250 ms from now on
		synctest.Wait()
		two.see(t, p, drain.Idle, true)
		time.Sleep(800 * time.Millisecond)
		near.set(func(s *PodContext) { s.Last = false })
		time.Sleep(time.Second)
		waits(t, hook)
		one.see(t, p, drain.Idle, true)
		passed(t, hook, "Acknowledged after 1.9s")
	})
}

// A liveness restart is delayed by 2 s at most, and ends the exclusion when the container is back.
func TestAContainerThatIsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Terminating = false
		r := n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		edge := n.agent("edge", []drain.Service{web}, "replica-0")
		p := pod("a")
		stays := func(b *wire.BarrierRequest) { b.Terminating, b.BoundMillis = false, 10_000 }
		hook := one.hook(p, stays)
		if edge.exclusions.holders(p) != "replica-0/a" {
			t.Fatal("who directs is not told")
		}
		if _, ok := one.eyes.watching(p); ok {
			t.Error("observers are informed: no gateway stops routing to a pod that is ready")
		}
		time.Sleep(2*time.Second - 1)
		waits(t, hook)
		time.Sleep(1)
		passed(t, hook, "None after 2s, edge (routing)")
		edge.say(p, drain.Idle)
		passed(t, one.hook(p, stays), "Acknowledged after 0s")
		r.Ready(p.UID, time.Now().Add(-time.Hour))
		synctest.Wait()
		if edge.exclusions.holders(p) == "" {
			t.Error("it is routed again before it is ready")
		}
		time.Sleep(time.Second)
		r.Ready(p.UID, time.Now())
		synctest.Wait()
		if edge.exclusions.holders(p) != "" || edge.exclusions.isDead(p) {
			t.Error("it is not routed again")
		}
	})
}

// The agent of the pod's node could not read the pod, and takes a deletion for a restart.
func TestADeletionThatAnAgentDoesNotKnowOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Grace = 35 * time.Second
		n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		stays := func(b *wire.BarrierRequest) { b.Terminating, b.BoundMillis = false, 2000 }
		if got := <-one.hook(pod("a"), stays); got.err != nil || !got.Terminating || got.GraceMillis != 35_000 ||
			got.took > 0 {
			t.Errorf("%+v, want the answer that the pod is terminating, at once", got)
		}
		near.set(func(c *PodContext) { c.Here = false })
		if got := <-one.hook(pod("a"), stays); got.err == nil || got.Terminating {
			t.Errorf("an agent of another node is told: %+v", got)
		}
		if _, ok := one.eyes.watching(pod("a")); ok {
			t.Error("a barrier is open")
		}
	})
}

func TestWhatIsRefusedAtTheBarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		n.replica("replica-0", "a", with(newNearby()))
		one := n.nodeAgent("node-1", "replica-0")
		for name, c := range map[string]struct {
			change func(*wire.BarrierRequest)
			code   int
		}{
			"no uid": {func(b *wire.BarrierRequest) { b.Pod.UID = "" }, http.StatusBadRequest},
			"a long name": {func(b *wire.BarrierRequest) { b.Pod.Name = strings.Repeat("x", 254) },
				http.StatusBadRequest},
			"many targets": {func(b *wire.BarrierRequest) { b.Targets = make([]netip.AddrPort, 65) },
				http.StatusBadRequest},
			"a negative bound": {func(b *wire.BarrierRequest) { b.BoundMillis = -1 }, http.StatusBadRequest},
			"a long bound":     {func(b *wire.BarrierRequest) { b.BoundMillis = 600_001 }, http.StatusBadRequest},
			"from the future":  {func(b *wire.BarrierRequest) { b.ElapsedMillis = -1 }, http.StatusBadRequest},
		} {
			is := <-one.hook(pod("a"), c.change)
			if is.err == nil || !strings.Contains(is.err.Error(), fmt.Sprint(c.code)) {
				t.Errorf("%s: %v, want %d", name, is.err, c.code)
			}
		}
	})
}

// A pod that was created where hooks wait has one still when the mode of its namespace changes.
func TestAHookDoesNotWaitWhereNothingDoes(t *testing.T) {
	for _, terminating := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			n, near := newNetwork(t), newNearby()
			near.NotEnforced, near.Terminating = true, terminating
			near.AtMost = drain.StatedWait{Wait: 20 * time.Second, Quiet: 10 * time.Second}
			n.replica("replica-0", "a", with(near))
			one := n.nodeAgent("node-1", "replica-0")
			edge := n.agent("edge", []drain.Service{web}, "replica-0")
			p := pod("a")
			hook := one.hook(p, func(b *wire.BarrierRequest) { b.Terminating = terminating })
			passed(t, hook, "NotEnforced after 0s")
			if edge.exclusions.holders(p) != "" {
				t.Error("who directs is told")
			}
		})
	}
}

// A hook may come before its replica has heard of the pod, and so of its mode. Once the mode is
// known, no agent is told of the pod any more, not even one that comes then.
func TestAHookComesBeforeTheModeIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, near := newNetwork(t), newNearby()
		near.Known, near.Terminating = false, false
		r := n.replica("replica-0", "a", with(near))
		one := n.nodeAgent("node-1", "replica-0")
		edge := n.agent("edge", []drain.Service{web}, "replica-0")
		p := pod("a")
		r.lives.set(p.UID, Leaving)
		hook := one.hook(p, func(b *wire.BarrierRequest) {
			b.Terminating, b.ElapsedMillis = true, strangerTime.Milliseconds()
		})
		waits(t, hook)
		if edge.exclusions.holders(p) == "" {
			t.Fatal("who directs is not told while the mode is not known: this test shows nothing")
		}
		near.set(func(s *PodContext) { s.Known, s.Terminating, s.NotEnforced = true, true, true })
		if got := <-hook; got.Reason != drain.NotEnforced.String() {
			t.Errorf("the hook is answered %v", got.Reason)
		}
		late := n.agent("late", []drain.Service{web}, "replica-0")
		synctest.Wait()
		if edge.exclusions.holders(p) != "" || late.exclusions.holders(p) != "" {
			t.Error("an agent excludes a pod whose mode is not enforce")
		}
	})
}

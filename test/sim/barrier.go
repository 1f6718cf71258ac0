package main

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/agent/hooks"
	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// kubeletMost is when the kubelet goes on whatever the hook does. Of that the application has
// appGrace. hastyGrace is the grace period of callers that leave less, and shortBound the bound of
// some pods.
const (
	kubeletMost = 40 * time.Second
	appGrace    = 10 * time.Second
	hastyGrace  = 15 * time.Second
	shortBound  = 5 * time.Second
)

// hookKind is what the hooks of a pod on a node are worth.
type hookKind int

const (
	hooksWait hookKind = iota
	// hooksOfOne: only one of two containers has the hook. hooksCutOff: nothing answers them, as if
	// by a NetworkPolicy. hooksShort: their bound is less than the Idle bound.
	hooksOfOne
	hooksCutOff
	hooksShort
)

// hookKinds are as frequent as they are here.
var hookKinds = []hookKind{hooksWait, hooksWait, hooksOfOne, hooksWait, hooksWait, hooksCutOff, hooksWait, hooksWait,
	hooksShort, hooksWait, hooksWait}

// bound is that of the pod's barrier, grace its grace period, in which a short bound leaves time.
func (p *pod) bound() time.Duration {
	if p.hooks == hooksShort {
		return shortBound
	}
	return keys.DefaultBound
}

func (p *pod) grace() time.Duration { return min(kubeletMost, appGrace+keys.DefaultBound) }

// sampling is that of clusters of a few nodes.
var sampling = drain.Sampling{AllUpTo: 2, Size: 2, Learn: 5}

// kernel is a node's, kube-proxy included: it follows EndpointSlices, late, and takes no orders.
type kernel struct {
	gateway.Observed // what is called of it, it has itself
	w                *world
	a                *agent
	proxy            proc
	watch            *watcher
	slices           []slice
	// written are the versions of slices at the last sync.
	written []int
	// chosen is what kube-proxy last made of slices, which are as it heard them: the ready
	// endpoints or, without any, the terminating ones (KEP-1669). Twice for each: of all nodes, and
	// of this one for those that have a Local policy.
	chosen [][]drain.UID
	// without says of which of these there was no ready endpoint then.
	without []bool
	synced  bool
	dirty   bool
	// added is when the kernel began to send to a pod, the last time.
	added  map[drain.UID]time.Duration
	active map[drain.UID]int
	// addrs are those of the endpoints that it has heard of, watched how many watches its agent has
	// open of each.
	addrs   map[drain.UID]netip.Addr
	watched map[netip.Addr]int
}

func newKernel(w *world, a *agent) *kernel {
	k := &kernel{
		w: w, a: a, proxy: proc{node: a.node, name: "proxy-" + a.name, up: true}, active: map[drain.UID]int{},
		addrs:  map[drain.UID]netip.Addr{},
		added:  map[drain.UID]time.Duration{},
		slices: make([]slice, w.api.services), written: make([]int, w.api.services),
		chosen: make([][]drain.UID, 2*w.api.services), without: make([]bool, 2*w.api.services),
	}
	k.watch = &watcher{p: &k.proxy, slice: k.sliceSeen}
	w.api.watchers = append(w.api.watchers, k.watch)
	w.api.list(k.watch, func() {})
	k.clients()
	return k
}

func (k *kernel) sliceSeen(service int, s slice) {
	k.slices[service] = s
	if k.dirty {
		return
	}
	k.dirty = true
	lag := k.w.between(10*time.Millisecond, 300*time.Millisecond)
	if k.w.faulty() && k.w.chance(200) {
		lag = k.w.between(300*time.Millisecond, 5*time.Second)
	}
	k.w.after(&k.proxy, lag, k.sync)
}

// sync writes the kernel's rules.
func (k *kernel) sync() {
	k.dirty, k.synced = false, true
	before := map[drain.UID]bool{}
	for _, c := range k.chosen {
		for _, uid := range c {
			before[uid] = true
		}
	}
	for i, s := range k.slices {
		k.written[i] = s.version
		for _, e := range s.endpoints {
			k.addrs[e.uid] = e.addr.Addr()
		}
		k.chosen[2*i], k.without[2*i], k.chosen[2*i+1], k.without[2*i+1] = nil, false, nil, false
		if k.w.api.policies[i] != localAlways {
			k.chosen[2*i], k.without[2*i] = endpointsUsed(s.endpoints, nil)
		}
		if k.w.api.policies[i] != allNodes {
			k.chosen[2*i+1], k.without[2*i+1] = endpointsUsed(s.endpoints, k.a)
		}
	}
	for _, c := range k.chosen {
		for _, uid := range c {
			if !before[uid] {
				k.added[uid] = k.w.at
			}
		}
	}
	k.changed()
}

// endpointsUsed is what kube-proxy makes of endpoints, of one node if here is not nil.
func endpointsUsed(endpoints []endpoint, here *agent) (chosen []drain.UID, without bool) {
	for _, e := range endpoints {
		if e.ready && !e.terminating && (here == nil || e.host == here) {
			chosen = append(chosen, e.uid)
		}
	}
	if len(chosen) > 0 {
		return chosen, false
	}
	for _, e := range endpoints {
		if e.terminating && (here == nil || e.host == here) {
			chosen = append(chosen, e.uid)
		}
	}
	return chosen, true
}

// late returns why the kernel began to send to a pod after its deletion, and perhaps after it was
// seen not to, if the reason is that it had not learned yet that the pod is ready. That cannot be
// known of a kernel that learns later than gateways have to, or that learns then that the pod lost
// its readiness before it became ready again.
func (k *kernel) late(p *pod) string {
	switch added := k.added[p.uid]; {
	case added < p.committed:
		return ""
	case added-p.readyAt > endpoints.Linger:
		return "it heard more than 10 s late that the pod was ready"
	case p.lostAt > 0 && p.committed-p.lostAt < endpoints.Linger:
		return "it had not heard that the pod was not ready, and ready again"
	default:
		return ""
	}
}

// behind reports whether the kernel has not taken in for more than endpoints.Linger what the API
// server says, or that a pod is ready, which its EndpointSlice says later than the pod. A
// coordinator that takes the last target of a node at its word cannot know that.
func (k *kernel) behind() bool {
	for i, all := range k.w.api.history {
		next := k.written[i]
		if next == len(all) {
			continue
		}
		if k.w.at-all[next].at > endpoints.Linger {
			return true
		}
		var known []endpoint
		if next > 0 {
			known = all[next-1].endpoints
		}
		for _, e := range all[len(all)-1].endpoints {
			if e.ready && k.w.at-k.w.api.find(e.uid).readyAt > endpoints.Linger &&
				!slices.ContainsFunc(known, func(o endpoint) bool { return o.uid == e.uid && o.ready }) {
				return true
			}
		}
	}
	return false
}

// checkEnd: after quiet the kernel sends where EndpointSlices say.
func (k *kernel) checkEnd() {
	w := k.w
	for i, s := range w.api.slices {
		for n, here := range []*agent{nil, k.a} {
			want, _ := endpointsUsed(s.endpoints, here)
			if n == 0 && w.api.policies[i] == localAlways || n == 1 && w.api.policies[i] == allNodes {
				want = nil
			}
			if got := k.chosen[2*i+n]; !slices.Equal(got, want) {
				w.fail(checkRoutes, "the kernel of %s sends to %v of %s, EndpointSlices say %v", k.a.name, got,
					service(i), want)
			}
		}
	}
}

// changed tells the agent, soon.
func (k *kernel) changed() {
	a := k.a
	k.w.after(&a.proc, k.w.between(0, 10*time.Millisecond), func() {
		for _, l := range a.links {
			l.poke(false)
		}
		for _, h := range slices.Clone(a.hooks) {
			h.look()
		}
	})
}

// view is a watch of an address, whichever pod has it.
type view struct {
	k    *kernel
	addr netip.Addr
	was  gateway.Reading
	// looks: it does not count among those that are watched.
	looks bool
}

// Watch implements gateway.Observed for a pod, which has one address.
func (k *kernel) Watch(targets []netip.AddrPort, _ func()) gateway.Watch {
	v := &view{k: k, addr: targets[0].Addr()}
	k.watched[v.addr]++
	return v
}

// Look implements gateway.Looker.
func (k *kernel) Look(targets []netip.AddrPort, _ func()) gateway.Watch {
	return &view{k: k, addr: targets[0].Addr(), looks: true}
}

// Reading implements gateway.Watch.
func (v *view) Reading() gateway.Reading {
	k := v.k
	is := gateway.Reading{Counted: k.a.now(), Since: k.a.now()}
	for uid, n := range k.active {
		if k.addrs[uid] == v.addr {
			is.Connections += n
		}
	}
	is.NoConnections = k.synced && is.Connections == 0
	is.State = k.state(v.addr, is.Connections)
	if v.was.State == is.State && !v.was.Since.IsZero() {
		is.Since = v.was.Since
	}
	v.was = is
	return is
}

// Count implements gateway.Watch: connections are always counted.
func (v *view) Count() {}

// Close implements gateway.Watch.
func (v *view) Close() {
	if !v.looks {
		v.k.watched[v.addr]--
	}
}

func (k *kernel) routes(uid drain.UID) bool {
	return slices.ContainsFunc(k.chosen, func(c []drain.UID) bool { return slices.Contains(c, uid) })
}

// state is what the kernel does with an address. Others that are watched are about to go too.
func (k *kernel) state(addr netip.Addr, connections int) drain.State {
	state := drain.Idle
	if connections > 0 {
		state = drain.Removed
	}
	for _, c := range k.chosen {
		if !slices.ContainsFunc(c, func(uid drain.UID) bool { return k.addrs[uid] == addr }) {
			continue
		}
		if slices.ContainsFunc(c, func(o drain.UID) bool { return k.addrs[o] != addr && k.watched[k.addrs[o]] == 0 }) {
			return drain.Routing
		}
		state = drain.Kept
	}
	if !k.synced {
		return drain.StateUnknown
	}
	return state
}

// kept says whether the kernel sends to uid for want of a ready endpoint only, as far as kube-proxy
// had heard when it wrote its rules.
func (k *kernel) kept(uid drain.UID) bool {
	for i, c := range k.chosen {
		if slices.Contains(c, uid) && !k.without[i] {
			return false
		}
	}
	return true
}

// alone says whether the kernel knows no other endpoint wherever it sends to uid.
func (k *kernel) alone(uid drain.UID) bool {
	return !slices.ContainsFunc(k.chosen, func(c []drain.UID) bool { return len(c) > 1 && slices.Contains(c, uid) })
}

// misled says whether c has not learned yet that no other endpoint is ready any more of those that
// it takes for ready beside uid.
func (c *coord) misled(uid drain.UID) bool {
	found := false
	for i, s := range c.slices {
		if !slices.ContainsFunc(s.endpoints, func(e endpoint) bool { return e.uid == uid }) {
			continue
		}
		for _, e := range s.endpoints {
			switch {
			case e.uid == uid || !e.ready || e.terminating:
			case slices.ContainsFunc(c.w.api.slices[i].endpoints, func(o endpoint) bool {
				return o.uid == e.uid && o.ready
			}):
				return false
			default:
				found = true
			}
		}
	}
	return found
}

// stays says whether the kernel goes on sending to uid wherever it does, once it has heard of all.
// What is heard of a Service may be so old that it does not list uid yet.
func (k *kernel) stays(uid drain.UID, all []slice) bool {
	for i, s := range all {
		for n, here := range []*agent{nil, k.a} {
			if !slices.Contains(k.chosen[2*i+n], uid) {
				continue
			}
			listed, other := k.w.others(s, uid, here)
			is, _ := k.w.others(k.w.api.slices[i], uid, here)
			if !listed && !is || other {
				return false
			}
		}
	}
	return true
}

// others says whether a slice lists uid, and another endpoint that is ready, on one node if here is
// not nil. One whose pod is terminating is not another: the slice will say so.
func (w *world) others(s slice, uid drain.UID, here *agent) (listed, other bool) {
	for _, e := range s.endpoints {
		listed = listed || e.uid == uid
		other = other || e.uid != uid && e.ready && !e.terminating && !w.api.find(e.uid).terminating &&
			(here == nil || e.host == here)
	}
	return listed, other
}

// clients open connections through the kernel.
func (k *kernel) clients() {
	w := k.w
	pause := w.between(50*time.Millisecond, 600*time.Millisecond)
	if !w.faulty() {
		pause = 5 * time.Second
	}
	w.after(nil, pause, func() {
		k.connect()
		k.clients()
	})
}

func (k *kernel) connect() {
	w := k.w
	may := k.chosen[w.rng.IntN(len(k.chosen))]
	if len(may) == 0 {
		return
	}
	p := w.api.find(may[w.rng.IntN(len(may))])
	if p.stopped {
		w.lostAtKernel(k, p, "new")
		return
	}
	k.active[p.uid]++
	took := w.between(time.Millisecond, 200*time.Millisecond)
	if w.chance(50) {
		took = w.between(time.Second, 20*time.Second)
	}
	w.after(nil, took, func() {
		if k.active[p.uid] = max(0, k.active[p.uid]-1); k.active[p.uid] == 0 {
			k.changed()
		}
	})
}

func (k *kernel) podStopped(p *pod) {
	if k.active[p.uid] > 0 {
		k.active[p.uid] = 0
		k.w.lostAtKernel(k, p, "in flight")
	}
}

// pass is why a pod with a barrier was told to stop.
type pass struct {
	reason string
	at     time.Duration
	// excused holds the node agents that were not owed, and why.
	excused map[*agent]string
	// status is what a coordinator has answered, stated the wait that a Service states.
	status wire.BarrierStatus
	stated time.Duration
}

// hook is a preStop hook that waits: the steps of package hooks.
type hook struct {
	*hooks.Wait
	local gateway.Watch
	p     *pod
	a     *agent
	done  bool
	// run is that of the kubelet that waits for the answer, began when its clock began.
	run   int
	began time.Duration
	seen  time.Time // by the agent's clock
	// passed is the answer of a coordinator, request what it is asked. try counts those that were
	// asked, turn the pauses.
	passed    pass
	request   wire.BarrierRequest
	try, turn int
}

// hooks runs the preStop hook of a pod that is terminating.
func (a *api) hooks(p *pod) { a.runHooks(p, a.w.between(time.Millisecond, 100*time.Millisecond)) }

// runHooks runs them after a pause. An earlier run is forgotten.
func (a *api) runHooks(p *pod, pause time.Duration) {
	w := a.w
	p.run++
	run := p.run
	w.after(nil, pause, func() {
		switch g := p.host; {
		case p.run != run:
		case g.up && g.listed:
			g.wait(p, run)
		default:
			a.sigterm(p, run, pass{reason: "AgentDown"})
		}
	})
	w.after(nil, pause+p.allowed, func() { a.sigterm(p, run, pass{reason: "GraceOver"}) })
}

// wait is cmd/agent's waits.
func (a *agent) wait(p *pod, run int) {
	w := a.w
	for _, h := range a.hooks {
		if h.p == p {
			h.run = run // all hooks of a pod share one wait
			return
		}
	}
	h := &hook{p: p, a: a, run: run, began: p.committed, seen: a.now().Add(p.committed - w.at),
		local: a.kernel.Watch(p.targets(), nil),
		Wait: hooks.NewWait(a.now(), nodepods.Pod{
			Pod: p.drainPod(), Bound: p.bound(), Grace: appGrace, Allowed: p.allowed, Since: epoch.Add(p.committed),
			Seen:    a.now().Add(p.committed - w.at),
			Targets: p.targets(),
		})}
	a.hooks = append(a.hooks, h)
	life := a.life
	w.after(nil, max(0, p.committed+keys.DefaultBound-w.at)+50*time.Millisecond, func() {
		if !h.done && a.up && a.life == life && a.frozen <= w.at {
			w.fail(checkHook, "the hook of %s is not answered by %s when its bound is over", p.uid, a.name)
		}
	})
	h.look()
}

// targets is what the agent on the node of a pod watches: every port.
func (p *pod) targets() []netip.AddrPort {
	return []netip.AddrPort{netip.AddrPortFrom(p.addr.Addr(), 0)}
}

// look is one turn of Server.barrier.
func (h *hook) look() {
	w := h.a.w
	if h.done {
		return
	}
	h.Look(h.a.now(), h.local.Reading())
	if h.Over {
		h.checkStated()
		h.passed.reason = string(h.Outcome)
		h.finish(h.passed)
		return
	}
	h.turn++
	turn := h.turn
	w.after(&h.a.proc, h.Wake.Sub(h.a.now()), func() {
		if h.turn == turn {
			h.look()
		}
	})
	if h.Ask != nil {
		h.request = *h.Ask
		h.ask(0)
	}
}

// answered takes in what a coordinator answers.
func (h *hook) answered(why pass, err error) {
	h.passed = why
	h.Answered(h.a.now(), why.status, err)
	h.look()
}

func (h *hook) finish(why pass) {
	if h.done {
		return
	}
	h.done = true
	h.local.Close()
	h.a.hooks = slices.DeleteFunc(h.a.hooks, func(o *hook) bool { return o == h })
	h.a.log("the hook of %s is answered: %s", h.p.uid, why.reason)
	h.a.w.api.sigterm(h.p, h.run, why)
}

// ask asks the replicas one after the other, from the i-th on: Client.Barrier.
func (h *hook) ask(i int) {
	a, w := h.a, h.a.w
	if h.done {
		return
	}
	h.try++
	try := h.try
	for ; i < len(a.links); i++ {
		if l := a.links[i]; l.open() {
			next := i + 1
			fail := func() {
				if h.try == try {
					h.ask(next)
				}
			}
			l.asks = append(l.asks, fail)
			c, asked := l.c, h.request
			asked.Session, asked.ElapsedMillis = l.session.Hello.Session, (w.at - h.began).Milliseconds()
			if !c.up {
				w.after(&a.proc, time.Millisecond, fail)
				return
			}
			w.send(&a.proc, &c.proc, nil, 0, func() {
				c.bar(&barred{p: h.p, a: a, asked: asked, answer: func(ok bool, why pass) {
					w.send(&c.proc, &a.proc, nil, 0, func() {
						switch {
						case h.done || h.try != try:
						case ok:
							h.answered(why, nil)
						default:
							fail()
						}
					})
				}})
			})
			return
		}
	}
	h.answered(pass{}, client.ErrNoCoordinator)
}

// sigterm is the moment of truth: the application ends at once.
func (a *api) sigterm(p *pod, run int, why pass) {
	if p.stopped || p.passed != nil || p.run != run {
		return
	}
	why.at = a.w.at
	p.passed = &why
	a.w.measure("hooks that were answered: " + why.reason)
	a.w.after(nil, a.w.between(time.Millisecond, 5*time.Millisecond), func() { a.stop(p) })
}

// The coordinator's side.

// barred is a hook that waits at a replica.
type barred struct {
	p      *pod
	a      *agent
	asked  wire.BarrierRequest
	answer func(ok bool, why pass)
	bar    *coordinator.Bar
	// stated is the longest wait that one of the pod's Services states.
	stated time.Duration
	// known says that the replica knew the pod and its mode when it last read the context, targets
	// are those of the pod's Services then.
	known   bool
	targets []drain.Targets
	// began says that it has had a turn, turn counts what it waits for.
	began, over bool
	turn        int
}

// bar is Coordinator.barrier.
func (c *coord) bar(x *barred) {
	w := c.w
	if !c.synced || !c.ledger.Current(x.a.id, x.asked.Session) {
		x.answer(false, pass{})
		return
	}
	who := x.a.identity()
	c.core.MayAsk(who, x.a.mayAsk())
	if !x.a.mayAsk() {
		x.answer(false, pass{})
		return
	}
	var err error
	x.bar, err = c.core.Bar(c.now(), who, x.asked, c.context(x))
	if errors.As(err, new(coordinator.Terminating)) {
		// The hook of the deletion is not this one: here the kubelet runs it for itself.
		w.measure("hooks of pods that stayed whose agent is told that the pod is terminating")
		x.answer(true, pass{reason: "Terminating"})
		return
	}
	if err != nil {
		x.answer(false, pass{})
		return
	}
	c.bars = append(c.bars, x)
	if !x.bar.Look {
		c.barTurn(x)
		return
	}
	w.send(&c.proc, &w.api.node, nil, 0, func() {
		life := coordinator.Living
		switch {
		case x.p.gone:
			life = coordinator.Gone
		case x.p.terminating:
			life = coordinator.Leaving
		}
		w.send(&w.api.node, &c.proc, nil, 0, func() {
			if err := x.bar.Read(life, nil); err != nil {
				c.unbar(x, false, pass{})
				return
			}
			c.barTurn(x)
		})
	})
}

// context is what surrounds the pod of a hook.
func (c *coord) context(x *barred) coordinator.PodContext {
	s, err := c.contexts.PodContext(context.Background(), "shop/"+x.a.name, x.p.drainPod())
	if err != nil {
		panic(err)
	}
	x.stated, x.known, x.targets = s.Stated, s.Known, s.Targets
	s.Elsewhere = c.ready.Elsewhere()
	return s
}

// barTurn is one turn of the loop of Coordinator.barrier.
func (c *coord) barTurn(x *barred) {
	w, p, bar := c.w, x.p, x.bar
	if x.over {
		return
	}
	if x.began && !bar.Restart {
		bar.Context(c.context(x))
	}
	if s := c.ledger.Status(c.now(), drain.AtBarrier, p.uid); !bar.Restart && s.Phase == drain.PhaseUnknown {
		c.rested[p.uid] = c.took
	}
	bar.Turn(c.now())
	if x.known && p.observed() && bar.Status.Reason != drain.NotEnforced {
		w.fail(checkMode, "%s lets a hook of %s wait, whose mode is observe", c.name, p.uid)
	}
	switch s := bar.Status; {
	case s.Reason == drain.NotEnforced:
	case !bar.Restart:
		c.closed(p.uid) // it is known to be dead from then on
	case !x.began && s.Phase != drain.Closed:
		c.restarts(x)
	}
	x.began = true
	c.settle()
	switch {
	case bar.Err != nil:
		c.unbar(x, false, pass{})
	case bar.Over:
		c.passes(x)
	default:
		c.barAfter(x, bar.Wake.Sub(c.now()))
	}
}

func (c *coord) barAfter(x *barred, wait time.Duration) {
	x.turn++
	turn := x.turn
	c.w.after(&c.proc, wait, func() {
		if x.turn == turn {
			c.barTurn(x)
		}
	})
}

// wakeBars wakes the hooks of a pod.
func (c *coord) wakeBars(uid drain.UID) {
	for _, x := range c.bars {
		if x.p.uid == uid && x.began {
			c.barAfter(x, c.w.between(0, 200*time.Microsecond))
		}
	}
}

// passes answers a hook.
func (c *coord) passes(x *barred) {
	p, s := x.p, x.bar.Status
	why := pass{reason: s.Reason.String(), excused: map[*agent]string{}}
	switch {
	case !x.bar.Restart:
		if !p.stopped { // else its hook did not wait for this replica, and what that lost was judged then
			c.checkPass(p, p.host, s, &why)
		}
		why.stated = x.stated
		c.checkRest(p, s)
		c.log("barrier of %s: %s", p.uid, s.Reason)
	case s.Waits():
		why.reason = s.Phase.String()
	case s.Phase == drain.Released && s.Reason == drain.Acknowledged && !p.terminating:
		for _, a := range c.w.agents {
			if a.kernel == nil {
				c.checkDirected(p, s, a, false)
			}
		}
	}
	why.status = x.bar.Answer()
	c.unbar(x, true, why)
}

func (c *coord) unbar(x *barred, ok bool, why pass) {
	x.over = true
	x.bar.Close()
	c.bars = slices.DeleteFunc(c.bars, func(o *barred) bool { return o == x })
	x.answer(ok, why)
}

// acknowledgedAtBarrier says whether one of reports is certainly an acknowledgement in time of an
// open barrier that a owes. Nothing waits for what is only measured: an agent cannot end its
// suspension by that.
func (c *coord) acknowledgedAtBarrier(a *agent, asOf time.Time, reports []drain.Report) bool {
	now := c.now()
	for _, r := range reports {
		s := c.ledger.Status(now, drain.AtBarrier, r.UID)
		_, measured := c.watching[r.UID]
		if measured || s.Phase == drain.PhaseUnknown || s.Phase == drain.Closed ||
			now.Sub(asOf) > c.w.times.Freshness {
			continue
		}
		if r.State >= drain.Removed && c.watched[a.id][r.UID] == r.Number && now.Before(s.Deadline) {
			return true
		}
	}
	return false
}

// learn notes how long a kernel has taken to let go: a plain record beside the ledger's.
func (c *coord) learn(a *agent, r drain.Report) {
	s := c.ledger.Status(c.now(), drain.AtBarrier, r.UID)
	if s.Phase == drain.PhaseUnknown || s.Phase == drain.Closed {
		return
	}
	if a.population != drain.Nodes || r.State < drain.Removed || c.let[r.UID][a] {
		return
	}
	if c.let[r.UID] == nil {
		c.let[r.UID] = map[*agent]bool{}
	}
	c.let[r.UID][a] = true
	if !r.HasSent || c.watched[a.id][r.UID] != r.Number || !c.now().Before(s.Deadline) {
		return
	}
	if s.Deadline.Sub(s.Since) < c.w.times.Deadline*3/4 {
		return // a short barrier teaches nothing, because slow nodes are missing from it
	}
	c.took = max(c.took, c.now().Sub(s.Since))
}

// toldAtBarrier says why a need not have been asked at the barrier of a pod. Empty: it had to be,
// or was. by is the agent whose hooks wait, nil in mode observe.
func (c *coord) toldAtBarrier(p *pod, by, a *agent) (why string) {
	if _, told := c.watched[a.id][p.uid]; told || a == by || a.population != drain.Nodes {
		return ""
	}
	switch {
	case c.w.scope == drain.ScopeLocal && by != nil:
		return "not asked: the scope is local"
	case c.w.scope == drain.ScopeAll:
		return ""
	}
	told, nodes := 0, 0
	for _, o := range c.w.agents {
		if o.population == drain.Nodes {
			nodes++
			_, is := c.watched[o.id][p.uid]
			told += oneIf(is || !c.streaming(o))
		}
	}
	if c.w.scope == drain.ScopeAuto && nodes <= sampling.AllUpTo || told < sampling.Size {
		return ""
	}
	return "not asked: not in the sample"
}

// streaming says whether an agent has a stream here.
func (c *coord) streaming(a *agent) bool {
	return slices.ContainsFunc(c.streams, func(st *stream) bool {
		return st.link.a == a && c.ledger.Current(a.id, st.Number)
	})
}

// checkStated looks at the time of a hook that ends before its deadline by the answer of a
// coordinator.
func (h *hook) checkStated() {
	if !slices.ContainsFunc([]drain.Reason{drain.Acknowledged, drain.IdleBound, drain.LastTarget, drain.NoAgents,
		drain.Suspended, drain.AgentsLost}, func(r drain.Reason) bool { return r.String() == string(h.Outcome) }) {
		return
	}
	if over := h.a.now().Sub(h.seen); over < h.passed.stated && over < keys.DefaultBound {
		h.a.w.fail(checkStated, "%s lets %s stop by %s after %s, and %s is the wait that one of its Services states",
			h.a.name, h.p.uid, h.Outcome, over, h.passed.stated)
	}
}

// checkRest looks at the time of a barrier that is passed before its deadline without some nodes.
func (c *coord) checkRest(p *pod, s drain.Status) {
	w := c.w
	switch s.Reason {
	case drain.Acknowledged, drain.IdleBound, drain.LastTarget, drain.NoAgents, drain.Suspended, drain.AgentsLost:
	default:
		return
	}
	stated, who := time.Duration(0), ""
	for _, a := range w.agents {
		if rest := c.rested[p.uid]; a.kernel != nil && c.streaming(a) &&
			c.toldAtBarrier(p, p.host, a) == "not asked: not in the sample" && rest > stated {
			stated, who = rest, "those have taken that were asked, for "+a.name
		}
	}
	if over := c.now().Sub(s.Since); over < stated && c.now().Before(s.Deadline) {
		w.fail(checkStated, "%s lets %s stop by %s after %s, and %s is the wait that %s", c.name, p.uid, s.Reason, over,
			stated, who)
	}
}

// checkPass looks at every node when a barrier is passed, and remembers in why who was not owed.
func (c *coord) checkPass(p *pod, by *agent, s drain.Status, why *pass) {
	w := c.w
	switch s.Reason {
	case drain.Acknowledged, drain.IdleBound, drain.LastTarget, drain.NoAgents, drain.Suspended, drain.AgentsLost:
	default:
		return
	}
	for _, a := range w.agents {
		if a.kernel == nil {
			c.checkDirected(p, s, a, by == nil)
			switch {
			case slices.ContainsFunc(s.Suspended, func(x drain.Waiting) bool { return x.Agent == a.id }):
				why.excused[a] = "Suspended"
			case !c.streaming(a):
				why.excused[a] = "Away"
			}
			continue
		}
		connected := slices.ContainsFunc(c.streams, func(st *stream) bool {
			return st.link.a == a && c.ledger.Current(a.id, st.Number)
		})
		last := s.Reason == drain.LastTarget || s.Reason == drain.AgentsLost // takes its place
		listed, ready := false, false
		for _, e := range c.roster {
			if e.ID == a.id {
				listed, ready = true, e.Ready
			}
		}
		suspended := slices.ContainsFunc(s.Suspended, func(x drain.Waiting) bool { return x.Agent == a.id })
		switch {
		case suspended:
			why.excused[a] = "Suspended"
		case c.toldAtBarrier(p, by, a) != "":
			why.excused[a] = c.toldAtBarrier(p, by, a)
			if a.kernel.routes(p.uid) {
				w.excuse("routed by a kernel: " + why.excused[a])
			}
		case connected || listed && ready:
			switch {
			case !a.kernel.routes(p.uid):
			case a.kernel.kept(p.uid), last && a.kernel.stays(p.uid, w.api.slices):
				w.excuse("routed by a kernel: LastTarget")
				if s.Reason == drain.AgentsLost {
					why.excused[a] = "LastTarget"
				}
			case a.kernel.late(p) != "":
				w.excuse("routed by a kernel: " + a.kernel.late(p))
			case last && a.kernel.behind():
				w.excuse("routed by a kernel: it hears more than 10 s late")
			case last && a.kernel.stays(p.uid, c.slices):
				w.excuse("routed by a kernel: LastTarget, and another endpoint is just becoming ready")
				if s.Reason == drain.AgentsLost {
					why.excused[a] = "LastTarget"
				}
			case last && a.kernel.alone(p.uid) && c.misled(p.uid):
				w.excuse("routed by a kernel: LastTarget, and the coordinator takes for ready what no longer is")
				if s.Reason == drain.AgentsLost {
					why.excused[a] = "LastTarget"
				}
			case w.misdated(p, w.at):
				w.excuse("routed by a kernel: " + misdated)
				why.excused[a] = misdated
			default:
				w.fail(checkSIGTERM, "%s lets %s stop by %s, but the kernel of %s sends to it", c.name, p.uid, s.Reason,
					a.name)
			}
		default:
			why.excused[a] = "Away"
		}
	}
}

// checkMeasured looks at every gateway when it was measured how long a deletion would have waited.
func (c *coord) checkMeasured(m coordinator.Measured) {
	c.w.measure("deletions that were measured: " + m.Reason.String())
	c.log("%s would have waited for %s: %s", m.Pod.UID, m.Took, m.Reason)
	defer delete(c.watching, m.Pod.UID)
	if m.Reason != drain.Acknowledged && m.Reason != drain.IdleBound {
		return // no wait is reported
	}
	c.checkPass(c.w.api.find(m.Pod.UID), nil, m.Status, &pass{excused: map[*agent]string{}})
}

// checkDirected looks at an agent that directs, when a barrier is passed: whether or not it was
// asked at the hold, it has let go by now.
func (c *coord) checkDirected(p *pod, s drain.Status, a *agent, measured bool) {
	w := c.w
	connected := slices.ContainsFunc(c.streams, func(st *stream) bool {
		return st.link.a == a && c.ledger.Current(a.id, st.Number)
	})
	_, services, _ := c.services(p)
	if of, is := c.watching[p.uid]; is && measured {
		services = of // no Service that this replica learned of later is measured
	}
	switch {
	case !a.gw.routes(p.uid) || !a.share(services) || !connected || c.departed[a.id] != "":
	case slices.ContainsFunc(s.Suspended, func(x drain.Waiting) bool { return x.Agent == a.id }):
		w.excuse("routed at SIGTERM: Suspended")
	case a.right != "" && len(c.declared[a]) == 0:
		w.excuse("routed at SIGTERM: Undeclared")
	case c.restarted[p.uid] > 0 && !a.share(slices.DeleteFunc(services, func(s drain.Service) bool {
		return !c.room[p.uid].services[s]
	})):
		w.excuse("routed at SIGTERM: a Service has listed a pod since, whose container is started again")
	case a.gw.forgot >= 0 && w.at-a.gw.forgot <= w.spentMost():
		w.excuse("routed at SIGTERM: gateway reloaded since")
	case a.unlearned:
		w.excuse("routed at SIGTERM: Unlearned")
	case w.kinds[timeTravel] && a.started+w.spentMost() > w.at:
		w.excuse("routed at SIGTERM: the agent started with an old list")
	default:
		w.fail(checkSIGTERM, "%s lets %s stop by %s, but the gateway of %s sends to it", c.name, p.uid, s.Reason,
			a.name)
	}
}

// lostAtKernel judges a connection that reached a pod which had stopped, or was open to it.
func (w *world) lostAtKernel(k *kernel, p *pod, how string) {
	w.logf(k.a.name, "a connection to %s is lost in the kernel (%s)", p.uid, how)
	why := p.passed
	switch {
	case p.halted != "":
		w.excuse("lost in a kernel: " + p.halted)
	case why == nil:
		w.excuse("lost in a kernel: no barrier")
	case why.reason != drain.Acknowledged.String() && why.reason != drain.AgentsLost.String() &&
		(why.reason != drain.IdleBound.String() || how == "in flight"):
		w.excuse("lost in a kernel: " + why.reason)
	case why.excused[k.a] != "":
		w.excuse("lost in a kernel: " + why.excused[k.a])
	case k.kept(p.uid), k.stays(p.uid, w.api.slices):
		w.excuse("lost in a kernel: LastTarget since")
	case k.late(p) != "":
		w.excuse("lost in a kernel: " + k.late(p))
	case w.misdated(p, why.at):
		w.excuse("lost in a kernel: " + misdated)
	default:
		w.fail(checkLost, "a connection to %s through the kernel of %s is lost (%s): it was let stop at %s by %s",
			p.uid, k.a.name, how, why.at, why.reason)
	}
}

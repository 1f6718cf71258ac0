package main

import (
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// barrierBound, answerMargin, barrierLook, askAgain, localIdle, localKept are those of the real shells (cmd/agent, pkg/drain/coordinator). kubeletMost is
	// when the kubelet goes on whatever the hook does.
	barrierBound = 30 * time.Second
	answerMargin = 250 * time.Millisecond
	barrierLook  = 250 * time.Millisecond
	askAgain     = 250 * time.Millisecond
	localIdle    = 10 * time.Second
	localKept    = 2 * time.Second
	kubeletMost  = 40 * time.Second
)

// kernel is a node's, kube-proxy included: it follows EndpointSlices, late, and takes no orders.
type kernel struct {
	w     *world
	a     *agent
	proxy proc
	watch *watcher
	// slices are as kube-proxy heard them, and chosen what it last made of each Service of them: the ready endpoints or, without any, the
	// terminating ones (KEP-1669).
	slices []slice
	chosen [][]drain.UID
	// without says of which Services there was no ready endpoint then.
	without []bool
	synced  bool
	dirty   bool
	// added is when the kernel began to send to a pod, the last time.
	added  map[drain.UID]time.Duration
	active map[drain.UID]int
	// travelled: kube-proxy was told an older list.
	travelled bool
}

func newKernel(w *world, a *agent) *kernel {
	k := &kernel{
		w: w, a: a, proxy: proc{node: a.node, name: "proxy-" + a.name, up: true}, active: map[drain.UID]int{}, added: map[drain.UID]time.Duration{},
		slices: make([]slice, w.api.services), chosen: make([][]drain.UID, w.api.services), without: make([]bool, w.api.services),
	}
	k.watch = &watcher{p: &k.proxy, slice: k.sliceSeen}
	w.api.watchers = append(w.api.watchers, k.watch)
	w.api.list(k.watch, func() {})
	k.clients()
	return k
}

func (k *kernel) sliceSeen(service int, s slice) {
	k.travelled = k.travelled || s.version < k.slices[service].version
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
		k.chosen[i] = nil
		for _, e := range s.endpoints {
			if e.ready && !e.terminating {
				k.chosen[i] = append(k.chosen[i], e.uid)
			}
		}
		if k.without[i] = len(k.chosen[i]) == 0; !k.without[i] {
			continue
		}
		for _, e := range s.endpoints {
			if e.terminating {
				k.chosen[i] = append(k.chosen[i], e.uid)
			}
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

// late says that the kernel had not heard yet that a pod is ready when that was deleted: it came in after it had been seen to be out.
func (k *kernel) late(p *pod) bool { return k.added[p.uid] >= p.committed }

// changed tells the agent, soon.
func (k *kernel) changed() {
	a := k.a
	k.w.after(&a.proc, k.w.between(0, 10*time.Millisecond), func() {
		for _, l := range a.links {
			l.poke(false)
		}
	})
}

func (k *kernel) routes(uid drain.UID) bool {
	return slices.ContainsFunc(k.chosen, func(c []drain.UID) bool { return slices.Contains(c, uid) })
}

func (k *kernel) state(uid drain.UID) drain.State {
	switch {
	case !k.synced:
		return drain.StateUnknown
	case slices.ContainsFunc(k.chosen, func(c []drain.UID) bool { return len(c) == 1 && c[0] == uid }):
		return drain.Kept
	case k.routes(uid):
		return drain.Routing
	case k.active[uid] > 0:
		return drain.Removed
	default:
		return drain.Idle
	}
}

// kept says whether the kernel sends to uid for want of a ready endpoint only, as far as kube-proxy had heard when it wrote its rules.
func (k *kernel) kept(uid drain.UID) bool {
	for i, c := range k.chosen {
		if slices.Contains(c, uid) && !k.without[i] {
			return false
		}
	}
	return true
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
}

// hook is a preStop hook that waits.
type hook struct {
	p    *pod
	a    *agent
	done bool
	// alone: no coordinator could be asked since the last one failed.
	alone     bool
	try       int
	removedAt time.Duration
}

// hooks runs the preStop hook of a pod that is terminating.
func (a *api) hooks(p *pod) {
	w := a.w
	w.after(nil, w.between(time.Millisecond, 100*time.Millisecond), func() {
		if g := p.host; g.up && g.listed {
			g.wait(p)
		} else {
			a.sigterm(p, pass{reason: "AgentDown"})
		}
	})
	w.after(nil, kubeletMost, func() { a.sigterm(p, pass{reason: "GraceOver"}) })
}

// wait is cmd/agent's waits.
func (a *agent) wait(p *pod) {
	w := a.w
	h := &hook{p: p, a: a}
	a.hooks = append(a.hooks, h)
	left := p.committed + barrierBound - w.at
	life := a.life
	w.after(nil, left+50*time.Millisecond, func() {
		if !h.done && a.up && a.life == life && a.frozen <= w.at {
			w.fail(checkHook, "the hook of %s is not answered by %s when its bound is over", p.uid, a.name)
		}
	})
	w.after(&a.proc, left, func() { h.finish(pass{reason: "Bound"}) })
	h.ask(0)
}

func (h *hook) finish(why pass) {
	if h.done {
		return
	}
	h.done = true
	h.a.hooks = slices.DeleteFunc(h.a.hooks, func(o *hook) bool { return o == h })
	h.a.log("the hook of %s is answered: %s", h.p.uid, why.reason)
	h.a.w.api.sigterm(h.p, why)
}

// ask asks the replicas one after the other, from the i-th on, and then the kernel.
func (h *hook) ask(i int) {
	a, w := h.a, h.a.w
	if h.done {
		return
	}
	h.try++
	try := h.try
	for ; i < len(a.links); i++ {
		if l := a.links[i]; l.conn != nil && l.synced {
			next := i + 1
			fail := func() {
				if h.try == try {
					h.ask(next)
				}
			}
			l.asks = append(l.asks, fail)
			c, session, elapsed := l.c, l.session, w.at-h.p.committed
			if !c.up {
				w.after(&a.proc, time.Millisecond, fail)
				return
			}
			w.send(&a.proc, &c.proc, nil, 0, func() {
				c.bar(&barred{h: h, session: session, since: w.now.Add(-elapsed), life: c.life, answer: func(ok bool, why pass) {
					w.send(&c.proc, &a.proc, nil, 0, func() {
						switch {
						case h.done || h.try != try:
						case ok:
							h.finish(why)
						default:
							fail()
						}
					})
				}})
			})
			return
		}
	}
	h.alone = true
	h.local()
	w.after(&a.proc, askAgain, func() { h.ask(0) })
}

// local ends the hook if this node's kernel has let go.
func (h *hook) local() {
	w, k := h.a.w, h.a.kernel
	state := k.state(h.p.uid)
	switch {
	case state < drain.Removed:
		h.removedAt = 0
	case h.removedAt == 0:
		h.removedAt = w.at
	}
	late := w.at-h.p.committed >= localKept
	if state == drain.Idle || state == drain.Removed && w.at-h.removedAt >= localIdle ||
		late && (state == drain.StateUnknown || state == drain.Kept && k.active[h.p.uid] == 0) {
		h.finish(pass{reason: "Local"})
	}
}

// sigterm is the moment of truth: the application ends at once.
func (a *api) sigterm(p *pod, why pass) {
	if p.stopped || p.passed != nil {
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
	h       *hook
	session uint64
	since   time.Time
	life    int
	answer  func(ok bool, why pass)
	turn    int
	over    bool
}

func (c *coord) bar(x *barred) {
	w, uid := c.w, x.h.p.uid
	if c.stopping || !c.ledger.Current(x.h.a.id, x.session) {
		x.answer(false, pass{})
		return
	}
	c.bars = append(c.bars, x)
	if c.pods[uid].terminating {
		c.barTurn(x)
		return
	}
	// The agent has heard earlier: it is read live, and is terminating.
	w.send(&c.proc, &w.api.node, nil, 0, func() {
		w.send(&w.api.node, &c.proc, nil, 0, func() { c.barTurn(x) })
	})
}

// barTurn is one turn of the loop of Coordinator.barrier.
func (c *coord) barTurn(x *barred) {
	w, p := c.w, x.h.p
	if x.over {
		return
	}
	if c.stopping {
		c.unbar(x)
		x.answer(false, pass{})
		return
	}
	services, _, _ := c.listings(p.uid)
	last := false
	for i, s := range c.slices {
		listed, others := false, 0
		for _, e := range s.endpoints {
			listed = listed || e.uid == p.uid
			others += number(e.uid != p.uid && e.ready && !e.terminating)
		}
		last = last || listed && others == 0 && slices.Contains(services, service(i))
	}
	s := c.ledger.OpenBarrier(w.now, drain.Barrier{
		Pod: p.drainPod(), By: x.h.a.id, Services: services, Since: x.since, Bound: barrierBound - answerMargin, Last: last,
	})
	c.closed(p.uid) // it is known to be dead from then on
	if !s.Waits() {
		c.unbar(x)
		why := pass{reason: s.Reason.String(), excused: map[*agent]string{}}
		c.checkPass(p, s, &why, last)
		c.log("barrier of %s: %s", p.uid, s.Reason)
		c.settle()
		x.answer(true, why)
		return
	}
	at := w.now.Add(barrierLook)
	if !s.Recheck.IsZero() && s.Recheck.Before(at) {
		at = s.Recheck
	}
	x.turn++
	turn := x.turn
	w.after(&c.proc, at.Sub(w.now), func() {
		if x.turn == turn {
			c.barTurn(x)
		}
	})
	c.settle()
}

func (c *coord) unbar(x *barred) {
	x.over = true
	c.bars = slices.DeleteFunc(c.bars, func(o *barred) bool { return o == x })
}

// lookBarriers ends those of pods that are gone.
func (c *coord) lookBarriers() {
	for _, s := range c.ledger.Barriers(c.w.now) {
		if _, known := c.pods[s.Pod.UID]; c.synced && !known && !c.w.now.Before(s.Deadline) {
			c.ledger.Deleted(c.w.now, s.Pod.UID)
		}
	}
}

// settleBarriers wakes those who wait at a barrier that may have changed.
func (c *coord) settleBarriers() bool {
	touched := c.ledger.TouchedBarriers()
	for _, uid := range touched {
		c.ledger.BarrierStatus(c.w.now, uid)
		for _, x := range c.bars {
			if x.h.p.uid == uid {
				x.turn++
				turn := x.turn
				c.w.after(&c.proc, c.w.between(0, 200*time.Microsecond), func() {
					if x.turn == turn {
						c.barTurn(x)
					}
				})
			}
		}
	}
	return len(touched) > 0
}

// acknowledgedAtBarrier says whether one of reports is certainly an acknowledgement in time of an open barrier that a owes.
func (c *coord) acknowledgedAtBarrier(a *agent, asOf time.Time, reports []drain.Report) bool {
	now := c.w.now
	for _, r := range reports {
		s := c.ledger.BarrierStatus(now, r.UID)
		if s.Phase == drain.PhaseUnknown || s.Phase == drain.Closed || !r.Held || r.State < drain.Removed || now.Sub(asOf) > c.w.times.Freshness {
			continue
		}
		if c.watched[a.id][r.UID] == r.Number && now.Before(s.Deadline) {
			return true
		}
	}
	return false
}

// checkPass looks at every node when a barrier is passed, and remembers in why who was not owed.
func (c *coord) checkPass(p *pod, s drain.Status, why *pass, last bool) {
	w := c.w
	switch s.Reason {
	case drain.Acknowledged, drain.IdleBound, drain.LastTarget, drain.NoAgents, drain.Suspended:
	default:
		return
	}
	for _, a := range w.agents {
		if a.kernel == nil {
			c.checkDirected(p, s, a)
			continue
		}
		connected := slices.ContainsFunc(c.streams, func(st *stream) bool { return st.link.a == a && c.ledger.Current(a.id, st.session) })
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
		case connected || listed && ready:
			switch {
			case !a.kernel.routes(p.uid):
			case a.kernel.kept(p.uid):
				w.excuse("routed by a kernel: LastTarget")
			case a.kernel.late(p):
				w.excuse("routed by a kernel: it had not heard of the pod before")
			case a.kernel.travelled:
				w.excuse("routed by a kernel: told an old list")
			case s.Reason == drain.LastTarget && last:
				w.excuse("routed by a kernel: LastTarget, and another endpoint is just becoming ready")
			default:
				w.fail(checkBarrier, "%s lets %s stop by %s, but the kernel of %s sends to it", c.name, p.uid, s.Reason, a.name)
			}
		default:
			why.excused[a] = "Away"
		}
	}
}

// checkDirected looks at an agent that directs, when a barrier is passed: whether or not it was asked at the hold, it has let go by now.
func (c *coord) checkDirected(p *pod, s drain.Status, a *agent) {
	w := c.w
	connected := slices.ContainsFunc(c.streams, func(st *stream) bool { return st.link.a == a && c.ledger.Current(a.id, st.session) })
	services, _, _ := c.listings(p.uid)
	switch {
	case !a.gw.routes(p.uid) || !a.share(services) || !connected || c.departed[a.id] != "":
	case slices.ContainsFunc(s.Suspended, func(x drain.Waiting) bool { return x.Agent == a.id }):
		w.excuse("routed at SIGTERM: Suspended")
	case a.gw.forgot >= 0 && w.at-a.gw.forgot <= w.spentMost():
		w.excuse("routed at SIGTERM: gateway reloaded since")
	case a.unlearned:
		w.excuse("routed at SIGTERM: Unlearned")
	case w.kinds[timeTravel] && a.started+w.spentMost() > w.at:
		w.excuse("routed at SIGTERM: the agent started with an old list")
	default:
		w.fail(checkBarrier, "%s lets %s stop by %s, but the gateway of %s sends to it", c.name, p.uid, s.Reason, a.name)
	}
}

// lostAtKernel judges a connection that reached a pod which had stopped, or was open to it.
func (w *world) lostAtKernel(k *kernel, p *pod, how string) {
	w.logf(k.a.name, "a connection to %s is lost in the kernel (%s)", p.uid, how)
	why := p.passed
	switch {
	case why == nil:
		w.excuse("lost in a kernel: no barrier")
	case why.reason != drain.Acknowledged.String() && (why.reason != drain.IdleBound.String() || how == "in flight"):
		w.excuse("lost in a kernel: " + why.reason)
	case why.excused[k.a] != "":
		w.excuse("lost in a kernel: " + why.excused[k.a])
	case k.kept(p.uid):
		w.excuse("lost in a kernel: LastTarget since")
	case k.late(p):
		w.excuse("lost in a kernel: it had not heard of the pod before")
	case k.travelled:
		w.excuse("lost in a kernel: told an old list")
	default:
		w.fail(checkLost, "a connection to %s through the kernel of %s is lost (%s): it was let stop at %s by %s", p.uid, k.a.name, how, why.at, why.reason)
	}
}

package main

import (
	"context"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/peers"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// call is one review: the steps of package admission, once it has arrived.
type call struct {
	*admission.Call
	caller  *caller
	timeout time.Duration
	sent    time.Duration
	began   time.Time
	life    int
	answer  func(verdict)
	reset   func()
	// ctx ends, by gone, when the API server does not wait any more.
	ctx  context.Context
	gone context.CancelFunc
	// claimed is when another replica last was asked, or could not be, cancel ends a question that
	// is under way.
	claimed time.Duration
	cancel  func()
	// hold waits for the drain, of a pod that services list. changed is the status with which that
	// has changed. turnOf counts what it waits for.
	hold     *coordinator.Hold
	services []drain.Service
	changed  *drain.Status
	last     []health.Pool // of the pod, when its status was derived
	woken    bool
	turnOf   int
}

// newHandler makes the handler of this life. What it asks is the ledger, and what it reads a cache.
func (c *coord) newHandler() *admission.Handler {
	return &admission.Handler{
		Cluster: &admission.Cluster{
			Reader: cache{c, false}, Live: cache{c, true}, Ledger: noted{c},
			Slices: admission.Ahead{Slices: c.index, Reader: cache{c, false}, Synced: func() bool { return true },
				Ledger: c, Now: func() time.Time { return c.now() }},
			Services: func() bool { return c.synced },
			Synced:   func() bool { return c.synced }, Started: c.now(), Coverage: covered{},
		},
		Times: c.w.times, Log: c.w.logger(c.name), Others: asked{c.table},
	}
}

// covered is a cluster whose gateways all have an agent.
type covered struct{}

// Uncovered implements [admission.Coverage].
func (covered) Uncovered(context.Context, []drain.Service, bool) ([]string, error) { return nil, nil }

// asked are the other replicas: [coord.walk] asks them.
type asked struct{ *peers.Table }

// Claim implements [admission.Others].
func (asked) Claim(context.Context, wire.Claim) (wire.Claimed, bool) { panic("not a step") }

// Asked implements [admission.Others].
func (asked) Asked(context.Context, drain.Pod, time.Duration) bool { panic("not a step") }

// noted is the ledger, with a record of what is asked of it beside it.
type noted struct{ *coord }

// Drain implements [admission.Ledger]: [coord.drain] waits.
func (noted) Drain(context.Context, coordinator.Request, time.Time) (drain.Status, bool, error) {
	panic("not a step")
}

// Unroute implements [admission.Ledger].
func (l noted) Unroute(request coordinator.Request) {
	l.opened(request, l.core.Unroute(l.now(), request), true)
}

// Observe implements [admission.Ledger].
func (l noted) Observe(request coordinator.Request, targets []netip.AddrPort, young time.Duration) {
	if _, known := l.watching[request.Pod.UID]; !known {
		l.watching[request.Pod.UID] = nil
		for _, t := range request.Targets {
			l.watching[request.Pod.UID] = append(l.watching[request.Pod.UID], t.Service)
		}
	}
	l.core.Observe(l.now(), request, targets, young)
}

// Claim implements [admission.Ledger].
func (l noted) Claim(request coordinator.Request) (drain.Status, error) {
	if l.evicts {
		l.checkBudget(l.w.api.find(request.Pod.UID))
	}
	s, crowded := l.core.Claim(l.now(), request)
	if s.Phase != drain.PhaseUnknown { // else the owner is refused
		l.opened(request, s, false)
	}
	l.answered[request.Pod.UID] = l.w.at
	if is := l.calls[request.Pod.UID]; is != nil {
		is.brokenOff, is.deleted = false, is.deleted || !l.evicts
	}
	return s, crowded
}

// Decided implements [admission.Ledger].
func (l noted) Decided(uid drain.UID, allowed bool) {
	l.core.Ledger.Decided(l.now(), uid, allowed)
	l.checkDecided(uid, allowed)
	l.settle()
}

// Draining implements [admission.Ledger].
func (l noted) Draining(pods []drain.UID) int { return l.core.Draining(pods) }

// ReliedOn implements [admission.Ledger].
func (l noted) ReliedOn(uid drain.UID) bool { return l.core.ReliedOn(uid) }

// Ahead implements [admission.Ledger].
func (l noted) Ahead(request coordinator.Request, others []drain.UID, allowed int, claim bool) (ahead int) {
	if ahead = l.core.Ahead(l.now(), request, others, allowed, false); ahead < 0 && claim {
		l.Claim(request)
	}
	return ahead
}

// admit takes in a review.
func (c *coord) admit(x *call) {
	p := x.caller.p
	x.began = c.now()
	var old *corev1.Pod
	var grace *int64
	if !x.caller.evict { // an Eviction review has no pod with it
		old = p.object(p.view())
	}
	switch {
	case x.caller.forced:
		grace = new(int64)
	case x.caller.hasty:
		grace = new(int64(hastyGrace / time.Second))
	}
	c.evicts = x.caller.evict
	x.Call = c.handler.Review(x.ctx, c.now(), x.caller.operation(), p.drainPod(), old, grace, x.timeout, x.caller.ctrl)
	c.walk(x)
}

// walk carries out what a call needs next: Handler.decide.
func (c *coord) walk(x *call) {
	switch x.Next {
	case admission.NextClaim:
		c.claim(x)
	case admission.NextHold:
		c.drain(x)
	case admission.NextAsk:
		c.w.after(&c.proc, x.At.Sub(c.now()), func() { c.askBeside(x) })
	default:
		c.reply(x)
	}
}

// claim asks the opener.
func (c *coord) claim(x *call) {
	w, before := c.w, c.table.Before()
	if first := w.coords[w.opener()]; len(before) == 0 && first != c ||
		len(before) > 0 && first.name != before[0].Name {
		w.parted = w.at
	}
	judged := func(claimed wire.Claimed) bool {
		if !peers.Judged(claimed) {
			w.parted = w.at
		}
		return peers.Judged(claimed)
	}
	left := x.Until.Sub(c.now())
	x.cancel = c.first(before, x.Claim(c.now()), x.caller.p, judged, func(claimed wire.Claimed, witness bool) {
		x.cancel, x.claimed, c.evicts = nil, w.at, x.caller.evict
		x.Claimed(x.ctx, c.now(), claimed, witness)
		c.walk(x)
	})
	if left < peers.ClaimTime {
		w.after(&c.proc, left, x.cancel)
	}
}

// claimed is what a replica answers to a claim: Coordinator.claim.
func (c *coord) claimed(claim wire.Claim, _ *pod) (is wire.Claimed) {
	if !claim.OnlyAsked && c.able() {
		c.evicts = admission.Operation(claim.Operation) == admission.Evict
		is = c.handler.ClaimAt(context.Background(), c.now(), claim)
	}
	is.AskedMillis = c.core.Asked(c.now(), claim)
	return is
}

// askBeside asks whether another replica was asked about the deletion.
func (c *coord) askBeside(x *call) {
	w, p := c.w, x.caller.p
	within, left := c.now().Sub(x.began)+admission.SameCall, x.Until.Sub(c.now())
	counts := func(claimed wire.Claimed) bool { return peers.AskedWithin(claimed, within) }
	cancel := c.first(c.table.Beside(), wire.Claim{Pod: p.drainPod(), OnlyAsked: true}, p, counts,
		func(_ wire.Claimed, yes bool) {
			x.claimed = w.at
			x.Asked(c.now(), yes)
			c.walk(x)
		})
	w.after(&c.proc, left, cancel)
}

// drain waits for the drain: Coordinator.Drain.
func (c *coord) drain(x *call) {
	request := x.Request()
	if x.hold == nil {
		_, x.services, _ = c.services(x.caller.p)
	}
	x.changed, x.hold = nil, c.core.Hold(c.now(), request, x.Until)
	if x.hold.Status.Phase != drain.PhaseUnknown { // else the owner is refused
		c.opened(request, x.hold.Status, false)
	}
	if is := c.calls[x.caller.p.uid]; is != nil {
		is.deleted = is.deleted || !x.caller.evict
	}
	x.last = c.lastOf(x.caller.p)
	if x.ctx.Err() != nil && !x.hold.Over {
		x.hold.GiveUp(c.now(), x.ctx.Err())
	}
	c.holds = append(c.holds, x)
	c.checkHeldOwners()
	c.sleep(x)
}

func (c *coord) wake(x *call, changed *drain.Status) {
	x.last = c.lastOf(x.caller.p)
	if x.changed = changed; x.woken {
		return
	}
	x.woken = true
	c.w.after(&c.proc, c.w.between(0, 200*time.Microsecond), func() { c.recheck(x) })
}

// sleep waits until the call is to be rechecked, or continues if it does not wait.
func (c *coord) sleep(x *call) {
	x.turnOf++
	turn := x.turnOf
	if x.hold.Over {
		c.holds = slices.DeleteFunc(c.holds, func(o *call) bool { return o == x })
		c.answered[x.caller.p.uid] = c.w.at
		x.Held(x.ctx, c.now(), x.hold.Status, x.hold.Waited, x.hold.Err)
		c.walk(x)
		return
	}
	c.w.after(&c.proc, x.hold.Wake().Sub(c.now()), func() {
		if x.turnOf == turn {
			c.recheck(x)
		}
	})
}

func (c *coord) recheck(x *call) {
	x.woken = false
	if x.hold.Over {
		return
	}
	if x.changed == nil {
		x.last = c.lastOf(x.caller.p)
	}
	x.hold.Recheck(c.now(), x.changed)
	x.changed = nil
	c.settle()
	c.sleep(x)
}

// hangUp hears that the API server does not wait any more.
func (c *coord) hangUp(x *call) {
	x.gone()
	if x.cancel != nil {
		x.cancel()
	}
	if x.hold != nil && !x.hold.Over {
		x.hold.GiveUp(c.now(), x.ctx.Err())
		c.settle()
		c.sleep(x)
	}
}

// reply answers a review.
func (c *coord) reply(x *call) {
	w, p, s := c.w, x.caller.p, x.Status
	if x.hold != nil && p.observed() {
		w.fail(checkMode, "%s holds the deletion of %s, whose mode is observe", c.name, p.uid)
	}
	if x.Reason == string(admission.TooManyOwners) {
		p.crowded++
	}
	v := verdict{allowed: x.Allowed, retryAfter: x.RetryAfter}
	switch waited := x.hold != nil && x.Err == nil; {
	case x.Allowed && waited && !s.Waits():
		c.expired(s)
		wd := &word{reason: s.Reason.String(), at: w.at, by: c, life: c.life, left: x.Request().BarrierWaits}
		c.checkAllow(p, s, wd, x.services, x.last)
		if s.Reason == drain.BarrierWaits {
			c.checkReliance(x)
		}
		v.words = []*word{wd}
	case x.Allowed:
		v.words = []*word{{reason: x.Reason, at: w.at}}
	case x.hold != nil:
		c.expired(s)
		if waited {
			c.checkDeny(x, s)
			v.waits, v.queued = c, s.Phase == drain.Queued
		}
	}
	c.noteAnswer(x)
	c.log("answers for %s: allowed=%t %s retry=%s", p.uid, v.allowed, x.Reason, v.retryAfter)
	if v.allowed {
		w.allowed[x.Reason]++
	}
	c.checkInTime(x)
	c.inbound = slices.DeleteFunc(c.inbound, func(o *call) bool { return o == x })
	x.answer(v)
}

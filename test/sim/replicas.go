package main

import (
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// These are those of the real shells (internal/peers, cmd/webhook, pkg/admission,
	// internal/coordinator).
	claimTime     = time.Second
	pollTime      = time.Second
	pollEvery     = time.Second
	adoptEvery    = 250 * time.Millisecond
	abstainWithin = 500 * time.Millisecond
	abstainEvery  = 50 * time.Millisecond
	sameCall      = 250 * time.Millisecond
	turnKept      = 5 * time.Second
	// probeEvery and probesFailed are those of the readiness probe.
	probeEvery   = time.Second
	probesFailed = 3
)

// peer is what a replica knows of another one: package peers, without its goroutines.
type peer struct {
	of *coord
	// listed is the condition of its pod, as far as this replica has heard of it.
	listed, silent, polled bool
	state                  wire.Replica
}

// turn says whether a call may wait, as [coordinator.Turn] does.
type turn int

const (
	turnJudged turn = iota
	turnHeld
	turnUnheld
)

// asking is one pod's turn among those of its owner.
type asking struct {
	uid drain.UID
	at  time.Duration
}

// ordinal is the number of the entry of the webhook configuration that is this replica.
func (c *coord) ordinal() int { return slices.Index(c.w.coords, c) }

// meetPeers begins to know the other replicas.
func (c *coord) meetPeers() {
	c.peers, c.others = nil, nil
	for _, o := range c.w.coords {
		if o != c {
			c.peers = append(c.peers, &peer{of: o, listed: o.listed})
		}
	}
}

// setListed sets the condition of the replica's pod, and with it whether its entry has an endpoint.
func (c *coord) setListed(is bool) {
	if c.listed == is {
		return
	}
	c.listed, c.w.parted = is, c.w.at
	c.w.logf("api", "%s is ready=%t", c.name, is)
	for _, o := range c.w.coords {
		for _, p := range o.peers {
			if p.of == c {
				c.w.api.tell(o.watch, func() { p.listed = is })
			}
		}
	}
}

// probed is the kubelet's readiness probe.
func (c *coord) probed() {
	w := c.w
	w.after(nil, probeEvery, func() {
		switch {
		case c.up && c.frozen <= w.at && c.able():
			c.failed = 0
			c.setListed(true)
		case !c.up:
			c.setListed(false)
		default:
			if c.failed++; c.failed >= probesFailed {
				c.setListed(false)
			}
		}
		c.probed()
	})
}

// able is readiness.check of cmd/webhook.
func (c *coord) able() bool {
	if c.stopping || !c.synced || !c.adopted {
		return false
	}
	n := c.ledger.Counts()
	if n.Missing > 0 && c.w.at-c.started < settleTime && !c.settled {
		return false
	}
	c.settled = true
	return 2*n.Missing <= n.Expected || !c.sees()
}

// sees says whether another replica has streams of most agents.
func (c *coord) sees() bool {
	return slices.ContainsFunc(c.peers, func(p *peer) bool {
		return p.listed && !p.silent && p.polled && p.state.Ready && p.state.Expected > 0 &&
			2*p.state.Missing <= p.state.Expected
	})
}

// ask sends a request to another replica. serve is what that does with it.
func (c *coord) ask(p *peer, most time.Duration, serve func(), done func(ok bool)) {
	w, over, life := c.w, false, c.life
	finish := func(ok bool) {
		if over || c.life != life { // what comes late does not reach the next life
			return
		}
		over = true
		if p.silent == ok {
			c.log("%s answers: %t", p.of.name, ok)
			p.silent = !ok
			p.polled = p.polled && ok
		}
		if !ok {
			w.parted = w.at
		}
		done(ok)
	}
	if !p.of.up {
		w.after(&c.proc, time.Millisecond, func() { finish(false) })
		return
	}
	w.send(&c.proc, &p.of.proc, nil, 0, func() {
		serve()
		w.send(&p.of.proc, &c.proc, nil, 0, func() { finish(true) })
	})
	w.after(&c.proc, most, func() { finish(false) })
}

// poll asks each replica how it is, all at once.
func (c *coord) poll(then func()) {
	left := len(c.peers)
	if left == 0 {
		then()
	}
	for _, p := range c.peers {
		var state wire.Replica
		serve := func() {
			o := p.of
			n := o.ledger.Counts()
			state = wire.Replica{
				Ready: o.able(), Expected: n.Expected, Missing: n.Missing, Shared: o.ledger.Shared(c.w.now),
			}
		}
		c.ask(p, pollTime, serve, func(ok bool) {
			if ok {
				p.polled, p.state = true, state
			}
			if left--; left == 0 {
				c.polled(false)
				then()
			}
		})
	}
}

// polled takes in what the others that answer told last: Coordinator.Polled and Coordinator.Adopt.
func (c *coord) polled(adopt bool) {
	var others []drain.Shared
	c.others = nil
	for _, p := range c.peers {
		if p.silent || !p.polled {
			continue
		}
		is := p.state.Shared
		c.noteSilent(is.Silent)
		if brokenRule() == 21 {
			is.Silent = nil
		}
		others, c.others = append(others, is), append(c.others, is.Drains...)
	}
	c.ledger.Polled(c.w.now, others, adopt)
	if adopt {
		// Of two that tell of one drain, it has capacity if one says so.
		slices.SortStableFunc(c.others, func(a, b drain.Claim) int { return number(b.Queued) - number(a.Queued) })
		for _, claim := range c.others {
			c.noteAdopted(claim)
		}
	}
	c.settle()
}

func (c *coord) polls() {
	c.poll(func() { c.w.after(&c.proc, pollEvery, c.polls) })
}

// adopt takes over the open drains of the others, until all that are ready have told: replicas.run
// of cmd/webhook.
func (c *coord) adopt() {
	w := c.w
	w.after(&c.proc, adoptEvery, func() {
		if !c.synced {
			c.adopt()
			return
		}
		c.poll(func() {
			silent := slices.ContainsFunc(c.peers, func(p *peer) bool { return p.listed && (p.silent || !p.polled) })
			c.polled(true)
			if c.adopted = !silent || w.at-c.started >= settleTime; !c.adopted {
				c.adopt()
				return
			}
			c.log("knows the open drains of the others")
			c.polls()
		})
	})
}

// before returns the replicas that come before this one and can be asked, the first one first. All
// come before one that cannot judge.
func (c *coord) before() (all []*peer) {
	able := c.able()
	for _, p := range c.peers {
		if (p.of.ordinal() < c.ordinal() || !able) && p.listed && !p.silent {
			all = append(all, p)
		}
	}
	return all
}

// opener is the replica that decides what takes capacity, as the API server knows them.
func (w *world) opener() int {
	return max(0, slices.IndexFunc(w.coords, func(c *coord) bool { return c.listed }))
}

// opener says whether this replica decides what takes capacity.
func (c *coord) opener() bool { return len(c.before()) == 0 }

// claim is Handler.claim: it asks the opener about a deletion that has to wait, and notes what that
// says. witness is false if this replica is the opener, or must act as one.
func (c *coord) claim(x *call, then func(claimed wire.Claimed, witness bool)) {
	before := c.before()
	if first := c.w.coords[c.w.opener()]; brokenRule() == 20 {
		before = nil
	} else if len(before) == 0 && first != c || len(before) > 0 && first != before[0].of {
		c.w.parted = c.w.at
	}
	p := x.caller.p
	claim := wire.Claim{Operation: string(x.caller.operation()), Pod: p.drainPod()}
	if s := c.ledger.Pod(p.uid); s.Draining {
		claim.ElapsedMillis = c.w.now.Sub(s.Since).Milliseconds()
	}
	over := false
	finish := func(claimed wire.Claimed, witness bool) {
		if over {
			return
		}
		over, x.cancel, x.claimed = true, nil, c.w.at
		switch {
		case x.gone: // what the opener said before stands
		case !witness:
			x.place, x.turn = drain.Place{}, turnJudged
		default:
			x.place = drain.Place{Is: drain.Granted, Elapsed: time.Duration(claimed.ElapsedMillis) * time.Millisecond}
			if claimed.Queued || claimed.Verdict != wire.VerdictDrain {
				x.place.Is = drain.Deferred
			}
			x.turn = turnUnheld
			if claimed.Hold {
				x.turn = turnHeld
			}
		}
		then(claimed, witness)
	}
	x.cancel = func() { finish(wire.Claimed{}, false) }
	var next func(i int)
	next = func(i int) {
		if i >= len(before) {
			finish(wire.Claimed{}, false)
			return
		}
		var claimed wire.Claimed
		c.ask(before[i], claimTime, func() { claimed = before[i].of.claimed(claim, p) }, func(ok bool) {
			if over {
				return
			}
			if ok && claimed.Verdict != "" {
				finish(claimed, true)
				return
			}
			c.w.parted = c.w.at
			next(i + 1)
		})
	}
	next(0)
}

// claimed is what a replica answers to a claim: Coordinator.claim, Handler.Claim and
// Coordinator.Claim.
func (c *coord) claimed(claim wire.Claim, p *pod) wire.Claimed {
	is := wire.Claimed{AskedMillis: -1}
	if at, asked := c.asked[p.uid]; asked {
		is.AskedMillis = (c.w.at - at).Milliseconds()
	}
	if _, known := c.pods[p.uid]; claim.OnlyAsked || !c.able() || !known {
		return is
	}
	f, services := c.facts(p, admission.Operation(claim.Operation))
	switch v := c.judge(f, p); {
	case v.Action == admission.Deny && v.Reason == admission.Budget:
		is.Verdict, is.Reason = wire.VerdictDeny, string(v.Reason)
	case v.Action == admission.Drain:
		if f.Operation == admission.Evict {
			c.checkBudget(p)
		}
		s := c.open(p, services, drain.Place{Elapsed: time.Duration(claim.ElapsedMillis) * time.Millisecond}, false)
		c.ledger.Hold(p.uid)(c.w.now, false)
		c.answered[p.uid] = c.w.at
		is.Verdict, is.Queued, is.Hold = wire.VerdictDrain, c.ledger.Pod(p.uid).Queued, c.inTurn(p)
		is.ElapsedMillis = c.w.now.Sub(s.Since).Milliseconds()
	}
	return is
}

// inTurn is Coordinator.inTurn.
func (c *coord) inTurn(p *pod) bool {
	owner := ""
	for _, i := range p.services {
		owner += service(i).Name
	}
	return c.takeTurn(owner, p.uid, c.w.ownerHolds) && c.takeTurn("", p.uid, maxHolds)
}

// takeTurn is Coordinator.takeTurn.
func (c *coord) takeTurn(owner string, uid drain.UID, most int) bool {
	w := c.w
	turns := slices.DeleteFunc(c.turns[owner], func(t asking) bool {
		return t.uid != uid && (w.at-t.at > turnKept || !c.ledger.Status(w.now, drain.AtHold, t.uid).Waits())
	})
	i := slices.IndexFunc(turns, func(t asking) bool { return t.uid == uid })
	switch {
	case i >= 0:
		turns[i].at = w.at
	case len(turns) < most:
		i, turns = len(turns), append(turns, asking{uid, w.at})
	}
	c.turns[owner] = turns
	return i >= 0
}

// abstains is Handler.abstains: one that stops need not answer if another replica was asked as
// well.
func (c *coord) abstains(h *held, then func(yes bool)) {
	w, over, until := c.w, false, c.w.at+abstainWithin
	finish := func(yes bool) {
		if !over {
			over, h.claimed = true, w.at
			then(yes)
		}
	}
	var look func(i int)
	look = func(i int) {
		switch {
		case over:
		case i >= len(c.peers):
			w.after(&c.proc, abstainEvery, func() { look(0) })
		case c.peers[i].silent:
			look(i + 1)
		default:
			var claimed wire.Claimed
			o := c.peers[i].of
			serve := func() { claimed = o.claimed(wire.Claim{OnlyAsked: true}, h.caller.p) }
			within := w.now.Sub(h.began) + sameCall
			c.ask(c.peers[i], claimTime, serve, func(ok bool) {
				if ok && claimed.AskedMillis >= 0 && claimed.AskedMillis <= within.Milliseconds() {
					finish(true)
					return
				}
				look(i + 1)
			})
		}
	}
	if len(c.peers) == 0 {
		finish(false)
		return
	}
	w.after(&c.proc, until-w.at, func() { finish(false) })
	look(0)
}

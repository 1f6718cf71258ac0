package main

import (
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/peers"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// probeEvery and probesFailed are those of the readiness probe.
	probeEvery   = time.Second
	probesFailed = 3
)

// ordinal is the number of the entry of the webhook configuration that is this replica.
func (c *coord) ordinal() int { return slices.Index(c.w.coords, c) }

// peer is the replica as its pod says.
func (c *coord) peer() peers.Peer {
	return peers.Peer{Ordinal: c.ordinal(), Name: c.name, Ready: c.listed}
}

// meetPeers begins to know the other replicas.
func (c *coord) meetPeers() {
	c.ready = &peers.Readiness{
		Certificate: func() error { return nil }, Synced: func() bool { return c.synced },
		Expecting: c.Expecting,
	}
	c.table = &peers.Table{Ordinal: c.ordinal(), Name: c.name, Able: c.ready.Check}
	c.ready.Others, c.others = c.table, nil
	c.setPeers()
}

func (c *coord) setPeers() {
	for _, o := range c.w.coords {
		if o != c {
			c.table.Set(o.peer())
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
	of := c.peer()
	for _, o := range c.w.coords {
		if o != c {
			c.w.api.tell(o.watch, func() { o.table.Set(of) })
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

func (c *coord) able() bool { return c.ready.Check() == nil }

// ask sends a request to another replica: Peers.ask and Peers.heard. serve is what that does with
// it, and what state is, if it was polled, once it has. gone reports whether the caller has gone
// away: then nothing is concluded.
func (c *coord) ask(of peers.Peer, most time.Duration, gone func() bool, state *wire.Replica, serve func(o *coord),
	done func(ok bool)) {
	w, o, over, life := c.w, c.w.coords[of.Ordinal], false, c.life
	finish := func(ok bool) {
		if over || c.life != life { // what comes late does not reach the next life
			return
		}
		over = true
		if !ok {
			w.parted = w.at
		}
		if !gone() && c.table.Heard(of, ok, state) {
			c.log("%s answers: %t", of.Name, ok)
		}
		done(ok)
	}
	if !o.up {
		w.after(&c.proc, time.Millisecond, func() { finish(false) })
		return
	}
	w.send(&c.proc, &o.proc, nil, 0, func() {
		serve(o)
		w.send(&o.proc, &c.proc, nil, 0, func() { finish(true) })
	})
	w.after(&c.proc, most, func() { finish(false) })
}

// poll asks each replica how it is, all at once: Peers.Run.
func (c *coord) poll() {
	w, began, all := c.w, c.w.at, c.table.All()
	if !c.synced {
		w.after(&c.proc, peers.AdoptEvery, c.poll)
		return
	}
	left := len(all)
	heed := func() {
		again := c.table.Heed(c.now(), c.polled)
		w.after(&c.proc, max(0, began+again-w.at), c.poll)
	}
	if left == 0 {
		heed()
	}
	for _, of := range all {
		var state wire.Replica
		c.ask(of, peers.PollTime, func() bool { return false }, &state,
			func(o *coord) { state = o.core.Replica(o.now(), o.able()) },
			func(bool) {
				if left--; left == 0 {
					heed()
				}
			})
	}
}

// polled records what the others that answer told last: Coordinator.Polled.
func (c *coord) polled(told []wire.Replica, adopt bool) {
	c.others = nil
	for i := range told {
		c.noteSilent(told[i].Silent)
		c.others = append(c.others, told[i].Drains...)
	}
	c.core.Polled(c.now(), told, adopt)
	if adopt {
		// Of two that tell of one drain, it has capacity if one says so.
		slices.SortStableFunc(c.others, func(a, b drain.Claim) int { return oneIf(b.Queued) - oneIf(a.Queued) })
		for _, claim := range c.others {
			c.noteAdopted(claim)
		}
	}
	c.settle()
}

// opener is the replica that decides what takes capacity, as the API server knows them.
func (w *world) opener() int {
	return max(0, slices.IndexFunc(w.coords, func(c *coord) bool { return c.listed }))
}

// first asks one replica after the other until an answer counts: Peers.first. It returns what
// cancels that.
func (c *coord) first(all []peers.Peer, claim wire.Claim, p *pod, counts func(wire.Claimed) bool,
	then func(claimed wire.Claimed, ok bool)) (cancel func()) {
	w, over, end := c.w, false, c.w.at+peers.ClaimTime
	finish := func(claimed wire.Claimed, ok bool) {
		if !over {
			over = true
			then(claimed, ok)
		}
	}
	var next func(i int)
	next = func(i int) {
		if i >= len(all) || w.at >= end {
			finish(wire.Claimed{}, false)
			return
		}
		var claimed wire.Claimed
		c.ask(all[i], end-w.at, func() bool { return over }, nil,
			func(o *coord) { claimed = o.claimed(claim, p) },
			func(ok bool) {
				switch {
				case over:
				case ok && counts(claimed):
					finish(claimed, true)
				default:
					next(i + 1)
				}
			})
	}
	next(0)
	return func() { finish(wire.Claimed{}, false) }
}

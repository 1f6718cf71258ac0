package drain

import (
	"container/list"
	"slices"
)

// changes says what has changed, and for whom, since it was last asked.
type changes struct {
	// log holds the drains in the order of their last change that agents must hear of, the newest
	// first.
	log *list.List
	rev uint64
	// touched are the pods whose drains may have another status.
	touched [gates]map[UID]bool
	// concerned are the agents that must hear at once of what changed, each once.
	concerned []*agent
	// suspensions are those that began or ended.
	suspensions []Suspension
}

// logged is where a drain is in the log.
type logged struct {
	rev     uint64
	element *list.Element
}

// change notes that there is something to send about d, to owing at once.
func (c *changes) change(d *drain, owing []*agent) {
	c.rev++
	d.rev = c.rev
	if d.element == nil {
		d.element = c.log.PushFront(d)
	} else {
		c.log.MoveToFront(d.element)
	}
	c.touch(d)
	for _, a := range owing {
		c.concern(a)
	}
}

// touch notes that the status of d may have changed.
func (c *changes) touch(d *drain) {
	d.blocked = 0
	c.touched[d.gate][d.pod.UID] = true
}

// concern notes that there is something to send to a. See [Ledger.Affected].
func (c *changes) concern(a *agent) {
	if a.session != 0 && !a.concerned {
		a.concerned = true
		c.concerned = append(c.concerned, a)
	}
}

// touchFor touches the drains that a may owe.
func (l *Ledger) touchFor(a *agent) {
	if a.inEverything[AtHold] || a.inEverything[AtBarrier] || a.former {
		l.each(func(d *drain) {
			_, former := d.former[a]
			if former {
				d.rosterAt = 0 // it may be about to leave
			}
			if d.open && (former || a.inEverything[AtHold] || d.gate == AtBarrier) {
				l.touch(d)
			}
		})
	}
	for g := range gates {
		for s := range a.indexed[g] {
			for d := range l.services[s].drains {
				if slices.Contains(d.asks(), g) {
					l.touch(d)
				}
			}
		}
	}
}

// Changed returns the UIDs whose status at a gate may have changed since it was last called.
func (l *Ledger) Changed(gate Gate) []UID {
	touched := l.touched[gate]
	if len(touched) == 0 {
		return nil
	}
	uids := make([]UID, 0, len(touched))
	for uid := range touched {
		uids = append(uids, uid)
	}
	clear(touched)
	slices.Sort(uids)
	return uids
}

// Affected returns the agents for which [Ledger.ChangesFor] may have something that cannot wait,
// since it was last called. Of drains that ended and that they did not owe, the others hear
// whenever they next ask.
func (l *Ledger) Affected() []AgentID {
	if len(l.concerned) == 0 {
		return nil
	}
	ids := make([]AgentID, 0, len(l.concerned))
	for _, a := range l.concerned {
		a.concerned = false
		if l.slots[a.slot] == a {
			ids = append(ids, a.ID)
		}
	}
	clear(l.concerned)
	l.concerned = l.concerned[:0]
	slices.Sort(ids)
	return ids
}

// ChangesFor returns what must be sent to an agent that changed after revision rev, the oldest
// first, and the revision to ask with next. Ask with 0 for everything. That is the drains that the
// agent may have to acknowledge, and the releases of pods in the namespaces in which it routes
// Services, or has routed some on this session. After a declaration that adds a namespace, it is
// everything again.
func (l *Ledger) ChangesFor(id AgentID, rev uint64) (open []Open, released []Release, next uint64) {
	a := l.agents[id]
	if a == nil {
		return nil, nil, rev
	}
	if !a.declared {
		a.namespaces["*"] = true // it may route everything
	}
	next = max(rev, a.widened)
	if rev < a.widened {
		rev = 0
	}
	news := 0
	for e := l.log.Front(); e != nil && e.Value.(*drain).rev > rev; e = e.Next() {
		news += number(e.Value.(*drain).open)
	}
	open = slices.Grow(open, news)
	for e := l.log.Front(); e != nil && e.Value.(*drain).rev > rev; e = e.Next() {
		d := e.Value.(*drain)
		next = max(next, d.rev)
		switch {
		case d.open && !d.queued && l.routes(a, d):
			open = append(open, l.opened(a, d))
		case d.open || !a.mayKnow(d):
		case d.gate == AtBarrier:
			if a.gateOf(d) == AtBarrier {
				released = append(released, Release{UID: d.pod.UID, Terminating: d.reason == PodDeleted,
					Gate: AtBarrier})
			} else {
				released = append(released, Release{UID: d.pod.UID,
					Terminating: true}) // it was deleted, whatever has become of it
			}
		case !l.directs(a, d.pod.UID):
			released = append(released, Release{UID: d.pod.UID, Terminating: d.reason == PodDeleted || brokenRule == 4})
		}
	}
	slices.Reverse(open)
	slices.Reverse(released)
	return open, released, next
}

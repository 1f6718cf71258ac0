package drain

import (
	"container/list"
	"maps"
	"slices"
)

// changes records what has changed, and for which agents, since it was last read.
type changes struct {
	// log has the drains in the order of their last change that agents must receive, the newest
	// first.
	log *list.List
	rev uint64
	// touched are the pods whose drains may have another status.
	touched [gates]map[UID]bool
	// concerned are the slots of the agents that must receive what changed immediately.
	concerned bits
	// suspensions are those that began or ended.
	suspensions []Suspension
	// batch is the last batch, made how many batches there were, and telling what the next agent is
	// to receive.
	batch   *batch
	made    uint64
	telling []telling
}

// logged is where a drain is in the log.
type logged struct {
	rev     uint64
	element *list.Element
}

// change records that there is something to send about d, to owing immediately.
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

// touch records that the status of d may have changed.
func (c *changes) touch(d *drain) {
	d.blocked = 0
	c.touched[d.gate][d.pod.UID] = true
}

// concern records that there is something to send to a. See [Ledger.Affected].
func (c *changes) concern(a *agent) {
	if a.session != 0 {
		c.concerned = c.concerned.grown(a.slot + 1)
		c.concerned.set(a.slot)
	}
}

// touchFor touches the drains that a may have to acknowledge.
func (l *Ledger) touchFor(a *agent) {
	if a.former {
		l.each(func(d *drain) {
			if _, former := d.former[a]; former && d.open {
				d.rosterAt = 0 // it may be about to leave
				l.touch(d)
			}
		})
	}
	for g := range gates {
		for _, of := range a.indexed[g] {
			for d := range of.drains {
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
	uids := slices.AppendSeq(make([]UID, 0, len(touched)), maps.Keys(touched))
	clear(touched)
	slices.Sort(uids)
	return uids
}

// Affected returns the agents to wake: those for which something urgent has changed since the last
// call of Affected. [Ledger.ChangesFor] returns it. Agents also receive the ends of drains that
// they did not have to acknowledge, but are not woken for these.
func (l *Ledger) Affected() []AgentID {
	var ids []AgentID
	for slot := range l.concerned.all() {
		ids = append(ids, l.slots[slot].ID)
	}
	clear(l.concerned)
	slices.Sort(ids)
	return ids
}

// maxTold bounds what one call of [Ledger.ChangesFor] returns.
const maxTold = 1000

// ChangesFor returns the changes after revision rev that an agent must receive, the oldest first,
// and the revision next for the next call. rev 0 asks for everything. open are the drains that the
// agent may have to acknowledge. released are the ends of drains of pods in the namespaces of its
// Services on this session. A call returns at most 1,000 changes: call it until both slices are
// empty. The slices are shared and must not be modified.
//
// They count as received by the agent, which may acknowledge all that it received with one [UpTo]
// of revision told. Each batch has a higher revision than the ones before, even if its content is
// the same. So an [UpTo] never covers a batch that the agent has not read.
func (l *Ledger) ChangesFor(id AgentID, rev uint64) (open []Open, released []Release, told, next uint64) {
	a := l.agents[id]
	if a == nil || a.session == 0 {
		return nil, nil, 0, rev
	}
	if !a.declared {
		a.namespaces["*"] = true // it may route everything
	}
	e := l.log.Front()
	for oldest := l.log.Back(); e != nil && e != oldest && e.Value.(*drain).rev > rev; {
		e = e.Next()
	}
	next, l.telling = rev, l.telling[:0]
	for ; e != nil && len(l.telling) < maxTold; e = e.Prev() {
		d := e.Value.(*drain)
		if d.rev <= rev {
			continue
		}
		next = d.rev
		t := telling{drain: d, open: d.open, number: d.number, since: d.since.UnixNano()}
		if d.gate == AtBarrier && a.gateOf(d) == AtBarrier {
			t.observed, t.deadline = true, l.deadline(d).UnixNano()
		}
		if d.open && !d.queued && l.routes(a, d) ||
			!d.open && a.mayKnow(d) && (d.gate == AtBarrier || !d.of.directs(a)) {
			l.telling = append(l.telling, t)
		}
	}
	if len(l.telling) == 0 {
		return nil, nil, 0, next
	}
	b := l.batch
	if b == nil || b.revision <= a.told || !slices.Equal(b.of, l.telling) {
		b = l.newBatch()
		l.batch = b
	}
	a.tell(b)
	return b.open, b.released, b.revision, next
}

// batch is what some agents are sent in one message. Agents that are sent the same share one batch.
type batch struct {
	revision uint64
	of       []telling
	open     []Open
	released []Release
	// excluded are the drains that these agents are to exclude. The first over of them have ended.
	excluded []telling
	over     int
}

// telling is one item that an agent is sent: a drain that is open or not, and whether the agent
// observes. The other fields are the parts of [Watch] and [Open] that may change.
type telling struct {
	drain           *drain
	open, observed  bool
	number          uint64
	since, deadline int64 // in nanoseconds
}

// is reports whether the drain that was sent is still open.
func (t telling) is() bool { return t.drain.open && t.drain.number == t.number }

// newBatch makes a batch of l.telling.
func (l *Ledger) newBatch() *batch {
	l.made++
	b := &batch{revision: l.made, of: slices.Clone(l.telling)}
	for _, t := range b.of {
		d := t.drain
		switch {
		case t.open:
			b.open = append(b.open, l.opened(d, t.observed))
			if !t.observed {
				b.excluded = append(b.excluded, t)
			}
		case d.gate == AtBarrier && !t.observed:
			// The pod was deleted, whatever has become of the barrier.
			b.released = append(b.released, Release{UID: d.pod.UID, Terminating: true})
		default:
			b.released = append(b.released, Release{UID: d.pod.UID, Terminating: d.reason == PodDeleted, Gate: d.gate})
		}
	}
	return b
}

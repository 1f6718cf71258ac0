package drain

import "time"

// Facing is a barrier as those see it who look.
type Facing struct {
	Status
	// By is the agent that asks for it, on the pod's node; ByName its pod's namespace/name.
	By     AgentID
	ByName string
	// Last says that no other endpoint is ready, so that gateways may keep the pod; LastHere that none is on its node.
	Last, LastHere bool
	// Sampled says that not all agents are asked that observe: the others are waited for by the time that they were seen to take.
	Sampled bool
	// Words are what those say who owe it, those who are least far first: at most as many as were asked for.
	Words []Word
}

// OldestBarriers returns the pods of the oldest open barriers, at most most, and how many are open.
func (l *Ledger) OldestBarriers(most int) (oldest []UID, open int) { return l.oldest(AtBarrier, most) }

// Barrier returns the barrier of uid at now, with at most most words. ok is false if none is open.
func (l *Ledger) Barrier(now time.Time, uid UID, most int) (f Facing, ok bool) {
	d := l.at(AtBarrier, uid)
	if d == nil || !d.open {
		return f, false
	}
	f = Facing{
		Status: l.status(now, d), By: d.barrier.by, ByName: string(d.barrier.by),
		Last: !d.barrier.last.IsZero(), LastHere: !d.barrier.lastHere.IsZero(), Sampled: d.barrier.sample != nil,
	}
	if a := l.agents[d.barrier.by]; a != nil && a.name != "" {
		f.ByName = a.name
	}
	f.Words, _ = l.words(now, d, most)
	return f, true
}

// AcknowledgesBarrier is [Ledger.Acknowledges] of the barrier.
func (l *Ledger) AcknowledgesBarrier(id AgentID, r Report) bool {
	return l.vouches(AtBarrier, id, r)
}

package drain

import (
	"cmp"
	"slices"
	"time"
)

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
func (l *Ledger) OldestBarriers(most int) (oldest []UID, open int) {
	var all []*drain
	for k, d := range l.drains {
		if k.gate == AtBarrier && d.open {
			all = append(all, d)
		}
	}
	slices.SortFunc(all, func(a, b *drain) int { return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.pod.UID, b.pod.UID)) })
	for _, d := range all[:min(len(all), most)] {
		oldest = append(oldest, d.pod.UID)
	}
	return oldest, len(all)
}

// Barrier returns the barrier of uid at now, with at most most words. ok is false if none is open.
func (l *Ledger) Barrier(now time.Time, uid UID, most int) (f Facing, ok bool) {
	d := l.drains[atBarrier(uid)]
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
	var of [Idle + 1][]Word
	for _, a := range l.owing(d) {
		if owes, _ := l.owes(now, a, d); !owes {
			continue
		}
		state, _ := l.state(now, a, d)
		if state > Idle || len(of[state]) >= most {
			continue
		}
		w := Word{Agent: a.id, Name: a.name, State: state, Connected: a.session != 0, Suspended: a.breaker.open && !d.expired}
		if state != StateUnknown {
			r := a.reports[key{uid, a.gateOf(d)}]
			w.Proof, w.Heard = r.Proof, r.at
		}
		of[state] = append(of[state], w)
	}
	f.Words = slices.Concat(of[:]...)
	f.Words = f.Words[:min(len(f.Words), most)]
	return f, true
}

// AcknowledgesBarrier is [Ledger.Acknowledges] of the barrier.
func (l *Ledger) AcknowledgesBarrier(r Report) bool {
	d := l.drains[atBarrier(r.UID)]
	return r.Held && r.Gate == AtBarrier && d != nil && d.open && r.tells(d)
}

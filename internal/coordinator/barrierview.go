package coordinator

import (
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// barriersMost bounds the barriers that a view lists, barrierWordsMost the words of each.
	barriersMost     = 100
	barrierWordsMost = 10
	// barredMost bounds the barriers of which is remembered how they came to where they are.
	barredMost = 20_000
)

// Barrier is an open barrier: the pod is terminating, and its hooks wait, or have been answered.
type Barrier struct {
	drain.Facing
	// Words shadow those of the ledger.
	Words []Word
	// Entered is when its phase began.
	Entered time.Time
}

// barred is how a barrier came to where it is.
type barred struct {
	phase    drain.Phase
	at, told time.Time
	said     map[drain.AgentID]said
	// passed says that a hook was answered: the others of the pod are no news.
	passed bool
}

// faced notes how far a barrier is.
func (h *history) faced(now time.Time, s drain.Status) *barred {
	b := h.barred[s.Pod.UID]
	if b == nil {
		if h.barred == nil || len(h.barred) >= barredMost {
			h.barred = map[drain.UID]*barred{}
		}
		b = &barred{told: now, said: map[drain.AgentID]said{}}
		h.barred[s.Pod.UID] = b
	}
	if b.phase != s.Phase {
		b.phase, b.at = s.Phase, now
	}
	return b
}

// passed notes that a barrier lets its pod be told to stop.
func (h *history) passed(now time.Time, s drain.Status) {
	if s.Phase == drain.Closed {
		delete(h.barred, s.Pod.UID) // the pod has gone before it was asked for
		return
	}
	b := h.faced(now, s)
	if b.passed {
		return
	}
	b.passed = true
	o := Outcome{Pod: s.Pod, Gate: drain.AtBarrier, At: now, Reason: s.Reason, End: s.Reason, Took: now.Sub(s.Since)}
	o.Silent, o.More = silent(s)
	h.outcomes.add(o, outcomesMost)
}

// watched notes what an agent says of a barrier.
func (h *history) watched(l *drain.Ledger, now time.Time, id drain.AgentID, of *introduced, r drain.Report) {
	b := h.barred[r.UID]
	if b == nil || !l.AcknowledgesBarrier(id, r) {
		return
	}
	was, known := b.said[id]
	is := was
	if !known || was.state != r.State {
		is.state, is.since = r.State, now
	}
	took := now.Sub(b.told)
	if r.State >= drain.Removed && !was.removed {
		is.removed, of.removed, of.idle = true, took, 0
		h.of(of.gateway).removed.add(took, samplesMost)
	}
	if r.State == drain.Idle && !was.idle {
		is.idle, of.idle = true, took
		h.of(of.gateway).idle.add(took, samplesMost)
	}
	if is != was {
		b.said[id] = is
	}
}

// barrierOf is one barrier, as far as it is now.
func (c *Coordinator) barrierOf(uid drain.UID) (b Barrier, ok bool) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	facing, ok := c.ledger.Barrier(now, uid, barrierWordsMost)
	if !ok {
		return b, false
	}
	b.Facing = facing
	course := c.seen.faced(now, facing.Status)
	b.Entered = course.at
	for _, w := range facing.Words {
		word := Word{Word: w, Gateway: c.seen.gateway(w.Agent)}
		if w.State != drain.StateUnknown {
			word.Since = course.said[w.Agent].since
		}
		b.Words = append(b.Words, word)
	}
	c.settle()
	return b, true
}

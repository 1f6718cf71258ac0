package coordinator

import (
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// maxShownBarriers bounds the barriers that a view lists, maxBarrierReports the reports of
	// each.
	maxShownBarriers  = 100
	maxBarrierReports = 10
	// maxBarrierProgress bounds the barriers whose progress is remembered.
	maxBarrierProgress = 20_000
)

// barrierProgress is the history of an open barrier.
type barrierProgress struct {
	phase drain.Phase
	at    time.Time
	// passed: a hook of the pod was answered, so that later ones are not recorded.
	passed bool
}

// barrierSeen records the status of a barrier.
func (h *history) barrierSeen(now time.Time, s drain.Status) *barrierProgress {
	b := h.barriers[s.Pod.UID]
	if b == nil {
		if h.barriers == nil || len(h.barriers) >= maxBarrierProgress {
			h.barriers = map[drain.UID]*barrierProgress{}
		}
		b = &barrierProgress{}
		h.barriers[s.Pod.UID] = b
	}
	if b.phase != s.Phase {
		b.phase, b.at = s.Phase, now
	}
	return b
}

// passed records that a barrier was answered, so that its pod may be told to stop. It reports
// whether that is news: an agent asks again after a stated wait.
func (h *history) passed(now time.Time, s drain.Status) (first bool) {
	if s.Phase == drain.Closed {
		delete(h.barriers, s.Pod.UID) // the pod was deleted before the barrier was asked for
		return true
	}
	b := h.barrierSeen(now, s)
	if b.passed {
		return false
	}
	b.passed = true
	names, more := silent(s)
	h.outcomes.add(ended(now, drain.AtBarrier, s.Pod, s.Reason, now.Sub(s.Since), names, more), maxOutcomes)
	return true
}

// barrierOf returns the present state of one barrier.
func (c *Coordinator) barrierOf(uid drain.UID) (b api.OpenBarrier, ok bool) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	is, ok := c.core.Ledger.View(now, drain.AtBarrier, uid, maxBarrierReports)
	if !ok {
		return b, false
	}
	b = api.OpenBarrier{
		Drain: c.seen.drain(is), AskedBy: is.ByName, StatedSeconds: is.Stated.Seconds(), Cut: is.Cut,
		Last: is.Last || is.LastHere, Sampled: is.Sampled, Uncovered: []string{},
	}
	b.PhaseSince = c.seen.barrierSeen(now, is.Status).at
	if is.Stated > 0 {
		b.StatedUntil = is.Since.Add(is.Stated)
	}
	return b, true
}

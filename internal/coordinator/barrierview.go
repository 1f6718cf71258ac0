package coordinator

import (
	"time"

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

// OpenBarrier is a barrier of a pod that is terminating: its hooks wait, or have been answered.
type OpenBarrier struct {
	drain.View
	// Reports replace those of the ledger.
	Reports []AgentReport
	// Entered is when its phase began.
	Entered time.Time
}

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

// passed records that a barrier was answered, so that its pod may be told to stop.
func (h *history) passed(now time.Time, s drain.Status) {
	if s.Phase == drain.Closed {
		delete(h.barriers, s.Pod.UID) // the pod was deleted before the barrier was asked for
		return
	}
	b := h.barrierSeen(now, s)
	if b.passed {
		return
	}
	b.passed = true
	o := Outcome{Pod: s.Pod, Gate: drain.AtBarrier, At: now, Reason: s.Reason, End: s.Reason, Took: now.Sub(s.Since)}
	o.Silent, o.More = silent(s)
	h.outcomes.add(o, maxOutcomes)
}

// barrierOf returns the present state of one barrier.
func (c *Coordinator) barrierOf(uid drain.UID) (b OpenBarrier, ok bool) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	view, ok := c.core.Ledger.View(now, drain.AtBarrier, uid, maxBarrierReports)
	if !ok {
		return b, false
	}
	b.View = view
	progress := c.seen.barrierSeen(now, view.Status)
	b.Entered = progress.at
	for _, w := range view.Reports {
		b.Reports = append(b.Reports, AgentReport{AgentReport: w, Gateway: c.seen.gateway(w.Agent)})
	}
	return b, true
}

package hooks

import (
	"fmt"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// askAgain is how soon coordinators are tried again when there was none.
	askAgain = 250 * time.Millisecond
	// localIdle is how long to wait for Idle after Removed in this node's kernel when no
	// coordinator can be asked.
	localIdle = 10 * time.Second
	// localAfter is how long no coordinator can be asked before this node's kernel is enough. A
	// shorter time is one in which streams begin again, and until then the kernel may only be late.
	localAfter = 3 * time.Second
	// countedFresh is how old the last count of connections may be when a coordinator releases a
	// pod, countedLate how long to wait for a new count.
	countedFresh = time.Second
	countedLate  = 500 * time.Millisecond
	// countEarly is how long after the deletion connections begin to be counted, although no
	// coordinator has answered: it may state a wait that ends when nothing comes any more. Until
	// the answer, a count is at most that old.
	countEarly = 2 * time.Second
	// answerMargin is how much earlier than the end of the hook a coordinator has to answer, so
	// that it can still name the agents that it waited for.
	answerMargin = 250 * time.Millisecond
)

// Wait is the wait of the hooks of a terminating pod, as steps: for the answer of a coordinator or,
// while none can be asked, for this node's kernel. It has no goroutine, timer or clock. Its caller
// calls [Wait.Look] repeatedly, and carries out what the fields ask for.
type Wait struct {
	// Over: answer the hooks, with Outcome. Otherwise Wake is when to look again, unless the kernel
	// or an answer changes something before.
	Over    bool
	Outcome outcome
	Wake    time.Time
	// Ask is the request to send to a coordinator now, nil if there is none. The caller passes the
	// answer to [Wait.Answered].
	Ask *wire.BarrierRequest
	// Count: count the connections again.
	Count bool

	pod    nodepods.Pod
	detail string
	// asked: a coordinator is being asked, or has answered. Otherwise one is to be asked at askAt.
	asked          bool
	askedAt, askAt time.Time
	// alone is since when no coordinator can be asked, because of trouble. Zero: one can be.
	alone   time.Time
	trouble string
	// counting: the kernel was told to count, and measures from then on how long it is quiet.
	counting bool
	// passed is the answer of a coordinator at passedAt. removedAt is since when the kernel has
	// been Removed, unknownAt since when it could not be read. Zero: not yet.
	passed wire.BarrierStatus
	// waited: the wait that passed states was not over yet when it came. When it is over, a
	// coordinator is asked again: gateways may have begun to send to the pod again.
	waited                         bool
	passedAt, removedAt, unknownAt time.Time
}

// NewWait begins to wait for p.
func NewWait(now time.Time, p nodepods.Pod) *Wait {
	w := &Wait{pod: p}
	switch {
	case !now.Before(p.Deadline()):
		w.end(outNoTime, fmt.Sprintf("the deletion allows %s, %s of it are the application's", p.Allowed, p.Grace))
	case len(p.Targets) == 0:
		w.end(outNoTargets, "")
	}
	return w
}

func (w *Wait) end(why outcome, detail string) { w.Over, w.Outcome, w.detail = true, why, detail }

// Look records the state of the kernel. It changes nothing once the wait is over.
func (w *Wait) Look(now time.Time, is gateway.Reading) {
	if w.Over {
		return
	}
	w.Ask, w.Count, w.Wake = nil, false, w.pod.Deadline()
	switch {
	case is.State < health.Removed:
		w.removedAt = time.Time{}
	case w.removedAt.IsZero():
		w.removedAt = now
	}
	switch {
	case is.State != health.Unknown:
		w.unknownAt = time.Time{}
	case w.unknownAt.IsZero():
		w.unknownAt = now
	}
	if !w.asked && !w.alone.IsZero() && now.Sub(w.alone) >= localAfter {
		switch {
		case w.passed.Reason != "": // the release before the stated wait counts
			w.asked, w.passedAt = true, now
		case w.stopped(now, is):
			w.end(outLocal, "this node's kernel is "+is.State.String()+"; "+w.trouble)
			return
		}
	}
	if w.waited && w.statedOver(now, is) && now.Before(w.pod.Deadline()) {
		w.waited, w.asked, w.passedAt, w.askAt = false, false, time.Time{}, now
	}
	passed := !w.passedAt.IsZero()
	w.waited = w.waited || passed && !w.statedOver(now, is)
	age := now.Sub(is.Counted)
	if passed {
		if why, over := w.mayStop(now, is); over {
			w.end(why, outcomeText(w.passed))
			return
		}
		w.Count = !w.counting || age > countedFresh || age > countedFresh/2 && !w.statedOver(now, is)
	} else if now.Sub(w.pod.Seen) >= countEarly {
		w.Count = !w.counting || age >= countEarly
	}
	w.counting = w.counting || w.Count
	switch {
	case now.Before(w.pod.Deadline()):
	case passed && !w.statedOver(now, is):
		w.passed.Cut = true
		w.end(outcome(drain.Deadline.String()), outcomeText(w.passed))
		return
	case passed:
		w.end(outcome(drain.IdleBound.String()), outcomeText(w.passed))
		return
	default:
		w.end(outBound, w.trouble)
		return
	}
	if !w.asked && !now.Before(w.askAt) {
		w.asked, w.askedAt = true, now
		w.Ask = &wire.BarrierRequest{
			Pod: w.pod.Pod, Targets: w.pod.Targets, Since: w.pod.Since, Terminating: true,
			BoundMillis:   max(0, w.pod.Deadline().Sub(w.pod.Seen)-answerMargin).Milliseconds(),
			ElapsedMillis: now.Sub(w.pod.Seen).Milliseconds(),
		}
	}
	// The answer of a coordinator wakes the caller. A count does so only if it changes the state.
	pause := askAgain
	switch {
	case passed && !w.statedOver(now, is):
	case passed:
		pause = countedLate / 20
	case w.alone.IsZero():
		pause = countEarly
	}
	if wake := now.Add(pause); wake.Before(w.Wake) {
		w.Wake = wake
	}
}

// Answered records the answer of a coordinator, which has released the pod, or why there is none.
func (w *Wait) Answered(now time.Time, passed wire.BarrierStatus, err error) {
	if err == nil {
		w.passed, w.passedAt, w.alone = passed, now, time.Time{}
		return
	}
	// A coordinator that took that long had taken the barrier, or is slow: others may answer.
	if w.alone.IsZero() || now.Sub(w.askedAt) >= localAfter {
		w.alone = now
	}
	w.trouble, w.asked, w.askAt = err.Error(), false, now.Add(askAgain)
}

// mayStop reports whether a pod that a coordinator has released may be told to stop, and with which
// outcome. The kernel of the pod's node has every connection to the pod. That includes connections
// that arrived after this agent last reported Idle, from nodes that are not asked or from a load
// balancer. It also includes idle keep-alive connections, for which lameduck.io/idle-bound can
// request a wait.
func (w *Wait) mayStop(now time.Time, is gateway.Reading) (outcome, bool) {
	why := outcome(w.passed.Reason)
	acknowledged := w.passed.Reason == drain.Acknowledged.String()
	switch {
	case !w.statedOver(now, is):
		return "", false
	case !acknowledged && w.passed.Reason != drain.IdleBound.String(), is.State < health.Removed:
		return why, true
	case is.Connections > 0 && now.Sub(w.removedAt) < time.Duration(w.passed.IdleBoundMillis)*time.Millisecond:
		return "", false
	case !acknowledged:
		return why, true
	case is.State == health.Removed:
		return outcome(drain.IdleBound.String()), now.Sub(is.Since) >= localIdle
	}
	return why, now.Sub(is.Counted) <= countedFresh || now.Sub(w.passedAt) >= countedLate
}

// statedOver reports whether the wait that a Service states with "at most" is over: its time has
// passed, or the last counts have shown that no connection is open and none was opened.
func (w *Wait) statedOver(now time.Time, is gateway.Reading) bool {
	quiet := time.Duration(w.passed.QuietMillis) * time.Millisecond
	return now.Sub(w.pod.Seen) >= time.Duration(w.passed.AtMostMillis)*time.Millisecond ||
		quiet > 0 && is.Quiet >= quiet && now.Sub(is.Counted) <= countedFresh
}

// stopped reports whether this node's kernel alone is enough, when no coordinator can be asked. All
// times are by this node's clock.
func (w *Wait) stopped(now time.Time, is gateway.Reading) bool {
	switch is.State {
	case health.Idle:
		return true
	case health.Unknown:
		return now.Sub(w.unknownAt) >= localAfter
	case health.Removed:
		return now.Sub(w.removedAt) >= localIdle
	case health.Kept:
		return is.NoConnections
	default:
		return false
	}
}

func outcomeText(p wire.BarrierStatus) string {
	text := strings.Join(p.Waiting[:min(3, len(p.Waiting))], ", ")
	if more := len(p.Waiting) - 3; more > 0 {
		return fmt.Sprintf("%s and %d more", text, more)
	}
	if p.Cut {
		text += " (a stated wait is longer than the bound)"
	}
	return text
}

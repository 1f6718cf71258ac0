package hooks

import (
	"fmt"
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
	// localIdle is how long this node's kernel, when no coordinator can be asked, is waited for to
	// be Idle once it is Removed.
	localIdle = 10 * time.Second
	// localKept is how long after the deletion this node's kernel, when no coordinator can be
	// asked, is taken at its word that it has nowhere else to send to, or cannot be read: until
	// then it may only be late.
	localKept = 2 * time.Second
	// countedFresh is how old the last count of connections may be when a coordinator lets a pod
	// go, countedLate how long another one is waited for.
	countedFresh = time.Second
	countedLate  = 500 * time.Millisecond
	// answerMargin is how much earlier than the hook must end a coordinator has to answer, so that
	// it can still say whom it waited for.
	answerMargin = 250 * time.Millisecond
)

// Wait is the wait of the hooks of a deleted pod as steps: for a coordinator, and for this node's
// kernel as long as no coordinator can be asked. It has no goroutine, timer or clock. Its caller
// calls [Wait.Look] again and again, and carries out what that leaves in it.
type Wait struct {
	// Over says that the hooks are to be answered, with Outcome. If not, Wake is when to look
	// again, unless the kernel or an answer changes something before.
	Over bool
	Wake time.Time
	// Ask is what a coordinator is to be asked now. Nil: nothing. Each time, [Wait.Answered] is
	// due.
	Ask *wire.BarrierRequest
	// Count says that connections are to be counted again.
	Count bool

	pod     nodepods.Pod
	outcome outcome
	detail  string
	// asked says that a coordinator is being asked, or has answered. If not, one is to be asked at
	// askAt.
	asked bool
	askAt time.Time
	// alone says that no coordinator could be asked, trouble why.
	alone   bool
	trouble string
	// passed is the answer of a coordinator at passedAt. removedAt is since when the kernel has
	// been Removed. Zero: not yet.
	passed              wire.BarrierStatus
	passedAt, removedAt time.Time
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

// Outcome is how the wait has ended.
func (w *Wait) Outcome() string { return string(w.outcome) }

func (w *Wait) end(why outcome, detail string) { w.Over, w.outcome, w.detail = true, why, detail }

// Look takes in what the kernel does. It changes nothing once the wait is over.
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
	if w.alone && w.stopped(now, is) {
		w.end(outLocal, "this node's kernel is "+is.State.String()+"; "+w.trouble)
		return
	}
	passed := !w.passedAt.IsZero()
	if passed {
		if why, over := w.mayStop(now, is); over {
			w.end(why, outcomeText(w.passed))
			return
		}
		age := now.Sub(is.Counted)
		w.Count = age > countedFresh || age > countedFresh/2 && !w.statedOver(now, is)
	}
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
		w.asked = true
		w.Ask = &wire.BarrierRequest{
			Pod: w.pod.Pod, Targets: w.pod.Targets, Since: w.pod.Since, Terminating: true,
			BoundMillis:   max(0, w.pod.Deadline().Sub(w.pod.Seen)-answerMargin).Milliseconds(),
			ElapsedMillis: now.Sub(w.pod.Seen).Milliseconds(), SeesQuiet: true,
		}
	}
	// While a coordinator is being asked, its answer wakes. A count wakes only if it changes the
	// state.
	pause := askAgain
	switch {
	case passed && !w.statedOver(now, is):
	case passed:
		pause = countedLate / 20
	case !w.alone:
		return
	}
	if wake := now.Add(pause); wake.Before(w.Wake) {
		w.Wake = wake
	}
}

// Answered takes in what a coordinator answers, which has let the pod go, or why none does.
func (w *Wait) Answered(now time.Time, passed wire.BarrierStatus, err error) {
	if err == nil {
		w.passed, w.passedAt, w.alone = passed, now, false
		return
	}
	w.alone, w.trouble, w.asked, w.askAt = true, err.Error(), false, now.Add(askAgain)
}

// mayStop reports whether a pod may be told to stop, and with which outcome, that a coordinator has
// let go. The kernel of the pod's own node sees every connection to it: also those that
// came since that agent last reported Idle, from nodes that are not asked or by a load balancer,
// and those that the pod or one of its Services wants waited for.
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
// passed, or the last counts have shown that no connection is open and none comes.
func (w *Wait) statedOver(now time.Time, is gateway.Reading) bool {
	quiet := time.Duration(w.passed.QuietMillis) * time.Millisecond
	return now.Sub(w.pod.Seen) >= time.Duration(w.passed.AtMostMillis)*time.Millisecond ||
		quiet > 0 && is.Quiet >= quiet && now.Sub(is.Counted) <= countedFresh
}

// stopped reports whether this node's kernel alone is enough, when no coordinator can be asked. All
// times are by this node's clock.
func (w *Wait) stopped(now time.Time, is gateway.Reading) bool {
	late := now.Sub(w.pod.Seen) >= localKept
	switch is.State {
	case health.Idle:
		return true
	case health.Removed:
		return now.Sub(w.removedAt) >= localIdle
	case health.Kept:
		return is.NoConnections && late
	case health.Unknown:
		return late
	default:
		return false
	}
}

func outcomeText(p wire.BarrierStatus) string {
	text := ""
	for i, w := range p.Waiting {
		if i == 3 {
			return fmt.Sprintf("%s and %d more", text, len(p.Waiting)-3)
		}
		if i > 0 {
			text += ", "
		}
		text += w
	}
	if p.Cut {
		text += " (a stated wait is longer than the bound)"
	}
	return text
}

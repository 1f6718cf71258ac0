package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Next is what a [Call] needs next.
type Next uint8

const (
	// NextAnswer: the call is over, and its Outcome is the answer.
	NextAnswer Next = iota
	// NextClaim: ask the opener, until Until at most. Then call [Call.Claimed].
	NextClaim
	// NextHold: wait for the drain of [Call.Request], until Until. Then call [Call.Held].
	NextHold
	// NextAsk: ask at At, until Until at most, whether another replica was asked. Then call
	// [Call.Asked].
	NextAsk
)

// Call is a review of a deletion, as steps. It has no goroutine, timer or clock. Its caller carries
// out what Next requests, and passes the result and the time to the method that [Next] names.
// [Handler] drives calls for the API server, the simulation on virtual time.
type Call struct {
	Next Next
	// At and Until are the times of Next.
	At, Until time.Time
	// Outcome is the answer, once Next is NextAnswer.
	Outcome
	// End is when a call that is held is answered at the latest.
	End time.Time
	// Status is the last status of the drain, if the call has waited for it. Err is the error that
	// ended the wait.
	Status drain.Status
	Err    error

	subject
	h       *Handler
	q       *request
	facts   Facts
	verdict Verdict
	// holding: the ledger was asked for the drain. waited: this call has waited for it.
	holding, waited bool
}

// Outcome is the answer to a review.
type Outcome struct {
	Allowed bool
	Reason  string
	// Message is for operators: why the deletion was denied, or what was abnormal. Warn: Message is
	// a warning about an allowed deletion. RetryAfter is how long the caller is to wait before it
	// tries again. 0: the answer has none.
	Message    string
	Warn       bool
	RetryAfter time.Duration
	// Budget is the text of the cause that the API server gives when a budget allows no disruption.
	// Programs that evict pods look for that cause. Empty: no budget is the reason.
	Budget string
}

// Review begins a call about a pod, for the simulation. began is when the review arrived. old is
// the pod as the API server would delete it, nil for an eviction. grace is the grace period of the
// request, nil if it has none. timeout is how long the API server waits. controller: a workload
// controller calls.
func (h *Handler) Review(ctx context.Context, began time.Time, operation Operation, pod drain.Pod, old *corev1.Pod,
	grace *int64, timeout time.Duration, controller bool) *Call {
	return h.call(ctx, began, &request{operation: operation, namespace: pod.Namespace, name: pod.Name, pod: old,
		grace: grace, timeout: timeout, controller: controller})
}

// call begins a call about the pod of q.
func (h *Handler) call(ctx context.Context, began time.Time, q *request) *Call {
	c := &Call{h: h, q: q, End: h.Times.HoldUntil(began, q.timeout)}
	var err error
	if c.facts, c.subject, err = h.Cluster.gather(ctx, began, q); err != nil {
		c.answer(h.noFacts(q, err))
		return c
	}
	c.verdict = Decide(c.facts)
	switch {
	case c.verdict.Action == Drain:
		c.Next, c.Until = NextClaim, began.Add(time.Minute) // Claim bounds each question by itself
	case h.Others.Opener():
		c.judge(ctx, began)
	default:
		c.carryOut(began)
	}
	return c
}

func (c *Call) answer(o Outcome) {
	c.Next, c.Outcome = NextAnswer, o
	if c.pod != nil && !c.q.dryRun && (o.Allowed || o.Reason == string(Budget)) {
		c.h.Cluster.decided(c.drainPod().UID, o.Allowed)
	}
}

// Request returns the request to the ledger.
func (c *Call) Request() coordinator.Request { return c.request() }

// Claim returns the question to the opener about the deletion.
func (c *Call) Claim(now time.Time) wire.Claim {
	is := c.h.Cluster.Ledger.Pod(c.drainPod().UID)
	claim := wire.Claim{Operation: string(c.q.operation), Pod: c.drainPod(), ElapsedMillis: is.Spent.Milliseconds(),
		Controller: c.q.controller}
	if !is.Since.IsZero() {
		claim.ElapsedMillis = now.Sub(is.Since).Milliseconds()
	}
	return claim
}

// Claimed records the answer of the opener. witnesses is the second result of [Others.Claim]: false
// if this replica is the opener, or if no replica before it has judged the deletion.
func (c *Call) Claimed(ctx context.Context, now time.Time, claimed wire.Claimed, witnesses bool) {
	switch {
	case witnesses:
		c.role = witness
		c.place = drain.Place{Is: drain.Granted, Elapsed: time.Duration(claimed.ElapsedMillis) * time.Millisecond}
		if claimed.Queued || claimed.Verdict != wire.VerdictDrain {
			c.place.Is = drain.Deferred
		}
		if c.turn = coordinator.TurnUnheld; claimed.Hold {
			c.turn = coordinator.TurnHeld
		}
	case ctx.Err() != nil || c.holding && !now.Before(c.End): // the former answer counts
	default:
		c.place, c.turn, c.role = drain.Place{}, coordinator.TurnJudged, opener
	}
	switch {
	case witnesses && claimed.Verdict == wire.VerdictDeny:
		c.answer(Outcome{Reason: claimed.Reason, Message: claimed.Message, Budget: claimed.Budget})
	case c.holding:
		c.look(now)
	case witnesses:
		c.carryOut(now)
	case ctx.Err() != nil:
		c.answer(Outcome{Reason: string(CallerGone), Message: "Lameduck: the caller has gone"})
	default:
		c.judge(ctx, now)
	}
}

// judge decides the call, with the capacity of Services and budgets taken into account.
func (c *Call) judge(ctx context.Context, now time.Time) {
	var err error
	if c.verdict, err = c.h.Cluster.judge(ctx, &c.facts, &c.subject, true); err != nil {
		c.answer(c.h.noFacts(c.q, err))
		return
	}
	c.carryOut(now)
}

// carryOut answers the call or opens the drain, according to the verdict.
func (c *Call) carryOut(now time.Time) {
	v := c.verdict
	if v.Unroute && c.pod != nil {
		c.h.Cluster.Ledger.Unroute(c.request())
	}
	if v.Reason == Observed && c.pod != nil && !c.facts.Cold && c.h.Others.Opener() {
		c.h.Cluster.observe(now, c.facts, c.subject)
	}
	o := Outcome{Allowed: v.Action == Allow, Reason: string(v.Reason), Message: v.Message, Warn: v.Warn}
	switch v.Action {
	case Allow:
	case Drain:
		c.holding = true
		c.look(now) // the claim took time
		return
	default:
		// With Retry-After, client-go would ask ten times more within one call. The API server
		// sends none for a budget.
		if v.Reason != Budget {
			o.RetryAfter = drain.RetryAfter(0, false, 0)
		}
		o.Budget = c.facts.Budget
	}
	c.answer(o)
}

// hold makes the call wait for the drain, for [LookAround] at most.
func (c *Call) hold(now time.Time) {
	c.Next, c.Until = NextHold, now.Add(LookAround)
	if c.End.Before(c.Until) {
		c.Until = c.End
	}
}

// Held records how the wait for the drain ended.
func (c *Call) Held(ctx context.Context, now time.Time, status drain.Status, waited bool, err error) {
	c.Status, c.Err, c.waited = status, err, c.waited || waited
	switch {
	case err == nil && (status.Phase == drain.Released || status.Phase == drain.Closed):
		c.answer(c.h.released(ctx, c.subject, status, now.Sub(status.Since)))
	case errors.Is(err, coordinator.ErrStopping) && !c.h.Cluster.Ledger.ReliedOn(c.drainPod().UID):
		// A replica on which another one relies does not abstain: of two that stop, one answers.
		c.Next, c.At, c.Until = NextAsk, now, now.Add(AbstainWithin)
	case err != nil || !status.Waits() || !now.Before(c.End):
		c.refuse(now)
	case status.Phase == drain.Queued && c.place.Is == drain.Deferred:
		c.Next, c.Until = NextClaim, c.End
	default:
		c.look(now)
	}
}

// look holds the call again, unless its pod has become the last of a Service. Other pods of its
// Services may have been deleted in the meantime, and gateways keep the last one.
func (c *Call) look(now time.Time) {
	if service := c.h.Cluster.live(now, &c.subject); service != "" {
		c.answer(Outcome{Allowed: true, Reason: string(LastTarget), Warn: true,
			Message: lastMessage("Service " + service)})
		return
	}
	c.h.Cluster.hooks(&c.facts, &c.subject)
	c.hold(now)
}

// Asked records whether another replica was asked about this deletion, and so answers it.
func (c *Call) Asked(now time.Time, yes bool) {
	switch {
	case yes:
		c.answer(Outcome{Allowed: true, Reason: string(Abstained)})
	case now.Add(AbstainEvery).Before(c.Until):
		c.At = now.Add(AbstainEvery)
	default:
		c.refuse(now)
	}
}

// refuse answers that the pod is not deleted yet, with the reason.
func (c *Call) refuse(now time.Time) {
	if errors.Is(c.Err, coordinator.ErrTooManyOwners) {
		// Without Retry-After, the controller's worker is free, and asks again by its own back-off.
		c.answer(Outcome{Reason: string(TooManyOwners), Message: ownersMessage(c.subject)})
		return
	}
	s := c.Status
	elapsed, remaining := now.Sub(s.Since), s.Deadline.Sub(now)
	o := Outcome{Reason: string(Draining), RetryAfter: drain.RetryAfter(elapsed, c.waited, remaining)}
	rest := fmt.Sprintf("in %s at the latest. To delete it now: kubectl annotate pod -n %s %s %s=true",
		seconds(max(remaining, 0)), c.pod.Namespace, c.pod.Name, BreakGlassAnnotation)
	if s.Phase == drain.Queued {
		o.Reason = string(Queued)
		o.Message = fmt.Sprintf("Lameduck: pod %s has been queued for %s: %s. It is deleted when its turn has "+
			"come and its gateways have stopped routing to it, %s",
			c.drainPod(), seconds(elapsed), c.h.Cluster.fullService(c.subject), rest)
	} else {
		o.Message = fmt.Sprintf("Lameduck: pod %s is still routed by %d of %d gateways, since %s: %s. It is deleted "+
			"when they have stopped, %s",
			c.drainPod(), len(s.Waiting), s.Owed, seconds(elapsed), list(s.Waiting), rest)
	}
	switch {
	case errors.Is(c.Err, coordinator.ErrTooManyOfOwner):
		o.Reason = string(TooManyOfOwner)
	case errors.Is(c.Err, coordinator.ErrTooManyHolds):
		o.Reason = string(TooManyHolds)
	case errors.Is(c.Err, coordinator.ErrStopping):
		o.Reason, o.RetryAfter = string(Stopping), time.Second
		o.Message = fmt.Sprintf("Lameduck: %v; ask again", c.Err)
	case c.Err != nil:
		o.Reason = string(CallerGone)
	}
	c.answer(o)
}

// ownersMessage explains [TooManyOwners].
func ownersMessage(s subject) string {
	kind := s.request().Controller
	return fmt.Sprintf("Lameduck: pod %s is not deleted yet: deletions of %d other %ss wait for gateways, and their "+
		"controller is to have workers left. It asks again by itself", s.drainPod(), coordinator.OwnersHeld[kind], kind)
}

// released returns the answer that the pod may be deleted, with a warning if its drain was
// abnormal.
func (h *Handler) released(ctx context.Context, s subject, status drain.Status, elapsed time.Duration) Outcome {
	var uncovered []string
	if status.Reason == drain.Acknowledged || status.Reason == drain.NoAgents || status.Reason == drain.BarrierWaits {
		var err error
		if uncovered, err = h.Cluster.uncovered(ctx, s); err != nil { // the rest was found
			h.Log.Warn("find out what routes the pod's Services", "pod", s.drainPod().String(), "error", err)
		}
	}
	if len(uncovered) > 0 {
		status.Reason = drain.Uncovered
	}
	o := Outcome{Allowed: true, Reason: status.Reason.String(), Warn: status.Reason.Abnormal()}
	switch {
	case status.Reason == drain.Deadline && h.Cluster.Ledger.Pod(status.Pod.UID).Queued:
		o.Message = fmt.Sprintf("deleted after %s while gateways still route to it (%s): its drain was queued: %s",
			seconds(elapsed), status.Reason, h.Cluster.fullService(s))
	case status.Reason == drain.LastTarget:
		o.Warn, o.Message = true, lastMessage("one of its Services")
	case status.Reason == drain.Deadline || status.Reason == drain.IdleBound:
		o.Message = fmt.Sprintf("deleted after %s although not every gateway has stopped routing to it (%s): %s",
			seconds(elapsed), status.Reason, list(slices.Concat(status.Waiting, status.Lost)))
	case status.Reason == drain.AgentsLost:
		o.Message = fmt.Sprintf("deleted after %s although gateways were lost that had not stopped routing to it "+
			"(AgentsLost): %s", seconds(elapsed), list(status.Lost))
	case status.Reason == drain.Uncovered && len(status.Suspended) == 0:
		o.Message = "deleted without waiting for everything that routes it (Uncovered): " +
			strings.Join(uncovered, "; ")
	case len(status.Suspended) > 0:
		// Even if all others have acknowledged, this gateway may route to the pod when it stops.
		o.Reason, o.Warn = drain.Suspended.String(), true
		o.Message = "deleted without waiting for gateways that did not acknowledge several drains in a row " +
			"(Suspended): " + list(status.Suspended)
	case len(status.Away) > 0:
		o.Message = "deleted without waiting for gateways that are away, with pods that are not ready: " + list(
			status.Away)
		if status.MoreAway > 0 {
			o.Message += fmt.Sprintf(", and %d more", status.MoreAway)
		}
	}
	return o
}

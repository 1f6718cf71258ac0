package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A replica that stops allows a call if another one was asked about the same pod since sameCall
// before the call began. It looks every abstainEvery, for abstainWithin: calls to several replicas
// do not arrive at once.
const (
	abstainWithin = 500 * time.Millisecond
	abstainEvery  = 50 * time.Millisecond
	sameCall      = 250 * time.Millisecond
)

// lookAround is how often a held call looks whether its pod has become the last of a Service.
const lookAround = 250 * time.Millisecond

// Events tells operators about a pod. It must not block.
type Events interface {
	Event(pod *corev1.Pod, warning bool, reason, message string)
}

// Handler answers AdmissionReviews of DELETE pods and CREATE pods/eviction.
type Handler struct {
	Cluster *Cluster
	Times   drain.Times
	Events  Events
	Log     *slog.Logger
	Metrics *Metrics
	// Replica is the name of this one.
	Replica string
	// Others are the other replicas. Nil: there are none.
	Others Others
}

// Others are the other replicas, as [peers.Peers] knows them.
type Others interface {
	// Opener reports whether this replica decides what takes capacity.
	Opener() bool
	// Claim asks the opener about a deletion. ok is false if this replica is the opener.
	Claim(ctx context.Context, claim wire.Claim) (claimed wire.Claimed, ok bool)
	// Asked reports whether the API server has asked another replica about the pod within the last
	// time.
	Asked(ctx context.Context, pod drain.Pod, within time.Duration) bool
}

// outcome is a verdict carried out.
type outcome struct {
	allowed bool
	reason  string
	// message is for operators: why not, or what was abnormal.
	message    string
	warn       bool
	retryAfter time.Duration
	// budget is the cause that the API server gives when a budget has no room, which evictors look
	// for. Empty: that is not it.
	budget string
}

// ServeHTTP implements http.Handler. What is not a review that this webhook understands gets a 4xx
// and changes nothing; everything else gets an answer before the API server's ?timeout= is over.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	if r.Method != http.MethodPost {
		h.refuse(w, malformed{http.StatusMethodNotAllowed, "method " + r.Method + ": reviews come by POST"})
		return
	}
	q, err := read(w, r)
	if err != nil {
		h.refuse(w, err)
		return
	}
	if q.isCheck() {
		h.answerCheck(w, q)
		return
	}
	o, s := h.decide(r.Context(), began, q)
	answer := "deny"
	if o.allowed {
		answer = "allow"
	}
	role := s.role
	switch {
	case role != "":
	case h.Others != nil && !h.Others.Opener():
		role = witness
	default:
		role = opener
	}
	h.Metrics.answered(role, q.operation, answer, o.reason, time.Since(began))
	// One of the replicas that were asked about this deletion tells operators about it.
	h.tell(role, q, s, o)
	o.warn = o.warn && role == opener
	h.write(w, q, o)
}

// decide gathers, decides and carries out.
func (h *Handler) decide(ctx context.Context, began time.Time, q *request) (outcome, subject) {
	facts, s, err := h.Cluster.gather(ctx, began, q)
	if err != nil {
		return h.noFacts(q, err), s
	}
	defer h.Cluster.settled(&s)
	v := Decide(facts)
	claimed, witness := wire.Claimed{}, false
	if v.Action == Drain {
		claimed, witness = h.claim(ctx, q, &s)
	}
	switch {
	case witness && claimed.Verdict == wire.VerdictDeny:
		return outcome{reason: claimed.Reason, message: claimed.Message, budget: claimed.Budget}, s
	case witness:
	case v.Action == Drain && ctx.Err() != nil:
		return outcome{reason: string(CallerGone), message: "Lameduck: the caller has gone"}, s
	case v.Action == Drain || h.Others == nil || h.Others.Opener():
		if v, err = h.Cluster.judge(ctx, q, &facts, &s); err != nil {
			return h.noFacts(q, err), s
		}
	}
	if v.Unroute && s.pod != nil {
		h.Cluster.Ledger.Unroute(s.request())
	}
	o := outcome{allowed: v.Action == Allow, reason: string(v.Reason), message: v.Message, warn: v.Warn}
	switch v.Action {
	case Allow:
	case Drain:
		o = h.hold(ctx, began, q, &s)
	default:
		// With Retry-After, client-go would ask ten times more within one call. The API server
		// sends none for a budget.
		if v.Reason != Budget {
			o.retryAfter = drain.RetryAfter(0, false, 0)
		}
		o.budget = facts.Budget
	}
	return o, s
}

// noFacts allows: what cannot be found out must not keep a pod.
func (h *Handler) noFacts(q *request, err error) outcome {
	h.Log.Error("gather facts", "namespace", q.namespace, "pod", q.name, "error", err)
	return outcome{allowed: true, reason: string(NoFacts), warn: true,
		message: "deleted without asking gateways: " + err.Error()}
}

// claim asks the opener about a deletion that has to wait, and takes over what it says. ok is false
// if this replica is the opener.
func (h *Handler) claim(ctx context.Context, q *request, s *subject) (claimed wire.Claimed, ok bool) {
	if h.Others == nil {
		return wire.Claimed{}, false
	}
	claim := wire.Claim{Operation: string(q.operation), Pod: s.drainPod()}
	if is := h.Cluster.Ledger.Pod(claim.Pod.UID); is.Draining {
		claim.ElapsedMillis = time.Since(is.Since).Milliseconds()
	}
	claimed, ok = h.Others.Claim(ctx, claim)
	switch {
	case ok:
		s.role = witness
	case ctx.Err() != nil:
		return claimed, false // what the opener said before stands
	default:
		s.place, s.turn, s.role = drain.Place{}, coordinator.TurnJudged, opener
		return claimed, false
	}
	s.place = drain.Place{Is: drain.Granted, Elapsed: time.Duration(claimed.ElapsedMillis) * time.Millisecond}
	if claimed.Queued || claimed.Verdict != wire.VerdictDrain {
		s.place.Is = drain.Deferred
	}
	s.turn = coordinator.TurnUnheld
	if claimed.Hold {
		s.turn = coordinator.TurnHeld
	}
	return claimed, true
}

// Claim implements [coordinator.Claimant]: it decides for a witness as it would if the API server
// asked.
func (h *Handler) Claim(ctx context.Context, claim wire.Claim) wire.Claimed {
	now := time.Now()
	q := &request{operation: Operation(claim.Operation), namespace: claim.Pod.Namespace, name: claim.Pod.Name}
	facts, s, err := h.Cluster.gather(ctx, now, q)
	if err != nil || s.pod == nil || drain.UID(s.pod.UID) != claim.Pod.UID {
		return wire.Claimed{}
	}
	v, err := h.Cluster.judge(ctx, q, &facts, &s)
	defer h.Cluster.settled(&s)
	switch {
	case err != nil:
		return wire.Claimed{}
	case v.Action == Deny && v.Reason == Budget:
		return wire.Claimed{Verdict: wire.VerdictDeny, Reason: string(Budget), Message: v.Message, Budget: facts.Budget}
	case v.Action != Drain:
		return wire.Claimed{}
	}
	s.place.Elapsed = time.Duration(claim.ElapsedMillis) * time.Millisecond
	status, hold := h.Cluster.Ledger.Claim(s.request())
	return wire.Claimed{
		Verdict: wire.VerdictDrain, Queued: h.Cluster.Ledger.Pod(claim.Pod.UID).Queued, Hold: hold,
		ElapsedMillis: now.Sub(status.Since).Milliseconds(),
	}
}

// abstains reports whether another replica answers this call, which began so long ago, so that one
// that stops need not. A replica on which another one relies does not abstain: of two that stop,
// one answers.
func (h *Handler) abstains(ctx context.Context, s subject, began time.Time) bool {
	if h.Others == nil || h.Cluster.Ledger.ReliedOn(s.drainPod().UID) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, abstainWithin)
	defer cancel()
	for ctx.Err() == nil {
		if h.Others.Asked(ctx, s.drainPod(), time.Since(began)+sameCall) {
			return true
		}
		time.Sleep(abstainEvery)
	}
	return false
}

// hold waits for the drain and words what came of it.
func (h *Handler) hold(ctx context.Context, began time.Time, q *request, s *subject) outcome {
	end := h.Times.HoldUntil(began, q.timeout)
	var status drain.Status
	var held bool
	var err error
	for {
		now := time.Now()
		var waited bool
		status, waited, err = h.Cluster.Ledger.Drain(ctx, s.request(), earlier(end, now.Add(lookAround)))
		held = held || waited
		if err != nil || !status.Waits() || !time.Now().Before(end) {
			break
		}
		if status.Phase == drain.Queued && s.place.Is == drain.Deferred {
			within, cancel := context.WithDeadline(ctx, end)
			h.claim(within, q, s)
			cancel()
		}
		// The pods that it waits with may have gone meanwhile: that makes room or none, and
		// gateways keep the last one.
		if service := h.Cluster.live(time.Now(), s); service != "" {
			return outcome{allowed: true, reason: string(LastTarget), warn: true,
				message: lastMessage("Service " + service)}
		}
	}
	now := time.Now()
	elapsed, remaining := now.Sub(status.Since), status.Deadline.Sub(now)
	if err == nil && (status.Phase == drain.Released || status.Phase == drain.Closed) {
		return h.released(*s, status, elapsed)
	}
	o := outcome{reason: string(Draining), retryAfter: drain.RetryAfter(elapsed, held, remaining)}
	rest := fmt.Sprintf("in %s at the latest. To delete it now: kubectl annotate pod -n %s %s %s=true",
		seconds(max(remaining, 0)), s.pod.Namespace, s.pod.Name, BreakGlassAnnotation)
	if status.Phase == drain.Queued {
		o.reason = string(Queued)
		o.message = fmt.Sprintf("Lameduck: pod %s waits for room, since %s: %s. It is deleted when it had its turn "+
			"and the gateways have let go, %s",
			s.drainPod(), seconds(elapsed), h.Cluster.fullService(*s), rest)
	} else {
		o.message = fmt.Sprintf("Lameduck: pod %s is still routed by %d of %d gateways, since %s: %s. It is deleted "+
			"when they have let go, %s",
			s.drainPod(), len(status.Waiting), status.Owed, seconds(elapsed), list(status.Waiting), rest)
	}
	switch {
	case errors.Is(err, coordinator.ErrTooManyOfOwner):
		o.reason = string(TooManyOfOwner)
	case errors.Is(err, coordinator.ErrTooManyHolds):
		o.reason = string(TooManyHolds)
	case errors.Is(err, coordinator.ErrStopping) && h.abstains(ctx, *s, began):
		return outcome{allowed: true, reason: string(Abstained)}
	case errors.Is(err, coordinator.ErrStopping):
		o.reason, o.retryAfter = string(Stopping), time.Second
		o.message = fmt.Sprintf("Lameduck: %v; ask again", err)
	case err != nil:
		o.reason = string(CallerGone)
	}
	return o
}

// released words that a drain is over, or had never to begin.
func (h *Handler) released(s subject, status drain.Status, elapsed time.Duration) outcome {
	o := outcome{allowed: true, reason: status.Reason.String(), warn: status.Reason.Abnormal()}
	switch {
	case status.Reason == drain.Deadline && h.Cluster.Ledger.Pod(status.Pod.UID).Queued:
		o.message = fmt.Sprintf("deleted after %s while gateways still route to it (%s): it waited for room: %s",
			seconds(elapsed), status.Reason, h.Cluster.fullService(s))
	case status.Reason == drain.LastTarget:
		o.warn, o.message = true, lastMessage("one of its Services")
	case status.Reason == drain.Deadline || status.Reason == drain.IdleBound:
		o.message = fmt.Sprintf("deleted after %s although not every gateway has let go (%s): %s", seconds(elapsed),
			status.Reason, list(slices.Concat(status.Waiting, status.Lost)))
	case status.Reason == drain.AgentsLost:
		o.message = fmt.Sprintf("deleted after %s although gateways were lost that had not let go (AgentsLost): %s",
			seconds(elapsed), list(status.Lost))
	case len(status.Suspended) > 0:
		// Whoever else has acknowledged: this gateway may route to the pod when it stops.
		o.reason, o.warn = drain.Suspended.String(), true
		o.message = "deleted without waiting for gateways that have let one drain after the other expire " +
			"(Suspended): " + list(status.Suspended)
	case len(status.Away) > 0:
		o.message = "deleted without waiting for gateways that are away, with pods that are not ready: " + list(
			status.Away)
		if status.MoreAway > 0 {
			o.message += fmt.Sprintf(", and %d besides", status.MoreAway)
		}
	}
	return o
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// String says why there is no room.
func (c fullService) String() string {
	if c.service == "" {
		return "too many targets of its Services are being drained"
	}
	return fmt.Sprintf("%d of %d targets of Service %s are being drained here; at most half at one time, those of "+
		"other replicas counted",
		c.draining, c.usable, c.service)
}

// list names gateways and what they say.
func list(waiting []drain.Waiting) string {
	if len(waiting) == 0 {
		return "nobody"
	}
	var text strings.Builder
	for i, w := range waiting {
		if i == 3 {
			fmt.Fprintf(&text, " and %d more", len(waiting)-i)
			break
		}
		if i > 0 {
			text.WriteString(", ")
		}
		state := w.State.String()
		if !w.Connected {
			state = "not connected"
		}
		fmt.Fprintf(&text, "%s (%s)", w.Name, state)
	}
	return text.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }

// tell writes Events and the log: one line for each answer that was held, denied or abnormal.
func (h *Handler) tell(role string, q *request, s subject, o outcome) {
	if role == witness || o.allowed && !o.warn && o.message == "" && o.reason != drain.Acknowledged.String() {
		h.Log.Debug("deletion", "operation", q.operation, "namespace", q.namespace, "pod", q.name, "user", q.username,
			"allowed", o.allowed, "reason", o.reason, "role", role)
		return
	}
	attrs := []any{"operation", q.operation, "namespace", q.namespace, "pod", q.name, "user", q.username,
		"allowed", o.allowed, "reason", o.reason}
	if s.pod != nil {
		attrs = append(attrs, "uid", s.pod.UID)
	}
	if o.message != "" {
		attrs = append(attrs, "message", o.message)
	}
	h.Log.Info("deletion", attrs...)
	if s.pod == nil || q.dryRun {
		return
	}
	switch {
	case !o.allowed:
		h.Events.Event(s.pod, false, "LameduckWaiting", o.message)
	case o.warn:
		h.Events.Event(s.pod, true, "Lameduck"+o.reason, o.message)
	}
}

func (h *Handler) write(w http.ResponseWriter, q *request, o outcome) {
	response := &admissionv1.AdmissionResponse{UID: q.uid, Allowed: o.allowed}
	switch {
	case !o.allowed:
		response.Result = &metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests,
			Message: o.message,
		}
		if o.retryAfter > 0 {
			response.Result.Details = &metav1.StatusDetails{RetryAfterSeconds: int32(o.retryAfter / time.Second)}
		}
		if o.budget != "" {
			if response.Result.Details == nil {
				response.Result.Details = &metav1.StatusDetails{}
			}
			response.Result.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause,
				Message: o.budget}}
		}
	case o.warn:
		response.Warnings = []string{"Lameduck: pod " + q.namespace + "/" + q.name + " " + o.message}
	}
	answer(w, response)
}

// answer writes a review's answer.
func answer(w http.ResponseWriter, response *admissionv1.AdmissionResponse) {
	review := admissionv1.AdmissionReview{Response: response}
	review.SetGroupVersionKind(admissionv1.SchemeGroupVersion.WithKind("AdmissionReview"))
	w.Header().Set("Content-Type", "application/json")
	// The API server that has gone away needs no answer.
	_ = json.NewEncoder(w).Encode(review)
}

func (h *Handler) refuse(w http.ResponseWriter, err error) { refuse(w, h.Log, h.Metrics, err) }

// refuse answers what is not a review that is understood.
func refuse(w http.ResponseWriter, log *slog.Logger, metrics *Metrics, err error) {
	code := http.StatusInternalServerError
	var m malformed
	if errors.As(err, &m) {
		code = m.code
	}
	metrics.refused(code)
	log.Warn("refused a review", "code", code, "error", err)
	// The API server does not do this. Nobody else needs the connection again.
	w.Header().Set("Connection", "close")
	http.Error(w, "lameduck: "+err.Error(), code)
}

package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A replica that stops allows its call if the API server also asked another replica about the pod,
// no earlier than SameCall before the call began. It asks the others every AbstainEvery for
// AbstainWithin, because the calls of one deletion do not arrive at the same moment.
const (
	AbstainWithin = 500 * time.Millisecond
	AbstainEvery  = 50 * time.Millisecond
	SameCall      = 250 * time.Millisecond
)

// LookAround is how often a held call looks whether its pod has become the last of a Service.
const LookAround = 250 * time.Millisecond

// Events records Events about pods. It must not block. reason is in CamelCase.
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
	Others  Others
}

// Others are the other replicas. Peers in internal/peers implements it.
type Others interface {
	// Opener reports whether this replica decides what takes capacity.
	Opener() bool
	// Claim asks the opener about a deletion. ok is false if this replica is the opener, or if no
	// replica before it has judged the deletion.
	Claim(ctx context.Context, claim wire.Claim) (claimed wire.Claimed, ok bool)
	// Asked reports whether the API server has asked another replica about the pod within the given
	// time.
	Asked(ctx context.Context, pod drain.Pod, within time.Duration) bool
}

// ServeHTTP implements http.Handler. What is not a review that this webhook understands gets a 4xx
// and changes nothing; everything else gets an answer before the API server's ?timeout= is over.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	q, err := read(w, r)
	if err != nil {
		refuse(w, h.Log, h.Metrics, err)
		return
	}
	if q.isCheck() {
		h.answerCheck(w, q)
		return
	}
	o, s := h.decide(r.Context(), began, q)
	answer := Deny
	if o.Allowed {
		answer = Allow
	}
	role := s.role
	switch {
	case role != "":
	case !h.Others.Opener():
		role = witness
	default:
		role = opener
	}
	h.Metrics.answered(role, q.operation, answer, o.Reason, time.Since(began))
	// One of the replicas that were asked about this deletion tells operators about it.
	h.tell(role, q, s, o)
	o.Warn = o.Warn && role == opener
	h.write(w, q, o)
}

// decide gathers, decides and carries out: it walks through the steps of a [Call].
func (h *Handler) decide(ctx context.Context, began time.Time, q *request) (Outcome, subject) {
	c := h.call(ctx, began, q)
	for {
		switch c.Next {
		case NextClaim:
			within, cancel := context.WithDeadline(ctx, c.Until)
			claimed, witness := h.Others.Claim(within, c.Claim(time.Now()))
			cancel()
			c.Claimed(ctx, time.Now(), claimed, witness)
		case NextHold:
			status, waited, err := h.Cluster.Ledger.Drain(ctx, c.Request(), c.Until)
			c.Held(ctx, time.Now(), status, waited, err)
		case NextAsk:
			time.Sleep(time.Until(c.At))
			within, cancel := context.WithDeadline(ctx, c.Until)
			asked := h.Others.Asked(within, c.drainPod(), time.Since(began)+SameCall)
			cancel()
			c.Asked(time.Now(), asked)
		default:
			return c.Outcome, c.subject
		}
	}
}

// noFacts allows the deletion: a cache that cannot be read must not keep a pod.
func (h *Handler) noFacts(q *request, err error) Outcome {
	h.Log.Error("gather facts", "namespace", q.namespace, "pod", q.name, "error", err)
	return Outcome{Allowed: true, Reason: string(NoFacts), Warn: true,
		Message: "deleted without asking gateways: " + err.Error()}
}

// Claim implements [coordinator.Claimant]: it decides for a witness as it would if the API server
// asked.
func (h *Handler) Claim(ctx context.Context, claim wire.Claim) wire.Claimed {
	return h.ClaimAt(ctx, time.Now(), claim)
}

// ClaimAt is Claim at a time.
func (h *Handler) ClaimAt(ctx context.Context, now time.Time, claim wire.Claim) wire.Claimed {
	q := &request{operation: Operation(claim.Operation), namespace: claim.Pod.Namespace, name: claim.Pod.Name,
		controller: claim.Controller}
	q.preconditions.UID = ptr.To(types.UID(claim.Pod.UID))
	facts, s, err := h.Cluster.gather(ctx, now, q)
	if err != nil || s.pod == nil || drain.UID(s.pod.UID) != claim.Pod.UID {
		return wire.Claimed{}
	}
	s.place.Elapsed = time.Duration(claim.ElapsedMillis) * time.Millisecond
	v, err := h.Cluster.judge(ctx, &facts, &s, true)
	switch {
	case err != nil:
		return wire.Claimed{}
	case v.Action == Deny && v.Reason == Budget:
		h.Cluster.decided(claim.Pod.UID, false)
		return wire.Claimed{Verdict: wire.VerdictDeny, Reason: string(Budget), Message: v.Message, Budget: facts.Budget}
	case v.Action != Drain:
		return wire.Claimed{}
	}
	status, crowded := h.Cluster.Ledger.Claim(s.request())
	if errors.Is(crowded, coordinator.ErrTooManyOwners) {
		return wire.Claimed{Verdict: wire.VerdictDeny, Reason: string(TooManyOwners), Message: ownersMessage(s)}
	}
	return wire.Claimed{
		Verdict: wire.VerdictDrain, Queued: h.Cluster.Ledger.Pod(claim.Pod.UID).Queued, Hold: crowded == nil,
		ElapsedMillis: now.Sub(status.Since).Milliseconds(),
	}
}

// String explains why a drain is queued.
func (c fullService) String() string {
	if c.service == "" {
		return "too many targets of its Services are being drained"
	}
	return fmt.Sprintf("%d of %d targets of Service %s are being drained here; at most half at a time, counting those "+
		"of other replicas",
		c.draining, c.usable, c.service)
}

// list names gateways and the state that each has reported.
func list(waiting []drain.Waiting) string {
	if len(waiting) == 0 {
		return "no gateway"
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
func (h *Handler) tell(role string, q *request, s subject, o Outcome) {
	if role == witness || o.Allowed && !o.Warn && o.Message == "" && o.Reason != drain.Acknowledged.String() &&
		o.Reason != string(BarrierWaits) {
		h.Log.Debug("deletion", "operation", q.operation, "namespace", q.namespace, "pod", q.name, "user", q.username,
			"allowed", o.Allowed, "reason", o.Reason, "role", role)
		return
	}
	attrs := []any{"operation", q.operation, "namespace", q.namespace, "pod", q.name, "user", q.username,
		"allowed", o.Allowed, "reason", o.Reason}
	if s.pod != nil {
		attrs = append(attrs, "uid", s.pod.UID)
	}
	if o.Message != "" {
		attrs = append(attrs, "message", o.Message)
	}
	h.Log.Info("deletion", attrs...)
	if s.pod == nil || q.dryRun {
		return
	}
	switch {
	case !o.Allowed:
		h.Events.Event(s.pod, false, "LameduckWaiting", o.Message)
	case o.Warn:
		h.Events.Event(s.pod, true, "Lameduck"+o.Reason, o.Message)
	}
}

func (h *Handler) write(w http.ResponseWriter, q *request, o Outcome) {
	response := &admissionv1.AdmissionResponse{UID: q.uid, Allowed: o.Allowed}
	switch {
	case !o.Allowed:
		response.Result = &metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests,
			Message: o.Message,
		}
		if o.RetryAfter > 0 {
			response.Result.Details = &metav1.StatusDetails{RetryAfterSeconds: int32(o.RetryAfter / time.Second)}
		}
		if o.Budget != "" {
			if response.Result.Details == nil {
				response.Result.Details = &metav1.StatusDetails{}
			}
			response.Result.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause,
				Message: o.Budget}}
		}
	case o.Warn:
		response.Warnings = []string{"Lameduck: pod " + q.namespace + "/" + q.name + " " + o.Message}
	}
	answer(w, response)
}

// answer writes a review's answer.
func answer(w http.ResponseWriter, response *admissionv1.AdmissionResponse) {
	review := admissionv1.AdmissionReview{Response: response}
	review.SetGroupVersionKind(admissionv1.SchemeGroupVersion.WithKind("AdmissionReview"))
	w.Header().Set("Content-Type", "application/json")
	// A failed write means that the API server has closed the connection.
	_ = json.NewEncoder(w).Encode(review)
}

// refuse answers a request that is not a review of a known kind.
func refuse(w http.ResponseWriter, log *slog.Logger, metrics *Metrics, err error) {
	code := http.StatusInternalServerError
	if refused := (serve.Refusal{}); errors.As(err, &refused) {
		code = refused.Code
	}
	metrics.refused(code)
	log.Warn("refused a review", "code", code, "error", err)
	// Only the API server's connections are worth keeping, and it sends no such request.
	w.Header().Set("Connection", "close")
	http.Error(w, "lameduck: "+err.Error(), code)
}

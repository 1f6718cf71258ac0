package admission

import (
	"fmt"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/keys"
)

// Operation is what is asked for.
type Operation string

// The operations that wait for gateways.
const (
	// Delete is DELETE of pods, one by one or as a collection.
	Delete Operation = "delete"
	// Evict is CREATE of pods/eviction.
	Evict Operation = "evict"
)

// Facts are everything that the decision rests on.
type Facts struct {
	Operation Operation

	// DryRun is true if the request or, in an eviction, its deleteOptions say so.
	DryRun bool
	// Excluded: the namespace is in excludedNamespaces or Lameduck's own. The webhook configuration
	// normally excludes these, so that no call arrives.
	Excluded bool
	// Mode is one of package keys; the zero value enforces. BreakGlass: the pod has
	// [BreakGlassAnnotation].
	Mode       string
	BreakGlass bool

	// Unknown: no such pod, or it has another UID, or another resourceVersion than an eviction's
	// preconditions.
	Unknown bool
	// Terminating: the pod has a deletionTimestamp.
	Terminating bool
	// Finished: phase Succeeded or Failed. NotRunning: Pending or not scheduled. Mirror: the mirror
	// pod of a static pod.
	Finished, NotRunning, Mirror bool
	// Forced: the deletion has grace period 0, and the pod's own is not 0.
	Forced bool

	// NamespaceTerminating: the pod's namespace is being deleted, or this is its controller's
	// DELETECOLLECTION.
	NamespaceTerminating bool
	// DisruptionTarget: the pod has that condition. NodeLost: its node is not ready, out of
	// service, or not in the cache.
	DisruptionTarget, NodeLost bool

	// Cold: caches have not synced. Up is how long this replica has run.
	Cold bool
	Up   time.Duration

	// Listed: an EndpointSlice lists the pod, or did within the last 10 min (endpoints.Memory), or
	// a Service selects it. Ready: an EndpointSlice lists it as ready. Draining: its drain is open,
	// and ends by what agents report.
	Listed, Ready, Draining bool
	// NotReadyFor is how long the pod's Ready condition has been false. Zero: it is true. More than
	// 10 s if the pod has no such condition.
	NotReadyFor time.Duration
	// Agents is how many are expected. CouldRoute: a directed gateway, or one whose agent has not
	// declared yet, may route a Service of the pod (see [drain.Ledger.Asks]), or its drain is open.
	Agents     int
	CouldRoute bool

	// Budget is why the pod's PodDisruptionBudget does not allow this eviction. Empty: it does, or
	// there is none.
	Budget string
	// BudgetBroken: the API server will refuse this eviction whatever is answered, because of the
	// pod's PodDisruptionBudgets.
	BudgetBroken bool
	// Refused is how often within 10 minutes a deletion was allowed after a drain, and the pod was
	// not deleted.
	Refused int
	// LastOf names a Service of the pod, if no other pod is ready and not terminating in any of its
	// Services that a gateway may route.
	LastOf string

	// Barred: each container of the pod has Lameduck's preStop hook. Bound is how long its barrier
	// lasts at most. Own is the grace period of its application, Grace that of the deletion.
	Barred            bool
	Bound, Own, Grace time.Duration
	// Hooks is what this replica knows of its hooks.
	Hooks coordinator.Hooks
}

// Action is what to answer. The zero value is never decided.
type Action string

const (
	// Allow answers yes at once.
	Allow Action = "allow"
	// Deny answers 429 at once and unroutes nothing.
	Deny Action = "deny"
	// Drain opens a drain, or joins it, and holds the call: yes when it is released, else 429.
	Drain Action = "drain"
)

// Reason names the row of [Table] that decided. It is a metric label, so every value is a constant.
type Reason string

// The reasons of [Decide], one for each row of [Table], and those of a [Call]. The end of a drain
// has a [drain.Reason].
const (
	DryRun               Reason = "DryRun"
	Excluded             Reason = "Excluded"
	ModeOff              Reason = "ModeOff"
	MirrorPod            Reason = "MirrorPod"
	BreakGlass           Reason = "BreakGlass"
	UnknownPod           Reason = "UnknownPod"
	Terminating          Reason = "Terminating"
	Finished             Reason = "Finished"
	NotRunning           Reason = "NotRunning"
	Forced               Reason = "Forced"
	NamespaceTerminating Reason = "NamespaceTerminating"
	DisruptionTarget     Reason = "DisruptionTarget"
	NodeLost             Reason = "NodeLost"
	Observed             Reason = "Observed"
	Starting             Reason = "Starting"
	Cold                 Reason = "Cold"
	NotListed            Reason = "NotListed"
	NoAgents             Reason = "NoAgents"
	NotRouted            Reason = "NotRouted"
	NotReady             Reason = "NotReady"
	Budget               Reason = "Budget"
	BudgetBroken         Reason = "BudgetBroken"
	CoolOff              Reason = "CoolOff"
	LastTarget           Reason = "LastTarget"
	BarrierWaits         Reason = "BarrierWaits"
	Draining             Reason = "Draining"
	// Queued, TooManyHolds, TooManyOfOwner, TooManyOwners, Stopping and CallerGone are decided
	// while holding.
	Queued         Reason = "Queued"
	TooManyHolds   Reason = "TooManyHolds"
	TooManyOfOwner Reason = "TooManyOfOwner"
	TooManyOwners  Reason = "TooManyOwners"
	Stopping       Reason = "Stopping"
	CallerGone     Reason = "CallerGone"
	// Abstained: this replica stops, and another one answers the same call.
	Abstained Reason = "Abstained"
	// NoFacts: the facts could not be read.
	NoFacts Reason = "NoFacts"
)

// answers returns the action for each reason of the table and of the handler: Allow or Deny.
func answers() map[Reason]Action {
	all := map[Reason]Action{Queued: Deny, TooManyHolds: Deny, TooManyOfOwner: Deny, TooManyOwners: Deny,
		Stopping: Deny, CallerGone: Deny, Abstained: Allow, NoFacts: Allow}
	for _, row := range Table {
		all[row.Reason] = row.Answer.Action
	}
	all[Draining], all[BarrierWaits] = Deny, Allow // a drain that is not released yet, and one that is
	return all
}

const (
	// warmUp is how long after its start a replica with cold caches denies instead of allowing.
	warmUp = 10 * time.Second
	// longNotReady is how long a pod must have been unready before every gateway counts as having
	// stopped routing to it by itself.
	longNotReady = 10 * time.Second
	// RefusedWindow is how far back deletions that were refused count, coolOffAfter how many of
	// them are enough.
	RefusedWindow = 10 * time.Minute
	coolOffAfter  = 2
)

// violates is how the API server begins when a budget has no room.
const violates = "Cannot evict pod as it would violate the pod's disruption budget."

// Verdict is what to do, and why.
type Verdict struct {
	Action Action
	Reason Reason
	// Unroute asks agents in the background to stop routing to the pod, although the answer does
	// not wait.
	Unroute bool
	// Warn: the caller is shown Message with an Allow, because something is not as it should be.
	Warn bool
	// Words are the cause, as the end of a sentence.
	Words string
	// Message is for operators. A Deny always has one.
	Message string
}

// Row is a row of the table: an answer, and when and why it is given.
type Row struct {
	Reason Reason
	When   func(Facts) bool
	// Answer sets only Action, Unroute and Warn. [Decide] clears Unroute if the pod is not ready,
	// if no agent at the hold may route it, in mode observe, or for an eviction, which the API
	// server may refuse for its budget.
	Answer Verdict
	// Words describe When, as the end of a sentence: "it has finished".
	Words string
	// Message is that of a Verdict. Nil: there is none.
	Message func(Facts) string
}

var (
	allow   = Verdict{Action: Allow}
	unroute = Verdict{Action: Allow, Unroute: true}
	warn    = Verdict{Action: Allow, Warn: true}
	deny    = Verdict{Action: Deny}
)

// Table decides whether a deletion must wait. The first row that matches decides, and the last row
// always matches. docs/how-it-works.md is generated from it, and the dashboard shows its Words.
var Table = []Row{
	{DryRun, func(f Facts) bool { return f.DryRun }, allow, "it is a dry run", nil},
	{Excluded, func(f Facts) bool { return f.Excluded }, allow,
		"its namespace is excluded", nil},
	{ModeOff, func(f Facts) bool { return f.Mode == keys.Off }, allow,
		"it, or its namespace, is labeled lameduck.io/mode: off", nil},
	// The static pod keeps running, and the kubelet creates its mirror pod again. So this row comes
	// before all that exclude the pod from gateways.
	{MirrorPod, func(f Facts) bool { return f.Mirror }, allow,
		"it is the mirror of a static pod, which continues to run", nil},
	{BreakGlass, func(f Facts) bool { return f.BreakGlass }, unroute,
		`it is annotated lameduck.io/break-glass: "true"`, nil},
	// Its drain, if it had one, is closed, and agents learn of the deletion from EndpointSlices.
	{Terminating, func(f Facts) bool { return f.Terminating }, allow, "it is terminating already", nil},
	{Finished, func(f Facts) bool { return f.Finished }, unroute, "it has finished: its phase is Succeeded or Failed",
		nil},
	{NotRunning, func(f Facts) bool { return f.NotRunning }, unroute, "it is Pending, or on no node", nil},
	{Forced, func(f Facts) bool { return f.Forced }, unroute, "the grace period is 0", nil},
	{NamespaceTerminating, func(f Facts) bool { return f.NamespaceTerminating }, unroute,
		"its namespace is being deleted", nil},
	{DisruptionTarget, func(f Facts) bool { return f.DisruptionTarget }, unroute,
		"a taint evicts it, or it is preempted: that cannot wait", nil},
	{NodeLost, func(f Facts) bool { return f.NodeLost }, unroute, "its node is not ready, or out of service", nil},
	{Observed, func(f Facts) bool { return f.Mode == keys.Observe }, allow,
		"its mode is lameduck.io/mode: observe, in which nothing waits", nil},

	// The rows below need synced caches.
	{Starting, func(f Facts) bool { return f.Cold && f.Up < warmUp }, deny,
		"this replica has been up for less than 10 s, and does not know the cluster yet", func(Facts) string {
			return "Lameduck's webhook has just started and does not know the cluster yet"
		}},
	{Cold, func(f Facts) bool { return f.Cold }, warn, "this replica does not know the cluster", func(Facts) string {
		return "deleted without asking gateways: Lameduck's webhook has had no view of the cluster since it started"
	}},
	{UnknownPod, func(f Facts) bool { return f.Unknown }, allow, "this replica does not know it", nil},
	{NotListed, func(f Facts) bool { return !f.Listed && !f.Draining }, allow,
		"no EndpointSlice lists it now, or listed it in the last 10 min, no Service selects it, and no drain of it " +
			"is open", nil},
	{NoAgents, func(f Facts) bool { return !f.CouldRoute && f.Agents == 0 }, allow, "there is no agent to ask", nil},
	{NotRouted, func(f Facts) bool { return !f.CouldRoute }, allow,
		"no gateway that an agent directs routes its Services", nil},
	{NotReady, func(f Facts) bool { return !f.Ready && f.NotReadyFor > longNotReady && !f.Draining }, allow,
		"it has not been ready for more than 10 s, and no drain of it is open: gateways have stopped routing to it " +
			"by themselves", nil},
	{Budget, func(f Facts) bool { return f.Operation == Evict && f.Budget != "" }, deny,
		"it is evicted, and its PodDisruptionBudget allows no more, open drains included; the opener judges it",
		func(f Facts) string { return violates + " " + f.Budget }},
	{BudgetBroken, func(f Facts) bool { return f.Operation == Evict && f.BudgetBroken }, allow,
		"the API server refuses it by itself: several PodDisruptionBudgets select it, or the status of its budget is " +
			"out of range", nil},
	{CoolOff, func(f Facts) bool { return f.Refused >= coolOffAfter }, warn,
		"twice within 10 min its deletion was allowed after a drain, and it was not deleted",
		func(f Facts) string {
			return fmt.Sprintf("deleted without asking gateways: after they had stopped routing to it, its "+
				"deletion was allowed %d times within %s, and each time something else kept the pod", f.Refused,
				RefusedWindow)
		}},
	{LastTarget, func(f Facts) bool { return f.LastOf != "" }, warn,
		"no other pod of one of its Services is ready: it stays routed, since an outage must not begin early",
		func(f Facts) string { return lastMessage("Service " + f.LastOf) }},
	{BarrierWaits, func(f Facts) bool { will, _ := barrierWillWait(f); return will }, Verdict{Action: Drain},
		"its preStop barrier will wait for the end of requests: at the hold, `Removed` is enough", nil},
	{Draining, func(Facts) bool { return true }, Verdict{Action: Drain}, "otherwise", nil},
}

// barrierWillWait reports whether the pod's barrier will wait until gateways are Idle, so that the
// hold need not, and if not, why.
func barrierWillWait(f Facts) (will bool, whyNot string) {
	h := f.Hooks
	switch {
	case !f.Barred:
		return false, "not every container has the preStop hook"
	case f.Mode != keys.Enforce:
		return false, "its mode is " + f.Mode
	case f.Grace < f.Own+h.IdleBound:
		return false, fmt.Sprintf("the grace period %s leaves the barrier less than the Idle bound %s", f.Grace,
			h.IdleBound)
	case f.Bound < h.IdleBound:
		return false, fmt.Sprintf("the barrier's bound %s is shorter than the Idle bound %s", f.Bound, h.IdleBound)
	case !h.Connected:
		return false, "no agent of its node is connected"
	case !h.Allowed:
		return false, "the agent of its node has not shown the right to ask for barriers"
	case h.Crowded:
		return false, "too many barriers wait"
	case !h.Heard:
		return false, "no hook of its workload was heard of, or one was missed"
	}
	return true, ""
}

// Decide returns what the first row of [Table] that matches says.
func Decide(f Facts) Verdict {
	row := Table[slices.IndexFunc(Table, func(r Row) bool { return r.When(f) })]
	v := row.Answer
	v.Reason, v.Words, v.Unroute = row.Reason, row.Words, v.Unroute && f.Ready && f.CouldRoute &&
		f.Mode != keys.Observe && f.Operation == Delete
	if row.Message != nil {
		v.Message = row.Message(f)
	}
	return v
}

func lastMessage(of string) string {
	return "deleted while gateways still route to it: no other pod of " + of + " is ready"
}

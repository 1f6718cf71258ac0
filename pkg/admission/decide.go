package admission

import (
	"fmt"
	"time"
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
	// Excluded: the namespace is kube-system, our own or opted out; the webhook configuration
	// should have spared the call.
	Excluded bool
	// OptedOut and BreakGlass: the pod's annotations say so.
	OptedOut, BreakGlass bool

	// Unknown: no such pod, or it has another UID, or another resourceVersion than an eviction's
	// preconditions.
	Unknown bool
	// Terminating: the pod has a deletionTimestamp.
	Terminating bool
	// Finished: phase Succeeded or Failed. NotRunning: Pending or not scheduled. Mirror: a static
	// pod's image in the API.
	Finished, NotRunning, Mirror bool
	// ByNode: the caller is in group system:nodes.
	ByNode bool
	// Forced: grace period 0, and the pod's own is another.
	Forced bool

	// NamespaceTerminating: the pod's namespace is being deleted, or this is its controller's
	// DELETECOLLECTION.
	NamespaceTerminating bool
	// DisruptionTarget: the pod has that condition. NodeLost: its node is not ready, or out of
	// service.
	DisruptionTarget, NodeLost bool

	// Cold: caches have not synced. Up is how long this replica has been.
	Cold bool
	Up   time.Duration

	// Listed: an EndpointSlice lists the pod, or did a moment ago. Ready: one lists it as ready.
	Listed, Ready bool
	// NotReadyFor is how long the pod's own Ready condition has been false. Zero: it is true.
	NotReadyFor time.Duration
	// Agents is how many are expected. CouldRoute: one that is expected or connected may route a
	// Service of the pod.
	Agents     int
	CouldRoute bool

	// Budget is why the pod's PodDisruptionBudget has no room for this eviction. Empty: it has, or
	// there is none.
	Budget string
	// BudgetBroken: the API server will refuse this eviction whatever is answered, because of the
	// pod's PodDisruptionBudgets.
	BudgetBroken bool
	// Refused is how many drains of this UID were allowed within 10 minutes although the pod lives
	// on.
	Refused int
	// LastOf names a Service of the pod, if no other pod is ready and not terminating in any of its
	// Services that a gateway may route.
	LastOf string
}

// Action is what to answer.
type Action uint8

const (
	// ActionUnknown is the zero value and never decided.
	ActionUnknown Action = iota
	// Allow answers yes at once.
	Allow
	// Deny answers 429 at once and unroutes nothing.
	Deny
	// Drain opens a drain, or joins it, and holds the call: yes when it is released, else 429.
	Drain
)

// String prints the action in lower case.
func (a Action) String() string {
	switch a {
	case Allow:
		return "allow"
	case Deny:
		return "deny"
	case Drain:
		return "drain"
	default:
		return "unknown"
	}
}

// Reason says which row of the table decided. It is a label of metrics: constants only.
type Reason string

// The reasons of Decide, in the order of the table. Those of a drain's end are [drain.Reason]s.
const (
	DryRun               Reason = "DryRun"
	Excluded             Reason = "Excluded"
	OptedOut             Reason = "OptedOut"
	MirrorPod            Reason = "MirrorPod"
	BreakGlass           Reason = "BreakGlass"
	UnknownPod           Reason = "UnknownPod"
	Terminating          Reason = "Terminating"
	Finished             Reason = "Finished"
	NotRunning           Reason = "NotRunning"
	ByNode               Reason = "ByNode"
	Forced               Reason = "Forced"
	NamespaceTerminating Reason = "NamespaceTerminating"
	DisruptionTarget     Reason = "DisruptionTarget"
	NodeLost             Reason = "NodeLost"
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
	Draining             Reason = "Draining"
	// Queued, TooManyHolds, TooManyOfOwner, Stopping and CallerGone are decided while holding.
	Queued         Reason = "Queued"
	TooManyHolds   Reason = "TooManyHolds"
	TooManyOfOwner Reason = "TooManyOfOwner"
	Stopping       Reason = "Stopping"
	CallerGone     Reason = "CallerGone"
	// Abstained: this replica stops, and another one answers the same call.
	Abstained Reason = "Abstained"
	// NoFacts: they could not be read.
	NoFacts Reason = "NoFacts"
)

// reasons lists all that Decide and the handler use, so that every series exists from the start.
var reasons = []Reason{
	DryRun, Excluded, OptedOut, MirrorPod, BreakGlass, UnknownPod, Terminating, Finished, NotRunning, ByNode, Forced,
	NamespaceTerminating, DisruptionTarget, NodeLost, Starting, Cold, NotListed, NoAgents, NotRouted, NotReady, Budget,
	BudgetBroken,
	CoolOff, LastTarget, Draining, Queued, TooManyHolds, TooManyOfOwner, Stopping, CallerGone, Abstained, NoFacts,
}

const (
	// warmUp is how long after its start a replica with cold caches denies instead of allowing.
	warmUp = 10 * time.Second
	// longNotReady is how long a pod must have been unready for every gateway to have let go by
	// itself.
	longNotReady = 10 * time.Second
	// RefusedWindow is how far back refused drains count, coolOffAfter how many of them are enough.
	RefusedWindow = 10 * time.Minute
	coolOffAfter  = 2
)

// violates is how the API server begins when a budget has no room.
const violates = "Cannot evict pod as it would violate the pod's disruption budget."

// Verdict is what to do, and why.
type Verdict struct {
	Action Action
	Reason Reason
	// Unroute asks agents in the background to let go, although the answer does not wait.
	Unroute bool
	// Warn says that operators should see Message with an Allow: something is not as it should be.
	Warn bool
	// Message is for operators. A Deny always has one.
	Message string
}

// Decide is the table: the first row that matches wins.
func Decide(f Facts) Verdict {
	now := func(r Reason) Verdict { return Verdict{Action: Allow, Reason: r} }
	unroute := func(r Reason) Verdict { return Verdict{Action: Allow, Reason: r, Unroute: f.Ready && f.CouldRoute} }
	switch {
	case f.DryRun:
		return now(DryRun)
	case f.Excluded:
		return now(Excluded)
	case f.OptedOut:
		return now(OptedOut)
	case f.Mirror:
		// The static pod lives on, and the kubelet creates its mirror pod again: no agent is told,
		// whatever else holds.
		return now(MirrorPod)
	case f.BreakGlass:
		return unroute(BreakGlass)

	case f.Terminating:
		// Its drain, if it had one, is closed, and agents know by its EndpointSlices.
		return now(Terminating)
	case f.Finished:
		return unroute(Finished)
	case f.NotRunning:
		return unroute(NotRunning)
	case f.ByNode:
		return unroute(ByNode)
	case f.Forced:
		return unroute(Forced)

	case f.NamespaceTerminating:
		return unroute(NamespaceTerminating)
	case f.DisruptionTarget:
		return unroute(DisruptionTarget)
	case f.NodeLost:
		return unroute(NodeLost)

	// What follows rests on caches.
	case f.Cold && f.Up < warmUp:
		return Verdict{Action: Deny, Reason: Starting,
			Message: "Lameduck's webhook has just started and does not know the cluster yet"}
	case f.Cold:
		return Verdict{Action: Allow, Reason: Cold, Warn: true,
			Message: "deleted without asking gateways: Lameduck's webhook has had no view of the cluster since it " +
				"started"}
	case f.Unknown:
		return now(UnknownPod)
	case !f.Listed:
		return now(NotListed)
	case !f.CouldRoute && f.Agents == 0:
		return now(NoAgents)
	case !f.CouldRoute:
		return now(NotRouted)
	case !f.Ready && f.NotReadyFor > longNotReady:
		return now(NotReady)

	case f.Operation == Evict && f.Budget != "":
		return Verdict{Action: Deny, Reason: Budget, Message: violates + " " + f.Budget}
	case f.Operation == Evict && f.BudgetBroken:
		return now(BudgetBroken)
	case f.Refused >= coolOffAfter:
		return Verdict{Action: Allow, Reason: CoolOff, Warn: true,
			Message: fmt.Sprintf("deleted without asking gateways: they let go %d times within %s, and each time "+
				"something else kept the pod", f.Refused, RefusedWindow)}
	case f.LastOf != "":
		return Verdict{Action: Allow, Reason: LastTarget, Warn: true,
			Message: lastMessage("Service " + f.LastOf)}
	default:
		return Verdict{Action: Drain, Reason: Draining}
	}
}

func lastMessage(of string) string {
	return "deleted while gateways still route to it: no other pod of " + of + " is ready"
}

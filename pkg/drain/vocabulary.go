package drain

import (
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// UID is a pod's metadata.uid.
type UID = target.UID

// AgentID names an agent: the UID of the pod it runs in.
type AgentID string

// Pod is one pod. Namespace and name are for display; the UID identifies it.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       UID    `json:"uid"`
}

// String prints namespace/name.
func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Service names a Service.
type Service struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// String prints namespace/name.
func (s Service) String() string { return s.Namespace + "/" + s.Name }

// Holder is the owner of an exclusion: one replica since its last start. A replica that restarts
// has a new epoch, so that the empty list of drains of the new process ends no exclusion of the old
// one.
type Holder struct {
	Replica string `json:"replica"`
	Epoch   string `json:"epoch"`
}

// String prints replica/epoch.
func (l Holder) String() string { return l.Replica + "/" + l.Epoch }

// Gate is the moment at which gateways are asked about a pod. A drain is of one pod at one gate.
type Gate uint8

const (
	// AtHold: before the deletion. Agents that direct their gateway are asked. Messages without a
	// gate belong here.
	AtHold Gate = iota
	// AtBarrier: between the deletion and SIGTERM. Agents that observe their gateway are asked, and
	// directed ones that did not acknowledge at the hold.
	AtBarrier

	gates
)

// String prints the gate as on the wire.
func (g Gate) String() string { return target.Name(g, gateNames...) }

var gateNames = []string{"hold", "barrier"}

// MarshalText writes the gate's name.
func (g Gate) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText accepts the names of gates and refuses others by name.
func (g *Gate) UnmarshalText(text []byte) error {
	return target.Parse(g, "gate", gateNames, AtHold, text)
}

// Phase is how far a drain is.
type Phase uint8

const (
	// PhaseUnknown is the zero value: there is no such drain.
	PhaseUnknown Phase = iota
	// Unrouting: an agent that must acknowledge has not reported Removed. Entered when the deletion
	// is asked for, and again when a report is withdrawn.
	Unrouting
	// Quiescing: all agents that must acknowledge have reported Removed, and one has not reported
	// Idle. Left for Released at the latest after the Idle bound.
	Quiescing
	// Released: the deletion may continue, for Reason.
	Released
	// Closed: the pod is terminating or deleted, or the drain was abandoned.
	Closed
	// Queued: so many pods of one of its Services are being drained that this one has to wait
	// before agents learn of it. It comes before Unrouting, if at all, and can end in every way
	// that other phases can.
	Queued
)

// String prints the phase as the metrics and messages name it.
func (p Phase) String() string { return target.Name(p, phaseNames...) }

var phaseNames = []string{"Unknown", "Unrouting", "Quiescing", "Released", "Closed", "Queued"}

// Reason is why a drain is Released or Closed.
type Reason uint8

const (
	// ReasonNone: it is neither.
	ReasonNone Reason = iota
	// Acknowledged: every agent that must acknowledge has reported Idle.
	Acknowledged
	// IdleBound: every agent that must acknowledge has reported Removed, and requests were still
	// running when the Idle bound passed.
	IdleBound
	// Deadline: the deadline has passed. The agents that had not acknowledged are named.
	Deadline
	// NoAgents: no agent must acknowledge this drain.
	NoAgents
	// PodDeleted: the pod is terminating or deleted.
	PodDeleted
	// Suspended: every agent that would have to acknowledge is suspended, because it did not
	// acknowledge several drains in a row.
	Suspended
	// Abandoned: no call asks for the deletion any more, and the pod is not terminating.
	Abandoned
	// LastTarget: every agent that must acknowledge has reported Idle, or that its gateway keeps
	// sending to the pod because no other endpoint is ready. At the barrier also if connections
	// outlast the Idle bound at such a gateway.
	LastTarget
	// AgentsLost: every agent that still must acknowledge has reported Idle, but the drain had
	// waited for others. Each of these lost its stream, has a pod that is not ready, and did not
	// reconnect in time, or its pod was deleted before it had reported Removed. What their gateways
	// do is unknown.
	AgentsLost
	// Uncovered: every agent that must acknowledge has, but something else routes a Service of the
	// pod and is not waited for. The ledger does not know that: coordinators replace Acknowledged
	// and NoAgents by it.
	Uncovered
	// NotEnforced: the pod's mode is observe or off, so its hooks do not wait. Coordinators
	// set it, not the ledger.
	NotEnforced
	// BarrierWaits: every agent that must acknowledge has reported Removed, and the pod's preStop
	// barrier waits for Idle. See [Status.AtRemoved].
	BarrierWaits
)

// String prints the reason as the metrics and messages name it.
func (r Reason) String() string { return target.Name(r, reasonNames...) }

var reasonNames = []string{"None", "Acknowledged", "IdleBound", "Deadline", "NoAgents", "PodDeleted", "Suspended",
	"Abandoned", "LastTarget", "AgentsLost", "Uncovered", "NotEnforced", "BarrierWaits"}

// Abnormal reports whether operators are warned: the deletion continued without all
// acknowledgements.
func (r Reason) Abnormal() bool {
	return r == Deadline || r == IdleBound || r == Suspended || r == AgentsLost || r == Uncovered
}

// State is what an agent reports about one pod in its gateway.
type State = target.State

// The states, in ascending order. See [target.State].
const (
	StateUnknown = target.Unknown
	Routing      = target.Routing
	Kept         = target.Kept
	Removed      = target.Removed
	Idle         = target.Idle
)

// Via is how a gateway finds a Service's pods.
type Via uint8

const (
	// ViaUnknown is refused in a declaration.
	ViaUnknown Via = iota
	// Endpoints: it sends to pod addresses itself.
	Endpoints
	// ClusterIP: it sends to the Service's address, and the implementation of Services chooses the
	// pod. Proves nothing.
	ClusterIP
	// DNS: it resolves names, and may keep using the result. Proves nothing.
	DNS
)

// String prints the value as on the wire.
func (v Via) String() string { return target.Name(v, viaNames...) }

var viaNames = []string{"unknown", "endpoints", "clusterIP", "dns"}

// MarshalText writes the way's name.
func (v Via) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText accepts "endpoints", "clusterIP" and "dns". An error names any other text,
// "unknown" included.
func (v *Via) UnmarshalText(text []byte) error {
	return target.Parse(v, "via", viaNames, Endpoints, text)
}

// Kind is what an agent can do with its gateway.
type Kind uint8

const (
	// KindUnknown is refused in a declaration.
	KindUnknown Kind = iota
	// Directed: take a pod out although EndpointSlices list it as ready. Asked before the deletion.
	Directed
	// Observed: see that the gateway has stopped by itself. Asked after the deletion began.
	Observed
)

// String prints the kind as on the wire.
func (c Kind) String() string { return target.Name(c, kindNames...) }

var kindNames = []string{"unknown", "directed", "observed"}

// MarshalText writes the kind's name.
func (c Kind) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText accepts the names of kinds and refuses others by name, "unknown" too.
func (c *Kind) UnmarshalText(text []byte) error {
	return target.Parse(c, "kind", kindNames, Directed, text)
}

// Route is one thing an agent declares that its gateway routes.
type Route struct {
	Service Service `json:"service"`
	Via     Via     `json:"via"`
	Kind    Kind    `json:"kind"`
}

// Report is the present state of one pod in an agent's gateway.
type Report struct {
	UID UID `json:"uid"`
	// Generation of the gateway that State was read from.
	Generation string `json:"generation,omitempty"`
	State      State  `json:"state"`
	// Number is [Open.Number] or [Watch.Number] of the drain that the report is about. A report
	// with another number is about an earlier drain of the pod, which was abandoned while the
	// report was in flight, and changes nothing.
	Number uint64 `json:"number"`
	// Gate is that of the drain that the report is about. Reports in answer to a Watch have
	// AtBarrier.
	Gate Gate `json:"gate,omitempty"`
	// Kept names the Services in which the pod is kept, if State is Kept and Gate is AtHold: as
	// namespace/name, sorted and joined by commas, so that reports can be compared. In its other
	// Services the pod is Removed.
	Kept string `json:"kept,omitempty"`
	// NoConnections is about a pod to which the gateway keeps sending. At the hold: the pod is Idle
	// in the Services where it is not kept. At the barrier, in any state: there is no connection to
	// the pod to wait for.
	NoConnections bool `json:"noConnections,omitempty"`
	// HasSent: the gateway was seen to send to the pod since the agent learned of this barrier.
	// Without it, a gateway that has stopped looks like one that has not learned yet that the pod
	// is ready.
	HasSent bool `json:"hasSent,omitempty"`
	// InFlight: the pod is Removed, and requests or connections to it were counted since. Only
	// where Gate is AtBarrier.
	InFlight bool `json:"inFlight,omitempty"`
}

// Open is a drain as agents receive it: stop routing to this pod, in every Service, at every
// address.
type Open struct {
	Pod   Pod
	Since time.Time
	// Number distinguishes this drain from an earlier, abandoned one of the same pod by the same
	// epoch of the replica. Agents repeat it in their reports, because a report on the earlier
	// drain, whose exclusion is being ended, may arrive after this one began.
	Number uint64
	// Watch is set if the agent is to observe the pod instead of excluding it. It repeats the other
	// fields.
	Watch *Watch
}

// Watch is a drain at the barrier as observing agents receive it: the pod is terminating, report
// when the gateway has stopped routing to it.
type Watch struct {
	Pod Pod `json:"pod"`
	// Since is the time of the deletion, Deadline when the wait ends.
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"`
	// Number is as in Open.
	Number uint64 `json:"number,omitempty"`
	// Targets are the addresses of the pod. Port 0: every port of the address.
	Targets []netip.AddrPort `json:"targets"`
	// Observe: the pod is in mode observe, and nothing waits. It may be deleted before the watch
	// ends, and another pod have its address.
	Observe bool `json:"observe,omitempty"`
	// Listed: a Service for which every node has rules lists the pod as ready. An agent whose
	// gateway has no rules for it and is not configured any more reports Unknown.
	Listed bool `json:"listed,omitempty"`
}

// Release ends an exclusion for this replica. The agent routes to the pod again only if no other
// replica excludes it.
type Release struct {
	UID UID
	// Terminating: the pod is terminating or deleted, so that it must never be routed again.
	// Otherwise it continues to run. At the barrier: the pod is deleted, so that its conntrack
	// entries can be deleted.
	Terminating bool
	// Gate is AtBarrier at the end of a Watch.
	Gate Gate
}

// Targets are the usable pods of a Service: ready and not terminating, whether a drain of them is
// open or not.
type Targets struct {
	Service Service
	// Usable is sorted, and must not be changed afterwards. Nil: unknown, so that there is no
	// bound.
	Usable []UID
}

// Last reports whether the Service is known to have no target but the pod uid.
func (t Targets) Last(uid UID) bool {
	return t.Usable != nil && !slices.ContainsFunc(t.Usable, func(other UID) bool { return other != uid })
}

// Nodes is the population of the agents of which each node has one.
const Nodes = "nodes"

// EveryService is declared by an agent whose gateway routes all Services.
var EveryService = Service{Namespace: "*", Name: "*"}

// Scope is which agents of the population [Nodes] are asked at the barrier. Agents of other
// populations are always asked.
type Scope uint8

const (
	// ScopeAuto: all nodes if at most [Sampling].AllUpTo (200) could be asked, otherwise as
	// ScopeQuorum.
	ScopeAuto Scope = iota
	// ScopeAll: all.
	ScopeAll
	// ScopeQuorum: the pod's own node and a sample of 50. For the others, the barrier waits for the
	// time within which 99.9 % of the asked ones had acknowledged. Until 1,000 such times are
	// known, all are asked.
	ScopeQuorum
	// ScopeLocal: the pod's own node.
	ScopeLocal
)

// String prints the scope as it is configured.
func (s Scope) String() string { return target.Name(s, scopeNames...) }

var scopeNames = []string{"auto", "all", "quorum", "local"}

// MarshalText writes the scope's name.
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText accepts the names of scopes and refuses others by name.
func (s *Scope) UnmarshalText(text []byte) error {
	return target.Parse(s, "scope", scopeNames, ScopeAuto, text)
}

// Label is the value of the label lameduck.io/agent. It counts until the agent has declared its
// routes.
type Label uint8

const (
	// LabelNone: no or another value. Such an agent must acknowledge every drain.
	LabelNone Label = iota
	// LabelDirected: must acknowledge at the hold.
	LabelDirected
	// LabelObserved: must acknowledge at the barrier, not at the hold.
	LabelObserved
)

// ParseLabel reads the value of the label lameduck.io/agent.
func ParseLabel(value string) Label { return Label(max(0, slices.Index(labelNames, value))) }

// String prints the label as operators see it.
func (l Label) String() string { return target.Name(l, labelNames...) }

var labelNames = []string{"none", "directed", "observed"}

// Expected is an agent that the API says exists.
type Expected struct {
	ID AgentID
	// Name is namespace/name of its pod.
	Name string
	// Ready is the condition of its pod.
	Ready bool
	Label Label
	// Pending: its containers have not started yet, so it routes nothing.
	Pending bool
	// Node is the node of its pod.
	Node string
}

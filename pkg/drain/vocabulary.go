package drain

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// UID is a pod's metadata.uid.
type UID = target.UID

// AgentID names an agent: the UID of the pod it runs in.
type AgentID string

// Pod is one pod. Namespace and name are for people; the UID decides.
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

// Holder names who holds an exclusion: one life of one replica. A replica that starts again has
// another epoch, so that the empty list of a new life lifts nothing that an old one asked for.
type Holder struct {
	Replica string `json:"replica"`
	Epoch   string `json:"epoch"`
}

// String prints replica/epoch.
func (l Holder) String() string { return l.Replica + "/" + l.Epoch }

// Gate is the moment at which gateways are asked to vouch for one pod. A drain is of one pod at one
// gate.
type Gate uint8

const (
	// AtHold: before the deletion. Asked are those who direct their gateway. What names no gate is
	// said here.
	AtHold Gate = iota
	// AtBarrier: between the deletion and SIGTERM. Asked are those who observe how their gateway
	// lets go by itself, and those directed ones that have not let go at the hold.
	AtBarrier

	gates
)

// String prints the gate as it goes over the wire.
func (g Gate) String() string { return name(gateNames[:], int(g)) }

var gateNames = [gates]string{"hold", "barrier"}

// MarshalText writes the gate's name.
func (g Gate) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText accepts the names of gates and refuses others by name.
func (g *Gate) UnmarshalText(text []byte) error {
	n, err := parse("gate", gateNames[:], text)
	*g = Gate(n)
	return err
}

// Phase is how far a drain is.
type Phase uint8

const (
	// PhaseUnknown is the zero value: there is no such drain.
	PhaseUnknown Phase = iota
	// Unrouting: some agent that owes has not said Removed. Entered when the deletion is asked for,
	// and again when a report gets worse.
	Unrouting
	// Quiescing: all that owe have said Removed, some has not said Idle. Left for Released at the
	// latest after the Idle bound.
	Quiescing
	// Released: the deletion may go on. Reason says why.
	Released
	// Closed: the pod is dead, or the drain was abandoned.
	Closed
	// Queued: so many pods of one of its Services are being drained that this one has to wait
	// before any agent is told. Comes before Unrouting, if at all, and may end as every phase does.
	Queued
)

// String prints the phase as the metrics and messages name it.
func (p Phase) String() string { return name(phaseNames[:], int(p)) }

var phaseNames = [...]string{"Unknown", "Unrouting", "Quiescing", "Released", "Closed", "Queued"}

// Reason says why a drain is Released or Closed.
type Reason uint8

const (
	// ReasonNone: it is neither.
	ReasonNone Reason = iota
	// Acknowledged: every agent that owes has said Idle.
	Acknowledged
	// IdleBound: every agent that owes has said Removed, and requests were still running when the
	// Idle bound passed.
	IdleBound
	// Deadline: the drain's time is up. The agents that had not acknowledged are named.
	Deadline
	// NoAgents: nobody owes this drain.
	NoAgents
	// PodDeleted: the pod is terminating or gone.
	PodDeleted
	// Suspended: every agent that would owe this drain is suspended: it has let drain after drain
	// expire.
	Suspended
	// Abandoned: nobody asks for the deletion any more and the pod lives.
	Abandoned
	// LastTarget: every agent that owes has said Idle, or that its gateway goes on sending to the
	// pod because no other endpoint is ready. At the barrier also if connections outlast the Idle
	// bound at such a gateway.
	LastTarget
	// AgentsLost: every agent that still owes has said Idle, but the drain had waited for others,
	// of which each lost its stream and, with a pod that is not ready, did not come back in time.
	// What their gateways do is not known.
	AgentsLost
	// Uncovered: every agent that must acknowledge has, but something else routes a Service of the
	// pod and is not waited for. The ledger does not know of it: coordinators replace Acknowledged
	// and NoAgents.
	Uncovered
	// NotEnforced: the pod's mode is observe or off, so its hooks do not wait. The ledger does not
	// know of it, either.
	NotEnforced
)

// String prints the reason as the metrics and messages name it.
func (r Reason) String() string { return name(reasonNames[:], int(r)) }

var reasonNames = [...]string{"None", "Acknowledged", "IdleBound", "Deadline", "NoAgents", "PodDeleted", "Suspended",
	"Abandoned", "LastTarget", "AgentsLost", "Uncovered", "NotEnforced"}

// Abnormal says whether people should be warned: the deletion went on without every gateway's word.
func (r Reason) Abnormal() bool {
	return r == Deadline || r == IdleBound || r == Suspended || r == AgentsLost || r == Uncovered
}

// State is what an agent says of one pod in its gateway.
type State = target.State

// The states, the least far first. See [target.State].
const (
	StateUnknown = target.Unknown
	Routing      = target.Routing
	Kept         = target.Kept
	Removed      = target.Removed
	Idle         = target.Idle
)

// Proof is how an agent knows that a pod is Removed.
type Proof uint8

const (
	// ProofNone comes with states below Removed.
	ProofNone Proof = iota
	// Runtime: read back from every live process of the gateway.
	Runtime
	// Config: every live process runs a configuration without the pod.
	Config
	// Timed: a stated time has passed. Weaker than the others.
	Timed
)

// String prints the proof as it goes over the wire.
func (p Proof) String() string { return name(proofNames[:], int(p)) }

var proofNames = [...]string{"none", "runtime", "config", "timed"}

// MarshalText writes the proof's name.
func (p Proof) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText accepts the names of proofs and refuses others by name.
func (p *Proof) UnmarshalText(text []byte) error {
	n, err := parse("proof", proofNames[:], text)
	*p = Proof(n)
	return err
}

// Via is how a gateway finds a Service's pods.
type Via uint8

const (
	// ViaUnknown is refused in a declaration.
	ViaUnknown Via = iota
	// Endpoints: it sends to pod addresses itself.
	Endpoints
	// ClusterIP: it sends to the Service's address, and whoever implements that chooses the pod.
	// Proves nothing.
	ClusterIP
	// DNS: it resolves names, for as long as it likes. Proves nothing.
	DNS
)

// String prints the way as it goes over the wire.
func (v Via) String() string { return name(viaNames[:], int(v)) }

var viaNames = [...]string{"unknown", "endpoints", "clusterIP", "dns"}

// MarshalText writes the way's name.
func (v Via) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText accepts the names of ways and refuses others by name, "unknown" too.
func (v *Via) UnmarshalText(text []byte) error {
	n, err := parse("via", viaNames[1:], text)
	*v = Via(n + 1)
	return err
}

// Kind is what an agent can do with its gateway.
type Kind uint8

const (
	// KindUnknown is refused in a declaration.
	KindUnknown Kind = iota
	// Directed: take a pod out although EndpointSlices call it ready. Asked before the deletion.
	Directed
	// Observed: see it let go by itself. Asked after the deletion began.
	Observed
)

// String prints the ability as it goes over the wire.
func (c Kind) String() string { return name(kindNames[:], int(c)) }

var kindNames = [...]string{"unknown", "directed", "observed"}

// MarshalText writes the ability's name.
func (c Kind) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText accepts the names of abilities and refuses others by name, "unknown" too.
func (c *Kind) UnmarshalText(text []byte) error {
	n, err := parse("kind", kindNames[1:], text)
	*c = Kind(n + 1)
	return err
}

// Granularity is what a gateway counts for Idle.
type Granularity uint8

const (
	// GranularityUnknown is refused in a declaration.
	GranularityUnknown Granularity = iota
	// PerRequest: requests. A pooled connection without one is idle.
	PerRequest
	// PerConnection: connections.
	PerConnection
)

// String prints the grain as it goes over the wire.
func (g Granularity) String() string { return name(granularityNames[:], int(g)) }

var granularityNames = [...]string{"unknown", "request", "connection"}

// MarshalText writes the grain's name.
func (g Granularity) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText accepts the names of grains and refuses others by name, "unknown" too.
func (g *Granularity) UnmarshalText(text []byte) error {
	n, err := parse("granularity", granularityNames[1:], text)
	*g = Granularity(n + 1)
	return err
}

// Route is one thing an agent declares that its gateway routes.
type Route struct {
	Service     Service     `json:"service"`
	Via         Via         `json:"via"`
	Kind        Kind        `json:"kind"`
	Granularity Granularity `json:"granularity"`
}

// Report is an agent's present word on one pod.
type Report struct {
	UID UID `json:"uid"`
	// Generation of the gateway that State was read from.
	Generation string `json:"generation,omitempty"`
	State      State  `json:"state"`
	Proof      Proof  `json:"proof"`
	// Number is [Open.Number] or [Watch.Number] of the drain that the report is about. A report
	// with another number is about an earlier drain of the pod, which was abandoned while the
	// report was in flight, and changes nothing.
	Number uint64 `json:"number"`
	// Gate is that of the drain of which this is said. Agents that answer a Watch say AtBarrier.
	Gate Gate `json:"gate,omitempty"`
	// Kept names the Services in which the pod is kept, if State is Kept and Gate is AtHold: as
	// namespace/name, sorted and joined by commas, so that reports can be compared. In its other
	// Services the pod is Removed.
	Kept string `json:"kept,omitempty"`
	// NoConnections says more of a pod to which the gateway goes on sending. At the hold: it is
	// Idle in the Services where it is not kept. At the barrier, in any state: there is no
	// connection to the pod to wait for.
	NoConnections bool `json:"noConnections,omitempty"`
	// HasSent says that the gateway was seen to send to the pod since the agent was told of this
	// barrier. Without it, one that has let go looks like one that has not heard yet that the pod
	// is ready.
	HasSent bool `json:"hasSent,omitempty"`
	// InFlight says that the pod is Removed, and that requests or connections to it were counted
	// since. Only where Gate is AtBarrier.
	InFlight bool `json:"inFlight,omitempty"`
}

// Open is a drain as agents see it: let go of this pod, in every Service, at every address.
type Open struct {
	Pod   Pod
	Since time.Time
	// Number tells this drain from an earlier one of the same pod by the same life of the replica,
	// which was abandoned. Agents say it again with their reports: what one has said of the earlier
	// drain may arrive after this one began, and its exclusion is being lifted.
	Number uint64
	// Watch is set instead of all that where the agent is to observe: it is another message.
	Watch *Watch
}

// Watch is a drain at the barrier as observing agents see it: the pod is going, say when the
// gateway has let go of it.
type Watch struct {
	Pod Pod `json:"pod"`
	// Since is the deletion, Deadline when nobody waits any more.
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"`
	// Number is as in Open.
	Number uint64 `json:"number,omitempty"`
	// Targets are the addresses of the pod. Port 0: every port of the address.
	Targets []netip.AddrPort `json:"targets"`
	// Last says that no ready endpoint is left, so that gateways may go on sending to the pod. For
	// people: the coordinator judges.
	Last bool `json:"last"`
}

// Release ends a replica's hold on an exclusion.
type Release struct {
	UID UID
	// Terminating says that the pod is terminating or gone, so that it must never be routed again.
	// Otherwise it lives on. At the barrier it says that the pod is gone, so that what is left of
	// it can be cleaned away.
	Terminating bool
	// Gate is AtBarrier at the end of a Watch.
	Gate Gate
}

// Targets are the pods of a Service that can be used now: ready and not terminating, whether a
// drain of them is open or not.
type Targets struct {
	Service Service
	// Usable is sorted, and not changed by anybody afterwards. Nil: not known, so that it bounds
	// nothing.
	Usable []UID
}

// Last reports whether the Service is known to have no target but the pod uid.
func (t Targets) Last(uid UID) bool {
	return t.Usable != nil && !slices.ContainsFunc(t.Usable, func(other UID) bool { return other != uid })
}

// Nodes is the population of the agents of which each node has one.
const Nodes = "nodes"

// EveryService is what an agent declares that routes, or observes, every Service there is.
var EveryService = Service{Namespace: "*", Name: "*"}

// Scope says which of the agents of the population [Nodes] are asked at the barrier. All others are
// always asked.
type Scope uint8

const (
	// ScopeAuto: all, up to 200 that could be asked; above that as ScopeQuorum.
	ScopeAuto Scope = iota
	// ScopeAll: everyone.
	ScopeAll
	// ScopeQuorum: the pod's own node and a sample of 50. For the others, the time is waited in
	// which 99.9 % of those that were asked had let go; until 1,000 times are known, all are asked.
	ScopeQuorum
	// ScopeLocal: the pod's own node.
	ScopeLocal
)

// String prints the scope as it is configured.
func (s Scope) String() string { return name(scopeNames[:], int(s)) }

var scopeNames = [...]string{"auto", "all", "quorum", "local"}

// MarshalText writes the scope's name.
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText accepts the names of scopes and refuses others by name.
func (s *Scope) UnmarshalText(text []byte) error {
	n, err := parse("scope", scopeNames[:], text)
	*s = Scope(n)
	return err
}

// Label is what the pod label of an agent says of it before it was ever heard.
type Label uint8

const (
	// LabelNone: no or another value. Such an agent owes everything.
	LabelNone Label = iota
	// LabelDirected: owes at the hold.
	LabelDirected
	// LabelObserved: owes at the barrier, not at the hold.
	LabelObserved
)

// ParseLabel reads the value of the label lameduck.io/agent.
func ParseLabel(value string) Label {
	switch value {
	case "directed":
		return LabelDirected
	case "observed":
		return LabelObserved
	default:
		return LabelNone
	}
}

// Expected is an agent that the API says exists.
type Expected struct {
	ID AgentID
	// Name is namespace/name of its pod.
	Name string
	// Ready is the condition of its pod.
	Ready bool
	Label Label
	// Pending says that its containers have not started yet: it routes nothing so far.
	Pending bool
}

func name(names []string, n int) string {
	if n < len(names) {
		return names[n]
	}
	return fmt.Sprintf("%s(%d)", names[0], n)
}

func parse(what string, names []string, text []byte) (int, error) {
	for n, name := range names {
		if name == string(text) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("%s %q is not one of %q", what, text, names)
}

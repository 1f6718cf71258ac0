// Package api is the read API of a coordinator for operators and their tools: its paths, and the
// types of its answers, as JSON. Package dashboard serves it, and kubectl lameduck reads it.
//
// All requests are GET and change nothing. Each replica returns its own view: a deletion is a drain
// in each replica that the API server asked. With the query replicas=all, a replica asks the others
// for theirs and returns all of them joined. Times are by the clock of the replica that recorded
// them. [View.At] is the present time of the replica that answers.
//
// Compatibility: within v1 fields are added, never repurposed. Readers ignore unknown fields, and
// show unknown values as they are: phases, reasons and states are those of package drain, and more
// may be added.
package api

import "time"

// The paths.
const (
	ViewPath = "/v1/view"
	// CoveragePath answers with a [Coverage].
	CoveragePath = "/v1/coverage"
	// ReportPath answers with a [Report].
	ReportPath = "/v1/report"
	// ExplainPath ends in /{namespace}/{pod}, and may have the query operation=delete or
	// operation=evict. It answers with an [Explanation].
	ExplainPath = "/v1/explain"
)

// Port is the default port of this API, on the coordinator's loopback address. If a coordinator
// uses another port, its pod has a container port with the name PortName.
const (
	Port     = 9445
	PortName = "dashboard"
)

// View is the state of a replica. Empty lists are [], not null.
type View struct {
	// At is the time of the view, by the replica's clock.
	At      time.Time `json:"at"`
	Replica Replica   `json:"replica"`
	// With are the names of the other replicas whose views are joined into this one. Silent are the
	// names of those that have not answered. Both are set only with replicas=all.
	With   []string `json:"with,omitempty"`
	Silent []string `json:"silent,omitempty"`
	Drains Drains   `json:"drains"`
	// Barriers are the pods whose deletion has begun and whose hooks wait, or were answered.
	Barriers Barriers `json:"barriers"`
	Agents   Agents   `json:"agents"`
	// Outcomes are the ends of the last drains, and the deletions that continued without the
	// gateways' acknowledgements, the newest first.
	Outcomes []Outcome `json:"outcomes"`
	// Propagation is how long gateways take to stop routing to a pod, by kind of gateway.
	Propagation []Propagation `json:"propagation"`
	// TargetHealth is the health of targets, as gateways see it.
	TargetHealth TargetHealth `json:"targetHealth"`
}

// Report is how long deletions in mode observe would have waited, had the mode been enforce.
type Report struct {
	// Since is the start of this replica's process, when it began to measure.
	Since      time.Time         `json:"since"`
	Namespaces []NamespaceReport `json:"namespaces"`
}

// NamespaceReport is the report of one namespace.
type NamespaceReport struct {
	Namespace string `json:"namespace"`
	// Deletions counts the measured deletions. InFlight counts those of them with requests or
	// connections in flight when the gateways had stopped routing to the pod. Unmeasured counts
	// further deletions, for which no agent reported in time that its gateway had stopped.
	Deletions  int `json:"deletions"`
	InFlight   int `json:"inFlight"`
	Unmeasured int `json:"unmeasured"`
	// WaitSeconds are the waits of the newest deletions, at most 1,000.
	WaitSeconds []float64 `json:"waitSeconds"`
}

// Replica is the replica that answers.
type Replica struct {
	Name string `json:"name"`
	// Epoch identifies its process, which began at Started.
	Epoch   string    `json:"epoch"`
	Started time.Time `json:"started"`
	// Version is the version and the commit of its program.
	Version string `json:"version,omitempty"`
	// Stopping: the replica is shutting down, and no longer holds calls.
	Stopping bool `json:"stopping,omitempty"`
	// Unasked: the webhook configuration does not exist, so the API server asks no coordinator
	// about deletions. Only replicas that write into that object know it.
	Unasked bool `json:"unasked,omitempty"`
	// Holds is how many admission calls wait now. MaxHolds is how many may.
	Holds    int `json:"holds"`
	MaxHolds int `json:"maxHolds"`
	// DeadlineSeconds is how long a deletion waits at most. IdleBoundSeconds is how long a drain
	// waits for running requests after no new ones are sent to the pod.
	DeadlineSeconds  float64 `json:"deadlineSeconds"`
	IdleBoundSeconds float64 `json:"idleBoundSeconds"`
}

// Drains are the open drains of this replica.
type Drains struct {
	// Open is how many there are. If they are too many to list, Items has the oldest, and Released
	// ones only where there is room.
	Open  int     `json:"open"`
	Items []Drain `json:"items"`
	// Elsewhere is how many pods are drained only on other replicas, by their last answers to this
	// one.
	Elsewhere int `json:"elsewhere"`
}

// Drain is one pod whose deletion waits, or whose gateways stop routing to it in the background.
type Drain struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`
	// Phase is Queued, Unrouting, Quiescing or Released. PhaseSince is when it began. Reason is the
	// reason of the release, before that None.
	Phase      string    `json:"phase"`
	PhaseSince time.Time `json:"phaseSince,omitzero"`
	Reason     string    `json:"reason"`
	// Since is the start of the drain, which retries and other replicas share. At Deadline the
	// deletion continues in any case.
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"`
	// Told is when the drain was sent to agents. Absent: not yet, because a Service of the pod has
	// no capacity.
	Told time.Time `json:"told,omitzero"`
	// Owed is how many agents must acknowledge. Waiting is how many of them have not. Reports are
	// their last reports, the lowest states first. If they are too many to list, Reports has the
	// first of them.
	Owed    int           `json:"owed"`
	Waiting int           `json:"waiting"`
	Reports []AgentReport `json:"reports"`
}

// Barriers are the open barriers of this replica.
type Barriers struct {
	// Open is how many pods have one, and Waiting how many of these are not Released. Items are as
	// in Drains.
	Open    int           `json:"open"`
	Waiting int           `json:"waiting"`
	Items   []OpenBarrier `json:"items"`
	// Hooks is how many hooks wait at this replica now: one for each container.
	Hooks int `json:"hooks"`
	// Missing is how many pods ask for the barrier and were created without it. MissingPods are the
	// first of them.
	Missing     int      `json:"missing"`
	MissingPods []string `json:"missingPods"`
	// MissingIn is how many of them each namespace has.
	MissingIn map[string]int `json:"missingIn,omitempty"`
}

// OpenBarrier is a terminating pod that gets SIGTERM only when its observed gateways have stopped
// routing to it.
type OpenBarrier struct {
	// Drain is the drain at the barrier. It is never Queued. Released: the hooks are answered, and
	// the pod stops. Since is the time of the deletion. At Deadline the hooks are answered in any
	// case. Told is absent.
	Drain
	Node string `json:"node,omitempty"`
	// AskedBy is the agent on the pod's node, which answers the hooks.
	AskedBy string `json:"askedBy"`
	// Hook is the kind of the pod's hooks: httpGet, exec, or both, separated by a comma. Absent:
	// the pod is not in this replica's cache.
	Hook string `json:"hook,omitempty"`
	// StatedSeconds is the stated wait, from the deletion on, for consumers that can never
	// acknowledge. StatedUntil is its end. Cut: the deadline is earlier than that.
	StatedSeconds float64   `json:"statedSeconds,omitempty"`
	StatedUntil   time.Time `json:"statedUntil,omitzero"`
	Cut           bool      `json:"cut,omitempty"`
	// Last: no other endpoint is ready, or none on the pod's node. Gateways may then keep sending
	// to the pod, so the barrier only waits until the pod is idle.
	Last bool `json:"last,omitempty"`
	// Sampled: only a sample of the agents is asked. For the others, the barrier waits as long as
	// agents were seen to take.
	Sampled bool `json:"sampled,omitempty"`
	// Uncovered are containers that stop without waiting: they could not be given the hook.
	Uncovered []string `json:"uncovered"`
}

// AgentReport is an agent's last report about a drain.
type AgentReport struct {
	Agent   string `json:"agent"`
	Gateway string `json:"gateway,omitempty"`
	// State is unknown, routing, kept, removed or idle. Since is when the agent first reported it.
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Received is the time for which the last such report holds.
	Received  time.Time `json:"received,omitzero"`
	Connected bool      `json:"connected"`
	// Suspended: the agent gets the drain, but the drain does not wait for it, because it let three
	// drains in a row expire.
	Suspended bool `json:"suspended,omitempty"`
}

// Agents are those that this replica knows.
type Agents struct {
	// Expected is how many agents the API server lists. Missing is how many of them are not
	// connected to this replica. Suspended is how many agents are suspended.
	Expected  int `json:"expected"`
	Missing   int `json:"missing"`
	Suspended int `json:"suspended"`
	// Known is how many agents this replica knows. Items are sorted with suspended and missing
	// agents first, and cut to a bound.
	// Those whose gateways are in a rare mode come before others of their state.
	Known int     `json:"known"`
	Items []Agent `json:"items"`
	// GatewayModes is how many agents have found their gateway in each mode.
	GatewayModes map[string]int `json:"gatewayModes,omitempty"`
}

// The states of an agent.
const (
	// AgentConnected: it has a stream here.
	AgentConnected = "connected"
	// AgentMissing: the API server lists it, and it has no connection here.
	AgentMissing = "missing"
	// AgentStarting: as AgentMissing, and its containers have not started: it routes nothing.
	AgentStarting = "starting"
	// AgentGone: it has no stream here, and the API server does not list it.
	AgentGone = "gone"
	// AgentSuspended: it is not waited for.
	AgentSuspended = "suspended"
	// AgentLeft: its gateway has ended, and accepts no requests.
	AgentLeft = "left"
)

// GatewayAbsent is the [Agent.GatewayMode] if there is no gateway that the agent can observe.
const GatewayAbsent = "absent"

// GatewayBeside begins the [Agent.GatewayMode] if a program beside the gateway, whose name follows,
// chooses pods too and cannot be observed.
const GatewayBeside = "beside "

// Agent is one agent, and through it one gateway.
type Agent struct {
	// ID is its pod's UID, Name the pod's namespace/name.
	ID   string `json:"id"`
	Name string `json:"name"`
	Node string `json:"node,omitempty"`
	// Gateway is the kind of its gateway. GatewayMode is the mode in which the agent has found it:
	// nftables or iptables for kube-proxy, [GatewayAbsent] or [GatewayBeside]. Absent: the agent
	// has not sent it.
	Gateway     string `json:"gateway,omitempty"`
	GatewayMode string `json:"gatewayMode,omitempty"`
	// State is [AgentConnected] or another one.
	State string `json:"state"`
	// Label is the label of its pod: directed, observed or none. Ready is the condition of its pod.
	Label     string `json:"label"`
	Ready     bool   `json:"ready"`
	Connected bool   `json:"connected"`
	// Since is when the connection began or, if there is none now, when it ended.
	Since     time.Time `json:"since,omitzero"`
	Suspended bool      `json:"suspended,omitempty"`
	// Declared: the agent has declared its routes. Services is how many Services they name.
	// EveryService: one of them is for every Service.
	Declared     bool     `json:"declared"`
	Services     int      `json:"services"`
	EveryService bool     `json:"everyService,omitempty"`
	Protocol     int      `json:"protocol,omitempty"`
	Features     []string `json:"features"`
	// Version is the version and the commit of its program. Absent: the agent has not sent it.
	Version string `json:"version,omitempty"`
	Address string `json:"address,omitempty"`
	// Reported is when its last report arrived. ReportAgeSeconds is how old the report's content
	// was at that time. Agents report only while something is drained.
	Reported         time.Time `json:"reported,omitzero"`
	ReportAgeSeconds float64   `json:"reportAgeSeconds,omitempty"`
	// RemovedSeconds and IdleSeconds are how long its gateway took to become Removed and Idle in
	// the last drain that it acknowledged, counted from when the drain was sent to it.
	RemovedSeconds float64 `json:"removedSeconds,omitempty"`
	IdleSeconds    float64 `json:"idleSeconds,omitempty"`
}

// HasMode reports whether the agent has sent a mode of its gateway, and was not replaced since.
func (a Agent) HasMode() bool {
	return a.GatewayMode != "" && a.State != AgentGone && a.State != AgentLeft
}

// Outcome is the end of a drain, or a deletion that continued without the gateways'
// acknowledgements.
type Outcome struct {
	At        time.Time `json:"at"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	// Gate is where it ended: hold (before the deletion) or barrier (before SIGTERM).
	Gate string `json:"gate"`
	// Reason is why the deletion was allowed: Acknowledged, IdleBound, Deadline, NoAgents,
	// Suspended, LastTarget and more. PodDeleted: the pod was deleted before its drain was
	// released. Abandoned: the pod was not deleted, and gateways route to it again.
	Reason string `json:"reason"`
	// Abnormal: not every gateway had acknowledged, so an operator should look at it.
	Abnormal bool `json:"abnormal"`
	// TookSeconds is how long the drain lasted. Absent: there was no drain.
	TookSeconds *float64 `json:"tookSeconds,omitempty"`
	// Silent names the gateways that had not acknowledged. Gateways that were not connected, and
	// not waited for, are marked "(away)". MoreSilent is how many further gateways there were.
	Silent     []string `json:"silent"`
	MoreSilent int      `json:"moreSilent,omitempty"`
	// Message is the warning in the answer to the API server, if there was one.
	Message string `json:"message,omitempty"`
}

// Propagation is how long one kind of gateway took, counted from when the drain was sent to its
// agent.
type Propagation struct {
	Gateway string `json:"gateway"`
	// What is removed or idle.
	What string `json:"what"`
	// Count is the number of measurements since the replica started. Samples is how many of these,
	// the newest, the quantiles are computed from.
	Count      uint64  `json:"count"`
	Samples    int     `json:"samples"`
	P50Seconds float64 `json:"p50Seconds"`
	P90Seconds float64 `json:"p90Seconds"`
	P99Seconds float64 `json:"p99Seconds"`
	MaxSeconds float64 `json:"maxSeconds"`
}

// TargetHealth is the health of targets as gateways see it, by the summaries of their agents. It is
// at most a few seconds old.
type TargetHealth struct {
	// Reported: at least one agent has sent a summary. Where names the place with more details.
	Reported bool   `json:"reported"`
	Where    string `json:"where"`
	// Agents is how many agents have sent a summary. Untold is how many of their Services did not
	// fit into the summaries. All counts the targets that their gateways route; a target of two
	// gateways counts twice.
	Agents int          `json:"agents"`
	Untold int          `json:"untold"`
	All    TargetCounts `json:"all"`
	// Known is how many Services the summaries have. Troubled is how many of these have trouble.
	// Services are sorted with trouble first, and cut to a bound.
	Known    int             `json:"known"`
	Troubled int             `json:"troubled"`
	Services []ServiceHealth `json:"services"`
}

// TargetCounts count targets. Each is counted once: as excluded or doubtful, or else by its health.
type TargetCounts struct {
	// Usable pass their checks, Unhealthy fail them. Unknown were not judged yet, or are not
	// checked; they are usable too.
	Usable    int `json:"usable"`
	Unknown   int `json:"unknown"`
	Unhealthy int `json:"unhealthy"`
	// Excluded counts targets of pods that are drained. Doubtful counts targets that get no traffic
	// until the agent knows whether they may have it.
	Excluded int `json:"excluded"`
	Doubtful int `json:"doubtful"`
}

// ServiceHealth is what gateways believe of the targets of one Service.
type ServiceHealth struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Gateways is how many gateways report the Service. FailingOpen is how many of them send to all
	// targets because too few are usable. Unwell is how many find at least one target unhealthy.
	Gateways    int `json:"gateways"`
	FailingOpen int `json:"failingOpen"`
	Unwell      int `json:"unwell"`
	// Trouble: an operator should look at the Service. Says is the health as each gateway sees it,
	// gateways with trouble first, and cut to a bound.
	Trouble bool            `json:"trouble"`
	Says    []GatewayHealth `json:"says"`
}

// GatewayHealth is what one gateway believes of the targets of one Service.
type GatewayHealth struct {
	Agent   string `json:"agent"`
	Gateway string `json:"gateway,omitempty"`
	TargetCounts
	FailingOpen bool `json:"failingOpen"`
	// Checked: at least one target was ever checked.
	Checked bool `json:"checked"`
	// Targets are the first of those that are unhealthy.
	Targets []UnhealthyTarget `json:"targets"`
}

// UnhealthyTarget is a target that fails its checks, as one gateway sees it.
type UnhealthyTarget struct {
	Address string `json:"address"`
	// Pod is namespace/name, if it is known.
	Pod string `json:"pod,omitempty"`
	// Why is the reason why the target has traffic, or has none: unhealthy (none), failing-open,
	// held-back and more. Last is the outcome of its last check.
	Why   string    `json:"why"`
	Last  string    `json:"last,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// Explanation is what would happen if a pod were deleted or evicted now.
type Explanation struct {
	At        time.Time `json:"at"`
	Replica   string    `json:"replica"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	// Operation is delete or evict.
	Operation string `json:"operation"`
	// Answer is allow (deleted immediately), deny (refused for now) or drain (waits for gateways).
	// Reason names the row of the decision table that applies.
	Answer string `json:"answer"`
	Reason string `json:"reason"`
	// Summary says it in a sentence.
	Summary string `json:"summary"`
	// Unroute: gateways would stop routing to the pod in the background, although the deletion does
	// not wait for them.
	Unroute bool `json:"unroute,omitempty"`
	// Queued is the reason why the drain would first wait for capacity. Absent: it would not.
	Queued string `json:"queued,omitempty"`
	// Services list the pod.
	Services []ExplainedService `json:"services"`
	// Gates are the gateways that would have to acknowledge.
	Gates []Gate `json:"gates"`
	// Barrier is how the pod would wait between its deletion and SIGTERM. Absent: the pod has no
	// barrier, and would not wait.
	Barrier *ExplainedBarrier `json:"barrier,omitempty"`
	// Consumers are the ways by which traffic reaches the pod.
	Consumers []Consumer `json:"consumers"`
	// Uncovered are the consumers that may still send to the pod when it stops, because no agent
	// acknowledges for them.
	Uncovered []Uncovered `json:"uncovered"`
	// Drain is the pod's drain, if one is open on this replica.
	Drain *Drain `json:"drain,omitempty"`
	// Differs has the name and the summary of each replica whose answer or reason is another one.
	// Silent are the names of the replicas that have not explained. Both are set only where several
	// were asked.
	Differs []string `json:"differs"`
	Silent  []string `json:"silent,omitempty"`
}

// ExplainedService is a Service that lists the pod. Usable is how many of its targets are usable
// now.
type ExplainedService struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Usable    int    `json:"usable"`
}

// Gate is one gateway that would have to acknowledge, and the gate at which it would be asked.
type Gate struct {
	Agent   string `json:"agent"`
	Node    string `json:"node,omitempty"`
	Gateway string `json:"gateway,omitempty"`
	// Gate is hold (before the deletion) or barrier (after it has begun and before SIGTERM).
	Gate      string `json:"gate"`
	Connected bool   `json:"connected"`
	// Why says why it would be asked.
	Why string `json:"why"`
}

// ExplainedBarrier is what the pod and its node have for the second gate, as the API server shows
// it.
type ExplainedBarrier struct {
	// Hooks are those of its containers.
	Hooks []Hook `json:"hooks"`
	// BoundSeconds is how long the hooks may last. GraceSeconds is the time that the application
	// has after them. Absent: the pod has no such annotation.
	BoundSeconds float64 `json:"boundSeconds,omitempty"`
	GraceSeconds float64 `json:"graceSeconds,omitempty"`
	// Node is the pod's node. Agent is the node agent there, which answers the hooks. Empty: the
	// hooks would end immediately. Connected is whether the agent is connected to this replica.
	Node      string `json:"node,omitempty"`
	Agent     string `json:"agent,omitempty"`
	Connected bool   `json:"connected"`
	// Asked is how many observing agents may be asked. By barrier.ask, the coordinator may ask only
	// a sample of them, or only the one on the pod's node.
	Asked int `json:"asked"`
	// Stated are the waits for consumers that can never acknowledge.
	Stated []StatedWait `json:"stated"`
	// Open is the pod's barrier, if it waits there now.
	Open *OpenBarrier `json:"open,omitempty"`
}

// Coverage has the uncovered consumers of the whole cluster. A replica computes it at most every 10
// s.
type Coverage struct {
	At time.Time `json:"at"`
	// Services is how many have pods, in namespaces that are not excluded.
	Services int `json:"services"`
	// Whole is how many of them have only covered consumers. Possible is for how many that is not
	// known. The others have at least one, in Items.
	Whole    int `json:"whole"`
	Possible int `json:"possible"`
	// Uncovered is how many consumers are not waited for. Items are the first of them.
	Uncovered int        `json:"uncovered"`
	Items     []Consumer `json:"items"`
	// Error is why some could not be read.
	Error string `json:"error,omitempty"`
}

// Consumer is one way by which traffic reaches the pods of a Service.
type Consumer struct {
	Service string `json:"service"`
	// Name names the gateway or the object that routes the Service, Kind its kind.
	Name string `json:"name"`
	Kind string `json:"kind"`
	// State is Acknowledges, Waited (by the Service's stated wait), Absent (no pod of the gateway
	// is ready), Possible or Uncovered.
	State string `json:"state"`
	Why   string `json:"why,omitempty"`
}

// Hook is that of one container.
type Hook struct {
	Container string `json:"container"`
	// Kind is httpGet, exec, or none: the container would get SIGTERM without waiting.
	Kind string `json:"kind"`
}

// StatedWait is what a Service states by its annotation.
type StatedWait struct {
	Namespace string  `json:"namespace"`
	Service   string  `json:"service"`
	Seconds   float64 `json:"seconds"`
	// AtMost: the wait ends early when the pod has no connections. Cut: the pod's bound is shorter
	// than the wait. Error is the reason why the annotation cannot be read.
	AtMost bool   `json:"atMost,omitempty"`
	Cut    bool   `json:"cut,omitempty"`
	Error  string `json:"error,omitempty"`
}

// BarrierItself is the [Uncovered.What] of a pod on whose node no connected agent answers hooks.
const BarrierItself = "the barrier itself"

// Uncovered is one way by which traffic reaches the pod, for which no agent acknowledges.
type Uncovered struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Error string `json:"error"`
}

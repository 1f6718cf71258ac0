// Package api is the read API of a coordinator for operators and their tools: its paths, and the
// types of its answers, as JSON. Package dashboard serves it, and kubectl lameduck reads it.
//
// All requests are GET and change nothing. Each replica returns its own view: a deletion is a drain
// in each replica that the API server asked. With the query replicas=all, a replica asks the others
// for theirs and returns all of them joined. Times are by the clock of the replica that knows them,
// and [View.At] is the present time of the one that answers.
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
	// operation=evict.
	ExplainPath = "/v1/explain"
)

// Port is where coordinators serve this, on their loopback address, unless they are told otherwise.
// PortName is what it is called in their pods if it is another.
const (
	Port     = 9445
	PortName = "dashboard"
)

// View is everything but explanations. Lists are [] if they are empty.
type View struct {
	// At is when this was so, by the replica's clock.
	At      time.Time `json:"at"`
	Replica Replica   `json:"replica"`
	// With are the other replicas whose views are in this one, Silent those that have not answered.
	// Both are for replicas=all alone.
	With   []string `json:"with,omitempty"`
	Silent []string `json:"silent,omitempty"`
	Drains Drains   `json:"drains"`
	// Barriers are the pods whose deletion has begun and whose hooks wait, or were answered.
	Barriers Barriers `json:"barriers"`
	Agents   Agents   `json:"agents"`
	// Outcomes are how the last drains ended, and deletions that went on without the gateways'
	// word: the newest first.
	Outcomes []Outcome `json:"outcomes"`
	// Propagation is how long gateways take to stop routing to a pod, by kind of gateway.
	Propagation []Propagation `json:"propagation"`
	// TargetHealth is what gateways believe of the health of their targets.
	TargetHealth TargetHealth `json:"targetHealth"`
}

// Report is what deletions in mode observe would have waited, had they been enforced.
type Report struct {
	// Since is when this replica began to measure: with its present life.
	Since      time.Time         `json:"since"`
	Namespaces []NamespaceReport `json:"namespaces"`
}

// NamespaceReport is that of one namespace.
type NamespaceReport struct {
	Namespace string `json:"namespace"`
	// Deletions is how many were measured. InFlight of them had requests or connections in flight
	// when gateways had stopped routing to the pod. Unmeasured are more, of which no agent said in
	// time when its gateway had stopped.
	Deletions  int `json:"deletions"`
	InFlight   int `json:"inFlight"`
	Unmeasured int `json:"unmeasured"`
	// WaitSeconds are the newest of the waits, at most 1,000.
	WaitSeconds []float64 `json:"waitSeconds"`
}

// Replica is who answers.
type Replica struct {
	Name string `json:"name"`
	// Epoch names its present life, which began at Started.
	Epoch   string    `json:"epoch"`
	Started time.Time `json:"started"`
	// Version is that of its program, and the commit.
	Version string `json:"version,omitempty"`
	// Stopping says that it shuts down: calls are told to come again, and others are asked.
	Stopping bool `json:"stopping,omitempty"`
	// Holds is how many admission calls wait now, MaxHolds how many may.
	Holds    int `json:"holds"`
	MaxHolds int `json:"maxHolds"`
	// DeadlineSeconds is how long a drain lasts at most, IdleBoundSeconds how long running requests
	// are waited for once no new ones come.
	DeadlineSeconds  float64 `json:"deadlineSeconds"`
	IdleBoundSeconds float64 `json:"idleBoundSeconds"`
}

// Drains are those that are open on this replica.
type Drains struct {
	// Open is how many they are. Items are the oldest of them, if they are too many to be listed.
	Open  int     `json:"open"`
	Items []Drain `json:"items"`
	// Elsewhere is how many pods other replicas alone unroute, as they last told this one.
	Elsewhere int `json:"elsewhere"`
}

// Drain is one pod whose deletion waits, or whose gateways stop routing to it in the background.
type Drain struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`
	// Phase is Queued, Unrouting, Quiescing or Released, since PhaseSince. Reason is why it was
	// released, else None.
	Phase      string    `json:"phase"`
	PhaseSince time.Time `json:"phaseSince,omitzero"`
	Reason     string    `json:"reason"`
	// Since is the start of the drain's one clock, over retries and replicas. Deadline is when the
	// pod goes in any case.
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"`
	// Told is when agents were told. Not there: they were not yet, for want of room in a Service.
	Told time.Time `json:"told,omitzero"`
	// Owed is how many agents have to acknowledge, Waiting how many of them have not yet. Reports
	// are what they last reported, the least far first; if they are too many to be
	// listed, these.
	Owed    int           `json:"owed"`
	Waiting int           `json:"waiting"`
	Reports []AgentReport `json:"reports"`
}

// Barriers are those that are open on this replica.
type Barriers struct {
	// Open is how many pods have one. Items are the oldest of them, if they are too many to be
	// listed.
	Open  int           `json:"open"`
	Items []OpenBarrier `json:"items"`
	// Hooks is how many hooks wait at this replica now: one for each container.
	Hooks int `json:"hooks"`
	// Missing is how many pods ask for the barrier and were created without it. MissingPods are the
	// first of them.
	Missing     int      `json:"missing"`
	MissingPods []string `json:"missingPods"`
	// MissingIn is how many of them each namespace has.
	MissingIn map[string]int `json:"missingIn,omitempty"`
}

// OpenBarrier is a terminating pod that is told to stop only when its observed gateways have
// stopped routing to it.
type OpenBarrier struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`
	Node      string `json:"node,omitempty"`
	// Phase is Unrouting, Quiescing or Released, since PhaseSince. Released: its hooks were
	// answered, and it stops. Reason is why, else None.
	Phase      string    `json:"phase"`
	PhaseSince time.Time `json:"phaseSince,omitzero"`
	Reason     string    `json:"reason"`
	// Since is the deletion. Deadline is when the hooks are answered in any case.
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"`
	// AskedBy is the agent on the pod's node, which has the hooks.
	AskedBy string `json:"askedBy"`
	// Hook is the kind of the pod's hooks: httpGet, exec, or both, separated by a comma. Not there:
	// the pod is not known here.
	Hook string `json:"hook,omitempty"`
	// Owed, Waiting and Reports are as in Drain.
	Owed    int           `json:"owed"`
	Waiting int           `json:"waiting"`
	Reports []AgentReport `json:"reports"`
	// StatedSeconds is the wait, from the deletion on, for consumers that can never acknowledge.
	// StatedUntil is its end. Cut: the deadline comes before.
	StatedSeconds float64   `json:"statedSeconds,omitempty"`
	StatedUntil   time.Time `json:"statedUntil,omitzero"`
	Cut           bool      `json:"cut,omitempty"`
	// Last: no other endpoint is ready, or none on its node, so that gateways may keep sending to
	// the pod, which then only has to be idle.
	Last bool `json:"last,omitempty"`
	// Sampled says that not all agents are asked: the others are waited for by the time that they
	// were seen to take.
	Sampled bool `json:"sampled,omitempty"`
	// Uncovered are containers that stop without waiting: they could not be given the hook.
	Uncovered []string `json:"uncovered"`
}

// AgentReport is what an agent says of a drain.
type AgentReport struct {
	Agent   string `json:"agent"`
	Gateway string `json:"gateway,omitempty"`
	// State is unknown, routing, kept, removed or idle, said first at Since and proved by Proof:
	// none, runtime, config or timed.
	State string    `json:"state"`
	Proof string    `json:"proof"`
	Since time.Time `json:"since,omitzero"`
	// Received is as of when it last said so.
	Received  time.Time `json:"received,omitzero"`
	Connected bool      `json:"connected"`
	// Suspended says that it is told and not waited for: it has let drain after drain expire.
	Suspended bool `json:"suspended,omitempty"`
}

// Agents are those that this replica knows.
type Agents struct {
	// Expected is how many the API server lists, Missing how many of them have no connection here,
	// Suspended how many are not waited for.
	Expected  int `json:"expected"`
	Missing   int `json:"missing"`
	Suspended int `json:"suspended"`
	// Known is how many there are. Items are those with something to be said of first, and as many
	// as can be listed.
	Known int     `json:"known"`
	Items []Agent `json:"items"`
}

// The states of an agent.
const (
	// AgentConnected: it has a stream here.
	AgentConnected = "connected"
	// AgentMissing: the API server lists it, and it has no connection here.
	AgentMissing = "missing"
	// AgentGone: it has none, and is not listed.
	AgentGone = "gone"
	// AgentSuspended: it is not waited for.
	AgentSuspended = "suspended"
	// AgentLeft: its gateway accepts nothing any more.
	AgentLeft = "left"
)

// Agent is one agent, and through it one gateway.
type Agent struct {
	// ID is its pod's UID, Name the pod's namespace/name.
	ID   string `json:"id"`
	Name string `json:"name"`
	Node string `json:"node,omitempty"`
	// Gateway is the kind of its gateway.
	Gateway string `json:"gateway,omitempty"`
	// State is [AgentConnected] or another one.
	State string `json:"state"`
	// Label is directed, following or none: what its pod says of it. Ready is the pod's condition.
	Label     string `json:"label"`
	Ready     bool   `json:"ready"`
	Connected bool   `json:"connected"`
	// Since is when the connection began or, where there is none, ended.
	Since     time.Time `json:"since,omitzero"`
	Suspended bool      `json:"suspended,omitempty"`
	// Declared says that it has told what it routes: so many Services.
	Declared bool     `json:"declared"`
	Services int      `json:"services"`
	Protocol int      `json:"protocol,omitempty"`
	Features []string `json:"features"`
	// Version is that of its program, and the commit. Not there: it has not said.
	Version string `json:"version,omitempty"`
	Address string `json:"address,omitempty"`
	// Reported is when its last report came, ReportAgeSeconds how old what it said was by then.
	// Agents report only while something is drained.
	Reported         time.Time `json:"reported,omitzero"`
	ReportAgeSeconds float64   `json:"reportAgeSeconds,omitempty"`
	// RemovedSeconds and IdleSeconds are how long it took in the last drain that it acknowledged,
	// from being told.
	RemovedSeconds float64 `json:"removedSeconds,omitempty"`
	IdleSeconds    float64 `json:"idleSeconds,omitempty"`
}

// Outcome is how a drain ended, or that a deletion went on without the gateways' word.
type Outcome struct {
	At        time.Time `json:"at"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	// Gate is where it ended: hold (before the deletion) or barrier (before SIGTERM).
	Gate string `json:"gate"`
	// Reason is why the deletion was allowed: Acknowledged, IdleBound, Deadline, NoAgents,
	// Suspended, LastTarget and more. PodDeleted: the pod was deleted before its drain was
	// released. Abandoned: it was not deleted, and has its traffic back.
	Reason string `json:"reason"`
	// Abnormal says that operators should look: not every gateway had acknowledged.
	Abnormal bool `json:"abnormal"`
	// TookSeconds is how long it waited. Not there: there was no drain.
	TookSeconds *float64 `json:"tookSeconds,omitempty"`
	// Silent names gateways that had not acknowledged, and those that were away and not waited for,
	// marked "(away)"; MoreSilent is how many more there were.
	Silent     []string `json:"silent"`
	MoreSilent int      `json:"moreSilent,omitempty"`
	// Message is what the API server was told, if that was a warning.
	Message string `json:"message,omitempty"`
}

// Propagation is how long one kind of gateway took, from being told of a drain.
type Propagation struct {
	Gateway string `json:"gateway"`
	// What is removed or idle.
	What string `json:"what"`
	// Count is how often it was measured in the replica's life, Samples of how many the quantiles
	// are: the newest.
	Count      uint64  `json:"count"`
	Samples    int     `json:"samples"`
	P50Seconds float64 `json:"p50Seconds"`
	P90Seconds float64 `json:"p90Seconds"`
	P99Seconds float64 `json:"p99Seconds"`
	MaxSeconds float64 `json:"maxSeconds"`
}

// TargetHealth is what gateways believe of the health of their targets, as far as their agents
// tell. It is a few seconds old at most.
type TargetHealth struct {
	// Reported says that some agent tells. Where says where more is to be found.
	Reported bool   `json:"reported"`
	Where    string `json:"where"`
	// Agents is how many tell, Untold how many Services of theirs there was no room for. All counts
	// what their gateways route: a target that two route counts twice.
	Agents int          `json:"agents"`
	Untold int          `json:"untold"`
	All    TargetCounts `json:"all"`
	// Services are those with trouble first, as many of Known as can be listed. Troubled is how
	// many of them have some.
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
	// Excluded are of pods that are drained. Doubtful have no traffic until it is known whether
	// they may.
	Excluded int `json:"excluded"`
	Doubtful int `json:"doubtful"`
}

// ServiceHealth is what gateways believe of the targets of one Service.
type ServiceHealth struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Gateways is how many tell of it, FailingOpen how many of them send to all targets because too
	// few are usable, Unwell how many call a target unhealthy.
	Gateways    int `json:"gateways"`
	FailingOpen int `json:"failingOpen"`
	Unwell      int `json:"unwell"`
	// Trouble says that operators should look. Says is what each gateway believes, those with
	// trouble first; if they are too many, these.
	Trouble bool            `json:"trouble"`
	Says    []GatewayHealth `json:"says"`
}

// GatewayHealth is what one gateway believes of the targets of one Service.
type GatewayHealth struct {
	Agent   string `json:"agent"`
	Gateway string `json:"gateway,omitempty"`
	TargetCounts
	FailingOpen bool `json:"failingOpen"`
	// Checked says that some target was ever checked.
	Checked bool `json:"checked"`
	// Targets are the first of those that are unhealthy.
	Targets []UnhealthyTarget `json:"targets"`
}

// UnhealthyTarget is a target that fails its checks, as one gateway sees it.
type UnhealthyTarget struct {
	Address string `json:"address"`
	// Pod is namespace/name, if it is known.
	Pod string `json:"pod,omitempty"`
	// Why says why it has traffic or none: unhealthy (none), failing-open, held-back and more. Last
	// is what its last check gave.
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
	// Answer is allow, deny or drain: it would go at once, be refused for now, or wait for
	// gateways. Reason is the row of the table that decides.
	Answer string `json:"answer"`
	Reason string `json:"reason"`
	// Summary says it in a sentence.
	Summary string `json:"summary"`
	// Unroute says that gateways would be told in the background, although the answer does not
	// wait.
	Unroute bool `json:"unroute,omitempty"`
	// Queued is why it would have to wait for room first. Not there: it would not.
	Queued string `json:"queued,omitempty"`
	// Services list the pod.
	Services []ExplainedService `json:"services"`
	// Gates are the gateways that would have to acknowledge.
	Gates []Gate `json:"gates"`
	// Barrier is how the pod would wait between its deletion and SIGTERM. Not there: it has no
	// hook, and would not.
	Barrier *ExplainedBarrier `json:"barrier,omitempty"`
	// Consumers are the ways by which traffic reaches the pod.
	Consumers []Consumer `json:"consumers"`
	// Uncovered are the consumers that may still send to the pod when it stops, because no agent
	// acknowledges for them.
	Uncovered []Uncovered `json:"uncovered"`
	// Drain is there if one is open on this replica.
	Drain *Drain `json:"drain,omitempty"`
}

// ExplainedService is a Service that lists the pod, with so many targets that can be used now.
type ExplainedService struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Usable    int    `json:"usable"`
}

// Gate is one gateway that would have to acknowledge, and when it would be asked.
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
	// BoundSeconds is how long they may last, GraceSeconds what the application has for itself
	// after them. Not there: the pod does not say.
	BoundSeconds float64 `json:"boundSeconds,omitempty"`
	GraceSeconds float64 `json:"graceSeconds,omitempty"`
	// Node is the pod's, Agent the one there that has the hooks, and Connected whether it is here.
	// No agent: the hooks would end at once.
	Node      string `json:"node,omitempty"`
	Agent     string `json:"agent,omitempty"`
	Connected bool   `json:"connected"`
	// Asked is how many agents may be asked: those that observe. The coordinator may ask a sample
	// of them, or the one on the pod's node alone (barrier.ask).
	Asked int `json:"asked"`
	// Stated are the waits for consumers that can never acknowledge.
	Stated []StatedWait `json:"stated"`
	// Open is there if it waits already.
	Open *OpenBarrier `json:"open,omitempty"`
}

// Coverage is what routes Services and is not waited for, in the whole cluster. A replica reads it
// at most every ten seconds.
type Coverage struct {
	At time.Time `json:"at"`
	// Services is how many have pods, in namespaces that are not excluded.
	Services int `json:"services"`
	// Whole is how many of them are waited for whole. Possible is of how many that is not known:
	// clients may come by a way that is not waited for. The others have Items.
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
	// AtMost says that it ends early when nothing comes. Cut says that the pod's bound is shorter.
	// Error is why the annotation cannot be read.
	AtMost bool   `json:"atMost,omitempty"`
	Cut    bool   `json:"cut,omitempty"`
	Error  string `json:"error,omitempty"`
}

// BarrierItself is the [Uncovered.What] of a pod on whose node no connected agent answers hooks.
const BarrierItself = "the barrier itself"

// Uncovered is one way to the pod for which no agent can or will acknowledge.
type Uncovered struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Error string `json:"error"`
}

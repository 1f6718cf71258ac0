// Package wire is the protocol between coordinators and agents: the message types, their paths and
// limits. It only encodes and checks messages. Package coordinator serves the protocol,
// internal/agent/client speaks it. docs/protocol.md describes it for other implementations.
//
// An agent opens one [StreamPath] to each coordinator replica, as a request to upgrade to
// [Upgrade], and keeps it open. After the answer 101 there is no HTTP around it: both sides write
// JSON objects, one a line, in the manner of a Kubernetes watch. The coordinator writes first
// [Hello], then every open drain that the agent may have to acknowledge, then a Message of type
// Synced, then changes as they come, and a heartbeat every 2 s. The agent writes [Reports] on each
// change and at every renewal, one line for any number of drains. A line that is refused ends the
// stream, with a Message of type Refused.
//
// All other messages of the agent are posts that name the session from Hello: [Declaration] once on
// each session and on each change. A post that names another session than the agent's present one
// is refused with 409, and the agent opens a new stream.
//
// Compatibility: fields are added, never repurposed. Unknown fields are ignored, unknown types of
// messages are skipped, unknown values of enumerations are refused by name. The agent names every
// version that it speaks in the query of the stream. The coordinator chooses the newest version
// that both sides speak, and names it in Hello. So far there is one. Smaller additions are
// features. Each side names its features, the agent in the query and the coordinator in Hello, and
// uses only those that the other side has named.
package wire

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/target"
)

// Protocol is the version that this code speaks.
const Protocol = 1

// FeatureLeave: the coordinator accepts Leave, so the agent may send it.
const FeatureLeave = "leave"

// FeatureBarrier: the coordinator sends messages of type watch and accepts Barrier, the agent
// observes.
const FeatureBarrier = "barrier"

// Features returns the features of this code, on both sides. An agent that observes no gateway does
// not offer [FeatureBarrier]. See also [FeatureHealth].
func Features() []string { return []string{FeatureLeave, FeatureBarrier, FeatureHealth} }

// The query of [StreamPath].
const (
	// queryProtocol occurs once for each version that the agent speaks, and queryFeature once for
	// each feature. queryBoot and queryBuild occur at most once.
	queryProtocol = "protocol"
	queryFeature  = "feature"
	queryBoot     = "boot"
	queryBuild    = "build"
)

// Upgrade is the protocol that an agent's request for a stream names in its Upgrade header.
const Upgrade = "lameduck-stream"

// maxFeatures bounds the features in an offer. A larger offer is refused.
const maxFeatures = 64

// Offer is how an agent introduces itself when it opens a stream.
type Offer struct {
	Features []string
	// Boot names the life of its process. Empty: unknown.
	Boot string
	// Build is the version of its program, for operators. Empty: unknown.
	Build string
}

// NewOffer returns the offer of this version of the code.
func NewOffer(boot string) Offer { return Offer{Features: Features(), Boot: boot} }

// Without returns the offer without a feature.
func (o Offer) Without(feature string) Offer {
	o.Features = slices.DeleteFunc(slices.Clone(o.Features), func(f string) bool { return f == feature })
	return o
}

// Query writes the offer as the query of [StreamPath].
func (o Offer) Query() string {
	q := url.Values{queryProtocol: {strconv.Itoa(Protocol)}, queryFeature: o.Features}
	if o.Boot != "" {
		q.Set(queryBoot, o.Boot)
	}
	if o.Build != "" {
		q.Set(queryBuild, o.Build)
	}
	return q.Encode()
}

// ParseOffer reads the query of [StreamPath]. Other keys are ignored. The error for a value that is
// too long names its key. If the agent does not speak [Protocol], the error names the versions of
// both sides.
func ParseOffer(q url.Values) (Offer, error) {
	o := Offer{Features: q[queryFeature], Boot: q.Get(queryBoot), Build: target.Printable(q.Get(queryBuild))}
	for i, f := range o.Features {
		o.Features[i] = target.Printable(f)
	}
	offered := q[queryProtocol]
	switch {
	case len(o.Build) > MaxName:
		return o, fmt.Errorf("%s: longer than %d bytes", queryBuild, MaxName)
	case len(o.Boot) > MaxName:
		return o, fmt.Errorf("%s: longer than %d bytes", queryBoot, MaxName)
	case len(o.Features) > maxFeatures:
		return o, fmt.Errorf("%s: more than %d", queryFeature, maxFeatures)
	case slices.ContainsFunc(o.Features, func(f string) bool { return len(f) > MaxName }):
		return o, fmt.Errorf("%s: longer than %d bytes", queryFeature, MaxName)
	case !slices.Contains(offered, strconv.Itoa(Protocol)):
		return o, fmt.Errorf("%s: the agent speaks %.100q, this coordinator speaks %d", queryProtocol,
			strings.Join(offered, " or "), Protocol)
	}
	return o, nil
}

// The paths of the coordinator's API for agents.
const (
	// StreamPath is read with GET and the query of an [Offer], in a request to upgrade to
	// [Upgrade].
	StreamPath = "/v1/stream"
	// DeclarationsPath takes a POST of Declaration and answers Declared.
	DeclarationsPath = "/v1/declarations"
	// LeavePath takes a POST of Leave and answers 204.
	LeavePath = "/v1/leave"
	// BarriersPath takes a POST of Barrier and answers Passed, when the pod may be told to stop.
	BarriersPath = "/v1/barriers"
)

// ReportsPath and HealthPath are the labels by which metrics count the lines of Reports and of
// Health that agents write into their streams. They are not served.
const (
	ReportsPath = "/v1/reports"
	HealthPath  = "/v1/health"
)

// MaxRoutes and MaxReports bound the entries of one post or line. MaxName bounds each name and UID
// in it, in bytes. MaxKept bounds the names of the Services that keep a pod, in bytes.
const (
	MaxRoutes  = 10_000
	MaxReports = 10_000
	MaxName    = 253
	MaxKept    = 4096
)

// MaxTargets bounds the addresses of one pod. MaxBound bounds the duration of a barrier.
const (
	MaxTargets = 64
	MaxBound   = 10 * time.Minute
)

// MaxBody bounds a post or a line of an agent, in bytes. It is enough for 10,000 reports.
const MaxBody = 4 << 20

// Type is the kind of a Message.
type Type string

// The types of messages. A receiver skips unknown ones.
const (
	TypeHello     Type = "hello"
	TypeDrains    Type = "drains"
	TypeReleases  Type = "releases"
	TypeSynced    Type = "synced"
	TypeHeartbeat Type = "heartbeat"
	// TypeWatch comes only to agents that have FeatureBarrier.
	TypeWatch Type = "watch"
	// TypeRefused has the reason for which the coordinator ends the stream.
	TypeRefused Type = "refused"
)

// Message is one line of the stream. The field that Type names is set.
type Message struct {
	// At is when the message was written, in milliseconds by a clock of the coordinator. With its
	// reports, the agent returns the At of the last message that it has processed. So one clock
	// measures the age of reports, however long they are in flight or either side is frozen.
	At       int64        `json:"at,omitempty"`
	Type     Type         `json:"type"`
	Hello    *Hello       `json:"hello,omitempty"`
	Drains   *Drains      `json:"drains,omitempty"`
	Releases *Releases    `json:"releases,omitempty"`
	Watch    *drain.Watch `json:"watch,omitempty"`
	// Declared is the number of the last declaration that a message of type synced answers.
	Declared int    `json:"declared,omitempty"`
	Refused  *Error `json:"refused,omitempty"`
}

// Hello is the first message of a stream.
type Hello struct {
	// Protocol is the version that the coordinator chose among those of the agent.
	Protocol int `json:"protocol"`
	// Features are the features of the coordinator.
	Features []string `json:"features"`
	// Holder is the holder of this stream's exclusions.
	Holder drain.Holder `json:"holder"`
	// Session is the number that the agent names in every post.
	Session uint64 `json:"session"`
	// AwayMillis is the silence after which the stream counts as lost.
	AwayMillis int64 `json:"awayMillis"`
	// ExpiryMillis is how long an exclusion stands after the last message of the stream.
	// RenewalMillis is how often every report has to be repeated at least.
	ExpiryMillis  int64 `json:"expiryMillis"`
	RenewalMillis int64 `json:"renewalMillis"`
}

// Declaration is everything an agent's gateway routes.
type Declaration struct {
	Session uint64 `json:"session"`
	Gateway string `json:"gateway"`
	// Population names the agents that observe the same gateway: [drain.Nodes], or the gateway of
	// which this is a replica. Empty for agents that observe nothing.
	Population string `json:"population,omitempty"`
	// GatewayMode is the mode in which the agent has found its gateway, for operators: that of
	// kube-proxy, [GatewayAbsent], or [Beside]. Empty: the gateway has no modes, or the mode is not
	// known.
	GatewayMode string        `json:"gatewayMode,omitempty"`
	Routes      []drain.Route `json:"routes"`
}

// GatewayAbsent is the [Declaration.GatewayMode] of a gateway that is not there.
const GatewayAbsent = "absent"

// Beside begins the [Declaration.GatewayMode] of a gateway that another program shares the node
// with, which chooses pods too and cannot be observed. The program's name follows.
const Beside = "beside "

// Declared answers a Declaration. The stream then has the open drains of the declared Services,
// followed by a Message of type synced with this number. The agent excludes these pods before it
// changes its gateway.
type Declared struct {
	Declared int `json:"declared"`
	// Refused are the namespaces in which the agent may not acknowledge drains. Its routes there do
	// not count.
	Refused []string `json:"refused,omitempty"`
}

// Reports are an agent's present reports about the open drains of the replica that they are sent
// to. With UpTo, they are the exceptions from it. Without UpTo, the earlier report on this session
// remains valid for each pod that Reports does not list.
type Reports struct {
	Session uint64 `json:"session"`
	// At is the [Message.At] of the last message that the agent had processed before it read the
	// states. 0: unknown. The age of the reports then counts from their arrival.
	At int64 `json:"at,omitempty"`
	// Boot names the life of the agent's process.
	Boot    string         `json:"boot"`
	UpTo    *drain.UpTo    `json:"upTo,omitempty"`
	Reports []drain.Report `json:"reports,omitempty"`
}

// Leave states that the agent's gateway accepts no more traffic, so that drains need not wait for
// the agent. It holds until the agent declares again or connects with another boot.
type Leave struct {
	Session uint64 `json:"session"`
	Boot    string `json:"boot"`
}

// BarrierRequest is a request of the agent on a pod's node. The coordinator answers it when the pod
// may be stopped, or at the bound. A repeated request, also to another replica, is about the same
// barrier.
type BarrierRequest struct {
	Session uint64           `json:"session"`
	Pod     drain.Pod        `json:"pod"`
	Targets []netip.AddrPort `json:"targets"`
	// Since is when the pod was deleted, by the API server's clock. If the pod is not Terminating,
	// it is when the container was stopped, by the node's clock. BoundMillis is how long after
	// Since the answer is due. ElapsedMillis is how much of that has passed, so the clocks of the
	// two sides need not agree.
	Since         time.Time `json:"since"`
	BoundMillis   int64     `json:"boundMillis"`
	ElapsedMillis int64     `json:"elapsedMillis"`
	// Terminating: the pod has a deletionTimestamp. Otherwise only a container, or the node, is
	// being stopped: directed gateways exclude the pod until it is ready again.
	Terminating bool `json:"terminating"`
}

// BarrierStatus answers a BarrierRequest.
type BarrierStatus struct {
	// Terminating: the request says that the pod is not terminating, and it is. Nothing was waited
	// for: the agent asks again. GraceMillis is the grace period of the deletion.
	Terminating bool  `json:"terminating,omitempty"`
	GraceMillis int64 `json:"graceMillis,omitempty"`
	// Reason is a [drain.Reason], or empty with Terminating.
	Reason string `json:"reason"`
	// Waiting names the agents that were still waited for, as namespace/name (state).
	Waiting []string `json:"waiting"`
	// Cut: a stated wait was longer than the bound.
	Cut bool `json:"cut,omitempty"`
	// IdleBoundMillis is how long the agent on the pod's node is to wait for every connection, also
	// for idle keep-alive connections, after its own kernel has stopped routing to the pod. 0:
	// neither the pod nor one of its Services asks for that.
	IdleBoundMillis int64 `json:"idleBoundMillis,omitempty"`
	// AtMostMillis is how long after the deletion the agent still has to wait: a stated wait is
	// only time, and keeps no place at the coordinator. With a QuietMillis the wait ends
	// earlier once the agent has seen for QuietMillis that no connection to the pod is open and
	// none is opened. 0: no wait.
	AtMostMillis int64 `json:"atMostMillis,omitempty"`
	QuietMillis  int64 `json:"quietMillis,omitempty"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Error string `json:"error"`
}

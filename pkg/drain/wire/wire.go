// Package wire is what coordinators and agents say to each other: the message types, their paths
// and limits.
//
// An agent opens one [StreamPath] to each coordinator replica, as a request to upgrade to
// [Upgrade], and keeps it open. After the answer 101 there is no HTTP around it: both sides write
// JSON objects, one a line, in the manner of a Kubernetes watch. The coordinator writes first
// [Hello], then every open drain the agent may owe, then a Message of type Synced, then changes as
// they come, and a heartbeat whenever nothing else was sent for [Hello.HeartbeatMillis]. The agent
// writes [Reports] on each change and at every renewal, one line for any number of drains. What is
// refused of them ends the stream, with a Message of type Refused.
//
// Everything else that the agent has to say it posts, naming the session that Hello gave:
// [Declaration] once on each session and on each change. A post that names another session than the
// agent's present one is refused with 409, and the agent opens a new stream.
//
// Compatibility: fields are added, never repurposed. Unknown fields are ignored, unknown types of
// messages are skipped, unknown values of enumerations are refused by name. Both sides speak the
// newest version that they know and the one before ([Spoken]): the agent names them in the query of
// the stream, the coordinator chooses the newest that both know ([Choose]) and says so in Hello.
// What is less than a version is a feature: each side names those it has, in the query and in
// Hello, and uses none that the other has not named.
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
)

// Protocol is the newest version that this code speaks.
const Protocol = 1

// FeatureLeave: the coordinator takes Leave, the agent may send it.
const FeatureLeave = "leave"

// FeatureBarrier: the coordinator sends messages of type watch and takes Barrier, the agent
// observes.
const FeatureBarrier = "barrier"

// Features are what this code has, on both sides. An agent that observes nothing does not offer
// FeatureBarrier, see also [FeatureHealth].
func Features() []string { return []string{FeatureLeave, FeatureBarrier, FeatureHealth} }

// The query of [StreamPath].
const (
	// queryProtocol is given once for each version that the agent speaks, queryFeature for each
	// feature, queryBoot at most once.
	queryProtocol = "protocol"
	queryFeature  = "feature"
	queryBoot     = "boot"
	queryBuild    = "build"
)

// Upgrade is what an agent may ask to upgrade a stream to.
const Upgrade = "lameduck-stream"

// maxFeatures bounds the features of an agent that are kept, maxNameLength the bytes of a name that
// an agent gives.
const (
	maxFeatures   = 64
	maxNameLength = 256
)

// Offer is what an agent says of itself when it opens a stream.
type Offer struct {
	// Protocols are the versions that it speaks.
	Protocols []string
	Features  []string
	// Boot names the life of its process. Empty: it does not say.
	Boot string
	// Build is the version of its program, for operators. Empty: it does not say.
	Build string
}

// NewOffer returns what this code offers.
func NewOffer(boot string) Offer {
	o := Offer{Features: Features(), Boot: boot}
	for _, version := range Spoken() {
		o.Protocols = append(o.Protocols, strconv.Itoa(version))
	}
	return o
}

// Without returns the offer without a feature.
func (o Offer) Without(feature string) Offer {
	o.Features = slices.DeleteFunc(slices.Clone(o.Features), func(f string) bool { return f == feature })
	return o
}

// Query writes the offer as the query of [StreamPath].
func (o Offer) Query() string {
	q := url.Values{queryProtocol: o.Protocols, queryFeature: o.Features}
	if o.Boot != "" {
		q.Set(queryBoot, o.Boot)
	}
	if o.Build != "" {
		q.Set(queryBuild, o.Build)
	}
	return q.Encode()
}

// ParseOffer reads the query of [StreamPath]. Other keys are ignored. What is too long is refused
// by name.
func ParseOffer(q url.Values) (Offer, error) {
	o := Offer{Protocols: q[queryProtocol], Features: q[queryFeature], Boot: q.Get(queryBoot), Build: q.Get(queryBuild)}
	switch {
	case len(o.Build) > maxNameLength:
		return o, fmt.Errorf("%s: longer than %d bytes", queryBuild, maxNameLength)
	case len(o.Boot) > maxNameLength:
		return o, fmt.Errorf("%s: longer than %d bytes", queryBoot, maxNameLength)
	case len(o.Features) > maxFeatures:
		return o, fmt.Errorf("%s: more than %d", queryFeature, maxFeatures)
	case slices.ContainsFunc(o.Features, func(f string) bool { return len(f) > maxNameLength }):
		return o, fmt.Errorf("%s: longer than %d bytes", queryFeature, maxNameLength)
	}
	return o, nil
}

// Versions of the protocol, the newest first.
type Versions []int

// String prints "2 or 1".
func (v Versions) String() string {
	var all []string
	for _, version := range v {
		all = append(all, strconv.Itoa(version))
	}
	return strings.Join(all, " or ")
}

// Spoken returns the versions that this code speaks.
func Spoken() Versions { return spoken(Protocol) }

// spoken returns newest and the version before it, if there was one.
func spoken(newest int) Versions {
	if newest == 1 {
		return Versions{1}
	}
	return Versions{newest, newest - 1}
}

// Choose returns the newest version that both sides speak. The error names what both do.
func Choose(offered []string) (int, error) { return choose(Spoken(), offered) }

func choose(spoken Versions, offered []string) (int, error) {
	for _, version := range spoken {
		if slices.Contains(offered, strconv.Itoa(version)) {
			return version, nil
		}
	}
	return 0, fmt.Errorf("%s: the agent speaks %.100q, this coordinator speaks %s", queryProtocol,
		strings.Join(offered, " or "), spoken)
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

// ReportsPath and HealthPath are what metrics call the lines of Reports and of Health that agents
// write into their streams. They are not served.
const (
	ReportsPath = "/v1/reports"
	HealthPath  = "/v1/health"
)

// MaxRoutes and MaxReports bound one post or line, MaxName the bytes of each name and UID in it,
// MaxKept those of the Services that keep a pod.
const (
	MaxRoutes  = 10_000
	MaxReports = 10_000
	MaxName    = 253
	MaxKept    = 4096
)

// MaxTargets bounds the addresses of one pod, MaxBound how long a barrier may last.
const (
	MaxTargets = 64
	MaxBound   = 10 * time.Minute
)

// MaxBody bounds what an agent may post, in bytes. 10,000 reports fit.
const MaxBody = 4 << 20

// Type says what a Message is.
type Type string

// The types of messages. Others are to be skipped.
const (
	TypeHello     Type = "hello"
	TypeDrains    Type = "drains"
	TypeReleases  Type = "releases"
	TypeSynced    Type = "synced"
	TypeHeartbeat Type = "heartbeat"
	// TypeWatch comes only to agents that have FeatureBarrier.
	TypeWatch Type = "watch"
	// TypeRefused says why the stream ends here.
	TypeRefused Type = "refused"
)

// Message is one line of the stream. The field that Type names is set.
type Message struct {
	// At is when this was written, in milliseconds of a clock of the coordinator's own. The agent
	// says the last one that it has taken in again with its reports: they count as old as that, by
	// one clock, however long they are under way or either side was frozen.
	At       int64        `json:"at,omitempty"`
	Type     Type         `json:"type"`
	Hello    *Hello       `json:"hello,omitempty"`
	Drains   *Drains      `json:"drains,omitempty"`
	Releases *Releases    `json:"releases,omitempty"`
	Watch    *drain.Watch `json:"watch,omitempty"`
	// Declared is how many declarations of the session a message of type synced answers.
	Declared int    `json:"declared,omitempty"`
	Refused  *Error `json:"refused,omitempty"`
}

// Hello is the first message of a stream.
type Hello struct {
	// Protocol that the coordinator chose among those the agent named.
	Protocol int `json:"protocol"`
	// Features that the coordinator has.
	Features []string `json:"features"`
	// Holder under which the exclusions of this stream stand.
	Holder drain.Holder `json:"holder"`
	// Session to name in every post.
	Session uint64 `json:"session"`
	// HeartbeatMillis is how often the stream says something at least, AwayMillis how long silence
	// means that it is lost.
	HeartbeatMillis int64 `json:"heartbeatMillis"`
	AwayMillis      int64 `json:"awayMillis"`
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
	Population string        `json:"population,omitempty"`
	Routes     []drain.Route `json:"routes"`
}

// Declared answers a Declaration. The stream brings the open drains of what was declared, and then
// a Message of type synced with this number: the agent excludes them before it programs its
// gateway.
type Declared struct {
	Declared int `json:"declared"`
}

// Reports are an agent's present reports about the open drains of the replica that they are sent
// to. With UpTo, they are the exceptions from it. Without, pods that are not among them are as they
// were reported before on this session.
type Reports struct {
	Session uint64 `json:"session"`
	// At is that of the last message which was taken in before the states were read. 0: the agent
	// does not tell, and the reports count as old as their arrival.
	At int64 `json:"at,omitempty"`
	// Boot names the life of the agent's process.
	Boot    string         `json:"boot"`
	UpTo    *drain.UpTo    `json:"upTo,omitempty"`
	Reports []drain.Report `json:"reports,omitempty"`
}

// Leave says that the agent's gateway accepts nothing any more, for good: nobody needs to wait for
// it. It holds until the agent declares again or connects in another life.
type Leave struct {
	Session uint64 `json:"session"`
	Boot    string `json:"boot"`
}

// BarrierRequest asks, by the agent on the node of a pod that is being stopped, to be told when
// that may continue. The answer comes then, or at the bound. The same question, again or of another
// replica, is of the same barrier.
type BarrierRequest struct {
	Session uint64           `json:"session"`
	Pod     drain.Pod        `json:"pod"`
	Targets []netip.AddrPort `json:"targets"`
	// Since is the deletion, BoundMillis how long after it the answer must have come, ElapsedMillis
	// how much of that is over, so that the clocks of the two sides need not agree.
	Since         time.Time `json:"since"`
	BoundMillis   int64     `json:"boundMillis"`
	ElapsedMillis int64     `json:"elapsedMillis"`
	// Terminating says that the pod has a deletionTimestamp. Without one it is only a container
	// that is stopped, or its node: directed gateways are told to let go until it is ready again.
	Terminating bool `json:"terminating"`
	// SeesQuiet says that the agent knows AtMostMillis. For another one the coordinator waits.
	SeesQuiet bool `json:"seesQuiet,omitempty"`
}

// BarrierStatus answers a BarrierRequest.
type BarrierStatus struct {
	// Phase and Reason are those of [drain.Phase] and [drain.Reason].
	Phase  string `json:"phase"`
	Reason string `json:"reason"`
	// Waiting names the agents that were still waited for, as namespace/name (state).
	Waiting []string `json:"waiting"`
	// Cut says that a stated wait was longer than the bound.
	Cut bool `json:"cut,omitempty"`
	// IdleBoundMillis is how long after the pod's own node has stopped routing to it the agent
	// there is to wait for every connection, also for those that clients keep. 0: neither the pod
	// nor one of its Services wants that.
	IdleBoundMillis int64 `json:"idleBoundMillis,omitempty"`
	// AtMostMillis is how long after the deletion the agent is still to wait, but not once it has
	// seen for QuietMillis that no connection to the pod is open and none comes. 0: no wait.
	AtMostMillis int64 `json:"atMostMillis,omitempty"`
	QuietMillis  int64 `json:"quietMillis,omitempty"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Error string `json:"error"`
}

// Package wire is what coordinators and agents say to each other: the message types, their paths and limits.
//
// An agent opens one [StreamPath] to each coordinator replica and keeps it open. The answer is a sequence of JSON objects, one a
// line, in the manner of a Kubernetes watch: first [Hello], then every open drain the agent may owe, then a Message of type Synced,
// then changes as they come, and a heartbeat whenever nothing else was sent for [Hello.HeartbeatMillis]. Everything the agent has
// to say it posts, naming the session that Hello gave: [Declaration] once on each session and on each change, [Reports] on each
// change and at every renewal. A post that names another session than the agent's present one is refused with 409, and the agent
// opens a new stream.
//
// Compatibility: fields are added, never repurposed. Unknown fields are ignored, unknown types of messages are skipped, unknown values
// of enumerations are refused by name. The agent names the protocol versions it speaks in the query of the stream, the
// coordinator answers with the one it chose.
package wire

import "github.com/lameduck-io/lameduck/pkg/drain"

// Protocol is the version that this code speaks.
const Protocol = 1

// The paths of the coordinator's API for agents.
const (
	// StreamPath is read with GET, query protocol=1.
	StreamPath = "/v1/stream"
	// DeclarationsPath takes a POST of Declaration and answers Declared.
	DeclarationsPath = "/v1/declarations"
	// LeavePath takes a POST of Leave and answers 204.
	LeavePath = "/v1/leave"
	// ReportsPath takes a POST of Reports and answers 204.
	ReportsPath = "/v1/reports"
)

// MaxBody bounds what an agent may post, in bytes. 10,000 reports fit.
const MaxBody = 4 << 20

// Type says what a Message is.
type Type string

// The types of messages. Others are to be skipped.
const (
	TypeHello     Type = "hello"
	TypeDrain     Type = "drain"
	TypeRelease   Type = "release"
	TypeSynced    Type = "synced"
	TypeHeartbeat Type = "heartbeat"
)

// Message is one line of the stream. The field that Type names is set.
type Message struct {
	Type    Type           `json:"type"`
	Hello   *Hello         `json:"hello,omitempty"`
	Drain   *drain.Open    `json:"drain,omitempty"`
	Release *drain.Release `json:"release,omitempty"`
}

// Hello is the first message of a stream.
type Hello struct {
	// Protocol that the coordinator chose among those the agent named.
	Protocol int      `json:"protocol"`
	Features []string `json:"features"`
	// Lease under which the tombstones of this stream stand.
	Lease drain.Lease `json:"lease"`
	// Session to name in every post.
	Session uint64 `json:"session"`
	// HeartbeatMillis is how often the stream says something at least, AwayMillis how long silence means that it is lost.
	HeartbeatMillis int64 `json:"heartbeatMillis"`
	AwayMillis      int64 `json:"awayMillis"`
	// LeaseMillis is how long a tombstone stands after the last message of the stream. RenewalMillis is how often every
	// report has to be repeated at least.
	LeaseMillis   int64 `json:"leaseMillis"`
	RenewalMillis int64 `json:"renewalMillis"`
}

// Declaration is everything an agent's gateway routes.
type Declaration struct {
	Session uint64        `json:"session"`
	Gateway string        `json:"gateway"`
	Routes  []drain.Route `json:"routes"`
}

// Declared answers a Declaration: the open drains of what was declared. The agent buries these before it programs its gateway.
type Declared struct {
	Drains []drain.Open `json:"drains"`
}

// Reports are an agent's present words, on the tombstones of all replicas; [drain.Report.Held] marks those that count here. Pods that are not among them are as they were reported before on this session.
type Reports struct {
	Session uint64 `json:"session"`
	// Boot names the life of the agent's process.
	Boot    string         `json:"boot"`
	Reports []drain.Report `json:"reports"`
}

// Leave says that the agent's gateway accepts nothing any more, for good: nobody needs to wait for it. It holds until the agent
// declares again or connects in another life.
type Leave struct {
	Session uint64 `json:"session"`
	Boot    string `json:"boot"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Error string `json:"error"`
}

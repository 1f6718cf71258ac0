package gateway

import (
	"context"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Observed is one running data plane that stops routing to a pod by itself once EndpointSlices call
// the pod terminating. An agent cannot direct it. It can only see that the data plane has stopped.
//
// Methods may be called from several goroutines.
type Observed interface {
	// Run follows the data plane until ctx is done, and returns nil then. Before Run, and after it,
	// readings are Unknown.
	Run(ctx context.Context) error

	// Watch begins to observe the targets of one pod. Port 0 is every port of the address. changed
	// is called when the reading may have changed: possibly from several goroutines, before Watch
	// returns, and once more after Close. It must not block. A reading holds for every worker of
	// the data plane. If workers apply a change one after the other, the state is Removed only when
	// the last one has.
	Watch(targets []netip.AddrPort, changed func()) Watch

	// Population names the agents that observe the same gateway: [Nodes] if each node has one of
	// them, or the name of the gateway of which this is a replica. Coordinators may ask a sample of
	// the nodes, and ask every replica of a gateway.
	Population() string

	// Absent reports whether there is no data plane that can be observed here. It must not block:
	// the agent calls it several times a second. While it is true, the agent declares that it
	// cannot acknowledge. So it is where something that cannot be observed sends too.
	Absent() bool
}

// Nodes is the population of data planes of which each node has one.
const Nodes = "nodes"

// Watch is an observation of the targets of one pod.
type Watch interface {
	// Reading returns what was last seen. It does not block.
	Reading() Reading
	// Count has connections counted again at once. It does not block.
	Count()
	// Close ends the observation. A repeat does nothing.
	Close()
}

// Reading is what an observed data plane was seen to do with the targets of a Watch.
type Reading struct {
	// State is Unknown if the data plane could not be read, and Kept if it sends to a target only
	// because it has no other one. Once nothing new is sent to a target, State is Removed. It
	// becomes Idle when a count finds no connection to wait for. If a count finds one, State stays
	// Removed, and changed is called. Another connection makes an Idle target Removed again.
	State health.State
	// Generation names the life of the data plane that was read. A reading is no evidence for any
	// other generation.
	Generation string
	// Connections is how many were open or being opened in the count that began at Counted. It
	// includes connections that are not waited for because their clients keep them from one request
	// to the next.
	Connections int
	Counted     time.Time
	// Quiet is for how long, at Counted, full counts have found no connection that was open, and
	// none that had come and ended in between. It is 0 unless they have found at least one from
	// another node or pod that went straight to a target: without one it is not known whether such
	// connections can be seen here. Counting for it begins with the first [Watch.Count].
	Quiet time.Duration
	// NoConnections reports whether there is no connection to wait for, whatever State is.
	NoConnections bool
	// Since is when State was entered.
	Since time.Time
	// Written is when what configures the data plane was last seen at work. Zero: that cannot be
	// seen. If it is long ago, a target that was never sent to may never have been configured.
	Written time.Time
}

// Sharer is an [Observed] beside which another data plane may choose pods that cannot be observed.
type Sharer interface {
	// Beside returns the name of that data plane, "" if there is none. It must not block.
	Beside() string
}

// Moder is an [Observed] whose data plane has more than one mode.
type Moder interface {
	// Mode returns the mode in which the data plane was found, for operators. It returns "" if the
	// mode is not known. Like Absent, it must not block.
	Mode() string
}

// Looker is an [Observed] that reads [health.Kept] when all targets that it could send to are
// watched.
type Looker interface {
	// Look is Watch for addresses that may belong to another pod by now. For other watches, these
	// targets still count as endpoints that the gateway can send to.
	Look(targets []netip.AddrPort, changed func()) Watch
}

// Cleaner is an [Observed] that keeps connections to pods which no longer exist.
type Cleaner interface {
	// Clean forgets the connections to targets. The agent calls it once nothing is sent to them and
	// no pod has their addresses.
	Clean(targets []netip.AddrPort) error
}

// Polled is an [Observed] that reads its gateway again and again.
type Polled interface {
	// Failures counts the readings that failed.
	Failures() uint64
	// Began is closed once the gateway has started. Before that the gateway sends nothing, and
	// nothing can be acknowledged: the agent does not connect to coordinators, for 5 minutes.
	Began() <-chan struct{}
}

// Auditor is an [Observed] that follows changes, and compares what it has followed with the data
// plane from time to time.
type Auditor interface {
	Audits() Audits
}

// Audits counts comparisons of what an [Auditor] has followed with the data plane.
type Audits struct {
	// Same counts audits that found no difference. Corrected counts those that found one: readings
	// since the audit before may have been wrong. Failed counts those that could not read the data
	// plane.
	Same, Corrected, Failed uint64
}

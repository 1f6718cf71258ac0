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
	// is called when the reading may have changed. It must not block, and may be called before
	// Watch returns. Readings are true of every worker of the data plane: where workers follow one
	// after the other, Removed is read when the last one has followed.
	Watch(targets []netip.AddrPort, changed func()) Watch

	// Population names the agents that observe the same gateway: [Nodes] if each node has one of
	// them, or the name of the gateway of which this is a replica. Coordinators may ask a sample of
	// the nodes, and ask every replica of a gateway.
	Population() string

	// Absent reports whether there is no data plane that can be observed here. The agent then
	// declares that it cannot acknowledge.
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
	// State is Removed, and not Idle, from Counted on if there is a connection to wait for.
	// changed is called then, too. It is Unknown when the data plane could not be read. Unknown
	// says nothing about the targets. Kept is when it sends to a target because it has no other
	// one. Idle is a level: with another connection the state is Removed again.
	State health.State
	// Generation names the life of the data plane that was read. A reading of another generation
	// proves nothing.
	Generation string
	// Connections is how many were open or being opened when they were counted at Counted. It
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
}

// Looker is an [Observed] whose [health.Kept] depends on which other targets are watched.
type Looker interface {
	// Look is Watch for targets that may be other pods' by now: for the other watches they remain
	// endpoints to which the gateway can send.
	Look(targets []netip.AddrPort, changed func()) Watch
}

// Discoverer is an [Observed] that watches EndpointSlices itself, and may stop without a sign.
type Discoverer interface {
	// Discovered returns the addresses at which it has found a Service, namespace/name. It returns
	// false if the gateway does not look for it, or could not be read.
	Discovered(service string) (addresses []netip.Addr, ok bool)
}

// Cleaner is an [Observed] that keeps connections to pods which no longer exist.
type Cleaner interface {
	// Clean forgets the connections to targets. The agent calls it once nothing is sent to them and
	// no pod has their addresses.
	Clean(targets []netip.AddrPort) error
}

// Auditor is an [Observed] that follows changes, and compares what it has followed with the data
// plane from time to time.
type Auditor interface {
	Audits() Audits
}

// Audits counts comparisons of what an [Auditor] has followed with the data plane.
type Audits struct {
	// Same found no difference. Corrected found one: readings since the last audit may have been
	// wrong. Failed could not read the data plane.
	Same, Corrected, Failed uint64
}

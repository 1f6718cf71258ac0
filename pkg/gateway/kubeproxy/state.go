package kubeproxy

import (
	"log/slog"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

type (
	// State is what the kernel does with the targets of a Watch. Unknown is the state at the start,
	// after an overrun, and when the rules were deleted. Kept is also the state before kube-proxy
	// has written that there is another endpoint: the caller must know from EndpointSlices whether
	// there is one.
	State = health.State
	// Reading is what is known of the targets of a Watch. A connection that its client keeps from
	// one request to the next is among Connections, but is waited for only until a moment without
	// packets: 40 ms if requests were seen to follow each other, else 1 s, and in the former case
	// for 1 s at most. NoConnections reports that two counts in a row found no connection to wait
	// for. In Routing connections are counted every second or less often, in Kept ten times a
	// second. Since is when the end of the commit was read.
	Reading = gateway.Reading
	// Audits counts comparisons of what an Observer has followed with the kernel's tables.
	Audits = gateway.Audits
)

// The states of [health.State].
const (
	Unknown = health.Unknown
	Routing = health.Routing
	Kept    = health.Kept
	Removed = health.Removed
	Idle    = health.Idle
)

// Options say what an Observer does.
type Options struct {
	// Log gets a line when reading begins and fails. None is no log.
	Log *slog.Logger
	// NetNS is an open file of the network namespace to observe; 0 is that of this process. In
	// another one the legacy iptables are not seen.
	NetNS int
}

package kubeproxy

import (
	"fmt"
	"log/slog"
	"time"
)

// State is what the kernel does with the targets of a Watch.
type State uint8

const (
	// Unknown is when the kernel's rules are not known, or kube-proxy has not written them: at the start, after an overrun, and
	// when they were deleted. It says nothing about the targets, least of all that they are let go of.
	Unknown State = iota
	// Routing is when the kernel sends new connections to a target, and to others.
	Routing
	// Kept is when it sends to a target, and wherever it does so to nobody but targets of open watches: kube-proxy sends to
	// terminating endpoints where no other is left (KEP-1669). It is also what one sees before kube-proxy has written down that there is
	// another endpoint: who asks must know from EndpointSlices whether there is one.
	Kept
	// Removed is when no rule sends new connections to any target.
	Removed
	// Idle is Removed, and no connection to any target is open or being opened but those that their clients keep, see Reading. It is a
	// level: when another connection comes, the state is Removed again.
	Idle
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case Unknown:
		return "Unknown"
	case Routing:
		return "Routing"
	case Kept:
		return "Kept"
	case Removed:
		return "Removed"
	case Idle:
		return "Idle"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Reading is what is known of the targets of a Watch.
type Reading struct {
	State State
	// Generation is of the kernel's tables as a whole and of this reader's life. What was read in another one proves nothing.
	Generation string
	// Connections is how many connections to the targets are open or being opened, as last counted at Counted in this state. A
	// connection that its client keeps from one request to the next is among them, but is waited for only until a moment without
	// packets: 40 ms if requests were seen to follow each other, else 1 s, and in the former case for 1 s at most. Quiet says that
	// two counts in a row found no connection to wait for, as in state Idle. In Routing it is counted every second or less often, in
	// Kept ten times a second.
	Connections int
	Counted     time.Time
	Quiet       bool
	// Since is when State was entered, as far as the kernel's notifications tell: when the end of the commit was read.
	Since time.Time
}

// Audits counts comparisons of what an Observer has followed with the kernel's tables.
type Audits struct {
	// Same found no difference. Corrected found one: readings since the last audit may have been wrong. Failed could not
	// read the tables.
	Same, Corrected, Failed uint64
}

// Family is an address family.
type Family uint8

// The address families that kube-proxy serves.
const (
	IPv4 Family = 2  // NFPROTO_IPV4
	IPv6 Family = 10 // NFPROTO_IPV6
)

// Options say what an Observer does.
type Options struct {
	// Log gets a line when reading begins and fails. None is no log.
	Log *slog.Logger
	// Families are those to follow; none is both. Targets of another one stay Unknown.
	Families []Family
	// NetNS is an open file of the network namespace to observe; 0 is that of this process. In another one the legacy iptables are not
	// seen.
	NetNS int
}

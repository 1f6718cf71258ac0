// Package target has the types that health, the gateways and the ledger share: a pod's UID, and the
// states of a pod in a gateway, from Unknown to Idle.
package target

import (
	"fmt"
	"slices"
)

// UID is the UID of a pod. The same address of another pod is another target.
type UID string

// State is what a gateway was seen to do with a pod.
type State uint8

const (
	// Unknown is the zero value: nothing was read, or what was read is no longer evidence.
	Unknown State = iota
	// Routing: new requests may still be sent to the pod.
	Routing
	// Kept: in at least one Service the pod is the last target that the gateway routes to. It stays
	// routed there until the gateway routes to another one.
	Kept
	// Removed: no request that reaches any process of the gateway from now on is sent to the pod.
	Removed
	// Idle: Removed, and no request or connection is queued, retrying or in flight to the pod. A
	// keep-alive connection without a request does not count, if the gateway can distinguish it.
	// Idle may become Removed again, for example when another connection arrives.
	Idle
)

var names = []string{"unknown", "routing", "kept", "removed", "idle"}

// String prints the state as it goes over the wire.
func (s State) String() string { return Name(s, names...) }

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText accepts the names of states and refuses others by name.
func (s *State) UnmarshalText(text []byte) error { return Parse(s, "state", names, Unknown, text) }

// Name returns the name of e. names are those of all values, beginning with the zero value.
func Name[E ~uint8](e E, names ...string) string {
	if int(e) < len(names) {
		return names[e]
	}
	return fmt.Sprintf("%s(%d)", names[0], e)
}

// Parse sets e to the value whose name is text. Values below first are not accepted. The error
// contains what and the accepted names.
func Parse[E ~uint8](e *E, what string, names []string, first E, text []byte) error {
	n := slices.Index(names[first:], string(text))
	if n < 0 {
		return fmt.Errorf("%s %q is not one of %q", what, text, names[first:])
	}
	*e = first + E(n)
	return nil
}

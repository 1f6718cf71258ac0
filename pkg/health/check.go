package health

import (
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// Protocol is the protocol of a check.
type Protocol uint8

const (
	// ProtocolUnknown is the zero value: there is no check, nothing is probed.
	ProtocolUnknown Protocol = iota
	// HTTP sends a GET and judges the status.
	HTTP
	// HTTPS is HTTP over TLS.
	HTTPS
	// TCP opens a connection and closes it.
	TCP
	// GRPC calls grpc.health.v1.Health/Check over HTTP/2 without TLS.
	GRPC
)

// String prints the protocol in lower case.
func (p Protocol) String() string {
	return target.Name(p, "unknown", "http", "https", "tcp", "grpc")
}

// Statuses is the set of the HTTP statuses, 100 to 599, that count as a success.
type Statuses [8]uint64

// Add puts a status into the set. One outside of 100 to 599 is ignored.
func (s *Statuses) Add(status int) {
	if i := status - 100; i >= 0 && i < 500 {
		s[i/64] |= 1 << (i % 64)
	}
}

// Has reports whether status is in the set.
func (s *Statuses) Has(status int) bool {
	i := status - 100
	return i >= 0 && i < 500 && s[i/64]&(1<<(i%64)) != 0
}

// Check is how the targets of a pool are probed. Two checks are the same if they are equal by ==.
// The zero Check probes nothing.
type Check struct {
	Protocol Protocol
	// Path is the path that HTTP and HTTPS request. It begins with a slash.
	Path string
	// Host is the Host header. Empty: the target's address.
	Host string
	// Headers are further request headers, each "Name: value\r\n", sorted. User-Agent and Accept
	// replace those of the agent.
	Headers string
	// ServerName is the name that HTTPS sends as SNI and verifies. Empty: Host without its port, or
	// the target's address.
	ServerName string
	// Verify: the certificate of HTTPS is verified, against the system's roots.
	Verify bool
	// Service is the name that GRPC asks about. Empty: the server as a whole.
	Service string
	// Statuses are the HTTP statuses that count as a success. Every other status is an HTTPFailure.
	Statuses Statuses
	// Port is probed instead of the target's own. 0: the target's own.
	Port uint16
	// Interval is the time from one probe of a target to the next. Timeout bounds one probe, and is
	// at most Interval.
	Interval, Timeout time.Duration
	// Thresholds turn outcomes into verdicts.
	Thresholds Thresholds
}

// Thresholds are how many outcomes of one kind in a row change a verdict. They mean the same as in
// lua-resty-healthcheck: a success resets all counters of failures, and a failure resets that of
// successes. 0: outcomes of this kind are not counted.
type Thresholds struct {
	Successes, HTTPFailures, TCPFailures, Timeouts uint8
}

// OutcomeKind is how one probe ended.
type OutcomeKind uint8

const (
	// OutcomeUnknown is the zero value: nothing is known, and nothing counted.
	OutcomeUnknown OutcomeKind = iota
	// Success is an answer as expected.
	Success
	// HTTPFailure is an answer that was not expected: an HTTP status, a gRPC status or a serving
	// status.
	HTTPFailure
	// TCPFailure is a connection that could not be opened, or broke before the answer.
	TCPFailure
	// Timeout is no answer within the check's timeout.
	Timeout
)

// String prints the kind in lower case.
func (k OutcomeKind) String() string {
	return target.Name(k, "unknown", "success", "http failure", "tcp failure", "timeout")
}

// Outcome is the result of one probe. Code has the detail: the status of Success and HTTPFailure,
// or the errno of the other kinds. 0: there is none.
type Outcome struct {
	Kind OutcomeKind
	Code uint16
}

// String prints the outcome, as "http failure: 503" or "tcp failure: connection
// refused".
func (o Outcome) String() string {
	switch {
	case o.Code == 0:
		return o.Kind.String()
	case o.Kind == TCPFailure:
		return fmt.Sprintf("%s: %s", o.Kind, syscall.Errno(o.Code))
	default:
		return o.Kind.String() + ": " + strconv.Itoa(int(o.Code))
	}
}

// Job is one probe that is due.
type Job struct {
	Key   Key
	Check *Check
	// Due is when it should begin.
	Due time.Time
	// Silent reports whether the last probe of the target ended by Timeout.
	Silent bool
	// Ticket identifies this probe in [Set.Report]: an outcome changes nothing after its target has
	// left or its check has changed.
	Ticket uint64
}

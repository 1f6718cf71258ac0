package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
)

// Kind says how a request failed. A response with a status other than 2xx has the kind "status-"
// and the code.
type Kind string

// The kinds of failures without a status.
const (
	Refused     Kind = "refused"     // no process listens there, or a firewall says so
	Reset       Kind = "reset"       // RST, at any time after the connection was attempted
	EOF         Kind = "eof"         // closed before the end of the response's header
	Timeout     Kind = "timeout"     // no connection or no complete response within Options.Timeout
	Body        Kind = "body"        // 2xx, but the body ended early, has no end, or is not WantBody
	Unreachable Kind = "unreachable" // no route to the host or network
	Protocol    Kind = "protocol"    // not HTTP/1.1
	// Local is this machine's fault: no port, no file descriptor, no memory, no such source address
	Local   Kind = "local"
	Unknown Kind = "unknown" // none of these; the text of the failure says more
)

type statusError int

func (s statusError) Error() string { return "status " + strconv.Itoa(int(s)) }

var (
	errBody     = errors.New("incomplete or wrong body")
	errProtocol = errors.New("not HTTP")
)

// kindOf returns the kind of err, which is not nil.
func kindOf(err error) Kind {
	var status statusError
	switch {
	case errors.As(err, &status):
		return Kind(fmt.Sprintf("status-%d", int(status)))
	case errors.Is(err, errBody):
		return Body
	case errors.Is(err, errProtocol):
		return Protocol
	case isTimeout(err):
		return Timeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case isAny(err, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE):
		return Reset
	case isAny(err, syscall.EHOSTUNREACH, syscall.ENETUNREACH):
		return Unreachable
	case isAny(err, syscall.EADDRNOTAVAIL, syscall.EADDRINUSE, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS,
		syscall.ENOMEM):
		return Local
	case isAny(err, io.EOF, io.ErrUnexpectedEOF):
		return EOF
	}
	return Unknown
}

func isTimeout(err error) bool {
	return isAny(err, os.ErrDeadlineExceeded, context.DeadlineExceeded, syscall.ETIMEDOUT)
}

// isNetwork reports whether err came from the connection rather than from the parser above it.
func isNetwork(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || isAny(err, io.EOF, io.ErrUnexpectedEOF)
}

func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}

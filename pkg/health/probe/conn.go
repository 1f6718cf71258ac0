package probe

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// dialer opens the connections of probes, which are too short for TCP keep-alive.
var dialer = net.Dialer{KeepAlive: -1, Control: func(_, _ string, c syscall.RawConn) error {
	// Delay the acknowledgement of SYN+ACK until the request or, in a TCP check, the RST. If that
	// fails, the probe takes one more packet.
	return c.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_QUICKACK, 0)
	})
}}

// dial opens a connection that sends an RST when it is closed.
func dial(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	nc, err := dialer.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	c := nc.(*net.TCPConn)
	_ = c.SetLinger(0) // if that fails it ends by FIN
	return c, nil
}

func address(job *health.Job) netip.AddrPort {
	addr := job.Key.Target.Addr
	port := addr.Port()
	if job.Check.Port != 0 {
		port = job.Check.Port
	}
	return netip.AddrPortFrom(addr.Addr().Unmap(), port)
}

// host returns the Host header of a job's probe, which is :authority for gRPC.
func host(job *health.Job) string {
	if job.Check.Host != "" {
		return job.Check.Host
	}
	return address(job).String()
}

func failure(err error) health.Outcome {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return health.Outcome{Kind: health.Timeout}
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return broken(errno)
	}
	// Closed before the answer, or a failed TLS handshake.
	return health.Outcome{Kind: health.TCPFailure}
}

// broken converts an errno to an outcome. A lack of resources or permission on this machine is
// [health.OutcomeUnknown].
func broken(errno syscall.Errno) health.Outcome {
	kind := health.TCPFailure
	switch errno {
	case syscall.ETIMEDOUT:
		kind = health.Timeout
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EADDRNOTAVAIL, syscall.EACCES,
		syscall.EPERM,
		syscall.EAFNOSUPPORT, syscall.EINVAL:
		kind = health.OutcomeUnknown
	}
	return health.Outcome{Kind: kind, Code: uint16(errno)}
}

package probe

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// tlsConn is a connection of HTTPS between two probes.
type tlsConn struct {
	*tls.Conn
}

// abort closes the connection by RST, without telling TLS: the answer was read, and nobody waits for anything more.
func (c *tlsConn) abort() { c.NetConn().Close() }

// probeTLS carries out the HTTPS probe job, on idle if that is not nil, and returns the connection if it can be used again. The end of ctx
// ends it; what it returns then means nothing.
func (r *Runner) probeTLS(ctx context.Context, job *health.Job, idle *tlsConn) (health.Outcome, *tlsConn) {
	if idle != nil {
		outcome, answered, again := exchangeTLS(ctx, job, idle)
		if answered {
			return outcome, again
		}
		// The backend closed it while nobody looked. That is its right.
	}
	conn, outcome := r.dialTLS(ctx, job)
	if conn == nil {
		return outcome, nil
	}
	outcome, _, again := exchangeTLS(ctx, job, conn)
	return outcome, again
}

func (r *Runner) dialTLS(ctx context.Context, job *health.Job) (*tlsConn, health.Outcome) {
	// Keep-alive probes of TCP would outlive no probe.
	d := net.Dialer{KeepAlive: -1}
	addr := address(job)
	raw, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, failure(err)
	}
	if t, ok := raw.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // at worst it ends by FIN
	}
	name := job.Check.ServerName
	if name == "" {
		name = job.Check.Host
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
	}
	if name == "" {
		name = addr.Addr().String()
	}
	conn := tls.Client(raw, &tls.Config{
		ServerName:         name,
		RootCAs:            r.Roots,
		InsecureSkipVerify: !job.Check.Verify,
		NextProtos:         []string{"http/1.1"},
	})
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, failure(err)
	}
	return &tlsConn{conn}, health.Outcome{}
}

// exchangeTLS sends the request and reads the answer. answered says that at least one byte of it came, or that time is up: to try again
// on a new connection would be no use. again is conn if it can be used again; else it was closed.
func exchangeTLS(ctx context.Context, job *health.Job, conn *tlsConn) (outcome health.Outcome, answered bool, again *tlsConn) {
	stop := context.AfterFunc(ctx, func() { _ = conn.NetConn().SetDeadline(time.Unix(1, 0)) })
	defer func() {
		// Once it fired, a later deadline would race with it.
		if again != nil && (!stop() || conn.SetDeadline(time.Time{}) != nil) {
			again = nil
		}
		if again == nil {
			conn.abort()
		}
	}()
	if _, err := conn.Write(appendGet(nil, job)); err != nil {
		outcome = failure(err)
		return outcome, outcome.Kind == health.Timeout, nil
	}
	var resp response
	var buf [2048]byte
	for resp.phase != ended {
		n, err := conn.Read(buf[:])
		if malformed := resp.feed(buf[:n]); malformed != nil {
			return health.Outcome{Kind: health.HTTPFailure}, true, nil
		}
		if err != nil {
			if resp.status != 0 {
				break
			}
			outcome = failure(err)
			return outcome, resp.read > 0 || outcome.Kind == health.Timeout, nil
		}
	}
	if job.Check.KeepAlive && !resp.close && resp.phase == ended {
		again = conn
	}
	return judge(job.Check, resp.status), true, again
}

// failure turns an error of a connection into an outcome.
func failure(err error) health.Outcome {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return health.Outcome{Kind: health.Timeout}
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return broken(errno)
	}
	// Closed before the answer, or no TLS as the check wants it.
	return health.Outcome{Kind: health.TCPFailure}
}

// broken turns an errno into an outcome. What this machine lacks is not the target's fault.
func broken(errno syscall.Errno) health.Outcome {
	kind := health.TCPFailure
	switch errno {
	case syscall.ETIMEDOUT:
		kind = health.Timeout
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EADDRNOTAVAIL, syscall.EACCES, syscall.EPERM,
		syscall.EAFNOSUPPORT, syscall.EINVAL:
		kind = health.OutcomeUnknown
	}
	return health.Outcome{Kind: kind, Code: uint16(errno)}
}

package probe

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// maxAnswer bounds what is read of one answer, in bytes. A body that is longer does not change the
// outcome, and its connection is not used again.
const maxAnswer = 16 << 10

// malformed is the outcome of an answer that is none of its protocol.
var malformed = health.Outcome{Kind: health.HTTPFailure}

// conn is a connection of an HTTP or HTTPS check. Nil: none.
type conn struct {
	net.Conn // raw, or TLS on it
	raw      *net.TCPConn
	check    health.Check
}

// close closes the connection by RST, without telling TLS.
func (c *conn) close() {
	if c != nil {
		c.raw.Close()
	}
}

// get carries out an HTTP or HTTPS probe.
func (r *Runner) get(ctx context.Context, job *health.Job, kept *conn) (health.Outcome, *conn) {
	// What came on a kept connection since its last answer is no answer to this request.
	if kept != nil && arrived(kept.raw) {
		kept.close()
		kept = nil
	}
	if kept != nil {
		if outcome, answered, again := kept.exchange(ctx, job); answered {
			return outcome, again
		}
		// The backend closed it in the meantime. That is no failure.
	}
	c, err := r.connect(ctx, job)
	if err != nil {
		return failure(err), nil
	}
	outcome, _, again := c.exchange(ctx, job)
	return outcome, again
}

func (r *Runner) connect(ctx context.Context, job *health.Job) (*conn, error) {
	raw, err := dial(ctx, address(job))
	if err != nil {
		return nil, err
	}
	c := &conn{raw, raw, *job.Check}
	if job.Check.Protocol == health.HTTP {
		return c, nil
	}
	name := job.Check.ServerName
	if name == "" {
		name = host(job)
		if h, _, err := net.SplitHostPort(name); err == nil {
			name = h
		}
	}
	secure := tls.Client(raw, &tls.Config{
		ServerName: name, RootCAs: r.Roots, InsecureSkipVerify: !job.Check.Verify, NextProtos: []string{"http/1.1"},
	})
	if err := secure.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	c.Conn = secure
	return c, nil
}

// exchange sends the request and reads the answer. answered reports whether at least one byte of it
// came, or the time is up: another try on a new connection is of no use. again is c if the next
// probe can use it; else c is closed.
func (c *conn) exchange(ctx context.Context, job *health.Job) (outcome health.Outcome, answered bool, again *conn) {
	stop := context.AfterFunc(ctx, func() { _ = c.raw.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() || again == nil {
			again = nil
			c.close()
		}
	}()
	in := &answer{from: c}
	outcome, reusable := in.read(job, c)
	if reusable {
		again = c
	}
	return outcome, in.n > 0 || outcome.Kind == health.Timeout, again
}

// answer reads at most maxAnswer bytes, and remembers why there were no more.
type answer struct {
	from io.Reader
	n    int
	err  error
}

func (a *answer) Read(b []byte) (int, error) {
	if a.n >= maxAnswer {
		return 0, io.EOF
	}
	if a.err != nil {
		return 0, a.err // of a connection that was reset, the next error would be another
	}
	n, err := a.from.Read(b[:min(len(b), maxAnswer-a.n)])
	a.n, a.err = a.n+n, err
	return n, err
}

// read sends the request to out and judges the answer. It reports whether the connection can be
// used again.
func (a *answer) read(job *health.Job, out io.Writer) (health.Outcome, bool) {
	if _, err := out.Write(appendGet(nil, job)); err != nil {
		return failure(err), false
	}
	b := bufio.NewReaderSize(a, 1024)
	// A peer that speaks something else may never send the end of a line.
	if start, err := b.Peek(5); err == nil && string(start) != "HTTP/" {
		return malformed, false
	}
	for {
		resp, err := http.ReadResponse(b, nil)
		switch {
		case err != nil && a.err != nil:
			return failure(a.err), false
		case err != nil || resp.StatusCode < 100:
			return malformed, false
		case resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols:
			continue // the final answer follows
		}
		if !job.Check.KeepAlive {
			return judge(job.Check, resp.StatusCode), false
		}
		_, err = io.Copy(io.Discard, resp.Body)
		whole := err == nil && a.n < maxAnswer && b.Buffered() == 0
		return judge(job.Check, resp.StatusCode), whole && !resp.Close && resp.ProtoMinor > 0 &&
			resp.StatusCode >= 200
	}
}

// judge turns a status into an outcome.
func judge(c *health.Check, status int) health.Outcome {
	kind := health.HTTPFailure
	if c.Statuses.Has(status) {
		kind = health.Success
	}
	return health.Outcome{Kind: kind, Code: uint16(status)}
}

// appendGet appends the request of an HTTP or HTTPS check.
func appendGet(b []byte, job *health.Job) []byte {
	c := job.Check
	b = append(b, "GET "...)
	if c.Path == "" {
		b = append(b, '/')
	}
	b = append(b, c.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, host(job)...)
	b = append(b, "\r\n"...)
	if !has(c.Headers, "User-Agent") {
		b = append(b, "User-Agent: lameduck-health\r\n"...)
	}
	if !has(c.Headers, "Accept") {
		b = append(b, "Accept: */*\r\n"...)
	}
	if !c.KeepAlive {
		b = append(b, "Connection: close\r\n"...)
	}
	b = append(b, c.Headers...)
	return append(b, "\r\n"...)
}

// has reports whether headers, lines as of [health.Check], have one of that name.
func has(headers, name string) bool {
	for line := range strings.SplitSeq(headers, "\r\n") {
		if of, _, _ := strings.Cut(line, ":"); strings.EqualFold(of, name) {
			return true
		}
	}
	return false
}

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

// maxAnswer bounds the bytes that are read of one answer. Its body does not affect the outcome.
const maxAnswer = 16 << 10

// malformed is the outcome of an answer that violates the protocol.
var malformed = health.Outcome{Kind: health.HTTPFailure}

func (r *Runner) get(ctx context.Context, job *health.Job) health.Outcome {
	raw, err := dial(ctx, address(job))
	if err != nil {
		return failure(err)
	}
	defer raw.Close() // by RST, without telling TLS
	defer context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })()
	conn := net.Conn(raw)
	if job.Check.Protocol == health.HTTPS {
		secure := tls.Client(raw, r.tls(job))
		if err := secure.HandshakeContext(ctx); err != nil {
			return failure(err)
		}
		conn = secure
	}
	if _, err := conn.Write(appendGet(nil, job)); err != nil {
		return failure(err)
	}
	return (&answer{from: conn}).judge(job.Check)
}

func (r *Runner) tls(job *health.Job) *tls.Config {
	name := job.Check.ServerName
	if name == "" {
		name = host(job)
		if h, _, err := net.SplitHostPort(name); err == nil {
			name = h
		}
	}
	return &tls.Config{
		ServerName: name, RootCAs: r.Roots, InsecureSkipVerify: !job.Check.Verify, NextProtos: []string{"http/1.1"},
	}
}

// answer reads at most maxAnswer bytes, and remembers the error that ended it.
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
		return 0, a.err // after a reset, the next read would return another error
	}
	n, err := a.from.Read(b[:min(len(b), maxAnswer-a.n)])
	a.n, a.err = a.n+n, err
	return n, err
}

// judge reads the head of the answer and returns the outcome.
func (a *answer) judge(c *health.Check) health.Outcome {
	b := bufio.NewReaderSize(a, 1024)
	// A peer with another protocol may never end its first line.
	if start, err := b.Peek(5); err == nil && string(start) != "HTTP/" {
		return malformed
	}
	for {
		resp, err := http.ReadResponse(b, nil) //nolint:bodyclose // closing it would read on
		switch {
		case err != nil && a.err != nil:
			return failure(a.err)
		case err != nil || resp.StatusCode < 100:
			return malformed
		case resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols:
			continue // the final answer follows
		}
		kind := health.HTTPFailure
		if c.Statuses.Has(resp.StatusCode) {
			kind = health.Success
		}
		return health.Outcome{Kind: kind, Code: uint16(resp.StatusCode)}
	}
}

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
	b = append(b, "Connection: close\r\n"...)
	b = append(b, c.Headers...)
	return append(b, "\r\n"...)
}

// has reports whether headers contain one with that name. headers are lines as in [health.Check].
func has(headers, name string) bool {
	for line := range strings.SplitSeq(headers, "\r\n") {
		if of, _, _ := strings.Cut(line, ":"); strings.EqualFold(of, name) {
			return true
		}
	}
	return false
}

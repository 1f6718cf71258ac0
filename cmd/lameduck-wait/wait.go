package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/keys"
)

const (
	// dialTime bounds the time to connect to the agent. The agent is on the same node, so one that
	// has not accepted by then is not running.
	dialTime = 2 * time.Second
	// maxAnswer bounds the part of an answer that is read, in bytes: the kubelet's bound for a
	// body.
	maxAnswer = 10 << 10
	// maxRedirects is as the kubelet's.
	maxRedirects = 10
)

// errBound: the agent has not answered within the bound, for all of which the pod has waited.
var errBound = errors.New("no answer")

// wait asks the agent whether the pod may stop, and returns its answer. It returns an error if
// there is no answer within o.bound.
func wait(ctx context.Context, o options) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.bound, fmt.Errorf("%w within %s", errBound, o.bound))
	defer cancel()
	path := keys.WaitPath + url.PathEscape(o.id) + "?container=" + url.QueryEscape(o.container)
	answer, err := get(ctx, target{address: o.agent, host: o.agent, path: path}, nil, dialTime)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil && answer.code != "200" {
		err = fmt.Errorf("%s %s", answer.code, answer.text)
	}
	if err != nil {
		return "", fmt.Errorf("agent %s: %w", o.agent, err)
	}
	return answer.text, nil
}

// follow sends the container's own GET. It follows redirects on the same host, as the kubelet does.
func follow(ctx context.Context, to target, headers []string) error {
	for range maxRedirects {
		answer, err := get(ctx, to, headers, 0)
		if err != nil || !strings.HasPrefix(answer.code, "3") || answer.location == "" {
			return err
		}
		from, err := url.Parse("http://" + to.address + to.path)
		if err != nil {
			return err
		}
		next, err := from.Parse(answer.location)
		if err != nil {
			return fmt.Errorf("redirected: %w", err)
		}
		switch {
		case next.Hostname() != from.Hostname():
			return nil
		case next.Scheme != "http":
			return fmt.Errorf("redirected to %s, which lameduck-wait does not speak", next.Scheme)
		}
		to = target{address: net.JoinHostPort(next.Hostname(), cmp.Or(next.Port(), "80")), host: next.Host,
			path: next.RequestURI()}
	}
	return fmt.Errorf("redirected more than %d times", maxRedirects)
}

// answer is the response to a GET: its status, and of the agent's the first line of the body.
type answer struct {
	code, location, text string
	// length is that of the body, -1: to the end of the connection, unless it is chunked.
	length  int64
	chunked bool
}

// get sends one GET. If dial is not 0, it bounds the time to connect, and the answer is the
// agent's.
func get(ctx context.Context, to target, headers []string, dial time.Duration) (answer, error) {
	// The agent's address is never a DNS name, whose lookup could take longer than the rest. The
	// container's own hook may have one.
	dialer := net.Dialer{Timeout: dial}
	conn, err := dialer.DialContext(ctx, "tcp", to.address)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var request strings.Builder
	fmt.Fprintf(&request, "GET %s HTTP/1.1\r\n", to.path)
	for _, name := range []string{"Host: " + to.host, "User-Agent: lameduck-wait", "Connection: close"} {
		if !has(headers, name) {
			request.WriteString(name + "\r\n")
		}
	}
	for _, h := range headers {
		request.WriteString(h + "\r\n")
	}
	request.WriteString("\r\n")
	if _, err := conn.Write([]byte(request.String())); err != nil {
		return answer{}, err
	}
	r := bufio.NewReader(io.LimitReader(conn, 2*maxAnswer))
	a, err := read(r)
	switch {
	case err != nil:
	case dial > 0: // the agent sends no chunks
		text, _ := r.ReadString('\n')
		a.text = strings.TrimSpace(text)
	default:
		discard(r, a)
	}
	return a, err
}

func has(headers []string, line string) bool {
	name, _, _ := strings.Cut(line, ":")
	return slices.ContainsFunc(headers, func(h string) bool {
		other, _, _ := strings.Cut(h, ":")
		return strings.EqualFold(strings.TrimSpace(other), name)
	})
}

// read reads the headers of a response, and those of interim ones before it.
func read(r *bufio.Reader) (a answer, err error) {
	status, err := r.ReadString('\n')
	switch {
	case errors.Is(err, io.EOF):
		return a, errors.New("the connection was closed without an answer")
	case err != nil:
		return a, err
	}
	version, rest, ok := strings.Cut(strings.TrimSpace(status), " ")
	if !ok || !strings.HasPrefix(version, "HTTP/1.") {
		return a, fmt.Errorf("%.40q is not HTTP", status)
	}
	a.code, _, _ = strings.Cut(rest, " ")
	a.length = -1
	for {
		// The status is an answer, even if the rest cannot be read.
		line, err := r.ReadString('\n')
		if err != nil {
			return a, nil
		}
		name, value, isHeader := strings.Cut(strings.TrimSpace(line), ":")
		value = strings.TrimSpace(value)
		switch {
		case !isHeader && strings.HasPrefix(a.code, "1"):
			return read(r)
		case !isHeader:
			if a.code == "204" || a.code == "304" {
				a.length = 0
			}
			return a, nil
		case strings.EqualFold(name, "Location"):
			a.location = value
		case strings.EqualFold(name, "Transfer-Encoding"):
			a.chunked = true
		case strings.EqualFold(name, "Content-Length"):
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				a.length = n
			}
		}
	}
}

// discard reads a body as the kubelet does: to its end, unless it is longer than maxAnswer. Nothing
// else bounds it in time but the pod's grace period, as with a hook of the kubelet: an application
// may answer when it has finished, and how long that may take is not known here.
func discard(r *bufio.Reader, a answer) {
	for a.chunked {
		line, err := r.ReadString('\n')
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, bad := strconv.ParseUint(size, 16, 32)
		if err != nil || bad != nil || n == 0 {
			return
		}
		if _, err := io.CopyN(io.Discard, r, int64(n)+2); err != nil {
			return
		}
	}
	switch {
	case a.length > maxAnswer:
	case a.length >= 0:
		_, _ = io.CopyN(io.Discard, r, a.length)
	default:
		_, _ = io.Copy(io.Discard, r)
	}
}

// install copies the program to path atomically, because the init container may be killed and run
// again. Every user may execute the copy, because the user of the application's container is not
// known here.
func install(program, path string) error {
	// The name in args may be relative. os.Executable asks the kernel for the path.
	if self, err := os.Executable(); err == nil {
		program = self
	}
	in, err := os.Open(program)
	if err != nil {
		return fmt.Errorf("install: %w", err)
	}
	defer in.Close()
	out, err := os.CreateTemp(filepath.Dir(path), ".lameduck-wait-*")
	if err != nil {
		return fmt.Errorf("install: %w", err)
	}
	defer func() { _ = os.Remove(out.Name()) }() // which is gone by then if all went well
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Chmod(0o755), out.Close()); err != nil {
		return fmt.Errorf("install to %s: %w", path, err)
	}
	if err := os.Rename(out.Name(), path); err != nil {
		return fmt.Errorf("install: %w", err)
	}
	return nil
}

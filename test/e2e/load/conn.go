package load

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// conn is one connection to the target. It belongs to one request at a time, or to Load.idle.
type conn struct {
	net.Conn
	reader *bufio.Reader
	source netip.AddrPort
	used   bool // has carried a request before
}

// answer is what is known of a response, as far as it came.
type answer struct {
	pod      string // header Pod: the application's own word
	by       string // header Server-Pod, or Pod
	reusable bool
}

// connect returns an idle connection, or else a new one.
func (l *Load) connect(deadline time.Time) (*conn, error) {
	for {
		c := l.takeIdle()
		if c == nil {
			break
		}
		if l.opts.DropClosed && closedByPeer(c.Conn) {
			c.Close()
			l.mu.Lock()
			l.dropped++
			l.mu.Unlock()
			continue
		}
		return c, nil
	}
	l.mu.Lock()
	n := l.opened
	l.opened++
	l.mu.Unlock()
	d := net.Dialer{Deadline: deadline, KeepAlive: -1}
	if s := l.opts.SourceAddrs; len(s) > 0 {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(s[n%len(s)], 0))
		d.Control = choosePortLate
	}
	nc, err := d.Dial("tcp", l.address.String())
	if err != nil {
		return nil, err
	}
	source := nc.LocalAddr().(*net.TCPAddr).AddrPort()
	return &conn{Conn: nc, reader: bufio.NewReader(nc), source: source}, nil
}

func (l *Load) takeIdle() *conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 {
		return nil
	}
	c := l.idle[0]
	l.idle = l.idle[1:]
	return c
}

func (l *Load) release(c *conn, keep bool) {
	if !keep || c.SetDeadline(time.Time{}) != nil {
		c.Close()
		return
	}
	c.used = true
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, c)
}

// exchange writes the request once and reads one response. A nil error means 2xx and the complete
// body, equal to want unless that is nil. The error of another status does not depend on its body.
func (c *conn) exchange(deadline time.Time, wire []byte, req *http.Request, want []byte) (answer, error) {
	if err := c.SetDeadline(deadline); err != nil {
		return answer{}, fmt.Errorf("set deadline: %w", err)
	}
	if _, err := c.Write(wire); err != nil {
		return answer{}, fmt.Errorf("write request: %w", err)
	}
	resp, err := readResponse(c.reader, req)
	if err != nil {
		return answer{}, fmt.Errorf("read response header: %w", err)
	}
	defer resp.Body.Close()
	a := answer{pod: resp.Header.Get("Pod"), by: resp.Header.Get("Server-Pod")}
	if a.by == "" {
		a.by = a.pod
	}
	ok := resp.StatusCode/100 == 2
	if !ok {
		want = nil
	}
	err = readBody(resp, want)
	a.reusable = err == nil && !resp.Close && c.reader.Buffered() == 0
	if !ok {
		err = statusError(resp.StatusCode)
	}
	return a, err
}

// readResponse passes over informational responses, which are followed by the real one on the same
// connection.
func readResponse(r *bufio.Reader, req *http.Request) (*http.Response, error) {
	for {
		resp, err := http.ReadResponse(r, req)
		switch {
		case err != nil && !isNetwork(err):
			return nil, fmt.Errorf("%w: %w", errProtocol, err)
		case err != nil:
			return nil, err
		case resp.StatusCode/100 != 1 || resp.StatusCode == http.StatusSwitchingProtocols:
			return resp, nil
		}
	}
}

func readBody(resp *http.Response, want []byte) error {
	var got bytes.Buffer
	n, err := io.CopyN(&got, resp.Body, int64(len(want)))
	if err == nil || errors.Is(err, io.EOF) { // the rest, of which only the length matters
		var more int64
		more, err = io.Copy(io.Discard, resp.Body)
		n += more
	}
	endless := resp.ContentLength < 0 && len(resp.TransferEncoding) == 0 && resp.Body != http.NoBody
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: closed after %d bytes of %d (-1: chunked)", errBody, n, resp.ContentLength)
	case err != nil && !isNetwork(err): // of the chunked encoding
		return fmt.Errorf("%w: %w", errBody, err)
	case err != nil:
		return fmt.Errorf("read body: %w", err)
	case want != nil && (n != int64(len(want)) || !bytes.Equal(got.Bytes(), want)):
		return fmt.Errorf("%w: %d bytes that are not the %d expected ones", errBody, n, len(want))
	case want == nil && endless:
		return fmt.Errorf("%w: %d bytes of a body without a length: it may be incomplete", errBody, n)
	}
	return nil
}

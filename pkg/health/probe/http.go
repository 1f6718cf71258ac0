package probe

import (
	"bytes"
	"errors"
	"net/netip"
	"strconv"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// maxAnswer bounds what is read of one answer, in bytes. A health page that is longer is judged all the same, and its connection
	// closed.
	maxAnswer = 16 << 10
	// maxLine bounds what is kept of one line of an answer. Of a longer one the rest is skipped; no line that matters is as long.
	maxLine = 256
)

// errMalformed says that an answer is none of its protocol.
var errMalformed = errors.New("malformed answer")

// address returns where a job's probe goes.
func address(job *health.Job) netip.AddrPort {
	addr := job.Key.Target.Addr
	port := addr.Port()
	if job.Check.Port != 0 {
		port = job.Check.Port
	}
	return netip.AddrPortFrom(addr.Addr().Unmap(), port)
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
	b = appendHost(b, job)
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

func appendHost(b []byte, job *health.Job) []byte {
	if job.Check.Host != "" {
		return append(b, job.Check.Host...)
	}
	return address(job).AppendTo(b)
}

// judge turns a status into an outcome.
func judge(c *health.Check, status int) health.Outcome {
	kind := health.HTTPFailure
	if c.Statuses.Has(status) {
		kind = health.Success
	}
	return health.Outcome{Kind: kind, Code: uint16(status)}
}

// phase is where in an answer a response stands.
type phase uint8

const (
	statusLine phase = iota
	headers
	fixedBody
	chunkSize
	chunkData
	chunkEnd
	trailers
	openBody
	ended
)

// response reads an HTTP/1.x answer as it comes, in pieces of any size, and keeps no more of it than the beginning of the present line. The
// zero value is ready.
type response struct {
	phase phase
	// status is final once it is not 0: what follows cannot change it.
	status int
	// close says that the connection cannot be used again: the backend wants it so, or where the answer ends is not certain.
	close bool

	interim  bool // the present status line is 1xx: another follows
	length   int64
	chunked  bool
	hasLen   bool
	left     int64
	read     int
	partial  [maxLine]byte
	nPartial int
}

// reset makes r as new. It spares clearing the buffer.
func (r *response) reset() {
	r.phase, r.status, r.close, r.interim = statusLine, 0, false, false
	r.length, r.chunked, r.hasLen, r.left, r.read, r.nPartial = 0, false, false, 0, 0, 0
}

// feed takes in the next piece. An error says that this is no HTTP; it comes only before the status is known. After the end, or after
// maxAnswer bytes, r.phase is ended.
func (r *response) feed(b []byte) error {
	r.read += len(b)
	for len(b) > 0 && r.phase != ended {
		switch r.phase {
		case fixedBody, chunkData:
			n := min(r.left, int64(len(b)))
			b = b[n:]
			r.left -= n
			if r.left == 0 {
				if r.phase == fixedBody {
					r.finish(len(b))
				} else {
					r.phase = chunkEnd
				}
			}
		case openBody:
			b = nil
		default:
			line, rest, whole := r.line(b)
			b = rest
			if !whole {
				// Whatever is not HTTP is found out by its first bytes: a peer that sends no line end is not waited for.
				if r.phase == statusLine && !plausible(line) {
					return errMalformed
				}
				continue
			}
			if err := r.take(line, len(b)); err != nil {
				return err
			}
		}
	}
	if r.read >= maxAnswer && r.phase != ended {
		if r.status == 0 {
			return errMalformed
		}
		r.close, r.phase = true, ended
	}
	return nil
}

// line returns the present line without its end, as far as it is known and at most maxLine of it, and what comes after it.
func (r *response) line(b []byte) (line, rest []byte, whole bool) {
	i := bytes.IndexByte(b, '\n')
	if i >= 0 && r.nPartial == 0 {
		return bytes.TrimSuffix(b[:min(i, maxLine)], []byte("\r")), b[i+1:], true
	}
	piece := b
	if i >= 0 {
		piece, rest = b[:i], b[i+1:]
	}
	r.nPartial += copy(r.partial[r.nPartial:], piece)
	line = r.partial[:r.nPartial]
	if i < 0 {
		return line, nil, false
	}
	r.nPartial = 0
	return bytes.TrimSuffix(line, []byte("\r")), rest, true
}

// take takes in one whole line; more bytes of this piece follow it.
func (r *response) take(line []byte, more int) error {
	switch r.phase {
	case statusLine:
		status, ok := parseStatusLine(line)
		if !ok {
			return errMalformed
		}
		// 101 would end HTTP here; nothing comes after it.
		r.interim = status < 200 && status != 101
		r.hasLen, r.chunked, r.length = false, false, 0
		if !r.interim {
			r.status = status
			r.close = line[7] == '0'
		}
		r.phase = headers
	case headers:
		if len(line) > 0 {
			r.header(line)
			return nil
		}
		r.body(more)
	case chunkSize:
		digits, _, _ := bytes.Cut(line, []byte(";"))
		size, err := strconv.ParseUint(string(bytes.TrimSpace(digits)), 16, 32)
		switch {
		case err != nil:
			r.close, r.phase = true, ended
		case size == 0:
			r.phase = trailers
		default:
			r.left, r.phase = int64(size), chunkData
		}
	case chunkEnd:
		if len(line) > 0 {
			r.close, r.phase = true, ended
			return nil
		}
		r.phase = chunkSize
	case trailers:
		if len(line) == 0 {
			r.finish(more)
		}
	}
	return nil
}

// body decides what follows the empty line after the headers.
func (r *response) body(more int) {
	switch {
	case r.interim:
		r.phase = statusLine
	case r.status == 204 || r.status == 304:
		r.finish(more)
	case r.status == 101:
		r.close = true
		r.finish(more)
	case r.chunked && r.hasLen:
		// Two ends: somebody may be smuggling.
		r.close, r.phase = true, openBody
	case r.chunked:
		r.phase = chunkSize
	case r.hasLen && r.length == 0:
		r.finish(more)
	case r.hasLen && r.length > maxAnswer:
		// Nobody will read all this.
		r.close, r.phase = true, ended
	case r.hasLen:
		r.left, r.phase = r.length, fixedBody
	default:
		r.close, r.phase = true, openBody
	}
}

// finish ends the answer. More bytes than the answer has are no good beginning for the next one.
func (r *response) finish(more int) {
	r.close = r.close || more > 0
	r.phase = ended
}

func (r *response) header(line []byte) {
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok || r.interim {
		return
	}
	value = bytes.TrimSpace(value)
	switch {
	case is(name, "content-length"):
		n, err := strconv.ParseUint(string(value), 10, 62)
		if err != nil || r.hasLen && int64(n) != r.length {
			r.close, n = true, maxAnswer+1
		}
		r.hasLen, r.length = true, int64(n)
	case is(name, "transfer-encoding"):
		r.chunked = is(value, "chunked")
		if !r.chunked {
			r.close = true
		}
	case is(name, "connection"):
		for token := range bytes.SplitSeq(value, []byte(",")) {
			// HTTP/1.0 with keep-alive is closed all the same: it is simple, and rare.
			if is(bytes.TrimSpace(token), "close") {
				r.close = true
			}
		}
	}
}

// is compares without regard to case, and without making anything.
func is(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// plausible reports whether b can be the beginning of a status line.
func plausible(b []byte) bool {
	const version = "HTTP/1."
	n := min(len(b), len(version))
	return string(b[:n]) == version[:n]
}

// parseStatusLine reads "HTTP/1.x SSS reason".
func parseStatusLine(b []byte) (int, bool) {
	if len(b) < len("HTTP/1.1 200") || !plausible(b) || b[7] < '0' || b[7] > '9' || b[8] != ' ' {
		return 0, false
	}
	status := 0
	for _, c := range b[9:12] {
		if c < '0' || c > '9' {
			return 0, false
		}
		status = status*10 + int(c-'0')
	}
	if len(b) > 12 && b[12] != ' ' || status < 100 {
		return 0, false
	}
	return status, true
}

package haproxy

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

const (
	// maxCommand bounds a command, in bytes. It is well below the default capacity of HAProxy's
	// buffer (tune.bufsize 16384 minus tune.maxrewrite). HAProxy does not refuse a longer line: it
	// prints its help instead.
	maxCommand = 8192
	// maxAnswer bounds one answer, in bytes. A longer one is an error.
	maxAnswer = 64 << 20
	// lateFor is how long a command without an answer may still be carried out once HAProxy answers
	// others: a worker of HAProxy 2.6 carries out the master's commands in any of its threads, so
	// that a later one may be first. A thread may get no CPU time for longer, while others do.
	lateFor = 5 * time.Second
	// noWorker begins the master's answer for a worker that has ended or, since 3.1, still parses.
	noWorker = "Can't find the target PID"
)

// cli sends commands to the master socket, each on a new connection. The master passes one command
// to the worker and then closes the session. The end of file delimits the answer, after cli has
// half-closed the connection. Prompt mode would save a third of the 0.1 ms, but it delimits answers
// only by a prompt, which a server's description may contain too.
type cli struct {
	path    string
	timeout time.Duration
}

// do sends one command to the worker with process ID pid, or to the master if pid is 0, and returns
// the unchanged answer. The error is nil only if the answer is complete. The answer may still be a
// refusal.
func (c *cli) do(ctx context.Context, pid int, command string) (string, error) {
	fail := func(k kind, text string, err error) (string, error) {
		// The connection has the context's deadline. Its timeout may come slightly before the
		// context's.
		if ctxErr := ctx.Err(); ctxErr != nil {
			k, err = kindTimeout, ctxErr
		} else if k == kindTimeout {
			err = context.DeadlineExceeded
		}
		return "", &failure{Command: command, Process: pid, Kind: k, Text: shorten(text), Err: err}
	}
	line := command + "\n"
	if pid != 0 {
		line = "@!" + strconv.Itoa(pid) + " " + line
	}
	if len(line) > maxCommand {
		return fail(kindTooLong, strconv.Itoa(len(line))+" bytes", nil)
	}
	if strings.ContainsAny(command, ";\n\r\\") || strings.Contains(command, "<<") {
		return fail(kindSyntax, "the command holds a separator", nil)
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()

	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.path)
	if err != nil {
		return fail(socketKind(err), "", err)
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return fail(kindIO, "", err)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()

	if _, err := io.WriteString(conn, line); err != nil {
		return fail(socketKind(err), "", err)
	}
	// The master keeps the connection open for more commands until our side is closed.
	if err := conn.(*net.UnixConn).CloseWrite(); err != nil {
		return fail(socketKind(err), "", err)
	}
	r := bufio.NewReader(io.LimitReader(conn, maxAnswer+1))
	// After this answer HAProxy 2.8 leaves the connection open if it wrote before we half-closed.
	if begin, _ := r.Peek(len(noWorker)); string(begin) == noWorker {
		return fail(kindGone, noWorker, nil)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return fail(socketKind(err), string(b), err)
	}
	if len(b) > maxAnswer {
		return fail(kindMalformed, strconv.Itoa(len(b))+" bytes", nil)
	}
	answer := string(b)
	switch {
	case strings.HasSuffix(answer, "Can't connect to the target CLI!\n"):
		// The master appends this to what has come so far if the worker ends while it answers.
		return fail(kindGone, answer, nil)
	case answer == "" || !strings.HasSuffix(answer, "\n"):
		return fail(kindTruncated, answer, nil)
	}
	return answer, nil
}

// change sends a command that modifies HAProxy. want is the answer on success, without surrounding
// white space. Any other answer is an error, but warnings may precede want.
func (c *cli) change(ctx context.Context, pid int, command, want string) error {
	answer, err := c.do(ctx, pid, command)
	if errors.Is(err, kindTimeout) || errors.Is(err, kindTruncated) || errors.Is(err, kindIO) {
		return &gateway.Unanswered{For: lateFor, Err: err}
	}
	if err != nil {
		return err
	}
	text := strings.TrimSpace(stripSeverity(answer))
	if text == want {
		return nil
	}
	// Warnings about the definition come before the message of success.
	if want != "" && strings.HasSuffix(text, "\n"+want) {
		return nil
	}
	return &failure{Command: command, Process: pid, Kind: classify(answer), Text: shorten(answer)}
}

// table sends a command whose answer is a listing, and returns the listing without the empty line
// at its end. It fails if the answer does not begin with begin, or lacks the empty line.
func (c *cli) table(ctx context.Context, pid int, command, begin string) (string, error) {
	answer, err := c.do(ctx, pid, command)
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(answer, begin) {
		return "", &failure{Command: command, Process: pid, Kind: classify(answer), Text: shorten(answer)}
	}
	if !strings.HasSuffix(answer, "\n\n") {
		return "", &failure{Command: command, Process: pid, Kind: kindTruncated,
			Text: strconv.Itoa(len(answer)) + " bytes"}
	}
	return strings.TrimSuffix(answer, "\n"), nil
}

func socketKind(err error) kind {
	var ne net.Error
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return kindNoSocket
	case errors.Is(err, syscall.ECONNREFUSED):
		return kindNotListening
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.As(err, &ne) &&
		ne.Timeout():
		return kindTimeout
	case errors.Is(err, syscall.EAGAIN):
		// A unix socket whose backlog is full.
		return kindTimeout
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.ErrUnexpectedEOF):
		return kindTruncated
	default:
		return kindIO
	}
}

package haproxy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// A kind classifies a refusal or a failure: errors.Is(err, kindNoServer) reports whether err is of
// that kind. Its text gives the meaning, and the remedy in parentheses.
type kind string

const (
	kindUnknown       kind = "unknown answer (this version of HAProxy may be newer than the agent knows)"
	kindNoBackend     kind = "no such backend (HAProxy must load the servers file with an additional -f)"
	kindNoServer      kind = "no such server (something else deleted it)"
	kindExists        kind = "server exists (the name is taken in this backend)"
	kindStaticBalance kind = "static balance algorithm (servers at run time need roundrobin, leastconn, random or a " +
		"hash with hash-type consistent)"
	kindPermission     kind = "permission denied (start HAProxy with -S path,level,admin)"
	kindTooOld         kind = "unknown command (servers at run time need HAProxy 2.6 or newer)"
	kindSyntax         kind = "bad arguments (this is a bug in the agent)"
	kindRefused        kind = "server refused (check the backend's serverOptions)"
	kindNoCheck        kind = "server without check (it gets one when it is added again, or by a reload)"
	kindBusy           kind = "server busy (it is deleted when its requests and idle connections have ended)"
	kindNotMaintenance kind = "server not in maintenance (something else put it back into service)"
	kindReferenced     kind = "server referenced (a use-server, track or similar line names it)"
	kindStopping       kind = "worker is stopping (it takes no changes, and routes until its last client connection " +
		"closes; hard-stop-after bounds that)"
	kindGone         kind = "worker gone, or still reading its configuration"
	kindNoWorker     kind = "no worker takes new requests (HAProxy is starting or stopping; see its log)"
	kindTooLong      kind = "command too long (shorten serverOptions or raise tune.bufsize)"
	kindNoSocket     kind = "no socket (start HAProxy with -W -S and the configured path, in a shared directory)"
	kindNotListening kind = "socket refused (HAProxy is not running)"
	kindTimeout      kind = "no answer in time (the process hangs, is stopped or is overloaded)"
	kindTruncated    kind = "answer cut off (the process ended while it answered)"
	kindMalformed    kind = "answer not readable (this version of HAProxy may be newer than the agent knows)"
	kindIO           kind = "socket error (check the permissions of the socket)"
	kindConflict     kind = "address differs (it was changed at run time; remove the server and route it again)"
	kindChanging     kind = "workers keep changing (HAProxy is being reloaded again and again)"
	kindNoPool       kind = "no such pool (it is not among the configured backends)"
	kindBadKey       kind = "key not usable (a target is a pod UID and an address without a zone)"
	kindFile         kind = "servers file (the agent writes it and its directory, HAProxy reads it)"
)

// Error makes a kind usable with errors.Is.
func (k kind) Error() string { return "haproxy: " + string(k) }

// failure is one thing that HAProxy refused, or that failed on the way to it.
type failure struct {
	// Command is the command that was sent, without the prefix that names the process. For kinds
	// without a command it is the object.
	Command string
	// Process is the worker's pid, 0 for the master or none.
	Process int
	// Kind is the class of the error, by which callers decide.
	Kind kind
	// Text is HAProxy's answer, shortened, or what was found instead.
	Text string
	// Err is the wrapped error, such as a system error or the context's. Nil: there is none.
	Err error
}

// Error names the object, the cause and the way out.
func (e *failure) Error() string {
	var b strings.Builder
	b.WriteString("haproxy")
	if e.Process != 0 {
		fmt.Fprintf(&b, " worker %d", e.Process)
	}
	if e.Command != "" {
		fmt.Fprintf(&b, ": %s", e.Command)
	}
	b.WriteString(": " + string(e.Kind))
	if e.Text != "" {
		fmt.Fprintf(&b, ": %q", e.Text)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Is reports whether target is this error's kind.
func (e *failure) Is(target error) bool {
	k, ok := target.(kind)
	return ok && k == e.Kind
}

// Unwrap returns the wrapped error.
func (e *failure) Unwrap() error { return e.Err }

// lost reports whether the answer was not received completely. The command may or may not have been
// carried out, and an immediate retry on the same process would not help.
func lost(err error) bool {
	return slices.ContainsFunc([]kind{kindGone, kindNoSocket, kindNotListening, kindTimeout, kindTruncated, kindIO},
		func(k kind) bool { return errors.Is(err, k) })
}

// answered makes err a [gateway.Refused] if HAProxy has answered about the op. Otherwise the
// process was not reached, or could not take it.
func answered(op health.Op, err error) error {
	for _, k := range []kind{kindStopping, kindChanging, kindMalformed, kindFile} {
		if errors.Is(err, k) {
			return err
		}
	}
	if lost(err) {
		return err
	}
	return &gateway.Refused{Op: op, Err: err}
}

// gone reports whether the process ended before or while it answered. The list of processes will
// soon omit it.
func gone(err error) bool { return errors.Is(err, kindGone) || errors.Is(err, kindTruncated) }

// refusals are the beginnings of HAProxy's refusals, each with its kind. The table test has the
// complete texts, as HAProxy 2.6 wrote them.
var refusals = []struct {
	prefix string
	kind   kind
}{
	{"Can't find backend.", kindNoBackend},
	{"No such backend.", kindNoBackend},
	{"No such proxy.", kindNoBackend},
	{"No such server.", kindNoServer},
	{"Already exists a server with the same name", kindExists},
	{"Backend must use a dynamic load balancing", kindStaticBalance},
	{"Permission denied", kindPermission},
	{"This command is restricted to experimental mode", kindTooOld},
	{"This command is restricted to expert mode", kindTooOld},
	{"Unknown command", kindTooOld},
	{"The following commands are valid at this level", kindTooLong},
	{"Require 'backend/server'", kindSyntax},
	{"'set server <srv> state' expects", kindSyntax},
	{"usage: set server", kindSyntax},
	{"Server still has connections attached", kindBusy},
	{"Only servers in maintenance mode can be deleted", kindNotMaintenance},
	{"This server cannot be removed at runtime", kindReferenced},
	{"Proxy is disabled", kindStopping},
	{noWorker, kindGone},
	{"Can't connect to the target CLI", kindGone},
	{"unknown keyword", kindRefused},
	{"character '", kindRefused},
	{"invalid port", kindRefused},
	{"invalid address", kindRefused},
	{"Health check was not configured", kindNoCheck},
	{"MUX protocol is not usable", kindRefused},
	{"Cannot attach server", kindRefused},
}

// classify finds the kind of an answer that is not success.
func classify(answer string) kind {
	text := strings.TrimSpace(stripSeverity(answer))
	if text == "" {
		return kindUnknown
	}
	for _, r := range refusals {
		if strings.HasPrefix(text, r.prefix) {
			return r.kind
		}
	}
	if strings.Contains(text, "uses a non dynamic load balancing method") { // since HAProxy 3.4
		return kindStaticBalance
	}
	if strings.Contains(text, "is not accepted for dynamic server") ||
		strings.Contains(text, "is not supported for dynamic server") {
		return kindRefused
	}
	return kindUnknown
}

// stripSeverity drops the "[3]:" that a socket with severity-output puts before each message. The
// setting cannot be made through the master socket, because every command is a new session in the
// worker. But a stats line of the configuration may enable it.
func stripSeverity(s string) string {
	if !strings.HasPrefix(s, "[") {
		return s
	}
	head, rest, ok := strings.Cut(s[1:], "]:")
	if !ok || head == "" || len(head) > 7 {
		return s
	}
	return strings.TrimPrefix(rest, " ")
}

func shorten(s string) string {
	s = strings.TrimSpace(s)
	s, _, _ = strings.Cut(s, "\n")
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	return s
}

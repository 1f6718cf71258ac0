package haproxy

import (
	"errors"
	"fmt"
	"strings"
)

// Kind says what kind of refusal or failure an [Error] is. A Kind is itself an error, so that
// errors.Is(err, haproxy.KindNoServer) asks for it.
type Kind uint8

const (
	// KindUnknown is an answer this package has not been taught. It is never taken for success.
	KindUnknown Kind = iota
	// KindNoBackend: the process has no backend of that name.
	KindNoBackend
	// KindNoServer: the backend has no server of that name, or none at that address.
	KindNoServer
	// KindExists: the backend already has a server of that name.
	KindExists
	// KindStaticBalance: the backend's balance algorithm cannot take servers at run time.
	KindStaticBalance
	// KindPermission: the socket is not of level admin.
	KindPermission
	// KindExperimental: the command needs experimental mode: a HAProxy older than 2.6.
	KindExperimental
	// KindUnknownCommand: this HAProxy does not know the command.
	KindUnknownCommand
	// KindSyntax: HAProxy did not understand the command's arguments.
	KindSyntax
	// KindRefused: HAProxy refused the definition of the server.
	KindRefused
	// KindBusy: the server still has requests, or idle pooled connections.
	KindBusy
	// KindNotMaintenance: the server is not in maintenance and cannot be deleted.
	KindNotMaintenance
	// KindReferenced: the configuration refers to the server by name, it cannot be deleted.
	KindReferenced
	// KindStopping: the process has stopped its proxies and takes no more changes of servers.
	KindStopping
	// KindGone: the process ended between the list and the command.
	KindGone
	// KindTooLong: the command does not fit into HAProxy's buffer.
	KindTooLong
	// KindNoSocket: there is no socket at the path.
	KindNoSocket
	// KindNotListening: nobody accepts on the socket.
	KindNotListening
	// KindTimeout: no whole answer in time.
	KindTimeout
	// KindTruncated: the answer ended too early. Whether the command was carried out is not known.
	KindTruncated
	// KindMalformed: the answer is whole but is not what this package can read.
	KindMalformed
	// KindIO: any other error of the socket.
	KindIO
	// KindNotApplied: HAProxy accepted every command, yet reading back shows another state.
	KindNotApplied
	// KindConflict: a server with the key's name has another address.
	KindConflict
	// KindChanging: workers came and went during every attempt.
	KindChanging
	// KindNoPool: no such pool is configured.
	KindNoPool
	// KindBadKey: the key cannot be written as a server (strange UID, invalid address, IPv6 zone).
	KindBadKey
	// KindFile: the servers file could not be read or written.
	KindFile
)

var kinds = [...]struct{ name, hint string }{
	KindUnknown: {"unknown answer", "this version of HAProxy may be newer than the agent knows"},
	KindNoBackend: {"no such backend", "the backend must be in a file that HAProxy has loaded; for owned " +
		"backends load the servers file with an additional -f"},
	KindNoServer: {"no such server", "a pool that is not owned only takes targets whose address a server of " +
		"the configuration has"},
	KindExists: {"server exists", "the name is taken in this backend"},
	KindStaticBalance: {"static balance algorithm",
		"servers at run time need balance roundrobin, leastconn, random or a hash with hash-type consistent"},
	KindPermission:     {"permission denied", "start HAProxy's master socket with level admin: -S path,level,admin"},
	KindExperimental:   {"experimental mode needed", "servers at run time need HAProxy 2.6 or newer"},
	KindUnknownCommand: {"unknown command", "servers at run time need HAProxy 2.6 or newer"},
	KindSyntax:         {"bad arguments", "this is an error of the agent"},
	KindRefused: {"server refused", "check the backend's server options against those HAProxy allows for " +
		"servers added at run time"},
	KindBusy: {"server busy",
		"it is deleted once its requests have ended and its idle connections are closed"},
	KindNotMaintenance: {"server not in maintenance", "something else put it back into service"},
	KindReferenced: {"server referenced",
		"a use-server, track or similar line of the configuration names it; it stays in maintenance"},
	KindStopping: {"worker is stopping", "an old worker takes no changes; it routes what it routed until its " +
		"last client connection closes; hard-stop-after bounds that"},
	KindGone:    {"worker gone", "it is left out of the next attempt"},
	KindTooLong: {"command too long", "shorten the server options or raise tune.bufsize"},
	KindNoSocket: {"no socket", "start HAProxy with -W -S and the configured path, and share the directory with " +
		"the agent"},
	KindNotListening: {"socket refused", "HAProxy is not running"},
	KindTimeout:      {"no answer in time", "the process hangs, is stopped or is overloaded"},
	KindTruncated:    {"answer cut off", "the process ended while it answered; repeating is safe"},
	KindMalformed:    {"answer not readable", "this version of HAProxy may be newer than the agent knows"},
	KindIO:           {"socket error", "check the permissions of the socket"},
	KindNotApplied: {"change did not last",
		"another controller, an agent-check or a person works on the same server"},
	KindConflict: {"address differs",
		"somebody changed the server's address at run time; remove it and route it again"},
	KindChanging: {"workers keep changing", "HAProxy is being reloaded again and again"},
	KindNoPool:   {"no such pool", "it is not among the configured backends"},
	KindBadKey:   {"key not usable", "a target is a pod UID and an address without a zone"},
	KindFile:     {"servers file", "the agent needs to write the file's directory, HAProxy needs to read the file"},
}

// String prints the kind in a few words.
func (k Kind) String() string {
	if int(k) < len(kinds) {
		return kinds[k].name
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Error makes a Kind usable with errors.Is.
func (k Kind) Error() string { return "haproxy: " + k.String() }

// Error is one thing that HAProxy refused, or that failed on the way to it.
type Error struct {
	// Command is what was asked, without the prefix that names the process; for Kinds without a
	// command it is the object.
	Command string
	// Process is the worker's pid, 0 for the master or none.
	Process int
	// Kind is what to decide on.
	Kind Kind
	// Text is HAProxy's answer, shortened, or what was found instead.
	Text string
	// Err is the cause below, if any: a system error, a context's error.
	Err error
}

// Error names the object, the cause and the way out.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("haproxy")
	if e.Process != 0 {
		fmt.Fprintf(&b, " worker %d", e.Process)
	}
	if e.Command != "" {
		fmt.Fprintf(&b, ": %s", e.Command)
	}
	b.WriteString(": " + e.Kind.String())
	if e.Text != "" {
		fmt.Fprintf(&b, ": %q", e.Text)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	if int(e.Kind) < len(kinds) {
		fmt.Fprintf(&b, " (%s)", kinds[e.Kind].hint)
	}
	return b.String()
}

// Is reports whether target is this error's Kind.
func (e *Error) Is(target error) bool {
	k, ok := target.(Kind)
	return ok && k == e.Kind
}

// Unwrap returns the cause below.
func (e *Error) Unwrap() error { return e.Err }

// lost says that the answer did not come whole: the command may or may not have been carried out,
// and asking the same process again at once is of no use.
func lost(err error) bool {
	for _, k := range []Kind{KindGone, KindNoSocket, KindNotListening, KindTimeout, KindTruncated, KindIO} {
		if errors.Is(err, k) {
			return true
		}
	}
	return false
}

// gone says that the process ended before or while it answered: the list of processes will say so
// soon.
func gone(err error) bool { return errors.Is(err, KindGone) || errors.Is(err, KindTruncated) }

// refusals are HAProxy's answers that are not success, by what they begin with. The table test
// holds the whole texts, as HAProxy 2.6 wrote them.
var refusals = []struct {
	prefix string
	kind   Kind
}{
	{"Can't find backend.", KindNoBackend},
	{"No such backend.", KindNoBackend},
	{"No such proxy.", KindNoBackend},
	{"No such server.", KindNoServer},
	{"Already exists a server with the same name", KindExists},
	{"Backend must use a dynamic load balancing", KindStaticBalance},
	{"Permission denied", KindPermission},
	{"This command is restricted to experimental mode", KindExperimental},
	{"This command is restricted to expert mode", KindExperimental},
	{"Unknown command", KindUnknownCommand},
	{"The following commands are valid at this level", KindTooLong},
	{"Require 'backend/server'", KindSyntax},
	{"'set server <srv> state' expects", KindSyntax},
	{"usage: set server", KindSyntax},
	{"Server still has connections attached", KindBusy},
	{"Only servers in maintenance mode can be deleted", KindNotMaintenance},
	{"This server cannot be removed at runtime", KindReferenced},
	{"Proxy is disabled", KindStopping},
	{"Can't find the target PID", KindGone},
	{"Can't connect to the target CLI", KindGone},
	{"unknown keyword", KindRefused},
	{"character '", KindRefused},
	{"invalid port", KindRefused},
	{"invalid address", KindRefused},
	{"Health check was not configured", KindRefused},
	{"MUX protocol is not usable", KindRefused},
	{"Cannot attach server", KindRefused},
}

// classify finds the kind of an answer that is not success.
func classify(answer string) Kind {
	text := strings.TrimSpace(stripSeverity(answer))
	if text == "" {
		return KindUnknown
	}
	for _, r := range refusals {
		if strings.HasPrefix(text, r.prefix) {
			return r.kind
		}
	}
	if strings.Contains(text, "is not accepted for dynamic server") ||
		strings.Contains(text, "is not supported for dynamic server") {
		return KindRefused
	}
	return KindUnknown
}

// stripSeverity drops the "[3]:" that a socket with severity-output puts before each message.
// Through the master socket the setting cannot be made: every command is a new session in the
// worker. But a stats line of the configuration may have it on.
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

// shorten makes an answer fit for an error text.
func shorten(s string) string {
	s = strings.TrimSpace(s)
	s, _, _ = strings.Cut(s, "\n")
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	return s
}

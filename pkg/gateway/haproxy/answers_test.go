package haproxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// The answers of HAProxy 2.6.12, as it wrote them. 2.8.25 and 3.2.26 write the same, with another
// empty line after some. Those it cannot be brought to give here are from its source and say so.
var realAnswers = []struct {
	command, answer string
	want            kind
}{
	{"show servers state nosuch", "Can't find backend.\n\n", kindNoBackend},
	{"show stat nosuch 4 -1", "No such proxy.\n\n", kindNoBackend},
	{"add server nosuch/a 127.0.0.3:9001", "No such backend.\n", kindNoBackend},
	{"del server nosuch/a", "No such backend.\n", kindNoBackend},
	{"set server nosuch/a state ready", "No such backend.\n\n", kindNoBackend},
	{"set server agent/nosuch state ready", "No such server.\n\n", kindNoServer},
	{"del server agent/nosuch", "No such server.\n", kindNoServer},
	{"add server people/s0 127.0.0.3:9001", "Already exists a server with the same name in backend.\n\n", kindExists},
	{"add server fixed/a 127.0.0.3:9001", "Backend must use a dynamic load balancing to support dynamic servers.\n",
		kindStaticBalance},
	{"add server fixed/a 127.0.0.3:9001", "Backend does not support dynamic servers : backend 'fixed' uses a non " +
		"dynamic load balancing method.\n", kindStaticBalance}, // 3.4.7
	{"add server agent", "Require 'backend/server'.\n", kindSyntax},
	{"set server agent state ready", "Require 'backend/server'.\n\n", kindSyntax},
	{"set server people/s0 state foo", "'set server <srv> state' expects 'ready', 'drain' and 'maint'.\n\n",
		kindSyntax},
	{"set server people/s0 foo bar", "usage: set server <backend>/<server> addr | agent | agent-addr | agent-port | " +
		"agent-send | check-addr | check-port | fqdn | health | ssl | state | weight\n\n", kindSyntax},
	{"add server agent/a[b] 127.0.0.3:9001", "character '[' is not permitted in server name 'a[b]'.\n\n", kindRefused},
	{"add server agent/a 127.0.0.3:9001 bogus", "unknown keyword 'bogus'.\n\n", kindRefused},
	{"add server agent/a 127.0.0.3:9001 resolvers x", "'resolvers' option is not accepted for dynamic server\n\n",
		kindRefused},
	{"add server agent/a 127.0.0.3:99999", "invalid port '99999'\n\n", kindRefused},
	{"enable health people/s0", "Health check was not configured on this server, cannot enable.\n\n", kindNoCheck},
	{"del server people/s0", "Only servers in maintenance mode can be deleted.\n", kindNotMaintenance},
	{"del server people/used", "This server cannot be removed at runtime due to other configuration elements " +
		"pointing to it.\n", kindReferenced},
	{"bogus", "Unknown command, but maybe one of the following ones is a better match:\n", kindTooOld},

	{"", "Server still has connections attached to it, cannot remove it.\n", kindBusy},
	{"", "Proxy is disabled.\n\n", kindStopping},
	{"", "Can't find the target PID matching the prefix '@!99999'\n", kindGone},
	{"", "Permission denied\n\n", kindPermission},
	{"", "Permission denied!\n", kindPermission},
	{"", "Unknown command. Please enter one of the following commands only:\n", kindTooOld},
	{"", "The following commands are valid at this level:\n  @!<pid> : send a command to the <pid> process\n",
		kindTooLong},
	// from src/cli.c; HAProxy 2.4 and 2.5 for add server
	{"", "This command is restricted to experimental mode only.\n\n", kindTooOld},
	{"", "[3]: No such server.\n\n", kindNoServer}, // severity-output number
	{"", "something unknown\n", kindUnknown},
	{"", "\n", kindUnknown},
}

func TestClassify(t *testing.T) {
	for _, c := range realAnswers {
		if got := classify(c.answer); got != c.want {
			t.Errorf("%q is classified as %v, want %v", c.answer, got, c.want)
		}
	}
}

// This pins the table above to the HAProxy that is installed: a version with other words fails
// here.
func TestRealAnswers(t *testing.T) {
	p := newProxy(t, userFile+`
    use_backend fixed if FALSE
backend people
    use-server used if FALSE
    server s0 127.0.0.2:9001
    server used 127.0.0.2:9002
backend fixed
    balance static-rr
    server s0 127.0.0.2:9001
`, Backend{Backend: "agent"})
	p.gateway()
	p.start()
	w := p.worker()
	p.ask(w, "set server people/used state maint")
	known := map[string]bool{}
	for _, c := range realAnswers {
		known[c.command+"\n"+strings.TrimSpace(c.answer)] = true
	}
	for _, c := range realAnswers {
		if c.command == "" {
			continue
		}
		got := p.ask(w, c.command)
		if !known[c.command+"\n"+strings.TrimSpace(got)] &&
			!(c.want == kindTooOld && strings.HasPrefix(got, "Unknown command")) {
			t.Errorf("%s: HAProxy says %q, the table %q", c.command, got, c.answer)
		}
	}
	c := cli{path: p.socket, timeout: 20 * time.Second}
	for _, x := range []struct {
		pid           int
		command, want string
		kind          kind
	}{
		{w, "set server people/s0 state drain", "", ""},
		{w, "set server people/s0 state ready", "", ""},
		{w, "add server agent/a 127.0.0.3:9001", "New server registered.", ""},
		{w, "set server agent/a state maint", "", ""},
		{w, "del server agent/a", "Server deleted.", ""},
		{999999, "del server agent/a", "Server deleted.", kindGone},
		{w, "set server agent/a;b state maint", "", kindSyntax},
		{w, "add server agent/a 127.0.0.1:80 <<", "", kindSyntax},
		{w, strings.Repeat("x", maxCommand), "", kindTooLong},
	} {
		err := c.change(t.Context(), x.pid, x.command, x.want)
		if x.kind == "" && err != nil || x.kind != "" && !errors.Is(err, x.kind) {
			t.Errorf("%s: %v, want kind %v", shorten(x.command), err, x.kind)
		}
	}
	// Beyond our own limit, HAProxy shows its help instead of an error.
	if got := rawAsk(t, p.socket, "@!1 "+strings.Repeat("x", 40000)+"\n"); classify(got) != kindTooLong {
		t.Errorf("a line of 40 KB is answered with %q", shorten(got))
	}
}

func TestPermissionDenied(t *testing.T) {
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9001\n",
		Backend{Backend: "agent"})
	g := p.gateway()
	p.startWith(p.socket + ",level,operator")
	err := g.Apply(t.Context(), []health.Op{routed("agent", "u", "127.0.0.9:1")})
	if !errors.Is(err, kindPermission) {
		t.Errorf("on a socket of level operator: %v", err)
	}
}

// rawAsk sends bytes and returns what comes, without any of the checks.
func rawAsk(t *testing.T, socket, line string) string {
	t.Helper()
	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	go func() {
		io.WriteString(c, line)
		c.(*net.UnixConn).CloseWrite()
	}()
	b, _ := io.ReadAll(c)
	return string(b)
}

// A peer that is no HAProxy, or one that dies, is never taken for success.
func TestBrokenAnswers(t *testing.T) {
	for _, c := range []struct {
		name, answer string
		kind         kind
	}{
		{"nothing", "", kindTruncated},
		{"half a line", "1\n# be_id be_na", kindTruncated},
		{"no empty line at the end", "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state " +
			"srv_port\n2 b 1 s1 127.0.0.2 2 0 9001\n", kindTruncated},
		{"the worker died in the middle", "1\n# be_id be_name srv_id\nCan't connect to the target CLI!\n", kindGone},
		{"the worker is gone", "Can't find the target PID matching the prefix '@!7'\n", kindGone},
		{"a column is missing", "1\n# be_id be_name srv_id srv_name\n\n", kindMalformed},
		{"a row is short", "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_port\n2 b " +
			"1\n\n", kindMalformed},
		{"another version of the format", "2\n# be_id\n\n", kindUnknown},
		{"another program", "220 mail.example ESMTP\n", kindUnknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			socket := listenUnix(t, func(conn net.Conn) {
				io.ReadAll(conn)
				io.WriteString(conn, c.answer)
			})
			g := &Gateway{cli: cli{path: socket, timeout: 20 * time.Second}}
			if x, err := g.state(t.Context(), 7, "b"); !errors.Is(err, c.kind) {
				t.Errorf("%+v, %v; want kind %v", x, err, c.kind)
			}
		})
	}
	dir := shortDir(t)
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	for path, kind := range map[string]kind{filepath.Join(dir, "none"): kindNoSocket, stale: kindNotListening} {
		c := cli{path: path, timeout: 20 * time.Second}
		if _, err := c.do(t.Context(), 0, "show proc"); !errors.Is(err, kind) {
			t.Errorf("%s: %v, want kind %v", path, err, kind)
		}
	}
	open := listenUnix(t, func(conn net.Conn) { // as HAProxy 2.8 may
		io.WriteString(conn, "Can't find the target PID matching the prefix '@!7'\n")
		<-t.Context().Done()
	})
	c := cli{path: open, timeout: 10 * time.Second}
	if _, err := c.do(t.Context(), 7, "show info"); !errors.Is(err, kindGone) {
		t.Errorf("a worker that is gone, and an open connection: %v", err)
	}
	silent := listenUnix(t, func(conn net.Conn) {
		io.ReadAll(conn)
		<-t.Context().Done()
	})
	c = cli{path: silent, timeout: 50 * time.Millisecond}
	if _, err := c.do(t.Context(), 0, "show proc"); !errors.Is(err, kindTimeout) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

func TestErrorText(t *testing.T) {
	err := &failure{Command: "add server web/ld-u-10.0.0.1-80 10.0.0.1:80", Process: 7, Kind: kindStaticBalance,
		Text: "Backend must use a dynamic load balancing to support dynamic servers."}
	want := `haproxy worker 7: add server web/ld-u-10.0.0.1-80 10.0.0.1:80: static balance algorithm ` +
		`(servers at run time need roundrobin, leastconn, random or a hash with hash-type consistent): ` +
		`"Backend must use a dynamic load balancing to support dynamic servers."`
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
}

func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ld")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// listenUnix serves each connection to a unix socket with handle, until the test ends.
func listenUnix(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(shortDir(t), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				handle(conn)
			}()
		}
	}()
	return path
}

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

// The answers of HAProxy 2.6.12, as it wrote them. Those it cannot be brought to give here are from
// its source and say so.
var realAnswers = []struct {
	command, answer string
	want            Kind
}{
	{"show servers state nosuch", "Can't find backend.\n\n", KindNoBackend},
	{"show stat nosuch 4 -1", "No such proxy.\n\n", KindNoBackend},
	{"add server nosuch/a 127.0.0.3:9001", "No such backend.\n", KindNoBackend},
	{"del server nosuch/a", "No such backend.\n", KindNoBackend},
	{"set server nosuch/a state ready", "No such backend.\n\n", KindNoBackend},
	{"set server agent/nosuch state ready", "No such server.\n\n", KindNoServer},
	{"del server agent/nosuch", "No such server.\n", KindNoServer},
	{"add server people/s0 127.0.0.3:9001", "Already exists a server with the same name in backend.\n\n", KindExists},
	{"add server fixed/a 127.0.0.3:9001", "Backend must use a dynamic load balancing to support dynamic servers.\n",
		KindStaticBalance},
	{"add server agent", "Require 'backend/server'.\n", KindSyntax},
	{"set server agent state ready", "Require 'backend/server'.\n\n", KindSyntax},
	{"set server people/s0 state foo", "'set server <srv> state' expects 'ready', 'drain' and 'maint'.\n\n",
		KindSyntax},
	{"set server people/s0 foo bar", "usage: set server <backend>/<server> addr | agent | agent-addr | agent-port | " +
		"agent-send | check-addr | check-port | fqdn | health | ssl | state | weight\n\n", KindSyntax},
	{"add server agent/a[b] 127.0.0.3:9001", "character '[' is not permitted in server name 'a[b]'.\n\n", KindRefused},
	{"add server agent/a 127.0.0.3:9001 bogus", "unknown keyword 'bogus'.\n\n", KindRefused},
	{"add server agent/a 127.0.0.3:9001 cookie x", "'cookie' option is not accepted for dynamic server\n\n",
		KindRefused},
	{"add server agent/a 127.0.0.3:99999", "invalid port '99999'\n\n", KindRefused},
	{"enable health people/s0", "Health check was not configured on this server, cannot enable.\n\n", KindRefused},
	{"del server people/s0", "Only servers in maintenance mode can be deleted.\n", KindNotMaintenance},
	{"del server people/used", "This server cannot be removed at runtime due to other configuration elements " +
		"pointing to it.\n", KindReferenced},
	{"bogus", "Unknown command, but maybe one of the following ones is a better match:\n", KindUnknownCommand},

	{"", "Server still has connections attached to it, cannot remove it.\n", KindBusy},
	{"", "Proxy is disabled.\n\n", KindStopping},
	{"", "Can't find the target PID matching the prefix '@!99999'\n", KindGone},
	{"", "Permission denied\n\n", KindPermission},
	{"", "Permission denied!\n", KindPermission},
	{"", "Unknown command. Please enter one of the following commands only:\n", KindUnknownCommand},
	{"", "The following commands are valid at this level:\n  @!<pid> : send a command to the <pid> process\n",
		KindTooLong},
	// from src/cli.c; HAProxy 2.4 and 2.5 for add server
	{"", "This command is restricted to experimental mode only.\n\n", KindExperimental},
	{"", "[3]: No such server.\n\n", KindNoServer}, // severity-output number
	{"", "something nobody has seen\n", KindUnknown},
	{"", "\n", KindUnknown},
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
`, Backend{Pool: "owned", Backend: "agent", Owned: true})
	p.gateway()
	p.start()
	w := p.worker()
	p.ask(w, "set server people/used state maint")
	for _, c := range realAnswers {
		if c.command == "" {
			continue
		}
		got := p.ask(w, c.command)
		if got != c.answer && !(c.want == KindUnknownCommand && strings.HasPrefix(got, "Unknown command")) {
			t.Errorf("%s: HAProxy says %q, the table %q", c.command, got, c.answer)
		}
	}
	c := cli{path: p.socket, timeout: time.Second}
	for _, x := range []struct {
		pid           int
		command, want string
		kind          Kind
	}{
		{w, "set server people/s0 state drain", "", 0},
		{w, "set server people/s0 state ready", "", 0},
		{w, "add server agent/a 127.0.0.3:9001", "New server registered.", 0},
		{w, "set server agent/a state maint", "", 0},
		{w, "del server agent/a", "Server deleted.", 0},
		{999999, "del server agent/a", "Server deleted.", KindGone},
		{w, "set server agent/a;b state maint", "", KindSyntax},
		{w, "add server agent/a 127.0.0.1:80 <<", "", KindSyntax},
		{w, strings.Repeat("x", maxCommand), "", KindTooLong},
	} {
		err := c.change(t.Context(), x.pid, x.command, x.want)
		if x.kind == 0 && err != nil || x.kind != 0 && !errors.Is(err, x.kind) {
			t.Errorf("%s: %v, want kind %v", shorten(x.command), err, x.kind)
		}
	}
	// Beyond our own limit, HAProxy shows its help instead of an error.
	if got := rawAsk(t, p.socket, "@!1 "+strings.Repeat("x", 40000)+"\n"); classify(got) != KindTooLong {
		t.Errorf("a line of 40 KB is answered with %q", shorten(got))
	}
}

func TestPermissionDenied(t *testing.T) {
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9001\n",
		Backend{Pool: "owned", Backend: "agent", Owned: true}, Backend{Pool: "static", Backend: "people"})
	g := p.gateway()
	p.startWith(p.socket + ",level,operator")
	err := g.Apply(t.Context(), []health.Op{routed("owned", "u", "127.0.0.9:1")})
	if !errors.Is(err, KindPermission) {
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
	c.SetDeadline(time.Now().Add(5 * time.Second))
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
		kind         Kind
	}{
		{"nothing", "", KindTruncated},
		{"half a line", "1\n# be_id be_na", KindTruncated},
		{"no empty line at the end", "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state " +
			"srv_port\n2 b 1 s1 127.0.0.2 2 0 9001\n", KindTruncated},
		{"the worker died in the middle", "1\n# be_id be_name srv_id\nCan't connect to the target CLI!\n", KindGone},
		{"the worker is gone", "Can't find the target PID matching the prefix '@!7'\n", KindGone},
		{"a column is missing", "1\n# be_id be_name srv_id srv_name\n\n", KindMalformed},
		{"a row is short", "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_port\n2 b " +
			"1\n\n", KindMalformed},
		{"another version of the format", "2\n# be_id\n\n", KindUnknown},
		{"another program", "220 mail.example ESMTP\n", KindUnknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			socket := listenUnix(t, func(conn net.Conn) {
				io.ReadAll(conn)
				io.WriteString(conn, c.answer)
			})
			g := &Gateway{cli: cli{path: socket, timeout: time.Second}}
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
	for path, kind := range map[string]Kind{filepath.Join(dir, "none"): KindNoSocket, stale: KindNotListening} {
		c := cli{path: path, timeout: time.Second}
		if _, err := c.do(t.Context(), 0, "show proc"); !errors.Is(err, kind) {
			t.Errorf("%s: %v, want kind %v", path, err, kind)
		}
	}
	silent := listenUnix(t, func(conn net.Conn) {
		io.ReadAll(conn)
		<-t.Context().Done()
	})
	c := cli{path: silent, timeout: 50 * time.Millisecond}
	if _, err := c.do(t.Context(), 0, "show proc"); !errors.Is(err, KindTimeout) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

func TestErrorText(t *testing.T) {
	err := &Error{Command: "add server web/ld-u-10.0.0.1-80 10.0.0.1:80", Process: 7, Kind: KindStaticBalance,
		Text: "Backend must use a dynamic load balancing to support dynamic servers."}
	want := `haproxy worker 7: add server web/ld-u-10.0.0.1-80 10.0.0.1:80: static balance algorithm: "Backend must use a dynamic load balancing to support dynamic servers." (servers at run time need balance roundrobin, leastconn, random or a hash with hash-type consistent)`
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	for k := range kinds {
		if kinds[k].name == "" || kinds[k].hint == "" {
			t.Errorf("kind %d has no text", k)
		}
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

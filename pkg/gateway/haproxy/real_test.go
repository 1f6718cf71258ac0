package haproxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

func apply(t *testing.T, g *Gateway, ops ...health.Op) {
	t.Helper()
	if err := g.Apply(t.Context(), ops); err != nil {
		t.Fatal(err)
	}
}

func see(t *testing.T, g *Gateway, k health.Key) health.Seen {
	t.Helper()
	o, err := g.Observe(t.Context(), []health.Key{k})
	if err != nil {
		t.Fatal(err)
	}
	return o.Seen[k]
}

// The contract once more with every server option that changes how HAProxy treats servers added at
// run time.
func TestContractWithChecks(t *testing.T) {
	if testing.Short() {
		t.Skip("a second run of the contract")
	}
	gatewaytest.Run(t, func(t *testing.T) *gatewaytest.Harness {
		return harness(t, Backend{Backend: "agent",
			Lines:         []string{"balance leastconn", "option redispatch", "http-reuse always"},
			ServerOptions: "check inter 200ms maxconn 100 pool-purge-delay 500ms",
		})
	})
}

// HAProxy does not count a request for a server while it waits to try the same server again, up to
// a second, and it tries again although the server has been put into maintenance. The counts alone
// would say that the target is idle. Nor does the history of the server help: an operator may clear
// it at any time.
func TestRetryingRequestIsActive(t *testing.T) {
	for name, clears := range map[string]bool{"with its history": false, "with cleared counters": true} {
		t.Run(name, func(t *testing.T) { retryingRequest(t, clears) })
	}
}

func retryingRequest(t *testing.T, clears bool) {
	t.Parallel()
	p := newProxy(t, strings.Replace(userFile, "mode http\n", "mode http\n    retries 4\n",
		1)+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	// A port that nothing listens on.
	l, err := net.Listen("tcp", "127.0.0.9:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	op := routed("agent", "u", addr)
	apply(t, g, op)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := http.Get(p.url("agent", "/")); err == nil {
			resp.Body.Close()
		}
	}()
	ended := func(within time.Duration) bool {
		select {
		case <-done:
			return true
		case <-time.After(within):
			return false
		}
	}
	p.untilStream(op.Target)
	apply(t, g, removed("agent", "u", addr))
	name, err := serverName(op.Target)
	if err != nil {
		t.Fatal(err)
	}
	n, hidden := 0, 0
	for !ended(0) {
		if clears {
			p.ask(p.worker(), "clear counters all")
		}
		got := see(t, g, op.Key)
		x, err := g.state(t.Context(), p.worker(), "agent")
		if err != nil {
			t.Fatal(err)
		}
		counts, err := g.stat(t.Context(), p.worker(), "agent", x.id)
		if err != nil {
			t.Fatal(err)
		}
		// The answer may be on its way to the client.
		if got.Active == 0 && !ended(100*time.Millisecond) &&
			strings.Contains(p.ask(p.worker(), "show sess"), "srv="+name+" ") {
			t.Fatalf("after %d readings a request that tries again is not counted: %+v", n, got)
		}
		for _, c := range counts {
			if c.Current+c.Queued == 0 {
				hidden++
			}
		}
		n++
	}
	t.Logf("%d of %d readings of scur+qcur were zero while the request was waiting to try again", hidden, n)
	if hidden == 0 {
		t.Error("scur and qcur never were zero: this HAProxy counts requests that wait; the list of streams is not " +
			"needed")
	}
}

// An old worker cannot be changed. What it can still be brought decides whether a target is routed
// there.
func TestOldWorker(t *testing.T) {
	t.Parallel()
	target := startRaw(t, "127.0.0.21")
	tcp := filepath.Join(shortDir(t), "tcp.sock")
	p := newProxy(t, userFile+`
frontend tcp
    mode tcp
    bind `+tcp+`
    default_backend raw
backend raw
    mode tcp
    server s0 `+target.String()+`
backend people
    server s0 127.0.0.2:9
`, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	op, out := routed("agent", "u", target.String()), removed("agent", "u", target.String())
	apply(t, g, op)

	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		return c
	}
	// A connection with half a request: it will be routed when the other half comes.
	half := dial()
	io.WriteString(half, "GET / HTTP/1.1\r\nHo")
	// A tunnel: it will never bring another request.
	tunnel := dial()
	io.WriteString(tunnel, "GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
	if line, err := bufio.NewReader(tunnel).ReadString('\n'); err != nil || !strings.Contains(line, "101") {
		t.Fatalf("%q, %v", line, err)
	}
	// So is a connection in TCP mode, which ends with its server's.
	through, err := net.Dial("unix", tcp)
	if err != nil {
		t.Fatal(err)
	}
	defer through.Close()
	through.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(through, "GET /ws HTTP/1.1\r\nHost: a\r\n\r\n")
	if line, err := bufio.NewReader(through).ReadString('\n'); err != nil || !strings.Contains(line, "101") {
		t.Fatalf("%q, %v", line, err)
	}
	p.until("all are there", func() bool {
		in, err := g.info(t.Context(), p.worker())
		return err == nil && in.Clients == 3
	})
	p.reload()

	err = g.Apply(t.Context(), []health.Op{out})
	if !errors.Is(err, kindStopping) {
		t.Errorf("removing from an old worker with a half-sent request: %v", err)
	}
	if got := see(t, g, op.Key); !got.Routed || got.Active != 1 {
		t.Errorf("with a half-sent request in the old worker it is seen as %+v", got)
	}
	// And rightly so.
	io.WriteString(half, "st: a\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(half), nil)
	if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("X-Raw") != target.String() {
		t.Fatalf("%v, %v: the old worker did not route to the removed target; it is better than is believed of it",
			resp, err)
	}
	half.Close()
	p.until("only tunnels are left, one of them active here, which bring nothing new", func() bool {
		return see(t, g, op.Key) == health.Seen{Present: true, Missing: true, Active: 1}
	})
	// A worker that does not say so may still route. It does not keep the rest from being read.
	p.cfg.MasterSocket = listenUnix(t, func(conn net.Conn) {
		if cmd, err := io.ReadAll(conn); err == nil && strings.Contains(string(cmd), "show sess all") {
			io.WriteString(conn, "no\n")
		} else if err == nil {
			io.WriteString(conn, rawAsk(t, p.socket, string(cmd)))
		}
	})
	if got := see(t, p.gateway(), op.Key); got != (health.Seen{Present: true, Routed: true, Missing: true, Active: 1}) {
		t.Errorf("if the worker does not list its clients it is seen as %+v", got)
	}
	if err := g.Apply(t.Context(), []health.Op{out}); err != nil {
		t.Errorf("removing from an old worker with tunnels only: %v", err)
	}
	tunnel.Close()
	p.until("nothing runs any more", func() bool {
		return see(t, g, op.Key) == health.Seen{Present: true, Missing: true}
	})
}

// startRaw serves HTTP, and goes on with 101 if asked, never closing by itself.
func startRaw(t *testing.T, ip string) netip.AddrPort {
	l, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort(l.Addr().String())
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				r := bufio.NewReader(c)
				for {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					if req.URL.Path == "/ws" {
						io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+
							"raw\r\n\r\n")
						io.Copy(io.Discard, r)
						return
					}
					fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Raw: %s\r\n\r\n", addr)
				}
			})
		}
	})
	return addr
}

// Only maintenance that was asked for takes a target out. Everything else can end by itself.
func TestStatesOfServers(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"},
		ServerOptions: "check inter 20ms fall 1"})
	g := p.gateway()
	p.start()
	w := p.worker()
	up, down := gatewaytest.StartBackend(t, "127.0.0.2").Addr.String(), "127.0.0.3:9"
	apply(t, g, routed("agent", "u", up), routed("agent", "u", down))
	name := func(addr string) string {
		name, err := serverName(key("agent", "u", addr).Target)
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	p.until("the check has failed", func() bool {
		return strings.Contains(p.ask(w, "show stat agent 4 -1"), "DOWN")
	})
	for _, c := range []struct {
		what, addr, command string
		want                health.Seen
	}{
		{"up", up, "", health.Seen{Present: true, Routed: true}},
		{"down by its check: comes back by itself", down, "", health.Seen{Present: true, Routed: true}},
		{"drain: still serves cookies", up, "set server agent/" + name(up) + " state drain",
			health.Seen{Present: true, Routed: true, Missing: true}},
		{"maintenance", up, "set server agent/" + name(up) + " state maint", health.Seen{Present: true, Missing: true}},
		{"no server", "127.0.0.99:9", "", health.Seen{Missing: true}},
	} {
		if c.command != "" {
			p.ask(w, c.command)
		}
		if diff := cmp.Diff(c.want, see(t, g, key("agent", "u", c.addr))); diff != "" {
			t.Errorf("%s:\n%s", c.what, diff)
		}
	}
}

// A server of the agent's whose address was changed must not be routed as the target it is not.
func TestAnotherAddress(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	a := gatewaytest.StartBackend(t, "127.0.0.31").Addr.String()
	op := routed("agent", "u", a)
	apply(t, g, op, removed("agent", "u", a))
	p.ask(p.worker(), "set server agent/ld-u-"+strings.ReplaceAll(a, ":", "-")+" addr 127.0.0.32 port 1")
	if err := g.Apply(t.Context(), []health.Op{op}); !errors.Is(err, kindConflict) {
		t.Errorf("routing a server with another address: %v", err)
	}
}

// A server whose definition HAProxy did not take is in the file, which is written first. Once it is
// not to be routed any more there is no operation for it, and a reload would route it.
func TestAServerThatWasNotAddedLeavesTheFile(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	text, err := os.ReadFile(p.cfg.ServersFile)
	if err != nil {
		t.Fatal(err)
	}
	p.write("servers.cfg", strings.Replace(string(text), "balance roundrobin", "balance static-rr", 1))
	p.start()
	op := routed("agent", "u", "127.0.0.33:1")
	if err := g.Apply(t.Context(), []health.Op{op}); !errors.Is(err, kindStaticBalance) {
		t.Fatalf("%v", err)
	}
	if is := see(t, g, op.Key); is.Routed {
		t.Fatalf("%+v", is)
	}
	if have, err := readFile(p.cfg.ServersFile); err != nil || len(have["agent"]) > 0 {
		t.Errorf("the file has %v (%v)", have, err)
	}
}

// Servers that were added before serverOptions had a check are put back, and stay in the file.
func TestAServerWithoutACheckIsPutBack(t *testing.T) {
	t.Parallel()
	b := Backend{Backend: "agent", Lines: []string{"balance roundrobin"}}
	p := newProxy(t, userFile, b)
	g := p.gateway()
	p.start()
	op := routed("agent", "u", "127.0.0.34:1")
	apply(t, g, op)
	apply(t, g, removed("agent", "u", "127.0.0.34:1"))
	p.cfg.Backends[0].ServerOptions = "check inter 10s"
	g = p.gateway()
	apply(t, g, op)
	if is := see(t, g, op.Key); !is.Routed {
		t.Errorf("%+v", is)
	}
	if have, err := readFile(p.cfg.ServersFile); err != nil || len(have["agent"]) != 1 {
		t.Errorf("the file has %v (%v)", have, err)
	}
}

// "option persist", which operators may have in their defaults, would send clients with an entry in
// the stick table to a server in maintenance.
func TestPersistenceDoesNotReachRemoved(t *testing.T) {
	t.Parallel()
	a, b := gatewaytest.StartBackend(t, "127.0.0.41"), gatewaytest.StartBackend(t, "127.0.0.42")
	p := newProxy(t, strings.Replace(userFile, "mode http\n", "mode http\n    option persist\n",
		1)+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent",
			Lines: []string{"balance roundrobin", "stick-table type ip size 1k", "stick on src"}})
	g := p.gateway()
	p.start()
	apply(t, g, routed("agent", "a", a.Addr.String()), routed("agent", "b", b.Addr.String()))
	get := func(phase int) netip.AddrPort {
		t.Helper()
		c := gatewaytest.NewHTTPClient(p.url)
		defer c.Close()
		addr, err := c.Get(t.Context(), "agent", "/", phase)
		if err != nil {
			t.Fatal(err)
		}
		return addr
	}
	first := get(0)
	for range 5 {
		if got := get(0); got != first {
			t.Fatalf("clients do not stick: %s, then %s", first, got)
		}
	}
	uid := "a"
	if first == b.Addr {
		uid = "b"
	}
	apply(t, g, removed("agent", uid, first.String()))
	for range 5 {
		if got := get(1); got == first {
			t.Fatal("the removed target answered a client that sticks to it")
		}
	}
}

// A full disk must not stop drains, nor keep the pods in rotation that it cannot forget. What a
// reload brings back meanwhile is taken out again, and once there is room the file is right.
func TestWithoutTheFileEverythingIsCarriedOut(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	stays, leaves, ends := routed("agent", "a", "127.0.0.66:1"), routed("agent", "b", "127.0.0.67:1"),
		routed("agent", "c", "127.0.0.68:1")
	apply(t, g, stays, leaves, ends)
	before, err := os.ReadFile(p.cfg.ServersFile)
	if err != nil {
		t.Fatal(err)
	}
	// A folder in the place of the new file: no attempt can create it.
	blocked := filepath.Join(p.dir, ".servers.cfg.tmp")
	if err := os.MkdirAll(filepath.Join(blocked, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	comes := routed("agent", "d", "127.0.0.69:1")
	batch := []health.Op{comes, removed("agent", "b", "127.0.0.67:1"), {Key: ends.Key, Want: health.WantAbsent}}
	carriedOut := func(when string) {
		t.Helper()
		for range 2 { // a server is deleted by the op after the one that took it out
			if err := g.Apply(t.Context(), batch); !errors.Is(err, kindFile) {
				t.Errorf("%s: %v, want kind %v", when, err, kindFile)
			}
		}
		for k, routes := range map[health.Key]bool{
			stays.Key: true, comes.Key: true, leaves.Key: false, ends.Key: false,
		} {
			if is := see(t, g, k); is.Routed != routes || k == ends.Key && is.Present {
				t.Errorf("%s: %s is seen as %+v, want routed %t", when, k, is, routes)
			}
		}
	}
	carriedOut("without the file")
	if now, err := os.ReadFile(p.cfg.ServersFile); err != nil || string(now) != string(before) {
		t.Fatalf("the file was written (%v):\n%s", err, now)
	}
	p.reload()
	if !see(t, g, leaves.Key).Routed || see(t, g, comes.Key).Routed {
		t.Error("a reload has not read the old file")
	}
	if owned, err := g.Owned(t.Context()); err != nil || !slices.Contains(owned, ends.Key) {
		t.Errorf("after a reload %v are owned (%v), want %s too", owned, err, ends.Key)
	}
	carriedOut("after a reload")
	if err := os.RemoveAll(blocked); err != nil {
		t.Fatal(err)
	}
	want := wanted{"agent": {"ld-a-127.0.0.66-1": true, "ld-d-127.0.0.69-1": true}}
	planes.Until(t, "the file is right once there is room", func() bool {
		if _, err := g.Observe(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		have, err := readFile(p.cfg.ServersFile)
		return err == nil && cmp.Diff(want, have) == ""
	})
}

// Each command of a batch is carried out by HAProxy, and its answer lost, in turn. To repeat the
// batch is always safe and ends.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"},
			ServerOptions: "check inter 10s"})
	p.gateway()
	p.start()
	var count atomic.Int64
	var lose atomic.Int64
	p.cfg.MasterSocket = listenUnix(t, func(conn net.Conn) {
		cmd, err := io.ReadAll(conn)
		if err != nil {
			return
		}
		answer := rawAsk(t, p.socket, string(cmd))
		if count.Add(1) == lose.Load() {
			return
		}
		io.WriteString(conn, answer)
	})
	g := p.gateway()
	batches := [][]health.Op{
		{routed("agent", "u1", "127.0.0.51:1"), routed("agent", "u2", "[::1]:1")},
		{removed("agent", "u1", "127.0.0.51:1")},
		{{Key: key("agent", "u1", "127.0.0.51:1"), Want: health.WantAbsent},
			{Key: key("agent", "u2", "[::1]:1"), Want: health.WantAbsent}},
	}
	for n := int64(1); n <= 20; n++ {
		for i, batch := range batches {
			count.Store(0)
			lose.Store(n)
			// Apply repeats by itself what a lost answer left open, or returns an error.
			if err := g.Apply(t.Context(), batch); err != nil && !errors.Is(err, kindTruncated) {
				t.Fatalf("batch %d, answer %d lost: %v", i, n, err)
			}
			lose.Store(0)
			apply(t, g, batch...)
			apply(t, g, batch...) // a server is deleted by the op after the one that took it out
			for _, op := range batch {
				got := see(t, g, op.Key)
				if got.Routed != (op.Want == health.WantRouted) || op.Want == health.WantAbsent && got.Present {
					t.Fatalf("batch %d, answer %d lost: %s is seen as %+v", i, n, op, got)
				}
			}
		}
	}
}

// The cost of a batch: a fixed number of readings for each worker and at most three commands for
// each op. The streams, of which there may be many, are listed once after a change, not at each
// reading.
func TestCommandsOfABatch(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	p.gateway()
	p.start()
	var count, lists atomic.Int64
	p.cfg.MasterSocket = listenUnix(t, func(conn net.Conn) {
		cmd, err := io.ReadAll(conn)
		if err == nil {
			count.Add(1)
			if strings.Contains(string(cmd), "show sess") {
				lists.Add(1)
			}
			io.WriteString(conn, rawAsk(t, p.socket, string(cmd)))
		}
	})
	g := p.gateway()
	var in, out []health.Op
	var keys []health.Key
	for i := range 50 {
		addr := fmt.Sprintf("127.0.2.%d:1", i+1)
		in, out = append(in, routed("agent", "u", addr)), append(out, removed("agent", "u", addr))
		keys = append(keys, key("agent", "u", addr))
	}
	observe := func() error { _, err := g.Observe(t.Context(), keys); return err }
	observeOthers := func() error { _, err := g.Observe(t.Context(), keys[1:]); return err }
	for _, c := range []struct {
		what        string
		do          func() error
		most, lists int64
	}{
		{"route 50", func() error { return g.Apply(t.Context(), in) }, 4 + 2*50, 0},
		{"observe 50 that are routed", observe, 5, 0},
		{"route them again", func() error { return g.Apply(t.Context(), in) }, 3, 0},
		{"remove 50", func() error { return g.Apply(t.Context(), out) }, 4 + 50, 0},
		{"remove them again", func() error { return g.Apply(t.Context(), out) }, 3, 0},
		{"observe 50", observe, 6, 1},
		{"observe them again", observe, 5, 0},
		{"route and remove one", func() error { return g.Apply(t.Context(), []health.Op{in[0], out[0]}) }, 6, 0},
		{"observe the others", observeOthers, 5, 0},
		{"observe 50 after a change", observe, 6, 1},
		{"observe them again", observe, 5, 0},
	} {
		count.Store(0)
		lists.Store(0)
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		if n := lists.Load(); n != c.lists {
			t.Errorf("%s: streams were listed %d times, want %d", c.what, n, c.lists)
		}
		if n := count.Load(); n > c.most {
			t.Errorf("%s: %d commands, want at most %d", c.what, n, c.most)
		}
	}
}

// Reloads at every moment of a batch: once a removal was observed, no reload brings the target
// back, and no routed one is lost.
func TestReloadsAtAnyMoment(t *testing.T) {
	t.Parallel()
	stay, flap := gatewaytest.StartBackend(t, "127.0.0.61"), gatewaytest.StartBackend(t, "127.0.0.62")
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	apply(t, g, routed("agent", "stay", stay.Addr.String()))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var phase, requests, reloads, rounds atomic.Int64
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c := gatewaytest.NewHTTPClient(p.url)
				for range 10 {
					if _, err := c.Get(t.Context(), "agent", "/", int(phase.Load())); err != nil {
						t.Errorf("a request failed: %v", err)
						cancel()
						return
					}
					requests.Add(1)
				}
				c.Close()
			}
		})
	}
	wg.Go(func() {
		defer cancel()
		for ctx.Err() == nil && (reloads.Load() < 20 || rounds.Load() == 0) {
			// Old workers that still have clients refuse changes: with a reload after another no
			// round would ever end.
			if w, err := p.workers(); err != nil || !w.current() || len(w.Workers) > 1 {
				time.Sleep(time.Millisecond) // between two looks
				continue
			}
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // any moment of a round
			before, err := p.workers()
			if err != nil {
				continue
			}
			syscall.Kill(p.cmd.Process.Pid, syscall.SIGUSR2)
			for ctx.Err() == nil {
				if now, err := p.workers(); err == nil && now.current() && now.String() != before.String() {
					break
				}
				time.Sleep(time.Millisecond)
			}
			reloads.Add(1)
		}
	})
	eventually := func(op health.Op, want bool) bool {
		for ctx.Err() == nil {
			err := g.Apply(ctx, []health.Op{op})
			o, err2 := g.Observe(ctx, []health.Key{op.Key})
			if err == nil && err2 == nil && o.Seen[op.Key].Routed == want {
				return true
			}
			time.Sleep(5 * time.Millisecond)
		}
		return false
	}
	for ; ctx.Err() == nil; rounds.Add(1) {
		if !eventually(routed("agent", "flap", flap.Addr.String()), true) {
			break
		}
		if !eventually(removed("agent", "flap", flap.Addr.String()), false) {
			break
		}
		at := int(phase.Add(1))
		for range 5 {
			o, err := g.Observe(ctx, []health.Key{key("agent", "flap", flap.Addr.String()),
				key("agent", "stay", stay.Addr.String())})
			if err != nil {
				continue
			}
			if o.Seen[key("agent", "flap", flap.Addr.String())].Routed {
				t.Errorf("round %d: the removed target is routed again", rounds.Load())
			}
			if s := o.Seen[key("agent", "stay", stay.Addr.String())]; !s.Routed || s.Missing {
				t.Errorf("round %d: the routed target is seen as %+v", rounds.Load(), s)
			}
		}
		if n := flap.Hits(at); n != 0 {
			t.Errorf("round %d: %d requests arrived at the removed target", rounds.Load(), n)
		}
	}
	t.Logf("%d rounds, %d reloads, %d requests", rounds.Load(), reloads.Load(), requests.Load())
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		gatewaytest.Missing(t, "IPv6", err)
	} else {
		l.Close()
	}
	b := gatewaytest.StartBackend(t, "::1")
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	op := routed("agent", "u", b.Addr.String())
	apply(t, g, op)
	for _, when := range []string{"at run time", "after a reload"} {
		if got := see(t, g, op.Key); got != (health.Seen{Present: true, Routed: true}) {
			t.Errorf("%s: seen as %+v", when, got)
		}
		c := gatewaytest.NewHTTPClient(p.url)
		if addr, err := c.Get(t.Context(), "agent", "/", 0); err != nil || addr != b.Addr {
			t.Errorf("%s: %s, %v", when, addr, err)
		}
		c.Close()
		p.reload()
	}
}

// A connection that becomes idle after its target was taken out, because its request ended later,
// keeps "del server" of HAProxy 2.6 and 2.8 from succeeding. It ends by itself. 3.2 closes it.
func TestGoneAfterRequestInFlight(t *testing.T) {
	t.Parallel()
	b := gatewaytest.StartBackend(t, "127.0.0.71")
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"},
			ServerOptions: "pool-purge-delay 200ms"})
	g := p.gateway()
	p.start()
	op := routed("agent", "u", b.Addr.String())
	apply(t, g, op)
	var wg sync.WaitGroup
	wg.Go(func() {
		c := gatewaytest.NewHTTPClient(p.url)
		defer c.Close()
		if _, err := c.Get(t.Context(), "agent", gatewaytest.HoldPath, 0); err != nil {
			t.Error(err)
		}
	})
	if err := b.WaitHeld(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone := health.Op{Key: op.Key, Want: health.WantAbsent}
	apply(t, g, gone)
	begin, tries := time.Now(), 0
	b.Release()
	wg.Wait()
	p.until("no request is active", func() bool { return see(t, g, op.Key).Active == 0 })
	p.until("it is gone", func() bool {
		apply(t, g, gone)
		tries++
		return !see(t, g, op.Key).Present
	})
	t.Logf("deleted %s after the last request, at try %d", time.Since(begin), tries)
}

// A server added at run time and the same server from the file must treat connections alike:
// HAProxy 2.6 leaves its own defaults out for the former.
func TestSameServerAfterReload(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"},
			ServerOptions: "check inter 10s"})
	g := p.gateway()
	p.start()
	apply(t, g, routed("agent", "u", "127.0.0.9:9"))
	settings := func() map[string]string {
		t.Helper()
		out := map[string]string{}
		conn := strings.Split(p.ask(p.worker(), "show servers conn agent"), "\n")
		names, values := strings.Fields(strings.TrimPrefix(conn[0], "# ")), strings.Fields(conn[1])
		for i, n := range names {
			if n == "purge_delay" || n == "idle_lim" {
				out[n] = values[i]
			}
		}
		stat := strings.Split(p.ask(p.worker(), "show stat agent 4 -1"), "\n")
		names, values = strings.Split(stat[0], ","), strings.Split(stat[1], ",")
		for i, n := range names {
			switch n {
			case "weight", "check_rise", "check_fall", "slim", "qlimit":
				out[n] = values[i]
			}
		}
		return out
	}
	before := settings()
	p.reload()
	if diff := cmp.Diff(before, settings()); diff != "" {
		t.Errorf("settings change with a reload:\n%s", diff)
	}
	if before["idle_lim"] != "-1" || len(before) != 7 {
		t.Errorf("settings: %v", before)
	}
}

// HAProxy 2.6.12 dies if a server is deleted to which a stream is still bound, although its
// counters are zero: here, a request that was refused and waits to try again. With the look at the
// list of streams taken out of the code, the worker ends with a segmentation fault. The frontend
// has the backend's name, as many have: counters are asked for by number. 3.3 and later refuse
// that.
func TestDeletingWaitsForStreams(t *testing.T) {
	t.Parallel()
	p := newProxy(t, strings.ReplaceAll(userFile, "frontend web",
		"frontend agent")+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	if out, err := p.check(); err != nil && strings.Contains(out, "same name") {
		p.write("user.cfg", strings.ReplaceAll(userFile, "%PORT%", fmt.Sprint(p.port)))
	}
	p.start()
	worker := p.worker()
	refuses := routed("agent", "u", "127.0.0.72:1")
	apply(t, g, refuses)
	var wg sync.WaitGroup
	wg.Go(func() {
		resp, err := http.Get(p.url("agent", "/"))
		if err != nil {
			t.Errorf("the request that tries again: %v", err)
			return
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("the request that tries again is answered %s", resp.Status)
		}
	})
	p.untilStream(refuses.Target)
	gone := health.Op{Key: refuses.Key, Want: health.WantAbsent}
	waited := false
	p.until("the server is gone", func() bool {
		apply(t, g, gone)
		got := see(t, g, gone.Key)
		waited = waited || got.Present && got.Active > 0
		return !got.Present
	})
	wg.Wait()
	if !waited {
		t.Error("the server was deleted under the request")
	}
	if got := p.worker(); got != worker {
		t.Fatalf("worker %d is gone, %d has come", worker, got)
	}
}

// The endpoints of a Service without a selector are no pods. Traffic is meant for them all the
// same.
func TestAnEndpointWithoutAPodHasAServer(t *testing.T) {
	t.Parallel()
	b := gatewaytest.StartBackend(t, "127.0.0.81")
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	op := routed("agent", "", b.Addr.String())
	apply(t, g, op)
	p.reload()
	c := gatewaytest.NewHTTPClient(p.url)
	t.Cleanup(c.Close)
	if addr, err := c.Get(t.Context(), "agent", "/", 0); addr != b.Addr || err != nil {
		t.Errorf("a request went to %s, %v", addr, err)
	}
	if owned, err := p.gateway().Owned(t.Context()); len(owned) != 1 || owned[0] != op.Key || err != nil {
		t.Errorf("owned: %v, %v", owned, err)
	}
	apply(t, g, removed("agent", "", b.Addr.String()))
	if got := see(t, g, op.Key); got.Routed || !got.Present {
		t.Errorf("removed, it is seen as %+v", got)
	}
	p.until("the server is gone", func() bool {
		apply(t, g, health.Op{Key: op.Key, Want: health.WantAbsent})
		return !see(t, g, op.Key).Present
	})
}

// A backend is often configured for the agent before HAProxy has loaded it. That one pool is not
// known then; what is known of the others is what they are drained by.
func TestABackendThatIsNotLoadedIsUnreadAlone(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    id 70000\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent"})
	p.gateway()
	p.start()
	p.cfg.Backends = append(p.cfg.Backends, Backend{Backend: "later", Lines: needed})
	g := p.gateway()
	good, later := routed("agent", "u", "127.0.0.3:9"), routed("later", "u", "127.0.0.4:9")
	keys := []health.Key{good.Key, later.Key}
	if err := g.Apply(t.Context(), []health.Op{later, good}); !errors.Is(err, kindNoBackend) {
		t.Errorf("the op on a backend that is not loaded: %v", err)
	}
	check := func(unread ...health.Pool) {
		t.Helper()
		o, err := g.Observe(t.Context(), keys)
		if err != nil {
			t.Fatal(err)
		}
		want := map[health.Key]health.Seen{}
		for _, k := range keys {
			if !slices.Contains(unread, k.Pool) {
				want[k] = health.Seen{Present: true, Routed: true}
			} else if !errors.Is(o.Unread[k.Pool], kindNoBackend) {
				t.Errorf("pool %s is unread for %v", k.Pool, o.Unread[k.Pool])
			}
		}
		if diff := cmp.Diff(want, o.Seen, cmpopts.EquateComparable(health.Key{})); diff != "" ||
			len(o.Unread) != len(unread) {
			t.Errorf("unread are %v:\n%s", o.Unread, diff)
		}
		owned, err := g.Owned(t.Context())
		if diff := cmp.Diff([]health.Key{good.Key, later.Key}, owned,
			cmpopts.EquateComparable(health.Key{})); diff != "" || err != nil {
			t.Errorf("owned: %v\n%s", err, diff)
		}
	}
	check("later")
	p.reload()
	check()
}

// A stream that HAProxy itself has begun, here to a server of logs, never ends, and the list of
// streams does not name its server. It is no stream of a target that was taken out.
func TestAStreamOfHAProxyIsNoneOfATarget(t *testing.T) {
	t.Parallel()
	logs, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { logs.Close() })
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := logs.Accept(); err == nil {
			accepted <- conn // and is kept open
		}
	}()
	p := newProxy(t, userFile+"ring logs\n    size 32764\n    timeout connect 5s\n    timeout server 1h\n"+
		"    server s "+logs.Addr().String()+"\n", Backend{Backend: "agent"})
	g := p.gateway()
	p.start()
	select {
	case conn := <-accepted:
		t.Cleanup(func() { conn.Close() })
	case <-time.After(20 * time.Second):
		t.Fatal("HAProxy has not connected to the server of logs")
	}
	if list, err := read(t.Context(), &g.cli, p.worker(), "show sess", sessBegin, parseStreams); err != nil ||
		len(list.unnamed) != 1 {
		t.Fatalf("streams %+v, %v: want one of HAProxy", list, err)
	}
	op := routed("agent", "u", startRaw(t, "127.0.0.21").String())
	apply(t, g, op)
	op.Want = health.WantRemoved
	apply(t, g, op)
	if is := see(t, g, op.Key); is.Routed || is.Active != 0 {
		t.Errorf("a target without a request is %+v", is)
	}
}

// Clients that may write EndpointSlices may write any UID into them. A key that cannot be the name
// of a server must not keep the others from being read.
func TestKeysWithoutNameAreMissing(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent"})
	g := p.gateway()
	p.start()
	good, odd := key("agent", "u", "127.0.0.3:9"), key("agent", "u;quit", "127.0.0.4:9")
	if err := g.Apply(t.Context(), []health.Op{{Key: odd, Want: health.WantRouted},
		{Key: good, Want: health.WantRouted}}); !errors.Is(err, kindBadKey) {
		t.Errorf("the odd key is accepted: %v", err)
	}
	o, err := g.Observe(t.Context(), []health.Key{good, odd})
	if err != nil {
		t.Fatal(err)
	}
	want := map[health.Key]health.Seen{good: {Present: true, Routed: true}, odd: {Missing: true}}
	if diff := cmp.Diff(want, o.Seen, cmpopts.EquateComparable(health.Key{})); diff != "" {
		t.Error(diff)
	}
}

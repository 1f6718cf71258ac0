package load

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// serve gives each connection to handle, in a goroutine, and closes it after. It returns the
// server's URL.
func serve(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		conns.Wait()
	})
	return "http://" + l.Addr().String()
}

// say answers one request with these bytes. It reports whether there was a request.
func say(c net.Conn, response string) bool {
	req, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return false
	}
	io.Copy(io.Discard, req.Body)
	_, err = io.WriteString(c, response)
	return err == nil
}

const ok = "HTTP/1.1 200 OK\r\nPod: web-1\r\nContent-Length: 3\r\n\r\nok\n"

// after runs a load for a while.
func after(t *testing.T, d time.Duration, opts Options) Result {
	t.Helper()
	l, err := Run(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(d) // as long as the test says
	res := l.Stop()
	check(t, res)
	return res
}

// check is what holds for every result: each request has one class, each request one phase.
func check(t *testing.T, res Result) {
	t.Helper()
	requests := 0
	for _, p := range res.Phases {
		requests += p.Total + p.Skipped
	}
	if want := res.Total + res.Skipped; requests != want {
		t.Errorf("phases hold %d requests, the whole %d", requests, want)
	}
	for _, c := range append([]Phase{{Name: "the whole", Counts: res.Counts}}, res.Phases...) {
		failed := 0
		for _, n := range c.FailedBy {
			failed += n
		}
		if c.Total != c.OK+c.Failed || c.Failed != failed {
			t.Errorf("phase %q: total %d, ok %d, failed %d, by kind %v", c.Name, c.Total, c.OK, c.Failed, c.FailedBy)
		}
	}
}

func TestKinds(t *testing.T) {
	reset := func(c net.Conn) {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	reader := func(c net.Conn) { http.ReadRequest(bufio.NewReader(c)) }
	for name, tc := range map[string]struct {
		handle func(net.Conn) // nil: no process listens
		want   Kind           // empty: ok
		pod    string
		method string
	}{
		"ok": {handle: func(c net.Conn) { say(c, ok) }},
		"ok, chunked": {handle: func(c net.Conn) {
			say(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nok\n\r\n0\r\n\r\n")
		}},
		"ok, without length but equal": {handle: func(c net.Conn) { say(c, "HTTP/1.1 200 OK\r\n\r\nok\n") }},
		"ok after 103":                 {handle: func(c net.Conn) { say(c, "HTTP/1.1 103 Early Hints\r\n\r\n"+ok) }},
		"refused":                      {want: Refused},
		"reset at once":                {handle: reset, want: Reset},
		"reset after request":          {handle: func(c net.Conn) { reader(c); reset(c) }, want: Reset},
		"reset in body": {want: Reset, pod: "web-1", handle: func(c net.Conn) {
			say(c, strings.TrimSuffix(ok, "k\n"))
			time.Sleep(20 * time.Millisecond) // a reset overtakes what has not been read
			reset(c)
		}},
		"eof before response": {handle: reader, want: EOF},
		"eof in header":       {handle: func(c net.Conn) { say(c, "HTTP/1.1 200 OK\r\nPod: we") }, want: EOF},
		"eof after 100":       {handle: func(c net.Conn) { say(c, "HTTP/1.1 100 Continue\r\n\r\n") }, want: EOF},
		"timeout":             {handle: func(c net.Conn) { reader(c); c.Read(make([]byte, 1)) }, want: Timeout},
		"timeout in body": {handle: func(c net.Conn) {
			say(c, strings.TrimSuffix(ok, "\n"))
			c.Read(make([]byte, 1))
		}, want: Timeout, pod: "web-1"},
		"503": {handle: func(c net.Conn) {
			say(c, "HTTP/1.1 503 No\r\nServer-Pod: web-2\r\nPod: x\r\nContent-Length: 0\r\n\r\n")
		}, want: "status-503", pod: "web-2"},
		"502 with a short body": {handle: func(c net.Conn) { say(c, "HTTP/1.1 502 No\r\nContent-Length: 9\r\n\r\n") },
			want: "status-502"},
		"redirect": {handle: func(c net.Conn) {
			say(c, "HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n")
		}, want: "status-302"},
		"short body": {handle: func(c net.Conn) { say(c, strings.TrimSuffix(ok, "\n")) }, want: Body,
			pod: "web-1"},
		"short chunked body": {handle: func(c net.Conn) {
			say(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nok\n\r\n")
		}, want: Body},
		"wrong body": {handle: func(c net.Conn) { say(c, strings.Replace(ok, "ok\n", "no\n", 1)) }, want: Body,
			pod: "web-1"},
		"long body": {handle: func(c net.Conn) { say(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok\n\n") },
			want: Body},
		"no HTTP": {handle: func(c net.Conn) { say(c, "220 mail ready\r\n\r\n") }, want: Protocol},
		"HEAD": {handle: func(c net.Conn) { say(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") },
			method: "HEAD", want: Body},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handle := tc.handle
			if handle == nil {
				handle = func(net.Conn) {}
			}
			url := serve(t, handle)
			if tc.handle == nil {
				l, err := net.Listen("tcp4", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				url = "http://" + l.Addr().String()
				l.Close()
			}
			for _, keepAlive := range []bool{false, true} {
				if keepAlive && tc.want == "" {
					continue // these servers close after one response: see TestKeepAliveDeath
				}
				timeout := 5 * time.Second
				if tc.want == Timeout {
					timeout = 2 * time.Second
				}
				res := after(t, 25*time.Millisecond, Options{
					Target: url, Rate: 100, Timeout: timeout, WantBody: []byte("ok\n"), KeepAlive: keepAlive,
					Method: tc.method,
				})
				if tc.want == "" {
					if res.Failed > 0 || res.OK == 0 || res.Latency.P50Millis == 0 {
						t.Errorf("%+v, want all ok", res)
					}
					continue
				}
				// In keep-alive mode a connection that brought a whole 503 is used again, and found
				// closed.
				if res.OK > 0 || res.FailedBy[string(tc.want)] == 0 ||
					(!keepAlive && res.FailedBy[string(tc.want)] != res.Total) {
					t.Errorf("keep-alive %v: ok %d, failed by %v, want all %s; %+v", keepAlive, res.OK, res.FailedBy,
						tc.want, res.Failures)
					continue
				}
				if f := res.Failures[0]; f.Kind != tc.want || f.Pod != tc.pod || f.Error == "" ||
					f.Due.Before(res.Start) || f.TookMillis <= 0 {
					t.Errorf("keep-alive %v: first failure %+v", keepAlive, f)
				}
			}
		})
	}
}

func TestLocalFault(t *testing.T) {
	res := after(t, 30*time.Millisecond, Options{
		Target: "http://127.0.0.1:1/", Rate: 100, Timeout: 5 * time.Second,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("203.0.113.77")},
	})
	if res.FailedBy["local"] != res.Total || res.Total == 0 {
		t.Errorf("from an address that is not ours: %v of %d", res.FailedBy, res.Total)
	}
}

// Without this a client library that repeats requests by itself would report a rollout that kills
// connections as lossless. The server answers the first request of each connection and dies on the
// second: net/http repeats such a GET, and here each must fail.
func TestKeepAliveDeath(t *testing.T) {
	for name, tc := range map[string]struct {
		die  func(net.Conn)
		want []Kind
	}{
		"close while idle":        {func(net.Conn) {}, []Kind{EOF, Reset}},
		"reset while idle":        {func(c net.Conn) { c.(*net.TCPConn).SetLinger(0) }, []Kind{Reset}},
		"close on second request": {func(c net.Conn) { http.ReadRequest(bufio.NewReader(c)) }, []Kind{EOF}},
		"reset on second request": {func(c net.Conn) {
			http.ReadRequest(bufio.NewReader(c))
			c.(*net.TCPConn).SetLinger(0)
		}, []Kind{Reset}},
		"silent on second request": {func(c net.Conn) { io.Copy(io.Discard, c) }, []Kind{Timeout}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var accepted atomic.Int64
			url := serve(t, func(c net.Conn) {
				accepted.Add(1)
				if say(c, ok) {
					tc.die(c)
				}
			})
			l := &Load{opts: Options{Target: url, Rate: 1, Timeout: 2 * time.Second, KeepAlive: true},
				start: time.Now()}
			if err := l.prepare(t.Context()); err != nil {
				t.Fatal(err)
			}
			for n := range int64(3) {
				if r := l.once(0); r.err != nil || r.reused || accepted.Load() != n+1 {
					t.Fatalf("on connection %d of %d: %v, reused %t; want ok on a new one", n, accepted.Load(), r.err,
						r.reused)
				}
				if r := l.once(0); r.err == nil || !slices.Contains(tc.want, kindOf(r.err)) || !r.reused {
					t.Fatalf("again: %v, reused %t; want %v on the same connection", r.err, r.reused, tc.want)
				}
			}
		})
	}
}

// One request after the other, without the schedule: the second finds the connection of the first
// closed by the server.
func TestDropClosed(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("DropClosed does nothing here")
	}
	url := serve(t, func(c net.Conn) { say(c, ok) }) // closes after one response without saying so
	for _, drop := range []bool{false, true} {
		l := &Load{opts: Options{Target: url, Rate: 1, Timeout: 5 * time.Second, KeepAlive: true, DropClosed: drop},
			start: time.Now()}
		if err := l.prepare(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r := l.once(0); r.err != nil || len(l.idle) != 1 {
			t.Fatalf("first request: %v, %d connections kept", r.err, len(l.idle))
		}
		for !closedByPeer(l.idle[0].Conn) {
			time.Sleep(time.Millisecond)
		}
		r := l.once(0)
		if drop && (r.err != nil || r.reused || l.dropped != 1) {
			t.Errorf("second request: %v, reused %v, dropped %d; want ok on a new connection", r.err, r.reused,
				l.dropped)
		}
		if !drop && (r.err == nil || kindOf(r.err) != EOF || !r.reused || l.dropped != 0) {
			t.Errorf("second request: %v, reused %v, dropped %d; want eof", r.err, r.reused, l.dropped)
		}
		for _, c := range l.idle {
			c.Close()
		}
	}
}

func TestClosedByPeer(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("DropClosed does nothing here")
	}
	step := make(chan struct{})
	url := serve(t, func(c net.Conn) {
		<-step
		io.WriteString(c, "x")
		<-step
	})
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if closedByPeer(c) {
		t.Error("idle: closed, want not")
	}
	step <- struct{}{}
	for !closedByPeer(c) { // unasked bytes
		time.Sleep(time.Millisecond)
	}
	c.Read(make([]byte, 1))
	if closedByPeer(c) {
		t.Error("idle again: closed, want not")
	}
	step <- struct{}{}
	for !closedByPeer(c) {
		time.Sleep(time.Millisecond)
	}
}

func TestKeepAliveReuses(t *testing.T) {
	url := serve(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		for n := 1; ; n++ {
			if _, err := http.ReadRequest(r); err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 %s\r\nPod: web-%d\r\nContent-Length: 3\r\n\r\nok\n",
				map[bool]string{true: "200 OK", false: "503 No"}[n%3 > 0], n%3)
		}
	})
	res := after(t, 300*time.Millisecond, Options{Target: url, Rate: 100, Timeout: 5 * time.Second, KeepAlive: true})
	if res.Connections >= res.Total || res.FailedBy["status-503"] != res.Failed || res.Failed == 0 {
		t.Errorf("%d connections for %d requests, failed by %v", res.Connections, res.Total, res.FailedBy)
	}
	if res.Pods["web-0"] != res.Failed || res.Pods["web-1"]+res.Pods["web-2"] != res.OK {
		t.Errorf("by pod %v, ok %d, failed %d", res.Pods, res.OK, res.Failed)
	}
}

// A closed loop would send a few requests and find one of them slow. The server answers nothing for
// 300 ms: all that were due then were sent then, and waited as long as clients would have.
func TestOpenLoop(t *testing.T) {
	gate := make(chan struct{})
	url := serve(t, func(c net.Conn) {
		<-gate
		say(c, ok)
	})
	l, err := Run(t.Context(), Options{Target: url, Rate: 100, Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // how long requests wait is the subject
	close(gate)
	res := l.Stop() // waits for the requests in flight: all of them
	check(t, res)
	if res.Total < 29 || res.OK != res.Total || res.Skipped > 0 {
		t.Errorf("total %d, ok %d, skipped %d; want 30, all ok", res.Total, res.OK, res.Skipped)
	}
	if lat := res.Latency; lat.MaxMillis < 290 || lat.P50Millis < 100 || lat.P50Millis >= lat.MaxMillis {
		t.Errorf("latency %+v, want a median of about half of the 300 ms, and all of it at most", lat)
	}
}

func TestSkipped(t *testing.T) {
	url := serve(t, func(c net.Conn) {
		time.Sleep(50 * time.Millisecond) // as long as a request takes
		say(c, ok)
	})
	res := after(t, 200*time.Millisecond, Options{Target: url, Rate: 200, Timeout: 5 * time.Second, MaxInFlight: 2})
	most := int(2*res.Seconds/0.05) + 2
	if due := res.Total + res.Skipped; res.Total > most || due < 39 || res.OK != res.Total {
		t.Errorf("total %d, ok %d, skipped %d; want %d sent at most, and 40 due", res.Total, res.OK, res.Skipped, most)
	}
}

func TestPhases(t *testing.T) {
	var broken, answered atomic.Bool
	url := serve(t, func(c net.Conn) {
		if broken.Load() {
			return
		}
		say(c, ok)
		answered.Store(true)
	})
	l, err := Run(t.Context(), Options{Target: url, Rate: 100, Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for time.Sleep(100 * time.Millisecond); !answered.Load(); time.Sleep(time.Millisecond) { // a phase
	}
	broken.Store(true)
	l.Mark("rollout")
	time.Sleep(100 * time.Millisecond) // a phase
	res := l.Stop()
	l.Mark("too late")
	check(t, res)
	if len(res.Phases) != 2 || res.Phases[0].Name != FirstPhase || res.Phases[1].Name != "rollout" {
		t.Fatalf("phases %+v, want start and rollout", res.Phases)
	}
	before, during := res.Phases[0], res.Phases[1]
	if before.OK == 0 || during.OK > 0 || during.Failed < 9 {
		t.Errorf("before: ok %d, failed %d; during: ok %d, failed %d", before.OK, before.Failed, during.OK,
			during.Failed)
	}
	if before.EndMillis != during.StartMillis || during.StartMillis < 100 || during.EndMillis < 200 {
		t.Errorf("before [%v, %v), during [%v, %v)", before.StartMillis, before.EndMillis, during.StartMillis,
			during.EndMillis)
	}
	if diff := cmp.Diff(res, l.Stop()); diff != "" {
		t.Errorf("second Stop (-first +second):\n%s", diff)
	}
}

func TestContextEnds(t *testing.T) {
	url := serve(t, func(c net.Conn) {
		time.Sleep(100 * time.Millisecond) // as long as a request takes
		say(c, ok)
	})
	ctx, cancel := context.WithCancel(t.Context())
	l, err := Run(ctx, Options{Target: url, Rate: 100, Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // some requests are in flight by then
	cancel()
	res := l.Stop()
	if check(t, res); res.OK != res.Total || res.Total == 0 || res.Total > int(100*res.Seconds)+1 {
		t.Errorf("total %d, ok %d, failed by %v; want those in flight to end well and no more begun", res.Total, res.OK,
			res.FailedBy)
	}
}

// A port that comes twice meets what the kernels on the way remember of its first connection.
// Chosen at random, 500 of 28,000 ports of each address repeat 9 times in all. The kernel's order
// may jump once, rarely, for it is shared with whatever else connects; never three times in a row.
func TestSourcePortsDoNotRepeat(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	hosts := map[string]int{}
	url := serve(t, func(c net.Conn) {
		mu.Lock()
		seen[c.RemoteAddr().String()]++
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		hosts[host]++
		mu.Unlock()
		say(c, ok)
	})
	sources := []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")}
	for try := range 3 {
		mu.Lock()
		clear(seen)
		clear(hosts)
		mu.Unlock()
		res := after(t, time.Second, Options{Target: url, Rate: 1000, Timeout: 5 * time.Second, SourceAddrs: sources})
		mu.Lock()
		ports, d := len(seen), hosts["127.0.0.2"]-hosts["127.0.0.3"]
		mu.Unlock()
		if res.Failed > 0 || len(hosts) != 2 || d < 0 || d > 1 {
			t.Fatalf("failed by %v; connections by source address %v, want half each", res.FailedBy, hosts)
		}
		if ports == res.Total {
			return
		}
		t.Logf("try %d: %d requests from %d ports", try+1, res.Total, ports)
	}
	t.Error("ports repeat, each time")
}

func TestRequestAsSent(t *testing.T) {
	got := make(chan *http.Request, 100)
	url := serve(t, func(c net.Conn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err == nil {
			got <- req
			io.WriteString(c, ok)
		}
	})
	after(t, 20*time.Millisecond, Options{
		Target: url + "/a?b=c", Rate: 10, Timeout: 5 * time.Second,
		Method: "POST", Headers: http.Header{"Host": {"shop.test"}, "X-Y": {"z"}},
	})
	req := <-got
	if req.Method != http.MethodPost || req.Host != "shop.test" || req.URL.String() != "/a?b=c" ||
		req.Header.Get("X-Y") != "z" || !req.Close {
		t.Errorf("got %+v", req)
	}
}

func TestHostName(t *testing.T) {
	url := strings.Replace(serve(t, func(c net.Conn) { say(c, ok) }), "127.0.0.1", "localhost", 1)
	res := after(t, 30*time.Millisecond, Options{
		// asks for IPv4
		Target: url, Rate: 50, Timeout: 5 * time.Second, SourceAddrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
	})
	if res.OK == 0 || res.Failed > 0 {
		t.Errorf("ok %d, failed by %v", res.OK, res.FailedBy)
	}
}

func TestBadOptions(t *testing.T) {
	for want, change := range map[string]func(*Options){
		`target "https://x/"`:  func(o *Options) { o.Target = "https://x/" },
		`target "nonsense"`:    func(o *Options) { o.Target = "nonsense" },
		`"99999"`:              func(o *Options) { o.Target = "http://127.0.0.1:99999/" },
		"rate 0":               func(o *Options) { o.Rate = 0 },
		"timeout 0s":           func(o *Options) { o.Timeout = 0 },
		"max in flight -1":     func(o *Options) { o.MaxInFlight = -1 },
		`method "G T"`:         func(o *Options) { o.Method = "G T" },
		"source address ::1":   func(o *Options) { o.SourceAddrs = []netip.Addr{netip.IPv6Loopback()} },
		`Connection "upgrade"`: func(o *Options) { o.Headers = http.Header{"Connection": {"upgrade"}} },
	} {
		opts := Options{Target: "http://127.0.0.1:1/", Rate: 1, Timeout: 5 * time.Second}
		change(&opts)
		if _, err := Run(t.Context(), opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error with %s", err, want)
		}
	}
}

func TestSummarise(t *testing.T) {
	ms := time.Millisecond
	begun := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	records := []record{ // in the order in which they ended
		{due: 20 * ms, took: 1 * ms, pod: "a"},
		{due: 0, took: 30 * ms, pod: "a"},
		{due: 10 * ms, skipped: true},
		{due: 30 * ms, late: 11 * ms, took: 12 * ms, pod: "b"},
		{due: 40 * ms, took: 5 * ms, err: statusError(503), by: "b", reused: true},
	}
	start := Counts{
		Total: 1, OK: 1, FailedBy: map[string]int{}, Skipped: 1, Latency: Latency{30, 30, 30, 30, 30},
		Pods: map[string]int{"a": 1},
	}
	rest := Counts{
		Total: 3, OK: 2, Failed: 1, FailedBy: map[string]int{"status-503": 1}, Late: 1,
		Latency: Latency{1, 12, 12, 12, 12},
		Pods:    map[string]int{"a": 1, "b": 1},
	}
	want := Result{
		Start:   begun,
		Seconds: 0.05,
		Counts: Counts{
			Total: 4, OK: 3, Failed: 1, FailedBy: map[string]int{"status-503": 1}, Late: 1, Skipped: 1,
			Latency: Latency{12, 30, 30, 30, 30},
			Pods:    map[string]int{"a": 2, "b": 1},
		},
		MaxLateMillis: 11,
		FailedAt:      map[string]int{"b": 1},
		Failures: []Failure{{
			Due: begun.Add(40 * ms), OffsetMillis: 40, TookMillis: 5, Kind: "status-503", Error: "status 503",
			Pod: "b", Reused: true,
		}},
		Phases: []Phase{
			{Name: "start", EndMillis: 20, Counts: start},
			{Name: "rollout", StartMillis: 20, EndMillis: 50, Counts: rest},
		},
	}
	got := summarise(begun, records, []mark{{FirstPhase, 0}, {"rollout", 20 * ms}, {"after the end", 60 * ms}}, 50*ms,
		failuresOfKind)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSummariseTellsFirstOfEachKind(t *testing.T) {
	var records []record
	for i := range 100 {
		records = append(records, record{due: time.Duration(i), err: statusError(503)})
	}
	records = append(records, record{due: 100, err: errBody})
	var kinds []Kind
	for _, f := range summarise(time.Time{}, records, []mark{{}}, time.Second, 5).Failures {
		kinds = append(kinds, f.Kind)
	}
	s := Kind("status-503")
	if diff := cmp.Diff([]Kind{s, s, s, s, s, Body}, kinds); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestQuantile(t *testing.T) {
	upTo := func(n int) (d []time.Duration) {
		for i := range n {
			d = append(d, time.Duration(i+1)*time.Millisecond)
		}
		return d
	}
	for _, tc := range []struct {
		n, perMille int
		want        float64
	}{
		{0, 500, 0}, {1, 500, 1}, {1, 1000, 1}, {2, 500, 1}, {3, 500, 2}, {100, 990, 99}, {100, 999, 100},
		{1000, 999, 999}, {1001, 999, 1000}, {1000, 1000, 1000},
	} {
		if got := quantile(upTo(tc.n), tc.perMille); got != tc.want {
			t.Errorf("quantile %d/1000 of 1..%d = %v, want %v", tc.perMille, tc.n, got, tc.want)
		}
	}
}

func TestResultJSON(t *testing.T) {
	b, err := json.Marshal(summarise(time.Time{}, []record{{took: time.Millisecond}}, []mark{{name: FirstPhase}},
		time.Second, failuresOfKind))
	if err != nil {
		t.Fatal(err)
	}
	const counts = `"total":1,"ok":1,"failed":0,"failedBy":{},"late":0,"skipped":0,` +
		`"latency":{"p50Millis":1,"p90Millis":1,"p99Millis":1,"p999Millis":1,"maxMillis":1},"pods":{}`
	want := `{"start":"0001-01-01T00:00:00Z","seconds":1,` + counts + `,"maxLateMillis":0,"connections":0,"dropped":0,"failures":[],` +
		`"phases":[{"name":"start","startMillis":0,"endMillis":1000,` + counts + `}]}`
	if diff := cmp.Diff(want, string(b)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

package probe

import (
	"context"
	"crypto/x509"
	"encoding/binary"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// queue is a Source that hands out what it was given, each job once, and keeps how it ended.
type queue struct {
	mu       sync.Mutex
	jobs     []health.Job
	outcomes map[health.Key][]health.Outcome
	// took is how long after they were due they ended.
	took  map[health.Key][]time.Duration
	ended chan struct{}
}

func newQueue() *queue {
	return &queue{
		outcomes: map[health.Key][]health.Outcome{}, took: map[health.Key][]time.Duration{},
		ended: make(chan struct{}, 1<<16),
	}
}

func (q *queue) Due(now time.Time, jobs []health.Job, most int) ([]health.Job, time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := 0
	for ; i < len(q.jobs) && i < most && !q.jobs[i].Due.After(now); i++ {
		job := q.jobs[i]
		if all := q.outcomes[job.Key]; len(all) > 0 {
			job.Silent = all[len(all)-1].Kind == health.Timeout
		}
		jobs = append(jobs, job)
	}
	q.jobs = q.jobs[i:]
	if len(q.jobs) == 0 {
		return jobs, time.Time{}
	}
	return jobs, q.jobs[0].Due
}

func (q *queue) Report(now time.Time, job health.Job, outcome health.Outcome) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.outcomes[job.Key] = append(q.outcomes[job.Key], outcome)
	q.took[job.Key] = append(q.took[job.Key], now.Sub(job.Due))
	q.ended <- struct{}{}
	return true
}

func (q *queue) add(jobs ...health.Job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.jobs = append(q.jobs, jobs...)
	slices.SortStableFunc(q.jobs, func(a, b health.Job) int { return a.Due.Compare(b.Due) })
}

// runner is a Runner on a queue.
type runner struct {
	*Runner
	*queue
	t testing.TB
	n int
}

func start(t testing.TB, r *Runner) *runner {
	q := newQueue()
	r.Source = q
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(5 * time.Second):
			t.Error("Run does not end")
		}
	})
	return &runner{Runner: r, queue: q, t: t}
}

func key(addr netip.AddrPort) health.Key {
	return health.Key{Pool: "web", Target: health.Target{UID: "a", Addr: addr}}
}

// ask probes addr once and returns the outcome.
func (r *runner) ask(addr netip.AddrPort, c health.Check) health.Outcome {
	r.t.Helper()
	k := key(addr)
	r.n++
	r.add(health.Job{Key: k, Check: &c, Due: time.Now(), Ticket: uint64(r.n)})
	r.Wake()
	select {
	case <-r.ended:
	case <-time.After(30 * time.Second):
		r.t.Fatal("no outcome")
	}
	r.mu().Lock()
	defer r.mu().Unlock()
	all := r.outcomes[k]
	return all[len(all)-1]
}

func (r *runner) mu() *sync.Mutex { return &r.queue.mu }

func check(p health.Protocol) health.Check {
	c := health.Check{Protocol: p, Path: "/", Interval: time.Second, Timeout: 10 * time.Second}
	for s := 200; s < 400; s++ {
		c.Statuses.Add(s)
	}
	return c
}

// want probes addr until the outcome means something: a timeout that a busy machine makes this
// process notice late does not.
func (r *runner) want(what health.Outcome, addr netip.AddrPort, c health.Check) {
	r.t.Helper()
	got := r.ask(addr, c)
	for range 10 {
		if got != (health.Outcome{}) || what == got {
			break
		}
		got = r.ask(addr, c)
	}
	if got != what {
		r.t.Fatalf("%s, want %s", got, what)
	}
}

func addrOf(l net.Listener) netip.AddrPort {
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func serverAddr(s *httptest.Server) netip.AddrPort { return addrOf(s.Listener) }

// backend listens and runs serve for each connection. It ends with the test.
func backend(t testing.TB, serve func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return addrOf(l)
}

// request reads a request to its empty line, or the first of what is none.
func request(c net.Conn) string {
	var all []byte
	var b [4096]byte
	for len(all) == 0 || strings.HasPrefix(string(all), "GET") && !strings.HasSuffix(string(all), "\r\n\r\n") {
		n, err := c.Read(b[:])
		all = append(all, b[:n]...)
		if err != nil {
			break
		}
	}
	return string(all)
}

// says is a backend that reads a request, answers with pieces, one at a time, and closes.
func says(t testing.TB, pieces ...string) netip.AddrPort {
	return backend(t, func(c net.Conn) {
		request(c)
		for _, p := range pieces {
			io.WriteString(c, p)
			time.Sleep(5 * time.Millisecond)
		}
	})
}

// blackHole is an address that answers to no SYN: a listener whose backlog is full.
func blackHole(t testing.TB, ip netip.Addr) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: ip.As4()}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*unix.SockaddrInet4).Port))
	for range 4 {
		c, err := net.DialTimeout("tcp", addr.String(), 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the backlog does not fill")
	return addr
}

func TestHTTPStatuses(t *testing.T) {
	r := start(t, &Runner{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/teapot" {
			w.WriteHeader(http.StatusTeapot)
		}
		if req.URL.Path == "/elsewhere" {
			// A redirect is not followed: it is an answer.
			http.Redirect(w, req, "/teapot", http.StatusFound)
		}
	}))
	defer s.Close()
	c := check(health.HTTP)
	r.want(health.Outcome{Kind: health.Success, Code: 200}, serverAddr(s), c)
	c.Path = "/elsewhere"
	r.want(health.Outcome{Kind: health.Success, Code: 302}, serverAddr(s), c)
	c.Path = "/teapot"
	r.want(health.Outcome{Kind: health.HTTPFailure, Code: 418}, serverAddr(s), c)
	c.Statuses.Add(418)
	r.want(health.Outcome{Kind: health.Success, Code: 418}, serverAddr(s), c)
}

func TestWhatIsSent(t *testing.T) {
	r := start(t, &Runner{})
	var got atomic.Value
	addr := backend(t, func(c net.Conn) {
		got.Store(request(c))
		io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
	})
	c := check(health.HTTP)
	c.Path, c.Host, c.Headers = "/healthz?full=1", "shop.example", "X-A: 1\r\nX-B: 2\r\n"
	r.want(health.Outcome{Kind: health.Success, Code: 204}, addr, c)
	want := "GET /healthz?full=1 HTTP/1.1\r\nHost: shop.example\r\nUser-Agent: lameduck-health\r\nAccept: " +
		"*/*\r\nConnection: close\r\n" +
		"X-A: 1\r\nX-B: 2\r\n\r\n"
	if got.Load() != want {
		t.Fatalf("sent %q, want %q", got.Load(), want)
	}
	c.Host, c.Headers = "", ""
	// The port of the check is probed instead of the target's.
	c.Port = addr.Port()
	r.want(health.Outcome{Kind: health.Success, Code: 204}, netip.AddrPortFrom(addr.Addr(), 1), c)
	if !strings.Contains(got.Load().(string), "\r\nHost: "+addr.String()+"\r\n") {
		t.Fatalf("sent %q", got.Load())
	}
}

// A backend may refuse a request that has a header twice, and need not take the one that the check
// says.
func TestAHeaderIsSentOnce(t *testing.T) {
	for _, header := range []string{"User-Agent", "user-agent", "Accept", "ACCEPT", "Accept-Encoding"} {
		c, err := health.ParseCheck(`{headers: {` + header + `: "5"}}`)
		if err != nil {
			t.Fatal(err)
		}
		sent := string(appendGet(nil,
			&health.Job{Key: health.Key{Target: health.Target{Addr: netip.MustParseAddrPort("127.0.0.1:80")}},
				Check: &c}))
		if strings.Count(strings.ToLower(sent), "\r\n"+strings.ToLower(header)+": ") != 1 ||
			!strings.Contains(sent, "\r\n"+header+": 5\r\n") {
			t.Errorf("%s: sent is\n%s", header, sent)
		}
		if n := strings.Count(sent, "\r\n"); n < 6 {
			t.Errorf("%s: a default of another name is left out:\n%s", header, sent)
		}
	}
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		gatewaytest.Missing(t, "IPv6", err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Host != l.Addr().String() {
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	s.Listener.Close()
	s.Listener = l
	s.Start()
	defer s.Close()
	r := start(t, &Runner{})
	r.want(health.Outcome{Kind: health.Success, Code: 200}, addrOf(l), check(health.HTTP))
	r.want(health.Outcome{Kind: health.Success}, addrOf(l), check(health.TCP))
	closed := netip.AddrPortFrom(addrOf(l).Addr(), 1)
	r.want(health.Outcome{Kind: health.TCPFailure, Code: uint16(syscall.ECONNREFUSED)}, closed, check(health.HTTP))
}

func TestRefusedAndUnreachable(t *testing.T) {
	r := start(t, &Runner{})
	closed := netip.MustParseAddrPort("127.0.0.1:1")
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS, health.TCP, health.GRPC} {
		r.want(health.Outcome{Kind: health.TCPFailure, Code: uint16(syscall.ECONNREFUSED)}, closed, check(p))
	}
}

func TestNoProtocolSaysNothing(t *testing.T) {
	r := start(t, &Runner{})
	r.want(health.Outcome{}, netip.MustParseAddrPort("127.0.0.1:1"), check(health.ProtocolUnknown))
}

func TestBlackHole(t *testing.T) {
	r := start(t, &Runner{})
	addr := blackHole(t, netip.MustParseAddr("127.0.0.1"))
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS, health.TCP, health.GRPC} {
		c := check(p)
		c.Timeout = 100 * time.Millisecond
		began := time.Now()
		r.want(health.Outcome{Kind: health.Timeout}, addr, c)
		if took := time.Since(began); took < c.Timeout {
			t.Fatalf("%s: timeout after %s", p, took)
		}
	}
}

// A backend may answer whatever it likes: it is judged within the timeout.
func TestWhatBackendsAnswer(t *testing.T) {
	r := start(t, &Runner{})
	ok := health.Outcome{Kind: health.Success, Code: 200}
	malformed := health.Outcome{Kind: health.HTTPFailure}
	broke := health.Outcome{Kind: health.TCPFailure}
	for _, tt := range []struct {
		name   string
		pieces []string
		want   health.Outcome
	}{
		{"plain", []string{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"}, ok},
		{"in pieces", []string{"H", "TTP/1", ".1 20", "0 O", "K\r", "\n", "Content-Length: 0\r\n\r\n"}, ok},
		{"no reason", []string{"HTTP/1.1 200\r\n\r\n"}, ok},
		{"bare newlines", []string{"HTTP/1.0 200 OK\n\n"}, ok},
		{"continue first", []string{"HTTP/1.1 100 Continue\r\nA: b\r\n\r\nHTTP/1.1 503 No\r\n\r\n"},
			health.Outcome{Kind: health.HTTPFailure, Code: 503}},
		{"a body without end", []string{"HTTP/1.1 200 OK\r\n\r\n", strings.Repeat("x", 100<<10)}, ok},
		{"huge headers", []string{"HTTP/1.1 200 OK\r\nX: ", strings.Repeat("x", 100<<10)}, malformed},
		{"a huge status line", []string{"HTTP/1.1 ", strings.Repeat("x", 100<<10)}, malformed},
		{"garbage", []string{"SSH-2.0-OpenSSH_9.2\r\n"}, malformed},
		{"zeros", []string{strings.Repeat("\x00", 4096)}, malformed},
		{"HTTP/2", []string{"\x00\x00\x00\x04\x00\x00\x00\x00\x00"}, malformed},
		{"no number", []string{"HTTP/1.1 2x0 OK\r\n\r\n"}, malformed},
		{"too small", []string{"HTTP/1.1 099 OK\r\n\r\n"}, malformed},
		{"status 999", []string{"HTTP/1.1 999 OK\r\n\r\n"}, health.Outcome{Kind: health.HTTPFailure, Code: 999}},
		{"cut off", []string{"HTTP/1.1 20"}, broke},
		{"nothing", nil, broke},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.t = t
			r.want(tt.want, says(t, tt.pieces...), check(health.HTTP))
		})
	}
}

func TestSlowLoris(t *testing.T) {
	r := start(t, &Runner{})
	addr := backend(t, func(c net.Conn) {
		for _, b := range "HTTP/1.1 200 OK\r\n" {
			if _, err := c.Write([]byte{byte(b)}); err != nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	c := check(health.HTTP)
	c.Timeout = 200 * time.Millisecond
	r.want(health.Outcome{Kind: health.Timeout}, addr, c)
}

func TestReset(t *testing.T) {
	r := start(t, &Runner{})
	addr := backend(t, func(c net.Conn) {
		request(c)
		c.(*net.TCPConn).SetLinger(0)
	})
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS} {
		got := r.ask(addr, check(p))
		if got.Kind != health.TCPFailure {
			t.Fatalf("%s: %s", p, got)
		}
	}
	r.want(health.Outcome{Kind: health.TCPFailure, Code: uint16(syscall.ECONNRESET)}, addr, check(health.HTTP))
}

// A backend that shuts its sending half at once has said that it will not answer.
func TestHalfClosed(t *testing.T) {
	r := start(t, &Runner{})
	addr := backend(t, func(c net.Conn) {
		c.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, c)
	})
	r.want(health.Outcome{Kind: health.TCPFailure}, addr, check(health.HTTP))
}

// The program behind the port never gets to see a TCP check: nothing is accepted, nothing logged.
func TestTCPCheckIsNotAccepted(t *testing.T) {
	r := start(t, &Runner{})
	var accepted atomic.Int32
	addr := backend(t, func(net.Conn) { accepted.Add(1) })
	var slow int32 // the kernel acknowledges after 200 ms at most, and the connection is accepted
	for range 20 {
		began := time.Now()
		r.want(health.Outcome{Kind: health.Success}, addr, check(health.TCP))
		if time.Since(began) > 100*time.Millisecond {
			slow++
		}
	}
	time.Sleep(50 * time.Millisecond)
	if n := accepted.Load(); n > slow {
		t.Fatalf("%d of 20 checks were accepted, and %d were slow", n, slow)
	}
}

func TestHTTPS(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.TLS.ServerName != "" && req.TLS.ServerName != "example.com" {
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	r := start(t, &Runner{Roots: roots})
	ok, broke := health.Outcome{Kind: health.Success, Code: 200}, health.Outcome{Kind: health.TCPFailure}

	c := check(health.HTTPS)
	r.want(ok, serverAddr(s), c) // not verified
	c.ServerName = "other.test"
	r.want(health.Outcome{Kind: health.HTTPFailure, Code: 421}, serverAddr(s), c)
	c.Verify = true
	r.want(broke, serverAddr(s), c) // the certificate is for example.com
	c.ServerName = "example.com"
	r.want(ok, serverAddr(s), c)
	c.ServerName, c.Host = "", "example.com:8443"
	r.want(ok, serverAddr(s), c)
	c.Host = ""
	r.want(ok, serverAddr(s), c) // by its address, which is in the certificate too
	strangers := start(t, &Runner{Roots: x509.NewCertPool()})
	strangers.want(broke, serverAddr(s), c)

	plain := says(t, "HTTP/1.1 400 Bad Request\r\n\r\n")
	r.want(broke, plain, check(health.HTTPS))
	mute := backend(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	c = check(health.HTTPS)
	c.Timeout = 100 * time.Millisecond
	r.want(health.Outcome{Kind: health.Timeout}, mute, c)
}

// healthServer is a gRPC server as far as health checks need one, on Go's own HTTP/2.
func healthServer(t *testing.T, padding int) netip.AddrPort {
	t.Helper()
	h := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		if err != nil || len(body) < 5 || req.URL.Path != "/grpc.health.v1.Health/Check" ||
			req.Header.Get("Content-Type") != "application/grpc" ||
			req.Header.Get("Te") != "trailers" || int(binary.BigEndian.Uint32(body[1:])) != len(body)-5 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		service := ""
		if m := body[5:]; len(m) > 0 {
			n, skip := binary.Uvarint(m[1:])
			service = string(m[1+skip : 1+skip+int(n)])
		}
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("X-Padding", strings.Repeat("x", padding))
		w.Header().Set("X-Padding-Too", strings.Repeat("x", padding))
		serving := byte(1)
		switch service {
		case "", "shop", strings.Repeat("long", 100):
		case "down":
			serving = 2
		default:
			// As gRPC does: trailers alone.
			w.Header().Set("Grpc-Status", "5")
			return
		}
		w.Write([]byte{0, 0, 0, 0, 2, 8, serving})
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	})
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = &http.Protocols{}
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return serverAddr(s)
}

func TestGRPC(t *testing.T) {
	// With a large header, its block goes on in CONTINUATION frames.
	for _, padding := range []int{0, 12 << 10} {
		addr := healthServer(t, padding)
		r := start(t, &Runner{})
		for _, tt := range []struct {
			service string
			want    health.Outcome
		}{
			{"", health.Outcome{Kind: health.Success}},
			{"shop", health.Outcome{Kind: health.Success}},
			{strings.Repeat("long", 100), health.Outcome{Kind: health.Success}},
			{"down", health.Outcome{Kind: health.HTTPFailure, Code: 102}},
			{"stranger", health.Outcome{Kind: health.HTTPFailure, Code: 5}},
		} {
			c := check(health.GRPC)
			c.Service = tt.service
			if got := r.ask(addr, c); got != tt.want {
				t.Errorf("%.10s with %d of padding: %s, want %s", tt.service, padding, got, tt.want)
			}
		}
	}
	r := start(t, &Runner{})
	r.want(health.Outcome{Kind: health.HTTPFailure}, says(t, "HTTP/1.1 400 Bad Request\r\n\r\n"), check(health.GRPC))
	// It closes after its settings; how that looks depends on whether our acknowledgement meets it,
	// and on whether our request has begun, which a busy machine may keep from it.
	closes := says(t, "\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	for try := 1; ; try++ {
		got := r.ask(closes, check(health.GRPC))
		if got.Kind == health.TCPFailure {
			break
		} else if try == 5 {
			t.Fatal(got)
		}
	}
	away := "\x00\x00\x00\x04\x00\x00\x00\x00\x00" + "\x00\x00\x08\x07\x00\x00\x00\x00\x00" +
		"\x00\x00\x00\x00" + "\x00\x00\x00\x0b"
	r.want(health.Outcome{Kind: health.HTTPFailure}, says(t, away), check(health.GRPC))
}

// 200 targets are black-holed, more than the bound. Once each has failed to answer for the first
// time, the others are probed on time, although more holes wait than there is room for. Without
// their half of the bound the others would wait for half a second. How late a busy machine makes
// them by itself is seen beside it, where there are no holes.
func TestBlackHolesDelayNobody(t *testing.T) {
	hole := blackHole(t, netip.MustParseAddr("0.0.0.0"))
	fast := backend(t, func(c net.Conn) {
		request(c)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	})
	c := check(health.HTTP)
	c.Timeout = 500 * time.Millisecond
	o := &observer{}
	r := start(t, &Runner{MaxInFlight: 120, Observer: o})
	began := time.Now()
	var jobs []health.Job
	for i := range 200 {
		k := key(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}), hole.Port()))
		for round := range 8 {
			jobs = append(jobs, health.Job{Key: k, Check: &c,
				Due: began.Add(time.Duration(round) * 510 * time.Millisecond)})
		}
	}
	var healthy []health.Job
	for at := 2 * time.Second; at < 3*time.Second; at += 2 * time.Millisecond {
		healthy = append(healthy, health.Job{Key: key(fast), Check: &c, Due: began.Add(at)})
	}
	beside := start(t, &Runner{MaxInFlight: 120})
	beside.add(healthy...)
	beside.Wake()
	r.add(append(jobs, healthy...)...)
	r.Wake()
	median := func(r *runner) time.Duration {
		ended := func() []time.Duration {
			r.mu().Lock()
			defer r.mu().Unlock()
			return slices.Clone(r.took[key(fast)])
		}
		took := ended()
		for end := began.Add(20 * time.Second); len(took) < len(healthy); took = ended() {
			if time.Now().After(end) {
				t.Fatalf("%d of %d healthy probes ended", len(took), len(healthy))
			}
			time.Sleep(10 * time.Millisecond)
		}
		slices.Sort(took)
		return took[len(took)/2]
	}
	p50, alone := median(r), median(beside)
	if o.waiting.Load() == 0 {
		t.Fatal("the holes did not fill their half: this test shows nothing")
	}
	if p50 > 200*time.Millisecond+2*alone {
		t.Fatalf("the healthy probes ended %s after they were due, in the median, without holes %s", p50, alone)
	}
}

// observer counts what it is told.
type observer struct {
	finished atomic.Int32
	waiting  atomic.Int32
	flying   atomic.Int32
	full     atomic.Int32
}

func (o *observer) Finished(health.Protocol, health.Outcome) { o.finished.Add(1) }
func (o *observer) InFlight(flying, waiting int, full bool) {
	o.waiting.Store(max(o.waiting.Load(), int32(waiting)))
	o.flying.Store(max(o.flying.Load(), int32(flying)))
	if full {
		o.full.Add(1)
	}
}

// The bound holds, is said, and all are probed in the end.
func TestOverloadIsSaid(t *testing.T) {
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS} {
		hole := blackHole(t, netip.MustParseAddr("0.0.0.0"))
		o := &observer{}
		r := start(t, &Runner{MaxInFlight: 10, Observer: o})
		c := check(p)
		c.Timeout = 20 * time.Millisecond
		var jobs []health.Job
		for i := range 100 {
			k := key(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, 0, byte(i)}), hole.Port()))
			jobs = append(jobs, health.Job{Key: k, Check: &c, Due: time.Now()},
				health.Job{Key: k, Check: &c, Due: time.Now().Add(time.Second)})
		}
		r.add(jobs...)
		r.Wake()
		for range jobs {
			select {
			case <-r.ended:
			case <-time.After(10 * time.Second):
				t.Fatalf("%d of %d ended", o.finished.Load(), len(jobs))
			}
		}
		if o.flying.Load() != 10 || o.full.Load() == 0 || o.waiting.Load() == 0 {
			t.Fatalf("%s: %d in flight, said %d times, %d waited", p, o.flying.Load(), o.full.Load(), o.waiting.Load())
		}
	}
}

// Whatever is in flight, Run ends, gives no outcome for what it gave up, and leaves no descriptor
// behind.
func TestStops(t *testing.T) {
	hole := blackHole(t, netip.MustParseAddr("127.0.0.1"))
	alive := httptest.NewServer(http.NotFoundHandler())
	defer alive.Close()
	before := descriptors(t)
	q := newQueue()
	r := &Runner{Source: q}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS, health.TCP, health.GRPC} {
		c := check(p)
		c.Timeout = time.Minute
		q.add(health.Job{Key: key(hole), Check: &c})
	}
	c := check(health.HTTP)
	q.add(health.Job{Key: key(serverAddr(alive)), Check: &c})
	r.Wake()
	<-q.ended
	time.Sleep(50 * time.Millisecond)
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := len(q.outcomes[key(hole)]); n != 0 {
		t.Fatalf("%d outcomes of probes that were given up", n)
	}
	r.Wake() // of nothing
	alive.CloseClientConnections()
	for range 100 {
		if descriptors(t) <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%d descriptors, %d before", descriptors(t), before)
}

func descriptors(t *testing.T) int {
	t.Helper()
	n := 0
	for fd := range 1024 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
			n++
		}
	}
	return n
}

func TestWhatIsLackingHereIsNobodysFault(t *testing.T) {
	for errno, want := range map[syscall.Errno]health.OutcomeKind{
		syscall.EMFILE: health.OutcomeUnknown, syscall.EADDRNOTAVAIL: health.OutcomeUnknown,
		syscall.ENOBUFS:      health.OutcomeUnknown,
		syscall.ECONNREFUSED: health.TCPFailure, syscall.EHOSTUNREACH: health.TCPFailure,
		syscall.ENETUNREACH: health.TCPFailure,
		syscall.ECONNRESET:  health.TCPFailure, syscall.EPIPE: health.TCPFailure, syscall.ETIMEDOUT: health.Timeout,
	} {
		if got := broken(errno); got.Kind != want || got.Code != uint16(errno) {
			t.Errorf("%s: %s, want %s", errno, got, want)
		}
	}
}

// A process that was stopped, or starved of CPU, notices timeouts late. They say nothing about the
// targets.
func TestATimeoutThatIsNoticedLateCountsForNothing(t *testing.T) {
	r := start(t, &Runner{})
	c := check(health.HTTP)
	c.Timeout = -heldUp - time.Second // as if the process had not run for a second
	r.want(health.Outcome{}, netip.MustParseAddrPort("127.0.0.1:1"), c)
	c.Timeout = 0
	r.want(health.Outcome{Kind: health.Timeout}, netip.MustParseAddrPort("127.0.0.1:1"), c)
}

// A backend that answers the head of a call and then sends without end and reads nothing, so that
// the HTTP/2 transport waits to be read, costs one timeout and no more.
func TestAFloodDoesNotOutlastTheTimeout(t *testing.T) {
	ping := strings.Repeat("\x00\x00\x08\x06\x00\x00\x00\x00\x00pingping", 1000)
	for name, flood := range map[string]func(net.Conn){
		"after the head": func(c net.Conn) {
			io.WriteString(c, "\x00\x00\x00\x04\x00\x00\x00\x00\x00"+"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88")
			_ = c.(*net.TCPConn).SetReadBuffer(4096)
			for {
				if _, err := io.WriteString(c, ping); err != nil {
					return
				}
			}
		},
		"no window, then the head": func(c net.Conn) {
			io.WriteString(c, "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00")
			io.WriteString(c, "\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88")
		},
	} {
		t.Run(name, func(t *testing.T) {
			over := make(chan struct{})
			addr := backend(t, func(c net.Conn) {
				request(c)
				flood(c)
				<-over
			})
			t.Cleanup(func() { close(over) })
			r := start(t, &Runner{})
			c := check(health.GRPC)
			c.Timeout = 2 * time.Second
			began := time.Now()
			got := r.ask(addr, c)
			if got.Kind == health.Success || time.Since(began) > 10*time.Second {
				t.Fatalf("%s after %s", got, time.Since(began))
			}
		})
	}
}

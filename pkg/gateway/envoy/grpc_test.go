package envoy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// overHTTP2 has Envoy speak HTTP/2 without TLS to the hosts of its cluster.
const overHTTP2 = "typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3.HttpProtocolOptions: " +
	"{'@type': type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions, " +
	"explicit_http_config: {http2_protocol_options: {}}}}"

// outs are the two ways in which control planes take an endpoint out.
var outs = map[string]func(a, b *rpcServer) []endpoint{
	"removed":  func(_, b *rpcServer) []endpoint { return []endpoint{b.is("HEALTHY")} },
	"DRAINING": func(a, b *rpcServer) []endpoint { return []endpoint{a.is("DRAINING"), b.is("HEALTHY")} },
}

// rpcServer answers calls of gRPC, whose messages are empty: unary ones after 5 ms, and those of
// /test/Stream with a message each 20 ms until the client or the server ends.
type rpcServer struct {
	http.Server
	addr  netip.AddrPort
	calls atomic.Int64
}

func startRPC(t *testing.T, ip string) *rpcServer {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	s := &rpcServer{addr: netip.MustParseAddrPort(l.Addr().String())}
	s.Handler, s.Protocols = s, new(http.Protocols)
	s.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Close(); wg.Wait() })
	return s
}

func (s *rpcServer) is(status string) endpoint { return endpoint{s.addr, status} }

func (s *rpcServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.calls.Add(1)
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Trailer", "Grpc-Status")
	w.Header().Set("At", s.addr.String())
	message := make([]byte, 5)
	for stream := r.URL.Path == "/test/Stream"; stream && r.Context().Err() == nil; time.Sleep(20 * time.Millisecond) {
		w.Write(message)
		http.NewResponseController(w).Flush()
	}
	time.Sleep(5 * time.Millisecond) // a call takes a while
	w.Write(message)
	w.Header().Set("Grpc-Status", "0")
}

// rpcClient has connections of its own, with HTTP/2.
func rpcClient(t *testing.T) *http.Client {
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// call makes a call, and returns who answers it until the context ends.
func (p *proxy) call(ctx context.Context, client *http.Client, method string) (at netip.AddrPort, end func() error,
	err error) {
	message := strings.NewReader("\x00\x00\x00\x00\x00")
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/test/"+method, message)
	if err != nil {
		return at, nil, err
	}
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	answer, err := client.Do(r)
	if err != nil {
		return at, nil, err
	}
	if status := answer.Header.Get("Grpc-Status"); status != "" {
		answer.Body.Close()
		return at, nil, fmt.Errorf("status %s: %s", status, answer.Header.Get("Grpc-Message"))
	}
	at, err = netip.ParseAddrPort(answer.Header.Get("At"))
	return at, func() error {
		defer answer.Body.Close()
		for {
			if _, err := answer.Body.Read(make([]byte, 64)); err != nil {
				break
			}
		}
		if status := answer.Trailer.Get("Grpc-Status"); status != "0" {
			return fmt.Errorf("status %q", status)
		}
		return nil
	}, err
}

func (p *proxy) unary(client *http.Client) (netip.AddrPort, error) {
	at, end, err := p.call(p.t.Context(), client, "Unary")
	if err == nil {
		err = end()
	}
	return at, err
}

// load makes unary calls from 8 clients until it is stopped, and returns how many were made and the
// errors of those that failed.
func (p *proxy) load() (stop func() (int64, []error)) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var made atomic.Int64
	var failed []error
	done := make(chan struct{})
	for range 8 {
		client := rpcClient(p.t.(*testing.T))
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				made.Add(1)
				if _, err := p.unary(client); err != nil {
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	return func() (int64, []error) {
		close(done)
		wg.Wait()
		return made.Load(), failed
	}
}

// No unary call fails when the server ends once the pod is Idle, whether it exits, or says GOAWAY
// and ends what it has begun. The twin that ends at once loses calls.
func TestUnaryCallsWhileAPodIsDrained(t *testing.T) {
	t.Parallel()
	ends := map[string]func(s *rpcServer) error{
		"exits":  func(s *rpcServer) error { return s.Close() },
		"GOAWAY": func(s *rpcServer) error { return s.Shutdown(context.Background()) },
	}
	for how, out := range outs {
		for app, end := range ends {
			for _, mode := range []string{"unprotected", "at Idle"} {
				t.Run(how+", "+app+", "+mode, func(t *testing.T) {
					a, b := startRPC(t, "127.0.71.20"), startRPC(t, "127.0.71.21")
					p := start(t, overHTTP2, a.is("HEALTHY"), b.is("HEALTHY"))
					w := p.observe().Watch([]netip.AddrPort{a.addr}, func() {})
					defer w.Close()
					planes.Await(t, w, health.Routing)
					stop := p.load()
					planes.Until(t, "it gets calls", func() bool { return a.calls.Load() > 20 })
					var took time.Duration
					if mode == "unprotected" {
						end(a)
						time.Sleep(100 * time.Millisecond) // a control plane takes longer
						p.set(out(a, b)...)
					} else {
						began := time.Now()
						p.set(out(a, b)...)
						planes.Await(t, w, health.Idle)
						took = time.Since(began)
						end(a)
					}
					more := b.calls.Load() + 100
					planes.Until(t, "the other one gets calls", func() bool { return b.calls.Load() > more })
					made, failed := stop()
					t.Logf("%d calls, %d failed, Idle after %s", made, len(failed), took.Round(time.Millisecond))
					if mode == "unprotected" && len(failed) == 0 {
						t.Error("it does not count: unprotected, no call failed either")
					}
					if mode != "unprotected" && len(failed) > 0 {
						t.Errorf("%d of %d calls failed, the first: %v", len(failed), made, failed[0])
					}
				})
			}
		}
	}
}

// A stream keeps its pod from Idle until it ends, also when the pod says GOAWAY meanwhile, and when
// Envoy has forgotten the host for a moment, as when the pod was not ready: the host that comes
// back counts from 0. New calls go elsewhere. A connection that Envoy keeps to a DRAINING host is
// then neither waited for nor used.
func TestAStreamIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		out             string
		forgotten, away bool
		open            int // connections that Envoy keeps once the stream has ended
	}{
		{out: "removed"}, {out: "removed", away: true}, {out: "removed", forgotten: true},
		{out: "DRAINING", open: 1}, {out: "DRAINING", away: true}, {out: "DRAINING", forgotten: true},
	} {
		t.Run(fmt.Sprintf("%+v", tt), func(t *testing.T) {
			a, b := startRPC(t, "127.0.71.22"), startRPC(t, "127.0.71.23")
			p := start(t, overHTTP2, a.is("HEALTHY"), b.is("HEALTHY"))
			client := rpcClient(t)
			end := p.streamTo(client, a)
			defer end()
			w := p.observe().Watch([]netip.AddrPort{a.addr}, func() {})
			defer w.Close()
			planes.Await(t, w, health.Routing)
			if tt.forgotten {
				p.set(b.is("HEALTHY"))
				planes.Await(t, w, health.Removed)
				p.set(a.is("HEALTHY"), b.is("HEALTHY"))
				planes.Await(t, w, health.Routing)
			}
			p.set(outs[tt.out](a, b)...)
			planes.Until(t, "it is Removed", func() bool { return w.Reading().State >= health.Removed })
			before := a.calls.Load()
			if tt.away {
				away, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { a.Shutdown(away) })
				defer wg.Wait()
				defer cancel()
			}
			for began := time.Now(); time.Since(began) < settle; {
				if is := w.Reading().State; is != health.Removed {
					t.Fatalf("it is %s while a stream runs", is)
				}
				if _, err := p.unary(client); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			end()
			planes.Await(t, w, health.Idle)
			t.Logf("Idle %s after the stream ended", time.Since(began).Round(time.Millisecond))
			for range 50 {
				if _, err := p.unary(client); err != nil {
					t.Fatal(err)
				}
			}
			if n := a.calls.Load() - before; n > 0 {
				t.Errorf("%d calls arrived that were sent after Removed", n)
			}
			if is, open := w.Reading().State, openTo(t, a.addr); is != health.Idle || open != tt.open {
				t.Errorf("then it is %s with %d connections, want %d", is, open, tt.open)
			}
		})
	}
}

// streamTo begins a stream that s answers.
func (p *proxy) streamTo(client *http.Client, s *rpcServer) (end func()) {
	p.t.Helper()
	planes.Until(p.t, "a stream is at "+s.addr.String(), func() bool {
		ctx, cancel := context.WithCancel(p.t.Context())
		at, _, err := p.call(ctx, client, "Stream")
		if err != nil {
			p.t.Fatal(err)
		}
		if end = cancel; at != s.addr {
			cancel()
		}
		return at == s.addr
	})
	return end
}

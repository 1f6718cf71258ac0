package gatewaytest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"
)

const (
	phaseHeader   = "X-Test-Phase"
	backendHeader = "X-Test-Backend"
	// HoldPath is the path of requests that a Backend does not answer before Release.
	HoldPath = "/hold"
	// StreamPath is the path of requests that a Backend answers with a byte each 100 ms, until the
	// client ends or Release.
	StreamPath = "/stream"
)

// Backend is a real HTTP server that counts what arrives, by the phase it was sent in. Every answer
// names it.
type Backend struct {
	Addr netip.AddrPort

	mu      sync.Mutex
	hits    map[int]int
	release chan struct{}
	held    chan struct{}
}

// StartBackend serves on ip, any port, until the test ends.
func StartBackend(t testing.TB, ip string) *Backend {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	b := &Backend{
		Addr:    netip.MustParseAddrPort(l.Addr().String()),
		hits:    map[int]int{},
		release: make(chan struct{}),
		held:    make(chan struct{}, 1024),
	}
	s := &http.Server{Handler: b, ReadHeaderTimeout: 30 * time.Second}
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(l) })
	t.Cleanup(func() {
		b.Release()
		s.Close()
		wg.Wait()
	})
	return b
}

// ServeHTTP counts the request, waits if it is one that is held, and answers.
func (b *Backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	phase, _ := strconv.Atoi(r.Header.Get(phaseHeader))
	b.mu.Lock()
	b.hits[phase]++
	release := b.release
	b.mu.Unlock()
	w.Header().Set(backendHeader, b.Addr.String())
	if r.URL.Path == StreamPath {
		b.stream(w, r, release)
		return
	}
	if r.URL.Path == HoldPath {
		b.held <- struct{}{}
		select {
		case <-release:
		case <-r.Context().Done():
			return
		}
	}
	fmt.Fprintln(w, b.Addr)
}

func (b *Backend) stream(w http.ResponseWriter, r *http.Request, release chan struct{}) {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		fmt.Fprint(w, ".")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-release:
			return
		case <-r.Context().Done():
			return
		case <-ticker.C:
		}
	}
}

// Hits counts the requests that were sent in phase or later and arrived here.
func (b *Backend) Hits(phase int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for p, c := range b.hits {
		if p >= phase {
			n += c
		}
	}
	return n
}

// Release answers all held requests, present and future ones.
func (b *Backend) Release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.release:
	default:
		close(b.release)
	}
}

// WaitHeld waits until one more request is held here.
func (b *Backend) WaitHeld(ctx context.Context) error {
	select {
	case <-b.held:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("no request is held at %s: %w", b.Addr, ctx.Err())
	}
}

// HTTPClient is a Client of a real proxy: one HTTP/1.1 client with one kept-alive connection.
type HTTPClient struct {
	url    func(pool, path string) string
	client *http.Client
}

// NewHTTPClient returns a client that asks url(pool, path).
func NewHTTPClient(url func(pool, path string) string) *HTTPClient {
	return &HTTPClient{url: url, client: &http.Client{Transport: &http.Transport{
		MaxConnsPerHost: 1, MaxIdleConnsPerHost: 1, DisableCompression: true,
	}}}
}

// Get implements Client.
func (c *HTTPClient) Get(ctx context.Context, pool, path string, phase int) (netip.AddrPort, error) {
	return get(ctx, c.client, c.url(pool, path), phase)
}

// Close implements Client.
func (c *HTTPClient) Close() { c.client.CloseIdleConnections() }

func get(ctx context.Context, c *http.Client, url string, phase int) (netip.AddrPort, error) {
	// A GET, which net/http sends again if a kept-alive connection was closed under it, as every
	// browser does: a proxy that is reloaded closes idle connections. What a target does wrong
	// comes as a status, and is not sent again.
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return netip.AddrPort{}, err
	}
	req.Header.Set(phaseHeader, strconv.Itoa(phase))
	resp, err := c.Do(req)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return netip.AddrPort{}, fmt.Errorf("%s: %s", url, resp.Status)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(resp.Header.Get(backendHeader))
}

// Stream sends a request for StreamPath on a connection of its own, and returns which Backend
// answers until end is called.
func Stream(url string) (at netip.AddrPort, end func(), err error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ctx, end := context.WithCancel(context.Background())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+StreamPath, nil)
	if err != nil {
		return at, end, err
	}
	answer, err := client.Do(r)
	if err != nil {
		return at, end, err
	}
	at, err = netip.ParseAddrPort(answer.Header.Get(backendHeader))
	return at, end, err
}

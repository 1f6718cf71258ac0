// Package poll observes gateways that report their targets over HTTP, as JSON. Packages envoy,
// traefik and apisix define what to read.
//
// One goroutine polls a gateway, on one connection while pods are watched. The generation of a
// reading is the life of that connection: a process that has ended cannot answer on it. Without
// watches it lasts for one poll, because a process that another one has replaced may still answer
// on an old connection (Envoy's hot restart). While watches overlap, such a process is still read.
//
// The answer comes from the gateway's main thread, and its workers apply changes later. A target is
// therefore Removed only when a request that began a settle time after the first reading without
// the target has the same result. A gateway that is stopped in between does not answer such a
// request.
//
// Idle is read from the gateway's counts while it lists the target, if it counts requests for each
// target. Otherwise it is read from the sockets of the network namespace, which the agent shares
// with the gateway.
package poll

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/sockets"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// often is the pause between two polls while a pod is watched, and seldom the pause otherwise.
	// A pause is also at least watchedShare or idleShare times the duration of a poll. So the
	// gateway uses at most a fifth of a core for its answers, and a fiftieth while no pod is
	// watched. Only the poll at the end of a settle time is not put off. A new watch ends the
	// pause, but not before watchedShare or wakeMost: a machine without free CPU makes polls long.
	often, seldom           = 20 * time.Millisecond, time.Second
	watchedShare, idleShare = 4, 49
	wakeMost                = 500 * time.Millisecond
	// failedMost bounds the pause after a poll that failed.
	failedMost = 2 * time.Second
	// timeout bounds one poll. When it expires, all targets are Unknown. A busy Envoy with
	// thousands of hosts takes more than a second.
	timeout = 5 * time.Second
)

// ErrNotStarted is the error of a [Read] whose gateway has not started yet: it sends nothing.
var ErrNotStarted = errors.New("it has not started yet")

// notStarted reports whether the error of a poll shows that the gateway has not started yet. Any
// other gateway may be sending, whatever is wrong with its answers.
func notStarted(err error) bool {
	return errors.Is(err, ErrNotStarted) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist)
}

// Host is one target in an answer of a gateway.
type Host struct {
	Target netip.AddrPort
	// State is Routing, Kept or Removed.
	State health.State
	// Counted reports whether Active includes every request that runs on the target or waits for a
	// connection to it. Open is the number of connections that the target has. Further connections
	// belong to an earlier host of the gateway at this address, and close when their last request
	// ends.
	Counted      bool
	Active, Open int
	// Quiet is the silence after which a connection counts as idle, after an answer or before the
	// first request. It is for HTTP/1.1 only. 0: a connection counts until it is closed.
	Quiet time.Duration
	// Settle is the settle time of this target if it is longer than that of the gateway.
	Settle time.Duration
	// Name is set instead of Target if the gateway sends to a name. The pods behind the name are
	// unknown.
	Name string
}

// Read returns every target that a gateway lists. A target that it does not return is Removed. get
// requests a path and decodes the answer.
type Read func(get func(path string, into any) error) ([]Host, error)

// Gateway is an observed gateway that is polled.
type Gateway struct {
	name, admin string
	read        Read
	settle      time.Duration
	log         *slog.Logger
	// Counts: every target on which requests may run is a Host that counts them, so sockets are not
	// read.
	Counts bool

	mu      sync.Mutex
	watches map[*watch]struct{}
	hosts   []Host // of the last poll, nil if it failed
	wake    signal.Signal
	failing bool
	failed  atomic.Uint64
	// began is closed once the gateway has started.
	began chan struct{}
	// uncounted is the last error of reading sockets, and named has the names that were logged.
	// Only Run uses these two.
	uncounted string
	named     map[string]bool
}

// Population implements gateway.Observed.
func (g *Gateway) Population() string { return g.name }

// Failures implements gateway.Polled.
func (g *Gateway) Failures() uint64 { return g.failed.Load() }

// Began implements gateway.Polled.
func (g *Gateway) Began() <-chan struct{} { return g.began }

// Absent implements gateway.Observed: a gateway that does not answer may send.
func (g *Gateway) Absent() bool { return false }

// Run implements gateway.Observed.
func (g *Gateway) Run(ctx context.Context) error {
	boot, lives, begun := rand.Text()[:8], 0, false
	var c *connection
	for {
		began := time.Now()
		var hosts []Host
		var err error
		if c == nil {
			lives++
			c, err = g.dial(ctx)
		}
		if err == nil {
			hosts, err = c.poll(ctx, g.read)
		}
		if ctx.Err() == nil {
			if err != nil {
				g.failed.Add(1)
			}
			if !begun && !notStarted(err) {
				begun = true
				close(g.began)
			}
			g.adopt(hosts, err, began, fmt.Sprintf("%s.%d", boot, lives))
		}
		ended := time.Now()
		took := ended.Sub(began)
		if err != nil && (c == nil || !c.answered) {
			took = 0 // the gateway was waited for, and did not work
		}
		pause := max(seldom, idleShare*took)
		g.mu.Lock()
		watched := len(g.watches) > 0
		if watched {
			pause = max(often, watchedShare*took)
		}
		if err != nil {
			pause = min(pause, failedMost)
		}
		ends := c != nil && c.ends // what comes next is another generation, and has to settle, too
		for w := range g.watches {
			if w.settling && !ends {
				pause = min(pause, time.Until(w.since.Add(w.settle)))
			}
		}
		g.mu.Unlock()
		if c != nil && (err != nil || c.ends || !watched) {
			c.Close()
			c = nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-g.wake:
			timer.Reset(min(pause, watchedShare*took, wakeMost) - time.Since(ended))
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
		}
		if ctx.Err() != nil {
			timer.Stop()
			if c != nil {
				c.Close()
			}
			g.adopt(nil, ctx.Err(), began, "")
			return nil
		}
	}
}

// connection is a connection to one process of the gateway, for the polling goroutine alone.
// [http.Transport] has two goroutines for each connection, and closes it if the answer arrives 50
// ms before the writing one runs again. On a machine without free CPU, each watch then had to
// settle again.
type connection struct {
	net.Conn
	answers      *bufio.Reader
	host, prefix string
	// ends: the gateway closes the connection after this answer. answered: it has answered a
	// request of this poll.
	ends, answered bool
}

func (g *Gateway) dial(ctx context.Context) (*connection, error) {
	u, err := url.Parse(g.admin)
	if err != nil {
		return nil, err
	}
	network, address, prefix := "tcp", u.Host, strings.TrimSuffix(u.Path, "/")
	if u.Scheme == "unix" {
		network, address, prefix = "unix", u.Path, ""
	}
	conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &connection{Conn: conn, answers: bufio.NewReader(conn), host: cmp.Or(u.Host, "admin"), prefix: prefix}, nil
}

// poll calls read with this connection and returns its result.
func (c *connection) poll(ctx context.Context, read Read) ([]Host, error) {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	c.answered = false
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	return read(c.get)
}

// get decodes the answer to a path.
func (c *connection) get(path string, into any) error {
	if _, err := fmt.Fprintf(c, "GET %s%s HTTP/1.1\r\nHost: %s\r\n\r\n", c.prefix, path, c.host); err != nil {
		return err
	}
	answer, err := http.ReadResponse(c.answers, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer answer.Body.Close()
	c.answered = true
	if c.ends = answer.Close; answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, answer.Status)
	}
	body, err := io.ReadAll(answer.Body) // to the end: the next answer follows
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// adopt updates all watches with the result of a poll that began at began.
func (g *Gateway) adopt(hosts []Host, err error, began time.Time, generation string) {
	if err == nil && hosts == nil {
		hosts = []Host{}
	}
	for _, h := range hosts {
		if h.Name != "" && !g.named[h.Name] {
			g.named[h.Name] = true
			g.log.Warn("the gateway sends to a name: the pods behind it are unknown", "gateway", g.name,
				"name", h.Name)
		}
	}
	var open []sockets.Socket
	var unread error
	if g.mayCount(hosts) && !g.Counts {
		open, unread = sockets.List()
		why := fmt.Sprint(unread)
		if unread != nil && why != g.uncounted {
			g.log.Warn("read sockets: Idle is not acknowledged", "error", unread)
		}
		g.uncounted = why
	}
	g.mu.Lock()
	if failing := err != nil; failing != g.failing && generation != "" {
		g.failing = failing
		if failing {
			g.log.Error("the gateway cannot be read: nothing is acknowledged", "gateway", g.name, "admin", g.admin,
				"error", err)
		} else {
			g.log.Info("the gateway is read", "gateway", g.name, "admin", g.admin)
		}
	}
	g.hosts = hosts
	var changed []func()
	for w := range g.watches {
		if w.update(hosts, open, unread, began, generation) {
			changed = append(changed, w.changed)
		}
	}
	g.mu.Unlock()
	for _, tell := range changed {
		tell()
	}
}

// mayCount marks the watches whose connections must be counted, and reports whether there is one.
func (g *Gateway) mayCount(hosts []Host) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	any := false
	for w := range g.watches {
		w.counts = w.out(hosts) >= health.Kept
		any = any || w.counts
	}
	return any
}

// watch implements gateway.Watch.
type watch struct {
	g       *Gateway
	targets []netip.AddrPort
	changed func()
	// g.mu guards the fields below. since is when all targets were first seen out, in the
	// generation of reading, and settle the longest settle time of one of them since then.
	reading          gateway.Reading
	since            time.Time
	settle           time.Duration
	settling, counts bool
}

// Watch implements gateway.Observed. The state of the first reading is Routing at most, because the
// last poll began before the watch.
func (g *Gateway) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	w := &watch{g: g, changed: changed}
	for _, t := range targets {
		w.targets = append(w.targets, netip.AddrPortFrom(t.Addr().Unmap().WithZone(""), t.Port()))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.out(g.hosts) == health.Routing {
		w.reading.State = health.Routing
	}
	g.watches[w] = struct{}{}
	w.Count()
	return w
}

// of reports whether a belongs to a watched target. A target with port 0 includes all ports of its
// address.
func (w *watch) of(a netip.AddrPort) bool {
	return slices.ContainsFunc(w.targets, func(t netip.AddrPort) bool {
		return t.Addr() == a.Addr() && (t.Port() == 0 || t.Port() == a.Port())
	})
}

// out returns the lowest state of the watched targets. Unknown: the gateway could not be read.
func (w *watch) out(hosts []Host) health.State {
	if hosts == nil || len(w.targets) == 0 {
		return health.Unknown
	}
	state := health.Removed
	for _, h := range hosts {
		if w.of(h.Target) {
			state = min(state, h.State)
		}
	}
	return state
}

// update reports whether the reading has changed.
func (w *watch) update(hosts []Host, open []sockets.Socket, unread error, began time.Time, generation string) bool {
	state, now := w.out(hosts), time.Now()
	if state < health.Removed || generation != w.reading.Generation {
		w.since = time.Time{}
	}
	if state == health.Removed && w.since.IsZero() {
		w.since, w.settle = now, w.g.settle
	}
	for _, h := range hosts {
		if w.of(h.Target) {
			w.settle = max(w.settle, h.Settle)
		}
	}
	was := w.reading
	w.settling = state == health.Removed && (began.Before(w.since) || began.Sub(w.since) < w.settle)
	if w.settling {
		// A gateway that has not been seen to send may not have learned of the pod yet.
		if state = health.Unknown; was.State == health.Routing || was.State == health.Kept {
			state = health.Routing
		}
	}
	w.reading.Generation, w.reading.NoConnections = generation, false
	if w.counts && !w.settling && unread == nil {
		w.reading.Connections, w.reading.Counted = 0, now
		waited := 0
		pools := map[netip.AddrPort]Host{}
		for _, h := range hosts {
			if !w.of(h.Target) {
				continue
			}
			waited += h.Active
			// The target is in several pools. Requests count only if each pool counts them, and the
			// shortest quiet time holds.
			if p, known := pools[h.Target]; known {
				h.Counted, h.Open, h.Quiet = h.Counted && p.Counted, h.Open+p.Open, min(h.Quiet, p.Quiet)
			}
			pools[h.Target] = h
		}
		for _, s := range open {
			if w.of(s.Remote) {
				w.reading.Connections++
				p := pools[s.Remote]
				p.Open--
				pools[s.Remote] = p
				if !s.Quiet(p.Quiet) && (!p.Counted || p.Open < 0) {
					waited++
				}
			}
		}
		w.reading.NoConnections = waited == 0
		if state == health.Removed && waited == 0 {
			state = health.Idle
		}
	}
	if w.reading.State = state; state != was.State {
		w.reading.Since = now
	}
	return state != was.State || was.Generation != generation || was.NoConnections != w.reading.NoConnections
}

// Reading implements gateway.Watch.
func (w *watch) Reading() gateway.Reading {
	w.g.mu.Lock()
	defer w.g.mu.Unlock()
	return w.reading
}

// Count implements gateway.Watch.
func (w *watch) Count() { w.g.wake.Raise() }

// Close implements gateway.Watch.
func (w *watch) Close() {
	w.g.mu.Lock()
	defer w.g.mu.Unlock()
	delete(w.g.watches, w)
}

// Package load sends HTTP requests at a fixed rate and records the outcome of each.
//
// The end-to-end tests rely on it for "no request was lost while the pods were replaced". So it
// must not be more tolerant than a client, nor hide failures of its own:
//
//   - Open loop. Request i is due at start + i/rate, whatever became of the earlier ones. Latency
//     counts from that moment, so a server that stalls is charged for every request that was due
//     meanwhile (no coordinated omission).
//   - No second try. Each request is written once to one connection and has exactly one outcome:
//     ok, or failed with one [Kind]. net/http's Transport is not usable for this: it repeats
//     idempotent requests by itself when a reused connection turns out dead, and tells that apart
//     by errors it does not export. A POST without GetBody stops the repeating but changes what
//     gateways may do with the request (they retry a GET, not a POST). So the request is written to
//     a net.Conn by hand and read by http.ReadResponse, in both modes; this also costs less than
//     half of the CPU of net/http's client for a new connection, which matters beside the system
//     under test. A host name is resolved once, to one address, because a Dialer tries the next
//     address of a name when one refuses.
//   - Requests in flight at the end are waited for, never cancelled.
//   - What the generator failed to do is counted apart: Late (started long after they were due;
//     their latency includes it) and Skipped (never sent, MaxInFlight was reached). A run with many
//     of either says little about the server.
//
// A request belongs to the phase in which it was due. So a request that fails during a rollout may
// be counted in the phase before the rollout.
//
// Known flaws: plain HTTP/1.1 only; requests have no body; a delay of the kernel in handing over a
// response counts as the server's.
package load

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"
)

// Options say what to send. Target, Rate and Timeout must be set.
type Options struct {
	// Target is an http URL. A host name is resolved once, when the load starts.
	Target string
	// Rate is in requests per second. Every outcome is kept in memory (about 100 bytes each).
	Rate float64
	// Timeout bounds one request, from when it is started (not: due) to the last byte of its
	// response.
	Timeout time.Duration
	// KeepAlive reuses connections, the one unused longest first, so that all stay in use. False
	// opens one for each request.
	KeepAlive bool
	// DropClosed looks, before a kept connection is used again, whether the server has closed it
	// meanwhile, and then takes another, as browsers and proxies do. Result.Dropped counts these.
	// False, the strict default, sends on it: a request that the server could not have received is
	// then a failure, even though the server closed an idle connection as it may.
	DropClosed bool
	// SourceAddrs are local addresses to connect from, in turn. One address has about 28,000 ports:
	// after as many connections within a minute or two they repeat, and one measures stale
	// conntrack entries. Empty leaves the choice to the kernel.
	SourceAddrs []netip.Addr
	// Method is GET if empty.
	Method string
	// Headers are sent with each request. Host is honoured; Connection is refused, because
	// KeepAlive decides it.
	Headers http.Header
	// WantBody, unless nil, is what each 2xx response must consist of.
	WantBody []byte
	// MaxInFlight bounds the requests under way; what is due beyond is skipped. 0 means as many as
	// Rate and Timeout can produce.
	MaxInFlight int
	// Failures is how many failures of each kind the result tells in full. 0 means five.
	Failures int
}

// Load is a load under way. Its methods may be called by any goroutine.
type Load struct {
	opts    Options
	address netip.AddrPort
	request *http.Request
	wire    []byte // the request as it is sent
	start   time.Time
	stop    context.CancelFunc
	done    chan struct{}
	result  Result // valid once done is closed

	mu       sync.Mutex
	inFlight int
	idle     []*conn
	records  []record
	marks    []mark
	opened   int
	dropped  int
}

// record is the outcome of one request. Times are offsets from the start.
type record struct {
	due     time.Duration
	late    time.Duration // from due to started
	took    time.Duration // from due to the outcome
	skipped bool
	err     error // nil: ok
	pod     string
	by      string
	source  netip.AddrPort
	reused  bool
}

type mark struct {
	name string
	at   time.Duration
}

// Run starts a load in the background and returns at once; only the name of the target is looked up
// before. The load ends with ctx or by Stop, which must be called in either case to get the result.
// An error names the option at fault and its value.
func Run(ctx context.Context, opts Options) (*Load, error) {
	l := &Load{opts: opts, done: make(chan struct{}), marks: []mark{{name: FirstPhase}}}
	if err := l.prepare(ctx); err != nil {
		return nil, err
	}
	ctx, l.stop = context.WithCancel(ctx)
	l.start = time.Now()
	go l.run(ctx)
	return l, nil
}

// Mark begins a phase: requests due from now on belong to it, until the next mark. After the end of
// the load it changes nothing.
func (l *Load) Mark(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marks = append(l.marks, mark{name, time.Since(l.start)})
}

// Stop ends the schedule, waits for the requests in flight (Timeout at most) and returns what
// became of all. A repeat returns the same.
func (l *Load) Stop() Result {
	l.stop()
	<-l.done
	return l.result
}

func (l *Load) prepare(ctx context.Context) error {
	o := &l.opts
	u, err := url.Parse(o.Target)
	switch {
	case err != nil:
		return fmt.Errorf("load target %q: %w", o.Target, err)
	case u.Scheme != "http" || u.Hostname() == "":
		return fmt.Errorf("load target %q: want http://host[:port]/path", o.Target)
	case !(o.Rate > 0) || math.IsInf(o.Rate, 0):
		return fmt.Errorf("load rate %v: want requests per second, above 0", o.Rate)
	case o.Timeout <= 0:
		return fmt.Errorf("load timeout %v: want above 0", o.Timeout)
	case o.MaxInFlight < 0:
		return fmt.Errorf("load max in flight %d: want 0 or above", o.MaxInFlight)
	case o.Headers.Get("Connection") != "":
		return fmt.Errorf("load header Connection %q: KeepAlive decides it", o.Headers.Get("Connection"))
	}
	if o.MaxInFlight == 0 {
		o.MaxInFlight = int(math.Ceil(o.Rate*o.Timeout.Seconds())) + 100
	}
	o.SourceAddrs = slices.Clone(o.SourceAddrs)
	for i, a := range o.SourceAddrs {
		o.SourceAddrs[i] = a.Unmap()
	}
	if l.address, err = resolve(ctx, u, o.SourceAddrs); err != nil {
		return fmt.Errorf("load target %q: %w", o.Target, err)
	}
	for _, a := range o.SourceAddrs {
		if a.Is4() != l.address.Addr().Is4() {
			return fmt.Errorf("load source address %v: not of the family of the target %v", a, l.address)
		}
	}
	if l.request, err = http.NewRequest(o.Method, o.Target, nil); err != nil {
		return fmt.Errorf("load method %q: %w", o.Method, err)
	}
	if o.Headers != nil {
		l.request.Header = o.Headers.Clone()
	}
	if host := o.Headers.Get("Host"); host != "" {
		l.request.Host = host
	}
	l.request.Close = !o.KeepAlive
	var b bytes.Buffer
	if err := l.request.Write(&b); err != nil {
		return fmt.Errorf("load request: %w", err)
	}
	l.wire = b.Bytes()
	return nil
}

// resolve returns one address of the URL's host, of the family of the sources if there are any.
func resolve(ctx context.Context, u *url.URL, sources []netip.Addr) (netip.AddrPort, error) {
	port := uint16(80)
	if p := u.Port(); p != "" {
		ap, err := netip.ParseAddrPort("0.0.0.0:" + p)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("port %q: %w", p, err)
		}
		port = ap.Port()
	}
	if a, err := netip.ParseAddr(u.Hostname()); err == nil {
		return netip.AddrPortFrom(a.Unmap(), port), nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		return netip.AddrPort{}, err
	}
	for _, a := range addrs {
		if a = a.Unmap(); len(sources) == 0 || a.Is4() == sources[0].Is4() {
			return netip.AddrPortFrom(a, port), nil
		}
	}
	return netip.AddrPort{}, errors.New("no address of the family of the source addresses")
}

func (l *Load) run(ctx context.Context) {
	defer close(l.done)
	defer l.stop()
	var requests sync.WaitGroup
	l.schedule(ctx, &requests)
	end := time.Since(l.start)
	requests.Wait()

	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.idle {
		c.Close()
	}
	l.result = summarise(l.start, l.records, l.marks, end, cmp.Or(l.opts.Failures, failuresOfKind))
	l.result.Connections, l.result.Dropped = l.opened, l.dropped
}

// schedule starts each request when it is due. Behind schedule it catches up at once, also with
// what was due when ctx ended.
func (l *Load) schedule(ctx context.Context, requests *sync.WaitGroup) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	end := time.Duration(math.MaxInt64)
	for i := 0; ; i++ {
		due := time.Duration(float64(i) / l.opts.Rate * float64(time.Second))
		if ctx.Err() != nil {
			end = min(end, time.Since(l.start))
		}
		if due > end {
			return
		}
		if wait := due - time.Since(l.start); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		}
		l.launch(due, requests)
	}
}

func (l *Load) launch(due time.Duration, requests *sync.WaitGroup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inFlight >= l.opts.MaxInFlight {
		l.records = append(l.records, record{due: due, skipped: true})
		return
	}
	l.inFlight++
	requests.Go(func() {
		r := l.once(due)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.inFlight--
		l.records = append(l.records, r)
	})
}

// once sends one request and waits for its outcome.
func (l *Load) once(due time.Duration) record {
	began := time.Now()
	r := record{due: due, late: began.Sub(l.start) - due}
	deadline := began.Add(l.opts.Timeout)
	c, err := l.connect(deadline)
	if err == nil {
		r.source, r.reused = c.source, c.used
		var a answer
		a, err = c.exchange(deadline, l.wire, l.request, l.opts.WantBody)
		r.pod, r.by = a.pod, a.by
		l.release(c, a.reusable && l.opts.KeepAlive)
	}
	r.err = err
	r.took = time.Since(l.start) - due
	return r
}

package gatewaytest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

var _ gateway.Directed = (*fake)(nil)

func TestFakeContract(t *testing.T) {
	Run(t, func(t *testing.T) *Harness {
		f := newFake(t, "owned")
		return &Harness{
			Gateway:   f,
			Open:      func(testing.TB) gateway.Directed { return f },
			Owned:     "owned",
			NewClient: func(testing.TB) Client { return f.client() },
			Reload:    func(testing.TB) { f.reload() },
			Restart:   func(testing.TB) { f.restart() },
			Freeze:    func(testing.TB) { f.freeze() },
			Thaw:      func(testing.TB) { f.thaw() },
			Kill:      func(testing.TB) { f.kill() },
			Unreadable: func(testing.TB) health.Pool {
				f.unread = "unread"
				return f.unread
			},
		}
	})
}

// The fake's one purpose is to notice a request to a removed target. This would notice if it did
// not.
func TestFakeNoticesBrokenPromises(t *testing.T) {
	rec := &recorder{TB: t}
	f := newFake(rec, "web")
	k := health.Key{Pool: "web", Target: health.Target{UID: "u", Addr: netip.MustParseAddrPort("127.0.0.1:1")}}
	if err := f.Apply(t.Context(), append(ops(health.WantRouted, k), ops(health.WantRemoved, k)...)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Observe(t.Context(), []health.Key{k}); err != nil {
		t.Fatal(err)
	}
	f.now.servers[k].routed = true // behind everybody's back
	if _, end, ok := f.begin("web"); ok {
		end()
	}
	if rec.errors != 1 {
		t.Errorf("%d errors reported, want 1", rec.errors)
	}
}

type recorder struct {
	testing.TB
	errors int
}

func (r *recorder) Errorf(string, ...any) { r.errors++ }

// fake is a data plane in memory with its gateway. It sends real HTTP requests if asked for by
// client, or pretends to with begin. On every choice of a target it checks that the target is not
// one whose removal was observed.
//
// It can lose or keep everything over a reload, keep an old process for its open requests, hang and
// die. It is safe for concurrent use.
type fake struct {
	t testing.TB

	mu         sync.Mutex
	generation int
	dead       bool
	frozen     chan struct{} // nil while it answers
	pool       health.Pool
	unread     health.Pool         // a pool that cannot be read
	saved      map[health.Key]bool // what a reload routes
	now        *fakeProcess
	old        []*fakeProcess
	promised   map[health.Key]bool // observed as not routed, and not asked for since
	turn       int
}

type fakeProcess struct {
	servers map[health.Key]*fakeServer
}

type fakeServer struct {
	routed bool
	active int
}

func (p *fakeProcess) active() int {
	n := 0
	for _, s := range p.servers {
		n += s.active
	}
	return n
}

// newFake makes a data plane with one pool.
func newFake(t testing.TB, pool health.Pool) *fake {
	f := &fake{t: t, pool: pool, saved: map[health.Key]bool{}, promised: map[health.Key]bool{}}
	f.boot()
	return f
}

// boot makes the first process of a generation from what is saved. f.mu is held, or f is new.
func (f *fake) boot() {
	f.generation++
	f.now = &fakeProcess{servers: map[health.Key]*fakeServer{}}
	for k := range f.saved {
		f.now.servers[k] = &fakeServer{routed: true}
	}
}

// reload makes another generation from what is saved. If requests are open, the process they are in
// goes on as an old one.
func (f *fake) reload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now.active() > 0 {
		f.old = append(f.old, f.now)
	}
	f.boot()
}

// restart makes another generation from what is saved; requests that are open are no longer
// counted.
func (f *fake) restart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.old = nil
	f.dead = false
	f.boot()
}

// kill makes every call fail until restart.
func (f *fake) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
}

// freeze makes every call of the gateway wait for its context or thaw.
func (f *fake) freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen == nil {
		f.frozen = make(chan struct{})
	}
}

// thaw ends freeze.
func (f *fake) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen != nil {
		close(f.frozen)
		f.frozen = nil
	}
}

// ready waits while frozen. It returns with f.mu held if there is no error.
func (f *fake) ready(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		f.mu.Lock()
		if f.dead {
			f.mu.Unlock()
			return errors.New("fake gateway: dead")
		}
		frozen := f.frozen
		if frozen == nil {
			return nil
		}
		f.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-frozen:
		}
	}
}

// Apply implements gateway.Directed.
func (f *fake) Apply(ctx context.Context, ops []health.Op) error {
	if err := f.ready(ctx); err != nil {
		return fmt.Errorf("apply %d ops: %w", len(ops), err)
	}
	defer f.mu.Unlock()
	var errs []error
	for _, op := range ops {
		if err := f.apply(op); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", op, err))
		}
	}
	return errors.Join(errs...)
}

func (f *fake) apply(op health.Op) error {
	if op.Pool != f.pool {
		return fmt.Errorf("no pool %q", op.Pool)
	}
	key := op.Key
	switch op.Want {
	case health.WantRouted:
		delete(f.promised, key)
		f.saved[key] = true
		s := f.now.servers[key]
		if s == nil {
			s = &fakeServer{}
			f.now.servers[key] = s
		}
		s.routed = true
	case health.WantRemoved, health.WantAbsent:
		delete(f.saved, key)
		for _, p := range append([]*fakeProcess{f.now}, f.old...) {
			s := p.servers[key]
			if s == nil {
				continue
			}
			s.routed = false
			if op.Want == health.WantAbsent && s.active == 0 {
				delete(p.servers, key)
			}
		}
	}
	return nil
}

// Observe implements gateway.Directed.
func (f *fake) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	at := time.Now()
	if err := f.ready(ctx); err != nil {
		return health.Observation{}, fmt.Errorf("observe %d keys: %w", len(keys), err)
	}
	defer f.mu.Unlock()
	f.old = slices.DeleteFunc(f.old, func(p *fakeProcess) bool { return p.active() == 0 })
	o := health.Observation{Generation: fmt.Sprintf("fake %d", f.generation), At: at,
		Seen: map[health.Key]health.Seen{}}
	for _, k := range keys {
		if k.Pool == f.unread && k.Pool != "" {
			o.Unread = map[health.Pool]error{k.Pool: errors.New("it cannot be read")}
			continue
		}
		if k.Pool != f.pool {
			return health.Observation{}, fmt.Errorf("no pool %q", k.Pool)
		}
		seen := health.Seen{Missing: true}
		for i, p := range append([]*fakeProcess{f.now}, f.old...) {
			s := p.servers[k]
			if s == nil {
				continue
			}
			seen.Present = true
			seen.Active += s.active
			seen.Routed = seen.Routed || s.routed
			if i == 0 {
				seen.Missing = !s.routed
			}
		}
		if !seen.Routed {
			f.promised[k] = true
		}
		o.Seen[k] = seen
	}
	return o, nil
}

// Stopped implements gateway.Directed.
func (f *fake) Stopped(context.Context) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

// Owned implements gateway.Directed.
func (f *fake) Owned(ctx context.Context) ([]health.Key, error) {
	if err := f.ready(ctx); err != nil {
		return nil, fmt.Errorf("list owned: %w", err)
	}
	defer f.mu.Unlock()
	keys := maps.Clone(f.saved)
	for _, p := range append([]*fakeProcess{f.now}, f.old...) {
		for k := range p.servers {
			keys[k] = true
		}
	}
	return slices.SortedFunc(maps.Keys(keys), func(a, b health.Key) int {
		return strings.Compare(a.String(), b.String())
	}), nil
}

// routed returns the targets that a new request to the pool could reach now, sorted. f.mu is held.
func (f *fake) routed(pool health.Pool) []health.Target {
	var list []health.Target
	for k, s := range f.now.servers {
		if k.Pool == pool && s.routed {
			list = append(list, k.Target)
		}
	}
	slices.SortFunc(list, func(a, b health.Target) int { return strings.Compare(a.String(), b.String()) })
	return list
}

// begin chooses a target for one request, which is active until end is called. It reports false if
// the pool routes nowhere. If the target is one whose removal was observed, the test fails.
func (f *fake) begin(pool health.Pool) (target health.Target, end func(), ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := f.routed(pool)
	if len(list) == 0 || f.dead {
		return health.Target{}, nil, false
	}
	f.turn++
	target = list[f.turn%len(list)]
	k := health.Key{Pool: pool, Target: target}
	if f.promised[k] {
		f.t.Errorf("fake gateway: a request is sent to %s, which was observed as not routed and not asked for since", k)
	}
	s := f.now.servers[k]
	s.active++
	return target, sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		s.active--
	}), true
}

// client returns a client of the fake, which sends real requests to the targets.
func (f *fake) client() Client {
	return &fakeClient{f: f, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}}
}

type fakeClient struct {
	f      *fake
	client *http.Client
}

func (c *fakeClient) Get(ctx context.Context, pool, path string, phase int) (netip.AddrPort, error) {
	target, end, ok := c.f.begin(health.Pool(pool))
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("fake gateway: pool %s routes nowhere", pool)
	}
	defer end()
	return get(ctx, c.client, "http://"+target.Addr.String()+path, phase)
}

func (c *fakeClient) Close() { c.client.CloseIdleConnections() }

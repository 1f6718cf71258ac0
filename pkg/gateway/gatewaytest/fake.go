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

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Fake is a data plane in memory with its gateway. It sends real HTTP requests if asked for by
// Client, or pretends to with Begin. On every choice of a target it checks that the target is not
// one whose removal it has let somebody observe.
//
// It can do what real ones do to us: refuse an op, carry out an op and lose the answer, lose
// everything or keep everything over a reload, keep an old process for its open requests, hang and
// die. It is safe for concurrent use.
type Fake struct {
	t testing.TB

	mu         sync.Mutex
	generation int
	dead       bool
	thaw       chan struct{} // not nil while frozen
	pools      map[health.Pool][]health.Target
	saved      map[health.Key]bool // what a reload routes
	now        *fakeProcess
	old        []*fakeProcess
	promised   map[health.Key]bool // observed as not routed, and not asked for since
	turn       int

	fail func(health.Op) error
	lose func(health.Op) bool
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

// NewFake makes a data plane with these pools. Targets given for a pool are static: routed at the
// start, never deleted. A pool without targets is owned.
func NewFake(t testing.TB, pools map[health.Pool][]health.Target) *Fake {
	f := &Fake{t: t, pools: pools, saved: map[health.Key]bool{}, promised: map[health.Key]bool{}}
	f.boot()
	return f
}

// boot makes the first process of a generation from what is saved. f.mu is held, or f is new.
func (f *Fake) boot() {
	f.generation++
	f.now = &fakeProcess{servers: map[health.Key]*fakeServer{}}
	for k := range f.saved {
		f.now.servers[k] = &fakeServer{routed: true}
	}
	for pool, targets := range f.pools {
		for _, t := range targets {
			k := health.Key{Pool: pool, Target: t}
			f.now.servers[k] = &fakeServer{routed: true}
			delete(f.promised, k) // nobody promises anything of a static target over a reload
		}
	}
}

// FailOps makes every op fail, unchanged, for which fail returns an error. nil ends it.
func (f *Fake) FailOps(fail func(health.Op) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// LoseAnswers carries out every op for which lose is true, and reports an error nevertheless. nil
// ends it.
func (f *Fake) LoseAnswers(lose func(health.Op) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lose = lose
}

// Reload makes another generation from what is saved. If requests are open, the process they are in
// goes on as an old one.
func (f *Fake) Reload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now.active() > 0 {
		f.old = append(f.old, f.now)
	}
	f.boot()
}

// Restart makes another generation from what is saved; requests that are open are no longer
// counted.
func (f *Fake) Restart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.old = nil
	f.dead = false
	f.boot()
}

// Kill makes every call fail until Restart.
func (f *Fake) Kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
}

// Freeze makes every call of the gateway wait for its context or Thaw.
func (f *Fake) Freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.thaw == nil {
		f.thaw = make(chan struct{})
	}
}

// Thaw ends Freeze.
func (f *Fake) Thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.thaw != nil {
		close(f.thaw)
		f.thaw = nil
	}
}

// ready waits while frozen. It returns with f.mu held if there is no error.
func (f *Fake) ready(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		f.mu.Lock()
		if f.dead {
			f.mu.Unlock()
			return errors.New("fake gateway: dead")
		}
		thaw := f.thaw
		if thaw == nil {
			return nil
		}
		f.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-thaw:
		}
	}
}

func (f *Fake) isStatic(k health.Key) bool { return slices.Contains(f.pools[k.Pool], k.Target) }

// resolve returns the static key at the address of k, if there is one: operators configure
// addresses, not UIDs.
func (f *Fake) resolve(k health.Key) health.Key {
	for _, t := range f.pools[k.Pool] {
		if t.Addr == k.Target.Addr {
			return health.Key{Pool: k.Pool, Target: t}
		}
	}
	return k
}

// Apply implements gateway.Directed.
func (f *Fake) Apply(ctx context.Context, ops []health.Op) error {
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

func (f *Fake) apply(op health.Op) error {
	targets, ok := f.pools[op.Pool]
	if !ok {
		return fmt.Errorf("no pool %q", op.Pool)
	}
	if f.fail != nil {
		if err := f.fail(op); err != nil {
			return err
		}
	}
	key := f.resolve(op.Key)
	switch op.Want {
	case health.WantRouted:
		if len(targets) > 0 && !f.isStatic(key) {
			return fmt.Errorf("no server has the address %s", op.Target.Addr)
		}
		delete(f.promised, key)
		if len(targets) == 0 {
			f.saved[key] = true
		}
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
			if op.Want == health.WantAbsent && s.active == 0 && !f.isStatic(key) {
				delete(p.servers, key)
			}
		}
	}
	if f.lose != nil && f.lose(op) {
		return errors.New("fake gateway: the answer was lost")
	}
	return nil
}

// Observe implements gateway.Directed.
func (f *Fake) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	at := time.Now()
	if err := f.ready(ctx); err != nil {
		return health.Observation{}, fmt.Errorf("observe %d keys: %w", len(keys), err)
	}
	defer f.mu.Unlock()
	f.old = slices.DeleteFunc(f.old, func(p *fakeProcess) bool { return p.active() == 0 })
	o := health.Observation{Generation: fmt.Sprintf("fake %d", f.generation), At: at,
		Seen: map[health.Key]health.Seen{}}
	for _, k := range keys {
		if _, ok := f.pools[k.Pool]; !ok {
			return health.Observation{}, fmt.Errorf("no pool %q", k.Pool)
		}
		key := f.resolve(k)
		seen := health.Seen{Missing: true}
		for i, p := range append([]*fakeProcess{f.now}, f.old...) {
			s := p.servers[key]
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
		if f.isStatic(key) {
			seen.Present = seen.Routed || seen.Active > 0
		}
		if !seen.Routed {
			f.promised[key] = true
		}
		o.Seen[k] = seen
	}
	return o, nil
}

// Stopped implements gateway.Directed.
func (f *Fake) Stopped(context.Context) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

// Owned implements gateway.Directed.
func (f *Fake) Owned(ctx context.Context) ([]health.Key, error) {
	if err := f.ready(ctx); err != nil {
		return nil, fmt.Errorf("list owned: %w", err)
	}
	defer f.mu.Unlock()
	keys := maps.Clone(f.saved)
	for _, p := range append([]*fakeProcess{f.now}, f.old...) {
		for k := range p.servers {
			if !f.isStatic(k) {
				keys[k] = true
			}
		}
	}
	return slices.SortedFunc(maps.Keys(keys), func(a, b health.Key) int {
		return strings.Compare(a.String(), b.String())
	}), nil
}

// Routed returns the targets that a new request to the pool could reach now, sorted.
func (f *Fake) Routed(pool health.Pool) []health.Target {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.routed(pool)
}

func (f *Fake) routed(pool health.Pool) []health.Target {
	var list []health.Target
	for k, s := range f.now.servers {
		if k.Pool == pool && s.routed {
			list = append(list, k.Target)
		}
	}
	slices.SortFunc(list, func(a, b health.Target) int { return strings.Compare(a.String(), b.String()) })
	return list
}

// Begin chooses a target for one request, which is active until end is called. It reports false if
// the pool routes nowhere. If the target is one whose removal was observed, the test fails.
func (f *Fake) Begin(pool health.Pool) (target health.Target, end func(), ok bool) {
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

// Client returns a client of the fake, which sends real requests to the targets.
func (f *Fake) Client() Client {
	return &fakeClient{f: f, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}}
}

type fakeClient struct {
	f      *Fake
	client *http.Client
}

func (c *fakeClient) Get(ctx context.Context, pool, path string, phase int) (netip.AddrPort, error) {
	target, end, ok := c.f.Begin(health.Pool(pool))
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("fake gateway: pool %s routes nowhere", pool)
	}
	defer end()
	return get(ctx, c.client, "http://"+target.Addr.String()+path, phase)
}

func (c *fakeClient) Close() { c.client.CloseIdleConnections() }

package gatewaytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Client is one client connection to the proxy, kept alive between requests.
type Client interface {
	// Get sends one request of a phase through the proxy to a pool and returns the address of the
	// Backend that answered.
	Get(ctx context.Context, pool, path string, phase int) (netip.AddrPort, error)
	Close()
}

// Harness is one running proxy and a gateway that directs it. If a function is nil, the parts of
// the contract that need it are skipped.
type Harness struct {
	// Gateway is the one under test.
	Gateway gateway.Directed
	// Open returns another gateway for the same proxy, as a restarted agent opens one.
	Open func(t testing.TB) gateway.Directed
	// Owned is a pool whose targets the agent makes and deletes.
	Owned health.Pool
	// NewClient opens a client connection.
	NewClient func(t testing.TB) Client
	// Reload makes the proxy read its configuration again and returns once the new configuration is
	// in effect.
	Reload func(t testing.TB)
	// Restart ends the proxy with all its connections and starts it again.
	Restart func(t testing.TB)
	// Freeze stops every process of the proxy without ending it; Thaw continues them.
	Freeze, Thaw func(t testing.TB)
	// Kill ends the proxy permanently.
	Kill func(t testing.TB)
	// Masks: the proxy finds its targets by itself, and the gateway only hides some. A target that
	// the gateway has not received may be routed, the last target of a pool always is, and a
	// restart of the proxy does not change the generation.
	Masks bool
	// Unreadable makes another pool of the gateway, of which the proxy tells nothing. It may
	// replace Gateway.
	Unreadable func(t testing.TB) health.Pool
	// GoneWithin bounds how long an idle target may take to be gone after WantAbsent; 0 means 10 s.
	GoneWithin time.Duration
}

// callTimeout bounds one call of a gateway in these tests.
const callTimeout = 10 * time.Second

// Run runs the contract of [gateway.Directed]. Each part calls start for a harness of its own, and
// the parts run in parallel.
func Run(t *testing.T, start func(t *testing.T) *Harness) {
	parts := []struct {
		name string
		run  func(*testing.T, *suite)
	}{
		{"a routed target gets requests and a removed one none under load", removedUnderLoad},
		{"requests in flight finish and count as active until then", inFlight},
		{"a kept-alive client connection does not reach a removed target", keptAlive},
		{"ops are idempotent and carried out in order", idempotent},
		{"a reload under load fails no request and brings nothing back", reloadUnderLoad},
		{"a reload and a restart make another generation", generations},
		{"an old process with an open request counts as active", oldProcess},
		{"a removal after a reload reaches the old process too", removedInOldProcess},
		{"gone deletes the target", gone},
		{"two pods at one address are two targets", twoPods},
		{"an unknown pool is an error", unknownPool},
		{"a pool that cannot be read hides no other", unreadablePool},
		{"an unknown target is neither present nor routed", unknownTarget},
		{"a proxy that hangs does not outlast the deadline", hanging},
		{"a dead proxy is an error and not an observation", dead},
		{"after a restart everything can be applied again", restarted},
		{"a batch of 500 ops takes seconds", batch},
		{"what an earlier agent made is owned", owned},
	}
	for _, p := range parts {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.run(t, &suite{T: t, Harness: start(t)})
		})
	}
}

// suite is a harness with what the parts of the contract share.
type suite struct {
	*testing.T
	*Harness
	phase atomic.Int64
}

func (s *suite) needs(name string, ok bool) {
	s.Helper()
	if !ok {
		s.Skipf("this harness has no %s", name)
	}
}

func (s *suite) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	s.Cleanup(cancel)
	return ctx
}

func (s *suite) key(b *Backend, uid string) health.Key {
	return health.Key{Pool: s.Owned, Target: health.Target{UID: health.UID(uid), Addr: b.Addr}}
}

func ops(w health.Want, keys ...health.Key) []health.Op {
	list := make([]health.Op, len(keys))
	for i, k := range keys {
		list[i] = health.Op{Key: k, Want: w}
	}
	return list
}

func (s *suite) apply(list ...health.Op) {
	s.Helper()
	if err := s.Gateway.Apply(s.ctx(), list); err != nil {
		s.Fatalf("apply: %v", err)
	}
}

func (s *suite) observe(keys ...health.Key) health.Observation {
	s.Helper()
	o, err := s.Gateway.Observe(s.ctx(), keys)
	if err != nil {
		s.Fatalf("observe: %v", err)
	}
	for _, k := range keys {
		if _, ok := o.Seen[k]; !ok {
			s.Fatalf("observation has no entry for %s", k)
		}
	}
	return o
}

func (s *suite) see(k health.Key) health.Seen {
	s.Helper()
	return s.observe(k).Seen[k]
}

// until polls until ok or the limit, and returns the last reading.
func (s *suite) until(limit time.Duration, what string, ok func() (bool, any)) {
	s.Helper()
	deadline := time.Now().Add(limit)
	for {
		good, last := ok()
		if good {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("not within %s: %s; last: %+v", limit, what, last)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// backends starts n servers on addresses of their own and routes to them.
func (s *suite) backends(n int) ([]*Backend, []health.Key) {
	s.Helper()
	var bs []*Backend
	var ks []health.Key
	for i := range n {
		b := StartBackend(s, fmt.Sprintf("127.0.0.%d", 11+i))
		bs = append(bs, b)
		ks = append(ks, s.key(b, fmt.Sprintf("11111111-2222-3333-4444-%012d", i)))
	}
	s.apply(ops(health.WantRouted, ks...)...)
	return bs, ks
}

func (s *suite) client() Client {
	c := s.NewClient(s)
	s.Cleanup(c.Close)
	return c
}

// hold sends requests of phase 0 until one is held at b, and returns the channel with its end.
func (s *suite) hold(b *Backend, pool health.Pool) <-chan error {
	s.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s.Cleanup(cancel)
	held := make(chan error, 1)
	go func() {
		// Others answer at once, which a hold at every backend but b would not.
		for {
			c := s.NewClient(s)
			addr, err := c.Get(ctx, string(pool), HoldPath, 0)
			c.Close()
			if err != nil || addr == b.Addr {
				held <- err
				return
			}
		}
	}()
	if err := b.WaitHeld(s.ctx()); err != nil {
		s.Fatal(err)
	}
	return held
}

// finish releases the request that is held at b, which must not fail, and waits until k is out and
// idle. ops, if there are any, are applied until they succeed.
func (s *suite) finish(b *Backend, held <-chan error, k health.Key, ops []health.Op) {
	s.Helper()
	b.Release()
	if err := <-held; err != nil {
		s.Fatalf("the request in flight failed: %v", err)
	}
	s.until(5*time.Second, "removed and idle", func() (bool, any) {
		var err error
		if len(ops) > 0 {
			err = s.Gateway.Apply(s.ctx(), ops)
		}
		got := s.see(k)
		return err == nil && got.Active == 0 && !got.Routed, fmt.Sprint(got, err)
	})
}

// onlyFirstOut checks that of ks only the first target is not routed.
func (s *suite) onlyFirstOut(when string, ks []health.Key) {
	s.Helper()
	o := s.observe(ks...)
	for i, k := range ks {
		if o.Seen[k].Routed != (i != 0) || i != 0 && o.Seen[k].Missing {
			s.Errorf("%s: %s is seen as %+v", when, k, o.Seen[k])
		}
	}
}

// avoids checks that a new client does not reach b.
func (s *suite) avoids(b *Backend) {
	s.Helper()
	c := s.client()
	for range 10 {
		if addr, err := c.Get(s.ctx(), string(s.Owned), "/", 1); err != nil || addr == b.Addr {
			s.Fatalf("a new client got %s, %v", addr, err)
		}
	}
}

// load keeps sending requests from n clients, each on one kept-alive connection that it gives up
// after some requests.
type load struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	done   atomic.Int64
	mu     sync.Mutex
	failed []error
	served map[netip.AddrPort]int
}

func (s *suite) load(n int, pool health.Pool) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{stop: cancel, served: map[netip.AddrPort]int{}}
	for range n {
		l.wg.Go(func() {
			c := s.NewClient(s)
			defer func() { c.Close() }()
			for i := 1; ctx.Err() == nil; i++ {
				if i%20 == 0 {
					c.Close()
					c = s.NewClient(s)
				}
				reqCtx, done := context.WithTimeout(context.Background(), callTimeout)
				addr, err := c.Get(reqCtx, string(pool), "/", int(s.phase.Load()))
				done()
				l.mu.Lock()
				if err != nil {
					l.failed = append(l.failed, err)
				} else {
					l.served[addr]++
				}
				l.mu.Unlock()
				l.done.Add(1)
			}
		})
	}
	s.Cleanup(func() { l.end() })
	return l
}

// more waits until n more requests were answered.
func (l *load) more(s *suite, n int64) {
	s.Helper()
	want := l.done.Load() + n
	s.until(20*time.Second, fmt.Sprintf("%d more requests", n), func() (bool, any) {
		return l.done.Load() >= want, l.done.Load()
	})
}

func (l *load) end() (failed []error, served map[netip.AddrPort]int) {
	l.stop()
	l.wg.Wait()
	return l.failed, l.served
}

// quiet checks that no request failed.
func (l *load) quiet(s *suite) {
	s.Helper()
	if failed, _ := l.end(); len(failed) > 0 {
		s.Errorf("%d of %d requests failed, the first: %v", len(failed), l.done.Load(), failed[0])
	}
}

func removedUnderLoad(t *testing.T, s *suite) {
	bs, ks := s.backends(3)
	if got := s.see(ks[0]); !got.Routed || !got.Present || got.Missing {
		t.Fatalf("routed target is seen as %+v", got)
	}
	l := s.load(4, s.Owned)
	for _, b := range bs {
		s.until(10*time.Second, "requests at "+b.Addr.String(), func() (bool, any) { return b.Hits(0) > 0, b.Hits(0) })
	}
	for round := 1; round <= 5; round++ {
		s.apply(ops(health.WantRemoved, ks[0])...)
		got := s.see(ks[0])
		phase := s.phase.Add(1)
		if got.Routed || !got.Present || !got.Missing {
			t.Fatalf("removed target is seen as %+v", got)
		}
		l.more(s, 100)
		if n := bs[0].Hits(int(phase)); n != 0 {
			t.Fatalf("%d requests that were sent after the removal was observed arrived", n)
		}
		s.apply(ops(health.WantRouted, ks[0])...)
		if got := s.see(ks[0]); !got.Routed || got.Missing {
			t.Fatalf("target that was put back is seen as %+v", got)
		}
		s.until(10*time.Second, "requests at the target that was put back", func() (bool, any) {
			return bs[0].Hits(int(phase)) > 0, bs[0].Hits(int(phase))
		})
	}
	l.quiet(s)
}

func inFlight(t *testing.T, s *suite) {
	bs, ks := s.backends(2)
	bs[1].Release()
	held := s.hold(bs[0], s.Owned)
	if got := s.see(ks[0]); got.Active != 1 {
		t.Fatalf("target with one open request is seen as %+v", got)
	}
	s.apply(ops(health.WantRemoved, ks[0])...)
	for range 5 {
		if got := s.see(ks[0]); got.Routed || got.Active != 1 {
			t.Fatalf("removed target with one open request is seen as %+v", got)
		}
	}
	s.apply(ops(health.WantAbsent, ks[0])...)
	if got := s.see(ks[0]); got.Routed || !got.Present || got.Active != 1 {
		t.Fatalf("target that is to go, with one open request, is seen as %+v", got)
	}
	select {
	case err := <-held:
		t.Fatalf("the request ended too early: %v", err)
	default:
	}
	s.finish(bs[0], held, ks[0], nil)
}

func keptAlive(t *testing.T, s *suite) {
	bs, ks := s.backends(2)
	clients := make([]Client, 4)
	for i := range clients {
		clients[i] = s.client()
		// A connection from the client to the proxy, and one of the proxy to the target that it
		// could use again.
		s.until(5*time.Second, "an answer from the target", func() (bool, any) {
			addr, err := clients[i].Get(s.ctx(), string(s.Owned), "/", 0)
			if err != nil {
				t.Fatal(err)
			}
			return addr == bs[0].Addr, addr
		})
	}
	s.apply(ops(health.WantRemoved, ks[0])...)
	if got := s.see(ks[0]); got.Routed {
		t.Fatalf("removed target is seen as %+v", got)
	}
	for range 10 {
		for _, c := range clients {
			addr, err := c.Get(s.ctx(), string(s.Owned), "/", 1)
			if err != nil {
				t.Fatal(err)
			}
			if addr == bs[0].Addr {
				t.Fatal("the removed target answered")
			}
		}
	}
	if n := bs[0].Hits(1); n != 0 {
		t.Fatalf("%d requests arrived", n)
	}
}

func idempotent(t *testing.T, s *suite) {
	_, ks := s.backends(2)
	check := func(what string, routed, present bool) {
		t.Helper()
		if got := s.see(ks[0]); got.Routed != routed || got.Present != present {
			t.Errorf("after %s the target is seen as %+v", what, got)
		}
	}
	both := func(a, b health.Want) []health.Op {
		return append(ops(a, ks[0]), ops(b, ks[0])...)
	}
	check("routed", true, true)
	s.apply(ops(health.WantRouted, ks...)...)
	check("routed twice", true, true)
	s.apply(ops(health.WantRemoved, ks[0])...)
	s.apply(ops(health.WantRemoved, ks[0])...)
	check("removed twice", false, true)
	s.apply(both(health.WantRouted, health.WantRemoved)...)
	check("routed, removed in one batch", false, true)
	s.apply(both(health.WantRemoved, health.WantRouted)...)
	check("removed, routed in one batch", true, true)
	s.apply(both(health.WantAbsent, health.WantRouted)...)
	check("gone, routed in one batch", true, true)
	s.apply(both(health.WantRouted, health.WantAbsent)...)
	s.apply(ops(health.WantAbsent, ks[0])...)
	check("routed, gone in one batch", false, false)
	s.apply(ops(health.WantRemoved, ks[0])...)
	check("removed after gone", false, s.Masks)
	s.apply(ops(health.WantRouted, ks[0])...)
	check("routed after gone", true, true)
	s.apply()
	s.apply(ops(health.WantUnknown, ks[0])...)
	check("nothing", true, true)
	before := s.observe(ks...)
	if !before.Seen[ks[1]].Routed {
		t.Errorf("the other target is seen as %+v", before.Seen[ks[1]])
	}
	if again := s.observe(ks...); again.Generation != before.Generation || again.Generation == "" {
		t.Errorf("generation %q became %q without a reload", before.Generation, again.Generation)
	}
}

func reloadUnderLoad(t *testing.T, s *suite) {
	s.needs("Reload", s.Reload != nil)
	bs, ks := s.backends(3)
	s.apply(ops(health.WantRemoved, ks[0])...)
	if got := s.see(ks[0]); got.Routed {
		t.Fatalf("removed target is seen as %+v", got)
	}
	l := s.load(3, s.Owned)
	l.more(s, 50)
	phase := int(s.phase.Add(1))
	for round := range 3 {
		s.Reload(s)
		l.more(s, 50)
		s.onlyFirstOut(fmt.Sprintf("after reload %d", round), ks)
	}
	if n := bs[0].Hits(phase); n != 0 {
		t.Errorf("%d requests arrived at the removed target", n)
	}
	for _, b := range bs[1:] {
		if b.Hits(phase) == 0 {
			t.Errorf("no request arrived at the routed target %s after the reloads", b.Addr)
		}
	}
	l.quiet(s)
}

func generations(t *testing.T, s *suite) {
	_, ks := s.backends(1)
	if s.Masks {
		s.Skip("the generation outlives those of the proxy")
	}
	seen := map[string]string{}
	add := func(what string) {
		t.Helper()
		g := s.observe(ks...).Generation
		if g == "" {
			t.Fatalf("no generation after %s", what)
		}
		if other, ok := seen[g]; ok {
			t.Errorf("after %s the generation is %q, as after %s", what, g, other)
		}
		seen[g] = what
	}
	add("the start")
	if s.Reload != nil {
		s.Reload(s)
		add("a reload")
	}
	if s.Restart != nil {
		s.Restart(s)
		add("a restart")
	}
}

func oldProcess(t *testing.T, s *suite) {
	s.needs("Reload", s.Reload != nil)
	bs, ks := s.backends(2)
	bs[1].Release()
	held := s.hold(bs[0], s.Owned)
	s.apply(ops(health.WantRemoved, ks[0])...)
	s.Reload(s)
	for range 5 {
		if got := s.see(ks[0]); got.Routed || got.Active != 1 {
			t.Fatalf("target removed before the reload, with one open request, is seen as %+v", got)
		}
	}
	s.finish(bs[0], held, ks[0], nil)
}

func removedInOldProcess(t *testing.T, s *suite) {
	s.needs("Reload", s.Reload != nil)
	bs, ks := s.backends(2)
	bs[1].Release()
	held := s.hold(bs[0], s.Owned)
	s.Reload(s)
	if got := s.see(ks[0]); got.Active != 1 || !got.Routed {
		t.Fatalf("target with one open request in the old process is seen as %+v", got)
	}
	// A data plane may be unable to change an old process. Then Apply says so, and Observe does not
	// say that it is removed while it could be reached there.
	err := s.Gateway.Apply(s.ctx(), ops(health.WantRemoved, ks[0]))
	got := s.see(ks[0])
	if got.Active != 1 {
		t.Fatalf("after the removal it is seen as %+v", got)
	}
	if err == nil && got.Routed {
		t.Errorf("Apply reported success, but it is seen as %+v", got)
	}
	s.avoids(bs[0])
	s.finish(bs[0], held, ks[0], ops(health.WantRemoved, ks[0]))
}

func gone(t *testing.T, s *suite) {
	bs, ks := s.backends(2)
	c := s.client()
	for range 8 { // leaves idle connections to both in the proxy's pool
		if _, err := c.Get(s.ctx(), string(s.Owned), "/", 0); err != nil {
			t.Fatal(err)
		}
	}
	if bs[0].Hits(0) == 0 {
		t.Fatal("no request arrived at the target")
	}
	s.until(cmp.Or(s.GoneWithin, 10*time.Second), "the target is gone", func() (bool, any) {
		s.apply(ops(health.WantAbsent, ks[0])...)
		got := s.see(ks[0])
		if got.Routed {
			t.Fatalf("target that is to go is seen as %+v", got)
		}
		return !got.Present, got
	})
	if got := s.see(ks[0]); got != (health.Seen{Missing: true}) {
		t.Errorf("gone target is seen as %+v", got)
	}
	if got := s.see(ks[1]); !got.Routed {
		t.Errorf("the other target is seen as %+v", got)
	}
	list, err := s.Gateway.Owned(s.ctx())
	if err != nil || len(list) != 1 || list[0] != ks[1] {
		t.Errorf("owned: %v, %v; want only %s", list, err, ks[1])
	}
	if s.Reload != nil {
		s.Reload(s)
		if got := s.see(ks[0]); got.Routed {
			t.Errorf("after a reload the gone target is seen as %+v", got)
		}
	}
}

func twoPods(t *testing.T, s *suite) {
	bs, ks := s.backends(1)
	old, next := ks[0], s.key(bs[0], "a-new-pod-at-the-same-address")
	if got := s.see(next); got != (health.Seen{Missing: true}) {
		t.Fatalf("a pod that was never routed is seen as %+v", got)
	}
	s.apply(ops(health.WantRouted, next)...)
	s.apply(ops(health.WantRemoved, old)...)
	o := s.observe(old, next)
	if o.Seen[old].Routed || !o.Seen[next].Routed {
		t.Fatalf("old %+v, next %+v", o.Seen[old], o.Seen[next])
	}
	if addr, err := s.client().Get(s.ctx(), string(s.Owned), "/", 1); err != nil || addr != bs[0].Addr {
		t.Fatalf("got %s, %v", addr, err)
	}
	s.apply(ops(health.WantAbsent, old)...)
	o = s.observe(old, next)
	if o.Seen[old].Routed || !o.Seen[next].Routed {
		t.Fatalf("after gone: old %+v, next %+v", o.Seen[old], o.Seen[next])
	}
}

func unknownPool(t *testing.T, s *suite) {
	_, ks := s.backends(2)
	stranger := ks[0]
	stranger.Pool = "no-such-pool"
	// The op that fails does not stop the others.
	err := s.Gateway.Apply(s.ctx(), append(ops(health.WantRouted, stranger), ops(health.WantRemoved, ks[0])...))
	if err == nil {
		t.Error("apply to an unknown pool is no error")
	}
	if got := s.see(ks[0]); got.Routed {
		t.Errorf("the other op was not carried out: %+v", got)
	}
	if _, err := s.Gateway.Observe(s.ctx(), []health.Key{stranger}); err == nil {
		t.Error("observing an unknown pool is no error")
	}
}

func unreadablePool(t *testing.T, s *suite) {
	s.needs("Unreadable", s.Unreadable != nil)
	bs, ks := s.backends(2)
	other := s.key(bs[1], "another-pool")
	other.Pool, other.Target.Addr = s.Unreadable(s), netip.MustParseAddrPort("127.0.0.99:9")
	// The op on that pool may fail. It does not stop the other one.
	_ = s.Gateway.Apply(s.ctx(), append(ops(health.WantRouted, other), ops(health.WantRemoved, ks[0])...))
	o, err := s.Gateway.Observe(s.ctx(), append(ks, other))
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	for i, k := range ks {
		if is, read := o.Seen[k]; !read || is.Routed != (i != 0) {
			t.Errorf("%s is seen as %+v, %t; unread %v", k, is, read, o.Unread)
		}
	}
	if is, read := o.Seen[other]; read && !is.Routed {
		t.Errorf("%s is seen as %+v", other, is)
	}
	list, err := s.Gateway.Owned(s.ctx())
	for _, k := range ks {
		if err != nil || !slices.Contains(list, k) {
			t.Errorf("owned: %v, %v; want %s", list, err, k)
		}
	}
	s.avoids(bs[0])
}

func unknownTarget(t *testing.T, s *suite) {
	if s.Masks {
		s.Skip("what is not known may be routed")
	}
	_, ks := s.backends(1)
	k := ks[0]
	k.Target = health.Target{UID: "unknown", Addr: netip.MustParseAddrPort("[fd00::1]:8080")}
	if got := s.see(k); got != (health.Seen{Missing: true}) {
		t.Errorf("seen as %+v", got)
	}
	s.apply(ops(health.WantRemoved, k)...)
	s.apply(ops(health.WantAbsent, k)...)
	if got := s.see(k); got != (health.Seen{Missing: true}) {
		t.Errorf("after removed and gone seen as %+v", got)
	}
	if o := s.observe(); len(o.Seen) != 0 || o.Generation == "" || o.At.IsZero() {
		t.Errorf("observing nothing gives %+v", o)
	}
}

func hanging(t *testing.T, s *suite) {
	s.needs("Freeze", s.Freeze != nil)
	_, ks := s.backends(1)
	s.Freeze(s)
	timed := func(what string, call func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		begin := time.Now()
		err := call(ctx)
		if err == nil {
			t.Errorf("%s of a proxy that hangs is no error", what)
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v is not context.DeadlineExceeded", what, err)
		}
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("%s took %s", what, d)
		}
	}
	timed("apply", func(ctx context.Context) error { return s.Gateway.Apply(ctx, ops(health.WantRemoved, ks...)) })
	timed("observe", func(ctx context.Context) error { _, err := s.Gateway.Observe(ctx, ks); return err })
	timed("owned", func(ctx context.Context) error { _, err := s.Gateway.Owned(ctx); return err })
	s.Thaw(s)
	s.apply(ops(health.WantRemoved, ks...)...)
	if got := s.see(ks[0]); got.Routed {
		t.Errorf("after it went on the target is seen as %+v", got)
	}
}

func dead(t *testing.T, s *suite) {
	s.needs("Kill", s.Kill != nil)
	_, ks := s.backends(1)
	if s.Gateway.Stopped(s.ctx()) {
		t.Error("a live proxy has stopped")
	}
	s.Kill(s)
	if !s.Gateway.Stopped(s.ctx()) {
		t.Error("a dead proxy has not stopped")
	}
	if o, err := s.Gateway.Observe(s.ctx(), ks); err == nil {
		t.Errorf("a dead proxy was observed: %+v", o)
	}
	if err := s.Gateway.Apply(s.ctx(), ops(health.WantRemoved, ks...)); err == nil {
		t.Error("apply to a dead proxy is no error")
	}
	if _, err := s.Gateway.Owned(s.ctx()); err == nil {
		t.Error("listing a dead proxy is no error")
	}
}

func restarted(t *testing.T, s *suite) {
	s.needs("Restart", s.Restart != nil)
	bs, ks := s.backends(3)
	s.apply(ops(health.WantRemoved, ks[0])...)
	s.Restart(s)
	s.apply(append(ops(health.WantRouted, ks[1:]...), ops(health.WantRemoved, ks[0])...)...)
	s.onlyFirstOut("after a restart", ks)
	s.avoids(bs[0])
}

func batch(t *testing.T, s *suite) {
	s.backends(1) // the last one, which is not removed
	var ks []health.Key
	for i := range 500 {
		ks = append(ks, health.Key{Pool: s.Owned, Target: health.Target{
			UID:  health.UID(fmt.Sprintf("22222222-3333-4444-5555-%012d", i)),
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i / 250), byte(1 + i%250)}), 9),
		}})
	}
	timed := func(what string, want func(health.Seen) bool, list []health.Op) {
		t.Helper()
		begin := time.Now()
		s.apply(list...)
		applied := time.Since(begin)
		o := s.observe(ks...)
		t.Logf("%s: apply %s, observe %s", what, applied, time.Since(begin)-applied)
		if d := time.Since(begin); d > 40*time.Second {
			t.Errorf("%s: took %s", what, d)
		}
		for _, k := range ks {
			if !want(o.Seen[k]) {
				t.Fatalf("%s: %s is seen as %+v", what, k, o.Seen[k])
			}
		}
	}
	timed("500 routed", func(s health.Seen) bool { return s.Routed && !s.Missing }, ops(health.WantRouted, ks...))
	timed("500 routed again", func(s health.Seen) bool { return s.Routed && !s.Missing }, ops(health.WantRouted, ks...))
	timed("500 removed", func(s health.Seen) bool { return !s.Routed && s.Present }, ops(health.WantRemoved, ks...))
	timed("500 absent", func(s health.Seen) bool { return s == health.Seen{Missing: true} },
		ops(health.WantAbsent, ks...))
}

func owned(t *testing.T, s *suite) {
	s.needs("Open", s.Open != nil)
	_, ks := s.backends(3)
	six := ks[0]
	six.Target = health.Target{UID: "0000-six", Addr: netip.MustParseAddrPort("[::1]:9")}
	s.apply(ops(health.WantRouted, six)...)
	s.apply(ops(health.WantRemoved, ks[0])...)
	want := map[health.Key]bool{six: true, ks[0]: true, ks[1]: true, ks[2]: true}
	s.Gateway = s.Open(s)
	list, err := s.Gateway.Owned(s.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != len(want) {
		t.Errorf("owned: %v", list)
	}
	for _, k := range list {
		if !want[k] {
			t.Errorf("owned has %s", k)
		}
	}
	s.onlyFirstOut("after the agent's restart", ks)
	// The new agent's first write must not drop what the earlier one wrote.
	s.apply(ops(health.WantAbsent, six)...)
	if s.Reload != nil {
		s.Reload(s)
		s.onlyFirstOut("after the agent's restart and a reload", ks)
	}
}

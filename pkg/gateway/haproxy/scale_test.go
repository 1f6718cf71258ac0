package haproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// steps records what a director did.
type steps struct {
	mu      sync.Mutex
	batches [][]health.Op
	longest time.Duration
}

// Applied implements gateway.Observer.
func (s *steps) Applied(ops []health.Op, took time.Duration, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches = append(s.batches, slices.Clone(ops))
	s.longest = max(s.longest, took)
}

// Read implements gateway.Observer.
func (s *steps) Read(took time.Duration, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.longest = max(s.longest, took)
}

func (s *steps) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.batches)
}

// direct runs a director until the test ends.
func direct(t *testing.T, g gateway.Directed, set *health.Set) (*gateway.Director, *steps) {
	did := &steps{}
	d := gateway.NewDirector(g, set, slog.New(slog.NewTextHandler(io.Discard, nil)), gateway.Hooks{Observer: did})
	d.Starter, _ = g.(gateway.Starter)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return d, did
}

// list lists n targets of pool agent, from number first on.
func list(set *health.Set, first, n int) (uids []health.UID) {
	var changes []health.Change
	for i := first; i < first+n; i++ {
		uid := health.UID(fmt.Sprintf("3f0c5c5e-2d0c-4f43-9a6e-%012d", i))
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i / 250), byte(i%250 + 1)}), 9)
		changes = append(changes, health.Change{Endpoint: health.Endpoint{
			Target: health.Target{UID: uid, Addr: addr}, Routable: true}})
		uids = append(uids, uid)
	}
	set.Change(time.Now(), "agent", changes)
	return uids
}

// servers counts the agent's servers in the worker.
func (p *proxy) servers() int {
	return strings.Count(p.ask(p.worker(), "show servers state agent"), " ld-")
}

var roundrobin = Backend{Backend: "agent", Lines: []string{"balance roundrobin"}}

func TestRealDrainBesideTenThousandAdditions(t *testing.T) {
	p := newProxy(t, userFile, roundrobin)
	g := p.gateway()
	p.start()
	set := health.New(health.Options{})
	uids := list(set, 0, 10)
	set.Synced()
	d, did := direct(t, g, set)
	p.until("the first are routed", d.Programmed)
	list(set, 10, 10_000)
	first := did.count()
	d.Wake()
	p.until("servers are added", func() bool { return did.count() >= first+2 })
	for _, uid := range uids[:3] {
		before, began := did.count(), time.Now()
		set.Exclude(began, uid, "h", began, began.Add(time.Minute))
		d.Wake()
		p.until("it is removed", func() bool { is, _, _ := set.Of(uid); return is >= health.Removed })
		took := time.Since(began)
		did.mu.Lock()
		i := slices.IndexFunc(did.batches[before:], func(ops []health.Op) bool {
			return slices.ContainsFunc(ops, func(op health.Op) bool { return op.Target.UID == uid })
		})
		longest := did.longest
		did.mu.Unlock()
		// One batch may have begun before, and another before a reading that began later.
		if i > 2 {
			t.Errorf("%d batches went before the removal", i)
		}
		if took > max(time.Second, 6*longest) { // three batches and three readings, on a busy machine
			t.Errorf("Removed after %s, want 1 s; the longest call took %s", took, longest)
		}
		t.Logf("Removed after %s, with %d of 10,010 servers; the longest call took %s", took, p.servers(), longest)
	}
}

// A new gateway pod: HAProxy starts with its servers, and none is added by a command. An agent that
// restarts beside a dead HAProxy has a file with a server of a pod that is deleted.
func TestRealStartWithTenThousandServers(t *testing.T) {
	p := newProxy(t, userFile, roundrobin)
	deleted := health.Key{Pool: "agent", Target: health.Target{UID: "deleted",
		Addr: netip.MustParseAddrPort("127.2.0.1:9")}}
	if err := p.gateway().Prepare([]health.Key{deleted}); err != nil {
		t.Fatal(err)
	}
	file := func() string {
		text, err := os.ReadFile(p.cfg.ServersFile)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	set := health.New(health.Options{})
	uids := list(set, 0, 10_000)
	now := time.Now()
	set.Exclude(now, uids[0], "h", now, now.Add(time.Hour))
	d, did := direct(t, p.gateway(), set)
	if d.Prepared() || !strings.Contains(file(), "ld-deleted-") {
		t.Error("the file is changed before EndpointSlices are known")
	}
	set.Synced()
	d.Wake()
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within 30 s: %s", what)
			}
		}
	}
	await("it is prepared", d.Prepared)
	if n := strings.Count(file(), "server ld-"); n != len(uids)-1 || strings.Contains(file(), "ld-deleted-") {
		t.Errorf("the file has %d servers, want all but the excluded and the deleted one", n)
	}
	list(set, 10_000, 1)
	d.Wake()
	await("the file follows", func() bool { return strings.Count(file(), "server ld-") == len(uids) })
	if is, _, _ := set.Of(uids[0]); is != health.Unknown {
		t.Errorf("the excluded pod is %s by a file alone, want unknown", is)
	}
	p.start()
	if n := p.servers(); n != len(uids) {
		t.Errorf("HAProxy starts with %d servers, want %d", n, len(uids))
	}
	p.until("it is programmed", d.Programmed)
	p.until("the excluded pod is idle", func() bool { is, _, _ := set.Of(uids[0]); return is == health.Idle })
	if n := did.count(); n > 0 {
		t.Errorf("%d batches of commands, want none", n)
	}
}

// The agent's readiness depends on the difference.
func TestWhatIsAnAnswer(t *testing.T) {
	for kind, want := range map[kind]bool{
		kindRefused: true, kindNoBackend: true, kindBadKey: true, kindConflict: true, kindUnknown: true,
		kindTimeout: false, kindGone: false, kindNoSocket: false, kindStopping: false, kindChanging: false,
		kindFile: false,
	} {
		var r *gateway.Refused
		if got := errors.As(answered(health.Op{}, &failure{Kind: kind}), &r); got != want {
			t.Errorf("%s: counts as an answer: %t, want %t", kind, got, want)
		}
	}
}

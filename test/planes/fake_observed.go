package planes

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// FakeObserved is a gateway.Observed in memory that does what a test says. It is safe for
// concurrent use.
type FakeObserved struct {
	absent atomic.Bool
	beside atomic.Pointer[string]

	mu       sync.Mutex
	readings map[netip.AddrPort]gateway.Reading
	watches  map[*fakeWatch]struct{}
	cleaned  []netip.AddrPort
	count    func()
}

type fakeWatch struct {
	of      *FakeObserved
	targets []netip.AddrPort
	changed func()
}

// NewFakeObserved returns a data plane whose state is Unknown for every target.
func NewFakeObserved() *FakeObserved {
	return &FakeObserved{readings: map[netip.AddrPort]gateway.Reading{}, watches: map[*fakeWatch]struct{}{}}
}

// Run implements gateway.Observed.
func (f *FakeObserved) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// Watch implements gateway.Observed.
func (f *FakeObserved) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := &fakeWatch{f, targets, changed}
	f.watches[w] = struct{}{}
	return w
}

// Clean implements gateway.Cleaner.
func (f *FakeObserved) Clean(targets []netip.AddrPort) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cleaned = append(f.cleaned, targets...)
	return nil
}

// Cleaned returns the targets that Clean was called with.
func (f *FakeObserved) Cleaned() []netip.AddrPort {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.cleaned)
}

// Population implements gateway.Observed.
func (f *FakeObserved) Population() string { return gateway.Nodes }

// Absent implements gateway.Observed.
func (f *FakeObserved) Absent() bool { return f.absent.Load() }

// Mode implements gateway.Moder.
func (f *FakeObserved) Mode() string { return "nftables" }

// SetAbsent says what Absent returns.
func (f *FakeObserved) SetAbsent(absent bool) { f.absent.Store(absent) }

// Beside implements gateway.Sharer.
func (f *FakeObserved) Beside() string {
	if name := f.beside.Load(); name != nil {
		return *name
	}
	return ""
}

// SetBeside says what Beside returns.
func (f *FakeObserved) SetBeside(name string) { f.beside.Store(&name) }

// Audits implements gateway.Auditor.
func (f *FakeObserved) Audits() gateway.Audits { return gateway.Audits{Same: 1} }

// Is makes the data plane do something with target, and says so to every watch.
func (f *FakeObserved) Is(target netip.AddrPort, s health.State, connections int) {
	now := time.Now()
	f.mu.Lock()
	f.readings[target] = gateway.Reading{
		State: s, NoConnections: s != health.Unknown && connections == 0, Since: now, Generation: "1",
		Connections: connections, Counted: now,
	}
	var tell []func()
	for w := range f.watches {
		tell = append(tell, w.changed)
	}
	f.mu.Unlock()
	for _, changed := range tell {
		changed()
	}
}

// Quiet counts the connections to target again and finds that it has been quiet for so long.
func (f *FakeObserved) Quiet(target netip.AddrPort, quiet time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.readings[target]
	r.Quiet, r.Counted = quiet, time.Now()
	f.readings[target] = r
}

// OnCount has count called when connections are to be counted again. Nil ends it.
func (f *FakeObserved) OnCount(count func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count = count
}

// Open returns how many watches are open.
func (f *FakeObserved) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.watches)
}

// Reading implements gateway.Watch: what is furthest behind of all targets.
func (w *fakeWatch) Reading() gateway.Reading {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	least := gateway.Reading{State: health.Idle}
	for i, t := range w.targets {
		if r := w.of.readings[t]; i == 0 || r.State < least.State {
			least = r
		}
	}
	return least
}

// Count implements gateway.Watch.
func (w *fakeWatch) Count() {
	w.of.mu.Lock()
	count := w.of.count
	w.of.mu.Unlock()
	if count != nil {
		count()
	}
}

// Close implements gateway.Watch.
func (w *fakeWatch) Close() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	delete(w.of.watches, w)
}

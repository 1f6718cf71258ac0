package gatewaytest

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// fakePlane is a data plane whose state a planes.FakeObserved reads.
func fakePlane() *ObservedHarness {
	f := planes.NewFakeObserved()
	h := &ObservedHarness{Gateway: f, Target: netip.MustParseAddrPort("10.1.0.7:80")}
	sends, open := false, 0
	tell := func() {
		switch {
		case sends:
			f.Is(h.Target, health.Routing, open)
		case open > 0:
			f.Is(h.Target, health.Removed, open)
		default:
			f.Is(h.Target, health.Idle, 0)
		}
	}
	tell()
	h.Route = func() { sends = true; tell() }
	h.Unroute = func() { sends = false; tell() }
	h.Connect = func() (bool, func(), error) {
		if !sends {
			return false, func() {}, nil
		}
		open++
		tell()
		return true, func() { open--; tell() }, nil
	}
	return h
}

func TestFakeObserved(t *testing.T) {
	RunObserved(t, func(*testing.T) *ObservedHarness { return fakePlane() })
}

// broken breaks one promise of the fake.
type broken struct {
	*planes.FakeObserved
	silent, leaky bool
	read          func(gateway.Reading) gateway.Reading
}

func (b broken) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	if b.silent {
		changed = func() {}
	}
	return brokenWatch{b.FakeObserved.Watch(targets, changed), b}
}

type brokenWatch struct {
	gateway.Watch
	of broken
}

func (w brokenWatch) Reading() gateway.Reading {
	r := w.Watch.Reading()
	if w.of.read != nil {
		r = w.of.read(r)
	}
	return r
}

func (w brokenWatch) Close() {
	if !w.of.leaky {
		w.Watch.Close()
	}
}

// A contract that a data plane can break unnoticed proves nothing.
func TestTheContractNoticesABrokenPromise(t *testing.T) {
	for name, b := range map[string]broken{
		"changes are not told":         {silent: true},
		"changes are told after Close": {leaky: true},
		"Removed comes early": {read: func(r gateway.Reading) gateway.Reading {
			r.State = max(r.State, health.Removed)
			return r
		}},
		"connections are not seen": {read: func(r gateway.Reading) gateway.Reading {
			r.State = map[bool]health.State{true: health.Idle, false: r.State}[r.State == health.Removed]
			return r
		}},
		"it stays Removed": {read: func(r gateway.Reading) gateway.Reading {
			r.State = min(r.State, health.Removed)
			return r
		}},
		"readings have no generation": {read: func(r gateway.Reading) gateway.Reading { r.Generation = ""; return r }},
		"routing again is not noticed": {read: func(gateway.Reading) gateway.Reading {
			return gateway.Reading{State: health.Idle}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			failed := false
			for _, part := range observedParts {
				synctest.Test(t, func(*testing.T) {
					h := fakePlane()
					b.FakeObserved = h.Gateway.(*planes.FakeObserved)
					h.Gateway = b
					failed = part(h) != nil || failed
				})
			}
			if !failed {
				t.Error("the contract is met")
			}
		})
	}
}

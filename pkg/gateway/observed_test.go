package gateway_test

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/gatewaytest"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// slow is a data plane whose workers do one after the other what is asked of it.
type slow struct{ *gatewaytest.FakeObserved }

func (slow) Settle() time.Duration { return time.Second }

// Without this, a pod gets SIGTERM while a worker that was not read still sends to it.
func TestRemovedIsReadWhenItIsTrueOfEveryWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake, target, news := gatewaytest.NewFakeObserved(), netip.MustParseAddrPort("10.1.0.7:80"), new(atomic.Int64)
		fake.Is(target, health.Routing, 0)
		w := gateway.WatchSettled(slow{fake}, []netip.AddrPort{target}, func() { news.Add(1) })
		defer w.Close()
		expect := func(want health.State) {
			t.Helper()
			synctest.Wait()
			if got := w.Reading().State; got != want {
				t.Errorf("reads %s, want %s", got, want)
			}
		}
		expect(health.Routing)
		fake.Is(target, health.Removed, 1)
		expect(health.Routing)
		time.Sleep(time.Second - time.Millisecond)
		expect(health.Routing)
		before := news.Load()
		time.Sleep(time.Millisecond)
		expect(health.Removed)
		if news.Load() == before {
			t.Error("that it has settled is no news")
		}
		fake.Is(target, health.Idle, 0)
		expect(health.Removed)
		time.Sleep(time.Second)
		expect(health.Idle)
		fake.Is(target, health.Routing, 0)
		fake.Is(target, health.Idle, 0)
		expect(health.Removed) // what was between two readings is not seen
		fake.Is(target, health.Routing, 0)
		expect(health.Routing)
		fake.Is(target, health.Idle, 0)
		expect(health.Routing)
	})
}

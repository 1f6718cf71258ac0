package observation

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// slowCleaner takes longer to forget connections than an address may be taken for the former pod's.
type slowCleaner struct {
	*planes.FakeObserved
	cleaned map[netip.AddrPort]time.Time
}

func (s *slowCleaner) Clean(targets []netip.AddrPort) error {
	time.Sleep(2 * cleanLate)
	for _, t := range targets {
		s.cleaned[t] = time.Now()
	}
	return nil
}

// A tick says when it was due, not when it is taken in: after a slow clean it is old.
func TestConnectionsAreNotForgottenLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &slowCleaner{planes.NewFakeObserved(), map[netip.AddrPort]time.Time{}}
		o := newPods(k, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = o.Run(ctx, func([]netip.AddrPort) bool { return true }) }()
		first, second := netip.MustParseAddrPort("10.1.0.7:0"), netip.MustParseAddrPort("10.1.0.8:0")
		k.Is(first, health.Removed, 0)
		k.Is(second, health.Removed, 0)
		began := time.Now()
		o.Clean(drain.Pod{UID: "a"}, []netip.AddrPort{first})
		time.Sleep(cleanAgain / 2)
		o.Clean(drain.Pod{UID: "b"}, []netip.AddrPort{second})
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if at, ok := k.cleaned[second]; ok && at.Sub(began) > cleanLate+2*cleanLate+cleanAgain {
			t.Errorf("the clean of b began %s after it was gone, at most %s is allowed",
				at.Sub(began)-2*cleanLate-cleanAgain/2, cleanLate)
		}
		cancel()
		synctest.Wait()
	})
}

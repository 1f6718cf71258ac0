package gatewaytest

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

var _ gateway.Directed = (*Fake)(nil)

func TestFakeContract(t *testing.T) {
	Run(t, func(t *testing.T) *Harness {
		static := []*Backend{StartBackend(t, "127.0.0.2"), StartBackend(t, "127.0.0.3")}
		f := NewFake(t, map[health.Pool][]health.Target{
			"owned":  nil,
			"static": {{UID: "configured-a", Addr: static[0].Addr}, {UID: "configured-b", Addr: static[1].Addr}},
		})
		return &Harness{
			Gateway:        f,
			Open:           func(testing.TB) gateway.Directed { return f },
			Owned:          "owned",
			Static:         "static",
			StaticBackends: static,
			NewClient:      func(testing.TB) Client { return f.Client() },
			Reload:         func(testing.TB) { f.Reload() },
			Restart:        func(testing.TB) { f.Restart() },
			Freeze:         func(testing.TB) { f.Freeze() },
			Thaw:           func(testing.TB) { f.Thaw() },
			Kill:           func(testing.TB) { f.Kill() },
		}
	})
}

func TestFakeLosesAnswersAndFails(t *testing.T) {
	f := NewFake(t, map[health.Pool][]health.Target{"web": nil})
	k := health.Key{Pool: "web", Target: health.Target{UID: "u", Addr: netip.MustParseAddrPort("127.0.0.1:1")}}
	f.LoseAnswers(func(health.Op) bool { return true })
	if err := f.Apply(t.Context(), ops(health.WantRouted, k)); err == nil || len(f.Routed("web")) != 1 {
		t.Errorf("lost answer: %v, routed %v", err, f.Routed("web"))
	}
	f.LoseAnswers(nil)
	refuse := errors.New("no")
	f.FailOps(func(health.Op) error { return refuse })
	if err := f.Apply(t.Context(), ops(health.WantRemoved, k)); !errors.Is(err, refuse) || len(f.Routed("web")) != 1 {
		t.Errorf("failed op: %v, routed %v", err, f.Routed("web"))
	}
}

// The fake's one purpose is to notice a request to a removed target. This would notice if it did
// not.
func TestFakeNoticesBrokenPromises(t *testing.T) {
	rec := &recorder{TB: t}
	f := NewFake(rec, map[health.Pool][]health.Target{"web": nil})
	k := health.Key{Pool: "web", Target: health.Target{UID: "u", Addr: netip.MustParseAddrPort("127.0.0.1:1")}}
	if err := f.Apply(t.Context(), append(ops(health.WantRouted, k), ops(health.WantRemoved, k)...)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Observe(t.Context(), []health.Key{k}); err != nil {
		t.Fatal(err)
	}
	f.now.servers[k].routed = true // behind everybody's back
	if _, end, ok := f.Begin("web"); ok {
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

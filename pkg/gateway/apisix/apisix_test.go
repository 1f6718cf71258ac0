package apisix

import (
	"net/http"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

var (
	_ gateway.Directed     = (*Gateway)(nil)
	_ gateway.DirectedKind = (*Config)(nil)
	_ http.Handler         = (*fake)(nil)
)

// listed is an upstream as the dashboard and ADC store it.
const listed = `{"nodes": [{"host": "10.0.0.3", "port": 80, "weight": 1}],
	"labels": {"lameduck": "agent", "10.0.0.3:80@left": "routed"}}`

func TestContract(t *testing.T) {
	gatewaytest.Run(t, func(t *testing.T) *gatewaytest.Harness {
		f := newFake(t, 2)
		return &gatewaytest.Harness{
			Gateway: f.open("a", "list"),
			Open:    func(testing.TB) gateway.Directed { return f.open("a", "list") },
			Owned:   "web",
			NewClient: func(testing.TB) gatewaytest.Client {
				return gatewaytest.NewHTTPClient(func(pool, path string) string {
					return f.server.URL + path + "?pool=" + pool
				})
			},
			Reload:  func(testing.TB) { f.reload() },
			Restart: func(testing.TB) { f.restart(2) },
			Freeze:  func(testing.TB) { f.freeze() },
			Thaw:    func(testing.TB) { f.thaw() },
			Kill:    func(testing.TB) { f.kill() },
			Unreadable: func(testing.TB) health.Pool {
				f.set("upstreams/list", listed)
				return "list"
			},
		}
	})
}

// What an agent left behind in a pool that could not be read is owned once the pool can be. The
// Director lists it for a new generation.
func TestAPoolThatCanBeReadAgainIsOwned(t *testing.T) {
	f := newFake(t, 2)
	f.set("upstreams/list", listed)
	g := f.open("a", "list")
	generation := func() string {
		t.Helper()
		o, err := g.Observe(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return o.Generation
	}
	owned := func(want int) {
		t.Helper()
		if keys, err := g.Owned(t.Context()); err != nil || len(keys) != want {
			t.Errorf("owned: %v, %v; want %d", keys, err, want)
		}
	}
	owned(0)
	first := generation()
	f.set("upstreams/list", `{"nodes": {"10.0.0.3:80": 1}, "labels": {"lameduck": "agent", "10.0.0.3:80@left": "routed"}}`)
	if again := generation(); again == first {
		t.Errorf("the generation stays %q", again)
	}
	owned(1)
	if again := generation(); again != first {
		t.Errorf("the generation is %q, was %q", again, first)
	}
}

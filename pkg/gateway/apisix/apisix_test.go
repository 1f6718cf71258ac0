package apisix

import (
	"net/http"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

var (
	_ gateway.Directed     = (*Gateway)(nil)
	_ gateway.DirectedKind = (*Config)(nil)
	_ http.Handler         = (*fake)(nil)
)

func TestContract(t *testing.T) {
	gatewaytest.Run(t, func(t *testing.T) *gatewaytest.Harness {
		f := newFake(t, 2)
		return &gatewaytest.Harness{
			Gateway: f.open("a"),
			Open:    func(testing.TB) gateway.Directed { return f.open("a") },
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
		}
	})
}

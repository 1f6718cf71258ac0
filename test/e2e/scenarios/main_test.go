package scenarios

import (
	"net/netip"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// deadline is the coordinator's default.
const deadline = 30 * time.Second

// open returns the stage that all tests of this package share: one node, the coordinator, the
// webhook.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	harness.HAProxy(t)
	return harness.Stage(t, cluster.Options{}, stage.Options{Entries: 1, CRDs: stage.GatewayAPI,
		Dashboard: "${POD_IP}:9445"})
}

// clients sends requests until they are stopped.
func clients(t *testing.T, address string, keepAlive bool) requests {
	t.Helper()
	l, err := load.Run(t.Context(), load.Options{
		Target: "http://" + address + "/", Rate: 150, Timeout: 30 * time.Second, KeepAlive: keepAlive, DropClosed: true,
		WantBody: []byte("ok\n"), MaxInFlight: 1000,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("10.244.251.1"), netip.MustParseAddr("10.244.251.2")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	return requests{l, t, harness.Stalls(t)}
}

// requests are what clients send until they are stopped. stalled counts how often the machine has
// stood still meanwhile.
type requests struct {
	*load.Load
	t       *testing.T
	stalled func() int
}

// Answered stops them. It is an error that one has failed while the machine ran.
func (r requests) Answered() load.Result {
	r.t.Helper()
	got := r.Stop()
	if got.Failed > 0 && r.stalled() == 0 || got.Total == 0 {
		r.t.Errorf("%d of %d requests failed: %v\n%v", got.Failed, got.Total, got.FailedBy, got.Failures)
	}
	return got
}

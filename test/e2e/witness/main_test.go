package witness

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// delayMost is how much later a call may reach a coordinator, at random: two calls then reach two
// coordinators in opposite orders.
var delayMost atomic.Int64

// entries is how many coordinators there are, each with an entry of the webhook configuration:
// ENTRIES, or 2.
func entries(t *testing.T) int { return harness.Number(t, "ENTRIES", 2) }

// open returns the stage that all tests share: one node, the coordinators, and an entry of the
// webhook configuration for each.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	return harness.Stage(t, cluster.Options{}, stage.Options{Entries: entries(t), Delay: func() time.Duration {
		return time.Duration(rand.Int64N(delayMost.Load() + 1))
	}})
}

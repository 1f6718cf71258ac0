package report

import (
	"testing"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

func TestStates(t *testing.T) {
	for state, want := range map[health.State]drain.State{
		health.Unknown: drain.StateUnknown, health.Routing: drain.Routing, health.Kept: drain.Kept,
		health.Removed: drain.Removed, health.Idle: drain.Idle, 200: drain.StateUnknown,
	} {
		if got := State(state); got != want {
			t.Errorf("%s is %s on the wire, want %s", state, got, want)
		}
	}
}

// Package report says in the words of the ledger what an agent knows.
package report

import (
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// State returns s as it is reported.
func State(s health.State) drain.State {
	switch s {
	case health.Routing:
		return drain.Routing
	case health.Kept:
		return drain.Kept
	case health.Removed:
		return drain.Removed
	case health.Idle:
		return drain.Idle
	default:
		return drain.StateUnknown
	}
}

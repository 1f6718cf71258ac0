package peers

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Settle is how long a replica without all its agents is not ready, from the moment when it knows
// the cluster.
const Settle = 10 * time.Second

// Readiness decides whether the API server should ask this replica.
type Readiness struct {
	// Certificate returns an error if there is no certificate to serve. Synced reports whether this
	// replica's cache of the cluster is complete. Expecting returns how many agents are expected,
	// and how many of these are not connected here.
	Certificate func() error
	Synced      func() bool
	Expecting   func() (expected, missing int)
	// Others are the other replicas.
	Others *Table

	// settled: it has waited for its agents once. stopping: it is shutting down.
	settled, stopping atomic.Bool
}

// Stop makes the replica unready, permanently.
func (r *Readiness) Stop() { r.stopping.Store(true) }

// Elsewhere reports whether another replica judges deletions with most of its agents, and this one
// cannot now.
func (r *Readiness) Elsewhere() bool {
	if r.Check() == nil {
		return false
	}
	_, ok := r.Others.Sees()
	return ok
}

// Check returns the reason why this replica cannot judge deletions, or nil. A replica that has lost
// the streams of most of its agents abstains only while another replica has them. Without another
// such replica it judges: waiting for agents ends at the deadline, but a lost request stays lost.
func (r *Readiness) Check() error {
	switch {
	case r.stopping.Load():
		return errors.New("this replica is shutting down")
	case r.Certificate() != nil:
		return r.Certificate()
	case !r.Synced():
		return errors.New("the view of the cluster is not complete yet")
	case r.Others.Known() != nil:
		return r.Others.Known()
	}
	expected, missing := r.Expecting()
	if missing > 0 && !r.Others.hasSettled() && !r.settled.Load() {
		return fmt.Errorf("%d of %d agents are not connected yet", missing, expected)
	}
	r.settled.Store(true)
	if 2*missing > expected {
		if name, ok := r.Others.Sees(); ok {
			return fmt.Errorf("%d of %d agents are not connected here, and replica %s has most of them", missing,
				expected, name)
		}
	}
	return nil
}

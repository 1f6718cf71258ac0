package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// ErrNoCoordinator is what [Client.Barrier] returns when there is none that can be asked now.
var ErrNoCoordinator = errors.New("no coordinator can be asked")

// Barrier asks a coordinator when a pod may be told to stop, and waits for the answer until ctx is
// done. If that coordinator does not answer, or refuses, Barrier asks the next; each is asked once.
// The caller sets everything in b but Session. The error wraps ErrNoCoordinator if all have failed,
// or if none has an open stream. If ctx ends first, it is that of the request.
func (c *Client) Barrier(ctx context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
	c.mu.Lock()
	replicas := slices.Collect(maps.Values(c.replicas))
	c.mu.Unlock()
	// A repeat asks the same coordinator first; pods are spread over all of them.
	slices.SortFunc(replicas, func(x, y *replica) int {
		return cmp.Or(cmp.Compare(rank(x.address, b.Pod.UID), rank(y.address, b.Pod.UID)),
			cmp.Compare(x.address, y.address))
	})
	errs := []error{ErrNoCoordinator}
	began, elapsed := time.Now(), b.ElapsedMillis
	for _, r := range replicas {
		// The time that failed coordinators took counts: the barrier has one clock.
		b.ElapsedMillis = elapsed + time.Since(began).Milliseconds()
		passed, err := r.barrier(ctx, b)
		if err == nil || ctx.Err() != nil {
			return passed, err
		}
		if !errors.Is(err, errNotOpen) {
			errs = append(errs, err)
		}
	}
	return wire.BarrierStatus{}, errors.Join(errs...)
}

func rank(address string, uid drain.UID) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, address+" "+string(uid)) // cannot fail
	return h.Sum64()
}

var errNotOpen = errors.New("no stream is open, or the coordinator knows no barrier")

func (r *replica) barrier(ctx context.Context, b wire.BarrierRequest) (passed wire.BarrierStatus, err error) {
	session, open := r.current()
	if session == nil || !slices.Contains(session.Hello.Features, wire.FeatureBarrier) {
		return passed, errNotOpen
	}
	// If a coordinator dies without an answer, its stream ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(open, cancel)()
	b.Session = session.Hello.Session
	if err := r.exchange(ctx, wire.BarriersPath, b, &passed); err != nil {
		return passed, fmt.Errorf("barrier of pod %s: %w", b.Pod, err)
	}
	return passed, nil
}

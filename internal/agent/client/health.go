package client

import (
	"context"
	"io"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// healthEvery is the shortest time between two health reports to a coordinator.
const healthEvery = time.Second

// sendHealth sends the changes of the health report to the coordinator until ctx is done, and then
// closes the channel that it returns. It writes one message at a time between the reports, so that
// these wait for one message at most.
func (r *replica) sendHealth(ctx context.Context, hello wire.Hello, into io.Writer) <-chan struct{} {
	over := make(chan struct{})
	if r.client.Health == nil || !slices.Contains(hello.Features, wire.FeatureHealth) {
		close(over)
		return over
	}
	go func() {
		defer close(over)
		ticker := time.NewTicker(healthEvery)
		defer ticker.Stop()
		var teller wire.Teller
		var told *wire.Summary
		for {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			now := r.client.Health()
			// Coordinators ignore the health of Services that were not declared.
			if now == nil || now == told || !r.hasDeclared() {
				continue
			}
			h, some := teller.Next(hello.Session, *now)
			if !some {
				told = now
				continue
			}
			// A net.Conn does not interleave concurrent writes.
			if _, err := into.Write(wire.AppendHealth(nil, h)); err != nil {
				return // and the stream ends, too
			}
		}
	}()
	return over
}

func (r *replica) hasDeclared() bool {
	r.client.mu.Lock()
	defer r.client.mu.Unlock()
	return r.declared
}

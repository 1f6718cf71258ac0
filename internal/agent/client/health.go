package client

import (
	"context"
	"io"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// healthEvery is how often a coordinator is told of the health of targets at most.
const healthEvery = time.Second

// sendHealth tells the coordinator what is new of the health of targets until ctx is done, and
// closes what it returns then. It goes beside the reports, one message at a time, so that these
// wait for one at most.
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
			// Coordinators keep nothing of Services that were not declared.
			if now == nil || now == told || !r.hasDeclared() {
				continue
			}
			h, some := teller.Next(hello.Session, *now)
			if !some {
				told = now
				continue
			}
			// It is a net.Conn, on which nothing that others write comes in between.
			_, err := into.Write(wire.AppendHealth(nil, h))
			if r.client.Observer != nil {
				r.client.Observer.Posted(wire.HealthPath, err)
			}
			if err != nil {
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

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
// wait for one at most. into is where it is written; nil: it is posted.
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
			if err := r.sendReports(ctx, h, into); err != nil {
				if ctx.Err() != nil {
					return
				}
				r.client.Log.Debug("tell coordinator of the health of targets", "address", r.address, "error", err)
				teller = wire.Teller{} // whether it has come is not known: all is told again
			}
		}
	}()
	return over
}

func (r *replica) sendReports(ctx context.Context, h wire.Health, into io.Writer) error {
	if into == nil {
		return r.send(ctx, wire.HealthPath, h, nil)
	}
	// It is a net.Conn, on which nothing that others write comes in between.
	_, err := into.Write(wire.AppendHealth(nil, h))
	if r.client.Observer != nil {
		r.client.Observer.Posted(wire.HealthPath, err)
	}
	return err
}

func (r *replica) hasDeclared() bool {
	r.client.mu.Lock()
	defer r.client.mu.Unlock()
	return r.declared
}

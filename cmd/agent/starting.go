package main

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// starting delays the programming of the gateway until the agent knows which pods to exclude, or
// until [client.LearnTimeout] and servicesTimeout are over.
type starting struct {
	director *gateway.Director
	// learned is closed when every coordinator has sent its open drains. Nil: there is no
	// coordinator.
	learned <-chan struct{}
	// checks is closed when the health checks of all Services are known.
	checks <-chan struct{}
	log    *slog.Logger

	learnt atomic.Bool
	// runs: the gateway ran when the agent started. lastFile: it did not, and starts with targets
	// that an earlier agent wrote, if it starts now.
	runs, lastFile atomic.Bool
	// late: endpoints were awaited for lastFileAfter.
	late atomic.Bool
}

// lastFileAfter is how long a gateway waits for EndpointSlices that has targets from an earlier
// life. After it, the gateway serves with these: the API server may be away for long.
const lastFileAfter = 10 * time.Second

// missing returns what the gateway still waits for before it may start. Empty: it may. One that
// runs, or that does not start with what the agent has written, waits for nothing.
func (s *starting) missing() string {
	if s.director.Starter == nil || s.runs.Load() || s.director.Prepared() || s.late.Load() && s.lastFile.Load() {
		return ""
	}
	return "the gateway has no targets from EndpointSlices yet"
}

func (s *starting) run(ctx context.Context) error {
	timer := time.AfterFunc(lastFileAfter, func() { s.late.Store(true) })
	defer timer.Stop()
	if s.director.Starter != nil {
		bounded, cancel := context.WithTimeout(ctx, gateway.CallTimeout)
		if !s.director.Gateway.Stopped(bounded) {
			s.runs.Store(true)
		} else if kept, _ := s.director.Gateway.Owned(bounded); len(kept) > 0 { // with an error: it does not run
			s.lastFile.Store(true)
		}
		cancel()
	}
	switch {
	case s.learned == nil:
	case waitFor(ctx, s.learned, client.LearnTimeout):
		s.log.Info("open drains are known: programming the gateway")
	case ctx.Err() == nil:
		s.log.Warn("programming the gateway without knowing which drains are open: no answer from every coordinator",
			"waited", client.LearnTimeout.String())
	}
	s.learnt.Store(true)
	waitFor(ctx, s.checks, servicesTimeout)
	return s.director.Run(ctx)
}

func waitFor(ctx context.Context, c <-chan struct{}, most time.Duration) bool {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

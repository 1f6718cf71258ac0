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
	// unlearned counts a start at which [client.LearnTimeout] was over before learned was closed.
	unlearned func()
	log       *slog.Logger

	learnt atomic.Bool
}

func (s *starting) run(ctx context.Context) error {
	switch {
	case s.learned == nil:
	case waitFor(ctx, s.learned, client.LearnTimeout):
		s.log.Info("open drains are known: programming the gateway")
	case ctx.Err() == nil:
		s.unlearned()
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

package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// leaveTimeout bounds how long a stopping agent takes to check its gateway and to send coordinators
// its last message.
const leaveTimeout = 2 * time.Second

// leaving is the end of an agent. If the gateway has ended first, as it does where the agent is a
// native sidecar, the agent sends coordinators a last message, after which they no longer wait for
// it.
type leaving struct {
	// gateway has no other caller when leaving uses it.
	gateway gateway.Directed
	// programmed reports whether the gateway was ever programmed.
	programmed func() bool
	leave      func(context.Context) error
	log        *slog.Logger
}

// outlive runs streams until ctx is done and, if the gateway has ended, until coordinators have
// received the last message, for leaveTimeout at most.
func (l *leaving) outlive(ctx context.Context, streams func(context.Context) error) error {
	inner, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	said := make(chan struct{})
	go func() {
		defer close(said)
		select {
		case <-ctx.Done():
		case <-inner.Done():
			return
		}
		defer stop()
		bounded, cancel := context.WithTimeout(inner, leaveTimeout)
		defer cancel()
		if !l.programmed() || !l.gateway.Stopped(bounded) {
			return
		}
		if err := l.leave(bounded); err != nil {
			l.log.Info("not every coordinator was informed that this agent leaves", "error", err)
		} else {
			l.log.Info("coordinators were informed that this agent leaves: its gateway has ended")
		}
	}()
	err := streams(inner)
	stop()
	<-said
	return err
}

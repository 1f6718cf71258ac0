package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// leaveTimeout bounds how long an agent that is told to stop takes to look at its gateway and to
// tell coordinators that it leaves.
const leaveTimeout = 2 * time.Second

// leaving is how an agent goes: where its gateway has gone before it, as it has where the agent is
// a native sidecar, coordinators are told to wait for it no longer.
type leaving struct {
	// gateway is called by nobody else by then.
	gateway gateway.Directed
	// programmed says that the gateway was there once.
	programmed func() bool
	leave      func(context.Context) error
	log        *slog.Logger
}

// outlive runs streams until ctx is done, and then until what there is to say is said.
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
			l.log.Info("not every coordinator was told that this agent leaves", "error", err)
		} else {
			l.log.Info("coordinators were told that this agent leaves: its gateway is gone")
		}
	}()
	err := streams(inner)
	stop()
	<-said
	return err
}

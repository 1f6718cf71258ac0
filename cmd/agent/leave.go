package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// leaveTimeout bounds how long a stopping agent takes to check its gateway and to tell coordinators
// that it leaves.
const leaveTimeout = 2 * time.Second

// leaving is the end of an agent. If its gateway has ended before it, as it does where the agent is
// a native sidecar, the agent tells coordinators not to wait for it.
type leaving struct {
	// gateway has no other caller by then.
	gateway gateway.Directed
	// programmed reports whether the gateway was ever programmed.
	programmed func() bool
	leave      func(context.Context) error
	log        *slog.Logger
}

// outlive runs streams until ctx is done, and then until coordinators have received the last
// message.
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

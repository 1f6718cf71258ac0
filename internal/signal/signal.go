// Package signal has a wake-up call: many goroutines report that something has changed, one waits
// for it and then reads everything again. It carries no data, and has nothing to do with signals of
// the operating system. Sleep is a pause that ends with its context.
package signal

import (
	"context"
	"time"
)

// Signal is raised by any goroutine, and followed by one. Any number of calls of Raise before the
// follower looks are one.
type Signal chan struct{}

// New returns a signal that is not raised.
func New() Signal { return make(Signal, 1) }

// Raise never blocks.
func (s Signal) Raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Follow calls changed each time that s was raised, until ctx is done.
func (s Signal) Follow(ctx context.Context, changed func()) error {
	for {
		select {
		case <-s:
			changed()
		case <-ctx.Done():
			return nil
		}
	}
}

// Sleep waits for d, or until ctx is done. It reports whether d has passed.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

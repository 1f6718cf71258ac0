// Package signal carries the fact that something has changed from many goroutines to one.
package signal

import "context"

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

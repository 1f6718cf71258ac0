package gatewaytest

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// ObservedHarness is one running data plane that can only be observed.
type ObservedHarness struct {
	// Gateway is the one under test. It runs until the test ends.
	Gateway gateway.Observed
	// Target is a target of the data plane, which is not routed at the start. There is another
	// target, which always is.
	Target netip.AddrPort
	// Route makes the data plane send to Target too, Unroute only to the other target. Both are
	// also called from other goroutines, and may return before the data plane follows.
	Route, Unroute func()
	// Clutter adds an entry of other targets that the agent cannot read. Nil: the data plane has
	// none.
	Clutter func()
	// Connect opens a connection through the data plane. It reports whether Target has it.
	Connect func() (atTarget bool, end func(), err error)
}

// observedWithin is how long a data plane may take for anything.
const observedWithin = 10 * time.Second

// RunObserved runs the contract of [gateway.Observed]. Each part calls start for a harness of its
// own, one after the other. A data plane has 10 s for each change.
func RunObserved(t *testing.T, start func(t *testing.T) *ObservedHarness) {
	for name, part := range observedParts {
		t.Run(name, func(t *testing.T) {
			if err := part(start(t)); err != nil {
				t.Error(err)
			}
		})
	}
}

var observedParts = map[string]func(*ObservedHarness) error{
	"its population has a name": func(h *ObservedHarness) error {
		if h.Gateway.Population() == "" {
			return errors.New("it has none")
		}
		return nil
	},
	"Removed is when nothing new is sent": func(h *ObservedHarness) error {
		h.Route()
		w, follow := h.watch()
		defer w.Close()
		if err := follow(health.Routing); err != nil {
			return err
		}
		h.Unroute()
		if err := follow(health.Removed); err != nil {
			return err
		}
		for range 50 {
			at, end, err := h.Connect()
			if err != nil {
				return err
			}
			end()
			if at {
				return errors.New("a connection reached the target after Removed was read")
			}
		}
		return follow(health.Idle)
	},
	"an open connection keeps it from Idle": func(h *ObservedHarness) error {
		h.Route()
		end, err := h.connectToTarget()
		if err != nil {
			return err
		}
		w, follow := h.watch()
		defer w.Close()
		h.Unroute()
		if err := follow(health.Removed); err != nil {
			return err
		}
		for range 20 {
			if r := w.Reading(); r.State == health.Idle {
				return fmt.Errorf("%+v while a connection is open", r)
			}
			time.Sleep(10 * time.Millisecond) // it is never Idle: nothing follows that could be awaited
		}
		end()
		return follow(health.Idle)
	},
	"it is a level": func(h *ObservedHarness) error {
		w, follow := h.watch()
		defer w.Close()
		for range 3 {
			time.AfterFunc(10*time.Millisecond, h.Route) // while it waits to be told
			if err := follow(health.Routing); err != nil {
				return err
			}
			time.AfterFunc(10*time.Millisecond, h.Unroute)
			if err := follow(health.Idle); err != nil {
				return err
			}
		}
		if r := w.Reading(); r.Generation == "" || r.Since.IsZero() {
			return fmt.Errorf("%+v lacks its generation or its time", r)
		}
		return nil
	},
	"an entry that cannot be read hides no other": func(h *ObservedHarness) error {
		if h.Clutter == nil {
			return nil
		}
		h.Clutter()
		w, follow := h.watch()
		defer w.Close()
		h.Route()
		if err := follow(health.Routing); err != nil {
			return err
		}
		h.Unroute()
		return follow(health.Idle)
	},
	"a closed watch is told nothing": func(h *ObservedHarness) error {
		var told atomic.Int64
		closed := h.Gateway.Watch([]netip.AddrPort{h.Target}, func() { told.Add(1) })
		w, follow := h.watch()
		defer w.Close()
		closed.Close()
		closed.Close()
		h.Route()
		if err := follow(health.Routing); err != nil {
			return err
		}
		before := told.Load() // a call may have run while it was closed
		h.Unroute()
		if err := follow(health.Idle); err != nil {
			return err
		}
		if told.Load() != before {
			return errors.New("a watch was told of a change after it was closed")
		}
		return nil
	},
}

// watch returns a watch, and a function that waits for a state. The function reads only after
// changed was called. Idle also counts as Removed.
func (h *ObservedHarness) watch() (gateway.Watch, func(health.State) error) {
	news := make(chan struct{}, 1)
	w := h.Gateway.Watch([]netip.AddrPort{h.Target}, func() {
		select {
		case news <- struct{}{}:
		default:
		}
	})
	return w, func(state health.State) error {
		timeout := time.After(observedWithin)
		for {
			r := w.Reading()
			if r.State == state || state == health.Removed && r.State == health.Idle {
				return nil
			}
			select {
			case <-news:
			case <-timeout:
				return fmt.Errorf("%+v, and it was not told of %s", r, state)
			}
		}
	}
}

func (h *ObservedHarness) connectToTarget() (func(), error) {
	for deadline := time.Now().Add(observedWithin); time.Now().Before(deadline); {
		at, end, err := h.Connect()
		if at || err != nil {
			return end, err
		}
		end()
	}
	return nil, errors.New("no connection reached a target that is routed")
}

package gateway

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// CallTimeout bounds one Apply or Observe.
const CallTimeout = 5 * time.Second

// Observer is told what the Director did. Its methods must not block.
type Observer interface {
	// Applied is called after each batch of operations with how long it took and its error, if any.
	Applied(ops []health.Op, took time.Duration, err error)
	// Read is called after each reading.
	Read(took time.Duration, err error)
}

// Progress is how far a gateway follows what is wanted of it.
type Progress struct {
	// AsOf is when the Director looked at what is pending, before it applied and read.
	AsOf time.Time
	// Err says why the gateway could not be read. Nothing is known of what it does then, and the
	// rest is empty.
	Err error
	// Behind is what was pending at AsOf and is not done by the last reading of it, refused or not.
	// Done is: to be routed, that new requests may go there, although the gateway itself may pass
	// it over for now, for a failed check of its own; to be removed or forgotten, that no new ones
	// do, whatever still runs there. How backends and clients are must not make a gateway look
	// behind, nor must a pool that it has not loaded.
	Behind []health.Op
	// Came is what has become pending since.
	Came []health.Op
}

// Hooks are called by a [Director]. They must not block, and each may be nil.
type Hooks struct {
	Observer Observer
	// Changed is called whenever the states of exclusions may have changed.
	Changed func()
	// Followed is called after each step once the set has synced, but not after the first reading
	// of a generation, whose answers are about another.
	Followed func(Progress)
}

// Director makes a gateway do what a set wants, and tells the set what the gateway does. What it
// does next is decided by [Steps].
type Director struct {
	Gateway Directed
	Set     *health.Set
	Log     *slog.Logger
	Hooks

	wake  signal.Signal
	steps *Steps
	// failing is the last error that was logged: one line a change, not one a try.
	failing string
}

// NewDirector returns a director that does nothing until Run.
func NewDirector(g Directed, set *health.Set, log *slog.Logger, h Hooks) *Director {
	return &Director{Gateway: g, Set: set, Log: log, Hooks: h, wake: signal.New(), steps: NewSteps(set)}
}

// Wake makes the director look at its set now. It never blocks; any number of calls before the look
// are one.
func (d *Director) Wake() { d.wake.Raise() }

// Programmed reports whether the gateway has been read to route to all that the set wanted routed
// at one time after it had synced, but for what it refused. Once it has, it stays so: until then a
// gateway may answer for Services that it does not know yet.
func (d *Director) Programmed() bool { return d.steps.programmed.Load() }

// Run adopts what an earlier agent left in the gateway, and directs it until ctx is done. It
// returns nil then: the gateway stays as it is, because it continues to serve without its agent.
func (d *Director) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		done := d.step(ctx)
		d.report(ctx, done.Err)
		if done.Wait == 0 {
			continue
		}
		timer := time.NewTimer(done.Wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-d.wake:
			d.steps.Woken()
		case <-d.Set.Work(): // health has changed
			d.steps.Woken()
		}
		timer.Stop()
	}
	return nil
}

// step applies what is due and reads the result.
func (d *Director) step(ctx context.Context) Done {
	ops := d.steps.Begin(time.Now())
	keys := d.steps.Applied(d.apply(ctx, ops))
	seen, err := d.observe(ctx, keys)
	var owned []health.Key
	if err == nil && d.steps.Moved(seen) {
		owned, err = d.owned(ctx)
	}
	done := d.steps.Read(time.Now(), seen, owned, err)
	if d.Changed != nil {
		d.Changed()
	}
	if done.Progress != nil && d.Followed != nil {
		d.Followed(*done.Progress)
	}
	return done
}

func (d *Director) owned(ctx context.Context) ([]health.Key, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	return d.Gateway.Owned(ctx)
}

func (d *Director) apply(ctx context.Context, ops []health.Op) error {
	if len(ops) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	began := time.Now()
	err := d.Gateway.Apply(ctx, ops)
	if d.Observer != nil {
		d.Observer.Applied(ops, time.Since(began), err)
	}
	return err
}

func (d *Director) observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	began := time.Now()
	seen, err := d.Gateway.Observe(ctx, keys)
	if d.Observer != nil {
		d.Observer.Read(time.Since(began), errors.Join(err, unread(seen)))
	}
	return seen, err
}

func (d *Director) report(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == d.failing || ctx.Err() != nil {
		return
	}
	d.failing = text
	if err != nil {
		d.Log.Warn("gateway does not follow", "error", err)
		return
	}
	d.Log.Info("gateway follows again")
}

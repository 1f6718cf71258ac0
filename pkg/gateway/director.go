package gateway

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// CallTimeout bounds one call of Apply, Observe or Owned.
const CallTimeout = 5 * time.Second

// pauseShare is how many times the duration of the last reading a pause is at least, unless there
// is new work. So a gateway with many targets spends at most a third of a core on being read.
const pauseShare = 2

// Observer receives what a [Director] did, for metrics. It has nothing to do with [Observed]. Its
// methods must not block.
type Observer interface {
	// Applied is called after each batch of operations with how long it took and its error, if any.
	Applied(ops []health.Op, took time.Duration, err error)
	// Read is called after each reading with how long it took. err includes the pools that could
	// not be read.
	Read(took time.Duration, err error)
}

// Progress reports which operations a gateway has not carried out yet.
type Progress struct {
	// AsOf is when the Director looked at what is pending, before it applied and read.
	AsOf time.Time
	// Err says why the gateway could not be read. Nothing is known of what it does then, and the
	// rest is empty.
	Err error
	// Behind are the operations that were pending at AsOf and that the last reading of their keys
	// does not show as done, refused ones included. WantRouted is done when new requests may go to
	// the target, even if a check of the gateway's own skips it. WantRemoved and WantAbsent are
	// done when no new request does, whatever still runs. An operation on a pool that was not read
	// is not in Behind.
	Behind []health.Op
	// Came are the other pending operations: those that have become pending since AsOf, and those
	// of pools that were not read.
	Came []health.Op
}

// Hooks are called by a [Director]. They must not block, and each may be nil.
type Hooks struct {
	Observer Observer
	// Changed is called whenever the states of exclusions may have changed.
	Changed func()
	// Followed is called after each step once the set has synced, except after the first reading of
	// a generation: that step applied its operations to the generation before.
	Followed func(Progress)
}

// Director applies what a set wants to a gateway, and records in the set what the gateway does.
// [Steps] decides what it does next.
type Director struct {
	Gateway Directed
	Set     *health.Set
	Log     *slog.Logger
	Hooks

	// Starter is the gateway, or nil if it does not start with what its agent has written.
	Starter Starter

	wake  signal.Signal
	steps *Steps
	// prepared: the gateway did not run, and was prepared from all that EndpointSlices list.
	prepared atomic.Bool
	// reading is how long the last reading took. 0: it failed, so the gateway was only waited for.
	reading time.Duration
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

// Programmed reports whether, at least once since the set synced, a reading showed every target
// routed that the set wanted routed, except those of pools that were not read and those that the
// gateway had answered it does not take ([Refused]). It never becomes false again. Before that, the
// gateway may answer for Services whose targets it does not have.
func (d *Director) Programmed() bool { return d.steps.programmed.Load() }

// Prepared reports whether the gateway, if it starts now, has every target that the set wants
// routed: it was prepared, or it is programmed.
func (d *Director) Prepared() bool { return d.prepared.Load() || d.Programmed() }

// prepare writes what a gateway starts with that does not run, and that this agent has never read.
// Readings decide everything later: while it starts, it may have read what was written before.
func (d *Director) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	keys, synced := d.Set.Wanted()
	if d.Starter == nil || !synced || !d.steps.unreadYet() || !d.Gateway.Stopped(ctx) {
		return nil
	}
	err := d.Starter.Prepare(keys)
	if err == nil {
		d.prepared.Store(true)
	}
	return err
}

// Run adopts what an earlier agent left in the gateway, and directs it until ctx is done. It
// returns nil then: the gateway stays as it is, because it continues to serve without its agent.
func (d *Director) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		done := d.step(ctx)
		d.report(ctx, done.Err)
		if done.Wait == 0 {
			continue
		}
		pause := done.Wait
		if pause > fastest { // not the second reading of a drain, which shows it Idle
			pause = max(pause, pauseShare*d.reading)
		}
		timer := time.NewTimer(pause)
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
	if err != nil {
		err = errors.Join(err, d.prepare(ctx))
	}
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
	took := time.Since(began)
	if d.Observer != nil {
		d.Observer.Read(took, errors.Join(err, unread(seen)))
	}
	if d.reading = took; err != nil {
		d.reading = 0
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

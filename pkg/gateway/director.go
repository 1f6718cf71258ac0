package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// callTimeout bounds one Apply or Observe.
	callTimeout = 5 * time.Second
	// fastest and slowest bound the pause between two readings while an exclusion is not Idle.
	fastest = 10 * time.Millisecond
	slowest = 100 * time.Millisecond
	// watchExclusions and watchReloads are the pauses when nothing is expected to change: how late
	// a reload can be noticed.
	watchExclusions = 250 * time.Millisecond
	watchReloads    = time.Second
	// retryFirst and maxRetry bound the pause after an error.
	retryFirst = 50 * time.Millisecond
	maxRetry   = 2 * time.Second
	// maxRush bounds the steps without a pause between them. Reapplying after a reload and letting
	// a kept target go need one each.
	maxRush = 4
)

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

// Director makes a gateway do what a set wants, and tells the set what the gateway does.
type Director struct {
	Gateway Directed
	Set     *health.Set
	Log     *slog.Logger
	Hooks

	wake       signal.Signal
	programmed atomic.Bool
	// failing is the last error that was logged: one line a change, not one a try.
	failing string
	// generation is the last of which the set has adopted what the gateway has of its own.
	generation string
	// refused are the ops that are pending still although they were applied, with the error
	// refusal. They wait until retryAt, so that an op which never succeeds neither delays the
	// others nor is tried at their pace. retry is the pause after the next refusal.
	refused map[health.Op]bool
	refusal error
	retryAt time.Time
	retry   time.Duration
	// behind are the ops that the last reading of each did not show as done, for Progress.
	behind map[health.Op]bool
}

// NewDirector returns a director that does nothing until Run.
func NewDirector(g Directed, set *health.Set, log *slog.Logger, h Hooks) *Director {
	return &Director{Gateway: g, Set: set, Log: log, Hooks: h, wake: signal.New(), retry: retryFirst}
}

// Wake makes the director look at its set now. It never blocks; any number of calls before the look
// are one.
func (d *Director) Wake() { d.wake.Raise() }

// Programmed reports whether the gateway has been read to route to all that the set wanted routed
// at one time after it had synced, but for what it refused. Once it has, it stays so: until then a
// gateway may answer for Services that it does not know yet.
func (d *Director) Programmed() bool { return d.programmed.Load() }

// Run adopts what an earlier agent left in the gateway, and directs it until ctx is done. It
// returns nil then: the gateway stays as it is, because it goes on serving without its agent.
func (d *Director) Run(ctx context.Context) error {
	pause, unread, rush := fastest, retryFirst, 0
	for ctx.Err() == nil {
		read, again, err := d.step(ctx)
		d.report(ctx, err)
		if again && rush < maxRush {
			rush++
			continue
		}
		rush = 0
		wait := watchReloads
		switch {
		case !read:
			wait, unread = unread, min(2*unread, maxRetry)
		case d.Set.Unsettled() || len(d.due(time.Now())) > 0:
			wait, pause = pause, min(pause*3/2, slowest)
		case len(d.Set.Watched()) > 0:
			wait, pause = watchExclusions, fastest
		default:
			pause = fastest
		}
		if read {
			unread = retryFirst
			if len(d.refused) > 0 {
				wait = min(wait, max(0, time.Until(d.retryAt)))
			}
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-d.wake:
			pause = fastest
		case <-d.Set.Work(): // health has changed
			pause = fastest
		}
		timer.Stop()
	}
	return nil
}

// step applies what is due and reads the result. read says that there is a reading, again that it
// brought new work that needs no pause: another generation of the gateway, or room to take out what
// was kept. err is what is wrong with the gateway, whether it was read or not.
func (d *Director) step(ctx context.Context) (read, again bool, err error) {
	asOf := time.Now()
	ops := d.due(asOf)
	applied := d.apply(ctx, ops)
	seen, err := d.observe(ctx, ops)
	moved := err == nil && seen.Generation != d.generation
	if moved {
		err = d.adopt(ctx)
	}
	if err != nil {
		d.Set.Void(time.Now())
		d.changed()
		d.follow(Progress{AsOf: asOf, Err: err})
		return false, false, err
	}
	d.Set.Observe(time.Now(), seen)
	d.changed()
	pending := d.Set.Pending()
	d.refuse(time.Now(), ops, applied, pending)
	if moved {
		// What one process refused another may take.
		d.generation, d.refused, d.behind = seen.Generation, nil, nil
	} else {
		d.follow(d.progress(asOf, ops, applied, seen, pending))
	}
	switch {
	case applied != nil:
		err = applied
	case len(d.refused) > 0:
		err = d.refusal
	default:
		d.retry = retryFirst
		err = unread(seen)
	}
	if !moved && d.Set.HasSynced() && !slices.ContainsFunc(pending, func(op health.Op) bool {
		return op.Want == health.WantRouted && !d.refused[op]
	}) {
		d.programmed.Store(true)
	}
	return true, moved || fresh(ops, d.without(slices.Clone(pending))), err
}

// adopt tells the set what the gateway has, before the first reading of each generation is
// believed: a process that was starting while a target was taken out and forgotten may have it
// nevertheless.
func (d *Director) adopt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	keys, err := d.Gateway.Owned(ctx)
	if err != nil {
		return err
	}
	d.Set.Adopt(time.Now(), keys)
	return nil
}

func (d *Director) apply(ctx context.Context, ops []health.Op) error {
	if len(ops) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	began := time.Now()
	err := d.Gateway.Apply(ctx, ops)
	if d.Observer != nil {
		d.Observer.Applied(ops, time.Since(began), err)
	}
	return err
}

// observe reads what the set watches, and what ops were about.
func (d *Director) observe(ctx context.Context, ops []health.Op) (health.Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	keys := d.Set.Watched()
	watched := make(map[health.Key]bool, len(keys))
	for _, k := range keys {
		watched[k] = true
	}
	for _, op := range ops {
		if !watched[op.Key] {
			keys = append(keys, op.Key)
		}
	}
	began := time.Now()
	seen, err := d.Gateway.Observe(ctx, keys)
	if d.Observer != nil {
		d.Observer.Read(time.Since(began), errors.Join(err, unread(seen)))
	}
	return seen, err
}

// unread names the pools that a reading knows nothing of.
func unread(seen health.Observation) error {
	var errs []error
	for _, pool := range slices.Sorted(maps.Keys(seen.Unread)) {
		errs = append(errs, fmt.Errorf("pool %s: %w", pool, seen.Unread[pool]))
	}
	return errors.Join(errs...)
}

// due returns what is pending and does not wait for another try.
func (d *Director) due(now time.Time) []health.Op {
	pending := d.Set.Pending()
	if !now.Before(d.retryAt) {
		return pending
	}
	return d.without(pending)
}

// without returns the ops that are not refused.
func (d *Director) without(ops []health.Op) []health.Op {
	return slices.DeleteFunc(ops, func(op health.Op) bool { return d.refused[op] })
}

// refuse notes which ops the gateway did not carry out: those that were applied with an error and
// are pending still. What was refused before and not tried again stays so while it is pending, and
// its next try is not put off.
func (d *Director) refuse(now time.Time, tried []health.Op, applied error, pending []health.Op) {
	still := make(map[health.Op]bool, len(pending))
	for _, op := range pending {
		still[op] = true
	}
	refused := map[health.Op]bool{}
	for op := range d.refused {
		if still[op] {
			refused[op] = true
		}
	}
	for _, op := range tried {
		delete(refused, op)
	}
	waiting := len(refused) > 0
	if applied != nil {
		for _, op := range tried {
			if still[op] {
				refused[op], d.refusal = true, applied
			}
		}
	}
	d.refused = refused
	if len(refused) > 0 && !waiting {
		d.retryAt = now.Add(d.retry)
		d.retry = min(2*d.retry, maxRetry)
	}
}

// progress judges the ops that were tried by what was seen. One that was not tried, because it was
// refused before, is as far as it was.
func (d *Director) progress(asOf time.Time, tried []health.Op, applied error, seen health.Observation,
	pending []health.Op) Progress {
	p := Progress{AsOf: asOf}
	was := make(map[health.Op]bool, len(tried)+len(d.refused))
	for op := range d.refused {
		was[op] = d.behind[op]
	}
	for _, op := range tried {
		is, read := seen.Seen[op.Key]
		switch {
		case !read: // its pool is unread
		case op.Want == health.WantRouted:
			was[op] = !is.Routed || is.Missing && applied != nil
		default:
			was[op] = is.Routed
		}
	}
	behind := map[health.Op]bool{}
	for _, op := range pending {
		is, known := was[op]
		switch {
		case !known:
			p.Came = append(p.Came, op)
		case is:
			behind[op] = true
			p.Behind = append(p.Behind, op)
		}
	}
	d.behind = behind
	return p
}

func (d *Director) follow(p Progress) {
	if d.Followed != nil && d.Set.HasSynced() {
		d.Followed(p)
	}
}

// fresh says whether after has an operation that before has not.
func fresh(before, after []health.Op) bool {
	tried := make(map[health.Op]bool, len(before))
	for _, op := range before {
		tried[op] = true
	}
	for _, op := range after {
		if !tried[op] {
			return true
		}
	}
	return false
}

func (d *Director) changed() {
	if d.Changed != nil {
		d.Changed()
	}
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

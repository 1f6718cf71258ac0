package gateway

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// fastest and slowest bound the pause between two readings while an exclusion is not Idle.
	fastest = 10 * time.Millisecond
	slowest = 100 * time.Millisecond
	// watchExclusions and watchReloads are the pauses when nothing is expected to change: how late
	// a reload can be noticed. A gateway that is away is tried at intervals of watchExclusions:
	// when it starts, it routes as it did when it ended.
	watchExclusions = 250 * time.Millisecond
	watchReloads    = time.Second
	// retryFirst and maxRetry bound the pause after an error, and until a target that is out and
	// could not be deleted is to be deleted again.
	retryFirst = 50 * time.Millisecond
	maxRetry   = 2 * time.Second
	// maxRush bounds the steps without a pause between them. Reapplying after a reload and letting
	// a kept target go need one each.
	maxRush = 4
	// maxBatch bounds the operations of one step: what becomes pending during a step waits for its
	// end.
	maxBatch = 200
)

// Steps decides what a [Director] does next with its gateway. It calls no gateway and never waits:
// the simulation drives it, too. One step is a call of each of Begin, Applied and Read, in this
// order. One goroutine at a time may use it.
type Steps struct {
	set        *health.Set
	programmed atomic.Bool
	// asOf is when the present step began, ops what it applies, applied how that ended.
	asOf    time.Time
	ops     []health.Op
	applied error
	// cut: more was due than one step applies. alone: of that, the step had removals only, whose
	// reading does not wait for additions. The next step has additions, too.
	cut, alone bool
	// pause is the next one while an exclusion is not Idle, unread that after a failed reading.
	// rush counts the steps without a pause.
	pause, unread time.Duration
	rush          int
	// generation is the last of which the set has adopted what the gateway has of its own.
	generation string
	// refused are the ops that are pending still although they were applied, with the error
	// refusal. unfinished are deletions that are pending still although they were applied without
	// an error, of targets that get no new requests: what still runs on them may take minutes.
	refused, unfinished retries
	refusal             error
	// tried are the pending ops that were applied in this generation. The value reports whether the
	// last reading of the op's key did not show it as done, for Progress.
	tried map[health.Op]bool
	// late are commands without an answer.
	late late
}

// Done is how a step has ended.
type Done struct {
	// Wait is the pause before the next step. It is 0 if there is new work: the gateway has another
	// generation, or an operation has become pending that was not tried.
	Wait time.Duration
	// Err is what is wrong with the gateway, whether it was read or not.
	Err error
	// Progress is nil before the set has synced, and after the first reading of a generation.
	Progress *Progress
}

// NewSteps returns the steps of a gateway that set directs.
func NewSteps(set *health.Set) *Steps {
	return &Steps{set: set, pause: fastest, unread: retryFirst, late: late{}}
}

// Woken notes that the pause has ended early, because the set may want something else.
func (s *Steps) Woken() { s.pause = fastest }

// Begin begins a step, and returns the operations to apply.
func (s *Steps) Begin(now time.Time) []health.Op {
	s.asOf, s.ops = now, s.due(now, s.set.Pending())
	if s.cut = len(s.ops) > maxBatch; !s.cut {
		s.alone = false
		return s.ops
	}
	// What was tried without effect, and without an error, keeps no other op waiting.
	again := slices.DeleteFunc(slices.Clone(s.ops), s.untried)
	s.ops = append(slices.DeleteFunc(s.ops, func(op health.Op) bool { return !s.untried(op) }), again...)
	most := maxBatch
	additions := slices.IndexFunc(s.ops, func(op health.Op) bool { return op.Want == health.WantRouted })
	if s.alone = !s.alone && additions > 0; s.alone {
		most = min(additions, most)
	}
	s.ops = s.ops[:most]
	return s.ops
}

func (s *Steps) untried(op health.Op) bool { _, tried := s.tried[op]; return !tried }

// Applied records the result of Apply, and returns the keys to read: those that the set watches,
// and those of the operations, also of unfinished ones.
func (s *Steps) Applied(err error) []health.Key {
	s.applied = err
	s.late.add(err)
	keys := s.set.Watched()
	watched := make(map[health.Key]bool, len(keys))
	for _, k := range keys {
		watched[k] = true
	}
	unfinished := slices.SortedFunc(maps.Keys(s.unfinished.ops), func(a, b health.Op) int {
		return strings.Compare(a.String(), b.String())
	})
	for _, op := range slices.Concat(s.ops, unfinished) {
		if !watched[op.Key] {
			watched[op.Key] = true
			keys = append(keys, op.Key)
		}
	}
	return keys
}

// Moved reports whether seen is the first reading of a generation. Read then needs the result of
// [Directed.Owned]: a process that was starting while a target was removed may still have it.
func (s *Steps) Moved(seen health.Observation) bool { return seen.Generation != s.generation }

// unreadYet reports whether no reading has succeeded.
func (s *Steps) unreadYet() bool { return s.generation == "" }

// Read ends the step with a reading, or with the error for which there is none. owned is what the
// gateway has, if the reading is the first of a generation.
func (s *Steps) Read(now time.Time, seen health.Observation, owned []health.Key, err error) Done {
	if err != nil {
		s.set.Void(now)
		s.late.unread()
		s.rush = 0
		wait := s.unread
		most := watchExclusions
		if now.Sub(s.asOf) > time.Second { // it is busy, or stopped
			most = maxRetry
		}
		s.unread = min(2*s.unread, most)
		return s.done(wait, err, Progress{AsOf: s.asOf, Err: err})
	}
	s.late.doubt(now, seen)
	moved := s.Moved(seen)
	if moved {
		s.set.Adopt(now, owned)
	}
	s.set.Observe(now, seen)
	s.unread = retryFirst
	pending := s.set.Pending()
	batch := make(map[health.Op]bool, len(s.ops))
	for _, op := range s.ops {
		batch[op] = true
	}
	s.postpone(now, seen, pending)
	var p Progress
	if moved {
		// What one process refused another may take.
		s.generation, s.refused, s.unfinished, s.tried = seen.Generation, retries{}, retries{}, nil
	} else {
		p = s.progress(seen, pending, batch)
		if s.set.HasSynced() && !slices.ContainsFunc(pending, func(op health.Op) bool {
			return op.Want == health.WantRouted && (s.tried[op] || s.untried(op)) && !s.refused.ops[op] &&
				seen.Unread[op.Pool] == nil
		}) {
			s.programmed.Store(true)
		}
	}
	switch {
	case s.applied != nil:
		err = s.applied
	case len(s.refused.ops) > 0:
		err = s.refusal
	default:
		err = unread(seen)
	}
	due := s.due(time.Time{}, pending) // without all refused and unfinished ones
	if s.cut && !moved && slices.ContainsFunc(due, s.untried) {
		return s.done(0, err, p)
	}
	if (moved || slices.ContainsFunc(due, func(op health.Op) bool { return !batch[op] })) && s.rush < maxRush {
		s.rush++
		return s.done(0, err, p)
	}
	s.rush = 0
	return s.done(s.wait(now, pending), err, p)
}

func (s *Steps) done(wait time.Duration, err error, p Progress) Done {
	if p.AsOf.IsZero() || !s.set.HasSynced() {
		return Done{Wait: wait, Err: err}
	}
	return Done{wait, err, &p}
}

// wait is the pause after a reading.
func (s *Steps) wait(now time.Time, pending []health.Op) time.Duration {
	wait := watchReloads
	switch {
	case s.set.Unsettled() || len(s.due(now, pending)) > 0:
		wait, s.pause = s.pause, min(s.pause*3/2, slowest)
	case len(s.set.Watched()) > 0 || len(s.unfinished.ops) > 0:
		wait, s.pause = watchExclusions, fastest
	default:
		s.pause = fastest
	}
	for _, r := range []retries{s.refused, s.unfinished} {
		if len(r.ops) > 0 {
			wait = min(wait, max(time.Nanosecond, r.at.Sub(now)))
		}
	}
	return wait
}

// unread names the pools that a reading knows nothing of.
func unread(seen health.Observation) error {
	var errs []error
	for _, pool := range slices.Sorted(maps.Keys(seen.Unread)) {
		errs = append(errs, fmt.Errorf("pool %s: %w", pool, seen.Unread[pool]))
	}
	return errors.Join(errs...)
}

// due returns those of the pending ops that do not wait for another try at now.
func (s *Steps) due(now time.Time, pending []health.Op) []health.Op {
	return slices.DeleteFunc(slices.Clone(pending), func(op health.Op) bool {
		return s.refused.waits(now, op) || s.unfinished.waits(now, op)
	})
}

// postpone notes which ops the gateway did not carry out: those that were applied and are pending
// still. A deletion of a target that was read as routed again is not unfinished: it is due.
func (s *Steps) postpone(now time.Time, seen health.Observation, pending []health.Op) {
	still, out := make(map[health.Op]bool, len(pending)), map[health.Op]bool{}
	for _, op := range pending {
		still[op] = true
		if op.Want == health.WantAbsent && !seen.Seen[op.Key].Routed {
			out[op] = true
		}
	}
	for op := range s.refused.ops {
		if is, read := seen.Seen[op.Key]; read && !is.Routed && s.late.undo(op) && !slices.Contains(s.ops, op) {
			delete(s.refused.ops, op) // taken out late
		}
	}
	answers := map[health.Op]bool{}
	causes(s.applied, func(r *Refused) { answers[r.Op] = true })
	s.refused.update(now, still, s.ops, func(op health.Op) (failed, answered bool) {
		s.refusal = cmp.Or(s.applied, s.refusal)
		return s.applied != nil || s.late.undo(op), answers[op]
	})
	if len(s.refused.ops) == 0 {
		s.refusal = nil
	}
	s.unfinished.update(now, out, s.ops, func(op health.Op) (failed, answered bool) {
		_, read := seen.Seen[op.Key]
		return read && s.applied == nil, false
	})
}

// retries are ops that were tried in vain. They wait until at, so that an op which never succeeds
// neither delays the others nor is tried at their pace. The zero value has none.
type retries struct {
	// ops reports for each whether it failed by an answer about it, and not because the gateway was
	// not reached.
	ops map[health.Op]bool
	at  time.Time
	// pause is how long the next ones wait.
	pause time.Duration
}

func (r *retries) has(op health.Op) bool { _, is := r.ops[op]; return is }

func (r *retries) waits(now time.Time, op health.Op) bool { return now.Before(r.at) && r.has(op) }

// update adds those of the tried ops that failed, and forgets what is not in pending. An op that
// was in vain before and was not tried again stays, and its next try is not put off.
func (r *retries) update(now time.Time, pending map[health.Op]bool, tried []health.Op,
	result func(health.Op) (failed, answered bool)) {
	ops := map[health.Op]bool{}
	for op, answered := range r.ops {
		if pending[op] {
			ops[op] = answered
		}
	}
	for _, op := range tried {
		delete(ops, op)
	}
	waiting := len(ops) > 0
	for _, op := range tried {
		if !pending[op] {
			continue
		}
		if failed, answered := result(op); failed {
			ops[op] = answered
		}
	}
	r.ops = ops
	switch {
	case len(ops) == 0:
		r.pause = 0
	case !waiting:
		r.pause = max(r.pause, retryFirst)
		r.at, r.pause = now.Add(r.pause), min(2*r.pause, maxRetry)
	}
}

// progress judges the ops that were tried by what was seen. One that was not tried, because it
// waits for its next try, is as far as it was.
func (s *Steps) progress(seen health.Observation, pending []health.Op, batch map[health.Op]bool) Progress {
	p, tried := Progress{AsOf: s.asOf}, map[health.Op]bool{}
	for _, op := range pending {
		behind := s.tried[op]
		known := behind || s.refused.has(op) || s.unfinished.has(op)
		if is, read := seen.Seen[op.Key]; batch[op] && read {
			known, behind = true, is.Routed
			if op.Want == health.WantRouted {
				behind = !is.Routed || is.Missing && s.applied != nil
			}
		}
		if known || batch[op] {
			tried[op] = behind
		}
		switch {
		case !known:
			p.Came = append(p.Came, op)
		case behind:
			p.Behind = append(p.Behind, op)
		}
	}
	s.tried = tried
	return p
}

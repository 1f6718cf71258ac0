package gateway

import (
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Unanswered is an error of Apply: a command was sent and not answered, for example because the
// gateway was stopped. The gateway may carry it out later, also after commands that are sent later.
type Unanswered struct {
	// Ops are those that the command carries out.
	Ops []health.Op
	// For is how long it may do so while the gateway answers others.
	For time.Duration
	// Err is how the call ended.
	Err error
}

// Error says what may still happen.
func (u *Unanswered) Error() string { return u.Err.Error() + " (it may still be carried out)" }

// Unwrap returns how the call ended.
func (u *Unanswered) Unwrap() error { return u.Err }

// Refused is an error of Apply: the gateway has answered that it does not carry out Op. An op that
// failed without such an answer was not reached.
type Refused struct {
	Op health.Op
	// Err is the answer.
	Err error
}

// Error returns the answer.
func (r *Refused) Error() string { return r.Err.Error() }

// Unwrap returns the answer.
func (r *Refused) Unwrap() error { return r.Err }

// causes calls found for every E among the errors that err, a result of Apply, joins and wraps.
func causes[E error](err error, found func(E)) {
	switch err := err.(type) { //nolint:errorlint // it looks at each error of the tree
	case E:
		found(err)
	case interface{ Unwrap() []error }:
		for _, e := range err.Unwrap() {
			causes(e, found)
		}
	case interface{ Unwrap() error }:
		causes(err.Unwrap(), found)
	}
}

// late has the operations that may still be carried out, after others that were sent later.
type late map[health.Op]lateOp

type lateOp struct {
	// left is for how long it may still be carried out, without the time of readings and of pauses
	// before a failed one.
	left time.Duration
	// read is when the last reading ended. Zero: it failed.
	read time.Time
}

// add adds those that err, a result of Apply, names.
func (l late) add(err error) {
	causes(err, func(u *Unanswered) {
		for _, op := range u.Ops {
			l[op] = lateOp{left: max(l[op].left, u.For)}
		}
	})
}

// unread stops the time of all of them until the next reading: the gateway does not answer.
func (l late) unread() {
	for op, is := range l {
		l[op] = lateOp{left: is.left}
	}
}

// doubt forgets those whose time was over when seen began, and takes seen for no proof of the
// contrary of the others.
func (l late) doubt(now time.Time, seen health.Observation) {
	for op, is := range l {
		if !is.read.IsZero() {
			is.left -= seen.At.Sub(is.read)
		}
		if is.left < 0 {
			delete(l, op)
			continue
		}
		l[op] = lateOp{is.left, now}
		if s, read := seen.Seen[op.Key]; read {
			if op.Want == health.WantRouted {
				s.Late = true
			} else {
				s.Missing = true
			}
			seen.Seen[op.Key] = s
		}
	}
}

// undo reports whether one of them may take out what op routes to.
func (l late) undo(op health.Op) bool {
	for other := range l {
		if other.Key == op.Key && op.Want == health.WantRouted && other.Want != health.WantRouted {
			return true
		}
	}
	return false
}

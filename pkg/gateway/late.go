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
	// For is how long after the gateway answers again it may do so.
	For time.Duration
	// Err is how the call ended.
	Err error
}

// Error says what may still happen.
func (u *Unanswered) Error() string { return u.Err.Error() + " (it may still be carried out)" }

// Unwrap returns how the call ended.
func (u *Unanswered) Unwrap() error { return u.Err }

// late has the operations that may still be carried out, after others that were sent later.
type late map[health.Op]lateOp

type lateOp struct {
	lasts time.Duration
	// until is zero while the gateway does not answer.
	until time.Time
}

// add adds those that err, a result of Apply, names.
func (l late) add(err error) {
	switch err := err.(type) { //nolint:errorlint // it looks at each error of the tree
	case *Unanswered:
		for _, op := range err.Ops {
			l[op] = lateOp{lasts: max(l[op].lasts, err.For)}
		}
	case interface{ Unwrap() []error }:
		for _, e := range err.Unwrap() {
			l.add(e)
		}
	case interface{ Unwrap() error }:
		l.add(err.Unwrap())
	}
}

// unread begins the time of all of them again: the gateway does not answer.
func (l late) unread() {
	for op, is := range l {
		l[op] = lateOp{lasts: is.lasts}
	}
}

// doubt forgets those whose time was over when seen began, and takes seen for no proof of the
// contrary of the others.
func (l late) doubt(now time.Time, seen health.Observation) {
	for op, is := range l {
		if is.until.IsZero() {
			is.until = now.Add(is.lasts)
			l[op] = is
		}
		if seen.At.After(is.until) {
			delete(l, op)
			continue
		}
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

package probe

import (
	"crypto/x509"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Source has the schedule. Its methods are called from the goroutine of [Runner.Run] alone, and must not wait.
type Source interface {
	// Due appends to jobs at most max probes that are due at now, and says when to ask again (zero: when woken). It is asked some
	// milliseconds ahead of the clock, for probes that begin at once.
	Due(now time.Time, jobs []health.Job, max int) ([]health.Job, time.Time)
	// Report takes in an outcome; false: too late, its target left or its check changed.
	Report(now time.Time, job health.Job, outcome health.Outcome) bool
	// Left appends to keys the targets that are not probed any more and were when it was asked last, so that what is kept for them can be
	// given up. all: there are too many to name, everything is to be given up.
	Left(keys []health.Key) (left []health.Key, all bool)
}

// Observer is told what the runner does, for metrics. Its methods are called from the goroutine of [Runner.Run] alone, and must not wait.
type Observer interface {
	// Started is called when a probe begins, late by lateness.
	Started(lateness time.Duration)
	// Finished is called when a probe of protocol ended, after took.
	Finished(protocol health.Protocol, outcome health.Outcome, took time.Duration)
	// InFlight is called whenever one of the numbers may have changed, once a round: probes in flight, probes that wait for room, and
	// connections kept alive. full says that no more probes are begun because the bound is reached: schedules slip.
	InFlight(flying, waiting, idle int, full bool)
}

// Runner carries out probes. Its fields must not change once Run was called.
type Runner struct {
	Source Source
	// Observer may be nil.
	Observer Observer
	// Roots verify HTTPS targets whose check says so. Nil: the system's.
	Roots *x509.CertPool
	// MaxInFlight bounds the probes in flight, and so the sockets. Targets that did not answer the last time get half of it. 0: 32768,
	// or a quarter of the process's limit of descriptors if that is less. That is enough for 100,000 targets each 10 s of which 30 % are
	// black-holed with a timeout of 5 s.
	MaxInFlight int
	// MaxIdle bounds the connections that are kept alive between probes. Beyond it, checks open new ones. 0: half of the process's limit
	// of descriptors.
	MaxIdle int

	mu sync.Mutex
	// wake ends the sleep of a running Run. Nil: nothing runs.
	wake chan struct{}
	// tlsDone are the HTTPS probes that ended and were not taken in yet.
	tlsDone []tlsResult
}

// tlsResult is how an HTTPS probe ended.
type tlsResult struct {
	flight  *flight
	outcome health.Outcome
	// conn can be used again. Nil: it was closed.
	conn *tlsConn
}

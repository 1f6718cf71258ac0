package probe

import (
	"context"
	"crypto/x509"
	"sync"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Source has the schedule. Only the goroutine of [Runner.Run] calls its methods. They must not
// block.
type Source interface {
	// Due appends to jobs at most max probes that are due at now, and returns when to ask again
	// (zero: when woken).
	Due(now time.Time, jobs []health.Job, max int) ([]health.Job, time.Time)
	// Report records an outcome, and reports whether it counts.
	Report(now time.Time, job health.Job, outcome health.Outcome) bool
}

// Observer counts what the runner does, for metrics. Only the goroutine of [Runner.Run] calls its
// methods. They must not block.
type Observer interface {
	// Finished is called when a probe of protocol ended.
	Finished(protocol health.Protocol, outcome health.Outcome)
	// InFlight is called whenever one of the numbers may have changed: probes in flight, and probes
	// that wait for capacity. full reports whether the bound is reached. Probes are then late.
	InFlight(flying, waiting int, full bool)
}

const (
	// round is the shortest time between two calls of Source.Due. The probes of a round begin
	// together.
	round = 8 * time.Millisecond
	// heldUp is how late a timeout may be noticed. A later one means that this process did not run
	// in time, and is no evidence about the target.
	heldUp = 100 * time.Millisecond
)

// Runner carries out probes. Its fields must not change after Run was called.
type Runner struct {
	Source Source
	// Observer may be nil.
	Observer Observer
	// Roots verify the certificates of HTTPS targets whose check has Verify. Nil: the system's
	// roots.
	Roots *x509.CertPool
	// MaxInFlight bounds the probes in flight, and so the sockets. Targets that did not answer the
	// last time get half of it. 0: 32768, or a quarter of the process's limit of descriptors if
	// that is less. That is enough for 100,000 targets each 10 s of which 30 % are black-holed with
	// a timeout of 5 s.
	MaxInFlight int

	once sync.Once
	wake chan struct{}
}

// Wake makes the runner ask its source immediately. It may be called from any goroutine, also when
// the runner does not run, and never blocks.
func (r *Runner) Wake() {
	select {
	case r.woken() <- struct{}{}:
	default:
	}
}

func (r *Runner) woken() chan struct{} {
	r.once.Do(func() { r.wake = make(chan struct{}, 1) })
	return r.wake
}

// flight is one probe in flight, and how it ended.
type flight struct {
	job     health.Job
	began   time.Time
	outcome health.Outcome
}

// loop is a running Runner. It belongs to the goroutine of Run.
type loop struct {
	*Runner
	ctx         context.Context
	wg          sync.WaitGroup
	maxInFlight int

	flying, silentFlying int
	// waiting are the probes of targets that did not answer the last time and for which there is no
	// capacity.
	waiting []health.Job
	done    chan *flight
	// ask is when to ask the source again. The zero time: when woken.
	ask time.Time
}

// Run carries out probes until ctx ends, and returns nil then. Probes in flight end without an
// outcome. A Runner runs once at a time.
func (r *Runner) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &loop{
		Runner: r, ctx: ctx, maxInFlight: r.MaxInFlight,
		done: make(chan *flight, 64), ask: time.Now(),
	}
	if l.maxInFlight == 0 {
		l.maxInFlight = 32768
		var limit syscall.Rlimit
		if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) == nil {
			l.maxInFlight = int(min(32768, limit.Cur/4))
		}
	}
	defer l.close(cancel)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		l.begin()
		if r.Observer != nil {
			r.Observer.InFlight(l.flying, len(l.waiting), l.flying >= l.maxInFlight)
		}
		var after <-chan time.Time
		if !l.ask.IsZero() && l.flying < l.maxInFlight {
			timer.Reset(time.Until(l.ask))
			after = timer.C
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.woken():
			l.ask = time.Now()
		case <-after:
		case f := <-l.done:
			l.land(f)
			for range len(l.done) {
				l.land(<-l.done)
			}
		}
	}
}

// close ends the probes in flight, and waits for them.
func (l *loop) close(cancel func()) {
	cancel()
	go func() {
		l.wg.Wait()
		close(l.done)
	}()
	for range l.done {
	}
}

func (l *loop) begin() {
	for len(l.waiting) > 0 && l.capacityForSilent() {
		l.start(l.waiting[0])
		l.waiting = l.waiting[1:]
	}
	now, capacity := time.Now(), l.maxInFlight-l.flying
	if capacity <= 0 || l.ask.IsZero() || now.Before(l.ask) {
		return
	}
	jobs, ask := l.Source.Due(now, nil, capacity)
	for _, job := range jobs {
		if job.Silent && (len(l.waiting) > 0 || !l.capacityForSilent()) {
			l.waiting = append(l.waiting, job)
		} else {
			l.start(job)
		}
	}
	if earliest := now.Add(round); !ask.IsZero() && ask.Before(earliest) {
		ask = earliest
	}
	l.ask = ask
}

func (l *loop) capacityForSilent() bool {
	return l.silentFlying < max(l.maxInFlight/2, 1) && l.flying < l.maxInFlight
}

func (l *loop) start(job health.Job) {
	f := &flight{job: job, began: time.Now()}
	l.flying++
	if job.Silent {
		l.silentFlying++
	}
	l.wg.Go(func() {
		deadline := f.began.Add(job.Check.Timeout)
		ctx, cancel := context.WithDeadline(l.ctx, deadline)
		f.outcome = l.probe(ctx, &f.job)
		cancel()
		if f.outcome.Kind == health.Timeout && time.Since(deadline) > heldUp {
			f.outcome = health.Outcome{}
		}
		l.done <- f
	})
}

func (l *loop) land(f *flight) {
	l.flying--
	if f.job.Silent {
		l.silentFlying--
	}
	if l.ctx.Err() != nil {
		return // the end of Run ended the probe: there is no outcome
	}
	now := time.Now()
	if l.Observer != nil {
		l.Observer.Finished(f.job.Check.Protocol, f.outcome)
	}
	l.Source.Report(now, f.job, f.outcome)
}

func (r *Runner) probe(ctx context.Context, job *health.Job) health.Outcome {
	switch job.Check.Protocol {
	case health.HTTP, health.HTTPS:
		return r.get(ctx, job)
	case health.TCP:
		c, err := dial(ctx, address(job))
		if err != nil {
			return failure(err)
		}
		c.Close()
		return health.Outcome{Kind: health.Success}
	case health.GRPC:
		return callHealth(ctx, job)
	default:
		return health.Outcome{}
	}
}

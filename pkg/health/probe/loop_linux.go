package probe

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// startMost is how many probes begin before answers are looked at again. Beginning one takes some 10 us.
	startMost = 64
	// maxEvents is how many events one epoll_wait returns.
	maxEvents = 256
	// round is how long the loop sleeps between two looks at its sockets while anything is in flight, longNap how long after some in which
	// nothing happened. Answers are read and probes begun by rounds, not one at a time: at thousands of probes a second a round has many,
	// and to be woken costs as much as a probe on a kept connection. The end of a probe is seen late by longNap at most.
	round   = 8 * time.Millisecond
	longNap = 16 * time.Millisecond
	// ahead is how long before its time a probe may begin, so that it begins no later than that after it.
	ahead = round / 2
	// While a probe is in flight whose timeout is shorter than hasty, rounds take shortNap: it needs several of them, one to connect and one
	// for the answer.
	hasty = 20 * round
	// At least each lookEvery, and at most once a round, lookMost kept connections are looked at for whether they are given up.
	lookEvery = time.Second
	lookMost  = 128
	shortNap  = 2 * time.Millisecond
)

// state is how far a flight has come.
type state uint8

const (
	// connecting: the request was not sent.
	connecting state = iota
	// asked: it was, the outcome is open.
	asked
	// reading: the outcome was reported, the rest of the answer is still read.
	reading
	// idling: kept alive for the next probe.
	idling
	// elsewhere: an HTTPS probe, on its goroutine.
	elsewhere
)

// flight is one probe in flight, or a connection kept alive between two.
type flight struct {
	job   health.Job
	state state
	// reused says that the connection has answered an earlier probe.
	reused bool
	// suspect says that the flight counts to the half of the bound that targets share which did not answer the last time.
	suspect bool
	fd      int
	slot    int32
	sent    int
	began   time.Time
	// deadline is the heap's order, at the place in it. For idling, when the connection is given up; it is not in the heap then.
	deadline time.Time
	at       int
	// home is the place among the kept, nowhere if it never idled.
	home int
	resp response
	grpc *grpcAnswer
	tls  *tlsConn // idling
}

// deadlines is a heap of flights.
type deadlines []*flight

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadline.Before(d[j].deadline) }
func (d deadlines) Swap(i, j int)      { d[i], d[j] = d[j], d[i]; d[i].at, d[j].at = i, j }
func (d *deadlines) Push(x any)        { f := x.(*flight); f.at = len(*d); *d = append(*d, f) }
func (d *deadlines) Pop() any {
	f := (*d)[len(*d)-1]
	(*d)[len(*d)-1] = nil
	*d = (*d)[:len(*d)-1]
	f.at = -1
	return f
}

// loop is a running Runner. All of it belongs to the goroutine of Run.
type loop struct {
	*Runner
	ctx         context.Context
	wg          sync.WaitGroup
	epfd        int
	maxInFlight int
	maxIdle     int

	// slots holds the flights on sockets by the number that epoll has for them, generations tells a late event from one for the present user.
	slots       []*flight
	generations []int32
	free        []int32
	spare       []*flight
	deadlines   deadlines
	// kept are the flights whose connection was kept for another probe, idle or in use again, in no order; idle finds one by its target and
	// idling is how many have nothing to do. hand is the next of kept to look at for whether it is given up.
	kept   []*flight
	idle   map[health.Key]*flight
	idling int
	hand   int

	flying, suspectsFlying int
	// suspects are the targets whose last probe ended by timeout, until when that is believed.
	suspects  map[health.Key]time.Time
	sweepSize int
	waiting   []health.Job

	// ask is when the source is to be asked again. The zero time: when woken.
	ask    time.Time
	jobs   []health.Job
	events [maxEvents]unix.EpollEvent
	buf    [maxAnswer]byte
	out    []byte
	// nap is how long to sleep next, if anything is in flight. busy says that something happened in this round.
	nap  time.Duration
	busy bool
	// hastyUntil is the last deadline of a probe whose timeout is short.
	hastyUntil time.Time
	left       []health.Key
}

// Run carries out probes until ctx ends, and returns nil then. Probes in flight are given up without an outcome. A Runner runs once at a time.
func (r *Runner) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	l, err := r.open(ctx)
	if err != nil {
		cancel()
		return err
	}
	defer l.close()
	defer cancel()
	timer := time.NewTimer(0)
	defer timer.Stop()
	l.ask = time.Now()
	for {
		more := l.begin()
		if r.Observer != nil {
			r.Observer.InFlight(l.flying, len(l.waiting), l.idling, l.flying >= l.maxInFlight)
		}
		if !more {
			var after <-chan time.Time
			if wait, ok := l.patience(); ok {
				timer.Reset(wait)
				after = timer.C
			}
			select {
			case <-ctx.Done():
				return nil
			case <-r.wake:
				l.ask = time.Now()
			case <-after:
			}
		}
		if err := l.poll(); err != nil {
			return err
		}
		l.landTLS()
		l.giveUp()
	}
}

// Wake makes the runner ask its source at once. It may be called from any goroutine, also when nothing runs, and never waits.
func (r *Runner) Wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wake == nil {
		return // Run asks first thing
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Runner) open(ctx context.Context) (*loop, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("read the limit of descriptors: %w", err)
	}
	descriptors := int(min(limit.Cur, 1<<24))
	l := &loop{
		Runner: r, ctx: ctx, maxInFlight: r.MaxInFlight, maxIdle: r.MaxIdle,
		idle: map[health.Key]*flight{}, suspects: map[health.Key]time.Time{},
	}
	if l.maxInFlight == 0 {
		l.maxInFlight = min(32768, descriptors/4)
	}
	if l.maxIdle == 0 {
		l.maxIdle = descriptors / 2
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wake != nil {
		return nil, errors.New("the runner runs already")
	}
	var err error
	if l.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w", err)
	}
	r.wake, r.tlsDone = make(chan struct{}, 1), nil
	return l, nil
}

// close gives up all that is in flight. HTTPS probes end with the context, which must have ended.
func (l *loop) close() {
	for _, f := range l.slots {
		if f != nil {
			rawClose(f.fd)
		}
	}
	for _, f := range l.kept {
		if f.tls != nil {
			f.tls.abort()
		}
	}
	l.wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.tlsDone {
		if d.conn != nil {
			d.conn.abort()
		}
	}
	l.tlsDone, l.Runner.wake = nil, nil
	rawClose(l.epfd)
}

// begin starts some of the probes that are due, and reports whether there may be more at once.
func (l *loop) begin() bool {
	started := 0
	for len(l.waiting) > 0 && l.suspectRoom() && started < startMost {
		job := l.waiting[0]
		l.waiting[0] = health.Job{}
		l.waiting = l.waiting[1:]
		l.start(job, true)
		started++
	}
	room := min(startMost-started, l.maxInFlight-l.flying)
	if room <= 0 {
		return started == startMost && l.flying < l.maxInFlight
	}
	now := time.Now()
	if l.ask.IsZero() || now.Add(ahead).Before(l.ask) {
		return false
	}
	l.leave()
	l.jobs, l.ask = l.Source.Due(now.Add(ahead), l.jobs[:0], room)
	full := len(l.jobs) >= room
	if full {
		l.ask = now
	}
	for i, job := range l.jobs {
		l.jobs[i] = health.Job{}
		suspect := false
		if len(l.suspects) > 0 {
			_, suspect = l.suspects[job.Key]
		}
		if suspect && (len(l.waiting) > 0 || !l.suspectRoom()) {
			l.waiting = append(l.waiting, job)
			continue
		}
		l.start(job, suspect)
	}
	return full && l.flying < l.maxInFlight
}

// leave closes the connections that were kept for targets that left.
func (l *loop) leave() {
	var all bool
	l.left, all = l.Source.Left(l.left[:0])
	for _, k := range l.left {
		if f := l.idle[k]; f != nil && f.state == idling {
			l.drop(f)
		}
	}
	clear(l.left)
	if all {
		for n := len(l.kept) - 1; n >= 0; n-- {
			if f := l.kept[n]; f.state == idling {
				l.drop(f)
			}
		}
	}
}

// giveUp closes some of the connections for which no probe came within two intervals.
func (l *loop) giveUp() {
	if l.idling == 0 {
		return
	}
	now := time.Now()
	for range min(len(l.kept), lookMost) {
		if l.hand >= len(l.kept) {
			l.hand = 0
		}
		if f := l.kept[l.hand]; f.state == idling && f.deadline.Before(now) {
			l.drop(f) // another takes its place
		} else {
			l.hand++
		}
	}
}

func (l *loop) suspectRoom() bool {
	return l.suspectsFlying < max(l.maxInFlight/2, 1) && l.flying < l.maxInFlight
}

// patience is how long to sleep until something is to be done, if no one wakes the loop. It reports false if only somebody can.
func (l *loop) patience() (time.Duration, bool) {
	now, short := time.Now(), round
	if now.Before(l.hastyUntil) {
		short = shortNap
	}
	l.nap = min(2*l.nap, longNap)
	if l.busy || l.nap == 0 {
		l.nap = short
	}
	l.busy = false
	var next time.Time
	if l.flying < l.maxInFlight && !l.ask.IsZero() {
		next = l.ask.Add(-ahead)
	}
	if len(l.deadlines) > 0 && (next.IsZero() || l.deadlines[0].deadline.Before(next)) {
		next = l.deadlines[0].deadline
	}
	sockets := len(l.deadlines) // HTTPS probes wake the loop
	if l.idling > 0 && (next.IsZero() || next.Sub(now) > lookEvery) {
		next = now.Add(lookEvery)
	}
	if next.IsZero() {
		return l.nap, sockets > 0
	}
	// Starts are taken together too.
	wait := max(next.Sub(now), short)
	if sockets > 0 {
		wait = min(wait, l.nap)
	}
	return wait, true
}

// poll takes in what happened to the sockets, and ends what is too late.
func (l *loop) poll() error {
	for {
		// The time from before the reading: what is not in it by then was not there in time. If the process is stopped and goes on
		// later, what came meanwhile is read first.
		now := time.Now()
		n, e := epollPoll(l.epfd, l.events[:])
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return fmt.Errorf("poll for events: %w", e)
		}
		for _, e := range l.events[:n] {
			if f := l.slots[e.Fd]; f != nil && l.generations[e.Fd] == e.Pad {
				l.event(f, e.Events)
			}
		}
		l.busy = l.busy || n > 0
		if n < maxEvents && l.expire(now) {
			return nil
		}
	}
}

// expire ends what should have ended by now, a time at which all events had been read. It reports false if there is more that is too late
// by the present time, for which events must be read once more.
func (l *loop) expire(now time.Time) bool {
	for len(l.deadlines) > 0 && !l.deadlines[0].deadline.After(now) {
		f := l.deadlines[0]
		if f.state == connecting || f.state == asked {
			l.report(f, health.Outcome{Kind: health.Timeout})
		}
		l.drop(f)
	}
	return len(l.deadlines) == 0 || l.deadlines[0].deadline.After(time.Now())
}

// start begins a probe.
func (l *loop) start(job health.Job, suspect bool) {
	now := time.Now()
	l.busy = true
	if l.Observer != nil {
		l.Observer.Started(max(0, now.Sub(job.Due)))
	}
	if f := l.idle[job.Key]; f != nil && f.state == idling {
		if f.job.Check == job.Check || *f.job.Check == *job.Check {
			l.again(f, job, suspect, now)
			return
		}
		l.drop(f)
	}
	f := l.flight(job, suspect, now)
	switch job.Check.Protocol {
	case health.HTTP, health.TCP, health.GRPC:
		l.connect(f)
	case health.HTTPS:
		l.flyTLS(f, nil)
	default:
		l.report(f, health.Outcome{})
		l.drop(f)
	}
}

// flight makes one, which counts as flying.
func (l *loop) flight(job health.Job, suspect bool, now time.Time) *flight {
	var f *flight
	if n := len(l.spare); n > 0 {
		f, l.spare = l.spare[n-1], l.spare[:n-1]
	} else {
		f = &flight{}
	}
	f.job, f.state, f.reused, f.fd, f.slot, f.sent, f.at, f.home = job, connecting, false, -1, -1, 0, -1, -1
	f.resp.reset()
	f.grpc = nil
	l.fly(f, suspect, now)
	return f
}

func (l *loop) fly(f *flight, suspect bool, now time.Time) {
	f.suspect, f.began, f.deadline = suspect, now, now.Add(f.job.Check.Timeout)
	if f.job.Check.Timeout < hasty && f.deadline.After(l.hastyUntil) {
		l.hastyUntil = f.deadline
	}
	l.flying++
	if suspect {
		l.suspectsFlying++
	}
}

// again probes on a connection that was kept alive.
func (l *loop) again(f *flight, job health.Job, suspect bool, now time.Time) {
	f.job, f.reused, f.sent = job, true, 0
	f.resp.reset()
	l.idling--
	l.fly(f, suspect, now)
	if f.tls != nil {
		conn := f.tls
		f.tls = nil
		l.flyTLS(f, conn)
		return
	}
	heap.Push(&l.deadlines, f)
	f.state = connecting
	l.send(f)
}

// connect opens a connection and sends the request, if that is possible at once.
func (l *loop) connect(f *flight) {
	addr := address(&f.job)
	family := unix.AF_INET
	if !addr.Addr().Is4() {
		family = unix.AF_INET6
	}
	fd, e := rawSocket(family)
	if e != 0 {
		l.fail(f, e)
		return
	}
	f.fd = fd
	// The acknowledgement of SYN+ACK waits for the request, or, of a TCP check, for the RST.
	dontAck(fd)
	l.slot(f)
	heap.Push(&l.deadlines, f)
	if e := rawConnect(fd, addr); e != 0 && e != unix.EINPROGRESS {
		l.fail(f, e)
		return
	}
	// What is on the same machine has answered by now, and one event less is to be waited for. Else this says EAGAIN, and costs little.
	if f.job.Check.Protocol != health.TCP && !l.send(f) {
		return
	}
	// Edge-triggered, and once for all: a socket in flight costs one epoll_ctl.
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET, Fd: f.slot, Pad: l.generations[f.slot]}
	if f.state == connecting {
		event.Events |= unix.EPOLLOUT
	}
	if e := epollAdd(l.epfd, fd, &event); e != 0 {
		l.fail(f, e)
	}
}

// slot gives f a number for epoll.
func (l *loop) slot(f *flight) {
	if n := len(l.free); n > 0 {
		f.slot, l.free = l.free[n-1], l.free[:n-1]
		l.slots[f.slot] = f
		return
	}
	f.slot = int32(len(l.slots))
	l.slots, l.generations = append(l.slots, f), append(l.generations, 0)
}

// send sends what is left of the request. It reports whether f goes on.
func (l *loop) send(f *flight) bool {
	// Made anew rather than kept: a request that did not go out in one piece is rare.
	l.out = l.out[:0]
	if f.job.Check.Protocol == health.GRPC {
		l.out = appendHealthCheck(l.out, &f.job)
	} else {
		l.out = appendGet(l.out, &f.job)
	}
	n, e := rawWrite(f.fd, l.out[f.sent:])
	switch {
	case e == 0:
		f.sent += n
		if f.sent == len(l.out) {
			f.state = asked
			if f.job.Check.Protocol == health.GRPC && f.grpc == nil {
				f.grpc = newGRPCAnswer()
			}
		}
		return true
	case e == unix.EAGAIN && !f.reused:
		return true
	default:
		l.fail(f, e)
		return false
	}
}

// event takes in what happened on f's socket.
func (l *loop) event(f *flight, events uint32) {
	if f.state == idling {
		// The backend closed it, or says what nobody asked for.
		l.drop(f)
		return
	}
	if f.state == connecting {
		if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 || f.job.Check.Protocol == health.TCP {
			e := pendingError(f.fd)
			switch {
			case e != 0:
				l.fail(f, e)
				return
			case f.job.Check.Protocol == health.TCP:
				l.report(f, health.Outcome{Kind: health.Success})
				l.drop(f)
				return
			}
		}
		if !l.send(f) || f.state == connecting && events&unix.EPOLLIN == 0 {
			return
		}
	}
	l.read(f, events)
}

// read reads what is there. An answer may come before the request is out: a server that is full may say so at once.
func (l *loop) read(f *flight, events uint32) {
	for {
		n, e := rawRead(f.fd, l.buf[:])
		switch {
		case e == unix.EAGAIN:
			return
		case e == unix.EINTR:
			continue
		case e != 0 || n == 0:
			l.fail(f, e)
			return
		}
		if l.take(f, l.buf[:n]) {
			return
		}
		if n < len(l.buf) && events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) == 0 {
			return // there was no more; what comes makes a new event
		}
	}
}

// take takes in a piece of the answer and reports whether nothing more is to be read.
func (l *loop) take(f *flight, b []byte) bool {
	if f.job.Check.Protocol == health.GRPC {
		if f.grpc == nil {
			f.grpc = newGRPCAnswer()
		}
		err := f.grpc.feed(b)
		if err != nil || f.grpc.done {
			outcome := f.grpc.outcome
			if err != nil {
				outcome = health.Outcome{Kind: health.HTTPFailure}
			}
			l.report(f, outcome)
			l.drop(f)
			return true
		}
		if f.grpc.owesAck {
			f.grpc.owesAck = false
			// 9 bytes on a connection that has sent one request: they go, or the connection is broken, which reading will say.
			_, _ = rawWrite(f.fd, settingsAck)
		}
		return false
	}
	if err := f.resp.feed(b); err != nil {
		l.report(f, health.Outcome{Kind: health.HTTPFailure})
		l.drop(f)
		return true
	}
	if f.resp.status != 0 && f.state != reading {
		early := f.state == connecting // the rest of the request is not sent any more
		known := l.report(f, judge(f.job.Check, f.resp.status))
		f.state = reading
		f.resp.close = f.resp.close || early || !known
	}
	if f.resp.phase != ended {
		return false
	}
	if f.job.Check.KeepAlive && !f.resp.close {
		l.keep(f)
	} else {
		l.drop(f)
	}
	return true
}

// fail ends f by an errno, or, if that is 0, because the backend closed the connection.
func (l *loop) fail(f *flight, e errno) {
	switch {
	case f.state == reading: // the outcome is known
	case f.reused && f.resp.read == 0:
		// The backend gave up the connection that was kept alive. That is its right: a new one is tried in what time is left.
		l.reconnect(f)
		return
	case e == 0:
		l.report(f, health.Outcome{Kind: health.TCPFailure})
	default:
		l.report(f, broken(e))
	}
	l.drop(f)
}

// reconnect goes on with the probe of f on a new connection.
func (l *loop) reconnect(f *flight) {
	l.shut(f)
	l.forget(f)
	f.state, f.reused, f.sent = connecting, false, 0
	l.connect(f)
}

// report gives the outcome to the source, and remembers who did not answer. It reports whether the target is probed still, so that its
// connection is worth keeping.
func (l *loop) report(f *flight, outcome health.Outcome) bool {
	now := time.Now()
	if l.Observer != nil {
		l.Observer.Finished(f.job.Check.Protocol, outcome, now.Sub(f.began))
	}
	known := l.Source.Report(now, f.job, outcome)
	if outcome.Kind == health.Timeout && known {
		// Believed until two more probes should have been made: a target that left is not remembered for ever.
		l.suspects[f.job.Key] = now.Add(3 * f.job.Check.Interval)
		l.sweep(now)
	} else if len(l.suspects) > 0 {
		delete(l.suspects, f.job.Key)
	}
	// What the source learned may change what is due, and when.
	l.ask = now
	return known
}

// sweep forgets suspects that were not probed for long, when there are twice as many as after the last time.
func (l *loop) sweep(now time.Time) {
	if len(l.suspects) < max(1024, 2*l.sweepSize) {
		return
	}
	for k, until := range l.suspects {
		if until.Before(now) {
			delete(l.suspects, k)
		}
	}
	l.sweepSize = len(l.suspects)
}

// keep keeps f's connection for the next probe of its target, and gives it up if none comes within two intervals.
func (l *loop) keep(f *flight) {
	if f.home < 0 {
		if l.idling >= l.maxIdle || l.idle[f.job.Key] != nil {
			l.drop(f)
			return
		}
		f.home = len(l.kept)
		l.kept = append(l.kept, f)
		l.idle[f.job.Key] = f
	}
	l.land(f)
	if f.at >= 0 {
		heap.Remove(&l.deadlines, f.at)
	}
	l.idling++
	f.state = idling
	f.deadline = time.Now().Add(2*f.job.Check.Interval + f.job.Check.Timeout)
}

// forget takes f out of those whose connection is kept.
func (l *loop) forget(f *flight) {
	if f.home < 0 {
		return
	}
	last := l.kept[len(l.kept)-1]
	l.kept[f.home], last.home = last, f.home
	l.kept[len(l.kept)-1] = nil
	l.kept = l.kept[:len(l.kept)-1]
	f.home = -1
	delete(l.idle, f.job.Key)
}

// land says that f is not flying any more.
func (l *loop) land(f *flight) {
	l.flying--
	if f.suspect {
		l.suspectsFlying--
		f.suspect = false
	}
}

// drop closes f and forgets it.
func (l *loop) drop(f *flight) {
	if f.state == idling {
		l.idling--
	} else {
		l.land(f)
	}
	l.forget(f)
	if f.tls != nil {
		f.tls.abort()
		f.tls = nil
	}
	l.shut(f)
	f.job, f.grpc = health.Job{}, nil
	if len(l.spare) < 1024 {
		l.spare = append(l.spare, f)
	}
}

// shut closes f's socket, if it has one, by RST.
func (l *loop) shut(f *flight) {
	if f.at >= 0 {
		heap.Remove(&l.deadlines, f.at)
	}
	if f.slot >= 0 {
		l.slots[f.slot] = nil
		l.generations[f.slot]++
		l.free = append(l.free, f.slot)
		f.slot = -1
	}
	if f.fd >= 0 {
		resetOnClose(f.fd)
		rawClose(f.fd) // takes it out of epoll too
		f.fd = -1
	}
}

// flyTLS carries out an HTTPS probe on a goroutine, on conn if that is not nil.
func (l *loop) flyTLS(f *flight, conn *tlsConn) {
	f.state = elsewhere
	job := f.job
	ctx, cancel := context.WithDeadline(l.ctx, f.deadline)
	l.wg.Go(func() {
		defer cancel()
		outcome, again := l.probeTLS(ctx, &job, conn)
		l.mu.Lock()
		l.tlsDone = append(l.tlsDone, tlsResult{f, outcome, again})
		first := len(l.tlsDone) == 1
		l.mu.Unlock()
		if first {
			l.Wake()
		}
	})
}

// landTLS takes in the HTTPS probes that ended.
func (l *loop) landTLS() {
	l.mu.Lock()
	done := l.tlsDone
	l.tlsDone = nil
	l.mu.Unlock()
	for _, d := range done {
		if l.ctx.Err() != nil {
			// It was ended by us: that is no outcome.
			if d.conn != nil {
				d.conn.abort()
			}
			l.drop(d.flight)
			continue
		}
		known := l.report(d.flight, d.outcome)
		if d.conn == nil {
			l.drop(d.flight)
			continue
		}
		d.flight.tls = d.conn
		if known {
			l.keep(d.flight)
		} else {
			l.drop(d.flight)
		}
	}
}

package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// shortActive and longActive are how long faults occur and operators delete pods. settledAfter is
// how long the world then runs without either, until the final state is checked. Within that time,
// a call that was let through ends (34 s), and the API is read for a drain without callers (45 s
// after its last answer). An expiry passes (60 s), and the slowest frozen process wakes.
const (
	shortActive  = 70 * time.Second
	longActive   = 180 * time.Second
	settledAfter = 190 * time.Second
)

// proc is a process. It can restart, which begins another life, and it can be frozen: its events of
// that time happen when it wakes.
type proc struct {
	node   int
	name   string
	up     bool
	life   int
	frozen time.Duration
}

// event is one step of the world.
type event struct {
	at   time.Duration
	seq  uint64
	p    *proc
	life int
	do   func()
}

// queue is a heap of events, the earliest first. Events of the same time come in the order in which
// they were added.
type queue []*event

func (q queue) before(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}

func (q *queue) push(e *event) {
	h := append(*q, e)
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.before(i, up) {
			break
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
	*q = h
}

func (q *queue) pop() *event {
	h := *q
	e, last := h[0], len(h)-1
	h[0], h[last] = h[last], nil
	h = h[:last]
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			break
		}
		if down+1 < last && h.before(down+1, down) {
			down++
		}
		if !h.before(down, i) {
			break
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
	*q = h
	return e
}

// maxNodes bounds the processes of one world, including agents that were replaced.
const maxNodes = 20

// world is the complete state of the simulation of one seed.
type world struct {
	seed  uint64
	rng   *rand.Rand
	times drain.Times
	queue queue
	spare []*event
	seq   uint64
	at    time.Duration
	skews [maxNodes]skew

	api    *api
	coords []*coord
	agents []*agent
	nodes  int
	// blocked is the time until which no message passes from one node to another.
	blocked [maxNodes][maxNodes]time.Duration

	// active is shortActive or longActive.
	active time.Duration
	// isCalm: no faults at all.
	isCalm        bool
	steps, faults int
	// kinds are the kinds of faults that happen under this seed.
	kinds [faultKinds]bool
	// slow is how many of a thousand messages are slow. twice is how many of a thousand posts
	// arrive twice.
	slow, twice int

	// checked reports whether the targets of the first pool are probed. noise is how many of a
	// thousand probes time out without a fault.
	checked bool
	noise   int

	// barriers: there are nodes whose agents observe, and pods with hooks.
	barriers bool
	// scope selects the node agents that are asked.
	scope drain.Scope

	// blind disables the checks that read internal state.
	blind bool
	// parted is when the replicas last disagreed: a replica got no answer from another, or acted as
	// the opener without being the opener.
	parted time.Duration
	// ownerHolds is how many calls for pods of one owner may wait at one replica.
	ownerHolds int

	violation string
	check     string
	excused   map[string]int
	allowed   map[string]int
	// measured counts events that are of interest but are no violation.
	measured map[string]int
	tracing  bool
	trace    []string
	hash     uint64
}

func newWorld(seed uint64, tracing, blind bool) *world {
	w := &world{
		seed: seed, rng: rand.New(rand.NewPCG(seed, 0x1a3ed0c4)), times: drain.DefaultTimes(),
		tracing: tracing, blind: blind, excused: map[string]int{}, allowed: map[string]int{},
		measured: map[string]int{},
	}
	w.drawSkews()
	w.build()
	return w
}

// run carries out events until the end, or until a check fails.
func (w *world) run() {
	for len(w.queue) > 0 && w.violation == "" {
		e := w.queue.pop()
		if e.at > w.active+settledAfter {
			break
		}
		w.at = e.at
		if p := e.p; p != nil {
			if !p.up || p.life != e.life {
				continue
			}
			if p.frozen > w.at {
				w.push(p.frozen, p, e.life, e.do)
				continue
			}
		}
		w.steps++
		do := e.do
		e.do, e.p = nil, nil
		w.spare = append(w.spare, e)
		do()
	}
	if w.violation == "" {
		w.checkEnd()
	}
}

func (w *world) push(at time.Duration, p *proc, life int, do func()) {
	w.seq++
	var e *event
	if n := len(w.spare); n > 0 {
		e, w.spare = w.spare[n-1], w.spare[:n-1]
	} else {
		e = &event{}
	}
	*e = event{at, w.seq, p, life, do}
	w.queue.push(e)
}

// after schedules do for p after d, in p's present life. A nil p is the world itself.
func (w *world) after(p *proc, d time.Duration, do func()) {
	life := 0
	if p != nil {
		life = p.life
	}
	w.push(w.at+d, p, life, do)
}

// logf writes one line of the trace.
func (w *world) logf(who, format string, args ...any) {
	if !w.tracing {
		return
	}
	line := fmt.Sprintf("%10.4f  %-9s %s", w.at.Seconds(), who, fmt.Sprintf(format, args...))
	h := fnv.New64a()
	fmt.Fprintf(h, "%x%s", w.hash, line)
	w.hash = h.Sum64()
	w.trace = append(w.trace, line)
}

// logger returns a logger that writes the log lines of shipped code into the trace.
func (w *world) logger(who string) *slog.Logger { return slog.New(tracer{w: w, who: who}) }

type tracer struct {
	slog.Handler
	w   *world
	who string
}

func (t tracer) Enabled(context.Context, slog.Level) bool { return t.w.tracing }

func (t tracer) Handle(_ context.Context, r slog.Record) error {
	line := r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	t.w.logf(t.who, "%s", line)
	return nil
}

// fail records a violation. The first one ends the run.
func (w *world) fail(check, format string, args ...any) {
	if w.violation != "" || w.blind && slices.Contains(inside, check) {
		return
	}
	w.check, w.violation = check, fmt.Sprintf(format, args...)
	w.logf("CHECK", "%s: %s", check, w.violation)
}

// excuse counts a named reason that permits something otherwise forbidden.
func (w *world) excuse(reason string) { w.excused[reason]++ }

// measure counts an event in measured.
func (w *world) measure(what string) { w.measured[what]++ }

func (w *world) chance(ofThousand int) bool { return w.rng.IntN(1000) < ofThousand }

func (w *world) between(least, most time.Duration) time.Duration {
	return least + time.Duration(w.rng.Int64N(int64(most-least)+1))
}

// faulty reports whether faults still occur.
func (w *world) faulty() bool { return w.at < w.active }

// delay returns the duration of one message.
func (w *world) delay() time.Duration {
	if w.faulty() && w.slow > 0 && w.chance(w.slow) {
		return w.between(50*time.Millisecond, 4*time.Second)
	}
	return w.between(200*time.Microsecond, 3*time.Millisecond)
}

// conn is one TCP connection. Messages on it arrive in order, late, or not at all.
type conn struct {
	lines [2]line
	// closed reports whether the end of that side is closed: it neither sends nor receives.
	closed [2]bool
}

// line delivers messages to another process in order, even if a fault delays some of them.
type line struct {
	last time.Duration
	// sent has the messages in flight.
	sent []func()
}

// put adds the message do, which arrives at the time at or later. arrives is that time. At arrives,
// next delivers the first message in flight.
func (q *line) put(at time.Duration, do func()) (arrives time.Duration, next func()) {
	q.last = max(at, q.last)
	q.sent = append(q.sent, do)
	return q.last, func() {
		first := q.sent[0]
		q.sent = q.sent[1:]
		first()
	}
}

// send delivers do to another process, on c if that is not nil. dir is the side that sends.
func (w *world) send(from, to *proc, c *conn, dir int, do func()) {
	at := w.at + w.delay()
	if c != nil {
		message := do
		at, do = c.lines[dir].put(at, func() {
			if !c.closed[1-dir] {
				message()
			}
		})
	}
	w.arrive(at, from.node, to, to.life, do)
}

func (w *world) arrive(at time.Duration, from int, to *proc, life int, do func()) {
	w.push(at, to, life, func() {
		if until := w.blocked[from][to.node]; until > w.at {
			w.arrive(until, from, to, life, do)
			return
		}
		do()
	})
}

// cut closes one side of c. Unless lost is set, the other side is notified by heard.
func (w *world) cut(from, to *proc, c *conn, dir int, lost bool, heard func()) {
	if c.closed[dir] {
		return
	}
	c.closed[dir] = true
	if !lost {
		w.send(from, to, c, dir, heard)
	}
}

func (w *world) dump() string { return strings.Join(w.trace, "\n") }

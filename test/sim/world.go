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

// shortActive and longActive are how long faults happen and people delete pods, settledAfter how
// long nothing of that happens then, until everything must be as it should be: a call that was let
// through ends within 34 s, a drain without callers is looked into 45 s after its last answer, an
// expiry ends after 60 s, and the slowest frozen process wakes.
const (
	shortActive  = 70 * time.Second
	longActive   = 180 * time.Second
	settledAfter = 190 * time.Second
)

// proc is a process: it has lives, and may be frozen, so that what should have happened to it
// happens when it wakes.
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

// queue is a heap of events, the earliest first, and of those of one time the one that was put in
// first.
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

// maxNodes bounds the processes of one world, agents that were replaced included.
const maxNodes = 20

// world is everything there is, under one seed.
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
	// blocked says until when nothing passes from one node to another.
	blocked [maxNodes][maxNodes]time.Duration

	// active is shortActive or longActive.
	active time.Duration
	// isCalm: no faults at all.
	isCalm        bool
	steps, faults int
	// kinds are the kinds of faults that happen under this seed.
	kinds [faultKinds]bool
	// slow is how many of a thousand messages are slow, twice how many of a thousand posts arrive
	// twice.
	slow, twice int

	// checked says that the targets of the first pool are probed, noise how many of a thousand
	// probes time out for nothing.
	checked bool
	noise   int

	// barriers: there are nodes whose agents observe, and pods with hooks.
	barriers bool
	// scope says which of their agents are asked.
	scope drain.Scope

	// blind switches the checks off that look inside.
	blind bool
	// parted is when replicas were last seen not to know of each other: one was not answered, or
	// acted as the opener without being it.
	parted time.Duration
	// ownerHolds is how many calls for pods of one owner may wait at one replica.
	ownerHolds int

	violation string
	check     string
	excused   map[string]int
	allowed   map[string]int
	// measured counts what is no violation, and worth to know.
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

// after lets p do something later in this life. A nil p is the world itself.
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

// logger writes what shipped code logs into the trace.
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

// excuse counts a named reason for which something that must not happen may.
func (w *world) excuse(reason string) { w.excused[reason]++ }

// measure counts something.
func (w *world) measure(what string) { w.measured[what]++ }

func (w *world) chance(ofThousand int) bool { return w.rng.IntN(1000) < ofThousand }

func (w *world) between(least, most time.Duration) time.Duration {
	return least + time.Duration(w.rng.Int64N(int64(most-least)+1))
}

// faulty says whether faults still happen.
func (w *world) faulty() bool { return w.at < w.active }

// delay is how long one message takes.
func (w *world) delay() time.Duration {
	if w.faulty() && w.slow > 0 && w.chance(w.slow) {
		return w.between(50*time.Millisecond, 4*time.Second)
	}
	return w.between(200*time.Microsecond, 3*time.Millisecond)
}

// conn is one TCP connection: what is sent on it arrives in order, late, or not at all.
type conn struct {
	lines [2]line
	// closed says that the end of that side is closed: it neither sends nor hears any more.
	closed [2]bool
}

// line brings messages to another process in order, whichever of them a fault holds up.
type line struct {
	last time.Duration
	// sent are those that are under way.
	sent []func()
}

// put sends do, which arrives at a time at the earliest: then, next brings whatever message is
// first.
func (q *line) put(at time.Duration, do func()) (arrives time.Duration, next func()) {
	q.last = max(at, q.last)
	q.sent = append(q.sent, do)
	return q.last, func() {
		first := q.sent[0]
		q.sent = q.sent[1:]
		first()
	}
}

// send brings do to another process, on c if that is not nil. dir is the side that sends.
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

// cut closes one side and lets the other side hear of it, if lost is false.
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

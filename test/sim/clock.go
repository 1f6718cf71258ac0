package main

import (
	"math/rand/v2"
	"slices"
	"time"
	"unsafe"

	"github.com/lameduck-io/lameduck/internal/endpoints"
)

// epoch is where virtual time begins, by the clock of the API server. No clock of the computer is
// read anywhere.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// since1885 is from when package time counts the seconds of a time with a monotonic reading.
var since1885 = time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC).Unix()

// start is epoch as a process reads it. The difference to it is virtual time, whatever the wall
// clock of the process says.
var start = reading(0, 0)

// reading returns what time.Now returns at a virtual time where the wall clock is ahead. Shipped
// code compares times by their monotonic reading as long as they have one. They lose it on the wire
// and in a file.
func reading(at, ahead time.Duration) time.Time {
	const hasMonotonic, nanoseconds = 1 << 63, 30
	t := epoch.Add(at + ahead)
	bits := (*struct {
		wall uint64
		ext  int64
	})(unsafe.Pointer(&t))
	bits.wall = hasMonotonic | uint64(t.Unix()-since1885)<<nanoseconds | uint64(t.Nanosecond())
	bits.ext = int64(at)
	return t
}

// skew is the error of a node's wall clock: first, and from a time on by so much more.
type skew struct{ first, more, from time.Duration }

// ahead returns how far the clock is ahead of the API server's at a virtual time.
func (s skew) ahead(at time.Duration) time.Duration {
	if at < s.from {
		return s.first
	}
	return s.first + s.more
}

const skewMost = 10 * time.Minute

// drawSkews makes the clocks of one in seven worlds differ. It draws numbers of its own, so that
// all else is the same in these worlds as without it.
func (w *world) drawSkews() {
	if w.seed%7 != 3 {
		return
	}
	random := rand.New(rand.NewPCG(w.seed, 0xc10c4))
	wrong := func() time.Duration {
		return time.Duration(random.IntN(2)) * time.Duration(random.Int64N(int64(2*skewMost))-int64(skewMost))
	}
	for i := range w.skews {
		w.skews[i] = skew{wrong(), wrong(), time.Duration(random.Int64N(int64(longActive)))}
	}
	w.skews[0] = skew{} // the API server, which says when a pod was deleted
}

// clock is time.Now of a process.
func (w *world) clock(p *proc) time.Time {
	return reading(w.at, w.skews[p.node].ahead(w.at))
}

func (c *coord) now() time.Time { return c.w.clock(&c.proc) }

func (a *agent) now() time.Time { return a.w.clock(&a.proc) }

const misdated = "a pod had just become ready, by a clock that is wrong"

// misdated reports whether a replica may take a pod, or another endpoint of its Services, for older
// than it is. Only the kubelet reports since when a pod is ready. Its clock was then behind that of
// the API server, which reports when pods are deleted, or behind that of a replica.
func (w *world) misdated(p *pod, at time.Duration) bool {
	return slices.ContainsFunc(w.api.pods, func(q *pod) bool {
		ahead := q.ahead(q.readyAt)
		later := func(c *coord) bool { return ahead < w.skews[c.node].ahead(at) }
		if ahead >= 0 && !slices.ContainsFunc(w.coords, later) {
			return false
		}
		if q == p {
			return p.committed-p.readyAt < endpoints.Linger
		}
		return at-q.readyAt < endpoints.Linger &&
			slices.ContainsFunc(q.services, func(s int) bool { return slices.Contains(p.services, s) })
	})
}

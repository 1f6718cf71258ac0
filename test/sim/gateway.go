package main

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// gw is one gateway: a process that takes new requests, and old ones that finish theirs.
type gw struct {
	w  *world
	a  *agent
	up bool
	// over: its pod is gone.
	over       bool
	generation int
	// workers are its live processes, the one that takes new connections last.
	workers []*worker
	// forgetful: a reload forgets what was done at run time, and routes whatever its file says.
	// keepAlive: clients of an old process may still send requests on their open connections.
	forgetful, keepAlive bool
	// file is what a forgetful gateway comes back with.
	file []health.Key
	// forgot is when it last did.
	forgot time.Duration
}

type worker struct {
	servers []*server
}

type server struct {
	key    health.Key
	routed bool
	active int
}

func newGateway(w *world, a *agent) *gw {
	return &gw{w: w, a: a, up: true, workers: []*worker{{}}, generation: 1, forgetful: w.chance(400),
		keepAlive: w.chance(300), forgot: -1}
}

func (w *worker) find(k health.Key) *server {
	for _, s := range w.servers {
		if s.key == k {
			return s
		}
	}
	return nil
}

// apply carries out one operation in every process.
func (g *gw) apply(op health.Op) {
	for i, w := range g.workers {
		s := w.find(op.Key)
		switch {
		case op.Want == health.WantRouted && s == nil:
			if i == len(g.workers)-1 {
				w.servers = append(w.servers, &server{key: op.Key, routed: true})
			}
		case s == nil:
		case op.Want == health.WantRouted:
			s.routed = true
		case op.Want == health.WantAbsent && s.active == 0:
			w.servers = slices.DeleteFunc(w.servers, func(o *server) bool { return o == s })
		default:
			s.routed = false
		}
	}
}

func (g *gw) read(k health.Key) health.Seen {
	var seen health.Seen
	for i, w := range g.workers {
		s := w.find(k)
		if s != nil {
			seen.Present = true
			seen.Routed = seen.Routed || s.routed
			seen.Active += s.active
		}
		if i == len(g.workers)-1 && (s == nil || !s.routed) {
			seen.Missing = true
		}
	}
	return seen
}

func (g *gw) owned() []health.Key {
	var keys []health.Key
	for _, w := range g.workers {
		for _, s := range w.servers {
			if !slices.Contains(keys, s.key) {
				keys = append(keys, s.key)
			}
		}
	}
	return keys
}

// routes reports whether a request may be sent to the pod now, in pools other than those excepted.
func (g *gw) routes(uid drain.UID, except ...health.Pool) bool {
	if !g.up {
		return false
	}
	for _, w := range g.workers {
		for _, s := range w.servers {
			if s.routed && s.key.Target.UID == uid && !slices.Contains(except, s.key.Pool) {
				return true
			}
		}
	}
	return false
}

// again makes a process of the next generation.
func (g *gw) again(keepOld bool) {
	last := g.workers[len(g.workers)-1]
	next := &worker{}
	for _, s := range last.servers {
		next.servers = append(next.servers, &server{key: s.key, routed: s.routed || g.forgetful})
	}
	if g.forgetful {
		for _, k := range g.file {
			if next.find(k) == nil {
				next.servers = append(next.servers, &server{key: k, routed: true})
			}
		}
		g.file = nil
		for _, s := range next.servers {
			g.file = append(g.file, s.key)
		}
		g.forgot = g.w.at
	}
	g.generation++
	if !keepOld {
		g.workers = []*worker{next}
		return
	}
	g.workers = append(g.workers, next)
	g.w.after(nil, g.w.between(100*time.Millisecond, 5*time.Second), func() {
		if i := slices.Index(g.workers, last); i >= 0 && len(g.workers) > 1 {
			g.workers = slices.Delete(g.workers, i, i+1)
			g.generation++
		}
	})
}

func (g *gw) reload() {
	if g.up {
		g.w.logf(g.a.name, "the gateway is reloaded, forgetful=%t", g.forgetful)
		g.again(g.w.chance(700))
	}
}

func (g *gw) crash(down time.Duration) {
	if !g.up {
		return
	}
	g.w.logf(g.a.name, "the gateway dies")
	g.up = false
	for _, w := range g.workers {
		for _, s := range w.servers {
			s.active = 0
		}
	}
	g.w.after(nil, down, func() {
		if !g.over {
			g.up = true
			g.again(false)
		}
	})
}

// back makes the gateway of a pod whose containers start again. It knows nothing: its agent is
// there first, and programs it.
func (g *gw) back() {
	g.over, g.up = false, true
	g.generation++
	g.workers, g.file = []*worker{{}}, nil
	g.clients()
}

// clients send requests through the gateway.
func (g *gw) clients() {
	w := g.w
	pause := w.between(100*time.Millisecond, 800*time.Millisecond)
	if !w.faulty() {
		pause = 5 * time.Second
	}
	w.after(nil, pause, func() {
		if g.over {
			return
		}
		if g.up {
			g.request()
		}
		g.clients()
	})
}

func (g *gw) request() {
	w := g.w
	by := g.workers[len(g.workers)-1]
	if g.keepAlive && w.chance(300) {
		by = g.workers[0]
	}
	var may []*server
	for _, s := range by.servers {
		if s.routed {
			may = append(may, s)
		}
	}
	if len(may) == 0 {
		return
	}
	s := may[w.rng.IntN(len(may))]
	p := w.api.find(s.key.Target.UID)
	// A thread that has just picked a target is not in the counters yet.
	w.after(nil, w.between(0, 4*time.Millisecond), func() {
		if p.stopped {
			w.lost(g, p, "new")
			return
		}
		s.active++
		life := g.generation
		took := w.between(time.Millisecond, 200*time.Millisecond)
		if w.chance(50) {
			took = w.between(time.Second, 20*time.Second)
		}
		w.after(nil, took, func() {
			_ = life
			s.active = max(0, s.active-1)
		})
	})
}

// podStopped loses what is in flight to it.
func (g *gw) podStopped(p *pod) {
	if !g.up {
		return
	}
	for _, w := range g.workers {
		for _, s := range w.servers {
			if s.key.Target.UID == p.uid && s.active > 0 {
				s.active = 0
				g.w.lost(g, p, "in flight")
			}
		}
	}
}

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

package main

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	bpf "github.com/lameduck-io/lameduck/pkg/gateway/kernel"
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
	// kernel: it is directed by the kernel. Its exclusions outlive agents and reloads, and expire
	// unless they are renewed, which was last at renewed.
	kernel  bool
	renewed time.Duration
}

// routeLate is how long a gateway that the kernel directs routes to a pod that is terminating: it
// follows EndpointSlices by itself, that late.
const routeLate = 10 * time.Second

type worker struct {
	servers []*server
}

type server struct {
	key    health.Key
	routed bool
	active int
	// expires is when the kernel ends an exclusion.
	expires time.Duration
}

// sends reports whether the gateway may send a new request to s.
func (g *gw) sends(s *server) bool {
	if s.routed || !g.kernel || g.w.at < s.expires {
		return s.routed
	}
	p := g.w.api.find(s.key.Target.UID)
	return !p.terminating || g.w.at < p.committed+routeLate
}

// renew is what each reading of the kind kernel begins with.
func (g *gw) renew() {
	if !g.kernel || g.w.at < g.renewed+time.Second {
		return
	}
	g.renewed = g.w.at
	for _, w := range g.workers {
		for _, s := range w.servers {
			if !s.routed {
				s.expires = bpf.NextExpiry(true, s.expires, g.w.at)
			}
		}
	}
}

// agentKilled is the death of its agent, for longer than exclusions last: none of them is left.
func (g *gw) agentKilled() {
	if !g.a.up || g.a.kernel != nil || g.over || g.w.isCalm || !g.w.faulty() {
		return
	}
	most := bpf.NextExpiry(true, 0, 0)
	g.a.log("is killed, for longer than %s", most)
	g.a.crash(true)
	life := g.a.life
	g.w.after(nil, most+1, func() {
		for _, w := range g.workers {
			for _, s := range w.servers {
				if g.a.life == life && !g.a.up && !s.routed && g.w.at < s.expires {
					g.w.fail(checkExpiryName, "%s is dead for %s, and %s is excluded until %s", g.a.name, most,
						s.key, s.expires)
				}
			}
		}
	})
	g.w.after(nil, most+30*time.Second, g.a.start)
}

func newGateway(w *world, a *agent) *gw {
	g := &gw{w: w, a: a, up: true, workers: []*worker{{}}, generation: 1, forgetful: w.chance(400),
		keepAlive: w.chance(300), forgot: -1, kernel: w.kernels()}
	if g.kernel {
		g.forgetful = false
		w.after(nil, 15*time.Second+time.Duration(w.seed%40)*time.Second, g.agentKilled)
	}
	return g
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
			if s.routed {
				s.expires = 0
			}
			s.routed, s.expires = false, bpf.NextExpiry(true, s.expires, g.w.at)
		}
	}
}

func (g *gw) read(k health.Key) health.Seen {
	var seen health.Seen
	for i, w := range g.workers {
		s := w.find(k)
		if s != nil {
			seen.Present = true
			seen.Routed = seen.Routed || g.sends(s)
			seen.Active += s.active
		}
		if i == len(g.workers)-1 && (s == nil || !g.sends(s)) {
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
			if g.sends(s) && s.key.Target.UID == uid && !slices.Contains(except, s.key.Pool) {
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
		next.servers = append(next.servers, &server{key: s.key, routed: s.routed || g.forgetful, expires: s.expires})
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
		if g.sends(s) {
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

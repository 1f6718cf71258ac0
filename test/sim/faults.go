package main

import (
	"fmt"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// kind is one kind of fault. Each seed has some of them, and not others: a fault that hides another
// must not be everywhere.
type kind int

const (
	coordCrash kind = iota
	coordRoll
	agentCrash
	agentReplace
	agentAdd
	agentUnready
	gatewayReload
	gatewayCrash
	partition
	freezeCoord
	freezeAgent
	streamCut
	watchStall
	timeTravel
	slowSlices
	opErrors
	podUnready
	slowGateway
	stubborn
	deafAgent
	agentLeave
	podSick
	livenessRestart
	softEviction
	oomKill
	kubeletRestart
	badDisk
	faultKinds
)

var kindNames = [faultKinds]string{
	"coordCrash", "coordRoll", "agentCrash", "agentReplace", "agentAdd", "agentUnready", "gatewayReload",
	"gatewayCrash", "partition",
	"freezeCoord", "freezeAgent", "streamCut", "watchStall", "timeTravel", "slowSlices", "opErrors", "podUnready",
	"slowGateway", "stubborn", "deafAgent", "agentLeave", "podSick",
	"livenessRestart", "softEviction", "oomKill", "kubeletRestart", "badDisk",
}

// watchStallMost bounds how long a watch brings nothing. A watch that is silent for longer than an
// expiry minus the 34 s of the API server, while every coordinator is dead, makes an agent route to
// a pod that is gone: the set has no fresh list to go by when the expiry lapses.
const watchStallMost = 20 * time.Second

// build makes the world as it is at the beginning.
func (w *world) build() {
	w.api = &api{w: w, node: proc{node: 0, name: "api", up: true}}
	w.nodes = 1
	a := w.api
	a.services = 1 + w.rng.IntN(2)
	if w.namespaces() {
		a.services = 3
	}
	a.slices, a.history = make([]slice, a.services), make([][]slice, a.services)
	a.dirty, a.want = make([]bool, a.services), make([]int, a.services)
	a.budget = w.chance(500)
	if w.chance(500) {
		a.other.deny, a.other.sleep = w.rng.IntN(300), w.rng.IntN(300)
	}
	for k := range w.kinds {
		w.kinds[k] = w.chance(350)
	}
	w.checked, w.noise = w.chance(300), w.rng.IntN(100)
	w.ownerHolds = coordinator.DefaultHoldsPerOwner
	if w.chance(200) {
		w.ownerHolds = 1 + w.rng.IntN(2)
	}
	if w.chance(500) {
		w.slow, w.twice = w.rng.IntN(60), w.rng.IntN(100)
	}
	w.active = shortActive
	if w.chance(150) || w.kinds[deafAgent] && w.chance(300) || w.impatient() {
		w.active = longActive
	}
	w.isCalm = w.chance(50)
	if w.isCalm {
		w.kinds, w.slow, w.twice = [faultKinds]bool{}, 0, 0
	}
	for n := range 1 + w.rng.IntN(3) {
		c := &coord{w: w, proc: proc{node: w.nodes, name: fmt.Sprintf("coord-%d", n+1)}}
		w.nodes++
		c.watch = &watcher{p: &c.proc, pods: c.podSeen, slice: c.sliceSeen, roster: c.rosterSeen}
		a.watchers = append(a.watchers, c.watch)
		w.coords = append(w.coords, c)
	}
	if w.barriers = w.chance(500); w.barriers {
		w.scope = [...]drain.Scope{drain.ScopeAuto, drain.ScopeAuto, drain.ScopeAll, drain.ScopeAll, drain.ScopeQuorum,
			drain.ScopeLocal}[w.rng.IntN(6)]
		for range 1 + w.rng.IntN(4) {
			w.newObserver(w.between(0, 100*time.Millisecond), drain.Nodes)
		}
		if w.seed%4 == 0 {
			w.newObserver(50*time.Millisecond, "edge")
		}
	}
	a.policies, a.stated = make([]policy, a.services), make([]time.Duration, a.services)
	for i := range a.services {
		if w.chance(300) {
			a.policies[i] = policy(1 + w.rng.IntN(2))
		}
		if w.chance(200) {
			a.stated[i] = w.between(time.Second, 40*time.Second)
		}
	}
	for range 2 + w.rng.IntN(3) {
		services := []int{w.rng.IntN(a.services)}
		if a.services > 1 && w.chance(300) {
			services = []int{0, 1}
		}
		for _, s := range services {
			a.want[s]++
		}
		a.create(services)
	}
	for _, c := range w.coords {
		c.start()
		c.probed()
	}
	for range 1 + w.rng.IntN(3) {
		w.newAgent(w.between(0, 100*time.Millisecond))
	}
	w.after(nil, 12*time.Second, w.deletions)
	if !w.isCalm {
		w.after(nil, w.between(5*time.Second, 15*time.Second), w.nextFault)
	}
	w.after(nil, w.active, w.calm)
	if w.namespaces() {
		for range w.rng.IntN(4) {
			w.after(nil, w.between(12*time.Second, w.active), func() { w.anyAgent().forsake() })
		}
	}
}

// namespaces says whether there are two namespaces, and agents that have rights in one of them.
func (w *world) namespaces() bool { return w.seed%7 == 5 } // no older seed of corpus.txt

// kernels says whether the kernel directs the gateways.
func (w *world) kernels() bool { return w.seed%13 == 2 } // none of corpus.txt

// overtakes says whether gateways carry out late what they did not answer.
func (w *world) overtakes() bool { return w.seed%17 == 7 } // none of corpus.txt

// impatient says whether callers break off, or come back late.
func (w *world) impatient() bool { return w.seed%19 == 4 } // none of corpus.txt

// unreadable says whether replicas cannot read pods while faults occur.
func (w *world) unreadable() bool { return w.seed%38 == 4 }

// observes says whether there are pods in mode observe, and whether modes change.
func (w *world) observes() bool { return w.seed%11 == 4 }

// deletions asks for deletions, one after the other and some at once.
func (w *world) deletions() {
	if !w.faulty() {
		return
	}
	n := 1 + w.rng.IntN(2)
	if w.chance(100) {
		n = 5 // as when a Service is scaled to zero
	}
	for range n {
		w.api.deletion()
	}
	w.after(nil, w.between(500*time.Millisecond, 12*time.Second), w.deletions)
}

func (w *world) nextFault() {
	if !w.faulty() {
		return
	}
	var some []kind
	for k, is := range w.kinds {
		if is {
			some = append(some, kind(k))
		}
	}
	if len(some) > 0 {
		w.fault(some[w.rng.IntN(len(some))])
	}
	w.after(nil, w.between(50*time.Millisecond, 5*time.Second), w.nextFault)
}

func (w *world) anyCoord() *coord { return w.coords[w.rng.IntN(len(w.coords))] }

func (w *world) anyAgent() *agent {
	var listed []*agent
	for _, a := range w.agents {
		if a.listed {
			listed = append(listed, a)
		}
	}
	return listed[w.rng.IntN(len(listed))]
}

// fault injects one.
func (w *world) fault(k kind) {
	w.faults++
	w.logf("fault", "%s", kindNames[k])
	switch k {
	case coordCrash:
		if c := w.anyCoord(); c.up && !c.stopping {
			c.crash(w.chance(300))
			w.after(nil, w.between(100*time.Millisecond, 20*time.Second), c.start)
		}
	case coordRoll:
		if c := w.anyCoord(); c.up && !c.stopping && c.frozen <= w.at {
			c.stop(w.between(50*time.Millisecond, 3*time.Second))
		}
	case agentCrash:
		if a := w.anyAgent(); a.up {
			a.log("dies")
			a.crash(w.chance(300))
			w.after(nil, w.between(50*time.Millisecond, 5*time.Second), a.start)
		}
	case agentReplace:
		if a := w.anyAgent(); a.up && a.kernel == nil && w.nodes < maxNodes {
			a.log("is replaced, with its gateway")
			w.newAgent(w.between(100*time.Millisecond, 3*time.Second))
			a.gw.crash(time.Hour)
			a.gw.over = true
			a.listed = false
			a.crash(w.chance(200))
			w.api.rosterChanged()
		}
	case agentLeave:
		if a := w.anyAgent(); a.up && !a.left && a.kernel == nil && w.nodes < maxNodes {
			w.newAgent(w.between(100*time.Millisecond, 3*time.Second))
			a.gw.crash(time.Hour)
			a.gw.over = true
			a.leave()
			w.after(nil, w.between(0, 3*time.Second), func() { a.ready = false; w.api.rosterChanged() })
			comes := w.chance(300)
			w.after(nil, w.between(3*time.Second, 20*time.Second), func() {
				if comes && a.listed {
					// Their containers are started again.
					if a.up {
						a.crash(w.chance(200))
					}
					a.gw.back()
					a.start()
					return
				}
				if a.listed {
					a.listed = false
					if a.up {
						a.crash(w.chance(200))
					}
					w.api.rosterChanged()
				}
			})
		}
	case podSick:
		if p := w.api.pods[w.rng.IntN(len(w.api.pods))]; w.checked && !p.terminating {
			p.sick = w.at + w.between(time.Second, 40*time.Second)
			if w.chance(200) {
				p.sick = time.Hour
			}
			w.logf("fault", "%s is sick until %s", p.uid, p.sick)
		}
	case agentAdd:
		if w.nodes < maxNodes {
			w.newAgent(w.between(time.Millisecond, 500*time.Millisecond))
		}
	case agentUnready:
		a := w.anyAgent()
		a.ready = false
		w.api.rosterChanged()
		w.after(nil, w.between(100*time.Millisecond, 15*time.Second), func() {
			if a.listed && a.programming {
				a.ready = true
				w.api.rosterChanged()
			}
		})
	case gatewayReload:
		w.anyAgent().gw.reload()
	case gatewayCrash:
		w.anyAgent().gw.crash(w.between(50*time.Millisecond, 3*time.Second))
	case partition:
		from, to := w.rng.IntN(w.nodes), w.rng.IntN(w.nodes)
		until := w.at + w.between(100*time.Millisecond, 20*time.Second)
		w.blocked[from][to] = max(w.blocked[from][to], until)
		if w.chance(500) {
			w.blocked[to][from] = max(w.blocked[to][from], until)
		}
		w.logf("fault", "nothing passes from node %d to %d until %s", from, to, until)
	case freezeCoord:
		w.freeze(&w.anyCoord().proc)
	case freezeAgent:
		w.freeze(&w.anyAgent().proc)
	case streamCut:
		a := w.anyAgent()
		if len(a.links) == 0 {
			return
		}
		l := a.links[w.rng.IntN(len(a.links))]
		k, c := l.conn, l.c
		if !a.up || k == nil {
			return
		}
		// A device between them forgets the connection. Each side learns of it, or does not.
		if w.chance(500) {
			w.after(&a.proc, w.delay(), func() { l.lost(k) })
		}
		if w.chance(500) {
			w.after(&c.proc, w.delay(), func() { c.endOf(k) })
		} else {
			w.after(&c.proc, w.between(5*time.Second, 30*time.Second), func() { c.endOf(k) })
		}
		k.closed = [2]bool{true, true}
	case watchStall:
		x := w.api.watchers[w.rng.IntN(len(w.api.watchers))]
		x.stall = w.at + w.between(500*time.Millisecond, watchStallMost)
	case podUnready:
		p := w.api.pods[w.rng.IntN(len(w.api.pods))]
		if p.ready && !p.terminating {
			w.api.setReady(p, false)
			w.after(nil, w.between(100*time.Millisecond, 15*time.Second), func() {
				if !p.terminating && p.halted == "" {
					w.api.setReady(p, true)
				}
			})
		}
	case deafAgent:
		if a := w.anyAgent(); a.up && a.deaf <= w.at {
			a.deaf = min(w.active, w.at+w.between(time.Second, 40*time.Second))
			if w.chance(500) {
				a.deaf = min(w.active, w.at+w.between(100*time.Second, 160*time.Second))
			}
			a.log("is deaf until %s", a.deaf)
			w.after(nil, a.deaf-w.at, func() {
				for _, l := range a.links {
					if a.up {
						l.poke(true)
					}
				}
			})
		}
	case livenessRestart, softEviction:
		if p := w.anyRunning(); p != nil {
			w.api.restart(p, k == softEviction)
		}
	case oomKill:
		if p := w.anyRunning(); p != nil {
			w.api.halt(p, "the kernel killed it", false)
		}
	case kubeletRestart:
		for _, p := range w.api.pods {
			if a := p.host; a != nil && p.terminating && !p.stopped && p.passed == nil {
				w.api.rerun(a)
				return
			}
		}
	case timeTravel, slowSlices, opErrors, slowGateway, stubborn, badDisk:
		// They happen by themselves.
	}
}

func (w *world) freeze(p *proc) {
	if p.up && p.frozen <= w.at {
		p.frozen = w.at + w.between(50*time.Millisecond, 8*time.Second)
		if w.chance(200) {
			p.frozen = w.at + w.between(8*time.Second, 70*time.Second)
		}
		w.logf("fault", "%s is frozen until %s", p.name, p.frozen)
	}
}

// calm ends the faults; those that are under way end by themselves. Everybody who missed something
// hears of it again.
func (w *world) calm() {
	w.logf("world", "no more faults")
	for _, p := range w.api.pods {
		if w.checked && w.kinds[podSick] && w.chance(400) {
			p.sick = time.Hour
			w.logf("world", "%s is sick permanently", p.uid)
		}
	}
	for _, p := range w.api.pods {
		if !p.terminating && p.halted == "" && w.at-p.born > 5*time.Second {
			w.api.setReady(p, true)
		}
	}
	w.after(nil, 25*time.Second, func() {
		for service := range w.api.slices {
			w.api.reslice(service)
		}
		w.api.rosterChanged()
	})
}

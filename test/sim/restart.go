package main

import (
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What stops containers although their pods were not deleted, and the kubelets that forget what
// they were doing.

// anyRunning finds a pod whose container runs, and which is not terminating.
func (w *world) anyRunning() *pod {
	var some []*pod
	for _, p := range w.api.pods {
		if p.ready && !p.terminating && p.halted == "" {
			some = append(some, p)
		}
	}
	if len(some) == 0 {
		return nil
	}
	return some[w.rng.IntN(len(some))]
}

// restart stops the container of a pod: a probe has failed, or, if it is evicted, the node needs
// its memory. Its hook runs first.
func (a *api) restart(p *pod, evicted bool) {
	w := a.w
	why := "its container is started again"
	if evicted {
		why = "its node evicts it"
	}
	a.log("%s: %s", p.uid, why)
	then := func() { a.halt(p, why, evicted) }
	w.after(nil, w.between(time.Millisecond, 100*time.Millisecond), func() {
		if g := p.host; g != nil && g.up && g.listed && p.hooks != hooksCutOff {
			g.waitRestart(p, then)
		} else {
			then()
		}
	})
}

// halt ends the process of a pod that stays, permanently or until its container is started again.
func (a *api) halt(p *pod, why string, forGood bool) {
	w := a.w
	if p.terminating || p.stopped || p.failed {
		return // its deletion has other hooks
	}
	p.halted, p.stopped, p.failed = why, true, forGood
	a.log("the container of %s has stopped: %s", p.uid, why)
	w.measure("containers that were stopped though their pods stayed: " + why)
	a.interrupt(p)
	unprobed := !forGood && p.addr.Addr().As4()[3]%4 == 0 // without a readiness probe it stays ready
	w.after(nil, w.between(time.Millisecond, 50*time.Millisecond), func() {
		if !unprobed {
			a.setReady(p, false)
		}
	})
	if forGood {
		w.after(nil, w.between(time.Second, 20*time.Second), func() {
			if !p.terminating {
				a.commit(p, []*word{{reason: "Failed", at: w.at}})
			}
		})
		return
	}
	w.after(nil, w.between(300*time.Millisecond, 5*time.Second), func() {
		if p.terminating {
			return // nothing is started any more
		}
		p.halted, p.stopped = "", false
		a.log("the container of %s runs again", p.uid)
		started := w.at
		w.after(nil, w.between(60*time.Millisecond, 2*time.Second), func() {
			if p.terminating || p.halted != "" {
				return
			}
			if unprobed {
				p.restartedAt = started
				a.podChanged(p)
			}
			a.setReady(p, true)
		})
	})
}

// rerun is a kubelet that is started again: it has forgotten which hooks it runs, and runs them
// again.
func (a *api) rerun(of *agent) {
	w := a.w
	a.log("the kubelet of %s is started again", of.name)
	pause := w.between(100*time.Millisecond, 5*time.Second)
	for _, p := range a.pods {
		if p.host == of && p.terminating && !p.stopped && p.passed == nil {
			w.measure("hooks that were run again")
			a.runHooks(p, pause)
		}
	}
}

// waitRestart is cmd/agent's waits for a pod that is not terminating. then is told when the hook is
// answered.
func (a *agent) waitRestart(p *pod, then func()) {
	w := a.w
	began, done, life := w.at, false, a.life
	bound := coordinator.RestartTimeout
	finish := func(how string) {
		if done {
			return
		}
		done = true
		a.log("the hook of %s, which stays, is answered: %s", p.uid, how)
		w.measure("hooks of pods that stayed that were answered: " + how)
		then()
	}
	w.after(nil, coordinator.RestartTimeout+50*time.Millisecond, func() {
		if !done && a.up && a.life == life && a.frozen <= began {
			w.fail(checkHook, "the hook of %s, which stays, is not answered by %s after %s", p.uid, a.name,
				coordinator.RestartTimeout)
		}
	})
	// The connection breaks with the agent.
	a.broken = append(a.broken, func() { finish("AgentDown") })
	w.after(&a.proc, bound, func() { finish("Bound") })
	var ask func(i int)
	ask = func(i int) {
		if done {
			return
		}
		for ; i < 2*len(a.links); i++ {
			l := a.links[i%len(a.links)]
			if !l.open() {
				continue
			}
			failed := false
			fail := func() {
				if !failed {
					failed = true
					ask(i + 1)
				}
			}
			l.asks = append(l.asks, fail)
			c, session := l.c, l.session.Hello.Session
			if !c.up {
				w.after(&a.proc, time.Millisecond, fail)
				return
			}
			left, elapsed := bound-(w.at-began), int64(0)
			if i >= len(a.links) {
				elapsed = (left.Milliseconds() + 1) / 2
			}
			w.send(&a.proc, &c.proc, nil, 0, func() {
				c.bar(&barred{p: p, a: a, asked: wire.BarrierRequest{
					Session: session, Pod: p.drainPod(), Targets: p.targets(),
					Since: a.now().Add(began - w.at).Round(0), BoundMillis: left.Milliseconds(),
					ElapsedMillis: elapsed,
				}, answer: func(ok bool, why pass) {
					w.send(&c.proc, &a.proc, nil, 0, func() {
						switch {
						case failed:
						case ok:
							finish(why.reason)
						default:
							fail()
						}
					})
				}})
			})
			return
		}
		finish("no coordinator can be asked")
	}
	ask(0)
}

// restarts records a drain that was opened for a pod which stays.
func (c *coord) restarts(x *barred) {
	p := x.p
	place := drain.Judged
	if d := c.room[p.uid]; d != nil {
		place = d.place
	}
	c.asking(p.uid, x.targets, place)
	stopped := c.w.at + p.ahead(c.w.at)
	if _, ok := c.begun[p.uid]; !ok {
		c.begins(p.uid)
		c.restarted[p.uid], c.stopped[p.uid] = c.w.at, stopped
		c.log("drain of %s, which stays, begins", p.uid)
	}
	if c.restarted[p.uid] > 0 {
		c.restarted[p.uid], c.stopped[p.uid] = c.w.at, max(c.stopped[p.uid], stopped)
	}
}

// back learns that a pod has become ready, so that it is routed again if it was excluded for a
// restart before.
func (c *coord) back(p *pod, v podView) {
	uid, stopped := p.uid, c.restarted[p.uid]
	ready, _ := podfacts.BackSince(p.object(v))
	if c.core.Ready(c.now(), uid, ready) {
		c.log("%s is ready again", uid)
		c.w.measure("pods that were routed again because they were ready again")
		c.closed(uid)
		c.settle()
		return
	}
	if stopped > 0 && max(v.readyAt, v.restartedAt) > stopped && ready.After(epoch.Add(c.stopped[uid])) {
		c.w.fail(checkBack,
			"%s does not let %s be routed again, which has become ready after its container was stopped", c.name, uid)
	}
}

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/peers"
	"github.com/lameduck-io/lameduck/internal/podcontext"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// coord is one replica: the steps of package coordinator and package peers, on virtual time, and
// what package admission and cmd/webhook do with them.
type coord struct {
	proc
	w     *world
	watch *watcher
	core  *coordinator.Core
	// ledger is that of core.
	ledger  *drain.Ledger
	epoch   int
	started time.Duration
	synced  bool
	// stopping: it was told to stop.
	stopping bool
	looking  bool
	// listed: its entry has an endpoint. failed counts probes.
	listed bool
	failed int
	// table is what it knows of the other replicas, ready whether it can judge deletions.
	table *peers.Table
	ready *peers.Readiness
	// others are the open drains of the other replicas, as the last poll told.
	others []drain.Claim

	pods   map[drain.UID]podView
	ended  map[drain.UID]bool
	slices []slice
	index  *endpoints.Index
	// handler judges deletions, contexts are those of pods at the barrier. evicts says that an
	// eviction is being judged.
	handler  *admission.Handler
	contexts *podcontext.Source
	evicts   bool
	roster   []drain.Expected
	streams  []*stream
	holds    []*call
	inbound  []*call
	// bars are the hooks that wait, watched which barriers of this life each agent was told of, by
	// their number. restarted are the drains of this life that were opened for pods that stay, and
	// for no deletion, with the time at which this replica last learned of a stop.
	bars      []*barred
	restarted map[drain.UID]time.Duration
	// stopped is when the containers of these pods were stopped, by the clocks of their kubelets:
	// the latest time, as in the ledger, also if the clock was set back before the last stop.
	stopped map[drain.UID]time.Duration
	// took is how long kernels took to let go, in barriers of this life, and let of which that is
	// known.
	took time.Duration
	let  map[drain.UID]map[*agent]bool
	// rested is what took was when a barrier was opened.
	rested map[drain.UID]time.Duration
	// watching are the Services in which a deletion is measured that does not wait.
	watching map[drain.UID][]drain.Service
	watched  map[drain.AgentID]map[drain.UID]uint64

	// heard is what the last word of each agent on its present session was, for the checks: a plain
	// record beside the ledger.
	heard map[drain.AgentID]map[drain.UID]said
	// lost is when an agent's stream ended here.
	lost map[drain.AgentID]time.Duration
	// begun and answered are when each open drain began here and when the last call for it was
	// answered.
	begun, answered map[drain.UID]time.Duration
	// calls are those about the pod of each open drain.
	calls map[drain.UID]*asking
	// forbidden are the pods whose drain a budget ended here.
	forbidden map[drain.UID]bool
	// oldest is the oldest start of each open drain that this life has known.
	oldest map[drain.UID]time.Time
	// numbers are those of the drains that agents were told of since they began.
	numbers map[drain.UID]uint64
	// targets are what was last said of each Service's targets, and room which open drains may be
	// told to agents: plain records beside the ledger's, for the checks.
	targets map[drain.Service][]drain.UID
	room    map[drain.UID]*admitted
	// silence is what each agent has left unanswered, for the checks. Nil: the ledger may have
	// forgotten that.
	silence map[drain.AgentID]*silence
	// departed are the lives of agents that have left, as was heard here. relisted is when those of
	// them were listed that the ledger may have forgotten before.
	departed map[drain.AgentID]string
	relisted map[drain.AgentID]time.Duration
	// declared are the Services that each agent has declared here.
	declared map[*agent][]drain.Route
}

// silence is what an agent has left unanswered since it last acknowledged a drain.
type silence struct {
	// endedAt is when it last acknowledged one or, if it has not, was first heard of.
	endedAt      time.Duration
	acknowledged bool
	// unsure: it was known before, and then not listed. What it let expire then may count still.
	unsure bool
	// spokeAt is when it last may have acknowledged one: Kept and, at the barrier, Routing count
	// for more where there is no other endpoint.
	spokeAt time.Duration
	// expired is at least how many drains in a row have ended by their deadline without its word,
	// the last one at lastAt.
	expired int
	lastAt  time.Duration
	// tried is the last pod whose deletion was denied for it since, triedAt the 5 s of this
	// replica's clock in which agents were told.
	tried   drain.UID
	triedAt time.Time
}

// admitted is an open drain, as far as its Services' room goes.
type admitted struct {
	services map[drain.Service]bool
	// former are the agents that have declared otherwise since it was opened, and must acknowledge
	// it all the same.
	former map[*agent]bool
	// told: it is not queued. exempt: another replica had room, or had unrouted the pod already.
	// background: it was not held.
	told, exempt, background bool
	toldAt                   time.Duration
	// ordered: when agents were told, it had been asked for while replicas knew of each other.
	ordered bool
	// released: it was when a call of a controller began to wait.
	released bool
	// place is what was last said of who judges its room, at askedAt.
	place   drain.Placing
	askedAt time.Duration
}

// said is a report, and what it rested on.
type said struct {
	drain.Report
	// at is when it arrived, readAt when the reading behind it began.
	at, readAt time.Duration
}

// stream is one agent's.
type stream struct {
	*coordinator.Session
	conn *conn
	link *link
	// began is when it was opened.
	began time.Duration
	woken bool
	over  bool
}

func (c *coord) log(format string, args ...any) { c.w.logf(c.name, format, args...) }

// start begins a new life.
func (c *coord) start() {
	w := c.w
	c.epoch++
	c.up, c.stopping, c.synced, c.looking = true, false, false, false
	c.setListed(false)
	c.started = w.at
	c.core = coordinator.NewCore(c.now(), drain.Holder{Replica: c.name, Epoch: fmt.Sprint(c.epoch)}, w.times,
		&coordinator.Options{MaxHolds: coordinator.DefaultHolds, MaxHoldsPerOwner: w.ownerHolds, Scope: w.scope,
			Sampling: sampling})
	c.ledger = c.core.Ledger
	c.meetPeers()
	c.pods, c.ended, c.roster = map[drain.UID]podView{}, map[drain.UID]bool{}, nil
	c.slices = make([]slice, w.api.services)
	c.index = endpoints.NewIndex()
	c.handler = c.newHandler()
	c.contexts = &podcontext.Source{Reader: cache{c, false}, Index: c.handler.Cluster.Slices,
		Known:  func() bool { return true },
		Synced: func() bool { return true }, Going: func(uid drain.UID) bool { return c.ledger.Pod(uid).Terminating },
		Now: func() time.Time { return c.now() }, Log: w.logger(c.name)}
	c.streams, c.holds, c.inbound = nil, nil, nil
	c.bars, c.watched = nil, map[drain.AgentID]map[drain.UID]uint64{}
	c.restarted, c.stopped = map[drain.UID]time.Duration{}, map[drain.UID]time.Duration{}
	c.took, c.let, c.rested = 0, map[drain.UID]map[*agent]bool{}, map[drain.UID]time.Duration{}
	c.watching = map[drain.UID][]drain.Service{}
	c.heard, c.lost = map[drain.AgentID]map[drain.UID]said{}, map[drain.AgentID]time.Duration{}
	c.numbers = map[drain.UID]uint64{}
	c.targets, c.room = map[drain.Service][]drain.UID{}, map[drain.UID]*admitted{}
	c.silence, c.departed, c.declared = map[drain.AgentID]*silence{}, map[drain.AgentID]string{},
		map[*agent][]drain.Route{}
	c.relisted = map[drain.AgentID]time.Duration{}
	c.calls, c.forbidden = map[drain.UID]*asking{}, map[drain.UID]bool{}
	c.begun, c.answered, c.oldest = map[drain.UID]time.Duration{}, map[drain.UID]time.Duration{},
		map[drain.UID]time.Time{}
	c.log("starts, epoch %d", c.epoch)
	w.after(&c.proc, w.between(10*time.Millisecond, 500*time.Millisecond), func() {
		w.api.list(c.watch, func() {
			c.synced = true
			c.setPeers()
			c.log("has synced")
		})
	})
	w.after(&c.proc, peers.AdoptEvery, c.poll)
	c.tick()
}

// crash ends the life at once. lost: no connection is reset.
func (c *coord) crash(lost bool) {
	w := c.w
	c.log("dies")
	for _, s := range c.streams {
		w.cut(&c.proc, &s.link.a.proc, s.conn, 1, lost, s.link.closed)
	}
	for _, x := range c.inbound {
		if !lost {
			w.after(nil, w.delay(), x.reset)
		}
	}
	c.up = false
	c.life++
	c.started = w.at
	c.watch.line = line{}
}

// stop ends the life as cmd/webhook does on SIGTERM.
func (c *coord) stop(down time.Duration) {
	w := c.w
	c.log("is told to stop")
	c.stopping = true
	c.ready.Stop()
	c.core.Stop()
	w.after(nil, w.between(time.Millisecond, 300*time.Millisecond), func() {
		if c.stopping {
			c.setListed(false)
		}
	})
	for _, h := range slices.Clone(c.holds) {
		c.wake(h, nil)
	}
	for _, x := range slices.Clone(c.bars) {
		c.barTurn(x) // and it is answered
	}
	for _, s := range slices.Clone(c.streams) {
		c.end(s, false)
	}
	w.after(&c.proc, w.between(100*time.Millisecond, 2*time.Second), func() {
		c.crash(false)
		w.after(nil, down, c.start)
	})
}

// tick is Coordinator.Run.
func (c *coord) tick() {
	c.w.after(&c.proc, coordinator.Tick, func() {
		pods, overdue := c.core.Tick(c.now())
		for _, uid := range sorted(c.begun) {
			if !c.ledger.Pod(uid).Draining {
				c.log("%s was only refused, and no client asks for it: abandoned", uid)
				c.w.measure("drains that were abandoned without a read")
				c.checkAbandoned(uid)
				c.closed(uid)
			}
		}
		c.settle()
		c.checkQueued()
		c.checkKeptOut()
		if !c.looking { // an API server that does not answer keeps the ledger from nothing
			for _, pod := range overdue {
				if _, known := c.pods[pod.UID]; c.synced && !known {
					c.gone(pod.UID, c.core.Deleted)
				}
			}
			c.look(pods)
		}
		c.tick()
	})
}

// look reads pods live, one after the other.
func (c *coord) look(pods []drain.Pod) {
	w := c.w
	if c.looking = len(pods) > 0; !c.looking {
		return
	}
	uid, done := pods[0].UID, false
	next := func() {
		if !done {
			done = true
			c.look(pods[1:])
		}
	}
	w.send(&c.proc, &w.api.node, nil, 0, func() {
		p := w.api.find(uid)
		living := !p.terminating && !p.gone
		w.send(&w.api.node, &c.proc, nil, 0, func() {
			if done || w.unreadable() && w.faulty() {
				return // the API server does not answer
			}
			if living {
				open := c.ledger.Pod(uid).Draining
				if c.core.Read(c.now(), uid, coordinator.Living); open && !c.ledger.Pod(uid).Draining {
					c.log("%s lives, and no client asks for it: abandoned", uid)
					c.checkAbandoned(uid)
					if w.faulty() && w.chance(300) {
						// A client deletes it after all, just now.
						w.after(nil, w.between(0, 20*time.Millisecond), func() { w.api.reask(uid) })
					}
					c.closed(uid)
				}
			} else {
				c.gone(uid, c.core.GatePassed)
			}
			c.settle()
			next()
		})
	})
	w.after(&c.proc, coordinator.LookTimeout, next)
}

func (a *api) find(uid drain.UID) *pod {
	for _, p := range a.pods {
		if p.uid == uid {
			return p
		}
	}
	return nil
}

// gone hears that a pod is terminating, or deleted.
func (c *coord) gone(uid drain.UID, step func(time.Time, drain.UID)) {
	open := c.ledger.Pod(uid).Draining
	if step(c.now(), uid); open {
		c.log("%s is going", uid)
	}
	c.closed(uid)
	c.settle()
}

// closed forgets a drain, and what was said of its pod.
func (c *coord) closed(uid drain.UID) {
	for _, words := range c.heard {
		delete(words, uid)
	}
	delete(c.begun, uid)
	delete(c.calls, uid)
	delete(c.oldest, uid)
	delete(c.room, uid)
	delete(c.restarted, uid)
}

// What the watch brings.

func (c *coord) podSeen(p *pod, v podView) {
	if c.ended[p.uid] {
		return // what was held up on its way does not come after what is newer
	}
	c.pods[p.uid] = v
	if v.gone {
		c.ended[p.uid] = true
		delete(c.pods, p.uid)
	}
	switch {
	case v.gone:
		c.gone(p.uid, c.core.Deleted)
	case v.terminating:
		c.gone(p.uid, c.core.GatePassed)
	case v.ready:
		c.back(p, v)
	}
}

func (c *coord) sliceSeen(service int, s slice) {
	c.slices[service] = s
	c.index.Apply(c.now(), s.object(service))
}

func (c *coord) rosterSeen(all []drain.Expected) {
	c.noteRelisted(all)
	c.roster = all
	for id := range c.silence {
		if !slices.ContainsFunc(all, func(e drain.Expected) bool { return e.ID == id }) {
			c.silence[id] = nil // the ledger may forget it
		}
	}
	for _, e := range all {
		c.meet(e.ID)
	}
	c.core.Expect(c.now(), all)
	c.settle()
}

// meet notes when an agent was first heard of.
func (c *coord) meet(id drain.AgentID) {
	if quiet, known := c.silence[id]; quiet == nil {
		c.silence[id] = &silence{endedAt: c.w.at, unsure: known}
	}
}

// settle carries out what follows from the steps: Coordinator.settle.
func (c *coord) settle() {
	e := c.core.Settle(c.now())
	for _, s := range e.Changed {
		for _, h := range c.holds {
			if h.caller.p.uid == s.Pod.UID {
				c.wake(h, &s)
			}
		}
	}
	for _, uid := range e.Barriers {
		c.wakeBars(uid)
	}
	for _, m := range e.Measured {
		c.checkMeasured(m)
	}
	for _, s := range e.Suspensions {
		if s.Over {
			c.w.measure("agents that were waited for again")
		} else {
			c.w.measure("agents that were suspended")
		}
		c.log("%s: suspended=%t", s.Name, !s.Over)
	}
	c.checkRoom()
	c.core.Notify()
}

// services returns which Services list a pod here, ready or not, or did until lately, with their
// usable targets, and names one if the pod is the last of all that are routed.
func (c *coord) services(p *pod) (targets []drain.Targets, services []drain.Service, last string) {
	listings := c.index.Pod(c.now(), p.drainPod().Namespace, p.uid)
	targets, last = admission.LastOf(c.handler.Cluster.Slices, listings, c, p.uid)
	for _, t := range targets {
		services = append(services, t.Service)
	}
	return targets, services, last
}

// Expecting, CouldRoute and Pod implement [admission.Standings].
func (c *coord) Expecting() (expected, missing int) {
	n := c.ledger.Counts()
	return n.Expected, n.Missing
}

func (c *coord) CouldRoute(services []drain.Service) bool {
	return c.ledger.Asks(drain.AtHold, services)
}

func (c *coord) Hooks(node, workload string) coordinator.Hooks {
	return c.core.Hooks(c.now(), node, workload)
}

func (c *coord) Pod(uid drain.UID) drain.Standing { return c.ledger.Pod(uid) }

// service returns the i-th Service. The third one is in a namespace of its own.
func service(i int) drain.Service {
	namespace := "shop"
	if i == 2 {
		namespace = "bank"
	}
	return drain.Service{Namespace: namespace, Name: string(rune('a' + i))}
}

// opened records that a drain was asked for.
func (c *coord) opened(request coordinator.Request, s drain.Status, background bool) {
	uid := request.Pod.UID
	c.isDeleted(uid)
	if c.w.api.find(uid).observed() {
		c.w.fail(checkMode, "%s drains %s, whose mode is observe", c.name, uid)
	}
	if s.Phase != drain.Closed {
		d := c.asking(uid, request.Targets, request.Place.Is)
		d.background = d.background || background
	}
	if _, ok := c.begun[uid]; !ok && s.Phase != drain.Closed {
		c.begins(uid)
		c.log("drain of %s begins, since %s", uid, s.Since.Sub(start))
	}
	c.checkClock(s, request.Place.Elapsed)
	c.settle()
}

// isDeleted records that a deletion asks for a drain: that of a restart has another clock.
func (c *coord) isDeleted(uid drain.UID) {
	if c.restarted[uid] > 0 {
		c.begun[uid] = c.w.at
		delete(c.oldest, uid)
	}
	delete(c.restarted, uid)
}

// begins records that a drain was opened.
func (c *coord) begins(uid drain.UID) {
	c.begun[uid], c.answered[uid] = c.w.at, c.w.at
	c.calls[uid] = &asking{}
	delete(c.forbidden, uid)
	delete(c.numbers, uid)
}

// The agents' API.

// connect serves a new stream.
func (c *coord) connect(l *link, k *conn, boot string) {
	w := c.w
	a := l.a
	if boot != c.departed[a.id] {
		delete(c.departed, a.id)
	}
	undeclared := a.right != "" && !c.ledger.Agent(a.id).Declared
	offer := wire.NewOffer(boot)
	s := &stream{conn: k, link: l, began: w.at}
	var err error
	who := a.identity()
	if s.Session, err = c.core.Connect(c.now(), who, offer, func() { c.wakeStream(s) }); err != nil {
		w.cut(&c.proc, &a.proc, k, 1, false, func() { l.lost(k) })
		return
	}
	if undeclared {
		delete(c.declared, a)
		for _, d := range c.room {
			delete(d.former, a) // it was forgotten
		}
	}
	c.heard[a.id] = map[drain.UID]said{}
	c.meet(a.id)
	c.streams = append(c.streams, s)
	c.log("%s connects, session %d", a.name, s.Number)
	c.settle()
	c.say(s, nil)
	c.beat(s)
}

// identity is who an agent is. Each has a service account of its own.
func (a *agent) identity() coordinator.Identity {
	return coordinator.Identity{Agent: a.id, Name: a.name, Username: a.name, Everywhere: a.right == ""}
}

// mayAsk reports whether the agent has the right to ask for barriers: all have, in most worlds and
// in calm ones.
func (a *agent) mayAsk() bool { return a.w.isCalm || a.w.seed%9 != 0 || a.node%2 == 0 }

func (c *coord) beat(s *stream) {
	c.w.after(&c.proc, c.w.times.Heartbeat, func() {
		if !s.over {
			c.say(s, c.core.Say(nil, c.now(), s.Session, wire.Message{Type: wire.TypeHeartbeat}))
			c.beat(s)
		}
	})
}

func (c *coord) wakeStream(s *stream) {
	if s.woken || s.over {
		return
	}
	s.woken = true
	c.w.after(&c.proc, c.w.between(0, 300*time.Microsecond), func() {
		s.woken = false
		if !s.over {
			c.say(s, nil)
		}
	})
}

// say writes lines and what the agent has not heard yet: Coordinator.feed.
func (c *coord) say(s *stream, lines []byte) {
	news, ok := c.core.Feed(s.Session)
	if !ok {
		c.end(s, false)
		return
	}
	c.tell(s.link.a.id, news.Open)
	for _, r := range news.Released {
		c.checkRight(s.link.a, r.UID)
	}
	if lines = c.core.Append(lines, c.now(), s.Session, news); len(lines) > 0 && !s.conn.closed[1] {
		l, k := s.link, s.conn
		c.w.send(&c.proc, &l.a.proc, k, 1, func() { l.read(k, lines) })
	}
}

// tell records that an agent is told of drains.
func (c *coord) tell(id drain.AgentID, open []drain.Open) {
	a := c.w.agents[slices.IndexFunc(c.w.agents, func(a *agent) bool { return a.id == id })]
	for _, d := range open {
		// A node that has not declared is told as a replica of a gateway would be, and is not asked
		// any more when it declares.
		declared := a.population != drain.Nodes || c.declared[a] != nil
		phase := c.ledger.Status(c.now(), drain.AtBarrier, d.Pod.UID).Phase
		if declared && phase != drain.PhaseUnknown && phase != drain.Closed {
			if c.watched[id] == nil {
				c.watched[id] = map[drain.UID]uint64{}
			}
			c.watched[id][d.Pod.UID] = d.Number
		}
		c.numbers[d.Pod.UID] = d.Number
		c.checkTold(d.Pod.UID)
		c.checkRight(a, d.Pod.UID)
	}
}

// listen takes in a line that an agent has written into its stream. meant is what it may say of
// each drain, and readAt when the reading behind it began, for the checks.
func (c *coord) listen(a *agent, k *conn, line []byte, meant []drain.Report, readAt time.Duration) {
	var said wire.Reports
	if err := json.Unmarshal(line, &said); err != nil {
		panic(err)
	}
	if !c.report(a, said, meant, readAt) {
		c.endOf(k)
	}
}

// end ends a stream from this side.
func (c *coord) end(s *stream, lost bool) {
	if s.over {
		return
	}
	s.over = true
	c.streams = slices.DeleteFunc(c.streams, func(o *stream) bool { return o == s })
	id := s.link.a.id
	if c.ledger.Current(id, s.Number) {
		delete(c.heard, id)
		c.lost[id] = c.w.at
		c.log("%s is disconnected, session %d", s.link.a.name, s.Number)
	}
	c.core.Disconnect(c.now(), s.Session)
	l, k := s.link, s.conn
	c.w.cut(&c.proc, &l.a.proc, k, 1, lost, func() { l.lost(k) })
	c.settle()
}

// endOf ends the stream on a connection whose other side is closed.
func (c *coord) endOf(k *conn) {
	for _, s := range c.streams {
		if s.conn == k {
			c.end(s, true)
			return
		}
	}
}

// declare answers a declaration. ok is false if the session is not the present one.
func (c *coord) declare(a *agent, session uint64, routes []drain.Route) (wire.Declared, bool) {
	d, err := c.core.Declare(a.id, wire.Declaration{Session: session, Population: a.population, Routes: routes})
	if err != nil {
		return d, false
	}
	if c.departed[a.id] != "" {
		delete(c.declared, a) // it had left, and owed nothing
	}
	delete(c.departed, a.id)
	c.noteDeclared(a, routes)
	c.settle()
	return d, true
}

// leave hears that an agent's gateway accepts nothing any more.
func (c *coord) leave(a *agent, session uint64, boot string) bool {
	ok := c.ledger.Leave(a.id, session)
	if ok {
		c.log("%s leaves", a.name)
		if c.departed[a.id] == "" {
			c.w.measure("leaves that a replica heard")
		}
		c.departed[a.id] = boot
		delete(c.relisted, a.id)
		for _, s := range c.all(drain.AtHold) {
			c.checkDeparted(s)
		}
	}
	c.settle()
	return ok
}

// report takes in reports.
func (c *coord) report(a *agent, reports wire.Reports, meant []drain.Report, readAt time.Duration) bool {
	if !c.ledger.Current(a.id, reports.Session) {
		return false
	}
	asOf := c.core.Began.Add(time.Duration(reports.At-1) * time.Millisecond)
	var telling []drain.Report
	if up := reports.UpTo; up != nil {
		c.log("%s reports all %s revision=%d", a.name, up.State, up.Revision)
		c.w.measure("lines about all drains")
		if len(reports.Reports) > 0 {
			c.w.measure("lines about all drains but some")
		}
	}
	for _, r := range reports.Reports {
		if r.Gate == drain.AtBarrier {
			c.log("%s reports %s %s quiet=%t sent=%t at the barrier", a.name, r.UID, r.State, r.NoConnections,
				r.HasSent)
			c.learn(a, r)
		} else {
			c.log("%s reports %s %s number=%d alone", a.name, r.UID, r.State, r.Number)
		}
	}
	for _, one := range meant {
		r := said{one, asOf.Sub(start), readAt}
		if had, known := c.heard[a.id][r.UID]; known && r.at < had.at {
			continue
		}
		c.heard[a.id][r.UID] = r
		if r.Number == c.numbers[r.UID] {
			telling = append(telling, r.Report)
		}
		c.log("%s reports %s %s number=%d", a.name, r.UID, r.State, r.Number)
	}
	all := append(meant, reports.Reports...)
	before := c.acknowledged(a, asOf, telling) || c.acknowledgedAtBarrier(a, asOf, all)
	if _, err := c.core.Report(c.now(), a.id, reports); err != nil {
		return false
	}
	if before {
		c.silence[a.id] = &silence{endedAt: c.w.at, acknowledged: true}
	}
	mayAcknowledge := func(r drain.Report) bool {
		return r.State >= drain.Kept || r.Gate == drain.AtBarrier && r.State == drain.Routing
	}
	if quiet := c.silence[a.id]; quiet != nil && slices.ContainsFunc(all, mayAcknowledge) {
		quiet.expired, quiet.spokeAt = 0, c.w.at
	}
	c.settle()
	return true
}

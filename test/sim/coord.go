package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// maxHolds, ownerHolds, lookAround, lookTimeout and settleTime are those of the real shells
	// (cmd/webhook, pkg/admission, internal/coordinator).
	maxHolds    = 64
	ownerHolds  = 8
	lookAround  = 250 * time.Millisecond
	lookTimeout = 5 * time.Second
	settleTime  = 10 * time.Second
	linger      = 10 * time.Second
)

// coord is one replica: the real ledger, and the shells of package coordinator, package admission
// and cmd/webhook around it, without goroutines.
type coord struct {
	proc
	w       *world
	watch   *watcher
	ledger  *drain.Ledger
	epoch   int
	started time.Duration
	synced  bool
	// stopping: it answers every call with 429 and ends.
	stopping bool
	looking  bool
	// adopted: it knows the open drains of the others. settled: it has waited for its agents once.
	adopted, settled bool
	// listed: its entry has an endpoint. failed counts probes.
	listed bool
	failed int
	peers  []*peer
	// others are the open drains of the other replicas, as the last poll told.
	others []drain.Claim
	// turns are those of the pods of each owner, asked is when the API server asked about a pod
	// last.
	turns map[string][]asking
	asked map[drain.UID]time.Duration

	pods    map[drain.UID]podView
	ended   map[drain.UID]bool
	slices  []slice
	left    []map[drain.UID]time.Duration
	roster  []drain.Expected
	streams []*stream
	holds   []*held
	inbound []*call
	// bars are the hooks that wait, watched which barriers of this life each agent was told of, by
	// their number.
	bars []*barred
	// rests are those of pods that stay, restarted the drains of this life that were opened for
	// them, and for no deletion.
	rests     []*rested
	restarted map[drain.UID]bool
	// took is how long kernels took to let go, in barriers of this life, and let of which that is
	// known.
	took time.Duration
	let  map[drain.UID]map[*agent]bool
	// rested is what took was when a barrier was opened.
	rested  map[drain.UID]time.Duration
	watched map[drain.AgentID]map[drain.UID]uint64

	// heard is what the last word of each agent on its present session was, for the checks: a plain
	// record beside the ledger.
	heard map[drain.AgentID]map[drain.UID]said
	// lost is when an agent's stream ended here.
	lost map[drain.AgentID]time.Duration
	// begun and answered are when each open drain began here and when the last call for it was
	// answered.
	begun, answered map[drain.UID]time.Duration
	// oldest is the oldest start of each open drain that this life has known.
	oldest map[drain.UID]time.Time
	// numbers are those of the drains that agents were told of since they began.
	numbers map[drain.UID]uint64
	// targets are what was last said of each Service's targets, and room which open drains may be
	// told to agents: plain records beside the ledger's, for the checks.
	targets map[drain.Service][]drain.UID
	room    map[drain.UID]*admitted
	// silence is what each agent has left unanswered, for the checks.
	silence map[drain.AgentID]*silence
	// departed are the lives of agents that have left, as was heard here.
	departed map[drain.AgentID]string
	// declared are the Services that each agent has declared here.
	declared map[*agent][]drain.Route
}

// silence is what an agent has left unanswered since it last acknowledged a drain.
type silence struct {
	// endedAt is when it last acknowledged one or, if it has not, was first heard of.
	endedAt      time.Duration
	acknowledged bool
	// spokeAt is when it last may have acknowledged one: Kept and, at the barrier, Routing count
	// for more where there is no other endpoint.
	spokeAt time.Duration
	// expired is at least how many drains in a row have ended by their deadline without its word,
	// the last one at lastAt.
	expired int
	lastAt  time.Duration
	// tried is the last pod whose deletion was denied for it since, triedAt the 5 s of the clock in
	// which agents were told.
	tried   drain.UID
	triedAt time.Duration
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
	conn    *conn
	link    *link
	session uint64
	// began is when it was opened.
	began time.Duration
	sent  uint64
	woken bool
	over  bool
}

// call is one review.
type call struct {
	caller  *caller
	timeout time.Duration
	sent    time.Duration
	began   time.Time
	life    int
	answer  func(verdict)
	reset   func()
	held    *held
	// place and turn are what the opener says. claimed is when it last was asked, or could not be,
	// cancel ends a question that is under way.
	place   drain.Place
	turn    turn
	claimed time.Duration
	cancel  func()
	// gone: the API server does not wait any more.
	gone bool
}

// held is a call that waits.
type held struct {
	*call
	services []drain.Service
	end      time.Time
	until    time.Time
	waited   bool
	waiting  bool
	woken    bool
	turnOf   int
	answered func(now time.Time, allowed bool)
}

func (c *coord) log(format string, args ...any) { c.w.logf(c.name, format, args...) }

// start begins a new life.
func (c *coord) start() {
	w := c.w
	c.epoch++
	c.up, c.stopping, c.synced, c.looking, c.adopted, c.settled = true, false, false, false, false, false
	c.turns, c.asked = map[string][]asking{}, map[drain.UID]time.Duration{}
	c.setListed(false)
	c.meetPeers()
	c.started = w.at
	c.ledger = drain.NewLedger(w.times, w.scope, sampling)
	c.pods, c.ended, c.roster = map[drain.UID]podView{}, map[drain.UID]bool{}, nil
	c.slices = make([]slice, w.api.services)
	c.left = make([]map[drain.UID]time.Duration, w.api.services)
	for i := range c.left {
		c.left[i] = map[drain.UID]time.Duration{}
	}
	c.streams, c.holds, c.inbound = nil, nil, nil
	c.bars, c.watched = nil, map[drain.AgentID]map[drain.UID]uint64{}
	c.rests, c.restarted = nil, map[drain.UID]bool{}
	c.took, c.let, c.rested = 0, map[drain.UID]map[*agent]bool{}, map[drain.UID]time.Duration{}
	c.heard, c.lost = map[drain.AgentID]map[drain.UID]said{}, map[drain.AgentID]time.Duration{}
	c.numbers = map[drain.UID]uint64{}
	c.targets, c.room = map[drain.Service][]drain.UID{}, map[drain.UID]*admitted{}
	c.silence, c.departed, c.declared = map[drain.AgentID]*silence{}, map[drain.AgentID]string{},
		map[*agent][]drain.Route{}
	c.begun, c.answered, c.oldest = map[drain.UID]time.Duration{}, map[drain.UID]time.Duration{},
		map[drain.UID]time.Time{}
	c.log("starts, epoch %d", c.epoch)
	w.after(&c.proc, w.between(10*time.Millisecond, 500*time.Millisecond), func() {
		w.api.list(c.watch, func() {
			c.synced = true
			for _, p := range c.peers {
				p.listed = p.of.listed
			}
			c.log("has synced")
		})
	})
	c.adopt()
	c.tick()
}

// crash ends the life at once. lost says that nobody hears of it.
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
	w.after(nil, w.between(time.Millisecond, 300*time.Millisecond), func() {
		if c.stopping {
			c.setListed(false)
		}
	})
	for _, h := range slices.Clone(c.holds) {
		c.wake(h)
	}
	for _, x := range slices.Clone(c.bars) {
		c.barTurn(x) // and it is answered
	}
	for _, x := range slices.Clone(c.rests) {
		c.restTurn(x)
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
	w := c.w
	w.after(&c.proc, time.Second, func() {
		if !c.looking {
			pods, overdue := c.ledger.Tick(w.now)
			c.lookBarriers(overdue)
			c.settle()
			c.checkQueued()
			c.look(pods)
		}
		c.tick()
	})
}

// look reads pods live, one after the other.
func (c *coord) look(pods []drain.Pod) {
	w := c.w
	if len(pods) == 0 {
		c.looking = false
		return
	}
	c.looking = true
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
			if done {
				return
			}
			if living {
				if c.ledger.NotTerminating(w.now, uid) {
					c.log("%s lives, and nobody asks for it: abandoned", uid)
					c.checkAbandoned(uid)
					if w.faulty() && w.chance(300) {
						// Somebody wants it deleted after all, just now.
						w.after(nil, w.between(0, 20*time.Millisecond), func() { w.api.reask(uid) })
					}
					c.closed(uid)
				}
			} else {
				c.gone(uid)
			}
			c.settle()
			next()
		})
	})
	w.after(&c.proc, lookTimeout, next)
}

func (a *api) find(uid drain.UID) *pod {
	for _, p := range a.pods {
		if p.uid == uid {
			return p
		}
	}
	return nil
}

func (c *coord) gone(uid drain.UID) {
	if c.ledger.GatePassed(c.w.now, drain.AtHold, uid) {
		c.log("%s is going", uid)
		c.closed(uid)
	}
	c.settle()
}

// closed forgets a drain, and what was said of its pod.
func (c *coord) closed(uid drain.UID) {
	for _, words := range c.heard {
		delete(words, uid)
	}
	delete(c.begun, uid)
	delete(c.oldest, uid)
	delete(c.room, uid)
	delete(c.restarted, uid)
	delete(c.asked, uid)
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
	if v.terminating || v.gone {
		c.gone(p.uid)
	} else if v.ready {
		c.back(p.uid, v.readyAt)
	}
	if v.gone && c.ledger.GatePassed(c.w.now, drain.AtBarrier, p.uid) {
		c.settle()
	}
}

func (c *coord) sliceSeen(service int, s slice) {
	for _, e := range c.slices[service].endpoints {
		if !slices.ContainsFunc(s.endpoints, func(o endpoint) bool { return o.uid == e.uid }) {
			c.left[service][e.uid] = c.w.at
		}
	}
	c.slices[service] = s
}

func (c *coord) rosterSeen(all []drain.Expected) {
	c.roster = all
	for id := range c.silence {
		if !slices.ContainsFunc(all, func(e drain.Expected) bool { return e.ID == id }) {
			delete(c.silence, id) // the ledger may forget it
		}
	}
	for _, e := range all {
		c.meet(e.ID)
	}
	c.ledger.Expect(c.w.now, all)
	c.settle()
}

// meet notes when an agent was first heard of.
func (c *coord) meet(id drain.AgentID) {
	if c.silence[id] == nil {
		c.silence[id] = &silence{endedAt: c.w.at}
	}
}

// settle wakes those whom a change may concern.
func (c *coord) settle() {
	for touched := c.ledger.Changed(drain.AtHold); len(touched) > 0; touched = c.ledger.Changed(drain.AtHold) {
		for _, uid := range touched {
			c.ledger.Status(c.w.now, drain.AtHold, uid)
			for _, h := range c.holds {
				if h.caller.p.uid == uid {
					c.wake(h)
				}
			}
			c.wakeRests(uid)
		}
	}
	for _, s := range c.ledger.Suspensions() {
		if s.Over {
			c.w.measure("agents that were waited for again")
		} else {
			c.w.measure("agents that were suspended")
		}
		c.log("%s: suspended=%t", s.Name, !s.Over)
	}
	c.checkRoom()
	for _, id := range c.ledger.Affected() {
		for _, s := range c.streams {
			if s.link.a.id == id {
				c.wakeStream(s)
			}
		}
	}
	if c.settleBarriers() {
		c.settle()
	}
}

func (c *coord) wake(h *held) {
	if h.woken {
		return
	}
	h.woken = true
	c.w.after(&c.proc, c.w.between(0, 200*time.Microsecond), func() { c.recheck(h) })
}

// listings returns which Services list a pod here, ready or not, or did until lately, and names one
// if the pod is the last of all that are routed.
func (c *coord) listings(uid drain.UID) (services []drain.Service, ready bool, last string) {
	lasts := true
	for i, s := range c.slices {
		listed, usable, others := false, false, 0
		for _, e := range s.endpoints {
			if e.uid == uid {
				listed = true
				usable = e.ready && !e.terminating
				ready = ready || e.ready
			} else if e.ready && !e.terminating {
				others++
			}
		}
		if at, ok := c.left[i][uid]; listed || ok && c.w.at-at < linger {
			services = append(services, service(i))
		}
		switch of := service(i); {
		case !slices.Contains(services, of) || !c.ledger.CouldRoute([]drain.Service{of}):
		case usable && others == 0:
			last = of.Name
		default:
			lasts = false
		}
	}
	if !lasts {
		last = ""
	}
	return services, ready, last
}

// usable lists the pods of a Service that can be used, as far as is known here.
func (c *coord) usable(i int) []drain.UID {
	uids := []drain.UID{}
	for _, e := range c.slices[i].endpoints {
		if e.ready && !e.terminating {
			uids = append(uids, e.uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// service returns the i-th Service. The third one is in a namespace of its own.
func service(i int) drain.Service {
	namespace := "shop"
	if i == 2 {
		namespace = "bank"
	}
	return drain.Service{Namespace: namespace, Name: string(rune('a' + i))}
}

// facts is Cluster.gather of what no review says.
func (c *coord) facts(p *pod, operation admission.Operation) (admission.Facts, []drain.Service) {
	w := c.w
	view, known := c.pods[p.uid]
	services, ready, last := c.listings(p.uid)
	f := admission.Facts{
		Operation: operation, Terminating: view.terminating, Unknown: !known, DisruptionTarget: view.target,
		Cold: !c.synced, Up: w.at - c.started,
		Listed: len(services) > 0, Ready: ready, LastOf: last,
	}
	if !view.ready {
		f.NotReadyFor = time.Second
	}
	f.Agents = c.ledger.Counts().Expected
	f.CouldRoute = c.ledger.CouldRoute(services)
	for _, at := range c.ledger.Pod(p.uid).Refused {
		f.Refused += number(w.now.Sub(at) < admission.RefusedWindow)
	}
	return f, services
}

// judge is Cluster.judge.
func (c *coord) judge(f admission.Facts, p *pod) admission.Verdict {
	v := admission.Decide(f)
	if f.Operation != admission.Evict || v.Reason != admission.Draining && v.Reason != admission.CoolOff &&
		v.Reason != admission.LastTarget {
		return v
	}
	f.Budget = c.budget(p)
	return admission.Decide(f)
}

// admit is Handler.decide.
func (c *coord) admit(x *call) {
	p := x.caller.p
	x.began = c.w.now
	f, services := c.facts(p, x.caller.operation())
	if !x.caller.evict {
		// An Eviction review has no pod with it.
		f.Terminating, f.DisruptionTarget, f.Forced = p.terminating, p.target, x.caller.forced
	}
	v := admission.Decide(f)
	if v.Action == admission.Drain {
		c.claim(x, func(claimed wire.Claimed, witness bool) {
			switch {
			case x.gone:
				c.reply(x, verdict{}, string(admission.CallerGone))
				return
			case !witness:
				v = c.judge(f, p)
			case claimed.Verdict == wire.VerdictDeny:
				c.reply(x, verdict{}, claimed.Reason)
				return
			}
			c.decided(x, v, services)
		})
		return
	}
	if c.opener() {
		v = c.judge(f, p)
	}
	c.decided(x, v, services)
}

// decided carries out a verdict.
func (c *coord) decided(x *call, v admission.Verdict, services []drain.Service) {
	w, p := c.w, x.caller.p
	if v.Unroute {
		c.open(p, services, drain.Place{}, true)
	}
	switch v.Action {
	case admission.Allow:
		c.reply(x, verdict{allowed: true, words: []*word{{reason: string(v.Reason), at: w.at}}}, string(v.Reason))
	case admission.Drain:
		if x.caller.evict && x.turn == turnJudged {
			c.checkBudget(p)
		}
		h := &held{call: x, services: services, end: w.times.HoldUntil(x.began, x.timeout)}
		x.held = h
		c.drain(h)
	default:
		retry := drain.RetryAfter(0, false, 0)
		if v.Reason == admission.Budget {
			retry = 0
		}
		c.reply(x, verdict{retryAfter: retry}, string(v.Reason))
	}
}

// budget is Cluster.budget for the one budget there is.
func (c *coord) budget(p *pod) string {
	if !c.w.api.budget || !slices.Contains(p.services, 0) {
		return ""
	}
	healthy, ahead, desired := 0, 0, c.w.api.want[0]-1
	for _, e := range c.slices[0].endpoints {
		if !e.ready || e.terminating {
			continue
		}
		healthy++
		if c.ledger.Pod(e.uid).Draining && e.uid != p.uid {
			ahead++
		}
	}
	drains := c.ledger.Pod(p.uid).Draining
	switch allowed := healthy - desired; {
	case !c.pods[p.uid].ready && allowed >= 0 && desired > 0:
		return ""
	case allowed <= 0:
		return "exhausted"
	case drains || ahead < allowed:
		return ""
	default:
		return "no room"
	}
}

func (c *coord) open(p *pod, services []drain.Service, place drain.Place, background bool) drain.Status {
	targets := make([]drain.Targets, 0, len(services))
	for i := range c.slices {
		if slices.Contains(services, service(i)) {
			targets = append(targets, drain.Targets{Service: service(i), Usable: c.usable(i)})
		}
	}
	s := c.ledger.Ask(c.w.now, p.drainPod(), targets, place)
	delete(c.restarted, p.uid)
	if s.Phase != drain.Closed {
		d := c.asking(p.uid, targets, place.Is)
		d.background = d.background || background
	}
	if _, ok := c.begun[p.uid]; !ok && s.Phase != drain.Closed {
		c.begins(p.uid)
		c.log("drain of %s begins, since %s", p.uid, s.Since.Sub(epoch))
	}
	c.checkClock(s, place.Elapsed)
	c.settle()
	return s
}

// begins records that a drain was opened.
func (c *coord) begins(uid drain.UID) {
	c.begun[uid], c.answered[uid] = c.w.at, c.w.at
	delete(c.numbers, uid)
}

// drain is one turn of Handler.hold: Coordinator.Drain up to where it waits.
func (c *coord) drain(h *held) {
	w, p := c.w, h.caller.p
	h.until = h.end
	if t := w.now.Add(lookAround); t.Before(h.until) {
		h.until = t
	}
	s := c.open(p, h.services, h.place, false)
	if s.Phase != drain.Closed {
		c.asked[p.uid] = w.at
	}
	inTurn := h.turn == turnHeld || h.turn == turnJudged && c.inTurn(p)
	h.answered = c.ledger.Hold(p.uid)
	switch {
	case c.stopping:
		c.wakes(h, s, string(admission.Stopping))
	case !s.Waits() || !w.now.Before(h.until):
		c.wakes(h, s, "")
	case len(c.holds) >= maxHolds || !inTurn:
		c.wakes(h, s, string(admission.TooManyHolds))
	case h.gone:
		c.wakes(h, s, string(admission.CallerGone))
	default:
		h.waited, h.waiting = true, true
		c.holds = append(c.holds, h)
		c.sleep(h, s)
	}
}

func (c *coord) sleep(h *held, s drain.Status) {
	at := h.until
	if !s.Recheck.IsZero() && s.Recheck.Before(at) {
		at = s.Recheck
	}
	h.turnOf++
	turn := h.turnOf
	c.w.after(&c.proc, at.Sub(c.w.now), func() {
		if h.turnOf == turn {
			c.recheck(h)
		}
	})
}

func (c *coord) recheck(h *held) {
	h.woken = false
	if !h.waiting {
		return
	}
	s := c.ledger.Status(c.w.now, drain.AtHold, h.caller.p.uid)
	c.settle()
	switch {
	case c.stopping:
		c.wakes(h, s, string(admission.Stopping))
	case !s.Waits() || !c.w.now.Before(h.until):
		c.wakes(h, s, "")
	default:
		c.sleep(h, s)
	}
}

// hangUp says that the API server does not wait any more.
func (c *coord) hangUp(x *call) {
	x.gone = true
	if x.cancel != nil {
		x.cancel()
	}
	if h := x.held; h != nil && h.waiting {
		s := c.ledger.Status(c.w.now, drain.AtHold, h.caller.p.uid)
		c.settle()
		c.wakes(h, s, string(admission.CallerGone))
	}
}

// wakes is the rest of the turn.
func (c *coord) wakes(h *held, s drain.Status, err string) {
	w, p := c.w, h.caller.p
	h.waiting = false
	h.turnOf++
	c.holds = slices.DeleteFunc(c.holds, func(o *held) bool { return o == h })
	released := s.Phase == drain.Released || s.Phase == drain.Closed
	h.answered(w.now, err == "" && released)
	c.answered[p.uid] = w.at
	switch {
	case err == "" && released:
		c.expired(s)
		wd := &word{reason: s.Reason.String(), at: w.at, by: c, life: c.life}
		c.checkAllow(p, s, wd, h.services)
		c.reply(h.call, verdict{allowed: true, words: []*word{wd}}, s.Reason.String())
	case err == "" && w.now.Before(h.end) && s.Phase == drain.Queued && h.place.Is == drain.Deferred:
		c.claim(h.call, func(wire.Claimed, bool) { c.looks(h) })
	case err == "" && w.now.Before(h.end):
		c.looks(h)
	case err == string(admission.Stopping):
		c.abstains(h, func(yes bool) {
			if yes {
				c.reply(h.call, verdict{allowed: true, words: []*word{{reason: string(admission.Abstained), at: w.at}}},
					string(admission.Abstained))
				return
			}
			c.refuse(h, s, err, time.Second)
		})
	default:
		c.refuse(h, s, err, drain.RetryAfter(w.now.Sub(s.Since), h.waited, s.Deadline.Sub(w.now)))
	}
}

// looks is what is done between two turns.
func (c *coord) looks(h *held) {
	if _, _, last := c.listings(h.caller.p.uid); last != "" {
		reason := string(admission.LastTarget)
		c.reply(h.call, verdict{allowed: true, words: []*word{{reason: reason, at: c.w.at}}}, reason)
		return
	}
	c.drain(h)
}

// refuse answers that a drain is not over.
func (c *coord) refuse(h *held, s drain.Status, err string, retry time.Duration) {
	c.expired(s)
	c.checkDeny(h, s, err)
	v := verdict{retryAfter: retry}
	if err == "" {
		v.waits = c
	}
	c.reply(h.call, v, "Draining "+err)
}

func (c *coord) reply(x *call, v verdict, reason string) {
	w := c.w
	c.log("answers for %s: allowed=%t %s retry=%s", x.caller.p.uid, v.allowed, reason, v.retryAfter)
	if v.allowed {
		w.allowed[reason]++
	}
	c.checkInTime(x)
	c.inbound = slices.DeleteFunc(c.inbound, func(o *call) bool { return o == x })
	x.answer(v)
}

// The agents' API.

// connect serves a new stream.
func (c *coord) connect(l *link, k *conn, boot string) {
	w := c.w
	if c.stopping {
		w.cut(&c.proc, &l.a.proc, k, 1, false, func() { l.lost(k) })
		return
	}
	id := l.a.id
	s := &stream{conn: k, link: l, began: w.at}
	for _, former := range c.streams {
		if former.link.a == l.a {
			c.wakeStream(former) // and it ends
		}
	}
	if boot != c.departed[id] {
		delete(c.departed, id)
	}
	s.session = c.ledger.Connect(w.now, id, drain.Hello{Boot: boot, Observes: l.a.kernel != nil})
	if l.a.right != "" && !c.ledger.Agent(id).Declared {
		c.ledger.Declare(id, s.session, "", nil)
		delete(c.declared, l.a)
		for _, d := range c.room {
			delete(d.former, l.a) // it was forgotten
		}
	}
	c.heard[id] = map[drain.UID]said{}
	c.meet(id)
	c.streams = append(c.streams, s)
	c.log("%s connects, session %d", l.a.name, s.session)
	c.settle()
	c.say(s, true, false)
	c.beat(s)
}

func (c *coord) beat(s *stream) {
	c.w.after(&c.proc, c.w.times.Heartbeat, func() {
		if !s.over {
			c.say(s, false, true)
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
			c.say(s, false, false)
		}
	})
}

// say writes what the agent has not heard yet. A heartbeat is written in any case.
func (c *coord) say(s *stream, first, beat bool) {
	id := s.link.a.id
	if !c.ledger.Current(id, s.session) {
		c.end(s, false)
		return
	}
	open, released, next := c.ledger.ChangesFor(id, s.sent)
	s.sent = next
	c.tell(id, open)
	for _, r := range released {
		c.checkRight(s.link.a, r.UID)
	}
	if first || beat || len(open)+len(released) > 0 {
		c.write(s, open, released, first)
	}
}

// tell records that an agent is told of drains.
func (c *coord) tell(id drain.AgentID, open []drain.Open) {
	a := c.w.agents[slices.IndexFunc(c.w.agents, func(a *agent) bool { return a.id == id })]
	for _, d := range open {
		// A node that has not declared is told as a replica of a gateway would be, and is not asked
		// any more when it declares.
		declared := a.population != drain.Nodes || c.declared[a] != nil
		phase := c.ledger.Status(c.w.now, drain.AtBarrier, d.Pod.UID).Phase
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

func (c *coord) write(s *stream, open []drain.Open, released []drain.Release, first bool) {
	l, session, expiry := s.link, s.session, drain.Holder{Replica: c.name, Epoch: fmt.Sprint(c.epoch)}
	k := s.conn
	if k.closed[1] {
		return
	}
	at := c.w.now
	c.w.send(&c.proc, &l.a.proc, k, 1, func() { l.receive(k, at, session, expiry, open, released, first) })
}

// end ends a stream from this side.
func (c *coord) end(s *stream, lost bool) {
	if s.over {
		return
	}
	s.over = true
	c.streams = slices.DeleteFunc(c.streams, func(o *stream) bool { return o == s })
	id := s.link.a.id
	if c.ledger.Current(id, s.session) {
		delete(c.heard, id)
		c.lost[id] = c.w.at
		c.log("%s is disconnected, session %d", s.link.a.name, s.session)
	}
	c.ledger.Disconnect(c.w.now, id, s.session)
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
func (c *coord) declare(a *agent, session uint64, routes []drain.Route) ([]drain.Open, bool) {
	open, ok := c.ledger.Declare(a.id, session, a.population, routes)
	if ok {
		if c.departed[a.id] != "" {
			delete(c.declared, a) // it had left, and owed nothing
		}
		delete(c.departed, a.id)
		c.noteDeclared(a, routes)
	}
	c.tell(a.id, open)
	c.settle()
	return open, ok
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
		for _, s := range c.all(drain.AtHold) {
			c.checkDeparted(s)
		}
	}
	c.settle()
	return ok
}

// report takes in reports.
func (c *coord) report(a *agent, asOf time.Time, session uint64, reports []said) bool {
	if !c.ledger.Current(a.id, session) {
		return false
	}
	var plain []drain.Report
	var telling []drain.Report
	for _, r := range reports {
		plain = append(plain, r.Report)
		r.at = asOf.Sub(epoch)
		if r.Gate == drain.AtBarrier {
			c.log("%s reports %s %s quiet=%t sent=%t at the barrier", a.name, r.UID, r.State, r.NoConnections,
				r.HasSent)
			c.learn(a, r.Report)
			continue
		}
		if had, known := c.heard[a.id][r.UID]; known && r.at < had.at {
			continue
		}
		c.heard[a.id][r.UID] = r
		if r.Number == c.numbers[r.UID] {
			telling = append(telling, r.Report)
		}
		c.log("%s reports %s %s number=%d", a.name, r.UID, r.State, r.Number)
	}
	before := c.acknowledged(a, asOf, telling) || c.acknowledgedAtBarrier(a, asOf, plain)
	c.ledger.Report(c.w.now, asOf, a.id, session, plain)
	if before {
		c.silence[a.id] = &silence{endedAt: c.w.at, acknowledged: true}
	}
	mayAcknowledge := func(r drain.Report) bool {
		return r.State >= drain.Kept || r.Gate == drain.AtBarrier && r.State == drain.Routing
	}
	if quiet := c.silence[a.id]; quiet != nil && slices.ContainsFunc(plain, mayAcknowledge) {
		quiet.expired, quiet.spokeAt = 0, c.w.at
	}
	c.settle()
	return true
}

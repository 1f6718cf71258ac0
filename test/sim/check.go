package main

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// The checks. Each has a name, by which a violation and the mutation table tell it.
const (
	// checkBacking: an allow by acknowledgement rests on a fresh word of every agent that owes, as
	// a plain record of words has it.
	checkBacking = "backing"
	// checkRouted: an allow by acknowledgement while the gateway of a live agent routes to the pod,
	// without a named reason.
	checkRouted = "routed"
	// checkLost: a request reached a pod that had stopped, or was in it when it did, without a
	// named reason.
	checkLost = "lost"
	// checkTruthName: an agent says Removed of a pod to which its gateway routes.
	checkTruthName = "truth"
	// checkHoldersName: an exclusion has ended although a holder has an expiry on it.
	checkHoldersName = "holders"
	// checkLate: a call was answered later than its hold.
	checkLate = "late"
	// checkNoAgent: a deletion is denied without an agent that has to acknowledge.
	checkNoAgent = "no-agent"
	// checkDeadline: a deletion is denied beyond the deadline of its drain.
	checkDeadline = "deadline"
	// checkOwners: a controller waits for more owners than it may.
	checkOwners = "owners"
	// checkClockName: a drain's clock is younger than this replica knew, or another one has said.
	checkClockName = "clock"
	// checkEarly: a drain was abandoned before its time.
	checkEarly = "abandoned"
	// checkDeadName: a gateway is asked to route to a pod that its agent has seen terminating.
	checkDeadName = "dead"
	// checkExcludedName: a gateway is asked to route to a pod on which a holder has an expiry, and
	// which need not be kept.
	checkExcludedName = "excluded"
	// checkEmptied: an agent took out the last target of a living pod in a pool, or one of a
	// namespace that it may not list.
	checkEmptied = "emptied"
	// checkGaveUp: a client gave up, as client-go does after ten retries, before the drain let it
	// through.
	checkGaveUp = "gave up"
	// checkBound: a replica unroutes more than half of the usable targets of a Service, and more
	// than one, as far as it knew.
	checkBound = "bound"
	// checkQueuedName: an agent is told of a drain that waits for room, or one waits for room
	// beyond its deadline, or where there is some.
	checkQueuedName = "queued"
	// checkOrder: what takes capacity is not decided in one order. All replicas together unroute
	// more than one of them may, or drain more of a budget.
	checkOrder = "order"
	// checkSuspended: a deletion waits for an agent that has let three drains in a row expire, or
	// does not wait for one that has not.
	checkSuspended = "suspended"
	// checkRightName: an agent is told of a pod in a namespace in which it has no right.
	checkRightName = "right"
	// checkExpiryName: an exclusion of the kind kernel stands though its agent is dead for as long.
	checkExpiryName = "expiry"
	// checkLeft: a drain waits for an agent that has left.
	checkLeft = "left"
	// checkSIGTERM: a pod is let stop by acknowledgement while the kernel of a live node sends to
	// it. checkHook: a hook is not answered by its bound.
	checkSIGTERM = "barrier"
	checkHook    = "hook"
	// checkStated: a pod is let stop before the wait is over that one of its Services states, or
	// that is made for the nodes that are not asked.
	checkStated = "stated"
	// checkReliance: a hold ends at Removed although what the replica knows shows that the pod's
	// barrier will not wait.
	checkReliance = "reliance"
	// checkMode: something waits for a pod that was in mode observe all its life, or excludes it.
	checkMode = "mode"
	// checkLastName: the last target of its Services leaves the queue although no call asks for it.
	checkLastName = "last"
	// checkKept: a pod that cannot have been deleted is kept out of traffic.
	checkKept = "kept out"
	// checkBack: a pod whose container was stopped, and which is ready again, is not routed again.
	checkBack = "back"
	// checkOpen, checkExclusion and checkRoutes: after quiet, a drain is open, a living pod has an
	// exclusion, or a gateway does not route what EndpointSlices say.
	checkOpen      = "open"
	checkExclusion = "exclusion"
	checkRoutes    = "routes"
)

// inside lists the checks that look into coordinators and agents, and say the rules in other words.
// The others only look at what everybody can see: answers, gateways, requests, and what is left in
// the end.
var inside = []string{checkBacking, checkHoldersName, checkClockName, checkEarly, checkDeadName, checkExcludedName,
	checkBound, checkQueuedName, checkSuspended, checkReliance, checkLastName}

// spentMost is how long before an allow the reading behind an acknowledgement may have begun: the
// freshness bound, and the longest that a report may be under way.
func (w *world) spentMost() time.Duration { return w.times.Freshness + 30*time.Second }

// share says whether the agent's gateway routes one of services.
func (a *agent) share(services []drain.Service) bool {
	return slices.ContainsFunc(services, func(s drain.Service) bool {
		return slices.ContainsFunc(a.services, func(i int) bool { return service(i) == s })
	})
}

// checkAllow looks at each agent when a drain is released, and remembers in word what each one's
// part rests on. last is what [coord.lastOf] returned when s was derived.
func (c *coord) checkAllow(p *pod, s drain.Status, wd *word, services []drain.Service, last []health.Pool) {
	w := c.w
	least := drain.Idle
	switch s.Reason {
	case drain.Acknowledged, drain.AgentsLost, drain.LastTarget:
	case drain.IdleBound, drain.BarrierWaits:
		least = drain.Removed
	case drain.NoAgents, drain.Suspended:
	default:
		return
	}
	if s.Reason == drain.Acknowledged || s.Reason == drain.BarrierWaits {
		last = nil
	}
	if wd.left && s.Reason != drain.Acknowledged {
		least = drain.Removed
	}
	if p.terminating {
		return
	}
	wd.agents = make(map[*agent]backing, len(w.agents))
	for _, a := range w.agents {
		connected, listed, ready := false, false, false
		for _, st := range c.streams {
			connected = connected || st.link.a == a
		}
		for _, e := range c.roster {
			if e.ID == a.id {
				listed, ready = true, e.Ready
			}
		}
		r, heard := c.heard[a.id][p.uid]
		routes := a.gw.routes(p.uid, last...)
		suspended := slices.ContainsFunc(s.Suspended, func(x drain.Waiting) bool { return x.Agent == a.id })
		switch {
		case !a.share(services) && !c.room[p.uid].owedBy(a):
			wd.agents[a] = backing{excuse: "ServiceUnknown"}
		case c.departed[a.id] != "":
			// What it does in its next life is another matter, if it has not learned in it.
			wd.agents[a] = backing{readAt: w.at}
			if a.unlearned {
				wd.agents[a] = backing{excuse: "Unlearned"}
			} else if routes {
				w.fail(checkRouted, "%s allows the deletion of %s by %s, but the gateway of %s, which has left, "+
					"routes to it", c.name, p.uid, s.Reason, a.name)
			}
		case suspended:
			c.checkSilent(p, a)
			wd.agents[a] = backing{excuse: "Suspended"}
		case a.right != "" && (!connected || len(c.declared[a]) == 0):
			// without the right everywhere it is not expected before it declares
			wd.agents[a] = backing{excuse: "Undeclared"}
		case connected || ready:
			excuse := ""
			if r.State == drain.Kept && c.keptAsLast(r.Kept, last) {
				excuse = "LastTarget" // whatever the reason is, which is that of the slowest: this gateway sends on
				r.State = drain.Removed + drain.State(oneIf(r.NoConnections))
			}
			none := s.Reason == drain.NoAgents || s.Reason == drain.Suspended
			if !heard || r.State < least || w.at-r.at > w.times.Freshness || none {
				w.fail(checkBacking,
					"%s allows the deletion of %s by %s, but the last report of %s is %s (heard=%t, %s old)",
					c.name, p.uid, s.Reason, a.name, r.State, heard, w.at-r.at)
				// From outside, only what the gateway does says anything. Its reload before now is
				// no excuse.
				r.readAt = w.at
			}
			if heard && r.Number != c.numbers[p.uid] {
				w.fail(checkBacking, "%s allows the deletion of %s by %s, but the last word of %s is from before "+
					"this drain: it speaks of an exclusion that is being lifted",
					c.name, p.uid, s.Reason, a.name)
			}
			wd.agents[a] = backing{readAt: r.readAt, excuse: excuse}
			switch {
			case !routes:
			case a.gw.forgot >= r.readAt && w.at-r.readAt <= w.spentMost():
				w.excuse("routed: gateway reloaded since")
			default:
				w.fail(checkRouted, "%s allows the deletion of %s by %s, but the gateway of %s routes to it", c.name,
					p.uid, s.Reason, a.name)
				return
			}
			continue
		case listed:
			wd.agents[a] = backing{excuse: "NotReady"}
		case a.unlearned:
			wd.agents[a] = backing{excuse: "Unlearned"}
		case c.lost[a.id] > 0:
			// It was connected here, and the API does not list it, or not yet.
			wd.agents[a] = backing{excuse: "Away"}
		case !a.listed:
			wd.agents[a] = backing{excuse: "Unlisted"}
		default:
			// Not heard of here: it must not have programmed its gateway.
			wd.agents[a] = backing{readAt: w.at}
			if routes {
				w.fail(checkRouted, "%s allows the deletion of %s by %s, but the gateway of %s, of which it has not "+
					"heard, routes to it", c.name, p.uid, s.Reason, a.name)
				return
			}
			continue
		}
		if routes {
			w.excuse("routed: " + wd.agents[a].excuse)
		}
	}
}

// lastOf lists the pools in which a gateway may keep a pod: of Services that have no other usable
// target, as this replica knows them now.
func (c *coord) lastOf(p *pod) (last []health.Pool) {
	for i := range c.slices {
		usable := c.targets[service(i)]
		if usable != nil && c.alive(usable) == oneIf(slices.Contains(usable, p.uid)) {
			last = append(last, pool(i))
		}
	}
	return last
}

// keptAsLast reports whether all Services in which a gateway keeps a pod are among those whose
// pools may.
func (c *coord) keptAsLast(kept string, last []health.Pool) bool {
	for i := range c.slices {
		if slices.Contains(strings.Split(kept, ","), service(i).String()) && !slices.Contains(last, pool(i)) {
			return false
		}
	}
	return kept != ""
}

// lost judges a request that reached a pod which had stopped, or was in it.
func (w *world) lost(g *gw, p *pod, how string) {
	a := g.a
	w.logf(a.name, "a request to %s is lost (%s)", p.uid, how)
	if p.halted != "" {
		w.excuse("lost: " + p.halted)
		return
	}
	// Whatever the other replicas answered: one that let the pod go by acknowledgement vouches for
	// that.
	excuse, vouched := "", false
	for _, wd := range p.words {
		why, vouches := w.excuseOf(g, p, wd, how)
		if why == "" {
			w.fail(checkLost, "a request to %s through the gateway of %s is lost (%s): %s allowed it at %s by %s",
				p.uid, a.name, how, wd.by.name, wd.at, wd.reason)
			return
		}
		if excuse == "" || vouches && !vouched {
			excuse, vouched = why, vouches
		}
	}
	w.excuse("lost: " + excuse)
}

// excuseOf says why the word of one replica does not keep the gateway from losing a request.
// vouches says that it was one by acknowledgement.
func (w *world) excuseOf(g *gw, p *pod, wd *word, how string) (why string, vouches bool) {
	a := g.a
	if wd.by == nil || !slices.Contains([]string{drain.Acknowledged.String(), drain.IdleBound.String(),
		drain.AgentsLost.String(), drain.BarrierWaits.String()}, wd.reason) {
		return "allowed by " + wd.reason, false
	}
	b, known := wd.agents[a]
	known = known && a.started <= wd.at // what an agent answers for ends with its life
	switch {
	case how == "in flight" && wd.reason == drain.IdleBound.String():
		return "IdleBound", true
	case b.excuse != "":
		return b.excuse, true
	case how == "in flight" && wd.left && wd.reason != drain.Acknowledged.String():
		return p.passedBy(a, w.times.IdleBound), true
	case g.forgot >= 0 && g.forgot >= b.readAt:
		return "gateway reloaded since", true
	case !known && a.unlearned:
		return "Unlearned", true
	case !known && (!wd.by.up || wd.by.life != wd.life):
		// Who let it go has died, and this agent was not there to hear of it.
		return "allowed by a replica that died since, and the agent is new", true
	case a.started > p.committed && w.kinds[timeTravel]:
		return "the agent started with an old list", true
	}
	return "", true
}

// passedBy says why the barrier of a pod, to which its deletion was left, did not wait for a
// request through the gateway of a. Empty: it should have. The barrier has to wait for as long as
// the hold would have, which is less if another replica has denied the deletion for some of that
// time, or has waited for Idle in its place.
func (p *pod) passedBy(a *agent, idle time.Duration) string {
	switch why := p.passed; {
	case why == nil:
		return ""
	case max(why.at-p.committed, why.at-p.leftAt) >= idle,
		slices.ContainsFunc(p.words, func(wd *word) bool { return wd.reason == drain.IdleBound.String() }):
		return "IdleBound"
	case slices.Contains([]string{"AgentDown", "Local", "Stopping"}, why.reason):
		return "the barrier did not wait: " + why.reason
	case why.reason == drain.NotEnforced.String() && p.mode == keys.Observe:
		// The mode was enforce at the hold and has changed since. In mode observe nothing waits.
		return "the barrier did not wait: " + why.reason
	default:
		return why.excused[a]
	}
}

// checkReliance looks at a deletion that this replica leaves to the pod's barrier.
func (c *coord) checkReliance(x *call) {
	w, p := c.w, x.caller.p
	w.measure("deletions that were left to the barrier")
	p.leftAt = cmp.Or(p.leftAt, w.at)
	why := ""
	switch {
	case p.host == nil || p.hooks == hooksOfOne:
		why = "not every container has the hook"
	case p.hooks == hooksShort:
		why = "its bound is too short"
	case p.hooks == hooksCutOff:
		why = "no hook of its workload has ever asked"
	case x.caller.hasty:
		why = "the grace period is too short"
	case p.observed():
		why = "its mode is observe"
	case !p.host.mayAsk():
		why = "the agent of its node may not ask"
	case !c.streaming(p.host) && w.at-c.lost[p.host.id] > admission.LookAround:
		why = "the agent of its node is not connected"
	default:
		return
	}
	w.fail(checkReliance, "%s leaves the deletion of %s to its barrier, and %s", c.name, p.uid, why)
}

// checkTruth: what the set says after a reading is what the gateway does.
func (a *agent) checkTruth(sampled time.Duration) {
	for _, s := range a.set.Exclusions() {
		if s.State >= health.Removed && a.gw.forgot < sampled && a.gw.routes(s.UID) {
			a.w.fail(checkTruthName, "%s says that %s is %s, and its gateway routes to it", a.name, s.UID, s.State)
		}
	}
}

// checkOps looks at what an agent is about to ask of its gateway.
func (a *agent) checkOps(ops []health.Op) {
	for _, op := range ops {
		uid := op.Key.Target.UID
		if op.Want == health.WantAbsent && a.bars(op.Key.Pool) && !a.w.api.find(uid).terminating {
			a.w.fail(checkEmptied, "%s asks for %s, and may not list its namespace", a.name, op)
		}
		if op.Want != health.WantRouted {
			continue
		}
		if a.dead[uid] {
			a.w.fail(checkDeadName, "%s asks for %s, and has seen the pod terminating", a.name, op)
		}
		for holder, until := range a.expiries[uid] {
			if !until.After(a.now()) {
				continue
			}
			if a.why(op.Key) != health.WhyKept {
				a.w.fail(checkExcludedName, "%s asks for %s, and %s holds an expiry on an exclusion of it", a.name, op,
					holder)
			}
		}
	}
}

// checkLast looks at a pool after a living pod was taken out by what was asked at began. If lost
// commands might still have taken out both this and another target of the pool, the agent could not
// keep one for certain.
func (a *agent) checkLast(op health.Op, began time.Duration) {
	if op.Want != health.WantRemoved || strconv.Itoa(a.gw.generation) != a.generation {
		return
	}
	unsure := 0
	for k, until := range a.unsure {
		if k.Pool == op.Key.Pool && began < until {
			unsure++
		}
	}
	if unsure > 1 && began < a.unsure[op.Key] {
		return
	}
	if p := a.w.api.find(op.Key.Target.UID); p.terminating {
		return
	}
	for _, s := range a.gw.workers[len(a.gw.workers)-1].servers {
		if s.key.Pool == op.Key.Pool && s.routed {
			return
		}
	}
	a.w.fail(checkEmptied, "%s: %s leaves nothing in the pool", a.name, op)
}

// checkHolders: an expiry that its holder has not ended, and whose time has not come, stands.
func (a *agent) checkHolders(uid drain.UID) {
	for holder, until := range a.expiries[uid] {
		if until.After(a.now()) && !slices.Contains(a.set.Held(holder), uid) {
			a.w.fail(checkHoldersName, "%s has no exclusion on %s any more, and %s holds an expiry on it", a.name, uid,
				holder)
		}
	}
}

func (c *coord) checkInTime(x *call) {
	if x.hold == nil || c.frozen > 0 && start.Add(c.frozen).After(x.began) {
		return
	}
	// A question to the opener that was asked before the end may be answered after it.
	if late := min(c.now().Sub(x.End), c.w.at-x.claimed); late > 10*time.Millisecond {
		c.w.fail(checkLate, "%s answers for %s %s after the hold's end", c.name, x.caller.p.uid, late)
	}
}

func (c *coord) checkDeny(h *call, s drain.Status) {
	w, uid := c.w, h.caller.p.uid
	if len(s.Waiting) == 0 {
		w.fail(checkNoAgent, "%s denies the deletion of %s, and waits for no agent", c.name, uid)
	}
	c.checkDeparted(s)
	for _, x := range s.Waiting {
		if quiet := c.silence[x.Agent]; quiet != nil && x.Connected && quiet.expired >= drain.StrikesOut &&
			!c.tries(quiet, uid) {
			w.fail(checkSuspended, "%s denies the deletion of %s for %s, which has let %d drains in a row expire",
				c.name, uid, x.Name, quiet.expired)
		}
	}
	// What was decided before a replica was frozen may be sent once it goes on.
	frozen := c.frozen > 0 && start.Add(c.frozen).After(h.began)
	if begun, ok := c.begun[uid]; ok && w.at-begun > w.times.Deadline+10*time.Millisecond && !frozen {
		w.fail(checkDeadline, "%s denies the deletion of %s %s after its drain began", c.name, uid, w.at-begun)
	}
}

// checkHeldOwners checks for how many owners the calls of a controller wait, as this replica has
// decided. One that was refused often may wait beside others, counting claims of calls that were
// never answered, and one whose drain was released when another began to wait: a gateway that is
// reloaded after that takes the release back.
func (c *coord) checkHeldOwners() {
	most, held := coordinator.OwnersHeld["DaemonSet"], map[drain.UID]bool{}
	for _, uid := range sorted(c.room) {
		if c.ledger.Status(c.now(), drain.AtHold, uid).Phase == drain.Released {
			c.room[uid].released = true
		}
	}
	for _, x := range c.holds {
		r := x.Request()
		if r.Controller != "DaemonSet" || r.Turn != coordinator.TurnJudged || x.hold.Over {
			continue
		}
		d := c.room[r.Pod.UID]
		if first := !held[r.Pod.UID]; x.caller.p.crowded >= 4 || first && d != nil && d.released {
			most++
		}
		held[r.Pod.UID] = true
	}
	if len(held) > most {
		c.w.fail(checkOwners, "%s holds the calls of a controller for %d owners", c.name, len(held))
	}
}

// denied counts the reviews in a row that one life of each replica has refused for its drain.
func (x *caller) denied(answers []verdict) {
	had := x.denials
	x.denials = map[*coord]denials{}
	for _, v := range answers {
		if c := v.waits; c != nil {
			x.excused = x.excused || v.queued
			n := 1
			if had[c].life == c.life {
				n += had[c].n
			}
			x.denials[c] = denials{c.life, n}
		}
	}
}

// checkPatience: eleven holds and ten waits are longer than a drain.
func (w *world) checkPatience(x *caller) {
	for c, d := range x.denials {
		if d.n == 11 && d.life == c.life && c.frozen == 0 {
			w.fail(checkGaveUp, "a client has asked %d times for the deletion of %s, and was denied by the drain "+
				"each time", d.n, x.p.uid)
		}
	}
}

// checkClock: nothing that is asked, or that another replica has told, makes a drain younger.
func (c *coord) checkClock(s drain.Status, elapsed time.Duration) {
	uid := s.Pod.UID
	begun, ok := c.begun[uid]
	if !ok {
		return
	}
	told := c.now().Add(-min(elapsed, c.w.times.Deadline+c.w.at-begun))
	if oldest, known := c.oldest[uid]; known && oldest.Before(told) {
		told = oldest
	}
	if s.Since.After(told) {
		c.w.fail(checkClockName, "%s counts the drain of %s from %s, and has heard of %s", c.name, uid,
			s.Since.Sub(start), told.Sub(start))
	}
	c.oldest[uid] = s.Since
}

// tries reports whether the drain of a pod may wait for an agent that let drains expire: for one
// hold after agents were told, and as the only one in each 5 s of this replica's clock.
func (c *coord) tries(quiet *silence, uid drain.UID) bool {
	d := c.room[uid]
	if d == nil || !d.told || c.w.at-d.toldAt > c.w.times.Hold {
		return false
	}
	c.w.measure("denials for an agent that is suspended")
	began := epoch.Add(d.toldAt + c.w.skews[c.node].ahead(d.toldAt)).Truncate(drain.TrialEvery)
	if quiet.tried != uid && quiet.triedAt.Equal(began) {
		return false
	}
	quiet.tried, quiet.triedAt = uid, began
	return true
}

// asking are the calls about the pod of an open drain, as this replica answered them: a plain
// record beside the ledger.
type asking struct {
	// denied: one was denied. doubtful: one was allowed, answered late, or made in an earlier life.
	// brokenOff: the last one was. deleted: one was no eviction.
	denied, doubtful, brokenOff, deleted bool
}

// noteAnswer records how a call was answered.
func (c *coord) noteAnswer(x *call) {
	is := c.calls[x.caller.p.uid]
	if is == nil || x.hold == nil {
		return
	}
	gone := x.ctx.Err() != nil
	is.brokenOff = gone && c.now().Before(x.End)
	is.denied = is.denied || !x.Allowed
	is.doubtful = is.doubtful || x.Allowed || gone && !is.brokenOff || c.now().Sub(x.End) > 100*time.Millisecond
}

// checkKeptOut looks, once a tick, for drains that only keep their pods out of traffic: every call
// was denied, or the last one broken off, for so long that no deletion can follow.
func (c *coord) checkKeptOut() {
	w := c.w
	for _, uid := range sorted(c.calls) {
		is, since := c.calls[uid], w.at-c.answered[uid]
		waits := slices.ContainsFunc(c.inbound, func(x *call) bool { return x.caller.p.uid == uid })
		if !is.denied || is.doubtful || waits || c.frozen > 0 || !c.ledger.Pod(uid).Draining {
			continue
		}
		most := w.times.Abandon + drain.RequestLimit
		if is.brokenOff && !w.unreadable() && !w.kinds[partition] {
			most = 20 * time.Second // 10 s, and reads of other pods
		}
		if since > most+3*time.Second {
			w.fail(checkKept, "%s keeps %s out of traffic %s after the last call, and denied all", c.name, uid, since)
		}
	}
}

// checkDecided looks at a drain after an answer that was not its own.
func (c *coord) checkDecided(uid drain.UID, allowed bool) {
	is, waits := c.calls[uid], slices.ContainsFunc(c.holds, func(x *call) bool { return x.caller.p.uid == uid })
	open := c.ledger.Pod(uid).Draining
	switch {
	case is == nil:
	case allowed:
		if !is.doubtful { // further allows renew nothing
			c.answered[uid] = c.w.at
		}
		is.doubtful = true
	case !open:
		c.forbidden[uid] = true
		c.log("%s is given back: its budget forbids the eviction", uid)
		c.w.measure("drains that budgets ended")
		c.closed(uid)
	case is.denied && !is.doubtful && !is.deleted && !waits && c.restarted[uid] == 0:
		c.w.fail(checkKept, "%s keeps %s out of traffic, and its budget forbids the eviction", c.name, uid)
	}
}

// checkSeldom: a caller that comes back after its drain was abandoned is allowed by the second
// call, unless the drain was queued or another caller was there.
func (w *world) checkSeldom(x *caller) {
	x.excused = x.excused || x.p.calls > 1
	for c, d := range x.denials {
		if d.n > 2 && d.n == x.tries && d.life == c.life && c.frozen == 0 && !x.excused {
			w.fail(checkGaveUp, "a client that comes back seldom was denied %d times for the drain of %s", d.n,
				x.p.uid)
		}
	}
}

func (c *coord) checkAbandoned(uid drain.UID) {
	most := c.w.times.Abandon
	if is := c.calls[uid]; is != nil && is.brokenOff {
		most = 10 * time.Second
	}
	if since := c.w.at - c.answered[uid]; since < most {
		c.w.fail(checkEarly, "%s abandons the drain of %s %s after the last answer", c.name, uid, since)
	}
}

// acknowledged says whether one of reports, which a has just made, is certainly an acknowledgement
// in time of an open drain.
func (c *coord) acknowledged(a *agent, asOf time.Time, reports []drain.Report) bool {
	now := c.now()
	for _, r := range reports {
		if _, open := c.begun[r.UID]; !open || r.State < drain.Removed || now.Sub(asOf) > c.w.times.Freshness {
			continue
		}
		if d := c.room[r.UID]; d == nil || !slices.ContainsFunc(a.services, func(i int) bool {
			return d.services[service(i)]
		}) {
			continue
		}
		if s := c.ledger.Status(now, drain.AtHold, r.UID); now.Before(s.Deadline) {
			return true
		}
	}
	return false
}

// expired records who was certainly silent in a drain that is over its deadline. It counts less
// than the ledger does: agents whose stream was open all the time, and drains for which a client
// still asked in the end.
func (c *coord) expired(s drain.Status) {
	w := c.w
	if s.Reason != drain.Deadline || c.now().Before(s.Deadline) {
		return
	}
	d := c.room[s.Pod.UID]
	if d == nil || !d.told {
		return
	}
	begun, deadline := s.Begun.Sub(start), s.Deadline.Sub(start)
	for _, x := range s.Waiting {
		quiet := c.silence[x.Agent]
		i := slices.IndexFunc(c.streams, func(st *stream) bool {
			return st.link.a.id == x.Agent && c.ledger.Current(x.Agent, st.Number)
		})
		if quiet == nil || i < 0 || c.streams[i].began > begun || quiet.endedAt > begun || x.State >= drain.Removed ||
			x.State == drain.Kept {
			continue
		}
		if deadline-d.toldAt < w.times.Deadline/2 || begun < quiet.lastAt {
			continue
		}
		quiet.expired++
		quiet.lastAt = deadline
	}
}

// noteSilent records who has let drains expire at another replica, as that has told. It counts no
// strikes of an agent that has connected here and never there.
func (c *coord) noteSilent(silent []drain.Silence) {
	for _, s := range silent {
		quiet := c.silence[s.Agent]
		since := c.w.at - time.Duration(s.SinceMillis)*time.Millisecond
		if quiet == nil || quiet.acknowledged && quiet.endedAt >= since {
			continue
		}
		quiet.endedAt = min(quiet.endedAt, since)
		connected := c.heard[s.Agent] != nil || c.lost[s.Agent] > 0 // now, or once
		if quiet.spokeAt >= since || connected && !s.Met {
			continue
		}
		if s.Strikes >= drain.StrikesOut && quiet.expired < drain.StrikesOut {
			c.w.measure("agents whose third strike another replica told")
		}
		last := c.w.at - time.Duration(s.LastMillis)*time.Millisecond
		if quiet.lastAt = max(quiet.lastAt, last); s.Strikes > quiet.expired {
			// The ledger may have counted as many, and the last of them later: what overlaps that
			// one is none.
			quiet.expired, quiet.lastAt = s.Strikes, max(quiet.lastAt, c.struckAt(s.Agent))
		}
	}
}

// struckAt is when the last drain expired that this replica counts, as it tells the others.
func (c *coord) struckAt(id drain.AgentID) time.Duration {
	for _, s := range c.ledger.Shared(c.now()).Silent {
		if s.Agent == id {
			return c.w.at - time.Duration(s.LastMillis)*time.Millisecond
		}
	}
	return 0
}

// checkRight looks at each pod of which an agent is told.
func (c *coord) checkRight(a *agent, uid drain.UID) {
	if p := c.w.api.find(uid); a.right != "" && p.drainPod().Namespace != a.right {
		c.w.fail(checkRightName, "%s tells %s of %s, which is in namespace %s", c.name, a.name, uid,
			p.drainPod().Namespace)
	}
}

// noteDeclared records who must acknowledge a drain although it does not declare a Service of it
// any more.
func (c *coord) noteDeclared(a *agent, routes []drain.Route) {
	routed := func(d *admitted, routes []drain.Route) bool {
		return slices.ContainsFunc(routes, func(r drain.Route) bool { return d.services[r.Service] })
	}
	for _, d := range c.room {
		if routed(d, c.declared[a]) && !routed(d, routes) {
			d.former[a] = true
		}
	}
	c.declared[a] = routes
}

// owedBy says whether a must acknowledge the drain, which may be nil, by what it has declared
// before.
func (d *admitted) owedBy(a *agent) bool { return d != nil && d.former[a] }

// checkDeparted looks for agents that have left among those that a drain waits for.
func (c *coord) checkDeparted(s drain.Status) {
	for _, x := range slices.Concat(s.Waiting, s.Suspended) {
		switch {
		case c.departed[x.Agent] == "":
		case c.mayWait(x.Agent):
			c.w.excuse(forgotten)
		default:
			c.w.fail(checkLeft, "%s waits with the drain of %s for %s, which has left", c.name, s.Pod.UID, x.Name)
		}
	}
}

const forgotten = "left: forgotten before the watch, which was late, listed the agent"

// noteRelisted records which agents have left and are listed only now that the ledger may have
// forgotten them: it forgets an agent that is neither listed nor connected after Times.Away. The
// watch was silent then from before the agent was created until after that.
func (c *coord) noteRelisted(all []drain.Expected) {
	for _, e := range all {
		listed := slices.ContainsFunc(c.roster, func(o drain.Expected) bool { return o.ID == e.ID })
		if !listed && c.departed[e.ID] != "" && c.heard[e.ID] == nil && c.w.at-c.lost[e.ID] >= c.w.times.Away {
			c.relisted[e.ID] = c.w.at
		}
	}
}

// mayWait reports whether the ledger may wait for an agent that has left as it does for one that it
// does not know: while the agent's pod is listed as ready, or for Times.Away. A replica that was
// frozen may send what it decided before that.
func (c *coord) mayWait(id drain.AgentID) bool {
	at, relisted := c.relisted[id]
	ready := slices.ContainsFunc(c.roster, func(e drain.Expected) bool { return e.ID == id && e.Ready })
	return relisted && (ready || c.w.at-max(at, c.frozen) < c.w.times.Away+10*time.Millisecond)
}

// checkSilent: who is not waited for has been silent for as long as three drains take that come one
// after the other, the first of which may have begun before. Of its last word another may have been
// older.
func (c *coord) checkSilent(p *pod, a *agent) {
	w := c.w
	// An agent that is not listed may be forgotten, or not: what it let expire is not known here.
	quiet := c.silence[a.id]
	if a.right == "" && quiet != nil && !quiet.unsure && w.at-quiet.endedAt < w.times.Deadline {
		w.fail(checkSuspended, "%s does not wait for %s, which has acknowledged a drain %s ago, to delete %s", c.name,
			a.name, w.at-quiet.endedAt, p.uid)
	}
}

// asking records what the ledger was told of the Services' targets, and of who judges whether there
// is room.
func (c *coord) asking(uid drain.UID, targets []drain.Targets, place drain.Placing) *admitted {
	d := c.room[uid]
	if d == nil {
		d = &admitted{services: map[drain.Service]bool{}, former: map[*agent]bool{}}
		c.room[uid] = d
	}
	d.place, d.askedAt = place, c.w.at
	for _, t := range targets {
		d.services[t.Service] = true
		if t.Usable != nil {
			c.targets[t.Service] = t.Usable
		}
	}
	return d
}

// noteAdopted records a drain that another replica has told of.
func (c *coord) noteAdopted(claim drain.Claim) {
	uid := claim.Pod.UID
	if !c.ledger.Pod(uid).Draining {
		return
	}
	targets := make([]drain.Targets, len(claim.Services))
	for i, s := range claim.Services {
		targets[i].Service = s
	}
	place := drain.Granted
	if claim.Queued {
		place = drain.Deferred
		// What it judged itself, without reaching the other one, it may have admitted just now.
		if d := c.room[uid]; d != nil && d.place == drain.Judged && !c.ledger.Pod(uid).Queued {
			place = drain.Judged
		}
	}
	// no client has asked for it here: it lasts for up to 45 s more than at the others
	c.asking(uid, targets, place).askedAt = -agreed
	c.isDeleted(uid)
	if _, ok := c.begun[uid]; !ok {
		c.begins(uid)
		c.w.measure("drains that were adopted")
	}
	if is := c.calls[uid]; is != nil {
		is.doubtful = true
	}
	c.checkClock(c.ledger.Status(c.now(), drain.AtHold, uid), time.Duration(claim.ElapsedMillis)*time.Millisecond)
}

// taken says whether another replica has said that it unroutes the pod.
func (c *coord) taken(uid drain.UID) bool {
	return slices.ContainsFunc(c.others, func(claim drain.Claim) bool { return claim.Pod.UID == uid && !claim.Queued })
}

// checkRoom looks at the drains that are not queued any more: of no Service does this replica
// unroute more than half of what it was told is usable, but for what another replica had room for,
// or had unrouted already.
func (c *coord) checkRoom() {
	w := c.w
	for _, uid := range sorted(c.room) {
		d := c.room[uid]
		if d.told || c.ledger.Pod(uid).Queued {
			continue
		}
		d.told, d.toldAt, d.ordered = true, w.at, d.askedAt > w.parted+agreed
		d.exempt = d.place == drain.Granted || c.taken(uid)
		w.measure("drains that agents were told of")
		if !d.exempt && d.askedAt != w.at && c.isLast(uid, d) {
			w.fail(checkLastName, "%s unroutes %s, which no call asks for and which is the last target", c.name, uid)
		}
		if d.place == drain.Deferred {
			w.fail(checkOrder, "%s unroutes %s, which has to wait at the opener", c.name, uid)
		}
		if d.exempt {
			w.measure("drains that agents were told of because another replica had room, or had unrouted the pod " +
				"already")
			continue
		}
		for s := range d.services {
			if usable := c.targets[s]; slices.Contains(usable, uid) {
				if n, most := c.unrouted(usable, false), max(1, len(usable)/2); n > most {
					w.fail(checkBound, "%s unroutes %s, the %dth of %d usable targets of %s, at most %d may be", c.name,
						uid, n, len(usable), s, most)
				}
				c.checkTogether(d, s)
			}
		}
	}
}

// isLast reports whether a pod is the only target left of all its Services that an agent routes, as
// this replica knows them.
func (c *coord) isLast(uid drain.UID, d *admitted) (last bool) {
	for s := range d.services {
		if usable := c.targets[s]; c.CouldRoute([]drain.Service{s}) {
			if last = slices.Contains(usable, uid) && c.alive(usable) == 1; !last {
				return false
			}
		}
	}
	return last
}

// unrouted counts the usable targets that this replica unroutes and, if all is set, those that
// another one does, or had room for.
func (c *coord) unrouted(usable []drain.UID, all bool) (n int) {
	for _, uid := range usable {
		if d := c.room[uid]; d != nil && d.told && (all || !d.exempt) || all && c.taken(uid) {
			n++
		}
	}
	return n
}

// alive counts the usable targets of which this replica does not know that they are dead.
func (c *coord) alive(usable []drain.UID) (n int) {
	for _, uid := range usable {
		if s := c.ledger.Status(c.now(), drain.AtHold, uid); s.Phase != drain.Closed || s.Reason != drain.PodDeleted {
			n++
		}
	}
	return n
}

// agreed is how long replicas must have known of each other for what they do to be in one order: a
// poll and a claim may be under way.
const agreed = 2500 * time.Millisecond

// checkTogether counts how many of a Service's targets, as this replica knows them, all replicas
// together unroute. What was asked for while they did not know of each other is only measured. What
// was not held, and what is only started again, is asked for at one replica. What ends does not end
// everywhere at one moment.
func (c *coord) checkTogether(d *admitted, s drain.Service) {
	w := c.w
	if d.background {
		return
	}
	usable, all, ordered := c.targets[s], 0, 0
	for _, uid := range usable {
		any, inOrder := w.drained(uid, true)
		all, ordered = all+oneIf(any), ordered+oneIf(inOrder)
	}
	most := max(1, len(usable)/2)
	if ordered > most && d.askedAt > w.parted+agreed {
		w.fail(checkOrder, "%s unroutes one more of %d usable targets of %s: all replicas together %d", c.name,
			len(usable), s, ordered)
	}
	if all > most {
		w.measure("drains beyond half of what is usable, all replicas together, asked for while they did not know " +
			"of each other")
	}
}

// drained says whether some replica has a drain of a pod open, which agents were told of if told is
// set. inOrder says that it was asked for while replicas knew of each other.
func (w *world) drained(uid drain.UID, told bool) (any, inOrder bool) {
	if w.api.find(uid).terminating {
		return false, false
	}
	for _, o := range w.coords {
		d := o.room[uid]
		if o.up && d != nil && (d.told || !told) && !d.background && o.restarted[uid] == 0 &&
			w.at-o.answered[uid] < w.times.Abandon-agreed {
			any, inOrder = true, inOrder || d.askedAt > w.parted+agreed && (d.ordered || !d.told)
		}
	}
	return any, inOrder
}

// checkBudget looks at an eviction that this replica is about to let drain: of one budget, all
// replicas together drain no more pods than it allows. Else two evictions would refuse each other,
// each with its pod unrouted.
func (c *coord) checkBudget(p *pod) {
	w, allowed, ahead := c.w, 1-c.w.api.want[0], 0
	drains := c.ledger.Pod(p.uid).Draining
	if !w.api.budget || !slices.Contains(p.services, 0) || drains || !c.pods[p.uid].ready || w.at <= w.parted+agreed {
		return
	}
	for _, e := range c.slices[0].endpoints {
		if e.ready && !e.terminating {
			// The opener gave back what a budget forbade, others that had allowed it have not yet.
			_, inOrder := w.drained(e.uid, false)
			allowed, ahead = allowed+1, ahead+oneIf(inOrder && e.uid != p.uid && !c.forbidden[e.uid])
		}
	}
	if ahead > 0 && ahead >= allowed {
		w.fail(checkOrder, "%s lets the eviction of %s drain, and %d other pods of its budget are being drained, "+
			"which allows %d", c.name, p.uid, ahead, allowed)
	}
}

func (c *coord) checkTold(uid drain.UID) {
	if c.ledger.Pod(uid).Queued {
		c.w.fail(checkQueuedName, "%s tells an agent of the drain of %s, which is queued", c.name, uid)
	}
}

// checkQueued looks at the drains that wait for room, once a tick.
func (c *coord) checkQueued() {
	w := c.w
	for _, uid := range sorted(c.room) {
		d := c.room[uid]
		if d.told {
			continue
		}
		s := c.ledger.Status(c.now(), drain.AtHold, uid)
		if d.place == drain.Deferred {
			continue // the opener knows
		}
		w.measure("seconds that drains were queued")
		if s.Phase == drain.Queued && !c.now().Before(s.Deadline) {
			w.fail(checkQueuedName, "%s keeps the drain of %s queued %s beyond its deadline", c.name, uid,
				c.now().Sub(s.Deadline))
		}
		room := true
		for s := range d.services {
			usable := c.targets[s]
			room = room && (!slices.Contains(usable, uid) || c.unrouted(usable, true) < max(1, c.alive(usable)/2))
		}
		if room && !c.isLast(uid, d) || c.taken(uid) {
			w.fail(checkQueuedName, "%s keeps the drain of %s queued, and there is room", c.name, uid)
		}
	}
}

// all returns the open drains at a gate.
func (c *coord) all(gate drain.Gate) (open []drain.Status) {
	uids, _, _ := c.ledger.Oldest(gate, math.MaxInt)
	for _, uid := range uids {
		open = append(open, c.ledger.Status(c.now(), gate, uid))
	}
	return open
}

// checkEnd is for the end of the quiet time: nothing is lost.
func (w *world) checkEnd() {
	for _, c := range w.coords {
		for _, s := range c.all(drain.AtHold) {
			w.fail(checkOpen, "%s has an open drain of %s: %s", c.name, s.Pod.UID, s.Phase)
		}
		if len(c.bars) > 0 || len(c.all(drain.AtBarrier)) > 0 {
			open := []drain.UID{}
			for _, s := range c.all(drain.AtBarrier) {
				open = append(open, s.Pod.UID)
			}
			w.fail(checkOpen, "%s has barriers of %v, and %d hooks wait", c.name, open, len(c.bars))
		}
		if len(c.holds) > 0 {
			w.fail(checkOpen, "%s holds %d calls", c.name, len(c.holds))
		}
	}
	for _, a := range w.agents {
		if !a.listed {
			continue
		}
		var watches client.Watches = a.watches
		if a.kernel != nil {
			a.kernel.checkEnd()
			watches = a.observed
		}
		for _, l := range a.links {
			if uids := watches.Watched(l.holder()); l.conn != nil && len(uids) > 0 {
				w.fail(checkExclusion, "%s observes %v for %s", a.name, uids, l.c.name)
			}
		}
		for _, s := range a.set.Exclusions() {
			if p := w.api.find(s.UID); !p.terminating {
				w.fail(checkExclusion, "%s has an exclusion on %s, which lives", a.name, s.UID)
			}
		}
		if a.journal != nil {
			for _, e := range a.journal.Exclusions() {
				if p := w.api.find(e.Pod.UID); !p.terminating {
					w.fail(checkExclusion, "%s has %s in its journal, which lives", a.name, e.Pod.UID)
				}
			}
		}
		for _, service := range a.services {
			ready, well := 0, 0
			for _, e := range w.api.slices[service].endpoints {
				if e.ready && !a.lapsedSick(service, e) {
					ready++
					well += oneIf(w.well(service, e.uid))
				}
			}
			open := 2*well < ready
			for _, e := range w.api.slices[service].endpoints {
				k := health.Key{Pool: pool(service), Target: target(e)}
				want := e.ready && (open || w.well(service, e.uid))
				if a.lapsedSick(service, e) {
					w.excuse("not routed: its exclusion lapsed, and no probe has succeeded since")
					continue
				}
				if routed := a.gw.up && a.gw.read(k).Routed; routed != want {
					w.fail(checkRoutes, "the gateway of %s routes to %s=%t, EndpointSlices and probes say %t", a.name,
						k, routed, want)
				}
			}
			if w.checked && service == 0 && ready > 0 {
				w.measure("pools that were probed, in the end")
				if open {
					w.measure("pools that fail open, in the end")
				}
			}
			for _, k := range a.gw.owned() {
				if k.Pool != pool(service) || !a.gw.read(k).Routed {
					continue
				}
				if !slices.ContainsFunc(w.api.slices[service].endpoints, func(e endpoint) bool {
					return target(e) == k.Target && e.ready
				}) {
					w.fail(checkRoutes, "the gateway of %s routes to %s, EndpointSlices do not", a.name, k)
				}
			}
		}
	}
}

// why is what a's set says of a target, unknown if it has none.
func (a *agent) why(k health.Key) health.Why {
	for _, d := range a.set.Targets() {
		if d.Key == k {
			return d.Why
		}
	}
	return health.WhyUnknown
}

// lapsedSick says whether a's exclusion on a pod has lapsed, and no probe can succeed: it stays
// out, and does not count.
func (a *agent) lapsedSick(service int, e endpoint) bool {
	return a.why(health.Key{Pool: pool(service), Target: target(e)}) == health.WhyLapsed && !a.w.well(service, e.uid)
}

// well says whether probes call the pod healthy, if there are any.
func (w *world) well(service int, uid drain.UID) bool {
	return !w.checked || service != 0 || w.api.find(uid).sick <= w.at
}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

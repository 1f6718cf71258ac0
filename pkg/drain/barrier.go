package drain

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The barrier is the second gate of a pod: it is asked for when the pod is terminating and its
// containers wait to be told to stop. It is a drain like the one at the hold, with the same levels,
// freshness, sessions and suspensions. It differs in the following points.
//
// The agents that observe are asked ([Watch]), and also the directed agents that had not stopped
// routing to the pod when the drain at the hold ended here, because the deletion did not wait for
// them. Without such a drain, all directed agents are asked. Directed agents are told by an
// ordinary Open and do not name a gate.
//
// A gateway that has no other endpoint keeps sending to a terminating pod (KEP-1669). It is then
// only asked to be idle, and the drain is released with the reason LastTarget. An agent cannot know
// whether this is the case: if its kernel is late, it sees a last target where the Service has
// another one. So a report of Kept or Routing is accepted only while the replica sees no other
// ready endpoint ([Barrier.Last]), and has seen none for [lastSettle], because the replica may be
// late too. The replica may also not know yet of a Service that lists a young pod, so Routing is
// not accepted until it must have learned of that. Agents report one state for all Services. If
// only some of the Services have no other endpoint, Routing may be about the others, and only Kept
// is accepted ([Barrier.LastOne]).
//
// A gateway that has not learned yet that a pod is ready looks like one that has removed it, and
// sends to it as soon as it learns. So a report by an agent whose gateway was not seen to send to
// the pod during the barrier counts only once the gateway must have learned of it
// ([Barrier.Young]).
//
// The wait for agents that were not in the sample runs in parallel with the acknowledgements, from
// the deletion on. So do waits that Services state for consumers that can never acknowledge; these
// are only time, so the agent on the pod's node makes them, and they keep no place here.
//
// The barrier ends when the pod is deleted ([Ledger.GatePassed]). If that is never observed, the
// barrier is abandoned Times.Memory after its deadline.

// Barrier is what the agent on the pod's node asks for, with what the replica knows of the pod.
type Barrier struct {
	Pod Pod
	// By is the agent that asks.
	By AgentID
	// Services are those that list the pod, or recently did.
	Services []Service
	// Targets are the pod's addresses.
	Targets []netip.AddrPort
	// Since is the time of the deletion, Bound how long after it the wait ends.
	Since time.Time
	Bound time.Duration
	// Observe: nothing waits. Directed agents are also asked to watch the pod, not to exclude it,
	// and no agent is suspended for not answering. See [Ledger.EndBarrier].
	Observe bool
	// Stated is the longest wait, from the deletion on, that one of Services states.
	Stated time.Duration
	// Last: in no Service do gateways have another endpoint, so that they may keep sending to the
	// pod. LastOne: this is so in some of the Services, and in each of the others every gateway
	// knows another endpoint, so that a report of Kept is about the former only. LastHere is
	// LastOne for the pod's node, by the traffic policy of a Service: only the report of the agent
	// that asks is accepted.
	Last, LastOne, LastHere bool
	// Young is how long after the deletion a gateway may still not have learned that the pod is
	// ready.
	Young time.Duration
	// Listed is as in [Watch].
	Listed bool
}

// barrier is the additional state of a drain at the barrier.
type barrier struct {
	by      AgentID
	bound   time.Duration
	targets []netip.AddrPort
	stated  time.Duration
	// observe and listed are as in Barrier. inFlight: an agent has reported connections in flight.
	observe, listed, inFlight bool
	// sample has the agents that are asked, nil if all are. rest is how long the barrier waits for
	// the nodes outside of it.
	rest   time.Duration
	sample map[AgentID]struct{}
	// learnt are the agents of which it has taught how long they take.
	learnt map[AgentID]struct{}
	// removedBy are the directed agents that need not acknowledge: they had stopped routing to the
	// pod when its drain at the hold ended here with the pod. That drain keeps them until the
	// barrier is opened. Nil: there was no such drain.
	removedBy bits
	// last, lastOne and lastHere are as in Barrier, each as the time since which it is true; zero:
	// it is not.
	last, lastOne, lastHere time.Time
	// young is as in Barrier: the longest of the calls.
	young time.Duration
}

const (
	// lastSettle is how long no endpoint must have been ready before gateways may keep the pod.
	lastSettle = time.Second
)

// sample chooses which nodes are asked, and learns how long these take.
type sample struct {
	scope    Scope
	sampling Sampling
	learnt   durations
}

// Sampling configures when ScopeAuto and ScopeQuorum ask only a sample of the nodes.
type Sampling struct {
	// AllUpTo is the largest number of nodes for which ScopeAuto asks all. Size is how many nodes
	// ScopeQuorum asks. Learn is how many times must have been measured before a sample is enough.
	AllUpTo, Size, Learn int
	// Bound is the bound of pods that state none. 0: [Times.Deadline].
	Bound time.Duration
}

// DefaultSampling is the sampling for real clusters. Tests with fewer agents use another.
func DefaultSampling() Sampling { return Sampling{AllUpTo: 200, Size: 50, Learn: 1000} }

// OpenBarrier opens the barrier of a pod that is terminating, or joins the open one, and returns
// its status. It closes the drain of the pod at the hold, if one is open. Unless b.Observe is set,
// none can be opened afterwards. Its deadline may become earlier, never later. The barrier of a
// deleted pod stays Closed, with the reason PodDeleted.
func (l *Ledger) OpenBarrier(now time.Time, b Barrier) Status {
	l.GatePassed(now, AtHold, b.Pod.UID)
	d := l.drain(b.Pod, AtBarrier)
	if b.Since.After(now) {
		b.Since = now
	}
	is := &d.barrier
	if !d.open && d.reason == PodDeleted {
		return l.status(now, d)
	}
	if !d.open {
		h := &drain{reason: PodDeleted}
		if !b.Observe {
			h = l.drain(b.Pod, AtHold)
		}
		*is = barrier{
			by: b.By, bound: b.Bound, targets: slices.Clone(b.Targets), stated: b.Stated, young: b.Young,
			removedBy: h.barrier.removedBy, observe: b.Observe, listed: b.Listed,
		}
		if h.reason != PodDeleted {
			// It is not opened again: all later questions about this pod belong to the barrier.
			l.close(now, h, PodDeleted)
			h.barrier.removedBy = nil
		}
		for _, s := range b.Services {
			d.services[s] = true
		}
		l.draw(d)
		l.updateContext(now, d, b)
		l.begin(now, d, b.Since)
		d.former = h.former
		l.told(now, d)
		return l.status(now, d)
	}
	l.serve(d, b.Services)
	if is.by != b.By {
		is.by = b.By // its agent has reconnected
		if is.sample != nil {
			is.sample[b.By] = struct{}{}
		}
		d.rosterAt = 0
		l.change(d, l.owing(d))
	}
	if b.Since.Before(d.since) {
		d.since = b.Since
		l.touch(d)
	}
	if b.Bound < is.bound || b.Stated > is.stated || b.Young > is.young {
		is.bound, is.stated, is.young = min(is.bound, b.Bound), max(is.stated, b.Stated), max(is.young, b.Young)
		l.touch(d)
	}
	l.updateContext(now, d, b)
	return l.status(now, d)
}

// updateContext records what is known of other endpoints.
func (l *Ledger) updateContext(now time.Time, d *drain, b Barrier) {
	for _, of := range []struct {
		since *time.Time
		is    bool
	}{{&d.barrier.last, b.Last}, {&d.barrier.lastOne, b.LastOne}, {&d.barrier.lastHere, b.LastHere}} {
		switch {
		case of.is && of.since.IsZero():
			*of.since = now
			l.touch(d)
		case !of.is && !of.since.IsZero():
			*of.since = time.Time{}
			l.touch(d)
		}
	}
}

// removedBy returns the agents that have acknowledged d, at the hold. Removed is enough only if the
// hold waited for Idle as long as it may. Other agents may route a Service that was not known then
// to list the pod.
func (l *Ledger) removedBy(now time.Time, d *drain) bits {
	letGo, enough := bits{}.cleared(len(l.slots)), Idle
	if !d.quiescingAt.IsZero() && now.Sub(d.quiescingAt) >= l.times.IdleBound {
		enough = Removed
	}
	said := l.reportsOn(d)
	for _, a := range l.owing(d) {
		// A gateway that keeps the last target drops it when the pod is terminating.
		if state, last, _ := l.stateOf(now, said[a.slot], d); state >= enough && !last {
			letGo.set(a.slot)
		}
	}
	return letGo
}

// draw chooses which nodes are asked.
func (l *Ledger) draw(d *drain) {
	b := &d.barrier
	if l.scope == ScopeLocal && !b.observe { // in mode observe, no hook names the agent on the node
		b.sample = map[AgentID]struct{}{b.by: {}}
		return
	}
	// Connected agents first, because the others may not exist any more, and then by what all
	// replicas compute alike.
	type candidate struct {
		id   AgentID
		away bool
		rank uint64
	}
	var all []candidate
	hash, name := fnv.New64a(), []byte(d.pod.UID+" ")
	seen := bits{}.cleared(len(l.slots))
	for s := range d.listedBy() {
		if of := l.services[s]; of != nil {
			for a := range of.agents[AtBarrier] {
				if a.sampled() && (a.session != 0 || a.Ready) && !seen.has(a.slot) {
					seen.set(a.slot)
					hash.Reset()
					_, _ = hash.Write(append(name, a.ID...)) // cannot fail
					all = append(all, candidate{a.ID, a.session == 0, hash.Sum64()})
				}
			}
		}
	}
	if l.scope == ScopeAll || l.scope == ScopeAuto && len(all) <= l.sampling.AllUpTo || len(all) <= l.sampling.Size ||
		l.learnt.n < l.sampling.Learn {
		return
	}
	b.sample, b.rest = map[AgentID]struct{}{b.by: {}}, l.learnt.percentile(0.999)
	slices.SortFunc(all, func(x, y candidate) int {
		return cmp.Or(number(x.away)-number(y.away), cmp.Compare(x.rank, y.rank), cmp.Compare(x.id, y.id))
	})
	for _, c := range all[:l.sampling.Size] {
		b.sample[c.id] = struct{}{}
	}
}

// sampled reports whether a need not be asked at the barrier if enough others are. One that has not
// declared may be a replica of a gateway.
func (a *agent) sampled() bool {
	return a.declared && a.population == Nodes
}

// owesBarrier reports whether a may have to acknowledge d, which is at the barrier.
func (a *agent) owesBarrier(d *drain) bool {
	b := &d.barrier
	if a.mayBeAsked(AtBarrier, d) {
		return b.asks(a)
	}
	if b.observe {
		return a.observes && a.mayBeAsked(AtHold, d)
	}
	return a.mayBeAsked(AtHold, d) && !b.removedBy.has(a.slot)
}

// asks reports whether a is asked, which may be asked at the barrier.
func (b *barrier) asks(a *agent) bool {
	_, drawn := b.sample[a.ID]
	return b.sample == nil || drawn || !a.sampled()
}

// EndBarrier ends the barrier of a pod whose deletion does not wait: one that observes, or one that
// was opened before the pod's mode was known. It reports whether an agent had something in flight
// to the pod. Agents that only watch it stop that and delete nothing, because the pod may still
// exist.
func (l *Ledger) EndBarrier(now time.Time, uid UID, observes bool) (inFlight bool) {
	d := l.at(AtBarrier, uid)
	if d == nil || !d.open || d.barrier.observe != observes {
		return false
	}
	l.close(now, d, Abandoned)
	return d.barrier.inFlight
}

// directs reports whether a learns of an open barrier of s by an Open.
func (s *subject) directs(a *agent) bool {
	d := s.drains[AtBarrier]
	return d != nil && d.open && a.gateOf(d) == AtHold && a.owesBarrier(d)
}

// gateOf returns the gate of a's reports about d.
func (a *agent) gateOf(d *drain) Gate {
	if d.gate == AtBarrier && (d.barrier.observe || a.mayBeAsked(AtBarrier, d)) {
		return AtBarrier
	}
	return AtHold
}

// opened returns d as it is sent to agents: as a Watch if observed, else as an Open.
func (l *Ledger) opened(d *drain, observed bool) Open {
	o := Open{Pod: d.pod, Since: d.since, Number: d.number}
	if observed {
		o.Watch = &Watch{
			Pod: d.pod, Since: d.since, Deadline: l.deadline(d), Number: d.number, Targets: d.barrier.targets,
			Observe: d.barrier.observe, Listed: d.barrier.listed,
		}
	}
	return o
}

// about returns the drain that the report r of a is about.
func (s *subject) about(a *agent, r Report) *drain {
	if s == nil {
		return nil
	}
	b := s.drains[AtBarrier]
	if r.Gate == AtBarrier {
		return b
	}
	d := s.drains[AtHold]
	if (d == nil || !d.open) && b != nil && b.open && a.gateOf(b) == AtHold {
		return b
	}
	return d
}

// lastIn reports whether the pod of d has no other target in any of the Services in which a gateway
// keeps it, as named by [Report.Kept]. A deleted target does not count.
func (l *Ledger) lastIn(d *drain, kept string) bool {
	for name := range strings.SplitSeq(kept, ",") {
		namespace, name, _ := strings.Cut(name, "/")
		usable := l.usable[Service{namespace, name}]
		if usable == nil || slices.ContainsFunc(usable, func(other UID) bool {
			o := l.at(AtHold, other)
			return other != d.pod.UID && (o == nil || o.open || o.reason != PodDeleted)
		}) {
			return false
		}
	}
	return true
}

// tooEarly reports whether r says that its gateway does not route to the pod of d, and was read
// when the gateway may not have learned yet that the pod was ready. Read again later, it counts.
func (d *drain) tooEarly(r *received) bool {
	return d.gate == AtBarrier && r.Gate == AtBarrier && r.State >= Removed && !r.HasSent &&
		r.at.Before(d.since.Add(d.barrier.young))
}

// barrierState returns the state that r counts as in d, whether it is accepted because the pod is
// the last target and, if time alone may change that, when.
func (l *Ledger) barrierState(now time.Time, d *drain, r *received) (state State, last bool, until time.Time) {
	if r.Gate != d.gate {
		return r.State, false, time.Time{}
	}
	if d.tooEarly(r) {
		return StateUnknown, false, time.Time{}
	}
	if r.State != Routing && r.State != Kept {
		return r.State, false, time.Time{}
	}
	since := d.barrier.last
	if since.IsZero() && r.State == Kept {
		since = d.barrier.lastOne
	}
	if since.IsZero() && r.by.ID == d.barrier.by && r.State == Kept {
		since = d.barrier.lastHere
	}
	settled := since.Add(lastSettle)
	if r.State == Routing {
		settled = later(settled, d.since.Add(d.barrier.young))
	}
	switch {
	case d.gate == AtHold && r.State == Kept && l.lastIn(d, r.Kept):
	case d.gate == AtHold:
		return r.State, false, time.Time{}
	case since.IsZero():
		return r.State, false, time.Time{}
	case now.Before(settled):
		return r.State, false, settled
	}
	if r.NoConnections {
		return Idle, true, time.Time{}
	}
	return Removed, true, time.Time{}
}

// length returns how long d lasts at most.
func (l *Ledger) length(d *drain) time.Duration {
	if d.gate == AtBarrier {
		return d.barrier.bound
	}
	return l.times.Deadline
}

// stated adds to the status of a barrier the waits that do not depend on acknowledgements: the
// stated one, and that for agents outside of the sample, until which it is not released.
func (l *Ledger) stated(now time.Time, d *drain, s Status) Status {
	rest := d.barrier.rest
	if rest > 0 {
		rest = max(rest, d.barrier.young) // they may not have learned of it
	}
	s.Stated = max(d.barrier.stated, rest)
	s.Cut = d.since.Add(s.Stated).After(s.Deadline)
	until := d.since.Add(rest)
	if s.Phase != Released || s.Reason == Deadline || !now.Before(until) {
		return s
	}
	if !now.Before(s.Deadline) {
		s.Reason = Deadline
		return s
	}
	s.Phase, s.Reason = Quiescing, ReasonNone
	s.recheck(now, until)
	return s
}

// ReadyAgain records that the pod became ready at a time, by the clock of its node. If that is
// after the stop of its container ([Place]), the drain for that ends. It reports whether one did.
func (l *Ledger) ReadyAgain(now time.Time, uid UID, ready time.Time) bool {
	d := l.at(AtHold, uid)
	if d == nil || !d.open || d.stopped.IsZero() || !ready.After(d.stopped) || d.inFlight > 0 {
		return false
	}
	l.close(now, d, Abandoned)
	return true
}

// durations is a histogram of durations in which old values lose weight.
type durations struct {
	n       int
	buckets [64]int
}

const (
	durationFirst  = 10 * time.Millisecond
	durationGrowth = 1.2
	// maxDurations is when the weight of the values so far is halved.
	maxDurations = 20_000
)

func (h *durations) add(d time.Duration) {
	i := 0
	if d > durationFirst {
		i = int(math.Ceil(math.Log(float64(d)/float64(durationFirst)) / math.Log(durationGrowth)))
	}
	h.buckets[min(i, len(h.buckets)-1)]++
	if h.n++; h.n < maxDurations {
		return
	}
	h.n = 0
	for i := range h.buckets {
		h.buckets[i] /= 2
		h.n += h.buckets[i]
	}
}

// percentile returns a time that at least share of the values do not exceed. It is at most 20 % too
// high.
func (h *durations) percentile(share float64) time.Duration {
	need := int(math.Ceil(share * float64(h.n)))
	for i, n := range h.buckets {
		if need -= n; need <= 0 {
			return time.Duration(float64(durationFirst) * math.Pow(durationGrowth, float64(i)))
		}
	}
	return time.Duration(math.MaxInt64)
}

// learn records how long a's gateway took to stop routing to the pod of d, once. A node that was
// not seen to send may never have had rules for the pod: its time says nothing of others.
func (l *Ledger) learn(now time.Time, a *agent, d *drain, is *received) {
	if is.HasSent && is.State >= Removed && a.sampled() && a.gateOf(d) == AtBarrier && now.Before(l.deadline(d)) {
		l.learnLength(a, d, now.Sub(d.since))
	}
}

// learnLength records that a's gateway took so long to stop routing to the pod of d. The owner of a
// pod decides how long its barrier lasts, and all barriers wait for what is learned. So a short one
// teaches nothing, because the slow nodes are missing from it, and a long one no more than the
// usual bound.
func (l *Ledger) learnLength(a *agent, d *drain, took time.Duration) {
	usual := l.sampling.Bound
	if _, already := d.barrier.learnt[a.ID]; already || l.length(d) < usual*3/4 {
		return
	}
	if d.barrier.learnt == nil {
		d.barrier.learnt = map[AgentID]struct{}{}
	}
	d.barrier.learnt[a.ID] = struct{}{}
	l.learnt.add(min(took, usual))
}

// StatedWait is the wait that a Service states for consumers that can never acknowledge.
type StatedWait struct {
	// Wait begins at the deletion.
	Wait time.Duration
	// Quiet is 0 if the wait always lasts for Wait. Else it ends once no connection to the pod has
	// been open, and none has come, for Quiet.
	Quiet time.Duration
}

// StatedWait.Quiet is never shorter than leastQuiet, and is usualQuiet if the annotation has no
// checkInterval: the usual one of AWS is 30 s. A health check may arrive leastMargin late.
const leastQuiet, usualQuiet, leastMargin = 10 * time.Second, 40 * time.Second, 5 * time.Second

// String returns the wait as in an annotation.
func (w StatedWait) String() string {
	if w.Quiet > 0 {
		return "at most " + w.Wait.String()
	}
	return w.Wait.String()
}

// ParseStatedWait parses the annotation lameduck.io/stated-wait. It accepts a duration, or the
// health check of a load balancer such as "checkInterval=10s,unhealthyThreshold=3,timeout=5s". A
// check stands for interval * threshold + timeout. With the prefix "at most " a duration may also
// be followed by a comma and a check: the duration is then the wait. An error names the part that
// cannot be parsed.
func ParseStatedWait(text string) (w StatedWait, err error) {
	rest, atMost := strings.CutPrefix(strings.TrimSpace(text), "at most ")
	if first, others, more := strings.Cut(rest, ","); !strings.Contains(first, "=") {
		w.Wait, err = time.ParseDuration(strings.TrimSpace(first))
		if err != nil || w.Wait < 0 || more && !atMost {
			return StatedWait{}, fmt.Errorf("stated wait %.100q: neither a duration nor checkInterval=, "+
				"unhealthyThreshold= and timeout=", text)
		}
		if rest = others; !more {
			if atMost {
				w.Quiet = usualQuiet
			}
			return w, nil
		}
	}
	var interval, timeout time.Duration
	threshold := 1
	seen := map[string]bool{}
	for part := range strings.SplitSeq(rest, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		var err error
		switch {
		case seen[name]:
			return StatedWait{}, fmt.Errorf("stated wait %.100q: %s is there twice", text, name)
		case name == "checkInterval":
			interval, err = time.ParseDuration(value)
		case name == "timeout":
			timeout, err = time.ParseDuration(value)
		case name == "unhealthyThreshold":
			threshold, err = strconv.Atoi(value)
		default:
			return StatedWait{}, fmt.Errorf("stated wait %.100q: %.100q is not one of checkInterval, "+
				"unhealthyThreshold and timeout", text, name)
		}
		if err != nil {
			return StatedWait{}, fmt.Errorf("stated wait %.100q: %s: %.100s", text, name, err)
		}
		seen[name] = true
	}
	if !seen["checkInterval"] || interval <= 0 || timeout < 0 || threshold < 1 || threshold > 1000 ||
		max(interval, timeout) > time.Hour {
		return StatedWait{}, fmt.Errorf("stated wait %.100q: checkInterval must be positive, timeout not negative, "+
			"both an hour at most, unhealthyThreshold 1 to 1000", text)
	}
	if w.Wait == 0 {
		w.Wait = time.Duration(threshold)*interval + timeout
	}
	if atMost {
		w.Quiet = max(interval+max(timeout, leastMargin), leastQuiet)
	}
	return w, nil
}

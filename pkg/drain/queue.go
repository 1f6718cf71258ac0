package drain

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// A drain takes capacity from its Services before anything else does: the pod is still ready, no
// budget has been asked, and no replacement was started. So that one client with too many rights
// cannot empty a Service, at most half of a Service's usable targets are unrouted at a time, and at
// least one. Drains beyond that are Queued: their clock runs, callers wait or come again, and
// agents do not learn of them.
//
// A usable target of a Service takes capacity if an open drain here, or, as far as known, on
// another replica, has unrouted it. All replicas are asked about every deletion, and one of them,
// the opener, judges for all: see package peers and [Placing]. A pod that is not among the usable
// targets, or whose Services' targets are unknown, needs no capacity.
//
// The oldest drain goes first. A drain that is queued for one Service does not reserve capacity in
// another: a younger drain that has capacity everywhere goes before it. A drain that is not queued
// never becomes so, because agents have already learned of it.
//
// A queued drain ends like every other. At its deadline the deletion is allowed. The gateways then
// react to the terminating endpoint as they would without Lameduck, and no agent gets a strike.

// capacity is the state of the queue.
type capacity struct {
	// queued are the open drains that wait for capacity, usable the last known targets of each
	// Service. elsewhere are the pods that other replicas unroute.
	queued    map[*drain]struct{}
	usable    map[Service][]UID
	elsewhere map[UID]struct{}
}

// queueing is the state of a drain in the queue.
type queueing struct {
	// queued: it waits for capacity, and agents have not learned of it.
	queued bool
	// place is which replica judges whether there is capacity for it.
	place Placing
	// toldAt is when it got capacity, and agents learned of it.
	toldAt time.Time
}

// Placing is which replica judges whether a drain has the capacity that it needs.
type Placing uint8

const (
	// Judged: this replica, which is the opener or reaches none.
	Judged Placing = iota
	// Granted: the opener has given the drain capacity.
	Granted
	// Deferred: the opener has queued the drain.
	Deferred
)

// Place is what another replica knows of a drain, and whether the pod is to be deleted.
type Place struct {
	Is Placing
	// Elapsed is how long the drain has run on the other replica. 0: that replica has no such
	// drain.
	Elapsed time.Duration
	// Restart: a container is about to be stopped and its pod stays. Such a drain is not counted
	// against the pod: it uses none of the time of a later drain, and is no evidence that deletions
	// are refused. If the pod has an open drain, its Is is kept, and a drain that was opened for a
	// deletion remains one. [Ledger.ReadyAgain] ends it.
	Restart bool
	// Stopped is when that began, by the clock of the pod's node. Zero: when the drain is opened.
	// Of several the latest counts, because a request about an earlier one may come late. If the
	// clock was set back in between, the pod is excluded until the drain is abandoned.
	Stopped time.Time
	// Evicted: the pod is evicted, so that its PodDisruptionBudget may still refuse.
	Evicted bool
}

// admit unqueues the drains for which there is capacity, the oldest first. Other pods may have been
// deleted since a drain was queued. If that has made its pod the last target, it stays queued, and
// so routed, until a call asks for it: asked, if not nil, is the drain that is asked for now.
func (l *Ledger) admit(now time.Time, asked *drain) {
	if len(l.queued) == 0 {
		return
	}
	waiting := slices.SortedFunc(maps.Keys(l.queued), func(a, b *drain) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.pod.UID, b.pod.UID))
	})
	room := map[Service]int{}
	for _, d := range waiting {
		full := false
		for s := range d.services {
			if !l.needsRoom(d, s) {
				continue
			}
			if _, counted := room[s]; !counted {
				room[s] = l.room(s)
			}
			full = full || room[s] <= 0
		}
		if d.place == Deferred {
			continue
		}
		// What another replica has unrouted has taken its capacity already.
		if _, taken := l.elsewhere[d.pod.UID]; !taken {
			if d.place != Granted && (full || d != asked && l.isLast(d)) {
				continue
			}
			for s := range room {
				if l.needsRoom(d, s) {
					room[s]--
				}
			}
		}
		d.queued = false
		delete(l.queued, d)
		l.told(now, d)
	}
}

// needsRoom reports whether unrouting the pod of d takes a usable target from s.
func (l *Ledger) needsRoom(d *drain, s Service) bool {
	_, usable := slices.BinarySearch(l.usable[s], d.pod.UID)
	return usable
}

// isLast reports whether the pod of d is known to be the only target that is left of each of its
// Services that an agent routes.
func (l *Ledger) isLast(d *drain) (last bool) {
	for s := range d.services {
		if !l.Asks(AtHold, []Service{s}) {
			continue
		}
		others := slices.ContainsFunc(l.usable[s], func(uid UID) bool { return uid != d.pod.UID && !l.isDeleted(uid) })
		if last = l.needsRoom(d, s) && !others; !last {
			return false
		}
	}
	return last
}

// isDeleted reports whether a pod is known to be terminating or deleted.
func (l *Ledger) isDeleted(uid UID) bool {
	d := l.at(AtHold, uid)
	return d != nil && !d.open && d.reason == PodDeleted
}

// Shared is what one replica sends to the others.
type Shared struct {
	// Drains are the open drains at the hold, except those for a restart, the oldest first.
	Drains []Claim `json:"drains"`
	// Silent are the agents that let its last drains expire, in the order of their IDs.
	Silent []Silence `json:"silent,omitempty"`
}

// Shared returns what the other replicas receive.
func (l *Ledger) Shared(now time.Time) Shared { return Shared{l.claims(now), l.silences(now)} }

// Polled records what the other replicas sent last. The pods that they unroute take capacity here
// too. They may not be among the drains of this replica, because a replica that cannot reach the
// opener decides by itself. If adopt is set, this replica has just started and opens their drains
// too, so that it continues where it was. A pod that has a drain here keeps it; its clock starts at
// the earlier of the two starts. A drain that is queued there is queued here until a call asks for
// it, because how many targets its Services have is not known yet.
func (l *Ledger) Polled(now time.Time, others []Shared, adopt bool) {
	l.elsewhere = map[UID]struct{}{}
	for _, of := range others {
		l.believe(now, of.Silent)
		for _, c := range of.Drains {
			if !c.Queued {
				l.elsewhere[c.Pod.UID] = struct{}{}
			}
		}
	}
	l.admit(now, nil)
	for _, of := range others {
		for _, c := range of.Drains {
			if !adopt {
				return
			}
			place := Place{Is: Granted, Elapsed: time.Duration(c.ElapsedMillis) * time.Millisecond}
			if c.Queued {
				place.Is = Deferred
			}
			targets := make([]Targets, len(c.Services))
			for i, s := range c.Services {
				targets[i].Service = s
			}
			l.Ask(now, c.Pod, targets, place)
			l.Unanswered(c.Pod.UID, false) // an earlier life of this replica may have allowed it
		}
	}
}

// unrouted reports whether agents exclude a pod for a drain of this replica or of another.
func (l *Ledger) unrouted(uid UID) bool {
	d := l.at(AtHold, uid)
	_, elsewhere := l.elsewhere[uid]
	return elsewhere || d != nil && d.open && !d.queued
}

// room returns how many more targets of s may be unrouted now. It may be negative.
func (l *Ledger) room(s Service) int {
	alive, taken := 0, 0
	for _, uid := range l.usable[s] {
		switch {
		case l.isDeleted(uid):
			// The cache that has it as usable is stale.
			continue
		case l.unrouted(uid):
			// Agents take a pod out of every Service, also of one that was not known to list it
			// when its drain was asked for.
			taken++
		}
		alive++
	}
	return max(1, alive/2) - taken
}

// Claim is an open drain as GET /v1/replica returns it to another replica. It is not the claim of
// POST /v1/claims, which is wire.Claim.
type Claim struct {
	Pod      Pod       `json:"pod"`
	Services []Service `json:"services"`
	// ElapsedMillis is how long it has run.
	ElapsedMillis int64 `json:"elapsedMillis"`
	Queued        bool  `json:"queued,omitempty"`
}

func (l *Ledger) claims(now time.Time) []Claim {
	claims := []Claim{}
	l.each(func(d *drain) {
		if d.open && d.gate == AtHold && d.stopped.IsZero() {
			claims = append(claims, Claim{
				Pod: d.pod, Services: slices.SortedFunc(maps.Keys(d.services), byService),
				ElapsedMillis: now.Sub(d.since).Milliseconds(), Queued: d.queued,
			})
		}
	})
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(cmp.Compare(b.ElapsedMillis, a.ElapsedMillis), cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	return claims
}

func byService(a, b Service) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// Standing is what this replica knows of a pod.
type Standing struct {
	// Draining reports whether it has an open drain at the hold. Since is when that began, zero if
	// it is for the restart of a container, whose age a deletion does not inherit.
	Draining bool
	Since    time.Time
	// Spent is the time that its abandoned drains have used.
	Spent time.Duration
	// Queued reports whether that drain waits for capacity, so that the pod is still routed.
	Queued bool
	// Terminating reports whether the pod is being drained, here or by another replica, or
	// terminating or deleted: agents that observe may know that before EndpointSlices show it.
	Terminating bool
	// Refused is when deletions of the pod that were allowed turned out to be refused by something
	// else, at least for the last Times.Memory: their drain was abandoned, or a call asked again
	// after the time that an allow may take.
	Refused []time.Time
}

// Pod returns what is known of a pod.
func (l *Ledger) Pod(uid UID) (s Standing) {
	_, s.Terminating = l.elsewhere[uid]
	of := l.subjects[uid]
	if of == nil {
		return s
	}
	for _, d := range of.drains {
		s.Terminating = s.Terminating || d != nil && (d.open || d.reason == PodDeleted)
	}
	if d := of.drains[AtHold]; d != nil {
		s.Refused, s.Spent = slices.Clone(d.refused), d.spent
		if d.open {
			s.Draining, s.Queued = true, d.queued
			if d.stopped.IsZero() {
				s.Since = d.since
			}
		}
	}
	return s
}

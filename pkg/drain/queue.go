package drain

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// A drain takes capacity from its Services before anything else does: the pod is still ready, no
// budget has been asked, and no replacement was started. So that a door left open somewhere cannot
// empty a Service, at most half of a Service's usable targets are unrouted at one time, and at
// least one. The drains that must wait for room are Queued: their clock runs, those who ask wait or
// come again, and no agent hears of them.
//
// What takes room in a Service is a usable target of it that is unrouted by an open drain here or,
// as they say, of another replica. All replicas are asked about every deletion, and one of them,
// the opener, judges for all: see package peers and [Placing]. A pod that is not among the usable
// targets, or whose Services' targets are not known, needs no room.
//
// The oldest drain goes first. One that waits for room in one Service does not keep it free in
// another: a younger drain that has room everywhere goes before it. No drain that is not queued
// ever becomes so: agents have been told.
//
// A queued drain ends like every other. Past its deadline the deletion is allowed; the gateways
// then follow the terminating endpoint as they would without Lameduck, and no agent is blamed. It
// is not unrouted for that: it is the one who asks that is bounded.

// capacity is what the queue goes by.
type capacity struct {
	// queued are the open drains that wait for capacity, usable what was last said of each
	// Service's targets. elsewhere are the pods that other replicas unroute.
	queued    map[*drain]struct{}
	usable    map[Service][]UID
	elsewhere map[UID]struct{}
}

// queueing is how a drain stands in the queue.
type queueing struct {
	// queued says that it waits for capacity, and that no agent was told.
	queued bool
	// place says who judges whether there is capacity for it.
	place Placing
	// toldAt is when there was, so that agents were told.
	toldAt time.Time
}

// Placing says who judges whether a drain has the capacity that it needs.
type Placing uint8

const (
	// Judged: this replica does, which is the opener or has none.
	Judged Placing = iota
	// Granted: the opener has given it capacity.
	Granted
	// Deferred: the opener has it wait for capacity.
	Deferred
)

// Place is where a drain stands: what another replica knows of it, and whether the pod is to be
// deleted.
type Place struct {
	Is Placing
	// Elapsed is how long the drain has run on the other replica. 0: it is not known there.
	Elapsed time.Duration
	// Restart says that a container is about to be stopped and its pod stays. Such a drain is not
	// counted against the pod: it takes nothing of the time of a later one, and does not say that
	// deletions are refused. The place of the pod's open drain stays, and a drain that was opened
	// for a deletion stays one. [Ledger.Back] ends it.
	Restart bool
}

// admit unqueues the drains for which there is room, the oldest first.
func (l *Ledger) admit(now time.Time) {
	if len(l.queued) == 0 {
		return
	}
	waiting := make([]*drain, 0, len(l.queued))
	for d := range l.queued {
		waiting = append(waiting, d)
	}
	slices.SortFunc(waiting, func(a, b *drain) int {
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
		// What another replica has unrouted has taken its room already.
		if _, taken := l.elsewhere[d.pod.UID]; !taken {
			if full && d.place != Granted {
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

// needsRoom reports whether to unroute the pod of d takes a usable target from s.
func (l *Ledger) needsRoom(d *drain, s Service) bool {
	_, usable := slices.BinarySearch(l.usable[s], d.pod.UID)
	return usable
}

// Shared is what one replica tells the others.
type Shared struct {
	// Drains are the open drains at the hold, the oldest first.
	Drains []Claim `json:"drains"`
	// Silent are the agents that let its last drains expire, in the order of their IDs.
	Silent []Silence `json:"silent,omitempty"`
}

// Shared returns what the other replicas are told.
func (l *Ledger) Shared(now time.Time) Shared { return Shared{l.claims(now), l.silences(now)} }

// Polled takes in what the other replicas told last. The pods that they unroute take capacity here
// as well: replicas do not always agree, because one that the opener did not answer decides for
// itself. If adopt is set, this replica has just started and opens their drains too, so that it
// continues where it was. A pod that has a drain here keeps it; its clock starts at the earlier of
// the two starts. A drain that waits for capacity there waits here until it is asked for: how many
// targets its Services have is not known yet.
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
	l.admit(now)
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
		}
	}
}

// unrouted reports whether agents take a pod out of routing for this replica's drain, or another's.
func (l *Ledger) unrouted(uid UID) bool {
	d := l.at(AtHold, uid)
	_, elsewhere := l.elsewhere[uid]
	return elsewhere || d != nil && d.open && !d.queued
}

// room returns how many more targets of s may be unrouted now. It may be negative.
func (l *Ledger) room(s Service) int {
	alive, taken := 0, 0
	for _, uid := range l.usable[s] {
		d := l.at(AtHold, uid)
		switch {
		case d != nil && !d.open && d.reason == PodDeleted:
			// Who said that it is usable had not heard yet.
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

// Claim is an open drain as one replica tells it to another.
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
		if d.open && d.gate == AtHold && !d.restart {
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

// Standing is where a pod stands, as far as is known here.
type Standing struct {
	// Draining reports whether it has an open drain at the hold, since Since.
	Draining bool
	Since    time.Time
	// Queued reports whether that drain waits for capacity, so that the pod is still routed.
	Queued bool
	// Terminating reports whether the pod is being drained, here or by another replica, or dead:
	// agents that observe may know that it is going although EndpointSlices do not say so yet.
	Terminating bool
	// Refused is when drains of the pod were allowed and abandoned all the same, in the last
	// Times.Memory at least.
	Refused []time.Time
}

// Pod returns where a pod stands.
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
		s.Refused = slices.Clone(d.allowedAlive)
		if d.open {
			s.Draining, s.Since, s.Queued = true, d.since, d.queued
		}
	}
	return s
}

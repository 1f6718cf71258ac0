package drain

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// A drain takes capacity from its Services before anything else does: the pod is still ready, no budget has been asked, and no
// replacement was started. So that a door left open somewhere cannot empty a Service, at most half of a Service's usable targets
// are unrouted at one time, and at least one. The drains that must wait for room are Queued: their clock runs, those who ask wait
// or come again, and no agent hears of them.
//
// What takes room in a Service is a usable target of it that is unrouted by an open drain here or,
// as they say, of another replica. All replicas are asked about every deletion, and one of them,
// the opener, judges for all: see package peers and [Placing]. A pod that is not among the usable
// targets, or whose Services' targets are not known, needs no room.
//
// The oldest drain goes first. One that waits for room in one Service does not keep it free in another: a younger drain that has room
// everywhere goes before it. No drain that is not queued ever becomes so: agents have been told.
//
// A queued drain ends like every other. Past its deadline the deletion is allowed; the gateways then follow the terminating endpoint as
// they would without Lameduck, and no agent is blamed. It is not unrouted for that: it is the one who asks that is bounded.

// AskBounded is [Ledger.Ask] for one who knows the targets of the Services: the drain is Queued while one of them has no room. What is
// said of a Service's targets holds for all of its drains, until somebody says it anew.
func (l *Ledger) AskBounded(now time.Time, pod Pod, targets []Targets) Status {
	return l.AskPlaced(now, pod, targets, Place{})
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

// Place is what another replica knows of a drain.
type Place struct {
	Is Placing
	// Elapsed is how long the drain has run there. 0: it is not known there.
	Elapsed time.Duration
}

// AskPlaced is [Ledger.AskBounded] for a replica that knows what another one says of the drain: a witness, which leaves capacity to the opener's
// judgment, or the opener, which a witness asks. The drain's clock starts at the earlier of the two starts.
func (l *Ledger) AskPlaced(now time.Time, pod Pod, targets []Targets, place Place) Status {
	d := l.at(AtHold, pod.UID)
	dead := d != nil && !d.open && d.reason == Dead // there will be no drain that needs to know
	services := make([]Service, 0, len(targets))
	for _, t := range targets {
		services = append(services, t.Service)
		if t.Usable != nil && !dead {
			l.usable[t.Service] = t.Usable
		}
	}
	return l.ask(now, pod, services, place)
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

// Elsewhere tells which pods other replicas unroute, as they last said. These take room here as
// well. Replicas do not always agree: one that the opener did not answer decides for itself.
func (l *Ledger) Elsewhere(now time.Time, claims []Claim) {
	l.elsewhere = map[UID]struct{}{}
	for _, c := range claims {
		if !c.Queued {
			l.elsewhere[c.Pod.UID] = struct{}{}
		}
	}
	l.admit(now)
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
		case d != nil && !d.open && d.reason == Dead:
			// Who said that it is usable had not heard yet.
			continue
		case l.unrouted(uid):
			// Agents take a pod out of every Service, also of one that was not known to list it when its drain was asked for.
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

// Claims returns the open drains at the hold, the oldest first.
func (l *Ledger) Claims(now time.Time) []Claim {
	claims := []Claim{}
	l.each(func(d *drain) {
		if d.open && d.gate == AtHold && !d.restart {
			claims = append(claims, Claim{
				Pod: d.pod, Services: slices.SortedFunc(maps.Keys(d.services), byService), ElapsedMillis: now.Sub(d.since).Milliseconds(), Queued: d.queued,
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

// Adopt opens the drains that another replica has open, so that a replica which starts goes on where it was. Those that have a drain
// here keep it; their clock starts at the earlier of the two starts. A drain that waits for capacity there waits here until it is asked for: how many
// targets its Services have is not known yet.
func (l *Ledger) Adopt(now time.Time, claims []Claim) {
	for _, c := range claims {
		place := Place{Granted, time.Duration(c.ElapsedMillis) * time.Millisecond}
		if c.Queued {
			place.Is = Deferred
		}
		l.ask(now, c.Pod, c.Services, place)
	}
}

// Queued reports whether uid has an open drain that waits for room, so that its pod is still routed.
func (l *Ledger) Queued(uid UID) bool {
	d := l.at(AtHold, uid)
	return d != nil && d.open && d.queued
}

package journal

import (
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// slack is how much later than in truth a lease ends on disk when it is written, as a part of what it has left. It is written again
	// when less than margin of that is left.
	slack  = 1. / 2
	margin = 1. / 6
	// deadMost bounds how many dead pods are kept that no lease names. A cluster that deletes more of them in drain.Times.Memory forgets the
	// oldest here; its EndpointSlices have had the time to say so themselves.
	deadMost = 10_000
)

// deadMemory is how long a dead pod is kept: as long as the ledger remembers it.
var deadMemory = drain.DefaultTimes().Memory

// Tombstone is what the journal knows of one.
type Tombstone struct {
	Pod drain.Pod
	// Since is the oldest start that any holder gave for the drain. The zero time: only that the pod is dead was ever said.
	Since time.Time
	// Leases says until when each holder's lease stands. After Open that may be over: ending it is for the caller, whose rules want more than time.
	Leases map[string]time.Time
	// Dead says that the pod was seen terminating or gone.
	Dead bool
}

// book is the journal's content. Its methods report whether the disk must follow.
type book struct {
	stones  map[drain.UID]*stone
	holders map[string]*lease
}

// stone is one tombstone. Neither dead nor held: there is none.
type stone struct {
	pod     drain.Pod
	since   time.Time
	holders map[string]bool
	// deadAt is when the pod was first said to be dead. The zero time: it lives.
	deadAt time.Time
	// laid is the version of the book in which a holder was last added: what must be on disk before the gateway is touched.
	laid uint64
}

// lease is that of one holder on all its tombstones: every renewal is of all.
type lease struct {
	// expires is when it ends in truth, stored when by the file.
	expires, stored time.Time
	stones          int
}

func newBook() book {
	return book{stones: map[drain.UID]*stone{}, holders: map[string]*lease{}}
}

// bury adds holder to the tombstone of pod. laid says that this is a new lease, changed that the file must be written at some time.
func (b *book) bury(now time.Time, pod drain.Pod, holder string, since, expires time.Time) (laid, changed bool) {
	s := b.stones[pod.UID]
	if s == nil {
		s = &stone{pod: pod, since: since, holders: map[string]bool{}}
		b.stones[pod.UID] = s
	}
	if s.since.IsZero() || since.Before(s.since) {
		s.since, changed = since, true
	}
	if s.pod.Name == "" {
		s.pod = pod
	}
	l := b.holders[holder]
	if l == nil {
		l = &lease{}
		b.holders[holder] = l
	}
	if !s.holders[holder] {
		s.holders[holder], laid = true, true
		l.stones++
	}
	return laid, l.renew(now, expires) || changed || laid
}

// renew extends every lease of holder.
func (b *book) renew(now time.Time, holder string, expires time.Time) (changed bool) {
	l := b.holders[holder]
	return l != nil && l.renew(now, expires)
}

func (l *lease) renew(now, expires time.Time) (changed bool) {
	if expires.After(l.expires) {
		l.expires = expires
	}
	left := float64(l.expires.Sub(now))
	if l.stored.Before(l.expires.Add(time.Duration(left * margin))) {
		l.stored, changed = l.expires.Add(time.Duration(left*slack)), true
	}
	return changed
}

// lift ends holder's lease on uid.
func (b *book) lift(uid drain.UID, holder string) (changed bool) {
	s := b.stones[uid]
	if s == nil || !s.holders[holder] {
		return false
	}
	delete(s.holders, holder)
	if l := b.holders[holder]; l.stones > 1 {
		l.stones--
	} else {
		delete(b.holders, holder)
	}
	b.forgetIfEmpty(uid, s)
	return true
}

// kill records that the pod is dead.
func (b *book) kill(now time.Time, uid drain.UID) (changed bool) {
	s := b.stones[uid]
	if s == nil {
		s = &stone{pod: drain.Pod{UID: uid}, holders: map[string]bool{}}
		b.stones[uid] = s
	}
	changed = s.deadAt.IsZero()
	if changed {
		s.deadAt = now
	}
	return changed
}

// lapse ends the leases whose time is up at now, and says of which living pods the last one ended, sorted.
func (b *book) lapse(now time.Time) (uids []drain.UID) {
	for holder, l := range b.holders {
		if !now.After(l.expires) {
			continue
		}
		for uid, s := range b.stones {
			if s.holders[holder] {
				b.lift(uid, holder)
				if len(s.holders) == 0 && s.deadAt.IsZero() {
					uids = append(uids, uid)
				}
			}
		}
	}
	slices.Sort(uids)
	return uids
}

// expired lists the living pods of which lapse would end the last lease, sorted.
func (b *book) expired(now time.Time) (uids []drain.UID) {
	over := map[string]bool{}
	for holder, l := range b.holders {
		over[holder] = now.After(l.expires)
	}
	for uid, s := range b.stones {
		stands := !s.deadAt.IsZero()
		for holder := range s.holders {
			stands = stands || !over[holder]
		}
		if !stands {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// prune forgets the dead whose time is up, and of too many the oldest.
func (b *book) prune(now time.Time) {
	var dead []*stone
	for uid, s := range b.stones {
		if s.deadAt.IsZero() || len(s.holders) > 0 {
			continue
		}
		if now.Sub(s.deadAt) > deadMemory {
			delete(b.stones, uid)
			continue
		}
		dead = append(dead, s)
	}
	if len(dead) <= deadMost {
		return
	}
	slices.SortFunc(dead, func(x, y *stone) int { return x.deadAt.Compare(y.deadAt) })
	for _, s := range dead[:len(dead)-deadMost] {
		delete(b.stones, s.pod.UID)
	}
}

func (b *book) forgetIfEmpty(uid drain.UID, s *stone) {
	if len(s.holders) == 0 && s.deadAt.IsZero() {
		delete(b.stones, uid)
	}
}

// tombstones lists all, sorted by UID.
func (b *book) tombstones() []Tombstone {
	all := make([]Tombstone, 0, len(b.stones))
	for _, s := range b.stones {
		t := Tombstone{Pod: s.pod, Since: s.since, Dead: !s.deadAt.IsZero(), Leases: make(map[string]time.Time, len(s.holders))}
		for holder := range s.holders {
			t.Leases[holder] = b.holders[holder].expires
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(x, y Tombstone) int { return strings.Compare(string(x.Pod.UID), string(y.Pod.UID)) })
	return all
}

package journal

import (
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// slack is how much later than in truth an expiry ends on disk when it is written, as a part of
	// what it has left. It is written again when less than margin of that is left.
	slack  = 1. / 2
	margin = 1. / 6
	// maxTerminating bounds how many dead pods are kept that no expiry names. A cluster that
	// deletes more of them in drain.Times.Memory forgets the oldest here; its EndpointSlices have
	// had the time to say so themselves.
	maxTerminating = 10_000
)

// terminatingMemory is how long a dead pod is kept: as long as the ledger remembers it.
var terminatingMemory = drain.DefaultTimes().Memory

// Exclusion is what the journal knows of one.
type Exclusion struct {
	Pod drain.Pod
	// Since is the oldest start that any holder gave for the drain. The zero time: only that the
	// pod is dead was ever said.
	Since time.Time
	// Expiries says until when each holder's expiry stands. After Open that may be over: ending it
	// is for the caller, whose rules want more than time.
	Expiries map[string]time.Time
	// Terminating reports whether the pod was seen terminating or deleted.
	Terminating bool
}

// book is the journal's content. Its methods report whether the disk must follow.
type book struct {
	byUID   map[drain.UID]*exclusion
	holders map[string]*expiry
}

// exclusion is what the book keeps of one. Neither dead nor held: there is none.
type exclusion struct {
	pod     drain.Pod
	since   time.Time
	holders map[string]bool
	// terminatingAt is when the pod was first said to be dead. The zero time: it lives.
	terminatingAt time.Time
	// added is the version of the book in which a holder was last added: what must be on disk
	// before the gateway is touched.
	added uint64
}

// expiry is that of one holder on all its exclusions: every renewal is of all.
type expiry struct {
	// expires is when it ends in truth, stored when by the file.
	expires, stored time.Time
	count           int
}

func newBook() book {
	return book{byUID: map[drain.UID]*exclusion{}, holders: map[string]*expiry{}}
}

// exclude adds holder to the exclusion of pod. added says that this is a new expiry, changed that
// the file must be written at some time.
func (b *book) exclude(now time.Time, pod drain.Pod, holder string, since, expires time.Time) (added, changed bool) {
	s := b.byUID[pod.UID]
	if s == nil {
		s = &exclusion{pod: pod, since: since, holders: map[string]bool{}}
		b.byUID[pod.UID] = s
	}
	if s.since.IsZero() || since.Before(s.since) {
		s.since, changed = since, true
	}
	if s.pod.Name == "" {
		s.pod = pod
	}
	l := b.holders[holder]
	if l == nil {
		l = &expiry{}
		b.holders[holder] = l
	}
	if !s.holders[holder] {
		s.holders[holder], added = true, true
		l.count++
	}
	return added, l.renew(now, expires) || changed || added
}

// renew extends every expiry of holder.
func (b *book) renew(now time.Time, holder string, expires time.Time) (changed bool) {
	l := b.holders[holder]
	return l != nil && l.renew(now, expires)
}

func (l *expiry) renew(now, expires time.Time) (changed bool) {
	if expires.After(l.expires) {
		l.expires = expires
	}
	left := float64(l.expires.Sub(now))
	if l.stored.Before(l.expires.Add(time.Duration(left * margin))) {
		l.stored, changed = l.expires.Add(time.Duration(left*slack)), true
	}
	return changed
}

// readmit ends holder's expiry on uid.
func (b *book) readmit(uid drain.UID, holder string) (changed bool) {
	s := b.byUID[uid]
	if s == nil || !s.holders[holder] {
		return false
	}
	delete(s.holders, holder)
	if l := b.holders[holder]; l.count > 1 {
		l.count--
	} else {
		delete(b.holders, holder)
	}
	b.forgetIfEmpty(uid, s)
	return true
}

// terminate records that the pod is dead.
func (b *book) terminate(now time.Time, uid drain.UID) (changed bool) {
	s := b.byUID[uid]
	if s == nil {
		s = &exclusion{pod: drain.Pod{UID: uid}, holders: map[string]bool{}}
		b.byUID[uid] = s
	}
	changed = s.terminatingAt.IsZero()
	if changed {
		s.terminatingAt = now
	}
	return changed
}

// lapse ends the expiries whose time is up at now, and says of which living pods the last one
// ended, sorted.
func (b *book) lapse(now time.Time) (uids []drain.UID) {
	for holder, l := range b.holders {
		if !now.After(l.expires) {
			continue
		}
		for uid, s := range b.byUID {
			if s.holders[holder] {
				b.readmit(uid, holder)
				if len(s.holders) == 0 && s.terminatingAt.IsZero() {
					uids = append(uids, uid)
				}
			}
		}
	}
	slices.Sort(uids)
	return uids
}

// expired lists the living pods of which lapse would end the last expiry, sorted.
func (b *book) expired(now time.Time) (uids []drain.UID) {
	over := map[string]bool{}
	for holder, l := range b.holders {
		over[holder] = now.After(l.expires)
	}
	for uid, s := range b.byUID {
		stands := !s.terminatingAt.IsZero()
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
	var dead []*exclusion
	for uid, s := range b.byUID {
		if s.terminatingAt.IsZero() || len(s.holders) > 0 {
			continue
		}
		if now.Sub(s.terminatingAt) > terminatingMemory {
			delete(b.byUID, uid)
			continue
		}
		dead = append(dead, s)
	}
	if len(dead) <= maxTerminating {
		return
	}
	slices.SortFunc(dead, func(x, y *exclusion) int { return x.terminatingAt.Compare(y.terminatingAt) })
	for _, s := range dead[:len(dead)-maxTerminating] {
		delete(b.byUID, s.pod.UID)
	}
}

func (b *book) forgetIfEmpty(uid drain.UID, s *exclusion) {
	if len(s.holders) == 0 && s.terminatingAt.IsZero() {
		delete(b.byUID, uid)
	}
}

// exclusions lists all, sorted by UID.
func (b *book) exclusions() []Exclusion {
	all := make([]Exclusion, 0, len(b.byUID))
	for _, s := range b.byUID {
		t := Exclusion{Pod: s.pod, Since: s.since, Terminating: !s.terminatingAt.IsZero(),
			Expiries: make(map[string]time.Time, len(s.holders))}
		for holder := range s.holders {
			t.Expiries[holder] = b.holders[holder].expires
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(x, y Exclusion) int { return strings.Compare(string(x.Pod.UID), string(y.Pod.UID)) })
	return all
}

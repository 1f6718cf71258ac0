package health

import (
	"encoding/binary"
	"hash/maphash"
	"net/netip"
	"sync/atomic"
	"unsafe"
)

// slabBits is the logarithm of how many records lie in one slab.
const slabBits = 8

// nowhere is the index of no record, and the place of a record that is not in a bag.
const nowhere int32 = -1

// face is the part of a record that [Set.Lookup] reads: one cache line, atomic throughout.
type face struct {
	// seq is odd while no target lives here or one moves in. Who reads the name must find the same even number before and after.
	seq atomic.Uint32
	// view is what Lookup returns, packed.
	view atomic.Uint32
	// uid, hi, lo and meta are the name, see name.
	uid          atomic.Pointer[byte]
	hi, lo, meta atomic.Uint64
	_            [24]byte
}

// record is all that is known of one key. It lives in a slab, and its place is used again once it is free. But for its face it belongs to
// who holds the set's mutex.
type record struct {
	// Here is what a change of endpoints writes: one cache line.
	*face
	hash uint64
	pool *pool
	// pod is set while there is a tombstone on the pod, or it is dead.
	pod *pod
	// due is the tick of the next probe.
	due        int64
	next, prev int32
	at         [bags]int32

	// seenAt and seenIn say when and in which generation the gateway was read; seenIn 0: never.
	seenAt int64
	// quietSince is the first of an unbroken run of readings, in one generation, with neither routing nor activity. never: it is not.
	quietSince int64
	// since is when verdict was entered, lastAt when the last outcome came.
	since, lastAt int64
	active        int32
	seenIn        uint32
	ticket        uint32
	mark          uint32
	flags         flag
	counted       tally
	verdict       Verdict
	counters      [4]uint8
	last          Outcome
	missed        uint8
}

// flag is a fact about a record.
type flag uint16

const (
	// claimed by EndpointSlices.
	claimed flag = 1 << iota
	// asked says that the gateway may have been asked to route to the key since the last reading: that it was not there then is no
	// evidence any more.
	asked
	// present, routed and missing are of the last reading, see Seen.
	present
	routed
	missing
	// unlisted says that a lease on the pod lapsed, and that EndpointSlices have not been heard since; unproven, that its check has
	// not had a success since.
	unlisted
	unproven
	// own says that the verdict was reached under the present check.
	own
	// scheduled records are in the wheel, of those in flight the outcome is awaited.
	scheduled
	inFlight
	// found says that the gateway had it taken out when the agent began, and that its check has had neither a success
	// nor a verdict since.
	found

	// doubts keep a target out although it is claimed and nobody holds a tombstone on its pod.
	doubts = unlisted | unproven | found
)

func (r *record) is(f flag) bool { return r.flags&f != 0 }

func (r *record) set(f flag, on bool) {
	if on {
		r.flags |= f
	} else {
		r.flags &^= f
	}
}

// name is a target in words that can be read and written atomically, so that Lookup needs neither a lock nor a copy that somebody
// allocates: the UID's bytes, which are immutable as every string's, the address, and in meta the rest.
type name struct {
	uid    string
	hi, lo uint64
	meta   uint64
}

// meta is, from below: port 16 bits, kind of address 2, length of the UID 22, pool 24.
const (
	kindShift, lengthShift, poolShift = 16, 18, 40
	kindInvalid, kindV4, kindV6       = 0, 1, 2
	// kindZoned is an IPv6 address with a zone, which EndpointSlices refuse: the zone is written behind the UID, at a price.
	kindZoned = 3
)

func nameOf(t *Target) name {
	addr := t.Addr.Addr()
	if addr.Is4() {
		b := addr.As4()
		return name{string(t.UID), 0, uint64(binary.BigEndian.Uint32(b[:])),
			uint64(t.Addr.Port()) | kindV4<<kindShift | uint64(len(t.UID))<<lengthShift}
	}
	b := addr.As16()
	n := name{string(t.UID), binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]), uint64(t.Addr.Port())}
	switch {
	case addr.Zone() != "":
		n.meta |= kindZoned << kindShift
		n.uid += "%" + addr.Zone()
	case addr.IsValid():
		n.meta |= kindV6 << kindShift
	}
	n.meta |= uint64(len(n.uid)) << lengthShift
	return n
}

// target is the inverse of nameOf.
func (n name) target() Target {
	if n.meta>>kindShift&3 == kindV4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(n.lo))
		return Target{UID(n.uid), netip.AddrPortFrom(netip.AddrFrom4(b), uint16(n.meta))}
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], n.hi)
	binary.BigEndian.PutUint64(b[8:], n.lo)
	addr, uid := netip.AddrFrom16(b), n.uid
	switch n.meta >> kindShift & 3 {
	case kindInvalid:
		addr = netip.Addr{}
	case kindZoned:
		i := len(uid) - 1
		for uid[i] != '%' {
			i--
		}
		addr, uid = addr.WithZone(uid[i+1:]), uid[:i]
	}
	return Target{UID(uid), netip.AddrPortFrom(addr, uint16(n.meta))}
}

// read returns the name of the target that lives in r, with the pool in its meta. The caller holds the mutex, or compares seq.
func (r *face) read() name {
	n := name{hi: r.hi.Load(), lo: r.lo.Load(), meta: r.meta.Load()}
	if p := r.uid.Load(); p != nil {
		n.uid = unsafe.String(p, n.meta>>lengthShift&(1<<22-1))
	}
	return n
}

// uidOf and key are for who holds the mutex.
func (r *record) uidOf() UID {
	n := r.read()
	if n.meta>>kindShift&3 == kindZoned {
		return n.target().UID
	}
	return UID(n.uid)
}

func (r *record) target() Target { return r.read().target() }

func (r *record) key() Key { return Key{r.pool.name, r.target()} }

// directory is what a reader needs: an open addressing table of slots, the slabs that they point into, and the pools. Slots are written
// in place; when the table grows, or a slab or a pool comes, there is another directory.
//
// A slot is 0 if nothing was ever there, or a tag of 32 bits of the hash above the record's index plus one, or in its lower half 0 if
// what was there is gone. The hash is that of the UID alone (of the address, where there is none): all targets of a pod lie in one run,
// so that the table is also the index from a UID to its records.
type directory struct {
	mask  uint32
	slots []atomic.Uint64
	slabs []*slab
	pools []*pool
}

type slab struct {
	faces   [1 << slabBits]face
	records [1 << slabBits]record
}

const slotGone = 1 << 32

func (d *directory) record(i int32) *record { return &d.slabs[i>>slabBits].records[i&(1<<slabBits-1)] }

func (d *directory) face(i int32) *face { return &d.slabs[i>>slabBits].faces[i&(1<<slabBits-1)] }

func hashOf(seed maphash.Seed, n *name) uint64 {
	if n.uid != "" {
		return maphash.String(seed, n.uid)
	}
	return maphash.Comparable(seed, [3]uint64{n.hi, n.lo, n.meta & 0xffff})
}

// Lookup returns the health of one target and why it gets traffic or not, as the last finished change left it. It takes no lock,
// allocates nothing and waits for nobody, however many changes are going on.
func (s *Set) Lookup(k Key) (View, bool) {
	n := nameOf(&k.Target)
	h := hashOf(s.seed, &n)
	d := s.dir.Load()
	for i := uint32(h); ; i++ {
		slot := d.slots[i&d.mask].Load()
		if slot == 0 {
			return View{}, false
		}
		if slot>>32 != h>>32 || uint32(slot) == 0 {
			continue
		}
		index := uint32(slot) - 1
		if index>>slabBits >= uint32(len(d.slabs)) {
			continue // it has come since
		}
		r := d.face(int32(index))
		seq := r.seq.Load()
		if seq&1 != 0 || r.hi.Load() != n.hi || r.lo.Load() != n.lo {
			continue
		}
		have, view := r.read(), r.view.Load()
		if r.seq.Load() != seq || have.meta&(1<<poolShift-1) != n.meta || have.uid != n.uid {
			continue
		}
		if id := have.meta >> poolShift; id >= uint64(len(d.pools)) || d.pools[id].name != k.Pool {
			continue
		}
		return unpack(view), true
	}
}

// find returns the record of n in p, or nowhere.
func (s *Set) find(p *pool, n *name, h uint64) int32 {
	d := s.dir.Load()
	meta := n.meta | uint64(p.id)<<poolShift
	for i := uint32(h); ; i++ {
		slot := d.slots[i&d.mask].Load()
		if slot == 0 {
			return nowhere
		}
		if slot>>32 != h>>32 || uint32(slot) == 0 {
			continue
		}
		index := int32(uint32(slot) - 1)
		r := d.face(index)
		if r.hi.Load() == n.hi && r.lo.Load() == n.lo && r.meta.Load() == meta && r.read().uid == n.uid {
			return index
		}
	}
}

// ofPod appends the records of every target of uid.
func (s *Set) ofPod(uid UID, all []int32) []int32 {
	d := s.dir.Load()
	if uid == "" {
		// Nobody can delete a pod without a UID. It is possible all the same, and slow.
		for _, p := range s.all {
			for _, i := range p.members.all {
				if s.at(i).uidOf() == "" {
					all = append(all, i)
				}
			}
		}
		return all
	}
	h := maphash.String(s.seed, string(uid))
	for i := uint32(h); ; i++ {
		slot := d.slots[i&d.mask].Load()
		if slot == 0 {
			break
		}
		if slot>>32 != h>>32 || uint32(slot) == 0 {
			continue
		}
		index := int32(uint32(slot) - 1)
		if n := d.face(index).read(); n.uid == string(uid) && n.meta>>kindShift&3 != kindZoned {
			all = append(all, index)
		}
	}
	if s.zoned == 0 {
		return all
	}
	for _, p := range s.all {
		for _, i := range p.members.all {
			if r := s.at(i); r.meta.Load()>>kindShift&3 == kindZoned && r.uidOf() == uid {
				all = append(all, i)
			}
		}
	}
	return all
}

// at returns the record of an index that find gave.
func (s *Set) at(i int32) *record { return s.dir.Load().record(i) }

// make returns the index of a new record of n in p, with nothing known but its name.
func (s *Set) make(p *pool, n *name, h uint64) int32 {
	d := s.dir.Load()
	if s.live+1 > len(d.slots)/2 || s.used+1 > len(d.slots)/4*3 {
		d = s.rebuild(d)
	}
	if s.free == nowhere {
		d = s.addSlab(d)
	}
	index := s.free
	r := d.record(index)
	s.free = r.next
	if n.uid == "" {
		r.uid.Store(nil)
	} else {
		r.uid.Store(unsafe.StringData(n.uid))
	}
	if r.hi.Load() != n.hi { // a store costs more
		r.hi.Store(n.hi)
	}
	r.lo.Store(n.lo)
	r.meta.Store(n.meta | uint64(p.id)<<poolShift)
	if n.meta>>kindShift&3 == kindZoned {
		s.zoned++
	}
	r.hash, r.pool = h, p
	r.next, r.prev = nowhere, nowhere
	r.seenAt, r.quietSince, r.since, r.lastAt = never, never, never, never
	r.view.Store(0)
	r.seq.Add(1)

	i := uint32(h)
	for uint32(d.slots[i&d.mask].Load()) != 0 {
		i++
	}
	if d.slots[i&d.mask].Load() == 0 {
		s.used++
	}
	d.slots[i&d.mask].Store(h>>32<<32 | uint64(index+1))
	s.live++
	return index
}

// drop makes the place of a record free. It is in no bag any more.
func (s *Set) drop(index int32) {
	d := s.dir.Load()
	r := d.record(index)
	r.seq.Add(1)
	slot, i := r.hash>>32<<32|uint64(index+1), uint32(r.hash)
	for d.slots[i&d.mask].Load() != slot {
		i++
	}
	// A mark that something is gone is needed only where a run goes on.
	if d.slots[(i+1)&d.mask].Load() != 0 {
		d.slots[i&d.mask].Store(slotGone)
	} else {
		d.slots[i&d.mask].Store(0)
		s.used--
		for i--; d.slots[i&d.mask].Load() == slotGone; i-- {
			d.slots[i&d.mask].Store(0)
			s.used--
		}
	}
	s.live--
	if r.meta.Load()>>kindShift&3 == kindZoned {
		s.zoned--
	}
	// The UID's bytes stay until the place is used again.
	r.pool, r.pod = nil, nil
	r.seenAt, r.seenIn, r.active, r.mark = 0, 0, 0, 0
	r.flags, r.counted, r.last, r.verdict, r.counters, r.missed = 0, 0, Outcome{}, VerdictUnknown, [4]uint8{}, 0
	r.next, s.free = s.free, index
}

// rebuild makes the table as large as what lives needs: so large that the marks of what comes and goes do not fill it again. Readers stay in
// the old one until they are done.
func (s *Set) rebuild(d *directory) *directory {
	size := len(d.slots)
	for s.live+1 > size/8*3 {
		size *= 2
	}
	next := &directory{mask: uint32(size - 1), slots: make([]atomic.Uint64, size), slabs: d.slabs, pools: d.pools}
	for i := range d.slots {
		slot := d.slots[i].Load()
		if uint32(slot) == 0 {
			continue
		}
		j := uint32(d.record(int32(uint32(slot) - 1)).hash)
		for next.slots[j&next.mask].Load() != 0 {
			j++
		}
		next.slots[j&next.mask].Store(slot)
	}
	s.used = s.live
	s.rebuilds++
	s.dir.Store(next)
	return next
}

func (s *Set) addSlab(d *directory) *directory {
	next := &directory{mask: d.mask, slots: d.slots, slabs: append(d.slabs, new(slab)), pools: d.pools}
	first := int32(len(d.slabs)) << slabBits
	for i := first + 1<<slabBits - 1; i >= first; i-- {
		r := next.record(i)
		r.face = next.face(i)
		r.seq.Store(1)
		for b := range r.at {
			r.at[b] = nowhere
		}
		r.next, s.free = s.free, i
	}
	s.dir.Store(next)
	return next
}

// bag is an unordered list of records in which each knows its place, so that it comes and goes at the same price however many there are.
type bag struct {
	which uint8
	all   []int32
}

// The bags that a record can be in: its pool's members and graves, and the set's todo and watched.
const (
	inMembers = iota
	inGraves
	inTodo
	inWatched
	bags
)

func (s *Set) put(b *bag, i int32, r *record, in bool) {
	place := r.at[b.which]
	switch {
	case in == (place != nowhere):
	case in:
		r.at[b.which] = int32(len(b.all))
		b.all = append(b.all, i)
	default:
		last := len(b.all) - 1
		moved := b.all[last]
		b.all[place] = moved
		s.at(moved).at[b.which] = place
		b.all = b.all[:last]
		r.at[b.which] = nowhere
	}
}

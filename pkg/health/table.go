package health

import (
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"
)

// slabBits is the logarithm of how many records lie in one slab.
const slabBits = 8

// nowhere is the index of no record, and the place of a record that is not in a bag.
const nowhere int32 = -1

// face is a place in the table, and the part of a record that [Set.Lookup] reads: one cache line.
type face struct {
	// seq is odd while no target lives here or one moves in. Who reads the name must find the same even number before and after.
	seq atomic.Uint32
	// view is what Lookup returns, packed.
	view atomic.Uint32
	// uid, hi, lo and meta are the name, see name.
	uid          atomic.Pointer[byte]
	hi, lo, meta atomic.Uint64
	// hash of the name and index of the record belong to who holds the set's mutex.
	hash  uint64
	index int32
	_     [12]byte
}

// record is all that is known of one key. It lives in a slab, and its place is used again once it is free. But for its face it belongs to
// who holds the set's mutex.
type record struct {
	// Here is what a change of endpoints writes: one cache line. face and pool are nil while nothing lives here.
	*face
	// slot is where in the table the face is.
	slot int32
	// every is the interval of the probe that is planned, in ticks.
	every int32
	pool  *pool
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
	// scheduled records are probed, of those in flight the outcome is awaited. hung ones are in the wheel: who is not scheduled any more is
	// taken out when its time comes, unless another has come to its place by then.
	scheduled
	hung
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

// directory is what a reader needs: an open addressing table of faces, and the pools. It is written in place; when the table is made anew, or
// a pool comes, there is another directory.
//
// Eight faces are a group. Of each, a byte of the group's word says what is there: nothing ever (empty), something that has left (gone), or
// 7 bits of a hash. A search looks at the words only, beginning at the group that the hash says, up to the first with an empty byte; words
// are so few that they stay in the processor's cache, and the one face that is looked at is what a reader waits for.
//
// The hash is that of the UID alone (of the address, where there is none): all targets of a pod lie near each other, so that the table is
// also the index from a UID to its records.
type directory struct {
	words []atomic.Uint64
	faces []face
	pools []*pool
}

const (
	group = 8
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
	empty = 0x80
	gone  = 0xfe
)

func newDirectory(groups int, pools []*pool) *directory {
	d := &directory{words: make([]atomic.Uint64, groups), faces: make([]face, groups*group), pools: pools}
	for i := range d.words {
		d.words[i].Store(empty * lows)
	}
	return d
}

// start is the group where the search for a hash begins.
func (d *directory) start(h uint64) int {
	g, _ := bits.Mul64(h, uint64(len(d.words)))
	return int(g)
}

// after is the group after g.
func (d *directory) after(g int) int {
	if g++; g == len(d.words) {
		return 0
	}
	return g
}

// tagged returns the bytes of word that are the tag of a hash, each by its highest bit. It may say so of a byte above one that is, too.
func tagged(word, h uint64) uint64 {
	v := word ^ lows*(h&0x7f)
	return (v - lows) &^ v & highs
}

// hasEmpty says whether a byte of word is empty.
func hasEmpty(word uint64) bool { return word&^(word<<6)&highs != 0 }

// nth is the place of the lowest byte of bytes.
func nth(bytes uint64) int { return bits.TrailingZeros64(bytes) / 8 }

// tag writes the byte of a place.
func (d *directory) tag(slot int, b uint64) {
	word, shift := &d.words[slot/group], slot%group*8
	word.Store(word.Load()&^(0xff<<shift) | b<<shift)
}

// room returns the first place for a hash in which nothing lives, and whether it is empty.
func (d *directory) room(h uint64) (slot int, isEmpty bool) {
	for g := d.start(h); ; g = d.after(g) {
		if word := d.words[g].Load(); word&highs != 0 {
			n := nth(word & highs)
			return g*group + n, word>>(n*8)&0xff == empty
		}
	}
}

type slab [1 << slabBits]record

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
	for g := d.start(h); ; g = d.after(g) {
		word := d.words[g].Load()
		for at := tagged(word, h); at != 0; at &= at - 1 {
			f := &d.faces[g*group+nth(at)]
			seq := f.seq.Load()
			if seq&1 != 0 || f.hi.Load() != n.hi || f.lo.Load() != n.lo {
				continue
			}
			have, view := f.read(), f.view.Load()
			if f.seq.Load() != seq || have.meta&(1<<poolShift-1) != n.meta || have.uid != n.uid {
				continue
			}
			if id := have.meta >> poolShift; id >= uint64(len(d.pools)) || d.pools[id].name != k.Pool {
				continue
			}
			return unpack(view), true
		}
		if hasEmpty(word) {
			return View{}, false
		}
	}
}

// find returns the record of n in p, or nowhere.
func (s *Set) find(p *pool, n *name, h uint64) int32 {
	d := s.dir.Load()
	meta := n.meta | uint64(p.id)<<poolShift
	for g := d.start(h); ; g = d.after(g) {
		word := d.words[g].Load()
		for at := tagged(word, h); at != 0; at &= at - 1 {
			f := &d.faces[g*group+nth(at)]
			if f.hi.Load() == n.hi && f.lo.Load() == n.lo && f.meta.Load() == meta && f.seq.Load()&1 == 0 && f.read().uid == n.uid {
				return f.index
			}
		}
		if hasEmpty(word) {
			return nowhere
		}
	}
}

// ofPod appends the records of every target of uid.
func (s *Set) ofPod(uid UID, all []int32) []int32 {
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
	d, h, from := s.dir.Load(), hashOf(s.seed, &name{uid: string(uid)}), len(all)
	for g := d.start(h); ; g = d.after(g) {
		word := d.words[g].Load()
		for at := tagged(word, h); at != 0; at &= at - 1 {
			f := &d.faces[g*group+nth(at)]
			if n := f.read(); f.seq.Load()&1 == 0 && n.uid == string(uid) && n.meta>>kindShift&3 != kindZoned {
				all = append(all, f.index)
			}
		}
		if hasEmpty(word) {
			break
		}
	}
	// Where they lie depends on the seed. What happens must not: a simulation replays it.
	if len(all) > from+1 {
		slices.Sort(all[from:])
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
func (s *Set) at(i int32) *record { return &s.slabs[i>>slabBits][i&(1<<slabBits-1)] }

// make returns the index of a new record of n in p, with nothing known but its name.
func (s *Set) make(p *pool, n *name, h uint64) int32 {
	d := s.dir.Load()
	if s.used+1 > len(d.faces)/8*7 {
		d = s.rebuild(d)
	}
	if len(s.free) == 0 {
		s.addSlab()
	}
	index := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]

	slot, isEmpty := d.room(h)
	f := &d.faces[slot]
	if isEmpty {
		s.used++
	}
	f.seq.Store(f.seq.Load() | 1)
	if n.uid == "" {
		f.uid.Store(nil)
	} else {
		f.uid.Store(unsafe.StringData(n.uid))
	}
	f.hi.Store(n.hi)
	f.lo.Store(n.lo)
	f.meta.Store(n.meta | uint64(p.id)<<poolShift)
	f.view.Store(0)
	f.hash, f.index = h, index
	f.seq.Add(1)
	d.tag(slot, h&0x7f)
	s.live++
	if n.meta>>kindShift&3 == kindZoned {
		s.zoned++
	}

	r := s.at(index)
	r.face, r.slot, r.pool = f, int32(slot), p
	r.seenAt, r.quietSince, r.since, r.lastAt = never, never, never, never
	return index
}

// drop makes the place of a record free. It is in no bag any more.
func (s *Set) drop(index int32) {
	d := s.dir.Load()
	r := s.at(index)
	if r.meta.Load()>>kindShift&3 == kindZoned {
		s.zoned--
	}
	// The UID's bytes stay until the place is used again.
	r.seq.Add(1)
	// A mark that something is gone is needed only where a search goes on to the next group.
	if slot := int(r.slot); hasEmpty(d.words[slot/group].Load()) {
		d.tag(slot, empty)
		s.used--
	} else {
		d.tag(slot, gone)
	}
	s.live--
	r.face, r.pool, r.pod = nil, nil, nil
	r.seenAt, r.seenIn, r.active, r.mark = 0, 0, 0, 0
	r.flags &= hung
	r.counted, r.last, r.verdict, r.counters, r.missed = 0, Outcome{}, VerdictUnknown, [4]uint8{}, 0
	s.free = append(s.free, index)
}

// rebuild makes the table as large as what lives needs: so large that the marks of what comes and goes do not fill it again. Readers stay in
// the old one until they are done.
func (s *Set) rebuild(d *directory) *directory {
	next := newDirectory((s.live+1)*tableRoom/group+1, d.pools)
	for slot := range d.faces {
		from := &d.faces[slot]
		if d.words[slot/group].Load()>>(slot%group*8)&empty != 0 {
			continue
		}
		slot, _ := next.room(from.hash)
		to := &next.faces[slot]
		to.seq.Store(2)
		to.view.Store(from.view.Load())
		to.uid.Store(from.uid.Load())
		to.hi.Store(from.hi.Load())
		to.lo.Store(from.lo.Load())
		to.meta.Store(from.meta.Load())
		to.hash, to.index = from.hash, from.index
		next.tag(slot, from.hash&0x7f)
		r := s.at(from.index)
		r.face, r.slot = to, int32(slot)
	}
	s.used = s.live
	s.rebuilds++
	s.dir.Store(next)
	return next
}

// tableRoom is how many places a new table has for each that lives. With 1.5, so many groups are full that what comes and goes fills the
// table with marks: making it anew was a seventh of what a replacement costs.
const tableRoom = 2

func (s *Set) addSlab() {
	first := int32(len(s.slabs)) << slabBits
	s.slabs = append(s.slabs, new(slab))
	for i := first + 1<<slabBits - 1; i >= first; i-- {
		r := s.at(i)
		for b := range r.at {
			r.at[b] = nowhere
		}
		r.next, r.prev = nowhere, nowhere
		s.free = append(s.free, i)
	}
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

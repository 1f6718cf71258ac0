package kernel

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/sockets"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// maxExclusions bounds the entries of the map excluded.
const maxExclusions = 1 << 15

// Gateway is a gateway that the kernel directs.
type Gateway struct {
	*attached
	quiet map[health.Pool]time.Duration
	// targets has the known keys of each address. The value reports whether the key is to be
	// routed.
	targets map[netip.AddrPort]map[health.Key]bool
	// pools has the pools that each address is in, and those that it has left since it is known.
	// The time is when it left. Zero: it is in it.
	pools map[netip.AddrPort]map[health.Pool]time.Time
	// absent has the known keys that are to be forgotten.
	absent map[health.Key]bool
	// excluded has the entries of the map excluded, as written at wrote.
	excluded map[netip.AddrPort]*entry
	wrote    time.Time
	// dialing is when each note of the map dialing was first read, by socket cookie.
	dialing map[uint64]time.Time

	mu      sync.Mutex
	refused map[health.Pool]string
}

// entry is one exclusion in the map.
type entry struct {
	exclusion
	// left is when the last key at the address was no longer to be excluded. Zero: one still is.
	left time.Time
	// read reports whether the exclusion was read back.
	read bool
}

// targetKey is a key of the map targets. The value is 1 if the target is to be routed, else 0.
type targetKey struct {
	Address address
	UID     [maxUID]byte
	Pool    [maxPool]byte
}

// Direct implements gateway.DirectedKind. It attaches the programs to the pod's cgroup, and fails
// if a connection of this process to an excluded test address is not redirected within 1 s.
func (c *Config) Direct() (gateway.Directed, error) {
	g, err := open(*c, maxExclusions)
	if err != nil {
		return nil, err
	}
	if err := g.prove(); err != nil {
		g.close()
		return nil, fmt.Errorf("kernel: %w", err)
	}
	return g, nil
}

// nowhere is an address that no network uses (RFC 5737).
var nowhere = netip.MustParseAddrPort("192.0.2.1:9")

// prove returns an error unless a connection of this process, which is in the gateway's pod, is
// redirected. No connection is redirected if the container runtime uses other cgroups than the
// kubelet, or if the kernel has moved the pod's sockets out of its cgroup.
func (g *Gateway) prove() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	here := listener.Addr().String()
	x := exclusion{Expires: sinceBoot() + uint64(settle), Count: 1}
	x.Replacements[0] = addressOf(netip.MustParseAddrPort(here))
	if err := g.maps["excluded"].Put(addressOf(nowhere), &x); err != nil {
		return err
	}
	conn, err := net.DialTimeout("tcp", nowhere.String(), time.Second)
	if err == nil {
		defer conn.Close()
		if at := conn.RemoteAddr().String(); at != here {
			err = fmt.Errorf("it reached %s", at)
		}
	}
	if err != nil {
		return fmt.Errorf("a connection of this pod was not redirected, its processes may not be in %s: %w", g.cgroup,
			err)
	}
	return g.maps["excluded"].Delete(addressOf(nowhere))
}

func open(c Config, size uint32) (*Gateway, error) {
	c.Cgroups, c.Pins = cmp.Or(c.Cgroups, "/sys/fs/cgroup"), cmp.Or(c.Pins, "/sys/fs/bpf/lameduck")
	g := &Gateway{quiet: map[health.Pool]time.Duration{}, targets: map[netip.AddrPort]map[health.Key]bool{},
		pools: map[netip.AddrPort]map[health.Pool]time.Time{}, excluded: map[netip.AddrPort]*entry{},
		absent: map[health.Key]bool{}, refused: map[health.Pool]string{}}
	for _, s := range c.Services {
		g.quiet[s.pool()], _ = s.quiet() // checked
	}
	_, err := sockets.List()
	if err != nil {
		return nil, fmt.Errorf("kernel: %w (it needs CONFIG_INET_DIAG)", err)
	}
	if slices.Max(append(slices.Collect(maps.Values(g.quiet)), 0)) > 0 {
		if err := sockets.CanClose(); err != nil {
			return nil, fmt.Errorf("kernel: http1Quiet: %w", err)
		}
	}
	if g.attached, err = attach(c, size); err == nil {
		if err = g.load(); err != nil {
			g.close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	return g, nil
}

// load reads the targets and exclusions of an earlier agent from the maps.
func (g *Gateway) load() error {
	var key targetKey
	var routed uint8
	all := g.maps["targets"].Iterate()
	for all.Next(&key, &routed) {
		k := health.Key{Pool: health.Pool(text(key.Pool[:])),
			Target: health.Target{UID: health.UID(text(key.UID[:])), Addr: key.Address.addrPort()}}
		if _, known := g.quiet[k.Pool]; known {
			g.remember(k, routed != 0)
		} else if err := g.maps["targets"].Delete(&key); err != nil {
			return err
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read the map targets: %w", err)
	}
	var at address
	var x exclusion
	entries := g.maps["excluded"].Iterate()
	for entries.Next(&at, &x) {
		e := &entry{exclusion: x, left: time.Now()}
		for _, routed := range g.targets[at.addrPort()] {
			if !routed {
				e.left = time.Time{}
			}
		}
		g.excluded[at.addrPort()] = e
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read the map excluded: %w", err)
	}
	return nil
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// canonical returns k with its address unmapped and without a zone, as this package stores it.
func canonical(k health.Key) health.Key {
	k.Target.Addr = netip.AddrPortFrom(k.Target.Addr.Addr().Unmap().WithZone(""), k.Target.Addr.Port())
	return k
}

func (g *Gateway) remember(k health.Key, routed bool) {
	if g.targets[k.Target.Addr] == nil {
		g.targets[k.Target.Addr] = map[health.Key]bool{}
	}
	g.targets[k.Target.Addr][k] = routed
	if g.pools[k.Target.Addr] == nil {
		g.pools[k.Target.Addr] = map[health.Pool]time.Time{}
	}
	g.pools[k.Target.Addr][k.Pool] = time.Time{}
}

// poolsOf returns the pools that a replacement of addr must belong to: the gateway may mean any of
// them by a connection to addr. A pool that addr has left counts for settle, and for as long as
// addr is in no other.
func (g *Gateway) poolsOf(addr netip.AddrPort, now time.Time) map[health.Pool]bool {
	all, known := map[health.Pool]bool{}, len(g.targets[addr]) > 0
	for pool, left := range g.pools[addr] {
		if !known || left.IsZero() || now.Sub(left) < settle {
			all[pool] = true
		}
	}
	return all
}

// elsewhere reports whether the address of k has left its pool, and the same pod is known there in
// another pool. Whether the pod is routed, and what runs on it, is then what that key says.
func (g *Gateway) elsewhere(k health.Key) bool {
	_, known := g.targets[k.Target.Addr][k]
	left, was := g.pools[k.Target.Addr][k.Pool]
	other, _ := g.others(k)
	return !known && was && !left.IsZero() && other
}

// others reports whether the pod of k is known at the same address in another pool, and whether one
// of these keys stays: it is not to be forgotten.
func (g *Gateway) others(k health.Key) (known, stays bool) {
	for other := range g.targets[k.Target.Addr] {
		if other.Target.UID == k.Target.UID && other.Pool != k.Pool {
			known, stays = true, stays || !g.absent[other]
		}
	}
	return known, stays
}

// note remembers k, in the map too.
func (g *Gateway) note(k health.Key, routed bool) error {
	if was, known := g.targets[k.Target.Addr][k]; known && was == routed {
		return nil
	}
	g.remember(k, routed)
	key, err := keyOf(k)
	if err != nil {
		return err
	}
	value := uint8(0)
	if routed {
		value = 1
	}
	return g.maps["targets"].Put(&key, value)
}

func keyOf(k health.Key) (key targetKey, err error) {
	if len(k.Target.UID) > maxUID {
		return key, fmt.Errorf("UID %q: longer than %d", k.Target.UID, maxUID)
	}
	key.Address = addressOf(k.Target.Addr)
	copy(key.UID[:], k.Target.UID)
	copy(key.Pool[:], k.Pool)
	return key, nil
}

func (g *Gateway) forget(k health.Key) error {
	delete(g.absent, k)
	if _, known := g.targets[k.Target.Addr][k]; !known {
		return nil
	}
	addr := k.Target.Addr
	delete(g.targets[addr], k)
	if !slices.ContainsFunc(slices.Collect(maps.Keys(g.targets[addr])), func(other health.Key) bool {
		return other.Pool == k.Pool
	}) {
		g.pools[addr][k.Pool] = time.Now()
	}
	if len(g.targets[addr]) == 0 {
		delete(g.targets, addr)
		if g.excluded[addr] == nil {
			delete(g.pools, addr)
		}
	}
	key, err := keyOf(k)
	if err == nil {
		err = g.maps["targets"].Delete(&key)
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// Refuse implements gateway.Refuser.
func (g *Gateway) Refuse(pool health.Pool, why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused[pool] = why
}

func (g *Gateway) refusal(pool health.Pool) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused[pool]
}

// Apply implements gateway.Directed.
func (g *Gateway) Apply(ctx context.Context, ops []health.Op) error {
	if err := g.here(ctx); err != nil {
		return err
	}
	ops = slices.Clone(ops)
	failed := map[health.Op]error{}
	gone := map[health.Key]bool{}
	for i := range ops {
		ops[i].Key = canonical(ops[i].Key)
		if k := ops[i].Key; ops[i].Want == health.WantAbsent {
			g.absent[k] = true
		} else {
			delete(g.absent, k)
		}
	}
	for i := range ops {
		op, k := ops[i], ops[i].Key
		if _, known := g.quiet[k.Pool]; !known {
			failed[op] = fmt.Errorf("no pool %q", k.Pool)
			continue
		}
		delete(gone, k)
		switch op.Want {
		case health.WantRouted:
			failed[op] = g.note(k, true)
		case health.WantRemoved:
			if failed[op] = g.exclude(k); g.refusal(k.Pool) != "" {
				failed[op] = fmt.Errorf("not redirected: %s", g.refusal(k.Pool))
			}
		case health.WantAbsent:
			if _, stays := g.others(k); !stays {
				failed[op], gone[k] = g.exclude(k), true
				break
			}
			// The pod has left one Service. It is routed or excluded for another.
			if !g.elsewhere(k) {
				failed[op] = cmp.Or(g.note(k, false), g.forget(k))
			}
		default:
		}
	}
	written := g.write(time.Now())
	if len(gone) > 0 {
		// Keep keys with connections. If connections cannot be counted, keep all.
		if count, err := g.count(); err == nil {
			for k := range gone {
				if count[k.Target.Addr] > 0 && !g.replaced(k) {
					continue
				}
				if err := g.forget(k); err != nil {
					failed[health.Op{Key: k, Want: health.WantAbsent}] = err
				}
			}
			maps.Copy(written, g.write(time.Now()))
		}
	}
	var errs []error
	for _, op := range ops {
		if err := cmp.Or(failed[op], written[op.Target.Addr]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", op, err))
		}
	}
	return errors.Join(errs...)
}

// exclude records that k is not to be routed. It excludes an unknown target too: the gateway
// follows EndpointSlices by itself, and may route to it.
func (g *Gateway) exclude(k health.Key) error {
	addr := k.Target.Addr
	if g.replaced(k) {
		if _, known := g.targets[addr][k]; !known {
			return nil // the address is another pod's
		}
		return g.note(k, false)
	}
	if g.excluded[addr] == nil {
		g.excluded[addr] = &entry{}
	}
	return g.note(k, false)
}

// replaced reports whether the address of k is routed for another pod.
func (g *Gateway) replaced(k health.Key) bool {
	for other, routed := range g.targets[k.Target.Addr] {
		if routed && other.Target.UID != k.Target.UID {
			return true
		}
	}
	return false
}

// write updates the map excluded, and returns the addresses for which that failed, each with the
// error.
func (g *Gateway) write(now time.Time) map[netip.AddrPort]error {
	failed := map[netip.AddrPort]error{}
	boot := sinceBoot()
	standIns := map[string]map[netip.AddrPort]bool{} // by the pools
	g.wrote = now
	for addr, e := range g.excluded {
		in, out := false, false
		for _, yes := range g.targets[addr] {
			in, out = in || yes, out || !yes
		}
		if in && g.split(addr) {
			failed[addr] = errors.New("it stays routed for another Service, and a connection does not show its Service")
		}
		switch {
		case out:
			e.left = time.Time{}
		case e.left.IsZero():
			e.left = now
		}
		if !in && (out || boot < e.Expires || e.Expires == 0) {
			continue
		}
		if err := g.maps["excluded"].Delete(addressOf(addr)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			failed[addr] = err
			continue
		}
		delete(g.excluded, addr)
		if len(g.targets[addr]) == 0 {
			delete(g.pools, addr)
		}
	}
	// Existing exclusions come first: an address that is newly excluded may be the last replacement
	// of one of them.
	order := slices.SortedFunc(maps.Keys(g.excluded), func(a, b netip.AddrPort) int {
		return cmp.Compare(min(1, g.excluded[b].Expires), min(1, g.excluded[a].Expires))
	})
	for _, addr := range order {
		e := g.excluded[addr]
		out := e.left.IsZero()
		next := e.exclusion
		if in := g.poolsOf(addr, now); len(in) > 0 { // otherwise it is of an agent before this one
			pools := name(in)
			if standIns[pools] == nil {
				standIns[pools] = g.standIns(in)
			}
			next.Count = uint32(copy(next.Replacements[:], e.replacements(addr, standIns[pools])))
			clear(next.Replacements[next.Count:])
		}
		next.Expires = uint64(NextExpiry(out, time.Duration(e.Expires), time.Duration(boot)))
		if next == e.exclusion {
			continue
		}
		if err := g.maps["excluded"].Put(addressOf(addr), &next); err != nil {
			failed[addr] = fmt.Errorf("write the map excluded: %w", err)
			continue
		}
		e.exclusion = next
	}
	return failed
}

// split reports whether one pod at the address is routed in one pool and not in another.
func (g *Gateway) split(addr netip.AddrPort) bool {
	for k, in := range g.targets[addr] {
		for other, too := range g.targets[addr] {
			if in && !too && other.Target.UID == k.Target.UID {
				return true
			}
		}
	}
	return false
}

// remaining returns the time until expires. Both arguments are in nanoseconds since boot.
func remaining(expires, boot uint64) time.Duration { return time.Duration(int64(expires - boot)) }

// name returns a string that is unique for each set of pools.
func name(pools map[health.Pool]bool) string {
	if len(pools) == 1 {
		for p := range pools {
			return string(p)
		}
	}
	return fmt.Sprint(pools)
}

// standIns returns the addresses that are routed in each of some pools and are not excluded.
func (g *Gateway) standIns(pools map[health.Pool]bool) map[netip.AddrPort]bool {
	all := map[netip.AddrPort]bool{}
	for p := range pools {
		if g.refusal(p) != "" {
			return all
		}
	}
	for addr, keys := range g.targets {
		if g.excluded[addr] != nil {
			continue
		}
		in := map[health.Pool]bool{}
		for k, routed := range keys {
			if routed && pools[k.Pool] {
				in[k.Pool] = true
			}
		}
		if len(in) > 0 && len(in) == len(pools) {
			all[addr] = true
		}
	}
	return all
}

// replacements selects from the stand-ins of the address's family. It keeps the present selection
// if all of it are still stand-ins and no more are possible. Otherwise it selects at random.
func (e *entry) replacements(addr netip.AddrPort, standIns map[netip.AddrPort]bool) []address {
	now := e.Replacements[:e.Count]
	most := 0
	for a := range standIns {
		if a.Addr().Is4() == addr.Addr().Is4() {
			if most++; most == maxReplacements {
				break
			}
		}
	}
	if len(now) == most && !slices.ContainsFunc(now, func(a address) bool { return !standIns[a.addrPort()] }) {
		return now
	}
	var all []address
	for a := range standIns {
		if a.Addr().Is4() == addr.Addr().Is4() {
			all = append(all, addressOf(a))
		}
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:most]
}

func sinceBoot() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	return uint64(t.Nano())
}

// notes reads the addresses that programs have noted for sockets in the named map, by socket
// cookie.
func (g *Gateway) notes(name string) (map[uint64]netip.AddrPort, error) {
	all := map[uint64]netip.AddrPort{}
	// Read in batches: these omit no entry while others are added and deleted.
	cookies, of := make([]uint64, 512), make([]address, 512)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := g.maps[name].BatchLookup(&cursor, cookies, of, nil)
		for i, a := range of[:n] {
			all[cookies[i]] = a.addrPort()
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the map %s (it needs Linux 5.6): %w", name, err)
		}
	}
}

// count returns how many connections the pod has to each address, including those that are about to
// be opened. It also closes quiet connections that may be closed.
func (g *Gateway) count() (map[netip.AddrPort]int, error) {
	redirected, err := g.notes("redirected") // first, see below
	if err != nil {
		return nil, err
	}
	dialing, err := g.notes("dialing")
	if err != nil {
		return nil, err
	}
	count := map[netip.AddrPort]int{}
	before, now := g.dialing, time.Now()
	g.dialing = map[uint64]time.Time{}
	for cookie, to := range dialing {
		since := cmp.Or(before[cookie], now)
		if now.Sub(since) >= settle { // a program that would have deleted it was detached
			_ = g.maps["dialing"].Delete(cookie)
			continue
		}
		g.dialing[cookie] = since
		count[to]++
	}
	// After the notes: a connection that has just lost its note is a socket.
	open, err := sockets.List()
	if err != nil {
		return nil, err
	}
	for _, s := range open {
		to := redirected[s.Cookie()]
		delete(redirected, s.Cookie())
		if !g.cgroups[s.Cgroup] {
			continue // of the node, if the pod has its network, or of a container that has just begun
		}
		count[s.Remote]++ // for this time also one that is closed: the gateway may have just chosen it
		if quiet := g.mayClose(s.Remote, to); quiet > 0 && s.Quiet(quiet) {
			if _, err := s.Close(quiet); err != nil {
				return nil, err
			}
		}
	}
	for cookie := range redirected {
		if _, is := dialing[cookie]; !is { // it is closed, and a program was detached
			_ = g.maps["redirected"].Delete(cookie)
		}
	}
	return count, nil
}

// mayClose returns the silence after which a connection may be closed whose remote address is to.
// That applies to connections to an excluded address, and to a redirected one whose original
// address, meant, is routed again. 0: the connection must stay.
func (g *Gateway) mayClose(to, meant netip.AddrPort) (quiet time.Duration) {
	pools := g.pools[to] // those that it has left, too: the connection may be of their clients
	if e := g.excluded[to]; e == nil || e.Count == 0 {
		pools = map[health.Pool]time.Time{}
		for k, routed := range g.targets[meant] {
			if routed {
				pools[k.Pool] = time.Time{}
			}
		}
	}
	for p := range pools {
		if g.quiet[p] == 0 {
			return 0
		}
		quiet = max(quiet, g.quiet[p])
	}
	return quiet
}

// stray reports whether there is a redirected connection that may be closed when it is quiet.
func (g *Gateway) stray() bool {
	redirected, _ := g.notes("redirected") // count says what is wrong with it
	return slices.ContainsFunc(slices.Collect(maps.Values(redirected)), func(meant netip.AddrPort) bool {
		return g.mayClose(netip.AddrPort{}, meant) > 0
	})
}

// Observe implements gateway.Directed. The first reading of an exclusion does not count
// connections. It reports one, so that Removed does not wait for the count.
func (g *Gateway) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	o := health.Observation{At: time.Now(), Seen: make(map[health.Key]health.Seen, len(keys))}
	if err := g.here(ctx); err != nil {
		return health.Observation{}, err
	}
	if err := g.ensure(); err != nil {
		return health.Observation{}, err
	}
	o.Generation = g.generation
	for _, k := range keys {
		if _, known := g.quiet[k.Pool]; !known {
			return health.Observation{}, fmt.Errorf("no pool %q", k.Pool)
		}
		// An exclusion must not expire while the set still asks for its key.
		if e := g.excluded[canonical(k).Target.Addr]; e != nil && !e.left.IsZero() &&
			remaining(e.Expires, sinceBoot()) < settle/2 {
			e.Expires, g.wrote = 0, time.Time{}
		}
	}
	if o.At.Sub(g.wrote) >= time.Second {
		g.write(o.At) // what could not be renewed is read as such
	}
	fresh, held := false, false
	for _, k := range keys {
		var x exclusion
		err := g.maps["excluded"].Lookup(addressOf(canonical(k).Target.Addr), &x)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return health.Observation{}, fmt.Errorf("read the map excluded: %w", err)
		}
		o.Seen[k] = g.seen(canonical(k), x.Count > 0 && x.Expires > sinceBoot(), o.At)
		if e := g.excluded[canonical(k).Target.Addr]; e != nil && !e.read {
			fresh, e.read = true, true
		} else if e != nil {
			held = true
		}
	}
	if len(keys) == 0 && !g.stray() {
		return o, nil
	}
	if fresh && !held {
		// A count takes a millisecond or more. Removed must not wait for it, so the next reading
		// counts. If another target is already excluded, this reading counts, so that an Idle
		// target stays Idle.
		for k, seen := range o.Seen {
			if seen.Present {
				seen.Active = 1
				o.Seen[k] = seen
			}
		}
		return o, nil
	}
	count, err := g.count() // after the map, see connect
	if err != nil {
		return health.Observation{}, err
	}
	for _, k := range keys {
		seen := o.Seen[k]
		at := canonical(k)
		if n := count[at.Target.Addr]; n > 0 && !g.elsewhere(at) && (seen.Routed || !g.replaced(at)) {
			seen.Present, seen.Active = true, n
			o.Seen[k] = seen
		}
	}
	return o, nil
}

// seen returns the state of a key without its connections. holds reports whether the programs
// redirect connections to its address.
func (g *Gateway) seen(k health.Key, holds bool, now time.Time) health.Seen {
	routed, known := g.targets[k.Target.Addr][k]
	e := g.excluded[k.Target.Addr]
	switch {
	case g.elsewhere(k):
		return health.Seen{Missing: true}
	case !routed && g.replaced(k):
		return health.Seen{Present: known, Missing: true}
	case known:
		return health.Seen{Present: true, Routed: !holds, Missing: holds}
	case holds, e != nil && !e.left.IsZero() && now.Sub(e.left) >= settle:
		return health.Seen{Missing: true}
	default:
		// The gateway may route to it: there is no evidence against that.
		return health.Seen{Present: true, Routed: true, Missing: true}
	}
}

// Owned implements gateway.Directed.
func (g *Gateway) Owned(ctx context.Context) (all []health.Key, err error) {
	for _, keys := range g.targets {
		all = slices.AppendSeq(all, maps.Keys(keys))
	}
	return all, g.here(ctx)
}

// here returns an error if ctx is done or the pod's cgroup has ended.
func (g *Gateway) here(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := os.Stat(g.cgroup)
	return err
}

// Stopped implements gateway.Directed: no process but the agent is in the pod, not even the one
// that holds its namespaces.
func (g *Gateway) Stopped(context.Context) bool { return !g.populated() }

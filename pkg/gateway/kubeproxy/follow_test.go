package kubeproxy

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// describe writes a table down, whatever way it came about.
func describe(t *table) string {
	var b strings.Builder
	leads := func(n *node) string {
		switch n.kind {
		case destNode:
			return n.dest.String()
		case mapNode:
			return "@" + n.name
		}
		return n.name
	}
	for _, nodes := range []map[string]*node{t.chains, t.maps} {
		for _, name := range slices.Sorted(maps.Keys(nodes)) {
			n := nodes[name]
			fmt.Fprintf(&b, "%s defined %v base %v:", leads(n), n.defined, n.base)
			var out, in []string
			for to, count := range n.out {
				out = append(out, fmt.Sprintf("%s x%d", leads(to), count))
			}
			for from, count := range n.in {
				in = append(in, fmt.Sprintf("%s x%d", leads(from), count))
			}
			slices.Sort(out)
			slices.Sort(in)
			fmt.Fprintln(&b, out, in, len(n.rules), len(n.elements))
		}
	}
	var dests []string
	for _, ports := range t.dests {
		for _, n := range ports {
			dests = append(dests, fmt.Sprint(n.dest, len(n.in)))
		}
	}
	slices.Sort(dests)
	return b.String() + strings.Join(dests, "\n")
}

// all describes all tables that an Observer knows.
func all(o *Observer) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var b strings.Builder
	for _, family := range families {
		for _, name := range []string{proxyTable, natTable} {
			s := o.sources[tableID{family, name}]
			fmt.Fprintf(&b, "== %d %s complete %v\n%s\n", family, name, s.complete, describe(s.graph))
		}
	}
	return b.String()
}

// afresh reads what is there.
func afresh(t testing.TB) *Observer {
	t.Helper()
	o := New(Options{})
	r := o.read(t.Context())
	if r.err != nil {
		t.Fatal(r.err)
	}
	o.adopt(r.all, nil, time.Now())
	return o
}

// Whatever is written in whatever order, who has followed knows what one who reads now would know.
func TestFollowingIsReading(t *testing.T) {
	empty(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	nft(t, append(setUp("ip"), setUp("ip6")...)...)
	o := start(t, Options{})
	services := []service{{"a", "10.96.0.1", false}, {"b", "10.96.0.2", true}, {"c", "fd10::1", false},
		{"d", "fd10::2", true}}
	have := make([][]string, len(services))
	iptables := func(lines ...string) {
		run(t, "*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n", "iptables-nft-restore", "--noflush")
	}
	for step := range 60 {
		what := random.IntN(10)
		i := random.IntN(len(services))
		s := services[i]
		f := s.family()
		switch what {
		default:
			var want, gone []string
			for e := range 6 {
				endpoint := fmt.Sprintf("10.244.0.%d:%d", e+1, 8080+e%2)
				if s.v6() {
					endpoint = fmt.Sprintf("[fd00::%d]:%d", e+1, 8080+e%2)
				}
				if random.IntN(2) == 0 {
					want = append(want, endpoint)
				}
			}
			for _, e := range have[i] {
				if !slices.Contains(want, e) {
					gone = append(gone, e)
				}
			}
			if len(want)+len(have[i]) == 0 {
				continue
			}
			lines := s.sync(want, gone...)
			if len(want) == 0 && len(have[i]) == 0 {
				continue
			}
			nft(t, lines...)
			have[i] = want
		case 6: // the chain goes and comes back with other handles
			if len(have[i]) == 0 {
				continue
			}
			nft(t, append([]string{fmt.Sprintf("delete element %s kube-proxy service-ips { %s . tcp . 80 }", f,
				s.clusterIP), fmt.Sprintf("flush chain %s kube-proxy %s", f, s.chain())}, s.sync(have[i])...)...)
		case 7: // all at once
			nft(t, append([]string{"delete table " + f + " kube-proxy"}, setUp(f)...)...)
			for j, other := range services {
				if other.family() == f {
					have[j] = nil
				}
			}
		case 8: // others
			nft(t, "add table ip other", "add chain ip other kube-proxy",
				"add rule ip other kube-proxy meta l4proto tcp dnat to 10.244.0.1:8080", "flush table ip other")
			nft(t, "flush map "+f+" kube-proxy service-ips")
			for j, other := range services {
				if other.family() == f && len(have[j]) > 0 {
					nft(t, other.sync(have[j])...)
				}
			}
		case 9: // iptables, too
			iptables(":KUBE-SERVICES - [0:0]", ":KUBE-SVC-A - [0:0]", ":KUBE-SEP-A - [0:0]",
				"-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A",
				"-A KUBE-SVC-A -m comment --comment x -j KUBE-SEP-A",
				fmt.Sprintf("-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.244.0.%d:8080", random.IntN(6)+1))
			if random.IntN(2) == 0 {
				iptables("-F KUBE-SERVICES", "-F KUBE-SVC-A", "-X KUBE-SVC-A")
			}
		}
		fresh := afresh(t)
		want := all(fresh)
		for end := time.Now().Add(20 * time.Second); all(o) != want; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("step %d (%d, %s): who reads (-) and who follows (+) differ:\n%s", step, what, s.name,
					cmp.Diff(want, all(o)))
			}
		}
	}
}

// Who begins to read while others write all the time, never pausing for as long as reading takes,
// gets to an end, and then knows what is there.
func TestReadingWhileWriting(t *testing.T) {
	empty(t)
	lines := setUp("ip")
	services := make([]service, 300)
	for i := range services {
		services[i] = service{fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255), i%2 == 0}
		lines = append(lines, services[i].sync([]string{"10.244.0.1:8080", "10.244.0.2:8080"})...)
	}
	nft(t, lines...)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(10 * time.Millisecond):
			}
			// Others write, too, and theirs interrupts as well.
			lines := []string{"add table ip other", "delete table ip other"}
			for _, s := range services[1:40] {
				if i%2 == 0 {
					lines = append(lines, s.sync(nil)...)
				} else {
					lines = append(lines, s.sync([]string{fmt.Sprintf("10.244.0.%d:8080", 3+i%100)})...)
				}
			}
			nft(t, lines...)
		}
	})
	end := sync.OnceFunc(func() {
		close(done)
		wg.Wait()
	})
	t.Cleanup(end) // before the rules are gone
	var observers []*Observer
	for range 6 {
		o := start(t, Options{})
		observers = append(observers, o)
		watch(t, o, "10.244.0.1:8080").wait(health.Routing)
	}
	end()
	want := all(afresh(t))
	for i, o := range observers {
		began := time.Now()
		for all(o) != want {
			if time.Since(began) > 30*time.Second {
				t.Fatalf("observer %d does not know what is there (-), but (+):\n%s", i, cmp.Diff(want, all(o)))
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// Many pods are deleted at once. Without this each watch that comes or goes has all the others
// evaluated, with the square of their number.
func TestManyWatchesAtOnce(t *testing.T) {
	o := New(Options{})
	const many = 10_000
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := worked()
	var all []*Watch
	for i := range many {
		all = append(all, o.watch([]netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8),
			byte(i)}), 0)}, func() {}, false))
	}
	for _, w := range all {
		w.Close()
	}
	if took := worked() - began; took > 5*time.Second {
		t.Errorf("%d watches took %s to come and go", many, took)
	}
}

// opened adds so many connections to a target to what a count has found.
func opened(open map[netip.Addr][]connection, to netip.AddrPort, n int) {
	for i := range n {
		open[to.Addr()] = append(open[to.Addr()],
			connection{protocol: unix.IPPROTO_TCP, state: tcpEstablished, to: to, id: fmt.Append(nil, to, i)})
	}
}

// Many pods are deleted at once, and connections to each are open. Without this a count takes the
// square of their number, with all others kept waiting. What it takes is what the CPU works,
// whatever else that does.
func TestManyAreCountedAtOnce(t *testing.T) {
	o := New(Options{})
	const many = 10_000
	waiting, open := map[*Watch]counting{}, map[netip.Addr][]connection{}
	for i := range many {
		addr := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		w := o.watch([]netip.AddrPort{netip.AddrPortFrom(addr, 80)}, func() {}, false)
		defer w.Close()
		w.reading.State = health.Routing
		waiting[w] = counting{w.period, w.asked, true}
		opened(open, w.targets[0], 1)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	least := time.Hour // of three: a busy machine takes more
	for range 3 {
		began := worked()
		o.counted(waiting, open, 0, time.Now(), time.Now())
		least = min(least, worked()-began)
	}
	if least > 200*time.Millisecond {
		t.Errorf("%d watches and as many connections took %s", many, least)
	}
	for w := range waiting {
		if n := w.Reading().Connections; n != 1 {
			t.Fatalf("%d connections", n)
		}
	}
}

// A connection counts once for a watch, whichever of its targets it is of.
func TestCountedOnce(t *testing.T) {
	target := netip.MustParseAddrPort
	open := map[netip.Addr][]connection{}
	for to, n := range map[string]int{"10.1.0.1:80": 1, "10.1.0.1:81": 2, "10.1.0.2:80": 4} {
		opened(open, target(to), n)
	}
	for want, targets := range map[int][]netip.AddrPort{
		0: {target("10.1.0.3:80"), target("10.1.0.1:82")},
		1: {target("10.1.0.1:80"), target("10.1.0.1:80")},
		3: {target("10.1.0.1:80"), target("10.1.0.1:0"), target("10.1.0.1:0"), target("10.1.0.1:81")},
		5: {target("10.1.0.1:80"), target("10.1.0.2:0")},
	} {
		o := New(Options{})
		w := o.watch(targets, func() {}, false)
		w.reading.State = health.Removed
		o.counted(map[*Watch]counting{w: {w.period, w.asked, true}}, open, 0, time.Now(), time.Now())
		if n := w.Reading().Connections; n != want {
			t.Errorf("to %v there are %d, want %d", targets, n, want)
		}
		w.Close()
	}
}

// A count says nothing of what came after it had begun, however long it took, and who asks for one
// meanwhile gets another.
func TestACountThatTookLong(t *testing.T) {
	o := New(Options{})
	w := o.watch([]netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:80")}, func() {}, false)
	defer w.Close()
	w.reading.State = health.Removed
	w.Count()
	began := time.Now()
	due, _ := o.due(began)
	w.Count()
	open := map[netip.Addr][]connection{}
	opened(open, w.targets[0], 1)
	ended := began.Add(5 * time.Second)
	o.counted(due, open, 0, began, ended)
	if is := w.Reading(); !is.Counted.Equal(began) || is.Connections != 1 {
		t.Errorf("%+v, want what was counted at %s", is, began)
	}
	due, _ = o.due(ended)
	if !due[w].walk {
		t.Errorf("no count is due, but %v", due)
	}
	for _, h := range w.held {
		if h.see(h.connection, true, began, ended.Add(maxKept-1), ended.Add(maxKept)); h.kept {
			t.Error("a connection counts as silent from the beginning of a count on")
		}
		if h.see(h.connection, true, began, ended.Add(maxKept), ended.Add(maxKept)); !h.kept {
			t.Error("a silent connection is not kept")
		}
	}
}

// A watch that becomes Routing or Kept does not wake count while there are others, because count
// would look at all of them each time. A watch that becomes Removed does.
func TestWhoWakesCount(t *testing.T) {
	for _, test := range []struct {
		state         health.State
		others, wakes bool
	}{
		{health.Routing, false, true}, {health.Routing, true, false},
		{health.Kept, false, true}, {health.Kept, true, false},
		{health.Removed, false, true}, {health.Removed, true, true},
		{health.Idle, false, false}, {health.Unknown, false, false},
	} {
		o := New(Options{})
		w := &Watch{o: o, changed: func() {}}
		o.watches[w] = struct{}{}
		if test.others {
			other := &Watch{o: o, changed: func() {}}
			o.watches[other] = struct{}{}
			other.enter(health.Routing, time.Now())
			<-o.wake
		}
		if o.due(time.Now()); o.others != test.others {
			t.Fatal(o.others)
		}
		w.enter(test.state, time.Now())
		if woken := len(o.wake) > 0; woken != test.wakes {
			t.Errorf("%+v: %t", test, woken)
		}
	}
}

// Counting costs CPU time. Watches to whose targets the kernel still sends, or whose clients keep
// their connections, are counted less and less often, and a watch that is about to be Idle at once.
func TestWhenConnectionsAreCounted(t *testing.T) {
	o := New(Options{})
	w := &Watch{o: o, changed: func() {}, targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:80")}}
	o.watches[w] = struct{}{}
	var now time.Time
	var took time.Duration
	enter := func(state health.State) {
		w.enter(state, time.Now())
		now = w.entered
	}
	// after checks that it is counted that long after the last time, and not before, and takes that
	// in.
	after := func(want time.Duration, connections int) {
		t.Helper()
		if due, next := o.due(now.Add(want - 1)); want > 0 && (len(due) != 0 || next.IsZero()) {
			t.Fatalf("%s: it is counted before %s have passed, or never: next %s", w.reading.State, want, next.Sub(now))
		}
		now = now.Add(want)
		due, _ := o.due(now)
		if _, ok := due[w]; !ok {
			t.Fatalf("%s: it is not counted after %s", w.reading.State, want)
		}
		open := map[netip.Addr][]connection{}
		opened(open, w.targets[0], connections)
		o.counted(due, open, took, now, now)
	}
	enter(health.Routing)
	after(countKept, 1)
	after(countSlow, 0)
	after(countKept, 0)
	after(countSlow, 0)
	after(countSlow, 1)
	after(countSlow, 1)
	took = 10 * time.Millisecond // of which a count every 2 s takes half a hundredth of a core
	after(countSlow, 1)
	after(countSlowShare*took, 1)
	took = time.Second
	after(countSlowShare*10*time.Millisecond, 1)
	after(maxCountSlow, 1)
	took = 0
	after(maxCountSlow, 1)
	enter(health.Kept)
	after(countKept, 1)
	after(countKept, 0) // of those that were known
	after(0, 0)
	if w.reading.NoConnections {
		t.Error("it is quiet after one look")
	}
	after(countKept, 0)
	if !w.reading.NoConnections {
		t.Error("it is not quiet after two looks")
	}
	enter(health.Removed)
	after(countFirst, 1)
	walks := 0
	for now.Sub(w.entered) < 10*time.Second {
		if due, _ := o.due(now.Add(keptQuiet)); due[w].walk {
			walks++
		}
		after(keptQuiet, 1)
	}
	if walks > 10 {
		t.Errorf("while a connection was open for 10 s, all that there are were counted %d times", walks)
	}
	after(keptQuiet, 0)
	if w.reading.State != health.Removed {
		t.Errorf("it is %s, though others may have come", w.reading.State)
	}
	after(0, 0)
	if w.reading.State != health.Idle {
		t.Errorf("it is %s", w.reading.State)
	}
	// Idle pods are counted together, however many there are and whenever they became so.
	later := &Watch{o: o, changed: func() {}, targets: w.targets}
	later.reading.State, later.next = health.Idle, now.Add(countSlow+countSlow/2)
	o.watches[later] = struct{}{}
	if due, _ := o.due(now.Add(countSlow - 1)); len(due) != 0 {
		t.Errorf("%d Idle watches are counted too soon", len(due))
	}
	due, _ := o.due(now.Add(countSlow))
	if len(due) != 2 {
		t.Errorf("%d Idle watches are counted, want 2", len(due))
	}
	o.counted(due, nil, 0, now.Add(countSlow), now.Add(countSlow))
	if due, next := o.due(now.Add(2*countSlow - 1)); len(due) != 0 || !next.Equal(now.Add(2*countSlow)) {
		t.Errorf("%d Idle watches are counted again too soon, next %s", len(due), next)
	}
	after(2*countSlow, 1)
	if w.reading.State != health.Removed {
		t.Errorf("a connection has come, and it is %s", w.reading.State)
	}
}

// When the kernel has more to tell than the buffer holds, nothing is known until all has been read
// again.
func TestOverrun(t *testing.T) {
	empty(t)
	s := service{"web", "10.96.0.1", false}
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.1:8080", "10.244.0.2:8080"})...)...)
	o := startWith(t, Options{}, func(o *Observer) { o.buffer = 1 << 16 })
	w := watch(t, o, "10.244.0.1:8080")
	before := w.wait(health.Routing)
	told := make(chan struct{}, 100)
	second := o.Watch(w.targets, func() { told <- struct{}{} })
	defer second.Close()
	// The Observer cannot read while the test holds its lock, as on a machine without CPU time for
	// it.
	o.mu.Lock()
	var many []string
	for i := range 20000 {
		many = append(many, fmt.Sprintf("10.%d.%d.%d . tcp . 80 : drop", 100+i>>16, i>>8&255, i&255))
	}
	for range 2 {
		nft(t, "add map ip kube-proxy no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict ; }",
			"add element ip kube-proxy no-endpoint-services { "+strings.Join(many, " , ")+" }")
		nft(t, "delete map ip kube-proxy no-endpoint-services")
	}
	nft(t, s.sync([]string{"10.244.0.2:8080"})...)
	o.mu.Unlock()
	after := w.wait(health.Removed)
	if after.Generation == before.Generation {
		t.Error("the generation is the same after an overrun", after, before)
	}
}

// Numbers of generations wrap around, without 0.
func TestGenerations(t *testing.T) {
	if !after(2, 1) || after(1, 1) || after(1, 2) || !after(1, 0xffffffff) || successor(0xffffffff) != 1 ||
		successor(7) != 8 {
		t.Error("generations are not in their order")
	}
	for _, test := range []struct {
		name          string
		generation    uint32
		last          uint32
		follows, fail bool
	}{
		{"the first one", 8, 0, true, false},
		{"the next one", 8, 7, true, false},
		{"the next one after the largest number", 1, 0xffffffff, true, false},
		{"one is missing", 9, 7, false, true},
		{"read already, long ago", 6, 7, false, false},
		{"read already", 7, 7, false, false},
	} {
		if follows, err := (commit{generation: test.generation}).follows(test.last); follows != test.follows ||
			(err != nil) != test.fail {
			t.Errorf("%s: %v, %v", test.name, follows, err)
		}
	}
}

// What the kernel never says must not be believed, nor end the program.
func FuzzDecode(f *testing.F) {
	f.Add(uint16(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWRULE), []byte{2, 0, 0, 0})
	for _, seed := range recorded(f) {
		f.Add(uint16(seed.Header.Type), seed.Data)
	}
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		m := netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: data}
		if c, concerns, err := decode(m, ours); err == nil && concerns && c.kind != newGen {
			// It can be made, and unmade, whatever it is.
			g := newTableGraph(c.table)
			g.apply(&change{kind: newTable, table: c.table})
			g.apply(&change{kind: newChain, table: c.table, name: c.name, base: true})
			g.apply(&change{kind: newSet, table: c.table, name: c.name, sends: true})
			g.apply(&c)
			for _, dest := range append(c.rule.dests, netip.MustParseAddrPort("10.244.0.1:8080")) {
				g.sending(dest, func(netip.AddrPort) bool { return false })
			}
			g.apply(&change{kind: delSet, table: c.table, name: c.name})
			g.apply(&change{kind: delChain, table: c.table, name: c.name})
		}
		_, _ = decodeConnection(body(m))
	})
}

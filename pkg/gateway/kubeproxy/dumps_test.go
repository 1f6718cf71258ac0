package kubeproxy

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// An Observer that starts while kube-proxy writes must not call pods Removed to which the kernel
// sends. 200 Services lose their only endpoint and get it back, as fast as nft can write; 100
// others are never touched.
func TestWholeDumps(t *testing.T) {
	empty(t)
	const touched, all, readings = 200, 300, 55
	lines := setUp("ip")
	var services [all]service
	endpoint := func(i int) string { return fmt.Sprintf("10.244.%d.%d:8080", i>>8, i&255) }
	for i := range services {
		services[i] = service{fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255), i%2 == 0}
		lines = append(lines, services[i].sync([]string{endpoint(i)})...)
	}
	nft(t, lines...)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			var lines []string
			for j, s := range services[:touched] {
				if i%2 == 0 {
					lines = append(lines, s.sync(nil, endpoint(j))...)
				} else {
					lines = append(lines, s.sync([]string{endpoint(j)})...)
				}
			}
			nft(t, lines...)
		}
	})
	defer wg.Wait()
	defer close(done)
	wrong, pods := 0, 0
	for range readings {
		o := New(Options{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- o.Run(ctx) }()
		w := watch(t, o, endpoint(all-1))
		for w.Reading().State == health.Unknown {
			select {
			case <-w.news:
			case <-time.After(30 * time.Second):
				t.Fatal("the rules are not read")
			}
		}
		n := 0
		for i := touched; i < all; i++ {
			w := o.Watch([]netip.AddrPort{netip.MustParseAddrPort(endpoint(i))}, func() {})
			if w.Reading().State == health.Removed {
				n++
			}
			w.Close()
		}
		w.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			wrong, pods = wrong+1, pods+n
		}
	}
	t.Logf("%d readings", readings)
	if wrong > 0 {
		t.Errorf("in %d of %d readings pods are Removed to which the kernel sends (%d pods)", wrong, readings, pods)
	}
}

// dumpDuring reads a dump of table kube-proxy and makes a transaction when its first message has
// come, once. It returns the chains that are named in what was read.
func dumpDuring(t *testing.T, message int, lines []string, attributes ...[]byte) map[string]bool {
	t.Helper()
	o := New(Options{})
	conn, err := o.dial()
	if err != nil {
		t.Fatal(err)
	}
	write := sync.OnceFunc(func() { nft(t, lines...) })
	d := &dumper{conn: conn, ours: func(id tableID) bool {
		if id.name == proxyTable {
			write()
		}
		return ours(id)
	}}
	defer d.close()
	have := map[string]bool{}
	if err := d.dump(t.Context(), message, unix.NFPROTO_IPV4, func(c change) {
		if c.kind == newRule {
			have[c.name] = true
		}
		for _, e := range c.elements {
			have[e.chain] = true
		}
	}, attributes...); err != nil {
		t.Fatal(err)
	}
	return have
}

// A transaction that deletes what the first pages of a dump have told makes the kernel leave out
// others, which it does not touch. Dumps of elements are not marked then, and those of rules
// perhaps in their last message only.
func TestNothingIsLeftOutByACommit(t *testing.T) {
	for _, test := range []struct {
		what       string
		many       int
		message    int
		attributes [][]byte
	}{
		{"elements", 600, unix.NFT_MSG_GETSETELEM,
			[][]byte{encodeString(unix.NFTA_TABLE_NAME, proxyTable),
				encodeString(unix.NFTA_SET_ELEM_LIST_SET, "service-ips")}},
		{"rules", 60, unix.NFT_MSG_GETRULE, [][]byte{encodeString(unix.NFTA_TABLE_NAME, proxyTable)}},
	} {
		for share := 2; share <= 10; share += 2 {
			t.Run(fmt.Sprintf("%s, %d of 12 are deleted", test.what, share), func(t *testing.T) {
				empty(t)
				lines := setUp("ip")
				var items, deleted, untouched, remove []string
				for i := range test.many {
					chain := fmt.Sprintf("c%d", i)
					key := fmt.Sprintf("10.96.%d.%d . tcp . 80", i>>8, i&255)
					lines = append(lines, "add chain ip kube-proxy "+chain,
						fmt.Sprintf("add rule ip kube-proxy %s meta l4proto tcp dnat to 10.244.%d.%d:8080", chain, i>>8,
							i&255))
					items = append(items, key+" : goto "+chain)
					// The kernel tells rules in their order, and elements in that of a hash.
					if test.what == "rules" && i*12 < share*test.many || test.what == "elements" && i%12 < share {
						deleted = append(deleted, key)
						remove = append(remove, "flush chain ip kube-proxy "+chain)
					} else {
						untouched = append(untouched, chain)
					}
				}
				nft(t, append(lines, "add element ip kube-proxy service-ips { "+strings.Join(items, ", ")+" }")...)
				have := dumpDuring(t, test.message,
					append(remove, "delete element ip kube-proxy service-ips { "+strings.Join(deleted, ", ")+" }"),
					test.attributes...)
				missing := 0
				for _, chain := range untouched {
					if !have[chain] {
						missing++
					}
				}
				if missing > 0 {
					t.Errorf("a dump that counts as whole lacks %d of %d %s that the transaction does not touch",
						missing, len(untouched), test.what)
				}
			})
		}
	}
}

// What was followed wrongly, for whatever reason, is corrected by the next audit, and
// acknowledgements of before are void.
func TestAudit(t *testing.T) {
	empty(t)
	s, a, b := service{"web", "10.96.0.1", true}, "10.244.0.1:8080", "10.244.0.2:8080"
	nft(t, append(setUp("ip"), s.sync([]string{a, b})...)...)
	o := startWith(t, Options{}, func(o *Observer) { o.every = 50 * time.Millisecond })
	w := watch(t, o, a)
	w.wait(health.Routing)
	generation := w.Reading().Generation
	until(t, "an audit", func() bool { return o.Audits().Same > 0 })
	// Transactions that come while it is read are no difference.
	for i := range 20 {
		if i%2 == 0 {
			nft(t, s.sync([]string{b}, a)...)
		} else {
			nft(t, s.sync([]string{a, b})...)
		}
	}
	w.wait(health.Routing)
	if audits := o.Audits(); audits.Corrected+audits.Failed != 0 || w.Reading().Generation != generation {
		t.Fatalf("%+v, generation %s, before %s", audits, w.Reading().Generation, generation)
	}
	o.mu.Lock()
	g := o.sources[tableID{unix.NFPROTO_IPV4, proxyTable}].graph
	g.dropElement(g.maps["service-ips"], "\x0a\x60\x00\x01\x06\x00\x00\x00\x00\x50\x00\x00")
	is := o.state(w.targets)
	o.evaluate(time.Now())
	if is != health.Removed {
		t.Fatalf("the test has changed nothing: %s", is)
	}
	w.wait(health.Routing)
	// It is counted after the watches have been told.
	until(t, "the correction is counted", func() bool { return o.Audits().Corrected == 1 })
	if w.Reading().Generation == generation {
		t.Errorf("%+v, generation %s as before", o.Audits(), generation)
	}
}

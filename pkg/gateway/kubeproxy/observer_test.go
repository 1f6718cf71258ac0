package kubeproxy

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Endpoints come and go as kube-proxy writes them, in each family, with affinity and without.
func TestEndpointLeaves(t *testing.T) {
	for _, test := range []struct {
		service service
		a, b    string
	}{
		{service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "10.96.0.1", true}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "fd10::1", false}, "[fd00::1]:8080", "[fd00::2]:8080"},
		{service{"web", "fd10::1", true}, "[fd00::1]:8080", "[fd00::2]:8080"},
	} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s affinity %v, read before %v", test.service.family(), test.service.affinity, before),
				func(t *testing.T) {
					empty(t)
					s, a, b := test.service, test.a, test.b
					var o *Observer
					if before {
						o = start(t, Options{})
						watch(t, o, a).stays(health.Unknown)
					}
					nft(t, append(setUp(s.family()), s.sync([]string{a, b})...)...)
					if !before {
						o = start(t, Options{})
					}
					wa := watch(t, o, a)
					wa.wait(health.Routing)
					wb := watch(t, o, b)
					wa.wait(health.Kept) // both are watched, and there is no other
					wb.Close()
					wa.wait(health.Routing)
					look := o.Look([]netip.AddrPort{netip.MustParseAddrPort(b)}, func() {})
					wa.stays(health.Routing) // another pod may have the address of b
					if is := look.Reading().State; is != health.Kept {
						t.Errorf("%s itself is %s, want Kept: %s is going", b, is, a)
					}
					look.Close()
					nft(t, s.sync([]string{b}, a)...)
					if r := wa.wait(health.Removed); r.Since.IsZero() || r.Generation == "" {
						t.Error(r)
					}
					wb = watch(t, o, b)
					wb.wait(health.Kept)
					nft(t, s.sync(nil, b)...)
					wb.wait(health.Removed)
					nft(t, s.sync([]string{a})...)
					wa.wait(health.Kept)
					nft(t, "delete table "+s.family()+" kube-proxy")
					wa.wait(health.Unknown)
					wb.wait(health.Unknown)
					nft(t, setUp(s.family())...)
					wa.wait(health.Removed)
				})
		}
	}
}

// restore makes one transaction of iptables in its nft variant, or the legacy one.
func restore(t testing.TB, variant string, v6 bool, lines ...string) {
	t.Helper()
	program := "iptables"
	if v6 {
		program = "ip6tables"
	}
	run(t, "*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n", program+"-"+variant+"-restore", "--noflush")
}

// The same in the mode of kube-proxy that writes by iptables. In clusters of more than 1,000
// endpoints the chain of an endpoint remains, with its DNAT, when nothing leads to it any more.
func TestEndpointLeavesIPTables(t *testing.T) {
	for _, test := range []struct {
		service service
		a, b    string
	}{
		{service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "10.96.0.1", true}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "fd10::1", false}, "[fd00::1]:8080", "[fd00::2]:8080"},
	} {
		for _, stale := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s affinity %v, stale chains %v", test.service.family(), test.service.affinity, stale),
				func(t *testing.T) {
					empty(t)
					s, a, b := test.service, test.a, test.b
					o := start(t, Options{})
					watch(t, o, a).stays(health.Unknown)
					// kube-proxy makes its chains, and then writes them.
					restore(t, "nft", s.v6(), iptablesSetUp[:len(iptablesSetUp)-1]...)
					watch(t, o, a).stays(health.Unknown)
					restore(t, "nft", s.v6(), s.iptables([]string{a, b}, false)...)
					wa := watch(t, o, a)
					wa.wait(health.Routing)
					// What others write in the same table does not count, be it that they map a
					// port of the host to the pod.
					restore(t, "nft", s.v6(), ":CNI-DN-1 - [0:0]",
						"-A CNI-DN-1 -p tcp --dport 9000 -j DNAT --to-destination "+a, "-I PREROUTING -j CNI-DN-1",
						"-A OUTPUT -p tcp --dport 9000 -j DNAT --to-destination "+a)
					restore(t, "nft", s.v6(), s.iptables([]string{b}, stale, a)...)
					wa.wait(health.Removed)
					wb := watch(t, o, b)
					wb.wait(health.Kept)
					restore(t, "nft", s.v6(), s.iptables(nil, stale, b)...)
					wb.wait(health.Removed)
					restore(t, "nft", s.v6(), s.iptables([]string{a, b}, false)...)
					wa.wait(health.Kept)
					run(t, "", "nft", "delete", "table", s.family(), "nat")
					wa.wait(health.Unknown)
					// kube-proxy's mode is changed.
					nft(t, append(setUp(s.family()), s.sync([]string{b})...)...)
					wa.wait(health.Removed)
					wb.wait(health.Kept)
				})
		}
	}
}

// Both modes at once, as when the rules of one are left behind: the target is Removed when neither
// sends to it.
func TestLeftBehind(t *testing.T) {
	empty(t)
	s, a, b := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"
	restore(t, "nft", false, iptablesSetUp...)
	restore(t, "nft", false, s.iptables([]string{a, b}, false)...)
	nft(t, append(setUp("ip"), s.sync([]string{a, b})...)...)
	o := start(t, Options{})
	w := watch(t, o, a)
	w.wait(health.Routing)
	nft(t, s.sync([]string{b})...)
	w.stays(health.Routing)
	restore(t, "nft", false, s.iptables([]string{b}, false, a)...)
	w.wait(health.Removed)
	generation := w.Reading().Generation
	// One table is deleted: nothing says which of them kube-proxy writes.
	nft(t, "delete table ip kube-proxy")
	if r := w.wait(health.Unknown); r.Generation == generation {
		t.Error("the generation is the same when the rules were deleted:", r)
	}
	// What others write in the table that is left is no answer, what kube-proxy writes is.
	restore(t, "nft", false, ":CNI-DN-1 - [0:0]", "-A CNI-DN-1 -p tcp --dport 9000 -j DNAT --to-destination "+a)
	w.stays(health.Unknown)
	restore(t, "nft", false, s.iptables([]string{a, b}, false)...)
	w.wait(health.Routing)
	restore(t, "nft", false, s.iptables([]string{b}, false, a)...)
	w.wait(health.Removed)
}

// A node changes from iptables to nftables mode, and its operator deletes what the former has left
// behind. kube-proxy's next change proves that it writes the other table.
func TestLeftBehindAndDeletedByHand(t *testing.T) {
	empty(t)
	s, a, b := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"
	restore(t, "nft", false, iptablesSetUp...)
	restore(t, "nft", false, s.iptables([]string{a, b}, false)...)
	nft(t, append(setUp("ip"), s.sync([]string{a, b})...)...)
	o := start(t, Options{})
	w := watch(t, o, a)
	w.wait(health.Routing)
	restore(t, "nft", false, "-F KUBE-SERVICES", "-F PREROUTING", "-F OUTPUT")
	w.wait(health.Unknown)
	nft(t, s.sync([]string{b})...)
	w.wait(health.Removed)
}

// A table that is not kube-proxy's yet, and a family that kube-proxy has not written, are
// Unknown.
func TestUnknown(t *testing.T) {
	empty(t)
	s := service{"web", "10.96.0.1", false}
	nft(t, "add table ip kube-proxy", "add chain ip kube-proxy services")
	o := start(t, Options{})
	w, six := watch(t, o, "10.244.0.9:8080"), watch(t, o, "[fd00::9]:8080")
	both, none := watch(t, o, "10.244.0.9:8080", "[fd00::9]:8080"), watch(t, o)
	w.stays(health.Unknown)
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.1:8080"})...)...)
	w.wait(health.Removed)
	for _, other := range []*follower{six, both, none} {
		other.stays(health.Unknown)
	}
	mapped := watch(t, o, "[::ffff:10.244.0.1]:8080")
	mapped.wait(health.Kept)
	watch(t, o, "10.244.0.1:9090").wait(health.Removed)
	watch(t, o, "10.244.0.1:0").wait(health.Kept)
	// An element of its own is enough to lead there.
	nft(t, "add rule ip kube-proxy services meta l4proto tcp dnat to 10.244.0.9:8080")
	w.wait(health.Kept)
	nft(t, "flush chain ip kube-proxy services")
	mapped.wait(health.Unknown)
	w.Close()
	w.Close()
}

// Where something else sends to pods, what this package reads says nothing, and that is known: at
// once at the start, and some time after kube-proxy's rules were deleted.
func TestAbsent(t *testing.T) {
	empty(t)
	o := startWith(t, Options{}, func(o *Observer) {
		if o.Absent() {
			t.Error("kube-proxy is absent before anything is read")
		}
	})
	until(t, "no kube-proxy", o.Absent)
	// kube-proxy in ipvs mode writes to the table nat, too, and no pod is Removed by that.
	restore(t, "nft", false, ":PREROUTING ACCEPT [0:0]", ":KUBE-SERVICES - [0:0]", ":KUBE-NODE-PORT - [0:0]",
		":KUBE-MARK-MASQ - [0:0]", ":KUBE-NODEPORTS - [0:0]",
		`-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
		"-A KUBE-SERVICES -d 10.96.0.0/16 -j KUBE-MARK-MASQ",
		"-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
		"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
	w := watch(t, o, "10.244.0.1:8080")
	w.stays(health.Unknown)
	if !o.Absent() || o.Mode() != "" {
		t.Error("kube-proxy in ipvs mode is observed")
	}
	s := service{"web", "10.96.0.1", false}
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.1:8080"})...)...)
	w.wait(health.Kept)
	if o.Absent() || o.Mode() != "nftables" {
		t.Errorf("kube-proxy has written its rules, and is absent: %t, in mode %q", o.Absent(), o.Mode())
	}
	nft(t, "delete table ip kube-proxy")
	w.wait(health.Unknown)
	if o.Absent() {
		t.Error("kube-proxy is absent as soon as its rules are deleted")
	}
	o.mu.Lock()
	o.present = o.present.Add(-absentAfter)
	o.mu.Unlock()
	until(t, "no kube-proxy", o.Absent)
}

// Cilium balances by itself for the pods of a node, before kube-proxy's rules. What these send is
// waited for all the same: NodePorts and clients on the node go through them.
func TestBeside(t *testing.T) {
	empty(t)
	s := service{"web", "10.96.0.1", false}
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.2:8080"})...)...)
	run(t, "", "ip", "link", "add", "cilium_host", "type", "veth", "peer", "name", "cilium_net")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "delete", "cilium_host").Run() })
	o := start(t, Options{})
	w := watch(t, o, "10.244.0.1:8080")
	w.wait(health.Idle)
	if o.Absent() || o.Beside() != "Cilium" {
		t.Errorf("absent %t, beside %q", o.Absent(), o.Beside())
	}
	run(t, "", "ip", "link", "delete", "cilium_host")
	until(t, "Cilium has gone", func() bool { return o.Beside() == "" })
}

// Rules that kube-proxy has left behind have no pod that is younger than they are: it is Removed,
// and that is no evidence. When kube-proxy last wrote shows whether it is.
func TestWhenTheRulesWereWritten(t *testing.T) {
	empty(t)
	s, a, young := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.9:8080"
	nft(t, append(setUp("ip"), s.sync([]string{a})...)...)
	restore(t, "nft", false, iptablesSetUp...)
	restore(t, "nft", false, s.iptables([]string{a}, false)...)
	began := time.Now()
	o := start(t, Options{})
	w, other := watch(t, o, young), watch(t, o, a)
	first := w.wait(health.Removed).Written
	other.wait(health.Kept)
	if first.Before(began) {
		t.Errorf("written at %s, and first read after %s", first, began)
	}
	generation := func() string { return run(t, "", "nft", "-j", "list", "ruleset") }
	was := generation()
	restore(t, "nft", false, ":CILIUM_PRE_nat - [0:0]", "-I PREROUTING -j CILIUM_PRE_nat",
		"-A CILIUM_PRE_nat -p tcp --dport 9000 -j DNAT --to-destination "+young)
	nft(t, "add table ip cilium", "add chain ip cilium services")
	if generation() == was {
		t.Fatal("nothing was written")
	}
	w.wait(health.Removed)
	if is := w.Reading().Written; !is.Equal(first) {
		t.Errorf("what others write counts as kube-proxy's, at %s", is)
	}
	for what, write := range map[string]func(){
		"the same rules in nftables mode": func() { nft(t, s.sync([]string{a})...) },
		"the same rules in iptables mode": func() { restore(t, "nft", false, s.iptables([]string{a}, false)...) },
		"a Service without endpoints":     func() { nft(t, "add element ip kube-proxy cluster-ips { 10.96.0.77 }") },
	} {
		before := time.Now()
		write()
		until(t, what, func() bool { return !w.Reading().Written.Before(before) })
	}
	late := watch(t, o, young)
	until(t, "idle", func() bool { return late.Reading().State == health.Idle })
	for len(late.news) > 0 {
		<-late.news
	}
	nft(t, s.sync([]string{a})...)
	select {
	case <-late.news: // although its state is as before
	case <-time.After(10 * time.Second):
		t.Error("nothing was told when kube-proxy wrote")
	}
	o.mu.Lock()
	o.legacyWhole[unix.NFPROTO_IPV4] = true
	o.mu.Unlock()
	if is := w.Reading().Written; !is.IsZero() {
		t.Errorf("changes of legacy rules are not notified of, and yet were written at %s", is)
	}
}

// A pod that is the only endpoint of one Service, and one of two of another, is Routing until the
// other Service no longer leads to it.
func TestKeptByOneOnly(t *testing.T) {
	empty(t)
	alone, shared, a, b := service{"alone", "10.96.0.1", false}, service{"shared", "10.96.0.2", true},
		"10.244.0.1:8080", "10.244.0.2:8080"
	nft(t, slices.Concat(setUp("ip"), alone.sync([]string{a}), shared.sync([]string{a, b}))...)
	o := start(t, Options{})
	w := watch(t, o, a)
	w.wait(health.Routing)
	nft(t, shared.sync([]string{b}, a)...)
	w.wait(health.Kept)
	nft(t, alone.sync(nil)...)
	w.wait(health.Removed)
	nft(t, shared.sync([]string{a}, b)...)
	w.wait(health.Kept)
	// Nothing leads to the service's chain any more, though it is there.
	nft(t, "flush map ip kube-proxy service-ips")
	w.wait(health.Removed)
}

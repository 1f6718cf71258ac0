package kubeproxy

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// In large clusters kube-proxy's iptables mode leaves the chain of a traffic policy that is no
// longer used, with what it led to. It is no choice any more: who is alone in the other is alone.
func TestChainThatNothingLeadsTo(t *testing.T) {
	id := tableID{unix.NFPROTO_IPV4, natTable}
	g := newTableGraph(id)
	for _, chain := range []string{"PREROUTING", "KUBE-SERVICES", "KUBE-SVC-A", "KUBE-SVL-A", "KUBE-SEP-A",
		"KUBE-SEP-B"} {
		g.apply(&change{kind: newChain, table: id, name: chain, base: chain == "PREROUTING"})
	}
	a, b := netip.MustParseAddrPort("10.244.0.1:8080"), netip.MustParseAddrPort("10.244.0.2:8080")
	for i, r := range []struct {
		chain string
		rule  rule
	}{
		{"PREROUTING", rule{jumps: []string{"KUBE-SERVICES"}}},
		{"KUBE-SERVICES", rule{jumps: []string{"KUBE-SVL-A"}}},
		{"KUBE-SVC-A", rule{jumps: []string{"KUBE-SEP-A"}}},
		{"KUBE-SVC-A", rule{jumps: []string{"KUBE-SEP-B"}}},
		{"KUBE-SVL-A", rule{jumps: []string{"KUBE-SEP-A"}}},
		{"KUBE-SEP-A", rule{dests: []netip.AddrPort{a}}},
		{"KUBE-SEP-B", rule{dests: []netip.AddrPort{b}}},
	} {
		if !g.apply(&change{kind: newRule, table: id, name: r.chain, handle: uint64(i), rule: r.rule}) {
			t.Fatalf("rule %d is no change", i)
		}
	}
	going := func(d netip.AddrPort) bool { return d == a }
	if got := g.sending(a, going); got != sendsLast {
		t.Errorf("sent to the one that is alone: %d, want %d", got, sendsLast)
	}
	if got := g.sending(b, going); got != sendsNothing {
		t.Errorf("sent to the one that nothing leads to: %d, want %d", got, sendsNothing)
	}
	g.apply(&change{kind: newRule, table: id, name: "KUBE-SERVICES", handle: 9,
		rule: rule{jumps: []string{"KUBE-SVC-A"}}})
	if got := g.sending(a, going); got != sendsToo {
		t.Errorf("sent to with another: %d, want %d", got, sendsToo)
	}
	// A circle ends.
	g.apply(&change{kind: newRule, table: id, name: "KUBE-SVC-A", handle: 10,
		rule: rule{jumps: []string{"KUBE-SVC-A", "KUBE-SERVICES"}}})
	g.sending(a, going)
	// A change that is made twice is made once.
	if g.apply(&change{kind: delRule, table: id, name: "KUBE-SEP-A", handle: 99}) {
		t.Error("a rule that is not there was deleted")
	}
	g.apply(&change{kind: delTable, table: id})
	if g.sending(a, going) != sendsNothing || len(g.dests) != 0 {
		t.Error("something is left of a table that was deleted")
	}
}

// CRI-O maps the ports of hosts by chains that begin like kube-proxy's. They stay until the sandbox
// is deleted, which is after SIGTERM: a pod whose barrier waited for them would never get it.
func TestHostPortsOfCRIO(t *testing.T) {
	id := tableID{unix.NFPROTO_IPV4, natTable}
	g := newTableGraph(id)
	pod := netip.MustParseAddrPort("10.244.0.7:8080")
	for _, chain := range []string{"PREROUTING", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-HOSTPORTS",
		"KUBE-HP-ABCDEFGHIJKLMNOP", "KUBE-SVC-A", "KUBE-SEP-A"} {
		g.apply(&change{kind: newChain, table: id, name: chain, base: chain == "PREROUTING"})
	}
	for i, r := range []struct {
		chain string
		rule  rule
	}{
		{"PREROUTING", rule{jumps: []string{"KUBE-SERVICES"}}},
		{"PREROUTING", rule{jumps: []string{"KUBE-HOSTPORTS"}}},
		{"KUBE-SERVICES", rule{jumps: []string{"KUBE-NODEPORTS"}}},
		{"KUBE-HOSTPORTS", rule{jumps: []string{"KUBE-HP-ABCDEFGHIJKLMNOP"}}},
		{"KUBE-HP-ABCDEFGHIJKLMNOP", rule{dests: []netip.AddrPort{pod}}},
		{"KUBE-SVC-A", rule{jumps: []string{"KUBE-SEP-A"}}},
		{"KUBE-SEP-A", rule{dests: []netip.AddrPort{pod}}},
	} {
		g.apply(&change{kind: newRule, table: id, name: r.chain, handle: uint64(i), rule: r.rule})
	}
	if !g.complete() {
		t.Fatal("the rules are not complete")
	}
	going := func(netip.AddrPort) bool { return false }
	if got := g.sending(pod, going); got != sendsNothing {
		t.Errorf("kube-proxy does not send to the pod, and it is %d", got)
	}
	g.apply(&change{kind: newRule, table: id, name: "KUBE-SERVICES", handle: 9,
		rule: rule{jumps: []string{"KUBE-SVC-A"}}})
	if got := g.sending(pod, going); got != sendsToo && got != sendsLast {
		t.Errorf("kube-proxy sends to the pod, and it is %d", got)
	}
}

package kubeproxy

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// sent lists all destinations that the kernel sends to, as an Observer knows it. An asterisk marks
// a destination that is the only choice.
func sent(o *Observer) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := map[netip.AddrPort]sending{}
	for _, s := range o.sources {
		for addr, ports := range s.graph.dests {
			for port := range ports {
				d := netip.AddrPortFrom(addr, port)
				if how := s.graph.sending(d, func(other netip.AddrPort) bool {
					return other == d
				}); how != sendsNothing {
					found[d] = max(found[d], how)
				}
			}
		}
	}
	var all []string
	for d, how := range found {
		all = append(all, d.String()+map[sending]string{sendsLast: "*"}[how])
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// The transactions in testdata are those that kube-proxy of Kubernetes 1.36.3 made, in each mode,
// while test/e2e/kubeproxy ran: two pods become ready, one terminates and is replaced, kube-proxy
// starts again, all are scaled away and are gone. After each "#=" are the destinations that the
// kernel sends to then; UPDATE=1 writes them again, for review. Rules about accounting are left
// out: its objects are made otherwise.
//
// nftables-1.37.txt is written by hand, after proxier.go and its test in Kubernetes 1.37.2: the
// only endpoint of a Service, or of a node whose Service has externalTrafficPolicy Local, is in the
// Service's own chain. One of two pods, that of this node, terminates.
//
// When all are scaled away, the kernel sends to the replaced pod again: it has long been
// terminating, and Removed, but is still ready, and no other is.
func TestGolden(t *testing.T) {
	for _, file := range []string{"testdata/nftables.txt", "testdata/nftables-1.37.txt", "testdata/iptables.txt"} {
		t.Run(file, func(t *testing.T) {
			empty(t)
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			o := start(t, Options{})
			for _, v6 := range []bool{false, true} {
				if strings.Contains(file, "iptables.txt") {
					// It makes these one by one, before the first transaction.
					restore(t, "nft", v6, iptablesSetUp[:7]...)
				}
			}
			var updated strings.Builder
			for i, transaction := range strings.Split(string(text), "# transaction")[1:] {
				head, rules, _ := strings.Cut(transaction, "\n")
				rules, want, _ := strings.Cut(rules, "#= ")
				want = strings.TrimSpace(want)
				switch head {
				case " IPv4":
					run(t, rules, "iptables-nft-restore", "--noflush")
				case " IPv6":
					run(t, rules, "ip6tables-nft-restore", "--noflush")
				default:
					run(t, rules, "nft", "-f", "-")
				}
				fresh := afresh(t)
				for end := time.Now().Add(20 * time.Second); all(o) != all(fresh); time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("transaction %d: who follows and who reads differ:\n%s\n%s", i, all(o), all(fresh))
					}
				}
				got := sent(o)
				if os.Getenv("UPDATE") != "" && i == 12 { // when there is much
					record(t, strings.TrimSuffix(file, ".txt")+".bin")
				}
				if got != want && os.Getenv("UPDATE") == "" {
					t.Errorf("after transaction %d the kernel sends to\n%s, want\n%s", i, got, want)
				}
				fmt.Fprintf(&updated, "# transaction%s\n%s#= %s\n", head, rules, got)
			}
			if os.Getenv("UPDATE") != "" {
				if err := os.WriteFile(file, []byte(updated.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// record writes down, as they come, some messages of the kernel about what is there: for the
// fuzzing of what reads them.
func record(t *testing.T, file string) {
	t.Helper()
	network(t)
	pod(t, "10.244.0.1:8080")
	connect(t, "10.244.0.1:8080")
	conn, err := New(Options{}).dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var all []byte
	dump := func(subsystem, message int, family uint8, most int, attributes ...[]byte) (names [][2]string) {
		if _, err := conn.Send(request(subsystem, message, netlink.Dump, family, attributes...)); err != nil {
			t.Fatal(err)
		}
		messages, err := conn.Receive()
		if err != nil {
			t.Fatal(err)
		}
		for i, m := range messages {
			if b, err := m.MarshalBinary(); err == nil && i < most {
				all = append(all, b...)
			}
			names = append(names, [2]string{text(body(m), unix.NFTA_SET_TABLE), text(body(m), unix.NFTA_SET_NAME)})
		}
		return names
	}
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		for _, message := range []int{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN} {
			dump(unix.NFNL_SUBSYS_NFTABLES, message, family, 3)
		}
		dump(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETRULE, family, 1000)
		for _, set := range dump(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETSET, family, 20) {
			dump(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETSETELEM, family,
				1, encodeString(unix.NFTA_SET_ELEM_LIST_TABLE, set[0]),
				encodeString(unix.NFTA_SET_ELEM_LIST_SET, set[1]))
		}
		dump(unix.NFNL_SUBSYS_CTNETLINK, ctGet, family, 5)
	}
	if err := os.WriteFile(file, all, 0o644); err != nil {
		t.Fatal(err)
	}
}

// recorded returns what record has written.
func recorded(t testing.TB) []netlink.Message {
	t.Helper()
	var all []netlink.Message
	for _, file := range []string{"testdata/nftables.bin", "testdata/iptables.bin"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for len(b) > 0 {
			n := int(binary.NativeEndian.Uint32(b))
			var m netlink.Message
			if err := m.UnmarshalBinary(b[:n]); err != nil {
				t.Fatal(err)
			}
			all = append(all, m)
			b = b[n:]
		}
	}
	return all
}

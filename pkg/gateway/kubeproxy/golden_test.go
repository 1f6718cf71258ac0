package kubeproxy

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// sent lists all destinations that the kernel sends to, as an Observer knows it: with an asterisk those who are alone.
func sent(o *Observer) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := map[netip.AddrPort]sending{}
	for _, s := range o.sources {
		for addr, ports := range s.graph.dests {
			for port := range ports {
				d := netip.AddrPortFrom(addr, port)
				if how := s.graph.sending(d, func(other netip.AddrPort) bool { return other == d }); how != sendsNothing {
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

// The transactions in testdata are those that kube-proxy of Kubernetes 1.36.3 made, in each mode, while test/e2e/kubeproxy ran: two pods
// become ready, one terminates and is replaced, kube-proxy starts again, all are scaled away and are gone. After each "#=" says
// to whom the kernel sends then; UPDATE=1 writes that anew, for you to look at. What the rules say of accounting is left out: its objects
// are made otherwise.
//
// When all are scaled away, the one that was replaced comes back: it has long been terminating, and let go of, but is still ready, and no
// other is.
func TestGolden(t *testing.T) {
	for _, file := range []string{"testdata/nftables.txt", "testdata/iptables.txt"} {
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
			var anew strings.Builder
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
				for end := time.Now().Add(2 * time.Second); all(o) != all(fresh); time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("transaction %d: who follows and who reads differ:\n%s\n%s", i, all(o), all(fresh))
					}
				}
				got := sent(o)
				if got != want && os.Getenv("UPDATE") == "" {
					t.Errorf("after transaction %d the kernel sends to\n%s, want\n%s", i, got, want)
				}
				fmt.Fprintf(&anew, "# transaction%s\n%s#= %s\n", head, rules, got)
			}
			if os.Getenv("UPDATE") != "" {
				if err := os.WriteFile(file, []byte(anew.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

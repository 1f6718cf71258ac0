package kubeproxy

import (
	"fmt"
	"net/netip"
	"strings"
)

// service writes rules as kube-proxy does in its nftables mode, see syncProxyRules and its test in
// Kubernetes 1.36.
type service struct {
	name, clusterIP string
	affinity        bool
}

func (s service) v6() bool { return strings.Contains(s.clusterIP, ":") }

func (s service) family() string {
	if s.v6() {
		return "ip6"
	}
	return "ip"
}

func (s service) chain() string { return fmt.Sprintf("ULMVA6XW-default/%s/tcp/http", s.name) }

func (s service) endpointChain(e string) string {
	a := netip.MustParseAddrPort(e)
	return fmt.Sprintf("endpoint-5OJB2KTY-default/%s/tcp/http__%s/%d", s.name,
		strings.ReplaceAll(a.Addr().String(), ":", "."), a.Port())
}

func (s service) affinitySet(e string) string {
	return "affinity-" + strings.TrimPrefix(s.endpointChain(e), "endpoint-")
}

// setUp is what kube-proxy writes once for a family.
func setUp(family string) []string {
	address := "ipv4_addr"
	if family == "ip6" {
		address = "ipv6_addr"
	}
	return strings.Split(strings.NewReplacer("FAMILY", family,
		"ADDRESS", address).Replace(`add table FAMILY kube-proxy { comment "rules for kube-proxy" ; }
add chain FAMILY kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain FAMILY kube-proxy nat-output { type nat hook output priority -100 ; }
add chain FAMILY kube-proxy services
flush chain FAMILY kube-proxy services
flush chain FAMILY kube-proxy nat-prerouting
flush chain FAMILY kube-proxy nat-output
add rule FAMILY kube-proxy nat-output jump services
add rule FAMILY kube-proxy nat-prerouting jump services
add set FAMILY kube-proxy cluster-ips { type ADDRESS ; comment "Active ClusterIPs" ; }
add map FAMILY kube-proxy service-ips { type ADDRESS . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add map FAMILY kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }
add rule FAMILY kube-proxy services FAMILY daddr . meta l4proto . th dport vmap @service-ips
add rule FAMILY kube-proxy services fib daddr type local meta l4proto . th dport vmap @service-nodeports`), "\n")
}

// sync writes the service with these endpoints, and empties the chains of those that were there
// before.
func (s service) sync(endpoints []string, before ...string) []string {
	f := s.family()
	lines := []string{
		fmt.Sprintf("add chain %s kube-proxy %s", f, s.chain()),
		fmt.Sprintf("flush chain %s kube-proxy %s", f, s.chain()),
	}
	if len(endpoints) > 0 {
		lines = append(lines, fmt.Sprintf("add element %s kube-proxy service-ips { %s . tcp . 80 : goto %s }", f,
			s.clusterIP, s.chain()))
	} else {
		lines = append(lines, fmt.Sprintf("delete element %s kube-proxy service-ips { %s . tcp . 80 }", f, s.clusterIP))
	}
	var items []string
	for i, e := range endpoints {
		a := netip.MustParseAddrPort(e)
		if !s.affinity {
			items = append(items, fmt.Sprintf("%d : %s . %d", i, a.Addr(), a.Port()))
			continue
		}
		chain := s.endpointChain(e)
		items = append(items, fmt.Sprintf("%d : goto %s", i, chain))
		lines = append(lines,
			fmt.Sprintf("add set %s kube-proxy %s { type %s ; flags dynamic,timeout ; timeout 10800s ; }", f,
				s.affinitySet(e), map[bool]string{false: "ipv4_addr", true: "ipv6_addr"}[s.v6()]),
			fmt.Sprintf("add chain %s kube-proxy %s", f, chain),
			fmt.Sprintf("flush chain %s kube-proxy %s", f, chain),
			fmt.Sprintf("add rule %s kube-proxy %s %s saddr @%s goto %s", f, s.chain(), f, s.affinitySet(e), chain),
			fmt.Sprintf("add rule %s kube-proxy %s update @%s { %s saddr }", f, chain, s.affinitySet(e), f),
			fmt.Sprintf("add rule %s kube-proxy %s meta l4proto tcp dnat to %s", f, chain, e))
	}
	switch {
	case len(endpoints) == 0:
	case s.affinity:
		lines = append(lines, fmt.Sprintf("add rule %s kube-proxy %s numgen random mod %d vmap { %s }", f, s.chain(),
			len(endpoints), strings.Join(items, " , ")))
	default:
		lines = append(lines, fmt.Sprintf("add rule %s kube-proxy %s meta l4proto tcp dnat %s addr . port to numgen "+
			"random mod %d map { %s }", f, s.chain(), f, len(endpoints), strings.Join(items, " , ")))
	}
	if s.affinity {
		for _, e := range before {
			lines = append(lines, fmt.Sprintf("flush chain %s kube-proxy %s", f, s.endpointChain(e)),
				fmt.Sprintf("delete set %s kube-proxy %s", f, s.affinitySet(e)))
		}
	}
	return lines
}

// iptablesSetUp is what kube-proxy writes once in its iptables mode, see writeIptablesRules and
// syncProxyRules in Kubernetes 1.36.
var iptablesSetUp = []string{
	":PREROUTING ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":KUBE-SERVICES - [0:0]", ":KUBE-NODEPORTS - [0:0]",
	":KUBE-MARK-MASQ - [0:0]",
	`-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	`-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
	`-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS`,
}

// iptables writes the service, with these endpoints, as kube-proxy does in its iptables mode.
// Chains of those that were there before are left as they are if stale is true, as in clusters of
// more than 1,000 endpoints for up to 30 s; else they are deleted.
func (s service) iptables(endpoints []string, stale bool, before ...string) []string {
	hash := strings.ToUpper(s.name)
	svc, ext := "KUBE-SVC-"+hash, "KUBE-EXT-"+hash
	comment := fmt.Sprintf("-m comment --comment default/%s:http", s.name)
	chain := func(e string) string {
		return "KUBE-SEP-" + hash + strings.ToUpper(strings.NewReplacer(".", "", ":", "", "[", "", "]", "").Replace(e))
	}
	bits := "/32"
	if s.v6() {
		bits = "/128"
	}
	// The other rules of the chain are written again with it.
	heads := []string{":KUBE-SERVICES - [0:0]", ":KUBE-NODEPORTS - [0:0]", ":" + svc + " - [0:0]",
		":" + ext + " - [0:0]"}
	var rules []string
	if len(endpoints) > 0 {
		rules = append(rules,
			fmt.Sprintf("-A KUBE-SERVICES %s -m tcp -p tcp -d %s%s --dport 80 -j %s", comment, s.clusterIP, bits, svc),
			fmt.Sprintf("-A KUBE-NODEPORTS %s -m tcp -p tcp --dport 30080 -j %s", comment, ext),
			fmt.Sprintf("-A %s %s -j KUBE-MARK-MASQ", ext, comment), fmt.Sprintf("-A %s -j %s", ext, svc))
	}
	rules = append(rules, iptablesSetUp[len(iptablesSetUp)-1])
	for _, e := range endpoints {
		heads = append(heads, ":"+chain(e)+" - [0:0]")
		if s.affinity {
			rules = append(rules, fmt.Sprintf("-A %s %s -m recent --name %s --rcheck --seconds 10800 --reap "+
				"--rsource -j %s", svc, comment, chain(e), chain(e)))
		}
	}
	for i, e := range endpoints {
		probability := ""
		if n := len(endpoints) - i; n > 1 {
			probability = fmt.Sprintf(" -m statistic --mode random --probability %0.10f", 1/float64(n))
		}
		a := netip.MustParseAddrPort(e)
		recent := ""
		if s.affinity {
			recent = " -m recent --name " + chain(e) + " --set"
		}
		rules = append(rules,
			fmt.Sprintf("-A %s %s%s -j %s", svc, comment, probability, chain(e)),
			fmt.Sprintf("-A %s %s -s %s%s -j KUBE-MARK-MASQ", chain(e), comment, a.Addr(), bits),
			fmt.Sprintf("-A %s %s%s -m tcp -p tcp -j DNAT --to-destination %s", chain(e), comment, recent, e))
	}
	if !stale {
		for _, e := range before {
			heads = append(heads, ":"+chain(e)+" - [0:0]")
			rules = append(rules, "-X "+chain(e))
		}
	}
	return append(heads, rules...)
}

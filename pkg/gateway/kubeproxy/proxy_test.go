package kubeproxy

import (
	"fmt"
	"net/netip"
	"strings"
)

// service writes rules as kube-proxy does in its nftables mode, see syncProxyRules and its test in Kubernetes 1.36.
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
	return fmt.Sprintf("endpoint-5OJB2KTY-default/%s/tcp/http__%s/%d", s.name, strings.ReplaceAll(a.Addr().String(), ":", "."), a.Port())
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
	return strings.Split(strings.NewReplacer("FAMILY", family, "ADDRESS", address).Replace(`add table FAMILY kube-proxy { comment "rules for kube-proxy" ; }
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

// sync writes the service with these endpoints, and empties the chains of those that were there before.
func (s service) sync(endpoints []string, before ...string) []string {
	f := s.family()
	lines := []string{
		fmt.Sprintf("add chain %s kube-proxy %s", f, s.chain()),
		fmt.Sprintf("flush chain %s kube-proxy %s", f, s.chain()),
	}
	if len(endpoints) > 0 {
		lines = append(lines, fmt.Sprintf("add element %s kube-proxy service-ips { %s . tcp . 80 : goto %s }", f, s.clusterIP, s.chain()))
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
			fmt.Sprintf("add set %s kube-proxy %s { type %s ; flags dynamic,timeout ; timeout 10800s ; }", f, s.affinitySet(e), map[bool]string{false: "ipv4_addr", true: "ipv6_addr"}[s.v6()]),
			fmt.Sprintf("add chain %s kube-proxy %s", f, chain),
			fmt.Sprintf("flush chain %s kube-proxy %s", f, chain),
			fmt.Sprintf("add rule %s kube-proxy %s %s saddr @%s goto %s", f, s.chain(), f, s.affinitySet(e), chain),
			fmt.Sprintf("add rule %s kube-proxy %s update @%s { %s saddr }", f, chain, s.affinitySet(e), f),
			fmt.Sprintf("add rule %s kube-proxy %s meta l4proto tcp dnat to %s", f, chain, e))
	}
	switch {
	case len(endpoints) == 0:
	case s.affinity:
		lines = append(lines, fmt.Sprintf("add rule %s kube-proxy %s numgen random mod %d vmap { %s }", f, s.chain(), len(endpoints), strings.Join(items, " , ")))
	default:
		lines = append(lines, fmt.Sprintf("add rule %s kube-proxy %s meta l4proto tcp dnat %s addr . port to numgen random mod %d map { %s }", f, s.chain(), f, len(endpoints), strings.Join(items, " , ")))
	}
	if s.affinity {
		for _, e := range before {
			lines = append(lines, fmt.Sprintf("flush chain %s kube-proxy %s", f, s.endpointChain(e)), fmt.Sprintf("delete set %s kube-proxy %s", f, s.affinitySet(e)))
		}
	}
	return lines
}

package check

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// proxies judges kube-proxy on each node, as the node's agent has found it. Nodes whose agent has
// not sent a mode are left out.
func (f Facts) proxies(add adder) {
	counts, total := map[string]int{}, 0
	for _, c := range f.Coordinators {
		for m, n := range c.View.Agents.GatewayModes {
			counts[m] = max(counts[m], n)
		}
	}
	for _, m := range slices.Sorted(maps.Keys(counts)) {
		if name, is := strings.CutPrefix(m, api.GatewayBeside); is {
			add(Warning, name, "lameduck.io/stated-wait of Services (docs/coverage.md)", "it chooses pods by itself "+
				"on %d nodes and cannot be observed: barriers do not wait for what it sends", counts[m])
			delete(counts, m)
		}
	}
	most := ""
	for _, m := range slices.Sorted(maps.Keys(counts)) {
		total += counts[m]
		if m != api.GatewayAbsent && counts[m] > counts[most] {
			most = m
		}
	}
	const cause = "kube-proxy does not run there, runs in mode ipvs, or another program replaces it. Barriers do not " +
		"wait for what sends to pods there"
	if most == "" && total > 0 {
		add(Warning, "kube-proxy", "kube-proxy in mode nftables or iptables, or agents for what replaces it "+
			"(docs/coverage.md)", "none of its rules are on any of %d nodes: %s", total, cause)
		return
	}
	others := slices.DeleteFunc(slices.Clone(f.Agents), func(a api.Agent) bool {
		return !a.HasMode() || a.GatewayMode == most || strings.HasPrefix(a.GatewayMode, api.GatewayBeside)
	})
	for _, a := range others[:min(len(others), named)] {
		node := cmp.Or(a.Node, a.Name)
		pod := " pod -l k8s-app=kube-proxy --field-selector spec.nodeName=" + node
		if a.GatewayMode == api.GatewayAbsent {
			add(Warning, "node "+node, "kubectl -n kube-system get"+pod,
				"no rules of kube-proxy are there, and on other nodes it is in mode %s: %s", most, cause)
			continue
		}
		add(Note, "node "+node, "kubectl -n kube-system delete"+pod, "kube-proxy is in mode %s there, and in mode %s "+
			"on most nodes: it has another configuration, or has not been restarted since that was changed",
			a.GatewayMode, most)
	}
	if more := total - counts[most] - named; more > 0 {
		add(Warning, "nodes", "kubectl lameduck status -o wide",
			"%d more have no rules of kube-proxy, or another mode than most", more)
	}
}

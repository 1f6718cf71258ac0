package check

import (
	"cmp"
	"maps"
	"slices"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// proxies judges kube-proxy on each node, as the node's agent has found it. Nodes whose agent has
// not sent a mode are left out.
func (f Facts) proxies(add adder) {
	modes := map[string]string{} // by node
	counts := map[string]int{}
	for _, a := range f.Agents {
		if a.Gateway == "kube-proxy" && a.GatewayMode != "" && a.State != api.AgentGone && a.State != api.AgentLeft {
			modes[cmp.Or(a.Node, a.Name)] = a.GatewayMode
			counts[a.GatewayMode]++
		}
	}
	const cause = "kube-proxy does not run there, runs in mode ipvs, or another program replaces it. Barriers do not " +
		"wait for what sends to pods there"
	nodes := slices.Sorted(maps.Keys(modes))
	if len(nodes) > 0 && counts[api.GatewayAbsent] == len(nodes) {
		add(Warning, "kube-proxy", "kube-proxy in mode nftables or iptables, or agents for what replaces it "+
			"(docs/coverage.md)", "none of its rules are on any node (%s): %s", some(nodes), cause)
		return
	}
	delete(counts, api.GatewayAbsent)
	most := ""
	for _, m := range slices.Sorted(maps.Keys(counts)) {
		if counts[m] > counts[most] {
			most = m
		}
	}
	nodes = slices.DeleteFunc(nodes, func(n string) bool { return modes[n] == most })
	for _, n := range nodes[:min(len(nodes), named)] {
		pod := " pod -l k8s-app=kube-proxy --field-selector spec.nodeName=" + n
		if modes[n] == api.GatewayAbsent {
			add(Warning, "node "+n, "kubectl -n kube-system get"+pod,
				"no rules of kube-proxy are there, and on other nodes it is in mode %s: %s", most, cause)
			continue
		}
		add(Note, "node "+n, "kubectl -n kube-system delete"+pod, "kube-proxy is in mode %s there, and in mode %s on "+
			"most nodes: it has another configuration, or has not been restarted since that was changed", modes[n], most)
	}
	if more := len(nodes) - named; more > 0 {
		add(Warning, "nodes", "kubectl lameduck status -o wide",
			"%d more have no rules of kube-proxy, or another mode than most", more)
	}
}

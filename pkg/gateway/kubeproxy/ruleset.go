package kubeproxy

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

type nodeKind uint8

const (
	chainNode nodeKind = iota
	mapNode
	destNode
)

// node is a chain, a map or a destination of a table. Edges lead from a chain to the chains that it
// jumps to, the maps that give it a verdict or an address, and the destinations that it names.
// Edges lead from a map to the chains and destinations of its elements. Equal edges are counted.
type node struct {
	kind    nodeKind
	name    string
	dest    netip.AddrPort
	in, out map[*node]int
	// base reports whether the node is a chain that the kernel enters at a hook.
	base bool
	// defined reports whether the chain or map exists. Otherwise there is only an edge to it.
	defined bool
	// rules are the rules of a chain, by handle. elements are the elements of a map, by key.
	rules    map[uint64][]*node
	elements map[string]*node
	handle   uint64
}

func link(from, to *node) {
	if from.out == nil {
		from.out = map[*node]int{}
	}
	if to.in == nil {
		to.in = map[*node]int{}
	}
	from.out[to]++
	to.in[from]++
}

func unlink(from, to *node) {
	if from.out[to]--; from.out[to] == 0 {
		delete(from.out, to)
	}
	if to.in[from]--; to.in[from] == 0 {
		delete(to.in, from)
	}
}

// table is a graph of where a table sends packets. The caller applies changes in the kernel's
// order.
type table struct {
	id     tableID
	exists bool
	chains map[string]*node
	maps   map[string]*node
	dests  map[netip.Addr]map[uint16]*node
}

func newTableGraph(id tableID) *table {
	return &table{id: id, chains: map[string]*node{}, maps: map[string]*node{},
		dests: map[netip.Addr]map[uint16]*node{}}
}

// equal reports whether two tables do the same with packets.
func (t *table) equal(u *table) bool {
	return t.exists == u.exists && maps.EqualFunc(t.chains, u.chains, (*node).equal) &&
		maps.EqualFunc(t.maps, u.maps, (*node).equal)
}

func (n *node) equal(m *node) bool {
	same := func(a, b *node) bool { return a.kind == b.kind && a.name == b.name && a.dest == b.dest }
	rules := func(a, b []*node) bool { return slices.EqualFunc(a, b, same) }
	return n.defined == m.defined && n.base == m.base && maps.EqualFunc(n.rules, m.rules, rules) &&
		maps.EqualFunc(n.elements, m.elements, same)
}

// iptables reports whether t is the nat table of iptables-nft, which other programs also write.
func (t *table) iptables() bool { return t.id.name != proxyTable }

// follows reports whether a chain of that name can show where kube-proxy sends. Other programs
// write to the table of iptables too: CRI-O maps host ports by chains with kube-proxy's prefix,
// which stay until the pod's sandbox is deleted.
func (t *table) follows(chain string, base bool) bool {
	return !t.iptables() || base ||
		strings.HasPrefix(chain, "KUBE-") && chain != "KUBE-HOSTPORTS" && !strings.HasPrefix(chain, "KUBE-HP-")
}

func (t *table) chain(name string) *node   { return named(t.chains, chainNode, name) }
func (t *table) mapping(name string) *node { return named(t.maps, mapNode, name) }

func named(all map[string]*node, kind nodeKind, name string) *node {
	n := all[name]
	if n == nil {
		n = &node{kind: kind, name: name}
		all[name] = n
	}
	return n
}

func (t *table) destination(d netip.AddrPort) *node {
	ports := t.dests[d.Addr()]
	if ports == nil {
		ports = map[uint16]*node{}
		t.dests[d.Addr()] = ports
	}
	n := ports[d.Port()]
	if n == nil {
		n = &node{kind: destNode, dest: d, defined: true}
		ports[d.Port()] = n
	}
	return n
}

// disconnect deletes an edge, and to if that is then neither defined nor the end of another edge.
func (t *table) disconnect(from, to *node) {
	unlink(from, to)
	t.forget(to)
}

func (t *table) forget(n *node) {
	if len(n.in) > 0 {
		return
	}
	switch n.kind {
	case chainNode:
		if !n.defined && t.chains[n.name] == n {
			delete(t.chains, n.name)
		}
	case mapNode:
		if !n.defined && t.maps[n.name] == n {
			delete(t.maps, n.name)
		}
	case destNode:
		ports := t.dests[n.dest.Addr()]
		delete(ports, n.dest.Port())
		if len(ports) == 0 {
			delete(t.dests, n.dest.Addr())
		}
	}
}

// apply makes a change, and reports whether the change, when it is made for the first time, may
// alter where packets go.
func (t *table) apply(c *change) bool {
	switch c.kind {
	case newTable:
		t.exists = true
	case delTable:
		*t = *newTableGraph(t.id)
		return true
	case newChain:
		if !t.follows(c.name, c.base) {
			return false
		}
		n := t.chain(c.name)
		changed := !n.defined || n.base != c.base
		n.defined, n.base = true, c.base
		return changed
	case delChain:
		n := t.chains[c.name]
		if n == nil || !n.defined {
			return false
		}
		for handle := range n.rules {
			t.dropRule(n, handle)
		}
		n.defined, n.base = false, false
		t.forget(n)
		return true
	case newRule:
		// Chains come first in a dump, so a rule in an unknown chain is not followed.
		n := t.chains[c.name]
		if n == nil || !n.defined {
			return false
		}
		t.dropRule(n, c.handle)
		return t.addRule(n, c)
	case delRule:
		n := t.chains[c.name]
		return n != nil && t.dropRule(n, c.handle)
	case newSet:
		if !c.sends {
			return false
		}
		n := t.mapping(c.name)
		n.defined, n.handle = true, c.handle
		return true
	case delSet:
		n := t.maps[c.name]
		if n == nil || !n.defined || n.handle != c.handle {
			return false
		}
		for key := range n.elements {
			t.dropElement(n, key)
		}
		n.defined = false
		t.forget(n)
		return true
	case newElem, delElem:
		n := t.maps[c.name]
		if n == nil || !n.defined {
			return false
		}
		changed := false
		for _, e := range c.elements {
			changed = t.dropElement(n, e.key) || changed
			if c.kind == newElem {
				changed = t.addElement(n, e) || changed
			}
		}
		return changed
	}
	return false
}

func (t *table) addRule(n *node, c *change) bool {
	var leads []*node
	for _, name := range c.rule.jumps {
		if t.follows(name, false) {
			leads = append(leads, t.chain(name))
		}
	}
	for _, name := range c.rule.maps {
		leads = append(leads, t.mapping(name))
	}
	// A destination in a base chain of the table of iptables is not kube-proxy's.
	if !t.iptables() || !n.base {
		for _, d := range c.rule.dests {
			if d.IsValid() {
				leads = append(leads, t.destination(d))
			}
		}
	}
	if len(leads) == 0 {
		return false
	}
	for _, to := range leads {
		link(n, to)
	}
	if n.rules == nil {
		n.rules = map[uint64][]*node{}
	}
	n.rules[c.handle] = leads
	return true
}

func (t *table) dropRule(n *node, handle uint64) bool {
	leads, ok := n.rules[handle]
	delete(n.rules, handle)
	for _, to := range leads {
		t.disconnect(n, to)
	}
	return ok
}

func (t *table) addElement(n *node, e element) bool {
	var to *node
	switch {
	case e.chain != "":
		to = t.chain(e.chain)
	case e.dest.IsValid():
		to = t.destination(e.dest)
	default:
		return false // drop, accept: leads nowhere
	}
	link(n, to)
	if n.elements == nil {
		n.elements = map[string]*node{}
	}
	n.elements[e.key] = to
	return true
}

func (t *table) dropElement(n *node, key string) bool {
	to, ok := n.elements[key]
	if ok {
		delete(n.elements, key)
		t.disconnect(n, to)
	}
	return ok
}

// complete reports whether kube-proxy has written the table. Its first transaction is complete,
// because it waits for all Services and EndpointSlices (syncProxyRules). In ipvs mode, which alone
// has KUBE-NODE-PORT, it writes KUBE-SERVICES too, but packets go elsewhere.
func (t *table) complete() bool {
	if t.iptables() {
		n := t.chains["KUBE-SERVICES"]
		return n != nil && n.defined && len(n.rules) > 0 && n.out[t.chains["KUBE-NODE-PORT"]] == 0 &&
			entered(n, map[*node]bool{})
	}
	n := t.chains["services"]
	return t.exists && n != nil && n.defined && len(n.rules) > 0
}

// destinations returns the nodes of a target. Port 0 stands for every port of the address.
func (t *table) destinations(target netip.AddrPort) []*node {
	ports := t.dests[target.Addr()]
	var all []*node
	for port, n := range ports {
		// A destination without a port keeps the client's destination port, which may be any.
		if target.Port() == 0 || port == 0 || port == target.Port() {
			all = append(all, n)
		}
	}
	return all
}

// entered reports whether the kernel gets to n from one of its hooks.
func entered(n *node, seen map[*node]bool) bool {
	if n.base {
		return true
	}
	seen[n] = true
	for from := range n.in {
		if !seen[from] && from.defined && entered(from, seen) {
			return true
		}
	}
	return false
}

// sending is what a table does with a target.
type sending uint8

const (
	sendsNothing sending = iota
	sendsLast            // and to no others, wherever it sends to the target
	sendsToo             // and to others
)

// sending returns what the table does with target. Destinations for which going reports false count
// as others.
func (t *table) sending(target netip.AddrPort, going func(netip.AddrPort) bool) sending {
	answer := sendsNothing
	for _, n := range t.destinations(target) {
		for from := range n.in {
			if !from.defined || !entered(from, map[*node]bool{}) {
				continue
			}
			answer = max(answer, sendsLast)
			if !only(from, going, map[*node]bool{}) {
				return sendsToo
			}
			for choice := range from.in {
				if t.chooses(choice) && entered(choice, map[*node]bool{}) && !only(choice, going, map[*node]bool{}) {
					return sendsToo
				}
			}
		}
	}
	return answer
}

// chooses reports whether n, which leads to a chain with a destination, chooses one of several such
// chains for a connection. With nftables that is a map inside a rule, which the kernel names. Named
// maps and chains lead to a chain by the packet's addresses. With iptables a Service's chain
// chooses.
func (t *table) chooses(n *node) bool {
	return n.defined && (t.iptables() || n.kind == mapNode && strings.HasPrefix(n.name, "__"))
}

// only reports whether going is true for all destinations that n leads to.
func only(n *node, going func(netip.AddrPort) bool, seen map[*node]bool) bool {
	if n.kind == destNode {
		return going(n.dest)
	}
	seen[n] = true
	for to := range n.out {
		if !seen[to] && !only(to, going, seen) {
			return false
		}
	}
	return true
}

const (
	proxyTable = "kube-proxy"
	natTable   = "nat"
	// legacyTable stands for the nat table of the legacy iptables, which nftables does not show.
	legacyTable = "nat, legacy"
)

// families are the address families that kube-proxy serves.
var families = []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}

// ours reports whether kube-proxy may write rules for destinations into a table.
func ours(id tableID) bool {
	return slices.Contains(families, id.family) && (id.name == proxyTable || id.name == natTable)
}

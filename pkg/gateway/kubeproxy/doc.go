// Package kubeproxy observes what kube-proxy made of a node's kernel: whether it still sends new
// connections to a pod, and whether connections to the pod are open.
//
// kube-proxy cannot be told to stop routing to a pod. It reacts to the pod's terminating endpoint,
// some time after the deletion: 30 ms when it is idle, a second or more in a burst. Its own reports
// do not name single pods. But it works by the rules of the kernel's packet filter, which a process
// with CAP_NET_ADMIN in the node's network can read. This package knows nothing of Kubernetes.
//
// # Model
//
// An [Observer] subscribes to the kernel's nftables notifications, reads the tables that kube-proxy
// may have written, and then applies each transaction of which it is notified. The kernel numbers
// transactions. If one is missing, or the socket's buffer overruns, every watch is Unknown until
// all tables have been read again. The cost of a change depends on its own size, not on that of the
// tables. Only legacy iptables and connections are polled, see below. Every 5 minutes an audit
// reads all tables again and corrects differences, see [Observer.Audits].
//
// The rules are a graph. Chains lead to chains by jumps and gotos, and to maps; maps lead to chains
// by verdicts; rules and maps lead to destinations by DNAT. The kernel sends to a target if a path
// leads from one of its hooks to a destination with the target's address. The names of chains, and
// whether they exist, do not matter: kube-proxy leaves unreachable chains behind, up to 30 s in
// clusters with more than 1,000 endpoints. A client that a Service with session affinity has
// remembered is sent by a rule of its own, which is an edge like any other. Of several destinations
// the kernel chooses one at random. The state is [Kept] if, everywhere the target could be chosen,
// every other destination is a target of a watch too. kube-proxy writes such rules when no endpoint
// is ready (KEP-1669).
//
// Every state can become lower again. The kernel sends to a Removed pod again if no other endpoint
// is left and the pod is terminating but still ready, or if kube-proxy reads older data from an API
// server. [Watch.Reading] then returns the new state, and changed is called.
//
// The same endpoint chains serve ClusterIP, NodePort, external addresses and those of load
// balancers, with both traffic policies. The package does not distinguish these: a pod is Removed
// when none of them leads to it.
//
// # Modes
//
//   - nftables (table kube-proxy, families ip and ip6): complete since the transaction in which the
//     chain services leads to the Services.
//   - iptables-nft (table nat): the same notifications. Only chains whose names begin with KUBE-
//     count, and what leads to them; others map ports there. Complete since the transaction that
//     has rules in KUBE-SERVICES.
//   - iptables-legacy: the kernel does not notify of changes. All rules are read again while there
//     is a watch, at most every 100 ms and a twentieth of the time, which with 10,000 endpoints is
//     some 10 MB each time; a removal is noticed that much later. Without a watch, they are only
//     looked for. So a new watch is Unknown at first. It is seen in the process's own network
//     namespace only.
//
// Which of them kube-proxy uses is not configured. Whatever is complete counts, all of it: a target
// is Removed when none sends to it. If one that was complete is gone, its family is Unknown until
// kube-proxy has written to a complete one. That may be another one, which was complete before, as
// where an operator deletes what a former mode has left behind. Where kube-proxy runs in ipvs mode,
// or something else replaces it (Cilium among others), everything is Unknown, and [Observer.Absent]
// reports so.
//
// # Connections
//
// While a watch is open, the Observer counts the connections to its targets in the node's conntrack
// table: those that the target answers, in SYN_SENT, SYN_RECV or ESTABLISHED (or the same states of
// SCTP). The watch is [Idle] if there is none to wait for at least 20 ms after the removal was
// read. By then every packet that was routed before the removal is in the table, except in the
// holes below. If a connection arrives later, the watch is Removed again. While the kernel still
// sends to the targets, NoConnections reports whether two counts in a row found none to wait for.
// Counting takes at most a fifth of a core; watches that wait for nothing are counted every 1 to 10
// s.
//
// A keep-alive connection is waited for only until a quiet moment between two requests. The
// Observer recognizes such a connection by its packets, which it has the kernel count: see
// docs/decisions/0029-kept-connections.md.
//
// All connections that pass the node are counted, whether kube-proxy sent them or not: on the pod's
// own node these are also those that other nodes sent, and those to the pod's own address. A client
// that opens one connection after the other to the pod's address prevents Idle, so a caller that
// waits for Idle must set a bound.
//
// [Observer.Clean] deletes what is left of a pod that does not exist any more. Otherwise the kernel
// would send a client that reuses its port to the address of the deleted pod, for as long as
// conntrack has the entry: hours or days.
//
// # Known holes
//
//   - UDP has no connections: Removed says that no new flow is sent to the pod, Idle says nothing
//     more. A flow that conntrack knows is sent on to the pod until kube-proxy deletes it, which it
//     does when the endpoint is no longer serving, or Clean does.
//   - A TLS handshake looks like a request and its answer: a first request over TLS, or an answer,
//     that pauses for a second is not waited for any longer.
//   - A client that has closed its half and waits for the answer is in CLOSE_WAIT, and not counted.
//   - The health-check node port of a Service with externalTrafficPolicy Local is answered by
//     kube-proxy itself after it has written the rules. A load balancer that relies on it sends to
//     the node for as long as its own checks take; then the kernel drops what comes if no endpoint
//     is left there, or keeps sending to the terminating one. That is what a stated wait is for.
//   - A new connection is in the table when its first packet has passed the last hook. One that
//     waits in between for more than 20 ms is not counted: in a queue to a program that judges
//     packets (NFQUEUE), or on a computer that stands still.
//   - The rules are read in several dumps. Changes in the meantime are made again on top of them,
//     so that a reading ends however often rules are written. Only a single dump must not be
//     interrupted: if in 100 tries no pause between two transactions is as long as the longest
//     dump, which is that of a table's rules, the state stays Unknown.
//   - A transaction that adds elements to a set and is then refused by the kernel, at the time of a
//     dump that is longer than a page, can hide as many elements. The next audit corrects that.
//   - Ports of hosts that a network plugin or CRI-O maps to a pod (hostPort) are rules of theirs,
//     and are deleted with the pod's sandbox.
//   - With the feature gate KubeProxyNFTablesLocalhostNodePorts (1.37, alpha), kube-proxy itself
//     connects to endpoints for node ports of the loopback address, and learns of changes after the
//     rules. The rules do not show where it sends.
//   - Rules that are there do not prove that kube-proxy runs. If it does not run, a pod that they
//     have stays Routing, and a younger pod is Removed. Reading.Written shows when kube-proxy last
//     wrote, or when the rules were first read: a caller that knows that the pod must be in them
//     can tell the two apart, see docs/decisions/0040-rules-that-nothing-maintains.md. Of legacy
//     rules it is not known.
//   - A connection that a flowtable, or hardware, has taken over is open until conntrack has it
//     back. Its packets are not seen, so one that is kept from one request to the next is waited
//     for until it is closed.
//   - A pod's own network namespace may have rules, such as those of a service mesh. They are not
//     looked at.
//
// # Versions
//
// Tested with Linux 6.18 and kube-proxy 1.36.3 (testdata has what it wrote); earlier ones wrote a
// chain for each endpoint also without affinity, which is what it does with affinity now. 1.37
// writes the only endpoint of a Service into the Service's own chain. Kernels before 5.8 do not
// filter connections and return all of them. The kernel's filter by IPv6 address is inverted: see
// walk in conntrack.go.
package kubeproxy

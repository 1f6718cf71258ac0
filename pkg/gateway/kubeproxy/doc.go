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
// An [Observer] subscribes to the kernel's notifications of nftables, then reads the tables that
// kube-proxy may have written, then makes each transaction that it is told of. The kernel numbers
// transactions, and what was read has a number too. One that is missing, or an overrun of the
// socket's buffer, makes everything Unknown until all has been read again. So the cost of a change
// is that of the change. Nothing is polled, with the two exceptions below, and an audit: every 5
// minutes all is read again, compared, and corrected if it differs, see [Observer.Audits].
//
// The rules are a graph. Chains lead to chains by jumps and gotos, and to maps; maps lead to chains
// by verdicts; rules and maps lead to destinations by DNAT. A target is sent to if a way leads from
// one of the kernel's hooks to a destination that is it. That is what counts, and not the names of
// chains or whether they exist: kube-proxy leaves chains behind that nothing leads to, up to 30 s
// in clusters with more than 1,000 endpoints. A client that a Service with session affinity has
// remembered is sent by a rule of its own, which is an edge like any other. Where a target is one
// of several destinations the kernel chooses by chance; if all that could be chosen, everywhere
// where the target could be, are targets of watches, the state is [Kept]: kube-proxy does that when
// no endpoint is ready (KEP-1669).
//
// All states are levels. The kernel sends to a Removed pod again when the pod is still ready,
// though terminating, and no other is left, and when kube-proxy reads older data from an API
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
// While a watch is open the connections to its targets are counted in conntrack of the node's
// network: those whose answers come from the target, whatever address the client asked for, in
// SYN_SENT, SYN_RECV or ESTABLISHED (and the like of SCTP). If there is none to wait for 20 ms
// after the commit was read, or later, the watch is [Idle]: by then a packet that had chosen its
// way before is in the table, see the holes. Idle is a level: when a connection arrives later, the
// watch is Removed again. While the kernel still sends to the targets, a reading says whether it is
// quiet, which is twice in a row none: of a pod that the kernel keeps for want of another one, that
// is all that can be asked. Counting is bounded polling, see countShare and countSlow.
//
// A keep-alive connection is waited for only until a quiet moment between two requests. The
// Observer has the kernel count the packets of connections, and tells such a connection by them:
// see held, and decision 29.
//
// All connections that pass the node are counted, whether kube-proxy sent them or not: on the pod's
// own node these are also those that other nodes sent, and those to the pod's own address. A client
// that opens one connection after the other to the pod's address prevents Idle, so a caller that
// waits for Idle must set a bound.
//
// [Observer.Clean] deletes what is left of a pod that does not exist any more. Otherwise a client
// that uses its port again within the time that conntrack remembers it, hours or days, would be
// sent to the dead address.
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
//   - Rules that are there do not prove that kube-proxy runs. If it does not run, no rule is
//     removed, and the target stays Routing.
//   - Flows that hardware, or the flowtable, has taken over are counted as conntrack has them.
//   - A pod's own network namespace may have rules, such as those of a service mesh. They are not
//     looked at.
//
// # Versions
//
// Tested with Linux 6.18 and kube-proxy 1.36.3 (testdata has what it wrote); earlier ones wrote a
// chain for each endpoint also without affinity, which is what it does with affinity now. Kernels
// before 5.8 do not filter connections: they tell all. That the kernel's filter by IPv6 addresses
// is inverted is in [counter.walk].
package kubeproxy

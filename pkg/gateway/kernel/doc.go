// Package kernel directs any gateway that connects to pods itself. eBPF programs in the cgroup of
// the gateway's pod run at each connect(). They redirect a connection to an excluded ip:port to
// another endpoint of the same Service and port. The gateway needs no interface for this, and does
// not notice it.
//
// A target is Removed when the exclusion is read back from the kernel's map, and the programs of
// this agent are read back from each cgroup of the pod. That holds for every worker and every old
// process at once. Connections that were open before continue. They are counted, together with
// those that the gateway is about to open, and a target is Idle when none is left. A connection of
// a pool can be closed once it is quiet, see [Service.HTTP1Quiet].
//
// # What is excluded
//
// The gateway follows EndpointSlices by itself. A target that the agent has not received may
// therefore be routed, and is read as routed. An address that is no longer an endpoint stays
// excluded for 10 s, because the gateway may learn of that later than the agent. An address that is
// in several pools has one exclusion, and its replacements are in all of these: a connection does
// not say for which Service it is. A pool that the pod has left while it stayed in another one
// counts for 10 s more. If no replacement is left, connections pass.
//
// # Nothing stays excluded
//
// Maps and programs are pinned and outlive the agent. Each exclusion has an expiry, 70 s after its
// last renewal by the agent. The programs ignore an expired exclusion. If an agent dies and none
// replaces it, connections to the address pass again after that.
//
// Not covered: UDP, Multipath TCP, connections that a program after this one translates, such as
// those to a Service's address, and sandboxes with a kernel of their own.
package kernel

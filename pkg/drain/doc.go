// Package drain is the ledger of one coordinator replica: which pods are being drained, which
// agents must acknowledge that, and what they have reported.
//
// A drain is of one pod UID, at the hold or at the barrier ([Gate]), and goes
//
//	(Queued ->) Unrouting -> Quiescing -> Released -> Closed
//
// It is Queued while too many pods of one of its Services are being drained. It is Unrouting while
// an agent that must acknowledge it has not reported Removed, and Quiescing while all have and one
// has not reported Idle. It is Released when the deletion, or SIGTERM, may continue. It is Closed
// when the pod has passed the gate: terminating at the hold, deleted at the barrier. It is also
// Closed when the deletion was given up. Released and Closed have a reason.
//
// The phase is not latched. An agent reports the present state of the pod in its gateway, again at
// each change, and at least once in each renewal (Times.Renewal). The ledger derives the phase from
// the reports that it holds when it is asked. A report counts only if it came on the agent's
// present session with this replica, names the open drain by its number, and is younger than the
// freshness bound. The end of a session voids all of its reports, and the end of a drain those
// about it. So an acknowledgement never counts after it has stopped being true: if a proxy is
// reloaded between its report and the question, the drain is Unrouting again.
//
// A drain at the hold ends when the replica learns that the pod is terminating
// ([Ledger.GatePassed]), or that its deletion was given up ([Ledger.NotTerminating], after a live
// read of the pod that [Ledger.Tick] asked for; [Ledger.Decided]). If this replica denied every
// call, [Ledger.Tick] ends it without a read in the end. A drain for the restart of a container
// also ends when the pod is ready again ([Ledger.ReadyAgain]). A drain at the barrier ends when the
// pod is deleted, by [Ledger.EndBarrier] where hooks do not wait, or Times.Memory after its
// deadline. Reaching the deadline releases a drain and names the agents that did not answer. It
// does not close the drain.
//
// The agents that must acknowledge a drain follow from what agents declare and from which agents
// the API lists ([Ledger.Expect]). They are not configured. An agent that has not declared its
// routes yet must acknowledge every drain, unless its label restricts it to one gate. An agent
// whose gateway has ended leaves ([Ledger.Leave]). An agent that lets drain after drain expire is
// suspended (breaker.go).
//
// A drain has one clock. It starts at the earliest start of a drain of the UID that this replica or
// another one knows ([Place], [Ledger.Polled]). Asking again, or the restart of one of several
// replicas, does not restart it. Abandonment stops it: the next drain of the UID continues from
// there, and gets at least most of a hold.
//
// # Usage
//
// The [Ledger] has no clock, goroutine, Kubernetes or HTTP, and is not safe for concurrent use. A
// method whose result depends on the time takes now. Package coordinator calls it under one lock:
//
//	status := ledger.Ask(now, pod, targets, place) // a deletion is reviewed
//	if status.Waits() {
//		answered = ledger.Hold(pod.UID) // the call waits: call answered with its answer
//	}
//
// After each call that may change a drain, and at Status.Recheck, when time alone may change one:
//
//  1. Call [Ledger.Changed] for each gate, and [Ledger.Status] for each UID that it returns, until
//     there is none: a status that is derived may change other drains. Answer the calls and hooks
//     whose status no longer waits.
//  2. Wake the streams of the agents that [Ledger.Affected] returns. Each stream calls
//     [Ledger.ChangesFor] until it returns nothing, and writes what it returns without the lock.
//
// Each second, call [Ledger.Tick], read the pods that it returns from the API server, and record
// the result with [Ledger.GatePassed] or [Ledger.NotTerminating]. Without these reads a drain whose
// deletion was given up never ends, and its pod stays out of its gateways.
//
// A drain that was Released may be Unrouting when it is asked about again. So answer by a status of
// this moment, and never by one that was stored.
//
// # Files
//
// ledger.go is the state machine: phases, the effect of reports and of time. Its parts are the
// roster (which agents must acknowledge), the changes (what to send to which agents), the queue for
// capacity, the barrier and the breaker. Package coordinator adds the clock, the network and the
// API server; package wire is what agents receive.
package drain

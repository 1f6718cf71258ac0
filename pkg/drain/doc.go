// Package drain is the ledger: which pods are being let go of, by whom, since when, and who has
// said so.
//
// A drain is of one pod UID and goes
//
//	(Queued ->) Unrouting -> Quiescing -> Released -> Closed
//
// It is Queued while too many pods of one of its Services are being drained already, Unrouting
// while an agent that owes it has not said Removed, Quiescing while all have but one has not said
// Idle, Released when the pod may be told to stop, and Closed when it is known to be going (dead)
// or known to stay (abandoned). Released and Closed have a reason.
//
// The phase is not latched. Agents report *levels*: the present state of the pod in their gateway,
// again whenever it changes and at least every renewal. The ledger derives the phase from the
// reports it holds at the moment it is asked. A report counts only if it came on the agent's
// present session with this replica, says that the tombstone stands under this replica's lease, and
// is younger than the freshness bound; a lost session voids all of its reports, and the end of a
// drain those on its pod. So an acknowledgement cannot be spent after it stopped being true: if a
// proxy is reloaded between the last word and the question, the drain is Unrouting again.
//
// Only two things end a drain: knowledge that the pod is going or gone ([Ledger.GatePassed]), and
// knowledge that nobody wants it deleted any more ([Ledger.NotTerminating], from a live read of the
// pod that [Ledger.Tick] asked for). Time alone releases, by the deadline, with the silent agents
// named; it never closes.
//
// Who owes is computed from what agents declare and from which agents the API says exist
// ([Ledger.Expect]), never configured. An agent that was never heard owes everything its label says
// it could route. One whose gateway has gone says so ([Ledger.Leave]) and owes nothing; one that
// lets drain after drain expire is no longer waited for (breaker.go).
//
// The clock of a drain is one: the oldest start that this replica or another one knows of the UID
// ([Place], [Ledger.Polled]). Asking again or the restart of one of several replicas does not
// restart it. Abandonment stops it; the next drain of the same UID goes on from there and gets at
// least one hold.
//
// The [Ledger] has no clock, no goroutine, no Kubernetes and no HTTP: every method takes now and
// returns what is to be done. It is not safe for concurrent use; package coordinator owns it, and
// gives it voice.
package drain

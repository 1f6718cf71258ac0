// Package admission answers the API server's question whether a pod may be deleted or evicted now,
// and adds the preStop barrier to new pods.
//
// A deletion goes through three separate steps. [gather] collects the [Facts] from the review, from
// caches and from the ledger, and decides nothing. [Decide] turns them into a [Verdict] without
// I/O, clock or log: it is the table in docs/how-it-works.md as one function. [Handler] carries the
// verdict out: it answers immediately, or waits for the drain, and counts the outcome by its
// reason.
//
// The API server calls again for the same deletion when a client tries again, or when the pod was
// written in the meantime. A handler may therefore be called any number of times: it starts no
// clock and counts no deletion. The ledger does both, by pod UID (package drain, which package
// coordinator runs).
package admission

// Package admission answers the API server's question whether a pod may be deleted or evicted now,
// and adds the preStop barrier to new pods.
//
// A deletion passes three steps. [Cluster] collects the [Facts] from the review, caches and the
// ledger. [Decide] turns them into a [Verdict], without I/O, clock or log: it evaluates [Table],
// which docs/how-it-works.md shows. A [Call] carries the verdict out: it asks the opener if this
// replica is a witness, waits for the drain, and turns the end of the drain into an [Outcome].
// [Handler] drives calls for the API server.
//
// The API server calls again for the same deletion when a client tries again, or when the pod was
// written in the meantime. A handler may therefore be called any number of times: it starts no
// clock and counts no deletion. The ledger does both, by pod UID (package drain, which package
// coordinator runs).
package admission

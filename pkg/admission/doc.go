// Package admission is what the API server asks: may this pod be deleted now?
//
// Each question goes through three steps that do not mix. [gather] collects the [Facts]: from the
// review, from caches, from the ledger; no decision. [Decide] turns them into a [Verdict]: no I/O,
// no clock, no log; it is the table of the design as one function. [Handler] carries it out:
// answers at once, or lets the coordinator hold the call, and counts the outcome by its reason in
// one place.
//
// A handler is called again for the same deletion: by retries of the client, and by the API server
// itself whenever the pod was written meanwhile. Nothing here starts a clock or counts a deletion
// twice; the ledger does that, by pod UID.
package admission

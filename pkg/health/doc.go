// Package health is what an agent knows of every target it may route to, and what it wants the
// gateway to do with it.
//
// The [Set] has four inputs and one output. EndpointSlices say which pods claim to be routable
// ([Set.Change]); coordinators say which pods must be let go ([Set.Exclude], [Set.Readmit],
// [Set.MarkTerminating]); probes say who is well ([Set.Due], [Set.Report]); the gateway says what
// it really does ([Set.Observe]). Out come the operations that are still needed ([Set.Pending]) and
// the state of each tombstone ([Set.Exclusions]), which is what the agent acknowledges.
//
// There are two masks. Routable is what a live UID claims and no tombstone is on. Chosen, and so to
// be routed, are the usable ones of these, or all of them where too few are usable. A tombstone
// touches no health record, and no lack of health brings a tombstoned target back.
//
// Rules that hold after every call:
//
//   - A change of endpoints is applied as a difference. What stays is not touched, and its health
//     stands.
//   - Identity is pod UID and ip:port. A new pod at an old address inherits nothing: it begins as
//     [VerdictUnknown], which is usable.
//   - Nothing is taken out because it is not listed before [Set.Synced] was called: an agent that
//     has just started knows nothing, and must not empty the gateway. What is not listed yet does
//     not make a tombstoned target expendable either.
//   - A tombstoned pod is not routed, whatever EndpointSlices say, in any pool, at any address,
//     until no holder is left.
//   - The last chosen target a pool really routes to is not taken out for a tombstone: it is [Kept]
//     until another one is seen routed, by a reading that began after the tombstone. A pod that is
//     known to be dead (deleted, terminating) is taken out even so.
//   - Nothing is taken out for its health while the gateway is not seen, by a reading of its
//     present generation, to route to one that is chosen. That reading may be older than the
//     verdict: who takes targets out by hand in one process can empty a pool so, until the gateway
//     is read again.
//   - A tombstone is [Removed] or [Idle] only by an observation of the gateway's present generation
//     that was made after the tombstone. An observation that says otherwise, later, takes it back.
//   - A key is forgotten only when it is neither claimed nor in the gateway, by a reading that
//     began after the gateway was last asked to route to it. An operation may be on its way while
//     its reason goes.
//   - The outcome of a probe counts only for the target and the check it was begun for.
//
// The set has no clock, no I/O and no goroutine; it is safe for concurrent use.
//
// Inside, each pool is a map of its targets, all under one mutex. What is to be done and what is to
// be read are lists that a record enters and leaves when it changes, probes wait in a heap, and
// each pool counts its targets by what they are, so that nothing is looked for by walking over all.
package health

// Package health is what an agent knows of every target it may route to, and what it wants the gateway to do with it.
//
// The [Set] has three inputs and one output. EndpointSlices say which pods claim to be routable ([Set.Replace]); coordinators
// say which pods must be let go ([Set.Bury], [Set.Lift], [Set.Kill]); the gateway says what it really does ([Set.Observe]). Out
// come the operations that are still needed ([Set.Pending]) and the state of each tombstone ([Set.Tombstones]), which is what
// the agent acknowledges.
//
// Rules that hold after every call:
//
//   - A change of endpoints is applied as a difference. What stays is not touched.
//   - Identity is pod UID and ip:port. A new pod at an old address inherits nothing.
//   - Nothing is taken out because it is not listed before [Set.Synced] was called: an agent that has just started
//     knows nothing, and must not empty the gateway. What is not listed yet does not make a tombstoned target expendable either.
//   - A tombstoned pod is not routed, whatever EndpointSlices say, in any pool, at any address, until no holder is left.
//   - The last target a pool really routes to is not taken out for a tombstone: it is [Kept] until another one is seen routed, by
//     a reading that began after the tombstone. A pod that is known to be dead (deleted, terminating) is taken out even so.
//   - A tombstone is [Removed] or [Idle] only by an observation of the gateway's present generation that was made after the
//     tombstone. An observation that says otherwise, later, takes it back.
//   - A key is forgotten only when it is neither claimed nor in the gateway, by a reading that began after the gateway was last
//     asked to route to it. An operation may be on its way while its reason goes.
//
// The set has no clock, no I/O and no goroutine; it is safe for concurrent use.
package health

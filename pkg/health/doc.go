// Package health is an agent's record of every target that its gateway may route to. It decides
// what the gateway should do with each of them. It sends no probes (package probe does) and does
// not talk to the gateway ([github.com/lameduck-io/lameduck/pkg/gateway.Director] does).
//
// The [Set] has four inputs. EndpointSlices list the targets that may be routed ([Set.Change]).
// Coordinators exclude pods ([Set.Exclude], [Set.Readmit], [Set.MarkTerminating]). Probes measure
// the health of targets ([Set.Due], [Set.Report]). Readings show what the gateway does
// ([Set.Observe]). It has three outputs: the operations that the gateway still needs
// ([Set.Pending]), the keys to read ([Set.Watched]), and the state of each exclusion
// ([Set.Exclusions]), which the agent reports.
//
// Two masks select targets. A target is routable if EndpointSlices list it as ready and its pod is
// neither excluded nor terminating. Of the routable targets, the usable ones are chosen for
// traffic. If too few are usable, all are. An exclusion changes no health record, and a lack of
// healthy targets never readmits an excluded one.
//
// Rules that hold after every call:
//
//   - A change of endpoints is applied as a difference. What stays is not touched, and its health
//     stands.
//   - Identity is pod UID and ip:port. A new pod at an old address inherits nothing: it begins as
//     [VerdictUnknown], which is usable.
//   - Nothing is taken out because it is not listed before [Set.Synced] was called for its pool: an
//     agent that has just started knows nothing, and must not empty the gateway. A target that is
//     not listed yet does not count as a replacement for an excluded one either.
//   - An excluded pod is not routed, whatever EndpointSlices say, in any pool, at any address,
//     until no holder is left. An endpoint without a pod cannot be excluded.
//   - The last chosen target that the gateway really routes to in a pool is not taken out for an
//     exclusion: it is [Kept] until another one is seen routed, by a reading that began after the
//     exclusion. A pod that is known to be terminating or deleted is taken out even so.
//   - While the gateway is unread, targets are added and deleted as the readings before show, and
//     none is taken out for an exclusion or for its health. Before the first reading nothing is
//     done.
//   - No target is taken out for its health unless a reading of the gateway's present generation
//     shows it routing to a chosen one. That reading may be older than the verdict: an operator who
//     takes targets out by hand in one process can thereby empty a pool, until the gateway is read
//     again.
//   - An exclusion is [Removed] or [Idle] only by an observation of the gateway's present
//     generation that was made after it began. A later observation that differs takes it back.
//   - An exclusion is neither of these while the gateway may route to an address of the pod for
//     another pod, or for an endpoint without one: which of them has the address is unknown.
//   - A key is forgotten only when it is neither claimed nor in the gateway, by a reading that
//     began after the gateway was last asked to route to it. An operation may still be in flight
//     when its reason ends.
//   - The outcome of a probe counts only for the target and the check it was begun for.
//
// The set has no clock, no I/O and no goroutine; it is safe for concurrent use.
//
// Internally, each pool is a map of its targets, and one mutex protects all pools. Lists have the
// records whose operation or reading is due. A record enters or leaves a list when it changes. A
// heap orders the probes, and each pool counts its targets by condition. So few calls visit all
// targets, see [Set].
package health

// Package journal keeps an agent's exclusions in a file, so that an agent which dies does not route
// again to a pod that it has promised not to route to.
//
// The rule is write-ahead: an exclusion is in the file before the gateway is told of it and before
// a coordinator is told that it holds. Callers get that from [Journal.Sync], which they call before
// they touch the gateway, and from [Journal.Settled], which they ask before they report. One write
// has all that is new, so a hundred exclusions that come at once cost a few. Renewals of expiries,
// and what ends an exclusion, are written within a second. If the agent dies before, that is as if
// the coordinator's last heartbeats had been lost.
//
// The whole journal is one file, written whole beside the old one and renamed. It outlives every
// death of the process, and that is all it is for. It is not synced to the disk: a machine that
// goes down takes the gateway and the agent's sessions with it. So the file says in which boot of
// the machine it was written, and its times are counted in that. A file of another boot is not
// read.
//
// A file system that is full, read-only, gone or stuck stops nothing: availability comes first.
// Sync and Settled wait for the attempt that fails, or for a second, and no longer; [Journal.Err]
// says what is wrong, and each later write tries again. The price is that of an agent without a
// journal: what it is asked to take out meanwhile is forgotten if it dies, until a coordinator
// tells it again.
package journal

// Package journal keeps an agent's exclusions on disk, so that an agent which dies does not route
// again to a pod that it has promised not to route to.
//
// The rule is write-ahead: an exclusion is on disk before the gateway is told of it and before
// anybody is told that it holds. Callers get that from [Journal.Sync], which they call before they
// touch the gateway, and from [Journal.Settled], which they ask before they report. All that was
// said to the journal until a write begins is one write, so that a hundred exclusions that come at
// once cost one or two. What ends an exclusion is written too, but nobody waits for it: if it is
// lost, the exclusion stands until its stored expiry ends, or until the coordinator that holds it
// gives its list again.
//
// The whole journal is one file, written anew beside the old one, synced, renamed, and its
// directory synced: at every moment there is one whole file under its name, whichever instruction
// was the last. It names its version and its checksum; what is not readable is set aside and said,
// and the agent begins with nothing rather than not at all.
//
// # Expiries on disk
//
// An expiry is renewed every few seconds, for all exclusions of its holder together. On disk it
// ends up to half an expiry later than in truth, so that a renewal has to be written only when the
// truth catches up: with expiries of 60 s each 20 s, once for each holder. The error is on the safe
// side: after a restart with every coordinator dead, an exclusion stands up to 30 s longer than its
// expiry.
//
// Times on disk would be at the mercy of a wall clock that jumps while the agent is away. So each
// file says when it was written by two clocks: the wall, and the time since the machine was booted,
// with the name of that boot. In the same boot the latter alone counts; after another boot the wall
// clock does, but no expiry gets longer by it.
//
// # Without a disk
//
// A disk that is full, read-only, gone or stuck stops nothing: availability comes first. Sync and
// Settled then wait for the attempt that has failed, or for a second, and no longer; [Journal.Err]
// says what is wrong, and the writer tries again until it succeeds. The price is that of an agent
// without a journal: what it is asked to take out meanwhile is forgotten if it dies, until a
// coordinator tells it again.
package journal

// Package journal stores an agent's exclusions in a file, so that an agent that crashes does not
// route again to a pod that it has acknowledged. Package exclusion writes it and, at the start of
// the next process, reads it.
//
// The rule is write-ahead: an exclusion is in the file before the gateway applies it, and before
// the agent acknowledges it. For that, callers call [Journal.Sync] before they change the gateway,
// and [Journal.Settled] before they report. One write contains all changes, so a hundred
// simultaneous exclusions need only a few writes. Renewals, and the ends of exclusions, are written
// within a second. A crash before that has the same effect as the loss of the coordinator's last
// heartbeats.
//
// The journal is one file, which is written completely under another name and then renamed. It only
// has to survive the death of the process. It is not synced to the disk, because a machine that
// goes down takes the gateway and the agent's sessions with it. So the file names the boot of the
// machine in which it was written, its times but since count within that boot, and a file of
// another boot is ignored.
//
// A file system that is full, read-only, missing or stuck blocks nothing, because availability
// comes first. Sync waits, and Settled is false, until the attempt fails, or for a second.
// [Journal.Err] returns the error, and each later write tries again. In the meantime the agent is
// as safe as one without a journal: if it crashes, it forgets its exclusions until a coordinator
// repeats them.
package journal

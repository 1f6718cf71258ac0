// Package probe checks the health of targets by TCP, HTTP and gRPC.
//
// A [Runner] takes probes that are due from a [Source], carries them out, and returns their
// outcomes. It has no schedule, thresholds or verdicts: the source, package health, has them. Each
// probe in flight is a goroutine on the standard library's network stack.
//
//	            Due                      start
//	Source ------------> probes due ------------> in flight ------> outcome ----> Source.Report
//	                        |  of targets that did not answer the last time,
//	                        +-> waiting, if those in flight fill their half of the bound
//
// # A black hole delays no other target
//
// A probe that waits for an answer uses no CPU, and the number of probes in flight is bounded.
// Targets whose last probe ended by timeout share one half of the bound; when that half is full,
// further ones wait in the order in which they were due. However many targets are black-holed, the
// others have the other half. The exception is the first [health.Check.Timeout] of a new black
// hole: it delays others if more targets than the bound fall silent within it.
//
// # What the target sees
//
//   - A TCP check is SYN, SYN+ACK, RST. The program behind the port accepts nothing and logs
//     nothing.
//   - The first acknowledgement of an HTTP or gRPC check travels with the request.
//   - A connection ends by RST after the head of the answer was read, so that neither side keeps it
//     in TIME_WAIT: ten thousand probes a second would leave six hundred thousand of them. A
//     backend that is still sending its body sees a reset.
//
// # Failures of this machine
//
// An outcome is about the target. A probe that this machine could not make (descriptors, memory,
// ports, permission) is [health.OutcomeUnknown] with the errno, which counts for nothing. So is a
// timeout that this process notices too late, because it was stopped or starved of CPU.
package probe

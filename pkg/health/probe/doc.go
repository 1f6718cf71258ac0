// Package probe asks targets whether they are well.
//
// A [Runner] takes probes that are due from a [Source], carries them out, and gives back how they ended. It knows no schedule, no thresholds
// and no verdicts; the source has them.
//
//	            Due                      start              epoll
//	Source ------------> probes due ------------> in flight ------> outcome ----> Source.Report
//	                        |  of targets that did not answer the last time,
//	                        +-> waiting, if those in flight fill their half of the bound
//
// HTTP, TCP and gRPC run on one goroutine over raw sockets and one epoll instance: a probe in flight is a socket and a few hundred bytes.
// Its epoll_wait is the only timer there is. HTTPS takes a goroutine for each probe in flight. A target that is not being probed costs
// nothing here, but for a connection that its check keeps alive.
//
// # A black hole delays nobody else
//
// What is in flight is bounded by sockets, not by work: a probe that waits for an answer that does not come uses no CPU. Targets whose last
// probe ended by timeout share one half of the bound; what of them finds no room there waits in the order it was due. So however
// many targets are black-holed, the others have the other half. The exception is the first [health.Check.Timeout] of a new black
// hole, when nobody can know yet: it delays others if more targets than the bound fall silent within it.
//
// # What the target sees
//
//   - A TCP check is SYN, SYN+ACK, RST. The program behind the port accepts nothing and logs nothing.
//   - The first acknowledgement of an HTTP or gRPC check travels with the request.
//   - A connection ends by RST once the answer was read to its end (or to maxAnswer), so that neither side keeps it in TIME_WAIT: at ten
//     thousand probes a second there would be six hundred thousand of them. A backend that sends a body without end sees a reset.
//
// # What is whose fault
//
// An outcome speaks of the target. When the probe could not be made for want of something here (descriptors, memory, ports, permission), it is
// [health.OutcomeUnknown] with the errno, which counts for nothing. After this process was held up (a stopped process, a starved
// CPU), what had arrived meanwhile is read before anything is called a timeout.
package probe

// Package haproxy directs a HAProxy in master-worker mode by its master socket (haproxy -W -S
// path).
//
// # Model
//
// A HAProxy is a master, one worker that takes new connections, and after reloads old workers that
// finish what they have. Only the master socket reaches all of them: "show proc" lists them,
// "@!<pid> <command>" is passed on. A [Backend] of the configuration is a pool: the agent writes
// its section, and makes and deletes its servers, one for each pod UID and address, whose names say
// which (ld-<uid>-<ip>-<port>), so that nothing needs to be remembered.
//
// Removed means the administrative state "maint" that was asked for. "drain" still serves clients
// with a persistence cookie; a failed check, maintenance inherited from a tracked server and an
// unresolved name end by themselves. All these count as Routed, and as Missing if the balancer
// passes the server over.
//
// # What is proved, and how
//
// An observation reads the list of processes, then in each process the servers' states, then the
// counts, then the list again. If the list changed, all of it is read again; if one process does
// not answer, there is no observation. Since the states come before the counts, what was given to a
// server before it was taken out is counted. Active is scur + qcur of "show stat": requests
// connecting, connected and waiting in the server's own queue. HAProxy leaves out of both a request
// that failed to connect and waits, up to a second, to try *the same server again, maintenance or
// not* (back_handle_st_cer in its src/backend.c), and one that has just left the queue. So the
// first count of zero of a target that was taken out is believed only if "show sess" has no stream
// for its servers either. No stream begins for them after that, while the target stays taken out
// and the list of processes is the same, so that later readings need the counts only. The history
// of a server (wretr, qmax) does not tell whether "show sess" is needed: "clear counters all"
// resets it. Active of a target that is routed is the counts alone.
//
// The generation is made of the master's pid and number of reloads, all workers' pids and start
// times, and the time the socket was made: in a container a restarted HAProxy usually has the pids
// it had.
//
// # Reloads
//
// A reload forgets every change made by the socket. So the whole sections live in
// Config.ServersFile, which HAProxy loads by an additional -f, and which lists exactly the servers
// that are wanted. A batch writes it once, by rename, before the first command. A reload that began
// to parse before that has its new worker in the list that is read after it, since the master
// answers nothing while it parses; Apply continues until the list has no process that did not get
// the change. A reload that begins later parses the new file. If the file cannot be written, no
// removal that it contradicts is carried out. A server that HAProxy refuses at run time is taken
// out of the file again, for it would make the next start fail.
//
// Old workers are the hard part. Once a worker has stopped its proxies, HAProxy answers "Proxy is
// disabled." to every change of a server's state there, by whatever command, so that a target that
// was routed when the reload came cannot be taken out of the old worker. What was taken out before
// the reload stays out. Listeners are closed, but a client connection that has sent half a request,
// or none yet, is still served, and balanced as before. Therefore a target that is not in
// maintenance in an old worker counts as Routed as long as the worker could be brought another
// request: until all its client connections are closed (CurrConns of "show info") or are connected
// through, in TCP mode or after a 101, so that they can bring none. Apply fails meanwhile
// (kindStopping). Slow responses hold up removals in that way, WebSockets do not. The global
// setting hard-stop-after bounds it.
//
// # Known holes
//
//   - Between its place in a server's queue and the start of its connection a request is on no
//     list, for one turn of a worker's event loop. It matters only with maxconn.
//   - An endpoint without a pod, as of a Service without a selector, has a server with an empty
//     UID. If a pod has the same address, the server stays in service when the pod is taken out,
//     and the drain of the pod is not acknowledged.
//   - A backend that is not a pool may have a server at the same address, and so may a server that
//     an operator adds to a pool at run time.
//   - default-server lines in a defaults section apply to servers from the file and not to those
//     added at run time. HAProxy 2.6 even leaves out its own defaults for the latter: without
//     pool-max-conn and pool-purge-delay, which the agent therefore gives to every server, they
//     keep no idle connections; max-reuse cannot be given, so that one added at run time with
//     "proto h2" takes one request for each connection until the next reload.
//   - Kept-alive requests that the worker reads from HTTP/2 connections before it says GOAWAY are
//     in the rule for old workers: such a connection counts as able to bring requests until it is
//     closed.
//
// # Deleting
//
// "del server" is refused while the server has requests or idle pooled connections. Maintenance
// closes those that are idle at that moment. One that becomes idle after it, because its request
// ended later, is closed by HAProxy after about three pool-purge-delays (5 s each unless
// ServerOptions says otherwise), or when the pod ends. Nothing waits for that: the server stays in
// maintenance and the op comes again. HAProxy before 2.6.16, 2.8.4 and 2.9 dies of "del server" if
// a stream is bound to the server that is in no counter any more (its issues 2323 and 2378), so a
// server is deleted only by an op that finds it in maintenance already, and only when the list of
// streams does not name it. In an old worker that was never told, it stays until the worker ends.
//
// # Versions
//
// Tested with 2.6.12 only. Servers at run time exist since 2.4, before 2.6 in experimental mode
// (kindTooOld). Columns are found by their names, so that later versions may work; before one is
// used, run this package's tests on it, above all TestRealAnswers and TestReloadsAtAnyMoment: what
// is said of reloads rests on a master that answers nothing while it parses. Every answer is plain
// text, refusals too, and "set severity-output number" has no effect through the master, for each
// command is a session of its own in the worker. So answers are compared with what success looks
// like, and whatever is not that is an error with a kind; text that is not known is kindUnknown and
// never success.
//
// Every command is a connection of its own, about 0.1 ms, with a deadline. A connection is
// half-closed after the command, or the master would wait for another; the answer ends with the
// connection. An answer that may have been lost is an error, and every op can be repeated.
package haproxy

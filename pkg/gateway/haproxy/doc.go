// Package haproxy directs a HAProxy in master-worker mode by its master socket (haproxy -W -S
// path).
//
// # Model
//
// A running HAProxy consists of a master, one worker that accepts new connections, and, after
// reloads, old workers that finish their connections. Only the master socket reaches all of them:
// "show proc" lists the processes, and the master passes "@!<pid> <command>" on to one of them.
// That the master lists a worker as old does not mean that it is stopping, which only "show info"
// of the worker says. Since HAProxy 3.1 the worker that serves is an old one while a reload parses,
// and after one that failed. In the following, an old worker is one that is stopping.
// Each [Backend] of the configuration is a pool. The agent writes the backend's section, and adds
// and deletes its servers, one for each pod UID and address. The name of a server contains both
// (ld-<uid>-<ip>-<port>), so the agent needs no record of its own.
//
// A server is taken out only by forced maintenance, the administrative state that "set server ...
// state maint" sets. A server in state "drain" still serves clients with a persistence cookie. A
// failed check, maintenance inherited from a tracked server, and an unresolved name can end without
// the agent. In all these states the server counts as Routed. In a worker that accepts new
// connections, all but a failed check also count as Missing.
//
// # What is proved, and how
//
// An observation reads the list of processes, then in each process the servers' states, then the
// counts, then the list again. If the list changed, all of it is read again. If the process that
// accepts new connections does not answer, there is no observation. An old one that does not answer
// counts as routing to every key, so that nothing is acknowledged, and the others are still changed
// and read. Because the states are read before the counts, the counts include every request that
// was assigned to a server before the server was taken out. Active is scur + qcur of "show stat":
// requests connecting, connected and waiting in the server's own queue. Neither counter includes a
// request that failed to connect and waits, for up to a second, before it tries *the same server
// again, even in maintenance* (back_handle_st_cer in HAProxy's src/backend.c). Neither includes one
// that has just left the queue. So the first count of zero after a target was taken out is accepted
// only if "show sess" lists no stream for its servers either; without that list in time, the target
// counts as active. Of streams that HAProxy itself has begun, such as to a peer, only "show sess
// <id>" names the server. While the target stays taken out and the list of processes stays the
// same, no new stream can begin, so later readings need only the counts. A server's cumulative
// counters (wretr, qmax) cannot replace "show sess": "clear counters all" resets them. For a routed
// target, Active is the counts alone.
//
// The generation consists of the master's pid and number of reloads, the pids and start times of
// all workers, and the modification time of the socket. Pids alone are not enough: in a container a
// restarted HAProxy usually gets the same ones.
//
// # Reloads
//
// A reload discards every change that was made through the socket. Therefore the agent writes the
// complete sections to Config.ServersFile, which HAProxy loads by an additional -f. The file lists
// exactly the wanted servers, unless it could not be written. Each batch of operations replaces it
// once, by rename, before the first command. If a reload began to parse the old file, its new
// worker is in the list of processes that Apply reads afterwards: the master does not answer while
// it parses, or lists the worker that does. That one takes no command before it is ready, so until
// then Apply fails for it, and there is no observation. Apply continues until every process in the
// list has received the change. A reload that begins later parses the new file. If the file cannot
// be written, Apply carries out everything at run time, and returns the error. A reload then brings
// back what the file still lists, until the agent has read the new generation, and has applied
// everything again. The file is written again with later operations and readings. A server that
// HAProxy refuses at run time is deleted from the file again, because it would make HAProxy's next
// start fail.
//
// Once an old worker has stopped its proxies, it answers "Proxy is disabled." to every command that
// changes a server's state. A target that was routed at the reload can therefore not be taken out
// of that worker. A target that was taken out before the reload stays out. The worker's listeners
// are closed, but it still serves and balances requests of its open client connections, including
// those that have sent half a request or none yet. Therefore a target that is not in maintenance in
// an old worker counts as Routed while that worker can still receive a request. That ends when each
// of its client connections (CurrConns of "show info") is closed or is a tunnel, in TCP mode or
// after a 101. Until then Apply fails with kindStopping. So slow responses delay removals, and
// WebSockets do not. The global setting hard-stop-after limits the delay. An old worker may have
// backends by the names that they had before the reload, or that are not directed any more. Their
// servers with an agent's name are Owned, so that the agent reads them too. It does not change
// them.
//
// # Known holes
//
//   - Between its place in a server's queue and the start of its connection a request is on no
//     list, for one turn of a worker's event loop. It matters only with maxconn.
//   - An endpoint without a pod, as of a Service without a selector, has a server with an empty
//     UID. If a pod has the same address, the server stays in service when the pod is taken out,
//     and the drain of the pod is not acknowledged.
//   - A backend that is not a pool may have a server at the same address, and so may a server that
//     an operator adds to a pool at run time. A backend with another name in the agent's file is no
//     pool in the worker that accepts new connections, until a reload has loaded that file.
//   - HAProxy 2.6 leaves out its own defaults for servers that are added at run time: without
//     pool-max-conn and pool-purge-delay, which the agent therefore gives to every server, they
//     keep no idle connections; max-reuse cannot be given, so that one added at run time with
//     "proto h2" takes one request for each connection until the next reload.
//   - With the global option grace an old worker accepts connections for that long although it says
//     that it is stopping, and counts as one that does not.
//   - Kept-alive requests that the worker reads from HTTP/2 connections before it says GOAWAY are
//     in the rule for old workers: such a connection counts as able to bring requests until it is
//     closed.
//
// # Deleting
//
// HAProxy refuses "del server" while the server has requests or idle pooled connections.
// Maintenance closes the connections that are idle at that moment. A connection that becomes idle
// later is closed at once by HAProxy 3.2, and by earlier ones after about three pool-purge-delays
// (5 s each unless ServerOptions sets another), or when the pod ends. Nothing waits for that: the
// server stays in maintenance, and the caller repeats the op. HAProxy before 2.6.16, 2.8.4 and 2.9
// crashes on "del server" if a stream that no counter includes is still bound to the server
// (HAProxy issues 2323 and 2378). So an op deletes a server only if the server was already in
// maintenance and the list of streams does not name it. In an old worker that did not get the
// command, the server stays until the worker ends.
//
// # Versions
//
// Tested with 2.6.12 and, by this package's tests, 2.8.25 and 3.2.26; by hand, 3.4.7.
// Servers at run time exist since 2.4, before 2.6 in experimental mode (kindTooOld). Columns are
// found by name, so later versions may work. Before you use one, run this package's tests on it,
// above all TestRealAnswers and those of reload_test.go: the handling of reloads relies on what the
// master lists while a worker parses. Every answer, including a refusal, is plain text. "set
// severity-output number" has no effect through the master, because each command is a new session
// in the worker. So each answer is compared with the expected text of success. Any other answer is
// an error with a kind, kindUnknown for an unrecognized text.
//
// Each command uses a new connection with a deadline, and takes about 0.1 ms. The agent half-closes
// the connection after the command; otherwise the master would wait for another one. The end of the
// connection ends the answer. If part of an answer may have been lost, the command returns an
// error. Every op can be repeated. A command without an answer may be carried out after those that
// follow it (lateFor).
package haproxy

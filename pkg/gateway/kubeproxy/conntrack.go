package kubeproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Attributes of connections from linux/netfilter/nfnetlink_conntrack.h that golang.org/x/sys/unix
// lacks.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaCounters   = 9 // what the client has sent; 10 is what the pod has
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaIPv4Src    = 1
	ctaIPv6Src    = 3
	ctaIPv4Dst    = 2
	ctaIPv6Dst    = 4
	ctaProtoNum   = 1
	ctaProtoSrc   = 2

	ctaInfoTCP, ctaInfoSCTP = 1, 3 // in ctaProtoInfo; in both the state is number 1

	ctaFilterOrig, ctaFilterReply = 1, 2
	filterIPSrc                   = 1 // CTA_FILTER_F_CTA_IP_SRC

	// The first and the last states of connections that are being opened or are open.
	tcpSynSent, tcpEstablished, tcpSynSent2 = 1, 3, 9
	sctpCookieWait, sctpEstablished         = 2, 4

	// A flowtable, or hardware, has taken the connection over: IPS_OFFLOAD and IPS_HW_OFFLOAD.
	statusOffload = 1<<14 | 1<<15

	ctGet, ctDelete = 1, 2 // IPCTNL_MSG_CT_GET, IPCTNL_MSG_CT_DELETE
)

// How often connections are counted. For each request the kernel walks its whole table, that of all
// network namespaces. This takes 9 ms of CPU with the usual 262,144 buckets, even if they are
// empty, and 1.7 us for each connection that it returns. So while a watch waits for connections,
// only the known ones are requested. All are requested again when none of these is left, or after
// countSlow. Events of connections would come sooner, but cost 10 to 20 us of CPU for every
// connection of the node, even if the socket's filter drops them (measured on 2 cores, Linux 6.18).
const (
	countFirst = 20 * time.Millisecond
	// countKept is the pause of a watch while the kernel still sends to its targets. It applies
	// while there is no other endpoint, between the two empty counts that make a watch quiet, and
	// before the first count. From that count on, silent connections are recognized. A Removed
	// watch pauses for keptQuiet.
	countKept = 100 * time.Millisecond
	// An Idle watch does not wait for connections, nor does one whose targets are some of several
	// endpoints. All such watches are counted together, every countSlow. The pause grows up to
	// maxCountSlow if counting would take more than half a hundredth of a core.
	countSlow, maxCountSlow, countSlowShare = time.Second, 10 * time.Second, 200
	// countShare bounds counting at a fifth of a core: the pause after a count is this multiple of
	// its CPU time. With a multiple of the elapsed time instead, pods on a busy node would wait for
	// seconds to become Idle.
	countShare = 4
	// emptyCounts is how many successive counts must be empty before a watch is quiet while the
	// kernel still sends to its targets. A Removed watch is Idle after one: it is first counted
	// countFirst after the commit was read, and by then a packet for which the kernel chose the
	// target before the commit is in the table.
	emptyCounts = 2
	// maxUnseen is the longest pause between two counts in which no connection can begin and end
	// without being seen: the kernel deletes the entry of a reset connection after 10 s, and others
	// later.
	maxUnseen = 5 * time.Second
	// maxProbe is how long a probe of the kubelet is open, by its default timeout. Counts for two
	// watches may be 20 ms apart, once a second as probes are, and then find the same probe.
	maxProbe = time.Second
	// messageCost is the cost of sending and reading one entry, in buckets that the kernel could
	// walk in the same time.
	messageCost = 50
)

// Limits for connections that do not end by themselves, see [held].
const (
	// keptQuiet is the pause after which a connection that has carried several requests is not
	// waited for. It is about the time of a delayed acknowledgement.
	keptQuiet = 40 * time.Millisecond
	// maxKept is how long such a connection is waited for if it never pauses. It is also the
	// silence after which any other connection is not waited for, if the pod has answered on it or
	// the client has sent nothing.
	maxKept = time.Second
	// accountedFor is how long the kernel must have counted packets before a connection without
	// counters counts as answered. Such a connection began before the counting.
	accountedFor = time.Minute
	// answerLeast is the least payload of an answer. All values are in bytes. The headers of a
	// segment without data take headerUsual with IPv4 and timestamps, synExtra more in a SYN, and
	// ipv6Extra more with IPv6. They take maxHeader if the segment reports lost segments.
	answerLeast, synExtra             = 64, 8
	headerUsual, maxHeader, ipv6Extra = 52, 80, 20
)

type connection struct {
	protocol uint8
	state    uint8
	// offloaded: its packets do not pass conntrack. It is open until it comes back, and its
	// counters stand still.
	offloaded bool
	// to is the address that answers: the pod's, whatever address the client connected to.
	to netip.AddrPort
	// original, zone and id identify the entry, so that it can be deleted.
	original, zone, id []byte
	// asked is the traffic from the client, and answered that from the pod. Zero: it is not
	// counted.
	asked, answered traffic
}

// traffic is what one side of a connection has sent.
type traffic struct{ packets, bytes int64 }

func (t traffic) since(then traffic) traffic {
	return traffic{t.packets - then.packets, t.bytes - then.bytes}
}

// payload returns the bytes of t, to or from a pod, minus header bytes for each packet.
func (t traffic) payload(header int64, pod netip.Addr) int64 {
	if pod.Is6() {
		header += ipv6Extra
	}
	return t.bytes - t.packets*header
}

// held is what the counts of one open connection have shown. A client may keep an idle connection
// for any time, so a connection is not waited for once it is [held.kept]. A connection with data of
// the client that the pod has not answered carries its first request. A connection on which only
// the pod sends carries a long answer. Both are waited for until they end.
type held struct {
	connection // as last counted
	// first is when the connection was first counted. moved is when its present number of packets
	// was first seen.
	first, moved time.Time
	// more: the client has sent data after the pod had answered. again: the pod has answered that
	// data. Acknowledgements are not data. Otherwise a long answer on a network that loses segments
	// would count as a second request.
	more, again bool
	// kept is final for as long as the kernel does not send to the pod.
	kept bool
}

// see updates h with a count of its connection, which ran from began to ended. old: a connection
// without counted packets began before the kernel counted packets. waiting is when the wait for a
// connection that never pauses began.
func (h *held) see(c connection, old bool, waiting, began, ended time.Time) {
	if h.first.IsZero() {
		h.first, h.moved = ended, ended
	} else {
		addr := c.to.Addr()
		h.more = h.more || h.answeredOnce(addr) && c.asked.since(h.asked).payload(maxHeader, addr) > 0
		h.again = h.again || h.more && c.answered.since(h.answered).payload(headerUsual, addr) > 0
		if c.asked != h.asked || c.answered != h.answered {
			h.moved = ended
		}
	}
	h.connection = c
	quiet := began.Sub(h.moved)
	switch {
	case c.protocol != unix.IPPROTO_TCP, c.offloaded, h.kept:
	case h.again:
		h.kept = quiet >= keptQuiet || min(began.Sub(h.first), began.Sub(waiting)) >= maxKept
	case h.answeredOnce(c.to.Addr()), h.unused(), old && c.asked.packets == 0:
		h.kept = quiet >= maxKept
	}
}

// answeredOnce reports whether the pod had sent an answer when h was last counted.
func (h *held) answeredOnce(pod netip.Addr) bool {
	return h.answered.payload(headerUsual, pod) >= answerLeast
}

// unused reports whether the client has opened the connection and sent nothing on it, as pools do.
func (c connection) unused() bool {
	return c.state == tcpEstablished && c.asked.packets == 2 &&
		max(c.asked.payload(headerUsual, c.to.Addr()), c.answered.payload(headerUsual, c.to.Addr())) <= synExtra
}

// open reports whether the connection is in SYN_SENT, SYN_RECV or ESTABLISHED, or the like of SCTP.
func (c connection) open() bool {
	switch c.protocol {
	case unix.IPPROTO_TCP:
		return c.state >= tcpSynSent && c.state <= tcpEstablished || c.state == tcpSynSent2
	case unix.IPPROTO_SCTP:
		return c.state >= sctpCookieWait && c.state <= sctpEstablished
	}
	return false
}

// answerer returns the address that answers on a connection. b has the attributes of its message.
func answerer(b []byte) netip.Addr {
	return address(attribute(b, ctaTupleReply, ctaTupleIP), ctaIPv4Src, ctaIPv6Src)
}

func address(tuple []byte, four, six uint16) netip.Addr {
	b := attribute(tuple, four)
	if b == nil {
		b = attribute(tuple, six)
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// client returns the address that opened the connection, and reports whether it connected to the
// pod's own address.
func (c connection) client() (from netip.Addr, straight bool) {
	tuple := attribute(c.original, ctaTupleIP)
	return address(tuple, ctaIPv4Src, ctaIPv6Src), address(tuple, ctaIPv4Dst, ctaIPv6Dst) == c.to.Addr()
}

func decodeConnection(b []byte) (c connection, err error) {
	c.original, c.zone, c.id = bytes.Clone(attribute(b, ctaTupleOrig)), bytes.Clone(attribute(b, ctaZone)),
		bytes.Clone(attribute(b, ctaID))
	addr := answerer(b)
	if !addr.IsValid() || len(c.original) == 0 || len(c.id) == 0 {
		return c, fmt.Errorf("connection without an address or a name: %w", errShort)
	}
	protocol := attribute(b, ctaTupleReply, ctaTupleProto)
	c.to = netip.AddrPortFrom(addr, uint16(number(attribute(protocol, ctaProtoSrc))))
	c.protocol = uint8(number(attribute(protocol, ctaProtoNum)))
	for _, of := range []uint16{ctaInfoTCP, ctaInfoSCTP} {
		c.state |= uint8(number(attribute(b, ctaProtoInfo, of, 1)))
	}
	if c.offloaded = number(attribute(b, ctaStatus))&statusOffload != 0; c.offloaded && c.state == 0 {
		c.state = tcpEstablished // the kernel does not tell the state
	}
	for i, t := range []*traffic{&c.asked, &c.answered} {
		counters := attribute(b, ctaCounters+uint16(i))
		t.packets, t.bytes = int64(number(attribute(counters, 1))), int64(number(attribute(counters, 2)))
	}
	return c, nil
}

// about returns a message about this entry alone. Without the tuple, the kernel would apply the
// message to all entries.
func (c connection) about(message int, flags netlink.HeaderFlags, more ...[]byte) netlink.Message {
	if c.zone != nil {
		more = append(more, encode(ctaZone, c.zone))
	}
	family := uint8(unix.AF_INET)
	if c.to.Addr().Is6() {
		family = unix.AF_INET6
	}
	return request(unix.NFNL_SUBSYS_CTNETLINK, message, flags, family, append(more, nest(ctaTupleOrig, c.original))...)
}

// counter reads the kernel's table of connections with the least CPU time.
type counter struct {
	dial func() (*netlink.Conn, error)
	conn *netlink.Conn
	// deaf: the kernel ignores the filter and sends all connections, as Linux before 5.8 does.
	deaf bool
}

// walk calls f with all entries to addrs that exist during the whole call. It may omit entries that
// are added during the call.
//
// With IPv6 the kernel sends all entries: its filter of addresses is inverted there, and omits the
// entries that match (ctnetlink_filter_match_tuple, at least in Linux 5.8 to 6.18). A later kernel
// may correct that.
func (c *counter) walk(addrs map[netip.Addr]bool, f func(connection)) (err error) {
	var four []netip.Addr
	six := 0
	for addr := range addrs {
		if addr.Is4() {
			four = append(four, addr)
		} else {
			six = 1
		}
	}
	// A request for each address costs walks of the table. One request for all entries costs
	// messages.
	walks := len(four) + six
	if walks > 1 && (c.deaf || (walks-1)*sysctl("nf_conntrack_buckets")/messageCost >= sysctl("nf_conntrack_count")) {
		_, err = c.dump(unix.AF_UNSPEC, addrs, f)
		return err
	}
	flags := func(number uint16, flags uint32) []byte {
		return encode(number, binary.NativeEndian.AppendUint32(nil, flags))
	}
	for _, addr := range four {
		wanted := 0
		told, err := c.dump(unix.AF_INET, map[netip.Addr]bool{addr: true}, func(one connection) { wanted++; f(one) },
			nest(ctaTupleReply, nest(ctaTupleIP, encode(ctaIPv4Src, addr.AsSlice()))),
			nest(ctaFilter, flags(ctaFilterOrig, 0), flags(ctaFilterReply, filterIPSrc)))
		if err != nil {
			return err
		}
		c.deaf = c.deaf || told > wanted
	}
	if six > 0 {
		_, err = c.dump(unix.AF_INET6, addrs, f)
	}
	return err
}

// dump calls f with the entries to addrs of one family, or of all with AF_UNSPEC. It returns how
// many the kernel has sent.
func (c *counter) dump(family uint8, addrs map[netip.Addr]bool, f func(connection), filter ...[]byte) (told int,
	err error) {
	if err := c.ask(request(unix.NFNL_SUBSYS_CTNETLINK, ctGet, netlink.Dump, family, filter...)); err != nil {
		return 0, err
	}
	for m, err := range c.conn.ReceiveIter() {
		if err != nil {
			return told, fmt.Errorf("read connections: %w", err)
		}
		told++
		// Most entries are to other addresses. Do not decode the rest of these.
		if to := answerer(body(m)); to.IsValid() && !addrs[to] {
			continue
		}
		one, err := decodeConnection(body(m))
		if err != nil {
			return told, fmt.Errorf("read connections: %w", err)
		}
		f(one)
	}
	return told, nil
}

// again calls f with the connections of known that still exist. Each costs microseconds.
//
// The kernel marks each answer as one of several, but not the last one. So the requests are
// followed by a dump that is empty, that of expected connections. Each batch is small, because the
// socket's buffer must hold the answers.
func (c *counter) again(known []connection, f func(connection)) error {
	for some := range slices.Chunk(known, 16) {
		var messages []netlink.Message
		for _, one := range some {
			messages = append(messages, one.about(ctGet, 0))
		}
		if err := c.ask(append(messages, request(unix.NFNL_SUBSYS_CTNETLINK_EXP, ctGet, netlink.Dump,
			unix.AF_UNSPEC))...); err != nil {
			return err
		}
		for more := true; more; {
			more = false
			for m, err := range c.conn.ReceiveIter() {
				if more = errors.Is(err, unix.ENOENT); more {
					break
				}
				if err != nil {
					return fmt.Errorf("read connections: %w", err)
				}
				if m.Header.Type>>8 != unix.NFNL_SUBSYS_CTNETLINK {
					continue
				}
				one, err := decodeConnection(body(m))
				if err != nil {
					return fmt.Errorf("read connections: %w", err)
				}
				f(one)
			}
		}
	}
	return nil
}

// find returns the connections to addrs and those of known that still exist, and the CPU time that
// this took.
func (c *counter) find(addrs map[netip.Addr]bool, known []connection) (found map[netip.Addr][]connection,
	took time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := worked()
	found = map[netip.Addr][]connection{}
	add := func(one connection) { found[one.to.Addr()] = append(found[one.to.Addr()], one) }
	if err = c.walk(addrs, add); err == nil {
		err = c.again(known, add)
	}
	if err != nil {
		c.close() // what is left of an answer would be taken for the next one
	}
	return found, worked() - began, err
}

// ask sends messages. It opens the socket if it is not open.
func (c *counter) ask(messages ...netlink.Message) (err error) {
	if c.conn == nil {
		if c.conn, err = c.dial(); err != nil {
			return err
		}
	}
	return ask(c.conn, messages...)
}

func (c *counter) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// worked returns the CPU time of the calling thread.
func worked() time.Duration {
	var usage unix.Rusage
	// It cannot fail for the calling thread.
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// sysctl returns a number of this process's network namespace, or 0 if it cannot be read. Netlink
// also has the number of connections, but marks the answer as one of several.
func sysctl(name string) int {
	text, _ := os.ReadFile("/proc/sys/net/netfilter/" + name)
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// count counts connections while a watch waits for them to end, until ctx is done.
func (o *Observer) count(ctx context.Context) {
	counter := counter{dial: o.dial}
	defer counter.close()
	failed := false
	for {
		due, next := o.due(time.Now())
		wait := (<-chan time.Time)(nil)
		wake := o.wake
		switch {
		case len(due) > 0:
			addrs, known := o.questions(due)
			began := time.Now()
			found, took, err := counter.find(addrs, known)
			if err != nil && ctx.Err() == nil && !failed {
				o.log.Warn("connections are not counted: no target becomes Idle", "error", err)
			}
			rest := max(countFirst, countShare*took)
			if failed = err != nil; failed {
				rest = max(rest, countKept)
			} else {
				o.counted(due, found, took, began, time.Now())
			}
			// A new watch does not shorten this pause.
			wait, wake = time.After(rest), nil
		case !next.IsZero():
			wait = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-wait:
		}
	}
}

type counting struct {
	period, asked int  // of the watch, when that began
	walk          bool // all connections, and not only those that are known
}

// due returns the watches to count now, and when the next ones are due.
func (o *Observer) due(now time.Time) (due map[*Watch]counting, next time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	due = map[*Watch]counting{}
	o.others = false
	var slow []*Watch
	together := false
	for w := range o.watches {
		switch w.reading.State {
		case health.Routing, health.Kept:
			o.others = true
		case health.Unknown:
			continue
		}
		if w.slow() {
			slow = append(slow, w)
		}
		if !w.next.After(now) {
			due[w] = counting{w.period, w.asked, w.slow() || !w.busy || now.Sub(w.walked) >= countSlow}
			together = together || w.slow()
		} else if next.IsZero() || w.next.Before(next) {
			next = w.next
		}
	}
	if together {
		for _, w := range slow {
			due[w] = counting{w.period, w.asked, true}
		}
	}
	// A watch that becomes Routing or Kept while there are others does not wake count.
	if soon := now.Add(countKept); o.others && (next.IsZero() || soon.Before(next)) {
		next = soon
	}
	return due, next
}

// questions returns the addresses and the known connections to count for the watches that are due.
func (o *Observer) questions(due map[*Watch]counting) (addrs map[netip.Addr]bool, known []connection) {
	addrs = map[netip.Addr]bool{}
	for w, how := range due {
		for _, t := range w.targets {
			if how.walk {
				addrs[t.Addr()] = true
			}
		}
	}
	all := map[string]connection{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for w := range due {
		for key, h := range w.held {
			if !h.kept && !addrs[h.to.Addr()] {
				all[key] = h.connection
			}
		}
	}
	return addrs, slices.Collect(maps.Values(all))
}

// slow reports whether w waits for nothing that a count could show. The caller holds o.mu.
func (w *Watch) slow() bool {
	is := w.reading
	return is.State == health.Idle || is.State == health.Routing && (w.empty == 0 || is.NoConnections)
}

// pause returns the time until the next count. took is the CPU time of the last one. The caller
// holds o.mu.
func (w *Watch) pause(took time.Duration) time.Duration {
	switch {
	case w.slow():
		return max(countSlow, min(countSlowShare*took, maxCountSlow))
	case w.reading.State == health.Removed:
		return keptQuiet
	}
	return countKept
}

// counted records a count that ran from began to ended, for the watches that have been waiting
// since before it began. A thread that does not get the CPU can make it long.
func (o *Observer) counted(due map[*Watch]counting, found map[netip.Addr][]connection, took time.Duration,
	began, ended time.Time) {
	var own map[netip.Addr]bool
	for _, how := range due {
		if how.walk && own == nil {
			own = o.ownAddresses()
		}
	}
	o.mu.Lock()
	var told []*Watch
	old := !o.accounted.IsZero() && began.Sub(o.accounted) >= accountedFor
	for w, how := range due {
		if _, ok := o.watches[w]; !ok || w.period != how.period {
			continue
		}
		w.busy = w.see(found, old, how.walk, began, ended)
		first := w.reading.Counted.Before(w.reading.Since)
		w.reading.Connections, w.reading.Counted = len(w.held), began
		if how.walk {
			w.notice(found, own, began, ended)
			w.walked = began
		} else if !w.busy {
			w.next = ended // others may have come
			continue
		}
		changed := false
		if w.empty++; w.busy {
			w.empty = 0
		}
		quiet := w.empty >= emptyCounts
		switch {
		case w.reading.State == health.Removed && !w.busy:
			changed = w.enter(health.Idle, began)
		case w.reading.State == health.Removed && first:
			changed = true // it is known now that something is in flight
		case w.reading.State == health.Idle && w.busy:
			changed = w.enter(health.Removed, began)
		case w.reading.State < health.Removed && w.reading.NoConnections != quiet:
			w.reading.NoConnections, changed = quiet, true
		}
		if changed {
			told = append(told, w)
		}
		w.reading.Connections, w.reading.Counted = len(w.held), began
		if w.next = ended.Add(w.pause(took)); w.asked != how.asked {
			w.next, w.busy = time.Time{}, false
		}
	}
	o.mu.Unlock()
	for _, w := range told {
		w.changed()
	}
}

// see records a count: of all connections if all is set, else of the known ones that were not kept.
// It reports whether w waits for a connection to one of its targets. The caller holds o.mu.
func (w *Watch) see(found map[netip.Addr][]connection, old, all bool, began, ended time.Time) (busy bool) {
	was := w.held
	w.held = map[string]held{}
	for key, h := range was {
		if !all && h.kept {
			w.held[key] = h
		}
	}
	for _, t := range w.targets {
		for _, c := range found[t.Addr()] {
			if t.Port() != 0 && t != c.to || !c.open() {
				continue
			}
			key := string(c.id) + string(c.original)
			h := was[key]
			h.see(c, old, w.entered, began, ended)
			w.held[key] = h
			busy = busy || !h.kept
		}
	}
	return busy
}

// ownAddresses returns the addresses of the node, from which the kubelet probes. Nil: they are
// unknown.
func (o *Observer) ownAddresses() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	if o.netns != 0 {
		return own
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		if one, err := netip.ParsePrefix(a.String()); err == nil {
			own[one.Addr().Unmap().WithZone("")] = true
		}
	}
	return own
}

// notice records a full count for [Reading.Quiet]. own are the addresses of the node. The caller
// holds o.mu.
func (w *Watch) notice(found map[netip.Addr][]connection, own map[netip.Addr]bool, began, ended time.Time) {
	if w.noticed == nil {
		return
	}
	was := w.noticed
	w.noticed = map[uint64]time.Time{}
	quiet := !w.o.accounted.IsZero() && ended.Sub(w.walked) <= maxUnseen
	for _, t := range w.targets {
		for _, c := range found[t.Addr()] {
			if t.Port() != 0 && t != c.to {
				continue
			}
			from, straight := c.client()
			probe := straight && own[from]
			w.clients = w.clients || straight && !probe && own != nil
			// The kernel may reuse the memory, and so the ID, of a connection that has ended. The
			// new connection has other counters.
			one := trace{id: string(c.id), original: string(c.original)}
			if !probe {
				one.asked, one.answered = c.asked, c.answered
			}
			key := maphash.Comparable(seed, one)
			since, known := was[key]
			if !known {
				since = began
			}
			w.noticed[key] = since
			if probe {
				quiet = quiet && !(c.open() && began.Sub(since) >= maxProbe)
			} else {
				quiet = quiet && !c.open() && known && c.asked.packets > 0
			}
		}
	}
	if !quiet || w.quietSince.IsZero() {
		w.quietSince = ended
	}
	if w.reading.Quiet = 0; w.clients {
		w.reading.Quiet = max(0, began.Sub(w.quietSince))
	}
}

// trace identifies a connection and its traffic. A new connection, or one with new traffic, has
// another trace.
type trace struct {
	id, original    string
	asked, answered traffic
}

var seed = maphash.MakeSeed()

// Count starts a new count of the connections and returns immediately. The count is done when
// [Reading.Counted] is later than the call.
func (w *Watch) Count() {
	w.o.mu.Lock()
	if w.noticed == nil {
		w.noticed = map[uint64]time.Time{}
	}
	w.next, w.busy = time.Time{}, false
	w.asked++ // a count that runs is not the one
	w.o.mu.Unlock()
	w.o.wake.Raise()
}

// account makes the kernel count the packets of connections that begin from now on. The sysctl
// nf_conntrack_acct does that too, but an agent may not write it in its container. The kernel also
// enables it when it reads a rule that uses a connection's packets. account sends such a rule in a
// transaction without an end, so the kernel does not apply the rule.
func (o *Observer) account() error {
	const acct = "nf_conntrack_acct"
	if sysctl(acct) == 0 {
		conn, err := o.dial()
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		name := func(number uint16) []byte { return encodeString(number, "lameduck") }
		packets := nest(unix.NFTA_LIST_ELEM, encodeString(unix.NFTA_EXPR_NAME, "ct"),
			nest(unix.NFTA_EXPR_DATA, encode32(unix.NFTA_CT_DREG, unix.NFT_REG_1),
				encode32(unix.NFTA_CT_KEY, unix.NFT_CT_PKTS)))
		send := func(message int, flags netlink.HeaderFlags, attributes ...[]byte) netlink.Message {
			return request(unix.NFNL_SUBSYS_NFTABLES, message, netlink.Create|flags, unix.NFPROTO_INET, attributes...)
		}
		if err := ask(conn, request(0, unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC),
			send(unix.NFT_MSG_NEWTABLE, 0, name(unix.NFTA_TABLE_NAME)),
			send(unix.NFT_MSG_NEWCHAIN, 0, name(unix.NFTA_CHAIN_TABLE), name(unix.NFTA_CHAIN_NAME)),
			send(unix.NFT_MSG_NEWRULE, netlink.Append|netlink.Acknowledge,
				name(unix.NFTA_RULE_TABLE), name(unix.NFTA_RULE_CHAIN), nest(unix.NFTA_RULE_EXPRESSIONS, packets)),
		); err != nil {
			return err
		}
		if _, err := conn.Receive(); err != nil {
			return err
		}
		if sysctl(acct) == 0 {
			return errors.New(acct + " is 0 after a rule has asked for packets")
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.accounted.IsZero() {
		o.accounted = time.Now()
	}
	return nil
}

// Clean deletes all connections to the targets, of any protocol and state, from the kernel's table.
// A client that reuses a source port is then sent to an existing pod. Call Clean only for deleted
// pods whose address no other pod has, because it also breaks open connections. Connections that do
// not exist, or end during the call, are no error. Many targets cost about as much as one.
func (o *Observer) Clean(targets []netip.AddrPort) (err error) {
	c := counter{dial: o.dial}
	defer c.close()
	addrs, wanted := map[netip.Addr]bool{}, map[netip.AddrPort]bool{}
	for _, t := range targets {
		if !t.Addr().IsValid() {
			err = fmt.Errorf("clean connections to %v: no address", t)
			continue
		}
		t = netip.AddrPortFrom(t.Addr().Unmap().WithZone(""), t.Port())
		addrs[t.Addr()], wanted[t] = true, true
	}
	var stale []connection
	if err := c.walk(addrs, func(one connection) {
		if wanted[one.to] || wanted[netip.AddrPortFrom(one.to.Addr(), 0)] {
			stale = append(stale, one)
		}
	}); err != nil {
		return fmt.Errorf("clean connections: %w", err)
	}
	for _, one := range stale {
		if err := c.ask(one.about(ctDelete, netlink.Acknowledge, encode(ctaID, one.id))); err != nil {
			return fmt.Errorf("clean connections to %v: %w", one.to, err)
		}
		if _, err := c.conn.Receive(); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("clean connections to %v: %w", one.to, err)
		}
	}
	return err
}

//go:build linux

package kubeproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Attributes of connections that golang.org/x/sys/unix does not have, from linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaProtoInfo  = 4
	ctaCounters   = 9 // what the client has sent; 10 is what the pod has
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaIPv4Src    = 1
	ctaIPv6Src    = 3
	ctaProtoNum   = 1
	ctaProtoSrc   = 2

	ctaInfoTCP, ctaInfoSCTP = 1, 3 // in ctaProtoInfo; in both the state is number 1

	ctaFilterOrig, ctaFilterReply = 1, 2
	filterIPSrc                   = 1 // CTA_FILTER_F_CTA_IP_SRC

	// States between which those lie that are being opened, or open.
	tcpSynSent, tcpEstablished, tcpSynSent2 = 1, 3, 9
	sctpCookieWait, sctpEstablished         = 2, 4

	ctGet, ctDelete = 1, 2 // IPCTNL_MSG_CT_GET, IPCTNL_MSG_CT_DELETE
)

// How often connections are counted. The kernel walks its whole table for each request, that of all network namespaces: 9 ms of
// CPU with the usual 262,144 buckets, even if they are empty. Each connection that it tells costs 3 us more. Events of connections
// would come sooner, but the kernel makes them for every connection of the node: 10 to 20 us of CPU each, also if the socket's
// filter drops them (measured on a machine of 2 cores, Linux 6.18).
const (
	countFirst = 20 * time.Millisecond
	// countLate is the part of the time since a watch became Removed that passes until the next count, countSlow at most. So a watch
	// becomes Idle late in proportion to how long it waited. In the first second it is keptQuiet at most, so that such a pause is seen.
	countLate = 5
	// countKept is the pause while the kernel sends to the targets and to no other endpoint, between the two empty counts that make a
	// watch quiet, and before the first count of one to whose targets the kernel still sends: from then on it is known which
	// connections are silent.
	countKept = 100 * time.Millisecond
	// A watch that is Idle, and one to whose targets the kernel sends among others, waits for nothing. All of them are counted
	// together, countSlow apart: longer if that would take more than half a hundredth of a core, up to countSlowMost.
	countSlow, countSlowMost, countSlowShare = time.Second, 10 * time.Second, 200
	// countShare bounds the cost of counting at a fifth of a core: after a count comes a pause of this many times the CPU time that it
	// took. Elapsed time would be wrong: on a busy node pods would wait for seconds to become Idle.
	countShare = 4
	// emptyCounts is how many counts in a row must be empty for a watch to be quiet to which the kernel still sends. A Removed watch is
	// Idle after one: it is first counted countFirst after the commit was read, and by then a packet for which the kernel chose the
	// target before the commit is in the table.
	emptyCounts = 2
	// walkCost is what a walk through the table is taken to cost until that is known, tellCost what telling one connection costs.
	walkCost = 9 * time.Millisecond
	tellCost = 3 * time.Microsecond
)

// How long connections are waited for that do not end by themselves, see [held].
const (
	// keptQuiet is the pause between two requests after which a connection that carries one request after the other is not waited for.
	// It is about as long as a delayed acknowledgement.
	keptQuiet = 40 * time.Millisecond
	// keptMost is how long such a connection is waited for if it never pauses, and how long any other that the pod has answered may be
	// silent.
	keptMost = time.Second
	// accountedFor is how long the kernel must have counted packets until a connection without counters is taken to have been answered:
	// the connection is older.
	accountedFor = time.Minute
	// answerLeast is what the pod sends in an answer at least, beside headers. The headers of a segment without data take headerUsual
	// bytes with IPv4 and timestamps, those of a SYN a few more, and headerMost where it reports lost segments; ipv6More more with IPv6.
	answerLeast                       = 64
	headerUsual, headerMost, ipv6More = 52, 80, 20
)

// connection is an entry of the kernel's table.
type connection struct {
	protocol uint8
	state    uint8
	// to is who answers: the pod, whatever address the client asked for.
	to netip.AddrPort
	// original, zone and id name the entry when it is deleted.
	original, zone, id []byte
	// asked and answered are what the client and the pod have sent. Zero: the kernel does not count for this connection.
	asked, answered traffic
}

// traffic is what one side of a connection has sent.
type traffic struct{ packets, bytes int64 }

// since returns what was sent since then.
func (t traffic) since(then traffic) traffic {
	return traffic{t.packets - then.packets, t.bytes - then.bytes}
}

// payload returns the bytes of t, to or from a pod, beyond so long a header for each packet.
func (t traffic) payload(header int64, pod netip.Addr) int64 {
	if pod.Is6() {
		header += ipv6More
	}
	return t.bytes - t.packets*header
}

// held is what the counts of one open connection have shown. A client that keeps a connection ends it when it likes: waiting for
// that is waiting for nothing. So a connection is not waited for once it is [held.kept]. One that the pod has not answered yet carries
// its first request, and one on which only the pod sends carries a long answer: these are waited for until they end.
type held struct {
	// first is when the connection was first counted, moved when it was first counted with the packets that it has now.
	first, moved    time.Time
	asked, answered traffic
	// more says that the client has sent data after the pod had answered, again that the pod has answered that. No number of
	// acknowledgements is taken for data, or a long answer on a line that loses segments would count as a second request.
	more, again bool
	// kept is final for as long as the kernel does not send to the pod.
	kept bool
}

// see takes in another count. old says that a connection for which the kernel does not count packets is an old one. A connection
// that never pauses is waited for from waiting on.
func (h *held) see(c connection, old bool, waiting, now time.Time) {
	if h.first.IsZero() {
		h.first, h.moved = now, now
	} else {
		addr := c.to.Addr()
		h.more = h.more || h.answeredOnce(addr) && c.asked.since(h.asked).payload(headerMost, addr) > 0
		h.again = h.again || h.more && c.answered.since(h.answered).payload(headerUsual, addr) > 0
		if c.asked != h.asked || c.answered != h.answered {
			h.moved = now
		}
	}
	h.asked, h.answered = c.asked, c.answered
	quiet := now.Sub(h.moved)
	switch {
	case c.protocol != unix.IPPROTO_TCP, h.kept:
	case h.again:
		h.kept = quiet >= keptQuiet || min(now.Sub(h.first), now.Sub(waiting)) >= keptMost
	case h.answeredOnce(c.to.Addr()), old && c.answered.packets == 0:
		h.kept = quiet >= keptMost
	}
}

// answeredOnce reports whether the pod had sent an answer when h was last counted.
func (h *held) answeredOnce(pod netip.Addr) bool {
	return h.answered.payload(headerUsual, pod) >= answerLeast
}

// open reports whether the connection is open or being opened: SYN_SENT, SYN_RECV or ESTABLISHED, and the like of SCTP.
func (c connection) open() bool {
	switch c.protocol {
	case unix.IPPROTO_TCP:
		return c.state >= tcpSynSent && c.state <= tcpEstablished || c.state == tcpSynSent2
	case unix.IPPROTO_SCTP:
		return c.state >= sctpCookieWait && c.state <= sctpEstablished
	}
	return false
}

// answerer returns the address of who answers on the connection that m tells, without a look at the rest.
func answerer(m netlink.Message) (netip.Addr, bool) {
	if len(m.Data) < 4 {
		return netip.Addr{}, false
	}
	address := attributeAt(attributeAt(m.Data[4:], ctaTupleReply), ctaTupleIP)
	from := attributeAt(address, ctaIPv4Src)
	if from == nil {
		from = attributeAt(address, ctaIPv6Src)
	}
	return netip.AddrFromSlice(from)
}

func decodeConnection(m netlink.Message) (connection, error) {
	var c connection
	if len(m.Data) < 4 {
		return c, errShort
	}
	all, err := parse(m.Data[4:])
	if err != nil {
		return c, err
	}
	reply, err := parse(all.find(ctaTupleReply))
	if err != nil {
		return c, err
	}
	address, err := parse(reply.find(ctaTupleIP))
	if err != nil {
		return c, err
	}
	from := address.find(ctaIPv4Src)
	if from == nil {
		from = address.find(ctaIPv6Src)
	}
	addr, ok := netip.AddrFromSlice(from)
	if !ok {
		return c, fmt.Errorf("connection without an address: %w", errShort)
	}
	protocol, err := parse(reply.find(ctaTupleProto))
	if err != nil {
		return c, err
	}
	if b := protocol.find(ctaProtoNum); len(b) == 1 {
		c.protocol = b[0]
	}
	var port uint16
	if b := protocol.find(ctaProtoSrc); len(b) == 2 {
		port = binary.BigEndian.Uint16(b)
	}
	c.to = netip.AddrPortFrom(addr, port)
	info, err := parse(all.find(ctaProtoInfo))
	if err != nil {
		return c, err
	}
	for _, number := range []uint16{ctaInfoTCP, ctaInfoSCTP} {
		state, err := parse(info.find(number))
		if err != nil {
			return c, err
		}
		if b := state.find(1); len(b) == 1 {
			c.state = b[0]
		}
	}
	for i, t := range []*traffic{&c.asked, &c.answered} {
		counters, err := parse(all.find(ctaCounters + uint16(i)))
		if err != nil {
			return c, err
		}
		for number, n := range map[uint16]*int64{1: &t.packets, 2: &t.bytes} {
			if b := counters.find(number); len(b) == 8 {
				*n = int64(binary.BigEndian.Uint64(b))
			}
		}
	}
	c.original, c.zone, c.id = bytes.Clone(all.find(ctaTupleOrig)), bytes.Clone(all.find(ctaZone)), bytes.Clone(all.find(ctaID))
	return c, nil
}

// connections calls f with all entries to addr. A table that is written to all the time cannot be read at one
// moment: an entry that came meanwhile may be missing, one that was there the whole time is not. It returns how many the kernel has told.
//
// With IPv6 the kernel tells all: its filter of addresses is inverted there (ctnetlink_filter_match_tuple, seen in
// 6.18: it leaves out those that match), and may be mended some day.
func connections(conn *netlink.Conn, addr netip.Addr, f func(connection)) (told int, err error) {
	only := map[netip.Addr]bool{addr: true}
	if addr.Is6() {
		return dumpConnections(conn, unix.AF_INET6, nil, only, f)
	}
	// A kernel before 5.8 does not know the filter, and tells all.
	filter := append(encode(ctaTupleReply|unix.NLA_F_NESTED, encode(ctaTupleIP|unix.NLA_F_NESTED, encode(ctaIPv4Src, addr.AsSlice()))),
		encode(ctaFilter|unix.NLA_F_NESTED, append(
			encode(ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, 0)),
			encode(ctaFilterReply, binary.NativeEndian.AppendUint32(nil, filterIPSrc))...))...)
	return dumpConnections(conn, unix.AF_INET, filter, only, f)
}

// dumpConnections calls f with those entries to one of addrs that the kernel tells, of one family or, with AF_UNSPEC, of all.
func dumpConnections(conn *netlink.Conn, family uint8, filter []byte, addrs map[netip.Addr]bool, f func(connection)) (told int, err error) {
	if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return 0, err
	}
	if _, err := conn.Send(request(unix.NFNL_SUBSYS_CTNETLINK, ctGet, netlink.Dump, family, filter)); err != nil {
		return 0, fmt.Errorf("ask for connections: %w", err)
	}
	for m, err := range conn.ReceiveIter() {
		if err != nil {
			return told, fmt.Errorf("read connections: %w", err)
		}
		told++
		// Most are others', of which the rest need not be understood.
		if to, ok := answerer(m); ok && !addrs[to] {
			continue
		}
		c, err := decodeConnection(m)
		if err != nil {
			return told, fmt.Errorf("read connections: %w", err)
		}
		if addrs[c.to.Addr()] {
			f(c)
		}
	}
	return told, nil
}

// counter counts open connections, in the way that costs the CPU least.
type counter struct {
	dial func() (*netlink.Conn, error)
	conn *netlink.Conn
	// walk is what going through the table costs, tell what telling one connection does, both as learnt; six is how many connections with IPv6 there were
	// when they were last asked for alone.
	walk, tell time.Duration
	six        int
	// deaf says that the kernel tells all connections whatever address it is asked for: asking for each costs as much as asking for all.
	deaf bool
}

// singly reports whether asking for each of n IPv4 addresses, and for all connections with IPv6 if six is true, costs no more than asking
// for all that there are.
func (c *counter) singly(n int, six bool, entries int) bool {
	walks, told := n, 0
	if six {
		walks, told = n+1, c.six
	}
	if c.deaf && n > 0 && walks > 1 {
		return false
	}
	return c.cost(walks, told) <= c.cost(1, entries)
}

func (c *counter) cost(walks, told int) time.Duration {
	return time.Duration(walks)*c.walk + time.Duration(told)*c.tell
}

// learn takes in what going through the table so many times, and being told of so many connections, has cost. The last ones count most: tables grow, and
// computers get other work. What was expected of a single walk and is not so is laid to whatever should have cost more: where telling is laid to walking, a
// computer that tells faster makes walks look as if they cost nothing, until each address of thousands is asked for alone.
func (c *counter) learn(walks, told int, took time.Duration) {
	if walks == 0 {
		return
	}
	if walks == 1 && c.walk < time.Duration(told)*c.tell {
		c.tell = (3*c.tell + max(0, took-c.walk)/time.Duration(told)) / 4
		return
	}
	c.walk = (3*c.walk + max(0, took-time.Duration(told)*c.tell)/time.Duration(walks)) / 4
}

// open returns the open connections to each of addrs, and how long the CPU has worked for that.
func (c *counter) open(addrs map[netip.Addr]bool) (open map[netip.Addr][]connection, took time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := worked()
	defer func() {
		took = worked() - began
		if err != nil {
			// What is left of an answer would be taken for the next one.
			c.close()
		}
	}()
	if c.conn == nil {
		if c.conn, err = c.dial(); err != nil {
			return nil, 0, err
		}
	}
	open = map[netip.Addr][]connection{}
	add := func(one connection) {
		if one.open() {
			open[one.to.Addr()] = append(open[one.to.Addr()], one)
		}
	}
	var four []netip.Addr
	six := false
	for addr := range addrs {
		if addr.Is4() {
			four = append(four, addr)
		} else {
			six = true
		}
	}
	if c.singly(len(four), six, entries()) {
		told := 0
		for _, addr := range four {
			wanted := 0
			n, err := connections(c.conn, addr, func(one connection) { wanted++; add(one) })
			if err != nil {
				return nil, 0, err
			}
			told += n
			c.deaf = c.deaf || n > wanted
		}
		then := worked()
		c.learn(len(four), told, then-began)
		if six {
			if c.six, err = dumpConnections(c.conn, unix.AF_INET6, nil, addrs, add); err != nil {
				return nil, 0, err
			}
			c.learn(1, c.six, worked()-then)
		}
	} else {
		told, err := dumpConnections(c.conn, unix.AF_UNSPEC, nil, addrs, add)
		if err != nil {
			return nil, 0, err
		}
		c.learn(1, told, worked()-began)
	}
	return open, 0, nil
}

func (c *counter) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// worked is how long the CPU has worked for this thread.
func worked() time.Duration {
	var usage unix.Rusage
	// It cannot fail for a thread that is there.
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// entries is how many connections the kernel's table has, of the network namespace of this process, or 0. It decides what is cheaper, no more. It is
// not asked for by netlink: there the answer is marked as one of several, and nothing says that it was the last.
func entries() int {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// count counts connections while somebody waits for them to end, until ctx is done.
func (o *Observer) count(ctx context.Context) {
	counter := counter{dial: o.dial, walk: walkCost, tell: tellCost}
	defer counter.close()
	failed := false
	for {
		due, next := o.due(time.Now())
		wait := (<-chan time.Time)(nil)
		wake := o.wake
		switch {
		case len(due) > 0:
			open, took, err := counter.open(addresses(due))
			if err != nil && ctx.Err() == nil && !failed {
				o.log.Warn("connections are not counted: no target becomes Idle", "error", err)
			}
			rest := max(countFirst, countShare*took)
			if failed = err != nil; failed {
				rest = max(rest, countKept)
			} else {
				o.counted(due, open, took, time.Now())
			}
			// Who comes last is not to be counted more often than the others.
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

// addresses are those of the watches.
func addresses(of map[*Watch]int) map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	for w := range of {
		for _, t := range w.targets {
			all[t.Addr()] = true
		}
	}
	return all
}

// due returns the watches whose connections are to be counted now, with the number of the period for which they are, and when the next ones are, if
// there are any.
func (o *Observer) due(now time.Time) (due map[*Watch]int, next time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	due = map[*Watch]int{}
	o.others = false
	var slow []*Watch
	together := false
	for w := range o.watches {
		switch w.reading.State {
		case Routing, Kept:
			o.others = true
		case Unknown:
			continue
		}
		if w.slow() {
			slow = append(slow, w)
		}
		if !w.next.After(now) {
			due[w] = w.period
			together = together || w.slow()
		} else if next.IsZero() || w.next.Before(next) {
			next = w.next
		}
	}
	if together {
		for _, w := range slow {
			due[w] = w.period
		}
	}
	// Those who come while there are others of their kind wake nobody.
	if soon := now.Add(countKept); o.others && (next.IsZero() || soon.Before(next)) {
		next = soon
	}
	return due, next
}

// slow reports whether w waits for nothing that a count could show. The caller holds o.mu.
func (w *Watch) slow() bool {
	return w.reading.State == Idle || w.reading.State == Routing && (w.empty == 0 || w.reading.Quiet)
}

// pause is how long after a count that ended now, and took so much of the CPU, the next one is to be. The caller holds o.mu.
func (w *Watch) pause(now time.Time, took time.Duration) time.Duration {
	switch {
	case w.slow():
		return max(countSlow, min(countSlowShare*took, countSlowMost))
	case w.reading.State == Removed:
		since := now.Sub(w.entered)
		most := countSlow
		if since < keptMost {
			most = keptQuiet
		}
		return min(max(countFirst, since/countLate), most)
	}
	return countKept
}

// counted takes a count in, for the watches that were waiting when it began and are still.
func (o *Observer) counted(waiting map[*Watch]int, open map[netip.Addr][]connection, took time.Duration, now time.Time) {
	o.mu.Lock()
	var told []*Watch
	old := !o.accounted.IsZero() && now.Sub(o.accounted) >= accountedFor
	for w, period := range waiting {
		if _, ok := o.watches[w]; !ok || w.period != period {
			continue
		}
		n, changed := w.see(open, old, now), false
		if w.empty++; n > 0 {
			w.empty = 0
		}
		quiet := w.empty >= emptyCounts
		switch {
		case w.reading.State == Removed && n == 0:
			changed = w.enter(Idle, now)
		case w.reading.State == Idle && n > 0:
			changed = w.enter(Removed, now)
		case w.reading.State < Removed && w.reading.Quiet != quiet:
			w.reading.Quiet, changed = quiet, true
		}
		if changed {
			told = append(told, w)
		}
		w.reading.Connections, w.reading.Counted = len(w.held), now
		w.next = now.Add(w.pause(now, took))
	}
	o.mu.Unlock()
	for _, w := range told {
		w.changed()
	}
}

// see takes in the open connections of a count, and returns how many of those to w's targets are to be waited for. The caller holds o.mu.
func (w *Watch) see(open map[netip.Addr][]connection, old bool, now time.Time) (n int) {
	held := make(map[string]held, len(w.held))
	for addr := range addresses(map[*Watch]int{w: 0}) {
		for _, c := range open[addr] {
			if !slices.Contains(w.targets, c.to) && !slices.Contains(w.targets, netip.AddrPortFrom(addr, 0)) {
				continue
			}
			key := string(c.id) + string(c.original)
			h := w.held[key]
			h.see(c, old, w.entered, now)
			if held[key] = h; !h.kept {
				n++
			}
		}
	}
	w.held = held
	return n
}

// Count has the connections counted again at once: [Reading.Counted] says when that is done.
func (w *Watch) Count() {
	w.o.mu.Lock()
	w.next = time.Time{}
	w.o.mu.Unlock()
	w.o.wakeCount()
}

// wakeCount wakes count.
func (o *Observer) wakeCount() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// account has the kernel count the packets of connections that begin from now on, as the sysctl nf_conntrack_acct does. An agent may
// not write that in its container. But the kernel switches it on for a rule that asks for the packets of a connection, when it reads
// the rule: the transaction has no end, so the kernel makes none of it.
func (o *Observer) account() error {
	const sysctl = "/proc/sys/net/netfilter/nf_conntrack_acct"
	on := func() bool {
		text, err := os.ReadFile(sysctl)
		return err == nil && strings.TrimSpace(string(text)) != "0"
	}
	if !on() {
		conn, err := o.dial()
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		const nested = unix.NLA_F_NESTED
		name := func(number uint16) []byte { return encode(number, []byte("lameduck\x00")) }
		value := func(number uint16, n uint32) []byte { return encode(number, binary.BigEndian.AppendUint32(nil, n)) }
		packets := encode(unix.NFTA_LIST_ELEM|nested, append(encode(unix.NFTA_EXPR_NAME, []byte("ct\x00")),
			encode(unix.NFTA_EXPR_DATA|nested, append(value(unix.NFTA_CT_DREG, unix.NFT_REG_1), value(unix.NFTA_CT_KEY, unix.NFT_CT_PKTS)...))...))
		send := func(message int, flags netlink.HeaderFlags, attributes ...[]byte) netlink.Message {
			return request(unix.NFNL_SUBSYS_NFTABLES, message, flags, unix.NFPROTO_INET, slices.Concat(attributes...))
		}
		begin := netlink.Message{
			Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
		if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
			return err
		}
		if _, err := conn.SendMessages([]netlink.Message{
			begin, send(unix.NFT_MSG_NEWTABLE, netlink.Create, name(unix.NFTA_TABLE_NAME)),
			send(unix.NFT_MSG_NEWCHAIN, netlink.Create, name(unix.NFTA_CHAIN_TABLE), name(unix.NFTA_CHAIN_NAME)),
			send(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append|netlink.Acknowledge,
				name(unix.NFTA_RULE_TABLE), name(unix.NFTA_RULE_CHAIN), encode(unix.NFTA_RULE_EXPRESSIONS|nested, packets)),
		}); err != nil {
			return err
		}
		if _, err := conn.Receive(); err != nil {
			return err
		}
		if !on() {
			return errors.New(sysctl + " is 0 after a rule has asked for packets")
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.accounted.IsZero() {
		o.accounted = time.Now()
	}
	return nil
}

// Clean deletes all connections to the targets, of whatever protocol and state, from the kernel's table, so that a client
// that uses a port again is sent to a pod that is there. It is for a pod that is gone: what its connections still had to say is cut
// off, and so is another pod that has got the address since. Nothing there is no error, and neither is a connection that ended meanwhile.
func (o *Observer) Clean(targets []netip.AddrPort) error {
	conn, err := o.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	for _, t := range targets {
		t = netip.AddrPortFrom(t.Addr().Unmap().WithZone(""), t.Port())
		if !t.Addr().IsValid() {
			return fmt.Errorf("clean connections to %v: no address", t)
		}
		var stale []connection
		if _, err := connections(conn, t.Addr(), func(c connection) {
			if t.Port() == 0 || t.Port() == c.to.Port() {
				stale = append(stale, c)
			}
		}); err != nil {
			return fmt.Errorf("clean connections to %v: %w", t, err)
		}
		for _, c := range stale {
			if err := deleteConnection(conn, c); err != nil {
				return fmt.Errorf("clean connections to %v: %w", t, err)
			}
		}
	}
	return nil
}

// deleteConnection deletes exactly this one: without a tuple the kernel would delete all.
func deleteConnection(conn *netlink.Conn, c connection) error {
	if len(c.original) == 0 || len(c.id) == 0 {
		return errors.New("a connection without a name")
	}
	attributes := append(encode(ctaTupleOrig|unix.NLA_F_NESTED, c.original), encode(ctaID, c.id)...)
	if c.zone != nil {
		attributes = append(attributes, encode(ctaZone, c.zone)...)
	}
	family := uint8(unix.AF_INET)
	if c.to.Addr().Is6() {
		family = unix.AF_INET6
	}
	if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	_, err := conn.Execute(request(unix.NFNL_SUBSYS_CTNETLINK, ctDelete, netlink.Acknowledge, family, attributes))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// encode makes an attribute.
func encode(number uint16, data []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(unix.NLA_HDRLEN+len(data)))
	b = append(binary.NativeEndian.AppendUint16(b, number), data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

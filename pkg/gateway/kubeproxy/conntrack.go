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

// How often connections are counted while a Watch is Removed and not yet Idle. The kernel goes through its whole table for each request, of all network namespaces together:
// 9 ms of CPU with the 262,144 buckets that are usual, even if they are empty. Telling a connection takes 3 us beyond that. Therefore it is bounded by its own cost, and
// there is none while nobody waits. Events of connections would come sooner, but the kernel makes them for all connections of the node: 10 to 20 us of
// CPU for each new one, also if the socket's filter then drops them (all measured on one machine of 2 cores, with Linux 6.18).
const (
	countFirst = 20 * time.Millisecond
	// countLate is what part of the time since a watch became Removed the next pause is: so much later than it was so is it seen to be Idle at most, and a
	// client that keeps its connection for seconds costs some counts each second, not a hundred. It is not more than countSent.
	countLate = 5
	// Where the kernel still sends, every countKept if to nobody else, and then whether there are connections is all that can be asked; else every
	// countSent: nobody asks, unless endpoints that are not ready are all the others. Most do not stay so for longer than kube-proxy takes to write.
	countKept = 100 * time.Millisecond
	countSent = time.Second
	// countShare bounds the cost: after a count comes a pause this many times as long as the CPU worked for it, so that it is a fifth of a core at
	// most. Not as it took: where others want the CPU too that is many times more, and pods would wait for seconds to be seen Idle.
	countShare = 4
	// emptyCounts is how many counts in a row must find nothing for a watch to be quiet to which the kernel still sends. One that is Removed is Idle at once: it is first
	// counted countFirst after the commit was read, and a packet for which the kernel chose the target before the commit is in its table when it has
	// left, microseconds after unless something queues it in between.
	emptyCounts = 2
	// walkCost is what going through the table is taken to cost until that is known, tellCost what telling one connection costs.
	walkCost = 9 * time.Millisecond
	tellCost = 3 * time.Microsecond
)

// connection is an entry of the kernel's table.
type connection struct {
	protocol uint8
	state    uint8
	// to is who answers: the pod, whatever address the client asked for.
	to netip.AddrPort
	// original, zone and id name the entry when it is deleted.
	original, zone, id []byte
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

// open returns how many connections to each destination with one of addrs are open, and how long the CPU has worked for that.
func (c *counter) open(addrs map[netip.Addr]bool) (open map[netip.AddrPort]int, took time.Duration, err error) {
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
	open = map[netip.AddrPort]int{}
	add := func(one connection) {
		if one.open() {
			open[one.to]++
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
				o.counted(due, open, time.Now())
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
	for w := range o.watches {
		switch w.reading.State {
		case Removed:
		case Routing, Kept:
			o.others = true
		default:
			continue
		}
		if !w.next.After(now) {
			due[w] = w.period
		} else if next.IsZero() || w.next.Before(next) {
			next = w.next
		}
	}
	// Those who come while there are others of their kind wake nobody.
	if soon := now.Add(countKept); o.others && (next.IsZero() || soon.Before(next)) {
		next = soon
	}
	return due, next
}

// pause is how long after a count that ended now the next one is to be. The caller holds o.mu.
func (w *Watch) pause(now time.Time) time.Duration {
	switch {
	case w.reading.State == Removed:
		return min(max(countFirst, now.Sub(w.entered)/countLate), countSent)
	case w.reading.State == Routing && w.empty == 0:
		return countSent
	}
	return countKept
}

// counted takes a count in, for the watches that were waiting when it began and are still.
func (o *Observer) counted(waiting map[*Watch]int, open map[netip.AddrPort]int, now time.Time) {
	all := map[netip.Addr]int{} // to every port
	for to, connections := range open {
		all[to.Addr()] += connections
	}
	o.mu.Lock()
	var told []*Watch
	for w, period := range waiting {
		if _, ok := o.watches[w]; !ok || w.period != period {
			continue
		}
		n := 0
		for i, t := range w.targets {
			if slices.Contains(w.targets[:i], t) {
				continue // it is counted already
			}
			if t.Port() == 0 {
				n += all[t.Addr()]
			} else if !slices.Contains(w.targets, netip.AddrPortFrom(t.Addr(), 0)) {
				n += open[t]
			}
		}
		w.reading.Connections = n
		if w.empty++; n > 0 {
			w.empty = 0
		}
		w.next = now.Add(w.pause(now))
		quiet := w.empty >= emptyCounts
		switch {
		case w.reading.State == Removed:
			if n == 0 && w.enter(Idle, now) {
				told = append(told, w)
			}
		case w.reading.Quiet != quiet:
			w.reading.Quiet = quiet
			told = append(told, w)
		}
	}
	o.mu.Unlock()
	for _, w := range told {
		w.changed()
	}
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

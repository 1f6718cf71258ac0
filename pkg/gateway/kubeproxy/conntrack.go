//go:build linux

package kubeproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
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

// How often connections are counted while a Watch is Removed and not yet Idle; where the kernel still sends, every countMost. The kernel goes through its whole table for each
// address that it is asked for: 12 ms of CPU with the 262,144 buckets that are usual, even if they are empty; telling all connections takes 3 us for
// each of them beyond that. Therefore it is bounded by its own cost, and there is none while nobody waits. Events of connections would come
// sooner, but the kernel makes them for all connections of the node: 10 to 20 us of CPU for each new one, also if the socket's
// filter then drops them (all measured on one machine of 2 cores, with Linux 6.18).
const (
	countFirst = 10 * time.Millisecond
	countMost  = 100 * time.Millisecond
	// countShare bounds the cost: after a count comes a pause this many times as long as it took, so that it is a fifth of a core at most.
	countShare = 4
	// emptyCounts is how many counts in a row must find nothing. A packet for which the kernel chose the target before the commit is in
	// its table when it leaves, which may be after the first.
	emptyCounts = 2
	// countSingly is the most IPv4 addresses that are asked for one by one: the kernel then goes through its whole table for each, but
	// tells only what is asked for. For more it tells all.
	countSingly = 16
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

// connections calls f with all entries to one of addrs, which are of one family. A table that is written to all the time cannot be read at one
// moment: an entry that came meanwhile may be missing, one that was there the whole time is not.
//
// With IPv6 the kernel tells all in any case: its filter of addresses is inverted there (ctnetlink_filter_match_tuple, seen in
// 6.18: it leaves out those that match), and may be mended some day.
func connections(conn *netlink.Conn, addrs []netip.Addr, f func(connection)) error {
	if addrs[0].Is4() && len(addrs) <= countSingly {
		for i, addr := range addrs {
			// A kernel before 5.8 does not know the filter, and tells all.
			filter := append(encode(ctaTupleReply|unix.NLA_F_NESTED, encode(ctaTupleIP|unix.NLA_F_NESTED, encode(ctaIPv4Src, addr.AsSlice()))),
				encode(ctaFilter|unix.NLA_F_NESTED, append(
					encode(ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, 0)),
					encode(ctaFilterReply, binary.NativeEndian.AppendUint32(nil, filterIPSrc))...))...)
			if err := dumpConnections(conn, unix.AF_INET, filter, addrs[i:i+1], f); err != nil {
				return err
			}
		}
		return nil
	}
	family := uint8(unix.AF_INET)
	if addrs[0].Is6() {
		family = unix.AF_INET6
	}
	return dumpConnections(conn, family, nil, addrs, f)
}

// dumpConnections calls f with those entries to one of addrs that the kernel tells.
func dumpConnections(conn *netlink.Conn, family uint8, filter []byte, addrs []netip.Addr, f func(connection)) error {
	var texts [][]byte
	for _, addr := range addrs {
		texts = append(texts, addr.AsSlice())
	}
	if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	if _, err := conn.Send(request(unix.NFNL_SUBSYS_CTNETLINK, ctGet, netlink.Dump, family, filter)); err != nil {
		return fmt.Errorf("ask for connections: %w", err)
	}
	for m, err := range conn.ReceiveIter() {
		if err != nil {
			return fmt.Errorf("read connections: %w", err)
		}
		// Most are others': what does not have the address somewhere need not be understood.
		if !slices.ContainsFunc(texts, func(text []byte) bool { return bytes.Contains(m.Data, text) }) {
			continue
		}
		c, err := decodeConnection(m)
		if err != nil {
			return fmt.Errorf("read connections: %w", err)
		}
		if slices.Contains(addrs, c.to.Addr()) {
			f(c)
		}
	}
	return nil
}

// count counts connections while somebody waits for them to end, until ctx is done.
func (o *Observer) count(ctx context.Context) {
	var conn *netlink.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close()
		}
	}()
	failed := false
	var slowly time.Time // when those were last counted to which the kernel still sends
	for pause := countFirst; ; {
		slow := time.Since(slowly) >= countMost
		waiting, others := o.waiting(slow)
		if slow {
			slowly = time.Now()
		}
		wait := (<-chan time.Time)(nil)
		if len(waiting) > 0 {
			began := time.Now()
			open, err := o.open(&conn, waiting)
			took := time.Since(began)
			if err != nil && ctx.Err() == nil && !failed {
				o.log.Warn("connections are not counted: no target becomes Idle", "error", err)
			}
			almost := false
			if failed = err != nil; !failed {
				almost = o.counted(waiting, open, time.Now())
			}
			if almost {
				wait = time.After(max(countFirst, took))
			} else {
				wait = time.After(max(pause, countShare*took))
				pause = min(pause*3/2, countMost)
			}
		} else if others {
			pause, wait = countFirst, time.After(countMost-time.Since(slowly))
		} else {
			pause = countFirst
		}
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
			if len(waiting) > 0 { // who came last is not to be counted more often than the others
				pause = countFirst
				select {
				case <-ctx.Done():
					return
				case <-wait:
				}
			}
		case <-wait:
		}
	}
}

// waiting returns the watches that are Removed and not yet Idle, with the number of the period for which they are, and if all is set also those
// to whose targets the kernel still sends. It reports whether there are such.
func (o *Observer) waiting(all bool) (waiting map[*Watch]int, others bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	waiting = map[*Watch]int{}
	for w := range o.watches {
		switch w.reading.State {
		case Removed:
			waiting[w] = w.period
		case Routing, Kept:
			if others = true; all {
				waiting[w] = w.period
			}
		}
	}
	return waiting, others
}

// open returns how many connections to each destination of the watches are open.
func (o *Observer) open(conn **netlink.Conn, waiting map[*Watch]int) (map[netip.AddrPort]int, error) {
	if *conn == nil {
		c, err := o.dial()
		if err != nil {
			return nil, err
		}
		*conn = c
	}
	addresses := map[bool]map[netip.Addr]bool{false: {}, true: {}} // by whether they are IPv6
	for w := range waiting {
		for _, t := range w.targets {
			addresses[t.Addr().Is6()][t.Addr()] = true
		}
	}
	open := map[netip.AddrPort]int{}
	for _, wanted := range addresses {
		if len(wanted) == 0 {
			continue
		}
		err := connections(*conn, slices.Collect(maps.Keys(wanted)), func(c connection) {
			if c.open() {
				open[c.to]++
			}
		})
		if err != nil {
			// What is left of its answer would be taken for the next one.
			_ = (*conn).Close()
			*conn = nil
			return nil, err
		}
	}
	return open, nil
}

// counted takes a count in, for the watches that were waiting when it began and are still. It reports whether the next one may make
// one of them Idle for which this one was the first that found nothing.
func (o *Observer) counted(waiting map[*Watch]int, open map[netip.AddrPort]int, now time.Time) (almost bool) {
	o.mu.Lock()
	var told []*Watch
	for w, period := range waiting {
		if _, ok := o.watches[w]; !ok || w.period != period {
			continue
		}
		n := 0
		for to, connections := range open {
			if slices.ContainsFunc(w.targets, func(t netip.AddrPort) bool { return t == to || t.Port() == 0 && t.Addr() == to.Addr() }) {
				n += connections
			}
		}
		w.reading.Connections = n
		if w.empty++; n > 0 {
			w.empty = 0
		}
		quiet := w.empty >= emptyCounts
		switch {
		case w.reading.State != Removed:
			if w.reading.Quiet != quiet {
				w.reading.Quiet = quiet
				told = append(told, w)
			}
		case quiet && w.enter(Idle, now):
			told = append(told, w)
		default:
			almost = almost || w.empty == 1
		}
	}
	o.mu.Unlock()
	for _, w := range told {
		w.changed()
	}
	return almost
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
		if err := connections(conn, []netip.Addr{t.Addr()}, func(c connection) {
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

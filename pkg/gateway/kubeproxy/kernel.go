//go:build linux

package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// buffer holds what the kernel notifies of while nobody reads: a commit that writes 1,000 Services with 10,000 endpoints
	// is 14,000 messages, 1.6 MB. The
	// kernel takes the memory only when it is needed. Without CAP_NET_ADMIN over the node it gives net.core.rmem_max at most.
	buffer = 64 << 20
	// answerTimeout is for one answer of the kernel.
	answerTimeout = 5 * time.Second
	// dumpTries is how often one dump that others' changes interrupt is read again.
	dumpTries = 100
)

// errChanged means that what was being read changed each time that it was read.
var errChanged = errors.New("the tables changed while they were read")

// commit is what one transaction did to the tables that concern us.
type commit struct {
	generation uint32
	changes    []change
	at         time.Time // when its end was read
}

// subscription is a socket that receives what the kernel notifies of, grouped by transaction.
type subscription struct {
	conn    *netlink.Conn
	ours    func(tableID) bool
	pending []change
	ready   []commit
}

// subscribe makes conn one. It closes conn if it cannot.
func subscribe(conn *netlink.Conn, buffer int, ours func(tableID) bool) (*subscription, error) {
	if err := conn.SetReadBuffer(buffer); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("give the netlink socket its buffer: %w", err)
	}
	if err := conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("subscribe to changes of nftables: %w", err)
	}
	return &subscription{conn: conn, ours: ours}, nil
}

// next waits for the end of a transaction. Deadline zero is no deadline; past it the error is a timeout.
func (s *subscription) next(deadline time.Time) (commit, error) {
	for len(s.ready) == 0 {
		if err := s.conn.SetReadDeadline(deadline); err != nil {
			return commit{}, err
		}
		messages, err := s.conn.Receive()
		if err != nil {
			return commit{}, err
		}
		for _, m := range messages {
			c, concerns, err := decode(m, s.ours)
			if err != nil {
				return commit{}, err
			}
			switch {
			case !concerns:
			case c.kind == newGen:
				s.ready = append(s.ready, commit{c.generation, s.pending, time.Now()})
				s.pending = nil
			default:
				s.pending = append(s.pending, c)
			}
		}
	}
	c := s.ready[0]
	s.ready = s.ready[1:]
	return c, nil
}

func (s *subscription) close() { _ = s.conn.Close() }

// dumper reads what is there.
type dumper struct {
	conn *netlink.Conn
	ours func(tableID) bool
}

func newDumper(conn *netlink.Conn, ours func(tableID) bool) *dumper {
	return &dumper{conn: conn, ours: ours}
}

// request makes a message to the subsystem, about one address family.
func request(subsystem, message int, flags netlink.HeaderFlags, family uint8, attributes []byte) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(subsystem<<8 | message), Flags: netlink.Request | flags},
		Data:   append([]byte{family, unix.NFNETLINK_V0, 0, 0}, attributes...),
	}
}

// generation returns the number of the last transaction.
func (d *dumper) generation() (uint32, error) {
	if err := d.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return 0, err
	}
	// No acknowledgement is asked for: the answer is one.
	if _, err := d.conn.Send(request(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, nil)); err != nil {
		return 0, fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	messages, err := d.conn.Receive()
	if err != nil {
		return 0, fmt.Errorf("read the generation of nftables: %w", err)
	}
	for _, m := range messages {
		c, _, err := decode(m, d.ours)
		if err != nil {
			return 0, err
		}
		if c.kind == newGen {
			return c.generation, nil
		}
	}
	return 0, errors.New("read the generation of nftables: no answer")
}

// elementDumps is how often the elements of a set are read. Some time after a transaction the kernel gives the set's table another size, and a dump that is
// under way leaves out elements that nobody has touched, and is not marked as interrupted. What only one dump has counts: if it is gone meanwhile, that is made again
// on top, see snapshot.
const elementDumps = 3

// dump calls add with all that the kernel tells about what message asks for. A dump that was interrupted is read again.
func (d *dumper) dump(ctx context.Context, message int, family uint8, attributes []byte, add func(change)) error {
	var all []change
	for range dumpTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := d.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
			return err
		}
		if _, err := d.conn.Send(request(unix.NFNL_SUBSYS_NFTABLES, message, netlink.Dump, family, attributes)); err != nil {
			return fmt.Errorf("ask for a dump of nftables (%d): %w", message, err)
		}
		all = all[:0]
		interrupted := false
		for m, err := range d.conn.ReceiveIter() {
			if err != nil {
				if errors.Is(err, unix.EINTR) {
					interrupted = true
					break
				}
				return fmt.Errorf("dump nftables (%d): %w", message, err)
			}
			if m.Header.Flags&netlink.DumpInterrupted != 0 {
				interrupted = true
			}
			c, concerns, err := decode(m, d.ours)
			if err != nil {
				return err
			}
			if concerns {
				all = append(all, c)
			}
		}
		if !interrupted {
			for _, c := range all {
				add(c)
			}
			return nil
		}
	}
	return errChanged
}

// tables reads the tables of the families, as changes that make them out of nothing.
func (d *dumper) tables(ctx context.Context, families []uint8) ([]change, error) {
	var all []change
	add := func(c change) { all = append(all, c) }
	for _, family := range families {
		if err := d.dump(ctx, unix.NFT_MSG_GETTABLE, family, nil, add); err != nil {
			return nil, err
		}
	}
	tables := all
	for _, t := range tables {
		if err := d.dump(ctx, unix.NFT_MSG_GETCHAIN, t.table.family, nil, func(c change) {
			if c.table == t.table {
				add(c)
			}
		}); err != nil {
			return nil, err
		}
		first := len(all)
		of := func(name string) []byte { return encodeString(unix.NFTA_TABLE_NAME, name) }
		// The kernel leaves out other tables; that it does so is not relied on.
		if err := d.dump(ctx, unix.NFT_MSG_GETSET, t.table.family, of(t.table.name), func(c change) {
			if c.table == t.table && c.sends {
				add(c)
			}
		}); err != nil {
			return nil, err
		}
		for _, set := range all[first:] {
			name := append(of(t.table.name), encodeString(unix.NFTA_SET_ELEM_LIST_SET, set.name)...)
			var err error
			for range elementDumps {
				if err = d.dump(ctx, unix.NFT_MSG_GETSETELEM, t.table.family, name, add); err != nil {
					break
				}
			}
			if errors.Is(err, unix.ENOENT) {
				continue // it is gone, and what has made it so is made again, see snapshot
			}
			if err != nil {
				return nil, err
			}
		}
		if err := d.dump(ctx, unix.NFT_MSG_GETRULE, t.table.family, of(t.table.name), func(c change) {
			if c.table == t.table {
				add(c)
			}
		}); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (d *dumper) close() { _ = d.conn.Close() }

// snapshot reads the tables, in several dumps, and returns them with the transactions that ended since it began, up to a generation. The dumps are of
// different moments. But each is of one moment; what no transaction touched is the same in all; and what one touched is, once that is made on top, as it
// left it, whether the dump had it already or not: every change of a transaction names what it makes and unmakes, and making it twice is making
// it once. So made in order, they make the tables of that generation, and what s receives from then on follows.
func snapshot(ctx context.Context, s *subscription, d *dumper, families []uint8) (all []change, since []commit, generation uint32, err error) {
	before, err := d.generation()
	if err != nil {
		return nil, nil, 0, err
	}
	if all, err = d.tables(ctx, families); err != nil {
		return nil, nil, 0, err
	}
	if generation, err = d.generation(); err != nil {
		return nil, nil, 0, err
	}
	since, err = s.drain(before, generation)
	return all, since, generation, err
}

// drain takes what was received from a generation on, up to another one. That the kernel names a generation does not mean that it has
// finished its commit, nor that we have been told of it. So a commit that ends now counts even if it has the number from before.
func (s *subscription) drain(before, generation uint32) (commits []commit, err error) {
	deadline := time.Now().Add(answerTimeout)
	wait := before != generation
	for {
		d := deadline
		if !wait {
			d = time.Now().Add(time.Millisecond) // only what is there
		}
		c, err := s.next(d)
		if !wait && isTimeout(err) {
			// What may follow with this very number is seen by the reader, see follow.
			return commits, nil
		}
		if err != nil {
			return nil, fmt.Errorf("wait for generation %d of nftables: %w", generation, err)
		}
		if after(c.generation, generation) {
			// It began after the last dump had ended: it is the reader's to make.
			s.ready = append([]commit{c}, s.ready...)
			return commits, nil
		}
		if !after(before, c.generation) {
			commits = append(commits, c)
		}
		wait = wait && c.generation != generation
	}
}

// after reports whether generation a is later than b. The numbers wrap around.
func after(a, b uint32) bool { return int32(a-b) > 0 }

func encodeString(number uint16, text string) []byte { return encode(number, append([]byte(text), 0)) }

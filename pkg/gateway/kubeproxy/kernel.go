package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// buffer holds the kernel's notifications until the Observer reads them: writing 1,000 Services
	// with 10,000 endpoints is 14,000 messages, 1.6 MB. The kernel allocates the memory only when
	// it is needed. Without CAP_NET_ADMIN in the node's user namespace, it grants net.core.rmem_max
	// at most.
	buffer = 64 << 20
	// answerTimeout bounds one answer of the kernel. A dump of five million connections takes half
	// of it.
	answerTimeout = 20 * time.Second
	// pageSize is how much of a dump the kernel hands over at once. Small pages make the dump of a
	// long list quadratic: continuing behind n entries takes n steps. Notifications are smaller
	// (NLMSG_GOODSIZE).
	pageSize = 32 << 10
	// auditEvery is how often the followed tables are compared with the kernel's. One comparison
	// takes half a second of CPU for 3,000 Services.
	auditEvery = 5 * time.Minute
	// absentAfter is how long after their deletion rules count as absent. When kube-proxy changes
	// its mode, it deletes them and writes them again.
	absentAfter = 10 * time.Second
	// readLook is how often to check whether a running read has ended.
	readLook = 10 * time.Millisecond
	// dumpTries bounds the attempts to read a dump during which no transaction ends.
	dumpTries = 100
)

// errChanged means that a transaction ended during each try to read a dump.
var errChanged = errors.New("the tables changed while they were read")

// commit is what one transaction did to the tables that concern us.
type commit struct {
	generation uint32
	changes    []change
	at         time.Time // when its end was read
}

// subscription is a socket that receives the kernel's notifications, and groups them by
// transaction.
type subscription struct {
	conn    *netlink.Conn
	ours    func(tableID) bool
	pending []change
	ready   []commit
}

// subscribe subscribes conn to the changes of nftables. It closes conn if it fails.
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

// next returns the next transaction, once that has ended. A zero deadline: it waits without a
// limit.
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

type dumper struct {
	conn *netlink.Conn
	ours func(tableID) bool
	// generation is the number of the last transaction that d has seen. steady reports whether, at
	// a moment after the last dump, no transaction was in progress and none later than generation
	// had ended.
	generation uint32
	steady     bool
}

// settle waits until a transaction in progress has ended and its notifications have been sent. It
// sets steady if the generation is the same as at the last call.
//
// The kernel raises the generation before a commit ends, and marks dumps that the commit interrupts
// only in part: dumps of elements never, others perhaps only in their last message. Therefore
// settle sends an empty transaction, which has to wait for the kernel's transaction lock. It names
// d.generation, so the kernel refuses it if the generation has changed. Otherwise it changes
// nothing.
func (d *dumper) settle() error {
	if err := ask(d.conn, request(0, unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC,
		encode32(unix.NFNL_BATCH_GENID, d.generation)),
		request(0, unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC)); err != nil {
		return fmt.Errorf("wait for transactions of nftables: %w", err)
	}
	if err := ask(d.conn, request(unix.NFNL_SUBSYS_NFTABLES, unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC)); err != nil {
		return fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	messages, err := d.conn.Receive()
	if errors.Is(err, unix.ERESTART) {
		messages, err = d.conn.Receive() // the empty transaction is refused; the generation is the next answer
	}
	if err != nil {
		return fmt.Errorf("read the generation of nftables: %w", err)
	}
	for _, m := range messages {
		if c, _, err := decode(m, d.ours); err != nil || c.kind == newGen {
			d.steady = err == nil && c.generation == d.generation
			d.generation = c.generation
			return err
		}
	}
	return errors.New("read the generation of nftables: no answer")
}

// dump calls add with each change of the kernel's answer to message. All of them are of one
// generation, d.generation. It returns [errChanged] after dumpTries attempts.
func (d *dumper) dump(ctx context.Context, message int, family uint8, add func(change), attributes ...[]byte) error {
	var all []change
	for range dumpTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		whole := d.steady
		if whole {
			var err error
			if all, whole, err = d.once(message, family, attributes...); err != nil {
				return err
			}
		}
		if err := d.settle(); err != nil {
			return err
		}
		if whole && d.steady {
			for _, c := range all {
				add(c)
			}
			return nil
		}
	}
	return errChanged
}

// once reads a dump. It reports false if an element comes twice: the kernel may give a set's table
// another size at any time after a transaction, and the dump then lacks as many elements as it has
// twice.
func (d *dumper) once(message int, family uint8, attributes ...[]byte) (all []change, whole bool, err error) {
	if err := ask(d.conn, request(unix.NFNL_SUBSYS_NFTABLES, message, netlink.Dump, family,
		attributes...)); err != nil {
		return nil, false, fmt.Errorf("ask for a dump of nftables (%d): %w", message, err)
	}
	whole = true
	keys := map[string]bool{}
	for m, err := range d.conn.ReceiveIter() {
		if err != nil {
			return nil, false, fmt.Errorf("dump nftables (%d): %w", message, err)
		}
		c, concerns, err := decode(m, d.ours)
		if err != nil {
			return nil, false, err
		}
		if concerns {
			all = append(all, c)
		}
		for _, e := range c.elements {
			whole = whole && !keys[e.key]
			keys[e.key] = true
		}
	}
	return all, whole, nil
}

// tables reads the families' tables in several dumps, each of one generation. It returns them as
// the changes that would create them. from is the generation of the first dump, and d.generation
// that of the last.
//
// An object that no transaction between the dumps changed is the same in all of them. For any other
// object, applying these transactions on top gives the right result, whether or not the dump
// contained it: a change names its object and can be applied twice. So the caller applies all
// transactions after from, in order, up to d.generation or later. The tables then have the
// generation of the last of these transactions.
func (d *dumper) tables(ctx context.Context, families []uint8) (all []change, from uint32, err error) {
	var tables, sets []change
	add := func(c change) { all = append(all, c) }
	for _, family := range families {
		if err := d.dump(ctx, unix.NFT_MSG_GETTABLE, family, func(c change) {
			tables = append(tables, c)
		}); err != nil {
			return nil, 0, err
		}
		if from == 0 {
			from = d.generation
		}
	}
	all = slices.Clone(tables)
	for _, family := range families {
		if err := d.dump(ctx, unix.NFT_MSG_GETCHAIN, family, add); err != nil {
			return nil, 0, err
		}
		if err := d.dump(ctx, unix.NFT_MSG_GETSET, family, func(c change) {
			if c.sends {
				sets = append(sets, c)
			}
		}); err != nil {
			return nil, 0, err
		}
	}
	all = append(all, sets...)
	of := func(c change) []byte { return encodeString(unix.NFTA_TABLE_NAME, c.table.name) }
	for _, set := range sets {
		err := d.dump(ctx, unix.NFT_MSG_GETSETELEM, set.table.family, add, of(set),
			encodeString(unix.NFTA_SET_ELEM_LIST_SET, set.name))
		if err != nil && !errors.Is(err, unix.ENOENT) { // without a set, the transaction that deleted it is made on top
			return nil, 0, err
		}
	}
	for _, t := range tables {
		if err := d.dump(ctx, unix.NFT_MSG_GETRULE, t.table.family, add, of(t)); err != nil {
			return nil, 0, err
		}
	}
	return all, from, nil
}

func (d *dumper) close() { _ = d.conn.Close() }

// after reports whether generation a is later than b. The numbers wrap around.
func after(a, b uint32) bool { return int32(a-b) > 0 }

//go:build linux

package kubeproxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix does not have, from linux/netfilter/nf_tables.h.
const (
	setHandle     = 0x10 // NFTA_SET_HANDLE
	setElemKeyEnd = 0x0a // NFTA_SET_ELEM_KEY_END
	listElem      = 0x01 // NFTA_LIST_ELEM
	dataVerdict   = 0xffffff00
	natDNAT       = 1 // NFT_NAT_DNAT
)

// kind is what a message of nftables is about.
type kind uint8

const (
	newTable kind = unix.NFT_MSG_NEWTABLE
	delTable kind = unix.NFT_MSG_DELTABLE
	newChain kind = unix.NFT_MSG_NEWCHAIN
	delChain kind = unix.NFT_MSG_DELCHAIN
	newRule  kind = unix.NFT_MSG_NEWRULE
	delRule  kind = unix.NFT_MSG_DELRULE
	newSet   kind = unix.NFT_MSG_NEWSET
	delSet   kind = unix.NFT_MSG_DELSET
	newElem  kind = unix.NFT_MSG_NEWSETELEM
	delElem  kind = unix.NFT_MSG_DELSETELEM
	newGen   kind = unix.NFT_MSG_NEWGEN
)

// tableID is a table of an address family: unix.NFPROTO_IPV4 or unix.NFPROTO_IPV6.
type tableID struct {
	family uint8
	name   string
}

// change is one message of nftables about a table that concerns us: part of a dump, or of a commit.
type change struct {
	kind  kind
	table tableID
	// name is the chain's (also a rule's), or the set's (also an element's).
	name   string
	handle uint64
	// base is of a chain: the kernel enters it at a hook.
	base bool
	rule rule
	// sends is of a set: a map to verdicts, or to addresses.
	sends    bool
	elements []element
	// generation is of a newGen, which ends a commit.
	generation uint32
}

// rule is what a rule may do with a packet, as far as it concerns where the packet goes.
type rule struct {
	jumps []string         // chains
	maps  []string         // maps that give a verdict or an address
	dests []netip.AddrPort // destinations by DNAT
}

// element is one of a map. It leads to a chain, or to a destination, or (a bare verdict) to neither.
type element struct {
	key   string
	chain string
	dest  netip.AddrPort
}

var errShort = errors.New("message is too short")

// decode returns what a message says. It reports false for messages that do not concern us. The tables that do are those for
// which ours is true.
func decode(m netlink.Message, ours func(tableID) bool) (change, bool, error) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return change{}, false, nil
	}
	if len(m.Data) < 4 { // struct nfgenmsg
		return change{}, false, errShort
	}
	c := change{kind: kind(m.Header.Type & 0xff), table: tableID{family: m.Data[0]}}
	attributes, err := parse(m.Data[4:])
	if err != nil {
		return change{}, false, err
	}
	if c.kind == newGen {
		c.generation, err = attributes.uint32(unix.NFTA_GEN_ID)
		return c, err == nil, err
	}
	switch c.kind {
	case newTable, delTable, newChain, delChain, newRule, delRule, newSet, delSet, newElem, delElem:
	default:
		return change{}, false, nil
	}
	// The table's name has the same number in all of them.
	c.table.name = attributes.string(unix.NFTA_TABLE_NAME)
	if !ours(c.table) {
		return change{}, false, nil
	}
	switch c.kind {
	case newChain, delChain:
		c.name = attributes.string(unix.NFTA_CHAIN_NAME)
		c.base = attributes.find(unix.NFTA_CHAIN_HOOK) != nil
	case newRule, delRule:
		c.name = attributes.string(unix.NFTA_RULE_CHAIN)
		if c.handle, err = attributes.uint64(unix.NFTA_RULE_HANDLE); err == nil && c.kind == newRule {
			c.rule, err = decodeRule(c.table.family, attributes.find(unix.NFTA_RULE_EXPRESSIONS))
		}
	case newSet, delSet:
		c.name = attributes.string(unix.NFTA_SET_NAME)
		if b := attributes.find(setHandle); len(b) == 8 {
			c.handle = binary.BigEndian.Uint64(b)
		}
		if c.kind == newSet {
			c.sends = sends(c.table.family, attributes)
		}
	case newElem, delElem:
		c.name = attributes.string(unix.NFTA_SET_ELEM_LIST_SET)
		c.elements, err = decodeElements(c.table.family, attributes.find(unix.NFTA_SET_ELEM_LIST_ELEMENTS))
	}
	if err != nil {
		return change{}, false, fmt.Errorf("message %d of table %s: %w", c.kind, c.table.name, err)
	}
	return c, true, nil
}

// sends reports whether a set is a map that says where packets go.
func sends(family uint8, set attributes) bool {
	flags, _ := set.uint32(unix.NFTA_SET_FLAGS)
	if flags&unix.NFT_SET_MAP == 0 {
		return false
	}
	if data, _ := set.uint32(unix.NFTA_SET_DATA_TYPE); data == dataVerdict {
		return true
	}
	length, _ := set.uint32(unix.NFTA_SET_DATA_LEN)
	return int(length) == addressLen(family) || int(length) == addressLen(family)+4
}

func addressLen(family uint8) int {
	if family == unix.NFPROTO_IPV6 {
		return 16
	}
	return 4
}

// decodeDest returns the destination that b, a value of a map, is: an address and perhaps a port, padded to a register.
func decodeDest(family uint8, b []byte) netip.AddrPort {
	n := addressLen(family)
	if len(b) != n && len(b) != n+4 {
		return netip.AddrPort{}
	}
	addr, _ := netip.AddrFromSlice(b[:n])
	var port uint16
	if len(b) > n {
		port = binary.BigEndian.Uint16(b[n:])
	}
	return netip.AddrPortFrom(addr, port)
}

func decodeElements(family uint8, b []byte) ([]element, error) {
	list, err := parse(b)
	if err != nil {
		return nil, err
	}
	elements := make([]element, 0, len(list))
	for _, item := range list {
		attributes, err := parse(item.data)
		if err != nil {
			return nil, err
		}
		var e element
		for _, t := range []uint16{unix.NFTA_SET_ELEM_KEY, setElemKeyEnd} {
			key, err := parse(attributes.find(t))
			if err != nil {
				return nil, err
			}
			e.key += string(key.find(unix.NFTA_DATA_VALUE))
		}
		data, err := parse(attributes.find(unix.NFTA_SET_ELEM_DATA))
		if err != nil {
			return nil, err
		}
		if e.chain, err = decodeVerdict(data); err != nil {
			return nil, err
		}
		e.dest = decodeDest(family, data.find(unix.NFTA_DATA_VALUE))
		elements = append(elements, e)
	}
	return elements, nil
}

// decodeVerdict returns the chain that data, a verdict or something else, leads to.
func decodeVerdict(data attributes) (string, error) {
	verdict, err := parse(data.find(unix.NFTA_DATA_VERDICT))
	return verdict.string(unix.NFTA_VERDICT_CHAIN), err
}

func decodeRule(family uint8, b []byte) (rule, error) {
	var r rule
	expressions, err := parse(b)
	if err != nil {
		return r, err
	}
	registers := map[uint32][]byte{}
	for _, expression := range expressions {
		outer, err := parse(expression.data)
		if err != nil {
			return r, err
		}
		inner := func() (attributes, error) { return parse(outer.find(unix.NFTA_EXPR_DATA)) }
		switch outer.string(unix.NFTA_EXPR_NAME) {
		case "immediate":
			in, err := inner()
			if err != nil {
				return r, err
			}
			data, err := parse(in.find(unix.NFTA_IMMEDIATE_DATA))
			if err != nil {
				return r, err
			}
			register, err := in.uint32(unix.NFTA_IMMEDIATE_DREG)
			if err != nil {
				return r, err
			}
			if register != unix.NFT_REG_VERDICT {
				registers[word(register)] = data.find(unix.NFTA_DATA_VALUE)
				continue
			}
			chain, err := decodeVerdict(data)
			if err != nil {
				return r, err
			}
			if chain != "" {
				r.jumps = append(r.jumps, chain)
			}
		case "lookup":
			in, err := inner()
			if err != nil {
				return r, err
			}
			// Without a register for the result it only asks whether something is in the set.
			if in.find(unix.NFTA_LOOKUP_DREG) != nil {
				r.maps = append(r.maps, in.string(unix.NFTA_LOOKUP_SET))
			}
		case "nat":
			in, err := inner()
			if err != nil {
				return r, err
			}
			if t, err := in.uint32(unix.NFTA_NAT_TYPE); err != nil || t != natDNAT {
				continue
			}
			address, err := in.uint32(unix.NFTA_NAT_REG_ADDR_MIN)
			if err != nil {
				continue // only a port is changed
			}
			// What a map put into the register is not there: that is the map's to say.
			addr, ok := netip.AddrFromSlice(registers[word(address)])
			if !ok {
				continue
			}
			var port uint16
			if p, err := in.uint32(unix.NFTA_NAT_REG_PROTO_MIN); err == nil && len(registers[word(p)]) >= 2 {
				port = binary.BigEndian.Uint16(registers[word(p)])
			}
			r.dests = append(r.dests, netip.AddrPortFrom(addr, port))
		case "target":
			in, err := inner()
			if err != nil {
				return r, err
			}
			if in.string(unix.NFTA_TARGET_NAME) != "DNAT" {
				continue
			}
			dest, err := decodeTarget(family, in.find(unix.NFTA_TARGET_INFO))
			if err != nil {
				return r, err
			}
			r.dests = append(r.dests, dest)
		}
	}
	return r, nil
}

// word is the place of a register: four of 16 bytes have names of their own beside those of their 4 bytes each.
func word(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return register - unix.NFT_REG32_00 + 4
	}
	return register * 4
}

// decodeTarget returns the destination of the target DNAT of xtables in one of its revisions: struct nf_nat_ipv4_multi_range_compat,
// nf_nat_range or nf_nat_range2.
func decodeTarget(family uint8, b []byte) (netip.AddrPort, error) {
	const mapIPs, protoSpecified = 1, 2
	if len(b) < 20 {
		return netip.AddrPort{}, errShort
	}
	flags := binary.NativeEndian.Uint32(b)
	addr, port := b[4:], 36 // after flags, two addresses of 16 bytes
	if family == unix.NFPROTO_IPV4 && len(b) < 40 {
		// Revision 0: a count, then flags, two addresses of 4 bytes, two ports.
		flags, addr, port = binary.NativeEndian.Uint32(b[4:]), b[8:], 16
	}
	if flags&mapIPs == 0 {
		return netip.AddrPort{}, nil
	}
	a, _ := netip.AddrFromSlice(addr[:addressLen(family)])
	if flags&protoSpecified == 0 {
		return netip.AddrPortFrom(a, 0), nil
	}
	if len(b) < port+2 {
		return netip.AddrPort{}, errShort
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[port:])), nil
}

// attributes are those of one level of a message, in its order.
type attributes []attribute

type attribute struct {
	number uint16
	data   []byte
}

// parse splits b, without copying.
func parse(b []byte) (attributes, error) {
	var list attributes
	for len(b) >= unix.NLA_HDRLEN {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.NLA_HDRLEN || length > len(b) {
			return nil, errShort
		}
		// The highest two bits are flags.
		list = append(list, attribute{binary.NativeEndian.Uint16(b[2:]) & 0x3fff, b[unix.NLA_HDRLEN:length]})
		b = b[min((length+3)&^3, len(b)):]
	}
	if len(b) != 0 {
		return nil, errShort
	}
	return list, nil
}

// attributeAt returns the data of an attribute in b, nil if it is not there, without making anything of the others.
func attributeAt(b []byte, number uint16) []byte {
	for len(b) >= unix.NLA_HDRLEN {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.NLA_HDRLEN || length > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&0x3fff == number {
			return b[unix.NLA_HDRLEN:length]
		}
		b = b[min((length+3)&^3, len(b)):]
	}
	return nil
}

// find returns the data of the first attribute with the number, or nil.
func (l attributes) find(number uint16) []byte {
	for _, a := range l {
		if a.number == number {
			return a.data
		}
	}
	return nil
}

func (l attributes) string(number uint16) string {
	text, _, _ := strings.Cut(string(l.find(number)), "\x00")
	return text
}

func (l attributes) uint32(number uint16) (uint32, error) {
	b := l.find(number)
	if len(b) != 4 {
		return 0, fmt.Errorf("attribute %d: %w", number, errShort)
	}
	return binary.BigEndian.Uint32(b), nil
}

func (l attributes) uint64(number uint16) (uint64, error) {
	b := l.find(number)
	if len(b) != 8 {
		return 0, fmt.Errorf("attribute %d: %w", number, errShort)
	}
	return binary.BigEndian.Uint64(b), nil
}

package kubeproxy

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Constants of linux/netfilter/nf_tables.h that golang.org/x/sys/unix lacks.
const (
	setHandle     = 0x10 // NFTA_SET_HANDLE
	setElemKeyEnd = 0x0a // NFTA_SET_ELEM_KEY_END
	dataVerdict   = 0xffffff00
	natDNAT       = 1 // NFT_NAT_DNAT
)

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

// change is a message of nftables about one of kube-proxy's tables, from a dump or a commit.
type change struct {
	kind  kind
	table tableID
	// name is the name of the chain, or of the set. A rule has the name of its chain, and an
	// element that of its set.
	name   string
	handle uint64
	// base reports whether the kernel enters the chain at a hook.
	base bool
	rule rule
	// sends reports whether the set is a map to verdicts or to addresses.
	sends    bool
	elements []element
	// generation is set for newGen, which ends a commit.
	generation uint32
}

// rule is what a rule may do with a packet, as far as it concerns where the packet goes.
type rule struct {
	jumps []string         // chains
	maps  []string         // maps that give a verdict or an address
	dests []netip.AddrPort // destinations by DNAT
}

// element is an element of a map. It leads to a chain or to a destination, or, for a verdict
// without a chain, to neither.
type element struct {
	key   string
	chain string
	dest  netip.AddrPort
}

// decode decodes a message. It reports false if the message is about none of kube-proxy's tables.
func decode(m netlink.Message, ours func(tableID) bool) (change, bool, error) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return change{}, false, nil
	}
	if len(m.Data) < 4 { // struct nfgenmsg
		return change{}, false, errShort
	}
	c := change{kind: kind(m.Header.Type & 0xff), table: tableID{family: m.Data[0]}}
	b := body(m)
	switch c.kind {
	case newGen:
		c.generation = uint32(number(attribute(b, unix.NFTA_GEN_ID)))
		return c, true, nil
	case newTable, delTable, newChain, delChain, newRule, delRule, newSet, delSet, newElem, delElem:
	default:
		return change{}, false, nil
	}
	// The table's name has the same number in all of them.
	c.table.name = text(b, unix.NFTA_TABLE_NAME)
	if !ours(c.table) {
		return change{}, false, nil
	}
	var err error
	switch c.kind {
	case newChain, delChain:
		c.name = text(b, unix.NFTA_CHAIN_NAME)
		c.base = attribute(b, unix.NFTA_CHAIN_HOOK) != nil
	case newRule, delRule:
		c.name = text(b, unix.NFTA_RULE_CHAIN)
		if c.handle = number(attribute(b, unix.NFTA_RULE_HANDLE)); c.handle == 0 {
			err = errShort
		} else if c.kind == newRule {
			c.rule, err = decodeRule(c.table.family, attribute(b, unix.NFTA_RULE_EXPRESSIONS))
		}
	case newSet, delSet:
		c.name, c.handle = text(b, unix.NFTA_SET_NAME), number(attribute(b, setHandle))
		c.sends = c.kind == newSet && sends(c.table.family, b)
	case newElem, delElem:
		c.name = text(b, unix.NFTA_SET_ELEM_LIST_SET)
		c.elements, err = decodeElements(c.table.family, attribute(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS))
	}
	if err != nil {
		return change{}, false, fmt.Errorf("message %d of table %s: %w", c.kind, c.table.name, err)
	}
	return c, true, nil
}

// sends reports whether a set is a map to verdicts or to addresses.
func sends(family uint8, set []byte) bool {
	length := int(number(attribute(set, unix.NFTA_SET_DATA_LEN)))
	return number(attribute(set, unix.NFTA_SET_FLAGS))&unix.NFT_SET_MAP != 0 &&
		(number(attribute(set, unix.NFTA_SET_DATA_TYPE)) == dataVerdict || length == addressLen(family) ||
			length == addressLen(family)+4)
}

func addressLen(family uint8) int {
	if family == unix.NFPROTO_IPV6 {
		return 16
	}
	return 4
}

// decodeDest decodes a value of a map: an address and perhaps a port, padded to a register.
func decodeDest(family uint8, b []byte) netip.AddrPort {
	n := addressLen(family)
	if len(b) != n && len(b) != n+4 {
		return netip.AddrPort{}
	}
	addr, _ := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(addr, uint16(number(b[n:min(n+2, len(b))])))
}

func decodeElements(family uint8, b []byte) ([]element, error) {
	all, err := list(b)
	elements := make([]element, 0, len(all))
	for _, b := range all {
		data := attribute(b, unix.NFTA_SET_ELEM_DATA)
		elements = append(elements, element{
			key: string(attribute(b, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)) + string(attribute(b,
				setElemKeyEnd, unix.NFTA_DATA_VALUE)),
			chain: decodeVerdict(data), dest: decodeDest(family, attribute(data, unix.NFTA_DATA_VALUE)),
		})
	}
	return elements, err
}

func decodeVerdict(data []byte) string {
	return text(data, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN)
}

func decodeRule(family uint8, b []byte) (r rule, err error) {
	expressions, err := list(b)
	registers := map[uint32][]byte{}
	register := func(b []byte, attr uint16) uint32 { return word(uint32(number(attribute(b, attr)))) }
	for _, expression := range expressions {
		b := attribute(expression, unix.NFTA_EXPR_DATA)
		switch text(expression, unix.NFTA_EXPR_NAME) {
		case "immediate":
			data := attribute(b, unix.NFTA_IMMEDIATE_DATA)
			if to := register(b, unix.NFTA_IMMEDIATE_DREG); to != word(unix.NFT_REG_VERDICT) {
				registers[to] = attribute(data, unix.NFTA_DATA_VALUE)
			} else if chain := decodeVerdict(data); chain != "" {
				r.jumps = append(r.jumps, chain)
			}
		case "lookup":
			// Without a register for the result, the lookup only tests membership.
			if attribute(b, unix.NFTA_LOOKUP_DREG) != nil {
				r.maps = append(r.maps, text(b, unix.NFTA_LOOKUP_SET))
			}
		case "nat":
			// The address is absent if only the port is changed, or if a map gives the address.
			addr, ok := netip.AddrFromSlice(registers[register(b, unix.NFTA_NAT_REG_ADDR_MIN)])
			if ok && number(attribute(b, unix.NFTA_NAT_TYPE)) == natDNAT {
				port := registers[register(b, unix.NFTA_NAT_REG_PROTO_MIN)]
				r.dests = append(r.dests, netip.AddrPortFrom(addr, uint16(number(port[:min(2, len(port))]))))
			}
		case "target":
			if text(b, unix.NFTA_TARGET_NAME) != "DNAT" {
				continue
			}
			dest, err := decodeTarget(family, attribute(b, unix.NFTA_TARGET_INFO))
			if err != nil {
				return r, err
			}
			r.dests = append(r.dests, dest)
		}
	}
	return r, err
}

// word returns the index of a register's first 4-byte word. The four registers of 16 bytes have
// numbers of their own, in addition to those of their words.
func word(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return register - unix.NFT_REG32_00 + 4
	}
	return register * 4
}

// decodeTarget returns the destination of an xtables target DNAT. The data is a struct
// nf_nat_ipv4_multi_range_compat, nf_nat_range or nf_nat_range2, by the revision of the target.
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

//go:build linux

package kubeproxy

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

var errShort = errors.New("message is too short")

// request returns a message to the subsystem, about one address family. Subsystem 0 has the
// beginning and the end of a transaction of nftables.
func request(subsystem, message int, flags netlink.HeaderFlags, family uint8, attributes ...[]byte) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(subsystem<<8 | message), Flags: netlink.Request | flags},
		Data: append([]byte{family, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
			slices.Concat(attributes...)...),
	}
}

// ask sends messages, and bounds the time until the answers are read.
func ask(conn *netlink.Conn, messages ...netlink.Message) error {
	if err := conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	_, err := conn.SendMessages(messages)
	return err
}

// encode returns an attribute.
func encode(number uint16, data []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(unix.NLA_HDRLEN+len(data)))
	b = append(binary.NativeEndian.AppendUint16(b, number), data...)
	for len(b)%unix.NLA_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

func encodeString(number uint16, text string) []byte { return encode(number, append([]byte(text), 0)) }

func encode32(number uint16, n uint32) []byte {
	return encode(number, binary.BigEndian.AppendUint32(nil, n))
}

// nest returns an attribute of attributes.
func nest(number uint16, attributes ...[]byte) []byte {
	return encode(number|unix.NLA_F_NESTED, slices.Concat(attributes...))
}

// body returns the attributes of a message, behind struct nfgenmsg.
func body(m netlink.Message) []byte { return m.Data[min(4, len(m.Data)):] }

// next returns the first attribute in b, and what follows it. It reports false if there is none.
func next(b []byte) (number uint16, data, rest []byte, ok bool) {
	if len(b) < unix.NLA_HDRLEN {
		return 0, nil, b, false
	}
	length := int(binary.NativeEndian.Uint16(b))
	if length < unix.NLA_HDRLEN || length > len(b) {
		return 0, nil, b, false
	}
	// The highest two bits are flags.
	return binary.NativeEndian.Uint16(b[2:]) & 0x3fff, b[unix.NLA_HDRLEN:length], b[min((length+3)&^3, len(b)):], true
}

// attribute returns the data of the first attribute in b that has the number, nil if there is none.
// More numbers lead into it. Nothing is copied.
func attribute(b []byte, path ...uint16) []byte {
	for _, wanted := range path {
		number, data, rest, ok := next(b)
		for ok && number != wanted {
			number, data, rest, ok = next(rest)
		}
		b = data
	}
	return b
}

// list returns the data of all attributes in b.
func list(b []byte) (all [][]byte, err error) {
	for len(b) > 0 {
		_, data, rest, ok := next(b)
		if !ok {
			return nil, errShort
		}
		all, b = append(all, data), rest
	}
	return all, nil
}

// number returns the number that b is, 0 if b is nil.
func number(b []byte) (n uint64) {
	for _, digit := range b {
		n = n<<8 | uint64(digit)
	}
	return n
}

// text returns the text of an attribute in b, see attribute.
func text(b []byte, path ...uint16) string {
	s, _, _ := strings.Cut(string(attribute(b, path...)), "\x00")
	return s
}

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

// request returns a message to a subsystem; 0 has the beginning and the end of nftables'
// transactions.
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

func encode(number uint16, data []byte) []byte {
	b, _ := netlink.MarshalAttributes([]netlink.Attribute{{Type: number, Data: data}}) // fails beyond 64 KiB only
	return b
}

func encodeString(number uint16, text string) []byte { return encode(number, append([]byte(text), 0)) }

func encode32(number uint16, n uint32) []byte {
	return encode(number, binary.BigEndian.AppendUint32(nil, n))
}

func nest(number uint16, attributes ...[]byte) []byte {
	return encode(number|unix.NLA_F_NESTED, slices.Concat(attributes...))
}

// body returns the attributes of a message, behind struct nfgenmsg.
func body(m netlink.Message) []byte { return m.Data[min(4, len(m.Data)):] }

// next splits the first attribute off b. It reports false if there is none.
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

// attribute returns the data, not copied, of the first attribute in b with the number; more numbers
// lead into it. Nil: there is none.
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

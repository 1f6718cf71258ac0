package probe

import (
	"encoding/binary"
	"strconv"

	"golang.org/x/net/http2/hpack"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Frames of HTTP/2 (RFC 9113, section 6).
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	frameResetStream  = 0x3
	frameSettings     = 0x4
	framePushPromise  = 0x5
	frameGoAway       = 0x7
	frameContinuation = 0x9

	flagEndStream  = 0x1
	flagAck        = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20

	frameHeader = 9
	// maxFrame is the largest frame a peer may send that was told nothing else.
	maxFrame = 16384
	// maxGRPC bounds what is read of one gRPC answer, in bytes.
	maxGRPC = 64 << 10
	// maxMessage bounds a HealthCheckResponse, which takes 7 bytes with its prefix, and unknown fields.
	maxMessage = 1024
)

// servingBase is added to the serving status in [health.Outcome.Code], to keep it apart from the gRPC statuses 1 to 16.
const servingBase = 100

const serving = 1

// settingsAck is the frame that a server's settings are owed.
var settingsAck = []byte{0, 0, 0, frameSettings, flagAck, 0, 0, 0, 0}

// appendFrame appends the header of a frame with length bytes of payload.
func appendFrame(b []byte, length int, kind, flags byte, stream uint32) []byte {
	b = append(b, byte(length>>16), byte(length>>8), byte(length), kind, flags)
	return binary.BigEndian.AppendUint32(b, stream)
}

// appendField appends a header field as a literal that is never indexed, its name by its index in the static table of RFC 7541, or in full
// (index 0).
func appendField(b []byte, index byte, name, value string) []byte {
	if index < 15 {
		b = append(b, 0x10|index)
	} else {
		b = append(b, 0x1f, index-15)
	}
	if index == 0 {
		b = appendString(b, name)
	}
	return appendString(b, value)
}

// appendString appends an HPACK string without Huffman coding.
func appendString(b []byte, s string) []byte {
	if len(s) < 127 {
		b = append(b, byte(len(s)))
	} else {
		b = append(b, 127)
		b = binary.AppendUvarint(b, uint64(len(s)-127))
	}
	return append(b, s...)
}

// appendHealthCheck appends all that a client says for one call of grpc.health.v1.Health/Check on a connection of its own.
func appendHealthCheck(b []byte, job *health.Job) []byte {
	b = append(b, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"...)
	b = appendFrame(b, 6, frameSettings, 0, 0)
	b = append(b, 0, 2, 0, 0, 0, 0) // no server push

	at := len(b)
	b = appendFrame(b, 0, frameHeaders, flagEndHeaders, 1)
	b = append(b, 0x83, 0x86) // :method POST, :scheme http
	b = appendField(b, 4, ":path", "/grpc.health.v1.Health/Check")
	b = appendField(b, 1, ":authority", string(appendHost(nil, job)))
	b = appendField(b, 31, "content-type", "application/grpc")
	b = appendField(b, 58, "user-agent", "lameduck-health")
	b = appendField(b, 0, "te", "trailers")
	length := len(b) - at - frameHeader
	b[at], b[at+1], b[at+2] = byte(length>>16), byte(length>>8), byte(length)

	// The message: one field, number 1, the service as a string. An empty one is left out.
	var message []byte
	if s := job.Check.Service; s != "" {
		message = append(message, 0x0a)
		message = binary.AppendUvarint(message, uint64(len(s)))
		message = append(message, s...)
	}
	b = appendFrame(b, 5+len(message), frameData, flagEndStream, 1)
	b = append(b, 0) // not compressed
	b = binary.BigEndian.AppendUint32(b, uint32(len(message)))
	return append(b, message...)
}

// grpcAnswer reads the answer to appendHealthCheck as it comes, in pieces of any size. It keeps one frame at most.
type grpcAnswer struct {
	// owesAck says that the server's settings were read and not acknowledged yet. The caller resets it.
	owesAck bool
	// done says that outcome holds.
	done    bool
	outcome health.Outcome

	buf     []byte
	read    int
	settled bool // the server's settings came
	// inBlock says that a header block goes on in CONTINUATION frames, blockEnds that it is the last of the stream.
	inBlock, blockEnds bool
	decoder            *hpack.Decoder
	httpStatus, status int // status -1: not yet
	message            []byte
}

func newGRPCAnswer() *grpcAnswer {
	a := &grpcAnswer{status: -1}
	a.decoder = hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		switch f.Name {
		case ":status":
			a.httpStatus = number(f.Value)
		case "grpc-status":
			a.status = number(f.Value)
		}
	})
	a.decoder.SetMaxStringLength(maxFrame)
	return a
}

// number reads a status. What is none becomes 999, which is no good one.
func number(s string) int {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n > 999 {
		return 999
	}
	return int(n)
}

// feed takes in the next piece. An error says that this is no answer of a gRPC server.
func (a *grpcAnswer) feed(b []byte) error {
	a.read += len(b)
	a.buf = append(a.buf, b...)
	rest := a.buf
	for !a.done && len(rest) >= frameHeader {
		length := int(rest[0])<<16 | int(rest[1])<<8 | int(rest[2])
		if length > maxFrame || !a.settled && (rest[3] != frameSettings || rest[4]&flagAck != 0) {
			return errMalformed
		}
		if len(rest) < frameHeader+length {
			break
		}
		stream := binary.BigEndian.Uint32(rest[5:]) & (1<<31 - 1)
		if err := a.frame(rest[3], rest[4], stream, rest[frameHeader:frameHeader+length]); err != nil {
			return err
		}
		rest = rest[frameHeader+length:]
	}
	a.buf = append(a.buf[:0], rest...)
	if !a.done && a.read > maxGRPC {
		return errMalformed
	}
	return nil
}

func (a *grpcAnswer) frame(kind, flags byte, stream uint32, payload []byte) error {
	if a.inBlock && (kind != frameContinuation || stream != 1) {
		return errMalformed
	}
	switch kind {
	case frameSettings:
		if stream != 0 || len(payload)%6 != 0 {
			return errMalformed
		}
		a.settled = true
		a.owesAck = a.owesAck || flags&flagAck == 0
	case frameData:
		payload, ok := unpad(flags, payload)
		if !ok || stream != 1 || len(a.message)+len(payload) > maxMessage {
			return errMalformed
		}
		a.message = append(a.message, payload...)
		if flags&flagEndStream != 0 {
			a.end()
		}
	case frameHeaders:
		payload, ok := unpad(flags, payload)
		if !ok || stream != 1 {
			return errMalformed
		}
		if flags&flagPriority != 0 {
			if len(payload) < 5 {
				return errMalformed
			}
			payload = payload[5:]
		}
		a.blockEnds = flags&flagEndStream != 0
		return a.block(flags, payload)
	case frameContinuation:
		if !a.inBlock {
			return errMalformed
		}
		return a.block(flags, payload)
	case frameResetStream:
		if stream == 1 {
			a.judge(0)
		}
	case frameGoAway:
		// It may still answer what it took in: stream 1, or not.
		if len(payload) < 8 {
			return errMalformed
		}
		if binary.BigEndian.Uint32(payload)&(1<<31-1) < 1 {
			a.judge(0)
		}
	case framePushPromise:
		return errMalformed
	}
	return nil
}

// block takes in a part of a header block.
func (a *grpcAnswer) block(flags byte, part []byte) error {
	if _, err := a.decoder.Write(part); err != nil {
		return errMalformed
	}
	a.inBlock = flags&flagEndHeaders == 0
	if a.inBlock {
		return nil
	}
	if err := a.decoder.Close(); err != nil {
		return errMalformed
	}
	if a.blockEnds {
		a.end()
	}
	return nil
}

// end judges the whole answer.
func (a *grpcAnswer) end() {
	switch {
	case a.httpStatus != 200:
		a.judge(a.httpStatus)
	case a.status != 0:
		a.judge(max(a.status, 0))
	default:
		s, ok := servingStatus(a.message)
		switch {
		case !ok:
			a.judge(0)
		case s == serving:
			a.done, a.outcome = true, health.Outcome{Kind: health.Success}
		default:
			a.judge(servingBase + s)
		}
	}
}

func (a *grpcAnswer) judge(code int) {
	a.done, a.outcome = true, health.Outcome{Kind: health.HTTPFailure, Code: uint16(code)}
}

// unpad takes the padding off a frame.
func unpad(flags byte, b []byte) ([]byte, bool) {
	if flags&flagPadded == 0 {
		return b, true
	}
	if len(b) == 0 || int(b[0]) >= len(b) {
		return nil, false
	}
	return b[1 : len(b)-int(b[0])], true
}

// servingStatus reads a HealthCheckResponse with the prefix of gRPC. Fields it does not know are skipped.
func servingStatus(b []byte) (int, bool) {
	if len(b) < 5 || b[0] != 0 || int(binary.BigEndian.Uint32(b[1:])) != len(b)-5 {
		return 0, false
	}
	b = b[5:]
	status := uint64(0)
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if n <= 0 {
			return 0, false
		}
		b = b[n:]
		skip := uint64(0)
		switch tag & 7 {
		case 0:
			v, n := binary.Uvarint(b)
			if n <= 0 {
				return 0, false
			}
			if tag>>3 == 1 {
				status = v
			}
			skip = uint64(n)
		case 1:
			skip = 8
		case 2:
			v, n := binary.Uvarint(b)
			if n <= 0 {
				return 0, false
			}
			b, skip = b[n:], v
		case 5:
			skip = 4
		default:
			return 0, false
		}
		if skip > uint64(len(b)) {
			return 0, false
		}
		b = b[skip:]
	}
	return int(min(status, 99)), true
}

package probe

import (
	"bytes"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// pieces cuts data at places that cuts say.
func pieces(data, cuts []byte, feed func([]byte) bool) {
	for _, c := range cuts {
		n := min(int(c)+1, len(data))
		if n == 0 {
			return
		}
		if !feed(bytes.Clone(data[:n])) {
			return
		}
		data = data[n:]
	}
	if len(data) > 0 {
		feed(data)
	}
}

// However an answer is cut, it is judged alike, and what is read stays bounded.
func FuzzHTTPAnswer(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nA: b\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nConnection: Keep-Alive, Close\r\n\r\n",
		"HTTP/1.0 404 Not Found\n\nbody", "HTTP/2 200", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
	} {
		f.Add([]byte(s), []byte{3, 1, 4, 1, 5, 9, 2, 6})
	}
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		if len(data) > maxAnswer {
			t.Skip("beyond the bound the pieces count")
		}
		var whole, cut response
		wholeErr := whole.feed(data)
		var cutErr error
		pieces(data, cuts, func(b []byte) bool {
			cutErr = cut.feed(b)
			return cutErr == nil && cut.phase != ended
		})
		if (wholeErr == nil) != (cutErr == nil) && whole.status == cut.status {
			t.Fatalf("%v whole, %v cut", wholeErr, cutErr)
		}
		if wholeErr == nil && whole.status != cut.status {
			t.Fatalf("status %d whole, %d cut", whole.status, cut.status)
		}
		if whole.status != 0 && (whole.status < 100 || whole.status > 999) {
			t.Fatalf("status %d", whole.status)
		}
		if wholeErr == nil && cutErr == nil && (whole.phase == ended) != (cut.phase == ended) {
			t.Fatalf("phase %d whole, %d cut", whole.phase, cut.phase)
		}
	})
}

func FuzzGRPCAnswer(f *testing.F) {
	settings := "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	f.Add([]byte(settings+"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88"+"\x00\x00\x07\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x02\x08\x01"+
		"\x00\x00\x0e\x01\x05\x00\x00\x00\x01\x00\x0bgrpc-status\x010"), []byte{8, 9})
	f.Add([]byte(settings+"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x01"), []byte{1, 2, 3})
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), []byte{1})
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		whole, cut := newGRPCAnswer(), newGRPCAnswer()
		wholeErr := whole.feed(data)
		var cutErr error
		pieces(data, cuts, func(b []byte) bool {
			cutErr = cut.feed(b)
			if len(cut.buf) > frameHeader+maxFrame || len(cut.message) > maxMessage {
				t.Fatalf("%d bytes are kept", len(cut.buf))
			}
			return cutErr == nil && !cut.done
		})
		if len(data) > maxGRPC {
			return // beyond the bound the pieces count
		}
		if (wholeErr == nil) != (cutErr == nil) || whole.done != cut.done || whole.outcome != cut.outcome {
			t.Fatalf("%v %t %s whole, %v %t %s cut", wholeErr, whole.done, whole.outcome, cutErr, cut.done, cut.outcome)
		}
		if whole.done && whole.outcome.Kind != health.Success && whole.outcome.Kind != health.HTTPFailure {
			t.Fatal(whole.outcome)
		}
	})
}

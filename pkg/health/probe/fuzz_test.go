package probe

import (
	"bytes"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/lameduck-io/lameduck/pkg/health"
)

func FuzzAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
	f.Add([]byte("HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"))
	f.Add([]byte("HTTP/1.0 503 \r\n\r\n"))
	f.Add([]byte("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n"))
	f.Add([]byte("SSH-2.0-OpenSSH\r\n"))
	c := check(health.HTTP)
	f.Fuzz(func(t *testing.T, text []byte) {
		a := &answer{from: bytes.NewReader(text)}
		got := a.judge(&c)
		// However its bytes arrive, an answer says the same.
		if slow := (&answer{from: iotest.OneByteReader(bytes.NewReader(text))}).judge(&c); slow != got {
			t.Errorf("%v, and %v byte by byte", got, slow)
		}
		switch {
		case a.n > maxAnswer:
			t.Errorf("read %d bytes, at most %d may be", a.n, maxAnswer)
		case got.Kind == health.Success && (!bytes.HasPrefix(text, []byte("HTTP/")) || !c.Statuses.Has(int(got.Code))):
			t.Errorf("success: %v", got)
		}
	})
}

func FuzzServingStatus(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 2, 8, 1})
	f.Add([]byte{0, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 0, 6, 18, 2, 'o', 'k', 8, 2})
	f.Add([]byte{1, 0, 0, 0, 2, 8, 1}) // compressed
	f.Fuzz(func(t *testing.T, body []byte) {
		status, ok := servingStatus(body)
		if status < 0 || status > 99 || !ok && status != 0 {
			t.Errorf("status %d, %t", status, ok)
		}
		if ok && status == serving && !slices.Contains(body[5:], 8) {
			t.Errorf("serving, without a status")
		}
	})
}

package serve

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// An HTTP client opens a connection for a request that another connection then takes, and uses the
// new one later. Its age is no reason to refuse the first request on it: the API server does not
// repeat a webhook call, and a deletion whose calls all fail is carried out unasked.
func TestTheFirstRequestOfAnOldConnection(t *testing.T) {
	const most = 2 * time.Second
	secure, trust := certified(t)
	address, _ := start(t, Server{TLS: secure, ReadTime: most, Conns: 10,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.ReadAll(r.Body); err != nil {
				w.WriteHeader(http.StatusRequestTimeout)
			}
		})})
	for _, age := range []time.Duration{0, 2 * most, headerTime + most} {
		t.Run(age.String(), func(t *testing.T) {
			t.Parallel()
			conn, err := tls.Dial("tcp", address, trust)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			time.Sleep(age) // the age is the subject
			// A review is larger than what an HTTP client writes at once.
			for _, part := range []string{"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", "{}"} {
				if _, err := fmt.Fprint(conn, part); err != nil {
					t.Fatal(err)
				}
				time.Sleep(30 * time.Millisecond) // the pace of the client is the subject
			}
			_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			status := make([]byte, 12)
			if _, err := io.ReadFull(conn, status); err != nil || !strings.HasSuffix(string(status), "200") {
				t.Errorf("%q, %v", status, err)
			}
		})
	}
}

package sockets

import (
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// Without this a slow answer is taken for a pooled connection, or the reverse.
func TestQuietConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.73.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	const quiet = 50 * time.Millisecond
	pass := func(from, to net.Conn) {
		t.Helper()
		if _, err := io.WriteString(from, "x"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(to, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		do   func()
		want bool
	}{
		{"unused", func() {}, true},
		{"asked", func() { pass(client, server) }, false},
		{"answered", func() { pass(server, client) }, true},
		{"asked again", func() { pass(client, server) }, false},
		{"answered at once, and asked at once", func() {
			pass(server, client)
			pass(client, server)
			pass(server, client)
			pass(client, server)
		}, false},
		{"answered, and not read", func() {
			if _, err := server.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}, false},
		{"read", func() {
			if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}, true},
	} {
		tt.do()
		time.Sleep(4 * quiet) // the kernel's clock goes on: nothing follows that could be awaited
		all, err := List()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, s := range all {
			if s.Remote.String() == client.LocalAddr().String() {
				t.Errorf("%s: a connection that was accepted is listed", tt.name)
			}
			if s.Remote.String() == l.Addr().String() {
				found = true
				if got := s.Quiet(quiet); got != tt.want || s.Quiet(0) || s.Quiet(time.Hour) {
					t.Errorf("%s: quiet %t, %+v", tt.name, got, s)
				}
			}
		}
		if !found {
			t.Errorf("%s: no socket to %s", tt.name, l.Addr())
		}
	}
}

// What is not quiet any more must not be closed: there may be a request on it.
func TestCloseOnlyWhatIsQuiet(t *testing.T) {
	if os.Geteuid() != 0 {
		gatewaytest.Missing(t, "CAP_NET_ADMIN", os.ErrPermission)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	const quiet = 20 * time.Millisecond
	find := func() (s Socket) {
		t.Helper()
		all, err := List()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.Remote.String() == l.Addr().String() {
				return s
			}
		}
		t.Fatal("it is not listed")
		return s
	}
	answer := func() {
		t.Helper()
		for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
			if _, err := pair[0].Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(pair[1], make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	answer()
	var s Socket
	for end := time.Now().Add(5 * time.Second); !s.Quiet(quiet); s = find() {
		if time.Now().After(end) {
			t.Fatalf("it is not quiet: %+v", s)
		}
	}
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if closed, err := s.Close(quiet); closed || err != nil {
		t.Fatalf("a request is on it: closed %t, %v", closed, err)
	}
	answer()
	for end := time.Now().Add(5 * time.Second); ; {
		closed, err := s.Close(quiet)
		if err != nil || time.Now().After(end) {
			t.Fatalf("it was not closed: %v", err)
		}
		if closed {
			break
		}
	}
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("it is open")
	}
	if closed, err := s.Close(quiet); closed || err != nil {
		t.Errorf("the second time: closed %t, %v", closed, err)
	}
}

// An agent that is to close connections does not start where the kernel cannot: each reading would
// fail.
func TestCanClose(t *testing.T) {
	if err := CanClose(); err != nil {
		t.Error(err)
	}
}

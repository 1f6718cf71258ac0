package serve

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Strangers open as many connections as there may be, send one request behind the other, and read
// none of the answers: the server hangs in its writes. They connect again as soon as they are
// closed. A client that sends one request, from the same address, is answered all the same.
//
// The kernel's send buffer of a loopback connection is megabytes; over a network, to a peer that
// closes its window at once, it is about 64 KiB. narrow sets that.
func TestWhoReadsNoAnswersKeepsNobodyOut(t *testing.T) {
	for name, c := range map[string]struct {
		server Server
		config net.ListenConfig
	}{
		"operators": {Server{Conns: 100, ReadTime: 5 * time.Second, WriteTime: 30 * time.Second}, net.ListenConfig{}},
		"agents": {Server{Conns: 100, ReadTime: 10 * time.Second}, net.ListenConfig{ // as coordinator.ListenConfig
			Control: func(_, _ string, conn syscall.RawConn) error {
				return conn.Control(func(fd uintptr) {
					_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, 0x12, 5000)
				})
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := c.config.Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			c.server.Name, c.server.Listener = "x", narrow{l}
			c.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "ok") })
			go func() { done <- c.server.Task().Run(ctx) }()
			var dialed atomic.Int32
			requests := []byte(strings.Repeat("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 1000))
			for range c.server.Conns {
				go func() {
					for ctx.Err() == nil {
						conn, err := net.Dial("tcp", l.Addr().String())
						if err != nil {
							return
						}
						dialed.Add(1)
						_ = conn.(*net.TCPConn).SetReadBuffer(4096)
						for {
							_ = conn.SetWriteDeadline(time.Now().Add(60 * time.Second))
							if _, err := conn.Write(requests); err != nil {
								break
							}
						}
						conn.Close()
					}
				}()
			}
			for end := time.Now().Add(30 * time.Second); int(dialed.Load()) < c.server.Conns; time.Sleep(
				time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%d connections, want %d", dialed.Load(), c.server.Conns)
				}
			}
			failed, tries := 0, 0
			// as the kubelet
			client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
			for range 8 {
				tries++
				response, err := client.Get("http://" + l.Addr().String() + "/livez")
				if err != nil {
					failed++
				} else {
					response.Body.Close()
				}
				time.Sleep(500 * time.Millisecond) // as a prober does
			}
			if failed > tries/2 {
				t.Errorf("%d of %d probes fail", failed, tries)
			}
			cancel()
			<-done
		})
	}
}

type narrow struct{ net.Listener }

func (n narrow) Accept() (net.Conn, error) {
	conn, err := n.Listener.Accept()
	if err == nil {
		_ = conn.(*net.TCPConn).SetWriteBuffer(32 << 10)
	}
	return conn, err
}

// Strangers of one address send their requests slowly, or their handler takes its time. One of
// another address is answered, and what is kept is not closed, from whatever address it comes.
func TestTheSourceWithTheMostMakesRoom(t *testing.T) {
	const most = 10
	release := make(chan struct{})
	var arrived sync.WaitGroup
	arrived.Add(3)
	hold := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrived.Done()
		<-release
	})
	routes := http.NewServeMux()
	routes.Handle("/kept", KeepConn(hold))
	routes.Handle("/unknown", hold)
	routes.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "ok") })
	address, _ := start(t, Server{Conns: most, Grace: time.Second, Handler: routes})
	open := func(from, text string) net.Conn {
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprint(conn, text)
		return conn
	}
	request := func(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n" }
	closed := func(conn net.Conn) bool {
		_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := conn.Read(make([]byte, 1))
		return !errors.Is(err, os.ErrDeadlineExceeded)
	}
	kept := []net.Conn{open("127.0.0.2", request("/kept")), open("127.0.0.3", request("/kept"))}
	other := open("127.0.0.4", request("/unknown"))
	arrived.Wait()
	var slow []net.Conn
	for range 3 * most {
		slow = append(slow, open("127.0.0.2", "GET / HT"))
	}
	for range 5 {
		one := open("127.0.0.5", request("/"))
		if _, err := http.ReadResponse(bufio.NewReader(one), nil); err != nil {
			t.Errorf("another source: %v", err)
		}
		one.Close()
	}
	for i, conn := range append(kept, other) {
		if closed(conn) {
			t.Errorf("connection %d was closed", i)
		}
	}
	if !closed(slow[0]) {
		t.Error("no slow one was closed")
	}
	close(release)
}

// A handler that panics may have left what it changed half done: the process must not serve on from
// that, and the log must say where it was.
func TestAPanicEndsTheServer(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	stopped := false
	s := Server{
		Name: "x", Listener: listen(t), Delay: time.Hour, Grace: 5 * time.Second, Stop: func() { stopped = true },
		Log: slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(b)
		}), nil)),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/abort" {
				panic(http.ErrAbortHandler)
			}
			panicHere()
		}),
	}
	done := make(chan error, 1)
	go func() { done <- s.Task().Run(t.Context()) }()
	if _, err := http.Get("http://" + s.Listener.Addr().String() + "/abort"); err == nil {
		t.Error("an aborted request is answered")
	}
	select {
	case err := <-done:
		t.Fatalf("an aborted request ends it: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if _, err := http.Get("http://" + s.Listener.Addr().String()); err == nil {
		t.Error("it is answered")
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "a handler panicked: here") {
		t.Errorf("ends with %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !stopped || !strings.Contains(log.String(), "panicHere") || !strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("stopped %t, log %s", stopped, log.String())
	}
}

func panicHere() { panic("here") }

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

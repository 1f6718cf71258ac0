package serve

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// certified returns a configuration for servers, and one for clients that trust it.
func certified(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	roots := s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	return &tls.Config{Certificates: s.TLS.Certificates}, &tls.Config{RootCAs: roots, ServerName: "example.com"}
}

// start runs a server and returns its address, and what ends it and waits for that.
func start(t *testing.T, s Server) (address string, stop func() error) {
	t.Helper()
	s.Name, s.Listener = "x", listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Task().Run(ctx) }()
	var once sync.Once
	var err error
	stop = func() error {
		once.Do(func() {
			cancel()
			err = <-done
		})
		return err
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return s.Listener.Addr().String(), stop
}

// A replica gets its signal when Services still route to it. Were its port closed at once, the API
// server's calls would be refused, and deletions go on without waiting. Clients of both kinds ask
// all the time here, by TLS, and none may fail before the time that was promised.
func TestServerAnswersForSomeTimeAfterItsEndBegan(t *testing.T) {
	const delay = 2 * time.Second
	secure, trust := certified(t)
	var began atomic.Int64
	address, stop := start(t, Server{
		TLS: secure, Delay: delay, Grace: 5 * time.Second, Stop: func() { began.Store(time.Now().UnixNano()) },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }),
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var clients sync.WaitGroup
	var answered, after, closing atomic.Int32
	for _, keep := range []bool{true, true, false, false} {
		clients.Go(func() {
			client := &http.Client{Transport: &http.Transport{TLSClientConfig: trust.Clone(), DisableKeepAlives: !keep}}
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				asked := time.Now()
				// A POST, as a review is one: net/http does not repeat it.
				response, err := client.Post("https://"+address, "application/json", strings.NewReader("{}"))
				began := began.Load()
				ending := began > 0 && asked.UnixNano() > began
				if err != nil {
					// What counts is when it failed: on a busy machine a request takes long.
					if since := time.Duration(time.Now().UnixNano() - began); began == 0 || since < delay {
						t.Errorf("keep %t, failed %s after its end began (%t): %v", keep, since, began > 0, err)
					}
					return
				}
				text, err := io.ReadAll(response.Body)
				response.Body.Close()
				if err != nil || string(text) != "ok" {
					t.Errorf("%q, %v", text, err)
				}
				answered.Add(1)
				if ending {
					after.Add(1)
					if response.Close {
						closing.Add(1)
					}
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for end := time.Now().Add(10 * time.Second); answered.Load() < 20; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d requests were answered", answered.Load())
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	cancel()
	clients.Wait()
	if after.Load() < 4 || closing.Load() != after.Load() {
		t.Errorf("%d requests were answered after its end began, %d of them closed their connection", after.Load(),
			closing.Load())
	}
	if _, err := net.DialTimeout("tcp", address, time.Second); err == nil {
		t.Error("it still listens")
	}
}

// A body that comes slowly is cut at its time, whether the handler reads it or not; and a request
// that is held for longer than that is not.
func TestServerCutsSlowBodies(t *testing.T) {
	const most = 300 * time.Millisecond
	secure, trust := certified(t)
	read, gone := make(chan error, 1), make(chan error, 1)
	address, _ := start(t, Server{
		TLS: secure, ReadTime: most,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/unread" {
				return
			}
			_, err := io.ReadAll(r.Body)
			if r.URL.Path == "/read" {
				read <- err
				return
			}
			select {
			case <-r.Context().Done():
				gone <- r.Context().Err()
			case <-time.After(2 * most):
				gone <- nil
			}
			fmt.Fprint(w, "held")
		}),
	})
	// slowly announces a body of a hundred bytes and sends some, and returns when the server has
	// closed the connection.
	slowly := func(path string) time.Duration {
		conn, err := tls.Dial("tcp", address, trust)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		began := time.Now()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", path)
		_ = conn.SetReadDeadline(began.Add(30 * time.Second))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection stays", path)
		}
		return time.Since(began)
	}
	if took := slowly("/read"); took < most || took > 20*time.Second {
		t.Errorf("cut after %s", took)
	}
	if err := <-read; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the handler sees %v", err)
	}
	if took := slowly("/unread"); took > 20*time.Second {
		t.Errorf("unread: cut after %s", took)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: trust}}
	defer client.CloseIdleConnections()
	for range 2 { // the second on the same connection
		response, err := client.Post("https://"+address+"/hold", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if err := <-gone; err != nil || string(text) != "held" {
			t.Errorf("a held request: %q, %v", text, err)
		}
	}
}

// A client that opens connections and sends nothing must not keep out clients that send requests,
// nor interrupt answers.
func TestServerMakesRoom(t *testing.T) {
	const most = 5
	secure, trust := certified(t)
	release := make(chan struct{})
	var held sync.WaitGroup
	held.Add(2)
	address, _ := start(t, Server{
		TLS: secure, Conns: most, Grace: 5 * time.Second,
		Handler: KeepConn(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/hold" {
				held.Done()
				<-release
			}
			fmt.Fprint(w, "ok")
		})),
	})
	ask := func(path string) error {
		conn, err := tls.Dial("tcp", address, trust)
		if err != nil {
			return err
		}
		defer conn.Close()
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return err
		}
		return response.Body.Close()
	}
	var waits sync.WaitGroup
	for range 2 {
		waits.Go(func() {
			if err := ask("/hold"); err != nil {
				t.Errorf("a request that was being answered: %v", err)
			}
		})
	}
	held.Wait()
	var silent []net.Conn
	for range 20 {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		silent = append(silent, conn)
	}
	if err := ask("/"); err != nil {
		t.Errorf("a client that sends a request: %v", err)
	}
	closed := 0
	for _, conn := range silent {
		_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			closed++
		}
	}
	if want := len(silent) + 1 - most; closed != want {
		t.Errorf("%d silent connections were closed, want %d", closed, want)
	}
	close(release)
	waits.Wait()
}

// A connection that is kept takes no other one's place: more agents may have a stream than there
// may be connections of clients that are not known. Once its request is answered, and not before,
// it counts again.
func TestKeptConnectionsAreNotCounted(t *testing.T) {
	const kept = 5
	release, arrived := make(chan struct{}), make(chan struct{})
	address, _ := start(t, Server{
		Conns: 1, Grace: 5 * time.Second,
		Handler: KeepConn(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/hold" {
				arrived <- struct{}{}
				<-release
			}
			fmt.Fprint(w, "ok")
		})),
	})
	ask := func(path string) net.Conn {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
		return conn
	}
	answered := func(conn net.Conn) {
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(response.Body); string(text) != "ok" {
			t.Fatalf("answer %q, %v", text, err)
		}
	}
	var held []net.Conn
	for range kept {
		held = append(held, ask("/hold"))
		<-arrived // before that it counts
	}
	answered(ask("/"))
	close(release)
	for _, conn := range held {
		answered(conn)
	}
	ended := make(chan error, kept)
	for _, conn := range held {
		go func() {
			_, err := conn.Read(make([]byte, 1))
			ended <- err
		}()
	}
	for range kept - 1 {
		if err := <-ended; errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("an answered connection is not counted")
		}
	}
}

// What others need to the end must not end before them: a review would be answered from a cache
// that has stopped.
func TestAllEndsTheLastAfterTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		var order []string
		task := func(name string, takes time.Duration, last bool) Task {
			return Task{Name: name, Last: last, Run: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(takes)
				mu.Lock()
				defer mu.Unlock()
				order = append(order, name)
				return nil
			}}
		}
		time.AfterFunc(10*time.Millisecond, cancel)
		if err := All(ctx, task("cache", 0, true), task("server", 50*time.Millisecond, false)); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(order, " "); got != "server cache" {
			t.Errorf("ended in the order %q", got)
		}
		broken := errors.New("broken")
		cache := Task{Name: "cache", Last: true, Run: func(context.Context) error { return broken }}
		err := All(t.Context(), task("server", 0, false), cache)
		if !errors.Is(err, broken) {
			t.Errorf("%v", err)
		}
	})
}

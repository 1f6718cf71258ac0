package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// until runs until its context is done, and then takes some time.
func until(name string, ended *[]string, mu *sync.Mutex) Task {
	return Task{Name: name, Run: func(ctx context.Context) error {
		<-ctx.Done()
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		*ended = append(*ended, name)
		return nil
	}}
}

func TestAll(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		task func(ctx context.Context) error
		want string
	}{
		"a task fails": {func(context.Context) error { time.Sleep(time.Second); return broken },
			"odd: broken"},
		"a task ends by itself":   {func(context.Context) error { return nil }, "odd ended"},
		"a task fails at its end": {func(ctx context.Context) error { <-ctx.Done(); return broken }, ""},
		"a task is cancelled inside": {func(context.Context) error {
			return fmt.Errorf("read: %w", context.DeadlineExceeded)
		}, "odd: read: context deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(time.Minute, cancel)
				var mu sync.Mutex
				var ended []string
				err := All(ctx, until("one", &ended, &mu), Task{Name: "odd", Run: c.task}, until("two", &ended, &mu))
				if c.want == "" && err != nil || c.want != "" && (err == nil || err.Error() != c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				if len(ended) != 2 {
					t.Errorf("only %q have ended when All returns", ended)
				}
			})
		})
	}
}

// An error that wraps Canceled is an ordinary error if the process was not asked to end.
func TestAllReportsATaskThatSaysCanceled(t *testing.T) {
	err := All(t.Context(), Task{Name: "odd", Run: func(context.Context) error {
		return fmt.Errorf("dial: %w", context.Canceled)
	}})
	if err == nil || err.Error() != "odd: dial: context canceled" {
		t.Errorf("%v", err)
	}
}

// Without this, every rollout ends with exit code 1.
func TestAllEndsWellOnASignal(t *testing.T) {
	ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGUSR1)
	defer stop()
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := All(ctx, Task{Name: "one", Run: func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	}}); err != nil {
		t.Errorf("%v", err)
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestHTTPAnswersWhatRunsBeforeItEnds(t *testing.T) {
	l := listen(t)
	held, stopped := make(chan struct{}), make(chan struct{})
	var once sync.Once
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		once.Do(func() { close(held) })
		select {
		case <-stopped:
			fmt.Fprint(w, "stopping")
		case <-r.Context().Done():
			t.Error("the request was cut")
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Server{Name: "x", Listener: l, Handler: handler, Grace: 10 * time.Second, Stop: func() {
			close(stopped)
		}}.Task().Run(ctx)
	}()
	body := make(chan string, 1)
	go func() {
		response, err := http.Get("http://" + l.Addr().String())
		if err != nil {
			body <- err.Error()
			return
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		body <- string(text)
	}()
	<-held
	cancel()
	if got := <-body; got != "stopping" {
		t.Errorf("answer %q", got)
	}
	if err := <-done; err != nil {
		t.Errorf("%v", err)
	}
	if _, err := net.DialTimeout("tcp", l.Addr().String(), time.Second); err == nil {
		t.Error("it still listens")
	}
}

func TestHTTPCutsWhatDoesNotEnd(t *testing.T) {
	l := listen(t)
	held := make(chan struct{})
	handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(held)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Server{Name: "x", Listener: l, Handler: handler, Grace: 50 * time.Millisecond}.Task().Run(ctx)
	}()
	failed := make(chan error, 1)
	go func() {
		_, err := http.Get("http://" + l.Addr().String())
		failed <- err
	}()
	<-held
	cancel()
	if err := <-done; err != nil {
		t.Errorf("%v", err)
	}
	if err := <-failed; err == nil {
		t.Error("the request was answered")
	}
}

func TestHTTPFailsWithItsListener(t *testing.T) {
	l := listen(t)
	l.Close()
	err := Server{Name: "x", Listener: l, Handler: http.NotFoundHandler(), Grace: time.Second}.Task().Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("%v", err)
	}
}

// The API server and the agents count connections: each request is one, by HTTP/1.1, whatever the
// other side offers.
func TestHTTPSpeaksHTTP1OverTLS(t *testing.T) {
	certified := httptest.NewUnstartedServer(nil)
	certified.StartTLS()
	defer certified.Close()
	config := &tls.Config{Certificates: certified.TLS.Certificates, NextProtos: []string{"h2"}}
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto) })
	go func() {
		done <- Server{Name: "x", Listener: l, TLS: config, Handler: handler, Grace: time.Second}.Task().Run(ctx)
	}()
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true,
	}}
	response, err := client.Get("https://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(response.Body)
	response.Body.Close()
	if string(text) != "HTTP/1.1" {
		t.Errorf("speaks %s", text)
	}
	client.CloseIdleConnections()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(config.NextProtos) != 1 || config.NextProtos[0] != "h2" {
		t.Error("the caller's configuration was changed")
	}
}

// Command app is the application behind the gateways of the end-to-end tests and the demo. It
// answers every path after a fixed time, with its name in the header Pod. By default it is the
// worst case of an application: SIGTERM ends it immediately, with requests in flight.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

var errUsage = errors.New("usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	hostname, _ := os.Hostname()
	switch err := run(ctx, os.Args[1:], hostname, os.Stderr); {
	case errors.Is(err, flag.ErrHelp): // and help, usage too, is told already
	case errors.Is(err, errUsage):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "app:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run serves until ctx ends. With --on-term=exit it then returns without looking at what is in
// flight.
func run(ctx context.Context, args []string, hostname string, stderr io.Writer) error {
	addr, work, startDelay, graceful := "0.0.0.0:8080", 5*time.Millisecond, time.Duration(0), false
	fs := flag.NewFlagSet("app", flag.ContinueOnError)
	fs.SetOutput(stderr)
	name := fs.String("name", hostname, "`name` of the pod, sent in the header Pod")
	fs.Func("addr", "`host:port` to listen on (default 0.0.0.0:8080)", func(s string) error {
		addr = s
		_, err := net.ResolveTCPAddr("tcp", s)
		return err
	})
	fs.Func("work", "`duration` of a request (default 5ms)", func(s string) error { return parse(s, &work) })
	ask := time.Second
	fs.Func("closing", "`duration` for which graceful asks clients to close (default 1s)", func(s string) error {
		return parse(s, &ask)
	})
	fs.Func("start-delay", "`duration` of the start, before it listens (default 0s)", func(s string) error {
		return parse(s, &startDelay)
	})
	fs.Func("on-term", "`exit` at once on SIGTERM (default), or graceful: ask clients to close, and finish what "+
		"is in flight, 25s at most", func(s string) error {
		if graceful = s == "graceful"; !graceful && s != "exit" {
			return errors.New("want exit or graceful")
		}
		return nil
	})
	hog := fs.Bool("hog", false, "let a request for /hog take all the memory there is")
	if err := fs.Parse(args); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if fs.NArg() > 0 {
		fmt.Fprintf(stderr, "unexpected argument %q\n", fs.Arg(0))
		return errUsage
	}
	select {
	case <-time.After(startDelay):
	case <-ctx.Done():
		return nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	slog.New(slog.NewTextHandler(stderr, nil)).Info("listening", "addr", l.Addr(), "pod", *name)
	var closing atomic.Bool
	srv := &http.Server{ReadHeaderTimeout: 10 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/readyz" {
				time.Sleep(work)
			}
			if *hog && r.URL.Path == "/hog" {
				take()
			}
			w.Header().Set("Pod", *name)
			if closing.Load() {
				w.Header().Set("Connection", "close")
			}
			io.WriteString(w, "ok\n") // the same from every pod: clients compare
		})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	if !graceful {
		return nil
	}
	// Shutdown closes idle connections, and a request that is on its way on one is lost: clients
	// have to be told first.
	closing.Store(true)
	time.Sleep(ask)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 25*time.Second)
	defer cancel()
	return srv.Shutdown(ctx)
}

// take takes memory until the kernel ends the process.
func take() {
	for all := [][]byte{}; ; {
		more := make([]byte, 1<<20)
		for i := range more {
			more[i] = 1 // only what is written to is taken
		}
		all = append(all, more)
		runtime.KeepAlive(all)
	}
}

func parse(s string, d *time.Duration) (err error) {
	if *d, err = time.ParseDuration(s); err == nil && *d < 0 {
		err = errors.New("want 0 or above")
	}
	return err
}

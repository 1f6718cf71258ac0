package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

const (
	// headerTime is how long a TLS handshake, and then a request's header, may take on a server
	// without Conns.
	headerTime = 5 * time.Second
	// idleTime is how long an unused connection is kept. It is longer than the 90 s of the API
	// server. Otherwise the API server could send a review on a connection that is just being
	// closed, and it does not repeat reviews.
	idleTime = 2 * time.Minute
	// headerBytes bounds a request's header.
	headerBytes = 64 << 10
)

// Server is an HTTP/1.1 server with limits, as a task. Name, Listener and Handler are required.
type Server struct {
	Name     string
	Listener net.Listener
	// TLS is nil for plain HTTP.
	TLS     *tls.Config
	Handler http.Handler
	// Conns bounds the connections, not counting those that a handler keeps ([KeepConn]). When
	// there are too many, the server closes one of the source address that has the most: the one
	// without a new request for longest, whether or not that is answered. With this bound, a new
	// connection may be without a request for as long as any other, because HTTP clients open some
	// before they use them. 0: no bound.
	Conns int
	// ReadTime is how long after its header a request's body may take to arrive, read or not; then
	// reads fail with os.ErrDeadlineExceeded and the connection is closed. Unlike
	// http.Server.ReadTimeout it does not run from the start of the connection, nor after the body
	// was read. 0: no bound.
	ReadTime time.Duration
	// WriteTime is how long an answer may take, from the end of its request's header. 0: no bound.
	WriteTime time.Duration
	// Stop is called when the task is to end, so that requests which wait can be answered. May be
	// nil.
	Stop func()
	// Delay is how long after Stop the server still accepts connections and requests, because
	// clients do not know yet that it is ending. Each answer closes its connection.
	Delay time.Duration
	// Keep reports whether connections may stay open between requests. While it is false, unused
	// ones are closed, so that clients connect to another server. It is called every [keepEvery].
	// Nil: always.
	Keep func() bool
	// Grace is how long running requests may take after Delay, before their connections are closed.
	Grace time.Duration
	// Log gets a line about too many connections and, at debug, the messages of net/http. May be
	// nil.
	Log *slog.Logger
}

// keepEvery is how often Keep is called.
const keepEvery = 250 * time.Millisecond

// Task returns the server as a task. After its context is done, it ends when Delay is over and then
// the last request has ended or Grace is over. A handler that panics ends it without Delay and with
// an error, because the handler may have left a change half done.
func (s Server) Task() Task {
	return Task{Name: s.Name, Run: s.run}
}

func (s Server) run(ctx context.Context) error {
	var ending atomic.Bool
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	panicked := make(chan error, 1)
	// Requests outlive ctx: a deletion that waits must be answered, not dropped.
	server := &http.Server{
		Handler:           s.handler(&ending, panicked, log),
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       idleTime,
		WriteTimeout:      s.WriteTime,
		MaxHeaderBytes:    headerBytes,
		// At debug level, because any client can cause a line with each connection.
		ErrorLog: slog.NewLogLogger(log.With("server", s.Name).Handler(), slog.LevelDebug),
	}
	listener := s.Listener
	if s.Conns > 0 {
		server.ConnContext, server.ConnState, server.ReadHeaderTimeout = connContext, connState, idleTime
		listener = &limitedListener{Listener: listener, limiter: newConnLimiter(s.Conns),
			log: log.With("server", s.Name), said: rate.Sometimes{Interval: limitedEvery}}
	}
	if s.TLS != nil {
		config := s.TLS.Clone()
		config.NextProtos = []string{"http/1.1"}
		listener = tls.NewListener(listener, config)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	keep := time.NewTicker(keepEvery)
	defer keep.Stop()
	var broken error
	delay := s.Delay
	for running := true; running; {
		select {
		case err := <-served:
			return err
		case <-keep.C:
			if s.Keep != nil {
				server.SetKeepAlivesEnabled(s.Keep())
			}
		case broken = <-panicked:
			delay, running = 0, false
		case <-ctx.Done():
			running = false
		}
	}
	ending.Store(true)
	if s.Stop != nil {
		s.Stop()
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case err := <-served:
		return err
	case <-timer.C:
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.Grace)
	defer cancel()
	if err := server.Shutdown(last); err != nil {
		_ = server.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return broken
}

// handler wraps Handler: it applies ReadTime, asks to close each connection while ending is true,
// and sends a panic of Handler to panicked.
func (s Server) handler(ending *atomic.Bool, panicked chan<- error, log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			// net/http would log the panic at debug level and continue to serve.
			v := recover()
			if v == nil {
				return
			}
			if v != http.ErrAbortHandler { //nolint:errorlint // what net/http compares, too
				log.Error("handler panicked: this process ends", "server", s.Name, "panic", fmt.Sprint(v),
					"stack", string(debug.Stack()))
				select {
				case panicked <- fmt.Errorf("a handler panicked: %v", v):
				default:
				}
			}
			panic(http.ErrAbortHandler) // the caller gets no half of an answer
		}()
		if ending.Load() {
			w.Header().Set("Connection", "close")
		}
		if conn, ok := r.Context().Value(connKey{}).(*limitedConn); ok {
			conn.listener.wait(conn)
		}
		if s.ReadTime > 0 && r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(s.ReadTime))
		}
		s.Handler.ServeHTTP(w, r)
	})
}

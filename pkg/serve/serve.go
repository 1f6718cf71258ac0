// Package serve runs the long-lived parts of a process side by side.
package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"
)

// Task is a part that runs until its context is done, and then returns nil. Any other return ends the whole process.
type Task struct {
	Name string
	Run  func(ctx context.Context) error
}

// All runs the tasks until ctx is done or one of them returns, then stops the others and waits for them. It returns the error of
// the task that ended it, naming it; what tasks return after ctx is done is not looked at.
func All(ctx context.Context, tasks ...Task) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var first error
	var ended sync.Once
	var wg sync.WaitGroup
	for _, t := range tasks {
		wg.Go(func() {
			err := t.Run(ctx)
			ended.Do(func() {
				switch {
				case ctx.Err() != nil:
				case err != nil:
					first = fmt.Errorf("%s: %w", t.Name, err)
				default:
					first = fmt.Errorf("%s ended", t.Name)
				}
				cancel()
			})
		})
	}
	wg.Wait()
	return first
}

// HTTP returns a task that serves handler on listener, by HTTP/1.1, and over TLS if config is not nil. When its context is done it
// calls stop, if that is not nil, so that requests which wait can be answered, stops listening, and gives the requests that
// run grace to end before it cuts them.
func HTTP(name string, listener net.Listener, config *tls.Config, handler http.Handler, grace time.Duration, stop func()) Task {
	return Task{name, func(ctx context.Context) error {
		// Requests outlive ctx: a deletion that waits must be answered, not dropped.
		server := &http.Server{
			Handler:           handler,
			ReadHeaderTimeout: 5 * time.Second,
			IdleTimeout:       2 * time.Minute,
			MaxHeaderBytes:    64 << 10,
		}
		if config != nil {
			config = config.Clone()
			config.NextProtos = []string{"http/1.1"}
			listener = tls.NewListener(listener, config)
		}
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		select {
		case err := <-served:
			return err
		case <-ctx.Done():
		}
		if stop != nil {
			stop()
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		if err := server.Shutdown(last); err != nil {
			_ = server.Close()
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}}
}

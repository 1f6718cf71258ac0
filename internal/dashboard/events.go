package dashboard

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

const (
	// viewEvery is how often a view is made for those who follow, at most. One that took long is
	// rested from for restFactor times as long.
	viewEvery  = 250 * time.Millisecond
	restFactor = 20
	// heartbeatEvery is how often a reader hears something at least.
	heartbeatEvery = 2 * time.Second
	// maxReaders bounds those who follow.
	maxReaders = 64
)

// feed makes views for those who follow, one for all.
type feed struct {
	make func() api.View
	// joined wakes run for the first reader.
	joined chan struct{}
	ended  chan struct{}
	once   sync.Once

	mu      sync.Mutex
	readers map[*reader]struct{}
	// last is the newest view, encoded, and same what of it is compared.
	last, same []byte
}

// reader is one who follows. A view that he has not taken when the next one comes is replaced by
// it.
type reader struct {
	woken chan struct{}
	view  []byte // guarded by the feed's mutex
}

func newFeed(make func() api.View) *feed {
	return &feed{make: make, joined: newSignal(), ended: newSignal(), readers: map[*reader]struct{}{}}
}

func newSignal() chan struct{} { return make(chan struct{}, 1) }

func (f *feed) stop() { f.once.Do(func() { close(f.ended) }) }

func (f *feed) run(ctx context.Context) error {
	defer f.stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.ended:
			<-ctx.Done()
			return nil
		case <-timer.C:
		case <-f.joined:
		}
		if f.count() == 0 {
			continue // until one joins
		}
		began := time.Now()
		f.publish()
		timer.Reset(max(viewEvery, restFactor*time.Since(began)))
	}
}

func (f *feed) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.readers)
}

// publish makes a view and gives it to all, if it says anything new, and to those who have none.
func (f *feed) publish() {
	v := f.make()
	// These types can always be encoded.
	encoded, _ := json.Marshal(v)
	v.At = time.Time{}
	same, _ := json.Marshal(v)
	f.mu.Lock()
	defer f.mu.Unlock()
	news := !bytes.Equal(same, f.same)
	f.last, f.same = encoded, same
	if !news {
		return
	}
	for r := range f.readers {
		r.view = encoded
		r.wake()
	}
}

func (r *reader) wake() {
	select {
	case r.woken <- struct{}{}:
	default:
	}
}

// join returns a reader, who gets a view as soon as there is one. Nil: there are too many.
func (f *feed) join() *reader {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.readers) >= maxReaders {
		return nil
	}
	if len(f.readers) == 0 {
		f.same = nil // what is known is old
		select {
		case f.joined <- struct{}{}:
		default:
		}
	}
	r := &reader{woken: newSignal()}
	if f.same != nil {
		r.view = f.last
		r.wake()
	}
	f.readers[r] = struct{}{}
	return r
}

func (f *feed) leave(r *reader) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.readers, r)
}

// take returns the view that r has not had. Nil: there is none.
func (f *feed) take(r *reader) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	view := r.view
	r.view = nil
	return view
}

// events serves one who follows, until he goes away, reads nothing for [writeTimeout], or the
// replica stops.
func (d *Dashboard) events(w http.ResponseWriter, r *http.Request) (any, error) {
	if r.Method == http.MethodHead {
		return nil, refusal{http.StatusMethodNotAllowed, "a stream of events is read with GET"}
	}
	select {
	case <-d.feed.ended:
		return nil, refusal{http.StatusServiceUnavailable, "this replica is shutting down"}
	default:
	}
	follower := d.feed.join()
	if follower == nil {
		return nil, refusal{http.StatusServiceUnavailable,
			fmt.Sprintf("%d readers follow this replica already, as many as may", maxReaders)}
	}
	defer d.feed.leave(follower)
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(event string, data []byte) error {
		_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, data); err != nil {
			return err
		}
		return control.Flush()
	}
	alive := time.NewTicker(heartbeatEvery)
	defer alive.Stop()
	for {
		select {
		case <-follower.woken:
			if view := d.feed.take(follower); view != nil {
				if send("view", view) != nil {
					return nil, errWritten
				}
				alive.Reset(heartbeatEvery)
			}
		case <-alive.C:
			at, _ := json.Marshal(api.Heartbeat{At: time.Now()})
			if send("alive", at) != nil {
				return nil, errWritten
			}
		case <-r.Context().Done():
			return nil, errWritten
		case <-d.feed.ended:
			return nil, errWritten
		}
	}
}

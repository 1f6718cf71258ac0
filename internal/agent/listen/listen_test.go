package listen

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// agentBeside is a server that says its name, at an address that others may have.
type agentBeside struct {
	stop context.CancelFunc
	done chan error
}

func startBeside(t *testing.T, name, address string, shared bool, ready func() bool) agentBeside {
	t.Helper()
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })
	b := Address{Address: address, Shared: shared, Ready: ready, Log: slog.New(slog.DiscardHandler)}
	task, err := b.Task(serve.Server{Name: name, Handler: handler, Grace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	a := agentBeside{cancel, make(chan error, 1)}
	go func() { a.done <- task.Run(ctx) }()
	t.Cleanup(func() { a.end(t) })
	return a
}

// end stops it as SIGTERM does. It may be called again.
func (a agentBeside) end(t *testing.T) {
	t.Helper()
	a.stop()
	if err := <-a.done; err != nil {
		t.Error(err)
	}
	a.done <- nil
}

// hook asks an address once, on a connection of its own.
func hook(address string) (string, error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	response, err := client.Get("http://" + address)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

func answeredBy(t *testing.T, address, want string) {
	t.Helper()
	agenttest.Until(t, want+" answers", func() bool { got, err := hook(address); return err == nil && got == want })
}

// answersFor sends requests without a pause for so long, and checks that one of by answers each.
func answersFor(t *testing.T, address string, long time.Duration, by ...string) {
	t.Helper()
	for end := time.Now().Add(long); time.Now().Before(end); {
		if got, err := hook(address); err != nil || !slices.Contains(by, got) {
			t.Fatalf("%q answers, %v: want one of %q", got, err, by)
		}
	}
}

// While agents replace one another, ten times, a client sends requests without a pause, and an
// agent answers each: first the old one alone, then either, then the new one alone. What may be
// lost is what is in the queue of the old one at the very moment in which it closes that: one
// connection of each of the four who ask.
func TestAgentsShareTheAddressOfHooks(t *testing.T) {
	address := planes.FreeAddress(t)
	old := startBeside(t, "0", address, true, func() bool { return true })
	answeredBy(t, address, "0")
	const callers, times = 4, 10
	stop := make(chan struct{})
	var asked, failed, closing, failedAtClosing atomic.Int64
	var running sync.WaitGroup
	for range callers {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				before := closing.Load()
				if _, err := hook(address); err != nil {
					if closing.Load() != before || before%2 == 1 {
						failedAtClosing.Add(1)
					} else {
						failed.Add(1)
						t.Error(err)
					}
				}
				asked.Add(1)
			}
		})
	}
	for i := range times {
		name := fmt.Sprint(i + 1)
		var ready atomic.Bool
		next := startBeside(t, name, address, true, ready.Load)
		for range 20 {
			if got, err := hook(address); err != nil || got != fmt.Sprint(i) {
				t.Errorf("before %s is ready %q answers, %v", name, got, err)
			}
		}
		ready.Store(true)
		answeredBy(t, address, name)
		closing.Add(1) // odd: it is being closed
		old.end(t)
		closing.Add(1)
		if got, err := hook(address); err != nil || got != name {
			t.Errorf("when the old one is gone %q answers, %v: want %s", got, err, name)
		}
		old = next
	}
	close(stop)
	running.Wait()
	t.Logf("%d hooks, %d lost of those that came while a queue was closed", asked.Load(), failedAtClosing.Load())
	if asked.Load() < 100 || failedAtClosing.Load() > callers*times/2 {
		t.Errorf("%d hooks in all, %d of them lost while a queue was closed", asked.Load(), failedAtClosing.Load())
	}
}

// An agent of before shares nothing. Its address is ours when it has gone, ready or not; and probes
// are answered by one of the two, never by chance.
func TestAnAddressIsTakenOver(t *testing.T) {
	for _, shared := range []bool{true, false} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := listener.Addr().String()
		a := startBeside(t, "new", address, shared, func() bool { return false })
		time.Sleep(10 * tryEvery) // it has tried in vain by then
		listener.Close()
		answeredBy(t, address, "new")
		a.end(t)
	}
}

// An agent that is told to stop before the other has gone ends.
func TestWaitingForAnAddressEnds(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	startBeside(t, "new", listener.Addr().String(), true, func() bool { return true }).end(t)
}

// What is wrong with an address is said at once.
func TestAnAddressOfNobody(t *testing.T) {
	for _, address := range []string{"192.0.2.1:9447", "none"} {
		if _, err := (Address{Address: address, Shared: true,
			Log: slog.New(slog.DiscardHandler)}).Task(serve.Server{}); err == nil {
			t.Errorf("%s can be listened on", address)
		}
	}
}

// An agent that is told to stop while hooks wait at it goes on answering those, and leaves what
// comes then to the one that listens beside it. Alone it takes whatever comes: who is refused is
// stopped under its clients.
func TestWhoLeavesTakesNoMoreHooks(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		address := host + planes.FreeAddress(t)[len("127.0.0.1"):]
		leave, release := make(chan struct{}), make(chan struct{})
		var waiting atomic.Int64
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/wait" {
				waiting.Add(1)
				<-release
			}
			fmt.Fprint(w, "old")
		})
		b := Address{Address: address, Shared: true, Leave: leave, Log: slog.New(slog.DiscardHandler)}
		task, err := b.Task(serve.Server{Name: "old", Handler: handler, Grace: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		alone, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- task.Run(alone) }()
		answeredBy(t, address, "old")
		answers := make(chan string, 1)
		go func() {
			got, err := hook(address + "/wait")
			answers <- fmt.Sprint(got, err)
		}()
		agenttest.Until(t, "a hook waits", func() bool { return waiting.Load() == 1 })
		if host == "127.0.0.1" {
			close(leave)
			answersFor(t, address, 2*LookEvery, "old") // the new one is late
			startBeside(t, "new", address, true, func() bool { return true })
			answeredBy(t, address, "new")
			agenttest.Until(t, "the old one listens no more", func() bool { return countListeners(t, address) == 1 })
			for range 50 {
				if got, err := hook(address); err != nil || got != "new" {
					t.Fatalf("%q answers, %v: want new", got, err)
				}
			}
		} else {
			close(leave)
			answersFor(t, address, 2*LookEvery, "old") // it is alone
		}
		close(release)
		if got := <-answers; got != "old<nil>" {
			t.Errorf("who waited got %s", got)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// Both agents of a node are told to stop in the middle of an upgrade. Without this each leaves the
// hooks to the other, and they are refused until both have ended.
func TestOneOfTwoThatLeaveStays(t *testing.T) {
	address := planes.FreeAddress(t)
	leave := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	for i, name := range []string{"one", "two"} {
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })
		b := Address{Address: address, Shared: true, Leave: leave, Ready: func() bool { return true },
			Log: slog.New(slog.DiscardHandler)}
		task, err := b.Task(serve.Server{Name: name, Handler: handler, Grace: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		go func() { ended <- task.Run(ctx) }()
		agenttest.Until(t, name+" listens", func() bool { return countListeners(t, address) == i+1 })
	}
	close(leave)
	agenttest.Until(t, "one leaves", func() bool { return countListeners(t, address) == 1 })
	answersFor(t, address, 3*LookEvery, "one", "two")
	stop()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func countListeners(t *testing.T, address string) int {
	t.Helper()
	many, err := listeners(netip.MustParseAddrPort(address))
	if err != nil {
		t.Fatal(err)
	}
	return many
}

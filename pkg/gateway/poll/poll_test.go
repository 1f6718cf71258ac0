package poll

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

var target = netip.MustParseAddrPort("127.0.73.1:80")

// plane says over HTTP what a test has set: "", "routing" or "hang". After "once" it says "", and
// then hangs.
type plane struct {
	says  atomic.Value
	asked atomic.Int64
	s     *httptest.Server
	g     *Gateway
}

func start(t *testing.T, says string, settle time.Duration) *plane {
	t.Helper()
	p := &plane{}
	p.says.Store(says)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked.Add(1)
		says := p.says.Load()
		if p.says.CompareAndSwap("once", "hang") {
			says = ""
		}
		if says == "hang" {
			<-r.Context().Done()
			return
		}
		fmt.Fprintf(w, "%q", says)
	}))
	t.Cleanup(s.Close)
	p.s = s
	c := Config{Population: "test", Admin: s.URL}
	p.g = c.Poll(func(get func(string, any) error) ([]Host, error) {
		var says string
		if err := get("/", &says); err != nil || says == "" {
			return nil, err
		}
		return []Host{{Target: target, State: health.Routing}}, nil
	}, settle, slog.New(slog.DiscardHandler))
	planes.RunGateway(t, p.g)
	return p
}

// The main thread may have said what no worker has done yet when the gateway is stopped. Without a
// second answer a settle time later, the time alone makes it Removed.
func TestRemovedNeedsAnAnswerAfterTheSettleTime(t *testing.T) {
	p := start(t, "routing", time.Second)
	w := p.g.Watch([]netip.AddrPort{target}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	p.says.Store("once")
	planes.Until(t, "it is Unknown", func() bool {
		is := w.Reading().State
		if is >= health.Removed {
			t.Fatalf("it is %s without an answer", is)
		}
		return is == health.Unknown
	})
	p.says.Store("")
	planes.Await(t, w, health.Idle)
}

// An alert counts readings that fail.
func TestReadingsThatFailAreCounted(t *testing.T) {
	p := start(t, "routing", 0)
	w := p.g.Watch([]netip.AddrPort{target}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	was := p.g.Failures()
	p.s.CloseClientConnections()
	p.s.Close()
	planes.Until(t, "readings fail", func() bool { return p.g.Failures() > was+1 })
}

// A gateway that has not learned of a pod looks as one that has removed it. If it read Routing
// meanwhile, it would count as one that has sent to the pod, and its Removed at once.
func TestAPodThatWasNeverListedIsNeverRouting(t *testing.T) {
	p := start(t, "", 250*time.Millisecond)
	var w gateway.Watch
	var routing atomic.Bool
	ready := make(chan struct{})
	w = p.g.Watch([]netip.AddrPort{target}, func() {
		<-ready
		if is := w.Reading(); is.State == health.Routing || is.State < health.Removed && is.NoConnections {
			routing.Store(true)
		}
	})
	close(ready)
	defer w.Close()
	planes.Await(t, w, health.Idle)
	if routing.Load() {
		t.Error("it was Routing")
	}
}

// A pod behind a name looks removed. Without the line in the log nothing says so, and with one for
// each poll the log is full of them.
func TestANameIsLoggedOnce(t *testing.T) {
	var log strings.Builder
	c := Config{Population: "test"}
	g := c.Poll(nil, 0, slog.New(slog.NewTextHandler(&log, nil)))
	for range 3 {
		g.adopt([]Host{{Target: target}, {Name: "web.shop"}, {}}, nil, time.Now(), "1")
	}
	if n := strings.Count(log.String(), "name=web.shop"); n != 1 || strings.Count(log.String(), "name=") != 1 {
		t.Errorf("%d times in\n%s", n, log.String())
	}
}

// All questions are asked on one connection. Another one may be to another process.
func TestAConnectionIsAGeneration(t *testing.T) {
	p := start(t, "", 0)
	w := p.g.Watch([]netip.AddrPort{target}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Idle)
	before, asked := w.Reading().Generation, p.asked.Load()
	planes.Until(t, "it is asked", func() bool { return p.asked.Load() > asked+5 })
	if is := w.Reading(); is.Generation != before || is.State != health.Idle {
		t.Errorf("%+v, want generation %s", is, before)
	}
	p.s.CloseClientConnections()
	planes.Until(t, "it is Idle in another generation", func() bool {
		is := w.Reading()
		return is.Generation != before && is.State == health.Idle
	})
}

// A watch that begins while nothing is answered must not begin with what was read before.
func TestTheFirstReadingIsNotOfAnEarlierPoll(t *testing.T) {
	p := start(t, "", 0)
	w := p.g.Watch([]netip.AddrPort{target}, func() {})
	planes.Await(t, w, health.Idle)
	p.says.Store("hang")
	asked := p.asked.Load()
	planes.Until(t, "it is asked", func() bool { return p.asked.Load() > asked })
	late := p.g.Watch([]netip.AddrPort{target}, func() {})
	if is := late.Reading().State; is != health.Unknown {
		t.Errorf("it is %s", is)
	}
}

// A rollout opens a watch for each pod. If each ended the pause, a gateway with a long answer would
// do nothing but answer.
func TestNewWatchesLeaveTheGatewayItsShare(t *testing.T) {
	const slow = 100 * time.Millisecond
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	synctest.Test(t, func(t *testing.T) {
		var polls atomic.Int64
		c := Config{Population: "test", Admin: s.URL}
		g := c.Poll(func(func(string, any) error) ([]Host, error) {
			polls.Add(1)
			time.Sleep(slow)
			return []Host{{Target: target, State: health.Routing}}, nil
		}, 0, slog.New(slog.DiscardHandler))
		g.Counts = true
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		watch := func() gateway.Watch { return g.Watch([]netip.AddrPort{target}, func() {}) }
		polled := func(when string, want int64) {
			t.Helper()
			synctest.Wait()
			if n := polls.Swap(0); n != want {
				t.Errorf("%s: %d polls, want %d", when, n, want)
			}
		}
		time.Sleep(slow + seldom)
		polls.Store(0)
		time.Sleep(idleShare*slow + slow/2)
		polled("without a watch", 1)
		time.Sleep(slow/2 + watchedShare*slow)
		first := watch()
		polled("at once, in a long pause", 1)
		time.Sleep(slow + slow/2)
		watch().Close()
		polled("not yet", 0)
		time.Sleep(3 * slow)
		polled("nor later", 0)
		time.Sleep(slow/2 + time.Millisecond)
		polled("after its share", 1)
		for range 500 {
			watch().Close()
			time.Sleep(slow / 10)
		}
		polled("while watches come", 10)
		first.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A gateway whose second answer takes longer than a poll may take has worked all the time. One that
// answers nothing was only waited for.
func TestAFailedPollCostsWhatTheGatewayWorked(t *testing.T) {
	const slow = 100 * time.Millisecond
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	for _, answers := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var polls atomic.Int64
			c := Config{Population: "test", Admin: s.URL}
			g := c.Poll(func(get func(string, any) error) ([]Host, error) {
				polls.Add(1)
				if answers {
					_ = get("/", new(any)) // it is an answer, whatever it says
				}
				time.Sleep(slow)
				return nil, errors.New("too late")
			}, 0, slog.New(slog.DiscardHandler))
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- g.Run(ctx) }()
			defer g.Watch([]netip.AddrPort{target}, func() {}).Close()
			time.Sleep(100 * slow)
			want := int64(100 * slow / (slow + often))
			if answers {
				want = 100 / (1 + watchedShare)
			}
			if n := polls.Load(); n < want-1 || n > want+1 {
				t.Errorf("answers %t: %d polls, want %d", answers, n, want)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// Only a gateway that cannot be sending is not waited for.
func TestWhatHasNotStarted(t *testing.T) {
	p := Config{Population: "test", Admin: "unix:///does/not/exist"}
	_, absent := p.Poll(nil, 0, slog.New(slog.DiscardHandler)).dial(t.Context())
	p.Admin = "http://" + planes.FreeAddress(t)
	_, refused := p.Poll(nil, 0, slog.New(slog.DiscardHandler)).dial(t.Context())
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{absent, true}, {refused, true}, {fmt.Errorf("starting: %w", ErrNotStarted), true}, {nil, false},
		{os.ErrPermission, false}, {os.ErrDeadlineExceeded, false}, {io.EOF, false}, {errors.New("500"), false},
	} {
		if got := notStarted(tt.err); got != tt.want {
			t.Errorf("%v: %t", tt.err, got)
		}
	}
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		config Config
		errors int
	}{
		{Config{Population: "shop/a", Admin: "http://127.0.0.1:9901"}, 0},
		{Config{Population: "shop/a", Admin: "http://[::1]:9901/"}, 0},
		{Config{Population: "shop/a", Admin: "unix:///run/admin.sock"}, 0},
		{Config{}, 2},
		{Config{Population: "nodes", Admin: "http://10.0.0.1:80"}, 2},
		{Config{Population: "a", Admin: "http://envoy.shop:9901"}, 1},
		{Config{Population: "a", Admin: "https://127.0.0.1:9901"}, 1},
		{Config{Population: "a", Admin: "127.0.0.1:9901"}, 1},
		{Config{Population: "a", Admin: "unix://run/admin.sock"}, 1},
	} {
		if got := tt.config.Check(); len(got) != tt.errors {
			t.Errorf("%+v: %v", tt.config, got)
		}
	}
}

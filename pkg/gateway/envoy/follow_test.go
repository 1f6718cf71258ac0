package envoy

import (
	"context"
	"encoding/json"
	"flag"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var flips = flag.Int("flips", 5, "how often TestWorkersFollow takes a host out, in each way")

// Four workers that are all busy follow the main thread, when a host is removed and when it becomes
// DRAINING. What is written is how long after the first question that the main thread answers
// without the host (one each millisecond) the last request for it arrived: an upper bound, by which
// settle is chosen (decision 32). Nothing that is sent after Removed may arrive.
func TestWorkersFollow(t *testing.T) {
	var phase, last, late atomic.Int64
	a := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		last.Store(time.Now().UnixNano())
		if n, _ := strconv.ParseInt(r.Header.Get("Phase"), 10, 64); n%2 == 1 && n == phase.Load() {
			late.Add(1)
		}
	}))
	defer a.Close()
	gone := endpoint{netip.MustParseAddrPort(a.Listener.Addr().String()), "HEALTHY"}
	b := healthy(gatewaytest.StartBackend(t, "127.0.71.11"))
	p := start(t, "", gone, b)
	w := p.observe().Watch([]netip.AddrPort{gone.addr}, func() {})
	defer w.Close()
	admin := getter(p.config.Admin)

	stop := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(stop)
	for range 16 {
		wg.Go(func() {
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			for {
				select {
				case <-stop:
					return
				default:
				}
				r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url, nil)
				r.Header.Set("Phase", strconv.FormatInt(phase.Load(), 10))
				answer, err := client.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				answer.Body.Close()
			}
		})
	}
	var lags [2][]time.Duration
	for i := range 2 * *flips {
		out := []endpoint{{gone.addr, "DRAINING"}, b}
		planes.Await(t, w, health.Routing)
		before := last.Load()
		planes.Until(t, "it gets requests", func() bool { return last.Load() > before })
		p.set(out[i%2:]...)
		var asked time.Time
		planes.Until(t, "the main thread has no host", func() bool {
			asked = time.Now()
			hosts, err := (&reader{}).read(admin)
			return err == nil && !slices.ContainsFunc(hosts, func(h poll.Host) bool {
				return h.Target == gone.addr && h.State == health.Routing
			})
		})
		planes.Until(t, "it is Removed", func() bool { return w.Reading().State >= health.Removed })
		phase.Add(1)
		planes.Await(t, w, health.Idle)
		lags[i%2] = append(lags[i%2], max(0, time.Unix(0, last.Load()).Sub(asked)))
		phase.Add(1)
		p.set(gone, b)
	}
	for i, what := range []string{"DRAINING", "removed"} {
		slices.Sort(lags[i])
		t.Logf("%s: the workers follow after %s (median), %s (most) of %d", what, lags[i][*flips/2], lags[i][*flips-1],
			*flips)
	}
	if n := late.Load(); n > 0 {
		t.Errorf("%d requests arrived that were sent after Removed", n)
	}
}

// getter returns the get of a gateway that is polled at unix:///PATH.
func getter(admin string) func(path string, into any) error {
	dial := func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", strings.TrimPrefix(admin, "unix://"))
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	return func(path string, into any) error {
		answer, err := client.Get("http://admin" + path)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		return json.NewDecoder(answer.Body).Decode(into)
	}
}

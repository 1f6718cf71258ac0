package source

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lameduck-io/lameduck/internal/agent/liveness"
	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
)

// healthTimeout is that of these tests.
const healthTimeout = time.Minute

// memory is a gateway that does what it is told, unless it is dead or refuses.
type memory struct {
	mu      sync.Mutex
	dead    bool
	refuses func(health.Op) bool
	// hang keeps readings from ending, deadline or not, until it is closed.
	hang   chan struct{}
	born   int
	routed map[health.Key]bool
}

var errMemory = errors.New("no")

// Apply implements gateway.Directed.
func (m *memory) Apply(_ context.Context, ops []health.Op) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errMemory
	}
	var err error
	for _, op := range ops {
		switch {
		case m.refuses != nil && m.refuses(op):
			err = errMemory
		case op.Want == health.WantRouted:
			m.routed[op.Key] = true
		default:
			delete(m.routed, op.Key)
		}
	}
	return err
}

// Observe implements gateway.Directed.
func (m *memory) Observe(_ context.Context, keys []health.Key) (health.Observation, error) {
	m.mu.Lock()
	hang := m.hang
	m.mu.Unlock()
	if hang != nil {
		<-hang
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return health.Observation{}, errMemory
	}
	o := health.Observation{Generation: string(rune('a' + m.born)), At: time.Now(), Seen: map[health.Key]health.Seen{}}
	for _, k := range keys {
		o.Seen[k] = health.Seen{Present: m.routed[k], Routed: m.routed[k], Missing: !m.routed[k]}
	}
	return o, nil
}

// Owned implements gateway.Directed.
func (m *memory) Owned(context.Context) ([]health.Key, error) { return nil, nil }

// Stopped implements gateway.Directed.
func (m *memory) Stopped(context.Context) bool { return false }

func (m *memory) with(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

// restart brings a gateway to life that has nothing.
func (m *memory) restart() {
	m.with(func() { m.dead, m.routed = false, map[health.Key]bool{}; m.born++ })
}

// answers asks both.
func answers(h http.Handler) (livez, healthz int) {
	ask := func(path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code
	}
	return ask("/livez"), ask("/healthz")
}

// followed runs test beside a director of a gateway in memory, with routes for the pool web.
func followed(t *testing.T, test func(m *memory, r *Endpoints, wake func(),
	expect func(when string, livez, healthz int))) {
	synctest.Test(t, func(t *testing.T) {
		log, set := slog.New(slog.DiscardHandler), health.New(health.Options{})
		m := &memory{dead: true, routed: map[health.Key]bool{}}
		following := serving.New(healthTimeout)
		director := gateway.NewDirector(m, set, log, gateway.Hooks{Followed: liveness.Follow(following)})
		r, err := New(fake.NewClientset(), Ports([]gateway.Route{{Service: "shop/web", Pool: "web"}}), set,
			func(families []serving.Family) {
				for _, f := range families {
					following.Queued(f, time.Now())
				}
				director.Wake()
			}, log)
		if err != nil {
			t.Fatal(err)
		}
		h := http.NewServeMux()
		h.Handle("/livez", serving.Handler(following.Livez))
		h.Handle("/healthz", serving.Handler(following.Healthz))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := director.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		test(m, r, func() { liveness.Queue(following); director.Wake() }, func(when string, livez, healthz int) {
			t.Helper()
			synctest.Wait()
			if l, z := answers(h); l != livez || z != healthz {
				t.Fatalf("%s: /livez is %d, /healthz %d, want %d and %d", when, l, z, livez, healthz)
			}
		})
		cancel()
		wg.Wait()
	})
}

// A native sidecar whose startup probe fails is killed and started for ever, and HAProxy with it
// never runs.
func TestHealthyWhileTheGatewayHasNotStarted(t *testing.T) {
	followed(t, func(m *memory, r *Endpoints, _ func(), expect func(string, int, int)) {
		expect("at once", 200, 200)
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a")})
		r.apply(change{synced: []health.Pool{}})
		time.Sleep(time.Hour)
		expect("an hour without a gateway", 200, 200)
		m.restart()
		time.Sleep(time.Minute)
		expect("it is there", 200, 200)
	})
}

// What keepalived and load balancers act on is the gateway alone: neither its targets nor the
// coordinators.
func TestHealthFollowsTheGatewayOnly(t *testing.T) {
	followed(t, func(m *memory, r *Endpoints, wake func(), expect func(string, int, int)) {
		m.restart()
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a", "10.0.0.2@b")})
		r.apply(change{synced: []health.Pool{}})
		time.Sleep(time.Minute)
		expect("at rest", 200, 200)
		time.Sleep(time.Hour)
		expect("and no event comes for an hour, as without an API server", 200, 200)
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web")})
		time.Sleep(time.Hour)
		expect("no backend is left", 200, 200)

		m.with(func() { m.dead = true })
		time.Sleep(healthTimeout - 2*time.Second)
		expect("the gateway has just died", 200, 200)
		time.Sleep(4 * time.Second)
		expect("it has been dead for the timeout", 503, 503)
		m.restart()
		time.Sleep(5 * time.Second)
		expect("it is back", 200, 200)

		m.with(func() {
			m.refuses = func(op health.Op) bool { return op.Want == health.WantRouted && op.Key.Target.UID == "v6" }
		})
		six := agenttest.Slice("web-6", "shop", "web", "fd00::1@v6")
		six.AddressType = discovery.AddressTypeIPv6
		r.apply(change{slice: six})
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a")})
		time.Sleep(healthTimeout / 2)
		expect("one op is refused, for now", 200, 200)
		time.Sleep(healthTimeout)
		expect("one op is refused permanently", 503, 503)
		r.apply(change{slice: six, gone: true})
		time.Sleep(time.Second)
		expect("it is no longer wanted", 200, 200)

		m.with(func() { m.refuses = func(op health.Op) bool { return op.Want != health.WantRouted } })
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a", "10.0.0.2@b")})
		time.Sleep(time.Second)
		r.set.Exclude(time.Now(), "a", "coordinator", time.Now(), time.Now().Add(time.Hour))
		wake()
		time.Sleep(healthTimeout / 2)
		expect("an exclusion cannot be applied, for now", 200, 200)
		time.Sleep(healthTimeout)
		expect("an exclusion cannot be applied", 503, 503)
		m.with(func() { m.refuses = nil })
		time.Sleep(5 * time.Second)
		expect("it can", 200, 200)
	})
}

// A liveness probe has to find an agent that hangs. Only the goroutine that queues a change can
// record then that the change waits.
func TestAHangingDirectorIsNoticed(t *testing.T) {
	followed(t, func(m *memory, r *Endpoints, wake func(), expect func(string, int, int)) {
		m.restart()
		r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a")})
		r.apply(change{synced: []health.Pool{}})
		time.Sleep(time.Minute)
		for name, queue := range map[string]func(){
			"a slice": func() {
				r.apply(change{slice: agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a",
					"10.0.0.2@b")})
			},
			"an exclusion": wake,
		} {
			hang := make(chan struct{})
			m.with(func() { m.hang = hang })
			time.Sleep(time.Hour)
			expect("nothing waits", 200, 200)
			queue()
			time.Sleep(healthTimeout - time.Second)
			expect(name+" waits", 200, 200)
			time.Sleep(time.Second)
			expect(name+" has waited too long", 503, 503)
			m.with(func() { m.hang = nil })
			close(hang)
			time.Sleep(5 * time.Second)
			expect(name+" is done", 200, 200)
		}
	})
}

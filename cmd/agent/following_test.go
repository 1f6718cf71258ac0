package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/pkg/health/serving"
)

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

// Apply implements gateway.Gateway.
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

// Observe implements gateway.Gateway.
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

// Owned implements gateway.Gateway.
func (m *memory) Owned(context.Context) ([]health.Key, error) { return nil, nil }

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
func followed(t *testing.T, test func(m *memory, r *routes, wake func(), expect func(when string, livez, healthz int))) {
	synctest.Test(t, func(t *testing.T) {
		log, set := slog.New(slog.DiscardHandler), health.NewSet()
		m := &memory{dead: true, routed: map[health.Key]bool{}}
		following := serving.New(healthTimeout)
		director := gateway.NewDirector(m, set, log)
		director.Followed = follow(following)
		r := newRoutes(file{HAProxy: &haproxyFile{Backends: []backendFile{{Backend: "web", Service: "shop/web"}}}}, set, director)
		r.queued = func(f serving.Family) { following.Queued(f, time.Now()) }
		var learnt atomic.Bool
		h := people(prometheus.NewRegistry(), following, &learnt, r, director, set)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := director.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		test(m, r, func() { queue(following); director.Wake() }, func(when string, livez, healthz int) {
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

// A native sidecar whose startup probe fails is killed and started for ever, and HAProxy with it never runs.
func TestHealthyWhileTheGatewayHasNotStarted(t *testing.T) {
	followed(t, func(m *memory, r *routes, _ func(), expect func(string, int, int)) {
		expect("at once", 200, 200)
		r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a")})
		r.apply(change{synced: true})
		time.Sleep(time.Hour)
		expect("an hour without a gateway", 200, 200)
		m.restart()
		time.Sleep(time.Minute)
		expect("it is there", 200, 200)
	})
}

// What keepalived and load balancers act on: the gateway, and neither those behind it nor those who speak to the agent.
func TestHealthFollowsTheGatewayOnly(t *testing.T) {
	followed(t, func(m *memory, r *routes, wake func(), expect func(string, int, int)) {
		m.restart()
		r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a", "10.0.0.2@b")})
		r.apply(change{synced: true})
		time.Sleep(time.Minute)
		expect("at rest", 200, 200)
		time.Sleep(time.Hour)
		expect("and nobody says anything for an hour, as without an API server", 200, 200)
		r.apply(change{slice: made("web-1", "shop", "web")})
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
		six := made("web-6", "shop", "web", "fd00::1@v6")
		six.AddressType = discovery.AddressTypeIPv6
		r.apply(change{slice: six})
		r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a")})
		time.Sleep(healthTimeout / 2)
		expect("one op is refused, for now", 200, 200)
		time.Sleep(healthTimeout)
		expect("one op is refused for good", 503, 503)
		r.apply(change{slice: six, gone: true})
		time.Sleep(time.Second)
		expect("it is no longer wanted", 200, 200)

		m.with(func() { m.refuses = func(op health.Op) bool { return op.Want != health.WantRouted } })
		r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a", "10.0.0.2@b")})
		time.Sleep(time.Second)
		r.set.Bury(time.Now(), "a", "coordinator", time.Now(), time.Now().Add(time.Hour))
		wake()
		time.Sleep(healthTimeout / 2)
		expect("a tombstone cannot be applied, for now", 200, 200)
		time.Sleep(healthTimeout)
		expect("a tombstone cannot be applied", 503, 503)
		m.with(func() { m.refuses = nil })
		time.Sleep(5 * time.Second)
		expect("it can", 200, 200)
	})
}

// An agent that hangs is what a liveness probe is for. Then nobody but the one who queues a change can say that it waits.
func TestAHangingDirectorIsNoticed(t *testing.T) {
	followed(t, func(m *memory, r *routes, wake func(), expect func(string, int, int)) {
		m.restart()
		r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a")})
		r.apply(change{synced: true})
		time.Sleep(time.Minute)
		for name, queue := range map[string]func(){
			"a slice":     func() { r.apply(change{slice: made("web-1", "shop", "web", "10.0.0.1@a", "10.0.0.2@b")}) },
			"a tombstone": wake,
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

func TestProgressOfEachFamily(t *testing.T) {
	op := func(addr string) health.Op {
		return health.Op{Key: health.Key{Pool: "web", Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort(addr)}}, Want: health.WantRouted}
	}
	four, six := op("10.0.0.1:80"), op("[fd00::1]:80")
	for name, c := range map[string]struct {
		progress gateway.Progress
		late     string
	}{
		"all is done":       {gateway.Progress{}, ""},
		"unread":            {gateway.Progress{Err: errMemory}, "IPv4 IPv6"},
		"one is behind":     {gateway.Progress{Behind: []health.Op{six}}, "IPv6"},
		"one came":          {gateway.Progress{Came: []health.Op{four}}, "IPv4"},
		"one of each":       {gateway.Progress{Behind: []health.Op{six}, Came: []health.Op{four}}, "IPv4 IPv6"},
		"two of one family": {gateway.Progress{Behind: []health.Op{four}, Came: []health.Op{four}}, "IPv4"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := serving.New(healthTimeout)
				told := follow(h)
				told(gateway.Progress{AsOf: time.Now()})
				time.Sleep(time.Second)
				c.progress.AsOf = time.Now()
				time.Sleep(time.Millisecond)
				told(c.progress)
				time.Sleep(healthTimeout)
				report, _ := h.Livez(time.Now())
				var late []string
				for _, f := range serving.Families {
					if !report.Status[f].Healthy {
						late = append(late, f.String())
					}
				}
				if got := strings.Join(late, " "); got != c.late {
					t.Errorf("late are %q, want %q", got, c.late)
				}
			})
		})
	}
}

func node(deleting bool, taints ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	if deleting {
		n.DeletionTimestamp, n.Finalizers = &metav1.Time{Time: time.Now()}, []string{"example.com/wait"}
	}
	for _, key := range taints {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
	}
	return n
}

// watched runs the watch of the node in a bubble.
func watched(t *testing.T, kube kubernetes.Interface, test func(expect func(when string, want bool), log *bytes.Buffer)) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		is := true
		var mu sync.Mutex
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- watchNode(ctx, kube, "here", func(e bool) {
				mu.Lock()
				defer mu.Unlock()
				is = e
			}, slog.New(slog.NewTextHandler(&out, nil)))
		}()
		test(func(when string, want bool) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if is != want {
				t.Fatalf("%s: eligible %t, want %t", when, is, want)
			}
		}, &out)
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	})
}

func TestNodeEligibility(t *testing.T) {
	kube := fake.NewClientset()
	watched(t, kube, func(expect func(string, bool), log *bytes.Buffer) {
		nodes := kube.CoreV1().Nodes()
		update := func(n *corev1.Node) {
			t.Helper()
			if _, err := nodes.Update(context.Background(), n, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		expect("no such node", true)
		if _, err := nodes.Create(context.Background(), node(false), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("a node", true)
		update(node(false, "other"))
		expect("another taint", true)
		update(node(false, "other", toBeDeleted))
		expect("to be deleted", false)
		update(node(false))
		expect("no longer", true)
		update(node(true))
		expect("being deleted", false)
		update(node(false))
		expect("another of that name", true)
		if err := nodes.Delete(context.Background(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("deleted", false)
		if n := strings.Count(log.String(), "node eligibility"); n != 5 {
			t.Errorf("%d lines, want one for each change, 5: %s", n, log)
		}
	})
}

// Without the right to see nodes, or without an API server, nobody may be sent away.
func TestANodeThatCannotBeWatchedStaysEligible(t *testing.T) {
	kube := fake.NewClientset()
	kube.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "", errors.New("no right"))
	})
	watched(t, kube, func(expect func(string, bool), log *bytes.Buffer) {
		for range 600 {
			expect("forbidden", true)
		}
		if n := strings.Count(log.String(), "node cannot be watched"); n != 1 {
			t.Errorf("%d lines, want one: %s", n, log)
		}
	})
}

// Whoever points a probe at the agent finds three answers to three questions.
func TestAddressesOfAnswers(t *testing.T) {
	set := health.NewSet()
	director := gateway.NewDirector(nil, set, slog.New(slog.DiscardHandler))
	r := newRoutes(file{HAProxy: &haproxyFile{}}, set, director)
	var learnt atomic.Bool
	following := serving.New(healthTimeout)
	following.SetEligible(false)
	h := people(prometheus.NewRegistry(), following, &learnt, r, director, set)
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/livez", 200}, {"HEAD", "/livez", 200}, {"POST", "/livez", 405},
		{"GET", "/healthz", 503}, {"HEAD", "/healthz", 503}, {"POST", "/healthz", 405},
		{"GET", "/readyz", 503}, {"GET", "/", 404},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
		if w.Code != c.want {
			t.Errorf("%s %s: %d, want %d", c.method, c.path, w.Code, c.want)
		}
	}
}

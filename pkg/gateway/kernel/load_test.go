package kernel

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// backend is a process that answers requests, and can be killed, and that checks find sick once it
// was told so.
func backend() {
	var sick atomic.Bool
	http.HandleFunc("/sick", func(http.ResponseWriter, *http.Request) { sick.Store(true) })
	http.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		if sick.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Backend", os.Getenv("CONFIG"))
		fmt.Fprint(w, "ok")
	})
	fmt.Println(http.ListenAndServe(os.Getenv("CONFIG"), nil)) //nolint:gosec // of a test
}

func startBackend(t testing.TB) (netip.AddrPort, *planes.Program) {
	t.Helper()
	address := planes.FreeAddress(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := planes.StartProgram(t, address, "/usr/bin/env", role+"=backend", "CONFIG="+address, exe)
	return netip.MustParseAddrPort(address), p
}

const unpooled = "haproxy without a pool"

// mayLose is how many requests may be lost because the gateway has chosen a connection of its pool
// and writes to it just after the agent has closed it. The unprotected ones lose hundreds.
const mayLose = 5

// gateways start a real one, with its upstream pool and without retries, in a pod. They return
// where it listens.
var gateways = map[string]func(t testing.TB, p *pod, to []netip.AddrPort) string{
	"haproxy": func(t testing.TB, p *pod, to []netip.AddrPort) string {
		h := newHAProxy(t, p, "http-reuse always")
		h.servers = to
		h.start()
		return h.listens
	},
	unpooled: func(t testing.TB, p *pod, to []netip.AddrPort) string {
		h := newHAProxy(t, p, "option http-server-close")
		h.servers = to
		h.start()
		return h.listens
	},
	"traefik": func(t testing.TB, p *pod, to []netip.AddrPort) string {
		dir, web := t.TempDir(), planes.FreeAddress(t)
		text := "http: {routers: {web: {rule: PathPrefix(`/`), service: web}}, " +
			"services: {web: {loadBalancer: {servers: ["
		for _, a := range to {
			text += fmt.Sprintf("{url: 'http://%s'}, ", a)
		}
		planes.Replace(t, filepath.Join(dir, "web.yaml"), text+"]}}}}")
		p.start(t, "gateway", web, gatewaytest.LookPath(t, "traefik"), "--entrypoints.web.address="+web,
			"--providers.file.directory="+dir, "--global.checkNewVersion=false", "--global.sendAnonymousUsage=false")
		return web
	},
	"envoy": startEnvoy(""),
}

// startEnvoy starts one whose cluster is as more says.
func startEnvoy(more string) func(t testing.TB, p *pod, to []netip.AddrPort) string {
	return func(t testing.TB, p *pod, to []netip.AddrPort) string {
		dir, web := t.TempDir(), planes.FreeAddress(t)
		_, port, _ := strings.Cut(web, ":")
		hosts := ""
		for _, a := range to {
			hosts += fmt.Sprintf("{endpoint: {address: {socket_address: {address: %s, port_value: %d}}}}, ", a.Addr(),
				a.Port())
		}
		planes.Replace(t, filepath.Join(dir, "envoy.yaml"), fmt.Sprintf(envoyFile, port, hosts)+more)
		p.start(t, "gateway", web, gatewaytest.LookPath(t, "envoy"), "-c", filepath.Join(dir, "envoy.yaml"),
			"--concurrency", "2", "--disable-hot-restart")
		return web
	}
}

const envoyFile = `
static_resources:
  listeners:
  - name: web
    address: {socket_address: {address: 127.0.0.1, port_value: %s}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: web
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, route: {cluster: web}}]
  clusters:
  - name: web
    type: STATIC
    connect_timeout: 1s
    load_assignment: {cluster_name: web, endpoints: [{lb_endpoints: [%s]}]}
`

// post sends requests that nothing retries from clients until stop, half of which keep their
// connections.
func post(url string, clients int) (stop func() (sent, failed int64, first error)) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var sent, failed atomic.Int64
	var once sync.Once
	var first error
	for n := range clients {
		wg.Go(func() {
			client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: n%2 == 0}}
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				sent.Add(1)
				answer, err := client.Post(url, "text/plain", strings.NewReader("x"))
				if err == nil {
					_, err = io.Copy(io.Discard, answer.Body)
					answer.Body.Close()
					if answer.StatusCode != http.StatusOK {
						err = fmt.Errorf("%s", answer.Status)
					}
				}
				if err != nil {
					failed.Add(1)
					once.Do(func() { first = err })
				}
			}
		})
	}
	return func() (int64, int64, error) {
		cancel()
		wg.Wait()
		return sent.Load(), failed.Load(), first
	}
}

// The gateways never learn that a backend goes away, and it is killed. Without the exclusion they
// lose requests. Nothing is retried.
func TestABackendIsKilledUnderLoad(t *testing.T) {
	for name, start := range gateways {
		for _, protected := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, protected %t", name, protected), func(t *testing.T) {
				p := newPod(t, false)
				if name != unpooled {
					p.config.Services[0].HTTP1Quiet = "5ms" // less than a file may say: the worst case
				}
				a, process := startBackend(t)
				b, _ := startBackend(t)
				c, _ := startBackend(t)
				url := "http://" + start(t, p, []netip.AddrPort{a, b, c})
				planes.Until(t, "it routes", func() bool {
					answer, err := http.Get(url)
					if err != nil {
						return false
					}
					answer.Body.Close()
					return answer.StatusCode == http.StatusOK
				})
				set := health.New(health.Options{})
				ctx, cancel := context.WithCancel(context.Background())
				var wg sync.WaitGroup
				if protected {
					var all []health.Change
					for _, addr := range []netip.AddrPort{a, b, c} {
						all = append(all, listed(addr))
					}
					set.Change(time.Now(), web, all)
					set.Synced()
					director := gateway.NewDirector(p.open(t), set, slog.New(slog.DiscardHandler), gateway.Hooks{})
					wg.Go(func() { _ = director.Run(ctx) })
					planes.Until(t, "it is programmed", director.Programmed)
				}
				defer wg.Wait()
				defer cancel()
				stop := post(url, 8)
				time.Sleep(300 * time.Millisecond) // the pools fill
				began := time.Now()
				if protected {
					set.Exclude(began, key(a).Target.UID, "test", began, began.Add(time.Minute))
					for end := began.Add(time.Minute); ; time.Sleep(time.Millisecond) {
						if x := set.Exclusions(); x[0].State == health.Idle {
							break
						} else if time.Now().After(end) {
							t.Fatalf("it is not idle: %+v", x)
						}
					}
				}
				idle := time.Since(began)
				process.Kill()
				time.Sleep(500 * time.Millisecond) // what would be lost is
				if !protected {
					time.Sleep(2 * time.Second) // also on a busy machine
				}
				sent, failed, first := stop()
				t.Logf("%d of %d requests failed; idle after %s", failed, sent, idle.Round(time.Millisecond))
				lost := failed > mayLose
				if protected && name == unpooled {
					lost = failed > 0
				}
				if lost == protected {
					t.Errorf("%d requests failed, the first: %v", failed, first)
				}
			})
		}
	}
}

// A gateway's own checks of an excluded pod reach its replacement. The pod is marked by them, and
// no longer than its exclusion stands: connections that were redirected are closed then. By default
// Envoy keeps the connection of its checks.
func TestChecksAfterAnAbandonedDrain(t *testing.T) {
	const checks = `    common_lb_config: {healthy_panic_threshold: {value: 0}}
    health_checks:
    - {timeout: 1s, interval: 0.1s, no_traffic_interval: 0.1s, unhealthy_threshold: 2, healthy_threshold: 2,
       %shttp_health_check: {path: /health}}
`
	for name, start := range map[string]func(t testing.TB, p *pod, to []netip.AddrPort) string{
		"haproxy": func(t testing.TB, p *pod, to []netip.AddrPort) string {
			h := newHAProxy(t, p, "option httpchk GET /health\n    default-server check inter 100ms fall 2 rise 2")
			h.servers = to
			h.start()
			return h.listens
		},
		"envoy":                              startEnvoy(fmt.Sprintf(checks, "")),
		"envoy, a connection for each check": startEnvoy(fmt.Sprintf(checks, "reuse_connection: false, ")),
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t, false)
			p.config.Services[0].HTTP1Quiet = "50ms"
			a, _ := startBackend(t)
			b, _ := startBackend(t)
			url := "http://" + start(t, p, []netip.AddrPort{a, b})
			from := func() string { // the backend that answers, or the gateway's own answer
				answer, err := http.Get(url)
				if err != nil {
					return err.Error()
				}
				answer.Body.Close()
				return answer.Status + " " + answer.Header.Get("Backend")
			}
			planes.Until(t, "it routes to both", func() bool {
				first, second := from(), from()
				return strings.HasPrefix(first, "200") && strings.HasPrefix(second, "200") && first != second
			})
			g := p.open(t)
			apply(t, g, health.WantRouted, a, b)
			apply(t, g, health.WantRemoved, a)
			planes.Until(t, "it is idle", func() bool { return see(t, g, key(a)).Active == 0 })
			answer, err := http.Get("http://" + b.String() + "/sick")
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			planes.Until(t, "both are marked", func() bool { return from() == "503 Service Unavailable " })
			apply(t, g, health.WantRouted, a)
			// The replacement is marked still.
			planes.Until(t, "it is back", func() bool {
				if _, err := g.Observe(t.Context(), nil); err != nil { // as an agent without a drain does
					t.Fatal(err)
				}
				return from() == "200 OK "+a.String()
			})
		})
	}
}

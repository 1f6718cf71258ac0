package envoy

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/gateway/sockets"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// bootstrap has four workers, an EDS cluster that reads a file, and HTTP/1.1 to it.
const bootstrap = `
admin: {address: {pipe: {path: %[1]s/admin.sock}}}
node: {id: test, cluster: test}
static_resources:
  listeners:
  - name: web
    address: {socket_address: {address: 127.0.0.1, port_value: %[2]s}}
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
              routes: [{match: {prefix: /}, route: {cluster: web, timeout: 0s}}]
  clusters:
  - name: web
    type: EDS
    connect_timeout: 10s
    eds_cluster_config:
      eds_config: {path_config_source: {path: %[1]s/eds.yaml, watched_directory: {path: %[1]s}}}
    %[3]s
`

// proxy is a real Envoy.
type proxy struct {
	t       testing.TB
	dir     string
	url     string
	version int
	program *planes.Program
	config  Config
}

// endpoint is a host of the cluster with an EDS health status.
type endpoint struct {
	addr   netip.AddrPort
	status string
}

func start(t testing.TB, cluster string, endpoints ...endpoint) *proxy {
	t.Helper()
	return startWith(t, []string{"--disable-hot-restart"}, cluster, endpoints...)
}

func startWith(t testing.TB, options []string, cluster string, endpoints ...endpoint) *proxy {
	t.Helper()
	dir, err := os.MkdirTemp("", "ev") // t.TempDir is too long for a unix socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	address := planes.FreeAddress(t)
	p := &proxy{
		t: t, dir: dir, url: "http://" + address,
		config: Config{poll.Config{Population: "shop/envoy", Admin: "unix://" + dir + "/admin.sock"}},
	}
	_, port, _ := strings.Cut(address, ":")
	planes.Replace(t, filepath.Join(dir, "envoy.yaml"), fmt.Sprintf(bootstrap, dir, port, cluster))
	p.set(endpoints...)
	p.program = p.run(append(options, "--concurrency", "4")...)
	return p
}

// run starts a process of the proxy. ENVOY in the environment selects another Envoy.
func (p *proxy) run(options ...string) *planes.Program {
	p.t.Helper()
	path := gatewaytest.LookPath(p.t, cmp.Or(os.Getenv("ENVOY"), "envoy"))
	return planes.StartProgram(p.t, strings.TrimPrefix(p.url, "http://"), path,
		append(options, "-c", filepath.Join(p.dir, "envoy.yaml"))...)
}

// set is EDS.
func (p *proxy) set(endpoints ...endpoint) {
	p.t.Helper()
	p.version++
	var b strings.Builder
	fmt.Fprintf(&b, "version_info: \"%d\"\nresources:\n- \"@type\": "+
		"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment\n  cluster_name: web\n  endpoints:\n"+
		"  - lb_endpoints:\n", p.version)
	for _, e := range endpoints {
		fmt.Fprintf(&b, "    - {health_status: %s, endpoint: {address: {socket_address: "+
			"{address: %s, port_value: %d}}}}\n", e.status, e.addr.Addr(), e.addr.Port())
	}
	planes.Replace(p.t, filepath.Join(p.dir, "eds.yaml"), b.String())
}

// observe returns the gateway of p, which is polled until the test ends.
func (p *proxy) observe() gateway.Observed {
	p.t.Helper()
	if errs := p.config.Check(); len(errs) > 0 {
		p.t.Fatal(errs)
	}
	g := p.config.Observe(slog.New(slog.DiscardHandler))
	planes.RunGateway(p.t, g)
	return g
}

func healthy(b *gatewaytest.Backend) endpoint  { return endpoint{b.Addr, "HEALTHY"} }
func draining(b *gatewaytest.Backend) endpoint { return endpoint{b.Addr, "DRAINING"} }

func unhealthy(b *gatewaytest.Backend) endpoint { return endpoint{b.Addr, "UNHEALTHY"} }

// clutter is another cluster, with a host that has no address.
const clutter = `
  - name: clutter
    load_assignment: {cluster_name: clutter, endpoints: [{lb_endpoints: [
      {endpoint: {address: {pipe: {path: /nowhere.sock}}}}]}]}
`

// The two ways in which control planes take an endpoint out: Contour and Istio remove it, Envoy
// Gateway calls it DRAINING until the pod is gone.
func TestContract(t *testing.T) {
	t.Parallel()
	for name, out := range map[string]func(a *gatewaytest.Backend) []endpoint{
		"removed":  func(*gatewaytest.Backend) []endpoint { return nil },
		"draining": func(a *gatewaytest.Backend) []endpoint { return []endpoint{draining(a)} },
	} {
		t.Run(name, func(t *testing.T) {
			gatewaytest.RunObserved(t, func(t *testing.T) *gatewaytest.ObservedHarness {
				a, b := gatewaytest.StartBackend(t, "127.0.71.1"), gatewaytest.StartBackend(t, "127.0.71.2")
				unrouted := append(out(a), healthy(b))
				p := start(t, clutter, unrouted...)
				return &gatewaytest.ObservedHarness{
					Clutter: func() {}, // it is there from the start
					Gateway: p.observe(), Target: a.Addr,
					Route:   func() { p.set(healthy(a), healthy(b)) },
					Unroute: func() { p.set(unrouted...) },
					Connect: func() (bool, func(), error) {
						at, end, err := gatewaytest.Stream(p.url)
						return at == a.Addr, end, err
					},
				}
			})
		})
	}
}

// Envoy sends to DRAINING hosts once fewer than half of the others are healthy
// (envoyproxy/envoy#46800). Without this they are Removed, and get requests after SIGTERM.
func TestPanicRoutingReachesDrainingHosts(t *testing.T) {
	t.Parallel()
	a, b := gatewaytest.StartBackend(t, "127.0.71.3"), gatewaytest.StartBackend(t, "127.0.71.4")
	c, d := gatewaytest.StartBackend(t, "127.0.71.5"), gatewaytest.StartBackend(t, "127.0.71.10")
	for _, tt := range []struct {
		name, cluster string
		endpoints     []endpoint
		want          health.State
		reached       bool
	}{
		{"all others are healthy", "", []endpoint{draining(a), draining(c), healthy(b)}, health.Idle, false},
		{"half are healthy", "", []endpoint{draining(a), unhealthy(c), healthy(b)}, health.Idle, false},
		{
			"a third is healthy", "", []endpoint{draining(a), unhealthy(c), unhealthy(d), healthy(b)}, health.Routing,
			true,
		},
		{"none is healthy", "", []endpoint{draining(a), unhealthy(b)}, health.Kept, true},
		{"all are draining", "", []endpoint{draining(a), draining(b)}, health.Kept, true},
		{"alone", "", []endpoint{draining(a)}, health.Kept, true},
		{
			"checks keep connections", "health_checks: [{timeout: 10s, interval: 0.1s, unhealthy_threshold: 1, " +
				"healthy_threshold: 1, http_health_check: {path: /}}]",
			[]endpoint{draining(a), healthy(b)}, health.Idle, false,
		},
		{
			"no panic", "common_lb_config: {healthy_panic_threshold: {value: 0}}",
			[]endpoint{draining(a), unhealthy(c), unhealthy(d), healthy(b)}, health.Idle, false,
		},
		{
			"early panic", "common_lb_config: {healthy_panic_threshold: {value: 80}}",
			[]endpoint{draining(a), unhealthy(c), healthy(b)}, health.Routing, true,
		},
		{
			"sessions are kept", "common_lb_config: {override_host_status: {statuses: [DRAINING]}}",
			[]endpoint{draining(a), healthy(b)}, health.Routing, false, // by a cookie only
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := start(t, tt.cluster, tt.endpoints...)
			w := p.observe().Watch([]netip.AddrPort{netip.AddrPortFrom(a.Addr.Addr(), 0)}, func() {})
			defer w.Close()
			planes.Await(t, w, tt.want)
			reached := false
			for range 100 {
				at, end, err := gatewaytest.Stream(p.url)
				end()
				if err != nil {
					t.Fatal(err)
				}
				reached = reached || at == a.Addr
			}
			if reached != tt.reached {
				t.Errorf("the draining host was reached: %t", reached)
			}
			if is := w.Reading().State; is != tt.want {
				t.Errorf("then it is %s", is)
			}
		})
	}
}

// A request that waits for a connection runs nowhere yet, and is lost if its pod ends.
func TestARequestThatWaitsForAConnectionKeepsItFromIdle(t *testing.T) {
	t.Parallel()
	a, b := blackhole(t, "127.0.71.6"), gatewaytest.StartBackend(t, "127.0.71.7")
	p := start(t, "common_lb_config: {healthy_panic_threshold: {value: 0}}", endpoint{a, "HEALTHY"})
	w := p.observe().Watch([]netip.AddrPort{a}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_, end, _ := gatewaytest.Stream(p.url) // its connect timeout ends it
		end()
	})
	planes.Until(t, "it connects", func() bool { return openTo(t, a) > 0 })
	p.set(endpoint{a, "DRAINING"}, healthy(b))
	planes.Await(t, w, health.Removed)
	planes.Await(t, w, health.Idle)
}

func openTo(t *testing.T, target netip.AddrPort) (n int) {
	t.Helper()
	all, err := sockets.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Remote == target {
			n++
		}
	}
	return n
}

// A stopped Envoy does what it was told last once it continues. Another process is another
// generation, whose predecessor's readings prove nothing.
func TestAStoppedEnvoyIsUnknown(t *testing.T) {
	t.Parallel()
	a, b := gatewaytest.StartBackend(t, "127.0.71.8"), gatewaytest.StartBackend(t, "127.0.71.9")
	p := start(t, "", healthy(a), healthy(b))
	g := p.observe()
	w := g.Watch([]netip.AddrPort{a.Addr}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	p.program.Signal(syscall.SIGSTOP)
	p.set(healthy(b))
	planes.Await(t, w, health.Unknown)
	late := g.Watch([]netip.AddrPort{b.Addr}, func() {})
	defer late.Close()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if is, was := w.Reading().State, late.Reading().State; is != health.Unknown || was != health.Unknown {
			t.Fatalf("a stopped Envoy is %s, %s", is, was)
		}
	}
	p.program.Signal(syscall.SIGCONT)
	planes.Await(t, w, health.Idle)
	before := w.Reading().Generation
	p.program.Kill()
	planes.Await(t, w, health.Unknown)
	p.program = p.run("--concurrency", "1", "--disable-hot-restart")
	planes.Await(t, w, health.Idle)
	if w.Reading().Generation == before {
		t.Error("another process has the same generation")
	}
}

// A process that another one has replaced without an interruption goes on answering on connections
// that it has, and says nothing of the other one.
func TestAHotRestartIsNoticed(t *testing.T) {
	t.Parallel()
	a := gatewaytest.StartBackend(t, "127.0.71.10")
	id := strconv.Itoa(os.Getpid()) // of the memory that the two processes share
	p := startWith(t, []string{"--base-id", id}, "", healthy(a))
	g := p.observe()
	w := g.Watch([]netip.AddrPort{a.Addr}, func() {})
	planes.Await(t, w, health.Routing)
	w.Close()
	p.run("--base-id", id, "--restart-epoch", "1", "--concurrency", "4")
	planes.Until(t, "the second process answers", func() bool {
		conn, err := net.Dial("unix", filepath.Join(p.dir, "admin.sock"))
		if err != nil {
			return false
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("GET /server_info HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n"))
		said, _ := io.ReadAll(conn)
		return bytes.Contains(said, []byte(`"restart_epoch": 1`))
	})
	time.Sleep(2 * time.Second) // the agent polls
	w = g.Watch([]netip.AddrPort{a.Addr}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Unknown)
}

// What /clusters and /config_dump say that a test has no Envoy for.
func TestRead(t *testing.T) {
	const live = `{"state": "LIVE"}`
	cluster := func(hosts ...string) string {
		return `{"cluster_statuses": [{"name": "web", "host_statuses": [` + strings.Join(hosts, ",") + `]}]}`
	}
	host := func(port, rest string) string {
		return `{"address": {"socket_address": {"address": "10.0.0.1", "port_value": ` + port + `}}, ` + rest + `}`
	}
	const eds, weight = `"health_status": {"eds_health_status": "DRAINING"}`, `"weight": 1`
	const configs = `{"configs": [{"cluster": {"name": "web"}}]}`
	for name, tt := range map[string]struct {
		info, clusters, dump string
		want                 string
	}{
		"nothing":  {live, `{}`, configs, "[]"},
		"starting": {`{"state": "INITIALIZING"}`, `{}`, configs, "Envoy is INITIALIZING: it has not started yet"},
		"restarted hot": {
			`{"state": "LIVE", "uptime_current_epoch": "9s",
				"command_line_options": {"restart_epoch": 1, "parent_shutdown_time": "900s"}}`,
			`{}`, configs, "Envoy was restarted hot 9s ago: its parent may send until 16m0s",
		},
		"counts": {
			live, cluster(host("80", `"stats": [{"name": "rq_active", "value": "2"},
				{"name": "rq_pending_active", "value": "1"}, {"name": "cx_active", "value": "4"}]`)),
			configs, "[{10.0.0.1:80 routing true 3 4 0s 0s }]",
		},
		"an older Envoy": {
			live, cluster(host("80", `"stats": [{"name": "rq_active", "value": "2"}]`)), configs,
			"[{10.0.0.1:80 routing false 2 0 0s 0s }]",
		},
		"passes its checks still": {
			live, cluster(host("80", `"health_status": {"eds_health_status": "DRAINING",
				"pending_dynamic_removal": true}`)),
			configs, "[{10.0.0.1:80 routing false 0 0 0s 0s }]",
		},
		"ejected": {
			live, cluster(host("80", `"health_status": {"failed_outlier_check": true}`)), configs,
			"[{10.0.0.1:80 routing false 0 0 0s 0s }]",
		},
		"others are ejected": {
			live, cluster(host("80", eds),
				host("81", `"health_status": {"failed_active_health_check": true}`)), configs,
			"[{10.0.0.1:80 kept false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"each priority": {
			live, cluster(host("80", `"priority": 1, `+eds), host("81", weight)),
			configs, "[{10.0.0.1:80 routing false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"subsets": {
			live, cluster(host("80", eds), host("81", weight)),
			`{"configs": [{"cluster": {"name": "web", "lb_subset_config": {}}}]}`,
			"[{10.0.0.1:80 routing false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"a header names it": {
			live, cluster(host("80", eds), host("81", weight)), `{"configs": [{"cluster": {"name": "web",
				"load_balancing_policy": {"policies": [{"typed_extension_config": {"typed_config": {"@type":
				"type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
				"fallback_policy": {"policies": [{"typed_extension_config": {"typed_config": {"@type":
				"type.googleapis.com/envoy.extensions.load_balancing_policies.random.v3.Random"}}}]}}}}]}}}]}`,
			"[{10.0.0.1:80 routing false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"a policy of an extension": {
			live, cluster(host("80", eds), host("81", weight)), `{"configs": [{"cluster": {"name": "web",
				"load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "own"}}]}}}]}`,
			"[{10.0.0.1:80 routing false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"least request, merged within 3 s": {
			live, cluster(host("80", eds), host("81", weight)), `{"configs": [{"cluster": {"name": "web",
				"common_lb_config": {"update_merge_window": "3s"},
				"load_balancing_policy": {"policies": [{"typed_extension_config": {"typed_config": {"@type":
				"type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest"
				}}}]}}}]}`,
			"[{10.0.0.1:80 removed false 0 0 0s 3.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"not configured": {
			live, cluster(host("80", eds), host("81", weight)),
			`{}`, "[{10.0.0.1:80 routing false 0 0 0s 1.5s } {10.0.0.1:81 routing false 0 0 0s 0s }]",
		},
		"a name": {live, cluster(`{"address": {"socket_address": {"address": "web.shop"}}}`), configs,
			"[{invalid AddrPort unknown false 0 0 0s 0s web.shop}]"},
		"a name that Envoy has resolved, as of a Service": {live, cluster(`{"address": {"socket_address": {"address":
			"10.96.0.7", "port_value": 80}}, "hostname": "web.shop", "health_status": {"eds_health_status":
			"HEALTHY"}}`), configs,
			"[{invalid AddrPort unknown false 0 0 0s 0s web.shop} {10.96.0.7:80 routing false 0 0 0s 0s }]"},
		"a pod of Istio's ambient mesh": {live, cluster(`{"address": {"envoy_internal_address": {
			"server_listener_name": "connect_originate", "endpoint_id": "10.0.0.5:8080"}}, "health_status": {
			"eds_health_status": "HEALTHY"}}`), configs, "[{10.0.0.5:8080 routing false 0 0 0s 0s }]"},
	} {
		t.Run(name, func(t *testing.T) {
			answers := map[string]string{
				"/server_info": tt.info, "/clusters?format=json": tt.clusters,
				"/config_dump?resource=static_clusters": `{}`, "/config_dump?resource=dynamic_active_clusters": tt.dump,
			}
			hosts, err := (&reader{}).read(planes.Answers(answers))
			got := fmt.Sprint(hosts)
			if err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// Envoy Gateway calls a host DRAINING for as long as its pod is there. A dump of all clusters with
// each of fifty polls in a second would keep the main thread busy, by which the workers learn what
// to do.
func TestTheConfigurationIsNotReadWithEachPoll(t *testing.T) {
	answers := planes.Answers(map[string]string{
		"/server_info": `{"state": "LIVE"}`,
		"/clusters?format=json": `{"cluster_statuses": [{"name": "web", "host_statuses": [{
			"address": {"socket_address": {"address": "10.0.0.1", "port_value": 80}},
			"health_status": {"eds_health_status": "DRAINING"}}]}]}`,
		"/config_dump?resource=static_clusters": `{}`, "/config_dump?resource=dynamic_active_clusters": `{}`,
	})
	dumps, r := 0, &reader{}
	read := func() {
		t.Helper()
		if _, err := r.read(func(path string, into any) error {
			if strings.HasPrefix(path, "/config_dump") {
				dumps++
			}
			return answers(path, into)
		}); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		for began := time.Now(); time.Since(began) < time.Second; time.Sleep(20 * time.Millisecond) {
			read()
		}
	})
	if dumps > 20 {
		t.Errorf("%d dumps in a second", dumps)
	}
	// What makes a host Removed is read again within the settle time.
	if dumps < int(2*time.Second/settle) {
		t.Errorf("%d dumps in a second", dumps)
	}
}

// blackhole returns an address on which a connection is never accepted: its queue is full.
func blackhole(t testing.TB, ip string) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: netip.MustParseAddr(ip).As4()}),
		syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	a := netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(bound.(*syscall.SockaddrInet4).Port))
	for {
		conn, err := net.DialTimeout("tcp", a.String(), time.Second)
		if err != nil {
			return a
		}
		// Reset, it stays in the queue, and is none that a gateway could have opened.
		if err := errors.Join(conn.(*net.TCPConn).SetLinger(0), conn.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

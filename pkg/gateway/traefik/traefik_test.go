package traefik

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// proxy is a real Traefik.
type proxy struct {
	t       testing.TB
	url     string
	args    []string
	program *planes.Program
	config  Config
}

func start(t testing.TB, provider ...string) *proxy {
	t.Helper()
	web, admin := planes.FreeAddress(t), planes.FreeAddress(t)
	p := &proxy{
		t: t, url: "http://" + web, config: Config{poll.Config{Population: "shop/traefik", Admin: "http://" + admin}},
		args: append([]string{
			"--entrypoints.web.address=" + web, "--entrypoints.traefik.address=" + admin, "--api.insecure=true",
			"--providers.providersThrottleDuration=100ms", "--global.checkNewVersion=false",
			"--global.sendAnonymousUsage=false",
		}, provider...),
	}
	p.run()
	return p
}

func (p *proxy) run() {
	p.t.Helper()
	path := gatewaytest.LookPath(p.t, "traefik")
	p.program = planes.StartProgram(p.t, strings.TrimPrefix(p.url, "http://"), path, p.args...)
}

func (p *proxy) observe() gateway.Observed {
	p.t.Helper()
	if errs := p.config.Check(); len(errs) > 0 {
		p.t.Fatal(errs)
	}
	g := p.config.Observe(slog.New(slog.DiscardHandler))
	planes.RunGateway(p.t, g)
	return g
}

// harness has Traefik route to a and b, or to b only.
func (p *proxy) harness(a *gatewaytest.Backend, route, unroute func()) *gatewaytest.ObservedHarness {
	return &gatewaytest.ObservedHarness{
		Gateway: p.observe(), Target: a.Addr, Route: route, Unroute: unroute,
		Connect: func() (bool, func(), error) {
			at, end, err := gatewaytest.Stream(p.url)
			return at == a.Addr, end, err
		},
	}
}

// file is the file provider's: its servers are removed at once. clutter adds servers that are no
// addresses.
func file(t testing.TB) (provider string, set func(...*gatewaytest.Backend), clutter func()) {
	dir := t.TempDir()
	clutter = func() {
		planes.Replace(t, filepath.Join(dir, "clutter.yaml"), "http: {services: {clutter: {loadBalancer: {servers: "+
			"[{url: 'http://web.shop'}, {url: 'http://%zz'}, {url: ''}]}}}}")
	}
	return "--providers.file.directory=" + dir, func(all ...*gatewaytest.Backend) {
		var urls []string
		for _, b := range all {
			urls = append(urls, fmt.Sprintf("{url: 'http://%s'}", b.Addr))
		}
		planes.Replace(t, filepath.Join(dir, "web.yaml"), fmt.Sprintf(
			"http: {routers: {web: {rule: 'PathPrefix(`/`)', service: web}}, "+
				"services: {web: {loadBalancer: {servers: [%s]}}}}",
			strings.Join(urls, ",")))
	}, clutter
}

func TestContract(t *testing.T) {
	t.Run("removed", func(t *testing.T) {
		gatewaytest.RunObserved(t, func(t *testing.T) *gatewaytest.ObservedHarness {
			a, b := gatewaytest.StartBackend(t, "127.0.72.1"), gatewaytest.StartBackend(t, "127.0.72.2")
			provider, set, clutter := file(t)
			set(b)
			p := start(t, provider)
			routed(t, p, b)
			h := p.harness(a, func() { set(a, b) }, func() { set(b) })
			h.Clutter = clutter
			return h
		})
	})
	t.Run("fenced", func(t *testing.T) {
		gatewaytest.RunObserved(t, func(t *testing.T) *gatewaytest.ObservedHarness {
			a, b := gatewaytest.StartBackend(t, "127.0.72.3"), gatewaytest.StartBackend(t, "127.0.72.4")
			api := newAPI(t, false, b, a)
			p := start(t, api.provider())
			routed(t, p, b)
			return p.harness(a, func() { api.set(b, a) }, func() { api.set(b) })
		})
	})
}

// routed waits until p sends to b.
func routed(t testing.TB, p *proxy, b *gatewaytest.Backend) {
	t.Helper()
	planes.Until(t, "the proxy routes", func() bool {
		at, end, err := gatewaytest.Stream(p.url)
		end()
		return err == nil && at == b.Addr
	})
}

// A cookie of Traefik's reaches a fenced server. Without this it is Removed, and gets requests
// after SIGTERM.
func TestAStickyCookieReachesAFencedServer(t *testing.T) {
	a, b := gatewaytest.StartBackend(t, "127.0.72.5"), gatewaytest.StartBackend(t, "127.0.72.6")
	api := newAPI(t, true, a, b)
	p := start(t, api.provider())
	w := p.observe().Watch([]netip.AddrPort{netip.AddrPortFrom(a.Addr.Addr(), 0)}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	var cookies []*http.Cookie
	get := func() string {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cookies {
			r.AddCookie(c)
		}
		answer, err := http.DefaultTransport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		at := answer.Header.Get("X-Test-Backend")
		if at == a.Addr.String() && cookies == nil {
			cookies = answer.Cookies()
		}
		return at
	}
	planes.Until(t, "a cookie of a", func() bool { return get() == a.Addr.String() })
	api.set(b)
	planes.Until(t, "it is fenced", func() bool {
		var raw struct {
			Services map[string]service `json:"services"`
		}
		answer, err := http.Get(p.config.Admin + "/api/rawdata")
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if err := json.NewDecoder(answer.Body).Decode(&raw); err != nil {
			t.Fatal(err)
		}
		for _, s := range raw.Services {
			if s.LoadBalancer != nil && len(s.LoadBalancer.Servers) == 2 {
				return s.LoadBalancer.Servers[0].Fenced || s.LoadBalancer.Servers[1].Fenced
			}
		}
		return false
	})
	for range 20 {
		if at := get(); at != a.Addr.String() {
			t.Fatalf("the cookie reaches %s", at)
		}
	}
	if is := w.Reading().State; is != health.Routing {
		t.Errorf("it is %s", is)
	}
}

// Traefik keeps connections to a removed server for 90 s. Without this each deletion waits for the
// Idle bound. A request that is not answered yet is waited for, also on a connection that was used
// before.
func TestPooledConnectionsAreNotWaitedFor(t *testing.T) {
	a, b := gatewaytest.StartBackend(t, "127.0.72.7"), gatewaytest.StartBackend(t, "127.0.72.8")
	provider, set, _ := file(t)
	set(b)
	p := start(t, provider)
	routed(t, p, b)
	set(a)
	routed(t, p, a)
	w := p.observe().Watch([]netip.AddrPort{a.Addr}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	client := gatewaytest.NewHTTPClient(func(_, path string) string { return p.url + path })
	defer client.Close()
	for range 10 {
		if _, err := client.Get(t.Context(), "", "/", 0); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer a.Release()
	wg.Go(func() {
		if _, err := client.Get(t.Context(), "", gatewaytest.HoldPath, 0); err != nil {
			t.Error(err)
		}
	})
	if err := a.WaitHeld(t.Context()); err != nil {
		t.Fatal(err)
	}
	set(b)
	planes.Await(t, w, health.Removed)
	for end := time.Now().Add(2 * quiet); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if r := w.Reading(); r.State != health.Removed || r.NoConnections {
			t.Fatalf("%+v while a request is not answered", r)
		}
	}
	a.Release()
	planes.Await(t, w, health.Idle)
	if r := w.Reading(); r.Connections == 0 {
		t.Errorf("%+v: want a pooled connection", r)
	}
}

// A stopped Traefik does what it was told last once it continues. Another process is another
// generation, whose predecessor's readings prove nothing.
func TestAStoppedTraefikIsUnknown(t *testing.T) {
	a, b := gatewaytest.StartBackend(t, "127.0.72.9"), gatewaytest.StartBackend(t, "127.0.72.10")
	provider, set, _ := file(t)
	set(a, b)
	p := start(t, provider)
	w := p.observe().Watch([]netip.AddrPort{a.Addr}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	p.program.Signal(syscall.SIGSTOP)
	set(b)
	planes.Await(t, w, health.Unknown)
	p.program.Signal(syscall.SIGCONT)
	planes.Await(t, w, health.Idle)
	before := w.Reading().Generation
	p.program.Kill()
	planes.Await(t, w, health.Unknown)
	p.run()
	planes.Await(t, w, health.Idle)
	if w.Reading().Generation == before {
		t.Error("another process has the same generation")
	}
}

// What the API says that a test has no Traefik for. A server that is no longer listed is remembered
// with the way it speaks.
func TestRead(t *testing.T) {
	r := &reader{seen: map[netip.AddrPort]seen{}}
	read := func(raw string) string {
		t.Helper()
		hosts, err := r.read(planes.Answers(map[string]string{"/api/rawdata": raw}))
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, h := range hosts {
			if h.Name != "" {
				all = append(all, h.Name)
				continue
			}
			all = append(all, fmt.Sprint(h.Target, " ", h.State, " ", h.Quiet))
		}
		slices.Sort(all)
		return strings.Join(all, ", ")
	}
	if got, want := read(`{"services": {"api@internal": {},
		"web@kubernetes": {"loadBalancer": {"servers": [{"url": "http://10.0.0.1"},
			{"url": "http://10.0.0.2:80", "fenced": true}]},
			"serverStatus": {"http://10.0.0.1": "DOWN"}},
		"tls@kubernetes": {"loadBalancer": {"servers": [{"url": "https://10.0.0.3"}, {"url": "h2c://[fd00::1]:80"}]}},
		"name@file": {"loadBalancer": {"servers": [{"url": "http://web.shop"}]}},
		"both@file": {"weighted": {"services": [{"name": "web"}]}}},
		"tcpServices": {"db@file": {"loadBalancer": {"servers": [{"address": "10.0.0.4:5432"}]}}}}`),
		"10.0.0.1:80 routing 1s, 10.0.0.2:80 removed 1s, 10.0.0.3:443 routing 0s, 10.0.0.4:5432 routing 0s, "+
			"[fd00::1]:80 routing 0s, http://web.shop"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := read(`{"services": {"api@internal": {},
		"w": {"loadBalancer": {"servers": [{"url": "http://10.0.0.1"}]}}}}`),
		"10.0.0.1:80 routing 1s, 10.0.0.2:80 removed 1s, 10.0.0.3:443 removed 0s, 10.0.0.4:5432 removed 0s, "+
			"[fd00::1]:80 removed 0s"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	// Its providers deliver after its API answers.
	for started, starting := range map[time.Time]bool{time.Now(): true, time.Now().Add(-time.Minute): false} {
		_, err := r.read(planes.Answers(map[string]string{
			"/api/rawdata": `{"services": {"api@internal": {}, "noop@internal": {}}}`,
			"/api/version": `{"Version": "3.7.15", "startDate": "` + started.Format(time.RFC3339Nano) + `"}`,
		}))
		if starting != (err != nil) {
			t.Errorf("started at %s: %v", started, err)
		}
	}
	for _, other := range []string{`{}`, `{"message": "not found"}`} {
		if hosts, err := r.read(planes.Answers(map[string]string{"/api/rawdata": other})); err == nil {
			t.Errorf("%s is read as %v", other, hosts)
		}
	}
}

// api is an API server with one Ingress, its Service, and the EndpointSlice of two pods. Those that
// are not ready are terminating, and answer still.
type api struct {
	t      testing.TB
	server *httptest.Server
	sticky bool
	pods   []*gatewaytest.Backend

	mu      sync.Mutex
	ready   []*gatewaytest.Backend
	version int
	changed chan struct{}
}

func newAPI(t testing.TB, sticky bool, pods ...*gatewaytest.Backend) *api {
	a := &api{t: t, sticky: sticky, pods: pods, ready: pods[:1], version: 1, changed: make(chan struct{})}
	if sticky {
		a.ready = pods
	}
	a.server = httptest.NewServer(a)
	t.Cleanup(func() {
		a.server.CloseClientConnections()
		a.server.Close()
	})
	return a
}

func (a *api) provider() string { return "--providers.kubernetesingress.endpoint=" + a.server.URL }

func (a *api) set(ready ...*gatewaytest.Backend) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ready = ready
	a.version++
	close(a.changed)
	a.changed = make(chan struct{})
}

// object returns the only object of a resource, empty if there is none.
func (a *api) object(resource string) string {
	meta := func(rest string) string {
		return fmt.Sprintf(`"metadata": {"name": "web", "namespace": "shop", "resourceVersion": "%d"%s}`, a.version,
			rest)
	}
	switch resource {
	case "ingresses":
		return `{` + meta("") + `, "spec": {"rules": [{"http": {"paths": [{"path": "/", "pathType": "Prefix",
			"backend": {"service": {"name": "web", "port": {"number": 80}}}}]}}]}}`
	case "services":
		return `{` + meta(fmt.Sprintf(`, "annotations": {"traefik.ingress.kubernetes.io/service.sticky.cookie": "%t"}`,
			a.sticky)) + `, "spec": {"clusterIP": "10.96.0.1", "ports": [{"name": "http", "port": 80}]}}`
	case "endpointslices":
		var all []string
		for i, p := range a.pods {
			ready := slices.Contains(a.ready, p)
			all = append(all, fmt.Sprintf(`{"metadata": {"name": "web-%d", "namespace": "shop", "resourceVersion": "%d",
				"labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
				"ports": [{"name": "http", "port": %d}],
				"endpoints": [{"addresses": ["%s"], "conditions": {"ready": %t, "serving": true, "terminating": %t}}]}`,
				i, a.version, p.Addr.Port(), p.Addr.Addr(), ready, !ready))
		}
		return strings.Join(all, ",")
	}
	return ""
}

// ServeHTTP answers lists, and watches with each change of the EndpointSlices.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	a.mu.Lock()
	version, changed, objects := a.version, a.changed, a.object(resource)
	a.mu.Unlock()
	switch {
	case resource == "version":
		fmt.Fprint(w, `{"major": "1", "minor": "34", "gitVersion": "v1.34.0"}`)
	case r.URL.Query().Get("sendInitialEvents") == "true":
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}`)
	case r.URL.Query().Get("watch") == "":
		fmt.Fprintf(w, `{"metadata": {"resourceVersion": "%d"}, "items": [%s]}`, version, objects)
	default:
		_ = http.NewResponseController(w).Flush()
		since := r.URL.Query().Get("resourceVersion")
		for {
			if fmt.Sprint(version) != since && resource == "endpointslices" {
				var all []json.RawMessage
				if err := json.Unmarshal([]byte("["+objects+"]"), &all); err != nil {
					a.t.Error(err)
				}
				for _, o := range all {
					fmt.Fprintf(w, `{"type": "MODIFIED", "object": %s}`+"\n",
						strings.Replace(string(o), "{",
							`{"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", `, 1))
				}
				_ = http.NewResponseController(w).Flush()
			}
			select {
			case <-r.Context().Done():
				return
			case <-changed:
			}
			a.mu.Lock()
			since = fmt.Sprint(version)
			version, changed, objects = a.version, a.changed, a.object(resource)
			a.mu.Unlock()
		}
	}
}

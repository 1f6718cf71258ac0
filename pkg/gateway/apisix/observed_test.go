package apisix

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var _ gateway.ObservedKind = (*ObservedConfig)(nil)

// watched is the target whose pod is deleted, kept another one.
const watched, kept = "10.0.0.1:80", "10.0.0.2:80"

// stand is a fake that only its control plane writes to, and what the agent reads of it.
type stand struct {
	*testing.T
	f   *fake
	get func(path string, into any) error
	// guard, if it is not nil, changes what was read as if a guard did not exist.
	guard func(s *stand, is *report)
	end   []func()
}

// configs are the ways in which a gateway may know a target. Each has the target, and with out only
// the other one.
var configs = map[string]func(f *fake, out bool){
	"an upstream": func(f *fake, out bool) {
		f.set("upstreams/web", fmt.Sprintf(`{"nodes": %s}`, nodes(out)))
	},
	"a route": func(f *fake, out bool) {
		f.set("routes/web", fmt.Sprintf(`{"uri": "/*", "upstream": {"nodes": %s}}`, nodes(out)))
	},
	"a service": func(f *fake, out bool) {
		f.set("services/web", fmt.Sprintf(`{"upstream": {"nodes": %s}}`, nodes(out)))
	},
	"traffic-split": func(f *fake, out bool) {
		f.set("plugin_configs/web", fmt.Sprintf(`{"plugins": {"traffic-split": {"rules": [{"weighted_upstreams": [
			{"upstream": {"nodes": %s}}]}]}}}`, nodes(out)))
	},
	"discovery.kubernetes": func(f *fake, out bool) {
		f.mu.Lock()
		f.discovered = map[string][]string{"shop/web:http": {watched, kept}}
		if out {
			f.discovered["shop/web:http"] = []string{kept}
		}
		f.mu.Unlock()
		if !out {
			f.set("routes/web", `{"upstream": {"discovery_type": "kubernetes", "service_name": "shop/web:http"}}`)
		}
	},
}

func nodes(out bool) string {
	if out {
		return `{"` + kept + `": 1}`
	}
	return `{"` + watched + `": 1, "` + kept + `": 1}`
}

func newStand(t *testing.T, config string) *stand {
	s := &stand{T: t, f: newFake(t, 2)}
	s.f.observed = true
	configs[config](s.f, false)
	ask := &Gateway{client: s.f.client}
	s.get = func(path string, into any) error {
		_, err := ask.call(t.Context(), "GET", s.f.server.URL+path, nil, into)
		if is, ok := into.(*report); ok && s.guard != nil && err == nil {
			is.trim()
			s.guard(s, is)
		}
		return err
	}
	return s
}

// claim is as that of a lab.
func (s *stand) claim() string {
	hosts, err := read(s.get)
	return claimOf(netip.MustParseAddrPort(watched), hosts, err)
}

func claimOf(target netip.AddrPort, hosts []poll.Host, err error) string {
	if err != nil {
		return "unread"
	}
	is, active := health.Removed, 0
	for _, h := range hosts {
		if h.Target == target {
			is, active = min(is, h.State), active+h.Active
		}
	}
	switch {
	case is < health.Removed:
		return "routed"
	case active > 0:
		return "removed"
	}
	return "idle"
}

func (s *stand) begin(w *worker) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	for id := range w.views {
		_, end := s.f.pick(w, id)
		s.end = append(s.end, end)
	}
}

// reports rewrites what each process reports to send to.
func reports(change func(nodes map[string]int64)) func(*stand, *report) {
	return func(_ *stand, is *report) {
		for _, p := range is.Processes {
			if p.Report != nil {
				change(p.Report.Nodes)
			}
		}
	}
}

// Each way in which an APISIX that the agent does not direct seems to have stopped routing to a
// target, in each way in which it may know the target.
func TestLiesOfAnObservedGateway(t *testing.T) {
	// What the control plane has stored is taken for what processes route by.
	stored := reports(func(nodes map[string]int64) { delete(nodes, watched) })
	for name, c := range map[string]struct {
		// lie happens before the target is taken out.
		lie            func(s *stand)
		guard          func(s *stand, is *report)
		honest, fooled string
		configs        []string // empty: all
	}{
		"01 a worker that does not run": {func(s *stand) {
			s.f.stop(s.f.workers[0])
			s.f.workers[0].at = time.Now().Add(-2 * fresh)
		},
			func(_ *stand, is *report) { onlyFresh(nil, is) }, "unread", "idle", nil},
		"02 08 09 stored, and not applied": {func(s *stand) { s.f.apply = func(*worker, string, view) {} }, stored,
			"routed", "idle", []string{"an upstream", "a route", "a service", "traffic-split"}},
		"03 one worker answers for all": {func(s *stand) {
			behind := s.f.workers[0]
			s.f.apply = func(w *worker, id string, now view) {
				if w != behind {
					w.views[id] = now
				}
			}
		}, func(_ *stand, is *report) { onlyOne(nil, is) }, "routed", "idle",
			[]string{"an upstream", "a route", "a service", "traffic-split"}},
		"04 a retry with the picker of its start": {func(s *stand) { s.begin(s.f.workers[0]) },
			func(_ *stand, is *report) { noCounts(nil, is) }, "removed", "idle", nil},
		"05 a slow upload": {func(s *stand) { s.begin(s.f.workers[1]); s.begin(s.f.workers[1]) },
			func(_ *stand, is *report) { noCounts(nil, is) }, "removed", "idle", nil},
		"06 half a head over a reload": {func(s *stand) { s.f.workers[0].halves = 1; s.f.reload() },
			func(_ *stand, is *report) { onlyNew(nil, is) }, "routed", "idle", nil},
		"what it cannot list": {func(s *stand) { s.f.unlisted = "consul shop" },
			func(_ *stand, is *report) {
				for _, p := range is.Processes {
					if p.Report != nil {
						p.Report.Unlisted = ""
					}
				}
			}, "unread", "idle", nil},
		"the rule does not observe": {func(s *stand) { s.f.observed = false }, func(_ *stand, is *report) {
			for _, p := range is.Processes {
				if p.Report != nil {
					p.Report.Nodes = map[string]int64{}
				}
			}
		}, "unread", "idle", []string{"an upstream"}},
	} {
		if c.configs == nil {
			c.configs = slices.Collect(maps.Keys(configs))
		}
		for _, config := range c.configs {
			t.Run(name+"/"+config, func(t *testing.T) {
				s := newStand(t, config)
				c.lie(s)
				if got := s.claim(); got != "routed" && got != "unread" {
					t.Errorf("while it is routed it is %s", got)
				}
				configs[config](s.f, true)
				if got := s.claim(); got != c.honest {
					t.Errorf("it is %s, want %s", got, c.honest)
				}
				s.guard = c.guard
				if got := s.claim(); got != c.fooled {
					t.Errorf("without the guard it is %s, want %s: the lie shows nothing", got, c.fooled)
				}
				s.guard = nil
				for _, end := range s.end {
					end()
				}
				if got := s.claim(); len(s.end) > 0 && got != "idle" {
					t.Errorf("once the requests have ended it is %s", got)
				}
			})
		}
	}
}

// The watch of discovery.kubernetes has ended: what was removed since then stays routed. The dump
// alone shows it, also if no worker lists the target.
func TestLie12DiscoveryThatIsBlind(t *testing.T) {
	s := newStand(t, "discovery.kubernetes")
	if got := s.claim(); got != "routed" {
		t.Errorf("it is %s", got)
	}
	// The agent's own watch says that the pod is gone, and the guard is the dump.
	s.guard = reports(func(nodes map[string]int64) { delete(nodes, watched) })
	if got := s.claim(); got != "routed" {
		t.Errorf("while the dump has it, it is %s", got)
	}
	s.guard = func(g *stand, is *report) {
		reports(func(nodes map[string]int64) { delete(nodes, watched) })(g, is)
		for _, p := range is.Processes {
			p.Report.Discovers = false
		}
	}
	if got := s.claim(); got != "idle" {
		t.Errorf("without the dump it is %s: the lie shows nothing", got)
	}
	s.guard = nil
	configs["discovery.kubernetes"](s.f, true)
	if got := s.claim(); got != "idle" {
		t.Errorf("once it has seen the removal it is %s", got)
	}
	s.f.kill()
	if got := s.claim(); got != "unread" {
		t.Errorf("it is %s after its end", got)
	}
}

// A gateway keeps connections to a target that is out. They are no requests, so sockets are not
// read.
func TestLie13OfAnObservedGateway(t *testing.T) {
	s := newStand(t, "an upstream")
	a := gatewaytest.StartBackend(t, "127.0.74.3")
	s.f.set("upstreams/web", `{"nodes": {"`+a.Addr.String()+`": 1}}`)
	c := ObservedConfig{poll.Config{Population: "edge/apisix", Admin: s.f.server.URL}}
	g := c.Observe(slog.New(slog.DiscardHandler))
	planes.RunGateway(t, g)
	w := g.Watch([]netip.AddrPort{a.Addr}, func() {})
	defer w.Close()
	planes.Await(t, w, health.Routing)
	answer, err := http.Get(s.f.server.URL + "/?pool=web") // its connection to the target stays
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	s.f.set("upstreams/web", `{"nodes": {"`+kept+`": 1}}`)
	planes.Await(t, w, health.Idle)
}

// Empty lists of Lua are objects, and the Services of all clusters are listed.
func TestGoldenDump(t *testing.T) {
	read := func(text string) []poll.Host {
		t.Helper()
		hosts, err := dump(planes.Answers(map[string]string{"/v1/discovery/kubernetes/dump": text}))
		if err != nil {
			t.Fatal(err)
		}
		return hosts
	}
	hosts := read(`{"config":{},"endpoints":[{"endpoints":[{"name":"default/web","value":
		"{\"http\":[{\"port\":19001,\"host\":\"127.0.0.1\",\"weight\":50}]}"}]}]}`)
	if len(hosts) != 1 || hosts[0].Target.String() != "127.0.0.1:19001" || hosts[0].State != health.Routing {
		t.Errorf("%+v", hosts)
	}
	if hosts = read(`{"config":[],"endpoints":{}}`); len(hosts) > 0 {
		t.Errorf("%+v", hosts)
	}
	hosts = read(`{"endpoints":[{"id":"far","endpoints":[{"name":"a/b","value":
		"{\"http\":[{\"port\":19002,\"host\":\"127.0.0.1\"}]}"}]},{"id":"near","endpoints":{}}]}`)
	if len(hosts) != 1 || hosts[0].Target.String() != "127.0.0.1:19002" {
		t.Errorf("%+v", hosts)
	}
}

// The contract of observed gateways, on the fake with real connections.
func TestObservedContract(t *testing.T) {
	gatewaytest.RunObserved(t, func(t *testing.T) *gatewaytest.ObservedHarness {
		f := newFake(t, 2)
		f.observed = true
		a, b := gatewaytest.StartBackend(t, "127.0.74.1"), gatewaytest.StartBackend(t, "127.0.74.2")
		set := func(nodes string) { f.set("upstreams/web", `{"nodes": {`+nodes+`}}`) }
		both := fmt.Sprintf(`"%s": 1, "%s": 1`, a.Addr, b.Addr)
		one := fmt.Sprintf(`"%s": 1`, b.Addr)
		set(one)
		c := ObservedConfig{poll.Config{Population: "edge/apisix", Admin: f.server.URL}}
		if errs := c.Check(); len(errs) > 0 {
			t.Fatal(errs)
		}
		g := c.Observe(slog.New(slog.DiscardHandler))
		planes.RunGateway(t, g)
		return &gatewaytest.ObservedHarness{
			Gateway: g, Target: a.Addr, Route: func() { set(both) }, Unroute: func() { set(one) },
			Clutter: f.clutter,
			Connect: func() (bool, func(), error) {
				at, end, err := gatewaytest.Stream(f.server.URL)
				return at == a.Addr, end, err
			},
		}
	})
}

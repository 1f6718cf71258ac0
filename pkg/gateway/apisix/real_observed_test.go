package apisix

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// conf is one of APISIX's configuration.
type conf map[string]any

// places are where a configuration may have the nodes: objects by kind. The route is /URI.
var places = map[string]func(uri string, upstream conf) conf{
	"an upstream": func(uri string, upstream conf) conf {
		upstream["id"] = "web"
		return conf{"upstreams": []conf{upstream},
			"routes": []conf{{"id": "web", "uri": uri, "upstream_id": "web"}}}
	},
	"a route": func(uri string, upstream conf) conf {
		return conf{"routes": []conf{{"id": "web", "uri": uri, "upstream": upstream}}}
	},
	"a service": func(uri string, upstream conf) conf {
		return conf{"services": []conf{{"id": "web", "upstream": upstream}},
			"routes": []conf{{"id": "web", "uri": uri, "service_id": "web"}}}
	},
	"traffic-split": func(uri string, upstream conf) conf {
		rules := []conf{{"weighted_upstreams": []conf{{"upstream": upstream, "weight": 1}}}}
		return conf{"routes": []conf{{"id": "web", "uri": uri,
			"plugins":  conf{"traffic-split": conf{"rules": rules}},
			"upstream": conf{"type": "roundrobin", "nodes": conf{nowhere: 1}}}}}
	},
}

// slow is a plug-in that runs after lameduck, and holds requests.
var slow = conf{"serverless-pre-function": conf{"phase": "rewrite",
	"functions": []string{"return function() if ngx.var.arg_slow then ngx.sleep(3) end end"}}}

// other is an APISIX that the agent does not direct. Its configuration is a file, in etcd, or put
// by the API of the stand-alone mode.
type other struct {
	*data
	mode    string
	file    string
	changed int64 // when the file was changed last in seconds, or the version of the configuration
}

func objects(config conf, kind string) []conf {
	all, _ := config[kind].([]conf)
	return all
}

// configure gives APISIX a configuration.
func (s *other) configure(t testing.TB, config conf) {
	t.Helper()
	config["global_rules"] = []conf{{"id": "first", "plugins": slow},
		{"id": "lameduck", "plugins": conf{"lameduck": conf{"observed": true}}}}
	if s.mode == "etcd" {
		for _, kind := range []string{"global_rules", "upstreams", "services", "routes"} {
			for _, object := range objects(config, kind) {
				text, err := json.Marshal(object)
				if err != nil {
					t.Fatal(err)
				}
				s.put(t, fmt.Sprintf("%s/%s", kind, object["id"]), string(text))
			}
		}
		return
	}
	s.changed = max(s.changed+1, time.Now().Unix())
	if s.mode == "api" {
		for _, kind := range slices.Collect(maps.Keys(config)) {
			config[kind+"_conf_version"] = s.changed
		}
	}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if s.mode == "file" { // JSON is YAML. APISIX compares the time in seconds
		next := s.file + ".next"
		at := time.Unix(s.changed, 0)
		if err := os.WriteFile(next, append(text, "\n#END\n"...), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(next, at, at); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, s.file); err != nil {
			t.Fatal(err)
		}
		return
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.admin+"/apisix/admin/configs",
		bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Digest", fmt.Sprint(s.changed))
	r.Close = true // a connection that is kept may belong to a worker that is stopped
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusAccepted {
		t.Fatal(answer.Status)
	}
}

// newObserved begins a case. change makes APISIX route to the first target, or not.
func newObserved(t *testing.T, s *other, change func(c *real, routed bool)) *real {
	c := listen(t, s.data)
	c.claim = func(k health.Key) string {
		hosts, err := read(func(path string, into any) error {
			_, err := c.g.call(c.Context(), http.MethodGet, s.control+path, nil, into)
			return err
		})
		return claimOf(k.Target.Addr, hosts, err)
	}
	c.put = func(want health.Want, proved bool) {
		change(c, want == health.WantRouted)
		late := time.Now().Add(2 * time.Second)
		planes.Until(c, "the workers that run have loaded it", func() bool {
			if c.again != nil && time.Now().After(late) {
				c.again()
				late = time.Now().Add(2 * time.Second)
			}
			// The stand-alone API tells the workers through the first one, which may be the one
			// that is stopped.
			blocked := s.mode == "api" && !proved && time.Now().After(late) && c.claim(c.gone) == "unread"
			return blocked || c.loaded(want == health.WantRouted)
		})
		if proved && want == health.WantRouted {
			c.want("routed")
		} else if proved {
			c.want("removed", "idle")
		}
	}
	c.put(health.WantRouted, true)
	return c
}

// loaded reports whether each process that runs and takes new requests routes to the target, or
// does not.
func (c *real) loaded(routed bool) bool {
	r, err := c.g.read(c.Context())
	if err != nil {
		return false
	}
	n := 0
	for _, p := range r.Processes {
		if p.Report == nil || p.old() || r.Now-p.Report.At > fresh.Seconds() {
			continue
		}
		out, listed := p.Report.Nodes[c.gone.Target.Addr.String()]
		if (listed && out == 0) != routed {
			return false
		}
		n++
	}
	return n > 0
}

// in changes the nodes in a place of the configuration.
func (s *other) in(place string) func(c *real, routed bool) {
	return func(c *real, routed bool) {
		nodes := conf{c.left.Target.Addr.String(): 1}
		if routed {
			nodes[c.gone.Target.Addr.String()] = 1
		}
		s.configure(c, places[place]("/"+string(c.gone.Pool),
			conf{"type": "roundrobin", "nodes": nodes, "retries": 2}))
	}
}

// Ways in which a real APISIX is late whose configuration is not the agent's.
func TestRealObserved(t *testing.T) {
	needReal(t)
	for mode, number := range map[string]string{"etcd": "1", "file": "3", "api": "4"} {
		t.Run(mode, func(t *testing.T) {
			s := startOther(t, mode, number)
			for name, c := range map[string]struct {
				place string
				run   func(c *real)
			}{
				"01 an upstream under load":               {"an upstream", realLoad},
				"02 a worker that does not run":           {"an upstream", realStopped},
				"03 a route under load":                   {"a route", realLoad},
				"04 a retry with the picker of its start": {"a route", realRetry},
				"05 a slow upload":                        {"traffic-split", realUpload},
				"06 half a head over a reload":            {"a service", realReload},
				"07 a service under load":                 {"a service", realLoad},
				"08 traffic-split under load":             {"traffic-split", realLoad},
				"09 a plug-in that waits":                 {"traffic-split", realWait},
			} {
				t.Run(name, func(t *testing.T) { c.run(newObserved(t, s, s.in(c.place))) })
			}
		})
	}
}

func startOther(t *testing.T, mode, number string, more ...string) *other {
	t.Helper()
	d := &data{dir: os.Getenv("LAMEDUCK_APISIX"), number: number}
	words := d.run(t, "start", more...)
	if len(words) != 4 {
		t.Fatalf("start prints %q, want four words: admin, control, data and file", words)
	}
	t.Cleanup(func() { d.run(t, "stop") })
	d.admin, d.control, d.port = words[0], words[1], words[2]
	if mode == "etcd" {
		// Its Admin API answers while a worker of the first one is stopped.
		d.admin = startReal(t, "2").admin
		t.Cleanup(func() {
			for _, path := range []string{"routes/web", "services/web", "upstreams/web", "global_rules/first"} {
				d.put(t, path, "")
			}
		})
	}
	return &other{data: d, mode: mode, file: words[3]}
}

// realWait has requests in a plug-in that waits before the upstream is chosen.
func realWait(c *real) {
	for range 8 {
		conn, _ := c.dial()
		_ = c.send(conn, nil, "GET /"+string(c.gone.Pool)+"?slow=1 HTTP/1.1\r\nHost: shop\r\n\r\n")
	}
	planes.Until(c, "requests wait", func() bool { return c.requests() == 8 })
	before := c.got[c.gone].Load()
	c.remove(true)
	c.want("removed")
	c.until("idle")
	if c.got[c.gone].Load() == before {
		c.Error("no request went to it after it was removed: the case shows nothing")
	}
	c.quiet()
}

// endpoints is an API server that has an EndpointSlice for each target.
type endpoints struct {
	*httptest.Server
	mu      sync.Mutex
	slices  []conf
	n       int // names a port
	changed chan struct{}
	blind   bool // it does not answer, and has ended its watches
}

func startEndpoints(t *testing.T) *endpoints {
	e := &endpoints{slices: []conf{}, changed: make(chan struct{})}
	e.Server = httptest.NewServer(e)
	t.Cleanup(func() {
		e.set(nil, true)
		e.Close()
	})
	return e
}

func (e *endpoints) set(slices []conf, blind bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.slices, e.blind, e.changed = slices, blind, make(chan struct{})
}

func (e *endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for {
		e.mu.Lock()
		slices, changed, blind := e.slices, e.changed, e.blind
		e.mu.Unlock()
		if blind {
			panic(http.ErrAbortHandler)
		}
		if r.URL.Query().Get("watch") == "" {
			_ = json.NewEncoder(w).Encode(conf{"kind": "EndpointSliceList", "items": slices,
				"metadata": conf{"resourceVersion": "1"}})
			return
		}
		for _, slice := range slices {
			text, _ := json.Marshal(slice)
			fmt.Fprintf(w, "{\"type\":\"MODIFIED\",\"object\":%s}\n", text)
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// hold makes the first target ready, or not. A worker may keep the target although discovery has
// dropped it, until the Service changes again.
func (e *endpoints) hold(c *real, routed bool) {
	c.again = func() {
		if !routed {
			c.want("routed")
			c.Log("a worker keeps what discovery has dropped")
			c.stillSent("no process sends to it, and it is routed")
		}
		e.n++ // a port that nothing refers to changes
		e.hold(c, routed)
	}
	var all []conf
	for _, k := range []health.Key{c.gone, c.left} {
		addr := k.Target.Addr
		all = append(all, conf{
			"metadata": conf{"namespace": "shop", "name": k.Target.UID, "resourceVersion": "1",
				"labels": conf{"kubernetes.io/service-name": "web"}},
			"ports": []conf{{"name": "http", "port": addr.Port()}},
			"endpoints": []conf{{"addresses": []string{addr.Addr().String()},
				"conditions": conf{"ready": routed || k == c.left}}},
		})
	}
	all = append(all, conf{
		"metadata": conf{"namespace": "shop", "name": "other", "resourceVersion": "1",
			"labels": conf{"kubernetes.io/service-name": "web"}},
		"ports": []conf{{"name": fmt.Sprint("other-", e.n), "port": 9}}, "endpoints": []conf{{
			"addresses": []string{"127.0.0.1"}, "conditions": conf{"ready": true}}},
	})
	e.set(all, false)
}

// discovery.kubernetes of a real APISIX, with an API server that only has EndpointSlices.
func TestRealDiscovery(t *testing.T) {
	needReal(t)
	e := startEndpoints(t)
	s := startOther(t, "file", "5", e.Listener.Addr().String())
	s.configure(t, conf{"routes": []conf{{"id": "web", "uri": "/lameduck-*", "upstream": conf{"type": "roundrobin",
		"discovery_type": "kubernetes", "service_name": "shop/web:http", "retries": 2}}}})
	for _, c := range []struct {
		name string
		run  func(c *real)
	}{
		{"01 a removal under load", realLoad},
		{"02 a worker that does not run", realStopped},
		{"03 a retry with the picker of its start", realRetry},
		{"04 a slow upload", realUpload},
		{"05 a reload", realReload},
		{"06 a watch that has ended", func(c *real) {
			e.set(nil, true) // and the target is removed meanwhile
			for began := time.Now(); time.Since(began) < 2*time.Second; time.Sleep(100 * time.Millisecond) {
				c.want("routed")
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(newObserved(t, s, e.hold)) })
	}
}

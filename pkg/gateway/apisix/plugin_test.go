package apisix

import (
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

const plugin = "../../../gateways/apisix/lameduck.lua"

// The plug-in runs in APISIX only. Here it is compiled. Needed: lua5.1 or luajit, packages of those
// names in Debian.
func TestLuaCompiles(t *testing.T) {
	runLua(t, []string{"luac5.1", "-p", plugin}, []string{"luajit", "-bl", plugin})
}

// What the plug-in reports where it observes, beside stand-ins for APISIX's modules.
func TestLuaObserves(t *testing.T) {
	args := []string{"testdata/observe.lua", plugin}
	runLua(t, append([]string{"lua5.1"}, args...), append([]string{"luajit"}, args...))
}

// runLua runs the first of some commands that is installed.
func runLua(t *testing.T, commands ...[]string) {
	t.Helper()
	for _, args := range commands {
		if path, err := exec.LookPath(args[0]); err == nil {
			if out, err := exec.Command(path, args[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", args, err, out)
			}
			return
		}
	}
	gatewaytest.Missing(t, "lua5.1 or luajit", exec.ErrNotFound)
}

// Answers of APISIX 3.18.0, as it gave them.
func TestGoldenAnswers(t *testing.T) {
	l := newLab(t)
	l.f.set("upstreams/web", `{"nodes":{"10.0.0.1:80":1,"10.0.0.2:80":1},"type":"roundrobin","update_time":1795334772,
		"create_time":1795334700,"scheme":"http","pass_host":"pass","hash_on":"vars","labels":{"lameduck":"agent",
		"10.0.0.1:80@gone":"routed","[fd00::1]:80@six":"removed/1795334772000/gateway-7d9f"}}`)
	u, err := l.g.upstream(t.Context(), "web")
	if err != nil || len(u.nodes) != 2 || u.version != l.f.index || u.refused != nil {
		t.Fatalf("%+v, %v", u, err)
	}
	six := key("six", 1).Target
	_ = six.Addr.UnmarshalText([]byte("[fd00::1]:80"))
	until, agent := u.labels[six].parse()
	if until.UnixMilli() != 1795334772000 || agent != "gateway-7d9f" || !u.routes(l.gone.Target) || u.routes(six) {
		t.Errorf("%+v", u)
	}
	list := nodesOf([]byte(`[{"host":"127.0.0.1","port":19001,"weight":1},{"host":"::1","port":9,"weight":0}]`))
	if len(list) != 2 || list["127.0.0.1:19001"] != 1 || list["[::1]:9"] != 0 {
		t.Errorf("%v", list)
	}
	var r report
	if err := json.Unmarshal([]byte(`{"now":1795334780.1,"master":"21250","started":"900","picks":
		{"21260 web 73":1,"21261 web 74":1,"21261 api 3":5},"processes":{"21260":{"title":
		"nginx: worker process is shutting down","started":"901","report":{"at":1795334778.2,"counting":true,
		"upstreams":{"web":{"version":73,"nodes":
		{"10.0.0.1:80":1}}}}},"21348":{"title":"nginx: worker process","started":"950","report":{"at":1795334780.05,
		"counting":true,"upstreams":{}}}}}`), &r); err != nil {
		t.Fatal(err)
	}
	if err := r.missing(); err != nil {
		t.Error(err)
	}
	if r.active("web", 74) != 1 || r.active("web", 75) != 2 || r.active(health.Pool("api"), 75) != 5 {
		t.Errorf("%v", r.Picks)
	}
	version, nodes := r.Processes["21260"].of("web")
	if version != 73 || nodes["10.0.0.1:80"] != 1 || !r.Processes["21260"].old() || r.Processes["21348"].old() {
		t.Errorf("%+v", r.Processes["21260"])
	}
	if got := r.generation(); got != "21260@901 21348@950 apisix 21250@900" {
		t.Error(got)
	}
}

func TestCheck(t *testing.T) {
	good := Config{Admin: "http://127.0.0.1:9180", Control: "http://127.0.0.1:9090",
		Upstreams: []Upstream{{Upstream: "web", Service: "shop/web"}}}
	if errs := good.Check(); len(errs) > 0 {
		t.Error(errs)
	}
	for name, change := range map[string]func(c *Config){
		"no admin":          func(c *Config) { c.Admin = "" },
		"no proof":          func(c *Config) { c.Control = "" },
		"another pod":       func(c *Config) { c.Control = "http://10.0.0.1:9090" },
		"a name":            func(c *Config) { c.Control = "http://apisix:9090" },
		"no upstream":       func(c *Config) { c.Upstreams = nil },
		"an id with spaces": func(c *Config) { c.Upstreams = []Upstream{{Upstream: "a b"}} },
		"an id twice":       func(c *Config) { c.Upstreams = append(c.Upstreams, c.Upstreams[0]) },
	} {
		c := good
		change(&c)
		if errs := c.Check(); len(errs) != 1 {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

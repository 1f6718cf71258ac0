package haproxy

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/pkg/health"
)

func TestConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "servers.cfg")
	owned := func(change func(*Backend)) Config {
		b := Backend{Backend: "b"}
		change(&b)
		b.Lines = append(b.Lines, needed...)
		return Config{MasterSocket: "/run/m.sock", ServersFile: file, Backends: []Backend{b}}
	}
	line := func(l string) Config { return owned(func(b *Backend) { b.Lines = []string{l} }) }
	options := func(o string) Config { return owned(func(b *Backend) { b.ServerOptions = o }) }
	for _, c := range []struct {
		name string
		cfg  Config
		want []string // parts of the error; none means valid
	}{
		{"a plain one", owned(func(*Backend) {}), nil},
		{"all fields", owned(func(b *Backend) {
			b.Lines = []string{"balance leastconn",
				`http-response set-header Strict-Transport-Security "max-age=1; includeSubDomains"`,
				"option redispatch"}
			b.ServerOptions = "check inter 2s maxconn 50 sni str(a.example)"
		}), nil},
		{"no socket", Config{Backends: []Backend{{Backend: "b"}}}, []string{"Socket"}},
		{"socket too long", Config{MasterSocket: "/" + strings.Repeat("x", 110),
			Backends: []Backend{{Backend: "b"}}}, []string{"Socket", "107"}},
		{"no backends", Config{MasterSocket: "/s"}, []string{"backends"}},
		{"backend with a line break", owned(func(b *Backend) { b.Backend = "b\nglobal" }),
			[]string{"backends[0].backend", `b\nglobal`}},
		{"backend with a semicolon", owned(func(b *Backend) { b.Backend = "b;reload" }),
			[]string{"backends[0].backend", "b;reload"}},
		{"backend with a slash", owned(func(b *Backend) { b.Backend = "b/s" }), []string{"b/s"}},
		{"backend twice", Config{MasterSocket: "/s", ServersFile: file,
			Backends: []Backend{{Backend: "b"}, {Backend: "b"}}},
			[]string{"backends[1].backend", `"b"`}},
		{"no file", Config{MasterSocket: "/s",
			Backends: []Backend{{Backend: "b"}}}, []string{"serversFile"}},
		{"nothing that a section needs", Config{MasterSocket: "/s", ServersFile: file,
			Backends: []Backend{{Backend: "b",
				Lines: []string{"timeout server 1s", "modes", "timeout  connected 1s"}}}},
			[]string{`backends[0].lines "mode"`, `backends[0].lines "timeout connect"`, "inherits nothing"}},
		{"line with a line break", line("balance random\nserver x 1.2.3.4:5"), []string{"lines[0]"}},
		{"line with a carriage return", line("balance random\r"), []string{"lines[0]"}},
		{"static balance", line("balance static-rr"), []string{"lines", "static-rr", "roundrobin"}},
		{"hashed without a ring", line("balance hdr(x-user) use_domain_only"),
			[]string{"lines", "hash-type consistent"}},
		{"hashed on a ring", owned(func(b *Backend) {
			b.Lines = []string{"balance source", "hash-type consistent"}
		}), nil},
		{"empty line", line("  "), []string{"lines[0]"}},
		{"line that begins a section", line("  backend evil"), []string{"lines[0]", "section"}},
		{"line that begins a section, quoted", line(`"backend" evil`), []string{"lines[0]", "quoted"}},
		{"line that begins a section, escaped", line(`b\ackend evil`), []string{"lines[0]", "escaped"}},
		{"server line", line("server s 1.2.3.4:5"), []string{"lines[0]", "server"}},
		{"default-server", line("default-server check"), []string{"serverOptions"}},
		{"persist", line("option persist"), []string{"maintenance"}},
		{"force-persist", line("force-persist if TRUE"), []string{"maintenance"}},
		{"directive", line(".if defined(X)"), []string{"lines[0]"}},
		{"options with a semicolon", options("check;reload"), []string{"serverOptions", "';'"}},
		{"options with a line break", options("check\nglobal"), []string{"serverOptions"}},
		{"options with a payload", options("check <<"), []string{"serverOptions"}},
		{"options with a comment", options("check # x"), []string{"serverOptions"}},
		{"agent-check", options("check agent-check agent-port 1"), []string{"agent-check"}},
		{"on-marked-down", options("on-marked-down shutdown-sessions"), []string{"on-marked-down"}},
		{"too many words", options(strings.Repeat("a ", 60)), []string{"48 words"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			os.Remove(file)
			_, err := New(c.cfg)
			if (err != nil) != (c.want != nil) {
				t.Fatalf("error %v", err)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q is not in %q", part, err)
				}
			}
			if _, err := os.Stat(file); c.want != nil && err == nil {
				t.Error("the file was written for a configuration that is refused")
			}
		})
	}
}

func TestServersFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "servers.cfg")
	cfg := Config{MasterSocket: "/nowhere", ServersFile: file, Backends: []Backend{
		{Backend: "web", Lines: append(slices.Clone(needed), "balance leastconn"),
			ServerOptions: " check  inter 2s "},
		{Backend: "api", Lines: needed},
	}}
	g, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	steps := func(list ...health.Op) (s []*step) {
		for _, op := range list {
			b, name, err := g.resolve(op.Key)
			if err != nil {
				t.Fatal(err)
			}
			s = append(s, &step{op: op, backend: b, name: name, errs: map[int]error{}})
		}
		return s
	}
	if err := g.persist(steps(routed("web", "u1", "10.0.0.1:80"), routed("web", "u2", "[fd00::1]:80"),
		routed("api", "u4", "10.0.0.4:80"), removed("api", "u4", "10.0.0.4:80"))); err != nil {
		t.Fatal(err)
	}
	want := fileHead + `
backend web from lameduck-inherits-nothing
    mode http
    timeout connect 2s
    timeout server 30s
    balance leastconn
    server ld-u1-10.0.0.1-80 10.0.0.1:80 check inter 2s pool-max-conn -1 pool-purge-delay 5s
    server ld-u2-fd00::1-80 [fd00::1]:80 check inter 2s pool-max-conn -1 pool-purge-delay 5s

backend api from lameduck-inherits-nothing
    mode http
    timeout connect 2s
    timeout server 30s
`
	got, err := os.ReadFile(file)
	if diff := cmp.Diff(want, string(got)); diff != "" || err != nil {
		t.Fatalf("%v\n%s", err, diff)
	}

	// A new agent keeps the servers, also those of a section whose lines changed.
	cfg.Backends[0].Lines = append(slices.Clone(needed), "balance random")
	cfg.Backends[0].ServerOptions = ""
	again, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(g.wanted, again.wanted); diff != "" {
		t.Errorf("kept servers:\n%s", diff)
	}
	got, _ = os.ReadFile(file)
	if !strings.Contains(string(got), "balance random\n    server ld-u1-10.0.0.1-80 10.0.0.1:80 pool-max-conn -1 "+
		"pool-purge-delay 5s\n") {
		t.Errorf("the new lines are not written:\n%s", got)
	}

	// A file that is not the agent's is not overwritten.
	for _, foreign := range []string{"global\n", "backend b\n server s 1.2.3.4:5\n",
		"backend b\n server ld-u-1.2.3.4-5 1.2.3.4:6\n", "backend b\nfrontend f\n", "backend b\nbackend b\n",
		"defaults\n", "defaults " + own + "\n mode http\n", "backend b\ndefaults " + own + "\n"} {
		if err := os.WriteFile(file, []byte(foreign), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := New(cfg); !errors.Is(err, kindFile) {
			t.Errorf("%q: %v", foreign, err)
		}
		if got, _ := os.ReadFile(file); string(got) != foreign {
			t.Errorf("%q was overwritten", foreign)
		}
	}
}

// HAProxy itself must take what is written.
func TestServersFileIsValid(t *testing.T) {
	p := newProxy(t, `
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
frontend web
    bind 127.0.0.1:%PORT%
    default_backend agent
`, Backend{Backend: "agent",
		Lines: []string{"balance leastconn"}, ServerOptions: "check inter 2s maxconn 50"})
	g := p.gateway()
	w := wanted{"agent": {}}
	for _, a := range []string{"10.0.0.1:80", "[fd00::1]:8080", "[::ffff:1.2.3.4]:1"} {
		name, err := serverName(health.Target{UID: "4a8c1f7e-0000-1111-2222-333344445555",
			Addr: netip.MustParseAddrPort(a)})
		if err != nil {
			t.Fatal(err)
		}
		w["agent"][name] = true
	}
	if err := writeFile(p.cfg.ServersFile, render(g.backends, w)); err != nil {
		t.Fatal(err)
	}
	out, err := p.check()
	if err != nil || strings.Contains(out, "WARNING") || strings.Contains(out, "ALERT") {
		t.Errorf("%v\n%s", err, out)
	}
}

func FuzzServersFile(f *testing.F) {
	f.Add("u1", "10.0.0.1:80", "u2", "[fd00::1]:80")
	f.Fuzz(func(t *testing.T, uid1, addr1, uid2, addr2 string) {
		backends := []Backend{{Backend: "a", Lines: []string{"balance random"}, ServerOptions: "check"},
			{Backend: "b"}}
		w := wanted{"a": {}, "b": {}}
		for _, x := range [][3]string{{"a", uid1, addr1}, {"b", uid2, addr2}, {"b", uid1, addr2}} {
			addr, err := netip.ParseAddrPort(x[2])
			if err != nil {
				return
			}
			name, err := serverName(health.Target{UID: health.UID(x[1]), Addr: addr})
			if err != nil {
				return
			}
			w[x[0]][name] = true
		}
		back, err := parseFile(render(backends, w))
		if diff := cmp.Diff(w, back); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
	})
}

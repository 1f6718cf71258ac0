package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/cli"
)

// good is a configuration file in which ${DIR} is a directory with the files it names.
const good = `
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators:
  service: lameduck/agents
  port: agents
  serverName: lameduck
  caFile: ${DIR}/ca.crt
  tokenFile: ${DIR}/token
gateway:
  haproxy:
    masterSocket: /run/haproxy/master.sock
    serversFile: ${DIR}/servers.cfg
    backends:
    - backend: web
      service: shop/web
      port: http
      lines: ["http-request deny if { path_reg ^/admin(/.*)?$ }", "http-request set-header X-Was $1",
        mode http, timeout connect 1s, timeout server 30s]
    - backend: api
      service: shop/api
      lines: [mode http, timeout connect 1s, timeout server 30s]
healthTimeout: 1.5s
`

// environment returns a directory with what good names, and the environment in which it is ${DIR}.
func environment(t *testing.T) (dir string, getenv func(string) string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"ca.crt", "token", "kubeconfig"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("nothing"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func(name string) string {
		return map[string]string{"DIR": dir, "KUBECONFIG": filepath.Join(dir, "kubeconfig")}[name]
	}
}

func write(t *testing.T, dir, content string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// mustRefuse runs the agent and checks that it ends at once as a wrong use, before it says or
// listens to anything, with an error that holds each of want.
func mustRefuse(t *testing.T, args []string, getenv func(string) string, want ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var stderr bytes.Buffer
	err := run(ctx, args, getenv, io.Discard, &stderr)
	if !errors.Is(err, cli.ErrUsage) {
		t.Fatalf("run(%q) returns %v, want bad usage", args, err)
	}
	if stderr.Len() > 0 {
		t.Errorf("it went on far enough to say %s", stderr.String())
	}
	for _, text := range want {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error %q does not name %q", err, text)
		}
	}
}

func TestBadFlagsAreNamed(t *testing.T) {
	dir, getenv := environment(t)
	config := "--config=" + write(t, dir, good)
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"unknown flag":       {[]string{"--no-such-flag"}, []string{"no-such-flag"}},
		"an argument":        {[]string{config, "stray"}, []string{`"stray"`}},
		"log level":          {[]string{config, "--log-level=loud"}, []string{"log-level", `"loud"`}},
		"no metrics address": {[]string{config, "--metrics-address="}, []string{"--metrics-address", `""`}},
		"metrics address, no port": {[]string{config, "--metrics-address=localhost"},
			[]string{"--metrics-address", `"localhost"`}},
		"metrics address, port": {[]string{config, "--metrics-address=:99999"},
			[]string{"--metrics-address", `":99999"`}},
		"metrics address, name": {[]string{config, "--metrics-address=:metrics"},
			[]string{"--metrics-address", `":metrics"`}},
		"no such kubeconfig": {[]string{config, "--kubeconfig=/no/such/file"},
			[]string{"--kubeconfig", `"/no/such/file"`}},
		"no such config":        {[]string{"--config=/no/such/file"}, []string{"--config", `"/no/such/file"`}},
		"config is a directory": {[]string{"--config=" + dir}, []string{"--config", dir}},
	} {
		t.Run(name, func(t *testing.T) { mustRefuse(t, c.args, getenv, c.want...) })
	}
}

func TestBadFieldsAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		old, new string
		want     []string
	}{
		"not YAML": {good, "a: b: c", nil},
		"empty":    {good, "", []string{"apiVersion", `""`}},
		"version": {"lameduck.io/v1alpha1", "lameduck.io/v9",
			[]string{"apiVersion", `"lameduck.io/v9"`}},
		"kind":                       {"AgentConfiguration", "Pod", []string{"kind", `"Pod"`}},
		"unknown field":              {"kind:", "colour: red\nkind:", []string{`"colour"`}},
		"unknown field of a backend": {"      port: http", "      own: true", []string{`"gateway.haproxy.backends[0].own"`}},
		"field given twice":          {"kind:", "apiVersion: x\nkind:", []string{`"apiVersion"`}},
		"type":                       {"port: http", "port: [perhaps]", []string{"port"}},
		"health timeout": {"healthTimeout: 1.5s", "healthTimeout: -1s",
			[]string{"healthTimeout -1s: must be 1s to 1h"}},
		"health timeout, no time": {"healthTimeout: 1.5s", "healthTimeout: soon",
			[]string{"healthTimeout", `"soon"`}},
		"no such state folder": {"healthTimeout: 1.5s", "stateDir: /no/such/dir",
			[]string{"stateDir", `"/no/such/dir"`}},
		"state folder is a file": {"healthTimeout: 1.5s", "stateDir: ${DIR}/token",
			[]string{"stateDir", "/token", "directory"}},
		"health timeout, no unit":  {"1.5s", "15", []string{"healthTimeout"}},
		"variable that is not set": {"agents\n", "${NOWHERE}\n", []string{`"NOWHERE"`}},
		"coordinators' service":    {"lameduck/agents", "agents", []string{"coordinators.service", `"agents"`}},
		"no coordinators": {"service: lameduck/agents", "service: ''",
			[]string{"coordinators", "service", "addresses"}},
		"coordinators twice": {"  port: agents", "  addresses: ['https://10.0.0.1:9444']",
			[]string{"service", `"lameduck/agents"`, `"https://10.0.0.1:9444"`}},
		"address without TLS": {"service: lameduck/agents", "addresses: ['http://10.0.0.1:9444']",
			[]string{"coordinators.addresses[0]", `"http://10.0.0.1:9444"`}},
		"address with a path": {"service: lameduck/agents", "addresses: ['https://10.0.0.1:9444/']",
			[]string{"coordinators.addresses[0]", `"https://10.0.0.1:9444/"`}},
		"address with a query": {"service: lameduck/agents", "addresses: ['https://10.0.0.1:9444?a=b']",
			[]string{"coordinators.addresses[0]", `"https://10.0.0.1:9444?a=b"`}},
		"address with a user": {"service: lameduck/agents", "addresses: ['https://me@10.0.0.1:9444']",
			[]string{"coordinators.addresses[0]", `"https://me@10.0.0.1:9444"`}},
		"address without host": {"service: lameduck/agents", "addresses: ['https://:9444']",
			[]string{"coordinators.addresses[0]", `"https://:9444"`}},
		"server name": {"serverName: lameduck", "serverName: ''",
			[]string{"coordinators.serverName", `""`}},
		"CA file": {"caFile: ${DIR}/ca.crt", "caFile: /no/ca",
			[]string{"coordinators.caFile", `"/no/ca"`}},
		"no CA":    {"caFile: ${DIR}/ca.crt", "", []string{"caFile", "caConfigMap"}},
		"CA twice": {"  port: agents", "  caConfigMap: a/b", []string{"caFile", `"a/b"`}},
		"CA's ConfigMap": {"caFile: ${DIR}/ca.crt", "caConfigMap: ca",
			[]string{"coordinators.caConfigMap", `"ca"`}},
		"token file": {"tokenFile: ${DIR}/token", "tokenFile: /no/token",
			[]string{"coordinators.tokenFile", `"/no/token"`}},
		"no gateway": {good[strings.Index(good, "gateway:"):strings.Index(good, "healthTimeout")],
			"", []string{"gateway", "haproxy, kubeProxy"}},
		"no backends": {good[strings.Index(good, "    backends:"):strings.Index(good, "healthTimeout")],
			"", []string{"gateway.haproxy.backends"}},
		"no socket": {"masterSocket: /run/haproxy/master.sock", "masterSocket: ''",
			[]string{"gateway.haproxy.masterSocket", `""`}},
		"no servers file": {"serversFile: ${DIR}/servers.cfg", "serversFile: ''",
			[]string{"gateway.haproxy.serversFile", `""`}},
		"servers file in nowhere": {"serversFile: ${DIR}/servers.cfg", "serversFile: /no/such/dir/servers.cfg",
			[]string{"/no/such/dir"}},
		"backend's service": {"service: shop/api", "service: shop/api/v1",
			[]string{"gateway.haproxy.backends[1].service", `"shop/api/v1"`}},
		"no name of a backend": {"backend: api", "backend: ''", []string{"gateway.haproxy.backends[1].backend", `""`}},
		"bad name of a backend": {"backend: api", "backend: a pi",
			[]string{"gateway.haproxy.backends[1].backend", `"a pi"`}},
		"backend given twice": {"backend: api", "backend: web",
			[]string{"gateway.haproxy.backends[1].backend", `"web"`}},
		"line": {"http-request set-header X-Was $1", "server x 10.0.0.1",
			[]string{"gateway.haproxy.backends[0].lines[1]", `"server x 10.0.0.1"`}},
	} {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(good, c.old) {
				t.Fatalf("the good file has no %q", c.old)
			}
			dir, getenv := environment(t)
			path := write(t, dir, strings.Replace(good, c.old, c.new, 1))
			mustRefuse(t, []string{"--config", path}, getenv, append(c.want, "--config", path)...)
		})
	}
}

// What is wrong in the file of an agent beside a replica that can only be observed.
func TestBadFilesOfReplicasAreNamed(t *testing.T) {
	dir, getenv := environment(t)
	head := good[:strings.Index(good, "gateway:")]
	for name, c := range map[string]struct {
		file string
		want []string
	}{
		"nothing": {head + "gateway: {envoy: {}}", []string{`gateway.envoy.population ""`, `gateway.envoy.admin ""`,
			"http://127.0.0.1:PORT or unix:///PATH"}},
		"kernel": {head + "gateway: {kernel: {services: [{service: web}, {service: shop/a, http1Quiet: 1ms}]}}",
			[]string{"gateway.kernel.podUID", `gateway.kernel.services[0].service "web"`,
				"gateway.kernel.services[1].http1Quiet"}},
		"another pod's": {head + "gateway: {traefik: {population: a, admin: 'http://traefik.shop:8080'}}",
			[]string{`gateway.traefik.admin "http://traefik.shop:8080"`}},
		"a Service": {head + "gateway: {envoy: {population: a, admin: 'unix:///a', services: [shop/web, web]}}",
			[]string{`gateway.envoy.services[1].service "web"`}},
		"health": {head + "gateway: {envoy: {population: a, admin: 'unix:///a'}}\nhealth: {minHealthyPercent: 5}",
			[]string{"health: ", "gateway.envoy"}},
		"hooks": {head + "gateway: {traefik: {population: a, admin: 'http://[::1]:1'}}\nwaitAddresses: ['127.0.0.1:1']",
			[]string{"waitAddresses", "gateway.traefik"}},
		"no coordinators": {"apiVersion: lameduck.io/v1alpha1\nkind: AgentConfiguration\n" +
			"gateway: {envoy: {population: a, admin: 'unix:///a'}}", []string{"coordinators", "gateway.envoy"}},
	} {
		t.Run(name, func(t *testing.T) {
			mustRefuse(t, []string{"--config", write(t, dir, c.file)}, getenv, c.want...)
		})
	}
	// No node, and no hooks.
	o, err := parse([]string{"--config", write(t, dir, head+"gateway: {envoy: {population: a, admin: 'unix:///a'}}")},
		getenv, io.Discard)
	if err != nil || len(o.file.WaitAddresses) > 0 {
		t.Errorf("%v, hooks at %v", err, o.file.WaitAddresses)
	}
}

// All errors of a file are reported at once.
func TestEverythingThatIsWrongIsNamed(t *testing.T) {
	dir, getenv := environment(t)
	bad := strings.NewReplacer("v1alpha1", "v9", "shop/web", "web", "serverName: lameduck", "serverName: ''", "1.5s",
		"soon").Replace(good)
	mustRefuse(t, []string{"--config", write(t, dir, bad)}, getenv, "v9", `"web"`, "serverName", `"soon"`)
}

func TestAGoodFile(t *testing.T) {
	dir, getenv := environment(t)
	o, err := parse([]string{"--config", write(t, dir, good), "--metrics-address=127.0.0.1:0", "--log-level=debug"},
		getenv, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got := o.file.Coordinators.TokenFile; got != filepath.Join(dir, "token") {
		t.Errorf("${DIR} became %q", got)
	}
	if got := o.file.HealthTimeout.Duration; got != 1500*time.Millisecond {
		t.Errorf("healthTimeout is %s", got)
	}
	if o.kubeconfig != filepath.Join(dir, "kubeconfig") || o.directed == nil {
		t.Errorf("kubeconfig %q, gateway %v", o.kubeconfig, o.directed)
	}
	// A $ that is no ${NAME} is HAProxy's.
	for i, want := range []string{"^/admin(/.*)?$ }", "X-Was $1"} {
		if got := o.file.Gateway.HAProxy.Backends[0].Lines[i]; !strings.Contains(got, want) {
			t.Errorf("line %d is %q, want %q in it", i, got, want)
		}
	}
}

func TestWhatOnlyTheClusterCanTellIsNamedToo(t *testing.T) {
	dir, getenv := environment(t)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	noKube := func(name string) string {
		if name == "KUBECONFIG" {
			return ""
		}
		return getenv(name)
	}
	path := write(t, dir, good)
	mustRefuse(t, []string{"--config", path}, noKube, "--kubeconfig", `""`)
	kube := "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts: [{name: x, context: {cluster: " +
		"x}}]\nclusters: [{name: x, cluster: {server: 'http://127.0.0.1:1'}}]\n"
	if err := os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(kube), 0o600); err != nil {
		t.Fatal(err)
	}
	mustRefuse(t, []string{"--config", path}, getenv, "coordinators.caFile", filepath.Join(dir, "ca.crt"),
		"certificate")
}

func TestHelp(t *testing.T) {
	_, getenv := environment(t)
	var stdout bytes.Buffer
	if err := run(t.Context(), []string{"--help"}, getenv, &stdout, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Fatalf("run returns %v", err)
	}
	for _, name := range []string{"-config", "-kubeconfig", "-metrics-address", "-log-level"} {
		if !strings.Contains(stdout.String(), name) {
			t.Errorf("help does not name %s", name)
		}
	}
}

// nodeFile is a configuration file of a node agent.
const nodeFile = `
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators: {service: lameduck/agents, port: agents, serverName: lameduck,
  caFile: "${DIR}/ca.crt", tokenFile: "${DIR}/token"}
gateway: {kubeProxy: {}}
waitAddresses: ["127.0.0.1:9447", "[2001:db8::1]:9447"]
`

func TestANodeAgentsFile(t *testing.T) {
	dir, getenv := environment(t)
	o, err := parse([]string{"--config", write(t, dir, nodeFile), "--node-name=n1"}, getenv, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got := o.file.WaitAddresses; len(got) != 2 || o.directed != nil {
		t.Errorf("hooks are answered at %q, gateway %v", got, o.directed)
	}
	o, err = parse([]string{"--config", write(t, dir,
		strings.Replace(nodeFile, "waitAddresses", "waitAddresses: []\n#", 1)), "--node-name=n1"}, getenv, io.Discard)
	if err != nil || o.file.WaitAddresses[0] != defaultWaitAddress {
		t.Errorf("without addresses: %+v, %v", o.file, err)
	}
	mustRefuse(t, []string{"--config", write(t, dir, nodeFile)}, getenv, "--node-name")
	mustRefuse(t, []string{"--config", write(t, dir, strings.Replace(nodeFile, "127.0.0.1:9447", "nowhere", 1)),
		"--node-name=n1"}, getenv, "waitAddresses[0]", "nowhere")
	mustRefuse(t, []string{"--config", write(t, dir, strings.Replace(nodeFile, "127.0.0.1:9447", "[]:9447", 1)),
		"--node-name=n1"}, getenv, "waitAddresses[0]", "no host")
	mustRefuse(t, []string{"--config", write(t, dir,
		strings.Replace(good, "gateway:\n", "gateway:\n  kubeProxy: {}\n", 1))}, getenv,
		"exactly one of haproxy, kubeProxy")
	mustRefuse(t, []string{"--config", write(t, dir, strings.Replace(nodeFile, "{kubeProxy: {}}", "{}", 1)),
		"--node-name=n1"}, getenv, "exactly one of haproxy, kubeProxy")
	mustRefuse(t, []string{"--config", write(t, dir, strings.Replace(nodeFile, "kubeProxy", "traefik", 1)),
		"--node-name=n1"}, getenv, "traefik")
	mustRefuse(t, []string{"--config", write(t, dir, nodeFile+"health: {}\n"), "--node-name=n1"}, getenv,
		"health", "gateway.kubeProxy")
	mustRefuse(t, []string{"--config", write(t, dir, good+"waitAddresses: ['127.0.0.1:1']\n")}, getenv,
		"waitAddresses", "gateway.haproxy")
	mustRefuse(t, []string{"--config", write(t, dir, nodeFile+"stateDir: ${DIR}\n"), "--node-name=n1"}, getenv,
		"stateDir")
}

// It is asked of images, where there is no configuration.
func TestVersion(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if err := run(t.Context(), []string{"--version"}, func(string) string { return "" }, &stdout,
		&stderr); !errors.Is(err, cli.ErrPrinted) {
		t.Errorf("%v, stderr %q", err, &stderr)
	}
	if !strings.HasPrefix(stdout.String(), "agent dev, commit ") {
		t.Errorf("said %q", &stdout)
	}
}

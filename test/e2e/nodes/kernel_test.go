//go:build e2e

package nodes

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// unchanged is a gateway that the kernel directs. It has no interface for that.
type unchanged struct {
	name string
	args []string
	// files are templates of what it routes. It follows them by itself, or after a signal.
	files  map[string]string
	signal string
	// noPool: it opens a connection for each request.
	noPool bool
	// closes: it closes connections of clients when it loads its routes, as nginx does with those
	// that were quiet, and Caddy also with those that it has not accepted. A pod that does not
	// answer is a status.
	closes bool
}

// mayLose is how many of 10,000 requests may be lost, and at least one, because the agent closes a
// pooled connection that the gateway has just chosen. HAProxy answers that by closing the client's
// connection, the others by 502 or 503. Two cores lost up to 5 without other load, up to 27 with a
// load of 40 to 55.
const mayLose = 20

// eachTarget is in the place of the name of a file that there is for each target.
const eachTarget = "*"

// They have their own pools of connections, at their defaults, and retry nothing.
var unchangedGateways = []unchanged{
	{
		name: "haproxy", args: []string{"-W", "-f", "/routes/haproxy.cfg"}, signal: "USR2",
		files: map[string]string{"haproxy.cfg": `
defaults
  mode http
  timeout connect 1s
  timeout client 30s
  timeout server 30s
  retries 0
  # Old processes answer what is on the way to them.
  option idle-close-on-response
frontend web
  bind :8000
  use_backend %[req.hdr(host)]
{{- range .}}
backend {{.Host}}
  {{- range .To}}
  server {{.}} {{.}}
  {{- end}}
{{- end}}
`},
	},
	{
		name: "traefik",
		args: []string{"--entryPoints.web.address=:8000", "--providers.file.directory=/routes",
			"--global.checkNewVersion=false", "--global.sendAnonymousUsage=false"},
		files: map[string]string{"routes.yaml": `
http:
  routers:
{{- range .}}
    {{.Name}}: {rule: "Host(` + "`{{.Host}}`" + `)", service: {{.Name}}}
{{- end}}
  services:
{{- range .}}
    {{.Name}}: {loadBalancer: {servers: [{{range .To}}{url: "http://{{.}}"}, {{end}}]}}
{{- end}}
`},
	},
	{
		name: "envoy", args: []string{"-c", "/routes/envoy.yaml", "--concurrency", "2", "--disable-hot-restart"},
		files: map[string]string{"envoy.yaml": `
node: {id: ingress, cluster: ingress}
static_resources:
  listeners:
  - name: web
    address: {socket_address: {address: 0.0.0.0, port_value: 8000}}
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
{{- range .}}
            - {name: {{.Name}}, domains: [{{.Host}}], routes: [{match: {prefix: /}, route: {cluster: {{.Name}}}}]}
{{- end}}
  clusters:
{{- range .}}
  - name: {{.Name}}
    type: EDS
    connect_timeout: 1s
    eds_cluster_config:
      eds_config: {path_config_source: {path: /routes/{{.Name}}.yaml, watched_directory: {path: /routes}}}
{{- end}}
`, eachTarget: `
resources:
- "@type": type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment
  cluster_name: {{.Name}}
  endpoints:
  - lb_endpoints:
  {{- range .Addrs}}
    - endpoint: {address: {socket_address: {address: {{.Addr}}, port_value: {{.Port}}}}}
  {{- end}}
`},
	},
	{
		name: "nginx", args: []string{"-e", "stderr", "-c", "/routes/nginx.conf"}, signal: "HUP",
		noPool: true, closes: true,
		files: map[string]string{"nginx.conf": `
daemon off;
pid /tmp/pid;
worker_processes 2;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path /tmp/body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;
  proxy_next_upstream off;
{{- range .}}
  upstream {{.Name}} { {{range .To}}server {{.}}; {{end}} }
  server {
    listen 8000;
    server_name {{.Host}};
    location / { proxy_pass http://{{.Name}}; }
  }
{{- end}}
}
`},
	},
	{
		name: "caddy", closes: true,
		args: []string{"run", "--watch", "--adapter", "caddyfile", "--config", "/routes/Caddyfile"},
		files: map[string]string{"Caddyfile": `
{
  auto_https off
}
{{- range .}}
http://{{.Host}}:8000 {
  reverse_proxy{{range .To}} {{.}}{{end}}
}
{{- end}}
`},
	},
}

// held is the namespace whose deletions are only held: its pods have no barrier.
const held = "held"

// testKernel measures rolling updates behind a gateway that the kernel directs, with the sidecar of
// manifests/kernel. With ONLY= it is each of the gateways, with both kinds of traffic, one update
// after the other until REQUESTS were sent to each app.
func (l *lab) testKernel(t *testing.T, rows *[]row) {
	node := l.Set.Machines[2]
	for _, m := range l.Set.Machines[1:] {
		if out, err := m.Run(t.Context(), "sh", "-c", "mount -t bpf bpf /sys/fs/bpf && mkdir /run/routes"); err != nil {
			t.Fatalf("%s: %v: %s", m.Name, err, out)
		}
	}
	l.namespace(t, edge, map[string]string{"lameduck.io/mode": "off"})
	l.namespace(t, held, nil)
	const replicas = 6
	all := []mode{modes()[0], {name: lameduck, work: work{Namespace: held, Kind: "Deployment", Replicas: replicas}}}
	for i := range all {
		all[i].work.Closing = "0s"
		l.deploy(t, all[i].work)
	}
	before := len(*rows)
	for i, g := range unchangedGateways {
		if i > 0 && os.Getenv("ONLY") != "" {
			break
		}
		t.Run(g.name, func(t *testing.T) { l.testUnchanged(t, node, g, all, rows) })
	}
	t.Run("HostNetwork", l.testHostNetwork)
	for _, m := range all {
		l.deploy(t, m.work.with("Deployment", 0))
	}
	table(t, (*rows)[before:])
}

func (l *lab) testUnchanged(t *testing.T, node *machine.Machine, g unchanged, all []mode, rows *[]row) {
	image := l.unchangedImage(t, g)
	routes := &follower{lab: l, node: node, gateway: g}
	for _, m := range all {
		for _, app := range apps {
			routes.of = append(routes.of, [2]string{m.work.Namespace, app})
		}
	}
	if _, err := routes.follow(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	l.apply(t, l.unchangedObjects(t, g, image)...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		l.kubectl(t, "delete", "deployment", "-n", edge, "ingress", "--cascade=foreground", "--timeout=60s")
		if out, err := node.Run(t.Context(), "sh", "-c", "rm /run/routes/*"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}()
	l.kubectl(t, "rollout", "status", "-n", edge, "deployment/ingress", "--timeout=60s")
	wg.Go(func() { routes.run(ctx, t) })
	pods, err := l.Kube.CoreV1().Pods(edge).List(t.Context(), metav1.ListOptions{LabelSelector: "app=ingress"})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("pods of the gateway: %v, %v", pods, err)
	}
	rate, least, kinds := gatewayRate, 1, []traffic{keptAlive}
	if os.Getenv("ONLY") == "" {
		rate, kinds = 4*gatewayRate, []traffic{perRequest, keptAlive}
		least, _ = strconv.Atoi(os.Getenv("REQUESTS"))
	}
	via := route{gateway: "kernel+" + g.name, gate: "hold",
		start: func(t *testing.T, namespace, app string, how traffic) *clients {
			c, rate := &clients{}, rate
			if app != "exit" { // the rows that count
				rate = gatewayRate
			}
			c.add(t, l, g.name, how, rate, load.Options{
				Target: fmt.Sprintf("http://%s:8000/", pods.Items[0].Status.PodIP), Method: http.MethodPost,
				Headers: http.Header{"Host": {app + "." + namespace}},
			})
			return c
		},
	}
	for _, m := range all {
		for _, how := range kinds {
			updates := scenario{name: rollingUpdate, old: everyPod, limit: 2 * time.Minute, cause: restart}
			if m.name == lameduck {
				updates.cause = func(ctx context.Context, l *lab, w work) error {
					for until := time.Now().Add(time.Duration(float64(least)/rate) * time.Second); ; {
						if err := restart(ctx, l, w); err != nil || !time.Now().Before(until) {
							return err
						}
						if err := each(ctx, l, func(app string) []string {
							return []string{"rollout", "status", "-n", w.Namespace, "deployment/" + app}
						}); err != nil {
							return err
						}
					}
				}
			}
			measured := l.measure(t, updates, m, how, via)
			*rows = append(*rows, measured...)
			exits := measured[slices.Index(apps, "exit")]
			// One update in CI has a thousand requests, of which one or two are lost: up to five
			// count as few.
			most, lost := max(5, mayLose*exits.Requests/10_000), exits.Failed
			if g.noPool {
				most = 0
			}
			if g.closes {
				lost -= exits.by["reset"] + exits.by["eof"]
			}
			switch {
			case m.name == unprotected && lost == 0:
				t.Errorf("%s does not count: unprotected, no request failed either", via.gateway)
			case m.name == lameduck && lost > most:
				t.Errorf("%s, %s: %d of %d requests failed, want %d at most", via.gateway, how, lost, exits.Requests,
					most)
			case m.name == lameduck && exits.Requests < least:
				t.Errorf("%s, %s: %d requests, want %d", via.gateway, how, exits.Requests, least)
			}
		}
	}
}

// unchangedImage makes the image of a gateway, on each node.
func (l *lab) unchangedImage(t *testing.T, g unchanged) string {
	t.Helper()
	program := gatewaytest.LookPath(t, g.name)
	libraries, err := machine.Libraries(t.Context(), program)
	if err != nil {
		libraries = nil // it is linked statically
	}
	image := machine.Image{Name: "lameduck.test/unchanged-" + g.name + ":1", Program: program, Libraries: libraries}
	if err := l.Set.Load(t.Context(), image); err != nil {
		t.Fatal(err)
	}
	return image.Name
}

// testHostNetwork has two gateways with hostNetwork, on nodes of their own, and the agent of one of
// them is frozen. The other agent redirects its own gateway, and no process else on its node. The
// deletion waits for both up to the deadline, and is allowed with the pod named whose agent was
// silent.
func (l *lab) testHostNetwork(t *testing.T) {
	g := unchangedGateways[0]
	objects := l.unchangedObjects(t, g, l.unchangedImage(t, g))
	for _, o := range objects {
		if o["kind"] != "Deployment" {
			continue
		}
		o["spec"].(object)["replicas"] = 2
		pod := o["spec"].(object)["template"].(object)["spec"].(object)
		delete(pod, "nodeSelector")
		pod["affinity"], pod["hostNetwork"] = notOn("node-1"), true
		delete(pod["containers"].([]any)[0].(object), "resources") // other tests' pods leave little on a node
		// The node's agent has the other port. No node has room for this one twice.
		agent := pod["initContainers"].([]any)[0].(object)
		agent["args"] = append(agent["args"].([]any), "--metrics-address="+hostNetworkPort)
		agent["ports"].([]any)[0].(object)["containerPort"] = 9111
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var routes []*follower
	for _, m := range l.Set.Machines[1:] {
		f := &follower{lab: l, node: m, gateway: g, of: [][2]string{{held, "exit"}}}
		if _, err := f.follow(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		routes = append(routes, f)
	}
	l.apply(t, objects...)
	defer func() {
		cancel()
		wg.Wait()
		l.kubectl(t, "delete", "deployment", "-n", edge, "ingress", "--cascade=foreground", "--timeout=60s")
	}()
	l.kubectl(t, "rollout", "status", "-n", edge, "deployment/ingress", "--timeout=60s")
	for _, f := range routes {
		wg.Go(func() { f.run(ctx, t) })
	}
	pods, err := l.Kube.CoreV1().Pods(edge).List(t.Context(), metav1.ListOptions{LabelSelector: "app=ingress"})
	if err != nil || len(pods.Items) != 2 {
		t.Fatalf("pods of the gateway: %v, %v", pods, err)
	}
	frozen, node := pods.Items[0], l.Set.Machines[2]
	if frozen.Spec.NodeName == node.Name {
		frozen = pods.Items[1]
	}
	l.signalHostNetwork(t, syscall.SIGSTOP)
	defer l.signalHostNetwork(t, syscall.SIGCONT)

	targets, err := l.Kube.CoreV1().Pods(held).List(t.Context(), metav1.ListOptions{LabelSelector: "app=exit"})
	if err != nil || len(targets.Items) == 0 {
		t.Fatalf("pods of the app: %v, %v", targets, err)
	}
	gone, began := targets.Items[0], time.Now()
	deleted := make(chan error, 1)
	go func() {
		_, err := l.Kubectl(t.Context(), "delete", "pod", "-n", held, gone.Name, "--timeout=90s")
		deleted <- err
	}()
	// ask returns the pod that answers a process of the node, by the gateway or by itself.
	client := &http.Client{Transport: &http.Transport{DialContext: node.Dial, DisableKeepAlives: true},
		Timeout: 5 * time.Second}
	ask := func(address string) string {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Host = "exit." + held
		response, err := client.Do(request)
		if err != nil {
			return err.Error()
		}
		response.Body.Close()
		return response.Header.Get("Pod")
	}
	const many = 60 // of six pods
	l.Await(t, 20*time.Second, "the gateway is redirected", func() error {
		for range many {
			if by := ask(node.Address.String() + ":8000"); by == gone.Name || !strings.HasPrefix(by, "exit-") {
				return fmt.Errorf("%s answers", by)
			}
		}
		return nil
	})
	for range many {
		if by := ask(gone.Status.PodIP + ":8080"); by != gone.Name {
			t.Fatalf("a process of the node that connects to %s is answered by %s", gone.Name, by)
		}
		if by := ask(node.Address.String() + ":8000"); by == gone.Name || !strings.HasPrefix(by, "exit-") {
			t.Fatalf("after the gateway was redirected %s answers", by)
		}
	}
	now, err := l.Kube.CoreV1().Pods(held).Get(t.Context(), gone.Name, metav1.GetOptions{})
	if err != nil || now.DeletionTimestamp != nil {
		t.Fatalf("after %s the pod is deleted: %v", time.Since(began), err)
	}
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	l.Await(t, 10*time.Second, "the coordinator names the silent agent", func() error {
		out, err := l.Kubectl(t.Context(), "logs", "-n", system, "-l", "app.kubernetes.io/component=webhook",
			"--tail=-1", "--since-time="+began.Add(-time.Second).Format(time.RFC3339))
		if err != nil {
			return err
		}
		said := []string{}
		for line := range strings.Lines(out) {
			if !strings.Contains(line, `"msg":"deletion"`) || !strings.Contains(line, gone.Name) {
				continue
			}
			if said = append(said, line); strings.Contains(line, `"reason":"Deadline"`) &&
				strings.Contains(line, frozen.Name) {
				t.Logf("after %s: %s", time.Since(began).Round(time.Second), line)
				return nil
			}
		}
		return fmt.Errorf("want the reason Deadline and %s: %q", frozen.Name, said)
	})
}

// hostNetworkPort is where agents of gateways with hostNetwork listen.
const hostNetworkPort = ":9111"

// signalHostNetwork sends a signal to the agent of the gateway on node-2.
func (l *lab) signalHostNetwork(t *testing.T, s syscall.Signal) {
	t.Helper()
	out, err := l.Set.Machines[1].Run(context.WithoutCancel(t.Context()), "bash", "-c", fmt.Sprintf(`
		for p in /proc/[0-9]*; do
			[[ $(tr '\0' ' ' < $p/cmdline) = "/agent "*metrics-address=%s* ]] && kill -%d ${p#/proc/} && echo $p
		done 2> /dev/null; true`, hostNetworkPort, int(s)))
	if err != nil || strings.Count(out, "/proc") != 1 {
		t.Errorf("signal %s: %v: %q", s, err, out)
	}
}

// unchangedObjects are those of the folder kernel, which has manifests/kernel, with the names of
// this test in it.
func (l *lab) unchangedObjects(t *testing.T, g unchanged, image string) []object {
	t.Helper()
	objects, err := stage.Objects(t.Context(), l.Cluster, "../test/e2e/nodes/kernel")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if meta := o["metadata"].(object); meta["namespace"] == "shop" {
			meta["namespace"] = held
		}
		switch o["kind"] {
		case "ConfigMap":
			data := o["data"].(object)
			var services strings.Builder
			for _, app := range apps {
				fmt.Fprintf(&services, "      - {service: %s/%s, port: http, http1Quiet: 50ms}\n", held, app)
			}
			text, _, found := strings.Cut(data["agent.yaml"].(string), "      - service: shop/web\n")
			if !found {
				t.Fatalf("no Service shop/web in %s", data["agent.yaml"])
			}
			data["agent.yaml"] = text + services.String()
		case "Deployment":
			pod := o["spec"].(object)["template"].(object)["spec"].(object)
			container := pod["containers"].([]any)[0].(object)
			container["image"] = image
			container["args"] = g.args
			if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil { // beside version 1
				for _, v := range pod["volumes"].([]any) {
					if v.(object)["name"] == "lameduck-cgroups" {
						v.(object)["hostPath"].(object)["path"] = "/sys/fs/cgroup/unified"
					}
				}
			}
		}
	}
	return objects
}

// follower has a gateway follow EndpointSlices, as a controller does: a moment later.
type follower struct {
	*lab
	node    *machine.Machine
	gateway unchanged
	of      [][2]string // namespace and app
}

// target is one app in the files of a gateway.
type target struct {
	Name, Host string
	To         []string
	Addrs      []endpoint
}

type endpoint struct {
	Addr string
	Port int32
}

func (f *follower) run(ctx context.Context, t *testing.T) {
	var written map[string][]byte
	for ctx.Err() == nil {
		now, err := f.follow(ctx, written)
		if err == nil {
			written = now
		} else if ctx.Err() == nil {
			t.Logf("once more: %v", err)
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// follow writes the gateway's files if they are others than before, and returns them.
func (f *follower) follow(ctx context.Context, before map[string][]byte) (map[string][]byte, error) {
	var all []target
	for _, of := range f.of {
		one := target{Name: of[0] + "-" + of[1], Host: of[1] + "." + of[0]}
		listed, err := f.Kube.DiscoveryV1().EndpointSlices(of[0]).List(ctx,
			metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + of[1]})
		if err != nil {
			return before, err
		}
		for _, s := range listed.Items {
			for _, e := range s.Endpoints {
				if e.Conditions.Ready != nil && *e.Conditions.Ready {
					one.To = append(one.To, fmt.Sprintf("%s:%d", e.Addresses[0], *s.Ports[0].Port))
					one.Addrs = append(one.Addrs, endpoint{e.Addresses[0], *s.Ports[0].Port})
				}
			}
		}
		all = append(all, one)
	}
	now, changed := map[string][]byte{}, false
	render := func(name, text string, of any) error {
		var out bytes.Buffer
		err := template.Must(template.New("").Parse(text)).Execute(&out, of)
		now[name] = out.Bytes()
		return err
	}
	for name, text := range f.gateway.files {
		if name != eachTarget {
			if err := render(name, text, all); err != nil {
				return before, err
			}
			continue
		}
		for _, one := range all {
			if err := render(one.Name+".yaml", text, one); err != nil {
				return before, err
			}
		}
	}
	for name, text := range now {
		if bytes.Equal(text, before[name]) {
			continue
		}
		changed = true
		path := filepath.Join("/run/routes", name)
		write := f.node.Command(ctx, "sh", "-c", fmt.Sprintf("cat > %s.new && mv %[1]s.new %[1]s", path))
		write.Stdin = bytes.NewReader(text)
		if text, err := write.CombinedOutput(); err != nil {
			return before, fmt.Errorf("write %s: %w: %s", path, err, text)
		}
	}
	if !changed || f.gateway.signal == "" || before == nil {
		return now, nil
	}
	// To the first process of its container.
	_, err := f.node.Run(ctx, "sh", "-c", fmt.Sprintf(`
		for p in /proc/[0-9]*; do
			[ "$(cat $p/comm)" = %s ] && grep -q 'NSpid:.*[^0-9]1$' $p/status && kill -%s ${p#/proc/}
		done 2> /dev/null; true`, f.gateway.name, f.gateway.signal))
	return now, err
}

//go:build long

package discovery

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/monitoring"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// Root without a user namespace, because the kernel accepts programs from no other.
func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

// target is what Prometheus scrapes.
type target struct {
	ScrapeURL, Health, LastError string
	Labels                       map[string]string
}

// place is where a target is: both ways of discovery must give the same, with these labels.
type place struct{ url, instance, namespace, pod string }

// A Prometheus discovers pods by the API server: by the scrape configuration of the operations
// page, and by those that the Prometheus operator makes of the chart's PodMonitors. Both find the
// coordinator, the agents beside HAProxy and beside a gateway that the kernel directs, and the node
// agent, and nothing else. All are up, and no label of theirs hides one of a metric. Each series
// that an alert asks for is there, and the kernel's agent has data in each panel of gateways.
func TestDiscovery(t *testing.T) {
	program := gatewaytest.LookPath(t, "prometheus-kubernetes")
	harness.HAProxy(t)
	s := harness.Stage(t, cluster.Options{}, stage.Options{})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	harness.InstallFollowing(t, s)
	harness.Barred(t, s.Kube, "shop", nil)
	must(s.InstallApp(t.Context(), stage.App{Namespace: "shop", Replicas: 3}))
	_, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: "shop"})
	must(err)
	installKernel(t, s)
	var want []place
	for _, of := range []struct{ namespace, selector, port string }{
		{stage.System, "app.kubernetes.io/component=webhook", "8080"}, {"shop", "app=gateway", "9101"},
		{"edge", "app=ingress", "9101"}, {"lameduck-node", "app.kubernetes.io/component=node", "9101"},
	} {
		pods, err := s.Pods(t.Context(), of.namespace, of.selector)
		must(err)
		if len(pods) != 1 {
			t.Fatalf("%d pods %s", len(pods), of.selector)
		}
		address := net.JoinHostPort(pods[0].Status.PodIP, of.port)
		if of.namespace == "lameduck-node" {
			address = asOnTheNode(t, &pods[0])
		}
		want = append(want, place{"http://" + address + "/metrics", address, of.namespace, pods[0].Name})
	}
	kernel := want[2].instance

	discovery := fmt.Sprintf("kubernetes_sd_configs: [{role: pod, kubeconfig_file: %q}]", s.Cluster.Kubeconfig())
	jobs := harness.ScrapeConfig(t, discovery) + podMonitors(t, discovery)
	rules, err := filepath.Abs(filepath.Join(stage.Manifests(), "../monitoring/rules.yaml"))
	must(err)
	base := harness.Prometheus(t, program, fmt.Sprintf("global: {scrape_interval: 1s, scrape_timeout: 1s}\n"+
		"rule_files: [%q]\nscrape_configs:\n%s", rules, jobs))
	var targets []target
	harness.Await(t, time.Minute, "all targets are up", func() error {
		targets = active(t, base)
		for _, of := range targets {
			if of.Health != "up" {
				return fmt.Errorf("%s is %s: %s", of.ScrapeURL, of.Health, of.LastError)
			}
		}
		if len(targets) < 2*len(want) {
			return fmt.Errorf("%d targets, want %d", len(targets), 2*len(want))
		}
		return nil
	})
	compare := func(a, b place) int { return strings.Compare(a.url, b.url) }
	slices.SortFunc(want, compare)
	for name, of := range map[string]func(job string) bool{
		"operations.md": func(job string) bool { return job == "lameduck" },
		"PodMonitors":   func(job string) bool { return job != "lameduck" },
	} {
		var got []place
		for _, t := range targets {
			if of(t.Labels["job"]) {
				got = append(got, place{t.ScrapeURL, t.Labels["instance"], t.Labels["namespace"], t.Labels["pod"]})
			}
		}
		if slices.SortFunc(got, compare); !slices.Equal(got, want) {
			t.Errorf("by %s: %+v, want %+v", name, got, want)
		}
	}

	ended := time.Now().Add(20 * time.Second)
	for time.Now().Before(ended) {
		if _, err := s.Restart(t.Context(), "shop", "web"); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range harness.Series(t, base, `{__name__=~"lameduck_.+"}`) {
		for label := range maps.Keys(m) {
			if strings.HasPrefix(label, "exported_") {
				t.Errorf("a label of the target hides %s of %s", strings.TrimPrefix(label, "exported_"), m["__name__"])
			}
		}
	}
	text, err := os.ReadFile(rules)
	must(err)
	for _, nodes := range []bool{false, true} {
		for _, expr := range monitoring.Selectors(string(text), nodes) {
			if len(harness.Series(t, base, expr)) == 0 {
				t.Errorf("an alert asks for %s, and there is none", expr)
			}
		}
	}
	for _, metric := range []string{`lameduck_agent_exclusions`, `lameduck_propagation_seconds_count`} {
		if expr := of(metric, kernel) + " > 0"; len(harness.Series(t, base, expr)) == 0 {
			t.Errorf("nothing was excluded in the kernel: %s", expr)
		}
	}
	gateways := slices.IndexFunc(monitoring.Rows, func(r monitoring.Row) bool { return r.Title == "Gateways" })
	for _, p := range monitoring.Rows[gateways].Panels {
		for _, q := range p.Queries {
			expr := of(strings.ReplaceAll(q.Expr, "$__rate_interval", "30s"), kernel)
			series := harness.Series(t, base, expr)
			t.Logf("%s: %s: %v", p.Title, q.Legend, series)
			if len(series) == 0 && p.Title != "Probes" {
				t.Errorf("panel %q has no data of the kind kernel: %s", p.Title, expr)
			}
			named := func(m map[string]string) bool { return m["gateway"] == "kernel" }
			if strings.Contains(q.Legend, "{{gateway}}") && !slices.ContainsFunc(series, named) {
				t.Errorf("panel %q shows %v, and not the kind kernel", p.Title, series)
			}
		}
	}
}

var selector = regexp.MustCompile(`(lameduck_[a-z_]+)(\{)?`)

// of is an expression of one instance alone.
func of(expr, instance string) string {
	return selector.ReplaceAllStringFunc(expr, func(name string) string {
		if with, labels := strings.CutSuffix(name, "{"); labels {
			return fmt.Sprintf("%s{instance=%q,", with, instance)
		}
		return fmt.Sprintf("%s{instance=%q}", name, instance)
	})
}

// active returns the targets that Prometheus scrapes.
func active(t *testing.T, base string) []target {
	t.Helper()
	response, err := http.Get(base + "/api/v1/targets?state=active")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Data struct{ ActiveTargets []target }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return answer.Data.ActiveTargets
}

// podMonitors are the jobs that the Prometheus operator makes of the chart's PodMonitors, as far as
// these go: its generatePodMonitorConfig keeps the pods that a PodMonitor selects and the port that
// it names, sets the labels below, and then applies the PodMonitor's own relabelings.
func podMonitors(t *testing.T, discovery string) (jobs string) {
	t.Helper()
	chart, _, err := harness.Chart(t, harness.ChartDir, map[string]any{"barrier": map[string]any{"enabled": true},
		"monitoring": map[string]any{"podMonitor": map[string]any{"enabled": true}}})
	if err != nil {
		t.Fatal(err)
	}
	type relabeling map[string]any
	label := func(name string) string {
		return "__meta_kubernetes_pod_label_" + strings.NewReplacer(".", "_", "/", "_", "-", "_").Replace(name)
	}
	n := 0
	for document := range strings.SplitSeq(chart, "\n---\n") {
		var monitor struct {
			Kind     string
			Metadata metav1.ObjectMeta
			Spec     struct {
				Selector            metav1.LabelSelector
				NamespaceSelector   struct{ MatchNames []string }
				PodMetricsEndpoints []struct {
					Port        *string
					Relabelings []struct {
						SourceLabels                    []string
						TargetLabel, Regex, Replacement string
					}
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &monitor); err != nil {
			t.Fatal(err)
		}
		if monitor.Kind != "PodMonitor" {
			continue
		}
		n++
		spec, endpoint := monitor.Spec, monitor.Spec.PodMetricsEndpoints[0]
		all := []relabeling{{"source_labels": []string{"__meta_kubernetes_pod_phase"}, "regex": "(Failed|Succeeded)",
			"action": "drop"}}
		for name, value := range spec.Selector.MatchLabels {
			all = append(all, relabeling{"source_labels": []string{label(name)}, "regex": value, "action": "keep"})
		}
		for _, e := range spec.Selector.MatchExpressions {
			if e.Operator != metav1.LabelSelectorOpExists {
				t.Fatalf("%s selects by %s", monitor.Metadata.Name, e.Operator)
			}
			present := strings.Replace(label(e.Key), "label_", "labelpresent_", 1)
			all = append(all, relabeling{"source_labels": []string{present}, "regex": "true", "action": "keep"})
		}
		if endpoint.Port != nil {
			all = append(all, relabeling{"source_labels": []string{"__meta_kubernetes_pod_container_port_name"},
				"regex": *endpoint.Port, "action": "keep"})
		}
		for to, from := range map[string]string{"namespace": "namespace", "container": "pod_container_name",
			"pod": "pod_name"} {
			all = append(all, relabeling{"source_labels": []string{"__meta_kubernetes_" + from}, "target_label": to})
		}
		for _, r := range endpoint.Relabelings {
			all = append(all, relabeling{"source_labels": r.SourceLabels, "target_label": r.TargetLabel,
				"regex": cmp.Or(r.Regex, "(.*)"), "replacement": r.Replacement})
		}
		found := discovery
		if names := spec.NamespaceSelector.MatchNames; len(names) > 0 {
			found = strings.Replace(discovery, "role: pod,", fmt.Sprintf("role: pod, namespaces: {names: [%s]},",
				strings.Join(names, ", ")), 1)
		}
		relabelings, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		jobs += fmt.Sprintf("  - job_name: podMonitor/%s/%s\n    %s\n    relabel_configs: %s\n",
			monitor.Metadata.Namespace, monitor.Metadata.Name, found, relabelings)
	}
	if n != 3 {
		t.Fatalf("%d PodMonitors", n)
	}
	return jobs
}

// asOnTheNode leads port 9101 of a pod's node to the pod, as if the pod had the node's network: the
// stand-in of a node gives every pod an address of its own.
func asOnTheNode(t *testing.T, pod *corev1.Pod) string {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(pod.Status.HostIP, "9101"))
	if err != nil {
		t.Fatal(err)
	}
	to := &url.URL{Scheme: "http", Host: net.JoinHostPort(pod.Status.PodIP, "9101")}
	server := &http.Server{Handler: httputil.NewSingleHostReverseProxy(to)}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return listener.Addr().String()
}

// installKernel installs a gateway with the agent of manifests/kernel, and waits until it is ready.
// The gateway sends nothing: what the kernel does with its connections, make e2e-long PARTS=kernel
// measures. The stand-in of a node has no control groups, so both containers enter that of their
// pod.
func installKernel(t *testing.T, s *stage.Stage) {
	t.Helper()
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified"); err == nil {
		root += "/unified"
	}
	group := filepath.Join(root, cluster.RunName()) // removed with it
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	bpf := t.TempDir()
	if err := unix.Mount("bpf", bpf, "bpf", 0, ""); err != nil {
		gatewaytest.Missing(t, "bpffs", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	harness.Namespace(t, s.Kube, "edge", map[string]string{"lameduck.io/mode": "off"})
	objects := strings.NewReplacer("GROUP", group, "BPF", bpf, "BIN", s.Bin).Replace(kernelGateway)
	if err := s.Apply(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	if err := s.Await(t.Context(), "edge", "ingress"); err != nil {
		t.Fatal(err)
	}
}

const kernelGateway = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: ingress, namespace: edge}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lameduck-agent-kernel}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-agent}
subjects: [{kind: ServiceAccount, name: ingress, namespace: edge}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: lameduck-agent-kernel, namespace: shop}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-agent-endpoints}
subjects: [{kind: ServiceAccount, name: ingress, namespace: edge}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: lameduck-agent-kernel, namespace: lameduck-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: lameduck-agent-coordinators}
subjects: [{kind: ServiceAccount, name: ingress, namespace: edge}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: lameduck-agent-kernel, namespace: edge}
data:
  agent.yaml: |
    apiVersion: lameduck.io/v1alpha1
    kind: AgentConfiguration
    coordinators:
      service: lameduck-system/lameduck-agents
      port: agents
      serverName: lameduck-agents.lameduck-system.svc
      caConfigMap: lameduck-system/lameduck-ca
      tokenFile: ${VOLUME_TOKEN}/token
    stateDir: ${VOLUME_STATE}
    gateway:
      kernel: {podUID: "${POD_UID}", cgroups: GROUP, pins: BPF, services: [{service: shop/web, port: http}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: ingress, namespace: edge}
spec:
  replicas: 1
  selector:
    matchLabels: {app: ingress}
  template:
    metadata:
      labels: {app: ingress, lameduck.io/agent: directed}
    spec:
      serviceAccountName: ingress
      initContainers:
        - name: lameduck
          image: lameduck/agent:dev
          restartPolicy: Always
          command: [/bin/sh, -c, 'mkdir -p "$0" && echo 0 > "$0/cgroup.procs" && exec "$@"', GROUP/pod$(POD_UID)]
          args: [BIN/agent, "--config=$(VOLUME_CONFIG)/agent.yaml", "--metrics-address=$(POD_IP):9101"]
          env:
            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
            - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
          ports: [{name: agent, containerPort: 9101}]
          startupProbe: {httpGet: {path: /livez, port: agent}, periodSeconds: 1, failureThreshold: 30}
          readinessProbe: {httpGet: {path: /readyz, port: agent}, periodSeconds: 1}
      containers:
        - name: ingress
          image: ingress
          command: [/bin/sh, -c, 'echo 0 > "$0/cgroup.procs" && exec sleep infinity', GROUP/pod$(POD_UID)]
          env:
            - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
      volumes:
        - {name: config, configMap: {name: lameduck-agent-kernel}}
        - {name: state, emptyDir: {}}
        - name: token
          projected:
            sources:
              - serviceAccountToken: {audience: lameduck.io, path: token, expirationSeconds: 3600}
`

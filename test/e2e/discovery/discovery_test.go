//go:build long

package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/pkg/gateway/gatewaytest"
	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/monitoring"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// target is what Prometheus scrapes.
type target struct {
	ScrapeURL, Health, LastError string
	Labels                       map[string]string
}

// place is where a target is: both ways of discovery must give the same, with these labels.
type place struct{ url, instance, namespace, pod string }

// A Prometheus discovers pods by the API server: by the scrape configuration of the operations
// page, and by those that the Prometheus operator makes of the chart's PodMonitors. Both find the
// coordinator, the agent beside HAProxy and the node agent, and nothing else. All are up, and no
// label of theirs hides one of a metric. Each series that an alert asks for is there.
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
	var want []place
	for _, of := range []struct{ namespace, selector, port string }{
		{stage.System, "app.kubernetes.io/component=webhook", "8080"}, {"shop", "app=gateway", "9101"},
		{"lameduck-node", "app.kubernetes.io/component=node", "9101"},
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

	discovery := fmt.Sprintf("kubernetes_sd_configs: [{role: pod, kubeconfig_file: %q}]", s.Cluster.Kubeconfig())
	jobs := documented(t, discovery) + podMonitors(t, discovery)
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

// documented is the job of the operations page.
func documented(t *testing.T, discovery string) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(stage.Manifests(), "../../docs/operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, job, _ := strings.Cut(string(page), "```yaml\nscrape_configs:\n")
	job, _, _ = strings.Cut(job, "```")
	const plain = "kubernetes_sd_configs: [{role: pod}]"
	if strings.Count(job, plain) != 1 {
		t.Fatalf("not one %s in %s", plain, job)
	}
	return strings.Replace(job, plain, discovery, 1)
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
						SourceLabels             []string
						TargetLabel, Replacement string
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
				"replacement": r.Replacement})
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

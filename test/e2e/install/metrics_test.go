package install

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/monitoring"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// page fetches what a pod serves.
func page(t *testing.T, address string) string {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	response, err := client.Get("http://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", address, response.Status, err)
	}
	return string(text)
}

// A real Prometheus scrapes the real programs while an application is updated again and again, in
// the modes enforce and observe in turn. Each panel of the dashboard has data, each alert queries
// metrics that exist, and promtool has no complaint about a metric.
func TestEveryPanelHasData(t *testing.T) {
	prometheus := harness.Program(t, "prometheus", "apt-get install prometheus")
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "metrics", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3,
		Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	probed := `{"metadata":{"annotations":{"lameduck.io/health-check":"{path: /readyz, interval: 1s}"}}}`
	if _, err := s.Kube.CoreV1().Services(ns).Patch(t.Context(), "web", types.MergePatchType, []byte(probed),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, of := range []struct {
		namespace, selector,
		port string
	}{{stage.System, "app.kubernetes.io/component=webhook", "8080"}, {ns, "app=gateway", "9101"}} {
		pods, err := s.Pods(t.Context(), of.namespace, of.selector)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pods {
			targets = append(targets, net.JoinHostPort(p.Status.PodIP, of.port))
		}
	}
	base := startPrometheus(t, s, prometheus, targets)

	ended := time.Now().Add(20 * time.Second)
	for round := 0; round < 2 || time.Now().Before(ended); round++ {
		mode := fmt.Sprintf(`{"metadata":{"labels":{"lameduck.io/mode":%q}}}`, []string{"enforce", "observe"}[round%2])
		if _, err := s.Kube.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, []byte(mode),
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Fatal(err)
		}
	}
	harness.Until(t, 30*time.Second, "Prometheus has scraped the last of it", func() bool {
		return len(harness.Series(t, base, `lameduck_holds`)) == 2 &&
			len(harness.Series(t, base, `lameduck_agent_streams`)) == 1
	})
	for _, row := range monitoring.Rows {
		if row.Barrier {
			continue // test/e2e/monitoring looks at those, beside a real kube-proxy
		}
		for _, p := range row.Panels {
			for _, q := range p.Queries {
				if len(harness.Series(t, base, strings.ReplaceAll(q.Expr, "$__rate_interval", "30s"))) == 0 {
					t.Errorf("panel %q has no data: %s", p.Title, q.Expr)
				}
			}
		}
	}
	rules, err := os.ReadFile(manifests("monitoring/rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, expr := range monitoring.Selectors(string(rules), false) { // test/e2e/monitoring has node agents
		if len(harness.Series(t, base, expr)) == 0 {
			t.Errorf("an alert asks for %s, and there is none", expr)
		}
	}

	docs := ""
	for _, name := range []string{"operations.md", "health.md", "barrier.md"} {
		text, err := os.ReadFile(manifests("../docs/" + name))
		if err != nil {
			t.Fatal(err)
		}
		docs += string(text)
	}
	for _, target := range targets {
		text := page(t, target+"/metrics")
		cmd := exec.Command(filepath.Join(filepath.Dir(prometheus), "promtool"), "check", "metrics")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("promtool check metrics: %v: %s", err, out)
		}
		for _, m := range regexp.MustCompile(`(?m)^# TYPE (lameduck_\S+)`).FindAllStringSubmatch(text, -1) {
			if !strings.Contains(docs, "`"+m[1]) {
				t.Errorf("no page has %s", m[1])
			}
		}
	}
}

// startPrometheus scrapes targets and the API server until the test ends.
func startPrometheus(t *testing.T, s *stage.Stage, program string, targets []string) (base string) {
	t.Helper()
	server, err := url.Parse(s.Cluster.Server())
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: lameduck
    static_configs: [{targets: [%s]}]
  - job_name: apiserver
    scheme: https
    scrape_interval: 5s
    scrape_timeout: 5s
    tls_config: {insecure_skip_verify: true}
    authorization: {credentials: %q}
    static_configs: [{targets: [%q]}]
`, manifests("monitoring/rules.yaml"), `"`+strings.Join(targets, `", "`)+`"`,
		s.Cluster.Config().BearerToken, server.Host)
	return harness.Prometheus(t, program, config)
}

// What the operations page says to scrape finds coordinators and agents by the names of their
// ports, and node agents, which declare none, by the address of their node.
// Debian's Prometheus cannot discover pods: it is given what it would find, and relabels that. In
// test/e2e/discovery one that can discovers them.
func TestTheDocumentedScrapeConfiguration(t *testing.T) {
	prometheus := harness.Program(t, "prometheus", "apt-get install prometheus")
	s := open(t)
	var static strings.Builder
	for _, of := range []struct{ folder, key, address string }{
		{"base", "Deployment lameduck-system/lameduck-webhook-0", "10.0.0.1"},
		{"haproxy", "Deployment shop/gateway", "10.0.0.2"},
		{"barrier", "DaemonSet lameduck-node/lameduck-node", "192.0.2.7"},
		{"quickstart", "Deployment shop/web", "10.0.0.3"},
	} {
		for _, target := range discovered(objects(t, kustomized(t, s, of.folder))[of.key], of.address) {
			fmt.Fprintf(&static, "{targets: [%q], labels: %s}, ", target["__address__"], labels(t, target))
		}
	}
	base := harness.Prometheus(t, prometheus, "scrape_configs:\n"+
		harness.ScrapeConfig(t, "static_configs: ["+static.String()+"]"))
	want := []string{"http://10.0.0.1:8080/metrics", "http://10.0.0.2:9101/metrics", "http://192.0.2.7:9101/metrics"}
	var got []string
	harness.Until(t, 30*time.Second, "Prometheus has targets", func() bool {
		fetched := page(t, strings.TrimPrefix(base, "http://")+"/api/v1/targets?state=active")
		var targets struct {
			Data struct{ ActiveTargets []struct{ ScrapeURL string } }
		}
		if err := json.Unmarshal([]byte(fetched), &targets); err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, target := range targets.Data.ActiveTargets {
			got = append(got, target.ScrapeURL)
		}
		slices.Sort(got)
		return len(got) > 0
	})
	if !slices.Equal(got, want) {
		t.Errorf("scraped are %q, want %q", got, want)
	}
}

// discovered is what Prometheus finds of one pod of a workload: a target for each port of a
// container, and one for a container without.
func discovered(workload object, address string) (all []map[string]string) {
	template := workload["spec"].(object)["template"].(object)
	spec := template["spec"].(object)
	inits, _ := spec["initContainers"].([]any)
	for _, c := range slices.Concat(inits, spec["containers"].([]any)) {
		target := func() map[string]string {
			meta := map[string]string{"__address__": address, "__meta_kubernetes_pod_ip": address,
				"__meta_kubernetes_pod_host_ip": "192.0.2.7", "__meta_kubernetes_pod_name": "pod"}
			for name, value := range template["metadata"].(object)["labels"].(object) {
				meta["__meta_kubernetes_pod_label_"+strings.NewReplacer(".", "_", "/", "_", "-",
					"_").Replace(name)] = value.(string)
			}
			return meta
		}
		ports, _ := c.(object)["ports"].([]any)
		for _, p := range ports {
			one := target()
			one["__address__"] = fmt.Sprintf("%s:%v", address, p.(object)["containerPort"])
			one["__meta_kubernetes_pod_container_port_name"] = p.(object)["name"].(string)
			all = append(all, one)
		}
		if len(ports) == 0 {
			all = append(all, target())
		}
	}
	return all
}

// labels writes those of a target, but its address.
func labels(t *testing.T, target map[string]string) string {
	t.Helper()
	target = maps.Clone(target)
	delete(target, "__address__")
	text, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

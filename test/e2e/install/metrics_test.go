package install

import (
	"context"
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
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster"
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

// A real Prometheus on the real programs, while an application is updated again and again: each panel of the dashboard shows something, each alert asks for what
// there is, and promtool has nothing to say of any metric.
func TestEveryPanelHasData(t *testing.T) {
	prometheus, err := exec.LookPath("prometheus")
	if err != nil {
		cluster.Missing(t, "prometheus", "apt-get install prometheus")
	}
	s := open(t)
	ns := namespace(t, s, "metrics")
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3, Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	probed := `{"metadata":{"annotations":{"lameduck.io/health-check":"{path: /readyz, interval: 1s}"}}}`
	if _, err := s.Kube.CoreV1().Services(ns).Patch(t.Context(), "web", types.MergePatchType, []byte(probed), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, of := range []struct{ namespace, selector, port string }{{stage.System, "app.kubernetes.io/component=webhook", "8080"}, {ns, "app=gateway", "9101"}} {
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
	for time.Now().Before(ended) {
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "Prometheus has scraped the last of it", 30*time.Second, func() bool {
		return len(series(t, base, `lameduck_holds`)) == 2 && len(series(t, base, `lameduck_agent_streams`)) == 1
	})
	for _, row := range monitoring.Rows {
		if row.Barrier {
			continue // test/e2e/monitoring looks at those, beside a real kube-proxy
		}
		for _, p := range row.Panels {
			for _, q := range p.Queries {
				if len(series(t, base, strings.ReplaceAll(q.Expr, "$__rate_interval", "10s"))) == 0 {
					t.Errorf("panel %q has no data: %s", p.Title, q.Expr)
				}
			}
		}
	}
	rules, err := os.ReadFile(manifests("monitoring/rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, expr := range regexp.MustCompile(`lameduck_[a-z_]+(\{[^}]*\})?`).FindAllString(string(rules), -1) {
		if len(series(t, base, expr)) == 0 {
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
				t.Errorf("no page tells of %s", m[1])
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
`, manifests("monitoring/rules.yaml"), `"`+strings.Join(targets, `", "`)+`"`, s.Cluster.Config().BearerToken, server.Host)
	return runPrometheus(t, program, config)
}

// runPrometheus starts one with a configuration, and waits until it is ready.
func runPrometheus(t *testing.T, program, config string) (base string) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--config.file="+path, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("Prometheus says: %s", text[max(0, len(text)-2000):])
		}
	})
	base = "http://" + address
	until(t, "Prometheus is ready", 30*time.Second, func() bool {
		response, err := http.Get(base + "/-/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return base
}

// series returns the labels of those that have had a value within the last minute.
func series(t *testing.T, base, expr string) (with []map[string]string) {
	t.Helper()
	now := time.Now()
	query := url.Values{"query": {expr}, "start": {fmt.Sprint(now.Add(-time.Minute).Unix())}, "end": {fmt.Sprint(now.Unix())}, "step": {"1"}}
	response, err := http.Get(base + "/api/v1/query_range?" + query.Encode())
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Values [][2]any
			}
		}
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || answer.Error != "" {
		t.Fatalf("%s: %v %s", expr, err, answer.Error)
	}
	for _, r := range answer.Data.Result {
		for _, v := range r.Values {
			if v[1] != "NaN" {
				with = append(with, r.Metric)
				break
			}
		}
	}
	return with
}

// What the operations page says to scrape finds coordinators by the name of their port, and node agents, which declare none, by the address of their node.
func TestTheDocumentedScrapeConfiguration(t *testing.T) {
	prometheus, err := exec.LookPath("prometheus")
	if err != nil {
		cluster.Missing(t, "prometheus", "apt-get install prometheus")
	}
	s := open(t)
	ns := namespace(t, s, "scraped")
	want := map[string]bool{"http://192.0.2.7:9101/metrics": true}
	pods, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		want["http://"+net.JoinHostPort(p.Status.PodIP, "8080")+"/metrics"] = true
	}
	// A pod as the DaemonSet makes it, as far as a scrape can tell, on a node of its own.
	template := objects(t, kustomized(t, s, "barrier"))["DaemonSet lameduck-node/lameduck-node"]["spec"].(object)["template"].(object)
	spec := template["spec"].(object)
	ports := spec["containers"].([]any)[0].(object)["ports"]
	pod := object{
		"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": "node-agent", "namespace": ns, "labels": template["metadata"].(object)["labels"]},
		"spec": object{"nodeName": "nowhere", "hostNetwork": spec["hostNetwork"], "containers": []any{object{"name": "agent", "image": "none", "ports": ports}}},
	}
	if err := s.Apply(t.Context(), text(t, pod)); err != nil {
		t.Fatal(err)
	}
	status := []byte(`{"status":{"phase":"Running","hostIP":"192.0.2.7","podIP":"192.0.2.7"}}`)
	if _, err := s.Kube.CoreV1().Pods(ns).Patch(t.Context(), "node-agent", types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Kube.CoreV1().Pods(ns).Delete(context.WithoutCancel(t.Context()), "node-agent", *metav1.NewDeleteOptions(0))
	})
	page, err := os.ReadFile(manifests("../docs/operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, config, ok := strings.Cut(string(page), "```yaml\nscrape_configs:\n")
	if !ok {
		t.Fatal("the operations page has no scrape configuration")
	}
	config, _, _ = strings.Cut(config, "```")
	role := "{role: pod}"
	if strings.Count(config, role) != 1 {
		t.Fatalf("not one %s in %s", role, config)
	}
	config = strings.Replace(config, role, fmt.Sprintf("{role: pod, api_server: %q, tls_config: {insecure_skip_verify: true}, authorization: {credentials: %q}}", s.Cluster.Server(), s.Cluster.Config().BearerToken), 1)
	base := runPrometheus(t, prometheus, "scrape_configs:\n"+config)
	var got map[string]bool
	until(t, fmt.Sprintf("Prometheus scrapes %v", want), 30*time.Second, func() bool {
		response, err := http.Get(base + "/api/v1/targets?state=active")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		var targets struct {
			Data struct{ ActiveTargets []struct{ ScrapeURL string } }
		}
		if err := json.NewDecoder(response.Body).Decode(&targets); err != nil {
			t.Fatal(err)
		}
		got = map[string]bool{}
		for _, target := range targets.Data.ActiveTargets {
			got[target.ScrapeURL] = true
		}
		return maps.Equal(got, want)
	})
}

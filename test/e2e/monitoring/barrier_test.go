package monitoring

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// A real Prometheus, while pods that have both gates go again and again: HAProxy lets go at the
// hold, a real kube-proxy at the barrier. Each panel of the barrier shows something, and what it
// shows is so.
func TestThePanelsOfTheBarrierHaveData(t *testing.T) {
	prometheus, err := exec.LookPath("prometheus")
	if err != nil {
		cluster.Missing(t, "prometheus", "apt-get install prometheus")
	}
	if _, err := stage.HAProxy(); err != nil {
		cluster.Missing(t, "haproxy", "apt-get install haproxy")
	}
	c := cluster.Shared(t)
	s, err := stage.Open(t.Context(), c, stage.Options{Bin: stage.Programs(t), Dir: filepath.Join(os.TempDir(), "n")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(s.InstallCoordinator(t.Context()))
	must(s.InstallWebhook(t.Context(), 1))
	if err := s.InstallFollowing(t.Context()); errors.Is(err, stage.ErrNoPacketFilter) {
		cluster.Missing(t, "nft", "apt-get install nftables")
	} else if err != nil {
		t.Fatal(err)
	}
	must(s.CreateNamespace(t.Context(), "shop"))
	_, err = s.Kube.CoreV1().Namespaces().Patch(t.Context(), "shop", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"lameduck.io/barrier":"enabled"}}}`), metav1.PatchOptions{})
	must(err)
	must(s.InstallApp(t.Context(), stage.App{Namespace: "shop", Replicas: 3}))
	_, err = s.InstallGateway(t.Context(), stage.Gateway{Namespace: "shop"})
	must(err)
	var targets []string
	for _, of := range []struct{ namespace, selector, port string }{
		{stage.System, "app.kubernetes.io/component=webhook", "8080"}, {"shop", "app=gateway", "9101"},
		{"lameduck-node", "app.kubernetes.io/component=node", "9101"},
	} {
		pods, err := s.Pods(t.Context(), of.namespace, of.selector)
		must(err)
		for _, p := range pods {
			targets = append(targets, `"`+net.JoinHostPort(p.Status.PodIP, of.port)+`"`)
		}
	}
	if len(targets) != 3 {
		t.Fatalf("targets %q", targets)
	}
	base := scrape(t, prometheus, targets)
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		_, err := s.Restart(t.Context(), "shop", "web")
		must(err)
	}
	// The last of it is scraped within a second.
	within := func(expr string, is func(series []map[string]string) bool) (series []map[string]string, ok bool) {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(200 * time.Millisecond) {
			if series = ask(t, base, expr); is(series) || time.Now().After(end) {
				return series, is(series)
			}
		}
	}
	for _, row := range Rows {
		for _, p := range row.Panels {
			if !row.Barrier && !strings.HasPrefix(p.Title, "Propagation") {
				continue // test/e2e/install looks at those
			}
			for _, q := range p.Queries {
				expr := strings.ReplaceAll(q.Expr, "$__rate_interval", "10s")
				series, ok := within(expr, func(series []map[string]string) bool { return len(series) > 0 })
				t.Logf("%s: %s: %v", p.Title, q.Legend, series)
				if !ok {
					t.Errorf("panel %q has no data: %s", p.Title, q.Expr)
				}
			}
		}
	}
	for _, has := range []struct{ expr, label, value string }{
		{`sum by (reason) (lameduck_barrier_duration_seconds_count) > 0`, "reason", "Acknowledged"},
		{`sum by (outcome) (lameduck_barrier_waits_total) > 0`, "outcome", "Acknowledged"},
		{`lameduck_propagation_seconds_count{gateway="kube-proxy",what="idle"} > 0`, "node", "node-1"},
		{`lameduck_propagation_seconds_count{gateway="haproxy",what="idle"} > 0`, "gateway", "haproxy"},
	} {
		if _, ok := within(has.expr, func(series []map[string]string) bool {
			return slices.ContainsFunc(series, func(m map[string]string) bool { return m[has.label] == has.value })
		}); !ok {
			t.Errorf("%s has no %s %s", has.expr, has.label, has.value)
		}
	}
}

// scrape runs Prometheus on targets until the test ends.
func scrape(t *testing.T, program string, targets []string) (base string) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "prometheus.yml")
	config := "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n  - job_name: lameduck\n    " +
		"static_configs: [{targets: [" + strings.Join(targets, ", ") + "]}]\n"
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	ctx, cancel := context.WithCancel(context.Background())
	var log strings.Builder
	cmd := exec.CommandContext(ctx, program, "--config.file="+path, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if _ = cmd.Wait(); t.Failed() {
			t.Logf("Prometheus says: %s", log.String()[max(0, log.Len()-2000):])
		}
	})
	base = "http://" + address
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		response, err := http.Get(base + "/-/ready")
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return base
			}
		}
		if time.Now().After(end) {
			t.Fatalf("Prometheus is not ready: %v", err)
		}
	}
}

// ask returns the labels of the series that have had a value within the last minute.
func ask(t *testing.T, base, expr string) (with []map[string]string) {
	t.Helper()
	now := time.Now()
	query := url.Values{"query": {expr}, "start": {fmt.Sprint(now.Add(-time.Minute).Unix())},
		"end": {fmt.Sprint(now.Unix())}, "step": {"1"}}
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

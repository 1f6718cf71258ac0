package monitoring

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// A real Prometheus, while pods that have both gates go again and again: HAProxy lets go at the
// hold, a real kube-proxy at the barrier. Each panel of the barrier shows something, and what it
// shows is so.
func TestThePanelsOfTheBarrierHaveData(t *testing.T) {
	prometheus := harness.Program(t, "prometheus", "apt-get install prometheus")
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
	base := harness.Prometheus(t, prometheus, "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n"+
		"  - job_name: lameduck\n    static_configs: [{targets: ["+strings.Join(targets, ", ")+"]}]\n")
	// Pods go for as long as panels are looked at: rates are of the last seconds.
	ctx, cancel := context.WithCancel(t.Context())
	var going sync.WaitGroup
	going.Go(func() {
		for ctx.Err() == nil {
			if _, err := s.Restart(ctx, "shop", "web"); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
	defer going.Wait()
	defer cancel()
	within := func(expr string, is func(series []map[string]string) bool) (series []map[string]string, ok bool) {
		for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
			if series = harness.Series(t, base, expr); is(series) || time.Now().After(end) {
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
	rules, err := os.ReadFile(filepath.Join(folder, "rules.yaml"))
	must(err)
	selectors := Selectors(string(rules), true)
	if len(selectors) < 10 {
		t.Errorf("the alerts ask node agents for %q", selectors)
	}
	for _, expr := range selectors {
		if _, ok := within(expr, func(series []map[string]string) bool { return len(series) > 0 }); !ok {
			t.Errorf("an alert asks for %s, and there is none", expr)
		}
	}
	for _, has := range []struct{ expr, label, value string }{
		{`sum by (reason) (lameduck_barrier_duration_seconds_count) > 0`, "reason", "Acknowledged"},
		{`sum by (outcome) (lameduck_barrier_waits_total) > 0`, "outcome", "Acknowledged"},
		{`lameduck_propagation_seconds_count{gateway="kube-proxy",what="idle"} > 0`, "node", "node-1"},
		{`lameduck_propagation_seconds_count{gateway="haproxy",what="idle"} > 0`, "gateway", "haproxy"},
		{`lameduck_services{coverage="Acknowledges"} == 1`, "gates", "both"},
	} {
		if _, ok := within(has.expr, func(series []map[string]string) bool {
			return slices.ContainsFunc(series, func(m map[string]string) bool { return m[has.label] == has.value })
		}); !ok {
			t.Errorf("%s has no %s %s", has.expr, has.label, has.value)
		}
	}
}

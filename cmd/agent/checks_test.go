package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// targets returns what /v1/targets says of each pod, as "unhealthy unhealthy removed": verdict, why, state.
func (w *world) targets() map[string]string {
	w.Helper()
	response, err := http.Get("http://" + w.people + targetsPath)
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	var answer struct{ Targets []targetView }
	if err := json.Unmarshal(body, &answer); err != nil {
		w.Fatalf("%s: %v", body, err)
	}
	said := map[string]string{}
	for _, t := range answer.Targets {
		said[t.UID] = strings.Join([]string{t.Health, t.Why, t.State}, " ")
	}
	return said
}

func (w *world) sicken(sick bool, uids ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, uid := range uids {
		w.sick[uid] = sick
	}
}

func (w *world) untilTargets(want map[string]string) {
	w.Helper()
	var said map[string]string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		said = w.targets()
		ok := true
		for uid, text := range want {
			ok = ok && said[uid] == text
		}
		if ok {
			return
		}
	}
	w.Fatalf("targets are %v, want %v", said, want)
}

// The real HAProxy, probes over the network, and the annotation of a Service: the sick are taken out, too many sick are not, a
// tombstone is not a matter of health, and what cannot be read changes nothing.
func TestChecks(t *testing.T) {
	w := newWorld(t, 3, time.Minute)
	a, b, c := w.pods[0], w.pods[1], w.pods[2]
	w.untilTargets(map[string]string{a: "unknown chosen routed", b: "unknown chosen routed", c: "unknown chosen routed"})

	w.sicken(true, a)
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: {httpFailures: 2}}")
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed", c: "healthy chosen routed"})
	since := time.Now()
	w.mustServe(a)
	if w.routedSince(a, since) {
		t.Errorf("%s has traffic although it is unhealthy", a)
	}

	// What cannot be read changes nothing, and is said.
	w.api.annotate("{path: /healthz, intervall: 1s}")
	w.until("the annotation is refused", func() bool { return w.metric("lameduck_agent_refused_checks") == "1" })
	if !strings.Contains(w.log.String(), "intervall") {
		t.Error("the log does not name the key that is refused")
	}
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed"})
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: {httpFailures: 2}}")

	// More than half of them: all have traffic.
	w.sicken(true, b)
	w.untilTargets(map[string]string{a: "unhealthy failing-open routed", b: "unhealthy failing-open routed", c: "healthy chosen routed"})
	w.mustServe()
	if got := w.metric(`lameduck_agent_pool_failing_open{pool="web"}`); got != "1" {
		t.Errorf("failing open is %s", got)
	}
	// But not one that is drained. It is not counted either: of the other two, half are healthy.
	w.boss.drain(b)
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "unhealthy tombstoned removed"})
	since = time.Now()
	w.mustServe(a, b)
	if w.routedSince(a, since) || w.routedSince(b, since) {
		t.Errorf("%s or %s has traffic although it is unhealthy, or drained", a, b)
	}

	// They get well again; without a check nobody is sick.
	w.sicken(false, a)
	w.untilTargets(map[string]string{a: "healthy chosen routed"})
	w.sicken(true, a)
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed"})
	w.api.annotate("")
	w.untilTargets(map[string]string{a: "unknown chosen routed", c: "unknown chosen routed"})
	if got := w.metric("lameduck_agent_refused_checks"); got != "0" {
		t.Errorf("%s checks are refused", got)
	}
	w.mustServe(b)
}

// Every pool that a Service feeds follows its annotation, and goes back to the file when that is taken away or the Service is deleted, also
// after an annotation that was refused.
func TestChecksGoBackToTheFile(t *testing.T) {
	var f file
	if err := f.read([]byte(`{apiVersion: lameduck.io/v1alpha1, kind: AgentConfiguration, haproxy: {masterSocket: /s, backends: [
		{backend: web, service: shop/web, port: http, healthCheck: {path: /web}},
		{backend: admin, service: shop/web, port: admin, healthCheck: {path: /admin}},
		{backend: other, service: shop/other, healthCheck: {path: /other}}]}}`), func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	set := health.NewSet()
	for n, pool := range []health.Pool{"web", "admin", "other"} {
		e := health.Endpoint{Target: health.Target{UID: "a", Addr: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(80+n))}, Routable: true}
		set.Replace(time.Now(), pool, []health.Endpoint{e})
	}
	routes := newRoutes(f, set, nil)
	c := newChecks(f, routes.ports, set, func() {}, slog.New(slog.DiscardHandler))
	at := time.Now()
	paths := func() string {
		probed := map[health.Pool]string{}
		for n := 0; n < 1200 && len(probed) < 3; n++ { // an interval, and some
			at = at.Add(10 * time.Millisecond)
			jobs, _ := set.Due(at, nil, 10)
			for _, j := range jobs {
				probed[j.Key.Pool] = j.Check.Path
				set.Report(at, j, health.Outcome{Kind: health.Success, Code: 200})
			}
		}
		return fmt.Sprint(probed)
	}
	service := func(check string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
		if check != "" {
			s.Annotations = map[string]string{health.CheckAnnotation: check}
		}
		return s
	}
	// of also has a check of a port's own.
	of := func(all, port, check string) *corev1.Service {
		s := service(all)
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[health.CheckAnnotation+"."+port] = check
		return s
	}
	const ofFile, annotated = "map[admin:/admin other:/other web:/web]", "map[admin:/x other:/other web:/x]"
	for _, step := range []struct {
		what    string
		heard   *corev1.Service
		gone    bool
		want    string
		refused int
	}{
		{"no annotation", service(""), false, ofFile, 0},
		{"annotation", service("{path: /x}"), false, annotated, 0},
		{"refused annotation", service("{path: x}"), false, annotated, 1},
		{"deleted with a refused annotation", service("{path: x}"), true, ofFile, 0},
		{"made again", service("{path: /x}"), false, annotated, 0},
		{"deleted", service("{path: /x}"), true, ofFile, 0},
		{"annotation again", service("{path: /x}"), false, annotated, 0},
		{"annotation taken away", service(""), false, ofFile, 0},
		{"of one port", of("", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/web]", 0},
		{"of one port before all", of("{path: /x}", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/x]", 0},
		{"of one port, refused", of("{path: /z}", "admin", "{path: y}"), false, "map[admin:/y other:/other web:/z]", 1},
		{"of all, refused", of("{path: z}", "admin", "{path: /y}"), false, "map[admin:/y other:/other web:/z]", 1},
		{"of one port, taken away", service("{path: /x}"), false, annotated, 0},
		{"of one port, that nothing routes to", of("", "metrics", "{path: y}"), false, ofFile, 0},
	} {
		c.heard(step.heard, step.gone)
		if got := paths(); got != step.want || c.refusals() != step.refused {
			t.Errorf("%s: probed are %s with %d refused, want %s with %d", step.what, got, c.refusals(), step.want, step.refused)
		}
	}
}

// The file is read as strictly as the annotation.
func TestHealthCheckOfTheFile(t *testing.T) {
	const good = `{apiVersion: lameduck.io/v1alpha1, kind: AgentConfiguration, minHealthyPercent: 30, haproxy: {masterSocket: /s,
		backends: [{backend: web, service: shop/web, healthCheck: {protocol: tcp, interval: 2s}}]}}`
	var f file
	if err := f.read([]byte(good), func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	for bad, names := range map[string][]string{
		strings.Replace(good, "tcp", "udp", 1):                           {"backends[0].healthCheck", "udp"},
		strings.Replace(good, "2s", "1ms", 1):                            {"backends[0].healthCheck", "interval"},
		strings.Replace(good, "30", "101", 1):                            {"minHealthyPercent", "101"},
		strings.Replace(good, "{protocol: tcp, interval: 2s}", "tcp", 1): {"backends[0].healthCheck", "object"},
	} {
		var f file
		err := f.read([]byte(bad), func(string) string { return "" })
		if err == nil || slices.ContainsFunc(names, func(n string) bool { return !strings.Contains(err.Error(), n) }) {
			t.Errorf("%s: %v, want %q", bad, err, names)
		}
	}
}

// An agent is killed, and the one that comes after it knows no verdicts: the sick pod gets not one request until it is well.
func TestTheSickStayOutOverARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, time.Minute)
	a, b, c := w.pods[0], w.pods[1], w.pods[2]
	w.sicken(true, a)
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: {httpFailures: 3}}")
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed", c: "healthy chosen routed"})
	since := time.Now()
	w.die()
	w.live()
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed", c: "healthy chosen routed"})
	w.mustServe(a)
	if w.routedSince(a, since) {
		t.Errorf("%s has had traffic although it is sick", a)
	}
	w.sicken(false, a)
	w.untilTargets(map[string]string{a: "healthy chosen routed"})
}

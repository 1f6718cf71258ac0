package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/healthview"
)

// targets returns what /v1/targets says of each pod, as "unhealthy unhealthy removed": verdict,
// why, state.
func (w *world) targets() map[string]string {
	w.Helper()
	response, err := http.Get("http://" + w.metrics + healthview.Path)
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	var answer struct {
		Targets []struct{ UID, Health, Why, State string }
	}
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

// The real HAProxy, probes over the network, and the annotation of a Service: the sick are taken
// out, too many sick are not, a exclusion is not a matter of health, and what cannot be read
// changes nothing.
func TestChecks(t *testing.T) {
	w := newWorld(t, 3, time.Minute)
	a, b, c := w.pods[0], w.pods[1], w.pods[2]
	w.untilTargets(map[string]string{a: "unknown chosen routed", b: "unknown chosen routed",
		c: "unknown chosen routed"})

	w.sicken(true, a)
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: " +
		"{httpFailures: 2}}")
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed",
		c: "healthy chosen routed"})
	since := time.Now()
	w.mustServe(a)
	if w.routedSince(a, since) {
		t.Errorf("%s has traffic although it is unhealthy", a)
	}

	// What cannot be read changes nothing, and is said.
	w.api.annotate("{path: /healthz, intervall: 1s}")
	w.until("the annotation is refused, and the log names its key", func() bool {
		return w.metric("lameduck_agent_refused_checks") == "1" && strings.Contains(w.log.String(), "intervall")
	})
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed"})
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: " +
		"{httpFailures: 2}}")

	// More than half of them: all have traffic.
	w.sicken(true, b)
	w.untilTargets(map[string]string{a: "unhealthy failing-open routed", b: "unhealthy failing-open routed",
		c: "healthy chosen routed"})
	w.mustServe()
	if got := w.metric(`lameduck_agent_pool_failing_open{pool="web"}`); got != "1" {
		t.Errorf("failing open is %s", got)
	}
	// But not one that is drained. It is not counted either: of the other two, half are healthy.
	w.boss.drain(b)
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "unhealthy excluded removed"})
	since = time.Now()
	w.mustServe(a, b)
	if w.routedSince(a, since) || w.routedSince(b, since) {
		t.Errorf("%s or %s has traffic although it is unhealthy, or drained", a, b)
	}

	// They are healthy again; without a check every target is.
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

// The file is read as strictly as the annotation.
func TestHealthCheckOfTheFile(t *testing.T) {
	const good = `{apiVersion: lameduck.io/v1alpha1, kind: AgentConfiguration, health: {minHealthyPercent: 30},
		gateway: {haproxy: {masterSocket: /s, serversFile: /f, backends: [
			{backend: web, service: shop/web, lines: [mode http, timeout connect 1s, timeout server 1s],
				healthCheck: {protocol: tcp, interval: 2s}}]}}}`
	var f file
	if _, err := f.read([]byte(good), func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	for bad, names := range map[string][]string{
		strings.Replace(good, "tcp", "udp", 1):                           {"backends[0].healthCheck", "udp"},
		strings.Replace(good, "2s", "1ms", 1):                            {"backends[0].healthCheck", "interval"},
		strings.Replace(good, "30", "101", 1):                            {"minHealthyPercent", "101"},
		strings.Replace(good, "{protocol: tcp, interval: 2s}", "tcp", 1): {"backends[0].healthCheck", "object"},
	} {
		var f file
		_, err := f.read([]byte(bad), func(string) string { return "" })
		if err == nil || slices.ContainsFunc(names, func(n string) bool { return !strings.Contains(err.Error(), n) }) {
			t.Errorf("%s: %v, want %q", bad, err, names)
		}
	}
}

// An operator has switched annotations off: the agent probes as its file says, whatever the
// annotation of the Service says.
func TestAnnotationsThatAreIgnored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, time.Minute)
	a, b, c := w.pods[0], w.pods[1], w.pods[2]
	w.die()
	config, err := os.ReadFile(filepath.Join(w.dir, "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.write("agent.yaml", strings.Replace(string(config), "lines:", "healthCheck: {path: /healthz, interval: 1s, "+
		"timeout: 500ms, healthy: {successes: 1}, unhealthy: {httpFailures: 2}}, lines:", 1)+
		"health: {ignoreAnnotations: true}\n")
	w.api.annotate("{path: /healthz, interval: 1h, unhealthy: {httpFailures: 0}}")
	w.sicken(true, a)
	w.live()
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed",
		c: "healthy chosen routed"})
}

// An agent is killed, and the one that comes after it knows no verdicts: the sick pod gets not one
// request until it is well.
func TestTheSickStayOutOverARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, time.Minute)
	a, b, c := w.pods[0], w.pods[1], w.pods[2]
	w.sicken(true, a)
	w.api.annotate("{path: /healthz, interval: 1s, timeout: 500ms, healthy: {successes: 1}, unhealthy: " +
		"{httpFailures: 3}}")
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed",
		c: "healthy chosen routed"})
	since := time.Now()
	w.die()
	w.live()
	w.untilTargets(map[string]string{a: "unhealthy unhealthy removed", b: "healthy chosen routed",
		c: "healthy chosen routed"})
	w.mustServe(a)
	if w.routedSince(a, since) {
		t.Errorf("%s has had traffic although it is sick", a)
	}
	w.sicken(false, a)
	w.untilTargets(map[string]string{a: "healthy chosen routed"})
}

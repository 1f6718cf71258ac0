//go:build e2e

package nodes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

// modes are what is compared, each in a namespace of its own.
const (
	unprotected = "unprotected"
	sleeping    = "preStop sleep 5"
	lameduck    = "Lameduck"
)

// mode is one of them.
type mode struct {
	name   string
	work   work
	labels map[string]string
}

// wanted reports whether MODE, a regular expression for names of modes, asks for it.
func (m mode) wanted() bool { return regexp.MustCompile(os.Getenv("MODE")).MatchString(m.name) }

func modes() []mode {
	const replicas = 6
	outside := map[string]string{"lameduck.io/mode": "off"}
	return []mode{
		{unprotected, work{Namespace: "unprotected", Kind: "Deployment", Replicas: replicas}, outside},
		{sleeping, work{Namespace: "sleeping", Kind: "Deployment", Replicas: replicas, Sleep: 5}, outside},
		{lameduck, work{Namespace: "lameduck", Kind: "Deployment", Replicas: replicas},
			map[string]string{"lameduck.io/mode": "enforce"}},
	}
}

// row is a line of e2e.json.
type row struct {
	// Gateway is through which requests came, and Gate where Lameduck waits for it.
	Gateway  string  `json:"gateway"`
	Gate     string  `json:"gate"`
	Scenario string  `json:"scenario"`
	Mode     string  `json:"mode"`
	Traffic  traffic `json:"traffic"`
	App      string  `json:"app"`
	Requests int     `json:"requests"`
	Failed   int     `json:"failed"`
	// Seconds is how long it took until the last old pod was gone.
	Seconds float64 `json:"seconds"`

	// connections of clients that keep them, and how requests failed.
	connections int
	by          map[string]int
	text        string
}

// route is how clients reach an app.
type route struct {
	gateway, gate string
	start         func(t *testing.T, namespace, app string, how traffic) *clients
}

const (
	rollingUpdate = "rolling update"
	atBarrier     = "barrier" // the gate of gateways that are only observed
)

// scenario is a way in which pods go.
type scenario struct {
	name string
	// kind and replicas of the apps before. 0: as the mode has it.
	kind     string
	replicas int
	notOn    string
	// spread: the pods are created again, because they do not come back to a node by themselves.
	spread bool
	// old are the pods that go, of which left stay.
	old  func(*corev1.Pod) bool
	left int
	// cause makes them go. It returns when that is said, or done.
	cause func(ctx context.Context, l *lab, w work) error
	// after makes things as they were.
	after func(ctx context.Context, l *lab) error
	limit time.Duration
}

func everyPod(*corev1.Pod) bool { return true }

// each runs kubectl for each of the apps.
func each(ctx context.Context, l *lab, args func(app string) []string) error {
	for _, app := range apps {
		if _, err := l.Kubectl(ctx, args(app)...); err != nil {
			return err
		}
	}
	return nil
}

// restart changes the template of an app, as kubectl rollout restart does, and faster than that
// starts.
func restart(ctx context.Context, l *lab, w work) error {
	patch := fmt.Appendf(nil,
		`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`,
		time.Now().Format(time.RFC3339Nano))
	for _, app := range apps {
		var err error
		if w.Kind == "StatefulSet" {
			_, err = l.Kube.AppsV1().StatefulSets(w.Namespace).Patch(ctx, app, types.StrategicMergePatchType, patch,
				metav1.PatchOptions{})
		} else {
			_, err = l.Kube.AppsV1().Deployments(w.Namespace).Patch(ctx, app, types.StrategicMergePatchType, patch,
				metav1.PatchOptions{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func scenarios() []scenario {
	const half = 3
	return []scenario{
		{name: rollingUpdate, old: everyPod, cause: restart, limit: 2 * time.Minute},
		{
			name: "scale-in", old: everyPod, left: half, limit: time.Minute,
			cause: func(ctx context.Context, l *lab, w work) error {
				return each(ctx, l, func(app string) []string {
					return []string{"scale", "-n", w.Namespace, "deployment", app, fmt.Sprintf("--replicas=%d", half)}
				})
			},
		},
		{
			name: "node drain", spread: true, limit: 90 * time.Second,
			old: func(p *corev1.Pod) bool { return p.Spec.NodeName == "node-3" },
			cause: func(ctx context.Context, l *lab, w work) error {
				_, err := l.Kubectl(ctx, "drain", "node-3", "--ignore-daemonsets", "--delete-emptydir-data",
					"--pod-selector=app in (exit,graceful)", "--timeout=90s")
				return err
			},
			after: func(ctx context.Context, l *lab) error {
				_, err := l.Kubectl(ctx, "uncordon", "node-3")
				return err
			},
		},
		{name: "StatefulSet update", kind: "StatefulSet", replicas: half, old: everyPod, cause: restart,
			limit: 2 * time.Minute},
	}
}

// measure runs a scenario once with one kind of traffic, and returns a row for each app.
func (l *lab) measure(t *testing.T, s scenario, m mode, how traffic, via route) []row {
	t.Helper()
	w := m.work
	if s.kind != "" {
		w = w.with(s.kind, s.replicas)
	}
	w.NotOn = s.notOn
	if s.spread {
		l.deploy(t, w.with(w.Kind, 0))
	}
	l.deploy(t, w)
	if m.name == lameduck {
		l.age(t, w.Namespace) // only Lameduck considers it
	}
	running := map[string]*clients{}
	for _, app := range apps {
		running[app] = via.start(t, w.Namespace, app, how)
	}
	time.Sleep(time.Second) // clients ask for a while before
	old := l.pods(t, w.Namespace, s.old)
	line := l.startTimeline(t, w.Namespace)
	if line != nil {
		time.Sleep(200 * time.Millisecond) // its watches have begun
	}
	worked := l.agentsWorked(m)
	began := time.Now()
	caused := make(chan error, 1)
	go func() { caused <- s.cause(t.Context(), l, w) }()
	when, err := l.gone(t, w.Namespace, old, s.left, s.limit)
	if worked >= 0 {
		if now := l.agentsWorked(m); now >= 0 {
			t.Logf("%s, %s, %s: the node agents took %.2f of a core, all together", s.name, m.name, how,
				(now-worked)/time.Since(began).Seconds())
		}
	}
	if err != nil {
		l.Explain(t)
		t.Errorf("%s, %s, %s: %v", s.name, m.name, how, err)
	}
	if err := <-caused; err != nil {
		t.Errorf("%s, %s, %s: %v", s.name, m.name, how, err)
	}
	time.Sleep(1500 * time.Millisecond) // stale routes fail late
	l.tell(t, line, began)
	var rows []row
	for _, app := range apps {
		c := running[app].stop()
		r := row{
			Gateway: via.gateway, Gate: "none", Scenario: s.name, Mode: m.name, Traffic: how, App: app,
			Requests: c.requests, Failed: c.failed, Seconds: when[app].Sub(began).Seconds(),
			connections: c.connections, by: c.by, text: c.String(),
		}
		t.Logf("%s, %s, %s, %s, %s: %.1f s, %s", via.gateway, s.name, m.name, how, app, r.Seconds, c)
		if m.name == lameduck {
			r.Gate = via.gate
			for _, f := range c.first {
				t.Logf("  %s after %.0f ms, at %s, from %s: %s", f.Kind, f.TookMillis, f.Due.Format("15:04:05.000"),
					f.Source, f.Error)
			}
		}
		if m.name == lameduck && c.failed > 0 {
			l.said(t, began)
		}
		if c.skipped > 0 {
			t.Errorf("%s, %s: %d requests were never sent", s.name, m.name, c.skipped)
		}
		rows = append(rows, r)
	}
	if s.after != nil {
		if err := s.after(t.Context(), l); err != nil {
			t.Fatal(err)
		}
	}
	return rows
}

// agentsWorked returns the seconds for which CPUs have worked for the node agents, or -1 if
// Lameduck is not compared or an agent cannot be asked.
func (l *lab) agentsWorked(m mode) float64 {
	if m.name != lameduck {
		return -1
	}
	var sum float64
	for _, node := range l.Set.Machines {
		var one float64
		if _, err := fmt.Sscanf(l.tryMetrics(node.Name, "process_cpu_seconds_total"), "process_cpu_seconds_total %g",
			&one); err != nil {
			return -1
		}
		sum += one
	}
	return sum
}

// Everything that three nodes with Lameduck are good for, in one start of them. What takes parts of
// Lameduck away comes last.
func TestNodes(t *testing.T) {
	l := newLab(t, 3, machine.Options{})
	var namespaces []string
	for _, m := range modes() {
		l.namespace(t, m.work.Namespace, m.labels)
		namespaces = append(namespaces, m.work.Namespace)
	}
	l.addGateway(t, namespaces)
	l.addWebhooks(t)
	var rows []row
	t.Run("Table", func(t *testing.T) { rows = l.testTable(t) })
	t.Run("Gateways", func(t *testing.T) { l.testGateways(t, &rows) })
	t.Run("Kernel", func(t *testing.T) { l.testKernel(t, &rows) })
	write(t, rows)
	t.Run("LivenessRestart", l.testLivenessRestart)
	t.Run("OOM", l.testOOM)
	t.Run("ExecHook", l.testExecHook)
	t.Run("StatedWait", l.testStatedWait)
	t.Run("Scopes", l.testScopes)
	t.Run("FrozenAgent", l.testFrozenAgent)
	t.Run("NoAgents", l.testNoAgents)
}

// The table of the README: what happens to requests, and how long it takes.
func (l *lab) testTable(t *testing.T) []row {
	runs, _ := strconv.Atoi(os.Getenv("RUNS"))
	all := modes()
	haproxy := l.gatewayAddress(t)
	only := regexp.MustCompile(os.Getenv("ONLY")) // scenarios
	var rows []row
	for range max(runs, 1) {
		for i, m := range all {
			if !m.wanted() {
				continue
			}
			via := l.everyWay(haproxy, i)
			for _, s := range scenarios() {
				if !only.MatchString(s.name) {
					continue
				}
				for _, how := range []traffic{perRequest, keptAlive} {
					rows = append(rows, l.measure(t, s, m, how, via)...)
				}
			}
			if m.name == lameduck {
				l.tellWaits(t)
			}
			l.deploy(t, m.work.with("Deployment", 0))
		}
		if only.MatchString(cutOff) {
			rows = append(rows, l.measureCut(t, all, haproxy)...)
		}
	}
	table(t, rows)
	promises(t, rows)
	return rows
}

// write writes e2e.json.
func write(t *testing.T, rows []row) {
	t.Helper()
	text, err := json.MarshalIndent(rows, "", "  ")
	if err == nil {
		err = os.WriteFile("../../../e2e.json", append(text, '\n'), 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// everyWay is through ClusterIP, NodePort and HAProxy at once, to the apps of mode i.
func (l *lab) everyWay(haproxy string, i int) route {
	return route{gateway: "kube-proxy, haproxy", gate: "hold, barrier",
		start: func(t *testing.T, namespace, app string, how traffic) *clients {
			return l.startClients(t, namespace, app,
				fmt.Sprintf("http://%s:%d/", haproxy, 8000+10*i+slices.Index(apps, app)), how)
		}}
}

// tellWaits logs how hooks ended and how long kube-proxy took on each node: what operators could
// not know when they chose their sleep.
func (l *lab) tellWaits(t *testing.T) {
	t.Helper()
	for _, m := range l.Set.Machines {
		var some strings.Builder
		for line := range strings.Lines(l.metrics(t, m.Name, "lameduck_")) {
			if (strings.HasPrefix(line, "lameduck_barrier_") || strings.HasPrefix(line, "lameduck_propagation_")) &&
				!strings.HasSuffix(line, " 0\n") {
				some.WriteString(line)
			}
		}
		t.Logf("agent of %s:\n%s", m.Name, some.String())
	}
}

// table prints what was measured: of several runs the sum of requests and the median of times.
func table(t *testing.T, rows []row) {
	t.Helper()
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "gateway\tgate\tscenario\ttraffic\tapp\tmode\trequests\tfailed\tseconds")
	for _, g := range groups(rows) {
		of := g[0]
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%.1f\n", of.Gateway, of.Gate, of.Scenario, of.Traffic,
			of.App, of.Mode, total(g).Requests, total(g).Failed, median(g))
	}
	w.Flush()
	t.Log("\n" + text.String())
}

// groups are rows of the same kind, in the order in which scenarios were run.
func groups(rows []row) [][]row {
	var all [][]row
	for _, s := range rows {
		i := slices.IndexFunc(all, func(g []row) bool {
			of := g[0]
			return of.Gateway == s.Gateway && of.Scenario == s.Scenario && of.Mode == s.Mode &&
				of.Traffic == s.Traffic && of.App == s.App
		})
		if i < 0 {
			all = append(all, nil)
			i = len(all) - 1
		}
		all[i] = append(all[i], s)
	}
	return all
}

func total(g []row) row {
	sum := g[0]
	for _, r := range g[1:] {
		sum.Requests += r.Requests
		sum.Failed += r.Failed
		sum.connections += r.connections
	}
	return sum
}

func median(g []row) float64 {
	var all []float64
	for _, r := range g {
		all = append(all, r.Seconds)
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// barrierBound is how long a hook may last, in seconds. syncTime is how long kube-proxy takes to
// write its rules, throttle how long Traefik takes to apply changes that come one after the other,
// and keptMost how long connections that clients keep are waited for.
const (
	barrierBound = 30.0
	syncTime     = 1.0
	throttle     = 2.0
	keptMost     = 1.0
)

// promises asserts what is promised of Lameduck, and reports the goals.
func promises(t *testing.T, rows []row) {
	t.Helper()
	all := groups(rows)
	for _, g := range all {
		sum := total(g)
		if sum.Requests == 0 {
			t.Errorf("%s, %s: no requests", sum.Scenario, sum.Mode)
		}
		if sum.Mode != lameduck {
			continue
		}
		at := fmt.Sprintf("%s, %s, %s, %s, with Lameduck", sum.Gateway, sum.Scenario, sum.Traffic, sum.App)
		switch {
		case sum.Traffic == perRequest && sum.Failed > 0, sum.App == "graceful" && sum.Failed > 0:
			t.Errorf("%s: %d of %d requests failed, want 0", at, sum.Failed, sum.Requests)
		case sum.Failed > 0 && sum.Failed <= sum.connections:
			t.Logf("%s: %d requests failed, of at most one on each of %d connections", at, sum.Failed, sum.connections)
		case sum.Failed > sum.connections:
			t.Errorf("%s: %d requests failed on %d connections, want one each at most", at, sum.Failed, sum.connections)
		}
		// How long it takes is a goal, and reported as missed where it is: clients, control plane
		// and three nodes share a computer. That no wait runs to its bound, or beyond where a node
		// is cut off, is a promise.
		goal := func(than string, most float64) {
			verdict := "pass"
			if median(g) > most {
				verdict = "MISS"
			}
			t.Logf("goal: %s: %.1f s until the last old pod was gone, at most %.1f s, %s: %s", at, median(g), most,
				than, verdict)
			if stuck := most + barrierBound; median(g) > stuck {
				t.Errorf("%s: %.1f s until the last old pod was gone, want %.1f s at most", at, median(g), stuck)
			}
		}
		for _, other := range all {
			// The node that is cut off is not measured twice.
			if other[0].Gateway != sum.Gateway || other[0].Scenario != sum.Scenario || other[0].App != sum.App ||
				other[0].Traffic != sum.Traffic && sum.Scenario != cutOff {
				continue
			}
			switch {
			case other[0].Mode == unprotected && sum.Scenario == cutOff:
				// then the node is known not to be ready
				goal("unprotected and the bound of the first that go", 1.25*median(other)+barrierBound)
			case other[0].Mode == unprotected && sum.Gate == atBarrier:
				failed := 0 // of all its rows: with about one for each pod, one row may have none
				for _, g := range all {
					if s := total(g); s.Mode == unprotected && s.Gateway == sum.Gateway && s.Scenario == sum.Scenario {
						failed += s.Failed
					}
				}
				if failed == 0 {
					t.Errorf("%s does not count: unprotected, no request failed either", at)
				}
				if sum.Gateway == "traefik" {
					goal("unprotected and Traefik's throttle in each wave", median(other)+throttle*waves(sum.Scenario))
				} else {
					goal("unprotected and a quarter", 1.25*median(other))
				}
			case other[0].Mode == unprotected:
				goal("unprotected, a sync of kube-proxy and 1 s in each wave",
					median(other)+(syncTime+keptMost)*waves(sum.Scenario))
			case other[0].Mode == sleeping && sum.Scenario != cutOff:
				goal(sleeping, median(other))
			}
		}
	}
}

// waves is how many pods of an app go one after the other, each of which waits for kube-proxy and
// for its connections.
func waves(scenario string) float64 {
	if scenario == "StatefulSet update" {
		return 3
	}
	return 1
}

// cutOff is a rolling update on two nodes while the third is cut off.
const cutOff = "node cut off"

// measureCut cuts node-3 off and updates apps that have no pods there. Its agent owes until the API
// server says that its node is not ready, or until the deadline.
func (l *lab) measureCut(t *testing.T, all []mode, haproxy string) []row {
	t.Helper()
	var rows []row
	for i, m := range all {
		if !m.wanted() {
			continue
		}
		via := l.everyWay(haproxy, i)
		node := l.Set.Machines[2]
		var cut time.Time
		s := scenario{
			name: cutOff, notOn: node.Name, old: everyPod, limit: 4 * time.Minute,
			cause: func(ctx context.Context, l *lab, w work) error {
				if err := node.Cut(); err != nil {
					return err
				}
				cut = time.Now()
				return restart(ctx, l, w)
			},
			after: func(ctx context.Context, l *lab) error {
				if m.name == lameduck {
					l.checkCut(t, m.work.Namespace, node.Name, cut)
				}
				if err := node.Heal(); err != nil {
					return err
				}
				_, err := l.Kubectl(ctx, "wait", "--for=condition=Ready=True", "node/"+node.Name, "--timeout=60s")
				return err
			},
		}
		rows = append(rows, l.measure(t, s, m, perRequest, via)...)
		if m.name == lameduck {
			rows = append(rows, l.measure(t, s, m, keptAlive, via)...)
		}
		l.deploy(t, m.work.with("Deployment", 0))
	}
	return rows
}

// checkCut looks at how the barriers ended while a node is cut off: none after its bound, and each
// names the agent of that node: as the one it waited for, or, once the API server says that the
// node is not ready, as one that is away.
func (l *lab) checkCut(t *testing.T, namespace, name string, cut time.Time) {
	t.Helper()
	node, err := l.Kube.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	known := !slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	pods, err := l.Kube.CoreV1().Pods(agents).List(t.Context(),
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + name})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("agents of %s: %v, %v", name, pods, err)
	}
	all, err := l.passed(t, cut, namespace+"/")
	if err != nil || len(all) == 0 {
		t.Fatalf("coordinators say nothing of barriers: %v", err)
	}
	waited := 0
	for _, one := range all {
		if one.Time.Before(cut) || one.Reason == "PodDeleted" {
			continue
		}
		if one.Since > barrierBound+1 {
			t.Errorf("the barrier of pod %s took %.1f s, its bound is %.0f s", one.Pod, one.Since, barrierBound)
		}
		if one.Reason == "Deadline" {
			waited++
		}
		said := slices.Concat(one.Waiting, one.Suspended, one.Away, one.Lost)
		if !slices.ContainsFunc(said, func(who string) bool { return strings.Contains(who, pods.Items[0].Name) }) {
			t.Errorf("the barrier of pod %s ended (%s) and names %v, not the agent of %s", one.Pod, one.Reason, said,
				name)
		}
	}
	t.Logf("%d of %d barriers ended at their bound; the API server knows that %s is not ready: %t", waited, len(all),
		name, known)
	if waited == 0 && !known {
		t.Errorf("no barrier has waited for the agent of %s, which counts as ready", name)
	}
}

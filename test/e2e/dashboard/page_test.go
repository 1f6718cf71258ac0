package dashboard

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	neturl "net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/cluster"
)

// made is a coordinator that knows what a test says.
type made struct {
	mu   sync.Mutex
	view coordinator.View
}

func (m *made) set(change func(v *coordinator.View)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.view)
}

func (m *made) View(int, int) coordinator.View {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.view
	v.At = time.Now()
	return v
}

func (m *made) Reports() (time.Time, []coordinator.Report) {
	ms := time.Millisecond
	return time.Time{}, []coordinator.Report{{Namespace: "shop", Deletions: 312, InFlight: 41, Unmeasured: 2,
		Took: []time.Duration{1900 * ms, 45 * ms, 10 * ms}}}
}

func (m *made) Acknowledgers([]drain.Service) ([]drain.Acknowledger, map[drain.AgentID]string) {
	web := drain.Service{Namespace: "shop", Name: "web"}
	return []drain.Acknowledger{
		{AgentInfo: drain.AgentInfo{ID: "a", Name: "edge/haproxy-0", Connected: true, Declared: true}, Hold: true,
			Routes: []drain.Route{{Service: web, Via: drain.Endpoints, Kind: drain.Directed,
				Granularity: drain.PerRequest}}},
		{AgentInfo: drain.AgentInfo{ID: "m", Name: "edge/mesh-0", Connected: true, Declared: true},
			Routes: []drain.Route{{Service: web, Via: drain.ClusterIP, Kind: drain.Directed,
				Granularity: drain.PerRequest}}},
	}, map[drain.AgentID]string{"a": "haproxy", "m": "envoy"}
}

func (m *made) Explain(_ context.Context, _ time.Time, operation admission.Operation, namespace,
	name string) (admission.Explanation, error) {
	if name != "web-7d9c5b6f4-x2x8q" {
		return admission.Explanation{}, fmt.Errorf("%w: %s/%s", admission.ErrNoPod, namespace, name)
	}
	return admission.Explanation{
		Pod:     &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-1")}},
		Facts:   admission.Facts{Operation: operation},
		Verdict: admission.Verdict{Action: admission.Drain, Reason: admission.Draining},
		Targets: []drain.Targets{{Service: drain.Service{Namespace: "shop", Name: "web"},
			Usable: []drain.UID{"uid-1", "uid-2"}}},
	}, nil
}

// Review lets the bearer of "good" look.
func (m *made) Review(_ context.Context, token string) error {
	switch token {
	case "good":
		return nil
	case "weak":
		return fmt.Errorf("%w: jane needs the verb get on drains.lameduck.io in all namespaces",
			coordinator.ErrForbidden)
	case "away":
		return errors.New("the API server does not answer")
	default:
		return coordinator.ErrUnauthenticated
	}
}

// empty is a replica that has seen nothing.
func empty() *made {
	return &made{view: coordinator.View{
		Began: time.Now().Add(-time.Hour), Lease: drain.Holder{Replica: "lameduck-webhook-5c9f7d4b8-mk2vp", Epoch: "e"},
		Times: drain.DefaultTimes(), MaxHolds: 32, Propagation: []api.Propagation{},
		TargetHealth: api.TargetHealth{Where: "at /v1/targets of each agent", Services: []api.ServiceHealth{}},
	}}
}

// busy is a replica with something of everything.
func busy() *made {
	m := empty()
	now := time.Now()
	pod := func(n int, name string) drain.Pod {
		return drain.Pod{Namespace: "shop", Name: name, UID: drain.UID(fmt.Sprint("uid-", n))}
	}
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	v := &m.view
	v.Holds, v.Expected, v.Missing, v.Suspended, v.Elsewhere, v.Open = 2, 5, 1, 1, 2, 3
	word := func(agent string, state drain.State, since time.Duration) coordinator.AgentReport {
		w := coordinator.AgentReport{AgentReport: drain.AgentReport{Agent: drain.AgentID(agent), Name: agent,
			State:     state,
			Connected: true}, Gateway: "haproxy"}
		if since > 0 {
			w.Since = ago(since)
		}
		return w
	}
	away := word("edge/haproxy-eu-west-2", drain.StateUnknown, 0)
	away.Connected = false
	v.Drains = []coordinator.Drain{
		{Status: drain.Status{Pod: pod(1, "checkout-6f7f9c5d8b-l4kzt"), Phase: drain.Unrouting,
			Since: ago(17 * time.Second), Deadline: now.Add(13 * time.Second), Begun: ago(17 * time.Second), Owed: 3,
			Waiting: []drain.Waiting{{Name: "edge/haproxy-eu-west-2"}, {Name: "edge/haproxy-eu-west-1"}}},
			Entered: ago(17 * time.Second), Told: ago(17 * time.Second),
			Reports: []coordinator.AgentReport{away, word("edge/haproxy-eu-west-1", drain.Removed, 14*time.Second),
				word("edge/haproxy-0", drain.Idle, 16*time.Second)}, Acknowledgers: 3},
		{Status: drain.Status{Pod: pod(2, "web-7d9c5b6f4-x2x8q"), Phase: drain.Quiescing, Since: ago(2 * time.Second),
			Deadline: now.Add(28 * time.Second), Begun: ago(2 * time.Second), Owed: 1,
			Waiting: []drain.Waiting{{Name: "edge/haproxy-0"}}}, Entered: ago(time.Second), Told: ago(2 * time.Second),
			Reports: []coordinator.AgentReport{word("edge/haproxy-0", drain.Removed, time.Second)}, Acknowledgers: 1},
		{Status: drain.Status{Pod: pod(3, "web-7d9c5b6f4-9hvdm"), Phase: drain.Queued, Since: ago(time.Second),
			Deadline: now.Add(29 * time.Second), Begun: ago(time.Second), Owed: 1}, Entered: ago(time.Second)},
	}
	for i, a := range []struct {
		name            string
		gateway         string
		connected, susp bool
		removed         time.Duration
	}{
		{"edge/haproxy-0", "haproxy", true, false, 4200 * time.Microsecond},
		{"edge/haproxy-eu-west-1", "haproxy", true, false, 11 * time.Millisecond},
		{"edge/haproxy-eu-west-2", "haproxy", false, false, 8 * time.Millisecond},
		{"lameduck-node/agent-7kq2x", "kube-proxy", true, false, 240 * time.Millisecond},
		{"edge/haproxy-canary", "haproxy", true, true, 0},
	} {
		known := drain.AgentInfo{ID: drain.AgentID(fmt.Sprint("agent-", i)), Name: a.name, Expected: true, Ready: true,
			Connected: a.connected, Declared: true, Services: 12 + i, Suspended: a.susp}
		if !a.connected {
			known.Lost = ago(17 * time.Second)
		}
		v.Agents = append(v.Agents, coordinator.Agent{AgentInfo: known, Gateway: a.gateway, Protocol: 1,
			Features: []string{"leave"}, Connected: ago(50 * time.Minute), Posted: ago(time.Second),
			Age: 3 * time.Millisecond, Removed: a.removed, Idle: a.removed * 5})
	}
	reasons := []drain.Reason{drain.Acknowledged, drain.Acknowledged, drain.Deadline, drain.Acknowledged,
		drain.Acknowledged, drain.Abandoned, drain.IdleBound, drain.PodDeleted}
	for i := range 14 {
		o := coordinator.Outcome{Pod: pod(100+i, "web-5b8d6c7f9-zz2x"+"bcdfghjklmnpqr"[i:i+1]),
			At: ago(time.Duration(i*i+3) * time.Second), Reason: reasons[i%len(reasons)], End: drain.PodDeleted,
			Took: time.Duration(31+i*17) * time.Millisecond}
		switch o.Reason {
		case drain.Deadline:
			o.Took, o.Silent = 30*time.Second, []string{"edge/haproxy-canary"}
		case drain.IdleBound:
			o.Took, o.Silent = 10*time.Second, []string{"edge/haproxy-0"}
		}
		v.Outcomes = append(v.Outcomes, o)
	}
	v.OpenBarriers, v.Barred = 2, 1
	node := func(name string, state drain.State, since time.Duration) coordinator.AgentReport {
		w := word(name, state, since)
		w.Gateway = "kube-proxy"
		return w
	}
	v.Barriers = []coordinator.OpenBarrier{
		{View: drain.View{Status: drain.Status{Pod: pod(41, "cart-75c8d9f7b-tt2xz"), Phase: drain.Unrouting,
			Since: ago(4 * time.Second), Deadline: now.Add(26 * time.Second), Owed: 3,
			Waiting: []drain.Waiting{{Name: "lameduck-node/agent-7kq2x"}}, Stated: 25 * time.Second},
			ByName: "lameduck-node/agent-4s8mf", Last: true},
			Reports: []coordinator.AgentReport{node("lameduck-node/agent-7kq2x", drain.Routing, 3*time.Second),
				node("lameduck-node/agent-4s8mf", drain.Idle, time.Second)}, Entered: ago(4 * time.Second)},
		{View: drain.View{Status: drain.Status{Pod: pod(42, "cart-75c8d9f7b-9mhd4"), Phase: drain.Released,
			Reason: drain.Acknowledged, Since: ago(6 * time.Second), Deadline: now.Add(24 * time.Second), Owed: 3},
			ByName: "lameduck-node/agent-7kq2x"}, Entered: ago(5 * time.Second)},
	}
	believe := func(name string, c api.TargetCounts, open bool, targets ...api.UnhealthyTarget) api.GatewayHealth {
		return api.GatewayHealth{Agent: name, Gateway: "haproxy", TargetCounts: c, FailingOpen: open, Checked: true,
			Targets: append([]api.UnhealthyTarget{}, targets...)}
	}
	broken := api.UnhealthyTarget{Address: "10.244.3.17:8080", Pod: "shop/checkout-6f7f9c5d8b-9d2zk",
		Why: "failing-open", Last: "http failure: 503", Since: ago(5 * time.Minute)}
	sick := broken
	sick.Pod, sick.Why = "shop/web-7d9c5b6f4-x2x8q", "unhealthy"
	v.TargetHealth = api.TargetHealth{
		Reported: true, Where: v.TargetHealth.Where, Agents: 3, Known: 14, Troubled: 2,
		All: api.TargetCounts{Usable: 31, Unhealthy: 4, Excluded: 2},
		Services: []api.ServiceHealth{
			{Namespace: "shop", Name: "checkout", Gateways: 3, FailingOpen: 1, Unwell: 1, Trouble: true,
				Says: []api.GatewayHealth{
					believe("edge/haproxy-0", api.TargetCounts{Usable: 1, Unhealthy: 3}, true, broken, broken, broken),
					believe("edge/haproxy-eu-west-1", api.TargetCounts{Usable: 4}, false)}},
			{Namespace: "shop", Name: "web", Gateways: 1, Unwell: 1, Trouble: true,
				Says: []api.GatewayHealth{believe("edge/haproxy-0",
					api.TargetCounts{Usable: 3, Unhealthy: 1, Excluded: 1}, false, sick)}},
		},
	}
	for i := range 12 {
		v.TargetHealth.Services = append(v.TargetHealth.Services,
			api.ServiceHealth{Namespace: "shop", Name: fmt.Sprintf("service-%02d", i), Gateways: 2,
				Says: []api.GatewayHealth{believe("edge/haproxy-0", api.TargetCounts{Usable: 2}, false),
					believe("edge/haproxy-eu-west-1", api.TargetCounts{Usable: 2}, false)}})
	}
	v.Propagation = []api.Propagation{
		{Gateway: "haproxy", What: "removed", Count: 2381, Samples: 1000, P50Seconds: .004, P90Seconds: .009,
			P99Seconds: .038, MaxSeconds: .41},
		{Gateway: "haproxy", What: "idle", Count: 2380, Samples: 1000, P50Seconds: .027, P90Seconds: .061,
			P99Seconds: .94, MaxSeconds: 10},
		{Gateway: "kube-proxy", What: "removed", Count: 311, Samples: 311, P50Seconds: .21, P90Seconds: .73,
			P99Seconds: 1.02, MaxSeconds: 1.4},
		{Gateway: "kube-proxy", What: "idle", Count: 311, Samples: 311, P50Seconds: .34, P90Seconds: .9,
			P99Seconds: 2.1, MaxSeconds: 9},
	}
	return m
}

// serve serves a made coordinator's dashboard on an address, and returns its URL and what ends it.
func serve(t *testing.T, m *made, address string) (url string, end func()) {
	t.Helper()
	d := dashboard.New(dashboard.Options{
		Coordinator: m, Explainer: m, Reviewer: m, Coverage: covers, Summary: gaps,
		Log:  slog.New(slog.DiscardHandler),
		Node: func(name string, _ drain.AgentID) string { return "node-" + name[len(name)-1:] },
		Pod: func(of drain.Pod) *corev1.Pod {
			hook := func(h corev1.LifecycleHandler) *corev1.Lifecycle { return &corev1.Lifecycle{PreStop: &h} }
			return &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{admission.BarrierIDAnnotation: "id",
					admission.BarrierUncoveredAnnotation: "tls"}},
				Spec: corev1.PodSpec{NodeName: "node-b", Containers: []corev1.Container{
					{Name: "app",
						Lifecycle: hook(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/v1/wait/id"}})},
					{Name: "log",
						Lifecycle: hook(corev1.LifecycleHandler{
							Exec: &corev1.ExecAction{Command: []string{"lameduck-wait", "id"}}})},
				}},
			}
		},
	})
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(d.Handler(listener.Addr()))
	server.Listener.Close()
	server.Listener = listener
	scheme := "http"
	if dashboard.Loopback(listener.Addr()) {
		server.Start()
	} else {
		scheme = "https"
		server.StartTLS()
	}
	end = sync.OnceFunc(func() {
		server.CloseClientConnections()
		server.Close()
	})
	t.Cleanup(end)
	return scheme + "://" + listener.Addr().String() + "/", end
}

// Everything that there may be to see, at every width and in both colours: nothing is cut off,
// nothing overflows, axe-core finds nothing wrong, and the console is silent.
func TestThePageShowsEverything(t *testing.T) {
	url, _ := serve(t, busy(), "127.0.0.1:0")
	b := start(t)
	b.look(wide, "light")
	b.open(url)
	b.await("#connection", "Live")
	b.await("#observed-table", "shop")
	for selector, texts := range map[string][]string{
		"#replica": {"lameduck-webhook-5c9f7d4b8-mk2vp"},
		".tiles": {"Draining now 3", "and 2 through other replicas", "4 of 5", "1 missing, 1 suspended",
			"Waiting to stop 1", "1 may stop", "Targets unhealthy 4", "1 Service fails open"},
		"#drains-table": {"checkout-6f7f9c5d8b-l4kzt", "Unrouting", "edge/haproxy-eu-west-2 not connected",
			"removed, requests still run", "1 of 3 have acknowledged", "Quiescing", "Queued", "waits for capacity",
			"s goes on in any case in "},
		"#rollouts-table": {"shop/web 12 of 14 3 30.0 s 5b8d6c7f9-zz2xd, at the hold"},
		"#drains-note":    {"2 pods are drained through replicas that have not answered"},
		"#verdict": {"shop/checkout-6f7f9c5d8b-l4kzt has waited ",
			"s for edge/haproxy-eu-west-2, which is not connected", "kubectl -n edge describe pod haproxy-eu-west-2",
			"LameduckAgentMissing", "It goes on without that in "},
		"#barriers-table": {"cart-75c8d9f7b-tt2xz on node-b",
			"Unrouting", "lameduck-node/agent-7kq2x still routes, for ", "2 of 3 have acknowledged",
			"a stated wait of 25.0 s", "no other endpoint is ready",
			"hook httpGet and exec, asked by lameduck-node/agent-4s8mf", "not covered: tls",
			"Released", "its hooks were answered"},
		"#health-table": {"shop/checkout fails open at 1 of 3 gateways",
			"edge/haproxy-0 fails open: 1 healthy, 3 unhealthy",
			"shop/checkout-6f7f9c5d8b-9d2zk (10.244.3.17:8080) gets traffic all the same: http failure: 503, for 5 min",
			"edge/haproxy-eu-west-1 4 healthy", "gateways differ", "shop/web unhealthy targets",
			"3 healthy, 1 unhealthy, 1 excluded", "gets no traffic", "shop/service-00 well", "all 2 gateways"},
		"#outcomes-table": {"Deadline", "edge/haproxy-canary", "30.0 s", "Abandoned", "it lives on", "IdleBound"},
		"#speed-table":    {"haproxy removed 4.0 ms 9.0 ms 38 ms 410 ms 1000 (of 2381)", "kube-proxy idle 340 ms"},
		"#agents-table":   {"edge/haproxy-canary", "suspended", "missing", "for 50 min", "node-1"},
		"#health-note":    {"/v1/targets"},
		"#observed-table": {"shop 312 45 ms 1.9 s 41 2"},
	} {
		for _, text := range texts {
			if got := b.text(selector); !strings.Contains(got, text) {
				t.Errorf("%s says %q, want %q", selector, got, text)
			}
		}
	}
	if got := of[int](b, "document.querySelectorAll('#plot svg .bar').length"); got != 4 {
		t.Errorf("%d bars", got)
	}
	if got := of[string](b, "document.title"); got != "(3) Lameduck" {
		t.Errorf("title %q", got)
	}
	b.axe()
	for _, scheme := range []string{"light", "dark"} {
		for _, width := range []int64{wide, 768, phone, 320} {
			b.look(width, scheme)
			if over := b.settled(b.overflows); over != "" {
				t.Errorf("at %d: wider than the window: %s", width, over)
			}
			if wrong := b.settled(b.violations); wrong != "" {
				t.Errorf("at %d, %s: %s", width, scheme, wrong)
			}
			b.picture(fmt.Sprintf("made-%s-%d", scheme, width), true)
		}
	}
}

// A page that has nothing to show says what it is for, and one whose replica has gone says since
// when it knows nothing.
func TestThePageTeachesAndAdmits(t *testing.T) {
	m := empty()
	url, end := serve(t, m, "127.0.0.1:0")
	b := start(t)
	b.look(wide, "light")
	b.open(url)
	b.await("#connection", "Live")
	for _, selector := range []string{"#drains-empty", "#barriers-empty", "#outcomes-empty", "#speed-empty",
		"#health-empty", "#agents-empty"} {
		if b.text(selector) == "" {
			t.Errorf("%s is not shown", selector)
		}
	}
	b.picture("made-empty", true)
	m.set(func(v *coordinator.View) { *v = busy().view })
	b.await("#drains-table", "checkout-6f7f9c5d8b-l4kzt")
	if got := b.text("#drains-empty"); got != "" {
		t.Errorf("with drains it still says %q", got)
	}
	b.await("#announce", "3 pods are draining. 1 pod waits to stop. shop/checkout fails open.")
	b.expectLoss()
	end()
	b.await("#connection", "Connection lost, last seen")
	b.await("#lost", "kubectl port-forward")
	b.await("#verdict", "Nothing is known since")
	was := b.text("#drains-table")
	time.Sleep(1500 * time.Millisecond) // a clock on the page would tick
	if is := b.text("#drains-table"); is != was {
		t.Errorf("what is old grows older: %q, then %q", was, is)
	}
	b.picture("made-lost", false)
	// It comes back by itself, in the same place.
	serve(t, m, strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/"))
	b.await("#connection", "Live")
	b.awaitThat("end of the banner", func() bool { return b.text("#lost") == "" })
}

// Where nothing is new time passes all the same: what went wrong is not told of for ever, who
// becomes late is, and agents that are gone do not count as well.
func TestThePageKnowsTheTime(t *testing.T) {
	m := empty()
	url, _ := serve(t, m, "127.0.0.1:0")
	b := start(t)
	b.open(url)
	b.await("#connection", "Live")
	// What the page says for a few seconds only is noted as it is drawn.
	of[bool](b, `window.said = [];
		new MutationObserver(() => { said.push(document.querySelector('#verdict').innerText); })
			.observe(document.querySelector('#verdict'), {subtree: true, childList: true, characterData: true}); true`)
	said := func(text string) {
		t.Helper()
		b.awaitThat(fmt.Sprintf("%q in the verdict, now or before", text), func() bool {
			return of[bool](b, fmt.Sprintf("said.some((s) => s.includes(%q))", text))
		})
	}
	now := time.Now()
	m.set(func(v *coordinator.View) {
		v.Expected = 1
		v.Agents = []coordinator.Agent{{AgentInfo: drain.AgentInfo{ID: "a", Name: "edge/haproxy-0", Expected: true,
			Ready:     true,
			Connected: true, Declared: true}, Connected: now.Add(-time.Hour)}}
		v.Outcomes = []coordinator.Outcome{{Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "u"},
			At: now.Add(8*time.Second - 10*time.Minute), Reason: drain.Deadline, End: drain.PodDeleted,
			Took: 30 * time.Second}}
	})
	said("shop/web-1 went")
	b.await("#verdict", "all is well: 1 gateway is connected")
	m.set(func(v *coordinator.View) {
		now := time.Now()
		v.Open = 1
		v.Drains = []coordinator.Drain{{
			Status: drain.Status{Pod: drain.Pod{Namespace: "shop", Name: "web-2", UID: "w"}, Phase: drain.Unrouting,
				Since: now, Deadline: now.Add(10 * time.Second), Begun: now, Owed: 1,
				Waiting: []drain.Waiting{{Name: "edge/haproxy-0"}}},
			Entered: now, Told: now, Acknowledgers: 1,
			Reports: []coordinator.AgentReport{{AgentReport: drain.AgentReport{Agent: "a", Name: "edge/haproxy-0",
				State: drain.Routing, Connected: true, Since: now}}},
		}}
	})
	said("1 pod is draining, no gateway is late")
	b.await("#verdict", "shop/web-2 has waited")
	m.set(func(v *coordinator.View) {
		v.Expected, v.Open, v.Drains = 0, 0, nil
		gone := v.Agents[0] // not changed in place: a view that was taken has it
		gone.Expected, gone.AgentInfo.Connected = false, false
		v.Agents = []coordinator.Agent{gone}
	})
	b.await("#verdict", "No agent is left: deletions continue as without Lameduck.")
}

// A page outlives its replica, and goes on with one of the version before: what that does not tell
// is not there, and all else is.
func TestThePageSpeaksWithAnOlderReplica(t *testing.T) {
	url, _ := serve(t, busy(), "127.0.0.1:0")
	to, err := neturl.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Get(url + strings.TrimPrefix(api.ViewPath, "/"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var old map[string]any
	if err := json.NewDecoder(response.Body).Decode(&old); err != nil {
		t.Fatal(err)
	}
	delete(old, "barriers")
	old["targetHealth"] = map[string]any{"reported": false, "where": "at each agent"}
	for _, o := range old["outcomes"].([]any) {
		delete(o.(map[string]any), "gate")
	}
	view, err := json.Marshal(old)
	if err != nil {
		t.Fatal(err)
	}
	rest := httputil.NewSingleHostReverseProxy(to)
	older := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.ViewPath {
			rest.ServeHTTP(w, r)
			return
		}
		_, _ = w.Write(view)
	}))
	t.Cleanup(func() { older.CloseClientConnections(); older.Close() })
	b := start(t)
	b.expectLoss()
	b.open(older.URL)
	b.await("#drains-table", "checkout-6f7f9c5d8b-l4kzt")
	b.await("#agents-table", "edge/haproxy-canary")
	b.await("#health-empty", "No agent has reported health yet.")
	b.await("#barriers-empty", "No pod waits at the barrier.")
}

// Rows that say the same are left alone: a selection stays, and nothing is read out again.
func TestThePageLeavesAloneWhatIsTheSame(t *testing.T) {
	m := busy()
	url, _ := serve(t, m, "127.0.0.1:0")
	b := start(t)
	b.open(url)
	b.await("#drains-table", "checkout-6f7f9c5d8b-l4kzt")
	of[bool](b, "document.querySelector('#drains-table tbody tr').mark = 1, "+
		"document.querySelectorAll('#drains-table tbody tr')[1].mark = 2, true")
	m.set(func(v *coordinator.View) { v.Drains, v.Open = v.Drains[1:], 2 })
	b.awaitThat("row less", func() bool {
		return of[int](b,
			"document.querySelectorAll('#drains-table tbody tr').length") == 2
	})
	if got := of[int](b, "document.querySelector('#drains-table tbody tr').mark ?? 0"); got != 2 {
		t.Errorf("the row that stays was made again: mark %d", got)
	}
}

// By keyboard alone: everything can be reached, and where one is can be seen.
func TestThePageIsReachedByKeyboard(t *testing.T) {
	url, _ := serve(t, busy(), "127.0.0.1:0")
	b := start(t)
	b.open(url)
	b.await("#drains-table", "checkout")
	var reached []string
	for len(reached) < 60 && !slices.Contains(reached, "BUTTON") {
		b.do(chromedp.KeyEvent(kb.Tab))
		at := of[string](b,
			`(() => { const e = document.activeElement; const s = getComputedStyle(e); return (e.id || e.className || e.tagName) + (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 ? '' : ' UNSEEN'); })()`)
		if at != "A" { // pods
			reached = append(reached, at)
		}
	}
	want := []string{"skip", "outcomes-more", "health-more", "explain-namespace", "explain-pod", "explain-operation",
		"BUTTON"}
	if !slices.Equal(reached, want) {
		t.Fatalf("reached %q, want %q", reached, want)
	}
	// Each control has a name, each table a caption, and headings do not leave out a level.
	if bad := of[string](b,
		`[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length).map((e) => e.id).join()
		+ [...document.querySelectorAll('table')].filter((e) => !e.caption || !e.querySelector('th[scope=col]')).map((e) => e.id).join()
		+ [...document.querySelectorAll('button')].filter((e) => !e.textContent.trim() && !e.hidden).length * 1 || ''`); bad != "" && bad != "0" {
		t.Errorf("without name: %s", bad)
	}
	// Who listens instead of looking hears each part and each bar by a name of its own, and the
	// sentence that comes first before all else.
	if bad := of[string](b,
		`[...document.querySelectorAll('section')].filter((e) => !(e.getAttribute('aria-label') || document.getElementById(e.getAttribute('aria-labelledby'))?.textContent.trim())).map((e) => e.id || e.className).join()`); bad != "" {
		t.Errorf("parts without name: %s", bad)
	}
	if bad := of[string](b,
		`((all) => all.filter((n, i) => !n || all.indexOf(n) !== i).join())([...document.querySelectorAll('progress')].map((e) => e.getAttribute('aria-label')))`); bad != "" {
		t.Errorf("bars without a name of their own: %s", bad)
	}
	if got := of[string](b,
		`document.querySelector('main h2').id + ' ' + document.querySelector('main h2 + p').id`,
	); got != "verdict-h verdict-text" {
		t.Errorf("the first heading and what follows it: %s", got)
	}
	for _, landmark := range []string{"header", "main", "footer"} {
		if of[int](b, fmt.Sprintf("document.querySelectorAll('body > %s').length", landmark)) != 1 {
			t.Errorf("no landmark %s", landmark)
		}
	}
}

// covers says that nothing observes kube-proxy.
func covers(_ context.Context, service drain.Service, _ bool) (coverage.Service, error) {
	proxy := coverage.Consumer{Service: service, Name: "kube-proxy", Kind: "kube-proxy", State: coverage.Possible,
		Why: "no agent on the nodes observes it"}
	return coverage.Service{Name: service, Known: true, Consumers: []coverage.Consumer{proxy}}, nil
}

// gaps says that an Ingress is not waited for.
func gaps(context.Context) (coverage.Summary, error) {
	return coverage.Summary{Services: 7, Whole: 6, Gaps: []coverage.Consumer{{
		Service: drain.Service{Namespace: "shop", Name: "web"}, Name: "Ingress shop/front",
		Kind: "Ingress", State: coverage.Uncovered, Why: "no gateway of its class \"nginx\" is declared"}}}, nil
}

func TestThePageExplains(t *testing.T) {
	url, _ := serve(t, busy(), "127.0.0.1:0")
	b := start(t)
	b.look(wide, "light")
	b.open(url)
	b.await("#connection", "Live")
	ask := func(pod string) {
		b.do(chromedp.SetValue("#explain-namespace", "shop"), chromedp.SetValue("#explain-pod", pod),
			chromedp.Click("#explain-form button"))
	}
	ask("web-7d9c5b6f4-x2x8q")
	b.await("#explain-result", "It would be deleted when 1 gateway that routes to it has acknowledged.")
	for _, text := range []string{"edge/haproxy-0", "at the hold", "envoy of edge/mesh-0",
		"via clusterIP: that tells nothing of a single pod", "kube-proxy", "shop/web, 2 usable targets"} {
		if got := b.text("#explain-result"); !strings.Contains(got, text) {
			t.Errorf("it explains %q, want %q", got, text)
		}
	}
	b.await("#coverage", "Ingress shop/front")
	b.picture("made-explain", true)
	if got := of[int](b, "document.querySelectorAll('#explain-pods option[label=shop]').length"); got != 19 {
		t.Errorf("%d pods to choose from, want the 19 that are on the page", got)
	}
	of[bool](b, "document.getElementById('explain-result').replaceChildren(); true")
	b.do(chromedp.Click(`#drains-table [data-explain="shop/web-7d9c5b6f4-x2x8q"]`))
	b.await("#explain-result", "It would be deleted when 1 gateway that routes to it has acknowledged.")
	b.expectLoss() // a 404 is told to the console
	ask("missing")
	b.await("#explain-result", "no such pod: shop/missing")
}

// One namespace of several, chosen on the page or in its address. What is said first is about all.
func TestThePageShowsOneNamespace(t *testing.T) {
	m := busy()
	m.view.Outcomes = append(m.view.Outcomes, coordinator.Outcome{
		Pod: drain.Pod{Namespace: "pay", Name: "ledger-0", UID: "l"}, At: time.Now(), Reason: drain.Acknowledged,
		End: drain.PodDeleted, Took: time.Millisecond})
	url, _ := serve(t, m, "127.0.0.1:0")
	b := start(t)
	b.look(wide, "light")
	only := func() {
		t.Helper()
		b.await("#outcomes-table", "pay/ledger-0")
		for _, selector := range []string{"#drains-table", "#barriers-table", "#health-table", "#rollouts-table",
			"#coverage-table", "#observed-table"} {
			b.awaitThat("end of "+selector, func() bool { return b.text(selector) == "" })
		}
		if got := b.text("#outcomes-table"); strings.Contains(got, "shop/") {
			t.Errorf("of pay alone: %q", got)
		}
		if got := b.text("#verdict"); !strings.Contains(got, "shop/checkout-6f7f9c5d8b-l4kzt") {
			t.Errorf("it says first %q, which is not of all namespaces", got)
		}
	}
	b.open(url)
	b.await("#filter", "Namespace all pay shop")
	b.await("#coverage-table", "shop/")
	of[bool](b, `(() => { const s = document.getElementById('namespace'); s.value = 'pay';
		s.dispatchEvent(new Event('change')); return true; })()`)
	only()
	address := of[string](b, "location.href")
	b.open("about:blank")
	b.open(address)
	only()
}

// Not on loopback, the page asks who one is, shows nothing before, and keeps the token nowhere.
func TestThePageAsksForAToken(t *testing.T) {
	cluster.Entered(t) // where there is such an address
	url, _ := serve(t, busy(), "10.244.3.9:0")
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	response, err := client.Get(url + "v1/view")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a token: %s", response.Status)
	}
	b := start(t)
	b.expectLoss()
	b.look(wide, "light")
	b.open(url)
	b.await("#token-form", "kubectl create token NAME --audience=lameduck.io")
	if got := b.text("main"); got != "" {
		t.Errorf("it shows %q", got)
	}
	b.picture("made-token", true)
	for token, says := range map[string]string{"bad": "the token is not valid here",
		"weak": "jane needs the verb get"} {
		b.do(chromedp.SetValue("#token", token), chromedp.Click("#token-form button"))
		b.await("#token-error", says)
	}
	b.do(chromedp.SetValue("#token", "good"), chromedp.Click("#token-form button"))
	b.await("#drains-table", "checkout-6f7f9c5d8b-l4kzt")
	if kept := of[string](b, "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, "+
		"document.querySelector('#token').value, location.href])"); strings.Contains(kept, "good") {
		t.Errorf("the token is kept: %s", kept)
	}
}

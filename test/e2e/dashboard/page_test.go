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
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/cluster"
)

// made is a coordinator that knows what a test says.
type made struct {
	mu   sync.Mutex
	view api.View
}

func (m *made) set(change func(v *api.View)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.view)
}

func (m *made) View(int, int) api.View {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.view
	v.At = time.Now()
	// Its lists belong to the caller.
	v.Barriers.Items, v.Agents.Items = slices.Clone(v.Barriers.Items), slices.Clone(v.Agents.Items)
	return v
}

func (m *made) ViewPod(uid drain.UID, _ int) api.View {
	v := m.View(0, 0)
	v.Drains.Items = slices.DeleteFunc(slices.Clone(v.Drains.Items), func(d api.Drain) bool {
		return d.UID != string(uid)
	})
	v.Barriers.Items = slices.DeleteFunc(v.Barriers.Items, func(b api.OpenBarrier) bool { return b.UID != string(uid) })
	return v
}

func (m *made) Report() api.Report {
	return api.Report{Namespaces: []api.NamespaceReport{{Namespace: "shop", Deletions: 312, InFlight: 41, Unmeasured: 2,
		WaitSeconds: []float64{1.9, .045, .01}}}}
}

func (m *made) Acknowledgers([]drain.Service) ([]drain.Acknowledger, map[drain.AgentID]string) {
	web := drain.Service{Namespace: "shop", Name: "web"}
	return []drain.Acknowledger{
		{AgentInfo: drain.AgentInfo{ID: "a", Name: "edge/haproxy-0", Connected: true, Declared: true}, Hold: true,
			Routes: []drain.Route{{Service: web, Via: drain.Endpoints, Kind: drain.Directed}}},
		{AgentInfo: drain.AgentInfo{ID: "m", Name: "edge/mesh-0", Connected: true, Declared: true},
			Routes: []drain.Route{{Service: web, Via: drain.ClusterIP, Kind: drain.Directed}}},
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
	return &made{view: api.View{
		Replica: api.Replica{Name: "lameduck-webhook-5c9f7d4b8-mk2vp", Epoch: "e", Started: time.Now().Add(-time.Hour),
			MaxHolds: 32, DeadlineSeconds: 30, IdleBoundSeconds: 10},
		Drains: api.Drains{Items: []api.Drain{}}, Agents: api.Agents{Items: []api.Agent{}},
		Barriers: api.Barriers{Items: []api.OpenBarrier{}, MissingPods: []string{}},
		Outcomes: []api.Outcome{}, Propagation: []api.Propagation{},
		TargetHealth: api.TargetHealth{Where: "at /v1/targets of each agent", Services: []api.ServiceHealth{}},
	}}
}

// outcome is how a drain of a pod ended, after a time in seconds.
func outcome(namespace, pod, uid string, at time.Time, reason drain.Reason, took float64) api.Outcome {
	return api.Outcome{At: at, Namespace: namespace, Pod: pod, UID: uid, Gate: drain.AtHold.String(),
		Reason: reason.String(), Abnormal: reason.Abnormal(), TookSeconds: &took, Silent: []string{}}
}

// busy is a replica with something of everything.
func busy() *made {
	m := empty()
	now := time.Now()
	uid := func(n int) string { return fmt.Sprint("uid-", n) }
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	v := &m.view
	v.Replica.Holds, v.Drains.Elsewhere, v.Drains.Open = 2, 2, 3
	v.Agents.Expected, v.Agents.Missing, v.Agents.Suspended, v.Agents.Known = 5, 1, 1, 5
	word := func(agent, gateway string, state drain.State, since time.Duration) api.AgentReport {
		w := api.AgentReport{Agent: agent, Gateway: gateway, State: state.String(),
			Connected: true}
		if since > 0 {
			w.Since = ago(since)
		}
		return w
	}
	away := word("edge/haproxy-eu-west-2", "haproxy", drain.StateUnknown, 0)
	away.Connected = false
	v.Drains.Items = []api.Drain{
		{Namespace: "shop", Pod: "checkout-6f7f9c5d8b-l4kzt", UID: uid(1), Phase: "Unrouting", Reason: "None",
			PhaseSince: ago(17 * time.Second), Since: ago(17 * time.Second), Deadline: now.Add(13 * time.Second),
			Told: ago(17 * time.Second), Owed: 3, Waiting: 2,
			Reports: []api.AgentReport{away, word("edge/haproxy-eu-west-1", "haproxy", drain.Removed, 14*time.Second),
				word("edge/haproxy-0", "haproxy", drain.Idle, 16*time.Second)}},
		{Namespace: "shop", Pod: "web-7d9c5b6f4-x2x8q", UID: uid(2), Phase: "Quiescing", Reason: "None",
			PhaseSince: ago(time.Second), Since: ago(2 * time.Second), Deadline: now.Add(28 * time.Second),
			Told: ago(2 * time.Second), Owed: 1, Waiting: 1,
			Reports: []api.AgentReport{word("edge/haproxy-0", "haproxy", drain.Removed, time.Second)}},
		{Namespace: "shop", Pod: "web-7d9c5b6f4-9hvdm", UID: uid(3), Phase: "Queued", Reason: "None",
			PhaseSince: ago(time.Second), Since: ago(time.Second), Deadline: now.Add(29 * time.Second), Owed: 1,
			Reports: []api.AgentReport{}},
	}
	for i, a := range []struct {
		name           string
		gateway, state string
		removed        float64
	}{
		{"edge/haproxy-0", "haproxy", api.AgentConnected, .0042},
		{"edge/haproxy-eu-west-1", "haproxy", api.AgentConnected, .011},
		{"edge/haproxy-eu-west-2", "haproxy", api.AgentMissing, .008},
		{"lameduck-node/agent-7kq2x", "kube-proxy", api.AgentConnected, .24},
		{"edge/haproxy-canary", "haproxy", api.AgentSuspended, 0},
	} {
		known := api.Agent{ID: fmt.Sprint("agent-", i), Name: a.name, Gateway: a.gateway, State: a.state, Label: "none",
			Ready: true, Connected: a.state != api.AgentMissing, Suspended: a.state == api.AgentSuspended,
			Since: ago(50 * time.Minute), Declared: true, Services: 12 + i, Protocol: 1, Features: []string{"leave"},
			Reported: ago(time.Second), ReportAgeSeconds: .003, RemovedSeconds: a.removed, IdleSeconds: a.removed * 5}
		if a.gateway == "kube-proxy" {
			known.EveryService, known.GatewayMode = true, "nftables"
		}
		if !known.Connected {
			known.Since = ago(17 * time.Second)
		}
		v.Agents.Items = append(v.Agents.Items, known)
	}
	reasons := []drain.Reason{drain.Acknowledged, drain.Acknowledged, drain.Deadline, drain.Acknowledged,
		drain.Acknowledged, drain.Abandoned, drain.IdleBound, drain.PodDeleted}
	for i := range 14 {
		reason := reasons[i%len(reasons)]
		o := outcome("shop", "web-5b8d6c7f9-zz2x"+"bcdfghjklmnpqr"[i:i+1], uid(100+i),
			ago(time.Duration(i*i+3)*time.Second), reason, float64(31+i*17)/1000)
		switch reason {
		case drain.Deadline:
			o.TookSeconds, o.Silent = new(30.0), []string{"edge/haproxy-canary"}
		case drain.IdleBound:
			o.TookSeconds, o.Silent = new(10.0), []string{"edge/haproxy-0"}
		}
		v.Outcomes = append(v.Outcomes, o)
	}
	v.Barriers.Open, v.Barriers.Waiting, v.Barriers.Hooks = 2, 1, 1
	v.Barriers.Items = []api.OpenBarrier{
		{Drain: api.Drain{Namespace: "shop", Pod: "cart-75c8d9f7b-tt2xz", UID: uid(41), Phase: "Unrouting",
			Reason: "None", PhaseSince: ago(4 * time.Second), Since: ago(4 * time.Second),
			Deadline: now.Add(26 * time.Second), Owed: 3, Waiting: 1,
			Reports: []api.AgentReport{word("lameduck-node/agent-7kq2x", "kube-proxy", drain.Routing, 3*time.Second),
				word("lameduck-node/agent-4s8mf", "kube-proxy", drain.Idle, time.Second)}},
			StatedSeconds: 25, StatedUntil: now.Add(21 * time.Second), AskedBy: "lameduck-node/agent-4s8mf", Last: true,
			Uncovered: []string{}},
		{Drain: api.Drain{Namespace: "shop", Pod: "cart-75c8d9f7b-9mhd4", UID: uid(42), Phase: "Released",
			Reason: "Acknowledged", PhaseSince: ago(5 * time.Second), Since: ago(6 * time.Second),
			Deadline: now.Add(24 * time.Second), Owed: 3, Reports: []api.AgentReport{}},
			AskedBy: "lameduck-node/agent-7kq2x", Uncovered: []string{}},
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
		Log: slog.New(slog.DiscardHandler),
		Pod: func(of drain.Pod) *corev1.Pod {
			if of.Namespace != "shop" { // an agent's
				return &corev1.Pod{Spec: corev1.PodSpec{NodeName: "node-" + of.Name[len(of.Name)-1:]}}
			}
			hook := func(h corev1.LifecycleHandler) *corev1.Lifecycle { return &corev1.Lifecycle{PreStop: &h} }
			return &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{keys.BarrierID: "id",
					keys.BarrierUncovered: "tls"}},
				Spec: corev1.PodSpec{NodeName: "node-b", Containers: []corev1.Container{
					{Name: "app",
						Lifecycle: hook(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/v1/wait/id"}})},
					{Name: "log",
						Lifecycle: hook(corev1.LifecycleHandler{
							Exec: &corev1.ExecAction{Command: []string{"lameduck-wait", "--id=id"}}})},
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
		"#agents-table": {"edge/haproxy-canary", "suspended", "missing", "for 50 min", "node-1",
			"kube-proxy nftables", "for 50 min all 1.2 s"},
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
	m.set(func(v *api.View) { *v = busy().view })
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
	m.set(func(v *api.View) {
		v.Agents.Expected, v.Agents.Known = 1, 1
		v.Agents.Items = []api.Agent{{ID: "a", Name: "edge/haproxy-0", State: api.AgentConnected, Ready: true,
			Connected: true, Declared: true, Features: []string{}, Since: now.Add(-time.Hour)}}
		v.Outcomes = []api.Outcome{outcome("shop", "web-1", "u", now.Add(8*time.Second-10*time.Minute), drain.Deadline,
			30)}
	})
	said("shop/web-1 went")
	b.await("#verdict", "all is well: 1 gateway is connected")
	m.set(func(v *api.View) {
		now := time.Now()
		v.Drains.Open = 1
		v.Drains.Items = []api.Drain{{Namespace: "shop", Pod: "web-2", UID: "w", Phase: "Unrouting", Reason: "None",
			PhaseSince: now, Since: now, Deadline: now.Add(10 * time.Second), Told: now, Owed: 1, Waiting: 1,
			Reports: []api.AgentReport{{Agent: "edge/haproxy-0", State: "routing", Connected: true,
				Since: now}},
		}}
		// One that may stop waits no longer.
		v.Barriers.Open = 1
		v.Barriers.Items = []api.OpenBarrier{{Drain: api.Drain{Namespace: "shop", Pod: "web-3", UID: "x",
			Phase: "Released", Reason: "Acknowledged", Since: now, Deadline: now.Add(10 * time.Second),
			Reports: []api.AgentReport{}}, Uncovered: []string{}}}
	})
	said("1 pod is draining, no gateway is late")
	b.await("#verdict", "shop/web-2 has waited")
	m.set(func(v *api.View) {
		v.Agents.Expected, v.Drains = 0, api.Drains{Items: []api.Drain{}}
		gone := v.Agents.Items[0] // not changed in place: a view that was taken has it
		gone.State, gone.Connected = api.AgentGone, false
		v.Agents.Items = []api.Agent{gone}
	})
	b.await("#verdict", "No agent is left: deletions continue as without Lameduck.")
}

// The first sentence says that all is well only if the page knows nothing else.
func TestTheVerdictHidesNothing(t *testing.T) {
	m := empty()
	url, _ := serve(t, m, "127.0.0.1:0")
	b := start(t)
	b.open(url)
	b.await("#connection", "Live")
	away := api.Agent{ID: "a", Name: "edge/haproxy-0", State: api.AgentMissing, Features: []string{}, Since: time.Now()}
	ready, connected := away, away
	ready.Ready = true
	connected.State, connected.Connected = api.AgentConnected, true
	for _, step := range []struct {
		want string
		set  func(*api.View)
	}{
		{"all is well: 1 gateway is connected", func(*api.View) {}},
		{"Deletions of what it routes wait for it", func(v *api.View) {
			v.Agents.Missing, v.Agents.Items = 1, []api.Agent{ready}
		}},
		{"Its pod is not ready: deletions do not wait for it", func(v *api.View) {
			v.Agents.Missing, v.Agents.Items = 1, []api.Agent{away}
		}},
		{"What lameduck-webhook-1 knows is missing here", func(v *api.View) {
			v.Silent = []string{"lameduck-webhook-1"}
		}},
		{"4 pods ask for the barrier and were created without it: shop/a, shop/b, shop/c and more", func(v *api.View) {
			v.Barriers.Missing, v.Barriers.MissingPods = 4, []string{"shop/a", "shop/b", "shop/c", "shop/d"}
		}},
		{"300 pods are draining. None of those that are listed is late.", func(v *api.View) { v.Drains.Open = 300 }},
		{"2 pods wait to stop. None of those that are listed is late.", func(v *api.View) {
			v.Barriers.Open, v.Barriers.Waiting = 3, 2
		}},
		{"Deletions do not wait: the API server does not ask", func(v *api.View) {
			v.Replica.Unasked = true
			v.Agents.Missing, v.Agents.Items = 1, []api.Agent{ready}
		}},
		{"all is well, but for 1 target that is unhealthy: 1 gateway", func(v *api.View) {
			v.TargetHealth.Reported, v.TargetHealth.All.Unhealthy = true, 1
		}},
	} {
		m.set(func(v *api.View) {
			v.Agents.Expected, v.Agents.Known, v.Agents.Missing = 1, 1, 0
			v.Agents.Items, v.Silent, v.Replica.Unasked = []api.Agent{connected}, nil, false
			v.Barriers.Missing, v.Barriers.MissingPods = 0, []string{}
			v.Drains.Open, v.Barriers.Open, v.Barriers.Waiting = 0, 0, 0
			step.set(v)
		})
		b.await("#verdict", step.want)
	}
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
	m.set(func(v *api.View) { v.Drains.Items, v.Drains.Open = v.Drains.Items[1:], 2 })
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

// gaps says that an Ingress is not waited for, for two reasons, and one of them twice.
func gaps(context.Context) (coverage.Summary, error) {
	gap := func(why string) coverage.Consumer {
		return coverage.Consumer{Service: drain.Service{Namespace: "shop", Name: "web"}, Name: "Ingress shop/front",
			Kind: "Ingress", State: coverage.Uncovered, Why: why}
	}
	return coverage.Summary{
		Services: map[coverage.Class]int{
			{State: coverage.Acknowledges, Gates: "both"}: 6, {State: coverage.Uncovered, Gates: "none"}: 1},
		Gaps: []coverage.Consumer{gap("no gateway of its class \"nginx\" is declared"), gap("it is new"),
			gap("it is new")}}, nil
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
	for _, text := range []string{"shop/web-7d9c5b6f4-x2x8q", "edge/haproxy-0", "at the hold", "envoy of edge/mesh-0",
		"via clusterIP: that tells nothing of a single pod", "kube-proxy", "shop/web, 2 usable targets"} {
		if got := b.text("#explain-result"); !strings.Contains(got, text) {
			t.Errorf("it explains %q, want %q", got, text)
		}
	}
	b.await("#coverage", "Ingress shop/front")
	if got := of[int](b, "document.querySelectorAll('#coverage-table tbody tr').length"); got != 2 {
		t.Errorf("%d rows for what is not waited for, want one for each reason", got)
	}
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
	// An answer that comes after that to a later question is not shown.
	of[bool](b, `(() => { const ask = window.fetch; window.fetch = (url, o) => !url.includes('missing') ? ask(url, o) :
		new Promise((done) => { window.late = () => { ask(url, o).then(done); setTimeout(() => { window.came = true; }, 300); }; });
		return true; })()`)
	ask("missing")
	ask("web-7d9c5b6f4-x2x8q")
	b.await("#explain-result", "It would be deleted")
	of[bool](b, "late(), true")
	b.awaitThat("late answer", func() bool { return of[bool](b, "window.came === true") })
	b.await("#explain-result", "It would be deleted")
}

// One namespace of several, chosen on the page or in its address. What is said first is about all.
func TestThePageShowsOneNamespace(t *testing.T) {
	m := busy()
	m.view.Outcomes = append(m.view.Outcomes,
		outcome("pay", "ledger-0", "l", time.Now(), drain.Acknowledged, .001))
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

package dashboard

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// barred is a pod on node-1 as the mutating webhook leaves it.
func barred(bound string, containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", UID: "uid-a", Annotations: map[string]string{
			keys.BarrierID: "id-1", keys.BarrierBound: bound,
			keys.BarrierGrace: "20", keys.BarrierUncovered: "tls",
		}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: containers},
	}
}

func container(name string, hook *corev1.LifecycleHandler) corev1.Container {
	c := corev1.Container{Name: name}
	if hook != nil {
		c.Lifecycle = &corev1.Lifecycle{PreStop: hook}
	}
	return c
}

var (
	byHTTP = &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/v1/wait/id-1"}}
	byExec = &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"/lameduck/lameduck-wait", "--id=id-1",
		"--", "sleep", "5"}}}
	// itsOwn is a hook that is not Lameduck's.
	itsOwn = &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/v1/wait/another"}}
)

// What is said of the second gate must be what the pod, its node and its Services have. The worst
// fault is to be silent on a hole.
func TestTheBarrierIsExplained(t *testing.T) {
	observer := func(id string, connected bool) drain.Acknowledger {
		p := party(id, drain.Endpoints, drain.Observed)
		p.Connected = connected
		return p
	}
	node := func(p drain.Acknowledger) string { return strings.TrimPrefix(p.Name, "edge/") }
	web := drain.Service{Namespace: "shop", Name: "web"}
	clients := func(stated time.Duration, err error, consumers ...coverage.Consumer) []coverage.Service {
		return []coverage.Service{{Name: web, Known: true, Stated: drain.StatedWait{Wait: stated}, StatedError: err,
			Consumers: consumers}}
	}
	dns := coverage.Consumer{Name: "DNS", State: coverage.Possible, Why: "clients cannot acknowledge"}
	here, away, other := observer("node-1", true), observer("node-1", false), observer("node-2", true)
	suspended := here
	suspended.Suspended = true
	unable := observer("node-1", true)
	unable.Routes, unable.Barrier = []drain.Route{{Service: drain.EveryService, Via: drain.ClusterIP,
		Kind: drain.Observed}}, false
	for name, c := range map[string]struct {
		pod      *corev1.Pod
		parties  []drain.Acknowledger
		services []coverage.Service
		// barrier is it on a line, uncovered what each begins with, summary its end.
		barrier   string
		uncovered []string
		summary   string
	}{
		"both kinds of hooks": {barred("30s", container("app", byHTTP), container("log", byExec),
			container("old", itsOwn)), []drain.Acknowledger{here, other}, clients(0, nil),
			"app httpGet, log exec, old none, tls none; 30s + 20s on node-1 by edge/node-1 true of 2",
			[]string{"container old", "container tls"},
			"Then it would be told to stop when 2 observed gateways have acknowledged, 30s after the deletion at " +
				"most."},
		"no agent on its node": {barred("30s"), []drain.Acknowledger{other}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by  false of 1",
			[]string{"container tls", "the barrier itself: no node agent is known on node-1"},
			"1 observed gateway has acknowledged, 30s"},
		"its node agent is away": {barred("30s"), []drain.Acknowledger{away, other}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 false of 2",
			[]string{"container tls", "the barrier itself: edge/node-1, which has the pod's hooks, is not connected " +
				"here"}, ""},
		"its new node agent is there": {barred("30s"), []drain.Acknowledger{away, here}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 2", []string{"container tls"}, ""},
		"its node agent is suspended": {barred("30s"), []drain.Acknowledger{suspended, other}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1",
			[]string{"gateway of edge/node-1: it is suspended", "container tls"},
			"1 observed gateway has acknowledged, 30s"},
		"its node has no kube-proxy": {barred("30s"), []drain.Acknowledger{unable, other}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1",
			[]string{"gateway of edge/node-1: it sees no rules of kube-proxy", "container tls"},
			"1 observed gateway has acknowledged, 30s"},
		"all who observe are suspended": {barred("30s"), []drain.Acknowledger{suspended}, clients(0, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 0",
			[]string{"gateway of edge/node-1: it is suspended", "container tls"}, ""},
		"a stated wait": {barred("30s"), []drain.Acknowledger{here}, clients(25*time.Second, nil),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1; shop/web 25s", []string{"container tls"}, ""},
		"one that is longer than the bound": {barred("20s"), []drain.Acknowledger{here},
			clients(25*time.Second, nil),
			"tls none; 20s + 20s on node-1 by edge/node-1 true of 1; shop/web 25s cut",
			[]string{"container tls",
				"the stated wait of shop/web: it states 25s, and the pod's hooks last 20s at most"}, ""},
		"one that is as long": {barred("25s"), []drain.Acknowledger{here}, clients(25*time.Second, nil),
			"tls none; 25s + 20s on node-1 by edge/node-1 true of 1; shop/web 25s cut",
			[]string{"container tls",
				"the stated wait of shop/web: it states 25s, and the pod's hooks last 25s at most"}, ""},
		"one that cannot be read": {barred("30s"), []drain.Acknowledger{here}, clients(0, errors.New("nonsense")),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1; shop/web 0s nonsense",
			[]string{"the stated wait of shop/web: lameduck.io/stated-wait cannot be read: nonsense", "container tls"},
			""},
		"headless, nothing stated": {barred("30s"), []drain.Acknowledger{here}, clients(0, nil, dns),
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1",
			[]string{"DNS, for shop/web: clients cannot acknowledge", "container tls"}, ""},
		"unknown": {barred("30s"), []drain.Acknowledger{here}, []coverage.Service{{Name: web}},
			"tls none; 30s + 20s on node-1 by edge/node-1 true of 1",
			[]string{"what else routes shop/web: the Service is not known here", "container tls"}, ""},
		"stated, but no hook": {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}},
			[]drain.Acknowledger{here}, clients(25*time.Second, nil, coverage.Consumer{Name: "DNS",
				State: coverage.Uncovered, Why: "the pod has no barrier"}), "none",
			[]string{"DNS, for shop/web: the pod has no barrier"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := explanation(admission.Explanation{
				Pod: c.pod, Facts: admission.Facts{Operation: admission.Delete},
				Verdict: admission.Verdict{Action: admission.Allow, Reason: admission.NotRouted},
				Targets: []drain.Targets{{Service: web, Usable: []drain.UID{"a", "b"}}},
			}, c.parties, map[drain.AgentID]string{}, node, c.services)
			got := "none"
			if b := x.Barrier; b != nil {
				var hooks []string
				for _, h := range b.Hooks {
					hooks = append(hooks, h.Container+" "+h.Kind)
				}
				got = fmt.Sprintf("%s; %gs + %gs on %s by %s %t of %d", strings.Join(hooks, ", "), b.BoundSeconds,
					b.GraceSeconds, b.Node, b.Agent, b.Connected, b.Asked)
				for _, s := range b.Stated {
					got += fmt.Sprintf("; %s/%s %gs", s.Namespace, s.Service, s.Seconds)
					if s.Cut {
						got += " cut"
					}
					if s.Error != "" {
						got += " " + s.Error
					}
				}
			}
			if got != c.barrier {
				t.Errorf("barrier\n%s, want\n%s", got, c.barrier)
			}
			if len(x.Uncovered) != len(c.uncovered) {
				t.Fatalf("uncovered %q, want %q", x.Uncovered, c.uncovered)
			}
			for i, want := range c.uncovered {
				if text := x.Uncovered[i].What + ": " + x.Uncovered[i].Why; !strings.HasPrefix(text, want) {
					t.Errorf("uncovered %q, want %q", text, want)
				}
			}
			if !strings.Contains(x.Summary, c.summary) {
				t.Errorf("summary %q, want %q", x.Summary, c.summary)
			}
		})
	}
}

// The read API says of barriers what the coordinator knows, with the pod's own facts.
func TestBarriersOverHTTP(t *testing.T) {
	w := &world{}
	now := time.Now()
	w.view.Barriers = api.Barriers{Open: 3, Hooks: 2, Items: []api.OpenBarrier{{Drain: api.Drain{
		Namespace: "shop", Pod: "a", UID: "uid-a", Phase: "Unrouting", Since: now}, AskedBy: "lameduck-node/x"}}}
	d := newDashboard(w)
	d.Missing = func() []string { return append(make([]string, maxMissing), "shop/a") }
	d.Pod = func(of drain.Pod) *corev1.Pod {
		if of.UID != "uid-a" {
			return nil
		}
		return barred("30s", container("app", byHTTP))
	}
	h := d.Handler(loopback)
	var view api.View
	if err := json.NewDecoder(get(h, api.ViewPath).Body).Decode(&view); err != nil {
		t.Fatal(err)
	}
	barriers := view.Barriers
	b := barriers.Items[0]
	if barriers.Open != 3 || barriers.Hooks != 2 || barriers.Missing != maxMissing+1 ||
		barriers.MissingIn["shop"] != 1 || barriers.MissingIn[""] != maxMissing ||
		len(barriers.MissingPods) != maxMissing || b.Hook != "httpGet" || b.Node != "node-1" ||
		b.AskedBy != "lameduck-node/x" || strings.Join(b.Uncovered, " ") != "tls" {
		t.Errorf("%+v", barriers)
	}
	var x api.Explanation
	w.explain.Pod = barred("30s", container("app", byHTTP))
	w.explain.Pod.UID = "uid-a"
	if err := json.NewDecoder(get(h, api.ExplainPath+"/shop/a").Body).Decode(&x); err != nil {
		t.Fatal(err)
	}
	if x.Barrier == nil || x.Barrier.Open == nil || x.Barrier.Open.Phase != "Unrouting" {
		t.Errorf("%+v", x.Barrier)
	}
}

// A pod that no Service lists waits at the barrier all the same: node agents observe every Service,
// and the one on its node answers its hooks.
func TestTheBarrierOfAPodInNoServiceIsExplained(t *testing.T) {
	w := &world{}
	kp, hap := party("kp", drain.Endpoints, drain.Observed), party("hap", drain.Endpoints, drain.Directed)
	w.parties = []drain.Acknowledger{kp, hap}
	w.explain.Verdict = admission.Verdict{Action: admission.Allow, Reason: admission.NotListed}
	w.explain.Pod = barred("30s", container("app", byHTTP))
	d := newDashboard(w)
	d.Pod = func(of drain.Pod) *corev1.Pod {
		if of.Namespace+"/"+of.Name != kp.Name || of.UID != drain.UID(kp.ID) {
			return nil
		}
		return &corev1.Pod{Spec: corev1.PodSpec{NodeName: "node-1"}}
	}
	explained := func() (x api.Explanation) {
		t.Helper()
		if err := json.NewDecoder(get(d.Handler(loopback), api.ExplainPath+"/shop/a").Body).Decode(&x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	x := explained()
	if x.Barrier == nil || x.Barrier.Agent != kp.Name || x.Barrier.Asked != 1 || len(x.Gates) != 1 ||
		x.Gates[0].Agent != kp.Name {
		t.Errorf("barrier %+v, gates %+v", x.Barrier, x.Gates)
	}
	for _, u := range x.Uncovered {
		if u.What != "container tls" {
			t.Errorf("not covered: %+v", u)
		}
	}
	w.explain.Pod = nil // one without a hook
	if x := explained(); x.Barrier != nil || len(x.Gates) > 0 || len(x.Uncovered) > 0 {
		t.Errorf("without a hook: %+v", x)
	}
}

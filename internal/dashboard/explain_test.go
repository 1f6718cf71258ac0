package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/mux"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

func party(id string, via drain.Via, can drain.Kind) drain.Acknowledger {
	web := drain.Service{Namespace: "shop", Name: "web"}
	return drain.Acknowledger{
		AgentInfo: drain.AgentInfo{ID: drain.AgentID(id), Name: "edge/" + id, Connected: true, Ready: true,
			Declared: true},
		Routes: []drain.Route{{Service: web, Via: via, Kind: can}},
		Hold:   via == drain.Endpoints && can == drain.Directed, Barrier: via == drain.Endpoints &&
			can == drain.Observed,
	}
}

// The explanation must be what would happen: which agents would be asked, at which gate, and what
// no agent can acknowledge. The worst fault is to leave out a hole.
func TestExplanation(t *testing.T) {
	hap, kp, mesh := party("hap", drain.Endpoints, drain.Directed), party("kp", drain.Endpoints, drain.Observed),
		party("mesh", drain.ClusterIP, drain.Directed)
	suspended, away, undeclared := hap, hap, hap
	suspended.Suspended = true
	away.Connected, away.Ready, away.Hold, away.Until = false, false, false, time.Now()
	undeclared.Declared, undeclared.Routes, undeclared.Barrier = false, nil, true
	web := []drain.Targets{{Service: drain.Service{Namespace: "shop", Name: "web"}, Usable: []drain.UID{"a", "b"}}}
	drains := admission.Verdict{Action: admission.Drain, Reason: admission.Draining}
	for name, c := range map[string]struct {
		verdict     admission.Verdict
		annotations map[string]string
		parties     []drain.Acknowledger
		targets     []drain.Targets
		// gates and uncovered are what they begin with, summary what it contains.
		gates, uncovered []string
		summary          string
	}{
		"directed": {drains, nil, []drain.Acknowledger{hap}, web, []string{"edge/hap hold"},
			[]string{"kube-proxy, for shop/web"}, "deleted when 1 gateway that routes to it has acknowledged"},
		"two": {drains, nil, []drain.Acknowledger{hap, hap}, web,
			[]string{"edge/hap hold", "edge/hap hold"}, []string{"kube-proxy, for shop/web"},
			"deleted when 2 gateways that route to it have acknowledged"},
		"following, without a barrier": {drains, nil, []drain.Acknowledger{hap, kp}, web, []string{"edge/hap hold"},
			[]string{"kube-proxy, for shop/web"}, "1 gateway"},
		"following, with a barrier": {drains,
			map[string]string{keys.BarrierID: "x",
				keys.BarrierUncovered: "istio-proxy, log"}, []drain.Acknowledger{hap, kp}, web,
			[]string{"edge/hap hold", "edge/kp barrier"}, []string{"container istio-proxy", "container log"},
			"1 gateway"},
		"by the Service's address": {drains, nil, []drain.Acknowledger{mesh, hap}, web, []string{"edge/hap hold"},
			[]string{"envoy of edge/mesh: it routes shop/web via clusterIP", "kube-proxy, for shop/web"}, "1 gateway"},
		"suspended": {drains, nil, []drain.Acknowledger{suspended}, web, nil,
			[]string{"haproxy of edge/hap: it is suspended", "kube-proxy, for shop/web"},
			"within 2 s: every agent that would be asked is suspended"},
		"away for long": {drains, nil, []drain.Acknowledger{away, hap}, web, []string{"edge/hap hold"},
			[]string{"haproxy of edge/hap: it is not connected and not ready any more", "kube-proxy, for shop/web"},
			"1 gateway"},
		"not declared": {drains, nil, []drain.Acknowledger{undeclared}, web, []string{"edge/hap hold"},
			[]string{"kube-proxy, for shop/web"}, "1 gateway"},
		"the last one": {admission.Verdict{Action: admission.Allow, Reason: admission.LastTarget,
			Words: "no other pod is ready"}, nil,
			[]drain.Acknowledger{hap}, web, nil,
			[]string{"haproxy of edge/hap: the deletion does not wait (LastTarget)", "kube-proxy, for shop/web"},
			"at once: no other pod is ready"},
		"told in the background": {admission.Verdict{Action: admission.Allow, Reason: admission.NodeLost,
			Unroute: true, Words: "its node is lost"}, nil, []drain.Acknowledger{hap}, web, nil,
			[]string{"haproxy of edge/hap: the deletion does not wait (NodeLost)", "kube-proxy, for shop/web"},
			"its node is lost. Gateways would be told, and not waited for."},
		"refused": {admission.Verdict{Action: admission.Deny, Reason: admission.Budget, Message: "Cannot evict pod."},
			nil, []drain.Acknowledger{hap}, web, []string{"edge/hap hold"},
			[]string{"kube-proxy, for shop/web"}, "It would not be deleted now: Cannot evict pod."},
		"in no Service": {admission.Verdict{Action: admission.Allow, Reason: admission.NotListed,
			Words: "no EndpointSlice lists it"}, nil, nil, nil, nil, nil, "at once: no EndpointSlice lists it."},
	} {
		t.Run(name, func(t *testing.T) {
			proxy := coverage.Consumer{Name: "kube-proxy", State: coverage.Possible, Why: "no agent observes it"}
			if c.annotations != nil {
				proxy.State = coverage.Acknowledges
			}
			var services []coverage.Service
			for _, target := range c.targets {
				services = append(services, coverage.Service{Name: target.Service, Known: true,
					Consumers: []coverage.Consumer{proxy}})
			}
			x := explanation(admission.Explanation{
				Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", UID: "a",
					Annotations: c.annotations}},
				Facts: admission.Facts{Operation: admission.Delete}, Verdict: c.verdict, Targets: c.targets,
			}, c.parties, map[drain.AgentID]string{"hap": "haproxy", "kp": "kube-proxy", "mesh": "envoy"},
				func(drain.Acknowledger) string { return "" }, services)
			if len(x.Consumers) != len(c.targets) {
				t.Errorf("consumers %+v, want one of each Service", x.Consumers)
			}
			var gates, uncovered []string
			for _, g := range x.Gates {
				gates = append(gates, g.Agent+" "+g.Gate)
			}
			for _, u := range x.Uncovered {
				uncovered = append(uncovered, u.What+": "+u.Why)
			}
			if strings.Join(gates, "; ") != strings.Join(c.gates, "; ") {
				t.Errorf("gates %q, want %q", gates, c.gates)
			}
			if len(uncovered) != len(c.uncovered) {
				t.Fatalf("uncovered %q, want %q", uncovered, c.uncovered)
			}
			for i, want := range c.uncovered {
				if !strings.HasPrefix(uncovered[i], want) {
					t.Errorf("uncovered %q, want %q", uncovered[i], want)
				}
			}
			if !strings.Contains(x.Summary, c.summary) {
				t.Errorf("summary %q, want %q", x.Summary, c.summary)
			}
		})
	}
}

func TestExplainOverHTTP(t *testing.T) {
	w := &world{}
	w.view.Drains.Items = []api.Drain{{Namespace: "shop", Pod: "a", UID: "uid-a", Phase: "Unrouting"}}
	h := newDashboard(w).Handler(loopback)
	for path, want := range map[string]int{
		"/shop/a": 200, "/shop/a?operation=evict": 200, "/shop/a?operation=drain": 400, "/Shop/a": 400,
		"/shop/a%20b": 400, "/shop/a/b": 404, "/shop": 404,
	} {
		if response := get(h, api.ExplainPath+path); response.StatusCode != want {
			t.Errorf("GET %s: %d, want %d", path, response.StatusCode, want)
		}
	}
	var x api.Explanation
	if err := json.NewDecoder(get(h, api.ExplainPath+"/shop/a?operation=evict").Body).Decode(&x); err != nil {
		t.Fatal(err)
	}
	if x.Operation != "evict" || x.Drain == nil || x.Drain.Phase != "Unrouting" || x.UID != "uid-a" {
		t.Errorf("%+v", x)
	}
	for _, c := range []struct {
		err  error
		want int
	}{{fmt.Errorf("%w: shop/a", admission.ErrNoPod), 404}, {admission.ErrCold, 503}, {fmt.Errorf("broken"), 500}} {
		w.fails = c.err
		if response := get(h, api.ExplainPath+"/shop/a"); response.StatusCode != c.want {
			t.Errorf("%v: %d", c.err, response.StatusCode)
		}
	}
}

// A replica that is asked for the explanation of all joins the others', and answers what they know
// of a pod that it does not know.
func TestExplanationOfAllReplicas(t *testing.T) {
	w := &world{explain: admission.Explanation{Verdict: admission.Verdict{Action: admission.Drain,
		Reason: admission.Draining}}}
	d := newDashboard(w)
	var asked string
	others, silent := []api.Explanation{}, []string{"third"}
	d.Explanations = func(_ context.Context, pod string) ([]api.Explanation, []string) {
		asked = pod
		return others, silent
	}
	explain := func(query string, code int) (x api.Explanation) {
		t.Helper()
		asked = ""
		response := get(d.Handler(loopback), api.ExplainPath+"/shop/web-1"+query)
		if response.StatusCode != code {
			t.Fatalf("%s: %s", query, response.Status)
		}
		if err := json.NewDecoder(response.Body).Decode(&x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	if x := explain("?operation=evict", 200); asked != "" || x.Differs == nil || len(x.Gates) != 0 {
		t.Errorf("of one: asked for %q, %+v", asked, x)
	}
	others = []api.Explanation{{Replica: "second", UID: "uid-web-1", Answer: "allow", Summary: "It would be deleted.",
		Gates: []api.Gate{{Agent: "edge/one", Gate: "hold"}}}}
	x := explain("?replicas=all&operation=evict", 200)
	if asked != "/shop/web-1?operation=evict" || len(x.Gates) != 1 || !slices.Equal(x.Silent, silent) ||
		!slices.Equal(x.Differs, []string{"second: It would be deleted."}) {
		t.Errorf("asked for %q, %+v", asked, x)
	}
	w.fails = admission.ErrNoPod
	if x := explain("?replicas=all", 200); x.Replica != "second" || asked != "/shop/web-1?operation=delete" {
		t.Errorf("asked for %q, %+v", asked, x)
	}
	others = nil
	explain("?replicas=all", 404)
	if explain("?replicas=all&operation=x", 400); asked != "" {
		t.Errorf("asked for %q", asked)
	}
	// What the other replica answers is the same.
	w.fails = nil
	r := mux.SetURLVars(httptest.NewRequest(http.MethodGet, wire.ExplainPath+"/shop/web-1", nil),
		map[string]string{"namespace": "shop", "pod": "web-1"})
	if of, err := d.Shown(r); err != nil || of.(api.Explanation).UID != "uid-web-1" {
		t.Errorf("%+v, %v", of, err)
	}
}

package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

var (
	loopback = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9445}
	pod      = &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 9445}
)

// world is a coordinator, and whatever else a dashboard needs.
type world struct {
	mu      sync.Mutex
	view    api.View
	views   int
	takes   time.Duration
	explain admission.Explanation
	fails   error
	parties []drain.Acknowledger
}

func (w *world) View(int, int) api.View {
	time.Sleep(w.takes) // 0 if the time is not the subject
	w.mu.Lock()
	defer w.mu.Unlock()
	w.views++
	v := w.view
	v.At = time.Now()
	// Its lists belong to the caller.
	v.Barriers.Items, v.Agents.Items = slices.Clone(v.Barriers.Items), slices.Clone(v.Agents.Items)
	return v
}

func (w *world) ViewPod(uid drain.UID, _ int) api.View {
	v := w.View(0, 0)
	v.Drains.Items = slices.DeleteFunc(slices.Clone(v.Drains.Items), func(d api.Drain) bool {
		return d.UID != string(uid)
	})
	v.Barriers.Items = slices.DeleteFunc(v.Barriers.Items, func(b api.OpenBarrier) bool { return b.UID != string(uid) })
	return v
}

func (w *world) set(change func(v *api.View)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.view)
}

func (w *world) made() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.views
}

func (w *world) Report() api.Report {
	return api.Report{Since: time.Unix(0, 0).UTC(), Namespaces: []api.NamespaceReport{{Namespace: "shop", Deletions: 2,
		InFlight: 1, WaitSeconds: []float64{1, .045}}}}
}

func (w *world) Acknowledgers([]drain.Service) ([]drain.Acknowledger, map[drain.AgentID]string) {
	return w.parties, map[drain.AgentID]string{"hap": "haproxy", "kp": "kube-proxy", "mesh": "envoy"}
}

func (w *world) Explain(_ context.Context, _ time.Time, operation admission.Operation, namespace,
	name string) (admission.Explanation, error) {
	e := w.explain
	e.Facts.Operation = operation
	if e.Pod == nil {
		e.Pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			UID: types.UID("uid-" + name)}}
	}
	return e, w.fails
}

// Review lets "good" look.
func (w *world) Review(_ context.Context, token string) error {
	switch token {
	case "good":
		return nil
	case "weak":
		return fmt.Errorf("weak: %w", coordinator.ErrForbidden)
	case "away":
		return errors.New("the API server does not answer")
	default:
		return coordinator.ErrUnauthenticated
	}
}

func newDashboard(w *world) *Dashboard {
	return New(Options{Coordinator: w, Explainer: w, Reviewer: w, Log: slog.New(slog.DiscardHandler),
		Pod: func(drain.Pod) *corev1.Pod { return nil }})
}

func get(h http.Handler, path string, set ...func(*http.Request)) *http.Response {
	r := httptest.NewRequest(http.MethodGet, "http://localhost:9445"+path, nil)
	for _, f := range set {
		f(r)
	}
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, r)
	return recorder.Result()
}

func bearer(token string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
}

// paths fills the table's patterns.
func paths(pattern string) string {
	return strings.NewReplacer("{name}", "app.js", "{namespace}", "shop", "{pod}", "a").Replace(pattern)
}

// Each row names the callers that are allowed, and the answer to the others. Without it a new row
// may be readable without authentication.
func TestEveryRouteKeepsItsAccess(t *testing.T) {
	d := newDashboard(&world{})
	for _, row := range routes {
		path := paths(row.path)
		if row.access == anyone && strings.HasPrefix(row.path, "/v1") {
			t.Errorf("GET %s tells everybody", path)
		}
		for _, c := range []struct {
			name    string
			address net.Addr
			set     func(*http.Request)
			want    map[access]int
		}{
			{"on loopback", loopback, func(*http.Request) {}, map[access]int{anyone: 200, readers: 200}},
			{"on loopback, by another name", loopback, func(r *http.Request) { r.Host = "evil.example:9445" },
				map[access]int{anyone: 421, readers: 421}},
			{"on loopback, by a name that begins like it", loopback, func(r *http.Request) {
				r.Host = "localhost.evil.example"
			}, map[access]int{anyone: 421, readers: 421}},
			{"on loopback, by address", loopback, func(r *http.Request) { r.Host = "[::1]:8080" },
				map[access]int{anyone: 200, readers: 200}},
			{"without token", pod, func(*http.Request) {}, map[access]int{anyone: 200, readers: 401}},
			{"with another token", pod, bearer("bad"), map[access]int{anyone: 200, readers: 401}},
			{"with a weak token", pod, bearer("weak"), map[access]int{anyone: 200, readers: 403}},
			{"without an answer of the API server", pod, bearer("away"), map[access]int{anyone: 200, readers: 503}},
			{"with a token", pod, bearer("good"), map[access]int{anyone: 200, readers: 200}},
			{"with basic authentication", pod, func(r *http.Request) { r.SetBasicAuth("a", "good") },
				map[access]int{anyone: 200, readers: 401}},
		} {
			want := c.want[row.access]
			response := get(d.Handler(c.address), path, c.set)
			if response.StatusCode != want {
				t.Errorf("GET %s %s: %d, want %d", path, c.name, response.StatusCode, want)
			}
			for name, value := range headers {
				if got := response.Header.Get(name); got != value {
					t.Errorf("GET %s %s: header %s is %q", path, c.name, name, got)
				}
			}
		}
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
			http.MethodOptions} {
			response := get(d.Handler(loopback), path, func(r *http.Request) { r.Method = method })
			if response.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, path, response.StatusCode)
			}
		}
	}
	for _, path := range []string{"/v1/nothing", "/assets/../dashboard.go", "/assets/nothing.js", "/v2/view"} {
		if response := get(d.Handler(loopback), path); response.StatusCode == http.StatusOK {
			t.Errorf("GET %s: %d", path, response.StatusCode)
		}
	}
}

// The answer counts Services by what is known of them, and says what cannot be read.
func TestCoverage(t *testing.T) {
	d := newDashboard(&world{})
	d.Summary = func(context.Context) (coverage.Summary, error) {
		sum := coverage.Summary{At: time.Now(), Services: map[coverage.Class]int{
			{State: coverage.Uncovered, Gates: "none"}: 201, {State: coverage.Possible, Gates: "hold"}: 39,
			{State: coverage.Acknowledges, Gates: "both"}: 58, {State: coverage.Waited, Gates: "barrier"}: 1,
			{State: coverage.Absent, Gates: "barrier"}: 1}}
		for i := range maxGaps + 1 {
			sum.Gaps = append(sum.Gaps, coverage.Consumer{
				Service: drain.Service{Namespace: "shop", Name: fmt.Sprint(i)},
				Name:    "Ingress shop/front", Kind: "Ingress", State: coverage.Uncovered, Why: "no gateway"})
		}
		return sum, errors.New("list pods")
	}
	var got api.Coverage
	response := get(d.Handler(loopback), api.CoveragePath)
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Services != 300 || got.Whole != 60 || got.Possible != 39 ||
		got.Uncovered != maxGaps+1 || len(got.Items) != maxGaps ||
		got.Items[0].Service != "shop/0" || got.Error != "list pods" || got.At.IsZero() {
		t.Errorf("%+v", got)
	}
}

// Programs that read lists must not meet null, whatever the coordinator knows.
func TestNothingIsNull(t *testing.T) {
	w := &world{}
	w.view = empty()
	d := newDashboard(w)
	check := func(when string) {
		t.Helper()
		for _, row := range routes {
			if row.access == anyone {
				continue
			}
			body, err := io.ReadAll(get(d.Handler(loopback), paths(row.path)).Body)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(body), "null") || strings.Contains(string(body), "0001-01-01") ||
				!json.Valid(body) {
				t.Errorf("%s, GET %s: %s", when, row.path, body)
			}
		}
	}
	w.view.Replica.Started, w.view.At = time.Now(), time.Now()
	check("empty")
	now := time.Now()
	w.view.Drains.Items = []api.Drain{{Namespace: "shop", Pod: "a", UID: "uid-a", Since: now, Deadline: now,
		Reports: []api.AgentReport{{}}}}
	w.view.Agents.Items = []api.Agent{{Features: []string{}}}
	w.view.Outcomes = []api.Outcome{{At: now, Silent: []string{}}}
	w.view.Propagation = []api.Propagation{{}}
	w.parties = []drain.Acknowledger{{}}
	w.explain.Targets = []drain.Targets{{}}
	check("bare")
}

// empty is the view of a coordinator that knows nothing.
func empty() api.View {
	return api.View{
		Drains: api.Drains{Items: []api.Drain{}}, Agents: api.Agents{Items: []api.Agent{}},
		Barriers: api.Barriers{Items: []api.OpenBarrier{}, MissingPods: []string{}}, Outcomes: []api.Outcome{},
		Propagation: []api.Propagation{}, TargetHealth: api.TargetHealth{Services: []api.ServiceHealth{}},
	}
}

// The page needs nothing from elsewhere, and no script in its text: else it would need a weaker
// policy.
func TestThePageIsWhole(t *testing.T) {
	h := newDashboard(&world{}).Handler(loopback)
	read := func(path, kind string) string {
		response := get(h, path)
		if got := response.Header.Get("Content-Type"); !strings.HasPrefix(got, kind) {
			t.Errorf("GET %s: %s", path, got)
		}
		text, _ := io.ReadAll(response.Body)
		return string(text)
	}
	all := map[string]string{"/": read("/", "text/html")}
	for _, name := range []struct{ path, kind string }{{"/assets/app.js", "text/javascript"},
		{"/assets/style.css", "text/css"}, {"/assets/icon.svg", "image/svg+xml"}} {
		if !strings.Contains(all["/"], name.path[1:]) {
			t.Errorf("the page does not name %s", name.path)
		}
		all[name.path] = read(name.path, name.kind)
	}
	for path, text := range all {
		text = strings.NewReplacer("http://www.w3.org/2000/svg", "", "http://localhost:9445", "").Replace(text)
		for _, no := range []string{"http://", "https://", "//cdn", "<style", " style=", " onclick",
			"innerHTML", "eval("} {
			if strings.Contains(text, no) {
				t.Errorf("%s has %q", path, no)
			}
		}
	}
}

// Clients share a view, and it soon shows what has changed. One that takes long must not be
// made all the time: it is made under the lock that deletions wait for.
func TestViewsAreRestedFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{}
		d := newDashboard(w)
		for range 100 {
			for range 3 {
				d.latest()
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n := w.made(); n != 4 {
			t.Errorf("%d views in a second, want 4", n)
		}
		w.set(func(v *api.View) { v.Drains.Open = 7 })
		time.Sleep(viewEvery)
		if v := d.latest(); v.Drains.Open != 7 || time.Since(v.At) > 0 {
			t.Errorf("%d drains as of %s ago", v.Drains.Open, time.Since(v.At))
		}
		time.Sleep(time.Hour)
		if n := w.made(); n != 5 {
			t.Errorf("%d views were made without a reader", n-5)
		}
		w.takes = 100 * time.Millisecond
		for end := time.Now().Add(21 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			d.latest()
		}
		if n := w.made() - 5; n < 9 || n > 11 {
			t.Errorf("%d views in 21 s, each takes 100 ms: want a twentieth of the time", n)
		}
	})
}

func TestTheViewSaysThatNothingAsks(t *testing.T) {
	d := newDashboard(&world{})
	for _, want := range []bool{true, false} {
		d.Unasked = func() bool { return want }
		if v := d.view(); v.Replica.Unasked != want {
			t.Errorf("unasked: %v, want %v", v.Replica.Unasked, want)
		}
	}
}

// Whom the page sends to the runbook finds the entry.
func TestTheRunbookHasWhatThePageNames(t *testing.T) {
	script, err := os.ReadFile("page/app.js")
	if err != nil {
		t.Fatal(err)
	}
	runbook, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`Lameduck[A-Z][A-Za-z]+`).FindAllString(string(script), -1)
	if len(names) < 4 {
		t.Errorf("the page names %q", names)
	}
	for _, name := range names {
		if !strings.Contains(string(runbook), "\n## "+name+"\n") {
			t.Errorf("the runbook has no %s", name)
		}
	}
	// For each reason it is the entry that docs/reasons.md names, and none for those that have none
	// there.
	reasons, err := os.ReadFile("../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\*\\*W\\*\\*.*?(?:\\[(Lameduck\\w+)\\].*)?$").
		FindAllStringSubmatch(string(reasons), -1) {
		if m[2] != "" {
			told[m[1]] = m[2]
		}
	}
	entries := regexp.MustCompile(`(?m)^const entries = \{(.*)\};$`).FindStringSubmatch(string(script))
	if entries == nil {
		t.Fatal("the page has no entries")
	}
	named := map[string]string{}
	for _, m := range regexp.MustCompile(`(\w+): '(\w+)'`).FindAllStringSubmatch(entries[1], -1) {
		named[m[1]] = m[2]
	}
	if diff := cmp.Diff(told, named); diff != "" || len(named) == 0 {
		t.Errorf("docs/reasons.md (-) and the page (+): %s", diff)
	}
}

// A gateway in a rare mode is among the agents that are listed, however many there are, and all are
// counted.
func TestModesOfGateways(t *testing.T) {
	w := &world{}
	of := func(id int, state, mode string) api.Agent {
		return api.Agent{ID: fmt.Sprint(id), State: state, GatewayMode: mode}
	}
	for i := range 2 * maxAgents {
		w.view.Agents.Items = append(w.view.Agents.Items, of(i, api.AgentConnected, "nftables"))
	}
	w.view.Agents.Items = append(w.view.Agents.Items, of(900, api.AgentConnected, "absent"),
		of(901, api.AgentMissing, "nftables"), of(902, api.AgentGone, "iptables"))
	got := newDashboard(w).latest().Agents
	if len(got.Items) != maxAgents || got.Items[0].ID != "901" || got.Items[1].ID != "900" || got.Items[2].ID != "0" {
		t.Errorf("%d agents: %+v", len(got.Items), got.Items[:3])
	}
	if diff := cmp.Diff(map[string]int{"nftables": 2*maxAgents + 1, "absent": 1}, got.GatewayModes); diff != "" {
		t.Error(diff)
	}
}

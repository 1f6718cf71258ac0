package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/check"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// said is an answer, so many seconds after t0.
func said(name string, at int, drains ...api.Drain) answer[api.View] {
	return answer[api.View]{replica: &replica{name: name, ready: true}, said: api.View{
		At: t0.Add(time.Duration(at) * time.Second), Drains: api.Drains{Open: len(drains), Items: drains},
	}}
}

// drainOf is a drain that began so many seconds after t0. Words are "agent state".
func drainOf(pod, phase string, since int, words ...string) api.Drain {
	d := api.Drain{Namespace: "shop", Pod: pod, UID: "uid-" + pod, Phase: phase,
		Reason: "None", Since: t0.Add(time.Duration(since) * time.Second), Owed: len(words)}
	d.Deadline = d.Since.Add(30 * time.Second)
	for _, w := range words {
		agent, state, _ := strings.Cut(w, " ")
		d.Reports = append(d.Reports, api.AgentReport{Agent: agent, State: state, Connected: true})
		if state != "idle" {
			d.Waiting++
		}
	}
	return d
}

// A pod may be drained through several coordinators. What operators must see is one pod, as far as
// it is where it is least far: all have to let it go.
func TestMergeOfDrains(t *testing.T) {
	// The clocks of the coordinators are an hour apart, which must not show.
	w := merge([]answer[api.View]{
		said("one", 10, drainOf("a", "Quiescing", 4, "hap removed", "other idle"), drainOf("b", "Released", 9)),
		said("two", 3610, drainOf("a", "Unrouting", 3602, "hap unknown", "third routing"),
			drainOf("c", "Queued", 3609)),
		{replica: &replica{name: "three"}, err: errors.New("it does not answer")},
	})
	var got []string
	for _, d := range w.Drains {
		got = append(got, fmt.Sprintf("%s %s %s/%s %s: %s", d.Pod, d.Phase, seconds(d.AgeSeconds),
			seconds(d.RemainingSeconds), strings.Join(d.Coordinators, "+"), waitsFor(d.Drain, 5)))
	}
	want := []string{
		"a Unrouting 8.0s/22s one+two: hap (unknown), third (routing)",
		"b Released 1.0s/29s one: nothing (None)",
		"c Queued 1.0s/29s two: capacity in its Service",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(w.Coordinators) != 3 || w.Coordinators[2].Error != "it does not answer" || w.Coordinators[0].Drains != 2 {
		t.Errorf("%+v", w.Coordinators)
	}
	// In any order it is the same, but for the order in which coordinators are named.
	other := merge([]answer[api.View]{
		said("two", 3610, drainOf("a", "Unrouting", 3602, "hap unknown", "third routing")),
		said("one", 10, drainOf("a", "Quiescing", 4, "hap removed", "other idle")),
	})
	if d := other.Drains[0]; d.Phase != "Unrouting" || waitsFor(d.Drain, 5) != "hap (unknown), third (routing)" ||
		d.AgeSeconds != 8 || len(d.Reports) != 3 {
		t.Errorf("in another order: %+v", d)
	}
}

func TestMergeOfAgents(t *testing.T) {
	of := func(name, id, state string, connected bool) answer[api.View] {
		return answer[api.View]{replica: &replica{name: name},
			said: api.View{Agents: api.Agents{Items: []api.Agent{{ID: id, Name: "edge/" + id, State: state,
				Connected: connected}}}}}
	}
	w := merge([]answer[api.View]{of("one", "a", "connected", true), of("two", "a", "missing", false),
		of("three", "b", "connected", true), of("four", "b", "connected", true)})
	var got []string
	for _, a := range w.Agents {
		got = append(got, fmt.Sprint(a.ID, " ", a.State, " ", strings.Join(a.ConnectedTo, "+")))
	}
	if diff := cmp.Diff([]string{"a missing one", "b connected three+four"}, got); diff != "" {
		t.Error(diff)
	}
}

// What one coordinator does not wait for is not hidden by another that does, or that has just
// started.
func TestLeastCoverage(t *testing.T) {
	of := func(services, whole, uncovered int) answer[api.Coverage] {
		return answer[api.Coverage]{said: api.Coverage{Services: services, Whole: whole, Uncovered: uncovered}}
	}
	away := answer[api.Coverage]{err: errors.New("away")}
	for name, c := range map[string]struct {
		answers []answer[api.Coverage]
		want    *api.Coverage
	}{
		"none answers": {[]answer[api.Coverage]{away}, nil},
		"one is uncovered": {[]answer[api.Coverage]{of(5, 5, 0), away, of(5, 4, 1)},
			&api.Coverage{Services: 5, Whole: 4, Uncovered: 1}},
		"one has started": {[]answer[api.Coverage]{of(0, 0, 0), of(5, 5, 0)}, &api.Coverage{Services: 5, Whole: 5}},
		"one waits for less": {[]answer[api.Coverage]{of(5, 5, 0), of(5, 3, 0)},
			&api.Coverage{Services: 5, Whole: 3}},
	} {
		if diff := cmp.Diff(c.want, least(c.answers)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	var out bytes.Buffer
	writeCoverage(&api.Coverage{Services: 5, Whole: 3, Possible: 1, Uncovered: 2, Error: "list pods",
		Items: []api.Consumer{{Service: "shop/web", Name: "Ingress shop/front", Kind: "Ingress", Why: "no gateway"}}},
		false, &out)
	for _, want := range []string{"Services with pods: 5. Waited for whole: 3; not known: 1; not waited for: 1.",
		"list pods", "Ingress shop/front", "no gateway", "and 1 more"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

func TestWaitsFor(t *testing.T) {
	d := oneDrain{Drain: drainOf("a", "Unrouting", 0, "one unknown", "two routing", "three removed", "four idle")}
	d.Reports[0].Connected, d.Reports[1].Suspended = false, true
	d.Waiting = 2 // not for the suspended one
	if got, want := waitsFor(d.Drain, 5), "one (not connected), three (removed)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	d.Waiting = 40 // more than are listed
	for most, want := range map[int]string{1: "one (not connected), and 39 more",
		2: "one (not connected), three (removed), and 38 more"} {
		if got := waitsFor(d.Drain, most); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	d.Reports = d.Reports[1:2] // suspended ones have taken the places of the others
	if got, want := waitsFor(d.Drain, 2), "40 agents"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// kubeconfig writes one that leads nowhere.
func kubeconfig(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "config")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"x","clusters":[{"name":"x","cluster":{"server":"https://127.0.0.1:1"}}],"contexts":[{"name":"x","context":{"cluster":"x","namespace":"mine"}},{"name":"y","context":{"cluster":"x"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestParse(t *testing.T) {
	config := kubeconfig(t)
	for _, c := range []struct {
		args string
		want string
	}{
		{"status", "status ns= pod="},
		{"explain web-1", "explain ns=mine pod=web-1"},
		{"explain pod/web-1 -n shop", "explain ns=shop pod=web-1"},
		{"-n shop explain web-1 --evict", "explain ns=shop pod=web-1"},
		{"explain web-1 --context y", "explain ns=default pod=web-1"},
		{"drains -w -o wide", "drains ns= pod="},
		{"", "help"}, {"help", "help"}, {"drains -h", "help"},
		{"drain", `unknown command "drain"`}, {"explain", "one pod, not 0"}, {"explain a b", "one pod, not 2"},
		{"status x", `unexpected argument "x"`},
		{"status -w", "--watch goes with drains"}, {"drains -w -o yaml", "--watch has no --output yaml"},
		{"status -o xml", `--output "xml"`},
		{"drains --evict", "--evict goes with explain"}, {"status --timeout 0s", "--timeout 0s"},
		{"check --pre --strict", "check ns= pod="}, {"check -o json -n shop", "check ns=shop pod="},
		{"check -o wide", "check has no --output wide"}, {"version -o wide", "version has no --output wide"},
		{"version", "version ns= pod="}, {"drains --pre", "--pre and --strict go with check"},
		{"status --strict", "--pre and --strict go with check"}, {"drains -A", "drains ns= pod="},
		{"drains -A -n shop", "--all-namespaces goes with"}, {"explain a -A", "--all-namespaces goes with"},
		{"completion fish", "completion ns= pod="}, {"completion tcsh", "completion takes one of bash, zsh, fish"},
		{"status --lameduck-port 70000", "--lameduck-port 70000"}, {"status --nonsense", "nonsense"},
	} {
		var out bytes.Buffer
		o, err := parse(append(strings.Fields(c.args), "--kubeconfig", config), &out)
		got := fmt.Sprintf("%s ns=%s pod=%s", o.command, o.namespace, o.pod)
		switch {
		case errors.Is(err, pflag.ErrHelp):
			got = "help"
			if !strings.Contains(out.String(), "explain POD") || !strings.Contains(out.String(), "--kubeconfig") {
				t.Errorf("%q: help says %q", c.args, &out)
			}
		case err != nil:
			if got = err.Error(); !errors.Is(err, errUsage) {
				t.Errorf("%q: %v is not errUsage", c.args, err)
			}
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%q: %q, want %q", c.args, got, c.want)
		}
	}
}

// served is a coordinator that is reached without a cluster.
func served(t *testing.T, name string, handler http.HandlerFunc) *replica {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	}}
	return &replica{name: name, ready: true, http: &http.Client{Transport: transport},
		pod:   &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning}},
		close: transport.CloseIdleConnections}
}

// A connection can be refused by the kubelet, and by the pod.
func TestFault(t *testing.T) {
	for text, want := range map[string]string{
		"error dialing backend: dial tcp 10.0.0.7:10250: connect: connection refused": "does not reach the kubelet",
		`failed to connect to localhost:9445 inside namespace "x", IPv4: dial tcp4 127.0.0.1:9445: connect: ` +
			"connection refused": "serves nothing on its loopback address",
		`User "jane" cannot create resource "pods/portforward": forbidden`: "you may not forward ports",
	} {
		if err := (&replica{name: "one"}).fault(errors.New(text)); !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// One of three that answers is enough, and those that do not are named, without waiting longer than
// was said.
func TestAskGoesOnWithoutTheSilent(t *testing.T) {
	release := make(chan struct{})
	good := served(t, "good", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(said("", 10, drainOf("a", "Unrouting", 4, "hap routing")).said)
	})
	broken := served(t, "broken", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"error":"it is ill"}`, http.StatusInternalServerError)
	})
	hangs := served(t, "hangs", func(http.ResponseWriter, *http.Request) { <-release })
	t.Cleanup(func() { close(release) })
	all := replicas{broken, good, hangs}
	o := options{timeout: 2 * time.Second}
	var out, errs bytes.Buffer
	began := time.Now()
	if err := drains(t.Context(), o, all, &out, &errs); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %s", took)
	}
	if want := "shop        a     Unrouting   6.0s   24s         hap (routing)"; !strings.Contains(out.String(), want) {
		t.Errorf("%s", &out)
	}
	for _, want := range []string{"coordinator broken: it is ill", "coordinator hangs did not answer in time"} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("no %q in %q", want, &errs)
		}
	}
	out.Reset()
	if err := status(t.Context(), o, all, &out, &errs); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"broken        silent", "good          ready", "hangs         silent",
		"No agent is known"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if err := drains(t.Context(), o, replicas{broken}, &out, &errs); err == nil ||
		!strings.Contains(err.Error(), "it is ill") {
		t.Errorf("no replica answers: %v", err)
	}
}

// The pod of a coordinator cannot be scheduled. It is named, though the other one answers, and pods
// that the shutdown of a node has left are not.
func TestACoordinatorThatDoesNotRun(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PodStatus{Phase: phase}}
	}
	answer := func(pods ...corev1.Pod) kubernetes.Interface {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(corev1.PodList{Items: pods})
		}))
		t.Cleanup(server.Close)
		kube, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		return kube
	}
	o := options{timeout: 2 * time.Second, config: &rest.Config{}}
	all, err := find(t.Context(), o, answer(pod("a", corev1.PodPending), pod("b", corev1.PodRunning),
		pod("c", corev1.PodFailed)))
	if err != nil || len(all) != 2 {
		t.Fatalf("%d coordinators, %v", len(all), err)
	}
	if err := all[0].get(t.Context(), api.ViewPath, nil); err == nil ||
		!strings.Contains(err.Error(), "coordinator a does not run") {
		t.Errorf("the one that is pending: %v", err)
	}
	if _, err := find(t.Context(), o, answer(pod("a", corev1.PodPending))); err == nil ||
		!strings.Contains(err.Error(), "none of the 1 pods") {
		t.Errorf("none runs: %v", err)
	}
}

// One coordinator does not answer, and the other one knows no such pod.
func TestExplainOfNoPod(t *testing.T) {
	all := replicas{
		served(t, "ill", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"error":"it is ill"}`, http.StatusInternalServerError)
		}),
		served(t, "good", http.NotFound),
	}
	o := options{timeout: 2 * time.Second, namespace: "shop", pod: "wbe-1"}
	err := explain(t.Context(), o, fake.NewClientset(), all, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "no pod wbe-1 in namespace shop") {
		t.Error(err)
	}
}

// Each coordinator tells of each deletion.
func TestStatusTellsOfADeletionOnce(t *testing.T) {
	var outcomes []api.Outcome
	for _, name := range []string{"web-0", "web-1", "web-2", "web-3"} {
		outcomes = append(outcomes, api.Outcome{Namespace: "shop", Pod: name, UID: name, Gate: "hold", Abnormal: true,
			Reason: "Deadline"})
	}
	w := merge([]answer[api.View]{{replica: &replica{name: "a"}, said: api.View{Outcomes: outcomes}},
		{replica: &replica{name: "b"}, said: api.View{Outcomes: outcomes}}})
	var out strings.Builder
	writeStatus(w, false, &out)
	for _, o := range outcomes {
		if n := strings.Count(out.String(), o.Pod); n != 1 || !strings.Contains(out.String(), "hold") {
			t.Errorf("%s %d times in\n%s", o.Pod, n, &out)
		}
	}
}

// An operator who has forgotten that the glass is broken reads that first.
func TestStatusWithoutAWebhookConfiguration(t *testing.T) {
	view := api.View{Replica: api.Replica{Unasked: true}}
	w := merge([]answer[api.View]{{replica: &replica{name: "older"}}, {replica: &replica{name: "b"}, said: view}})
	var out strings.Builder
	writeStatus(w, false, &out)
	if !strings.HasPrefix(out.String(), "Deletions do not wait: ") {
		t.Errorf("status says:\n%s", &out)
	}
}

// A coordinator lists the oldest drains of all namespaces. The others are not nothing.
func TestDrainsThatAreNotListed(t *testing.T) {
	for open, want := range map[int]string{
		1:   "Nothing is draining.\n",
		300: "warning: 299 more drains are open: coordinators list the oldest of all namespaces\n",
	} {
		crowded := served(t, "crowded", func(w http.ResponseWriter, _ *http.Request) {
			view := said("", 10, drainOf("a", "Unrouting", 4, "hap routing")).said
			view.Drains.Open = open
			_ = json.NewEncoder(w).Encode(view)
		})
		var out, errs bytes.Buffer
		o := options{timeout: 20 * time.Second, namespace: "another"}
		if err := drains(t.Context(), o, replicas{crowded}, &out, &errs); err != nil {
			t.Fatal(err)
		}
		if errs.String() != want || out.Len() > 0 {
			t.Errorf("%d open: %q, %q, want %q", open, &errs, &out, want)
		}
	}
}

// A coordinator lists only some of what it knows. status does not take the rest for nothing, nor an
// agent that is not listed for one that is not connected.
func TestStatusOfWhatIsNotListed(t *testing.T) {
	agents := func(known int, all ...string) api.Agents {
		of := api.Agents{Known: known}
		for _, id := range all {
			of.Items = append(of.Items, api.Agent{ID: id, Name: "edge/" + id, State: "connected", Connected: true})
		}
		return of
	}
	w := merge([]answer[api.View]{
		{replica: &replica{name: "one"}, said: api.View{Agents: agents(3, "a", "b"),
			Drains: api.Drains{Open: 300},
			Barriers: api.Barriers{Open: 150, Waiting: 40, Items: []api.OpenBarrier{{Drain: api.Drain{UID: "x",
				Phase: "Released"}}}}}},
		{replica: &replica{name: "two"}, said: api.View{Agents: agents(3, "b")}},
		{replica: &replica{name: "three"}, said: api.View{Agents: agents(1, "a")}},
		{replica: &replica{name: "silent"}, err: errors.New("it does not answer")},
	})
	var out strings.Builder
	writeStatus(w, false, &out)
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"edge/a - connected 2/2 ", "edge/b - connected 2/3 ", "and 1 more agents",
		"and 300 more drains: coordinators list the oldest of all namespaces",
		"Pods at the barrier: 150. Waiting to stop: 40. ", "and 149 more"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(text, "Nothing is draining") {
		t.Errorf("it hides drains:\n%s", &out)
	}
}

// Coordinators do not know whether the API server asks them.
func TestExplainWhereNobodyIsAsked(t *testing.T) {
	configured := func(selectors ...*metav1.LabelSelector) *admissionv1.ValidatingWebhookConfiguration {
		c := &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "lameduck"}}
		for _, s := range selectors {
			c.Webhooks = append(c.Webhooks, admissionv1.ValidatingWebhook{NamespaceSelector: s})
		}
		return c
	}
	others := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "b"}}
	its := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
	const missing = "ValidatingWebhookConfiguration lameduck is missing, or has no entry"
	for name, c := range map[string]struct {
		kube *fake.Clientset
		want string
	}{
		"break glass": {fake.NewClientset(), missing},
		"no entry":    {fake.NewClientset(configured()), missing},
		"not selected": {fake.NewClientset(configured(others, others)),
			"no entry of ValidatingWebhookConfiguration lameduck selects namespace shop"},
		"selected":   {fake.NewClientset(configured(others, its)), ""},
		"everything": {fake.NewClientset(configured(&metav1.LabelSelector{})), ""},
	} {
		if err := c.kube.Tracker().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop",
			Labels: map[string]string{"team": "a"}}}); err != nil {
			t.Fatal(err)
		}
		answering := served(t, "answering", func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(api.Explanation{Namespace: "shop", Pod: "web", Summary: "It would wait."})
		})
		var out, errs bytes.Buffer
		o := options{timeout: 20 * time.Second, namespace: "shop", pod: "web"}
		if err := explain(t.Context(), o, c.kube, replicas{answering}, &out, &errs); err != nil {
			t.Fatal(err)
		}
		want := "Pod shop/web: It would wait.\n"
		if c.want != "" {
			want = "The API server does not ask Lameduck about this pod, and its deletion is not held: " + c.want +
				".\nIf it asked:\n" + want
		}
		if !strings.HasPrefix(out.String(), want) {
			t.Errorf("%s: %q, want %q", name, &out, want)
		}
	}
	forbidden := fake.NewClientset()
	forbidden.PrependReactor("get", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{}, "", nil)
	})
	answering := served(t, "answering", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) })
	var out, errs bytes.Buffer
	o := options{timeout: time.Minute, namespace: "shop", pod: "web"}
	err := explain(t.Context(), o, forbidden, replicas{answering}, &out, &errs)
	if err != nil || !strings.HasPrefix(out.String(), "Pod /: ") ||
		!strings.HasPrefix(errs.String(), "warning: whether the API server asks Lameduck about this pod") {
		t.Errorf("without the right to read: %v, %s%s", err, &errs, &out)
	}
}

// A coordinator that does not answer is named with every kind of output.
func TestSilentCoordinatorsWithJSON(t *testing.T) {
	all := replicas{
		served(t, "good", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) }),
		served(t, "broken", func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"error":"it is ill"}`, http.StatusInternalServerError)
		}),
	}
	o := options{timeout: 20 * time.Second, namespace: "shop", pod: "web", output: "json"}
	for name, c := range map[string]struct {
		run  func(out, stderr io.Writer) error
		want string
	}{
		"explain": {func(out, stderr io.Writer) error {
			return explain(t.Context(), o, fake.NewClientset(), all, out, stderr)
		}, `"silent": [` + "\n    " + `"broken"`},
		"report": {func(out, stderr io.Writer) error { return report(t.Context(), o, all, out, stderr) }, "Report"},
	} {
		var out, errs bytes.Buffer
		if err := c.run(&out, &errs); err != nil {
			t.Fatal(err)
		}
		if errs.String() != "warning: coordinator broken: it is ill\n" || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: %q, %s", name, &errs, &out)
		}
	}
}

// A drain is told of when it changes, and its end once, also where another coordinator has it for
// longer, or it was not seen open. What ended before is not told.
func TestWatch(t *testing.T) {
	view := func(drains []api.Drain, ended ...string) (v api.View) {
		v = api.View{At: t0.Add(10 * time.Second), Drains: api.Drains{Items: drains}}
		for _, pod := range ended {
			v.Outcomes = append(v.Outcomes, api.Outcome{Namespace: "shop", Pod: pod, UID: "uid-" + pod,
				Reason: "Acknowledged"})
		}
		return v
	}
	routing := []api.Drain{drainOf("a", "Unrouting", 4, "hap routing")}
	removed := []api.Drain{drainOf("a", "Quiescing", 4, "hap removed")}
	var out, errs bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	serve := func(name string, views ...api.View) *replica {
		return served(t, name, func(w http.ResponseWriter, _ *http.Request) {
			if len(views) == 0 {
				cancel()
				http.Error(w, `{"error":"it is ill"}`, http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(views[0])
			views = views[1:]
		})
	}
	all := replicas{
		serve("one", view(routing, "old"), view(routing, "old"), view(nil, "a", "old"), view(nil, "b", "a")),
		serve("two", view(routing), view(removed), view(removed), view(nil, "a"), view(nil, "a", "b")),
	}
	if err := watchDrains(ctx, options{timeout: 30 * time.Second}, all, &out, &errs); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{"NAMESPACE POD PHASE AGE WAITS-FOR", "shop a Unrouting 6.0s hap (routing)",
		"shop a Quiescing 6.0s hap (removed)", "shop a Acknowledged ended", "shop b Acknowledged ended"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// An API server that does not answer ends the check before an installation, too.
func TestPreEndsInTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-ctx.Done():
		}
	}))
	t.Cleanup(server.Close)
	o := options{pre: true, timeout: 100 * time.Millisecond, config: &rest.Config{Host: server.URL}}
	kube, err := kubernetes.NewForConfig(o.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := diagnose(ctx, o, kube, io.Discard); !errors.Is(err, cli.ErrUnchecked) || ctx.Err() != nil {
		t.Errorf("%v, %v", err, ctx.Err())
	}
}

// Only a right that is missing is a reason to bind a role.
func TestWhatCannotBeRead(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch path.Base(r.URL.Path) {
		case "version":
		case "nodes":
			w.WriteHeader(http.StatusForbidden)
		default:
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	t.Cleanup(server.Close)
	o := options{timeout: 10 * time.Second, config: &rest.Config{Host: server.URL}}
	kube, err := kubernetes.NewForConfig(o.config)
	if err != nil {
		t.Fatal(err)
	}
	f, err := gather(t.Context(), o, kube)
	if err != nil {
		t.Fatal(err)
	}
	for object, want := range map[string]string{"nodes": "bind the ClusterRole", "leases": "--timeout"} {
		if !slices.ContainsFunc(f.Unread, func(u check.Finding) bool {
			return u.Object == object && strings.Contains(u.Fix, want)
		}) {
			t.Errorf("no %q for %s in %+v", want, object, f.Unread)
		}
	}
}

// It is asked where there is no cluster.
func TestVersion(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "is-not-there"))
	var stdout, stderr bytes.Buffer
	if err := run(t.Context(), []string{"--version"}, &stdout, &stderr); !errors.Is(err, errPrinted) {
		t.Errorf("%v, stderr %q", err, &stderr)
	}
	if !strings.HasPrefix(stdout.String(), "kubectl-lameduck dev, commit ") {
		t.Errorf("said %q", &stdout)
	}
}

// An entry is asked in a namespace that it is called for, and not in one that is about to go.
func TestCalled(t *testing.T) {
	namespace := func(name, mode string) corev1.Namespace {
		return corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"mode": mode}}}
	}
	ends := namespace("a", "enforce")
	ends.DeletionTimestamp = &metav1.Time{Time: t0}
	all := []corev1.Namespace{ends, namespace("b", "enforce"), namespace("c", "enforce"), namespace("d", "off"),
		namespace("default", "")}
	for _, c := range []struct{ given, mode, want string }{
		{"", "enforce", "b"}, {"c", "enforce", "c"}, {"d", "enforce", "b"}, {"a", "enforce", "b"}, {"", "none", ""},
		{"", "", "default"}, {"c", "", "c"},
	} {
		selector := &metav1.LabelSelector{}
		if c.mode != "" {
			selector.MatchLabels = map[string]string{"mode": c.mode}
		}
		if got := called(c.given, all, selector); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
	if got := called("", all, nil); got != "" {
		t.Errorf("without a selector: %q", got)
	}
}

// Each version is counted once, and an agent that several coordinators know is one agent.
func TestVersions(t *testing.T) {
	serve := func(name, version string, agents ...api.Agent) *replica {
		return served(t, name, func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(api.View{Replica: api.Replica{Version: version},
				Agents: api.Agents{Items: agents, Known: 5}})
		})
	}
	agent := func(id, version string) api.Agent {
		return api.Agent{ID: id, Name: "edge/" + id, Version: version, Connected: version != ""}
	}
	views, err := ask[api.View](t.Context(), options{timeout: 10 * time.Second}, replicas{
		serve("one", "v1", agent("a", "v1"), agent("b", "v2"), agent("c", "")),
		serve("two", "v1", agent("a", "v1"), agent("d", "v1")),
		served(t, "ill", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }),
	}, api.ViewPath)
	if err != nil {
		t.Fatal(err)
	}
	want := versionList{kind("VersionList"), []component{{"kubectl-lameduck", "dev, commit unknown", 1},
		{"coordinator", "v1", 2}, {"agent", "v1", 2}, {"agent", "v2", 1}}, 1}
	if diff := cmp.Diff(want, versionsOf(views)); diff != "" {
		t.Error(diff)
	}
}

// What status says of the barrier and of health, where several coordinators answer: each barrier
// once, as who was asked last has it; who is well is not mentioned.
func TestStatusTellsOfBarriersAndHealth(t *testing.T) {
	now := time.Now()
	barrier := func(phase string, since time.Duration) api.OpenBarrier {
		return api.OpenBarrier{Drain: api.Drain{Namespace: "shop", Pod: "web-1", UID: "u", Phase: phase,
			Since: now.Add(-3 * time.Second), PhaseSince: now.Add(-since), Waiting: 1,
			Reports: []api.AgentReport{{Agent: "lameduck-node/b", State: "routing", Connected: true},
				{Agent: "lameduck-node/a", State: "idle", Connected: true}}},
			Hook: "exec", StatedSeconds: 25, StatedUntil: now.Add(22 * time.Second)}
	}
	service := func(name string, open, unwell int) api.ServiceHealth {
		return api.ServiceHealth{Namespace: "shop", Name: name, Gateways: 3, FailingOpen: open, Unwell: unwell,
			Trouble: open+unwell > 0, Says: []api.GatewayHealth{{
				Agent: "edge/hap", Checked: true,
				TargetCounts: api.TargetCounts{Usable: 1, Unknown: 1, Unhealthy: unwell, Excluded: 1},
				Targets:      []api.UnhealthyTarget{{Pod: "shop/web-9", Last: "timeout"}, {Address: "10.0.0.1:80"}},
			}}}
	}
	w := merge([]answer[api.View]{
		{replica: &replica{name: "a"}, said: api.View{At: now,
			Barriers: api.Barriers{Items: []api.OpenBarrier{barrier("Released", 3*time.Second)}}}},
		{replica: &replica{name: "b"}, said: api.View{At: now,
			Barriers: api.Barriers{Items: []api.OpenBarrier{barrier("Unrouting", time.Second)}, Missing: 25,
				MissingPods: strings.Fields("shop/a shop/b shop/c shop/d")},
			TargetHealth: api.TargetHealth{Agents: 3,
				Services: []api.ServiceHealth{service("api", 1, 2), service("web", 0, 1), service("well", 0, 0)}}}},
	})
	if len(w.Barriers) != 1 {
		t.Fatalf("%d barriers", len(w.Barriers))
	}
	var out strings.Builder
	writeStatus(w, false, &out)
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{
		"Pods at the barrier: 1. Waiting to stop: 1. NAMESPACE POD PHASE AGE HOOK WAITS-FOR shop web-1 Unrouting " +
			"3.0s exec lameduck-node/b (routing), and a stated wait of 25s",
		"Pods that ask for the barrier and were created without it: shop/a, shop/b, shop/c and 22 more. They stop " +
			"without waiting until they are created again.",
		"shop api fails-open (1/3) 2/5 shop/web-9 (timeout), 10.0.0.1:80", "shop web unhealthy (1/3) 2/4",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(text, "shop well") {
		t.Errorf("it tells of what is well:\n%s", out.String())
	}
	out.Reset()
	if writeStatus(w, true, &out); !strings.Contains(out.String(), "well") {
		t.Errorf("wide:\n%s", out.String())
	}
}

// An agent that has declared every Service shows all, and the mode of its gateway.
func TestStatusOfAgents(t *testing.T) {
	w := merge([]answer[api.View]{{replica: &replica{name: "one"}, said: api.View{Agents: api.Agents{Items: []api.Agent{
		{ID: "1", Name: "n/node", Gateway: "kube-proxy", GatewayMode: "nftables", State: "connected", Connected: true,
			Declared: true, Services: 1, EveryService: true},
		{ID: "2", Name: "n/one", State: "connected", Connected: true, Declared: true, Services: 1},
		{ID: "3", Name: "n/silent", State: "connected", Connected: true},
	}}}}})
	var out strings.Builder
	writeStatus(w, true, &out)
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"LAST-DRAIN GATEWAY-MODE NODE", "n/node kube-proxy connected 1/1 all - nftables -",
		"n/one - connected 1/1 1 - - -", "n/silent - connected 1/1 everything"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// A node agent that one coordinator lacks may be connected to another: then the hooks are answered.
func TestExplanationsOfTheBarrierAreJoined(t *testing.T) {
	said := func(connected bool) api.Explanation {
		x := api.Explanation{Summary: "s", Barrier: &api.ExplainedBarrier{Node: "n", Agent: "lameduck-node/a",
			Connected: connected, BoundSeconds: 30, GraceSeconds: 20,
			Hooks: []api.Hook{{Container: "app", Kind: "httpGet"}},
			Stated: []api.StatedWait{{Namespace: "shop", Service: "web", Seconds: 40, Cut: true},
				{Namespace: "shop", Service: "db", Error: "nonsense"}}}}
		if !connected {
			x.Uncovered = []api.Uncovered{{What: api.BarrierItself, Why: "away"}, {What: "container log", Why: "x"}}
		}
		return x
	}
	x := explained{Explanation: said(false).Join(said(true))}
	if !x.Barrier.Connected || len(x.Uncovered) != 1 || x.Uncovered[0].What != "container log" {
		t.Errorf("%+v, %+v", x.Barrier, x.Uncovered)
	}
	var out strings.Builder
	writeExplanation(x, &out)
	for _, want := range []string{"container app, hook httpGet", "hooks last 30s at most; the application then has 20s",
		"on n lameduck-node/a answers them, and is connected",
		"shop/web states a wait of 40s, which the bound cuts", "shop/db states a wait that cannot be read: nonsense"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

//go:build e2e

package nodes

import (
	"bytes"
	_ "embed"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
)

//go:embed app.yaml
var appSheet string

//go:embed gateway.yaml
var gatewaySheet string

// apps are the two ways of ending: at SIGTERM at once, and when what is in flight is done.
var apps = []string{"exit", "graceful"}

// work is what runs in a namespace: each of the apps behind a Service of its own.
type work struct {
	Namespace string
	// Kind is Deployment or StatefulSet.
	Kind     string
	Replicas int
	// Sleep is the seconds of a preStop hook. 0: none.
	Sleep int
	// NotOn is a node that pods keep away from. Empty: none.
	NotOn string
	// Closing is how long the graceful app asks clients to close. Empty: its default.
	Closing string
}

func (w work) with(kind string, replicas int) work {
	w.Kind, w.Replicas = kind, replicas
	return w
}

func render(t *testing.T, sheet string, values any) string {
	t.Helper()
	var out bytes.Buffer
	if err := template.Must(template.New("").Parse(sheet)).Execute(&out, values); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// deploy makes the apps as w says, and waits until they are.
func (l *lab) deploy(t *testing.T, w work) {
	t.Helper()
	var sheets []string
	for _, app := range apps {
		sheets = append(sheets, render(t, appSheet, struct {
			work
			App, Image string
		}{w, app, appImage}))
	}
	l.applyText(t, strings.Join(sheets, "---\n"))
	for _, app := range apps {
		other := l.Kube.AppsV1().StatefulSets(w.Namespace).Delete
		if w.Kind == "StatefulSet" {
			other = l.Kube.AppsV1().Deployments(w.Namespace).Delete
		}
		background := metav1.DeletePropagationBackground
		if err := other(t.Context(), app, metav1.DeleteOptions{PropagationPolicy: &background}); err != nil &&
			!apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	l.settled(t, w)
}

// settled waits until as many pods as there should be are ready, none else is left, and the nodes'
// rules had time to follow.
func (l *lab) settled(t *testing.T, w work) {
	t.Helper()
	l.Await(t, time.Minute, "the pods of "+w.Namespace, func() error {
		pods, err := l.Kube.CoreV1().Pods(w.Namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(pods.Items) != len(apps)*w.Replicas {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		for _, p := range pods.Items {
			if !harness.Ready(&p) || p.DeletionTimestamp != nil {
				return fmt.Errorf("pod %s is not ready", p.Name)
			}
		}
		return nil
	})
	time.Sleep(1500 * time.Millisecond) // of rules: kube-proxy writes once a second at most
}

// addGateway installs HAProxy and its agent, for the apps of the namespaces. The frontend of app j
// of namespace i listens on 8000 + 10i + j.
func (l *lab) addGateway(t *testing.T, namespaces []string) {
	t.Helper()
	type backend struct {
		Namespace, App string
		Port           int
	}
	var backends []backend
	for i, namespace := range namespaces {
		for j, app := range apps {
			backends = append(backends, backend{namespace, app, 8000 + 10*i + j})
		}
	}
	l.applyText(t, render(t, gatewaySheet, struct {
		Namespaces []string
		Backends   []backend
		Image      string
	}{namespaces, backends, haproxyImage}))
	l.kubectl(t, "rollout", "status", "-n", gateway, "deployment/gateway", "--timeout=60s")
}

// gatewayAddress is where HAProxy is.
func (l *lab) gatewayAddress(t *testing.T) string {
	t.Helper()
	pods, err := l.Kube.CoreV1().Pods(gateway).List(t.Context(), metav1.ListOptions{LabelSelector: "app=gateway"})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("pods of the gateway: %v, %v", pods, err)
	}
	return pods.Items[0].Status.PodIP
}

// traffic is how clients use connections.
type traffic string

const (
	perRequest traffic = "connection per request"
	keptAlive  traffic = "kept alive"
)

// ways are those on which clients reach an app.
var ways = []string{"ClusterIP", "NodePort", "HAProxy"}

// byHAProxy is the only one of ways whose gateway is directed.
const byHAProxy = "HAProxy"

// clients are all clients of one app.
type clients struct {
	loads []*load.Load
	// by is the way of each of loads.
	by []string
}

// mark begins a phase of what all clients send.
func (c *clients) mark(phase string) {
	for _, one := range c.loads {
		one.Mark(phase)
	}
}

// in sums up the requests on a way that were due in a phase. All have ended.
func (c *clients) in(way, phase string) counted {
	sum := counted{by: map[string]int{}, pods: map[string]int{}}
	for i, one := range c.loads {
		for _, p := range one.Stop().Phases {
			if c.by[i] == way && p.Name == phase {
				sum.add(p.Counts)
			}
		}
	}
	return sum
}

// startClients sends requests to an app through ClusterIP, NodePort and HAProxy at once.
func (l *lab) startClients(t *testing.T, namespace, app, haproxy string, how traffic) *clients {
	t.Helper()
	all := &clients{}
	for i, target := range l.targets(t, namespace, app, haproxy) {
		all.add(t, l, ways[i], how, 50, load.Options{Target: target})
	}
	return all
}

// targets are what clients of an app ask, on each of ways.
func (l *lab) targets(t *testing.T, namespace, app, haproxy string) []string {
	t.Helper()
	service, err := l.Kube.CoreV1().Services(namespace).Get(t.Context(), app, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return []string{
		fmt.Sprintf("http://%s:80/", service.Spec.ClusterIP),
		fmt.Sprintf("http://%s:%d/", l.Set.Machines[1].Address, service.Spec.Ports[0].NodePort),
		haproxy,
	}
}

// patience is how long clients wait for an answer. All nodes share one machine, which may stall for
// some seconds; what is sent to a pod that has gone gets no answer for longer.
const patience = 15 * time.Second

// add starts the clients of one way, which send at a rate all together.
func (c *clients) add(t *testing.T, l *lab, way string, how traffic, rate float64, o load.Options) {
	t.Helper()
	// Clients that keep connections are several, or they would keep one or two and meet one pod.
	many := 1
	if how == keptAlive {
		many = 6
	}
	o.Rate, o.Timeout, o.KeepAlive, o.DropClosed = rate/float64(many), patience, how == keptAlive, true
	o.WantBody = []byte("ok\n")
	for range many {
		source := len(c.loads) % len(l.Sources)
		o.SourceAddrs = slices.Concat(l.Sources[source:], l.Sources[:source])
		one, err := load.Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { one.Stop() })
		c.loads, c.by = append(c.loads, one), append(c.by, way)
	}
}

// counted is what became of the requests of an app's clients.
type counted struct {
	requests, failed, skipped, connections int
	by, pods                               map[string]int
	first                                  []load.Failure
}

func (c *counted) add(one load.Counts) {
	c.requests += one.Total
	c.failed += one.Failed
	c.skipped += one.Skipped
	for kind, n := range one.FailedBy {
		c.by[kind] += n
	}
	for pod, n := range one.Pods {
		c.pods[pod] += n
	}
}

func (c *clients) stop() counted {
	sum := counted{by: map[string]int{}, pods: map[string]int{}}
	for _, one := range c.loads {
		r := one.Stop()
		sum.add(r.Counts)
		sum.connections += r.Connections
		sum.first = append(sum.first, r.Failures...)
	}
	return sum
}

// String says how requests failed.
func (c counted) String() string {
	text := fmt.Sprintf("%d of %d failed", c.failed, c.requests)
	for _, kind := range slices.Sorted(maps.Keys(c.by)) {
		text += fmt.Sprintf(", %s %d", kind, c.by[kind])
	}
	return text
}

// unlisted waits until no EndpointSlice lists any of these addresses as ready.
func (l *lab) unlisted(t *testing.T, namespace string, addresses ...string) {
	t.Helper()
	l.Await(t, time.Minute, fmt.Sprintf("slices without %v", addresses), func() error {
		lists, err := l.Kube.DiscoveryV1().EndpointSlices(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range lists.Items {
			for _, e := range s.Endpoints {
				if slices.ContainsFunc(e.Addresses, func(a string) bool { return slices.Contains(addresses, a) }) &&
					e.Conditions.Ready != nil && *e.Conditions.Ready {
					return fmt.Errorf("%v is listed as ready", e.Addresses)
				}
			}
		}
		return nil
	})
}

// pods are those of a namespace by app that keep says, without those that are going already.
func (l *lab) pods(t *testing.T, namespace string, keep func(*corev1.Pod) bool) map[string][]types.UID {
	t.Helper()
	list, err := l.Kube.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]types.UID{}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil && keep(&p) {
			all[p.Labels["app"]] = append(all[p.Labels["app"]], p.UID)
		}
	}
	return all
}

// age waits until every pod has been ready for as long as kernels are given to hear of it. Younger
// ones may wait for the rest of that time (decision 24), as the pods of a test do that makes them a
// moment before, and hardly any others.
func (l *lab) age(t *testing.T, namespace string) {
	t.Helper()
	list, err := l.Kube.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var youngest time.Time
	for _, p := range list.Items {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.LastTransitionTime.After(youngest) {
				youngest = c.LastTransitionTime.Time
			}
		}
	}
	time.Sleep(time.Until(youngest.Add(endpoints.Linger + time.Second))) // conditions have whole seconds
}

// gone waits until at most left of the pods of each app are there any more, and returns when that
// was.
func (l *lab) gone(t *testing.T, namespace string, old map[string][]types.UID, left int,
	limit time.Duration) (map[string]time.Time, error) {
	t.Helper()
	when := map[string]time.Time{}
	for end := time.Now().Add(limit); ; time.Sleep(30 * time.Millisecond) {
		list, err := l.Kube.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return when, err
		}
		there := map[types.UID]bool{}
		for _, p := range list.Items {
			there[p.UID] = true
		}
		for app, uids := range old {
			n := 0
			for _, uid := range uids {
				if there[uid] {
					n++
				}
			}
			if _, already := when[app]; n <= left && !already {
				when[app] = time.Now()
			}
		}
		if len(when) == len(old) {
			return when, nil
		}
		if time.Now().After(end) {
			return when, errors.New("pods are still there after " + limit.String())
		}
	}
}

var asks = &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func get(url string) (string, error) {
	response, err := asks.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, response.Status)
	}
	return string(text), err
}

// inMaintenance returns the UIDs of the pods that HAProxy, at an address, does not send to.
func inMaintenance(gateway string) (map[string]bool, error) {
	text, err := get("http://" + gateway + ":8404/;csv")
	if err != nil {
		return nil, err
	}
	rows, err := csv.NewReader(strings.NewReader(strings.TrimPrefix(text, "# "))).ReadAll()
	if err != nil || len(rows) == 0 {
		return nil, fmt.Errorf("statistics of HAProxy: %w", err)
	}
	out, status := map[string]bool{}, slices.Index(rows[0], "status")
	for _, row := range rows[1:] {
		// ld-UID-IP-PORT, and a UID has 36 characters.
		if uid, ok := strings.CutPrefix(row[1], "ld-"); ok && len(uid) > 36 && strings.HasPrefix(row[status], "MAINT") {
			out[uid[:36]] = true
		}
	}
	return out, nil
}

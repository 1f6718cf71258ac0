//go:build e2e

package nodes

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// edge is the namespace of Envoy and Traefik, and each has its folder here.
const edge = "edge"

// observed is a gateway that stops routing by itself, with the agents of the manifests beside it.
type observed struct {
	// name is that of its folder, its Deployment and its class, and its pods' label app.
	name      string
	namespace string
	port      int // of its routers
	replicas  int
	// install is what comes before its folder.
	install func(*testing.T)
	// route is a template of what makes it route the host APP.NAMESPACE to an app, of kind.
	route, kind string
	// owner is the object by which it is removed.
	owner string
}

// gatewayRate is how many requests each app gets in a second.
const gatewayRate = 100.0

// stopped is the bound of the barrier while these gateways are there: for as long, a gateway that
// is stopped is waited for. It is longer than young pods wait.
const stopped = 15 * time.Second

// testGateways measures rolling updates behind Envoy and Traefik. Their upstream pools are at their
// defaults. They do not retry: clients send POST, which Traefik's transport does not repeat either.
func (l *lab) testGateways(t *testing.T, rows *[]row) {
	envoy, traefik := gatewaytest.LookPath(t, "envoy"), gatewaytest.LookPath(t, "traefik")
	contour, err := filepath.EvalSymlinks(gatewaytest.LookPath(t, "contour"))
	if err != nil {
		t.Fatal(err)
	}
	libraries, err := machine.Libraries(t.Context(), envoy)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Set.Load(t.Context(),
		machine.Image{Name: "lameduck.test/envoy:1", Program: envoy, Libraries: libraries},
		machine.Image{Name: "lameduck.test/contour:1", Program: contour},
		machine.Image{Name: "lameduck.test/traefik:1", Program: traefik},
	); err != nil {
		t.Fatal(err)
	}
	shipped := func(t *testing.T) {
		for _, name := range []string{"00-common", "01-crds", "02-rbac", "02-role-contour"} {
			l.kubectl(t, "apply", "-f", filepath.Join(filepath.Dir(contour), name+".yaml"))
		}
	}
	l.namespace(t, edge, map[string]string{"lameduck.io/mode": "off"})
	all := []observed{
		{"envoy", edge, 8080, 1, shipped, ingress, "ingress", "deployment/envoy"},
		{"traefik", edge, 8000, 2, nil, ingress, "ingress", "deployment/traefik"},
	}
	// Envoy Gateway is too long for CI. ONLY='Envoy Gateway' measures rolling updates behind it.
	if only := os.Getenv("ONLY"); only == "" || only == "Envoy Gateway" {
		all = append(all, l.envoyGateway(t))
	}
	var declared []object
	for _, g := range all {
		kind := g.name
		if g.kind == httpRoute {
			kind = "envoy"
		}
		declared = append(declared, object{"name": g.name, "kind": kind, "namespace": g.namespace,
			"selector": "app=" + g.name, "classes": []string{g.name}})
	}
	l.configure(t, object{"barrier": object{"bound": stopped.String()}}, declared...)
	for _, m := range modes() {
		l.deploy(t, m.work.with("Deployment", 0)) // Envoy listens once there are Services
	}
	before := len(*rows)
	for _, g := range all {
		t.Run(g.name, func(t *testing.T) { l.testGateway(t, g, rows) })
	}
	l.configure(t, nil)
	table(t, (*rows)[before:])
	promises(t, (*rows)[before:])
}

// ingress makes the gateway of a class route the host APP.NAMESPACE to an app.
const ingress = `---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: %[1]s-%[3]s, namespace: %[2]s, labels: {class: %[1]s}}
spec:
  ingressClassName: %[1]s
  rules:
    - host: %[3]s.%[2]s
      http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: %[3]s, port: {name: http}}}}]}
`

// testGateway installs a gateway, measures behind it in each mode, and stops one of its processes.
func (l *lab) testGateway(t *testing.T, g observed, rows *[]row) {
	all := modes()
	for i := range all {
		// The app closes its listener at SIGTERM, as most do. One that accepts for longer than
		// Contour and Envoy take loses nothing unprotected, and its row would show nothing.
		all[i].work.Closing = "0s"
	}
	if g.install != nil {
		g.install(t)
	}
	var routes strings.Builder
	for _, m := range all {
		for _, app := range apps {
			fmt.Fprintf(&routes, g.route, g.name, m.work.Namespace, app)
		}
	}
	l.applyText(t, routes.String())
	objects, err := stage.Objects(t.Context(), l.Cluster, "../test/e2e/nodes/"+g.name)
	if err != nil {
		t.Fatal(err)
	}
	l.apply(t, objects...)
	// The other gateway, and the tests after this one, are not to wait for this one.
	defer func() {
		l.kubectl(t, "delete", g.kind, "-A", "-l", "class="+g.name)
		l.kubectl(t, "delete", "-n", g.namespace, g.owner, "--cascade=foreground", "--timeout=60s")
		l.kubectl(t, "wait", "--for=delete", "pod", "-n", g.namespace, "-l", "app="+g.name, "--timeout=110s")
	}()
	l.Await(t, time.Minute, "Deployment "+g.name, func() error {
		_, err := l.Kube.AppsV1().Deployments(g.namespace).Get(t.Context(), g.name, metav1.GetOptions{})
		if err != nil {
			of, _ := l.Kubectl(t.Context(), "get", "-n", g.namespace, g.owner, "-o", "jsonpath={.status.conditions}")
			err = fmt.Errorf("%w; %s: %s", err, g.owner, of)
		}
		return err
	})
	l.kubectl(t, "rollout", "status", "-n", g.namespace, "deployment/"+g.name, "--timeout=60s")
	pods, err := l.Kube.CoreV1().Pods(g.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + g.name})
	if err != nil || len(pods.Items) != g.replicas {
		t.Fatalf("pods of %s: %v, %v", g.name, pods, err)
	}
	via := route{gateway: g.name, gate: atBarrier,
		start: func(t *testing.T, namespace, app string, how traffic) *clients {
			c := &clients{}
			for _, p := range pods.Items {
				c.add(t, l, g.name, how, gatewayRate/float64(len(pods.Items)), load.Options{
					Target: fmt.Sprintf("http://%s:%d/", p.Status.PodIP, g.port), Method: http.MethodPost,
					Headers: http.Header{"Host": {app + "." + namespace}},
				})
			}
			return c
		},
	}
	runs, _ := strconv.Atoi(os.Getenv("RUNS"))
	for range max(runs, 1) {
		for _, m := range all {
			if !m.wanted() {
				continue
			}
			for _, s := range scenarios() {
				if s.name != rollingUpdate && os.Getenv("ONLY") != "" {
					continue // with ONLY= all
				}
				for _, how := range []traffic{perRequest, keptAlive} {
					began := time.Now()
					*rows = append(*rows, l.measure(t, s, m, how, via)...)
					if m.name == lameduck {
						l.acknowledged(t, began, m.work.Namespace)
					}
				}
			}
			if m.name == lameduck {
				l.stopGateway(t, m.work, pods.Items[len(pods.Items)-1])
			}
			l.deploy(t, m.work.with("Deployment", 0))
		}
	}
}

// acknowledged checks that every barrier of a namespace ended because all agents acknowledged.
func (l *lab) acknowledged(t *testing.T, since time.Time, namespace string) {
	t.Helper()
	all, err := l.passed(t, since, namespace+"/")
	if err != nil || len(all) == 0 {
		t.Fatalf("coordinators write nothing of barriers: %v", err)
	}
	var took []float64
	for _, one := range all {
		if one.Time.Before(since) {
			continue
		}
		if took = append(took, one.Since); one.Reason != "Acknowledged" {
			t.Errorf("the barrier of pod %s ended with %+v", one.Pod, one)
		}
	}
	slices.Sort(took)
	t.Logf("barriers took %.1f s", took)
}

// stopGateway stops a replica of a gateway with SIGSTOP. It may do what it was told last once it
// continues, so a pod waits for it until the bound, and the coordinator names it. The apps run.
func (l *lab) stopGateway(t *testing.T, w work, replica corev1.Pod) {
	t.Helper()
	node := l.Set.Machines[slices.IndexFunc(l.Set.Machines, func(m *machine.Machine) bool {
		return m.Name == replica.Spec.NodeName
	})]
	program := replica.Spec.Containers[0].Name
	send := func(s syscall.Signal) {
		if n, err := signal(t.Context(), node, "^([^ ]*/)?"+program+" ", s); err != nil || n != 1 {
			t.Fatalf("signal %s reached %d processes of %s: %v", s, n, program, err)
		}
	}
	send(syscall.SIGSTOP)
	began := time.Now()
	list, err := l.Kube.CoreV1().Pods(w.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=exit"})
	if err != nil {
		t.Fatal(err)
	}
	name := list.Items[0].Name
	took := l.remove(t, w.Namespace, name, 2*stopped)
	send(syscall.SIGCONT)
	all, err := l.passed(t, began, w.Namespace+"/"+name)
	if err != nil || len(all) != 1 {
		t.Fatalf("what coordinators write of %s: %v, %v", name, all, err)
	}
	t.Logf("with %s stopped, pod %s was gone after %.1f s: %+v", replica.Name, name, took.Seconds(), all[0])
	if all[0].Reason != "Deadline" || all[0].Since < stopped.Seconds()-1 || all[0].Since > stopped.Seconds()+5 ||
		len(all[0].Waiting) != 1 || !strings.Contains(all[0].Waiting[0], replica.Name) {
		t.Errorf("with %s stopped, the barrier of pod %s ended with %+v, want a wait of %s for it", replica.Name, name,
			all[0], stopped)
	}
}

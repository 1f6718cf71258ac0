package node_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/node"
)

func TestMain(m *testing.M) {
	if os.Getenv("TEST_APP") != "" {
		if err := app(os.Args[1:]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	// Most of a test is waiting. Set before the command line is read, which may say otherwise.
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	cluster.Main(m)
}

// app is what pods run: a server on ADDRESS. Its arguments make it behave: "deaf" ignores SIGTERM,
// "sick" fails /live after a request to /sicken, "late" serves after a second, "true" exits at
// once.
func app(args []string) error {
	is := map[string]bool{}
	for _, arg := range args {
		is[arg] = true
	}
	if is["true"] {
		return nil
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var mu sync.Mutex
	sick := false
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/sicken", func(http.ResponseWriter, *http.Request) { mu.Lock(); defer mu.Unlock(); sick = true })
	mux.HandleFunc("/live", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if sick {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	mux.HandleFunc("/stop", func(http.ResponseWriter, *http.Request) {
		time.Sleep(700 * time.Millisecond) // imitates work
	})
	if is["late"] {
		time.Sleep(time.Second) // imitates a slow start
	}
	listener, err := net.Listen("tcp", os.Getenv("ADDRESS"))
	if err != nil {
		return err
	}
	go http.Serve(listener, mux)
	fmt.Println("serving", os.Getenv("ADDRESS"))
	for {
		<-ctx.Done()
		if !is["deaf"] {
			return nil
		}
		stop()
		select {}
	}
}

var nodes struct {
	once sync.Once
	err  error
	node *node.Node
}

// setup returns the shared cluster, with one node, and a namespace for the test.
func setup(t *testing.T) (context.Context, *cluster.Cluster, kubernetes.Interface, *node.Node, string) {
	t.Helper()
	c := cluster.Shared(t)
	nodes.once.Do(func() {
		nodes.node, nodes.err = node.New(c.Config(), node.Options{
			Name: "node-1", PodRange: netip.MustParsePrefix("10.244.1.0/24"), Backoff: 200 * time.Millisecond,
		})
		if nodes.err != nil {
			return
		}
		done := make(chan error, 1)
		go func() { done <- nodes.node.Run(context.Background()) }() // until the end of the program
		select {
		case <-nodes.node.Ready():
		case nodes.err = <-done:
		}
	})
	if nodes.err != nil {
		t.Fatal(nodes.err)
	}
	ctx, client, namespace := newNamespace(t, c)
	return ctx, c, client, nodes.node, namespace
}

// newNamespace makes a namespace for the test, in which pods can be created.
func newNamespace(t *testing.T, c *cluster.Cluster) (context.Context, kubernetes.Interface, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	namespace, err := client.CoreV1().Namespaces().Create(ctx,
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	accounts, err := client.CoreV1().ServiceAccounts(namespace.Name).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer accounts.Stop()
	for event := range accounts.ResultChan() {
		if event.Type == watch.Added {
			break
		}
	}
	return ctx, client, namespace.Name
}

// spec is a pod that runs the app on port 80 of its address.
func spec(args ...string) v1.PodSpec {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return v1.PodSpec{
		Containers: []v1.Container{{
			Name: "app", Image: "none", Command: []string{self}, Args: args,
			Env: []v1.EnvVar{
				{Name: "TEST_APP", Value: "1"},
				{Name: "GORACE", Value: "atexit_sleep_ms=0"},
				{Name: "IP", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
				{Name: "ADDRESS", Value: "$(IP):80"},
			},
			Ports:          []v1.ContainerPort{{Name: "http", ContainerPort: 80}},
			ReadinessProbe: httpProbe("/ready"),
		}},
	}
}

func httpProbe(path string) *v1.Probe {
	return &v1.Probe{PeriodSeconds: 1, FailureThreshold: 1, ProbeHandler: v1.ProbeHandler{
		HTTPGet: &v1.HTTPGetAction{Path: path, Port: intstr.FromString("http")},
	}}
}

func grace(s v1.PodSpec, seconds int64) v1.PodSpec {
	s.TerminationGracePeriodSeconds = &seconds
	return s
}

func preStop(s v1.PodSpec, hook v1.LifecycleHandler) v1.PodSpec {
	s.Containers[0].Lifecycle = &v1.Lifecycle{PreStop: &hook}
	return s
}

// create creates a pod and waits until it is ready.
func create(t *testing.T, ctx context.Context, client kubernetes.Interface, n *node.Node, namespace string,
	s v1.PodSpec) *v1.Pod {
	t.Helper()
	pod, err := client.CoreV1().Pods(namespace).Create(ctx,
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "pod-"}, Spec: s}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, n, pod.UID, node.Ready)
	return pod
}

// wait waits for something to happen to a pod, and tells its timeline if it does not.
func wait(t *testing.T, ctx context.Context, n *node.Node, uid types.UID, kind node.Kind) node.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	event, err := n.Wait(ctx, uid, kind)
	if err != nil {
		t.Errorf("%v\n%v\n%s", err, n.Timeline(uid), n.Log(uid, "app"))
		t.FailNow()
	}
	return event
}

// between checks how long something took. A busy machine may be late, but never early.
func between(t *testing.T, what string, from, to node.Event, least, most time.Duration) {
	t.Helper()
	most += 8 * time.Second
	if took := to.Time.Sub(from.Time); took < least || took > most {
		t.Errorf("%s: %s, want %s to %s\n%v\n%v", what, took, least, most, from, to)
	}
}

// ended waits until the pod is gone and returns what happened at its end.
func ended(t *testing.T, ctx context.Context, n *node.Node, uid types.UID) map[node.Kind]node.Event {
	t.Helper()
	wait(t, ctx, n, uid, node.Removed)
	events := map[node.Kind]node.Event{}
	for _, e := range n.Timeline(uid) {
		events[e.Kind] = e
	}
	return events
}

func TestTermination(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		spec  v1.PodSpec
		check func(t *testing.T, e map[node.Kind]node.Event)
	}{
		{"without a hook, SIGTERM at once", spec(), func(t *testing.T, e map[node.Kind]node.Event) {
			between(t, "SIGTERM after deletion", e[node.Deleted], e[node.Term], 0, 300*time.Millisecond)
			between(t, "exit after SIGTERM", e[node.Term], e[node.Exited], 0, 500*time.Millisecond)
			between(t, "last delete after exit", e[node.Exited], e[node.Removed], 0, 500*time.Millisecond)
			if e[node.Exited].Code != 0 {
				t.Error("exit code", e[node.Exited].Code)
			}
		}},
		{"sleep", preStop(spec(), v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 1}}),
			func(t *testing.T, e map[node.Kind]node.Event) {
				between(t, "hook", e[node.PreStopBegins], e[node.PreStopEnds], time.Second, 1300*time.Millisecond)
				between(t, "SIGTERM after hook", e[node.PreStopEnds], e[node.Term], -50*time.Millisecond,
					300*time.Millisecond)
			}},
		{"exec", preStop(spec(), v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"sh", "-c",
			"sleep 0.5; echo hook of $IP"}}}), func(t *testing.T, e map[node.Kind]node.Event) {
			between(t, "hook", e[node.PreStopBegins], e[node.PreStopEnds], 500*time.Millisecond, 900*time.Millisecond)
		}},
		{"httpGet", preStop(spec(), v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Path: "/stop",
			Port: intstr.FromInt32(80)}}), func(t *testing.T, e map[node.Kind]node.Event) {
			between(t, "hook", e[node.PreStopBegins], e[node.PreStopEnds], 700*time.Millisecond, 1100*time.Millisecond)
		}},
		{"failing httpGet", preStop(spec(), v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Path: "/",
			Port: intstr.FromInt32(81)}}), func(t *testing.T, e map[node.Kind]node.Event) {
			if e[node.PreStopEnds].Detail == "" {
				t.Error("no error")
			}
			between(t, "SIGTERM after deletion", e[node.Deleted], e[node.Term], 0, 300*time.Millisecond)
		}},
		{"deaf", grace(spec("deaf"), 2), func(t *testing.T, e map[node.Kind]node.Event) {
			between(t, "SIGKILL after SIGTERM", e[node.Term], e[node.Kill], 2*time.Second, 2300*time.Millisecond)
			if e[node.Exited].Code != 137 {
				t.Error("exit code", e[node.Exited].Code)
			}
		}},
		{"hook uses up the grace", grace(preStop(spec("deaf"), v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 1}}),
			1), func(t *testing.T, e map[node.Kind]node.Event) {
			between(t, "SIGTERM after deletion", e[node.Deleted], e[node.Term], time.Second, 1300*time.Millisecond)
			between(t, "SIGKILL after SIGTERM", e[node.Term], e[node.Kill], 2*time.Second, 2300*time.Millisecond)
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx, _, client, n, namespace := setup(t)
			pod := create(t, ctx, client, n, namespace, test.spec)
			if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			test.check(t, ended(t, ctx, n, pod.UID))
			wait(t, ctx, n, pod.UID, node.Vanished)
		})
	}
}

// A Deployment of three becomes ready through its EndpointSlice, a rollout replaces all, and no
// address is given twice.
func TestRollout(t *testing.T) {
	t.Parallel()
	ctx, c, client, n, namespace := setup(t)
	labels := map[string]string{"app": "web"}
	three := int32(3)
	_, err := client.CoreV1().Services(namespace).Create(ctx, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       v1.ServiceSpec{Selector: labels, Ports: []v1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.AppsV1().Deployments(namespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &three, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec()},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	old := readyEndpoints(t, ctx, client, namespace, 3, nil)
	for address := range old {
		response, err := http.Get("http://" + address + "/ready")
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
	}
	if out, err := c.Kubectl(ctx, "-n", namespace, "rollout", "restart", "deployment/web"); err != nil {
		t.Fatal(out, err)
	}
	if out, err := c.Kubectl(ctx, "-n", namespace, "rollout", "status", "deployment/web", "--timeout=30s"); err != nil {
		t.Fatal(out, err)
	}
	readyEndpoints(t, ctx, client, namespace, 3, old)
	_ = n
}

// readyEndpoints watches until the EndpointSlices list so many ready endpoints, none of them in
// not, and returns their addresses.
func readyEndpoints(t *testing.T, ctx context.Context, client kubernetes.Interface, namespace string, want int,
	not map[string]bool) map[string]bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	watcher, err := client.DiscoveryV1().EndpointSlices(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()
	var ready map[string]bool
	for event := range watcher.ResultChan() {
		slice, ok := event.Object.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		ready = map[string]bool{}
		again := false
		for _, endpoint := range slice.Endpoints {
			if endpoint.Conditions.Ready != nil && *endpoint.Conditions.Ready {
				ready[endpoint.Addresses[0]] = true
				again = again || not[endpoint.Addresses[0]]
			}
		}
		if len(ready) == want && !again {
			return ready
		}
	}
	t.Fatalf("ready endpoints: %v, want %d without %v", ready, want, not)
	return nil
}

func TestForceDelete(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	pod := create(t, ctx, client, n, namespace,
		preStop(spec("deaf"), v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 20}}))
	zero := int64(0)
	if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name,
		metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	deleted := time.Now()
	exited := wait(t, ctx, n, pod.UID, node.Exited)
	if took := exited.Time.Sub(deleted); took > 4*time.Second || exited.Code != 137 {
		t.Errorf("%s, exit code %d", took, exited.Code)
	}
	wait(t, ctx, n, pod.UID, node.Vanished)
	for _, e := range n.Timeline(pod.UID) {
		if e.Kind == node.Removed || e.Kind == node.PreStopBegins || e.Kind == node.Term {
			t.Error(e)
		}
	}
}

// A second delete with a shorter grace period cuts the hook and the grace short; a longer one
// changes nothing.
func TestShortenedGrace(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	pod := create(t, ctx, client, n, namespace,
		preStop(spec("deaf"), v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 20}}))
	pods := client.CoreV1().Pods(namespace)
	if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, n, pod.UID, node.PreStopBegins)
	for _, seconds := range []int64{25, 1} {
		if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &seconds}); err != nil {
			t.Fatal(err)
		}
	}
	e := ended(t, ctx, n, pod.UID)
	between(t, "SIGTERM", e[node.Deleted], e[node.Term], time.Second, 2*time.Second)
	between(t, "SIGKILL", e[node.Term], e[node.Kill], 2*time.Second, 2500*time.Millisecond)
}

func TestLivenessRestart(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	s := grace(preStop(spec(), v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"true"}}}), 5)
	s.Containers[0].LivenessProbe = httpProbe("/live")
	s.Containers[0].LivenessProbe.InitialDelaySeconds = 3 // its program may take some to listen
	pod := create(t, ctx, client, n, namespace, s)
	pod, err := client.CoreV1().Pods(namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Get("http://" + pod.Status.PodIP + "/sicken")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	wait(t, ctx, n, pod.UID, node.NotReady)
	again := waitPod(t, ctx, client, pod, "ready again", func(p *v1.Pod) bool {
		status := p.Status.ContainerStatuses[0]
		return status.RestartCount == 1 && status.Ready
	})
	if again.Status.PodIP != pod.Status.PodIP ||
		again.Status.ContainerStatuses[0].LastTerminationState.Terminated == nil {
		t.Errorf("got %+v", again.Status)
	}
	var kinds []node.Kind
	for _, e := range n.Timeline(pod.UID) {
		if e.Container != "" {
			kinds = append(kinds, e.Kind)
		}
	}
	want := fmt.Sprint([]node.Kind{node.Started, node.Unhealthy, node.PreStopBegins, node.PreStopEnds, node.Term,
		node.Exited, node.Started})
	if fmt.Sprint(kinds) != want {
		t.Errorf("got %v, want %v", kinds, want)
	}
}

// waitPod watches a pod until it is as wanted.
func waitPod(t *testing.T, ctx context.Context, client kubernetes.Interface, pod *v1.Pod, what string,
	is func(*v1.Pod) bool) *v1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	pods, err := client.CoreV1().Pods(pod.Namespace).Watch(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=" + pod.Name})
	if err != nil {
		t.Fatal(err)
	}
	defer pods.Stop()
	var last *v1.Pod
	for event := range pods.ResultChan() {
		if p, ok := event.Object.(*v1.Pod); ok {
			if last = p; len(p.Status.ContainerStatuses) > 0 && is(p) {
				return p
			}
		}
	}
	t.Fatalf("not %s: %+v", what, last.Status)
	return nil
}

// The first restart is immediate, the next wait.
func TestBackOff(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	s := spec("true")
	s.Containers[0].ReadinessProbe = nil
	pod, err := client.CoreV1().Pods(namespace).Create(ctx,
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "crash"}, Spec: s}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	waitPod(t, ctx, client, pod, "backing off", func(p *v1.Pod) bool {
		waiting := p.Status.ContainerStatuses[0].State.Waiting
		return p.Status.ContainerStatuses[0].RestartCount >= 2 && waiting != nil && waiting.Reason == "CrashLoopBackOff"
	})
	var starts []node.Event
	for _, e := range n.Timeline(pod.UID) {
		if e.Kind == node.Started {
			starts = append(starts, e)
		}
	}
	between(t, "third start after second", starts[1], starts[2], 200*time.Millisecond, 900*time.Millisecond)
	if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, n, pod.UID, node.Removed)
}

// Init containers run in order; a native sidecar runs beside the others and stops after them; a pod
// whose containers have finished takes its sidecar along and has a phase.
func TestInitAndSidecars(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	always := v1.ContainerRestartPolicyAlways
	shell := func(name, script string) v1.Container {
		return v1.Container{Name: name, Image: "none", Command: []string{"sh", "-c", script}}
	}
	side := shell("side", "trap 'echo side >> $(VOLUME_SHARED)/log; exit 0' TERM; echo up >> $(VOLUME_SHARED)/log; "+
		"while :; do sleep 0.05; done")
	side.RestartPolicy = &always
	side.StartupProbe = &v1.Probe{PeriodSeconds: 1,
		ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"sh", "-c",
			"test -s $VOLUME_SHARED/log"}}}}
	s := v1.PodSpec{
		RestartPolicy: v1.RestartPolicyNever,
		Volumes: []v1.Volume{{Name: "shared",
			VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}},
		InitContainers: []v1.Container{shell("first", "test ! -e $(VOLUME_SHARED)/log"), side,
			shell("second", "echo second >> $VOLUME_SHARED/log")},
		Containers: []v1.Container{shell("app", "echo app >> $VOLUME_SHARED/log; cat $VOLUME_SHARED/log; touch "+
			"$VOLUME_SHARED/done"),
			shell("slow", "until test -e $VOLUME_SHARED/done; do sleep 0.05; done; sleep 0.5; echo slow >> "+
				"$VOLUME_SHARED/log")},
	}
	pod, err := client.CoreV1().Pods(namespace).Create(ctx,
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "ordered"}, Spec: s}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	waitPod(t, ctx, client, pod, "succeeded", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodSucceeded })
	if log := n.Log(pod.UID, "app"); log != "up\nsecond\napp\n" {
		t.Errorf("log %q", log)
	}
	var order string
	for _, e := range n.Timeline(pod.UID) {
		if e.Kind == node.Exited {
			order += e.Container + " "
		}
	}
	if order != "first second app slow side " {
		t.Errorf("exits: %s", order)
	}
	if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, n, pod.UID, node.Vanished) // the API server needs no node for what has ended
}

// A pod finds its configuration, sees it change, and is its ServiceAccount to the API server.
func TestVolumesAndIdentity(t *testing.T) {
	t.Parallel()
	ctx, c, client, n, namespace := setup(t)
	config := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "config"},
		Data: map[string]string{"key": "one", "name": "value"}}
	expiry := int64(600)
	s := v1.PodSpec{
		Volumes: []v1.Volume{
			{Name: "my-config", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
				LocalObjectReference: v1.LocalObjectReference{Name: "config"},
				Items:                []v1.KeyToPath{{Key: "key", Path: "sub/file"}},
			}}},
			{Name: "all",
				VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
					{ServiceAccountToken: &v1.ServiceAccountTokenProjection{Audience: "lameduck",
						ExpirationSeconds: &expiry, Path: "token"}},
					{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{Path: "labels",
						FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}},
				}}}},
		},
		Containers: []v1.Container{{
			Name: "app", Image: "none", Command: []string{"sh", "-c"},
			Args: []string{`echo '$(NAME) $$(NAME) $(NONE)' $FROM; cat $(VOLUME_ALL)/labels; echo; ` +
				`test $(wc -c < $VOLUME_ALL/token) -gt 100 && ` +
				`$KUBECTL auth whoami -o jsonpath='{.status.userInfo.username}'; echo; ` +
				`cat $VOLUME_MY_CONFIG/sub/file; echo; ` +
				`until grep -q two $VOLUME_MY_CONFIG/sub/file; do sleep 0.05; done; echo changed; exec sleep 100`},
			EnvFrom: []v1.EnvFromSource{{Prefix: "P_",
				ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "config"}}}},
			Env: []v1.EnvVar{
				{Name: "KUBECTL", Value: c.Binaries().Path("kubectl")},
				{Name: "NAME",
					ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
				{Name: "FROM", Value: "$(P_name)"},
			},
		}},
	}
	pod, err := client.CoreV1().Pods(namespace).Create(ctx, &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "configured", Labels: map[string]string{"a": "b"}}, Spec: s,
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, config, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitPod(t, ctx, client, pod, "running", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodRunning })
	waitLog(t, ctx, n, pod.UID, "\none\n")
	config.Data["key"] = "two"
	if _, err := client.CoreV1().ConfigMaps(namespace).Update(ctx, config, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	log := waitLog(t, ctx, n, pod.UID, "changed")
	want := "configured $(NAME) $(NONE) value\na=\"b\"\nsystem:serviceaccount:" + namespace + ":default\none\nchanged\n"
	if log != want {
		t.Errorf("log %q, want %q", log, want)
	}
}

// waitLog polls the log of the container app, a file, for a text.
func waitLog(t *testing.T, ctx context.Context, n *node.Node, uid types.UID, text string) string {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if log := n.Log(uid, "app"); strings.Contains(log, text) {
			return log
		}
	}
	t.Fatalf("no %q in %q, %v", text, n.Log(uid, "app"), n.Timeline(uid))
	return ""
}

// A webhook at a pod address sees the deletes: the person's first, then the node's last, with the
// UID as precondition.
func TestLastDelete(t *testing.T) {
	t.Parallel()
	ctx, _, client, n, namespace := setup(t)
	reviews := make(chan *admissionv1.AdmissionRequest, 16)
	ca, err := cluster.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := ca.IssueFiles(dir, "10.244.200.1"); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "10.244.200.1:443")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		reviews <- review.Request
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		review.Request = nil
		json.NewEncoder(w).Encode(review)
	})}
	var serving sync.WaitGroup
	serving.Go(func() { server.ServeTLS(listener, filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")) })
	defer serving.Wait()
	defer server.Close()

	url, fail, none := "https://10.244.200.1/", admissionregistrationv1.Fail,
		admissionregistrationv1.SideEffectClassNone
	hook := &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: namespace},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "pods.lameduck.test", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none,
			FailurePolicy: &fail,
			ClientConfig:  admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: ca.PEM()},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Delete},
				Rule: admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
					Resources: []string{"pods"}},
			}},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelMetadataName: namespace}},
		}},
	}
	if _, err := client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(ctx, hook,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	defer client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(context.Background(), namespace,
		metav1.DeleteOptions{})
	pod := create(t, ctx, client, n, namespace, spec())
	// The API server reads the configuration from a watch of its own. Dry runs show when it has.
	for seen := false; !seen; {
		if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name,
			metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-reviews:
			seen = true
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, n, pod.UID, node.Removed)
	if first := <-reviews; first.UserInfo.Username != "admin" {
		t.Errorf("first delete by %s", first.UserInfo.Username)
	}
	last := <-reviews
	var options metav1.DeleteOptions
	if err := json.Unmarshal(last.Options.Raw, &options); err != nil {
		t.Fatal(err)
	}
	if last.UserInfo.Username != "system:node:node-1" || !slices.Contains(last.UserInfo.Groups, "system:nodes") ||
		options.GracePeriodSeconds == nil || *options.GracePeriodSeconds != 0 ||
		options.Preconditions == nil || options.Preconditions.UID == nil || *options.Preconditions.UID != pod.UID {
		t.Errorf("last delete by %v with %s", last.UserInfo, last.Options.Raw)
	}
}

// When a node ends its processes are gone, and so are its goroutines. Run again it takes its pods
// over.
//
// Not parallel, so that no other node has goroutines, unless -count repeats the tests.
func TestNodeRestart(t *testing.T) {
	c := cluster.Shared(t)
	ctx, client, namespace := newNamespace(t, c)
	start := func() (*node.Node, func()) {
		n, err := node.New(c.Config(), node.Options{Name: "node-2", PodRange: netip.MustParsePrefix("10.244.2.0/24"),
			Taints: []v1.Taint{{Key: "test", Effect: v1.TaintEffectNoSchedule}},
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		select {
		case <-n.Ready():
		case err := <-done:
			t.Fatal(err)
		}
		return n, func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if nodes.node != nil {
				return
			}
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			for stack := range strings.SplitSeq(string(stacks), "\n\n") {
				if strings.Contains(stack, "test/cluster/node.(") || strings.Contains(stack, "client-go/tools/cache.") {
					t.Errorf("left:\n%s", stack)
				}
			}
		}
	}
	n, stop := start()
	s := spec("deaf")
	s.NodeName = "node-2"
	pod := create(t, ctx, client, n, namespace, s)
	started := wait(t, ctx, n, pod.UID, node.Started)
	var pid int
	if _, err := fmt.Sscanf(started.Detail, "pid %d", &pid); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := syscall.Kill(pid, 0); err == nil {
		t.Error("the process still runs")
	}

	n, stop = start()
	wait(t, ctx, n, pod.UID, node.Ready)
	again := waitPod(t, ctx, client, pod, "restarted", func(p *v1.Pod) bool {
		return p.Status.ContainerStatuses[0].RestartCount == 1 && p.Status.ContainerStatuses[0].Ready
	})
	if len(again.Status.PodIPs) != 1 || again.Status.PodIPs[0].IP != again.Status.PodIP {
		t.Errorf("addresses %v, %v", again.Status.PodIP, again.Status.PodIPs)
	}
	stop()
}

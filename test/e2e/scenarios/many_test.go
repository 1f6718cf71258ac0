package scenarios

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster/node"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

const (
	// manyDeletions come at one moment, holdsAtMost is how many the coordinator holds.
	manyDeletions = 500
	holdsAtMost   = 85
)

// The worst moment for an agent to be silent is when a whole node pool goes. The coordinator must not hold more calls than it may, each caller
// must get there in one call of client-go, and no pod may go before its time is up.
func TestManyDeletionsAndOneSilentAgent(t *testing.T) {
	// Not parallel with other tests: everything is owed by an agent that does not answer.
	s := open(t)
	entries(t, s, 2)
	defer entries(t, s, 1)
	agents, ns := namespace(t, s, "many-agent"), namespace(t, s, "many")
	if err := s.Apply(t.Context(), fmt.Sprintf(stage.SilentAgent, agents)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { endSilentAgent(t, s, agents) })
	silent, err := s.Kube.CoreV1().Pods(agents).Get(t.Context(), "silent", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Node.Wait(t.Context(), silent.UID, node.Ready); err != nil {
		t.Fatal(err)
	}
	pods := paperPods(t, s, ns)

	// What the coordinator says of itself all the while.
	coordinators, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	if err != nil {
		t.Fatal(err)
	}
	metrics := "http://" + coordinators[0].Status.PodIP + ":8080/metrics"
	var most atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			if n, ok := metric(metrics, "lameduck_holds"); ok {
				most.Store(max(most.Load(), int64(n)))
			}
			time.Sleep(50 * time.Millisecond)
		}
	})

	people := somebody(t, s, ns)
	began := time.Now()
	var deletions sync.WaitGroup
	var mu sync.Mutex
	var first, last time.Duration
	for i := range pods {
		deletions.Go(func() {
			if err := people.CoreV1().Pods(ns).Delete(t.Context(), pods[i].Name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("%s after %s: %v", pods[i].Name, time.Since(began), err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			last = time.Since(began)
			if first == 0 {
				first = last
			}
		})
	}
	deletions.Wait()
	cancel()
	watching.Wait()
	t.Logf("%d deletions were carried out %s to %s after they were asked for; %d calls were held at most", manyDeletions, first, last, most.Load())
	reasons := map[string]int{}
	for _, a := range answers(t, s, ns) {
		reasons[a.Reason]++
	}
	t.Logf("allowed by reason: %v", reasons)
	if first < deadline-time.Second || last > deadline+25*time.Second {
		t.Errorf("carried out from %s to %s, want from the deadline of %s on, and all within one call of client-go", first, last, deadline)
	}
	if most.Load() == 0 || most.Load() > holdsAtMost {
		t.Errorf("%d calls were held at one time, want 1 to %d", most.Load(), holdsAtMost)
	}
}

// somebody may do everything in a namespace, and is not exempt from the API server's flow control as its administrator is: the seats of
// manifests/base/flow-control.yaml keep all of it from arriving at the coordinator at one moment.
func somebody(t *testing.T, s *stage.Stage, ns string) *kubernetes.Clientset {
	t.Helper()
	const user = "somebody"
	if _, err := s.Kube.RbacV1().RoleBindings(ns).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	kube, err := kubernetes.NewForConfig(s.Cluster.ConfigFor(user, "system:authenticated"))
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; settle(t, 50*time.Millisecond) {
		if _, err := kube.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{Limit: 1}); err == nil {
			return kube
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// paperPods makes pods that a Service lists as ready and that nobody runs, on a node that says it is well for as long as the test takes.
func paperPods(t *testing.T, s *stage.Stage, ns string) []*corev1.Pod {
	t.Helper()
	name := "paper-" + ns
	ready := func() *corev1.Node {
		now := metav1.Now()
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			// Nobody else's pods.
			Spec: corev1.NodeSpec{Unschedulable: true},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Paper", LastHeartbeatTime: now, LastTransitionTime: now},
			}},
		}
	}
	nodes := s.Kube.CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), ready(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var beating sync.WaitGroup
	beating.Go(func() {
		for ctx.Err() == nil {
			if have, err := nodes.Get(ctx, name, metav1.GetOptions{}); err == nil {
				have.Status = ready().Status
				_, _ = nodes.UpdateStatus(ctx, have, metav1.UpdateOptions{})
			}
			select {
			case <-time.After(5 * time.Second):
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		beating.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		now := int64(0)
		_ = s.Kube.CoreV1().Pods(ns).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
		_ = nodes.Delete(ctx, name, metav1.DeleteOptions{})
	})
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := s.Kube.CoreV1().Services(ns).Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pods := make([]*corev1.Pod, manyDeletions)
	var making sync.WaitGroup
	turns := make(chan struct{}, 16)
	for i := range pods {
		making.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			var err error
			if pods[i], err = paperPod(t.Context(), s.Kube, ns, name, i); err != nil {
				t.Errorf("pod %d: %v", i, err)
			}
		})
	}
	making.Wait()
	for end := time.Now().Add(30 * time.Second); ; {
		slices, err := s.Kube.DiscoveryV1().EndpointSlices(ns).List(t.Context(), metav1.ListOptions{LabelSelector: discovery.LabelServiceName + "=web"})
		if err != nil {
			t.Fatal(err)
		}
		listed := 0
		for _, slice := range slices.Items {
			for _, e := range slice.Endpoints {
				if e.Conditions.Ready != nil && *e.Conditions.Ready {
					listed++
				}
			}
		}
		if listed == manyDeletions {
			settle(t, time.Second) // the coordinator watches the same
			return pods
		}
		if t.Failed() || time.Now().After(end) {
			t.Fatalf("%d of %d pods are listed", listed, manyDeletions)
		}
		settle(t, 100*time.Millisecond)
	}
}

func paperPod(ctx context.Context, kube kubernetes.Interface, ns, nodeName string, n int) (*corev1.Pod, error) {
	pod, err := kube.CoreV1().Pods(ns).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("paper-%d", n), Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{
			NodeName: nodeName, Containers: []corev1.Container{{Name: "app", Image: "none"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	now := metav1.Now()
	ip := fmt.Sprintf("10.245.%d.%d", n/250, n%250+1)
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now}},
	}
	return kube.CoreV1().Pods(ns).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
}

// metric reads one value from a page of metrics.
func metric(url, name string) (value float64, ok bool) {
	client := &http.Client{Timeout: 2 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return 0, false
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, name+" "); found {
			_, err := fmt.Sscan(rest, &value)
			return value, err == nil
		}
	}
	return 0, false
}

// statefulSet is the application of app.yaml as a StatefulSet with the default policies: pods are replaced one by one, the last first, and each waits
// for the one before it to be ready.
const statefulSet = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: "%[1]s"}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web, namespace: "%[1]s"}
spec:
  serviceName: web
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      automountServiceAccountToken: false
      containers:
        - name: app
          image: app
          command: ["%[2]s/app"]
          args: ["--addr=$(POD_IP):8080", "--name=$(POD_NAME)", "--start-delay=300ms", "--work=%[3]s"]
          env:
            - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
          ports: [{name: http, containerPort: 8080}]
          readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 1}
`

// Gateways that take longer than a hold, here because requests run for longer, deny a StatefulSet's deletions first. Its controller has to come
// back by itself and keep its order, and no request may be lost.
func TestAStatefulSetWithSlowAcknowledgements(t *testing.T) {
	t.Parallel()
	s := open(t)
	ns := namespace(t, s, "stateful")
	const work = 3 * time.Second
	if err := s.Apply(t.Context(), fmt.Sprintf(statefulSet, ns, s.Bin, work)); err != nil {
		t.Fatal(err)
	}
	sets := s.Kube.AppsV1().StatefulSets(ns)
	await := func() {
		t.Helper()
		for end := time.Now().Add(60 * time.Second); ; settle(t, 50*time.Millisecond) {
			set, err := sets.Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if now := set.Status; now.ObservedGeneration == set.Generation && now.ReadyReplicas == 3 && now.UpdatedReplicas == 3 && now.CurrentRevision == now.UpdateRevision {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the StatefulSet is not complete: %+v", set.Status)
			}
		}
	}
	await()
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	stop := clients(t, address, false)
	settle(t, work) // so that requests run
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", ns, "rollout", "restart", "statefulset/web"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	settle(t, 500*time.Millisecond)
	await()
	settle(t, time.Second)
	if got := stop(); got.Failed > 0 || got.Total == 0 {
		t.Errorf("%d of %d requests failed: %v\n%v", got.Failed, got.Total, got.FailedBy, got.Failures)
	}
	var order []string
	for _, a := range answers(t, s, ns) {
		if strings.HasPrefix(a.Pod, "web-") && a.Reason != "Terminating" && a.Reason != "Dead" {
			t.Logf("%s was allowed after %s: %s", a.Pod, a.took, a.Reason)
			order = append(order, a.Pod)
			if a.Reason != "Acknowledged" || a.took < work-time.Second {
				t.Errorf("%s was allowed after %s, its requests take %s: %s", a.Pod, a.took, work, a.Reason)
			}
		}
	}
	if got := strings.Join(order, " "); got != "web-2 web-1 web-0" {
		t.Errorf("the pods went in the order %q", got)
	}
	noRaces(t, s, ns)
}

package scenarios

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// holdsAtMost is how many calls a coordinator holds.
const holdsAtMost = 64

// The worst moment for an agent to be silent is when a whole node pool goes. The coordinator must
// not hold more calls than it may, each caller must get there in one call of client-go, and no pod
// may go before its time is up.
//
// DELETIONS is how many come at one moment. More than 150 are more than two cores carry out in time
// beside other tests and with the race detector.
func TestManyDeletionsAndOneSilentAgent(t *testing.T) {
	// Not parallel with other tests: everything is owed by an agent that does not answer.
	s := open(t)
	manyDeletions := harness.Number(t, "DELETIONS", 150)
	entries(t, s, 2)
	defer entries(t, s, 1)
	agents, ns := harness.Namespace(t, s.Kube, "many-agent", nil), harness.Namespace(t, s.Kube, "many", nil)
	harness.SilentAgent(t, s, agents)
	pods := s.PaperPods(t, ns, manyDeletions)

	// What the coordinator says of itself all the while.
	coordinators, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	if err != nil {
		t.Fatal(err)
	}
	var most atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			if n, ok := stage.Metric(&coordinators[0], "lameduck_holds"); ok {
				most.Store(max(most.Load(), int64(n)))
			}
			time.Sleep(50 * time.Millisecond)
		}
	})

	people := s.Client(t, ns)
	logged, dropped := len(apiServerLog(t, s)), s.Dropped()
	began := time.Now()
	var deletions sync.WaitGroup
	var mu sync.Mutex
	var last time.Duration
	early := 0
	for i := range pods {
		deletions.Go(func() {
			if err := people.CoreV1().Pods(ns).Delete(t.Context(), pods[i].Name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("%s after %s: %v", pods[i].Name, time.Since(began), err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			last = time.Since(began)
			if last < deadline-time.Second {
				early++
			}
		})
	}
	deletions.Wait()
	cancel()
	watching.Wait()
	all := known(t, s, ns, began)
	t.Logf("%d deletions were carried out, %d of them before the deadline, the last after %s; the coordinator knew "+
		"of all after %s; %d calls were held at most",
		manyDeletions, early, last, all, most.Load())
	reasons := map[string]int{}
	for _, a := range answers(t, s, ns) {
		reasons[a.Reason]++
	}
	t.Logf("allowed by reason: %v", reasons)
	// A deletion goes unasked if the calls of both entries take longer than timeoutSeconds or find
	// no ready replica, as they do where the machine has no time for them.
	late, failed := failedCalls(apiServerLog(t, s)[logged:])
	dropped = s.Dropped() - dropped
	t.Logf("%d calls of the API server took longer than 4 s, %d failed, and the Services had no pod for %d connections",
		late, len(failed), dropped)
	if len(failed) > dropped {
		t.Errorf("%d calls of the API server failed, the first: %s", len(failed), failed[0])
	}
	if early > (late+len(failed))/2 {
		t.Errorf("%d deletions were carried out before the deadline, although at most %d had no answer", early,
			(late+len(failed))/2)
	}
	// How soon a coordinator is asked depends on what else the machine does.
	goal := "pass"
	if last > all+deadline+10*time.Second {
		goal = "MISS"
	}
	t.Logf("goal: the last at most 10s after the deadline of the last that became known: %s", goal)
	if goal != "pass" && late+len(failed) == 0 {
		t.Errorf("the last one was carried out after %s, although every call was answered", last)
	}
	if most.Load() == 0 || most.Load() > holdsAtMost {
		t.Errorf("%d calls were held at one time, want 1 to %d", most.Load(), holdsAtMost)
	}
}

func apiServerLog(t *testing.T, s *stage.Stage) string {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(s.Cluster.LogDir(), "kube-apiserver.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(log)
}

// failedCalls returns how many calls to coordinators the API server gave up, and what its log says
// of those that failed in another way.
func failedCalls(log string) (late int, failed []string) {
	for line := range strings.Lines(log) {
		switch {
		case !strings.Contains(line, "failing open pods-"):
		case strings.Contains(line, "context deadline exceeded"):
			late++
		default:
			failed = append(failed, line)
		}
	}
	return late, failed
}

// known returns how long after began a coordinator was asked about the last of the pods of a
// namespace. A drain's clock begins then.
func known(t *testing.T, s *stage.Stage, ns string, began time.Time) (last time.Duration) {
	t.Helper()
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(log) {
		if l, ok := parseLogged(line); ok && l.Msg == "drain" && strings.HasPrefix(l.Pod, ns+"/") && !seen[l.UID] {
			seen[l.UID] = true
			last = max(last, l.Time.Sub(began))
		}
	}
	return last
}

// statefulSet is the application of app.yaml as a StatefulSet with the default policies: pods are
// replaced one by one, the last first, and each waits for the one before it to be ready.
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

// Gateways that take longer than a hold, here because requests run for longer, deny a StatefulSet's
// deletions first. Its controller has to come back by itself and keep its order, and no request may
// be lost.
func TestAStatefulSetWithSlowAcknowledgements(t *testing.T) {
	t.Parallel()
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "stateful", nil)
	const work = 3 * time.Second
	if err := s.Apply(t.Context(), fmt.Sprintf(statefulSet, ns, s.Bin, work)); err != nil {
		t.Fatal(err)
	}
	sets := s.Kube.AppsV1().StatefulSets(ns)
	await := func() {
		t.Helper()
		harness.Await(t, time.Minute, "the StatefulSet is complete", func() error {
			set, err := sets.Get(t.Context(), "web", metav1.GetOptions{})
			if now := set.Status; err == nil && (now.ObservedGeneration != set.Generation || now.ReadyReplicas != 3 ||
				now.UpdatedReplicas != 3 || now.CurrentRevision != now.UpdateRevision) {
				err = fmt.Errorf("%+v", now)
			}
			return err
		})
	}
	await()
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	sent := clients(t, address, false)
	settle(t, work) // so that requests run
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", ns, "rollout", "restart", "statefulset/web"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	settle(t, 500*time.Millisecond)
	await()
	settle(t, time.Second)
	sent.Answered()
	var order []string
	for _, a := range answers(t, s, ns) {
		if strings.HasPrefix(a.Pod, "web-") && a.Reason != "Terminating" && a.Reason != "PodDeleted" {
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

// Package conformance shows that Lameduck changes when pods go and nothing else: each way in which
// Kubernetes ends pods is taken in a namespace that Lameduck leaves alone and in one where a
// gateway routes to the pods, and comes to the same.
package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// manyPods are in a namespace that is deleted.
const manyPods = 500

// labels are those of namespaces that Lameduck leaves alone, and of others.
var labels = map[string]map[string]string{"stock": {"lameduck.io/mode": "off"}, "lameduck": nil}

func open(t *testing.T) *stage.Stage {
	t.Helper()
	harness.HAProxy(t)
	return harness.Stage(t, cluster.Options{}, stage.Options{Entries: 2})
}

// most is how long a case may take, on a machine that has other things to do.
const most = time.Minute

// side is one of the two namespaces.
type side struct {
	*stage.Stage
	t         *testing.T
	namespace string
	// node is where pods go whose node the case needs for itself.
	node string
	said []string
}

// says notes what can be seen from outside. What both sides have noted must be the same.
func (s *side) says(format string, args ...any) {
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

// must ends the case if err is not nil.
func (s *side) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// template is that of pods which the gateway of the namespace routes to: with the folder of
// programs, the name of the case, and more of the spec. They take a second to stop, so that who
// looks meanwhile sees them.
const template = `{"metadata": {"labels": {"app": "web", "case": %[2]q}},
	"spec": {"automountServiceAccountToken": false, %[3]s "containers": [{"name": "app", "image": "app",
		"command": ["%[1]s/app"], "args": ["--addr=$(POD_IP):8080", "--name=$(POD_NAME)"],
		"env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
			{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
		"ports": [{"name": "http", "containerPort": 8080}],
		"lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
		"readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1}}]}}`

// workload applies a Deployment, StatefulSet or DaemonSet and waits until n of its pods are ready.
func (s *side) workload(kind, name string, n int, more string) {
	s.t.Helper()
	replicas := fmt.Sprintf(`"replicas": %d, `, n)
	if kind == "DaemonSet" {
		replicas = ""
	}
	service := ""
	if kind == "StatefulSet" {
		service = `"serviceName": "none", `
	}
	s.must(s.Apply(s.t.Context(), fmt.Sprintf(`{"apiVersion": "apps/v1", "kind": %q,
		"metadata": {"name": %q, "namespace": %q},
		"spec": {%s%s"selector": {"matchLabels": {"case": %[2]q}}, "template": %[6]s}}`,
		kind, name, s.namespace, replicas, service, fmt.Sprintf(template, s.Bin, name, more))))
	s.ready(name, n)
}

// pod applies a pod, which is a case of its own, and waits until it is ready.
func (s *side) pod(name, meta, more string) {
	s.t.Helper()
	s.must(s.Apply(s.t.Context(), s.manifest(name, meta, more)))
	s.ready(name, 1)
}

func (s *side) manifest(name, meta, more string) string {
	return strings.Replace(fmt.Sprintf(template, s.Bin, name, more), `"metadata": {`,
		fmt.Sprintf(`"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %q, "namespace": %q, %s`, name,
			s.namespace, meta), 1)
}

func (s *side) podsOf(name string) []corev1.Pod {
	s.t.Helper()
	pods, err := s.Pods(s.t.Context(), s.namespace, "case="+name)
	s.must(err)
	return pods
}

// ready waits until exactly n pods of a case are ready and listed so, and no others are left. A
// deletion before EndpointSlices list the pod does not wait.
func (s *side) ready(name string, n int) {
	s.t.Helper()
	s.until(fmt.Sprintf("%d pods of %s are ready", n, name), func() bool {
		lists, err := s.Kube.DiscoveryV1().EndpointSlices(s.namespace).List(s.t.Context(), metav1.ListOptions{})
		s.must(err)
		listed := map[types.UID]bool{}
		for _, l := range lists.Items {
			for _, e := range l.Endpoints {
				listed[e.TargetRef.UID] = ptr.Deref(e.Conditions.Ready, false)
			}
		}
		pods := s.podsOf(name)
		return len(pods) == n && !slices.ContainsFunc(pods, func(p corev1.Pod) bool {
			return !harness.Ready(&p) || !listed[p.UID]
		})
	})
}

func (s *side) until(what string, holds func() bool) {
	s.t.Helper()
	harness.Until(s.t, most, s.namespace+": "+what, holds)
}

func (s *side) get(name string) (*corev1.Pod, error) {
	return s.Kube.CoreV1().Pods(s.namespace).Get(s.t.Context(), name, metav1.GetOptions{})
}

func (s *side) gone(name string) {
	s.t.Helper()
	s.until(name+" is gone", func() bool {
		_, err := s.get(name)
		return apierrors.IsNotFound(err)
	})
}

// order notes in which order pods of a case are told to go, are gone and are ready. It stops once
// the watch is as far as what is listed then.
func (s *side) order(name string) (stop func()) {
	s.t.Helper()
	w, err := s.Kube.CoreV1().Pods(s.namespace).Watch(s.t.Context(), metav1.ListOptions{LabelSelector: "case=" + name})
	s.must(err)
	state := func(p *corev1.Pod) string {
		switch {
		case p.DeletionTimestamp != nil:
			return "told to go"
		case harness.Ready(p):
			return "ready"
		}
		return "made"
	}
	var mu sync.Mutex
	was := map[types.UID]string{} // without pods that are gone
	var done sync.WaitGroup
	done.Go(func() {
		for event := range w.ResultChan() {
			p, ok := event.Object.(*corev1.Pod)
			if !ok {
				continue
			}
			mu.Lock()
			is := state(p)
			if event.Type == watch.Deleted {
				is = "gone"
			}
			if was[p.UID] != is && (was[p.UID] != "" || is == "made") {
				s.says("%s is %s", p.Name, is)
			}
			if was[p.UID] = is; is == "gone" {
				delete(was, p.UID)
			}
			mu.Unlock()
		}
	})
	return func() {
		s.until("the watch has seen all", func() bool {
			is := map[types.UID]string{}
			for _, p := range s.podsOf(name) {
				is[p.UID] = state(&p)
			}
			mu.Lock()
			defer mu.Unlock()
			return maps.Equal(is, was)
		})
		w.Stop()
		done.Wait()
	}
}

// cases are the ways in which pods end. Each runs in both namespaces at one time.
var cases = []struct {
	name string
	// free says that no deletion has to wait: nothing is deleted, nothing that is routed, or it
	// cannot wait (docs/reasons.md).
	free bool
	run  func(*side)
}{
	{"finalizer", false, func(s *side) {
		s.pod("finalizer", `"finalizers": ["example.com/keep"], `, "")
		s.must(s.Kube.CoreV1().Pods(s.namespace).Delete(s.t.Context(), "finalizer", metav1.DeleteOptions{}))
		var p *corev1.Pod
		s.until("its container has ended", func() bool {
			var err error
			p, err = s.get("finalizer")
			return err != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		})
		s.says("kept: %t, terminating: %t", p.Finalizers != nil, p.DeletionTimestamp != nil)
		_, err := s.Kube.CoreV1().Pods(s.namespace).Patch(s.t.Context(), "finalizer", types.MergePatchType,
			[]byte(`{"metadata": {"finalizers": null}}`), metav1.PatchOptions{})
		s.must(err)
		s.gone("finalizer")
	}},
	{"foreground", false, func(s *side) { s.cascade("foreground", metav1.DeletePropagationForeground) }},
	{"background", false, func(s *side) { s.cascade("background", metav1.DeletePropagationBackground) }},
	{"orphan", true, func(s *side) { s.cascade("orphan", metav1.DeletePropagationOrphan) }},
	{"collection", false, func(s *side) {
		s.workload("Deployment", "collection-kept", 1, "")
		s.pod("collection", "", "")
		s.must(s.Kube.CoreV1().Pods(s.namespace).DeleteCollection(s.t.Context(), metav1.DeleteOptions{},
			metav1.ListOptions{LabelSelector: "case=collection"}))
		s.until("the collection is gone", func() bool { return len(s.podsOf("collection")) == 0 })
		s.says("%d others are left", len(s.podsOf("collection-kept")))
	}},
	{"scale to none", false, func(s *side) {
		s.workload("StatefulSet", "scaled", 3, "")
		stop := s.order("scaled")
		_, err := s.Kube.AppsV1().StatefulSets(s.namespace).Patch(s.t.Context(), "scaled", types.MergePatchType,
			[]byte(`{"spec": {"replicas": 0}}`), metav1.PatchOptions{})
		s.must(err)
		s.until("none is left", func() bool { return len(s.podsOf("scaled")) == 0 })
		stop()
	}},
	{"StatefulSet update", false, func(s *side) {
		s.workload("StatefulSet", "updated", 2, "")
		stop := s.order("updated")
		s.workload("StatefulSet", "updated", 2, `"terminationGracePeriodSeconds": 29, `)
		s.until("both are new", func() bool {
			return !slices.ContainsFunc(s.podsOf("updated"), func(p corev1.Pod) bool {
				return *p.Spec.TerminationGracePeriodSeconds != 29
			})
		})
		s.ready("updated", 2)
		stop()
	}},
	{"DaemonSet update", false, func(s *side) {
		on := fmt.Sprintf(`"nodeSelector": {"kubernetes.io/hostname": %q}, "tolerations": [{"operator": "Exists"}], `,
			s.node)
		s.workload("DaemonSet", "daemons", 1, on)
		old := s.podsOf("daemons")[0].UID
		s.workload("DaemonSet", "daemons", 1, on+`"terminationGracePeriodSeconds": 29, `)
		s.until("it is new", func() bool {
			pods := s.podsOf("daemons")
			return len(pods) == 1 && pods[0].UID != old && harness.Ready(&pods[0])
		})
		s.says("replaced")
	}},
	{"replace --force", false, func(s *side) {
		s.pod("replaced", "", "")
		old := s.podsOf("replaced")[0].UID
		out, err := s.Cluster.KubectlInput(s.t.Context(), s.manifest("replaced", "", ""),
			"replace", "--force", "-f", "-")
		if err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
		s.ready("replaced", 1)
		s.says("another: %t", s.podsOf("replaced")[0].UID != old)
	}},
	{"preconditions", false, func(s *side) {
		s.pod("conditions", "", "")
		p, err := s.get("conditions")
		s.must(err)
		pods := s.Kube.CoreV1().Pods(s.namespace)
		for what, c := range map[string]metav1.Preconditions{
			"UID": {UID: ptr.To(types.UID("other"))}, "version": {ResourceVersion: ptr.To("1")},
		} {
			err := pods.Delete(s.t.Context(), p.Name, metav1.DeleteOptions{Preconditions: &c})
			if !apierrors.IsConflict(err) {
				s.t.Errorf("another %s: %v, want a conflict", what, err)
			}
		}
		s.must(pods.Delete(s.t.Context(), p.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}))
		s.gone(p.Name)
		s.says("refused twice, then deleted")
	}},
	{"dry run", true, func(s *side) {
		s.pod("dry", "", "")
		s.must(s.Kube.CoreV1().Pods(s.namespace).Delete(s.t.Context(), "dry",
			metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}))
		p, err := s.get("dry")
		s.must(err)
		s.says("terminating: %t", p.DeletionTimestamp != nil)
	}},
	{"no grace", true, func(s *side) {
		s.pod("forced", "", "")
		began := time.Now()
		s.must(s.Kube.CoreV1().Pods(s.namespace).Delete(s.t.Context(), "forced",
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
		_, err := s.get("forced")
		s.says("gone at once: %t, within 5 s: %t", apierrors.IsNotFound(err), time.Since(began) < 5*time.Second)
	}},
	{"eviction", false, func(s *side) {
		s.workload("Deployment", "evicted", 2, "")
		budgets := s.Kube.PolicyV1().PodDisruptionBudgets(s.namespace)
		_, err := budgets.Create(s.t.Context(), &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Name: "evicted"},
			Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(0)),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"case": "evicted"}}},
		}, metav1.CreateOptions{})
		s.must(err)
		s.until("the budget is counted", func() bool {
			b, err := budgets.Get(s.t.Context(), "evicted", metav1.GetOptions{})
			return err == nil && b.Status.ExpectedPods == 2
		})
		name := s.podsOf("evicted")[0].Name
		evict := func() error {
			ctx, cancel := context.WithTimeout(s.t.Context(), 3*time.Second)
			defer cancel()
			return s.Kube.PolicyV1().Evictions(s.namespace).Evict(ctx,
				&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: s.namespace}})
		}
		err = evict()
		p, gone := s.get(name)
		s.must(gone)
		s.says("too many requests: %t, terminating: %t",
			apierrors.IsTooManyRequests(err) || errors.Is(err, context.DeadlineExceeded), p.DeletionTimestamp != nil)
		s.must(budgets.Delete(s.t.Context(), "evicted", metav1.DeleteOptions{}))
		harness.Await(s.t, most, "the eviction", func() error {
			if err := evict(); !apierrors.IsNotFound(err) { // an answer may be lost
				return err
			}
			return nil
		})
		s.gone(name)
		s.ready("evicted", 2)
	}},
	{"time to live of a Job", true, func(s *side) {
		s.must(s.Apply(s.t.Context(), fmt.Sprintf(`{"apiVersion": "batch/v1", "kind": "Job",
			"metadata": {"name": "job", "namespace": %q}, "spec": {"ttlSecondsAfterFinished": 1, "template": {
			"metadata": {"labels": {"app": "web", "case": "job"}}, "spec": {"restartPolicy": "Never",
			"automountServiceAccountToken": false,
			"containers": [{"name": "app", "image": "app", "command": ["/bin/true"]}]}}}}`, s.namespace)))
		s.until("the Job is gone", func() bool {
			_, err := s.Kube.BatchV1().Jobs(s.namespace).Get(s.t.Context(), "job", metav1.GetOptions{})
			return apierrors.IsNotFound(err) && len(s.podsOf("job")) == 0
		})
		s.says("gone")
	}},
	{"preemption", true, func(s *side) {
		// Two of these are more than the node has.
		on := fmt.Sprintf(`"nodeSelector": {"kubernetes.io/hostname": %q}, "tolerations": [{"operator": "Exists"}],
			"resources": {"requests": {"cpu": "600"}}, `, s.node)
		s.must(s.Apply(s.t.Context(), fmt.Sprintf(`{"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
			"metadata": {"name": %q}, "value": 1000}`, s.namespace)))
		s.pod("low", "", on)
		why := s.end("low")
		s.pod("high", "", on+fmt.Sprintf(`"priorityClassName": %q, `, s.namespace))
		s.says("%s", why())
	}},
	{"taint", true, func(s *side) {
		s.pod("tainted", "", fmt.Sprintf(`"nodeSelector": {"kubernetes.io/hostname": %q},
			"tolerations": [{"key": "stage", "operator": "Exists"}], `, s.node))
		why := s.end("tainted")
		_, err := s.Kube.CoreV1().Nodes().Patch(s.t.Context(), s.node, types.MergePatchType, []byte(fmt.Sprintf(
			`{"spec": {"taints": [{"key": "stage", "value": %q, "effect": "NoSchedule"},
				{"key": "example.com/broken", "effect": "NoExecute"}]}}`, s.node)), metav1.PatchOptions{})
		s.must(err)
		s.says("%s", why())
	}},
}

// end waits until a pod is gone, and returns why, in the words of Kubernetes.
func (s *side) end(name string) (why func() string) {
	w, err := s.Kube.CoreV1().Pods(s.namespace).Watch(s.t.Context(), metav1.ListOptions{LabelSelector: "case=" + name})
	s.must(err)
	return func() string {
		s.t.Helper()
		defer w.Stop()
		reason := "none"
		for end := time.After(most); ; {
			select {
			case event := <-w.ResultChan():
				if p, ok := event.Object.(*corev1.Pod); ok {
					for _, c := range p.Status.Conditions {
						if c.Type == corev1.DisruptionTarget {
							reason = c.Reason
						}
					}
				}
				if event.Type == watch.Deleted {
					return reason
				}
			case <-end:
				s.t.Fatalf("pod %s stays", name)
			}
		}
	}
}

// Each case comes to the same in a namespace that Lameduck leaves alone and in one that it does
// not.
func TestTheSameAsWithoutLameduck(t *testing.T) {
	all := open(t)
	sides := map[string]string{}
	for name, of := range labels {
		sides[name] = harness.Namespace(t, all.Kube, name, of)
	}
	nodes := map[string]string{"stock": "node-2", "lameduck": "node-3"}
	for name, prefix := range map[string]string{"node-2": "10.244.128.0/20", "node-3": "10.244.144.0/20"} {
		if err := all.AddNode(t.Context(), name, netip.MustParsePrefix(prefix)); err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range sides {
		if err := all.Apply(t.Context(), fmt.Sprintf(`{"apiVersion": "v1", "kind": "Service",
			"metadata": {"name": "web", "namespace": %q}, "spec": {"selector": {"app": "web"},
			"ports": [{"name": "http", "port": 80, "targetPort": "http"}]}}`, ns)); err != nil {
			t.Fatal(err)
		}
		if _, err := all.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
			t.Fatal(err)
		}
	}
	for name, ns := range sides { // so that no pod of a case is the last target of the gateway
		s := &side{Stage: all, t: t, namespace: ns, node: nodes[name]}
		s.workload("Deployment", "standing", 1, "")
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			had, _ := answers(t, all, sides["lameduck"])
			said, took := map[string][]string{}, map[string]time.Duration{}
			var mu sync.Mutex
			t.Run("sides", func(t *testing.T) {
				for name, ns := range sides {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						s := &side{Stage: all, t: t, namespace: ns, node: nodes[name]}
						began := time.Now()
						c.run(s)
						mu.Lock()
						defer mu.Unlock()
						said[name], took[name] = s.said, time.Since(began)
					})
				}
			})
			if !slices.Equal(said["stock"], said["lameduck"]) || said["stock"] == nil {
				t.Errorf("without Lameduck: %q\nwith it: %q", said["stock"], said["lameduck"])
			}
			if has, _ := answers(t, all, sides["lameduck"]); !c.free && has == had {
				t.Error("no gateway has acknowledged a deletion: nothing was compared")
			}
			t.Logf("%.1f s without Lameduck, %.1f s with it: %s", took["stock"].Seconds(), took["lameduck"].Seconds(),
				strings.Join(said["lameduck"], "; "))
		})
	}
}

// answers counts the deletions in a namespace that gateways have acknowledged, and how often one
// was denied.
func answers(t *testing.T, s *stage.Stage, ns string) (acknowledged, denied int) {
	t.Helper()
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log) {
		var is struct {
			Msg, Namespace, Reason string
			Allowed                bool
		}
		switch {
		case json.Unmarshal([]byte(line), &is) != nil || is.Msg != "deletion" || is.Namespace != ns:
		case !is.Allowed:
			denied++
		case is.Reason == "Acknowledged":
			acknowledged++
		}
	}
	return acknowledged, denied
}

// A namespace with many pods goes as fast, but for the time of a review of each.
func TestANamespaceWithManyPods(t *testing.T) {
	s := open(t)
	took := map[string]time.Duration{}
	for _, name := range []string{"stock", "lameduck"} {
		t.Run(name, func(t *testing.T) {
			ns := harness.Namespace(t, s.Kube, "many-"+name, labels[name])
			s.PaperPods(t, ns, manyPods)
			began := time.Now()
			if err := s.Kube.CoreV1().Namespaces().Delete(t.Context(), ns, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			// No kubelet runs them: that they are told to go is the end.
			harness.Until(t, 5*time.Minute, "all pods are told to go", func() bool {
				pods, err := s.Pods(t.Context(), ns, "")
				return err == nil && !slices.ContainsFunc(pods, func(p corev1.Pod) bool {
					return p.DeletionTimestamp == nil
				})
			})
			took[name] = time.Since(began)
			if acknowledged, denied := answers(t, s, ns); acknowledged+denied > 0 {
				t.Errorf("%d deletions waited for gateways, and %d were denied", acknowledged, denied)
			}
		})
	}
	t.Logf("%d pods were told to go after %.1f s without Lameduck, %.1f s with it", manyPods, took["stock"].Seconds(),
		took["lameduck"].Seconds())
	// A review takes some milliseconds, and on a busy machine a hundred or two. One that is held
	// takes 2 s.
	if over := took["lameduck"] - took["stock"]; over > manyPods*400*time.Millisecond {
		t.Errorf("%.1f s longer for %d pods, want 400 ms each at most", over.Seconds(), manyPods)
	}
}

// cascade deletes a Deployment.
func (s *side) cascade(name string, policy metav1.DeletionPropagation) {
	s.workload("Deployment", name, 2, "")
	s.must(s.Kube.AppsV1().Deployments(s.namespace).Delete(s.t.Context(), name,
		metav1.DeleteOptions{PropagationPolicy: &policy}))
	s.until("the Deployment is gone", func() bool {
		_, err := s.Kube.AppsV1().Deployments(s.namespace).Get(s.t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	pods := s.podsOf(name)
	s.says("pods when the Deployment is gone: %t", len(pods) > 0)
	if policy == metav1.DeletePropagationOrphan {
		for _, p := range pods {
			s.says("terminating: %t", p.DeletionTimestamp != nil)
		}
		return
	}
	s.until("its pods are gone", func() bool { return len(s.podsOf(name)) == 0 })
}

//go:build e2e || long

package callers

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	// work is how long a long request takes: a little less than the Idle bound, after which a
	// deletion no longer waits for it.
	work = 9500 * time.Millisecond
	// sets is how many ReplicaSets of one pod are scaled to 0 together. kube-controller-manager has
	// five workers for all ReplicaSets. As many pods and one stay: half of a Service drains at a
	// time.
	sets = 30
	// collection is how many pods are deleted as a collection, all how many kubectl deletes.
	collection, all = 40, 100
	// choosing is how many pods each of these has: held, whose deletion is held, and refused and
	// returned, whose deletions are refused. They are scaled in by one, and held and returned are
	// scaled out again after 3 s.
	choosing = 5
)

// Requests take 10 s, and so does every wait for Idle. Where pods have the hook, that wait is the
// barrier's. Callers that delete many pods, one after the other or with few workers, are held only
// for as long as the gateway needs to stop routing. Without the hook, the hold waits. The
// controller of ReplicaSets must then have workers left for other workloads. No request is lost.
func TestCallersBesideLongRequests(t *testing.T) {
	harness.HAProxy(t)
	s := harness.Stage(t, cluster.Options{}, stage.Options{Entries: 1})
	harness.InstallFollowing(t, s)
	hooked := &shop{s, t, harness.Barred(t, s.Kube, "hooked", nil), work}
	plain := &shop{s, t, harness.Namespace(t, s.Kube, "plain", nil), work}
	other := newBystander(t, s)

	// One pod more of each workload is deleted before there is a Service: a coordinator relies on
	// hooks of a workload of which it has heard one.
	plain.install(map[string]int{"web": 1, "stay": sets + 1, "held": choosing, "refused": choosing,
		"returned": choosing}, nil)
	hooked.install(map[string]int{"web": 2, "stay": sets + 1},
		map[string]int{"collection": collection + 1, "all": all + 1})
	hooked.scaleWeb(1)
	for _, name := range []string{"collection-0", "all-0"} {
		must(t, s.Kube.CoreV1().Pods(hooked.ns).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	stalled, loads := harness.Stalls(t), map[string]*load.Load{}
	for _, sh := range []*shop{hooked, plain} {
		loads[sh.ns] = sh.clients()
	}
	time.Sleep(work + time.Second) // until each pod has a request in progress
	hooked.await(map[string]int{"web": sets, "collection": collection, "all": all})
	victims := slices.Concat(hooked.pods("set,set!=stay"), plain.pods("set,set!=stay"))
	t.Logf("without deletions, a bystander's pod is created after %s", other.scaleOut())

	t.Run("ReplicaSets with the hook", func(t *testing.T) {
		hooked.scaleWeb(0)
		goal(t, "bystander, seconds", other.slowest(2*time.Second), time.Second, 5*time.Second)
		hooked.waited(t, "web-", sets)
	})
	t.Run("ReplicaSets without the hook", func(t *testing.T) {
		plain.scale("held", choosing-1)
		harness.Until(t, 10*time.Second, "a deletion is held", func() bool { return len(plain.deletions("held-")) > 0 })
		plain.scaleWeb(0)
		plain.scale("refused", choosing-1)
		plain.scale("returned", choosing-1)
		slowest := other.slowest(3 * time.Second)
		plain.scale("held", choosing)
		plain.scale("returned", choosing)
		goal(t, "bystander, seconds", max(slowest, other.slowest(4*time.Second)), 15*time.Second, 15*time.Second)
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	t.Run("DeleteCollection", func(t *testing.T) {
		began := time.Now()
		must(t, s.Client(t, hooked.ns).CoreV1().Pods(hooked.ns).DeleteCollection(ctx, metav1.DeleteOptions{},
			metav1.ListOptions{LabelSelector: "set=collection"}))
		t.Logf("%d pods: %s", collection, time.Since(began))
		hooked.waited(t, "collection-", collection)
	})
	t.Run("kubectl delete", func(t *testing.T) {
		began := time.Now()
		// All but the gateway, which runs in the same namespace.
		out, err := s.Cluster.Kubectl(ctx, "-n", hooked.ns, "delete", "pod", "-l", "set=all", "--wait=false")
		must(t, err)
		t.Logf("%d pods: %s", strings.Count(out, " deleted"), time.Since(began))
		hooked.waited(t, "all-", all)
	})
	hooked.await(map[string]int{})
	plain.await(map[string]int{"held": choosing, "refused": choosing - 1, "returned": choosing})
	plain.longest(t, "web-")
	for _, set := range []string{"held", "refused", "returned"} {
		deleted := 0
		chosen := plain.deletions(set + "-")
		for _, d := range chosen {
			if d.reason != "" {
				deleted++
			}
		}
		t.Logf("%s: %d pods were taken out of traffic, %d of them deleted", set, len(chosen), deleted)
	}
	for _, l := range loads {
		go l.Stop() // each waits for its last requests
	}
	for ns, l := range loads {
		got := l.Stop()
		t.Logf("%s: %d of %d requests lost", ns, got.Failed, got.Total)
		if got.Failed > 0 && stalled() == 0 {
			t.Errorf("requests were lost in %s: %v\n%v", ns, got.FailedBy, got.Failures)
		}
		for _, p := range victims {
			if p.Namespace == ns && got.Pods[p.Name] == 0 {
				t.Errorf("%s/%s has served no request, and shows nothing", ns, p.Name)
			}
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// goal prints a time, and is an error if it is longer than on any machine.
func goal(t *testing.T, what string, is, want, most time.Duration) {
	t.Helper()
	if harness.Goal(t, what, is.Seconds(), want.Seconds(), ""); is > most {
		t.Errorf("%s: %s, want %s at most", what, is, most)
	}
}

// shop is a namespace with pods of one Service, web, and a gateway. The label set says to which
// part of the test a pod belongs, work how long a request takes.
type shop struct {
	*stage.Stage
	t    *testing.T
	ns   string
	work time.Duration
}

const (
	// spec is that of a pod which exits at once on SIGTERM, with whatever it is doing. It has no
	// readiness probe, because hundreds of pods would be probed all the time.
	spec = `{automountServiceAccountToken: false, containers: [{name: app, image: app, command: ["%s/app"],
    args: ["--addr=$(POD_IP):8080", "--name=$(POD_NAME)", "--work=%s"],
    env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}},
      {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}],
    startupProbe: {httpGet: {path: /readyz, port: 8080}, periodSeconds: 1, failureThreshold: 60}}]}
---
`
	replicaSet = `
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: "%[1]s", namespace: "%[2]s"}
spec:
  replicas: %[4]d
  selector: {matchLabels: {name: "%[1]s"}}
  template:
    metadata: {labels: {app: web, set: "%[3]s", name: "%[1]s"}}
    spec: `
	// ownedPod has a controller that is not one of kube-controller-manager's: nothing replaces the
	// pod.
	ownedPod = `
apiVersion: v1
kind: Pod
metadata:
  name: "%[1]s-%[2]d"
  namespace: "%[3]s"
  labels: {app: web, set: "%[1]s"}
  ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: "%[1]s", uid: "%[4]s", controller: true}]
spec: `
	service = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: "%s"}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
`
)

func web(i int) string { return fmt.Sprintf("web-%02d", i) }

// install makes ReplicaSets with so many pods each, 30 of them for web, and owned pods, and waits
// for all pods.
func (s *shop) install(replicaSets, owned map[string]int) {
	s.t.Helper()
	var manifests strings.Builder
	spec := fmt.Sprintf(spec, s.Bin, s.work)
	want := maps.Clone(replicaSets)
	for set, replicas := range replicaSets {
		names := []string{set}
		if set == "web" {
			names = nil
			for i := range sets {
				names = append(names, web(i))
			}
		}
		for _, name := range names {
			fmt.Fprintf(&manifests, replicaSet+spec, name, s.ns, set, replicas)
		}
		want[set] = len(names) * replicas
	}
	for set, n := range owned {
		owner, err := s.Kube.CoreV1().ConfigMaps(s.ns).Create(s.t.Context(),
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: set}}, metav1.CreateOptions{})
		must(s.t, err)
		for i := range n {
			fmt.Fprintf(&manifests, ownedPod+spec, set, i, s.ns, owner.UID)
		}
		want[set] = n
	}
	must(s.t, s.Apply(s.t.Context(), manifests.String()))
	s.await(want)
}

// await waits until the sets have so many pods, all of them ready, and no others are left.
func (s *shop) await(want map[string]int) {
	s.t.Helper()
	want["stay"] = sets + 1
	harness.Await(s.t, 2*time.Minute, "the pods of "+s.ns, func() error {
		have, unready := map[string]int{}, 0
		for _, p := range s.pods("set") {
			if have[p.Labels["set"]]++; !harness.Ready(&p) {
				unready++
			}
		}
		if !maps.Equal(have, want) || unready > 0 {
			return fmt.Errorf("%v, want %v; %d are not ready", have, want, unready)
		}
		return nil
	})
}

func (s *shop) pods(selector string) []corev1.Pod {
	s.t.Helper()
	pods, err := s.Pods(s.t.Context(), s.ns, selector)
	must(s.t, err)
	return pods
}

func (s *shop) scale(name string, replicas int) {
	s.t.Helper()
	_, err := s.Kube.AppsV1().ReplicaSets(s.ns).Patch(s.t.Context(), name, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{})
	must(s.t, err)
}

func (s *shop) scaleWeb(replicas int) {
	s.t.Helper()
	for i := range sets {
		s.scale(web(i), replicas)
	}
}

// clients install the gateway, and send it requests: enough for each pod to have one in progress at
// any time.
func (s *shop) clients() *load.Load {
	s.t.Helper()
	must(s.t, s.Apply(s.t.Context(), fmt.Sprintf(service, s.ns)))
	address, err := s.InstallGateway(s.t.Context(), stage.Gateway{Namespace: s.ns})
	must(s.t, err)
	l, err := load.Run(s.t.Context(), load.Options{Target: "http://" + address + "/", WantBody: []byte("ok\n"),
		Rate: 1.6 * float64(len(s.pods("set"))) / s.work.Seconds(), Timeout: 30 * time.Second,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("10.244.251.1"), netip.MustParseAddr("10.244.251.2")}})
	must(s.t, err)
	s.t.Cleanup(func() { l.Stop() })
	return l
}

// deletion is what the coordinator's log tells of a deletion that was not allowed at once.
type deletion struct {
	pod   string
	began time.Time
	// held is how long after that it was allowed, reason why. Empty: it was not.
	held   time.Duration
	reason string
	// refused counts the answers that refused it, by reason.
	refused map[string]int
}

// deletions returns those of pods with a prefix.
func (s *shop) deletions(prefix string) (found []*deletion) {
	s.t.Helper()
	log, err := s.Logs(s.t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	must(s.t, err)
	if i := strings.Index(log, "DATA RACE"); i >= 0 {
		s.t.Error(log[i:min(len(log), i+4000)])
	}
	of := map[string]*deletion{} // by UID: the review of a collection has no names
	for line := range strings.Lines(log) {
		var l struct {
			Time                  time.Time
			Msg, Pod, UID, Reason string
			Allowed               bool
		}
		if json.Unmarshal([]byte(line), &l) != nil {
			continue
		}
		d := of[l.UID]
		switch {
		case l.Msg == "drain" && d == nil && strings.HasPrefix(l.Pod, s.ns+"/"+prefix):
			of[l.UID] = &deletion{pod: l.Pod, began: l.Time, refused: map[string]int{}}
			found = append(found, of[l.UID])
		case l.Msg == "deletion" && d != nil && !l.Allowed:
			d.refused[l.Reason]++
		case l.Msg == "deletion" && d != nil && d.reason == "":
			d.held, d.reason = l.Time.Sub(d.began), l.Reason
		}
	}
	return found
}

// longest logs how the deletions of pods with a prefix ended, and returns how long the longest was
// held.
func (s *shop) longest(t *testing.T, prefix string) (longest time.Duration) {
	t.Helper()
	reasons, refused := map[string]int{}, map[string]int{}
	for _, d := range s.deletions(prefix) {
		longest = max(longest, d.held)
		reasons[d.reason]++
		for reason, n := range d.refused {
			refused[reason] += n
		}
	}
	t.Logf("%s/%s: held for %s at most, allowed %v, refused %v", s.ns, prefix, longest, reasons, refused)
	return longest
}

// waited is an error unless so many pods with a prefix were deleted, each within one hold and
// because its barrier waits.
func (s *shop) waited(t *testing.T, prefix string, want int) {
	t.Helper()
	goal(t, "hold, seconds", s.longest(t, prefix), time.Second, 5*time.Second)
	deleted := s.deletions(prefix)
	if len(deleted) != want {
		t.Errorf("%d deletions of %s, want %d", len(deleted), prefix, want)
	}
	for _, d := range deleted {
		if d.reason != "BarrierWaits" || d.refused["Draining"] > 0 {
			t.Errorf("%s was held for %s: %s, refused %v", d.pod, d.held, d.reason, d.refused)
		}
	}
}

// bystander is a Deployment that no gateway routes. A worker of the ReplicaSet controller makes its
// pods.
type bystander struct {
	*shop
	scaled int
}

func newBystander(t *testing.T, s *stage.Stage) *bystander {
	t.Helper()
	b := &bystander{shop: &shop{s, t, harness.Namespace(t, s.Kube, "bystander", nil), 0}}
	labels := map[string]string{"app": "bystander"}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
		SchedulerName: "none", Containers: []corev1.Container{{Name: "app", Image: "none"}}}}
	_, err := s.Kube.AppsV1().Deployments(b.ns).Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "bystander"},
		Spec: appsv1.DeploymentSpec{Replicas: new(int32), Template: template,
			Selector: &metav1.LabelSelector{MatchLabels: labels}},
	}, metav1.CreateOptions{})
	must(t, err)
	return b
}

// scaleOut adds a pod, and returns how long after that it is created.
func (b *bystander) scaleOut() time.Duration {
	b.t.Helper()
	b.scaled++
	began := time.Now()
	_, err := b.Kube.AppsV1().Deployments(b.ns).Patch(b.t.Context(), "bystander", types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, b.scaled), metav1.PatchOptions{})
	must(b.t, err)
	harness.Until(b.t, 2*time.Minute, "the bystander's pod", func() bool { return len(b.pods("")) == b.scaled })
	return time.Since(began)
}

// slowest adds pods for a time, and returns how long the slowest took to be created.
func (b *bystander) slowest(d time.Duration) (slowest time.Duration) {
	b.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(250 * time.Millisecond) {
		slowest = max(slowest, b.scaleOut())
	}
	return slowest
}

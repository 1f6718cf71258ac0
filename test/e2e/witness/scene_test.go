package witness

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// held is a pod of the Service held, without an owner.
const held = `
---
apiVersion: v1
kind: Pod
metadata: {name: held-%[2]d, namespace: %[1]s, labels: {app: held}}
spec:
  containers: [{name: app, image: none, command: [sleep, "3600"]}]
`

const heldService = `
---
apiVersion: v1
kind: Service
metadata: {name: held, namespace: %[1]s}
spec:
  selector: {app: held}
  ports: [{port: 80}]
`

// scene makes a namespace with so many pods behind one Service, and a gateway that never says a
// word. What is left of them is deleted at the end.
func scene(t *testing.T, s *stage.Stage, pods int) (ns string) {
	t.Helper()
	ns = fmt.Sprintf("%s-%d", strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name())),
		time.Now().UnixMilli()%1e6)
	harness.Namespace(t, s.Kube, ns, nil)
	var manifests strings.Builder
	fmt.Fprintf(&manifests, stage.SilentAgent+heldService, ns)
	for i := range pods {
		fmt.Fprintf(&manifests, held, ns, i)
	}
	if err := s.Apply(t.Context(), manifests.String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = s.Kube.RbacV1().ClusterRoleBindings().Delete(ctx, ns+"-silent", metav1.DeleteOptions{})
		if err := s.Kube.CoreV1().Pods(ns).DeleteCollection(ctx,
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
			t.Error(err)
		}
		harness.Until(t, time.Minute, "the pods of "+ns+" are gone", func() bool {
			left, err := s.Pods(ctx, ns, "")
			return err == nil && len(left) == 0
		})
	})
	harness.Until(t, time.Minute, "all pods are listed as ready", func() bool {
		slices, err := s.Kube.DiscoveryV1().EndpointSlices(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(slices.Items) == 0 {
			return false
		}
		ready := 0
		for _, slice := range slices.Items {
			for _, e := range slice.Endpoints {
				if ptr.Deref(e.Conditions.Ready, false) {
					ready++
				}
			}
		}
		gateway, err := s.Kube.CoreV1().Pods(ns).Get(t.Context(), "silent", metav1.GetOptions{})
		return err == nil && ready == pods && harness.Ready(gateway)
	})
	agents(t, s, "expected")
	return ns
}

// agents waits until each coordinator counts as many agents in this state as there are. It may be
// called by a cleanup.
func agents(t *testing.T, s *stage.Stage, state string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	harness.Until(t, time.Minute, "all agents are "+state, func() bool {
		pods, err := s.Pods(ctx, "", "lameduck.io/agent")
		must(t, err)
		for _, c := range coordinators(t, s) {
			if n, ok := stage.Metric(&c, fmt.Sprintf("lameduck_agents{state=%q}", state)); !ok || int(n) != len(pods) {
				return false
			}
		}
		return true
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// coordinators returns the pods of the coordinators by their ordinals.
func coordinators(t *testing.T, s *stage.Stage) (all []corev1.Pod) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	for ordinal := range s.Running() {
		pods, err := s.Pods(ctx, stage.System, fmt.Sprintf("lameduck.io/ordinal=%d", ordinal))
		if err != nil || len(pods) != 1 {
			t.Fatalf("%d pods of coordinator %d: %v", len(pods), ordinal, err)
		}
		all = append(all, pods[0])
	}
	return all
}

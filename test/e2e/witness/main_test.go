package witness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.Main(m) }

var (
	openOnce sync.Once
	opened   *stage.Stage
	errOpen  error
)

// delayMost is how much later a call may reach a coordinator, at random: two calls then reach two
// coordinators in opposite orders.
var delayMost atomic.Int64

// entries is how many coordinators there are, each with an entry of the webhook configuration:
// ENTRIES, or 2.
func entries(t *testing.T) int { return number(t, "ENTRIES", 2) }

// number is that in an environment variable, or the default.
func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	must(t, err)
	return n
}

// open returns the stage that all tests share: one node, the coordinators, and an entry of the
// webhook configuration for each.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	c := cluster.Shared(t)
	bin, n := stage.Programs(t), entries(t)
	openOnce.Do(func() {
		// Like the shared cluster, it lives until the program ends.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		opened, errOpen = stage.Open(ctx, c, stage.Options{Bin: bin, Dir: filepath.Join(os.TempDir(), "n"), Entries: n,
			Delay: func() time.Duration {
				return time.Duration(rand.Int64N(delayMost.Load() + 1))
			}})
		if errOpen == nil {
			errOpen = errors.Join(opened.InstallCoordinator(ctx), opened.InstallWebhook(ctx, n))
		}
	})
	if errOpen != nil {
		t.Fatal(errOpen)
	}
	return opened
}

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
	if err := s.CreateNamespace(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
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
		await(t, ctx, "the pods of "+ns+" are gone", func() bool {
			left, err := s.Pods(ctx, ns, "")
			return err == nil && len(left) == 0
		})
	})
	await(t, t.Context(), "all pods are listed as ready", func() bool {
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
		return err == nil && ready == pods && isReady(gateway)
	})
	agents(t, s, "expected")
	return ns
}

// agents waits until each coordinator counts as many agents in this state as there are. It may be
// called by a cleanup.
func agents(t *testing.T, s *stage.Stage, state string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	await(t, ctx, "all agents are "+state, func() bool {
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

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// await waits a minute at most.
func await(t *testing.T, ctx context.Context, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) || ctx.Err() != nil {
			t.Fatalf("not within a minute: %s", what)
		}
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

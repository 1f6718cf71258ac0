// Package harness is what end-to-end tests share: the programs under test, a stage or a lab to run
// them in, namespaces, Prometheus, and conditions to wait for.
package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// Await asks again and again until ask returns nil. After most the test fails with the last error.
func Await(t testing.TB, most time.Duration, what string, ask func() error) {
	t.Helper()
	if err := Poll(most, ask); err != nil {
		t.Fatalf("not within %s: %s: %v", most, what, err)
	}
}

// Until is Await for a condition.
func Until(t testing.TB, most time.Duration, what string, holds func() bool) {
	t.Helper()
	Await(t, most, what, func() error {
		if holds() {
			return nil
		}
		return errNot
	})
}

var errNot = errors.New("it is not so")

// Poll asks again and again until ask returns nil. After most it returns the last error.
func Poll(most time.Duration, ask func() error) error {
	for end := time.Now().Add(most); ; time.Sleep(25 * time.Millisecond) {
		if err := ask(); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// WatchClock calls stall for each time in which this process, and with it all that the test runs,
// stood still for at least that long, until ctx is done.
func WatchClock(ctx context.Context, least time.Duration, stall func(from, to time.Time)) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for last := time.Now(); ctx.Err() == nil; last = time.Now() {
		<-tick.C
		if now := time.Now(); now.Sub(last) >= least {
			stall(last, now)
		}
	}
}

// Stalls returns a function that reports how many times the machine has stood still for 2 s until
// then. A call that a coordinator holds for 2 s may then take more than the 4 s after which the API
// server goes on without it.
func Stalls(t testing.TB) func() int {
	var n atomic.Int64
	var watching sync.WaitGroup
	watching.Go(func() {
		WatchClock(t.Context(), 2*time.Second, func(from, to time.Time) {
			n.Add(1)
			t.Logf("the machine stood still from %s for %s", from.Format("15:04:05.000"), to.Sub(from))
		})
	})
	t.Cleanup(watching.Wait)
	return func() int { return int(n.Load()) }
}

var opened struct {
	once  sync.Once
	stage *stage.Stage
	err   error
}

// Stage returns the stage that all tests of a program share, with the coordinators and the entries
// of the webhook configuration that o wants. The first call starts its control plane and opens it.
// Both live until the program ends. Tests keep apart by namespaces.
func Stage(t testing.TB, control cluster.Options, o stage.Options) *stage.Stage {
	t.Helper()
	cluster.Entered(t)
	o.Bin, o.Dir = Programs(t), filepath.Join(os.TempDir(), "n")
	opened.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		opened.stage, opened.err = open(ctx, control, o)
	})
	if opened.err != nil {
		t.Fatal(opened.err)
	}
	return opened.stage
}

func open(ctx context.Context, control cluster.Options, o stage.Options) (*stage.Stage, error) {
	control.LogDir = os.Getenv("LAMEDUCK_LOGS")
	c, err := cluster.Start(context.WithoutCancel(ctx), control)
	if err != nil {
		return nil, err
	}
	s, err := stage.Open(ctx, c, o)
	if err != nil {
		return nil, err
	}
	return s, errors.Join(s.InstallCoordinator(ctx), s.InstallWebhook(ctx, max(o.Entries, 1)))
}

// InstallFollowing is [stage.Stage.InstallFollowing]. Without nft the test ends as
// [cluster.Missing] says.
func InstallFollowing(t testing.TB, s *stage.Stage) {
	t.Helper()
	err := s.InstallFollowing(t.Context())
	if errors.Is(err, stage.ErrNoPacketFilter) {
		cluster.Missing(t, "nft", "apt-get install nftables")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// SilentAgent runs the pod of [stage.SilentAgent] in a namespace, and waits until it is ready. The
// pod ends with the test: drains of later tests would wait for it, too.
func SilentAgent(t testing.TB, s *stage.Stage, ns string) {
	t.Helper()
	if err := s.Apply(t.Context(), fmt.Sprintf(stage.SilentAgent, ns)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = s.Kube.RbacV1().ClusterRoleBindings().Delete(ctx, ns+"-silent", metav1.DeleteOptions{})
		if out, err := s.Cluster.Kubectl(ctx, "-n", ns, "delete", "pod", "silent", "--ignore-not-found"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	Until(t, time.Minute, "the silent agent is ready", func() bool {
		pod, err := s.Kube.CoreV1().Pods(ns).Get(t.Context(), "silent", metav1.GetOptions{})
		return err == nil && Ready(pod)
	})
	// Coordinators ask about its right first. A deletion before that does not wait for it.
	Until(t, time.Minute, "coordinators expect the silent agent", func() bool {
		coordinators, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
		for _, c := range coordinators {
			n, ok := stage.Metric(&c, `lameduck_agents{state="missing"}`)
			if ok && n == 0 || !ok && Ready(&c) { // one that a test has stopped says nothing
				return false
			}
		}
		return err == nil
	})
}

// Namespace creates a namespace and waits for its ServiceAccount, without which no pod can be
// created. A name that ends in a hyphen is completed by the API server.
func Namespace(t testing.TB, kube kubernetes.Interface, name string, labels map[string]string) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if strings.HasSuffix(name, "-") {
		ns.Name, ns.GenerateName = "", name
	}
	ns, err := kube.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	Await(t, time.Minute, "the ServiceAccount of namespace "+ns.Name, func() error {
		_, err := kube.CoreV1().ServiceAccounts(ns.Name).Get(t.Context(), "default", metav1.GetOptions{})
		return err
	})
	return ns.Name
}

// Barred creates a namespace where the barrier is enabled, and waits until the coordinator has
// learned of it: pods get the hook of the kind that the level of Pod Security in labels wants.
func Barred(t testing.TB, kube kubernetes.Interface, name string, labels map[string]string) string {
	t.Helper()
	all := map[string]string{"lameduck.io/mode": "enforce"}
	for key, value := range labels {
		all[key] = value
	}
	Namespace(t, kube, name, all)
	Await(t, 20*time.Second, "pods in "+name+" get the hook", func() error {
		// A dry run gets it too.
		p, err := kube.CoreV1().Pods(name).Create(t.Context(), StrictPod("probe"),
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			return err
		}
		if hook := p.Spec.Containers[0].Lifecycle; p.Annotations["lameduck.io/barrier-id"] == "" || hook == nil ||
			hook.PreStop.HTTPGet == nil && all["pod-security.kubernetes.io/enforce"] == "" {
			return fmt.Errorf("the hook is %+v: %v", hook, p.Annotations)
		}
		return nil
	})
	return name
}

// StrictPod is a pod that Pod Security allows at every level, and that no node runs.
func StrictPod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: "no-such-node",
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](1000),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "app", Image: "app",
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
}

// Ready reports whether a pod is ready.
func Ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// Goal prints a measured goal as test/bench does. A missed goal is reported as missed: it depends
// on the computer. What must hold everywhere is asserted apart.
func Goal(t testing.TB, name string, value, most float64, note string) {
	t.Helper()
	verdict := "pass"
	if value > most {
		verdict = "MISS"
	}
	t.Logf("%-28s %8.2f  goal <= %-6.2f %s  %s", name, value, most, verdict, note)
}

// Number returns the number in an environment variable, or otherwise if it is empty.
func Number(t testing.TB, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		t.Fatalf("%s=%q: want a number", variable, text)
	}
	return n
}

// Quantile returns the smallest duration that at least this share of all does not exceed, rounded
// to 10 us, and 0 if there are none.
func Quantile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(0, min(len(sorted)-1, int(q*float64(len(sorted))+0.999999)-1))].Round(10 * time.Microsecond)
}

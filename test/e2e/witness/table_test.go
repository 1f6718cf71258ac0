//go:build long

package witness

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

const (
	// sequential deletions are measured where nothing is lost, at one deletion every pace where a
	// coordinator is.
	sequential = 300
	pace       = 100 * time.Millisecond
	// drains are measured one after the other, and then many at once.
	drains = 10
	many   = 500
	// slow is a deletion that waits for a lost coordinator.
	slow = time.Second
)

// measured is a row of the table.
type measured struct {
	name string
	// took is how long each deletion of a pod took that concerns no agent. Each of them follows one
	// in a namespace for which no webhook is called: the floor, under the same load of the machine.
	took, floor []time.Duration
	// slowCount of them were slow. The last one began this long after the loss.
	slowCount int
	lastSlow  time.Duration
	// drained is how long each deletion of a pod behind HAProxy took.
	drained []time.Duration
	// carriedOut of many deletions at once beside a silent agent, first and last after this time.
	carriedOut  int
	first, last time.Duration
	// memory is the resident memory of each coordinator after that, in MiB.
	memory []string
}

// What the number of entries costs, and what the loss of one of two costs, each beside the same
// without a webhook, in one table. Run it with programs that have no race detector: LAMEDUCK_BIN.
func TestTable(t *testing.T) {
	if os.Getenv("LAMEDUCK_BIN") == "" {
		t.Fatal("LAMEDUCK_BIN is not set: programs with the race detector are not to be measured")
	}
	s := open(t)
	sh := newShop(t, s, stage.App{Replicas: 3})
	// The table is of one number of coordinators after the other.
	t.Cleanup(func() { setEntries(t, s, entries(t)) })
	var rows []measured
	for n := range 4 {
		t.Run(fmt.Sprintf("entries-%d", n), func(t *testing.T) {
			setEntries(t, s, n)
			row := measured{name: fmt.Sprint(n)}
			t.Run("none", func(t *testing.T) {
				pods, floor := unconcerned(t, s, sequential)
				row.delete(t, s, pods, floor, 0, time.Hour)
			})
			t.Run("one", func(t *testing.T) { row.drains(t, sh) })
			t.Run("many", func(t *testing.T) { row.many(t, s, n) })
			rows = append(rows, row)
		})
	}
	for _, loss := range []struct {
		name string
		// lasts is how long deletions are measured.
		lasts   time.Duration
		prepare func(t *testing.T)
		lose    func(t *testing.T, pod *corev1.Pod) (back func() error)
	}{
		{"one killed", 20 * time.Second, nil, func(t *testing.T, pod *corev1.Pod) func() error {
			must(t, s.Signal(pod, "webhook", syscall.SIGKILL))
			return nil
		}},
		{"one frozen", 20 * time.Second, nil, func(t *testing.T, pod *corev1.Pod) func() error {
			must(t, s.Signal(pod, "webhook", syscall.SIGSTOP))
			return func() error { return s.Signal(pod, "webhook", syscall.SIGCONT) }
		}},
		{"one cut off from agents and peers", 20 * time.Second, nil, func(t *testing.T, pod *corev1.Pod) func() error {
			drop(t, "ip daddr "+pod.Status.PodIP+" tcp dport 9444")
			return func() error { return nft("delete table inet lost") }
		}},
		{"packets of one dropped", 20 * time.Second, nil, func(t *testing.T, pod *corev1.Pod) func() error {
			cut(t, pod.Status.PodIP)
			return func() error { return nft("delete table inet lost") }
		}},
		// The kubelet that would see the probe fail is lost, too. The API server learns of it from
		// the Lease of the node.
		{"node of one lost", 80 * time.Second, func(t *testing.T) { moveToAnotherNode(t, s) },
			func(t *testing.T, pod *corev1.Pod) func() error {
				cut(t, pod.Status.PodIP)
				s.LoseNode(another)
				return func() error { return nft("delete table inet lost") }
			}},
	} {
		t.Run(strings.ReplaceAll(loss.name, " ", "-"), func(t *testing.T) {
			setEntries(t, s, 2)
			if loss.prepare != nil {
				loss.prepare(t)
			}
			row := measured{name: "2, " + loss.name}
			pods, floor := unconcerned(t, s, int(loss.lasts/pace))
			back := loss.lose(t, &coordinators(t, s)[0])
			row.delete(t, s, pods, floor, pace, loss.lasts)
			rows = append(rows, row)
			if back != nil {
				must(t, back())
			}
		})
	}
	t.Log("\n" + table(rows))
}

// setEntries restarts n coordinators, each with an entry. With 0 there is no webhook.
func setEntries(t *testing.T, s *stage.Stage, n int) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	if n == 0 {
		must(t, s.RemoveWebhook(ctx))
	} else {
		must(t, errors.Join(s.SetEntries(ctx, max(n, s.Running())), s.InstallWebhook(ctx, n), s.SetEntries(ctx, n),
			s.RestartCoordinators(ctx)))
		agents(t, s, "connected")
	}
	time.Sleep(time.Second) // the API server watches the configuration, and does not say how far it is
}

var namespaces int

func namespace(t *testing.T, s *stage.Stage, name string) string {
	t.Helper()
	namespaces++
	name = fmt.Sprintf("table-%s-%d", name, namespaces)
	harness.Namespace(t, s.Kube, name, nil)
	return name
}

// unconcerned makes pods that concern no agent, and the same in a namespace for which no webhook is
// called.
func unconcerned(t *testing.T, s *stage.Stage, n int) (pods, floor []*corev1.Pod) {
	t.Helper()
	ns := namespace(t, s, "floor")
	_, err := s.Kube.CoreV1().Namespaces().Patch(t.Context(), ns, types.StrategicMergePatchType,
		[]byte(`{"metadata":{"labels":{"lameduck.io/mode":"off"}}}`), metav1.PatchOptions{})
	must(t, err)
	floor = s.PaperPods(t, ns, n)
	return s.PaperPods(t, namespace(t, s, "none"), n), floor
}

// delete deletes pods one after the other for some time, at most one every pace, and before each
// one of the floor.
func (m *measured) delete(t *testing.T, s *stage.Stage, pods, floor []*corev1.Pod, pace, lasts time.Duration) {
	t.Helper()
	lost := time.Now()
	remove := func(pod *corev1.Pod) time.Duration {
		began := time.Now()
		if err := s.Kube.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name,
			metav1.DeleteOptions{}); err != nil {
			t.Errorf("deletion of %s after %s: %v", pod.Name, time.Since(lost), err)
		}
		return time.Since(began)
	}
	for i, pod := range pods {
		m.floor = append(m.floor, remove(floor[i]))
		began := time.Now()
		if began.Sub(lost) > lasts {
			return
		}
		took := remove(pod)
		m.took = append(m.took, took)
		if took > slow {
			m.slowCount++
			m.lastSlow = began.Sub(lost)
		}
		time.Sleep(time.Until(began.Add(pace))) // the pace is part of what is measured
	}
}

// drains measures the deletion of pods behind HAProxy, one after the other.
func (m *measured) drains(t *testing.T, sh *shop) {
	t.Helper()
	for range drains {
		must(t, sh.s.Await(t.Context(), sh.ns, "web"))
		harness.Until(t, time.Minute, "all pods are routed", func() bool {
			_, serving := sh.traffic(t)
			return serving == 3
		})
		pods, err := sh.s.Pods(t.Context(), sh.ns, "app=web")
		must(t, err)
		began := time.Now()
		if err := sh.s.Kube.CoreV1().Pods(sh.ns).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("deletion of %s: %v", pods[0].Name, err)
		}
		m.drained = append(m.drained, time.Since(began))
	}
}

// many measures deletions at once beside an agent that never reports, and the memory of the
// coordinators after that.
func (m *measured) many(t *testing.T, s *stage.Stage, entries int) {
	t.Helper()
	ns, agents := namespace(t, s, "many"), namespace(t, s, "silent")
	harness.SilentAgent(t, s, agents)
	pods := s.PaperPods(t, ns, many)
	client := s.Client(t, ns)
	began := time.Now()
	var deletions sync.WaitGroup
	var mu sync.Mutex
	for _, pod := range pods {
		deletions.Go(func() {
			err := client.CoreV1().Pods(ns).Delete(t.Context(), pod.Name, metav1.DeleteOptions{})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Errorf("deletion of %s after %s: %v", pod.Name, time.Since(began), err)
				return
			}
			m.carriedOut++
			m.last = time.Since(began)
			if m.carriedOut == 1 {
				m.first = m.last
			}
		})
	}
	deletions.Wait()
	if entries == 0 {
		return
	}
	for _, pod := range coordinators(t, s) {
		pid, err := s.Process(&pod, "webhook")
		must(t, err)
		m.memory = append(m.memory, fmt.Sprint(resident(t, pid)))
	}
}

// resident returns the resident memory of a process in MiB.
func resident(t *testing.T, pid int) (kib int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(status)) {
		if text, found := strings.CutPrefix(line, "VmRSS:"); found {
			_, err := fmt.Sscan(text, &kib)
			must(t, err)
		}
	}
	return kib >> 10
}

// another is the node that is lost.
const another = "node-9"

// moveToAnotherNode moves the first coordinator to a node of its own. The coordinator's Deployment
// is deleted at the end, because its pod would stay on the lost node for minutes.
func moveToAnotherNode(t *testing.T, s *stage.Stage) {
	t.Helper()
	const name = "lameduck-webhook-0"
	must(t, s.AddNode(t.Context(), another, netip.MustParsePrefix("10.244.9.0/24")))
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeSelector":{"kubernetes.io/hostname":%q},"tolerations":[{"key":"stage","value":%[1]q,"effect":"NoSchedule"}]}}}}`, another)
	_, err := s.Kube.AppsV1().Deployments(stage.System).Patch(t.Context(), name, types.StrategicMergePatchType,
		[]byte(patch), metav1.PatchOptions{})
	must(t, err)
	must(t, s.AwaitCoordinators(t.Context()))
	t.Cleanup(func() {
		ctx := context.Background()
		if out, err := s.Cluster.Kubectl(ctx, "-n", stage.System, "delete", "deployment", name); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if out, err := s.Cluster.Kubectl(ctx, "-n", stage.System, "delete", "pod", "--force", "-l",
			"lameduck.io/ordinal=0"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if out, err := s.Cluster.Kubectl(ctx, "delete", "node", another); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	agents(t, s, "connected")
}

// table is Markdown. Factors of deletions that concern no agent are of the floor that was measured
// with them, those of drains are of the first row, which has no webhook.
func table(rows []measured) string {
	var text strings.Builder
	text.WriteString("| entries | DELETE that concerns no agent: p50 | p99 | max | over 1 s | the last of these " +
		"began after | one drain: p50 | max | " +
		fmt.Sprint(many) + " at once beside a silent agent | first | last | memory of each, MiB " +
		"|\n|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	unprotected := rows[0].drained
	for _, m := range rows {
		cells := []string{m.name}
		for _, q := range []float64{0.5, 0.99, 1} {
			cells = append(cells, factor(harness.Quantile(m.took, q), harness.Quantile(m.floor, q)))
		}
		cells = append(cells, fmt.Sprintf("%d of %d", m.slowCount, len(m.took)), "")
		if m.slowCount > 0 {
			cells[5] = fmt.Sprintf("%.1f s", m.lastSlow.Seconds())
		}
		if len(m.drained) > 0 {
			cells = append(cells, factor(harness.Quantile(m.drained, 0.5), harness.Quantile(unprotected, 0.5)),
				factor(harness.Quantile(m.drained, 1), harness.Quantile(unprotected, 1)),
				fmt.Sprintf("%d carried out", m.carriedOut), fmt.Sprintf("%.1f s", m.first.Seconds()),
				fmt.Sprintf("%.1f s", m.last.Seconds()), strings.Join(m.memory, ", "))
		} else {
			cells = append(cells, "", "", "", "", "", "")
		}
		fmt.Fprintf(&text, "| %s |\n", strings.Join(cells, " | "))
	}
	return text.String()
}

func factor(d, floor time.Duration) string {
	return fmt.Sprintf("%.1f ms (%.1fx)", float64(d.Microseconds())/1000, float64(d)/float64(floor))
}

package witness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// calls is how many deletions are held when a coordinator is lost.
const calls = 20

// A coordinator that is lost lets nothing through: the other one holds the same calls. With one
// entry for all replicas, 12 of 20 went unasked at SIGKILL, and 20 of 20 at SIGSTOP.
func TestNoLossLetsAHeldDeletionThrough(t *testing.T) {
	s := open(t)
	through, all := 0, 0
	for _, loss := range []struct {
		name string
		lose func(t *testing.T, s *stage.Stage, pod *corev1.Pod) (back func() error)
	}{
		{"SIGKILL", func(t *testing.T, s *stage.Stage, pod *corev1.Pod) func() error {
			must(t, s.Signal(pod, "webhook", syscall.SIGKILL))
			return nil
		}},
		{"SIGSTOP", func(t *testing.T, s *stage.Stage, pod *corev1.Pod) func() error {
			must(t, s.Signal(pod, "webhook", syscall.SIGSTOP))
			return func() error { return s.Signal(pod, "webhook", syscall.SIGCONT) }
		}},
		{"SIGTERM", func(t *testing.T, s *stage.Stage, pod *corev1.Pod) func() error {
			must(t, s.Kube.CoreV1().Pods(stage.System).Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
			return nil
		}},
		{"NodeLoss", func(t *testing.T, s *stage.Stage, pod *corev1.Pod) func() error {
			cut(t, pod.Status.PodIP)
			return func() error { return nft("delete table inet lost") }
		}},
	} {
		for victim := range 2 {
			lose := func(t *testing.T) (gone int, err error) {
				must(t, s.AwaitCoordinators(t.Context()))
				ns := scene(t, s, calls)
				ctx, cancel := context.WithCancel(t.Context())
				var deletions sync.WaitGroup
				var mu sync.Mutex
				var failed []error
				defer func() { cancel(); deletions.Wait() }()
				for i := range calls {
					deletions.Go(func() {
						// It is denied until the test is over. Where client-go has no retries
						// left, that is its error.
						name := fmt.Sprintf("held-%d", i)
						if err := s.Kube.CoreV1().Pods(ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil &&
							!errors.Is(err, context.Canceled) && !apierrors.IsTooManyRequests(err) {
							mu.Lock()
							failed = append(failed, fmt.Errorf("deletion of %s: %w", name, err))
							mu.Unlock()
						}
					})
				}
				// With the 8 s below that is less than the deadline of 30 s, which lets
				// deletions through.
				if err := harness.Poll(15*time.Second, func() error { return allHeld(t, s, ns) }); err != nil {
					return calls - alive(t, s, ns), fmt.Errorf("not all deletions are held: %w", err)
				}
				back := loss.lose(t, s, &coordinators(t, s)[victim])
				for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
					gone = calls - alive(t, s, ns)
				}
				cancel()
				deletions.Wait()
				if back != nil {
					must(t, back())
				}
				return gone, errors.Join(failed...)
			}
			t.Run(fmt.Sprintf("%s-%d", loss.name, victim), func(t *testing.T) {
				stalled, gone := harness.Stalls(t), calls
				var err error
				for before := -1; (gone > 0 || err != nil) && stalled() > before; {
					before = stalled()
					gone, err = lose(t)
				}
				if err != nil {
					t.Error(err)
				}
				through, all = through+gone, all+calls
				if gone > 0 {
					t.Errorf("%d of %d deletions went through", gone, calls)
				}
			})
		}
	}
	t.Logf("allowed without acknowledgement: %d of %d", through, all)
}

// allHeld returns nil if each coordinator has a drain of each held pod and holds a call now, and no
// deletion has gone through.
func allHeld(t *testing.T, s *stage.Stage, ns string) error {
	t.Helper()
	for ordinal, pod := range coordinators(t, s) {
		log, err := s.Logs(t.Context(), stage.System, fmt.Sprintf("lameduck.io/ordinal=%d", ordinal), "webhook")
		must(t, err)
		drains := map[string]bool{}
		for line := range strings.Lines(log) {
			var one struct{ Msg, Pod string }
			if json.Unmarshal([]byte(line), &one) == nil && one.Msg == "drain" &&
				strings.HasPrefix(one.Pod, ns+"/held-") {
				drains[one.Pod] = true
			}
		}
		if len(drains) != calls {
			return fmt.Errorf("coordinator %d has drains of %d pods", ordinal, len(drains))
		}
		if n, ok := stage.Metric(&pod, "lameduck_holds"); !ok || n == 0 {
			return fmt.Errorf("coordinator %d holds no call now", ordinal)
		}
	}
	if n := alive(t, s, ns); n != calls {
		return fmt.Errorf("%d of %d pods are not terminating", n, calls)
	}
	return nil
}

// alive counts the held pods that are not terminating.
func alive(t *testing.T, s *stage.Stage, ns string) (n int) {
	t.Helper()
	pods, err := s.Pods(t.Context(), ns, "app=held")
	must(t, err)
	for _, p := range pods {
		if p.DeletionTimestamp == nil {
			n++
		}
	}
	return n
}

// cut drops what goes to an address and what comes from it, as if its node were lost.
func cut(t *testing.T, address string) {
	t.Helper()
	drop(t, "ip daddr "+address, "ip saddr "+address)
}

// drop drops the packets that match any of these, until the table inet lost is deleted.
func drop(t *testing.T, matches ...string) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		cluster.Missing(t, "nft", "apt-get install nftables")
	}
	must(t, nft("add table inet lost"))
	must(t, nft("add chain inet lost in { type filter hook input priority 0; }"))
	for _, match := range matches {
		must(t, nft("add rule inet lost in "+match+" drop"))
	}
}

func nft(command string) error {
	if out, err := exec.Command("nft", command).CombinedOutput(); err != nil {
		return fmt.Errorf("nft %s: %w: %s", command, err, out)
	}
	return nil
}

// A deletion beside a gateway that never says a word takes the deadline, also if a coordinator is
// killed on the way: the other one has the drain's clock. It was 44 s, and client-go gave up.
func TestADeadlineDoesNotBeginAgain(t *testing.T) {
	s := open(t)
	for victim := range 2 {
		t.Run(fmt.Sprint(victim), func(t *testing.T) {
			must(t, s.AwaitCoordinators(t.Context()))
			ns := scene(t, s, 2)
			killed := make(chan error, 1)
			pod := coordinators(t, s)[victim]
			time.AfterFunc(12*time.Second, func() { killed <- s.Signal(&pod, "webhook", syscall.SIGKILL) })
			began := time.Now()
			err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), "held-0", metav1.DeleteOptions{})
			took := time.Since(began)
			must(t, <-killed)
			t.Logf("%.1f s, %v", took.Seconds(), err)
			// If the deadline began again with the kill, it would take 42 s. A busy machine may be
			// late by what is between.
			if err != nil || took < 29*time.Second || took > 40*time.Second {
				t.Errorf("it took %s, want 30 s: %v", took, err)
			}
		})
	}
}

package scenarios

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// unnoticed is how long after a coordinator's death deletions may still be sent to it, or were held
// by it: until Services no longer route to it and gateways have followed EndpointSlices.
const unnoticed = 4 * time.Second

// kill ends the process of a coordinator's pod as nothing else would, and waits until the pod is
// ready again.
func kill(t *testing.T, s *stage.Stage, pod *corev1.Pod) {
	t.Helper()
	if err := s.Signal(pod, "webhook", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, 2*time.Minute, pod.Name+" comes back", func() error {
		p, err := s.Kube.CoreV1().Pods(stage.System).Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if c := p.Status.ContainerStatuses[0]; c.RestartCount <= pod.Status.ContainerStatuses[0].RestartCount ||
			!c.Ready {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}

// failedOpen returns how many calls of the webhook for deletions have failed, so that the API
// server went on without an answer.
func failedOpen(t *testing.T, s *stage.Stage) (n int) {
	t.Helper()
	text, err := s.Kube.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range failOpenCount.FindAllSubmatch(text, -1) {
		value, err := strconv.ParseFloat(string(line[1]), 64)
		if err != nil {
			t.Fatal(err)
		}
		n += int(value)
	}
	return n
}

var failOpenCount = regexp.MustCompile(`(?m)^apiserver_admission_webhook_fail_open_count\{` +
	`[^}]*name="pods-\d+\.lameduck\.io"[^}]*\} (\S+)$`)

// deletions notes each pod of a namespace that is terminating, and when it was first seen to be,
// until the test ends.
type deletions struct {
	mu    sync.Mutex
	first map[types.UID]deletion
}

type deletion struct {
	pod string
	at  time.Time
}

func watchDeletions(t *testing.T, s *stage.Stage, ns string) *deletions {
	t.Helper()
	w, err := s.Kube.CoreV1().Pods(ns).Watch(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		t.Fatal(err)
	}
	d := &deletions{first: map[types.UID]deletion{}}
	go func() {
		for e := range w.ResultChan() {
			if p, ok := e.Object.(*corev1.Pod); ok && (p.DeletionTimestamp != nil || e.Type == watch.Deleted) {
				d.mu.Lock()
				if _, again := d.first[p.UID]; !again {
					d.first[p.UID] = deletion{p.Name, time.Now()}
				}
				d.mu.Unlock()
			}
		}
	}()
	return d
}

// all returns those of so far.
func (d *deletions) all() map[types.UID]deletion {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.first)
}

// One of two coordinators is killed, again and again, while the application is updated and pods are
// deleted. No deletion fails, no request is lost, and no pod goes without an answer: the API server
// asks both, and the one that lives has held the same calls.
func TestOneOfTwoCoordinatorsIsKilled(t *testing.T) {
	// Not parallel: it changes the coordinators of all.
	s := open(t)
	entries(t, s, 2)
	defer entries(t, s, 1)
	ns := harness.Namespace(t, s.Kube, "killed", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 4, StartDelay: 300 * time.Millisecond,
		Work: 5 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second, Blames: true})
	if err != nil {
		t.Fatal(err)
	}
	deleted := watchDeletions(t, s, ns)
	failing := failedOpen(t, s)
	sent := clients(t, address, false)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var beside sync.WaitGroup
	// What is done beside the updates, and how often that shows something.
	var killed, asked atomic.Int64
	const enoughKills, enoughAsked, enoughGone = 3, 5, 10
	// kills are when each died, and when its death was long known.
	var kills [][2]time.Time
	beside.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			pods, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
			if err != nil || len(pods) != 2 {
				t.Errorf("%d coordinators: %v", len(pods), err)
				return
			}
			began := time.Now()
			kill(t, s, &pods[n%2])
			settle(t, unnoticed-time.Since(began))
			kills = append(kills, [2]time.Time{began, began.Add(unnoticed)})
			killed.Add(1)
			settle(t, 5*time.Second)
		}
	})
	beside.Go(func() {
		for ; ctx.Err() == nil; asked.Add(1) {
			pods, err := s.Pods(t.Context(), ns, "app=web")
			if err != nil {
				t.Error(err)
				return
			}
			for _, p := range pods {
				if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
					continue
				}
				deleteCtx, cancel := context.WithTimeout(t.Context(), 2*deadline)
				one := metav1.NewUIDPreconditions(string(p.UID))
				if err := s.Kube.CoreV1().Pods(ns).Delete(deleteCtx, p.Name,
					metav1.DeleteOptions{Preconditions: one}); err != nil &&
					!strings.Contains(err.Error(), "not found") {
					t.Errorf("deletion of %s fails: %v", p.Name, err)
				}
				cancel()
				break
			}
			settle(t, 3*time.Second)
		}
	})
	// A coordinator that is killed is away for as long as the machine takes to start another.
	for began := time.Now(); time.Since(began) < 30*time.Second || time.Since(began) < 3*time.Minute &&
		(killed.Load() < enoughKills || asked.Load() < enoughAsked || len(deleted.all()) < enoughGone); {
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Error(err)
			break
		}
	}
	cancel()
	beside.Wait()
	settle(t, unnoticed)
	got := sent.Answered()
	gone := deleted.all()
	if len(kills) < enoughKills || asked.Load() < enoughAsked || len(gone) < enoughGone {
		t.Errorf("%d kills, %d deletions, %d pods gone, %d requests are too few to show anything", len(kills),
			asked.Load(), len(gone), got.Total)
	}

	// The pods that a coordinator allowed, with the reason, and those without an answer.
	answered := map[string]string{}
	for _, a := range answers(t, s, ns) {
		answered[a.Pod] = a.Reason
	}
	for _, d := range gone {
		if answered[d.pod] == "" && sent.stalled() == 0 {
			t.Errorf("pod %s was deleted at %s without an answer: %v", d.pod, d.at, kills)
		}
	}
	failing = failedOpen(t, s) - failing
	t.Logf("%d kills, %d pods deleted (%d calls failed), %d requests, of which %d failed: %v", len(kills),
		len(gone), failing, got.Total, got.Failed, got.FailedAt)
	noRaces(t, s, ns)
}

package scenarios

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// entries sets how many coordinators there are, each with its entry of the webhook configuration,
// and waits. An entry comes after its coordinator, and goes before it.
func entries(t *testing.T, s *stage.Stage, n int) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	most := max(n, 2)
	if err := errors.Join(s.SetEntries(ctx, most), s.InstallWebhook(ctx, n), s.SetEntries(ctx, n)); err != nil {
		t.Fatal(err)
	}
}

// Coordinators come and go, by rolling updates of their own most of all, and no deletion may go on
// undrained or fail for that: the one that goes answers all that it holds with "ask again", and is
// asked until Services no longer route to it.
func TestReplicasComeAndGo(t *testing.T) {
	// Not parallel: it changes the coordinators of all.
	s := open(t)
	entries(t, s, 2)
	defer entries(t, s, 1)
	ns := harness.Namespace(t, s.Kube, "replicas", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 4, StartDelay: 300 * time.Millisecond,
		Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	logged, dropped := len(apiServerLog(t, s)), s.Dropped()
	sent := clients(t, address, false)
	updating := make(chan struct{})
	var restarts sync.WaitGroup
	var restarted atomic.Int64
	restarts.Go(func() {
		for ; ; restarted.Add(1) {
			select {
			case <-updating:
				return
			default:
			}
			if restarted.Load() == 0 {
				// One of two goes, as a node that is drained would have it.
				pods, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
				if err == nil {
					err = s.Kube.CoreV1().Pods(stage.System).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{})
				}
				if err == nil {
					err = s.AwaitCoordinators(t.Context())
				}
				if err != nil {
					t.Error(err)
				}
				continue
			}
			if err := s.RestartCoordinators(t.Context()); err != nil {
				t.Error(err)
				return
			}
		}
	})
	// The application is updated until coordinators have come and gone in both ways, however long a
	// busy machine takes for that.
	began := time.Now()
	for time.Since(began) < 20*time.Second || restarted.Load() < 2 && time.Since(began) < 3*time.Minute {
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Fatal(err)
		}
	}
	if n := restarted.Load(); n < 2 {
		t.Errorf("the application's update was over after %d restarts of coordinators", n)
	}
	close(updating)
	restarts.Wait()
	settle(t, 2*time.Second)
	t.Logf("%d requests", sent.Answered().Total)
	// A coordinator may be gone before another has taken its place: then the other one answers.
	dropped = s.Dropped() - dropped
	late, failed := failedCalls(apiServerLog(t, s)[logged:])
	t.Logf("%d calls had no answer in time, %d failed, and the Services had no pod for %d connections", late,
		len(failed), dropped)
	if late > 0 && sent.stalled() == 0 || len(failed) > dropped {
		t.Errorf("coordinators that come and go fail calls:\n%s", strings.Join(failed, ""))
	}
	noRaces(t, s, ns)
}

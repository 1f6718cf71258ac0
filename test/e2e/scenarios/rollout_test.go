package scenarios

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// What Lameduck is for. Clients that keep their connections are the harder ones: HAProxy keeps
// serving them in its old processes.
func TestRollingUpdateLosesNothing(t *testing.T) {
	for _, c := range []struct {
		name      string
		keepAlive bool
	}{{"connection-per-request", false}, {"keep-alive", true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := open(t)
			ns := harness.Namespace(t, s.Kube, "rollout-"+c.name, nil)
			if err := s.InstallApp(t.Context(),
				stage.App{Namespace: ns, Replicas: 4, StartDelay: 300 * time.Millisecond,
					Work: 20 * time.Millisecond}); err != nil {
				t.Fatal(err)
			}
			address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			sent := clients(t, address, c.keepAlive)
			if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
				t.Fatal(err)
			}
			settle(t, 2*time.Second)
			sent.Answered()
			noRaces(t, s, ns)
		})
	}
}

// A coordinator that is gone must not keep a pod: the webhook configuration says Ignore.
func TestWithoutCoordinatorDeletionsWork(t *testing.T) {
	// Not parallel: it takes the coordinator from all.
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "no-coordinator", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "scale", "deployment/lameduck-webhook-0",
		"--replicas=0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := s.Await(t.Context(), stage.System, "lameduck-webhook-0"); err != nil {
		t.Fatal(err)
	}
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		began := time.Now()
		if err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
		// One that waits for an answer takes the timeoutSeconds of the webhook, 4 s.
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("the deletion of %s took %s without a coordinator", p.Name, took)
		}
	}
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "scale", "deployment/lameduck-webhook-0",
		"--replicas=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := s.Await(t.Context(), stage.System, "lameduck-webhook-0"); err != nil {
		t.Fatal(err)
	}
}

// settle lets the gateway learn of the last change, while the clients go on.
func settle(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.Fatal("the test's time is up")
	}
}

// noRaces looks for reports of the race detector in the programs' logs.
func noRaces(t *testing.T, s *stage.Stage, ns string) {
	t.Helper()
	for _, of := range []struct{ namespace, selector, container string }{
		{stage.System, "app.kubernetes.io/component=webhook", "webhook"}, {ns, "app=gateway", "agent"},
	} {
		log, err := s.Logs(t.Context(), of.namespace, of.selector, of.container)
		if err != nil {
			t.Fatal(err)
		}
		if i := strings.Index(log, "DATA RACE"); i >= 0 {
			t.Errorf("%s: %s", of.container, log[i:min(len(log), i+4000)])
		}
	}
}

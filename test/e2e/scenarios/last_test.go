package scenarios

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// One replica, updated with one more: the old pod is the last that the gateway routes to until it
// has learnt of the new one, which EndpointSlices have called ready for long then. It has to stay
// until that moment, and no longer.
func TestOneReplicaIsReplacedBeforeItGoes(t *testing.T) {
	t.Parallel()
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "one-replica", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 1, StartDelay: 300 * time.Millisecond,
		Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	const lag = 3 * time.Second
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: lag})
	if err != nil {
		t.Fatal(err)
	}
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	sent := clients(t, address, false)
	if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
		t.Fatal(err)
	}
	settle(t, lag+time.Second)
	sent.Answered()
	fresh, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil || len(fresh) != 1 {
		t.Fatalf("%d pods: %v", len(fresh), err)
	}
	var ready time.Time // rounded down to a second
	for _, c := range fresh[0].Status.Conditions {
		if c.Type == corev1.PodReady {
			ready = c.LastTransitionTime.Time
		}
	}
	said := 0
	for _, w := range answers(t, s, ns) {
		t.Logf("%s was allowed after %s: %s", w.Pod, w.took, w.Reason)
		if w.Pod == pods[0].Name {
			said++
			// The gateway learns of the new pod the lag after it became ready. The deletion begins
			// between the two, later where the controllers are slow.
			if after := w.Time.Sub(ready); w.Reason != "Acknowledged" || after < lag || w.took > lag+10*time.Second {
				t.Errorf("allowed %s after the new pod was ready and %s after the first question, with a lag of %s: %s",
					after, w.took, lag, w.Reason)
			}
		}
	}
	if said != 1 {
		t.Errorf("%d answers allow the old pod's deletion, want 1", said)
	}
	noRaces(t, s, ns)
}

// One replica, deleted: there will be an outage, and Lameduck must not make it longer than it is
// without it.
func TestTheOnlyReplicaIsDeletedAsWithoutLameduck(t *testing.T) {
	// outage is the shortest of each. What else the machine does makes an outage longer, by the
	// time that a pod's start takes, and never shorter. So more are measured where one of each
	// differs. Waiting for a hold would make each of them longer.
	outage := map[string]time.Duration{}
	longer := func() bool { return outage["lameduck"] > outage["stock"]+time.Second }
	for try := 0; try == 0 || try < 4 && longer(); try++ {
		for _, name := range []string{"stock", "lameduck"} {
			// One after the other, not side by side: they would share the machine.
			t.Run(fmt.Sprint(name, "-", try), func(t *testing.T) {
				s := open(t)
				ns := harness.Namespace(t, s.Kube, fmt.Sprint("only-", name, "-", try), nil)
				if name == "stock" {
					patch := []byte(`{"metadata": {"labels": {"lameduck.io/mode": "off"}}}`)
					if _, err := s.Kube.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, patch,
						metav1.PatchOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				if err := s.InstallApp(t.Context(),
					stage.App{Namespace: ns, Replicas: 1, StartDelay: 500 * time.Millisecond,
						Work: 20 * time.Millisecond}); err != nil {
					t.Fatal(err)
				}
				address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: 500 * time.Millisecond})
				if err != nil {
					t.Fatal(err)
				}
				pods, err := s.Pods(t.Context(), ns, "app=web")
				if err != nil {
					t.Fatal(err)
				}
				sent := clients(t, address, false)
				settle(t, time.Second)
				if err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), pods[0].Name,
					metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				if err := s.Await(t.Context(), ns, "web"); err != nil {
					t.Fatal(err)
				}
				settle(t, 3*time.Second)
				got := unserved(sent.Stop())
				if got == 0 {
					t.Error("no request failed, so this shows nothing")
				}
				if least, ok := outage[name]; !ok || got < least {
					outage[name] = got
				}
			})
		}
	}
	t.Logf("no request was served for %s without Lameduck, for %s with it", outage["stock"], outage["lameduck"])
	// The pods' start takes tenths of a second more or less each time.
	if longer() {
		t.Errorf("no request was served for %s without Lameduck, for %s with it", outage["stock"], outage["lameduck"])
	}
}

// unserved is how long requests failed, by how many did.
func unserved(r load.Result) time.Duration {
	return time.Duration(float64(r.Failed) / float64(r.Total) * r.Seconds * float64(time.Second))
}

// answer is an allowing answer in the coordinator's log.
type answer struct {
	logged
	// took is the time since the pod's first question that had to wait, or since this one.
	took time.Duration
}

// answers returns the answers in the coordinators' logs that allow deletions in a namespace.
func answers(t *testing.T, s *stage.Stage, ns string) []answer {
	t.Helper()
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	first := map[string]time.Time{}
	var all []answer
	for line := range strings.Lines(log) {
		l, ok := parseLogged(line)
		switch {
		case !ok:
		case l.Msg == "drain" && l.Phase == "Unrouting" && first[l.UID].IsZero():
			first[l.UID] = l.Time
		case l.Msg == "deletion" && l.Namespace == ns && l.Allowed:
			began := first[l.UID]
			if began.IsZero() {
				began = l.Time
			}
			all = append(all, answer{l, l.Time.Sub(began)})
		}
	}
	return all
}

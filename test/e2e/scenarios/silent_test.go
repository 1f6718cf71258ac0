package scenarios

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// The worst that an agent can do is to say nothing. Whatever operators do then, no pod waits longer
// than its deadline and 5 s, and each says why.
func TestSilentAgentKeepsNoPod(t *testing.T) {
	// Not parallel with other tests: in this one everything is owed by an agent that does not
	// answer.
	s := open(t)
	agents := harness.Namespace(t, s.Kube, "silent-agent", nil)
	harness.SilentAgent(t, s, agents)
	t.Run("while it is there", func(t *testing.T) {
		for _, c := range []struct {
			name     string
			do       []string
			replicas int
			// goes is how many pods go, last how many of them at most as the last that are not on
			// their way out.
			goes, last int
		}{
			{"delete-pod", []string{"delete", "pod", "{pod}"}, 2, 1, 0},
			{"scale-down", []string{"scale", "deployment/web", "--replicas=1"}, 3, 2, 1},
			{"rollout-restart", []string{"rollout", "restart", "deployment/web"}, 2, 2, 0},
			{"node-drain", []string{"drain", "node-2"}, 3, 3, 1},
		} {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				ns := harness.Namespace(t, s.Kube, "silent-"+c.name, nil)
				app := stage.App{Namespace: ns, Replicas: c.replicas}
				if c.name == "node-drain" {
					app.Node = "node-2"
					if err := s.AddNode(t.Context(), app.Node, netip.MustParsePrefix("10.244.2.0/24")); err != nil {
						t.Fatal(err)
					}
				}
				if err := s.InstallApp(t.Context(), app); err != nil {
					t.Fatal(err)
				}
				pods, err := s.Pods(t.Context(), ns, "app=web")
				if err != nil {
					t.Fatal(err)
				}
				args := []string{"-n", ns}
				for _, a := range c.do {
					args = append(args, strings.ReplaceAll(a, "{pod}", pods[0].Name))
				}
				out, err := s.Cluster.Kubectl(t.Context(), args...)
				if err != nil {
					t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, out)
				}
				awaitGone(t, s, ns, pods, c.goes)
				last := 0
				for _, w := range waits(t, s, ns) {
					t.Logf("%s waited %s: %s", w.pod, w.took, w.message)
					if w.took > deadline+5*time.Second {
						t.Errorf("%s waited %s", w.pod, w.took)
					}
					switch {
					case w.reason == "Deadline" && strings.Contains(w.message, "silent-agent/silent (not connected)"):
					case w.reason == "LastTarget":
						last++ // an operator may delete all
					default:
						t.Errorf("%s: allowed for %q: %q", w.pod, w.reason, w.message)
					}
				}
				if last > c.last {
					t.Errorf("%d pods were allowed as the last of their Service", last)
				}
			})
		}
		t.Run("delete-namespace", func(t *testing.T) {
			t.Parallel()
			ns := harness.Namespace(t, s.Kube, "silent-delete-namespace", nil)
			if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2}); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if out, err := s.Cluster.Kubectl(t.Context(), "delete", "namespace", ns); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("deleting the namespace took %s", took)
			}
		})
	})
}

// awaitGone waits until n of the pods are terminating or gone.
func awaitGone(t *testing.T, s *stage.Stage, ns string, pods []corev1.Pod, n int) {
	t.Helper()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(deadline + 40*time.Second); time.Now().Before(end); <-ticker.C {
		now, err := s.Pods(t.Context(), ns, "app=web")
		if err != nil {
			t.Fatal(err)
		}
		here := map[string]bool{}
		for _, p := range now {
			here[string(p.UID)] = p.DeletionTimestamp == nil
		}
		gone := 0
		for _, p := range pods {
			if !here[string(p.UID)] {
				gone++
			}
		}
		if gone >= n {
			return
		}
	}
	t.Fatalf("fewer than %d of %d pods have gone", n, len(pods))
}

// wait is how long the coordinator kept a pod, and why it let it go.
type wait struct {
	pod, reason, message string
	took                 time.Duration
}

// logged is a line of the coordinator's log, as far as tests go by it.
type logged struct {
	Time                            time.Time
	Msg, Pod, Namespace, Phase, UID string
	Reason, Message                 string
	Allowed                         bool
}

// parseLogged reads a line of the log. ok is false if it is none.
func parseLogged(line string) (l logged, ok bool) {
	err := json.Unmarshal([]byte(line), &l)
	return l, err == nil
}

// waits reads from the coordinator's log how long the deletions of a namespace's pods waited, from
// the first question to the allowing answer. The Event on the pod has to say the same.
func waits(t *testing.T, s *stage.Stage, ns string) []wait {
	t.Helper()
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	first := map[string]time.Time{}
	var all []wait
	for line := range strings.Lines(log) {
		l, ok := parseLogged(line)
		if !ok {
			continue
		}
		if l.Msg == "drain" && l.Phase == "Unrouting" && strings.HasPrefix(l.Pod, ns+"/") && first[l.UID].IsZero() {
			first[l.UID] = l.Time
		}
		if l.Msg != "deletion" || l.Namespace != ns || first[l.UID].IsZero() {
			continue
		}
		if !l.Allowed {
			if kept := l.Time.Sub(first[l.UID]); kept > deadline+time.Second {
				t.Errorf("%s was denied after %s", l.Pod, kept)
			}
			continue
		}
		all = append(all, wait{l.Pod, l.Reason, l.Message, l.Time.Sub(first[l.UID])})
		// The answer does not wait for its Event.
		harness.Await(t, 30*time.Second, "an Event says why "+l.Pod+" was allowed", func() error {
			events, err := s.Kube.EventsV1().Events(ns).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
				return string(e.Regarding.UID) == l.UID && e.Reason == "Lameduck"+l.Reason && e.Note == l.Message
			}) {
				return fmt.Errorf("no Event with the reason Lameduck%s: %s", l.Reason, l.Message)
			}
			return nil
		})
	}
	if len(all) == 0 {
		t.Errorf("the coordinator's log tells of no deletion in %s that was kept", ns)
		for line := range strings.Lines(log) {
			if strings.Contains(line, ns+"/") {
				t.Log(line)
			}
		}
	}
	return all
}

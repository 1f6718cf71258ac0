//go:build e2e

package nodes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// timed says that what happened when is written down: TIMELINE=1.
func timed() bool { return os.Getenv("TIMELINE") != "" }

// timeline is what happened to the pods of a namespace.
type timeline struct {
	mu     sync.Mutex
	events []timelineEvent
	names  map[types.UID]string
	done   func()
}

type timelineEvent struct {
	at   time.Time
	what string
}

// startTimeline follows the pods of a namespace, if that is asked for.
func (l *lab) startTimeline(t *testing.T, namespace string) *timeline {
	t.Helper()
	if !timed() {
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	line := &timeline{names: map[types.UID]string{}}
	watch, err := l.Kube.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var following sync.WaitGroup
	following.Go(func() {
		seen := map[string]bool{}
		began := time.Now()
		for event := range watch.ResultChan() {
			p, ok := event.Object.(*corev1.Pod)
			if !ok {
				continue
			}
			at := fmt.Sprintf("%s on %s", p.Name, p.Spec.NodeName)
			say := func(what string, is bool) {
				key := string(p.UID) + what
				if is && !seen[key] {
					seen[key] = true
					// What was so before.
					if time.Since(began) > 100*time.Millisecond {
						line.add(time.Now(), at+": "+what)
					}
				}
			}
			line.mu.Lock()
			line.names[p.UID] = at
			line.mu.Unlock()
			say("created", true)
			say("scheduled", p.Spec.NodeName != "")
			say("ready", harness.Ready(p))
			say("terminating", p.DeletionTimestamp != nil)
			say("not ready", p.DeletionTimestamp != nil && !harness.Ready(p))
			say("ended", p.DeletionTimestamp != nil && len(p.Status.ContainerStatuses) > 0 &&
				p.Status.ContainerStatuses[0].State.Terminated != nil)
			say("gone", event.Type == "DELETED")
		}
	})
	line.done = func() { cancel(); following.Wait() }
	return line
}

func (line *timeline) add(at time.Time, what string) {
	line.mu.Lock()
	defer line.mu.Unlock()
	line.events = append(line.events, timelineEvent{at, what})
}

// tell logs what happened since, with what coordinators and agents have written.
func (l *lab) tell(t *testing.T, line *timeline, since time.Time) {
	t.Helper()
	if line == nil {
		return
	}
	line.done()
	for _, of := range [][]string{
		{system, "app.kubernetes.io/component=webhook"}, {agents, "app.kubernetes.io/component=node"},
		{gateway, "app=gateway"},
	} {
		out, err := l.Kubectl(t.Context(), "logs", "-n", of[0], "-l", of[1], "-c",
			map[string]string{gateway: "agent"}[of[0]], "--tail=-1", "--since-time="+since.Format(time.RFC3339))
		if err != nil {
			t.Log(err)
		}
		for text := range strings.Lines(out) {
			var entry map[string]any
			if json.Unmarshal([]byte(text), &entry) != nil {
				continue
			}
			at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(entry["time"]))
			if err != nil || at.Before(since) {
				continue
			}
			what := fmt.Sprintf("    %s: %v", of[0], entry["msg"])
			uid := types.UID(fmt.Sprint(entry["uid"]))
			if line.names[uid] == "" && entry["namespace"] == nil {
				continue
			}
			delete(entry, "time")
			delete(entry, "msg")
			delete(entry, "level")
			delete(entry, "uid")
			delete(entry, "boot")
			delete(entry, "generation")
			rest, _ := json.Marshal(entry)
			line.add(at, fmt.Sprintf("%s %s %s", what, line.names[uid], rest))
		}
	}
	slices.SortStableFunc(line.events, func(a, b timelineEvent) int { return a.at.Compare(b.at) })
	var text strings.Builder
	for _, e := range line.events {
		fmt.Fprintf(&text, "%7.3f %s\n", e.at.Sub(since).Seconds(), e.what)
	}
	t.Log("\n" + text.String())
}

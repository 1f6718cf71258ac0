package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster/node"
	"github.com/lameduck-io/lameduck/test/e2e/report"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// auditPolicy logs when each deletion of a pod reached the API server, and nothing else.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, Panic]
rules:
  - level: Metadata
    verbs: [delete]
    resources: [{group: "", resources: [pods]}]
  - level: None
`

// audit is the API server's own record of deletions.
type audit struct{ policy, log string }

func newAudit() (*audit, error) {
	a := &audit{policy: temp("audit-policy.yaml"), log: temp("audit.log")}
	return a, os.WriteFile(a.policy, []byte(auditPolicy), 0o600)
}

func (a *audit) flags() []string {
	return []string{"--audit-policy-file=" + a.policy, "--audit-log-path=" + a.log}
}

// deletions returns when the API server received the first DELETE of each pod.
func (a *audit) deletions() (map[types.NamespacedName]time.Time, error) {
	f, err := os.Open(a.log)
	if err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	defer f.Close()
	first := map[types.NamespacedName]time.Time{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event struct {
			RequestReceivedTimestamp time.Time
			ObjectRef                struct{ Namespace, Name string }
		}
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return nil, fmt.Errorf("audit log: %w", err)
		}
		name := types.NamespacedName{Namespace: event.ObjectRef.Namespace, Name: event.ObjectRef.Name}
		if at, ok := first[name]; !ok || event.RequestReceivedTimestamp.Before(at) {
			first[name] = event.RequestReceivedTimestamp
		}
	}
	return first, lines.Err()
}

// step is one line of a component's log about a pod.
type step struct {
	at        time.Time
	who, what string
}

// timeline tells the drain of that pod whose time from DELETE to SIGTERM is the median: what the
// coordinator, the agent and the node wrote down.
func (d *demo) timeline(ctx context.Context, drained []types.UID) ([]report.Step, error) {
	deleted, err := d.audit.deletions()
	if err != nil {
		return nil, err
	}
	begin := func(uid types.UID) time.Time {
		e, _ := d.event(uid, node.Term)
		return deleted[e.Pod]
	}
	slices.SortFunc(drained, func(a, b types.UID) int {
		ta, _ := d.event(a, node.Term)
		tb, _ := d.event(b, node.Term)
		return int(ta.Time.Sub(begin(a)) - tb.Time.Sub(begin(b)))
	})
	uid := drained[len(drained)/2]
	steps := []step{{begin(uid), "API server", "receives DELETE"}}
	for _, of := range []struct{ namespace, selector, container, who string }{
		{stage.System, "app.kubernetes.io/component=webhook", "webhook", "coordinator"},
		{namespace, "app=gateway", "agent", "agent"},
	} {
		log, err := d.stage.Logs(ctx, of.namespace, of.selector, of.container)
		if err != nil {
			return nil, err
		}
		steps = append(steps, logged(log, uid, of.who)...)
	}
	d.mu.Lock()
	for _, e := range d.events[uid] {
		switch e.Kind {
		case node.Deleted:
			steps = append(steps, step{e.Time, "node", "sees deletionTimestamp"})
		case node.Term:
			steps = append(steps, step{e.Time, "node", "sends SIGTERM"})
		case node.Exited:
			steps = append(steps, step{e.Time, "app", "has exited"})
		}
	}
	d.mu.Unlock()
	slices.SortStableFunc(steps, func(a, b step) int { return a.at.Compare(b.at) })
	var told []report.Step
	for _, s := range steps {
		told = append(told, report.Step{OffsetMillis: millis(s.at.Sub(steps[0].at)), Who: s.who, What: s.what})
	}
	return told, nil
}

// logged picks the lines about uid out of a program's log and puts them into words.
func logged(log string, uid types.UID, who string) []step {
	var steps []step
	for line := range strings.Lines(log) {
		var l struct {
			Time                           time.Time
			Msg, UID, Phase, Reason, State string
			Allowed                        bool
			WaitingFor                     []string
			Agent, Holder                  string
		}
		if json.Unmarshal([]byte(line), &l) != nil || l.UID != string(uid) {
			continue
		}
		what := ""
		switch l.Msg {
		case "drain":
			what = "drain is " + l.Phase
			if l.Reason != "None" {
				what += ": " + l.Reason
			}
			if len(l.WaitingFor) > 0 {
				what += ", waiting for " + strings.Join(l.WaitingFor, ", ")
			}
		case "deletion":
			what = "answers: not yet (" + l.Reason + ")"
			if l.Allowed {
				what = "answers: allowed (" + l.Reason + ")"
			}
		case "agent reports":
			what = "hears: " + l.State
		case "exclusion":
			what = "lays an exclusion"
		case "exclusion state":
			what = "HAProxy shows the pod " + l.State
		case "exclusion readmitted":
			what = "forgets the exclusion: the pod is dead"
		}
		if what != "" {
			steps = append(steps, step{l.Time, who, what})
		}
	}
	return steps
}

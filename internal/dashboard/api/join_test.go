package api

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestJoin(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	report := func(agent, state string) AgentReport { return AgentReport{Agent: agent, State: state} }
	one := View{
		At: now, Replica: Replica{Name: "one", Holds: 1},
		Drains: Drains{Open: 1, Items: []Drain{
			{UID: "a", Phase: "Released", Since: now,
				Reports: []AgentReport{report("x", "idle"), report("y", "idle")}}}},
		Barriers: Barriers{Open: 61, Waiting: 1, Items: []OpenBarrier{{Drain: Drain{UID: "e", PhaseSince: now,
			Since: now}}}},
		Agents: Agents{Expected: 2, Known: 2,
			Items: []Agent{{ID: "x", State: "connected"}, {ID: "y", State: "connected"}}},
		Outcomes: []Outcome{
			{UID: "c", Gate: "hold", Reason: "PodDeleted", At: now},
			{UID: "d", Gate: "hold", Reason: "Acknowledged", At: now.Add(-time.Second)},
			{UID: "d", Gate: "hold", Reason: "Abandoned", At: now.Add(-time.Minute)}},
	}
	two := View{
		At: now, Replica: Replica{Name: "two", Holds: 3},
		Drains: Drains{Open: 2, Items: []Drain{
			{UID: "a", Phase: "Unrouting", Since: now,
				Reports: []AgentReport{report("x", "idle"), report("y", "routing")}},
			{UID: "b", Phase: "Queued", Since: now.Add(-time.Second)}}},
		Barriers: Barriers{Open: 101, Waiting: 41, Hooks: 2, Items: []OpenBarrier{
			{Drain: Drain{UID: "e", Phase: "Released", PhaseSince: now.Add(time.Second), Since: now}}}},
		Agents: Agents{Expected: 2, Missing: 1, Known: 2,
			Items: []Agent{{ID: "x", State: "connected"}, {ID: "y", State: "missing"}}},
		Outcomes: []Outcome{
			{UID: "c", Gate: "hold", Reason: "Acknowledged", At: now.Add(time.Second)},
			{UID: "d", Gate: "hold", Reason: "Deadline", Abnormal: true, At: now}},
	}
	want := View{
		At: now, Replica: Replica{Name: "one", Holds: 3}, With: []string{"two"},
		Drains: Drains{Open: 2, Items: []Drain{
			{UID: "b", Phase: "Queued", Since: now.Add(-time.Second)},
			{UID: "a", Phase: "Unrouting", Since: now,
				Reports: []AgentReport{report("y", "routing"), report("x", "idle")}}}},
		Barriers: Barriers{Open: 161, Waiting: 41, Hooks: 2, Items: []OpenBarrier{
			{Drain: Drain{UID: "e", Phase: "Released", PhaseSince: now.Add(time.Second), Since: now}}}},
		Agents: Agents{Expected: 2, Missing: 1, Known: 2,
			Items: []Agent{{ID: "y", State: "missing"}, {ID: "x", State: "connected"}}},
		Outcomes: []Outcome{
			{UID: "c", Gate: "hold", Reason: "Acknowledged", At: now.Add(time.Second)},
			{UID: "d", Gate: "hold", Reason: "Deadline", Abnormal: true, At: now},
			{UID: "d", Gate: "hold", Reason: "Abandoned", At: now.Add(-time.Minute)}},
	}
	before := len(one.Outcomes)
	if diff := cmp.Diff(want, one.Join(two)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if one.Drains.Items[0].Phase != "Released" || one.Drains.Items[0].Reports[0].Agent != "x" ||
		one.Outcomes[0].Reason != "PodDeleted" || len(one.Outcomes) != before {
		t.Errorf("the view that others share is changed: %+v", one)
	}

	measured := func(since time.Duration, namespaces ...NamespaceReport) Report {
		return Report{Since: now.Add(since), Namespaces: namespaces}
	}
	shop := func(deletions, inFlight, unmeasured int, waits ...float64) NamespaceReport {
		return NamespaceReport{Namespace: "shop", Deletions: deletions, InFlight: inFlight, Unmeasured: unmeasured,
			WaitSeconds: waits}
	}
	bank := NamespaceReport{Namespace: "bank", Deletions: 1, WaitSeconds: []float64{4}}
	got := measured(0, shop(2, 1, 0, 1, 2)).Join(measured(time.Second, bank, shop(1, 0, 3, 3)))
	if diff := cmp.Diff(measured(time.Second, bank, shop(3, 1, 3, 1, 2, 3)), got); diff != "" {
		t.Errorf("reports (-want +got):\n%s", diff)
	}
}

// A replica that knows less must not hide a gateway that another one knows.
func TestJoinExplanations(t *testing.T) {
	explain := func(name, reason string, open *Drain, gates ...Gate) Explanation {
		return Explanation{Replica: name, UID: "u", Answer: "drain", Reason: reason, Summary: "It would " + reason,
			Gates: gates, Uncovered: []Uncovered{{What: "kube-proxy"}}, Drain: open}
	}
	hold := func(agent string, connected bool) Gate { return Gate{Agent: agent, Gate: "hold", Connected: connected} }
	one := explain("one", "Draining", &Drain{UID: "u", Phase: "Released"}, hold("a", true))
	another := explain("four", "Draining", &Drain{UID: "v"}, hold("c", true)) // of an older pod of that name
	another.UID = "v"
	want := explain("one", "Draining", &Drain{UID: "u", Phase: "Unrouting"}, hold("a", false), hold("b", true))
	want.Differs = []string{"three: It would Starting", "four: It would Draining"}
	got := one.Join(explain("two", "Draining", &Drain{UID: "u", Phase: "Unrouting"}, hold("a", false), hold("b", true)),
		explain("three", "Starting", nil), another)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !one.Gates[0].Connected || one.Drain.Phase != "Released" {
		t.Errorf("what was joined is changed: %+v", one)
	}
}

package dashboard

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// maxDrains, maxReports and maxAgents bound what a view lists, maxOutcomes how many outcomes it
	// has.
	maxDrains   = 200
	maxReports  = 20
	maxAgents   = 200
	maxOutcomes = 100
	// viewEvery is how often a view is made at most. One that took long is rested from for
	// restFactor times as long.
	viewEvery  = 250 * time.Millisecond
	restFactor = 20
	// othersEvery is how often the other replicas are asked at most.
	othersEvery = time.Second
)

// latest returns the newest view, and makes one if that is due.
func (d *Dashboard) latest() api.View {
	d.shown.Lock()
	defer d.shown.Unlock()
	if began := time.Now(); !began.Before(d.shown.next) {
		d.shown.View = d.view()
		now := time.Now()
		d.shown.next = now.Add(max(viewEvery, restFactor*now.Sub(began)))
	}
	return d.shown.View
}

// Shown is what this replica tells another one: its view, or its report.
func (d *Dashboard) Shown(report bool) any {
	if report {
		return d.report()
	}
	return d.latest()
}

// others returns the newest views of the other replicas, and asks for them if these are due.
func (d *Dashboard) others(ctx context.Context) (all []api.View, silent []string) {
	d.peers.Lock()
	defer d.peers.Unlock()
	if !time.Now().Before(d.peers.next) {
		d.peers.all, d.peers.silent = d.Views(context.WithoutCancel(ctx))
		d.peers.next = time.Now().Add(othersEvery)
	}
	return d.peers.all, d.peers.silent
}

// ofAll says that a request wants what all replicas say.
func ofAll(r *http.Request) bool { return r.URL.Query().Get("replicas") == "all" }

func (d *Dashboard) view() api.View {
	of := d.Coordinator.View(maxDrains, maxReports)
	v := api.View{
		At: of.At,
		Replica: api.Replica{
			Name: of.Lease.Replica, Epoch: of.Lease.Epoch, Started: of.Began, Stopping: of.Stopping, Holds: of.Holds,
			MaxHolds: of.MaxHolds, Version: version.Build(),
			DeadlineSeconds: of.Times.Deadline.Seconds(), IdleBoundSeconds: of.Times.IdleBound.Seconds(),
		},
		Drains: api.Drains{Open: of.Open, Items: []api.Drain{}, Elsewhere: of.Elsewhere},
		Agents: api.Agents{Expected: of.Expected, Missing: of.Missing, Suspended: of.Suspended,
			Known: len(of.Agents), Items: []api.Agent{}},
		Outcomes:    d.outcomesOf(of),
		Propagation: of.Propagation, TargetHealth: of.TargetHealth,
		Barriers: d.barriersOf(of),
	}
	for _, one := range of.Drains {
		v.Drains.Items = append(v.Drains.Items, drainOf(one))
	}
	for _, one := range of.Agents {
		v.Agents.Items = append(v.Agents.Items, agentOf(one))
	}
	slices.SortStableFunc(v.Agents.Items, func(a, b api.Agent) int { return api.CompareAgents(a.State, b.State) })
	v.Agents.Items = v.Agents.Items[:min(len(v.Agents.Items), maxAgents)]
	if d.Node != nil {
		for i := range v.Agents.Items {
			v.Agents.Items[i].Node = d.Node(v.Agents.Items[i].Name, drain.AgentID(v.Agents.Items[i].ID))
		}
	}
	return v
}

// report is what was measured in mode observe.
func (d *Dashboard) report() api.Report {
	since, all := d.Coordinator.Reports()
	r := api.Report{Since: since, Namespaces: []api.NamespaceReport{}}
	for _, of := range all {
		one := api.NamespaceReport{Namespace: of.Namespace, Deletions: of.Deletions, InFlight: of.InFlight,
			Unmeasured: of.Unmeasured, WaitSeconds: []float64{}}
		for _, took := range of.Took {
			one.WaitSeconds = append(one.WaitSeconds, took.Seconds())
		}
		r.Namespaces = append(r.Namespaces, one)
	}
	return r
}

func drainOf(d coordinator.Drain) api.Drain {
	one := api.Drain{
		Namespace: d.Pod.Namespace, Pod: d.Pod.Name, UID: string(d.Pod.UID), Phase: d.Phase.String(),
		PhaseSince: d.Entered, Reason: d.Reason.String(),
		Since: d.Since, Deadline: d.Deadline, Told: d.Told, Owed: d.Owed, Waiting: len(d.Waiting),
		Reports: reportsOf(d.Reports),
	}
	return one
}

func reportsOf(words []coordinator.AgentReport) []api.AgentReport {
	all := []api.AgentReport{}
	for _, w := range words {
		all = append(all, api.AgentReport{
			Agent: w.Name, Gateway: w.Gateway, State: w.State.String(), Proof: w.Proof.String(), Since: w.Since,
			Received:  w.Received,
			Connected: w.Connected, Suspended: w.Suspended,
		})
	}
	return all
}

// Agents' states.
const (
	stateSuspended = "suspended"
	stateMissing   = "missing"
	stateGone      = "gone"
	stateConnected = "connected"
	stateLeft      = "left"
)

func agentOf(a coordinator.Agent) api.Agent {
	one := api.Agent{
		ID: string(a.ID), Name: a.Name, Gateway: a.Gateway, Label: labelOf(a.Label), Ready: a.Ready,
		Connected: a.AgentInfo.Connected, Since: a.Connected,
		Suspended: a.Suspended, Declared: a.Declared, Services: a.Services, Protocol: a.Protocol,
		Features: append([]string{}, a.Features...),
		Version:  a.Build,
		Address:  a.Address, Reported: a.Posted, ReportAgeSeconds: a.Age.Seconds(), RemovedSeconds: a.Removed.Seconds(),
		IdleSeconds: a.Idle.Seconds(),
	}
	if !one.Connected {
		one.Since = a.Lost
	}
	switch {
	case a.Left:
		one.State = stateLeft
	case a.Suspended:
		one.State = stateSuspended
	case one.Connected:
		one.State = stateConnected
	case a.Expected:
		one.State = stateMissing
	default:
		one.State = stateGone
	}
	return one
}

func labelOf(l drain.Label) string {
	switch l {
	case drain.LabelDirected:
		return "directed"
	case drain.LabelObserved:
		return "observed"
	default:
		return "none"
	}
}

// outcomesOf joins how drains ended with what was said of deletions that went on without the
// gateways' word.
func (d *Dashboard) outcomesOf(of coordinator.View) []api.Outcome {
	all := []api.Outcome{}
	said := map[drain.UID]note{}
	if d.Notes != nil {
		for _, n := range d.Notes.newest() {
			if _, newer := said[n.pod.UID]; !newer {
				said[n.pod.UID] = n
			}
		}
	}
	for _, o := range of.Outcomes {
		took := o.Took.Seconds()
		one := api.Outcome{
			At: o.At, Namespace: o.Pod.Namespace, Pod: o.Pod.Name, UID: string(o.Pod.UID), Gate: o.Gate.String(),
			Reason: o.Reason.String(), Abnormal: o.Reason.Abnormal(),
			TookSeconds: &took, Silent: append([]string{}, o.Silent...), MoreSilent: o.More,
		}
		// What was said of an earlier drain of the pod, which was abandoned, is not of this one.
		if n, ok := said[o.Pod.UID]; ok && o.Gate == drain.AtHold && !n.at.Before(o.At.Add(-noteOfDrain)) {
			one.Message, one.Abnormal = n.message, true
			if o.Reason == drain.PodDeleted || o.Reason == drain.Abandoned {
				one.Reason = n.reason
			}
			delete(said, o.Pod.UID)
		}
		all = append(all, one)
	}
	for _, one := range of.Drains {
		delete(said, one.Pod.UID) // it is not over
	}
	for _, n := range said {
		all = append(all, api.Outcome{
			At: n.at, Namespace: n.pod.Namespace, Pod: n.pod.Name, UID: string(n.pod.UID), Gate: drain.AtHold.String(),
			Reason: n.reason, Abnormal: true, Silent: []string{}, Message: n.message,
		})
	}
	slices.SortStableFunc(all, func(a, b api.Outcome) int {
		return cmp.Or(b.At.Compare(a.At), cmp.Compare(a.UID, b.UID))
	})
	return all[:min(len(all), maxOutcomes)]
}

// noteOfDrain is how long after its answer a drain may still be open: until the pod is seen
// terminating.
const noteOfDrain = time.Minute

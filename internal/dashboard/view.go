package dashboard

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
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
		return d.Coordinator.Report()
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

// view is that of the coordinator, with what is known of pods, and within bounds.
func (d *Dashboard) view() api.View {
	v := d.Coordinator.View(maxDrains, maxReports)
	v.Outcomes = v.Outcomes[:min(len(v.Outcomes), maxOutcomes)]
	d.addPods(&v.Barriers)
	slices.SortStableFunc(v.Agents.Items, func(a, b api.Agent) int { return api.CompareAgents(a.State, b.State) })
	v.Agents.Items = v.Agents.Items[:min(len(v.Agents.Items), maxAgents)]
	for i := range v.Agents.Items {
		v.Agents.Items[i].Node = d.nodeOf(v.Agents.Items[i].Name, drain.AgentID(v.Agents.Items[i].ID))
	}
	return v
}

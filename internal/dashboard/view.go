package dashboard

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// maxDrains, maxReports, maxAgents and maxOutcomes bound the lists in a view: drains, reports
	// of one drain, agents and outcomes.
	maxDrains   = 200
	maxReports  = 20
	maxAgents   = 200
	maxOutcomes = 100
	// viewEvery is the shortest pause between two views. After a view that took long, the pause is
	// restFactor times as long as it took.
	viewEvery  = 250 * time.Millisecond
	restFactor = 20
	// othersEvery is the shortest pause between two requests to the other replicas.
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

// Shown returns the answer to another replica: this replica's view, report or explanation, by the
// path of the request.
func (d *Dashboard) Shown(r *http.Request) (any, error) {
	switch r.URL.Path {
	case wire.ShownPath:
		return d.latest(), nil
	case wire.ReportPath:
		return d.Coordinator.Report(), nil
	}
	return d.explainHere(r)
}

// others returns the newest views of the other replicas, and the names of replicas that do not
// answer. It asks for the views if that is due.
func (d *Dashboard) others(ctx context.Context) (all []api.View, silent []string) {
	d.peers.Lock()
	defer d.peers.Unlock()
	if !time.Now().Before(d.peers.next) {
		d.peers.all, d.peers.silent = d.Views(context.WithoutCancel(ctx))
		d.peers.next = time.Now().Add(othersEvery)
	}
	return d.peers.all, d.peers.silent
}

// ofAll reports whether a request is for the joined answers of all replicas.
func ofAll(r *http.Request) bool { return r.URL.Query().Get("replicas") == "all" }

// view returns the coordinator's view, with nodes and hooks of pods added, and its lists cut to the
// bounds.
func (d *Dashboard) view() api.View {
	v := d.Coordinator.View(maxDrains, maxReports)
	v.Outcomes = v.Outcomes[:min(len(v.Outcomes), maxOutcomes)]
	if d.Unasked != nil {
		v.Replica.Unasked = d.Unasked()
	}
	d.addPods(&v.Barriers)
	modes := map[string]int{}
	for _, a := range v.Agents.Items {
		if a.HasMode() {
			modes[a.GatewayMode]++
		}
	}
	v.Agents.GatewayModes = modes
	slices.SortStableFunc(v.Agents.Items, func(a, b api.Agent) int {
		return cmp.Or(api.CompareAgents(a.State, b.State), cmp.Compare(modes[a.GatewayMode], modes[b.GatewayMode]))
	})
	v.Agents.Items = v.Agents.Items[:min(len(v.Agents.Items), maxAgents)]
	for i := range v.Agents.Items {
		v.Agents.Items[i].Node = d.nodeOf(v.Agents.Items[i].Name, drain.AgentID(v.Agents.Items[i].ID))
	}
	return v
}

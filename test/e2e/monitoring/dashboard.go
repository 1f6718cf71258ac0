// Package monitoring is the Grafana dashboard as code, and tests of it, of the alert rules and of
// the metrics. manifests/monitoring has what operators install.
package monitoring

import (
	"encoding/json"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// Query is one expression and the legend of its series.
type Query struct{ Expr, Legend string }

// Panel is one panel. A Stat has one number for each query.
type Panel struct {
	Title, Says, Unit string
	Stat              bool
	Queries           []Query
}

// Row is a heading and the panels below it.
type Row struct {
	Title  string
	Panels []Panel
	// Barrier says that there is data only where pods wait at the barrier: where node agents are.
	Barrier bool
}

// Rows are the dashboard's. $__rate_interval is Grafana's.
var Rows = []Row{
	{Title: "What it does", Panels: []Panel{
		{
			"Deletions now waiting",
			"Deletions that are held, by the replica that holds most: each one holds the same.", "short", true,
			[]Query{{`max(lameduck_holds)`, "held"}},
		},
		{
			"Saved in the last hour", "Deletions that went on after every gateway had let go. Without Lameduck each " +
				"is a race.", "short", true,
			[]Query{{`max(sum by (instance) (increase(lameduck_admission_answers_total{answer="allow",reason="Acknowledged"}[1h])))`, "acknowledged"}},
		},
		{
			"Not saved in the last hour", "Deletions that went on although not every gateway had said so, and calls " +
				"of the API server that failed. 0 is normal.", "short", true,
			[]Query{{`max(sum by (instance) (increase(lameduck_admission_answers_total{answer="allow",reason=~"Deadline|IdleBound|Suspended|AgentsLost|NoFacts|Cold"}[1h])))`, "too late"}},
		},
		{
			"Gateways missing", "Agents that the API says exist and that are not connected, by the replica that " +
				"misses most.", "short", true,
			[]Query{{`max(lameduck_agents{state="missing"})`, "missing"}},
		},
		{
			"Answers: go", "Why deletions went on, each second, by the replica that says so most: each one answers " +
				"every deletion.", "ops", false,
			[]Query{{`max by (reason) (sum by (instance, reason) (rate(lameduck_admission_answers_total{answer="allow"}[$__rate_interval]))) > 0`, "{{reason}}"}},
		},
		{
			"Answers: ask again",
			"Why deletions were told to come back, each second, by the replica that says so most.", "ops", false,
			[]Query{{`max by (reason) (sum by (instance, reason) (rate(lameduck_admission_answers_total{answer="deny"}[$__rate_interval])))`, "{{reason}}"}},
		},
	}},
	{Title: "How long it takes", Panels: []Panel{
		{
			"From the first call until released",
			"What a preStop sleep would have to be. By quantile, over all drains.", "s", false,
			[]Query{
				{`histogram_quantile(0.5, sum by (le) (rate(lameduck_drain_phase_seconds_bucket{phase="Released"}[$__rate_interval])))`, "p50"},
				{`histogram_quantile(0.99, sum by (le) (rate(lameduck_drain_phase_seconds_bucket{phase="Released"}[$__rate_interval])))`, "p99"},
			},
		},
		{
			"Until no new request comes, and until none runs",
			"The median of the phases of a drain: Quiescing is entered when every gateway has said Removed, " +
				"Released when all are Idle.", "s", false,
			[]Query{{`histogram_quantile(0.5, sum by (le, phase) (rate(lameduck_drain_phase_seconds_bucket[$__rate_interval])))`, "{{phase}}"}},
		},
		{
			"Answering a review", "Holding included: a held call takes up to times.hold.", "s", false,
			[]Query{{`histogram_quantile(0.99, sum by (le, answer) (rate(lameduck_admission_duration_seconds_bucket[$__rate_interval])))`, "p99 {{answer}}"}},
		},
		{
			"Open drains", "By phase, of the replica that has most: each one has the same. Queued ones wait for " +
				"room in their Service.", "short", false,
			[]Query{{`max by (phase) (lameduck_drains)`, "{{phase}}"}},
		},
	}},
	{Title: "Coordinators and their agents", Panels: []Panel{
		{
			"Agents", "Expected, connected, missing, suspended: the most that one replica says.", "short", false,
			[]Query{{`max by (state) (lameduck_agents)`, "{{state}}"}},
		},
		{
			"Reports", "What agents say, each second.", "ops", false,
			[]Query{{`sum by (state) (rate(lameduck_reports_total[$__rate_interval]))`, "{{state}}"}},
		},
		{
			"Requests of agents", "By path and status.", "reqps", false,
			[]Query{{`sum by (path, code) (rate(lameduck_agent_requests_total[$__rate_interval]))`,
				"{{path}} {{code}}"}},
		},
		{
			"Calls that are refused", "404: another path, or a wrong secret in it. If it is the API server that is " +
				"refused, nothing waits.", "ops", false,
			[]Query{{`sum by (code) (rate(lameduck_admission_malformed_total[$__rate_interval]))`, "{{code}}"}},
		},
		{
			"Certificate", "How long the serving certificate is still good.", "s", false,
			[]Query{{`min(lameduck_certificate_expiry_timestamp_seconds) - time()`, "left"}},
		},
		{
			"Memory", "Of coordinators and agents.", "bytes", false,
			[]Query{{`process_resident_memory_bytes and on (instance) (lameduck_holds or lameduck_agent_streams)`,
				"{{instance}}"}},
		},
	}},
	{Title: "Gateways", Panels: []Panel{
		{
			"Targets", "Of all agents, by backend: claimed by EndpointSlices, routed by the gateway, excluded " +
				"(taken out), unusable (unhealthy).", "short", false,
			[]Query{{`sum by (pool, state) (lameduck_agent_targets)`, "{{pool}} {{state}}"}},
		},
		{
			"Taken out now", "Exclusions by what the gateway proves of them.", "short", false,
			[]Query{{`sum by (state) (lameduck_agent_exclusions)`, "{{state}}"}},
		},
		{
			"Work on the gateway", "Operations each second, by what was wanted, and calls that failed.", "ops", false,
			[]Query{
				{`sum by (want) (rate(lameduck_agent_operations_total[$__rate_interval]))`, "{{want}}"},
				{`sum by (call) (rate(lameduck_agent_gateway_errors_total[$__rate_interval]))`, "failed: {{call}}"},
			},
		},
		{
			"Time to tell the gateway, and to read it", "99 of 100 take less.", "s", false,
			[]Query{
				{`histogram_quantile(0.99, sum by (le) (rate(lameduck_agent_apply_duration_seconds_bucket[$__rate_interval])))`, "apply"},
				{`histogram_quantile(0.99, sum by (le) (rate(lameduck_agent_read_duration_seconds_bucket[$__rate_interval])))`, "read"},
			},
		},
		{
			"Probes", "Of targets, by outcome. None where no check is configured.", "ops", false,
			[]Query{{`sum by (outcome) (rate(lameduck_agent_probes_total[$__rate_interval]))`, "{{outcome}}"}},
		},
		{
			"Failing open", "Backends in which too few targets are healthy, so that all of them get traffic.",
			"short", false,
			[]Query{{`max by (pool) (lameduck_agent_pool_failing_open)`, "{{pool}}"}},
		},
		{
			"Journal", "Writes of exclusions to disk, by result.", "ops", false,
			[]Query{{`sum by (result) (rate(lameduck_agent_journal_writes_total[$__rate_interval]))`, "{{result}}"}},
		},
		{
			"Streams to coordinators", "Of each agent: as many as there are replicas.", "short", false,
			[]Query{{`lameduck_agent_streams`, "{{instance}}"}},
		},
		{
			"Propagation, by gateway", "From when a pod began to go until a gateway had let go of it (removed), and " +
				"until nothing ran there any more (idle): what a sleep before SIGTERM would have to cover.", "s", false,
			[]Query{
				{`histogram_quantile(0.5, sum by (le, gateway, what) (rate(lameduck_propagation_seconds_bucket[$__rate_interval])))`, "p50 {{gateway}} {{what}}"},
				{`histogram_quantile(0.99, sum by (le, gateway, what) (rate(lameduck_propagation_seconds_bucket[$__rate_interval])))`, "p99 {{gateway}} {{what}}"},
			},
		},
	}},
	{Title: "The barrier", Barrier: true, Panels: []Panel{
		{
			"Waits at the barrier, by result",
			"Pods each second that were told to stop, by why: Acknowledged is what is wanted, Deadline is not.",
			"ops", false,
			[]Query{{`sum by (reason) (rate(lameduck_barrier_duration_seconds_count[$__rate_interval])) > 0`,
				"{{reason}}"}},
		},
		{
			"From the deletion to SIGTERM, by result", "What the barrier costs each pod.", "s", false,
			[]Query{
				{`histogram_quantile(0.5, sum by (le, reason) (rate(lameduck_barrier_duration_seconds_bucket[$__rate_interval]))) >= 0`, "p50 {{reason}}"},
				{`histogram_quantile(0.99, sum by (le, reason) (rate(lameduck_barrier_duration_seconds_bucket[$__rate_interval]))) >= 0`, "p99 {{reason}}"},
			},
		},
		{
			"Hooks, by outcome", "Answers of node agents each second. Local, Stopping, NoTime, NoTargets and " +
				"TooMany are uncovered: nobody else was asked.", "ops", false,
			[]Query{{`sum by (outcome) (rate(lameduck_barrier_waits_total[$__rate_interval])) > 0`, "{{outcome}}"}},
		},
		{
			"Hooks that wait now", "At coordinators, and at node agents.", "short", false,
			[]Query{{`sum(lameduck_barriers_waiting)`, "coordinators"}, {`sum(lameduck_barrier_waiting)`, "nodes"}},
		},
		{
			"Propagation, by node", "Of kube-proxy, until it had let go: half of the pods took less, and 99 of 100. " +
				"The ten slowest nodes.", "s", false,
			[]Query{
				{`topk(10, histogram_quantile(0.5, sum by (le, node) (rate(lameduck_propagation_seconds_bucket{gateway="kube-proxy",what="removed"}[$__rate_interval]))) >= 0)`, "p50 {{node}}"},
				{`topk(10, histogram_quantile(0.99, sum by (le, node) (rate(lameduck_propagation_seconds_bucket{gateway="kube-proxy",what="removed"}[$__rate_interval]))) >= 0)`, "p99 {{node}}"},
			},
		},
		{
			"Stated waits that were cut, and restarts",
			"Pods each second whose bound was shorter than what a Service states, and stops of containers whose pod " +
				"stays.", "ops", false,
			[]Query{
				{`sum(rate(lameduck_barrier_stated_waits_cut_total[$__rate_interval]))`, "cut"},
				{`sum(rate(lameduck_barrier_restarts_total[$__rate_interval]))`, "restarts"},
			},
		},
	}},
}

// Dashboard returns what Grafana imports.
func Dashboard() ([]byte, error) {
	kind, uid := "prometheus", "${datasource}"
	source := common.DataSourceRef{Type: &kind, Uid: &uid}
	query := func(q Query) cog.Builder[variants.Dataquery] {
		return prometheus.NewDataqueryBuilder().Expr(q.Expr).LegendFormat(q.Legend).Datasource(source)
	}
	d := dashboard.NewDashboardBuilder("Lameduck").
		Uid("lameduck").Tags([]string{"lameduck"}).Refresh("30s").Time("now-3h",
		"now").Timezone("browser").Tooltip(dashboard.DashboardCursorSyncCrosshair).
		Description("Kubernetes pods that leave only after every gateway has let go of them, and has said so.").
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Data source").Type("prometheus"))
	for _, row := range Rows {
		d = d.WithRow(dashboard.NewRowBuilder(row.Title))
		for _, p := range row.Panels {
			if p.Stat {
				panel := stat.NewPanelBuilder().Title(p.Title).Description(p.Says).Unit(p.Unit).Datasource(
					source).Height(4).Span(6).Decimals(0)
				for _, q := range p.Queries {
					panel = panel.WithTarget(query(q))
				}
				d = d.WithPanel(panel)
				continue
			}
			panel := timeseries.NewPanelBuilder().Title(p.Title).Description(p.Says).Unit(p.Unit).Datasource(
				source).Height(8).Span(12).Min(0).FillOpacity(10)
			for _, q := range p.Queries {
				panel = panel.WithTarget(query(q))
			}
			d = d.WithPanel(panel)
		}
	}
	built, err := d.Build()
	if err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(built, "", "  ")
	return append(text, '\n'), err
}

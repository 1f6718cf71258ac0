// Package monitoring has the Grafana dashboard as code, and tests of it, of the alert rules and of
// the metrics. Operators install the files in manifests/monitoring.
package monitoring

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

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
	// Barrier: there is data only where node agents run, because pods wait at the barrier there.
	Barrier bool
}

// Rows are those of the dashboard. Grafana sets $__rate_interval.
var Rows = []Row{
	{Title: "What it does", Panels: []Panel{
		{
			"Deletions now waiting",
			"Deletions that are held, of the replica that holds most: all replicas hold the same.", "short", true,
			[]Query{{`max(lameduck_holds)`, "held"}},
		},
		{
			"Saved in the last hour", "Deletions that continued after every gateway had acknowledged. Without " +
				"Lameduck each is a race.", "short", true,
			[]Query{{`max(sum by (instance) (increase(` +
				`lameduck_admission_answers_total{answer="allow",reason="Acknowledged"}[1h])))`,
				"acknowledged"}},
		},
		{
			"Not saved in the last hour", "Deletions that continued although not every gateway had acknowledged, or " +
				"that a replica could not judge. 0 is normal.", "short", true,
			[]Query{{`max(sum by (instance) (increase(lameduck_admission_answers_total{answer="allow",` +
				`reason=~"Deadline|IdleBound|Suspended|AgentsLost|NoFacts|Cold"}[1h])))`,
				"too late"}},
		},
		{
			"Gateways missing", "Agents whose pods exist and that are not connected, of the replica that " +
				"misses most.", "short", true,
			[]Query{{`max(lameduck_agents{state="missing"})`, "missing"}},
		},
		{
			"Deletions allowed, by reason", "Each second, of the replica with most: all replicas answer every " +
				"deletion.", "ops", false,
			[]Query{{`max by (reason) (` + perSecond("instance, reason", `lameduck_admission_answers_total{answer="allow"}`) + `) > 0`,
				"{{reason}}"}},
		},
		{
			"Deletions denied, by reason",
			"Each second, of the replica with most. The caller tries again.", "ops", false,
			[]Query{{`max by (reason) (` + perSecond("instance, reason", `lameduck_admission_answers_total{answer="deny"}`) + `)`,
				"{{reason}}"}},
		},
	}},
	{Title: "Coverage and witnesses", Panels: []Panel{
		{
			"Deletions, by coverage", "Each second; each deletion counts once. Acknowledged: every " +
				"gateway that routes to the pod has. Uncovered: one of them has no agent. NoAgents, NotRouted: no " +
				"agent has to be asked.", "ops", false,
			[]Query{{perSecond("reason", `lameduck_admission_answers_total{role="opener",answer="allow",`+
				`reason=~"Acknowledged|Uncovered|NoAgents|NotRouted"}`), "{{reason}}"}},
		},
		{
			"Services, by coverage", "Services with pods, of the replica that counts most: the worst coverage among " +
				"the consumers of a Service, and the gates at which its pods wait for an agent (docs/coverage.md).",
			"short", false,
			[]Query{{`max by (coverage, gates) (lameduck_services) > 0`, "{{coverage}}, gates: {{gates}}"}},
		},
		{
			"Openers and witnesses", "Answers of each replica, each second. Every deletion has one opener, and each " +
				"other replica as a witness: a replica without answers is not asked.", "ops", false,
			[]Query{{perSecond("instance, role", `lameduck_admission_answers_total`), "{{instance}} {{role}}"}},
		},
	}},
	{Title: "How long it takes", Panels: []Panel{
		{
			"From the first call until released",
			"How long a preStop sleep would have to be. Quantiles of all drains.", "s", false,
			[]Query{
				{quantile(0.5, "le", `lameduck_drain_phase_seconds_bucket{phase="Released"}`), "p50"},
				{quantile(0.99, "le", `lameduck_drain_phase_seconds_bucket{phase="Released"}`), "p99"},
			},
		},
		{
			"Until no new request comes, and until none runs",
			"The median time to each phase of a drain: Quiescing begins when every gateway has reported " +
				"Removed, Released when all have reported Idle.", "s", false,
			[]Query{{quantile(0.5, "le, phase", `lameduck_drain_phase_seconds_bucket`), "{{phase}}"}},
		},
		{
			"Time to answer a review", "Includes the hold: a held call takes up to times.hold.", "s", false,
			[]Query{{quantile(0.99, "le, answer", `lameduck_admission_duration_seconds_bucket`), "p99 {{answer}}"}},
		},
		{
			"Open drains", "By phase, of the replica that has most: all replicas have the same. Queued drains wait " +
				"for capacity of their Service.", "short", false,
			[]Query{{`max by (phase) (lameduck_drains)`, "{{phase}}"}},
		},
	}},
	{Title: "Coordinators and their agents", Panels: []Panel{
		{
			"Agents", "Expected, connected, missing, suspended: the most that one replica counts.", "short", false,
			[]Query{{`max by (state) (lameduck_agents)`, "{{state}}"}},
		},
		{
			"Reports", "Reports of agents each second, by state.", "ops", false,
			[]Query{{perSecond("state", `lameduck_reports_total`), "{{state}}"}},
		},
		{
			"Requests of agents", "By path and status.", "reqps", false,
			[]Query{{perSecond("path, code", `lameduck_agent_requests_total`),
				"{{path}} {{code}}"}},
		},
		{
			"Reviews refused", "404: another path, or a wrong secret in it. If the API server's calls are " +
				"refused, no deletion waits.", "ops", false,
			[]Query{{perSecond("code", `lameduck_admission_malformed_total`), "{{code}}"}},
		},
		{
			"Certificate", "How long the serving certificate is still valid.", "s", false,
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
			"Targets", "Of all agents, by backend: claimed by EndpointSlices, routed by the gateway, excluded, " +
				"unusable (unhealthy).", "short", false,
			[]Query{{`sum by (pool, state) (lameduck_agent_targets)`, "{{pool}} {{state}}"}},
		},
		{
			"Exclusions now, by gateway", "By the state that the gateway has proved. With the kind kernel each is " +
				"an entry of the kernel's map, which holds 32768.", "short", false,
			[]Query{{`sum by (gateway, state) (lameduck_agent_exclusions * on (instance) group_left (gateway) ` +
				`group by (instance, gateway) (lameduck_propagation_seconds_count))`, "{{gateway}} {{state}}"}},
		},
		{
			"Changes of the gateway", "Operations each second, by what they do, and calls that failed.", "ops", false,
			[]Query{
				{perSecond("want", `lameduck_agent_operations_total`), "{{want}}"},
				{perSecond("call", `lameduck_agent_gateway_errors_total`), "failed: {{call}}"},
			},
		},
		{
			"Time to change the gateway, and to read it", "99 of 100 take less.", "s", false,
			[]Query{
				{quantile(0.99, "le", `lameduck_agent_apply_duration_seconds_bucket`), "apply"},
				{quantile(0.99, "le", `lameduck_agent_read_duration_seconds_bucket`), "read"},
			},
		},
		{
			"Probes", "Of targets each second, by outcome. None where no check is configured.", "ops", false,
			[]Query{{perSecond("outcome", `lameduck_agent_probes_total`), "{{outcome}}"}},
		},
		{
			"Failing open", "Backends in which too few targets are healthy, so that all of their targets get traffic.",
			"short", false,
			[]Query{{`max by (pool) (lameduck_agent_pool_failing_open)`, "{{pool}}"}},
		},
		{
			"Journal", "Writes of exclusions to disk, by result.", "ops", false,
			[]Query{{perSecond("result", `lameduck_agent_journal_writes_total`), "{{result}}"}},
		},
		{
			"Streams to coordinators", "Of each agent: as many as there are replicas.", "short", false,
			[]Query{{`lameduck_agent_streams`, "{{instance}}"}},
		},
		{
			"Propagation, by gateway", "From the start of a pod's deletion until a gateway had stopped routing to it " +
				"(removed), and until no request was in flight (idle): a sleep before SIGTERM would have to be as " +
				"long.", "s", false,
			[]Query{
				{quantile(0.5, "le, gateway, what", `lameduck_propagation_seconds_bucket`), "p50 {{gateway}} {{what}}"},
				{quantile(0.99, "le, gateway, what", `lameduck_propagation_seconds_bucket`),
					"p99 {{gateway}} {{what}}"},
			},
		},
		{
			"Slowest replicas, by gateway", "From the start of a pod's deletion until this replica of a gateway had " +
				"stopped routing to it: 99 of 100 took less. The ten slowest; kube-proxy is below, by node.",
			"s", false,
			[]Query{{slowest(quantile(0.99, "le, gateway, instance", ofOthers)),
				"{{gateway}} {{instance}}"}},
		},
	}},
	{Title: "Mode observe", Panels: []Panel{
		{
			"What enforcement would cost", "How long deletions in mode observe would have waited: until every " +
				"gateway had stopped routing to the pod by itself, with no request in flight.", "s", false,
			[]Query{
				{quantile(0.5, "le", `lameduck_observed_seconds_bucket`), "p50"},
				{quantile(0.99, "le", `lameduck_observed_seconds_bucket`), "p99"},
			},
		},
		{
			"Deletions measured", "In mode observe, each second, and those of them with requests in flight when the " +
				"gateways stopped routing to the pod.", "ops", false,
			[]Query{
				{`sum(rate(lameduck_observed_seconds_count[$__rate_interval]))`, "measured"},
				{`sum(rate(lameduck_observed_in_flight_total[$__rate_interval]))`, "in flight"},
			},
		},
	}},
	{Title: "The barrier", Barrier: true, Panels: []Panel{
		{
			"Waits at the barrier, by result",
			"Pods each second that got SIGTERM, by reason: Acknowledged is the aim, Deadline is not.",
			"ops", false,
			[]Query{{perSecond("reason", `lameduck_barrier_duration_seconds_count`) + ` > 0`,
				"{{reason}}"}},
		},
		{
			"From the deletion to SIGTERM, by result", "What the barrier adds to the end of each pod.", "s", false,
			[]Query{
				{quantile(0.5, "le, reason", `lameduck_barrier_duration_seconds_bucket`) + ` >= 0`, "p50 {{reason}}"},
				{quantile(0.99, "le, reason", `lameduck_barrier_duration_seconds_bucket`) + ` >= 0`, "p99 {{reason}}"},
			},
		},
		{
			"New pods, by coverage", "Pods created each second where the barrier is requested. Only Covered pods " +
				"wait with every container.", "ops", false,
			[]Query{{perSecond("coverage", `lameduck_admission_mutations_total`), "{{coverage}}"}},
		},
		{
			"Pods without the hook", "That request it and were created without it, of the replica that counts most.",
			"short", false, []Query{{`max(lameduck_barrier_missing_pods)`, "pods"}},
		},
		{
			"Hooks, by outcome", "Answers of node agents each second. Local, Stopping, NoTime, NoTargets and " +
				"TooMany are uncovered: no coordinator was asked.", "ops", false,
			[]Query{{perSecond("outcome", `lameduck_barrier_waits_total`) + ` > 0`, "{{outcome}}"}},
		},
		{
			"Hooks that wait now", "At coordinators, and at node agents.", "short", false,
			[]Query{{`sum(lameduck_barriers_waiting)`, "coordinators"}, {`sum(lameduck_barrier_waiting)`, "nodes"}},
		},
		{
			"Propagation, by node", "Until the node's kernel had stopped routing to a pod: half of the pods took " +
				"less, and 99 of 100. The ten slowest nodes.", "s", false,
			[]Query{
				{slowest(quantile(0.5, "le, node", ofKubeProxy)), "p50 {{node}}"},
				{slowest(quantile(0.99, "le, node", ofKubeProxy)), "p99 {{node}}"},
			},
		},
		{
			"Stated waits that were cut, and restarts",
			"Pods each second whose bound was shorter than a Service's stated wait, and stops of containers whose " +
				"pod stays.", "ops", false,
			[]Query{
				{`sum(rate(lameduck_barrier_stated_waits_cut_total[$__rate_interval]))`, "cut"},
				{`sum(rate(lameduck_barrier_restarts_total[$__rate_interval]))`, "restarts"},
			},
		},
	}},
}

// Selectors returns the metrics with their labels that alert rules query, one for each alternative
// of a label: those of node agents, or all others.
func Selectors(rules string, nodes bool) (all []string) {
	alternatives := regexp.MustCompile(`^(.*)=~"([A-Za-z|]+)"(.*)$`)
	for _, s := range regexp.MustCompile(`lameduck_[a-z_]+(\{[^}]*\})?`).FindAllString(rules, -1) {
		ofNodes := strings.HasPrefix(s, "lameduck_barrier_waits_total") ||
			strings.HasPrefix(s, "lameduck_agent_audits_total")
		if ofNodes != nodes {
			continue
		}
		m := alternatives.FindStringSubmatch(s)
		if m == nil {
			all = append(all, s)
			continue
		}
		for value := range strings.SplitSeq(m[2], "|") {
			all = append(all, m[1]+"=\""+value+"\""+m[3])
		}
	}
	return all
}

// ofKubeProxy and ofOthers are how long data planes take to stop routing to a pod.
const (
	ofKubeProxy = `lameduck_propagation_seconds_bucket{gateway="kube-proxy",what="removed"}`
	ofOthers    = `lameduck_propagation_seconds_bucket{gateway!="kube-proxy",what="removed"}`
)

// slowest are the ten largest values of an expression.
func slowest(expr string) string { return "topk(10, " + expr + " >= 0)" }

// perSecond is the rate of a counter, by labels.
func perSecond(labels, counter string) string {
	return fmt.Sprintf("sum by (%s) (rate(%s[$__rate_interval]))", labels, counter)
}

// quantile is that of a histogram, by labels.
func quantile(q float64, labels, buckets string) string {
	return fmt.Sprintf("histogram_quantile(%v, %s)", q, perSecond(labels, buckets))
}

// Dashboard returns the JSON that Grafana imports.
func Dashboard() ([]byte, error) {
	kind, uid := "prometheus", "${datasource}"
	source := common.DataSourceRef{Type: &kind, Uid: &uid}
	query := func(q Query) cog.Builder[variants.Dataquery] {
		return prometheus.NewDataqueryBuilder().Expr(q.Expr).LegendFormat(q.Legend).Datasource(source)
	}
	d := dashboard.NewDashboardBuilder("Lameduck").
		Uid("lameduck").Tags([]string{"lameduck"}).Refresh("30s").Time("now-3h",
		"now").Timezone("browser").Tooltip(dashboard.DashboardCursorSyncCrosshair).
		Description("Kubernetes pods that stop only after every gateway has confirmed that it stopped routing to " +
			"them.").
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

package coordinator

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Metrics are the metrics of the coordinator. Every series with a bounded set of labels exists from
// the start, but those of phases by reason.
type Metrics struct {
	holds   prometheus.Gauge
	byKind  *prometheus.GaugeVec // holds of workload controllers
	drains  *prometheus.GaugeVec
	phase   *prometheus.HistogramVec
	agents  *prometheus.GaugeVec
	reports *prometheus.CounterVec
	api     *prometheus.CounterVec
	// Metrics of the barrier.
	waiting       prometheus.Gauge
	barriers      *prometheus.HistogramVec
	cut, restarts prometheus.Counter
	missed        prometheus.Counter
	// Metrics of deletions in mode observe, which did not wait.
	observed prometheus.Histogram
	inFlight prometheus.Counter
}

// NewMetrics registers the coordinator's metrics.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		holds: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "lameduck_holds", Help: "Admission calls that wait for gateways now.",
		}),
		drains: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "lameduck_drains", Help: "Open drains by phase.",
		}, []string{"phase"}),
		phase: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lameduck_drain_phase_seconds",
			Help:    "Time from the start of a drain on this replica until it entered a phase, by phase and reason.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2, 4, 8, 15, 30, 60},
		}, []string{"phase", "reason"}),
		agents: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "lameduck_agents", Help: "Agents by state: expected (the API lists their pods), missing (expected " +
				"and not connected here, although their containers have started), connected, suspended (they did not " +
				"acknowledge several drains in a row, and are not waited for).",
		}, []string{"state"}),
		reports: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_reports_total", Help: "Reports received from agents, by state. One may be about many " +
				"drains.",
		}, []string{"state"}),
		api: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_agent_requests_total",
			Help: "Requests of agents and other replicas, and lines of agents, by path and HTTP status.",
		}, []string{"path", "code"}),
	}
	m.byKind = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "lameduck_controller_holds",
		Help: "Admission calls of Kubernetes' workload controllers that wait for gateways now, by kind.",
	}, []string{"kind"})
	m.waiting = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "lameduck_barriers_waiting", Help: "Hooks of pods and of containers that wait here now.",
	})
	m.barriers = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "lameduck_barrier_duration_seconds",
		Help:    "Time from the deletion of a pod until its barrier allowed SIGTERM, by reason.",
		Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 1.5, 2, 3, 5, 8, 12, 20, 30, 60},
	}, []string{"reason"})
	m.cut = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "lameduck_barrier_stated_waits_cut_total",
		Help: "Barriers whose bound was shorter than a wait that a Service states, or that was learned for other " +
			"nodes.",
	})
	m.restarts = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "lameduck_barrier_restarts_total",
		Help: "Stops of containers whose pod stays: restarts by liveness, soft evictions, node shutdowns.",
	})
	m.missed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "lameduck_barrier_missed_total",
		Help: "Deletions allowed by this replica, as the opener, with the reason BarrierWaits, after which no hook " +
			"of the pod asked a coordinator: requests in flight may be lost.",
	})
	m.observed = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "lameduck_observed_seconds",
		Help: "Time from the deletion of a pod in mode observe until its gateways had stopped routing to it by " +
			"themselves, with nothing in flight, or until the Idle bound: what the deletion would have waited.",
		Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 1.5, 2, 3, 5, 8, 12, 20, 30, 60},
	})
	m.inFlight = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "lameduck_observed_in_flight_total",
		Help: "Deletions among lameduck_observed_seconds with requests or connections in flight when gateways had " +
			"stopped routing to the pod.",
	})
	r.MustRegister(m.holds, m.byKind, m.drains, m.phase, m.agents, m.reports, m.api, m.waiting, m.barriers, m.cut,
		m.restarts, m.missed, m.observed, m.inFlight)
	for _, r := range []drain.Reason{drain.Acknowledged, drain.IdleBound, drain.Deadline, drain.NoAgents,
		drain.Suspended, drain.AgentsLost, drain.LastTarget, drain.PodDeleted, drain.Uncovered,
		drain.NotEnforced} {
		m.barriers.WithLabelValues(r.String())
	}
	for kind := range OwnersHeld {
		m.byKind.WithLabelValues(kind)
	}
	for _, p := range []drain.Phase{drain.Queued, drain.Unrouting, drain.Quiescing, drain.Released} {
		m.drains.WithLabelValues(p.String())
	}
	for _, s := range []string{"expected", "missing", "connected", "suspended"} {
		m.agents.WithLabelValues(s)
	}
	for s := drain.StateUnknown; s <= drain.Idle; s++ {
		m.reports.WithLabelValues(s.String())
	}
	for _, r := range []drain.Reason{drain.Acknowledged, drain.IdleBound, drain.Deadline, drain.NoAgents,
		drain.Suspended, drain.AgentsLost} {
		m.phase.WithLabelValues(drain.Released.String(), r.String())
	}
	return m
}

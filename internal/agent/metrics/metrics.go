// Package metrics has the metrics that several parts of an agent share. Other metrics are declared
// by the package that uses them.
package metrics

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const gatewayErrors = "lameduck_agent_gateway_errors_total"

// Directed are the metrics of an agent that directs a gateway. It implements the observer
// interfaces of the director, the probes and the client.
type Directed struct {
	operations *prometheus.CounterVec
	applying   prometheus.Histogram
	reading    prometheus.Histogram
	failed     *prometheus.CounterVec
	Client
	journal *prometheus.CounterVec
	probes  *prometheus.CounterVec
	flying  *prometheus.GaugeVec
	full    prometheus.Gauge
}

// NewDirected registers the metrics of an agent that directs a gateway.
func NewDirected(r prometheus.Registerer, set *health.Set) *Directed {
	buckets := []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	factory := promauto.With(r)
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return factory.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	times := func(name, help string) prometheus.Histogram {
		return factory.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	m := &Directed{
		Client: NewClient(r),
		operations: counters("lameduck_agent_operations_total", "Operations sent to the gateway, by what was wanted.",
			"want"),
		applying: times("lameduck_agent_apply_duration_seconds",
			"Time to apply one batch of operations to the gateway."),
		reading: times("lameduck_agent_read_duration_seconds", "Time to read the gateway once."),
		failed: counters(gatewayErrors,
			"Batches and readings that the gateway did not carry out.", "call"),
		journal: counters("lameduck_agent_journal_writes_total", "Attempts to write the exclusions to disk, by result.",
			"result"),
		probes: counters("lameduck_agent_probes_total", "Probes of targets that ended, by protocol and outcome.",
			"protocol", "outcome"),
		flying: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "lameduck_agent_probes_in_flight",
			Help: "Probes by state: flying, and waiting for capacity.",
		}, []string{"state"}),
		full: factory.NewGauge(prometheus.GaugeOpts{
			Name: "lameduck_agent_probes_overloaded",
			Help: "1 while no more probes are started because too many are in flight: verdicts are late.",
		}),
	}
	r.MustRegister(targets{set})
	for _, p := range []health.Protocol{health.HTTP, health.HTTPS, health.TCP, health.GRPC} {
		for _, o := range []health.OutcomeKind{health.Success, health.HTTPFailure, health.TCPFailure, health.Timeout} {
			m.probes.WithLabelValues(p.String(), outcomeLabel(o))
		}
	}
	for _, w := range []health.Want{health.WantRouted, health.WantRemoved, health.WantAbsent} {
		m.operations.WithLabelValues(w.String())
	}
	for _, result := range []string{"ok", "error"} {
		m.journal.WithLabelValues(result)
	}
	for _, c := range []string{"apply", "read"} {
		m.failed.WithLabelValues(c)
	}
	return m
}

// Applied implements gateway.Observer.
func (m *Directed) Applied(ops []health.Op, took time.Duration, err error) {
	for _, op := range ops {
		m.operations.WithLabelValues(op.Want.String()).Inc()
	}
	m.applying.Observe(took.Seconds())
	if err != nil {
		m.failed.WithLabelValues("apply").Inc()
	}
}

// Read implements gateway.Observer.
func (m *Directed) Read(took time.Duration, err error) {
	m.reading.Observe(took.Seconds())
	if err != nil {
		m.failed.WithLabelValues("read").Inc()
	}
}

// Wrote counts an attempt to write the journal.
func (m *Directed) Wrote(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.journal.WithLabelValues(result).Inc()
}

// Failing registers a gauge of whether the journal fails.
func (m *Directed) Failing(r prometheus.Registerer, trouble func() error) {
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_agent_journal_failing",
		Help: "1 while exclusions are not kept on disk, because it fails or hangs: they are lost if the agent " +
			"crashes. Also until the first write after a file that could not be read.",
	}, func() float64 {
		if trouble() != nil {
			return 1
		}
		return 0
	}))
}

// Refusals registers how many annotations of Services have a check that cannot be read.
func (m *Directed) Refusals(r prometheus.Registerer, count func() int) {
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_agent_refused_checks",
		Help: "Annotations of Services with a health check that cannot be read. The log names them.",
	}, func() float64 { return float64(count()) }))
}

// Finished implements probe.Observer.
func (m *Directed) Finished(protocol health.Protocol, outcome health.Outcome) {
	m.probes.WithLabelValues(protocol.String(), outcomeLabel(outcome.Kind)).Inc()
}

// InFlight implements probe.Observer.
func (m *Directed) InFlight(flying, waiting int, full bool) {
	m.flying.WithLabelValues("flying").Set(float64(flying))
	m.flying.WithLabelValues("waiting").Set(float64(waiting))
	m.full.Set(0)
	if full {
		m.full.Set(1)
	}
}

func outcomeLabel(k health.OutcomeKind) string { return strings.ReplaceAll(k.String(), " ", "_") }

// targets collects the counts of the set at each scrape.
type targets struct{ set *health.Set }

var (
	targetsDesc = prometheus.NewDesc("lameduck_agent_targets",
		"Targets by pool and state: claimed by EndpointSlices, routed by the gateway, excluded (claimed and "+
			"excluded), unusable (routable and unhealthy).", []string{"pool", "state"}, nil)
	openDesc = prometheus.NewDesc("lameduck_agent_pool_failing_open",
		"1 while too few of a pool's routable targets are healthy, so that all of them get traffic.", []string{"pool"},
		nil)
	exclusionsDesc = prometheus.NewDesc("lameduck_agent_exclusions", "Exclusions by state.", []string{"state"}, nil)
)

// Describe implements prometheus.Collector.
func (t targets) Describe(out chan<- *prometheus.Desc) {
	out <- targetsDesc
	out <- openDesc
	out <- exclusionsDesc
}

// Collect implements prometheus.Collector.
func (t targets) Collect(out chan<- prometheus.Metric) {
	for pool, c := range t.set.Counts() {
		for state, n := range map[string]int{"claimed": c.Claimed, "routed": c.Routed, "excluded": c.Excluded,
			"unusable": c.Unusable} {
			out <- prometheus.MustNewConstMetric(targetsDesc, prometheus.GaugeValue, float64(n), string(pool), state)
		}
		open := 0.0
		if c.FailingOpen {
			open = 1
		}
		out <- prometheus.MustNewConstMetric(openDesc, prometheus.GaugeValue, open, string(pool))
	}
	counts := map[health.State]int{}
	for _, s := range t.set.Exclusions() {
		counts[s.State]++
	}
	for s := health.Unknown; s <= health.Idle; s++ {
		out <- prometheus.MustNewConstMetric(exclusionsDesc, prometheus.GaugeValue, float64(counts[s]), s.String())
	}
}

// Client counts the streams between an agent and coordinators. It implements client.Observer.
type Client struct{ streams prometheus.Gauge }

// NewClient registers the metrics of a client.
func NewClient(r prometheus.Registerer) Client {
	return Client{promauto.With(r).NewGauge(prometheus.GaugeOpts{Name: "lameduck_agent_streams",
		Help: "Open streams to coordinators."})}
}

// Connected implements client.Observer.
func (c Client) Connected(string) { c.streams.Inc() }

// Disconnected implements client.Observer.
func (c Client) Disconnected(string) { c.streams.Dec() }

// Failures registers the number of readings of an observed gateway that failed, under the name that
// directed ones have.
func Failures(r prometheus.Registerer, failures func() uint64) {
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: gatewayErrors, ConstLabels: prometheus.Labels{"call": "read"},
		Help: "Readings that failed.",
	}, func() float64 { return float64(failures()) }))
}

// Audits registers how often the agent's state was compared with the data plane.
func Audits(r prometheus.Registerer, audits func() gateway.Audits) {
	for result, n := range map[string]func(gateway.Audits) uint64{
		"same":      func(a gateway.Audits) uint64 { return a.Same },
		"corrected": func(a gateway.Audits) uint64 { return a.Corrected },
		"error":     func(a gateway.Audits) uint64 { return a.Failed },
	} {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "lameduck_agent_audits_total", ConstLabels: prometheus.Labels{"result": result},
			Help: "Comparisons of the agent's view of kube-proxy's rules with the kernel, by result. Corrected: " +
				"they differed, and earlier reports may have been wrong.",
		}, func() float64 { return float64(n(audits())) }))
	}
}

// PropagationBuckets are in seconds. They are fine enough for the times of a kernel, and reach
// beyond the default bound of a barrier.
var PropagationBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60}

// NewPropagation registers the histogram of how long a gateway takes to stop routing to a pod.
func NewPropagation(r prometheus.Registerer, gateway, node string) *prometheus.HistogramVec {
	labels := prometheus.Labels{"gateway": gateway}
	if node != "" {
		labels["node"] = node
	}
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "lameduck_propagation_seconds",
		Help: "Time from the start of a pod's deletion until this gateway was Removed, and Idle: what a sleep before " +
			"SIGTERM would have to cover.",
		Buckets: PropagationBuckets, ConstLabels: labels,
	}, []string{"what"})
	r.MustRegister(h)
	h.WithLabelValues("removed")
	h.WithLabelValues("idle")
	return h
}

package admission

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// refusals are the HTTP statuses for requests that are not reviews of a known kind.
var refusals = []int{
	http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusRequestTimeout,
	http.StatusRequestEntityTooLarge,
	http.StatusUnsupportedMediaType,
}

// Metrics are the metrics of the webhook.
type Metrics struct {
	answers   *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	bad       *prometheus.CounterVec
	mutations *prometheus.CounterVec
}

// NewMetrics registers the webhook's metrics.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_admission_answers_total",
			Help: "Answers to deletions and evictions of pods, by role, operation, answer and reason. Each deletion " +
				"is answered by every replica, once as the opener.",
		}, []string{"role", "operation", "answer", "reason"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lameduck_admission_duration_seconds",
			Help:    "Time from the arrival of a review to its answer, holding included.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 1.5, 2, 2.5, 5},
		}, []string{"operation", "answer"}),
		bad: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_admission_malformed_total",
			Help: "Requests that were not a review this webhook understands, by HTTP status: 404 is another path, " +
				"or a wrong secret in it.",
		}, []string{"code"}),
		mutations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_admission_mutations_total",
			Help: "Pods that were created where the barrier is enabled, by what became of them: those that are " +
				"neither Covered nor PartlyCovered stop without waiting. A pod may be counted again when other " +
				"webhooks have changed it.",
		}, []string{"coverage"}),
	}
	r.MustRegister(m.answers, m.duration, m.bad, m.mutations)
	for _, c := range coverages {
		m.mutations.WithLabelValues(string(c))
	}
	for _, code := range refusals {
		m.bad.WithLabelValues(strconv.Itoa(code))
	}
	for _, op := range []Operation{Delete, Evict} {
		for _, role := range []string{opener, witness} {
			m.series(role, op)
		}
		for _, answer := range []Action{Allow, Deny} {
			m.duration.WithLabelValues(string(op), string(answer))
		}
	}
	return m
}

// series initializes all series of answers to 0.
func (m *Metrics) series(role string, op Operation) {
	for reason, action := range answers() {
		m.answers.WithLabelValues(role, string(op), string(action), string(reason))
	}
	for _, reason := range []drain.Reason{drain.Acknowledged, drain.IdleBound, drain.Deadline, drain.NoAgents,
		drain.PodDeleted, drain.Suspended, drain.AgentsLost, drain.Uncovered} {
		m.answers.WithLabelValues(role, string(op), string(Allow), reason.String())
	}
}

// The roles of a replica in one deletion, as metrics and logs name them. See package peers.
const (
	opener  = "opener"
	witness = "witness"
)

func (m *Metrics) answered(role string, op Operation, answer Action, reason string, took time.Duration) {
	m.answers.WithLabelValues(role, string(op), string(answer), reason).Inc()
	m.duration.WithLabelValues(string(op), string(answer)).Observe(took.Seconds())
}

func (m *Metrics) refused(code int) { m.bad.WithLabelValues(strconv.Itoa(code)).Inc() }

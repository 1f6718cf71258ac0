package hooks

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// outcome is how a wait ended, as the metric names it. Most are the reasons of the ledger.
type outcome string

const (
	// outBound: the bound came before an answer.
	outBound outcome = "Bound"
	// outLocal: no coordinator could be asked, and this node's kernel has stopped routing. Other
	// gateways may still route to the pod.
	outLocal outcome = "Local"
	// outRestart: only a container of the pod is stopped, or the node. Directed gateways have
	// excluded the pod.
	outRestart outcome = "Restart"
	// outGone: the pod does not exist any more.
	outGone outcome = "Gone"
	// outNoTime: the deletion's grace period is not longer than the application's own. Uncovered.
	outNoTime outcome = "NoTime"
	// outNoTargets: the pod has no address to watch. Uncovered.
	outNoTargets outcome = "NoTargets"
	// outStopping: this agent had to stop. Uncovered.
	outStopping outcome = "Stopping"
	// outUnknown: no pod of this node has the id.
	outUnknown outcome = "Unknown"
	// outForeign: the hook came from an address that is neither this node's nor the pod's.
	outForeign outcome = "Foreign"
	// outTooMany: too many waits are open. Uncovered.
	outTooMany outcome = "TooMany"
)

// outcomes lists the values for which the metric is initialized.
var outcomes = []outcome{
	outBound, outLocal, outRestart, outGone, outNoTime, outNoTargets, outStopping, outUnknown, outForeign, outTooMany,
	outcome(drain.Acknowledged.String()), outcome(drain.IdleBound.String()), outcome(drain.Deadline.String()),
	outcome(drain.NoAgents.String()),
	outcome(drain.LastTarget.String()), outcome(drain.Suspended.String()), outcome(drain.AgentsLost.String()),
	outcome(drain.PodDeleted.String()), outcome(drain.Uncovered.String()), outcome(drain.NotEnforced.String()),
}

// metrics are the metrics of hooks.
type metrics struct {
	waits   *prometheus.CounterVec
	waiting prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		waits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_barrier_waits_total",
			Help: "Waits of hooks that ended, by outcome. Hooks of one pod that wait at the same time are one.",
		}, []string{"outcome"}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{Name: "lameduck_barrier_waiting",
			Help: "Pods whose hooks wait now."}),
	}
	r.MustRegister(m.waits, m.waiting)
	for _, o := range outcomes {
		m.waits.WithLabelValues(string(o))
	}
	return m
}

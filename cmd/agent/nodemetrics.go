package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
)

// outcome is how a wait ended, as the metric names it. Most are the reasons of the ledger.
type outcome string

const (
	// outBound: the bound came before an answer.
	outBound outcome = "Bound"
	// outLocal: no coordinator could be asked; this node's kernel alone has let go. Uncovered.
	outLocal outcome = "Local"
	// outRestart: not the pod is stopped, but a container of it, or its node. Directed gateways were told.
	outRestart outcome = "Restart"
	// outGone: the pod does not exist any more.
	outGone outcome = "Gone"
	// outNoTime: the deletion leaves no more than the application's own grace. Uncovered.
	outNoTime outcome = "NoTime"
	// outNoTargets: the pod has no address that could be watched. Uncovered.
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

// outcomes lists what the metric begins with.
var outcomes = []outcome{
	outBound, outLocal, outRestart, outGone, outNoTime, outNoTargets, outStopping, outUnknown, outForeign, outTooMany,
	outcome(drain.Acknowledged.String()), outcome(drain.IdleBound.String()), outcome(drain.Deadline.String()), outcome(drain.NoAgents.String()),
	outcome(drain.LastTarget.String()), outcome(drain.Suspended.String()), outcome(drain.AgentsLost.String()), outcome(drain.Dead.String()),
}

// nodeMetrics are the node agent's. They observe the client too.
type nodeMetrics struct {
	waits       *prometheus.CounterVec
	waiting     prometheus.Gauge
	waited      prometheus.Histogram
	propagation *prometheus.HistogramVec
	cleaned     *prometheus.CounterVec
	streams     prometheus.Gauge
	posts       *prometheus.CounterVec
}

// propagationBuckets are finer where a kernel is quick, and reach beyond a barrier's bound.
var propagationBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60}

// newPropagation registers the histogram of how long a gateway takes to let go.
func newPropagation(r prometheus.Registerer, gateway, node string) *prometheus.HistogramVec {
	labels := prometheus.Labels{"gateway": gateway}
	if node != "" {
		labels["node"] = node
	}
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "lameduck_propagation_seconds",
		Help:    "Time from when a pod began to go until this gateway was Removed, and Idle: what a sleep before SIGTERM would have to cover.",
		Buckets: propagationBuckets, ConstLabels: labels,
	}, []string{"what"})
	r.MustRegister(h)
	h.WithLabelValues("removed")
	h.WithLabelValues("idle")
	return h
}

func newNodeMetrics(r prometheus.Registerer, node string) *nodeMetrics {
	m := &nodeMetrics{
		waits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_barrier_waits_total", Help: "Waits of hooks that ended, by outcome. Repeats and several containers of one pod at one time are one.",
		}, []string{"outcome"}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{Name: "lameduck_barrier_waiting", Help: "Pods whose hooks wait now."}),
		waited: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "lameduck_barrier_wait_seconds", Help: "Time that hooks waited.", Buckets: propagationBuckets,
		}),
		cleaned: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_agent_cleaned_total", Help: "Pods that are gone whose connections were to be forgotten, by result. Skipped: the address may be another pod's.",
		}, []string{"result"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{Name: "lameduck_agent_streams", Help: "Open streams to coordinators."}),
		posts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lameduck_agent_posts_total", Help: "Posts to coordinators, by path and result.",
		}, []string{"path", "result"}),
	}
	m.propagation = newPropagation(r, "kube-proxy", node)
	r.MustRegister(m.waits, m.waiting, m.waited, m.cleaned, m.streams, m.posts)
	for _, o := range outcomes {
		m.waits.WithLabelValues(string(o))
	}
	for _, result := range []string{"ok", "error", "skipped"} {
		m.cleaned.WithLabelValues(result)
	}
	for _, p := range []string{wire.DeclarationsPath, wire.ReportsPath, wire.BarriersPath} {
		m.posts.WithLabelValues(p, "ok")
		m.posts.WithLabelValues(p, "error")
	}
	return m
}

// registerAudits makes the metric of the kernel's audits.
func registerAudits(r prometheus.Registerer, k kernel) {
	for result, n := range map[string]func(kubeproxy.Audits) uint64{
		"same":      func(a kubeproxy.Audits) uint64 { return a.Same },
		"corrected": func(a kubeproxy.Audits) uint64 { return a.Corrected },
		"error":     func(a kubeproxy.Audits) uint64 { return a.Failed },
	} {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "lameduck_agent_audits_total", ConstLabels: prometheus.Labels{"result": result},
			Help: "Comparisons of what the agent knows of kube-proxy's rules with the kernel, by result. Corrected: they differed, and reports of before may have been wrong.",
		}, func() float64 { return float64(n(k.Audits())) }))
	}
}

// Connected implements client.Observer.
func (m *nodeMetrics) Connected(string) { m.streams.Inc() }

// Disconnected implements client.Observer.
func (m *nodeMetrics) Disconnected(string) { m.streams.Dec() }

// Posted implements client.Observer.
func (m *nodeMetrics) Posted(path string, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.posts.WithLabelValues(path, result).Inc()
}

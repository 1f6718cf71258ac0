package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/lameduck-io/lameduck/internal/agent/hooks"
	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/internal/serve"
)

const (
	shutdownGrace = 2 * time.Second
	// opsWrite is how long an answer to an operator may take.
	opsWrite = 30 * time.Second
)

func newRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

// opsRouter returns the routes for metrics and health. missing returns what the agent still waits
// for before it is ready. Empty: it is ready.
func opsRouter(registry *prometheus.Registry, following *serving.Health, missing func() string) *mux.Router {
	r := mux.NewRouter()
	r.Methods(http.MethodGet).Path("/metrics").Handler(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	r.Methods(http.MethodGet, http.MethodHead).Path("/livez").Handler(serving.Handler(following.Livez))
	r.Methods(http.MethodGet, http.MethodHead).Path("/healthz").Handler(serving.Handler(following.Healthz))
	r.Methods(http.MethodGet).Path("/readyz").HandlerFunc(answer(missing))
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_agent_ready", Help: "1 while /readyz answers 200.",
	}, func() float64 {
		if missing() != "" {
			return 0
		}
		return 1
	}))
	return r
}

// answer answers 200 if nothing is missing.
func answer(missing func() string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if text := missing(); text != "" {
			http.Error(w, text, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}

// opsServer returns the server for metrics and health, with limits.
func opsServer(handler http.Handler, log *slog.Logger) serve.Server {
	return serve.Server{
		Name: "metrics", Handler: handler, Conns: 100, ReadTime: hooks.HeaderTime, WriteTime: opsWrite,
		Grace: shutdownGrace, Log: log,
	}
}

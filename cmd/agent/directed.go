package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/agent/exclusion"
	"github.com/lameduck-io/lameduck/internal/agent/healthview"
	"github.com/lameduck-io/lameduck/internal/agent/journal"
	"github.com/lameduck-io/lameduck/internal/agent/liveness"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/internal/agent/source"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/pkg/health/probe"
)

// servicesTimeout is how long a starting agent waits for the Services' annotations before it
// programs the gateway. Without annotations no target has a check, and targets that an earlier
// process had removed as unhealthy would be routed again.
const servicesTimeout = time.Second

// runDirected creates all parts of an agent that directs a gateway, each after the parts that it
// depends on, and runs them until ctx is done.
func runDirected(ctx context.Context, o options, kube kubernetes.Interface, bundle *discovery.Bundle,
	g gateway.Directed, log *slog.Logger) error {
	registry := newRegistry()
	checked := cmp.Or(o.file.Health, &healthFile{MinHealthyPercent: minHealthyPercent})
	set := health.New(health.Options{UsablePercent: checked.MinHealthyPercent})
	m := metrics.NewDirected(registry, set)
	news := signal.New() // reports may have changed
	kept, err := journal.Open(ctx, o.file.StateDir, func(err error) {
		m.Wrote(err)
		news.Raise() // what is in the file may be reported
	}, log)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return fmt.Errorf("%w: give each agent a stateDir of its own", err)
	case err != nil:
		return err
	}
	defer kept.Close()
	m.Failing(registry, kept.Err)

	following := serving.New(o.file.HealthTimeout.Duration)
	director := gateway.NewDirector(exclusion.WriteAhead{Directed: g, Journal: kept}, set, log,
		gateway.Hooks{Observer: m, Followed: liveness.Follow(following), Changed: news.Raise})
	director.Starter, _ = g.(gateway.Starter)
	probes := &probe.Runner{Source: set, Observer: m}
	wake := func() {
		liveness.Queue(following)
		director.Wake()
	}
	routes := o.kind.Routes()
	ports := source.Ports(routes)
	endpoints, err := source.New(kube, ports, o.file.EndpointsLag.Duration, set, func(families []serving.Family) {
		for _, f := range families {
			following.Queued(f, time.Now())
		}
		director.Wake()
		probes.Wake()
	}, log)
	if err != nil {
		return err
	}
	checks, err := source.NewChecks(kube, routes, !checked.IgnoreAnnotations, set, probes.Wake, log)
	if err != nil {
		return err
	}
	if r, ok := g.(gateway.Refuser); ok {
		checks.Refuse = r.Refuse
	}
	m.Refusals(registry, checks.Refusals)
	exclusions := exclusion.New(time.Now(), set, kept, ports, wake,
		metrics.NewPropagation(registry, o.kind.Name(), o.nodeName), log)
	kind, ok := o.kind.(gateway.DirectedKind)
	follows := ok && !kind.OwnsPool()
	if follows {
		exclusions.Follow()
	}
	tasks := []serve.Task{
		{Name: "journal", Run: kept.Run},
		{Name: "probes", Run: probes.Run},
		{Name: "checks", Run: checks.Run},
		{Name: "endpoints", Run: endpoints.Run},
		{Name: "expiries", Run: func(ctx context.Context) error {
			return exclusions.Expire(ctx, func(ctx context.Context) error { return endpoints.Fresh(ctx, follows) })
		}},
	}
	var learned <-chan struct{}
	if conf := o.file.Coordinators; conf != nil {
		if o.file.StateDir == "" {
			log.Warn("exclusions are not kept in a file: stateDir is not set, and the gateway has no folder that " +
				"outlives the agent")
		}
		believed := healthview.NewSummary(set, ports, endpoints.Names)
		c, watched := discovery.Connect(*conf, bundle), &exclusion.Watches{Set: set}
		c.Watches = watched
		c.Gateway, c.Exclusions, c.Health, c.Observer, c.Log = o.kind.Name(), exclusions, believed.Last, m, log
		c.Routes = declared(o.kind, drain.Directed)
		learned = c.Learned()
		ends := leaving{gateway: g, programmed: director.Programmed, leave: c.Leave, log: log}
		tasks = append(tasks,
			serve.Task{Name: "coordinators", Last: true, Run: func(ctx context.Context) error {
				return ends.outlive(ctx, c.Run)
			}},
			serve.Task{Name: "reports", Run: func(ctx context.Context) error {
				return news.Follow(ctx, func() {
					if exclusions.Changed(time.Now()) || len(watched.Reports(time.Now())) > 0 {
						c.Wake()
					}
				})
			}},
			serve.Task{Name: "targetHealth", Run: believed.Run},
			serve.Task{Name: "replicas", Run: func(ctx context.Context) error {
				return discovery.Follow(ctx, kube, *conf, o.file.StateDir, c.Replicas, log)
			}},
			serve.Task{Name: "caBundle", Run: func(ctx context.Context) error { return bundle.Run(ctx, kube) }},
		)
	}
	start := &starting{director: director, learned: learned, checks: checks.Known(), log: log}
	tasks = append(tasks, serve.Task{Name: "gateway", Run: start.run})
	if o.nodeName != "" {
		tasks = append(tasks, serve.Task{Name: "node", Run: func(ctx context.Context) error {
			return liveness.WatchNode(ctx, kube, o.nodeName, following.SetEligible, log)
		}})
	}
	listener, err := net.Listen("tcp", o.metrics)
	if err != nil {
		return fmt.Errorf("--metrics-address %q: %w", o.metrics, err)
	}
	log.Info("started", "metrics", listener.Addr().String(), "routes", len(ports),
		"endpointsLag", o.file.EndpointsLag.String())
	server := opsServer(directedOps(registry, following, start, endpoints,
		healthview.Targets(set, ports, endpoints.Names)), log)
	server.Listener = listener
	return serve.All(ctx, append(tasks, server.Task())...)
}

// directedOps returns the handler for metrics, health and /v1/targets.
func directedOps(registry *prometheus.Registry, following *serving.Health, start *starting, endpoints *source.Endpoints,
	targets http.Handler) http.Handler {
	r := opsRouter(registry, following, func() string {
		switch {
		case !start.learnt.Load():
			return "open drains are not known yet"
		case !endpoints.Synced():
			return endpoints.Missing()
		case !start.director.Programmed():
			return "the gateway is not programmed from EndpointSlices yet"
		}
		return ""
	})
	r.Methods(http.MethodGet).Path("/startz").HandlerFunc(answer(start.missing))
	r.Methods(http.MethodGet).Path(healthview.Path).Handler(targets)
	return r
}

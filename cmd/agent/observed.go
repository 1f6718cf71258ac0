package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/agent/hooks"
	"github.com/lameduck-io/lameduck/internal/agent/listen"
	"github.com/lameduck-io/lameduck/internal/agent/liveness"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/internal/agent/observation"
	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

const (
	// waitGrace is how long a node agent that gets SIGTERM still serves waiting hooks. It is longer
	// than hooks wait for open connections, and shorter than terminationGracePeriodSeconds in the
	// manifests.
	waitGrace = 25 * time.Second
	// waitConns bounds the connections of hooks: each hook has one.
	waitConns = 2048
	// startMost is how long an agent waits for its gateway to start before it connects to
	// coordinators. It may ask at a wrong address, and the gateway send.
	startMost = 5 * time.Minute
	// succeedMost is how long an agent may take to learn the pods of its node while the one that it
	// replaces answers the readiness probe in its place. It is shorter than minReadySeconds in the
	// manifests, so that an update stops at agents that cannot do their work.
	succeedMost = 4 * time.Second
	// absentEvery is the interval at which the agent checks whether the gateway is absent.
	absentEvery = 200 * time.Millisecond
)

// runObserved creates all parts of an agent that observes a gateway, each after the parts that it
// depends on, and runs them until ctx is done.
func runObserved(ctx context.Context, o options, kube kubernetes.Interface, bundle *discovery.Bundle,
	g gateway.Observed, log *slog.Logger) error {
	registry := newRegistry()
	if a, ok := g.(gateway.Auditor); ok {
		metrics.Audits(registry, a.Audits)
	}
	if p, ok := g.(gateway.Polled); ok {
		metrics.Failures(registry, p.Failures)
	}
	news := signal.New() // what coordinators are told may have changed
	watched := observation.New(g, news.Raise, metrics.NewPropagation(registry, o.kind.Name(), o.nodeName), log)
	onNode := g.Population() == gateway.Nodes
	pods := nodepods.New(func(p nodepods.Pod) { watched.Clean(p.Pod, p.Targets) }, log)
	following := serving.New(o.file.HealthTimeout.Duration)
	streams := metrics.NewClient(registry)

	// Tasks that hooks need for their answers are Last: they end after the hooks.
	tasks := []serve.Task{
		{Name: "gateway", Run: g.Run, Last: true},
		{Name: "observed", Last: true, Run: func(ctx context.Context) error {
			return watched.Run(ctx, func(targets []netip.AddrPort) bool { return !pods.Owned(targets) })
		}},
	}
	if o.nodeName != "" {
		tasks = append(tasks, serve.Task{Name: "node", Run: func(ctx context.Context) error {
			return liveness.WatchNode(ctx, kube, o.nodeName, following.SetEligible, log)
		}})
	}
	if onNode {
		tasks = append(tasks, serve.Task{Name: "pods", Last: true, Run: func(ctx context.Context) error {
			return pods.Run(ctx, kube, o.nodeName)
		}})
	}
	ask := func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
		return wire.BarrierStatus{}, client.ErrNoCoordinator
	}
	if conf := o.file.Coordinators; conf != nil {
		routes := declared(o.kind, drain.Observed)
		c := discovery.Connect(*conf, bundle)
		c.Gateway, c.Population, c.Observer, c.Log, c.Watches = o.kind.Name(), g.Population(), streams, log, watched
		c.Routes = routes
		ask = c.Barrier
		connect := c.Run
		if p, ok := g.(gateway.Polled); ok {
			connect = func(ctx context.Context) error {
				select {
				case <-ctx.Done():
					return nil
				case <-p.Began():
				case <-time.After(startMost):
					log.Warn("the gateway has not started: its agent connects to coordinators all the same",
						"after", startMost)
				}
				return c.Run(ctx)
			}
		}
		tasks = append(tasks,
			serve.Task{Name: "coordinators", Run: connect, Last: true},
			serve.Task{Name: "reports", Last: true, Run: func(ctx context.Context) error {
				return news.Follow(ctx, c.Wake)
			}},
			serve.Task{Name: "absence", Run: func(ctx context.Context) error {
				return followAbsent(ctx, g, routes, c.Declare, log)
			}, Last: true},
			serve.Task{Name: "caBundle", Run: func(ctx context.Context) error { return bundle.Run(ctx, kube) },
				Last: true},
			serve.Task{Name: "replicas", Last: true, Run: func(ctx context.Context) error {
				return discovery.Follow(ctx, kube, *conf, "", c.Replicas, log)
			}},
		)
	} else {
		log.Warn("no coordinators are configured: hooks wait only for this node's gateway")
	}
	live := func(ctx context.Context, pod drain.Pod) (nodepods.Pod, bool, error) {
		return nodepods.Live(ctx, kube, pod)
	}
	waits := hooks.New(pods, g, live, ask, registry, log)
	leave := make(chan struct{})
	tasks = append(tasks,
		serve.Task{Name: "hooks", Run: func(ctx context.Context) error { return waits.Run(ctx, waitGrace) }},
		serve.Task{Name: "leave", Run: func(ctx context.Context) error {
			<-ctx.Done()
			close(leave)
			return nil
		}})
	// missing counts the wait addresses at which this agent does not listen yet. The process that
	// listens there instead need not be an agent, so /readyz reports it.
	var missing atomic.Int64
	missing.Store(int64(len(o.file.WaitAddresses)))
	for _, address := range o.file.WaitAddresses {
		// The server keeps listening while hooks wait. Otherwise new hooks would be refused and end
		// immediately.
		task, err := listen.Address{
			Address: address, Shared: true, Ready: pods.Synced, Got: func() { missing.Add(-1) }, Leave: leave, Log: log,
		}.Task(serve.Server{
			Name: "wait " + address, Handler: waits.Handler(), Conns: waitConns, ReadTime: hooks.HeaderTime,
			WriteTime: hooks.HeaderTime, Grace: waitGrace + shutdownGrace, Log: log,
		})
		if err != nil {
			return fmt.Errorf("listen for hooks: %w", err)
		}
		tasks = append(tasks, task)
	}
	ops := opsRouter(registry, following, func() string {
		switch {
		case onNode && !pods.Synced():
			return "the pods of this node are not known yet"
		case missing.Load() != 0:
			return "another process has an address of hooks, and does not share it"
		}
		return ""
	})
	// Not shared, so that probes always reach the same agent. During an update that is the old
	// agent until it ends.
	alone := make(chan struct{})
	opsTask, err := listen.Address{Address: o.metrics, Got: func() { close(alone) }, Log: log}.Task(opsServer(ops, log))
	if err != nil {
		return fmt.Errorf("--metrics-address %q: %w", o.metrics, err)
	}
	tasks = append(tasks, serve.Task{Name: "succession", Run: func(ctx context.Context) error {
		select {
		case <-alone:
		case <-ctx.Done():
		case <-time.After(succeedMost):
			if onNode && !pods.Synced() {
				return fmt.Errorf("the pods of this node are not known after %s, and another process answers at %s: "+
					"this one ends, because that may be the agent that it is to replace", succeedMost, o.metrics)
			}
		}
		<-ctx.Done()
		return nil
	}})
	log.Info("started", "metrics", o.metrics, "hooks", o.file.WaitAddresses, "node", o.nodeName)
	return serve.All(ctx, append(tasks, opsTask)...)
}

// followAbsent checks until ctx is done whether the gateway is absent from this node, and in which
// mode it is, and declares each change to coordinators. If kube-proxy is absent, another program
// chooses the pod behind a Service's address. The agent then cannot acknowledge, and drains do not
// wait for it. The declared mode names such a program, if it is known, also beside kube-proxy.
func followAbsent(ctx context.Context, g gateway.Observed, routes []drain.Route, declare func(string, []drain.Route),
	log *slog.Logger) error {
	absent := slices.Clone(routes)
	for i := range absent {
		absent[i].Via = drain.ClusterIP
	}
	ticker := time.NewTicker(absentEvery)
	defer ticker.Stop()
	moder, _ := g.(gateway.Moder)
	sharer, _ := g.(gateway.Sharer)
	type state struct {
		mode string
		gone bool
	}
	mode := "" // the last one that was known
	for was := (state{}); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if moder != nil {
			mode = cmp.Or(moder.Mode(), mode)
		}
		is := state{mode, g.Absent()}
		if is.gone {
			is.mode = wire.GatewayAbsent
		}
		if sharer != nil {
			if name := sharer.Beside(); name != "" { // it may end at any time
				is.mode = wire.Beside + name
			}
		}
		switch {
		case is == was:
			continue
		case is.gone:
			log.Warn("the gateway is absent from this node: what sends to pods cannot be observed here, and no "+
				"barrier waits for this node", "mode", is.mode)
			declare(is.mode, absent)
		default:
			log.Info("the gateway is here: barriers wait for it on this node", "mode", is.mode)
			declare(is.mode, routes)
		}
		was = is
	}
}

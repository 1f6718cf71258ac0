package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/internal/kubeclient"
	"github.com/lameduck-io/lameduck/internal/peers"
	"github.com/lameduck-io/lameduck/internal/podcontext"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// shutdownGrace is how long running requests may take after the shutdown has begun.
	shutdownGrace = 5 * time.Second
	// admissionConns bounds the connections of API servers. An API server uses one for each open
	// call, and keeps up to 25 unused ones. By default 64 calls are held; others take milliseconds.
	admissionConns = 1000
	// readTime bounds how long a request of an operator takes to arrive. It does not apply to
	// admission reviews, which may take as long as the API server waits. In a burst this process
	// reads late, and a deletion whose review was cut would continue without an answer.
	readTime = 5 * time.Second
	// agentConns bounds the connections of agents that serve no authenticated request: new ones,
	// and unused ones, which an agent closes after a minute. Streams do not count. agentTime bounds
	// how long a post takes to arrive: after that the agent has given up. It also bounds how long
	// an answer takes, except on streams, where the handler sets the time of each write.
	agentConns = 4096
	agentTime  = 10 * time.Second
	// writeMargin is added to the webhook's timeout to bound the write of an answer. The API server
	// stops waiting at that timeout.
	writeMargin = 5 * time.Second
	// opsConns bounds the connections of operators, and opsWrite the time to write an answer to
	// them. probeTime bounds a probe of the kubelet.
	opsConns  = 100
	opsWrite  = 30 * time.Second
	probeTime = 5 * time.Second
)

// serveAll creates all parts, each after the parts that it depends on, and runs them until ctx is
// done.
func serveAll(ctx context.Context, o options, log *slog.Logger) error {
	klog.SetSlogLogger(log)
	crlog.SetLogger(logr.FromSlogHandler(log.Handler()))
	kube, config, err := kubeclient.New(o.kubeconfig, "lameduck-webhook")
	if err != nil {
		return err
	}
	live, err := client.New(config, client.Options{Scheme: clientscheme.Scheme})
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	known, err := cache.New(config, cache.Options{
		Scheme:           clientscheme.Scheme,
		Mapper:           meta.FirstHitRESTMapper{MultiRESTMapper: meta.MultiRESTMapper{watched(), live.RESTMapper()}},
		DefaultTransform: strip,
		// Objects from this cache are only read, never changed.
		DefaultUnsafeDisableDeepCopy: ptr.To(true),
		ReaderFailOnMissingInformer:  true,
	})
	if err != nil {
		return fmt.Errorf("cache of the cluster: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	who := identity.New(kube)
	who.Log = log
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_token_keys",
		Help: "Public keys of the API server that are known here. 0: tokens cannot be verified before the API server " +
			"is asked.",
	}, func() float64 { return float64(who.Keys()) }))
	self := drain.Holder{Replica: o.replica, Epoch: rand.Text()}
	index := endpoints.NewIndex()
	around := &podcontext.Source{Reader: known, Mode: o.Mode, Log: log, Now: time.Now}
	metrics := admission.NewMetrics(registry)
	proof, err := newServingTLS(o, kube, metrics, registry, log)
	if err != nil {
		return err
	}
	others, err := newReplicas(o, who, proof, log)
	if err != nil {
		return err
	}
	started := time.Now()
	ready := &peers.Readiness{Certificate: proof.ready, Others: &others.Table}
	others.Able = ready.Check
	coord := coordinator.New(self, o.times, coordinator.Options{
		Able: ready.Check, Elsewhere: ready.Elsewhere,
		MaxHolds: o.Holds.Most, MaxHoldsPerOwner: o.Holds.PerOwner, Pods: pods{live}, Authenticate: who, Log: log,
		Metrics:     coordinator.NewMetrics(registry),
		PodContexts: around, Scope: o.Barrier.Ask, Sampling: drain.Sampling{AllUpTo: o.Barrier.Sampling.AllUpTo,
			Size: o.Barrier.Sampling.Size, Learn: o.Barrier.Sampling.LearnFrom, Bound: o.Barrier.Bound.Duration},
	})
	roster := newRoster(coord, who, log)
	watch := watches{coord: coord, index: index, roster: roster, others: others}
	ready.Synced, ready.Expecting = watch.synced, coord.Expecting
	if err := watch.register(ctx, known); err != nil {
		return err
	}
	// A replica does not wait for Services. Without the right to watch them, it knows no stated
	// waits and no local traffic policies.
	services, err := known.GetInformer(ctx, &corev1.Service{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watch Services: %w", err)
	}
	covers := &coverage.Source{Reader: known, Gateways: o.Gateways, Agent: coord.Agent,
		Everywhere: func() []drain.Acknowledger {
			agents, _ := coord.Acknowledgers(nil)
			return agents
		},
		Beside: coord.Beside, Asks: coord.Asks, Excluded: o.excluded}
	registry.MustRegister(covers)
	covers.Synced = func() bool { return covers.Asked() && watch.synced() && services.HasSynced() }
	around.Index = admission.Ahead{Slices: index, Reader: known, Synced: services.HasSynced, Ledger: coord,
		Now: time.Now}
	around.Known, around.Synced, around.Coverage = watch.synced, services.HasSynced, covers
	around.Going = func(uid drain.UID) bool { return coord.Pod(uid).Terminating }
	events := newEvents(kube, o.replica, coord.Warned, log)
	handler := &admission.Handler{
		Cluster: &admission.Cluster{
			Reader: known, Live: live, Ledger: coord, Synced: watch.synced, Excluded: o.excluded,
			Slices: around.Index,
			Mode:   o.Mode, Coverage: covers, Started: started, Services: services.HasSynced,
		},
		Times: o.times, Events: events, Log: log, Metrics: metrics, Replica: o.replica, Others: others.Peers,
	}
	coord.Claimant = handler
	mutator := &admission.Mutator{Reader: known, Services: services.HasSynced, Excluded: o.excluded,
		Barrier: o.Barrier.hook(), Log: log, Metrics: metrics}
	missing := missingOf(mutator, watch.synced)
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_barrier_missing_pods",
		Help: "Pods that ask for the barrier and were created without it, because no coordinator answered or their " +
			"namespace was labeled later.",
	}, func() float64 { return float64(len(missing())) }))
	door := proof.door
	secure := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: proof.certificate}
	var listeners [5]net.Listener
	for i, of := range []struct {
		key, address string
		config       net.ListenConfig
	}{
		{key: "admission", address: o.Addresses.Admission},
		{"agents", o.Addresses.Agents, coordinator.ListenConfig(o.times.Away)},
		{key: "metrics", address: o.Addresses.Metrics}, {key: "probes", address: o.Addresses.Probes},
		{key: "dashboard", address: o.Addresses.Dashboard},
	} {
		if of.address == "" {
			continue // the dashboard is not served
		}
		if listeners[i], err = of.config.Listen(ctx, "tcp", of.address); err != nil {
			return fmt.Errorf("addresses.%s %q (with the chart, webhook.ports): %w", of.key, of.address, err)
		}
		defer listeners[i].Close()
	}
	looks := listeners[4]
	if looks != nil {
		log.Info("dashboard", "address", looks.Addr().String(), "open", dashboard.Loopback(looks.Addr()))
	}
	view := dashboard.New(dashboard.Options{
		Coordinator: coord, Explainer: handler.Cluster, Reviewer: who,
		Pod: podOf(known, watch.synced), Coverage: covers.Of, Summary: covers.Summary, Missing: missing, Log: log,
		Unasked: proof.unasked,
		Views: func(ctx context.Context) ([]api.View, []string) {
			return peers.Ask[api.View](ctx, others.Peers, wire.ShownPath)
		},
		Reports: func(ctx context.Context) ([]api.Report, []string) {
			return peers.Ask[api.Report](ctx, others.Peers, wire.ReportPath)
		},
		Explanations: func(ctx context.Context, pod string) ([]api.Explanation, []string) {
			return peers.Ask[api.Explanation](ctx, others.Peers, wire.ExplainPath+pod)
		},
	})
	coord.Shown, others.Polled = view.Shown, coord.Polled
	log.Info("started", "holder", self.String(), "admission", listeners[0].Addr().String(),
		"agents", listeners[1].Addr().String(),
		"metrics", listeners[2].Addr().String(), "probes", listeners[3].Addr().String(), "hold", o.times.Hold.String(),
		"deadline", o.times.Deadline.String())

	stop := func() {
		ready.Stop()
		coord.Stop()
	}
	// The servers for admission calls and agents end first. Tasks that they depend on end after
	// them.
	return serve.All(ctx,
		serve.Task{Name: "cache", Run: known.Start, Last: true},
		serve.Task{Name: "certificates", Run: proof.run, Last: true},
		serve.Task{Name: "coordinator", Run: coord.Run, Last: true},
		serve.Task{Name: "roster", Run: roster.run, Last: true},
		serve.Task{Name: "replicas", Run: func(ctx context.Context) error {
			return others.Run(ctx, watch.synced)
		}, Last: true},
		serve.Task{Name: "kinds of routes", Run: func(ctx context.Context) error {
			return covers.Follow(ctx, known, live.RESTMapper(), log)
		}, Last: true},
		serve.Task{Name: "events", Run: events.run, Last: true},
		serve.Server{
			Name: "admission", Listener: listeners[0], TLS: secure,
			Handler: door.Guard(serve.KeepConn(handler), serve.KeepConn(mutator)), Conns: admissionConns,
			ReadTime:  o.times.Webhook,
			WriteTime: o.times.Webhook + writeMargin, Stop: stop, Delay: o.Times.ShutdownDelay.Duration,
			Grace: shutdownGrace,
			Keep:  func() bool { return ready.Check() == nil }, Log: log,
		}.Task(),
		serve.Server{
			Name: "agents", Listener: listeners[1], TLS: secure, Handler: coord.Handler(), Conns: agentConns,
			ReadTime: agentTime, WriteTime: agentTime,
			Stop: stop, Grace: shutdownGrace, Log: log,
		}.Task(),
		lastTask(serve.Server{Name: "metrics", Listener: listeners[2], Handler: metricsOnly(registry),
			ReadTime: readTime, WriteTime: opsWrite, Log: log}),
		lastTask(serve.Server{Name: "probes", Listener: listeners[3], Handler: probes(coord.Live, ready.Check),
			ReadTime: probeTime, WriteTime: probeTime, Log: log}),
		dashboardTask(looks, secure, view, log),
	)
}

// lastTask serves operators until everything else has ended, so that the last logs and metrics can
// be read.
func lastTask(s serve.Server) serve.Task {
	s.Conns = opsConns
	task := s.Task()
	task.Last = true
	return task
}

func metricsOnly(registry *prometheus.Registry) http.Handler {
	r := http.NewServeMux()
	r.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return r
}

// probes serves the kubelet's probes. It has its own port, which no other pod needs to reach, so
// that requests for metrics cannot use up its connections.
func probes(live, ready func() error) http.Handler {
	r := http.NewServeMux()
	for path, check := range map[string]func() error{"/livez": live, "/readyz": ready} {
		r.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			if err := check(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	return r
}

// watched returns a RESTMapper with the kinds that every cluster has, so that a replica can start
// while the API server does not answer.
func watched() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for _, of := range []schema.GroupVersionKind{
		corev1.SchemeGroupVersion.WithKind("Pod"), corev1.SchemeGroupVersion.WithKind("Service"),
		discovery.SchemeGroupVersion.WithKind("EndpointSlice"),
		policyv1.SchemeGroupVersion.WithKind("PodDisruptionBudget"),
	} {
		m.Add(of, meta.RESTScopeNamespace)
	}
	m.Add(corev1.SchemeGroupVersion.WithKind("Namespace"), meta.RESTScopeRoot)
	m.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	return m
}

// watches feed the coordinator and the index from the cache.
type watches struct {
	coord  *coordinator.Coordinator
	index  *endpoints.Index
	roster *roster
	others *replicas
	has    []func() bool
	// all becomes true when everything has synced, and stays so.
	all atomic.Bool
}

func (w *watches) register(ctx context.Context, known cache.Cache) error {
	pod := handle(
		func(p *corev1.Pod) {
			if p.DeletionTimestamp != nil {
				w.coord.GatePassed(drain.UID(p.UID))
			} else if at, ready := podfacts.BackSince(p); ready {
				w.coord.Ready(drain.UID(p.UID), at)
			}
			w.roster.set(p)
			w.others.set(p)
		},
		func(p *corev1.Pod) {
			w.coord.Deleted(drain.UID(p.UID))
			w.roster.gone(p)
			w.others.gone(p)
		})
	for _, of := range []struct {
		object  client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&corev1.Pod{}, pod},
		{&discovery.EndpointSlice{}, w.slices()},
		{&corev1.Namespace{}, nil},
		{&corev1.Node{}, nil},
		{&policyv1.PodDisruptionBudget{}, nil},
	} {
		informer, err := known.GetInformer(ctx, of.object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch %T: %w", of.object, err)
		}
		if of.handler == nil {
			w.has = append(w.has, informer.HasSynced)
			continue
		}
		registration, err := informer.AddEventHandler(of.handler)
		if err != nil {
			return fmt.Errorf("watch %T: %w", of.object, err)
		}
		w.has = append(w.has, registration.HasSynced)
	}
	return nil
}

// slices feeds the index.
func (w *watches) slices() toolscache.ResourceEventHandler {
	return handle(
		func(s *discovery.EndpointSlice) { w.index.Apply(time.Now(), s) },
		func(s *discovery.EndpointSlice) { w.index.Delete(time.Now(), s) })
}

// synced reports whether every watch has delivered its first list, and whether the coordinator has
// received the list of agents. Once true it stays true: an interrupted watch keeps the objects that
// it has delivered.
func (w *watches) synced() bool {
	if w.all.Load() {
		return true
	}
	for _, has := range w.has {
		if !has() {
			return false
		}
	}
	w.all.Store(w.roster.listed())
	return w.all.Load()
}

// strip removes from an object what no decision needs: a replica keeps every pod of the cluster.
func strip(object any) (any, error) {
	if pod, ok := object.(*corev1.Pod); ok {
		if admission.OnWindows(&pod.Spec) { // which may be said in what is removed
			pod.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
		}
		pod.Spec.Volumes, pod.Spec.InitContainers, pod.Spec.Affinity, pod.Spec.Tolerations = nil, nil, nil, nil
		for i, c := range pod.Spec.Containers {
			pod.Spec.Containers[i] = corev1.Container{Name: c.Name, Lifecycle: c.Lifecycle}
		}
		pod.Status.InitContainerStatuses = nil
		for i, c := range pod.Status.ContainerStatuses {
			running := corev1.ContainerState{Running: c.State.Running}
			pod.Status.ContainerStatuses[i] = corev1.ContainerStatus{State: running}
		}
	}
	if node, ok := object.(*corev1.Node); ok {
		node.Status.Images = nil
	}
	return cache.TransformStripManagedFields()(object)
}

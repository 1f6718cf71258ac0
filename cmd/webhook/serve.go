package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/dashboard"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// settle is how long after its start a replica without all its agents is not ready.
	settle = 10 * time.Second
	// shutdownGrace is how long requests that run at the end may take.
	shutdownGrace = 5 * time.Second
	// admissionConns bounds the connections of API servers. Each keeps one for every call that it
	// has open, and 25 unused ones; a replica holds 64 calls by default and answers the others in
	// milliseconds.
	admissionConns = 1000
	// readTime is how long a request of operators may take to arrive. A review may take as long as
	// the API server waits for its answer: cut earlier, it would be a deletion that goes on
	// unasked, and in a burst it is this process that reads late.
	readTime = 5 * time.Second
	// agentConns bounds the connections of agents. Each keeps a stream, and one more while it
	// posts: room for 2,000 agents. agentTime is how long a post of one may take to arrive; it has
	// given up by then. An answer may take as long, unless the handler sets the time of each write,
	// as streams do.
	agentConns = 4096
	agentTime  = 10 * time.Second
	// writeMargin is added to the webhook's time, after which the API server has given up.
	writeMargin = 5 * time.Second
	// opsConns and peopleWrite bound those who read metrics, probeTime what a kubelet asks.
	opsConns  = 100
	opsWrite  = 30 * time.Second
	probeTime = 5 * time.Second
)

// serveAll builds everything in the order of dependency and runs it until ctx is done.
func serveAll(ctx context.Context, o options, log *slog.Logger) error {
	klog.SetSlogLogger(log)
	crlog.SetLogger(logr.FromSlogHandler(log.Handler()))
	config, err := restConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	live, err := client.New(config, client.Options{Scheme: clientscheme.Scheme})
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	known, err := cache.New(config, cache.Options{
		Scheme:           clientscheme.Scheme,
		DefaultTransform: cache.TransformStripManagedFields(),
		// Everything here only reads.
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
	self := drain.Holder{Replica: o.replica, Epoch: rand.Text()}
	index := endpoints.NewIndex()
	around := &podContexts{reader: known, index: index, log: log}
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
	ready := &readiness{certificate: proof.ready, known: others.known, sees: others.sees, up: func() time.Duration {
		return time.Since(started)
	}}
	if others != nil {
		others.Able = ready.check
	}
	coord := coordinator.New(self, o.times, coordinator.Options{
		Able:     ready.check,
		MaxHolds: o.maxHolds, MaxHoldsPerOwner: o.maxHoldsPerOwner, Pods: pods{live}, Authenticate: who, Log: log,
		Metrics:     coordinator.NewMetrics(registry),
		PodContexts: around, Scope: o.scope, Sampling: o.sampling,
	})
	roster := newRoster(coord, who, log)
	watch := watches{coord: coord, index: index, roster: roster, others: others}
	ready.synced, ready.expecting = watch.synced, coord.Expecting
	if err := watch.register(ctx, known); err != nil {
		return err
	}
	// Not among those that a replica waits for: without the right to watch them, Services state no
	// waits and have no local policies.
	services, err := known.GetInformer(ctx, &corev1.Service{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watch Services: %w", err)
	}
	around.known, around.synced = watch.synced, services.HasSynced
	around.going = func(uid drain.UID) bool { return coord.Pod(uid).Terminating }
	events := newEvents(kube, o.replica, log)
	notes := &dashboard.Notes{Next: events}
	handler := &admission.Handler{
		Cluster: &admission.Cluster{
			Reader: known, Live: live, Slices: index, Ledger: coord, Synced: watch.synced, Excluded: o.excluded,
			Started: started,
		},
		Times: o.times, Events: notes, Log: log, Metrics: metrics, Replica: o.replica, Others: others.others(),
	}
	coord.Claimant = handler
	mutator := &admission.Mutator{Reader: known, Excluded: o.excluded, Barrier: o.barrier, Log: log, Metrics: metrics}
	missing := missingOf(mutator, watch.synced)
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_barrier_missing_pods",
		Help: "Pods that ask for the barrier and were created without it, as while no coordinator answered.",
	}, func() float64 { return float64(len(missing())) }))
	door := proof.door
	secure := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: proof.certificate}
	var listeners [4]net.Listener
	for i, of := range []struct {
		address string
		config  net.ListenConfig
	}{{address: o.admission}, {o.agents, coordinator.ListenConfig(o.times.Away)}, {address: o.metrics},
		{address: o.probes}} {
		if listeners[i], err = of.config.Listen(ctx, "tcp", of.address); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		defer listeners[i].Close()
	}
	looks, err := listenDashboard(ctx, o.dashboard)
	if err != nil {
		return err
	}
	if looks != nil {
		defer looks.Close()
		log.Info("dashboard", "address", looks.Addr().String(), "open", dashboard.Loopback(looks.Addr()))
	}
	view := dashboard.New(dashboard.Options{
		Coordinator: coord, Explainer: handler.Cluster, Reviewer: dashboard.NewKubernetes(kube), Notes: notes,
		Node: nodeOf(known, watch.synced),
		Pod:  podOf(known, watch.synced), Consumers: consumersOf(known, services.HasSynced), Missing: missing, Log: log,
	})
	log.Info("started", "holder", self.String(), "admission", listeners[0].Addr().String(),
		"agents", listeners[1].Addr().String(),
		"metrics", listeners[2].Addr().String(), "probes", listeners[3].Addr().String(), "hold", o.times.Hold.String(),
		"deadline", o.times.Deadline.String())

	stop := func() {
		ready.stopping.Store(true)
		coord.Stop()
	}
	// What answers calls ends first, and what it answers from after it.
	return serve.All(ctx,
		serve.Task{Name: "cache", Run: known.Start, Last: true},
		serve.Task{Name: "certificates", Run: proof.run, Last: true},
		serve.Task{Name: "slices", Run: watch.run, Last: true},
		serve.Task{Name: "coordinator", Run: coord.Run, Last: true},
		serve.Task{Name: "roster", Run: roster.run, Last: true},
		serve.Task{Name: "replicas", Run: func(ctx context.Context) error {
			return others.run(ctx, coord, watch.synced, started)
		}, Last: true},
		serve.Task{Name: "events", Run: events.run, Last: true},
		serve.Server{
			Name: "admission", Listener: listeners[0], TLS: secure,
			Handler: door.Guard(serve.KeepConn(handler), serve.KeepConn(mutator)), Conns: admissionConns,
			ReadTime:  o.times.Webhook,
			WriteTime: o.times.Webhook + writeMargin, Stop: stop, Delay: o.shutdownDelay, Grace: shutdownGrace,
			Keep: func() bool { return ready.check() == nil }, Log: log,
		}.Task(),
		serve.Server{
			Name: "agents", Listener: listeners[1], TLS: secure, Handler: coord.Handler(), Conns: agentConns,
			ReadTime: agentTime, WriteTime: agentTime,
			Stop: stop, Grace: shutdownGrace, Log: log,
		}.Task(),
		lastTask(serve.Server{Name: "metrics", Listener: listeners[2], Handler: opsHandler(registry),
			ReadTime: readTime, WriteTime: opsWrite, Log: log}),
		lastTask(serve.Server{Name: "probes", Listener: listeners[3], Handler: probes(coord.Live, ready.check),
			ReadTime: probeTime, WriteTime: probeTime, Log: log}),
		dashboardTask(looks, secure, view, log),
	)
}

// lastTask serves operators until everything else has ended, so that a replica that ends says so.
func lastTask(s serve.Server) serve.Task {
	s.Conns = opsConns
	task := s.Task()
	task.Last = true
	return task
}

// readiness is whether the API server should ask this replica.
type readiness struct {
	certificate func() error
	synced      func() bool
	// known is why the open drains of other replicas are not known yet, sees names one that could
	// judge deletions instead of this one.
	known     func() error
	sees      func() (name string, ok bool)
	expecting func() (expected, missing int)
	up        func() time.Duration
	// settled: it has waited for its agents once. stopping: it is shutting down.
	settled, stopping atomic.Bool
}

// check returns why this replica cannot judge deletions. Nil: it can. One that lost the streams of
// most of its agents abstains only while another replica has them: with no other replica to ask,
// waiting for agents ends at the deadline, and a lost request stays lost.
func (r *readiness) check() error {
	switch {
	case r.stopping.Load():
		return errors.New("this replica is shutting down")
	case r.certificate() != nil:
		return r.certificate()
	case !r.synced():
		return errors.New("the view of the cluster is not complete yet")
	case r.known() != nil:
		return r.known()
	}
	expected, missing := r.expecting()
	if missing > 0 && r.up() < settle && !r.settled.Load() {
		return fmt.Errorf("%d of %d agents are not connected yet", missing, expected)
	}
	r.settled.Store(true)
	if 2*missing > expected {
		if name, ok := r.sees(); ok {
			return fmt.Errorf("%d of %d agents are not connected here, and replica %s has most of them", missing,
				expected, name)
		}
	}
	return nil
}

// opsHandler serves what is for opsHandler and their tools.
func opsHandler(registry *prometheus.Registry) http.Handler {
	r := mux.NewRouter()
	r.Methods(http.MethodGet).Path("/metrics").Handler(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return r
}

// probes serves kubelets, on a port of its own: no other pod has to reach it, and who reads metrics
// cannot fill it.
func probes(live, ready func() error) http.Handler {
	r := mux.NewRouter()
	for path, check := range map[string]func() error{"/livez": live, "/readyz": ready} {
		r.Methods(http.MethodGet).Path(path).HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
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

func restConfig(kubeconfig string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("reach the API server (--kubeconfig %q): %w", kubeconfig, err)
	}
	config.QPS, config.Burst = 50, 100
	config.UserAgent = "lameduck-webhook"
	return config, nil
}

// watches feed the coordinator and the index from the cache.
type watches struct {
	coord  *coordinator.Coordinator
	index  *endpoints.Index
	roster *roster
	others *replicas
	has    []func() bool
	// reached is the last resourceVersion that the watch of EndpointSlices has seen, "" if it
	// cannot be told.
	reached func() string
	// all becomes true when everything has synced, and stays so.
	all atomic.Bool
}

func (w *watches) register(ctx context.Context, known cache.Cache) error {
	pod := handlers[corev1.Pod]{
		set: func(p *corev1.Pod) {
			if p.DeletionTimestamp != nil {
				w.coord.GatePassed(drain.UID(p.UID))
			} else if at, ready := readySince(p); ready {
				w.coord.Ready(drain.UID(p.UID), at)
			}
			w.roster.set(p)
			w.others.set(p)
		},
		gone: func(p *corev1.Pod) {
			w.coord.Deleted(drain.UID(p.UID))
			w.roster.gone(p)
			w.others.gone(p)
		},
	}
	for _, of := range []struct {
		object  client.Object
		handler interface{ asHandler() handler }
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
		if _, slices := of.object.(*discovery.EndpointSlice); slices {
			w.reached = lastSeen(informer)
		}
		if of.handler == nil {
			w.has = append(w.has, informer.HasSynced)
			continue
		}
		registration, err := informer.AddEventHandler(of.handler.asHandler())
		if err != nil {
			return fmt.Errorf("watch %T: %w", of.object, err)
		}
		w.has = append(w.has, registration.HasSynced)
	}
	return nil
}

// slices feeds the index.
func (w *watches) slices() handlers[discovery.EndpointSlice] {
	return handlers[discovery.EndpointSlice]{
		set:    func(s *discovery.EndpointSlice) { w.index.Apply(time.Now(), s) },
		gone:   func(s *discovery.EndpointSlice) { w.index.Delete(time.Now(), s) },
		missed: func(s *discovery.EndpointSlice) { w.index.Missed(time.Now(), s) },
	}
}

// lastSeen tells how far an informer's watch is. The informers of the cache are client-go's, which
// know, although their interface here does not say so. Of one that does not, nothing can be told,
// and the index waits for [endpoints.Patience].
func lastSeen(informer cache.Informer) func() string {
	if knows, ok := informer.(interface{ LastSyncResourceVersion() string }); ok {
		return knows.LastSyncResourceVersion
	}
	return nil
}

// tickEvery is how often the index is asked for what it has set aside.
const tickEvery = 250 * time.Millisecond

// run takes in what was set aside because it was older than what is known.
func (w *watches) run(ctx context.Context) error {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			w.tick(time.Now())
		}
	}
}

// tick is one time of run. One watch has the slices of all namespaces.
func (w *watches) tick(now time.Time) {
	w.index.Tick(now, func(string) string {
		if w.reached == nil {
			return ""
		}
		return w.reached()
	})
}

// synced reports whether every watch has delivered its first list. Once it has, it stays so: a
// later interruption leaves what is known, and a level-triggered ledger.
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

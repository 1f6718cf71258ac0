package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/client"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/endpoints"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
	"github.com/lameduck-io/lameduck/pkg/health/serving"
	"github.com/lameduck-io/lameduck/pkg/serve"
)

const (
	// waitGrace is how long hooks that wait are still served once the node agent is told to stop.
	// It is longer than hooks wait for connections that stay, and shorter than the time that the manifests give the agent to stop.
	waitGrace = 25 * time.Second
	// waitConns bounds the connections of hooks: each hook has one.
	waitConns = 2048
)

// serveNode is serveAll of a node agent.
func serveNode(ctx context.Context, o options, log *slog.Logger) error {
	klog.SetSlogLogger(log)
	config, err := restConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	var trusted *roots
	if o.file.Coordinators != nil {
		if trusted, err = newRoots(o.file.Coordinators, log); err != nil {
			return err
		}
	}
	return runNode(ctx, o, kube, trusted, observer{kubeproxy.New(kubeproxy.Options{Log: log})}, log)
}

// runNode builds everything in the order of dependency and runs it until ctx is done.
func runNode(ctx context.Context, o options, kube kubernetes.Interface, trusted *roots, k kernel, log *slog.Logger) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m := newNodeMetrics(registry, o.nodeName)
	registerAudits(registry, k)
	pods := newNodePods(log)
	watched := newObserved(k, func(targets []netip.AddrPort) bool { return !pods.owned(targets) }, m, log)
	pods.left = func(p nodePod) { watched.clean(p.pod, p.targets) }
	hooks := newWaits(pods, k, m, log)
	hooks.live = func(ctx context.Context, pod drain.Pod) (nodePod, bool, error) { return livePod(ctx, kube, pod) }
	hooks.ask = func(context.Context, wire.Barrier) (wire.Passed, error) {
		return wire.Passed{}, client.ErrNoCoordinator
	}
	following := serving.New(o.file.HealthTimeout.Duration)

	// What hooks are answered from ends after them.
	tasks := []serve.Task{
		{Name: "kernel", Run: k.Run, Last: true},
		{Name: "observed", Run: watched.run, Last: true},
		{Name: "pods", Run: func(ctx context.Context) error { return pods.run(ctx, kube, o.nodeName) }, Last: true},
		{Name: "node", Run: func(ctx context.Context) error {
			return watchNode(ctx, kube, o.nodeName, following.SetEligible, log)
		}},
		{Name: "hooks", Run: func(ctx context.Context) error { return hooks.run(ctx, waitGrace) }},
	}
	if o.file.Coordinators != nil {
		c := connector(o.file.Coordinators, trusted)
		c.Gateway, c.Observer, c.Log, c.Watches = "kube-proxy", m, log, watched
		c.Routes = nodeRoutes(drain.Endpoints)
		watched.changed = c.Wake
		hooks.ask = c.Barrier
		tasks = append(tasks,
			serve.Task{Name: "coordinators", Run: c.Run, Last: true},
			serve.Task{Name: "kube-proxy", Run: func(ctx context.Context) error { return followProxy(ctx, k, c.Declare, log) }, Last: true},
			serve.Task{Name: "roots", Run: func(ctx context.Context) error { return trusted.run(ctx, kube) }, Last: true},
		)
		if o.file.Coordinators.Service != "" {
			tasks = append(tasks, serve.Task{Name: "replicas", Last: true, Run: func(ctx context.Context) error {
				return followReplicas(ctx, kube, o.file.Coordinators, c.Replicas)
			}})
		}
	} else {
		log.Warn("no coordinators are configured: hooks wait for this node's kernel alone")
	}
	leave := make(chan struct{})
	tasks = append(tasks, serve.Task{Name: "leave", Run: func(ctx context.Context) error {
		<-ctx.Done()
		close(leave)
		return nil
	}})
	// Whoever else has an address of hooks, and keeps it, need not be an agent.
	var missing atomic.Int64
	missing.Store(int64(len(o.file.KubeProxy.WaitAddresses)))
	for _, address := range o.file.KubeProxy.WaitAddresses {
		// It goes on for as long as hooks wait: those that come then would be refused, and end at once.
		task, err := beside{address: address, shared: true, ready: pods.synced, got: func() { missing.Add(-1) }, leave: leave, log: log}.task(serve.Server{
			Name: "wait " + address, Handler: hooks.handler(), Conns: waitConns, ReadTime: headerTime, WriteTime: headerTime, Grace: waitGrace + shutdownGrace, Log: log,
		})
		if err != nil {
			return fmt.Errorf("listen for hooks: %w", err)
		}
		tasks = append(tasks, task)
	}
	// Not shared: who asks how this agent is must not be told how the other is by chance. While it has the address, it is the other.
	metrics, err := beside{address: o.people, log: log}.task(
		peopleServer(nodePeople(registry, following, pods, func() bool { return missing.Load() == 0 }), log))
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	log.Info("started", "metrics", o.people, "hooks", o.file.KubeProxy.WaitAddresses, "node", o.nodeName)
	return serve.All(ctx, append(tasks, metrics)...)
}

// headerTime is how long a hook's request may take to arrive.
const headerTime = 5 * time.Second

// nodePeople serves what is for people and their tools.
func nodePeople(registry *prometheus.Registry, following *serving.Health, pods *nodePods, listening func() bool) http.Handler {
	r := mux.NewRouter()
	r.Methods(http.MethodGet).Path("/metrics").Handler(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	r.Methods(http.MethodGet, http.MethodHead).Path("/livez").Handler(serving.Handler(following.Livez))
	r.Methods(http.MethodGet, http.MethodHead).Path("/healthz").Handler(serving.Handler(following.Healthz))
	r.Methods(http.MethodGet).Path("/readyz").HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !pods.synced() {
			http.Error(w, "the pods of this node are not known yet", http.StatusServiceUnavailable)
			return
		}
		if !listening() {
			http.Error(w, "another process has an address of hooks, and does not share it", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return r
}

// livePod reads a pod from the API server, not from a watch.
func livePod(ctx context.Context, kube kubernetes.Interface, pod drain.Pod) (n nodePod, gone bool, err error) {
	p, err := kube.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return n, true, nil
	case err != nil:
		return n, false, fmt.Errorf("read pod %s: %w", pod, err)
	case drain.UID(p.UID) != pod.UID:
		return n, true, nil
	}
	n, ok := readNodePod(p)
	if !ok {
		return n, false, errors.New("the pod has lost its annotation " + barrierID)
	}
	if !n.since.IsZero() {
		n.seen = time.Now()
	}
	return n, false, nil
}

// nodeRoutes is what a node agent declares.
func nodeRoutes(via drain.Via) []drain.Route {
	return []drain.Route{{Service: drain.EveryService, Via: via, Can: drain.Observe, Grain: drain.PerConnection}}
}

// proxyLook is how often it is looked whether kube-proxy can be observed.
const proxyLook = 200 * time.Millisecond

// followProxy declares, until ctx is done, whether this agent can observe what sends to pods. Where kube-proxy cannot be
// observed, something else chooses the pod behind a Service's address, which proves nothing and is not waited for.
func followProxy(ctx context.Context, k kernel, declare func([]drain.Route), log *slog.Logger) error {
	ticker := time.NewTicker(proxyLook)
	defer ticker.Stop()
	for was := false; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		is := k.Absent()
		switch {
		case is && !was:
			log.Warn("no rules of kube-proxy in nftables or iptables on this node: what sends to pods cannot be observed here, and no barrier waits for this node")
			declare(nodeRoutes(drain.ClusterIP))
		case was && !is:
			log.Info("kube-proxy has written its rules: barriers wait for this node")
			declare(nodeRoutes(drain.Endpoints))
		}
		was = is
	}
}

// followReplicas tells which coordinator replicas there are, ready or not, until ctx is done.
func followReplicas(ctx context.Context, kube kubernetes.Interface, conf *coordinators, tell func(addresses []string)) error {
	service, err := namespacedName(conf.Service)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithNamespace(service.Namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = discovery.LabelServiceName + "=" + service.Name }))
	informer := factory.Discovery().V1().EndpointSlices().Informer()
	index := endpoints.NewIndex()
	index.Follow(endpoints.Port{Service: service, Name: conf.Port})
	// The index is told by the watch and by the clock, and the last word must be the newest.
	var mu sync.Mutex
	told := func(changed []endpoints.PortChange) {
		if len(changed) == 0 {
			return
		}
		addresses := []string{}
		for _, e := range index.Endpoints(service, conf.Port) {
			addresses = append(addresses, "https://"+net.JoinHostPort(e.Addr.Addr().String(), strconv.Itoa(int(e.Addr.Port()))))
		}
		tell(addresses)
	}
	see := func(o any, take func(time.Time, *discovery.EndpointSlice) []endpoints.PortChange) {
		if s, ok := o.(*discovery.EndpointSlice); ok {
			mu.Lock()
			defer mu.Unlock()
			told(take(time.Now(), s))
		}
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { see(o, index.Apply) },
		UpdateFunc: func(_, o any) { see(o, index.Apply) },
		DeleteFunc: func(o any) {
			if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				see(missed.Obj, index.Missed)
				return
			}
			see(o, index.Delete)
		},
	}); err != nil {
		return fmt.Errorf("watch EndpointSlices of %s: %w", conf.Service, err)
	}
	factory.Start(ctx.Done())
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			factory.Shutdown()
			return nil
		case <-ticker.C:
			mu.Lock()
			told(index.Tick(time.Now(), func(string) string { return informer.LastSyncResourceVersion() }))
			mu.Unlock()
		}
	}
}

// observer is the node's kernel, in the words of the ledger.
type observer struct{ *kubeproxy.Observer }

// Watch implements kernel.
func (o observer) Watch(targets []netip.AddrPort, changed func()) kernelWatch {
	return kernelView{o.Observer.Watch(targets, changed)}
}

type kernelView struct{ *kubeproxy.Watch }

// Reading implements kernelWatch.
func (v kernelView) Reading() reading {
	is := v.Watch.Reading()
	r := reading{Generation: is.Generation, Quiet: is.Quiet, Connections: is.Connections, Counted: is.Counted, Since: is.Since}
	switch is.State {
	case kubeproxy.Routing:
		r.State = drain.Routing
	case kubeproxy.Kept:
		r.State = drain.Kept
	case kubeproxy.Removed:
		r.State = drain.Removed
	case kubeproxy.Idle:
		r.State = drain.Idle
	default:
		r.State = drain.StateUnknown
	}
	return r
}

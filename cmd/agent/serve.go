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
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/client"
	"github.com/lameduck-io/lameduck/pkg/drain/journal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/pkg/health/probe"
	"github.com/lameduck-io/lameduck/pkg/health/serving"
	"github.com/lameduck-io/lameduck/pkg/serve"
)

const (
	// learnMost is how long the gateway is not programmed while coordinators have not said which drains are open.
	learnMost = 3 * time.Second
	// connectTimeout bounds a TCP handshake with a coordinator.
	connectTimeout = 3 * time.Second
	shutdownGrace  = 2 * time.Second
	// peopleWrite is how long an answer to people may take.
	peopleWrite = 30 * time.Second
)

// serveAll builds everything in the order of dependency and runs it until ctx is done.
func serveAll(ctx context.Context, o options, log *slog.Logger) error {
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
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	set := health.New(health.Options{UsablePercent: o.file.MinHealthyPercent})
	kept, err := journal.Open(ctx, o.file.journalDir(), log)
	switch {
	case errors.Is(err, journal.ErrLocked):
		return fmt.Errorf("%w: give each agent a stateDir of its own", err)
	case err != nil:
		return err
	}
	defer kept.Close()
	m := newMetrics(registry, set, kept.Err)

	director := gateway.NewDirector(writeAhead{o.gateway, kept}, set, log)
	director.Observer = m
	following := serving.New(o.file.HealthTimeout.Duration)
	director.Followed = follow(following)
	wake := func() {
		queue(following)
		director.Wake()
	}
	routes := newRoutes(o.file, set, director)
	routes.queued = func(f serving.Family) { following.Queued(f, time.Now()) }
	probes := &probe.Runner{Source: set, Observer: m}
	routes.told = probes.Wake
	checks := newChecks(o.file, routes.ports, set, probes.Wake, log)
	m.refusals(registry, checks.refusals)
	tasks := []serve.Task{
		{Name: "journal", Run: kept.Run},
		{Name: "probes", Run: probes.Run},
		{Name: "checks", Run: func(ctx context.Context) error { return checks.run(ctx, kube) }},
	}
	var learnt atomic.Bool
	learned := closed()
	stones := &tombstones{set: set, journal: kept, ports: routes.ports, wake: wake, log: log, known: map[health.UID]health.State{}, propagation: newPropagation(registry, "haproxy", o.nodeName)}
	stones.restore(time.Now())
	leases := lapses{stones: stones, fresh: func(ctx context.Context) error { return routes.fresh(ctx, kube) }, wake: wake, log: log}
	if o.file.Coordinators != nil {
		if o.file.journalDir() == "" {
			log.Warn("tombstones are not kept on disk: neither stateDir nor haproxy.serversFile is set")
		}
		c, err := newClient(o.file, trusted, stones, m, log)
		if err != nil {
			return err
		}
		believed := &beliefs{set: set, ports: routes.ports, names: routes.heard.pods}
		c.Health = believed.summary
		tasks = append(tasks, serve.Task{Name: "beliefs", Run: believed.run})
		changed := func() {
			if stones.changed() {
				c.Wake()
			}
		}
		director.Changed = changed
		kept.Wrote = func(took time.Duration, err error) {
			m.Wrote(took, err)
			changed() // what is on disk may be told
		}
		where := rememberIn(o.file.journalDir(), log)
		if o.file.Coordinators.Service != "" {
			if kept := where.read(); len(kept) > 0 {
				c.Replicas(kept)
			}
		}
		routes.replicas = func(addresses []string) {
			where.set(addresses)
			c.Replicas(addresses)
		}
		learned = c.Learned()
		ends := leaving{gateway: o.gateway, programmed: director.Programmed, leave: c.Leave, log: log}
		tasks = append(tasks,
			serve.Task{Name: "coordinators", Last: true, Run: func(ctx context.Context) error { return ends.outlive(ctx, c.Run) }},
			serve.Task{Name: "addresses", Run: where.run},
			serve.Task{Name: "roots", Run: func(ctx context.Context) error { return trusted.run(ctx, kube) }},
		)
	}
	listener, err := net.Listen("tcp", o.people)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	log.Info("started", "metrics", listener.Addr().String(), "routes", len(routes.pools), "endpointsLag", o.file.EndpointsLag.String())
	server := peopleServer(people(registry, following, &learnt, routes, director, set), log)
	server.Listener = listener
	tasks = append(tasks,
		serve.Task{Name: "endpoints", Run: func(ctx context.Context) error { return routes.run(ctx, kube) }},
		serve.Task{Name: "gateway", Run: func(ctx context.Context) error {
			if waitFor(ctx, learned, learnMost) {
				log.Info("open drains are known: programming the gateway")
			} else if ctx.Err() == nil {
				m.unlearned.Inc()
				log.Warn("programming the gateway without knowing which drains are open: no answer from every coordinator", "waited", learnMost.String())
			}
			learnt.Store(true)
			waitFor(ctx, checks.known, servicesMost)
			return director.Run(ctx)
		}},
		serve.Task{Name: "leases", Run: leases.run},
		server.Task(),
	)
	if o.nodeName != "" {
		tasks = append(tasks, serve.Task{Name: "node", Run: func(ctx context.Context) error {
			return watchNode(ctx, kube, o.nodeName, following.SetEligible, log)
		}})
	}
	return serve.All(ctx, tasks...)
}

func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func waitFor(ctx context.Context, c <-chan struct{}, most time.Duration) bool {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// peopleServer bounds those who read metrics and ask for health.
func peopleServer(handler http.Handler, log *slog.Logger) serve.Server {
	return serve.Server{
		Name: "metrics", Handler: handler, Conns: 100, ReadTime: headerTime, WriteTime: peopleWrite, Grace: shutdownGrace, Log: log,
	}
}

// people serves what is for people and their tools.
func people(registry *prometheus.Registry, following *serving.Health, learnt *atomic.Bool, routes *routes, director *gateway.Director, set *health.Set) http.Handler {
	r := mux.NewRouter()
	r.Methods(http.MethodGet).Path("/metrics").Handler(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	r.Methods(http.MethodGet, http.MethodHead).Path("/livez").Handler(serving.Handler(following.Livez))
	r.Methods(http.MethodGet, http.MethodHead).Path("/healthz").Handler(serving.Handler(following.Healthz))
	r.Methods(http.MethodGet).Path(targetsPath).Handler(targetsHandler(set, routes))
	r.Methods(http.MethodGet).Path("/readyz").HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case !learnt.Load():
			http.Error(w, "open drains are not known yet", http.StatusServiceUnavailable)
		case !routes.synced():
			http.Error(w, "EndpointSlices are not known yet", http.StatusServiceUnavailable)
		case !director.Programmed():
			http.Error(w, "the gateway does not route to what EndpointSlices say yet", http.StatusServiceUnavailable)
		default:
			fmt.Fprintln(w, "ok")
		}
	})
	return r
}

// newClient builds the side of the wire of an agent that directs HAProxy.
func newClient(f file, trusted *roots, stones client.Tombstones, m *metrics, log *slog.Logger) (*client.Client, error) {
	c := connector(f.Coordinators, trusted)
	c.Gateway = "haproxy"
	c.Tombstones, c.Observer, c.Log = stones, m, log
	seen := map[drain.Service]bool{}
	for _, b := range f.HAProxy.Backends {
		name, err := namespacedName(b.Service)
		if err != nil {
			return nil, err
		}
		service := drain.Service{Namespace: name.Namespace, Name: name.Name}
		if !seen[service] {
			seen[service] = true
			c.Routes = append(c.Routes, drain.Route{Service: service, Via: drain.Endpoints, Can: drain.Direct, Grain: drain.PerRequest})
		}
	}
	return c, nil
}

// connector is a client that reaches coordinators and trusts them.
func connector(conf *coordinators, trusted *roots) *client.Client {
	c := client.New()
	c.HTTP = &http.Client{Transport: &http.Transport{
		DialTLSContext: trusted.dial,
		// An empty map switches HTTP/2 off: one stream is one connection.
		TLSNextProto:        map[string]func(string, *tls.Conn) http.RoundTripper{},
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     time.Minute,
	}}
	c.Token = func() (string, error) {
		token, err := os.ReadFile(conf.TokenFile)
		return strings.TrimSpace(string(token)), err
	}
	c.Boot = rand.Text()
	c.Replicas(conf.Addresses)
	return c
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, fmt.Errorf("%w: --kubeconfig %q: not in a cluster, so it is needed", errUsage, kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("reach the API server (--kubeconfig %q): %w", kubeconfig, err)
	}
	config.UserAgent = "lameduck-agent"
	return config, nil
}

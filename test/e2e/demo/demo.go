package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/node"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/report"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

const (
	namespace  = "shop"
	replicas   = 6
	startDelay = 600 * time.Millisecond
	work       = 20 * time.Millisecond
	// sleep is what the documentation of APISIX recommends for preStop.
	sleep = 5
	// before and after are the load's length around a rolling update.
	before, after = time.Second, 2 * time.Second
	// requestTimeout is the clients'.
	requestTimeout = 10 * time.Second
	runTimeout     = 2 * time.Minute
	// page is where the coordinator serves it, inside. restEvery is how long it is quiet between
	// two rolling updates while it is kept open.
	page      = "127.0.0.1:9445"
	restEvery = 15 * time.Second
)

// demo is everything that runs.
type demo struct {
	options
	say     func(format string, args ...any)
	cluster *cluster.Cluster
	stage   *stage.Stage
	audit   *audit
	// page is where operators find the live page, if it is to be kept open.
	page string
	// gateway is where HAProxy listens.
	gateway string

	mu     sync.Mutex
	events map[types.UID][]node.Event
}

func newDemo(ctx context.Context, o options, say func(string, ...any)) (*demo, error) {
	d := &demo{options: o, say: say, events: map[types.UID][]node.Event{}}
	if o.logs != "" {
		if err := os.MkdirAll(o.logs, 0o755); err != nil {
			return nil, fmt.Errorf("-logs: %w", err)
		}
	}
	var err error
	if d.audit, err = newAudit(); err != nil {
		return nil, err
	}
	say("starting a control plane")
	// There is no DNS, so the API server finds the node by its address.
	flags := append(d.audit.flags(), "--kubelet-preferred-address-types=InternalIP")
	if d.cluster, err = cluster.Start(ctx, cluster.Options{APIServer: flags, LogDir: o.logs}); err != nil {
		return nil, err
	}
	d.stage, err = stage.Open(ctx, d.cluster, stage.Options{
		Bin: o.bin, Dir: o.logs, Observe: d.observe, Log: logger(o.logs),
		Dashboard: page,
	})
	if err != nil {
		d.cluster.Stop()
		return nil, err
	}
	return d, nil
}

func (d *demo) close() {
	d.stage.Close()
	d.cluster.Stop()
}

func (d *demo) observe(e node.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events[e.UID] = append(d.events[e.UID], e)
}

// perform installs everything and performs the three runs.
func (d *demo) perform(ctx context.Context) (report.Demo, error) {
	result := report.Demo{LagSeconds: d.lag.Seconds()}
	ctx, cancel := context.WithTimeout(ctx, 3*runTimeout)
	defer cancel()
	app := stage.App{Namespace: namespace, Replicas: replicas, StartDelay: startDelay, Work: work}
	if err := d.stage.CreateNamespace(ctx, namespace); err != nil {
		return result, err
	}
	d.say("installing the coordinator, without its webhook")
	if err := d.stage.InstallCoordinator(ctx); err != nil {
		return result, err
	}
	if d.keep {
		// It lives as long as everything here.
		address, err := cluster.Expose(context.WithoutCancel(ctx), page, "")
		if err != nil {
			return result, err
		}
		d.page = "http://" + address + "/"
		// As kubectl lameduck needs it.
		if err := stage.ServeKubelet(context.WithoutCancel(ctx), d.stage.Kube); err != nil {
			return result, err
		}
		if err := d.cluster.ExposeAPIServer(context.WithoutCancel(ctx), temp("kubeconfig")); err != nil {
			return result, err
		}
		d.say("the live page is at %s", d.page)
	}
	d.say("installing %d pods, and HAProxy with its agent in front of them", replicas)
	if err := d.stage.InstallApp(ctx, app); err != nil {
		return result, err
	}
	address, err := d.stage.InstallGateway(ctx, stage.Gateway{Namespace: namespace, Lag: d.lag})
	if err != nil {
		return result, err
	}

	d.gateway = address
	if result.Unprotected, _, err = d.roll(ctx, "unprotected", address); err != nil {
		return result, err
	}
	d.say("adding preStop: sleep %d", sleep)
	app.PreStop = sleep
	if err := d.stage.InstallApp(ctx, app); err != nil {
		return result, err
	}
	if result.PreStop, _, err = d.roll(ctx, fmt.Sprintf("preStop: sleep %d", sleep), address); err != nil {
		return result, err
	}
	d.say("taking preStop away, installing Lameduck's webhook")
	app.PreStop = 0
	if err := d.stage.InstallApp(ctx, app); err != nil {
		return result, err
	}
	if err := d.stage.InstallWebhook(ctx, 1); err != nil {
		return result, err
	}
	var drained []types.UID
	if result.Lameduck, drained, err = d.roll(ctx, "Lameduck", address); err != nil {
		return result, err
	}
	result.Drain, err = d.timeline(ctx, drained)
	return result, err
}

// keepOpen leaves the page and the API server open until ctx ends, and gives them something to show
// now and then.
func (d *demo) keepOpen(ctx context.Context) error {
	d.say("to use kubectl, in another terminal:\n\n"+
		"    export KUBECONFIG=\"%s\" PATH=\"%s:%s:$PATH\"\n    kubectl lameduck status\n    kubectl -n %s get pods\n",
		temp("kubeconfig"), d.bin, d.cluster.Binaries().Dir, namespace)
	d.say("the live page stays open at %s; a rolling update every %s; end with Ctrl-C", d.page, restEvery)
	for pause(ctx, restEvery) == nil {
		clients, err := load.Run(ctx, load.Options{
			Target: "http://" + d.gateway + "/", Rate: d.rate, Timeout: requestTimeout, KeepAlive: d.keepAlive,
			DropClosed: true, WantBody: []byte("ok\n"), MaxInFlight: 10000,
		})
		if err != nil {
			return err
		}
		took, err := d.stage.Restart(ctx, namespace, "web")
		counted := clients.Stop()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		d.say("rolling update in %.1f s, %d of %d requests failed", took.Seconds(), counted.Failed, counted.Total)
	}
	return nil
}

// roll performs one rolling update under load. It returns the UIDs of the pods that went.
func (d *demo) roll(ctx context.Context, name, address string) (report.Run, []types.UID, error) {
	run := report.Run{Name: name}
	// The gateway has to have learnt of the last change, so that each run begins alike.
	if err := pause(ctx, d.lag+500*time.Millisecond); err != nil {
		return run, nil, err
	}
	old, err := d.stage.Pods(ctx, namespace, "app=web")
	if err != nil {
		return run, nil, err
	}
	clients, err := load.Run(ctx, load.Options{
		Target: "http://" + address + "/", Rate: d.rate, Timeout: requestTimeout, KeepAlive: d.keepAlive,
		DropClosed: true,
		WantBody:   []byte("ok\n"), MaxInFlight: 10000,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("10.244.251.1"), netip.MustParseAddr("10.244.251.2"),
			netip.MustParseAddr("10.244.251.3"), netip.MustParseAddr("10.244.251.4")},
	})
	if err != nil {
		return run, nil, err
	}
	defer clients.Stop()
	if err := pause(ctx, before); err != nil {
		return run, nil, err
	}
	rollCtx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	took, err := d.stage.Restart(rollCtx, namespace, "web")
	if err != nil {
		return run, nil, err
	}
	if err := pause(ctx, after+d.lag); err != nil {
		return run, nil, err
	}
	counted := clients.Stop()
	run.Requests, run.Failed, run.FailedBy = counted.Total, counted.Failed, counted.FailedBy
	run.Late, run.Skipped = counted.Late, counted.Skipped
	run.P50Millis, run.P99Millis = counted.Latency.P50Millis, counted.Latency.P99Millis
	run.RolloutSeconds = took.Seconds()
	d.say("%s: %d of %d requests failed, rolling update in %.1f s", name, run.Failed, run.Requests, run.RolloutSeconds)

	deleted, err := d.audit.deletions()
	if err != nil {
		return run, nil, err
	}
	var waits []float64
	var gone []types.UID
	for _, pod := range old {
		asked, ok := deleted[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}]
		term, sent := d.event(pod.UID, node.Term)
		if !ok || !sent {
			return run, nil, fmt.Errorf("%s: pod %s has gone without a DELETE in the audit log (%t) or a SIGTERM (%t)",
				name, pod.Name, ok, sent)
		}
		waits = append(waits, millis(term.Time.Sub(asked)))
		gone = append(gone, pod.UID)
	}
	run.DeleteToSigtermMillis = report.SpreadOf(waits)
	return run, gone, nil
}

func (d *demo) event(uid types.UID, kind node.Kind) (node.Event, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.events[uid], func(e node.Event) bool { return e.Kind == kind })
	if i < 0 {
		return node.Event{}, false
	}
	return d.events[uid][i], true
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// temp returns a path in the folder for temporary files, which goes with the namespace.
func temp(name string) string { return filepath.Join(os.TempDir(), name) }

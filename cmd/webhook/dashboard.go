package main

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/dashboard"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// dashboardConns bounds the connections of operators: each open page keeps one.
const dashboardConns = 200

// dashboardTask serves the dashboard: with plain HTTP on a loopback address, otherwise with TLS and
// only to readers who have the right. It is Last, so that a replica that is ending still shows the
// calls that it holds.
func dashboardTask(listener net.Listener, secure *tls.Config, d *dashboard.Dashboard, log *slog.Logger) serve.Task {
	return serve.Task{Name: "dashboard", Last: true, Run: func(ctx context.Context) error {
		if listener == nil {
			<-ctx.Done()
			return nil
		}
		if dashboard.Loopback(listener.Addr()) {
			secure = nil
		}
		return serve.Server{
			Name: "dashboard", Listener: listener, TLS: secure, Handler: d.Handler(listener.Addr()),
			Conns: dashboardConns, ReadTime: readTime, Grace: time.Second, Log: log,
		}.Task().Run(ctx)
	}}
}

// podOf returns a function that finds a pod in the cache. The function returns nil if the cache has
// not synced or has no pod with that UID.
func podOf(known client.Reader, synced func() bool) func(drain.Pod) *corev1.Pod {
	return func(of drain.Pod) *corev1.Pod {
		var pod corev1.Pod
		// A cache that has not synced would block.
		if !synced() || known.Get(context.Background(), types.NamespacedName{Namespace: of.Namespace, Name: of.Name},
			&pod) != nil || drain.UID(pod.UID) != of.UID {
			return nil
		}
		return &pod
	}
}

// missingEvery is the shortest interval between two searches of all pods in the cache for pods
// without the barrier.
const missingEvery = 15 * time.Second

// missingOf returns a function that names the pods that ask for the barrier and were created
// without it. Its result may be as old as missingEvery.
func missingOf(mutator *admission.Mutator, synced func() bool) func() []string {
	var mu sync.Mutex
	var at time.Time
	var missing []string
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		if !synced() || time.Since(at) < missingEvery {
			return missing
		}
		if now, err := mutator.Missing(context.Background()); err == nil { // a synced cache does not fail
			at, missing = time.Now(), now
		}
		return missing
	}
}

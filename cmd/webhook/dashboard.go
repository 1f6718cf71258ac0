package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"strings"
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

// dashboardConns bounds the connections of those who look: each that follows keeps one.
const dashboardConns = 200

// listenDashboard listens where operators look. Nil: they may not.
func listenDashboard(ctx context.Context, address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return listener, nil
}

// dashboardTask serves operators on listener: by plain HTTP on a loopback address, else by TLS and
// those alone who have the right. To the end: a replica that ends shows what it still holds.
func dashboardTask(listener net.Listener, secure *tls.Config, d *dashboard.Dashboard, log *slog.Logger) serve.Task {
	return serve.Task{Name: "dashboard", Last: true, Run: func(ctx context.Context) error {
		if listener == nil {
			<-ctx.Done()
			return nil
		}
		if dashboard.Loopback(listener.Addr()) {
			secure = nil
		}
		return serve.All(ctx, serve.Task{Name: "views", Run: d.Run}, serve.Server{
			Name: "dashboard", Listener: listener, TLS: secure, Handler: d.Handler(listener.Addr()),
			Conns: dashboardConns, ReadTime: readTime,
			Stop: d.Stop, Grace: time.Second, Log: log,
		}.Task())
	}}
}

// nodeOf returns the node of a pod of the cache, named namespace/name, if it is still the one with
// that UID.
func nodeOf(known client.Reader, synced func() bool) func(name string, id drain.AgentID) string {
	return func(name string, id drain.AgentID) string {
		namespace, name, ok := strings.Cut(name, "/")
		if !ok || !synced() { // a cache that has not synced would wait for it
			return ""
		}
		var pod corev1.Pod
		if err := known.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: name},
			&pod); err != nil || drain.AgentID(pod.UID) != id {
			return ""
		}
		return pod.Spec.NodeName
	}
}

// podOf returns a pod of the cache, if it is still the one with that UID.
func podOf(known client.Reader, synced func() bool) func(drain.Pod) *corev1.Pod {
	return func(of drain.Pod) *corev1.Pod {
		var pod corev1.Pod
		if !synced() || known.Get(context.Background(), types.NamespacedName{Namespace: of.Namespace, Name: of.Name},
			&pod) != nil || drain.UID(pod.UID) != of.UID {
			return nil
		}
		return &pod
	}
}

// missingEvery is how often pods without the barrier are looked for at most: all pods of the cache
// are.
const missingEvery = 15 * time.Second

// missingOf returns the pods that ask for the barrier and were created without it, some seconds ago
// at most.
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
		if now, err := mutator.Missing(context.Background()); err == nil { // a cache that is there answers
			at, missing = time.Now(), now
		}
		return missing
	}
}

// consumersOf returns what Services of the cache say of those who send to their pods.
func consumersOf(known client.Reader, synced func() bool) func([]drain.Service) []dashboard.Consumers {
	return func(services []drain.Service) []dashboard.Consumers {
		var all []dashboard.Consumers
		for _, name := range services {
			var of corev1.Service
			if !synced() || known.Get(context.Background(),
				types.NamespacedName{Namespace: name.Namespace, Name: name.Name}, &of) != nil {
				return nil // of what is not known, nothing reassuring is said
			}
			c := dashboard.Consumers{
				Service: name, Headless: of.Spec.ClusterIP == corev1.ClusterIPNone,
				LoadBalancer: of.Spec.Type == corev1.ServiceTypeLoadBalancer,
			}
			if text, ok := of.Annotations[statedWait]; ok {
				wait, err := drain.ParseStatedWait(text)
				if c.Stated = wait; err != nil {
					c.Stated, c.Error = 0, err.Error()
				}
			}
			all = append(all, c)
		}
		return all
	}
}

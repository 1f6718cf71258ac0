// Command agent runs beside a gateway, or on a node for kube-proxy. It directs or observes the
// gateway and acknowledges to coordinators (cmd/webhook) when the gateway has stopped routing to a
// pod. On a node it also answers preStop hooks. This package parses the configuration and wires the
// packages below internal/agent; the gateways themselves are below pkg/gateway.
package main

import (
	"context"
	"io"
	"log/slog"
	"slices"

	"k8s.io/klog/v2"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/kubeclient"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

func main() { cli.Main("agent", run) }

// run is the whole program. getenv returns KUBECONFIG, NODE_NAME and the variables that the
// configuration file refers to as ${NAME}.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	o, err := parse(args, getenv, stdout)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: o.logLevel}))
	klog.SetSlogLogger(log)
	kube, _, err := kubeclient.New(o.kubeconfig, "lameduck-agent")
	if err != nil {
		return err
	}
	var bundle *discovery.Bundle
	if o.file.Coordinators != nil {
		if bundle, err = discovery.NewBundle(*o.file.Coordinators, log); err != nil {
			return err
		}
	}
	if kind, ok := o.kind.(gateway.ObservedKind); ok {
		return runObserved(ctx, o, kube, bundle, kind.Observe(log), log)
	}
	return runDirected(ctx, o, kube, bundle, o.directed, log)
}

// declared returns the routes that the agent declares to coordinators.
func declared(kind gateway.Kind, can drain.Kind) []drain.Route {
	every := drain.Route{Service: drain.EveryService, Via: drain.Endpoints, Kind: can}
	var all []drain.Route
	for _, r := range kind.Routes() {
		route := every
		// checked with the configuration
		route.Service.Namespace, route.Service.Name, _ = gateway.ParseService(r.Service)
		if !slices.Contains(all, route) {
			all = append(all, route)
		}
	}
	if len(all) == 0 {
		return []drain.Route{every}
	}
	return all
}

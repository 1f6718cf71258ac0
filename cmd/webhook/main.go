// Command webhook is Lameduck's coordinator. It answers the API server's question whether a pod may
// be deleted now, and delays the answer until the gateways have stopped routing to the pod. It also
// adds the preStop barrier to new pods, and serves agents (cmd/agent), the live page and metrics.
// This package parses the configuration and wires packages admission, coordinator and the rest.
package main

import (
	"context"
	"io"
	"log/slog"

	"github.com/lameduck-io/lameduck/internal/cli"
)

func main() { cli.Main("webhook", run) }

var errUsage, errPrinted = cli.ErrUsage, cli.ErrPrinted

// run is the whole program. getenv returns POD_NAME, POD_NAMESPACE and KUBECONFIG, which are the
// defaults of --replica, --namespace and --kubeconfig.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "check" {
		return check(ctx, args[1:], getenv, stdout)
	}
	o, err := parse(args, getenv, stdout)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: o.LogLevel}))
	return serveAll(ctx, o, log)
}

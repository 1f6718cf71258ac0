// Command webhook is Lameduck's coordinator: it answers the API server's question whether a pod may be deleted now, and holds the
// answer until the gateways that route to the pod have let go of it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp), errors.Is(err, errPrinted):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(1)
	}
}

// errUsage is what every error wraps that the command line caused. Nothing listens yet then.
var errUsage = errors.New("bad usage")

// errPrinted ends a program that was asked for its configuration or version alone.
var errPrinted = errors.New("printed")

// run is the whole program. getenv gives POD_NAME, POD_NAMESPACE and KUBECONFIG, the defaults of the flags of like meaning.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "check" {
		return check(ctx, args[1:], getenv, stdout)
	}
	o, err := parse(args, getenv, stdout)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: o.logLevel}))
	return serveAll(ctx, o, log)
}

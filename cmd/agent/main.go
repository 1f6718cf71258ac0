// Command agent stands beside a gateway: it directs what the gateway routes by EndpointSlices, takes pods out of it when a
// coordinator asks, and acknowledges what the gateway proves.
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
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

// errUsage is what every error wraps that the command line or the configuration file caused. Nothing listens yet then.
var errUsage = errors.New("bad usage")

// errPrinted ends a program that was asked for its configuration or version alone.
var errPrinted = errors.New("printed")

// run is the whole program. getenv gives KUBECONFIG and what the configuration file refers to as ${NAME}.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	o, err := parse(args, getenv, stdout)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: o.logLevel}))
	if o.file.KubeProxy != nil {
		return serveNode(ctx, o, log)
	}
	return serveAll(ctx, o, log)
}

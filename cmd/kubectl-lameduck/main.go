// Command kubectl-lameduck is a kubectl plugin, kubectl lameduck: it asks all coordinators what they know, through the API server, and shows the
// whole of it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil, errors.Is(err, pflag.ErrHelp), errors.Is(err, errPrinted):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "kubectl lameduck:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "kubectl lameduck:", err)
		os.Exit(1)
	}
}

// errUsage is what every error wraps that the command line caused.
var errUsage = errors.New("bad usage")

// errPrinted ends a program that was asked for its version alone.
var errPrinted = errors.New("printed")

// run is the whole program.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stdout)
	if err != nil {
		return err
	}
	all, err := find(ctx, o)
	if err != nil {
		return err
	}
	defer all.close()
	switch {
	case o.command == "status":
		return status(ctx, o, all, stdout, stderr)
	case o.command == "explain":
		return explain(ctx, o, all, stdout, stderr)
	case o.watch:
		return watchDrains(ctx, o, all, stdout, stderr)
	default:
		return drains(ctx, o, all, stdout, stderr)
	}
}

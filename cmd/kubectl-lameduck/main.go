// Command kubectl-lameduck is a kubectl plugin, "kubectl lameduck". It reads the state of all
// coordinators through the API server, merges it, and prints drains, agents, why a pod waits, and
// the checks of an installation. It changes nothing. docs/kubectl.md describes its commands.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/cli"
)

func main() {
	cli.Main("kubectl lameduck", func(ctx context.Context, args []string, _ func(string) string, stdout,
		stderr io.Writer) error {
		err := run(ctx, args, cli.Printable{Writer: stdout}, cli.Printable{Writer: stderr})
		if errors.Is(err, pflag.ErrHelp) {
			return errPrinted
		}
		return err
	})
}

var errUsage, errPrinted = cli.ErrUsage, cli.ErrPrinted

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stdout)
	if err != nil {
		return err
	}
	if o.command == "completion" || o.command == complete {
		return completion(o, stdout)
	}
	kube, err := kubernetes.NewForConfig(o.config)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	switch o.command {
	case "check":
		return diagnose(ctx, o, kube, stdout)
	case "version":
		return versions(ctx, o, kube, stdout, stderr)
	}
	all, err := find(ctx, o, kube)
	if err != nil {
		return err
	}
	defer all.close()
	switch {
	case o.command == "status":
		return status(ctx, o, all, stdout, stderr)
	case o.command == "report":
		return report(ctx, o, all, stdout, stderr)
	case o.command == "explain":
		return explain(ctx, o, kube, all, stdout, stderr)
	case o.watch:
		return watchDrains(ctx, o, all, stdout, stderr)
	default:
		return drains(ctx, o, all, stdout, stderr)
	}
}

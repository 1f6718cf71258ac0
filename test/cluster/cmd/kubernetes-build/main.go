// Command kubernetes-build builds the control plane that the tests run, or with the argument
// upstream the end-to-end tests of Kubernetes, unless they are built already, and prints the folder
// that they are in.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/lameduck-io/lameduck/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	build := cluster.Build
	if slices.Equal(os.Args[1:], []string{"upstream"}) {
		build = cluster.BuildUpstream
	}
	binaries, err := build(ctx, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes-build:", err)
		os.Exit(1)
	}
	fmt.Println(binaries.Dir)
}

// Command kubernetes-build builds the control plane that the tests run. With the argument upstream,
// it builds the end-to-end tests of Kubernetes instead. It does not rebuild existing programs. It
// prints the directory of the programs.
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

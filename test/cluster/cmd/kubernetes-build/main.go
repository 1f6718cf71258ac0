// Command kubernetes-build builds the control plane that the tests run, unless it is built already,
// and prints the folder it is in.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/lameduck-io/lameduck/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	binaries, err := cluster.Build(ctx, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes-build:", err)
		os.Exit(1)
	}
	fmt.Println(binaries.Dir)
}

// Command kubernetes-build gets the programs that the tests run, by download or from source. It
// does not get existing programs again. It prints their directory.
//
//	kubernetes-build                # a control plane, and the programs of a node
//	kubernetes-build control-plane  # a control plane
//	kubernetes-build upstream       # the end-to-end tests of Kubernetes
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/lameduck-io/lameduck/test/cluster/internal/programs"
)

func main() {
	sets := map[string]programs.Set{
		"": programs.All, "control-plane": programs.ControlPlane, "upstream": programs.Upstream,
	}
	set, ok := sets[strings.Join(os.Args[1:], " ")]
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: kubernetes-build [control-plane | upstream]")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// Not by package cluster: compiling that takes a minute, in which this program is silent.
	dir, _, err := programs.Get(ctx, os.Stderr, set, false)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubernetes-build:", err)
		os.Exit(1)
	}
	fmt.Println(dir)
}

package node_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/node"
)

// A demonstration: a cluster with two nodes, and something inside that a browser on the machine can
// see.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if !cluster.Inside() { // inside there is no network to build with
		if _, err := cluster.BuildControlPlane(ctx, os.Stderr); err != nil {
			log.Fatal(err)
		}
	}
	if err := cluster.Enter(); err != nil { // from here on inside
		log.Fatal(err)
	}
	c, err := cluster.Start(ctx, cluster.Options{LogDir: "logs"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Stop()

	var running sync.WaitGroup
	defer running.Wait()
	for i := 1; i <= 2; i++ {
		n, err := node.New(c.Config(), node.Options{
			Name:     fmt.Sprintf("node-%d", i),
			PodRange: netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i)),
			Images:   map[string][]string{"ghcr.io/lameduck-io/agent": {"/path/to/agent"}},
			Observe:  func(e node.Event) { fmt.Println(e) },
		})
		if err != nil {
			log.Fatal(err)
		}
		running.Go(func() {
			if err := n.Run(ctx); err != nil {
				log.Print(err)
			}
		})
		<-n.Ready()
	}
	out, err := c.Kubectl(ctx, "get", "nodes")
	if err != nil {
		log.Print(err)
	}
	fmt.Print(out)
	address, err := cluster.Expose(ctx, "10.244.1.1:8080", "")
	if err != nil {
		log.Print(err)
	}
	fmt.Println("http://" + address)
	<-ctx.Done()
}

package harness

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

// Lab is a cluster of real nodes for one test.
type Lab struct {
	*cluster.Cluster
	Set  *machine.Set
	Kube *kubernetes.Clientset
	// Sources are addresses of clients beside the nodes, with a route to ClusterIPs. There are
	// several because one would soon reuse a port whose connection conntrack still remembers.
	Sources []netip.Addr
	// logs are those of the pods, each a namespace and a selector, of which Explain shows a tail.
	logs [][2]string
	tail int
}

// NewLab starts n nodes. A failure of Await and Explain shows so many last lines of each of the
// logs, which are namespaces with selectors.
func NewLab(t testing.TB, control cluster.Options, n int, o machine.Options, tail int, logs ...[2]string) *Lab {
	t.Helper()
	began := time.Now()
	l := &Lab{Cluster: cluster.New(t, control), logs: logs, tail: tail}
	l.Set = machine.New(t, l.Cluster, n, o)
	var err error
	if l.Kube, err = kubernetes.NewForConfig(l.Config()); err != nil {
		t.Fatal(err)
	}
	if err := l.addClients(); err != nil {
		t.Fatal(err)
	}
	t.Logf("nodes after %s", time.Since(began).Round(time.Second/10))
	return l
}

// addClients adds Sources, and their route by the first node.
func (l *Lab) addClients() error {
	bridge, err := netlink.LinkByName("machines")
	if err != nil {
		return err
	}
	for i := range 6 {
		a := netip.AddrFrom4([4]byte{10, 245, 0, byte(11 + i)})
		if err := netlink.AddrAdd(bridge, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(),
			Mask: net.CIDRMask(24, 32)}}); err != nil {
			return err
		}
		l.Sources = append(l.Sources, a)
	}
	_, services, err := net.ParseCIDR(cluster.ServiceRange)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{Dst: services, Gw: l.Set.Machines[0].Address.AsSlice()})
}

// Await is the function Await, and explains a failure.
func (l *Lab) Await(t testing.TB, most time.Duration, what string, ask func() error) {
	t.Helper()
	if err := Poll(most, ask); err != nil {
		l.Explain(t)
		t.Fatalf("not within %s: %s: %v", most, what, err)
	}
}

// Explain logs pods, Events, and the ends of the logs.
func (l *Lab) Explain(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	all := [][]string{{"get", "pods", "-A", "-o", "wide"}, {"get", "events", "-A", "--sort-by=.lastTimestamp"}}
	for _, of := range l.logs {
		all = append(all, []string{"logs", "-n", of[0], "-l", of[1], "--all-containers", "--prefix",
			fmt.Sprint("--tail=", l.tail)})
	}
	for _, args := range all {
		out, _ := l.Kubectl(ctx, args...)
		lines := strings.Split(out, "\n")
		t.Logf("kubectl %s\n%s", strings.Join(args, " "), strings.Join(lines[max(0, len(lines)-3*l.tail):], "\n"))
	}
}

// Everything is all objects of the cluster, but those that come and go by themselves.
func (l *Lab) Everything(t testing.TB) map[string]bool {
	t.Helper()
	out, err := l.Kubectl(t.Context(), "api-resources", "--verbs=list", "-o", "name")
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, kind := range strings.Fields(out) {
		if kind == "events" || kind == "events.events.k8s.io" || strings.HasPrefix(kind, "leases.") {
			continue
		}
		kinds = append(kinds, kind)
	}
	if out, err = l.Kubectl(t.Context(), "get", strings.Join(kinds, ","), "-A", "--no-headers", "-o",
		"custom-columns=:apiVersion,:kind,:metadata.namespace,:metadata.name"); err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 0 {
			all[strings.Join(fields, " ")] = true
		}
	}
	if len(all) < 50 {
		t.Fatalf("a cluster has more than %d objects", len(all))
	}
	return all
}

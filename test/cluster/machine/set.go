package machine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/internal/cgroup"
	"github.com/lameduck-io/lameduck/test/cluster/internal/pid1"
)

var (
	// subnet is that of the bridge: the control plane is gateway, machine i has the i-th address
	// after first.
	subnet   = netip.MustParsePrefix("10.245.0.0/24")
	subnet6  = netip.MustParsePrefix("fd10:245::/64")
	gateway  = netip.MustParseAddr("10.245.0.1")
	gateway6 = netip.MustParseAddr("fd10:245::1")

	// PodRange and PodRange6 are where pods on all machines have their addresses. They meet neither
	// [cluster.PodRange] nor [cluster.ServiceRange].
	PodRange  = netip.MustParsePrefix("10.246.0.0/16")
	PodRange6 = netip.MustParsePrefix("fd10:246::/48")
)

// ServiceRange6 is where a control plane with the options of [ControlPlane] gives Services their
// IPv6 addresses from.
const ServiceRange6 = "fd10:96::/112"

const (
	bridgeName = "machines"
	maxNodes   = 99

	// Of the node's life as the control plane sees it: how long a lease lasts, of which a quarter
	// passes between renewals, and how long a node may be silent before it is NotReady. The
	// defaults are 40 and 50 s.
	leaseSeconds = 8
	grace        = 12 * time.Second
)

// Proxy is the way in which kube-proxy programs the kernel, by the name of its flag.
type Proxy string

// The ways that this kernel has. IPVS is none of them.
const (
	NFTables Proxy = "nftables"
	IPTables Proxy = "iptables"
)

// Options of machines. The zero value is a complete one.
type Options struct {
	// Proxy is NFTables if empty.
	Proxy Proxy
	// Images are there when the nodes become ready. More can be added by [Set.Load].
	Images []Image
	// Kubelet are lines to add to each kubelet's configuration, as YAML: "shutdownGracePeriod:
	// 30s". Kept apart from those that Start writes: the same key twice is an error.
	Kubelet []string
	// KubeProxy are further flags of kube-proxy.
	KubeProxy []string
}

// ControlPlane returns the options of a control plane for machines: a node that is cut off is
// NotReady within some 15 s, and the API server finds webhooks by their Services' endpoints, since
// it has no kube-proxy, and kubelets by their addresses; Services may have both kinds of addresses,
// and have IPv4 alone if they do not ask. They are the caller's to add to.
func ControlPlane() cluster.Options {
	return cluster.Options{
		APIServer: []string{
			"--enable-aggregator-routing=true", "--kubelet-preferred-address-types=InternalIP",
			"--service-cluster-ip-range=" + cluster.ServiceRange + "," + ServiceRange6,
		},
		ControllerManager: []string{"--node-monitor-period=1s", "--node-monitor-grace-period=" + grace.String()},
	}
}

// Set is machines that form a cluster with one control plane.
type Set struct {
	// Machines are in the order of their names, node-1 first.
	Machines []*Machine

	cluster *cluster.Cluster
	options Options
	dir     string
	bridge  netlink.Link
}

// Start starts n machines and returns when all of their nodes are Ready and their kube-proxies have
// programmed the kernel. The program must have called [cluster.EnterAsRoot], and have no other set
// running. On an error nothing is left running. The caller calls Stop, before that of the cluster.
func Start(ctx context.Context, c *cluster.Cluster, n int, options Options) (*Set, error) {
	if err := Installed(); err != nil {
		return nil, err
	}
	if cluster.RunName() == "" || os.Geteuid() != 0 {
		return nil, errors.New("machines are started inside, by root: call cluster.EnterAsRoot first")
	}
	if n < 1 || n > maxNodes {
		return nil, fmt.Errorf("start %d machines: want 1 to %d", n, maxNodes)
	}
	switch options.Proxy {
	case "":
		options.Proxy = NFTables
	case NFTables, IPTables:
	default:
		return nil, fmt.Errorf("unknown mode of kube-proxy %q", options.Proxy)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "machines-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for machines: %w", err)
	}
	s := &Set{cluster: c, options: options, dir: dir}
	if err := s.start(ctx, n); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Set) start(ctx context.Context, n int) error {
	if err := s.addBridge(); err != nil {
		return err
	}
	pause, err := buildPause(ctx, s.dir)
	if err != nil {
		return err
	}
	images, err := s.pack(append([]Image{pause}, s.options.Images...))
	if err != nil {
		return err
	}
	for i := range n {
		address, address6 := gateway.As4(), gateway6.As16()
		address[3], address6[15] = byte(101+i), byte(101+i)
		pods, pods6 := PodRange.Addr().As4(), PodRange6.Addr().As16()
		pods[2], pods6[7] = byte(1+i), byte(1+i)
		name := fmt.Sprintf("node-%d", i+1)
		s.Machines = append(s.Machines, &Machine{
			Name: name, Address: netip.AddrFrom4(address), Pods: netip.PrefixFrom(netip.AddrFrom4(pods), 24),
			Address6: netip.AddrFrom16(address6), Pods6: netip.PrefixFrom(netip.AddrFrom16(pods6), 64),
			dir: filepath.Join(s.dir, name), group: cluster.RunName() + "/" + name, logDir: s.cluster.LogDir(),
			link:     name,
			programs: map[string]program{}, network: -1,
		})
	}
	client, err := kubernetes.NewForConfig(s.cluster.Config())
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	// In two steps: a route to a machine leads by way of its address, which has to be there.
	if err := s.each(func(m *Machine) error {
		for _, dir := range []string{"tmp", "cni/bin", "kubelet"} {
			if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil {
				return err
			}
		}
		if err := s.configure(m); err != nil {
			return err
		}
		return m.boot(ctx, s.bridge)
	}); err != nil {
		return err
	}
	if err := s.route(); err != nil {
		return err
	}
	return s.each(func(m *Machine) error { return s.provision(ctx, m, client, images) })
}

// addBridge makes what all machines are plugged into.
func (s *Set) addBridge() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = bridgeName
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make a bridge for machines: %w", err)
	}
	s.bridge = bridge
	for _, address := range []netip.Prefix{netip.PrefixFrom(gateway, subnet.Bits()),
		netip.PrefixFrom(gateway6, subnet6.Bits())} {
		if err := addAddress(netlink.AddrAdd, bridge, address); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("make a bridge for machines: %w", err)
	}
	return nil
}

// route tells the control plane and every machine where each machine's pods are. The control plane
// is not asked to forward anything.
func (s *Set) route() error {
	for _, to := range s.Machines {
		routes := func() error {
			return errors.Join(
				netlink.RouteAdd(&netlink.Route{Dst: ipNet(to.Pods), Gw: to.Address.AsSlice()}),
				netlink.RouteAdd(&netlink.Route{Dst: ipNet(to.Pods6), Gw: to.Address6.AsSlice()}),
			)
		}
		if err := routes(); err != nil {
			return fmt.Errorf("route to the pods of %s: %w", to.Name, err)
		}
		for _, from := range s.Machines {
			if from == to {
				continue
			}
			if err := from.Do(routes); err != nil {
				return fmt.Errorf("route from %s to the pods of %s: %w", from.Name, to.Name, err)
			}
		}
	}
	return nil
}

// provision starts the programs of a machine, each when what it needs is there.
func (s *Set) provision(ctx context.Context, m *Machine, client kubernetes.Interface, images []archive) error {
	binaries := s.cluster.Binaries()
	if err := m.start("containerd", "containerd", "--config", pid1.Dir+"/containerd.toml"); err != nil {
		return err
	}
	proxy := append([]string{
		binaries.Path("kube-proxy"), "--kubeconfig=" + pid1.Dir + "/kube-proxy.kubeconfig",
		"--hostname-override=" + m.Name,
		"--proxy-mode=" + string(s.options.Proxy), "--cluster-cidr=" + PodRange.String() + "," + PodRange6.String(),
		// Those are settings of the whole system.
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0",
		"--conntrack-tcp-timeout-close-wait=0",
		"--oom-score-adj=0",
	}, s.options.KubeProxy...)
	if err := m.start("kube-proxy", proxy...); err != nil {
		return err
	}
	err := m.await(ctx, "containerd", func(ctx context.Context) error {
		_, err := m.ctr(ctx, "version")
		return err
	}, "containerd")
	if err != nil {
		return err
	}
	for _, image := range images {
		if err := m.load(ctx, image); err != nil {
			return err
		}
	}
	if err := m.start("kubelet",
		binaries.Path("kubelet"), "--config="+pid1.Dir+"/kubelet.yaml", "--kubeconfig="+pid1.Dir+"/kubelet.kubeconfig",
		"--root-dir="+pid1.Dir+"/kubelet", "--cert-dir="+pid1.Dir+"/kubelet/pki", "--hostname-override="+m.Name,
		"--node-ip="+m.Address.String()+","+m.Address6.String(),
	); err != nil {
		return err
	}
	// kube-proxy is not healthy before it knows its node and has synced.
	if err := m.await(ctx, "the kube-proxy", func(ctx context.Context) error {
		return m.healthy(ctx, "http://"+m.Address.String()+":10256/healthz")
	}, "containerd", "kubelet", "kube-proxy"); err != nil {
		return err
	}
	return m.await(ctx, "the node", func(ctx context.Context) error { return ready(ctx, client, m.Name) },
		"containerd", "kubelet", "kube-proxy")
}

// ready is nil for a node that is Ready and on which pods can be put.
func ready(ctx context.Context, client kubernetes.Interface, name string) error {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if len(node.Spec.Taints) > 0 {
		return fmt.Errorf("node %s is tainted: %s", name, node.Spec.Taints[0].Key)
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("node %s is not ready", name)
}

// Stop switches all machines off and removes what is left of them. It may be called again.
func (s *Set) Stop() error {
	errs := []error{s.each((*Machine).Stop)}
	if s.bridge != nil {
		if link, err := netlink.LinkByName(bridgeName); err == nil && link.Attrs().Index == s.bridge.Attrs().Index {
			if err := netlink.LinkDel(link); err != nil {
				errs = append(errs, fmt.Errorf("remove the bridge: %w", err))
			}
		}
	}
	if len(s.Machines) > 0 {
		errs = append(errs, cgroup.Remove(cluster.RunName()))
	}
	if err := os.RemoveAll(s.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove the folder of machines: %w", err))
	}
	return errors.Join(errs...)
}

// each does one thing on all machines at once.
func (s *Set) each(do func(*Machine) error) error {
	errs := make([]error, len(s.Machines))
	var wg sync.WaitGroup
	for i, m := range s.Machines {
		wg.Go(func() { errs[i] = do(m) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Installed returns an error that names the missing programs and the remedy. Nil: this system has
// all programs that machines need.
func Installed() error {
	var missing []string
	for _, name := range []string{"containerd", "containerd-shim-runc-v2",
		"ctr", "runc", "nft", "iptables", "conntrack", "nsenter"} {
		if _, err := exec.LookPath(name); err != nil {
			missing = append(missing, name)
		}
	}
	if pluginDir() == "" {
		missing = append(missing, "CNI plugins")
	}
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return errors.New("no IPv6 in this kernel: it was started with ipv6.disable=1")
	}
	if len(missing) > 0 {
		return fmt.Errorf("no %s here: make node-packages, or apt-get install containerd runc "+
			"containernetworking-plugins nftables iptables conntrack", strings.Join(missing, ", "))
	}
	return nil
}

// pluginDir is where CNI plugins are: Debian's place, or that of everybody else.
func pluginDir() string {
	for _, dir := range []string{"/usr/lib/cni", "/opt/cni/bin"} {
		if _, err := os.Stat(filepath.Join(dir, "ptp")); err == nil {
			return dir
		}
	}
	return ""
}

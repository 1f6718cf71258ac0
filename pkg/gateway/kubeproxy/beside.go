package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/internal/signal"
)

// besides are the network plugins that choose the pod behind a Service's address by themselves,
// before the packet comes to kube-proxy's rules, each by an interface that it makes on every node.
// The interface tells nothing of programs of others that are attached to cgroups or interfaces. The
// first one was seen (Cilium 1.19, with kubeProxyReplacement=false); the others are documented.
var besides = []struct{ link, name string }{
	{"cilium_host", "Cilium"},
	{"antrea-gw0", "Antrea"},
	{"ovn-k8s-mp0", "OVN-Kubernetes"},
	{"bpfin.cali", "Calico's eBPF mode"},
}

// besideLook is the interval at which the interfaces are looked for.
const besideLook = time.Second

// Beside implements gateway.Sharer.
func (o *Observer) Beside() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.beside
}

// watchBeside looks for what chooses pods beside kube-proxy, until ctx is done.
func (o *Observer) watchBeside(ctx context.Context) {
	for signal.Sleep(ctx, besideLook) {
		o.lookBeside()
	}
}

// lookBeside records what chooses pods beside kube-proxy. If the interfaces cannot be read, what
// was known holds.
func (o *Observer) lookBeside() {
	name, err := o.findBeside()
	if err != nil {
		o.log.Warn("look for what chooses pods beside kube-proxy", "error", err)
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.beside = name
}

func (o *Observer) findBeside() (name string, err error) {
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{NetNS: o.netns})
	if err != nil {
		return "", fmt.Errorf("open a netlink socket: %w", err)
	}
	defer func() { _ = conn.Close() }()
	for _, b := range besides {
		ask := append(make([]byte, unix.SizeofIfInfomsg), encodeString(unix.IFLA_IFNAME, b.link)...)
		_, err := conn.Execute(netlink.Message{
			Header: netlink.Header{Type: unix.RTM_GETLINK, Flags: netlink.Request}, Data: ask})
		switch {
		case err == nil:
			return b.name, nil
		case !errors.Is(err, unix.ENODEV):
			return "", fmt.Errorf("look for the interface %s: %w", b.link, err)
		}
	}
	return "", nil
}

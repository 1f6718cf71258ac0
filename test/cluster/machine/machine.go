// Package machine runs several real Kubernetes nodes on one computer. Each has namespaces of its
// own with a containerd, a kubelet, a kube-proxy and a network for its pods. One bridge connects
// the nodes and the control plane.
//
//	func TestMain(m *testing.M) { cluster.MainAsRoot(m) }
//
//	func TestSomething(t *testing.T) {
//		c := cluster.New(t, machine.ControlPlane())
//		set := machine.New(t, c, 3, machine.Options{})
//		...
//	}
//
// It needs root and some system packages ([Installed] names the missing ones). A machine runs
// entirely in its own mount, network, process and host name namespaces. So killing its first
// process acts like a power cut: its processes, mounts, packet filter rules and pods disappear at
// once. That process ends with the test, however the test ends. The kernel keeps only the control
// groups. [Set.Stop] removes them, else the end of the program, else root's next [cluster.Enter].
//
// Each machine has its own real containerd, runc, CNI, kubelet, kube-proxy, packet filter and
// connection tracking, and can be disconnected. Unlike real nodes, machines share a kernel, its
// clock, and the memory pressure and CPUs of the computer, and nothing is reserved. There is no
// cluster DNS, images are never pulled, the API server has no IPv6 address, and the kubelet's own
// API authenticates no client. In place of the kernel settings that kubelets change, kubelets see
// ordinary files.
package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/test/cluster/internal/cgroup"
	"github.com/lameduck-io/lameduck/test/cluster/internal/pid1"
	"github.com/lameduck-io/lameduck/test/cluster/internal/process"
)

// Machine is one node. It is made by [Start].
type Machine struct {
	// Name is that of the node and of the host.
	Name string
	// Address and Address6 are the node's, on the bridge.
	Address, Address6 netip.Addr
	// Pods and Pods6 are where its pods get their addresses from, except those that use the host's
	// network.
	Pods, Pods6 netip.Prefix

	dir     string // /run/node inside
	group   string // its control group
	logDir  string
	link    string // the bridge's end of its cable
	first   *process.Process
	network netns.NsHandle

	mu       sync.Mutex
	programs map[string]program // by name, the latest of each
	stopped  bool
}

type program struct {
	*process.Process
	command []string
}

// boot starts the machine's first process and plugs it in.
func (m *Machine) boot(ctx context.Context, bridge netlink.Link) error {
	if err := cgroup.Make(m.group); err != nil {
		return err
	}
	report, reportIn, err := os.Pipe()
	if err != nil {
		return err
	}
	defer report.Close()
	log, err := m.log("first")
	if err != nil {
		reportIn.Close()
		return err
	}
	defer log.Close()
	cmd, err := pid1.Command(m.Name, m.dir, reportIn)
	if err != nil {
		reportIn.Close()
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	m.first, err = process.Start(cmd)
	reportIn.Close()
	if err != nil {
		return fmt.Errorf("start machine %s: %w", m.Name, err)
	}
	stop := context.AfterFunc(ctx, func() { m.first.SignalGroup(syscall.SIGKILL) })
	defer stop()
	said, err := io.ReadAll(report)
	if err != nil || string(said) != "ready" {
		return fmt.Errorf("start machine %s: %s (%v)", m.Name, said, err)
	}
	if m.network, err = netns.GetFromPid(m.first.Pid()); err != nil {
		return fmt.Errorf("find the network of machine %s: %w", m.Name, err)
	}
	if err := m.plug(bridge); err != nil {
		return fmt.Errorf("plug machine %s in: %w", m.Name, err)
	}
	return nil
}

// plug connects the machine to the bridge and makes the control plane's side its gateway.
func (m *Machine) plug(bridge netlink.Link) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = m.link, bridge.Attrs().Index
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(m.network)}); err != nil {
		return fmt.Errorf("make a cable: %w", err)
	}
	if err := m.Heal(); err != nil {
		return err
	}
	inside, err := netlink.NewHandleAt(m.network, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()
	for _, name := range []string{"lo", "eth0"} {
		link, err := inside.LinkByName(name)
		if err != nil {
			return err
		}
		if name == "eth0" {
			for _, address := range []netip.Prefix{netip.PrefixFrom(m.Address, subnet.Bits()),
				netip.PrefixFrom(m.Address6, subnet6.Bits())} {
				if err := addAddress(inside.AddrAdd, link, address); err != nil {
					return err
				}
			}
		}
		if err := inside.LinkSetUp(link); err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	for _, gateway := range []netip.Addr{gateway, gateway6} {
		if err := inside.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("route by way of %s: %w", gateway, err)
		}
	}
	return nil
}

// addAddress gives a link an address without asking the others, which takes a second, whether it is
// theirs.
func addAddress(add func(netlink.Link, *netlink.Addr) error, link netlink.Link, address netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(address)}
	if address.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := add(link, a); err != nil {
		return fmt.Errorf("give %s the address %s: %w", link.Attrs().Name, address, err)
	}
	return nil
}

// Cut pulls the machine's cable: neither the control plane nor the other machines reach it, nor it
// them. All on it runs on.
func (m *Machine) Cut() error { return m.setLink(netlink.LinkSetDown) }

// Heal puts the cable back.
func (m *Machine) Heal() error { return m.setLink(netlink.LinkSetUp) }

func (m *Machine) setLink(set func(netlink.Link) error) error {
	link, err := netlink.LinkByName(m.link)
	if err == nil {
		err = set(link)
	}
	if err != nil {
		return fmt.Errorf("cable of machine %s: %w", m.Name, err)
	}
	return nil
}

// Do runs f in the network of the machine: sockets that f itself makes, not goroutines of it, are
// the machine's and stay so. Package net makes them itself for addresses in numbers.
func (m *Machine) Do(f func() error) error {
	// A duplicate of it: the machine may be switched off meanwhile, and the number given to another
	// file.
	m.mu.Lock()
	fd, err := unix.FcntlInt(uintptr(m.network), unix.F_DUPFD_CLOEXEC, 0)
	m.mu.Unlock()
	if err != nil {
		return fmt.Errorf("enter the network of machine %s, which may be switched off: %w", m.Name, err)
	}
	network := netns.NsHandle(fd)
	defer network.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		here, err := netns.Get()
		if err != nil {
			done <- err
			return // with the thread
		}
		defer here.Close()
		if err := netns.Set(network); err != nil {
			done <- fmt.Errorf("enter the network of machine %s: %w", m.Name, err)
			return
		}
		err = f()
		// A thread that cannot come back ends here.
		if netns.Set(here) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Dial connects to an address in numbers, from the machine, as a program on it in the host's
// network does. So it reaches ClusterIPs, NodePorts and pods, by the kube-proxy of the machine.
func (m *Machine) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("dial from machine %s: %w", m.Name, err)
	}
	var conn net.Conn
	err := m.Do(func() (err error) {
		var dialer net.Dialer
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen listens on a TCP address of the machine, in numbers.
func (m *Machine) Listen(address string) (net.Listener, error) {
	var listener net.Listener
	err := m.Do(func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	return listener, err
}

// Command is exec.CommandContext for a program on the machine: as root, in all of its namespaces.
// The files of the computer are there, with /run and what is new in /var being the machine's own.
// When ctx ends it and its children, unless they have left its group, are killed.
func (m *Machine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	args = append([]string{"--target", fmt.Sprint(m.first.Pid()), "--mount", "--net", "--pid", "--uts", "--ipc", "--",
		name}, args...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	// nsenter is the program's parent, not the program: a signal to it alone ends nothing.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

// Run runs a program on the machine and returns what it wrote.
func (m *Machine) Run(ctx context.Context, name string, args ...string) (string, error) {
	out, err := m.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s on machine %s: %w: %s", name, m.Name, err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// start starts one of the machine's own programs, which logs to NODE.PROGRAM.log.
func (m *Machine) start(name string, command ...string) error {
	log, err := m.log(name)
	if err != nil {
		return err
	}
	defer log.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped {
		return fmt.Errorf("start %s: machine %s is switched off", name, m.Name)
	}
	cmd := m.Command(context.Background(), command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "HOME="+pid1.Dir, "TMPDIR="+pid1.Dir+"/tmp")
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"} {
		cmd.Env = append(cmd.Env, name+"=") // of the computer, and out of reach
	}
	p, err := process.Start(cmd)
	if err != nil {
		return err
	}
	m.programs[name] = program{p, command}
	return nil
}

// Restart kills containerd, kubelet or kube-proxy with SIGKILL and starts it again, with more flags
// that later restarts keep. Pods run on. It does not wait until the new one is ready.
func (m *Machine) Restart(name string, flags ...string) error {
	if err := m.Kill(name); err != nil {
		return err
	}
	m.mu.Lock()
	command := slices.Concat(m.programs[name].command, flags)
	m.mu.Unlock()
	return m.start(name, command...)
}

// Reconfigure restarts the kubelet with further lines in its configuration, in place of those of
// [Options]. It does not wait until the kubelet is ready.
func (m *Machine) Reconfigure(kubelet ...string) error {
	if err := os.WriteFile(filepath.Join(m.dir, "kubelet.yaml"), []byte(kubeletConfig(m, kubelet)), 0o644); err != nil {
		return fmt.Errorf("configure machine %s: %w", m.Name, err)
	}
	return m.Restart("kubelet")
}

// Kill kills containerd, kubelet or kube-proxy with SIGKILL and waits until it is gone. Killed
// again, nothing happens.
func (m *Machine) Kill(name string) error {
	m.mu.Lock()
	p, ok := m.programs[name]
	m.mu.Unlock()
	if !ok {
		return fmt.Errorf("kill %s: no such program on machine %s", name, m.Name)
	}
	p.KillChild()
	return nil
}

// Stop switches the machine off: all that runs on it is killed at once, with its rules, mounts and
// addresses. The node and its pods remain in the API. A machine does not start again. It may be
// called again.
func (m *Machine) Stop() error {
	m.mu.Lock()
	first := m.first
	already := m.stopped
	m.stopped = true
	for _, p := range m.programs {
		p.Signal(syscall.SIGCONT) // an nsenter that has stopped with its child would not reap it
	}
	m.mu.Unlock()
	if already {
		return nil
	}
	var errs []error
	if first != nil {
		first.Kill()
		// Dropped by the kernel with its other end, though in its own time.
		if link, err := netlink.LinkByName(m.link); err == nil {
			if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, fmt.Errorf("remove the cable of machine %s: %w", m.Name, err))
			}
		}
		m.mu.Lock()
		if m.network.IsOpen() {
			m.network.Close()
		}
		m.mu.Unlock()
	}
	errs = append(errs, cgroup.Remove(m.group))
	if err := os.RemoveAll(m.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove the folder of machine %s: %w", m.Name, err))
	}
	return errors.Join(errs...)
}

// log opens the log of one of the machine's programs.
func (m *Machine) log(name string) (*os.File, error) {
	file, err := os.OpenFile(m.logPath(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", name, err)
	}
	return file, nil
}

func (m *Machine) logPath(name string) string {
	return filepath.Join(m.logDir, m.Name+"."+name+".log")
}

// await asks until ask returns nil, and fails when one of the programs that it depends on exits or
// ctx ends.
func (m *Machine) await(ctx context.Context, what string, ask func(context.Context) error, programs ...string) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := ask(attempt)
		cancel()
		if err == nil {
			return nil
		}
		for _, name := range programs {
			m.mu.Lock()
			p := m.programs[name]
			m.mu.Unlock()
			select {
			case <-p.Done():
				return fmt.Errorf("wait for %s of machine %s: %s exited (%v); the end of its log:\n%s", what, m.Name,
					name, err, tail(m.logPath(name), 15))
			default:
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s of machine %s: %w (%v)", what, m.Name, context.Cause(ctx), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// healthy asks a path of a program on the machine.
func (m *Machine) healthy(ctx context.Context, url string) error {
	transport := &http.Transport{DialContext: m.Dial, DisableKeepAlives: true}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	return nil
}

// tail is the last lines of a file, or why they cannot be read.
func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}
}

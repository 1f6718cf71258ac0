package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	proxyServices  = 1000
	proxyEndpoints = 10 // of each Service
	proxyRemovals  = 40
	proxyIdle      = 5 * time.Second
	proxyGoal      = 10 * time.Millisecond
	// proxyConnections are in the kernel's table, of each family.
	proxyConnections = 100_000
	proxyInside      = "kubeproxy-inside"
)

// proxyFigures is what is measured in the network namespace.
type proxyFigures struct {
	Read time.Duration // all that is there, once
	// From before the transaction is handed to the kernel until the observer tells of it, until a
	// bare listener has it, and until the kernel has answered.
	Notice, Bare, Commit []time.Duration
	// Idle is the CPU time of the observer, user and system, in proxyIdle without changes, Busy in
	// as long with a change each second.
	Idle, Busy time.Duration
	// ReadCPU is the CPU time of the first reading, ReadKernel the part of it that the kernel took.
	ReadCPU, ReadKernel time.Duration
	// Four and Six are the CPU time of one look at the connections to one address, by family, with
	// proxyConnections of each.
	Four, Six time.Duration
}

// The rules are written, and followed, in a network namespace of its own, by a process that does
// nothing else.
func init() {
	if len(os.Args) == 2 && os.Args[1] == proxyInside {
		inside(observeProxy())
	}
}

// inside ends a process that has measured something in namespaces of its own: the figures go to its
// parent.
func inside[T any](figures T, err error) {
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(figures)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// kubeProxy measures how soon who watches one endpoint of 10,000 is told when a transaction has
// taken it out of the kernel's rules, the kernel's own work included, and what following costs when
// nothing changes. Beside the former stands a program that reads the kernel's notification and does
// nothing with it.
func kubeProxy() ([]Result, error) {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil, fmt.Errorf("nft is missing: apt-get install nftables, with /usr/sbin in the PATH: %w", err)
	}
	var out, said bytes.Buffer
	cmd := exec.Command("/proc/self/exe", proxyInside)
	cmd.Stdout, cmd.Stderr = &out, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	if err := cmd.Run(); err != nil {
		if os.Geteuid() != 0 {
			err = fmt.Errorf("%w (not root: it takes root, or user namespaces)", err)
		}
		return nil, fmt.Errorf("in a network namespace: %w: %s", err, said.String())
	}
	var f proxyFigures
	if err := json.Unmarshal(out.Bytes(), &f); err != nil {
		return nil, err
	}
	share := func(used time.Duration) float64 { return 100 * float64(used) / float64(proxyIdle) }
	p50 := func(d []time.Duration) time.Duration { return slices.Sorted(slices.Values(d))[len(d)/2] }
	return []Result{
		{
			Name: "kubeproxy/notice-10k", Ratio: float64(p50(f.Notice)) / float64(proxyGoal), Goal: 1,
			Note: fmt.Sprintf("from before a commit to changed(), one of %d endpoints: p50 %.2f ms, worst %.2f, by "+
				"10 ms; a bare listener %.2f, the commit itself %.2f; the first reading %.0f ms",
				proxyServices*proxyEndpoints, ms(p50(f.Notice)), ms(slices.Max(f.Notice)), ms(p50(f.Bare)),
				ms(p50(f.Commit)), ms(f.Read)),
		},
		{
			Name: "kubeproxy/idle-cpu", Ratio: share(f.Idle), Goal: 1,
			Note: fmt.Sprintf("%% of a core with %d endpoints and no change, by 1 %%; with one change a second %.2f %%",
				proxyServices*proxyEndpoints, share(f.Busy)),
		},
		{
			Name: "kubeproxy/dump", Ratio: float64(f.ReadCPU) / float64(f.ReadKernel), Goal: 2.5,
			Note: fmt.Sprintf("the CPU time of the first reading of %d endpoints, %.0f ms, by the %.0f ms of it "+
				"that the kernel took", proxyServices*proxyEndpoints, ms(f.ReadCPU), ms(f.ReadKernel)),
		},
		{
			Name: "kubeproxy/count-ipv6", Ratio: float64(f.Six) / float64(f.Four), Goal: 6,
			Note: fmt.Sprintf("connections to one address with IPv6, %.0f ms of CPU, by the same with IPv4, %.0f "+
				"ms, where there are %d of each", ms(f.Six), ms(f.Four), proxyConnections),
		},
	}, nil
}

func ms(d time.Duration) float64 { return d.Seconds() * 1000 }

// observeProxy makes the rules and the measurements.
func observeProxy() (f proxyFigures, err error) {
	have := make([][]netip.AddrPort, proxyServices)
	lines := strings.Split(`add table ip kube-proxy { comment "rules for kube-proxy" ; }
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip kube-proxy services
add rule ip kube-proxy nat-output jump services
add rule ip kube-proxy nat-prerouting jump services
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips`, "\n")
	for i := range have {
		for e := range proxyEndpoints {
			have[i] = append(have[i], netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244 + byte(i>>8), byte(i),
				byte(e + 1)}), 8080))
		}
		lines = append(lines, fmt.Sprintf("add chain ip kube-proxy %s", proxyChain(i)))
		lines = append(lines, proxyService(i, have[i])...)
		lines = append(lines, fmt.Sprintf("add element ip kube-proxy service-ips { 10.96.%d.%d . tcp . 80 : goto %s }",
			i>>8, i&255, proxyChain(i)))
	}
	if _, err := nft(lines); err != nil {
		return f, err
	}
	o := kubeproxy.New(kubeproxy.Options{})
	if f.Four, f.Six, err = lookAtConnections(o); err != nil {
		return f, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		return f, err
	}
	began := time.Now()
	go func() { done <- o.Run(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-done)
	}()
	// A hundred more are watched: a rollout in full swing.
	told := make(chan time.Time, 1)
	victim := have[0][0]
	w := o.Watch([]netip.AddrPort{victim}, func() {
		now := time.Now()
		select {
		case told <- now:
		default:
		}
	})
	defer w.Close()
	for i := range 100 {
		defer o.Watch([]netip.AddrPort{have[i+1][0]}, func() {}).Close()
	}
	for w.Reading().State != health.Routing {
		if time.Since(began) > time.Minute {
			return f, fmt.Errorf("the rules are not seen: %+v", w.Reading())
		}
		time.Sleep(time.Millisecond)
	}
	f.Read = time.Since(began)
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		return f, err
	}
	f.ReadKernel = time.Duration(after.Stime.Nano() - before.Stime.Nano())
	f.ReadCPU = f.ReadKernel + time.Duration(after.Utime.Nano()-before.Utime.Nano())
	if f.Idle, err = used(nil); err != nil {
		return f, err
	}
	change := func(without int) (time.Duration, error) {
		endpoints := slices.Clone(have[0])
		if without >= 0 {
			endpoints = slices.Delete(endpoints, without, without+1)
		}
		return nft(append([]string{"flush chain ip kube-proxy " + proxyChain(0)}, proxyService(0, endpoints)...))
	}
	seconds := 0
	if f.Busy, err = used(func() error {
		seconds++
		_, err := change([]int{5, -1}[seconds%2])
		return err
	}); err != nil {
		return f, err
	}
	if seconds%2 == 1 {
		if _, err := change(-1); err != nil {
			return f, err
		}
	}
	listener, err := listen()
	if err != nil {
		return f, err
	}
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return f, err
	}
	defer func() { _ = conn.Close() }()
	// The first Service is left with one endpoint, which goes and comes back.
	back := append([]string{"flush chain ip kube-proxy " + proxyChain(0)}, proxyService(0, have[0][:1])...)
	back = append(back, fmt.Sprintf("add element ip kube-proxy service-ips { 10.96.0.0 . tcp . 80 : goto %s }",
		proxyChain(0)))
	for range proxyRemovals {
		if _, err := nft(back); err != nil {
			return f, err
		}
		for end := time.Now().Add(10 * time.Second); w.Reading().State != health.Kept; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				return f, fmt.Errorf("an endpoint is not seen: %+v", w.Reading())
			}
		}
		time.Sleep(20 * time.Millisecond)
		for len(told)+len(listener) > 0 {
			select {
			case <-told:
			case <-listener:
			}
		}
		began := time.Now()
		if err := removeLast(conn); err != nil {
			return f, err
		}
		f.Commit = append(f.Commit, time.Since(began))
		var noticed, changed time.Time
		for noticed.IsZero() || changed.IsZero() {
			select {
			case noticed = <-listener:
			case changed = <-told:
			case <-time.After(10 * time.Second):
				return f, fmt.Errorf("a removal is not noticed: the listener at %v, the observer at %v: %+v", noticed,
					changed, w.Reading())
			}
		}
		f.Notice, f.Bare = append(f.Notice, changed.Sub(began)), append(f.Bare, noticed.Sub(began))
	}
	return f, nil
}

// lookAtConnections fills the kernel's table of connections, looks for those to an address that has
// none, in each family, and empties the table.
func lookAtConnections(o *kubeproxy.Observer) (four, six time.Duration, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = conn.Close() }()
	const ctNew, ctDelete, tupleOrig, tupleReply, status, protoInfo, timeout = 0, 2, 1, 2, 3, 4, 7
	var batch []netlink.Message
	for i := range 2 * proxyConnections {
		family, kind, size := byte(unix.AF_INET), uint16(1), 4 // the source's address; the destination's is the next
		if i%2 > 0 {
			family, kind, size = unix.AF_INET6, 3, 16
		}
		addr := func(last byte) []byte {
			b := make([]byte, size)
			b[0], b[1], b[size-2], b[size-1] = 10, byte(i>>16), byte(i>>8), last
			return b
		}
		e := netlink.NewAttributeEncoder()
		e.ByteOrder = binary.BigEndian
		tuple := func(number uint16, from, to []byte) {
			e.Nested(number, func(e *netlink.AttributeEncoder) error {
				e.Nested(1, func(e *netlink.AttributeEncoder) error {
					e.Bytes(kind, from)
					e.Bytes(kind+1, to)
					return nil
				})
				e.Nested(2, func(e *netlink.AttributeEncoder) error {
					e.Uint8(1, unix.IPPROTO_TCP)
					e.Uint16(2, 8080)
					e.Uint16(3, 8080)
					return nil
				})
				return nil
			})
		}
		tuple(tupleOrig, addr(byte(i)), addr(0))
		tuple(tupleReply, addr(0), addr(byte(i)))
		e.Uint32(timeout, 600)
		e.Uint32(status, 0xe) // seen, assured, confirmed
		e.Nested(protoInfo, func(e *netlink.AttributeEncoder) error {
			e.Nested(1, func(e *netlink.AttributeEncoder) error {
				e.Uint8(1, 3) // established
				return nil
			})
			return nil
		})
		b, err := e.Encode()
		if err != nil {
			return 0, 0, err
		}
		batch = append(batch, netlink.Message{
			Header: netlink.Header{Type: unix.NFNL_SUBSYS_CTNETLINK<<8 | ctNew,
				Flags: netlink.Request | netlink.Create}, Data: append([]byte{family, 0, 0, 0}, b...),
		})
		if len(batch) == 100 {
			if _, err := conn.SendMessages(batch); err != nil {
				return 0, 0, err
			}
			batch = batch[:0]
		}
	}
	look := func(target string) func() time.Duration {
		return func() time.Duration {
			return onCPU(func() { err = errors.Join(err, o.Clean([]netip.AddrPort{netip.MustParseAddrPort(target)})) })
		}
	}
	for range 5 {
		four += look("10.255.0.1:80")() / 5
		six += look("[fd00::1]:80")() / 5
	}
	if err != nil {
		return 0, 0, err
	}
	_, err = conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_CTNETLINK<<8 | ctDelete,
			Flags: netlink.Request | netlink.Acknowledge}, Data: make([]byte, 4),
	})
	return four, six, err
}

// removeLast does what kube-proxy does when the first Service loses its last endpoint: delete
// element ip kube-proxy service-ips { 10.96.0.0 . tcp . 80 }, and flush the Service's chain. It
// does so without nft, which takes longer than what is measured.
func removeLast(conn *netlink.Conn) error {
	message := func(kind uint16, flags netlink.HeaderFlags, family byte, resource byte,
		attributes func(*netlink.AttributeEncoder)) netlink.Message {
		e := netlink.NewAttributeEncoder()
		attributes(e)
		b, _ := e.Encode() // nothing in it is too long
		return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | flags},
			Data: append([]byte{family, 0, 0, resource}, b...)}
	}
	const subsystem = unix.NFNL_SUBSYS_NFTABLES
	none := func(*netlink.AttributeEncoder) {}
	_, err := conn.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, subsystem, none),
		message(subsystem<<8|unix.NFT_MSG_DELSETELEM, 0, unix.AF_INET, 0, func(e *netlink.AttributeEncoder) {
			e.String(unix.NFTA_SET_ELEM_LIST_TABLE, "kube-proxy")
			e.String(unix.NFTA_SET_ELEM_LIST_SET, "service-ips")
			e.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(e *netlink.AttributeEncoder) error {
				e.Nested(1, func(e *netlink.AttributeEncoder) error {
					e.Nested(unix.NFTA_SET_ELEM_KEY, func(e *netlink.AttributeEncoder) error {
						e.Bytes(unix.NFTA_DATA_VALUE, []byte{10, 96, 0, 0, unix.IPPROTO_TCP, 0, 0, 0, 0, 80, 0, 0})
						return nil
					})
					return nil
				})
				return nil
			})
		}),
		message(subsystem<<8|unix.NFT_MSG_DELRULE, netlink.Acknowledge, unix.AF_INET, 0,
			func(e *netlink.AttributeEncoder) {
				e.String(unix.NFTA_RULE_TABLE, "kube-proxy")
				e.String(unix.NFTA_RULE_CHAIN, proxyChain(0))
			}),
		message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, subsystem, none),
	})
	if err != nil {
		return fmt.Errorf("send a transaction: %w", err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if _, err := conn.Receive(); err != nil {
		return fmt.Errorf("commit a transaction: %w", err)
	}
	return nil
}

func proxyChain(i int) string { return fmt.Sprintf("ULMVA6XW-default/service-%d/tcp/http", i) }

// proxyService is the rule of a Service, as kube-proxy 1.36 writes it.
func proxyService(i int, endpoints []netip.AddrPort) []string {
	var elements []string
	for n, e := range endpoints {
		elements = append(elements, fmt.Sprintf("%d : %s . %d", n, e.Addr(), e.Port()))
	}
	return []string{fmt.Sprintf("add rule ip kube-proxy %s meta l4proto tcp dnat ip addr . port to numgen random "+
		"mod %d map { %s }",
		proxyChain(i), len(endpoints), strings.Join(elements, " , "))}
}

// nft makes one transaction and returns how long that took.
func nft(lines []string) (time.Duration, error) {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("nft: %w: %.500s", err, out)
	}
	return time.Since(began), nil
}

// used returns the CPU time of this process in proxyIdle, in which it calls each once a second.
func used(each func() error) (time.Duration, error) {
	runtime.GC()
	cpu := func() (time.Duration, error) {
		var u unix.Rusage
		err := unix.Getrusage(unix.RUSAGE_SELF, &u)
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
	}
	before, err := cpu()
	if err != nil {
		return 0, err
	}
	for end := time.Now().Add(proxyIdle); time.Now().Before(end); time.Sleep(time.Second) {
		if each != nil {
			if err := each(); err != nil {
				return 0, err
			}
		}
	}
	after, err := cpu()
	return after - before, err
}

// listen tells when the ends of commits are received by a thread that does nothing else.
func listen() (chan time.Time, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES); err != nil {
		return nil, err
	}
	ends := make(chan time.Time, 100)
	go func() {
		runtime.LockOSThread() // until the process ends
		b := make([]byte, 1<<20)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			now := time.Now()
			if err != nil {
				continue
			}
			for m := b[:n]; len(m) >= unix.NLMSG_HDRLEN; {
				length := int(binary.NativeEndian.Uint32(m))
				if length < unix.NLMSG_HDRLEN || length > len(m) {
					break
				}
				if binary.NativeEndian.Uint16(m[4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN {
					ends <- now
				}
				m = m[min((length+3)&^3, len(m)):]
			}
		}
	}()
	return ends, nil
}

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/gateway/kernel"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	kernelInside     = "kernel-inside"
	kernelExclusions = 10_000
	kernelDials      = 500
	kernelGoal       = time.Millisecond
)

// kernelFigures is what is measured in the namespaces.
type kernelFigures struct {
	// By a connect() of a process in another cgroup: one that the programs see, the same beside
	// kernelExclusions, and one that is redirected beside these.
	Connect, Many, Redirected float64
	Removed                   []time.Duration // from each order until it is read
}

func init() {
	if len(os.Args) == 3 && os.Args[1] == kernelInside {
		inside(directByKernel(os.Args[2]))
	}
}

// kernelDirects measures what the programs of the kind kernel add to a connect(), and how soon an
// excluded target is read as Removed. It needs root.
func kernelDirects() ([]Result, error) {
	dir, err := os.MkdirTemp("", "bpf")
	if err != nil {
		return nil, err
	}
	defer os.Remove(dir)
	cmd := exec.Command("/proc/self/exe", kernelInside, dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("in namespaces of its own (it takes root): %w", err)
	}
	var f kernelFigures
	if err := json.Unmarshal(out, &f); err != nil {
		return nil, err
	}
	slices.Sort(f.Removed)
	p50, p99 := f.Removed[len(f.Removed)/2], f.Removed[len(f.Removed)*99/100]
	return []Result{
		{Name: "kernel/connect", Ratio: f.Connect, Goal: 1.5,
			Note: "a connect() that the programs see, by one of a process in another cgroup"},
		{Name: "kernel/connect-10k", Ratio: f.Many, Goal: 1.5,
			Note: fmt.Sprintf("the same beside %d exclusions", kernelExclusions)},
		{Name: "kernel/redirected", Ratio: f.Redirected, Goal: 1.5,
			Note: "one that is redirected, beside these exclusions"},
		{Name: "kernel/removed", Ratio: float64(p50) / float64(kernelGoal), Goal: 1,
			Note: fmt.Sprintf("from the agent's order to Removed: p50 %.3f ms, p99 %.3f, by 1 ms", ms(p50), ms(p99))},
	}, nil
}

// directByKernel is a gateway and its agent in one process, with a bpffs at dir. It leaves the
// cgroup of its pod for each floor: the programs see none of these connections.
func directByKernel(dir string) (f kernelFigures, err error) {
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		return f, fmt.Errorf("mount bpffs: %w", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return f, fmt.Errorf("ip link: %w: %s", err, out)
	}
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified"); err == nil {
		root += "/unified"
	}
	uid := fmt.Sprintf("bench-%d", os.Getpid())
	pod := filepath.Join(root, "pod"+uid)
	if err := os.Mkdir(pod, 0o755); err != nil {
		return f, err
	}
	move := func(to string) error {
		return os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(fmt.Sprint(os.Getpid())), 0o644)
	}
	defer func() { err = errors.Join(err, move(root), os.Remove(pod)) }()
	if err := move(pod); err != nil {
		return f, err
	}
	c := kernel.Config{PodUID: uid, Cgroups: root, Pins: dir, Services: []kernel.Service{{Service: "shop/web"}}}
	g, err := c.Direct()
	if err != nil {
		return f, err
	}
	ctx := context.Background()
	key := func(a netip.AddrPort) health.Key {
		return health.Key{Pool: "shop/web:", Target: health.Target{UID: health.UID(a.String()), Addr: a}}
	}
	apply := func(want health.Want, all ...netip.AddrPort) error {
		var ops []health.Op
		for _, a := range all {
			ops = append(ops, health.Op{Key: key(a), Want: want})
		}
		return g.Apply(ctx, ops)
	}
	a, closeA, err := accept("127.0.0.2")
	if err != nil {
		return f, err
	}
	defer closeA()
	b, closeB, err := accept("127.0.0.3")
	if err != nil {
		return f, err
	}
	defer closeB()
	if err := apply(health.WantRouted, a, b); err != nil {
		return f, err
	}
	var failed error
	dials := func(in string) func() time.Duration {
		return func() time.Duration {
			failed = errors.Join(failed, move(in))
			took, err := connects(a)
			failed = errors.Join(failed, err)
			return took
		}
	}
	measure := func() float64 { return ratio(dials(pod), dials(root)) }
	f.Connect = measure()
	for range 200 {
		began := time.Now()
		if err := apply(health.WantRemoved, a); err != nil {
			return f, err
		}
		seen, err := g.Observe(ctx, []health.Key{key(a)})
		f.Removed = append(f.Removed, time.Since(began))
		if err != nil || seen.Seen[key(a)].Routed {
			return f, fmt.Errorf("it is seen as %+v: %w", seen.Seen[key(a)], err)
		}
		if err := apply(health.WantRouted, a); err != nil {
			return f, err
		}
	}
	var many []netip.AddrPort
	for i := range kernelExclusions {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], 10<<24+uint32(i))
		many = append(many, netip.AddrPortFrom(netip.AddrFrom4(ip), 80))
	}
	if err := apply(health.WantRemoved, many...); err != nil {
		return f, err
	}
	f.Many = measure()
	if err := apply(health.WantRemoved, a); err != nil {
		return f, err
	}
	conn, err := net.Dial("tcp", a.String())
	if err != nil {
		return f, err
	}
	defer conn.Close()
	if at := conn.RemoteAddr().String(); at != b.String() {
		return f, fmt.Errorf("%s was reached at %s", a, at)
	}
	f.Redirected = measure()
	return f, failed
}

// accept accepts connections, and forgets them.
func accept(ip string) (netip.AddrPort, func() error, error) {
	l, err := net.Listen("tcp", ip+":0")
	if err != nil {
		return netip.AddrPort{}, nil, err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()), l.Close, nil
}

// connects returns what the median connect() took of many.
func connects(to netip.AddrPort) (time.Duration, error) {
	var times []float64
	for range kernelDials {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
		if err != nil {
			return 0, err
		}
		began := time.Now()
		err = syscall.Connect(fd, &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
		times = append(times, float64(time.Since(began)))
		syscall.Close(fd)
		if err != nil {
			return 0, err
		}
	}
	return time.Duration(median(times)), nil
}

package kernel

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/sockets"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// dialer is a process that connects where it is told: "4 127.0.0.1:80" with an IPv4 socket, "6 ..."
// with an IPv6 socket, also to IPv4. It answers with the peer, and keeps the connections until it
// is told "close".
func dialer() {
	var open []int
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		family, to, _ := strings.Cut(in.Text(), " ")
		if family == "close" {
			for _, fd := range open {
				syscall.Close(fd)
			}
			open = nil
			fmt.Println("closed")
			continue
		}
		fd, answer, err := dial(family == "6", netip.MustParseAddrPort(to))
		if open = append(open, fd); err != nil {
			answer = err.Error()
		}
		fmt.Println(answer)
	}
}

func dial(six bool, to netip.AddrPort) (fd int, peer string, err error) {
	port := int(to.Port())
	domain, sa := syscall.AF_INET6, syscall.Sockaddr(&syscall.SockaddrInet6{Port: port, Addr: to.Addr().As16()})
	if !six {
		domain, sa = syscall.AF_INET, &syscall.SockaddrInet4{Port: port, Addr: to.Addr().As4()}
	}
	if fd, err = syscall.Socket(domain, syscall.SOCK_STREAM, 0); err != nil {
		return fd, "", err
	}
	if err = syscall.Connect(fd, sa); err != nil {
		return fd, "", err
	}
	if sa, err = syscall.Getpeername(fd); err != nil {
		return fd, "", err
	}
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		return fd, netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)).String(), nil
	case *syscall.SockaddrInet6:
		return fd, netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)).String(), nil
	}
	return fd, "", errors.New("no address")
}

// child is this program in another role, in a container of a pod.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Reader
}

func (p *pod) child(t testing.TB, as string, before ...string) *child {
	t.Helper()
	script := `echo $$ > "$0/cgroup.procs" && exec "$@"`
	args := append([]string{"-c", script, filepath.Join(p.dir, "sidecar")}, before...)
	cmd := exec.Command("/bin/sh", append(args, "/proc/self/exe")...)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args[len(cmd.Args)-1] = exe
	config, err := json.Marshal(p.config)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), role+"="+as, "CONFIG="+string(config))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &child{t, cmd, in, bufio.NewReader(out)}
}

func (c *child) line() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("%v after %q", err, line)
	}
	return strings.TrimSpace(line)
}

func (c *child) ask(format string, args ...any) string {
	c.t.Helper()
	fmt.Fprintf(c.in, format+"\n", args...)
	return c.line()
}

// listen accepts connections at ip until the test ends.
func listen(t testing.TB, ip string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { conn.Close() })
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

const web = health.Pool("shop/web:http")

func key(a netip.AddrPort) health.Key {
	return health.Key{Pool: web, Target: health.Target{UID: health.UID("uid of " + a.String()), Addr: a}}
}

func apply(t testing.TB, g *Gateway, want health.Want, all ...netip.AddrPort) {
	t.Helper()
	var ops []health.Op
	for _, a := range all {
		ops = append(ops, health.Op{Key: key(a), Want: want})
	}
	if err := g.Apply(t.Context(), ops); err != nil {
		t.Fatal(err)
	}
}

// listed is that EndpointSlices call a target ready.
func listed(a netip.AddrPort) health.Change {
	return health.Change{Endpoint: health.Endpoint{Target: key(a).Target, Routable: true}}
}

// see reads twice: the first reading of an exclusion does not count.
func see(t testing.TB, g *Gateway, k health.Key) health.Seen {
	t.Helper()
	if _, err := g.Observe(t.Context(), []health.Key{k}); err != nil {
		t.Fatal(err)
	}
	o, err := g.Observe(t.Context(), []health.Key{k})
	if err != nil {
		t.Fatal(err)
	}
	return o.Seen[k]
}

// Each family of addresses has a hook or a form of its own, and only the pod's processes are meant.
func TestRedirect(t *testing.T) {
	for _, systemd := range []bool{false, true} {
		p := newPod(t, systemd)
		g, dials := p.open(t), p.child(t, "dial")
		for _, tt := range []struct{ socket, ip string }{{"4", "127.0.80."}, {"6", "127.0.81."}, {"6", "::1"}} {
			var all []netip.AddrPort
			for i := range 4 {
				ip := tt.ip
				if ip != "::1" {
					ip += fmt.Sprint(i + 1)
				}
				all = append(all, listen(t, ip))
			}
			apply(t, g, health.WantRouted, all...)
			if got := dials.ask("%s %s", tt.socket, all[0]); got != all[0].String() {
				t.Fatalf("nothing is excluded, and the peer is %s", got)
			}
			apply(t, g, health.WantRemoved, all[0])
			if seen := see(t, g, key(all[0])); seen.Routed || seen.Active != 1 {
				t.Errorf("it is seen as %+v", seen)
			}
			peers := map[string]int{}
			for range 300 {
				peers[dials.ask("%s %s", tt.socket, all[0])]++
			}
			for _, a := range all[1:] {
				if n := peers[a.String()]; n < 60 || n > 140 {
					t.Errorf("of 300 connections %v", peers)
				}
			}
			if got := dials.ask("%s %s", tt.socket, all[1]); got != all[1].String() {
				t.Errorf("what is not excluded has the peer %s", got)
			}
			fd, peer, err := dial(tt.socket == "6", all[0])
			if err != nil || peer != all[0].String() {
				t.Errorf("another pod has the peer %s, %v", peer, err)
			}
			syscall.Close(fd)
			if got := dials.ask("close"); got != "closed" {
				t.Fatal(got)
			}
			planes.Until(t, "it is idle", func() bool { return see(t, g, key(all[0])).Active == 0 })
			// The replacements change with the endpoints. Without any, connections pass.
			apply(t, g, health.WantAbsent, all[2], all[3])
			for range 20 {
				if got := dials.ask("%s %s", tt.socket, all[0]); got != all[1].String() {
					t.Fatalf("the peer is %s", got)
				}
			}
			apply(t, g, health.WantAbsent, all[1])
			if got := dials.ask("%s %s", tt.socket, all[0]); got != all[0].String() {
				t.Errorf("no replacement is left, and the peer is %s", got)
			}
			if seen := see(t, g, key(all[0])); !seen.Routed {
				t.Errorf("it is seen as %+v", seen)
			}
			apply(t, g, health.WantRouted, all[1])
			if got := dials.ask("%s %s", tt.socket, all[0]); got != all[1].String() {
				t.Errorf("the peer is %s", got)
			}
			dials.ask("close")
			apply(t, g, health.WantAbsent, all...)
		}
	}
}

// The programs obey the expiry. The agent that wrote it is dead.
func TestExpiry(t *testing.T) {
	p := newPod(t, false)
	g, dials := p.open(t), p.child(t, "dial")
	a, b := listen(t, "127.0.82.1"), listen(t, "127.0.82.2")
	x := exclusion{Expires: sinceBoot() + uint64(time.Second), Count: 1}
	x.Replacements[0] = addressOf(b)
	if err := g.maps["excluded"].Put(addressOf(a), &x); err != nil {
		t.Fatal(err)
	}
	if got := dials.ask("4 %s", a); got != b.String() && sinceBoot() < x.Expires {
		t.Fatalf("the peer is %s", got)
	}
	planes.Until(t, "the exclusion has expired", func() bool { return dials.ask("4 %s", a) == a.String() })
	if left := remaining(x.Expires, sinceBoot()); left > 0 {
		t.Errorf("it expired %s too early", left)
	}
}

// An address that is no endpoint any more stays excluded while the gateway may not know that yet,
// and no longer.
func TestAnAddressThatIsNoEndpoint(t *testing.T) {
	p := newPod(t, false)
	g := p.open(t)
	a, b := listen(t, "127.0.83.1"), listen(t, "127.0.83.2")
	if seen := see(t, g, key(a)); !seen.Routed {
		t.Fatalf("what the agent was not told of is seen as %+v", seen)
	}
	apply(t, g, health.WantRouted, a, b)
	apply(t, g, health.WantAbsent, a)
	var x exclusion
	if err := g.maps["excluded"].Lookup(addressOf(a), &x); err != nil {
		t.Fatal(err)
	}
	if left := remaining(x.Expires, sinceBoot()); x.Count != 1 || left > settle || left < settle/2 {
		t.Errorf("%d replacements, %s", x.Count, left)
	}
	if seen := see(t, g, key(a)); seen != (health.Seen{Missing: true}) {
		t.Errorf("it is seen as %+v", seen)
	}
	// The last of a Service has no replacement.
	apply(t, g, health.WantAbsent, b)
	if seen := see(t, g, key(b)); !seen.Routed {
		t.Errorf("at once: %+v", seen)
	}
	g.excluded[b].left = time.Now().Add(-settle)
	if seen := see(t, g, key(b)); seen != (health.Seen{Missing: true}) {
		t.Errorf("later: %+v", seen)
	}
	for _, e := range g.excluded {
		e.Expires = 1
	}
	g.write(time.Now())
	if err := g.maps["excluded"].Lookup(addressOf(a), &x); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("it is in the map: %v", err)
	}
}

// A connection that was opened before the programs were there counts, and so does one of which
// there is no socket in the kernel's table yet.
func TestConnectionsThatCount(t *testing.T) {
	p := newPod(t, false)
	dials := p.child(t, "dial")
	a := listen(t, "127.0.84.1")
	dials.ask("4 %s", a)
	g := p.open(t)
	apply(t, g, health.WantRouted, a, listen(t, "127.0.84.2"))
	apply(t, g, health.WantRemoved, a)
	if seen := see(t, g, key(a)); seen.Active != 1 {
		t.Errorf("before: %+v", seen)
	}
	fd, _, err := dial(false, a) // not of the pod
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if seen := see(t, g, key(a)); seen.Active != 1 {
		t.Errorf("of the node: %+v", seen)
	}
	dials.ask("close")
	planes.Until(t, "it is closed", func() bool { return see(t, g, key(a)).Active == 0 })
	if err := g.maps["dialing"].Put(uint64(1)<<60, addressOf(a)); err != nil {
		t.Fatal(err)
	}
	if seen := see(t, g, key(a)); seen.Active != 1 {
		t.Errorf("about to be opened: %+v", seen)
	}
	// A detached program leaves notes that no socket deletes any more.
	for cookie, since := range g.dialing {
		g.dialing[cookie] = since.Add(-settle)
	}
	if seen := see(t, g, key(a)); seen.Active != 0 {
		t.Errorf("%s later: %+v", settle, seen)
	}
	// The note of a connection that could not be opened ends with its socket.
	if got := dials.ask("4 240.0.0.1:80"); !strings.Contains(got, "unreachable") {
		t.Fatal(got)
	}
	nowhere := netip.MustParseAddrPort("240.0.0.1:80")
	if n, err := g.count(); n[nowhere] != 1 || err != nil {
		t.Errorf("%d notes, %v", n[nowhere], err)
	}
	dials.ask("close")
	if n, err := g.count(); n[nowhere] != 0 || err != nil {
		t.Errorf("%d notes after the end, %v", n[nowhere], err)
	}
}

// With hostNetwork all pods have the network of the node. Only the gateway's own processes are
// redirected, and only their connections count or are closed.
func TestHostNetwork(t *testing.T) {
	p := newPod(t, false)
	other := newPodIn(t, p.root, filepath.Dir(p.dir), "pod%s") // of the same class
	p.config.Services[0].HTTP1Quiet = "5ms"                    // less than a file may say
	g, dials, dialsToo := p.open(t), p.child(t, "dial"), other.child(t, "dial")
	a, b := listen(t, "127.0.93.1"), listen(t, "127.0.93.2")
	fromNode := func() string {
		fd, peer, err := dial(false, a)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { syscall.Close(fd) })
		return peer
	}
	apply(t, g, health.WantRouted, a, b)
	for _, peer := range []string{dials.ask("4 %s", a), dialsToo.ask("4 %s", a), fromNode()} {
		if peer != a.String() {
			t.Fatalf("nothing is excluded, and the peer is %s", peer)
		}
	}
	apply(t, g, health.WantRemoved, a)
	planes.Until(t, "the gateway's connection is closed", func() bool { return see(t, g, key(a)).Active == 0 })
	for range 20 {
		if peer := dials.ask("4 %s", a); peer != b.String() {
			t.Fatalf("the gateway reaches %s", peer)
		}
		if peer := dialsToo.ask("4 %s", a); peer != a.String() {
			t.Fatalf("another pod on the node's network reaches %s", peer)
		}
		if peer := fromNode(); peer != a.String() {
			t.Fatalf("the node reaches %s", peer)
		}
	}
	if seen := see(t, g, key(a)); seen.Routed || seen.Active != 0 {
		t.Errorf("connections of the node and of another pod are seen as %+v", seen)
	}
	if n := opened(t, a); n != 2*21 {
		t.Errorf("of 42 connections of the node and of another pod %d are open", n)
	}
	// A gateway beside it, with an agent of its own.
	second := other.open(t)
	apply(t, second, health.WantRouted, a, b)
	apply(t, second, health.WantRemoved, b)
	if peer := dialsToo.ask("4 %s", b); peer != a.String() {
		t.Errorf("the second gateway reaches %s", peer)
	}
	if peer := dials.ask("4 %s", b); peer != b.String() {
		t.Errorf("the first gateway reaches %s", peer)
	}
}

// opened returns how many connections to an address are open in this network.
func opened(t *testing.T, to netip.AddrPort) (n int) {
	t.Helper()
	all, err := sockets.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Remote == to {
			n++
		}
	}
	return n
}

// Connections that were redirected are closed when they are quiet and their pod is routed again,
// also by the next agent, and no others are.
func TestRedirectedConnectionsAreClosed(t *testing.T) {
	for _, quiet := range []string{"", "5ms"} { // less than a file may say
		p := newPod(t, false)
		p.config.Services[0].HTTP1Quiet = quiet
		dials := p.child(t, "dial")
		a, b := listen(t, "127.0.95.1"), listen(t, "127.0.95.2")
		g := p.open(t)
		apply(t, g, health.WantRouted, a, b)
		apply(t, g, health.WantRemoved, a)
		dials.ask("4 %s", b)
		dials.ask("6 %s", a)
		dials.ask("4 %s", a)
		look := func(g *Gateway, want int) {
			t.Helper()
			for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if _, err := g.Observe(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
				if n := opened(t, b); n < want {
					t.Fatalf("http1Quiet %q: %d connections are open, want %d", quiet, n, want)
				}
			}
		}
		look(g, 3) // the exclusion stands
		apply(t, g, health.WantRouted, a)
		next := p.open(t)
		want := 3
		if quiet != "" {
			want = 1
			planes.Until(t, "both are closed", func() bool {
				if _, err := next.Observe(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
				notes, err := next.notes("redirected")
				return err == nil && len(notes) == 0 && opened(t, b) == 1
			})
		}
		look(next, want)
		dials.ask("close")
		if notes, err := next.notes("redirected"); err != nil || len(notes) > 0 {
			t.Errorf("notes of connections that are closed: %v, %v", notes, err)
		}
		// A detached program leaves notes that no socket deletes any more.
		if err := next.maps["redirected"].Put(uint64(1)<<60, addressOf(a)); err != nil {
			t.Fatal(err)
		}
		if _, err := next.count(); err != nil {
			t.Fatal(err)
		}
		if notes, err := next.notes("redirected"); err != nil || len(notes) > 0 {
			t.Errorf("a note without a socket: %v, %v", notes, err)
		}
	}
}

// One pod in two Services has one address. Its replacement is in both, and it is not kept from one
// alone.
func TestOnePodOfTwoServices(t *testing.T) {
	p := newPod(t, false)
	p.config.Services = append(p.config.Services, Service{Service: "shop/api"})
	g := p.open(t)
	a, b, c := listen(t, "127.0.85.1"), listen(t, "127.0.85.2"), listen(t, "127.0.85.3")
	apply(t, g, health.WantRouted, a, b, c)
	other := func(a netip.AddrPort, want health.Want) health.Op {
		k := key(a)
		k.Pool = "shop/api:"
		return health.Op{Key: k, Want: want}
	}
	if err := g.Apply(t.Context(), []health.Op{other(a, health.WantRouted), other(c, health.WantRouted)}); err != nil {
		t.Fatal(err)
	}
	err := g.Apply(t.Context(), []health.Op{{Key: key(a), Want: health.WantRemoved}})
	if err == nil || !strings.Contains(err.Error(), "another Service") {
		t.Errorf("from one of them: %v", err)
	}
	if seen := see(t, g, key(a)); !seen.Routed {
		t.Errorf("it is seen as %+v", seen)
	}
	if err := g.Apply(t.Context(), []health.Op{{Key: key(a), Want: health.WantRemoved},
		other(a, health.WantRemoved)}); err != nil {
		t.Fatal(err)
	}
	if e := g.excluded[a]; e.Count != 1 || e.Replacements[0] != addressOf(c) {
		t.Errorf("the replacements are %v", e.Replacements[:e.Count])
	}
}

// A pod that one Service has left stays routed for the other. When it is drained later, the Service
// that it left asks nothing of its replacements: there may be no pod that is in both.
func TestAPodThatHasLeftOneOfTwoServices(t *testing.T) {
	p := newPod(t, false)
	p.config.Services = append(p.config.Services, Service{Service: "shop/api"})
	g := p.open(t)
	a, b, c := listen(t, "127.0.86.1"), listen(t, "127.0.86.2"), listen(t, "127.0.86.3")
	apply(t, g, health.WantRouted, a, b)
	left := key(a)
	left.Pool = "shop/api:"
	also := left
	also.Target.Addr = c
	do := func(ops ...health.Op) {
		t.Helper()
		if err := g.Apply(t.Context(), ops); err != nil {
			t.Fatal(err)
		}
	}
	do(health.Op{Key: left, Want: health.WantRouted}, health.Op{Key: also, Want: health.WantRouted})
	for range 2 {
		do(health.Op{Key: left, Want: health.WantAbsent})
		if seen := see(t, g, left); !seen.Missing || seen.Present || seen.Routed {
			t.Errorf("in the Service that it left it is seen as %+v", seen)
		}
		if seen := see(t, g, key(a)); !seen.Routed {
			t.Errorf("it is seen as %+v", seen)
		}
	}
	// The gateway may still mean that Service.
	do(health.Op{Key: key(a), Want: health.WantRemoved})
	if seen := see(t, g, key(a)); !seen.Routed {
		t.Errorf("with a replacement of one Service it is seen as %+v", seen)
	}
	g.pools[a][left.Pool] = time.Now().Add(-settle)
	for range 2 {
		do(health.Op{Key: key(a), Want: health.WantRemoved}, health.Op{Key: left, Want: health.WantAbsent})
		if seen := see(t, g, key(a)); seen.Routed {
			t.Errorf("%s later it is seen as %+v", settle, seen)
		}
		if e := g.excluded[a]; e.Count != 1 || e.Replacements[0] != addressOf(b) {
			t.Errorf("the replacements are %v", e.Replacements[:e.Count])
		}
	}
}

// A pod that ends leaves all its Services. What any of them asks of replacements and of open
// connections holds for as long as a connection is open.
func TestAPodThatLeavesBothServices(t *testing.T) {
	p := newPod(t, false)
	p.config.Services = append(p.config.Services, Service{Service: "shop/api"})
	g, dials := p.open(t), p.child(t, "dial")
	a, b, c := listen(t, "127.0.87.1"), listen(t, "127.0.87.2"), listen(t, "127.0.87.3")
	do := func(want health.Want, each bool, all ...netip.AddrPort) {
		t.Helper()
		var ops []health.Op
		for _, at := range all {
			for _, pool := range []health.Pool{"shop/api:", web} {
				k := key(at)
				k.Pool = pool
				ops = append(ops, health.Op{Key: k, Want: want})
			}
		}
		if !each {
			if err := g.Apply(t.Context(), ops); err != nil {
				t.Fatal(err)
			}
			return
		}
		for _, op := range ops {
			if err := g.Apply(t.Context(), []health.Op{op}); err != nil {
				t.Fatal(err)
			}
		}
	}
	both := map[health.Pool]bool{"shop/api:": true, web: true}
	do(health.WantRouted, false, a, b)
	apply(t, g, health.WantRouted, c)
	dials.ask("4 %s", a)
	do(health.WantRemoved, false, a)
	for _, each := range []bool{false, true} { // as the operations come, and as they are tried again
		do(health.WantAbsent, each, a)
		if got := g.poolsOf(a, time.Now().Add(2*settle)); !maps.Equal(got, both) || len(g.targets[a]) != 2 {
			t.Errorf("with an open connection: %v, %v", got, g.targets[a])
		}
		if e := g.excluded[a]; e.Count != 1 || e.Replacements[0] != addressOf(b) {
			t.Errorf("the replacements are %v", e.Replacements[:e.Count])
		}
	}
	dials.ask("close")
	planes.Until(t, "it is forgotten", func() bool {
		do(health.WantAbsent, false, a)
		return len(g.targets[a]) == 0
	})
	if got := g.poolsOf(a, time.Now().Add(2*settle)); !maps.Equal(got, both) {
		t.Errorf("afterwards: %v", got)
	}
	g.excluded[a].Expires = 1
	g.write(time.Now())
	if g.pools[a] != nil || len(g.absent) != 0 {
		t.Errorf("left are %v and %v", g.pools[a], g.absent)
	}
}

// EndpointSlices list two pods at one address: connections pass to it as long as one of them is
// routed, so the drain of the other is not acknowledged before that ends.
func TestTwoPodsAtOneAddress(t *testing.T) {
	p := newPod(t, false)
	g, dials := p.open(t), p.child(t, "dial")
	a, b := listen(t, "127.0.98.1"), listen(t, "127.0.98.2")
	stale := listed(a)
	stale.UID = "stale"
	set := health.New(health.Options{})
	set.Change(time.Now(), web, []health.Change{listed(a), listed(b), stale})
	set.Synced()
	step := func() health.State {
		t.Helper()
		ops, keys := set.Pending(), set.Watched()
		for _, op := range ops {
			keys = append(keys, op.Key)
		}
		if err := g.Apply(t.Context(), ops); err != nil {
			t.Fatal(err)
		}
		seen, err := g.Observe(t.Context(), keys)
		if err != nil {
			t.Fatal(err)
		}
		set.Observe(time.Now(), seen)
		if all := set.Exclusions(); len(all) > 0 {
			return all[0].State
		}
		return health.Unknown
	}
	step()
	set.Exclude(time.Now(), key(a).Target.UID, "r", time.Now(), time.Now().Add(time.Minute))
	for end := time.Now().Add(5 * health.IdleGap); time.Now().Before(end); {
		if state := step(); state != health.Routing || dials.ask("4 %s", a) != a.String() {
			t.Fatalf("%s, and %s is reached at %s", state, a, dials.ask("4 %s", a))
		}
	}
	stale.Unlisted = true
	set.Change(time.Now(), web, []health.Change{stale})
	planes.Until(t, "removed", func() bool { return step() >= health.Removed })
	if at := dials.ask("4 %s", a); at != b.String() {
		t.Fatalf("a removed target is reached at %s", at)
	}
}

func TestAFullMap(t *testing.T) {
	p := newPod(t, false)
	g, err := open(p.config, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	var all []netip.AddrPort
	for i := range 4 {
		all = append(all, netip.MustParseAddrPort(fmt.Sprintf("127.0.86.%d:80", i+1)))
	}
	apply(t, g, health.WantRouted, all...)
	apply(t, g, health.WantRemoved, all[:2]...)
	err = g.Apply(t.Context(), []health.Op{{Key: key(all[2]), Want: health.WantRemoved}})
	if err == nil || !strings.Contains(err.Error(), key(all[2]).String()) {
		t.Errorf("the third: %v", err)
	}
	if seen := see(t, g, key(all[2])); !seen.Routed {
		t.Errorf("the third is seen as %+v", seen)
	}
	apply(t, g, health.WantRouted, all[0])
	apply(t, g, health.WantRemoved, all[2])
	if seen := see(t, g, key(all[2])); seen.Routed {
		t.Errorf("the third is seen as %+v when there is room", seen)
	}
}

// Between the end of a program and the reading that notices it connections passed: what was read
// before proves nothing.
func TestDetached(t *testing.T) {
	p := newPod(t, false)
	g, dials := p.open(t), p.child(t, "dial")
	a, b := listen(t, "127.0.87.1"), listen(t, "127.0.87.2")
	apply(t, g, health.WantRouted, a, b)
	apply(t, g, health.WantRemoved, a)
	for i := range attachTypes {
		before, err := g.Observe(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		l, err := link.LoadPinnedLink(filepath.Join(g.pins, linkName(i)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Detach(); err != nil {
			t.Fatal(err)
		}
		l.Close()
		after, err := g.Observe(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if before.Generation == after.Generation {
			t.Errorf("program %d was detached: the generation is still %s", i, after.Generation)
		}
		if got := dials.ask("4 %s", a); got != b.String() {
			t.Errorf("the peer is %s", got)
		}
	}
	dials.cmd.Process.Kill()
	dials.cmd.Wait()
	if !g.Stopped(t.Context()) {
		t.Error("no process is left, and it has not stopped")
	}
}

// What is pinned for a pod goes when the pod has ended, by the next agent of the node.
func TestThePinsOfAPodThatHasEnded(t *testing.T) {
	old, lives, next := newPod(t, false), newPod(t, false), newPod(t, false)
	for _, p := range []*pod{old, lives} {
		g, err := open(p.config, maxExclusions)
		if err != nil {
			t.Fatal(err)
		}
		g.close()
	}
	old.remove(t)
	// The kernel releases a cgroup a moment later.
	planes.Until(t, "they are gone", func() bool {
		g, err := open(next.config, maxExclusions)
		if err != nil {
			t.Fatal(err)
		}
		g.close()
		_, err = os.Stat(filepath.Join(old.config.Pins, old.uid))
		return errors.Is(err, os.ErrNotExist)
	})
	if _, err := os.Stat(filepath.Join(lives.config.Pins, lives.uid)); err != nil {
		t.Errorf("those of a pod that lives: %v", err)
	}
}

// An agent that fails leaves no maps behind where none was before: the next agent would not know
// that the pod has ended, and the kernel would keep them until the node restarts.
func TestWhatAnAgentThatFailsHasPinned(t *testing.T) {
	p := newPod(t, false)
	pins := filepath.Join(p.config.Pins, p.uid)
	if _, err := open(p.config, 1<<31); err == nil {
		t.Fatal("the kernel has made a map of 2,147,483,648 entries")
	}
	if left, err := os.ReadDir(pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%d files are pinned, %v", len(left), err)
	}
	g, err := open(p.config, maxExclusions)
	if err != nil {
		t.Fatal(err)
	}
	g.close()
	// What an earlier agent has attached continues to direct.
	if _, err := open(p.config, 1<<31); err == nil {
		t.Fatal("the kernel has made a map of 2,147,483,648 entries")
	}
	if _, err := os.Stat(filepath.Join(pins, linkName(0))); err != nil {
		t.Error("the link of an earlier agent:", err)
	}
}

// agent is an agent that drains for as long as it lives.
func agent() {
	var c Config
	if err := json.Unmarshal([]byte(os.Getenv("CONFIG")), &c); err != nil {
		panic(err)
	}
	g, err := open(c, maxExclusions)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("started")
	want := []health.Want{health.WantRouted, health.WantRemoved, health.WantAbsent}
	for round := 0; ; round++ {
		var ops []health.Op
		var keys []health.Key
		for i := range 8 {
			k := key(netip.MustParseAddrPort(fmt.Sprintf("127.0.88.%d:80", i+1)))
			ops = append(ops, health.Op{Key: k, Want: want[(round+i/4)%3]})
			keys = append(keys, k)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if err := g.Apply(ctx, ops); err != nil {
			fmt.Println(err)
		}
		if _, err := g.Observe(ctx, keys); err != nil {
			fmt.Println(err)
		}
		cancel()
	}
}

// An agent that is killed leaves what another one can take over, and no exclusion without an
// expiry. Nor does it take the programs with it.
func TestKilledAtAnyMoment(t *testing.T) {
	p := newPod(t, false)
	dials := p.child(t, "dial")
	a, b := listen(t, "127.0.88.101"), listen(t, "127.0.88.102")
	for range 20 {
		c := p.child(t, "agent")
		if got := c.line(); got != "started" {
			t.Fatal(got)
		}
		time.Sleep(rand.N(60 * time.Millisecond)) // the moments are the subject
		c.cmd.Process.Kill()
		if text, _ := io.ReadAll(c.out); len(text) > 0 {
			t.Errorf("the agent says %s", text)
		}
		c.cmd.Wait()
		m, err := ebpf.LoadPinnedMap(filepath.Join(p.config.Pins, p.uid, "excluded"), nil)
		if err != nil {
			t.Fatal(err)
		}
		var at address
		var x exclusion
		n := 0
		all := m.Iterate()
		for all.Next(&at, &x) {
			if left := remaining(x.Expires, sinceBoot()); left > expiry || x.Expires == 0 {
				t.Errorf("%s is excluded for %s more", at.addrPort(), left)
			}
			n++
		}
		if all.Err() != nil || n > 8 {
			t.Errorf("%d exclusions, %v", n, all.Err())
		}
		// The programs are there without the agent.
		x = exclusion{Expires: sinceBoot() + uint64(time.Minute), Count: 1}
		x.Replacements[0] = addressOf(b)
		if err := m.Put(addressOf(a), &x); err != nil {
			t.Fatal(err)
		}
		if got := dials.ask("4 %s", a); got != b.String() {
			t.Errorf("the peer is %s", got)
		}
		if err := m.Delete(addressOf(a)); err != nil {
			t.Fatal(err)
		}
		m.Close()
	}
}

// keeper is an agent that keeps one of two targets excluded.
func keeper() {
	var c Config
	if err := json.Unmarshal([]byte(os.Getenv("CONFIG")), &c); err != nil {
		panic(err)
	}
	fmt.Println("starts")
	g, err := open(c, maxExclusions)
	if err != nil {
		fmt.Println(err)
		return
	}
	a, b := key(netip.MustParseAddrPort(os.Getenv("EXCLUDED"))), key(netip.MustParseAddrPort(os.Getenv("OTHER")))
	for said := false; ; {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		err := g.Apply(ctx, []health.Op{{Key: b, Want: health.WantRouted}, {Key: a, Want: health.WantRemoved}})
		o, also := g.Observe(ctx, []health.Key{a})
		cancel()
		switch {
		case err != nil || also != nil:
			fmt.Println(err, also)
		case !said && !o.Seen[a].Routed:
			fmt.Println("removed")
			said = true
		}
	}
}

// An exclusion stands while the agent is replaced: no connection gets to the excluded pod when an
// agent is killed, while there is none, and while the next one puts its programs in the place of
// the former ones, whenever that is killed.
func TestAnAgentIsReplaced(t *testing.T) {
	p := newPod(t, false)
	a, b := listen(t, "127.0.96.1"), listen(t, "127.0.96.2")
	t.Setenv("EXCLUDED", a.String())
	t.Setenv("OTHER", b.String())
	c := p.child(t, "keep")
	for _, want := range []string{"starts", "removed"} {
		if got := c.line(); got != want {
			t.Fatal(got)
		}
	}
	links := func() (ids [4]link.ID) {
		for i := range ids {
			l, err := link.LoadPinnedLink(filepath.Join(p.config.Pins, p.uid, linkName(i)), nil)
			if err != nil {
				t.Fatal(err)
			}
			info, err := l.Info()
			if err != nil {
				t.Fatal(err)
			}
			ids[i] = info.ID
			l.Close()
		}
		return ids
	}
	before := links()
	dials, stop, dialed := p.child(t, "dial"), make(chan struct{}), make(chan map[string]int)
	go func() {
		peers := map[string]int{}
		defer func() { dialed <- peers }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			for range 50 {
				peers[dials.ask("4 %s", a)]++
			}
			dials.ask("close")
		}
	}()
	for round := range 20 {
		if c.cmd.Process.Kill(); c.cmd.Wait() == nil {
			t.Error("it had ended")
		}
		if round%2 == 0 {
			time.Sleep(rand.N(20 * time.Millisecond)) // there is no agent: the subject
		}
		c = p.child(t, "keep")
		if got := c.line(); got != "starts" {
			t.Fatal(got)
		}
		if round%4 == 3 {
			if got := c.line(); got != "removed" {
				t.Fatal(got)
			}
		} else {
			time.Sleep(rand.N(20 * time.Millisecond)) // any moment of its start
		}
	}
	close(stop)
	peers := <-dialed
	t.Logf("%v", peers)
	if peers[b.String()] < 500 || len(peers) != 1 {
		t.Errorf("the excluded one is %s, and the peers are %v", a, peers)
	}
	if after := links(); after != before {
		t.Errorf("the links are others: %v, before %v", after, before)
	}
}

// The two capabilities are enough, and what is missing is named.
func TestRights(t *testing.T) {
	if _, err := exec.LookPath("setpriv"); err != nil {
		gatewaytest.Missing(t, "setpriv", err)
	}
	for caps, want := range map[string]string{
		"+bpf,+net_admin": "started", "+net_admin": "kernel: missing: CAP_BPF",
		"+bpf": "kernel: missing: CAP_NET_ADMIN", "+chown": "kernel: missing: CAP_BPF, CAP_NET_ADMIN",
	} {
		p := newPod(t, false)
		c := p.child(t, "agent", "setpriv", "--bounding-set", "-all,"+caps)
		if got := c.line(); got != want {
			t.Errorf("%s: %s", caps, got)
		}
	}
	p := newPod(t, false)
	for text, change := range map[string]func(*Config){
		"not a cgroup2 mount":  func(c *Config) { c.Cgroups = "/tmp" },
		"no cgroup of the pod": func(c *Config) { c.PodUID = "another" },
		"bpffs":                func(c *Config) { c.Pins = t.TempDir() },
	} {
		c := p.config
		change(&c)
		if _, err := open(c, maxExclusions); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A Service whose clients mean a single pod is not redirected, whenever that becomes known.
func TestARefusedService(t *testing.T) {
	p := newPod(t, false)
	g := p.open(t)
	a, b := listen(t, "127.0.89.1"), listen(t, "127.0.89.2")
	apply(t, g, health.WantRouted, a, b)
	apply(t, g, health.WantRemoved, a)
	g.Refuse(web, "it is headless")
	err := g.Apply(t.Context(), []health.Op{{Key: key(a), Want: health.WantRemoved}})
	if err == nil || !strings.Contains(err.Error(), "it is headless") || !strings.Contains(err.Error(), string(web)) {
		t.Errorf("%v", err)
	}
	if seen := see(t, g, key(a)); !seen.Routed {
		t.Errorf("it is seen as %+v", seen)
	}
	g.Refuse(web, "")
	apply(t, g, health.WantRemoved, a)
	if seen := see(t, g, key(a)); seen.Routed {
		t.Errorf("it is seen as %+v", seen)
	}
}

// The set keeps the last target of a Service. Connections to it pass.
func TestTheLastOneIsKept(t *testing.T) {
	p := newPod(t, false)
	a, b, dials := listen(t, "127.0.90.1"), listen(t, "127.0.90.2"), p.child(t, "dial")
	set := health.New(health.Options{})
	list := func(addr netip.AddrPort) {
		set.Change(time.Now(), web, []health.Change{listed(addr)})
	}
	list(a)
	set.Synced()
	d := gateway.NewDirector(p.open(t), set, slog.New(slog.DiscardHandler), gateway.Hooks{})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	planes.Until(t, "it is programmed", d.Programmed)
	set.Exclude(time.Now(), key(a).Target.UID, "test", time.Now(), time.Now().Add(time.Minute))
	d.Wake()
	state := func() health.State { return set.Exclusions()[0].State }
	planes.Until(t, "it is kept", func() bool { return state() == health.Kept })
	if got := dials.ask("4 %s", a); got != a.String() {
		t.Errorf("the peer is %s", got)
	}
	dials.ask("close")
	list(b)
	d.Wake()
	planes.Until(t, "it is idle", func() bool { return state() == health.Idle })
	if got := dials.ask("4 %s", a); got != b.String() {
		t.Errorf("the peer is %s", got)
	}
}

func TestCheck(t *testing.T) {
	good := Service{Service: "shop/web", HTTP1Quiet: "100ms"}
	for want, c := range map[string]Config{
		"":                       {PodUID: "u", Services: []Service{good}},
		"podUID":                 {Services: []Service{good}},
		"services: required":     {PodUID: "u"},
		"services[1]":            {PodUID: "u", Services: []Service{good, good}},
		"services[0].http1Quiet": {PodUID: "u", Services: []Service{{Service: "shop/web", HTTP1Quiet: "soon"}}},
	} {
		errs := c.Check()
		if want == "" && len(errs) > 0 || want != "" && (len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), want)) {
			t.Errorf("%s: %v", want, errs)
		}
	}
}

// Some runtimes put containers elsewhere than the kubelet says: the cgroup has the pod's name, and
// nothing in it. Every pod would be Removed and Idle at once.
func TestAPodWhoseProcessesAreElsewhere(t *testing.T) {
	p := newPod(t, true)
	c := p.config
	if _, err := c.Direct(); err == nil || !strings.Contains(err.Error(), "was not redirected") {
		t.Errorf("%v", err)
	}
}

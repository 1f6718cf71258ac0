//go:build e2e

package kubeproxy

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

const image = "lameduck.test/app:1"

// manifest is an app with Services of all kinds. Its pods live on for a while when they are
// terminating, so that what happens meanwhile can be seen.
const manifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: app}
spec:
  replicas: 2
  selector: {matchLabels: {app: app}}
  template:
    metadata: {labels: {app: app}}
    spec:
      terminationGracePeriodSeconds: 60
      containers:
      - name: app
        image: lameduck.test/app:1
        imagePullPolicy: Never
        args: ["--addr=[::]:8080"]
        ports: [{containerPort: 8080}]
        lifecycle: {preStop: {sleep: {seconds: 45}}}
        readinessProbe: {httpGet: {path: /readyz, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: app}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.80
  clusterIPs: [10.96.0.80, "fd10:96::80"]
  selector: {app: app}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  externalTrafficPolicy: Local
  sessionAffinity: ClientIP
  clusterIP: 10.96.0.81
  clusterIPs: [10.96.0.81, "fd10:96::81"]
  selector: {app: app}
  ports: [{port: 80, targetPort: 8080, nodePort: 30081}]
`

// place is a node with an Observer of its kernel.
type place struct {
	*testing.T
	c *cluster.Cluster
	m *machine.Machine
	o *kubeproxy.Observer
}

func (p *place) kubectl(args ...string) string {
	p.Helper()
	out, err := p.c.Kubectl(p.Context(), args...)
	if err != nil {
		pods, _ := p.c.Kubectl(context.Background(), "get", "pods,events", "-A", "-o", "wide")
		p.Fatalf("%v\n%s", err, pods)
	}
	return out
}

// pods returns the addresses of the pods that are not terminating, by name.
func (p *place) pods() map[string][]netip.Addr {
	p.Helper()
	out := p.kubectl("get", "pods", "-l", "app=app", "-o",
		`jsonpath={range .items[*]}{.metadata.deletionTimestamp},{.metadata.name},{.status.podIPs[*].ip}{"\n"}{end}`)
	pods := map[string][]netip.Addr{}
	for line := range strings.Lines(out) {
		parts := strings.Split(strings.TrimSpace(line), ",")
		if len(parts) != 3 || parts[0] != "" {
			continue
		}
		for ip := range strings.FieldsSeq(parts[2]) {
			pods[parts[1]] = append(pods[parts[1]], netip.MustParseAddr(ip))
		}
	}
	return pods
}

// follower is a watch with all the states that were told.
type follower struct {
	gateway.Watch
	p    *place
	name string

	mu   sync.Mutex
	seen []health.State
	news chan struct{}
}

func (p *place) watch(name string, addresses []netip.Addr) *follower {
	f := &follower{p: p, name: name, news: make(chan struct{}, 1)}
	var targets []netip.AddrPort
	for _, a := range addresses {
		targets = append(targets, netip.AddrPortFrom(a, 0))
	}
	ready := make(chan struct{})
	f.Watch = p.o.Watch(targets, func() {
		go func() {
			<-ready
			f.mu.Lock()
			f.seen = append(f.seen, f.Reading().State)
			f.mu.Unlock()
			select {
			case f.news <- struct{}{}:
			default:
			}
		}()
	})
	close(ready)
	p.Cleanup(f.Close)
	return f
}

// wait waits for a state and says how long it took. What is Idle is Removed.
func (f *follower) wait(state health.State, most time.Duration) {
	f.p.Helper()
	began, timeout := time.Now(), time.After(most)
	for {
		r := f.Reading()
		if r.State == state || state == health.Removed && r.State == health.Idle {
			f.p.Logf("%s: %s after %s", f.name, r.State, time.Since(began).Round(time.Millisecond))
			return
		}
		select {
		case <-f.news:
		case <-timeout:
			out, _ := f.p.m.Run(context.Background(), "nft", "list", "ruleset")
			f.p.Fatalf("%s is %+v, want %s\n%s", f.name, r, state, out)
		}
	}
}

func (f *follower) is(state health.State) {
	f.p.Helper()
	if r := f.Reading(); r.State != state {
		f.p.Fatalf("%s is %+v, want %s", f.name, r, state)
	}
}

// patience is how long a connection or a request may take on a busy machine.
const patience = 15 * time.Second

// dial connects from the node.
func (p *place) dial(address string, within time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(p.Context(), within)
	defer cancel()
	return p.m.Dial(ctx, "tcp", address)
}

// until fails the test unless is becomes true within 20 s.
func (p *place) until(what string, is func() bool) {
	p.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			p.Fatalf("not so after 20 s: %s", what)
		}
	}
}

// hold opens a connection through address that reaches the pod, and keeps it. kube-proxy adds a pod
// to one Service after the other, up to a second apart.
func (p *place) hold(address, pod string) (held net.Conn) {
	p.Helper()
	p.until(fmt.Sprintf("%s reaches %s", address, pod), func() bool {
		conn, err := p.dial(address, patience)
		if err != nil {
			p.Fatal(err)
		}
		name, err := request(conn)
		if err != nil {
			p.Fatal(err)
		}
		if name != pod {
			conn.Close()
			return false
		}
		held = conn
		return true
	})
	p.Cleanup(func() { held.Close() })
	return held
}

// request sends one on the connection and returns the name of the pod that answered.
func request(conn net.Conn) (string, error) {
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: app\r\n\r\n"); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", err
	}
	response.Body.Close()
	return response.Header.Get("Pod"), nil
}

func TestRealKubeProxy(t *testing.T) {
	for _, mode := range []machine.Proxy{machine.NFTables, machine.IPTables} {
		t.Run(string(mode), func(t *testing.T) { leave(t, mode) })
	}
}

func leave(t *testing.T, mode machine.Proxy) {
	c := cluster.New(t, machine.ControlPlane())
	set := machine.New(t, c, 1, machine.Options{Proxy: mode, Images: []machine.Image{{Name: image, Program: app(t)}},
		KubeProxy: []string{"--v=9"}})
	p := &place{T: t, c: c, m: set.Machines[0]}
	p.observe()
	if _, err := c.KubectlInput(t.Context(), manifest, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	p.kubectl("rollout", "status", "deployment/app", "--timeout=60s")
	pods := p.pods()
	if len(pods) != 2 {
		t.Fatalf("pods are %v, want two", pods)
	}
	var names []string
	for name := range pods {
		names = append(names, name)
	}
	slices.Sort(names)

	gone := pods[names[0]]
	a := p.watch("a", pods[names[0]])
	a.wait(health.Routing, 10*time.Second)
	if len(pods[names[0]]) != 2 {
		t.Errorf("pod has addresses %v, want one of each family", pods[names[0]])
	}
	p.settle()
	held := []net.Conn{p.hold("10.96.0.80:80", names[0]), p.hold("[fd10:96::80]:80", names[0])}
	// A client of a Service with affinity is sent to the same pod again.
	sticky := p.hold("10.96.0.81:80", p.asked("10.96.0.81:80"))
	sticky.Close()

	p.kubectl("delete", "pod", names[0], "--wait=false")
	a.wait(health.Removed, 15*time.Second)
	if _, err := p.c.Kubectl(t.Context(), "get", "pod", names[0]); err != nil {
		t.Fatal("the pod is gone, which is another case:", err)
	}
	for range 30 {
		for _, address := range addresses {
			if name := p.asked(address); name == names[0] {
				t.Fatalf("%s is Removed, and reached by way of %s", names[0], address)
			}
		}
	}
	a.is(health.Removed)
	if n := a.Reading().Connections; n != 2 {
		t.Errorf("%d connections are counted, want 2", n)
	}
	for _, conn := range held {
		if name, err := request(conn); err != nil || name != names[0] {
			t.Errorf("a connection that was open reaches %q, %v", name, err)
		}
		a.is(health.Removed)
		conn.Close()
	}
	a.wait(health.Idle, 15*time.Second)

	// kube-proxy restarts: what is routed stays so, what is not does not come back.
	p.kubectl("rollout", "status", "deployment/app", "--timeout=60s")
	pods = p.pods()
	b := p.watch("b", pods[names[1]])
	b.wait(health.Routing, 10*time.Second)
	if err := p.m.Restart("kube-proxy"); err != nil {
		t.Fatal(err)
	}
	p.until("kube-proxy has written its rules again", func() bool {
		response, err := http.Get(fmt.Sprintf("http://%s:10256/healthz", p.m.Address))
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	b.is(health.Routing)
	a.is(health.Idle)
	for _, f := range []*follower{a, b} {
		f.mu.Lock()
		t.Logf("%s was told %v", f.name, f.seen)
		if slices.Contains(f.seen, health.Removed) && f == b {
			t.Error("a pod that is routed was once Removed")
		}
		f.mu.Unlock()
	}

	// A fresh reading says the same as the one that has followed.
	fresh := &place{T: t, c: c, m: p.m}
	fresh.observe()
	fb, fa := fresh.watch("b, read afresh", pods[names[1]]), fresh.watch("a, read afresh", gone)
	fb.wait(health.Routing, 15*time.Second)
	fa.wait(health.Idle, 15*time.Second)

	// No endpoint is ready any more: kube-proxy keeps sending to those that terminate.
	p.kubectl("scale", "deployment/app", "--replicas=0")
	others := []*follower{b}
	for name, addresses := range pods {
		if name != names[1] {
			others = append(others, p.watch(name, addresses))
		}
	}
	for _, f := range others {
		f.wait(health.Kept, 15*time.Second)
	}
	// It also sends again to the one that was Removed: that is still ready, though terminating.
	a.wait(health.Kept, 15*time.Second)
	time.Sleep(3 * time.Second) // in which kube-proxy writes again, at most once a second
	for _, f := range others {
		f.is(health.Kept)
	}
	if name := p.asked("10.96.0.80:80"); name == "" {
		t.Error("Kept, and no pod is reached")
	}
	p.kubectl("delete", "pods", "-l", "app=app", "--force", "--grace-period=0")
	for _, f := range append(others, a) {
		f.wait(health.Idle, 15*time.Second)
	}

	// What conntrack remembers of them goes. The kubelet probes a pod for a second or more after it
	// was deleted by force: what Clean deletes are the connections that were there before.
	remembered := func() []string {
		out, err := p.m.Run(t.Context(), "conntrack", "-L", "--reply-src", gone[0].String(), "-o", "id")
		if err != nil {
			t.Fatal(err)
		}
		return connectionID.FindAllString(out, -1)
	}
	before := remembered()
	if len(before) == 0 {
		t.Errorf("conntrack remembers nothing of %s: what is cleaned is not seen", gone[0])
	}
	if err := p.o.Clean([]netip.AddrPort{netip.AddrPortFrom(gone[0], 0), netip.AddrPortFrom(gone[1], 0)}); err != nil {
		t.Error(err)
	}
	for _, id := range remembered() {
		if slices.Contains(before, id) {
			t.Errorf("the connection to %s with %s is left", gone[0], id)
		}
	}
}

var connectionID = regexp.MustCompile(`\bid=\d+`)

var addresses = []string{"10.96.0.80:80", "[fd10:96::80]:80", "10.96.0.81:80", "[fd10:96::81]:80"}

// settle waits until all Services answer: kube-proxy writes one after another.
func (p *place) settle() {
	p.Helper()
	for _, address := range addresses {
		p.until(address+" answers", func() bool {
			// What was sent before the rules were there went elsewhere, and would go there again.
			conn, err := p.dial(address, 2*time.Second)
			if err == nil {
				defer conn.Close()
				_, err = request(conn)
			}
			return err == nil
		})
	}
}

// asked sends one request on a connection of its own and returns the pod that answered.
func (p *place) asked(address string) string {
	p.Helper()
	conn, err := p.dial(address, patience)
	if err != nil {
		p.Fatal(err)
	}
	defer conn.Close()
	name, err := request(conn)
	if err != nil {
		p.Fatal(err)
	}
	return name
}

// observe runs an Observer in the network of the machine until the test ends.
func (p *place) observe() {
	p.Helper()
	var network *os.File
	if err := p.m.Do(func() (err error) {
		network, err = os.Open("/proc/thread-self/ns/net")
		return err
	}); err != nil {
		p.Fatal(err)
	}
	p.o = kubeproxy.New(kubeproxy.Options{Log: slog.New(slog.NewTextHandler(p.Output(), nil)),
		NetNS: int(network.Fd())})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.o.Run(ctx) }()
	p.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			p.Error("run:", err)
		}
		network.Close()
	})
}

// app builds the app of the end-to-end tests.
func app(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "app")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", out, "../app/main.go")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the app: %v: %s", err, text)
	}
	return out
}

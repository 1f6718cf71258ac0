// Package keepalived tests a virtual address whose keepalived checks the agent: the address moves
// when the gateway is dead, and stays when its backends, the coordinators or the API server are.
//
// All is real: two keepalived with VRRP over a veth between two network namespaces, HAProxy, the
// agent, the API server. The first namespace is the one that the test program enters; the second
// belongs to the other keepalived. Both, and the veth with them, end with their processes.
package keepalived

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// ordinary is set in the environment if a user other than root runs the tests. In the namespaces
// that user, too, is root.
const ordinary = "LAMEDUCK_TEST_ORDINARY_USER"

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Setenv(ordinary, "1")
	}
	cluster.Main(m)
}

const (
	virtual = "192.0.2.100"
	proxy   = "10.244.3.100:8080"
	agent   = "127.0.0.1:9101"

	// healthTimeout is the agent's. keepalived asks each second, waits for up to 2 s, and believes
	// the second answer of a kind.
	healthTimeout = 3 * time.Second
	// hold is how long an address must stay: long enough that each of them has noticed what it may
	// wrongly notice.
	hold = healthTimeout + 7*time.Second
	// silence is how long a backup waits for an advertisement of the master: three times advert_int
	// and a part of it. If that is below a second, the address moves where a busy machine does not
	// run the master for as long.
	silence = 8 * time.Second
	// most is how long anything may take that must happen.
	most = 30 * time.Second
)

var backends = []string{"10.244.3.1:8080", "10.244.3.2:8080"}

// ask exits with 0 if GET http://$1:$2$3 is answered with 200.
const ask = `#!/bin/bash
exec 3<>"/dev/tcp/$1/$2" || exit 1
printf 'GET %s HTTP/1.0\r\n\r\n' "$3" >&3
read -r -t 2 _ status _ <&3
[ "$status" = 200 ]
`

const haproxyConf = `
defaults
  mode http
  timeout connect 1s
  timeout client 5s
  timeout server 5s
frontend web
  bind %s
  default_backend web
`

const agentConf = `
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
gateway:
  haproxy:
    masterSocket: %[1]s/master.sock
    serversFile: %[1]s/servers.cfg
    backends:
      - {backend: web, service: default/web, port: http,
         lines: [mode http, timeout connect 1s, timeout server 5s]}
healthTimeout: %[2]s
`

// keepalivedConf is that of one node. The one with the higher priority has the address whenever its
// check lets it.
const keepalivedConf = `
global_defs {
  router_id %[2]s
  vrrp_version 3
  script_user root
  vrrp_notify_fifo "%[1]s/%[2]s.fifo"
}
vrrp_script check {
  script "%[4]s"
  interval 1
  timeout 2
  fall 2
  rise 2
}
vrrp_instance gateway {
  state BACKUP
  interface %[2]s
  virtual_router_id 51
  priority %[3]d
  advert_int 2
  virtual_ipaddress {
    ` + virtual + `/24
  }
  track_script {
    check
  }
}
`

// node is a machine with HAProxy, its agent, two backends and an API server.
type node struct {
	*testing.T
	dir     string
	cluster *cluster.Cluster
	kube    kubernetes.Interface
	haproxy *exec.Cmd
	servers []*http.Server
	entered map[string]*entered
}

func TestTheVirtualAddressFollowsTheGatewayOnly(t *testing.T) {
	n := newNode(t)

	// The mistake: who asks through the proxy asks the backends. This is the control of the test
	// below, too.
	t.Run("asked through the proxy", func(t *testing.T) {
		n := n.in(t)
		host, port, _ := net.SplitHostPort(proxy)
		moves := n.keepalived(fmt.Sprintf("%s/ask.sh %s %s /", n.dir, host, port))
		n.down()
		n.until("the address moves away from a gateway that works", func() bool {
			return !n.has(virtual) && n.states("vb") == "MASTER"
		})
		n.mustSay(agent, "/healthz", 200)
		n.up()
		n.until("and back", func() bool { return n.has(virtual) && n.states("vb") == "BACKUP" })
		n.Logf("asked through the proxy, it moved: %s", moves())
	})

	t.Run("asked of the agent", func(t *testing.T) {
		n := n.in(t)
		host, port, _ := net.SplitHostPort(agent)
		moves := n.keepalived(fmt.Sprintf("%s/ask.sh %s %s /healthz", n.dir, host, port))
		stays := func(when string) {
			t.Helper()
			time.Sleep(hold) // it never moves: nothing follows that could be awaited
			if got := moves(); got != "" || !n.has(virtual) {
				t.Fatalf("%s: the address moved: %s", when, got)
			}
			n.Logf("%s: it stayed", when)
		}
		stays("all is well")
		n.down()
		n.list(false)
		n.mustSay(proxy, "/", 503)
		stays("all backends down, and known to be")
		n.up()
		n.list(true)
		n.until("the proxy answers", func() bool { return code(proxy, "/") == 200 })
		n.cluster.KillAPIServer()
		stays("the API server down")
		n.down()
		stays("both down")

		n.stopHAProxy()
		died := time.Now()
		n.until("the address leaves a dead HAProxy", func() bool {
			return !n.has(virtual) && n.states("vb") == "MASTER"
		})
		n.Logf("HAProxy dead: it moved after %s: %s", time.Since(died).Round(100*time.Millisecond), moves())
		n.startHAProxy()
		n.until("the address returns", func() bool { return n.has(virtual) && n.states("vb") == "BACKUP" })
	})
}

// newNode starts all but keepalived.
func newNode(t *testing.T) *node {
	t.Helper()
	for program, fix := range map[string]string{"keepalived": "apt-get install keepalived",
		"ip": "apt-get install iproute2", "haproxy": "apt-get install haproxy"} {
		if _, err := find(program); err != nil {
			cluster.Missing(t, program, fix)
		}
	}
	if !cluster.Inside() || os.Getenv(ordinary) != "" {
		cluster.Missing(t, "the right to speak VRRP", "run as root")
	}
	// Sockets have short names.
	dir, err := os.MkdirTemp("", "ka")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{T: t, dir: dir, entered: map[string]*entered{}}
	n.write("ask.sh", ask)
	n.write("haproxy.cfg", fmt.Sprintf(haproxyConf, proxy))
	n.write("agent.yaml", fmt.Sprintf(agentConf, dir, healthTimeout))

	build := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/agent", "./cmd/agent")
	build.Dir = "../../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v: %s", err, out)
	}
	if n.cluster, err = cluster.Start(t.Context(),
		cluster.Options{NoControllers: true, NoScheduler: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.cluster.Stop)
	if n.kube, err = kubernetes.NewForConfig(n.cluster.Config()); err != nil {
		t.Fatal(err)
	}
	n.up()
	t.Cleanup(func() { n.down() })
	if _, err := n.kube.DiscoveryV1().EndpointSlices("default").Create(t.Context(), endpoints(true),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.start("agent", exec.Command(dir+"/agent", "--config="+dir+"/agent.yaml", "--kubeconfig="+n.cluster.Kubeconfig(),
		"--metrics-address="+agent))
	n.until("the agent is healthy before HAProxy runs", func() bool { return code(agent, "/livez") == 200 })
	n.until("the servers file is written", func() bool { return code(agent, "/startz") == 200 })
	n.startHAProxy()
	n.until("the agent is ready", func() bool { return code(agent, "/readyz") == 200 })
	n.until("the proxy answers", func() bool { return code(proxy, "/") == 200 })
	return n
}

// in returns the node for a subtest, which ends what it starts.
func (n *node) in(t *testing.T) *node {
	n.T = t
	return n
}

// keepalived joins the node to another one, starts both keepalived with the check on this one only,
// and waits until the address is here. The returned function says what has changed since.
func (n *node) keepalived(check string) (moves func() string) {
	n.Helper()
	bin, err := find("keepalived")
	if err != nil {
		n.Fatal(err)
	}
	for _, side := range []string{"va", "vb"} {
		n.listen(side)
	}
	n.write("va.conf", fmt.Sprintf(keepalivedConf, n.dir, "va", 150, check))
	n.write("vb.conf", fmt.Sprintf(keepalivedConf, n.dir, "vb", 100, "/bin/true"))
	run := func(side string) string {
		return fmt.Sprintf("exec %s -n -l -D -P -f %[2]s/%[3]s.conf -p %[2]s/%[3]s.pid -r %[2]s/%[3]s.vrrp.pid", bin,
			n.dir, side)
	}
	other := exec.Command("sh", "-c", "until ip link set vb up 2>/dev/null; do sleep 0.05; done; ip link set lo up; "+
		"ip addr add 192.0.2.2/24 dev vb; "+run("vb"))
	other.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	n.start("vb", other)
	n.ip("link", "add", "va", "type", "veth", "peer", "name", "vb")
	n.Cleanup(func() { _ = exec.Command("ip", "link", "del", "va").Run() }) // it may have gone with the other namespace
	n.ip("link", "set", "vb", "netns", fmt.Sprint(other.Process.Pid))
	n.ip("addr", "add", "192.0.2.1/24", "dev", "va")
	n.ip("link", "set", "va", "up")
	n.start("va", exec.Command("sh", "-c", run("va")))
	// The other one is BACKUP at first, and may be MASTER before it learns of this one. What has
	// not changed for longer than a backup waits does not change by itself.
	seen, since := "", time.Now()
	n.until("the address is here, and stays", func() bool {
		if now := fmt.Sprint(n.has(virtual), n.lines("va"), n.lines("vb")); now != seen {
			seen, since = now, time.Now()
		}
		return n.has(virtual) && n.states("va") == "MASTER" && n.states("vb") == "BACKUP" && time.Since(since) > silence
	})
	began := map[string]int{"va": len(n.lines("va")), "vb": len(n.lines("vb"))}
	return func() string {
		var all []string
		for _, side := range []string{"va", "vb"} {
			if since := n.lines(side)[began[side]:]; len(since) > 0 {
				all = append(all, side+" "+strings.Join(since, " "))
			}
		}
		return strings.Join(all, ", ")
	}
}

// listen takes in the states that a keepalived enters, in their order: scripts that it starts for
// them would race.
func (n *node) listen(side string) {
	n.Helper()
	path := filepath.Join(n.dir, side+".fifo")
	_ = os.Remove(path)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		n.Fatal(err)
	}
	fifo, err := os.OpenFile(path, os.O_RDWR, 0) // waits for no writer, and never ends
	if err != nil {
		n.Fatal(err)
	}
	l := &entered{}
	n.entered[side] = l
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(fifo); lines.Scan(); {
			// INSTANCE "gateway" MASTER 150. What is left out is said of a master that stays
			// master: MASTER_RX_LOWER_PRI, if both were master for a moment.
			words := strings.Fields(lines.Text())
			if len(words) >= 3 && words[0] == "INSTANCE" && !strings.HasPrefix(words[2], "MASTER_") {
				l.mu.Lock()
				l.states = append(l.states, words[2])
				l.mu.Unlock()
			}
		}
	}()
	n.Cleanup(func() {
		fifo.Close()
		<-done
	})
}

// entered are the states that a keepalived has entered.
type entered struct {
	mu     sync.Mutex
	states []string
}

// lines are the states that a keepalived has entered, and states is the last.
func (n *node) lines(side string) []string {
	l := n.entered[side]
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.states)
}

func (n *node) states(side string) string {
	all := n.lines(side)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// has reports whether this namespace has the address.
func (n *node) has(address string) bool {
	n.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		n.Fatal(err)
	}
	return slices.ContainsFunc(all, func(a net.Addr) bool { return strings.HasPrefix(a.String(), address+"/") })
}

func (n *node) ip(args ...string) {
	n.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func (n *node) write(name, content string) {
	n.Helper()
	mode := os.FileMode(0o600)
	if strings.HasSuffix(name, ".sh") {
		mode = 0o700
	}
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(content), mode); err != nil {
		n.Fatal(err)
	}
}

// start runs a program until the test ends. Its last words are shown if the test fails.
func (n *node) start(name string, cmd *exec.Cmd) (stop func()) {
	n.Helper()
	path := filepath.Join(n.dir, name+".log")
	log, err := os.Create(path)
	if err != nil {
		n.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		n.Fatalf("start %s: %v", name, err)
	}
	stop = sync.OnceFunc(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	t := n.T
	t.Cleanup(func() {
		stop()
		if !t.Failed() {
			return
		}
		if content, err := os.ReadFile(path); err == nil {
			t.Logf("%s:\n%s", name, content[max(0, len(content)-3000):])
		}
	})
	return stop
}

func (n *node) startHAProxy() {
	n.Helper()
	bin, err := stage.HAProxy()
	if err != nil {
		n.Fatal(err)
	}
	n.haproxy = exec.Command(bin, "-W", "-S", n.dir+"/master.sock", "-f", n.dir+"/haproxy.cfg", "-f",
		n.dir+"/servers.cfg")
	n.start("haproxy", n.haproxy)
}

// stopHAProxy kills the master and its workers.
func (n *node) stopHAProxy() {
	n.Helper()
	if err := syscall.Kill(-n.haproxy.Process.Pid, syscall.SIGKILL); err != nil {
		n.Fatal(err)
	}
	n.until("HAProxy is dead", func() bool { return code(proxy, "/") == 0 })
}

// up lets both backends answer, down neither.
func (n *node) up() {
	n.Helper()
	for _, address := range backends {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			n.Fatal(err)
		}
		server := &http.Server{ReadHeaderTimeout: time.Second,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				fmt.Fprintln(w, "ok")
			})}
		n.servers = append(n.servers, server)
		go func() { _ = server.Serve(listener) }() // until down
	}
}

func (n *node) down() {
	for _, s := range n.servers {
		_ = s.Close()
	}
	n.servers = nil
}

// list makes the backends ready or not for all who watch EndpointSlices.
func (n *node) list(ready bool) {
	n.Helper()
	if _, err := n.kube.DiscoveryV1().EndpointSlices("default").Update(n.Context(), endpoints(ready),
		metav1.UpdateOptions{}); err != nil {
		n.Fatal(err)
	}
}

func endpoints(ready bool) *discovery.EndpointSlice {
	name, port := "http", int32(8080)
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Port: &port}},
	}
	for i, address := range backends {
		host, _, _ := net.SplitHostPort(address)
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{host}, Conditions: discovery.EndpointConditions{Ready: &ready},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprint("web-", i),
				UID: types.UID(fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i))},
		})
	}
	return s
}

func (n *node) mustSay(address, path string, want int) {
	n.Helper()
	n.until(fmt.Sprintf("%s%s is answered with %d", address, path, want), func() bool {
		return code(address, path) == want
	})
}

// until waits for what must happen.
func (n *node) until(what string, ok func() bool) {
	n.Helper()
	for began := time.Now(); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Since(began) > most {
			n.Fatalf("%s: not within %s; va %v, vb %v, /healthz %d, proxy %d", what, most, n.lines("va"), n.lines("vb"),
				code(agent, "/healthz"), code(proxy, "/"))
		}
	}
}

// code is the status of an answer to GET, 0 if there is none.
func code(address, path string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

func find(program string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/", "/usr/local/sbin/"} {
		if path, err := exec.LookPath(dir + program); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed", program)
}

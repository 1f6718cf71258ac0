//go:build e2e

package machine_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

func TestMain(m *testing.M) {
	if os.Getenv("TEST_PROGRAM") != "" {
		if err := cluster.EnterAsRoot(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(program())
	}
	cluster.MainAsRoot(m)
}

// program is a program with a machine that runs a pod, for as long as it is let.
func program() int {
	ctx := context.Background()
	fail := func(err error) int {
		fmt.Println("failed:", err)
		return 1
	}
	if os.Getenv("TEST_APP") == "" {
		fmt.Println("ready", cluster.RunName())
		return 0
	}
	c, err := cluster.Start(ctx, machine.ControlPlane())
	if err != nil {
		return fail(err)
	}
	set, err := machine.Start(ctx, c, 1, machine.Options{Images: []machine.Image{{Name: appImage,
		Program: os.Getenv("TEST_APP")}}})
	if err != nil {
		return fail(err)
	}
	if _, err := c.KubectlInput(ctx, deployment(1), "apply", "-f", "-"); err != nil {
		return fail(err)
	}
	if _, err := c.Kubectl(ctx, "rollout", "status", "deployment/app", "--timeout=60s"); err != nil {
		return fail(err)
	}
	fmt.Println("ready", cluster.RunName())
	if _, err := io.ReadAll(os.Stdin); err != nil { // until it is told to end
		return fail(err)
	}
	if err := set.Stop(); err != nil {
		return fail(err)
	}
	c.Stop()
	return 0
}

const appImage = "lameduck.test/app:1"

// deployment is the app of the end-to-end tests with a Service of all kinds.
func deployment(replicas int) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: app}
spec:
  replicas: %d
  selector: {matchLabels: {app: app}}
  template:
    metadata: {labels: {app: app}}
    spec:
      containers:
      - name: app
        image: %[2]s
        imagePullPolicy: Never
        args: ["--on-term=graceful", "--addr=[::]:8080"]
        ports: [{containerPort: 8080}]
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
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: everywhere}
spec:
  selector: {matchLabels: {app: everywhere}}
  template:
    metadata: {labels: {app: everywhere}}
    spec:
      hostNetwork: true
      containers:
      - name: app
        image: %[2]s
        imagePullPolicy: Never
        args: ["--addr=127.0.0.1:9999"]
`, replicas, appImage)
}

const (
	clusterIP  = "10.96.0.80:80"
	clusterIP6 = "[fd10:96::80]:80"
	nodePort   = "30080"
)

var built struct {
	sync.Once
	dir string
}

// app builds the app of the end-to-end tests, once. It requires nothing but Go.
func app(t *testing.T) string {
	t.Helper()
	var err error
	built.Do(func() { built.dir, err = os.MkdirTemp("", "app-") }) // goes with $TMPDIR
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(built.dir, "app")
	if _, err := os.Stat(out); err == nil {
		return out
	}
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", out, "../../e2e/app/main.go")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the app: %v: %s", err, text)
	}
	return out
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), args...)
	if err != nil {
		pods, _ := c.Kubectl(context.Background(), "get", "pods,events", "-A", "-o", "wide")
		t.Fatalf("%v\n%s", err, pods)
	}
	return out
}

// patience is how long a request may take on a busy machine.
const patience = 15 * time.Second

// ask sends one request on a connection of its own and returns the name of the pod that answered.
func ask(ctx context.Context, dial func(context.Context, string, string) (net.Conn, error), address string,
	within time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/", nil)
	if err != nil {
		return "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", errors.New(response.Status)
	}
	return response.Header.Get("Pod"), nil
}

// reaches asks an address until want pods have answered, which is by chance, and fails at the first
// request that is lost.
func reaches(t *testing.T, from string, dial func(context.Context, string, string) (net.Conn, error), address string,
	want int) {
	t.Helper()
	answered := map[string]bool{}
	for i := 0; len(answered) < want; i++ {
		pod, err := ask(t.Context(), dial, address, patience)
		if err != nil {
			t.Fatalf("request %d from %s to %s: %v", i, from, address, err)
		}
		if answered[pod] = true; i > 300 {
			t.Fatalf("300 requests from %s to %s reached %d pods, not %d: %v", from, address, len(answered), want,
				answered)
		}
	}
}

// A node in each mode of kube-proxy: pods run, are found by ClusterIP and NodePort, and a rollout
// replaces them.
func TestOneNode(t *testing.T) {
	for proxy, trace := range map[machine.Proxy]string{machine.NFTables: "table ip kube-proxy",
		machine.IPTables: "chain KUBE-SERVICES"} {
		t.Run(string(proxy), func(t *testing.T) {
			c := cluster.New(t, machine.ControlPlane())
			image := machine.Image{Name: appImage, Program: app(t)}
			began := time.Now()
			set := machine.New(t, c, 1, machine.Options{Proxy: proxy, Images: []machine.Image{image}})
			t.Logf("ready after %s", time.Since(began).Round(time.Second/10))
			rollout(t, c, set)
			rules, err := set.Machines[0].Run(t.Context(), "nft", "list", "ruleset")
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(rules, trace) {
				t.Errorf("no %q in the rules of mode %s:\n%s", trace, proxy, rules)
			}
			// The kubelet's own API, by way of the API server.
			if out := kubectl(t, c, "logs", "deployment/app"); !strings.Contains(out, "listening") {
				t.Errorf("kubectl logs says %q", out)
			}
			if out := kubectl(t, c, "exec", "deployment/app", "--", "/app", "-h"); !strings.Contains(out, "-on-term") {
				t.Errorf("kubectl exec says %q", out)
			}
		})
	}
}

// fromPods connects from the network of every pod to the API server's ClusterIP, and to the app's
// often enough to meet the pod itself.
func fromPods(t *testing.T, m *machine.Machine) {
	t.Helper()
	script := `mkdir -p /run/netns && cd /run/netns && ls | wc -l && for pod in *; do
		nsenter --net=$pod timeout 20 bash -c 'exec 3<>/dev/tcp/10.96.0.1/443' || exit 1
		for i in $(seq 20); do
			nsenter --net=$pod timeout 20 bash -c 'exec 3<>/dev/tcp/10.96.0.80/80
				printf "GET / HTTP/1.0\r\n\r\n" >&3
				read -t 15 -u 3 line && [[ $line == *200* ]]' || exit 1
		done
	done`
	out, err := m.Run(t.Context(), "bash", "-c", script)
	if err != nil {
		t.Errorf("from the pods of %s: %v", m.Name, err)
	} else if strings.TrimSpace(out) == "0" {
		t.Errorf("no network of a pod on %s", m.Name)
	}
}

// Three nodes: a DaemonSet is on each, traffic crosses them, a rollout works, and one that is cut
// off is NotReady until it is back.
func TestThreeNodes(t *testing.T) {
	c := cluster.New(t, machine.ControlPlane())
	image := machine.Image{Name: appImage, Program: app(t)}
	began := time.Now()
	set := machine.New(t, c, 3, machine.Options{Images: []machine.Image{image}})
	t.Logf("ready after %s", time.Since(began).Round(time.Second/10))
	rollout(t, c, set)
	for _, m := range set.Machines {
		// It has an address of the host's alone, so it is on this machine if it answers here.
		if _, err := ask(t.Context(), m.Dial, "127.0.0.1:9999", patience); err != nil {
			t.Errorf("no pod of the DaemonSet on %s: %v", m.Name, err)
		}
	}
	if out := kubectl(t, c, "get", "pods", "-l", "app=everywhere", "-o",
		"jsonpath={.items[*].status.phase}"); out != "Running Running Running" {
		t.Errorf("pods of the DaemonSet are %q, want three times Running", out)
	}

	cut, other := set.Machines[2], set.Machines[0]
	kubelet := cut.Address.String() + ":10250"
	dial := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		conn, err := other.Dial(ctx, "tcp", kubelet)
		if err == nil {
			conn.Close()
		}
		return err
	}
	if err := dial(); err != nil {
		t.Fatalf("%s does not reach %s before it is cut off: %v", other.Name, cut.Name, err)
	}
	if err := cut.Cut(); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	if err := dial(); err == nil {
		t.Errorf("%s still reaches %s, which is cut off", other.Name, cut.Name)
	}
	kubectl(t, c, "wait", "--for=condition=Ready=Unknown", "node/"+cut.Name, "--timeout=60s")
	t.Logf("NotReady %s after the cut", time.Since(began).Round(time.Second/10))
	if _, err := ask(t.Context(), cut.Dial, "127.0.0.1:9999", patience); err != nil {
		t.Errorf("what runs on a machine that is cut off does not go on: %v", err)
	}
	if err := cut.Heal(); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	kubectl(t, c, "wait", "--for=condition=Ready=True", "node/"+cut.Name, "--timeout=60s")
	t.Logf("Ready %s after the cut was healed", time.Since(began).Round(time.Second/10))

	// Programs are one's own to kill: pods run on, and the node comes back. Another machine is
	// switched off.
	for _, program := range []string{"containerd", "kubelet", "kube-proxy"} {
		if err := cut.Restart(program); err != nil {
			t.Fatal(err)
		}
	}
	if err := set.Machines[1].Stop(); err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, "wait", "--for=condition=Ready=Unknown", "node/node-2", "--timeout=60s")
	if _, err := ask(t.Context(), set.Machines[1].Dial, "127.0.0.1:9999", 3*time.Second); err == nil {
		t.Error("a machine that is switched off still serves")
	}
	kubectl(t, c, "wait", "--for=condition=Ready=True", "node/"+cut.Name, "--timeout=60s")
	reaches(t, cut.Name, cut.Dial, "127.0.0.1:9999", 1)
	out := kubectl(t, c, "get", "pods", "--field-selector=spec.nodeName="+cut.Name, "-o",
		"jsonpath={.items[*].status.containerStatuses[*].restartCount}")
	if strings.Trim(out, "0 ") != "" || out == "" {
		t.Errorf("pods of %s were restarted %q times when containerd, kubelet and kube-proxy were", cut.Name, out)
	}
}

// rollout brings four pods up behind a Service, replaces them, and looks at each stage whether
// every machine, and a client that is on none, reach all of them.
func rollout(t *testing.T, c *cluster.Cluster, set *machine.Set) {
	t.Helper()
	const replicas = 4
	if _, err := c.KubectlInput(t.Context(), deployment(replicas), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	kubectl(t, c, "rollout", "status", "daemonset/everywhere", "--timeout=60s")
	for round := range 2 {
		kubectl(t, c, "rollout", "status", "deployment/app", "--timeout=60s")
		t.Logf("rolled out in %s", time.Since(began).Round(time.Second/10))
		// Those that go still answer for a moment, so that rules which name them look settled.
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if names := kubectl(t, c, "get", "pods", "-l", "app=app", "-o",
				"name"); len(strings.Fields(names)) == replicas {
				break
			}
		}
		// The rules follow within a second or so. What this asks is that they get there, not how
		// fast.
		settled := func() bool {
			for range 30 {
				for _, m := range set.Machines {
					for _, address := range []string{clusterIP, clusterIP6} {
						if _, err := ask(t.Context(), m.Dial, address, 3*time.Second); err != nil {
							return false
						}
					}
				}
			}
			return true
		}
		for end := time.Now().Add(20 * time.Second); !settled() && time.Now().Before(end); {
			time.Sleep(100 * time.Millisecond)
		}
		var dialer net.Dialer
		for _, m := range set.Machines {
			reaches(t, m.Name, m.Dial, clusterIP, replicas)
			reaches(t, m.Name, m.Dial, clusterIP6, replicas)
			if round == 0 { // once is enough
				fromPods(t, m)
			}
			for _, address := range []netip.Addr{m.Address, m.Address6} {
				reaches(t, "outside", dialer.DialContext, net.JoinHostPort(address.String(), nodePort), replicas)
			}
		}
		// Pods by their own addresses, from everywhere: the control plane calls webhooks in them.
		pods := kubectl(t, c, "get", "pods", "-l", "app=app", "--field-selector=status.phase=Running", "-o",
			`jsonpath={range .items[?(@.status.podIP)]}{.metadata.deletionTimestamp},{.status.podIP} {end}`)
		for pod := range strings.FieldsSeq(pods) {
			address, alive := strings.CutPrefix(pod, ",")
			if !alive {
				continue
			}
			reaches(t, "outside", dialer.DialContext, address+":8080", 1)
			for _, m := range set.Machines {
				reaches(t, m.Name, m.Dial, address+":8080", 1)
			}
		}
		began = time.Now()
		kubectl(t, c, "rollout", "restart", "deployment/app")
	}
	kubectl(t, c, "rollout", "status", "deployment/app", "--timeout=60s")
}

// A kubelet that does not start is said, with what it says, and nothing is left that another set
// would meet.
func TestStartFails(t *testing.T) {
	c := cluster.New(t, machine.ControlPlane())
	if err := machine.Installed(); err != nil {
		cluster.Missing(t, "a real node", err.Error())
	}
	before := traces(t)
	_, err := machine.Start(t.Context(), c, 1, machine.Options{Kubelet: []string{"maxPods: -1"}})
	if err == nil || !strings.Contains(err.Error(), "maxPods") {
		t.Fatalf("start with a configuration that kubelets refuse: %v, want what the kubelet says", err)
	}
	compare(t, "after a failed start", before)
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	if _, err := machine.Start(ctx, c, 2, machine.Options{}); err == nil {
		t.Fatal("two nodes were ready within 700 ms")
	}
	compare(t, "after an interrupted start", before)
}

// A program with a machine leaves nothing behind when it ends. When it is killed, all but control
// groups is gone at once, and these and its folder go with the next program.
func TestNothingIsLeft(t *testing.T) {
	cluster.Entered(t)
	if err := machine.Installed(); err != nil {
		cluster.Missing(t, "a real node", err.Error())
	}
	binary := app(t)
	before := traces(t)
	for _, killed := range []bool{false, true} {
		cmd, stdin, run := outer(t, binary)
		during := traces(t)
		if slices.Equal(during, before) {
			t.Fatal("a machine runs and leaves no trace: this test sees nothing")
		}
		if !killed {
			stdin.Close()
			if err := cmd.Wait(); err != nil {
				t.Fatalf("end of %s: %v", run, err)
			}
			compare(t, "after an orderly end", before)
			continue
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if found, _ := filepath.Glob("/sys/fs/cgroup/*/" + run); len(found) == 0 {
			t.Errorf("no control group of %s is left by a kill: this test does not see them swept", run)
		}
		// Processes end by themselves, and the next program, which needs no machine, sweeps.
		next, stdin, _ := outer(t, "")
		stdin.Close()
		if err := next.Wait(); err != nil {
			t.Fatalf("end of the next program: %v", err)
		}
		compare(t, "after a kill and the next program", before)
	}
}

// outer starts this program again, in namespaces within the test's. When its machine has a pod, it
// returns a Closer that ends it, and its RunName. Without a binary it has no machine.
func outer(t *testing.T, binary string) (*exec.Cmd, io.Closer, string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self)
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "LAMEDUCK_CLUSTER_") {
			cmd.Env = append(cmd.Env, pair)
		}
	}
	cmd.Env = append(cmd.Env, "TEST_PROGRAM=machine", "TEST_APP="+binary)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ready") {
		t.Fatalf("program with a machine: %q, %v", line, err)
	}
	return cmd, stdin, strings.TrimSpace(strings.TrimPrefix(line, "ready"))
}

// traces are the things that machines make on a system, sorted.
func traces(t *testing.T) []string {
	t.Helper()
	var all []string
	add := func(kind string, what ...string) {
		for _, w := range what {
			all = append(all, kind+" "+w)
		}
	}
	for _, pattern := range []string{
		"/sys/fs/cgroup/lameduck-*", "/sys/fs/cgroup/*/lameduck-*", "/run/netns/*", "/run/containerd/*",
		"/var/lib/cni/*", "/var/lib/kubelet/*",
		"/var/lib/containerd/*", "/var/log/pods/*", "/var/log/containers/*", "/opt/containerd/*",
		"/usr/libexec/kubernetes/*", "/etc/cni/*",
		filepath.Join(os.TempDir(), "lameduck-run-*"),
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		add("file", found...)
	}
	for _, path := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
		"kernel/keys/root_maxkeys", "net/netfilter/nf_conntrack_max"} {
		value, err := os.ReadFile(filepath.Join("/proc/sys", path))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		add("setting", path+" "+strings.TrimSpace(string(value)))
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for mount := range strings.Lines(string(mounts)) {
		add("mount", strings.TrimSpace(mount))
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		add("link", link.Name)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range processes {
		text, _ := os.ReadFile(path)
		name, _, _ := strings.Cut(string(text), "\x00")
		for _, known := range []string{"containerd", "kube", "etcd", "pause", "lameduck-machine", "/app"} {
			if strings.Contains(filepath.Base(name), filepath.Base(known)) {
				add("process", path+" "+name)
			}
		}
	}
	slices.Sort(all)
	return all
}

// compare waits for a while until traces are as they were.
func compare(t *testing.T, when string, before []string) {
	t.Helper()
	var now []string
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if now = traces(t); slices.Equal(now, before) {
			return
		}
		if time.Now().After(end) {
			break
		}
	}
	for _, trace := range now {
		if !slices.Contains(before, trace) {
			t.Errorf("left %s: %s", when, trace)
		}
	}
	for _, trace := range before {
		if !slices.Contains(now, trace) {
			t.Errorf("gone %s: %s", when, trace)
		}
	}
}

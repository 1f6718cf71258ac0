package main

import (
	"context"
	"encoding/pem"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// The whole way, from the coordinator's drain to its acknowledgement, before a HAProxy that the
// agent does not know and that never learns of anything. The agent is killed and replaced.
func TestTheKernelDirects(t *testing.T) {
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified"); err == nil {
		root += "/unified"
	}
	uid := fmt.Sprintf("agent-test-%d", os.Getpid())
	cgroup := filepath.Join(root, "pod"+uid)
	if os.Geteuid() != 0 {
		gatewaytest.Missing(t, "right to load programs: run as root", os.ErrPermission)
	}
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		gatewaytest.Missing(t, "cgroup2", err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); os.Remove(cgroup) != nil && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond) // until its processes are gone
		}
	})
	w := newPods(t, 5)
	w.api, w.boss = newAPI(t, w.list...), newBoss(t, time.Minute)
	w.proxy, w.metrics = planes.FreeAddress(t), planes.FreeAddress(t)
	servers := ""
	for i, pod := range w.list {
		host, _, _ := strings.Cut(pod, "@")
		servers += fmt.Sprintf("    server s%d %s:%d\n", i, host, podPort)
	}
	w.write("haproxy.cfg", fmt.Sprintf("defaults\n    mode http\n    timeout connect 2s\n    timeout client 30s\n"+
		"    timeout server 30s\n    retries 0\n    option http-server-close\nfrontend web\n    bind %s\n"+
		"    default_backend web\nbackend web\n%s", w.proxy, servers))
	script := `echo $$ > "$0/cgroup.procs" && exec "$@"`
	planes.StartProgram(t, w.proxy, "/bin/sh", "-c", script, cgroup, gatewaytest.LookPath(t, "haproxy"), "-f",
		filepath.Join(w.dir, "haproxy.cfg"))
	w.write("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: w.boss.running.Certificate().Raw})))
	w.write("token", "token")
	w.write("kubeconfig", fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts: [{name: x, "+
		"context: {cluster: x}}]\nclusters: [{name: x, cluster: {server: 'http://%s'}}]\n", w.api.address))
	w.write("agent.yaml", fmt.Sprintf(`
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators: {addresses: ["https://%[2]s"], serverName: example.com, caFile: %[1]s/ca.crt, tokenFile: %[1]s/token}
stateDir: %[1]s/state
gateway:
  kernel: {podUID: %[3]s, cgroups: %[4]s, pins: %[1]s/bpf, services: [{service: shop/web}]}
`, w.dir, w.boss.address, uid, root))
	for _, dir := range []string{"bpf", "state"} {
		if err := os.Mkdir(filepath.Join(w.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// Each mount has maps and links of its own: the next agent needs the same one.
	bpf := filepath.Join(w.dir, "bpf")
	if err := unix.Mount("bpf", bpf, "bpf", 0, ""); err != nil {
		gatewaytest.Missing(t, "bpffs", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	live := func() {
		// The agent is a container of the pod.
		w.agent = exec.Command("/bin/sh", "-c", script, cgroup, os.Args[0], "--config",
			filepath.Join(w.dir, "agent.yaml"), "--kubeconfig", filepath.Join(w.dir, "kubeconfig"),
			"--metrics-address", w.metrics)
		w.agent.Env = append(os.Environ(), asAgent+"=1")
		w.agent.Stdout, w.agent.Stderr = w.log, w.log
		w.agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := w.agent.Start(); err != nil {
			t.Fatal(err)
		}
	}
	live()
	ctx, stop := context.WithCancel(context.Background())
	asked := make(chan struct{})
	go w.ask(ctx, asked)
	t.Cleanup(func() {
		stop()
		<-asked
		w.die()
		if t.Failed() {
			t.Logf("agent wrote:\n%s", w.log)
		}
	})
	w.until("the agent is ready", w.ready)
	w.mustServe()
	gone := w.pods[0]
	w.boss.drain(gone)
	w.until("the pod is idle", func() bool { return w.boss.heard(gone) == drain.Idle })
	promised := time.Now()
	w.mustServe(gone)
	if w.routedSince(gone, promised) {
		t.Error("it was routed after the agent had said that it is not")
	}
	// It is killed at any moment of the next drain, with coordinators and without. The next agent
	// puts its own programs in the place of the former ones.
	for round, uid := range w.pods[1:3] {
		w.boss.drain(uid)
		time.Sleep(rand.N(60 * time.Millisecond)) // any moment of a drain
		if round > 0 {
			w.boss.down()
		}
		w.die()
		w.mustServe(w.pods[:3]...)
		live()
		if round > 0 {
			w.until("it has given up on coordinators", func() bool {
				return strings.Contains(w.log.String(), "without knowing which drains are open")
			})
			w.mustServe(w.pods[:3]...)
			w.boss.up()
		}
		w.until("the agent is ready", w.ready)
		w.until("the pod is idle", func() bool { return w.boss.heard(uid) == drain.Idle })
		if w.routedSince(gone, promised) {
			t.Error("it was routed by the next agent, or while there was none")
		}
		since := time.Now()
		w.mustServe(w.pods[:3]...)
		if w.routedSince(uid, since) {
			t.Errorf("%s was routed after the next agent had said that it is not", uid)
		}
	}
	// The last one is kept.
	w.boss.drain(w.pods[3:]...)
	kept := func() int {
		n := 0
		for _, uid := range w.pods {
			if w.boss.heard(uid) == drain.Kept {
				n++
			}
		}
		return n
	}
	w.until("one is kept", func() bool { return kept() == 1 })
	w.mustServe(w.pods...)
}

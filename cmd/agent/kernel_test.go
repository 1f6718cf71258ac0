//go:build linux

package main

import (
	"context"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway/gatewaytest"
)

// The whole way, from the coordinator's drain to its acknowledgement, before a HAProxy that the
// agent does not know and that never learns of anything.
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
	w := newPods(t, 3)
	w.api, w.boss = newAPI(t, w.list...), newBoss(t, time.Minute)
	w.proxy, w.metrics = gatewaytest.FreeAddress(t), gatewaytest.FreeAddress(t)
	servers := ""
	for i, pod := range w.list {
		host, _, _ := strings.Cut(pod, "@")
		servers += fmt.Sprintf("    server s%d %s:%d\n", i, host, podPort)
	}
	w.write("haproxy.cfg", fmt.Sprintf("defaults\n    mode http\n    timeout connect 2s\n    timeout client 30s\n"+
		"    timeout server 30s\n    retries 0\n    option http-server-close\nfrontend web\n    bind %s\n"+
		"    default_backend web\nbackend web\n%s", w.proxy, servers))
	script := `echo $$ > "$0/cgroup.procs" && exec "$@"`
	gatewaytest.StartProgram(t, w.proxy, "/bin/sh", "-c", script, cgroup, gatewaytest.LookPath(t, "haproxy"), "-f",
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
gateway:
  kernel: {podUID: %[3]s, cgroups: %[4]s, pins: %[1]s/bpf, services: [{service: shop/web}]}
`, w.dir, w.boss.address, uid, root))
	if err := os.Mkdir(filepath.Join(w.dir, "bpf"), 0o755); err != nil {
		t.Fatal(err)
	}
	// The agent is a container of the pod.
	inside := `mount -t bpf bpf "$0" && echo $$ > ` + cgroup + `/cgroup.procs && exec "$@"`
	w.agent = exec.Command("/bin/sh", "-c", inside, filepath.Join(w.dir, "bpf"),
		os.Args[0], "--config", filepath.Join(w.dir, "agent.yaml"), "--kubeconfig", filepath.Join(w.dir, "kubeconfig"),
		"--metrics-address", w.metrics)
	w.agent.Env = append(os.Environ(), asAgent+"=1")
	w.agent.Stdout, w.agent.Stderr = w.log, w.log
	w.agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Unshareflags: syscall.CLONE_NEWNS}
	if err := w.agent.Start(); err != nil {
		t.Fatal(err)
	}
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
	// The last one is kept.
	w.boss.drain(w.pods[1:]...)
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

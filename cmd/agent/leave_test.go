package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// stop ends the agent as the kubelet does, and returns how often it has said that it leaves.
func (w *world) stop() int {
	w.Helper()
	if err := w.agent.Process.Signal(syscall.SIGTERM); err != nil {
		w.Fatal(err)
	}
	_ = w.agent.Wait()
	w.boss.mu.Lock()
	defer w.boss.mu.Unlock()
	return w.boss.left
}

// Being told to stop is no reason to leave: coordinators do not wait for an agent that has left,
// and HAProxy continues. An agent leaves once HAProxy has ended.
func TestAnAgentLeavesWhenItsGatewayIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, time.Minute)
	w.boss.drain(w.pods[0])
	w.until("the pod is idle", func() bool { return w.boss.heard(w.pods[0]) == drain.Idle })
	if left := w.stop(); left != 0 {
		t.Fatal("it has left a HAProxy that accepts requests")
	}
	w.mustServe(w.pods[0])
	w.live()
	w.until("the agent is ready", w.ready)

	w.haproxyEnds(syscall.SIGTERM)
	began := time.Now()
	if left := w.stop(); left != 1 {
		t.Errorf("it has left %d times, want once", left)
	}
	if took := time.Since(began); took > leaveTimeout+shutdownGrace+time.Second {
		t.Errorf("it took %s", took)
	}
}

// haproxyEnds sends a signal to HAProxy and waits for its end.
func (w *world) haproxyEnds(signal syscall.Signal) {
	w.Helper()
	if err := w.haproxy.Process.Signal(signal); err != nil {
		w.Fatal(err)
	}
	_ = w.haproxy.Wait()
}

// An agent that has never seen its gateway cannot know that it is gone: the path of the socket may
// be wrong.
func TestAnAgentThatSawNoGatewayDoesNotLeave(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1, time.Minute)
	w.stop()
	config, err := os.ReadFile(filepath.Join(w.dir, "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.write("agent.yaml", strings.Replace(string(config), "/m.sock", "/wrong.sock", 1))
	w.live()
	w.until("it has looked for the gateway", func() bool { return strings.Contains(w.log.String(), "wrong.sock") })
	time.Sleep(500 * time.Millisecond) // nothing follows that could be awaited: it never leaves
	if left := w.stop(); left != 0 {
		t.Error("it has left a HAProxy that accepts requests")
	}
}

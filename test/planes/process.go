// Package planes has the helpers that this repository's tests of data planes share: real programs
// in processes of their own, functions that wait for readings, and an observed data plane in
// memory. The contracts that a gateway has to pass are in test/gatewaytest.
package planes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Program is a real data plane in a process of its own.
type Program struct {
	t    testing.TB
	cmd  *exec.Cmd
	ends func()
}

// StartProgram starts a program and waits up to 20 s until it accepts a connection at the address
// listens. The program is killed when the test ends.
func StartProgram(t testing.TB, listens, path string, args ...string) *Program {
	t.Helper()
	var out bytes.Buffer // read once the process has ended
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &Program{t: t, cmd: cmd, ends: sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s wrote:\n%s", filepath.Base(path), out.Bytes())
		}
	})}
	t.Cleanup(p.ends)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", listens); err == nil {
			conn.Close()
			return p
		}
		if time.Now().After(deadline) {
			t.Errorf("%s does not listen on %s", path, listens)
			p.ends()
			t.FailNow()
		}
	}
}

// Signal sends a signal to the process.
func (p *Program) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// Kill ends the process with SIGKILL, and waits for its end.
func (p *Program) Kill() { p.ends() }

// Replace replaces the content of a file atomically, so that a program that watches it never reads
// a part.
func Replace(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

const (
	firstPort  = 15000 // below those that kernels choose
	portBlocks = 32
	blockPorts = 500
)

// block listens on the first port of this process's block. While it does, no other process takes a
// port of the block: Envoy and HAProxy listen with SO_REUSEPORT, and would share a port without an
// error.
var block = sync.OnceValues(func() (l net.Listener, err error) {
	for i := range portBlocks {
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort+i*blockPorts)); err == nil {
			return l, nil
		}
	}
	return nil, err
})

var portsGiven atomic.Uint32

// FreeAddress returns an address of the loopback on which nothing listens. Neither a connection nor
// a listener of a test that runs at the same time is given its port before it is used.
func FreeAddress(t testing.TB) string {
	t.Helper()
	l, err := block()
	if err != nil {
		t.Fatalf("no free block of ports: %v", err)
	}
	first := l.Addr().(*net.TCPAddr).Port
	var why error
	for range blockPorts {
		port := first + 1 + int(portsGiven.Add(1)%(blockPorts-1))
		address := fmt.Sprintf("127.0.0.1:%d", port)
		// Listening would not do: a process that is being started while the listener is closed has
		// a copy, and keeps the port until its program begins.
		conn, err := net.Dial("tcp", address)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return address
		}
		if err == nil {
			conn.Close()
		}
		why = err
	}
	t.Fatalf("no free port from %d to %d: %v", first+1, first+blockPorts-1, why)
	return ""
}

// RunGateway runs g until the test ends.
func RunGateway(t testing.TB, g gateway.Observed) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// Await waits until the reading of w has a state, and fails the test after 30 s.
func Await(t testing.TB, w gateway.Watch, state health.State) {
	t.Helper()
	Until(t, "it is "+state.String(), func() bool { return w.Reading().State == state })
}

// within is how long a data plane may take for anything.
const within = 30 * time.Second

// Until waits until is() is true, and fails the test after 30 s with what.
func Until(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after %s: %s", within, what)
		}
	}
}

// Answers returns the get of a polled gateway that answers with texts, by path.
func Answers(texts map[string]string) func(path string, into any) error {
	return func(path string, into any) error { return json.Unmarshal([]byte(texts[path]), into) }
}

package haproxy

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var _ gateway.Directed = (*Gateway)(nil)

// proxy is one real HAProxy in master-worker mode with files of its own.
type proxy struct {
	t      testing.TB
	path   string
	dir    string
	port   int
	socket string
	cfg    Config

	cmd    *exec.Cmd
	out    *agenttest.Log
	exited chan struct{}
}

// newProxy writes the user's file, with extra sections, and does not start HAProxy. HAPROXY in the
// environment is the program's name.
func newProxy(t testing.TB, userFile string, backends ...Backend) *proxy {
	t.Helper()
	path := gatewaytest.LookPath(t, cmp.Or(os.Getenv("HAPROXY"), "haproxy"))
	dir, err := os.MkdirTemp("", "ld") // t.TempDir is too long for a unix socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	port := int(netip.MustParseAddrPort(planes.FreeAddress(t)).Port())
	p := &proxy{t: t, path: path, dir: dir, port: port, socket: filepath.Join(dir, "m.sock")}
	for i := range backends {
		backends[i].Lines = slices.Concat(needed, backends[i].Lines)
	}
	p.cfg = Config{MasterSocket: p.socket, ServersFile: filepath.Join(dir, "servers.cfg"), Backends: backends}
	p.write("user.cfg", strings.ReplaceAll(userFile, "%PORT%", fmt.Sprint(port)))
	return p
}

func (p *proxy) write(name, content string) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.dir, name), []byte(content), 0o644); err != nil {
		p.t.Fatal(err)
	}
}

func (p *proxy) gateway() *Gateway {
	p.t.Helper()
	g, err := New(p.cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	g.cli.timeout = 20 * time.Second // the machine may be busy
	return g
}

func (p *proxy) start() { p.t.Helper(); p.startWith(p.socket) }

// check returns what HAProxy says of its files without starting.
func (p *proxy) check() (string, error) {
	out, err := exec.Command(p.path, "-c", "-f", filepath.Join(p.dir, "user.cfg"), "-f",
		p.cfg.ServersFile).CombinedOutput()
	return string(out), err
}

// startWith starts HAProxy with a master socket that may have more words after its path.
func (p *proxy) startWith(socket string) {
	p.t.Helper()
	p.cmd = exec.Command(p.path, "-W", "-S", socket, "-f", filepath.Join(p.dir, "user.cfg"), "-f", p.cfg.ServersFile)
	p.out = &agenttest.Log{}
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	cmd, exited := p.cmd, make(chan struct{})
	p.exited = exited
	go func() {
		cmd.Wait()
		close(exited)
	}()
	p.t.Cleanup(func() { p.end(cmd, exited) })
	p.until("it listens", func() bool {
		w, err := p.workers()
		if err != nil || !w.current() {
			return false
		}
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
		if err != nil {
			return false
		}
		c.Close()
		// Since HAProxy 3.1 the master passes no command on before it knows that the worker is
		// ready.
		master := cli{path: p.socket, timeout: 20 * time.Second}
		_, err = master.do(context.Background(), w.Workers[0].PID, "show info")
		return err == nil
	})
}

// end kills the master and its workers, which share a process group of their own.
func (p *proxy) end(cmd *exec.Cmd, exited chan struct{}) {
	syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	<-exited
	if p.t.Failed() && testing.Verbose() {
		p.t.Logf("haproxy wrote:\n%s", p.out)
	}
}

func (p *proxy) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(-p.cmd.Process.Pid, sig); err != nil {
		p.t.Fatal(err)
	}
}

func (p *proxy) until(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); { // the machine may be busy
		select {
		case <-p.exited:
			p.t.Fatalf("haproxy ended while waiting until %s:\n%s", what, p.out)
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(end) {
			p.t.Fatalf("not within 30 s: %s\n%s", what, p.out)
		}
	}
}

// untilStream waits until a request is bound to the server of t, connected or between two tries.
func (p *proxy) untilStream(t health.Target) {
	p.t.Helper()
	name, err := serverName(t)
	if err != nil {
		p.t.Fatal(err)
	}
	p.until("the request is there", func() bool {
		return strings.Contains(p.ask(p.worker(), "show sess"), "srv="+name+" ")
	})
}

// ask sends one command as the gateway would.
func (p *proxy) ask(pid int, command string) string {
	p.t.Helper()
	c := cli{path: p.socket, timeout: 20 * time.Second}
	answer, err := c.do(context.Background(), pid, command)
	if err != nil {
		p.t.Fatalf("%s: %v", command, err)
	}
	return answer
}

func (p *proxy) workers() (processes, error) {
	c := cli{path: p.socket, timeout: 20 * time.Second}
	answer, err := c.table(context.Background(), 0, "show proc", procBegin)
	if err != nil {
		return processes{}, err
	}
	return parseProcesses(answer)
}

// current reports whether a worker is listed that is not old.
func (p processes) current() bool {
	return slices.ContainsFunc(p.Workers, func(w process) bool { return !w.Old })
}

func (p *proxy) worker() int {
	p.t.Helper()
	w, err := p.workers()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, w := range w.Workers {
		if !w.Old {
			return w.PID
		}
	}
	p.t.Fatal("no worker")
	return 0
}

func (p *proxy) reload() {
	p.t.Helper()
	before := p.worker()
	if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGUSR2); err != nil {
		p.t.Fatal(err)
	}
	p.until("a new worker has replaced the old one", func() bool {
		w, err := p.workers()
		if err != nil || strings.Contains(p.out.String(), "Loading failure") {
			return false
		}
		fresh, stopped := false, true
		for _, w := range w.Workers {
			fresh = fresh || !w.Old && w.PID != before
			if w.PID == before {
				c := cli{path: p.socket, timeout: 20 * time.Second}
				answer, err := c.table(context.Background(), before, "show info", infoBegin)
				in, _ := parseInfo(answer)
				stopped = err != nil || in.Stopping
			}
		}
		return fresh && stopped
	})
}

func (p *proxy) restart() {
	p.end(p.cmd, p.exited)
	p.start()
}

func (p *proxy) url(pool, path string) string {
	return fmt.Sprintf("http://127.0.0.1:%d%s?pool=%s", p.port, path, pool)
}

// needed is what a section of the agent's file has to have.
var needed = []string{"mode http", "timeout connect 2s", "timeout server 30s"}

const userFile = `
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
frontend web
    bind 127.0.0.1:%PORT%
    default_backend agent
`

func harness(t *testing.T, b Backend) *gatewaytest.Harness {
	p := newProxy(t, userFile, b)
	g := p.gateway()
	p.start()
	h := &gatewaytest.Harness{
		Gateway:    g,
		Open:       func(testing.TB) gateway.Directed { return p.gateway() },
		Owned:      "agent",
		NewClient:  func(testing.TB) gatewaytest.Client { return gatewaytest.NewHTTPClient(p.url) },
		Reload:     func(testing.TB) { p.reload() },
		Restart:    func(testing.TB) { p.restart() },
		Freeze:     func(testing.TB) { p.signal(syscall.SIGSTOP) },
		Thaw:       func(testing.TB) { p.signal(syscall.SIGCONT) },
		Kill:       func(testing.TB) { p.end(p.cmd, p.exited) },
		GoneWithin: 15 * time.Second,
	}
	h.Unreadable = func(testing.TB) health.Pool { // HAProxy has not loaded it
		p.cfg.Backends = append(p.cfg.Backends, Backend{Backend: "later", Lines: needed})
		h.Gateway = p.gateway()
		return "later"
	}
	return h
}

func TestContract(t *testing.T) {
	gatewaytest.Run(t, func(t *testing.T) *gatewaytest.Harness {
		return harness(t, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	})
}

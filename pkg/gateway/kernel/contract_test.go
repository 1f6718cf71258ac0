package kernel

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// haproxy is a HAProxy in a pod. It gets its servers by itself, as a gateway does that follows
// EndpointSlices: from controlled.
type haproxy struct {
	*pod
	t        testing.TB
	dir      string
	listens  string
	program  *planes.Program
	servers  []netip.AddrPort
	upstream string
}

const haproxyFile = `
global
    stats socket %s level admin
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
    retries 0
frontend web
    bind %s
    default_backend web
backend web
    %s
`

func newHAProxy(t testing.TB, p *pod, upstream string) *haproxy {
	dir, err := os.MkdirTemp("", "ld")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &haproxy{pod: p, t: t, dir: dir, listens: planes.FreeAddress(t), upstream: upstream}
}

func (h *haproxy) start() {
	h.t.Helper()
	h.write()
	h.program = h.pod.start(h.t, "gateway", h.listens, gatewaytest.LookPath(h.t, "haproxy"), "-W",
		"-f", filepath.Join(h.dir, "h.cfg"))
	planes.Until(h.t, "HAProxy answers on its socket", func() bool { return h.worker() != "" })
}

func (h *haproxy) write() {
	h.t.Helper()
	text := fmt.Sprintf(haproxyFile, filepath.Join(h.dir, "s.sock"), h.listens, h.upstream)
	for i, s := range h.servers {
		text += fmt.Sprintf("    server s%d %s\n", i, s)
	}
	text += fmt.Sprintf("    server-template s %d-700 127.0.0.1:1 disabled\n", len(h.servers)+1000)
	text = strings.Replace(text, "-700 ", fmt.Sprintf("-%d ", len(h.servers)+1600), 1)
	planes.Replace(h.t, filepath.Join(h.dir, "h.cfg"), text)
}

// ask sends a command to the worker. An error is no answer.
func (h *haproxy) ask(command string) string {
	conn, err := net.Dial("unix", filepath.Join(h.dir, "s.sock"))
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = fmt.Fprintln(conn, command)
	var b bytes.Buffer
	_, _ = b.ReadFrom(conn)
	return b.String()
}

func (h *haproxy) worker() string {
	_, after, _ := strings.Cut(h.ask("show info"), "\nPid: ")
	pid, _, _ := strings.Cut(after, "\n")
	return pid
}

// add gives it a server.
func (h *haproxy) add(a netip.AddrPort) {
	h.t.Helper()
	slot := len(h.servers) + 1000
	h.servers = append(h.servers, a)
	h.ask(fmt.Sprintf("set server web/s%d addr %s port %d; set server web/s%[1]d state ready", slot, a.Addr(),
		a.Port()))
}

func (h *haproxy) reload() {
	h.t.Helper()
	h.write()
	was := h.worker()
	var sent time.Time
	planes.Until(h.t, "the new worker answers", func() bool {
		// A master that still starts after the last reload loses the signal.
		if time.Since(sent) > 2*time.Second {
			h.program.Signal(syscall.SIGUSR2)
			sent = time.Now()
		}
		pid := h.worker()
		return pid != "" && pid != was
	})
}

// controlled is the control plane of a HAProxy, before its gateway: a target that is routed for the
// first time becomes one of its servers.
type controlled struct {
	gateway.Directed
	h *haproxy
}

func (c controlled) Apply(ctx context.Context, ops []health.Op) error {
	known := map[netip.AddrPort]bool{}
	for _, s := range c.h.servers {
		known[s] = true
	}
	err := c.Directed.Apply(ctx, ops)
	for _, op := range ops {
		a := op.Target.Addr
		if op.Want == health.WantRouted && !known[a] && op.Pool == "shop/web:http" && a.Port() != 9 {
			c.h.add(a)
			known[a] = true
		}
	}
	return err
}

func TestContract(t *testing.T) {
	systemd := false
	gatewaytest.Run(t, func(t *testing.T) *gatewaytest.Harness {
		p := newPod(t, systemd)
		h := newHAProxy(t, p, "option http-server-close")
		h.start()
		url := func(_, path string) string { return "http://" + h.listens + path }
		p.config.Services = append(p.config.Services, Service{Service: "shop/refused", Port: "http"})
		g := p.open(t)
		return &gatewaytest.Harness{
			Gateway:   controlled{g, h},
			Open:      func(t testing.TB) gateway.Directed { return controlled{p.open(t), h} },
			Owned:     "shop/web:http",
			Masks:     true,
			NewClient: func(testing.TB) gatewaytest.Client { return gatewaytest.NewHTTPClient(url) },
			Reload:    func(testing.TB) { h.reload() },
			Restart:   func(testing.TB) { h.program.Kill(); h.start() },
			Kill: func(t testing.TB) {
				h.program.Kill()
				p.remove(t)
			},
			GoneWithin: 15 * time.Second,
			Unreadable: func(testing.TB) health.Pool {
				g.Refuse("shop/refused:http", "its connections cannot be told apart")
				return "shop/refused:http"
			},
		}
	})
}

package haproxy

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// directed is a HAProxy that a director follows a set with.
type directed struct {
	*proxy
	set      *health.Set
	director *gateway.Director
	err      atomic.Value // of the last step, as a string
}

func startDirected(t *testing.T, p *proxy) *directed {
	t.Helper()
	d := &directed{proxy: p, set: health.New(health.Options{})}
	d.director = gateway.NewDirector(p.gateway(), d.set, slog.New(slog.DiscardHandler), gateway.Hooks{
		Followed: func(p gateway.Progress) { d.err.Store(fmt.Sprint(p.Err)) },
	})
	p.start()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.director.Run(ctx) })
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	t.Cleanup(func() {
		if t.Failed() {
			list, err := d.workers()
			t.Logf("the last step: %v; processes: %v, %v; targets: %+v", d.err.Load(), list, err, d.set.Targets())
		}
	})
	d.set.Synced()
	return d
}

func (d *directed) list(uid health.UID, b *gatewaytest.Backend, routable bool) {
	d.set.Change(time.Now(), "agent", []health.Change{{Endpoint: health.Endpoint{
		Target: health.Target{UID: uid, Addr: b.Addr}, Routable: routable, Terminating: !routable}}})
	d.director.Wake()
}

func (d *directed) exclude(uid health.UID) {
	d.set.Exclude(time.Now(), uid, "holder", time.Now(), time.Now().Add(time.Hour))
	d.director.Wake()
}

// untilRouted waits until each process that takes new requests was read to have the pod.
func (d *directed) untilRouted(uid health.UID) {
	d.t.Helper()
	d.until(string(uid)+" is routed", func() bool {
		return slices.ContainsFunc(d.set.Targets(), func(is health.Detail) bool {
			return is.Key.Target.UID == uid && is.Read && is.Seen.Routed && !is.Seen.Missing
		})
	})
}

func (d *directed) untilIdle(uid health.UID) {
	d.t.Helper()
	d.until(string(uid)+" is idle", func() bool {
		state, _, _ := d.set.Of(uid)
		return state == health.Idle
	})
}

// answers sends requests, each on a connection of its own, and counts the answers by who gave them.
func (d *directed) answers(n int) map[string]int {
	d.t.Helper()
	out := map[string]int{}
	for range n {
		c := gatewaytest.NewHTTPClient(d.url)
		if addr, err := c.Get(d.t.Context(), "agent", "/", 0); err != nil {
			out[err.Error()]++
		} else {
			out[addr.String()]++
		}
		c.Close()
	}
	return out
}

// A typo in the configuration must not end the service: HAProxy serves on with the worker that it
// has, which since 3.1 the master lists as an old one.
func TestRolloutAfterAFailedReload(t *testing.T) {
	t.Parallel()
	before, after := gatewaytest.StartBackend(t, "127.0.0.66"), gatewaytest.StartBackend(t, "127.0.0.67")
	d := startDirected(t, newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}}))
	d.list("before", before, true)
	d.untilRouted("before")
	d.write("user.cfg", strings.ReplaceAll(userFile, "%PORT%", strconv.Itoa(d.port))+"\nnonsense here\n")
	if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGUSR2); err != nil {
		t.Fatal(err)
	}
	d.until("the reload has failed", func() bool {
		w, err := d.workers()
		return err == nil && strings.Contains(w.Reloads, "failed: 1")
	})
	d.list("after", after, true)
	d.untilRouted("after")
	d.exclude("before")
	d.untilIdle("before")
	d.list("before", before, false)
	d.until("the gateway is followed without an error", func() bool { return d.err.Load() == "<nil>" })
	if got := d.answers(20); got[after.Addr.String()] != 20 {
		t.Errorf("of 20 requests with a ready pod: %v", got)
	}
}

// slowly makes each reload carry out the shell command in the file pause while it parses.
func slowly(t *testing.T, backend Backend) *proxy {
	p := newProxy(t, "", backend)
	lua := filepath.Join(p.dir, "slow.lua")
	p.write("slow.lua", "local f = io.open('"+p.dir+"/pause') if f then os.execute(f:read('*a')) end\n")
	p.write("user.cfg", "global\n    hard-stop-after 2s\n    lua-load "+lua+"\n"+
		strings.ReplaceAll(userFile, "%PORT%", strconv.Itoa(p.port)))
	return p
}

// While a reload parses, since HAProxy 3.1 the master answers, lists the worker that serves as an
// old one, and the new one, which does not answer yet. The latter may have read the servers file
// before the agent changed it.
func TestAReloadThatParsesForLong(t *testing.T) {
	t.Parallel()
	stay, flap, comes := gatewaytest.StartBackend(t, "127.0.0.73"), gatewaytest.StartBackend(t, "127.0.0.74"),
		gatewaytest.StartBackend(t, "127.0.0.75")
	d := startDirected(t, slowly(t, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}}))
	d.list("stay", stay, true)
	d.list("flap", flap, true)
	d.untilRouted("stay")
	d.untilRouted("flap")
	old := d.worker()
	parsing := filepath.Join(d.dir, "parsing")
	d.write("pause", "touch "+parsing+"; while [ -e "+parsing+" ]; do sleep 0.05; done")
	if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGUSR2); err != nil {
		t.Fatal(err)
	}
	d.until("it parses", func() bool {
		_, err := os.Stat(parsing)
		return err == nil
	})
	// The master answers soon, or not before the end of it.
	c := cli{path: d.socket, timeout: 3 * time.Second}
	list, err := read(t.Context(), &c, 0, "show proc", procBegin, parseProcesses)
	for end := time.Now().Add(3 * time.Second); err != nil && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond) // between two looks
		list, err = read(t.Context(), &c, 0, "show proc", procBegin, parseProcesses)
	}
	if err == nil && (len(list.Workers) != 2 || !list.Workers[1].Old) {
		t.Fatalf("while it parses: %v", list)
	}
	t.Logf("while it parses: %v, %v", list, err)
	d.exclude("flap")
	d.list("comes", comes, true)
	if err == nil {
		d.until("the new pod is served by the worker that serves", func() bool {
			answer, err := c.table(t.Context(), old, "show servers state agent", stateBegin)
			return err == nil && strings.Contains(answer, "ld-comes-")
		})
		if state, _, _ := d.set.Of("flap"); state >= health.Removed {
			t.Errorf("while the new worker parses, the target that it may have read is %s", state)
		}
	}
	if err := os.Remove(parsing); err != nil {
		t.Fatal(err)
	}
	d.untilIdle("flap")
	if now := d.worker(); now == old {
		t.Error("the target is idle before the new worker was read")
	}
	if got := d.answers(30); got[stay.Addr.String()] == 0 || got[comes.Addr.String()] == 0 || len(got) != 2 {
		t.Errorf("requests after the reload: %v", got)
	}
}

// Reloads that parse for any time, and drains that begin at any moment: no request reaches the
// target once it is idle, and none is lost.
func TestStormOfReloads(t *testing.T) {
	t.Parallel()
	stay, flap := gatewaytest.StartBackend(t, "127.0.0.68"), gatewaytest.StartBackend(t, "127.0.0.69")
	d := startDirected(t, slowly(t, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}}))
	d.list("stay", stay, true)
	d.list("flap", flap, true)
	d.untilRouted("flap")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var phase, made atomic.Int64
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c := gatewaytest.NewHTTPClient(d.url)
				_, err := c.Get(ctx, "agent", "/", int(phase.Load()))
				c.Close()
				if err != nil && ctx.Err() == nil {
					t.Errorf("a request failed: %v", err)
					return
				}
				made.Add(1)
			}
		})
	}
	for range 8 {
		d.write("pause", fmt.Sprintf("sleep %.3f", rand.Float64()*0.6))
		if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGUSR2); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(900)) * time.Millisecond) // any moment of the reload
		d.exclude("flap")
		d.untilIdle("flap")
		at := int(phase.Add(1))
		time.Sleep(time.Duration(rand.IntN(900)) * time.Millisecond) // any moment later
		if n := flap.Hits(at); n > 0 {
			t.Errorf("%d requests reached the target after it was idle", n)
		}
		d.set.Readmit("flap", "holder")
		d.director.Wake()
		d.untilRouted("flap")
		phase.Add(1)
	}
	t.Logf("%d requests", made.Load())
}

// A server must not inherit what serverOptions refuses: HAProxy would end a request on a server
// that the agent takes out, or put the server back. Operators have such words in their defaults,
// and they may come with any reload.
func TestServersInheritNothing(t *testing.T) {
	t.Parallel()
	b := gatewaytest.StartBackend(t, "127.0.0.76")
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	op := routed("agent", "u", b.Addr.String())
	apply(t, g, op)
	p.write("user.cfg", strings.NewReplacer("%PORT%", strconv.Itoa(p.port), "    timeout server 30s\n",
		"    timeout server 30s\n    option persist\n    default-server on-marked-down shutdown-sessions agent-check "+
			"agent-port 9 disabled init-addr none\n").Replace(userFile))
	p.reload()
	if is := see(t, g, op.Key); is != (health.Seen{Present: true, Routed: true}) {
		t.Errorf("after the reload it is seen as %+v", is)
	}
	result := make(chan error, 1)
	go func() {
		c := gatewaytest.NewHTTPClient(p.url)
		defer c.Close()
		_, err := c.Get(t.Context(), "agent", gatewaytest.HoldPath, 0)
		result <- err
	}()
	if err := b.WaitHeld(t.Context()); err != nil {
		t.Fatal(err)
	}
	apply(t, g, removed("agent", "u", b.Addr.String()))
	for range 3 { // readings after which the streams of a server that goes down have ended
		if is := see(t, g, op.Key); is.Routed || is.Active != 1 {
			t.Errorf("taken out with a request in progress it is seen as %+v", is)
		}
	}
	b.Release()
	if err := <-result; err != nil {
		t.Errorf("the drain itself ended the request: %v", err)
	}
}

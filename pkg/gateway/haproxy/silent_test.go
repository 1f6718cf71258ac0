package haproxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// An old worker that does not answer may route to every target. The worker that takes new
// connections is still read and changed.
func TestASilentOldWorkerMayRouteEverything(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	was, never, comes := routed("agent", "a", "127.0.0.91:1"), key("agent", "b", "127.0.0.92:1"),
		routed("agent", "c", "127.0.0.93:1")
	apply(t, g, was)
	client, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	io.WriteString(client, "GET / HTTP/1.1\r\nHo") // keeps the old worker
	old := p.worker()
	p.until("the worker has the client", func() bool {
		in, err := g.info(t.Context(), old)
		return err == nil && in.Clients == 1
	})
	p.reload()
	if err := syscall.Kill(old, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	thaw := func() { syscall.Kill(old, syscall.SIGCONT) }
	t.Cleanup(thaw)
	g.cli.timeout = 2 * time.Second
	out := health.Op{Key: was.Key, Want: health.WantAbsent}
	if err := g.Apply(t.Context(), []health.Op{comes, out}); !errors.Is(err, kindTimeout) {
		t.Errorf("removing from a worker that does not answer: %v", err)
	}
	keys := []health.Key{was.Key, never, comes.Key}
	silent, err := g.Observe(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[health.Key]health.Seen{
		was.Key:   {Present: true, Routed: true, Missing: true, Active: 1},
		never:     {Present: true, Routed: true, Missing: true, Active: 1},
		comes.Key: {Present: true, Routed: true, Active: 1},
	}, silent.Seen); diff != "" {
		t.Error(diff)
	}
	if owned, err := g.Owned(t.Context()); err != nil || len(owned) != 2 {
		t.Errorf("owned: %v, %v", owned, err)
	}
	// It is not waited for a second time.
	begin := time.Now()
	err = g.Apply(t.Context(), []health.Op{out})
	if took := time.Since(begin); !errors.Is(err, kindTimeout) || took > g.cli.timeout {
		t.Errorf("removing once more took %s: %v", took, err)
	}
	client.Close()
	thaw()
	g.cli.timeout = 20 * time.Second
	p.until("the old worker has ended", func() bool {
		o, err := g.Observe(t.Context(), keys)
		return err == nil && o.Generation != silent.Generation &&
			o.Seen[never] == health.Seen{Missing: true} && !o.Seen[was.Key].Routed && o.Seen[comes.Key].Routed
	})
}

// A list of streams that takes too long shows nothing to be idle, and delays neither other readings
// nor removals.
func TestStreamsThatAreNotListedInTime(t *testing.T) {
	t.Parallel()
	b := gatewaytest.StartBackend(t, "127.0.0.94")
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	p.gateway()
	p.start()
	p.cfg.MasterSocket = listenUnix(t, func(conn net.Conn) {
		cmd, err := io.ReadAll(conn)
		if err == nil && strings.Contains(string(cmd), "show sess") {
			<-t.Context().Done()
		} else if err == nil {
			io.WriteString(conn, rawAsk(t, p.socket, string(cmd)))
		}
	})
	g := p.gateway()
	g.cli.timeout = 2 * time.Second
	stays, first, second := routed("agent", "s", b.Addr.String()), routed("agent", "a", "127.0.0.95:1"),
		routed("agent", "b", "127.0.0.96:1")
	apply(t, g, stays, first, second, removed("agent", "a", "127.0.0.95:1"))
	keys := []health.Key{stays.Key, first.Key, second.Key}
	for range 2 {
		o, err := g.Observe(t.Context(), keys)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[health.Key]health.Seen{
			stays.Key:  {Present: true, Routed: true},
			first.Key:  {Present: true, Missing: true, Active: 1},
			second.Key: {Present: true, Routed: true},
		}, o.Seen); diff != "" {
			t.Error(diff)
		}
	}
	// The first needs the list, and the second comes after it in the batch.
	err := g.Apply(t.Context(), []health.Op{
		{Key: first.Key, Want: health.WantAbsent}, {Key: second.Key, Want: health.WantAbsent},
	})
	if !errors.Is(err, kindTimeout) {
		t.Errorf("deleting: %v", err)
	}
	if is := see(t, g, second.Key); is.Routed {
		t.Errorf("the second is seen as %+v", is)
	}
}

// late is a directed HAProxy with one target. The next command that makes a server ready is sent to
// the channel instead, and is not answered. If cut is set its connection is closed.
type late struct {
	*proxy
	g       *Gateway
	set     *health.Set
	armed   atomic.Bool
	command chan string
	list    func(health.Op)
	end     func()
}

func newLate(t *testing.T, cut bool) *late {
	b := gatewaytest.StartBackend(t, "127.0.0.97")
	l := &late{command: make(chan string, 1), set: health.New(health.Options{}), proxy: newProxy(t,
		userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})}
	l.gateway()
	l.start()
	l.cfg.MasterSocket = listenUnix(t, func(conn net.Conn) {
		command, err := io.ReadAll(conn)
		switch {
		case err != nil:
		case strings.Contains(string(command), " state ready") && l.armed.CompareAndSwap(true, false):
			l.command <- string(command)
			if !cut {
				<-t.Context().Done()
			}
		default:
			io.WriteString(conn, rawAsk(t, l.socket, string(command)))
		}
	})
	l.g = l.gateway()
	l.g.cli.timeout = time.Second
	director := gateway.NewDirector(l.g, l.set, slog.New(slog.DiscardHandler), gateway.Hooks{})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { director.Run(ctx) })
	l.end = func() { cancel(); running.Wait() }
	t.Cleanup(l.end)
	l.list = func(op health.Op) {
		l.set.Change(time.Now(), "agent",
			[]health.Change{{Endpoint: health.Endpoint{Target: op.Target, Routable: true}}})
		director.Wake()
	}
	l.set.Synced()
	l.list(routed("agent", "s", b.Addr.String()))
	l.until("it is programmed", director.Programmed)
	l.armed.Store(true)
	return l
}

// HAProxy carries out a command after the pod that it adds was taken out and read as such.
func TestACommandWithoutAnAnswerComesLate(t *testing.T) {
	for name, cut := range map[string]bool{"no answer": false, "the connection is cut": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, goes := newLate(t, cut), routed("agent", "g", "127.0.0.98:1")
			l.list(goes)
			command := <-l.command
			l.set.Exclude(time.Now(), "g", "r", time.Now(), time.Now().Add(time.Hour))
			state := func() (is health.State) {
				is, _, _ = l.set.Of("g")
				return min(is, l.set.Exclusions()[0].State)
			}
			out := time.Now()
			for ; time.Since(out) < l.g.cli.timeout+lateFor/2; time.Sleep(5 * time.Millisecond) { // the director acts
				if state() >= health.Removed {
					t.Fatalf("it is %s before the command is carried out", state())
				}
			}
			if answer := rawAsk(t, l.socket, command); strings.TrimSpace(answer) != "" {
				t.Fatalf("%q: %s", command, answer)
			}
			l.until("it is idle", func() bool { return state() == health.Idle })
			if took := time.Since(out); took < lateFor {
				t.Errorf("it is idle after %s", took)
			}
			l.end()
			if o, err := l.g.Observe(t.Context(), []health.Key{goes.Key}); err != nil || o.Seen[goes.Key].Routed {
				t.Errorf("%+v, %v", o.Seen, err)
			}
		})
	}
}

// The next process has what a late command has added.
func TestTheFileListsWhatALateCommandBrings(t *testing.T) {
	t.Parallel()
	l, comes := newLate(t, false), routed("agent", "g", "127.0.0.98:1")
	name, err := serverName(comes.Target)
	if err != nil {
		t.Fatal(err)
	}
	l.list(comes)
	command := <-l.command
	lists := func() bool {
		have, err := readFile(l.cfg.ServersFile)
		return err == nil && have["agent"][name]
	}
	l.until("it is read as out", func() bool { return !lists() })
	rawAsk(t, l.socket, command)
	l.list(comes) // any change makes the director look before it tries again
	l.until("the file lists it", lists)
}

// HAProxy starts with what the file lists. While it is down the file follows EndpointSlices, also
// when the agent dies before HAProxy was seen to have what was added last.
func TestTheFileFollowsWhileHAProxyIsDown(t *testing.T) {
	t.Parallel()
	p := newProxy(t, userFile+"backend people\n    server s0 127.0.0.2:9\n",
		Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	set := health.New(health.Options{})
	set.Synced()
	director := gateway.NewDirector(g, set, slog.New(slog.DiscardHandler), gateway.Hooks{})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { director.Run(ctx) })
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	lists := func(unlisted, listed health.Op) {
		set.Change(time.Now(), "agent", []health.Change{
			{Endpoint: health.Endpoint{Target: unlisted.Target}, Unlisted: true},
			{Endpoint: health.Endpoint{Target: listed.Target, Routable: true}},
		})
		director.Wake()
	}
	has := func(op health.Op) {
		t.Helper()
		name, err := serverName(op.Target)
		if err != nil {
			t.Fatal(err)
		}
		planes.Until(t, "the file lists "+name, func() bool {
			have, err := readFile(p.cfg.ServersFile)
			return err == nil && maps.Equal(have["agent"], map[string]bool{name: true})
		})
	}
	first, second, third := routed("agent", "a", "127.0.0.97:1"), routed("agent", "b", "127.0.0.98:1"),
		routed("agent", "c", "127.0.0.99:1")
	lists(first, first)
	planes.Until(t, "the first is routed", director.Programmed)
	p.end(p.cmd, p.exited)
	lists(first, second)
	has(second)
	lists(second, third) // the second was never seen in HAProxy
	has(third)
	p.start()
	planes.Until(t, "the new process is read", func() bool {
		d := set.Targets()
		return len(d) == 1 && d[0].Read && d[0].Seen.Routed
	})
}

// A reload by which a backend gets another name leaves an old worker with the former one. It still
// routes requests of its connections.
func TestAnOldWorkerRoutesByTheFormerNameOfABackend(t *testing.T) {
	t.Parallel()
	target := startRaw(t, "127.0.0.89")
	p := newProxy(t, userFile, Backend{Backend: "agent", Lines: []string{"balance roundrobin"}})
	g := p.gateway()
	p.start()
	apply(t, g, routed("agent", "u", target.String()))
	client, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	client.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(client, "GET / HTTP/1.1\r\nHo")
	p.until("the worker has the client", func() bool {
		in, err := g.info(t.Context(), p.worker())
		return err == nil && in.Clients == 1
	})
	p.write("user.cfg", strings.ReplaceAll(strings.ReplaceAll(userFile, "%PORT%", fmt.Sprint(p.port)),
		"default_backend agent", "default_backend renamed"))
	p.cfg.Backends[0].Backend = "renamed"
	g = p.gateway()
	if owned, err := g.Owned(t.Context()); err != nil || len(owned) > 0 {
		t.Errorf("before the reload %v are owned, %v", owned, err)
	}
	p.reload()

	former := key("agent", "u", target.String())
	apply(t, g, routed("renamed", "u", target.String()))
	apply(t, g, removed("renamed", "u", target.String()))
	owned, err := g.Owned(t.Context())
	if err != nil || len(owned) != 2 || !slices.Contains(owned, former) {
		t.Fatalf("after the reload %v are owned, %v", owned, err)
	}
	observe := func() health.Observation {
		t.Helper()
		o, err := g.Observe(t.Context(), owned)
		if err != nil || len(o.Unread) > 0 {
			t.Fatalf("%v, unread %v", err, o.Unread)
		}
		return o
	}
	if is := observe().Seen[former]; !is.Routed {
		t.Errorf("while the old worker has a client, the target is seen as %+v", is)
	}
	absent := health.Op{Key: former, Want: health.WantAbsent}
	if err := g.Apply(t.Context(), []health.Op{absent}); !errors.Is(err, kindStopping) {
		t.Errorf("removing from the old worker: %v", err)
	}
	io.WriteString(client, "st: a\r\n\r\n") // it does route
	resp, err := http.ReadResponse(bufio.NewReader(client), nil)
	if err != nil || resp.Header.Get("X-Raw") != target.String() {
		t.Errorf("%v, %v", resp, err)
	}
	client.Close()
	p.until("the old worker has ended", func() bool {
		return observe().Seen[former] == health.Seen{Missing: true}
	})
	apply(t, g, absent)
}

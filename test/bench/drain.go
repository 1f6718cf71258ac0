package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// agentsEnv holds an address and which agents to play in a child, see playAgents.
const agentsEnv = "LAMEDUCK_BENCH_AGENTS"

// floorPath is where agents open the connections on which nothing but bytes are exchanged.
const floorPath = "/floor"

// The Services of the suite. Agents route everybody's or few's. In a crowd with trouble all route
// troubled too: those of everybody's, and two that route nothing else, one that is dead, as a
// frozen process is, and one that is slow.
var (
	everybodys = drain.Service{Namespace: "bench", Name: "everybodys"}
	fews       = drain.Service{Namespace: "bench", Name: "fews"}
	troubled   = drain.Service{Namespace: "bench", Name: "troubled"}
)

// slowness is how long the slow agent takes to answer.
const slowness = 100 * time.Millisecond

// crowd is the agents of a fleet: so many route everybody's Service and few's. floor: everybody has
// a connection for the floor too.
type crowd struct {
	everybody, few int
	floor, trouble bool
}

// all is how many agents there are.
func (c crowd) all() int {
	if c.trouble {
		return c.everybody + c.few + 2
	}
	return c.everybody + c.few
}

func init() {
	if what := os.Getenv(agentsEnv); what != "" {
		if err := playAgents(what); err != nil {
			fmt.Fprintln(os.Stderr, "bench: agents:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// drains measures the coordinator with agents in processes of their own, over TLS. Their gateways
// let go at once, so that what is measured is the ledger, the coordinator and the wire, and the
// least that an agent can do.
//
// The goal for 100 drains at once, twice the time of one, is not reached: 2.4 to 3.7 times, where
// it was 7 to 8 before one line told of all of them and one acknowledged them. Of the CPU time of a
// hundred drains, which includes their ends, the agents of this suite use two fifths, to decrypt
// and decode; the coordinator uses a fifth of its own part to write to their streams, an eighth to
// find what is new for each of them, and a tenth each to derive who is still waited for and to take
// in the acknowledgements. The ends of drains are told in several writes, because each of them
// wakes every stream.
func drains() (results []Result, err error) {
	small, err := newFleet(crowd{few: 3})
	if err != nil {
		return nil, err
	}
	defer small.stop()
	thousand, err := newFleet(crowd{everybody: 1000, floor: true, trouble: true})
	if err != nil {
		return nil, err
	}
	one := func() time.Duration { return thousand.drain(everybodys, 1) }
	results = append(results,
		Result{Name: "drain/fanout-1000", Ratio: ratio(one, thousand.floor), Goal: 2.5,
			Note: "a drain that 1,000 agents owe, by a line written and one read on as many connections"},
		Result{
			Name: "drain/dead-and-slow", Goal: 1.1,
			Note: "until 1,000 have let go, with a dead agent and a slow one beside them, by without",
			Ratio: quickest(func() time.Duration { return thousand.others(troubled, 2) }, func() time.Duration {
				return thousand.others(everybodys, 0)
			}),
		},
		Result{Name: "drain/fanout-100-drains",
			Ratio: ratio(func() time.Duration { return thousand.drain(everybodys, 100) }, one), Goal: 2,
			Note: "100 drains at once, by one"},
	)
	thousand.stop()
	all, err := newFleet(crowd{everybody: 9900, floor: true})
	if err != nil {
		return nil, err
	}
	results = append(results, Result{
		Name: "drain/fanout-9900", Goal: 2.5,
		Note:  "a drain that 9,900 agents owe, by a line written and one read on as many connections",
		Ratio: ratio(func() time.Duration { return all.drain(everybodys, 1) }, all.floor),
	})
	all.stop()
	many, err := newFleet(crowd{everybody: 9897, few: 3})
	if err != nil {
		return nil, err
	}
	defer many.stop()
	results = append(results, Result{
		Name: "drain/bytes-per-agent", Ratio: many.bytesPerAgent / 1024, Goal: 64,
		Note: "KiB of heap and stacks on the coordinator",
	}, Result{
		Name: "drain/3-of-9900", Goal: 3, Note: "a drain that 3 of 9,900 agents owe, by one that 3 of 3 do",
		Ratio: ratio(func() time.Duration { return many.drain(fews, 1) }, func() time.Duration {
			return small.drain(fews, 1)
		}),
	})
	return results, errors.Join(small.failed, thousand.failed, all.failed, many.failed)
}

// fleet is a coordinator and its agents.
type fleet struct {
	*coordinator.Coordinator
	server        *httptest.Server
	cancel        context.CancelFunc
	children      []*exec.Cmd
	bytesPerAgent float64
	pods          int
	failed        error

	mu     sync.Mutex
	floors []net.Conn
}

// newFleet starts a coordinator and a crowd of agents.
func newFleet(c crowd) (*fleet, error) {
	registry := prometheus.NewRegistry()
	f := &fleet{Coordinator: coordinator.New(drain.Holder{Replica: "bench", Epoch: "1"}, drain.DefaultTimes(),
		coordinator.Options{
			MaxHolds: 1000, Pods: unknownPods{}, Authenticate: anybody{}, Log: slog.New(slog.DiscardHandler),
			Metrics: coordinator.NewMetrics(registry),
		})}
	routes := http.NewServeMux()
	routes.Handle("/", f.Handler())
	routes.HandleFunc(floorPath, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.floors = append(f.floors, conn)
		f.mu.Unlock()
	})
	f.server = httptest.NewUnstartedServer(routes)
	f.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	before := memory()
	f.server.StartTLS()
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	go func() { _ = f.Run(ctx) }()
	const perChild = 3300
	for first := 0; first < c.all(); first += perChild {
		if err := f.child(first, min(perChild, c.all()-first), c); err != nil {
			f.stop()
			return nil, err
		}
	}
	f.bytesPerAgent = (memory() - before) / float64(c.all())
	return f, nil
}

// child starts a process with n agents of a crowd, and waits until all have declared.
func (f *fleet) child(first, n int, c crowd) error {
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d %d %d %t %t", agentsEnv, f.server.Listener.Addr(), first,
		n, c.everybody, c.few, c.floor, c.trouble))
	child.Stderr = os.Stderr
	// The end of its input is the child's end, also if this process dies.
	if _, err := child.StdinPipe(); err != nil {
		return err
	}
	out, err := child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	f.children = append(f.children, child)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		return fmt.Errorf("agents are not ready: %q, %v", line, err)
	}
	return nil
}

func (f *fleet) stop() {
	for _, child := range f.children {
		_ = child.Process.Kill()
		_ = child.Wait()
	}
	f.children = nil
	f.cancel()
	f.Stop()
	for _, conn := range f.floors {
		conn.Close()
	}
	f.server.CloseClientConnections()
	f.server.Close()
}

// drain asks for n drains at one time, and returns how long it took until all were released.
func (f *fleet) drain(service drain.Service, n int) time.Duration {
	// What the former one left to tell is told.
	time.Sleep(100 * time.Millisecond)
	first := f.pods
	f.pods += n
	pod := func(i int) drain.Pod {
		name := strconv.Itoa(first + i)
		return drain.Pod{Namespace: "bench", Name: name, UID: drain.UID("pod-" + name)}
	}
	began := time.Now()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			status, _, err := f.Drain(context.Background(), request(pod(i), service), began.Add(20*time.Second))
			if status.Reason != drain.Acknowledged || err != nil {
				f.mu.Lock()
				f.failed = fmt.Errorf("a drain ended as %s, %s, waiting for %d: %w", status.Phase, status.Reason,
					len(status.Waiting), err)
				f.mu.Unlock()
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	for i := range n {
		f.GatePassed(pod(i).UID)
	}
	return took
}

// others asks for a drain, and returns how long it took until all had let go but left.
func (f *fleet) others(service drain.Service, left int) time.Duration {
	time.Sleep(100*time.Millisecond + slowness)
	name := strconv.Itoa(f.pods)
	f.pods++
	pod := drain.Pod{Namespace: "bench", Name: name, UID: drain.UID("pod-" + name)}
	defer f.GatePassed(pod.UID)
	began := time.Now()
	for {
		status, _, err := f.Drain(context.Background(), request(pod, service), began)
		took := time.Since(began)
		if err != nil || took > 20*time.Second {
			f.failed = fmt.Errorf("a drain is %s, %s, waiting for %d: %w", status.Phase, status.Reason,
				len(status.Waiting), err)
			return took
		}
		if len(status.Waiting) <= left {
			return took
		}
		time.Sleep(time.Millisecond)
	}
}

// quickest is [ratio] of the shortest that each of the two took. A tenth more or less is lost in
// what else the machine does, which makes neither quicker.
func quickest(what, floor func() time.Duration) float64 {
	w, f := what(), floor()
	for range 3 * rounds {
		f = min(f, floor())
		w = min(w, what())
	}
	return float64(w) / float64(f)
}

// floor writes a line on every connection and reads one from each.
func (f *fleet) floor() time.Duration {
	time.Sleep(100 * time.Millisecond)
	began := time.Now()
	var all sync.WaitGroup
	for _, conn := range f.floors {
		all.Go(func() {
			var line [64]byte
			if _, err := conn.Write([]byte("stop routing to the pod, in every Service, at each port\n")); err != nil {
				f.failed = err
			}
			if _, err := conn.Read(line[:]); err != nil {
				f.failed = err
			}
		})
	}
	all.Wait()
	return time.Since(began)
}

func memory() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

// anybody is an Authenticator that believes.
type anybody struct{}

func (anybody) Authenticate(_ context.Context, token string) (coordinator.Identity, error) {
	return coordinator.Identity{Agent: drain.AgentID(token), Name: "bench/" + token, Everywhere: true}, nil
}

func (anybody) MayAcknowledge(context.Context, coordinator.Identity, string) (bool, error) {
	return true, nil
}

func (anybody) MayAskBarriers(context.Context, coordinator.Identity) (bool, error) { return true, nil }

// unknownPods is a Pods that cannot read any pod.
type unknownPods struct{}

func (unknownPods) Life(context.Context, drain.Pod) (coordinator.Life, error) {
	return coordinator.LifeUnknown, nil
}

// playAgents plays the agents that what names until its input ends.
func playAgents(what string) error {
	var address string
	var first, n int
	var c crowd
	if _, err := fmt.Sscan(what, &address, &first, &n, &c.everybody, &c.few, &c.floor, &c.trouble); err != nil {
		return fmt.Errorf("%q: %w", what, err)
	}
	ready := make(chan error, n)
	turns := make(chan struct{}, 16) // handshakes at one time
	for i := first; i < first+n; i++ {
		a := &benchAgent{address: address, id: strconv.Itoa(i)}
		switch {
		case i < c.few:
			a.services = []drain.Service{fews}
		case i < c.few+c.everybody:
			a.services = []drain.Service{everybodys}
		default:
			a.dead, a.slow = i == c.few+c.everybody, i > c.few+c.everybody
		}
		if c.trouble {
			a.services = append(a.services, troubled)
		}
		go func() {
			turns <- struct{}{}
			lines, err := a.open()
			if err == nil && c.floor && !a.dead && !a.slow {
				err = a.openFloor()
			}
			<-turns
			ready <- err
			if err == nil {
				err = a.serve(lines)
			}
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				fmt.Fprintln(os.Stderr, "bench: agent", i, err)
			}
		}()
	}
	for range n {
		if err := <-ready; err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// benchAgent is an agent whose gateway lets go at once. It has one connection, its stream; that on
// which it declares is closed when it has, as an agent's is when it was not used for a minute.
type benchAgent struct {
	address, id string
	services    []drain.Service
	session     uint64
	stream      net.Conn
	// dead: nothing is read once it has declared. slow: it takes its time to answer.
	dead, slow bool
}

func (a *benchAgent) dial() (net.Conn, error) {
	// The coordinator of this run is a child's own parent, with a certificate made for it.
	return tls.Dial("tcp", a.address, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
}

func (a *benchAgent) open() (*bufio.Reader, error) {
	conn, err := a.dial()
	if err != nil {
		return nil, err
	}
	a.stream = conn
	fmt.Fprintf(conn, "GET %s?protocol=1 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "+
		"%s\r\nAuthorization: Bearer %s\r\n\r\n", wire.StreamPath, wire.Upgrade, a.id)
	lines := bufio.NewReaderSize(conn, 64<<10)
	response, err := http.ReadResponse(lines, nil)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusSwitchingProtocols {
		return nil, fmt.Errorf("%s: %s", wire.StreamPath, response.Status)
	}
	for {
		m, err := message(lines)
		if err != nil {
			return nil, err
		}
		if m.Type == wire.TypeHello {
			a.session = m.Hello.Session
		}
		if m.Type == wire.TypeSynced {
			break
		}
	}
	declaration := wire.Declaration{Session: a.session}
	for _, s := range a.services {
		declaration.Routes = append(declaration.Routes,
			drain.Route{Service: s, Via: drain.Endpoints, Kind: drain.Directed})
	}
	return lines, a.declare(declaration)
}

func (a *benchAgent) openFloor() error {
	conn, err := a.dial()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", floorPath); err != nil {
		return err
	}
	go func() {
		line := make([]byte, 64)
		for {
			n, err := conn.Read(line)
			if err != nil {
				return
			}
			if _, err := conn.Write(line[:n]); err != nil {
				return
			}
		}
	}()
	return nil
}

func message(lines *bufio.Reader) (m wire.Message, err error) {
	line, err := lines.ReadSlice('\n')
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(line, &m)
}

// request is one in a Service whose targets are not known.
func request(pod drain.Pod, service drain.Service) coordinator.Request {
	return coordinator.Request{Pod: pod, Targets: []drain.Targets{{Service: service}}}
}

// serve reports every pod that it is told of, those of one write in one line, once it has read
// each.
func (a *benchAgent) serve(lines *bufio.Reader) error {
	if a.dead {
		select {}
	}
	var revision uint64
	var line []byte
	for {
		m, err := message(lines)
		if err != nil {
			return err
		}
		if m.Type == wire.TypeDrains {
			for i := range m.Drains.Pods {
				if _, err := m.Drains.Open(i); err != nil {
					return err
				}
			}
			revision = m.Drains.Revision
		}
		if revision > 0 && lines.Buffered() == 0 {
			if a.slow {
				time.Sleep(slowness)
			}
			line = wire.Append(line[:0], wire.Reports{Session: a.session, At: m.At, Boot: "bench",
				UpTo: &drain.UpTo{Revision: revision, State: drain.Idle}})
			if _, err := a.stream.Write(line); err != nil {
				return err
			}
			revision = 0
		}
	}
}

func (a *benchAgent) declare(body wire.Declaration) error {
	conn, err := a.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: "+
		"%d\r\n\r\n%s", wire.DeclarationsPath, a.id, len(text), text); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s: %s", wire.DeclarationsPath, response.Status)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return err
}

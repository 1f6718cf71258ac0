package main

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// asAgent makes this test program the agent: a process of its own, that can be killed.
const asAgent = "AGENT_TEST_IS_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// server is an HTTP server that can go away and come back at the same address.
type server struct {
	t       testing.TB
	handler http.Handler
	tls     bool
	address string
	running *httptest.Server
}

func (s *server) up() {
	s.t.Helper()
	if s.running != nil {
		return
	}
	if s.address == "" {
		s.address = planes.FreeAddress(s.t)
	}
	var l net.Listener
	// A process that was being started while the server went away may have a copy of its listener.
	planes.Until(s.t, "nothing listens on "+s.address, func() bool {
		var err error
		l, err = net.Listen("tcp", s.address)
		return err == nil
	})
	s.running = &httptest.Server{Listener: l, Config: &http.Server{Handler: s.handler}}
	if s.tls {
		s.running.StartTLS()
	} else {
		s.running.Start()
	}
}

func (s *server) down() {
	if s.running != nil {
		s.running.CloseClientConnections()
		s.running.Listener.Close()
		_ = s.running.Config.Close()
		s.running = nil
	}
}

// api is an API server that knows one EndpointSlice, shop/web-1 of the Service shop/web, and lists
// and watches it.
type api struct {
	server
	mu      sync.Mutex
	changed chan struct{}
	version int
	slice   *discovery.EndpointSlice
	// frozen watches stay open and say nothing. refusing answers lists with 503.
	frozen, refusing bool
	lists            int
	// annotation is the health check of the Service, served at version.
	annotation string
}

func newAPI(t testing.TB, pods ...string) *api {
	a := &api{changed: make(chan struct{})}
	a.server = server{t: t, handler: http.HandlerFunc(a.serve)}
	a.set(pods...)
	a.up()
	t.Cleanup(a.down)
	return a
}

// set makes pods, each ip@uid, the ready endpoints.
func (a *api) set(pods ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version += 7
	s := agenttest.Slice("web-1", "shop", "web", pods...)
	s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
	s.ResourceVersion, s.UID = fmt.Sprint(a.version), "slice"
	port := int32(podPort)
	s.Ports[0].Port = &port
	a.slice = s
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *api) freeze(frozen bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frozen = frozen
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *api) listed() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists
}

// annotate gives the Service a health check.
func (a *api) annotate(check string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.annotation = check
	close(a.changed)
	a.changed = make(chan struct{})
}

// serveServices lists and watches the one Service.
func (a *api) serveServices(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	service := func() (*corev1.Service, chan struct{}) {
		a.mu.Lock()
		defer a.mu.Unlock()
		s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}}
		s.Namespace, s.Name, s.ResourceVersion = "shop", "web", fmt.Sprint(a.version)
		if a.annotation != "" {
			s.Annotations = map[string]string{health.CheckAnnotation: a.annotation}
		}
		return s, a.changed
	}
	s, changed := service()
	if r.URL.Query().Get("watch") == "" {
		_ = encoder.Encode(&corev1.ServiceList{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"},
			ListMeta: metav1.ListMeta{ResourceVersion: s.ResourceVersion}, Items: []corev1.Service{*s},
		})
		return
	}
	send := func(kind string, o any) {
		_ = encoder.Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		send("ADDED", s)
		end := &corev1.Service{TypeMeta: s.TypeMeta}
		end.ResourceVersion = s.ResourceVersion
		end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		send("BOOKMARK", end)
	} else {
		w.(http.Flusher).Flush()
	}
	for {
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		s, changed = service()
		send("MODIFIED", s)
	}
}

func (a *api) serve(w http.ResponseWriter, r *http.Request) {
	if strings.HasSuffix(r.URL.Path, "/namespaces/shop/services") {
		a.serveServices(w, r)
		return
	}
	if !strings.HasSuffix(r.URL.Path, "/namespaces/shop/endpointslices") {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	if r.URL.Query().Get("watch") == "" {
		a.mu.Lock()
		a.lists++
		refusing := a.refusing
		list := &discovery.EndpointSliceList{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"},
			ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(a.version + 3)},
			Items:    []discovery.EndpointSlice{*a.slice},
		}
		a.mu.Unlock()
		if refusing {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_ = encoder.Encode(list)
		return
	}
	send := func(kind string, o any) {
		_ = encoder.Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	told, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		a.mu.Lock()
		s := a.slice.DeepCopy()
		a.mu.Unlock()
		told, _ = strconv.Atoi(s.ResourceVersion)
		send("ADDED", s)
		end := &discovery.EndpointSlice{TypeMeta: s.TypeMeta}
		end.ResourceVersion = s.ResourceVersion
		end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		send("BOOKMARK", end)
	} else {
		w.(http.Flusher).Flush()
	}
	for {
		a.mu.Lock()
		s, version, changed, frozen := a.slice.DeepCopy(), a.version, a.changed, a.frozen
		a.mu.Unlock()
		if !frozen && version > told {
			told = version
			send("MODIFIED", s)
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// boss is a coordinator: it drains what it is told to, and remembers what agents have said.
type boss struct {
	server
	expiry time.Duration

	mu      sync.Mutex
	changed chan struct{}
	epoch   int
	drains  []drain.Open
	// declared counts the declarations on the last stream.
	declared int
	// left counts who has said that it leaves.
	left int
	said map[drain.UID]drain.State
	// streams are those that were opened.
	streams []net.Conn
}

func newBoss(t testing.TB, expiry time.Duration) *boss {
	b := &boss{expiry: expiry, changed: make(chan struct{}), said: map[drain.UID]drain.State{}}
	b.server = server{t: t, tls: true, handler: http.HandlerFunc(b.serve)}
	b.up()
	t.Cleanup(b.down)
	return b
}

// down closes the streams, too, which are not the server's connections any more.
func (b *boss) down() {
	b.server.down()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, conn := range b.streams {
		conn.Close()
	}
	b.streams = nil
}

// restarted makes it another life of the replica, which knows of no drain.
func (b *boss) restarted() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.epoch++
	b.drains, b.said = nil, map[drain.UID]drain.State{}
}

func (b *boss) drain(uids ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, uid := range uids {
		b.drains = append(b.drains, drain.Open{Pod: drain.Pod{Namespace: "shop", Name: "web-" + uid,
			UID: drain.UID(uid)}, Since: time.Now()})
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *boss) heard(uid string) drain.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.said[drain.UID(uid)]
}

func (b *boss) serve(w http.ResponseWriter, r *http.Request) {
	encoder := json.NewEncoder(w)
	switch r.URL.Path {
	case wire.DeclarationsPath:
		b.mu.Lock()
		b.declared++
		declared := wire.Declared{Declared: b.declared}
		close(b.changed)
		b.changed = make(chan struct{})
		b.mu.Unlock()
		_ = encoder.Encode(declared)
	case wire.LeavePath:
		b.mu.Lock()
		b.left++
		b.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	case wire.StreamPath:
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			b.t.Error(err)
			return
		}
		defer conn.Close()
		b.mu.Lock()
		b.streams = append(b.streams, conn)
		b.mu.Unlock()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
			wire.Upgrade)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.read(buffered.Reader)
		}()
		send := func(m wire.Message) { _, _ = conn.Write(wire.Append(nil, m)) }
		b.mu.Lock()
		expiry := drain.Holder{Replica: "boss", Epoch: fmt.Sprint(b.epoch)}
		b.declared = 0
		b.mu.Unlock()
		send(wire.Message{Type: wire.TypeHello, Hello: &wire.Hello{
			Protocol: wire.Protocol, Features: wire.Features(), Holder: expiry, Session: 1,
			AwayMillis: 1000, ExpiryMillis: b.expiry.Milliseconds(), RenewalMillis: 500,
		}})
		sent, synced := 0, -1
		for {
			b.mu.Lock()
			drains, declared, changed := slices.Clone(b.drains), b.declared, b.changed
			b.mu.Unlock()
			if more := drains[min(sent, len(drains)):]; len(more) > 0 {
				send(wire.Message{Type: wire.TypeDrains, Drains: wire.NewDrains(uint64(len(drains)), more)})
			}
			sent = len(drains)
			if synced != declared {
				synced = declared
				send(wire.Message{Type: wire.TypeSynced, Declared: declared})
			}
			select {
			case <-changed:
			case <-time.After(100 * time.Millisecond):
				send(wire.Message{Type: wire.TypeHeartbeat})
			case <-ended:
				return
			}
		}
	}
}

// read takes in what an agent reports until its stream ends.
func (b *boss) read(from *bufio.Reader) {
	for {
		line, err := from.ReadBytes('\n')
		if err != nil {
			return
		}
		if wire.IsHealth(line) {
			continue
		}
		var reports wire.Reports
		if err := json.Unmarshal(line, &reports); err != nil {
			b.t.Error(err)
		}
		b.mu.Lock()
		if up := reports.UpTo; up != nil {
			for _, d := range b.drains[:min(up.Revision, uint64(len(b.drains)))] {
				b.said[d.Pod.UID] = up.State
			}
		}
		for _, report := range reports.Reports {
			b.said[report.UID] = report.State
		}
		b.mu.Unlock()
	}
}

// world is a HAProxy with pods behind it, its agent, which can be killed, and those that the agent
// speaks to.
type world struct {
	*testing.T
	dir   string
	api   *api
	boss  *boss
	proxy string
	pods  []string // uids
	list  []string // ip@uid

	haproxy *exec.Cmd
	agent   *exec.Cmd
	log     *agenttest.Log
	metrics string

	mu      sync.Mutex
	answers map[string][]time.Time // when requests began that a pod has answered
	failed  []string
	sick    map[string]bool // pods that answer checks with 503
}

// nextHost numbers the loopback addresses of all worlds' pods. They share one port, as the pods of
// a slice do.
var nextHost struct {
	sync.Mutex
	n int
}

// newPods starts n pods.
func newPods(t *testing.T, n int) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "ag") // short: it is in a unix socket's address
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, dir: dir, answers: map[string][]time.Time{}, sick: map[string]bool{}, log: &agenttest.Log{}}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for len(w.pods) < n {
		nextHost.Lock()
		nextHost.n++
		host, uid := fmt.Sprintf("127.0.77.%d", nextHost.n), fmt.Sprintf("pod%d", nextHost.n)
		nextHost.Unlock()
		l, err := net.Listen("tcp", net.JoinHostPort(host, fmt.Sprint(podPort)))
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			w.mu.Lock()
			sick := w.sick[uid]
			w.mu.Unlock()
			if r.URL.Path == "/healthz" && sick {
				rw.WriteHeader(http.StatusServiceUnavailable)
			}
			_, _ = io.WriteString(rw, uid)
		})}
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { s.Close() })
		w.pods = append(w.pods, uid)
		w.list = append(w.list, host+"@"+uid)
	}
	return w
}

// newWorld starts HAProxy and n pods, and a client that never stops asking. The agent is started
// with live.
func newWorld(t *testing.T, n int, expiry time.Duration) *world {
	t.Helper()
	path := gatewaytest.LookPath(t, "haproxy")
	w := newPods(t, n)
	dir := w.dir
	w.api, w.boss = newAPI(t, w.list...), newBoss(t, expiry)

	w.proxy, w.metrics = planes.FreeAddress(t), planes.FreeAddress(t)
	w.write("haproxy.cfg", fmt.Sprintf(`
defaults
    mode http
    timeout connect 2s
    timeout client 30s
    timeout server 30s
frontend web
    bind %s
    default_backend web
`, w.proxy))
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.boss.running.Certificate().Raw})
	w.write("ca.crt", string(ca))
	w.write("token", "token")
	w.write("kubeconfig", fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts: [{name: x, "+
		"context: {cluster: x}}]\nclusters: [{name: x, cluster: {server: 'http://%s'}}]\n", w.api.address))
	w.write("agent.yaml", fmt.Sprintf(`
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators: {addresses: ["https://%[2]s"], serverName: example.com, caFile: %[1]s/ca.crt, tokenFile: %[1]s/token}
gateway:
  haproxy:
    masterSocket: %[1]s/m.sock
    serversFile: %[1]s/servers.cfg
    backends:
    - {backend: web, service: shop/web, lines: [mode http, timeout connect 1s, timeout server 30s, balance roundrobin]}
`, dir, w.boss.address))
	w.live()
	w.haproxy = exec.Command(path, "-W", "-S", filepath.Join(dir, "m.sock"), "-f", filepath.Join(dir, "haproxy.cfg"),
		"-f", w.serversFile())
	w.haproxy.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := w.haproxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-w.haproxy.Process.Pid, syscall.SIGKILL)
		_ = w.haproxy.Wait()
	})
	w.until("the agent is ready", w.ready)
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
	return w
}

// podPort is chosen once, free on one address of the pods' range, which nothing else uses.
var podPort = func() int {
	l, err := net.Listen("tcp", "127.0.77.254:0")
	if err != nil {
		return 8080
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}()

func (w *world) serversFile() string { return filepath.Join(w.dir, "servers.cfg") }

func (w *world) write(name, content string) {
	w.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, name), []byte(content), 0o600); err != nil {
		w.Fatal(err)
	}
}

// live starts the agent, and waits until it has written the servers file.
func (w *world) live() {
	w.Helper()
	w.agent = exec.Command(os.Args[0], "--config", filepath.Join(w.dir, "agent.yaml"), "--kubeconfig",
		filepath.Join(w.dir, "kubeconfig"), "--metrics-address", w.metrics)
	w.agent.Env = append(os.Environ(), asAgent+"=1")
	w.agent.Stdout, w.agent.Stderr = w.log, w.log
	w.agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := w.agent.Start(); err != nil {
		w.Fatal(err)
	}
	w.until("the agent answers", func() bool { return w.get("/livez") == http.StatusOK })
}

// die kills the agent.
func (w *world) die() {
	_ = w.agent.Process.Kill()
	_ = w.agent.Wait()
}

func (w *world) get(path string) int {
	response, err := http.Get("http://" + w.metrics + path)
	if err != nil {
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

func (w *world) ready() bool { return w.get("/readyz") == http.StatusOK }

func (w *world) until(what string, ok func() bool) {
	w.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("not within 30 s: %s", what)
		}
	}
}

// ask sends one request after the other.
func (w *world) ask(ctx context.Context, done chan struct{}) {
	defer close(done)
	client := &http.Client{Timeout: 5 * time.Second}
	for ctx.Err() == nil {
		began := time.Now()
		body, err := func() (string, error) {
			response, err := client.Get("http://" + w.proxy)
			if err != nil {
				return "", err
			}
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			if err == nil && response.StatusCode != http.StatusOK {
				err = fmt.Errorf("status %d", response.StatusCode)
			}
			return string(body), err
		}()
		w.mu.Lock()
		if err != nil {
			w.failed = append(w.failed, err.Error())
		} else {
			w.answers[body] = append(w.answers[body], began)
		}
		w.mu.Unlock()
		time.Sleep(2 * time.Millisecond)
	}
}

// routedSince reports whether a request that began after since went to the pod.
func (w *world) routedSince(uid string, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.answers[uid]
	return len(all) > 0 && all[len(all)-1].After(since)
}

// mustServe checks that every pod but those of without gets requests now, and that none has failed.
func (w *world) mustServe(without ...string) {
	w.Helper()
	now := time.Now()
	for _, uid := range w.pods {
		if !slices.Contains(without, uid) {
			w.until(uid+" is routed", func() bool { return w.routedSince(uid, now) })
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failed) > 0 {
		w.Errorf("%d requests failed, the first with %s", len(w.failed), w.failed[0])
		w.failed = nil
	}
}

// reload makes HAProxy start from its files.
func (w *world) reload() {
	w.Helper()
	if err := w.haproxy.Process.Signal(syscall.SIGUSR2); err != nil {
		w.Fatal(err)
	}
}

// metric reads one metric without labels.
func (w *world) metric(name string) string {
	response, err := http.Get("http://" + w.metrics + "/metrics")
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	for line := range strings.Lines(string(body)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return "missing"
}

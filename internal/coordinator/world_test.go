package coordinator

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/test/pipenet"
)

var (
	web   = drain.Service{Namespace: "shop", Name: "web"}
	store = drain.Service{Namespace: "shop", Name: "api"}
)

func pod(name string) drain.Pod {
	return drain.Pod{Namespace: "shop", Name: name, UID: drain.UID("uid-" + name)}
}

func routesOf(services ...drain.Service) []drain.Route {
	all := []drain.Route{}
	for _, s := range services {
		all = append(all, drain.Route{Service: s, Via: drain.Endpoints, Kind: drain.Directed})
	}
	return all
}

// tokens is an Authenticator: "agent x" proves agent x, the others are refused each in its way.
type tokens struct {
	// until is when they end.
	until time.Time
	// revoked holds the namespaces in which no agent has the right any more; "" is all of them.
	revoked *sync.Map
}

func (k tokens) Authenticate(_ context.Context, token string) (Identity, error) {
	if id, ok := strings.CutPrefix(token, "agent "); ok {
		return Identity{Agent: drain.AgentID(id), Name: "edge/" + id,
			Username: "edge", Everywhere: !strings.HasPrefix(id, "local "), Until: k.until}, nil
	}
	switch token {
	case "replica":
		return Identity{Agent: "uid-replica", Name: "lameduck-system/webhook-1", Username: "webhook", Replica: true},
			nil
	case "stranger":
		return Identity{}, fmt.Errorf("stranger: %w", ErrForbidden)
	case "no answer":
		return Identity{}, errors.New("the API server does not answer")
	default:
		return Identity{}, ErrUnauthenticated
	}
}

// MayAcknowledge implements Authenticator: agents may in the namespaces shop and till, and nothing
// is known of the namespace hidden.
func (k tokens) MayAcknowledge(_ context.Context, _ Identity, namespace string) (bool, error) {
	if k.revoked != nil {
		if _, revoked := k.revoked.Load(namespace); revoked {
			return false, nil
		}
	}
	if namespace == "hidden" {
		return false, errors.New("the API server does not answer")
	}
	return namespace == "shop" || namespace == "till" || namespace == "", nil
}

// MayAskBarriers implements Authenticator: each agent may but the one with the name gateway, and
// nothing is known of the agent hidden.
func (k tokens) MayAskBarriers(_ context.Context, who Identity) (bool, error) {
	if who.Agent == "hidden" {
		return false, errors.New("the API server does not answer")
	}
	return who.Agent != "gateway", nil
}

// lives is a Pods whose answers a test sets. Pods that are not in it cannot be read.
type lives struct {
	mu    sync.Mutex
	of    map[drain.UID]Life
	reads int
}

func (l *lives) set(uid drain.UID, life Life) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[uid] = life
}

func (l *lives) Life(_ context.Context, pod drain.Pod) (Life, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	if life := l.of[pod.UID]; life != LifeUnknown {
		return life, nil
	}
	return LifeUnknown, errors.New("the API server does not answer")
}

// network joins agents and replicas.
type network struct {
	pipenet.Network
	t *testing.T
}

func newNetwork(t *testing.T) *network { return &network{t: t} }

// replica is a coordinator that serves on the network.
type replica struct {
	*Coordinator
	t        *testing.T
	host     string
	lives    *lives
	registry *prometheus.Registry
	cancel   context.CancelFunc
	done     chan error
}

// replica starts a coordinator under the host name, in a new life named epoch. It ends with the
// test at the latest.
func (n *network) replica(host, epoch string, options ...func(*Options)) *replica {
	registry := prometheus.NewRegistry()
	r := &replica{
		t: n.t, host: host, registry: registry, lives: &lives{of: map[drain.UID]Life{}}, done: make(chan error, 1),
	}
	o := Options{MaxHolds: 32, Pods: r.lives, Authenticate: tokens{}, Log: quiet(), Metrics: NewMetrics(registry),
		Able: able}
	for _, set := range options {
		set(&o)
	}
	r.Coordinator = New(drain.Holder{Replica: host, Epoch: epoch}, drain.DefaultTimes(), o)
	l := pipenet.NewListener()
	n.Add(host, l)
	ctx, cancel := context.WithCancel(n.t.Context())
	r.cancel = cancel
	go func() {
		r.done <- serve.All(ctx,
			serve.Task{Name: "coordinator", Run: r.Run},
			serve.Server{Name: "agents", Listener: l, Handler: r.Handler(), Grace: 5 * time.Second,
				Stop: r.Stop}.Task())
	}()
	n.t.Cleanup(r.end)
	return r
}

// end stops the replica as SIGTERM does, and waits for it.
func (r *replica) end() {
	r.cancel()
	if err, ok := <-r.done; ok {
		close(r.done)
		if err != nil {
			r.t.Errorf("replica %s ends with %v", r.host, err)
		}
	}
}

// metric is the value of a counter or gauge with these label values, in the order of the labels'
// names; of a histogram, its count.
func (r *replica) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetValue())
			}
			if slices.Equal(have, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	r.t.Fatalf("no metric %s%q", name, labels)
	return 0
}

// answer is what a held call was told, and how long it took.
type answer struct {
	drain.Status
	held bool
	err  error
	took time.Duration
}

func (a answer) String() string {
	text := fmt.Sprintf("%s %s held=%t after %s", a.Phase, a.Reason, a.held, a.took)
	if a.err != nil {
		text += ": " + a.err.Error()
	}
	return text
}

// hold asks for a drain in the background, for 2 s as the webhook does.
func (r *replica) hold(p drain.Pod, services ...drain.Service) <-chan answer {
	answers := make(chan answer, 1)
	began := time.Now()
	go func() {
		var a answer
		a.Status, a.held, a.err = r.Drain(context.Background(), requestOf(p, services...), began.Add(2*time.Second))
		a.took = time.Since(began)
		answers <- a
	}()
	synctest.Wait()
	return answers
}

// taken fails unless there is an answer now, and returns it.
func taken(t *testing.T, answers <-chan answer) answer {
	t.Helper()
	synctest.Wait()
	select {
	case a := <-answers:
		return a
	default:
		t.Fatal("no answer yet")
		return answer{}
	}
}

// answered fails unless there is an answer now, and it is want.
func answered(t *testing.T, answers <-chan answer, want string) {
	t.Helper()
	if got := taken(t, answers).String(); got != want {
		t.Errorf("answer %q, want %q", got, want)
	}
}

func stillHeld(t *testing.T, answers <-chan answer) {
	t.Helper()
	synctest.Wait()
	select {
	case a := <-answers:
		t.Fatalf("answered already: %s", a)
	default:
	}
}

// agent is a client with exclusions of its own, and no gateway: a test says what state each pod is
// in.
type agent struct {
	*client.Client
	exclusions *exclusions
	transport  *http.Transport
	cancel     context.CancelFunc
	done       chan error

	mu           sync.Mutex
	connected    []string
	disconnected []string
}

func (a *agent) Connected(address string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.connected = append(a.connected, address)
}

func (a *agent) Disconnected(address string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.disconnected = append(a.disconnected, address)
}

// streams counts the streams that were opened and that ended.
func (a *agent) streams() (opened, ended int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.connected), len(a.disconnected)
}

// agent starts an agent that routes services and knows hosts. It ends with the test at the latest.
func (n *network) agent(id string, services []drain.Service, hosts ...string) *agent {
	return n.agentWith(id, func(c *client.Client) { c.Routes = routesOf(services...) }, hosts...)
}

// agentWith is agent with something about its client set.
func (n *network) agentWith(id string, set func(*client.Client), hosts ...string) *agent {
	a := &agent{Client: client.New(), done: make(chan error, 1)}
	a.exclusions = &exclusions{t: n.t, of: map[drain.UID]*exclusion{}}
	a.transport = &http.Transport{DialContext: n.Dial, MaxIdleConnsPerHost: 2}
	a.HTTP = &http.Client{Transport: a.transport}
	a.Token = func() (string, error) { return "agent " + id, nil }
	a.Boot, a.Gateway = "boot-1", "fake"
	a.Exclusions, a.Observer, a.Log = a.exclusions, a, quiet()
	set(a.Client)
	a.know(hosts...)
	ctx, cancel := context.WithCancel(n.t.Context())
	a.cancel = cancel
	go func() { a.done <- a.Run(ctx) }()
	n.t.Cleanup(a.end)
	synctest.Wait()
	return a
}

func (a *agent) know(hosts ...string) {
	var addresses []string
	for _, h := range hosts {
		addresses = append(addresses, "http://"+h+":9444")
	}
	a.Replicas(addresses)
}

// end stops the agent and waits for it.
func (a *agent) end() {
	a.cancel()
	if _, ok := <-a.done; ok {
		close(a.done)
	}
	a.transport.CloseIdleConnections()
}

func (a *agent) learned() bool {
	select {
	case <-a.Learned():
		return true
	default:
		return false
	}
}

// say sets the state of a pod that is excluded, and tells the coordinators.
func (a *agent) say(p drain.Pod, state drain.State) {
	a.exclusions.say(p.UID, state)
	a.Wake()
	synctest.Wait()
}

// exclusions implements client.Exclusions, and checks on each call what every agent may rely on.
type exclusions struct {
	t  *testing.T
	mu sync.Mutex
	of map[drain.UID]*exclusion
	// dead are the pods that must never be routed again.
	dead []drain.UID
}

type exclusion struct {
	pod     drain.Pod
	since   time.Time
	holders map[string]time.Time
	state   drain.State
}

func (s *exclusions) Exclude(_ time.Time, pod drain.Pod, holder string, since, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pod.UID == "" || holder == "" || since.IsZero() || !expires.After(time.Now()) {
		s.t.Errorf("bad exclusion: %+v of %q, since %s, until %s", pod, holder, since, expires)
	}
	of := s.of[pod.UID]
	if of == nil {
		of = &exclusion{pod: pod, since: since, holders: map[string]time.Time{}, state: drain.Routing}
		s.of[pod.UID] = of
	}
	if since.Before(of.since) {
		of.since = since
	}
	of.holders[holder] = expires
}

func (s *exclusions) Readmit(_ time.Time, uid drain.UID, holder string, dead bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if dead && !slices.Contains(s.dead, uid) {
		s.dead = append(s.dead, uid)
	}
	if of := s.of[uid]; of != nil {
		if delete(of.holders, holder); len(of.holders) == 0 {
			delete(s.of, uid)
		}
	}
}

func (s *exclusions) Renew(_ time.Time, holder string, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range s.of {
		if _, holds := of.holders[holder]; holds {
			of.holders[holder] = expires
		}
	}
}

func (s *exclusions) Held(holder string) []drain.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var uids []drain.UID
	for uid, of := range s.of {
		if _, holds := of.holders[holder]; holds {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func (s *exclusions) Reports(time.Time) []drain.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	reports := []drain.Report{}
	for uid, of := range s.of {
		reports = append(reports, drain.Report{UID: uid, Generation: "1", State: of.state})
	}
	return reports
}

func (s *exclusions) say(uid drain.UID, state drain.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[uid] == nil {
		s.t.Errorf("%s has no exclusion", uid)
		return
	}
	s.of[uid].state = state
}

// holders lists who holds the exclusion of p, "" if it has none.
func (s *exclusions) holders(p drain.Pod) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := s.of[p.UID]
	if of == nil {
		return ""
	}
	var all []string
	for holder := range of.holders {
		all = append(all, holder)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// expires returns when the exclusion of p ends if holder does not renew it.
func (s *exclusions) expires(p drain.Pod, holder string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if of := s.of[p.UID]; of != nil {
		return of.holders[holder]
	}
	return time.Time{}
}

func (s *exclusions) isDead(p drain.Pod) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.dead, p.UID)
}

// raw is a stream that is opened by hand.
type raw struct {
	conn  net.Conn
	lines *bufio.Scanner
}

// open opens a stream by hand as agent id, and reads nothing of the answer.
func (n *network) open(id, host string) *raw {
	n.t.Helper()
	conn, err := n.Dial(n.t.Context(), "tcp", host+":9444")
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "GET %s?protocol=1 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "+
		"%s\r\nAuthorization: Bearer agent %s\r\n\r\n", wire.StreamPath, wire.Upgrade, id); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return &raw{conn: conn}
}

// next reads one message. ok is false at the end of the stream.
func (r *raw) next(t *testing.T) (m wire.Message, ok bool) {
	t.Helper()
	if r.lines == nil {
		reader := bufio.NewReader(r.conn)
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != http.StatusSwitchingProtocols {
			body, _ := io.ReadAll(response.Body)
			t.Fatalf("stream: %s: %s", response.Status, body)
		}
		r.lines = bufio.NewScanner(reader)
	}
	if !r.lines.Scan() {
		return m, false
	}
	if err := json.Unmarshal(r.lines.Bytes(), &m); err != nil {
		t.Fatalf("line %q: %v", r.lines.Text(), err)
	}
	return m, true
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// targetsOf are Services whose targets are not known.
func targetsOf(services ...drain.Service) []drain.Targets {
	targets := make([]drain.Targets, len(services))
	for i, s := range services {
		targets[i].Service = s
	}
	return targets
}

// requestOf is one about a pod without an owner.
func requestOf(pod drain.Pod, services ...drain.Service) Request {
	return Request{Pod: pod, Targets: targetsOf(services...)}
}

package main

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var (
	podTarget = netip.MustParseAddrPort("10.1.0.7:0")
	b8        = netip.MustParseAddrPort("10.1.0.8:0")
)

// trusting is an Authenticator, a Pods and a PodContexts to which everybody is the agent of the
// node.
type trusting struct{}

func (trusting) Authenticate(context.Context, string) (coordinator.Identity, error) {
	return coordinator.Identity{Agent: "node-agent", Name: "lameduck-node/agent", Username: "agent", Everywhere: true},
		nil
}

func (trusting) MayAcknowledge(context.Context, coordinator.Identity, string) (bool, error) {
	return true, nil
}
func (trusting) MayAskBarriers(context.Context, coordinator.Identity) (bool, error) { return true, nil }

func (trusting) Life(context.Context, drain.Pod) (coordinator.Life, error) {
	return coordinator.Leaving, nil
}

func (trusting) PodContext(_ context.Context, _ string, pod drain.Pod) (coordinator.PodContext, error) {
	addresses := map[string]netip.AddrPort{"a": podTarget, "b": b8, "c": netip.MustParseAddrPort("10.1.0.9:0")}
	return coordinator.PodContext{Known: true, Terminating: true, Here: true,
		Addresses: []netip.AddrPort{addresses[pod.Name]}}, nil
}

func (trusting) Uncovered(context.Context, []drain.Service, bool) []string { return nil }

// observed starts a coordinator that writes to log, and returns the options of an agent of a
// gateway: its part of the file.
func observed(t *testing.T, gateway string, log *slog.Logger) (o options, roots *discovery.Bundle) {
	t.Helper()
	coord := coordinator.New(drain.Holder{Replica: "replica-0", Epoch: "a"}, drain.DefaultTimes(), coordinator.Options{
		MaxHolds: 1, Pods: trusting{}, Authenticate: trusting{}, PodContexts: trusting{},
		Log:     log,
		Metrics: coordinator.NewMetrics(prometheus.NewRegistry()),
	})
	server := httptest.NewTLSServer(coord.Handler())
	t.Cleanup(server.Close)
	t.Cleanup(coord.Stop)
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.crt")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		0o600); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte("token"), 0o600); err != nil {
		t.Fatal(err)
	}
	o.metrics = planes.FreeAddress(t)
	var err error
	if o.kind, err = o.file.read([]byte(fmt.Sprintf(`
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators: {addresses: ["%s"], serverName: example.com, caFile: %s, tokenFile: %s}
gateway: %s
`, server.URL, ca, token, gateway)), nil); err != nil {
		t.Fatal(err)
	}
	roots, err = discovery.NewBundle(*o.file.Coordinators, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return o, roots
}

// replica is one of the replicas of a gateway, which is polled.
type replica struct {
	*planes.FakeObserved
	began chan struct{}
}

func (replica) Population() string { return "shop/envoy" }

func (replica) Failures() uint64 { return 0 }

func (r replica) Began() <-chan struct{} { return r.began }

// An agent beside a replica watches no node and no pods, and needs no right to: only coordinators
// are asked by it. Before its gateway has answered it does not connect to them: their drains would
// wait for it.
func TestAReplicasAgent(t *testing.T) {
	var said agenttest.Log
	o, roots := observed(t, "{envoy: {population: shop/envoy, admin: 'unix:///a'}}",
		slog.New(slog.NewTextHandler(&said, nil)))
	k := planes.NewFakeObserved()
	ctx, cancel := context.WithCancel(t.Context())
	kube := fake.NewClientset()
	ended := make(chan error, 1)
	began := make(chan struct{})
	go func() { ended <- runObserved(ctx, o, kube, roots, replica{k, began}, slog.New(slog.DiscardHandler)) }()
	agenttest.Until(t, "it is ready", func() bool {
		code, _ := get(o.metrics + "/readyz")
		return code == http.StatusOK
	})
	if said.String() != "" {
		t.Errorf("before its gateway has answered: %s", said.String())
	}
	close(began)
	agenttest.Until(t, "it has declared its population", func() bool {
		return strings.Contains(said.String(), "population=shop/envoy")
	})
	for _, a := range kube.Actions() {
		t.Errorf("it asks the API server: %v", a)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The whole of a node agent, but for its kernel: what the API server says of a pod, a hook that
// asks, a coordinator that is asked, the word of the kernel that lets it go; and the end of the
// agent while a hook waits. Nothing of it is left then.
func TestANodeAgent(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		agenttest.Until(t, "nothing is left", func() bool { return goleak.Find(before) == nil })
	})
	waitAt := planes.FreeAddress(t)
	var said agenttest.Log
	o, roots := observed(t, fmt.Sprintf("{kubeProxy: {}}\nwaitAddresses: [%q]", waitAt),
		slog.New(slog.NewTextHandler(&said, nil)))
	o.nodeName = "n1"
	a, b := agenttest.Hooked("a"), agenttest.Hooked("b")
	b.Status.PodIPs = []corev1.PodIP{{IP: "10.1.0.8"}}
	c := agenttest.Hooked("c")
	c.Status.PodIPs = []corev1.PodIP{{IP: "10.1.0.9"}}
	kube := fake.NewClientset(a, b, c)
	k := planes.NewFakeObserved()
	k.Is(podTarget, health.Routing, 0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- runObserved(ctx, o, kube, roots, k, slog.New(slog.DiscardHandler)) }()
	agenttest.Until(t, "it is ready and connected", func() bool {
		code, _ := get(o.metrics + "/readyz")
		_, metrics := get(o.metrics + "/metrics")
		return code == http.StatusOK && strings.Contains(metrics, "lameduck_agent_streams 1")
	})
	remove := func(p *corev1.Pod) {
		t.Helper()
		if _, err := kube.CoreV1().Pods("shop").Update(ctx, agenttest.Deleted(p, 35*time.Second),
			metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	remove(a)
	answers := make(chan string, 1)
	go func() {
		code, text := get(waitAt + "/v1/wait/id-a?container=app")
		answers <- fmt.Sprintf("%d %s", code, text)
	}()
	agenttest.Until(t, "the pod is watched for the coordinator", func() bool { return k.Open() == 2 })
	select {
	case text := <-answers:
		t.Fatalf("the hook is answered while the kernel routes: %s", text)
	case <-time.After(300 * time.Millisecond):
	}
	k.Is(podTarget, health.Idle, 0)
	select {
	case text := <-answers:
		if !strings.HasPrefix(text, "200 Acknowledged") {
			t.Errorf("the hook is told %q", text)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the hook is not answered")
	}
	_, metrics := get(o.metrics + "/metrics")
	for _, want := range []string{
		`lameduck_barrier_waits_total{outcome="Acknowledged"} 1`,
		`lameduck_agent_audits_total{result="same"} 1`,
		`lameduck_propagation_seconds_count{gateway="kube-proxy",node="n1",what="removed"} 1`,
		`lameduck_propagation_seconds_count{gateway="kube-proxy",node="n1",what="idle"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("there is no %s", want)
		}
	}
	if err := kube.CoreV1().Pods("shop").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	agenttest.Until(t, "connections to the pod that is gone are forgotten", func() bool {
		return len(k.Cleaned()) > 0
	})

	// Something else than kube-proxy sends on this node, as Cilium does: the kernel is unknown, and
	// is not waited for.
	declared := func(mode string) {
		t.Helper()
		agenttest.Until(t, "it has declared "+mode, func() bool {
			log := said.String()
			return strings.Contains(log[max(0, strings.LastIndex(log, `msg="agent declared"`)):], " mode="+mode+" ")
		})
	}
	declared("nftables")
	k.Is(netip.MustParseAddrPort("10.1.0.9:0"), health.Unknown, 0)
	remove(c)
	go func() {
		code, text := get(waitAt + "/v1/wait/id-c")
		answers <- fmt.Sprintf("%d %s", code, text)
	}()
	agenttest.Until(t, "the pod is watched for the coordinator", func() bool { return k.Open() >= 2 })
	k.SetAbsent(true)
	select {
	case text := <-answers:
		if !strings.HasPrefix(text, "200 NoAgents") {
			t.Errorf("the hook is told %q", text)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the hook waits for a node that has no kube-proxy")
	}
	declared(wire.GatewayAbsent)
	k.SetBeside("Cilium")
	declared(`"` + wire.Beside + `Cilium"`)
	k.SetBeside("")
	declared(wire.GatewayAbsent)
	k.SetAbsent(false)
	declared("nftables")

	// It is told to stop while another hook waits: that one is finished.
	k.Is(b8, health.Routing, 0)
	remove(b)
	go func() {
		code, text := get(waitAt + "/v1/wait/id-b")
		answers <- fmt.Sprintf("%d %s", code, text)
	}()
	agenttest.Until(t, "it waits", func() bool {
		_, metrics := get(o.metrics + "/metrics")
		return strings.Contains(metrics, "lameduck_barrier_waiting 1")
	})
	cancel()
	time.Sleep(200 * time.Millisecond) // it is being stopped by then
	k.Is(b8, health.Idle, 0)
	if text := <-answers; !strings.HasPrefix(text, "200 Acknowledged") {
		t.Errorf("the hook that waited when the agent was stopped is told %q", text)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("it ends with %v", err)
		}
	case <-time.After(15 * time.Second):
		t.Fatal("it does not end")
	}
}

// Some other program has the address of hooks. Without this the agent is ready, gateways are asked
// for the pods of its node, and their hooks are told nothing.
func TestAnAgentThatNobodyCanAskIsNotReady(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	o := options{metrics: planes.FreeAddress(t), nodeName: "n1"}
	if o.kind, err = o.file.read([]byte(fmt.Sprintf("apiVersion: lameduck.io/v1alpha1\nkind: "+
		"AgentConfiguration\ngateway: {kubeProxy: {}}\nwaitAddresses: [\"%s\", \"%s\"]\n", planes.FreeAddress(t),
		listener.Addr())), nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- runObserved(ctx, o, fake.NewClientset(), nil, planes.NewFakeObserved(),
			slog.New(slog.DiscardHandler))
	}()
	says := func(want string) func() bool {
		return func() bool {
			_, text := get(o.metrics + "/readyz")
			return strings.Contains(text, want)
		}
	}
	agenttest.Until(t, "it says why it is not ready", says("another process"))
	listener.Close()
	agenttest.Until(t, "it is ready", says("ok"))
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// During an update the former agent answers the readiness probe. A new one that cannot learn the
// pods of its node must not count as available.
func TestAnAgentThatCannotReplaceTheFormerOneEnds(t *testing.T) {
	t.Parallel()
	former, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer former.Close()
	o := options{metrics: former.Addr().String(), nodeName: "n1"}
	if o.kind, err = o.file.read([]byte(fmt.Sprintf("apiVersion: lameduck.io/v1alpha1\nkind: "+
		"AgentConfiguration\ngateway: {kubeProxy: {}}\nwaitAddresses: [%q]\n", planes.FreeAddress(t))),
		nil); err != nil {
		t.Fatal(err)
	}
	kube := fake.NewClientset()
	var forbidden atomic.Bool
	kube.PrependReactor("list", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
		return forbidden.Load(), nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil)
	})
	run := func(most time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), most)
		defer cancel()
		return runObserved(ctx, o, kube, nil, planes.NewFakeObserved(), slog.New(slog.DiscardHandler))
	}
	if err := run(succeedMost + time.Second); err != nil {
		t.Errorf("one that knows its pods ends: %v", err)
	}
	forbidden.Store(true)
	if err := run(time.Minute); err == nil || !strings.Contains(err.Error(), "are not known after 4s") {
		t.Errorf("one that may not list pods ends with %v", err)
	}
	former.Close()
	if err := run(succeedMost + time.Second); err != nil {
		t.Errorf("one that replaces none ends: %v", err)
	}
}

// get asks once, and returns 0 if nothing answers.
func get(path string) (int, string) {
	response, err := http.Get("http://" + path)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(body)
}

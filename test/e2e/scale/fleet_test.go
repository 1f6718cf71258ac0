//go:build long

package scale

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// fleetNamespace is where the pods of agents are.
const fleetNamespace = "fleet"

// fleet is agents in this process: their client is the shipped one, their gateways are in memory
// and acknowledge at once.
type fleet struct {
	tokens []string
	bundle *discovery.Bundle
	// sent and received count what agents wrote and read inside of TLS.
	sent, received atomic.Int64
}

// gateway is what an agent excludes. It implements client.Exclusions.
type gateway struct {
	mu   sync.Mutex
	held map[drain.UID]map[string]bool
}

// Exclude implements client.Exclusions.
func (g *gateway) Exclude(_ time.Time, pod drain.Pod, holder string, _, _ time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held[pod.UID] == nil {
		g.held[pod.UID] = map[string]bool{}
	}
	g.held[pod.UID][holder] = true
}

// Readmit implements client.Exclusions.
func (g *gateway) Readmit(_ time.Time, uid drain.UID, holder string, _ bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if delete(g.held[uid], holder); len(g.held[uid]) == 0 {
		delete(g.held, uid)
	}
}

// Renew implements client.Exclusions.
func (g *gateway) Renew(time.Time, string, time.Time) {}

// Held implements client.Exclusions.
func (g *gateway) Held(holder string) (uids []drain.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	uids = make([]drain.UID, 0, len(g.held))
	for uid, holders := range g.held {
		if holders[holder] {
			uids = append(uids, uid)
		}
	}
	return uids
}

// Reports implements client.Exclusions.
func (g *gateway) Reports(time.Time) (reports []drain.Report) {
	g.mu.Lock()
	defer g.mu.Unlock()
	reports = make([]drain.Report, 0, len(g.held))
	for uid := range g.held {
		reports = append(reports, drain.Report{UID: uid, Generation: "1", State: drain.Idle})
	}
	return reports
}

// newFleet makes the pods of n agents, on a node that is there, and their tokens.
func newFleet(t *testing.T, s *stage.Stage, node string, n int) *fleet {
	t.Helper()
	harness.Namespace(t, s.Kube, fleetNamespace, nil)
	_, err := s.Kube.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: fleetNamespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "lameduck-agent"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "default", Namespace: fleetNamespace}},
	}, metav1.CreateOptions{})
	must(t, err)
	dir := t.TempDir()
	f := &fleet{tokens: make([]string, n)}
	each(t, n, func(i int) error {
		token, err := agentPod(t.Context(), s.Kube, node, i)
		if err != nil {
			return err
		}
		f.tokens[i] = filepath.Join(dir, fmt.Sprint(i))
		return os.WriteFile(f.tokens[i], []byte(token), 0o600)
	})
	f.bundle, err = discovery.NewBundle(f.config(0), slog.New(slog.DiscardHandler))
	must(t, err)
	go func() { _ = f.bundle.Run(t.Context(), s.Kube) }()
	return f
}

// agentPod makes the pod of an agent, and returns its token.
func agentPod(ctx context.Context, kube kubernetes.Interface, node string, i int) (string, error) {
	pods := kube.CoreV1().Pods(fleetNamespace)
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("agent-", i),
			Labels: map[string]string{"lameduck.io/agent": "directed", "lameduck.io/mode": "off"}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "agent", Image: "none"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	now := metav1.Now()
	ip := fmt.Sprintf("10.247.%d.%d", i/250, i%250+1)
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, StartTime: &now, PodIP: ip,
		PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady,
			Status: corev1.ConditionTrue, LastTransitionTime: now}}}
	if _, err := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		return "", err
	}
	request, err := kube.CoreV1().ServiceAccounts(fleetNamespace).CreateToken(ctx, "default",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			Audiences: []string{"lameduck.io"}, ExpirationSeconds: ptr.To[int64](3600),
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1",
				Name: pod.Name, UID: pod.UID},
		}}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return request.Status.Token, nil
}

func (f *fleet) config(i int) discovery.Config {
	return discovery.Config{Addresses: []string{fmt.Sprintf("https://%s:9444", stage.CoordinatorAddress)},
		ServerName: "lameduck-agents.lameduck-system.svc", CAConfigMap: "lameduck-system/lameduck-ca",
		TokenFile: f.tokens[i]}
}

// start runs all agents until ctx is done.
func (f *fleet) start(ctx context.Context, routes []drain.Route) {
	observer := metrics.NewClient(prometheus.NewRegistry())
	for i := range f.tokens {
		c := discovery.Connect(f.config(i), f.bundle)
		transport := c.HTTP.Transport.(*http.Transport)
		dial := transport.DialTLSContext
		transport.DialTLSContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return counted{conn, f}, nil
		}
		c.Gateway, c.Routes, c.Observer, c.Log = "haproxy", routes, observer, slog.New(slog.DiscardHandler)
		c.Exclusions = &gateway{held: map[drain.UID]map[string]bool{}}
		go func() { _ = c.Run(ctx) }()
	}
}

// madeUp sends 500 made-up tokens a second until stop is called: the claims of agents with a wrong
// signature. They come from an address of their own.
func (f *fleet) madeUp(t *testing.T) (stop func()) {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(10, 244, 251, 1)}}
	client := &http.Client{Timeout: 4 * time.Second, Transport: &http.Transport{DialContext: dialer.DialContext,
		MaxConnsPerHost: 64, MaxIdleConnsPerHost: 64, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	var forged []string
	for i, path := range f.tokens {
		token, err := os.ReadFile(path)
		must(t, err)
		signed := token[:bytes.LastIndexByte(token, '.')+1]
		forged = append(forged, string(signed)+base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%0256d", i)))
	}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var refused atomic.Int64
	all.Go(func() {
		tick := time.NewTicker(time.Second / 500)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			all.Go(func() {
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, f.config(0).Addresses[0]+wire.StreamPath, nil)
				if err != nil {
					t.Error(err)
					return
				}
				r.Header.Set("Authorization", "Bearer "+forged[i%len(forged)])
				response, err := client.Do(r)
				if err != nil {
					return
				}
				defer response.Body.Close()
				_, _ = io.Copy(io.Discard, response.Body)
				if refused.Add(1); response.StatusCode == http.StatusOK {
					t.Error("a made-up token is let in")
				}
			})
			<-tick.C
		}
	})
	began := time.Now()
	return func() {
		cancel()
		all.Wait()
		t.Logf("%.0f made-up tokens a second were refused", float64(refused.Load())/time.Since(began).Seconds())
	}
}

// counted counts what passes.
type counted struct {
	net.Conn
	f *fleet
}

// Read implements io.Reader.
func (c counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.f.received.Add(int64(n))
	return n, err
}

// Write implements io.Writer.
func (c counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.f.sent.Add(int64(n))
	return n, err
}

// bytes is what all agents have sent and received.
func (f *fleet) bytes() float64 { return float64(f.sent.Load() + f.received.Load()) }

// each calls do for 0 to n-1, some at a time, and fails the test with the errors.
func each(t *testing.T, n int, do func(int) error) {
	t.Helper()
	turns := make(chan struct{}, 32)
	var all sync.WaitGroup
	for i := range n {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			if err := do(i); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	if all.Wait(); t.Failed() {
		t.FailNow()
	}
}

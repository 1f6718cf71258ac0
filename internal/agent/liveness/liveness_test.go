package liveness

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

var errGateway = errors.New("no")

// healthTimeout is that of these tests.
const healthTimeout = time.Minute

func TestProgressOfEachFamily(t *testing.T) {
	op := func(addr string) health.Op {
		return health.Op{Key: health.Key{Pool: "web",
			Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort(addr)}}, Want: health.WantRouted}
	}
	four, six := op("10.0.0.1:80"), op("[fd00::1]:80")
	for name, c := range map[string]struct {
		progress gateway.Progress
		late     string
	}{
		"all is done":       {gateway.Progress{}, ""},
		"unread":            {gateway.Progress{Err: errGateway}, "IPv4 IPv6"},
		"one is behind":     {gateway.Progress{Behind: []health.Op{six}}, "IPv6"},
		"one came":          {gateway.Progress{Came: []health.Op{four}}, "IPv4"},
		"one of each":       {gateway.Progress{Behind: []health.Op{six}, Came: []health.Op{four}}, "IPv4 IPv6"},
		"two of one family": {gateway.Progress{Behind: []health.Op{four}, Came: []health.Op{four}}, "IPv4"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := serving.New(healthTimeout)
				told := Follow(h)
				told(gateway.Progress{AsOf: time.Now()})
				time.Sleep(time.Second)
				c.progress.AsOf = time.Now()
				time.Sleep(time.Millisecond)
				told(c.progress)
				time.Sleep(healthTimeout)
				report, _ := h.Livez(time.Now())
				var late []string
				for _, f := range serving.Families {
					if !report.Status[f].Healthy {
						late = append(late, string(f))
					}
				}
				if got := strings.Join(late, " "); got != c.late {
					t.Errorf("late are %q, want %q", got, c.late)
				}
			})
		})
	}
}

func node(deleting bool, taints ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	if deleting {
		n.DeletionTimestamp, n.Finalizers = &metav1.Time{Time: time.Now()}, []string{"example.com/wait"}
	}
	for _, key := range taints {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
	}
	return n
}

// watched runs the watch of the node in a bubble.
func watched(t *testing.T, kube kubernetes.Interface,
	test func(expect func(when string, want bool), log *bytes.Buffer)) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		is := true
		var mu sync.Mutex
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- WatchNode(ctx, kube, "here", func(e bool) {
				mu.Lock()
				defer mu.Unlock()
				is = e
			}, slog.New(slog.NewTextHandler(&out, nil)))
		}()
		test(func(when string, want bool) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if is != want {
				t.Fatalf("%s: eligible %t, want %t", when, is, want)
			}
		}, &out)
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	})
}

func TestNodeEligibility(t *testing.T) {
	kube := fake.NewClientset()
	watched(t, kube, func(expect func(string, bool), log *bytes.Buffer) {
		nodes := kube.CoreV1().Nodes()
		update := func(n *corev1.Node) {
			t.Helper()
			if _, err := nodes.Update(context.Background(), n, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		expect("no such node", true)
		if _, err := nodes.Create(context.Background(), node(false), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("a node", true)
		update(node(false, "other"))
		expect("another taint", true)
		update(node(false, "other", toBeDeleted))
		expect("to be deleted", false)
		update(node(false))
		expect("no longer", true)
		update(node(true))
		expect("being deleted", false)
		update(node(false))
		expect("another of that name", true)
		if err := nodes.Delete(context.Background(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("deleted", false)
		if n := strings.Count(log.String(), "node eligibility"); n != 5 {
			t.Errorf("%d lines, want one for each change, 5: %s", n, log)
		}
	})
}

// Without the right to read nodes, or without an API server, no node becomes ineligible.
func TestANodeThatCannotBeWatchedStaysEligible(t *testing.T) {
	kube := fake.NewClientset()
	kube.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "", errors.New("no right"))
	})
	watched(t, kube, func(expect func(string, bool), log *bytes.Buffer) {
		for range 600 {
			expect("forbidden", true)
		}
		if n := strings.Count(log.String(), "node cannot be watched"); n != 1 {
			t.Errorf("%d lines, want one: %s", n, log)
		}
	})
}

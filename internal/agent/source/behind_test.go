package source

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/test/agenttest"
)

// finder is a gateway that has found what a test says, at shop/web and bank/web.
type finder struct {
	mu  sync.Mutex
	has string
}

func (f *finder) Discovered(service string) (all []netip.Addr, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for word := range strings.FieldsSeq(f.has) {
		all = append(all, netip.MustParseAddr(word))
	}
	return all, service != "shop/other"
}

func (f *finder) finds(has string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.has = has
}

// The watch of discovery.kubernetes ends without a sign, and is opened again after 40 s: a pod that
// is removed meanwhile stays routed, a new one gets no requests.
func TestAGatewayWhoseWatchHasEndedIsBehind(t *testing.T) {
	slice := func(ready ...string) *discovery.EndpointSlice {
		s := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discovery.LabelServiceName: "web"}}}
		for i, a := range []string{"10.0.0.2", "10.0.0.1", "10.0.0.3"} {
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a},
				Conditions: discovery.EndpointConditions{Ready: ptr.To(i < len(ready))}})
			if i < len(ready) {
				s.Endpoints[i].Addresses = []string{ready[i]}
			}
		}
		return s
	}
	for name, ready := range map[string][]string{
		"a pod was removed": {"10.0.0.2"},
		"a pod was added":   {"10.0.0.2", "10.0.0.1", "10.0.0.9"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				kube := fake.NewClientset(slice("10.0.0.2", "10.0.0.1"))
				// A namespace that may not be listed delays no other.
				kube.PrependReactor("list", "endpointslices",
					func(a ktesting.Action) (bool, runtime.Object, error) {
						return a.GetNamespace() == "bank", nil, errors.New("no binding")
					})
				g := &finder{has: "10.0.0.1 10.0.0.2"}
				var log agenttest.Log
				r := prometheus.NewRegistry()
				routes := []gateway.Route{{Service: "bank/web"}, {Service: "shop/web"}, {Service: "shop/other"}}
				b := NewBehind(kube, routes, g, r, slog.New(slog.NewTextHandler(&log, nil)))
				ended := make(chan error, 1)
				go func() { ended <- b.Run(ctx) }()
				shows := func(least, most float64, lines int) {
					t.Helper()
					synctest.Wait()
					all, err := r.Gather()
					if err != nil {
						t.Fatal(err)
					}
					is := all[0].GetMetric()[0].GetGauge().GetValue()
					if n := strings.Count(log.String(), "is behind"); is < least || is > most || n != lines {
						t.Fatalf("%g s and %d lines, want %g to %g and %d", is, n, least, most, lines)
					}
				}
				time.Sleep(time.Minute)
				shows(0, 0, 0)
				if _, err := kube.DiscoveryV1().EndpointSlices("shop").Update(ctx, slice(ready...),
					metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(3 * time.Second)
				shows(1, 3, 0)
				time.Sleep(37 * time.Second)
				shows(38, 40, 1)
				g.finds(strings.Join(ready, " "))
				time.Sleep(2 * time.Second)
				shows(0, 0, 1)
				if !strings.Contains(log.String(), "again") {
					t.Error("that it follows again is not logged")
				}
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

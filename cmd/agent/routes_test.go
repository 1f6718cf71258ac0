package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/journal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// made makes a slice of namespace/service with port 80 and ready endpoints, written "10.0.0.1@a", or "10.0.0.1" without a pod.
func made(name, namespace, service string, list ...string) *discovery.EndpointSlice {
	port, portName := int32(80), "http"
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discovery.LabelServiceName: service}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &portName, Port: &port}},
	}
	for _, text := range list {
		addr, uid, ok := strings.Cut(text, "@")
		e := discovery.Endpoint{Addresses: []string{addr}}
		if ok {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", UID: types.UID(uid)}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// claims waits until the bubble is quiet, and prints what EndpointSlices claim in each pool, as "api:0 web:2".
func claims(set *health.Set) string {
	synctest.Wait()
	var all []string
	for pool, c := range set.Counts() {
		all = append(all, fmt.Sprintf("%s:%d", pool, c.Claimed))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func TestRoutesFollowEndpointSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(
			made("web-1", "shop", "web", "10.0.0.1@a"), made("web-2", "shop", "web", "10.0.0.2@b", "10.0.0.9"),
			made("coord-1", "lameduck", "agents", "10.1.0.1@x"), made("else", "shop", "else", "10.0.0.3@c"),
		)
		set := health.NewSet()
		r := newRoutes(file{
			Coordinators: &coordinators{Service: "lameduck/agents", Port: "http"},
			HAProxy:      &haproxyFile{Backends: []backendFile{{Backend: "web", Service: "shop/web", Port: "http"}, {Backend: "api", Service: "shop/api"}}},
		}, set, gateway.NewDirector(nil, set, slog.New(slog.DiscardHandler)))
		var mu sync.Mutex
		var replicas []string
		r.replicas = func(addresses []string) {
			mu.Lock()
			defer mu.Unlock()
			replicas = addresses
		}
		coordinators := func(want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(replicas, want) {
				t.Fatalf("coordinators are %v, want %v", replicas, want)
			}
		}
		expect := func(want string) {
			t.Helper()
			if got := claims(set); got != want {
				t.Fatalf("claims are %q, want %q", got, want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.run(ctx, kube) }()
		time.Sleep(time.Second)
		if !r.synced() {
			t.Fatal("the first list is not handed on")
		}
		expect("web:3") // one of them is no pod
		coordinators("https://10.1.0.1:80")

		slicesOf := kube.DiscoveryV1().EndpointSlices
		for _, s := range []*discovery.EndpointSlice{
			made("web-2", "shop", "api", "10.0.0.2@b"), // another Service's from now on
			made("coord-2", "lameduck", "other", "10.1.0.2@y"),
		} {
			if _, err := slicesOf(s.Namespace).Update(ctx, s, metav1.UpdateOptions{}); err != nil {
				if _, err := slicesOf(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
		}
		expect("api:1 web:1")
		coordinators("https://10.1.0.1:80")
		if _, err := slicesOf("lameduck").Update(ctx, made("coord-2", "lameduck", "agents", "10.1.0.2@y"), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		coordinators("https://10.1.0.1:80", "https://10.1.0.2:80")
		if _, err := slicesOf("lameduck").Update(ctx, made("coord-1", "lameduck", "former", "10.1.0.1@x"), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		coordinators("https://10.1.0.2:80")
		if err := slicesOf("shop").Delete(ctx, "web-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("api:1 web:0")
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("run returns %v", err)
		}
	})
}

func TestTheLagDelaysChangesAndNotTheFirstList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(made("web-1", "shop", "web", "10.0.0.1@a"))
		set := health.NewSet()
		r := newRoutes(file{
			HAProxy:      &haproxyFile{Backends: []backendFile{{Backend: "web", Service: "shop/web"}}},
			EndpointsLag: duration{Duration: time.Minute},
		}, set, gateway.NewDirector(nil, set, slog.New(slog.DiscardHandler)))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.run(ctx, kube) }()
		time.Sleep(time.Second)
		if got := claims(set); got != "web:1" || !r.synced() {
			t.Fatalf("claims are %q, want web:1 after the first list", got)
		}
		for i, name := range []string{"web-2", "web-3"} {
			s := made(name, "shop", "web", fmt.Sprintf("10.0.1.%d@%d", i, i))
			if _, err := kube.DiscoveryV1().EndpointSlices("shop").Create(ctx, s, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute - time.Second)
		if got := claims(set); got != "web:1" {
			t.Fatalf("claims are %q before the lag is over", got)
		}
		time.Sleep(2 * time.Second)
		if got := claims(set); got != "web:3" {
			t.Fatalf("claims are %q after it, want web:3: each change waits for itself only", got)
		}
		cancel()
		<-ended
	})
}

func TestTombstonesBetweenTheWireAndTheSet(t *testing.T) {
	set, woken := health.NewSet(), 0
	kept, err := journal.Open(t.Context(), "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stones := &tombstones{set: set, journal: kept, wake: func() { woken++ }, log: slog.New(slog.DiscardHandler), known: map[health.UID]health.State{}}
	now := time.Now()
	set.Synced()
	set.Replace(now, "web", []health.Endpoint{{Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}, Routable: true}})
	pod := func(uid string) drain.Pod {
		return drain.Pod{Namespace: "shop", Name: "web-" + uid, UID: drain.UID(uid)}
	}

	stones.Bury(pod(""), "r", now, now.Add(time.Hour))
	stones.Lift("", "r", true)
	if woken != 0 || len(stones.Reports()) != 0 {
		t.Fatal("a pod without UID has a tombstone")
	}
	stones.Bury(pod("a"), "r", now, now.Add(time.Hour))
	stones.Bury(pod("a"), "r", now, now.Add(time.Hour))
	if woken != 1 {
		t.Fatalf("woken %d times, want once: a renewal is no news", woken)
	}
	if !stones.changed() || stones.changed() {
		t.Fatal("a new tombstone is not news once")
	}
	// One goes and another comes, between two looks, and the state is the same.
	stones.Lift("a", "r", false)
	stones.Bury(pod("b"), "r", now, now.Add(time.Hour))
	if !stones.changed() {
		t.Fatal("another tombstone is no news")
	}
	stones.Bury(pod("a"), "r2", now, now.Add(time.Hour))
	set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now()})
	reports := stones.Reports()
	if len(reports) != 2 || reports[0].State != drain.StateUnknown || reports[0].Proof != drain.ProofNone || reports[1].State != drain.Idle || reports[1].Proof != drain.Runtime {
		t.Fatalf("reports are %+v", reports)
	}
	if got := stones.Held("r"); !slices.Equal(got, []drain.UID{"b"}) {
		t.Fatalf("r holds %v", got)
	}
	for state, want := range map[health.State]drain.State{
		health.Unknown: drain.StateUnknown, health.Routing: drain.Routing, health.Kept: drain.Kept, health.Removed: drain.Removed, health.Idle: drain.Idle, 200: drain.StateUnknown,
	} {
		if got := wireState(state); got != want {
			t.Errorf("%s is %s on the wire, want %s", state, got, want)
		}
	}
}

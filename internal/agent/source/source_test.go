package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/agent/serving"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
)

func newEndpoints(t *testing.T, kube kubernetes.Interface, set *health.Set, routes ...gateway.Route) *Endpoints {
	t.Helper()
	r, err := New(kube, Ports(routes), set, func([]serving.Family) {}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// claims waits until the bubble is quiet, and prints what EndpointSlices claim in each pool, as
// "api:0 web:2".
func claims(set *health.Set) string {
	synctest.Wait()
	var all []string
	for pool, c := range set.Counts() {
		all = append(all, fmt.Sprintf("%s:%d", pool, c.Claimed))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// /readyz names a namespace that the agent may not list: the tenant has deleted it, and with it the
// RoleBinding. The pools of the others go on, and their expiries end.
func TestANamespaceThatMayNotBeListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a")
		bank := agenttest.Slice("web-2", "bank", "web", "10.0.0.2@b")
		web.ResourceVersion, bank.ResourceVersion = "7", "7"
		kube := fake.NewClientset(web, bank)
		var forbidden atomic.Bool
		forbidden.Store(true)
		kube.PrependReactor("list", "endpointslices", func(a ktesting.Action) (bool, runtime.Object, error) {
			err := apierrors.NewForbidden(discovery.Resource("endpointslices"), "", errors.New("no binding"))
			return a.GetNamespace() == "bank" && forbidden.Load(), nil, err
		})
		set := health.New(health.Options{})
		r := newEndpoints(t, kube, set, gateway.Route{Service: "shop/web", Pool: "web"},
			gateway.Route{Service: "bank/web", Pool: "bank"})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.Missing(); !strings.Contains(got, "namespaces: bank (") || r.Synced() || set.HasSynced() {
			t.Errorf("it says %q, synced %t", got, r.Synced())
		}
		set.Exclude(time.Now(), "a", "r", time.Now(), time.Now().Add(time.Hour))
		a := health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}
		for range 2 {
			time.Sleep(time.Second)
			set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now(),
				Seen: map[health.Key]health.Seen{{Pool: "web", Target: a}: {Present: true}}})
		}
		if state, _, _ := set.Of("a"); state != health.Idle {
			t.Errorf("a pod of a namespace that is listed is %s, want idle", state)
		}
		for _, unheard := range []bool{false, true} {
			if err := r.Fresh(ctx, unheard); err != nil {
				t.Error(err)
			}
		}
		forbidden.Store(false)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if !r.Synced() || !set.HasSynced() {
			t.Error("the namespace is not listed once it may be")
		}
		forbidden.Store(true)
		if err := r.Fresh(ctx, false); !apierrors.IsForbidden(err) {
			t.Errorf("what is known of the namespace may be old: %v", err)
		}
		err := kube.DiscoveryV1().EndpointSlices("bank").Delete(ctx, "web-2", metav1.DeleteOptions{})
		synctest.Wait()
		if err = errors.Join(err, r.Fresh(ctx, false)); err != nil {
			t.Errorf("nothing is left of the namespace: %v", err)
		}
		if err := r.Fresh(ctx, true); !apierrors.IsForbidden(err) {
			t.Errorf("the namespace may exist again, with pods that are not known: %v", err)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// An agent that starts after its Service was given a second port does not know which one its route
// means. It had emptied the pool.
func TestARouteOfWhichThePortIsNotKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a")
		web.Ports = append(web.Ports, discovery.EndpointPort{Name: new("metrics"), Port: new(int32(9090))})
		kube := fake.NewClientset(web, agenttest.Slice("api-1", "shop", "api", "10.0.0.2@b"))
		set := health.New(health.Options{})
		set.Adopt(time.Now(), []health.Key{
			{Pool: "web", Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}}})
		r := newEndpoints(t, kube, set, gateway.Route{Service: "shop/web", Pool: "web"},
			gateway.Route{Service: "shop/api", Pool: "api"})
		go r.Run(t.Context())
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.Missing(); !strings.Contains(got, "shop/web (web)") || r.Synced() || set.HasSynced() {
			t.Errorf("it says %q, synced %t", got, r.Synced())
		}
		view := set.Targets()
		if len(view) != 2 || view[0].Why == health.WhyNotReady || view[1].Why == health.WhyNotReady {
			t.Errorf("the adopted target is to be removed: %+v", view)
		}
		// The second port is taken back.
		one := web.DeepCopy()
		one.Ports = one.Ports[:1]
		slices := kube.DiscoveryV1().EndpointSlices("shop")
		if _, err := slices.Update(t.Context(), one, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := claims(set); got != "api:1 web:1" || !r.Synced() || !set.HasSynced() {
			t.Errorf("claims are %q, synced %t", got, r.Synced())
		}
	})
}

func TestEndpointsFollowEndpointSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(
			agenttest.Slice("web-1", "shop", "web", "10.0.0.1@a"),
			agenttest.Slice("web-2", "shop", "web", "10.0.0.2@b", "10.0.0.9"),
			agenttest.Slice("else", "shop", "else", "10.0.0.3@c"),
		)
		set := health.New(health.Options{})
		r := newEndpoints(t, kube, set, gateway.Route{Service: "shop/web", Port: "http", Pool: "web"},
			gateway.Route{Service: "shop/api", Pool: "api"})
		expect := func(want string) {
			t.Helper()
			if got := claims(set); got != want {
				t.Fatalf("claims are %q, want %q", got, want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		time.Sleep(time.Second)
		if !r.Synced() {
			t.Fatal("the first list is not handed on")
		}
		expect("api:0 web:3") // one of them is no pod
		slicesOf := kube.DiscoveryV1().EndpointSlices("shop")
		// Another Service's from now on.
		if _, err := slicesOf.Update(ctx, agenttest.Slice("web-2", "shop", "api", "10.0.0.2@b"),
			metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("api:1 web:1")
		if err := slicesOf.Delete(ctx, "web-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("api:1 web:0")
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("Run returns %v", err)
		}
	})
}

// What a watch has delivered against a list as of now.
func TestWhatAWatchIsMissing(t *testing.T) {
	slice := func(name, version string) *discovery.EndpointSlice {
		return &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name,
			ResourceVersion: version}}
	}
	list := func(version string, of ...*discovery.EndpointSlice) *discovery.EndpointSliceList {
		l := &discovery.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: version}}
		for _, s := range of {
			l.Items = append(l.Items, *s)
		}
		return l
	}
	for name, c := range map[string]struct {
		heard []*discovery.EndpointSlice
		gone  []*discovery.EndpointSlice
		list  *discovery.EndpointSliceList
		want  string
		bad   bool
	}{
		"nothing at all": {list: list("10")},
		"the same": {heard: []*discovery.EndpointSlice{slice("a", "9")},
			list: list("10", slice("a", "9"))},
		"newer": {heard: []*discovery.EndpointSlice{slice("a", "11")},
			list: list("10", slice("a", "9"))},
		"older": {heard: []*discovery.EndpointSlice{slice("a", "9")},
			list: list("10", slice("a", "10")), want: "a"},
		"one that was never heard of": {heard: []*discovery.EndpointSlice{slice("a", "9")},
			list: list("10", slice("a", "9"), slice("b", "8")), want: "b"},
		"one that is deleted": {heard: []*discovery.EndpointSlice{slice("a", "9"), slice("b", "8")},
			list: list("10", slice("a", "9")), want: "b"},
		"one that is deleted, and it was": {heard: []*discovery.EndpointSlice{slice("a", "9"), slice("b", "8")},
			gone: []*discovery.EndpointSlice{slice("b", "8")}, list: list("10", slice("a", "9"))},
		"one that came after the list": {heard: []*discovery.EndpointSlice{slice("b", "11")}, list: list("10")},
		"a watch that went back in time": {heard: []*discovery.EndpointSlice{slice("a", "9"), slice("a", "7")},
			list: list("10", slice("a", "9")), want: "a"},
		"no version": {heard: []*discovery.EndpointSlice{slice("a", "")}, list: list("10", slice("a", "9")), bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			var h Heard
			for _, s := range c.heard {
				h.Record(s, false)
			}
			for _, s := range c.gone {
				h.Record(s, true)
			}
			h.Record(&discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "elsewhere", Name: "z",
				ResourceVersion: "1"}}, false)
			got, err := h.Missing("shop", c.list)
			if got != c.want || (err != nil) != c.bad {
				t.Errorf("missing is %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

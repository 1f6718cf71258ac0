package endpoints

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// t0 is when every test begins.
var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var (
	web = types.NamespacedName{Namespace: "shop", Name: "web"}
	api = types.NamespacedName{Namespace: "shop", Name: "api"}
)

// made makes a slice of service with one port, 80, and these endpoints, written "10.0.0.1@a ready",
// "10.0.0.2@b terminating", "10.0.0.3@c unready" or "10.0.0.4" (nothing known of it but the
// address).
func made(name string, service types.NamespacedName, list ...string) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: service.Namespace, Name: name,
			Labels: map[string]string{discovery.LabelServiceName: service.Name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       ports("http:80"),
	}
	for _, text := range list {
		where, condition, _ := strings.Cut(text, " ")
		addr, uid, ok := strings.Cut(where, "@")
		e := discovery.Endpoint{Addresses: []string{addr}}
		if strings.Contains(addr, ":") {
			s.AddressType = discovery.AddressTypeIPv6
		}
		if ok {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: service.Namespace, Name: uid,
				UID: types.UID(uid)}
		}
		yes, no := true, false
		switch condition {
		case "ready":
			e.Conditions = discovery.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}
		case "unready":
			e.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &no, Terminating: &no}
		case "terminating":
			e.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
		case "published": // publishNotReadyAddresses, and the pod is terminating
			e.Conditions = discovery.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &yes}
		case "":
		default:
			panic(condition)
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// ports makes them from "http:80".
func ports(list ...string) []discovery.EndpointPort {
	all := []discovery.EndpointPort{}
	for _, text := range list {
		name, number, _ := strings.Cut(text, ":")
		var n int32
		fmt.Sscan(number, &n)
		all = append(all, discovery.EndpointPort{Name: &name, Port: &n})
	}
	return all
}

// said prints what the index says of a Service's port, as "10.0.0.1:80@a+ 10.0.0.2:80@b-
// 10.0.0.3:80@c!": routable, not, terminating.
func said(x *Index, service types.NamespacedName, port string) string {
	var all []string
	for _, e := range x.Endpoints(service, port) {
		sign := "-"
		switch {
		case e.Terminating && e.Routable:
			sign = "?"
		case e.Terminating:
			sign = "!"
		case e.Routable:
			sign = "+"
		}
		all = append(all, e.Target.String()+sign)
	}
	return strings.Join(all, " ")
}

func wantSaid(t *testing.T, x *Index, service types.NamespacedName, port, want string) {
	t.Helper()
	if got := said(x, service, port); got != want {
		t.Fatalf("endpoints of %s %q are %q, want %q", service, port, got, want)
	}
}

// listings prints which Services list a pod, as "shop/web:ready shop/api:left".
func listings(x *Index, now time.Time, uid health.UID) string {
	var all []string
	for _, l := range x.Pod(now, web.Namespace, uid) {
		text := l.Service.String()
		for _, flag := range []struct {
			set  bool
			name string
		}{{l.Ready, "ready"}, {l.Terminating, "terminating"}, {!l.LeftAt.IsZero(), "left"}} {
			if flag.set {
				text += ":" + flag.name
			}
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

func wantListings(t *testing.T, x *Index, now time.Time, uid health.UID, want string) {
	t.Helper()
	if got := listings(x, now, uid); got != want {
		t.Fatalf("pod %s is listed by %q, want %q", uid, got, want)
	}
}

func TestEndpoints(t *testing.T) {
	foreign := made("one", web, "10.0.0.1@a ready")
	foreign.Endpoints[0].TargetRef.Kind = "Node"
	several := made("one", web, "10.0.0.1@a ready")
	several.Endpoints[0].Addresses = []string{"10.0.0.1", "10.0.0.9"}
	noPorts := made("one", web, "10.0.0.1@a ready")
	noPorts.Ports = nil
	unnamed := made("one", web, "10.0.0.1@a ready")
	unnamed.Ports[0].Name = nil
	odd := made("one", web, "10.0.0.1@a ready", "not-an-address@b ready")
	odd.Ports = append(odd.Ports, discovery.EndpointPort{Name: new(string)})
	named := made("one", web, "10.0.0.1@a ready")
	named.Ports = ports("http:8080", "metrics:9090")
	other := made("two", web, "10.0.0.2@b ready")
	other.Ports = ports("metrics:9090", "http:8081")
	lacks := made("three", web, "10.0.0.3@c ready")
	lacks.Ports = ports("metrics:9090")
	name := made("one", web, "example.org@a ready", "10.0.0.1@b ready")
	name.AddressType = discovery.AddressTypeFQDN

	for test, c := range map[string]struct {
		slices []*discovery.EndpointSlice
		port   string
		want   string
	}{
		"conditions": {
			[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a ready", "10.0.0.2@b unready",
				"10.0.0.3@c terminating")}, "http",
			"10.0.0.1:80@a+ 10.0.0.2:80@b- 10.0.0.3:80@c!",
		},
		"conditions that are not given": {[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a")},
			"http", "10.0.0.1:80@a+"},
		"several slices": {
			[]*discovery.EndpointSlice{made("one", web, "10.0.0.2@b ready"), made("two", web, "10.0.0.1@a ready"),
				made("other", api, "10.0.0.3@c ready")}, "http",
			"10.0.0.1:80@a+ 10.0.0.2:80@b+",
		},
		"an endpoint that moves is in both": {
			[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a unready"), made("two", web, "10.0.0.1@a ready")},
			"http", "10.0.0.1:80@a+",
		},
		"one slice is old, the pod terminates": {
			[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a ready"),
				made("two", web, "10.0.0.1@a terminating")}, "http", "10.0.0.1:80@a!",
		},
		"publishNotReadyAddresses": {[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a published")},
			"http", "10.0.0.1:80@a!"},
		"two pods at one address": {
			[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@old terminating"),
				made("two", web, "10.0.0.1@new ready")}, "http",
			"10.0.0.1:80@new+ 10.0.0.1:80@old!",
		},
		"dual stack": {
			[]*discovery.EndpointSlice{made("four", web, "10.0.0.1@a ready"), made("six", web, "fd00::1@a ready")},
			"http",
			"10.0.0.1:80@a+ [fd00::1]:80@a+",
		},
		"each slice has its own number for a port": {
			[]*discovery.EndpointSlice{named, other, lacks}, "http", "10.0.0.1:8080@a+ 10.0.0.2:8081@b+",
		},
		"no name of several ports": {[]*discovery.EndpointSlice{named}, "", ""},
		"no name of the only port": {[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a ready")},
			"", "10.0.0.1:80@a+"},
		"the only port has no name": {[]*discovery.EndpointSlice{unnamed}, "", "10.0.0.1:80@a+"},
		"no such port":              {[]*discovery.EndpointSlice{made("one", web, "10.0.0.1@a ready")}, "https", ""},
		"no ports":                  {[]*discovery.EndpointSlice{noPorts}, "", ""},
		"odd ones are left out":     {[]*discovery.EndpointSlice{odd}, "http", "10.0.0.1:80@a+"},
		"no pod": {[]*discovery.EndpointSlice{made("one", web, "10.0.0.1 ready")},
			"http", "10.0.0.1:80@+"},
		"a node":                 {[]*discovery.EndpointSlice{foreign}, "http", "10.0.0.1:80@+"},
		"the first address only": {[]*discovery.EndpointSlice{several}, "http", "10.0.0.1:80@a+"},
		"names are no addresses": {[]*discovery.EndpointSlice{name}, "http", ""},
	} {
		t.Run(test, func(t *testing.T) {
			forward, backward := NewIndex(), NewIndex()
			for i := range c.slices {
				forward.Apply(t0, c.slices[i])
				backward.Apply(t0, c.slices[len(c.slices)-1-i])
			}
			wantSaid(t, forward, web, c.port, c.want)
			wantSaid(t, backward, web, c.port, c.want) // the order of a watch is not ours
		})
	}
}

// A slice is moved to another Service by its label. Without this the first Service lists its
// endpoints for ever.
func TestASliceChangesItsService(t *testing.T) {
	x := NewIndex()
	x.Apply(t0, made("one", web, "10.0.0.1@a ready"))
	x.Apply(t0, made("one", api, "10.0.0.1@a ready"))
	wantSaid(t, x, web, "http", "")
	wantSaid(t, x, api, "http", "10.0.0.1:80@a+")
	wantListings(t, x, t0, "a", "shop/api:ready shop/web:left")
	// It loses its label.
	stray := made("one", web, "10.0.0.1@a ready")
	delete(stray.Labels, discovery.LabelServiceName)
	x.Apply(t0, stray)
	wantSaid(t, x, api, "http", "")
	// What is heard last of a deleted slice may be old: it goes from where it is.
	x.Apply(t0, made("two", api, "10.0.0.2@b ready"))
	x.Delete(t0, made("two", web, "10.0.0.2@b ready"))
	wantSaid(t, x, api, "http", "")
	wantListings(t, x, t0.Add(Memory), "b", "")
	if len(x.services) != 0 || len(x.slices) != 0 || len(x.pods) != 0 {
		t.Fatalf("something is remembered: %v %v %v", x.services, x.slices, x.pods)
	}
}

func TestAServiceWithoutSlicesLeft(t *testing.T) {
	x := NewIndex()
	x.Apply(t0, made("one", web, "10.0.0.1@a ready"))
	x.Apply(t0, made("two", web, "10.0.0.2@b ready"))
	x.Delete(t0, made("one", web))
	wantSaid(t, x, web, "http", "10.0.0.2:80@b+")
	x.Delete(t0, made("two", web))
	wantSaid(t, x, web, "http", "")
	if got := x.Usable(web); len(got) != 0 {
		t.Fatalf("usable are %v", got)
	}
	if len(x.services) != 0 {
		t.Fatalf("the Service is remembered: %v", x.services)
	}
	x.Apply(t0, made("one", web))
	if got := x.Endpoints(web, "http"); len(got) != 0 {
		t.Fatalf("an empty slice lists %v", got)
	}
}

func TestPodIsListedByItsServices(t *testing.T) {
	x := NewIndex()
	x.Apply(t0, made("one", web, "10.0.0.1@a unready", "10.0.0.2@b terminating", "10.0.0.3@c published"))
	x.Apply(t0, made("two", web, "fd00::1@a ready"))
	x.Apply(t0, made("three", api, "10.0.0.1@a unready"))
	wantListings(t, x, t0, "a", "shop/api shop/web:ready") // the most favourable word
	wantListings(t, x, t0, "b", "shop/web:terminating")
	wantListings(t, x, t0, "c", "shop/web:ready:terminating")
	wantListings(t, x, t0, "unknown", "")
}

// A tenant that may write EndpointSlices may write any pod into them. A Service selects pods of its
// own namespace only, so that a pod of another is not listed, whatever the reference says.
func TestASliceListsNoPodOfAnotherNamespace(t *testing.T) {
	for name, says := range map[string]string{"it names the other namespace": "bank", "it hides it": web.Namespace,
		"it names none": ""} {
		t.Run(name, func(t *testing.T) {
			x := NewIndex()
			s := made("forged", web, "10.0.0.1@core-1 ready", "10.0.0.2@a ready")
			s.Endpoints[0].TargetRef.Namespace = says
			x.Apply(t0, s)
			if l := x.Pod(t0, "bank", "core-1"); len(l) != 0 {
				t.Errorf("the pod of bank is listed by %+v", l)
			}
			want := "10.0.0.1:80@core-1+ 10.0.0.2:80@a+"
			if says == "bank" {
				want = "10.0.0.1:80@+ 10.0.0.2:80@a+"
			}
			wantSaid(t, x, web, "http", want)
			x.Apply(t0, made("forged", web))
			if l := x.Pod(t0, "bank", "core-1"); len(l) != 0 {
				t.Errorf("the pod of bank is listed by %+v when it has left", l)
			}
		})
	}
}

func TestUsable(t *testing.T) {
	x := NewIndex()
	x.Apply(t0, made("one", web, "10.0.0.1@b ready", "10.0.0.2@a", "10.0.0.3@c unready", "10.0.0.4@d terminating",
		"10.0.0.5@e published", "10.0.0.6 ready"))
	x.Apply(t0, made("two", web, "fd00::1@b ready"))
	if got, want := x.Usable(web), []health.UID{"", "a", "b"}; !slices.Equal(got, want) {
		t.Fatalf("usable are %q, want %q", got, want)
	}
}

// A gateway may have requests on a pod long after a Service has stopped listing it.
func TestWhatHasLeftIsRemembered(t *testing.T) {
	x := NewIndex()
	x.Apply(t0, made("one", web, "10.0.0.1@a ready"))
	x.Apply(t0, made("two", web, "10.0.0.1@a ready"))
	x.Apply(t0, made("one", web))
	wantListings(t, x, t0, "a", "shop/web:ready") // the other slice lists it still
	x.Delete(t0, made("two", web))
	wantListings(t, x, t0, "a", "shop/web:left")
	wantListings(t, x, t0.Add(Memory-1), "a", "shop/web:left")
	wantListings(t, x, t0.Add(Memory), "a", "")

	// It comes back, and leaves again: the second leave counts, the end of the first changes
	// nothing.
	later := t0.Add(Memory / 2)
	x.Apply(later, made("one", web, "10.0.0.1@a ready"))
	wantListings(t, x, later, "a", "shop/web:ready")
	x.Apply(later, made("one", web))
	x.Apply(t0.Add(Memory), made("other", api, "10.0.0.2@b ready"))
	wantListings(t, x, t0.Add(Memory), "a", "shop/web:left")
	// And nothing is remembered of it in the end.
	x.Apply(later.Add(Memory), made("other", api, "10.0.0.2@b ready"))
	if len(x.left) != 0 || len(x.leaving) != 0 {
		t.Fatalf("something is remembered: %v %v", x.left, x.leaving)
	}
}

// Not every controller that writes EndpointSlices names the pods: the address stands for them. An
// endpoint that names a pod does not count for its address, which another pod may have by now.
func TestEndpointsThatNameNoPod(t *testing.T) {
	x := NewIndex()
	at := func(address string) health.UID { return At(netip.MustParseAddr(address)) }
	x.Apply(t0, made("one", web, "10.0.0.1 ready", "10.0.0.2@b ready"))
	x.Apply(t0, made("two", api, "10.0.0.1 unready"))
	x.Apply(t0, made("three", types.NamespacedName{Namespace: "bank", Name: "web"}, "10.0.0.1 ready"))
	wantListings(t, x, t0, at("10.0.0.1"), "shop/api shop/web:ready")
	wantListings(t, x, t0, at("::ffff:10.0.0.1"), "shop/api shop/web:ready")
	wantListings(t, x, t0, at("10.0.0.2"), "")
	x.Apply(t0, made("one", web, "10.0.0.1@a ready"))
	wantListings(t, x, t0, at("10.0.0.1"), "shop/api shop/web:left")
}

// Whatever slices come and go, the index is what an index is that was told the last word of each.
func TestTheHistoryDoesNotMatter(t *testing.T) {
	seed := uint32(1)
	random := func(n int) int {
		seed = seed*1664525 + 1013904223
		return int(seed>>16) % n
	}
	services := []types.NamespacedName{web, api}
	conditions := []string{" ready", " unready", " terminating", ""}
	for range 200 {
		x, last := NewIndex(), map[string]*discovery.EndpointSlice{}
		for range 40 {
			name := fmt.Sprint("slice-", random(4))
			var list []string
			for range random(4) {
				n := random(5)
				list = append(list, fmt.Sprintf("10.0.0.%d@%c%s", n+1, 'a'+n, conditions[random(4)]))
			}
			s := made(name, services[random(2)], list...)
			switch random(8) {
			case 0:
				x.Delete(t0, s)
				delete(last, name)
			case 1:
				delete(s.Labels, discovery.LabelServiceName)
				fallthrough
			default:
				x.Apply(t0, s)
				last[name] = s
			}
		}
		fresh := NewIndex()
		for _, s := range last {
			fresh.Apply(t0, s)
		}
		later := t0.Add(Memory)
		for _, service := range services {
			wantSaid(t, x, service, "http", said(fresh, service, "http"))
			if got, want := x.Usable(service), fresh.Usable(service); !slices.Equal(got, want) {
				t.Fatalf("usable of %s are %q, want %q", service, got, want)
			}
		}
		for uid := 'a'; uid < 'f'; uid++ {
			wantListings(t, x, later, health.UID(uid), listings(fresh, later, health.UID(uid)))
		}
	}
}

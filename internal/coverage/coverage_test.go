package coverage

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agentkinds "github.com/lameduck-io/lameduck/internal/agent/kinds"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

var web = drain.Service{Namespace: "shop", Name: "web"}

func service(change func(*corev1.Service)) client.Object {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1"}}
	if change != nil {
		change(s)
	}
	return s
}

// gatewayPod is a pod of a gateway named traefik.
func gatewayPod(name string, ready corev1.ConditionStatus) client.Object {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "edge", Name: name, UID: types.UID(name),
			Labels: map[string]string{"app": "traefik"}},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
	}
}

func ingress(class *string, annotations map[string]string) client.Object {
	backend := networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "web"}}
	return &networkingv1.Ingress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "front", Annotations: annotations},
		Spec: networkingv1.IngressSpec{IngressClassName: class, Rules: []networkingv1.IngressRule{{
			IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{
				Paths: []networkingv1.HTTPIngressPath{{Backend: backend}, {Backend: backend}}}},
		}}},
	}
}

// object makes an object of Gateway API.
func object(kind, namespace, name string, spec map[string]any) client.Object {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	o.SetGroupVersionKind(gatewayGroup.WithKind(kind))
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// routing is an agent of a gateway's pod that has declared a route to a Service.
func routing(id string, to drain.Service, kind drain.Kind) drain.AgentInfo {
	return drain.AgentInfo{ID: drain.AgentID(id), Expected: true, Connected: true, Declared: true,
		Routes: map[drain.Service]drain.Route{to: {Service: to, Via: drain.Endpoints, Kind: kind}}}
}

// observer is an agent of a node.
func observer(change func(*drain.Acknowledger)) []drain.Acknowledger {
	a := drain.Acknowledger{AgentInfo: drain.AgentInfo{ID: "node", Population: drain.Nodes, Declared: true},
		Barrier: true}
	if change != nil {
		change(&a)
	}
	return []drain.Acknowledger{a}
}

// Everything that routes a Service is named, with whether it is waited for. The worst fault is to
// call something covered that is not.
func TestWhoRoutesAService(t *testing.T) {
	traefik := Gateway{Name: "traefik", Kind: "traefik", Namespace: "edge", Selector: "app=traefik"}
	all, classes, services, others, named := traefik, traefik, traefik, traefik, traefik
	all.All, classes.Classes, services.Services, others.Services, named.Services = true, []string{"traefik"},
		[]string{"shop/*"}, []string{"shop/api", "bank/*"}, []string{"shop/web"}
	route := func(kind, namespace string) client.Object {
		o := object("HTTPRoute", namespace, "front", map[string]any{
			"parentRefs": []any{map[string]any{"name": "public", "namespace": "edge"}},
			"rules": []any{map[string]any{"backendRefs": []any{map[string]any{"name": "web", "namespace": "shop",
				"kind": kind}}}},
		})
		if namespace == "granted" {
			o.(*unstructured.Unstructured).Object["status"] = map[string]any{"parents": []any{map[string]any{
				"conditions": []any{map[string]any{"type": "ResolvedRefs", "status": "True"}}}}}
		}
		return o
	}
	public := object("Gateway", "edge", "public", map[string]any{"gatewayClassName": "traefik"})
	mesh := object("HTTPRoute", "shop", "front", map[string]any{
		"parentRefs": []any{map[string]any{"name": "web", "kind": "Service", "group": ""}},
		"rules":      []any{map[string]any{"backendRefs": []any{map[string]any{"name": "web"}}}},
	})
	directs := routing("t1", web, drain.Directed)
	suspended, clusterIP, undeclared := directs, directs, drain.AgentInfo{ID: "t1", Expected: true,
		Label: drain.LabelObserved}
	suspended.Suspended = true
	clusterIP.Routes = map[drain.Service]drain.Route{web: {Service: web, Via: drain.ClusterIP}}
	second := all
	second.Name = "second"
	for name, c := range map[string]struct {
		gateways []Gateway
		objects  []client.Object
		service  func(*corev1.Service)
		// agents are those of gateways' pods, nodes those that route every Service.
		agents  []drain.AgentInfo
		nodes   []drain.Acknowledger
		barrier bool
		beside  map[string]int
		// want are the consumers besides kube-proxy: name, state and what the reason contains.
		want []string
		// proxy is kube-proxy's state.
		proxy State
	}{
		"nothing but kube-proxy":           {proxy: Possible},
		"kube-proxy, observed":             {nodes: observer(nil), barrier: true, proxy: Acknowledges},
		"kube-proxy, observed, no barrier": {nodes: observer(nil), proxy: Possible},
		"kube-proxy, only a directed gateway": {nodes: observer(func(a *drain.Acknowledger) { a.Barrier = false }),
			barrier: true, proxy: Possible},
		"kube-proxy, only a gateway that is observed": {
			nodes: observer(func(a *drain.Acknowledger) { a.Population = "edge/envoy" }), barrier: true,
			proxy: Possible},
		"kube-proxy, a suspended agent": {nodes: observer(func(a *drain.Acknowledger) { a.Suspended = true }),
			barrier: true, proxy: Possible},
		"kube-proxy, an agent that is away": {
			nodes: observer(func(a *drain.Acknowledger) { a.Until = time.Now() }), barrier: true, proxy: Possible},
		"Cilium beside kube-proxy": {nodes: observer(nil), barrier: true, beside: map[string]int{"Cilium": 3},
			proxy: Acknowledges,
			want:  []string{"Cilium Uncovered: on 3 nodes it chooses pods by itself and cannot acknowledge"}},
		"Cilium beside kube-proxy, stated": {service: func(s *corev1.Service) {
			s.Annotations = map[string]string{StatedWait: "20s"}
		}, nodes: observer(nil), barrier: true, beside: map[string]int{"Cilium": 3}, proxy: Acknowledges,
			want: []string{"Cilium Waited: on 3 nodes"}},
		"Cilium beside kube-proxy, no barrier": {beside: map[string]int{"Cilium": 3}, proxy: Possible,
			want: []string{"Cilium Possible: on 3 nodes"}},
		"Cilium beside kube-proxy, headless": {
			service: func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone },
			beside:  map[string]int{"Cilium": 3}, want: []string{"DNS Possible: clients that resolve"}},
		"external addresses": {service: func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} },
			proxy: Uncovered},
		"a NodePort": {service: func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort },
			proxy: Uncovered},
		"headless": {service: func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone },
			want: []string{"DNS Possible: clients that resolve"}},
		"headless, stated": {service: func(s *corev1.Service) {
			s.Spec.ClusterIP = corev1.ClusterIPNone
			s.Annotations = map[string]string{StatedWait: "20s"}
		}, barrier: true, want: []string{"DNS Waited: clients that resolve"}},
		"headless, stated, no barrier": {service: func(s *corev1.Service) {
			s.Spec.ClusterIP = corev1.ClusterIPNone
			s.Annotations = map[string]string{StatedWait: "20s"}
		}, want: []string{"DNS Uncovered: not every container of the pod has the hook"}},
		"stated, unreadable": {service: func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeNodePort
			s.Annotations = map[string]string{StatedWait: "long"}
		}, barrier: true, proxy: Uncovered},
		"a load balancer": {service: func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer },
			nodes: observer(nil), barrier: true, proxy: Acknowledges,
			want: []string{"the load balancer Possible: kube-proxy's acknowledgement stands for it"}},
		"a load balancer that sends to pods": {service: func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Annotations = map[string]string{"service.beta.kubernetes.io/aws-load-balancer-nlb-target-type": "ip"}
		}, nodes: observer(nil), barrier: true, proxy: Acknowledges,
			want: []string{"the load balancer Uncovered: it sends to pods"}},
		"a load balancer, Local": {service: func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}, nodes: observer(nil), barrier: true, proxy: Acknowledges,
			want: []string{"the load balancer Uncovered: externalTrafficPolicy Local"}},

		"a gateway for all": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{directs},
			want:    []string{"gateway traefik Acknowledges"}},
		"observed at the barrier": {gateways: []Gateway{services}, barrier: true, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{routing("t1", drain.EveryService, drain.Observed)},
			want:    []string{"gateway traefik Acknowledges"}},
		"observed, no barrier": {gateways: []Gateway{services}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{routing("t1", drain.EveryService, drain.Observed)},
			want:    []string{"gateway traefik Uncovered: its pod edge/t1 is observed at the barrier"}},
		"one of two pods without an agent": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue), gatewayPod("t2", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{directs},
			want:    []string{"gateway traefik Uncovered: its pod edge/t2 has no agent"}},
		"the other one is not ready": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue), gatewayPod("t2", corev1.ConditionFalse)},
			agents:  []drain.AgentInfo{directs}, want: []string{"gateway traefik Acknowledges"}},
		"a suspended agent": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)}, agents: []drain.AgentInfo{suspended},
			want: []string{"gateway traefik Uncovered: its pod edge/t1 has an agent that is suspended"}},
		"an agent that routes the Service's address": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{clusterIP},
			want:    []string{"gateway traefik Uncovered: cannot acknowledge for a single pod"}},
		"no pod is ready": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionFalse)},
			want:    []string{`gateway traefik Absent: that matches "app=traefik" is ready`}},
		"no pod matches": {gateways: []Gateway{classes}, proxy: Possible,
			objects: []client.Object{ingress(ptr.To("traefik"), nil)},
			want:    []string{`gateway traefik Uncovered: there is no pod in namespace edge that matches`}},
		"two names for one gateway": {gateways: []Gateway{all, second}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)}, agents: []drain.AgentInfo{directs},
			want: []string{"gateway traefik Acknowledges", "gateway second Acknowledges"}},
		"an agent that routes other Services": {gateways: []Gateway{all}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{routing("t1", drain.Service{Namespace: "shop", Name: "api"}, drain.Directed)}},
		"an agent that routes other Services, though this one is named": {gateways: []Gateway{named}, proxy: Possible,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{routing("t1", drain.Service{Namespace: "shop", Name: "api"}, drain.Directed)},
			want:    []string{"gateway traefik Uncovered: its pod edge/t1 has no agent that routes the Service"}},
		"an agent that has not declared": {gateways: []Gateway{all}, proxy: Possible, barrier: true,
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)}, agents: []drain.AgentInfo{undeclared},
			want: []string{"gateway traefik Acknowledges"}},
		"a stated wait does not stand for a declared gateway": {gateways: []Gateway{all}, proxy: Possible,
			barrier: true,
			service: func(s *corev1.Service) { s.Annotations = map[string]string{StatedWait: "20s"} },
			objects: []client.Object{gatewayPod("t1", corev1.ConditionTrue)},
			want:    []string{"gateway traefik Uncovered: its pod edge/t1 has no agent"}},
		"of other Services": {gateways: []Gateway{others}, proxy: Possible},
		"an Ingress of a class without a gateway": {gateways: []Gateway{others}, proxy: Possible,
			objects: []client.Object{ingress(ptr.To("nginx"), nil)},
			want:    []string{`Ingress shop/front Uncovered: class "nginx"`}},
		"an Ingress with a class of old": {proxy: Possible,
			objects: []client.Object{ingress(nil, map[string]string{legacyClass: "nginx"})},
			want:    []string{`Ingress shop/front Uncovered: class "nginx"`}},
		"an Ingress of the gateway's class": {gateways: []Gateway{classes}, proxy: Possible,
			objects: []client.Object{ingress(ptr.To("traefik"), nil), gatewayPod("t1", corev1.ConditionTrue)},
			want:    []string{"gateway traefik Uncovered: its pod edge/t1 has no agent"}},
		"a route of the gateway's class, from another namespace": {gateways: []Gateway{classes}, proxy: Possible,
			objects: []client.Object{route("Service", "granted"), public, gatewayPod("t1", corev1.ConditionTrue)},
			agents:  []drain.AgentInfo{directs}, want: []string{"gateway traefik Acknowledges"}},
		"a route of a class without a gateway": {proxy: Possible,
			objects: []client.Object{route("Service", "shop"), public},
			want:    []string{`HTTPRoute shop/front Uncovered: class "traefik"`}},
		"a route from another namespace that was not granted": {proxy: Possible,
			objects: []client.Object{route("Service", "front"), public}},
		"a route of a mesh":         {proxy: Possible, objects: []client.Object{mesh, public}},
		"a route to something else": {proxy: Possible, objects: []client.Object{route("Bucket", "granted"), public}},
	} {
		t.Run(name, func(t *testing.T) {
			s := source(t, append(c.objects, service(c.service))...)
			s.Gateways = c.gateways
			s.Agent = func(id drain.AgentID) (a drain.AgentInfo) {
				if i := slices.IndexFunc(c.agents, func(a drain.AgentInfo) bool { return a.ID == id }); i >= 0 {
					a = c.agents[i]
				}
				return a
			}
			s.Everywhere = func() []drain.Acknowledger { return c.nodes }
			s.Beside = func() map[string]int { return c.beside }
			is, err := s.Of(t.Context(), web, c.barrier)
			if err != nil || !is.Known {
				t.Fatalf("known %t: %v", is.Known, err)
			}
			var names []string
			for _, consumer := range is.Consumers {
				if consumer.State == Uncovered {
					names = append(names, consumer.String())
				}
			}
			got, err := s.Uncovered(t.Context(), []drain.Service{web, {Namespace: "shop", Name: "unknown"}}, c.barrier)
			if err != nil || !slices.Equal(got, names) {
				t.Errorf("uncovered %q, want %q: %v", got, names, err)
			}
			others := []string{}
			proxy := State("")
			for _, consumer := range is.Consumers {
				if consumer.Name == "kube-proxy" {
					proxy = consumer.State
					continue
				}
				others = append(others, fmt.Sprintf("%s %s: %s", consumer.Name, consumer.State, consumer.Why))
			}
			if proxy != c.proxy {
				t.Errorf("kube-proxy %q, want %q", proxy, c.proxy)
			}
			if len(others) != len(c.want) {
				t.Fatalf("%q, want %q", others, c.want)
			}
			for i, want := range c.want {
				start, part, _ := strings.Cut(want, ": ")
				if !strings.HasPrefix(others[i], start+":") || !strings.Contains(others[i], part) {
					t.Errorf("%q, want %q", others[i], want)
				}
			}
		})
	}
}

// A Service of which nothing is known has no consumers, and nothing reassuring is said of it.
func TestAnUnknownService(t *testing.T) {
	s := source(t)
	for _, synced := range []bool{true, false} {
		s.Synced = func() bool { return synced }
		if is, err := s.Of(t.Context(), web, true); err != nil || is.Known || len(is.Consumers) > 0 {
			t.Errorf("synced %t: %+v, %v", synced, is, err)
		}
	}
}

func TestDeclarationsThatAreRefused(t *testing.T) {
	good := Gateway{Name: "traefik", Kind: "traefik", Namespace: "edge", Selector: "app=traefik", All: true}
	if errs := Check([]Gateway{good}); len(errs) > 0 {
		t.Fatal(errs)
	}
	for want, change := range map[string]func(*Gateway){
		`gateways[1].name "traefik": gateways[0] has this name, too`: func(*Gateway) {},
		`gateways[1].name "A b": must be a DNS label`:                func(g *Gateway) { g.Name = "A b" },
		`gateways[1].kind "nginx": must be one of apisix, envoy, `:   func(g *Gateway) { g.Kind = "nginx" },
		`gateways[1].namespace "": not a namespace's name`:           func(g *Gateway) { g.Namespace = "" },
		`gateways[1].selector "": would match every pod`:             func(g *Gateway) { g.Selector = "" },
		`gateways[1].selector "a==b==c": `:                           func(g *Gateway) { g.Selector = "a==b==c" },
		`gateways[1].services[0] "web": must be namespace/name`: func(g *Gateway) {
			g.All, g.Services = false, []string{"web"}
		},
		`gateways[1].all false: give either`: func(g *Gateway) { g.All = false },
		`gateways[1].all true: give either`:  func(g *Gateway) { g.Classes = []string{"traefik"} },
	} {
		bad := good
		bad.Name = "other"
		change(&bad)
		if strings.Contains(want, "has this name") {
			bad.Name = good.Name
		}
		errs := Check([]Gateway{good, bad})
		if len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), want) {
			t.Errorf("%q, want one: %q", errs, want)
		}
	}
}

// The kinds that are accepted, and those that the schema names, are those of agents in a gateway's
// pods.
func TestKindsAreThoseOfAgents(t *testing.T) {
	var agents, schema []string
	for i, of := 0, reflect.TypeFor[agentkinds.Gateway](); i < of.NumField(); i++ {
		key, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
		if key != "kubeProxy" { // its agents are on nodes
			agents = append(agents, strings.TrimSuffix(key, "Observed"))
		}
	}
	slices.Sort(agents)
	agents = slices.Compact(agents)
	field, _ := reflect.TypeFor[Gateway]().FieldByName("Kind")
	for _, one := range strings.Split(field.Tag.Get("jsonschema"), ",") {
		schema = append(schema, strings.TrimPrefix(one, "enum="))
	}
	if !slices.Equal(kindsOfAgents, agents) || !slices.Equal(schema, agents) {
		t.Errorf("accepted: %q, in the schema: %q, want %q", kindsOfAgents, schema, agents)
	}
}

// source returns a Source whose cache holds objects, in a cluster with Gateway API.
func source(t *testing.T, objects ...client.Object) *Source {
	t.Helper()
	b := fake.NewClientBuilder().WithScheme(clientscheme.Scheme).WithObjects(objects...).
		WithIndex(&networkingv1.Ingress{}, byService, ofIngress)
	has := func() bool { return true }
	s := &Source{Synced: has}
	for _, of := range kinds {
		if of.Group == gatewayGroup.Group && of != gatewayKind {
			one := &unstructured.Unstructured{}
			one.SetGroupVersionKind(of)
			b = b.WithIndex(one, byService, ofRoute)
		}
		s.kinds = append(s.kinds, kind{of, has})
	}
	s.Reader = b.Build()
	return s
}

// A kind that may not be listed does not hide the others.
func TestAKindThatCannotBeRead(t *testing.T) {
	s := source(t, service(nil), ingress(ptr.To("nginx"), nil))
	s.Everywhere = func() []drain.Acknowledger { return nil }
	for i, name := range map[int]string{1: "Gateway", 2: "HTTPRoute"} {
		s.kinds[i].has = func() bool { return false }
		is, err := s.Of(t.Context(), web, false)
		if err != nil || len(is.Consumers) != 3 || is.Consumers[0].State != Uncovered ||
			is.Consumers[1].Name != name+" objects" || is.Consumers[1].State != Possible {
			t.Errorf("%+v, %v", is.Consumers, err)
		}
		s.kinds[i].has = func() bool { return true }
	}
}

// Of all Services, those with a consumer that is not waited for are named, but not those without
// pods, nor those of namespaces whose pods never wait. The others are counted. The cluster is read
// again after 10 s only.
func TestSummary(t *testing.T) {
	labels := map[string]string{"app": "web"}
	of := func(namespace, name string, change func(*corev1.Service)) client.Object {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1", Type: corev1.ServiceTypeNodePort, Selector: labels}}
		if change != nil {
			change(s)
		}
		return s
	}
	pod := func(namespace, name, barrier string) client.Object {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels,
			Annotations: map[string]string{keys.BarrierID: barrier}}}
	}
	s := source(t, of("shop", "web", nil), of("kube-system", "dns", nil), of("empty", "web", nil),
		of("bank", "web", nil),
		of("shop", "inner", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }),
		of("shop", "resolved", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }),
		of("shop", "elsewhere", func(s *corev1.Service) { s.Spec.Selector = nil }),
		pod("shop", "a", "yes"), pod("shop", "b", ""), pod("kube-system", "a", ""), pod("bank", "a", "yes"))
	s.Everywhere = func() []drain.Acknowledger { return observer(nil) }
	s.Excluded = []string{"kube-system"}
	s.Gateways = []Gateway{{Name: "traefik", Namespace: "edge", Selector: "app=traefik", Classes: []string{"traefik"}}}
	s.Asks = func(g drain.Gate, of []drain.Service) bool {
		return g == drain.AtBarrier || of[0].Name == "resolved"
	}
	pods := 0
	s.Reader = interceptor.NewClient(s.Reader.(client.WithWatch), interceptor.Funcs{List: func(ctx context.Context,
		c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
		if _, ok := list.(*corev1.PodList); ok {
			pods++
		}
		return c.List(ctx, list, o...)
	}})
	registry := prometheus.NewRegistry()
	registry.MustRegister(s)
	series := func(t *testing.T) (n int, counted map[Class]int) {
		t.Helper()
		all, err := registry.Gather()
		if err != nil {
			t.Error(err)
		}
		counted = map[Class]int{}
		for _, family := range all {
			for _, m := range family.GetMetric() {
				n++
				if value := int(m.GetGauge().GetValue()); value > 0 {
					counted[Class{State(m.GetLabel()[0].GetValue()), m.GetLabel()[1].GetValue()}] = value
				}
			}
		}
		return n, counted
	}
	synctest.Test(t, func(t *testing.T) {
		synced := false
		s.Synced = func() bool { return synced }
		if sum, err := s.Summary(t.Context()); err == nil {
			t.Errorf("before the cache has synced: %+v", sum)
		}
		if n, _ := series(t); n != 0 {
			t.Errorf("%d series before the cache has synced", n)
		}
		synced = true
		time.Sleep(summaryEvery)
		for range 3 {
			sum, err := s.Summary(t.Context())
			n, counted := series(t)
			if want := map[Class]int{{Acknowledges, "barrier"}: 1, {Possible, "none"}: 1, {Possible, "hold"}: 1,
				{Uncovered, "none"}: 1}; err != nil || !maps.Equal(sum.Services, want) ||
				!maps.Equal(counted, want) || n != len(states)*len(gates) || len(sum.Gaps) != 1 ||
				sum.Gaps[0].Service.String() != "shop/web" || sum.Gaps[0].Name != kubeProxy {
				t.Errorf("%+v, %v, %d series with %v; want %v, and the one of which a pod has no barrier", sum, err,
					n, counted, want)
			}
		}
		if pods != 4 {
			t.Errorf("pods were listed %d times, want once for each namespace that is not excluded, and once for "+
				"the gateway", pods)
		}
		s.Asks = func(drain.Gate, []drain.Service) bool { return true }
		time.Sleep(summaryEvery)
		if sum, err := s.Summary(t.Context()); err != nil || sum.Services[Class{Acknowledges, "both"}] != 1 {
			t.Errorf("later: %+v, %v", sum, err)
		}
	})
}

// BenchmarkSummary is what a scrape of lameduck_services costs, at most once in 10 s, with 5,000
// Services of three pods and an Ingress each, and two gateways: all in one namespace, and in 100.
func BenchmarkSummary(b *testing.B) {
	for _, namespaces := range []int{1, 100} {
		b.Run(fmt.Sprint(namespaces), func(b *testing.B) {
			of := func(i int) metav1.ObjectMeta {
				return metav1.ObjectMeta{Namespace: fmt.Sprint("shop-", i%namespaces), Name: fmt.Sprint("web-", i),
					Labels: map[string]string{"app": fmt.Sprint("web-", i), "part-of": "shop", "version": "1"}}
			}
			objects := map[string][]client.Object{"Pod": {gatewayPod("t1", corev1.ConditionTrue)}}
			for i := range 5000 {
				objects["Service"] = append(objects["Service"], &corev1.Service{ObjectMeta: of(i),
					Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1", Selector: of(i).Labels}})
				front := ingress(ptr.To("traefik"), nil).(*networkingv1.Ingress)
				front.ObjectMeta = of(i)
				front.Spec.DefaultBackend = &networkingv1.IngressBackend{
					Service: &networkingv1.IngressServiceBackend{Name: of(i).Name}}
				objects["Ingress"] = append(objects["Ingress"], front)
				for p := range 3 {
					pod := &corev1.Pod{ObjectMeta: of(i)}
					pod.Name, pod.Annotations = pod.Name+fmt.Sprint("-", p), map[string]string{keys.BarrierID: "id"}
					objects["Pod"] = append(objects["Pod"], pod)
				}
			}
			s := cached(b, objects)
			s.Gateways = []Gateway{
				{Name: "traefik", Namespace: "edge", Selector: "app=traefik", Classes: []string{"traefik"}},
				{Name: "all", Namespace: "edge", Selector: "app=traefik", All: true},
			}
			s.Agent = func(drain.AgentID) drain.AgentInfo { return routing("t1", drain.EveryService, drain.Directed) }
			s.Everywhere = func() []drain.Acknowledger { return observer(nil) }
			s.Asks = func(drain.Gate, []drain.Service) bool { return true }
			b.ReportAllocs()
			cpu := func() time.Duration {
				var used syscall.Rusage
				if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
					b.Fatal(err)
				}
				return time.Duration(used.Utime.Nano() + used.Stime.Nano())
			}
			began := cpu()
			for b.Loop() {
				sum, err := s.summarize(b.Context())
				if err != nil || sum.Services[Class{Acknowledges, "both"}] != 5000 {
					b.Fatalf("%+v, %v", sum, err)
				}
			}
			b.ReportMetric(float64((cpu()-began).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// cached returns a Source with a cache such as the coordinator's, filled over HTTP.
func cached(b *testing.B, objects map[string][]client.Object) *Source {
	b.Helper()
	mapper := meta.NewDefaultRESTMapper(nil)
	kinds := map[string]schema.GroupVersionKind{}
	for _, of := range []schema.GroupVersionKind{corev1.SchemeGroupVersion.WithKind("Service"),
		corev1.SchemeGroupVersion.WithKind("Pod"), ingressKind} {
		mapper.Add(of, meta.RESTScopeNamespace)
		plural, _ := meta.UnsafeGuessKindToResource(of)
		kinds[plural.Resource] = of
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") != "" {
			if r.URL.Query().Get("sendInitialEvents") != "" {
				w.WriteHeader(http.StatusUnprocessableEntity) // it lists then
				return
			}
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		of := kinds[path.Base(r.URL.Path)]
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(map[string]any{"kind": of.Kind + "List",
			"apiVersion": of.GroupVersion().String(), "metadata": map[string]any{"resourceVersion": "1"},
			"items": objects[of.Kind]}); err != nil {
			b.Error(err)
		}
	}))
	b.Cleanup(server.Close)
	known, err := cache.New(&rest.Config{Host: server.URL}, cache.Options{Scheme: clientscheme.Scheme, Mapper: mapper,
		DefaultUnsafeDisableDeepCopy: ptr.To(true)})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	b.Cleanup(cancel)
	go func() { _ = known.Start(ctx) }()
	s := &Source{Reader: known, Synced: func() bool { return true }}
	if _, err := s.Watch(ctx, known, mapper); err != nil {
		b.Fatal(err)
	}
	for _, o := range []client.Object{&corev1.Service{}, &corev1.Pod{}} {
		if _, err := known.GetInformer(ctx, o); err != nil {
			b.Fatal(err)
		}
	}
	if !known.WaitForCacheSync(ctx) {
		b.Fatal("the cache did not sync")
	}
	return s
}

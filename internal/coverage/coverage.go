// Package coverage answers one question: which consumers send traffic to a Service, and which of
// these can acknowledge that they have stopped routing to a pod?
//
// Gateways are declared in the coordinator's file. Other consumers are found from the Service
// itself and from the Ingresses, HTTPRoutes and GRPCRoutes that refer to it. Other objects that
// make a gateway route, such as Traefik's IngressRoute or Contour's HTTPProxy, are not read:
// declare the gateway's Services, or all of them.
package coverage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// StatedWait is the annotation of a Service with its stated wait: how long consumers that can never
// acknowledge need to stop routing to a pod.
const StatedWait = "lameduck.io/stated-wait"

// State is whether a consumer is waited for.
type State string

// The states of a consumer.
const (
	// Acknowledges: each of its replicas has an agent that must acknowledge.
	Acknowledges State = "Acknowledges"
	// Waited: it cannot acknowledge, and the Service states how long it needs.
	Waited State = "Waited"
	// Absent: the gateway has pods, and none of them is ready.
	Absent State = "Absent"
	// Possible: it is not known whether it routes the Service. It is not waited for.
	Possible State = "Possible"
	// Uncovered: it routes the Service, and is not waited for.
	Uncovered State = "Uncovered"
)

// states are all states, the worst first.
var states = []State{Uncovered, Possible, Absent, Waited, Acknowledges}

// Consumer is one way by which traffic reaches the pods of a Service.
type Consumer struct {
	Service drain.Service
	// Name names the gateway or the object, Kind the product or the kind of the object.
	Name, Kind string
	State      State
	// Why is the reason for a State other than Acknowledges.
	Why string
}

// String returns a clause such as "gateway traefik routes Service shop/web, and ...".
func (c Consumer) String() string {
	return fmt.Sprintf("%s routes Service %s, and %s", c.Name, c.Service, c.Why)
}

// Source computes coverage from a cache and from the coordinator's agents. Safe for concurrent use.
type Source struct {
	// Reader is a cache with Services and pods, and what [Source.Watch] adds to it.
	Reader client.Reader
	// Synced reports whether Reader has Services and pods, and [Source.Asked] is true. Before that
	// no coverage is known. A replica may be ready a moment earlier.
	Synced   func() bool
	Gateways []Gateway
	// Agent returns an agent by its pod's UID, without an ID if there is none.
	Agent func(drain.AgentID) drain.AgentInfo
	// Everywhere returns the agents whose gateways may send to pods of every Service. It is called
	// once a second at most.
	Everywhere func() []drain.Acknowledger
	// Beside returns what chooses pods on nodes besides kube-proxy and cannot be observed, by name,
	// with the number of nodes. It is called as often. Nil: nothing.
	Beside func() map[string]int
	// Asks reports whether some agent may be asked at a gate about pods of one of these. Excluded
	// are the namespaces whose pods never wait. Only [Source.Summary] uses these.
	Asks     func(drain.Gate, []drain.Service) bool
	Excluded []string

	asked atomic.Bool
	mu    sync.Mutex
	kinds []kind
	at    time.Time
	nodes []drain.AgentID
	// beside is what Beside returned at that time.
	beside map[string]int
	// last is what Summary returned last.
	last struct {
		sync.Mutex
		Summary
		err error
	}
}

// Service is the coverage of one Service.
type Service struct {
	Name drain.Service
	// Known is whether the Service was found in a cache that has synced.
	Known bool
	// Stated is the value of the annotation [StatedWait]. StatedError is the error in it.
	Stated      drain.StatedWait
	StatedError error
	// Consumers are in the order of their states, the uncovered ones first.
	Consumers []Consumer
}

// Of returns the consumers of a Service. barrier is whether the pod in question has the preStop
// barrier. With an error it returns the consumers that it could find.
func (s *Source) Of(ctx context.Context, name drain.Service, barrier bool) (Service, error) {
	return s.of(ctx, name, barrier, gatewayPods{})
}

// gatewayPods holds the pods of declared gateways, by the gateways' names. They are read once for
// all Services of a call.
type gatewayPods map[string][]corev1.Pod

func (s *Source) of(ctx context.Context, name drain.Service, barrier bool, pods gatewayPods) (Service, error) {
	is := Service{Name: name}
	var service corev1.Service
	if !s.Synced() {
		return is, nil
	}
	err := s.Reader.Get(ctx, types.NamespacedName{Namespace: name.Namespace, Name: name.Name}, &service)
	if err != nil {
		return is, client.IgnoreNotFound(err)
	}
	is.Known = true
	if text, ok := service.Annotations[StatedWait]; ok {
		is.Stated, is.StatedError = drain.ParseStatedWait(text)
	}
	add := func(c Consumer) {
		c.Service = name
		is.Consumers = append(is.Consumers, c)
	}
	// cannot adds a consumer that can never acknowledge.
	cannot := func(c Consumer) {
		if is.StatedError == nil && is.Stated.Wait > 0 {
			if c.State = Waited; !barrier {
				c.State = Uncovered
				c.Why += ", and not every container of the pod has the hook that waits for it"
			}
		}
		add(c)
	}
	routes, unread, errs := s.routesTo(ctx, name)
	// gateways are the pods of declared gateways. Their agents are not node agents.
	gateways := map[drain.AgentID]bool{}
	for _, g := range s.Gateways {
		c, routed, err := s.gateway(ctx, g, name, routes, pods, gateways, barrier)
		if errs = errors.Join(errs, err); routed {
			add(c)
		}
	}
	for _, r := range routes {
		if !slices.ContainsFunc(s.Gateways, func(g Gateway) bool { return slices.Contains(g.Classes, r.class) }) {
			cannot(Consumer{Name: r.name, Kind: r.kind, State: Uncovered,
				Why: fmt.Sprintf("no gateway of its class %q is declared", r.class)})
		}
	}
	for _, kind := range unread {
		add(Consumer{Name: kind + " objects", Kind: kind, State: Possible, Why: "the coordinator could not list them"})
	}
	nodes, beside := s.nodeAgents()
	observed := slices.ContainsFunc(nodes, func(id drain.AgentID) bool { return !gateways[id] })
	if service.Spec.ClusterIP == corev1.ClusterIPNone {
		beside = nil
	}
	for _, name := range slices.Sorted(maps.Keys(beside)) {
		c := Consumer{Name: name, Kind: name, State: Uncovered,
			Why: fmt.Sprintf("on %d nodes it chooses pods by itself and cannot acknowledge", beside[name])}
		if !barrier {
			c.State = Possible // as kube-proxy
		}
		cannot(c)
	}
	for _, c := range unaided(&service, observed, barrier) {
		if c.Kind == kubeProxy {
			add(c)
		} else {
			cannot(c)
		}
	}
	slices.SortStableFunc(is.Consumers, func(a, b Consumer) int {
		return cmp.Compare(slices.Index(states, a.State), slices.Index(states, b.State))
	})
	return is, errs
}

// nodeAgents returns the agents that observe kube-proxy on their nodes and are waited for, and what
// chooses pods beside it.
func (s *Source) nodeAgents() ([]drain.AgentID, map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); now.Sub(s.at) >= time.Second {
		s.at, s.nodes = now, nil
		if s.Beside != nil {
			s.beside = s.Beside()
		}
		for _, a := range s.Everywhere() {
			observes := a.Population == drain.Nodes || !a.Declared && a.Label == drain.LabelObserved
			if a.Barrier && observes && !a.Suspended && a.Until.IsZero() {
				s.nodes = append(s.nodes, a.ID)
			}
		}
	}
	return s.nodes, s.beside
}

// Uncovered names the consumers of services that route them and are not waited for. With an error
// it names those that could be found.
func (s *Source) Uncovered(ctx context.Context, services []drain.Service, barrier bool) (names []string, errs error) {
	pods := gatewayPods{}
	for _, name := range services {
		is, err := s.of(ctx, name, barrier, pods)
		errs = errors.Join(errs, err)
		for _, c := range is.Consumers {
			if c.State == Uncovered {
				names = append(names, c.String())
			}
		}
	}
	return names, errs
}

// gateway reports whether a declared gateway routes a Service, and whether every ready pod of it
// has an agent that is waited for. The agent is a container of that pod. It adds the pods to
// gateways.
func (s *Source) gateway(ctx context.Context, g Gateway, service drain.Service, routes []route,
	read gatewayPods, gateways map[drain.AgentID]bool, barrier bool) (c Consumer, routed bool, err error) {
	c = Consumer{Name: "gateway " + g.Name, Kind: g.Kind, State: Acknowledges}
	pods, err := s.podsOfGateway(ctx, g, read)
	if err != nil {
		return c, false, err
	}
	named, perhaps := g.routes(service, routes)
	routed = named
	ready := 0
	for i := range pods {
		pod := &pods[i]
		gateways[drain.AgentID(pod.UID)] = true
		if !podfacts.Ready(pod) {
			continue
		}
		ready++
		why := s.notWaitedFor(drain.AgentID(pod.UID), service, barrier)
		if why == elsewhere && !named {
			continue // its agent knows what it routes
		}
		routed = routed || perhaps
		if why != "" && c.State != Uncovered {
			c.State, c.Why = Uncovered, fmt.Sprintf("its pod %s/%s %s", pod.Namespace, pod.Name, why)
		}
	}
	matching := fmt.Sprintf("pod in namespace %s that matches %q", g.Namespace, g.Selector)
	switch {
	case len(pods) == 0:
		c.State, c.Why, routed = Uncovered, "there is no "+matching, named || perhaps
	case ready == 0:
		c.State, c.Why, routed = Absent, "no "+matching+" is ready", named || perhaps
	}
	return c, routed, nil
}

// podsOfGateway returns the pods of a declared gateway, sorted by name.
func (s *Source) podsOfGateway(ctx context.Context, g Gateway, read gatewayPods) ([]corev1.Pod, error) {
	if pods, ok := read[g.Name]; ok {
		return pods, nil
	}
	selector, err := labels.Parse(g.Selector)
	if err != nil {
		return nil, fmt.Errorf("selector of gateway %s: %w", g.Name, err)
	}
	var pods corev1.PodList
	if err := s.Reader.List(ctx, &pods, client.InNamespace(g.Namespace),
		client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list pods of gateway %s: %w", g.Name, err)
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	read[g.Name] = pods.Items
	return pods.Items, nil
}

// elsewhere is the reason why an agent that has declared only other Services is not waited for.
const elsewhere = "has no agent that routes the Service"

// notWaitedFor returns why drains do not wait for the agent of a gateway's pod. Empty: they do.
func (s *Source) notWaitedFor(id drain.AgentID, service drain.Service, barrier bool) string {
	a := s.Agent(id)
	directed, observed := a.Label != drain.LabelObserved, a.Label != drain.LabelDirected
	if a.Declared {
		directed, observed = false, false
		for _, of := range []drain.Service{service, drain.EveryService} {
			if r, ok := a.Routes[of]; ok && r.Via == drain.Endpoints {
				directed, observed = directed || r.Kind == drain.Directed, observed || r.Kind == drain.Observed
			}
		}
		_, one := a.Routes[service]
		if _, every := a.Routes[drain.EveryService]; !one && !every {
			return elsewhere
		}
	}
	switch {
	case a.ID == "" || !a.Expected && !a.Connected:
		return "has no agent"
	case a.Left:
		return "" // it accepts nothing any more
	case a.Suspended:
		return "has an agent that is suspended"
	case !directed && !observed:
		return "has an agent that cannot acknowledge for a single pod"
	case !directed && !barrier:
		return "is observed at the barrier, for which not every container of the pod had the hook"
	}
	return ""
}

// kubeProxy is the kind of the consumer that node agents observe.
const kubeProxy = "kube-proxy"

// toPods returns the annotation by which a cloud's load balancer sends to pods, not to nodes.
// Empty: there is none.
func toPods(service *corev1.Service) string {
	for key, values := range map[string][]string{
		"service.beta.kubernetes.io/aws-load-balancer-nlb-target-type": {"ip"},
		"service.beta.kubernetes.io/aws-load-balancer-type":            {"nlb-ip"},
	} {
		if slices.Contains(values, service.Annotations[key]) {
			return key
		}
	}
	// With only "ingress" in it, this annotation is about the load balancers of Ingresses.
	if key := "cloud.google.com/neg"; strings.Contains(service.Annotations[key], "exposed_ports") {
		return key
	}
	return ""
}

// unaided returns the consumers that follow from the Service itself: kube-proxy on the nodes, load
// balancers, and clients that resolve the pods' addresses. observed is whether agents observe
// kube-proxy.
func unaided(service *corev1.Service, observed, barrier bool) (all []Consumer) {
	if key := toPods(service); key != "" {
		all = append(all, Consumer{Name: "the load balancer", Kind: "LoadBalancer", State: Uncovered,
			Why: "it sends to pods (" + key + ") and cannot acknowledge"})
	}
	if service.Spec.ClusterIP == corev1.ClusterIPNone {
		return append(all, Consumer{Name: "DNS", Kind: "DNS", State: Possible,
			Why: "clients that resolve this headless Service cannot acknowledge"})
	}
	proxy := Consumer{Name: kubeProxy, Kind: kubeProxy, State: Acknowledges}
	switch {
	case !observed:
		proxy.Why = "no agent on the nodes observes it"
	case !barrier:
		proxy.Why = "it is observed at the barrier, for which not every container of the pod has the hook"
	}
	if proxy.Why != "" {
		proxy.State = Possible
		if service.Spec.Type == corev1.ServiceTypeLoadBalancer || service.Spec.Type == corev1.ServiceTypeNodePort ||
			len(service.Spec.ExternalIPs) > 0 {
			proxy.State = Uncovered
		}
	}
	all = append(all, proxy)
	if service.Spec.Type != corev1.ServiceTypeLoadBalancer || len(all) > 1 {
		return all
	}
	balancer := Consumer{Name: "the load balancer", Kind: "LoadBalancer", State: Possible,
		Why: "it cannot acknowledge; if it sends to nodes, kube-proxy's acknowledgement stands for it"}
	if service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		balancer.State, balancer.Why = Uncovered,
			"with externalTrafficPolicy Local it sends to the pod's node until its own health check fails"
	}
	return append(all, balancer)
}

package coverage

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Gateway declares a data plane of the cluster. Every ready pod of it must have an agent: a pod
// without one is named as uncovered.
type Gateway struct {
	// Name is the gateway's name in messages. It must be unique.
	Name string `json:"name"`
	// Kind is the kind of gateway of the agents in its pods: KIND of gateway.KIND in the agents'
	// file. Use apisix for apisixObserved too.
	Kind string `json:"kind" jsonschema:"enum=apisix,enum=envoy,enum=haproxy,enum=kernel,enum=traefik"`
	// Namespace is the namespace of the gateway's pods.
	Namespace string `json:"namespace"`
	// Selector is the label selector of these pods, such as app.kubernetes.io/name=traefik.
	Selector string `json:"selector"`
	// Services are the Services that the gateway routes: namespace/name, or namespace/* if it may
	// route every Service of a namespace.
	Services []string `json:"services"`
	// Classes are the IngressClasses and GatewayClasses of the gateway. The gateway routes the
	// Services that an Ingress, HTTPRoute or GRPCRoute of such a class refers to.
	Classes []string `json:"classes"`
	// All: the gateway may route every Service.
	All bool `json:"all"`
}

// kindsOfAgents are the kinds of gateways whose agents are in the gateway's pods.
var kindsOfAgents = []string{"apisix", "envoy", "haproxy", "kernel", "traefik"}

// Check returns an error for each invalid value in gateways. Each error names the key.
func Check(gateways []Gateway) (errs []error) {
	names := map[string]int{}
	for i, g := range gateways {
		must := func(ok bool, key, format string, args ...any) {
			if !ok {
				errs = append(errs, fmt.Errorf("gateways[%d].%s "+format, append([]any{i, key}, args...)...))
			}
		}
		other, taken := names[g.Name]
		must(!taken, "name", "%q: gateways[%d] has this name, too", g.Name, other)
		names[g.Name] = i
		must(len(validation.IsDNS1123Label(g.Name)) == 0, "name", "%q: must be a DNS label", g.Name)
		must(slices.Contains(kindsOfAgents, g.Kind), "kind", "%q: must be one of %s", g.Kind,
			strings.Join(kindsOfAgents, ", "))
		must(len(validation.IsDNS1123Label(g.Namespace)) == 0, "namespace", "%q: not a namespace's name", g.Namespace)
		selector, err := labels.Parse(g.Selector)
		must(err == nil, "selector", "%q: %v", g.Selector, err)
		must(err != nil || !selector.Empty(), "selector", "%q: would match every pod of the namespace", g.Selector)
		for j, s := range g.Services {
			namespace, name, ok := strings.Cut(s, "/")
			must(ok && len(validation.IsDNS1123Label(namespace)) == 0 &&
				(name == "*" || len(validation.IsDNS1035Label(name)) == 0),
				fmt.Sprintf("services[%d]", j), "%q: must be namespace/name or namespace/*", s)
		}
		must(g.All != (len(g.Services)+len(g.Classes) > 0), "all", "%t: give either services and classes, or all: true",
			g.All)
	}
	return errs
}

// routes reports whether g names a Service, or a class of routes that refer to it; and whether g
// may route it, because of all or of a wildcard.
func (g Gateway) routes(service drain.Service, routes []route) (named, perhaps bool) {
	named = slices.Contains(g.Services, service.String()) ||
		slices.ContainsFunc(routes, func(r route) bool { return slices.Contains(g.Classes, r.class) })
	return named, g.All || slices.Contains(g.Services, service.Namespace+"/*")
}

// Package kinds is the registry of the kinds of gateways that an agent supports. The kinds
// themselves are the packages below pkg/gateway; a new kind is one line here.
package kinds

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/apisix"
	"github.com/lameduck-io/lameduck/pkg/gateway/envoy"
	"github.com/lameduck-io/lameduck/pkg/gateway/haproxy"
	"github.com/lameduck-io/lameduck/pkg/gateway/kernel"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
	"github.com/lameduck-io/lameduck/pkg/gateway/traefik"
)

// Gateway is the gateway of an agent. Exactly one field must be set. Each field is a kind: a
// pointer that implements gateway.Kind.
type Gateway struct {
	HAProxy   *haproxy.Config   `json:"haproxy,omitempty"`
	KubeProxy *kubeproxy.Config `json:"kubeProxy,omitempty"`
	Envoy     *envoy.Config     `json:"envoy,omitempty"`
	Traefik   *traefik.Config   `json:"traefik,omitempty"`
	Kernel    *kernel.Config    `json:"kernel,omitempty"`
	APISIX    *apisix.Config    `json:"apisix,omitempty"`

	APISIXObserved *apisix.ObservedConfig `json:"apisixObserved,omitempty"`
}

// Kind returns the field that is set, and its key. It returns an error if not exactly one is set.
func (g Gateway) Kind() (key string, kind gateway.Kind, err error) {
	fields := reflect.ValueOf(g)
	var known []string
	given := 0
	for i := range fields.NumField() {
		name, _, _ := strings.Cut(fields.Type().Field(i).Tag.Get("json"), ",")
		known = append(known, name)
		if !fields.Field(i).IsNil() {
			given++
			key, kind = name,
				fields.Field(i).Interface().(gateway.Kind) //nolint:forcetypeassert // a test looks at each
		}
	}
	if given != 1 {
		return "", nil, fmt.Errorf("gateway: exactly one of %s is needed: they are the kinds that this version knows",
			strings.Join(known, ", "))
	}
	return key, kind, nil
}

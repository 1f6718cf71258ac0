package kinds

import (
	"log/slog"
	"reflect"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
)

// A kind that is neither directed nor observed would be accepted in a file, and nothing would be
// done with it.
func TestEachKindIsDirectedOrObserved(t *testing.T) {
	of := reflect.TypeFor[Gateway]()
	names := map[string]bool{}
	for i := range of.NumField() {
		var g Gateway
		reflect.ValueOf(&g).Elem().Field(i).Set(reflect.New(of.Field(i).Type.Elem()))
		key, kind, err := g.Kind()
		if err != nil {
			t.Fatal(err)
		}
		_, directed := kind.(gateway.DirectedKind)
		_, observed := kind.(gateway.ObservedKind)
		if directed == observed || kind.Name() == "" || names[kind.Name()] || key == "" {
			t.Errorf("%s: directed %t, observed %t, key %q, name %q", of.Field(i).Name, directed, observed, key,
				kind.Name())
		}
		names[kind.Name()] = true
		k, ok := kind.(*kubeproxy.Config)
		if ok && k.Observe(slog.New(slog.DiscardHandler)).Population() != drain.Nodes {
			t.Error("kube-proxy is not asked as nodes are")
		}
	}
}

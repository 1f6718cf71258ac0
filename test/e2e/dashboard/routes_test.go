package dashboard

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// Gateway API may be installed after the coordinator has started, and removed and installed again.
// A Service that is routed by it must not read as waited for.
func TestKindsOfRoutesThatAreInstalledLater(t *testing.T) {
	s := open(t)
	serveKubelet(t, s.Kube)
	ns := harness.Namespace(t, s.Kube, "later-", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	definitions := func(verb string) {
		t.Helper()
		if out, err := s.Cluster.KubectlInput(t.Context(), stage.GatewayAPI, verb, "-f", "-"); err != nil {
			t.Fatalf("kubectl %s: %v: %s", verb, err, out)
		}
	}
	named := func(want bool) {
		t.Helper()
		harness.Await(t, time.Minute, fmt.Sprintf("the route is named: %t", want), func() error {
			text, stderr, err := plugin(t, s.Cluster.Kubeconfig(), "status", "-o", "json")
			if err != nil {
				return fmt.Errorf("%w: %s", err, stderr)
			}
			var is struct {
				Coverage struct{ Items []struct{ Name, Why string } }
			}
			if err := json.Unmarshal([]byte(text), &is); err != nil {
				return err
			}
			if slices.ContainsFunc(is.Coverage.Items, func(i struct{ Name, Why string }) bool {
				return i.Name == "HTTPRoute "+ns+"/front" && strings.Contains(i.Why, `class "envoy"`)
			}) != want {
				return fmt.Errorf("%+v", is.Coverage)
			}
			return nil
		})
	}
	for range 2 {
		definitions("apply")
		if err := s.Cluster.Established(t.Context(), stage.GatewayAPI); err != nil {
			t.Fatal(err)
		}
		harness.Await(t, 30*time.Second, "kubectl knows the kinds", func() error {
			return s.Apply(t.Context(), fmt.Sprintf(`
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: public, namespace: %[1]s}
spec: {gatewayClassName: envoy}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: front, namespace: %[1]s}
spec:
  parentRefs: [{name: public}]
  rules: [{backendRefs: [{name: web, port: 80}]}]
`, ns))
		})
		named(true)
		definitions("delete")
		named(false)
	}
}

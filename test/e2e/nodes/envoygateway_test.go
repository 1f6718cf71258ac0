//go:build e2e

package nodes

import (
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// envoyGatewaySystem is the namespace of Envoy Gateway, and of the proxies that it starts.
const envoyGatewaySystem = "envoy-gateway-system"

const httpRoute = "httproute"

const httpRoutes = `---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: %[1]s-%[3]s, namespace: %[2]s, labels: {class: %[1]s}}
spec:
  parentRefs: [{name: %[1]s, namespace: envoy-gateway-system}]
  hostnames: [%[3]s.%[2]s]
  rules: [{backendRefs: [{name: %[3]s, port: 80}]}]
`

// envoyGatewayService gives the Service of the chart the address that envoyproxy.yaml states.
const envoyGatewayService = `
apiVersion: v1
kind: Service
metadata: {name: envoy-gateway, namespace: envoy-gateway-system}
spec: {clusterIP: 10.96.250.2, ports: [{name: grpc, port: 18000}]}
`

// envoyGateway returns Envoy Gateway, installed by its own chart. Its proxies run the Envoy of the
// other tests, with the EnvoyProxy of manifests/envoy-gateway.
func (l *lab) envoyGateway(t *testing.T) observed {
	program, err := filepath.EvalSymlinks(gatewaytest.LookPath(t, "envoy-gateway"))
	if err != nil {
		t.Fatal(err)
	}
	const image = "lameduck.test/envoy-gateway:1"
	if err := l.Set.Load(t.Context(), machine.Image{Name: image, Program: program}); err != nil {
		t.Fatal(err)
	}
	install := func(t *testing.T) {
		chart := filepath.Join(filepath.Dir(program), "gateway-helm")
		text, err := os.ReadFile(filepath.Join(chart, "values.tmpl.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var values map[string]any
		if err := yaml.Unmarshal([]byte(os.Expand(string(text), func(name string) string {
			return map[string]string{"GatewayImage": image, "GatewayImagePullPolicy": "Never"}[name]
		})), &values); err != nil {
			t.Fatal(err)
		}
		values["namespaceOverride"] = envoyGatewaySystem
		values["topologyInjector"] = map[string]any{"enabled": false}
		objects, err := harness.ForeignChart(t, chart, values)
		if err != nil {
			t.Fatal(err)
		}
		l.namespace(t, envoyGatewaySystem, map[string]string{"lameduck.io/mode": "off"})
		for _, folder := range []string{"", "generated"} {
			l.kubectl(t, "apply", "--server-side", "-f", filepath.Join(chart, "charts", "crds", "crds", folder))
		}
		l.applyText(t, envoyGatewayService)
		if out, err := l.KubectlInput(t.Context(), objects, "apply", "--server-side", "-f", "-"); err != nil {
			t.Fatalf("install Envoy Gateway: %v: %s", err, out)
		}
	}
	return observed{"envoygateway", envoyGatewaySystem, 10080, 2, install, httpRoutes, httpRoute,
		"gateway/envoygateway"}
}

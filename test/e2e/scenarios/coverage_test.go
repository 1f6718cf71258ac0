package scenarios

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// HAProxy has an agent and acknowledges; something else routes the same Service and has none. The
// deletion must not pass for acknowledged.
func TestAGatewayWithoutAnAgentIsNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ object, want string }{
		"nothing else": {"", ""},
		"an Ingress": {`
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: front, namespace: %[1]s}
spec:
  ingressClassName: nginx
  rules: [{http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]
`, `Ingress %[1]s/front routes Service %[1]s/web, and no gateway of its class "nginx" is declared`},
		"a route": {`
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
`, `HTTPRoute %[1]s/front routes Service %[1]s/web, and no gateway of its class "envoy" is declared`},
		"a Service of type NodePort": {`
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: %[1]s}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80}]}
`, `kube-proxy routes Service %[1]s/outside, and no agent on the nodes observes it`},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			ns := harness.Namespace(t, s.Kube, "covered-", nil)
			if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2,
				Work: 20 * time.Millisecond}); err != nil {
				t.Fatal(err)
			}
			if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
				t.Fatal(err)
			}
			if c.object != "" {
				if err := s.Apply(t.Context(), fmt.Sprintf(c.object, ns)); err != nil {
					t.Fatal(err)
				}
				settle(t, 2*time.Second) // the coordinator's watch is not asked whether it has heard
			}
			pods, err := s.Pods(t.Context(), ns, "app=web")
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			reason, want := "Acknowledged", ""
			if c.want != "" {
				reason, want = "Uncovered", fmt.Sprintf(c.want, ns)
			}
			harness.Await(t, 10*time.Second, "the answer is in the coordinator's log", func() error {
				all := answers(t, s, ns)
				if len(all) != 1 || all[0].Reason != reason || !strings.Contains(all[0].Message, want) {
					return fmt.Errorf("%+v, want one with the reason %s that contains %q", all, reason, want)
				}
				return nil
			})
		})
	}
}

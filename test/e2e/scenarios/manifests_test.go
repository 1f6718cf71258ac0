package scenarios

import (
	"context"
	"encoding/base64"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// The whole of the manifests, as people apply them. That the coordinator can work with exactly these rights, and that the webhook is
// called by exactly this configuration, the other tests show: they install it from here, only the address patched.
func TestManifestsAreAccepted(t *testing.T) {
	t.Parallel()
	s := open(t)
	out, err := s.Cluster.Kubectl(t.Context(), "apply", "--dry-run=server", "--validate=strict", "-k", stage.Manifests())
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(out) {
		// The tests have installed some of it without kubectl apply.
		if strings.HasPrefix(line, "Warning:") && !strings.Contains(line, "last-applied-configuration") {
			t.Error(strings.TrimSpace(line))
		}
	}
}

// The secret and the CA stand in the API server alone (docs/operations.md). Were they lost whenever somebody applies the manifests, nothing would
// wait from then on, and only a metric would tell.
func TestApplyingAgainKeepsTheSecret(t *testing.T) {
	t.Parallel()
	s := open(t)
	out, err := s.Cluster.Kubectl(t.Context(), "kustomize", stage.Manifests())
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var manifest string
	for _, document := range strings.Split(out, "\n---\n") {
		if strings.Contains(document, "kind: ValidatingWebhookConfiguration") {
			// Another name, and no namespace, so that it disturbs nobody.
			manifest = strings.NewReplacer("name: lameduck\n", "name: applied-again\n", "operator: NotIn", "operator: In", "disabled", "no-such-namespace").Replace(document)
		}
	}
	t.Cleanup(func() {
		out, err := s.Cluster.Kubectl(context.WithoutCancel(t.Context()), "delete", "validatingwebhookconfiguration", "applied-again")
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	patch := `{"webhooks": [{"name": "pods.lameduck.io", "clientConfig": {
         "service": {"namespace": "lameduck-system", "name": "lameduck-webhook", "path": "/v1/admit/0123456789abcdef"},
         "caBundle": "` + base64.StdEncoding.EncodeToString(s.Cluster.CA().PEM()) + `"}}]}`
	for range 2 {
		if err := s.Apply(t.Context(), manifest); err != nil {
			t.Fatal(err)
		}
		if patch != "" {
			if out, err := s.Cluster.Kubectl(t.Context(), "patch", "validatingwebhookconfiguration", "applied-again", "-p", patch); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			patch = ""
		}
	}
	got, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(), "applied-again", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := got.Webhooks[0].ClientConfig
	if c.Service == nil || c.Service.Path == nil || *c.Service.Path != "/v1/admit/0123456789abcdef" || len(c.CABundle) == 0 {
		t.Errorf("after the second apply: %+v", c)
	}
}

package install

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/rights"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// auditPolicy has the API server write down what the coordinator and agents ask for.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:lameduck-system", "system:serviceaccounts:rights"]
  - level: None
`

// auditLog is where the API server writes it.
func auditLog() string { return filepath.Join(os.TempDir(), "audit.log") }

// used is what a service account has asked for, and what it was refused.
func used(t *testing.T, a rights.Account) (all map[string]bool, refused []string) {
	t.Helper()
	all, refused, err := rights.Used(auditLog(), a)
	if err != nil {
		t.Fatal(err)
	}
	return all, refused
}

// mutating has the coordinator write into a MutatingWebhookConfiguration, if the manifests have
// none yet: one that is never called.
func mutating(t *testing.T, s *stage.Stage) {
	t.Helper()
	webhooks := s.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations()
	if _, err := webhooks.Get(t.Context(), "lameduck", metav1.GetOptions{}); err == nil {
		return
	}
	none, url := admissionv1.SideEffectClassNone, "https://"+stage.CoordinatorAddress.String()+":9443"
	made, err := webhooks.Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "lameduck"},
		Webhooks: []admissionv1.MutatingWebhook{{
			Name: "none.lameduck.io", SideEffects: &none, AdmissionReviewVersions: []string{"v1"},
			ClientConfig: admissionv1.WebhookClientConfig{URL: &url},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer webhooks.Delete(t.Context(), made.Name, metav1.DeleteOptions{})
	harness.Until(t, 10*time.Second, "path and CA are written", func() bool {
		got, err := webhooks.Get(t.Context(), made.Name, metav1.GetOptions{})
		return err == nil && len(got.Webhooks[0].ClientConfig.CABundle) > 0 &&
			strings.Contains(*got.Webhooks[0].ClientConfig.URL, "/v1/mutate/")
	})
}

// Coordinators and agents have done everything that they do, and have used each right of the
// manifests and asked for no other. A right that is added and not needed, and one that is needed
// and missing, shows here.
func TestEveryRightIsUsedAndNoOtherAskedFor(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "rights", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3,
		Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
		t.Fatal(err)
	}
	// Acknowledged deletions, Events, tokens, rights of agents.
	if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
		t.Fatal(err)
	}
	// A deletion that is given up while somebody owes: whether its pod is still there is asked 45 s
	// later.
	silent := harness.Namespace(t, s.Kube, "rights-silent", nil)
	harness.SilentAgent(t, s, silent)
	settled := time.After(2 * time.Second) // rosters
	<-settled
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	// client-go would ask again.
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", ns, "delete", "pod", pods[0].Name,
		"--request-timeout=1s"); err == nil {
		t.Fatalf("deleted although somebody owes: %s", out)
	}
	mutating(t, s)
	webhook := rights.Account{Namespace: stage.System, Name: "lameduck-webhook"}
	harness.Until(t, 90*time.Second, "the abandoned pod is looked at", func() bool {
		all, _ := used(t, webhook)
		return all["get /pods"]
	})
	for _, of := range []struct {
		account rights.Account
		// virtual ones are asked for by coordinators.
		virtual []string
	}{
		{webhook, []string{"witness lameduck.io/drains"}},
		{rights.Account{Namespace: ns, Name: "gateway"}, []string{"acknowledge lameduck.io/drains"}},
	} {
		all, refused := used(t, of.account)
		if len(refused) > 0 {
			t.Errorf("%s asked for what it may not: %q", of.account.Name, refused)
		}
		granted, err := rights.Granted(t.Context(), s.Kube, of.account)
		if err != nil {
			t.Fatal(err)
		}
		for _, right := range rights.Unused(granted, all) {
			if !slices.Contains(of.virtual, right) {
				t.Errorf("%s may %s and never did", of.account.Name, right)
			}
		}
		t.Logf("%s: %s", of.account.Name, strings.Join(slices.Sorted(maps.Keys(all)), ", "))
	}
}

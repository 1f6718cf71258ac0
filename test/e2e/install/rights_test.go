package install

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
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
	harness.Until(t, 30*time.Second, "path and CA are written", func() bool {
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

// asker is a pod that may acknowledge drains. No drain waits for it: it has no label of an agent.
const asker = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: asker, namespace: %[1]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s-acknowledges}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-agent}
subjects: [{kind: ServiceAccount, name: asker, namespace: %[1]s}]
---
apiVersion: v1
kind: Pod
metadata: {name: asker, namespace: %[1]s}
spec:
  serviceAccountName: asker
  containers: [{name: agent, image: none, command: [sleep, "3600"]}]
`

// asks is the right to ask at the barrier.
const asks = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s-asks}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-node}
subjects: [{kind: ServiceAccount, name: asker, namespace: %[1]s}]
`

// An agent that may acknowledge drains may not ask at the barrier for that, and is told which right
// it lacks. With the ClusterRole of the node agents it may.
func TestAnAgentNeedsTheRightToAskAtTheBarrier(t *testing.T) {
	s := open(t)
	roles, err := stage.Objects(t.Context(), s.Cluster, "barrier", "ClusterRole")
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := stage.Join(roles)
	if err != nil {
		t.Fatal(err)
	}
	ns := harness.Namespace(t, s.Kube, "asks", nil)
	for _, m := range []string{manifest, fmt.Sprintf(asker, ns)} {
		if err := s.Apply(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	pods := s.Kube.CoreV1().Pods(ns)
	harness.Until(t, time.Minute, "the pod runs", func() bool {
		p, err := pods.Get(t.Context(), "asker", metav1.GetOptions{})
		return err == nil && harness.Ready(p)
	})
	self, err := pods.Get(t.Context(), "asker", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token, err := s.Kube.CoreV1().ServiceAccounts(ns).CreateToken(t.Context(), "asker", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{"lameduck.io"},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: self.Name,
				UID: self.UID}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := s.Kube.CoreV1().ConfigMaps(stage.System).Get(t.Context(), "lameduck-ca", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	coordinators, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM([]byte(bundle.Data["ca.crt"]))
	c := client.New()
	c.HTTP = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trusted,
		ServerName: "lameduck-agents." + stage.System + ".svc"}}}
	c.Token = func() (string, error) { return token.Status.Token, nil }
	c.Boot, c.Gateway, c.Log, c.Watches = "b1", "none", slog.New(slog.DiscardHandler), watchesNothing{}
	c.Replicas([]string{"https://" + coordinators[0].Status.PodIP + ":9444"})
	running := make(chan error, 1)
	go func() { running <- c.Run(t.Context()) }()
	t.Cleanup(func() { <-running })
	// The pod stays: without the label of an agent, none has to acknowledge.
	ask := func() error {
		_, err := c.Barrier(t.Context(), wire.BarrierRequest{BoundMillis: 1000,
			Pod: drain.Pod{Namespace: ns, Name: self.Name, UID: drain.UID(self.UID)}})
		return err
	}
	want := "system:serviceaccount:" + ns + ":asker may not ask for barriers: grant the verb create on " +
		"barriers.lameduck.io by a ClusterRoleBinding, as manifests/barrier does"
	harness.Await(t, 30*time.Second, "the missing right is named", func() error {
		if err := ask(); err == nil || !strings.Contains(err.Error(), want) {
			return fmt.Errorf("answered with %v", err)
		}
		return nil
	})
	if err := s.Apply(t.Context(), fmt.Sprintf(asks, ns)); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, 30*time.Second, "with the right it is answered", ask)
}

// watchesNothing is the Watches of an agent that only asks.
type watchesNothing struct{}

func (watchesNothing) Watch(time.Time, drain.Watch, string)       {}
func (watchesNothing) Unwatch(time.Time, drain.UID, string, bool) {}
func (watchesNothing) Watched(string) []drain.UID                 { return nil }
func (watchesNothing) Reports(time.Time) []drain.Report           { return nil }

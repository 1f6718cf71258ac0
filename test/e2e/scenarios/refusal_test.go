package scenarios

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// served returns how many requests each pod has served in the phase of that name.
func served(t *testing.T, r load.Result, phase string) map[string]int {
	t.Helper()
	for _, p := range r.Phases {
		if p.Name == phase {
			return p.Pods
		}
	}
	t.Fatalf("no phase %q", phase)
	return nil
}

// drained is how long kubectl drain tries here: a dozen times.
const drained = 60 * time.Second

// An eviction that its budget refuses must take no traffic from its pod: kubectl drain comes back
// every 5 s, for as long as it takes.
func TestAnExhaustedBudgetKeepsItsTraffic(t *testing.T) {
	t.Parallel()
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "budget", nil)
	app := stage.App{Namespace: ns, Replicas: 2, Work: 20 * time.Millisecond, Node: "node-3"}
	if err := s.AddNode(t.Context(), app.Node, netip.MustParsePrefix("10.244.3.0/24")); err != nil {
		t.Fatal(err)
	}
	if err := s.InstallApp(t.Context(), app); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	sent := clients(t, address, false)
	none := intstr.FromInt32(0)
	budgets := s.Kube.PolicyV1().PodDisruptionBudgets(ns)
	if _, err := budgets.Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &none,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for {
		b, err := budgets.Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if b.Status.ObservedGeneration == b.Generation {
			break
		}
		settle(t, 50*time.Millisecond)
	}
	out, err := s.Cluster.Kubectl(t.Context(), "drain", app.Node, "--timeout="+drained.String())
	if err == nil || !strings.Contains(out, "Cannot evict pod as it would violate the pod's disruption budget.") ||
		!strings.Contains(out, "will retry after") {
		t.Errorf("kubectl drain: %v: %s", err, out)
	}
	got := sent.Answered()
	if got.Total < int(drained.Seconds())*100 {
		t.Errorf("%d requests in %s", got.Total, drained)
	}
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		// Both take turns: a pod that was unrouted at any time would have served fewer.
		if n := got.Pods[p.Name]; n < got.Total*4/10 || p.DeletionTimestamp != nil {
			t.Errorf("pod %s has served %d of %d requests, terminating %t", p.Name, n, got.Total,
				p.DeletionTimestamp != nil)
		}
	}
	t.Logf("kubectl drain tried for %s; served %v", drained, got.Pods)
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log) {
		if strings.Contains(line, `"msg":"drain"`) && strings.Contains(line, `"pod":"`+ns+"/web-") {
			t.Errorf("a drain was opened: %s", line)
		}
	}
	noRaces(t, s, ns)
}

// slowWebhook registers a webhook beside Lameduck's, for deletions of pods in ns: it sleeps and
// then allows, or denies.
func slowWebhook(t *testing.T, s *stage.Stage, ns string, sleep time.Duration, allow func() bool) {
	t.Helper()
	ca := s.Cluster.CA()
	certificate, key, err := ca.Issue("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var ask admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || ask.Request == nil {
			http.Error(w, "no review", http.StatusBadRequest)
			return
		}
		select {
		case <-time.After(sleep):
		case <-r.Context().Done():
			return
		}
		ask.Response = &admissionv1.AdmissionResponse{UID: ask.Request.UID, Allowed: allow(),
			Result: &metav1.Status{Code: http.StatusForbidden, Message: "the other one says no"}}
		ask.Request = nil
		_ = json.NewEncoder(w).Encode(ask)
	})}
	var serving sync.WaitGroup
	serving.Go(func() {
		_ = server.Serve(tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{pair}}))
	})
	fail, effects, scope := admissionregistrationv1.Fail, admissionregistrationv1.SideEffectClassNone,
		admissionregistrationv1.NamespacedScope
	configurations := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	if _, err := configurations.Create(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: ns},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "slow.example.com", FailurePolicy: &fail, SideEffects: &effects, TimeoutSeconds: ptr.To[int32](30),
			AdmissionReviewVersions: []string{"v1"},
			ClientConfig: admissionregistrationv1.WebhookClientConfig{
				URL: ptr.To("https://" + listener.Addr().String()), CABundle: ca.PEM()},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": ns}},
			// The node's last delete is not to wait for 20 s as well.
			MatchConditions: []admissionregistrationv1.MatchCondition{{Name: "not-terminating",
				Expression: "!has(oldObject.metadata.deletionTimestamp)"}},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Delete},
				Rule: admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
					Resources: []string{"pods"}, Scope: &scope},
			}},
		}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = configurations.Delete(ctx, ns, metav1.DeleteOptions{})
		server.Close()
		serving.Wait()
	})
	settle(t, time.Second) // the API server learns of it by a watch
}

// Webhooks run side by side, and the slowest decides when. Lameduck's yes is 20 s old when the pod
// goes, or never goes: in the first case it must not be routed again meanwhile, in the second it
// must get its traffic back.
func TestASecondWebhookThatIsSlow(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		allow bool
	}{{"then allows", true}, {"then denies", false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := open(t)
			ns := harness.Namespace(t, s.Kube, "second-"+strings.ReplaceAll(c.name, " ", "-"), nil)
			if err := s.InstallApp(t.Context(),
				stage.App{Namespace: ns, Replicas: 2, StartDelay: 300 * time.Millisecond,
					Work: 20 * time.Millisecond}); err != nil {
				t.Fatal(err)
			}
			address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			slowWebhook(t, s, ns, 20*time.Second, func() bool { return c.allow })
			sent := clients(t, address, false)
			pods, err := s.Pods(t.Context(), ns, "app=web")
			if err != nil {
				t.Fatal(err)
			}
			victim := pods[0].Name
			began := time.Now()
			// A client that asks once: kubectl and client-go would come back for Lameduck's 429,
			// not for a 403.
			deleted := make(chan error, 1)
			go func() { deleted <- s.Kube.CoreV1().Pods(ns).Delete(t.Context(), victim, metav1.DeleteOptions{}) }()
			settle(t, 5*time.Second)
			sent.Mark("waiting")
			err = <-deleted
			took := time.Since(began)
			if took < 20*time.Second || c.allow != (err == nil) {
				t.Errorf("after %s: %v", took, err)
			}
			sent.Mark("decided")
			if c.allow {
				if err := s.Await(t.Context(), ns, "web"); err != nil {
					t.Fatal(err)
				}
			} else {
				// The drain is abandoned 45 s after Lameduck's answer, after a look at the pod.
				settle(t, 48*time.Second-time.Since(began))
				sent.Mark("abandoned")
				settle(t, 5*time.Second)
			}
			got := sent.Answered()
			if n := served(t, got, "waiting")[victim]; n > 0 {
				t.Errorf("the pod has served %d requests after gateways stopped routing to it", n)
			}
			if !c.allow {
				if n := served(t, got, "abandoned")[victim]; n == 0 {
					t.Errorf("the pod that stays has not got its traffic back: %v", fmt.Sprint(got.Phases))
				}
			}
			noRaces(t, s, ns)
		})
	}
}

// A caller comes back every 5 s, and each time another webhook refuses: as an eviction does while
// KubeVirt migrates a virtual machine. The pod must get its traffic back meanwhile.
func TestASecondWebhookThatAlwaysDenies(t *testing.T) {
	t.Parallel()
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "always-denied", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	slowWebhook(t, s, ns, 0, func() bool { return false })
	sent := clients(t, address, false)
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	victim, began := pods[0].Name, time.Now()
	ask := func(until time.Duration) {
		for time.Since(began) < until {
			err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), victim, metav1.DeleteOptions{})
			if err == nil || !strings.Contains(err.Error(), "the other one says no") {
				t.Fatalf("the deletion after %s: %v", time.Since(began), err)
			}
			settle(t, 5*time.Second)
		}
	}
	ask(5 * time.Second)
	sent.Mark("unrouted")
	ask(60 * time.Second)
	sent.Mark("meanwhile")
	ask(130 * time.Second) // 75 s until it cools off, 45 s until its drain is abandoned
	sent.Mark("routed")
	ask(140 * time.Second)
	got := sent.Answered()
	if n := served(t, got, "unrouted")[victim]; n > 0 {
		t.Errorf("the pod has served %d requests after gateways stopped routing to it", n)
	}
	if n := served(t, got, "routed")[victim]; n == 0 {
		t.Errorf("the pod has not got its traffic back: %v", fmt.Sprint(got.Phases))
	}
	noRaces(t, s, ns)
}

package install

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
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
	// A deletion whose caller gives up while an agent has not acknowledged: a coordinator looks 45
	// s later whether the pod still exists.
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
		t.Fatalf("deleted although an agent has not acknowledged: %s", out)
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
	c.Observer = metrics.NewClient(prometheus.NewRegistry())
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

// A coordinator's token may change the CA and the path in a webhook configuration, and no other
// field: with the others it could read every Secret and change every pod.
func TestACoordinatorMayChangeCAAndPathOnly(t *testing.T) {
	s := open(t)
	token, err := s.Kube.CoreV1().ServiceAccounts(stage.System).CreateToken(t.Context(), "lameduck-webhook",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := s.Cluster.Config()
	config.CertData, config.KeyData, config.CertFile, config.KeyFile = nil, nil, "", ""
	config.BearerToken = token.Status.Token
	stolen, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	api := stolen.AdmissionregistrationV1().RESTClient()
	// With a Service, as in the manifests; the other kind has URLs here.
	dry, ignore := admissionv1.SideEffectClassNoneOnDryRun, admissionv1.Ignore
	made, err := s.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Create(t.Context(),
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "lameduck"},
			Webhooks: []admissionv1.MutatingWebhook{{
				Name: "none.lameduck.io", SideEffects: &dry, FailurePolicy: &ignore,
				AdmissionReviewVersions: []string{"v1"}, ClientConfig: admissionv1.WebhookClientConfig{
					Service: &admissionv1.ServiceReference{Namespace: stage.System, Name: "lameduck-webhook"}}}}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = s.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete(context.Background(), made.Name,
			metav1.DeleteOptions{})
	})
	harness.Until(t, 30*time.Second, "a coordinator writes CA and path", func() bool {
		got, err := s.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), made.Name,
			metav1.GetOptions{})
		return err == nil && len(got.Webhooks[0].ClientConfig.CABundle) > 0 &&
			got.Webhooks[0].ClientConfig.Service.Path != nil
	})
	set := func(key string, value any) func(object) {
		return func(o object) { o[key] = value }
	}
	rule := object{"operations": []any{"*"}, "apiGroups": []any{"*"}, "apiVersions": []any{"*"},
		"resources": []any{"*/*"}}
	fields := map[string]func(webhook object){
		"name": set("name", "others.lameduck.io"), "rules": set("rules", []any{rule}),
		"failurePolicy": set("failurePolicy", "Fail"), "timeoutSeconds": set("timeoutSeconds", 30),
		"namespaceSelector":       set("namespaceSelector", object{"matchLabels": object{"a": "b"}}),
		"objectSelector":          set("objectSelector", object{"matchLabels": object{"a": "b"}}),
		"matchPolicy":             set("matchPolicy", "Exact"),
		"sideEffects":             set("sideEffects", "None"),
		"admissionReviewVersions": set("admissionReviewVersions", []any{"v1", "v1beta1"}),
		"matchConditions":         set("matchConditions", []any{object{"name": "all", "expression": "true"}}),
		"reinvocationPolicy":      set("reinvocationPolicy", "IfNeeded"),
		"clientConfig":            set("clientConfig", object{"url": "https://192.0.2.1:9443/v1/admit/x"}),
	}
	metas := map[string]func(meta object){
		"labels": set("labels", object{"a": "b"}), "finalizers": set("finalizers", []any{"example.com/x"}),
		"annotations": set("annotations", object{"cert-manager.io/inject-ca-from": "x/y"}),
		"ownerReferences": set("ownerReferences", []any{object{"apiVersion": "v1", "kind": "Namespace",
			"name": "default", "uid": "1"}}),
	}
	// changed is the error of the API server when one configuration is changed. Nothing is written:
	// a coordinator would write it back.
	changed := func(resource string, change func(configuration object)) error {
		t.Helper()
		text, err := api.Get().Resource(resource).Name("lameduck").DoRaw(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var o object
		if err := json.Unmarshal(text, &o); err != nil {
			t.Fatal(err)
		}
		change(o)
		if text, err = json.Marshal(o); err != nil {
			t.Fatal(err)
		}
		return api.Put().Resource(resource).Name("lameduck").Param("dryRun", "All").
			SetHeader("Content-Type", "application/json").Body(text).Do(t.Context()).Error()
	}
	first := func(change func(object)) func(object) {
		return func(o object) { change(o["webhooks"].([]any)[0].(object)) }
	}
	for resource, of := range map[string]reflect.Type{
		"validatingwebhookconfigurations": reflect.TypeFor[admissionv1.ValidatingWebhook](),
		"mutatingwebhookconfigurations":   reflect.TypeFor[admissionv1.MutatingWebhook](),
	} {
		ofClient := func(change func(object)) func(object) {
			return first(func(w object) { change(w["clientConfig"].(object)) })
		}
		allowed := map[string]func(object){
			"nothing":  func(object) {},
			"caBundle": ofClient(set("caBundle", base64.StdEncoding.EncodeToString([]byte(pem)))),
		}
		refused := map[string]func(object){
			"no webhooks": set("webhooks", []any{}),
			"another webhook": func(o object) {
				w := maps.Clone(o["webhooks"].([]any)[0].(object))
				w["name"], w["rules"] = "others.lameduck.io", []any{rule}
				o["webhooks"] = append(o["webhooks"].([]any), w)
			},
		}
		for key, change := range metas {
			refused[key] = func(o object) { change(o["metadata"].(object)) }
		}
		for i := range of.NumField() {
			key, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
			if fields[key] == nil {
				t.Errorf("%s has the field %s: add it to the policy and here", of, key)
				continue
			}
			refused[key] = first(fields[key])
		}
		if resource == "mutatingwebhookconfigurations" {
			service := func(key string, value any) func(object) {
				return ofClient(func(c object) { c["service"].(object)[key] = value })
			}
			allowed["path"] = service("path", "/v1/mutate/0123456789abcdef")
			refused["service.name"], refused["service.port"] = service("name", "other"), service("port", 444)
			refused["service.namespace"] = service("namespace", "default")
		} else {
			allowed["path"] = ofClient(func(c object) { c["url"] = c["url"].(string) + "0" })
			refused["url.port"] = ofClient(func(c object) {
				c["url"] = strings.Replace(c["url"].(string), ":9443/", ":9444/", 1)
			})
			refused["service"] = first(set("clientConfig",
				object{"service": object{"namespace": "default", "name": "x"}}))
		}
		for name, change := range refused {
			harness.Await(t, 10*time.Second, resource+": "+name+" is refused", func() error {
				if err := changed(resource, change); err == nil || !strings.Contains(err.Error(),
					"coordinators may change caBundle and the path of a webhook, and nothing else") {
					return fmt.Errorf("answered with %v", err)
				}
				return nil
			})
		}
		for name, change := range allowed {
			if err := changed(resource, change); err != nil {
				t.Errorf("%s: %s: %v", resource, name, err)
			}
		}
	}
	// Without this, one of its expressions may be wrong for one of both kinds.
	harness.Await(t, 10*time.Second, "the policy is type-checked, without a warning", func() error {
		policy, err := s.Kube.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(t.Context(),
			"lameduck-certificates", metav1.GetOptions{})
		checked := policy.Status.TypeChecking
		if err == nil && (checked == nil || len(checked.ExpressionWarnings) > 0) {
			err = fmt.Errorf("status is %+v", policy.Status)
		}
		return err
	})
}

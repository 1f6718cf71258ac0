package install

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// strangeAgent is ready, has an agent's label and right, and never connects.
const strangeAgent = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: silent, namespace: %[1]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s-silent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-agent}
subjects: [{kind: ServiceAccount, name: silent, namespace: %[1]s}]
---
apiVersion: v1
kind: Pod
metadata: {name: silent, namespace: %[1]s, labels: {lameduck.io/agent: directed}, annotations: {lameduck.io/drain: disabled}}
spec:
  serviceAccountName: silent
  containers: [{name: agent, image: none, command: [sleep, "3600"]}]
`

// used reads from the audit log what a service account has asked for, as "verb group/resource", and what it was refused.
func used(t *testing.T, username string) (rights map[string]bool, refused []string) {
	t.Helper()
	file, err := os.Open(auditLog())
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rights = map[string]bool{}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb           string
			User           struct{ Username string }
			ObjectRef      *struct{ APIGroup, Resource, Subresource, Namespace, Name string }
			ResponseStatus struct{ Code int }
		}
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.User.Username != username || e.ObjectRef == nil {
			continue // the last line may be half written
		}
		resource := e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			resource += "/" + e.ObjectRef.Subresource
		}
		right := e.Verb + " " + e.ObjectRef.APIGroup + "/" + resource
		rights[right] = true
		if e.ResponseStatus.Code == 403 {
			refused = append(refused, right+" "+e.ObjectRef.Namespace+"/"+e.ObjectRef.Name)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return rights, refused
}

// granted reads from the API server what the roles allow that are bound to a service account.
func granted(t *testing.T, s *stage.Stage, namespace, name string) []string {
	t.Helper()
	var rules []rbacv1.PolicyRule
	mine := func(subjects []rbacv1.Subject) bool {
		return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
			return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == namespace && s.Name == name
		})
	}
	add := func(in string, ref rbacv1.RoleRef) {
		if ref.Kind == "ClusterRole" {
			role, err := s.Kube.RbacV1().ClusterRoles().Get(t.Context(), ref.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			rules = append(rules, role.Rules...)
			return
		}
		role, err := s.Kube.RbacV1().Roles(in).Get(t.Context(), ref.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		rules = append(rules, role.Rules...)
	}
	everywhere, err := s.Kube.RbacV1().ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range everywhere.Items {
		if mine(b.Subjects) {
			add("", b.RoleRef)
		}
	}
	here, err := s.Kube.RbacV1().RoleBindings("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range here.Items {
		if mine(b.Subjects) {
			add(b.Namespace, b.RoleRef)
		}
	}
	all := map[string]bool{}
	for _, r := range rules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					all[verb+" "+group+"/"+resource] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// mutating has the coordinator write into a MutatingWebhookConfiguration, if the manifests have none yet: one that is never called.
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
	until(t, "path and CA are written", 10*time.Second, func() bool {
		got, err := webhooks.Get(t.Context(), made.Name, metav1.GetOptions{})
		return err == nil && len(got.Webhooks[0].ClientConfig.CABundle) > 0 && strings.Contains(*got.Webhooks[0].ClientConfig.URL, "/v1/mutate/")
	})
}

// Coordinators and agents have done everything that they do, and have used each right of the manifests and asked for no other. A right that is added and not
// needed, and one that is needed and missing, shows here.
func TestEveryRightIsUsedAndNoOtherAskedFor(t *testing.T) {
	s := open(t)
	ns := namespace(t, s, "rights")
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3, Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
		t.Fatal(err)
	}
	// Acknowledged deletions, Events, tokens, rights of agents.
	if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
		t.Fatal(err)
	}
	// A deletion that is given up while somebody owes: whether its pod is still there is asked 45 s later.
	silent := namespace(t, s, "rights-silent")
	if err := s.Apply(t.Context(), fmt.Sprintf(strangeAgent, silent)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := s.Kube.CoreV1().Pods(silent).Delete(ctx, "silent", *metav1.NewDeleteOptions(0)); err != nil {
			t.Error(err)
		}
		if err := s.Kube.RbacV1().ClusterRoleBindings().Delete(ctx, silent+"-silent", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	until(t, "the silent agent is ready", time.Minute, func() bool {
		pod, err := s.Kube.CoreV1().Pods(silent).Get(t.Context(), "silent", metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
	})
	settled := time.After(2 * time.Second) // rosters
	<-settled
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	// client-go would ask again.
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", ns, "delete", "pod", pods[0].Name, "--request-timeout=1s"); err == nil {
		t.Fatalf("deleted although somebody owes: %s", out)
	}
	mutating(t, s)
	webhook := "system:serviceaccount:" + stage.System + ":lameduck-webhook"
	until(t, "the abandoned pod is looked at", 90*time.Second, func() bool {
		rights, _ := used(t, webhook)
		return rights["get /pods"]
	})
	for _, of := range []struct {
		namespace, name string
		// virtual ones are asked for by coordinators.
		virtual []string
	}{
		{stage.System, "lameduck-webhook", nil},
		{ns, "gateway", []string{"acknowledge lameduck.io/drains"}},
	} {
		rights, refused := used(t, "system:serviceaccount:"+of.namespace+":"+of.name)
		if len(refused) > 0 {
			t.Errorf("%s asked for what it may not: %q", of.name, refused)
		}
		for _, right := range granted(t, s, of.namespace, of.name) {
			// API servers that cannot begin a watch with what there is (before 1.32, or where that is switched off) are asked for a list first.
			verb, resource, _ := strings.Cut(right, " ")
			if verb == "list" && rights["watch "+resource] {
				continue
			}
			if !rights[right] && !slices.Contains(of.virtual, right) {
				t.Errorf("%s may %s and never did", of.name, right)
			}
		}
		t.Logf("%s: %s", of.name, strings.Join(slices.Sorted(maps.Keys(rights)), ", "))
	}
}

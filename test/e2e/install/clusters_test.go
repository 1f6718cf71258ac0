package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	selectors "k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// valuesOf reads a set, and renders the chart with it, its hooks too.
func valuesOf(t *testing.T, set harness.ValueSet) (values object, all map[string]object) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(set.Values), &values); err != nil {
		t.Fatal(err)
	}
	return values, chartedIn(t, "lameduck-system", values)
}

func chartedIn(t *testing.T, namespace string, values object) map[string]object {
	t.Helper()
	text, hooks, err := harness.ChartIn(t, harness.ChartDir, namespace, values)
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, text+hooks)
}

// leaves calls with each value that is no object with keys, and its path, with that value left out
// of values meanwhile.
func leaves(values object, path string, with func(path string)) {
	for _, key := range slices.Collect(maps.Keys(values)) {
		value := values[key]
		if inner := asObject(value); len(inner) > 0 {
			leaves(inner, path+key+"/", with)
			continue
		}
		delete(values, key)
		with(path + key)
		values[key] = value
	}
}

// Each value of each set has its effect, all values of the chart are in one of them, and none
// touches pods of others in the namespace.
func TestValuesOfManyClusters(t *testing.T) {
	set := map[string]bool{}
	for _, of := range harness.ValueSets {
		t.Run(of.Name, func(t *testing.T) {
			values, all := valuesOf(t, of)
			for key, wants := range of.Has {
				o, found := all[strings.TrimPrefix(key, "-")]
				if found == strings.HasPrefix(key, "-") {
					t.Errorf("%s: %t", key, found)
				}
				content, err := json.Marshal(o)
				if err != nil {
					t.Fatal(err)
				}
				for _, want := range wants {
					if !strings.Contains(string(content), want) {
						t.Errorf("%s has no %s: %s", key, want, content)
					}
				}
			}
			leaves(values, "", func(path string) {
				set[path] = true
				text, hooks, err := harness.Chart(t, harness.ChartDir, values)
				if err != nil { // such as a key that others require
					return
				}
				if without := objects(t, text+hooks); fmt.Sprint(without) == fmt.Sprint(all) {
					t.Errorf("%s has no effect", path)
				}
			})
			touchesItsOwnAlone(t, all, values["networkPolicy"] == nil)
			for key, o := range all {
				labels := asObject(asObject(o["metadata"])["labels"])
				for name, want := range map[string]string{"name": "lameduck", "instance": "lameduck", "version": "dev",
					"component": "", "part-of": "lameduck", "managed-by": "Helm"} {
					if got := labels["app.kubernetes.io/"+name]; got == nil || want != "" && got != want {
						t.Errorf("%s: app.kubernetes.io/%s is %v, want %s", key, name, got, want)
					}
				}
			}
		})
	}
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults object
	if err := yaml.Unmarshal(content, &defaults); err != nil {
		t.Fatal(err)
	}
	leaves(defaults, "", func(path string) {
		path, _, _ = strings.Cut(path, "/kubernetes.io") // a label, not a key of the chart
		for one := range set {
			if one == path || strings.HasPrefix(one, path+"/") {
				return
			}
		}
		t.Errorf("no set has %s", path)
	})
}

// touchesItsOwnAlone fails the test if what is in the release's namespace, which others may use
// too, selects pods of others or gives rights to their objects.
func touchesItsOwnAlone(t *testing.T, all map[string]object, policies bool) {
	t.Helper()
	var own []selectors.Set
	for key, o := range all {
		spec := asObject(o["spec"])
		if template := asObject(spec["template"]); len(template) > 0 && strings.Contains(key, " lameduck-system/") {
			var of metav1.ObjectMeta
			as(t, template["metadata"], &of)
			own = append(own, of.Labels)
		}
	}
	foreign := []selectors.Set{{}, {"app": "web"},
		{"app.kubernetes.io/name": "web", "app.kubernetes.io/component": "webhook"},
		{"app.kubernetes.io/component": "webhook", "lameduck.io/ordinal": "0"}, {"lameduck.io/agent": "directed"}}
	denied := make([]bool, len(own))
	found := 0
	for key, o := range all {
		kind, name, _ := strings.Cut(key, " ")
		if !strings.HasPrefix(name, "lameduck-system/") {
			continue
		}
		var selector metav1.LabelSelector
		switch spec := asObject(o["spec"]); kind {
		case "NetworkPolicy", "PodDisruptionBudget":
			is := map[string]string{"NetworkPolicy": "podSelector", "PodDisruptionBudget": "selector"}[kind]
			as(t, spec[is], &selector)
		case "Service":
			as(t, spec["selector"], &selector.MatchLabels)
		case "Role":
			for _, rule := range o["rules"].([]any) {
				rule := fmt.Sprint(rule)
				// The roles view and edit are for operators: the chart does not bind them.
				if !strings.HasSuffix(name, "-view") && !strings.HasSuffix(name, "-edit") &&
					!strings.Contains(rule, "resourceNames:[lameduck-") &&
					!strings.Contains(rule, "resources:[endpointslices] verbs:[list watch]") {
					t.Errorf("%s has rights to objects of others: %s", key, rule)
				}
			}
			continue
		case "RoleBinding":
			if role := fmt.Sprint(o["roleRef"]); strings.Contains(role, "-view") || strings.Contains(role, "-edit") {
				t.Errorf("%s binds %s", key, role)
			}
			continue
		default:
			continue
		}
		selects, err := metav1.LabelSelectorAsSelector(&selector)
		if err != nil {
			t.Fatal(err)
		}
		for _, pod := range foreign {
			if selects.Matches(pod) {
				t.Errorf("%s selects a pod of others: %v", key, pod)
			}
		}
		some := false
		for i, pod := range own {
			if !selects.Matches(pod) {
				continue
			}
			some = true
			if kind == "NetworkPolicy" {
				denied[i] = true
				var policy networkingv1.NetworkPolicy
				as(t, o, &policy)
				if open := len(policy.Spec.Ingress) > 0; open && pod["app.kubernetes.io/component"] != "webhook" {
					t.Errorf("%s opens %v", key, pod)
				}
			}
		}
		if !some {
			t.Errorf("%s selects no pod: %v", key, selects)
		}
		if kind == "NetworkPolicy" {
			found++
		}
	}
	if policies && (found != 2 || slices.Contains(denied, false)) || !policies && found > 0 || len(own) == 0 {
		t.Errorf("%d policies for the pods %v: %v", found, own, denied)
	}
	for _, kind := range []string{"Validating", "Mutating"} {
		for _, w := range asList(all[kind+"WebhookConfiguration <nil>/lameduck"]["webhooks"]) {
			if text := fmt.Sprint(w.(object)["namespaceSelector"]); !strings.Contains(text, "lameduck-system") {
				t.Errorf("pods of others in the namespace wait: %s", text)
			}
		}
	}
}

// Each set on an API server with the quotas of GKE and with Pod Security: not only the objects are
// taken, also the pods that controllers make of them. No node runs these.
func TestClustersTakeTheChart(t *testing.T) {
	c := cluster.New(t, cluster.Options{NoScheduler: true, // unbound pods go at once
		APIServer: []string{fileFlag(t, "admission-control-config-file", harness.PriorityLimits),
			"--disable-admission-plugins=TaintNodesByCondition"},
		ControllerManager: []string{"--controllers=*,-node-lifecycle-controller"}})
	installDefinitions(t, c, certManager, "deploy/crds", "crd-certificates.yaml", "crd-issuers.yaml")
	installDefinitions(t, c, prometheusOperator, "example/prometheus-operator-crd",
		"monitoring.coreos.com_podmonitors.yaml", "monitoring.coreos.com_prometheusrules.yaml")
	kube, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	// The DaemonSet makes a pod for it.
	if _, err := kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1",
		Labels: map[string]string{corev1.LabelOSStable: "linux", corev1.LabelHostname: "node-1"}}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"edge", "front", "shop"} {
		harness.Namespace(t, kube, ns, nil)
	}
	apply := func(t *testing.T, all map[string]object, leaveOut string) {
		t.Helper()
		// As Helm does, what others need comes first.
		var texts [3]strings.Builder
		for key, o := range all {
			kind, _, _ := strings.Cut(key, " ")
			i := 1
			switch kind {
			case "Namespace":
				i = 0
			case "Deployment", "DaemonSet", "Job":
				i = 2
			case leaveOut:
				continue
			}
			texts[i].WriteString("---\n" + text(t, o))
		}
		if out, err := c.KubectlInput(t.Context(), texts[0].String()+texts[1].String()+texts[2].String(), "apply",
			"--server-side", "--force-conflicts", "--validate=strict", "-f", "-"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	// made is nil once there is a pod of each.
	made := func(all map[string]object) error {
		for key := range all {
			kind, name, _ := strings.Cut(key, " ")
			ns, name, _ := strings.Cut(name, "/")
			is := ""
			var got, updated int32
			switch kind {
			case "Deployment":
				d, err := kube.AppsV1().Deployments(ns).Get(t.Context(), name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				is, got, updated = fmt.Sprint(d.Status.Conditions), d.Status.UpdatedReplicas, d.Status.UpdatedReplicas
			case "DaemonSet":
				d, err := kube.AppsV1().DaemonSets(ns).Get(t.Context(), name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				got, updated = d.Status.CurrentNumberScheduled, d.Status.UpdatedNumberScheduled
				if d.Status.ObservedGeneration < d.Generation {
					updated = 0
				}
			case "Job":
				j, err := kube.BatchV1().Jobs(ns).Get(t.Context(), name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				got, updated = j.Status.Active, j.Status.Active
			default:
				continue
			}
			if got != 1 || updated != 1 {
				return fmt.Errorf("%s has %d pods, %d of them updated: %s", key, got, updated, is)
			}
		}
		return nil
	}
	for i, of := range harness.ValueSets {
		t.Run(of.Name, func(t *testing.T) {
			var values object
			if err := yaml.Unmarshal([]byte(of.Values), &values); err != nil {
				t.Fatal(err)
			}
			ns := fmt.Sprint("release-", i)
			all := chartedIn(t, ns, values)
			if all["Namespace <nil>/"+ns] == nil {
				level := "restricted"
				if strings.Contains(of.Values, "hostNetwork") {
					level = "privileged"
				}
				harness.Namespace(t, kube, ns, map[string]string{"pod-security.kubernetes.io/enforce": level})
			}
			findings := func(args ...string) string {
				out, _ := exec.CommandContext(t.Context(), filepath.Join(harness.Programs(t), "kubectl-lameduck"),
					append(args, "check", "--kubeconfig", c.Kubeconfig(), "--lameduck-namespace", ns)...).Output()
				return string(out)
			}
			if i == 0 || i == 1 {
				if out := findings("--pre"); i == 0 && !strings.Contains(out, "note     namespace "+ns+
					"\n         it has no ResourceQuota for priority class system-cluster-critical") {
					t.Errorf("check --pre: %s", out)
				}
				// Without the chart's quotas the classes of the system are refused: in the first
				// set's namespace, and in that of the second set's node agents.
				apply(t, all, "ResourceQuota")
				harness.Await(t, time.Minute, "the API server refuses the pods", func() error {
					refused, err := kube.CoreV1().Events("").List(t.Context(), metav1.ListOptions{
						FieldSelector: "reason=FailedCreate"})
					if err != nil {
						return err
					}
					for _, e := range refused.Items {
						if (e.Namespace == ns && i == 0 || e.Namespace == "lameduck-node") &&
							strings.Contains(e.Message, "insufficient quota to match these scopes: [{PriorityClass") {
							return nil
						}
					}
					return fmt.Errorf("%v", refused.Items)
				})
				if made(all) == nil {
					t.Error("there are pods without a quota")
				}
				of := []string{"Deployment " + ns + "/lameduck-webhook-0", "DaemonSet lameduck-node/lameduck-node"}[i]
				harness.Await(t, time.Minute, "check names the quota", func() error {
					if out := findings(); !strings.Contains(out, "error    "+of+"\n         its pods are refused: ") ||
						!strings.Contains(out, "insufficient quota to match these scopes") ||
						strings.Contains(out, "there is no coordinator") || strings.Contains(out, "have no agent") {
						return errors.New(out)
					}
					return nil
				})
			}
			apply(t, all, "")
			harness.Await(t, time.Minute, "there is a pod of each", func() error { return made(all) })
		})
	}
}

// as decodes what YAML has made of an object of the API.
func as(t *testing.T, from, into any) {
	t.Helper()
	content, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(content, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func asList(value any) []any {
	list, _ := value.([]any)
	return list
}

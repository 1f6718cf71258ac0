package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

type object = map[string]any

func manifests(path string) string { return filepath.Join(stage.Manifests(), "..", path) }

// objects reads manifests into kind/namespace/name and object.
func objects(t *testing.T, text string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for _, document := range strings.Split("\n"+text, "\n---\n") {
		var o object
		if err := yaml.UnmarshalStrict([]byte(document+"\n"), &o); err != nil {
			t.Fatalf("%v in %s", err, document)
		}
		if len(o) == 0 {
			continue
		}
		meta := o["metadata"].(object)
		key := fmt.Sprint(o["kind"], " ", meta["namespace"], "/", meta["name"])
		if _, twice := all[key]; twice {
			t.Errorf("%s is there twice", key)
		}
		all[key] = o
	}
	return all
}

func kustomized(t *testing.T, s *stage.Stage, path string) string {
	t.Helper()
	out, err := s.Cluster.Kubectl(t.Context(), "kustomize", manifests(path))
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return out
}

// charted renders the chart as helm template --no-hooks does.
func charted(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	text, _, err := harness.Chart(t, harness.ChartDir, values)
	return text, err
}

// plain leaves out what the chart alone adds.
func plain(all map[string]object) map[string]object {
	for _, o := range all {
		harness.Plain(o)
	}
	return all
}

// Operators may choose between kustomize and Helm, and get the same.
func TestTheChartIsTheManifests(t *testing.T) {
	s := open(t)
	for path, certificates := range map[string]string{"base": "managed", "overlays/cert-manager": "certManager",
		"overlays/own-certificates": "own"} {
		chart, err := charted(t, map[string]any{"createNamespace": true, "certificates": certificates})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(plain(objects(t, kustomized(t, s, path))), plain(objects(t, chart))); diff != "" {
			t.Errorf("%s (-) and certificates=%s (+): %s", path, certificates, diff)
		}
	}
	for _, with := range []struct{ base, barrier, certificates string }{
		{"base", "barrier", "managed"},
		{"overlays/cert-manager", "overlays/cert-manager-barrier", "certManager"},
		{"overlays/own-certificates", "barrier", "own"},
	} {
		chart, err := charted(t, map[string]any{"createNamespace": true, "certificates": with.certificates,
			"barrier": map[string]any{"enabled": true}})
		if err != nil {
			t.Fatal(err)
		}
		both := objects(t, kustomized(t, s, with.base))
		maps.Copy(both, objects(t, kustomized(t, s, with.barrier)))
		if diff := cmp.Diff(plain(both), plain(objects(t, chart))); diff != "" {
			t.Errorf("%s and %s (-) and barrier.enabled=true (+): %s", with.base, with.barrier, diff)
		}
	}
	// The path in the webhook configuration can only be written after the install.
	_, text, err := harness.Chart(t, harness.ChartDir, map[string]any{"certificates": "own"})
	if err != nil || strings.Contains(text, "helm.sh/hook: post-install") ||
		!strings.Contains(text, "helm.sh/hook: post-upgrade,test") {
		t.Errorf("with certificates=own: %v, %s", err, text)
	}
	if _, text, err = harness.Chart(t, harness.ChartDir, nil); err != nil {
		t.Fatal(err)
	}
	hooks := objects(t, text)
	for key, o := range hooks {
		meta := o["metadata"].(object)
		if !strings.Contains(fmt.Sprint(meta["annotations"]), "helm.sh/hook:post-install,post-upgrade,test") {
			t.Errorf("%s is no hook", key)
		}
		// However it ends, nothing of it is left.
		if !strings.Contains(fmt.Sprint(meta["annotations"]),
			"helm.sh/hook-delete-policy:before-hook-creation,hook-succeeded,hook-failed") {
			t.Errorf("%s stays: %v", key, meta["annotations"])
		}
		if meta["namespace"] == "default" {
			t.Errorf("%s is in other people's namespace", key)
		}
		delete(meta, "annotations")
	}
	if diff := cmp.Diff(plain(objects(t, kustomized(t, s, "check"))), plain(hooks)); diff != "" {
		t.Errorf("manifests/check (-) and the chart's hooks (+): %s", diff)
	}
}

// A quota for a priority class goes with the class.
func TestTheChartsPriorityClasses(t *testing.T) {
	for class, quotas := range map[string]int{"system-node-critical": 2, "mine": 0, "": 0} {
		values := map[string]any{"barrier": map[string]any{"enabled": true, "priorityClassName": class},
			"priorityClassName": class}
		text, err := charted(t, values)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for key, o := range objects(t, text) {
			spec, _ := o["spec"].(object)
			switch o["kind"] {
			case "ResourceQuota":
				found++
				if !strings.Contains(fmt.Sprint(spec["scopeSelector"]),
					"operator:In scopeName:PriorityClass values:["+class+"]") {
					t.Errorf("%s is for %v", key, spec)
				}
			case "Deployment", "DaemonSet":
				if got, _ := spec["template"].(object)["spec"].(object)["priorityClassName"].(string); got != class {
					t.Errorf("%s has the priority %q, want %q", key, got, class)
				}
			}
		}
		if found != quotas {
			t.Errorf("priority %q: %d quotas, want %d", class, found, quotas)
		}
	}
}

// For the agents of a gateway the chart creates what that gateway's folder in manifests has: their
// file, which the agent accepts, and their rights, under other names. The sidecar is a patch for
// both.
func TestTheChartsAgents(t *testing.T) {
	without, err := charted(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	read := func(path string) string {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	paths, err := filepath.Glob(manifests("*/agent.yaml"))
	if err != nil || len(paths) < 7 {
		t.Fatalf("%q, %v", paths, err)
	}
	for _, path := range paths {
		folder := filepath.Dir(path)
		t.Run(filepath.Base(folder), func(t *testing.T) {
			var file object
			if err := yaml.UnmarshalStrict([]byte(read(path)), &file); err != nil {
				t.Fatal(err)
			}
			directed, observed := strings.CutSuffix(folder, "-observed")
			want := bindings(t, objects(t, read(filepath.Join(directed, "rbac.yaml"))))
			if observed && strings.Contains(read(filepath.Join(folder, "kustomization.yaml")), "kind: RoleBinding") {
				delete(want, "RoleBinding shop lameduck-agent-endpoints") // as the kustomization does
			}
			subject := want["ClusterRoleBinding <nil> lameduck-agent"]["subjects"].([]any)[0].(object)
			if all, ok := strings.CutPrefix(fmt.Sprint(subject["name"]), "system:serviceaccounts:"); ok {
				subject = object{"name": "*", "namespace": all}
			}
			section := file["gateway"].(object)
			kind := slices.Collect(maps.Keys(section))[0]
			text, err := charted(t, object{"gateways": []any{object{"name": "mine", "selector": "app=mine",
				"kind": strings.TrimSuffix(kind, "Observed"), "namespace": subject["namespace"], "all": true,
				"agent": object{"serviceAccount": subject["name"], "gateway": section}}}})
			if err != nil {
				t.Fatal(err)
			}
			got := objects(t, text)
			if config := fmt.Sprint(got["ConfigMap lameduck-system/lameduck-coordinator"]["data"]); !strings.Contains(
				config, "name: mine") || strings.Contains(config, "agent:") {
				t.Errorf("the coordinator's file: %s", config)
			}
			for key := range objects(t, without) {
				delete(got, key)
			}
			key := fmt.Sprintf("ConfigMap %s/lameduck-agent-mine", subject["namespace"])
			data, _ := got[key]["data"].(object)
			delete(got, key)
			rendered, _ := data["agent.yaml"].(string)
			var is object
			if err := yaml.UnmarshalStrict([]byte(rendered), &is); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(file, is); diff != "" || len(data) != 1 {
				t.Errorf("%s (-) and %s of the chart (+): %s", path, key, diff)
			}
			if diff := cmp.Diff(want, bindings(t, plain(got))); diff != "" {
				t.Errorf("rbac.yaml (-) and the chart (+): %s", diff)
			}
			accepted(t, rendered)
		})
	}
}

// bindings are objects by the kind of the binding, its namespace and the role, without their names.
// An object that binds nothing is an error.
func bindings(t *testing.T, all map[string]object) map[string]object {
	t.Helper()
	by := map[string]object{}
	for key, o := range all {
		role, is := o["roleRef"].(object)
		if o["kind"] == "ServiceAccount" {
			continue
		} else if !is {
			t.Errorf("%s is no binding", key)
			continue
		}
		meta := o["metadata"].(object)
		delete(meta, "name")
		by[fmt.Sprint(o["kind"], " ", meta["namespace"], " ", role["name"])] = o
	}
	return by
}

// accepted fails the test unless the agent starts with a file, up to where it needs a cluster: the
// API server, or for the kind kernel a pod's cgroup.
func accepted(t *testing.T, config string) {
	t.Helper()
	dir := t.TempDir()
	folders := regexp.MustCompile("/var/run/secrets/lameduck|/var/lib/lameduck|/run/haproxy|/host")
	config = folders.ReplaceAllString(config, dir)
	for name, content := range map[string]string{"token": "token", "agent.yaml": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	agent := exec.CommandContext(t.Context(), filepath.Join(harness.Programs(t), "agent"),
		"--config="+filepath.Join(dir, "agent.yaml"))
	agent.Env = []string{"POD_UID=00000000-0000-0000-0000-000000000001"}
	out, err := agent.CombinedOutput()
	missing := "not in a cluster"
	if strings.Contains(config, "kernel:") {
		missing = ": kernel: cgroups "
	}
	if err == nil || !strings.Contains(string(out), missing) {
		t.Errorf("%v: %s", err, out)
	}
}

// What makes no sense is refused. What each value does is in TestValuesOfManyClusters.
func TestTheChartsValues(t *testing.T) {
	gateway := func(key string, value any) map[string]any {
		g := map[string]any{"name": "public", "kind": "traefik", "namespace": "edge", "selector": "app=traefik"}
		g[key] = value
		return map[string]any{"gateways": []any{g}}
	}
	agent := func(section object) map[string]any {
		return gateway("agent", object{"serviceAccount": "traefik", "gateway": section})
	}
	poll := object{"population": "edge/x", "admin": "http://127.0.0.1:8080"}
	twice := slices.Repeat(gateway("all", true)["gateways"].([]any), 2)
	for want, values := range map[string]map[string]any{
		"missing property 'serviceAccount'": gateway("agent", object{"gateway": object{"traefik": poll}}),
		"'nginx' not allowed":               agent(object{"nginx": poll}),
		"'kubeProxy' not allowed":           agent(object{"kubeProxy": object{}}),
		"minProperties: got 0, want 1":      agent(object{}),
		"maxProperties: got 2, want 1":      agent(object{"traefik": poll, "envoy": poll}),
		"missing property 'services'":       agent(object{"kernel": object{"podUID": "1"}}),
		"kernel/services': minItems":        agent(object{"kernel": object{"podUID": "1", "services": []any{}}}),
		"'web' does not match pattern":      agent(object{"traefik": object{"services": []any{"web"}}}),
		"traefik/services': got string":     agent(object{"traefik": object{"services": "shop/web"}}),
		"at '/config': additional":          {"config": gateway("all", true)},

		"gateways[0].agent.gateway.envoy: the kind of this gateway is traefik": agent(object{"envoy": poll}),
		"gateways[1].name: public: another gateway has this name, too":         {"gateways": twice},

		"'selectors' not allowed": gateway("selectors", "app=traefik"),
		"/gateways/0/kind":        gateway("kind", "nginx"),
		"missing property 'selector'": {"gateways": []any{map[string]any{"name": "public", "kind": "traefik",
			"namespace": "edge"}}},
		"at '/certificates': value must be one of": {"certificates": "letsEncrypt"},
		"at '/webhook/entries': minimum":           {"webhook": map[string]any{"entries": 0}},
	} {
		if _, err := charted(t, values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", values, err)
		}
	}
	one, err := charted(t, map[string]any{"webhook": map[string]any{"entries": 1}})
	if err != nil {
		t.Fatal(err)
	}
	if hooks := objects(t, one)["ValidatingWebhookConfiguration <nil>/lameduck"]["webhooks"].([]any); len(hooks) != 1 ||
		strings.Count(one, "kind: Deployment\n") != 1 {
		t.Errorf("with webhook.entries=1: %v", hooks)
	}
	values := object{"barrier": object{"enabled": true}, "config": object{"barrier": object{"image": "mine/wait:1"}}}
	if text, err := charted(t, values); err != nil || !strings.Contains(text, "image: mine/wait:1\n") ||
		strings.Contains(text, "lameduck-wait:dev") {
		t.Errorf("config.barrier.image does not win: %v", err)
	}
}

// Gateways that the chart's values declare are those of the coordinator: one without a pod is
// named.
func TestTheChartsGateways(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "declared-", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	text, err := charted(t, map[string]any{"gateways": []any{map[string]any{"name": "public", "kind": "traefik",
		"namespace": "edge", "selector": "app=traefik", "services": []any{ns + "/web"}}}})
	if err != nil {
		t.Fatal(err)
	}
	const address = "127.0.0.1:19445"
	dir := t.TempDir()
	var config object
	data := objects(t, text)["ConfigMap lameduck-system/lameduck-coordinator"]["data"].(object)
	if err := yaml.Unmarshal([]byte(data["coordinator.yaml"].(string)), &config); err != nil {
		t.Fatal(err)
	}
	addresses := object{"dashboard": address}
	for _, name := range []string{"admission", "agents", "metrics", "probes"} {
		addresses[name] = "127.0.0.1:0"
	}
	maps.Copy(config, object{"addresses": addresses, "times": object{"shutdownDelay": "0s"},
		"certificates": object{"dir": dir, "admissionSecretFile": filepath.Join(dir, "secret")}})
	file, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := cluster.NewCA()
	if err == nil {
		err = ca.IssueFiles(dir, "localhost")
	}
	for name, content := range map[string]string{"coordinator.yaml": string(file),
		"secret": strings.Repeat("s", 32)} {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--config=" + filepath.Join(dir, "coordinator.yaml"), "--kubeconfig=" + s.Cluster.Kubeconfig(),
		"--namespace=" + stage.System, "--replica=charted"}
	var log bytes.Buffer
	coordinator := exec.CommandContext(t.Context(), filepath.Join(harness.Programs(t), "webhook"), args...)
	coordinator.Cancel = func() error { return coordinator.Process.Signal(os.Interrupt) }
	coordinator.Stderr = &log
	if err := coordinator.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := coordinator.Wait(); !errors.Is(err, context.Canceled) { // that is: with 0, once asked to
			t.Errorf("the coordinator ends with %v: %s", err, &log)
		}
	})
	harness.Await(t, 30*time.Second, "the coordinator names the gateway", func() error {
		response, err := http.Get("http://" + address + "/v1/coverage")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if want := "there is no pod in namespace edge"; err == nil && !strings.Contains(string(answer), want) {
			return fmt.Errorf("no %q in %s", want, answer)
		}
		return err
	})
}

// installDefinitions gives the API server CustomResourceDefinitions: files in a folder of a module
// of Go.
func installDefinitions(t *testing.T, c *cluster.Cluster, of, folder string, files ...string) {
	t.Helper()
	out, err := exec.Command("go", "mod", "download", "-json", of).Output()
	var module struct{ Dir string }
	if err != nil || json.Unmarshal(out, &module) != nil {
		cluster.Missing(t, "definitions of "+of, fmt.Sprintf("go mod download: %v: %s", err, out))
	}
	for _, name := range files {
		content, err := os.ReadFile(filepath.Join(module.Dir, folder, name))
		if err != nil {
			t.Fatal(err)
		}
		var plain strings.Builder
		for line := range strings.Lines(string(content)) {
			if !strings.Contains(line, "{{") { // labels of a chart
				plain.WriteString(line)
			}
		}
		if out, err := c.KubectlInput(t.Context(), plain.String(), "apply", "--server-side",
			"-f", "-"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := c.Established(t.Context(), plain.String()); err != nil {
			t.Fatal(err)
		}
	}
}

// Everything that is in manifests, as operators apply it, on an API server that knows every field
// and enforces Pod Security.
func TestEveryObjectIsAccepted(t *testing.T) {
	s := open(t)
	installDefinitions(t, s.Cluster, certManager, "deploy/crds", "crd-certificates.yaml", "crd-issuers.yaml")
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{
		"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted",
	}}}
	if _, err := s.Kube.CoreV1().Namespaces().Create(t.Context(), shop, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nodes := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "lameduck-node",
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "privileged"}}}
	if _, err := s.Kube.CoreV1().Namespaces().Create(t.Context(), nodes, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// A dry run makes no namespace.
	if err := s.Apply(t.Context(), "{apiVersion: v1, kind: Namespace, metadata: {name: lameduck-check}}"); err != nil {
		t.Fatal(err)
	}
	// Without the quotas of the manifests the API server refuses their priority classes.
	for key, o := range objects(t, kustomized(t, s, "barrier")) {
		if strings.HasPrefix(key, "ResourceQuota ") {
			if err := s.Apply(t.Context(), text(t, o)); err != nil {
				t.Fatal(err)
			}
		}
	}
	harness.Until(t, 30*time.Second, "the quota is counted", func() bool {
		got, err := s.Kube.CoreV1().ResourceQuotas("lameduck-node").Get(t.Context(), "lameduck-priority",
			metav1.GetOptions{})
		return err == nil && len(got.Status.Hard) > 0
	})
	for _, path := range []string{"base", "overlays/cert-manager", "overlays/own-certificates",
		"haproxy", "check", "barrier", "quickstart"} {
		t.Run(path, func(t *testing.T) {
			out, err := s.Cluster.Kubectl(t.Context(), "apply", "--dry-run=server",
				"--validate=strict", "-k", manifests(path))
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for line := range strings.Lines(out) {
				// The stage has installed some of it without kubectl apply.
				if strings.HasPrefix(line, "Warning:") && !strings.Contains(line, "last-applied-configuration") {
					t.Error(strings.TrimSpace(line))
				}
			}
			// Pod Security only warns of what makes pods. Of a pod it is said by the API server
			// whether it may be.
			for key, o := range objects(t, kustomized(t, s, path)) {
				kind := o["kind"]
				if kind != "Deployment" && kind != "DaemonSet" && kind != "Job" {
					continue
				}
				meta := o["metadata"].(object)
				template := o["spec"].(object)["template"].(object)
				template["apiVersion"], template["kind"] = "v1", "Pod"
				own := template["metadata"].(object)
				own["name"], own["namespace"] = "accepted", meta["namespace"]
				if path == "haproxy" || path == "check" || path == "barrier" {
					delete(template["spec"].(object), "serviceAccountName") // it is not there yet
				}
				text, err := yaml.Marshal(template)
				if err != nil {
					t.Fatal(err)
				}
				if out, err := s.Cluster.KubectlInput(t.Context(), string(text), "create", "--dry-run=server",
					"--validate=strict", "-f", "-"); err != nil {
					t.Errorf("a pod of %s: %v: %s", key, err, out)
				}
			}
		})
	}
}

// The CA and the path are in the API server only. If each apply of the manifests removed them,
// no deletion would wait until a coordinator has written them again.
func TestApplyingAgainChangesNothing(t *testing.T) {
	s := open(t)
	chart, err := charted(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	var manifest string
	for key, o := range objects(t, chart) {
		if strings.HasPrefix(key, "ValidatingWebhookConfiguration") {
			o["metadata"].(object)["name"] = "applied-again"
			for _, w := range o["webhooks"].([]any) {
				w.(object)["namespaceSelector"] = object{"matchLabels": object{"no-such-label": "x"}}
			}
			text, err := yaml.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			manifest = string(text)
		}
	}
	for _, how := range [][]string{
		{"apply", "-f", "-"}, {"apply", "--server-side", "--field-manager=helm", "-f", "-"},
	} {
		apply := func() {
			t.Helper()
			if out, err := s.Cluster.KubectlInput(t.Context(), manifest, how...); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		apply()
		webhooks := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations()
		got, err := webhooks.Get(t.Context(), "applied-again", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		path := "/v1/admit/0123456789abcdef"
		for i := range got.Webhooks {
			got.Webhooks[i].ClientConfig.Service.Path, got.Webhooks[i].ClientConfig.CABundle = &path, []byte(pem)
		}
		if _, err := webhooks.Update(t.Context(), got,
			metav1.UpdateOptions{FieldManager: "lameduck-webhook"}); err != nil {
			t.Fatal(err)
		}
		apply()
		if got, err = webhooks.Get(t.Context(), "applied-again", metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, w := range got.Webhooks {
			if c := w.ClientConfig; c.Service.Path == nil || *c.Service.Path != path || len(c.CABundle) == 0 {
				t.Errorf("%q: %+v", how, c)
			}
		}
		if err := webhooks.Delete(t.Context(), "applied-again", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// pem is a certificate without an owner.
const pem = `-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUG7+2Bz2LrZWSdyS7g9u7CsnNIwwwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEyMTE2MDIyNVoYDzIxMjYxMDI4MTYw
MjI1WjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARusY9E04QwFUHZJ+SGBcVIDP1UqJiidxlQf+eH8sn+H0oFCvyKx7FhKvun3wNo
aRCKL7Kcz4C7Bzr4/iMthHGlo1MwUTAdBgNVHQ4EFgQU+EgdBvgtuS7slaIaXV3D
JuoNUuAwHwYDVR0jBBgwFoAU+EgdBvgtuS7slaIaXV3DJuoNUuAwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAQzkeIN1hRAcfkp6zORk3HIYGk+Gpw
1STC2u7vPnPlbgIhAJVzUzcqVbxOyQ4Q2BbtsG88klDqIOIZLBJZCu7QRAQv
-----END CERTIFICATE-----
`

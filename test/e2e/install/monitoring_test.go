package install

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// monitoringOf renders the chart with all objects of monitoring, and returns these.
func monitoringOf(t *testing.T, more object) map[string]object {
	t.Helper()
	values := object{}
	for _, name := range []string{"podMonitor", "prometheusRule", "dashboard"} {
		of := object{"enabled": true}
		for key, value := range more {
			of[key] = value
		}
		values[name] = of
	}
	with, err := charted(t, object{"monitoring": values, "barrier": object{"enabled": true,
		"metricsPort": 9111}})
	if err != nil {
		t.Fatal(err)
	}
	without, err := charted(t, object{"barrier": object{"enabled": true, "metricsPort": 9111}})
	if err != nil {
		t.Fatal(err)
	}
	all, none := objects(t, with), objects(t, without)
	for key := range none {
		delete(all, key)
	}
	return all
}

// The chart's alerts and dashboard are those of manifests/monitoring, and the operator's API takes
// each object.
func TestTheChartsMonitoring(t *testing.T) {
	all := monitoringOf(t, nil)
	if len(all) != 5 {
		t.Errorf("%d objects, want 3 PodMonitors, a PrometheusRule and a ConfigMap", len(all))
	}
	rules, err := os.ReadFile(manifests("monitoring/rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want object
	if err := yaml.Unmarshal(rules, &want); err != nil {
		t.Fatal(err)
	}
	spec := all["PrometheusRule lameduck-system/lameduck"]["spec"].(object)
	if diff := cmp.Diff(want, spec); diff != "" {
		t.Errorf("manifests/monitoring (-) and the PrometheusRule (+): %s", diff)
	}
	path := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(path, []byte(text(t, spec)), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool := harness.Program(t, "promtool", "apt-get install prometheus")
	if out, err := exec.Command(promtool, "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("promtool check rules: %v: %s", err, out)
	}
	dashboard, err := os.ReadFile(manifests("monitoring/dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	config := all["ConfigMap lameduck-system/lameduck-dashboard"]
	if got := config["data"].(object)["lameduck.json"]; got != string(dashboard) {
		t.Errorf("the dashboard is %v", cmp.Diff(string(dashboard), got))
	}
	if labels := config["metadata"].(object)["labels"].(object); labels["grafana_dashboard"] != "1" {
		t.Errorf("the sidecar looks for a label that is not in %v", labels)
	}

	s := open(t)
	installDefinitions(t, s.Cluster, prometheusOperator, "example/prometheus-operator-crd",
		"monitoring.coreos.com_podmonitors.yaml", "monitoring.coreos.com_prometheusrules.yaml")
	for key, o := range all {
		if out, err := s.Cluster.KubectlInput(t.Context(), text(t, o), "apply", "--dry-run=server", "--validate=strict",
			"-f", "-"); err != nil {
			t.Errorf("%s: %v: %s", key, err, out)
		}
	}
	more := object{"namespace": "observed", "labels": object{"release": "prometheus"}}
	for key, o := range monitoringOf(t, more) {
		meta := o["metadata"].(object)
		labels := meta["labels"].(object)
		if meta["namespace"] != "observed" || labels["release"] != "prometheus" ||
			labels["app.kubernetes.io/name"] != "lameduck" {
			t.Errorf("%s is in %v, with %v", key, meta["namespace"], labels)
		}
	}
	if len(monitoringOf(t, more)) != len(all) {
		t.Error("objects are lost in another namespace")
	}
}

// What the PodMonitors select is there, by the labels of pods and the names of ports.
func TestThePodMonitorsSelectWhatIsInstalled(t *testing.T) {
	s := open(t)
	monitors := monitoringOf(t, nil)
	for name, of := range map[string]struct{ folder, key string }{
		"lameduck-webhook": {"base", "Deployment lameduck-system/lameduck-webhook-0"},
		"lameduck-agent":   {"haproxy", "Deployment shop/gateway"},
		"lameduck-node":    {"barrier", "DaemonSet lameduck-node/lameduck-node"},
	} {
		monitor := monitors["PodMonitor lameduck-system/"+name]["spec"].(object)
		workload := objects(t, kustomized(t, s, of.folder))[of.key]
		namespaces := monitor["namespaceSelector"].(object)
		in := workload["metadata"].(object)["namespace"]
		if namespaces["any"] != true && fmt.Sprint(namespaces["matchNames"]) != fmt.Sprint([]any{in}) {
			t.Errorf("%s looks in %v, and %s is in %v", name, namespaces, of.key, in)
		}
		labels := workload["spec"].(object)["template"].(object)["metadata"].(object)["labels"].(object)
		selector := monitor["selector"].(object)
		for key, value := range asObject(selector["matchLabels"]) {
			if labels[key] != value {
				t.Errorf("%s selects %s=%v, and %s has %v", name, key, value, of.key, labels)
			}
		}
		if selector["matchExpressions"] != nil && labels["lameduck.io/agent"] == nil {
			t.Errorf("%s does not select %s, which has %v", name, of.key, labels)
		}
		endpoint := monitor["podMetricsEndpoints"].([]any)[0].(object)
		ports := map[any]bool{}
		for _, target := range discovered(workload, "10.0.0.1") {
			ports[target["__meta_kubernetes_pod_container_port_name"]] = true
		}
		if port := endpoint["port"]; port != nil && !ports[port] {
			t.Errorf("%s scrapes port %v, and %s has %v", name, port, of.key, ports)
		} else if port == nil && (len(ports) != 1 || !ports[""] ||
			!strings.Contains(fmt.Sprint(endpoint["relabelings"]), "replacement:$1:9111")) {
			t.Errorf("%s scrapes %v, and %s has the ports %v", name, endpoint, of.key, ports)
		}
	}
}

func asObject(value any) object {
	o, _ := value.(object)
	return o
}

// prometheusOperator is whose definitions the API server is given.
const prometheusOperator = "github.com/prometheus-operator/prometheus-operator@v0.85.0"

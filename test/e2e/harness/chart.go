package harness

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// ChartDir is the folder of the chart.
var ChartDir = filepath.Join(Repository, "charts", "lameduck")

// Chart renders a chart, a folder or an archive, as helm template does with Helm's own engine: the
// objects that are installed, and those of the hooks that check them. A value that is not there is
// an error.
func Chart(t testing.TB, path string, values map[string]any) (objects, hooks string, err error) {
	t.Helper()
	return ChartIn(t, path, stage.System, values)
}

// ChartIn is Chart for a release in a namespace.
func ChartIn(t testing.TB, path, namespace string, values map[string]any) (objects, hooks string, err error) {
	t.Helper()
	return render(t, path, namespace, values, engine.Engine{Strict: true})
}

// ForeignChart renders a chart that is not Lameduck's, and may refer to values that are not there.
func ForeignChart(t testing.TB, path string, values map[string]any) (objects string, err error) {
	t.Helper()
	objects, _, err = render(t, path, stage.System, values, engine.Engine{})
	return objects, err
}

func render(t testing.TB, path, namespace string, values map[string]any, e engine.Engine) (objects, hooks string,
	err error) {
	t.Helper()
	chart, err := loader.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(chart, values,
		common.ReleaseOptions{Name: "lameduck", Namespace: namespace, IsInstall: true}, nil)
	if err != nil {
		return "", "", err
	}
	files, err := e.RenderWithContext(t.Context(), chart, all)
	if err != nil {
		return "", "", err
	}
	for name, content := range files {
		switch content = "\n---\n" + strings.TrimLeft(content, "\n"); {
		case !strings.HasSuffix(name, ".yaml"):
		case strings.Contains(name, "/tests/"):
			hooks += content
		default:
			objects += content
		}
	}
	return objects, hooks, nil
}

// Plain removes from an object what the chart alone adds: its labels, and the annotation by which
// another configuration starts other pods.
func Plain(o map[string]any) {
	meta := o["metadata"].(map[string]any)
	if labels, ok := meta["labels"].(map[string]any); ok {
		maps.DeleteFunc(labels, func(key string, _ any) bool {
			return strings.HasPrefix(key, "app.kubernetes.io/") || key == "helm.sh/chart"
		})
		if len(labels) == 0 {
			delete(meta, "labels")
		}
	}
	if o["kind"] == "Deployment" || o["kind"] == "DaemonSet" {
		delete(o["spec"].(map[string]any)["template"].(map[string]any)["metadata"].(map[string]any), "annotations")
	}
}

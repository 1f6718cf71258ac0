package install

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// A typo in a value is an error, whichever key it is in.
func TestEachMisspeltKeyIsRefused(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values object
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	tried := 0
	var misspell func(path []string, of object)
	misspell = func(path []string, of object) {
		for key, value := range of {
			free := len(path) > 0 && slices.Contains([]string{"requests", "labels"}, path[len(path)-1])
			if !strings.Contains(key, "/") && !free {
				var wrong any = object{key + "x": value}
				for i := len(path) - 1; i >= 0; i-- {
					wrong = object{path[i]: wrong}
				}
				tried++
				_, err := charted(t, wrong.(object))
				if err == nil || !strings.Contains(err.Error(), key+"x' not allowed") {
					t.Errorf("%q, misspelt: %v", append(path, key), err)
				}
			}
			if inner, ok := value.(object); ok {
				misspell(append(path[:len(path):len(path)], key), inner)
			}
		}
	}
	misspell(nil, values)
	if tried < 40 {
		t.Errorf("%d keys", tried)
	}
}

// What has no effect is refused: the API server would give up before a hold that is too long ends.
func TestTheChartsTimes(t *testing.T) {
	for times, want := range map[[2]string]string{
		{"4s", "2499ms"}: "", {"10s", "8s"}: "",
		{"4s", "2500ms"}: "config.times.hold", {"4500ms", "2s"}: "must be whole seconds",
	} {
		_, err := charted(t, object{"config": object{"times": object{"webhook": times[0], "hold": times[1]}}})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("webhook %s, hold %s: %v, want %q", times[0], times[1], err, want)
		}
	}
}

package install

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// A typo in a value is an error, whichever key it is in. TestEachValueOfTheSchemaHasADefault says
// that the schema has no other keys than the values.
func TestEachMisspeltKeyIsRefused(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var root object
	if err := json.Unmarshal(content, &root); err != nil {
		t.Fatal(err)
	}
	tried := 0
	// in puts a value where path leads to.
	var misspell func(path string, schema object, in func(any) any)
	misspell = func(path string, schema object, in func(any) any) {
		if ref, ok := schema["$ref"].(string); ok {
			schema = root
			for _, key := range strings.Split(ref, "/")[1:] {
				schema = schema[key].(object)
			}
		}
		if items, ok := schema["items"].(object); ok {
			misspell(path+"[]", items, func(value any) any { return in([]any{value}) })
		}
		for key, of := range asObject(schema["properties"]) {
			tried++
			_, err := charted(t, in(object{key + "x": 1}).(object))
			if err == nil || !strings.Contains(err.Error(), key+"x' not allowed") {
				t.Errorf("%s.%s, misspelt: %v", path, key, err)
			}
			misspell(path+"."+key, of.(object), func(value any) any { return in(object{key: value}) })
		}
	}
	misspell("", root, func(value any) any { return value })
	if tried < 140 {
		t.Errorf("%d keys", tried)
	}
}

// Each key of an affinity is in the schema, or Helm would refuse it.
func TestTheChartsAffinity(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var root struct {
		Defs object `json:"$defs"`
	}
	if err := json.Unmarshal(content, &root); err != nil {
		t.Fatal(err)
	}
	got, want := map[string]bool{}, map[string]bool{}
	var keys func(schema object)
	keys = func(schema object) {
		if ref, ok := schema["$ref"].(string); ok {
			schema = root.Defs[filepath.Base(ref)].(object)
		}
		if items := asObject(schema["items"]); items != nil {
			keys(items)
		}
		for key, of := range asObject(schema["properties"]) {
			got[key] = true
			keys(of.(object))
		}
	}
	keys(root.Defs["affinity"].(object))
	var fields func(of reflect.Type)
	fields = func(of reflect.Type) {
		switch of.Kind() {
		case reflect.Pointer, reflect.Slice:
			fields(of.Elem())
		case reflect.Struct:
			for i := range of.NumField() {
				key, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
				want[key] = true
				fields(of.Field(i).Type)
			}
		}
	}
	fields(reflect.TypeFor[corev1.Affinity]())
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Kubernetes (-) and values.schema.json (+): %s", diff)
	}
}

// Where the namespaces that wait are chosen by name, the check's is none of them.
func TestTheCheckAsksWhereItIsHeard(t *testing.T) {
	const name = "kubernetes.io/metadata.name"
	in := func(values ...any) object {
		return object{"matchExpressions": []any{object{"key": name, "operator": "In", "values": values}}}
	}
	for _, c := range []struct {
		selector object
		check    bool
		want     string
	}{
		{in("shop"), true, "namespaceSelector: does not select lameduck-check"},
		{object{"matchLabels": object{name: "shop"}}, true, "namespaceSelector: does not select lameduck-check"},
		{in("shop"), false, ""}, {in("shop", "lameduck-check"), true, ""},
	} {
		_, err := charted(t, object{"check": c.check, "namespaceSelector": c.selector})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, check %t: %v, want %q", c.selector, c.check, err, c.want)
		}
	}
}

// What contradicts itself is refused before it is installed: the coordinators would not start, or
// the API server would give up before a hold that is too long ends.
func TestTheChartsTimes(t *testing.T) {
	times := func(webhook, hold string) object {
		return object{"times": object{"webhook": webhook, "hold": hold}}
	}
	one := func(section, key, value string) object { return object{section: object{key: value}} }
	longest := drain.DefaultTimes().Reach() - 5*time.Second
	for _, c := range []struct {
		config object
		want   string
	}{
		{times("4s", "2499ms"), ""}, {times("10s", "8s"), ""},
		{times("4s", "2500ms"), "config.times.hold"}, {times("4500ms", "2s"), "must be whole seconds"},
		{times("4s", "0s"), "config.times.hold: 0s: must be 100ms to 28s"},
		{one("times", "deadline", "1s"), "config.times.deadline: 1s: must be at least config.times.hold (2s)"},
		{one("times", "deadline", longest.String()), ""},
		{one("times", "deadline", (longest + time.Millisecond).String()), "lengthen hold or shorten deadline"},
		{one("times", "idleBound", "31s"), "config.times.idleBound: 31s"},
		{one("times", "idleBound", "0s"), "config.times.idleBound: 0s"},
		{one("times", "shutdownDelay", "61s"), "config.times.shutdownDelay: 61s"},
		{one("barrier", "bound", "1500ms"), "config.barrier.bound: 1500ms: must be whole seconds"},
		{one("certificates", "overlap", "0s"), "config.certificates.overlap: 0s"},
		{one("certificates", "rotateEvery", "2h"), "config.certificates.rotateEvery: 2h: must be at least three times"},
	} {
		values := object{"barrier": object{"enabled": true}, "config": c.config}
		if _, err := charted(t, values); (err == nil) != (c.want == "") ||
			err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.config, err, c.want)
		}
	}
}

// Helm refuses each value under config that the coordinator refuses in its file, and no other.
func TestTheChartRefusesWhatTheCoordinatorRefuses(t *testing.T) {
	content, err := os.ReadFile("../../../cmd/webhook/testdata/values.txt")
	if err != nil {
		t.Fatal(err)
	}
	values, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Properties struct {
			Config struct {
				Properties map[string]struct{ Properties object }
			}
		}
	}
	if err := json.Unmarshal(values, &schema); err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, line := range strings.Split(strings.TrimSpace(string(content)), "\n") {
		verdict, rest, _ := strings.Cut(line, " ")
		key, text, _ := strings.Cut(strings.TrimSpace(rest), ": ")
		section, name, nested := strings.Cut(key, ".")
		of, known := schema.Properties.Config.Properties[section]
		outer, _, _ := strings.Cut(name, ".")
		if _, ok := of.Properties[outer]; !known || nested && !ok || strings.Contains(text, "null") || text == "5" {
			continue // another value decides it, or Helm reads it otherwise than the coordinator
		}
		var value any
		text = strings.Replace(text, "a...", strings.Repeat("a", 300), 1)
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			t.Fatal(err)
		}
		for _, key := range slices.Backward(strings.Split(key, ".")) {
			value = object{key: value}
		}
		tried++
		_, err := charted(t, object{"barrier": object{"enabled": true}, "config": value})
		if (err != nil) != (verdict == "refused") {
			t.Errorf("%s: in the chart: %v", line, err)
		}
	}
	if tried < 150 {
		t.Errorf("%d values", tried)
	}
}

// A value of a part that is off is refused, unless it is the default: files of values repeat these.
func TestTheChartsValuesWithoutEffect(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults object
	if err := yaml.Unmarshal(content, &defaults); err != nil {
		t.Fatal(err)
	}
	if _, err := charted(t, defaults); err != nil {
		t.Errorf("the defaults, repeated: %v", err)
	}
	tried := 0
	var walk func(under string, values object, in func(object) object)
	walk = func(under string, values object, in func(object) object) {
		enabled, optional := values["enabled"].(bool)
		for key, value := range values {
			if !optional {
				walk(under+key+".", asObject(value), func(o object) object { return in(object{key: o}) })
				continue
			}
			if key == "enabled" || enabled {
				continue
			}
			tried++
			var other any = "other"
			switch value.(type) {
			case object:
				switch other = (object{"cpu": "other"}); key {
				case "resources":
					other = object{"limits": other}
				case "affinity":
					other = object{"nodeAffinity": object{}}
				}
			case []any:
				if other = []any{"--other"}; key == "tolerations" {
					other = []any{object{"key": "other"}}
				}
			case int, float64:
				other = 1
			}
			if key == "interval" {
				other = "1s"
			}
			want := under + key + ": has no effect while " + under + "enabled is false"
			if strings.HasSuffix(key, "Image") { // --reuse-values brings those of another release
				if _, err := charted(t, in(object{key: other})); err != nil {
					t.Errorf("%s%s %v: %v", under, key, other, err)
				}
				continue
			}
			if _, err := charted(t, in(object{key: other})); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s%s %v: %v, want %q", under, key, other, err, want)
			}
		}
	}
	walk("", defaults, func(o object) object { return o })
	if tried < 19 {
		t.Errorf("%d values", tried)
	}
	of := func(key string, value any) object { return object{"certificates": object{key: value}} }
	for want, values := range map[string]object{
		"config.barrier.port: has no effect while barrier.enabled is false": {
			"config": object{"barrier": object{"port": 19447}}},
		"config.certificates.overlap: has no effect with certificates=own": {
			"certificates": "own", "config": of("overlap", "2h")},
		"config.certificates.names: has no effect with certificates=certManager": {
			"certificates": "certManager", "config": of("names", []any{"a.example"})},
		"": {"certificates": "certManager", "config": of("overlap", "2h")},
	} {
		if _, err := charted(t, values); (err == nil) != (want == "") ||
			err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", values, err, want)
		}
	}
}

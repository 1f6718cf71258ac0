package install

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

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

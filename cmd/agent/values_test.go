package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/internal/config"
)

// Each key of the file is given values that are too small, too large, negative, overflowing and
// malformed, in the files of manifests. The program refuses a value with an error that names the
// key, or it works. testdata/values.txt lists which. UPDATE=1 writes it: read what has changed.
func TestEachValueOfEachKey(t *testing.T) {
	const golden = "testdata/values.txt"
	dir, getenv := environment(t)
	bases := map[string]map[string]any{}
	paths, err := filepath.Glob("../../manifests/*/agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(paths, write(t, dir, good), node(t, dir)) {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var base map[string]any
		if err := yaml.Unmarshal(content, &base); err != nil {
			t.Fatal(err)
		}
		base["coordinators"].(map[string]any)["tokenFile"] = dir + "/token"
		if base["stateDir"] != nil {
			base["stateDir"] = dir
		}
		for kind := range base["gateway"].(map[string]any) {
			bases[kind] = base
		}
	}
	tried := map[string]bool{}
	var got []string
	var walk func(kind, path string, of reflect.Type)
	walk = func(kind, path string, of reflect.Type) {
		for of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		values := []string{`""`, `" "`, `"a b"`, `"a\x1bb"`, `"a\0b"`, "A_b", strings.Repeat("a", 300), "5", "{}", "[]"}
		switch {
		case of == reflect.TypeFor[config.Duration]():
			values = []string{"-1s", "0s", "1ns", "1s", "10m", "24h", "876000h", "3000000h", "5", "soon", `""`}
		case of.Kind() == reflect.Struct:
			for i := range of.NumField() {
				key, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
				if key == "apiVersion" || path == "" && key == "kind" || path == ".gateway" && key != kind {
					continue
				}
				walk(kind, strings.TrimSuffix(path+"."+key, "."), of.Field(i).Type)
			}
			return
		case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.Struct:
			walk(kind, path+".[]", of.Elem())
			values = []string{"[]", "[{}]", "a"}
		case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.String:
			values = []string{"[]", `[""]`, `["a b"]`, `["a\nb"]`, "[a]", "a", "[{}]"}
		case of.Kind() == reflect.Slice: // JSON
			values = []string{"{}", "[]", "5", "{interval: 0s}", "{interval: -1s}", "{interval: 3000000h}",
				"{healthy: {successes: -1}}", "{unhealthy: {timeouts: 9223372036854775807}}", "{port: 65536}"}
		case of.Kind() == reflect.Int:
			values = []string{"-9223372036854775808", "-1", "0", "1", "100", "101", "9223372036854775807", "1e30",
				"1.5", `"5"`, "many"}
		case of.Kind() == reflect.Bool:
			values = []string{"true", `"yes please"`, "1"}
		}
		if key := strings.Replace(path, ".[]", "[]", 1); !tried[key] {
			tried[key] = true
			for _, value := range values {
				got = append(got, verdict(t, getenv, bases[kind], key[1:], value))
			}
		}
	}
	gateway, _ := reflect.TypeFor[file]().FieldByName("Gateway")
	for i := range gateway.Type.NumField() {
		key, _, _ := strings.Cut(gateway.Type.Field(i).Tag.Get("json"), ",")
		if bases[key] == nil {
			t.Fatalf("no file of a gateway %s", key)
		}
		walk(key, "", reflect.TypeFor[file]())
	}
	text := strings.Join(got, "\n") + "\n"
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), text); diff != "" {
		t.Error(diff)
	}
}

// verdict puts a value at a key into a file and reports what the agent says of it.
func verdict(t *testing.T, getenv func(string) string, base map[string]any, key, value string) string {
	t.Helper()
	text, err := yaml.Marshal(base)
	if err != nil {
		t.Fatal(err)
	}
	var all, parsed any
	if err := yaml.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(value), &parsed); err != nil {
		t.Fatal(err)
	}
	keys := strings.Split(key, ".")
	at := all.(map[string]any)
	for _, k := range keys[:len(keys)-1] {
		name, list := strings.CutSuffix(k, "[]")
		switch inner := at[name].(type) {
		case map[string]any:
			at = inner
		case []any:
			at = inner[0].(map[string]any)
		default:
			made := map[string]any{}
			if at[name] = made; list {
				at[name] = []any{made}
			}
			at = made
		}
	}
	last := keys[len(keys)-1]
	at[last] = parsed
	if text, err = yaml.Marshal(all); err != nil {
		t.Fatal(err)
	}
	var f file
	_, err = f.read(text, func(name string) string { return cmp.Or(getenv(name), "pod-1") })
	verdict := "works"
	if err != nil {
		verdict = "refused"
		element := strings.Replace(strings.Join(keys[:len(keys)-1], "."), "[]", "[0]", 1)
		if !strings.Contains(err.Error(), last) && !strings.Contains(err.Error(), element) {
			t.Errorf("%s: %s: %v, which does not name the key", key, value, err)
		}
	}
	if len(value) > 100 {
		value = "a..."
	}
	return fmt.Sprintf("%-8s %s: %s", verdict, key, value)
}

// node writes the file of a node agent.
func node(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "node.yaml")
	if err := os.WriteFile(path, []byte(`
apiVersion: lameduck.io/v1alpha1
kind: AgentConfiguration
coordinators: {service: lameduck/agents, port: agents, serverName: lameduck, caConfigMap: a/b, tokenFile: token}
gateway: {kubeProxy: {}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

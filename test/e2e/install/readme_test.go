package install

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// whole are keys whose value is one default, whatever is in it.
var whole = []string{"resources", "nodeSelector", "labels"}

// table writes a row for each key of values and what is in it: its name, default and comment.
func table(of *yaml.Node, under string, out *strings.Builder) error {
	for i := 0; i < len(of.Content); i += 2 {
		key, value := of.Content[i], of.Content[i+1]
		says := strings.Join(strings.Fields(strings.ReplaceAll("\n"+key.HeadComment, "\n# ", " ")), " ")
		inner := value.Kind == yaml.MappingNode && len(value.Content) > 0 && !slices.Contains(whole, key.Value)
		standard := ""
		if !inner {
			var v any
			if err := value.Decode(&v); err != nil {
				return err
			}
			text, err := json.Marshal(v)
			if err != nil {
				return err
			}
			standard = "`" + string(text) + "`"
		}
		if !inner && says == "" && key.Value != "enabled" { // the row above says of what
			return fmt.Errorf("values.yaml does not say what %s%s is", under, key.Value)
		}
		if says != "" || !inner {
			fmt.Fprintf(out, "| `%s%s` | %s | %s |\n", under, key.Value, standard, says)
		}
		if inner {
			if err := table(value, under+key.Value+".", out); err != nil {
				return err
			}
		}
	}
	return nil
}

// The README of the chart has every value that values.yaml has, with what it says of it. UPDATE=1
// writes the table.
func TestTheChartsReadme(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(harness.ChartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values yaml.Node
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	var rows strings.Builder
	if err := table(values.Content[0], "", &rows); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(harness.ChartDir, "README.md")
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const head = "| value | default | |\n|---|---|---|\n"
	before, old, found := strings.Cut(string(page), head)
	_, after, _ := strings.Cut(old, "\n\n")
	want := before + head + rows.String() + "\n" + after
	if !found {
		t.Fatalf("%s has no table", path)
	}
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(page) != want {
		t.Errorf("%s is not what values.yaml says: run this test with UPDATE=1", path)
	}
}

// Each value that the schema allows is in values.yaml, where the README has it from. Those that
// have no default there are not the chart's: they are in schemas, or as in a pod.
func TestEachValueOfTheSchemaHasADefault(t *testing.T) {
	read := func(name string) (o object) {
		content, err := os.ReadFile(filepath.Join(harness.ChartDir, name))
		if err == nil {
			err = yaml.Unmarshal(content, &o)
		}
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	tried := 0
	var compare func(under string, schema, values object)
	compare = func(under string, schema, values object) {
		for key, of := range asObject(schema["properties"]) {
			if under+key == "global" || under+key == "enabled" {
				continue
			}
			tried++
			value, found := values[key]
			if !found {
				t.Errorf("values.yaml has no %s%s", under, key)
			}
			if under+key != "config" {
				compare(under+key+".", of.(object), asObject(value))
			}
		}
	}
	compare("", read("values.schema.json"), read("values.yaml"))
	if tried < 50 {
		t.Errorf("%d values", tried)
	}
}

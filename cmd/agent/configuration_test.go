package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/haproxy"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
	"github.com/lameduck-io/lameduck/test/configtest"
)

func TestTheSchemaSaysWhatTheTypesSay(t *testing.T) {
	var f file
	for _, kind := range []gateway.Kind{&haproxy.Config{}, &kubeproxy.Config{}} {
		f.complete(kind)
	}
	configtest.Check(t, f, kind, "../../schemas/agent.json")
}

// Helm refuses in the chart's values what the agent would refuse in its file, also a section
// without a key that its kind requires. To find these keys, the test leaves out each key of the
// files in manifests.
func TestTheChartsSchemaIsTheAgents(t *testing.T) {
	var f file
	f.complete(&haproxy.Config{})
	for _, key := range []string{"health", "healthTimeout"} {
		of, _ := configtest.Schema(t, f, kind).Properties.Get(key)
		configtest.CheckProperty(t, of, key, "../../charts/lameduck/values.schema.json")
	}
	schema, _ := configtest.Schema(t, file{}, kind).Properties.Get("gateway")
	schema.Properties.Delete("kubeProxy") // of node agents
	one := uint64(1)
	schema.MinProperties, schema.MaxProperties = &one, &one
	paths, err := filepath.Glob("../../manifests/*/agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tried := map[string]bool{}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var values struct {
			Gateway map[string]map[string]any `json:"gateway"`
		}
		if err := yaml.Unmarshal(content, &values); err != nil {
			t.Fatal(err)
		}
		invalid := func() error {
			text, err := yaml.Marshal(values)
			if err != nil {
				t.Fatal(err)
			}
			var f file
			if err := config.Read(text, func(string) string { return "pod-1" }, &f); err != nil {
				return err
			}
			_, kind, err := f.Gateway.Kind()
			if err != nil {
				return err
			}
			return errors.Join(kind.Check()...)
		}
		if err := invalid(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		for name, section := range values.Gateway {
			tried[name] = true
			of, _ := schema.Properties.Get(name)
			of.Required = nil
			for p := of.Properties.Oldest(); p != nil; p = p.Next() {
				if items := p.Value.Items; items != nil && items.Properties.Len() > 0 {
					service, _ := items.Properties.Get("service")
					service.Pattern, items.Required = "^[^/]+/[^/]+$", []string{"service"}
				} else if p.Key == "services" {
					items.Pattern = "^[^/]+/[^/]+$"
				}
				value, found := section[p.Key]
				delete(section, p.Key)
				if invalid() != nil && p.Key != "control" { // of an APISIX: or probe
					of.Required = append(of.Required, p.Key)
					if p.Value.Type == "array" {
						p.Value.MinItems = &one
					}
				}
				if found {
					section[p.Key] = value
				}
			}
		}
	}
	if len(tried) != schema.Properties.Len() {
		t.Errorf("manifests have files for %v alone", tried)
	}
	configtest.CheckProperty(t, schema, "gateway", "../../charts/lameduck/values.schema.json")
}

// What is printed is a file, and gives the same again. It need not be one that the agent can run
// with.
func TestPrintConfig(t *testing.T) {
	dir, getenv := environment(t)
	print := func(config string) string {
		t.Helper()
		var out bytes.Buffer
		if err := run(t.Context(), []string{"--config", config, "--print-config"}, getenv, &out, &out); !errors.Is(err,
			cli.ErrPrinted) {
			t.Fatal(err)
		}
		return out.String()
	}
	if got := print("/no/such/file"); !strings.Contains(got, "healthTimeout: 1m0s") {
		t.Error(got)
	}
	first := print(write(t, dir, good))
	for _, want := range []string{"healthTimeout: 1.5s", "minHealthyPercent: 50", "stateDir: " + dir, "$1"} {
		if !strings.Contains(first, want) {
			t.Errorf("%q is not in\n%s", want, first)
		}
	}
	if diff := cmp.Diff(first, print(write(t, dir, first))); diff != "" {
		t.Error(diff)
	}
	for text, want := range map[string]string{
		"colour: red":                      "colour",
		"healthTimeout: 30":                "healthTimeout: 30: must be a duration",
		"healthTimeout:":                   "healthTimeout: null: must be a duration",
		"[a]":                              "the file: is of type array",
		"health: {minHealthyPercent: 1.5}": "health.minHealthyPercent: is of type number, must be of type int",
	} {
		var out bytes.Buffer
		if err := run(t.Context(), []string{"--config", write(t, dir, text), "--print-config"}, getenv, &out,
			&out); !errors.Is(err, cli.ErrUsage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

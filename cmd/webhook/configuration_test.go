package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/test/configtest"
)

func TestTheSchemaSaysWhatTheTypesSay(t *testing.T) {
	configtest.Check(t, defaults(), kind, "../../schemas/coordinator.json")
}

// Helm refuses in the chart's values what the coordinator would refuse in its file.
func TestTheChartsSchemaIsTheCoordinators(t *testing.T) {
	gateways := func(path string) (is struct {
		Items struct {
			Properties           map[string]any
			AdditionalProperties bool
		}
	}) {
		t.Helper()
		var schema struct{ Properties map[string]json.RawMessage }
		content, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(content, &schema)
		}
		if err == nil {
			err = json.Unmarshal(schema.Properties["gateways"], &is)
		}
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	chart := gateways("../../charts/lameduck/values.schema.json")
	delete(chart.Items.Properties, "agent") // the chart's own
	if diff := cmp.Diff(gateways("../../schemas/coordinator.json"), chart); diff != "" {
		t.Error(diff)
	}
	// The value config has each key of the file that neither the chart nor another value decides.
	config := configtest.Schema(t, defaults(), kind)
	config.Version, config.Title, config.Required, config.Description = "", "", nil, ""
	for _, path := range []string{"apiVersion", "kind", "gateways", "excludedNamespaces", "addresses.admission",
		"addresses.agents", "addresses.metrics", "addresses.probes", "certificates.dir",
		"certificates.admissionSecretFile", "certificates.secret", "certificates.configMap",
		"certificates.webhookConfiguration"} {
		of, key := config, path
		if under, inner, found := strings.Cut(path, "."); found {
			of, _ = config.Properties.Get(under)
			key = inner
		}
		if _, found := of.Properties.Delete(key); !found {
			t.Errorf("the coordinator's file has no %s", path)
		}
	}
	barrier, _ := config.Properties.Get("barrier")
	for _, key := range []string{"image", "imagePullSecrets"} { // other values are their defaults
		property, _ := barrier.Properties.Get(key)
		property.Default = nil
	}
	configtest.CheckProperty(t, config, "config", "../../charts/lameduck/values.schema.json")
}

const head = "apiVersion: lameduck.io/v1alpha1\nkind: CoordinatorConfiguration\n"

// file writes a configuration file and returns the arguments that make it the one.
func file(t *testing.T, text string) []string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "coordinator.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--config", path}
}

func TestAFile(t *testing.T) {
	text := head + "times: {hold: 1s, deadline: 15s, shutdownDelay: 3s}\nexcludedNamespaces: [\"${POD_NAME}\"]\n" +
		"holds: {most: 5}\nlogLevel: warn\n"
	o, err := parse(file(t, text), env, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.times.Hold != time.Second || o.times.Deadline != 15*time.Second || o.times.IdleBound != 10*time.Second ||
		o.Holds.Most != 5 || o.Holds.PerOwner != 8 || o.Times.ShutdownDelay.Duration != 3*time.Second ||
		!slices.Equal(o.excluded, []string{"webhook-0", "lameduck"}) || o.LogLevel.String() != "WARN" ||
		o.Addresses.Admission != ":9443" {
		t.Errorf("%+v", o)
	}
	// An own list takes the place of the default one, also if it is empty.
	if o, err = parse(file(t, head+"excludedNamespaces: []"), env, nil); err != nil ||
		!slices.Equal(o.excluded, []string{"lameduck"}) {
		t.Errorf("%+v, %v", o.excluded, err)
	}
}

func TestBadFiles(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"empty": {"", []string{`apiVersion ""`, `kind ""`}},
		"another version": {"apiVersion: lameduck.io/v9\nkind: CoordinatorConfiguration",
			[]string{`apiVersion "lameduck.io/v9": must be "lameduck.io/v1alpha1"`}},
		"the agent's": {"apiVersion: lameduck.io/v1alpha1\nkind: AgentConfiguration",
			[]string{`kind "AgentConfiguration"`}},
		"an unknown key": {head + "colour: red", []string{`"colour"`}},
		"unknown keys deep": {head + "times: {held: 2s}\nbarrier: {sampling: {all: 1}}",
			[]string{`"times.held"`, `"barrier.sampling.all"`}},
		"a key twice": {head + "kind: x", []string{`"kind"`}},
		"no duration": {head + "times: {hold: soon}", []string{"times.hold", `"soon"`}},
		"a number":    {head + "times: {deadline: 30}", []string{"times.deadline: 30: must be a duration"}},
		"another type": {head + "times: {hold: 1s}\nholds: {most: '5'}",
			[]string{"holds.most: is of type string, must be of type int"}},
		"a list for an object": {head + "holds: [5]", []string{"holds: is of type array, must be of type object"}},
		"off":                  {head + "mode: off", []string{`mode "false": must be enforce or observe; "off"`}},
		"no unit":              {head + "times: {deadline: '3'}", []string{"times.deadline"}},
		"a log level":          {head + "logLevel: loud", []string{`"loud"`}},
		"an unset variable":    {head + "excludedNamespaces: ['${NOWHERE}']", []string{`"NOWHERE"`}},
		"times":                {head + "times: {hold: 4s}", []string{"webhook timeout 4s must be more than hold 4s"}},
		"names":                {head + "certificates: {names: [a_b]}", []string{`certificates.names[0] "a_b"`}},
		"no secret":            {head + "certificates: {secret: ''}", []string{`certificates.secret ""`}},
		"no sample":            {head + "barrier: {sampling: {size: 0}}", []string{"barrier.sampling.size 0"}},
		"no end of learning": {head + "barrier: {sampling: {learnFrom: 20000}}",
			[]string{"barrier.sampling.learnFrom 20000"}},
		"overlap": {head + "certificates: {overlap: 0s}", []string{"certificates.overlap 0s"}},
		"rotates too soon": {head + "certificates: {rotateEvery: 2h}",
			[]string{"certificates.rotateEvery 2h0m0s", "certificates.overlap 1h0m0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			args := file(t, c.text)
			var out bytes.Buffer
			err := run(t.Context(), args, env, &out, &out)
			if !errors.Is(err, errUsage) || out.Len() > 0 {
				t.Fatalf("%v, written: %s", err, &out)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
		})
	}
}

// What is printed is a file, and gives the same again. Where nothing is said it is the defaults, on
// a laptop too.
func TestPrintConfig(t *testing.T) {
	print := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if err := run(t.Context(), append(args, "--print-config"), func(string) string { return "" }, &out,
			&out); !errors.Is(err, errPrinted) {
			t.Fatal(err)
		}
		return out.String()
	}
	first := print()
	for _, want := range []string{"apiVersion: lameduck.io/v1alpha1", "kind: CoordinatorConfiguration", "hold: 2s",
		"rotateEvery: 720h0m0s", "- kube-system", "logLevel: INFO"} {
		if !strings.Contains(first, want) {
			t.Errorf("%q is not in\n%s", want, first)
		}
	}
	if diff := cmp.Diff(first, print(file(t, first)...)); diff != "" {
		t.Error(diff)
	}
}

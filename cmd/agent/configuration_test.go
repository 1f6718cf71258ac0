package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/internal/cli"
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
	for _, want := range []string{"endpointsLag: 1.5s", "healthTimeout: 1m0s", "minHealthyPercent: 50",
		"stateDir: " + dir, "$1"} {
		if !strings.Contains(first, want) {
			t.Errorf("%q is not in\n%s", want, first)
		}
	}
	if diff := cmp.Diff(first, print(write(t, dir, first))); diff != "" {
		t.Error(diff)
	}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--config", write(t, dir, "colour: red"), "--print-config"}, getenv, &out,
		&out); !errors.Is(err, cli.ErrUsage) || !strings.Contains(err.Error(), "colour") {
		t.Error(err)
	}
}

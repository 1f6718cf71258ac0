package monitoring

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

const folder = "../../../manifests/monitoring"

// The committed dashboard is what the code says. UPDATE=1 writes it.
func TestTheDashboardIsCommitted(t *testing.T) {
	want, err := Dashboard()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "dashboard.json")
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is not what the code says (%v): run this test with UPDATE=1", path, err)
	}
}

func alerts(t *testing.T) (names []string, urls map[string]string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	urls = map[string]string{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			names = append(names, r.Alert)
			urls[r.Alert] = r.Annotations["runbook_url"]
		}
	}
	return names, urls
}

// An operator who is woken finds what to do, and each entry of the runbook has an alert.
func TestEachAlertHasAnEntryInTheRunbook(t *testing.T) {
	page, err := os.ReadFile("../../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	var entries []string
	for _, m := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(string(page), -1) {
		entries = append(entries, m[1])
	}
	names, urls := alerts(t)
	if !slices.Equal(entries, names) {
		t.Errorf("the runbook has %q, the rules have %q", entries, names)
	}
	cases, err := os.ReadFile(filepath.Join(folder, "rules_test.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.HasSuffix(urls[name], "/docs/runbook.md#"+strings.ToLower(name)) {
			t.Errorf("%s leads to %q", name, urls[name])
		}
		if fires := regexp.MustCompile(`alertname: ` + name + `\n\s+exp_alerts:`); !fires.Match(cases) {
			t.Errorf("no case in which %s fires", name)
		}
		if quiet := regexp.MustCompile(`alertname: ` + name + `\}`); !quiet.Match(cases) {
			t.Errorf("no case in which %s is quiet", name)
		}
	}
}

func TestTheAlertsDoWhatTheySay(t *testing.T) {
	promtool := harness.Program(t, "promtool", "apt-get install prometheus")
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, {"test", "rules", "rules_test.yaml"}} {
		cmd := exec.Command(promtool, args...)
		cmd.Dir = folder
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
}

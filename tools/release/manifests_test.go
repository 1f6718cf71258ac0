package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// unzip returns the files of a compressed archive.
func unzip(t *testing.T, path string) map[string]string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for tr := tar.NewReader(r); ; {
		header, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		all[header.Name] = string(content)
	}
}

// What people apply names every image of ours by the digest of the one that was made with it, and
// the coordinator is told of the one that it puts into pods.
func TestManifests(t *testing.T) {
	o, s := fixture(t)
	want := digests(t, o)
	if err := makeManifests(s, o, io.Discard); err != nil {
		t.Fatal(err)
	}
	ref := func(program string) string { return o.name(program) + "@" + want[program] }
	images := regexp.MustCompile(`(?m)\bimage: (\S+)$`)
	for file, wants := range map[string][]string{
		"install.yaml":                  {ref("lameduck-wait"), ref("webhook"), ref("webhook")},
		"install-cert-manager.yaml":     {ref("lameduck-wait"), ref("webhook"), ref("webhook")},
		"install-own-certificates.yaml": {ref("lameduck-wait"), ref("webhook"), ref("webhook")},
		"barrier.yaml":                  {ref("agent")},
		"barrier-cert-manager.yaml":     {ref("agent")},
		"check.yaml":                    {ref("webhook")},
	} {
		content, err := os.ReadFile(filepath.Join(o.out, file))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, found := range images.FindAllStringSubmatch(string(content), -1) {
			got = append(got, found[1])
		}
		if strings.Join(got, " ") != strings.Join(wants, " ") {
			t.Errorf("%s has images %v, want %v", file, got, wants)
		}
		for _, document := range strings.Split(string(content), "\n---\n") {
			var object struct {
				Kind string
				Data map[string]string
			}
			if err := yaml.Unmarshal([]byte(document), &object); err != nil || object.Kind == "" {
				t.Errorf("%s has %q: %v", file, document, err)
			}
			if text, ok := object.Data["coordinator.yaml"]; ok {
				var configuration struct {
					Kind    string
					Barrier struct{ Image string }
				}
				if err := yaml.Unmarshal([]byte(text), &configuration); err != nil ||
					configuration.Kind != "CoordinatorConfiguration" ||
					configuration.Barrier.Image != ref("lameduck-wait") {
					t.Errorf("%s configures %+v: %v", file, configuration, err)
				}
			}
		}
	}
	chart := unzip(t, filepath.Join(o.out, "lameduck-"+strings.TrimPrefix(o.version, "v")+".tgz"))
	var meta struct{ Name, Version, AppVersion string }
	if err := yaml.Unmarshal([]byte(chart["lameduck/Chart.yaml"]), &meta); err != nil || meta.Name != "lameduck" ||
		"v"+meta.Version != o.version || meta.AppVersion != o.version {
		t.Errorf("the chart is %+v, %v", meta, err)
	}
	var values struct {
		Image   struct{ Repository, Tag string }
		Barrier struct{ AgentImage, WaitImage string }
	}
	if err := yaml.Unmarshal([]byte(chart["lameduck/values.yaml"]), &values); err != nil ||
		values.Image.Repository+":"+values.Image.Tag != ref("webhook") ||
		values.Barrier.AgentImage != ref("agent") || values.Barrier.WaitImage != ref("lameduck-wait") {
		t.Errorf("the chart's values are %+v, %v", values, err)
	}
	if chart["lameduck/files/values.yaml"] != chart["lameduck/values.yaml"] {
		t.Error("templates of the chart read other defaults")
	}
	rules, err := os.ReadFile(filepath.Join(s.root, "manifests", "monitoring", "rules.yaml"))
	if err != nil || chart["lameduck/files/rules.yaml"] != string(rules) {
		t.Errorf("the chart does not have the alerts: %v", err)
	}
	if len(chart["lameduck/templates/webhook.yaml"]) == 0 {
		t.Error("the chart has no templates")
	}
	example := unzip(t, filepath.Join(o.out, "manifests-"+o.version+".tar.gz"))["manifests/haproxy/gateway.yaml"]
	if !strings.Contains(example, "image: "+ref("agent")+"\n") {
		t.Errorf("the example names %v", images.FindAllString(example, -1))
	}
	list, err := os.ReadFile(filepath.Join(o.out, "images.txt"))
	if err != nil || string(list) != ref("webhook")+"\n"+ref("agent")+"\n"+ref("lameduck-wait")+"\n" {
		t.Errorf("images.txt is %q, %v", list, err)
	}
}

// make images by itself makes images of the names that are in the tree, which by digest are no
// names to be left out.
func TestManifestsOfTheTreesNames(t *testing.T) {
	if os.Getenv("LAMEDUCK_DIST") != "" {
		t.Skip("makes images of its own")
	}
	o, s := fixture(t)
	o.out, o.registry, o.version, s.version = t.TempDir(), "docker.io/lameduck", "dev", "dev"
	if err := packImages(t.Context(), s, o, filepath.Join(madeDir, "built"), io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := makeManifests(s, o, io.Discard); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(o.out, "install.yaml"))
	if want := "image: docker.io/lameduck/webhook:dev@" + digests(t, o)["webhook"] + "\n"; err != nil ||
		!strings.Contains(string(content), want) {
		t.Errorf("no %s in %s (%v)", want, content, err)
	}
}

// A tree that names an image in a way that is not known here must not be released with a name that
// cannot be pulled.
func TestManifestsOfAChangedTree(t *testing.T) {
	refs := map[string]string{"webhook": "r/webhook:v1@sha256:1", "agent": "r/agent:v1@sha256:2",
		"lameduck-wait": "r/lameduck-wait:v1@sha256:3"}
	o := options{registry: "r", version: "v1.0.0"}
	for file, change := range map[string][2]string{
		"manifests/base/webhook.yaml":    {"lameduck/lameduck-wait:dev", "lameduck/lameduck-wait:latest"},
		"charts/lameduck/values.yaml":    {"lameduck/lameduck-wait:dev", "lameduck/lameduck-wait:latest"},
		"charts/lameduck/Chart.yaml":     {"appVersion: dev", "appVersion: v0"},
		"charts/lameduck/values.yaml ":   {"lameduck/agent:dev", "lameduck/agent:latest"},
		"charts/lameduck/values.yaml  ":  {"tag: dev", "tag: main"},
		"charts/lameduck/Chart.yaml    ": {"version: 0.1.0\n", ""},
	} {
		dir := filepath.Join(t.TempDir(), "tree")
		copyTree(t, dir)
		path := filepath.Join(dir, strings.TrimSpace(file))
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(content), change[0]) {
			t.Fatalf("%s has no %q", file, change[0])
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(content), change[0], change[1], 1)),
			0o600); err != nil {
			t.Fatal(err)
		}
		_, err1 := manifests(dir, refs)
		_, _, err2 := chart(dir, o, refs)
		if err := errors.Join(err1, err2); err == nil || !strings.Contains(err.Error(), filepath.Base(path)) {
			t.Errorf("%s without %q: %v", file, change[0], err)
		}
	}
}

// A release is a version; what is none gets a chart's version below all releases.
func TestVersionOfTheChart(t *testing.T) {
	refs := map[string]string{}
	for version, want := range map[string]string{"v1.2.3": "1.2.3", "1.2.3": "1.2.3", "v1.2.3-rc.1": "1.2.3-rc.1",
		"dev": "0.0.0-dev", "v1.2": "0.0.0-v1.2", "a_b": ""} {
		for _, p := range programs {
			refs[p] = "r/" + p + ":" + version + "@sha256:0"
		}
		_, got, err := chart(root, options{registry: "r", version: version}, refs)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v; want %q", version, got, err, want)
		}
	}
}

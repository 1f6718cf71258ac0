package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// What is left of another version must not go out with this one.
func TestAReleaseIsMadeInAnEmptyFolder(t *testing.T) {
	o, s := fixture(t)
	if err := makeAll(t.Context(), s, o, io.Discard); err == nil || !strings.Contains(err.Error(), "is not empty") {
		t.Errorf("in a folder with files: %v", err)
	}
}

// The checksums are those of all files, as sha256sum has them.
func TestSums(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"b": "two", "a": "one"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeSums(dir, io.Discard); err != nil {
		t.Fatal(err)
	}
	check := func() error {
		cmd := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", "SHA256SUMS")
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		} else if string(out) != "a: OK\nb: OK\n" {
			err = fmt.Errorf("checked %q", out)
		}
		return err
	}
	if err := check(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("One"), 0o600); err != nil {
		t.Fatal(err)
	}
	if check() == nil {
		t.Error("another file has the same sum")
	}
}

// kubectl lameduck goes out as people's computers take it: a program to run, its licences, and a
// list of what is in it.
func TestPlugin(t *testing.T) {
	o, s := fixture(t)
	on := platform{"linux", "amd64"}
	o.out = t.TempDir()
	if err := os.Link(filepath.Join(madeDir, "built", on.String(), "lameduck-wait"),
		filepath.Join(o.out, plugin)); err != nil {
		t.Fatal(err)
	}
	if err := packPlugin(t.Context(), s, o, on, filepath.Join(o.out, plugin), io.Discard); err != nil {
		t.Fatal(err)
	}
	all := unzip(t, filepath.Join(o.out, pluginFile(o.version, on)))
	if !strings.HasPrefix(all[plugin], "\x7fELF") || all["licenses/LICENSE"] == "" || all["licenses/go/LICENSE"] == "" {
		t.Errorf("the archive has %d files", len(all))
	}
	list, err := os.ReadFile(filepath.Join(o.out, bomFile(plugin, o.version, on)))
	if err != nil || !strings.Contains(string(list), `"purl": "pkg:golang/stdlib@`) {
		t.Errorf("the list of what is in it: %v: %s", err, list)
	}
}

// The manifest for krew names each archive by where it will be and by its checksum, and no other.
func TestKrew(t *testing.T) {
	o := options{out: t.TempDir(), version: "v1.2.3", download: "https://example.com/download/v1.2.3"}
	if _, err := krew(o); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the archives: %v", err)
	}
	want := map[string]string{}
	for _, on := range plugins {
		name := pluginFile(o.version, on)
		if err := os.WriteFile(filepath.Join(o.out, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		want[on.os+"/"+on.arch] = fmt.Sprintf("%s/kubectl-lameduck-v1.2.3-%s.tar.gz %x kubectl-lameduck", o.download,
			on, sha256.Sum256([]byte(name)))
	}
	text, err := krew(o)
	if err != nil {
		t.Fatal(err)
	}
	// As krew has it: pkg/index/types.go.
	var is struct {
		APIVersion string                `json:"apiVersion"`
		Kind       string                `json:"kind"`
		Metadata   struct{ Name string } `json:"metadata"`
		Spec       struct {
			Version          string `json:"version"`
			ShortDescription string `json:"shortDescription"`
			Description      string `json:"description"`
			Platforms        []struct {
				Selector struct {
					MatchLabels map[string]string `json:"matchLabels"`
				} `json:"selector"`
				URI    string `json:"uri"`
				Sha256 string `json:"sha256"`
				Bin    string `json:"bin"`
			} `json:"platforms"`
		} `json:"spec"`
	}
	if err := yaml.UnmarshalStrict(text, &is); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, p := range is.Spec.Platforms {
		of := p.Selector.MatchLabels
		got[of["os"]+"/"+of["arch"]] = p.URI + " " + p.Sha256 + " " + p.Bin
	}
	if is.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || is.Kind != "Plugin" ||
		"kubectl-"+is.Metadata.Name != plugin || is.Spec.Version != "v1.2.3" || is.Spec.ShortDescription == "" ||
		strings.HasSuffix(is.Spec.ShortDescription, ".") || is.Spec.Description == "" || !maps.Equal(got, want) {
		t.Errorf("%s", text)
	}
	o.version = "dev"
	if _, err := krew(o); err == nil || !strings.Contains(err.Error(), `"dev"`) {
		t.Errorf("of no release: %v", err)
	}
}

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
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

// The real krew takes the manifest, downloads the archive that it names, and installs the plugin;
// it refuses an archive with another content.
func TestKrew(t *testing.T) {
	o, s := fixture(t)
	o.out, o.version, s.version = t.TempDir(), "v1.2.3", "v1.2.3"
	if _, err := krew(o); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the archives: %v", err)
	}
	on := platform{runtime.GOOS, runtime.GOARCH}
	program := filepath.Join(t.TempDir(), plugin)
	if err := os.Link(filepath.Join(madeDir, "built", "linux-amd64", "lameduck-wait"), program); err != nil {
		t.Fatal(err)
	}
	for _, on := range plugins {
		if err := packPlugin(t.Context(), s, o, on, program, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	server := httptest.NewServer(http.FileServer(http.Dir(o.out)))
	defer server.Close()
	o.download = server.URL
	text, err := krew(o)
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	manifest := filepath.Join(bin, krewName+".yaml")
	if err := os.WriteFile(manifest, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin+"/krew",
		"sigs.k8s.io/krew/cmd/krew").CombinedOutput(); err != nil {
		t.Fatalf("build krew: %v: %s", err, out)
	}
	root := t.TempDir()
	install := func(root string) string {
		cmd := exec.CommandContext(t.Context(), bin+"/krew", "install", "--manifest="+manifest)
		cmd.Env = append(os.Environ(), "KREW_ROOT="+root)
		out, err := cmd.CombinedOutput()
		return fmt.Sprintf("%s%v", out, err)
	}
	if out := install(root); !strings.Contains(out, "Installed plugin: lameduck\n") {
		t.Fatal(out)
	}
	want, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root, "bin", plugin)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes are installed, of %d: %v", len(got), len(want), err)
	}
	if err := os.WriteFile(filepath.Join(o.out, pluginFile(o.version, on)), []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := install(t.TempDir()); !strings.Contains(out, "checksum does not match") {
		t.Errorf("with another archive: %s", out)
	}
	o.version = "dev"
	if _, err := krew(o); err == nil || !strings.Contains(err.Error(), `"dev"`) {
		t.Errorf("of no release: %v", err)
	}
}

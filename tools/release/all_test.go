package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
	all := unzip(t, filepath.Join(o.out, plugin+"-"+o.version+"-linux-amd64.tar.gz"))
	if !strings.HasPrefix(all[plugin], "\x7fELF") || all["licenses/LICENSE"] == "" || all["licenses/go/LICENSE"] == "" {
		t.Errorf("the archive has %d files", len(all))
	}
	list, err := os.ReadFile(filepath.Join(o.out, bomFile(plugin, o.version, on)))
	if err != nil || !strings.Contains(string(list), `"purl": "pkg:golang/stdlib@`) {
		t.Errorf("the list of what is in it: %v: %s", err, list)
	}
}

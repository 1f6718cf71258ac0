package machine

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An image of the same program is the same image, whenever and from wherever it is made, and names
// what pods ask for.
func TestImage(t *testing.T) {
	program := filepath.Join(t.TempDir(), "app")
	if err := os.WriteFile(program, []byte("\x7fELF"), 0o755); err != nil {
		t.Fatal(err)
	}
	image := Image{Name: "lameduck.test/app:1", Program: program, Args: []string{"pause"}, User: "1:2",
		Links: map[string]string{"bin/sh": "/app"}}
	var first, second bytes.Buffer
	if err := errors.Join(writeImage(&first, image), writeImage(&second, image)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same program twice makes two images")
	}
	files := map[string][]byte{}
	for r := tar.NewReader(&first); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 || manifest[0].RepoTags[0] != image.Name {
		t.Fatalf("manifest %s names something else than %s", files["manifest.json"], image.Name)
	}
	for _, want := range []string{`"Entrypoint":["/app"]`, `"Cmd":["pause"]`, `"User":"1:2"`} {
		if config := string(files[manifest[0].Config]); !strings.Contains(config, want) {
			t.Errorf("configuration %s does not have %s", config, want)
		}
	}
	layer := tar.NewReader(bytes.NewReader(files[manifest[0].Layers[0]]))
	header, err := layer.Next()
	if err != nil || header.Name != "app" || header.FileInfo().Mode()&0o111 != 0o111 {
		t.Errorf("the layer begins with %+v (%v), want an executable app", header, err)
	}
	if header, err := layer.Next(); err != nil || header.Name != "bin/sh" || header.Linkname != "/app" {
		t.Errorf("after app the layer has %+v (%v), want a link from bin/sh to /app", header, err)
	}
	if err := writeImage(io.Discard, Image{Name: "x", Program: program + "-is-not-there"}); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("image of a program that is not there: %v", err)
	}
}

// An archive is taken as it is, and by a path that is the same on machines; one that is not there
// is named before any machine starts.
func TestArchive(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("app.tar", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := &Set{dir: "nowhere"}
	archives, err := s.pack([]Image{{Name: "lameduck.test/app:1", Archive: "app.tar"}})
	if err != nil || len(archives) != 1 || archives[0].name != "lameduck.test/app:1" ||
		!filepath.IsAbs(archives[0].path) {
		t.Errorf("archives %+v, %v", archives, err)
	}
	if _, err := s.pack([]Image{{Name: "lameduck.test/app:1", Archive: "none.tar"}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an archive that is not there: %v", err)
	}
}

package main

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// registryOf starts a registry on the loopback. before may answer a request in its place.
func registryOf(t *testing.T, before func(w http.ResponseWriter, r *http.Request) bool,
	options ...registry.Option) string {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir()) // no credentials
	handler := registry.New(append(options, registry.Logger(log.New(io.Discard, "", 0)))...)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if before == nil || !before(w, r) {
			handler.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://") + "/lameduck"
}

// What a registry has afterwards is what was made: the same digest by the tag, and what is in each
// image is found from it, whether the registry knows of such things or not. A repeat changes
// nothing.
func TestPush(t *testing.T) {
	made, _ := fixture(t)
	want := digests(t, made)
	for what, options := range map[string][]registry.Option{"referrers": {registry.WithReferrersSupport(true)},
		"no referrers": {registry.WithReferrersSupport(false)}} {
		t.Run(what, func(t *testing.T) {
			o := made
			o.registry = registryOf(t, nil, options...)
			for range 2 {
				var out bytes.Buffer
				if err := push(t.Context(), o, &out); err != nil {
					t.Fatal(err)
				}
				if !strings.Contains(out.String(), o.name("agent")+"@"+want["agent"]) {
					t.Errorf("said %q", &out)
				}
			}
			for _, program := range programs {
				ref, err := name.ParseReference(o.name(program))
				if err != nil {
					t.Fatal(err)
				}
				index, err := remote.Index(ref)
				if err != nil {
					t.Fatal(err)
				}
				if got, err := index.Digest(); err != nil || got.String() != want[program] {
					t.Errorf("%s is %s, want %s (%v)", ref, got, want[program], err)
				}
				manifest, err := index.IndexManifest()
				if err != nil {
					t.Fatal(err)
				}
				for i, d := range manifest.Manifests {
					image, err := remote.Image(ref, remote.WithPlatform(*d.Platform))
					if err != nil {
						t.Fatal(err)
					}
					layers, err := image.Layers()
					if err != nil {
						t.Fatal(err)
					}
					for _, layer := range layers {
						r, err := layer.Uncompressed() // which compares with the digest
						if err != nil {
							t.Fatal(err)
						}
						if _, err := io.Copy(io.Discard, r); err != nil {
							t.Error(err)
						}
						r.Close()
					}
					checkReferrer(t, ref.Context().Digest(d.Digest.String()),
						filepath.Join(made.out, bomFile(program, made.version, made.platforms[i])))
				}
			}
		})
	}
}

// checkReferrer looks what refers to an image, as scanners do.
func checkReferrer(t *testing.T, image name.Digest, file string) {
	t.Helper()
	referrers, err := remote.Referrers(image)
	if err != nil {
		t.Fatal(err)
	}
	found, err := referrers.IndexManifest()
	if err != nil || len(found.Manifests) != 1 {
		t.Fatalf("%d refer to %s: %v", len(found.Manifests), image, err)
	}
	if d := found.Manifests[0]; d.ArtifactType != bomType {
		t.Errorf("a %s refers to %s", d.ArtifactType, image)
	}
	artifact, err := remote.Image(image.Context().Digest(found.Manifests[0].Digest.String()))
	if err != nil {
		t.Fatal(err)
	}
	layers, err := artifact.Layers()
	if err != nil {
		t.Fatal(err)
	}
	r, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if want, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("what refers to %s is not %s: %v", image, file, err)
	}
}

// The tag of an image is there only when everything else is, whatever the registry refuses on the
// way.
func TestTagComesLast(t *testing.T) {
	made, _ := fixture(t)
	all, err := read(made.layoutDir())
	if err != nil {
		t.Fatal(err)
	}
	last, err := all[0].artifacts[len(all[0].artifacts)-1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var tagged, away bool
	o := made
	o.registry = registryOf(t, func(w http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if away {
			http.Error(w, "", http.StatusForbidden)
			return true
		}
		if r.Method != http.MethodPut || !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		tagged = tagged || strings.HasSuffix(r.URL.Path, "/webhook/manifests/"+made.version)
		if strings.HasSuffix(r.URL.Path, "/webhook/manifests/"+last.String()) {
			http.Error(w, `{"errors": [{"code": "DENIED"}]}`, http.StatusForbidden)
			return true
		}
		return false
	}, registry.WithReferrersSupport(true))
	if err := push(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), "push what is in image") {
		t.Errorf("refused: %v", err)
	}
	mu.Lock()
	away = true
	mu.Unlock()
	if err := push(t.Context(), o, io.Discard); os.Getenv("LAMEDUCK_DIST") == "" &&
		(err == nil || !strings.Contains(err.Error(), "look for image")) {
		t.Errorf("a registry that does not say whether the version is there: %v", err)
	}
	if tagged {
		t.Error("there is a tag without a list of what is in the image")
	}
}

// What people run by a version's tag is never changed under them. Other tags move.
func TestVersionsAreNotReplaced(t *testing.T) {
	if os.Getenv("LAMEDUCK_DIST") != "" {
		t.Skip("looks at images of its own")
	}
	o, s := fixture(t)
	o.registry = registryOf(t, nil, registry.WithReferrersSupport(true))
	if err := push(t.Context(), o, io.Discard); err != nil {
		t.Fatal(err)
	}
	head := func(tag string) v1.Hash {
		t.Helper()
		ref, err := name.ParseReference(o.registry + "/webhook:" + tag)
		if err != nil {
			t.Fatal(err)
		}
		d, err := remote.Head(ref)
		if err != nil {
			t.Fatal(err)
		}
		return d.Digest
	}
	before := head(o.version)
	other, changed := o, s
	other.out, changed.created = filepath.Join(t.TempDir(), "dist"), s.created.Add(time.Hour)
	repack := func() {
		t.Helper()
		if err := packImages(t.Context(), changed, other, filepath.Join(madeDir, "built"), io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	repack()
	if err := push(t.Context(), other, io.Discard); err == nil || !strings.Contains(err.Error(), before.String()) {
		t.Errorf("another image of the same version: %v", err)
	}
	if head(o.version) != before {
		t.Error("the version is another image now")
	}
	other.version, changed.version = "dev", "dev"
	if err := push(t.Context(), other, io.Discard); err == nil ||
		!strings.Contains(err.Error(), "make the images first") {
		t.Errorf("images of another version: %v", err)
	}
	repack()
	if err := push(t.Context(), other, io.Discard); err != nil {
		t.Fatal(err)
	}
	first := head("dev")
	changed.created = changed.created.Add(time.Hour)
	repack()
	if err := push(t.Context(), other, io.Discard); err != nil {
		t.Fatal(err)
	}
	if head("dev") == first {
		t.Error("dev is what it was")
	}
}

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// root is the tree.
var root = filepath.Join("..", "..")

var testSource = source{root: root, version: "v0.9.1", commit: "0123456789abcdef0123456789abcdef01234567",
	created: time.Unix(1_790_000_000, 0).UTC()}

var (
	makeOnce sync.Once
	madeDir  string
	errMade  error
)

func TestMain(m *testing.M) {
	code := m.Run()
	if madeDir != "" {
		os.RemoveAll(madeDir)
	}
	os.Exit(code)
}

// fixture returns images to look at. With LAMEDUCK_DIST they are those that make images has made
// there, of the version LAMEDUCK_VERSION. Else all three have lameduck-wait in them, which is
// compiled in a moment; what is tested is what is around the programs.
func fixture(t *testing.T) (options, source) {
	t.Helper()
	o := options{root: root, registry: "registry.example/lameduck", version: testSource.version,
		platforms: []platform{{"linux", "amd64"}, {"linux", "arm64"}}}
	if dir := os.Getenv("LAMEDUCK_DIST"); dir != "" {
		o.out, o.registry, o.version = dir, "docker.io/lameduck", os.Getenv("LAMEDUCK_VERSION")
		s, err := readSource(t.Context(), root, o.version, os.Getenv)
		if err != nil {
			t.Fatal(err)
		}
		return o, s
	}
	makeOnce.Do(func() {
		if madeDir, errMade = os.MkdirTemp("", "release-test-"); errMade != nil {
			return
		}
		o := o
		o.out = filepath.Join(madeDir, "dist")
		errMade = makeOf(testSource, o, filepath.Join(madeDir, "built"), "")
	})
	if errMade != nil {
		t.Fatal(errMade)
	}
	o.out = filepath.Join(madeDir, "dist")
	return o, testSource
}

// makeOf makes three images of lameduck-wait. For the first platform everything is compiled again
// if there is a folder for that.
func makeOf(s source, o options, built, cache string) error {
	for i, p := range o.platforms {
		s.cache = ""
		if i == 0 {
			s.cache = cache
		}
		dir := filepath.Join(built, p.String())
		if err := s.build(context.Background(), p, dir, "lameduck-wait"); err != nil {
			return err
		}
		for _, name := range programs[:2] {
			if err := os.Link(filepath.Join(dir, "lameduck-wait"), filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	return packImages(context.Background(), s, o, built, io.Discard)
}

// entry is one of a layer.
type entry struct {
	tar.Header
	content []byte
}

// unpack returns the files and folders of an image by name.
func unpack(t *testing.T, image v1.Image) map[string]entry {
	t.Helper()
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers: %v", len(layers), err)
	}
	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	all := map[string]entry{}
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
		all[header.Name] = entry{*header, content}
	}
}

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// What runs in clusters is in no image but the program, its licences and, for agents, the
// certificates of public authorities; for both processors.
func TestImages(t *testing.T) {
	o, s := fixture(t)
	all, err := read(o.layoutDir())
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(programs) {
		t.Fatalf("%d images, want %v", len(all), programs)
	}
	for i, image := range all {
		if image.program != programs[i] || image.version != o.version {
			t.Errorf("image %d is %s:%s", i, image.program, image.version)
		}
		manifest, err := image.index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		if len(manifest.Manifests) != len(o.platforms) || len(image.artifacts) != len(o.platforms) {
			t.Fatalf("%s has %d platforms and %d lists of what is in it, want %d", image.program,
				len(manifest.Manifests), len(image.artifacts), len(o.platforms))
		}
		for j, d := range manifest.Manifests {
			on := o.platforms[j]
			t.Run(image.program+"-"+on.String(), func(t *testing.T) {
				one, err := image.index.Image(d.Digest)
				if err != nil {
					t.Fatal(err)
				}
				if d.Platform == nil || d.Platform.OS != on.os || d.Platform.Architecture != on.arch {
					t.Errorf("is listed for %v", d.Platform)
				}
				binary := checkImage(t, one, image.program, s, on)
				checkList(t, image.artifacts[j], d, binary, s,
					filepath.Join(o.out, bomFile(image.program, o.version, on)), image.program == "agent")
			})
		}
		if _, err := os.Stat(filepath.Join(o.out, archiveFile(image.program, o.version))); err != nil {
			t.Error(err)
		}
	}
}

// checkImage returns the program that is in an image.
func checkImage(t *testing.T, image v1.Image, name string, s source, on platform) []byte {
	t.Helper()
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.OS != on.os || config.Architecture != on.arch || !config.Created.Equal(s.created) {
		t.Errorf("is for %s/%s, made at %s", config.OS, config.Architecture, config.Created)
	}
	if c := config.Config; c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/" + name}) ||
		len(c.Cmd) > 0 || len(c.Env) > 0 {
		t.Errorf("runs %v %v as %q with %v", c.Entrypoint, c.Cmd, c.User, c.Env)
	}
	manifest, err := image.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"source": "https://github.com/lameduck-io/lameduck", "revision": s.commit, "version": s.version,
		"licenses": "Apache-2.0", "created": s.created.Format(time.RFC3339),
	} {
		key = "org.opencontainers.image." + key
		if got := config.Config.Labels[key]; got != want {
			t.Errorf("label %s is %q, want %q", key, got, want)
		}
		if got := manifest.Annotations[key]; got != want {
			t.Errorf("annotation %s is %q, want %q", key, got, want)
		}
	}
	if manifest.MediaType != types.OCIManifestSchema1 || manifest.Config.MediaType != types.OCIConfigJSON {
		t.Errorf("is a %s of %s", manifest.MediaType, manifest.Config.MediaType)
	}
	all := unpack(t, image)
	for path, e := range all {
		switch {
		case path == name, strings.HasPrefix(path, "licenses/"), name == "agent" &&
			strings.HasPrefix("etc/ssl/certs/ca-certificates.crt", path):
		default:
			t.Errorf("has %s", path)
		}
		if e.Uid != 0 || e.Gid != 0 || !e.ModTime.Equal(s.created) {
			t.Errorf("%s is of %d:%d and %s", path, e.Uid, e.Gid, e.ModTime)
		}
		if mode := e.FileInfo().Mode().Perm(); mode != 0o755 &&
			(e.Typeflag == tar.TypeDir || path == name || mode != 0o644) {
			t.Errorf("%s has mode %s", path, mode)
		}
	}
	if name == "agent" && bytes.Count(all["etc/ssl/certs/ca-certificates.crt"].content,
		[]byte("BEGIN CERTIFICATE")) < 100 {
		t.Error("trusts fewer than 100 authorities")
	}
	own, err := os.ReadFile(filepath.Join(root, "LICENSE"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(all["licenses/LICENSE"].content, own) || len(all["licenses/go/LICENSE"].content) == 0 {
		t.Error("our own licence or Go's is missing")
	}
	binary := all[name].content
	header, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		t.Fatal(err)
	}
	if header.Machine != machines[on.arch] {
		t.Errorf("/%s is for %s", name, header.Machine)
	}
	if libraries, err := header.ImportedLibraries(); err == nil && len(libraries) > 0 ||
		header.Section(".interp") != nil {
		t.Errorf("/%s needs %v and a dynamic linker", name, libraries)
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range info.Deps {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(all)), func(path string) bool {
			return strings.HasPrefix(path, "licenses/"+m.Path+"@"+m.Version+"/")
		}) {
			t.Errorf("has no licence of %s", m.Path)
		}
	}
	if on.os == runtime.GOOS && on.arch == runtime.GOARCH {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, binary, 0o755); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), file, "--version").CombinedOutput()
		// The name is that of the program, which is not the image's in the fixture.
		if want := fmt.Sprintf(" %s, commit %s, %s linux/%s\n", s.version, s.commit, info.GoVersion,
			on.arch); err != nil || !strings.HasSuffix(string(out), want) {
			t.Errorf("--version: %v: %q, want ...%q", err, out, want)
		}
	}
	return binary
}

// checkList compares the list of what is in a program with what the linker has written into it.
func checkList(t *testing.T, artifact v1.Image, of v1.Descriptor, binary []byte, s source, beside string, trusts bool) {
	t.Helper()
	manifest, err := artifact.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	if manifest.Subject == nil || manifest.Subject.Digest != of.Digest || manifest.Subject.Size != of.Size ||
		manifest.Subject.MediaType != of.MediaType {
		t.Errorf("the list is of %+v, not of %+v", manifest.Subject, of)
	}
	if manifest.Config.MediaType != bomType || len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != bomType {
		t.Fatalf("the list is %s, %+v", manifest.Config.MediaType, manifest.Layers)
	}
	layer, err := artifact.LayerByDigest(manifest.Layers[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	r, err := layer.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if same, err := os.ReadFile(beside); err != nil || !bytes.Equal(content, same) {
		t.Errorf("%s is not what registries get: %v", beside, err)
	}
	b := &cdx.BOM{}
	if err := cdx.NewBOMDecoder(bytes.NewReader(content), cdx.BOMFileFormatJSON).Decode(b); err != nil {
		t.Fatal(err)
	}
	if b.BOMFormat != "CycloneDX" || b.SpecVersion != cdx.SpecVersion1_6 ||
		b.Metadata.Timestamp != s.created.Format(time.RFC3339) {
		t.Errorf("is a %s %s of %s", b.BOMFormat, b.SpecVersion, b.Metadata.Timestamp)
	}
	self := b.Metadata.Component
	if sum := fmt.Sprintf("%x", sha256.Sum256(binary)); self.Version != s.version || (*self.Hashes)[0].Value != sum {
		t.Errorf("is of version %s with the hash %s, want %s, %s", self.Version, (*self.Hashes)[0].Value, s.version,
			sum)
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"stdlib " + strings.TrimPrefix(info.GoVersion, "go"): ""}
	for _, m := range info.Deps {
		want[m.Path+" "+m.Version] = m.Sum
	}
	if trusts {
		m, err := ownModule(rootsModule)
		if err != nil {
			t.Fatal(err)
		}
		want[m.path+" "+m.version] = m.sum
	}
	got := map[string]string{}
	for _, c := range *b.Components {
		sum := ""
		if c.Properties != nil {
			sum = (*c.Properties)[0].Value
		}
		got[c.Name+" "+c.Version] = sum
		if plain, err := url.PathUnescape(c.PackageURL); err != nil || plain != "pkg:golang/"+c.Name+"@"+c.Version {
			t.Errorf("%s %s is called %s", c.Name, c.Version, c.PackageURL)
		}
		if !slices.Contains(*(*b.Dependencies)[0].Dependencies, c.BOMRef) {
			t.Errorf("%s is not said to be needed", c.Name)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("lists %v, want %v", got, want)
	}
}

// A program with modules: this one. What has none of its own, as lameduck-wait, tells little of how
// they are listed.
func TestBOMOfManyModules(t *testing.T) {
	file, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := readProgram("release", file)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.info.Deps) < 10 {
		t.Fatalf("go writes %d modules into a test program", len(p.info.Deps))
	}
	on := platform{runtime.GOOS, runtime.GOARCH}
	listed, err := bom(testSource, p, on)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"purl": "pkg:golang/github.com/google/go-containerregistry@v`,
		`"purl": "pkg:golang/github.com/docker/cli@v`, `%2Bincompatible"`, `"version": "v0.`} {
		if !strings.Contains(string(listed), want) {
			t.Errorf("no %s in %s", want, listed)
		}
	}
	texts, err := licenses(t.Context(), testSource, p)
	if err != nil {
		t.Fatal(err)
	}
	modules, err := p.modules()
	if err != nil || len(modules) != len(p.info.Deps) {
		t.Fatalf("%d modules of %d: %v", len(modules), len(p.info.Deps), err)
	}
	for _, m := range modules {
		if !strings.Contains(string(listed), `"purl": "`+m.purl()+`"`) {
			t.Errorf("%s is not listed", m)
		}
		if !slices.ContainsFunc(slices.Collect(maps.Keys(texts)), func(name string) bool {
			return strings.HasPrefix(name, "licenses/"+m.String()+"/")
		}) {
			t.Errorf("no licence of %s", m)
		}
	}
	// A module that is not the one that the program was built of, and one of a folder.
	p.info.Deps[0].Sum = "h1:another"
	if _, err := licenses(t.Context(), testSource, p); err == nil ||
		!strings.Contains(err.Error(), "is not the one in release") {
		t.Errorf("the licence of another module was taken: %v", err)
	}
	p.info.Deps[0].Version = ""
	if _, err := bom(testSource, p, on); err == nil || !strings.Contains(err.Error(), "of a folder") {
		t.Errorf("a module of a folder was listed: %v", err)
	}
}

// digests of the images in a folder.
func digests(t *testing.T, o options) map[string]string {
	t.Helper()
	all, err := read(o.layoutDir())
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, image := range all {
		found[image.program] = image.digest.String()
		for _, name := range []string{archiveFile(image.program, o.version),
			bomFile(image.program, o.version, o.platforms[0])} {
			content, err := os.ReadFile(filepath.Join(o.out, name))
			if err != nil {
				t.Fatal(err)
			}
			found[name] = fmt.Sprintf("%x", sha256.Sum256(content))
		}
	}
	return found
}

// copyTree copies what git would, to a folder that has another name and files of another time.
func copyTree(t *testing.T, to string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if slices.Contains([]string{".git", "bin", "dist"}, relative) {
				return filepath.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, relative), 0o700)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, relative), content, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Every reader of the tree can make the same images, and so see that those of a registry are of
// this tree: in another folder, with other rights and times of files, with nothing compiled before,
// and whatever else the environment asks of go. With LAMEDUCK_DIST it is the images of make images,
// all three, that come out again.
func TestTheSameEverywhere(t *testing.T) {
	o, s := fixture(t)
	want := digests(t, o)
	s.root = filepath.Join(t.TempDir(), "another", "folder")
	copyTree(t, s.root)
	again := o
	again.out = filepath.Join(t.TempDir(), "dist")
	t.Setenv("GOFLAGS", "-race -ldflags=-X=main.x=y")
	t.Setenv("GOAMD64", "v3")
	var err error
	if os.Getenv("LAMEDUCK_DIST") != "" {
		err = makeImages(t.Context(), s, again, io.Discard)
	} else {
		err = makeOf(s, again, filepath.Join(t.TempDir(), "built"), filepath.Join(t.TempDir(), "cache"))
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range digests(t, again) {
		if got != want[name] {
			t.Errorf("made again in another folder %s is %s, want %s", name, got, want[name])
		}
	}
}

// An archive has its image alone, by its name: that is what nodes import.
func TestArchive(t *testing.T) {
	o, _ := fixture(t)
	want := digests(t, o)
	for _, name := range programs {
		dir := t.TempDir()
		if out, err := exec.CommandContext(t.Context(), "tar", "-xf",
			filepath.Join(o.out, archiveFile(name, o.version)), "-C", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		all, err := read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) != 1 || all[0].program != name || all[0].digest.String() != want[name] ||
			len(all[0].artifacts) > 0 {
			t.Errorf("the archive of %s has %+v", name, all)
		}
	}
}

// A layout that lost something is not taken for whole.
func TestReadOfAHalfLayout(t *testing.T) {
	o, _ := fixture(t)
	all, err := read(o.layoutDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	half, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := half.AppendImage(all[0].artifacts[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := read(dir); err == nil || !strings.Contains(err.Error(), "which is not there") {
		t.Errorf("a list of no image: %v", err)
	}
	dir = t.TempDir()
	if half, err = layout.Write(filepath.Join(dir, "images"), empty.Index); err != nil {
		t.Fatal(err)
	}
	name := layout.WithAnnotations(map[string]string{nameAnnotation: o.name("webhook")})
	if err := half.AppendIndex(all[0].index, name); err != nil {
		t.Fatal(err)
	}
	cut := o
	cut.out = dir
	if err := push(t.Context(), cut, io.Discard); err == nil ||
		!strings.Contains(err.Error(), "make the images first") {
		t.Errorf("one image of three: %v", err)
	}
	if _, err := read(filepath.Join(dir, "nowhere")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no layout: %v", err)
	}
}

package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"
)

const (
	license    = "Apache-2.0"
	repository = "https://github.com/lameduck-io/lameduck"
	// user is a user and group without a name, as in the manifests.
	user = "65532:65532"
	// nameAnnotation is where containerd finds what an image of an archive is called, refAnnotation
	// where others do.
	nameAnnotation = "io.containerd.image.name"
	refAnnotation  = "org.opencontainers.image.ref.name"
)

var titles = map[string]string{
	"webhook": "Lameduck's coordinator: holds deletions of pods until the gateways that route " +
		"to them have stopped",
	"agent":         "Lameduck's agent, beside a gateway: acknowledges when the gateway has stopped routing to a pod",
	"lameduck-wait": "Lameduck's hook for pods that may not be given one by HTTP",
}

// layoutDir is where images are below the folder for what is made.
func (o options) layoutDir() string { return filepath.Join(o.out, "images") }

// name is what pods call an image.
func (o options) name(program string) string { return o.registry + "/" + program + ":" + o.version }

// bomFile and archiveFile are where what belongs to an image is, below the folder for what is made.
func bomFile(program, version string, p platform) string {
	return program + "-" + version + "-" + p.String() + ".cdx.json"
}

func archiveFile(program, version string) string { return program + "-" + version + ".oci.tar" }

// makeImages builds the programs for every platform and writes their images, the lists of what is
// in them, and an archive of each image.
func makeImages(ctx context.Context, s source, o options, out io.Writer) error {
	built, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(built) }()
	// One after another: each build uses all processors.
	for _, p := range o.platforms {
		if err := s.build(ctx, p, filepath.Join(built, p.String()), programs...); err != nil {
			return err
		}
	}
	return packImages(ctx, s, o, built, out)
}

// packImages is makeImages of programs that were built, in a folder for each platform.
func packImages(ctx context.Context, s source, o options, built string, out io.Writer) error {
	if err := os.RemoveAll(o.layoutDir()); err != nil {
		return err
	}
	all, err := layout.Write(o.layoutDir(), empty.Index)
	if err != nil {
		return err
	}
	images := make([]made, len(programs))
	var g errgroup.Group
	g.SetLimit(2)
	for i, name := range programs {
		g.Go(func() (err error) {
			images[i], err = s.image(ctx, name, o.platforms, built)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, m := range images {
		if err := m.write(all, o, s, out); err != nil {
			return fmt.Errorf("write image %s: %w", m.name, err)
		}
	}
	return nil
}

// made is an image for several platforms.
type made struct {
	name  string
	index v1.ImageIndex
	lists []list
}

// list is what is in the image for one platform, and the artifact by which registries find it from
// the image.
type list struct {
	on       platform
	content  []byte
	artifact v1.Image
}

// image makes that of a program, which was built below dir for each platform.
func (s source) image(ctx context.Context, name string, platforms []platform, dir string) (made, error) {
	m := made{name: name}
	index := v1.ImageIndex(empty.Index)
	for _, on := range platforms {
		image, content, err := s.imageOn(ctx, name, on, filepath.Join(dir, on.String(), name))
		if err != nil {
			return m, fmt.Errorf("make image %s for %s: %w", name, on, err)
		}
		config, err := image.ConfigFile()
		if err != nil {
			return m, err
		}
		index = mutate.AppendManifests(index,
			mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: config.Platform()}})
		subject, err := partial.Descriptor(image)
		if err != nil {
			return m, err
		}
		artifact, err := s.artifact(*subject, content)
		if err != nil {
			return m, err
		}
		m.lists = append(m.lists, list{on, content, artifact})
	}
	m.index = mutate.Annotations(index, s.labels(name)).(v1.ImageIndex)
	return m, nil
}

// labels are OCI's own: https://specs.opencontainers.org/image-spec/annotations/.
func (s source) labels(name string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       "lameduck/" + name,
		"org.opencontainers.image.description": titles[name],
		"org.opencontainers.image.source":      repository,
		"org.opencontainers.image.version":     s.version,
		"org.opencontainers.image.revision":    s.commit,
		"org.opencontainers.image.licenses":    license,
		"org.opencontainers.image.created":     s.created.Format(time.RFC3339),
	}
}

// imageOn makes the image for one platform: the program at /, its licences, and nothing else that
// is not needed.
func (s source) imageOn(ctx context.Context, name string, on platform, path string) (v1.Image, []byte, error) {
	p, err := readProgram(name, path)
	if err != nil {
		return nil, nil, err
	}
	content := files{name: {p.content, true}}
	var more []module
	if name == "agent" {
		trusted, err := roots()
		if err != nil {
			return nil, nil, err
		}
		content["etc/ssl/certs/ca-certificates.crt"] = file{content: trusted}
		m, err := ownModule(rootsModule)
		if err != nil {
			return nil, nil, err
		}
		more = append(more, m)
	}
	texts, err := licenses(ctx, s, p, more...)
	if err != nil {
		return nil, nil, err
	}
	maps.Copy(content, texts)
	listed, err := bom(s, p, on, more...)
	if err != nil {
		return nil, nil, err
	}
	var layer bytes.Buffer
	if err := writeTar(&layer, content, s.created); err != nil {
		return nil, nil, err
	}
	packed, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer.Bytes())), nil
	},
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching, tarball.WithCompressionLevel(6))
	if err != nil {
		return nil, nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if image, err = mutate.Append(image, mutate.Addendum{
		Layer: packed, History: v1.History{Created: v1.Time{Time: s.created}, CreatedBy: "make images"},
	}); err != nil {
		return nil, nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = on.os, on.arch, v1.Time{Time: s.created}
	config.Config = v1.Config{User: user, Entrypoint: []string{"/" + name}, WorkingDir: "/", Labels: s.labels(name)}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return nil, nil, err
	}
	return mutate.Annotations(image, s.labels(name)).(v1.Image), listed, nil
}

// artifact is what registries keep beside an image and name when they are asked what refers to it.
func (s source) artifact(subject v1.Descriptor, content []byte) (v1.Image, error) {
	// Where the manifest has no artifactType, it is the configuration's media type.
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), bomType)
	image, err := mutate.Append(image, mutate.Addendum{Layer: static.NewLayer(content, bomType)})
	if err != nil {
		return nil, err
	}
	// The subject last: a mutation after it would drop it.
	image = mutate.Annotations(image,
		map[string]string{"org.opencontainers.image.created": s.created.Format(time.RFC3339)}).(v1.Image)
	return mutate.Subject(image, v1.Descriptor{MediaType: subject.MediaType, Size: subject.Size,
		Digest: subject.Digest}).(v1.Image), nil
}

// ownModule is one that this program was built of.
func ownModule(path string) (module, error) {
	var info *buildinfo.BuildInfo
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, m := range info.Deps {
			if m.Path == path {
				return module{m.Path, m.Version, m.Sum}, nil
			}
		}
	}
	return module{}, errors.New("this program does not know which " + path + " is in it")
}

// write puts the image into the layout, its lists and an archive beside it, and says what it is.
func (m made) write(all layout.Path, o options, s source, out io.Writer) error {
	name := o.name(m.name)
	called := layout.WithAnnotations(map[string]string{nameAnnotation: name, refAnnotation: name})
	if err := all.AppendIndex(m.index, called); err != nil {
		return err
	}
	for _, l := range m.lists {
		if err := all.AppendImage(l.artifact,
			layout.WithAnnotations(map[string]string{"org.opencontainers.image.title": bomFile(m.name, s.version,
				l.on)})); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(o.out, bomFile(m.name, s.version, l.on)), l.content, 0o644); err != nil {
			return err
		}
	}
	// Alone, and without what refers to it: who imports the archive wants to run it.
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	one, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := one.AppendIndex(m.index, called); err != nil {
		return err
	}
	if err := archive(dir, filepath.Join(o.out, archiveFile(m.name, s.version)), s.created); err != nil {
		return err
	}
	digest, err := m.index.Digest()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s@%s\n", name, digest)
	return nil
}

// archive writes a folder into a tar archive.
func archive(dir, path string, at time.Time) error {
	all := files{}
	err := filepath.WalkDir(dir, func(name string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(name)
		relative, _ := filepath.Rel(dir, name)
		all[strings.ReplaceAll(relative, string(filepath.Separator), "/")] = file{content: content}
		return err
	})
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := writeTar(&out, all, at); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

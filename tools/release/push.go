package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/mod/semver"
)

// stored is what a layout has of one program.
type stored struct {
	program, version string
	index            v1.ImageIndex
	digest           v1.Hash
	artifacts        []v1.Image
}

// read returns what is in a layout, in its order.
func read(dir string) ([]stored, error) {
	all, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read images of %s: %w", dir, err)
	}
	top, err := all.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read images of %s: %w", dir, err)
	}
	var found []stored
	of := map[v1.Hash]int{} // by digest of an image for one platform
	for _, d := range top.Manifests {
		called := d.Annotations[nameAnnotation]
		if called == "" {
			continue
		}
		s := stored{digest: d.Digest}
		s.program, s.version, _ = strings.Cut(called[strings.LastIndexByte(called, '/')+1:], ":")
		if s.index, err = all.ImageIndex(d.Digest); err != nil {
			return nil, fmt.Errorf("read image %s: %w", called, err)
		}
		manifest, err := s.index.IndexManifest()
		if err != nil {
			return nil, fmt.Errorf("read image %s: %w", called, err)
		}
		for _, m := range manifest.Manifests {
			of[m.Digest] = len(found)
		}
		found = append(found, s)
	}
	for _, d := range top.Manifests {
		if d.Annotations[nameAnnotation] != "" {
			continue
		}
		artifact, err := all.Image(d.Digest)
		if err != nil {
			return nil, fmt.Errorf("read %s of %s: %w", d.Digest, dir, err)
		}
		manifest, err := artifact.Manifest()
		if err != nil {
			return nil, fmt.Errorf("read %s of %s: %w", d.Digest, dir, err)
		}
		if manifest.Subject == nil {
			return nil, fmt.Errorf("%s of %s belongs to no image", d.Digest, dir)
		}
		i, known := of[manifest.Subject.Digest]
		if !known {
			return nil, fmt.Errorf("%s of %s belongs to image %s, which is not there", d.Digest, dir,
				manifest.Subject.Digest)
		}
		found[i].artifacts = append(found[i].artifacts, artifact)
	}
	return found, nil
}

// readAll returns the images of o's version in its layout: all of them, or an error. A run that was
// cut off has left some.
func readAll(o options) ([]stored, error) {
	images, err := read(o.layoutDir())
	if err != nil {
		return nil, err
	}
	var names []string
	for _, image := range images {
		if image.version != o.version {
			return nil, fmt.Errorf("%s has %s:%s, not %s: make the images first", o.layoutDir(), image.program,
				image.version, o.version)
		}
		names = append(names, image.program)
	}
	if !slices.Equal(names, programs) {
		return nil, fmt.Errorf("%s has %v, not %v: make the images first", o.layoutDir(), names, programs)
	}
	return images, nil
}

// push brings the images of a layout and what refers to them to a registry, with the credentials
// that docker or podman have stored. The tag comes last: who sees it finds everything. A tag that
// is a version is never given to something else; any other is. A repeat changes nothing.
func push(ctx context.Context, o options, out io.Writer) error {
	images, err := readAll(o)
	if err != nil {
		return err
	}
	with := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain),
		remote.WithUserAgent("lameduck-release")}
	for _, image := range images {
		ref, err := name.NewTag(o.name(image.program), name.StrictValidation)
		if err != nil {
			return fmt.Errorf("push image %s: %w", image.program, err)
		}
		if semver.IsValid(o.version) {
			there, err := remote.Head(ref, with...)
			var answer *transport.Error
			switch {
			case errors.As(err, &answer) && answer.StatusCode == http.StatusNotFound:
			case err != nil: // it may be there
				return fmt.Errorf("look for image %s: %w", ref, err)
			case there.Digest != image.digest:
				return fmt.Errorf("push image %s: %s is there, and is %s, not %s", image.program, ref, there.Digest,
					image.digest)
			}
		}
		if err := remote.WriteIndex(ref.Digest(image.digest.String()), image.index, with...); err != nil {
			return fmt.Errorf("push image %s: %w", ref, err)
		}
		for _, artifact := range image.artifacts {
			d, err := partial.Descriptor(artifact)
			if err != nil {
				return err
			}
			if err := remote.Write(ref.Digest(d.Digest.String()), artifact, with...); err != nil {
				return fmt.Errorf("push what is in image %s: %w", ref, err)
			}
		}
		if err := remote.Tag(ref, image.index, with...); err != nil {
			return fmt.Errorf("tag image %s: %w", ref, err)
		}
		fmt.Fprintf(out, "%s@%s\n", ref, image.digest)
	}
	return nil
}

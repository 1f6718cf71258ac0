package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// rendered are the files that people apply, and the folder of manifests that each is made of.
var rendered = map[string]string{
	"install.yaml":                  "base",
	"install-cert-manager.yaml":     "overlays/cert-manager",
	"install-own-certificates.yaml": "overlays/own-certificates",
	"barrier.yaml":                  "barrier",
	"barrier-cert-manager.yaml":     "overlays/cert-manager-barrier",
	"check.yaml":                    "check",
}

// placeholder is how the tree names our images: by a tag that is never pushed.
var placeholder = regexp.MustCompile(`(?:docker\.io/)?\blameduck/(webhook|agent|lameduck-wait):dev\b`)

// references are the images of a layout by program, as name:tag@digest.
func references(o options) (map[string]string, error) {
	images, err := readAll(o)
	if err != nil {
		return nil, err
	}
	refs := map[string]string{}
	for _, image := range images {
		refs[image.program] = o.name(image.program) + "@" + image.digest.String()
	}
	return refs, nil
}

// replaceOnce is for what must be there exactly once: a tree that was changed must not go out with
// a half of this.
func replaceOnce(text, old, with string) (string, error) {
	if n := strings.Count(text, old); n != 1 {
		return "", fmt.Errorf("%q is there %d times, not once", old, n)
	}
	return strings.Replace(text, old, with, 1), nil
}

// readTree reads a folder. A link to a file is that file: charts have what manifests have, too.
func readTree(dir string) (files, error) {
	all := files{}
	err := filepath.WalkDir(dir, func(name string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		all[filepath.ToSlash(relative)] = file{content: content}
		return err
	})
	return all, err
}

// edit changes one file.
func (all files) edit(name string, change func(text string) (string, error)) error {
	text, err := change(string(all[name].content))
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	all[name] = file{content: []byte(text)}
	return nil
}

// manifests are those of the tree, naming images by digest, that of what the coordinator puts into
// pods included.
func manifests(root string, refs map[string]string) (files, error) {
	all, err := readTree(filepath.Join(root, "manifests"))
	if err != nil {
		return nil, err
	}
	for name, f := range all {
		all[name] = file{content: placeholder.ReplaceAllFunc(f.content, func(found []byte) []byte {
			return []byte(refs[string(placeholder.FindSubmatch(found)[1])])
		})}
	}
	if said := "    barrier:\n      image: " + refs["lameduck-wait"] + "\n"; !bytes.Contains(
		all["base/webhook.yaml"].content, []byte(said)) {
		return nil, fmt.Errorf("base/webhook.yaml does not name what is put into pods: %q", said)
	}
	return all, nil
}

// render is kubectl kustomize.
func render(all files, dir string) ([]byte, error) {
	disk := filesys.MakeFsInMemory()
	for name, f := range all {
		if err := disk.WriteFile("/manifests/"+name, f.content); err != nil {
			return nil, err
		}
	}
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(disk, "/manifests/"+dir)
	if err != nil {
		return nil, fmt.Errorf("render manifests/%s: %w", dir, err)
	}
	return objects.AsYaml()
}

// chart is the tree's, naming images by digest, and its version: that of the release, or 0.0.0-NAME
// where that is none.
func chart(root string, o options, refs map[string]string) (files, string, error) {
	version := strings.TrimPrefix(o.version, "v")
	if v := "v" + version; !semver.IsValid(v) || semver.Canonical(v) != v {
		version = "0.0.0-" + o.version
		if !semver.IsValid("v" + version) {
			return nil, "", fmt.Errorf("%q cannot be a chart's version", o.version)
		}
	}
	inside, err := readTree(filepath.Join(root, "charts", "lameduck"))
	if err != nil {
		return nil, "", err
	}
	err = errors.Join(
		inside.edit("Chart.yaml", func(text string) (string, error) {
			line := regexp.MustCompile(`(?m)^version: .*$`)
			if n := len(line.FindAllString(text, -1)); n != 1 {
				return "", fmt.Errorf("%d versions, not one", n)
			}
			return replaceOnce(line.ReplaceAllString(text, "version: "+version), "\nappVersion: dev",
				"\nappVersion: "+o.version)
		}),
		inside.edit("values.yaml", func(text string) (string, error) {
			image, tag, _ := strings.Cut(refs["webhook"], ":"+o.version+"@")
			text, err0 := replaceOnce(text, "repository: lameduck/webhook\n", "repository: "+image+"\n")
			text, err1 := replaceOnce(text, "\n  tag: dev\n", "\n  tag: "+o.version+"@"+tag+"\n")
			text, err2 := replaceOnce(text, "agentImage: lameduck/agent:dev\n", "agentImage: "+refs["agent"]+"\n")
			text, err3 := replaceOnce(text, "waitImage: lameduck/lameduck-wait:dev\n",
				"waitImage: "+refs["lameduck-wait"]+"\n")
			return text, errors.Join(err0, err1, err2, err3)
		}),
	)
	inside["files/values.yaml"] = inside["values.yaml"] // a link, by which templates read the defaults
	all := files{}
	for name, f := range inside {
		all["lameduck/"+name] = f
	}
	return all, version, err
}

// makeManifests writes what people install by, for the images of the layout.
func makeManifests(s source, o options, out io.Writer) error {
	refs, err := references(o)
	if err != nil {
		return err
	}
	all, err := manifests(s.root, refs)
	if err != nil {
		return err
	}
	inside, version, err := chart(s.root, o, refs)
	if err != nil {
		return err
	}
	write := map[string][]byte{}
	for name, dir := range rendered {
		if write[name], err = render(all, dir); err != nil {
			return err
		}
	}
	packed := files{}
	for name, f := range all {
		packed["manifests/"+name] = f
	}
	if write["manifests-"+o.version+".tar.gz"], err = compressed(packed, s.created); err != nil {
		return err
	}
	if write["lameduck-"+version+".tgz"], err = compressed(inside, s.created); err != nil {
		return err
	}
	var list bytes.Buffer
	for _, p := range programs {
		fmt.Fprintln(&list, refs[p])
	}
	write["images.txt"] = list.Bytes()
	for name, content := range write {
		for _, found := range placeholder.FindAllIndex(content, -1) {
			if !bytes.HasPrefix(content[found[1]:], []byte("@sha256:")) {
				return fmt.Errorf("%s still names %s", name, content[found[0]:found[1]])
			}
		}
	}
	return writeAll(o.out, write, out)
}

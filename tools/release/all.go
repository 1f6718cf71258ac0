package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// plugin is kubectl lameduck, and plugins what it is built for.
const plugin = "kubectl-lameduck"

var plugins = []platform{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}}

// pluginFile is the file name of kubectl lameduck for one platform.
func pluginFile(version string, on platform) string {
	return plugin + "-" + version + "-" + on.String() + ".tar.gz"
}

// writeAll writes files into a folder and says so.
func writeAll(dir string, all map[string][]byte, out io.Writer) error {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := os.WriteFile(filepath.Join(dir, name), all[name], 0o644); err != nil {
			return err
		}
		fmt.Fprintln(out, filepath.Join(dir, name))
	}
	return nil
}

// makeAll makes a release in an empty folder. SHA256SUMS is written last: a folder with it is
// whole.
func makeAll(ctx context.Context, s source, o options, out io.Writer) error {
	entries, err := os.ReadDir(o.out)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("%s is not empty: what is left there of another version would go out with this one", o.out)
	}
	if err := makeImages(ctx, s, o, out); err != nil {
		return err
	}
	if err := makeManifests(s, o, out); err != nil {
		return err
	}
	if err := makePlugins(ctx, s, o, out); err != nil {
		return err
	}
	if o.download != "" {
		manifest, err := krew(o)
		if err != nil {
			return err
		}
		if err := writeAll(o.out, map[string][]byte{krewName + ".yaml": manifest}, out); err != nil {
			return err
		}
	}
	return writeSums(o.out, out)
}

// writeSums writes the checksums of all files of a folder, but not of its folders: each file of the
// images' is called by its digest.
func writeSums(dir string, out io.Writer) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var sums bytes.Buffer
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), e.Name())
	}
	return writeAll(dir, map[string][]byte{"SHA256SUMS": sums.Bytes()}, out)
}

// makePlugins writes kubectl lameduck for people's computers, with its licences, and what is in it.
func makePlugins(ctx context.Context, s source, o options, out io.Writer) error {
	built, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(built) }()
	for _, on := range plugins {
		dir := filepath.Join(built, on.String())
		if err := s.build(ctx, on, dir, plugin); err != nil {
			return err
		}
		if err := packPlugin(ctx, s, o, on, filepath.Join(dir, plugin), out); err != nil {
			return err
		}
	}
	return nil
}

// packPlugin is makePlugins for one platform, of a program that was built.
func packPlugin(ctx context.Context, s source, o options, on platform, path string, out io.Writer) error {
	p, err := readProgram(plugin, path)
	if err != nil {
		return err
	}
	content, err := licenses(ctx, s, p)
	if err != nil {
		return err
	}
	content[plugin] = file{p.content, true}
	packed, err := compressed(content, s.created)
	if err != nil {
		return err
	}
	listed, err := bom(s, p, on)
	if err != nil {
		return err
	}
	return writeAll(o.out, map[string][]byte{
		pluginFile(s.version, on): packed, bomFile(plugin, s.version, on): listed,
	}, out)
}

package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

const pauseImage = "lameduck.test/pause:1"

// Image is a program to run in containers, and nothing else unless it says so: no shell, no files,
// user 0 if the pod does not say otherwise. The pods' pull policy must not be Always.
type Image struct {
	// Name is what pods call it, with a registry and a tag: "lameduck.test/app:1".
	Name string
	// Program is the file of a statically linked program. It is the entry point, at / with the name
	// of the file.
	Program string
	// Libraries are files of this computer that the program needs at the same place, if it is not
	// statically linked. See [Libraries].
	Libraries []string
	// Links are symbolic links: what each path leads to.
	Links map[string]string
	// Args are those of the program where a pod has none.
	Args []string
	// User is who runs the program where a pod does not say, as UID:GID. Empty: root.
	User string
	// Archive is the file of an OCI archive that has the image by its Name, in place of Program. It
	// may have it for other platforms too.
	Archive string
}

// Libraries are the files that the dynamic linker says a program needs, itself included, sorted.
func Libraries(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", program).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	var all []string
	for line := range strings.Lines(string(out)) {
		// "libz.so.1 => /lib/libz.so.1 (0x7f...)", or "/lib64/ld-linux.so.2 (0x7f...)"; the
		// kernel's own is in no file.
		for _, field := range strings.Fields(line) {
			if filepath.IsAbs(field) {
				all = append(all, field)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// archive is an image in a file, for containerd to import.
type archive struct{ name, path string }

// Load brings images to every machine and returns when pods can use them. A name that is there
// already is given to the new image; containers that run keep theirs.
func (s *Set) Load(ctx context.Context, images ...Image) error {
	archives, err := s.pack(images)
	if err != nil {
		return err
	}
	return s.each(func(m *Machine) error {
		for _, image := range archives {
			if err := m.load(ctx, image); err != nil {
				return err
			}
		}
		return nil
	})
}

// pack makes archives of images, in the folder of the set.
func (s *Set) pack(images []Image) ([]archive, error) {
	var archives []archive
	for _, image := range images {
		if image.Archive != "" {
			path, err := filepath.Abs(image.Archive)
			if err == nil {
				_, err = os.Stat(path)
			}
			if err != nil {
				return nil, fmt.Errorf("take image %s: %w", image.Name, err)
			}
			archives = append(archives, archive{image.Name, path})
			continue
		}
		file, err := os.CreateTemp(s.dir, "image-*.tar")
		if err == nil {
			err = errors.Join(writeImage(file, image), file.Close())
		}
		if err != nil {
			return nil, fmt.Errorf("make image %s: %w", image.Name, err)
		}
		archives = append(archives, archive{image.Name, file.Name()})
	}
	return archives, nil
}

// writeImage writes what `docker save` would: a list of images, a configuration and one layer.
func writeImage(w io.Writer, image Image) error {
	program, err := os.ReadFile(image.Program)
	if err != nil {
		return err
	}
	entry := filepath.Base(image.Program)
	files, order := map[string][]byte{entry: program}, []string{entry}
	for _, path := range image.Libraries {
		name := strings.TrimPrefix(path, "/")
		if files[name], err = os.ReadFile(path); err != nil {
			return err
		}
		order = append(order, name)
	}
	var layer bytes.Buffer
	if err := writeTar(&layer, files, image.Links, order...); err != nil {
		return err
	}
	sum := sha256.Sum256(layer.Bytes())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config": map[string]any{"Entrypoint": []string{"/" + entry}, "Cmd": image.Args, "WorkingDir": "/",
			"User": image.User,
			"Env":  []string{"PATH=/:/bin:/usr/bin"}}, // a pod may call programs by their names
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{image.Name},
		"Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	files = map[string][]byte{"layer.tar": layer.Bytes(), "config.json": config, "manifest.json": manifest}
	return writeTar(w, files, nil, "layer.tar", "config.json", "manifest.json")
}

// writeTar writes files in the given order, then links, without times, so that the same program
// makes the same image.
func writeTar(w io.Writer, files map[string][]byte, links map[string]string, order ...string) error {
	tw := tar.NewWriter(w)
	for _, name := range order {
		header := &tar.Header{Name: name, Mode: 0o755, Size: int64(len(files[name])), Typeflag: tar.TypeReg}
		if err := tw.WriteHeader(header); err != nil {
			return err
		}
		if _, err := tw.Write(files[name]); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(links)) {
		header := &tar.Header{Name: name, Mode: 0o777, Linkname: links[name], Typeflag: tar.TypeSymlink}
		if err := tw.WriteHeader(header); err != nil {
			return err
		}
	}
	return tw.Close()
}

// load imports an image and waits until the kubelet is told of it, which containerd does
// afterwards.
func (m *Machine) load(ctx context.Context, image archive) error {
	if _, err := m.ctr(ctx, "images", "import", image.path); err != nil {
		return fmt.Errorf("load image %s: %w", image.name, err)
	}
	return m.await(ctx, "image "+image.name, func(ctx context.Context) error {
		out, err := m.ctr(ctx, "images", "list", "name=="+image.name)
		if err == nil && !strings.Contains(out, "io.cri-containerd.image=managed") {
			err = errors.New("is not managed by the kubelet's side yet")
		}
		return err
	}, "containerd")
}

// ctr runs containerd's client in the namespace of Kubernetes.
func (m *Machine) ctr(ctx context.Context, args ...string) (string, error) {
	return m.Run(ctx, "ctr", append([]string{"--address", socket, "--namespace", "k8s.io"}, args...)...)
}

// buildPause compiles the program that holds a pod's namespaces. It requires nothing but Go's
// standard library, so there need be no network.
func buildPause(ctx context.Context, dir string) (Image, error) {
	_, file, _, _ := runtime.Caller(0)
	out := filepath.Join(dir, "pause")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out,
		filepath.Join(filepath.Dir(file), "pause", "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if text, err := cmd.CombinedOutput(); err != nil {
		return Image{}, fmt.Errorf("build the pause program: %w: %s", err, bytes.TrimSpace(text))
	}
	return Image{Name: pauseImage, Program: out}, nil
}

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// rootsModule is where the certificates of public authorities come from: those of Mozilla, as the
// Go project publishes them.
const rootsModule = "golang.org/x/crypto/x509roots/fallback"

// file is one of an archive or a layer.
type file struct {
	content    []byte
	executable bool
}

// files maps paths without a leading slash to files.
type files map[string]file

// writeTar writes files and the folders that they need in the order of their paths, all with the
// same time and root's.
func writeTar(w io.Writer, all files, at time.Time) error {
	folders := map[string]bool{}
	for name := range all {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			folders[dir+"/"] = true
		}
	}
	tw := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(folders)) {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: at,
			Format: tar.FormatPAX}); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := all[name]
		header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(f.content)), ModTime: at,
			Format: tar.FormatPAX}
		if f.executable {
			header.Mode = 0o755
		}
		if err := tw.WriteHeader(header); err != nil {
			return err
		}
		if _, err := tw.Write(f.content); err != nil {
			return err
		}
	}
	return tw.Close()
}

// compressed is a tar archive of files, compressed.
func compressed(all files, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	zip, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if err := writeTar(zip, all, at); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// roots are the certificates that a program trusts which calls others than the API server and
// coordinators: agents probe targets by HTTPS, and verify them unless they are told not to.
func roots() ([]byte, error) {
	var out bytes.Buffer
	for root := range bundle.Roots() {
		// The file has no way to express the constraint, so its readers would not know of it.
		if root.Constraint != nil {
			continue
		}
		if err := pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

// program is one that was built, and what it was built of.
type program struct {
	name    string
	content []byte
	info    *buildinfo.BuildInfo
}

func readProgram(name, file string) (program, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return program{}, err
	}
	info, err := buildinfo.Read(bytes.NewReader(content))
	if err != nil {
		return program{}, fmt.Errorf("read what %s was built of: %w", file, err)
	}
	return program{name, content, info}, nil
}

// module is one that is in a program.
type module struct{ path, version, sum string }

func (m module) String() string { return m.path + "@" + m.version }

// modules are those in p besides our own, sorted. A replaced one is what it was replaced by.
func (p program) modules() ([]module, error) {
	var all []module
	for _, m := range p.info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		if m.Version == "" {
			return nil, fmt.Errorf("%s has %s of a folder: it cannot be built elsewhere", p.name, m.Path)
		}
		all = append(all, module{m.Path, m.Version, m.Sum})
	}
	slices.SortFunc(all, func(a, b module) int { return strings.Compare(a.String(), b.String()) })
	return all, nil
}

var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents|copyright)([-.].*)?$`)

// licenses are the texts under which p may be given to others, in licenses/: our own, Go's, and
// those of every module. One without any is an error.
func licenses(ctx context.Context, s source, p program, more ...module) (files, error) {
	all := files{}
	take := func(dir, under string) error {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		found := false
		for _, e := range entries {
			if !e.Type().IsRegular() || !licenseFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
				continue
			}
			content, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			all[path.Join("licenses", under, e.Name())] = file{content: content}
			found = true
		}
		if !found {
			return fmt.Errorf("no licence in %s, of %s", dir, under)
		}
		return nil
	}
	if err := take(s.root, ""); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("ask go for its folder: %w", err)
	}
	if err := take(strings.TrimSpace(string(out)), "go"); err != nil {
		return nil, err
	}
	modules, err := p.modules()
	if err != nil {
		return nil, err
	}
	if modules = append(modules, more...); len(modules) == 0 {
		return all, nil
	}
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json")
	for _, m := range modules {
		cmd.Args = append(cmd.Args, m.String())
	}
	// In no module: what is asked for is what is in the program, whatever other versions a go.mod
	// says.
	cmd.Dir = os.TempDir()
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	if out, err = cmd.Output(); err != nil {
		return nil, fmt.Errorf("ask go for the modules of %s: %w: %s", p.name, err, bytes.TrimSpace(out))
	}
	for decoder := json.NewDecoder(bytes.NewReader(out)); decoder.More(); {
		var m struct{ Path, Version, Sum, Dir string }
		if err := decoder.Decode(&m); err != nil {
			return nil, fmt.Errorf("ask go for the modules of %s: %w", p.name, err)
		}
		if i := slices.Index(modules, module{m.Path, m.Version, m.Sum}); i < 0 {
			return nil, fmt.Errorf("%s@%s on this computer is not the one in %s", m.Path, m.Version, p.name)
		}
		if err := take(m.Dir, m.Path+"@"+m.Version); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Package programs gets the programs that a cluster runs: it downloads them from the releases of
// etcd and Kubernetes, or builds them from source, once.
package programs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Set is programs that are got together.
type Set struct {
	name string // of their folder
	// all are the programs of the folder, some those that have to be there.
	all, some []program
	// released reports whether projects release the programs one by one.
	released bool
}

// program is one program, and the package that it is built from.
type program struct{ name, pkg string }

var (
	controlPlane = []program{
		{"etcd", "go.etcd.io/etcd/server/v3"},
		{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"},
		{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"},
		{"kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"},
		{"kubectl", "k8s.io/kubernetes/cmd/kubectl"},
	}
	node = []program{
		{"kubelet", "k8s.io/kubernetes/cmd/kubelet"},
		{"kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"},
	}
	upstream = []program{
		{"e2e.test", "k8s.io/kubernetes/test/e2e"},
		{"agnhost", "k8s.io/kubernetes/test/images/agnhost"},
	}
)

// The sets.
var (
	All          = Set{"kubernetes", slices.Concat(controlPlane, node), slices.Concat(controlPlane, node), true}
	ControlPlane = Set{"kubernetes", All.all, controlPlane, true}
	Upstream     = Set{"kubernetes-e2e", upstream, upstream, false}
)

// Get returns a folder with the programs of a set, and the version of Kubernetes. If offline, it
// does not download or build what is missing, and returns an error.
func Get(ctx context.Context, progress io.Writer, set Set, offline bool) (dir, version string, err error) {
	m := &mirror{}
	if set.released {
		if m, err = mirrorFromEnvironment(); err != nil {
			return "", "", err
		}
	}
	p, err := readPin(ctx, set.name)
	if err != nil {
		return "", "", err
	}
	dir, err = p.get(ctx, progress, set, m, offline)
	return dir, p.kubernetes, err
}

// pin is the source that the programs are built from, and where they are kept.
type pin struct {
	source           string // the folder of go.mod
	kubernetes, etcd string // versions
	env, flags       []string
	lock             string
	// built and downloaded are folders. A program that could not be downloaded has a symbolic link
	// in downloaded, so that all are in one folder.
	built, downloaded string
}

var (
	kubernetesLine = regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)`)
	etcdLine       = regexp.MustCompile(`(?m)^\s*go\.etcd\.io/etcd/server/v3 (v\S+)`)
)

func readPin(ctx context.Context, name string) (pin, error) {
	var p pin
	var err error
	if p.source, err = source(); err != nil {
		return p, err
	}
	goMod, err := os.ReadFile(filepath.Join(p.source, "go.mod"))
	if err != nil {
		return p, fmt.Errorf("read what Kubernetes is built from: %w", err)
	}
	goSum, err := os.ReadFile(filepath.Join(p.source, "go.sum"))
	if err != nil {
		return p, fmt.Errorf("read what Kubernetes is built from: %w", err)
	}
	match, etcd := kubernetesLine.FindSubmatch(goMod), etcdLine.FindSubmatch(goMod)
	if match == nil || etcd == nil {
		return p, fmt.Errorf("%s/go.mod requires no k8s.io/kubernetes or no go.etcd.io/etcd/server/v3", p.source)
	}
	version, major, minor := string(match[1]), string(match[2]), string(match[3])
	p.kubernetes, p.etcd = version, string(etcd[1])
	cache, err := cacheDir()
	if err != nil {
		return p, err
	}
	p.env = goEnv(cache)
	toolchain, err := goVersion(ctx, p.source, p.env)
	if err != nil {
		return p, err
	}

	ldflags := "-s -w"
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		ldflags += fmt.Sprintf(" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s", pkg,
			version, major, minor)
	}
	p.flags = []string{"-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", ldflags}
	name += "-" + version
	p.lock = filepath.Join(cache, name+".lock")
	p.built = filepath.Join(cache, name+"-"+digest(string(goMod), string(goSum), toolchain, runtime.GOOS,
		runtime.GOARCH, strings.Join(p.flags, " ")))
	p.downloaded = filepath.Join(cache, name+"-official-"+digest(string(goMod), string(goSum), runtime.GOARCH))
	return p, nil
}

func digest(parts ...string) string {
	hash := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(hash, "%d %s\n", len(part), part)
	}
	return hex.EncodeToString(hash.Sum(nil))[:12]
}

func (p pin) version(program string) string {
	if program == "etcd" {
		return p.etcd
	}
	return p.kubernetes
}

// get returns a folder with the programs of a set. It prefers a folder that has all of the
// programs, so that callers with different sets have the same one.
func (p pin) get(ctx context.Context, progress io.Writer, set Set, m *mirror, offline bool) (string, error) {
	dirs := []string{p.built}
	if slices.ContainsFunc(set.some, func(g program) bool { return m.base(g.name, p.version(g.name)) != "" }) {
		dirs = append(dirs, p.downloaded)
	}
	find := func() string {
		for _, programs := range [][]program{set.all, set.some} {
			for _, dir := range dirs {
				if len(absent(dir, programs)) == 0 {
					return dir
				}
			}
		}
		return ""
	}
	if dir := find(); dir != "" {
		return dir, nil
	}
	if offline {
		return "", fmt.Errorf("programs of %s %s are missing, and inside there is no network to get them: make "+
			"kubernetes upstream, or call cluster.Build before cluster.Enter", set.name, p.kubernetes)
	}
	unlock, err := lock(ctx, p.lock, progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if dir := find(); dir != "" {
		return dir, nil // by the process that held the lock
	}

	left := absent(p.built, set.some)
	if len(dirs) > 1 {
		if left, err = p.download(ctx, progress, left, m); err != nil {
			return "", err
		}
	}
	if err := p.build(ctx, progress, left); err != nil {
		return "", err
	}
	if dir := find(); dir != "" {
		return dir, nil
	}
	for _, g := range absent(p.downloaded, set.some) {
		link := filepath.Join(p.downloaded, g.name)
		_ = os.Remove(link) // what it leads to was deleted
		if err := os.Symlink(filepath.Join("..", filepath.Base(p.built), g.name), link); err != nil {
			return "", fmt.Errorf("keep what was built: %w", err)
		}
	}
	return p.downloaded, nil
}

// absent returns those of programs that dir does not have.
func absent(dir string, programs []program) (missing []program) {
	for _, g := range programs {
		if _, err := os.Stat(filepath.Join(dir, g.name)); err != nil {
			missing = append(missing, g)
		}
	}
	return missing
}

// download downloads programs, and returns those that have to be built.
func (p pin) download(ctx context.Context, progress io.Writer, programs []program, m *mirror) (
	left []program, err error) {
	if err := os.MkdirAll(p.downloaded, 0o755); err != nil {
		return nil, fmt.Errorf("make room for Kubernetes: %w", err)
	}
	defer os.Remove(p.downloaded) // if it is empty
	unreachable := map[string]bool{}
	for _, g := range absent(p.downloaded, programs) {
		version := p.version(g.name)
		base := m.base(g.name, version)
		if base == "" || unreachable[base] {
			left = append(left, g)
			continue
		}
		fmt.Fprintf(progress, "downloading %s %s\n", g.name, version)
		began := time.Now()
		err := m.download(ctx, g.name, version, filepath.Join(p.downloaded, g.name), progress)
		if err == nil {
			fmt.Fprintf(progress, "  done in %s\n", time.Since(began).Round(time.Second/10))
			continue
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("download %s: %w", g.name, context.Cause(ctx))
		}
		what := "it"
		if unreachable[base] = errors.Is(err, errUnreachable); unreachable[base] {
			what = "all programs of this server"
		}
		fmt.Fprintf(progress, "downloading %s %s: %v: building %s from source\n", g.name, version, err, what)
		left = append(left, g)
	}
	return left, nil
}

// source is the folder of the module that pins Kubernetes. It cannot be embedded, being another
// module, so it is looked for where this file was compiled.
func source() (string, error) {
	if dir := os.Getenv("LAMEDUCK_CLUSTER_SRC"); dir != "" {
		return dir, nil
	}
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "..", "..", "kubernetes")
	if !filepath.IsAbs(file) {
		return "", errors.New("this program was built with -trimpath and cannot find test/cluster/kubernetes: set " +
			"LAMEDUCK_CLUSTER_SRC to that folder")
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		return "", fmt.Errorf("the source this program was built from has moved; set LAMEDUCK_CLUSTER_SRC to the "+
			"folder test/cluster/kubernetes: %w", err)
	}
	return dir, nil
}

// cacheDir is a folder of this user's that exists. One given by LAMEDUCK_CACHE need not be writable
// if it is full.
func cacheDir() (string, error) {
	if dir := os.Getenv("LAMEDUCK_CACHE"); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("LAMEDUCK_CACHE: %w", err)
		}
		return filepath.Abs(dir)
	}
	if base, err := os.UserCacheDir(); err == nil {
		dir := filepath.Join(base, "lameduck")
		if os.MkdirAll(dir, 0o755) == nil {
			return dir, nil
		}
	}
	// A user without a home directory. The name can be guessed, so another user may own it.
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("lameduck-%d", os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("find a cache folder: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("find a cache folder: %w", err)
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(stat.Uid) != os.Getuid() {
		return "", fmt.Errorf("%s belongs to another user: set LAMEDUCK_CACHE", dir)
	}
	return dir, nil
}

// goEnv is the environment of the go command. A user without a home gets Go's caches below ours.
func goEnv(cache string) []string {
	env := append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=")
	if base, err := os.UserCacheDir(); os.Getenv("GOCACHE") == "" && (err != nil || os.MkdirAll(base, 0o755) != nil) {
		env = append(env, "GOCACHE="+filepath.Join(cache, "go-build"))
	}
	if home, err := os.UserHomeDir(); os.Getenv("GOPATH") == "" && os.Getenv("GOMODCACHE") == "" &&
		(err != nil || os.MkdirAll(filepath.Join(home, "go"), 0o755) != nil) {
		env = append(env, "GOPATH="+filepath.Join(cache, "go"))
	}
	return env
}

func goVersion(ctx context.Context, dir string, env []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // it may have to fetch the toolchain that go.mod asks for
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION")
	cmd.Dir, cmd.Env = dir, env
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("ask for the version of go, which has to be in PATH: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// lock takes the lock file at path, waiting for another process to release it. The kernel releases
// the locks of processes that have ended.
func lock(ctx context.Context, path string, progress io.Writer) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	for said := false; ; {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if err != syscall.EWOULDBLOCK && err != syscall.EINTR {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !said {
			fmt.Fprintln(progress, "another process is downloading or building Kubernetes; waiting for it")
			said = true
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("wait for another build: %w", context.Cause(ctx))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// tail is the last lines of text.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

package cluster

import (
	"bytes"
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

// Binaries is a folder with the programs of a control plane, etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler, with kubectl, and with those of a node, kubelet and
// kube-proxy.
type Binaries struct {
	Dir     string
	Version string // of Kubernetes, for example v1.36.3
}

// Path is the path of one of the programs.
func (b Binaries) Path(program string) string { return filepath.Join(b.Dir, program) }

// program is one thing to build. The time is what it took on the 2 cores of the machine where it
// was measured, with empty caches, in the order of the list.
type program struct {
	name, pkg string
	takes     string
}

var programs = []program{
	{"etcd", "go.etcd.io/etcd/server/v3", "about 40 s"},
	{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", "about 3 min"},
	{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", "about 50 s"},
	{"kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", "about 10 s"},
	{"kubectl", "k8s.io/kubernetes/cmd/kubectl", "about 20 s"},
	{"kubelet", "k8s.io/kubernetes/cmd/kubelet", "about 14 s"},
	{"kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", "about 10 s"},
}

// upstream are Kubernetes' end-to-end tests and the program that their pods run.
var upstream = []program{
	{"e2e.test", "k8s.io/kubernetes/test/e2e", "about 4 min"},
	{"agnhost", "k8s.io/kubernetes/test/images/agnhost", "about 30 s"},
}

var versionLine = regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)`)

// Build returns the programs of a control plane, built from source if this user's cache does not
// hold them. That takes a Go toolchain, the Go module proxy, some minutes and 2 GB; progress is
// told what is happening, a line at a time. It must be called before [Enter], because there is no
// network inside.
//
// The cache is $LAMEDUCK_CACHE, else lameduck in the user's cache folder, else in the folder for
// temporary files. Two processes do not build at once, and an interrupted build leaves nothing that
// is taken for a finished one; what it has compiled stays in Go's own cache.
func Build(ctx context.Context, progress io.Writer) (Binaries, error) {
	return buildAll(ctx, progress, "kubernetes", programs)
}

// BuildUpstream is [Build] for e2e.test, the end-to-end tests of Kubernetes, and agnhost, which
// their pods run.
func BuildUpstream(ctx context.Context, progress io.Writer) (Binaries, error) {
	return buildAll(ctx, progress, "kubernetes-e2e", upstream)
}

func buildAll(ctx context.Context, progress io.Writer, what string, programs []program) (Binaries, error) {
	src, err := source()
	if err != nil {
		return Binaries{}, err
	}
	goMod, err := os.ReadFile(filepath.Join(src, "go.mod"))
	if err != nil {
		return Binaries{}, fmt.Errorf("read what Kubernetes is built from: %w", err)
	}
	goSum, err := os.ReadFile(filepath.Join(src, "go.sum"))
	if err != nil {
		return Binaries{}, fmt.Errorf("read what Kubernetes is built from: %w", err)
	}
	match := versionLine.FindSubmatch(goMod)
	if match == nil {
		return Binaries{}, fmt.Errorf("%s/go.mod requires no k8s.io/kubernetes", src)
	}
	version, major, minor := string(match[1]), string(match[2]), string(match[3])
	cache, err := cacheDir()
	if err != nil {
		return Binaries{}, err
	}
	env := goEnv(cache)
	toolchain, err := goVersion(ctx, src, env)
	if err != nil {
		return Binaries{}, err
	}

	ldflags := "-s -w"
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		ldflags += fmt.Sprintf(" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s", pkg,
			version, major, minor)
	}
	flags := []string{"-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", ldflags}

	hash := sha256.New()
	for _, part := range []string{string(goMod), string(goSum), toolchain, runtime.GOOS, runtime.GOARCH,
		strings.Join(flags, " ")} {
		fmt.Fprintf(hash, "%d %s\n", len(part), part)
	}
	name := what + "-" + version + "-" + hex.EncodeToString(hash.Sum(nil))[:12]
	result := Binaries{Dir: filepath.Join(cache, name), Version: version}
	if _, err := os.Stat(result.Dir); err == nil {
		return result, nil
	}
	if Inside() {
		return Binaries{}, fmt.Errorf("%s %s is not built, and inside there is no network to build it: make "+
			"kubernetes upstream, or call cluster.Build before cluster.Enter", what, version)
	}

	unlock, err := lock(ctx, filepath.Join(cache, name+".lock"), progress)
	if err != nil {
		return Binaries{}, err
	}
	defer unlock()
	if _, err := os.Stat(result.Dir); err == nil {
		return result, nil // by the process that held the lock
	}

	// Only the holder of the lock has a folder of this name, so what is there was left by an
	// interrupted build.
	partial := result.Dir + ".partial"
	if err := os.RemoveAll(partial); err != nil {
		return Binaries{}, fmt.Errorf("remove the remains of an earlier build: %w", err)
	}
	if err := os.MkdirAll(partial, 0o755); err != nil {
		return Binaries{}, fmt.Errorf("make room for Kubernetes: %w", err)
	}
	defer os.RemoveAll(partial) // gone by then if all went well

	fmt.Fprintf(progress, "building %s %s from source, once: about 5 min on 2 cores; it is kept in %s\n",
		what, version, result.Dir)
	for i, p := range programs {
		what := fmt.Sprintf("%s (%d of %d, %s on 2 cores)", p.name, i+1, len(programs), p.takes)
		if err := goBuild(ctx, progress, what, src, env, flags, filepath.Join(partial, p.name), p.pkg); err != nil {
			return Binaries{}, err
		}
	}
	if err := os.Rename(partial, result.Dir); err != nil {
		return Binaries{}, fmt.Errorf("keep what was built: %w", err)
	}
	return result, nil
}

// goBuild builds one program and says so, every half minute while it takes.
func goBuild(ctx context.Context, progress io.Writer, what, src string, env, flags []string, out, pkg string) error {
	fmt.Fprintf(progress, "building %s\n", what)
	start := time.Now()
	verb := []string{"build"}
	if strings.HasSuffix(out, ".test") {
		verb = []string{"test", "-c"}
	}
	args := slices.Concat(verb, flags, []string{"-o", out, pkg})
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = src, env
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	// go starts compilers: interrupted, it stops them and removes its temporary files.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			fmt.Fprintf(progress, "  still building, %s\n", time.Since(start).Round(time.Second))
		case err := <-done:
			if ctx.Err() != nil {
				return fmt.Errorf("build %s: %w", pkg, context.Cause(ctx))
			}
			if err != nil {
				return fmt.Errorf("build %s: %w\n%s", pkg, err, tail(output.Bytes(), 20))
			}
			fmt.Fprintf(progress, "  done in %s\n", time.Since(start).Round(time.Second/10))
			return nil
		}
	}
}

// source is the folder of the module that pins Kubernetes. It cannot be embedded, being another
// module, so it is looked for where this file was compiled.
func source() (string, error) {
	if dir := os.Getenv("LAMEDUCK_CLUSTER_SRC"); dir != "" {
		return dir, nil
	}
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "kubernetes")
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
			fmt.Fprintln(progress, "another process is building Kubernetes; waiting for it")
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
func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}

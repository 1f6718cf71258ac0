package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// source is a tree, and what it is called.
type source struct {
	root string
	// version is a tag of images: v1.2.3, or dev.
	version string
	// commit is the whole name of it, with "-dirty" if files were changed since; unknown, if there
	// is no version control.
	commit string
	// created is the commit's time: the only time that is in what is made.
	created time.Time
	// cache is where go keeps what it has compiled. Empty: where it does otherwise.
	cache string
}

var tag = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

// readSource asks git. SOURCE_DATE_EPOCH wins over the commit's time, as reproducible-builds.org
// has it; without both the time is that of the Unix epoch.
func readSource(ctx context.Context, root, version string, getenv func(string) string) (source, error) {
	s := source{root: root, version: version, commit: "unknown", created: time.Unix(0, 0).UTC()}
	if !tag.MatchString(version) {
		return s, fmt.Errorf("version %q cannot be a tag of images", version)
	}
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	// A tree inside another repository is not that repository's commit.
	if prefix, err := git("rev-parse", "--show-prefix"); err == nil && prefix == "" {
		said, err := git("log", "-1", "--format=%H %ct")
		if err != nil {
			return s, fmt.Errorf("ask git for the commit: %w", err)
		}
		changed, err := git("status", "--porcelain")
		if err != nil {
			return s, fmt.Errorf("ask git what was changed: %w", err)
		}
		var seconds string
		s.commit, seconds, _ = strings.Cut(said, " ")
		if changed != "" {
			s.commit += "-dirty"
		}
		if err := s.date(seconds); err != nil {
			return s, err
		}
	}
	if epoch := getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		if err := s.date(epoch); err != nil {
			return s, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
	}
	return s, nil
}

func (s *source) date(seconds string) error {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("%q is not a time in seconds", seconds)
	}
	s.created = time.Unix(n, 0).UTC()
	return nil
}

// platform is GOOS and GOARCH.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "-" + p.arch }

// build compiles commands of the tree into dir. All that go takes from the environment and that
// would change the programs is set here.
func (s source) build(ctx context.Context, p platform, dir string, commands ...string) error {
	const variable = "github.com/lameduck-io/lameduck/internal/version."
	out, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	args := []string{
		"build", "-trimpath", "-buildvcs=false",
		"-ldflags=-s -w -buildid= -X " + variable + "version=" + s.version + " -X " + variable + "commit=" + s.commit,
		"-o", out + string(filepath.Separator),
	}
	for _, name := range commands {
		args = append(args, "./cmd/"+name)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = s.root
	cmd.Env = append(os.Environ(), "GOOS="+p.os, "GOARCH="+p.arch, "CGO_ENABLED=0", "GOFLAGS=-mod=readonly",
		"GOWORK=off", "GOEXPERIMENT=", "GOFIPS140=off",
		"GOAMD64=v1", "GOARM64=v8.0")
	if s.cache != "" {
		cmd.Env = append(cmd.Env, "GOCACHE="+s.cache)
	}
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s for %s: %w: %s", strings.Join(commands, ", "), p, err, bytes.TrimSpace(text))
	}
	return nil
}

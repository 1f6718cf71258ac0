package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The commit and its time are git's, and a tree that is not as the commit has it says so.
func TestReadSource(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(),
			"git", append([]string{"-C", dir, "-c", "user.name=n", "-c", "user.email=e@example.com"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_COMMITTER_DATE=1700000000 +0100", "GIT_AUTHOR_DATE=1600000000 +0100")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	none := func(string) string { return "" }
	if s, err := readSource(t.Context(), dir, "dev", none); err != nil || s.commit != "unknown" ||
		s.created.Unix() != 0 {
		t.Errorf("without version control: %+v, %v", s, err)
	}
	git("init", "-q")
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	git("add", "file")
	git("commit", "-qm", "one")
	s, err := readSource(t.Context(), dir, "dev", none)
	if err != nil || len(s.commit) != 40 || !s.created.Equal(time.Unix(1700000000, 0)) {
		t.Errorf("of a commit: %+v, %v", s, err)
	}
	inside := filepath.Join(dir, "vendored")
	if err := os.Mkdir(inside, 0o700); err != nil {
		t.Fatal(err)
	}
	if s, err := readSource(t.Context(), inside, "dev", none); err != nil || s.commit != "unknown" {
		t.Errorf("in another repository: %+v, %v", s, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	epoch := func(value string) func(string) string {
		return func(name string) string { return map[string]string{"SOURCE_DATE_EPOCH": value}[name] }
	}
	dirty, err := readSource(t.Context(), dir, "dev", epoch("1234567890"))
	if err != nil || dirty.commit != s.commit+"-dirty" || dirty.created.Unix() != 1234567890 {
		t.Errorf("of a changed tree, with SOURCE_DATE_EPOCH: %+v, %v", dirty, err)
	}
	for _, bad := range []string{"tomorrow", "-1", "1.5"} {
		if _, err := readSource(t.Context(), dir, "dev", epoch(bad)); err == nil ||
			!strings.Contains(err.Error(), bad) {
			t.Errorf("SOURCE_DATE_EPOCH=%s: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "v1.2.3+more", "-v1", "a b", "a/b"} {
		if _, err := readSource(t.Context(), dir, bad, none); err == nil ||
			!strings.Contains(err.Error(), "cannot be a tag") {
			t.Errorf("version %q: %v", bad, err)
		}
	}
}

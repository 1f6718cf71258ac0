package version

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

func TestString(t *testing.T) {
	on := runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
	if got, want := String("agent"), "agent dev, commit unknown, "+on; got != want {
		t.Errorf("not built for a release: %q, want %q", got, want)
	}
	defer func(v, c string) { version, commit = v, c }(version, commit)
	version, commit = "v1.2.3", "0123abc"
	if got, want := String("agent"), "agent "+Build()+", "+on; got != want || Build() != "v1.2.3, commit 0123abc" {
		t.Errorf("built for one: %q, want %q", got, want)
	}
}

// Programs of make build say what they were built from, and a tree without version control builds
// as well.
func TestMakeBuildSetsVersionAndCommit(t *testing.T) {
	build := func(args ...string) string {
		out, err := exec.Command("make", append([]string{"-n", "-C", "../..", "build"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	const variable = "-X github.com/lameduck-io/lameduck/internal/version."
	if got := build("VERSION=v1.2.3", "COMMIT=0123abc"); !strings.Contains(got,
		variable+"version=v1.2.3 "+variable+"commit=0123abc'") {
		t.Errorf("given: %s", got)
	}
	// Empty in a tree without version control, as it is to be.
	commit, _ := exec.Command("git", "-C", "../..", "rev-parse", "HEAD").Output()
	if got := build(); !strings.Contains(got, variable+"commit="+strings.TrimSpace(string(commit))) {
		t.Errorf("by git, want %s: %s", commit, got)
	}
	t.Setenv("GIT_DIR", t.TempDir())
	if got := build(); !strings.Contains(got, variable+"version=dev "+variable+"commit='") {
		t.Errorf("without version control: %s", got)
	}
}

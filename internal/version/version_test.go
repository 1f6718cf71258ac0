package version

import (
	"runtime"
	"testing"
)

func TestString(t *testing.T) {
	on := runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
	if got, want := String("agent"), "agent dev, commit unknown, "+on; got != want {
		t.Errorf("not built for a release: %q, want %q", got, want)
	}
	defer func(v, c string) { version, commit = v, c }(version, commit)
	version, commit = "v1.2.3", "0123abc"
	if got, want := String("agent"), "agent v1.2.3, commit 0123abc, "+on; got != want {
		t.Errorf("built for one: %q, want %q", got, want)
	}
}

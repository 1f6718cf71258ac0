// Package version returns the version of a program: the release and the commit that it was built
// from.
package version

import (
	"cmp"
	"fmt"
	"runtime"
)

// version and commit are set by the linker (-X) in make build, images and releases. Elsewhere they
// are empty: what the go command knows of version control depends on how it was called, so it is
// not asked.
var version, commit string

// Build is the version, "dev" if the program was not built for a release, and the commit.
func Build() string { return cmp.Or(version, "dev") + ", commit " + cmp.Or(commit, "unknown") }

// String is one line for --version: the program, its [Build], Go's version, and what it runs on.
func String(program string) string {
	return fmt.Sprintf("%s %s, %s %s/%s", program, Build(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

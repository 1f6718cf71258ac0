// Package version says what a program was built from.
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

// String is one line for --version: the program, its version ("dev" if it was not built for a
// release), the commit, Go's version, and what it runs on.
func String(program string) string {
	return fmt.Sprintf("%s %s, commit %s, %s %s/%s", program, cmp.Or(version, "dev"), cmp.Or(commit, "unknown"),
		runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

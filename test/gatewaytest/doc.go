// Package gatewaytest has the contracts of gateway.Directed ([Run]) and gateway.Observed
// ([RunObserved]) as tests. The package of each kind of gateway runs one of them, if possible on
// the real data plane.
//
// [Run] takes a function that starts one proxy with one gateway, as a [Harness]. Requests are real
// HTTP requests to real servers, so that the gateway's readings can be compared with the requests
// that arrived. The rule "nothing is sent to a removed target" applies to the time at which the
// client sent a request, not to its arrival. Each request carries the phase in which it was sent.
// No request of a phase after the reading may arrive.
package gatewaytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// LookPath returns the path of a program: from PATH, or from the cache that make envoy and make
// traefik fill. If there is none, it calls [Missing].
func LookPath(t testing.TB, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	if base, err := os.UserCacheDir(); err == nil {
		if path, err := exec.LookPath(filepath.Join(base, "lameduck/bin", program)); err == nil {
			return path
		}
	}
	Missing(t, program, err)
	return ""
}

// Missing ends a test that needs a real part which is not installed. It skips the test, or fails it
// if REQUIRE_REAL=1 or CI=true is set.
func Missing(t testing.TB, what string, err error) {
	t.Helper()
	if os.Getenv("REQUIRE_REAL") == "1" || os.Getenv("CI") == "true" {
		t.Fatalf("%s is required here: %v", what, err)
	}
	t.Skipf("no %s here (REQUIRE_REAL=1 makes this a failure): %v", what, err)
}

// Package gatewaytest is the contract of gateway.Directed as a test. Every directed data plane
// passes it on the real proxy.
//
// [Run] takes a function that starts one proxy with one gateway, as a [Harness]. Requests are real
// HTTP requests to real servers, so that the gateway's readings can be compared with the requests
// that arrived. "Nothing is sent to a removed target" is judged by the time at which the client
// sent a request, not by its arrival: each request carries the phase in which it was sent, and no
// request of a phase after the reading may arrive.
package gatewaytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// LookPath finds the program of a real data plane, also where make envoy and make traefik have put
// it. Without it the test ends as by [Missing].
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

// Missing ends a test that needs something real which is not here: it is skipped on a laptop, and
// fails where REQUIRE_REAL=1 or CI=true says that everything must be there.
func Missing(t testing.TB, what string, err error) {
	t.Helper()
	if os.Getenv("REQUIRE_REAL") == "1" || os.Getenv("CI") == "true" {
		t.Fatalf("%s is required here: %v", what, err)
	}
	t.Skipf("no %s here (REQUIRE_REAL=1 makes this a failure): %v", what, err)
}

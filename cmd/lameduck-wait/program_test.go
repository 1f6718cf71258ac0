package main

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
)

// command is the program at path, which is this test's own file, run as itself.
func command(t *testing.T, path string, args ...string) (run func() error, out *bytes.Buffer) {
	t.Helper()
	out = &bytes.Buffer{}
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Env = append(os.Environ(), "TEST_WAIT=1")
	cmd.Stdout, cmd.Stderr = out, out
	return cmd.Run, out
}

package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// A group can be joined in every hierarchy at once, made twice, and removed with what is in it,
// also while its last process is still dying.
func TestMakeRemove(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root makes control groups")
	}
	mounts, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	if len(mounts) == 0 {
		if os.Getenv("REQUIRE_REAL") == "1" || os.Getenv("CI") == "true" {
			t.Fatal("no control groups are mounted here")
		}
		t.Skip("no control groups are mounted here")
	}
	run := fmt.Sprintf("lameduck-cgroup-test-%d", os.Getpid())
	t.Cleanup(func() {
		if err := Remove(run); err != nil {
			t.Error(err)
		}
	})
	for range 2 {
		if err := Make(run + "/node-1"); err != nil {
			t.Fatal(err)
		}
	}
	sleep := exec.Command("sleep", "60")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sleep.Process.Kill(); sleep.Wait() })
	for _, mount := range mounts {
		procs := filepath.Join(mount, run, "node-1", "cgroup.procs")
		if err := os.WriteFile(procs, fmt.Append(nil, sleep.Process.Pid), 0o644); err != nil {
			t.Errorf("join a group: %v", err)
		}
	}
	if err := sleep.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(run); err != nil {
			t.Fatal(err)
		}
	}
	for _, mount := range mounts {
		if _, err := os.Stat(filepath.Join(mount, run)); !os.IsNotExist(err) {
			t.Errorf("%s still has the group (%v)", mount, err)
		}
	}
}

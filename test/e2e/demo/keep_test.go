package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// What make demo KEEP=1 does, and Ctrl-C then: the page's address is printed, is reached from
// outside, and shows rolling updates. The commands that it prints run kubectl lameduck. Afterwards
// there is no process, no file and no listener left. Without this the demo could leave a control
// plane behind on operators' machines.
func TestKeepShowsThePageUntilInterrupted(t *testing.T) {
	harness.HAProxy(t)
	dir, err := os.MkdirTemp("", "d") // the path of a socket below it must not be long, as t.TempDir's is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	program, temporary := filepath.Join(dir, "demo"), filepath.Join(dir, "t")
	if err := os.Mkdir(temporary, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(program, "-bin", harness.Programs(t), "-keep", "-lag", "0s", "-rate", "100", "-out",
		filepath.Join(dir, "demo.json"))
	cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a group of its own, as a shell gives it
	var said strings.Builder
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = in, in
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	ended := false
	end := func(signal syscall.Signal) error {
		if err := syscall.Kill(-cmd.Process.Pid, signal); err != nil {
			return err
		}
		late := time.AfterFunc(time.Minute, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		defer late.Stop()
		ended = true
		return cmd.Wait()
	}
	t.Cleanup(func() {
		if !ended {
			_ = end(syscall.SIGKILL)
		}
		if t.Failed() {
			t.Logf("the demo says:\n%s", said.String())
		}
	})
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		scanner := bufio.NewScanner(out)
		for scanner.Scan() {
			lines <- scanner.Text()
		}
	}()
	address := ""
	await := func(what string, most time.Duration, is func(line string) bool) {
		t.Helper()
		timeout := time.After(most)
		for {
			select {
			case line, more := <-lines:
				if !more {
					t.Fatalf("it ended before %s", what)
				}
				said.WriteString(line + "\n")
				if is(line) {
					return
				}
			case <-timeout:
				t.Fatalf("no %s within %s", what, most)
			}
		}
	}
	await("the page's address", 3*time.Minute, func(line string) bool {
		address = regexp.MustCompile(`http://127\.0\.0\.1:\d+/`).FindString(line)
		return address != ""
	})
	view := func() (v api.View, err error) {
		response, err := http.Get(address + strings.TrimPrefix(api.ViewPath, "/"))
		if err != nil {
			return v, err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		return v, errors.Join(err, json.Unmarshal(text, &v))
	}
	if v, err := view(); err != nil || v.Replica.Name == "" {
		t.Fatalf("the page at %s: %+v, %v", address, v, err)
	}
	commands := "set -e\n" // what it tells operators to run
	await("the runs' end", 8*time.Minute, func(line string) bool {
		if strings.HasPrefix(line, "    export ") || strings.HasPrefix(line, "    kubectl ") {
			commands += line + "\n"
		}
		return strings.Contains(line, "Ctrl-C")
	})
	v, err := view()
	if err != nil || len(v.Outcomes) == 0 || !v.TargetHealth.Reported {
		t.Errorf("kept open it shows %+v, %v", v, err)
	}
	newest := func(v api.View) (at time.Time) {
		if len(v.Outcomes) > 0 {
			at = v.Outcomes[0].At
		}
		return at
	}
	was := newest(v)
	for end := time.Now().Add(90 * time.Second); !newest(v).After(was); time.Sleep(500 * time.Millisecond) {
		if v, err = view(); err != nil || time.Now().After(end) {
			t.Fatalf("no rolling update is shown while it is kept open: %v", err)
		}
	}

	shell := exec.CommandContext(t.Context(), "sh", "-c", commands)
	shell.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + t.TempDir()}
	text, err := shell.CombinedOutput()
	for _, want := range []string{"COORDINATOR", "lameduck-webhook-", "1/1", "haproxy", "connected", "web-"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Fatalf("%s: %v, and no %q in\n%s", commands, err, want, text)
		}
	}
	if strings.Count(commands, "kubectl ") < 2 {
		t.Errorf("it does not say how to use kubectl: %q", commands)
	}

	err = end(syscall.SIGINT)
	for line := range lines {
		said.WriteString(line + "\n")
	}
	// 130 if it has something else to say of the runs: how fast they were is not the question here.
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 130) {
		t.Errorf("interrupted it ends with %v", err)
	}
	if _, err := view(); err == nil {
		t.Errorf("the page is still at %s", address)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("files are left: %v %v", left, err)
	}
	if left := processes(t, dir, harness.Programs(t)); len(left) > 0 {
		t.Errorf("processes are left: %q", left)
	}
}

// processes are the command lines, of those that run, which name one of paths.
func processes(t *testing.T, paths ...string) (all []string) {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range found {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		for _, path := range paths {
			if line := strings.ReplaceAll(string(text), "\x00", " "); strings.Contains(line, path) {
				all = append(all, line)
				break
			}
		}
	}
	return all
}

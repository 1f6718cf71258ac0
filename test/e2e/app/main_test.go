package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain lets the test binary be the application, so that signals and exit codes are the real
// ones.
func TestMain(m *testing.M) {
	if os.Getenv("APP_UNDER_TEST") != "" {
		main()
	}
	os.Exit(m.Run())
}

func command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "APP_UNDER_TEST=1", "GORACE=atexit_sleep_ms=0") // -race makes exits last a second
	return cmd
}

// start returns the application, listening, and its URL.
func start(t *testing.T, args ...string) (*exec.Cmd, string) {
	t.Helper()
	cmd := command(append([]string{"--addr=127.0.0.1:0", "--name=web-1"}, args...)...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	line, err := bufio.NewReader(stderr).ReadString('\n')
	found := regexp.MustCompile(`addr=(\S+)`).FindStringSubmatch(line)
	if found == nil {
		t.Fatalf("first line %q (%v): no address", line, err)
	}
	return cmd, "http://" + found[1]
}

func TestAnswers(t *testing.T) {
	_, url := start(t, "--work=50ms")
	for path, least := range map[string]time.Duration{"/": 50 * time.Millisecond, "/any/path": 50 * time.Millisecond,
		"/readyz": 0} {
		began := time.Now()
		resp, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || string(got) != "ok\n" || resp.Header.Get("Pod") != "web-1" {
			t.Errorf("%s: %v, Pod %q, body %q", path, resp.Status, resp.Header.Get("Pod"), got)
		}
		if took := time.Since(began); took < least {
			t.Errorf("%s took %v, want at least %v", path, took, least)
		}
	}
}

func TestStartDelay(t *testing.T) {
	began := time.Now()
	start(t, "--start-delay=200ms")
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("listening after %v, want 200ms at least", took)
	}
}

// The demo's comparison rests on the difference: exit loses the request in flight, graceful does
// not. Both exit with 0.
func TestOnTerm(t *testing.T) {
	for onTerm, wantOK := range map[string]bool{"exit": false, "graceful": true} {
		t.Run(onTerm, func(t *testing.T) {
			const work = 8 * time.Second
			cmd, url := start(t, "--work="+work.String(), "--on-term="+onTerm)
			sent, result := make(chan struct{}), make(chan error, 1)
			request, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				WroteRequest: func(httptrace.WroteRequestInfo) { close(sent) }}), http.MethodGet, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				resp, err := http.DefaultClient.Do(request)
				if err == nil {
					_, err = io.ReadAll(resp.Body)
					resp.Body.Close()
				}
				result <- err
			}()
			<-sent
			// Connections are accepted one after the other: after this one the request's is.
			ready, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(url + "/readyz")
			if err != nil {
				t.Fatal(err)
			}
			ready.Body.Close()
			cmd.Process.Signal(syscall.SIGTERM)
			began := time.Now()
			if err := cmd.Wait(); err != nil {
				t.Errorf("exit: %v, want 0", err)
			}
			if took := time.Since(began); !wantOK && took > work/2 {
				t.Errorf("exit took %v, want at once", took)
			}
			if err := <-result; (err == nil) != wantOK {
				t.Errorf("request in flight: %v, want ok %v", err, wantOK)
			}
		})
	}
}

func TestTermDuringStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if err := run(ctx, []string{"--start-delay=1h", "--on-term=graceful"}, "web-1", io.Discard); err != nil {
		t.Error(err)
	}
}

func TestBadFlags(t *testing.T) {
	for _, tc := range []struct{ arg, flag, value string }{
		{"--addr=nonsense", "-addr", `"nonsense"`},
		{"--addr=1.2.3.4:99999", "-addr", `"1.2.3.4:99999"`},
		{"--work=-1s", "-work", `"-1s"`},
		{"--work=5", "-work", `"5"`},
		{"--start-delay=soon", "-start-delay", `"soon"`},
		{"--on-term=maybe", "-on-term", `"maybe"`},
		{"--no-such", "-no-such", ""},
		{"stray", "argument", `"stray"`},
	} {
		t.Run(tc.arg, func(t *testing.T) {
			out, err := command(tc.arg).CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 2 {
				t.Errorf("%v, want exit 2", err)
			}
			if first, _, _ := strings.Cut(string(out), "\n"); !strings.Contains(first, tc.flag) ||
				!strings.Contains(first, tc.value) {
				t.Errorf("first line %q, want %s and %s", first, tc.flag, tc.value)
			}
		})
	}
	if err := command("--help").Run(); err != nil {
		t.Errorf("--help: %v, want exit 0", err)
	}
}

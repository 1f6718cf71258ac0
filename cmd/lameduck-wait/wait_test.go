package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestMain: the test binary is the program itself where it is told so, and the container's own
// hook.
func TestMain(m *testing.M) {
	if code := os.Getenv("TEST_HOOK"); code != "" {
		fmt.Println("the own hook ran")
		var n int
		fmt.Sscan(code, &n)
		os.Exit(n)
	}
	if os.Getenv("TEST_WAIT") != "" {
		os.Exit(run(context.Background(), os.Args, os.Getenv, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// agent serves and returns where.
func agent(t *testing.T, serve http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(serve)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// silent accepts connections, and never writes to them.
func silent(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var open []net.Conn
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range open {
			c.Close()
		}
	})
	return l.Addr().String()
}

// away is an address at which no process listens.
const away = "127.0.0.1:1"

// call runs the program and returns its exit code, what it wrote, and how long it took.
func call(t *testing.T, args ...string) (int, string, time.Duration) {
	t.Helper()
	var out bytes.Buffer
	began := time.Now()
	code := run(t.Context(), append([]string{"lameduck-wait"}, args...), func(name string) string {
		return "of " + name
	}, &out, &out)
	return code, out.String(), time.Since(began)
}

// Whatever the agent does, the hook ends, by the bound at the latest, and the container's own hook
// has run with the exit code that it has.
func TestTheHookGoesOn(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TEST_HOOK", "7")
	for _, c := range []struct {
		name        string
		agent       string
		bound       time.Duration
		says        string
		least, most time.Duration
	}{
		{"answers", agent(t, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintln(w, "Acknowledged", r.URL.Path, r.URL.Query().Get("container"))
		}), time.Minute, "Acknowledged /v1/wait/THE-ID web", 0, 5 * time.Second},
		{"slow", agent(t, func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(300 * time.Millisecond) // the time that the answer takes is the subject
			fmt.Fprintln(w, "Acknowledged")
		}), time.Minute, "Acknowledged", 300 * time.Millisecond, 5 * time.Second},
		{"hangs", silent(t), 200 * time.Millisecond, "no answer within 200ms", 200 * time.Millisecond, 5 * time.Second},
		// The bound ends it in the middle of an answer too.
		{"hangs in the middle", agent(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}), 200 * time.Millisecond, "", 200 * time.Millisecond, 5 * time.Second},
		{"away", away, time.Minute, "did not wait any longer", 0, 5 * time.Second},
		{"knows no such pod", agent(t, http.NotFound), time.Minute, "404", 0, 5 * time.Second},
		{"has too many", agent(t, func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "too many waits", http.StatusTooManyRequests)
		}), time.Minute, "too many waits", 0, 5 * time.Second},
		{"dies", agent(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), time.Minute,
			"did not wait any longer", 0, 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, took := call(t, "--agent="+c.agent, "--id=THE-ID", "--container=web",
				"--bound="+c.bound.String(), "--", self)
			if code != 7 || !strings.Contains(out, "the own hook ran") {
				t.Errorf("exit code %d and %q, want that of the own hook, 7", code, out)
			}
			if !strings.Contains(out, c.says) {
				t.Errorf("wrote %q, want %q", out, c.says)
			}
			if took < c.least || took > c.most {
				t.Errorf("took %s, want %s to %s", took, c.least, c.most)
			}
		})
	}
}

// The three kinds of hooks that it takes over.
// Without an answer of the agent, the program fails even if the container's own hook does not.
func TestOwnHook(t *testing.T) {
	asked := make(chan *http.Request, 1)
	app := agent(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- r
		w.WriteHeader(http.StatusInternalServerError) // which does not matter to kubelets either
	})
	_, port, _ := net.SplitHostPort(app)
	closed := away
	for _, c := range []struct {
		name string
		args []string
		code int
		want string
		took time.Duration
	}{
		{"none", nil, exitFailed, "", 0},
		{"sleep", []string{"--sleep=200ms"}, exitFailed, "", 200 * time.Millisecond},
		{"http", []string{"--http-get=http://" + app + "/stop?now=yes", "--http-header=Host: here",
			"--http-header=X-Why: pod stops"}, exitFailed, "/stop?now=yes here pod stops", 0},
		{"http without a path", []string{"--http-get=http://127.0.0.1:" + port + "/"}, exitFailed,
			"/ 127.0.0.1:" + port + " ", 0},
		{"http without a server", []string{"--http-get=http://" + closed + "/"}, 1, "", 0},
		{"command that is not there", []string{"--", "/no/such/command"}, 127, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, took := call(t, append([]string{"--agent=" + closed, "--id=x", "--container=web"}, c.args...)...)
			if code != c.code {
				t.Errorf("exit code %d (%s), want %d", code, out, c.code)
			}
			if took < c.took {
				t.Errorf("took %s, want %s", took, c.took)
			}
			if c.want != "" {
				r := <-asked
				if got := r.URL.RequestURI() + " " + r.Host + " " + r.Header.Get("X-Why"); got != c.want {
					t.Errorf("asked for %q, want %q", got, c.want)
				}
			}
		})
	}
	for code, want := range map[int]int{http.StatusOK: 0, http.StatusNotFound: exitFailed,
		http.StatusBadGateway: exitFailed} {
		t.Run(fmt.Sprint("after ", code), func(t *testing.T) {
			answers := agent(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) })
			if code, out, _ := call(t, "--agent="+answers, "--id=x", "--container=web"); code != want {
				t.Errorf("exit code %d (%s), want %d", code, out, want)
			}
		})
	}
	t.Run("after the whole bound", func(t *testing.T) {
		if code, out, _ := call(t, "--agent="+silent(t), "--id=x", "--container=web", "--bound=200ms"); code != 0 {
			t.Errorf("exit code %d (%s), want 0: the pod has waited", code, out)
		}
	})
	t.Run("killed by a signal", func(t *testing.T) {
		if code, out, _ := call(t, "--agent="+closed, "--id=x", "--container=web", "--", "/bin/sh", "-c",
			"kill -9 $$"); code != 137 {
			t.Errorf("exit code %d (%s), want 137", code, out)
		}
	})
}

// The kubelet follows redirects of a hook of kind httpGet too, on the same host.
func TestOwnHookIsRedirected(t *testing.T) {
	agreed := agent(t, func(http.ResponseWriter, *http.Request) {})
	var to string
	var asked []string
	other := agent(t, func(http.ResponseWriter, *http.Request) { asked = append(asked, "other") })
	app := agent(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.RequestURI())
		if r.URL.Path == "/stop" || to == "/again" {
			http.Redirect(w, r, to, http.StatusMovedPermanently)
		}
	})
	for _, c := range []struct {
		name, to string
		code     int
		asked    string
	}{
		{"to a path", "/stop/?now=yes", 0, "/stop /stop/?now=yes"},
		{"to a port", "http://" + other + "/", 0, "/stop other"},
		{"to another host", "http://no-such-host.invalid/", 0, "/stop"},
		{"to HTTPS", "https://" + app + "/", exitFailed, "/stop"},
		{"without end", "/again", exitFailed, "/stop" + strings.Repeat(" /again", maxRedirects-1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			to, asked = c.to, nil
			code, out, _ := call(t, "--agent="+agreed, "--id=x", "--container=web", "--http-get=http://"+app+"/stop")
			if got := strings.Join(asked, " "); code != c.code || got != c.asked {
				t.Errorf("exit code %d (%s) after %s, want %d after %s", code, out, got, c.code, c.asked)
			}
		})
	}
}

// The own hook ends when a kubelet would end it: with the body, however long the server keeps the
// connection, and not with an interim answer.
func TestOwnHookEndsAsWithAKubelet(t *testing.T) {
	const never = time.Minute
	for _, c := range []struct {
		name, answer string
		// then comes after a while, and the connection stays open for rest.
		then string
		rest time.Duration
	}{
		{"by its length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "", never},
		{"without a body", "HTTP/1.1 204 No Content\r\n\r\n", "", never},
		{"by its last chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "0\r\n\r\n", never},
		{"by the rest of the body", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok", "\nok", never},
		{"by the connection", "HTTP/1.1 200 OK\r\n\r\nok\n", "ok", 0},
		{"by a long body", "HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\nok", "", never},
		{"after an interim answer", "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", never},
	} {
		synctest.Test(t, func(t *testing.T) {
			server, client := net.Pipe()
			defer server.Close()
			go func() {
				_, _ = io.WriteString(server, c.answer)
				time.Sleep(2 * time.Second)
				_, _ = io.WriteString(server, c.then)
				time.Sleep(c.rest)
				server.Close()
			}()
			began := time.Now()
			r := bufio.NewReader(client)
			a, err := read(r)
			if err != nil {
				t.Fatal(err)
			}
			discard(r, a)
			want := time.Duration(0)
			if c.then != "" {
				want = 2 * time.Second
			}
			if took := time.Since(began); took != want {
				t.Errorf("%s: ended after %s, want %s", c.name, took, want)
			}
			client.Close()
			time.Sleep(2 * never) // the server has ended
		})
	}
}

func TestParse(t *testing.T) {
	env := func(name string) string {
		return map[string]string{"LAMEDUCK_HOST_IP": "10.0.0.7", "SIX": "fd00::7"}[name]
	}
	for _, c := range []struct{ args, want string }{
		{"--agent=$(LAMEDUCK_HOST_IP):9447 --id=a", "10.0.0.7:9447"},
		{"--agent=$(SIX):9447 --id=a", "[fd00::7]:9447"},
		{"--agent=[fd00::7]:9447 --id=a", "[fd00::7]:9447"},
		{"--agent=$(NOT_SET):9447 --id=a", `error --agent: ":9447" is not host:port`},
		{"--agent=$LAMEDUCK_HOST_IP:9447 --id=a", "$LAMEDUCK_HOST_IP:9447"},
		{"--agent=a:1", "error --id is empty"},
		{"--agent=a:1 --id=a --bound=0s", "error --bound 0s: must be positive"},
		{"--agent=a:1 --id=a --sleep=1s -- true", "error more than one"},
		{"--agent=a:1 --id=a --sleep=-1s", "error --sleep -1s"},
		{"--agent=a:1 --id=a --http-get=https://a:1/", "error --http-get"},
		{"--agent=a:1 --id=a --http-get=http://a/", "error --http-get"},
		{"--agent=a:1 --id=a --http-header=x", "error invalid value"},
		{"--agent=a:1 --id=a --unknown", "error flag provided"},
	} {
		o, err := parse(strings.Fields(c.args), env, &bytes.Buffer{})
		got := o.agent
		if err != nil {
			got = "error " + err.Error()
		}
		if want, isError := strings.CutPrefix(c.want, "error "); !(isError && err != nil &&
			strings.Contains(got, want)) && got != c.want {
			t.Errorf("%s: %s, want %s", c.args, got, c.want)
		}
	}
	if code, out, _ := call(t, "--nonsense"); code != exitUsage || !strings.Contains(out, "nonsense") {
		t.Errorf("wrong usage: exit code %d, %q", code, out)
	}
}

// As with a kubelet, whose hooks may name any path.
func TestThePathOfAHook(t *testing.T) {
	for path, want := range map[string]string{
		"": "/", "drain?now=1": "/drain?now=1", "a%20b": "/a%20b", "drain/100%": "/drain/100%25", "%zz": "/%25zz",
		"a b": "/a%20b", "line\nbreak": "/line%0Abreak",
	} {
		got, err := readURL("http://[::1]:80/"+path, nil)
		if err != nil || got != (target{address: "[::1]:80", host: "[::1]:80", path: want}) {
			t.Errorf("%q: %+v, %v", path, got, err)
		}
	}
}

// An init container that is killed and run again installs whole programs, which everybody may run.
func TestInstall(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lameduck-wait")
	if err := os.WriteFile(path, []byte("half of it"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if code, out, _ := call(t, "--install="+path); code != 0 {
			t.Fatalf("install: exit code %d: %s", code, out)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o755 {
		t.Errorf("mode %s, want 0755", info.Mode())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	// It runs, from where it was put.
	cmd, out := command(t, path, "--agent="+away, "--id=x", "--container=web")
	if err := cmd(); err == nil || !strings.Contains(out.String(), "did not wait any longer") {
		t.Errorf("the installed program: %v, %s", err, out)
	}
	if code, out, _ := call(t, "--install="+filepath.Join(path, "not", "a", "directory")); code != exitFailed {
		t.Errorf("install into nowhere: exit code %d: %s", code, out)
	}
	if _, err := os.Stat(filepath.Join(path, "not")); !errors.Is(err, fs.ErrNotExist) &&
		!strings.Contains(fmt.Sprint(err), "not a directory") {
		t.Error(err)
	}
}

// What follows -- is the container's own hook's.
func TestVersion(t *testing.T) {
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), []string{"lameduck-wait", "--version"}, func(string) string { return "" }, &stdout,
		&stderr)
	if code != 0 || stderr.Len() > 0 || !strings.HasPrefix(stdout.String(), "lameduck-wait dev, commit ") {
		t.Errorf("exit code %d, said %q, stderr %q", code, &stdout, &stderr)
	}
	o, err := parse([]string{"--agent=127.0.0.1:1", "--id=i", "--", "own", "--version"}, func(string) string {
		return ""
	}, &stdout)
	if err != nil || len(o.command) != 2 {
		t.Errorf("a hook with --version: %q, %v", o.command, err)
	}
}

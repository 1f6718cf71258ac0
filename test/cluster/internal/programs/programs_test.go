package programs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// tiny makes programs be built from a module that has only a few lines for each, into a cache of
// the test's own.
func tiny(t *testing.T) (cache string) {
	t.Helper()
	source, cache := t.TempDir(), t.TempDir()
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(source, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644))
		if err != nil {
			t.Fatal(err)
		}
	}
	write("go.sum", "")
	write("go.mod", fmt.Sprintf(`module tiny

go 1.26.0

require (
	go.etcd.io/etcd/server/v3 %s
	k8s.io/kubernetes %s
)

replace (
	go.etcd.io/etcd/server/v3 => ./etcd
	k8s.io/kubernetes => ./kubernetes
)
`, etcdVersion, version))
	write("etcd/go.mod", "module go.etcd.io/etcd/server/v3\n")
	write("kubernetes/go.mod", "module k8s.io/kubernetes\n")
	for _, g := range slices.Concat(All.all, Upstream.all) {
		dir, ok := strings.CutPrefix(g.pkg, "k8s.io/")
		if !ok {
			dir = "etcd"
		}
		if strings.HasSuffix(g.name, ".test") {
			write(dir+"/main_test.go", "package main\n\nimport \"testing\"\n\nfunc TestNone(*testing.T) {}\n")
		} else {
			write(dir+"/main.go", fmt.Sprintf("package main\n\nfunc main() { print(%q) }\n", g.name+" from source"))
		}
	}
	t.Setenv("LAMEDUCK_CLUSTER_SRC", source)
	t.Setenv("LAMEDUCK_CACHE", cache)
	for _, variable := range []string{"KUBERNETES_MIRROR", "ETCD_MIRROR", "HTTP_PROXY", "http_proxy", "GOFLAGS"} {
		t.Setenv(variable, "")
	}
	return cache
}

// origins runs the programs in dir, and returns which were built from source and which downloaded.
func origins(t *testing.T, dir string) string {
	t.Helper()
	var all []string
	for _, g := range All.all {
		path := filepath.Join(dir, g.name)
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		origin := "downloaded"
		if !bytes.Equal(text, content) {
			out, err := exec.Command(path).CombinedOutput()
			if err != nil || string(out) != g.name+" from source" {
				t.Errorf("%s: %q, %v", path, out, err)
			}
			origin = "built"
		}
		all = append(all, g.name+" "+origin)
	}
	return strings.Join(all, ", ")
}

// released is a mirror with the control plane, by its checksums, where handler does not answer.
func released(t *testing.T, handler func(w http.ResponseWriter, r *http.Request) bool) *mirror {
	t.Helper()
	etcd := archive(t, etcdMember())
	m := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case handler != nil && handler(w, r):
		case r.URL.Path[1:] == file("etcd", etcdVersion):
			w.Write(etcd)
		default:
			w.Write(content)
		}
	})
	for _, g := range All.all[1:] {
		m.checksums[file(g.name, version)] = sum(content)
	}
	return m
}

const (
	allBuilt = "etcd built, kube-apiserver built, kube-controller-manager built, kube-scheduler built, kubectl built"
	allDown  = "etcd downloaded, kube-apiserver downloaded, kube-controller-manager downloaded, " +
		"kube-scheduler downloaded, kubectl downloaded"
)

// What is downloaded, and what is built in its place: each program by itself.
func TestGet(t *testing.T) {
	is := func(r *http.Request, program string) bool {
		return strings.Contains(r.URL.Path, "/"+program) && (program != "etcd" || strings.Contains(r.URL.Path, "etcd-"))
	}
	closed := httptest.NewServer(nil)
	closed.Close()
	for name, c := range map[string]struct {
		handler func(w http.ResponseWriter, r *http.Request) bool
		change  func(*mirror)
		want    string
		says    []string
		silent  []string
	}{
		"all is there": {want: allDown, silent: []string{"from source"}},
		"wrong checksums": {
			change: func(m *mirror) { m.checksums[file("kubectl", version)] = sum(nil) },
			want:   strings.ReplaceAll(allDown, "kubectl downloaded", "kubectl built"),
			says: []string{"downloading kubectl v1.36.3: WRONG CHECKSUM of ",
				"expected SHA-256 " + sum(nil) + ", got " + sum(content),
				"building it from source", "building kubectl v1.36.3 from source"},
		},
		"404": {
			handler: func(w http.ResponseWriter, r *http.Request) bool {
				if !is(r, "etcd") && !is(r, "kube-apiserver") {
					return false
				}
				http.NotFound(w, r)
				return true
			},
			want: strings.NewReplacer("etcd downloaded", "etcd built", "kube-apiserver downloaded",
				"kube-apiserver built").Replace(allDown),
			says: []string{"downloading etcd v3.6.8: 404 Not Found from http://127.0.0.1:", "building etcd v3.6.8, " +
				"kube-apiserver v1.36.3 from source"},
		},
		"cut off": {
			handler: func(w http.ResponseWriter, r *http.Request) bool {
				if is(r, "kube-scheduler") {
					w.Header().Set("Content-Length", "1000000")
				}
				return false
			},
			want: strings.ReplaceAll(allDown, "kube-scheduler downloaded", "kube-scheduler built"),
			says: []string{"trying again",
				"downloading kube-scheduler v1.36.3: the download was cut off: unexpected EOF"},
		},
		"not reachable": {
			change: func(m *mirror) { m.kubernetes = closed.URL },
			want:   strings.ReplaceAll(allBuilt, "etcd built", "etcd downloaded"),
			says: []string{"downloading kube-apiserver v1.36.3: not reachable: ",
				"building all programs of this server from source"},
			// One attempt is enough.
			silent: []string{"downloading kube-controller-manager"},
		},
		"nothing is reachable": {
			change: func(m *mirror) { m.kubernetes, m.etcd = closed.URL, closed.URL },
			want:   allBuilt,
		},
		"no checksum": {
			change: func(m *mirror) { clear(m.checksums) },
			want:   allBuilt,
			silent: []string{"downloading"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cache := tiny(t)
			m := released(t, c.handler)
			if c.change != nil {
				c.change(m)
			}
			p, err := readPin(t.Context(), "kubernetes")
			if err != nil {
				t.Fatal(err)
			}
			var progress bytes.Buffer
			dir, err := p.get(t.Context(), &progress, ControlPlane, m, false)
			if err != nil {
				t.Fatalf("%v\n%s", err, &progress)
			}
			if got := origins(t, dir); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			for _, text := range c.says {
				if !strings.Contains(progress.String(), text) {
					t.Errorf("no %q in\n%s", text, &progress)
				}
			}
			for _, text := range c.silent {
				if strings.Contains(progress.String(), text) {
					t.Errorf("%q in\n%s", text, &progress)
				}
			}
			for _, pattern := range []string{"*/*.partial", "*/*.extracted", "*/.partial"} {
				if left, _ := filepath.Glob(filepath.Join(cache, pattern)); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			}
			if left, _ := filepath.Glob(filepath.Join(cache, "*official*")); (len(left) == 0) != (c.want == allBuilt) {
				t.Errorf("folders of downloaded programs: %v", left)
			}

			// Once more: all are there, also without a network.
			progress.Reset()
			if again, err := p.get(t.Context(), &progress, ControlPlane, m, true); again != dir || err != nil ||
				progress.Len() > 0 {
				t.Errorf("once more: %s, %v, %s", again, err, &progress)
			}
		})
	}
}

// The programs of a node come later, into the same folder; and a build from source does not take
// what was downloaded.
func TestGetMore(t *testing.T) {
	cache := tiny(t)
	m := released(t, nil)
	p, err := readPin(t.Context(), "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	get := func(set Set, m *mirror) string {
		t.Helper()
		dir, err := p.get(t.Context(), &bytes.Buffer{}, set, m, false)
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	first := get(ControlPlane, m)
	if _, err := p.get(t.Context(), &bytes.Buffer{}, All, m, true); err == nil ||
		!strings.Contains(err.Error(), "no network") {
		t.Errorf("without a network: %v", err)
	}
	more := get(All, m)
	got := origins(t, more)
	if more != first || got != allDown+", kubelet downloaded, kube-proxy downloaded" {
		t.Errorf("%s and then %s: %s", first, more, got)
	}
	off := get(ControlPlane, &mirror{})
	if got := origins(t, off); off == first || got != allBuilt {
		t.Errorf("from source: %s, %s", off, got)
	}
	// A test that needs kubelet and started a control plane has one folder for both.
	if dir := get(ControlPlane, m); dir != more {
		t.Errorf("not the folder with all of the programs: %s", dir)
	}

	dir, of, err := Get(t.Context(), &bytes.Buffer{}, Upstream, false)
	if err != nil || of != version || filepath.Dir(dir) != cache || len(absent(dir, Upstream.all)) > 0 {
		t.Errorf("upstream: %s, %s, %v", dir, of, err)
	}
}

// A program that is missing because an earlier build was deleted is got again.
func TestGetRepairs(t *testing.T) {
	tiny(t)
	m := released(t, func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "kubectl") {
			http.NotFound(w, r)
			return true
		}
		return false
	})
	p, err := readPin(t.Context(), "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.ReplaceAll(allDown, "kubectl downloaded", "kubectl built")
	for range 2 {
		dir, err := p.get(t.Context(), &bytes.Buffer{}, ControlPlane, m, false)
		if err != nil {
			t.Fatal(err)
		}
		if got := origins(t, dir); got != want {
			t.Errorf("got %s", got)
		}
		if err := os.RemoveAll(p.built); err != nil {
			t.Fatal(err)
		}
	}
}

// Two processes: one downloads, the other waits, and has what the first downloaded.
func TestGetTogether(t *testing.T) {
	tiny(t)
	waits := make(chan struct{})
	var asked sync.Map
	m := released(t, func(_ http.ResponseWriter, r *http.Request) bool {
		if _, again := asked.LoadOrStore(r.URL.Path, true); again {
			t.Errorf("%s is downloaded twice", r.URL.Path)
		}
		<-waits
		return false
	})
	var dirs [2]string
	var both sync.WaitGroup
	for i := range dirs {
		p, err := readPin(t.Context(), "kubernetes")
		if err != nil {
			t.Fatal(err)
		}
		both.Go(func() {
			progress := writer(func(text string) {
				if strings.Contains(text, "another process is downloading or building") {
					close(waits)
				}
			})
			var err error
			if dirs[i], err = p.get(t.Context(), progress, ControlPlane, m, false); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	if got := origins(t, dirs[0]); dirs[0] != dirs[1] || got != allDown {
		t.Errorf("%v: %s", dirs, got)
	}
}

type writer func(text string)

func (w writer) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

func TestGetInterrupted(t *testing.T) {
	cache := tiny(t)
	ctx, cancel := context.WithCancel(t.Context())
	m := released(t, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "kube-scheduler") {
			return false
		}
		w.Write(content[:10])
		w.(http.Flusher).Flush()
		cancel()
		<-r.Context().Done()
		return true
	})
	p, err := readPin(t.Context(), "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	var progress bytes.Buffer
	if dir, err := p.get(ctx, &progress, ControlPlane, m, false); !errors.Is(err, context.Canceled) ||
		strings.Contains(progress.String(), "from source") {
		t.Errorf("%s, %v\n%s", dir, err, &progress)
	}
	// What was complete stays, and nothing else.
	files, _ := filepath.Glob(filepath.Join(cache, "*", "*"))
	for i, path := range files {
		files[i] = filepath.Base(path)
	}
	if want := []string{"etcd", "kube-apiserver", "kube-controller-manager"}; !slices.Equal(files, want) {
		t.Errorf("%v is left, want %v", files, want)
	}
}

// The environment names the mirror and the proxy. It is read once in a process, so this test starts
// one.
func TestGetByProxy(t *testing.T) {
	if os.Getenv("TEST_GET") != "" {
		if _, _, err := Get(t.Context(), os.Stderr, ControlPlane, false); err != nil {
			t.Fatal(err)
		}
		return
	}
	tiny(t)
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, r.URL.String())
		mu.Unlock()
		http.NotFound(w, r)
	}))
	defer proxy.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestGetByProxy$")
	cmd.Env = append(os.Environ(), "TEST_GET=1", "HTTP_PROXY="+proxy.URL, "KUBERNETES_MIRROR=http://mirror.test/k8s",
		"ETCD_MIRROR=http://mirror.test/etcd")
	out, err := cmd.CombinedOutput()
	want := []string{"http://mirror.test/etcd/" + file("etcd", etcdVersion)}
	for _, g := range controlPlane[1:] {
		want = append(want, "http://mirror.test/k8s/"+file(g.name, version))
	}
	if err != nil || !slices.Equal(asked, want) {
		t.Errorf("the proxy was asked for %q, want %q: %v\n%s", asked, want, err, out)
	}
}

// A source that does not compile has to say why.
func TestGetFails(t *testing.T) {
	cache := tiny(t)
	source := filepath.Join(os.Getenv("LAMEDUCK_CLUSTER_SRC"), "kubernetes", "cmd", "kubectl", "main.go")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() { missing() }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBERNETES_MIRROR", "off")
	_, _, err := Get(t.Context(), &bytes.Buffer{}, ControlPlane, false)
	if err == nil || !strings.Contains(err.Error(), "undefined: missing") {
		t.Errorf("%v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(cache, "*")); len(left) != 1 { // the lock
		t.Errorf("left: %v", left)
	}
}

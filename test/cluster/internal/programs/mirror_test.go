package programs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	version     = "v1.36.3"
	etcdVersion = "v3.6.8"
)

// content is that of every released program in these tests.
var content = bytes.Repeat([]byte("program "), 10000)

// archive is content as etcd is released.
func archive(t *testing.T, member string) []byte {
	t.Helper()
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	files := tar.NewWriter(zip)
	for _, name := range []string{filepath.Dir(member) + "/README.md", member} {
		err := files.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := files.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(files.Close(), zip.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func etcdMember() string {
	return strings.TrimSuffix(file("etcd", etcdVersion)[7:], ".tar.gz") + "/etcd"
}

func sum(content []byte) string {
	hash := sha256.Sum256(content)
	return hex.EncodeToString(hash[:])
}

// serve returns a mirror that is served by handler, and expects content.
func serve(t *testing.T, handler http.HandlerFunc) *mirror {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	m := newMirror(nil)
	m.kubernetes, m.etcd = server.URL, server.URL
	m.checksums = map[string]string{
		file("etcd", etcdVersion):         sum(archive(t, etcdMember())),
		file("etcd", "v0.0.1"):            sum(archive(t, "elsewhere/etcd")),
		file("kube-apiserver", version):   sum(content),
		file("kubectl", version):          sum(content),
		file("kube-apiserver", "v1.36.2"): sum([]byte("another")),
	}
	t.Cleanup(m.client.CloseIdleConnections)
	return m
}

// try downloads a program. If that fails, no file may be left.
func try(t *testing.T, m *mirror, program, version string) (progress string, err error) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, program)
	var out bytes.Buffer
	err = m.download(t.Context(), program, version, path, &out)
	files, _ := os.ReadDir(dir)
	if err != nil {
		if len(files) > 0 {
			t.Errorf("left: %v", files)
		}
		return out.String(), err
	}
	info, statErr := os.Stat(path)
	if statErr != nil || info.Mode().Perm()&0o111 == 0 || len(files) != 1 {
		t.Errorf("%v, %v, %v", info, statErr, files)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v, and not the program", len(got), err)
	}
	return out.String(), nil
}

func TestDownload(t *testing.T) {
	t.Parallel()
	m := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path[1:] {
		case file("etcd", etcdVersion):
			w.Write(archive(t, etcdMember()))
		case file("etcd", "v0.0.1"):
			w.Write(archive(t, "elsewhere/etcd"))
		case file("kubectl", version): // as dl.k8s.io does
			http.Redirect(w, r, "/cdn/kubectl", http.StatusFound)
		case file("kube-apiserver", version), "cdn/kubectl":
			w.Write(content)
		default:
			t.Errorf("a request for %s", r.URL)
		}
	})
	m.report = 0
	for _, program := range []string{"etcd", "kube-apiserver", "kubectl"} {
		version := version
		if program == "etcd" {
			version = etcdVersion
		}
		progress, err := try(t, m, program, version)
		if err != nil || !strings.Contains(progress, " MB") {
			t.Errorf("%s: %v, %q", program, err, progress)
		}
	}
	if _, err := try(t, m, "etcd", "v0.0.1"); err == nil || !strings.Contains(err.Error(), "no file "+
		strings.ReplaceAll(etcdMember(), etcdVersion, "v0.0.1")) {
		t.Errorf("an archive without etcd: %v", err)
	}
}

// A file with another content must not become a program, and the error has to name both checksums.
func TestDownloadChecksum(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	m := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Write(content)
	})
	for program, version := range map[string]string{"kube-apiserver": "v1.36.2", "etcd": etcdVersion} {
		_, err := try(t, m, program, version)
		if err == nil {
			t.Fatalf("%s was downloaded", program)
		}
		for _, want := range []string{"WRONG CHECKSUM", m.checksums[file(program, version)], sum(content),
			m.kubernetes} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: no %q in %q", program, want, err)
			}
		}
		if errors.Is(err, errUnreachable) {
			t.Errorf("%s: other programs would not be tried: %v", program, err)
		}
	}
	if asked.Load() != 2 {
		t.Errorf("%d requests, want one for each program", asked.Load())
	}
}

func TestDownloadNotFound(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	m := serve(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.NotFound(w, r)
	})
	address, err := url.Parse(m.kubernetes)
	if err != nil {
		t.Fatal(err)
	}
	address.User = url.UserPassword("jane", "secret")
	m.kubernetes = address.String()
	_, err = try(t, m, "kube-apiserver", version)
	want := fmt.Sprintf("404 Not Found from http://jane:xxxxx@%s/%s", address.Host, file("kube-apiserver", version))
	if err == nil || err.Error() != want || asked.Load() != 1 {
		t.Errorf("%v after %d requests, want %s", err, asked.Load(), want)
	}
}

// A download that is cut off is tried once more, from its beginning.
func TestDownloadCut(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(w http.ResponseWriter, r *http.Request){
		"content-length": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			w.Write(content[:len(content)/2])
		},
		"reset": func(w http.ResponseWriter, _ *http.Request) {
			w.Write(content[:len(content)/2])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"stalled": func(w http.ResponseWriter, r *http.Request) {
			w.Write(content[:len(content)/2])
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, cuts := range []int32{1, 1000} {
				var asked atomic.Int32
				m := serve(t, func(w http.ResponseWriter, r *http.Request) {
					if asked.Add(1) <= cuts {
						cut(w, r)
						return
					}
					w.Write(content)
				})
				if name == "stalled" {
					m.stall = 2 * time.Second
				}
				progress, err := try(t, m, "kube-apiserver", version)
				if !strings.Contains(progress, "the download was cut off") || asked.Load() != 2 {
					t.Errorf("%d requests, %q", asked.Load(), progress)
				}
				if (err == nil) != (cuts == 1) || err != nil && !errors.Is(err, errCut) {
					t.Errorf("cut %d times: %v", cuts, err)
				}
			}
		})
	}
}

// What comes slowly, and what has no end, ends too.
func TestDownloadLimits(t *testing.T) {
	t.Parallel()
	m := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			w.Write(content[:10])
			w.(http.Flusher).Flush()
		}
	})
	m.limit = 200 * time.Millisecond
	if _, err := try(t, m, "kube-apiserver", version); err == nil || !strings.Contains(err.Error(), "took more than") {
		t.Errorf("too long: %v", err)
	}
	m.limit, m.most = time.Minute, 1000
	_, err := try(t, m, "kube-apiserver", version)
	if err == nil || !strings.Contains(err.Error(), "more than 0.0 MB") {
		t.Errorf("too large: %v", err)
	}
}

// A server that does not answer is not asked for the other programs.
func TestDownloadUnreachable(t *testing.T) {
	t.Parallel()
	silent := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	silent.client.Transport.(*http.Transport).ResponseHeaderTimeout = 100 * time.Millisecond
	closed := serve(t, nil)
	server := httptest.NewServer(nil)
	server.Close()
	closed.kubernetes = server.URL
	for name, m := range map[string]*mirror{"silent": silent, "closed": closed} {
		if _, err := try(t, m, "kube-apiserver", version); !errors.Is(err, errUnreachable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDownloadInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var asked atomic.Int32
	m := serve(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Write(content[:10])
		w.(http.Flusher).Flush()
		cancel()
		<-r.Context().Done()
	})
	dir := t.TempDir()
	err := m.download(ctx, "kube-apiserver", version, filepath.Join(dir, "kube-apiserver"), &bytes.Buffer{})
	if files, _ := os.ReadDir(dir); !errors.Is(err, context.Canceled) || asked.Load() != 1 || len(files) > 0 {
		t.Errorf("%v after %d requests, %v is left", err, asked.Load(), files)
	}
}

// The mirror need not be reachable, or have a name, where there is a proxy.
func TestDownloadProxy(t *testing.T) {
	t.Parallel()
	var asked atomic.Value
	proxy := serve(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.URL.String())
		w.Write(content)
	})
	address, err := url.Parse(proxy.kubernetes)
	if err != nil {
		t.Fatal(err)
	}
	m := newMirror(http.ProxyURL(address))
	t.Cleanup(m.client.CloseIdleConnections)
	m.kubernetes, m.checksums = "http://mirror.test/releases", proxy.checksums
	_, err = try(t, m, "kube-apiserver", version)
	if want := "http://mirror.test/releases/" + file("kube-apiserver", version); err != nil || asked.Load() != want {
		t.Errorf("the proxy was asked for %v, want %s: %v", asked.Load(), want, err)
	}
}

func TestMirrorFromEnvironment(t *testing.T) {
	for _, c := range []struct{ kubernetes, etcd, wantKubernetes, wantEtcd string }{
		{"", "", kubernetesReleases, etcdReleases},
		{"off", "", "", ""},
		{"http://mirror.test/", "", "http://mirror.test", etcdReleases},
		{"https://mirror.test/k8s", "https://mirror.test/etcd/", "https://mirror.test/k8s", "https://mirror.test/etcd"},
		{"", "off", kubernetesReleases, ""},
		{"off", "http://mirror.test", "", "http://mirror.test"},
	} {
		t.Setenv("KUBERNETES_MIRROR", c.kubernetes)
		t.Setenv("ETCD_MIRROR", c.etcd)
		m, err := mirrorFromEnvironment()
		if err != nil || m.kubernetes != c.wantKubernetes || m.etcd != c.wantEtcd {
			t.Errorf("%+v: %v, %v", c, m, err)
		}
	}
	for _, bad := range []string{"mirror.test", "ftp://mirror.test", "http://", "://"} {
		t.Setenv("KUBERNETES_MIRROR", bad)
		if _, err := mirrorFromEnvironment(); err == nil || !strings.Contains(err.Error(), "KUBERNETES_MIRROR") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A new version in go.mod takes new checksums: without them everything would be built from source.
func TestChecksums(t *testing.T) {
	t.Setenv("LAMEDUCK_CLUSTER_SRC", "")
	t.Setenv("LAMEDUCK_CACHE", t.TempDir())
	p, err := readPin(t.Context(), "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	pinned := parse(pinned)
	for _, arch := range []string{"amd64", "arm64"} {
		for _, g := range All.all {
			name := strings.ReplaceAll(file(g.name, p.version(g.name)), runtime.GOARCH, arch)
			if len(pinned[name]) != 64 {
				t.Errorf("no checksum of %s: %q", name, pinned[name])
			}
			delete(pinned, name)
		}
	}
	if len(pinned) > 0 {
		t.Errorf("checksums of what is not downloaded: %v", pinned)
	}
}

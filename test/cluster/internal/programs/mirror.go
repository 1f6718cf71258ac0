package programs

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	_ "embed" // checksums.txt
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"strings"
	"time"
)

const (
	kubernetesReleases = "https://dl.k8s.io/release"
	etcdReleases       = "https://github.com/etcd-io/etcd/releases/download"
	// attempts is how often a download is tried that was cut off, or that stopped.
	attempts = 2
)

// errUnreachable is wrapped by errors that the other programs of the same server would cause, too.
var errUnreachable = errors.New("not reachable")

// mirror is where the releases are downloaded from.
type mirror struct {
	// kubernetes has v1.36.3/bin/linux/amd64/kube-apiserver below it, etcd
	// v3.6.8/etcd-v3.6.8-linux-amd64.tar.gz. Empty: none is downloaded.
	kubernetes, etcd string

	client *http.Client
	// stall is how long a download may bring no byte, limit how long it may take in all.
	stall, limit time.Duration
	// most is the size of the largest file that is accepted, in bytes.
	most int64
	// report is the time between two lines about a download.
	report time.Duration
	// checksums are the SHA-256 of files, by their paths below kubernetes and etcd.
	checksums map[string]string
}

// mirrorFromEnvironment returns the mirror that KUBERNETES_MIRROR and ETCD_MIRROR name. Each is the
// address in the place of its project's own; "off" means that programs are built from source. "off"
// for Kubernetes is also the default for etcd. Proxies are those of HTTPS_PROXY and NO_PROXY.
func mirrorFromEnvironment() (*mirror, error) {
	m := newMirror(http.ProxyFromEnvironment)
	var err error
	if m.kubernetes, err = setting("KUBERNETES_MIRROR", kubernetesReleases); err != nil {
		return nil, err
	}
	otherwise := etcdReleases
	if m.kubernetes == "" {
		otherwise = ""
	}
	if m.etcd, err = setting("ETCD_MIRROR", otherwise); err != nil {
		return nil, err
	}
	return m, nil
}

func newMirror(proxy func(*http.Request) (*url.URL, error)) *mirror {
	return &mirror{
		// The timeouts are short: without a network the programs are built, which takes minutes and
		// should begin at once.
		client: &http.Client{Transport: &http.Transport{
			Proxy:                 proxy,
			DialContext:           (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			TLSHandshakeTimeout:   5 * time.Second,
			ResponseHeaderTimeout: 10 * time.Second,
			ForceAttemptHTTP2:     true,
		}},
		stall: 20 * time.Second, limit: 10 * time.Minute, most: 512 << 20, report: 5 * time.Second,
		checksums: parse(pinned),
	}
}

//go:embed checksums.txt
var pinned string

// parse reads what sha256sum prints. Lines that begin with # are comments.
func parse(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok && line[0] != '#' {
			all[name] = sum
		}
	}
	return all
}

// setting returns the URL in an environment variable, without a slash at its end.
func setting(variable, otherwise string) (string, error) {
	text := os.Getenv(variable)
	switch text {
	case "":
		return otherwise, nil
	case "off":
		return "", nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", fmt.Errorf("%s must be an http or https URL, or off", variable)
	}
	return strings.TrimRight(text, "/"), nil
}

// base returns the address that the program is downloaded from. It is empty if the program is not
// downloaded: because of the environment, or because no checksum of this version of the program is
// known for this machine.
func (m *mirror) base(program, version string) string {
	base := m.kubernetes
	if program == "etcd" {
		base = m.etcd
	}
	if m.checksums[file(program, version)] == "" {
		return ""
	}
	return base
}

// file is the path of a program's file below the address of its releases.
func file(program, version string) string {
	if program == "etcd" {
		return fmt.Sprintf("%[1]s/etcd-%[1]s-%[2]s-%[3]s.tar.gz", version, runtime.GOOS, runtime.GOARCH)
	}
	return fmt.Sprintf("%s/bin/%s/%s/%s", version, runtime.GOOS, runtime.GOARCH, program)
}

// download downloads a program to path, executable. It creates no other file that remains, and path
// only if the content has the expected checksum. Two downloads must not have the same path at the
// same time. One that is cut off, or brings no byte for too long, is tried once more. Lines about
// its progress go to progress.
func (m *mirror) download(ctx context.Context, program, version, path string, progress io.Writer) error {
	name := file(program, version)
	address, err := url.Parse(m.base(program, version) + "/" + name)
	if err != nil {
		return err
	}
	partial := path + ".partial"
	defer os.Remove(partial)
	for attempt := 1; ; attempt++ {
		err := m.fetch(ctx, address, m.checksums[name], partial, progress)
		if err == nil {
			break
		}
		if attempt == attempts || !errors.Is(err, errCut) {
			return err
		}
		fmt.Fprintf(progress, "  %v: trying again\n", err)
	}
	if program == "etcd" {
		archive := partial
		partial = path + ".extracted"
		defer os.Remove(partial)
		member := fmt.Sprintf("etcd-%s-%s-%s/etcd", version, runtime.GOOS, runtime.GOARCH)
		if err := extract(archive, member, partial); err != nil {
			return fmt.Errorf("%s: %w", address.Redacted(), err)
		}
	}
	if err := os.Chmod(partial, 0o755); err != nil {
		return err
	}
	return os.Rename(partial, path)
}

// errCut is wrapped by the errors of downloads that began and did not end.
var errCut = errors.New("the download was cut off")

// fetch downloads a file to path, and checks it.
func (m *mirror) fetch(ctx context.Context, address *url.URL, checksum, path string, progress io.Writer) error {
	ctx, cancel := context.WithTimeoutCause(ctx, m.limit, fmt.Errorf("the download took more than %s", m.limit))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return err
	}
	response, err := m.client.Do(request)
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w: %w", errUnreachable, err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s from %s", response.Status, address.Redacted())
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	stalled := time.AfterFunc(m.stall, func() { stop(fmt.Errorf("%w: no byte for %s", errCut, m.stall)) })
	defer stalled.Stop()
	body := &meter{Reader: response.Body, total: response.ContentLength, every: m.report, progress: progress,
		began: time.Now(), moved: func() { stalled.Reset(m.stall) }}
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(out, hash), io.LimitReader(body, m.most+1))
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w, after %s, from %s", context.Cause(ctx), megabytes(n), address.Redacted())
	case body.err != nil && !errors.Is(body.err, io.EOF):
		return fmt.Errorf("%w: %w, after %s, from %s", errCut, body.err, megabytes(n), address.Redacted())
	case err != nil:
		return err // of the disk
	case n > m.most:
		return fmt.Errorf("%s has more than %s", address.Redacted(), megabytes(m.most))
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != checksum {
		return fmt.Errorf("WRONG CHECKSUM of %s: expected SHA-256 %s, got %s; the file is not used", address.Redacted(),
			checksum, got)
	}
	return out.Close()
}

// extract writes one file of a .tar.gz to path.
func extract(archive, member, path string) error {
	in, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer in.Close()
	unzipped, err := gzip.NewReader(in)
	if err != nil {
		return err
	}
	files := tar.NewReader(unzipped)
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("no file %s", member)
		}
		if err != nil {
			return err
		}
		if header.Name != member || header.Typeflag != tar.TypeReg {
			continue
		}
		out, err := os.Create(path)
		if err != nil {
			return err
		}
		defer out.Close()
		// Not more than the archive with the right checksum has.
		if _, err := io.Copy(out, files); err != nil {
			return err
		}
		return out.Close()
	}
}

// meter is the body of a response. It reports how far the download is.
type meter struct {
	io.Reader
	total    int64 // -1: unknown
	every    time.Duration
	progress io.Writer
	began    time.Time
	moved    func() // called after each byte or more

	err      error // of the last Read
	n        int64
	reported time.Duration
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.n, m.err = m.n+int64(n), err
	if n == 0 {
		return n, err
	}
	m.moved()
	if took := time.Since(m.began); took-m.reported >= m.every {
		m.reported = took
		left := ""
		if m.total > 0 {
			seconds := took.Seconds() * float64(m.total-m.n) / float64(m.n)
			left = fmt.Sprintf(" of %s, about %.0f s left", megabytes(m.total), seconds)
		}
		fmt.Fprintf(m.progress, "  %s%s\n", megabytes(m.n), left)
	}
	return n, err
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

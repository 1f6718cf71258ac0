// Package record records a gateway's admin interface during a drain into an archive. Users of a
// data plane that Lameduck cannot be tested with send it as evidence. It is the command "agent
// record", and runs without coordinators.
package record

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/version"
)

// source lists the requests to one kind of gateway. The answers contain no keys. Traefik's may
// contain a password in the URL of a server, and headers of health checks.
type source struct {
	// admin is the default address of the admin interface. asks are paths to read or, for HAProxy,
	// commands.
	admin string
	asks  []string
	// version is the path or command that returns the version, read once. The first group of
	// matches in its answer becomes part of the archive's name.
	version string
	matches *regexp.Regexp
}

var sources = map[string]source{
	"envoy": {"http://127.0.0.1:19000", []string{"/clusters?format=json"}, "/server_info",
		regexp.MustCompile(`"version":\s*"[0-9a-f]*/?([0-9.]+)`)},
	"traefik": {"http://127.0.0.1:8080", []string{"/api/http/services", "/api/tcp/services"}, "/api/version",
		regexp.MustCompile(`(?i)"version":\s*"([^"]+)"`)},
	"haproxy": {"unix:///var/run/haproxy/admin.sock", []string{"show servers state", "show stat"}, "show info",
		regexp.MustCompile(`(?m)^Version: (\S+)`)},
	"ingress-nginx": {"http://127.0.0.1:10246", []string{"/configuration/backends"}, "", nil},
	"http":          {"", nil, "", nil},
}

// answer is an entry of the index: an answer that did not change from At to Until.
type answer struct {
	File  string `json:"file,omitempty"`
	Asked string `json:"asked"`
	// At and Until are milliseconds since the start, of the first and the last such answer.
	At    int64  `json:"atMillis"`
	Until int64  `json:"untilMillis"`
	Error string `json:"error,omitempty"`

	body []byte
}

// index is record.json, the last file of an archive.
type index struct {
	Lameduck string    `json:"lameduck"`
	Gateway  string    `json:"gateway"`
	Version  string    `json:"version"`
	Began    time.Time `json:"began"`
	Answers  []*answer `json:"answers"`
}

// Run records until ctx is done or the time is over, and then closes the archive. Its errors wrap
// cli.ErrUsage if the command line caused them, but for a folder that cannot be written to.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var kind, admin, of, folder string
	var most, every time.Duration
	var paths []string
	known := slices.Sorted(maps.Keys(sources))
	f := flag.NewFlagSet("agent record", flag.ContinueOnError)
	f.StringVar(&kind, "gateway", "", "what is recorded: "+strings.Join(known, ", "))
	f.StringVar(&admin, "admin", "", "http://HOST:PORT or unix:///PATH of the admin interface; empty: the kind's "+
		"usual one")
	f.Func("path", "a path to ask for as well; may be repeated, required with http", func(p string) error {
		paths = append(paths, p)
		return nil
	})
	f.StringVar(&of, "gateway-version", "", "the gateway's version, if its admin interface does not say")
	f.DurationVar(&most, "for", 2*time.Minute, "how long to record; Ctrl-C ends it earlier and keeps the archive")
	f.DurationVar(&every, "every", 100*time.Millisecond, "how often to ask")
	f.StringVar(&folder, "dir", ".", "where the archive is written")
	if err := cli.Parse(f, args, "agent record writes the raw answers of a gateway's admin interface into one "+
		"archive. Start it in the gateway's\npod or network namespace, delete a pod that the gateway routes to, and "+
		"wait for the end.", stdout); err != nil {
		return err
	}
	s, ok := sources[kind]
	switch {
	case !ok:
		return fmt.Errorf("%w: --gateway %q: must be one of %s", cli.ErrUsage, kind, strings.Join(known, ", "))
	case len(s.asks)+len(paths) == 0:
		return fmt.Errorf("%w: --gateway %s needs --path", cli.ErrUsage, kind)
	case admin == "" && s.admin == "":
		return fmt.Errorf("%w: --gateway %s needs --admin", cli.ErrUsage, kind)
	case every <= 0:
		return fmt.Errorf("%w: --every %s: must be positive", cli.ErrUsage, every)
	}
	admin = cmp.Or(admin, s.admin)
	ask, err := asker(kind, admin)
	if err != nil {
		return fmt.Errorf("%w: --admin %q: %w", cli.ErrUsage, admin, err)
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	in := index{Lameduck: version.String("agent"), Gateway: kind, Version: of, Began: time.Now()}
	if in.Version == "" && s.version != "" {
		text, err := ask(ctx, s.version)
		if err != nil {
			return fmt.Errorf("the gateway's admin interface does not answer at %s (--admin): %w", admin, err)
		}
		if found := s.matches.FindSubmatch(text); found != nil {
			in.Version = string(found[1])
		}
	}
	in.Version = cmp.Or(in.Version, "unknown")
	return in.record(ctx, ask, append(slices.Clone(s.asks), paths...), every, folder, stdout, stderr)
}

// asker returns a function that reads from the admin interface at an address, in at most 5 s.
func asker(kind, admin string) (func(ctx context.Context, what string) ([]byte, error), error) {
	u, err := url.Parse(admin)
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && (u.Scheme != "unix" || u.Path == "") || kind == "haproxy" && u.Scheme != "unix" {
		return nil, errors.New("must be http://HOST:PORT or unix:///PATH, and for haproxy the latter")
	}
	network, address := "tcp", u.Host
	if u.Scheme == "unix" {
		network, address = "unix", u.Path
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	return func(ctx context.Context, what string) ([]byte, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if kind == "haproxy" {
			conn, err := dial(ctx, "", "")
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			if _, err := fmt.Fprintln(conn, what); err != nil {
				return nil, err
			}
			return io.ReadAll(conn)
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://admin"+what, nil)
		if err != nil {
			return nil, err
		}
		answer, err := client.Do(request)
		if err != nil {
			return nil, err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err == nil && answer.StatusCode != http.StatusOK {
			err = errors.New(answer.Status)
		}
		return body, err
	}, nil
}

// record writes the archive, under another name until it is complete.
func (in *index) record(ctx context.Context, ask func(context.Context, string) ([]byte, error), asks []string,
	every time.Duration, folder string, stdout, stderr io.Writer) (err error) {
	file, err := os.CreateTemp(folder, ".record-*")
	if err != nil {
		return fmt.Errorf("--dir %q: %w", folder, err)
	}
	defer func() {
		_ = file.Close()
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	zipped := gzip.NewWriter(file)
	archive := tar.NewWriter(zipped)
	add := func(name string, content []byte) error {
		if err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)),
			ModTime: time.Now()}); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	fmt.Fprintf(stderr, "recording %s %s: now delete a pod that it routes to\n", in.Gateway, in.Version)
	last := map[string]*answer{}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for ctx.Err() == nil {
		for _, what := range asks {
			at := time.Since(in.Began).Milliseconds()
			now := &answer{Asked: what, At: at, Until: at}
			if now.body, err = ask(ctx, what); ctx.Err() != nil {
				break
			} else if err != nil {
				now.Error = err.Error()
			}
			if was := last[what]; was != nil && was.Error == now.Error && bytes.Equal(was.body, now.body) {
				was.Until = at
				continue
			} else if was != nil {
				was.body = nil // written to the archive
			}
			last[what] = now
			in.Answers = append(in.Answers, now)
			fmt.Fprintf(stderr, "%6.1f s  %s  %d bytes %s\n", float64(at)/1000, what, len(now.body), now.Error)
			if len(now.body) > 0 {
				now.File = fmt.Sprintf("%05d.txt", len(in.Answers))
				if err := add(now.File, now.body); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	if !slices.ContainsFunc(in.Answers, func(a *answer) bool { return a.Error == "" || a.File != "" }) {
		why := "the recording ended before the first answer"
		if n := len(in.Answers); n > 0 {
			why = in.Answers[n-1].Error
		}
		return fmt.Errorf("the gateway's admin interface has not answered (--admin): %s", why)
	}
	content, err := json.MarshalIndent(in, "", "  ")
	if err != nil {
		return err
	}
	if err := errors.Join(add("record.json", content), archive.Close(), zipped.Close(), file.Sync()); err != nil {
		return err
	}
	name := filepath.Join(folder, fmt.Sprintf("record-%s-%s-%s.tar.gz", in.Gateway,
		strings.ReplaceAll(in.Version, "/", "_"), in.Began.UTC().Format("20060102T150405Z")))
	if err := os.Rename(file.Name(), name); err != nil {
		return err
	}
	fmt.Fprintln(stdout, name)
	return nil
}

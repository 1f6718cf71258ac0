package record

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// recorded is an archive as a reader finds it.
type recorded struct {
	name  string
	index index
	files map[string]string
}

// record calls change once each request has its first answer, and runs until so many answers that
// differ are recorded after that.
func record(t *testing.T, change func(), differ int, args ...string) (got recorded) {
	t.Helper()
	ctx, interrupt := context.WithTimeout(t.Context(), 30*time.Second)
	defer interrupt()
	dir := t.TempDir()
	said, stderr := io.Pipe()
	answers := max(1, len(sources[args[1]].asks)) // after the first line there is one for each
	go func() {
		lines := 0
		for b := make([]byte, 4096); ; {
			n, err := said.Read(b)
			if err != nil {
				return
			}
			for range bytes.Count(b[:n], []byte("\n")) {
				switch lines++; lines {
				case 1 + answers:
					change()
				case 1 + answers + differ:
					interrupt() // as Ctrl-C does
				}
			}
		}
	}()
	var out bytes.Buffer
	if err := Run(ctx, append(args, "--dir", dir, "--every", "10ms"), &out, stderr); err != nil {
		t.Fatal(err)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Fatal("the change of what the gateway answers was not recorded within 30 s")
	}
	got.name = strings.TrimSpace(out.String())
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || filepath.Join(dir, left[0].Name()) != got.name {
		t.Fatalf("%v %v, want only %s", left, err, got.name)
	}
	file, err := os.Open(got.name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	got.files = map[string]string{}
	for archive := tar.NewReader(unzipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		got.files[header.Name] = string(content)
	}
	if err := json.Unmarshal([]byte(got.files["record.json"]), &got.index); err != nil {
		t.Fatal(err)
	}
	return got
}

// TestRealGateways records each gateway that runs here while it loses a server, until an interrupt.
func TestRealGateways(t *testing.T) {
	dir, err := os.MkdirTemp("", "rec") // t.TempDir is too long for a unix socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Run("haproxy", func(t *testing.T) {
		web, socket := planes.FreeAddress(t), filepath.Join(dir, "ha.sock")
		config := filepath.Join(dir, "ha.cfg")
		planes.Replace(t, config, fmt.Sprintf("global\n stats socket %s level admin\ndefaults\n mode http\n"+
			" timeout client 1s\n timeout server 1s\n timeout connect 1s\nfrontend web\n bind %s\n"+
			" default_backend web\nbackend web\n server a 127.0.0.9:80\n", socket, web))
		planes.StartProgram(t, web, gatewaytest.LookPath(t, "haproxy"), "-db", "-f", config)
		planes.Until(t, "HAProxy listens on its socket", func() bool { // it does after it listens on web
			conn, err := net.Dial("unix", socket)
			if err != nil {
				return false
			}
			conn.Close()
			return true
		})
		check(t, record(t, func() {
			conn, err := net.Dial("unix", socket)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprintln(conn, "set server web/a state maint")
			// HAProxy has then carried it out. Both answers also count seconds, so the first one
			// that differs may be older than the change. The second one is not.
			_, _ = io.ReadAll(conn)
		}, 2, "--gateway", "haproxy", "--admin", "unix://"+socket), "127.0.0.9", ",MAINT,")
	})
	t.Run("traefik", func(t *testing.T) {
		web, admin, rules := planes.FreeAddress(t), planes.FreeAddress(t), t.TempDir()
		set := func(url string) {
			planes.Replace(t, filepath.Join(rules, "web.yaml"), "http: {routers: {web: {rule: 'PathPrefix(`/`)', "+
				"service: web}}, services: {web: {loadBalancer: {servers: [{url: 'http://"+url+"'}]}}}}")
		}
		set("127.0.0.9:80")
		planes.StartProgram(t, admin, gatewaytest.LookPath(t, "traefik"), "--entrypoints.web.address="+web,
			"--entrypoints.traefik.address="+admin, "--api.insecure=true", "--global.checkNewVersion=false",
			"--global.sendAnonymousUsage=false", "--providers.providersThrottleDuration=100ms",
			"--providers.file.directory="+rules)
		planes.Until(t, "Traefik serves its API", func() bool {
			answer, err := http.Get("http://" + admin + "/api/http/services")
			if err != nil {
				return false
			}
			defer answer.Body.Close()
			body, _ := io.ReadAll(answer.Body)
			return strings.Contains(string(body), "127.0.0.9")
		})
		check(t, record(t, func() { set("127.0.0.8:80") }, 1, "--gateway", "traefik", "--admin", "http://"+admin),
			"127.0.0.9", "127.0.0.8")
	})
	t.Run("envoy", func(t *testing.T) {
		socket, web, config := filepath.Join(dir, "ev.sock"), planes.FreeAddress(t), filepath.Join(dir, "ev.yaml")
		_, port, _ := strings.Cut(web, ":")
		planes.Replace(t, config, "admin: {address: {pipe: {path: "+socket+"}}}\nstatic_resources:\n"+
			"  listeners: [{name: web, address: {socket_address: {address: 127.0.0.1, port_value: "+port+"}}, "+
			"filter_chains: [{filters: [{name: tcp, typed_config: {'@type': "+
			"type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy, stat_prefix: web, "+
			"cluster: web}}]}]}]\n"+
			"  clusters: [{name: web, load_assignment: {cluster_name: web, endpoints: [{lb_endpoints: "+
			"[{endpoint: {address: {socket_address: {address: 127.0.0.9, port_value: 80}}}}]}]}}]\n")
		planes.StartProgram(t, web, gatewaytest.LookPath(t, "envoy"), "-c", config, "--disable-hot-restart")
		ask, err := asker("envoy", "unix://"+socket)
		if err != nil {
			t.Fatal(err)
		}
		planes.Until(t, "Envoy has counted the connection that found it listening", func() bool {
			text, err := ask(t.Context(), sources["envoy"].asks[0])
			counted := strings.Join(strings.Fields(string(text)), "")
			return err == nil && strings.Contains(counted, `"value":"1","name":"cx_connect_fail"`) &&
				strings.Count(counted, `"value":"1"`) == 2 // the other one is cx_total: none is active
		})
		check(t, record(t, func() { // its counters are in the answer
			if conn, err := net.Dial("tcp", web); err == nil {
				defer conn.Close()
			}
		}, 1, "--gateway", "envoy", "--admin", "unix://"+socket), "127.0.0.9", `"value": "2"`)
	})
}

// check looks for what a reader of evidence needs: the version, and an answer before and after the
// change, each with its time. Only those after it contain changed.
func check(t *testing.T, got recorded, address, changed string) {
	t.Helper()
	in := got.index
	if in.Version == "" || in.Version == "unknown" || !strings.Contains(filepath.Base(got.name), "-"+in.Version+"-") {
		t.Errorf("%s of version %q", got.name, in.Version)
	}
	asked := map[string]int{}
	for _, a := range in.Answers {
		asked[a.Asked]++
		if a.Error != "" || a.Until < a.At || got.files[a.File] == "" {
			t.Errorf("%+v: %d bytes", a, len(got.files[a.File]))
		}
	}
	for _, what := range sources[in.Gateway].asks[:1] {
		if asked[what] == 0 || !strings.Contains(got.files["00001.txt"], address) {
			t.Errorf("%q: asked %v, first answer\n%s", what, asked, got.files["00001.txt"])
		}
	}
	before, after := "", ""
	for i, a := range in.Answers {
		if i < len(sources[in.Gateway].asks) {
			before += got.files[a.File]
		} else {
			after += got.files[a.File]
		}
	}
	if strings.Contains(before, changed) || !strings.Contains(after, changed) {
		t.Errorf("want %q after the change alone; before it:\n%s\nafter it:\n%s", changed, before, after)
	}
}

// TestAGatewayThatGoesAway is recorded as an error, and what was before is kept.
func TestAGatewayThatGoesAway(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.ReadFull(conn, make([]byte, 20))
			fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
			conn.Close()
		}
	}()
	got := record(t, func() { l.Close() }, 1, "--gateway", "http", "--admin", "unix://"+socket, "--path", "/x")
	if n := len(got.index.Answers); n < 2 || got.files["00001.txt"] != "ok" || got.index.Answers[n-1].Error == "" {
		t.Errorf("%+v", got)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{
		{}, {"--gateway", "x"}, {"--gateway", "http", "--admin", "http://x"}, {"--gateway", "http", "--path", "/"},
		{"--gateway", "haproxy", "--admin", "http://127.0.0.1:1"}, {"--gateway", "envoy", "--admin", "ftp://x"},
		{"--gateway", "envoy", "--every", "0s"}, {"--gateway", "envoy", "y"},
	} {
		if err := Run(t.Context(), args, io.Discard, io.Discard); !errors.Is(err, cli.ErrUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	dir := t.TempDir()
	for _, version := range []string{"", "1.40.0"} {
		err := Run(t.Context(), []string{"--gateway", "envoy", "--admin", "unix:///does/not/exist",
			"--gateway-version", version, "--for", "50ms", "--every", "1ms", "--dir", dir}, io.Discard, io.Discard)
		if err == nil || errors.Is(err, cli.ErrUsage) || !strings.Contains(err.Error(), "/does/not/exist") {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("an archive without an answer: %v, %v", left, err)
	}
}

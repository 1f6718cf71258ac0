package apisix

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// data is a real APISIX, or the second one on the same etcd.
type data struct {
	dir, number                string
	admin, control, port, etcd string
}

// run runs one of the commands that README.md lists, and returns the words that it prints.
func (d *data) run(t testing.TB, command string, more ...string) []string {
	t.Helper()
	c := exec.Command(filepath.Join(d.dir, command), append([]string{d.number}, more...)...) //nolint:noctx // a test
	c.WaitDelay = time.Second
	out, err := c.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		t.Fatalf("%s: %v\n%s", c, err, failed.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

func startReal(t testing.TB, number string, more ...string) *data {
	t.Helper()
	d := &data{dir: os.Getenv("LAMEDUCK_APISIX"), number: number}
	urls := d.run(t, "start", more...)
	if len(urls) != 4 {
		t.Fatalf("start prints %q, want four words: admin, control, data and etcd", urls)
	}
	d.admin, d.control, d.port, d.etcd = urls[0], urls[1], urls[2], urls[3]
	t.Cleanup(func() { d.run(t, "stop") })
	d.put(t, "global_rules/lameduck", `{"plugins": {"lameduck": {}}}`)
	planes.Until(t, "every process counts", func() bool {
		g := open(Config{Admin: d.admin, Control: d.control}, "a")
		r, err := g.control(t.Context())
		return err == nil && r.missing() == nil
	})
	return d
}

// put writes an object by the Admin API. An empty text deletes it if it is there.
func (d *data) put(t testing.TB, path, text string) {
	t.Helper()
	method := http.MethodPut
	if text == "" {
		method = http.MethodDelete
	}
	r, err := http.NewRequestWithContext(context.Background(), method, d.admin+"/apisix/admin/"+path,
		strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	absent := text == "" && answer.StatusCode == http.StatusNotFound
	if body, _ := io.ReadAll(answer.Body); answer.StatusCode/100 != 2 && !absent {
		t.Fatalf("%s %s: %s", method, path, body)
	}
}

// real is a case against a real APISIX: an upstream with two targets, of which one is removed.
type real struct {
	*lab
	d *data
	// claim is the lab's, or that of an observed APISIX. put routes to the target or removes it.
	// proved: it waits until that is read.
	claim func(health.Key) string
	put   func(want health.Want, proved bool)
	// again makes an observed one change once more if it is late.
	again func()
	// got counts the requests that a target has got. fail makes the left one fail.
	got  map[health.Key]*atomic.Int64
	fail atomic.Bool
	stop chan struct{} // ends what a target delays
}

// listen begins a case with two targets that nothing routes to yet.
func listen(t *testing.T, d *data) *real {
	pool := health.Pool("lameduck-" + strings.ToLower(t.Name()[strings.LastIndexByte(t.Name(), '/')+1:][:2]))
	c := &real{d: d, got: map[health.Key]*atomic.Int64{}, stop: make(chan struct{})}
	var keys []health.Key
	for _, uid := range []health.UID{"gone", "left"} {
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		k := health.Key{Pool: pool, Target: health.Target{UID: uid, Addr: netip.MustParseAddrPort(l.Addr().String())}}
		count := new(atomic.Int64)
		c.got[k], keys = count, append(keys, k)
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			count.Add(1)
			if uid == "left" && c.fail.Load() {
				<-c.stop
				panic(http.ErrAbortHandler)
			}
			_, _ = io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, uid)
		}), ReadHeaderTimeout: time.Minute}
		go func() { _ = s.Serve(l) }()
		t.Cleanup(func() { _ = s.Close() })
	}
	g := open(Config{Admin: d.admin, Control: d.control,
		Upstreams: []Upstream{{Upstream: string(pool), Service: "shop/web"}}}, "a")
	c.lab = &lab{T: t, g: g, gone: keys[0], left: keys[1]}
	return c
}

func newReal(t *testing.T, d *data) *real {
	c := listen(t, d)
	pool := string(c.gone.Pool)
	d.put(t, "upstreams/"+pool, fmt.Sprintf(`{"type": "roundrobin", "nodes": {%q: 1}, "retries": 2,
		"labels": {"lameduck": "agent"}}`, nowhere))
	d.put(t, "routes/"+pool, fmt.Sprintf(`{"uri": "/%s", "upstream_id": %[1]q}`, pool))
	c.claim = c.lab.claim
	c.put = func(want health.Want, proved bool) {
		if err := c.g.Apply(c.Context(), ops(want, c.gone)); proved && err != nil {
			c.Fatal(err)
		}
	}
	c.apply(health.WantRouted, c.gone, c.left)
	t.Cleanup(func() {
		d.put(t, "routes/"+pool, "")
		d.put(t, "upstreams/"+pool+"?force=true", "")
	})
	return c
}

func (c *real) dial() (net.Conn, *bufio.Reader) {
	c.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.d.port, "http://")) //nolint:noctx // a test
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { _ = conn.Close() })
	return conn, bufio.NewReader(conn)
}

// send writes a text and reads an answer to it if there is to be one.
func (c *real) send(conn net.Conn, r *bufio.Reader, text string) string {
	if _, err := io.WriteString(conn, text); err != nil || r == nil {
		return ""
	}
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	return string(body)
}

// stillSent fails with words if none of forty connections reaches the target that is gone.
func (c *real) stillSent(words string) {
	c.Helper()
	before := c.got[c.gone].Load()
	for range 40 {
		conn, r := c.dial()
		_ = c.send(conn, r, c.head()+"Connection: close\r\n\r\n")
	}
	if c.got[c.gone].Load() == before {
		c.Error(words)
	}
}

func (c *real) head() string {
	return fmt.Sprintf("GET /%s HTTP/1.1\r\nHost: shop\r\n", c.gone.Pool)
}

// remove removes the target, and says so only if that has to be proved at once.
func (c *real) remove(proved bool) {
	c.Helper()
	c.put(health.WantRemoved, proved)
}

func (c *real) want(claims ...string) {
	c.Helper()
	if is := c.claim(c.gone); !slices.Contains(claims, is) {
		c.Errorf("it is %s, want %s", is, claims)
	}
}

func (c *real) until(claim string) {
	c.Helper()
	planes.Until(c, "it is "+claim, func() bool { return c.claim(c.gone) == claim })
}

// quiet sends requests on new connections, of which none may reach the target that is out.
func (c *real) quiet() {
	c.Helper()
	before := c.got[c.gone].Load()
	for range 40 {
		conn, r := c.dial()
		_ = c.send(conn, r, c.head()+"Connection: close\r\n\r\n")
	}
	if now := c.got[c.gone].Load(); now != before {
		c.Errorf("%d of 40 requests went to it", now-before)
	}
}

// needReal skips a test without the path of a real APISIX. CI has none: it cannot be built there.
func needReal(t *testing.T) {
	t.Helper()
	if os.Getenv("LAMEDUCK_APISIX") == "" {
		t.Skip("LAMEDUCK_APISIX is not set: no real APISIX is tested (README.md)")
	}
}

// Ten ways in which a real APISIX says that a target is out, or is late. README.md says what the
// path has to offer.
func TestReal(t *testing.T) {
	needReal(t)
	d := startReal(t, "1")
	for name, run := range map[string]func(c *real){
		"01 a removal under load":                 realLoad,
		"02 a worker that does not run":           realStopped,
		"03 a data plane cut off from etcd":       realCut,
		"04 a retry with the picker of its start": realRetry,
		"05 a slow upload":                        realUpload,
		"06 half a head over a reload":            realReload,
		"07 the last target":                      realLast,
		"08 what is not covered":                  realUncovered,
		"09 eight writers":                        realWriters,
		"10 a master that has ended":              realEnded,
	} {
		t.Run(name, func(t *testing.T) { run(newReal(t, d)) })
	}
}

func realLoad(c *real) {
	ctx, cancel := context.WithCancel(c.Context())
	var clients sync.WaitGroup
	var served atomic.Int64
	defer clients.Wait()
	defer cancel()
	for range 6 {
		client := http.Client{Transport: &http.Transport{}}
		c.Cleanup(client.CloseIdleConnections)
		clients.Go(func() {
			for ctx.Err() == nil {
				answer, err := client.Get(c.d.port + "/" + string(c.gone.Pool)) //nolint:noctx // a test
				if err != nil || answer.StatusCode != http.StatusOK {
					c.Errorf("a request failed: %v, %v", answer, err)
					return
				}
				_, _ = io.Copy(io.Discard, answer.Body)
				_ = answer.Body.Close()
				served.Add(1)
			}
		})
	}
	for range 10 {
		was := c.got[c.gone].Load()
		planes.Until(c, "it is routed", func() bool { return c.got[c.gone].Load() > was })
		c.remove(true)
		c.until("idle")
		was = c.got[c.gone].Load()
		now := served.Load()
		planes.Until(c, "requests go on", func() bool { return served.Load() > now+100 })
		if late := c.got[c.gone].Load() - was; late > 0 {
			c.Errorf("%d requests went to it after it was idle", late)
		}
		c.put(health.WantRouted, true)
	}
}

func realStopped(c *real) {
	pid, err := strconv.Atoi(c.d.run(c, "pids")[0])
	if err != nil || syscall.Kill(pid, syscall.SIGSTOP) != nil {
		c.Fatal(pid, err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	planes.Until(c, "its last report is old", func() bool {
		r, err := c.g.read(c.Context())
		return err == nil && r.missing() != nil
	})
	c.remove(false)
	c.want("unread")
	_ = syscall.Kill(pid, syscall.SIGCONT)
	c.until("idle")
	c.quiet()
}

// realCut has a second APISIX, whose way to etcd is cut while the first one is written to.
func realCut(c *real) {
	gate, err := new(net.ListenConfig).Listen(c.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		c.Fatal(err)
	}
	var open sync.RWMutex // write-locked while it is cut
	pass := func(to, from net.Conn) {
		part := make([]byte, 32<<10)
		for {
			n, err := from.Read(part)
			open.RLock()
			_, failed := to.Write(part[:n])
			open.RUnlock()
			if err != nil || failed != nil {
				_, _ = to.Close(), from.Close()
				return
			}
		}
	}
	go func() {
		for {
			in, err := gate.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", c.d.etcd) //nolint:noctx // a test
			if err != nil {
				_ = in.Close()
				continue
			}
			go pass(out, in)
			go pass(in, out)
		}
	}()
	defer gate.Close()
	second := startReal(c, "2", gate.Addr().String())
	mine := *c.g
	mine.cfg.Control, mine.out = second.control, map[health.Key]out{}
	mine.read = mine.control
	c.g, c.d, c.claim = &mine, second, (&lab{T: c.T, g: &mine}).claim
	c.until("routed")
	open.Lock()
	c.remove(false)
	c.want("routed", "unread")
	c.stillSent("it is out although the data plane was cut off: the case shows nothing")
	open.Unlock()
	c.until("idle")
	c.quiet()
}

func realRetry(c *real) {
	c.fail.Store(true)
	for range 8 {
		conn, _ := c.dial()
		_ = c.send(conn, nil, c.head()+"\r\n")
	}
	planes.Until(c, "requests wait", func() bool { return c.got[c.left].Load() > 0 })
	before := c.got[c.gone].Load()
	c.remove(true)
	c.want("removed")
	close(c.stop)
	c.until("idle")
	c.Logf("%d retries went to the target after it was removed", c.got[c.gone].Load()-before)
	c.fail.Store(false)
	c.quiet()
}

// requests counts those that run in every process.
func (c *real) requests() (n int) {
	r, err := c.g.report(c.Context())
	if err != nil {
		return 0
	}
	for _, count := range r.Picks {
		n += count
	}
	return n
}

func realUpload(c *real) {
	var conns []net.Conn
	for range 8 {
		conn, _ := c.dial()
		_ = c.send(conn, nil, strings.Replace(c.head(), "GET", "POST", 1)+"Content-Length: 2\r\n\r\n1")
		conns = append(conns, conn)
	}
	planes.Until(c, "uploads wait", func() bool { return c.requests() == 8 })
	before := c.got[c.gone].Load()
	c.remove(true)
	c.want("removed")
	for _, conn := range conns {
		_ = c.send(conn, nil, "2")
	}
	c.until("idle")
	c.Logf("%d uploads went to the target after it was removed", c.got[c.gone].Load()-before)
	c.quiet()
}

func realReload(c *real) {
	type client struct {
		net.Conn
		*bufio.Reader
	}
	var clients []client
	for range 8 {
		conn, r := c.dial()
		if c.send(conn, r, c.head()+"\r\n") == "" {
			c.Fatal("no answer")
		}
		_ = c.send(conn, nil, c.head())
		clients = append(clients, client{conn, r})
	}
	old := c.d.run(c, "pids")
	c.d.run(c, "reload")
	planes.Until(c, "new workers have reported", func() bool {
		r, err := c.g.report(c.Context())
		return err == nil && r.Processes[old[0]] != nil && r.Processes[old[0]].old() && len(r.Processes) > len(old)
	})
	c.remove(false)
	c.want("routed")
	c.quiet()
	before := c.got[c.gone].Load()
	for _, k := range clients {
		_ = c.send(k.Conn, k.Reader, "\r\n")
		_ = k.Close()
	}
	c.Logf("%d requests of old workers went to the target after it was removed", c.got[c.gone].Load()-before)
	c.until("idle")
}

func realLast(c *real) {
	c.apply(health.WantRemoved, c.gone, c.left)
	conn, r := c.dial()
	if got := c.send(conn, r, c.head()+"\r\n"); got == "gone" || got == "left" {
		c.Errorf("%s answers", got)
	}
	c.apply(health.WantRouted, c.left)
	if got := c.send(conn, r, c.head()+"\r\n"); got != "left" {
		c.Errorf("%q answers", got)
	}
	c.quiet()
}

func realUncovered(c *real) {
	id, addr := string(c.gone.Pool), c.gone.Target.Addr
	for name, object := range map[string]string{
		"a route": fmt.Sprintf(`{"uri": "/other", "upstream": {"type": "roundrobin", "nodes": {%q: 1}}}`,
			addr.String()),
		"a list": fmt.Sprintf(`{"uri": "/other", "upstream": {"type": "roundrobin", "nodes": [{"host": %q, "port": %d,
			"weight": 1}]}}`, addr.Addr(), addr.Port()),
		"traffic-split": fmt.Sprintf(`{"uri": "/other", "upstream_id": %q, "plugins": {"traffic-split": {"rules": [
			{"weighted_upstreams": [{"upstream": {"type": "roundrobin", "nodes": {%q: 1}}, "weight": 1}]}]}}}`, id,
			addr.String()),
	} {
		c.d.put(c, "routes/other", object)
		c.g.listed = time.Time{}
		c.remove(false)
		if is := c.claim(c.gone); is != "unread" {
			c.Errorf("with %s it is %s", name, is)
		}
		c.d.put(c, "routes/other", "")
	}
	c.g.listed = time.Time{}
	c.until("idle")
	for _, field := range []string{`"type": "ewma"`, `"type": "roundrobin", "checks": {"active": {"http_path": "/"}}`} {
		c.d.put(c, "upstreams/"+id, fmt.Sprintf(`{%s, "nodes": {%q: 1}, "labels": {"lameduck": "agent"}}`, field,
			c.left.Target.Addr))
		c.want("unread")
	}
}

func realWriters(c *real) {
	var writers sync.WaitGroup
	for n := range 8 {
		writers.Go(func() {
			g := open(c.g.cfg, fmt.Sprint("writer-", n))
			k := health.Key{Pool: c.gone.Pool, Target: health.Target{UID: "u", Addr: netip.MustParseAddrPort(
				fmt.Sprintf("127.0.0.1:%d", 2+n))}}
			for range 5 {
				for _, want := range []health.Want{health.WantRouted, health.WantAbsent} {
					if _, err := g.write(c.Context(), k.Pool, map[health.Key]health.Want{k: want}); err != nil {
						c.Errorf("writer %d: %v", n, err)
					}
				}
			}
		})
	}
	writers.Wait()
	u, err := c.g.upstream(c.Context(), c.gone.Pool)
	if err != nil {
		c.Fatal(err)
	}
	want := []string{c.gone.Target.Addr.String(), c.left.Target.Addr.String()}
	got := slices.Sorted(maps.Keys(u.nodes))
	slices.Sort(want)
	if !slices.Equal(got, want) || len(u.labels) != 2 {
		text, _ := json.Marshal(u.nodes)
		c.Errorf("nodes %s, labels %v, want %s", text, u.labels, want)
	}
}

// realEnded stops the data plane and starts it again for the cases that follow.
func realEnded(c *real) {
	c.want("routed")
	if c.g.Stopped(c.Context()) {
		c.Error("it is stopped while it runs")
	}
	c.d.run(c, "stop")
	planes.Until(c, "it is stopped", func() bool { return c.g.Stopped(c.Context()) })
	c.d.run(c, "start")
	c.until("routed")
}

package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/test/pipenet"
)

// What a client and a coordinator do together is tested in package coordinator. Here a coordinator
// is scripted, to do what the real one does seldom or not yet. Each test runs in a bubble of fake
// time, which fails if a goroutine is left.

const hello = `{"type":"hello","hello":{"protocol":1,"holder":{"replica":"r","epoch":"e"},"session":7,"awayMillis":5000,"expiryMillis":60000,"renewalMillis":10000}}`

// script is a coordinator: each stream is served by stream or by upgraded, each post by the handler
// of its path.
type script struct {
	t        *testing.T
	listener *pipenet.Listener
	server   http.Server
	stream   func(s *fakeStream)
	// upgraded, if it is not nil, serves streams instead of stream: it gets what the agent writes,
	// which otherwise are reports.
	upgraded func(s *fakeStream, said *bufio.Reader)
	serving  sync.WaitGroup
	// declare answers declarations; nil: all are taken.
	declare func(wire.Declaration) (int, any)
	// mute has the stream bring no answer to declarations.
	mute bool

	mu       sync.Mutex
	opened   int
	declared int
	present  *fakeStream
	reports  []wire.Reports
}

// fakeStream is one stream of a script.
type fakeStream struct {
	say  func(line string)
	done <-chan struct{}
}

func newScript(t *testing.T) *script {
	s := &script{t: t, listener: pipenet.NewListener()}
	s.stream = func(s *fakeStream) {
		s.say(hello)
		s.say(`{"type":"synced"}`)
		<-s.done
	}
	s.server.Handler = s
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.server.Serve(s.listener)
	}()
	t.Cleanup(func() {
		s.server.Close()
		<-done
		s.serving.Wait()
	})
	return s
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if got := r.Header.Get("Authorization"); got != "Bearer secret" {
		s.t.Errorf("authorization %q", got)
	}
	switch r.URL.Path {
	case wire.StreamPath:
		s.mu.Lock()
		s.opened++
		s.mu.Unlock()
		if got := r.URL.Query()["protocol"]; !slices.Equal(got, []string{"1"}) {
			s.t.Errorf("protocol %q", got)
		}
		if r.Header.Get("Upgrade") != wire.Upgrade {
			s.t.Errorf("stream without a request to upgrade: %v", r.Header)
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			s.t.Error(err)
			return
		}
		s.serving.Add(1)
		defer s.serving.Done()
		defer conn.Close()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
			wire.Upgrade)
		stream := &fakeStream{say: func(line string) { fmt.Fprintln(conn, line) }, done: s.listener.Closed()}
		s.mu.Lock()
		s.present, s.declared = stream, 0
		s.mu.Unlock()
		if s.upgraded != nil {
			s.upgraded(stream, buffered.Reader)
			return
		}
		ended := make(chan struct{})
		stream.done = ended
		s.serving.Go(func() {
			defer close(ended)
			s.read(buffered.Reader)
		})
		s.stream(stream)
	case wire.DeclarationsPath:
		var d wire.Declaration
		if err := json.NewDecoder(r.Body).Decode(&d); err != nil || d.Session != 7 {
			s.t.Errorf("declaration %+v: %v", d, err)
		}
		s.mu.Lock()
		s.declared++
		n, stream := s.declared, s.present
		s.mu.Unlock()
		code, body := http.StatusOK, any(wire.Declared{Declared: n})
		if s.declare != nil {
			code, body = s.declare(d)
		}
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(body)
		if code == http.StatusOK && !s.mute {
			stream.say(fmt.Sprintf(`{"type":"synced","declared":%d}`, n))
		}
	}
}

// read keeps what the agent reports until its stream ends.
func (s *script) read(from *bufio.Reader) {
	for {
		line, err := from.ReadBytes('\n')
		if err != nil {
			return
		}
		var said wire.Reports
		if err := json.Unmarshal(line, &said); err != nil || said.Session != 7 || said.Boot != "boot" {
			s.t.Errorf("reports %+v: %v", said, err)
		}
		s.mu.Lock()
		s.reports = append(s.reports, said)
		s.mu.Unlock()
	}
}

func (s *script) streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened
}

// heard returns the reports since it was last called, one line a string.
func (s *script) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var posts []string
	for _, p := range s.reports {
		var words []string
		if p.UpTo != nil {
			words = append(words, fmt.Sprintf("all %s", p.UpTo.State))
		}
		for _, r := range p.Reports {
			words = append(words, fmt.Sprintf("%s %s", r.UID, r.State))
		}
		slices.Sort(words)
		posts = append(posts, strings.Join(words, ", "))
	}
	s.reports = nil
	return posts
}

// exclusions implements Exclusions and records its calls.
type exclusions struct {
	mu  sync.Mutex
	log []string
	// of holds the holders and the state of each exclusion.
	of         map[drain.UID]map[string]bool
	states     map[drain.UID]drain.State
	generation string
}

func (s *exclusions) write(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

func (s *exclusions) Exclude(_ time.Time, pod drain.Pod, holder string, _, _ time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write("exclude %s %s", pod.UID, holder)
	if s.of[pod.UID] == nil {
		s.of[pod.UID] = map[string]bool{}
	}
	s.of[pod.UID][holder] = true
}

func (s *exclusions) Readmit(_ time.Time, uid drain.UID, holder string, dead bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write("readmit %s %s dead=%t", uid, holder, dead)
	if delete(s.of[uid], holder); len(s.of[uid]) == 0 {
		delete(s.of, uid)
	}
}

func (s *exclusions) Renew(time.Time, string, time.Time) {}

func (s *exclusions) Held(holder string) []drain.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var uids []drain.UID
	for uid, holders := range s.of {
		if holders[holder] {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func (s *exclusions) Reports(time.Time) []drain.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	var reports []drain.Report
	for uid := range s.of {
		reports = append(reports, drain.Report{UID: uid, State: s.states[uid], Generation: s.generation})
	}
	return reports
}

func (s *exclusions) say(uid drain.UID, state drain.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.states[uid] = state
}

func (s *exclusions) did() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	s.log = nil
	return log
}

// transport leads every address to the script.
func (s *script) transport() *http.Transport {
	transport := &http.Transport{DialContext: s.listener.Dial}
	s.t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// run starts a client of the scripts, each at http://0, http://1 and so on.
func run(t *testing.T, scripts ...*script) (*Client, *exclusions, *records) {
	return runWith(t, func(*Client) {}, scripts...)
}

// runWith is run with something about the client set.
func runWith(t *testing.T, set func(*Client), scripts ...*script) (*Client, *exclusions, *records) {
	s := &exclusions{of: map[drain.UID]map[string]bool{}, states: map[drain.UID]drain.State{}}
	log := &records{}
	var n pipenet.Network
	for i, to := range scripts {
		n.Add(fmt.Sprint("replica-", i), to.listener)
	}
	transport := &http.Transport{DialContext: n.Dial}
	c := New()
	c.HTTP = &http.Client{Transport: transport}
	c.Token = func() (string, error) { return "secret", nil }
	c.Boot, c.Gateway, c.Exclusions, c.Log = "boot", "fake", s, slog.New(log)
	c.Routes = []drain.Route{{Service: drain.Service{Namespace: "shop", Name: "web"}, Via: drain.Endpoints,
		Kind: drain.Directed}}
	c.Observer = metrics.NewClient(prometheus.NewRegistry())
	c.Replicas(addresses(len(scripts)))
	set(c)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returns %v", err)
		}
		transport.CloseIdleConnections()
	})
	synctest.Wait()
	return c, s, log
}

func addresses(n int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprint("http://replica-", i))
	}
	return all
}

// records keeps the errors that are logged.
type records struct {
	slog.Handler
	mu     sync.Mutex
	errors []string
	// warnings counts the lines of that level and above.
	warnings int
}

func (r *records) Enabled(context.Context, slog.Level) bool { return true }
func (r *records) Handle(_ context.Context, record slog.Record) error {
	if record.Level >= slog.LevelWarn {
		r.mu.Lock()
		r.warnings++
		r.mu.Unlock()
	}
	record.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			r.mu.Lock()
			r.errors = append(r.errors, a.Value.String())
			r.mu.Unlock()
		}
		return true
	})
	return nil
}

func (r *records) last() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.errors) == 0 {
		return ""
	}
	return r.errors[len(r.errors)-1]
}

func learned(c *Client) bool {
	select {
	case <-c.Learned():
		return true
	default:
		return false
	}
}

// revisions counts the lines of drains.
var revisions atomic.Int64

// drainLine tells of the drains 1 of uids.
func drainLine(uids ...string) string {
	for i, uid := range uids {
		uids[i] = fmt.Sprintf(`"1 0 %s shop x"`, uid)
	}
	return fmt.Sprintf(`{"type":"drains","drains":{"revision":%d,"since":"2026-01-02T03:04:05Z","pods":[%s]}}`,
		revisions.Add(1), strings.Join(uids, ","))
}

func TestNewerCoordinatorsAreUnderstood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.stream = func(s *fakeStream) {
			s.say(strings.Replace(hello, `"holder"`, `"features":["telepathy"],"colour":"blue","holder"`, 1))
			s.say(`{"type":"weather","weather":{"rain":true}}`)
			s.say(`{"type":"drains"}`)
			s.say(`{"type":"releases"}`)
			s.say(`{"type":"releases","releases":{"uids":["a"],"gate":"barrier"}}`)
			s.say(strings.Replace(drainLine("a"), `"since"`, `"deadline":"soon","since"`, 1))
			s.say(`{"type":"synced","drains":null}`)
			s.say(`{"type":"synced"}`)
			<-s.done
		}
		c, exclusions, log := run(t, s)
		if !learned(c) || log.last() != "" {
			t.Errorf("learned %t, error %q", learned(c), log.last())
		}
		if got := exclusions.did(); !slices.Equal(got, []string{"exclude a r/e"}) {
			t.Errorf("did %q", got)
		}
	})
}

func TestWhatIsNotAStreamIsReportedAndTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		lines []string
		want  string
	}{
		"no hello": {[]string{`{"type":"synced"}`}, "first message is not a hello of protocol 1"},
		"another protocol": {[]string{strings.Replace(hello, `"protocol":1`, `"protocol":2`, 1)},
			"first message is not a hello of protocol 1"},
		"a hello without a holder": {[]string{`{"type":"hello"}`}, "first message is not a hello"},
		"no times": {[]string{strings.Replace(hello, `"expiryMillis":60000`, `"expiryMillis":0`, 1)},
			"hello names no times"},
		"no JSON": {[]string{hello, `<html>`}, `message "<html>"`},
		"no time": {[]string{hello, `{"type":"drains","drains":{"since":"noon"}}`}, "noon"},
		"no drain": {[]string{hello, `{"type":"drains","drains":{"revision":1,"pods":["3 0 a shop"]}}`},
			`pods[0]: "3 0 a shop" is not a drain`},
		"an unknown gate": {[]string{hello, `{"type":"releases","releases":{"uids":["a"],"gate":"tea"}}`}, "tea"},
		"a line too long": {[]string{hello, `{"type":"` + strings.Repeat("x", maxLine) + `"}`}, "token too long"},
		"the end":         {[]string{hello}, "EOF"},
		"nothing":         {nil, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript(t)
				s.stream = func(s *fakeStream) {
					for _, line := range c.lines {
						s.say(line)
					}
				}
				_, _, log := run(t, s)
				if got := log.last(); !strings.Contains(got, c.want) {
					t.Errorf("error %.200q, want %q", got, c.want)
				}
				time.Sleep(5 * time.Second)
				// 0.1, 0.2, 0.4, 0.8, 1.6, 2 s, each halved at most.
				if n := s.streams(); n < 4 || n > 9 {
					t.Errorf("tried %d times in 5 s", n)
				}
			})
		})
	}
}

func TestARefusalIsToldInTheCoordinatorsWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.declare = func(wire.Declaration) (int, any) {
			return http.StatusBadRequest, wire.Error{Error: `via "x" is not one of`}
		}
		c, _, log := run(t, s)
		if got := log.last(); !strings.Contains(got,
			`answers 400 Bad Request to /v1/declarations: via "x" is not one of`) {
			t.Errorf("error %q", got)
		}
		if learned(c) {
			t.Error("learned from a refusal")
		}
	})
}

// An agent whose gateway's configuration changes often declares later, and keeps its stream: a new
// one would cost the coordinator more, and void what it has reported.
func TestADeclarationThatComesTooSoonIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		var declared atomic.Int64
		s.declare = func(wire.Declaration) (int, any) {
			n := int(declared.Add(1))
			if n < 3 {
				return http.StatusTooManyRequests, wire.Error{Error: "too many"}
			}
			return http.StatusOK, wire.Declared{Declared: n}
		}
		c, _, log := run(t, s)
		for range 5 {
			c.Declare("", nil)
			synctest.Wait()
		}
		if n := declared.Load(); n != 1 {
			t.Errorf("declared %d times at once", n)
		}
		time.Sleep(2*declareLater + time.Millisecond)
		synctest.Wait()
		if n := declared.Load(); n != 3 || s.streams() != 1 || log.last() != "" {
			t.Errorf("declared %d times, on %d streams, error %q", n, s.streams(), log.last())
		}
	})
}

// A coordinator refuses more routes than an agent may declare. The stream stays, because deletions
// wait for the routes that were declared before.
func TestADeclarationThatIsTooLargeKeepsTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		var declared atomic.Int64
		s.declare = func(wire.Declaration) (int, any) {
			if n := int(declared.Add(1)); n == 1 {
				return http.StatusOK, wire.Declared{Declared: n}
			}
			return http.StatusRequestEntityTooLarge, wire.Error{Error: "routes: 1001"}
		}
		c, _, _ := run(t, s)
		for range 2 {
			c.Declare("", nil)
			synctest.Wait()
		}
		time.Sleep(3 * declareLater)
		synctest.Wait()
		if n := declared.Load(); n != 2 || s.streams() != 1 {
			t.Errorf("declared %d times, on %d streams", n, s.streams())
		}
	})
}

// Without this, an agent programs its gateway before it knows which pods are being drained.
func TestLearnedWhenTheStreamHasBroughtWhatWasDeclared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.mute = true
		c, exclusions, _ := run(t, s)
		time.Sleep(time.Second)
		if learned(c) {
			t.Error("learned by the answer alone")
		}
		s.present.say(drainLine("a", "b"))
		s.present.say(`{"type":"synced"}`)
		synctest.Wait()
		if learned(c) {
			t.Error("learned by a list that answers nothing")
		}
		s.present.say(`{"type":"synced","declared":1}`)
		synctest.Wait()
		if got := exclusions.Held("r/e"); !learned(c) || !slices.Equal(got, []drain.UID{"a", "b"}) {
			t.Errorf("learned %t, excluded %q", learned(c), got)
		}
	})
}

// The first list has nothing of what an agent has not declared yet. An agent whose streams were
// away for a moment would route the pods again that coordinators still drain.
func TestWhatIsNotDeclaredYetIsNotReadmitted(t *testing.T) {
	for name, c := range map[string]struct {
		after    time.Duration
		declared int
		want     bool
	}{
		"the first list":                     {time.Millisecond, 0, false},
		"the answer to the declaration":      {time.Millisecond, 1, true},
		"the declaration is never answered":  {declaredWithin, 0, true},
		"the declaration is answered slowly": {declaredWithin - time.Second, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := &exclusions{of: map[drain.UID]map[string]bool{"a": {"r/e": true}}}
			hello := wire.Message{Type: wire.TypeHello, Hello: &wire.Hello{Protocol: wire.Protocol,
				Holder: drain.Holder{Replica: "r", Epoch: "e"}, AwayMillis: 1, ExpiryMillis: 1, RenewalMillis: 1}}
			s, err := NewSession(hello, "boot", e, nil)
			if err != nil {
				t.Fatal(err)
			}
			now := time.Now()
			if synced, _, err := s.Message(now, wire.Message{Type: wire.TypeSynced}); !synced || err != nil {
				t.Fatal(synced, err)
			}
			if len(e.Held("r/e")) == 0 {
				t.Fatal("readmitted by the first list")
			}
			message := wire.Message{Type: wire.TypeSynced, Declared: c.declared}
			if synced, _, err := s.Message(now.Add(c.after), message); synced || err != nil {
				t.Fatal(synced, err)
			}
			if got := len(e.Held("r/e")) == 0; got != c.want {
				t.Errorf("readmitted %t, want %t", got, c.want)
			}
		})
	}
}

// Without this, an acknowledgement names what the agent was not told of, or hides that one of many
// pods is still routed.
func TestAllDrainsAreReportedInOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		c, exclusions, _ := run(t, s)
		want := func(posts ...string) {
			t.Helper()
			c.Wake()
			synctest.Wait()
			if got := s.heard(); !slices.Equal(got, posts) {
				t.Errorf("posts %q, want %q", got, posts)
			}
		}
		say := func(state drain.State, uids ...drain.UID) {
			for _, uid := range uids {
				exclusions.say(uid, state)
			}
		}
		s.present.say(drainLine("a", "b", "c", "d", "e"))
		want("all unknown")
		say(drain.Idle, "a")
		want("a idle")
		say(drain.Removed, "b", "c", "d")
		want("a idle, all removed, e unknown")
		say(drain.Idle, "b", "c", "d")
		want("all idle, e unknown")
		say(drain.Kept, "e")
		want("e kept")
		s.present.say(drainLine("f"))
		synctest.Wait()
		want("f unknown")
		s.present.say(`{"type":"releases","releases":{"uids":["a","b","c","d"]}}`)
		synctest.Wait()
		want()
		say(drain.Kept, "f")
		want("f kept")
		time.Sleep(3 * time.Second)
		s.present.say(`{"type":"heartbeat"}`)
		time.Sleep(2 * time.Second)
		want("e kept, f kept")
	})
}

// A gateway may have many processes. Coordinators end the stream of an agent with a longer name.
func TestAGenerationWithALongNameIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		c, exclusions, _ := run(t, s)
		s.present.say(drainLine("a"))
		names := map[string]bool{}
		for _, last := range []string{"1", "2"} {
			exclusions.mu.Lock()
			exclusions.generation = strings.Repeat("21260@901 ", 26) + last
			exclusions.mu.Unlock()
			c.Wake()
			synctest.Wait()
			s.mu.Lock()
			name := s.reports[len(s.reports)-1].UpTo.Generation
			s.mu.Unlock()
			if len(name) != wire.MaxName || !strings.HasPrefix(name, "21260@901 ") {
				t.Errorf("it is reported as %q, of %d bytes", name, len(name))
			}
			names[name] = true
		}
		if len(names) != 2 {
			t.Error("another generation has the same name")
		}
	})
}

func TestACompleteListReadmitsWhatIsNotInIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		end := make(chan struct{})
		first := true
		s.stream = func(s *fakeStream) {
			s.say(hello)
			if first {
				first = false
				s.say(drainLine("a"))
				s.say(drainLine("b"))
				s.say(`{"type":"synced"}`)
				<-end
				return
			}
			s.say(drainLine("b"))
			s.say(`{"type":"synced"}`)
			<-s.done
		}
		_, exclusions, _ := run(t, s)
		exclusions.Exclude(time.Now(), drain.Pod{UID: "c"}, "another/e", time.Now(), time.Now())
		exclusions.did()
		close(end)
		time.Sleep(time.Second)
		if got := exclusions.did(); !slices.Equal(got, []string{"exclude b r/e", "readmit a r/e dead=false"}) {
			t.Errorf("did %q", got)
		}
	})
}

func TestReportsSayNewsAtOnceAndEverythingInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		lines := make(chan string)
		s.stream = func(s *fakeStream) {
			s.say(hello)
			s.say(`{"type":"synced"}`)
			for {
				select {
				case line := <-lines:
					s.say(line)
				case <-s.done:
					return
				}
			}
		}
		c, exclusions, _ := run(t, s)
		exclusions.Exclude(time.Now(), drain.Pod{UID: "other"}, "another/e", time.Now(), time.Now())
		lines <- drainLine("a")
		synctest.Wait()
		want := func(posts ...string) {
			t.Helper()
			synctest.Wait()
			if got := s.heard(); !slices.Equal(got, posts) {
				t.Errorf("posts %q, want %q", got, posts)
			}
		}
		want("all unknown")
		exclusions.say("a", drain.Idle)
		c.Wake()
		want("all idle")
		c.Wake()
		want()
		// The pod that another replica excludes is drained by this one too: that is news without
		// Wake.
		lines <- drainLine("other")
		want("other unknown")
		time.Sleep(2 * time.Second)
		lines <- `{"type":"heartbeat"}`
		time.Sleep(2900 * time.Millisecond)
		want()
		time.Sleep(200 * time.Millisecond)
		want("all idle, other unknown")
		exclusions.say("other", drain.Idle)
		c.Wake()
		want("all idle")
		lines <- `{"type":"releases","releases":{"uids":["other"],"terminating":true}}`
		synctest.Wait()
		c.Wake()
		want()
	})
}

// Without this, a coordinator cannot tell what was said of an earlier drain of the same pod, and
// arrives late, from what is said of this one.
func TestReportsRepeatTheNumberOfTheDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		lines := make(chan string)
		s.stream = func(s *fakeStream) {
			s.say(hello)
			s.say(`{"type":"synced"}`)
			for {
				select {
				case line := <-lines:
					s.say(line)
				case <-s.done:
					return
				}
			}
		}
		_, exclusions, _ := run(t, s)
		exclusions.Exclude(time.Now(), drain.Pod{UID: "other"}, "another/e", time.Now(), time.Now())
		drains := func(revision, number int) {
			lines <- fmt.Sprintf(`{"type":"drains","drains":{"revision":%d,"since":"2026-01-02T03:04:05Z",`+
				`"pods":["%d 0 a shop x","1 0 b shop x","2 0 c shop x"]}}`, revision, number)
		}
		drains(1, 3)
		exclusions.say("a", drain.Idle) // all others are reported together
		last := func() map[drain.UID]uint64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			numbers := map[drain.UID]uint64{}
			for _, r := range s.reports[len(s.reports)-1].Reports {
				numbers[r.UID] = r.Number
			}
			return numbers
		}
		renewal := func() {
			for range 6 {
				time.Sleep(time.Second)
				lines <- `{"type":"heartbeat"}`
			}
		}
		renewal()
		if got := last(); got["a"] != 3 || got["other"] != 0 {
			t.Errorf("numbers %v, want 3 of a and none of another replica's", got)
		}
		lines <- `{"type":"releases","releases":{"uids":["a"]}}`
		drains(2, 9)
		renewal()
		if got := last(); got["a"] != 9 {
			t.Errorf("numbers %v, want 9 of a", got)
		}
	})
}

// Without this, a coordinator takes a reading for new that was made before a process was stopped.
func TestReportsRepeatTheTimeOfTheLastMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		lines := make(chan string)
		s.stream = func(s *fakeStream) {
			s.say(hello)
			s.say(strings.Replace(drainLine("a"), "{", `{"at":16,`, 1))
			s.say(`{"type":"synced","at":17}`)
			for {
				select {
				case line := <-lines:
					s.say(line)
				case <-s.done:
					return
				}
			}
		}
		s.mute = true
		run(t, s)
		last := func() int64 {
			synctest.Wait()
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.reports[len(s.reports)-1].At
		}
		if got := last(); got != 17 {
			t.Errorf("at %d, want 17", got)
		}
		for at := 1000; at <= 6000; at += 1000 {
			time.Sleep(time.Second)
			lines <- fmt.Sprintf(`{"type":"heartbeat","at":%d}`, at)
		}
		if got := last(); got < 4000 || got > 6000 {
			t.Errorf("at %d, want that of a heartbeat of the last two seconds", got)
		}
	})
}

func TestLearnedWhenTheLastThatHadNotAnsweredIsNoLongerKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, refuses := range []bool{false, true} {
			good, mute := newScript(t), newScript(t)
			mute.stream = func(s *fakeStream) { <-s.done }
			if refuses {
				mute.listener.Close()
			}
			c, _, _ := run(t, good, mute)
			if learned(c) {
				t.Fatal("learned although one replica has not answered")
			}
			c.Replicas(addresses(1))
			synctest.Wait()
			if !learned(c) {
				t.Errorf("not learned although each replica that is known has answered (the other refuses: %t)",
					refuses)
			}
		}
	})
}

// lingering is an Observer that takes a second to note the end of a stream.
type lingering struct{ ended int }

func (l *lingering) Connected(string)    {}
func (l *lingering) Disconnected(string) { time.Sleep(time.Second); l.ended++ } // in a bubble

func TestRunWaitsForStreamsToReplicasThatAreNoLongerKnown(t *testing.T) {
	observer := &lingering{}
	synctest.Test(t, func(t *testing.T) {
		// The first cleanup is the last: by then Run has returned.
		t.Cleanup(func() {
			if observer.ended != 1 {
				t.Error("Run returns before a stream has ended")
			}
		})
		s := newScript(t)
		c, _, _ := run(t)
		c.Observer = observer
		c.HTTP = &http.Client{Transport: s.transport()}
		c.Replicas(addresses(1))
		synctest.Wait()
		c.Replicas(nil)
		synctest.Wait()
	})
}

func TestSilenceBeforeTheHelloEndsTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.stream = func(s *fakeStream) { <-s.done }
		_, _, log := run(t, s)
		time.Sleep(helloTimeout - 1)
		if got := log.last(); got != "" {
			t.Errorf("given up early: %q", got)
		}
		time.Sleep(time.Millisecond)
		if got := log.last(); got != errSilent.Error() {
			t.Errorf("error %q", got)
		}
	})
}

func TestATokenThatCannotBeReadIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		c, _, log := run(t)
		c.Token = func() (string, error) { return "", io.ErrUnexpectedEOF }
		c.Replicas([]string{"http://replica-0", "http://bad host"})
		time.Sleep(time.Second)
		log.mu.Lock()
		defer log.mu.Unlock()
		all := strings.Join(log.errors, "\n")
		if !strings.Contains(all, "read token for coordinator: unexpected EOF") ||
			!strings.Contains(all, `coordinator address "http://bad host"`) {
			t.Errorf("errors %q", all)
		}
		if s.streams() != 0 {
			t.Error("a stream without a token")
		}
	})
}

func TestReportsGoIntoAnUpgradedStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		said := make(chan string, 10)
		revision := uint64(0)
		s.upgraded = func(s *fakeStream, from *bufio.Reader) {
			s.say(hello)
			s.say(drainLine("a") + "\n" + drainLine("b") + "\r\n" + `{"type":"synced"}`)
			revision = uint64(revisions.Load())
			for {
				line, err := from.ReadString('\n')
				if err != nil {
					return
				}
				said <- line
				time.Sleep(3 * time.Second)
				s.say(`{"type":"heartbeat"}`)
			}
		}
		_, _, log := run(t, s)
		var got wire.Reports
		if err := json.Unmarshal([]byte(<-said), &got); err != nil {
			t.Fatal(err)
		}
		if got.Session != 7 || got.Boot != "boot" || got.UpTo == nil || got.UpTo.Revision != revision {
			t.Errorf("reported %+v, want both drains in one line", got)
		}
		if log.last() != "" {
			t.Errorf("error %q", log.last())
		}
		time.Sleep(6 * time.Second)
		if len(said) == 0 {
			t.Error("not renewed")
		}
	})
}

func TestAnUpgradedStreamEndsForAReason(t *testing.T) {
	for name, c := range map[string]struct {
		serve func(*fakeStream, *bufio.Reader)
		want  string
		after time.Duration
	}{
		"refused": {func(s *fakeStream, from *bufio.Reader) {
			s.say(hello)
			s.say(`{"type":"refused","refused":{"error":"reports[0].uid is required"}}`)
			_, _ = io.Copy(io.Discard, from)
		}, "coordinator refuses: reports[0].uid is required", 0},
		"silent": {func(s *fakeStream, from *bufio.Reader) {
			s.say(hello)
			_, _ = io.Copy(io.Discard, from)
		}, errSilent.Error(), 5 * time.Second},
		"not read": {func(s *fakeStream, from *bufio.Reader) {
			s.say(hello)
			s.say(drainLine("a") + "\n" + `{"type":"synced"}`)
			for range 4 {
				select {
				case <-time.After(2 * time.Second):
					s.say(`{"type":"heartbeat"}`)
				case <-s.done:
				}
			}
		}, errUnread.Error(), PostTimeout},
		"nothing": {func(*fakeStream, *bufio.Reader) {}, "EOF", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript(t)
				s.upgraded = c.serve
				_, _, log := run(t, s)
				if got := log.last(); c.after > 0 && got != "" {
					t.Errorf("ended early: %q", got)
				}
				time.Sleep(c.after)
				synctest.Wait()
				if got := log.last(); !strings.Contains(got, c.want) {
					t.Errorf("error %q, want %q", got, c.want)
				}
			})
		})
	}
}

// Without this, agents behind a proxy that does not pass on upgrades log nothing that names it.
func TestAStreamThatIsNotUpgradedIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, hello) })
		_, exclusions, log := run(t, s)
		time.Sleep(time.Second)
		if got := log.last(); got != errNotUpgraded.Error() || len(exclusions.did()) != 0 {
			t.Errorf("error %q, want %q", got, errNotUpgraded)
		}
	})
}

// A coordinator that is away for an hour is worth one line when it goes.
func TestALostStreamIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		began := time.Now()
		s.stream = func(s *fakeStream) {
			if up := time.Since(began); up < time.Second || up >= time.Hour && up < time.Hour+3*time.Second {
				s.say(hello)
				time.Sleep(3 * time.Second)
			}
		}
		_, _, log := run(t, s)
		for _, want := range []int{1, 2} {
			time.Sleep(59 * time.Minute)
			log.mu.Lock()
			if log.warnings != want || len(log.errors) < 1000 {
				t.Errorf("%d warnings of %d errors, want %d", log.warnings, len(log.errors), want)
			}
			log.mu.Unlock()
		}
	})
}

// Whatever a coordinator writes on a stream is a message or the end of it, and no line is held
// beyond its bound.
func FuzzLines(f *testing.F) {
	f.Add([]byte(hello + "\n" + drainLine("a") + "\n\n{}\nnull\n"))
	f.Add([]byte(`{"type":"releases","releases":{"uids":["a"],"terminating":true}}`))
	f.Add([]byte("{\"type\":\"drains\",\"drains\":{\"since\":\"0000-01-01T00:00:00Z\"}}\r\n[]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		lines := lines{bufio.NewReader(bytes.NewReader(text))}
		for range bytes.Count(text, []byte("\n")) + 1 {
			m, err := lines.next()
			if err != nil {
				return
			}
			if m.Type == "" && m.Hello == nil && m.Drains == nil && m.Releases == nil {
				continue // such as {} or one of another kind
			}
			if _, err := json.Marshal(m); err != nil && !strings.Contains(err.Error(), "Time.MarshalJSON") {
				t.Errorf("%+v: %v", m, err)
			}
		}
		if _, err := lines.next(); !errors.Is(err, io.EOF) {
			t.Errorf("more messages than lines: %v", err)
		}
	})
}

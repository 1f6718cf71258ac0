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
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What a client and a coordinator do together is tested in package coordinator. Here a coordinator
// is scripted, to do what the real one does seldom or not yet. Each test runs in a bubble of fake
// time, which fails if a goroutine is left.

const hello = `{"type":"hello","hello":{"protocol":1,"holder":{"replica":"r","epoch":"e"},"session":7,"heartbeatMillis":2000,"awayMillis":5000,"expiryMillis":60000,"renewalMillis":10000}}`

// script is a coordinator: each stream is served by stream, each post by the handler of its path.
type script struct {
	t        *testing.T
	listener *listener
	server   http.Server
	stream   func(s *session)
	// upgraded, if it is not nil, serves streams instead of stream: it gets what the agent writes.
	upgraded func(s *session, said *bufio.Reader)
	serving  sync.WaitGroup
	declare  func(wire.Declaration) (int, any)

	mu      sync.Mutex
	opened  int
	reports []wire.Reports
}

// session is one stream of a script.
type session struct {
	say  func(line string)
	done <-chan struct{}
}

type listener struct {
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }

func newScript(t *testing.T) *script {
	s := &script{t: t, listener: &listener{accept: make(chan net.Conn), closed: make(chan struct{})}}
	s.stream = func(s *session) {
		s.say(hello)
		s.say(`{"type":"synced"}`)
		<-s.done
	}
	s.declare = func(wire.Declaration) (int, any) { return http.StatusOK, wire.Declared{Drains: []drain.Open{}} }
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
		if s.upgraded != nil && r.Header.Get("Upgrade") == wire.Upgrade {
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
			s.upgraded(&session{say: func(line string) { fmt.Fprintln(conn, line) }, done: s.listener.closed},
				buffered.Reader)
			return
		}
		s.stream(&session{
			say: func(line string) {
				fmt.Fprintln(w, line)
				_ = http.NewResponseController(w).Flush()
			},
			done: r.Context().Done(),
		})
	case wire.DeclarationsPath:
		var d wire.Declaration
		if err := json.NewDecoder(r.Body).Decode(&d); err != nil || d.Session != 7 {
			s.t.Errorf("declaration %+v: %v", d, err)
		}
		code, body := s.declare(d)
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(body)
	case wire.ReportsPath:
		var said wire.Reports
		if err := json.NewDecoder(r.Body).Decode(&said); err != nil || said.Session != 7 || said.Boot != "boot" {
			s.t.Errorf("reports %+v: %v", said, err)
		}
		s.mu.Lock()
		s.reports = append(s.reports, said)
		s.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	}
}

func (s *script) streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened
}

// heard returns the reports since it was last called, one post a string.
func (s *script) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var posts []string
	for _, p := range s.reports {
		var words []string
		for _, r := range p.Reports {
			words = append(words, fmt.Sprintf("%s %s", r.UID, r.State))
		}
		slices.Sort(words)
		posts = append(posts, strings.Join(words, ", "))
	}
	s.reports = nil
	return posts
}

// stones is a Exclusions.
type stones struct {
	mu  sync.Mutex
	log []string
	// of holds the holders and the state of each exclusion.
	of     map[drain.UID]map[string]bool
	states map[drain.UID]drain.State
}

func (s *stones) write(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

func (s *stones) Exclude(pod drain.Pod, holder string, _, _ time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write("exclude %s %s", pod.UID, holder)
	if s.of[pod.UID] == nil {
		s.of[pod.UID] = map[string]bool{}
	}
	s.of[pod.UID][holder] = true
}

func (s *stones) Readmit(uid drain.UID, holder string, dead bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write("readmit %s %s dead=%t", uid, holder, dead)
	if delete(s.of[uid], holder); len(s.of[uid]) == 0 {
		delete(s.of, uid)
	}
}

func (s *stones) Renew(string, time.Time) {}

func (s *stones) Held(holder string) []drain.UID {
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

func (s *stones) Reports() []drain.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	var reports []drain.Report
	for uid := range s.of {
		reports = append(reports, drain.Report{UID: uid, State: s.states[uid]})
	}
	return reports
}

func (s *stones) say(uid drain.UID, state drain.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.states[uid] = state
}

func (s *stones) did() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	s.log = nil
	return log
}

// transport leads every address to the script.
func (s *script) transport() *http.Transport {
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		s.listener.accept <- far
		return near, nil
	}}
	s.t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// run starts a client of the scripts, each at http://0, http://1 and so on.
func run(t *testing.T, scripts ...*script) (*Client, *stones, *records) {
	return runWith(t, func(*Client) {}, scripts...)
}

// runWith is run with something about the client set.
func runWith(t *testing.T, set func(*Client), scripts ...*script) (*Client, *stones, *records) {
	s := &stones{of: map[drain.UID]map[string]bool{}, states: map[drain.UID]drain.State{}}
	log := &records{}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		host, _, _ := net.SplitHostPort(address)
		for i, to := range scripts {
			if host != fmt.Sprint("replica-", i) {
				continue
			}
			near, far := net.Pipe()
			select {
			case to.listener.accept <- far:
				return near, nil
			case <-to.listener.closed:
			case <-ctx.Done():
			}
		}
		return nil, errors.New("connection refused")
	}}
	c := New()
	c.HTTP = &http.Client{Transport: transport}
	c.Token = func() (string, error) { return "secret", nil }
	c.Boot, c.Gateway, c.Exclusions, c.Log = "boot", "fake", s, slog.New(log)
	c.Routes = []drain.Route{{Service: drain.Service{Namespace: "shop", Name: "web"}, Via: drain.Endpoints,
		Kind: drain.Directed, Granularity: drain.PerRequest}}
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

func drainLine(uid string) string {
	return fmt.Sprintf(`{"type":"drain","drain":{"pod":{"namespace":"shop","name":"x","uid":%q},"since":"2026-01-02T03:04:05Z"}}`, uid)
}

func TestNewerCoordinatorsAreUnderstood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.stream = func(s *session) {
			s.say(strings.Replace(hello, `"features"`, `"features":["telepathy"],"colour":"blue","features"`, 1))
			s.say(`{"type":"weather","weather":{"rain":true}}`)
			s.say(`{"type":"drain"}`)
			s.say(`{"type":"release"}`)
			s.say(strings.Replace(drainLine("a"), `"since"`, `"deadline":"soon","since"`, 1))
			s.say(`{"type":"synced","drain":null}`)
			s.say(`{"type":"synced"}`)
			<-s.done
		}
		c, stones, log := run(t, s)
		if !learned(c) || log.last() != "" {
			t.Errorf("learned %t, error %q", learned(c), log.last())
		}
		if got := stones.did(); !slices.Equal(got, []string{"exclude a r/e"}) {
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
		"a hello of nobody": {[]string{`{"type":"hello"}`}, "first message is not a hello"},
		"no times": {[]string{strings.Replace(hello, `"expiryMillis":60000`, `"expiryMillis":0`, 1)},
			"hello names no times"},
		"no JSON":          {[]string{hello, `<html>`}, `message "<html>"`},
		"an unknown state": {[]string{hello, `{"type":"drain","drain":{"since":"noon"}}`}, "noon"},
		"a line too long":  {[]string{hello, `{"type":"` + strings.Repeat("x", maxLine) + `"}`}, "token too long"},
		"the end":          {[]string{hello}, "EOF"},
		"nothing":          {nil, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript(t)
				s.stream = func(s *session) {
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

// Without this, a pod that is given back while a declaration is under way stays out of the gateway
// for as long as the stream lasts.
func TestAnAnswerToADeclarationDoesNotBuryWhatWasReleasedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		release, released := make(chan struct{}), make(chan struct{})
		s.stream = func(s *session) {
			s.say(hello)
			s.say(drainLine("a"))
			s.say(drainLine("b"))
			s.say(`{"type":"synced"}`)
			<-release
			s.say(`{"type":"release","release":{"uid":"a"}}`)
			close(released)
			<-s.done
		}
		times := 0
		s.declare = func(d wire.Declaration) (int, any) {
			open := []drain.Open{{Pod: drain.Pod{UID: "b"}, Since: time.Now()}}
			if times++; times == 1 {
				open = append(open, drain.Open{Pod: drain.Pod{UID: "a"}, Since: time.Now()})
				close(release)
				<-released
				time.Sleep(time.Millisecond)
			}
			return http.StatusOK, wire.Declared{Drains: open}
		}
		c, stones, _ := run(t, s)
		time.Sleep(time.Second)
		if got := stones.Held("r/e"); !slices.Equal(got, []drain.UID{"b"}) {
			t.Errorf("excluded: %q, want b alone", got)
		}
		if times != 2 || !learned(c) {
			t.Errorf("declared %d times, learned %t", times, learned(c))
		}
	})
}

// sights is a Watches of one holder.
type sights struct {
	mu sync.Mutex
	of map[drain.UID]bool
}

func (s *sights) Watch(w drain.Watch, _ string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of[w.Pod.UID] = true
}

func (s *sights) Unwatch(uid drain.UID, _ string, _ bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, uid)
}

func (s *sights) Watched(string) []drain.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.of))
}

func (s *sights) Reports() []drain.Report { return nil }

// Without this, a pod that has gone while a declaration is under way is observed for twenty minutes
// more.
func TestAnAnswerToADeclarationDoesNotObserveWhatWasReleasedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		release, released := make(chan struct{}), make(chan struct{})
		s.stream = func(s *session) {
			s.say(hello)
			s.say(`{"type":"synced"}`)
			<-release
			s.say(`{"type":"release","release":{"uid":"a","terminating":true,"gate":"barrier"}}`)
			close(released)
			<-s.done
		}
		times := 0
		s.declare = func(wire.Declaration) (int, any) {
			watches := []drain.Watch{{Pod: drain.Pod{UID: "b"}, Number: 2}}
			if times++; times == 1 {
				watches = append(watches, drain.Watch{Pod: drain.Pod{UID: "a"}, Number: 1})
				close(release)
				<-released
				time.Sleep(time.Millisecond)
			}
			return http.StatusOK, wire.Declared{Drains: []drain.Open{}, Watches: watches}
		}
		seen := &sights{of: map[drain.UID]bool{}}
		c, _, _ := runWith(t, func(c *Client) { c.Watches = seen }, s)
		time.Sleep(time.Second)
		if got := seen.Watched(""); !slices.Equal(got, []drain.UID{"b"}) {
			t.Errorf("observed: %q, want b alone", got)
		}
		if times != 2 || !learned(c) {
			t.Errorf("declared %d times, learned %t", times, learned(c))
		}
	})
}

func TestACompleteListLiftsWhatIsNotInIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		end := make(chan struct{})
		first := true
		s.stream = func(s *session) {
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
		_, stones, _ := run(t, s)
		stones.Exclude(drain.Pod{UID: "c"}, "another/e", time.Now(), time.Now())
		stones.did()
		close(end)
		time.Sleep(time.Second)
		if got := stones.did(); !slices.Equal(got, []string{"exclude b r/e", "readmit a r/e dead=false"}) {
			t.Errorf("did %q", got)
		}
	})
}

func TestReportsSayNewsAtOnceAndEverythingInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		lines := make(chan string)
		s.stream = func(s *session) {
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
		c, stones, _ := run(t, s)
		stones.Exclude(drain.Pod{UID: "other"}, "another/e", time.Now(), time.Now())
		lines <- drainLine("a")
		synctest.Wait()
		want := func(posts ...string) {
			t.Helper()
			synctest.Wait()
			if got := s.heard(); !slices.Equal(got, posts) {
				t.Errorf("posts %q, want %q", got, posts)
			}
		}
		want("a unknown")
		stones.say("a", drain.Idle)
		c.Wake()
		want("a idle")
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
		want("a idle, other unknown")
		lines <- `{"type":"release","release":{"uid":"other","terminating":true}}`
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
		s.stream = func(s *session) {
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
		s.declare = func(wire.Declaration) (int, any) {
			return http.StatusOK, wire.Declared{Drains: []drain.Open{{Pod: drain.Pod{UID: "a"}, Since: time.Now(),
				Number: 3}}}
		}
		_, stones, _ := run(t, s)
		stones.Exclude(drain.Pod{UID: "other"}, "another/e", time.Now(), time.Now())
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
		lines <- `{"type":"release","release":{"uid":"a"}}`
		lines <- `{"type":"drain","drain":{"pod":{"uid":"a"},"since":"2026-01-02T03:04:05Z","number":9}}`
		renewal()
		if got := last(); got["a"] != 9 {
			t.Errorf("numbers %v, want 9 of a", got)
		}
	})
}

// Without this, a coordinator takes for new what was read before somebody stood still.
func TestReportsRepeatTheTimeOfTheLastMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		lines := make(chan string)
		s.stream = func(s *session) {
			s.say(hello)
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
		s.declare = func(wire.Declaration) (int, any) {
			return http.StatusOK, wire.Declared{Drains: []drain.Open{{Pod: drain.Pod{UID: "a"}, Since: time.Now()}}}
		}
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
			mute.stream = func(s *session) { <-s.done }
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

// The answer to a declaration is newer than the list that the stream begins with, and must not be
// readmitted by it.
func TestADeclarationWaitsForTheCompleteList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		s.stream = func(s *session) {
			s.say(hello)
			time.Sleep(time.Second)
			s.say(`{"type":"synced"}`)
			<-s.done
		}
		s.declare = func(wire.Declaration) (int, any) {
			return http.StatusOK, wire.Declared{Drains: []drain.Open{{Pod: drain.Pod{UID: "b"}, Since: time.Now()}}}
		}
		_, stones, _ := run(t, s)
		time.Sleep(2 * time.Second)
		if got := stones.Held("r/e"); !slices.Equal(got, []drain.UID{"b"}) {
			t.Errorf("excluded: %q, want b", got)
		}
	})
}

// lingering is an Observer that takes a second to note the end of a stream.
type lingering struct{ ended int }

func (l *lingering) Connected(string)     {}
func (l *lingering) Disconnected(string)  { time.Sleep(time.Second); l.ended++ } // in a bubble
func (l *lingering) Posted(string, error) {}

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
		s.stream = func(s *session) { <-s.done }
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
		s.upgraded = func(s *session, from *bufio.Reader) {
			s.say(hello)
			s.say(drainLine("a") + "\n" + drainLine("b") + "\r\n" + `{"type":"synced"}`)
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
		if got.Session != 7 || got.Boot != "boot" || len(got.Reports) != 2 {
			t.Errorf("reported %+v, want both drains in one line", got)
		}
		if posts := s.heard(); len(posts) != 0 {
			t.Errorf("posted too: %q", posts)
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
		serve func(*session, *bufio.Reader)
		want  string
		after time.Duration
	}{
		"refused": {func(s *session, from *bufio.Reader) {
			s.say(hello)
			s.say(`{"type":"refused","refused":{"error":"reports[0].uid is required"}}`)
			_, _ = io.Copy(io.Discard, from)
		}, "coordinator refuses: reports[0].uid is required", 0},
		"silent": {func(s *session, from *bufio.Reader) {
			s.say(hello)
			_, _ = io.Copy(io.Discard, from)
		}, errSilent.Error(), 5 * time.Second},
		"not read": {func(s *session, from *bufio.Reader) {
			s.say(hello)
			s.say(drainLine("a") + "\n" + `{"type":"synced"}`)
			for range 4 {
				select {
				case <-time.After(2 * time.Second):
					s.say(`{"type":"heartbeat"}`)
				case <-s.done:
				}
			}
		}, errUnread.Error(), postTimeout},
		"nothing": {func(*session, *bufio.Reader) {}, "EOF", 0},
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

// A coordinator that is away for an hour is worth one line when it goes.
func TestALostStreamIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		began := time.Now()
		s.stream = func(s *session) {
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
	f.Add([]byte(`{"type":"release","release":{"uid":"a","terminating":true}}`))
	f.Add([]byte("{\"type\":\"drain\",\"drain\":{\"since\":\"0000-01-01T00:00:00Z\"}}\r\n[]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		lines := newLines(bytes.NewReader(text))
		for range bytes.Count(text, []byte("\n")) + 1 {
			m, err := lines.next()
			if err != nil {
				return
			}
			if m.Type == "" && m.Hello == nil && m.Drain == nil && m.Release == nil {
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

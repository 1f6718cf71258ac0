package coordinator

import (
	"bufio"
	"bytes"

	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// upgraded opens an upgraded stream by hand as agent id, reads it up to synced and returns the
// session.
func (n *network) upgraded(id, host string) (*raw, uint64) {
	n.t.Helper()
	conn, err := n.Dial(n.t.Context(), "tcp", host+":9444")
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	if _, err := fmt.Fprintf(conn, "GET %s?protocol=1 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "+
		"%s\r\nAuthorization: Bearer agent %s\r\n\r\n",
		wire.StreamPath, wire.Upgrade, id); err != nil {
		n.t.Fatal(err)
	}
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	if response.StatusCode != http.StatusSwitchingProtocols ||
		!strings.EqualFold(response.Header.Get("Upgrade"), wire.Upgrade) {
		n.t.Fatalf("%s %v", response.Status, response.Header)
	}
	r := &raw{conn: conn, lines: bufio.NewScanner(reader)}
	hello, _ := r.next(n.t)
	for m := hello; m.Type != wire.TypeSynced; {
		m, _ = r.next(n.t)
	}
	return r, hello.Hello.Session
}

// refusal reads what is said until the stream ends, and returns why it did.
func (r *raw) refusal(t *testing.T) string {
	t.Helper()
	why := ""
	for {
		m, ok := r.next(t)
		if !ok {
			return why
		}
		if m.Refused != nil {
			why = m.Refused.Error
		}
	}
}

func TestAnAgentReportsInItsStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		one := n.agent("one", []drain.Service{web}, "replica-0")
		held := r.hold(pod("a"), web)
		one.say(pod("a"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 0s")
		if conns := n.Conns("replica-0"); conns != 2 {
			t.Errorf("%d connections, want the stream and that of the declaration", conns)
		}
		if got := r.metric("lameduck_agent_requests_total", "204", wire.ReportsPath); got == 0 {
			t.Error("reports are not counted")
		}
	})
}

// A line that is longer than any buffer, written in pieces, is one line.
func TestALineOfManyReportsIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		s, session := n.upgraded("one", "replica-0")
		go io.Copy(io.Discard, s.conn)
		for _, want := range []string{"true", "false"} {
			said := wire.Reports{Session: session, Boot: "b"}
			for i := range 1000 {
				said.Reports = append(said.Reports, drain.Report{UID: drain.UID(fmt.Sprint("other-", i))})
			}
			said.Reports = append(said.Reports,
				drain.Report{UID: pod("a").UID, State: drain.Idle, Number: 1})
			held := r.hold(pod("a"), web)
			text, _ := json.Marshal(said)
			for piece := range slices.Chunk(append(text, '\n'), 1000) {
				if _, err := s.conn.Write(piece); err != nil {
					t.Fatal(err)
				}
			}
			answered(t, held, "Released Acknowledged held="+want+" after 0s")
			time.Sleep(2 * bodyTimeout) // and no deadline is left behind
		}
	})
}

func TestWhatIsRefusedInTheStreamEndsIt(t *testing.T) {
	for name, c := range map[string]struct {
		line, want string
		after      time.Duration
	}{
		"no JSON": {"nonsense\n", "reports: invalid character 'o' in literal null (expecting 'u')", 0},
		"unknown state": {`{"session":SESSION,"boot":"b","reports":[{"uid":"u","state":"gone"}]}` + "\n",
			`reports: state "gone" is not one of ["unknown" "routing" "kept" "removed" "idle"]`, 0},
		"no UID": {`{"session":SESSION,"boot":"b","reports":[{"state":"idle"}]}` + "\n",
			"reports[0].uid is required", 0},
		"all kept": {`{"session":SESSION,"boot":"b","upTo":{"revision":1,"state":"kept"}}` + "\n",
			`upTo.state "kept": name each pod that is kept`, 0},
		"a long generation": {`{"session":SESSION,"boot":"b","upTo":{"generation":"` +
			strings.Repeat("g", wire.MaxName+1) + `"}}` + "\n", "upTo.generation is longer than 253 bytes", 0},
		"another session": {`{"session":999,"boot":"b","reports":[]}` + "\n", errStale.Text, 0},
		"two in one line": {`{"session":SESSION,"boot":"b","reports":[]}{}` + "\n",
			"reports: invalid character '{' after top-level value", 0},
		"a long boot": {`{"session":SESSION,"boot":"` + strings.Repeat("b",
			wire.MaxName+1) + `","reports":[]}` + "\n", "boot: longer than 253 bytes", 0},
		"a line too long":  {strings.Repeat(" ", wire.MaxBody+8192), "a line is larger than 4194304 bytes", 0},
		"a line too slow":  {strings.Repeat(" ", 8192), "a line was not sent within 5s", bodyTimeout},
		"half a line":      {`{"session":1`, "a line was not sent within 5s", bodyTimeout},
		"the agent's end":  {"", "", 0},
		"an end in a line": {`{"session":1`, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				r := n.replica("replica-0", "a")
				r.Unroute(requestOf(pod("a"), web))
				s, session := n.upgraded("one", "replica-0")
				before := r.core.Ledger.Status(time.Now(), drain.AtHold, pod("a").UID)
				began := time.Now()
				go func() {
					_, _ = io.WriteString(s.conn, strings.ReplaceAll(c.line, "SESSION", fmt.Sprint(session)))
					if c.want == "" {
						s.conn.Close()
					}
				}()
				if c.want != "" {
					if got := s.refusal(t); got != c.want {
						t.Errorf("refused with %q, want %q", got, c.want)
					}
				}
				synctest.Wait()
				if took := time.Since(began); took != c.after {
					t.Errorf("after %s, want %s", took, c.after)
				}
				if got := r.metric("lameduck_agents", "connected"); got != 0 {
					t.Errorf("%v streams are open", got)
				}
				before.Waiting[0].Connected = false
				before.Recheck = time.Now().Add(5 * time.Second)
				if diff := cmp.Diff(before, r.core.Ledger.Status(time.Now(), drain.AtHold, pod("a").UID)); diff != "" {
					t.Errorf("something was taken (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// Streams are no longer the server's connections: they have to end with the coordinator.
func TestUpgradedStreamsEndWithTheCoordinator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		s, _ := n.upgraded("one", "replica-0")
		r.Stop()
		if _, ok := s.next(t); ok {
			t.Error("the stream goes on")
		}
	})
}

// An agent that reports and does not read is cut too.
func TestAnUpgradedStreamThatIsNotReadIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		s, session := n.upgraded("one", "replica-0")
		began := time.Now()
		for {
			if _, err := fmt.Fprintf(s.conn, `{"session":%d,"boot":"b","reports":[]}`+"\n", session); err != nil {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(began); took > 2*time.Second+writeTimeout+time.Second {
			t.Errorf("cut after %s", took)
		}
		synctest.Wait()
		if got := r.metric("lameduck_agents", "connected"); got != 0 {
			t.Errorf("%v streams are open", got)
		}
	})
}

// Whatever an agent writes into its stream is taken, or refused as its own fault, and ends.
func FuzzListen(f *testing.F) {
	f.Add([]byte(`{"session":1,"boot":"b","reports":[{"uid":"uid-a","state":"idle","number":1}]}`+"\n"), 1)
	f.Add([]byte("{}\n\nnull\n"), 2)
	f.Add([]byte(strings.Repeat(" ", 9000)+`{"session":1}`+"\n"), 4096)
	f.Fuzz(func(t *testing.T, text []byte, room int) {
		b := newBench()
		b.Unroute(requestOf(pod("a"), web))
		before := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a")
		near, far := net.Pipe()
		defer near.Close()
		defer far.Close()
		from := bufio.NewReaderSize(bytes.NewReader(text), min(max(room, 16), 1<<16))
		err := b.listen(t.Context(), from, far, Identity{Agent: "one", Everywhere: true})
		refused := serve.Refusal{}
		if !errors.Is(err, io.EOF) && (!errors.As(err, &refused) || refused.Code < 400 || refused.Code >= 500) {
			t.Errorf("ends with %v", err)
		}
		if after := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a"); after.Since.After(before.Since) ||
			after.Deadline.After(before.Deadline) {
			t.Errorf("the clock was put back from %s to %s", before.Since, after.Since)
		}
	})
}

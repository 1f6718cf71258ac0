package coordinator

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What liars, strangers and broken agents send is refused by name and counted, and a deletion
// beside many of them takes as long as its own gateway does. What an agent may say and what is not
// so, counts for nothing: see also TestLinesOfReports and TestWhatIsRefusedInTheStreamEndsIt.
func TestLiarsDelayNobody(t *testing.T) {
	const callers = 8
	post := func(path, token, body string) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "+
			"%s\r\nContent-Length: %d\r\n\r\n%s", path, token, len(body), body)
	}
	services := `{"session":1,"routes":[` + strings.Repeat(
		`{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed"},`,
		1_000_000)
	for name, c := range map[string]struct {
		// says is what is sent, with the session of agent one and of agent liar in the place of ONE
		// and LIAR.
		says string
		code int
		why  string
		path string
	}{
		"a stranger leaves": {post(wire.LeavePath, "stranger", `{"session":ONE}`), 403,
			"not allowed to acknowledge drains", wire.LeavePath},
		"a token that is no longer valid": {post(wire.LeavePath, "of a deleted pod", `{"session":ONE}`), 401,
			"the token is not valid here", wire.LeavePath},
		"leave in another's name": {post(wire.LeavePath, "agent liar", `{"session":ONE}`), 409,
			"not this agent's present one", wire.LeavePath},
		"declare in another's name": {post(wire.DeclarationsPath, "agent liar", `{"session":ONE,"routes":[]}`), 409,
			"not this agent's present one", wire.DeclarationsPath},
		"a million Services": {post(wire.DeclarationsPath, "agent liar", services+"{}]}"), 413,
			"body is larger than 4194304 bytes", wire.DeclarationsPath},
		"a slow body": {"POST " + wire.LeavePath + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent " +
			"liar\r\nContent-Length: 1000\r\n\r\n{", 408, "body was not sent within 5s",
			wire.LeavePath},
		"an unknown version": {"GET " + wire.StreamPath + "?protocol=7 HTTP/1.1\r\nHost: x\r\nConnection: " +
			"close\r\nAuthorization: Bearer agent liar\r\n\r\n", 400, `the agent speaks \"7\"`,
			wire.StreamPath},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				r := n.replica("replica-0", "a")
				n.agent("someone", []drain.Service{store}, "replica-0") // has session 1
				one := n.agent("one", []drain.Service{web}, "replica-0")
				n.agent("liar", []drain.Service{store}, "replica-0")
				says := c.says
				r.mu.Lock()
				for word, id := range map[string]drain.AgentID{"ONE": "one", "LIAR": "liar"} {
					session := uint64(0)
					for s := range uint64(1000) {
						if r.core.Ledger.Current(id, s) {
							session = s
						}
					}
					says = strings.ReplaceAll(says, word, fmt.Sprint(session))
				}
				r.mu.Unlock()
				// The body has another length now.
				if head, body, _ := strings.Cut(says, "\r\n\r\n"); c.code != 408 && body != "" {
					_, was, _ := strings.Cut(c.says, "\r\n\r\n")
					says = strings.Replace(head, fmt.Sprint("Content-Length: ", len(was)),
						fmt.Sprint("Content-Length: ", len(body)), 1) + "\r\n\r\n" + body
				}
				held := r.hold(pod("a"), web)
				answers := make(chan string, callers)
				for i := range callers {
					go func() {
						says := says
						if !strings.Contains(c.says, "LIAR") { // what one agent may post is limited
							says = strings.Replace(says, "agent liar", fmt.Sprint("agent liar-", i), 1)
						}
						conn, err := n.Dial(t.Context(), "tcp", "replica-0:9444")
						if err != nil {
							answers <- err.Error()
							return
						}
						defer conn.Close()
						go func() { _, _ = io.WriteString(conn, says) }() // what is too long is not read
						text, _ := io.ReadAll(conn)
						answers <- string(text)
					}()
				}
				time.Sleep(700 * time.Millisecond)
				stillHeld(t, held)
				one.say(pod("a"), drain.Idle)
				answered(t, held, "Released Acknowledged held=true after 700ms")
				for range callers {
					if got := <-answers; !strings.HasPrefix(got,
						fmt.Sprintf("HTTP/1.1 %d %s\r\n", c.code, http.StatusText(c.code))) ||
						!strings.Contains(got, c.why) {
						t.Fatalf("answer %.600q, want %d and %q", got, c.code, c.why)
					}
				}
				if got := r.metric("lameduck_agent_requests_total", fmt.Sprint(c.code), c.path); got < callers {
					t.Errorf("%v are counted, want %d", got, callers)
				}
			})
		})
	}
}

package coordinator

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// bench is a coordinator without network, and agent one connected to it.
type bench struct {
	*Coordinator
	session uint64
}

// able is a replica that can decide on deletions.
func able() error { return nil }

func newBench() *bench {
	b := &bench{Coordinator: New(drain.Holder{Replica: "replica-0", Epoch: "a"}, drain.DefaultTimes(), Options{
		MaxHolds: 32, Pods: &lives{}, Authenticate: tokens{}, Log: quiet(),
		Metrics: NewMetrics(prometheus.NewRegistry()), Able: able,
	})}
	s, _ := b.core.Connect(time.Now(), Identity{Agent: "one", Everywhere: true}, wire.Offer{}, func() {})
	b.session = s.Number
	return b
}

// ask sends a request and returns the status and the body.
func (b *bench) ask(method, path, authorization string, body io.Reader) (int, string) {
	request := httptest.NewRequest(method, path, body)
	if authorization != "" {
		request.Header.Set("Authorization", authorization)
	}
	request.Header.Set("Upgrade", wire.Upgrade)
	recorder := httptest.NewRecorder()
	b.Handler().ServeHTTP(recorder, request)
	return recorder.Code, strings.TrimSpace(recorder.Body.String())
}

// Every row of the table says who may call it, and means it.
func TestEveryRouteHasAccess(t *testing.T) {
	for _, row := range routes {
		t.Run(row.method+" "+row.path, func(t *testing.T) {
			other := map[access]string{agents: "Bearer replica", replicas: "Bearer agent one"}[row.access]
			if other == "" {
				t.Fatalf("access %q is not known to serve", row.access)
			}
			b := newBench()
			for authorization, want := range map[string]int{
				other:                    http.StatusForbidden,
				"":                       http.StatusUnauthorized,
				"Basic b25lOnNlY3JldA==": http.StatusUnauthorized,
				"Bearer ":                http.StatusUnauthorized,
				"Bearer nonsense":        http.StatusUnauthorized,
				"Bearer stranger":        http.StatusForbidden,
				"Bearer no answer":       http.StatusServiceUnavailable,
			} {
				code, body := b.ask(row.method, row.path, authorization, strings.NewReader("{}"))
				var said wire.Error
				if code != want || json.Unmarshal([]byte(body), &said) != nil || said.Error == "" {
					t.Errorf("authorization %q: %d %s, want %d and why", authorization, code, body, want)
				}
			}
		})
	}
}

// Without this, connections of strangers stay for two minutes each, ready for the next made-up
// token.
func TestOnlyAgentsKeepTheirConnection(t *testing.T) {
	for authorization, want := range map[string]string{"": "close", "Bearer nonsense": "close",
		"Bearer stranger": "close", "Bearer no answer": "close", "Bearer agent one": ""} {
		for _, path := range []string{wire.LeavePath, "/v1/nothing"} {
			request := httptest.NewRequest(http.MethodPost, path, strings.NewReader("{}"))
			request.Header.Set("Authorization", authorization)
			w := httptest.NewRecorder()
			newBench().Handler().ServeHTTP(w, request)
			if got := w.Header().Get("Connection"); got != want && path == wire.LeavePath || got != "close" &&
				path != wire.LeavePath {
				t.Errorf("%q to %s: Connection %q", authorization, path, got)
			}
		}
	}
}

func TestWhatIsNotInTheTableIsRefused(t *testing.T) {
	b := newBench()
	if code, body := b.ask(http.MethodGet, "/v1/nothing", "Bearer agent one", nil); code != http.StatusNotFound ||
		!strings.Contains(body, `/v1/nothing`) {
		t.Errorf("%d %s", code, body)
	}
	if code, body := b.ask(http.MethodDelete, wire.LeavePath, "Bearer agent one",
		nil); code != http.StatusMethodNotAllowed ||
		!strings.Contains(body, "method DELETE is not allowed for /v1/leave") {
		t.Errorf("%d %s", code, body)
	}
}

func TestStreamsAreUpgraded(t *testing.T) {
	b := newBench()
	request := httptest.NewRequest(http.MethodGet, wire.StreamPath+"?protocol=1", nil)
	request.Header.Set("Authorization", "Bearer agent two")
	w := httptest.NewRecorder()
	if b.Handler().ServeHTTP(w, request); w.Code != http.StatusUpgradeRequired ||
		!strings.Contains(w.Body.String(), "request to upgrade to lameduck-stream") ||
		b.core.Ledger.Current("two", b.session+1) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestStreamsOfOtherProtocolsAreRefused(t *testing.T) {
	b := newBench()
	for _, query := range []string{"", "?protocol=2", "?protocol=one"} {
		if code, body := b.ask(http.MethodGet, wire.StreamPath+query, "Bearer agent two",
			nil); code != http.StatusBadRequest || !strings.Contains(body, "this coordinator speaks 1") {
			t.Errorf("%q: %d %s", query, code, body)
		}
	}
	if !b.core.Ledger.Current("one", b.session) || b.core.Ledger.Current("two", b.session+1) {
		t.Error("a refused stream has opened or ended a session")
	}
	b.Stop()
	if code, body := b.ask(http.MethodGet, wire.StreamPath+"?protocol=1", "Bearer agent two",
		nil); code != http.StatusServiceUnavailable || !strings.Contains(body, "shutting down") {
		t.Errorf("while stopping: %d %s", code, body)
	}
}

func TestPosts(t *testing.T) {
	const route = `{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed"}`
	with := func(old, new string) string {
		return `{"session":SESSION,"gateway":"g","routes":[` + strings.Replace(route, old, new, 1) + `]}`
	}
	large := strings.Repeat(" ", wire.MaxBody)
	for name, c := range map[string]struct {
		path, body string
		code       int
		want       string
	}{
		"declaration": {wire.DeclarationsPath, with("", ""), 200,
			`{"declared":1}`},
		"declaration of nothing": {wire.DeclarationsPath, `{"session":SESSION}`, 200, `{"declared":1}`},
		"declaration with unknown fields": {wire.DeclarationsPath, with(`"via"`, `"weight":7,"via"`), 200,
			`{"declared":1}`},
		"declaration of another via": {wire.DeclarationsPath, with("endpoints", "carrier pigeon"), 400,
			`via \"carrier pigeon\" is not one of [\"endpoints\" \"clusterIP\" \"dns\"]`},
		"declaration of another kind": {wire.DeclarationsPath, with("directed", "beg"), 400,
			`kind \"beg\" is not one of`},
		"declaration without via": {wire.DeclarationsPath, with(`"via":"endpoints",`, ""), 400,
			"routes[0].via is required"},
		"declaration without kind": {wire.DeclarationsPath, with(`,"kind":"directed"`, ""), 400,
			"routes[0].kind is required"},
		"declaration without service": {wire.DeclarationsPath, with(`"name":"web"`, `"name":""`), 400,
			"routes[0].service: namespace and name are required"},
		"declaration with another session": {wire.DeclarationsPath, `{"session":99}`, 409, "open a new stream"},
		"declaration without session":      {wire.DeclarationsPath, `{}`, 409, "open a new stream"},
		"declaration that is no JSON":      {wire.DeclarationsPath, `routes`, 400, "body: invalid character 'r'"},
		"declaration without population": {wire.DeclarationsPath, strings.Replace(
			`{"session":SESSION,"routes":[ROUTE]}`, "ROUTE",
			`{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"observed"}`, 1,
		), 400, "population is required: routes[0] is observed"},
		"declaration of a long population": {
			wire.DeclarationsPath, `{"session":SESSION,"population":"` + strings.Repeat("x", 254) + `"}`, 400,
			"population: longer than 253 bytes",
		},
		"declaration cut short": {wire.DeclarationsPath, `{"session":`, 400, "body: unexpected EOF"},
		"declaration, empty":    {wire.DeclarationsPath, ``, 400, "body: EOF"},
		"declaration of the wrong type": {wire.DeclarationsPath, `{"session":"one"}`, 400,
			"cannot unmarshal string"},
		"declaration, and another": {wire.DeclarationsPath, `{"session":SESSION} {}`, 400,
			"more than one JSON value"},
		"declaration, and a brace": {wire.DeclarationsPath, `{"session":SESSION}}`, 400,
			"invalid character '}'"},
		"declaration that is too large": {wire.DeclarationsPath, `{"gateway":"` + large + `"}`, 413,
			"body is larger than 4194304 bytes"},
		"declaration with too much after": {wire.DeclarationsPath, `{"session":SESSION}` + large, 413,
			"body is larger than 4194304 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			b.Unroute(requestOf(pod("a"), web))
			body := strings.ReplaceAll(c.body, "SESSION", "1")
			if b.session != 1 {
				t.Fatalf("the session is %d", b.session)
			}
			code, said := b.ask(http.MethodPost, c.path, "Bearer agent one", strings.NewReader(body))
			if code != c.code || !strings.Contains(said, c.want) || c.want == "" && said != "" {
				t.Errorf("%d %.300s, want %d %s", code, said, c.code, c.want)
			}
			if phase := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a").Phase; phase == drain.Released &&
				name != "declaration of nothing" {
				t.Errorf("the drain is %s", phase)
			}
		})
	}
}

// A line that is taken changes the drain; one that is refused names what is wrong.
func TestLinesOfReports(t *testing.T) {
	many := strings.TrimSuffix(strings.Repeat(`{"uid":"a"},`, wire.MaxReports+1), ",")
	long := strings.Repeat("x", 254)
	for name, c := range map[string]struct {
		line, want string
		phase      drain.Phase
	}{
		"idle": {`{"session":1,"reports":[{"uid":"uid-a","state":"idle","number":1}]}`, "",
			drain.Released},
		"unknown keys": {`{"session":1,"new":1,"reports":[{"uid":"uid-a","state":"removed","x":3}]}`,
			"", drain.Unrouting},
		"nothing": {`{"session":1}`, "", drain.Unrouting},
		"of an earlier drain": {
			`{"session":1,"reports":[{"uid":"uid-a","state":"idle","number":99}]}`, "",
			drain.Unrouting},
		"another state": {`{"session":1,"reports":[{"uid":"uid-a","state":"gone","number":1}]}`,
			`state "gone" is not one of`, drain.Unrouting},
		"before the clock": {
			`{"session":1,"at":-1,"reports":[{"uid":"uid-a","state":"idle","number":1}]}`,
			"at -1: no message of this stream has had it", drain.Unrouting},
		"a time that was not sent": {
			`{"session":1,"at":3600000,"reports":[{"uid":"uid-a","state":"idle","number":1}]}`,
			"at 3600000: no message of this stream has had it", drain.Unrouting},
		"a number for a string": {`{"session":1,"reports":[{"uid":7}]}`, "cannot unmarshal number", drain.Unrouting},
		"too many": {`{"session":1,"reports":[` + many + `]}`, "reports: 10001 are more than 10000",
			drain.Unrouting},
		"a long uid": {`{"session":1,"reports":[{"uid":"` + long + `"}]}`,
			"reports[0]: uid or generation is longer than 253 bytes", drain.Unrouting},
		"a long generation": {`{"session":1,"reports":[{"uid":"a","generation":"` + long + `"}]}`,
			"reports[0]: uid or generation is longer than 253 bytes", drain.Unrouting},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			b.Unroute(requestOf(pod("a"), web))
			near, far := net.Pipe()
			defer near.Close()
			defer far.Close()
			err := b.listen(t.Context(), bufio.NewReader(strings.NewReader(c.line+"\n")), far,
				Identity{Agent: "one", Everywhere: true})
			if c.want == "" && !errors.Is(err, io.EOF) || c.want != "" && !strings.Contains(err.Error(), c.want) {
				t.Errorf("ends with %v, want %q", err, c.want)
			}
			if phase := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a").Phase; phase != c.phase {
				t.Errorf("the drain is %s, want %s", phase, c.phase)
			}
		})
	}
}

// A session belongs to the agent that opened it.
func TestASessionOfAnotherAgentIsStale(t *testing.T) {
	b := newBench()
	for _, path := range []string{wire.DeclarationsPath, wire.LeavePath} {
		if code, body := b.ask(http.MethodPost, path, "Bearer agent two",
			strings.NewReader(`{"session":1}`)); code != http.StatusConflict {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}

// Whatever an agent posts is taken or refused as its own fault, and what is refused changes
// nothing.
func FuzzPosts(f *testing.F) {
	f.Add(
		[]byte(`{"session":1,"gateway":"g","routes":[{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed"}]}`))
	f.Add([]byte(`{"session":1}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		b := newBench()
		b.Unroute(requestOf(pod("a"), web))
		path, good := wire.DeclarationsPath, http.StatusOK
		before := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a")
		code, said := b.ask(http.MethodPost, path, "Bearer agent one", bytes.NewReader(body))
		after := b.core.Ledger.Status(time.Now(), drain.AtHold, "uid-a")
		switch code {
		case good:
			if after.Since.After(before.Since) || after.Deadline.After(before.Deadline) {
				t.Errorf("the clock was put back from %s to %s", before.Since, after.Since)
			}
		case http.StatusBadRequest, http.StatusConflict, http.StatusRequestEntityTooLarge:
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("refused with %d, and yet (-before +after):\n%s", code, diff)
			}
			var why wire.Error
			if json.Unmarshal([]byte(said), &why) != nil || why.Error == "" {
				t.Errorf("refused with %d without a reason: %s", code, said)
			}
		default:
			t.Errorf("%d %s", code, said)
		}
	})
}

// A million Services, or a name as long as a book, cost the one who sends them a refusal.
func TestWhatIsTooMuchIsRefusedByName(t *testing.T) {
	many := func(n int, one string) string { return strings.TrimSuffix(strings.Repeat(one+",", n), ",") }
	route := `{"service":{"namespace":"shop","name":"NAME"},"via":"endpoints","kind":"directed"}`
	long := strings.Repeat("x", 254)
	for name, c := range map[string]struct {
		path, body string
		code       int
		want       string
	}{
		"10,000 routes": {wire.DeclarationsPath, `{"session":1,"routes":[` + many(10_000, route) + `]}`, 200, ""},
		"10,001 routes": {wire.DeclarationsPath, `{"session":1,"routes":[` + many(10_001, route) + `]}`, 413,
			"routes: 10001 are more than 10000"},
		"a long Service": {wire.DeclarationsPath,
			`{"session":1,"routes":[` + strings.Replace(route, "NAME", long, 1) + `]}`, 400,
			"routes[0].service: a name is longer than 253 bytes"},
		"a long boot leaves": {wire.LeavePath, `{"session":1,"boot":"` + long + `"}`, 400,
			"boot: longer than 253 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			if code, said := b.ask(http.MethodPost, c.path, "Bearer agent one",
				strings.NewReader(c.body)); code != c.code || !strings.Contains(said, c.want) {
				t.Errorf("%d %.200s, want %d %s", code, said, c.code, c.want)
			}
		})
	}
	b := newBench()
	query := "?protocol=1&boot=" + strings.Repeat("x", 300)
	if code, said := b.ask(http.MethodGet, wire.StreamPath+query, "Bearer agent two", nil); code != 400 ||
		!strings.Contains(said, "boot: longer than") {
		t.Errorf("%d %s", code, said)
	}
	if code, said := b.ask(http.MethodGet, wire.StreamPath+"?protocol=1", "Bearer agent two",
		strings.NewReader("x")); code != 400 || !strings.Contains(said, "a stream is opened without") {
		t.Errorf("%d %s", code, said)
	}
}

// An agent that has the right in some namespaces declares Services in these, and delays no
// deletions elsewhere.
func TestRoutesInNamespacesWithoutRightAreRefused(t *testing.T) {
	routes := func(namespaces ...string) string {
		d := wire.Declaration{Session: 2}
		for _, ns := range namespaces {
			d.Routes = append(d.Routes, drain.Route{Service: drain.Service{Namespace: ns, Name: "x"},
				Via: drain.Endpoints, Kind: drain.Directed})
		}
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var hundred []string
	for i := range 101 {
		hundred = append(hundred, strings.Repeat("n", i+1))
	}
	for name, c := range map[string]struct {
		namespaces []string
		code       int
		want       string
	}{
		"its own":               {[]string{"shop", "shop"}, 200, ""},
		"none":                  {nil, 200, ""},
		"another":               {[]string{"shop", "bank"}, 200, `"refused":["bank"]`},
		"one that is not known": {[]string{"shop", "hidden"}, 503, "the API server does not answer"},
		"too many to ask about": {hundred, 403,
			"routes: in 101 namespaces, more than 100 need the right to acknowledge in all"},
		"it is asked about once": {[]string{"bank", "shop", "bank"}, 200, `"refused":["bank"]`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			if _, err := b.core.Connect(time.Now(), Identity{Agent: "local one", Everywhere: true}, wire.Offer{},
				func() {}); err != nil {
				t.Fatal(err)
			}
			code, said := b.ask(http.MethodPost, wire.DeclarationsPath, "Bearer agent local one",
				strings.NewReader(routes(c.namespaces...)))
			if code != c.code || !strings.Contains(said, c.want) {
				t.Errorf("%d %s, want %d %s", code, said, c.code, c.want)
			}
			agent := b.core.Ledger.Agent("local one")
			if agent.Declared != (c.code == 200) || slices.Contains(agent.Namespaces, "bank") {
				t.Errorf("declared %t, in %q", agent.Declared, agent.Namespaces)
			}
		})
	}
}

func TestAnAgentWithARightInSomeNamespacesOwesNothingBeforeItDeclares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.open("local two", "replica-0").next(t)
		answered(t, r.hold(pod("a"), web), "Released NoAgents held=false after 0s")
		one := n.agent("local one", []drain.Service{web}, "replica-0")
		held := r.hold(pod("b"), web)
		stillHeld(t, held)
		// What it has declared stands when it comes back.
		n.Cut("replica-0")
		stillHeld(t, held)
		time.Sleep(time.Second)
		one.say(pod("b"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 1s")
	})
}

// A namespace that is deleted takes the RoleBinding in it along. The gateway's other Services stay
// protected, and that one is again once the right is granted.
func TestANamespaceWithoutRightTakesNoProtectionFromOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		var revoked sync.Map
		r := n.replica("replica-0", "a", func(o *Options) {
			o.Authenticate = tokens{until: time.Now().Add(time.Hour), revoked: &revoked}
		})
		till := drain.Service{Namespace: "till", Name: "web"}
		one := n.agent("local one", []drain.Service{web, till}, "replica-0")
		waits := func(name string, s drain.Service) {
			t.Helper()
			answers := r.hold(pod(name), s)
			one.say(pod(name), drain.Idle)
			answered(t, answers, "Released Acknowledged held=true after 0s")
		}
		waits("a", till)
		revoked.Store("till", 1)
		time.Sleep(time.Minute) // it connects again, twice
		waits("b", web)
		answered(t, r.hold(pod("c"), till), "Released NoAgents held=false after 0s")
		revoked.Delete("till")
		time.Sleep(2 * time.Minute)
		waits("d", till)
	})
}

// Without this, connections on which bodies trickle in fill the coordinator up.
func TestSlowBodiesAreCut(t *testing.T) {
	for name, c := range map[string]struct {
		head, want string
		after      time.Duration
	}{
		"of an agent": {"POST /v1/leave HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent one\r\nContent-Length: " +
			"1000\r\n\r\n", "408 Request Timeout", bodyTimeout},
		"in pieces": {"POST /v1/leave HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent " +
			"one\r\nTransfer-Encoding: chunked\r\n\r\n", "408 Request Timeout",
			bodyTimeout},
		// It is answered when the server has given up to read what it does not want.
		"of a stranger": {"POST /v1/leave HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " +
			"nonsense\r\nContent-Length: 1000\r\n\r\n", "401 Unauthorized", authTimeout + bodyTimeout},
		"of a stream": {"GET /v1/stream?protocol=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent " +
			"one\r\nContent-Length: 1000\r\n\r\n", "400 Bad Request", bodyTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				n.replica("replica-0", "a")
				conn, err := n.Dial(t.Context(), "tcp", "replica-0:9444")
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				began := time.Now()
				if _, err := io.WriteString(conn, c.head); err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(conn)
				if took := time.Since(began); !strings.Contains(string(text), c.want) || took > c.after+time.Second {
					t.Errorf("after %s: %q", took, text)
				}
			})
		})
	}
}

// An agent that posts while the API server is slow to vouch for it has not sent its body slowly.
func TestASlowAuthenticatorDoesNotCutTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		n.replica("replica-0", "a", func(o *Options) { o.Authenticate = slowTokens{} })
		conn, err := n.Dial(t.Context(), "tcp", "replica-0:9444")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			_, _ = io.WriteString(conn, "POST /v1/leave HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: "+
				"Bearer agent one\r\nContent-Length: 13\r\n\r\n")
			time.Sleep(9 * time.Second)
			_, _ = io.WriteString(conn, `{"session":1}`)
		}()
		text, _ := io.ReadAll(conn)
		if !strings.Contains(string(text), "409 Conflict") {
			t.Errorf("%q", text)
		}
	})
}

type slowTokens struct{ tokens }

func (s slowTokens) Authenticate(ctx context.Context, token string) (Identity, error) {
	time.Sleep(8 * time.Second) // in a bubble
	return s.tokens.Authenticate(ctx, token)
}

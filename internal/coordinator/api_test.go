package coordinator

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
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

func newBench() *bench {
	b := &bench{Coordinator: New(drain.Holder{Replica: "replica-0", Epoch: "a"}, drain.DefaultTimes(), Options{
		MaxHolds: 32, Pods: &lives{}, Authenticate: tokens{}, Log: quiet(),
		Metrics: NewMetrics(prometheus.NewRegistry()),
	})}
	b.session = b.ledger.Connect(time.Now(), "one", drain.Hello{})
	return b
}

// ask sends a request and returns the status and the body.
func (b *bench) ask(method, path, authorization string, body io.Reader) (int, string) {
	request := httptest.NewRequest(method, path, body)
	if authorization != "" {
		request.Header.Set("Authorization", authorization)
	}
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
		for _, path := range []string{wire.ReportsPath, "/v1/nothing"} {
			request := httptest.NewRequest(http.MethodPost, path, strings.NewReader("{}"))
			request.Header.Set("Authorization", authorization)
			w := httptest.NewRecorder()
			newBench().Handler().ServeHTTP(w, request)
			if got := w.Header().Get("Connection"); got != want && path == wire.ReportsPath || got != "close" &&
				path != wire.ReportsPath {
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
	if code, body := b.ask(http.MethodDelete, wire.ReportsPath, "Bearer agent one",
		nil); code != http.StatusMethodNotAllowed ||
		!strings.Contains(body, "method DELETE is not allowed for /v1/reports") {
		t.Errorf("%d %s", code, body)
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
	if !b.ledger.Current("one", b.session) || b.ledger.Current("two", b.session+1) {
		t.Error("a refused stream has opened or ended a session")
	}
	b.Stop()
	if code, body := b.ask(http.MethodGet, wire.StreamPath+"?protocol=1", "Bearer agent two",
		nil); code != http.StatusServiceUnavailable || !strings.Contains(body, "shutting down") {
		t.Errorf("while stopping: %d %s", code, body)
	}
}

func TestPosts(t *testing.T) {
	const route = `{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed","granularity":"request"}`
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
			`{"drains":[{"pod":{"namespace":"shop","name":"a","uid":"uid-a"},`},
		"declaration of nothing": {wire.DeclarationsPath, `{"session":SESSION}`, 200, `{"drains":[]}`},
		"declaration with unknown fields": {wire.DeclarationsPath, with(`"via"`, `"weight":7,"via"`), 200,
			`"drains":[{`},
		"declaration of another via": {wire.DeclarationsPath, with("endpoints", "carrier pigeon"), 400,
			`via \"carrier pigeon\" is not one of [\"endpoints\" \"clusterIP\" \"dns\"]`},
		"declaration of another kind": {wire.DeclarationsPath, with("directed", "beg"), 400,
			`kind \"beg\" is not one of`},
		"declaration of another granularity": {wire.DeclarationsPath, with("request", "sand"), 400,
			`granularity \"sand\" is not one of`},
		"declaration without via": {wire.DeclarationsPath, with(`"via":"endpoints",`, ""), 400,
			"routes[0].via is required"},
		"declaration without kind": {wire.DeclarationsPath, with(`"kind":"directed",`, ""), 400,
			"routes[0].kind is required"},
		"declaration without granularity": {wire.DeclarationsPath, with(`,"granularity":"request"`, ""), 400,
			"routes[0].granularity is required"},
		"declaration without service": {wire.DeclarationsPath, with(`"name":"web"`, `"name":""`), 400,
			"routes[0].service: namespace and name are required"},
		"declaration with another session": {wire.DeclarationsPath, `{"session":99}`, 409, "open a new stream"},
		"declaration without session":      {wire.DeclarationsPath, `{}`, 409, "open a new stream"},
		"declaration that is no JSON":      {wire.DeclarationsPath, `routes`, 400, "body: invalid character 'r'"},
		"declaration without population": {wire.DeclarationsPath, strings.Replace(
			`{"session":SESSION,"routes":[ROUTE]}`, "ROUTE",
			`{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"observed","granularity":"connection"}`, 1,
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
		"report": {wire.ReportsPath,
			`{"session":SESSION,"reports":[{"uid":"uid-a","state":"idle","proof":"runtime","number":1}]}`, 204, ""},
		"report with unknown fields": {wire.ReportsPath,
			`{"session":SESSION,"new":1,"reports":[{"uid":"uid-a","state":"removed","proof":"timed","requests":3}]}`,
			204, ""},
		"report of nothing": {wire.ReportsPath, `{"session":SESSION}`, 204, ""},
		"report of another state": {wire.ReportsPath,
			`{"session":SESSION,"reports":[{"uid":"uid-a","state":"vanished"}]}`, 400,
			`state \"vanished\" is not one of`},
		"report with another proof": {wire.ReportsPath,
			`{"session":SESSION,"reports":[{"uid":"uid-a","state":"idle","proof":"oath"}]}`, 400,
			`proof \"oath\" is not one of`},
		"report without proof": {wire.ReportsPath,
			`{"session":SESSION,"reports":[{"uid":"uid-b","state":"kept"},{"uid":"uid-a","state":"removed"}]}`, 400,
			`reports[1].proof is required with state \"removed\"`},
		"report without uid": {wire.ReportsPath, `{"session":SESSION,"reports":[{"state":"routing"}]}`,
			400, "reports[0].uid is required"},
		"report with another session": {wire.ReportsPath,
			`{"session":99,"reports":[{"uid":"uid-a","state":"idle","proof":"runtime"}]}`, 409, "open a new stream"},
		"report as of before the clock": {wire.ReportsPath,
			`{"session":SESSION,"at":-1,"reports":[{"uid":"uid-a","state":"idle","proof":"runtime","number":1}]}`, 400,
			"at -1: must not be negative"},
		"report that is too large": {wire.ReportsPath, `{"boot":"` + large + `"}`, 413,
			"body is larger than 4194304 bytes"},
		"report with a number for a string": {wire.ReportsPath, `{"session":SESSION,"reports":[{"uid":7}]}`, 400,
			"cannot unmarshal number"},
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
			phase := b.ledger.Status(time.Now(), drain.AtHold, "uid-a").Phase
			if acknowledged := name == "report"; acknowledged != (phase == drain.Released) &&
				name != "declaration of nothing" {
				t.Errorf("the drain is %s", phase)
			}
		})
	}
}

// A session belongs to the agent that opened it.
func TestASessionOfAnotherAgentIsStale(t *testing.T) {
	b := newBench()
	for _, path := range []string{wire.DeclarationsPath, wire.ReportsPath} {
		if code, body := b.ask(http.MethodPost, path, "Bearer agent two",
			strings.NewReader(`{"session":1}`)); code != http.StatusConflict {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}

// Whatever an agent posts is taken or refused as its own fault, and what is refused changes
// nothing.
func FuzzPosts(f *testing.F) {
	f.Add(false,
		[]byte(`{"session":1,"gateway":"g","routes":[{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed","granularity":"request"}]}`))
	f.Add(true,
		[]byte(`{"session":1,"boot":"b","reports":[{"uid":"uid-a","generation":"1","state":"idle","proof":"runtime","number":1}]}`))
	f.Add(true, []byte(`{"session":1,"reports":[{"uid":"uid-a","since":"-292277022399-01-01T00:00:00Z"}]}`))
	f.Add(false, []byte(`{"session":1}}`))
	f.Add(true, []byte(`null`))
	f.Fuzz(func(t *testing.T, report bool, body []byte) {
		b := newBench()
		b.Unroute(requestOf(pod("a"), web))
		path, good := wire.DeclarationsPath, http.StatusOK
		if report {
			path, good = wire.ReportsPath, http.StatusNoContent
		}
		before := b.ledger.Status(time.Now(), drain.AtHold, "uid-a")
		code, said := b.ask(http.MethodPost, path, "Bearer agent one", bytes.NewReader(body))
		after := b.ledger.Status(time.Now(), drain.AtHold, "uid-a")
		switch code {
		case good:
			if report {
				var r wire.Reports
				if err := json.Unmarshal(body, &r); err != nil {
					t.Fatalf("taken, and yet: %v", err)
				}
				again, err := json.Marshal(r)
				if err != nil {
					t.Fatal(err)
				}
				if code, said := b.ask(http.MethodPost, path, "Bearer agent one",
					bytes.NewReader(again)); code != good {
					t.Errorf("taken once, and then written again as %s: %d %s", again, code, said)
				}
			}
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
	route := `{"service":{"namespace":"shop","name":"NAME"},"via":"endpoints","kind":"directed","granularity":"request"}`
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
		"10,001 reports": {wire.ReportsPath, `{"session":1,"reports":[` + many(10_001, `{"uid":"a"}`) + `]}`, 413,
			"reports: 10001 are more than 10000"},
		"a long uid": {wire.ReportsPath, `{"session":1,"reports":[{"uid":"` + long + `"}]}`, 400,
			"reports[0]: uid or generation is longer than 253 bytes"},
		"a long generation": {wire.ReportsPath, `{"session":1,"reports":[{"uid":"a","generation":"` + long + `"}]}`,
			400, "reports[0]: uid or generation is longer than 253 bytes"},
		"a long boot": {wire.ReportsPath, `{"session":1,"boot":"` + long + `"}`, 400,
			"boot: longer than 253 bytes"},
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

// An agent that has the right in some namespaces declares Services in these, and delays nobody's
// deletions elsewhere.
func TestRoutesInNamespacesWithoutRightAreRefused(t *testing.T) {
	routes := func(namespaces ...string) string {
		d := wire.Declaration{Session: 2}
		for _, ns := range namespaces {
			d.Routes = append(d.Routes, drain.Route{Service: drain.Service{Namespace: ns, Name: "x"},
				Via: drain.Endpoints, Kind: drain.Directed, Granularity: drain.PerRequest})
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
		"its own": {[]string{"shop", "shop"}, 200, ""},
		"none":    {nil, 200, ""},
		"another": {[]string{"shop", "bank"}, 403,
			`routes[1].service: edge may not acknowledge drains in namespace \"bank\"`},
		"one that is not known": {[]string{"shop", "hidden"}, 503, "the API server does not answer"},
		"too many to ask about": {hundred, 403,
			"routes: in 101 namespaces, more than 100 need the right to acknowledge in all"},
		"it is asked about once": {[]string{"bank", "shop", "bank"}, 403, "routes[0].service"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			b.ledger.Connect(time.Now(), "local one", drain.Hello{})
			code, said := b.ask(http.MethodPost, wire.DeclarationsPath, "Bearer agent local one",
				strings.NewReader(routes(c.namespaces...)))
			if code != c.code || !strings.Contains(said, c.want) {
				t.Errorf("%d %s, want %d %s", code, said, c.code, c.want)
			}
			if took := b.ledger.Agent("local one").Declared; took != (c.code == 200) {
				t.Errorf("declared: %t", took)
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
		n.cut("replica-0")
		stillHeld(t, held)
		time.Sleep(time.Second)
		one.say(pod("b"), drain.Idle)
		answered(t, held, "Released Acknowledged held=true after 1s")
	})
}

// Without this, connections on which bodies trickle in fill the coordinator up.
func TestSlowBodiesAreCut(t *testing.T) {
	for name, c := range map[string]struct {
		head, want string
		after      time.Duration
	}{
		"of an agent": {"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent one\r\nContent-Length: " +
			"1000\r\n\r\n", "408 Request Timeout", bodyTimeout},
		"in pieces": {"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent " +
			"one\r\nTransfer-Encoding: chunked\r\n\r\n", "408 Request Timeout",
			bodyTimeout},
		// It is answered when the server has given up to read what it does not want.
		"of a stranger": {"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " +
			"nonsense\r\nContent-Length: 1000\r\n\r\n", "401 Unauthorized", authTimeout + bodyTimeout},
		"of a stream": {"GET /v1/stream?protocol=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent " +
			"one\r\nContent-Length: 1000\r\n\r\n", "400 Bad Request", bodyTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				n.replica("replica-0", "a")
				conn, err := n.dial(t.Context(), "tcp", "replica-0:9444")
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
		conn, err := n.dial(t.Context(), "tcp", "replica-0:9444")
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

package coordinator

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/mux"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/target"
)

// writeTimeout is how long an agent may take to read what one wake-up has for it. A slower one is
// cut and starts again.
const writeTimeout = 5 * time.Second

// linesKept is the size of the buffer that a stream keeps between writes. It rarely needs more,
// when many drains begin together.
const linesKept = 4 << 10

// bodyTimeout is how long an agent may take to send the body of a post. A slower one is cut.
const bodyTimeout = 5 * time.Second

// noContent is the status of accepted reports in the metrics.
const noContent = "204"

// authTimeout is the part of the read deadline of a request that is for its authentication:
// requests to the API server of 5 s each, of which most agents need two. It does not cancel the
// Authenticator.
const authTimeout = 10 * time.Second

// maxNamespaces bounds the namespaces in one declaration of an agent that has no right everywhere:
// each is a question to the API server.
const maxNamespaces = 100

// Identity is the identity of an agent, or of another replica, which its token proves.
type Identity struct {
	Agent drain.AgentID
	// Name is namespace/name of its pod.
	Name string
	// Username is the user whose rights are checked.
	Username string
	// Everywhere: it may acknowledge drains in every namespace. If not, the [Authenticator] is
	// asked for each namespace.
	Everywhere bool
	// Replica: it is not an agent but a replica of the coordinator.
	Replica bool
	// Until is when the token ends, and the agent's stream with it. Zero: unknown.
	Until time.Time
}

// ErrUnauthenticated and ErrForbidden are what an Authenticator's errors may wrap: the token is not
// valid, or its user may not acknowledge drains. Any other error means that the question could not
// be answered.
var (
	ErrUnauthenticated = errors.New("the token is not valid here")
	ErrForbidden       = errors.New("not allowed to acknowledge drains")
)

// Refuse returns the refusal for an error of an Authenticator.
func Refuse(err error) error {
	code := http.StatusServiceUnavailable
	switch {
	case errors.Is(err, ErrUnauthenticated):
		code = http.StatusUnauthorized
	case errors.Is(err, ErrForbidden):
		code = http.StatusForbidden
	}
	return serve.Refuse(code, "%v", err)
}

// Authenticator identifies the caller that presents a bearer token, and checks its rights.
type Authenticator interface {
	Authenticate(ctx context.Context, token string) (Identity, error)
	// MayAcknowledge reports whether who may acknowledge drains of the pods of namespace; "" is
	// every namespace. It is asked again for as long as the agent has a stream.
	MayAcknowledge(ctx context.Context, who Identity, namespace string) (bool, error)
	// MayAskBarriers reports whether who may ask for the barriers of the pods on its node.
	MayAskBarriers(ctx context.Context, who Identity) (bool, error)
}

// access is which callers a route admits.
type access string

// agents: callers that the Authenticator identifies.
const agents access = "agents"

// replicas: other replicas of the coordinator.
const replicas access = "replicas"

// route is one row of the API's table.
type route struct {
	method, path string
	access       access
	// burst is how many requests one agent may make at once, and a tenth of that a second, but one
	// at least. 0: any number.
	burst int
	serve func(*Coordinator, http.ResponseWriter, *http.Request, Identity) (any, error)
}

// seldom is the burst for what an agent does when it starts or its gateway's configuration changes,
// often that for the hooks of the pods on a node.
const seldom, often = 5, 2048

// routes is the whole API, for agents and for other replicas. A result that is not nil is written
// as JSON; nil is 204, unless the handler has written the answer.
var routes = []route{
	{http.MethodGet, wire.StreamPath, agents, seldom, (*Coordinator).stream},
	{http.MethodPost, wire.DeclarationsPath, agents, seldom, (*Coordinator).declare},
	{http.MethodPost, wire.LeavePath, agents, seldom, (*Coordinator).leave},
	{http.MethodPost, wire.BarriersPath, agents, often, (*Coordinator).barrier},
	{http.MethodPost, wire.ClaimsPath, replicas, 0, (*Coordinator).claim},
	{http.MethodGet, wire.ReplicaPath, replicas, 0, (*Coordinator).replica},
	{http.MethodGet, wire.ShownPath, replicas, 0, (*Coordinator).shown},
	{http.MethodGet, wire.ReportPath, replicas, 0, (*Coordinator).shown},
	{http.MethodGet, wire.ExplainPath + "/{namespace}/{pod}", replicas, 0, (*Coordinator).shown},
}

// errStale is the answer to a post that names another session than the agent's present one.
var errStale = serve.Refusal{Code: http.StatusConflict, Text: "the session is not this agent's present one on this " +
	"replica: open a new stream"}

// errWritten means that the handler has written its answer.
var errWritten = errors.New("written")

// Handler returns the API for agents and for the other replicas.
func (c *Coordinator) Handler() http.Handler {
	r := mux.NewRouter()
	for _, row := range routes {
		rates := serve.NewRates[drain.AgentID](rate.Limit(max(1, row.burst/10)), row.burst)
		r.Methods(row.method).Path(row.path).HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.serve(row, rates, w, r)
		})
	}
	r.NotFoundHandler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		c.answer(w, "other", nil, serve.Refuse(http.StatusNotFound, "no such path: %.200q", r.URL.Path))
	})
	r.MethodNotAllowedHandler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		c.answer(w, "other", nil, serve.Refuse(http.StatusMethodNotAllowed, "method %s is not allowed for %s", r.Method,
			r.URL.Path))
	})
	return r
}

func (c *Coordinator) serve(row route, rates *serve.Rates[drain.AgentID], w http.ResponseWriter, r *http.Request) {
	// The server reads a body that the handler did not read to its end.
	cutBodyAt(w, r, time.Now().Add(authTimeout+bodyTimeout))
	w.Header().Set("Connection", "close") // until the caller is identified
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !bearer {
		c.answer(w, row.path, nil, serve.Refuse(http.StatusUnauthorized,
			"no bearer token: send the projected service account token"))
		return
	}
	who, err := c.Authenticate.Authenticate(r.Context(), token)
	switch {
	case err != nil:
		c.answer(w, row.path, nil, Refuse(err))
		return
	case who.Replica != (row.access == replicas):
		c.answer(w, row.path, nil, serve.Refuse(http.StatusForbidden, "this path is for %s", row.access))
		return
	case row.burst > 0 && !rates.Of(who.Agent).Allow(): // before the body is read
		c.answer(w, row.path, nil, serve.Refuse(http.StatusTooManyRequests,
			"too many of these requests of one agent: at most %d at once, and %d a second", row.burst,
			max(1, row.burst/10)))
		return
	}
	w.Header().Del("Connection")
	serve.KeepConn(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, wire.MaxBody)
		cutBodyAt(w, r, time.Now().Add(bodyTimeout))
		result, err := row.serve(c, w, r, who)
		if errors.Is(err, errWritten) {
			c.Metrics.api.WithLabelValues(row.path, "200").Inc()
			return
		}
		c.answer(w, row.path, result, err)
	})).ServeHTTP(w, r)
}

// cutBodyAt sets the deadline for reading the body, or removes it at the zero time. It does nothing
// for a writer without deadlines, such as a recorder in a test, and for a request without a body,
// whose connection is only watched for its end.
func cutBodyAt(w http.ResponseWriter, r *http.Request, at time.Time) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(at)
	}
}

// answer writes all responses except those of streams.
func (c *Coordinator) answer(w http.ResponseWriter, path string, result any, err error) {
	code := http.StatusOK
	switch refused := (serve.Refusal{}); {
	case errors.As(err, &refused):
		code, result = refused.Code, wire.Error{Error: refused.Text}
	case err != nil:
		code, result = http.StatusInternalServerError, wire.Error{Error: err.Error()}
	case result == nil:
		code = http.StatusNoContent
	}
	c.Metrics.api.WithLabelValues(path, strconv.Itoa(code)).Inc()
	// The server's own deadline runs from the request on, and a barrier waits for longer. A body
	// that was not read is read before the write.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(bodyTimeout + writeTimeout))
	if result == nil {
		w.WriteHeader(code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// The status is written; a failure means that the agent has closed the connection.
	_ = json.NewEncoder(w).Encode(result)
}

// decode reads a request body, and then removes its deadline: from then on the connection is only
// watched for its end. Unknown fields are accepted, because newer agents may send more.
func decode(w http.ResponseWriter, r *http.Request, into any) error {
	decoder := json.NewDecoder(r.Body)
	err := decoder.Decode(into)
	if err == nil {
		if err = decoder.Decode(&struct{}{}); errors.Is(err, io.EOF) {
			cutBodyAt(w, r, time.Time{})
			return nil
		}
		if err == nil {
			err = errors.New("more than one JSON value")
		}
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return serve.Refuse(http.StatusRequestEntityTooLarge, "body is larger than %d bytes", tooLarge.Limit)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return serve.Refuse(http.StatusRequestTimeout, "body was not sent within %s", bodyTimeout)
	}
	return serve.Refuse(http.StatusBadRequest, "body: %v", err)
}

func (c *Coordinator) declare(w http.ResponseWriter, r *http.Request, who Identity) (any, error) {
	var d wire.Declaration
	if err := decode(w, r, &d); err != nil {
		return nil, err
	}
	if len(d.Routes) > wire.MaxRoutes {
		return nil, serve.Refuse(http.StatusRequestEntityTooLarge, "routes: %d are more than %d", len(d.Routes),
			wire.MaxRoutes)
	}
	d.Gateway, d.GatewayMode, d.Population = target.Printable(d.Gateway), target.Printable(d.GatewayMode),
		target.Printable(d.Population)
	for name, text := range map[string]string{"gateway": d.Gateway, "gatewayMode": d.GatewayMode,
		"population": d.Population} {
		if len(text) > wire.MaxName {
			return nil, serve.Refuse(http.StatusBadRequest, "%s: longer than %d bytes", name, wire.MaxName)
		}
	}
	for i, route := range d.Routes {
		switch {
		case max(len(route.Service.Namespace), len(route.Service.Name)) > wire.MaxName:
			return nil, serve.Refuse(http.StatusBadRequest, "routes[%d].service: a name is longer than %d bytes", i,
				wire.MaxName)
		case route.Service.Namespace == "" || route.Service.Name == "":
			return nil, serve.Refuse(http.StatusBadRequest, "routes[%d].service: namespace and name are required", i)
		case route.Service != drain.EveryService && (route.Service.Namespace == "*" || route.Service.Name == "*"):
			return nil, serve.Refuse(http.StatusBadRequest, "routes[%d].service: %s is neither a Service nor %s", i,
				route.Service, drain.EveryService)
		case route.Service == drain.EveryService && !who.Everywhere:
			return nil, serve.Refuse(http.StatusForbidden,
				"routes[%d].service: every Service takes the right to acknowledge in all namespaces", i)
		case route.Via == drain.ViaUnknown:
			return nil, serve.Refuse(http.StatusBadRequest, "routes[%d].via is required", i)
		case route.Kind == drain.KindUnknown:
			return nil, serve.Refuse(http.StatusBadRequest, "routes[%d].kind is required", i)
		case route.Via == drain.Endpoints && route.Kind == drain.Observed && d.Population == "":
			return nil, serve.Refuse(http.StatusBadRequest, "population is required: routes[%d] is observed", i)
		}
	}
	// One namespace without the right, because it was deleted perhaps, takes the protection of none
	// of the gateway's others.
	refused, err := c.withoutRight(r.Context(), who, d.Routes)
	if err != nil {
		return nil, err
	}
	d.Routes = slices.DeleteFunc(d.Routes, func(r drain.Route) bool {
		return slices.Contains(refused, r.Service.Namespace)
	})
	var declared wire.Declared
	c.inTurn(func() {
		if declared, err = c.core.Declare(who.Agent, d); err == nil {
			c.seen.declared(who.Agent, d)
		}
	})
	if err != nil {
		return nil, err
	}
	declared.Refused = refused
	c.Log.Info("agent declared", "agent", who.Name, "gateway", d.Gateway, "mode", d.GatewayMode,
		"population", d.Population, "routes", len(d.Routes), "refused", refused)
	return declared, nil
}

// withoutRight lists the namespaces of routes in which who may not acknowledge drains, sorted.
func (c *Coordinator) withoutRight(ctx context.Context, who Identity, routes []drain.Route) (refused []string,
	err error) {
	if who.Everywhere {
		return nil, nil
	}
	namespaces := namespacesOf(routes)
	if len(namespaces) > maxNamespaces {
		return nil, serve.Refuse(http.StatusForbidden, "routes: in %d namespaces, more than %d need the right to "+
			"acknowledge in all", len(namespaces), maxNamespaces)
	}
	var mu sync.Mutex
	var all errgroup.Group
	all.SetLimit(rightsAtOnce)
	for _, namespace := range namespaces {
		all.Go(func() error {
			allowed, err := c.Authenticate.MayAcknowledge(ctx, who, namespace)
			if err != nil {
				return serve.Refuse(http.StatusServiceUnavailable, "%v", err)
			}
			if !allowed {
				mu.Lock()
				refused = append(refused, namespace)
				mu.Unlock()
			}
			return nil
		})
	}
	err = all.Wait()
	slices.Sort(refused)
	return refused, err
}

// namespacesOf lists the namespaces of routes, sorted.
func namespacesOf(routes []drain.Route) []string {
	all := map[string]bool{}
	for _, r := range routes {
		all[r.Service.Namespace] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// watchRights ends the streams of agents whose right was withdrawn, until ctx is done. A check that
// fails ends none.
func (c *Coordinator) watchRights(ctx context.Context) {
	ticker := time.NewTicker(rightsEvery)
	defer ticker.Stop()
	type right struct{ username, namespace string }
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		rights, of := map[right]Identity{}, map[right][]*Session{}
		c.locked(func() {
			for _, s := range c.core.sessions {
				namespaces := []string{""}
				if !s.Who.Everywhere {
					namespaces = c.core.Ledger.Agent(s.Who.Agent).Namespaces
				}
				for _, namespace := range namespaces {
					what := right{s.Who.Username, namespace}
					rights[what], of[what] = s.Who, append(of[what], s)
				}
			}
		})
		var all errgroup.Group
		all.SetLimit(rightsAtOnce)
		for what, who := range rights {
			all.Go(func() error {
				if allowed, err := c.Authenticate.MayAcknowledge(ctx, who, what.namespace); err != nil || allowed {
					return nil
				}
				c.change(func() {
					for _, s := range of[what] {
						if c.core.sessions[s.Who.Agent] == s {
							c.core.cut(time.Now(), s.Who.Agent, "the right to acknowledge was taken")
						}
					}
				})
				return nil
			})
		}
		_ = all.Wait() // they return none
	}
}

// podDeleted is why a stream ends, or is refused, when the watch shows the agent's pod deleted.
const podDeleted = "the agent's pod is deleted"

// take passes an agent's reports to the ledger.
func (c *Coordinator) take(ctx context.Context, who Identity, said wire.Reports) error {
	if len(said.Reports) > wire.MaxReports {
		return serve.Refuse(http.StatusRequestEntityTooLarge, "reports: %d are more than %d", len(said.Reports),
			wire.MaxReports)
	}
	if len(said.Boot) > wire.MaxName {
		return serve.Refuse(http.StatusBadRequest, "boot: longer than %d bytes", wire.MaxName)
	}
	if up := said.UpTo; up != nil {
		switch {
		case len(up.Generation) > wire.MaxName:
			return serve.Refuse(http.StatusBadRequest, "upTo.generation is longer than %d bytes", wire.MaxName)
		case up.State == drain.Kept:
			return serve.Refuse(http.StatusBadRequest, "upTo.state %q: name each pod that is kept", up.State)
		}
	}
	for i, r := range said.Reports {
		switch {
		case max(len(r.UID), len(r.Generation)) > wire.MaxName:
			return serve.Refuse(http.StatusBadRequest, "reports[%d]: uid or generation is longer than %d bytes", i,
				wire.MaxName)
		case r.UID == "":
			return serve.Refuse(http.StatusBadRequest, "reports[%d].uid is required", i)
		case len(r.Kept) > wire.MaxKept:
			return serve.Refuse(http.StatusBadRequest, "reports[%d].kept is longer than %d bytes", i, wire.MaxKept)
		}
	}
	var taken Taken
	var err error
	c.inTurn(func() {
		now := time.Now()
		if taken, err = c.core.Report(now, who.Agent, said); err == nil {
			c.seen.reported(now, who.Agent, taken)
		}
	})
	if err != nil {
		return err
	}
	if taken.News && c.Log.Enabled(ctx, slog.LevelDebug) {
		if up := said.UpTo; up != nil {
			c.Log.Debug("agent reports on all drains", "agent", who.Name, "revision", up.Revision,
				"state", up.State.String(), "generation", up.Generation, "boot", said.Boot)
		}
		for _, r := range said.Reports {
			c.Log.Debug("agent reports", "agent", who.Name, "uid", r.UID, "state", r.State.String(),
				"number", r.Number, "generation", r.Generation, "boot", said.Boot)
		}
	}
	if said.UpTo != nil {
		c.Metrics.reports.WithLabelValues(said.UpTo.State.String()).Inc()
	}
	for _, r := range said.Reports {
		c.Metrics.reports.WithLabelValues(r.State.String()).Inc()
	}
	return nil
}

// listen reads an agent's lines from its stream until the stream ends, and returns why. A line that
// has begun must arrive in time.
func (c *Coordinator) listen(ctx context.Context, from *bufio.Reader, conn net.Conn, who Identity) error {
	var long []byte
	for {
		// A line may begin at any time, and must then be complete as soon as a body must be.
		if _, err := from.Peek(1); err != nil {
			return err
		}
		begun, _ := from.Peek(from.Buffered())
		whole := bytes.IndexByte(begun, '\n') >= 0
		if !whole {
			_ = conn.SetReadDeadline(time.Now().Add(bodyTimeout))
		}
		line, err := from.ReadSlice('\n')
		for ; errors.Is(err, bufio.ErrBufferFull); line, err = from.ReadSlice('\n') {
			if long = append(long, line...); len(long) > wire.MaxBody {
				return serve.Refuse(http.StatusRequestEntityTooLarge, "a line is larger than %d bytes", wire.MaxBody)
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return serve.Refuse(http.StatusRequestTimeout, "a line was not sent within %s", bodyTimeout)
		}
		if err != nil {
			return err
		}
		if !whole {
			_ = conn.SetReadDeadline(time.Time{})
		}
		if len(long) > 0 {
			long = append(long, line...)
			line = long
		}
		if wire.IsHealth(line) {
			c.receive(who, line)
			long = nil // long lines are rare
			continue
		}
		var said wire.Reports
		if err := json.Unmarshal(line, &said); err != nil {
			return serve.Refuse(http.StatusBadRequest, "reports: %v", err)
		}
		if err := c.take(ctx, who, said); err != nil {
			return err
		}
		c.Metrics.api.WithLabelValues(wire.ReportsPath, noContent).Inc()
		if long = long[:0]; cap(long) > linesKept {
			long = nil
		}
	}
}

func (c *Coordinator) leave(w http.ResponseWriter, r *http.Request, who Identity) (any, error) {
	var said wire.Leave
	if err := decode(w, r, &said); err != nil {
		return nil, err
	}
	if len(said.Boot) > wire.MaxName {
		return nil, serve.Refuse(http.StatusBadRequest, "boot: longer than %d bytes", wire.MaxName)
	}
	ok := false
	c.inTurn(func() {
		ok = c.core.Ledger.Leave(who.Agent, said.Session)
		c.connected()
	})
	if !ok {
		return nil, errStale
	}
	c.Log.Info("agent leaves: its gateway accepts nothing any more", "agent", who.Name, "id", who.Agent,
		"boot", said.Boot)
	return nil, nil
}

// stream is one agent's open stream.
type stream struct {
	*Session
	woken signal.Signal

	// The other fields belong to the goroutine that serves the stream. lines is what it writes
	// next.
	lines []byte
	write func(lines []byte) error
	// heard receives the error that ended reading from the stream.
	heard chan error
}

// stream serves one agent until the agent disconnects, a newer stream of the agent replaces this
// one, or the coordinator stops. Everything since the last write goes out in one write.
func (c *Coordinator) stream(w http.ResponseWriter, r *http.Request, who Identity) (any, error) {
	offer, err := checkStream(r)
	if err != nil {
		return nil, err
	}
	s, err := c.connect(r, who, offer)
	if err != nil {
		return nil, err
	}
	c.Log.Info("agent connected", "agent", who.Name, "id", who.Agent, "session", s.Number, "address", r.RemoteAddr,
		"protocol", wire.Protocol, "features", offer.Features, "boot", offer.Boot)
	defer c.disconnect(s)
	closeConn, err := c.open(s, w, r)
	if err != nil {
		return nil, err
	}
	defer closeConn()
	c.feed(s)
	return nil, errWritten
}

// checkStream returns what the agent offers, or a refusal.
func checkStream(r *http.Request) (wire.Offer, error) {
	offer, err := wire.ParseOffer(r.URL.Query())
	if err != nil {
		return offer, serve.Refuse(http.StatusBadRequest, "%v", err)
	}
	if r.ContentLength != 0 {
		return offer, serve.Refuse(http.StatusBadRequest, "body: a stream is opened without")
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), wire.Upgrade) {
		return offer, serve.Refuse(http.StatusUpgradeRequired,
			"a stream is opened as a request to upgrade to "+wire.Upgrade)
	}
	return offer, nil
}

// open hijacks the connection of s, to write the stream without HTTP around it, and starts to read
// what the agent writes. The function that it returns closes the connection.
func (c *Coordinator) open(s *stream, w http.ResponseWriter, r *http.Request) (closeConn func(), err error) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	from := buffered.Reader
	s.lines = append(s.lines, upgraded...)
	s.write = func(lines []byte) error {
		return errors.Join(conn.SetWriteDeadline(time.Now().Add(writeTimeout)), writeTo(conn, lines))
	}
	// The goroutine that reads sends its error here.
	s.heard = make(chan error, 1)
	var listening sync.WaitGroup
	listening.Go(func() { s.heard <- c.listen(r.Context(), from, conn, s.Who) })
	return func() {
		conn.Close()
		listening.Wait()
	}, nil
}

// disconnect ends the session of a stream.
func (c *Coordinator) disconnect(s *stream) {
	c.inTurn(func() {
		c.core.Disconnect(time.Now(), s.Session)
		c.connected()
	})
	c.targetHealth.end(s.Who.Agent, s.Number)
	c.Log.Info("agent disconnected", "agent", s.Who.Name, "id", s.Who.Agent, "session", s.Number)
}

// feed writes the changes for an agent to its stream, until the stream is over.
func (c *Coordinator) feed(s *stream) {
	heartbeat := time.NewTicker(c.core.times.Heartbeat)
	defer heartbeat.Stop()
	over := false
	for {
		var news News
		current := false
		c.inTurn(func() { news, current = c.core.Feed(s.Session) })
		if !current {
			return
		}
		s.lines = c.core.Append(s.lines, time.Now(), s.Session, news)
		if len(s.lines) > 0 {
			if err := s.write(s.lines); err != nil || over {
				return
			}
			if s.lines = s.lines[:0]; cap(s.lines) > linesKept {
				s.lines = nil
			}
		}
		select {
		case <-s.woken:
			// More changes of this moment go out in the same write.
			runtime.Gosched()
		case <-heartbeat.C:
			s.lines = c.core.Say(s.lines, time.Now(), s.Session, wire.Message{Type: wire.TypeHeartbeat})
		case err := <-s.heard:
			refused := serve.Refusal{}
			if !errors.As(err, &refused) {
				return
			}
			c.Metrics.api.WithLabelValues(wire.ReportsPath, strconv.Itoa(refused.Code)).Inc()
			s.lines = c.core.Say(s.lines, time.Now(), s.Session,
				wire.Message{Type: wire.TypeRefused, Refused: &wire.Error{Error: refused.Text}})
			over = true
		case <-c.stop:
			return
		}
	}
}

// connect begins an agent's stream, and ends its former one.
func (c *Coordinator) connect(r *http.Request, who Identity, offer wire.Offer) (s *stream, err error) {
	c.inTurn(func() {
		if r.Context().Err() != nil {
			err = serve.Refuse(http.StatusRequestTimeout, "the agent did not wait for its turn")
			return
		}
		now := time.Now()
		s = &stream{woken: signal.New()}
		if s.Session, err = c.core.Connect(now, who, offer, s.woken.Raise); err == nil {
			c.seen.connected(now, who.Agent, offer, r.RemoteAddr)
			c.connected()
		}
	})
	return s, err
}

// upgraded is the answer to an agent's request for a stream.
const upgraded = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + wire.Upgrade + "\r\n\r\n"

func writeTo(w io.Writer, b []byte) error {
	_, err := w.Write(b)
	return err
}

// connected, called with the lock, counts streams.
func (c *Coordinator) connected() {
	c.Metrics.agents.WithLabelValues("connected").Set(float64(len(c.core.sessions)))
	c.Metrics.agents.WithLabelValues("missing").Set(float64(c.core.Ledger.Counts().Missing))
}

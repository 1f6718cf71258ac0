// Package dashboard serves operators the state of one coordinator: a read API as JSON (package
// api), and a live page that uses it.
//
// It only reads. Requests have no body, and the answer is the same for every caller that may read:
// it covers pods and gateways of all namespaces.
//
// # Who may look
//
// The listener's address decides how callers are checked. On a loopback address, plain HTTP is open
// to every caller that reaches it: those are the users who may forward a port to the coordinator's
// pod, so RBAC on pods/portforward has decided already. A page of another origin in the same
// browser can reach it too, by a name that resolves to 127.0.0.1. Therefore the Host of a request
// must be a loopback address or localhost. On any other address the server uses TLS, and each
// request for data carries a bearer token for the audience lameduck.io, whose user may "get" the
// virtual resource drains.lameduck.io ([Reviewer]). The page itself contains no data and is open:
// it asks for the token, and keeps it only in memory.
//
// # What it costs
//
// A view is made under the coordinator's lock. All readers share one view. It is made at most four
// times a second, takes at most a twentieth of the time, and is not made without readers. While a
// reader asks for all replicas, their views are requested at most once a second.
package dashboard

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/mux"
	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

//go:embed page
var page embed.FS

const (
	// writeTimeout is how long a reader may take to read one answer.
	writeTimeout = 5 * time.Second
	// explainTimeout bounds an explanation, which reads only caches.
	explainTimeout = 5 * time.Second
)

// Coordinator is the coordinator whose state is served.
type Coordinator interface {
	View(drains, reports int) api.View
	ViewPod(uid drain.UID, reports int) api.View
	Report() api.Report
	Acknowledgers(services []drain.Service) ([]drain.Acknowledger, map[drain.AgentID]string)
}

// Explainer explains what would happen to a deletion.
type Explainer interface {
	Explain(ctx context.Context, now time.Time, operation admission.Operation, namespace,
		name string) (admission.Explanation, error)
}

// Reviewer checks whether the bearer of a token may read. An error that wraps
// [coordinator.ErrUnauthenticated] or [coordinator.ErrForbidden] is a refusal. Any other error
// means that the check itself failed.
type Reviewer interface {
	Review(ctx context.Context, token string) error
}

// Options of a Dashboard. All but Coverage, Summary, Missing and Unasked are required.
type Options struct {
	Coordinator Coordinator
	Explainer   Explainer
	Reviewer    Reviewer
	// Pod returns a pod from a cache, which must not be changed. Nil: it is not known.
	Pod func(pod drain.Pod) *corev1.Pod
	// Coverage returns the consumers of a Service: [coverage.Source.Of].
	Coverage func(ctx context.Context, service drain.Service, barrier bool) (coverage.Service, error)
	// Summary returns the coverage of all Services: [coverage.Source.Summary].
	Summary func(ctx context.Context) (coverage.Summary, error)
	// Missing returns the pods that ask for the barrier and were created without it. Nil: it is not
	// known.
	Missing func() []string
	// Unasked reports whether the webhook configuration does not exist. Nil: it is not known.
	Unasked func() bool
	// Views returns the views of the other replicas, and Reports returns their reports. silent are
	// the names of replicas that do not answer. Nil: there are no other replicas.
	Views   func(ctx context.Context) (all []api.View, silent []string)
	Reports func(ctx context.Context) (all []api.Report, silent []string)
	// Explanations returns the explanations of the other replicas. pod is the end of the path:
	// /{namespace}/{pod}?operation={operation}. Nil: there are no other replicas.
	Explanations func(ctx context.Context, pod string) (all []api.Explanation, silent []string)
	Log          *slog.Logger
}

// Dashboard serves the state of one replica. Make it with New.
type Dashboard struct {
	Options
	// shown is the newest view, which is due again at next.
	shown struct {
		sync.Mutex
		api.View
		next time.Time
	}
	// peers are the newest views of the other replicas, which are due again at next.
	peers struct {
		sync.Mutex
		all    []api.View
		silent []string
		next   time.Time
	}
}

// New returns a dashboard.
func New(o Options) *Dashboard { return &Dashboard{Options: o} }

// access is the group of callers that may call a route.
type access string

const (
	// anyone: every caller. The route shows nothing of the cluster.
	anyone access = "anyone"
	// readers: on a loopback address all callers, elsewhere those that the Reviewer admits.
	readers access = "readers"
)

type route struct {
	path   string
	access access
	serve  func(*Dashboard, http.ResponseWriter, *http.Request) (any, error)
}

// routes are all routes. They answer GET and HEAD. The result of serve is written as JSON, unless
// its error is errWritten: then it has written the answer itself.
var routes = []route{
	{"/", anyone, (*Dashboard).file},
	{"/assets/{name}", anyone, (*Dashboard).file},
	{api.ViewPath, readers, func(d *Dashboard, _ http.ResponseWriter, r *http.Request) (any, error) {
		v := d.latest()
		if ofAll(r) && d.Views != nil {
			others, silent := d.others(r.Context())
			v = v.Join(others...)
			v.Silent, v.Outcomes = silent, v.Outcomes[:min(len(v.Outcomes), maxOutcomes)]
			if len(silent) == 0 {
				v.Drains.Elsewhere = 0
			}
		}
		return v, nil
	}},
	{api.CoveragePath, readers, (*Dashboard).coverage},
	{api.ReportPath, readers, func(d *Dashboard, _ http.ResponseWriter, r *http.Request) (any, error) {
		report := d.Coordinator.Report()
		if ofAll(r) && d.Reports != nil {
			others, _ := d.Reports(r.Context())
			report = report.Join(others...)
		}
		return report, nil
	}},
	{api.ExplainPath + "/{namespace}/{pod}", readers, (*Dashboard).explain},
}

var errWritten = errors.New("written")

// headers are set on every answer. They let the page load files only from this server, and let no
// other page frame it.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
		"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	"X-Content-Type-Options":       "nosniff",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Permissions-Policy":           "camera=(), geolocation=(), microphone=()",
	"Cache-Control":                "no-store",
}

// Handler returns the handler for address. On a loopback address it is open to all callers,
// elsewhere to those that the Reviewer admits.
func (d *Dashboard) Handler(address net.Addr) http.Handler {
	open := Loopback(address)
	r := mux.NewRouter()
	for _, row := range routes {
		var known http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			result, err := row.serve(d, w, r)
			d.answer(w, result, err)
		})
		if row.access == readers {
			known = serve.KeepConn(known)
		}
		r.Methods(http.MethodGet, http.MethodHead).Path(row.path).HandlerFunc(func(w http.ResponseWriter,
			r *http.Request) {
			if err := d.admit(row.access, open, r); err != nil {
				w.Header().Set("Connection", "close")
				d.answer(w, nil, err)
				return
			}
			known.ServeHTTP(w, r)
		})
	}
	r.NotFoundHandler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.answer(w, nil, serve.Refuse(http.StatusNotFound, "no such path: %.200q", r.URL.Path))
	})
	r.MethodNotAllowedHandler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", "GET, HEAD")
		d.answer(w, nil, serve.Refuse(http.StatusMethodNotAllowed, "everything here is read with GET"))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		if open && !localHost(req.Host) {
			d.answer(w, nil, serve.Refuse(http.StatusMisdirectedRequest,
				"host %.200q: this is reached as localhost or a loopback address", req.Host))
			return
		}
		// A writer that supports no deadline, such as a recorder in a test, has none.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(explainTimeout + writeTimeout))
		r.ServeHTTP(w, req)
	})
}

// Loopback reports whether only the machine itself, or the pod, reaches address.
func Loopback(address net.Addr) bool {
	tcp, ok := address.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// localHost reports whether host, with a port or without, names the machine itself. Other names may
// have been made to resolve to it.
func localHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// admit returns the reason why a request is refused, or nil.
func (d *Dashboard) admit(to access, open bool, r *http.Request) error {
	if to == anyone || open {
		return nil
	}
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !bearer || token == "" {
		return serve.Refuse(http.StatusUnauthorized,
			"no bearer token: kubectl create token NAME --audience=lameduck.io")
	}
	if err := d.Reviewer.Review(r.Context(), token); err != nil {
		return coordinator.Refuse(err)
	}
	return nil
}

// answer writes a response. Only file writes its own.
func (d *Dashboard) answer(w http.ResponseWriter, result any, err error) {
	if errors.Is(err, errWritten) {
		return
	}
	code := http.StatusOK
	switch refused := (serve.Refusal{}); {
	case errors.As(err, &refused):
		code, result = refused.Code, api.Error{Error: refused.Text}
	case err != nil:
		code, result = http.StatusInternalServerError, api.Error{Error: err.Error()}
	}
	switch code {
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
	case http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// The status is written; a failure means that the client has disconnected.
	_ = json.NewEncoder(w).Encode(result)
}

// kinds are the content types of files, by extension. Package mime is not used, because its types
// depend on the machine.
var kinds = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
	".svg": "image/svg+xml",
}

func (d *Dashboard) file(w http.ResponseWriter, r *http.Request) (any, error) {
	name := mux.Vars(r)["name"]
	if name == "" {
		name = "index.html"
	}
	text, err := fs.ReadFile(page, path.Join("page", name))
	if err != nil {
		return nil, serve.Refuse(http.StatusNotFound, "no such file: %.200q", name)
	}
	w.Header().Set("Content-Type", kinds[path.Ext(name)])
	_, _ = w.Write(text)
	return nil, errWritten
}

// Package client is an agent's side of the wire: one stream to each coordinator replica, kept open,
// and the posts that go with it.
//
// Each replica has a goroutine of its own that knows one address. It opens the stream, declares
// what the gateway routes, excludes what is being drained, and from then on carries words both ways
// until the stream is lost; then it starts over, after a pause that grows to [maxPause], below the
// time after which the coordinator calls an agent lost.
//
// An exclusion has an expiry for each replica's life that asks for it. Every message of a stream
// renews that life's expiries. A list of open drains that is complete ([wire.TypeSynced]) ends the
// expiries of *that* life that are not in it, and of no other.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// postTimeout bounds a declaration or a batch of reports.
	postTimeout = 5 * time.Second
	// helloTimeout bounds the wait for the first message of a stream.
	helloTimeout = 5 * time.Second
	pauseFirst   = 100 * time.Millisecond
	maxPause     = 2 * time.Second
	// maxLine bounds one message of a stream, in bytes.
	maxLine = 1 << 20
)

// Exclusions are what the client lays, renews and readmits, and what it reports. Its methods must
// not block.
type Exclusions interface {
	// Exclude lays or renews an exclusion for holder until expires.
	Exclude(pod drain.Pod, holder string, since, expires time.Time)
	// Readmit ends holder's expiry. dead says that the pod is terminating or gone.
	Readmit(uid drain.UID, holder string, dead bool)
	// Renew extends all of holder's expiries.
	Renew(holder string, expires time.Time)
	// Held lists what holder has an expiry on.
	Held(holder string) []drain.UID
	// Reports returns the present state of every exclusion, whoever holds it. The client fills in
	// Number, and reports to each replica what that one has asked for.
	Reports() []drain.Report
}

// Watches are the pods that the client is told to observe, and what it reports of them. Its methods
// must not block.
type Watches interface {
	// Watch begins to observe a pod for holder, or says it anew.
	Watch(w drain.Watch, holder string)
	// Unwatch ends that. gone says that the pod does not exist any more.
	Unwatch(uid drain.UID, holder string, gone bool)
	// Watched lists what holder wants to be observed.
	Watched(holder string) []drain.UID
	// Reports is [Exclusions.Reports] of the pods that are observed.
	Reports() []drain.Report
}

// nothing is the Exclusions of an agent that directs no gateway.
type nothing struct{}

func (nothing) Exclude(drain.Pod, string, time.Time, time.Time) {}
func (nothing) Readmit(drain.UID, string, bool)                 {}
func (nothing) Renew(string, time.Time)                         {}
func (nothing) Held(string) []drain.UID                         { return nil }
func (nothing) Reports() []drain.Report                         { return nil }

// Observer is told what happens to streams. Its methods must not block.
type Observer interface {
	Connected(address string)
	Disconnected(address string)
	Posted(path string, err error)
}

// Client keeps a stream open to every coordinator replica. Make it with New, then Run it.
type Client struct {
	// HTTP makes the requests. It must not have a timeout of its own, and should speak HTTP/1.1
	// over TLS.
	HTTP *http.Client
	// Token returns the bearer token to use now.
	Token func() (string, error)
	// Boot names this life of the agent, Gateway its kind, Population what is said in
	// [wire.Declaration], Routes what it routes.
	Boot, Gateway, Population string
	Routes                    []drain.Route
	// Exclusions may be left as it is by an agent that directs nothing, Watches by one that
	// observes nothing.
	Exclusions Exclusions
	Watches    Watches
	// Health returns what the gateway believes of its targets: the same pointer as long as that is
	// the same, nil if it is not known yet. It must not block. An agent that leaves it nil tells
	// nothing of that.
	Health func() *wire.Summary
	Log    *slog.Logger
	// Observer may be nil.
	Observer Observer

	// left says that Leave was called.
	left atomic.Bool

	mu sync.Mutex
	// declarations counts calls of Declare.
	declarations int
	addresses    []string
	replicas     map[string]*replica
	running      sync.WaitGroup
	changed      chan struct{}
	// learned is closed when each replica that was known at one time had answered our declaration.
	learned     chan struct{}
	learnedOnce sync.Once
}

// replica is the stream to one address.
type replica struct {
	client  *Client
	address string
	cancel  context.CancelFunc
	woken   chan struct{}
	// declared is guarded by client.mu: the present stream has had its answer.
	declared bool

	// saying is held, as a channel of size one is, by a declaration or a leave under way: which of
	// the two a coordinator hears last decides.
	saying chan struct{}

	// opened says that the last stream got as far as its hello. Only run's goroutine uses it.
	opened bool

	mu sync.Mutex
	// hello is that of the open stream, zero without one. open is done when that ends.
	hello wire.Hello
	open  context.Context //nolint:containedctx // it says whether the stream is there
	// released holds, while a declaration is under way, what the stream has released meanwhile.
	released map[drain.UID]bool
	// numbers are those of the drains that the present stream has opened. See [drain.Open].
	numbers map[drain.UID]uint64
	// watches are those of the barriers that it has opened.
	watches map[drain.UID]uint64
	// at is that of the last message of the present stream, see [wire.Message].
	at int64
}

// New returns a client without any replica.
func New() *Client {
	return &Client{Exclusions: nothing{}, replicas: map[string]*replica{}, changed: make(chan struct{}, 1),
		learned: make(chan struct{})}
}

// Replicas sets the base URLs of all coordinator replicas, such as https://10.1.2.3:9444. Streams
// to others end, and new ones begin.
func (c *Client) Replicas(addresses []string) {
	c.mu.Lock()
	c.addresses = slices.Clone(addresses)
	c.mu.Unlock()
	poke(c.changed)
}

// Declare replaces Routes, and tells every replica. It never blocks.
func (c *Client) Declare(routes []drain.Route) {
	c.mu.Lock()
	c.Routes, c.declarations = routes, c.declarations+1
	c.mu.Unlock()
	c.Wake()
}

// routes returns what is to be declared, and which declaration that is.
func (c *Client) routes() ([]drain.Route, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Routes, c.declarations
}

// Wake says that reports may have changed. It never blocks.
func (c *Client) Wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.replicas {
		poke(r.woken)
	}
}

// Leave tells every replica that the gateway accepts nothing any more, for good, so that no
// deletion waits for this agent. Call it when that is so and not before: an agent that is told to
// stop outlives its gateway. Streams that are open go on, for what is excluded, until Run ends;
// none is opened any more. A replica that is not reached finds out by itself when this agent's pod
// is no longer ready. Leave returns what went wrong, after 5 s at most, and no error needs to be
// acted on.
func (c *Client) Leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, postTimeout)
	defer cancel()
	c.mu.Lock()
	c.left.Store(true)
	replicas := slices.Collect(maps.Values(c.replicas))
	c.mu.Unlock()
	errs := make([]error, len(replicas))
	var told sync.WaitGroup
	for i, r := range replicas {
		told.Go(func() { errs[i] = r.leave(ctx) })
	}
	told.Wait()
	return errors.Join(errs...)
}

func (r *replica) leave(ctx context.Context) error {
	select {
	case r.saying <- struct{}{}:
		defer func() { <-r.saying }()
	case <-ctx.Done():
		return fmt.Errorf("leave %s: %w", r.address, ctx.Err())
	}
	r.mu.Lock()
	hello := r.hello
	r.mu.Unlock()
	if hello.Session == 0 {
		return fmt.Errorf("leave %s: no stream is open", r.address)
	}
	if !slices.Contains(hello.Features, wire.FeatureLeave) {
		return fmt.Errorf("leave %s: the coordinator does not know how", r.address)
	}
	if err := r.send(ctx, wire.LeavePath, wire.Leave{Session: hello.Session, Boot: r.client.Boot}, nil); err != nil {
		return fmt.Errorf("leave %s: %w", r.address, err)
	}
	return nil
}

// Learned is closed once every replica known at one time has answered our declaration: all open
// drains are excluded.
func (c *Client) Learned() <-chan struct{} { return c.learned }

// Run keeps the streams open until ctx is done, and returns nil when all have ended.
func (c *Client) Run(ctx context.Context) error {
	for {
		c.mu.Lock()
		for address, r := range c.replicas {
			if !slices.Contains(c.addresses, address) {
				r.cancel()
				delete(c.replicas, address)
			}
		}
		for _, address := range c.addresses {
			if c.replicas[address] == nil {
				replicaCtx, cancel := context.WithCancel(ctx)
				r := &replica{client: c, address: address, cancel: cancel, woken: make(chan struct{}, 1),
					saying: make(chan struct{}, 1)}
				c.replicas[address] = r
				c.running.Go(func() { r.run(replicaCtx) })
			}
		}
		c.learn()
		c.mu.Unlock()
		select {
		case <-c.changed:
			continue
		case <-ctx.Done():
		}
		c.mu.Lock()
		all := c.replicas
		c.replicas = map[string]*replica{}
		c.mu.Unlock()
		for _, r := range all {
			r.cancel()
		}
		c.running.Wait()
		return nil
	}
}

func (r *replica) run(ctx context.Context) {
	pause, lost := pauseFirst, false
	for ctx.Err() == nil && !r.client.left.Load() {
		began := time.Now()
		err := r.stream(ctx)
		r.setDeclared(false)
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelWarn
		if lost && !r.opened {
			level = slog.LevelDebug // it was said when the last stream ended
		}
		lost, r.opened = true, false
		r.client.Log.Log(ctx, level, "stream to coordinator ended", "address", r.address, "error", err)
		if errors.Is(err, errSilent) {
			// What has swallowed the stream has swallowed the connections that wait to be used
			// again.
			r.client.HTTP.CloseIdleConnections()
		}
		if time.Since(began) > maxPause {
			pause = pauseFirst
		}
		timer := time.NewTimer(pause/2 + rand.N(pause/2))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		pause = min(2*pause, maxPause)
	}
}

// offer is what this agent says of itself.
func (c *Client) offer() wire.Offer {
	o := wire.NewOffer(c.Boot)
	if c.Watches == nil {
		o = o.Without(wire.FeatureBarrier)
	}
	if c.Health == nil {
		o = o.Without(wire.FeatureHealth)
	}
	return o
}

// errUnread ends a stream whose coordinator does not read what is reported.
var errUnread = fmt.Errorf("coordinator did not read reports within %s", postTimeout)

// errSilent ends a stream on which nothing came for the time that the coordinator named.
var errSilent = errors.New("coordinator is silent")

// stream opens one stream and serves it until it is lost. The error says why; it is never nil.
func (r *replica) stream(ctx context.Context) error {
	ctx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	watchdog := time.AfterFunc(helloTimeout, func() { lost(errSilent) })
	defer watchdog.Stop()

	request, err := r.request(ctx, http.MethodGet, wire.StreamPath+"?"+r.client.offer().Query(), nil)
	if err != nil {
		return err
	}
	request.Header.Set("Connection", "Upgrade")
	request.Header.Set("Upgrade", wire.Upgrade)
	response, err := r.client.HTTP.Do(request)
	if err != nil {
		return cause(ctx, err)
	}
	defer response.Body.Close()
	// Nil where reports are to be posted.
	var reports io.Writer
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusSwitchingProtocols:
		reports, _ = response.Body.(io.Writer)
		// The connection is no longer the transport's, which would close it.
		defer context.AfterFunc(ctx, func() { response.Body.Close() })()
	default:
		return refused(response)
	}
	lines := newLines(response.Body)
	hello, err := readHello(ctx, lines)
	if err != nil {
		return err
	}
	away := time.Duration(hello.AwayMillis) * time.Millisecond
	watchdog.Reset(away)
	if r.client.Observer != nil {
		r.client.Observer.Connected(r.address)
		defer r.client.Observer.Disconnected(r.address)
	}
	r.client.Log.Info("stream to coordinator opened", "address", r.address, "holder", hello.Holder.String(),
		"session", hello.Session)

	r.opened = true
	r.setHello(ctx, hello)
	defer r.setHello(ctx, wire.Hello{})
	r.mu.Lock()
	r.numbers, r.watches, r.at = map[drain.UID]uint64{}, map[drain.UID]uint64{}, 0
	r.mu.Unlock()
	synced, posted := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(posted)
		// What the answer to the declaration excludes must not be readmitted by a list that is
		// older. See exclude for releases.
		select {
		case <-synced:
		case <-ctx.Done():
			return
		}
		if err := r.post(ctx, hello, func(batch wire.Reports) error {
			return r.report(ctx, batch, reports, lost)
		}); err != nil {
			lost(err)
		}
	}()
	told := r.sendHealth(ctx, hello, reports)
	err = r.receive(lines, hello, func() { watchdog.Reset(away) }, func() { close(synced) })
	err = cause(ctx, err)
	lost(err)
	<-posted
	<-told
	return err
}

// readHello reads and checks the hello that is the first message of a stream.
func readHello(ctx context.Context, lines *lines) (wire.Hello, error) {
	first, err := lines.next()
	if err != nil {
		return wire.Hello{}, cause(ctx, fmt.Errorf("read hello: %w", err))
	}
	if first.Type != wire.TypeHello || first.Hello == nil || !slices.Contains(wire.Spoken(), first.Hello.Protocol) {
		return wire.Hello{}, fmt.Errorf("first message is not a hello of protocol %s: %+v", wire.Spoken(), first)
	}
	hello := *first.Hello
	if hello.AwayMillis <= 0 || hello.ExpiryMillis <= 0 || hello.RenewalMillis <= 0 {
		return wire.Hello{}, fmt.Errorf("hello names no times: %+v", hello)
	}
	return hello, nil
}

// report writes a batch of reports into the stream, or posts it if into is nil. It calls lost if
// the coordinator does not read the batch in time.
func (r *replica) report(ctx context.Context, batch wire.Reports, into io.Writer, lost context.CancelCauseFunc) error {
	if into == nil {
		return r.send(ctx, wire.ReportsPath, batch, nil)
	}
	slow := time.AfterFunc(postTimeout, func() { lost(errUnread) })
	defer slow.Stop()
	_, err := into.Write(wire.AppendReports(nil, batch))
	if r.client.Observer != nil {
		r.client.Observer.Posted(wire.ReportsPath, err)
	}
	return err
}

// receive carries out what the stream says until it ends. It calls heard at each message, and
// complete once, when the list of open drains is.
func (r *replica) receive(lines *lines, hello wire.Hello, heard, complete func()) error {
	t := r.client.Exclusions
	holder := hello.Holder.String()
	expiry := time.Duration(hello.ExpiryMillis) * time.Millisecond
	listed, watched := map[drain.UID]bool{}, map[drain.UID]bool{}
	synced, news := false, false
	for {
		m, err := lines.next()
		if err != nil {
			return err
		}
		heard()
		expires := time.Now().Add(expiry)
		t.Renew(holder, expires)
		// Not before the expiries are renewed: what is reported from now on holds as long as they
		// do.
		r.mu.Lock()
		r.at = m.At
		r.mu.Unlock()
		switch {
		case m.Type == wire.TypeDrain && m.Drain != nil:
			t.Exclude(m.Drain.Pod, holder, m.Drain.Since, expires)
			r.number(*m.Drain)
			if !synced {
				listed[m.Drain.Pod.UID] = true
			}
			news = true // the pod may be excluded already, for another replica
		case m.Type == wire.TypeWatch && m.Watch != nil && r.client.Watches != nil:
			r.watch(*m.Watch, holder)
			if !synced {
				watched[m.Watch.Pod.UID] = true
			}
			news = true
		case m.Type == wire.TypeRelease && m.Release != nil && m.Release.Gate == drain.AtBarrier:
			r.unwatch(*m.Release, holder)
		case m.Type == wire.TypeRelease && m.Release != nil:
			r.readmit(*m.Release, holder)
		case m.Type == wire.TypeSynced && !synced:
			synced = true
			for _, uid := range t.Held(holder) {
				if !listed[uid] {
					t.Readmit(uid, holder, false)
				}
			}
			if r.client.Watches != nil {
				for _, uid := range r.client.Watches.Watched(holder) {
					if !watched[uid] {
						r.client.Watches.Unwatch(uid, holder, false)
					}
				}
			}
			listed, watched = nil, nil
			complete()
		case m.Type == wire.TypeRefused && m.Refused != nil:
			return fmt.Errorf("coordinator refuses: %s", m.Refused.Error)
		}
		if news && !lines.more() {
			news = false
			poke(r.woken)
		}
	}
}

// post declares, and then calls report with whatever changed, until ctx is done or that fails.
func (r *replica) post(ctx context.Context, hello wire.Hello, report func(wire.Reports) error) error {
	renewal := time.NewTicker(time.Duration(hello.RenewalMillis) * time.Millisecond / 2)
	defer renewal.Stop()
	// What was said last, at each gate.
	var said [2]map[drain.UID]drain.Report
	declared := -1
	for everything := true; ; {
		for routes, n := r.client.routes(); declared != n; routes, n = r.client.routes() {
			settled, err := r.declare(ctx, hello, routes)
			if err != nil {
				return err
			}
			if settled {
				declared = n
			}
		}
		var news []drain.Report
		now := [2]map[drain.UID]drain.Report{{}, {}}
		// Asked before the reports: what they say then was read while the expiry stood, and for
		// this drain.
		r.mu.Lock()
		numbers, watches, at := maps.Clone(r.numbers), maps.Clone(r.watches), r.at
		r.mu.Unlock()
		held := map[drain.UID]bool{}
		for _, uid := range r.client.Exclusions.Held(hello.Holder.String()) {
			held[uid] = true
		}
		for _, report := range r.client.Exclusions.Reports() {
			var asked bool
			if report.Number, asked = numbers[report.UID]; !asked || !held[report.UID] {
				continue
			}
			now[drain.AtHold][report.UID] = report
			if everything || said[drain.AtHold][report.UID] != report {
				news = append(news, report)
			}
		}
		if r.client.Watches != nil {
			for _, report := range r.client.Watches.Reports() {
				var asked bool
				if report.Number, asked = watches[report.UID]; !asked {
					continue
				}
				report.Gate = drain.AtBarrier
				now[drain.AtBarrier][report.UID] = report
				if everything || said[drain.AtBarrier][report.UID] != report {
					news = append(news, report)
				}
			}
		}
		if len(news) > 0 {
			if err := report(wire.Reports{Session: hello.Session, At: at, Boot: r.client.Boot,
				Reports: news}); err != nil {
				return err
			}
		}
		said = now
		select {
		case <-r.woken:
			everything = false
		case <-renewal.C:
			everything = true
		case <-ctx.Done():
			return nil
		}
	}
}

// declare says what the gateway routes, and excludes what the coordinator answers. It reports false
// if that has to be done again. An agent that has left declares nothing: it would be waited for
// again.
func (r *replica) declare(ctx context.Context, hello wire.Hello, routes []drain.Route) (settled bool, err error) {
	select {
	case r.saying <- struct{}{}:
		defer func() { <-r.saying }()
	case <-ctx.Done():
		return true, nil
	}
	if r.client.left.Load() {
		return true, nil
	}
	r.mu.Lock()
	r.released = map[drain.UID]bool{}
	r.mu.Unlock()
	var declared wire.Declared
	err = r.send(ctx, wire.DeclarationsPath, wire.Declaration{
		Session: hello.Session, Gateway: r.client.Gateway, Population: r.client.Population, Routes: routes,
	}, &declared)
	if err != nil {
		return false, err
	}
	watching := r.begin(declared.Watches, hello.Holder.String())
	if settled = r.exclude(declared.Drains, hello) && watching; settled {
		r.setDeclared(true)
	}
	return settled, nil
}

// exclude lays the exclusions of the answer to a declaration. It reports false if the stream has
// released one of them meanwhile: which of the two is the later word cannot be told, and an
// exclusion laid after its release would never be readmitted. Declare again then.
func (r *replica) exclude(drains []drain.Open, hello wire.Hello) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	settled := true
	expires := time.Now().Add(time.Duration(hello.ExpiryMillis) * time.Millisecond)
	for _, d := range drains {
		if r.released[d.Pod.UID] {
			settled = false
			continue
		}
		r.client.Exclusions.Exclude(d.Pod, hello.Holder.String(), d.Since, expires)
		r.numbers[d.Pod.UID] = max(r.numbers[d.Pod.UID], d.Number)
	}
	r.released = nil
	return settled
}

// number notes which drain of a pod this is, once its exclusion stands.
func (r *replica) number(d drain.Open) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.numbers[d.Pod.UID] = d.Number
}

// watch begins to observe, and notes which barrier of the pod this is.
func (r *replica) watch(w drain.Watch, holder string) {
	r.client.Watches.Watch(w, holder)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches[w.Pod.UID] = max(w.Number, r.watches[w.Pod.UID])
}

// begin is [replica.exclude] for what is to be observed.
func (r *replica) begin(watches []drain.Watch, holder string) bool {
	if r.client.Watches == nil {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	settled := true
	for _, w := range watches {
		if r.released[w.Pod.UID] {
			settled = false
			continue
		}
		r.client.Watches.Watch(w, holder)
		r.watches[w.Pod.UID] = max(w.Number, r.watches[w.Pod.UID])
	}
	return settled
}

// unwatch ends it, and remembers that while a declaration is under way.
func (r *replica) unwatch(release drain.Release, holder string) {
	r.mu.Lock()
	delete(r.watches, release.UID)
	if r.released != nil {
		r.released[release.UID] = true
	}
	r.mu.Unlock()
	if r.client.Watches != nil {
		r.client.Watches.Unwatch(release.UID, holder, release.Terminating)
	}
}

// readmit carries out a release, and remembers it while a declaration is under way.
func (r *replica) readmit(release drain.Release, holder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released != nil {
		r.released[release.UID] = true
	}
	delete(r.numbers, release.UID)
	r.client.Exclusions.Readmit(release.UID, holder, release.Terminating)
}

// send posts body and decodes the answer into result, if that is not nil.
func (r *replica) send(ctx context.Context, path string, body, result any) error {
	ctx, cancel := context.WithTimeout(ctx, postTimeout)
	defer cancel()
	return r.exchangeJSON(ctx, path, body, result)
}

func (r *replica) encode(ctx context.Context, method, path string, body any) (*http.Request, error) {
	encoded, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode for %s: %w", path, err)
	}
	request, err := r.request(ctx, method, path, bytes.NewReader(encoded))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	return request, nil
}

func (r *replica) exchange(request *http.Request, result any) error {
	response, err := r.client.HTTP.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return refused(response)
	}
	if result != nil {
		if err := json.NewDecoder(response.Body).Decode(result); err != nil {
			return fmt.Errorf("decode answer of %s: %w", request.URL, err)
		}
	}
	// Read to the end, so that the connection can be used again.
	_, err = io.Copy(io.Discard, io.LimitReader(response.Body, maxLine))
	return err
}

func (r *replica) request(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, method, r.address+path, body)
	if err != nil {
		return nil, fmt.Errorf("coordinator address %q: %w", r.address, err)
	}
	token, err := r.client.Token()
	if err != nil {
		return nil, fmt.Errorf("read token for coordinator: %w", err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	return request, nil
}

func (r *replica) setHello(open context.Context, hello wire.Hello) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hello, r.open = hello, open
}

func (r *replica) setDeclared(declared bool) {
	c := r.client
	c.mu.Lock()
	defer c.mu.Unlock()
	r.declared = declared
	c.learn()
}

// learn, called with the lock, closes learned if each replica that is known now has answered.
func (c *Client) learn() {
	if len(c.addresses) == 0 {
		return
	}
	for _, address := range c.addresses {
		if other := c.replicas[address]; other == nil || !other.declared {
			return
		}
	}
	c.learnedOnce.Do(func() { close(c.learned) })
}

// refused turns an answer that is not a success into an error.
func refused(response *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
	var said wire.Error
	if json.Unmarshal(body, &said) != nil || said.Error == "" {
		said.Error = string(body)
	}
	return fmt.Errorf("coordinator %s answers %s to %s: %s", response.Request.URL.Host, response.Status,
		response.Request.URL.Path, said.Error)
}

// cause prefers the reason for which ctx was cancelled to the error that the cancellation caused.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil && !errors.Is(why, context.Canceled) {
		return why
	}
	return err
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

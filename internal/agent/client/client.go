// Package client is the agent's side of the protocol in package wire: one stream to each
// coordinator replica, kept open, and the posts that go with it. Package coordinator is the other
// side.
//
// The state of one stream is a [Session], which makes the decisions and does no I/O. Each replica
// has a goroutine of its own that knows one address. It opens the stream, excludes what is being
// drained, declares what the gateway routes, and then passes messages in both directions until the
// stream is lost. Then it connects again, after a pause of at most 2 s. The coordinator treats an
// agent as lost after 5 s (drain.Times.Away).
//
// An exclusion has an expiry for each holder, which is one epoch of a replica. Every message of a
// stream renews the exclusions of its holder. After a complete list of open drains
// ([wire.TypeSynced] for a declaration), the client ends the exclusions of that holder that are not
// in the list. Other holders keep theirs.
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
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// PostTimeout bounds a declaration, Leave, and the write of a batch of reports.
	PostTimeout = 5 * time.Second
	// LearnTimeout bounds the wait for [Client.Learned]: after it an agent programs its gateway
	// without the open drains.
	LearnTimeout = 3 * time.Second
	// declareAgain is how often an agent declares again while it may not acknowledge in a namespace
	// of its routes: the right may have been granted.
	declareAgain = time.Minute
	// declareLater is the pause after a declaration that came too soon after others.
	declareLater = time.Second
	// helloTimeout bounds the wait for the first message of a stream.
	helloTimeout = 5 * time.Second
	pauseFirst   = 100 * time.Millisecond
	maxPause     = 2 * time.Second
	// maxLine bounds one message of a stream, in bytes.
	maxLine = 1 << 20
)

// Exclusions are the exclusions that the client begins, renews and ends, and whose states it
// reports. Its methods must not block.
type Exclusions interface {
	// Exclude begins or renews an exclusion for holder until expires.
	Exclude(now time.Time, pod drain.Pod, holder string, since, expires time.Time)
	// Readmit ends the exclusion for holder. dead: the pod is terminating or deleted, and must not
	// be routed again.
	Readmit(now time.Time, uid drain.UID, holder string, dead bool)
	// Renew extends all of holder's expiries.
	Renew(now time.Time, holder string, expires time.Time)
	// Held returns the pods that holder excludes.
	Held(holder string) []drain.UID
	// Reports returns the present state of every exclusion of any holder. The client sets Number,
	// and sends each replica the reports that it has asked for.
	Reports(now time.Time) []drain.Report
}

// Watches are the pods that coordinators want observed, and the reports about them. Its methods
// must not block.
type Watches interface {
	// Watch begins to observe a pod for holder, or updates w.
	Watch(now time.Time, w drain.Watch, holder string)
	// Unwatch ends the observation for holder. gone: the pod is deleted.
	Unwatch(now time.Time, uid drain.UID, holder string, gone bool)
	// Watched returns the pods that holder wants observed.
	Watched(holder string) []drain.UID
	// Reports is [Exclusions.Reports] of the pods that are observed.
	Reports(now time.Time) []drain.Report
}

// nothing is the Exclusions of an agent that directs no gateway.
type nothing struct{}

func (nothing) Exclude(time.Time, drain.Pod, string, time.Time, time.Time) {}
func (nothing) Readmit(time.Time, drain.UID, string, bool)                 {}
func (nothing) Renew(time.Time, string, time.Time)                         {}
func (nothing) Held(string) []drain.UID                                    { return nil }
func (nothing) Reports(time.Time) []drain.Report                           { return nil }

// Observer counts the events of streams, for metrics. Its methods must not block.
type Observer interface {
	Connected(address string)
	Disconnected(address string)
}

// Client keeps a stream open to every coordinator replica. Make it with New, then Run it.
type Client struct {
	// HTTP makes the requests. It must have no timeout, and must use HTTP/1.1: a stream is an
	// upgraded connection.
	HTTP *http.Client
	// Token returns the bearer token to use now.
	Token func() (string, error)
	// Boot names this life of the agent's process, Gateway is the kind of its gateway. Population,
	// GatewayMode and Routes are those of [wire.Declaration].
	Boot, Gateway, Population, GatewayMode string
	Routes                                 []drain.Route
	// Exclusions may be nil if the agent directs nothing, Watches if it observes nothing.
	Exclusions Exclusions
	Watches    Watches
	// Health returns the health report, by the same pointer while it does not change, nil if it is
	// not known yet. It must not block. Without Health, no health is reported.
	Health func() *wire.Summary
	Log    *slog.Logger
	// Observer counts what happens on the streams.
	Observer Observer

	// left: Leave was called.
	left atomic.Bool

	mu sync.Mutex
	// declarations counts calls of Declare.
	declarations int
	addresses    []string
	replicas     map[string]*replica
	running      sync.WaitGroup
	changed      signal.Signal
	// learned is closed when all replicas known at some moment had sent the open drains of the
	// declared Services.
	learned     chan struct{}
	learnedOnce sync.Once
}

// replica is the stream to one address.
type replica struct {
	client  *Client
	address string
	cancel  context.CancelFunc
	woken   signal.Signal
	// declared is guarded by client.mu: the present stream has brought the open drains of the
	// declared Services.
	declared bool

	// saying is a lock, as a channel of size one, for declarations and Leave: of these, the last
	// one that a coordinator receives counts.
	saying chan struct{}

	// opened: the last stream received its hello. Only run's goroutine uses it.
	opened bool

	mu sync.Mutex
	// session is that of the open stream, nil without one. open is done when that ends.
	session *Session
	open    context.Context //nolint:containedctx // done when the stream ends
}

// New returns a client without any replica.
func New() *Client {
	return &Client{replicas: map[string]*replica{}, changed: signal.New(),
		learned: make(chan struct{})}
}

// Replicas sets the base URLs of all coordinator replicas, such as https://10.1.2.3:9444. Streams
// to others end, and new ones begin.
func (c *Client) Replicas(addresses []string) {
	c.mu.Lock()
	c.addresses = slices.Clone(addresses)
	c.mu.Unlock()
	c.changed.Raise()
}

// Declare replaces GatewayMode and Routes, and sends them to every replica. It never blocks.
func (c *Client) Declare(mode string, routes []drain.Route) {
	c.mu.Lock()
	c.GatewayMode, c.Routes, c.declarations = mode, routes, c.declarations+1
	c.mu.Unlock()
	c.Wake()
}

// declaration returns the declaration to send, without its session, and its number.
func (c *Client) declaration() (wire.Declaration, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return wire.Declaration{Gateway: c.Gateway, Population: c.Population, GatewayMode: c.GatewayMode,
		Routes: c.Routes}, c.declarations
}

// Wake makes the client read the reports again. It never blocks.
func (c *Client) Wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.replicas {
		r.woken.Raise()
	}
}

// Leave reports to every replica that the gateway permanently accepts no more traffic, so that no
// deletion waits for this agent. Call it only when that is so: an agent that is asked to stop
// usually ends before its gateway. Open streams continue for existing exclusions until Run ends; no
// new one is opened. A replica that is not reached stops waiting when this agent's pod is no longer
// ready. Leave returns within 5 s. Its error is for the log: the caller need not act on it.
func (c *Client) Leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, PostTimeout)
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
	session, _ := r.current()
	if session == nil {
		return fmt.Errorf("leave %s: no stream is open", r.address)
	}
	if !slices.Contains(session.Hello.Features, wire.FeatureLeave) {
		return fmt.Errorf("leave %s: the coordinator does not know how", r.address)
	}
	leave := wire.Leave{Session: session.Hello.Session, Boot: r.client.Boot}
	if err := r.send(ctx, wire.LeavePath, leave, nil); err != nil {
		return fmt.Errorf("leave %s: %w", r.address, err)
	}
	return nil
}

// Learned returns a channel that is closed once every replica that Replicas named has sent the open
// drains of the declared Services. All of these pods are excluded then.
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
				r := &replica{client: c, address: address, cancel: cancel, woken: signal.New(),
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
	var pauses Pauses
	lost := false
	for ctx.Err() == nil && !r.client.left.Load() {
		began := time.Now()
		err := r.stream(ctx)
		r.setDeclared(false)
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelWarn
		if lost && !r.opened {
			level = slog.LevelDebug // logged when the last stream ended
		}
		lost, r.opened = true, false
		r.client.Log.Log(ctx, level, "stream to coordinator ended", "address", r.address, "error", err)
		if errors.Is(err, errSilent) {
			// The failure that ended the stream silently affects unused connections too.
			r.client.HTTP.CloseIdleConnections()
		}
		signal.Sleep(ctx, pauses.Next(time.Since(began), rand.N[time.Duration]))
	}
}

// Pauses computes the pauses between the streams to one replica. The zero value has had none.
type Pauses struct{ last time.Duration }

// Next returns the pause after a stream that lasted for some time. random returns a duration that
// is less than most.
func (p *Pauses) Next(lasted time.Duration, random func(most time.Duration) time.Duration) time.Duration {
	if p.last = min(2*p.last, maxPause); p.last == 0 || lasted > maxPause {
		p.last = pauseFirst
	}
	return p.last/2 + random(p.last/2)
}

// offer returns how this agent introduces itself.
func (c *Client) offer() wire.Offer {
	o := wire.NewOffer(c.Boot)
	o.Build = version.Build()
	if c.Watches == nil {
		o = o.Without(wire.FeatureBarrier)
	}
	if c.Health == nil {
		o = o.Without(wire.FeatureHealth)
	}
	return o
}

// errUnread ends a stream whose coordinator does not read what is reported.
var errUnread = fmt.Errorf("coordinator did not read reports within %s", PostTimeout)

// errSilent ends a stream on which nothing came for the time that the coordinator named.
var errSilent = errors.New("coordinator is silent")

// errNotUpgraded is what a proxy between agent and coordinator causes, and nothing else.
var errNotUpgraded = errors.New("coordinator answers 200 to the request to upgrade the stream: a proxy on the way to " +
	"it does not pass on upgrades")

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
	switch response.StatusCode {
	case http.StatusSwitchingProtocols:
	case http.StatusOK:
		return errNotUpgraded
	default:
		return refused(response)
	}
	into, _ := response.Body.(io.Writer)
	// The connection is no longer the transport's, which would close it.
	defer context.AfterFunc(ctx, func() { response.Body.Close() })()
	lines := lines{bufio.NewReader(response.Body)}
	first, err := lines.next()
	if err != nil {
		return cause(ctx, fmt.Errorf("read hello: %w", err))
	}
	session, err := NewSession(first, r.client.Boot, r.client.Exclusions, r.client.Watches)
	if err != nil {
		return err
	}
	defer func() { session.End(time.Now()) }()
	hello := session.Hello
	away := time.Duration(hello.AwayMillis) * time.Millisecond
	watchdog.Reset(away)
	r.client.Observer.Connected(r.address)
	defer r.client.Observer.Disconnected(r.address)
	r.client.Log.Info("stream to coordinator opened", "address", r.address, "holder", hello.Holder.String(),
		"session", hello.Session)

	r.opened = true
	r.setCurrent(ctx, session)
	defer r.setCurrent(ctx, nil)
	synced, reported := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(reported)
		select {
		case <-synced:
		case <-ctx.Done():
			return
		}
		if err := r.report(ctx, session, into, lost); err != nil {
			lost(err)
		}
	}()
	told := r.sendHealth(ctx, hello, into)
	err = r.receive(session, lines, func() { watchdog.Reset(away) }, func() { close(synced) })
	err = cause(ctx, err)
	lost(err)
	<-reported
	<-told
	return err
}

// write writes lines into the stream. It calls lost if the coordinator does not read them in time.
func (r *replica) write(into io.Writer, lines []byte, lost context.CancelCauseFunc) error {
	slow := time.AfterFunc(PostTimeout, func() { lost(errUnread) })
	defer slow.Stop()
	_, err := into.Write(lines)
	return err
}

// receive carries out the messages of the stream until it ends. It calls heard at each message, and
// complete once, when the list of open drains is complete.
func (r *replica) receive(session *Session, lines lines, heard, complete func()) error {
	changed := false
	for {
		m, err := lines.next()
		if err != nil {
			return err
		}
		heard()
		synced, news, err := session.Message(time.Now(), m)
		if err != nil {
			return err
		}
		if synced {
			complete()
		}
		if m.Declared > 0 {
			r.setDeclared(session.Learned())
		}
		if changed = changed || news; changed && !lines.more() {
			changed = false
			r.woken.Raise()
		}
	}
}

// report declares the routes, and then writes reports until ctx is done or a write fails.
func (r *replica) report(ctx context.Context, session *Session, into io.Writer, lost context.CancelCauseFunc) error {
	renewal := time.NewTicker(time.Duration(session.Hello.RenewalMillis) * time.Millisecond / 2)
	defer renewal.Stop()
	declared, declaredAt, refused := -1, time.Time{}, []string{}
	var later <-chan time.Time // nil: declare at once
	for everything := true; ; {
		for d, n := r.client.declaration(); declared != n && later == nil; d, n = r.client.declaration() {
			now, err := r.declare(ctx, session, d)
			if errors.Is(err, errTooMany) || errors.Is(err, errTooLarge) {
				if later = time.After(declareLater); errors.Is(err, errTooLarge) {
					r.client.Log.Error("declare routes: deletions wait for those declared before", "error", err)
					later = time.After(time.Minute)
				}
				break
			}
			if err != nil {
				return err
			}
			if declared, declaredAt = n, time.Now(); !slices.Equal(now, refused) {
				r.client.Log.Warn("the namespaces in which the agent may not acknowledge have changed: deletions "+
					"there do not wait for it", "namespaces", now, "before", refused, "coordinator", r.address)
				refused = now
			}
		}
		if batch := session.Reports(time.Now(), everything); batch.UpTo != nil || len(batch.Reports) > 0 {
			if err := r.write(into, wire.Append(nil, batch), lost); err != nil {
				return err
			}
		}
		select {
		case <-r.woken:
			everything = false
		case <-later:
			later = nil
		case <-renewal.C:
			everything = true
			if len(refused) > 0 && time.Since(declaredAt) >= declareAgain {
				declared = -1
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// declare posts the routes of the gateway. The stream then brings their open drains. An agent that
// has left declares nothing, because deletions would wait for it again. refused are the namespaces
// in which it may not acknowledge.
func (r *replica) declare(ctx context.Context, session *Session, d wire.Declaration) (refused []string, err error) {
	select {
	case r.saying <- struct{}{}:
		defer func() { <-r.saying }()
	case <-ctx.Done():
		return nil, nil
	}
	if r.client.left.Load() {
		return nil, nil
	}
	d.Session = session.Hello.Session
	var declared wire.Declared
	if err := r.send(ctx, wire.DeclarationsPath, d, &declared); err != nil {
		return nil, err
	}
	session.Declared(declared)
	if session.Learned() {
		r.setDeclared(true)
	}
	return declared.Refused, nil
}

// send posts body and decodes the answer into result, if that is not nil.
func (r *replica) send(ctx context.Context, path string, body, result any) error {
	ctx, cancel := context.WithTimeout(ctx, PostTimeout)
	defer cancel()
	return r.exchange(ctx, path, body, result)
}

// exchange is send without a time limit of its own.
func (r *replica) exchange(ctx context.Context, path string, body, result any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode for %s: %w", path, err)
	}
	request, err := r.request(ctx, http.MethodPost, path, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
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

func (r *replica) setCurrent(open context.Context, session *Session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.session, r.open = session, open
}

func (r *replica) current() (session *Session, open context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.session, r.open
}

func (r *replica) setDeclared(declared bool) {
	c := r.client
	c.mu.Lock()
	defer c.mu.Unlock()
	r.declared = declared
	c.learn()
}

// learn, called with the lock, closes learned if all replicas that are known now have answered.
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
	err := fmt.Errorf("coordinator %s answers %s to %s: %s", response.Request.URL.Host, response.Status,
		response.Request.URL.Path, said.Error)
	if response.StatusCode == http.StatusTooManyRequests {
		return fmt.Errorf("%w: %v", errTooMany, err)
	}
	if response.StatusCode == http.StatusRequestEntityTooLarge {
		return fmt.Errorf("%w: %v", errTooLarge, err)
	}
	return err
}

// errTooLarge is wrapped by the error of a request that a coordinator refuses for its size. What
// was declared before it still holds.
var errTooLarge = errors.New("too large")

// errTooMany is wrapped by the error of a request that came too soon after others of this agent.
var errTooMany = errors.New("too many requests of this agent")

// cause prefers the reason for which ctx was cancelled to the error that the cancellation caused.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil && !errors.Is(why, context.Canceled) {
		return why
	}
	return err
}

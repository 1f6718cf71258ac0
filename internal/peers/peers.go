// Package peers asks the other replicas of the coordinator.
//
// Each replica is an entry of the webhook configuration, so the API server asks all of them about
// every deletion, and one denial denies. What takes capacity (a place in a PodDisruptionBudget,
// half of a Service) must be decided in one order, or two evictions lock each other out: one
// replica lets the first go and refuses the second, the other one the reverse. So one replica
// decides that: the opener, the ready one with the lowest ordinal. The others are witnesses: a
// witness asks the opener before it opens a drain of its own, and then waits for the gateways by
// itself. Which pod is the last target follows from EndpointSlices and from this order, and each
// replica reads it for itself.
//
// A replica that does not answer is not asked again until a poll has reached it, so it delays the
// calls of one moment by [claimTime] at most. A witness that cannot reach any replica before it
// decides for itself: what is lost then is the common order, not the acknowledgements.
package peers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// claimTime is how long a claim may take. A hold is longer by more than that.
	claimTime = time.Second
	// pollEvery is how often each replica is polled, pollTime how long that may take.
	pollEvery = time.Second
	pollTime  = time.Second
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 16 << 20
)

// Peer is another replica, as its pod says.
type Peer struct {
	Ordinal int
	// Name is that of its pod.
	Name string
	// URL is where its API for agents is, such as https://10.0.0.1:9444.
	URL string
	// Ready is the condition of its pod.
	Ready bool
}

// Peers are the other replicas. Make it with New. Safe for concurrent use.
type Peers struct {
	// Ordinal and Name are those of this replica.
	Ordinal int
	Name    string
	// Client reaches the others, Token returns what proves who this one is.
	Client *http.Client
	Token  func() (string, error)
	Log    *slog.Logger
	// Able is why this replica cannot judge deletions now: it then leaves capacity to any other.
	// Nil: it always can. Polled is given, after each poll, what each replica that answers told
	// last. May be nil.
	Able   func() error
	Polled func([]wire.Replica)

	mu    sync.Mutex
	peers map[string]*peer
}

// peer is what is known of one.
type peer struct {
	Peer
	// silent says that the last question got no answer, polled that it has answered a poll and each
	// question since. state is its last answer to a poll.
	silent, polled bool
	state          wire.Replica
}

// New returns Peers without any.
func New(ordinal int, name string, client *http.Client, token func() (string, error), log *slog.Logger) *Peers {
	return &Peers{Ordinal: ordinal, Name: name, Client: client, Token: token, Log: log, peers: map[string]*peer{}}
}

// Set adds a replica, or changes what is known of it.
func (p *Peers) Set(of Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.peers[of.Name]; known != nil {
		known.Peer = of
		return
	}
	p.peers[of.Name] = &peer{Peer: of}
}

// Remove forgets a replica whose pod is gone.
func (p *Peers) Remove(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, name)
}

// Run polls the others until ctx is done.
func (p *Peers) Run(ctx context.Context) error {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	for {
		p.poll(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// poll asks each replica how it is.
func (p *Peers) poll(ctx context.Context) {
	var asking sync.WaitGroup
	for _, of := range p.list(func(*peer) bool { return true }) {
		asking.Go(func() {
			var state wire.Replica
			err := p.ask(ctx, of, http.MethodGet, wire.ReplicaPath, nil, &state, pollTime)
			p.heard(ctx, of, err, func(known *peer) { known.polled, known.state = true, state })
		})
	}
	asking.Wait()
	if p.Polled != nil {
		p.Polled(p.told())
	}
}

// told returns what each replica that answers told last.
func (p *Peers) told() (states []wire.Replica) {
	for _, of := range p.list(func(of *peer) bool { return !of.silent && of.polled }) {
		states = append(states, of.state)
	}
	return states
}

// Opener reports whether this replica decides what takes capacity: no replica before it is ready
// and answers.
func (p *Peers) Opener() bool { return len(p.before()) == 0 }

// Claim asks the opener about a deletion, and takes [claimTime] at most. ok is false if this
// replica is the opener, or must act as one: none that is before it answers.
func (p *Peers) Claim(ctx context.Context, claim wire.Claim) (claimed wire.Claimed, ok bool) {
	within, cancel := context.WithTimeout(ctx, claimTime)
	defer cancel()
	for _, of := range p.before() {
		if within.Err() != nil {
			break // nothing is known of those that were not asked
		}
		claimed = wire.Claimed{}
		err := p.ask(within, of, http.MethodPost, wire.ClaimsPath, claim, &claimed, claimTime)
		p.heard(ctx, of, err, nil)
		if err == nil && (claimed.Verdict == wire.VerdictDrain || claimed.Verdict == wire.VerdictDeny) {
			return claimed, true
		}
	}
	return wire.Claimed{}, false
}

// Asked reports whether the API server has asked the replica of another entry about the pod within
// the last time. Of two pods of one entry, a call reaches one.
func (p *Peers) Asked(ctx context.Context, pod drain.Pod, within time.Duration) bool {
	for _, of := range p.list(func(of *peer) bool { return !of.silent && of.Ordinal != p.Ordinal }) {
		var claimed wire.Claimed
		err := p.ask(ctx, of, http.MethodPost, wire.ClaimsPath, wire.Claim{Pod: pod, OnlyAsked: true}, &claimed,
			claimTime)
		p.heard(ctx, of, err, nil)
		if err == nil && claimed.AskedMillis >= 0 && claimed.AskedMillis <= within.Milliseconds() {
			return true
		}
	}
	return false
}

// Open returns the open drains of the other replicas. silent names those that are ready and did not
// tell.
func (p *Peers) Open(ctx context.Context) (claims []drain.Claim, silent []string) {
	p.poll(ctx)
	for _, of := range p.list(func(of *peer) bool { return of.Ready && (of.silent || !of.polled) }) {
		silent = append(silent, of.Name)
	}
	for _, state := range p.told() {
		claims = append(claims, state.Drains...)
	}
	return claims, silent
}

// Sees returns a ready replica that has streams of at least half of the agents it expects. ok is
// false if there is none.
func (p *Peers) Sees() (name string, ok bool) {
	for _, of := range p.list(func(of *peer) bool { return of.Ready && !of.silent && of.polled && of.state.Ready }) {
		if of.state.Expected > 0 && 2*of.state.Missing <= of.state.Expected {
			return of.Name, true
		}
	}
	return "", false
}

// before returns the replicas that come before this one and can be asked, the first one first.
// While a replica is being replaced there are two of one ordinal: their names decide. All come
// before a replica that cannot judge.
func (p *Peers) before() []peer {
	able := p.Able == nil || p.Able() == nil
	return p.list(func(of *peer) bool {
		first := of.Ordinal < p.Ordinal || of.Ordinal == p.Ordinal && of.Name < p.Name
		return of.Ready && !of.silent && (first || !able)
	})
}

// list returns copies of those replicas that are so, by their ordinals.
func (p *Peers) list(is func(*peer) bool) []peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []peer
	for _, of := range p.peers {
		if is(of) {
			all = append(all, *of)
		}
	}
	slices.SortFunc(all, func(a, b peer) int {
		return cmp.Or(cmp.Compare(a.Ordinal, b.Ordinal), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// heard notes whether a replica has answered, unless the caller had gone away.
func (p *Peers) heard(ctx context.Context, of peer, err error, then func(*peer)) {
	if ctx.Err() != nil {
		return
	}
	p.mu.Lock()
	known := p.peers[of.Name]
	if known == nil || known.URL != of.URL {
		p.mu.Unlock()
		return
	}
	changed := known.silent != (err != nil)
	known.silent, known.polled = err != nil, known.polled && err == nil
	if err == nil && then != nil {
		then(known)
	}
	p.mu.Unlock()
	switch {
	case !changed:
	case err != nil:
		p.Log.Warn("replica does not answer", "replica", of.Name, "ordinal", of.Ordinal, "ready", of.Ready,
			"error", err)
	default:
		p.Log.Info("replica answers again", "replica", of.Name, "ordinal", of.Ordinal)
	}
}

// ask sends one request.
func (p *Peers) ask(ctx context.Context, of peer, method, path string, say, answer any, most time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	token, err := p.Token()
	if err != nil {
		return err
	}
	var body bytes.Buffer
	if say != nil {
		if err := json.NewEncoder(&body).Encode(say); err != nil {
			return err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, of.URL+path, &body)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := p.Client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	decoder := json.NewDecoder(http.MaxBytesReader(nil, response.Body, maxAnswer))
	if response.StatusCode != http.StatusOK {
		var refused wire.Error
		_ = decoder.Decode(&refused)
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, refused.Error)
	}
	err = decoder.Decode(answer)
	_, _ = io.Copy(io.Discard, response.Body) // a connection is used again only after the end of what it brought
	return err
}

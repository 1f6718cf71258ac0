// Package peers connects the replicas of the coordinator: it polls them, and asks the opener about
// deletions. It decides no deletion itself; package admission calls it, and package coordinator
// answers.
//
// Each replica is an entry of the webhook configuration, so the API server asks all of them about
// every deletion, and one denial denies. Deletions that take capacity (of a PodDisruptionBudget or
// of a Service) must be decided in one order. Otherwise two evictions can block each other: one
// replica allows the first and refuses the second, and another replica does the reverse. So one
// replica decides about capacity: the opener, which is the ready replica with the lowest ordinal.
// The others are witnesses: a witness asks the opener before it opens a drain of its own, and then
// waits for the gateways by itself. Which pod is the last target follows from EndpointSlices and
// from this order, and each replica reads it for itself.
//
// A replica that does not answer is not asked again until a poll has reached it, so it delays the
// calls of one moment by [ClaimTime] at most. A witness that cannot reach any replica with a lower
// ordinal decides for itself. The common order is lost then, but not the acknowledgements.
package peers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
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
	// ClaimTime bounds a claim. It must be shorter than a hold.
	ClaimTime = time.Second
	// PollTime is how long a replica may take to answer a poll.
	PollTime = time.Second
	// pollEvery is the interval between two polls of a replica. AdoptEvery is the interval while
	// this replica starts and adopts the open drains of the others.
	pollEvery  = time.Second
	AdoptEvery = 250 * time.Millisecond
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 16 << 20
)

// Peer is another replica, by its pod.
type Peer struct {
	Ordinal int
	// Name is the name of its pod.
	Name string
	// URL is where its API for agents is, such as https://10.0.0.1:9444.
	URL string
	// Ready is the condition of its pod.
	Ready bool
}

// Table is what one replica knows of the others, and what follows from that. It sends no requests.
// Safe for concurrent use.
type Table struct {
	// Ordinal and Name are those of this replica.
	Ordinal int
	Name    string
	// Able returns the reason why this replica cannot judge deletions now, or nil. While it cannot,
	// any other replica comes before it.
	Able func() error

	mu    sync.Mutex
	peers map[string]*peer
	// began is when the others were first polled, which is when this replica knew the cluster.
	// settled: that was [Settle] ago. adopted: it knows the open drains of the others.
	began            time.Time
	settled, adopted bool
}

// peer is the state of one other replica.
type peer struct {
	Peer
	// silent: the last request got no answer. polled: it has answered a poll and each request
	// since. state is its last answer to a poll.
	silent, polled bool
	state          wire.Replica
}

// Peers are the other replicas. Make it with New. Safe for concurrent use.
type Peers struct {
	Table
	// Client connects to the others, Token returns the token that identifies this replica.
	Client *http.Client
	Token  func() (string, error)
	Log    *slog.Logger
	// Polled is called after each poll with the last state of each replica that answers, and
	// whether to adopt its drains.
	Polled func(told []wire.Replica, adopt bool)
}

// New returns Peers without any replicas.
func New(ordinal int, name string, client *http.Client, token func() (string, error), log *slog.Logger) *Peers {
	return &Peers{Table: Table{Ordinal: ordinal, Name: name}, Client: client, Token: token, Log: log}
}

// Set adds a replica, or changes what is known of it.
func (t *Table) Set(of Peer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known := t.peers[of.Name]; known != nil {
		known.Peer = of
		return
	}
	if t.peers == nil {
		t.peers = map[string]*peer{}
	}
	t.peers[of.Name] = &peer{Peer: of}
}

// Remove forgets a replica whose pod is deleted.
func (t *Table) Remove(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.peers, name)
}

// Run polls the others until ctx is done, from the moment when synced reports that this replica
// knows the cluster.
func (p *Peers) Run(ctx context.Context, synced func() bool) error {
	timer := time.NewTimer(AdoptEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		began, again := time.Now(), AdoptEvery
		if synced() {
			again = p.poll(ctx)
		}
		timer.Reset(time.Until(began.Add(again)))
	}
}

// poll polls each replica once. It returns the time until the next poll.
func (p *Peers) poll(ctx context.Context) time.Duration {
	var asking sync.WaitGroup
	for _, of := range p.All() {
		asking.Go(func() {
			var state wire.Replica
			err := p.ask(ctx, of, http.MethodGet, wire.ReplicaPath, nil, &state, PollTime)
			p.heard(ctx, of, err, &state)
		})
	}
	asking.Wait()
	return p.Heed(time.Now(), p.Polled)
}

// Heed processes the result of a poll. Call it when each replica has answered or has timed out. It
// calls polled with the last states of the replicas that answer, and with whether to adopt their
// open drains. It returns the time until the next poll. A replica that starts adopts open drains
// until all ready replicas have answered, for at most [Settle]. After that it adopts the drains
// that other replicas open until it is ready itself, for at most twice [Settle].
func (t *Table) Heed(now time.Time, polled func(told []wire.Replica, adopt bool)) (again time.Duration) {
	up, able := t.settle(now), t.Able() == nil
	silent := len(t.list(func(of *peer) bool { return of.Ready && (of.silent || !of.polled) }))
	var told []wire.Replica
	for _, of := range t.list(func(of *peer) bool { return !of.silent && of.polled }) {
		told = append(told, of.state)
	}
	adopt := t.Known() != nil || !able && up < 2*Settle
	polled(told, adopt)
	if !adopt {
		return pollEvery
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.adopted = t.adopted || silent == 0 || up >= Settle // not before the others are known
	return AdoptEvery
}

// settle returns the time since the first call.
func (t *Table) settle(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.began.IsZero() {
		t.began = now
	}
	t.settled = now.Sub(t.began) >= Settle
	return now.Sub(t.began)
}

func (t *Table) hasSettled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.settled
}

// Known returns nil when the open drains of the other replicas are known.
func (t *Table) Known() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.adopted {
		return nil
	}
	return errors.New("the open drains of the other replicas are not known yet")
}

// Opener reports whether this replica decides about capacity, because no replica before it is ready
// and answers.
func (t *Table) Opener() bool { return len(t.Before()) == 0 }

// Claim asks the opener about a deletion, for at most [ClaimTime]. ok is false if this replica is
// the opener, or must act as the opener because no replica before it has judged the deletion.
func (p *Peers) Claim(ctx context.Context, claim wire.Claim) (claimed wire.Claimed, ok bool) {
	return p.first(ctx, p.Before(), claim, Judged)
}

// Judged reports whether a replica has judged the deletion that it was asked about.
func Judged(c wire.Claimed) bool {
	return c.Verdict == wire.VerdictDrain || c.Verdict == wire.VerdictDeny
}

// Asked reports whether the API server has asked the replica of another entry about the pod, no
// longer than within ago. If an entry has two pods, a call reaches only one of them.
func (p *Peers) Asked(ctx context.Context, pod drain.Pod, within time.Duration) bool {
	_, asked := p.first(ctx, p.Beside(), wire.Claim{Pod: pod, OnlyAsked: true},
		func(c wire.Claimed) bool { return AskedWithin(c, within) })
	return asked
}

// AskedWithin reports whether the API server had asked a replica, no longer than within before its
// answer c.
func AskedWithin(c wire.Claimed, within time.Duration) bool {
	return c.AskedMillis >= 0 && c.AskedMillis <= within.Milliseconds()
}

// first asks one replica after the other, and returns the first answer for which counts returns
// true.
func (p *Peers) first(ctx context.Context, all []Peer, claim wire.Claim,
	counts func(wire.Claimed) bool) (claimed wire.Claimed, ok bool) {
	within, cancel := context.WithTimeout(ctx, ClaimTime)
	defer cancel()
	for _, of := range all {
		if within.Err() != nil {
			break // nothing is known of those that were not asked
		}
		claimed = wire.Claimed{}
		err := p.ask(within, of, http.MethodPost, wire.ClaimsPath, claim, &claimed, ClaimTime)
		p.heard(ctx, of, err, nil)
		if err == nil && counts(claimed) {
			return claimed, true
		}
	}
	return wire.Claimed{}, false
}

// Sees returns a ready replica that has streams of at least half of the agents it expects. ok is
// false if there is none.
func (t *Table) Sees() (name string, ok bool) {
	for _, of := range t.list(func(of *peer) bool { return of.Ready && !of.silent && of.polled && of.state.Ready }) {
		if of.state.Expected > 0 && 2*of.state.Missing <= of.state.Expected {
			return of.Name, true
		}
	}
	return "", false
}

// Before returns the replicas that come before this one and can be asked, in their order. The order
// is by ordinal and, because an ordinal has two pods during a replacement, by name. If this replica
// cannot judge deletions, all others come before it.
func (t *Table) Before() []Peer {
	able := t.Able() == nil
	return peersOf(t.list(func(of *peer) bool {
		first := of.Ordinal < t.Ordinal || of.Ordinal == t.Ordinal && of.Name < t.Name
		return of.Ready && !of.silent && (first || !able)
	}))
}

// Beside returns the replicas of other entries that can be asked.
func (t *Table) Beside() []Peer {
	return peersOf(t.list(func(of *peer) bool { return !of.silent && of.Ordinal != t.Ordinal }))
}

// All returns all replicas, by their ordinals.
func (t *Table) All() []Peer { return peersOf(t.list(func(*peer) bool { return true })) }

func peersOf(all []peer) []Peer {
	of := make([]Peer, len(all))
	for i, p := range all {
		of[i] = p.Peer
	}
	return of
}

// list returns copies of the replicas for which is returns true, sorted by ordinal and name.
func (t *Table) list(is func(*peer) bool) []peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []peer
	for _, of := range t.peers {
		if is(of) {
			all = append(all, *of)
		}
	}
	slices.SortFunc(all, func(a, b peer) int {
		return cmp.Or(cmp.Compare(a.Ordinal, b.Ordinal), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Heard records whether a replica has answered and, if state is not nil, its answer to a poll. It
// returns whether answered differs from the last time.
func (t *Table) Heard(of Peer, answered bool, state *wire.Replica) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.peers[of.Name]
	if known == nil || known.URL != of.URL {
		return false
	}
	changed = known.silent == answered
	known.silent, known.polled = !answered, known.polled && answered
	if answered && state != nil {
		known.polled, known.state = true, *state
	}
	return changed
}

// heard records and logs whether a replica has answered, unless ctx is done.
func (p *Peers) heard(ctx context.Context, of Peer, err error, state *wire.Replica) {
	switch {
	case ctx.Err() != nil || !p.Heard(of, err == nil, state):
	case err != nil:
		p.Log.Warn("replica does not answer", "replica", of.Name, "ordinal", of.Ordinal, "ready", of.Ready,
			"error", err)
	default:
		p.Log.Info("replica answers again", "replica", of.Name, "ordinal", of.Ordinal)
	}
}

// Ask sends GET to a path of all other replicas simultaneously. It returns their answers, and the
// names of those that have not answered within [PollTime].
func Ask[T any](ctx context.Context, p *Peers, path string) (all []T, silent []string) {
	of := p.list(func(*peer) bool { return true })
	answers, failed := make([]T, len(of)), make([]bool, len(of))
	var asking sync.WaitGroup
	for i := range of {
		asking.Go(func() {
			failed[i] = of[i].silent || p.ask(ctx, of[i].Peer, http.MethodGet, path, nil, &answers[i], PollTime) != nil
		})
	}
	asking.Wait()
	for i, answer := range answers {
		if failed[i] {
			silent = append(silent, of[i].Name)
		} else {
			all = append(all, answer)
		}
	}
	return all, silent
}

// ask sends one request.
func (p *Peers) ask(ctx context.Context, of Peer, method, path string, say, answer any, most time.Duration) error {
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

package peers

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// replica is another one, served for real.
type replica struct {
	*httptest.Server
	claimed wire.Claimed
	state   wire.Replica
	// claims counts what it was asked, frozen has it answer nothing.
	claims atomic.Int32
	frozen atomic.Bool
}

func newReplica(t *testing.T) *replica {
	r := &replica{claimed: wire.Claimed{Verdict: wire.VerdictDrain, AskedMillis: -1}, state: wire.Replica{Ready: true}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Authorization") != "Bearer mine" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = io.Copy(io.Discard, q.Body) // until then the end of the caller is not noticed
		if r.frozen.Load() {
			<-q.Context().Done()
			return
		}
		if q.URL.Path == wire.ReplicaPath {
			_ = json.NewEncoder(w).Encode(r.state)
			return
		}
		r.claims.Add(1)
		_ = json.NewEncoder(w).Encode(r.claimed)
	}))
	t.Cleanup(r.Close)
	return r
}

func witness(t *testing.T, self int, of ...*replica) *Peers {
	p := New(self, "A", &http.Client{}, func() (string, error) { return "mine", nil }, slog.New(slog.DiscardHandler))
	p.Able, p.Polled = func() error { return nil }, func([]wire.Replica, bool) {}
	for i, r := range of {
		p.Set(Peer{Ordinal: i, Name: string(rune('a' + i)), URL: r.URL, Ready: true})
	}
	return p
}

// The opener is the ready replica with the lowest ordinal that answers. Without one before it, a
// replica decides for itself: no deletion waits for a replica that is gone.
func TestWhoIsTheOpener(t *testing.T) {
	first, second := newReplica(t), newReplica(t)
	claim := func(p *Peers) (ok bool) {
		_, ok = p.Claim(t.Context(), wire.Claim{Pod: drain.Pod{UID: "u"}})
		return ok
	}
	asked := func(want1, want2 int32) {
		t.Helper()
		if a, b := first.claims.Load(), second.claims.Load(); a != want1 || b != want2 {
			t.Errorf("asked %d and %d times, want %d and %d", a, b, want1, want2)
		}
	}
	if p := witness(t, 0, first, second); !p.Opener() || claim(p) {
		t.Error("replica 0 asks another one")
	}
	p := witness(t, 2, first, second)
	if p.Opener() || !claim(p) {
		t.Error("replica 2 decides by itself")
	}
	asked(1, 0)
	first.claimed.Verdict = "" // it has no opinion
	if !claim(p) {
		t.Error("the second one was not asked")
	}
	asked(2, 1)
	p.Set(Peer{Ordinal: 0, Name: "a", URL: first.URL, Ready: false})
	if !claim(p) {
		t.Error("the second one was not asked where the first one is not ready")
	}
	asked(2, 2)
	second.Close()
	if claim(p) || !p.Opener() {
		t.Error("a replica that is gone is still the opener")
	}
	p.Remove("a")
	p.Remove("b")
	p.Set(Peer{Ordinal: 2, Name: "0-new", URL: first.URL, Ready: true})
	if first.claimed.Verdict = wire.VerdictDrain; !claim(p) || p.Opener() {
		t.Error("of two with one ordinal, the name does not decide")
	}
	p.Remove("0-new")
	// One that cannot judge leaves it to any other.
	unable := witness(t, 0, first)
	unable.Remove("a")
	unable.Set(Peer{Ordinal: 1, Name: "b", URL: first.URL, Ready: true})
	if claim(unable) {
		t.Error("replica 0 asks replica 1")
	}
	unable.Able = func() error { return errors.New("no streams") }
	if !claim(unable) || unable.Opener() {
		t.Error("a replica that cannot judge decides by itself")
	}
	if claim(p) || !p.Opener() {
		t.Error("alone, and not the opener")
	}
}

// A replica that is frozen delays one call, not each: it is asked again when a poll has reached it.
func TestAFrozenReplicaDelaysOneCall(t *testing.T) {
	r := newReplica(t)
	p := witness(t, 1, r)
	r.frozen.Store(true)
	began := time.Now()
	if _, ok := p.Claim(t.Context(), wire.Claim{}); ok || time.Since(began) < ClaimTime {
		t.Errorf("claimed %t after %s", ok, time.Since(began))
	}
	began = time.Now()
	if _, ok := p.Claim(t.Context(), wire.Claim{}); ok || time.Since(began) > ClaimTime/2 {
		t.Errorf("the second call: claimed %t after %s", ok, time.Since(began))
	}
	r.frozen.Store(false)
	p.poll(t.Context())
	if _, ok := p.Claim(t.Context(), wire.Claim{}); !ok {
		t.Error("it answers again, and is not asked")
	}
	// What it knows is told while it answers.
	var told []wire.Replica
	p.Polled = func(states []wire.Replica, _ bool) { told = states }
	r.state.Silent = []drain.Silence{{Agent: "a", Strikes: 1}}
	if p.poll(t.Context()); len(told) != 1 || len(told[0].Silent) != 1 {
		t.Errorf("told %v", told)
	}
	r.frozen.Store(true)
	if p.poll(t.Context()); len(told) != 0 {
		t.Errorf("told %v of a replica that does not answer", told)
	}
	r.frozen.Store(false)
	// What it told before it was silent has old times in it.
	p.heard(t.Context(), p.All()[0], nil, nil)
	if p.Heed(time.Now(), p.Polled); len(told) != 0 {
		t.Errorf("told %v before it was polled again", told)
	}
	p.poll(t.Context())
	// A caller that goes away says nothing about the replica.
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	p.Claim(gone, wire.Claim{})
	if p.Opener() {
		t.Error("a caller that went away has made the replica silent")
	}
}

func TestWhatOthersKnow(t *testing.T) {
	r := newReplica(t)
	p := witness(t, 1, r)
	if _, ok := p.Sees(); ok {
		t.Error("a replica that was never polled sees the agents")
	}
	// open polls, and returns what is to be adopted and whether all have told.
	open := func() (claims []drain.Claim, known bool) {
		p.Polled = func(told []wire.Replica, adopt bool) {
			if p.Known() == nil {
				t.Error("open drains count as known before they are handed over")
			}
			for _, of := range told {
				if adopt {
					claims = append(claims, of.Drains...)
				}
			}
		}
		p.adopted = false
		p.poll(t.Context())
		return claims, p.Known() == nil
	}
	if claims, known := open(); len(claims) != 0 || !known {
		t.Errorf("%v, known %t", claims, known)
	}
	r.state = wire.Replica{Ready: true, Expected: 4, Missing: 2, Shared: drain.Shared{
		Drains: []drain.Claim{{Pod: drain.Pod{UID: "u"}, ElapsedMillis: 12}},
	}}
	if claims, known := open(); len(claims) != 1 || claims[0].ElapsedMillis != 12 || !known {
		t.Errorf("%v, known %t", claims, known)
	}
	p.Polled = func([]wire.Replica, bool) {}
	if name, ok := p.Sees(); !ok || name != "a" {
		t.Errorf("sees: %q, %t", name, ok)
	}
	r.state.Missing = 3
	p.poll(t.Context())
	if _, ok := p.Sees(); ok {
		t.Error("a replica without most of its agents sees them")
	}
	p.Set(Peer{Ordinal: 1, Name: "of the same entry", URL: r.URL, Ready: true})
	p.Remove("a")
	r.claimed.AskedMillis = 0
	if p.Asked(t.Context(), drain.Pod{UID: "u"}, time.Second) {
		t.Error("a call that another pod of the same entry got is not this one's")
	}
	p.Remove("of the same entry")
	p.Set(Peer{Ordinal: 0, Name: "a", URL: r.URL, Ready: true})
	for asked, want := range map[int64]bool{-1: false, 0: true, 250: true, 251: false} {
		r.claimed.AskedMillis = asked
		if got := p.Asked(t.Context(), drain.Pod{UID: "u"}, 250*time.Millisecond); got != want {
			t.Errorf("asked %d ms ago: %t", asked, got)
		}
	}
	r.Close()
	if _, known := open(); known {
		t.Error("known, and a ready replica does not answer")
	}
	adopts := func(up time.Duration) (adopts bool, again time.Duration) {
		again = p.Heed(p.began.Add(up), func(_ []wire.Replica, adopt bool) { adopts = adopt })
		return adopts, again
	}
	if adopt, again := adopts(Settle); !adopt || again != AdoptEvery || p.Known() != nil {
		t.Errorf("it waits for longer than %s: %v", Settle, p.Known())
	}
	// What is opened elsewhere until the API server asks this replica is adopted too.
	p.Able = func() error { return errors.New("no streams") }
	if adopt, _ := adopts(2*Settle - 1); !adopt {
		t.Error("a replica that is not ready yet does not adopt")
	}
	if adopt, again := adopts(2 * Settle); adopt || again != pollEvery {
		t.Error("a replica that cannot judge adopts permanently")
	}
}

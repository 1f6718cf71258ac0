package main

import (
	"log/slog"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// tombstones speaks between the wire and the set: it implements [client.Tombstones].
type tombstones struct {
	set  *health.Set
	wake func()
	log  *slog.Logger

	mu sync.Mutex
	// known holds the last state that was written down of each tombstone.
	known map[health.UID]health.State
}

// Bury implements client.Tombstones. A pod without UID cannot be meant.
func (t *tombstones) Bury(pod drain.Pod, holder string, since, expires time.Time) {
	if pod.UID == "" {
		t.log.Warn("coordinator named a pod without UID", "pod", pod.String(), "holder", holder)
		return
	}
	if t.set.Bury(time.Now(), health.UID(pod.UID), holder, since, expires) {
		t.log.Info("tombstone", "pod", pod.String(), "uid", pod.UID, "holder", holder, "since", since)
		t.wake()
	}
}

// Lift implements client.Tombstones.
func (t *tombstones) Lift(uid drain.UID, holder string, dead bool) {
	if uid == "" {
		return
	}
	if dead {
		t.set.Kill(time.Now(), health.UID(uid))
	}
	if t.set.Lift(health.UID(uid), holder) {
		t.log.Info("tombstone lifted", "uid", uid, "holder", holder, "dead", dead)
	}
	t.wake()
}

// Renew implements client.Tombstones.
func (t *tombstones) Renew(holder string, expires time.Time) { t.set.Renew(holder, expires) }

// Held implements client.Tombstones.
func (t *tombstones) Held(holder string) []drain.UID {
	held := t.set.Held(holder)
	uids := make([]drain.UID, len(held))
	for i, uid := range held {
		uids[i] = drain.UID(uid)
	}
	return uids
}

// Reports implements client.Tombstones.
func (t *tombstones) Reports() []drain.Report {
	stones := t.set.Tombstones()
	reports := make([]drain.Report, len(stones))
	for i, s := range stones {
		reports[i] = drain.Report{UID: drain.UID(s.UID), Generation: s.Generation, State: wireState(s.State), Since: s.Since.UTC().Round(0)}
		if s.State >= health.Removed {
			reports[i].Proof = drain.Runtime
		}
	}
	return reports
}

// changed writes down each tombstone's new state, and reports whether there was one.
func (t *tombstones) changed() bool {
	stones := t.set.Tombstones()
	t.mu.Lock()
	defer t.mu.Unlock()
	news := len(stones) != len(t.known)
	now := make(map[health.UID]health.State, len(stones))
	for _, s := range stones {
		now[s.UID] = s.State
		if was, known := t.known[s.UID]; !known || was != s.State {
			news = true
			t.log.Info("tombstone state", "uid", s.UID, "state", s.State.String(), "targets", s.Targets, "generation", s.Generation)
		}
	}
	t.known = now
	return news
}

// wireState says in the ledger's words what the set knows.
func wireState(s health.State) drain.State {
	switch s {
	case health.Routing:
		return drain.Routing
	case health.Kept:
		return drain.Kept
	case health.Removed:
		return drain.Removed
	case health.Idle:
		return drain.Idle
	default:
		return drain.StateUnknown
	}
}

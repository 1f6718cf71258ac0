package coordinator

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Claimant judges deletions for other replicas of the coordinator.
type Claimant interface {
	Claim(ctx context.Context, claim wire.Claim) wire.Claimed
}

// claim answers another replica that was asked about a deletion.
func (c *Coordinator) claim(w http.ResponseWriter, r *http.Request, _ Identity) (any, error) {
	var claim wire.Claim
	if err := decode(w, r, &claim); err != nil {
		return nil, err
	}
	if claim.Pod.UID == "" || max(len(claim.Pod.UID), len(claim.Pod.Name), len(claim.Pod.Namespace)) > wire.MaxName {
		return nil, refusal{http.StatusBadRequest,
			fmt.Sprintf("pod: uid is required, and each name at most %d bytes", wire.MaxName)}
	}
	claimed := wire.Claimed{}
	if !claim.OnlyAsked && c.Claimant != nil && c.Able() == nil {
		claimed = c.Claimant.Claim(r.Context(), claim)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	claimed.AskedMillis = -1
	if at, asked := c.asked[claim.Pod.UID]; asked && !c.stopped {
		claimed.AskedMillis = time.Since(at).Milliseconds()
		if claim.OnlyAsked {
			c.reliedOn[claim.Pod.UID] = struct{}{}
		}
	}
	return claimed, nil
}

// ReliedOn reports whether another replica, which stops, may have left a call about the pod to this
// one.
func (c *Coordinator) ReliedOn(uid drain.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, relied := c.reliedOn[uid]
	return relied
}

// replica tells another one what it needs to go on where this one is.
func (c *Coordinator) replica(http.ResponseWriter, *http.Request, Identity) (any, error) {
	ready := c.Able() == nil
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	n := c.ledger.Counts()
	return wire.Replica{Ready: ready, Expected: n.Expected, Missing: n.Missing, Shared: c.ledger.Shared(now)}, nil
}

// Adopt opens the drains that the other replicas have open. See [drain.Ledger.Polled].
func (c *Coordinator) Adopt(claims []drain.Claim) {
	c.mu.Lock()
	defer c.unlock()
	c.ledger.Polled(time.Now(), []drain.Shared{{Drains: claims}}, true)
	c.settle()
}

// Polled takes in what the other replicas told last: their open drains and the agents that let
// drains expire. See [drain.Ledger.Polled].
func (c *Coordinator) Polled(states []wire.Replica) {
	c.mu.Lock()
	defer c.unlock()
	others := make([]drain.Shared, len(states))
	for i, of := range states {
		others[i] = of.Shared
	}
	c.ledger.Polled(time.Now(), others, false)
	c.settle()
}

// Claim opens a drain of a pod for a witness, or joins the open one, as [Coordinator.Drain]
// does for the API server. It does not wait. hold reports whether a call for it may.
func (c *Coordinator) Claim(request Request) (status drain.Status, hold bool) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	status = c.ledger.Ask(now, request.Pod, request.Targets, request.Place)
	c.ledger.Hold(request.Pod.UID)(now, false)
	c.settle()
	c.observe(status)
	return status, c.inTurn(now, request) == nil
}

// Turn says whether a call may wait, or who decides that.
type Turn uint8

const (
	// TurnJudged: this replica decides.
	TurnJudged Turn = iota
	// TurnHeld and TurnUnheld: the opener has decided.
	TurnHeld
	TurnUnheld
)

// turnKept is how long a pod keeps its turn after the last call for it.
const turnKept = 5 * time.Second

// everyOwner is where the turns of all pods are kept, with or without an owner.
const everyOwner = ""

// turn is one pod's among those of its owner.
type turn struct {
	uid   drain.UID
	asked time.Time
}

// inTurn, called with the lock after the drain was observed, returns why a call for the pod may not
// wait: as many pods of its owner, or of all, as may have their turn. Every replica holds the calls
// for the same pods: if each one chose for itself, all of them together would hold more calls than
// the API server has seats for, and those that come later would queue there.
func (c *Coordinator) inTurn(now time.Time, request Request) error {
	if request.Owner != "" && c.MaxHoldsPerOwner > 0 &&
		!c.takeTurn(now, request.Owner, request.Pod.UID, c.MaxHoldsPerOwner) {
		return ErrTooManyOfOwner
	}
	if !c.takeTurn(now, everyOwner, request.Pod.UID, c.MaxHolds) {
		return ErrTooManyHolds
	}
	return nil
}

// takeTurn reports whether a pod is among the most of an owner that may have their turn. Those that
// drain no more, or are not asked for any more, have lost theirs.
func (c *Coordinator) takeTurn(now time.Time, owner string, uid drain.UID, most int) bool {
	turns := slices.DeleteFunc(c.turns[owner], func(t turn) bool {
		return t.uid != uid && (now.Sub(t.asked) > turnKept || !drain.Status{Phase: c.phases[t.uid]}.Waits())
	})
	i := slices.IndexFunc(turns, func(t turn) bool { return t.uid == uid })
	switch {
	case i >= 0:
		turns[i].asked = now
	case len(turns) < most:
		i, turns = len(turns), append(turns, turn{uid, now})
	}
	c.turns[owner] = turns
	return i >= 0
}

// dropTurns, called with the lock, forgets the turns of owners none of whose pods is asked for any
// more.
func (c *Coordinator) dropTurns(now time.Time) {
	for owner, turns := range c.turns {
		if !slices.ContainsFunc(turns, func(t turn) bool { return now.Sub(t.asked) <= turnKept }) {
			delete(c.turns, owner)
		}
	}
}

package coordinator

import (
	"context"
	"net/http"
	"time"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Claimant judges deletions for other replicas of the coordinator.
type Claimant interface {
	Claim(ctx context.Context, claim wire.Claim) wire.Claimed
}

// claim answers another replica's question about a deletion.
func (c *Coordinator) claim(w http.ResponseWriter, r *http.Request, _ Identity) (any, error) {
	var claim wire.Claim
	if err := decode(w, r, &claim); err != nil {
		return nil, err
	}
	if claim.Pod.UID == "" || max(len(claim.Pod.UID), len(claim.Pod.Name), len(claim.Pod.Namespace)) > wire.MaxName {
		return nil, serve.Refuse(http.StatusBadRequest, "pod: uid is required, and each name at most %d bytes",
			wire.MaxName)
	}
	claimed := wire.Claimed{}
	if !claim.OnlyAsked && c.Able() == nil {
		claimed = c.Claimant.Claim(r.Context(), claim)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	claimed.AskedMillis = c.core.Asked(time.Now(), claim)
	return claimed, nil
}

// ReliedOn reports whether another replica that is stopping may have left a call about the pod to
// this one.
func (c *Coordinator) ReliedOn(uid drain.UID) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.ReliedOn(uid)
}

// Decided is [drain.Ledger.Decided].
func (c *Coordinator) Decided(uid drain.UID, allowed bool) {
	c.change(func() { c.core.Ledger.Decided(time.Now(), uid, allowed) })
}

// replica returns to another replica the state that it needs to continue the drains of this one.
func (c *Coordinator) replica(http.ResponseWriter, *http.Request, Identity) (any, error) {
	ready := c.Able() == nil
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Replica(time.Now(), ready), nil
}

// shown returns to another replica the view, the report or the explanation that this one shows
// operators.
func (c *Coordinator) shown(_ http.ResponseWriter, r *http.Request, _ Identity) (any, error) {
	return c.Shown(r)
}

// Polled records what the other replicas sent last: their open drains, which it opens here too if
// adopt is set, and the agents that let drains expire. See [drain.Ledger.Polled].
func (c *Coordinator) Polled(states []wire.Replica, adopt bool) {
	c.change(func() { c.core.Polled(time.Now(), states, adopt) })
}

// Claim opens a drain of a pod for a witness, or joins the open one, as [Coordinator.Drain]
// does for the API server. It does not wait. crowded is why a call for it may not wait either.
func (c *Coordinator) Claim(request Request) (status drain.Status, crowded error) {
	c.change(func() { status, crowded = c.core.Claim(time.Now(), request) })
	return status, crowded
}

// Ahead is [Core.Ahead].
func (c *Coordinator) Ahead(request Request, others []drain.UID, allowed int, claim bool) (ahead int) {
	c.change(func() { ahead = c.core.Ahead(time.Now(), request, others, allowed, claim) })
	return ahead
}

package coordinator

import (
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// OwnersHeld is for how many owners the calls of each workload controller of Kubernetes may wait at
// a time. A worker of the controller waits with them. By default it has five, for DaemonSets two.
var OwnersHeld = map[string]int{
	"ReplicaSet": 3, "StatefulSet": 3, "Job": 3, "ReplicationController": 3, "DaemonSet": 1,
}

const (
	// maxRefusals is how often a controller is refused for one owner, those in less than
	// sameAttempt after another one not counted: it deletes the pods of an owner in parallel. It
	// then pauses for 10 s: 5 ms, doubled 11 times (k8s.io/client-go/util/workqueue,
	// DefaultTypedControllerRateLimiter), of which the first five are not counted. Later pauses
	// would be longer than a deadline, and up to 1,000 s.
	maxRefusals = 7
	sameAttempt = 100 * time.Millisecond
	// firstPause is how soon after its first refusal a controller tries again, at least.
	firstPause = 5 * time.Millisecond
	// ownerKept is how long an owner is known after the last call, and refusals count: longer than
	// a controller pauses.
	ownerKept = time.Minute
)

// owner is an owner for whose pods its controller calls.
type owner struct {
	kind string
	// held: its calls may wait. asked is when the last one came.
	held  bool
	asked time.Time
	// refusals counts those of the last minute, since is when the first of them was, refused when
	// the last one was.
	refusals       int
	since, refused time.Time
	pods           map[drain.UID]struct{}
}

// ownerInTurn returns an error if a workload controller calls that waits for as many other owners
// as [OwnersHeld]. Its call is then answered at once, without Retry-After. After maxRefusals it may
// wait all the same, because its own pauses have become too long.
func (c *Core) ownerInTurn(now time.Time, request Request) error {
	most := OwnersHeld[request.Controller]
	if most == 0 {
		return nil
	}
	o := c.owners[request.Owner]
	if o == nil {
		o = &owner{kind: request.Controller, pods: map[drain.UID]struct{}{}}
		c.owners[request.Owner] = o
	}
	others := 0
	for _, other := range c.owners {
		if other != o && other.kind == o.kind && c.occupies(other) {
			others++
		}
	}
	since := now.Sub(o.refused)
	another := since > sameAttempt
	if since > ownerKept {
		o.refusals = 0
	}
	o.held = others < most || c.occupies(o) || another && o.refusals >= maxRefusals
	o.asked, o.pods[request.Pod.UID] = now, struct{}{}
	if o.held {
		return nil
	}
	if o.refused = now; another {
		if o.refusals++; o.refusals == 1 {
			o.since = now
		}
	}
	return ErrTooManyOwners
}

// occupies reports whether calls for an owner wait, or will again in a moment.
func (c *Core) occupies(o *owner) bool {
	return o.held && slices.ContainsFunc(slices.Collect(maps.Keys(o.pods)), c.waits)
}

// opens reports whether a call that may not wait opens a drain all the same. A controller chooses
// at random among equal pods each time, so that only its first attempt for an owner does: each
// further one could take other pods out of traffic. A DaemonSet never deletes all its pods, as
// ReplicaSets may, so that what it has chosen first is seldom what it deletes.
func (c *Core) opens(now time.Time, request Request) bool {
	return c.Ledger.Pod(request.Pod.UID).Draining ||
		request.Controller != "DaemonSet" && now.Sub(c.owners[request.Owner].since) < firstPause
}

// dropOwners forgets owners for which no call has come for a while, and pods that do not wait.
func (c *Core) dropOwners(now time.Time) {
	maps.DeleteFunc(c.owners, func(_ string, o *owner) bool {
		maps.DeleteFunc(o.pods, func(uid drain.UID, _ struct{}) bool { return !c.waits(uid) })
		return now.Sub(o.asked) > ownerKept
	})
}

// waits reports whether the pod has an open drain that is not released.
func (c *Core) waits(uid drain.UID) bool { return drain.Status{Phase: c.phases[uid]}.Waits() }

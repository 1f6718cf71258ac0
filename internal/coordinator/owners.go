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
	// maxRefusals is how often a controller is refused for one owner. It then pauses for 10 s: 5
	// ms, doubled 11 times (k8s.io/client-go/util/workqueue, DefaultTypedControllerRateLimiter).
	// Later pauses would be longer than a deadline, and up to 1,000 s.
	maxRefusals = 12
	// sameAttempt is how far apart refusals of one attempt are at most: a controller deletes the
	// pods of an owner in parallel.
	sameAttempt = 100 * time.Millisecond
	// ownerKept is how long an owner is known after the last call: longer than a controller pauses.
	ownerKept = time.Minute
)

// owner is an owner for whose pods its controller calls.
type owner struct {
	kind string
	// held: its calls may wait. asked is when the last one came.
	held  bool
	asked time.Time
	// refusals counts the attempts that were refused, refused is when the last one was. pods has
	// the last attempt that included each pod.
	refusals int
	refused  time.Time
	pods     map[drain.UID]int
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
		o = &owner{kind: request.Controller, pods: map[drain.UID]int{}}
		c.owners[request.Owner] = o
	}
	others := 0
	for _, other := range c.owners {
		if other != o && other.kind == o.kind && c.occupies(other) {
			others++
		}
	}
	o.held = others < most || c.occupies(o) || o.refusals >= maxRefusals && o.tries(now, request.Pod.UID)
	o.asked, o.pods[request.Pod.UID] = now, o.pods[request.Pod.UID]
	if !o.held {
		return ErrTooManyOwners
	}
	return nil
}

// occupies reports whether calls for an owner wait, or will again in a moment.
func (c *Core) occupies(o *owner) bool {
	return o.held && slices.ContainsFunc(slices.Collect(maps.Keys(o.pods)), c.waits)
}

// opens reports whether a call that may not wait opens a drain all the same. The DaemonSet
// controller chooses a node at random each time: every attempt would take another pod out of
// traffic.
func (c *Core) opens(request Request) bool {
	return request.Controller != "DaemonSet" || c.Ledger.Pod(request.Pod.UID).Draining
}

// tries reports whether a call for a pod begins another attempt.
func (o *owner) tries(now time.Time, uid drain.UID) bool {
	return o.pods[uid] == o.refusals || now.Sub(o.refused) > sameAttempt
}

// refuse counts a refusal.
func (o *owner) refuse(now time.Time, uid drain.UID) {
	if o.tries(now, uid) {
		o.refusals++
	}
	o.pods[uid], o.refused = o.refusals, now
}

// dropOwners forgets owners for which no call has come for a while, and pods that do not drain.
func (c *Core) dropOwners(now time.Time) {
	maps.DeleteFunc(c.owners, func(_ string, o *owner) bool {
		maps.DeleteFunc(o.pods, func(uid drain.UID, _ int) bool { return !c.waits(uid) })
		return now.Sub(o.asked) > ownerKept
	})
}

// waits reports whether the pod has an open drain that is not released.
func (c *Core) waits(uid drain.UID) bool { return drain.Status{Phase: c.phases[uid]}.Waits() }

package coordinator

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// lookAround is how often a barrier that waits looks at what surrounds its pod: whether another
	// endpoint has become ready.
	lookAround = 250 * time.Millisecond
	// restartTimeout is how long the stop of a container waits whose pod stays.
	restartTimeout = 2 * time.Second
	// maxBarriers bounds the barriers that wait at one time, unless Options say otherwise.
	maxBarriers = 2048
)

// PodContext are what a replica knows of a pod whose barrier is asked for.
type PodContext struct {
	// Known: there is such a pod, with this UID. Terminating: it has a deletionTimestamp, as far as
	// is known here.
	Known, Terminating bool
	// Here: the agent that asks is on the pod's node.
	Here bool
	// Targets are the Services that list the pod, or did lately, with their usable targets.
	Targets []drain.Targets
	// Stated to Young are as in [drain.Barrier].
	Stated                  time.Duration
	Last, LastOne, LastHere bool
	Young                   time.Duration
	// IdleBound is the longest time for which the pod, or one of its Services, wants connections
	// waited for that clients keep.
	IdleBound time.Duration
}

// PodContexts returns the contexts of pods from a cache: the coordinator asks four times a second
// for each barrier that waits.
type PodContexts interface {
	// PodContext returns the context of pod. agent is the namespace/name of the pod of the agent
	// that asks, or "" if the replica itself asks whether pod is known. PodContext returns an error
	// if the cache has not synced.
	PodContext(ctx context.Context, agent string, pod drain.Pod) (PodContext, error)
}

// barrier answers when a pod may be told to stop.
func (c *Coordinator) barrier(w http.ResponseWriter, r *http.Request, who Identity) (any, error) {
	var asked wire.Barrier
	if err := decode(w, r, &asked); err != nil {
		return nil, err
	}
	bound, elapsed := time.Duration(asked.BoundMillis)*time.Millisecond,
		time.Duration(asked.ElapsedMillis)*time.Millisecond
	if err := checkBarrier(asked, bound, elapsed); err != nil {
		return nil, err
	}
	if c.PodContexts == nil {
		return nil, refusal{http.StatusServiceUnavailable, "this replica knows nothing of pods"}
	}
	if !c.current(who.Agent, asked.Session) {
		return nil, errStale
	}
	arrived := time.Now()
	s, err := c.podContext(r.Context(), who, &asked)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.unlock()
	if c.barriers >= c.mostBarriers() {
		return nil, refusal{http.StatusServiceUnavailable, "too many barriers wait at this replica"}
	}
	c.barriers++
	c.Metrics.waiting.Inc()
	defer func() {
		c.barriers--
		c.Metrics.waiting.Dec()
	}()
	if !asked.Terminating {
		return c.restart(r.Context(), asked.Pod, s, arrived.Add(min(bound, restartTimeout)))
	}
	return c.waitAtBarrier(r.Context(), who, s, drain.Barrier{Pod: asked.Pod, By: who.Agent, Targets: asked.Targets,
		Since: arrived.Add(-elapsed), Bound: bound})
}

// checkBarrier returns a refusal if a value of asked is not valid. bound and elapsed are its times.
func checkBarrier(asked wire.Barrier, bound, elapsed time.Duration) error {
	switch {
	case asked.Pod.UID == "" || asked.Pod.Namespace == "" || asked.Pod.Name == "":
		return refusal{http.StatusBadRequest, "pod: namespace, name and uid are required"}
	case max(len(asked.Pod.UID), len(asked.Pod.Namespace), len(asked.Pod.Name)) > wire.MaxName:
		return refusal{http.StatusBadRequest, fmt.Sprintf("pod: a name is longer than %d bytes", wire.MaxName)}
	case len(asked.Targets) > wire.MaxTargets:
		return refusal{http.StatusBadRequest,
			fmt.Sprintf("targets: %d are more than %d", len(asked.Targets), wire.MaxTargets)}
	case slices.ContainsFunc(asked.Targets, func(t netip.AddrPort) bool { return t.Addr().Zone() != "" }):
		// it may be of any length, and all who observe are told
		return refusal{http.StatusBadRequest, "targets: no pod's address has a zone"}
	case asked.BoundMillis < 0 || bound > wire.MaxBound:
		return refusal{http.StatusBadRequest,
			fmt.Sprintf("boundMillis %d: must be 0 to %d", asked.BoundMillis, wire.MaxBound.Milliseconds())}
	case asked.ElapsedMillis < 0 || elapsed > 10*wire.MaxBound:
		return refusal{http.StatusBadRequest,
			fmt.Sprintf("elapsedMillis %d: must be 0 to %d", asked.ElapsedMillis, 10*wire.MaxBound.Milliseconds())}
	}
	return nil
}

// waitAtBarrier, called with the lock, waits until b lets its pod go. It gives up the lock
// meanwhile. s is the pod's context, which is read again while it waits.
func (c *Coordinator) waitAtBarrier(ctx context.Context, who Identity, s PodContext, b drain.Barrier) (any, error) {
	for {
		b.Services = b.Services[:0]
		for _, t := range s.Targets {
			b.Services = append(b.Services, t.Service)
		}
		b.Stated, b.Last, b.LastOne, b.LastHere, b.Young = s.Stated, s.Last, s.LastOne, s.LastHere, s.Young
		now := time.Now()
		status := c.ledger.OpenBarrier(now, b)
		c.seen.barrierSeen(now, status)
		c.settle()
		if !status.Waits() {
			c.passed(status)
			passed := passedAs(status)
			passed.IdleBoundMillis = s.IdleBound.Milliseconds()
			return passed, nil
		}
		wake := now.Add(lookAround)
		if !status.Recheck.IsZero() && status.Recheck.Before(wake) {
			wake = status.Recheck
		}
		if err := c.sleep(ctx, b.Pod.UID, wake); err != nil {
			return nil, err
		}
		if woken := time.Now(); !woken.Before(now.Add(lookAround)) || woken.Before(wake) {
			// What has changed may be that another endpoint is ready.
			c.unlock()
			is, err := c.PodContexts.PodContext(ctx, who.Name, b.Pod)
			c.mu.Lock()
			// A pod that is not known any more has the context that it had.
			if err == nil && is.Known {
				s = is
			}
		}
	}
}

// podContext finds out whether who may ask, and whether the pod is really terminating: a barrier
// declares it dead, for good.
func (c *Coordinator) podContext(ctx context.Context, who Identity, asked *wire.Barrier) (PodContext, error) {
	s, err := c.PodContexts.PodContext(ctx, who.Name, asked.Pod)
	if err != nil {
		return s, refusal{http.StatusServiceUnavailable, err.Error()}
	}
	if s.Known && !s.Here {
		return s, refusal{http.StatusForbidden, fmt.Sprintf("pod %s is not on the node of %s", asked.Pod, who.Name)}
	}
	if !who.Everywhere {
		authorizer, can := c.Authenticate.(Authorizer)
		allowed := false
		if can {
			if allowed, err = authorizer.MayAcknowledge(ctx, who, asked.Pod.Namespace); err != nil {
				return s, refusal{http.StatusServiceUnavailable, err.Error()}
			}
		}
		if !allowed {
			return s, refusal{http.StatusForbidden,
				fmt.Sprintf("%s may not acknowledge drains in namespace %q", who.Username, asked.Pod.Namespace)}
		}
	}
	asked.Terminating = asked.Terminating || s.Terminating
	if s.Terminating {
		return s, nil
	}
	if !asked.Terminating {
		if !s.Known {
			return s, refusal{http.StatusNotFound, fmt.Sprintf("pod %s is not known here", asked.Pod)}
		}
		return s, nil
	}
	// The agent may have heard earlier. Where it is not known here at all, it may be gone.
	lookCtx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	switch life, err := c.Pods.Life(lookCtx, asked.Pod); {
	case err != nil || life == LifeUnknown:
		return s, refusal{http.StatusServiceUnavailable, fmt.Sprintf("pod %s cannot be read: %v", asked.Pod, err)}
	case life == Living:
		return s, refusal{http.StatusConflict, fmt.Sprintf("pod %s is not terminating", asked.Pod)}
	}
	return s, nil
}

// restart, called with the lock, has directed gateways let go of a pod whose container is stopped,
// and answers by until.
func (c *Coordinator) restart(ctx context.Context, pod drain.Pod, s PodContext, until time.Time) (any, error) {
	status := c.ledger.Ask(time.Now(), pod, s.Targets, drain.Place{Restart: true})
	for {
		c.settle()
		c.observe(status)
		if !status.Waits() || !time.Now().Before(until) {
			c.Metrics.restarts.Inc()
			return passedAs(status), nil
		}
		wake := until
		if !status.Recheck.IsZero() && status.Recheck.Before(wake) {
			wake = status.Recheck
		}
		if err := c.sleep(ctx, pod.UID, wake); err != nil {
			return nil, err
		}
		status = c.ledger.Status(time.Now(), drain.AtHold, pod.UID)
	}
}

// sleep, called with the lock, gives it up until something may have changed for uid, or wake.
func (c *Coordinator) sleep(ctx context.Context, uid drain.UID, wake time.Time) error {
	changed := c.barred[uid]
	if changed == nil {
		changed = make(chan struct{})
		c.barred[uid] = changed
	}
	c.unlock()
	timer := time.NewTimer(time.Until(wake))
	var err error
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
		err = errWritten // the agent is gone
	case <-c.stop:
		err = refusal{http.StatusServiceUnavailable, ErrStopping.Error()}
	}
	timer.Stop()
	c.mu.Lock()
	if err == nil && c.stopped {
		err = refusal{http.StatusServiceUnavailable, ErrStopping.Error()}
	}
	return err
}

func (c *Coordinator) mostBarriers() int {
	if c.MaxBarriers > 0 {
		return c.MaxBarriers
	}
	return maxBarriers
}

// passedAs is what the agent is told.
func passedAs(s drain.Status) wire.BarrierStatus {
	return wire.BarrierStatus{Phase: s.Phase.String(), Reason: s.Reason.String(), Waiting: names(s.Waiting), Cut: s.Cut}
}

// passed, called with the lock, writes down that a barrier lets its pod go.
func (c *Coordinator) passed(s drain.Status) {
	took := time.Since(s.Since)
	c.seen.passed(time.Now(), s)
	c.Metrics.barriers.WithLabelValues(s.Reason.String()).Observe(took.Seconds())
	if s.Cut {
		c.Metrics.cut.Inc()
	}
	c.unsaid = append(c.unsaid, func() {
		c.Log.Info("barrier passed", "pod", s.Pod.String(), "uid", s.Pod.UID, "phase", s.Phase.String(),
			"reason", s.Reason.String(),
			"sinceSeconds", took.Seconds(), "owed", s.Owed, "waitingFor", names(s.Waiting),
			"suspended", names(s.Suspended), "lost", names(s.Lost), "away", names(s.Away), "moreAway", s.MoreAway,
			"statedSeconds", s.Stated.Seconds(), "cut", s.Cut)
	})
}

// settleBarriers, called with the lock, wakes those who wait at barriers that may have changed. It
// reports whether there were any.
func (c *Coordinator) settleBarriers() bool {
	touched := c.ledger.Changed(drain.AtBarrier)
	for _, uid := range touched {
		c.ledger.Status(time.Now(), drain.AtBarrier, uid)
		c.wakeBarred(uid)
	}
	return len(touched) > 0
}

// wakeBarred, called with the lock, wakes the hooks of a pod.
func (c *Coordinator) wakeBarred(uid drain.UID) {
	if changed := c.barred[uid]; changed != nil {
		close(changed)
		delete(c.barred, uid)
	}
}

// lookAtBarriers ends those of pods that are not known any more: their end may have been missed, or
// was before they were asked for.
func (c *Coordinator) lookAtBarriers(ctx context.Context, pods []drain.Pod) {
	for _, pod := range pods {
		if c.PodContexts == nil {
			return
		}
		if s, err := c.PodContexts.PodContext(ctx, "", pod); err == nil && !s.Known {
			c.Deleted(pod.UID)
		}
	}
}

// Deleted records that a pod is gone.
func (c *Coordinator) Deleted(uid drain.UID) {
	c.mu.Lock()
	defer c.unlock()
	for _, gate := range []drain.Gate{drain.AtHold, drain.AtBarrier} {
		c.ledger.GatePassed(time.Now(), gate, uid)
	}
	delete(c.seen.barriers, uid)
	c.deleted[uid] = time.Now()
	c.cut(time.Now(), drain.AgentID(uid), podDeleted)
	c.settle()
}

// Ready records that a pod has become ready at a time, so that it can be routed again if it was let
// go of for a restart before.
func (c *Coordinator) Ready(uid drain.UID, at time.Time) {
	c.mu.Lock()
	defer c.unlock()
	delete(c.deleted, uid) // the list that lacked it was old
	if c.ledger.ReadyAgain(time.Now(), uid, at) {
		c.settle()
	}
}

package coordinator

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// lookAround is how often a waiting barrier reads the context of its pod: another endpoint may
	// have become ready.
	lookAround = 250 * time.Millisecond
	// RestartTimeout is how long the stop of a container waits if its pod stays.
	RestartTimeout = 2 * time.Second
	// maxBarriers is the default of Options.MaxBarriers.
	maxBarriers = 2048
)

// PodContext is what a replica's cache has about a pod whose barrier is asked for.
type PodContext struct {
	// Known: there is such a pod, with this UID. Terminating: it has a deletionTimestamp in the
	// cache, and Grace is the grace period of its deletion.
	Known, Terminating bool
	Grace              time.Duration
	// Here: the agent that asks is on the pod's node. Elsewhere: see [Options.Elsewhere].
	Here, Elsewhere bool
	// Workload is the pod's, see [Core.Hooks].
	Workload string
	// NotEnforced: the pod's mode is observe or off. Partly: a container has no hook.
	NotEnforced, Partly bool
	// Addresses are those of the pod, none if it has its node's.
	Addresses []netip.AddrPort
	// Targets are the Services that list the pod, or recently did, with their usable targets.
	Targets []drain.Targets
	// Stated to Listed are as in [drain.Barrier].
	Stated                  time.Duration
	Last, LastOne, LastHere bool
	Young                   time.Duration
	Listed                  bool
	// IdleBound is the longest time to wait for idle keep-alive connections that the pod or one of
	// its Services states.
	IdleBound time.Duration
	// AtMost is the longest of the stated waits that may end early, with the longest Quiet of
	// these.
	AtMost drain.StatedWait
}

// PodContexts returns the contexts of pods from a cache: the coordinator asks four times a second
// for each barrier that waits.
type PodContexts interface {
	// PodContext returns the context of pod. agent is the namespace/name of the pod of the agent
	// that asks, or "" if the replica itself asks whether pod is known. PodContext returns an error
	// if the cache has not synced.
	PodContext(ctx context.Context, agent string, pod drain.Pod) (PodContext, error)
	// Uncovered names the consumers of services that are not waited for. barred: every container of
	// the pod has the hook. The coordinator calls it once, at the end of a barrier.
	Uncovered(ctx context.Context, services []drain.Service, barred bool) []string
}

// barrier answers a hook's request when the pod may be told to stop.
func (c *Coordinator) barrier(w http.ResponseWriter, r *http.Request, who Identity) (any, error) {
	var asked wire.BarrierRequest
	if err := decode(w, r, &asked); err != nil {
		return nil, err
	}
	if err := checkBarrier(asked); err != nil {
		return nil, err
	}
	if !c.current(who.Agent, asked.Session) {
		return nil, errStale
	}
	arrived := time.Now()
	s, err := c.podContext(r.Context(), who, asked)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.unlock()
	bar, err := c.core.Bar(arrived, who, asked, s)
	if terminating, ok := errors.AsType[Terminating](err); ok {
		return wire.BarrierStatus{Waiting: []string{}, Terminating: true,
			GraceMillis: terminating.Grace.Milliseconds()}, nil
	}
	if err != nil {
		return nil, err
	}
	c.Metrics.waiting.Inc()
	defer c.Metrics.waiting.Dec()
	defer bar.Close()
	if bar.Look {
		c.unlock()
		lookCtx, cancel := context.WithTimeout(r.Context(), LookTimeout)
		life, err := c.Pods.Life(lookCtx, asked.Pod)
		cancel()
		c.mu.Lock()
		if err := bar.Read(life, err); err != nil {
			return nil, err
		}
	}
	for {
		bar.Turn(time.Now())
		c.settle() // before it sleeps, so that the changes of this turn do not wake it
		if !bar.Restart {
			c.seen.barrierSeen(time.Now(), bar.Status)
		}
		switch {
		case bar.Err != nil:
			return nil, bar.Err
		case bar.Over:
			var uncovered []string
			// The agent itself waits for connections, even if there are uncovered consumers.
			answer, reason := bar.Answer(), bar.Status.Reason
			if !bar.Restart && (reason == drain.Acknowledged || reason == drain.NoAgents) {
				c.unlock()
				uncovered = c.PodContexts.Uncovered(r.Context(), servicesOf(bar.context.Targets), !bar.context.Partly)
				c.mu.Lock()
			}
			if len(uncovered) > 0 {
				bar.Status.Reason = drain.Uncovered
			}
			c.passed(bar, uncovered)
			return answer, nil
		}
		if err := c.sleep(r.Context(), asked.Pod.UID, bar.Wake); err != nil {
			return nil, err
		}
		if !bar.Restart {
			c.unlock()
			s, err := c.PodContexts.PodContext(r.Context(), who.Name, asked.Pod)
			c.mu.Lock()
			if err == nil {
				bar.Context(s)
			}
		}
	}
}

// checkBarrier returns a refusal if a value of asked is not valid.
func checkBarrier(asked wire.BarrierRequest) error {
	bound, elapsed := boundOf(asked)
	switch {
	case asked.Pod.UID == "" || asked.Pod.Namespace == "" || asked.Pod.Name == "":
		return serve.Refuse(http.StatusBadRequest, "pod: namespace, name and uid are required")
	case max(len(asked.Pod.UID), len(asked.Pod.Namespace), len(asked.Pod.Name)) > wire.MaxName:
		return serve.Refuse(http.StatusBadRequest, "pod: a name is longer than %d bytes", wire.MaxName)
	case len(asked.Targets) > wire.MaxTargets:
		return serve.Refuse(http.StatusBadRequest, "targets: %d are more than %d", len(asked.Targets), wire.MaxTargets)
	case slices.ContainsFunc(asked.Targets, func(t netip.AddrPort) bool { return t.Addr().Zone() != "" }):
		// a zone may be of any length, and is sent to all observing agents
		return serve.Refuse(http.StatusBadRequest, "targets: no pod's address has a zone")
	case asked.BoundMillis < 0 || bound > wire.MaxBound:
		return serve.Refuse(http.StatusBadRequest, "boundMillis %d: must be 0 to %d", asked.BoundMillis,
			wire.MaxBound.Milliseconds())
	case asked.ElapsedMillis < 0 || elapsed > 10*wire.MaxBound:
		return serve.Refuse(http.StatusBadRequest, "elapsedMillis %d: must be 0 to %d", asked.ElapsedMillis,
			10*wire.MaxBound.Milliseconds())
	}
	return nil
}

// placesOfOne returns how many hooks of one agent may wait.
func (o *Options) placesOfOne() int { return max(1, o.MaxBarriers/4) }

// boundOf returns the times of asked.
func boundOf(asked wire.BarrierRequest) (bound, elapsed time.Duration) {
	return time.Duration(asked.BoundMillis) * time.Millisecond, time.Duration(asked.ElapsedMillis) * time.Millisecond
}

// Bar is a hook that waits at the barrier, or for the restart of its pod's container.
type Bar struct {
	core *Core
	of   drain.Barrier
	// context is the last context of the pod. until is when a restart continues.
	context PodContext
	until   time.Time
	stopped time.Time // by the clock of the pod's node
	// Restart: the pod stays, and only its container is stopped.
	Restart bool
	// Look: the pod must be read live before the first turn, see [Bar.Read]. stranger: the pod is
	// not known here, less than strangerTime after its deletion.
	Look, stranger bool
	// Status is that of the last turn. Over: answer the hook, with Err if that is not nil.
	// Otherwise Wake is when the next turn is due, unless something changes for the pod before.
	Status drain.Status
	Err    error
	Over   bool
	Wake   time.Time
}

// strangerTime is how long after the deletion of a pod a replica leaves the pod's hooks to others,
// if it does not know the pod, or another one has more agents. It would ask too few agents, because
// it knows none of the pod's Services, or would wait for agents that are not connected here.
const strangerTime = 2 * time.Second

// Terminating is the error for a hook whose agent does not know that its pod is terminating.
type Terminating struct {
	// Grace is the grace period of the deletion.
	Grace time.Duration
}

func (Terminating) Error() string { return "the pod is terminating" }

// Bar begins the wait of a hook. s is the context of its pod. An error is a refusal, or
// [Terminating].
func (c *Core) Bar(now time.Time, who Identity, asked wire.BarrierRequest, s PodContext) (*Bar, error) {
	bound, elapsed := boundOf(asked)
	switch {
	case s.Known && !s.Here:
		return nil, serve.Refuse(http.StatusForbidden, "pod %s is not on the node of %s", asked.Pod, who.Name)
	case !s.Known && !asked.Terminating:
		return nil, serve.Refuse(http.StatusNotFound, "pod %s is not known here", asked.Pod)
	case s.Terminating && !asked.Terminating:
		return nil, Terminating{s.Grace}
	case s.Elsewhere && !s.NotEnforced && elapsed < min(strangerTime, bound/2):
		return nil, serve.Refuse(http.StatusServiceUnavailable, "another replica has more agents")
	case s.Known && len(s.Addresses) == 0 && asked.Terminating && !s.NotEnforced:
		// Agents ask only for pods whose address they know, so this cache is late. A watch of no
		// address would be Unknown until the bound.
		return nil, serve.Refuse(http.StatusServiceUnavailable, "no address of pod %s is known here", asked.Pod)
	case c.barriers >= c.limits.MaxBarriers:
		return nil, serve.Refuse(http.StatusServiceUnavailable, "too many barriers wait at this replica")
	case c.barriersOf[who.Agent] >= c.limits.placesOfOne():
		return nil, serve.Refuse(http.StatusServiceUnavailable, "too many barriers of this node wait at this replica")
	}
	c.barriers++
	c.barriersOf[who.Agent]++
	if c.hooks.hear(asked.Pod.UID, s.Workload); asked.Terminating {
		c.hooks.told[asked.Pod.UID] = relied{s.Workload, now}
	}
	// Agents also delete connections to these addresses. Only those of a pod that is not known here
	// are what the agent says.
	if s.Known {
		asked.Targets = s.Addresses
	}
	return &Bar{core: c, context: s, until: now.Add(min(bound, RestartTimeout)), Restart: !asked.Terminating,
		stopped: asked.Since, Look: asked.Terminating && !s.Terminating,
		stranger: !s.Known && elapsed < strangerTime,
		of: drain.Barrier{Pod: asked.Pod, By: who.Agent, Targets: asked.Targets, Since: now.Add(-elapsed),
			Bound: bound},
	}, nil
}

// Close ends the wait.
func (b *Bar) Close() {
	c, by := b.core, b.of.By
	c.barriers--
	if c.barriersOf[by]--; c.barriersOf[by] == 0 {
		delete(c.barriersOf, by)
	}
}

// Read records a live read of the pod. An agent may know before this replica that its pod is
// terminating. It returns a refusal if the pod is not, because a barrier marks it as terminating
// permanently, and if this replica does not know the pod and there is none or another one may.
func (b *Bar) Read(life Life, err error) error {
	switch {
	case err != nil || life == LifeUnknown:
		return serve.Refuse(http.StatusServiceUnavailable, "pod %s cannot be read: %v", b.of.Pod, err)
	case life == Living:
		return serve.Refuse(http.StatusConflict, "pod %s is not terminating", b.of.Pod)
	case life == Gone && !b.context.Known:
		// An agent could name another pod's UID, on any node.
		return serve.Refuse(http.StatusNotFound, "pod %s with UID %s does not exist", b.of.Pod, b.of.Pod.UID)
	case b.stranger:
		return serve.Refuse(http.StatusServiceUnavailable, "pod %s is not known here yet", b.of.Pod)
	}
	return nil
}

// Turn asks the ledger once.
func (b *Bar) Turn(now time.Time) {
	first := b.Wake.IsZero()
	switch {
	case b.context.NotEnforced:
		// A hook may have come before the pod's mode was known.
		b.core.Ledger.EndBarrier(now, b.of.Pod.UID, false)
		b.core.settle(now)
		b.Status = drain.Status{Pod: b.of.Pod, Phase: drain.Released, Reason: drain.NotEnforced, Since: b.of.Since}
		b.Over = true
		return
	case !b.Restart:
		b.Status = b.core.openBarrier(now, b.of, b.context)
		b.Wake = wakeAt(b.Status, now.Add(lookAround))
	case first:
		b.Status = b.core.ask(now, b.of.Pod, b.context.Targets, drain.Place{Restart: true, Stopped: b.stopped})
	default:
		b.Status = b.core.Ledger.Status(now, drain.AtHold, b.of.Pod.UID)
		b.core.settle(now)
		b.core.observe(b.Status)
	}
	if b.Restart {
		b.Wake = wakeAt(b.Status, b.until)
	}
	b.Over = !b.Status.Waits() || b.Restart && !now.Before(b.until)
	if !b.Over && b.core.stopped {
		b.Over, b.Err = true, serve.Refuse(http.StatusServiceUnavailable, "%v", ErrStopping)
	}
}

// openBarrier opens a barrier, or joins the open one. s is the context of its pod.
func (c *Core) openBarrier(now time.Time, b drain.Barrier, s PodContext) drain.Status {
	b.Services = servicesOf(s.Targets)
	b.Stated, b.Last, b.LastOne, b.LastHere, b.Young = s.Stated, s.Last, s.LastOne, s.LastHere, s.Young
	b.Listed = s.Listed
	status := c.Ledger.OpenBarrier(now, b)
	c.settle(now)
	return status
}

func servicesOf(targets []drain.Targets) (services []drain.Service) {
	for _, t := range targets {
		services = append(services, t.Service)
	}
	return services
}

// Context updates the context of the pod. Call it before each turn except the first, but not for a
// restart, because another endpoint may have become ready. A pod that is not known any more keeps
// its last context, and what a Service that has left it meanwhile had stated.
func (b *Bar) Context(s PodContext) {
	if !s.Known {
		return
	}
	was := b.context
	s.IdleBound = max(s.IdleBound, was.IdleBound)
	s.AtMost.Wait, s.AtMost.Quiet = max(s.AtMost.Wait, was.AtMost.Wait), max(s.AtMost.Quiet, was.AtMost.Quiet)
	b.context = s
}

// Answer returns the answer to the agent.
func (b *Bar) Answer() wire.BarrierStatus {
	s := b.Status
	answer := wire.BarrierStatus{Reason: s.Reason.String(), Waiting: names(s.Waiting), Cut: s.Cut}
	if !b.Restart {
		answer.IdleBoundMillis = b.context.IdleBound.Milliseconds()
	}
	if !b.Restart && s.Reason != drain.PodDeleted && s.Reason != drain.NotEnforced {
		// Nothing can be quiet for longer than since the deletion, so a wait that must last ends no
		// earlier. Agents of every version make it.
		most := b.context.AtMost
		if most.Wait = max(most.Wait, s.Stated); most.Quiet > 0 {
			most.Quiet = max(most.Quiet, s.Stated)
		}
		answer.AtMostMillis, answer.QuietMillis = most.Wait.Milliseconds(), most.Quiet.Milliseconds()
	}
	return answer
}

// podContext checks that who may ask, and reads the context of the pod.
func (c *Coordinator) podContext(ctx context.Context, who Identity, asked wire.BarrierRequest) (PodContext, error) {
	var s PodContext
	allowed, err := c.Authenticate.MayAskBarriers(ctx, who)
	if err == nil {
		c.locked(func() { c.core.MayAsk(who, allowed) })
	}
	if err == nil && !allowed {
		return s, serve.Refuse(http.StatusForbidden, "%s may not ask for barriers: grant the verb create on "+
			"barriers.lameduck.io by a ClusterRoleBinding, as manifests/barrier does", who.Username)
	}
	if err == nil {
		s, err = c.PodContexts.PodContext(ctx, who.Name, asked.Pod)
	}
	if err != nil {
		return s, serve.Refuse(http.StatusServiceUnavailable, "%v", err)
	}
	s.Elsewhere = c.Elsewhere != nil && c.Elsewhere()
	return s, nil
}

// sleep, called with the lock, releases it until something may have changed for uid, or until wake.
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
		err = errWritten // the agent has disconnected
	case <-c.stop:
	}
	timer.Stop()
	c.mu.Lock()
	return err
}

// passed, called with the lock, records that a hook is answered.
func (c *Coordinator) passed(b *Bar, uncovered []string) {
	if b.Restart {
		c.Metrics.restarts.Inc()
		return
	}
	s, took := b.Status, time.Since(b.Status.Since)
	if !c.seen.passed(time.Now(), s) {
		return
	}
	c.Metrics.barriers.WithLabelValues(s.Reason.String()).Observe(took.Seconds())
	if s.Cut {
		c.Metrics.cut.Inc()
	}
	c.later = append(c.later, func() {
		c.Log.Info("barrier passed", append(outcome(s), "sinceSeconds", took.Seconds(),
			"statedSeconds", s.Stated.Seconds(), "cut", s.Cut, "uncovered", uncovered)...)
	})
}

// lookAtBarriers ends the barriers of pods that do not exist any more: the watch may have missed
// the end, or it came before the barrier was asked for.
func (c *Coordinator) lookAtBarriers(ctx context.Context, pods []drain.Pod) {
	for _, pod := range pods {
		if s, err := c.PodContexts.PodContext(ctx, "", pod); err == nil && !s.Known {
			c.Deleted(pod.UID)
		}
	}
}

// Deleted records that a pod does not exist any more.
func (c *Coordinator) Deleted(uid drain.UID) {
	c.change(func() {
		c.core.Deleted(time.Now(), uid)
		delete(c.seen.barriers, uid)
	})
}

// Ready records that a pod has become ready at a time. See [Core.Ready].
func (c *Coordinator) Ready(uid drain.UID, at time.Time) {
	c.change(func() { c.core.Ready(time.Now(), uid, at) })
}

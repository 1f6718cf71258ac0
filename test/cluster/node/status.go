package node

import (
	"bytes"
	"context"
	"encoding/json"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func (p *pod) ip() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.address.IsValid() {
		return ""
	}
	return p.address.String()
}

// showRunning shows the container as running since began.
func (c *container) showRunning(began time.Time) {
	c.change(func() {
		c.state = v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: metav1.NewTime(began)}}
	})
}

// writeStatuses writes the status whenever it has changed, until ctx ends. When last is closed it
// writes the last one, and returns once the API server has it.
func (p *pod) writeStatuses(ctx context.Context, last <-chan struct{}) {
	var written []byte
	for {
		final := false
		select {
		case <-p.dirty:
		case <-last:
			final = true
		case <-ctx.Done():
			return
		}
		status, ready := p.status(time.Now())
		// All that is ours, always: what the API server had before does not matter, what is not
		// ours stays.
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.uid}, "status": status})
		if err != nil {
			p.node.logger.Error("status not encoded", "pod", p.name, "err", err)
			return
		}
		if !bytes.Equal(patch, written) {
			if !p.patch(ctx, patch, last, final) {
				continue // changed since, or over
			}
			written = patch
			if ready != p.wasReady { // used by this goroutine only
				p.wasReady = ready
				kind := NotReady
				if ready {
					kind = Ready
				}
				p.event(Event{Kind: kind})
			}
		}
		if final {
			return
		}
	}
}

// patch writes a status. It gives up only if there is another one to write, or the pod is gone.
func (p *pod) patch(ctx context.Context, patch []byte, last <-chan struct{}, final bool) bool {
	for delay := 20 * time.Millisecond; ctx.Err() == nil; delay = min(2*delay, 5*time.Second) {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		_, err := p.node.client.CoreV1().Pods(p.name.Namespace).Patch(call, p.name.Name, types.StrategicMergePatchType,
			patch, metav1.PatchOptions{}, "status")
		cancel()
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // gone, or another pod has its name
			return true
		}
		if ctx.Err() == nil {
			p.node.logger.Warn("status not written", "pod", p.name, "err", err)
		}
		if final {
			last = nil
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-p.dirty:
			timer.Stop()
			poke(p.dirty)
			return false
		case <-last:
			timer.Stop()
			return false
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return false
}

// status is the part of the pod's status that is the kubelet's, and whether the pod is ready.
func (p *pod) status(now time.Time) (map[string]any, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	phase := p.phase()
	over := phase == v1.PodSucceeded || phase == v1.PodFailed
	inits, initialized := p.statuses(p.inits, true)
	mains, ready := p.statuses(p.mains, false)
	for i, c := range p.inits {
		if c.role == sidecar && !inits[i].Ready {
			ready = false
		}
	}
	ready = ready && !over

	gates := true
	for _, gate := range p.spec.ReadinessGates {
		ok := false
		for _, condition := range p.latest.Status.Conditions {
			ok = ok || condition.Type == gate.ConditionType && condition.Status == v1.ConditionTrue
		}
		gates = gates && ok
	}
	reason, gateReason := "ContainersNotReady", "ReadinessGatesNotReady"
	if over {
		reason, gateReason = "PodCompleted", "PodCompleted"
	}
	if !ready {
		gateReason = reason
	}
	conditions := []any{
		p.condition(now, v1.PodReadyToStartContainers, p.address.IsValid() && !over, ""),
		p.condition(now, v1.PodInitialized, initialized, "ContainersNotInitialized"),
		p.condition(now, v1.ContainersReady, ready, reason),
		p.condition(now, v1.PodReady, ready && gates, gateReason),
	}
	// The scheduler writes this one, unless the pod came with a node.
	if _, ok := p.conditions[v1.PodScheduled]; !ok {
		conditions = append(conditions, p.condition(now, v1.PodScheduled, true, ""))
		delete(p.conditions, v1.PodScheduled)
	}

	status := map[string]any{
		"phase": phase, "startTime": p.startTime, "observedGeneration": p.latest.Generation, "conditions": conditions,
		"hostIP": p.node.address.String(), "hostIPs": []any{map[string]any{"ip": p.node.address.String()}},
		"containerStatuses": mains,
	}
	if len(inits) > 0 {
		status["initContainerStatuses"] = inits
	}
	if p.address.IsValid() {
		status["podIP"] = p.address.String()
		status["podIPs"] = []any{map[string]any{"$patch": "replace"}, map[string]any{"ip": p.address.String()}}
	}
	return status, ready && gates
}

// condition is a condition with the time of its last change, as a patch that leaves nothing of the
// one before.
func (p *pod) condition(now time.Time, kind v1.PodConditionType, value bool, reason string) map[string]any {
	condition := v1.PodCondition{Type: kind, Status: v1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)}
	if !value {
		condition.Status = v1.ConditionFalse
	}
	if before, ok := p.conditions[kind]; ok && before.Status == condition.Status {
		condition.LastTransitionTime = before.LastTransitionTime
	}
	p.conditions[kind] = condition
	patch := map[string]any{
		"type": kind, "status": condition.Status, "lastTransitionTime": condition.LastTransitionTime,
		"observedGeneration": p.latest.Generation, "reason": nil, "message": nil,
	}
	if !value && reason != "" {
		patch["reason"] = reason
	}
	return patch
}

// statuses is what the status says of containers, and whether all of them are ready; of init
// containers, whether the main ones may start.
func (p *pod) statuses(containers []*container, init bool) ([]v1.ContainerStatus, bool) {
	result := []v1.ContainerStatus{}
	all := true
	for _, c := range containers {
		running := c.state.Running != nil
		ready := running && c.started && (c.spec.ReadinessProbe == nil || c.probed)
		fine := ready
		if c.role == initContainer {
			ready = c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
			fine = ready
		}
		if init && c.role == sidecar {
			fine = running && c.started
		}
		all = all && fine
		started := c.started
		result = append(result, v1.ContainerStatus{
			Name: c.spec.Name, Image: c.spec.Image, State: c.state, LastTerminationState: c.last,
			Ready: ready, RestartCount: c.restarts, ContainerID: c.id, Started: &started,
		})
	}
	return result, all
}

// phase follows the kubelet's getPhase: pending until each main container has run, and over when
// none will run again.
func (p *pod) phase() v1.PodPhase {
	if !p.terminated {
		for _, c := range p.mains {
			if c.id == "" {
				return v1.PodPending
			}
		}
		return v1.PodRunning
	}
	for _, c := range p.mains {
		if c.state.Terminated == nil || c.state.Terminated.ExitCode != 0 {
			return v1.PodFailed
		}
	}
	if p.failed {
		return v1.PodFailed
	}
	return v1.PodSucceeded
}

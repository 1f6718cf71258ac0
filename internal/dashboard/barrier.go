package dashboard

import (
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// maxMissing bounds the pods without the barrier that are named.
const maxMissing = 20

// addPods adds the nodes and hooks of the pods at the barrier, and the pods that were created
// without it.
func (d *Dashboard) addPods(all *api.Barriers) {
	if d.Missing != nil {
		missing := d.Missing()
		all.Missing, all.MissingPods = len(missing), append(all.MissingPods, missing[:min(len(missing), maxMissing)]...)
		all.MissingIn = map[string]int{}
		for _, pod := range missing {
			namespace, _, _ := strings.Cut(pod, "/")
			all.MissingIn[namespace]++
		}
	}
	for i := range all.Items {
		b := &all.Items[i]
		pod := d.Pod(drain.Pod{Namespace: b.Namespace, Name: b.Pod, UID: drain.UID(b.UID)})
		if pod == nil {
			continue
		}
		b.Node = pod.Spec.NodeName
		var kinds []string
		for _, h := range hooksOf(pod) {
			switch {
			case h.Kind == podfacts.HookNone:
				b.Uncovered = append(b.Uncovered, h.Container)
			case !slices.Contains(kinds, h.Kind):
				kinds = append(kinds, h.Kind)
			}
		}
		b.Hook = strings.Join(kinds, ",")
	}
}

// hooksOf returns a hook for each container of a pod, of kind none if the container does not
// wait at the barrier. It returns none if the pod has no barrier.
func hooksOf(pod *corev1.Pod) []api.Hook {
	hooks := []api.Hook{}
	barrier, _ := podfacts.BarrierOf(pod)
	if barrier.ID == "" {
		return hooks
	}
	for _, c := range pod.Spec.Containers {
		hooks = append(hooks, api.Hook{Container: c.Name, Kind: barrier.Hook(&c)})
	}
	// An annotation of the pod also names the containers that could not be given a hook.
	for name := range strings.SplitSeq(pod.Annotations[keys.BarrierUncovered], ",") {
		name = strings.TrimSpace(name)
		if name != "" && !slices.ContainsFunc(hooks, func(h api.Hook) bool { return h.Container == name }) {
			hooks = append(hooks, api.Hook{Container: name, Kind: podfacts.HookNone})
		}
	}
	return hooks
}

// explainBarrier sets a pod's part of the barrier in to, if the pod has one, and appends what is
// missing there. agents are all agents that answer hooks, including those that are suspended
// or cannot observe. asked is how many of them may be asked. node returns the node of an agent.
func explainBarrier(to *api.Explanation, pod *corev1.Pod, agents []drain.Acknowledger, asked int,
	node func(drain.Acknowledger) string, services []coverage.Service) {
	if pod.Annotations[keys.BarrierID] == "" {
		return
	}
	x := &api.ExplainedBarrier{Hooks: hooksOf(pod), Node: pod.Spec.NodeName, Asked: asked, Stated: []api.StatedWait{}}
	to.Barrier = x
	bound, err := time.ParseDuration(pod.Annotations[keys.BarrierBound])
	if err == nil {
		x.BoundSeconds = bound.Seconds()
	}
	if grace, err := strconv.Atoi(pod.Annotations[keys.BarrierGrace]); err == nil {
		x.GraceSeconds = float64(grace)
	}
	for _, h := range x.Hooks {
		if h.Kind == podfacts.HookNone {
			uncover(to, "container "+h.Container,
				"it gets SIGTERM without waiting for the barrier: its own hook cannot be wrapped")
		}
	}
	for _, p := range agents {
		if pod.Spec.NodeName != "" && node(p) == pod.Spec.NodeName && (x.Agent == "" || p.Connected && !x.Connected) {
			x.Agent, x.Connected = p.Name, p.Connected
		}
	}
	switch {
	case pod.Spec.NodeName == "":
	case x.Agent == "":
		uncover(to, api.BarrierItself, "no node agent is known on %s: the pod's hooks would be refused there, and it "+
			"would be told to stop at once", pod.Spec.NodeName)
	case !x.Connected:
		uncover(to, api.BarrierItself, "%s, which has the pod's hooks, is not connected here: if it runs, it asks "+
			"another coordinator or waits for its own kernel alone", x.Agent)
	}
	for _, s := range services {
		// The coordinator answers a little before the bound: a wait as long as that is cut there.
		cut := s.Stated.Wait > bound || s.Stated.Wait == bound && s.Stated.Quiet == 0
		stated := api.StatedWait{Namespace: s.Name.Namespace, Service: s.Name.Name, Seconds: s.Stated.Wait.Seconds(),
			AtMost: s.Stated.Quiet > 0, Cut: err == nil && cut}
		switch {
		case s.StatedError != nil:
			stated.Error = s.StatedError.Error()
		case s.Stated.Wait == 0:
			continue
		case stated.Cut:
			uncover(to, "the stated wait of "+s.Name.String(), "it states %s, and the pod's hooks last %s at most",
				s.Stated, bound)
		}
		x.Stated = append(x.Stated, stated)
	}
}

// explainConsumers appends to x the consumers of services, those that are uncovered or may be, and
// the reasons why the coverage of a Service is not known.
func explainConsumers(x *api.Explanation, services []coverage.Service) {
	for _, s := range services {
		switch {
		case !s.Known:
			uncover(x, "what else routes "+s.Name.String(), "the Service is not known here")
		case s.StatedError != nil:
			uncover(x, "the stated wait of "+s.Name.String(), "lameduck.io/stated-wait cannot be read: %v",
				s.StatedError)
		}
		for _, c := range s.Consumers {
			x.Consumers = append(x.Consumers, consumerOf(c))
			if c.State == coverage.Uncovered || c.State == coverage.Possible {
				uncover(x, c.Name+", for "+s.Name.String(), "%s", c.Why)
			}
		}
	}
}

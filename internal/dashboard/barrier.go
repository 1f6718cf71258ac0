package dashboard

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// maxMissing bounds the pods without the barrier that are named.
const maxMissing = 20

// Kinds of hooks, as they are shown.
const (
	hookHTTP = "httpGet"
	hookExec = "exec"
	hookNone = "none"
)

// Consumers is what a Service says of those who send to its pods without anybody who could
// acknowledge for them.
type Consumers struct {
	Service drain.Service
	// Stated is how long they need, by its annotation. Error is why that cannot be read.
	Stated time.Duration
	Error  string
	// Headless: clients resolve the pods' addresses. LoadBalancer: there may be one outside the
	// cluster.
	Headless, LoadBalancer bool
}

func (d *Dashboard) barriers(http.ResponseWriter, *http.Request) (any, error) {
	v := d.view()
	return api.BarrierList{At: v.At, Replica: v.Replica.Name, Barriers: v.Barriers}, nil
}

func (d *Dashboard) barriersOf(of coordinator.View) api.Barriers {
	all := api.Barriers{Open: of.OpenBarriers, Hooks: of.Barred, Items: []api.Barrier{}, MissingPods: []string{}}
	if d.Missing != nil {
		missing := d.Missing()
		all.Missing, all.MissingPods = len(missing), append(all.MissingPods, missing[:min(len(missing), maxMissing)]...)
	}
	for _, b := range of.Barriers {
		all.Items = append(all.Items, d.barrierOf(b))
	}
	return all
}

func (d *Dashboard) barrierOf(b coordinator.Barrier) api.Barrier {
	one := api.Barrier{
		Namespace: b.Pod.Namespace, Pod: b.Pod.Name, UID: string(b.Pod.UID), Phase: b.Phase.String(),
		PhaseSince: b.Entered, Reason: b.Reason.String(),
		Since: b.Since, Deadline: b.Deadline, AskedBy: b.ByName, Owed: b.Owed, Waiting: len(b.Waiting),
		Reports:       reportsOf(b.Reports),
		StatedSeconds: b.Stated.Seconds(), Cut: b.Cut, Last: b.Last || b.LastHere, Sampled: b.Sampled,
		Uncovered: []string{},
	}
	if b.Stated > 0 {
		one.StatedUntil = b.Since.Add(b.Stated)
	}
	if d.Pod == nil {
		return one
	}
	if pod := d.Pod(b.Pod); pod != nil {
		one.Node = pod.Spec.NodeName
		var kinds []string
		for _, h := range hooksOf(pod) {
			switch {
			case h.Kind == hookNone:
				one.Uncovered = append(one.Uncovered, h.Container)
			case !slices.Contains(kinds, h.Kind):
				kinds = append(kinds, h.Kind)
			}
		}
		one.Hook = strings.Join(kinds, ",")
	}
	return one
}

// hooksOf are the hooks of a pod's containers that wait at the barrier. None is there if the pod
// has no barrier.
func hooksOf(pod *corev1.Pod) []api.Hook {
	hooks := []api.Hook{}
	id := pod.Annotations[admission.BarrierIDAnnotation]
	if id == "" {
		return hooks
	}
	for _, c := range pod.Spec.Containers {
		h := api.Hook{Container: c.Name, Kind: hookNone}
		if c.Lifecycle != nil && c.Lifecycle.PreStop != nil {
			switch stop := c.Lifecycle.PreStop; {
			case stop.HTTPGet != nil && strings.Contains(stop.HTTPGet.Path, id):
				h.Kind = hookHTTP
			case stop.Exec != nil && slices.ContainsFunc(stop.Exec.Command, func(word string) bool {
				return strings.Contains(word, id)
			}):
				h.Kind = hookExec
			}
		}
		hooks = append(hooks, h)
	}
	// What could not be given a hook is written on the pod too.
	for name := range strings.SplitSeq(pod.Annotations[admission.BarrierUncoveredAnnotation], ",") {
		name = strings.TrimSpace(name)
		if name != "" && !slices.ContainsFunc(hooks, func(h api.Hook) bool { return h.Container == name }) {
			hooks = append(hooks, api.Hook{Container: name, Kind: hookNone})
		}
	}
	return hooks
}

// explainBarrier tells what a pod has for the second gate, and what is missing there. Nil: it has
// no hook. agents are those that answer hooks, suspended or not, and whether or not they can
// observe anything. asked of them may be asked; node names their pods' nodes.
func explainBarrier(pod *corev1.Pod, agents []drain.Acknowledger, asked int, node func(drain.Acknowledger) string,
	consumers []Consumers) (x *api.ExplainedBarrier, missing []api.Uncovered) {
	uncovered := func(what, format string, args ...any) {
		missing = append(missing, api.Uncovered{What: what, Why: fmt.Sprintf(format, args...)})
	}
	if pod.Annotations[admission.BarrierIDAnnotation] == "" {
		for _, c := range consumers {
			if c.Stated > 0 {
				uncovered("the stated wait of "+c.Service.String(),
					"it states %s for those who cannot acknowledge, and this pod has no barrier at which that could "+
						"be waited for", c.Stated)
			}
		}
		return nil, missing
	}
	x = &api.ExplainedBarrier{Hooks: hooksOf(pod), Node: pod.Spec.NodeName, Asked: asked, Stated: []api.StatedWait{}}
	bound, err := time.ParseDuration(pod.Annotations[admission.BarrierBoundAnnotation])
	if err == nil {
		x.BoundSeconds = bound.Seconds()
	}
	if grace, err := strconv.Atoi(pod.Annotations[admission.BarrierGraceAnnotation]); err == nil {
		x.GraceSeconds = float64(grace)
	}
	for _, h := range x.Hooks {
		if h.Kind == hookNone {
			uncovered("container "+h.Container,
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
		uncovered(api.BarrierItself, "no node agent is known on %s: the pod's hooks would be refused there, and it "+
			"would be told to stop at once", pod.Spec.NodeName)
	case !x.Connected:
		uncovered(api.BarrierItself, "%s, which has the pod's hooks, is not connected here: if it runs, it asks "+
			"another coordinator or waits for its own kernel alone", x.Agent)
	}
	for _, c := range consumers {
		if c.Stated == 0 && c.Error == "" {
			continue
		}
		cut := err == nil && c.Stated > bound
		x.Stated = append(x.Stated, api.StatedWait{Namespace: c.Service.Namespace, Service: c.Service.Name,
			Seconds: c.Stated.Seconds(), Cut: cut, Error: c.Error})
		if cut {
			uncovered("the stated wait of "+c.Service.String(), "it states %s, and the pod's hooks last %s at most",
				c.Stated, bound)
		}
	}
	return x, missing
}

// unacknowledged words who sends to the pods of services without anybody who could acknowledge.
// waits says that the pod's hooks would wait as long as Services state.
func unacknowledged(consumers []Consumers, waits bool) []api.Uncovered {
	const what = "clients that find pods by themselves"
	if len(consumers) == 0 {
		return []api.Uncovered{{What: what, Why: "those that resolve a headless Service, and load balancers outside " +
			"the cluster: nobody can say when they have let go"}}
	}
	var all []api.Uncovered
	for _, c := range consumers {
		var who []string
		if c.Headless {
			who = append(who, "clients that resolve this headless Service")
		}
		if c.LoadBalancer {
			who = append(who, "a load balancer outside the cluster")
		}
		switch {
		case c.Error != "":
			all = append(all, api.Uncovered{What: "those who send to " + c.Service.String(),
				Why: "what it states in lameduck.io/stated-wait cannot be read: " + c.Error})
		case len(who) > 0 && (c.Stated == 0 || !waits):
			all = append(all, api.Uncovered{What: what,
				Why: strings.Join(who, ", and ") + ", " + c.Service.String() + ": nobody can say when they have let " +
					"go, and " + eitherOr(c.Stated == 0, "no lameduck.io/stated-wait says how long they need",
					"the pod has no barrier at which its stated wait could be waited for")})
		}
	}
	return all
}

func eitherOr(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}

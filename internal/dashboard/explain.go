package dashboard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gorilla/mux"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

func (d *Dashboard) explain(_ http.ResponseWriter, r *http.Request) (any, error) {
	x, err := d.explainHere(r)
	if refused := (serve.Refusal{}); !ofAll(r) || d.Explanations == nil ||
		errors.As(err, &refused) && refused.Code == http.StatusBadRequest {
		return x, err
	}
	vars := mux.Vars(r)
	others, silent := d.Explanations(r.Context(), "/"+vars["namespace"]+"/"+vars["pod"]+"?operation="+x.Operation)
	// Another replica may know a pod that this one does not know yet.
	if err != nil && len(others) > 0 {
		x, others, err = others[0], others[1:], nil
	}
	x = x.Join(others...)
	x.Silent = silent
	return x, err
}

// explainHere returns the explanation of this replica. With an error, the explanation has only the
// operation.
func (d *Dashboard) explainHere(r *http.Request) (x api.Explanation, err error) {
	vars := mux.Vars(r)
	namespace, name := vars["namespace"], vars["pod"]
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return x, serve.Refuse(http.StatusBadRequest, "%.100q is not a namespace and a pod's name", namespace+"/"+name)
	}
	operation := admission.Delete
	switch said := r.URL.Query().Get("operation"); said {
	case "", string(admission.Delete):
	case string(admission.Evict):
		operation = admission.Evict
	default:
		return x, serve.Refuse(http.StatusBadRequest, "operation %.100q is not delete or evict", said)
	}
	x.Operation = string(operation)
	ctx, cancel := context.WithTimeout(r.Context(), explainTimeout)
	defer cancel()
	e, err := d.Explainer.Explain(ctx, time.Now(), operation, namespace, name)
	switch {
	case errors.Is(err, admission.ErrNoPod):
		return x, serve.Refuse(http.StatusNotFound, "%v", err)
	case errors.Is(err, admission.ErrCold):
		return x, serve.Refuse(http.StatusServiceUnavailable, "%v", err)
	case err != nil:
		return x, err
	}
	services := []drain.Service{}
	for _, t := range e.Targets {
		services = append(services, t.Service)
	}
	parties, gateways := d.Coordinator.Acknowledgers(services)
	if len(services) == 0 {
		// No Service lists the pod. If the pod has a barrier, agents that observe every Service are
		// asked there nevertheless.
		barrier := e.Pod.Annotations[keys.BarrierID] != ""
		parties = slices.DeleteFunc(parties, func(p drain.Acknowledger) bool {
			return !barrier || p.Hold || !p.Barrier
		})
	}
	covers := make([]coverage.Service, len(services))
	for i, service := range services {
		if covers[i].Name = service; d.Coverage == nil {
			continue
		}
		if covers[i], err = d.Coverage(ctx, service, keys.Barred(e.Pod.Annotations)); err != nil {
			d.Log.Warn("find out what routes a Service", "service", service.String(), "error", err)
		}
	}
	x = explanation(e, parties, gateways, func(p drain.Acknowledger) string {
		return d.nodeOf(p.Name, p.ID)
	}, covers)
	v := d.Coordinator.ViewPod(drain.UID(x.UID), maxReports)
	d.addPods(&v.Barriers)
	x.At, x.Replica = v.At, v.Replica.Name
	if len(v.Drains.Items) > 0 {
		x.Drain = &v.Drains.Items[0]
	}
	if len(v.Barriers.Items) > 0 && x.Barrier != nil {
		x.Barrier.Open = &v.Barriers.Items[0]
	}
	return x, nil
}

// nodeOf returns the node of an agent, "" if its pod is not known.
func (d *Dashboard) nodeOf(name string, id drain.AgentID) string {
	namespace, name, _ := strings.Cut(name, "/")
	if pod := d.Pod(drain.Pod{Namespace: namespace, Name: name, UID: drain.UID(id)}); pod != nil {
		return pod.Spec.NodeName
	}
	return ""
}

// explanation describes in words what would happen to the pod. It does no I/O and reads no clock.
func explanation(e admission.Explanation, parties []drain.Acknowledger, gateways map[drain.AgentID]string,
	node func(drain.Acknowledger) string, covers []coverage.Service) api.Explanation {
	x := api.Explanation{
		Namespace: e.Pod.Namespace, Pod: e.Pod.Name, UID: string(e.Pod.UID), Operation: string(e.Facts.Operation),
		Answer: string(e.Verdict.Action), Reason: string(e.Verdict.Reason), Unroute: e.Verdict.Unroute, Queued: e.Full,
		Services: []api.ExplainedService{}, Gates: []api.Gate{}, Uncovered: []api.Uncovered{},
		Consumers: []api.Consumer{}, Differs: []string{},
	}
	for _, t := range e.Targets {
		x.Services = append(x.Services, api.ExplainedService{Namespace: t.Service.Namespace, Name: t.Service.Name,
			Usable: len(t.Usable)})
	}
	barrier := e.Pod.Annotations[keys.BarrierID] != ""
	observers, unable, asked := explainGates(&x, e.Verdict, barrier, parties, gateways, node)
	explainConsumers(&x, covers)
	explainBarrier(&x, e.Pod, append(observers, unable...), asked, node, covers)
	x.Summary = summary(x, e)
	if b := x.Barrier; b != nil && b.Asked > 0 && e.Verdict.Action != admission.Deny {
		x.Summary += fmt.Sprintf(" Then it would be told to stop when %s",
			count(b.Asked, "observed gateway has acknowledged", "observed gateways have acknowledged"))
		if b.BoundSeconds > 0 {
			x.Summary += fmt.Sprintf(", %s after the deletion at most",
				time.Duration(b.BoundSeconds*float64(time.Second)))
		}
		x.Summary += "."
	}
	return x
}

// uncover appends to x a way of traffic that the deletion would not wait for.
func uncover(x *api.Explanation, what, format string, args ...any) {
	x.Uncovered = append(x.Uncovered, api.Uncovered{What: what, Why: fmt.Sprintf(format, args...)})
}

// explainGates appends to x the gates at which parties would be asked, and the reasons why others
// would not be. observers are the agents that observe. asked counts the observers that are not
// suspended; 0 if the pod has no barrier. unable are the node agents that answer hooks but cannot
// observe kube-proxy on their nodes.
func explainGates(x *api.Explanation, verdict admission.Verdict, barrier bool, parties []drain.Acknowledger,
	gateways map[drain.AgentID]string, node func(drain.Acknowledger) string,
) (observers, unable []drain.Acknowledger, asked int) {
	// A deletion that is denied now waits when the caller tries again.
	waits := verdict.Action != admission.Allow
	ask := func(p drain.Acknowledger, at drain.Gate) {
		x.Gates = append(x.Gates, api.Gate{Agent: p.Name, Node: node(p), Gateway: gateways[p.ID], Gate: at.String(),
			Connected: p.Connected, Why: why(p)})
	}
	for _, p := range parties {
		what := cmp.Or(gateways[p.ID], "gateway") + " of " + p.Name
		// an agent that may be either is asked first as a directed one
		observes := p.Barrier && !(!p.Declared && p.Hold)
		if observes {
			observers = append(observers, p)
		}
		switch {
		case p.Suspended && (p.Hold || p.Barrier):
			uncover(x, what, "it is suspended: it has let drain after drain expire, so that it is told and not "+
				"waited for")
			continue
		case p.Hold && waits:
			ask(p, drain.AtHold)
		case p.Hold:
			uncover(x, what, "the deletion does not wait (%s)", verdict.Reason)
		}
		if observes && barrier {
			asked++
			ask(p, drain.AtBarrier)
		}
		if !p.Hold && !p.Barrier {
			switch {
			case !p.Until.IsZero() && len(p.Routes) == 0:
				uncover(x, what, "it is not connected, and its pod is not ready: it is not waited for")
			case !p.Until.IsZero():
				uncover(x, what, "it is not connected and not ready any more, and has declared that it routes %s: it "+
					"is not waited for", routed(p))
			case slices.ContainsFunc(p.Routes, func(r drain.Route) bool {
				return r.Service == drain.EveryService && r.Kind == drain.Observed
			}):
				unable = append(unable, p)
				uncover(x, what, "it sees no rules of kube-proxy: what sends to pods on its node cannot be observed, "+
					"and is not waited for")
			default:
				uncover(x, what, "it routes %s: that tells nothing of a single pod", routed(p))
			}
		}
	}
	return observers, unable, asked
}

func why(p drain.Acknowledger) string {
	var text string
	if !p.Declared {
		text = "it has not declared its routes, so it may route everything"
	} else {
		text = "it routes " + routed(p)
	}
	switch {
	case p.Connected:
	case !p.Until.IsZero():
		text += "; it is not connected, and its pod is not ready: it is waited for only briefly"
	default:
		text += "; it is not connected: it is waited for until the deadline"
	}
	return text
}

func routed(p drain.Acknowledger) string {
	var parts []string
	for _, r := range p.Routes {
		what := r.Service.String()
		if r.Service == drain.EveryService {
			what = "every Service"
		}
		parts = append(parts, fmt.Sprintf("%s via %s", what, r.Via))
	}
	return strings.Join(parts, ", ")
}

func summary(x api.Explanation, e admission.Explanation) string {
	verb := "deleted"
	if e.Facts.Operation == admission.Evict {
		verb = "evicted"
	}
	holds := 0
	for _, g := range x.Gates {
		if g.Gate == drain.AtHold.String() {
			holds++
		}
	}
	switch e.Verdict.Action {
	case admission.Drain:
		text := fmt.Sprintf("It would be %s when %s to it %s.", verb,
			count(holds, "gateway that routes", "gateways that route"),
			choose(holds, "has acknowledged", "have acknowledged"))
		if holds == 0 {
			text = fmt.Sprintf("It would be %s within 2 s: every agent that would be asked is suspended.", verb)
		}
		switch {
		case e.Verdict.Reason == admission.BarrierWaits:
			text += " Requests in flight would end at its barrier."
		case e.Idle != "":
			text += " Requests in flight would have to end first, not at its barrier: " + e.Idle + "."
		}
		if x.Queued != "" {
			text += " First it would wait for capacity: " + x.Queued + "."
		}
		return text
	case admission.Deny:
		return fmt.Sprintf("It would not be %s now: %s", verb, e.Verdict.Message)
	default:
		text := fmt.Sprintf("It would be %s at once: %s.", verb, e.Verdict.Words)
		if e.Verdict.Unroute {
			text += " Gateways would be told, and not waited for."
		}
		return text
	}
}

func count(n int, one, many string) string { return fmt.Sprintf("%d %s", n, choose(n, one, many)) }

func choose(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

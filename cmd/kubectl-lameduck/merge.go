package main

import (
	"cmp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// whole is the merged state of all coordinators. Operators read it with --output json, so fields
// may be added but never change their meaning.
type whole struct {
	metav1.TypeMeta `json:",inline"`
	Coordinators    []coordinator `json:"coordinators"`
	// Unasked: a coordinator sees no webhook configuration, so deletions do not wait.
	Unasked bool       `json:"unasked,omitempty"`
	Drains  []oneDrain `json:"drains"`
	Agents  []oneAgent `json:"agents"`
	// MoreDrains and MoreAgents are how many further ones coordinators know and do not list, of all
	// namespaces.
	MoreDrains int `json:"moreDrains"`
	MoreAgents int `json:"moreAgents"`
	// Outcomes are sorted by time, the newest first.
	Outcomes []oneOutcome `json:"outcomes"`
	// Propagation has the values of each coordinator separately, because quantiles cannot be
	// merged.
	Propagation []onePropagation `json:"propagation"`
	// Barriers are the pods at the barrier, the oldest first. BarriersOpen is how many there are,
	// BarriersWaiting how many of these wait for SIGTERM. Coordinators may list fewer.
	Barriers        []api.OpenBarrier `json:"barriers"`
	BarriersOpen    int               `json:"barriersOpen"`
	BarriersWaiting int               `json:"barriersWaiting"`
	// BarrierMissing is how many pods ask for the barrier and were created without it,
	// BarrierMissingPods the first of them.
	BarrierMissing     int      `json:"barrierMissing"`
	BarrierMissingPods []string `json:"barrierMissingPods"`
	// TargetHealth is taken from the coordinator that has it from the most agents. Agents send the
	// same to every coordinator.
	TargetHealth api.TargetHealth `json:"targetHealth"`
	// Coverage is taken from the coordinator that finds the most uncovered consumers. Null: none
	// answered.
	Coverage *api.Coverage `json:"coverage"`
}

// coordinator is the state of one replica.
type coordinator struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Error is the reason why the replica did not answer. Empty: it answered.
	Error   string    `json:"error,omitempty"`
	Started time.Time `json:"started,omitzero"`
	// Drains, Connected, Expected and Holds are the counts of this replica alone.
	Drains    int  `json:"drains"`
	Connected int  `json:"connected"`
	Expected  int  `json:"expected"`
	Holds     int  `json:"holds"`
	Stopping  bool `json:"stopping,omitempty"`
}

// oneDrain is the drain of one pod, merged from all coordinators that have one. Its phase is the
// earliest of theirs, and its times are those of the oldest.
type oneDrain struct {
	api.Drain
	// Coordinators are the names of the coordinators on which the drain is open.
	Coordinators []string `json:"coordinators"`
	// AgeSeconds is the time since the drain began. RemainingSeconds is the time until its
	// deadline. Both are by the coordinator's clock.
	AgeSeconds       float64 `json:"ageSeconds"`
	RemainingSeconds float64 `json:"remainingSeconds"`
}

// oneAgent is an agent, merged from all coordinators. State is the worst state that any of them
// reports.
type oneAgent struct {
	api.Agent
	// ConnectedTo are the names of the coordinators that the agent is connected to. Whether it is
	// connected to those in UnlistedBy is not known: they know more agents than they list.
	ConnectedTo []string `json:"connectedTo"`
	UnlistedBy  []string `json:"unlistedBy,omitempty"`
}

type oneOutcome struct {
	api.Outcome
	Coordinator string `json:"coordinator"`
}

type onePropagation struct {
	api.Propagation
	Coordinator string `json:"coordinator"`
}

func merge(answers []answer[api.View]) whole {
	w := whole{TypeMeta: kind("Status"), Coordinators: []coordinator{}, Outcomes: []oneOutcome{},
		Propagation: []onePropagation{}, BarrierMissingPods: []string{},
		TargetHealth: api.TargetHealth{Services: []api.ServiceHealth{}}}
	barriers := api.Barriers{Items: []api.OpenBarrier{}}
	var drains []oneDrain
	var agents []oneAgent
	for _, a := range answers {
		c := coordinator{Name: a.replica.name, Ready: a.replica.ready}
		if a.err != nil {
			c.Error = a.err.Error()
			w.Coordinators = append(w.Coordinators, c)
			continue
		}
		v := a.said
		c.Started, c.Stopping, c.Holds = v.Replica.Started, v.Replica.Stopping, v.Replica.Holds
		c.Drains, c.Expected, c.Connected = v.Drains.Open, v.Agents.Expected, v.Agents.Expected-v.Agents.Missing
		w.Coordinators = append(w.Coordinators, c)
		w.Unasked = w.Unasked || v.Replica.Unasked
		w.MoreDrains = max(w.MoreDrains, v.Drains.Open-len(v.Drains.Items))
		w.MoreAgents = max(w.MoreAgents, v.Agents.Known)
		for _, d := range v.Drains.Items {
			drains = append(drains,
				oneDrain{d, []string{c.Name}, v.At.Sub(d.Since).Seconds(), d.Deadline.Sub(v.At).Seconds()})
		}
		for _, g := range v.Agents.Items {
			one := oneAgent{Agent: g, ConnectedTo: []string{}}
			if g.Connected {
				one.ConnectedTo = append(one.ConnectedTo, c.Name)
			}
			agents = append(agents, one)
		}
		for _, o := range v.Outcomes {
			w.Outcomes = append(w.Outcomes, oneOutcome{o, c.Name})
		}
		barriers = barriers.Join(v.Barriers)
		if v.Barriers.Missing > w.BarrierMissing {
			w.BarrierMissing, w.BarrierMissingPods = v.Barriers.Missing, v.Barriers.MissingPods
		}
		if v.TargetHealth.Agents > w.TargetHealth.Agents {
			w.TargetHealth = v.TargetHealth
		}
		for _, p := range v.Propagation {
			w.Propagation = append(w.Propagation, onePropagation{p, c.Name})
		}
	}
	w.Drains = api.Joined(func(d oneDrain) string { return d.UID }, drains)
	w.Agents = api.Joined(func(g oneAgent) string { return g.ID }, agents)
	w.MoreAgents = max(0, w.MoreAgents-len(w.Agents))
	for _, a := range answers {
		if of := a.said.Agents; a.err == nil && of.Known > len(of.Items) {
			for i, g := range w.Agents {
				if !slices.ContainsFunc(of.Items, func(is api.Agent) bool { return is.ID == g.ID }) {
					w.Agents[i].UnlistedBy = append(g.UnlistedBy, a.replica.name)
				}
			}
		}
	}
	w.Barriers, w.BarriersOpen, w.BarriersWaiting = barriers.Items, barriers.Open, barriers.Waiting
	slices.SortFunc(w.Drains, func(a, b oneDrain) int {
		return cmp.Or(-cmp.Compare(a.AgeSeconds, b.AgeSeconds), cmp.Compare(a.UID, b.UID))
	})
	slices.SortFunc(w.Barriers, func(a, b api.OpenBarrier) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.UID, b.UID))
	})
	slices.SortFunc(w.Agents, func(a, b oneAgent) int {
		return cmp.Or(api.CompareAgents(a.State, b.State), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	slices.SortStableFunc(w.Outcomes, func(a, b oneOutcome) int {
		return cmp.Or(b.At.Compare(a.At), cmp.Compare(a.UID, b.UID))
	})
	return w
}

// Join merges the drain with the same pod's drain on another coordinator.
func (d oneDrain) Join(other oneDrain) oneDrain {
	return oneDrain{d.Drain.Join(other.Drain), append(d.Coordinators, other.Coordinators...),
		max(d.AgeSeconds, other.AgeSeconds), min(d.RemainingSeconds, other.RemainingSeconds)}
}

// Join merges the agent with the same agent as another coordinator sees it.
func (g oneAgent) Join(other oneAgent) oneAgent {
	return oneAgent{g.Agent.Join(other.Agent), append(g.ConnectedTo, other.ConnectedTo...), nil}
}

func in(drains []oneDrain, namespace string) []oneDrain {
	if namespace == "" {
		return drains
	}
	return slices.DeleteFunc(slices.Clone(drains), func(d oneDrain) bool { return d.Namespace != namespace })
}

// waitsFor names the agents that a drain waits for, with their reported states.
func waitsFor(d api.Drain, most int) string {
	switch d.Phase {
	case "Released":
		return "nothing (" + d.Reason + ")"
	case "Queued":
		return "capacity in its Service"
	}
	var parts []string
	for _, w := range d.Reports {
		if w.State == "idle" || w.Suspended {
			continue
		}
		state := w.State
		if !w.Connected {
			state = "not connected"
		}
		parts = append(parts, w.Agent+" ("+state+")")
	}
	all := max(d.Waiting, len(parts)) // coordinators list only some of many
	switch parts = parts[:min(len(parts), most)]; {
	case all == 0:
		return "nothing"
	case len(parts) == 0:
		return count(all) + " agents"
	case all > len(parts):
		parts = append(parts, "and "+count(all-len(parts))+" more")
	}
	return strings.Join(parts, ", ")
}

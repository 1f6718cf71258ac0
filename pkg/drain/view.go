package drain

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// This file is for reading a ledger without changing it. A read costs as much as it returns: an
// agent for each drain that it may have to acknowledge.

// AgentReport is the report of an agent that must acknowledge a drain.
type AgentReport struct {
	Agent AgentID
	// Name is namespace/name of the agent's pod, or its ID if the API does not list it.
	Name  string
	State State
	// Received is the time as of which the report counts, Since when the agent first reported
	// State. Zero: no report counts, and State is StateUnknown.
	Received, Since time.Time
	Connected       bool
	// Suspended: the drain does not wait for it.
	Suspended bool
}

func (l *Ledger) agentReports(now time.Time, d *drain, most int) []AgentReport {
	// Few of many are asked for. So those of each state are collected apart, up to that number.
	var of [Idle + 1][]AgentReport
	said := l.reportsOn(d)
	for _, a := range l.owing(d) {
		if owes, _ := l.owes(now, a); !owes {
			continue
		}
		r := said[a.slot]
		state, _, _ := l.stateOf(now, r, d)
		if state > Idle || len(of[state]) >= most {
			continue
		}
		w := AgentReport{Agent: a.ID, Name: a.Name, State: state, Connected: a.session != 0}
		w.Suspended, _ = l.waived(now, a, d)
		if state != StateUnknown {
			w.Received, w.Since = r.at, r.since
			if r == &a.upTo {
				w.Since = a.saidSince(d)
			}
		}
		of[state] = append(of[state], w)
	}
	words := slices.Concat(of[:]...)
	return words[:min(len(words), most)]
}

// View is a drain with the agents' reports.
type View struct {
	Status
	// Reports are those of the agents that must acknowledge it, the lowest state first: at most as
	// many as were asked for.
	Reports []AgentReport
	// ByName is namespace/name of the pod of the agent that asks for a barrier, on the pod's node.
	ByName string
	// Last: no other endpoint is ready, so that gateways may keep the pod at the barrier. LastHere:
	// none is on its node.
	Last, LastHere bool
	// Sampled: only a sample of the observing agents is asked. For the others, the drain waits as
	// long as agents usually take.
	Sampled bool
}

// View returns the drain of uid at a gate, with at most most reports. ok is false if there is none,
// or at the barrier none that is open and lets hooks wait.
func (l *Ledger) View(now time.Time, gate Gate, uid UID, most int) (v View, ok bool) {
	d := l.at(gate, uid)
	if d == nil || gate == AtBarrier && (!d.open || d.barrier.observe) {
		v.Pod.UID = uid
		return v, false
	}
	v.Status = l.status(now, d)
	if d.open {
		v.Reports = l.agentReports(now, d, most)
	}
	if b := d.barrier; gate == AtBarrier {
		v.ByName, v.Sampled = string(b.by), b.sample != nil
		v.Last, v.LastHere = !b.last.IsZero(), !b.lastHere.IsZero()
		if a := l.agents[b.by]; a != nil && a.Name != "" {
			v.ByName = a.Name
		}
	}
	return v, true
}

// Oldest returns the pods of the oldest open drains at a gate, at most most. Those that are
// Released come last, because a barrier stays open until its pod is deleted. open is how many are
// open, waiting how many of these are not Released.
func (l *Ledger) Oldest(gate Gate, most int) (oldest []UID, open, waiting int) {
	var all []*drain
	l.each(func(d *drain) {
		if d.open && d.gate == gate && !d.barrier.observe {
			all = append(all, d)
			waiting += number(d.phase != Released)
		}
	})
	slices.SortFunc(all, func(a, b *drain) int {
		return cmp.Or(number(a.phase == Released)-number(b.phase == Released), a.since.Compare(b.since),
			cmp.Compare(a.pod.UID, b.pod.UID))
	})
	for _, d := range all[:min(len(all), most)] {
		oldest = append(oldest, d.pod.UID)
	}
	return oldest, len(all), waiting
}

// AgentInfo is an agent as a ledger knows it.
type AgentInfo struct {
	ID AgentID
	// Name is namespace/name of its pod, or its ID if the API does not list it.
	Name string
	// Expected: the API lists it. Ready and Label are from there.
	Expected, Ready bool
	// Pending: its containers have not started yet, so it routes nothing.
	Pending bool
	Label   Label
	// Connected reports whether it has a session here. Otherwise Lost is when its last session
	// ended or, if it never connected, when the API first listed it.
	Connected bool
	Lost      time.Time
	// Declared: it has declared what it routes, if only on an earlier session: Routes, which must
	// not be changed, and Population. Otherwise it may route everything.
	Declared   bool
	Routes     map[Service]Route
	Population string
	// Namespaces are those for which it receives releases, sorted; "*" is all. Only [Ledger.Agent]
	// sets it.
	Namespaces []string
	// Left: its gateway accepts no more traffic. Suspended: drains do not wait for it.
	Left, Suspended bool
}

// Agent returns an agent. One that is not known has no ID.
func (l *Ledger) Agent(id AgentID) AgentInfo {
	a := l.agents[id]
	if a == nil {
		return AgentInfo{}
	}
	k := a.known()
	k.Namespaces = slices.Sorted(maps.Keys(a.namespaces))
	return k
}

func (a *agent) known() AgentInfo {
	k := AgentInfo{
		ID: a.ID, Name: a.Name, Expected: a.listed, Ready: a.Ready, Pending: a.Pending, Label: a.Label,
		Connected: a.session != 0, Declared: a.declared, Routes: a.routes, Population: a.population, Left: a.left,
		Suspended: a.breaker.open,
	}
	if !k.Connected {
		k.Lost = a.lostAt
	}
	return k
}

// Agents returns all known agents, sorted by name.
func (l *Ledger) Agents() []AgentInfo {
	all := make([]AgentInfo, 0, len(l.agents))
	for _, a := range l.agents {
		all = append(all, a.known())
	}
	slices.SortFunc(all, func(a, b AgentInfo) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// Acknowledger is an agent whose gateway may send to the pods of a Service, and what it can
// acknowledge.
type Acknowledger struct {
	AgentInfo
	// Routes are what it declared of the Services in question.
	Routes []Route
	// Hold: it would have to acknowledge at the hold. Barrier: it can only be asked after the
	// deletion has begun. Neither: it cannot acknowledge.
	Hold, Barrier bool
	// Until is when drains stop waiting for it, because it is away and its pod is not ready. Zero:
	// they wait.
	Until time.Time
}

// Acknowledgers returns the agents whose gateways may send to the pods of services at now, sorted
// by name, whether they would have to acknowledge a drain of such a pod or not. Agents that have
// left are not among them.
func (l *Ledger) Acknowledgers(now time.Time, services []Service) []Acknowledger {
	parties := []Acknowledger{}
	for _, k := range l.Agents() {
		a := l.agents[k.ID]
		p := Acknowledger{AgentInfo: k}
		if a.left {
			continue
		}
		if !p.Declared {
			p.Hold, p.Barrier = a.Label != LabelObserved, a.Label != LabelDirected
		}
		for _, s := range slices.Concat(services, []Service{EveryService}) {
			r, ok := a.routes[s]
			if !ok {
				continue
			}
			p.Routes = append(p.Routes, r)
			p.Hold = p.Hold || owesAt(AtHold, r)
			p.Barrier = p.Barrier || owesAt(AtBarrier, r)
		}
		if p.Declared && len(p.Routes) == 0 {
			continue
		}
		if !k.Connected && !k.Ready {
			p.Until = a.lostAt.Add(l.times.Away)
			p.Hold = p.Hold && now.Before(p.Until)
		}
		parties = append(parties, p)
	}
	return parties
}

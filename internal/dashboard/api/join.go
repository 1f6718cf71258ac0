package api

import (
	"cmp"
	"slices"
	"time"
)

// phases are in the order in which a drain goes through them. agentStates begin with the states
// that operators should see first. reportStates begin with the state that is least far.
var (
	phases       = []string{"Queued", "Unrouting", "Quiescing", "Released"}
	agentStates  = []string{AgentSuspended, AgentMissing, AgentStarting, AgentConnected, AgentLeft, AgentGone}
	reportStates = []string{"unknown", "routing", "kept", "removed", "idle"}
)

// before reports whether a comes before b in order. A value that is not in order comes first, so
// that it is shown.
func before(order []string, a, b string) bool { return slices.Index(order, a) < slices.Index(order, b) }

// CompareAgents compares the states of two agents: a state that operators should see first is less.
func CompareAgents(a, b string) int {
	return cmp.Compare(slices.Index(agentStates, a), slices.Index(agentStates, b))
}

// Join merges the drain with the same pod's drain on another replica. The earlier phase counts,
// because all replicas have to release the drain.
func (d Drain) Join(other Drain) Drain {
	reports := slices.Clone(d.Reports)
	for _, o := range other.Reports {
		i := slices.IndexFunc(reports, func(r AgentReport) bool { return r.Agent == o.Agent })
		switch {
		case i < 0:
			reports = append(reports, o)
		case before(reportStates, o.State, reports[i].State):
			reports[i] = o
		}
	}
	slices.SortStableFunc(reports, func(a, b AgentReport) int {
		return cmp.Compare(slices.Index(reportStates, a.State), slices.Index(reportStates, b.State))
	})
	if before(phases, other.Phase, d.Phase) {
		d = other
	}
	d.Reports = reports
	return d
}

// Join merges the agent with the same agent as another replica sees it. The worse state counts.
func (a Agent) Join(other Agent) Agent {
	if before(agentStates, other.State, a.State) {
		return other
	}
	return a
}

// Join merges the barrier with the same pod's barrier on another replica. The node agent asks one
// replica, and another one if the first does not answer. So the barrier with the later phase change
// counts.
func (b OpenBarrier) Join(other OpenBarrier) OpenBarrier {
	if other.PhaseSince.After(b.PhaseSince) {
		return other
	}
	return b
}

// ItemsWaiting returns how many of Items are not Released.
func (b Barriers) ItemsWaiting() (n int) {
	for _, i := range b.Items {
		if i.Phase != "Released" {
			n++
		}
	}
	return n
}

// Join merges the barriers of another replica into b. What one replica does not list is taken for
// other barriers than the other's, because most pods have one on one replica alone.
func (b Barriers) Join(o Barriers) Barriers {
	open := max(b.Open-len(b.Items), 0) + max(o.Open-len(o.Items), 0)
	waiting := max(b.Waiting-b.ItemsWaiting(), 0) + max(o.Waiting-o.ItemsWaiting(), 0)
	b.Items = Joined(func(b OpenBarrier) string { return b.UID }, b.Items, o.Items)
	b.Open, b.Waiting, b.Hooks = open+len(b.Items), waiting+b.ItemsWaiting(), b.Hooks+o.Hooks
	return b
}

// sameEnd is the largest difference between the times at which two replicas record the end of the
// same drain. A pod that was not deleted is not drained again within that time.
const sameEnd = 30 * time.Second

// joinOutcomes merges the outcomes of another replica into all. Of two outcomes of the same drain,
// an abnormal one counts, and otherwise one with another reason than PodDeleted.
func joinOutcomes(all, others []Outcome) []Outcome {
	all = slices.Clone(all)
	for _, o := range others {
		i := slices.IndexFunc(all, func(had Outcome) bool {
			return had.UID == o.UID && had.Gate == o.Gate && had.At.Sub(o.At).Abs() < sameEnd
		})
		switch {
		case i < 0:
			all = append(all, o)
		case o.Abnormal && !all[i].Abnormal || o.Abnormal == all[i].Abnormal && all[i].Reason == "PodDeleted":
			all[i] = o
		}
	}
	return all
}

// Joined merges lists. Items with the same key are joined into one.
func Joined[T interface{ Join(T) T }](key func(T) string, lists ...[]T) []T {
	all, at := []T{}, map[string]int{}
	for _, list := range lists {
		for _, one := range list {
			if i, had := at[key(one)]; had {
				all[i] = all[i].Join(one)
				continue
			}
			at[key(one)] = len(all)
			all = append(all, one)
		}
	}
	return all
}

// Join merges the drains, barriers, agents and outcomes of other replicas into v. Data that agents
// send to every replica alike, such as the health of targets, stays as it is in v.
func (v View) Join(others ...View) View {
	if len(others) == 0 {
		return v
	}
	for _, o := range others {
		v.Drains.Items = Joined(func(d Drain) string { return d.UID }, v.Drains.Items, o.Drains.Items)
		v.Barriers = v.Barriers.Join(o.Barriers)
		v.Agents.Items = Joined(func(a Agent) string { return a.ID }, v.Agents.Items, o.Agents.Items)
		v.Outcomes = joinOutcomes(v.Outcomes, o.Outcomes)
		v.Drains.Open = max(v.Drains.Open, o.Drains.Open, len(v.Drains.Items))
		v.Replica.Holds = max(v.Replica.Holds, o.Replica.Holds)
		v.Agents.Expected = max(v.Agents.Expected, o.Agents.Expected)
		v.Agents.Known = max(v.Agents.Known, o.Agents.Known)
		v.Agents.Missing = max(v.Agents.Missing, o.Agents.Missing)
		v.Agents.Suspended = max(v.Agents.Suspended, o.Agents.Suspended)
		v.With = append(slices.Clone(v.With), o.Replica.Name)
	}
	slices.SortStableFunc(v.Drains.Items, func(a, b Drain) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.UID, b.UID))
	})
	slices.SortStableFunc(v.Barriers.Items, func(a, b OpenBarrier) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.UID, b.UID))
	})
	slices.SortStableFunc(v.Agents.Items, func(a, b Agent) int { return CompareAgents(a.State, b.State) })
	slices.SortStableFunc(v.Outcomes, func(a, b Outcome) int {
		return cmp.Or(b.At.Compare(a.At), cmp.Compare(a.UID, b.UID))
	})
	return v
}

// Join merges the explanations of other replicas into x. Replicas read the same cluster, except for
// the most recent changes. So x counts, and Differs names the others. A gate counts as not
// connected if one replica lacks its agent. Hooks are answered if their agent is connected to one
// replica.
func (x Explanation) Join(others ...Explanation) Explanation {
	x.Differs, x.Uncovered = append([]string{}, x.Differs...), slices.Clone(x.Uncovered)
	for _, o := range others {
		if o.Answer != x.Answer || o.Reason != x.Reason || o.UID != x.UID {
			x.Differs = append(x.Differs, o.Replica+": "+o.Summary)
		}
		if o.UID != x.UID {
			continue
		}
		x.Drain = joined(x.Drain, o.Drain)
		if x.Barrier != nil && o.Barrier != nil {
			b := *x.Barrier
			if !b.Connected && o.Barrier.Connected {
				b.Agent, b.Connected = o.Barrier.Agent, true
			}
			b.Open = joined(b.Open, o.Barrier.Open)
			x.Barrier = &b
		}
		x.Gates = Joined(func(g Gate) string { return g.Agent + " " + g.Gate }, x.Gates, o.Gates)
		for _, u := range o.Uncovered {
			if !slices.Contains(x.Uncovered, u) {
				x.Uncovered = append(x.Uncovered, u)
			}
		}
	}
	if x.Barrier != nil && x.Barrier.Connected {
		x.Uncovered = slices.DeleteFunc(x.Uncovered, func(u Uncovered) bool { return u.What == BarrierItself })
	}
	return x
}

// joined joins two items, of which either may be missing.
func joined[T interface{ Join(T) T }](a, b *T) *T {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return new((*a).Join(*b))
}

// Join merges the gate with the same gate on another replica: one that lacks the agent counts.
func (g Gate) Join(other Gate) Gate {
	if g.Connected {
		return other
	}
	return g
}

// Join adds the measurements of other replicas. Each deletion is measured by one replica.
func (r Report) Join(others ...Report) Report {
	for _, o := range others {
		if o.Since.After(r.Since) {
			r.Since = o.Since
		}
		r.Namespaces = Joined(func(n NamespaceReport) string { return n.Namespace }, r.Namespaces, o.Namespaces)
	}
	slices.SortFunc(r.Namespaces, func(a, b NamespaceReport) int { return cmp.Compare(a.Namespace, b.Namespace) })
	return r
}

// Join adds the measurements of another replica in the same namespace.
func (n NamespaceReport) Join(other NamespaceReport) NamespaceReport {
	n.Deletions, n.InFlight = n.Deletions+other.Deletions, n.InFlight+other.InFlight
	n.Unmeasured += other.Unmeasured
	n.WaitSeconds = slices.Concat(n.WaitSeconds, other.WaitSeconds)
	return n
}

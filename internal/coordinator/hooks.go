package coordinator

import (
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

const (
	// maxWorkloads bounds the workloads that are remembered: one that is forgotten costs a wait for
	// Idle at the hold.
	maxWorkloads = 8192
	// toldFor is how long other replicas are told that a hook has asked here. If none has asked
	// within missedAfter of an answer, the deletion has passed the barrier by.
	toldFor     = time.Minute
	missedAfter = 15 * time.Second
	// missedKept is for how long the holds of a workload wait for Idle after that: the hooks of
	// some nodes may arrive, and those of others not.
	missedKept = 10 * time.Minute
)

// Hooks is what a replica knows of the preStop hooks of a pod.
type Hooks struct {
	// IdleBound is how long a barrier waits for Idle.
	IdleBound time.Duration
	// Connected: an agent of the pod's node has a stream here. Allowed: its service account had the
	// right to ask for barriers when it last did. Crowded: half of the places are taken that its
	// hooks, or those of all agents, have at this replica.
	Connected, Allowed, Crowded bool
	// Heard: a hook of the pod's workload has asked a coordinator, and none was missed lately.
	Heard bool
}

// hookMemory is what a replica remembers of hooks.
type hookMemory struct {
	// nodes are the agents of each node that observe, allowed the rights of service accounts.
	nodes   map[string][]drain.AgentID
	allowed map[string]bool
	// heard are the workloads of which a hook has asked, and from when on that counts. told are the
	// hooks that have asked here.
	heard map[string]time.Time
	told  map[drain.UID]relied
	// relies are the deletions that this replica, as the opener, has left to hooks which have not
	// asked yet.
	relies map[drain.UID]relied
}

type relied struct {
	workload string
	at       time.Time
}

// Hooks returns what is known of the hooks of a pod of workload on node.
func (c *Core) Hooks(now time.Time, node, workload string) Hooks {
	from, heard := c.hooks.heard[workload]
	h := Hooks{IdleBound: c.times.IdleBound, Heard: heard && !now.Before(from),
		Crowded: 2*c.barriers >= c.limits.MaxBarriers}
	for _, id := range c.hooks.nodes[node] {
		if s := c.sessions[id]; s != nil {
			h.Connected, h.Allowed = true, h.Allowed || c.hooks.allowed[s.Who.Username]
			h.Crowded = h.Crowded || 2*c.barriersOf[id] >= c.limits.placesOfOne()
		}
	}
	return h
}

// Expect replaces the list of agents that exist according to the API.
func (c *Core) Expect(now time.Time, expected []drain.Expected) {
	c.Ledger.Expect(now, expected)
	c.hooks.nodes = map[string][]drain.AgentID{}
	for _, e := range expected {
		if e.Label == drain.LabelObserved {
			c.hooks.nodes[e.Node] = append(c.hooks.nodes[e.Node], e.ID)
		}
	}
}

// MayAsk records whether an agent's service account has the right to ask for barriers.
func (c *Core) MayAsk(who Identity, allowed bool) {
	if c.hooks.allowed[who.Username] = allowed; !allowed {
		delete(c.hooks.allowed, who.Username)
	}
}

// hear records that a hook of a pod has asked, here or at another replica.
func (m *hookMemory) hear(uid drain.UID, workload string) {
	delete(m.relies, uid)
	if _, known := m.heard[workload]; !known && workload != "" {
		m.set(workload, time.Time{})
	}
}

// set records from when on the hooks of a workload count as heard.
func (m *hookMemory) set(workload string, from time.Time) {
	if len(m.heard) >= maxWorkloads {
		for some := range m.heard {
			delete(m.heard, some)
			break
		}
	}
	m.heard[workload] = from
}

// missed returns the deletions that were left to hooks of which none has asked. The next ones of
// their workloads wait for Idle.
func (c *Core) missed(now time.Time) (pods []drain.Pod) {
	m := &c.hooks
	maps.DeleteFunc(m.told, func(_ drain.UID, is relied) bool { return now.Sub(is.at) >= toldFor })
	for _, uid := range slices.Sorted(maps.Keys(m.relies)) {
		if now.Sub(m.relies[uid].at) < missedAfter {
			continue
		}
		if s := c.Ledger.Status(now, drain.AtHold, uid); s.Reason == drain.PodDeleted { // else it was not carried out
			m.set(m.relies[uid].workload, now.Add(missedKept))
			pods = append(pods, s.Pod)
		}
		delete(m.relies, uid)
	}
	return pods
}

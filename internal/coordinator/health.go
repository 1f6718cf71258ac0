package coordinator

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// maxHealthServices bounds the Services whose health a view shows, maxHealthReports the
	// gateways of each.
	maxHealthServices = 200
	maxHealthReports  = 20
)

// healthReports are the agents' reports on the health of their targets, for operators: nothing is
// decided by them. They are dropped when the stream that brought them ends, because they could not
// be updated any more. This mutex is never waited for while the coordinator's is held, because a
// view holds it for long.
type healthReports struct {
	mu sync.Mutex
	of map[drain.AgentID]*healthReport
}

// healthReport is the report of one agent.
type healthReport struct {
	session  uint64
	services int
	all      wire.TargetCounts
	told     map[drain.Service]*wire.ServiceHealth
	// size is the size of told, at most wire.MaxHealthKept.
	size int
}

// take records the changes. Services for which may returns false, because the agent has not
// declared them, and those beyond the limit are left out.
func (b *healthReports) take(id drain.AgentID, h wire.Health, may func(drain.Service) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	is := b.of[id]
	switch {
	case is != nil && is.session > h.Session:
		return // of an older session: the agent has reconnected
	case h.First:
		is = &healthReport{session: h.Session, told: map[drain.Service]*wire.ServiceHealth{}}
		if b.of == nil {
			b.of = map[drain.AgentID]*healthReport{}
		}
		b.of[id] = is
	case is == nil || is.session != h.Session:
		return // a difference without its base
	}
	is.services, is.all = h.Services, h.All
	forget := func(s drain.Service) {
		if had, ok := is.told[s]; ok {
			is.size -= had.Size()
			delete(is.told, s)
		}
	}
	for _, s := range h.Gone {
		forget(s)
	}
	for _, s := range h.Changed {
		forget(s.Service)
		if !may(s.Service) || len(is.told) == wire.MaxHealthServices || is.size+s.Size() > wire.MaxHealthKept {
			continue
		}
		is.size += s.Size()
		// The decoded slice may be larger than its content.
		s.Targets = slices.Clip(slices.Clone(s.Targets))
		for i := range s.Targets {
			s.Targets[i].Since = s.Targets[i].Since.UTC()
		}
		is.told[s.Service] = &s
	}
}

// end forgets the reports of a session.
func (b *healthReports) end(id drain.AgentID, session uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if is := b.of[id]; is != nil && is.session == session {
		delete(b.of, id)
	}
}

// applyHealth records an agent's report on the health of its targets. It returns false if the
// session is not the agent's present one.
func (c *Coordinator) applyHealth(who Identity, h wire.Health) bool {
	if !c.current(who.Agent, h.Session) {
		return false
	}
	routes := c.Agent(who.Agent).Routes
	_, every := routes[drain.EveryService]
	c.targetHealth.take(who.Agent, h, func(s drain.Service) bool {
		_, named := routes[s]
		return every || named
	})
	if !c.current(who.Agent, h.Session) {
		c.targetHealth.end(who.Agent, h.Session) // the session has ended in the meantime
		return false
	}
	return true
}

// current reports whether session is the present one of an agent.
func (c *Coordinator) current(id drain.AgentID, session uint64) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.core.Ledger.Current(id, session)
}

// receive records a line of health. A line that cannot be read is counted and logged but does not
// end the stream, which also brings reports.
func (c *Coordinator) receive(who Identity, line []byte) {
	h, err := wire.ParseHealth(line)
	code := noContent
	switch {
	case err == nil && !c.applyHealth(who, h):
		code = strconv.Itoa(http.StatusConflict) // the stream ends
	case err != nil:
		code = strconv.Itoa(http.StatusBadRequest)
		c.Log.Debug("read health report of an agent", "agent", who.Name, "error", err)
	}
	c.Metrics.api.WithLabelValues(wire.HealthPath, code).Inc()
}

// healthElsewhere is the hint for operators where the health of all targets is found.
const healthElsewhere = "Each agent that directs its gateway lists all of its targets at /v1/targets of its " +
	"--metrics-address (:9101 if it is not set otherwise)."

// view groups the reports by Service. agents are the known agents, in the order in which to list
// their gateways.
func (b *healthReports) view(agents []api.Agent) api.TargetHealth {
	// The reports on a Service are collected by severity, and of each severity only as many as are
	// shown.
	type joined struct {
		api.ServiceHealth
		of [3][]api.GatewayHealth
	}
	v := api.TargetHealth{Where: healthElsewhere, Services: []api.ServiceHealth{}}
	of := map[drain.Service]*joined{}
	b.mu.Lock()
	for i := range agents {
		a := &agents[i]
		is := b.of[drain.AgentID(a.ID)]
		if is == nil {
			continue
		}
		v.Agents++
		v.All.Usable += is.all.Usable
		v.All.Unknown += is.all.Unknown
		v.All.Unhealthy += is.all.Unhealthy
		v.All.Excluded += is.all.Excluded
		v.All.Doubtful += is.all.Doubtful
		v.Untold += max(0, is.services-len(is.told))
		for name, told := range is.told {
			s := of[name]
			if s == nil {
				s = &joined{ServiceHealth: api.ServiceHealth{Namespace: name.Namespace, Name: name.Name}}
				of[name] = s
			}
			s.Gateways++
			trouble := 2
			if told.Trouble() {
				trouble, s.Trouble = 1, true
			}
			if told.Unhealthy > 0 {
				s.Unwell++
			}
			if told.FailingOpen {
				s.FailingOpen++
				trouble = 0
			}
			if len(s.of[trouble]) < maxHealthReports {
				s.of[trouble] = append(s.of[trouble], gatewayHealth(a, told))
			}
		}
	}
	b.mu.Unlock()
	v.Reported, v.Known = v.Agents > 0, len(of)
	for _, s := range of {
		s.Says = slices.Concat(s.of[:]...)
		s.Says = s.Says[:min(len(s.Says), maxHealthReports)]
		v.Services = append(v.Services, s.ServiceHealth)
		if s.Trouble {
			v.Troubled++
		}
	}
	slices.SortFunc(v.Services, func(a, b api.ServiceHealth) int {
		return cmp.Or(first(a.FailingOpen > 0, b.FailingOpen > 0), first(a.Trouble, b.Trouble),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	v.Services = v.Services[:min(len(v.Services), maxHealthServices)]
	return v
}

// gatewayHealth returns the health of one Service, as the gateway of an agent sees it.
func gatewayHealth(a *api.Agent, told *wire.ServiceHealth) api.GatewayHealth {
	says := api.GatewayHealth{Agent: a.Name, Gateway: a.Gateway, TargetCounts: api.TargetCounts(told.TargetCounts),
		FailingOpen: told.FailingOpen, Checked: told.Checked, Targets: []api.UnhealthyTarget{}}
	for _, t := range told.Targets {
		says.Targets = append(says.Targets,
			api.UnhealthyTarget{Address: t.Address.String(), Pod: t.Pod, Why: t.Why, Last: t.Last, Since: t.Since})
	}
	return says
}

// first orders true before false.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}

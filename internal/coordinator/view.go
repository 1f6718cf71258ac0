package coordinator

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// maxOutcomes is how many ended drains are remembered.
	maxOutcomes = 200
	// maxSamples is the number of times from which the quantiles of a kind of gateway are computed,
	// the newest ones. maxKinds bounds the kinds, maxKindLength their names, because agents choose
	// them.
	maxSamples    = 1000
	maxKinds      = 16
	maxKindLength = 40
	// maxIntroduced bounds the agents whose introductions are remembered.
	maxIntroduced = 20_000
	// maxSilent bounds the gateways that an outcome names.
	maxSilent = 5
	// featuresShown bounds the features of an agent that are remembered.
	featuresShown = 16
	// otherKind is the kind of gateways beyond maxKinds, unnamedKind of those whose agent names
	// none.
	otherKind, unnamedKind = "other", "unnamed"
)

// history is what a coordinator remembers for operators beyond what the ledger needs. It belongs to
// the coordinator's mutex. Everything in it is bounded, and nothing is decided by it.
type history struct {
	introduced map[drain.AgentID]*introduced
	open       map[drain.UID]*course
	// outcomes is a ring, as in times.
	outcomes ring[Outcome]
	kinds    map[string]*times
	barriers map[drain.UID]*barrierProgress
	measured map[string]*measured
}

// introduced is how an agent introduced itself, and its performance since.
type introduced struct {
	gateway, address string
	// build is the version of its program.
	build     string
	protocol  int
	features  []string
	connected time.Time
	// posted is when its last report arrived, age how old that was.
	posted time.Time
	age    time.Duration
	// removed and idle are the times of the last drain that it acknowledged. Zero: there was none.
	removed, idle time.Duration
}

// course is the history of an open drain.
type course struct {
	// phase was entered at.
	phase drain.Phase
	at    time.Time
	// told is when agents were told. Zero: they were not, because it is queued.
	told time.Time
	// released is when it was released, for reason, without the acknowledgement of silent and more.
	released time.Time
	reason   drain.Reason
	silent   []string
	more     int
}

// times are the times of one kind of gateway.
type times struct{ removed, idle ring[time.Duration] }

// ring keeps the newest of what is added.
type ring[T any] struct {
	kept []T
	next int
	// all counts what was ever added.
	all uint64
}

func (r *ring[T]) add(v T, most int) {
	r.all++
	if len(r.kept) < most {
		r.kept = append(r.kept, v)
		return
	}
	r.kept[r.next] = v
	r.next = (r.next + 1) % most
}

// newest returns what is kept, the newest first.
func (r *ring[T]) newest() []T {
	all := make([]T, 0, len(r.kept))
	for i := range r.kept {
		all = append(all, r.kept[(r.next+len(r.kept)-1-i)%len(r.kept)])
	}
	return all
}

func newHistory() *history {
	return &history{introduced: map[drain.AgentID]*introduced{}, open: map[drain.UID]*course{},
		kinds: map[string]*times{}, measured: map[string]*measured{}}
}

// introduce returns what is remembered of an agent, and adds an entry if there is none.
func (h *history) introduce(id drain.AgentID) *introduced {
	of := h.introduced[id]
	if of == nil {
		if len(h.introduced) >= maxIntroduced {
			clear(h.introduced) // agents introduce themselves again
		}
		of = &introduced{}
		h.introduced[id] = of
	}
	return of
}

// connected records a new stream.
func (h *history) connected(now time.Time, id drain.AgentID, protocol int, offer wire.Offer, address string) {
	was := h.introduce(id)
	was.protocol, was.features, was.address, was.connected, was.build = protocol,
		offer.Features[:min(len(offer.Features), featuresShown)], address, now, offer.Build
}

// declared records the kind of an agent's gateway.
func (h *history) declared(id drain.AgentID, gateway string) {
	if of := h.introduced[id]; of != nil {
		of.gateway = gateway[:min(len(gateway), maxKindLength)]
	}
}

// reported records the times of an agent's reports.
func (h *history) reported(now time.Time, id drain.AgentID, taken Taken) {
	of := h.introduce(id)
	of.posted, of.age = now, now.Sub(taken.AsOf)
	if len(taken.Reached) == 0 {
		return
	}
	kind := h.of(of.gateway)
	for _, r := range taken.Reached {
		if r.State == drain.Removed {
			of.removed, of.idle = r.Took, 0
			kind.removed.add(r.Took, maxSamples)
		} else {
			of.idle = r.Took
			kind.idle.add(r.Took, maxSamples)
		}
	}
}

// of returns the times of a kind of gateway.
func (h *history) of(kind string) *times {
	if kind == "" {
		kind = unnamedKind
	}
	if h.kinds[kind] == nil && len(h.kinds) >= maxKinds {
		kind = otherKind
	}
	t := h.kinds[kind]
	if t == nil {
		t = &times{}
		h.kinds[kind] = t
	}
	return t
}

// silent names the agents that had not acknowledged when a drain was released, and returns how many
// more there were. Agents that were away and not waited for are marked.
func silent(s drain.Status) (all []string, more int) {
	if s.Reason.Abnormal() {
		for _, w := range slices.Concat(s.Waiting, s.Suspended, s.Lost) {
			all = append(all, w.Name)
		}
	}
	for _, w := range s.Away {
		all = append(all, w.Name+" (away)")
	}
	few := min(len(all), maxSilent)
	return all[:few], len(all) - few + s.MoreAway
}

// turned records that a drain has entered another phase.
func (h *history) turned(now time.Time, s drain.Status) {
	c := h.open[s.Pod.UID]
	if c == nil {
		c = &course{}
		h.open[s.Pod.UID] = c
	}
	c.phase, c.at = s.Phase, now
	switch s.Phase {
	case drain.Released:
		c.released, c.reason = now, s.Reason
		c.silent, c.more = silent(s)
	case drain.Closed, drain.PhaseUnknown:
		delete(h.open, s.Pod.UID)
		o := Outcome{Pod: s.Pod, At: now, Reason: s.Reason, End: s.Reason, Took: now.Sub(s.Begun)}
		if !c.released.IsZero() && s.Reason != drain.Abandoned {
			o.Reason, o.Took, o.Silent, o.More = c.reason, c.released.Sub(s.Begun), c.silent, c.more
		}
		h.outcomes.add(o, maxOutcomes)
		return
	}
	if c.told.IsZero() && s.Phase != drain.Queued {
		c.told = now
	}
}

// View is what one replica knows at one moment, for operators.
type View struct {
	At, Began time.Time
	Lease     drain.Holder
	Times     drain.Times
	Stopping  bool
	// Holds is how many calls wait, of at most MaxHolds.
	Holds, MaxHolds int
	// Expected, Missing and Suspended count agents.
	Expected, Missing, Suspended int
	// Drains are the open ones, the oldest first: at most those that were asked for, of Open.
	Drains []Drain
	Open   int
	// Barriers are the open ones, the oldest first: at most [maxShownBarriers] of OpenBarriers.
	// Hooks wait there, Barred of them.
	Barriers             []OpenBarrier
	OpenBarriers, Barred int
	// Elsewhere is how many pods only other replicas unroute, as they last reported.
	Elsewhere int
	// Agents are sorted by name.
	Agents []Agent
	// Outcomes are the newest first.
	Outcomes    []Outcome
	Propagation []api.Propagation
	// TargetHealth is the health of targets as the gateways see it.
	TargetHealth api.TargetHealth
}

// Drain is an open drain.
type Drain struct {
	drain.Status
	// Entered is when its phase began, Told when agents were told of it; zero: they were not,
	// because it is queued.
	Entered, Told time.Time
	// Reports are those of the agents that must acknowledge it, the lowest state first: at most as
	// many as were asked for, of Acknowledgers in all.
	Reports       []AgentReport
	Acknowledgers int
}

// AgentReport is one agent's report on a drain.
type AgentReport struct {
	drain.AgentReport
	// Gateway is the kind of its gateway.
	Gateway string
}

// Agent is one agent, as it introduced itself, and its performance since.
type Agent struct {
	drain.AgentInfo
	Gateway, Address string
	Protocol         int
	Features         []string
	// Build is the version of its program.
	Build string
	// Connected is when its stream began.
	Connected time.Time
	// Posted is when its last report arrived, Age how old that was on arrival: about the time of a
	// round trip, and at most a heartbeat more.
	Posted time.Time
	Age    time.Duration
	// Removed and Idle are its times in the last drain that it acknowledged. Zero: there was none.
	Removed, Idle time.Duration
}

// Outcome is how a drain ended.
type Outcome struct {
	Pod drain.Pod
	// Gate is where it was, AtHold or AtBarrier.
	Gate drain.Gate
	At   time.Time
	// Reason is why the deletion was allowed. If it never was, it is the same as End: PodDeleted,
	// because the pod was deleted nevertheless, or Abandoned.
	Reason, End drain.Reason
	// Took is the time until the deletion was allowed or, if it never was, until the end.
	Took time.Duration
	// Silent names gateways that had not acknowledged when the deletion was allowed, with a mark on
	// those that were away and not waited for, and More is how many more there were.
	Silent []string
	More   int
}

// View returns what is known now, with at most drains drains and words reports on each. It releases
// the lock after each drain, so that other callers wait only for one. The drains are therefore of
// slightly different moments.
func (c *Coordinator) View(drains, words int) View {
	c.mu.Lock()
	now, n := time.Now(), c.core.Ledger.Counts()
	v := View{
		At: now, Began: c.core.Began, Lease: c.core.self, Times: c.core.times, Stopping: c.core.stopped,
		Holds: c.core.holds, MaxHolds: c.MaxHolds,
		Expected: n.Expected, Missing: n.Missing, Suspended: n.Suspended, Elsewhere: n.Elsewhere,
		Drains: []Drain{}, Agents: []Agent{}, Outcomes: c.seen.outcomes.newest(), Propagation: c.seen.propagation(),
	}
	var oldest []drain.UID
	oldest, v.Open = c.core.Ledger.Oldest(drain.AtHold, drains)
	var facing []drain.UID
	facing, v.OpenBarriers = c.core.Ledger.Oldest(drain.AtBarrier, maxShownBarriers)
	v.Barred = c.core.barriers
	for _, k := range c.core.Ledger.Agents() {
		v.Agents = append(v.Agents, c.agent(k))
	}
	c.unlock()
	for _, uid := range facing {
		if b, ok := c.barrierOf(uid); ok {
			v.Barriers = append(v.Barriers, b)
		}
	}
	v.TargetHealth = c.targetHealth.view(v.Agents)
	for _, uid := range oldest {
		if d := c.drain(uid, words); d.Waits() || d.Phase == drain.Released {
			v.Drains = append(v.Drains, d)
		}
	}
	return v
}

// drain returns the present state of one drain.
func (c *Coordinator) drain(uid drain.UID, words int) Drain {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	is, _ := c.core.Ledger.View(now, drain.AtHold, uid, words)
	d := Drain{Status: is.Status, Acknowledgers: is.Acknowledgers}
	c.core.observe(d.Status) // time alone may have changed it
	c.settle()
	course := c.seen.open[uid]
	if course != nil {
		d.Entered, d.Told = course.at, course.told
	}
	for _, w := range is.Reports {
		d.Reports = append(d.Reports, AgentReport{AgentReport: w, Gateway: c.seen.gateway(w.Agent)})
	}
	return d
}

// agent, called with the lock, returns k with its introduction and its performance since.
func (c *Coordinator) agent(k drain.AgentInfo) Agent {
	a := Agent{AgentInfo: k}
	if i := c.seen.introduced[k.ID]; i != nil {
		a.Gateway, a.Address, a.Protocol, a.Features, a.Build = i.gateway, i.address, i.protocol, i.features, i.build
		a.Posted, a.Age, a.Removed, a.Idle = i.posted, i.age, i.removed, i.idle
		if k.Connected {
			a.Connected = i.connected
		}
	}
	return a
}

// Acknowledgers returns the agents whose gateways may send to the pods of services, as
// [drain.Ledger.Acknowledgers] does, with the kinds of their gateways.
func (c *Coordinator) Acknowledgers(services []drain.Service) (parties []drain.Acknowledger,
	gateways map[drain.AgentID]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	parties = c.core.Ledger.Acknowledgers(time.Now(), services)
	gateways = map[drain.AgentID]string{}
	for _, p := range parties {
		gateways[p.ID] = c.seen.gateway(p.ID)
	}
	return parties, gateways
}

func (h *history) gateway(id drain.AgentID) string {
	if of := h.introduced[id]; of != nil {
		return of.gateway
	}
	return ""
}

func (h *history) propagation() []api.Propagation {
	all := []api.Propagation{}
	for _, kind := range slices.Sorted(maps.Keys(h.kinds)) {
		t := h.kinds[kind]
		all = append(all, quantiles(kind, drain.Removed, &t.removed), quantiles(kind, drain.Idle, &t.idle))
	}
	return slices.DeleteFunc(all, func(p api.Propagation) bool { return p.Samples == 0 })
}

func quantiles(kind string, what drain.State, r *ring[time.Duration]) api.Propagation {
	p := api.Propagation{Gateway: kind, What: what.String(), Count: r.all, Samples: len(r.kept)}
	if p.Samples == 0 {
		return p
	}
	sorted := slices.SortedFunc(slices.Values(r.kept), cmp.Compare)
	// The smallest value that at least percent of the values do not exceed.
	at := func(percent int) float64 { return sorted[max(0, (len(sorted)*percent+99)/100-1)].Seconds() }
	p.P50Seconds, p.P90Seconds, p.P99Seconds, p.MaxSeconds = at(50), at(90), at(99), at(100)
	return p
}

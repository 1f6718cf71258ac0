package coordinator

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/version"
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

// history is the coordinator's record for operators, in addition to the ledger. The coordinator's
// mutex protects it. Everything in it is bounded, and no decision depends on it.
type history struct {
	introduced map[drain.AgentID]*introduced
	open       map[drain.UID]*course
	// outcomes is a ring, as in times.
	outcomes ring[api.Outcome]
	kinds    map[string]*times
	barriers map[drain.UID]*barrierProgress
	measured map[string]*measured
}

// introduced is how an agent introduced itself, and its performance since.
type introduced struct {
	gateway, mode, address string
	// build is the version of its program.
	build     string
	features  []string
	connected time.Time
	// posted is when the agent's last report arrived. age is how old the report was then.
	posted time.Time
	age    time.Duration
	// removed and idle are the times of the last drain that it acknowledged. Zero: there was none.
	removed, idle time.Duration
}

// course is the history of an open drain.
type course struct {
	// phase is the present phase, and at is when it was entered.
	phase drain.Phase
	at    time.Time
	// told is when the drain was sent to agents. Zero: it was not, because it is queued.
	told time.Time
	// released is when the drain was released, with reason. silent names agents that had not
	// acknowledged it, and more is the number of further ones.
	released time.Time
	reason   drain.Reason
	silent   []string
	more     int
	// message is the last warning about the deletion, and warned its reason. See
	// [Coordinator.Warned].
	warned, message string
}

// times are the times of one kind of gateway.
type times struct{ removed, idle ring[time.Duration] }

// ring keeps the newest values that were added.
type ring[T any] struct {
	kept []T
	next int
	// all counts the values that were ever added.
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
func (h *history) connected(now time.Time, id drain.AgentID, offer wire.Offer, address string) {
	was := h.introduce(id)
	was.features = offer.Features[:min(len(offer.Features), featuresShown)]
	was.address, was.connected, was.build = address, now, offer.Build
}

// declared records the kind and the mode of an agent's gateway.
func (h *history) declared(id drain.AgentID, d wire.Declaration) {
	if of := h.introduced[id]; of != nil {
		of.gateway, of.mode = d.Gateway[:min(len(d.Gateway), maxKindLength)], d.GatewayMode
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
		if c.released.IsZero() || s.Reason == drain.Abandoned {
			c.released, c.reason, c.silent, c.more = now, s.Reason, nil, 0
		}
		o := ended(now, drain.AtHold, s.Pod, c.reason, c.released.Sub(s.Begun), c.silent, c.more)
		if c.message != "" {
			warn(&o, c.warned, c.message)
		}
		h.outcomes.add(o, maxOutcomes)
		return
	}
	if c.told.IsZero() && s.Phase != drain.Queued {
		c.told = now
	}
}

// left records that a deletion was allowed because the pod's barrier waits for Idle.
func (h *history) left(now time.Time, uid drain.UID) {
	if c := h.open[uid]; c != nil && c.released.IsZero() {
		c.released, c.reason = now, drain.BarrierWaits
	}
}

// ended returns how a drain of a pod ended: why its deletion was allowed and how long that took, or
// why it never was. names and more are those of silent.
func ended(now time.Time, gate drain.Gate, pod drain.Pod, reason drain.Reason, took time.Duration, names []string,
	more int) api.Outcome {
	return api.Outcome{At: now, Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID), Gate: gate.String(),
		Reason: reason.String(), Abnormal: reason.Abnormal(), TookSeconds: new(took.Seconds()),
		Silent: append([]string{}, names...), MoreSilent: more}
}

// warnedFor is how long after the end of a drain, or after another warning, a warning is about the
// same deletion: the watch may show the end before the call is answered, and callers try again.
const warnedFor = time.Minute

// Warned records, for operators, a warning to the API server about a pod whose deletion was allowed
// without every acknowledgement, often without a drain.
func (c *Coordinator) Warned(pod drain.Pod, reason, message string) {
	c.locked(func() { c.seen.warned(time.Now(), pod, reason, message) })
}

func (h *history) warned(now time.Time, pod drain.Pod, reason, message string) {
	if c := h.open[pod.UID]; c != nil {
		c.warned, c.message = reason, message
		return
	}
	for i := range h.outcomes.kept {
		o := &h.outcomes.kept[i]
		switch {
		case o.UID != string(pod.UID) || o.Gate != drain.AtHold.String() || now.Sub(o.At) >= warnedFor:
		case o.TookSeconds == nil: // another webhook refuses the deletion, and the caller tries again
			o.At, o.Reason, o.Message = now, reason, message
			return
		case o.Message == "":
			warn(o, reason, message)
			return
		}
	}
	h.outcomes.add(api.Outcome{At: now, Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID),
		Gate: drain.AtHold.String(), Reason: reason, Abnormal: true, Silent: []string{}, Message: message}, maxOutcomes)
}

// warn adds a warning to the outcome of a drain. The reason of the warning replaces that of the
// outcome if the pod was deleted or the deletion abandoned.
func warn(o *api.Outcome, reason, message string) {
	o.Message, o.Abnormal = message, true
	if o.Reason == drain.PodDeleted.String() || o.Reason == drain.Abandoned.String() {
		o.Reason = reason
	}
}

// View returns what is known now, for operators, with at most drains drains and reports reports on
// each. It releases the lock after each drain, so that other callers wait only for one. The drains
// are therefore of slightly different moments. It lists all agents, sorted by name. Of pods it has
// only the information in the ledger.
func (c *Coordinator) View(drains, reports int) api.View {
	c.mu.Lock()
	now, n := time.Now(), c.core.Ledger.Counts()
	v := api.View{
		At: now,
		Replica: api.Replica{
			Name: c.core.self.Replica, Epoch: c.core.self.Epoch, Started: c.core.Began, Version: version.Build(),
			Stopping: c.core.stopped, Holds: c.core.holds, MaxHolds: c.MaxHolds,
			DeadlineSeconds:  c.core.times.Deadline.Seconds(),
			IdleBoundSeconds: c.core.times.IdleBound.Seconds(),
		},
		Drains: api.Drains{Items: []api.Drain{}, Elsewhere: n.Elsewhere},
		Barriers: api.Barriers{Items: []api.OpenBarrier{}, Hooks: c.core.barriers,
			MissingPods: []string{}},
		Agents: api.Agents{Expected: n.Expected, Missing: n.Missing, Suspended: n.Suspended,
			Items: []api.Agent{}},
		Outcomes: c.seen.outcomes.newest(), Propagation: c.seen.propagation(),
	}
	var oldest, facing []drain.UID
	oldest, v.Drains.Open, _ = c.core.Ledger.Oldest(drain.AtHold, drains)
	facing, v.Barriers.Open, v.Barriers.Waiting = c.core.Ledger.Oldest(drain.AtBarrier, maxShownBarriers)
	v.Barriers.Waiting = max(0, v.Barriers.Waiting-len(facing)) // those that are not listed
	for _, k := range c.core.Ledger.Agents() {
		v.Agents.Items = append(v.Agents.Items, c.agent(k))
	}
	v.Agents.Known = len(v.Agents.Items)
	c.unlock()
	for _, uid := range facing {
		if b, ok := c.barrierOf(uid); ok {
			v.Barriers.Items = append(v.Barriers.Items, b)
		} else {
			v.Barriers.Open-- // it has ended since
		}
	}
	v.Barriers.Waiting += v.Barriers.ItemsWaiting()
	v.TargetHealth = c.targetHealth.view(v.Agents.Items)
	for _, uid := range oldest {
		if d, ok := c.drain(uid, reports); ok {
			v.Drains.Items = append(v.Drains.Items, d)
		} else {
			v.Drains.Open--
		}
	}
	return v
}

// ViewPod returns what a view without bounds would have of one pod: its drain, with at most reports
// reports, and its barrier, if they are open.
func (c *Coordinator) ViewPod(uid drain.UID, reports int) api.View {
	v := api.View{At: time.Now(), Replica: api.Replica{Name: c.core.self.Replica}}
	if d, ok := c.drain(uid, reports); ok {
		v.Drains.Items = []api.Drain{d}
	}
	if b, ok := c.barrierOf(uid); ok {
		v.Barriers.Items = []api.OpenBarrier{b}
	}
	return v
}

// drain returns the present state of one drain. ok is false if it has ended.
func (c *Coordinator) drain(uid drain.UID, reports int) (d api.Drain, ok bool) {
	c.mu.Lock()
	defer c.unlock()
	now := time.Now()
	is, _ := c.core.Ledger.View(now, drain.AtHold, uid, reports)
	c.core.observe(is.Status) // time alone may have changed it
	c.settle()
	d = c.seen.drain(is)
	if course := c.seen.open[uid]; course != nil {
		d.PhaseSince, d.Told = course.at, course.told
	}
	return d, is.Waits() || is.Phase == drain.Released
}

// drain returns what operators see of a drain at either gate, with the kinds of the agents'
// gateways.
func (h *history) drain(is drain.View) api.Drain {
	d := api.Drain{
		Namespace: is.Pod.Namespace, Pod: is.Pod.Name, UID: string(is.Pod.UID), Phase: is.Phase.String(),
		Reason: is.Reason.String(), Since: is.Since, Deadline: is.Deadline, Owed: is.Owed, Waiting: len(is.Waiting),
		Reports: []api.AgentReport{},
	}
	for _, r := range is.Reports {
		d.Reports = append(d.Reports, api.AgentReport{Agent: r.Name, Gateway: h.gateway(r.Agent),
			State: r.State.String(), Since: r.Since, Received: r.Received, Connected: r.Connected,
			Suspended: r.Suspended})
	}
	return d
}

// agent, called with the lock, returns k with its introduction and its performance since.
func (c *Coordinator) agent(k drain.AgentInfo) api.Agent {
	a := api.Agent{ID: string(k.ID), Name: k.Name, Label: k.Label.String(), Ready: k.Ready, Connected: k.Connected,
		Since: k.Lost, Suspended: k.Suspended, Declared: k.Declared, Services: len(k.Routes),
		Features: []string{}}
	_, a.EveryService = k.Routes[drain.EveryService]
	switch {
	case k.Left:
		a.State = api.AgentLeft
	case k.Suspended:
		a.State = api.AgentSuspended
	case k.Connected:
		a.State = api.AgentConnected
	case k.Expected && k.Pending:
		a.State = api.AgentStarting
	case k.Expected:
		a.State = api.AgentMissing
	default:
		a.State = api.AgentGone
	}
	i := c.seen.introduced[k.ID]
	if i != nil {
		a.Protocol = wire.Protocol
	} else {
		i = &introduced{}
	}
	if k.Connected {
		a.Since = i.connected
	}
	a.Gateway, a.GatewayMode, a.Address, a.Version = i.gateway, i.mode, i.address, i.build
	a.Features = append(a.Features, i.features...)
	a.Reported, a.ReportAgeSeconds = i.posted, i.age.Seconds()
	a.RemovedSeconds, a.IdleSeconds = i.removed.Seconds(), i.idle.Seconds()
	return a
}

// Acknowledgers returns the agents whose gateways may send to the pods of services, as
// [drain.Ledger.Acknowledgers] does, with the kinds of their gateways.
func (c *Coordinator) Acknowledgers(services []drain.Service) (parties []drain.Acknowledger,
	gateways map[drain.AgentID]string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	parties = c.core.Ledger.Acknowledgers(time.Now(), services)
	gateways = map[drain.AgentID]string{}
	for _, p := range parties {
		gateways[p.ID] = c.seen.gateway(p.ID)
	}
	return parties, gateways
}

// Beside returns what chooses pods on nodes beside kube-proxy, as their agents have declared, with
// the number of nodes.
func (c *Coordinator) Beside() map[string]int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	all := map[string]int{}
	for id, of := range c.seen.introduced {
		name, is := strings.CutPrefix(of.mode, wire.Beside)
		if !is {
			continue
		}
		// Only an agent with the right for every namespace can have such a route.
		a := c.core.Ledger.Agent(id)
		if _, every := a.Routes[drain.EveryService]; every && (a.Expected || a.Connected) {
			all[name]++
		}
	}
	return all
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

package drain

import (
	"cmp"
	"container/list"
	"maps"
	"slices"
	"time"
)

// Ledger is one replica's record of drains and agents. See the package comment. Not safe for concurrent use.
type Ledger struct {
	self   Lease
	times  Times
	agents map[AgentID]*agent
	drains map[UID]*drain
	// changes holds the drains in the order of their last change that agents must hear of, the newest first.
	changes *list.List
	rev     uint64
	touched map[UID]bool
	// sweptAt is when reports that are too old to count were last forgotten.
	sweptAt time.Time
}

// agent is what is known of one agent.
type agent struct {
	id AgentID
	// expected says that the API lists it; name, ready and label are from there.
	expected bool
	name     string
	ready    bool
	label    Label
	// session is not zero while a stream is open. Sessions count up and are never used twice.
	session uint64
	// lostAt is when the last session ended or, never connected, when the API first listed it.
	lostAt time.Time
	// declared says that routes is known, if only from an earlier session.
	declared bool
	routes   map[Service]Route
	reports  map[UID]heard
}

// heard is a report and when it came.
type heard struct {
	Report
	at time.Time
}

// tells says whether the report is of d or of another replica's drain, and not of an earlier one of this replica: it may have been
// under way for longer than it took to abandon that.
func (r Report) tells(d *drain) bool { return !r.Held || r.Number == 0 || r.Number == d.number }

// drain is one pod's.
type drain struct {
	pod      Pod
	services map[Service]bool
	// open: neither dead nor abandoned. While it is, since is its start, moved back by the time earlier drains of this UID used.
	open  bool
	since time.Time
	// number is that of the drain that is open, or was last.
	number uint64
	// begun is when this drain was opened here, which since may long precede.
	begun time.Time
	// spent is the time that drains of this UID have used before this one.
	spent time.Duration
	// allowed says that the answer Allow was given since it was opened.
	allowed bool
	// allowedAlive counts the drains of this UID that were allowed and abandoned all the same.
	allowedAlive []time.Time
	// inFlight counts calls that are being held; lastAnswer is when the last one was answered.
	inFlight   int
	lastAnswer time.Time
	// quiescingAt is when all that owe had said Removed. Zero while they have not.
	quiescingAt time.Time
	reason      Reason
	closedAt    time.Time
	checkedAt   time.Time
	rev         uint64
	element     *list.Element
}

// NewLedger returns the empty ledger of one replica's present life.
func NewLedger(self Lease, times Times) *Ledger {
	return &Ledger{
		self: self, times: times,
		agents: map[AgentID]*agent{}, drains: map[UID]*drain{}, changes: list.New(), touched: map[UID]bool{},
	}
}

// Self is the lease under which this ledger's tombstones stand.
func (l *Ledger) Self() Lease { return l.self }

// Waiting is one agent that a drain waits for, and what it last said.
type Waiting struct {
	Agent AgentID
	// Name is namespace/name of the agent's pod, or its ID if the API does not list it.
	Name  string
	State State
	// Connected says whether it has a session here.
	Connected bool
}

// Status is a drain at one moment.
type Status struct {
	Pod    Pod
	Phase  Phase
	Reason Reason
	// Since is the start of the drain's one clock; Deadline is when it is over.
	Since, Deadline time.Time
	// Begun is when this replica opened the drain.
	Begun time.Time
	// Owed is how many agents owe it. Waiting are those that have not said Idle, sorted by name.
	Owed    int
	Waiting []Waiting
	// Recheck is when Status may change by time alone. Zero: never.
	Recheck time.Time
}

// Waits reports whether the drain still waits for gateways.
func (s Status) Waits() bool { return s.Phase == Unrouting || s.Phase == Quiescing }

// Ask opens a drain of pod, or joins the one that is open, and returns its status. services are those that list the pod; they
// add to what earlier calls named. A pod that is dead has no drain: the status is Closed, Dead.
func (l *Ledger) Ask(now time.Time, pod Pod, services []Service) Status {
	d := l.drains[pod.UID]
	if d == nil {
		d = &drain{pod: pod, services: map[Service]bool{}}
		l.drains[pod.UID] = d
	}
	if !d.open && d.reason == Dead {
		return l.status(now, d)
	}
	grown := false
	for _, s := range services {
		grown = grown || !d.services[s]
		d.services[s] = true
	}
	if d.open && grown {
		l.change(d)
	}
	if brokenRule == 5 {
		d.since, d.begun = now, now
	}
	if !d.open {
		d.open, d.reason, d.begun, d.lastAnswer = true, ReasonNone, now, now
		d.quiescingAt, d.allowed = time.Time{}, false
		d.since = now.Add(-d.spent)
		d.number = l.rev + 1
		for _, a := range l.agents {
			if r, ok := a.reports[pod.UID]; ok && r.tells(d) && l.fresh(now, a, r) {
				l.adopt(d, r.Since)
			}
		}
		l.change(d)
	}
	return l.status(now, d)
}

// adopt brings the drain's clock forward to since if that is older. Never by more than the deadline: a clock that runs wild on
// the other side may end this drain early, not the next ones.
func (l *Ledger) adopt(d *drain, since time.Time) {
	if since.IsZero() {
		return
	}
	if since = later(since, d.begun.Add(-l.times.Deadline)); since.Before(d.since) {
		d.since = since
		l.touched[d.pod.UID] = true
	}
}

// Hold and Answered bracket a call that waits for uid. Answered says whether the answer was to allow.
func (l *Ledger) Hold(uid UID) {
	if d := l.drains[uid]; d != nil {
		d.inFlight++
	}
}

// Answered records that a held call was answered. See [Ledger.Hold].
func (l *Ledger) Answered(now time.Time, uid UID, allowed bool) {
	d := l.drains[uid]
	if d == nil {
		return
	}
	d.inFlight--
	d.lastAnswer = now
	d.allowed = d.allowed || allowed
}

// Status returns the drain of uid at now. PhaseUnknown if there is none.
func (l *Ledger) Status(now time.Time, uid UID) Status {
	d := l.drains[uid]
	if d == nil {
		return Status{Pod: Pod{UID: uid}}
	}
	return l.status(now, d)
}

// All returns every drain that is open, the oldest first.
func (l *Ledger) All(now time.Time) []Status {
	all := []Status{}
	for _, d := range l.drains {
		if d.open {
			all = append(all, l.status(now, d))
		}
	}
	slices.SortFunc(all, func(a, b Status) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	return all
}

// Draining returns since when uid has an open drain. ok is false if it has none.
func (l *Ledger) Draining(uid UID) (since time.Time, ok bool) {
	d := l.drains[uid]
	if d == nil || !d.open {
		return time.Time{}, false
	}
	return d.since, true
}

// Refused returns how many drains of uid were allowed and abandoned all the same, in the last window, which is at most Times.Memory.
func (l *Ledger) Refused(now time.Time, uid UID, window time.Duration) int {
	d := l.drains[uid]
	if d == nil {
		return 0
	}
	n := 0
	for _, at := range d.allowedAlive {
		if now.Sub(at) < window {
			n++
		}
	}
	return n
}

// Gone records that the pod is terminating or gone, from a watch or a live read. Its drain is closed, and its UID is dead.
// It reports whether that was news.
func (l *Ledger) Gone(now time.Time, uid UID) bool {
	d := l.drains[uid]
	if d == nil || !d.open {
		return false
	}
	l.close(now, d, Dead)
	return true
}

// Alive records that a live read showed the pod without deletionTimestamp. The drain is abandoned if nobody has asked for it since
// [Ledger.Tick] named it. It reports whether it was.
func (l *Ledger) Alive(now time.Time, uid UID) bool {
	d := l.drains[uid]
	if d == nil || !d.open || !l.suspect(now, d) {
		return false
	}
	if d.allowed {
		d.allowedAlive = slices.DeleteFunc(d.allowedAlive, func(at time.Time) bool { return now.Sub(at) >= l.times.Memory })
		d.allowedAlive = append(d.allowedAlive, now)
	}
	d.spent = d.lastAnswer.Sub(d.since)
	l.close(now, d, Abandoned)
	return true
}

func (l *Ledger) suspect(now time.Time, d *drain) bool {
	return d.inFlight == 0 && (now.Sub(d.lastAnswer) >= l.times.Abandon || brokenRule == 3)
}

// close ends a drain. What was said of it must not count for the next one of this UID: an agent that has lifted a tombstone
// says nothing of the pod any more.
func (l *Ledger) close(now time.Time, d *drain, reason Reason) {
	d.open, d.reason, d.closedAt = false, reason, now
	for _, a := range l.agents {
		delete(a.reports, d.pod.UID)
	}
	l.change(d)
}

// Tick forgets what is older than the memory bound, reports that are too old to count, and agents that nobody knows any more. It
// returns the pods whose drains nobody has asked for lately: read each of them live and call [Ledger.Gone] or [Ledger.Alive]. One is
// named again only after a heartbeat.
func (l *Ledger) Tick(now time.Time) []Pod {
	if now.Sub(l.sweptAt) >= l.times.Freshness {
		l.sweptAt = now
		for id, a := range l.agents {
			if !a.expected && a.session == 0 && now.Sub(a.lostAt) >= l.times.Away {
				delete(l.agents, id)
			}
			maps.DeleteFunc(a.reports, func(_ UID, r heard) bool { return !l.fresh(now, a, r) })
		}
	}
	var look []Pod
	for uid, d := range l.drains {
		switch {
		case d.open && l.suspect(now, d) && now.Sub(d.checkedAt) >= l.times.Heartbeat:
			d.checkedAt = now
			look = append(look, d.pod)
		case !d.open && now.Sub(d.closedAt) >= l.times.Memory:
			l.changes.Remove(d.element)
			delete(l.drains, uid)
		}
	}
	slices.SortFunc(look, func(a, b Pod) int { return cmp.Compare(a.UID, b.UID) })
	return look
}

// Expect sets the whole list of agents that the API says exist. One that is no longer listed and not connected is forgotten.
func (l *Ledger) Expect(now time.Time, expected []Expected) {
	listed := make(map[AgentID]bool, len(expected))
	for _, e := range expected {
		listed[e.ID] = true
		a := l.agent(now, e.ID)
		if !a.expected || a.ready != e.Ready || a.label != e.Label {
			l.touchAll()
		}
		a.expected, a.name, a.ready, a.label = true, e.Name, e.Ready, e.Label
	}
	for id, a := range l.agents {
		if listed[id] || !a.expected {
			continue
		}
		l.touchAll()
		a.expected, a.ready = false, false
		if a.session == 0 {
			delete(l.agents, id)
		}
	}
}

// Expecting returns how many agents are expected, and how many of them have no session here.
func (l *Ledger) Expecting() (expected, missing int) {
	for _, a := range l.agents {
		if a.expected {
			expected++
			if a.session == 0 {
				missing++
			}
		}
	}
	return expected, missing
}

// Connect opens a session for an agent and ends its former one, if any. What was reported before is void.
func (l *Ledger) Connect(now time.Time, id AgentID) (session uint64) {
	a := l.agent(now, id)
	l.rev++
	a.session = l.rev
	a.reports = map[UID]heard{}
	l.touchAll()
	return a.session
}

// Disconnect ends a session. What was reported on it is void. A session that was ended by a newer one changes nothing. An agent that
// the API does not list has as long to come back as one that is not ready: its gateway does not stop routing with the stream.
func (l *Ledger) Disconnect(now time.Time, id AgentID, session uint64) {
	a := l.agents[id]
	if a == nil || a.session != session {
		return
	}
	a.session, a.lostAt, a.reports = 0, now, nil
	l.touchAll()
}

// Current reports whether session is the open one of agent.
func (l *Ledger) Current(id AgentID, session uint64) bool {
	a := l.agents[id]
	return a != nil && session != 0 && a.session == session
}

// Declare sets the whole of what an agent's gateway routes, and returns the open drains of that: the agent must know them before it
// programs its gateway. ok is false, and nothing changed, if session is not the agent's open one.
func (l *Ledger) Declare(id AgentID, session uint64, routes []Route) (open []Open, ok bool) {
	if !l.Current(id, session) {
		return nil, false
	}
	a := l.agents[id]
	a.declared = true
	a.routes = make(map[Service]Route, len(routes))
	for _, r := range routes {
		if have, twice := a.routes[r.Service]; !twice || owesAtHold(r) && !owesAtHold(have) {
			a.routes[r.Service] = r
		}
	}
	open = []Open{}
	for e := l.changes.Back(); e != nil; e = e.Prev() {
		if d := e.Value.(*drain); d.open && l.routes(a, d) {
			open = append(open, Open{d.pod, d.since, d.number})
		}
	}
	l.touchAll()
	return open, true
}

// Report takes in what an agent says on its open session. It reports whether any of it was news: a repeat of what still counts is
// not. A session that is not the open one changes nothing.
func (l *Ledger) Report(now time.Time, id AgentID, session uint64, reports []Report) (news bool) {
	if !l.Current(id, session) {
		return false
	}
	a := l.agents[id]
	for _, r := range reports {
		had, known := a.reports[r.UID]
		if !known || had.Report != r || !l.fresh(now, a, had) {
			news = true
			l.touched[r.UID] = true
		}
		if brokenRule == 1 && known && had.State > r.State {
			r = had.Report
		}
		a.reports[r.UID] = heard{r, now}
		if d := l.drains[r.UID]; d != nil && d.open && r.tells(d) {
			l.adopt(d, r.Since)
		}
	}
	return news
}

// Since returns what an agent must hear that changed after revision rev, the oldest first, and the revision to ask with next.
// Ask with 0 for everything. Only drains of Services that the agent may route are opened; releases it hears of all.
func (l *Ledger) Since(id AgentID, rev uint64) (open []Open, released []Release, next uint64) {
	a := l.agents[id]
	if a == nil {
		return nil, nil, rev
	}
	next = rev
	for e := l.changes.Front(); e != nil && e.Value.(*drain).rev > rev; e = e.Next() {
		d := e.Value.(*drain)
		next = max(next, d.rev)
		switch {
		case d.open && l.routes(a, d):
			open = append(open, Open{d.pod, d.since, d.number})
		case !d.open:
			released = append(released, Release{d.pod.UID, d.reason == Dead || brokenRule == 4})
		}
	}
	slices.Reverse(open)
	slices.Reverse(released)
	return open, released, next
}

// Revision counts up whenever there is something new that [Ledger.Since] may return, and when a session opens.
func (l *Ledger) Revision() uint64 { return l.rev }

// Touched returns the UIDs whose status may have changed since it was last called.
func (l *Ledger) Touched() []UID {
	if len(l.touched) == 0 {
		return nil
	}
	uids := make([]UID, 0, len(l.touched))
	for uid := range l.touched {
		uids = append(uids, uid)
	}
	clear(l.touched)
	slices.Sort(uids)
	return uids
}

// CouldRoute reports whether some agent may route one of services: it declared so, or has not been heard.
func (l *Ledger) CouldRoute(services []Service) bool {
	probe := drain{services: make(map[Service]bool, len(services))}
	for _, s := range services {
		probe.services[s] = true
	}
	for _, a := range l.agents {
		if l.routes(a, &probe) {
			return true
		}
	}
	return false
}

func (l *Ledger) agent(now time.Time, id AgentID) *agent {
	a := l.agents[id]
	if a == nil {
		a = &agent{id: id, name: string(id), lostAt: now}
		l.agents[id] = a
	}
	return a
}

// routes says whether a may route the pod of d, as far as is known: an agent that has not declared may route everything, except
// that its label may say that it only follows.
func (l *Ledger) routes(a *agent, d *drain) bool {
	if !a.declared {
		return a.label != LabelFollowing
	}
	for s := range d.services {
		if r, ok := a.routes[s]; ok && owesAtHold(r) {
			return true
		}
	}
	return false
}

func owesAtHold(r Route) bool { return r.Via == Endpoints && r.Can == Direct }

// owes says whether a must acknowledge d at now and, if time alone may change that, when.
func (l *Ledger) owes(now time.Time, a *agent, d *drain) (owes bool, until time.Time) {
	if !l.routes(a, d) {
		return false, time.Time{}
	}
	if a.session != 0 || a.ready && brokenRule != 7 {
		return true, time.Time{}
	}
	if brokenRule == 7 {
		return false, time.Time{}
	}
	until = a.lostAt.Add(l.times.Away)
	return now.Before(until), until
}

func (l *Ledger) fresh(now time.Time, a *agent, r heard) bool {
	return a.session != 0 && now.Sub(r.at) <= l.times.Freshness
}

func (l *Ledger) deadline(d *drain) time.Time {
	return later(d.since.Add(l.times.Deadline), d.begun.Add(l.times.Hold))
}

// status derives everything from what is known at now.
func (l *Ledger) status(now time.Time, d *drain) Status {
	s := Status{Pod: d.pod, Since: d.since, Begun: d.begun, Deadline: l.deadline(d)}
	if !d.open {
		s.Phase, s.Reason = Closed, d.reason
		return s
	}
	recheck := func(at time.Time) {
		if at.After(now) && (s.Recheck.IsZero() || at.Before(s.Recheck)) {
			s.Recheck = at
		}
	}
	least := Idle
	for _, a := range l.agents {
		owes, until := l.owes(now, a, d)
		if !until.IsZero() {
			recheck(until)
		}
		if !owes {
			continue
		}
		s.Owed++
		state := StateUnknown
		if r, ok := a.reports[d.pod.UID]; ok && r.Held && r.tells(d) && l.fresh(now, a, r) {
			state = r.State
			recheck(r.at.Add(l.times.Freshness + 1))
		}
		least = min(least, state)
		if state < Idle {
			s.Waiting = append(s.Waiting, Waiting{a.id, a.name, state, a.session != 0})
		}
	}
	slices.SortFunc(s.Waiting, func(a, b Waiting) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Agent, b.Agent)) })
	if least < Removed {
		d.quiescingAt = time.Time{}
	} else if d.quiescingAt.IsZero() {
		d.quiescingAt = now
	}
	recheck(s.Deadline)
	switch {
	case s.Owed == 0 && brokenRule == 6 && now.Before(s.Deadline):
		s.Phase = Unrouting
	case s.Owed == 0:
		s.Phase, s.Reason = Released, NoAgents
	case least == Idle:
		s.Phase, s.Reason = Released, Acknowledged
	case !now.Before(s.Deadline):
		s.Phase, s.Reason = Released, Deadline
	case least == Removed && now.Sub(d.quiescingAt) >= l.times.IdleBound:
		s.Phase, s.Reason = Released, IdleBound
	case least == Removed:
		s.Phase = Quiescing
		recheck(d.quiescingAt.Add(l.times.IdleBound))
	default:
		s.Phase = Unrouting
	}
	return s
}

func (l *Ledger) change(d *drain) {
	l.rev++
	d.rev = l.rev
	if d.element == nil {
		d.element = l.changes.PushFront(d)
	} else {
		l.changes.MoveToFront(d.element)
	}
	l.touched[d.pod.UID] = true
}

func (l *Ledger) touchAll() {
	for uid, d := range l.drains {
		if d.open {
			l.touched[uid] = true
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

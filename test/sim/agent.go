package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// These are those of the real shells (cmd/agent, pkg/gateway, internal/agent/client).
	learnMost       = 3 * time.Second
	lapseEvery      = time.Second
	fastest         = 10 * time.Millisecond
	slowest         = 100 * time.Millisecond
	watchExclusions = 250 * time.Millisecond
	watchReloads    = time.Second
	retryFirst      = 50 * time.Millisecond
	retryMost       = 2 * time.Second
	rushMost        = 4
	callTimeout     = 5 * time.Second
	postTimeout     = 5 * time.Second
	pauseFirst      = 100 * time.Millisecond
	pauseMost       = 2 * time.Second
	// coarse is how far the expiry in the journal may lag behind.
	coarse = 10 * time.Second
)

// agent is one agent: the real set, and the shells of package gateway's Director, package client
// and cmd/agent around it.
type agent struct {
	proc
	w        *world
	id       drain.AgentID
	services []int
	// right is the namespace in which alone it may route; empty: everywhere.
	right string
	// listed and ready: its pod, in the API server.
	listed, ready bool
	started       time.Duration
	watch         *watcher
	set           *health.Set
	// kernel is that of the node, of an agent that observes one. It directs nothing then.
	// population is drain.Nodes, or the name of a gateway of which the kernel stands for a replica:
	// no pod is on such a node.
	kernel     *kernel
	population string
	// hooks wait, watched are the pods that each holder wants to be observed.
	hooks   []*hook
	watched map[string]map[drain.UID]bool
	// sent are those to which the kernel was seen to send, broken is told when the connections of
	// hooks break that are not among hooks.
	sent   map[drain.UID]bool
	broken []func()
	gw     *gw
	links  []*link
	known  map[health.UID]health.State
	// programming: the director runs. learned: every replica has answered a declaration. unlearned:
	// it runs without.
	programming, learned, unlearned bool

	// deaf is until when it is connected and silent: its calls of the gateway do not come back, and
	// it reports nothing.
	deaf time.Duration

	// left: it has told whom it could that its gateway accepts nothing any more, and opens no
	// stream any more.
	left bool

	// The director.
	stepping, poked bool
	turn            int
	generation      string
	pause, unread   time.Duration
	rush            int
	readAt          time.Duration

	// journal is on disk: it survives every death.
	journal map[drain.UID]*entry
	// expiries are who holds what until when, for the checks: a plain record beside the set.
	expiries map[drain.UID]map[string]time.Time
	// dead are the pods that this life has seen terminating, for the checks.
	dead map[drain.UID]bool
	// seen is the version of each Service's slice that was heard last.
	seen map[int]int
	// told is what the set was told of each Service.
	told map[int][]endpoint
}

// entry is an exclusion on disk.
type entry struct {
	since   time.Time
	holders map[string]time.Time
	dead    bool
}

// link is the stream to one replica.
type link struct {
	a        *agent
	c        *coord
	conn     *conn
	began    time.Duration
	heardAt  time.Duration
	pause    time.Duration
	synced   bool
	declared bool
	session  uint64
	expiry   drain.Holder
	released map[drain.UID]bool
	posting  bool
	// everything and poked are what the report loop wakes up for.
	everything, poked bool
	said              map[drain.UID]drain.Report
	// numbers are those of the drains that the agent was told of, at each gate.
	numbers [2]map[drain.UID]uint64
	// asks are told when the stream is lost.
	asks []func()
	// at is when the coordinator wrote what was heard last.
	at time.Time
}

func (a *agent) log(format string, args ...any) { a.w.logf(a.name, format, args...) }

// dies lets the agent die here, sometimes: at every step at which something is done and something
// else not yet.
func (a *agent) dies(where string) bool {
	w := a.w
	if !w.faulty() || !w.kinds[agentCrash] || !w.chance(3) {
		return false
	}
	w.faults++
	a.log("dies %s", where)
	a.crash(w.chance(200))
	w.after(nil, w.between(100*time.Millisecond, 4*time.Second), a.start)
	return true
}

func (a *agent) start() {
	w := a.w
	if a.up || !a.listed {
		return
	}
	a.up, a.started, a.left = true, w.at, false
	a.hooks, a.watched, a.sent, a.broken = nil, map[string]map[drain.UID]bool{}, map[drain.UID]bool{}, nil
	a.set = health.New(health.Options{})
	a.dead = map[drain.UID]bool{}
	a.known, a.expiries = map[health.UID]health.State{}, map[drain.UID]map[string]time.Time{}
	a.seen, a.told = map[int]int{}, map[int][]endpoint{}
	a.programming, a.learned, a.unlearned = false, false, false
	a.stepping, a.poked, a.generation = false, false, ""
	a.pause, a.unread, a.rush = fastest, retryFirst, 0
	a.log("starts")
	for _, uid := range sorted(a.journal) {
		e := a.journal[uid]
		for _, holder := range sorted(e.holders) {
			if e.holders[holder].After(w.now) {
				a.set.Exclude(w.now, uid, holder, e.since, e.holders[holder])
				a.expiry(uid, holder, e.holders[holder])
			} else {
				delete(e.holders, holder)
			}
		}
		if e.dead {
			a.set.MarkTerminating(w.now, uid)
		} else if len(e.holders) == 0 {
			delete(a.journal, uid)
		}
	}
	w.after(&a.proc, w.between(5*time.Millisecond, 300*time.Millisecond), func() {
		w.api.list(a.watch, func() { a.set.Synced(); a.log("has synced"); a.wake() })
	})
	if w.checked {
		a.set.SetCheck(w.now, pool(0), check)
		a.probe()
	}
	a.links = nil
	for _, c := range w.coords {
		l := &link{a: a, c: c, pause: pauseFirst}
		a.links = append(a.links, l)
		w.after(&a.proc, w.between(time.Millisecond, 50*time.Millisecond), l.connect)
	}
	if w.rule8 {
		a.program()
	} else {
		w.after(&a.proc, learnMost, func() {
			if !a.learned {
				a.unlearned = true
				a.log("programs its gateway without having learned")
				a.program()
			}
		})
	}
	a.lapse()
}

// check is how the targets of the first pool are probed, in worlds where they are.
var check = health.Check{
	Protocol: health.TCP, Interval: 2 * time.Second, Timeout: time.Second,
	Thresholds: health.Thresholds{Successes: 2, TCPFailures: 2, Timeouts: 3},
}

// probe is one round of the prober.
func (a *agent) probe() {
	w := a.w
	jobs, again := a.set.Due(w.now, nil, 100)
	for _, job := range jobs {
		p := w.api.find(job.Key.Target.UID)
		outcome, took := health.Outcome{Kind: health.Success}, w.between(200*time.Microsecond, 20*time.Millisecond)
		switch {
		case p.stopped || p.sick > w.at:
			outcome.Kind = health.TCPFailure
		case w.faulty() && w.chance(w.noise):
			outcome.Kind, took = health.Timeout, check.Timeout
		}
		w.after(&a.proc, took, func() {
			if a.set.Report(w.now, job, outcome); len(a.set.Work()) > 0 {
				<-a.set.Work()
				a.wake()
			}
		})
	}
	wait := 100 * time.Millisecond
	if !again.IsZero() {
		wait = max(again.Sub(w.now), time.Millisecond)
	}
	w.after(&a.proc, wait, a.probe)
}

func (a *agent) program() {
	if a.programming {
		return
	}
	a.programming = true
	if !a.ready {
		a.w.after(nil, a.w.between(10*time.Millisecond, time.Second), func() {
			a.ready = a.listed
			a.w.api.rosterChanged()
		})
	}
	a.step()
}

func (a *agent) crash(lost bool) {
	w := a.w
	for _, l := range a.links {
		if k := l.conn; k != nil {
			c := l.c
			w.cut(&a.proc, &c.proc, k, 0, lost, func() { c.endOf(k) })
			if lost {
				// The kernel of the other side gives up some time.
				w.after(&c.proc, w.between(5*time.Second, 30*time.Second), func() { c.endOf(k) })
			}
			l.conn = nil // an answer that is under way does not reach the next life
		}
	}
	a.up = false
	a.life++
	a.watch.line = line{}
	for _, h := range slices.Clone(a.hooks) {
		h.finish(pass{reason: "AgentDown"}) // the connection is closed
	}
	for _, broken := range a.broken {
		broken()
	}
	a.broken = nil
}

// lapse is cmd/agent's: time alone lets no pod back in. A expiry that is over stands until a list
// says that the watch is not behind.
func (a *agent) lapse() {
	w := a.w
	w.after(&a.proc, lapseEvery, func() {
		if a.overdue() {
			asked, now := map[int]int{}, w.now
			for _, service := range a.services {
				asked[service] = w.api.slices[service].version
			}
			w.api.list(a.watch, func() {
				for service, version := range asked {
					if a.seen[service] < version {
						return // behind: the next look asks again
					}
				}
				a.lapsed(now)
			})
		}
		a.lapse()
	})
}

// overdue says whether some expiry is over.
func (a *agent) overdue() bool {
	for _, holders := range a.expiries {
		for _, until := range holders {
			if a.w.now.After(until) {
				return true
			}
		}
	}
	return false
}

// lapsed ends the expiries that were over at now, which everything that the set knows of slices is
// not older than.
func (a *agent) lapsed(now time.Time) {
	if uids := a.set.Lapse(now); len(uids) > 0 {
		a.log("exclusions lapsed: %v", uids)
		a.wake()
	}
	a.set.Refreshed(now)
	for uid, holders := range a.expiries {
		for holder, until := range holders {
			if !now.After(until) {
				continue
			}
			delete(holders, holder)
			if e := a.journal[uid]; e != nil {
				delete(e.holders, holder)
				if len(e.holders) == 0 && !e.dead {
					delete(a.journal, uid)
				}
			}
		}
	}
}

func (a *agent) sliceSeen(service int, s slice) {
	for _, e := range s.endpoints {
		if e.terminating {
			a.dead[e.uid] = true
			if a.journal[e.uid] != nil {
				a.journal[e.uid].dead = true
			}
		}
	}
	a.seen[service] = s.version
	a.list(service, s.endpoints)
	a.wake()
}

// list hands the set the difference between what it was told of a Service and endpoints.
func (a *agent) list(service int, endpoints []endpoint) {
	var changes []health.Change
	before := a.told[service]
	for _, e := range endpoints {
		if !slices.Contains(before, e) {
			now := health.Endpoint{Target: target(e), Routable: e.ready, Terminating: e.terminating}
			changes = append(changes, health.Change{Endpoint: now})
		}
	}
	for _, b := range before {
		if !slices.ContainsFunc(endpoints, func(e endpoint) bool { return target(e) == target(b) }) {
			changes = append(changes, health.Change{Endpoint: health.Endpoint{Target: target(b)}, Unlisted: true})
		}
	}
	a.told[service] = endpoints
	a.set.Change(a.w.now, pool(service), changes)
}

func pool(service int) health.Pool { return health.Pool(rune('a' + service)) }

// The exclusions: what is persisted, is persisted before the gateway is touched.

func (a *agent) expiry(uid drain.UID, holder string, until time.Time) {
	if a.expiries[uid] == nil {
		a.expiries[uid] = map[string]time.Time{}
	}
	if until.After(a.expiries[uid][holder]) {
		a.expiries[uid][holder] = until
	}
}

// exclude reports whether the agent has survived it.
func (a *agent) exclude(p drain.Pod, holder string, since, expires time.Time) bool {
	e := a.journal[p.UID]
	if e == nil {
		e = &entry{since: since, holders: map[string]time.Time{}}
		a.journal[p.UID] = e
	}
	if since.Before(e.since) {
		e.since = since
	}
	if expires.After(e.holders[holder]) {
		e.holders[holder] = expires
	}
	if a.dies("after it has persisted an exclusion") {
		return false
	}
	a.expiry(p.UID, holder, expires)
	if a.set.Exclude(a.w.now, p.UID, holder, since, expires) {
		a.log("exclusion on %s for %s", p.UID, holder)
		a.wake()
	}
	return true
}

func (a *agent) readmission(uid drain.UID, holder string, dead bool) {
	e := a.journal[uid]
	if dead {
		a.dead[uid] = true
		if e == nil {
			e = &entry{since: a.w.now, holders: map[string]time.Time{}}
			a.journal[uid] = e
		}
		e.dead = true
		a.set.MarkTerminating(a.w.now, uid)
	}
	if a.set.Readmit(uid, holder) {
		a.log("%s ends its exclusion on %s, dead=%t", holder, uid, dead)
	}
	delete(a.expiries[uid], holder)
	if e != nil {
		delete(e.holders, holder)
		if len(e.holders) == 0 && !e.dead {
			delete(a.journal, uid)
		}
	}
	a.checkHolders(uid)
	a.wake()
}

func (a *agent) renew(holder string, expires time.Time) {
	a.set.Renew(holder, expires)
	for uid, holders := range a.expiries {
		if _, ok := holders[holder]; ok { // over or not: it stands until it is lapsed
			a.expiry(uid, holder, expires)
		}
		if e := a.journal[uid]; e != nil {
			if until, ok := e.holders[holder]; ok && expires.Sub(until) >= coarse {
				e.holders[holder] = expires
			}
		}
	}
}

// The director.

func (a *agent) wake() {
	switch {
	case !a.programming:
	case a.stepping:
		a.poked = true
	default:
		a.pause = fastest
		a.turn++
		a.step()
	}
}

// step is one step of Director.Run.
func (a *agent) step() {
	w := a.w
	a.stepping, a.poked = true, false
	if a.deaf > w.at {
		w.after(&a.proc, callTimeout, func() {
			a.set.Void(w.now)
			a.changed()
			a.sleep(a.unread)
			a.unread = min(2*a.unread, retryMost)
		})
		return
	}
	ops := a.set.Pending()
	a.checkOps(ops)
	if len(ops) == 0 {
		a.read(nil)
		return
	}
	took := w.between(100*time.Microsecond, 15*time.Millisecond)
	if w.faulty() && w.kinds[slowGateway] && w.chance(300) {
		took = w.between(100*time.Millisecond, 4*time.Second)
	}
	w.after(&a.proc, took, func() {
		for i, op := range ops {
			if w.faulty() && w.kinds[opErrors] && w.chance(100) {
				a.log("the gateway refuses %s", op)
				continue
			}
			a.log("%s", op)
			a.gw.apply(op)
			a.checkLast(op)
			if i == len(ops)/2 && a.dies("between two operations") {
				return
			}
		}
		a.read(ops)
	})
}

func (a *agent) read(ops []health.Op) {
	w := a.w
	keys := a.set.Watched()
	for _, op := range ops {
		if _, found := slices.BinarySearchFunc(keys, op.Key, compareKeys); !found {
			keys = append(keys, op.Key)
		}
	}
	at := w.now
	took := w.between(200*time.Microsecond, 4*time.Millisecond)
	w.after(&a.proc, took, func() {
		if !a.gw.up || w.faulty() && w.kinds[opErrors] && w.chance(20) {
			a.set.Void(w.now)
			a.changed()
			a.sleep(a.unread)
			a.unread = min(2*a.unread, retryMost)
			return
		}
		seen := health.Observation{Generation: strconv.Itoa(a.gw.generation), At: at,
			Seen: make(map[health.Key]health.Seen, len(keys))}
		for _, k := range keys {
			seen.Seen[k] = a.gw.read(k)
		}
		sampled := w.at
		if len(keys) == 0 {
			a.taken(ops, seen, sampled)
			return
		}
		w.after(&a.proc, w.between(0, 2*time.Millisecond), func() {
			if a.dies("after a reading") {
				return
			}
			a.taken(ops, seen, sampled)
		})
	})
}

// taken is the rest of the step: the set takes the reading in.
func (a *agent) taken(ops []health.Op, seen health.Observation, sampled time.Duration) {
	w := a.w
	moved := seen.Generation != a.generation
	if moved {
		a.log("the gateway is of generation %s", seen.Generation)
		a.set.Adopt(w.now, a.gw.owned())
		a.generation = seen.Generation
	}
	a.readAt = seen.At.Sub(epoch)
	a.set.Observe(w.now, seen)
	a.checkTruth(sampled)
	a.changed()
	a.unread = retryFirst
	pending := a.set.Pending()
	again := moved
	for _, op := range pending {
		again = again || !slices.Contains(ops, op)
	}
	if again && a.rush < rushMost {
		a.rush++
		a.step()
		return
	}
	a.rush = 0
	wait := watchReloads
	switch {
	case a.set.Unsettled() || len(pending) > 0:
		wait, a.pause = a.pause, min(a.pause*3/2, slowest)
	case len(a.set.Watched()) > 0:
		wait, a.pause = watchExclusions, fastest
	default:
		a.pause = fastest
	}
	a.sleep(wait)
}

func (a *agent) sleep(wait time.Duration) {
	a.stepping = false
	if a.poked {
		a.pause, wait = fastest, 0
	}
	a.turn++
	turn := a.turn
	a.w.after(&a.proc, wait, func() {
		if a.turn == turn && !a.stepping {
			a.step()
		}
	})
}

// changed tells the streams that an exclusion has another state.
func (a *agent) changed() {
	stones := a.set.Exclusions()
	news := len(stones) != len(a.known)
	for _, s := range stones {
		was, known := a.known[s.UID]
		news = news || s.State == health.Kept
		if !known || was != s.State {
			news = true
			a.log("%s is %s", s.UID, s.State)
		}
	}
	if !news {
		return
	}
	clear(a.known)
	for _, s := range stones {
		a.known[s.UID] = s.State
	}
	for _, l := range a.links {
		l.poke(false)
	}
}

// The streams.

func (l *link) connect() {
	w, a, c := l.a.w, l.a, l.c
	k := &conn{}
	l.numbers = [2]map[drain.UID]uint64{{}, {}}
	l.conn, l.began, l.heardAt = k, w.at, w.at
	l.synced, l.declared, l.posting, l.released, l.said = false, false, false, nil, map[drain.UID]drain.Report{}
	if !c.up {
		w.after(&a.proc, time.Millisecond, func() { l.lost(k) })
		return
	}
	boot := fmt.Sprint(a.life) // that in which the agent connects, whatever its life when the replica accepts
	w.send(&a.proc, &c.proc, k, 0, func() { c.connect(l, k, boot) })
	l.watchdog(k)
}

// watchdog ends a stream on which nothing comes.
func (l *link) watchdog(k *conn) {
	w := l.a.w
	w.after(&l.a.proc, l.heardAt+w.times.Away-w.at, func() {
		switch {
		case l.conn != k:
		case w.at-l.heardAt >= w.times.Away:
			l.a.log("%s is silent", l.c.name)
			l.lost(k)
		default:
			l.watchdog(k)
		}
	})
}

// closed is told when the other side died.
func (l *link) closed() {
	if l.conn != nil {
		l.lost(l.conn)
	}
}

func (l *link) lost(k *conn) {
	w, a, c := l.a.w, l.a, l.c
	if l.conn != k {
		return
	}
	l.conn, l.declared, l.posting = nil, false, false
	asks := l.asks
	l.asks = nil
	for _, fail := range asks {
		fail()
	}
	w.cut(&a.proc, &c.proc, k, 0, false, func() { c.endOf(k) })
	if w.at-l.began > pauseMost {
		l.pause = pauseFirst
	}
	pause := w.between(l.pause/2, l.pause)
	l.pause = min(2*l.pause, pauseMost)
	w.after(&a.proc, pause, func() {
		if l.conn == nil && !a.left {
			l.connect()
		}
	})
}

// receive carries out what came in one write.
func (l *link) receive(k *conn, at time.Time, session uint64, expiry drain.Holder, open []drain.Open,
	released []drain.Release, first bool) {
	w, a := l.a.w, l.a
	if l.conn != k {
		return
	}
	l.heardAt, l.session, l.expiry = w.at, session, expiry
	holder, expires := expiry.String(), w.now.Add(w.times.Expiry)
	a.renew(holder, expires)
	l.at = at
	for _, d := range open {
		if d.Watch != nil {
			a.observe(d.Pod.UID, holder, true)
		} else if !a.exclude(d.Pod, holder, d.Since, expires) {
			return
		}
		l.numbers[gateOf(d)][d.Pod.UID] = d.Number
		l.poke(false)
	}
	for _, r := range released {
		if r.Gate == drain.AtBarrier {
			a.observe(r.UID, holder, false)
			delete(l.numbers[r.Gate], r.UID)
			if l.released != nil {
				l.released[r.UID] = true
			}
			continue
		}
		delete(l.numbers[r.Gate], r.UID)
		if l.released != nil {
			l.released[r.UID] = true
		}
		a.readmission(r.UID, holder, r.Terminating)
	}
	if !first || l.synced {
		return
	}
	l.synced = true
	for uid := range a.watched[holder] {
		if !slices.ContainsFunc(open, func(d drain.Open) bool { return d.Pod.UID == uid && d.Watch != nil }) {
			a.observe(uid, holder, false)
		}
	}
	for _, uid := range a.set.Held(holder) {
		if !slices.ContainsFunc(open, func(d drain.Open) bool { return d.Pod.UID == uid }) {
			a.readmission(uid, holder, false)
		}
	}
	l.declare(k)
}

// post brings one request to the replica and its answer back. It ends the stream if none comes in
// time.
func (l *link) post(k *conn, serve func() bool, answered func()) {
	w, a, c := l.a.w, l.a, l.c
	done := false
	twice := w.faulty() && w.chance(w.twice)
	if !c.up {
		w.after(&a.proc, time.Millisecond, func() { l.lost(k) })
		return
	}
	w.send(&a.proc, &c.proc, nil, 0, func() {
		ok := serve()
		if twice {
			serve()
		}
		w.send(&c.proc, &a.proc, nil, 0, func() {
			if done || l.conn != k {
				return
			}
			done = true
			if !ok {
				l.lost(k)
				return
			}
			answered()
		})
	})
	w.after(&a.proc, postTimeout, func() {
		if !done {
			done = true
			l.lost(k)
		}
	})
}

// leave tells every replica to which a stream is open, once.
func (a *agent) leave() {
	a.log("leaves")
	a.left = true
	for _, l := range a.links {
		if k := l.conn; k != nil && l.session != 0 && l.synced {
			c, session, boot := l.c, l.session, fmt.Sprint(a.life)
			a.w.measure("leaves that were sent to a replica")
			l.post(k, func() bool { return c.leave(a, session, boot) }, func() {})
		}
	}
}

// forsake has an agent route a Service no more, as after a change of its configuration.
func (a *agent) forsake() {
	w := a.w
	if !a.up || a.left || a.kernel != nil || len(a.services) < 2 {
		return
	}
	i := w.rng.IntN(len(a.services))
	s := a.services[i]
	a.log("does not route %s any more", service(s))
	a.services = slices.Delete(slices.Clone(a.services), i, i+1)
	a.list(s, nil)
	for _, l := range a.links {
		if l.declared {
			l.declare(l.conn)
		}
	}
	w.after(&a.proc, w.between(0, time.Second), a.wake)
}

func (l *link) declare(k *conn) {
	a, c, session := l.a, l.c, l.session
	routes := make([]drain.Route, 0, len(a.services))
	for _, s := range a.services {
		routes = append(routes, drain.Route{Service: service(s), Via: drain.Endpoints, Kind: drain.Directed,
			Granularity: drain.PerRequest})
	}
	if a.kernel != nil {
		routes = []drain.Route{{Service: drain.EveryService, Via: drain.Endpoints, Kind: drain.Observed,
			Granularity: drain.PerConnection}}
	}
	l.released = map[drain.UID]bool{}
	var open []drain.Open
	l.post(k, func() (ok bool) { open, ok = c.declare(a, session, routes); return ok }, func() {
		settled, holder, expires := true, l.expiry.String(), a.w.now.Add(a.w.times.Expiry)
		for _, d := range open {
			if l.released[d.Pod.UID] {
				settled = false
				continue
			}
			if d.Watch != nil {
				a.observe(d.Pod.UID, holder, true)
			} else if !a.exclude(d.Pod, holder, d.Since, expires) {
				return
			}
			numbers := l.numbers[gateOf(d)]
			numbers[d.Pod.UID] = max(numbers[d.Pod.UID], d.Number)
		}
		l.released = nil
		if !settled {
			l.declare(k)
			return
		}
		l.declared = true
		a.learn()
		l.renewal(k)
		l.everything = true
		l.reports(k)
	})
}

// gateOf is the gate at which an agent that is told of d answers.
func gateOf(d drain.Open) drain.Gate {
	if d.Watch != nil {
		return drain.AtBarrier
	}
	return drain.AtHold
}

func (a *agent) learn() {
	for _, l := range a.links {
		if !l.declared {
			return
		}
	}
	if !a.learned {
		a.learned = true
		a.log("has learned which drains are open")
	}
	a.program()
}

func (l *link) renewal(k *conn) {
	w := l.a.w
	w.after(&l.a.proc, w.times.Renewal/2, func() {
		if l.conn == k {
			l.poke(true)
			l.renewal(k)
		}
	})
}

// poke says that there may be something to report.
func (l *link) poke(everything bool) {
	l.everything = l.everything || everything
	switch {
	case l.conn == nil || !l.declared:
	case l.posting:
		l.poked = true
	default:
		l.reports(l.conn)
	}
}

// reports posts what has changed, or everything.
func (l *link) reports(k *conn) {
	a, c, session, at := l.a, l.c, l.session, l.at
	if a.deaf > a.w.at {
		return
	}
	held := a.set.Held(l.expiry.String())
	now := map[drain.UID]drain.Report{}
	var news []said
	for _, s := range a.set.Exclusions() {
		if _, asked := slices.BinarySearch(held, s.UID); !asked {
			continue
		}
		r := drain.Report{UID: s.UID, Generation: s.Generation, State: wireState(s.State)}
		r.Number = l.numbers[drain.AtHold][r.UID]
		if s.State >= health.Removed {
			r.Proof = drain.Runtime
		}
		if s.State == health.Kept {
			var names []string
			for _, p := range s.Kept {
				names = append(names, service(int(p[0]-'a')).String())
			}
			slices.Sort(names)
			r.Kept, r.NoConnections = strings.Join(names, ","), s.NoConnections
		}
		now[r.UID] = r
		if l.everything || l.said[r.UID] != r {
			news = append(news, said{Report: r, readAt: a.readAt})
		}
	}
	for _, uid := range sorted(a.watched[l.expiry.String()]) {
		r := drain.Report{
			UID: uid, State: a.kernel.state(uid), Gate: drain.AtBarrier, Number: l.numbers[drain.AtBarrier][uid],
			NoConnections: a.kernel.synced && a.kernel.active[uid] == 0, HasSent: a.sent[uid],
		}
		if r.State >= drain.Removed {
			r.Proof = drain.Runtime
		}
		now[uid] = r
		if l.everything || l.said[uid] != r {
			news = append(news, said{Report: r, readAt: a.w.at})
		}
	}
	l.said, l.everything, l.poked = now, false, false
	if len(news) == 0 {
		return
	}
	l.posting = true
	l.post(k, func() bool { return c.report(a, at, session, news) }, func() {
		if a.dies("after a report") {
			return
		}
		l.posting = false
		if l.poked {
			l.reports(k)
		}
	})
}

// observe begins to observe a pod for holder, or ends that.
func (a *agent) observe(uid drain.UID, holder string, begin bool) {
	switch {
	case !begin:
		if delete(a.watched[holder], uid); !a.observes(uid) {
			delete(a.sent, uid)
		}
		return
	case a.watched[holder] == nil:
		a.watched[holder] = map[drain.UID]bool{uid: true}
	default:
		a.watched[holder][uid] = true
	}
	a.look(uid)
}

// observes says whether somebody wants a pod to be observed.
func (a *agent) observes(uid drain.UID) bool {
	for _, uids := range a.watched {
		if uids[uid] {
			return true
		}
	}
	return false
}

// look notes whether the kernel sends to a pod that is observed.
func (a *agent) look(uid drain.UID) {
	if a.kernel.synced && a.kernel.routes(uid) {
		a.sent[uid] = true
	}
}

func wireState(s health.State) drain.State {
	switch s {
	case health.Routing:
		return drain.Routing
	case health.Kept:
		return drain.Kept
	case health.Removed:
		return drain.Removed
	case health.Idle:
		return drain.Idle
	default:
		return drain.StateUnknown
	}
}

// newAgent makes an agent beside a gateway of its own. Its pod is listed from now on, its process
// starts later.
func (w *world) newAgent(lag time.Duration) { w.addAgent(lag, "") }

// newObserver makes an agent that observes the kernel of a node of its own.
func (w *world) newObserver(lag time.Duration, population string) { w.addAgent(lag, population) }

func (w *world) addAgent(lag time.Duration, population string) {
	if w.nodes >= maxNodes {
		return
	}
	n, observes := len(w.agents)+1, population != ""
	a := &agent{
		w: w, id: drain.AgentID(fmt.Sprintf("agent-%d", n)), listed: true, journal: map[drain.UID]*entry{},
		population: population, proc: proc{node: w.nodes, name: fmt.Sprintf("agent-%d", n)},
	}
	w.nodes++
	for s := range w.api.services {
		if !observes && (s == 0 || w.chance(700)) {
			a.services = append(a.services, s)
		}
	}
	if w.namespaces() && !observes && w.chance(500) {
		a.right = service(2 * w.rng.IntN(2)).Namespace
		a.services = slices.DeleteFunc([]int{0, 1, 2}, func(i int) bool { return service(i).Namespace != a.right })
	}
	a.gw = newGateway(w, a)
	a.watch = &watcher{p: &a.proc, slice: func(service int, s slice) {
		if slices.Contains(a.services, service) {
			a.sliceSeen(service, s)
		}
	}}
	w.api.watchers = append(w.api.watchers, a.watch)
	w.agents = append(w.agents, a)
	if observes {
		a.kernel = newKernel(w, a)
	}
	w.api.rosterChanged()
	w.after(nil, lag, a.start)
	if !observes {
		a.gw.clients()
	}
}

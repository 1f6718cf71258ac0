package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/agent/exclusion"
	"github.com/lameduck-io/lameduck/internal/agent/journal"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/internal/agent/observation"
	"github.com/lameduck-io/lameduck/internal/agent/source"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// agent is one agent: the set, the exclusions and their journal, the steps of the director, the
// index of endpoints and the sessions of the product, and what cmd/agent connects them with.
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
	// disk survives every death.
	disk disk
	// set, index, journal, exclusions, lapses and steps are those of this life. An agent that
	// observes has an empty set and nothing else of it.
	set        *health.Set
	index      *endpoints.Index
	journal    *journal.Journal
	exclusions *exclusion.Exclusions
	lapses     *exclusion.Lapses
	steps      *gateway.Steps
	// kernel is that of the node, of an agent that observes one. It directs nothing then.
	// population is drain.Nodes, or the name of a gateway of which the kernel stands for a replica:
	// no pod is on such a node.
	kernel     *kernel
	population string
	// observed are the pods that it observes for coordinators. hooks wait; broken is told when the
	// connections of hooks break that are not among hooks.
	observed *observation.Pods
	// watches are the pods in mode observe that an agent that directs watches for coordinators.
	watches *exclusion.Watches
	hooks   []*hook
	broken  []func()
	gw      *gw
	links   []*link
	// programming: the director runs. learned: every replica has answered a declaration. unlearned:
	// it ran without, and what it has learned since may not be in its gateway yet.
	programming, learned, unlearned bool

	// declarations counts the changes of services.
	declarations int

	// deaf is until when it is connected and silent: its calls of the gateway do not come back, and
	// it reports nothing.
	deaf time.Duration

	// left: it has told whom it could that its gateway accepts nothing any more, and opens no
	// stream any more.
	left bool

	// stepping: a step of the director is under way. poked: it is wanted again meanwhile. turn
	// counts its pauses. generation is that of the last reading, which began at readAt.
	stepping, poked bool
	turn            int
	generation      string
	readAt          time.Duration

	// expiries are who holds what until when, for the checks: a plain record beside the set.
	expiries map[drain.UID]map[string]time.Time
	// dead are the pods that this life has seen terminating, for the checks.
	dead map[drain.UID]bool
	// unsure is until when a removal that was not answered may be carried out, for the checks.
	unsure map[health.Key]time.Duration
	// heard is what the watch has brought last.
	heard *source.Heard
	// barred is the namespace that it may not list for the time being, and withheld what it would
	// know of its Services. synced: its watch has listed all others.
	barred   string
	withheld map[int]slice
	synced   bool
}

// propagation is what no check looks at.
var propagation = metrics.NewPropagation(prometheus.NewRegistry(), "kernel", "")

// disk is a journal.Disk of which a write is whole or not there.
type disk struct {
	w      *world
	data   []byte
	writes int
}

func (d *disk) Read() ([]byte, error) {
	if d.data == nil {
		return nil, fs.ErrNotExist
	}
	return d.data, nil
}

func (d *disk) SetAside() error { panic("the journal cannot be read") }

func (d *disk) Replace(data []byte) error {
	if d.w.faulty() && d.w.kinds[badDisk] && d.w.chance(200) {
		return errDisk
	}
	d.data = data
	d.writes++
	return nil
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
	a.hooks, a.broken = nil, nil
	a.dead, a.expiries, a.heard = map[drain.UID]bool{}, map[drain.UID]map[string]time.Time{}, &source.Heard{}
	a.unsure = map[health.Key]time.Duration{}
	a.programming, a.learned = false, false
	a.barred, a.withheld, a.synced = "", map[int]slice{}, false
	a.stepping, a.poked, a.generation = false, false, ""
	a.set = health.New(health.Options{})
	a.log("starts")
	if a.kernel == nil {
		a.direct()
	} else {
		a.kernel.watched = map[netip.Addr]int{}
		a.observed = observation.New(a.kernel, nil, propagation, w.logger(a.name))
	}
	a.links = nil
	for _, c := range w.coords {
		l := &link{a: a, c: c}
		a.links = append(a.links, l)
		w.after(&a.proc, w.between(time.Millisecond, 50*time.Millisecond), l.connect)
	}
	w.after(&a.proc, client.LearnTimeout, func() {
		if !a.learned {
			a.unlearned = true
			a.log("programs its gateway without having learned")
			a.program()
		}
	})
}

// direct is cmd/agent's runDirected.
func (a *agent) direct() {
	w := a.w
	log := w.logger(a.name)
	a.disk.w = w
	a.journal = journal.On(&a.disk, a.now(), a.stamp(), nil, log)
	for _, e := range a.journal.Exclusions() {
		for holder, until := range e.Expiries {
			a.expiry(e.Pod.UID, holder, until)
		}
		a.dead[e.Pod.UID] = e.Terminating
	}
	ports := map[health.Pool]endpoints.Port{}
	a.index = endpoints.NewIndex()
	for i := range w.api.services {
		of := service(i)
		ports[pool(i)] = endpoints.Port{Service: types.NamespacedName{Namespace: of.Namespace, Name: of.Name}}
		if slices.Contains(a.services, i) {
			a.index.Follow(ports[pool(i)])
		}
	}
	a.exclusions = exclusion.New(a.now(), a.set, a.journal, ports, a.wake, nil, log)
	a.lapses = &exclusion.Lapses{Exclusions: a.exclusions,
		Rand: func(most time.Duration) time.Duration { return w.between(0, most-1) }}
	a.steps, a.watches = gateway.NewSteps(a.set), &exclusion.Watches{Set: a.set}
	w.after(&a.proc, time.Millisecond, a.persist)
	a.lapse()
	w.after(&a.proc, w.between(5*time.Millisecond, 300*time.Millisecond), func() {
		w.api.list(a.watch, func() { a.synced = true; a.sync() })
	})
	if w.namespaces() && w.chance(300) {
		a.barred = service(2 * w.rng.IntN(2)).Namespace
		a.log("may not list %s", a.barred)
		w.after(&a.proc, w.between(time.Second, 40*time.Second), a.allow)
	}
	if w.checked {
		a.set.SetCheck(a.now(), pool(0), check)
		a.probe()
	}
}

// sync is the end of the first lists in Endpoints.Run.
func (a *agent) sync() {
	if !a.synced {
		return
	}
	var listed []health.Pool
	for i := range a.w.api.services {
		if service(i).Namespace != a.barred {
			listed = append(listed, pool(i))
		}
	}
	a.set.Synced(listed...)
	if a.barred == "" {
		a.set.Synced()
	}
	a.log("has synced %v", listed)
	a.wake()
}

// bars reports whether it may not list the namespace whose Service feeds a pool.
func (a *agent) bars(p health.Pool) bool { return service(int(p[0]-'a')).Namespace == a.barred }

// allow gives it back the right to list a namespace.
func (a *agent) allow() {
	a.barred = ""
	for _, i := range sorted(a.withheld) {
		a.watch.slice(i, a.withheld[i])
	}
	a.sync()
}

// check is how the targets of the first pool are probed, in worlds where they are.
var check = health.Check{
	Protocol: health.TCP, Interval: 2 * time.Second, Timeout: time.Second,
	Thresholds: health.Thresholds{Successes: 2, TCPFailures: 2, Timeouts: 3},
}

// probe is one round of the prober.
func (a *agent) probe() {
	w := a.w
	jobs, again := a.set.Due(a.now(), nil, 100)
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
			a.set.Report(a.now(), job, outcome)
			a.work()
		})
	}
	wait := 100 * time.Millisecond
	if !again.IsZero() {
		wait = max(again.Sub(a.now()), time.Millisecond)
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
	if a.kernel == nil {
		a.step()
	}
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

// stamp is the clock of the journal.
func (a *agent) stamp() journal.Stamp { return journal.Stamp{Boot: "boot", At: a.w.at} }

// persist is Journal.Run: what has changed is written within a second.
func (a *agent) persist() {
	if a.write() {
		a.w.after(&a.proc, a.w.between(100*time.Millisecond, time.Second), a.persist)
	}
}

// write is Journal.Sync: false if the agent dies of it.
func (a *agent) write() bool {
	writes := a.disk.writes
	_ = a.journal.Write(func() (time.Time, journal.Stamp) { return a.now(), a.stamp() })
	if a.disk.writes > writes && a.dies("after a write of its journal") {
		return false
	}
	a.changed() // what is in the file may be told
	return true
}

var (
	errDisk    = errors.New("the disk is bad")
	errGateway = errors.New("the gateway refuses it")
	errDeaf    = errors.New("the gateway does not answer")
	errBehind  = errors.New("the watch is behind")
)

// lapse is Exclusions.Expire.
func (a *agent) lapse() {
	w := a.w
	w.after(&a.proc, exclusion.LapseEvery, func() {
		asked := a.now()
		if !a.lapses.Due(asked) {
			a.lapsed()
			a.lapse()
			return
		}
		a.fresh(func(err error) {
			a.lapses.Answered(asked, a.now(), err)
			a.lapsed()
			a.lapse()
		})
	})
}

// fresh is Endpoints.Fresh: it calls then when everything was heard that the API server could tell
// after the call.
func (a *agent) fresh(then func(error)) {
	w, over := a.w, false
	end := func(err error) {
		if !over {
			over = true
			then(err)
		}
	}
	w.after(&a.proc, source.FreshTimeout, func() { end(errBehind) })
	w.send(&a.proc, &w.api.node, nil, 0, func() {
		listed := map[string]*discovery.EndpointSliceList{}
		for _, i := range a.services {
			if service(i).Namespace == a.barred {
				continue
			}
			listed[service(i).Namespace] = w.api.inNamespace(service(i).Namespace)
		}
		w.send(&w.api.node, &a.proc, nil, 0, func() {
			var look func()
			look = func() {
				if over {
					return
				}
				for _, namespace := range sorted(listed) {
					if name, err := a.heard.Missing(namespace, listed[namespace]); name != "" || err != nil {
						w.after(&a.proc, source.FreshEvery, look)
						return
					}
				}
				end(nil)
			}
			look()
		})
	})
}

// lapsed brings the record of expiries to what has lapsed.
func (a *agent) lapsed() {
	for uid, holders := range a.expiries {
		for holder, until := range holders {
			if a.now().After(until) && !slices.Contains(a.set.Held(holder), uid) {
				delete(holders, holder)
			}
		}
	}
}

func (a *agent) sliceSeen(service int, s slice) {
	for _, e := range s.endpoints {
		if e.terminating {
			a.dead[e.uid] = true
		}
	}
	a.tell(a.index.Apply(a.now(), s.object(service)))
}

// tell hands differences to the set: Endpoints.tell.
func (a *agent) tell(changed []endpoints.PortChange) {
	for _, c := range changed {
		a.set.Change(a.now(), health.Pool(c.Port.Service.Name), c.Changes)
	}
	a.wake()
}

func pool(service int) health.Pool { return health.Pool(rune('a' + service)) }

func (a *agent) expiry(uid drain.UID, holder string, until time.Time) {
	if a.expiries[uid] == nil {
		a.expiries[uid] = map[string]time.Time{}
	}
	if until.After(a.expiries[uid][holder]) {
		a.expiries[uid][holder] = until
	}
}

// recorded is what a session asks of the exclusions, with a record beside them for the checks.
type recorded struct {
	*exclusion.Exclusions
	a *agent
}

func (r recorded) Exclude(now time.Time, p drain.Pod, holder string, since, expires time.Time) {
	// A hook of a pod that is gone, whose mode is not known any more, is answered like any other.
	if of := r.a.w.api.find(p.UID); of.observed() && !of.gone {
		r.a.w.fail(checkMode, "%s is told to exclude %s, whose mode is observe", r.a.name, p.UID)
	}
	r.a.expiry(p.UID, holder, expires)
	r.Exclusions.Exclude(now, p, holder, since, expires)
	w := r.a.w
	w.after(&r.a.proc, w.between(20*time.Microsecond, 3*time.Millisecond), func() { r.a.write() })
}

func (r recorded) Readmit(now time.Time, uid drain.UID, holder string, dead bool) {
	r.a.dead[uid] = r.a.dead[uid] || dead
	r.Exclusions.Readmit(now, uid, holder, dead)
	delete(r.a.expiries[uid], holder)
	r.a.checkHolders(uid)
}

func (r recorded) Renew(now time.Time, holder string, expires time.Time) {
	r.Exclusions.Renew(now, holder, expires)
	for uid, holders := range r.a.expiries {
		if _, ok := holders[holder]; ok { // over or not: it stands until it is lapsed
			r.a.expiry(uid, holder, expires)
		}
	}
}

// The director.

func (a *agent) wake() {
	switch {
	case !a.programming || a.kernel != nil:
	case a.stepping:
		a.poked = true
	default:
		a.steps.Woken()
		a.again(0)
	}
}

// work takes in that the health of targets has changed.
func (a *agent) work() {
	select {
	case <-a.set.Work():
		a.wake()
	default:
	}
}

// again makes the next step after a pause, which a later call replaces.
func (a *agent) again(wait time.Duration) {
	a.turn++
	turn := a.turn
	a.w.after(&a.proc, wait, func() {
		if a.turn == turn && !a.stepping {
			a.step()
		}
	})
}

// step is Director.step. Each call of the gateway may be refused, be carried out although it is not
// answered, then or later, be answered although it is not carried out, or take long.
func (a *agent) step() {
	a.stepping, a.poked = true, false
	ops := a.steps.Begin(a.now())
	a.checkOps(ops)
	switch {
	case len(ops) == 0:
		a.read(a.steps.Applied(nil))
	case slices.ContainsFunc(ops, func(op health.Op) bool { return op.Want != health.WantRouted }):
		if a.write() { // exclusion.WriteAhead
			a.apply(ops)
		}
	default:
		a.apply(ops)
	}
}

func (a *agent) apply(ops []health.Op) {
	w := a.w
	took := w.between(100*time.Microsecond, 15*time.Millisecond)
	if w.faulty() && w.kinds[slowGateway] && w.chance(300) {
		took = w.between(100*time.Millisecond, 4*time.Second)
	}
	deaf := a.deaf > w.at
	if deaf {
		took = gateway.CallTimeout
	}
	began := w.at
	w.after(&a.proc, took, func() {
		var errs []error
		for i, op := range ops {
			switch {
			case w.overtakes() && !a.gw.kernel && w.faulty() && (deaf || w.chance(300)):
				a.log("the gateway does not answer %s", op)
				errs = append(errs, &gateway.Unanswered{Ops: []health.Op{op}, For: overtaken, Err: errDeaf})
				a.overtake(op)
				continue
			case deaf:
				errs = append(errs, errDeaf)
				continue
			case w.faulty() && w.kinds[opErrors] && w.chance(100):
				a.log("the gateway refuses %s", op)
				errs = append(errs, errGateway)
				continue
			case w.faulty() && w.kinds[opErrors] && w.chance(50):
				a.log("the gateway says that it has done %s", op)
				continue
			case w.faulty() && w.kinds[opErrors] && w.chance(50):
				errs = append(errs, errDeaf) // it is carried out all the same
			}
			a.log("%s", op)
			a.gw.apply(op)
			a.checkLast(op, began)
			if i == len(ops)/2 && a.dies("between two operations") {
				return
			}
		}
		a.read(a.steps.Applied(errors.Join(errs...)))
	})
}

// overtaken is how long a gateway may, while it answers others, carry out what it did not answer.
const overtaken = 10 * time.Second

// overtake has the gateway carry out op later, or not at all.
func (a *agent) overtake(op health.Op) {
	w := a.w
	answers := max(0, a.deaf-w.at)
	if op.Want != health.WantRouted {
		a.unsure[op.Key] = w.at + answers + overtaken
	}
	if w.chance(100) {
		return
	}
	w.after(&a.proc, answers+w.between(0, overtaken), func() {
		if a.gw.up {
			a.log("the gateway carries out %s late", op)
			a.gw.apply(op)
		}
	})
}

func (a *agent) read(keys []health.Key) {
	w := a.w
	if a.deaf > w.at {
		w.after(&a.proc, gateway.CallTimeout, func() { a.taken(health.Observation{}, nil, 0, errDeaf) })
		return
	}
	at := a.now()
	w.after(&a.proc, w.between(200*time.Microsecond, 4*time.Millisecond), func() {
		if !a.gw.up || w.faulty() && w.kinds[opErrors] && w.chance(20) {
			a.taken(health.Observation{}, nil, 0, errGateway)
			return
		}
		seen := health.Observation{Generation: strconv.Itoa(a.gw.generation), At: at,
			Seen: make(map[health.Key]health.Seen, len(keys))}
		a.gw.renew()
		for _, k := range keys {
			seen.Seen[k] = a.gw.read(k)
		}
		sampled := w.at
		w.after(&a.proc, w.between(0, 2*time.Millisecond), func() {
			switch {
			case a.dies("after a reading"):
			case !a.steps.Moved(seen):
				a.taken(seen, nil, sampled, nil)
			case a.gw.up:
				a.taken(seen, a.gw.owned(), sampled, nil)
			default:
				a.taken(seen, nil, sampled, errGateway)
			}
		})
	})
}

// taken is the rest of the step, with what was read at sampled.
func (a *agent) taken(seen health.Observation, owned []health.Key, sampled time.Duration, err error) {
	if err == nil {
		if a.generation != seen.Generation {
			a.log("the gateway is of generation %s", seen.Generation)
		}
		a.generation, a.readAt = seen.Generation, seen.At.Sub(start)
	}
	done := a.steps.Read(a.now(), seen, owned, err)
	if err == nil {
		a.checkTruth(sampled)
	}
	a.changed()
	if done.Wait == 0 {
		a.step()
		return
	}
	a.stepping = false
	a.again(done.Wait)
	if a.work(); a.poked {
		a.wake()
	}
}

// changed tells the streams that an exclusion, or a pod that is watched, may have another state.
func (a *agent) changed() {
	if a.exclusions.Changed(a.now()) || len(a.watches.Reports(a.now())) > 0 {
		for _, l := range a.links {
			l.poke(false)
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
	for _, c := range a.index.Delete(a.now(), slice{}.object(s)) {
		a.set.Change(a.now(), pool(s), c.Changes)
	}
	a.declarations++
	for _, l := range a.links {
		if l.declared && !l.declaring {
			l.declare(l.conn)
		}
	}
	w.after(&a.proc, w.between(0, time.Second), a.wake)
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
		w: w, id: drain.AgentID(fmt.Sprintf("agent-%d", n)), listed: true,
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
	a.watch = &watcher{p: &a.proc, slice: func(i int, s slice) {
		if service(i).Namespace == a.barred {
			a.withheld[i] = s
			return
		}
		if slices.Contains(a.services, i) && a.kernel == nil {
			a.sliceSeen(i, s)
		}
		a.heard.Record(s.object(i), false)
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

package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// pod is one pod, in the API server and on its node.
type pod struct {
	// daemon: it belongs to a DaemonSet, which has no other pods. crowded counts the answers that
	// its controller is held for others.
	daemon  bool
	crowded int

	uid      drain.UID
	addr     netip.AddrPort
	services []int
	ready    bool
	// terminating: it has a deletionTimestamp. stopped: its process ended. gone: the API server has
	// forgotten it.
	terminating, stopped, gone bool
	// committed is when it became terminating, and by what words: one of each replica that
	// answered.
	committed time.Duration
	words     []*word
	// born is when it was created.
	born time.Duration
	// target has the condition DisruptionTarget.
	target bool
	// refused is until when another webhook denies every request for its deletion.
	refused time.Duration
	// sick is until when it refuses connections, though it is ready.
	sick time.Duration
	// readyAt is when it became ready, lostAt when it was not any more, each the last time.
	readyAt, lostAt time.Duration
	// restartedAt is when its container was started again, if it has no readiness probe.
	restartedAt time.Duration
	// host is the node agent of its node, if it has a barrier; passed is why its hooks were
	// answered. run counts how often the kubelet has run them.
	host   *agent
	passed *pass
	run    int
	// hooks is what its hooks are worth. allowed is the grace period of its deletion, leftAt when a
	// replica first left that to its barrier.
	hooks           hookKind
	allowed, leftAt time.Duration
	// halted is why its container does not run, although the pod was not deleted. With failed it
	// never runs again.
	halted string
	failed bool
	// calls counts deletions that are under way.
	calls int
	// mode is its label, empty if it has none. keeps: it stays as it is.
	mode  string
	keeps bool
	// shown is the last object that was made of it, by the view shownOf. Nothing changes it.
	shown   *corev1.Pod
	shownOf podView
}

func (p *pod) drainPod() drain.Pod {
	return drain.Pod{Namespace: service(p.services[0]).Namespace, Name: string(p.uid), UID: p.uid}
}

// endpoint is one line of an EndpointSlice.
type endpoint struct {
	uid                drain.UID
	addr               netip.AddrPort
	ready, terminating bool
	// host is the node it is on.
	host *agent
}

// slice is what the EndpointSlices of one Service say at one time.
type slice struct {
	version int
	// at is when the API server had it.
	at        time.Duration
	endpoints []endpoint
	// shown is its object, made once. Nothing changes it.
	shown *discovery.EndpointSlice
}

// resourceVersion is what the API server calls it by.
func (s slice) resourceVersion() string { return strconv.FormatInt(int64(s.at)+1, 10) }

// object is s as the API server shows it.
func (s slice) object(i int) *discovery.EndpointSlice {
	if s.shown != nil {
		return s.shown
	}
	of := service(i)
	object := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name, ResourceVersion: s.resourceVersion(),
			Labels: map[string]string{discovery.LabelServiceName: of.Name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Port: new(int32(80))}},
	}
	for _, e := range s.endpoints {
		of := discovery.Endpoint{
			Addresses:  []string{e.addr.Addr().String()},
			Conditions: discovery.EndpointConditions{Ready: &e.ready, Terminating: &e.terminating},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: object.Namespace, Name: string(e.uid),
				UID: types.UID(e.uid)},
		}
		if e.host != nil {
			of.NodeName = &e.host.name
		}
		object.Endpoints = append(object.Endpoints, of)
	}
	return object
}

// word is why a deletion was let through: what the webhook said, and what every agent's last word
// was then.
type word struct {
	reason string
	at     time.Duration
	by     *coord
	life   int
	// left: Removed was enough, because the pod's barrier will wait.
	left bool
	// agents holds, of each agent that there was, when the reading behind its last word began, or
	// an excuse.
	agents map[*agent]backing
}

// backing is what an agent's part in an allow rests on.
type backing struct {
	readAt time.Duration
	excuse string
}

// watcher is a watch of the API server, with its delay.
type watcher struct {
	p     *proc
	pods  func(*pod, podView)
	slice func(service int, s slice)
	// roster hears of agents.
	roster func([]drain.Expected)
	line   line
	stall  time.Duration
}

// podView is a pod as it was at one time.
type podView struct {
	ready, terminating, gone, target, failed bool
	readyAt, restartedAt, lostAt, committed  time.Duration
	mode                                     string
}

func (p *pod) view() podView {
	return podView{p.ready, p.terminating, p.gone, p.target, p.failed, p.readyAt, p.restartedAt, p.lostAt, p.committed,
		p.mode}
}

// setReady is what the kubelet says of a pod.
func (a *api) setReady(p *pod, ready bool) {
	if p.ready == ready {
		return
	}
	p.ready = ready
	if ready {
		p.readyAt = a.w.at
	} else {
		p.lostAt = a.w.at
	}
	a.podChanged(p)
}

// policy is a Service's traffic policy: from where its endpoints must be.
type policy int

const (
	allNodes policy = iota
	// localFromOutside: what comes from outside stays on the node. localAlways: nothing leaves it.
	localFromOutside
	localAlways
)

// api is the API server, the EndpointSlice controller, the kubelets and the clients that delete
// pods.
type api struct {
	w        *world
	node     proc
	services int
	want     []int // pods wanted of each Service
	pods     []*pod
	slices   []slice
	history  [][]slice
	dirty    []bool
	watchers []*watcher
	born     int
	// free are addresses that no pod has any more.
	free []netip.AddrPort
	next int
	// budget: minAvailable of Service 0 is its size - 1.
	budget bool
	// policies and stated are what the Services say of themselves.
	policies []policy
	stated   []time.Duration
	other    struct{ deny, sleep int } // of a thousand calls
}

func (a *api) log(format string, args ...any) { a.w.logf("api", format, args...) }

// create makes a pod in some Services.
func (a *api) create(services []int) {
	a.born++
	p := &pod{uid: drain.UID(fmt.Sprintf("pod-%d", a.born)), services: services, born: a.w.at,
		daemon: a.w.seed%3 == 1}
	if len(a.free) > 0 && a.w.chance(500) {
		// The address of a pod that has just stopped.
		p.addr, a.free = a.free[len(a.free)-1], a.free[:len(a.free)-1]
	} else {
		a.next++
		p.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(a.next)}), 80)
	}
	if a.w.barriers && a.w.chance(800) {
		var nodes []*agent
		for _, g := range a.w.agents {
			if g.population == drain.Nodes {
				nodes = append(nodes, g)
			}
		}
		if len(nodes) > 0 {
			p.host = nodes[a.w.rng.IntN(len(nodes))]
			p.hooks = hookKinds[(a.w.seed+uint64(a.born))%uint64(len(hookKinds))]
		}
	}
	if p.keeps = true; a.w.observes() {
		a.label(p)
	}
	a.pods = append(a.pods, p)
	a.log("create %s at %s in %v", p.uid, p.addr, services)
	a.podChanged(p)
	a.w.after(nil, a.w.between(50*time.Millisecond, 2*time.Second), func() {
		if !p.terminating && p.halted == "" {
			a.setReady(p, true)
		}
	})
}

// label draws the mode of a pod, and whether that changes.
func (a *api) label(p *pod) {
	if a.w.chance(600) {
		p.mode = keys.Observe
	}
	if p.keeps = a.w.chance(700); p.keeps {
		return
	}
	a.w.after(nil, a.w.between(time.Second, a.w.active), func() {
		if p.mode == "" {
			p.mode = keys.Observe
		} else {
			p.mode = keys.Enforce
		}
		if !p.gone {
			a.log("the mode of %s is %s", p.uid, p.mode)
			a.podChanged(p)
		}
	})
}

// observed says that the pod's mode is observe, and always was.
func (p *pod) observed() bool { return p.keeps && p.mode == keys.Observe }

// podChanged informs the watchers and the slice controller.
func (a *api) podChanged(p *pod) {
	v := p.view()
	for _, x := range a.watchers {
		if x.pods != nil {
			a.tell(x, func() { x.pods(p, v) })
		}
	}
	for _, s := range p.services {
		if a.dirty[s] {
			continue
		}
		a.dirty[s] = true
		lag := a.w.between(2*time.Millisecond, 200*time.Millisecond)
		if a.w.faulty() && a.w.kinds[slowSlices] && a.w.chance(300) {
			lag = a.w.between(200*time.Millisecond, 3*time.Second)
		}
		a.w.after(nil, lag, func() { a.reslice(s) })
	}
}

func (a *api) reslice(service int) {
	a.dirty[service] = false
	s := slice{version: a.slices[service].version + 1, at: a.w.at}
	for _, p := range a.pods {
		if !p.gone && !p.failed && slices.Contains(p.services, service) {
			s.endpoints = append(s.endpoints, endpoint{p.uid, p.addr, p.ready && !p.terminating, p.terminating, p.host})
		}
	}
	s.shown = s.object(service)
	a.slices[service] = s
	a.history[service] = append(a.history[service], s)
	for _, x := range a.watchers {
		if x.slice != nil {
			a.tell(x, func() { x.slice(service, s) })
		}
	}
}

// tell brings an event to a watcher, in order.
func (a *api) tell(x *watcher, do func()) {
	if !x.p.up {
		return
	}
	at, next := x.line.put(max(a.w.at+a.w.delay(), x.stall), do)
	a.w.arrive(at, a.node.node, x.p, x.p.life, next)
}

// list brings everything to a watcher that starts, as it was at one moment not long ago, then done.
func (a *api) list(x *watcher, done func()) {
	for _, p := range a.pods {
		if v := p.view(); x.pods != nil && !p.gone {
			a.tell(x, func() { x.pods(p, v) })
		}
	}
	known := a.slices
	if a.w.faulty() && a.w.kinds[timeTravel] && a.w.chance(300) {
		known = a.past()
	}
	for service := range a.services {
		if s := known[service]; x.slice != nil {
			a.tell(x, func() { x.slice(service, s) })
		}
	}
	if x.roster != nil {
		e := a.expected()
		a.tell(x, func() { x.roster(e) })
	}
	a.tell(x, done)
	a.catchUp(x, known)
}

// past returns the slices as they were at one moment not long ago: a server of the API may be
// behind.
func (a *api) past() []slice {
	at := time.Duration(0)
	for _, h := range a.history {
		if len(h) > 1 {
			at = max(at, h[len(h)-2].at)
		}
	}
	known := slices.Clone(a.slices)
	for service, h := range a.history {
		for i := len(h) - 1; i >= 0 && known[service].at > at; i-- {
			known[service] = h[i]
		}
	}
	return known
}

// catchUp brings a watcher that knows older slices the present ones. What comes later comes after
// that.
func (a *api) catchUp(x *watcher, known []slice) {
	for service, s := range a.slices {
		if x.slice == nil || s.version == known[service].version {
			continue
		}
		x.stall = max(x.stall, a.w.at+a.w.between(10*time.Millisecond, 3*time.Second))
		a.tell(x, func() { x.slice(service, s) })
	}
}

// rosterChanged tells the coordinators which agents there are.
func (a *api) rosterChanged() {
	e := a.expected()
	for _, x := range a.watchers {
		if x.roster != nil {
			a.tell(x, func() { x.roster(e) })
		}
	}
}

func (a *api) expected() []drain.Expected {
	var all []drain.Expected
	for _, g := range a.w.agents {
		if g.listed && g.right == "" { // others are not expected before they declare
			label := drain.LabelDirected
			if g.kernel != nil {
				label = drain.LabelObserved
			}
			all = append(all, drain.Expected{ID: g.id, Name: "shop/" + g.name, Ready: g.ready, Label: label,
				Node: g.name})
		}
	}
	return all
}

// commit makes a pod terminating. Its application ends at SIGTERM, at once.
func (a *api) commit(p *pod, words []*word) {
	if p.terminating {
		return
	}
	p.terminating, p.committed, p.words = true, a.w.at, words
	p.allowed = cmp.Or(p.allowed, p.grace())
	for _, wd := range words {
		a.log("%s is terminating: %s", p.uid, wd.reason)
	}
	a.podChanged(p)
	switch {
	case p.host != nil && p.halted == "" && p.hooks == hooksCutOff:
		run := p.run
		a.w.after(nil, a.w.between(time.Millisecond, 100*time.Millisecond), func() {
			a.sigterm(p, run, pass{reason: "CutOff"})
		})
	case p.host != nil && p.halted == "" && p.hooks != hooksOfOne: // what does not run has no hooks
		a.hooks(p)
	default:
		a.w.after(nil, a.w.between(time.Millisecond, 30*time.Millisecond), func() { a.stop(p) })
	}
	if !p.failed {
		a.w.after(nil, a.w.between(5*time.Millisecond, 1500*time.Millisecond), func() { a.create(p.services) })
	}
}

// stop ends the process of a pod.
func (a *api) stop(p *pod) {
	p.stopped = true
	a.log("%s has stopped", p.uid)
	a.interrupt(p)
	a.w.after(nil, a.w.between(10*time.Millisecond, time.Second), func() {
		p.gone = true
		a.free = append(a.free, p.addr)
		a.podChanged(p)
	})
}

// interrupt ends what is in flight to a pod.
func (a *api) interrupt(p *pod) {
	for _, g := range a.w.agents {
		g.gw.podStopped(p)
		if g.kernel != nil {
			g.kernel.podStopped(p)
		}
	}
}

func (a *api) readyOf(service int) (n int) {
	for _, p := range a.pods {
		if p.ready && !p.terminating && slices.Contains(p.services, service) {
			n++
		}
	}
	return n
}

// caller is a client that deletes a pod.
type caller struct {
	p      *pod
	evict  bool
	ctrl   bool
	forced bool
	// hasty: it leaves the pod less time than the application and the Idle bound need.
	hasty   bool
	tries   int
	backoff time.Duration
	// denials counts, of each replica, the reviews in a row that one life of it has refused for its
	// drain.
	denials map[*coord]denials
	// seldom: it ignores Retry-After, and comes back after its drain was abandoned. hangUps end the
	// calls that the API server makes for it.
	// excused: the drain was queued, or another caller was there.
	seldom, excused bool
	hangUps         []func()
}

type denials struct{ life, n int }

func (x *caller) operation() admission.Operation {
	if x.evict {
		return admission.Evict
	}
	return admission.Delete
}

// deletion starts a caller on some pod.
func (a *api) deletion() {
	var alive []*pod
	for _, p := range a.pods {
		if p.ready && !p.terminating {
			alive = append(alive, p)
		}
	}
	if len(alive) == 0 {
		return
	}
	c := &caller{p: alive[a.w.rng.IntN(len(alive))], backoff: 5 * time.Millisecond}
	if a.w.chance(150) {
		c.p = slices.MaxFunc(alive, func(x, y *pod) int { return cmp.Compare(x.readyAt, y.readyAt) })
	}
	switch n := a.w.rng.IntN(20); {
	case n < 6:
		c.evict = true
	case n < 12:
		c.ctrl = true
	case n == 12:
		c.forced = true
	case n == 13:
		c.p.target = true
		c.evict = true
		a.podChanged(c.p)
	}
	c.hasty = (a.w.seed+uint64(len(c.p.uid))+uint64(a.born))%6 == 0
	c.denials = map[*coord]denials{}
	c.seldom = a.w.impatient() && !c.evict && !c.forced && a.w.chance(300)
	a.log("a client deletes %s (evict=%t controller=%t forced=%t)", c.p.uid, c.evict, c.ctrl, c.forced)
	if a.w.kinds[stubborn] && a.w.chance(500) {
		c.p.refused = max(c.p.refused, a.w.at+a.w.between(10*time.Second, 80*time.Second))
	}
	c.p.calls++
	a.attempt(c)
}

// reask asks for the deletion of a pod whose drain has just been abandoned.
func (a *api) reask(uid drain.UID) {
	if p := a.find(uid); !p.terminating {
		a.log("a client deletes %s after all", uid)
		p.calls++
		a.attempt(&caller{p: p, backoff: 5 * time.Millisecond, denials: map[*coord]denials{}})
	}
}

func (a *api) attempt(c *caller) {
	if c.p.terminating || c.p.gone {
		c.p.calls--
		return
	}
	a.review(c, a.w.at+drain.RequestLimit, true)
}

// verdict is what came back from the webhooks.
type verdict struct {
	allowed    bool
	words      []*word
	retryAfter time.Duration
	// queued: the drain of waits was queued.
	queued bool
	// waits is the replica whose drain is why it is refused, if that is why.
	waits *coord
}

// review asks both webhooks at once and goes on when both have answered.
func (a *api) review(c *caller, limit time.Duration, first bool) {
	w := a.w
	var ours *verdict
	otherDone, otherDenies := false, false
	finish := func() {
		if ours == nil || !otherDone {
			return
		}
		switch {
		case w.at > limit:
			a.log("504 for %s", c.p.uid)
			a.again(c, 0, true)
		case !ours.allowed:
			a.again(c, ours.retryAfter, false)
		case otherDenies:
			a.log("another webhook denies the deletion of %s", c.p.uid)
			a.again(c, 0, true)
		case first && w.faulty() && w.chance(100):
			// Another client wrote to the pod meanwhile: the API server asks the webhook inside its
			// compare-and-swap loop.
			a.review(c, limit, false)
		case c.p.terminating:
			c.p.calls--
		case c.evict && a.budget && slices.Contains(c.p.services, 0) && c.p.ready && a.readyOf(0) < a.want[0]:
			a.log("the budget forbids the eviction of %s after all", c.p.uid)
			a.again(c, time.Second, false)
		default:
			c.p.calls--
			if c.p.allowed = c.p.grace(); c.hasty && !c.p.terminating {
				c.p.allowed = min(c.p.allowed, hastyGrace)
			}
			a.commit(c.p, ours.words)
		}
	}
	sleep := time.Duration(0)
	if w.faulty() && w.chance(a.other.sleep) {
		sleep = w.between(0, 20*time.Second)
	}
	otherDenies = w.faulty() && w.chance(a.other.deny) || w.at < c.p.refused
	w.after(nil, sleep, func() { otherDone = true; finish() })
	c.hangUps = nil
	a.webhook(c, limit, func(v verdict) { ours = &v; finish() })
	if w.impatient() && w.faulty() && w.chance(150) {
		calls := c.hangUps
		w.after(nil, w.between(0, 2*time.Second), func() {
			if ours == nil {
				a.log("the caller breaks off the deletion of %s", c.p.uid)
				c.p.calls--
				for _, hangUp := range calls {
					hangUp()
				}
			}
		})
	}
}

// webhook calls all replicas at once, each of which is an entry of the webhook configuration, and
// goes on when all have answered or failed. failurePolicy is Ignore: a call that fails counts for
// nothing. One that denies denies, and the first of these is passed on.
func (a *api) webhook(c *caller, limit time.Duration, done func(verdict)) {
	w := a.w
	left, answers := len(w.coords), []verdict{}
	join := func(v verdict, ok bool) {
		if ok {
			answers = append(answers, v)
		}
		if left--; left == 0 {
			c.denied(answers)
			done(a.together(answers))
		}
	}
	for _, r := range w.coords {
		a.call(c, r, min(w.times.Webhook, limit-w.at), join)
	}
}

// together is what several answers come to.
func (a *api) together(answers []verdict) verdict {
	all := verdict{allowed: true}
	for _, v := range answers {
		if !v.allowed {
			return v
		}
		all.words = append(all.words, v.words...)
	}
	if len(answers) == 0 {
		all.words = []*word{{reason: "Unreachable", at: a.w.at}}
	}
	return all
}

// call calls one replica. ok is false if it has not answered.
func (a *api) call(c *caller, r *coord, timeout time.Duration, done func(v verdict, ok bool)) {
	w := a.w
	answered := false
	answer := func(v verdict, ok bool) {
		if !answered {
			answered = true
			done(v, ok)
		}
	}
	if !r.listed || !r.up || timeout <= 0 {
		w.after(nil, time.Millisecond, func() { answer(verdict{}, false) })
		return
	}
	timeout = (timeout + time.Second - 1).Truncate(time.Second)
	x := &call{caller: c, timeout: timeout, sent: w.at, life: r.life}
	x.ctx, x.gone = context.WithCancel(context.Background())
	x.answer = func(v verdict) { w.send(&r.proc, &a.node, nil, 0, func() { answer(v, true) }) }
	x.reset = func() { answer(verdict{}, false) }
	r.inbound = append(r.inbound, x)
	w.send(&a.node, &r.proc, nil, 0, func() { r.admit(x) })
	hangUp := func() {
		if r.up && r.life == x.life {
			w.send(&a.node, &r.proc, nil, 0, func() { r.hangUp(x) })
		}
	}
	c.hangUps = append(c.hangUps, func() {
		if !answered {
			answered = true
			hangUp()
		}
	})
	w.after(nil, min(timeout, w.times.Webhook), func() {
		if !answered {
			answer(verdict{}, false)
			hangUp()
		}
	})
}

// again is what the caller does after a refusal.
func (a *api) again(c *caller, retryAfter time.Duration, hard bool) {
	w := a.w
	stop := func() { c.p.calls--; a.log("the caller gives %s up", c.p.uid) }
	if !w.faulty() {
		stop()
		return
	}
	c.tries++
	switch {
	case c.seldom && !hard:
		w.checkSeldom(c)
		w.after(nil, w.between(50*time.Second, 70*time.Second), func() { a.attempt(c) })
	case retryAfter > 0 && c.tries%11 != 0:
		w.after(nil, retryAfter, func() { a.attempt(c) })
	case c.ctrl:
		c.backoff = min(2*c.backoff, 20*time.Second)
		w.after(nil, c.backoff, func() { a.attempt(c) })
	case hard || !c.evict:
		if !hard {
			w.checkPatience(c)
		}
		stop()
	default:
		w.after(nil, 5*time.Second, func() { a.attempt(c) }) // kubectl drain
	}
}

func target(e endpoint) health.Target {
	return health.Target{UID: e.uid, Addr: e.addr}
}

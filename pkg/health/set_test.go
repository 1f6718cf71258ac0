package health

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// t0 is when every test begins.
var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// target makes one from "10.0.0.1:80@a". Without an address it is 10.0.0.<letter>:80, so that "a"
// is 10.0.0.1:80@a.
func targetOf(text string) Target {
	addr, uid, ok := strings.Cut(text, "@")
	if !ok {
		addr, uid = fmt.Sprintf("10.0.0.%d:80", text[0]-'a'+1), text
	}
	return Target{UID(uid), netip.MustParseAddrPort(addr)}
}

// ready, unready and dying make endpoints of targets, separated by spaces.
func ready(list string) []Endpoint   { return endpoints(list, Endpoint{Routable: true}) }
func unready(list string) []Endpoint { return endpoints(list, Endpoint{}) }
func dying(list string) []Endpoint   { return endpoints(list, Endpoint{Terminating: true}) }

func endpoints(list string, like Endpoint) []Endpoint {
	var all []Endpoint
	for text := range strings.FieldsSeq(list) {
		e := like
		e.Target = targetOf(text)
		all = append(all, e)
	}
	return all
}

// proxy is a gateway in memory: the process that takes new requests, and old ones that finish
// theirs.
type proxy struct {
	generation int
	now        map[Key]*server
	old        []map[Key]*server
	refuse     map[Key]bool
}

type server struct {
	routed bool
	active int
}

func (p *proxy) processes() []map[Key]*server { return append([]map[Key]*server{p.now}, p.old...) }

func (p *proxy) apply(ops []Op) {
	for _, op := range ops {
		if p.refuse[op.Key] {
			continue
		}
		if op.Want == WantRouted {
			if p.now[op.Key] == nil {
				p.now[op.Key] = &server{}
			}
			p.now[op.Key].routed = true
			continue
		}
		for _, process := range p.processes() {
			if s := process[op.Key]; s != nil {
				s.routed = false
				if op.Want == WantAbsent && s.active == 0 {
					delete(process, op.Key)
				}
			}
		}
	}
}

func (p *proxy) read(at time.Time, keys []Key) Observation {
	o := Observation{Generation: fmt.Sprint("g", p.generation), At: at, Seen: map[Key]Seen{}}
	for _, k := range keys {
		seen := Seen{Missing: p.now[k] == nil || !p.now[k].routed}
		for _, process := range p.processes() {
			if s := process[k]; s != nil {
				seen.Present = true
				seen.Routed = seen.Routed || s.routed
				seen.Active += s.active
			}
		}
		o.Seen[k] = seen
	}
	return o
}

// reload starts a new process. It keeps what the old one had if lasting. If a request is open, the
// old process stays.
func (p *proxy) reload(lasting bool) {
	before := p.now
	p.generation++
	p.now = map[Key]*server{}
	busy := false
	for k, s := range before {
		busy = busy || s.active > 0
		if lasting && s.routed {
			p.now[k] = &server{routed: true}
		}
	}
	if busy {
		p.old = append(p.old, before)
	}
}

// routes says whether any process may send a new request to k.
func (p *proxy) routes(k Key) bool {
	return slices.ContainsFunc(
		p.processes(),
		func(process map[Key]*server) bool { return process[k] != nil && process[k].routed },
	)
}

// world is a set, a proxy and a clock.
type world struct {
	testing.TB
	*Set
	proxy *proxy
	now   time.Time
}

func newWorld(t testing.TB) *world {
	return &world{t, New(Options{}), &proxy{generation: 1, now: map[Key]*server{}, refuse: map[Key]bool{}}, t0}
}

func (w *world) pass(d time.Duration) { w.now = w.now.Add(d) }

func (w *world) list(pool Pool, groups ...[]Endpoint) {
	replace(w.Set, w.now, pool, slices.Concat(groups...))
}

// replace makes endpoints the whole of what EndpointSlices say of pool. Of an address that is
// listed twice, routable wins.
func replace(s *Set, now time.Time, pool Pool, endpoints []Endpoint) {
	var first, then []Change
	listed := map[Target]bool{}
	for _, e := range endpoints {
		listed[e.Target] = listed[e.Target] || e.Routable && !e.Terminating
	}
	for _, e := range endpoints {
		if !listed[e.Target] {
			first = append(first, Change{Endpoint: e})
		} else if e.Routable && !e.Terminating {
			then = append(then, Change{Endpoint: e})
		}
	}
	s.mu.Lock()
	for t := range s.pool(pool).targets {
		if _, ok := listed[t]; !ok {
			first = append(first, Change{Endpoint: Endpoint{Target: t}, Unlisted: true})
		}
	}
	s.mu.Unlock()
	s.Change(now, pool, append(first, then...))
}

// outcome counts how a probe of k ended, as if one had been due. It reports whether k is known and
// claimed.
func (w *world) outcome(k Key, o Outcome) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.pools[k.Pool]
	if p == nil || p.targets[k.Target] == nil || !p.targets[k.Target].is(claimed) {
		return false
	}
	w.tell(w.take(w.begin(w.now), p.targets[k.Target], o))
	return true
}

func (w *world) detail(k Key) (Detail, bool) {
	for _, d := range w.Targets() {
		if d.Key == k {
			return d, true
		}
	}
	return Detail{}, false
}

func (w *world) exclude(uid UID, holder string) bool {
	return w.Exclude(w.now, uid, holder, w.now, w.now.Add(time.Minute))
}

// known counts the targets of pool that the set remembers, knownPods the pods.
func (w *world) known(pool Pool) int {
	p := w.Set.pools[pool]
	if p == nil {
		return 0
	}
	return len(p.targets)
}

func (w *world) knownPods() int {
	uids := map[UID]bool{}
	for uid := range w.Set.pods {
		uids[uid] = true
	}
	for _, d := range w.Targets() {
		uids[d.Target.UID] = true
	}
	return len(uids)
}

// step is what the director does at once: apply, and read what is watched and what was applied.
func (w *world) step() {
	ops := w.Pending()
	w.proxy.apply(ops)
	w.read(ops)
}

func (w *world) read(ops []Op) {
	keys := w.Watched()
	for _, op := range ops {
		keys = append(keys, op.Key)
	}
	w.Observe(w.now, w.proxy.read(w.now, keys))
}

// settle steps until nothing is left to do, a gap apart.
func (w *world) settle() {
	w.Helper()
	for range 20 {
		w.step()
		w.pass(IdleGap)
	}
	w.step()
}

// routed checks which targets of pool the proxy's present process sends new requests to.
func (w *world) routed(pool Pool, want string) {
	w.Helper()
	var got []Target
	for k, s := range w.proxy.now {
		if k.Pool == pool && s.routed {
			got = append(got, k.Target)
		}
	}
	byName := func(a, b Target) int { return strings.Compare(a.String(), b.String()) }
	slices.SortFunc(got, byName)
	var wanted []Target
	for text := range strings.FieldsSeq(want) {
		wanted = append(wanted, targetOf(text))
	}
	slices.SortFunc(wanted, byName)
	if !slices.Equal(got, wanted) {
		w.Fatalf("the proxy routes pool %s to %v, want %v", pool, got, wanted)
	}
}

// states checks the exclusions, written as "a:idle b:kept".
func (w *world) states(want string) {
	w.Helper()
	var got []string
	for _, s := range w.Exclusions() {
		got = append(got, fmt.Sprintf("%s:%s", s.UID, s.State))
	}
	if strings.Join(got, " ") != want {
		w.Fatalf("at %s exclusions are %q, want %q", w.now.Sub(t0), strings.Join(got, " "), want)
	}
}

// pending checks the operations, written as they print, separated by a comma.
func (w *world) pending(want string) {
	w.Helper()
	var got []string
	for _, op := range w.Pending() {
		got = append(got, op.String())
	}
	if strings.Join(got, ", ") != want {
		w.Fatalf("pending is %q, want %q", strings.Join(got, ", "), want)
	}
}

// serving is a synced world whose pool web routes to targets.
func serving(t testing.TB, targets string) *world {
	t.Helper()
	w := newWorld(t)
	w.list("web", ready(targets))
	w.Synced()
	w.settle()
	w.routed("web", targets)
	return w
}

func TestEndpointsAreAppliedAsADifference(t *testing.T) {
	w := serving(t, "a b")
	w.pending("")
	w.list("web", ready("a b"))
	w.pending("")
	w.list("web", ready("b c"))
	w.pending("absent web/10.0.0.1:80@a, routed web/10.0.0.3:80@c")
	w.settle()
	w.routed("web", "b c")
	w.list("web", ready("b"), unready("c"))
	w.pending("absent web/10.0.0.3:80@c")
	w.settle()
	w.routed("web", "b")
	// Of an address that two slices list, routable wins.
	w.list("web", ready("b"), unready("c"), ready("c"))
	w.settle()
	w.routed("web", "b c")
}

// A drain does not wait for additions, and a pool is not emptied before its new targets are there:
// all of web's are replaced, one of api's, and other has none yet.
func TestOperationsAreInTheOrderToApplyThem(t *testing.T) {
	w := newWorld(t)
	w.list("web", ready("a b"))
	w.list("api", ready("c d"))
	w.Synced()
	w.settle()
	w.exclude("d", "r")
	w.step() // c is read again
	w.list("web", ready("e"))
	w.list("api", ready("c d f"))
	w.list("other", ready("g"))
	w.pending("removed api/10.0.0.4:80@d, routed other/10.0.0.7:80@g, routed web/10.0.0.5:80@e, " +
		"absent web/10.0.0.1:80@a, absent web/10.0.0.2:80@b, routed api/10.0.0.6:80@f")
	w.proxy.apply(w.Pending()[:3]) // a batch ends in between
	w.read(nil)
	w.pending("absent web/10.0.0.1:80@a, absent web/10.0.0.2:80@b, routed api/10.0.0.6:80@f")
	w.settle()
	w.list("web", ready("h"))
	w.exclude("h", "r")
	w.pending("absent web/10.0.0.5:80@e")
	w.settle()
	w.routed("web", "")
}

func TestNothingIsAskedOfAGatewayThatWasNotRead(t *testing.T) {
	w := newWorld(t)
	w.list("web", ready("a"))
	w.Synced()
	w.pending("")
	w.step()
	w.pending("routed web/10.0.0.1:80@a")
	w.step()
	w.pending("")
}

// The gateway may be dead, or one of its processes hang. What it starts with next, and what the
// other processes do, follows EndpointSlices. No target is taken out that could be the last one.
func TestAGatewayThatCannotBeReadFollowsEndpoints(t *testing.T) {
	w := serving(t, "a b c d")
	w.SetCheck(w.now, "web", everySecond)
	w.exclude("b", "r")
	w.settle()
	w.exclude("c", "r")
	w.Void(w.now)
	w.pending("")
	w.list("web", ready("b c d e"))
	w.pending("routed web/10.0.0.5:80@e, absent web/10.0.0.1:80@a")
	for range 3 {
		w.outcome(Key{"web", targetOf("d")}, Outcome{Kind: TCPFailure})
	}
	w.MarkTerminating(w.now, "c")
	w.Readmit("b", "r")
	ops := "routed web/10.0.0.2:80@b, routed web/10.0.0.5:80@e, absent web/10.0.0.1:80@a, absent web/10.0.0.3:80@c"
	w.pending(ops)
	w.proxy.apply(w.Pending())
	w.Void(w.now)
	w.pending(ops) // again: whether it was carried out is not known
	w.list("web", ready("b d"))
	w.pending("routed web/10.0.0.2:80@b, absent web/10.0.0.1:80@a, absent web/10.0.0.3:80@c, absent web/10.0.0.5:80@e")
	w.proxy.apply(w.Pending())
	w.settle()
	w.routed("web", "b")
	if w.known("web") != 2 {
		t.Errorf("the set knows %d targets, want b and d", w.known("web"))
	}
}

func TestNothingIsTakenOutForWantOfAClaimBeforeSynced(t *testing.T) {
	w := newWorld(t)
	w.proxy.apply([]Op{{Key{"web", targetOf("a")}, WantRouted}, {Key{"web", targetOf("b")}, WantRouted}})
	w.Adopt(w.now, []Key{{"web", targetOf("a")}, {"web", targetOf("b")}})
	w.list("web", ready("b"))
	w.settle()
	w.routed("web", "a b")
	w.list("web", ready("b c"))
	w.settle()
	w.list("web", ready("b"))
	w.settle()
	w.routed("web", "a b c")
	w.Synced()
	w.settle()
	w.routed("web", "b")
}

// An agent that starts while a drain is open receives the exclusion before it has EndpointSlices.
// Without this it empties the gateway of a pod that may be the only one.
func TestExclusionsBeforeSyncedLeaveTheLastTarget(t *testing.T) {
	w := newWorld(t)
	w.proxy.apply([]Op{{Key{"web", targetOf("a")}, WantRouted}})
	w.Adopt(w.now, []Key{{"web", targetOf("a")}})
	w.exclude("a", "r")
	w.settle()
	w.routed("web", "a")
	w.states("a:unknown")
	w.list("web", ready("a"))
	w.Synced()
	w.settle()
	w.routed("web", "a")
	w.states("a:kept")
}

func TestNoExclusionIsDoneBeforeSynced(t *testing.T) {
	w := newWorld(t)
	w.exclude("stranger", "r")
	w.settle()
	w.states("stranger:unknown")
	w.Synced()
	w.settle()
	w.states("stranger:idle")
}

// A namespace that was deleted with its RoleBinding is never listed. The pools of others go on.
func TestAPoolThatIsNeverSynced(t *testing.T) {
	w := newWorld(t)
	for _, k := range []Key{{"web", targetOf("a")}, {"web", targetOf("b")}, {"bank", targetOf("c")},
		{"bank", targetOf("d")}} {
		w.proxy.apply([]Op{{k, WantRouted}})
		w.Adopt(w.now, []Key{k})
	}
	w.list("web", ready("b e"))
	for _, uid := range []UID{"b", "c", "stranger"} {
		w.exclude(uid, "r")
	}
	w.settle()
	w.routed("web", "a e")
	w.states("b:unknown c:unknown stranger:unknown")
	w.Synced("web")
	w.settle()
	w.routed("web", "e")
	w.routed("bank", "c d")
	w.states("b:idle c:unknown stranger:unknown")
	if w.HasSynced() {
		t.Error("all pools count as synced")
	}
	w.list("bank", ready("d"))
	w.Synced("bank")
	w.Synced()
	w.settle()
	w.routed("bank", "d")
	w.states("b:idle c:idle stranger:idle")
}

func TestNoExclusionIsDoneBeforeTheGatewayWasRead(t *testing.T) {
	w := newWorld(t)
	w.Synced()
	w.exclude("stranger", "r")
	w.states("stranger:unknown")
	w.step()
	w.states("stranger:idle")
}

func TestAnExclusionTakesThePodOutEverywhere(t *testing.T) {
	w := newWorld(t)
	for pool, all := range map[Pool]string{"web": "a b [fd00::1]:80@a", "api": "10.0.0.1:81@a 10.0.0.2:81@b"} {
		w.list(pool, ready(all))
	}
	w.Synced()
	w.settle()
	w.exclude("a", "r")
	w.pending("")
	w.read(nil)
	w.pending("removed api/10.0.0.1:81@a, removed web/10.0.0.1:80@a, removed web/[fd00::1]:80@a")
	w.settle()
	w.states("a:idle")
	w.routed("web", "b")
	w.routed("api", "10.0.0.2:81@b")
	// And in a pool that begins to list it later: its state gets worse at once, until that pool was
	// read.
	w.list("new", ready("a b"))
	w.states("a:unknown")
	w.settle()
	w.routed("new", "b")
	w.states("a:idle")
	if got := w.Exclusions()[0].Targets; got != 4 {
		t.Fatalf("it has %d targets, want 4", got)
	}
}

func TestAPodIsAsFarAsItsLeastAdvancedTarget(t *testing.T) {
	w := newWorld(t)
	w.list("web", ready("a b"))
	w.list("api", ready("a b"))
	w.Synced()
	w.settle()
	w.proxy.now[Key{"api", targetOf("a")}].active = 1
	w.exclude("a", "r")
	w.settle()
	w.states("a:removed")
	w.proxy.now[Key{"api", targetOf("a")}].active = 0
	w.settle()
	w.states("a:idle")
}

// A new pod at the address of an old one is another target: nothing known of the one is believed of
// the other.
func TestAnAddressIsUsedAgain(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	w.list("web", ready("b 10.0.0.1:80@new"), dying("a"))
	w.settle()
	w.routed("web", "b 10.0.0.1:80@new")
	w.states("a:idle")
	w.exclude("new", "r")
	w.states("a:idle new:unknown")
	w.settle()
	w.routed("web", "b")
	w.Readmit("new", "r")
	w.settle()
	w.routed("web", "b 10.0.0.1:80@new")
}

// EndpointSlices list another pod, or an endpoint without one, at the address of a pod that is
// drained. Nothing says which of them has the address: while the gateway routes there the drained
// pod may get requests. Without this it is acknowledged, and they are lost.
func TestAnAddressThatIsRoutedForAnotherPod(t *testing.T) {
	for _, other := range []string{"10.0.0.1:80@stale", "10.0.0.1:80@"} {
		for _, pool := range []Pool{"web", "api"} {
			w := serving(t, "a b")
			w.exclude("a", "r")
			w.settle()
			w.states("a:idle")
			w.Change(w.now, pool, []Change{{Endpoint: ready(other)[0]}})
			w.states("a:routing")
			w.settle()
			w.states("a:routing")
			w.Change(w.now, pool, []Change{{Endpoint: ready(other)[0], Unlisted: true}})
			w.states("a:routing")
			w.settle()
			w.states("a:idle")
		}
	}
	// Another port is another program, perhaps of the same node.
	w := serving(t, "a b 10.0.0.1:81@other")
	w.exclude("a", "r")
	w.settle()
	w.states("a:idle")
}

func TestTwoPodsAreListedAtOneAddress(t *testing.T) {
	w := serving(t, "a b")
	// The slice that lists the new pod came before the one that stops listing the old.
	w.list("web", ready("a b 10.0.0.1:80@new"))
	w.settle()
	w.routed("web", "a b 10.0.0.1:80@new")
	w.exclude("a", "r")
	w.settle()
	w.routed("web", "b 10.0.0.1:80@new")
	w.MarkTerminating(w.now, "a")
	w.settle()
	w.routed("web", "b 10.0.0.1:80@new")
	w.list("web", ready("b 10.0.0.1:80@new"))
	w.settle()
	w.routed("web", "b 10.0.0.1:80@new")
}

func TestALaggingSliceDoesNotReviveTheDead(t *testing.T) {
	w := serving(t, "a b")
	w.list("web", ready("b"), dying("a"))
	w.list("web", ready("a b")) // another slice, older
	w.settle()
	w.routed("web", "b")
	w.list("web", ready("b"))
	w.settle()
	w.pass(9 * time.Minute)
	w.Lapse(w.now)
	w.list("web", ready("a b"))
	w.settle()
	w.routed("web", "b")
	// As long as it is listed it is remembered.
	w.pass(time.Hour)
	w.Lapse(w.now)
	w.settle()
	w.routed("web", "b")
}

func TestTheDeadAreForgottenInTheEnd(t *testing.T) {
	w := serving(t, "a b")
	w.list("web", ready("b"), dying("a"))
	w.settle()
	w.pass(9 * time.Minute)
	w.list("web", ready("b"), dying("a")) // it takes its time, and is dead all the while
	w.pass(9 * time.Minute)
	w.Lapse(w.now)
	if w.Set.pods["a"] == nil {
		t.Fatal("the pod is forgotten nine minutes after it was last said to be dead")
	}
	w.list("web", ready("b"))
	w.pass(time.Minute + 1)
	w.Lapse(w.now)
	if w.knownPods() != 1 || w.known("web") != 1 {
		t.Fatalf("the set still knows %d pods and %d targets, want those of b", w.knownPods(), w.known("web"))
	}
}

// A watch can hang for longer than the dead are remembered. As long as it calls the pod ready, at
// whatever address, the pod is dead.
func TestTheDeadAreNotForgottenWhileTheyAreListed(t *testing.T) {
	w := serving(t, "a b")
	w.MarkTerminating(w.now, "a")
	w.settle()
	w.pass(terminatingMemory + time.Minute)
	w.Lapse(w.now)
	w.list("admin", ready("a b"))
	w.settle()
	w.routed("web", "b")
	w.routed("admin", "b")
}

func TestTheOnlyTargetIsKept(t *testing.T) {
	w := serving(t, "a")
	w.exclude("a", "r")
	w.settle()
	w.routed("web", "a")
	w.states("a:kept")
	w.list("web", ready("a b"))
	w.proxy.refuse[Key{"web", targetOf("b")}] = true
	w.settle()
	w.states("a:kept") // b is claimed, but not routed
	clear(w.proxy.refuse)
	w.step()
	w.routed("web", "a b")
	w.pending("removed web/10.0.0.1:80@a")
	w.settle()
	w.routed("web", "b")
	w.states("a:idle")
}

func TestOfTwoBuriedAtOnceOneIsKept(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("b", "r")
	w.exclude("a", "r")
	w.settle()
	w.routed("web", "a") // the one that was excluded last
	w.states("a:kept b:idle")
	w.list("web", ready("a b c"))
	w.settle()
	w.routed("web", "c")
	w.states("a:idle b:idle")
}

func TestADeadPodIsNotKept(t *testing.T) {
	w := serving(t, "a")
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.MarkTerminating(w.now, "a")
	w.settle()
	w.routed("web", "")
	w.states("a:idle")
}

func TestAPodThatIsNotReadyIsNotKept(t *testing.T) {
	w := serving(t, "a")
	w.exclude("a", "r")
	w.list("web", unready("a"))
	w.settle()
	w.routed("web", "")
	w.states("a:idle")
}

// The others were read once, long before. Without this a gateway that was reloaded, or changed by
// hand, a moment before the exclusion is emptied.
func TestThatThereIsAnotherIsReadAgainFirst(t *testing.T) {
	for name, change := range map[string]func(p *proxy){
		"by hand": func(p *proxy) { p.now[Key{"web", targetOf("a")}].routed = false },
		"reload": func(p *proxy) {
			p.reload(true)
			delete(p.now, Key{"web", targetOf("a")})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := serving(t, "a b")
			change(w.proxy)
			w.pass(time.Millisecond)
			w.exclude("b", "r")
			for range 5 {
				w.step()
				if len(w.proxy.now) == 0 ||
					!w.proxy.routes(Key{"web", targetOf("a")}) && !w.proxy.routes(Key{"web", targetOf("b")}) {
					t.Fatal("the pool is empty")
				}
			}
			w.settle()
			w.routed("web", "a")
			w.states("b:idle")
		})
	}
}

// The keys to read are decided on a moment before the reading begins.
func TestAReadingOfTheExcludedAloneDoesNotShowAnother(t *testing.T) {
	w := serving(t, "a b")
	w.pass(time.Millisecond)
	w.exclude("b", "r")
	w.Observe(w.now, w.proxy.read(w.now, []Key{{"web", targetOf("b")}}))
	w.states("b:kept")
	w.pending("")
	w.read(nil)
	w.states("b:routing")
	w.pending("removed web/10.0.0.2:80@b")
}

func TestOfTwoBuriedAtOnceNoneIsTakenOutUnread(t *testing.T) {
	w := serving(t, "a b")
	w.proxy.now[Key{"web", targetOf("b")}].routed = false // by hand
	w.pass(time.Millisecond)
	w.exclude("a", "r")
	w.exclude("b", "r")
	w.settle()
	w.routed("web", "a")
	w.states("a:kept b:idle")
}

// After a reload that an old process outlives, what only that one routes to is no reason to empty
// the new one.
func TestATargetThatTheNewProcessLacksIsNoOther(t *testing.T) {
	w := serving(t, "a b")
	w.proxy.now[Key{"web", targetOf("a")}].active = 1
	w.proxy.reload(true)
	delete(w.proxy.now, Key{"web", targetOf("a")})
	w.proxy.refuse[Key{"web", targetOf("a")}] = true
	w.exclude("b", "r")
	w.settle()
	w.states("b:kept")
	w.routed("web", "b")
	clear(w.proxy.refuse)
	w.settle()
	w.states("b:idle")
	w.routed("web", "a")
}

func TestOfTwoBuriedOneThatEveryProcessHasIsKept(t *testing.T) {
	w := serving(t, "a b")
	w.proxy.now[Key{"web", targetOf("b")}].active = 1
	w.proxy.reload(true)
	delete(w.proxy.now, Key{"web", targetOf("b")})
	w.exclude("a", "r")
	w.exclude("b", "r") // last, but only an old process routes to it
	w.read(nil)
	w.pending("removed web/10.0.0.2:80@b")
}

// Of many exclusions, one begins during each reading. It must not void the reading for those that
// began before it.
func TestNewExclusionsDoNotDelayOlderOnes(t *testing.T) {
	w := serving(t, "a b c d e f g h")
	for _, uid := range strings.Fields("a b c d e f g h") {
		w.exclude(UID(uid), "r")
		w.proxy.apply(w.Pending())
		w.pass(10 * time.Millisecond)
		o := w.proxy.read(w.now, w.Watched())
		w.pass(10 * time.Millisecond)
		w.exclude(UID(rune(uid[0]+1)), "r") // before the reading ends
		w.Observe(w.now, o)
		if s := w.Pending(); uid != "h" && (len(s) != 1 || s[0].Key.Target.UID != UID(uid)) {
			t.Fatalf("after a reading since the exclusion of %s, %v are pending", uid, s)
		}
	}
	w.settle()
	w.routed("web", "h")
}

func TestEachHolderHasItsOwnExpiry(t *testing.T) {
	w := serving(t, "a b")
	if !w.exclude("a", "r1") || w.exclude("a", "r1") || !w.exclude("a", "r2") {
		t.Fatal("Exclude does not report a new holder")
	}
	w.settle()
	if !w.Readmit("a", "r1") || w.Readmit("a", "r1") {
		t.Fatal("Lift does not tell whether there was a lease")
	}
	w.settle()
	w.routed("web", "b")
	w.states("a:idle")
	if got := w.Held("r2"); !slices.Equal(got, []UID{"a"}) {
		t.Fatalf("r2 holds %v", got)
	}
	w.Readmit("a", "r2")
	w.states("")
	w.settle()
	w.routed("web", "a b")
}

func TestSinceIsTheOldest(t *testing.T) {
	w := serving(t, "a b")
	w.Exclude(w.now, "a", "r1", t0.Add(-time.Second), w.now.Add(time.Minute))
	w.Exclude(w.now, "a", "r2", t0.Add(-time.Minute), w.now.Add(time.Minute))
	w.Exclude(w.now, "a", "r1", t0, w.now.Add(time.Minute))
	if got := w.Exclusions()[0].Since; !got.Equal(t0.Add(-time.Minute)) {
		t.Fatalf("since is %s", got)
	}
	w.Readmit("a", "r1")
	w.Readmit("a", "r2")
	w.Exclude(w.now, "a", "r1", t0, w.now.Add(time.Minute))
	if got := w.Exclusions()[0].Since; !got.Equal(t0) {
		t.Fatalf("since of the next exclusion is %s", got)
	}
}

func TestExclusionsExpire(t *testing.T) {
	w := serving(t, "a b c")
	w.exclude("a", "r1")
	w.exclude("a", "r2")
	w.exclude("b", "r1")
	w.exclude("c", "r1")
	w.MarkTerminating(w.now, "c")
	w.settle()
	excluded := w.now
	w.pass(30 * time.Second)
	w.Renew("r2", w.now.Add(time.Minute))
	w.Renew("r2", w.now) // never shortens
	w.now = excluded.Add(-20 * IdleGap).Add(time.Minute)
	if got := w.Lapse(w.now); got != nil {
		t.Fatalf("%v lapsed at the end of their leases, not after it", got)
	}
	w.pass(time.Second)
	if got := w.Lapse(w.now); !slices.Equal(got, []UID{"b"}) {
		t.Fatalf("%v lapsed, want b: a has another holder, and c is dead", got)
	}
	w.settle()
	w.routed("web", "b")
	w.pass(time.Minute)
	if got := w.Lapse(w.now); !slices.Equal(got, []UID{"a"}) {
		t.Fatalf("%v lapsed, want a", got)
	}
	w.settle()
	w.routed("web", "a b")
}

func TestANewGenerationVoidsWhatWasSeen(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	w.states("a:idle")
	w.proxy.reload(false)
	// A reading that was not asked for a says that there is another generation: that is enough.
	w.Observe(w.now, w.proxy.read(w.now, nil))
	w.states("a:unknown")
	w.step()
	w.states("a:removed")
	w.step()
	w.states("a:removed") // and the quiet of the other generation does not count
	w.settle()
	w.states("a:idle")
	w.routed("web", "b")
}

func TestAReloadThatBringsAPodBackTakesTheAcknowledgementBack(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	w.states("a:idle")
	w.proxy.now[Key{"web", targetOf("a")}].routed = true // by hand, in the same generation
	w.read(nil)
	w.states("a:routing")
	w.settle()
	w.states("a:idle")
	w.routed("web", "b")
}

func TestAnUnreadableGatewayProvesNothing(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	was := w.proxy.read(w.now, w.Watched())
	w.pass(time.Second)
	w.Void(w.now)
	w.states("a:unknown")
	w.Observe(w.now, was)
	w.states("a:unknown") // it began before
	w.step()
	w.states("a:idle")
}

func TestIdleNeedsTwoReadings(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.read(nil)
	w.step()
	w.states("a:removed")
	w.pass(IdleGap - 1)
	w.step()
	w.states("a:removed")
	w.proxy.now[Key{"web", targetOf("a")}].active = 1 // a thread had picked it
	w.pass(1)
	w.step()
	w.states("a:removed")
	w.proxy.now[Key{"web", targetOf("a")}].active = 0
	w.pass(time.Second)
	w.step()
	w.states("a:removed") // the quiet begins again
	w.pass(IdleGap)
	w.step()
	w.states("a:idle")
}

func TestAReadingThatBeganBeforeTheExclusionDoesNotCount(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	w.Readmit("a", "r")
	w.pass(time.Second)
	// The reading shows a taken out. It is delivered after the pod was excluded again.
	early := w.proxy.read(w.now, []Key{{"web", targetOf("a")}})
	w.pass(time.Second)
	w.exclude("a", "r")
	w.states("a:unknown")
	w.Observe(w.now, early)
	w.states("a:unknown")
	w.step()
	w.states("a:idle")
}

func TestAReadingOlderThanTheLastChangesNothing(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.proxy.generation = 7
	stale := w.proxy.read(w.now, w.Watched())
	w.proxy.generation = 1
	stale.Seen[Key{"web", targetOf("a")}] = Seen{}
	w.pass(time.Second)
	w.read(nil)
	w.states("a:routing")
	w.Observe(w.now, stale)
	w.states("a:routing")
	w.pending("removed web/10.0.0.1:80@a")
}

// An op may be on its way while its reason goes. Without this, what it brings in stays:
// the set has forgotten the key.
func TestAKeyIsNotForgottenWhileAnOpIsOnItsWay(t *testing.T) {
	for name, gone := range map[string]func(w *world){
		"unlisted":    func(w *world) { w.list("web", ready("b")) },
		"not ready":   func(w *world) { w.list("web", ready("b"), unready("a")) },
		"terminating": func(w *world) { w.list("web", ready("b"), dying("a")) },
	} {
		for name2, read := range map[string]func(w *world, ops []Op){
			"read":       func(w *world, ops []Op) { w.read(ops) },
			"unreadable": func(w *world, _ []Op) { w.Void(w.now) },
			"not asked for": func(w *world, _ []Op) {
				w.Observe(w.now, w.proxy.read(w.now, nil))
			},
		} {
			t.Run(name+", "+name2, func(t *testing.T) {
				w := serving(t, "b")
				w.list("web", ready("a b"))
				w.read(nil) // a is not there yet, says the gateway
				ops := w.Pending()
				gone(w)
				w.proxy.apply(ops)
				read(w, ops)
				w.settle()
				w.routed("web", "b")
				if w.known("web") != 1 {
					t.Fatalf("the set knows %d targets, want 1", w.known("web"))
				}
			})
		}
	}
}

// The gateway did not carry out an operation, so the last readings show a as absent, and the
// operation is repeated. Without this, a counts as idle once EndpointSlices have it as terminating,
// and the gateway routes to it afterwards.
func TestAPodIsNotIdleWhileAnOpIsOnItsWay(t *testing.T) {
	w := serving(t, "b")
	is := func(want State) {
		t.Helper()
		if got, _, _ := w.Of("a"); got != want {
			t.Errorf("at %s a is %s, want %s", w.now.Sub(t0), got, want)
		}
	}
	w.list("web", ready("a b"))
	w.read(w.Pending())
	w.pass(IdleGap)
	w.read(w.Pending())
	ops := w.Pending()
	is(Routing)
	w.list("web", ready("b"), dying("a"))
	is(Unknown)
	w.list("web", ready("b"))
	is(Unknown)
	w.proxy.apply(ops)
	w.read(ops)
	is(Routing)
	w.settle()
	is(Idle)
	w.routed("web", "b")
}

func TestATargetThatWasNeverThereIsForgotten(t *testing.T) {
	w := serving(t, "b")
	w.proxy.refuse[Key{"web", targetOf("a")}] = true
	w.list("web", ready("a b"))
	w.settle()
	w.list("web", ready("b"), unready("a"))
	w.settle()
	w.list("web", ready("b"))
	if w.known("web") != 1 || w.knownPods() != 1 {
		t.Fatalf("the set knows %d targets of %d pods, want b's only", w.known("web"), w.knownPods())
	}
	w.pending("")
}

func TestATargetThatWasBuriedAllTheWhileIsForgotten(t *testing.T) {
	w := serving(t, "b")
	w.exclude("a", "r")
	w.list("web", ready("a b"))
	w.settle()
	w.states("a:idle")
	w.Readmit("a", "r")
	w.list("web", ready("b"))
	if w.known("web") != 1 || w.knownPods() != 1 {
		t.Fatalf("the set knows %d targets of %d pods, want b's only", w.known("web"), w.knownPods())
	}
}

func TestAGatewayThatStillWorksForATargetRemembersIt(t *testing.T) {
	w := serving(t, "a b")
	w.proxy.now[Key{"web", targetOf("a")}].active = 1
	w.list("web", ready("b"))
	w.settle()
	w.routed("web", "b")
	w.pending("absent web/10.0.0.1:80@a")
	w.proxy.now[Key{"web", targetOf("a")}].active = 0
	w.settle()
	w.pending("")
	if len(w.proxy.now) != 1 || w.knownPods() != 1 {
		t.Fatalf("the proxy has %d servers, the set %d pods, want 1 and 1", len(w.proxy.now), w.knownPods())
	}
}

// The hold of a pod has ended at Removed, the pod is terminating, and EndpointSlices have dropped
// it. Then its barrier asks. Without this, a gateway with requests in flight is Idle because it has
// no such target.
func TestAPodThatIsExcludedAgainWhenItIsTerminatingIsBusy(t *testing.T) {
	w := serving(t, "a b")
	busy := w.proxy.now[Key{"web", targetOf("a")}]
	busy.active = 1
	w.exclude("a", "hold")
	w.settle()
	w.states("a:removed")
	w.MarkTerminating(w.now, "a")
	w.Readmit("a", "hold")
	w.list("web", ready("b"))
	w.settle()
	w.exclude("a", "barrier")
	w.settle()
	w.states("a:removed")
	busy.active = 0
	w.settle()
	w.states("a:idle")
}

// Servers that people own cannot be deleted: they are Present only while they are routed or busy.
func TestServersThatOperatorsOwn(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.settle()
	w.list("web", ready("b"), dying("a"))
	k := Key{"web", targetOf("a")}
	for _, seen := range []Seen{{Present: true, Missing: true, Active: 1}, {Missing: true}} {
		w.pass(IdleGap)
		w.Observe(w.now, Observation{Generation: "g1", At: w.now, Seen: map[Key]Seen{k: seen}})
	}
	w.pending("")
	if _, known := w.detail(k); known {
		t.Fatal("the target is not forgotten although nothing of it is left")
	}
}

func TestWatchedIsWhatMayChange(t *testing.T) {
	w := serving(t, "a b")
	if got := w.Watched(); len(got) != 0 {
		t.Fatalf("%v watched without an exclusion", got)
	}
	w.exclude("a", "r")
	w.settle()
	if got := w.Watched(); !slices.Equal(got, []Key{{"web", targetOf("a")}}) {
		t.Fatalf("%v watched, want a", got)
	}
	w.proxy.reload(true)
	w.read(nil)
	if got := w.Watched(); len(got) != 2 {
		t.Fatalf("%v watched after a reload, want both", got)
	}
}

func TestCountsAndUnsettled(t *testing.T) {
	w := serving(t, "a b c")
	w.exclude("a", "r")
	if !w.Unsettled() {
		t.Fatal("a new exclusion is settled")
	}
	w.settle()
	if w.Unsettled() {
		t.Fatal("an idle exclusion is unsettled")
	}
	want := map[Pool]Count{"web": {Claimed: 3, Routed: 2, Excluded: 1}}
	if diff := cmp.Diff(want, w.Counts()); diff != "" {
		t.Fatal(diff)
	}
}

// A pod that is the last one of a pool leaves the others, and the exclusion names the pools that
// keep it.
func TestAPodIsKeptInOnePoolAndLeavesTheOthers(t *testing.T) {
	w := serving(t, "a b")
	w.list("own", ready("a"))
	w.settle()
	w.exclude("a", "r")
	w.settle()
	w.states("a:kept")
	w.routed("web", "b")
	w.routed("own", "a")
	if s := w.Exclusions()[0]; !slices.Equal(s.Kept, []Pool{"own"}) || !s.NoConnections {
		t.Errorf("kept in %v, quiet %t; want in own, and Idle in web", s.Kept, s.NoConnections)
	}
	key := Key{Pool: "web", Target: targetOf("a")}
	w.proxy.now[key] = &server{active: 1} // a request that runs
	w.read(nil)
	if s := w.Exclusions()[0]; s.State != Kept || s.NoConnections {
		t.Errorf("%s, quiet %t; want kept, and a request in web", s.State, s.NoConnections)
	}
	w.list("own", ready("a c"))
	w.settle()
	w.routed("own", "c")
	if s := w.Exclusions()[0]; len(s.Kept) != 0 || s.NoConnections {
		t.Errorf("%s, kept in %v, quiet %t; want neither", s.State, s.Kept, s.NoConnections)
	}
}

func TestStateSinceIsWhenTheStateWasEntered(t *testing.T) {
	w := serving(t, "a b")
	w.exclude("a", "r")
	w.read(nil)
	w.step()
	entered := w.now
	w.pass(IdleGap / 2)
	w.step()
	w.exclude("a", "r") // a renewal
	s := w.Exclusions()[0]
	if s.State != Removed || !s.StateSince.Equal(entered) || s.Generation != "g1" {
		t.Fatalf("%+v, want removed since %s in g1", s, entered)
	}
}

// random drives a set and a proxy by bytes, and checks after each step what must hold whatever
// happens:
//
//   - A pod that is acknowledged (removed or idle) is one that the proxy routes to in no process,
//     if the proxy is still the one that was read. The same holds for pods without an exclusion,
//     which [Set.Of] reports on.
//   - If the proxy is as it was last read, no step leaves a pool without a target that may serve if
//     it had one.
//   - In the end, when the world has gone quiet, the proxy routes to exactly what is claimed by
//     pods without an exclusion. In a pool where that is nothing it may route to one excluded
//     target besides, if that is claimed, alive, and was routed to before.
//   - Nothing is remembered in the end that is neither claimed nor excluded.
func random(t testing.TB, script []byte) {
	w := newWorld(t)
	pools := []Pool{"web", "api"}
	holders := []string{"r1", "r2"}
	uids := []UID{"a", "b", "c", "d", "e", "f"}
	// Two addresses for six pods, so that they are used again.
	at := func(uid UID, n byte) Target {
		return Target{uid, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, uid[0]%2 + 2*(n%2)}), 80)}
	}
	type holding struct {
		uid    UID
		holder string
	}
	claims := map[Pool]map[Target]bool{"web": {}, "api": {}}
	// said is what the set was told last, for the difference.
	said := map[Pool]map[Target]bool{"web": {}, "api": {}}
	var jobs []Job
	check1 := Check{
		Protocol:   TCP,
		Interval:   50 * time.Millisecond,
		Timeout:    50 * time.Millisecond,
		Thresholds: Thresholds{2, 2, 2, 2},
	}
	held, dead := map[holding]bool{}, map[UID]bool{}
	var log []string
	var inFlight []Op
	changed := true // the proxy, since it was read
	serving := func(pool Pool) bool {
		for k, s := range w.proxy.now {
			if k.Pool == pool && s.routed && claims[pool][k.Target] && !dead[k.Target.UID] {
				return true
			}
		}
		return false
	}
	next := func() byte {
		if len(script) == 0 {
			return 0
		}
		b := script[0]
		script = script[1:]
		return b
	}
	excluded := func(uid UID) bool { return dead[uid] || held[holding{uid, "r1"}] || held[holding{uid, "r2"}] }
	list := func(pool Pool) {
		defer func() { said[pool] = maps.Clone(claims[pool]) }()
		if next()%2 == 0 {
			var changes []Change
			for t, ok := range claims[pool] {
				if was, known := said[pool][t]; !known || was != ok {
					changes = append(changes, Change{Endpoint: Endpoint{Target: t, Routable: ok}})
				}
			}
			for t := range said[pool] {
				if _, still := claims[pool][t]; !still {
					changes = append(changes, Change{Endpoint: Endpoint{Target: t, Routable: true}, Unlisted: true})
				}
			}
			w.Change(w.now, pool, changes)
			return
		}
		var all []Endpoint
		for t, ok := range claims[pool] {
			all = append(all, Endpoint{Target: t, Routable: ok})
		}
		w.list(pool, all)
	}
	// gone looks whether the proxy routes to a pod that is reported to be in a state. shares
	// reports whether the pod has the address of another pod's server.
	gone := func(uid UID, state State, generation string, shares func(netip.AddrPort) bool) {
		t.Helper()
		if state < Removed || generation != fmt.Sprint("g", w.proxy.generation) {
			return
		}
		for _, process := range w.proxy.processes() {
			for k, server := range process {
				if server.routed && (k.Target.UID == uid || shares(k.Target.Addr)) {
					t.Fatalf("%s is %s and %s is routed after\n%s", uid, state, k, strings.Join(log, "\n"))
				}
			}
		}
	}
	check := func() {
		t.Helper()
		for _, s := range w.Exclusions() {
			gone(s.UID, s.State, s.Generation, func(at netip.AddrPort) bool {
				return !changed && slices.ContainsFunc(pools, func(p Pool) bool {
					return w.Set.pools[p] != nil && w.Set.pools[p].targets[Target{s.UID, at}] != nil
				})
			})
		}
		for _, uid := range uids {
			state, _, generation := w.Of(uid)
			gone(uid, state, generation, func(netip.AddrPort) bool { return false })
		}
	}
	say := func(format string, args ...any) { log = append(log, fmt.Sprintf(format, args...)) }
	// What an agent before this one left.
	for _, uid := range uids {
		for _, pool := range pools {
			if b := next(); b%3 == 0 {
				k := Key{pool, at(uid, b>>4)}
				w.proxy.now[k] = &server{routed: b>>3&1 == 0}
				say("the proxy has %s, routed %t", k, w.proxy.now[k].routed)
			}
		}
	}
	w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
	if next()%4 > 0 { // otherwise no pod is acknowledged before the end
		w.Synced()
	}
	for len(script) > 0 {
		w.pass(time.Duration(next()%16) * time.Millisecond)
		pool, uid, holder := pools[next()%2], uids[int(next())%len(uids)], holders[next()%2]
		switch next() % 20 {
		case 16:
			c := check1
			switch next() % 4 {
			case 0:
				c.Path = "/other"
			case 1:
				c = Check{}
			}
			say("the check of %s is %+v", pool, c)
			w.SetCheck(w.now, pool, c)
		case 17:
			jobs, _ = w.Due(w.now, jobs, 3)
			say("%d probes", len(jobs))
		case 18:
			if len(jobs) > 0 {
				n := int(next()) % len(jobs)
				o := Outcome{Kind: Success + OutcomeKind(next()%4)}
				say("%s: %s: counts %t", jobs[n].Key, o, w.Report(w.now, jobs[n], o))
				jobs = slices.Delete(jobs, n, n+1)
			}
		case 19:
			switch next() % 4 {
			case 0:
				w.pass(time.Minute + 1)
				for _, uid := range w.Lapse(w.now) {
					delete(held, holding{uid, "r1"})
					delete(held, holding{uid, "r2"})
					say("%s lapsed", uid)
				}
				for h := range held { // of the dead
					if !slices.Contains(w.Held(h.holder), h.uid) {
						delete(held, h)
					}
				}
			default:
				k := Key{pool, at(uid, next())}
				o := Outcome{Kind: Success + OutcomeKind(next()%4)}
				say("a probe of %s: %s: counts %t", k, o, w.outcome(k, o))
			}
		case 0, 1, 2:
			tt := at(uid, next())
			claims[pool][tt] = true
			say("%s lists %s", pool, tt)
			list(pool)
		case 3:
			tt := at(uid, next())
			delete(claims[pool], tt)
			say("%s does not list %s", pool, tt)
			list(pool)
		case 4:
			tt := at(uid, next())
			claims[pool][tt] = false
			say("%s lists %s as not ready", pool, tt)
			list(pool)
		case 5, 6:
			say("%s excludes %s", holder, uid)
			w.exclude(uid, holder)
			held[holding{uid, holder}] = true
		case 7:
			say("%s lifts %s", holder, uid)
			w.Readmit(uid, holder)
			delete(held, holding{uid, holder})
		case 8:
			if next()%4 == 0 {
				say("%s dies", uid)
				w.MarkTerminating(w.now, uid)
				dead[uid] = true
			}
		case 9:
			lasting := next()%2 == 0
			say("reload, lasting %t", lasting)
			changed = true
			w.proxy.reload(lasting)
			// The agent finds out by its next reading, and adopts then.
			w.Adopt(w.now, slices.Collect(maps.Keys(w.proxy.now)))
		case 10:
			say("a request begins in %s", pool)
			for k, s := range w.proxy.now {
				if k.Pool == pool && s.routed {
					s.active++
					break
				}
			}
		case 11:
			say("all requests end")
			for _, process := range w.proxy.processes() {
				for _, s := range process {
					s.active = 0
				}
			}
			w.proxy.old = nil
			w.proxy.generation++
			changed = true
		case 12:
			switch next() % 4 {
			case 0:
				say("unreadable")
				w.Void(w.now)
			case 1:
				say("by hand all targets of %s are taken out but those of %s", pool, uid)
				for k, s := range w.proxy.now {
					if k.Pool == pool {
						s.routed = s.routed && k.Target.UID == uid
					}
				}
				changed = true
			}
		case 13:
			// The ops are decided on, and carried out later.
			inFlight = w.Pending()
			say("ops decided: %v", inFlight)
		default:
			if inFlight == nil {
				inFlight = w.Pending()
			} else {
				changed = true // what was decided may be wrong by now
			}
			say("step %v", inFlight)
			before := map[Pool]bool{"web": !changed && serving("web"), "api": !changed && serving("api")}
			w.proxy.apply(inFlight)
			changed = true
			check() // whatever was just done
			for _, pool := range pools {
				if before[pool] && !serving(pool) {
					t.Fatalf("pool %s was emptied, after\n%s", pool, strings.Join(log, "\n"))
				}
			}
			if next()%8 == 0 {
				w.Void(w.now)
			} else {
				w.read(inFlight)
				changed = false
			}
			inFlight = nil
		}
		verify(t, w.Set, func() string { return strings.Join(log, "\n") })
		if inFlight == nil {
			check()
		}
	}
	// Quiet.
	say("quiet")
	w.proxy.apply(inFlight)
	w.read(inFlight)
	w.Synced()
	for _, process := range w.proxy.processes() {
		for _, s := range process {
			s.active = 0
		}
	}
	w.proxy.old = nil
	w.proxy.generation++
	// All that was in doubt is known to be well.
	for _, pool := range pools {
		w.SetCheck(w.now, pool, check1)
	}
	for range 40 {
		jobs, _ = w.Due(w.now, jobs[:0], 100)
		for _, j := range jobs {
			w.Report(w.now, j, Outcome{Kind: Success})
		}
		w.pass(10 * time.Millisecond)
	}
	wereRouted := map[Key]bool{}
	w.read(nil)
	for k, s := range w.proxy.now {
		wereRouted[k] = s.routed
	}
	w.settle()
	check()
	known := 0
	for _, pool := range pools {
		wanted, spare := map[Key]bool{}, map[Key]bool{}
		for t, claimed := range claims[pool] {
			k := Key{pool, t}
			switch {
			case claimed && !excluded(t.UID):
				wanted[k] = true
			case claimed && !dead[t.UID] && wereRouted[k]:
				spare[k] = true
			}
			if claimed {
				known++
			}
		}
		got := map[Key]bool{}
		for k, s := range w.proxy.now {
			if k.Pool == pool && s.routed {
				got[k] = true
			}
		}
		if len(wanted) == 0 && len(spare) > 0 {
			for k := range spare {
				if got[k] {
					wanted[k] = true
					break
				}
			}
			if len(wanted) == 0 {
				t.Fatalf(
					"pool %s was emptied although it had %v to keep, after\n%s",
					pool,
					spare,
					strings.Join(log, "\n"),
				)
			}
		}
		if diff := cmp.Diff(text(wanted), text(got)); diff != "" {
			t.Fatalf("pool %s routes otherwise (-want +got), after\n%s\n%s", pool, strings.Join(log, "\n"), diff)
		}
	}
	if got := w.known("web") + w.known("api"); got != known {
		t.Fatalf("%d targets are remembered, %d claimed, after\n%s", got, known, strings.Join(log, "\n"))
	}
	for _, uid := range uids {
		if p := w.Set.pods[uid]; p != nil && !excluded(uid) {
			t.Fatalf("pod %s is remembered for nothing, after\n%s", uid, strings.Join(log, "\n"))
		}
	}
	for _, s := range w.Exclusions() {
		shared := slices.ContainsFunc(w.Set.ofPod[s.UID], func(r *record) bool { return w.shared(r, r.pod) })
		if s.State != Idle && s.State != Kept && !shared {
			t.Fatalf("%s is %s in the end, after\n%s", s.UID, s.State, strings.Join(log, "\n"))
		}
	}
}

func text(keys map[Key]bool) []string {
	var all []string
	for k := range keys {
		all = append(all, k.String())
	}
	slices.Sort(all)
	return all
}

func script(seed uint64, length int) []byte {
	b := make([]byte, length)
	for i := range b {
		// splitmix64: the same on every machine, for ever.
		seed += 0x9e3779b97f4a7c15
		z := seed
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
		z = (z ^ (z >> 27)) * 0x94d049bb133111eb
		b[i] = byte((z ^ (z >> 31)) >> 56)
	}
	return b
}

func TestTheLawsHoldWhateverHappens(t *testing.T) {
	for seed := range uint64(100) {
		random(t, script(seed*1_000_003, 900))
	}
}

func FuzzTheLaws(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(script(seed, 200))
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 4000 {
			t.Skip("long enough")
		}
		random(t, script)
	})
}

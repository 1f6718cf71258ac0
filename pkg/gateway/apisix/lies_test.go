package apisix

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/planes"
)

// lab is a fake with two routed targets, of which the first is to be removed.
type lab struct {
	*testing.T
	f          *fake
	g          *Gateway
	gone, left health.Key
	end        []func() // ends the requests of the lie
}

func newLab(t *testing.T) *lab {
	f := newFake(t, 2)
	l := &lab{T: t, f: f, g: f.open("a"), gone: key("gone", 1), left: key("left", 2)}
	l.apply(health.WantRouted, l.gone, l.left)
	return l
}

func key(uid string, n int) health.Key {
	k := health.Key{Pool: "web", Target: health.Target{UID: health.UID(uid)}}
	_ = k.Target.Addr.UnmarshalText(fmt.Appendf(nil, "10.0.0.%d:80", n))
	return k
}

func ops(want health.Want, keys ...health.Key) (all []health.Op) {
	for _, k := range keys {
		all = append(all, health.Op{Key: k, Want: want})
	}
	return all
}

func (l *lab) apply(want health.Want, keys ...health.Key) {
	l.Helper()
	if err := l.g.Apply(l.Context(), ops(want, keys...)); err != nil {
		l.Fatal(err)
	}
}

// claim is what the gateway makes of the removal: "unread", "routed", "removed" or "idle".
func (l *lab) claim(k health.Key) string {
	o, err := l.g.Observe(l.Context(), []health.Key{k})
	is, read := o.Seen[k]
	switch {
	case err != nil || !read:
		return "unread"
	case is.Routed:
		return "routed"
	case is.Active > 0:
		return "removed"
	}
	return "idle"
}

// without makes the gateway read reports as if a guard did not exist.
func (l *lab) without(guard func(l *lab, r *report)) {
	read := l.g.read
	l.g.read = func(ctx context.Context) (*report, error) {
		r, err := read(ctx)
		if err == nil && guard != nil {
			guard(l, r)
		}
		return r, err
	}
}

// The guards, each taken away.
var (
	onlyFresh = func(_ *lab, r *report) { // a process that does not report is passed over
		maps.DeleteFunc(r.Processes, func(_ string, p *process) bool {
			return p.Report == nil || r.Now-p.Report.At > fresh.Seconds()
		})
	}
	onlyNew = func(_ *lab, r *report) { // a process that shuts down is passed over
		maps.DeleteFunc(r.Processes, func(_ string, p *process) bool { return p.old() })
	}
	onlyOne = func(_ *lab, r *report) { // one worker answers for all
		first := slices.Max(slices.Collect(maps.Keys(r.Processes)))
		maps.DeleteFunc(r.Processes, func(pid string, _ *process) bool { return pid != first })
	}
	onlyEtcd = func(l *lab, r *report) { // what is stored is taken for what is routed
		u, err := l.g.upstream(l.Context(), "web")
		if err != nil {
			l.Fatal(err)
		}
		for _, p := range r.Processes {
			if p.Report == nil {
				continue
			}
			now := p.Report.Upstreams["web"]
			now.Version, now.Nodes = u.version, u.nodes
			p.Report.Upstreams["web"] = now
		}
	}
	onlyVersion = func(_ *lab, r *report) { // nodes are not looked at
		for _, p := range r.Processes {
			now := p.Report.Upstreams["web"]
			now.Nodes = map[string]int{}
			p.Report.Upstreams["web"] = now
		}
	}
	noCounts   = func(_ *lab, r *report) { clear(r.Picks) } // by node, as the fake's connections are
	healthList = func(l *lab, r *report) {                  // what the health checker lists is taken for routing
		onlyEtcd(l, r)
		for _, p := range r.Processes {
			now := p.Report.Upstreams["web"]
			now.Nodes = maps.Clone(now.Nodes)
			maps.DeleteFunc(now.Nodes, func(node string, _ int) bool { return !l.f.health[node] })
			p.Report.Upstreams["web"] = now
		}
	}
	noWeightZero = func(_ *lab, r *report) { // a node of weight 0 is taken for absent
		for _, p := range r.Processes {
			maps.DeleteFunc(p.Report.Upstreams["web"].Nodes, func(_ string, weight int) bool { return weight == 0 })
		}
	}
	noUses = func(l *lab, _ *report) { l.g.uses = nil } // other objects are not looked at
)

// begin begins a request in a worker, and leaves it there.
func (l *lab) begin(w *worker) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	_, end := l.f.pick(w, "web")
	l.end = append(l.end, end)
}

func (l *lab) cut() {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.f.cut = true
}

// Each way in which an APISIX says that a target is out while requests can reach it, as it was
// measured. With its guard the gateway does not believe it; without the guard it does.
func TestLies(t *testing.T) {
	const removed, idle = "removed", "idle"
	late := func(_ *worker, _ string, _ view) {} // a write is stored and never loaded
	for name, c := range map[string]struct {
		lie    func(l *lab)
		guard  func(l *lab, r *report)
		honest []string // claims that are true
		fooled string   // the claim without the guard
	}{
		"01 a worker that does not run": {func(l *lab) { l.f.stop(l.f.workers[0]) }, onlyFresh,
			[]string{"unread"}, idle},
		"02 a data plane cut off from etcd": {(*lab).cut, onlyEtcd, []string{"routed"}, idle},
		"03 one worker answers for all": {func(l *lab) {
			behind := l.f.workers[0]
			l.f.apply = func(w *worker, id string, now view) {
				if w != behind {
					w.views[id] = now
				}
			}
		}, onlyOne, []string{"routed"}, idle},
		"04 a retry with the picker of its start": {func(l *lab) { l.begin(l.f.workers[0]) }, noCounts,
			[]string{removed}, idle},
		"05 a slow upload": {func(l *lab) { l.begin(l.f.workers[1]); l.begin(l.f.workers[1]) }, noCounts,
			[]string{removed}, idle},
		"06 half a head over a reload": {func(l *lab) { l.f.workers[0].halves = 1; l.f.reload() }, onlyNew,
			[]string{"routed"}, idle},
		"07 weight 0": {func(l *lab) {
			l.f.apply = func(w *worker, id string, now view) {
				now.nodes[l.gone.Target.Addr.String()] = 0
				w.views[id] = now
			}
		}, noWeightZero, []string{"routed"}, idle},
		"08 a file written twice in a second": {func(l *lab) { l.f.apply = late }, onlyEtcd, []string{"routed"}, idle},
		"09 an equal version with another list": {func(l *lab) {
			l.f.apply = func(w *worker, id string, now view) {
				w.views[id] = view{version: now.version, nodes: w.views[id].nodes}
			}
		}, onlyVersion, []string{"routed"}, idle},
		"10 the health list": {func(l *lab) {
			l.f.health = map[string]bool{l.left.Target.Addr.String(): true}
			l.f.apply = late
		}, healthList, []string{"routed"}, idle},
		"12 discovery that is blind": {func(l *lab) {
			l.f.set("routes/r1", `{"upstream": {"discovery_type": "kubernetes", "service_name": "shop/web:http"}}`)
		}, noUses, []string{"unread"}, idle},
		"14 the end of a request is logged late": {func(l *lab) { l.begin(l.f.workers[0]) }, noCounts,
			[]string{removed}, idle},
		"a route with nodes of its own": {func(l *lab) {
			l.f.set("routes/r1", `{"upstream": {"nodes": [{"host": "10.0.0.1", "port": 80, "weight": 1}]}}`)
		}, noUses, []string{"unread"}, idle},
		"traffic-split with nodes of its own": {func(l *lab) {
			l.f.set("services/s1", `{"plugins": {"traffic-split": {"rules": [{"weighted_upstreams": [
				{"upstream": {"nodes": {"10.0.0.1:80": 1}}}]}]}}}`)
		}, noUses, []string{"unread"}, idle},
		"a stream route": {func(l *lab) { l.f.set("stream_routes/s1", `{"upstream_id": "web"}`) }, noUses,
			[]string{"unread"}, idle},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, guarded := range []bool{true, false} {
				l := newLab(t)
				c.lie(l)
				if !guarded {
					l.without(c.guard)
				}
				_ = l.g.Apply(t.Context(), ops(health.WantRemoved, l.gone)) // it may say that it is not done
				got := l.claim(l.gone)
				if guarded && !slices.Contains(c.honest, got) {
					t.Errorf("the lie is believed: %s, want %s", got, c.honest)
				}
				if !guarded && got != c.fooled {
					t.Errorf("without the guard the claim is %s, want %s: the lie shows nothing", got, c.fooled)
				}
				for _, end := range l.end {
					end()
				}
			}
		})
	}
}

// A checker's record passes to the next pod at an address, and a worker passes over that pod
// although it is routed. So an upstream with checks is not covered. Nor is one with ewma, which
// ignores weights.
func TestLie11AndOtherUpstreamsThatAreNotCovered(t *testing.T) {
	for name, field := range map[string]string{"11 checks": `"checks": {"active": {}}`, "ewma": `"type": "ewma"`,
		"service_name": `"service_name": "a/b:c"`} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.f.set("upstreams/web", `{"nodes": {"10.0.0.1:80": 1, "10.0.0.2:80": 1}, `+field+`, "labels": {
				"lameduck": "agent", "10.0.0.1:80@gone": "routed", "10.0.0.2:80@left": "routed"}}`)
			if got := l.claim(l.left); got != "routed" {
				t.Errorf("a target that is routed is %s", got)
			}
			err := l.g.Apply(t.Context(), ops(health.WantRemoved, l.gone))
			if err == nil || !strings.Contains(err.Error(), "not covered") || l.claim(l.gone) != "unread" {
				t.Errorf("%v, and it is %s", err, l.claim(l.gone))
			}
			u, err := l.g.upstream(t.Context(), "web")
			if err != nil {
				t.Fatal(err)
			}
			u.refused = nil // the guard
			r, err := l.g.report(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if is, err := l.g.see(l.gone, u, r); err != nil || is.Routed {
				t.Errorf("without the guard: %+v, %v", is, err)
			}
		})
	}
}

// Connections to a target that is out stay open for a minute. They are not requests.
func TestLie13KeptConnections(t *testing.T) {
	l := newLab(t)
	l.f.mu.Lock()
	_, end := l.f.pick(l.f.workers[0], "web")
	l.f.mu.Unlock()
	end() // the connection stays, and would count
	l.apply(health.WantRemoved, l.gone)
	if got := l.claim(l.gone); got != "idle" {
		t.Errorf("it is %s", got)
	}
	l.without(func(_ *lab, r *report) { r.Picks["101 web 1"] = 1 })
	if got := l.claim(l.gone); got != "removed" {
		t.Errorf("by connections it is %s: the lie shows nothing", got)
	}
}

// A request that was counted ends: Removed becomes Idle.
func TestIdleOnceOlderGenerationsHaveEnded(t *testing.T) {
	l := newLab(t)
	l.begin(l.f.workers[0])
	l.apply(health.WantRemoved, l.gone)
	l.begin(l.f.workers[0]) // a later one is no reason to wait
	if got := l.claim(l.gone); got != "removed" {
		t.Fatalf("it is %s", got)
	}
	l.end[0]()
	if got := l.claim(l.gone); got != "idle" {
		t.Errorf("it is %s", got)
	}
	l.apply(health.WantAbsent, l.gone)
	if o, err := l.g.Owned(t.Context()); err != nil || len(o) != 1 {
		t.Errorf("owned: %v, %v", o, err)
	}
	l.end[1]()
}

// Two agents write one upstream. The one that was not told of the exclusion yet does not undo it.
func TestTheOtherAgentDoesNotPutBack(t *testing.T) {
	l := newLab(t)
	l.apply(health.WantRemoved, l.gone)
	other := l.f.open("b")
	err := other.Apply(t.Context(), ops(health.WantRouted, l.gone))
	if err == nil || !strings.Contains(err.Error(), "a has removed it") {
		t.Errorf("another agent puts it back: %v", err)
	}
	if got := l.claim(l.gone); got != "idle" {
		t.Errorf("it is %s", got)
	}
	l.apply(health.WantRouted, l.gone) // readmitted
	if got := l.claim(l.gone); got != "routed" {
		t.Errorf("it is %s", got)
	}
	// A veto ends: an agent that is not there any more keeps nothing out.
	l.f.set("upstreams/web", fmt.Sprintf(`{"nodes": {"10.0.0.2:80": 1}, "labels": {"lameduck": "agent",
		"10.0.0.1:80@gone": "removed/%d/a", "10.0.0.2:80@left": "routed"}}`, time.Now().UnixMilli()))
	if err := other.Apply(t.Context(), ops(health.WantRouted, l.gone)); err != nil {
		t.Error(err)
	}
}

// A write that was not answered in time may be carried out after those that follow it. The error
// names all that it changes.
func TestAWriteWithoutAnAnswerMayComeLate(t *testing.T) {
	added := key("new", 3)
	for name, c := range map[string]struct {
		before func(l *lab)
		ops    []health.Op
		late   string
	}{
		"an addition": {func(*lab) {}, ops(health.WantRouted, added, key("left", 2)), "[routed web/10.0.0.3:80@new]"},
		"a removal":   {func(*lab) {}, ops(health.WantRemoved, key("gone", 1)), "[removed web/10.0.0.1:80@gone]"},
		"an addition that repairs a node": {func(l *lab) {
			l.f.set("upstreams/web", `{"nodes": {"10.0.0.2:80": 1}, "labels": {"lameduck": "agent",
				"10.0.0.1:80@gone": "routed", "10.0.0.2:80@left": "routed"}}`)
		}, ops(health.WantRouted, added), "[routed web/10.0.0.1:80@gone routed web/10.0.0.3:80@new]"},
		"a removal that is undone, because another agent has removed the other target": {func(l *lab) {
			l.f.meanwhile = map[string]any{"nodes": map[string]any{"10.0.0.2:80": nil, nowhere: 1},
				"labels": map[string]any{"10.0.0.2:80@left": fmt.Sprintf("removed/%d/b",
					time.Now().Add(time.Minute).UnixMilli())}}
			second := l.f.hold
			l.f.hold = func() {
				l.f.mu.Lock()
				defer l.f.mu.Unlock()
				l.f.hold = second
			}
		}, ops(health.WantRemoved, key("gone", 1)), "[routed web/10.0.0.1:80@gone]"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			ctx, cancel := context.WithCancel(t.Context())
			release := make(chan struct{})
			defer close(release)
			l.f.hold = func() { cancel(); <-release }
			c.before(l)
			var late *gateway.Unanswered
			if err := l.g.Apply(ctx, c.ops); !errors.As(err, &late) || late.For != lateFor {
				t.Fatalf("the error does not say that a write was not answered: %v", err)
			}
			slices.SortFunc(late.Ops, func(a, b health.Op) int { return strings.Compare(a.String(), b.String()) })
			if got := fmt.Sprint(late.Ops); got != c.late {
				t.Errorf("late are %s, want %s", got, c.late)
			}
		})
	}
}

func TestAWriteThatWasRefusedDoesNotComeLate(t *testing.T) {
	l := newLab(t)
	var late *gateway.Unanswered
	l.f.conflicts = 5
	if err := l.g.store(t.Context(), "PATCH", "web", map[string]any{}, nil); err == nil || errors.As(err, &late) {
		t.Errorf("a conflict: %v", err)
	}
	l.f.server.Close()
	if err := l.g.store(t.Context(), "PATCH", "web", map[string]any{}, nil); err == nil || errors.As(err, &late) {
		t.Errorf("a closed port: %v", err)
	}
}

// An object that is created late loses what was written since. That is noticed.
func TestACreationWithoutAnAnswerMayComeLate(t *testing.T) {
	l := newLab(t)
	delete(l.f.objects, "upstreams/web")
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	l.f.hold = func() { cancel(); <-release }
	if err := l.g.Apply(ctx, ops(health.WantRouted, l.left)); err == nil {
		t.Error("the creation was answered")
	}
	l.apply(health.WantRouted, l.left)
	generation := func() string {
		o, err := l.g.Observe(t.Context(), []health.Key{l.left})
		if err != nil {
			t.Fatal(err)
		}
		return o.Generation
	}
	before := generation()
	if again := generation(); again != before {
		t.Errorf("the generation is %s, and then %s", before, again)
	}
	close(release)
	planes.Until(t, "what was written is lost", func() bool {
		u, err := l.g.upstream(t.Context(), "web")
		return err == nil && u.nodes[nowhere] == 1
	})
	after := generation()
	if after == before {
		t.Errorf("what was written since is lost, and the generation is still %s", after)
	}
	l.g.creating["web"] = time.Now()
	if later := generation(); later == after || len(l.g.creating) > 0 {
		t.Errorf("a minute later the generation is %s", later)
	}
}

func TestTheLastTargetLeavesANodeThatRefuses(t *testing.T) {
	l := newLab(t)
	l.apply(health.WantRemoved, l.gone, l.left)
	nodes := func() string {
		u, err := l.g.upstream(t.Context(), "web")
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(u.nodes)
	}
	if got := nodes(); got != "map["+nowhere+":1]" {
		t.Errorf("nodes are %s", got)
	}
	l.apply(health.WantRouted, l.left)
	if got := nodes(); got != "map[10.0.0.2:80:1]" {
		t.Errorf("nodes are %s", got)
	}
}

// Agent a takes out one target for its health, b the other, and each believes that what it has
// not read lately is still routed. However their writes come, one target stays.
func TestTwoAgentsDoNotEmptyAnUpstream(t *testing.T) {
	later := time.Now().Add(time.Minute).UnixMilli()
	for name, write := range map[string]func(l *lab){
		"one after the other": func(l *lab) {
			if err := l.f.open("b").Apply(t.Context(), ops(health.WantRemoved, l.left)); err != nil {
				t.Fatal(err)
			}
		},
		"at once": func(l *lab) {
			l.f.meanwhile = map[string]any{"nodes": map[string]any{"10.0.0.2:80": nil},
				"labels": map[string]any{"10.0.0.2:80@left": fmt.Sprintf("removed/%d/b", later)}}
		},
		"answers were lost": func(l *lab) {
			l.f.set("upstreams/web", fmt.Sprintf(`{"nodes": [], "labels": {"lameduck": "agent",
				"10.0.0.1:80@gone": "removed/%d/a", "10.0.0.2:80@left": "removed/%[1]d/b"}}`, later))
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			write(l)
			err := l.g.Apply(t.Context(), ops(health.WantRemoved, l.gone))
			if err == nil || !strings.Contains(err.Error(), "the last one: b has removed the others") {
				t.Errorf("the last target is removed: %v", err)
			}
			u, err := l.g.upstream(t.Context(), "web")
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(u.nodes); got != "map[10.0.0.1:80:1]" || l.claim(l.gone) != "routed" {
				t.Errorf("nodes are %s, and the last target is %s", got, l.claim(l.gone))
			}
			l.apply(health.WantAbsent, l.gone) // its pod terminates
			if got := l.claim(l.gone); got != "idle" {
				t.Errorf("a target that is to be absent is %s", got)
			}
		})
	}
}

func TestAConflictIsTriedAgainAndAnotherRefusalIsNot(t *testing.T) {
	l := newLab(t)
	l.f.conflicts, l.f.patches = 5, 0
	l.apply(health.WantRemoved, l.gone)
	if l.f.patches != 6 {
		t.Errorf("%d patches, want 6", l.f.patches)
	}
	l.f.set("upstreams/web", `{"nodes": [{"host": "10.0.0.2", "port": 80, "weight": 1}],
		"labels": {"lameduck": "agent"}}`)
	if err := l.g.Apply(t.Context(), ops(health.WantRouted, l.gone)); err == nil || l.f.patches != 6 {
		t.Errorf("a list of nodes: %v after %d patches", err, l.f.patches)
	}
}

// What Stopped says while a worker lives on without a port, and without the processes in sight.
func TestStoppedOnlyIfEveryProcessHasEnded(t *testing.T) {
	l := newLab(t)
	blind := l.f.open("b")
	blind.proc = t.TempDir()
	for _, g := range []*Gateway{l.g, blind} {
		if _, err := g.Observe(t.Context(), []health.Key{l.left}); err != nil {
			t.Fatal(err)
		}
	}
	l.f.server.Close()
	if l.g.Stopped(t.Context()) {
		t.Error("stopped while processes live")
	}
	l.f.kill()
	if !l.g.Stopped(t.Context()) || blind.Stopped(t.Context()) {
		t.Errorf("stopped %t, blind %t", l.g.Stopped(t.Context()), blind.Stopped(t.Context()))
	}
}

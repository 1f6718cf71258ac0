package exclusion

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/agent/journal"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// kept opens a journal in dir and runs it until the test ends, or stop is called.
func kept(t *testing.T, dir string) (j *journal.Journal, stop func()) {
	t.Helper()
	j, err := journal.Open(t.Context(), dir, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = j.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-ended
		j.Close()
	}
	return j, stop
}

// checked is a gateway in which a pod is taken out only if the file names it at that moment.
type checked struct {
	*testing.T
	file    string
	applied int
}

func (c *checked) Apply(_ context.Context, ops []health.Op) error {
	for _, op := range ops {
		data, err := os.ReadFile(c.file)
		if on := err == nil && strings.Contains(string(data),
			string(op.Key.Target.UID)); op.Want == health.WantRemoved && !on {
			c.Errorf("%s is asked for before the exclusion is on disk", op)
		}
		c.applied++
	}
	return nil
}

func (c *checked) Observe(context.Context, []health.Key) (health.Observation, error) {
	return health.Observation{}, nil
}

func (c *checked) Owned(context.Context) ([]health.Key, error) { return nil, nil }

func (c *checked) Stopped(context.Context) bool { return false }

func TestNothingIsTakenOutBeforeItIsOnDisk(t *testing.T) {
	dir := t.TempDir()
	j, stop := kept(t, dir)
	defer stop()
	set := health.New(health.Options{})
	exclusions := New(time.Now(), set, j, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	c := &checked{T: t, file: filepath.Join(dir, "exclusions.json")}
	g := WriteAhead{c, j}
	for i := range 100 {
		uid := "uid-" + strings.Repeat("x", i+1) + "-"
		now := time.Now()
		exclusions.Exclude(time.Now(), drain.Pod{Namespace: "shop", Name: "web", UID: drain.UID(uid)}, "a/1", now,
			now.Add(time.Minute))
		key := health.Key{Pool: "web", Target: health.Target{UID: health.UID(uid),
			Addr: netip.MustParseAddrPort("10.0.0.1:80")}}
		if err := g.Apply(t.Context(), []health.Op{{Key: key, Want: health.WantRemoved}}); err != nil {
			t.Fatal(err)
		}
	}
	if c.applied != 100 {
		t.Errorf("%d of 100 were applied", c.applied)
	}
}

// A pod of which the gateway has no server is idle at once. That must not be reported before the
// exclusion is on disk.
func TestNothingIsReportedBeforeItIsOnDisk(t *testing.T) {
	dir := t.TempDir()
	var wrote func()
	// It does not run yet, and writes nothing.
	j, err := journal.Open(t.Context(), dir, func(error) { wrote() }, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	set := health.New(health.Options{})
	exclusions := New(time.Now(), set, j, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	now := time.Now()
	set.Synced()
	exclusions.Exclude(time.Now(), drain.Pod{UID: "a"}, "a/1", now, now.Add(time.Minute))
	set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now()})
	if got := exclusions.Reports(time.Now()); got[0].State != drain.StateUnknown {
		t.Errorf("before it is on disk the report is %+v", got[0])
	}
	exclusions.Changed(time.Now())
	wrote = func() {
		if !exclusions.Changed(time.Now()) {
			t.Error("that it is on disk is no news")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := j.Run(ctx); err != nil { // writes once
		t.Fatal(err)
	}
	if got := exclusions.Reports(time.Now()); got[0].State != drain.Idle {
		t.Errorf("once it is on disk the report is %+v", got[0])
	}
	j.Close()

	// The next life has it, whatever it is told, until the holder readmits it; and knows who is
	// dead.
	again, stop := kept(t, dir)
	later := New(time.Now(), health.New(health.Options{}), again, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	if got := later.Held("a/1"); len(got) != 1 || got[0] != "a" {
		t.Errorf("restored are %v", got)
	}
	if got := later.set.Exclusions(); len(got) != 1 || !got[0].Since.Equal(now.Round(0)) {
		t.Errorf("restored are %+v, want since %s", got, now)
	}
	later.Readmit(time.Now(), "a", "a/1", true)
	stop()
	last, stop := kept(t, dir)
	defer stop()
	third := New(time.Now(), health.New(health.Options{}), last, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	third.set.Change(time.Now(), "web", []health.Change{{Endpoint: health.Endpoint{Target: health.Target{UID: "a",
		Addr: netip.MustParseAddrPort("10.0.0.1:80")}, Routable: true}}})
	third.set.Synced()
	if got := third.set.Targets(); len(got) != 1 || got[0].Why != health.WhyTerminating {
		t.Errorf("a dead pod that a late EndpointSlice calls ready is %+v", got)
	}
}

// The answer to a declaration lays an exclusion and is no message of the stream. Where the set
// ended the expiries of the others before the journal does, they would end without anybody asking
// whether EndpointSlices are fresh.
func TestAnExclusionExpiresInTheSetWhenItDoesInTheJournal(t *testing.T) {
	j, stop := kept(t, "")
	defer stop()
	set := health.New(health.Options{})
	exclusions := New(time.Now(), set, j, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	began := time.Now()
	exclusions.Exclude(time.Now(), drain.Pod{UID: "a"}, "r/1", began, began.Add(60*time.Second))
	exclusions.Exclude(time.Now(), drain.Pod{UID: "b"}, "r/1", began, began.Add(62*time.Second))
	lapses := &Lapses{Exclusions: exclusions, Rand: func(time.Duration) time.Duration { return 0 }}
	for range 2 {
		if lapses.Due(began.Add(61 * time.Second)) {
			t.Error("the API server is asked too early")
		}
	}
	if held := set.Held("r/1"); len(held) != 2 {
		t.Errorf("held is %v, before the API server was asked whether EndpointSlices are fresh", held)
	}
	now := began.Add(63 * time.Second)
	if lapses.Due(now) || !lapses.Due(now) {
		t.Error("the API server is not asked when the pause is over")
	}
	if lapses.Answered(now, now, errors.New("away")); len(set.Held("r/1")) != 2 || lapses.Due(now) {
		t.Errorf("held is %v, due %t after an error", set.Held("r/1"), lapses.Due(now))
	}
	if lapses.Answered(now, now, nil); len(set.Held("r/1")) != 0 {
		t.Errorf("held is %v, want none", set.Held("r/1"))
	}
}

// A gateway that reads EndpointSlices itself may send to a pod that this agent's watch has not
// shown yet: no target is then no proof.
func TestAPodThatTheAgentHasNotHeardOf(t *testing.T) {
	for _, follows := range []bool{false, true} {
		t.Run(fmt.Sprintf("follows=%t", follows), func(t *testing.T) {
			j, stop := kept(t, "")
			defer stop()
			set := health.New(health.Options{})
			set.Synced()
			set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now()})
			woken := 0
			exclusions := New(time.Now(), set, j, nil, func() { woken++ }, nil, slog.New(slog.DiscardHandler))
			if follows {
				exclusions.Follow()
			}
			lapses := &Lapses{Exclusions: exclusions, Rand: func(time.Duration) time.Duration { return 0 }}
			now := time.Now()
			exclusions.Exclude(now, drain.Pod{UID: "a"}, "r/1", now, now.Add(time.Minute))
			state := func() drain.State {
				t.Helper()
				if err := j.Sync(); err != nil {
					t.Fatal(err)
				}
				exclusions.Changed(time.Now())
				return exclusions.Reports(time.Now())[0].State
			}
			if due := lapses.Due(now.Add(time.Second)); due != follows {
				t.Errorf("EndpointSlices are read: %t", due)
			}
			if !follows {
				if got := state(); got != drain.Idle {
					t.Errorf("%s, want idle", got)
				}
				return
			}
			if got := state(); got != drain.StateUnknown {
				t.Errorf("%s before EndpointSlices are known", got)
			}
			lapses.Answered(now.Add(time.Second), now.Add(time.Second), errors.New("away"))
			if lapses.Due(now.Add(time.Second)) || state() != drain.StateUnknown {
				t.Error("a list that failed proves something, or is repeated at once")
			}
			woken = 0
			lapses.Answered(now.Add(5*time.Second), now.Add(5*time.Second), nil)
			if got := state(); got != drain.Idle || woken == 0 || lapses.Due(now.Add(6*time.Second)) {
				t.Errorf("%s, woken %d times, once EndpointSlices are known", got, woken)
			}
		})
	}
}

// Without this, a pod that is routed again after a reload counts twice, and one that was never
// routed counts as quick.
func TestPropagationIsWrittenDownOnce(t *testing.T) {
	registry := prometheus.NewRegistry()
	exclusions := &Exclusions{propagation: metrics.NewPropagation(registry, "fake", "")}
	since := time.Now()
	s := health.Exclusion{UID: "a", Since: since, StateSince: since.Add(40 * time.Millisecond), Targets: 1}
	exclusions.measure(s, health.Unknown, health.Routing)
	exclusions.measure(s, health.Routing, health.Removed)
	exclusions.measure(s, health.Removed, health.Routing)
	exclusions.measure(s, health.Removed, health.Removed)
	exclusions.measure(s, health.Removed, health.Idle)
	s.Targets = 0
	exclusions.measure(s, health.Unknown, health.Idle)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range families[0].GetMetric() {
		if h := m.GetHistogram(); h.GetSampleCount() != 1 || h.GetSampleSum() < 0.039 || h.GetSampleSum() > 0.041 {
			t.Errorf("%s: %d times, %v s in all", m.GetLabel(), h.GetSampleCount(), h.GetSampleSum())
		}
	}
}

// Without this, the coordinator cannot tell a Service whose only target is the pod from one that
// has another target.
func TestReportsNameTheServicesThatKeepAPod(t *testing.T) {
	j, stop := kept(t, "")
	defer stop()
	set := health.New(health.Options{})
	own := endpoints.Port{Service: types.NamespacedName{Namespace: "shop", Name: "own"}}
	exclusions := New(time.Now(), set, j, map[health.Pool]endpoints.Port{"own": own, "own-tls": own,
		"web": {Service: types.NamespacedName{Namespace: "shop", Name: "web"}}}, func() {}, nil,
		slog.New(slog.DiscardHandler))
	now := time.Now()
	target := func(uid health.UID, addr string) health.Target {
		return health.Target{UID: uid, Addr: netip.MustParseAddrPort(addr)}
	}
	a, b := target("a", "10.0.0.1:80"), target("b", "10.0.0.2:80")
	seen := map[health.Key]health.Seen{}
	for pool, targets := range map[health.Pool][]health.Target{"own": {a}, "own-tls": {a}, "web": {a, b}} {
		var all []health.Change
		for _, t := range targets {
			all = append(all, health.Change{Endpoint: health.Endpoint{Target: t, Routable: true}})
			seen[health.Key{Pool: pool, Target: t}] = health.Seen{Present: true, Routed: true}
		}
		set.Change(now, pool, all)
	}
	set.Synced()
	set.Observe(now, health.Observation{Generation: "g", At: now, Seen: seen})
	exclusions.Exclude(time.Now(), drain.Pod{Namespace: "shop", Name: "a", UID: "a"}, "r/1", now, now.Add(time.Minute))
	seen[health.Key{Pool: "web", Target: a}] = health.Seen{Present: true, Active: 1}
	later := time.Now()
	set.Observe(later, health.Observation{Generation: "g", At: later, Seen: seen})
	if got := exclusions.Reports(time.Now()); len(got) != 1 || got[0].State != drain.Kept ||
		got[0].Kept != "shop/own" ||
		got[0].NoConnections {
		t.Fatalf("reports %+v, want one that is kept in shop/own, and not quiet", got)
	}
	exclusions.Changed(time.Now())
	seen[health.Key{Pool: "web", Target: a}] = health.Seen{Present: true}
	for range 2 {
		later = later.Add(health.IdleGap)
		set.Observe(later, health.Observation{Generation: "g", At: later, Seen: seen})
	}
	if !exclusions.Changed(time.Now()) || !exclusions.Reports(time.Now())[0].NoConnections {
		t.Errorf("reports %+v, want it quiet, and that to be news", exclusions.Reports(time.Now()))
	}
}

// The gateway and the journal call changed at the same time. A call that reads a state and records
// it after a newer one would leave the old one recorded. A change back to the old state would then
// not be reported: coordinators would not learn that the pod is routed again.
func TestTheLastStateWrittenDownIsTheLast(t *testing.T) {
	t.Parallel()
	j, stop := kept(t, "")
	defer stop()
	set := health.New(health.Options{})
	exclusions := New(time.Now(), set, j, nil, func() {}, nil, slog.New(slog.DiscardHandler))
	now := time.Now()
	var all []health.Change
	seen := map[health.Key]health.Seen{}
	for i := range 50 { // so that it takes a while to read and to write them
		target := health.Target{UID: health.UID(fmt.Sprint("uid-", i)),
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)}
		all = append(all, health.Change{Endpoint: health.Endpoint{Target: target, Routable: true}})
		seen[health.Key{Pool: "web", Target: target}] = health.Seen{}
	}
	set.Change(now, "web", all)
	set.Synced()
	for key := range seen {
		exclusions.Exclude(time.Now(), drain.Pod{UID: key.Target.UID}, "a/1", now, now.Add(time.Minute))
	}
	var generation atomic.Int64
	states := map[health.State]bool{}
	for round := range 10_000 { // the wrong order shows seldom
		var all sync.WaitGroup
		for caller := range 4 {
			all.Go(func() {
				// In a new generation nothing is known but what is read there.
				o := health.Observation{Generation: fmt.Sprint(generation.Add(1)), At: time.Now()}
				if caller%2 == 0 {
					o.Seen = seen
				}
				set.Observe(o.At, o)
				exclusions.Changed(time.Now())
			})
		}
		all.Wait()
		for _, s := range set.Exclusions() {
			states[s.State] = true
			if was := exclusions.known[s.UID]; was != s.State {
				t.Fatalf("round %d: %s is %s, and %s was written down last", round, s.UID, s.State, was)
			}
		}
	}
	if len(states) < 2 {
		t.Errorf("states are %v: nothing changes here", states)
	}
}

func TestExclusionsBetweenTheWireAndTheSet(t *testing.T) {
	set, woken := health.New(health.Options{}), 0
	kept, err := journal.Open(t.Context(), "", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	exclusions := New(time.Now(), set, kept, nil, func() { woken++ }, nil, slog.New(slog.DiscardHandler))
	now := time.Now()
	set.Synced()
	set.Change(now, "web", []health.Change{{Endpoint: health.Endpoint{Target: health.Target{UID: "a",
		Addr: netip.MustParseAddrPort("10.0.0.1:80")}, Routable: true}}})
	pod := func(uid string) drain.Pod {
		return drain.Pod{Namespace: "shop", Name: "web-" + uid, UID: drain.UID(uid)}
	}

	exclusions.Exclude(time.Now(), pod(""), "r", now, now.Add(time.Hour))
	exclusions.Readmit(time.Now(), "", "r", true)
	if woken != 0 || len(exclusions.Reports(time.Now())) != 0 {
		t.Fatal("a pod without UID has an exclusion")
	}
	exclusions.Exclude(time.Now(), pod("a"), "r", now, now.Add(time.Hour))
	exclusions.Exclude(time.Now(), pod("a"), "r", now, now.Add(time.Hour))
	if woken != 1 {
		t.Fatalf("woken %d times, want once: a renewal is no news", woken)
	}
	if !exclusions.Changed(time.Now()) || exclusions.Changed(time.Now()) {
		t.Fatal("a new exclusion is not news once")
	}
	// One goes and another comes, between two looks, and the state is the same.
	exclusions.Readmit(time.Now(), "a", "r", false)
	exclusions.Exclude(time.Now(), pod("b"), "r", now, now.Add(time.Hour))
	if !exclusions.Changed(time.Now()) {
		t.Fatal("another exclusion is no news")
	}
	exclusions.Exclude(time.Now(), pod("a"), "r2", now, now.Add(time.Hour))
	set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now()})
	reports := exclusions.Reports(time.Now())
	if len(reports) != 2 || reports[0].State != drain.StateUnknown || reports[1].State != drain.Idle {
		t.Fatalf("reports are %+v", reports)
	}
	if got := exclusions.Held("r"); !slices.Equal(got, []drain.UID{"b"}) {
		t.Fatalf("r holds %v", got)
	}
}

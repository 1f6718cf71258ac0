package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// plane is a gateway in memory that keeps its own targets. A mutex that a test held over a sleep
// would stop fake time: each method holds it for a moment only.
type plane struct {
	mu         sync.Mutex
	generation int
	routed     map[health.Key]bool // false: taken out
	busy       map[health.Key]bool
	// applyErr is asked before each op, and lost after it; readErr before each reading, ownedErr
	// before each list.
	applyErr, lost    func(health.Op) error
	readErr, ownedErr func() error
	// swallow are ops without an error and without effect.
	swallow func(health.Op) bool
	// unread are pools that cannot be read.
	unread map[health.Pool]error
	// hang makes Apply wait for its context. slow is how long a reading takes, each an op.
	hang       bool
	slow, each time.Duration
	// before is called at the beginning of Apply, without the mutex.
	before func()

	applied                []health.Op
	applies, asks, biggest int
	reads                  []time.Time
	deadline               time.Duration // what the last Observe had left
}

func newPlane() *plane {
	return &plane{generation: 1, routed: map[health.Key]bool{}, busy: map[health.Key]bool{}}
}

// Apply implements Gateway.
func (p *plane) Apply(ctx context.Context, ops []health.Op) error {
	p.mu.Lock()
	hang, before, each := p.hang, p.before, p.each
	p.applies++
	p.biggest = max(p.biggest, len(ops))
	p.mu.Unlock()
	if before != nil {
		before()
	}
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	var errs []error
	if each > 0 {
		deadline, _ := ctx.Deadline()
		reached := min(len(ops), int(time.Until(deadline)/each))
		select {
		case <-time.After(time.Duration(reached) * each):
		case <-ctx.Done():
		}
		for _, op := range ops[reached:] {
			errs = append(errs, fmt.Errorf("%s: %w", op, context.DeadlineExceeded))
		}
		ops = ops[:reached]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, op := range ops {
		if p.applyErr != nil {
			if err := p.applyErr(op); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", op, err))
				continue
			}
		}
		p.applied = append(p.applied, op)
		if p.swallow != nil && p.swallow(op) {
			continue
		}
		switch op.Want {
		case health.WantRouted:
			p.routed[op.Key] = true
		case health.WantRemoved:
			if _, ok := p.routed[op.Key]; ok {
				p.routed[op.Key] = false
			}
		case health.WantAbsent:
			if p.busy[op.Key] {
				p.routed[op.Key] = false
			} else {
				delete(p.routed, op.Key)
			}
		}
		if p.lost != nil {
			if err := p.lost(op); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", op, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Observe implements Gateway.
func (p *plane) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	p.mu.Lock()
	slow := p.slow
	p.mu.Unlock()
	if slow > 0 {
		select {
		case <-time.After(slow):
		case <-ctx.Done():
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reads = append(p.reads, time.Now())
	if d, ok := ctx.Deadline(); ok {
		p.deadline = time.Until(d)
	}
	if err := ctx.Err(); err != nil {
		return health.Observation{}, err
	}
	if p.readErr != nil {
		if err := p.readErr(); err != nil {
			return health.Observation{}, err
		}
	}
	o := health.Observation{Generation: fmt.Sprint("g", p.generation), At: time.Now(),
		Seen: map[health.Key]health.Seen{}, Unread: maps.Clone(p.unread)}
	for _, k := range keys {
		if _, twice := o.Seen[k]; twice {
			panic("asked twice for " + k.String())
		}
		if p.unread[k.Pool] != nil {
			continue
		}
		routed, present := p.routed[k]
		seen := health.Seen{Present: present, Routed: routed, Missing: !routed}
		if p.busy[k] {
			seen.Active = 1
		}
		o.Seen[k] = seen
	}
	return o, nil
}

// Owned implements Gateway.
func (p *plane) Stopped(context.Context) bool { return false }

func (p *plane) Owned(context.Context) ([]health.Key, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asks++
	if p.ownedErr != nil {
		if err := p.ownedErr(); err != nil {
			return nil, err
		}
	}
	return slices.Collect(maps.Keys(p.routed)), nil
}

// with changes the plane.
func (p *plane) with(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// routing prints what is routed, sorted.
func (p *plane) routing() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for k, routed := range p.routed {
		if routed {
			all = append(all, string(k.Target.UID))
		}
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func (p *plane) counts() (applies, reads int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.applies, len(p.reads)
}

// rig is a director that runs in a bubble, its set and its plane.
type rig struct {
	*testing.T
	d     *Director
	plane *plane
	log   *safeBuffer
	// changes counts calls of Changed.
	changes *atomic.Int64
}

// safeBuffer is a log that may be read while it is written.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
	// written is called after each line, if it is not nil.
	written func()
}

// Write implements io.Writer.
func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	n, err := b.b.Write(p)
	written := b.written
	b.mu.Unlock()
	if written != nil {
		written()
	}
	return n, err
}

// with changes the log.
func (b *safeBuffer) with(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func (b *safeBuffer) count(text string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.b.String(), text)
}

// directed runs test beside a director, whose plane is as before has made it. At its end the
// director must end too, with nil, and leave no goroutine: the bubble panics if one is left.
func directed(t *testing.T, test func(r *rig), before ...func(p *plane)) {
	synctest.Test(t, func(t *testing.T) {
		log := &safeBuffer{}
		p := newPlane()
		for _, f := range before {
			f(p)
		}
		changes := new(atomic.Int64)
		r := &rig{t, NewDirector(p, health.New(health.Options{}), slog.New(slog.NewTextHandler(log, nil)),
			Hooks{Changed: func() { changes.Add(1) }}), p, log, changes}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.d.Run(ctx) }()
		defer func() {
			began := time.Now()
			cancel()
			if err := <-ended; err != nil || time.Since(began) > 0 {
				t.Errorf("Run ended after %s with %v, want at once with nil", time.Since(began), err)
			}
		}()
		test(r)
	})
}

func key(uid string) health.Key {
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, uid[0] - 'a' + 1}), 80)
	return health.Key{Pool: "web", Target: health.Target{UID: health.UID(uid), Addr: addr}}
}

// list makes uids what EndpointSlices say.
func (r *rig) list(uids string) {
	var all []health.Change
	for uid := range strings.FieldsSeq(uids) {
		all = append(all, health.Change{Endpoint: health.Endpoint{Target: key(uid).Target, Routable: true}})
	}
	for _, d := range r.d.Set.Targets() {
		if !slices.ContainsFunc(all, func(c health.Change) bool { return c.Target == d.Target }) {
			all = append(all, health.Change{Endpoint: health.Endpoint{Target: d.Target}, Unlisted: true})
		}
	}
	r.d.Set.Change(time.Now(), "web", all)
	r.d.Wake()
}

func (r *rig) exclude(uid health.UID) {
	r.d.Set.Exclude(time.Now(), uid, "r", time.Now(), time.Now().Add(time.Hour))
	r.d.Wake()
}

// serving lists uids and waits until they are routed.
func (r *rig) serving(uids string) {
	r.Helper()
	r.d.Set.Synced()
	r.list(uids)
	synctest.Wait()
	r.routing(uids)
}

func (r *rig) routing(want string) {
	r.Helper()
	if got := r.plane.routing(); got != want {
		r.Fatalf("the gateway routes to %q, want %q", got, want)
	}
}

func (r *rig) exclusions(want string) {
	r.Helper()
	var got []string
	for _, s := range r.d.Set.Exclusions() {
		got = append(got, fmt.Sprintf("%s:%s", s.UID, s.State))
	}
	if strings.Join(got, " ") != want {
		r.Fatalf("exclusions are %q, want %q", strings.Join(got, " "), want)
	}
}

func TestAnExclusionIsIdleAfterTheGapAndNoLater(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		time.Sleep(time.Minute)
		r.exclude("a")
		synctest.Wait() // not a moment later
		r.exclusions("a:removed")
		r.routing("b")
		time.Sleep(health.IdleGap)
		synctest.Wait()
		r.exclusions("a:idle")
	})
}

func TestWhatAnEarlierAgentLeftIsRemovedOnceSynced(t *testing.T) {
	directed(t, func(r *rig) {
		r.list("b")
		time.Sleep(time.Minute)
		r.routing("a b")
		r.d.Set.Synced()
		r.d.Wake()
		synctest.Wait()
		r.routing("b")
	}, func(p *plane) { p.routed[key("a")], p.routed[key("b")] = true, true })
}

// A gateway that counts as ready too early answers its first requests with errors.
func TestProgrammedOnceTheGatewayRoutesWhatIsWanted(t *testing.T) {
	directed(t, func(r *rig) {
		check := func(want bool, when string) {
			t.Helper()
			synctest.Wait()
			if got := r.d.Programmed(); got != want {
				t.Fatalf("programmed %t %s", got, when)
			}
		}
		check(false, "before anything is known")
		r.list("a")
		check(false, "before the set has synced")
		down := errors.New("down")
		r.plane.with(func() { r.plane.ownedErr = func() error { return down } })
		r.plane.with(func() { r.plane.generation++ })
		time.Sleep(2 * watchReloads)
		r.d.Set.Synced()
		r.list("a b")
		check(false, "while the gateway cannot be read")
		r.plane.with(func() { r.plane.ownedErr = nil })
		time.Sleep(maxRetry + time.Second)
		r.routing("a b")
		check(true, "when all is routed")
		r.plane.with(func() { r.plane.ownedErr = func() error { return down } })
		r.plane.with(func() { r.plane.generation++ })
		time.Sleep(2 * watchReloads)
		check(true, "after a reload: it stays so")
	})
}

func TestNothingIsDoneBeforeWhatTheGatewayHasIsKnown(t *testing.T) {
	directed(t, func(r *rig) {
		r.d.Set.Synced()
		r.exclude("a") // no target has this UID: before Owned has answered, it must not count as idle
		time.Sleep(time.Minute)
		r.exclusions("a:unknown")
		if applies, _ := r.plane.counts(); applies > 0 {
			t.Fatalf("%d batches were applied", applies)
		}
		r.plane.with(func() { r.plane.ownedErr = nil })
		time.Sleep(maxRetry + time.Second)
		r.exclusions("a:idle")
		r.routing("")
	}, func(p *plane) {
		p.routed[key("a")] = true
		p.ownedErr = func() error { return errors.New("down") }
	})
}

func TestAReloadIsNoticedAndAppliedAgain(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.exclude("a")
		time.Sleep(time.Minute)
		r.exclusions("a:idle")
		r.plane.with(func() { // the new process has what operators configured: a, not b
			r.plane.generation++
			r.plane.routed = map[health.Key]bool{key("a"): true}
		})
		time.Sleep(watchExclusions)
		synctest.Wait()
		r.routing("b")
		time.Sleep(health.IdleGap)
		synctest.Wait()
		r.exclusions("a:idle")

		r.d.Set.Readmit("a", "r")
		r.d.Wake()
		time.Sleep(time.Minute)
		r.plane.with(func() { r.plane.generation++; r.plane.routed = map[health.Key]bool{} })
		time.Sleep(watchReloads)
		synctest.Wait()
		r.routing("a b")
	})
}

// A process that was starting while a target was taken out and forgotten may have it. Only Owned
// lists it.
func TestAReloadThatBringsBackWhatWasForgotten(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.list("b")
		time.Sleep(time.Minute)
		r.plane.with(func() { r.plane.generation++; r.plane.routed[key("a")] = true })
		time.Sleep(watchReloads)
		synctest.Wait()
		r.routing("b")
	})
}

func TestRefusedOpsAreRetriedWithBackOffAndLoggedOnce(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("b")
		refused := errors.New("no server has the address")
		r.plane.with(func() {
			r.plane.applies = 0
			r.plane.applyErr = func(op health.Op) error {
				if op.Key == key("a") {
					return refused
				}
				return nil
			}
		})
		r.list("a b")
		time.Sleep(time.Minute)
		applies, reads := r.plane.counts()
		// 50, 100, 200, 400, 800, 1600, and then every 2000 ms.
		if applies < 30 || applies > 36 {
			t.Errorf("%d tries in a minute, want about 34", applies)
		}
		if reads > 300 {
			t.Errorf("%d readings in a minute, want four a second and one a try", reads)
		}
		if got := r.log.count(refused.Error()); got != 1 {
			t.Errorf("the refusal is logged %d times, want once", got)
		}
		r.plane.with(func() { r.plane.applyErr = nil })
		time.Sleep(maxRetry)
		synctest.Wait()
		r.routing("a b")
		if got := r.log.count("follows again"); got != 1 {
			t.Errorf("the end of the refusal is logged %d times, want once", got)
		}
		// The next refusal begins with a short pause again.
		r.plane.with(func() { r.plane.applies = 0; r.plane.applyErr = func(health.Op) error { return refused } })
		r.list("a b c")
		time.Sleep(retryFirst)
		synctest.Wait()
		if applies, _ := r.plane.counts(); applies != 2 {
			t.Errorf("%d tries after the first pause, want 2", applies)
		}
	})
}

// Without this one target that the gateway can never have slows every drain down to the pace of its
// retries.
func TestARefusedOpDelaysNoOther(t *testing.T) {
	directed(t, func(r *rig) {
		r.plane.with(func() {
			r.plane.applyErr = func(op health.Op) error {
				if op.Want == health.WantRouted && (op.Key == key("x") || op.Key == key("y")) {
					return errors.New("refused")
				}
				return nil
			}
		})
		r.d.Set.Synced()
		r.list("a b x")
		time.Sleep(time.Minute)
		r.exclude("a")
		synctest.Wait()
		r.routing("b")
		time.Sleep(health.IdleGap)
		synctest.Wait()
		r.exclusions("a:idle")
		// And what is refused later does not put off the next try of what was refused before.
		r.plane.with(func() { r.plane.applyErr = nil })
		for range 4 {
			time.Sleep(maxRetry / 4)
			r.list("a b x") // wakes
		}
		synctest.Wait()
		r.routing("b x")
	})
}

func TestNewRefusalsDoNotPutOffOlderOnes(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("b")
		old := 0
		r.plane.with(func() {
			r.plane.applyErr = func(op health.Op) error {
				if op.Key == key("a") {
					old++
				}
				return errors.New("refused")
			}
		})
		uids := "a b"
		r.list(uids)
		time.Sleep(time.Minute)
		before := 0
		r.plane.with(func() { before = old })
		for _, c := range "cdefghijklmnop" {
			uids += " " + string(c)
			r.list(uids)
			time.Sleep(time.Second)
		}
		r.plane.with(func() {
			if old-before < 5 {
				t.Errorf("the oldest refused op was tried %d times in 14 s, want every 2 s", old-before)
			}
		})
	})
}

// A target that is to be deleted may have requests for minutes, and a deletion is not free: HAProxy
// lists its streams for it.
func TestADeletionThatCannotEndIsTriedSeldom(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.plane.with(func() { r.plane.applies = 0; r.plane.busy[key("a")] = true })
		r.d.Set.MarkTerminating(time.Now(), "a")
		r.list("b")
		time.Sleep(time.Minute)
		if applies, _ := r.plane.counts(); applies < 30 || applies > 36 {
			t.Errorf("%d tries in a minute, want about 34", applies)
		}
		if r.log.count("level=WARN") > 0 {
			t.Errorf("requests that still run are no failure:\n%s", r.log.b.String())
		}
		// Another op that is refused meanwhile does not wait for that.
		tries := 0
		r.plane.with(func() {
			r.plane.applyErr = func(op health.Op) error {
				if op.Key == key("c") {
					tries++
					return errors.New("refused")
				}
				return nil
			}
		})
		r.list("b c")
		time.Sleep(retryFirst)
		synctest.Wait()
		r.plane.with(func() {
			if tries != 2 {
				t.Errorf("%d tries after the first pause, want 2", tries)
			}
			r.plane.applyErr = nil
		})
		time.Sleep(maxRetry)
		// Something else routes to it again: it is taken out at once.
		r.plane.with(func() { r.plane.routed[key("a")] = true })
		time.Sleep(watchExclusions)
		synctest.Wait()
		r.routing("b c")
		r.plane.with(func() { delete(r.plane.busy, key("a")) })
		time.Sleep(maxRetry)
		synctest.Wait()
		r.plane.with(func() {
			if _, present := r.plane.routed[key("a")]; present {
				t.Error("it is not deleted although nothing runs on it any more")
			}
		})
	})
}

func TestAnAnswerThatIsLost(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.plane.with(func() {
			r.plane.applies = 0
			r.plane.lost = func(health.Op) error { return errors.New("the answer was lost") }
		})
		r.exclude("a")
		synctest.Wait()
		r.exclusions("a:removed") // the reading shows it, whatever Apply said
		time.Sleep(health.IdleGap)
		synctest.Wait()
		r.exclusions("a:idle")
		time.Sleep(time.Minute)
		if applies, _ := r.plane.counts(); applies != 1 {
			t.Errorf("%d batches, want 1: what is read as done is not done again", applies)
		}
		if got := r.log.count("the answer was lost"); got != 1 {
			t.Errorf("the error is logged %d times, want once", got)
		}
	})
}

// What was not answered is carried out when the opposite has been done, and read.
func TestACommandWithoutAnAnswerComesLate(t *testing.T) {
	const lasts = 2 * time.Second
	unanswered := func(r *rig, late health.Op) {
		r.plane.with(func() {
			r.plane.applyErr = func(op health.Op) error {
				if op != late {
					return nil
				}
				r.plane.applyErr = nil
				return &Unanswered{Ops: []health.Op{op}, For: lasts, Err: errors.New("no answer")}
			}
		})
	}
	excludedWhileAdded := func(r *rig) {
		r.serving("a b")
		unanswered(r, health.Op{Key: key("c"), Want: health.WantRouted})
		r.list("a b c")
		synctest.Wait()
		r.exclude("c")
	}
	t.Run("an addition", func(t *testing.T) {
		directed(t, func(r *rig) {
			excludedWhileAdded(r)
			time.Sleep(lasts / 2)
			r.exclusions("c:unknown")
			r.plane.with(func() { r.plane.readErr = func() error { return errors.New("stopped") } })
			time.Sleep(time.Minute)
			r.plane.with(func() { r.plane.readErr = nil })
			time.Sleep(lasts / 4)
			r.exclusions("c:unknown") // it has not answered for long enough
			r.plane.with(func() { r.plane.routed[key("c")] = true })
			time.Sleep(lasts)
			r.routing("a b")
			r.exclusions("c:idle")
			if got := r.log.count("no answer (it may still be carried out)"); got == 0 {
				t.Error("the log does not say why the pod is not acknowledged")
			}
		})
	})
	t.Run("readings that fail at times do not make it last for ever", func(t *testing.T) {
		directed(t, func(r *rig) {
			excludedWhileAdded(r)
			for range 5 {
				time.Sleep(lasts * 3 / 4)
				failed := false
				r.plane.with(func() {
					r.plane.readErr = func() error {
						if failed {
							return nil
						}
						failed = true
						return errors.New("once")
					}
				})
			}
			r.exclusions("c:idle")
		})
	})
	t.Run("a removal", func(t *testing.T) {
		directed(t, func(r *rig) {
			r.serving("a b")
			unanswered(r, health.Op{Key: key("a"), Want: health.WantRemoved})
			r.exclude("a")
			synctest.Wait()
			r.d.Set.Readmit("a", "r")
			r.d.Wake()
			time.Sleep(lasts / 2)
			r.routing("a b")
			r.exclude("b")
			time.Sleep(lasts / 4)
			r.routing("a b") // a is not sure to stay
			r.plane.with(func() { r.plane.routed[key("a")] = false })
			time.Sleep(watchExclusions)
			r.routing("a b")
			time.Sleep(lasts)
			r.routing("a")
			time.Sleep(time.Minute)
			applies, _ := r.plane.counts()
			time.Sleep(time.Minute)
			if again, _ := r.plane.counts(); again != applies {
				t.Errorf("%d batches in a minute", again-applies)
			}
		})
	})
}

func TestAnUnreadableGatewayVoids(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.exclude("a")
		time.Sleep(time.Minute)
		r.exclusions("a:idle")
		r.changes.Store(0)
		r.plane.with(func() { r.plane.readErr = func() error { return errors.New("no answer") }; r.plane.reads = nil })
		time.Sleep(watchExclusions)
		synctest.Wait()
		r.exclusions("a:unknown")
		if r.changes.Load() == 0 {
			t.Error("Changed was not called: the exclusion is unknown")
		}
		time.Sleep(time.Minute)
		if _, reads := r.plane.counts(); reads < 235 || reads > 245 {
			t.Errorf("%d tries to read in a minute, want about 240", reads)
		}
		if got := r.log.count("no answer"); got != 1 {
			t.Errorf("the error is logged %d times, want once", got)
		}
		r.plane.with(func() { r.plane.readErr = nil })
		time.Sleep(maxRetry + health.IdleGap)
		synctest.Wait()
		r.exclusions("a:idle")
	})
}

func TestAGatewayThatHangsIsReadAfterAll(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.exclude("a")
		time.Sleep(time.Minute)
		r.plane.with(func() { r.plane.hang = true })
		r.list("a b c")
		time.Sleep(CallTimeout)
		synctest.Wait()
		r.exclusions("a:idle") // the reading had time of its own
		r.plane.with(func() {
			if r.plane.deadline != CallTimeout {
				t.Errorf("the reading had %s, want %s", r.plane.deadline, CallTimeout)
			}
			r.plane.hang = false
		})
		time.Sleep(time.Second)
		r.routing("b c")
	})
}

// A change that comes while the director works must not wait for its next round.
func TestWakesAreNotLost(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		once := sync.OnceFunc(func() { r.list("a b c d") })
		r.plane.with(func() { r.plane.before = once })
		r.list("a b c")
		synctest.Wait()
		r.routing("a b c d")
		for range 100 {
			r.d.Wake() // never blocks
		}
	})
}

func TestAWakeAtTheEndOfAStepIsNotLost(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.log.with(func() {
			// The failure is logged when the step is over.
			r.log.written = sync.OnceFunc(func() {
				r.plane.with(func() { r.plane.readErr = nil })
				r.list("a b c")
			})
		})
		r.plane.with(func() { r.plane.readErr = func() error { return errors.New("no answer") } })
		r.d.Wake()
		synctest.Wait()
		r.routing("a b c")
	})
}

func TestTheKeptTargetGoesAsSoonAsAnotherIsRouted(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a")
		r.exclude("a")
		time.Sleep(time.Minute)
		r.exclusions("a:kept")
		r.routing("a")
		r.list("a b")
		synctest.Wait()
		r.routing("b")
		time.Sleep(health.IdleGap) // it had become slow meanwhile
		synctest.Wait()
		r.exclusions("a:idle")
	})
}

func TestItDoesNotSpin(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(r *rig)
		most    int // readings in a minute
	}{
		"nothing to do":     {func(r *rig) {}, 62},
		"an idle exclusion": {func(r *rig) { r.exclude("a") }, 245},
		"a kept exclusion":  {func(r *rig) { r.list("a"); r.exclude("a") }, 620},
		"requests that remain": {func(r *rig) { r.plane.with(func() { r.plane.busy[key("a")] = true }); r.list("b") },
			280},
	} {
		t.Run(name, func(t *testing.T) {
			directed(t, func(r *rig) {
				r.serving("a b")
				c.prepare(r)
				time.Sleep(time.Second)
				_, before := r.plane.counts()
				time.Sleep(time.Minute)
				if _, reads := r.plane.counts(); reads-before > c.most {
					t.Errorf("%d readings in a minute, want at most %d", reads-before, c.most)
				}
			})
		})
	}
}

// A gateway with many targets is read for long, and does nothing else meanwhile.
func TestAGatewayThatIsReadSlowlyIsReadLessOften(t *testing.T) {
	const slow = time.Second
	directed(t, func(r *rig) {
		r.serving("a b c")
		r.exclude("a")
		r.plane.with(func() { r.plane.busy[key("a")] = true; r.plane.slow = slow })
		time.Sleep(time.Second)
		_, before := r.plane.counts()
		time.Sleep(time.Minute)
		if _, reads := r.plane.counts(); reads-before < 19 || reads-before > 21 {
			t.Errorf("%d readings of %s in a minute, want a third of the time, 20", reads-before, slow)
		}
		// A drain that comes in the pause does not wait for its end.
		_, before = r.plane.counts()
		reads := before
		for ; reads == before; _, reads = r.plane.counts() {
			time.Sleep(slow / 10)
		}
		r.exclude("b")
		time.Sleep(slow)
		synctest.Wait()
		if _, after := r.plane.counts(); after != reads+1 {
			t.Errorf("%d readings within %s, want 1", after-reads, slow)
		}
		// The reading that shows it Idle follows the one that shows it Removed.
		time.Sleep(2*slow + slow/10)
		synctest.Wait()
		r.exclusions("a:removed b:idle")
	})
}

// The set wakes the director for the outcome of a probe.
func TestTheUnhealthyAreTakenOutAtOnce(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.d.Set.SetCheck(time.Now(), "web", health.Check{
			Protocol: health.HTTP, Interval: time.Second, Timeout: time.Second,
			Thresholds: health.Thresholds{Successes: 1, HTTPFailures: 1},
		})
		probe := func(outcome health.Outcome) {
			for at := time.Now().Add(2 * time.Second); time.Now().Before(at); time.Sleep(10 * time.Millisecond) {
				jobs, _ := r.d.Set.Due(time.Now(), nil, 10)
				for _, j := range jobs {
					if j.Key == key("a") {
						r.d.Set.Report(time.Now(), j, outcome)
						return
					}
					r.d.Set.Report(time.Now(), j, health.Outcome{Kind: health.Success})
				}
			}
		}
		probe(health.Outcome{Kind: health.HTTPFailure, Code: 503})
		synctest.Wait() // not a moment later
		r.routing("b")
		probe(health.Outcome{Kind: health.Success})
		synctest.Wait()
		r.routing("a b")
	})
}

// Two pods are listed at one address of a server that operators own. What one wants undoes what the
// other wants.
func TestAContestedServerDoesNotMakeItSpin(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("b")
		addr := netip.MustParseAddrPort("10.9.9.9:80")
		older, newer := key("a"), key("c")
		older.Target.Addr, newer.Target.Addr = addr, addr
		shared := &sharedServer{plane: r.plane, keys: []health.Key{older, newer}}
		r.plane.with(func() { r.d.Gateway = shared }) // the director sleeps
		r.d.Set.Change(time.Now(), "web", []health.Change{
			{Endpoint: health.Endpoint{Target: older.Target, Routable: true}},
			{Endpoint: health.Endpoint{Target: newer.Target, Routable: true}},
		})
		r.d.Set.MarkTerminating(time.Now(), "a")
		r.d.Wake()
		_, before := r.plane.counts()
		time.Sleep(time.Minute)
		_, reads := r.plane.counts()
		if reads-before > 620*(maxRush+1) {
			t.Errorf("%d readings in a minute", reads-before)
		}
	})
}

// sharedServer has one server for several keys.
type sharedServer struct {
	*plane
	keys []health.Key
}

// Apply implements Gateway.
func (s *sharedServer) Apply(ctx context.Context, ops []health.Op) error {
	for i, op := range ops {
		if slices.Contains(s.keys, op.Key) {
			ops = slices.Clone(ops)
			ops[i].Key = s.keys[0]
			if op.Want == health.WantAbsent {
				ops[i].Want = health.WantRemoved
			}
		}
	}
	return s.plane.Apply(ctx, ops)
}

// Observe implements Gateway.
func (s *sharedServer) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	o, err := s.plane.Observe(ctx, slices.DeleteFunc(slices.Clone(keys), func(k health.Key) bool {
		return slices.Contains(s.keys, k)
	}))
	if err != nil {
		return o, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	routed := s.routed[s.keys[0]]
	for _, k := range s.keys {
		o.Seen[k] = health.Seen{Present: routed, Routed: routed, Missing: !routed}
	}
	return o, nil
}

func TestRunEndsInTheMiddleOfACall(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.plane.with(func() { r.plane.hang = true })
		r.list("a b c")
		synctest.Wait()
		// The end of the bubble cancels while Apply hangs, and finds Run ended at once.
	})
}

// What is said of progress decides whether traffic is moved away from this gateway. It must not
// depend on what runs on targets that nothing new goes to.
func TestProgress(t *testing.T) {
	directed(t, func(r *rig) {
		var mu sync.Mutex
		var last Progress
		r.d.Followed = func(p Progress) {
			mu.Lock()
			defer mu.Unlock()
			last = p
		}
		check := func(when string, unread bool, behind string) {
			t.Helper()
			time.Sleep(maxRetry + time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if got := fmt.Sprint(last.Behind); got != behind || (last.Err != nil) != unread || len(last.Came) > 0 {
				t.Fatalf("%s: %+v, want %s behind", when, last, behind)
			}
			if age := time.Since(last.AsOf); last.AsOf.IsZero() == r.d.Set.HasSynced() || r.d.Set.HasSynced() &&
				age > 2*maxRetry {
				t.Fatalf("%s: as of %s ago", when, age)
			}
		}
		down, no := errors.New("down"), errors.New("no")
		r.list("a b")
		check("nothing is said before the set has synced", false, "[]")
		r.serving("a b")
		check("all is done", false, "[]")
		r.plane.with(func() { r.plane.readErr = func() error { return down } })
		check("unreadable", true, "[]")
		r.plane.with(func() { r.plane.readErr = nil; r.plane.generation++ })
		check("another generation is readable", false, "[]")
		r.plane.with(func() { r.plane.busy[key("b")] = true })
		r.list("a")
		check("a request runs on what is to go", false, "[]")
		r.plane.with(func() {
			r.plane.applyErr = func(op health.Op) error {
				if op.Key == key("c") {
					return no
				}
				return nil
			}
		})
		r.list("a c")
		check("one is refused", false, "[routed web/10.0.0.3:80@c]")
		time.Sleep(time.Minute)
		check("and goes on being refused", false, "[routed web/10.0.0.3:80@c]")
		r.plane.with(func() { r.plane.applyErr = nil })
		check("and no longer", false, "[]")
	})
}

// A backend that the gateway has not loaded is named in the log, and nothing is acknowledged for
// its targets. It does not make the gateway look late, for that moves a healthy address, and it
// holds up no other pool.
func TestAnUnreadPoolIsItsOwnAffair(t *testing.T) {
	directed(t, func(r *rig) {
		var mu sync.Mutex
		var last Progress
		r.d.Followed = func(p Progress) {
			mu.Lock()
			defer mu.Unlock()
			last = p
		}
		other := key("c")
		other.Pool = "other"
		no := errors.New("no such backend")
		r.plane.with(func() {
			r.plane.unread = map[health.Pool]error{"other": no}
			r.plane.applyErr = func(op health.Op) error { return r.plane.unread[op.Pool] }
		})
		r.d.Set.Change(time.Now(), "other", []health.Change{
			{Endpoint: health.Endpoint{Target: other.Target, Routable: true}},
		})
		follows := func() {
			t.Helper()
			time.Sleep(time.Minute)
			mu.Lock()
			defer mu.Unlock()
			if last.Err != nil || len(last.Behind) > 0 || len(last.Came) > 0 || !r.d.Programmed() {
				t.Errorf("progress is %+v", last)
			}
		}
		r.serving("a b")
		follows()
		r.exclude("a")
		r.exclude("c")
		follows()
		r.exclusions("a:idle c:unknown")
		if n := r.log.count("level=WARN"); n > 3 || r.log.count("pool other: no such backend") == 0 {
			t.Errorf("the log should name the pool, a few times:\n%s", r.log.b.String())
		}
		r.plane.with(func() { r.plane.unread = nil; r.plane.generation++; r.plane.routed[other] = true })
		time.Sleep(time.Minute)
		r.exclusions("a:idle c:kept")

		r.plane.with(func() { r.plane.unread = map[health.Pool]error{"web": no} })
		time.Sleep(time.Minute)
		r.exclusions("a:unknown c:kept")
	})
}

// A gateway's own check that fails makes it pass a target over: the target is Missing then, and the
// agent has nothing left to do.
func TestAFailedCheckIsNotBehind(t *testing.T) {
	op := health.Op{Key: key("a"), Want: health.WantRouted}
	for name, c := range map[string]struct {
		seen    health.Seen
		applied error
		behind  int
	}{
		"passed over":                   {health.Seen{Present: true, Routed: true, Missing: true}, nil, 0},
		"not in the new process":        {health.Seen{Present: true, Routed: true, Missing: true}, errors.New("no"), 1},
		"nowhere":                       {health.Seen{Missing: true}, nil, 1},
		"nowhere, and refused":          {health.Seen{Missing: true}, errors.New("no"), 1},
		"taken out where it should run": {health.Seen{Present: true, Missing: true}, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			ops := []health.Op{op}
			steps := &Steps{ops: ops, applied: c.applied}
			p := steps.progress(health.Observation{Seen: map[health.Key]health.Seen{op.Key: c.seen}}, ops,
				map[health.Op]bool{op: true})
			if len(p.Behind) != c.behind || len(p.Came) > 0 {
				t.Errorf("progress is %+v", p)
			}
		})
	}
}

package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// many lists n targets of pool, with UIDs pool-0 and so on.
func (r *rig) many(pool health.Pool, n int) (keys []health.Key) {
	var changes []health.Change
	for i := range n {
		target := health.Target{UID: health.UID(fmt.Sprintf("%s-%d", pool, i)),
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i / 250), byte(i % 250)}), 80)}
		keys = append(keys, health.Key{Pool: pool, Target: target})
		changes = append(changes, health.Change{Endpoint: health.Endpoint{Target: target, Routable: true}})
	}
	r.d.Set.Change(time.Now(), pool, changes)
	r.d.Wake()
	return keys
}

// A gateway that is ready with servers missing answers requests for their Services with errors.
// What the gateway has refused will not be there later either, and does not count.
func TestProgrammedWithNothingMissing(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"all are reached":       {nil, true},
		"one is not reached":    {errors.New("no answer in time"), false},
		"the gateway says no":   {&Refused{Err: errors.New("no")}, true},
		"it says no to another": {&Refused{Op: health.Op{Want: health.WantAbsent}, Err: errors.New("no")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			directed(t, func(r *rig) {
				keys := r.many("web", 1000)
				r.plane.with(func() {
					r.plane.each = 20 * time.Millisecond // so a step cannot reach all of them
					r.plane.applyErr = func(op health.Op) error {
						if op.Key != keys[len(keys)-1] {
							return nil
						}
						no := &Refused{}
						if errors.As(c.err, &no) && no.Op == (health.Op{}) {
							return &Refused{op, no.Err}
						}
						return c.err
					}
				})
				r.d.Set.Synced()
				r.d.Wake()
				for range 60 {
					time.Sleep(time.Second)
					synctest.Wait()
					r.plane.with(func() {
						if n := len(r.plane.routed); r.d.Programmed() && n < len(keys)-1 {
							r.Errorf("programmed with %d of %d targets", n, len(keys))
						}
					})
				}
				if got := r.d.Programmed(); got != c.want {
					t.Errorf("programmed is %t, want %t", got, c.want)
				}
			})
		})
	}
}

// A drain waits neither for the additions that are pending when it begins, nor for those of a step
// that takes long.
func TestADrainBesideTenThousandAdditions(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("a b")
		r.plane.with(func() { r.plane.each, r.plane.slow = time.Millisecond, 50*time.Millisecond })
		keys := r.many("web", 10_000)
		for i, uid := range []health.UID{"a", keys[0].Target.UID, keys[100].Target.UID} {
			time.Sleep(time.Second + time.Duration(i)*77*time.Millisecond)
			r.exclude(uid)
			time.Sleep(time.Second)
			synctest.Wait()
			if is, _, _ := r.d.Set.Of(uid); is < health.Removed {
				t.Errorf("%s is %s after a second, want removed", uid, is)
			}
			r.plane.with(func() {
				if len(r.plane.routed) >= 10_000 {
					t.Error("all have been added: it shows nothing")
				}
			})
		}
		r.plane.with(func() {
			if r.plane.biggest > maxBatch {
				t.Errorf("a step has %d operations, want %d at most", r.plane.biggest, maxBatch)
			}
		})
		time.Sleep(time.Minute)
		r.plane.with(func() {
			if n := len(r.plane.routed); n != 10_002 {
				t.Errorf("the gateway has %d targets, want all", n)
			}
		})
	})
}

// Targets that the gateway takes without an error and does not have afterwards must not take up
// every step.
func TestOperationsWithoutEffectKeepNoOtherWaiting(t *testing.T) {
	directed(t, func(r *rig) {
		r.serving("b")
		r.plane.with(func() {
			r.plane.swallow = func(op health.Op) bool { return op.Pool == "mute" }
		})
		mute := r.many("mute", 2*maxBatch+1)
		r.many("web", 10)
		time.Sleep(time.Second)
		synctest.Wait()
		r.plane.with(func() {
			if n := len(r.plane.routed); n != 11 {
				t.Errorf("%d targets are routed, want the 11 that the gateway takes", n)
			}
			r.plane.swallow = nil
		})
		time.Sleep(time.Second)
		r.plane.with(func() {
			if n := len(r.plane.routed); n != len(mute)+11 {
				t.Errorf("%d targets are routed, want all", n)
			}
		})
	})
}

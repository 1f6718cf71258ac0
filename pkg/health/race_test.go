package health

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Whoever looks up while all else is in motion gets an answer that was true at some moment, and never one about another target. Every
// change is told apart by what Lookup says: targets of even pods are unhealthy, of odd ones never.
func TestLookupUnderStorm(t *testing.T) {
	s := New(Options{Detached: true})
	all := numbered(0, 4000)
	const stay = 100
	pools := []Pool{"web", "api"}
	for _, p := range pools {
		s.SetCheck(t0, p, Check{Thresholds: Thresholds{1, 1, 1, 1}})
		s.Replace(t0, p, all[:stay])
		for n := 0; n < stay; n += 2 {
			s.Passive(t0, Key{p, all[n].Target}, Outcome{Kind: Timeout})
		}
	}
	var done atomic.Bool
	var wg sync.WaitGroup
	var looked, found atomic.Int64
	for reader := range 4 {
		wg.Go(func() {
			for n := reader; !done.Load(); n += 7 {
				k := n % len(all)
				pool := pools[n/3%2]
				v, ok := s.Lookup(Key{pool, all[k].Target})
				looked.Add(1)
				switch {
				case k < stay && !ok:
					t.Errorf("%s is not known", all[k].Target)
					return
				case k < stay && (v.Verdict == Unhealthy) != (k%2 == 0), k%2 == 1 && v.Verdict == Unhealthy:
					t.Errorf("%s is %s", all[k].Target, v.Verdict)
					return
				case ok && k >= stay:
					found.Add(1)
				}
				if _, ok := s.Lookup(Key{"none", all[k].Target}); ok {
					t.Errorf("%s is known in a pool that is not there", all[k].Target)
					return
				}
			}
		})
	}
	const window = 500
	end := time.Now().Add(500 * time.Millisecond)
	for n := 0; time.Now().Before(end); n++ {
		in, out := stay+(n+window)%(len(all)-stay), stay+n%(len(all)-stay)
		p := pools[n%2]
		s.Change(t0, p, []Change{{Endpoint: all[in]}, {Endpoint: all[out], Gone: true}})
		if in%2 == 0 {
			s.Passive(t0, Key{p, all[in].Target}, Outcome{Kind: Timeout})
		}
		switch n % 50 {
		case 0:
			s.Bury(t0, all[in].UID, "r", t0, t0)
		case 20:
			s.Lapse(t0.Add(time.Second))
		case 40:
			s.Targets()
			s.SetCheck(t0, p, Check{Thresholds: Thresholds{1, 1, 1, uint8(1 + n%2)}})
			s.SetCheck(t0, p, Check{Thresholds: Thresholds{1, 1, 1, 1}})
		}
	}
	done.Store(true)
	wg.Wait()
	if looked.Load() < 1000 || found.Load() == 0 {
		t.Fatalf("%d lookups, of which %d found something that comes and goes", looked.Load(), found.Load())
	}
}

// What happens ten thousand times must not allocate.
func TestNothingIsAllocated(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for name, attached := range map[string]bool{"with a gateway": true, "detached": false} {
		t.Run(name, func(t *testing.T) {
			s, now := New(Options{Detached: !attached}), t0
			all := numbered(0, 4000)
			s.SetCheck(now, "web", every(10*time.Second))
			s.Replace(now, "web", all[:2000])
			s.Synced()
			for n := range 10 {
				s.Bury(now, all[1990+n].UID, "r", now, now.Add(time.Hour))
			}
			changes, ops, seen := make([]Change, 2), make([]Op, 0, 4000), map[Key]Seen{}
			apply := func() {
				clear(seen)
				ops = s.AppendPending(ops[:0])
				for _, op := range ops {
					seen[op.Key] = Seen{Present: op.Want != WantGone, Routed: op.Want == WantRouted, Missing: op.Want != WantRouted}
				}
				s.Observe(now, Observation{Generation: "g", At: now, Seen: seen})
			}
			apply()
			apply()
			keys, jobs := s.AppendWatched(nil), make([]Job, 0, 4000)
			// It comes to rest: what it needs at most is known after a while.
			n := 0
			replace := func() {
				changes[0] = Change{Endpoint: all[n%1000], Gone: true}
				changes[1] = Change{Endpoint: all[2000+n%1000]}
				if n/1000%2 == 1 {
					changes[0].Gone, changes[1].Gone = false, true
				}
				s.Change(now, "web", changes)
				apply()
				n++
			}
			for range 4000 {
				replace()
			}
			for what, f := range map[string]func(){
				"replace": replace,
				"lookup":  func() { s.Lookup(Key{"web", all[1500].Target}) },
				"watched": func() { keys = s.AppendWatched(keys[:0]) },
				"passive": func() { s.Passive(now, Key{"web", all[1500].Target}, Outcome{Kind: Timeout}) },
				"due and report": func() {
					now = now.Add(time.Millisecond)
					jobs, _ = s.Due(now, jobs[:0], 1000)
					for _, j := range jobs {
						s.Report(now, j, Outcome{Kind: Success})
					}
				},
			} {
				if allocs := testing.AllocsPerRun(2000, f); allocs != 0 {
					t.Errorf("%s: %v allocations", what, allocs)
				}
			}
		})
	}
}

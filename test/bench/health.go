package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

var benchCheck = health.Check{
	Protocol: health.TCP, Interval: 10 * time.Second, Timeout: time.Second,
	Thresholds: health.Thresholds{Successes: 2, HTTPFailures: 3, TCPFailures: 2, Timeouts: 3},
}

// endpoints makes n of them, each of a pod of its own.
func benchEndpoints(n int) []health.Endpoint {
	all := make([]health.Endpoint, n)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range all {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], 10<<24+uint32(i))
		uid := fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", random.Uint32(), random.Uint32()>>16, random.Uint32()>>20, random.Uint32()>>20, random.Uint64()>>16)
		all[i] = health.Endpoint{Target: health.Target{UID: health.UID(uid), Addr: netip.AddrPortFrom(netip.AddrFrom4(b), 8080)}, Routable: true}
	}
	return all
}

// shuffled returns 0 to n-1 in an order that no cache can guess.
func shuffled(n int) []int { return rand.New(rand.NewPCG(3, 4)).Perm(n) }

// replacer replaces targets one by one: n are there, and n come and go in turns.
type replacer struct {
	set      *health.Set
	all      []health.Endpoint
	order    []int
	at       int
	attached bool
	now      time.Time
	changes  []health.Change
	ops      []health.Op
	seen     map[health.Key]health.Seen
}

func newReplacer(n int, attached bool) *replacer {
	r := &replacer{
		set: health.New(health.Options{Detached: !attached}), all: benchEndpoints(2 * n), order: shuffled(n), attached: attached,
		now: time.Now(), changes: make([]health.Change, 2), seen: map[health.Key]health.Seen{},
	}
	r.set.SetCheck(r.now, "web", benchCheck)
	r.set.Replace(r.now, "web", r.all[:n])
	r.set.Synced()
	if attached {
		r.follow()
		r.follow()
		r.seen = map[health.Key]health.Seen{} // it is as large as it ever was
	}
	return r
}

// follow does what a gateway would at once: it carries out what is pending, and is read.
func (r *replacer) follow() {
	clear(r.seen)
	r.ops = r.set.AppendPending(r.ops[:0])
	for _, op := range r.ops {
		r.seen[op.Key] = health.Seen{Present: op.Want != health.WantGone, Routed: op.Want == health.WantRouted, Missing: op.Want != health.WantRouted}
	}
	r.set.Observe(r.now, health.Observation{Generation: "g", At: r.now, Seen: r.seen})
}

func (r *replacer) run(n int) time.Duration { return onCPU(func() { r.replace(n) }) }

func (r *replacer) replace(n int) {
	size := len(r.order)
	for range n {
		i := r.order[r.at%size]
		out, in := &r.all[i], &r.all[size+i]
		if r.at/size%2 == 1 {
			out, in = in, out
		}
		r.at++
		r.changes[0] = health.Change{Endpoint: *out, Gone: true}
		r.changes[1] = health.Change{Endpoint: *in}
		r.set.Change(r.now, "web", r.changes)
		if r.attached {
			r.follow()
		}
	}
}

// bareMap does the same to a map.
func bareMap(n int) func(int) time.Duration {
	all, order := benchEndpoints(2*n), shuffled(n)
	type state struct{ _, _ int }
	m := map[health.Key]*state{}
	for i := range n {
		m[health.Key{Pool: "web", Target: all[i].Target}] = &state{}
	}
	at, spare := 0, &state{}
	return func(count int) time.Duration {
		return onCPU(func() {
			for range count {
				i := order[at%n]
				out, in := &all[i], &all[n+i]
				if at/n%2 == 1 {
					out, in = in, out
				}
				at++
				delete(m, health.Key{Pool: "web", Target: out.Target})
				m[health.Key{Pool: "web", Target: in.Target}] = spare
			}
		})
	}
}

func benchReplace() ([]Result, error) {
	const count = 20_000
	var results []Result
	per := map[string]float64{}
	for _, size := range []int{1000, 100_000} {
		floor := bareMap(size)
		for _, attached := range []bool{false, true} {
			r := newReplacer(size, attached)
			r.run(4 * size) // it comes to rest
			name, what := fmt.Sprintf("health/replace-%dk", size/1000), "no gateway attached"
			if attached {
				name, what = name+"-attached", "operations taken and observed"
			}
			var took, bare []float64
			x := ratio(func() time.Duration {
				d := r.run(count)
				took = append(took, float64(d)/count)
				return d
			}, func() time.Duration {
				d := floor(count)
				bare = append(bare, float64(d)/count)
				return d
			})
			goal := 2.0
			if size > 1000 {
				goal = 3
			}
			per[name] = median(took)
			results = append(results, Result{Name: name, Ratio: x, Goal: goal, Note: fmt.Sprintf(
				"Change(remove, add) over map delete + insert, %s: %.0f over %.0f ns", what, median(took), median(bare))})
		}
	}
	// Between sizes turns are what makes them comparable.
	small, large := newReplacer(1000, false), newReplacer(100_000, false)
	small.run(4000)
	large.run(400_000)
	growth := ratio(func() time.Duration { return large.run(count) }, func() time.Duration { return small.run(count) })
	return append(results, Result{Name: "health/replace-growth", Ratio: growth, Goal: 3, Note: "one replacement at 100k targets over one at 1k"}), nil
}

// lookups makes sets and maps of n targets, and functions that look up count of them.
func lookups(n int) (*health.Set, []health.Key, func(int) time.Duration, func(int) time.Duration) {
	all, order := benchEndpoints(n), shuffled(n)
	set := health.New(health.Options{Detached: true})
	set.SetCheck(time.Now(), "web", benchCheck)
	set.Replace(time.Now(), "web", all)
	keys := make([]health.Key, n)
	m := make(map[health.Key]*health.View, n)
	for i, e := range all {
		m[health.Key{Pool: "web", Target: e.Target}] = &health.View{Why: health.WhyChosen}
		keys[order[i]] = health.Key{Pool: "web", Target: e.Target}
	}
	at, at2, good := 0, 0, 0
	ours := func(count int) time.Duration {
		return onCPU(func() {
			for range count {
				v, _ := set.Lookup(keys[at%n])
				if v.Why == health.WhyChosen {
					good++
				}
				at++
			}
		})
	}
	floor := func(count int) time.Duration {
		return onCPU(func() {
			for range count {
				if m[keys[at2%n]].Why == health.WhyChosen {
					good++
				}
				at2++
			}
		})
	}
	return set, keys, ours, floor
}

func benchLookup() ([]Result, error) {
	const n, count = 100_000, 200_000
	set, keys, ours, floor := lookups(n)
	var took, bare []float64
	plain := ratio(func() time.Duration {
		d := ours(count)
		took = append(took, float64(d)/count)
		return d
	}, func() time.Duration {
		d := floor(count)
		bare = append(bare, float64(d)/count)
		return d
	})
	results := []Result{{Name: "health/lookup-100k", Ratio: plain, Goal: 1.2, Note: fmt.Sprintf(
		"Lookup over an unsynchronised map lookup: %.0f over %.0f ns", median(took), median(bare))}}

	// A storm: 10,000 changes a second, in lots of 10 as slices bring them, of targets that nobody looks up.
	extra := benchEndpoints(n + 20_000)[n:]
	at := 0
	stormy := func() time.Duration {
		var stop atomic.Bool
		var wg sync.WaitGroup
		began := time.Now()
		changed := 0
		wg.Go(func() {
			lot := make([]health.Change, 10)
			for !stop.Load() {
				for behind := int(time.Since(began).Seconds()*10_000) - changed; behind > 0; behind -= len(lot) {
					for i := range lot {
						lot[i] = health.Change{Endpoint: extra[at/2%len(extra)], Gone: at%2 == 1}
						at++
					}
					set.Change(time.Now(), "web", lot)
					changed += len(lot)
				}
				time.Sleep(time.Millisecond)
			}
		})
		d := ours(count * 5)
		stop.Store(true)
		wg.Wait()
		return d
	}
	storm := ratio(stormy, func() time.Duration { return ours(count * 5) })
	results = append(results, Result{Name: "health/lookup-storm", Ratio: storm, Goal: 1.3, Note: "Lookup beside 10,000 changes a second over Lookup in quiet"})

	// Two goroutines look up twice as much as one; the floor is the same work by one.
	parallel := func(workers int) func() time.Duration {
		return func() time.Duration {
			began := time.Now()
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					k := w * n / 2
					for range count * 5 {
						set.Lookup(keys[k%n])
						k++
					}
				})
			}
			wg.Wait()
			return time.Since(began)
		}
	}
	both := 2 / ratio(parallel(2), parallel(1))
	spin := func(workers int) func() time.Duration {
		return func() time.Duration {
			began := time.Now()
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					x := uint64(1)
					for range 50_000_000 {
						x = x*6364136223846793005 + 1442695040888963407
					}
					runtime.KeepAlive(x)
				})
			}
			wg.Wait()
			return time.Since(began)
		}
	}
	machine := 2 / ratio(spin(2), spin(1))
	return append(results, Result{Name: "health/lookup-2cores", Ratio: both, Goal: 1.7, AtLeast: true, Note: fmt.Sprintf(
		"lookups a second by two goroutines over one; arithmetic alone gains %.2f on this machine now", machine)}), nil
}

func benchSchedule() ([]Result, error) {
	const n, seconds = 100_000, 10
	set := health.New(health.Options{Detached: true})
	all := benchEndpoints(n)
	set.SetCheck(time.Now(), "web", benchCheck)
	began := time.Now()
	set.Replace(began, "web", all)

	// The bare schedule: the times themselves, sorted, and a goroutine that sleeps from one to the next.
	bare := make([]time.Duration, n)
	for i := range bare {
		bare[i] = time.Duration(i) * seconds * time.Second / n
	}
	lateness := func(run func(until time.Time) []float64) []float64 {
		return run(time.Now().Add(seconds * time.Second / 4))
	}
	bareRun := func(until time.Time) []float64 {
		var late []float64
		start, i := time.Now(), 0
		for {
			now := time.Now()
			if now.After(until) {
				return late
			}
			for i < len(bare) && now.Sub(start) >= bare[i] {
				late = append(late, float64(now.Sub(start)-bare[i]))
				i++
			}
			time.Sleep(max(time.Millisecond, bare[min(i, len(bare)-1)]-time.Since(start)))
		}
	}
	counts := map[int64]int{}
	jobs := make([]health.Job, 0, n)
	seenJobs := 0
	run := func(until time.Time) []float64 {
		var late []float64
		for {
			now := time.Now()
			if now.After(until) {
				return late
			}
			var next time.Time
			jobs, next = set.Due(now, jobs[:0], n)
			for _, j := range jobs {
				late = append(late, float64(now.Sub(j.Due)))
				counts[j.Due.Sub(began).Milliseconds()/10]++
				set.Report(now, j, health.Outcome{Kind: health.Success})
			}
			seenJobs += len(jobs)
			time.Sleep(time.Until(next))
		}
	}
	var ours, theirs []float64
	run(began.Add(100 * time.Millisecond))
	for range 4 {
		theirs = append(theirs, lateness(bareRun)...)
		// What came due meanwhile is not the schedule's fault.
		for jobs, next := set.Due(time.Now(), nil, n); ; jobs, next = set.Due(time.Now(), nil, n) {
			for _, j := range jobs {
				counts[j.Due.Sub(began).Milliseconds()/10]++
				set.Report(time.Now(), j, health.Outcome{Kind: health.Success})
			}
			if time.Until(next) > 0 {
				break
			}
		}
		ours = append(ours, lateness(run)...)
	}
	p99 := func(values []float64) time.Duration {
		slices.Sort(values)
		return time.Duration(values[len(values)*99/100])
	}
	extra := p99(ours) - p99(theirs)

	// Busiest by planned time, over an interval of a set in which a third was replaced one by one.
	planned := health.New(health.Options{Detached: true})
	more := benchEndpoints(n + n/3)
	t := time.Unix(0, 0)
	planned.SetCheck(t, "web", benchCheck)
	planned.Replace(t, "web", more[:n])
	for i := range n / 3 {
		planned.Change(t, "web", []health.Change{{Endpoint: more[i*3], Gone: true}, {Endpoint: more[n+i]}})
	}
	busy := map[int64]int{}
	most := 0
	for end := t.Add(seconds * time.Second); t.Before(end); {
		var next time.Time
		jobs, next = planned.Due(t, jobs[:0], n)
		for _, j := range jobs {
			planned.Report(t, j, health.Outcome{Kind: health.Success})
			slot := j.Due.UnixMilli() / 10
			busy[slot]++
			most = max(most, busy[slot])
		}
		t = next
	}
	return []Result{
		{Name: "health/schedule-busiest", Ratio: float64(most) / (n / (seconds * 100)), Goal: 2, Note: fmt.Sprintf(
			"busiest 10 ms over the mean, 100k targets, 10 s, a third replaced: %d over %d", most, n/(seconds*100))},
		{Name: "health/schedule-lateness", Ratio: float64(extra) / float64(5*time.Millisecond), Goal: 1, Note: fmt.Sprintf(
			"p99 of the start's lateness, less a bare schedule's, over 5 ms: %s less %s", p99(ours), p99(theirs))},
	}, nil
}

func benchMemory() ([]Result, error) {
	const n = 100_000
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	r := newReplacer(n, true)
	r.run(n)
	r.ops, r.seen = nil, nil
	jobs, _ := r.set.Due(r.now.Add(time.Second), nil, n)
	for _, j := range jobs {
		r.set.Report(r.now, j, health.Outcome{Kind: health.Success})
	}
	// The UIDs belong to the set as well: count those of the n that live.
	for i := range r.all {
		r.all[i] = health.Endpoint{}
	}
	r.all, r.order = nil, nil
	per := float64(heap()-before) / n
	runtime.KeepAlive(r)
	return []Result{{Name: "health/bytes-per-target", Ratio: per / 400, Goal: 1, Note: fmt.Sprintf(
		"heap per target over 400 B, 100k targets with check, gateway and UIDs: %.0f B", per)}}, nil
}

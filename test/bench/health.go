package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
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
		uid := fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", random.Uint32(), random.Uint32()>>16, random.Uint32()>>20,
			random.Uint32()>>20, random.Uint64()>>16)
		all[i] = health.Endpoint{Target: health.Target{UID: health.UID(uid),
			Addr: netip.AddrPortFrom(netip.AddrFrom4(b), 8080)}, Routable: true}
	}
	return all
}

// shuffled returns 0 to n-1 in an order that no cache can guess.
func shuffled(n int) []int { return rand.New(rand.NewPCG(3, 4)).Perm(n) }

// replacer replaces targets one by one: n are there, and n come and go in turns. Each time it does
// what a gateway would at once.
type replacer struct {
	set   *health.Set
	all   []health.Endpoint
	order []int
	at    int
	now   time.Time
}

func newReplacer(n int) *replacer {
	r := &replacer{set: health.New(health.Options{}), all: benchEndpoints(2 * n), order: shuffled(n), now: time.Now()}
	r.set.SetCheck(r.now, "web", benchCheck)
	r.set.Change(r.now, "web", added(r.all[:n]))
	r.set.Synced()
	r.follow()
	r.follow()
	return r
}

func added(endpoints []health.Endpoint) []health.Change {
	changes := make([]health.Change, len(endpoints))
	for i, e := range endpoints {
		changes[i].Endpoint = e
	}
	return changes
}

// follow does what a gateway would at once: it carries out what is pending, and is read.
func (r *replacer) follow() {
	seen := map[health.Key]health.Seen{}
	for _, op := range r.set.Pending() {
		seen[op.Key] = health.Seen{Present: op.Want != health.WantAbsent, Routed: op.Want == health.WantRouted,
			Missing: op.Want != health.WantRouted}
	}
	r.set.Observe(r.now, health.Observation{Generation: "g", At: r.now, Seen: seen})
}

func (r *replacer) run(n int) time.Duration {
	return onCPU(func() {
		size := len(r.order)
		for range n {
			i := r.order[r.at%size]
			out, in := &r.all[i], &r.all[size+i]
			if r.at/size%2 == 1 {
				out, in = in, out
			}
			r.at++
			r.set.Change(r.now, "web", []health.Change{{Endpoint: *out, Unlisted: true}, {Endpoint: *in}})
			r.follow()
		}
	})
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
	small, large, smallMap, floor := newReplacer(1000), newReplacer(100_000), bareMap(1000), bareMap(100_000)
	small.run(4000)
	large.run(400_000)
	var took, bare []float64
	x := ratio(func() time.Duration {
		d := large.run(count)
		took = append(took, float64(d)/count)
		return d
	}, func() time.Duration {
		d := floor(count)
		bare = append(bare, float64(d)/count)
		return d
	})
	growth := ratio(func() time.Duration { return large.run(count) }, func() time.Duration { return small.run(count) })
	mapGrowth := ratio(func() time.Duration { return floor(count) }, func() time.Duration { return smallMap(count) })
	return []Result{
		{Name: "health/replace-100k", Ratio: x, Goal: 5, Note: fmt.Sprintf(
			"one of 100k targets replaced, applied and read, over map delete + insert: %.0f over %.0f ns", median(took),
			median(bare))},
		{Name: "health/replace-growth", Ratio: growth / mapGrowth, Goal: 1, Note: fmt.Sprintf(
			"one replacement at 100k targets over one at 1k, %.1f, over what it is for a map, %.1f", growth,
			mapGrowth)},
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
	r := newReplacer(n)
	r.run(n)
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
	return []Result{{Name: "health/bytes-per-target", Ratio: per / 600, Goal: 1, Note: fmt.Sprintf(
		"heap per target over 600 B, 100k targets with check, gateway and UIDs: %.0f B", per)}}, nil
}

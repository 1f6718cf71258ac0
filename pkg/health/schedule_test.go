package health

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// numbered makes the endpoints of pods from to to, each with an address of its own.
func numbered(from, to int) []Endpoint {
	all := make([]Endpoint, 0, to-from)
	for n := from; n < to; n++ {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], 10<<24+uint32(n))
		uid := UID(fmt.Sprintf("%08x-0000-4000-8000-%012x", n, n))
		all = append(all, Endpoint{Target: Target{uid, netip.AddrPortFrom(netip.AddrFrom4(b), 8080)}, Routable: true})
	}
	return all
}

func every(d time.Duration) Check {
	return Check{Protocol: TCP, Interval: d, Timeout: d, Thresholds: Thresholds{2, 2, 2, 2}}
}

// drive calls Due as a runner would, each time when it was asked to, for d, answers everything, and
// returns the jobs.
func drive(t *testing.T, s *Set, now *time.Time, d time.Duration) []Job {
	t.Helper()
	var all, jobs []Job
	for end := now.Add(d); now.Before(end); {
		var next time.Time
		jobs, next = s.Due(*now, jobs[:0], 1<<20)
		for _, j := range jobs {
			if j.Due.After(*now) {
				t.Fatalf("%s is handed out %s early", j.Key, j.Due.Sub(*now))
			}
			s.Report(*now, j, Outcome{Kind: Success})
		}
		all = append(all, jobs...)
		if next.IsZero() {
			next = end
		}
		if !next.After(*now) || next.Sub(*now) > askMost {
			t.Fatalf("ask again in %s", next.Sub(*now))
		}
		*now = next
	}
	return all
}

// busiest returns how many of jobs the busiest 10 ms have, by the mean.
func busiest(jobs []Job, d time.Duration) float64 {
	counts := map[int64]int{}
	most := 0
	for _, j := range jobs {
		slot := j.Due.Sub(t0).Milliseconds() / 10
		counts[slot]++
		most = max(most, counts[slot])
	}
	return float64(most) * float64(d/(10*time.Millisecond)) / float64(len(jobs))
}

func once(t *testing.T, jobs []Job, want int, text string) {
	t.Helper()
	seen := map[Key]int{}
	for _, j := range jobs {
		seen[j.Key]++
		if seen[j.Key] > 1 {
			t.Fatalf("%s: %s was probed twice", text, j.Key)
		}
	}
	if len(seen) != want {
		t.Fatalf("%s: %d targets were probed, want %d", text, len(seen), want)
	}
}

func TestProbesAreSpread(t *testing.T) {
	const n, interval = 10_000, 5 * time.Second
	s, now := New(Options{}), t0
	s.SetCheck(now, "web", every(interval))
	all := numbered(0, 3*n)
	replace(s, now, "web", all[:n]) // all at once
	jobs := drive(t, s, &now, interval+tick)
	once(t, jobs, n, "first interval")
	if b := busiest(jobs, interval); b > 1.5 {
		t.Errorf("at first: the busiest 10 ms hold %.2f times the mean", b)
	}
	// One after the other while time passes, the eldest go.
	for k := range 2 * n {
		s.Change(now, "web", []Change{{Endpoint: all[k], Unlisted: true}, {Endpoint: all[k+n]}})
		if k%7 == 0 {
			now = now.Add(time.Millisecond)
			jobs, _ = s.Due(now, nil, 1<<20)
			for _, j := range jobs {
				s.Report(now, j, Outcome{Kind: Success})
			}
		}
	}
	drive(t, s, &now, interval)
	jobs = drive(t, s, &now, interval)
	once(t, jobs, n, "after churn")
	if b := busiest(jobs, interval); b > 1.5 {
		t.Errorf("after churn: the busiest 10 ms hold %.2f times the mean", b)
	}
	// Two thirds go by chance, and many small pools share the interval.
	seed := script(1, n)
	for k := range n {
		if seed[k] < 170 {
			s.Change(now, "web", []Change{{Endpoint: all[2*n+k], Unlisted: true}})
		}
	}
	for k := range n / 4 {
		pool := Pool(fmt.Sprint("pool-", k))
		s.SetCheck(now, pool, every(interval))
		replace(s, now, pool, all[2*k:2*k+2])
	}
	drive(t, s, &now, interval)
	jobs = drive(t, s, &now, interval)
	if b := busiest(jobs, interval); b > 2 {
		t.Errorf("after more churn: the busiest 10 ms hold %.2f times the mean", b)
	}
}

func TestIntervalsOfEveryLength(t *testing.T) {
	for _, interval := range []time.Duration{1, time.Millisecond, 7 * time.Millisecond, time.Second, 17 * time.Second,
		5 * time.Minute} {
		s, now := New(Options{}), t0.Add(time.Hour)
		replace(s, now, "web", numbered(0, 100))
		s.SetCheck(now, "web", every(interval))
		period := max(interval, tick)
		drive(t, s, &now, period+tick)
		jobs := drive(t, s, &now, 3*period/tick*tick)
		seen := map[Key][]time.Time{}
		for _, j := range jobs {
			seen[j.Key] = append(seen[j.Key], j.Due)
		}
		for k, times := range seen {
			for n := range times[1:] {
				if d := times[n+1].Sub(times[n]); d != period.Truncate(tick) {
					t.Fatalf("%s: %s is probed again after %s", interval, k, d)
				}
			}
			if len(times) < 2 || len(times) > 4 {
				t.Fatalf("%s: %s was probed %d times in three intervals", interval, k, len(times))
			}
		}
		if len(seen) != 100 {
			t.Fatalf("%s: %d targets were probed", interval, len(seen))
		}
	}
}

// A clock that is set, or a machine that slept.
func TestAClockThatJumps(t *testing.T) {
	const n, interval = 1000, 10 * time.Second
	for _, by := range []time.Duration{-time.Hour, -2 * time.Second, -time.Millisecond, 5 * time.Second, time.Hour,
		300 * 24 * time.Hour} {
		t.Run(by.String(), func(t *testing.T) {
			s, now := New(Options{}), t0
			replace(s, now, "web", numbered(0, n))
			s.SetCheck(now, "web", every(interval))
			drive(t, s, &now, interval+tick)
			now = now.Add(by)
			jobs, _ := s.Due(now, nil, 1<<20)
			if len(jobs) > n/8 {
				t.Fatalf("%d probes at once", len(jobs))
			}
			for _, j := range jobs {
				s.Report(now, j, Outcome{Kind: Success})
			}
			// Each is probed once in the next interval, or a second later if the clock was put back
			// by less.
			jobs = append(jobs, drive(t, s, &now, interval+jump)...)
			seen := map[Key]int{}
			for _, j := range jobs {
				seen[j.Key]++
			}
			for k, times := range seen {
				if times > 2 {
					t.Fatalf("%s was probed %d times", k, times)
				}
			}
			if len(seen) != n || len(jobs) > n*5/4 {
				t.Fatalf("%d probes of %d targets in one interval", len(jobs), len(seen))
			}
		})
	}
}

func TestCallersWhoseTimesCrossDoNotDriveTheClock(t *testing.T) {
	s, now := New(Options{}), t0
	replace(s, now, "web", numbered(0, 100))
	s.SetCheck(now, "web", every(time.Second))
	jobs := 0
	for range 10_000 {
		now = now.Add(time.Millisecond)
		due, _ := s.Due(now, nil, 1000)
		jobs += len(due)
		for _, j := range due {
			s.Report(now.Add(-5*time.Millisecond), j, Outcome{Kind: Success})
		}
	}
	if jobs < 950 || jobs > 1050 {
		t.Fatalf("%d probes in ten intervals of 100 targets", jobs)
	}
}

func TestNoMoreThanAskedFor(t *testing.T) {
	s, now := New(Options{}), t0
	replace(s, now, "web", numbered(0, 1000))
	s.SetCheck(now, "web", every(100*time.Millisecond))
	// The first probes are all due after an interval; they come in lots, and each once.
	now = now.Add(101 * time.Millisecond)
	var all []Job
	for range 10 {
		jobs, next := s.Due(now, all, 100)
		if len(jobs) != len(all)+100 {
			t.Fatalf("%d jobs", len(jobs)-len(all))
		}
		if len(jobs) < 1000 && !next.Equal(now) {
			t.Fatalf("more is due, but ask again in %s", next.Sub(now))
		}
		all = jobs
	}
	once(t, all, 1000, "in lots")
	jobs, next := s.Due(now, nil, 100)
	if len(jobs) != 0 || !next.After(now) {
		t.Fatalf("%d jobs more, the next in %s", len(jobs), next.Sub(now))
	}
}

// A runner that takes jobs may end with them.
func TestAJobThatIsNotAnsweredIsGivenUp(t *testing.T) {
	s, now := New(Options{}), t0
	replace(s, now, "web", numbered(0, 1))
	s.SetCheck(now, "web", every(time.Second))
	var at []time.Time
	var jobs []Job
	for range 1000 {
		now = now.Add(10 * time.Millisecond)
		due, _ := s.Due(now, nil, 10)
		for _, j := range due {
			at, jobs = append(at, j.Due), append(jobs, j)
		}
	}
	if len(jobs) != 3 && len(jobs) != 4 || at[1].Sub(at[0]) != lostAfter*time.Second {
		t.Fatalf("%d probes in ten intervals, at %v", len(jobs), at)
	}
	for n, j := range jobs {
		if got := s.Report(now, j, Outcome{Kind: Success}); got != (n == len(jobs)-1) {
			t.Fatalf("answer %d counts: %t", n, got)
		}
	}
}

package health

import (
	"fmt"
	"testing"
)

func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		all := numbered(0, n)
		s := New(Options{Detached: true})
		s.Replace(t0, "web", all)
		m := map[Key]*View{}
		keys := make([]Key, n)
		for i, e := range all {
			m[Key{"web", e.Target}] = &View{}
			keys[i] = Key{"web", all[i*7919%n].Target}
		}
		b.Run(fmt.Sprint("set-", n), func(b *testing.B) {
			i := 0
			for b.Loop() {
				s.Lookup(keys[i])
				if i++; i == n {
					i = 0
				}
			}
		})
		b.Run(fmt.Sprint("map-", n), func(b *testing.B) {
			i := 0
			for b.Loop() {
				if m[keys[i]].Why == WhyDead {
					b.Fatal()
				}
				if i++; i == n {
					i = 0
				}
			}
		})
	}
}

func BenchmarkReplace(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		all := numbered(0, 2*n)
		s := New(Options{Detached: true})
		s.SetCheck(t0, "web", everySecond)
		s.Replace(t0, "web", all[:n])
		at := 0
		changes := make([]Change, 2)
		b.Run(fmt.Sprint("set-", n), func(b *testing.B) {
			for b.Loop() {
				i := at * 7919 % n
				changes[0], changes[1] = Change{Endpoint: all[i], Gone: true}, Change{Endpoint: all[i+n]}
				if at/n%2 == 1 {
					changes[0], changes[1] = Change{Endpoint: all[i+n], Gone: true}, Change{Endpoint: all[i]}
				}
				s.Change(t0, "web", changes)
				at++
			}
		})
		m := map[Key]*View{}
		for _, e := range all[:n] {
			m[Key{"web", e.Target}] = &View{}
		}
		v := &View{}
		at2 := 0
		b.Run(fmt.Sprint("map-", n), func(b *testing.B) {
			for b.Loop() {
				i, j := at2*7919%n, at2*7919%n+n
				if at2/n%2 == 1 {
					i, j = j, i
				}
				delete(m, Key{"web", all[i].Target})
				m[Key{"web", all[j].Target}] = v
				at2++
			}
		})
	}
}

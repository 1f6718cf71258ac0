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

package kernel

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// BenchmarkRemoved is from an order to the reading that shows Removed, and the order back, alone
// and beside many exclusions.
func BenchmarkRemoved(b *testing.B) {
	p := newPod(b, false)
	to, other := listen(b, "127.0.91.1"), listen(b, "127.0.91.2")
	g := p.open(b)
	apply(b, g, health.WantRouted, to, other)
	removed := func(b *testing.B) {
		for b.Loop() {
			apply(b, g, health.WantRemoved, to)
			if o, err := g.Observe(b.Context(), []health.Key{key(to)}); err != nil || o.Seen[key(to)].Routed {
				b.Fatalf("it is seen as %+v, %v", o, err)
			}
			apply(b, g, health.WantRouted, to)
		}
	}
	b.Run("alone", removed)
	var many []netip.AddrPort
	for i := range 10_000 {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], 10<<24+uint32(i))
		many = append(many, netip.AddrPortFrom(netip.AddrFrom4(ip), 80))
	}
	apply(b, g, health.WantRemoved, many...)
	b.Run("beside 10,000 exclusions", removed)
}

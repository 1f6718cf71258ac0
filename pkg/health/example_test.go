package health_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// A coordinator excludes one of two pods. The set wants it removed from the gateway, and has it
// wanted again when no holder is left.
func ExampleSet() {
	now := time.Now()
	s := health.New(health.Options{})
	target := func(uid health.UID, addr string) health.Change {
		return health.Change{Endpoint: health.Endpoint{
			Target: health.Target{UID: uid, Addr: netip.MustParseAddrPort(addr)}, Routable: true,
		}}
	}
	s.Change(now, "web", []health.Change{target("a", "10.0.0.1:80"), target("b", "10.0.0.2:80")})
	s.Synced()
	s.Observe(now, health.Observation{Generation: "1", At: now}) // the gateway has neither

	s.Exclude(now, "a", "coordinator-0/1", now, now.Add(time.Minute))
	fmt.Println(s.Pending())
	s.Readmit("a", "coordinator-0/1")
	fmt.Println(len(s.Pending()), "when it is readmitted")
	// Output:
	// [routed web/10.0.0.2:80@b]
	// 2 when it is readmitted
}

package traefik

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// FuzzRead reads two answers that a Traefik may give. A server that the second lists without
// fencing is Routing, and one that only the first listed is Removed.
func FuzzRead(f *testing.F) {
	f.Add(`{"services":{"api@internal":{},"a@file":{"loadBalancer":{"servers":[{"url":"http://10.0.0.1:80"}]}}}}`,
		`{"services":{"api@internal":{},"a@file":{"loadBalancer":{"sticky":{"cookie":{}},"servers":[{"url":`+
			`"https://[::1]","fenced":true}]}}},"tcpServices":{"t":{"loadBalancer":`+
			`{"servers":[{"address":"10.0.0.2:5"}]}}}}`)
	f.Add(`{"services":{"api@internal":{}}}`, `{"services":{"x":{"loadBalancer":null}}}`)
	f.Fuzz(func(t *testing.T, first, second string) {
		r := &reader{seen: map[netip.AddrPort]seen{}}
		known := map[netip.AddrPort]bool{}
		for _, text := range []string{first, second} {
			hosts, err := r.read(func(_ string, into any) error { return json.Unmarshal([]byte(text), into) })
			if err != nil {
				continue
			}
			listed := map[netip.AddrPort]bool{}
			for _, h := range hosts {
				if !h.Target.IsValid() && h.State == health.Unknown {
					continue // it has a name
				}
				if !h.Target.IsValid() || h.Target.Addr().Is4In6() || h.State != health.Routing &&
					h.State != health.Removed ||
					h.Quiet < 0 {
					t.Fatalf("%+v", h)
				}
				listed[h.Target] = true
			}
			for target := range known {
				if !listed[target] {
					t.Fatalf("%s was forgotten within %s", target, remember)
				}
			}
			known = listed
		}
	})
}

package kubeproxy

import (
	"fmt"
	"testing"
)

// Endpoints come and go as kube-proxy writes them, in each family, with affinity and without.
func TestEndpointLeaves(t *testing.T) {
	for _, test := range []struct {
		service service
		a, b    string
	}{
		{service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "10.96.0.1", true}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"web", "fd10::1", false}, "[fd00::1]:8080", "[fd00::2]:8080"},
		{service{"web", "fd10::1", true}, "[fd00::1]:8080", "[fd00::2]:8080"},
	} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s affinity %v, read before %v", test.service.family(), test.service.affinity, before), func(t *testing.T) {
				empty(t)
				s, a, b := test.service, test.a, test.b
				var o *Observer
				if before {
					o = start(t, Options{})
					watch(t, o, a).stays(Unknown)
				}
				nft(t, append(setUp(s.family()), s.sync([]string{a, b})...)...)
				if !before {
					o = start(t, Options{})
				}
				wa := watch(t, o, a)
				wa.wait(Routing)
				wb := watch(t, o, b)
				wa.wait(Kept) // both are watched, and there is no other
				wb.Close()
				wa.wait(Routing)
				nft(t, s.sync([]string{b}, a)...)
				if r := wa.wait(Removed); r.Since.IsZero() || r.Generation == "" {
					t.Error(r)
				}
				wb = watch(t, o, b)
				wb.wait(Kept)
				nft(t, s.sync(nil, b)...)
				wb.wait(Removed)
				nft(t, s.sync([]string{a})...)
				wa.wait(Kept)
				nft(t, "delete table "+s.family()+" kube-proxy")
				wa.wait(Unknown)
				wb.wait(Unknown)
				nft(t, setUp(s.family())...)
				wa.wait(Removed)
			})
		}
	}
}

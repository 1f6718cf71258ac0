package endpoints

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Endpoints returns the endpoints of one port of a Service, by the port's name, sorted. An empty
// name means the only port. An endpoint that several slices list is returned once: terminating if
// one of them says so, and else routable if one of them says that it is ready. An endpoint without
// a pod has the UID "". Tests compare it with what [Index.Follow] has told.
func (x *Index) Endpoints(service types.NamespacedName, portName string) []health.Endpoint {
	x.mu.RLock()
	defer x.mu.RUnlock()
	byTarget := map[health.Target]health.Endpoint{}
	if of := x.services[service]; of != nil {
		for _, c := range of.slices {
			n := (&view{port: Port{Name: portName}}).number(c.last)
			if n == 0 {
				continue
			}
			for i := range c.last.Endpoints {
				e, ok := read(c.last, &c.last.Endpoints[i])
				if !ok {
					continue
				}
				t := health.Target{UID: e.uid, Addr: netip.AddrPortFrom(e.addr, n)}
				have := byTarget[t]
				byTarget[t] = health.Endpoint{
					Target:      t,
					Routable:    have.Routable || e.ready,
					Terminating: have.Terminating || e.terminating,
				}
			}
		}
	}
	all := make([]health.Endpoint, 0, len(byTarget))
	for _, e := range byTarget {
		e.Routable = e.Routable && !e.Terminating
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b health.Endpoint) int { return compare(a.Target, b.Target) })
	return all
}

package endpoints

import (
	"net/netip"
	"slices"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Port is one port of a Service, by its name. An empty name means the only port, also after the
// Service was given another one.
type Port struct {
	Service types.NamespacedName
	Name    string
}

// PortChange is what has changed for one port.
type PortChange struct {
	Port Port
	// Changes are sorted by address and UID. Targets that are as they were are not among them.
	Changes []health.Change
}

// view is one port that is followed: what all slices say together of each target.
type view struct {
	port Port
	// only is the port that an empty name means, as a slice last listed it. Nil: none has.
	only    *discovery.EndpointPort
	tallies map[health.Target]*tally
	// touched are those that the present event has counted.
	touched []*tally
}

// tally counts in how many places a target is listed, and how.
type tally struct {
	target health.Target
	counts
	// was is the word before the present event, if it is touched.
	touched bool
	was     health.Change
}

func (t *tally) change() health.Change {
	return health.Change{
		Endpoint: health.Endpoint{Target: t.target, Routable: t.ready > 0 && t.terminating == 0,
			Terminating: t.terminating > 0},
		Unlisted: t.listed == 0,
	}
}

// Follow makes Apply and Delete return the changes of a port. An endpoint without a pod, such as
// one of a Service without a selector, has the UID "". Follow panics if a slice was applied before.
func (x *Index) Follow(p Port) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if slices.ContainsFunc(x.views[p.Service], func(v *view) bool { return v.port == p }) {
		return
	}
	if len(x.slices) > 0 {
		panic("endpoints: Follow after Apply")
	}
	x.views[p.Service] = append(x.views[p.Service], &view{port: p, tallies: map[health.Target]*tally{}})
}

// Ambiguous reports whether a port has no name and its Service has several, of which it is not
// known which one is meant.
func (x *Index) Ambiguous(p Port) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	i := slices.IndexFunc(x.views[p.Service], func(v *view) bool { return v.port == p })
	if i < 0 || p.Name != "" || x.services[p.Service] == nil {
		return false
	}
	for _, c := range x.services[p.Service].slices {
		if c.numbers[i] == 0 && len(validPorts(c.last)) > 1 {
			return true
		}
	}
	return false
}

// number returns the number that the port has in a slice. 0: it has none.
func (v *view) number(s *discovery.EndpointSlice) uint16 {
	all := validPorts(s)
	i := slices.IndexFunc(all, func(p discovery.EndpointPort) bool { return ptr.Deref(p.Name, "") == v.port.Name })
	switch {
	case v.port.Name != "":
	case len(all) == 1:
		i = 0
	case i < 0 && v.only != nil:
		// By its name, or by its number: one port needs no name, but several do.
		i = slices.IndexFunc(all, func(p discovery.EndpointPort) bool { return ptr.Equal(p.Name, v.only.Name) })
		if i < 0 {
			i = slices.IndexFunc(all, func(p discovery.EndpointPort) bool { return *p.Port == *v.only.Port })
		}
	}
	if i < 0 {
		return 0
	}
	v.only = &all[i]
	return uint16(*all[i].Port)
}

// validPorts returns the ports of a slice that have a valid number.
func validPorts(s *discovery.EndpointSlice) []discovery.EndpointPort {
	return slices.DeleteFunc(slices.Clone(s.Ports), func(p discovery.EndpointPort) bool {
		return p.Port == nil || *p.Port <= 0 || *p.Port > 65535
	})
}

func (v *view) count(e endpoint, number uint16, by int) {
	target := health.Target{UID: e.uid, Addr: netip.AddrPortFrom(e.addr, number)}
	t := v.tallies[target]
	if t == nil {
		t = &tally{target: target}
		v.tallies[target] = t
	}
	if !t.touched {
		t.touched, t.was = true, t.change()
		v.touched = append(v.touched, t)
	}
	t.counts.count(e, by)
}

// changes returns what the present event has changed for the ports of a Service, and of the one
// that the slice was in before.
func (x *Index) changes(of types.NamespacedName, before *slice) []PortChange {
	var all []PortChange
	collect := func(service types.NamespacedName) {
		for _, v := range x.views[service] {
			if changes := v.settle(); len(changes) > 0 {
				all = append(all, PortChange{Port: v.port, Changes: changes})
			}
		}
	}
	collect(of)
	if before != nil && before.service != of {
		collect(before.service)
	}
	return all
}

// settle returns the targets whose state has changed, and forgets those that are no longer listed.
func (v *view) settle() []health.Change {
	var changes []health.Change
	for _, t := range v.touched {
		t.touched = false
		is := t.change()
		if is != t.was {
			changes = append(changes, is)
		}
		if is.Unlisted {
			delete(v.tallies, t.target)
		}
	}
	v.touched = v.touched[:0]
	slices.SortFunc(changes, func(a, b health.Change) int { return compare(a.Target, b.Target) })
	return changes
}

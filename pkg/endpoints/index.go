// Package endpoints turns EndpointSlices into targets.
//
// A Service has several slices, a pod may be in several Services, an endpoint is in two slices at once while it moves between
// them, a dual-stack pod has a slice for each family, ports are named and each slice has its own numbers for them. The [Index]
// takes slices one by one as a watch delivers them and answers what they say together: of a Service, the endpoints ([Index.Endpoints]);
// of a pod, the Services that list it ([Index.Pod]).
package endpoints

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Index is what all EndpointSlices say together. Its methods may be called from any goroutine.
type Index struct {
	mu       sync.RWMutex
	services map[types.NamespacedName]map[string]slice
	// owners holds the Service that each slice was last in, by the slice's name. Its label may change, and the last that is heard of a
	// deleted slice may be old.
	owners map[types.NamespacedName]types.NamespacedName
	// listed counts the slices of each Service in which a pod is.
	listed map[health.UID]map[types.NamespacedName]int
	// left holds when a Service stopped listing a pod, for Linger.
	left map[health.UID]map[types.NamespacedName]time.Time
	// leaving is the order in which left grew, so that the old ones are found at once.
	leaving []leaver
}

// Linger is how long a pod that a Service no longer lists is still reported with it: a gateway may learn of it that late.
const Linger = 10 * time.Second

type leaver struct {
	uid     health.UID
	service types.NamespacedName
	at      time.Time
}

// slice is one EndpointSlice, reduced.
type slice struct {
	ports     []port
	endpoints []endpoint
}

type port struct {
	name   string
	number uint16
}

type endpoint struct {
	uid                health.UID
	addr               netip.Addr
	ready, terminating bool
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{
		services: map[types.NamespacedName]map[string]slice{},
		owners:   map[types.NamespacedName]types.NamespacedName{},
		listed:   map[health.UID]map[types.NamespacedName]int{},
		left:     map[health.UID]map[types.NamespacedName]time.Time{},
	}
}

// Apply takes in a slice that was added or changed, and returns the Services whose endpoints may have changed: the one it belongs
// to, and the one it belonged to before if its label has changed. A slice that belongs to no Service is not indexed.
func (x *Index) Apply(now time.Time, s *discovery.EndpointSlice) []types.NamespacedName {
	x.mu.Lock()
	defer x.mu.Unlock()
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	service, ok := ServiceOf(s)
	var changed []types.NamespacedName
	if owner, had := x.owners[name]; had && (!ok || owner != service) {
		x.remove(now, owner, name)
		changed = append(changed, owner)
	}
	if !ok {
		return changed
	}
	of := x.services[service]
	if of == nil {
		of = map[string]slice{}
		x.services[service] = of
	}
	before := of[s.Name]
	of[s.Name] = reduce(s)
	x.owners[name] = service
	x.count(service, of[s.Name], +1)
	x.count(service, before, -1)
	x.leave(now, service, before)
	return append(changed, service)
}

// Delete takes in that a slice was deleted, and returns the Services whose endpoints may have changed: the one it belonged to, or
// none. Only the slice's namespace and name are looked at.
func (x *Index) Delete(now time.Time, s *discovery.EndpointSlice) []types.NamespacedName {
	x.mu.Lock()
	defer x.mu.Unlock()
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	owner, had := x.owners[name]
	if !had {
		return nil
	}
	x.remove(now, owner, name)
	return []types.NamespacedName{owner}
}

// remove forgets a slice of service.
func (x *Index) remove(now time.Time, service, name types.NamespacedName) {
	before := x.services[service][name.Name]
	delete(x.services[service], name.Name)
	delete(x.owners, name)
	x.count(service, before, -1)
	x.leave(now, service, before)
	if len(x.services[service]) == 0 {
		delete(x.services, service)
	}
}

func (x *Index) count(service types.NamespacedName, s slice, by int) {
	seen := map[health.UID]bool{}
	for _, e := range s.endpoints {
		if e.uid == "" || seen[e.uid] {
			continue
		}
		seen[e.uid] = true
		of := x.listed[e.uid]
		if of == nil {
			of = map[types.NamespacedName]int{}
			x.listed[e.uid] = of
		}
		if of[service] += by; of[service] == 0 {
			delete(of, service)
		}
		if len(of) == 0 {
			delete(x.listed, e.uid)
		}
	}
}

// leave remembers which pods of the slice that was there before are no longer in the Service, and forgets the old ones.
func (x *Index) leave(now time.Time, service types.NamespacedName, before slice) {
	for _, e := range before.endpoints {
		if e.uid == "" || x.listed[e.uid][service] > 0 {
			continue
		}
		of := x.left[e.uid]
		if of == nil {
			of = map[types.NamespacedName]time.Time{}
			x.left[e.uid] = of
		}
		of[service] = now
		x.leaving = append(x.leaving, leaver{e.uid, service, now})
	}
	old := 0
	for old < len(x.leaving) && now.Sub(x.leaving[old].at) >= Linger {
		l := x.leaving[old]
		old++
		if x.left[l.uid][l.service].Equal(l.at) {
			delete(x.left[l.uid], l.service)
		}
		if len(x.left[l.uid]) == 0 {
			delete(x.left, l.uid)
		}
	}
	x.leaving = slices.Delete(x.leaving, 0, old)
}

// Endpoints returns the endpoints of one port of a Service, by the port's name, sorted. An empty name means the only port. An
// endpoint that several slices list is returned once: terminating if one of them says so, and else routable if one of them says that
// it is ready. An endpoint without a pod has the UID "".
func (x *Index) Endpoints(service types.NamespacedName, portName string) []health.Endpoint {
	x.mu.RLock()
	defer x.mu.RUnlock()
	byTarget := map[health.Target]health.Endpoint{}
	for _, s := range x.services[service] {
		number, ok := s.port(portName)
		if !ok {
			continue
		}
		for _, e := range s.endpoints {
			t := health.Target{UID: e.uid, Addr: netip.AddrPortFrom(e.addr, number)}
			have := byTarget[t]
			byTarget[t] = health.Endpoint{
				Target:      t,
				Routable:    have.Routable || e.ready,
				Terminating: have.Terminating || e.terminating,
			}
		}
	}
	all := make([]health.Endpoint, 0, len(byTarget))
	for _, e := range byTarget {
		e.Routable = e.Routable && !e.Terminating
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b health.Endpoint) int {
		if c := a.Addr.Compare(b.Addr); c != 0 {
			return c
		}
		return strings.Compare(string(a.UID), string(b.UID))
	})
	return all
}

// Listing is how one Service lists a pod: of several slices and addresses, the most favourable word.
type Listing struct {
	Service types.NamespacedName
	// Ready is what consumers route by. With publishNotReadyAddresses it is true whatever the pod's condition.
	Ready bool
	// Terminating: one slice says so.
	Terminating bool
	// Left says that the Service stopped listing the pod less than Linger ago.
	Left bool
}

// Pod returns the Services that list the pod at now, or did until less than Linger ago, sorted.
func (x *Index) Pod(now time.Time, uid health.UID) []Listing {
	x.mu.RLock()
	defer x.mu.RUnlock()
	listings := make([]Listing, 0, len(x.listed[uid]))
	for service, at := range x.left[uid] {
		if x.listed[uid][service] == 0 && now.Sub(at) < Linger {
			listings = append(listings, Listing{Service: service, Left: true})
		}
	}
	for service := range x.listed[uid] {
		l := Listing{Service: service}
		for _, s := range x.services[service] {
			for _, e := range s.endpoints {
				if e.uid == uid {
					l.Ready = l.Ready || e.ready
					l.Terminating = l.Terminating || e.terminating
				}
			}
		}
		listings = append(listings, l)
	}
	slices.SortFunc(listings, func(a, b Listing) int { return strings.Compare(a.Service.String(), b.Service.String()) })
	return listings
}

// Usable returns the pods of a Service that are ready and not terminating, sorted. An endpoint without a pod has the UID "".
func (x *Index) Usable(service types.NamespacedName) []health.UID {
	x.mu.RLock()
	defer x.mu.RUnlock()
	usable := map[health.UID]bool{}
	for _, s := range x.services[service] {
		for _, e := range s.endpoints {
			if e.ready && !e.terminating {
				usable[e.uid] = true
			}
		}
	}
	uids := make([]health.UID, 0, len(usable))
	for uid := range usable {
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	return uids
}

// ServiceOf returns the Service that a slice belongs to, by its label kubernetes.io/service-name.
func ServiceOf(s *discovery.EndpointSlice) (types.NamespacedName, bool) {
	name := s.Labels[discovery.LabelServiceName]
	return types.NamespacedName{Namespace: s.Namespace, Name: name}, name != ""
}

func (s slice) port(name string) (uint16, bool) {
	if name == "" && len(s.ports) == 1 {
		return s.ports[0].number, true
	}
	for _, p := range s.ports {
		if p.name == name {
			return p.number, true
		}
	}
	return 0, false
}

func reduce(s *discovery.EndpointSlice) slice {
	var r slice
	if s.AddressType == discovery.AddressTypeFQDN {
		return r
	}
	for _, p := range s.Ports {
		if p.Port == nil || *p.Port <= 0 || *p.Port > 65535 {
			continue
		}
		name := ""
		if p.Name != nil {
			name = *p.Name
		}
		r.ports = append(r.ports, port{name, uint16(*p.Port)})
	}
	for _, e := range s.Endpoints {
		var uid health.UID
		if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
			uid = health.UID(e.TargetRef.UID)
		}
		// A condition that is not given counts as ready, and as not terminating (discovery/v1, EndpointConditions).
		ready := e.Conditions.Ready == nil || *e.Conditions.Ready
		terminating := e.Conditions.Terminating != nil && *e.Conditions.Terminating
		// Consumers may use the first address only: the others mean the same pod (discovery/v1, Endpoint.Addresses).
		for _, text := range e.Addresses[:min(1, len(e.Addresses))] {
			if addr, err := netip.ParseAddr(text); err == nil {
				r.endpoints = append(r.endpoints, endpoint{uid, addr, ready, terminating})
			}
		}
	}
	return r
}

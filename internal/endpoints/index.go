package endpoints

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Index is what all EndpointSlices say together. Its methods may be called from any goroutine. It
// keeps the slices it is given: they must not be modified afterwards.
type Index struct {
	mu       sync.RWMutex
	slices   map[types.NamespacedName]*slice
	services map[types.NamespacedName]*service
	// pods holds how each Service lists a pod, or an address without a pod: see [At].
	pods map[health.UID][]standing
	// views are the ports that are followed, by Service.
	views map[types.NamespacedName][]*view

	// left holds when a Service stopped listing a pod, for Memory, and leaving the order in which
	// left grew, so that the old ones are found at once.
	left    map[health.UID]map[types.NamespacedName]time.Time
	leaving []leaver

	// unlisted is scratch: the pods that lost their last endpoint in a Service during one event.
	unlisted []leaver
}

// Linger is how late a gateway may learn that a Service no longer lists a pod.
const Linger = 10 * time.Second

// Memory is how long a pod that a Service no longer lists is still reported with it. A gateway may
// still have requests on it, and only its agent knows.
const Memory = 10 * time.Minute

type leaver struct {
	uid     health.UID
	service types.NamespacedName
	at      time.Time
}

type slice struct {
	last *discovery.EndpointSlice
	// service is the one it was in then. Its label may change, and the last that is heard of a
	// deleted slice may be old.
	service types.NamespacedName
	// numbers are those of the ports that are followed in service, in the order of its views. 0:
	// the slice has no such port.
	numbers []uint16
}

type service struct {
	slices map[types.NamespacedName]*slice
	// usable counts the endpoints of each pod that are ready and not terminating.
	usable map[health.UID]int
	// sorted are the pods in usable. Nil: to be computed.
	sorted []health.UID
}

// standing is how one Service lists a pod.
type standing struct {
	service types.NamespacedName
	counts
}

// counts is the number of endpoints that are listed, and of those that are ready and terminating.
type counts struct{ listed, ready, terminating int }

func (c *counts) count(e endpoint, by int) {
	c.listed += by
	if e.ready {
		c.ready += by
	}
	if e.terminating {
		c.terminating += by
	}
}

type endpoint struct {
	uid                health.UID
	addr               netip.Addr
	ready, terminating bool
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{
		slices:   map[types.NamespacedName]*slice{},
		services: map[types.NamespacedName]*service{},
		pods:     map[health.UID][]standing{},
		views:    map[types.NamespacedName][]*view{},
		left:     map[health.UID]map[types.NamespacedName]time.Time{},
	}
}

// Apply adds or replaces a slice, and returns the changes of the followed ports. A slice that
// belongs to no Service is not indexed.
func (x *Index) Apply(now time.Time, s *discovery.EndpointSlice) []PortChange {
	of, listed := ServiceOf(s)
	return x.take(now, types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s, of, listed)
}

// Delete removes a slice, and returns the changes of the followed ports. It uses only the slice's
// namespace and name.
func (x *Index) Delete(now time.Time, s *discovery.EndpointSlice) []PortChange {
	return x.take(now, types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, nil, types.NamespacedName{}, false)
}

// take makes s what is known of the slice if it is listed by a Service, or else nothing.
func (x *Index) take(now time.Time, name types.NamespacedName, s *discovery.EndpointSlice, of types.NamespacedName,
	listed bool) []PortChange {
	x.mu.Lock()
	defer x.mu.Unlock()
	have := x.slices[name]
	switch {
	case have == nil && !listed:
		return nil
	case have != nil && listed && have.service == of && samePorts(have.last, s):
		x.walk(have, s)
		have.last = s
	default:
		if have != nil {
			x.drop(name, have)
		}
		if listed {
			x.add(name, of, s)
		}
	}
	x.leave(now)
	return x.changes(of, have)
}

// add takes in a slice that was not there.
func (x *Index) add(name, of types.NamespacedName, s *discovery.EndpointSlice) {
	c := &slice{last: s, service: of}
	for _, v := range x.views[of] {
		c.numbers = append(c.numbers, v.number(s))
	}
	x.slices[name] = c
	v := x.services[of]
	if v == nil {
		v = &service{slices: map[types.NamespacedName]*slice{}, usable: map[health.UID]int{}}
		x.services[of] = v
	}
	v.slices[name] = c
	for i := range s.Endpoints {
		x.count(c, &s.Endpoints[i], +1)
	}
}

func (x *Index) drop(name types.NamespacedName, c *slice) {
	for i := range c.last.Endpoints {
		x.count(c, &c.last.Endpoints[i], -1)
	}
	delete(x.slices, name)
	of := x.services[c.service]
	delete(of.slices, name)
	if len(of.slices) == 0 {
		delete(x.services, c.service)
	}
}

// walk counts what differs between the slice as it was and s, which has the same ports, in their
// order. EndpointSlice controllers keep the order of what stays; where it is not kept, what is
// counted out and in again has not changed in the end.
func (x *Index) walk(c *slice, s *discovery.EndpointSlice) {
	if c.last == s {
		return
	}
	was, is := c.last.Endpoints, s.Endpoints
	if len(was) != len(is) {
		for len(was) > 0 && len(is) > 0 && same(s, &was[0], &is[0]) {
			was, is = was[1:], is[1:]
		}
		for len(was) > 0 && len(is) > 0 && same(s, &was[len(was)-1], &is[len(is)-1]) {
			was, is = was[:len(was)-1], is[:len(is)-1]
		}
	}
	n := min(len(was), len(is))
	for i := range n {
		if !same(s, &was[i], &is[i]) {
			x.count(c, &was[i], -1)
			x.count(c, &is[i], +1)
		}
	}
	for i := n; i < len(was); i++ {
		x.count(c, &was[i], -1)
	}
	for i := n; i < len(is); i++ {
		x.count(c, &is[i], +1)
	}
}

// count adds one endpoint of a slice, or takes it away.
func (x *Index) count(c *slice, of *discovery.Endpoint, by int) {
	e, ok := read(c.last, of)
	if !ok {
		return
	}
	if e.ready && !e.terminating {
		in := x.services[c.service]
		in.sorted = nil
		if in.usable[e.uid] += by; in.usable[e.uid] == 0 {
			delete(in.usable, e.uid)
		}
	}
	for i, v := range x.views[c.service] {
		if n := c.numbers[i]; n != 0 {
			v.count(e, n, by)
		}
	}
	if e.uid == "" {
		e.uid = At(e.addr)
	}
	all := x.pods[e.uid]
	i := slices.IndexFunc(all, func(s standing) bool { return s.service == c.service })
	if i < 0 {
		i = len(all)
		all = append(all, standing{service: c.service})
		x.pods[e.uid] = all
	}
	if all[i].count(e, by); all[i].listed == 0 {
		x.unlisted = append(x.unlisted, leaver{uid: e.uid, service: c.service})
	}
}

// leave remembers which pods lost their last endpoint in a Service, and forgets the old ones.
func (x *Index) leave(now time.Time) {
	for _, l := range x.unlisted {
		all := x.pods[l.uid]
		i := slices.IndexFunc(all, func(s standing) bool { return s.service == l.service })
		if i < 0 || all[i].listed > 0 {
			continue
		}
		if all = slices.Delete(all, i, i+1); len(all) > 0 {
			x.pods[l.uid] = all
		} else {
			delete(x.pods, l.uid)
		}
		of := x.left[l.uid]
		if of == nil {
			of = map[types.NamespacedName]time.Time{}
			x.left[l.uid] = of
		}
		of[l.service] = now
		x.leaving = append(x.leaving, leaver{l.uid, l.service, now})
	}
	x.unlisted = x.unlisted[:0]
	old := 0
	for old < len(x.leaving) && now.Sub(x.leaving[old].at) >= Memory {
		l := x.leaving[old]
		old++
		if x.left[l.uid][l.service].Equal(l.at) {
			delete(x.left[l.uid], l.service)
		}
		if len(x.left[l.uid]) == 0 {
			delete(x.left, l.uid)
		}
	}
	x.leaving = x.leaving[old:] // moving the rest would cost each event as much as there are
}

// At returns what stands for the UID in [Index.Pod] where an endpoint names an address and no pod:
// not every controller that writes EndpointSlices sets their targetRef.
func At(addr netip.Addr) health.UID { return health.UID("at " + addr.Unmap().String()) }

// Listing is how one Service lists a pod, merged over its slices and addresses.
type Listing struct {
	Service types.NamespacedName
	// Ready reports whether one endpoint of the pod is ready, which consumers route by. With
	// publishNotReadyAddresses it is true whatever the pod's condition.
	Ready bool
	// Terminating reports whether one endpoint of the pod is terminating.
	Terminating bool
	// LeftAt is when the Service stopped listing the pod, less than Memory ago. Zero: it lists it.
	LeftAt time.Time
	// Unnamed: the Service lists the pod's address, and does not name the pod.
	Unnamed bool
}

// Pod returns the Services of the pod's namespace that list the pod at now, or did until less than
// Memory ago, sorted. A Service of another namespace does not count: its EndpointSlices may name
// any UID.
func (x *Index) Pod(now time.Time, namespace string, uid health.UID) []Listing {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := x.pods[uid]
	listings := make([]Listing, 0, len(all))
	for _, s := range all {
		if s.service.Namespace != namespace {
			continue
		}
		listings = append(listings, Listing{Service: s.service, Ready: s.ready > 0, Terminating: s.terminating > 0})
	}
	for service, at := range x.left[uid] {
		if service.Namespace == namespace && now.Sub(at) < Memory &&
			!slices.ContainsFunc(all, func(s standing) bool { return s.service == service }) {
			listings = append(listings, Listing{Service: service, LeftAt: at})
		}
	}
	slices.SortFunc(listings, func(a, b Listing) int { return strings.Compare(a.Service.String(), b.Service.String()) })
	return listings
}

// Usable returns the pods of a Service that are ready and not terminating, sorted. All its
// endpoints without a pod are one entry, "". The slice is shared and must not be modified.
func (x *Index) Usable(service types.NamespacedName) []health.UID {
	x.mu.Lock()
	defer x.mu.Unlock()
	of := x.services[service]
	if of == nil {
		return []health.UID{}
	}
	if of.sorted == nil {
		of.sorted = slices.AppendSeq(make([]health.UID, 0, len(of.usable)), maps.Keys(of.usable))
		slices.Sort(of.sorted)
	}
	return slices.Clip(of.sorted)
}

// ServiceOf returns the Service that a slice belongs to, by its label kubernetes.io/service-name.
func ServiceOf(s *discovery.EndpointSlice) (types.NamespacedName, bool) {
	name := s.Labels[discovery.LabelServiceName]
	return types.NamespacedName{Namespace: s.Namespace, Name: name}, name != ""
}

// read reduces one endpoint of a slice. ok is false if it has no usable address.
func read(s *discovery.EndpointSlice, e *discovery.Endpoint) (r endpoint, ok bool) {
	if s.AddressType == discovery.AddressTypeFQDN || len(e.Addresses) == 0 {
		return r, false
	}
	// Consumers may use the first address only: the others mean the same pod (discovery/v1,
	// Endpoint.Addresses).
	addr, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return r, false
	}
	return endpoint{uid: PodOf(s, e), addr: addr, ready: isReady(e), terminating: isTerminating(e)}, true
}

// PodOf returns the UID of the pod behind an endpoint, or "" if there is none in the namespace of
// the slice.
func PodOf(s *discovery.EndpointSlice, e *discovery.Endpoint) health.UID {
	ref := e.TargetRef
	if ref == nil || ref.Kind != "Pod" || ref.Namespace != "" && ref.Namespace != s.Namespace {
		return ""
	}
	return health.UID(ref.UID)
}

// isReady and isTerminating: a condition that is not given counts as ready, and as not terminating
// (discovery/v1, EndpointConditions).
func isReady(e *discovery.Endpoint) bool       { return ptr.Deref(e.Conditions.Ready, true) }
func isTerminating(e *discovery.Endpoint) bool { return ptr.Deref(e.Conditions.Terminating, false) }

// same reports whether two endpoints of a slice mean the same to the index.
func same(s *discovery.EndpointSlice, a, b *discovery.Endpoint) bool {
	if len(a.Addresses) == 0 || len(b.Addresses) == 0 {
		return len(a.Addresses) == len(b.Addresses)
	}
	return a.Addresses[0] == b.Addresses[0] && PodOf(s, a) == PodOf(s, b) && isReady(a) == isReady(b) &&
		isTerminating(a) == isTerminating(b)
}

// samePorts reports whether two versions of a slice have the same ports and address type.
func samePorts(a, b *discovery.EndpointSlice) bool {
	return a.AddressType == b.AddressType && slices.EqualFunc(a.Ports, b.Ports, func(a, b discovery.EndpointPort) bool {
		return ptr.Equal(a.Port, b.Port) && ptr.Equal(a.Name, b.Name)
	})
}

func compare(a, b health.Target) int {
	return cmp.Or(a.Addr.Compare(b.Addr), strings.Compare(string(a.UID), string(b.UID)))
}

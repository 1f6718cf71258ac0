package health

import "time"

// Change is how one endpoint of a pool differs from what was said before.
type Change struct {
	Endpoint
	// Gone says that EndpointSlices no longer list it.
	Gone bool
}

// Change applies a difference to what EndpointSlices say of pool: what is not mentioned stays. It is [Set.Replace] for callers who know
// what has changed.
func (s *Set) Change(now time.Time, pool Pool, changes []Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range changes {
		if c.Terminating && c.UID != "" {
			s.kill(now, c.UID)
		}
		r := s.pools[pool][c.Target]
		routable := c.Routable && !c.Terminating && !c.Gone
		if r == nil {
			if !routable {
				continue
			}
			r = s.record(now, Key{pool, c.Target})
		}
		r.claimed = routable
		s.dropIfDone(r)
	}
}

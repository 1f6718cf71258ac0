package health

import (
	"slices"
	"time"
)

// TargetState is all that the set knows of one key, for people.
type TargetState struct {
	Key
	// Claimed says that EndpointSlices want traffic there.
	Claimed bool
	// Want is what is asked of the gateway.
	Want Want
	// Read says that Seen was read in the gateway's present generation, at SeenAt. Else it is no evidence.
	Read   bool
	Seen   Seen
	SeenAt time.Time
	// Done says that Seen shows Want to be true.
	Done bool
	// Dead says that the pod is terminating or gone, Buried that a coordinator holds a tombstone on it, and Kept that it stays routed nevertheless,
	// because the gateway routes to no other of its pool.
	Dead, Buried, Kept bool
	// Since is when the drain began, Tombstone how far it has come, and TombstoneSince when it came there. Only if Dead or Buried.
	Since          time.Time
	Tombstone      State
	TombstoneSince time.Time
}

// Targets returns every target that the set knows, sorted by pool, address and UID. It walks over all: for people, not for each request.
func (s *Set) Targets() []TargetState {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []TargetState
	for pool, records := range s.pools {
		kept := s.kept(pool)
		for _, r := range records {
			p := s.pods[r.key.Target.UID]
			want := s.want(r, kept)
			t := TargetState{
				Key: r.key, Claimed: r.claimed, Want: want, Done: s.done(r, want),
				Read: !r.seenAt.IsZero() && r.seenIn == s.generation, Seen: r.seen, SeenAt: r.seenAt,
				Dead: p.dead, Buried: len(p.holders) > 0, Kept: r == kept,
			}
			if p.buried() {
				t.Since, t.Tombstone, t.TombstoneSince = p.since, p.state, p.stateAt
			}
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b TargetState) int { return compareKeys(a.Key, b.Key) })
	return all
}

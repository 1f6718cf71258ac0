package node

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// addresses are those of a node's pods. Each is given to one pod at a time, unless it is forced.
type addresses struct {
	pods netip.Prefix
	rest time.Duration

	mu    sync.Mutex
	next  netip.Addr // never given so far, nor any after it
	used  map[netip.Addr]int
	freed []freedAddress // oldest first
}

type freedAddress struct {
	address netip.Addr
	at      time.Time
}

func newAddresses(pods netip.Prefix, rest time.Duration) *addresses {
	return &addresses{
		pods: pods, rest: rest,
		next: pods.Addr().Next().Next(), // the first is the network's, the second the node's
		used: map[netip.Addr]int{},
	}
}

// take returns an address for a pod: forced if that is valid, else a new one, else the one that has
// rested longest, if that is long enough.
func (a *addresses) take(now time.Time, forced netip.Addr) (netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if forced.IsValid() {
		a.freed = slices.DeleteFunc(a.freed, func(f freedAddress) bool { return f.address == forced })
		a.used[forced]++
		return forced, nil
	}
	for i := len(a.freed) - 1; a.rest < 0 && i >= 0; i-- {
		if address := a.freed[i].address; a.used[address] == 0 {
			a.freed = append(a.freed[:i], a.freed[i+1:]...)
			a.used[address]++
			return address, nil
		}
	}
	for ; a.pods.Contains(a.next.Next()); a.next = a.next.Next() { // the last one is for broadcast
		if a.used[a.next] == 0 {
			address := a.next
			a.used[address]++
			a.next = a.next.Next()
			return address, nil
		}
	}
	for i, f := range a.freed {
		if now.Sub(f.at) < a.rest {
			break
		}
		if a.used[f.address] == 0 {
			a.freed = append(a.freed[:i], a.freed[i+1:]...)
			a.used[f.address]++
			return f.address, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("no address left in %s, or all freed less than %s ago", a.pods, a.rest)
}

// free gives an address back.
func (a *addresses) free(now time.Time, address netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used[address]--; a.used[address] > 0 {
		return
	}
	delete(a.used, address)
	if a.pods.Contains(address) && address.Less(a.next) {
		a.freed = append(a.freed, freedAddress{address, now})
	}
}

package serve

import (
	"sync"

	"golang.org/x/time/rate"
)

// maxRates bounds the limiters that are kept.
const maxRates = 20_000

// Rates has a rate limiter for each key, so that one caller costs others little. Safe for
// concurrent use.
type Rates[K comparable] struct {
	limit rate.Limit
	burst int
	mu    sync.Mutex
	of    map[K]*rate.Limiter
}

// NewRates returns Rates that allow burst events of each key at once, and then limit a second.
func NewRates[K comparable](limit rate.Limit, burst int) *Rates[K] {
	return &Rates[K]{limit: limit, burst: burst, of: map[K]*rate.Limiter{}}
}

// Of returns the limiter of key. When there are too many, all begin again.
func (r *Rates[K]) Of(key K) *rate.Limiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of[key] == nil {
		if len(r.of) >= maxRates {
			clear(r.of)
		}
		r.of[key] = rate.NewLimiter(r.limit, r.burst)
	}
	return r.of[key]
}

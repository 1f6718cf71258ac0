package exclusion

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	// lapseEvery is how often expiries are looked at.
	lapseEvery = time.Second
	// lapseSpread is over how long agents whose expiries end together spread their question to the
	// API server.
	lapseSpread = 5 * time.Second
	// freshRetryFirst and maxFreshRetry bound the pause after one that failed.
	freshRetryFirst = time.Second
	maxFreshRetry   = 30 * time.Second
)

// Expire ends expiries that no coordinator renews, until ctx is done. fresh returns nil if what the
// set knows of EndpointSlices is not older than the call. Time alone lets no pod back in: an expiry
// that is over stands until EndpointSlices are known to be fresh, because when all coordinators are
// away the API server may be, too, and the pod may be dead by now. An outage of both keeps the pod
// out as long as it lasts; the last target of a pool is kept in any case.
func (t *Exclusions) Expire(ctx context.Context, fresh func(context.Context) error) error {
	ticker := time.NewTicker(lapseEvery)
	defer ticker.Stop()
	var next time.Time // when the API server is asked; zero: nothing has expired
	pause, failing := freshRetryFirst, ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		now := time.Now()
		expired := t.expired(now)
		switch {
		case len(expired) == 0:
			next, pause, failing = time.Time{}, freshRetryFirst, ""
		case next.IsZero():
			t.log.Warn("no coordinator has renewed these exclusions: they end when EndpointSlices are known to be "+
				"fresh", "uids", expired)
			next = now.Add(rand.N(lapseSpread))
			continue
		case now.Before(next):
			continue
		default:
			if err := fresh(ctx); err != nil {
				next = time.Now().Add(pause/2 + rand.N(pause))
				pause = min(2*pause, maxFreshRetry)
				if text := err.Error(); text != failing && ctx.Err() == nil {
					t.log.Warn("EndpointSlices may be old: exclusions stand although their expiries are over",
						"uids", expired, "error", err)
					failing = text
				}
				continue
			}
		}
		// As of then: what has expired since was not asked about.
		if uids := t.lapse(now); len(uids) > 0 {
			t.log.Warn("exclusions lapsed: no coordinator has renewed them", "uids", uids)
			t.wake()
		}
	}
}

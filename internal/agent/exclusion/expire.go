package exclusion

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	// LapseEvery is how often expiries are looked at.
	LapseEvery = time.Second
	// lapseSpread is over how long agents whose expiries end together spread their question to the
	// API server.
	lapseSpread = 5 * time.Second
	// freshRetryFirst and maxFreshRetry bound the pause after one that failed.
	freshRetryFirst = time.Second
	maxFreshRetry   = 30 * time.Second
)

// Expire ends expiries that no coordinator renews, until ctx is done. fresh returns nil if what the
// set knows of EndpointSlices is not older than the call.
func (t *Exclusions) Expire(ctx context.Context, fresh func(context.Context) error) error {
	ticker := time.NewTicker(LapseEvery)
	defer ticker.Stop()
	l := &Lapses{Exclusions: t, Rand: rand.N[time.Duration]}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if now := time.Now(); l.Due(now) {
			err := fresh(ctx)
			if ctx.Err() == nil {
				l.Answered(now, time.Now(), err)
			}
		}
	}
}

// Lapses decides when expiries end that no coordinator renews. Time alone lets no pod back in: an
// expiry that is over stands until EndpointSlices are known to be fresh, because when all
// coordinators are away the API server may be, too, and the pod may be dead by now. An outage of
// both keeps the pod out as long as it lasts; the last target of a pool is kept in any case.
type Lapses struct {
	*Exclusions
	// Rand returns a random pause of less than most.
	Rand func(most time.Duration) time.Duration

	// next is when the API server is asked. The zero time: nothing has expired.
	next    time.Time
	pause   time.Duration
	failing string
}

// Due reports whether it is to be found out now that EndpointSlices are fresh: call Answered then.
// It is to be called each LapseEvery.
func (l *Lapses) Due(now time.Time) bool {
	expired := l.journal.Expired(now)
	switch {
	case len(expired) == 0:
		l.next, l.pause, l.failing = time.Time{}, 0, ""
		l.lapse(now)
	case l.next.IsZero():
		l.log.Warn("no coordinator has renewed these exclusions: they end when EndpointSlices are known to be fresh",
			"uids", expired)
		l.next = now.Add(l.Rand(lapseSpread))
	default:
		return !now.Before(l.next)
	}
	return false
}

// Answered ends the expiries that were over when Due was called, at asked. An error says that
// EndpointSlices may be older than that.
func (l *Lapses) Answered(asked, now time.Time, err error) {
	if err == nil {
		l.lapse(asked) // what has expired since was not asked about
		return
	}
	pause := max(l.pause, freshRetryFirst)
	l.next, l.pause = now.Add(pause/2+l.Rand(pause)), min(2*pause, maxFreshRetry)
	if text := err.Error(); text != l.failing {
		l.log.Warn("EndpointSlices may be old: exclusions stand although their expiries are over", "uids",
			l.journal.Expired(now), "error", err)
		l.failing = text
	}
}

// lapse ends the expiries that are over at now. Pods that are routed again are, where their pool
// has a check, after a probe that succeeds. EndpointSlices are known to be as fresh as now.
func (t *Exclusions) lapse(now time.Time) {
	t.both.Lock()
	uids := t.set.Lapse(now)
	t.set.Refreshed(now)
	t.journal.Lapse(now)
	t.both.Unlock()
	if len(uids) > 0 {
		t.log.Warn("exclusions lapsed: no coordinator has renewed them", "uids", uids)
		t.wake()
	}
}

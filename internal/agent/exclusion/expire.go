package exclusion

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// LapseEvery is how often expiries are checked.
	LapseEvery = time.Second
	// lapseSpread is the period over which agents whose expiries end together spread their lists
	// from the API server.
	lapseSpread = 5 * time.Second
	// freshRetryFirst and maxFreshRetry bound the pause after a list that failed.
	freshRetryFirst = time.Second
	maxFreshRetry   = 30 * time.Second
)

// Expire ends expiries that no coordinator renews, until ctx is done, and has EndpointSlices read
// where [Exclusions.Follow] needs them. fresh returns nil if the
// EndpointSlices in the set are not older than the call.
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

// Lapses decides when to end expired exclusions. Time alone does not readmit a pod: an expired
// exclusion stays until EndpointSlices are known to be fresh, because when all coordinators are
// away the API server may be, too, and the pod may be deleted by now. An outage of both keeps the
// pod out for as long as it lasts. The last target of a pool is kept in any case.
type Lapses struct {
	*Exclusions
	// Rand returns a random pause of less than most.
	Rand func(most time.Duration) time.Duration

	// next is when to ask the API server. The zero time: nothing has expired.
	next    time.Time
	pause   time.Duration
	failing string
}

// Due reports whether the caller has to check now whether EndpointSlices are fresh, and then to
// call Answered. Call Due each LapseEvery.
func (l *Lapses) Due(now time.Time) bool {
	expired := l.journal.Expired(now)
	switch {
	case len(expired) == 0 && l.anyUnheard():
		return !now.Before(l.next)
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

// Answered ends the exclusions that had expired at asked, when Due was called. With an error it
// ends none, because EndpointSlices may be older than that.
func (l *Lapses) Answered(asked, now time.Time, err error) {
	if err == nil {
		l.lapse(asked) // not those that have expired since
		l.heard(asked)
		return
	}
	pause := max(l.pause, freshRetryFirst)
	l.next, l.pause = now.Add(pause/2+l.Rand(pause)), min(2*pause, maxFreshRetry)
	if text := err.Error(); text != l.failing {
		l.log.Warn("EndpointSlices may be old: exclusions stand although their expiries are over, and pods that are "+
			"not known yet are not acknowledged", "expired", l.journal.Expired(now), "error", err)
		l.failing = text
	}
}

// anyUnheard reports whether the gateway may know targets of an exclusion that this agent has not
// heard of.
func (t *Exclusions) anyUnheard() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.follows && slices.ContainsFunc(t.set.Exclusions(), t.unheard)
}

// heard records that all EndpointSlices are known as of a time.
func (t *Exclusions) heard(at time.Time) {
	t.mu.Lock()
	t.freshAt = at
	t.mu.Unlock()
	t.wake()
}

// lapse ends the exclusions that have expired at now. Their pods are routed again, where their pool
// has a check after a successful probe. The caller knows that EndpointSlices are at least as fresh
// as now.
func (t *Exclusions) lapse(now time.Time) {
	t.both.Lock()
	uids := t.set.Lapse(now)
	t.journal.Lapse(now)
	t.both.Unlock()
	if len(uids) > 0 {
		t.log.Warn("exclusions lapsed: no coordinator has renewed them", "uids", uids)
		t.wake()
	}
}
